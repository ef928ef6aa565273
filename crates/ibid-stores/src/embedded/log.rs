//! What the threads of a store share: callers read it, the writer and the keeper change it.
//!
//! Invariant: what is in the index is durable. Whoever looks something up here and finds that nothing would change may
//! answer from it at once.

use std::{
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
};

use ibid::store::{Address, ErrorKind, StoreError};

use super::{
    clock::Clock,
    entry::Entry,
    index::{Found, Index, Slot},
    keeper::Spares,
    segments::{ReadError, Segments, SoFar},
};

/// The store's name in errors and promises.
pub(super) const NAME: &str = "embedded";
/// How often a look-up is repeated that met a segment just being recycled.
const TRIES: u32 = 100;

#[derive(Debug)]
pub(super) struct Log {
    pub(super) index: Index,
    pub(super) segments: Segments,
    pub(super) clock: Clock,
    pub(super) spares: Spares,
    /// Whether a batch is synced before it is answered.
    pub(super) synced: bool,
    /// Of the last batch of the main lane, and the highest fence given. Written by the writer.
    pub(super) sequence: AtomicU64,
    pub(super) fences: AtomicU64,
    /// The highest given to an entry. Written by the writer.
    pub(super) version: AtomicU64,
    /// Why nothing is written any more. Set once, by whoever saw a sync fail for the second time.
    read_only: OnceLock<String>,
}

impl Log {
    pub(super) fn new(index: Index, segments: Segments, clock: Clock, synced: bool, so_far: (u64, u64, u64)) -> Self {
        let (sequence, fences, version) = so_far;
        Self {
            index,
            segments,
            clock,
            spares: Spares::default(),
            synced,
            sequence: AtomicU64::new(sequence),
            fences: AtomicU64::new(fences),
            version: AtomicU64::new(version),
            read_only: OnceLock::new(),
        }
    }

    /// The entry at an address, even if it has expired.
    pub(super) fn load(&self, at: &Address) -> Result<Option<Arc<Entry>>, StoreError> {
        for _ in 0..TRIES {
            let slots = match self.index.find(at) {
                Found::Running(entry) => return Ok(Some(entry)),
                Found::Slots(slots) => slots,
            };
            match self.first_at(at, &slots) {
                Ok(found) => return Ok(found.map(Arc::new)),
                // It was recycled or moved while it was read: the index knows better by now.
                Err((slot, _)) if !self.index.has(&slot) => {}
                Err((_, error @ ReadError::Io(_))) => return Err(failed(ErrorKind::NotApplied, error.to_string())),
                Err((_, error)) => return Err(failed(ErrorKind::Corrupt, error.to_string())),
            }
        }
        Err(failed(ErrorKind::NotApplied, "the entry moves faster than it can be read"))
    }

    fn first_at(&self, at: &Address, slots: &[Slot]) -> Result<Option<Entry>, (Slot, ReadError)> {
        for slot in slots {
            let entry = self.segments.read(slot).map_err(|error| (*slot, error))?;
            if entry.ask.address == *at {
                return Ok(Some(entry));
            }
        }
        Ok(None)
    }

    pub(super) fn so_far(&self) -> SoFar {
        SoFar { sequence: self.sequence.load(SeqCst), clock: self.clock.latest(), fences: self.fences.load(SeqCst) }
    }

    /// Why nothing is written any more, if so.
    pub(super) fn read_only(&self) -> Option<&str> {
        self.read_only.get().map(String::as_str)
    }

    pub(super) fn stop_writing(&self, why: impl fmt::Display) {
        // The first reason stays.
        let _ = self.read_only.set(format!("the store is read-only until it is opened again: {why}"));
    }
}

pub(super) fn failed(kind: ErrorKind, why: impl Into<String>) -> StoreError {
    StoreError::new(kind, NAME, why.into())
}
