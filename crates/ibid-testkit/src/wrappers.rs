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

use std::{any::Any, sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::store::{
    Address, ClaimOutcome, ClaimRequest, ClaimToken, Counters, EntryCounts, EntryFilter, EntryPage, ErrorKind, Fence,
    Guarantees, Lease, ListCursor, SettleOutcome, Settlement, Store, StoreAdmin, StoreError, StoreFuture, SweepResult,
};
use parking_lot::Mutex;

/// Maximum number of attempts of a [`RetryingStore`] before the error is returned.
const MAX_ATTEMPTS: u32 = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallFilter {
    Claim,
    Extend,
    Settle,
    /// Waits, reads and sweeps, which can be repeated without harm.
    Read,
    /// Changes by operators: a compare-and-set without a token, of which a repetition is rejected.
    AdminChange,
    /// All calls, including the operators'.
    All,
}

/// Rules by kind of call. The latest that matches counts. The test writes them, every call reads them.
#[derive(Debug)]
struct CallRules<T>(Mutex<Vec<(CallFilter, T)>>);

impl<T: Copy> CallRules<T> {
    fn add(&self, calls: CallFilter, rule: T) {
        self.0.lock().push((calls, rule));
    }

    fn find(&self, call: CallFilter) -> Option<T> {
        let matches = |(calls, _): &&(CallFilter, T)| *calls == call || *calls == CallFilter::All;
        self.0.lock().iter().rfind(matches).map(|(_, rule)| *rule)
    }
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
    /// The error instead of an application, or `None` to apply the call and lose its outcome.
    faults: CallRules<Option<ErrorKind>>,
}

impl<S> FailingStore<S> {
    pub fn new(inner: S) -> Self {
        Self { inner, faults: CallRules(Mutex::default()) }
    }

    /// Makes these calls fail with this error, without applying them.
    pub fn fail(&self, calls: CallFilter, kind: ErrorKind) {
        self.faults.add(calls, Some(kind));
    }

    /// Applies these calls and loses their outcomes ([`ErrorKind::Ambiguous`]).
    pub fn lose_answers(&self, calls: CallFilter) {
        self.faults.add(calls, None);
    }

    pub fn heal(&self) {
        self.faults.0.lock().clear();
    }

    async fn around<'a, T: Send + Unpin>(
        &'a self, call: CallFilter, make: impl Fn() -> StoreFuture<'a, T> + Send,
    ) -> Result<T, StoreError> {
        match self.faults.find(call) {
            None => make().await,
            Some(Some(kind)) => Err(injected_error(kind, "switched off by the test")),
            Some(None) => {
                make().await?;
                Err(injected_error(ErrorKind::Ambiguous, "its answer was lost by the test"))
            }
        }
    }
}

/// A store that delays calls before they are applied, and their outcomes afterwards.
///
/// A call that is dropped during the first delay is not applied; one that is dropped during the second is.
#[derive(Debug)]
pub struct DelayedStore<S> {
    inner: S,
    delays: CallRules<(Duration, Duration)>,
}

impl<S> DelayedStore<S> {
    pub fn new(inner: S) -> Self {
        Self { inner, delays: CallRules(Mutex::default()) }
    }

    /// Delays these calls by `before` until they are applied, and their outcomes by `after`.
    pub fn delay(&self, calls: CallFilter, before: Duration, after: Duration) {
        self.delays.add(calls, (before, after));
    }

    pub fn heal(&self) {
        self.delays.0.lock().clear();
    }

    async fn around<'a, T: Send + Unpin>(
        &'a self, call: CallFilter, make: impl Fn() -> StoreFuture<'a, T> + Send,
    ) -> Result<T, StoreError> {
        // Without a delay, no timer is needed.
        let Some((before, after)) = self.delays.find(call) else { return make().await };
        tokio::time::sleep(before).await;
        let answered = make().await;
        tokio::time::sleep(after).await;
        answered
    }
}

/// A store that loses calls and outcomes, chosen by a seed: some calls are applied and return
/// [`ErrorKind::Ambiguous`]; some are not applied and return that or [`ErrorKind::NotApplied`].
///
/// It never loses outcomes that a repeated call cannot return again: [`SettleOutcome::Restored`], and those of
/// operators' changes, which have no token (these calls are only ever not applied).
#[derive(Debug)]
pub struct LossyStore<S> {
    inner: S,
    one_in: u64,
    /// The state of the generator.
    random: Mutex<u64>,
}

impl<S> LossyStore<S> {
    /// Wraps `inner`; one call in `one_in` fails.
    pub fn new(inner: S, seed: u64, one_in: u32) -> Self {
        Self { inner, one_in: u64::from(one_in.max(1)), random: Mutex::new(seed | 1) }
    }

    /// A random number below 4 if the next call fails.
    fn next_loss(&self) -> Option<u64> {
        let mut state = self.random.lock();
        // xorshift64*: small, seeded, random enough to choose calls.
        *state ^= *state >> 12;
        *state ^= *state << 25;
        *state ^= *state >> 27;
        let roll = state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32;
        roll.is_multiple_of(self.one_in).then_some((roll / self.one_in) % 4)
    }

    async fn around<'a, T: Send + Unpin + Any>(
        &'a self, call: CallFilter, make: impl Fn() -> StoreFuture<'a, T> + Send,
    ) -> Result<T, StoreError> {
        let is_restored = |answer: &T| (answer as &dyn Any).downcast_ref() == Some(&SettleOutcome::Restored);
        match (self.next_loss(), call) {
            (None, _) => make().await,
            (Some(3), _) | (_, CallFilter::AdminChange) => {
                Err(injected_error(ErrorKind::NotApplied, "not sent, as told"))
            }
            (Some(2), _) => Err(injected_error(ErrorKind::Ambiguous, "the call was lost, as told")),
            (Some(_), _) => match make().await {
                Ok(answer) if !is_restored(&answer) => {
                    Err(injected_error(ErrorKind::Ambiguous, "the answer was lost, as told"))
                }
                spared => spared,
            },
        }
    }
}

/// A store that loses one call in three, in front of a caller that repeats them. Prints the seed.
pub fn losing_answers<S>(inner: S) -> RetryingStore<LossyStore<S>> {
    let seed = u64::from_le_bytes(ClaimToken::mint().0[..8].try_into().expect("eight bytes"));
    println!("seed {seed}");
    RetryingStore::new(LossyStore::new(inner, seed, 3))
}

/// A store that repeats a call, as every caller may, until it gets an outcome.
#[derive(Debug)]
pub struct RetryingStore<S> {
    inner: S,
}

impl<S> RetryingStore<S> {
    pub fn new(inner: S) -> Self {
        Self { inner }
    }

    async fn around<'a, T: Send + Unpin>(
        &'a self, _: CallFilter, make: impl Fn() -> StoreFuture<'a, T> + Send,
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

fn injected_error(kind: ErrorKind, why: &'static str) -> StoreError {
    StoreError::new(kind, "testkit", why)
}

/// Implements `Store` for a wrapper with a field `inner` and an async method `around(call, make_future)`.
macro_rules! store_around {
    ($($wrapper:ident)*) => { $(
        impl<S> $wrapper<S> {
            /// The wrapped store, which has the real state.
            pub fn inner(&self) -> &S {
                &self.inner
            }
        }

        impl<S: Store> Store for $wrapper<S> {
            fn claim<'a>(&'a self, ask: &'a Arc<ClaimRequest>) -> StoreFuture<'a, ClaimOutcome> {
                StoreFuture::boxed(self.around(CallFilter::Claim, move || self.inner.claim(ask)))
            }
            fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, SettleOutcome> {
                StoreFuture::boxed(self.around(CallFilter::Extend, move || self.inner.extend(lease, hold)))
            }
            fn settle<'a>(&'a self, lease: &'a Lease, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome> {
                StoreFuture::boxed(self.around(CallFilter::Settle, move || self.inner.settle(lease, end)))
            }
            fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()> {
                StoreFuture::boxed(self.around(CallFilter::Read, move || self.inner.wait(at, seen, limit)))
            }
            fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<ClaimOutcome>> {
                StoreFuture::boxed(self.around(CallFilter::Read, move || self.inner.get(at)))
            }
            fn sweep(&self, at_most: u32) -> StoreFuture<'_, SweepResult> {
                StoreFuture::boxed(self.around(CallFilter::Read, move || self.inner.sweep(at_most)))
            }
            fn admin(&self) -> &dyn StoreAdmin {
                self
            }
            fn counters(&self) -> Option<&dyn Counters> {
                self.inner.counters()
            }
            fn guarantees(&self) -> Guarantees {
                self.inner.guarantees()
            }
        }

        impl<S: Store> StoreAdmin for $wrapper<S> {
            fn list<'a>(
                &'a self, filter: &'a EntryFilter, from: ListCursor, at_most: u32,
            ) -> StoreFuture<'a, EntryPage> {
                let list = move || self.inner.admin().list(filter, from.clone(), at_most);
                StoreFuture::boxed(self.around(CallFilter::Read, list))
            }
            fn resolve<'a>(
                &'a self, at: &'a Address, seen: Fence, end: &'a Settlement,
            ) -> StoreFuture<'a, SettleOutcome> {
                let resolve = move || self.inner.admin().resolve(at, seen, end);
                StoreFuture::boxed(self.around(CallFilter::AdminChange, resolve))
            }
            fn forget<'a>(&'a self, at: &'a Address, seen: Fence) -> StoreFuture<'a, SettleOutcome> {
                StoreFuture::boxed(self.around(CallFilter::AdminChange, move || self.inner.admin().forget(at, seen)))
            }
            fn replace_record<'a>(
                &'a self, at: &'a Address, seen: Fence, record: Bytes,
            ) -> StoreFuture<'a, SettleOutcome> {
                let replace = move || self.inner.admin().replace_record(at, seen, record.clone());
                StoreFuture::boxed(self.around(CallFilter::AdminChange, replace))
            }
            fn counts(&self) -> StoreFuture<'_, EntryCounts> {
                StoreFuture::boxed(self.around(CallFilter::Read, move || self.inner.admin().counts()))
            }
        }
    )* };
}
store_around!(FailingStore DelayedStore LossyStore RetryingStore);
