use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::store::{
    Address, ClaimOutcome, ClaimRequest, EntryCounts, EntryFilter, EntryPage, Fence, Guarantees, Lease, ListCursor,
    SettleOutcome, Settlement, StoreAdmin, StoreError, StoreFuture, SweepResult,
};

use parking_lot::Mutex;

use super::{CallFilter, StoreAnswer, StoreCallKind, sleep_unless_zero, store_around};

/// A store that takes its time: before a call is applied, and before its answer arrives.
///
/// A call that is dropped during the first delay was not applied, one that is dropped during the second was.
#[derive(Debug)]
pub struct DelayedStore<S> {
    inner: S,
    /// The latest that concerns a call counts. Written by the test, read by every call.
    delays: Mutex<Vec<(CallFilter, Duration, Duration)>>,
}

impl<S> DelayedStore<S> {
    /// Around `inner`, which answers at once until told otherwise.
    pub fn new(inner: S) -> Self {
        Self { inner, delays: Mutex::default() }
    }

    /// From now on such calls are applied only after `before`, and answered `after` that.
    pub fn delay(&self, calls: CallFilter, before: Duration, after: Duration) {
        self.delays.lock().push((calls, before, after));
    }

    /// From now on every call is answered at once.
    pub fn heal(&self) {
        self.delays.lock().clear();
    }

    /// What it is around.
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
