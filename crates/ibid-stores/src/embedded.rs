//! The embedded store: a log in segments, made for entries that all die at a time known when they are written.
//!
//! ```text
//!  callers ──► queue ──► writer ──► one batch: one write, one sync ──► index ──► answers
//!     │                    │                                             ▲
//!     └── replays ◄── pread ◄── index            keeper: next segment, recycling, moving what lives on
//! ```
//!
//! A claim is answered when it is durable, not before. Replays never wait for the writer. Space comes back by recycling
//! whole segments. `docs/embedded-store.md` has the format, the invariants and what is promised.
//!
//! Invariant of the whole: what is in the log and has not died is in the index, and nothing else is; of two entries at
//! one address the one with the higher version counts; an entry outlives what it supersedes.
//!
//! ```
//! # let path = std::env::temp_dir().join(format!("ibid-doc-{}", std::process::id()));
//! use ibid::store::Store;
//! use ibid_stores::embedded::{Embedded, Options};
//!
//! let store = Embedded::open(&path, Options::default())?;
//! assert!(store.promise().durable);
//! # drop(store);
//! # std::fs::remove_dir_all(path).unwrap();
//! # Ok::<_, ibid_stores::embedded::OpenError>(())
//! ```

use std::{
    collections::HashSet,
    fmt, io,
    path::Path,
    sync::{
        Arc,
        mpsc::{self, Sender},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use ibid::store::{
    Address, Ask, Claim, Counters, End, ErrorKind, Fence, Held, Lease, Operators, Promise, Store, StoreError,
    StoreFuture, Swept,
};
use tokio::{sync::oneshot, time::timeout};

use self::{
    clock::Clock,
    counts::Counts,
    entry::{Micros, Phase, micros},
    keeper::Keeper,
    log::{Log, NAME, failed},
    recovery::{Recovered, Trust, mend},
    segments::{NoRoom, Room, Segment, Segments},
    writer::{Call, Change, Reply, Tail, What, Writer},
};
pub use self::{
    clock::TimeSource,
    disk::{Directory, Disk, DiskFile},
    format::Flaw,
    report::{Found, Report},
    tools::{Compacted, check, compact, dump},
};

mod clock;
mod counts;
mod decide;
mod disk;
mod entry;
mod format;
mod index;
mod keeper;
mod log;
mod operators;
mod reading;
mod recovery;
mod report;
mod scan;
mod segments;
mod snapshot;
mod tools;
mod writer;

/// How many unfinished claims are named in the log at a start.
const OVERDUE_NAMED: usize = 20;

/// What a store survives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Durability {
    /// Loss of power: every batch is synced before it is answered.
    #[default]
    Power,
    /// The end of the process, however that comes, but not loss of power.
    Crash,
}

/// How a store is opened.
#[derive(Debug, Clone)]
pub struct Options {
    /// What it survives.
    pub durability: Durability,
    /// How many bytes of disk it may take up. A full store refuses new keys; it evicts nothing.
    pub max_size: u64,
    /// Bytes per segment, at most 1 GiB; smaller ones are used if fewer than eight would fit into `max_size`.
    pub segment_size: u64,
    /// What tells the time.
    pub time: TimeSource,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            durability: Durability::default(),
            max_size: 10 << 30,
            segment_size: 64 << 20,
            time: TimeSource::default(),
        }
    }
}

impl Options {
    /// Larger records do not fit into a segment, roughly.
    pub fn largest_record(&self) -> u64 {
        self.room().segment_size / 2
    }

    fn room(&self) -> Room {
        let segment_size = self.segment_size.min(self.max_size / 8).clamp(16 << 10, 1 << 30);
        Room { segment_size: segment_size & !4095, max_size: self.max_size.max(4 * segment_size) }
    }
}

/// A store that cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The file system says no, or another process is there.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Written by a later version.
    #[error("{file} is of format version {version}, which this build does not read")]
    Version {
        /// Which file.
        file: String,
        /// Of its format.
        version: u32,
    },
    /// Not even an empty store fits.
    #[error("{0}")]
    NoRoom(String),
    /// Something does not read, and compacting would remove it.
    #[error("{0}; compacting would remove what is left of it, so nothing was changed")]
    Damaged(String),
}

/// The embedded store.
pub struct Embedded {
    log: Arc<Log>,
    /// Taken when the store is closed.
    queue: Option<Sender<Call>>,
    threads: Vec<JoinHandle<()>>,
    report: Report,
    counts: Counts,
    /// Held until everything above has ended.
    _lock: Box<dyn fmt::Debug + Send + Sync>,
}

impl Embedded {
    /// Opens the store in a directory, which is made if it is not there.
    ///
    /// # Errors
    /// If another process has it open, if its files are of a later version, or if the disk fails.
    pub fn open(path: impl AsRef<Path>, options: Options) -> Result<Self, OpenError> {
        Self::open_on(Arc::new(Directory::open(path.as_ref())?), options)
    }

    /// Opens the store on a disk.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_on(disk: Arc<dyn Disk>, options: Options) -> Result<Self, OpenError> {
        let lock = disk.lock()?;
        let Recovery { log, any, found, cold, covered, report } = recover(disk.clone(), options)?;
        tell_overdue(&report.overdue);
        let log = Arc::new(log);
        let counts = Counts::open(log.clone(), disk, found.opened);
        let mut keeper = Keeper::new(log.clone(), cold + 1, covered);
        keeper.tidy_before_start();
        let tail = match (log.segments.prepare(format::MAIN, log.so_far(), None), any) {
            (Ok(segment), _) => Tail::new(segment, log.so_far().sequence + 1),
            // It serves what it has, and claims again once there is room.
            (Err(_), Some(any)) => Tail::full(any),
            (Err(NoRoom::Io(error)), None) => return Err(error.into()),
            (Err(full), None) => return Err(OpenError::NoRoom(full.to_string())),
        };
        Self::start(log, keeper, tail, found, report, counts, lock)
    }

    fn start(
        log: Arc<Log>, keeper: Keeper, tail: Tail, found: writer::Found, report: Report, counts: Counts,
        lock: Box<dyn fmt::Debug + Send + Sync>,
    ) -> Result<Self, OpenError> {
        let keeper = thread::Builder::new().name("ibid-keeper".into()).spawn(move || keeper.run())?;
        let (queue, calls) = mpsc::channel();
        let mut store =
            Self { log: log.clone(), queue: Some(queue), threads: vec![keeper], report, counts, _lock: lock };
        let writer = Writer::new(log, calls, tail, found)?;
        let writer = thread::Builder::new().name("ibid-writer".into()).spawn(move || writer.run())?;
        store.threads.insert(0, writer);
        Ok(store)
    }

    /// What opening found in the files.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// How many batches were written since the log began.
    pub fn batches(&self) -> u64 {
        self.log.so_far().sequence
    }

    fn ask<T: Unpin + Send + 'static>(&self, now: Micros, what: impl FnOnce(Reply<T>) -> What) -> StoreFuture<'_, T> {
        let (reply, answer) = oneshot::channel();
        let sent = self.queue.as_ref().is_some_and(|queue| queue.send(Call { now, what: what(reply) }).is_ok());
        StoreFuture::boxed(async move {
            match answer.await {
                Ok(answered) => answered,
                Err(_) if !sent => Err(failed(ErrorKind::NotApplied, "the store is closed")),
                Err(_) => Err(failed(ErrorKind::Ambiguous, "the store ended before it answered")),
            }
        })
    }

    fn change(&self, at: &Address, change: Change) -> StoreFuture<'_, Held> {
        let at = *at;
        self.ask(self.log.clock.now(), move |reply| What::Change(at, change, reply))
    }

    /// A claim that changes nothing is answered from what is durable, without the writer.
    fn claim_unchanged(&self, ask: &Arc<Ask>, now: Micros) -> Result<Option<Claim>, StoreError> {
        let current = self.log.load(&ask.address)?;
        let (answer, granted) = decide::claim(current.as_deref(), ask, Fence::UNSEEN, now);
        Ok(granted.is_none().then_some(answer))
    }
}

impl Store for Embedded {
    fn claim<'a>(&'a self, ask: &'a Arc<Ask>) -> StoreFuture<'a, Claim> {
        let now = self.log.clock.now();
        match self.claim_unchanged(ask, now).transpose() {
            Some(answered) => StoreFuture::ready(answered),
            None => self.ask(now, |reply| What::Claim(ask.clone(), reply)),
        }
    }

    fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, Held> {
        self.change(&lease.ask.address, Change::Extend(lease.clone(), hold))
    }

    fn settle<'a>(&'a self, lease: &'a Lease, end: &'a End) -> StoreFuture<'a, Held> {
        self.change(&lease.ask.address, Change::Settle(lease.clone(), end.clone()))
    }

    fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()> {
        StoreFuture::boxed(async move {
            let clock = &self.log.clock;
            let deadline = clock.now().saturating_add(micros(limit));
            loop {
                let (waiters, lapses) = {
                    let now = clock.now();
                    let mut shard = self.log.index.shard(at);
                    let running = shard.running.get(at).and_then(|entry| entry.runs_until(seen, now));
                    let Some(lapses) = running else { return Ok(()) };
                    (shard.waiters.entry(*at).or_default().clone(), lapses)
                };
                // Only a `Notified` that was made before it is reached by `notify_waiters`; so look once more.
                let notified = waiters.notified();
                tokio::pin!(notified);
                notified.as_mut().enable();
                if !self.log.index.shard(at).is_listed(at, &waiters) {
                    return Ok(());
                }
                let silence = Duration::from_micros(lapses.min(deadline).saturating_sub(clock.now()));
                let woken = timeout(silence, notified).await.is_ok();
                let mut shard = self.log.index.shard(at);
                // One in the table and this one: the last waiter leaves no trace, unless the table by now holds those
                // who wait for the next holder.
                if Arc::strong_count(&waiters) == 2 && shard.is_listed(at, &waiters) {
                    shard.waiters.remove(at);
                }
                if woken || clock.now() >= deadline {
                    return Ok(());
                }
            }
        })
    }

    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<Claim>> {
        let now = self.log.clock.now();
        let found = self.log.load(at).map(|entry| {
            entry.filter(|entry| entry.is_live(now) && entry.phase != Phase::Free).map(|entry| entry.view(now))
        });
        StoreFuture::ready(found)
    }

    fn sweep(&self, at_most: u32) -> StoreFuture<'_, Swept> {
        let now = self.log.clock.now();
        let (removed, more) = self.log.index.sweep(now, at_most, |slot| self.log.segments.lose(slot));
        StoreFuture::ready(Ok(Swept { removed, lapsed: 0, more }))
    }

    fn operators(&self) -> &dyn Operators {
        self
    }

    fn counters(&self) -> Option<&dyn Counters> {
        Some(&self.counts)
    }

    fn promise(&self) -> Promise {
        let unread = self.report.found.iter().map(|found| format!("not readable, and not served: {found}"));
        let mut wanting: Vec<String> = unread.collect();
        wanting.extend(self.log.read_only().map(String::from));
        Promise { store: NAME, durable: true, shared: false, wanting }
    }
}

impl Drop for Embedded {
    /// Whatever was asked is written first.
    fn drop(&mut self) {
        // The writer notes this time as the last at which the store was open.
        self.log.clock.now();
        self.queue = None;
        let keeper = self.threads.pop();
        for writer in self.threads.drain(..) {
            // A thread that panicked has nothing more to say.
            let _ = writer.join();
        }
        self.log.spares.close();
        if let Some(keeper) = keeper {
            let _ = keeper.join();
        }
    }
}

impl fmt::Debug for Embedded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Embedded").field("report", &self.report).finish_non_exhaustive()
    }
}

/// A log that was read and mended, before anything is written to it.
struct Recovery {
    log: Log,
    /// Any of its segments.
    any: Option<Arc<Segment>>,
    found: writer::Found,
    /// The last sequence number of the cold lane.
    cold: u64,
    /// The segments that a snapshot covers.
    covered: HashSet<u32>,
    report: Report,
}

fn recover(disk: Arc<dyn Disk>, options: Options) -> Result<Recovery, OpenError> {
    let now = Clock::new(options.time.clone(), 0).now();
    let (mut recovered, unsealed) = Recovered::read(&*disk, now, Trust::Snapshot)?;
    mend(&*disk, &mut recovered, unsealed)?;
    let Recovered {
        index,
        segments,
        store,
        next_id,
        sequences,
        version,
        clock: opened,
        seen,
        fences,
        covered,
        last,
        renewed,
        report,
    } = recovered;
    let store = store.map_or_else(random, Ok)?;
    let any = segments.first().cloned();
    let segments = Segments::new(disk, options.room(), store, segments, next_id);
    let synced = options.durability == Durability::Power;
    let [main, cold] = sequences;
    let log = Log::new(index, segments, Clock::new(options.time, seen), synced, (main, fences, version));
    let found = writer::Found { opened, version, last, renewed };
    Ok(Recovery { log, any, found, cold, covered, report })
}

/// Says which unfinished claims outlived their retention while the store was closed.
fn tell_overdue(overdue: &[Address]) {
    if overdue.is_empty() {
        return;
    }
    let named: Vec<String> = overdue.iter().take(OVERDUE_NAMED).map(Address::to_string).collect();
    let more = if overdue.len() > OVERDUE_NAMED { ", …" } else { "" };
    tracing::warn!(
        claims = overdue.len(),
        "{} claims were unfinished when the store was closed, and their ttl has passed since; their outcome is unknown, and is \
         kept for another ttl: {}{more}",
        overdue.len(),
        named.join(", ")
    );
}

fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| io::Error::other(error.to_string()))?;
    Ok(bytes)
}
