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
    Address, Ask, Claim, Counts, Cursor, End, Fence, Filter, Fingerprint, Finished, Held, Lease, Memory, Operators,
    Outline, Page, Promise, Store, StoreFuture, Swept, Tags, Token,
};
use ibid_stores::near::{Copies, Near};
use ibid_testkit::{
    broken::failing_cases,
    contract,
    property::{Clock, check_histories},
    wrappers::{LosesAnswers, Resending},
};

mod copies;
mod room;

const SECOND: Duration = Duration::from_secs(1);

fn near(store: impl Store) -> Near {
    Near::new(Arc::new(store), Copies::default())
}

pub(crate) fn seed() -> u64 {
    let seed = u64::from_le_bytes(Token::mint().0[..8].try_into().unwrap());
    println!("seed {seed}");
    seed
}

ibid_testkit::contract_tests!(near_memory, async { Arc::new(near(Memory::default())) as Arc<dyn Store> });

ibid_testkit::contract_tests!(near_memory_losing_answers, async {
    Arc::new(Resending::new(LosesAnswers::new(near(Memory::default()), seed(), 3))) as Arc<dyn Store>
});

ibid_testkit::contract_tests!(near_around_a_memory_that_loses_answers, async {
    Arc::new(Resending::new(near(LosesAnswers::new(Memory::default(), seed(), 3)))) as Arc<dyn Store>
});

#[tokio::test]
async fn one_store_serves_all_cases_at_the_same_time() {
    assert_eq!(failing_cases(Arc::new(near(Memory::default())), Duration::from_secs(60)).await, [""; 0]);
}

#[tokio::test]
async fn sweeps_count_what_they_remove() {
    contract::operating::sweeps_count_what_they_remove(&near(Memory::default())).await;
}

#[test]
fn it_answers_as_the_model_says() {
    check_histories(1000, Clock::Paused, async || Arc::new(near(Memory::default())) as Arc<dyn Store>);
    check_histories(100, Clock::Real, async || Arc::new(near(Memory::default())) as Arc<dyn Store>);
}

/// Counts the calls that reach it.
#[derive(Debug, Default)]
pub(crate) struct Counting<S> {
    pub(crate) inner: S,
    pub(crate) claims: AtomicUsize,
    pub(crate) waits: AtomicUsize,
    pub(crate) gets: AtomicUsize,
    pub(crate) settles: AtomicUsize,
}

impl<S> Counting<S> {
    pub(crate) fn new(inner: S) -> Self {
        let zero = AtomicUsize::default;
        Self { inner, claims: zero(), waits: zero(), gets: zero(), settles: zero() }
    }

    /// Claims, waits, gets, settles.
    pub(crate) fn calls(&self) -> [usize; 4] {
        [&self.claims, &self.waits, &self.gets, &self.settles].map(|count| count.load(SeqCst))
    }
}

impl<S: Store> Store for Counting<S> {
    fn claim<'a>(&'a self, ask: &'a Arc<Ask>) -> StoreFuture<'a, Claim> {
        self.claims.fetch_add(1, SeqCst);
        self.inner.claim(ask)
    }
    fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, Held> {
        self.inner.extend(lease, hold)
    }
    fn settle<'a>(&'a self, lease: &'a Lease, end: &'a End) -> StoreFuture<'a, Held> {
        self.settles.fetch_add(1, SeqCst);
        self.inner.settle(lease, end)
    }
    fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()> {
        self.waits.fetch_add(1, SeqCst);
        self.inner.wait(at, seen, limit)
    }
    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<Claim>> {
        self.gets.fetch_add(1, SeqCst);
        self.inner.get(at)
    }
    fn sweep(&self, at_most: u32) -> StoreFuture<'_, Swept> {
        self.inner.sweep(at_most)
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

impl<S: Store> Operators for Counting<S> {
    fn list<'a>(&'a self, filter: &'a Filter, from: Cursor, at_most: u32) -> StoreFuture<'a, Page> {
        self.inner.operators().list(filter, from, at_most)
    }
    fn resolve<'a>(&'a self, at: &'a Address, seen: Fence, end: &'a End) -> StoreFuture<'a, Held> {
        self.inner.operators().resolve(at, seen, end)
    }
    fn forget<'a>(&'a self, at: &'a Address, seen: Fence) -> StoreFuture<'a, Held> {
        self.inner.operators().forget(at, seen)
    }
    fn replace<'a>(&'a self, at: &'a Address, seen: Fence, record: Bytes) -> StoreFuture<'a, Held> {
        self.inner.operators().replace(at, seen, record)
    }
    fn counts(&self) -> StoreFuture<'_, Counts> {
        self.inner.operators().counts()
    }
}

pub(crate) fn ask(nth: u8) -> Arc<Ask> {
    Arc::new(Ask {
        address: Address([nth; 32]),
        token: Token::mint(),
        fingerprint: Fingerprint { version: 1, digest: [nth; 32] },
        tags: Tags::default(),
        label: Bytes::new(),
        hold: Duration::from_secs(30),
        keep: Duration::from_secs(3600),
        over: None,
    })
}

pub(crate) fn complete(record: &'static [u8], keep: Duration) -> End {
    End::Complete { failed: false, record: Bytes::from_static(record), outline: Outline::default(), keep }
}

pub(crate) async fn granted(store: &dyn Store, ask: &Arc<Ask>) -> Lease {
    match store.claim(ask).await.unwrap() {
        Claim::Granted(lease) => lease,
        other => panic!("{other:?}"),
    }
}

pub(crate) async fn done(store: &dyn Store, ask: &Arc<Ask>) -> Finished {
    match store.claim(ask).await.unwrap() {
        Claim::Done(finished) => finished,
        other => panic!("{other:?}"),
    }
}
