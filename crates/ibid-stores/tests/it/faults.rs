//! What the disk can do to a store: rot, fill up, refuse to write, fail to sync. And what a store does to itself:
//! recycling and moving, with nothing lost.

use std::{collections::HashSet, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::future::join_all;
use ibid::store::{ClaimOutcome, ErrorKind, Lease, RecordSummary, SettleOutcome, Settlement, Store};
use ibid_stores::embedded::{Corruption, Disk, Durability, Embedded, EmbeddedOptions};
use tempfile::TempDir;

use crate::{
    crash::{MINUTE, ManualClock, address, ask},
    sim_disk::{DiskRandom, SimDisk, SimDiskFaults},
    small,
};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

fn open(disk: &SimDisk) -> Embedded {
    Embedded::open_on(Arc::new(disk.clone()), small()).unwrap()
}

async fn claim(store: &Embedded, nth: usize, keep: Duration) -> Result<ClaimOutcome, ErrorKind> {
    store.claim(&Arc::new(ask(address(nth), keep))).await.map_err(|error| error.kind)
}

async fn granted(store: &Embedded, nth: usize, keep: Duration) -> Lease {
    match claim(store, nth, keep).await {
        Ok(ClaimOutcome::Granted(lease)) => lease,
        other => panic!("key {nth} found {other:?}"),
    }
}

fn record(nth: usize) -> Bytes {
    (0..300 + nth % 100).map(|at| (at + nth * 31) as u8).collect()
}

fn complete(nth: usize, keep: Duration) -> Settlement {
    Settlement::Complete { failed: false, record: record(nth), summary: RecordSummary::default(), ttl: keep }
}

async fn finish(store: &Embedded, nth: usize, keep: Duration) {
    let lease = granted(store, nth, keep).await;
    assert_eq!(store.settle(&lease, &complete(nth, keep)).await.unwrap(), SettleOutcome::Applied);
}

async fn assert_done(store: &Embedded, nth: usize) {
    match store.get(&address(nth)).await.unwrap() {
        Some(ClaimOutcome::Completed(done)) => assert_eq!(done.record, record(nth)),
        other => panic!("key {nth} was {other:?}"),
    }
}

async fn fill_store(disk: &SimDisk, keys: usize) {
    let store = open(disk);
    for nth in 0..keys {
        finish(&store, nth, DAY).await;
    }
}

fn segments(disk: &SimDisk) -> Vec<String> {
    disk.names().into_iter().filter(|name| name.ends_with(".seg")).collect()
}

#[tokio::test]
async fn rot_in_the_middle_is_reported_with_file_and_offset_and_never_served() {
    let disk = SimDisk::default();
    fill_store(&disk, 40).await;
    let name = &segments(&disk)[0];
    // A claim takes one sector, a completion two: this is the completion of key 1.
    disk.flip(name, 4096 + 4 * 512 + 100);
    // A snapshot spares reading it at the start; whoever asks for it finds it.
    let store = open(&disk);
    let error = store.get(&address(1)).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Corrupt);
    assert!(error.to_string().contains(&format!("{name}, offset {}", 4096 + 4 * 512 + 48)), "{error}");
    drop(store);
    disk.remove("index.snap").unwrap();
    let store = open(&disk);
    let found = &store.report().found;
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!((&found[0].file, found[0].offset), (name, 4096 + 4 * 512));
    assert_eq!((found[0].length, found[0].corruption.clone()), (Some(1024), Corruption::Checksum));
    let wanting = store.guarantees().warnings;
    assert!(wanting[0].contains(name) && wanting[0].contains("offset"), "{wanting:?}");
    assert!(
        matches!(claim(&store, 1, DAY).await, Ok(ClaimOutcome::OutcomeUnknown(_))),
        "it ran, and nobody knows how it ended"
    );
    for nth in (0..40).filter(|nth| *nth != 1) {
        assert_done(&store, nth).await;
    }
}

#[tokio::test]
async fn a_segment_whose_header_does_not_read_is_set_aside() {
    let disk = SimDisk::default();
    fill_store(&disk, 60).await;
    let all = segments(&disk);
    assert!(all.len() > 2, "{all:?}");
    disk.flip(&all[0], 50);
    let store = open(&disk);
    assert_eq!(store.report().found.iter().map(|found| &found.file).collect::<Vec<_>>(), [&all[0]]);
    assert!(disk.names().contains(&format!("{}.quarantined", all[0])));
    assert_done(&store, 59).await;
    drop(store);
    assert_eq!(open(&disk).report().found, [], "it was set aside for good");
}

#[tokio::test]
async fn what_rots_while_the_store_is_open_is_corrupt_and_not_granted() {
    let disk = SimDisk::default();
    let store = open(&disk);
    finish(&store, 1, DAY).await;
    for name in segments(&disk) {
        let at = disk.bytes(&name).windows(8).position(|bytes| bytes == &record(1)[40..48]);
        if let Some(at) = at {
            disk.flip(&name, at);
        }
    }
    assert_eq!(store.get(&address(1)).await.unwrap_err().kind, ErrorKind::Corrupt);
    assert_eq!(claim(&store, 1, DAY).await, Err(ErrorKind::Corrupt));
    finish(&store, 2, DAY).await;
    assert_done(&store, 2).await;
}

/// Whichever byte rots, no answer is wrong: it is right, or it is not there.
#[tokio::test]
async fn no_flipped_bit_is_ever_served() {
    let whole = SimDisk::default();
    fill_store(&whole, 12).await;
    let name = &segments(&whole)[0];
    let used = whole.bytes(name).iter().rposition(|byte| *byte != 0).unwrap();
    for at in (0..used).step_by(if used > 4000 { 61 } else { 1 }) {
        let disk = whole.copy();
        disk.flip(name, at);
        if at % 2 == 0 {
            disk.remove("index.snap").unwrap();
        }
        let store = open(&disk);
        for nth in 0..12 {
            match store.get(&address(nth)).await {
                Ok(Some(ClaimOutcome::Completed(done))) => {
                    assert_eq!(done.record, record(nth), "byte {at} was flipped")
                }
                Ok(Some(ClaimOutcome::OutcomeUnknown(_)) | None) => {}
                Err(error) => assert_eq!(error.kind, ErrorKind::Corrupt),
                other => panic!("byte {at} was flipped, and key {nth} was {other:?}"),
            }
        }
    }
}

/// However the files are damaged, opening them does not panic, and what is answered is right.
#[tokio::test]
async fn no_damage_makes_a_start_panic_or_lie() {
    let whole = SimDisk::default();
    fill_store(&whole, 30).await;
    let mut right = 0;
    for seed in 0..300 {
        let disk = whole.copy();
        let mut dice = DiskRandom(seed);
        for _ in 0..=dice.below(6) {
            disk.damage(&mut dice);
        }
        let store = match Embedded::open_on(Arc::new(disk.clone()), small()) {
            Ok(store) => store,
            Err(error) => panic!("seed {seed}: {error}"),
        };
        for nth in 0..30 {
            match store.get(&address(nth)).await {
                Ok(Some(ClaimOutcome::Completed(done))) => {
                    assert_eq!(done.record, record(nth), "seed {seed}");
                    right += 1;
                }
                Ok(Some(ClaimOutcome::OutcomeUnknown(_)) | None) => {}
                Err(error) => assert!(matches!(error.kind, ErrorKind::Corrupt | ErrorKind::NotApplied), "{error}"),
                other => panic!("seed {seed}: key {nth} was {other:?}"),
            }
        }
        finish(&store, 1000, DAY).await;
    }
    assert!(right > 300 * 15, "only {right} of {} records were found", 300 * 30);
}

#[tokio::test]
async fn without_power_to_survive_batches_are_not_synced() {
    let disk = SimDisk::default();
    let options = EmbeddedOptions { durability: Durability::Crash, ..EmbeddedOptions::default() };
    let store = Embedded::open_on(Arc::new(disk.clone()), options.clone()).unwrap();
    let before = disk.syncs();
    for nth in 0..20 {
        finish(&store, nth, DAY).await;
    }
    assert_eq!(disk.syncs(), before);
    // What a process that was killed leaves behind: all that it wrote.
    let left = disk.image(disk.position(), 1);
    let store = Embedded::open_on(Arc::new(left), options).unwrap();
    for nth in 0..20 {
        assert_done(&store, nth).await;
    }
}

/// A store that is full of segments which hold little makes room by itself.
#[tokio::test]
async fn a_full_store_is_tidied_up() {
    let disk = SimDisk::default();
    let hands = ManualClock::at(1_800_000_000_000_000);
    let options = EmbeddedOptions { max_size: 256 << 10, time: hands.source(), ..small() };
    let store = Embedded::open_on(Arc::new(disk.clone()), options).unwrap();
    let keep = |nth: usize| if nth.is_multiple_of(8) { DAY * 7 } else { MINUTE * 5 };
    let mut keys = 0;
    while let Ok(ClaimOutcome::Granted(lease)) = claim(&store, keys, MINUTE).await {
        assert_eq!(store.settle(&lease, &complete(keys, keep(keys))).await.unwrap(), SettleOutcome::Applied);
        keys += 1;
        assert!(keys < 1000, "nothing bounds the store");
    }
    // Now one in eight lives on, in every segment.
    hands.advance(MINUTE * 10);
    until(async || claim(&store, keys, MINUTE).await.is_ok()).await;
    for nth in (0..keys).step_by(8) {
        assert_done(&store, nth).await;
    }
}

/// Each life ends soon after its start, long before the keeper looks around.
#[tokio::test]
async fn lives_that_end_soon_after_their_start_do_not_fill_the_store() {
    let mut disk = SimDisk::default();
    let options = EmbeddedOptions { max_size: 256 << 10, ..small() };
    for nth in 0..60 {
        let store = Embedded::open_on(Arc::new(disk.clone()), options.clone()).unwrap();
        let Ok(ClaimOutcome::Granted(lease)) = claim(&store, nth, DAY).await else {
            panic!("life {nth}: the store is full")
        };
        assert_eq!(store.settle(&lease, &complete(nth, DAY)).await.unwrap(), SettleOutcome::Applied);
        // What a kill at this moment leaves.
        disk = disk.copy();
    }
    let store = Embedded::open_on(Arc::new(disk), options).unwrap();
    for nth in 0..60 {
        assert_done(&store, nth).await;
    }
}

#[test]
fn a_second_process_is_refused_and_told_who_is_there() {
    let path = TempDir::new().unwrap();
    let first = Embedded::open(path.path(), EmbeddedOptions::default()).unwrap();
    let refused = Embedded::open(path.path(), EmbeddedOptions::default()).unwrap_err().to_string();
    let holder = format!("in use by process {} on ", std::process::id());
    assert!(refused.contains(&holder), "{refused}");
    drop(first);
    Embedded::open(path.path(), EmbeddedOptions::default()).unwrap();
}

#[tokio::test]
async fn a_full_disk_refuses_claims_settles_what_runs_and_serves_again_when_there_is_room() {
    let disk = SimDisk::default();
    let store = open(&disk);
    finish(&store, 0, DAY).await;
    let leases = [granted(&store, 1, DAY).await, granted(&store, 2, DAY).await];
    let taken: usize = segments(&disk).iter().map(|name| disk.bytes(name).len()).sum();
    disk.set_faults(SimDiskFaults { capacity: Some(taken), ..SimDiskFaults::default() });
    let mut nth = 10;
    let refused = loop {
        match claim(&store, nth, DAY).await {
            Ok(ClaimOutcome::Granted(_)) => nth += 1,
            other => break other,
        }
        assert!(nth < 1000, "claims go on although the disk is full");
    };
    assert_eq!(refused, Err(ErrorKind::Rejected));
    assert_eq!(store.get(&address(nth)).await.unwrap(), None, "a refused claim leaves no trace");
    for lease in &leases {
        assert_eq!(
            store.settle(lease, &complete(7, DAY)).await.unwrap(),
            SettleOutcome::Applied,
            "those who ran are heard"
        );
    }
    assert_done(&store, 0).await;
    disk.set_faults(SimDiskFaults::default());
    until(async || claim(&store, nth, DAY).await.is_ok()).await;
    assert_eq!(store.guarantees().warnings, [""; 0]);
    drop(store);
    assert_eq!(open(&disk).report().found, []);
}

/// The same on a real file system: `mount -t tmpfs -o size=48m tmpfs DIRECTORY`, then
/// `IBID_SMALL_DISK=DIRECTORY cargo test -p ibid-stores -- --ignored on_a_real_disk_that_is_full`.
#[tokio::test]
#[ignore = "needs a small file system of its own, named by IBID_SMALL_DISK"]
async fn on_a_real_disk_that_is_full_claims_are_refused_until_there_is_room() {
    let path = std::path::PathBuf::from(std::env::var("IBID_SMALL_DISK").expect("IBID_SMALL_DISK: a directory"));
    std::fs::write(path.join("ballast"), vec![1; 16 << 20]).unwrap();
    let options = EmbeddedOptions { segment_size: 4 << 20, ..EmbeddedOptions::default() };
    let store = Embedded::open(path.join("store"), options.clone()).unwrap();
    let running: Vec<Lease> = join_all((0..50).map(async |nth| granted(&store, nth, DAY).await)).await;
    let mut nth = 100;
    let refused = 'full: loop {
        let claims = join_all((nth..nth + 256).map(async |nth| (nth, claim(&store, nth, DAY).await))).await;
        for (nth, found) in claims {
            match found {
                Ok(ClaimOutcome::Granted(lease)) => drop(store.settle(&lease, &complete(nth, DAY)).await),
                other => break 'full other,
            }
        }
        nth += 256;
    };
    assert_eq!(refused, Err(ErrorKind::Rejected));
    println!("{nth} keys fit");
    for (nth, lease) in running.iter().enumerate() {
        assert_eq!(
            store.settle(lease, &complete(nth, DAY)).await.unwrap(),
            SettleOutcome::Applied,
            "those who ran are heard"
        );
    }
    assert_done(&store, 100).await;
    std::fs::remove_file(path.join("ballast")).unwrap();
    until(async || claim(&store, 1_000_000, DAY).await.is_ok()).await;
    drop(store);
    let store = Embedded::open(path.join("store"), options).unwrap();
    assert_eq!(store.report().found, []);
    for nth in 0..50 {
        assert_done(&store, nth).await;
    }
}

#[tokio::test]
async fn a_full_store_refuses_new_keys_evicts_nothing_and_goes_on_when_some_have_expired() {
    let disk = SimDisk::default();
    let hands = ManualClock::at(1_800_000_000_000_000);
    let options = EmbeddedOptions { max_size: 128 << 10, time: hands.source(), ..small() };
    let store = Embedded::open_on(Arc::new(disk.clone()), options.clone()).unwrap();
    let mut keys = 0;
    while let Ok(ClaimOutcome::Granted(lease)) = claim(&store, keys, MINUTE).await {
        assert_eq!(store.settle(&lease, &complete(keys, DAY)).await.unwrap(), SettleOutcome::Applied);
        keys += 1;
        assert!(keys < 1000, "nothing bounds the store");
    }
    assert!(keys > 40, "only {keys} fit into 128 KiB");
    assert_eq!(claim(&store, keys, MINUTE).await, Err(ErrorKind::Rejected));
    for nth in 0..keys {
        assert_done(&store, nth).await;
    }
    let taken: usize = segments(&disk).iter().map(|name| disk.bytes(name).len()).sum();
    assert!(taken <= 128 << 10, "{taken} bytes");
    drop(store);
    // It opens full, too.
    let store = Embedded::open_on(Arc::new(disk.clone()), options).unwrap();
    assert_done(&store, keys - 1).await;
    hands.advance(DAY * 2);
    until(async || claim(&store, keys, MINUTE).await.is_ok()).await;
}

#[tokio::test]
async fn a_disk_that_turns_read_only_refuses_claims_and_serves_replays_until_it_is_writable() {
    let disk = SimDisk::default();
    let store = open(&disk);
    finish(&store, 1, DAY).await;
    let lease = granted(&store, 2, DAY).await;
    disk.set_faults(SimDiskFaults { read_only: true, ..SimDiskFaults::default() });
    assert_eq!(claim(&store, 3, DAY).await, Err(ErrorKind::Rejected));
    assert_done(&store, 1).await;
    assert!(matches!(claim(&store, 1, DAY).await, Ok(ClaimOutcome::Completed(_))));
    assert_eq!(store.settle(&lease, &complete(2, DAY)).await.unwrap_err().kind, ErrorKind::Rejected);
    disk.set_faults(SimDiskFaults::default());
    until(async || claim(&store, 3, DAY).await.is_ok()).await;
    assert_eq!(store.settle(&lease, &complete(2, DAY)).await.unwrap(), SettleOutcome::Applied);
    drop(store);
    let store = open(&disk);
    assert_eq!(store.report().found, []);
    assert_done(&store, 2).await;
}

#[tokio::test]
async fn one_failed_sync_is_survived_in_another_segment() {
    let disk = SimDisk::default();
    let store = open(&disk);
    finish(&store, 1, DAY).await;
    disk.set_faults(SimDiskFaults { syncs: HashSet::from([disk.syncs() + 1]), ..SimDiskFaults::default() });
    finish(&store, 2, DAY).await;
    assert_done(&store, 2).await;
    assert_eq!(store.guarantees().warnings, [""; 0]);
    drop(store);
    let store = open(&disk);
    assert_eq!(store.report().found, []);
    assert_done(&store, 1).await;
    assert_done(&store, 2).await;
}

#[tokio::test]
async fn after_two_failed_syncs_a_store_serves_replays_only() {
    let disk = SimDisk::default();
    let store = open(&disk);
    finish(&store, 1, DAY).await;
    let lease = granted(&store, 2, DAY).await;
    disk.set_faults(SimDiskFaults { syncs: (1..10_000).collect(), ..SimDiskFaults::default() });
    assert_eq!(store.settle(&lease, &complete(2, DAY)).await.unwrap_err().kind, ErrorKind::Ambiguous);
    disk.set_faults(SimDiskFaults::default());
    assert_eq!(claim(&store, 3, DAY).await, Err(ErrorKind::Rejected));
    assert_eq!(store.settle(&lease, &complete(2, DAY)).await.unwrap_err().kind, ErrorKind::Rejected);
    assert_done(&store, 1).await;
    assert!(store.guarantees().warnings[0].contains("read-only"), "{:?}", store.guarantees());
    drop(store);
    let store = open(&disk);
    assert_eq!(store.report().found, []);
    assert_done(&store, 1).await;
    assert_eq!(store.settle(&lease, &complete(2, DAY)).await.unwrap(), SettleOutcome::Applied);
}

#[tokio::test]
async fn a_snapshot_that_does_not_read_costs_nothing_but_time() {
    let whole = SimDisk::default();
    fill_store(&whole, 100).await;
    let store = open(&whole.copy());
    assert!(store.report().covered > 2, "{}", store.report());
    let length = whole.bytes("index.snap").len();
    for at in [0, length / 3, length / 2, length - 200, length - 5, length - 1] {
        let disk = whole.copy();
        disk.flip("index.snap", at);
        let store = open(&disk);
        assert_eq!((store.report().covered, &store.report().found[..]), (0, &[][..]), "byte {at} of {length}");
        for nth in 0..100 {
            assert_done(&store, nth).await;
        }
    }
}

/// Short-lived and long-lived keys side by side: the disk holds what lives, and nothing comes back.
#[tokio::test]
async fn stragglers_are_moved_and_their_segments_recycled() {
    let disk = SimDisk::default();
    let hands = ManualClock::at(1_800_000_000_000_000);
    let options = EmbeddedOptions { time: hands.source(), ..small() };
    let store = Embedded::open_on(Arc::new(disk.clone()), options.clone()).unwrap();
    let is_long = |nth: usize| nth.is_multiple_of(16);
    let mut keys = 0;
    for _ in 0..10 {
        for _ in 0..64 {
            finish(&store, keys, if is_long(keys) { DAY * 7 } else { MINUTE * 5 }).await;
            keys += 1;
        }
        hands.advance(MINUTE * 10);
        let _ = store.sweep(10_000).await.unwrap();
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    let taken = segments(&disk).len();
    // All that was written takes 60 segments or more; what lives fits into two.
    assert!(taken <= 20, "{taken} segments");
    let check = async |store: &Embedded| {
        for nth in 0..keys {
            match store.get(&address(nth)).await.unwrap() {
                Some(ClaimOutcome::Completed(done)) if is_long(nth) => assert_eq!(done.record, record(nth)),
                None if !is_long(nth) => {}
                other => panic!("key {nth} was {other:?}"),
            }
        }
    };
    check(&store).await;
    drop(store);
    let store = Embedded::open_on(Arc::new(disk.clone()), options.clone()).unwrap();
    assert_eq!(store.report().found, []);
    check(&store).await;
    hands.advance(DAY * 8);
    let _ = store.sweep(10_000).await.unwrap();
    assert_eq!(store.admin().counts().await.unwrap().finished, 0);
}

/// Waits for what must come.
async fn until(mut look: impl AsyncFnMut() -> bool) {
    for _ in 0..500 {
        if look().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("waited ten seconds in vain");
}
