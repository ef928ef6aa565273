use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::store::{
    Address, ClaimOutcome, ClaimRequest, EntryCounts, EntryFilter, EntryPage, Fence, Guarantees, Lease, ListCursor,
    SettleOutcome, Settlement, StoreAdmin, StoreError, StoreFuture, SweepResult,
};

use parking_lot::Mutex;

use super::{CallFilter, StoreAnswer, StoreCallKind, sleep_unless_zero, store_around};

/// A store that delays calls before they are applied, and their outcomes afterwards.
///
/// A call that is dropped during the first delay is not applied; one that is dropped during the second is.
#[derive(Debug)]
pub struct DelayedStore<S> {
    inner: S,
    /// The latest rule for a call counts. The test writes it, every call reads it.
    delays: Mutex<Vec<(CallFilter, Duration, Duration)>>,
}

impl<S> DelayedStore<S> {
    /// Wraps `inner` without delays.
    pub fn new(inner: S) -> Self {
        Self { inner, delays: Mutex::default() }
    }

    /// Delays these calls by `before` until they are applied, and their outcomes by `after`.
    pub fn delay(&self, calls: CallFilter, before: Duration, after: Duration) {
        self.delays.lock().push((calls, before, after));
    }

    /// Removes all delays.
    pub fn heal(&self) {
        self.delays.lock().clear();
    }

    /// The wrapped store.
    pub fn inner(&self) -> &S {
        &self.inner
    }

    async fn around<'a, T: StoreAnswer>(
        &'a self, call: StoreCallKind, make: impl Fn() -> StoreFuture<'a, T> + Send,
    ) -> Result<T, StoreError> {
        let delay = self.delays.lock().iter().rfind(|(calls, ..)| calls.matches(call)).copied();
        let (_, before, after) = delay.unwrap_or((CallFilter::All, Duration::ZERO, Duration::ZERO));
        sleep_unless_zero(before).await;
        let answered = make().await;
        sleep_unless_zero(after).await;
        answered
    }
}

store_around!(DelayedStore);
