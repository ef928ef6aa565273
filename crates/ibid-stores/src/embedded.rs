//! The embedded store: a segmented log for entries whose expiry is known when they are written.
//!
//! ```text
//!  callers ──► staged batch ──► writer: one write, one sync ──► index ──► one wake-up per thread of callers
//!     │                                                           ▲
//!     └── replays ◄── page cache, or a blocking thread ◄──────────┴── compactor: next segment, recycling, moving
//! ```
//!
//! Callers decide their calls and encode them on their own threads (`staging`); the writer only writes, syncs and
//! publishes (`writer`). A claim is answered only once it is durable (`completion`). Replays never wait for the writer,
//! and no call waits for the disk on a thread that runs tasks. Space is reclaimed by recycling
//! whole segments. `docs/embedded-store.md` describes the guarantees, the modules `format`, `entry` and `snapshot` the
//! format.
//!
//! Invariants: the index holds exactly the log's entries that have not died; of two entries at one address the one with
//! the higher version counts; an entry outlives the entry that it supersedes.
//!
//! ```
//! # let path = std::env::temp_dir().join(format!("ibid-doc-{}", std::process::id()));
//! use ibid::store::Store;
//! use ibid_stores::embedded::{Embedded, EmbeddedOptions};
//!
//! let store = Embedded::open(&path, EmbeddedOptions::default())?;
//! assert!(store.guarantees().durable);
//! # drop(store);
//! # std::fs::remove_dir_all(path).unwrap();
//! # Ok::<_, ibid_stores::embedded::OpenError>(())
//! ```

use std::{
    fmt, io, mem, panic,
    path::Path,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use ibid::store::{
    Address, ClaimOutcome, ClaimRequest, CompletedEntry, Counters, Fence, Guarantees, Lease, SettleOutcome, Settlement,
    Store, StoreAdmin, StoreError, StoreFuture, SweepResult,
    transitions::{self, EntryDecision, StoredEntry},
};
use tokio::task;

use self::{
    compactor::Compactor,
    completion::DurableOutcome,
    entry::UnixMicros,
    format::MAIN_LANE,
    lane::LaneTail,
    log::{LoadedEntry, STORE_NAME, SharedLog, StoreClock},
    quota_counters::QuotaCounters,
    recovery::{RecoveredLog, RecoveryMode, repair},
    segments::{LogLimits, ReadMode, SegmentError, SegmentSet},
    staging::{CallKind, Submission},
    writer::LogWriter,
};
pub use self::{
    disk::{Directory, Disk, DiskFile},
    format::Corruption,
    log::TimeSource,
    maintenance::{CompactionResult, check, compact, dump},
    recovery::{CorruptRange, StoreReport},
};

mod admin;
mod compactor;
mod completion;
mod disk;
mod entry;
mod format;
mod index;
mod lane;
mod log;
mod maintenance;
mod quota_counters;
mod recovery;
mod segment_reader;
mod segments;
mod snapshot;
mod staging;
mod writer;

/// Maximum number of overdue claims named in the log message at start.
const MAX_OVERDUE_LISTED: usize = 20;

/// Maximum time that opening spends on filling the first segment. A sync of what is not filled takes longer.
const MAX_FIRST_FILL_TIME: Duration = Duration::from_millis(50);

/// The failures that acknowledged writes survive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Durability {
    /// Power loss: every batch is synced before it is answered.
    #[default]
    Power,
    /// A crash of the process, but not power loss.
    Crash,
}

/// Options for opening an embedded store.
#[derive(Debug, Clone)]
pub struct EmbeddedOptions {
    /// The failures that acknowledged writes survive.
    pub durability: Durability,
    /// Maximum disk space in bytes. A full store refuses new keys; it evicts nothing.
    pub max_size: u64,
    /// Bytes per segment, at most 1 GiB. Reduced if fewer than eight segments would fit into `max_size`.
    pub segment_size: u64,
    /// The clock of the store.
    pub time: TimeSource,
}

impl Default for EmbeddedOptions {
    fn default() -> Self {
        let (durability, time) = (Durability::default(), TimeSource::default());
        Self { durability, max_size: 10 << 30, segment_size: 64 << 20, time }
    }
}

impl EmbeddedOptions {
    /// Returns the approximate maximum size of a record in bytes. Larger records do not fit into a segment.
    pub fn max_record_size(&self) -> u64 {
        self.limits().segment_size / 2
    }

    fn limits(&self) -> LogLimits {
        let segment_size = self.segment_size.min(self.max_size / 8).clamp(16 << 10, 1 << 30);
        LogLimits { segment_size: segment_size & !4095, max_size: self.max_size.max(4 * segment_size) }
    }
}

/// Why a store cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// An I/O error, or another process has the store open.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A file was written by a later version of ibid.
    #[error(
        "{file} is of format version {version}, and this ibid reads up to version {}; use the ibid that wrote it",
        format::FORMAT_VERSION
    )]
    Version {
        /// Name of the file.
        file: String,
        /// Format version of the file.
        version: u32,
    },
    /// There is not enough space even for an empty store.
    #[error("{0}")]
    NoSpace(String),
    /// A file is corrupt, and compaction would remove what is left of it.
    #[error("{0}; compacting would remove what is left of it, so nothing was changed")]
    Corrupt(String),
}

/// A store in the files of one directory, for one process at a time.
pub struct Embedded {
    log: Arc<SharedLog>,
    threads: Vec<JoinHandle<()>>,
    report: StoreReport,
    quotas: QuotaCounters,
    /// Released after everything above is dropped.
    _lock: Box<dyn fmt::Debug + Send + Sync>,
}

impl Embedded {
    /// Opens the store in a directory, which is created if it is missing.
    ///
    /// # Errors
    /// Returns an error if another process has the store open, if its files have a later format version, or if the disk
    /// fails.
    pub fn open(path: impl AsRef<Path>, options: EmbeddedOptions) -> Result<Self, OpenError> {
        Self::open_on(Arc::new(Directory::open(path.as_ref())?), options)
    }

    /// Opens the store on a custom [`Disk`].
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_on(disk: Arc<dyn Disk>, options: EmbeddedOptions) -> Result<Self, OpenError> {
        let lock = disk.lock()?;
        let (log, mut recovered) = recover_log(disk.clone(), options)?;
        let report = mem::take(&mut recovered.report);
        warn_overdue(&report.overdue_claims);
        let quotas = QuotaCounters::open(log.clone(), disk, recovered.opened_at);
        let mut compactor = Compactor::new(log.clone(), &recovered);
        compactor.compact_before_start();
        let (position, opened) = (log.position(), Instant::now());
        let fill = || opened.elapsed() < MAX_FIRST_FILL_TIME;
        let first = log.segments.prepare_segment(MAIN_LANE, &|| position, Some(&fill));
        let tail = match (first, recovered.segments.first()) {
            (Ok(segment), _) => LaneTail::new(MAIN_LANE, segment, position.sequence + 1),
            // Without free space the store serves replays, and accepts claims again once there is room.
            (Err(_), Some(any)) => LaneTail::full(MAIN_LANE, any.clone()),
            (Err(SegmentError::Io(error)), None) => return Err(error.into()),
            (Err(full), None) => return Err(OpenError::NoSpace(full.to_string())),
        };
        let compactor = thread::Builder::new().name("ibid-keeper".into()).spawn(move || compactor.run())?;
        // From here on, dropping the store ends its threads.
        let mut store = Self { log: log.clone(), threads: vec![compactor], report, quotas, _lock: lock };
        let writer = LogWriter::new(log, tail, recovered)?;
        let writer = thread::Builder::new().name("ibid-writer".into()).spawn(move || writer.run())?;
        store.threads.insert(0, writer);
        Ok(store)
    }

    /// Returns what opening the store found in its files.
    pub fn report(&self) -> &StoreReport {
        &self.report
    }

    /// Returns the number of batches written since the log was created.
    pub fn batch_count(&self) -> u64 {
        self.log.position().sequence
    }

    /// Makes a call, on this thread unless it has to wait.
    fn submit<'a, T: Unpin + Send + 'a>(
        &'a self, at: &'a Address, call: CallKind, loaded: Option<LoadedEntry>,
        decide: impl Fn(Option<&StoredEntry>, Fence, UnixMicros) -> EntryDecision<T> + Send + Sync + 'a,
    ) -> StoreFuture<'a, T> {
        match self.log.submit(at, call, loaded.as_ref(), &decide) {
            Err(error) => StoreFuture::ready(Err(error)),
            Ok(Submission::Decided(outcome)) => StoreFuture::ready(Ok(outcome)),
            Ok(Submission::Staged(outcome, batch)) => StoreFuture::boxed(DurableOutcome::new(outcome, batch)),
            Ok(waits) => StoreFuture::boxed(self.submit_later(at, call, waits, decide)),
        }
    }

    async fn submit_later<T: Unpin>(
        &self, at: &Address, call: CallKind, mut waits: Submission<T>,
        decide: impl Fn(Option<&StoredEntry>, Fence, UnixMicros) -> EntryDecision<T>,
    ) -> Result<T, StoreError> {
        loop {
            let mut loaded = None;
            match waits {
                Submission::Decided(outcome) => return Ok(outcome),
                Submission::Staged(outcome, batch) => return DurableOutcome::new(outcome, batch).await,
                // Its failure is not this call's.
                Submission::WaitForBatch(batch) => drop(DurableOutcome::new((), batch).await),
                Submission::WaitForSegment => self.log.segment_pool.wait_ready().await,
                Submission::LoadEntry => loaded = Some(self.load(at).await?),
            }
            waits = self.log.submit(at, call, loaded.as_ref(), &decide)?;
        }
    }

    fn change<'a>(
        &'a self, at: &'a Address,
        decide: impl Fn(Option<&StoredEntry>, UnixMicros) -> EntryDecision<SettleOutcome> + Send + Sync + 'a,
    ) -> StoreFuture<'a, SettleOutcome> {
        self.submit(at, CallKind::Change, None, move |current, _, now| decide(current, now))
    }

    /// Loads the entry at an address. If it is not in memory, another thread reads it.
    async fn load(&self, at: &Address) -> Result<LoadedEntry, StoreError> {
        if let Some(loaded) = self.log.load(at, ReadMode::CachedOnly)? {
            return Ok(loaded);
        }
        let at = *at;
        let loaded = self.read_blocking(move |log| log.load(&at, ReadMode::Blocking)).await?;
        Ok(loaded.expect("a blocking read finds what there is"))
    }

    /// Runs something that reads the disk on a thread that may wait for it.
    async fn read_blocking<T: Send + 'static>(&self, read: impl FnOnce(&SharedLog) -> T + Send + 'static) -> T {
        let log = self.log.clone();
        task::spawn_blocking(move || read(&log))
            .await
            .unwrap_or_else(|panicked| panic::resume_unwind(panicked.into_panic()))
    }

    /// Answers a claim that changes nothing from durable data. Otherwise submits it.
    fn claim_loaded<'a>(&'a self, ask: &'a Arc<ClaimRequest>, loaded: LoadedEntry) -> StoreFuture<'a, ClaimOutcome> {
        if let Some(current) = &loaded.entry {
            let now = self.log.clock.now();
            let (outcome, granted) = transitions::claim(Some(&current.entry), ask, Fence::UNSEEN, now);
            if granted.is_none() {
                return StoreFuture::ready(Ok(outcome));
            }
        }
        let decide = move |current: Option<&StoredEntry>, fence, now| transitions::claim(current, ask, fence, now);
        self.submit(&ask.address, CallKind::Claim, Some(loaded), decide)
    }
}

impl Store for Embedded {
    fn claim<'a>(&'a self, ask: &'a Arc<ClaimRequest>) -> StoreFuture<'a, ClaimOutcome> {
        match self.log.load(&ask.address, ReadMode::CachedOnly).transpose() {
            Some(Ok(loaded)) => self.claim_loaded(ask, loaded),
            Some(Err(error)) => StoreFuture::ready(Err(error)),
            None => StoreFuture::boxed(async move {
                let loaded = self.load(&ask.address).await?;
                self.claim_loaded(ask, loaded).await
            }),
        }
    }

    fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, SettleOutcome> {
        self.change(&lease.request.address, move |current, now| transitions::extend(current, lease, hold, now))
    }

    fn settle<'a>(&'a self, lease: &'a Lease, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome> {
        self.change(&lease.request.address, move |current, now| transitions::settle(current, lease, end, now))
    }

    fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()> {
        let index = &self.log.index;
        StoreFuture::boxed(index.waits.wait(at, seen, limit, move || async move {
            let now = self.log.clock.now();
            Ok(index.shard(at).running_entries.get(at).and_then(|entry| entry.runs_for(seen, now)))
        }))
    }

    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<ClaimOutcome>> {
        let read = |loaded: LoadedEntry| loaded.entry.and_then(|entry| entry.read(self.log.clock.now()));
        match self.log.load(at, ReadMode::CachedOnly).transpose() {
            Some(loaded) => StoreFuture::ready(loaded.map(read)),
            None => StoreFuture::boxed(async move { self.load(at).await.map(read) }),
        }
    }

    fn find_completed(&self, at: &Address) -> Option<CompletedEntry> {
        // Most new keys are in no shard: nothing is read for them.
        let entry = self.log.load(at, ReadMode::CachedOnly).ok()??.entry?;
        match entry.read(self.log.clock.now()) {
            Some(ClaimOutcome::Completed(found)) => Some(found),
            _ => None,
        }
    }

    fn sweep(&self, at_most: u32) -> StoreFuture<'_, SweepResult> {
        let now = self.log.clock.now();
        let (removed, more) = self.log.index.sweep(now, at_most, |slot| self.log.segments.remove_slot(slot));
        StoreFuture::ready(Ok(SweepResult { removed, lapsed: 0, more }))
    }

    fn admin(&self) -> &dyn StoreAdmin {
        self
    }

    fn counters(&self) -> Option<&dyn Counters> {
        Some(&self.quotas)
    }

    fn guarantees(&self) -> Guarantees {
        let unread = self.report.found.iter().map(|found| format!("not readable, and not served: {found}"));
        let warnings = unread.chain(self.log.read_only_reason().map(String::from)).collect();
        Guarantees { store: STORE_NAME, durable: true, shared: false, warnings }
    }
}

impl Drop for Embedded {
    /// Writes all queued calls before it returns.
    fn drop(&mut self) {
        // The writer records this time as the last at which the store was open.
        self.log.clock.now();
        self.log.staging.close();
        let compactor = self.threads.pop();
        // A panicked thread has already reported its error.
        self.threads.drain(..).for_each(|writer| drop(writer.join()));
        self.log.segment_pool.close();
        compactor.into_iter().for_each(|compactor| drop(compactor.join()));
    }
}

impl fmt::Debug for Embedded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Embedded").field("report", &self.report).finish_non_exhaustive()
    }
}

/// Reads and repairs the log, before anything is written to it.
fn recover_log(disk: Arc<dyn Disk>, options: EmbeddedOptions) -> Result<(Arc<SharedLog>, RecoveredLog), OpenError> {
    let now = StoreClock::new(options.time.clone(), 0).now();
    let (mut recovered, unsealed) = RecoveredLog::read(&*disk, now, RecoveryMode::UseSnapshot)?;
    repair(&*disk, &mut recovered, unsealed)?;
    let store_id = recovered.store_id.map_or_else(random_bytes, Ok)?;
    let segments = SegmentSet::new(disk, options.limits(), store_id, recovered.segments.clone(), recovered.next_id);
    let clock = StoreClock::new(options.time, recovered.last_log_time);
    let log = SharedLog::new(&mut recovered, segments, clock, options.durability == Durability::Power);
    Ok((Arc::new(log), recovered))
}

/// Logs the unfinished claims whose ttl ended while the store was closed.
fn warn_overdue(overdue: &[Address]) {
    if overdue.is_empty() {
        return;
    }
    let named: Vec<String> = overdue.iter().take(MAX_OVERDUE_LISTED).map(Address::to_string).collect();
    let more = if overdue.len() > MAX_OVERDUE_LISTED { ", …" } else { "" };
    tracing::warn!(
        claims = overdue.len(),
        "{} claims were unfinished when the store was closed, and their ttl has passed since; their outcome is unknown, and is \
         kept for another ttl: {}{more}",
        overdue.len(),
        named.join(", ")
    );
}

fn random_bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| io::Error::other(error.to_string()))?;
    Ok(bytes)
}
