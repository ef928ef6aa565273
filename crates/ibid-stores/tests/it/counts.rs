//! What tenants have used, across restarts of the embedded store.

use std::{fs, time::Duration};

use ibid::store::{Address, CounterUsage, Store as _};
use ibid_stores::embedded::{Disk as _, Embedded, EmbeddedOptions, TimeSource};
use parking_lot::Mutex;
use std::sync::Arc;

use crate::{sim_disk::SimDisk, small};

const HOUR: Duration = Duration::from_secs(3600);

async fn reserve(store: &Embedded, who: u64, n: u64) -> CounterUsage {
    let mut address = [7; 32];
    address[..8].copy_from_slice(&who.to_le_bytes());
    store.counters().unwrap().reserve(&Address(address), n, HOUR).await.unwrap()
}

/// A clock that is set by hand.
fn manual_clock() -> (Arc<Mutex<Duration>>, EmbeddedOptions) {
    let now = Arc::new(Mutex::new(HOUR * 500_000));
    let read = now.clone();
    (now, EmbeddedOptions { time: TimeSource::new(move || *read.lock()), ..small() })
}

#[tokio::test]
async fn counts_go_on_after_a_restart_and_windows_end_when_they_would_have() {
    let folder = tempfile::tempdir().unwrap();
    let (now, options) = manual_clock();
    let open = || Embedded::open(folder.path(), options.clone()).unwrap();
    let store = open();
    assert_eq!(reserve(&store, 1, 3).await, CounterUsage { total: 3, resets_in: HOUR });
    *now.lock() += HOUR / 4;
    assert_eq!(reserve(&store, 2, 10).await, CounterUsage { total: 10, resets_in: HOUR });
    drop(store);
    *now.lock() += HOUR / 4;
    let store = open();
    assert_eq!(reserve(&store, 1, 2).await, CounterUsage { total: 5, resets_in: HOUR / 2 });
    assert_eq!(reserve(&store, 3, 1).await, CounterUsage { total: 1, resets_in: HOUR });
    drop(store);
    // One has ended meanwhile.
    *now.lock() += HOUR / 2;
    let store = open();
    assert_eq!(reserve(&store, 1, 1).await, CounterUsage { total: 1, resets_in: HOUR });
    assert_eq!(reserve(&store, 2, 1).await, CounterUsage { total: 11, resets_in: HOUR / 4 });
    assert_eq!(reserve(&store, 3, 1).await.total, 2);
}

#[tokio::test]
async fn nobody_counts_where_nobody_is_limited() {
    let folder = tempfile::tempdir().unwrap();
    drop(Embedded::open(folder.path(), small()).unwrap());
    assert!(!folder.path().join("quota").exists());
}

#[tokio::test]
async fn a_damaged_slot_costs_its_own_count_only() {
    let folder = tempfile::tempdir().unwrap();
    let open = || Embedded::open(folder.path(), small()).unwrap();
    let store = open();
    for who in 0..10 {
        assert_eq!(reserve(&store, who, 5).await.total, 5);
    }
    drop(store);
    let file = folder.path().join("quota");
    let mut bytes = fs::read(&file).unwrap();
    bytes[3 * 64 + 41] ^= 1;
    // A slot that is there twice counts once, and half a slot is none.
    let (first, again) = (bytes[..64].to_vec(), 20 * 64..21 * 64);
    bytes[again].copy_from_slice(&first);
    bytes.extend(&first[..40]);
    fs::write(&file, bytes).unwrap();
    let store = open();
    for who in 0..10 {
        assert_eq!(reserve(&store, who, 1).await.total, if who == 3 { 1 } else { 6 }, "{who}");
    }
    drop(store);
    // Something else altogether: counted anew.
    fs::write(&file, [0xff; 1000]).unwrap();
    let store = open();
    assert_eq!(reserve(&store, 1, 1).await.total, 1);
    drop(store);
    assert_eq!(reserve(&open(), 1, 1).await.total, 2);
}

#[tokio::test]
async fn what_cannot_be_written_is_counted_all_the_same() {
    let folder = tempfile::tempdir().unwrap();
    drop(Embedded::open(folder.path(), small()).unwrap());
    // Nothing that could be opened as a file.
    fs::create_dir(folder.path().join("quota")).unwrap();
    let store = Embedded::open(folder.path(), small()).unwrap();
    for n in 1..=3 {
        assert_eq!(reserve(&store, 1, 1).await.total, n);
    }
}

#[tokio::test]
async fn places_of_tenants_that_are_gone_are_used_again_and_made_up_ones_share_one() {
    let disk = SimDisk::default();
    let (now, options) = manual_clock();
    let store = Embedded::open_on(Arc::new(disk.clone()), options).unwrap();
    const MOST: u64 = 1 << 16;
    for who in 0..MOST + 1000 {
        let _ = reserve(&store, who, 1).await;
    }
    assert!(reserve(&store, MOST + 1000, 1).await.total > 900, "newcomers share one count");
    assert_eq!(reserve(&store, 5, 1).await.total, 2, "the others do not notice");
    let length = disk.open("quota").unwrap().length().unwrap();
    assert!(length <= (MOST + 256) * 64, "{length} bytes");
    *now.lock() += HOUR * 2;
    for who in 0..1000 {
        assert_eq!(reserve(&store, 3 * MOST + who, 1).await.total, 1);
    }
    assert_eq!(disk.open("quota").unwrap().length().unwrap(), length);
}
