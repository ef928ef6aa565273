//! Files of format version 1, kept as they were written: every later version must read them.
//!
//! They were made by `cargo test -p ibid-stores -- --ignored write_the_files_of_format_version_1`, once. They are not
//! made again: a change that cannot read them needs a new format version, and files of its own beside these.

use std::{fs, path::PathBuf, sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::store::{
    Address, ClaimOutcome, ClaimRequest, ClaimToken, Fence, Fingerprint, Lease, RecordSummary, SettleOutcome,
    Settlement, Store, Tags,
};
use ibid_stores::embedded::{Embedded, EmbeddedOptions, check};
use tempfile::TempDir;

use crate::{crash::ManualClock, small};

const HOUR: Duration = Duration::from_secs(60 * 60);
const LONG_TTL: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
/// When they were written, by their own clock.
const THEN: u64 = 1_800_000_000_000_000;

fn kept() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/embedded-v1")
}

fn ask(nth: u8, token: u8) -> Arc<ClaimRequest> {
    Arc::new(ClaimRequest {
        address: Address([nth; 32]),
        token: ClaimToken([token; 16]),
        fingerprint: Fingerprint { version: 1, digest: [nth ^ 0xff; 32] },
        tags: Tags::new("acme", "üser", "POST /payments", "550e****0000"),
        label: Bytes::from_static(b"a label"),
        lease: HOUR,
        ttl: LONG_TTL,
        take_over: None,
    })
}

fn complete(failed: bool, record: &'static [u8]) -> Settlement {
    let outline = RecordSummary { status: 201, requested_at_ms: 1, completed_at_ms: 2, took: Duration::from_millis(3) };
    Settlement::Complete { failed, record: Bytes::from_static(record), summary: outline, ttl: LONG_TTL }
}

async fn claim_granted(store: &Embedded, ask: Arc<ClaimRequest>) -> Lease {
    match store.claim(&ask).await.unwrap() {
        ClaimOutcome::Granted(lease) => lease,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
#[ignore = "makes the files that are kept"]
async fn write_the_files_of_format_version_1() {
    fs::create_dir_all(kept()).unwrap();
    let hands = ManualClock::at(THEN);
    let store = Embedded::open(kept(), EmbeddedOptions { time: hands.source(), ..small() }).unwrap();
    claim_granted(&store, ask(1, 1)).await;
    let lease = claim_granted(&store, ask(2, 2)).await;
    assert_eq!(store.settle(&lease, &complete(false, b"done")).await.unwrap(), SettleOutcome::Applied);
    let lease = claim_granted(&store, ask(3, 3)).await;
    assert_eq!(store.settle(&lease, &complete(true, b"failed")).await.unwrap(), SettleOutcome::Applied);
    let lease = claim_granted(&store, ask(4, 4)).await;
    let park = Settlement::Park { ttl: LONG_TTL, retry_in: HOUR };
    assert_eq!(store.settle(&lease, &park).await.unwrap(), SettleOutcome::Applied);
    let lease = claim_granted(&store, ask(5, 5)).await;
    assert_eq!(store.settle(&lease, &Settlement::Release).await.unwrap(), SettleOutcome::Applied);
    let lease = claim_granted(&store, ask(6, 6)).await;
    assert_eq!(store.settle(&lease, &Settlement::Release).await.unwrap(), SettleOutcome::Applied);
    let lease = claim_granted(&store, ask(6, 7)).await;
    assert_eq!(store.settle(&lease, &complete(false, b"by the second")).await.unwrap(), SettleOutcome::Applied);
    for nth in 10..40 {
        let lease = claim_granted(&store, ask(nth, nth)).await;
        assert_eq!(store.settle(&lease, &complete(false, b"one of many")).await.unwrap(), SettleOutcome::Applied);
    }
}

#[tokio::test]
async fn the_files_of_format_version_1_are_read() {
    for with_snapshot in [true, false] {
        let path = TempDir::new().unwrap();
        for file in fs::read_dir(kept()).unwrap() {
            let file = file.unwrap();
            fs::copy(file.path(), path.path().join(file.file_name())).unwrap();
        }
        if !with_snapshot {
            fs::remove_file(path.path().join("index.snap")).unwrap();
        }
        let report = check(path.path()).unwrap();
        assert_eq!((report.found.len(), report.entries), (0, 73), "{report}");
        let hands = ManualClock::at(THEN + 1_000_000);
        let store = Embedded::open(path.path(), EmbeddedOptions { time: hands.source(), ..small() }).unwrap();
        assert_eq!(store.report().covered > 0, with_snapshot);

        let get = async |nth: u8| store.get(&Address([nth; 32])).await.unwrap();
        let Some(ClaimOutcome::OutcomeUnknown(ran)) = get(1).await else { panic!("what ran is unknown") };
        assert_eq!((ran.attempt, ran.takeover_in), (1, HOUR));
        assert_eq!(ran.fingerprint, ask(1, 1).fingerprint);
        for (nth, failed, record) in [(2, false, &b"done"[..]), (3, true, b"failed"), (6, false, b"by the second")] {
            let Some(ClaimOutcome::Completed(done)) = get(nth).await else { panic!("key {nth} is done") };
            assert_eq!((done.failed, &done.record[..]), (failed, record));
            assert_eq!(done.attempt, if nth == 6 { 2 } else { 1 });
        }
        assert!(matches!(get(4).await, Some(ClaimOutcome::OutcomeUnknown(parked)) if parked.fence != Fence::UNSEEN));
        assert_eq!(get(5).await, None);
        for spent in [ask(5, 5), ask(6, 6)] {
            assert_eq!(store.claim(&spent).await.unwrap(), ClaimOutcome::TokenSpent);
        }
        for nth in 10..40 {
            assert!(matches!(get(nth).await, Some(ClaimOutcome::Completed(done)) if done.record == b"one of many"[..]));
        }
    }
}
