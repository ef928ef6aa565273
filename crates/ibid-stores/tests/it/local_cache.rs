//! Copies of finished answers, and the waiting room.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use bytes::Bytes;
use ibid::store::{
    Address, ClaimOutcome, ClaimRequest, ClaimToken, CompletedEntry, EntryCounts, EntryFilter, EntryPage, Fence,
    Fingerprint, Guarantees, Lease, ListCursor, Memory, RecordSummary, SettleOutcome, Settlement, Store, StoreAdmin,
    StoreFuture, SweepResult, Tags,
};
use ibid_stores::local_cache::{AnswerCache, LocalCache};
use ibid_testkit::{
    broken::failing_cases,
    contract,
    property::{HistoryClock, check_histories},
    wrappers::{LossyStore, RetryingStore, losing_answers},
};

mod answer_cache;
mod shared_wait;

const SECOND: Duration = Duration::from_secs(1);

fn with_local_cache(store: impl Store) -> LocalCache {
    LocalCache::new(Arc::new(store), AnswerCache::default())
}

pub(crate) fn seed() -> u64 {
    let seed = u64::from_le_bytes(ClaimToken::mint().0[..8].try_into().unwrap());
    println!("seed {seed}");
    seed
}

ibid_testkit::contract_tests!(near_memory, async { with_local_cache(Memory::default()) });

ibid_testkit::contract_tests!(near_memory_losing_answers, async {
    losing_answers(with_local_cache(Memory::default()))
});

ibid_testkit::contract_tests!(near_around_a_memory_that_loses_answers, async {
    RetryingStore::new(with_local_cache(LossyStore::new(Memory::default(), seed(), 3)))
});

#[tokio::test]
async fn one_store_serves_all_cases_at_the_same_time() {
    assert_eq!(failing_cases(Arc::new(with_local_cache(Memory::default())), Duration::from_secs(60)).await, [""; 0]);
}

#[tokio::test]
async fn sweeps_count_what_they_remove() {
    contract::admin::sweeps_count_what_they_remove(&with_local_cache(Memory::default())).await;
}

#[test]
fn it_answers_as_the_model_says() {
    check_histories(1000, HistoryClock::Paused, async || with_local_cache(Memory::default()));
    check_histories(100, HistoryClock::Real, async || with_local_cache(Memory::default()));
}

/// Counts the calls that reach it.
#[derive(Debug, Default)]
pub(crate) struct CountingStore<S> {
    pub(crate) inner: S,
    pub(crate) claims: AtomicUsize,
    pub(crate) waits: AtomicUsize,
    pub(crate) gets: AtomicUsize,
    pub(crate) settles: AtomicUsize,
}

impl<S> CountingStore<S> {
    pub(crate) fn new(inner: S) -> Self {
        let zero = AtomicUsize::default;
        Self { inner, claims: zero(), waits: zero(), gets: zero(), settles: zero() }
    }

    /// Claims, waits, gets, settles.
    pub(crate) fn calls(&self) -> [usize; 4] {
        [&self.claims, &self.waits, &self.gets, &self.settles].map(|count| count.load(SeqCst))
    }
}

impl<S: Store> Store for CountingStore<S> {
    fn claim<'a>(&'a self, ask: &'a Arc<ClaimRequest>) -> StoreFuture<'a, ClaimOutcome> {
        self.claims.fetch_add(1, SeqCst);
        self.inner.claim(ask)
    }
    fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, SettleOutcome> {
        self.inner.extend(lease, hold)
    }
    fn settle<'a>(&'a self, lease: &'a Lease, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome> {
        self.settles.fetch_add(1, SeqCst);
        self.inner.settle(lease, end)
    }
    fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()> {
        self.waits.fetch_add(1, SeqCst);
        self.inner.wait(at, seen, limit)
    }
    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<ClaimOutcome>> {
        self.gets.fetch_add(1, SeqCst);
        self.inner.get(at)
    }
    fn sweep(&self, at_most: u32) -> StoreFuture<'_, SweepResult> {
        self.inner.sweep(at_most)
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

impl<S: Store> StoreAdmin for CountingStore<S> {
    fn list<'a>(&'a self, filter: &'a EntryFilter, from: ListCursor, at_most: u32) -> StoreFuture<'a, EntryPage> {
        self.inner.admin().list(filter, from, at_most)
    }
    fn resolve<'a>(&'a self, at: &'a Address, seen: Fence, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome> {
        self.inner.admin().resolve(at, seen, end)
    }
    fn forget<'a>(&'a self, at: &'a Address, seen: Fence) -> StoreFuture<'a, SettleOutcome> {
        self.inner.admin().forget(at, seen)
    }
    fn replace_record<'a>(&'a self, at: &'a Address, seen: Fence, record: Bytes) -> StoreFuture<'a, SettleOutcome> {
        self.inner.admin().replace_record(at, seen, record)
    }
    fn counts(&self) -> StoreFuture<'_, EntryCounts> {
        self.inner.admin().counts()
    }
}

pub(crate) fn ask(nth: u8) -> Arc<ClaimRequest> {
    Arc::new(ClaimRequest {
        address: Address([nth; 32]),
        token: ClaimToken::mint(),
        fingerprint: Fingerprint { version: 1, digest: [nth; 32] },
        tags: Tags::default(),
        label: Bytes::new(),
        lease: Duration::from_secs(30),
        ttl: Duration::from_secs(3600),
        take_over: None,
    })
}

pub(crate) fn complete(record: &'static [u8], keep: Duration) -> Settlement {
    Settlement::Complete {
        failed: false,
        record: Bytes::from_static(record),
        summary: RecordSummary::default(),
        ttl: keep,
    }
}

pub(crate) async fn granted(store: &dyn Store, ask: &Arc<ClaimRequest>) -> Lease {
    match store.claim(ask).await.unwrap() {
        ClaimOutcome::Granted(lease) => lease,
        other => panic!("{other:?}"),
    }
}

pub(crate) async fn done(store: &dyn Store, ask: &Arc<ClaimRequest>) -> CompletedEntry {
    match store.claim(ask).await.unwrap() {
        ClaimOutcome::Completed(finished) => finished,
        other => panic!("{other:?}"),
    }
}
