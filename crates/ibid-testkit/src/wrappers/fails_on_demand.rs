use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::store::{
    Address, Ask, Claim, Counts, Cursor, End, ErrorKind, Fence, Filter, Held, Lease, Operators, Page, Promise,
    StoreError, StoreFuture, Swept,
};

use parking_lot::Mutex;

use super::{Answer, Call, failure, store_around};

/// Which calls are meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Calls {
    /// Claims.
    Claim,
    /// Heartbeats.
    Extend,
    /// Ends.
    Settle,
    /// What operators change.
    Change,
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
pub struct FailsOnDemand<S> {
    inner: S,
    /// The latest that concerns a call counts. Written by the test, read by every call.
    orders: Mutex<Vec<(Calls, Order)>>,
}

#[derive(Debug, Clone, Copy)]
enum Order {
    Fail(ErrorKind),
    Lose,
}

impl Calls {
    pub(super) fn concern(self, call: Call) -> bool {
        match self {
            Self::Claim => call == Call::Claim,
            Self::Extend => call == Call::Extend,
            Self::Settle => call == Call::Settle,
            Self::Change => call == Call::Change,
            Self::All => true,
        }
    }
}

impl<S> FailsOnDemand<S> {
    /// Around `inner`, which answers until told otherwise.
    pub fn new(inner: S) -> Self {
        Self { inner, orders: Mutex::default() }
    }

    /// From now on such calls are not applied and fail so.
    pub fn fail(&self, calls: Calls, kind: ErrorKind) {
        self.orders.lock().push((calls, Order::Fail(kind)));
    }

    /// From now on such calls are applied, and their answers lost ([`ErrorKind::Ambiguous`]).
    pub fn lose(&self, calls: Calls) {
        self.orders.lock().push((calls, Order::Lose));
    }

    /// From now on every call is answered.
    pub fn heal(&self) {
        self.orders.lock().clear();
    }

    /// What it is around: what is really there.
    pub fn inner(&self) -> &S {
        &self.inner
    }

    async fn around<'a, T: Answer>(
        &'a self, call: Call, make: impl Fn() -> StoreFuture<'a, T> + Send,
    ) -> Result<T, StoreError> {
        let order = self.orders.lock().iter().rfind(|(calls, _)| calls.concern(call)).map(|(_, order)| *order);
        match order {
            None => make().await,
            Some(Order::Fail(kind)) => Err(failure(kind, "switched off by the test")),
            Some(Order::Lose) => {
                make().await?;
                Err(failure(ErrorKind::Ambiguous, "its answer was lost by the test"))
            }
        }
    }
}

store_around!(FailsOnDemand);
