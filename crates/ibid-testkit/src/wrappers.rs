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

use ibid::store::{Claim, Counts, Held, Page, StoreError, Swept};

pub use self::{
    delays::Delays,
    fails_on_demand::{Calls, FailsOnDemand},
    loses_answers::LosesAnswers,
    resending::Resending,
};

mod delays;
mod fails_on_demand;
mod loses_answers;
mod resending;

/// The calls of a store, operators' ones included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    Claim,
    Extend,
    Settle,
    /// Waits, reads and sweeps: nothing is lost if they happen twice.
    Look,
    /// A compare-and-set without a token: sent again after it was applied, it is refused.
    Change,
}

/// An answer of any call.
trait Answer: Send + Unpin {
    /// Whether the call, sent again, is answered in the same way. Not so where it put an entry back: the second time it
    /// is there.
    fn is_repeatable(&self) -> bool {
        true
    }
}

impl Answer for () {}
impl Answer for Claim {}
impl Answer for Option<Claim> {}
impl Answer for Swept {}
impl Answer for Page {}
impl Answer for Counts {}
impl Answer for Held {
    fn is_repeatable(&self) -> bool {
        !matches!(self, Self::Restored)
    }
}

/// Makes a wrapper with the fields `inner` and an async method `around(call, make_future)` a store.
macro_rules! store_around {
    ($wrapper:ident) => {
        impl<S: ibid::store::Store> ibid::store::Store for $wrapper<S> {
            fn claim<'a>(&'a self, ask: &'a Arc<Ask>) -> StoreFuture<'a, Claim> {
                StoreFuture::boxed(self.around(Call::Claim, move || self.inner.claim(ask)))
            }
            fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, Held> {
                StoreFuture::boxed(self.around(Call::Extend, move || self.inner.extend(lease, hold)))
            }
            fn settle<'a>(&'a self, lease: &'a Lease, end: &'a End) -> StoreFuture<'a, Held> {
                StoreFuture::boxed(self.around(Call::Settle, move || self.inner.settle(lease, end)))
            }
            fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()> {
                StoreFuture::boxed(self.around(Call::Look, move || self.inner.wait(at, seen, limit)))
            }
            fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<Claim>> {
                StoreFuture::boxed(self.around(Call::Look, move || self.inner.get(at)))
            }
            fn sweep(&self, at_most: u32) -> StoreFuture<'_, Swept> {
                StoreFuture::boxed(self.around(Call::Look, move || self.inner.sweep(at_most)))
            }
            fn operators(&self) -> &dyn Operators {
                self
            }
            fn counters(&self) -> Option<&dyn ibid::store::Counters> {
                self.inner.counters()
            }
            fn promise(&self) -> Promise {
                self.inner.promise()
            }
        }

        impl<S: ibid::store::Store> Operators for $wrapper<S> {
            fn list<'a>(&'a self, filter: &'a Filter, from: Cursor, at_most: u32) -> StoreFuture<'a, Page> {
                let list = move || self.inner.operators().list(filter, from.clone(), at_most);
                StoreFuture::boxed(self.around(Call::Look, list))
            }
            fn resolve<'a>(&'a self, at: &'a Address, seen: Fence, end: &'a End) -> StoreFuture<'a, Held> {
                StoreFuture::boxed(self.around(Call::Change, move || self.inner.operators().resolve(at, seen, end)))
            }
            fn forget<'a>(&'a self, at: &'a Address, seen: Fence) -> StoreFuture<'a, Held> {
                StoreFuture::boxed(self.around(Call::Change, move || self.inner.operators().forget(at, seen)))
            }
            fn replace<'a>(&'a self, at: &'a Address, seen: Fence, record: Bytes) -> StoreFuture<'a, Held> {
                let replace = move || self.inner.operators().replace(at, seen, record.clone());
                StoreFuture::boxed(self.around(Call::Change, replace))
            }
            fn counts(&self) -> StoreFuture<'_, Counts> {
                StoreFuture::boxed(self.around(Call::Look, move || self.inner.operators().counts()))
            }
        }
    };
}
use store_around;

fn failure(kind: ibid::store::ErrorKind, why: &'static str) -> StoreError {
    StoreError::new(kind, "testkit", why)
}

/// Lets time pass; nothing at all if it is zero, so that no timer is needed then.
async fn pause(duration: Duration) {
    if !duration.is_zero() {
        tokio::time::sleep(duration).await;
    }
}
