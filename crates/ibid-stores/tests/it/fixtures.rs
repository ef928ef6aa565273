//! Files of format version 1, kept as they were written: every later version must read them.
//!
//! They were made by `cargo test -p ibid-stores -- --ignored write_the_files_of_format_version_1`, once. They are not
//! made again: a change that cannot read them needs a new format version, and files of its own beside these.

use std::{fs, path::PathBuf, sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::store::{Address, Ask, Claim, End, Fence, Fingerprint, Held, Lease, Outline, Store, Tags, Token};
use ibid_stores::embedded::{Embedded, Options, check};
use tempfile::TempDir;

use crate::{crash::Hands, small};

const HOUR: Duration = Duration::from_secs(60 * 60);
const YEARS: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
/// When they were written, by their own clock.
const THEN: u64 = 1_800_000_000_000_000;

fn kept() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/embedded-v1")
}

fn ask(nth: u8, token: u8) -> Arc<Ask> {
    Arc::new(Ask {
        address: Address([nth; 32]),
        token: Token([token; 16]),
        fingerprint: Fingerprint { version: 1, digest: [nth ^ 0xff; 32] },
        tags: Tags::new("acme", "üser", "POST /payments", "550e****0000"),
        label: Bytes::from_static(b"a label"),
        hold: HOUR,
        keep: YEARS,
        over: None,
    })
}

fn complete(failed: bool, record: &'static [u8]) -> End {
    let outline = Outline { status: 201, requested_at_ms: 1, completed_at_ms: 2, took: Duration::from_millis(3) };
    End::Complete { failed, record: Bytes::from_static(record), outline, keep: YEARS }
}

async fn granted(store: &Embedded, ask: Arc<Ask>) -> Lease {
    match store.claim(&ask).await.unwrap() {
        Claim::Granted(lease) => lease,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
#[ignore = "makes the files that are kept"]
async fn write_the_files_of_format_version_1() {
    fs::create_dir_all(kept()).unwrap();
    let hands = Hands::at(THEN);
    let store = Embedded::open(kept(), Options { time: hands.source(), ..small() }).unwrap();
    granted(&store, ask(1, 1)).await;
    let lease = granted(&store, ask(2, 2)).await;
    assert_eq!(store.settle(&lease, &complete(false, b"done")).await.unwrap(), Held::Held);
    let lease = granted(&store, ask(3, 3)).await;
    assert_eq!(store.settle(&lease, &complete(true, b"failed")).await.unwrap(), Held::Held);
    let lease = granted(&store, ask(4, 4)).await;
    let park = End::Park { keep: YEARS, retry_in: HOUR };
    assert_eq!(store.settle(&lease, &park).await.unwrap(), Held::Held);
    let lease = granted(&store, ask(5, 5)).await;
    assert_eq!(store.settle(&lease, &End::Release).await.unwrap(), Held::Held);
    let lease = granted(&store, ask(6, 6)).await;
    assert_eq!(store.settle(&lease, &End::Release).await.unwrap(), Held::Held);
    let lease = granted(&store, ask(6, 7)).await;
    assert_eq!(store.settle(&lease, &complete(false, b"by the second")).await.unwrap(), Held::Held);
    for nth in 10..40 {
        let lease = granted(&store, ask(nth, nth)).await;
        assert_eq!(store.settle(&lease, &complete(false, b"one of many")).await.unwrap(), Held::Held);
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
        let hands = Hands::at(THEN + 1_000_000);
        let store = Embedded::open(path.path(), Options { time: hands.source(), ..small() }).unwrap();
        assert_eq!(store.report().covered > 0, with_snapshot);

        let get = async |nth: u8| store.get(&Address([nth; 32])).await.unwrap();
        let Some(Claim::Unknown(ran)) = get(1).await else { panic!("what ran is unknown") };
        assert_eq!((ran.attempt, ran.takeover_in), (1, HOUR));
        assert_eq!(ran.fingerprint, ask(1, 1).fingerprint);
        for (nth, failed, record) in [(2, false, &b"done"[..]), (3, true, b"failed"), (6, false, b"by the second")] {
            let Some(Claim::Done(done)) = get(nth).await else { panic!("key {nth} is done") };
            assert_eq!((done.failed, &done.record[..]), (failed, record));
            assert_eq!(done.attempt, if nth == 6 { 2 } else { 1 });
        }
        assert!(matches!(get(4).await, Some(Claim::Unknown(parked)) if parked.fence != Fence::UNSEEN));
        assert_eq!(get(5).await, None);
        for spent in [ask(5, 5), ask(6, 6)] {
            assert_eq!(store.claim(&spent).await.unwrap(), Claim::Spent);
        }
        for nth in 10..40 {
            assert!(matches!(get(nth).await, Some(Claim::Done(done)) if done.record == b"one of many"[..]));
        }
    }
}
