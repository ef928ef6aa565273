use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::store::{
    Address, ClaimOutcome, ClaimRequest, EntryCounts, EntryFilter, EntryPage, ErrorKind, Fence, Guarantees, Lease,
    ListCursor, SettleOutcome, Settlement, StoreAdmin, StoreError, StoreFuture, SweepResult,
};

use super::{StoreAnswer, StoreCallKind, store_around};

/// How often a call is sent before its error is passed on.
const MAX_ATTEMPTS: u32 = 64;

/// A store that sends the same call again, as every caller may, until it is answered.
#[derive(Debug)]
pub struct RetryingStore<S> {
    inner: S,
}

impl<S> RetryingStore<S> {
    /// Around `inner`.
    pub fn new(inner: S) -> Self {
        Self { inner }
    }

    /// What it is around.
    pub fn inner(&self) -> &S {
        &self.inner
    }

    async fn around<'a, T: StoreAnswer>(
        &'a self, _: StoreCallKind, make: impl Fn() -> StoreFuture<'a, T> + Send,
    ) -> Result<T, StoreError> {
        for _ in 1..MAX_ATTEMPTS {
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

store_around!(RetryingStore);
