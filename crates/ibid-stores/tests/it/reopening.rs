//! What happens to a store between two openings: time passes, and files are removed.

use std::{
    fs,
    sync::Arc,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use ibid::store::{ClaimOutcome, ClaimRequest, Lease, RecordSummary, SettleOutcome, Settlement, Store};
use ibid_stores::embedded::{Embedded, EmbeddedOptions, compact};

use crate::{
    crash::{MINUTE, ManualClock, address, ask},
    sim_disk::SimDisk,
    small,
};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
const HOUR: Duration = Duration::from_secs(60 * 60);

fn open(disk: &SimDisk, hands: &ManualClock) -> Embedded {
    Embedded::open_on(Arc::new(disk.clone()), EmbeddedOptions { time: hands.source(), ..small() }).unwrap()
}

async fn claim_granted(store: &Embedded, ask: &Arc<ClaimRequest>) -> Lease {
    match store.claim(ask).await.unwrap() {
        ClaimOutcome::Granted(lease) => lease,
        other => panic!("{other:?}"),
    }
}

async fn assert_unknown(store: &Embedded, nth: usize, takeover_in: Duration) {
    match store.get(&address(nth)).await.unwrap() {
        Some(ClaimOutcome::OutcomeUnknown(holder)) => assert_eq!(holder.takeover_in, takeover_in),
        other => panic!("key {nth} was {other:?}"),
    }
    let rival = Arc::new(ask(address(nth), HOUR));
    assert!(matches!(store.claim(&rival).await.unwrap(), ClaimOutcome::OutcomeUnknown(_)), "a second run");
}

#[tokio::test]
async fn a_claim_whose_retention_ended_while_the_store_was_closed_is_kept_and_reported() {
    let (disk, hands) = (SimDisk::default(), ManualClock::at(1_800_000_000_000_000));
    let store = open(&disk, &hands);
    let lease = claim_granted(&store, &Arc::new(ask(address(1), HOUR))).await;
    let finished = claim_granted(&store, &Arc::new(ask(address(2), HOUR))).await;
    let (record, outline) = (Bytes::from_static(b"done"), RecordSummary::default());
    let end = Settlement::Complete { failed: false, record, summary: outline, ttl: HOUR };
    assert_eq!(store.settle(&finished, &end).await.unwrap(), SettleOutcome::Applied);
    // What a kill leaves.
    let mut disk = disk.copy();
    hands.advance(DAY);
    for opening in 0..3 {
        let store = open(&disk, &hands);
        // The first opening has written it again.
        let overdue: &[_] = if opening == 0 { &[lease.request.address] } else { &[] };
        assert_eq!(store.report().overdue_claims, overdue);
        assert_unknown(&store, 1, MINUTE).await;
        assert_eq!(store.get(&address(2)).await.unwrap(), None, "what is finished expires as ever");
        assert_eq!(store.admin().counts().await.unwrap().unknown, 1);
        disk = disk.copy();
    }
    // From then on it expires as every other unknown outcome.
    let store = open(&disk, &hands);
    hands.advance(MINUTE + HOUR);
    assert_eq!(store.get(&address(1)).await.unwrap(), None);
    drop(store);
    let store = open(&disk, &hands);
    assert_eq!(store.report().overdue_claims, [], "it expired while the store was open");
    claim_granted(&store, &Arc::new(ask(address(1), HOUR))).await;
}

#[tokio::test]
async fn a_kill_at_any_moment_of_that_opening_forgets_nothing() {
    let (disk, hands) = (SimDisk::default(), ManualClock::at(1_800_000_000_000_000));
    let store = open(&disk, &hands);
    for nth in 0..50 {
        claim_granted(&store, &Arc::new(ask(address(nth), HOUR))).await;
    }
    drop(store);
    let closed = disk.position();
    hands.advance(DAY);
    drop(open(&disk, &hands));
    for position in closed..=disk.position() {
        let store = open(&disk.image(position, position as u64 % 5), &hands);
        for nth in 0..50 {
            let found = store.get(&address(nth)).await.unwrap();
            let at = format!("operation {position} of {closed} to {}", disk.position());
            assert!(
                matches!(found, Some(ClaimOutcome::OutcomeUnknown(_))),
                "{at}: key {nth} was {found:?}; {:?}",
                store.report()
            );
        }
    }
}

#[tokio::test]
async fn a_claim_that_expired_while_the_store_was_open_does_not_come_back() {
    let (disk, hands) = (SimDisk::default(), ManualClock::at(1_800_000_000_000_000));
    let store = open(&disk, &hands);
    claim_granted(&store, &Arc::new(ask(address(1), HOUR))).await;
    hands.advance(DAY);
    assert_eq!(store.get(&address(1)).await.unwrap(), None);
    drop(store);
    hands.advance(DAY);
    let store = open(&disk, &hands);
    assert_eq!((&store.report().overdue_claims[..], store.get(&address(1)).await.unwrap()), (&[][..], None));
}

#[tokio::test]
async fn compacting_keeps_such_a_claim() {
    let folder = tempfile::tempdir().unwrap();
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let hands = ManualClock::at((now - DAY).as_micros() as u64);
    let store = Embedded::open(folder.path(), EmbeddedOptions { time: hands.source(), ..small() }).unwrap();
    claim_granted(&store, &Arc::new(ask(address(1), HOUR))).await;
    drop(store);
    compact(folder.path()).unwrap();
    let store = Embedded::open(folder.path(), small()).unwrap();
    assert!(matches!(store.get(&address(1)).await.unwrap(), Some(ClaimOutcome::OutcomeUnknown(_))));
}

#[test]
fn without_its_lock_file_a_store_is_still_opened_once() {
    let folder = tempfile::tempdir().unwrap();
    let store = Embedded::open(folder.path(), small()).unwrap();
    fs::remove_file(folder.path().join("lock")).unwrap();
    let refused = Embedded::open(folder.path(), small()).unwrap_err().to_string();
    assert_eq!(refused, "it is in use by another process");
    drop(store);
    Embedded::open(folder.path(), small()).unwrap();
}
