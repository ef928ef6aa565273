//! A flood of keys pushes nothing out that lives, and takes no more room than it was given.
//!
//! The short form of `cargo run --release -p ibid --example one_tenant_floods`, on the stores of one process, with copies of
//! answers in front of them that have room for few.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use ibid::{
    Decision, Engine, Operation, Policy, RefusalReason, RunOutcome,
    engine::CompletedAnswer,
    quota::{Quota, QuotaLimit},
    store::{Address, ClaimOutcome, ClaimRequest, ClaimToken, Fingerprint, Lease, Memory, Store, Tags},
};
use ibid_stores::{
    embedded::{Embedded, EmbeddedOptions},
    local_cache::{AnswerCache, LocalCache},
};

const FLOOD_KEYS: u64 = 50_000;
const QUOTA: u64 = 1_000;
/// What is there before the flood.
const LIVE_KEYS: u64 = 100;
const HOUR: Duration = Duration::from_secs(3600);

/// Answers with what tells it from all others.
struct FloodOperation(Bytes);

impl ibid::Claimant for FloodOperation {}

impl Operation for FloodOperation {
    type Answer = ();

    async fn run(&mut self, _: Option<&Lease>) -> RunOutcome<()> {
        RunOutcome::Complete((), CompletedAnswer { failed: false, record: self.0.clone(), summary: Default::default() })
    }
}

fn ask(tenant: &str, key: u64) -> ClaimRequest {
    let mut address = [0; 32];
    address[..8].copy_from_slice(&key.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    address[8..16].copy_from_slice(&key.to_le_bytes());
    address[16] = tenant.as_bytes()[0];
    ClaimRequest {
        address: Address(address),
        token: ClaimToken::mint(),
        fingerprint: Fingerprint::NONE,
        tags: Tags::new(tenant, "", "POST /pay", ""),
        label: Bytes::new(),
        lease: HOUR,
        ttl: HOUR,
        take_over: None,
    }
}

fn record(tenant: &str, key: u64) -> Bytes {
    format!("{tenant} {key} {}", "x".repeat(200)).into()
}

async fn pay(engine: &Engine, tenant: &str, key: u64) -> Decision<()> {
    engine
        .execute(Policy::ietf().checked().unwrap().terms(), ask(tenant, key), FloodOperation(record(tenant, key)))
        .await
}

/// What a flood came to.
#[derive(Debug, Default, PartialEq, Eq)]
struct FloodResult {
    ran: u64,
    over_quota: u64,
    no_room: u64,
}

/// Some answers and some claims are there; then somebody floods. What was there is there.
async fn flood(store: Arc<dyn Store>, quota: Option<u64>) -> (FloodResult, u64) {
    let copies = AnswerCache::new(64 << 10);
    let near: Arc<dyn Store> = Arc::new(LocalCache::new(store.clone(), copies.clone()));
    let limit = quota.map(|most| QuotaLimit { most, per: HOUR });
    let engine = Engine::new(near.clone()).with_quota(Arc::new(Quota::new(limit, None)));
    for key in 0..LIVE_KEYS {
        assert!(matches!(pay(&engine, "others", key).await, Decision::Ran(..)));
    }
    let mut running = Vec::new();
    for key in LIVE_KEYS..2 * LIVE_KEYS {
        let ClaimOutcome::Granted(lease) = near.claim(&Arc::new(ask("others", key))).await.unwrap() else {
            panic!("granted")
        };
        running.push(lease);
    }
    let before = store.admin().counts().await.unwrap().bytes;
    let verdicts = stream::iter(0..FLOOD_KEYS).map(|key| pay(&engine, "flood", key)).buffer_unordered(64);
    let counted = verdicts.fold(FloodResult::default(), async |mut counted, verdict| {
        match verdict {
            Decision::Ran(..) => counted.ran += 1,
            Decision::Refused(refusal) if refusal.reason == RefusalReason::QuotaExceeded => counted.over_quota += 1,
            Decision::Refused(refusal) if refusal.reason == RefusalReason::StoreUnavailable => counted.no_room += 1,
            other => panic!("{other:?}"),
        }
        counted
    });
    let counted = counted.await;
    assert!(copies.bytes() <= 64 << 10, "copies may go, and keep to their room: {}", copies.bytes());
    for key in 0..LIVE_KEYS {
        match pay(&engine, "others", key).await {
            Decision::Replay(finished, _) => assert_eq!(finished.record, record("others", key), "its own answer"),
            other => panic!("{key} was pushed out: {other:?}"),
        }
    }
    for lease in running {
        let found = store.get(&lease.request.address).await.unwrap();
        assert!(matches!(&found, Some(ClaimOutcome::InProgress(holder)) if holder.fence == lease.fence), "{found:?}");
    }
    let counts = store.admin().counts().await.unwrap();
    assert_eq!(counts.finished, LIVE_KEYS + counted.ran);
    println!("{}: {counted:?}, {} bytes more", store.guarantees().store, counts.bytes - before);
    (counted, counts.bytes)
}

fn embedded(max_size: u64) -> (tempfile::TempDir, Arc<dyn Store>) {
    let folder = tempfile::tempdir().unwrap();
    let options = EmbeddedOptions { max_size, segment_size: 1 << 20, ..EmbeddedOptions::default() };
    let store = Arc::new(Embedded::open(folder.path(), options).unwrap());
    (folder, store)
}

fn memory(max_bytes: u64) -> Arc<dyn Store> {
    Arc::new(Memory::new(max_bytes))
}

#[tokio::test]
async fn over_its_quota_a_flood_leaves_nothing_behind() {
    let (_folder, embedded) = embedded(1 << 30);
    for store in [memory(1 << 30), embedded] {
        let (flood, bytes) = flood(store, Some(QUOTA)).await;
        assert_eq!(flood, FloodResult { ran: QUOTA, over_quota: FLOOD_KEYS - QUOTA, no_room: 0 });
        assert!(bytes < 16 << 20, "{bytes}");
    }
}

#[tokio::test]
async fn a_flood_without_a_quota_is_kept_whole_where_there_is_room() {
    let (_folder, embedded) = embedded(1 << 30);
    for store in [memory(1 << 30), embedded] {
        assert_eq!(flood(store, None).await.0, FloodResult { ran: FLOOD_KEYS, over_quota: 0, no_room: 0 });
    }
}

#[tokio::test]
async fn where_there_is_no_room_a_flood_is_refused_and_what_lives_stays() {
    const ROOM: u64 = 8 << 20;
    let (folder, embedded) = embedded(ROOM);
    for store in [memory(ROOM), embedded] {
        let (flood, bytes) = flood(store, None).await;
        assert_eq!(flood.ran + flood.no_room, FLOOD_KEYS);
        assert!(flood.ran > 1000 && flood.no_room > 1000, "{flood:?}");
        assert!(bytes <= ROOM + (1 << 20), "{bytes}");
    }
    let files = std::fs::read_dir(folder.path()).unwrap();
    let taken: u64 = files.map(|file| file.unwrap().metadata().unwrap().len()).sum();
    assert!(taken <= ROOM + (1 << 20), "{taken} bytes of disk");
}
