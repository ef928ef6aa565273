use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::store::{
    Address, ClaimOutcome, ClaimRequest, EntryCounts, EntryFilter, EntryPage, ErrorKind, Fence, Guarantees, Lease,
    ListCursor, SettleOutcome, Settlement, StoreAdmin, StoreError, StoreFuture, SweepResult,
};

use parking_lot::Mutex;

use super::{StoreAnswer, StoreCallKind, injected_error, store_around};

/// Which calls are meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallFilter {
    /// Claims.
    Claim,
    /// Heartbeats.
    Extend,
    /// Ends.
    Settle,
    /// What operators change.
    AdminChange,
    /// Every call, operators' ones included.
    All,
}

/// A store that fails while it is told to.
///
/// ```
/// # use ibid::store::{ErrorKind, Memory};
/// # use ibid_testkit::wrappers::{Calls, FailsOnDemand};
/// let store = FailsOnDemand::new(Memory::default());
/// store.fail(Calls::Settle, ErrorKind::NotApplied); // down while recording
/// # store.lose(Calls::Claim);
/// store.heal();
/// ```
#[derive(Debug)]
pub struct FailingStore<S> {
    inner: S,
    /// The latest that concerns a call counts. Written by the test, read by every call.
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
    /// Around `inner`, which answers until told otherwise.
    pub fn new(inner: S) -> Self {
        Self { inner, faults: Mutex::default() }
    }

    /// From now on such calls are not applied and fail so.
    pub fn fail(&self, calls: CallFilter, kind: ErrorKind) {
        self.faults.lock().push((calls, InjectedFault::Fail(kind)));
    }

    /// From now on such calls are applied, and their answers lost ([`ErrorKind::Ambiguous`]).
    pub fn lose_answers(&self, calls: CallFilter) {
        self.faults.lock().push((calls, InjectedFault::LoseAnswer));
    }

    /// From now on every call is answered.
    pub fn heal(&self) {
        self.faults.lock().clear();
    }

    /// What it is around: what is really there.
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
