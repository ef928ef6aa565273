//! State shared by the store's threads: callers read it, the writer and the compactor change it.
//!
//! Invariants: everything in the index is durable, so a caller whose lookup shows that its call changes nothing can
//! answer from it at once. The clock's readings never go backwards, across threads and restarts.

use std::{
    fmt, mem,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, SystemTime},
};

use ibid::store::{Address, ErrorKind, StoreError};
use tokio::time::Instant;

use super::{
    compactor::SegmentPool,
    entry::{LogEntry, UnixMicros, micros},
    format::MAIN_LANE,
    index::{Index, IndexLookup, IndexSlot},
    recovery::RecoveredLog,
    segments::{EntryReadError, LogPosition, ReadMode, SegmentSet},
    staging::Staging,
};

/// Name of the store in errors and guarantees.
pub(super) const STORE_NAME: &str = "embedded";
/// Maximum attempts of a lookup whose segment is being recycled.
const MAX_LOOKUP_RETRIES: u32 = 100;

#[derive(Debug)]
pub(super) struct SharedLog {
    pub(super) index: Index,
    pub(super) segments: SegmentSet,
    pub(super) clock: StoreClock,
    pub(super) segment_pool: SegmentPool,
    pub(super) staging: Staging,
    /// Whether a batch is synced before it is answered.
    pub(super) is_synced: bool,
    /// Sequence number of the last batch of the main lane. Changed by the writer.
    pub(super) sequence: AtomicU64,
    pub(super) highest_fence: AtomicU64,
    /// The highest version given to an entry. Changed by the writer.
    pub(super) version: AtomicU64,
    /// Why the store is read-only. Set once, after a second failed sync.
    read_only: OnceLock<String>,
}

impl SharedLog {
    /// Takes the index from `recovered`.
    pub(super) fn new(recovered: &mut RecoveredLog, segments: SegmentSet, clock: StoreClock, is_synced: bool) -> Self {
        Self {
            index: mem::take(&mut recovered.index),
            segments,
            clock,
            segment_pool: SegmentPool::default(),
            staging: Staging::default(),
            is_synced,
            sequence: AtomicU64::new(recovered.sequences[usize::from(MAIN_LANE)]),
            highest_fence: AtomicU64::new(recovered.highest_fence),
            version: AtomicU64::new(recovered.version),
            read_only: OnceLock::new(),
        }
    }

    /// Returns the entry at an address, even if it has expired. Returns `None` if `mode` does not allow to read it.
    pub(super) fn load(&self, at: &Address, mode: ReadMode) -> Result<Option<LoadedEntry>, StoreError> {
        for _ in 0..MAX_LOOKUP_RETRIES {
            let slots = match self.index.find(at) {
                IndexLookup::Running(entry) => return Ok(Some(LoadedEntry { entry: Some(entry), slots: Vec::new() })),
                IndexLookup::Slots(slots) => slots,
            };
            match self.read_matching(at, &slots, mode) {
                Ok(entry) => return Ok(Some(LoadedEntry { entry: entry.map(Arc::new), slots })),
                Err((_, EntryReadError::NotCached)) => return Ok(None),
                // The entry was recycled or moved during the read: look it up again.
                Err((slot, _)) if !self.index.contains_slot(&slot) => {}
                Err((_, error @ EntryReadError::Io(_))) => {
                    return Err(store_error(ErrorKind::NotApplied, error.to_string()));
                }
                Err((_, error)) => return Err(store_error(ErrorKind::Corrupt, error.to_string())),
            }
        }
        Err(store_error(ErrorKind::NotApplied, "the entry moves faster than it can be read"))
    }

    fn read_matching(
        &self, at: &Address, slots: &[IndexSlot], mode: ReadMode,
    ) -> Result<Option<LogEntry>, (IndexSlot, EntryReadError)> {
        for slot in slots {
            let entry = self.segments.read(slot, mode).map_err(|error| (*slot, error))?;
            if entry.request.address == *at {
                return Ok(Some(entry));
            }
        }
        Ok(None)
    }

    pub(super) fn position(&self) -> LogPosition {
        LogPosition {
            sequence: self.sequence.load(SeqCst),
            clock: self.clock.latest(),
            highest_fence: self.highest_fence.load(SeqCst),
        }
    }

    pub(super) fn read_only_reason(&self) -> Option<&str> {
        self.read_only.get().map(String::as_str)
    }

    pub(super) fn set_read_only(&self, why: impl fmt::Display) {
        // The first reason stays.
        let _ = self.read_only.set(format!("the store is read-only until it is opened again: {why}"));
    }
}

/// The entry at an address, and the slots that it was found by.
#[derive(Debug)]
pub(super) struct LoadedEntry {
    pub(super) entry: Option<Arc<LogEntry>>,
    slots: Vec<IndexSlot>,
}

impl LoadedEntry {
    /// Whether these slots still lead to the same entry. Only the version matters: an entry may be moved.
    pub(super) fn is_current(&self, slots: &[IndexSlot]) -> bool {
        let is_known = |slot: &IndexSlot| self.slots.iter().any(|known| known.version() == slot.version());
        slots.len() == self.slots.len() && slots.iter().all(is_known)
    }
}

pub(super) fn store_error(kind: ErrorKind, why: impl Into<String>) -> StoreError {
    StoreError::new(kind, STORE_NAME, why.into())
}

/// A source of time, as the duration since the Unix epoch.
#[derive(Clone)]
pub struct TimeSource(Arc<dyn Fn() -> Duration + Send + Sync>);

impl TimeSource {
    /// Creates a time source from a function. Callers of the store run it on their own threads.
    pub fn new(read: impl Fn() -> Duration + Send + Sync + 'static) -> Self {
        Self(Arc::new(read))
    }
}

impl Default for TimeSource {
    /// Wall time at creation, then monotonic time: later steps of the wall clock have no effect.
    fn default() -> Self {
        let began_at = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let began = Instant::now();
        Self::new(move || began_at + began.elapsed())
    }
}

impl fmt::Debug for TimeSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TimeSource")
    }
}

/// The store's clock: wall time at opening plus monotonic time, never behind the times in the log. Background threads
/// use [`StoreClock::latest`]: for them time stands still while no calls arrive, when there is no work anyway.
#[derive(Debug)]
pub(super) struct StoreClock {
    source: TimeSource,
    /// Added to the source's time, so that time continues from the latest time in the log.
    offset: UnixMicros,
    latest: AtomicU64,
}

impl StoreClock {
    pub(super) fn new(source: TimeSource, seen: UnixMicros) -> Self {
        let offset = seen.saturating_sub(micros(source.0()));
        Self { source, offset, latest: AtomicU64::new(seen) }
    }

    pub(super) fn now(&self) -> UnixMicros {
        let now = micros(self.source.0()) + self.offset;
        self.latest.fetch_max(now, SeqCst).max(now)
    }

    /// Returns the latest reading, without reading the clock.
    pub(super) fn latest(&self) -> UnixMicros {
        self.latest.load(SeqCst)
    }
}
