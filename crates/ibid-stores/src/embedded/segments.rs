//! The log's files: reads from them and prepares the next one.
//!
//! A file is named after its segment's number. A new file is created under another name, filled, given its header,
//! synced and renamed. A recycled file gets its new header, is synced and renamed. So a file with a segment name has a
//! header that was durable before the rename. If the numbers in header and name differ, the file was being recycled,
//! and nothing in it counts any more.
//!
//! Invariant: a segment is recycled only when no slot of the index points into it.

use std::{
    collections::HashMap,
    io, mem,
    sync::{
        Arc, OnceLock,
        atomic::{
            AtomicBool, AtomicU32, AtomicU64,
            Ordering::{Relaxed, SeqCst},
        },
    },
};

use bytes::Bytes;
use parking_lot::RwLock;

use super::{
    disk::{Disk, DiskFile},
    entry::LogEntry,
    format::{BatchHeader, COLD_LANE, Corruption, FIRST_BATCH_OFFSET, SECTOR_LEN, SegmentHeader},
    index::IndexSlot,
};

/// File name of a segment that is not ready yet.
pub(super) const UNFINISHED_NAME: &str = "spare.tmp";

/// Describes the complete contents of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SegmentEnd {
    pub(super) lane: u8,
    /// Sequence number of the first batch; `last_sequence` is that of the seal.
    pub(super) first_sequence: u64,
    pub(super) last_sequence: u64,
    pub(super) offset: u64,
}

#[derive(Debug)]
pub(super) struct LogSegment {
    pub(super) header: SegmentHeader,
    pub(super) file: Arc<dyn DiskFile>,
    /// Number of slots that point into the segment. Changed together with the index.
    live_slots: AtomicU32,
    live_bytes: AtomicU64,
    /// Length of the written part. Set once, when the segment is closed.
    pub(super) written_len: AtomicU64,
    /// Set once, when the segment is sealed.
    pub(super) end: OnceLock<SegmentEnd>,
    /// Id of an older segment that could not be sealed. This one proves where it ends, and is not recycled before it.
    pub(super) proves_end_of: AtomicU32,
    /// Earliest time at which compaction is worth trying. Changed by the compactor.
    pub(super) compact_not_before: AtomicU64,
    is_closed: AtomicBool,
    /// A sync failed: data written to the segment may never reach the disk.
    is_spoiled: AtomicBool,
}

/// Whether a read may wait for the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReadMode {
    /// Only what is in memory is read, because the thread runs tasks.
    CachedOnly,
    Blocking,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum EntryReadError {
    #[error("the entry is not in memory")]
    NotCached,
    #[error("segment {0} is gone")]
    Gone(u32),
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("{}, offset {offset}: {corruption}", file_name(*segment))]
    Corrupt { segment: u32, offset: u32, corruption: Corruption },
}

impl LogSegment {
    pub(super) fn new(header: SegmentHeader, file: Arc<dyn DiskFile>) -> Self {
        Self {
            header,
            file,
            live_slots: AtomicU32::new(0),
            live_bytes: AtomicU64::new(0),
            written_len: AtomicU64::new(FIRST_BATCH_OFFSET),
            end: OnceLock::new(),
            proves_end_of: AtomicU32::new(0),
            compact_not_before: AtomicU64::new(0),
            is_closed: AtomicBool::new(false),
            is_spoiled: AtomicBool::new(false),
        }
    }

    /// Marks the segment as no longer written to.
    pub(super) fn close(&self, written: u64) {
        self.written_len.store(written, SeqCst);
        self.is_closed.store(true, SeqCst);
    }

    /// Marks the segment as no longer written to, with a known end.
    pub(super) fn close_sealed(&self, sealed: SegmentEnd) {
        self.close(sealed.offset);
        let _ = self.end.set(sealed);
    }

    /// Closes a segment after a failed sync. It is neither written again nor recycled.
    pub(super) fn mark_spoiled(&self, written: u64) {
        self.is_spoiled.store(true, SeqCst);
        self.close(written);
    }

    /// Must be called before a slot points into the segment.
    pub(super) fn add_slot(&self, slot: &IndexSlot) {
        self.live_slots.fetch_add(1, SeqCst);
        self.live_bytes.fetch_add(slot.length() as u64, Relaxed);
    }

    /// Must be called after a slot no longer points into the segment.
    pub(super) fn remove_slot(&self, slot: &IndexSlot) {
        self.live_bytes.fetch_sub(slot.length() as u64, Relaxed);
        self.live_slots.fetch_sub(1, SeqCst);
    }

    fn is_recyclable(&self) -> bool {
        self.is_closed.load(SeqCst) && self.live_slots.load(SeqCst) == 0
    }

    pub(super) fn read(&self, slot: &IndexSlot, mode: ReadMode) -> Result<LogEntry, EntryReadError> {
        let mut bytes = vec![0; slot.length()];
        match mode {
            ReadMode::Blocking => self.file.read_at(&mut bytes, slot.offset.into())?,
            ReadMode::CachedOnly if self.file.read_cached_at(&mut bytes, slot.offset.into())? => {}
            ReadMode::CachedOnly => return Err(EntryReadError::NotCached),
        }
        let IndexSlot { segment, offset, .. } = *slot;
        let corrupt = |corruption| EntryReadError::Corrupt { segment, offset, corruption };
        LogEntry::decode(Bytes::from(bytes), self.header.salt).map_err(corrupt)
    }
}

/// Size limits in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct LogLimits {
    pub(super) segment_size: u64,
    pub(super) max_size: u64,
}

#[derive(Debug)]
pub(super) struct SegmentSet {
    pub(super) disk: Arc<dyn Disk>,
    pub(super) limits: LogLimits,
    pub(super) store_id: [u8; 16],
    by_id: RwLock<HashMap<u32, Arc<LogSegment>>>,
    /// Bytes of all files, including those being prepared.
    used_bytes: AtomicU64,
    next_id: AtomicU32,
}

/// State of the log that a new segment's header records.
#[derive(Debug, Clone, Copy)]
pub(super) struct LogPosition {
    pub(super) sequence: u64,
    pub(super) clock: u64,
    pub(super) highest_fence: u64,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum SegmentError {
    #[error("{taken} of {max} MiB are taken by records that still answer; raise max_size or shorten ttl")]
    Full { taken: u64, max: u64 },
    #[error("no room for another segment: {0}")]
    Io(#[from] io::Error),
}

impl SegmentSet {
    pub(super) fn new(
        disk: Arc<dyn Disk>, limits: LogLimits, store_id: [u8; 16], found: Vec<Arc<LogSegment>>, next_id: u32,
    ) -> Self {
        let taken = found.iter().map(|segment| segment.header.size).sum();
        let by_id = found.into_iter().map(|segment| (segment.header.id, segment)).collect();
        let (by_id, used_bytes, next_id) = (RwLock::new(by_id), AtomicU64::new(taken), AtomicU32::new(next_id));
        Self { disk, limits, store_id, by_id, used_bytes, next_id }
    }

    pub(super) fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Relaxed)
    }

    pub(super) fn read(&self, slot: &IndexSlot, mode: ReadMode) -> Result<LogEntry, EntryReadError> {
        let segment = self.by_id.read().get(&slot.segment).cloned();
        segment.ok_or(EntryReadError::Gone(slot.segment))?.read(slot, mode)
    }

    /// Returns closed segments with little live data: most of it died, or a restart ended them early.
    pub(super) fn sparse_segments(&self) -> Vec<Arc<LogSegment>> {
        let holds_little = |segment: &LogSegment| {
            let live = segment.live_slots.load(SeqCst) > 0;
            live && segment.live_bytes.load(Relaxed) * 4 < segment.header.size - FIRST_BATCH_OFFSET
        };
        self.closed_segments().into_iter().filter(|segment| holds_little(segment)).collect()
    }

    pub(super) fn add_slot(&self, slot: &IndexSlot) {
        if let Some(segment) = self.by_id.read().get(&slot.segment) {
            segment.add_slot(slot);
        }
    }

    pub(super) fn remove_slot(&self, slot: &IndexSlot) {
        if let Some(segment) = self.by_id.read().get(&slot.segment) {
            segment.remove_slot(slot);
        }
    }

    /// Prepares a segment: recycles one without live entries, or creates one. With `fill`, a new file is filled with
    /// zeroes until that returns `false`; without it the file is only allocated. The last segment within `max_size` is
    /// reserved for the cold lane: otherwise a full store could not be compacted.
    pub(super) fn prepare_segment(
        &self, lane: u8, so_far: &dyn Fn() -> LogPosition, fill: Option<&dyn Fn() -> bool>,
    ) -> Result<Arc<LogSegment>, SegmentError> {
        let mut salt = [0; 8];
        getrandom::fill(&mut salt).map_err(|error| io::Error::other(error.to_string()))?;
        let salt = u64::from_le_bytes(salt);
        let mut removable = Vec::new();
        while let Some(dead) = self.take_recyclable(|segment| !self.is_reusable(segment)) {
            removable.push(dead);
        }
        let recyclable = self.take_recyclable(|segment| self.is_reusable(segment));
        // The header proves that the store was open when the contents of these segments died. A claim that they end
        // would otherwise seem to have expired while the store was closed, if its own segment is still there.
        let LogPosition { sequence, clock, highest_fence: fence_floor } = so_far();
        let (store, id, size) = (self.store_id, self.next_id.fetch_add(1, SeqCst), self.limits.segment_size);
        let header = SegmentHeader { store, id, size, salt, sequence, clock, fence_floor };
        let reserved = if lane == COLD_LANE { 0 } else { header.size };
        let remove_all = |dead: Vec<Arc<LogSegment>>| {
            // If removal fails, the next start finds the segment dead, too.
            dead.iter().for_each(|dead| drop(self.remove_file(dead)));
        };
        let segment = match recyclable {
            Some(dead) => self.recycle(&dead, header),
            None => self.create_segment(header, reserved, fill).or_else(|full| {
                if removable.is_empty() {
                    return Err(full);
                }
                remove_all(mem::take(&mut removable));
                self.create_segment(header, reserved, fill)
            }),
        };
        remove_all(removable);
        let segment = Arc::new(segment?);
        self.by_id.write().insert(header.id, segment.clone());
        Ok(segment)
    }

    /// Whether the segment can be recycled once it has no live entries.
    fn is_reusable(&self, segment: &LogSegment) -> bool {
        segment.header.size == self.limits.segment_size && !segment.is_spoiled.load(SeqCst)
    }

    /// Returns the closed segments, oldest first.
    pub(super) fn closed_segments(&self) -> Vec<Arc<LogSegment>> {
        let mut closed: Vec<_> =
            self.by_id.read().values().filter(|segment| segment.is_closed.load(SeqCst)).cloned().collect();
        closed.sort_unstable_by_key(|segment| segment.header.id);
        closed
    }

    /// Deletes the files of segments without live entries.
    pub(super) fn remove_recyclable(&self) -> io::Result<()> {
        while let Some(dead) = self.take_recyclable(|_| true) {
            self.remove_file(&dead)?;
        }
        self.disk.sync_dir()
    }

    fn remove_file(&self, dead: &LogSegment) -> io::Result<()> {
        self.used_bytes.fetch_sub(dead.header.size, Relaxed);
        self.disk.remove(&file_name(dead.header.id))
    }

    fn take_recyclable(&self, such: impl Fn(&LogSegment) -> bool) -> Option<Arc<LogSegment>> {
        let mut by_id = self.by_id.write();
        let is_needed = |proves: u32| proves != 0 && by_id.contains_key(&proves);
        let is_dead = |segment: &&Arc<LogSegment>| {
            segment.is_recyclable() && such(segment) && !is_needed(segment.proves_end_of.load(SeqCst))
        };
        let dead = by_id.values().find(is_dead)?.header.id;
        by_id.remove(&dead)
    }

    fn recycle(&self, dead: &LogSegment, header: SegmentHeader) -> Result<LogSegment, SegmentError> {
        let again = || {
            dead.file.write_at(&header.encode(), 0)?;
            dead.file.sync_data()?;
            self.disk.rename(&file_name(dead.header.id), &file_name(header.id))?;
            self.disk.sync_dir()
        };
        match again() {
            Ok(()) => Ok(LogSegment::new(header, dead.file.clone())),
            Err(error) => {
                // The contents are dead under either name.
                let _ = self.remove_file(dead).or_else(|_| self.disk.remove(&file_name(header.id)));
                Err(error.into())
            }
        }
    }

    fn create_segment(
        &self, header: SegmentHeader, reserved: u64, fill: Option<&dyn Fn() -> bool>,
    ) -> Result<LogSegment, SegmentError> {
        let taken = self.used_bytes.fetch_add(header.size, Relaxed);
        let made = if taken + header.size + reserved > self.limits.max_size {
            Err(SegmentError::Full { taken: taken >> 20, max: self.limits.max_size >> 20 })
        } else {
            self.create_file(header, fill).map_err(|error| {
                let _ = self.disk.remove(UNFINISHED_NAME);
                SegmentError::Io(error)
            })
        };
        if made.is_err() {
            self.used_bytes.fetch_sub(header.size, Relaxed);
        }
        made
    }

    fn create_file(&self, header: SegmentHeader, fill: Option<&dyn Fn() -> bool>) -> io::Result<LogSegment> {
        let file = self.disk.create(UNFINISHED_NAME)?;
        file.allocate(header.size)?;
        if let Some(go_on) = fill {
            file.fill_with_zeroes(header.size, go_on)?;
        }
        file.write_at(&header.encode(), 0)?;
        file.sync_data()?;
        self.disk.rename(UNFINISHED_NAME, &file_name(header.id))?;
        self.disk.sync_dir()?;
        Ok(LogSegment::new(header, file))
    }
}

/// Writes the seal, which is the last batch, and closes the segment.
pub(super) fn seal_segment(
    segment: &LogSegment, sealed: SegmentEnd, so_far: LogPosition, synced: bool,
) -> io::Result<()> {
    let LogPosition { clock, highest_fence, .. } = so_far;
    let (lane, sequence) = (sealed.lane, sealed.last_sequence);
    let mut batch = vec![0; SECTOR_LEN];
    BatchHeader { length: 0, count: 0, sequence, clock, highest_fence, lane, is_seal: true }
        .write_header(&mut batch, segment.header.salt);
    segment.file.write_at(&batch, sealed.offset)?;
    if synced {
        segment.file.sync_data()?;
    }
    segment.close_sealed(sealed);
    Ok(())
}

pub(super) fn file_name(id: u32) -> String {
    format!("{id:08x}.seg")
}

pub(super) fn parse_file_name(name: &str) -> Option<u32> {
    u32::from_str_radix(name.strip_suffix(".seg").filter(|hex| hex.len() == 8)?, 16).ok()
}
