//! How calls become batches, seen from outside: what they wait for, and what they do not.

use std::{
    fmt,
    future::poll_fn,
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::Poll,
    time::Duration,
};

use futures_util::future::join_all;
use ibid::store::{ClaimOutcome, ErrorKind, Lease, RecordSummary, SettleOutcome, Settlement, Store};
use ibid_stores::embedded::{Disk, DiskFile, Embedded};
use parking_lot::{Condvar, Mutex};
use tokio::{task::yield_now, time::timeout};

use crate::{
    crash::{MINUTE, address, ask},
    sim_disk::{SimDisk, SimDiskFaults},
    small,
};

/// How long anything may take that must not hang.
const LIMIT: Duration = Duration::from_secs(20);

/// A disk whose syncs and reads can be held up.
#[derive(Debug, Clone, Default)]
struct GatedDisk {
    disk: SimDisk,
    syncs: Arc<Gate>,
    reads: Arc<Gate>,
}

#[derive(Debug, Default)]
struct Gate {
    is_closed: Mutex<bool>,
    opened: Condvar,
    arrivals: AtomicUsize,
}

impl Gate {
    fn close(&self) {
        *self.is_closed.lock() = true;
        self.arrivals.store(0, SeqCst);
    }

    /// Waits until somebody has come to the closed gate.
    async fn wait_for_arrival(&self) {
        while self.arrivals.load(SeqCst) == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    fn open(&self) {
        *self.is_closed.lock() = false;
        self.opened.notify_all();
    }

    fn pass(&self) {
        self.arrivals.fetch_add(1, SeqCst);
        self.opened.wait_while(&mut self.is_closed.lock(), |is_closed| *is_closed);
    }
}

#[derive(Debug)]
struct GatedFile {
    file: Arc<dyn DiskFile>,
    disk: GatedDisk,
}

impl GatedDisk {
    fn open_store(&self) -> Arc<Embedded> {
        Arc::new(Embedded::open_on(Arc::new(self.clone()), small()).unwrap())
    }

    fn file(&self, file: Arc<dyn DiskFile>) -> Arc<dyn DiskFile> {
        Arc::new(GatedFile { file, disk: self.clone() })
    }
}

impl Disk for GatedDisk {
    fn list(&self) -> io::Result<Vec<String>> {
        self.disk.list()
    }
    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        Ok(self.file(self.disk.create(name)?))
    }
    fn open(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        Ok(self.file(Disk::open(&self.disk, name)?))
    }
    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.disk.rename(from, to)
    }
    fn remove(&self, name: &str) -> io::Result<()> {
        self.disk.remove(name)
    }
    fn sync_dir(&self) -> io::Result<()> {
        self.disk.sync_dir()
    }
    fn lock(&self) -> io::Result<Box<dyn fmt::Debug + Send + Sync>> {
        self.disk.lock()
    }
}

impl DiskFile for GatedFile {
    fn length(&self) -> io::Result<u64> {
        self.file.length()
    }
    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        self.disk.reads.pass();
        self.file.read_at(into, at)
    }
    fn read_cached_at(&self, _: &mut [u8], _: u64) -> io::Result<bool> {
        Ok(false)
    }
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.file.write_at(bytes, at)
    }
    fn sync_data(&self) -> io::Result<()> {
        self.disk.syncs.pass();
        self.file.sync_data()
    }
    fn allocate(&self, length: u64) -> io::Result<()> {
        self.file.allocate(length)
    }
}

async fn claim(store: Arc<Embedded>, nth: usize) -> Result<ClaimOutcome, ErrorKind> {
    let asked = store.claim(&Arc::new(ask(address(nth), MINUTE))).await;
    asked.map_err(|error| error.kind)
}

async fn granted(store: &Arc<Embedded>, nth: usize) -> Lease {
    match timeout(LIMIT, claim(store.clone(), nth)).await.expect("it is answered") {
        Ok(ClaimOutcome::Granted(lease)) => lease,
        other => panic!("key {nth} found {other:?}"),
    }
}

async fn finish(store: &Arc<Embedded>, nth: usize) {
    let lease = granted(store, nth).await;
    let record = vec![7; 100].into();
    let end = Settlement::Complete { failed: false, record, summary: RecordSummary::default(), ttl: MINUTE };
    assert_eq!(store.settle(&lease, &end).await.unwrap(), SettleOutcome::Applied);
}

/// Polls a future once. Returns whether it still waits.
async fn still_waits<F: Future + Unpin>(future: &mut F) -> bool {
    poll_fn(|context| Poll::Ready(Pin::new(&mut *future).poll(context).is_pending())).await
}

/// Lets all other tasks run as far as they get.
async fn let_others_run() {
    for _ in 0..50 {
        yield_now().await;
    }
}

#[tokio::test]
async fn calls_that_come_while_a_batch_is_synced_share_the_next_one() {
    const CALLS: usize = 8;
    let disk = GatedDisk::default();
    let store = disk.open_store();
    let before = store.batch_count();
    disk.syncs.close();
    let first = tokio::spawn(claim(store.clone(), CALLS));
    disk.syncs.wait_for_arrival().await;
    let others: Vec<_> = (0..CALLS).map(|nth| tokio::spawn(claim(store.clone(), nth))).collect();
    let_others_run().await;
    disk.syncs.open();
    for found in join_all(others.into_iter().chain([first])).await {
        assert!(matches!(found.unwrap(), Ok(ClaimOutcome::Granted(_))));
    }
    assert_eq!(store.batch_count() - before, 2);
}

#[tokio::test]
async fn a_read_that_waits_for_the_disk_holds_up_no_other_task_of_its_thread() {
    let disk = GatedDisk::default();
    let store = disk.open_store();
    finish(&store, 1).await;
    disk.reads.close();
    let at = address(1);
    let (mut replay, mut claimed) = (store.get(&at), Box::pin(claim(store.clone(), 1)));
    let filter = ibid::store::EntryFilter::default();
    let mut listed = store.admin().list(&filter, Default::default(), 10);
    let_others_run().await;
    assert!(still_waits(&mut replay).await && still_waits(&mut claimed).await && still_waits(&mut listed).await);
    finish(&store, 2).await;
    disk.reads.open();
    assert!(matches!(timeout(LIMIT, replay).await.unwrap(), Ok(Some(ClaimOutcome::Completed(_)))));
    assert!(matches!(timeout(LIMIT, claimed).await.unwrap(), Ok(ClaimOutcome::Completed(_))));
    assert_eq!(timeout(LIMIT, listed).await.unwrap().unwrap().entries.len(), 2);
}

/// A task keeps its call without polling it, and is the one that the writer wakes for its thread.
#[tokio::test]
async fn a_caller_that_does_not_look_at_its_answer_holds_up_no_other_of_its_thread() {
    let disk = GatedDisk::default();
    let store = disk.open_store();
    disk.syncs.close();
    let first = tokio::spawn(claim(store.clone(), 1));
    let_others_run().await;
    let mut held = Box::pin(claim(store.clone(), 2));
    for _ in 0..50 {
        assert!(still_waits(&mut held).await);
        yield_now().await;
    }
    let other = tokio::spawn(claim(store.clone(), 3));
    let_others_run().await;
    disk.syncs.open();
    assert!(timeout(LIMIT, first).await.expect("the first is answered").unwrap().is_ok());
    assert!(timeout(LIMIT, other).await.expect("the other is answered").unwrap().is_ok());
    assert!(held.await.is_ok());
}

/// The second claim must not see the first, which fails.
#[tokio::test]
async fn a_call_for_an_address_that_is_being_written_waits_and_is_decided_by_what_became_durable() {
    let disk = GatedDisk::default();
    let store = disk.open_store();
    disk.syncs.close();
    let first = tokio::spawn(claim(store.clone(), 1));
    let_others_run().await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    let second = tokio::spawn(claim(store.clone(), 1));
    let third = tokio::spawn(claim(store.clone(), 2));
    let_others_run().await;
    // The batch of the first reaches no segment at all, and the next one does.
    let syncs = disk.disk.syncs();
    disk.disk.set_faults(SimDiskFaults { syncs: (syncs + 1..syncs + 2).collect(), ..SimDiskFaults::default() });
    disk.syncs.open();
    let [first, second, third] = [first, second, third].map(|call| timeout(LIMIT, call));
    assert!(matches!(first.await.unwrap().unwrap(), Ok(ClaimOutcome::Granted(_))), "written again elsewhere");
    assert!(matches!(second.await.unwrap().unwrap(), Ok(ClaimOutcome::InProgress(_))));
    assert!(matches!(third.await.unwrap().unwrap(), Ok(ClaimOutcome::Granted(_))));
}

#[tokio::test]
async fn what_is_staged_when_the_store_fails_is_refused_and_not_written() {
    let disk = GatedDisk::default();
    let store = disk.open_store();
    disk.syncs.close();
    let first = tokio::spawn(claim(store.clone(), 1));
    let_others_run().await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    let same = tokio::spawn(claim(store.clone(), 1));
    let next = tokio::spawn(claim(store.clone(), 2));
    let_others_run().await;
    disk.disk.set_faults(SimDiskFaults { syncs: (1..10_000).collect(), ..SimDiskFaults::default() });
    disk.syncs.open();
    let [first, same, next] = [first, same, next].map(|call| timeout(LIMIT, call));
    assert_eq!(first.await.unwrap().unwrap(), Err(ErrorKind::Ambiguous));
    assert_eq!(same.await.unwrap().unwrap(), Err(ErrorKind::Rejected));
    assert_eq!(next.await.unwrap().unwrap(), Err(ErrorKind::Rejected));
    assert_eq!(store.get(&address(2)).await.unwrap(), None);
}
