use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::store::{
    Address, ClaimOutcome, ClaimRequest, EntryCounts, EntryFilter, EntryPage, ErrorKind, Fence, Guarantees, Lease,
    ListCursor, SettleOutcome, Settlement, StoreAdmin, StoreError, StoreFuture, SweepResult,
};

use parking_lot::Mutex;

use super::{StoreAnswer, StoreCallKind, injected_error, store_around};

/// A set of calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallFilter {
    /// Claims.
    Claim,
    /// Extensions of a lease.
    Extend,
    /// Settlements.
    Settle,
    /// Changes by operators.
    AdminChange,
    /// All calls, including the operators'.
    All,
}

/// A store that fails on demand.
///
/// ```
/// # use ibid::store::{ErrorKind, Memory};
/// # use ibid_testkit::wrappers::{CallFilter, FailingStore};
/// let store = FailingStore::new(Memory::default());
/// store.fail(CallFilter::Settle, ErrorKind::NotApplied); // down while recording
/// # store.lose_answers(CallFilter::Claim);
/// store.heal();
/// ```
#[derive(Debug)]
pub struct FailingStore<S> {
    inner: S,
    /// The latest rule for a call counts. The test writes it, every call reads it.
    faults: Mutex<Vec<(CallFilter, InjectedFault)>>,
}

#[derive(Debug, Clone, Copy)]
enum InjectedFault {
    Fail(ErrorKind),
    LoseAnswer,
}

impl CallFilter {
    pub(super) fn matches(self, call: StoreCallKind) -> bool {
        match self {
            Self::Claim => call == StoreCallKind::Claim,
            Self::Extend => call == StoreCallKind::Extend,
            Self::Settle => call == StoreCallKind::Settle,
            Self::AdminChange => call == StoreCallKind::AdminChange,
            Self::All => true,
        }
    }
}

impl<S> FailingStore<S> {
    /// Wraps `inner` without faults.
    pub fn new(inner: S) -> Self {
        Self { inner, faults: Mutex::default() }
    }

    /// Makes these calls fail with this error, without applying them.
    pub fn fail(&self, calls: CallFilter, kind: ErrorKind) {
        self.faults.lock().push((calls, InjectedFault::Fail(kind)));
    }

    /// Applies these calls and loses their outcomes ([`ErrorKind::Ambiguous`]).
    pub fn lose_answers(&self, calls: CallFilter) {
        self.faults.lock().push((calls, InjectedFault::LoseAnswer));
    }

    /// Removes all faults.
    pub fn heal(&self) {
        self.faults.lock().clear();
    }

    /// The wrapped store, which has the real state.
    pub fn inner(&self) -> &S {
        &self.inner
    }

    async fn around<'a, T: StoreAnswer>(
        &'a self, call: StoreCallKind, make: impl Fn() -> StoreFuture<'a, T> + Send,
    ) -> Result<T, StoreError> {
        let order = self.faults.lock().iter().rfind(|(calls, _)| calls.matches(call)).map(|(_, order)| *order);
        match order {
            None => make().await,
            Some(InjectedFault::Fail(kind)) => Err(injected_error(kind, "switched off by the test")),
            Some(InjectedFault::LoseAnswer) => {
                make().await?;
                Err(injected_error(ErrorKind::Ambiguous, "its answer was lost by the test"))
            }
        }
    }
}

store_around!(FailingStore);
