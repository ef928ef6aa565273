use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::store::{
    Address, Ask, Claim, Counts, Cursor, End, ErrorKind, Fence, Filter, Held, Lease, Operators, Page, Promise,
    StoreError, StoreFuture, Swept,
};

use super::{Answer, Call, store_around};

/// How often a call is sent before its error is passed on.
const TRIES: u32 = 64;

/// A store that sends the same call again, as every caller may, until it is answered.
#[derive(Debug)]
pub struct Resending<S> {
    inner: S,
}

impl<S> Resending<S> {
    /// Around `inner`.
    pub fn new(inner: S) -> Self {
        Self { inner }
    }

    /// What it is around.
    pub fn inner(&self) -> &S {
        &self.inner
    }

    async fn around<'a, T: Answer>(
        &'a self, _: Call, make: impl Fn() -> StoreFuture<'a, T> + Send,
    ) -> Result<T, StoreError> {
        for _ in 1..TRIES {
            match make().await {
                Err(error) if matches!(error.kind, ErrorKind::Ambiguous | ErrorKind::NotApplied) => {
                    tokio::task::yield_now().await;
                }
                answered => return answered,
            }
        }
        make().await
    }
}

store_around!(Resending);
