use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::store::{
    Address, ClaimOutcome, ClaimRequest, EntryCounts, EntryFilter, EntryPage, ErrorKind, Fence, Guarantees, Lease,
    ListCursor, SettleOutcome, Settlement, StoreAdmin, StoreError, StoreFuture, SweepResult,
};

use super::{StoreAnswer, StoreCallKind, store_around};

/// Maximum number of attempts before the error is returned.
const MAX_ATTEMPTS: u32 = 64;

/// A store that repeats a call, as every caller may, until it gets an outcome.
#[derive(Debug)]
pub struct RetryingStore<S> {
    inner: S,
}

impl<S> RetryingStore<S> {
    /// Wraps `inner`.
    pub fn new(inner: S) -> Self {
        Self { inner }
    }

    /// The wrapped store.
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
