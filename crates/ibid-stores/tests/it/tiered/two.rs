//! Gateways on the same two stores, each with links of its own to them, and what it told its observer.

use bytes::Bytes;
use futures_util::future::BoxFuture;
use ibid::store::{
    Address, Ask, Counts, Cursor, End, Fence, Filter, Held, Lease, Operators, Page, Promise, StoreError, StoreFuture,
    Swept,
};
use ibid_testkit::wrappers::{Delays, FailsOnDemand};

use super::*;
use crate::near::Counting;

/// A way to a store that can be cut, lose what comes back, or be slow.
pub(super) type Link = Counting<Delays<FailsOnDemand<Arc<dyn Store>>>>;

pub(super) struct Gateway {
    pub(super) store: Tiered,
    pub(super) first: Arc<Link>,
    pub(super) last: Arc<Link>,
    pub(super) log: Arc<Log>,
}

impl Gateway {
    pub(super) fn new(mode: Mode, first: Arc<dyn Store>, last: Arc<dyn Store>) -> Self {
        Self::with(mode, first, last, None)
    }

    pub(super) fn with(
        mode: Mode, first: Arc<dyn Store>, last: Arc<dyn Store>, generations: Option<Arc<dyn Generations>>,
    ) -> Self {
        let link = |to| Arc::new(Counting::new(Delays::new(FailsOnDemand::new(to))));
        let (first, last, log) = (link(first), link(last), Arc::new(Log::default()));
        let store = Tiered::new(first.clone(), last.clone(), mode, log.clone(), generations);
        Self { store, first, last, log }
    }

    /// One gateway on two fresh stores.
    pub(super) fn alone(mode: Mode) -> (Self, Arc<Memory>, Arc<Memory>) {
        let (first, last) = (Arc::new(Memory::default()), Arc::new(Memory::default()));
        (Self::new(mode, first.clone(), last.clone()), first, last)
    }

    /// Two gateways on two fresh stores.
    pub(super) fn two(mode: Mode) -> (Self, Self, Arc<Memory>, Arc<Memory>) {
        let (one, first, last) = Self::alone(mode);
        (one, Self::new(mode, first.clone(), last.clone()), first, last)
    }
}

pub(super) fn faults(link: &Link) -> &FailsOnDemand<Arc<dyn Store>> {
    link.inner.inner()
}

/// What an observer was told, in words.
#[derive(Default)]
pub(super) struct Log(Mutex<Vec<&'static str>>);

impl Log {
    pub(super) fn count(&self, what: &str) -> usize {
        self.0.lock().iter().filter(|told| **told == what).count()
    }
}

impl Observer for Log {
    fn noticed(&self, notice: &Notice<'_>) {
        self.0.lock().push(match notice {
            Notice::Solo(_) => "solo",
            Notice::Fallback { .. } => "fallback",
            Notice::LostClaim(_) => "lost claim",
            Notice::Restored(_) => "restored",
            Notice::Dropped(_) => "dropped",
            _ => "other",
        });
    }
}

/// A store that can lose everything at once, as a Redis does that is flushed or used under another generation.
#[derive(Debug)]
pub(super) struct Swapped(Mutex<(u64, Arc<Memory>)>);

impl Default for Swapped {
    fn default() -> Self {
        Self(Mutex::new((0, Arc::new(Memory::default()))))
    }
}

impl Swapped {
    pub(super) fn lose_everything(&self) {
        self.0.lock().1 = Arc::new(Memory::default());
    }

    fn now(&self) -> Arc<Memory> {
        self.0.lock().1.clone()
    }
}

/// The generation in `last`, and the stores that are used under it: one for all gateways.
pub(super) struct Counted {
    pub(super) first: Arc<Swapped>,
    pub(super) number: Arc<Mutex<u64>>,
    pub(super) is_down: Arc<Mutex<bool>>,
}

impl Counted {
    pub(super) fn new(first: &Arc<Swapped>) -> Self {
        Self { first: first.clone(), number: Arc::default(), is_down: Arc::default() }
    }

    fn answer(&self, by: u64) -> Result<u64, StoreError> {
        if *self.is_down.lock() {
            return Err(StoreError::new(ibid::store::ErrorKind::NotApplied, "test", "switched off"));
        }
        let mut number = self.number.lock();
        *number += by;
        Ok(*number)
    }
}

impl Generations for Counted {
    fn read(&self) -> BoxFuture<'_, Result<u64, StoreError>> {
        Box::pin(async { self.answer(0) })
    }
    fn raise(&self) -> BoxFuture<'_, Result<u64, StoreError>> {
        Box::pin(async { self.answer(1) })
    }
    fn apply(&self, generation: u64) {
        let mut now = self.first.0.lock();
        if generation > now.0 {
            *now = (generation, Arc::new(Memory::default()));
        }
    }
}

impl Store for Swapped {
    fn claim<'a>(&'a self, ask: &'a Arc<Ask>) -> StoreFuture<'a, Claim> {
        StoreFuture::boxed(async move { self.now().claim(ask).await })
    }
    fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(async move { self.now().extend(lease, hold).await })
    }
    fn settle<'a>(&'a self, lease: &'a Lease, end: &'a End) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(async move { self.now().settle(lease, end).await })
    }
    fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()> {
        StoreFuture::boxed(async move { self.now().wait(at, seen, limit).await })
    }
    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<Claim>> {
        StoreFuture::boxed(async move { self.now().get(at).await })
    }
    fn sweep(&self, at_most: u32) -> StoreFuture<'_, Swept> {
        StoreFuture::boxed(async move { self.now().sweep(at_most).await })
    }
    fn operators(&self) -> &dyn Operators {
        self
    }
    fn counters(&self) -> Option<&dyn ibid::store::Counters> {
        None
    }
    fn promise(&self) -> Promise {
        self.now().promise()
    }
}

impl Operators for Swapped {
    fn list<'a>(&'a self, filter: &'a Filter, from: Cursor, at_most: u32) -> StoreFuture<'a, Page> {
        StoreFuture::boxed(async move { self.now().list(filter, from, at_most).await })
    }
    fn resolve<'a>(&'a self, at: &'a Address, seen: Fence, end: &'a End) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(async move { self.now().resolve(at, seen, end).await })
    }
    fn forget<'a>(&'a self, at: &'a Address, seen: Fence) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(async move { self.now().forget(at, seen).await })
    }
    fn replace<'a>(&'a self, at: &'a Address, seen: Fence, record: Bytes) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(async move { self.now().replace(at, seen, record).await })
    }
    fn counts(&self) -> StoreFuture<'_, Counts> {
        StoreFuture::boxed(async move { self.now().counts().await })
    }
}
