//! Sealed stores: the contract, what an attacker with the store in hand can do, and what a thief of it sees.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::{
    Observer,
    observe::{EngineEvent, NoopObserver},
    store::{
        Address, ClaimOutcome, ClaimRequest, ClaimToken, ErrorKind, Fence, Fingerprint, Lease, Memory, RecordSummary,
        SettleOutcome, Settlement, Store, Tags,
    },
};
use ibid_stores::{
    StoreConfig, StoreOptions,
    seal::{SealKey, SealOptions, SealedStore, Sealer},
};
use ibid_testkit::{
    broken::failing_cases,
    contract,
    property::{HistoryClock, check_histories},
    wrappers::{LossyStore, RetryingStore},
};
use parking_lot::Mutex;
use testbed::TestRedis;

use crate::{local_cache::seed, open_temporary};

mod forged_records;
mod key_rotation;
mod secret_leaks;
mod tiered_seal;

pub(crate) fn key(id: &str) -> SealKey {
    let mut bytes = [0x5c; 32];
    bytes[..id.len()].copy_from_slice(id.as_bytes());
    SealKey::new(id, bytes).unwrap()
}

pub(crate) fn sealing() -> Sealer {
    Sealer::new(key("k1"), Vec::new(), &[0x33; 32], SealOptions::default())
}

fn sealed(store: impl Store) -> SealedStore {
    SealedStore::new(Arc::new(store), sealing(), Arc::new(NoopObserver))
}

async fn open_configured(url: &str) -> Arc<dyn Store> {
    let prefix: String = ClaimToken::mint().0[..6].iter().map(|byte| format!("{byte:02x}")).collect();
    open(url, &format!("sealed-{prefix}"), Some(sealing())).await
}

async fn open(url: &str, prefix: &str, sealing: Option<Sealer>) -> Arc<dyn Store> {
    let parts = StoreOptions {
        url: url.parse().unwrap(),
        fallback: None,
        cache: None,
        prefix: prefix.into(),
        timeout: Duration::from_secs(20),
        wait_replicas: 0,
        local_cache: Some(0),
    };
    StoreConfig::new(parts).unwrap().with_sealer(sealing).open(Arc::new(NoopObserver)).await.unwrap().store
}

ibid_testkit::contract_tests!(sealed_memory, async { sealed(Memory::default()) });

ibid_testkit::contract_tests!(sealed_embedded, async { sealed(open_temporary()) });

ibid_testkit::contract_tests!(sealed_memory_losing_answers, async {
    RetryingStore::new(sealed(LossyStore::new(Memory::default(), seed(), 3)))
});

ibid_testkit::contract_tests!(sealed_redis, open_configured(&TestRedis::shared().url()));

ibid_testkit::contract_tests!(sealed_postgres, open_configured(&crate::postgres::url()));

#[tokio::test]
async fn one_store_serves_all_cases_at_the_same_time() {
    assert_eq!(failing_cases(Arc::new(sealed(Memory::default())), Duration::from_secs(120)).await, [""; 0]);
}

#[tokio::test]
async fn sweeps_count_what_they_remove() {
    contract::admin::sweeps_count_what_they_remove(&sealed(Memory::default())).await;
}

#[test]
fn it_answers_as_the_model_says() {
    check_histories(300, HistoryClock::Paused, async || sealed(Memory::default()));
}

#[test]
fn near_and_tiered_around_and_beneath_it_answer_as_the_model_says() {
    use ibid_stores::{
        local_cache::{AnswerCache, LocalCache},
        tiered::{TieredMode, TieredStore},
    };
    check_histories(200, HistoryClock::Paused, async || {
        LocalCache::new(Arc::new(sealed(Memory::default())), AnswerCache::default())
    });
    for mode in [TieredMode::Strict, TieredMode::Loose] {
        check_histories(200, HistoryClock::Paused, async || {
            let memory = || Arc::new(Memory::default());
            sealed(TieredStore::new(memory(), memory(), mode, Arc::new(NoopObserver), None))
        });
    }
}

/// Counts what does not open.
#[derive(Debug, Default)]
pub(crate) struct UnreadableEvents(Mutex<Vec<String>>);

impl Observer for UnreadableEvents {
    fn on_event(&self, notice: &EngineEvent<'_>) {
        self.0.lock().push(notice.to_string());
    }
}

impl UnreadableEvents {
    fn unreadable_count(&self) -> usize {
        self.0.lock().iter().filter(|said| said.contains("cannot be read and was not answered from")).count()
    }
}

/// A memory that an attacker has in hand, and the same behind a seal.
pub(crate) struct SealFixture {
    pub(crate) raw: Arc<Memory>,
    pub(crate) store: SealedStore,
    pub(crate) sealing: Sealer,
    pub(crate) events: Arc<UnreadableEvents>,
}

impl SealFixture {
    pub(crate) fn new(sealing: Sealer) -> Self {
        let (raw, events) = (Arc::new(Memory::default()), Arc::new(UnreadableEvents::default()));
        let store = SealedStore::new(raw.clone(), sealing.clone(), events.clone());
        Self { raw, store, sealing, events }
    }

    /// What the attacker sees of a finished entry.
    pub(crate) async fn stored_entry(&self, at: &Address) -> ibid::store::CompletedEntry {
        match self.raw.get(at).await.unwrap() {
            Some(ClaimOutcome::Completed(finished)) => finished,
            other => panic!("{other:?}"),
        }
    }

    /// Puts an entry in place as an attacker would who can write whatever he likes.
    pub(crate) async fn write_forged_entry(&self, at: Address, entry: ForgedEntry) {
        if let Some(ClaimOutcome::Completed(there)) = self.raw.get(&at).await.unwrap() {
            assert_eq!(self.raw.admin().forget(&at, there.fence).await.unwrap(), SettleOutcome::Applied);
        }
        // A holder whose entry is gone is believed: whatever it says is put back.
        let ask = ClaimRequest { address: at, fingerprint: entry.fingerprint, ..ClaimRequest::clone(&ask(0)) };
        let lease =
            Lease { request: Arc::new(ask), fence: Fence(u64::MAX / 4), attempt: entry.attempt, front_only: false };
        let end = complete_as(entry.failed, entry.record);
        assert_eq!(self.raw.settle(&lease, &end).await.unwrap(), SettleOutcome::Restored);
    }

    /// A claim that must find nothing to answer from, and be reported.
    pub(crate) async fn assert_refused(&self, ask: &ClaimRequest, why: &str) {
        let before = self.events.unreadable_count();
        let rival = Arc::new(ClaimRequest { token: ClaimToken::mint(), ..ask.clone() });
        let error = self.store.claim(&rival).await.expect_err(why);
        assert_eq!(error.kind, ErrorKind::Corrupt, "{why}: {error}");
        assert!(error.to_string().contains("it is not answered from"), "{why}: {error}");
        assert_eq!(self.store.get(&ask.address).await.expect_err(why).kind, ErrorKind::Corrupt, "{why}");
        assert_eq!(self.events.unreadable_count(), before + 2, "{why}: it is reported");
    }
}

/// A finished entry of an attacker's making.
#[derive(Debug, Clone)]
pub(crate) struct ForgedEntry {
    pub(crate) fingerprint: Fingerprint,
    pub(crate) attempt: u32,
    pub(crate) failed: bool,
    pub(crate) record: Bytes,
}

pub(crate) fn ask(nth: u8) -> Arc<ClaimRequest> {
    Arc::new(ClaimRequest {
        address: Address([nth; 32]),
        token: ClaimToken::mint(),
        fingerprint: Fingerprint { version: 1, digest: [nth; 32] },
        tags: Tags::new("planted-tenant", "planted-user", "POST /planted-path", "planted-key"),
        label: Bytes::from_static(b"planted-label"),
        lease: Duration::from_secs(30),
        ttl: Duration::from_secs(3600),
        take_over: None,
    })
}

pub(crate) fn complete(record: impl Into<Bytes>) -> Settlement {
    complete_as(false, record.into())
}

fn complete_as(failed: bool, record: Bytes) -> Settlement {
    let outline = RecordSummary { status: 201, requested_at_ms: 1, completed_at_ms: 2, took: Duration::from_millis(1) };
    Settlement::Complete { failed, record, summary: outline, ttl: Duration::from_secs(3600) }
}

pub(crate) async fn granted(store: &dyn Store, ask: &Arc<ClaimRequest>) -> Lease {
    match store.claim(ask).await.unwrap() {
        ClaimOutcome::Granted(lease) => lease,
        other => panic!("{other:?}"),
    }
}

/// Claims and completes.
pub(crate) async fn answered(store: &dyn Store, ask: &Arc<ClaimRequest>, record: impl Into<Bytes>) {
    let lease = granted(store, ask).await;
    assert_eq!(store.settle(&lease, &complete(record)).await.unwrap(), SettleOutcome::Applied);
}

pub(crate) async fn expect_replayed(store: &dyn Store, ask: &ClaimRequest) -> Bytes {
    match store.claim(&Arc::new(ClaimRequest { token: ClaimToken::mint(), ..ask.clone() })).await.unwrap() {
        ClaimOutcome::Completed(finished) => {
            assert_eq!(finished.fingerprint, ask.fingerprint);
            finished.record
        }
        other => panic!("{other:?}"),
    }
}
