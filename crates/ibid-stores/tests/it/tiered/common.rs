//! Gateways on the same two stores, each with links of its own to them, and what it told its observer.

use bytes::Bytes;
use futures_util::future::BoxFuture;
use ibid::store::{
    Address, ClaimRequest, EntryCounts, EntryFilter, EntryPage, Fence, Guarantees, Lease, ListCursor, SettleOutcome,
    Settlement, StoreAdmin, StoreError, StoreFuture, SweepResult,
};
use ibid_testkit::wrappers::{DelayedStore, FailingStore};

use super::*;
use crate::local_cache::CountingStore;

/// A way to a store that can be cut, lose what comes back, or be slow.
pub(super) type FaultyStoreLink = CountingStore<DelayedStore<FailingStore<Arc<dyn Store>>>>;

pub(super) struct TieredGateway {
    pub(super) store: TieredStore,
    pub(super) front: Arc<FaultyStoreLink>,
    pub(super) authority: Arc<FaultyStoreLink>,
    pub(super) log: Arc<TieredEventLog>,
}

impl TieredGateway {
    pub(super) fn new(mode: TieredMode, first: Arc<dyn Store>, last: Arc<dyn Store>) -> Self {
        Self::with(mode, first, last, None)
    }

    pub(super) fn with(
        mode: TieredMode, first: Arc<dyn Store>, last: Arc<dyn Store>, generations: Option<Arc<dyn GenerationCounter>>,
    ) -> Self {
        let link = |to| Arc::new(CountingStore::new(DelayedStore::new(FailingStore::new(to))));
        let (front, authority, log) = (link(first), link(last), Arc::new(TieredEventLog::default()));
        let store = TieredStore::new(front.clone(), authority.clone(), mode, log.clone(), generations);
        Self { store, front, authority, log }
    }

    /// One gateway on two fresh stores.
    pub(super) fn one_gateway(mode: TieredMode) -> (Self, Arc<Memory>, Arc<Memory>) {
        let (first, last) = (Arc::new(Memory::default()), Arc::new(Memory::default()));
        (Self::new(mode, first.clone(), last.clone()), first, last)
    }

    /// Two gateways on two fresh stores.
    pub(super) fn two_gateways(mode: TieredMode) -> (Self, Self, Arc<Memory>, Arc<Memory>) {
        let (one, first, last) = Self::one_gateway(mode);
        (one, Self::new(mode, first.clone(), last.clone()), first, last)
    }
}

pub(super) fn failing_store(link: &FaultyStoreLink) -> &FailingStore<Arc<dyn Store>> {
    link.inner.inner()
}

/// What an observer was told, in words.
#[derive(Default)]
pub(super) struct TieredEventLog(Mutex<Vec<&'static str>>);

impl TieredEventLog {
    pub(super) fn count(&self, what: &str) -> usize {
        self.0.lock().iter().filter(|told| **told == what).count()
    }
}

impl Observer for TieredEventLog {
    fn on_event(&self, notice: &EngineEvent<'_>) {
        self.0.lock().push(match notice {
            EngineEvent::FrontOnlyClaim(_) => "solo",
            EngineEvent::Fallback(..) => "fallback",
            EngineEvent::ClaimLost(_) => "lost claim",
            EngineEvent::EntryRestored(_) => "restored",
            EngineEvent::SettlementDropped(_) => "dropped",
            _ => "other",
        });
    }
}

/// A store that can lose everything at once, as a Redis does that is flushed or used under another generation.
#[derive(Debug)]
pub(super) struct LosableStore(Mutex<(u64, Arc<Memory>)>);

impl Default for LosableStore {
    fn default() -> Self {
        Self(Mutex::new((0, Arc::new(Memory::default()))))
    }
}

impl LosableStore {
    pub(super) fn lose_everything(&self) {
        self.0.lock().1 = Arc::new(Memory::default());
    }

    fn current(&self) -> Arc<Memory> {
        self.0.lock().1.clone()
    }
}

/// The generation in `last`, and the stores that are used under it: one for all gateways.
pub(super) struct TestGenerations {
    pub(super) front: Arc<LosableStore>,
    pub(super) generation: Arc<Mutex<u64>>,
    pub(super) is_down: Arc<Mutex<bool>>,
}

impl TestGenerations {
    pub(super) fn new(first: &Arc<LosableStore>) -> Self {
        Self { front: first.clone(), generation: Arc::default(), is_down: Arc::default() }
    }

    fn answer(&self, by: u64) -> Result<u64, StoreError> {
        if *self.is_down.lock() {
            return Err(StoreError::new(ibid::store::ErrorKind::NotApplied, "test", "switched off"));
        }
        let mut number = self.generation.lock();
        *number += by;
        Ok(*number)
    }
}

impl GenerationCounter for TestGenerations {
    fn read(&self) -> BoxFuture<'_, Result<u64, StoreError>> {
        Box::pin(async { self.answer(0) })
    }
    fn raise(&self) -> BoxFuture<'_, Result<u64, StoreError>> {
        Box::pin(async { self.answer(1) })
    }
    fn apply(&self, generation: u64) {
        let mut now = self.front.0.lock();
        if generation > now.0 {
            *now = (generation, Arc::new(Memory::default()));
        }
    }
}

impl Store for LosableStore {
    fn claim<'a>(&'a self, ask: &'a Arc<ClaimRequest>) -> StoreFuture<'a, ClaimOutcome> {
        StoreFuture::boxed(async move { self.current().claim(ask).await })
    }
    fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(async move { self.current().extend(lease, hold).await })
    }
    fn settle<'a>(&'a self, lease: &'a Lease, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(async move { self.current().settle(lease, end).await })
    }
    fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()> {
        StoreFuture::boxed(async move { self.current().wait(at, seen, limit).await })
    }
    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<ClaimOutcome>> {
        StoreFuture::boxed(async move { self.current().get(at).await })
    }
    fn sweep(&self, at_most: u32) -> StoreFuture<'_, SweepResult> {
        StoreFuture::boxed(async move { self.current().sweep(at_most).await })
    }
    fn admin(&self) -> &dyn StoreAdmin {
        self
    }
    fn counters(&self) -> Option<&dyn ibid::store::Counters> {
        None
    }
    fn guarantees(&self) -> Guarantees {
        self.current().guarantees()
    }
}

impl StoreAdmin for LosableStore {
    fn list<'a>(&'a self, filter: &'a EntryFilter, from: ListCursor, at_most: u32) -> StoreFuture<'a, EntryPage> {
        StoreFuture::boxed(async move { self.current().list(filter, from, at_most).await })
    }
    fn resolve<'a>(&'a self, at: &'a Address, seen: Fence, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(async move { self.current().resolve(at, seen, end).await })
    }
    fn forget<'a>(&'a self, at: &'a Address, seen: Fence) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(async move { self.current().forget(at, seen).await })
    }
    fn replace_record<'a>(&'a self, at: &'a Address, seen: Fence, record: Bytes) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(async move { self.current().replace_record(at, seen, record).await })
    }
    fn counts(&self) -> StoreFuture<'_, EntryCounts> {
        StoreFuture::boxed(async move { self.current().counts().await })
    }
}
