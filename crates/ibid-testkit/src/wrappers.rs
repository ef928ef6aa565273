//! Wrappers that make a store fail, delay or lose calls, or that tolerate such a store.
//!
//! Invariant: a wrapper decides nothing. It forwards a call once, never, or several times; it returns an outcome
//! unchanged, late, or replaced by an error that correctly says what the caller may assume.
//!
//! ```
//! use ibid::store::{ErrorKind, Memory, Store};
//! use ibid_testkit::wrappers::{CallFilter, FailingStore};
//!
//! # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
//! let store = FailingStore::new(Memory::default());
//! store.fail(CallFilter::All, ErrorKind::NotApplied);
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

/// The calls of a store, including the operators'.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StoreCallKind {
    Claim,
    Extend,
    Settle,
    /// Waits, reads and sweeps, which can be repeated without harm.
    Read,
    /// A compare-and-set without a token: a repetition after it was applied is rejected.
    AdminChange,
}

/// The outcome of any call.
trait StoreAnswer: Send + Unpin {
    /// Whether a repeated call has the same outcome. Not if it restored an entry, because the entry then exists.
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

/// Implements `Store` for a wrapper with a field `inner` and an async method `around(call, make_future)`.
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

/// Sleeps; needs no timer if the duration is zero.
async fn sleep_unless_zero(duration: Duration) {
    if !duration.is_zero() {
        tokio::time::sleep(duration).await;
    }
}
