//! Sealed stores: the contract, what an attacker with the store in hand can do, and what a thief of it sees.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::{
    Notice, Observer, Silent,
    store::{
        Address, Ask, Claim, End, ErrorKind, Fence, Fingerprint, Held, Lease, Memory, Outline, Store, Tags, Token,
    },
};
use ibid_stores::{
    Layout, Parts,
    seal::{Rules, SealKey, Sealed, Sealing},
};
use ibid_testkit::{
    broken::failing_cases,
    contract,
    property::{Clock, check_histories},
    servers::redis::Server,
    wrappers::{LosesAnswers, Resending},
};
use parking_lot::Mutex;

use crate::{near::seed, temporary};

mod forged;
mod keys;
mod planted;
mod tiers;

pub(crate) fn key(id: &str) -> SealKey {
    let mut bytes = [0x5c; 32];
    bytes[..id.len()].copy_from_slice(id.as_bytes());
    SealKey::new(id, bytes).unwrap()
}

pub(crate) fn sealing() -> Sealing {
    Sealing::new(key("k1"), Vec::new(), &[0x33; 32], Rules::default())
}

fn sealed(store: impl Store) -> Sealed {
    Sealed::new(Arc::new(store), sealing(), Arc::new(Silent))
}

async fn layout(url: &str) -> Arc<dyn Store> {
    let prefix: String = Token::mint().0[..6].iter().map(|byte| format!("{byte:02x}")).collect();
    open(url, &format!("sealed-{prefix}"), Some(sealing())).await
}

async fn open(url: &str, prefix: &str, sealing: Option<Sealing>) -> Arc<dyn Store> {
    let parts = Parts {
        url: url.parse().unwrap(),
        fallback: None,
        cache: None,
        prefix: prefix.into(),
        timeout: Duration::from_secs(20),
        wait_replicas: 0,
        near: Some(0),
    };
    Layout::new(parts).unwrap().sealed(sealing).open(Arc::new(Silent)).await.unwrap().store
}

ibid_testkit::contract_tests!(sealed_memory, async { Arc::new(sealed(Memory::default())) as Arc<dyn Store> });

ibid_testkit::contract_tests!(sealed_embedded, async { Arc::new(sealed(temporary())) as Arc<dyn Store> });

ibid_testkit::contract_tests!(sealed_memory_losing_answers, async {
    Arc::new(Resending::new(sealed(LosesAnswers::new(Memory::default(), seed(), 3)))) as Arc<dyn Store>
});

ibid_testkit::contract_tests!(sealed_redis, layout(&Server::shared().url()));

ibid_testkit::contract_tests!(sealed_postgres, layout(&crate::postgres::url()));

#[tokio::test]
async fn one_store_serves_all_cases_at_the_same_time() {
    assert_eq!(failing_cases(Arc::new(sealed(Memory::default())), Duration::from_secs(120)).await, [""; 0]);
}

#[tokio::test]
async fn sweeps_count_what_they_remove() {
    contract::operating::sweeps_count_what_they_remove(&sealed(Memory::default())).await;
}

#[test]
fn it_answers_as_the_model_says() {
    check_histories(300, Clock::Paused, async || Arc::new(sealed(Memory::default())) as Arc<dyn Store>);
}

#[test]
fn near_and_tiered_around_and_beneath_it_answer_as_the_model_says() {
    use ibid_stores::{
        near::{Copies, Near},
        tiered::{Mode, Tiered},
    };
    check_histories(200, Clock::Paused, async || {
        Arc::new(Near::new(Arc::new(sealed(Memory::default())), Copies::default())) as Arc<dyn Store>
    });
    for mode in [Mode::Strict, Mode::Loose] {
        check_histories(200, Clock::Paused, async || {
            let memory = || Arc::new(Memory::default());
            Arc::new(sealed(Tiered::new(memory(), memory(), mode, Arc::new(Silent), None))) as Arc<dyn Store>
        });
    }
}

/// Counts what does not open.
#[derive(Debug, Default)]
pub(crate) struct Told(Mutex<Vec<String>>);

impl Observer for Told {
    fn noticed(&self, notice: &Notice<'_>) {
        self.0.lock().push(notice.to_string());
    }
}

impl Told {
    fn unreadable(&self) -> usize {
        self.0.lock().iter().filter(|said| said.contains("cannot be read and was not answered from")).count()
    }
}

/// A memory that an attacker has in hand, and the same behind a seal.
pub(crate) struct Bench {
    pub(crate) raw: Arc<Memory>,
    pub(crate) store: Sealed,
    pub(crate) sealing: Sealing,
    pub(crate) told: Arc<Told>,
}

impl Bench {
    pub(crate) fn new(sealing: Sealing) -> Self {
        let (raw, told) = (Arc::new(Memory::default()), Arc::new(Told::default()));
        let store = Sealed::new(raw.clone(), sealing.clone(), told.clone());
        Self { raw, store, sealing, told }
    }

    /// What the attacker sees of a finished entry.
    pub(crate) async fn stored(&self, at: &Address) -> ibid::store::Finished {
        match self.raw.get(at).await.unwrap() {
            Some(Claim::Done(finished)) => finished,
            other => panic!("{other:?}"),
        }
    }

    /// Puts an entry in place as an attacker would who can write whatever he likes.
    pub(crate) async fn plant(&self, at: Address, entry: Planted) {
        if let Some(Claim::Done(there)) = self.raw.get(&at).await.unwrap() {
            assert_eq!(self.raw.operators().forget(&at, there.fence).await.unwrap(), Held::Held);
        }
        // A holder whose entry is gone is believed: whatever it says is put back.
        let ask = Ask { address: at, fingerprint: entry.fingerprint, ..Ask::clone(&ask(0)) };
        let lease = Lease { ask: Arc::new(ask), fence: Fence(u64::MAX / 4), attempt: entry.attempt, solo: false };
        let end = complete_as(entry.failed, entry.record);
        assert_eq!(self.raw.settle(&lease, &end).await.unwrap(), Held::Restored);
    }

    /// A claim that must find nothing to answer from, and be reported.
    pub(crate) async fn assert_refused(&self, ask: &Ask, why: &str) {
        let before = self.told.unreadable();
        let rival = Arc::new(Ask { token: Token::mint(), ..ask.clone() });
        let error = self.store.claim(&rival).await.expect_err(why);
        assert_eq!(error.kind, ErrorKind::Corrupt, "{why}: {error}");
        assert!(error.to_string().contains("it is not answered from"), "{why}: {error}");
        assert_eq!(self.store.get(&ask.address).await.expect_err(why).kind, ErrorKind::Corrupt, "{why}");
        assert_eq!(self.told.unreadable(), before + 2, "{why}: it is reported");
    }
}

/// A finished entry of an attacker's making.
#[derive(Debug, Clone)]
pub(crate) struct Planted {
    pub(crate) fingerprint: Fingerprint,
    pub(crate) attempt: u32,
    pub(crate) failed: bool,
    pub(crate) record: Bytes,
}

pub(crate) fn ask(nth: u8) -> Arc<Ask> {
    Arc::new(Ask {
        address: Address([nth; 32]),
        token: Token::mint(),
        fingerprint: Fingerprint { version: 1, digest: [nth; 32] },
        tags: Tags::new("planted-tenant", "planted-user", "POST /planted-path", "planted-key"),
        label: Bytes::from_static(b"planted-label"),
        hold: Duration::from_secs(30),
        keep: Duration::from_secs(3600),
        over: None,
    })
}

pub(crate) fn complete(record: impl Into<Bytes>) -> End {
    complete_as(false, record.into())
}

fn complete_as(failed: bool, record: Bytes) -> End {
    let outline = Outline { status: 201, requested_at_ms: 1, completed_at_ms: 2, took: Duration::from_millis(1) };
    End::Complete { failed, record, outline, keep: Duration::from_secs(3600) }
}

pub(crate) async fn granted(store: &dyn Store, ask: &Arc<Ask>) -> Lease {
    match store.claim(ask).await.unwrap() {
        Claim::Granted(lease) => lease,
        other => panic!("{other:?}"),
    }
}

/// Claims and completes.
pub(crate) async fn answered(store: &dyn Store, ask: &Arc<Ask>, record: impl Into<Bytes>) {
    let lease = granted(store, ask).await;
    assert_eq!(store.settle(&lease, &complete(record)).await.unwrap(), Held::Held);
}

pub(crate) async fn replayed(store: &dyn Store, ask: &Ask) -> Bytes {
    match store.claim(&Arc::new(Ask { token: Token::mint(), ..ask.clone() })).await.unwrap() {
        Claim::Done(finished) => {
            assert_eq!(finished.fingerprint, ask.fingerprint);
            finished.record
        }
        other => panic!("{other:?}"),
    }
}
