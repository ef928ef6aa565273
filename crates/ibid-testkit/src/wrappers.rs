//! Stores around a store that make a good one misbehave, or put up with one that does.
//!
//! Invariant: none of them decides anything. A call is passed on as it came, not at all, or more than once; an answer is
//! passed on as it came, late, or replaced by an error that says truly what the caller may assume.
//!
//! ```
//! use ibid::store::{ErrorKind, Memory, Store};
//! use ibid_testkit::wrappers::{Calls, FailsOnDemand};
//!
//! # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
//! let store = FailsOnDemand::new(Memory::default());
//! store.fail(Calls::All, ErrorKind::NotApplied);
//! assert_eq!(store.sweep(1).await.unwrap_err().kind, ErrorKind::NotApplied);
//! store.heal();
//! assert!(store.sweep(1).await.is_ok());
//! # });
//! ```

use std::time::Duration;

use ibid::store::{ClaimOutcome, EntryCounts, EntryPage, SettleOutcome, StoreError, SweepResult};

pub use self::{
    delayed::DelayedStore,
    failing::{CallFilter, FailingStore},
    lossy::LossyStore,
    retrying::RetryingStore,
};

mod delayed;
mod failing;
mod lossy;
mod retrying;

/// The calls of a store, operators' ones included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StoreCallKind {
    Claim,
    Extend,
    Settle,
    /// Waits, reads and sweeps: nothing is lost if they happen twice.
    Read,
    /// A compare-and-set without a token: sent again after it was applied, it is refused.
    AdminChange,
}

/// An answer of any call.
trait StoreAnswer: Send + Unpin {
    /// Whether the call, sent again, is answered in the same way. Not so where it put an entry back: the second time it
    /// is there.
    fn is_repeatable(&self) -> bool {
        true
    }
}

impl StoreAnswer for () {}
impl StoreAnswer for ClaimOutcome {}
impl StoreAnswer for Option<ClaimOutcome> {}
impl StoreAnswer for SweepResult {}
impl StoreAnswer for EntryPage {}
impl StoreAnswer for EntryCounts {}
impl StoreAnswer for SettleOutcome {
    fn is_repeatable(&self) -> bool {
        !matches!(self, Self::Restored)
    }
}

/// Makes a wrapper with the fields `inner` and an async method `around(call, make_future)` a store.
macro_rules! store_around {
    ($wrapper:ident) => {
        impl<S: ibid::store::Store> ibid::store::Store for $wrapper<S> {
            fn claim<'a>(&'a self, ask: &'a Arc<ClaimRequest>) -> StoreFuture<'a, ClaimOutcome> {
                StoreFuture::boxed(self.around(StoreCallKind::Claim, move || self.inner.claim(ask)))
            }
            fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, SettleOutcome> {
                StoreFuture::boxed(self.around(StoreCallKind::Extend, move || self.inner.extend(lease, hold)))
            }
            fn settle<'a>(&'a self, lease: &'a Lease, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome> {
                StoreFuture::boxed(self.around(StoreCallKind::Settle, move || self.inner.settle(lease, end)))
            }
            fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()> {
                StoreFuture::boxed(self.around(StoreCallKind::Read, move || self.inner.wait(at, seen, limit)))
            }
            fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<ClaimOutcome>> {
                StoreFuture::boxed(self.around(StoreCallKind::Read, move || self.inner.get(at)))
            }
            fn sweep(&self, at_most: u32) -> StoreFuture<'_, SweepResult> {
                StoreFuture::boxed(self.around(StoreCallKind::Read, move || self.inner.sweep(at_most)))
            }
            fn admin(&self) -> &dyn StoreAdmin {
                self
            }
            fn counters(&self) -> Option<&dyn ibid::store::Counters> {
                self.inner.counters()
            }
            fn guarantees(&self) -> Guarantees {
                self.inner.guarantees()
            }
        }

        impl<S: ibid::store::Store> StoreAdmin for $wrapper<S> {
            fn list<'a>(
                &'a self, filter: &'a EntryFilter, from: ListCursor, at_most: u32,
            ) -> StoreFuture<'a, EntryPage> {
                let list = move || self.inner.admin().list(filter, from.clone(), at_most);
                StoreFuture::boxed(self.around(StoreCallKind::Read, list))
            }
            fn resolve<'a>(
                &'a self, at: &'a Address, seen: Fence, end: &'a Settlement,
            ) -> StoreFuture<'a, SettleOutcome> {
                StoreFuture::boxed(
                    self.around(StoreCallKind::AdminChange, move || self.inner.admin().resolve(at, seen, end)),
                )
            }
            fn forget<'a>(&'a self, at: &'a Address, seen: Fence) -> StoreFuture<'a, SettleOutcome> {
                StoreFuture::boxed(self.around(StoreCallKind::AdminChange, move || self.inner.admin().forget(at, seen)))
            }
            fn replace_record<'a>(
                &'a self, at: &'a Address, seen: Fence, record: Bytes,
            ) -> StoreFuture<'a, SettleOutcome> {
                let replace = move || self.inner.admin().replace_record(at, seen, record.clone());
                StoreFuture::boxed(self.around(StoreCallKind::AdminChange, replace))
            }
            fn counts(&self) -> StoreFuture<'_, EntryCounts> {
                StoreFuture::boxed(self.around(StoreCallKind::Read, move || self.inner.admin().counts()))
            }
        }
    };
}
use store_around;

fn injected_error(kind: ibid::store::ErrorKind, why: &'static str) -> StoreError {
    StoreError::new(kind, "testkit", why)
}

/// Lets time pass; nothing at all if it is zero, so that no timer is needed then.
async fn sleep_unless_zero(duration: Duration) {
    if !duration.is_zero() {
        tokio::time::sleep(duration).await;
    }
}
