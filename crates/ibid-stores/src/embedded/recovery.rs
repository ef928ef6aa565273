//! Rebuilds the index from the files at start, and reports and repairs damage.
//!
//! Segments are read in any order, because of two entries at one address the higher version counts. Dead entries are
//! skipped. The end of a segment may be torn if no batch follows it in its lane; it is cut there. All other unreadable
//! data is corruption: reported with file and offset, skipped, never served.
//!
//! Claims that were unfinished at the last write and whose ttl has ended since are not skipped: they could not be
//! queried while the store was closed. They are reported, and kept as outcome unknown.
//!
//! Invariants: after recovery every segment is sealed, and the store continues in a new one. The entries of the last
//! batch are written again, because data read from the page cache may never have reached the disk.

use std::{
    collections::{HashMap, HashSet},
    fmt, io,
    sync::{Arc, atomic::Ordering::SeqCst},
};

use ibid::store::Address;

use super::{
    OpenError,
    disk::Disk,
    entry::{LogEntry, LogEntryKind, UnixMicros},
    format::{Corruption, FIRST_BATCH_OFFSET, MAIN_LANE, SECTOR_LEN, SegmentHeader},
    index::{Index, IndexSlot, SHARD_COUNT},
    segment_reader::{ScannedSegment, read_segments},
    segments::{
        LogPosition, LogSegment, ReadMode, SegmentEnd, UNFINISHED_NAME, file_name, parse_file_name, seal_segment,
    },
    snapshot,
};

#[derive(Debug, Default)]
pub(super) struct RecoveredLog {
    pub(super) index: Index,
    pub(super) segments: Vec<Arc<LogSegment>>,
    pub(super) store_id: Option<[u8; 16]>,
    pub(super) next_id: u32,
    /// The highest sequence numbers, by lane.
    pub(super) sequences: [u64; 2],
    pub(super) version: u64,
    pub(super) opened_at: UnixMicros,
    /// The latest time in the log: an entry that died before it died while the store was open. No later time is written
    /// before the renewed claims are.
    pub(super) last_log_time: UnixMicros,
    pub(super) highest_fence: u64,
    /// Segments that were not read, because a snapshot covers them.
    pub(super) snapshot_segments: HashSet<u32>,
    /// The live entries of the last batch in each lane.
    pub(super) last_written: Vec<LogEntry>,
    /// Claims whose ttl is restarted. They are written again.
    pub(super) renewed: Vec<LogEntry>,
    pub(super) report: StoreReport,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RecoveryMode {
    /// Skips the segments that a snapshot covers.
    UseSnapshot,
    ReadEverything,
}

impl RecoveredLog {
    /// Returns the size of the largest segment in bytes.
    pub(super) fn largest_segment(disk: &dyn Disk) -> Result<Option<u64>, OpenError> {
        let mut found = Self::default();
        found.open_segments(disk)?;
        Ok(found.segments.iter().map(|segment| segment.header.size).max())
    }

    /// Reads all segments, or only those that no snapshot covers. Does not change the disk.
    pub(super) fn read(
        disk: &dyn Disk, now: UnixMicros, mode: RecoveryMode,
    ) -> Result<(Self, Vec<UnsealedSegment>), OpenError> {
        let mut recovered = Self { next_id: 1, opened_at: now, ..Self::default() };
        recovered.open_segments(disk)?;
        let by_id: HashMap<u32, Arc<LogSegment>> =
            recovered.segments.iter().map(|segment| (segment.header.id, segment.clone())).collect();
        let mut scanned = Vec::new();
        if mode == RecoveryMode::UseSnapshot {
            scanned = recovered.load_snapshot(disk, &by_id)?;
        }
        // Skip segments that were being recycled (nothing in them counts) and segments that the snapshot covers.
        let counts = |segment: &&Arc<LogSegment>| segment.written_len.load(SeqCst) != 0 && segment.end.get().is_none();
        let unread: Vec<Arc<LogSegment>> = recovered.segments.iter().filter(counts).cloned().collect();
        for part in read_segments(&unread, &by_id, &recovered.index, recovered.last_log_time)? {
            recovered.report.merge(part.report);
            recovered.version = recovered.version.max(part.version);
            recovered.last_log_time = recovered.last_log_time.max(part.clock);
            recovered.highest_fence = recovered.highest_fence.max(part.fences);
            scanned.extend(part.scanned);
        }
        recovered.opened_at = recovered.opened_at.max(recovered.last_log_time);
        let unsealed = recovered.check_sequence(scanned, &by_id);
        recovered.mark_interrupted(&by_id);
        recovered.index.sweep(recovered.opened_at, u32::MAX, |slot| by_id[&slot.segment].remove_slot(slot));
        recovered.report.live_entries =
            (0..SHARD_COUNT).map(|nth| recovered.index.shard_by_number(nth).slots().count() as u64).sum();
        let renewed: HashSet<u64> = recovered.renewed.iter().map(|entry| entry.version).collect();
        let opened_at = recovered.opened_at;
        recovered.last_written.retain(|entry| opened_at < entry.dies_at && !renewed.contains(&entry.version));
        Ok((recovered, unsealed))
    }

    fn advance_clock(&mut self, clock: UnixMicros) {
        self.last_log_time = self.last_log_time.max(clock);
        self.opened_at = self.opened_at.max(clock);
    }

    fn open_segments(&mut self, disk: &dyn Disk) -> Result<(), OpenError> {
        let mut ids: Vec<u32> = disk.list()?.iter().filter_map(|name| parse_file_name(name)).collect();
        ids.sort_unstable();
        for id in ids {
            self.next_id = self.next_id.max(id.saturating_add(1));
            let file = disk.open(&file_name(id))?;
            let mut bytes = vec![0; SECTOR_LEN];
            let header = match file.length()? {
                length if length < FIRST_BATCH_OFFSET => Err(Corruption::Length),
                _ => {
                    file.read_at(&mut bytes, 0)?;
                    SegmentHeader::decode(&bytes)
                }
            };
            let mut header = match header {
                Ok(header) => header,
                Err(Corruption::Version(version)) => return Err(OpenError::Version { file: file_name(id), version }),
                Err(corruption) => {
                    self.report.add_corruption(id, 0, None, corruption);
                    continue;
                }
            };
            if self.store_id.is_some_and(|store| store != header.store) {
                self.report.add_corruption(id, 16, None, Corruption::InvalidField);
                continue;
            }
            self.store_id = Some(header.store);
            self.advance_clock(header.clock);
            self.highest_fence = self.highest_fence.max(header.fence_floor);
            self.sequences[usize::from(MAIN_LANE)] = self.sequences[usize::from(MAIN_LANE)].max(header.sequence);
            let was_being_recycled = header.id != id;
            header.id = id;
            let segment = LogSegment::new(header, file);
            segment.close(if was_being_recycled { 0 } else { FIRST_BATCH_OFFSET });
            self.report.segments += 1;
            self.segments.push(Arc::new(segment));
        }
        Ok(())
    }

    /// Fills the index from a snapshot. Returns the segments that it covers.
    fn load_snapshot(
        &mut self, disk: &dyn Disk, by_id: &HashMap<u32, Arc<LogSegment>>,
    ) -> Result<Vec<ScannedSegment>, OpenError> {
        let Some(store) = self.store_id else { return Ok(Vec::new()) };
        let usable = by_id.iter().filter(|(_, segment)| segment.written_len.load(SeqCst) != 0);
        let usable = usable.map(|(id, segment)| (*id, segment.clone())).collect();
        let Some(snapshot) = snapshot::read_snapshot(disk, &usable, store, &self.index)? else {
            self.index = Index::default();
            return Ok(Vec::new());
        };
        self.version = snapshot.version;
        self.advance_clock(snapshot.clock);
        self.highest_fence = self.highest_fence.max(snapshot.highest_fence);
        for nth in 0..SHARD_COUNT {
            for slot in self.index.shard_by_number(nth).slots() {
                self.version = self.version.max(slot.version());
                by_id[&slot.segment].add_slot(slot);
            }
        }
        self.report.covered = snapshot.covered_segments.len() as u64;
        self.snapshot_segments = snapshot.covered_segments.keys().copied().collect();
        let covered = snapshot.covered_segments.into_iter().map(|(id, (_, ends))| {
            by_id[&id].close_sealed(ends);
            ScannedSegment { segment: by_id[&id].clone(), end: ends, sealed: true, last_batch: None }
        });
        Ok(covered.collect())
    }

    /// Checks that each segment is continued by the next one of its lane. Returns the segments to seal.
    fn check_sequence(
        &mut self, mut scanned: Vec<ScannedSegment>, by_id: &HashMap<u32, Arc<LogSegment>>,
    ) -> Vec<UnsealedSegment> {
        scanned.sort_by_key(|scanned| (scanned.end.lane, scanned.segment.header.id));
        let mut unsealed = Vec::new();
        for nth in 0..scanned.len() {
            let this = &scanned[nth];
            let lane = usize::from(this.end.lane);
            self.sequences[lane] = self.sequences[lane].max(this.end.last_sequence);
            let next = scanned.get(nth + 1).filter(|next| next.end.lane == this.end.lane);
            if this.sealed {
                continue;
            }
            match next {
                Some(next) if next.end.first_sequence > this.end.last_sequence + 1 => {
                    let (id, offset) = (this.segment.header.id, this.end.offset);
                    self.report.add_corruption(id, offset, Some(0), Corruption::MissingBatches);
                    continue;
                }
                Some(_) => {}
                None => {
                    self.report.unsealed_ends.push((file_name(this.segment.header.id), this.end.offset));
                    let entries = this.last_batch.as_ref().and_then(|batch| batch.entries().ok()).unwrap_or_default();
                    self.last_written.extend(entries.into_iter().filter_map(|(offset, bytes)| {
                        self.index.slot_at(&bytes, this.segment.header.id, offset as u32)?;
                        LogEntry::decode(bytes, by_id[&this.segment.header.id].header.salt).ok()
                    }));
                }
            }
            let ends = SegmentEnd { last_sequence: this.end.last_sequence + 1, ..this.end };
            unsealed.push((this.segment.clone(), ends));
        }
        unsealed
    }

    /// Marks all running claims as interrupted, and restarts the ttl of those that expired while the store was closed.
    fn mark_interrupted(&mut self, by_id: &HashMap<u32, Arc<LogSegment>>) {
        for nth in 0..SHARD_COUNT {
            let is_claim = |slot: &&IndexSlot| slot.kind() == LogEntryKind::Running;
            let claims: Vec<IndexSlot> = self.index.shard_by_number(nth).slots().filter(is_claim).copied().collect();
            for slot in claims {
                // A claim that fetches this entry will find it corrupt.
                let Ok(mut entry) = by_id[&slot.segment].read(&slot, ReadMode::Blocking) else { continue };
                entry.mark_interrupted(self.opened_at);
                if (self.last_log_time + 1..=self.opened_at).contains(&entry.expires_at) {
                    entry.renew_retention(self.opened_at);
                    self.index.swap(&slot, IndexSlot::new(&entry, slot.segment, slot.offset, slot.length()));
                    self.report.overdue_claims.push(entry.request.address);
                    self.renewed.push(entry.clone());
                }
                if entry.dies_at > self.opened_at {
                    self.index.shard_by_number(nth).running_entries.insert(entry.request.address, Arc::new(entry));
                }
            }
        }
    }
}

/// A segment, and the end that it will have once sealed.
type UnsealedSegment = (Arc<LogSegment>, SegmentEnd);

/// Cuts torn ends, quarantines unreadable files, removes unfinished files, and makes the rest durable.
pub(super) fn repair(disk: &dyn Disk, recovered: &mut RecoveredLog, unsealed: Vec<UnsealedSegment>) -> io::Result<()> {
    for found in recovered.report.found.iter().filter(|found| found.is_whole_file()) {
        disk.rename(&found.file, &format!("{}.quarantined", found.file))?;
    }
    let is_unfinished = |name: &&String| [UNFINISHED_NAME, snapshot::UNFINISHED_NAME].contains(&name.as_str());
    for unfinished in disk.list()?.iter().filter(is_unfinished) {
        disk.remove(unfinished)?;
    }
    for segment in &recovered.segments {
        segment.file.sync_data()?;
    }
    let (clock, highest_fence) = (recovered.last_log_time, recovered.highest_fence);
    for (segment, end) in unsealed {
        let sequence = end.last_sequence;
        if end.offset + SECTOR_LEN as u64 <= segment.header.size {
            seal_segment(&segment, end, LogPosition { sequence, clock, highest_fence }, true)?;
        }
        let highest = &mut recovered.sequences[usize::from(end.lane)];
        *highest = (*highest).max(sequence);
    }
    disk.sync_dir()
}

/// The result of reading a store's files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StoreReport {
    /// Number of segment files.
    pub segments: u64,
    /// Number of segments that were not read, because a snapshot of the index covers them.
    pub covered: u64,
    /// Number of valid batches read.
    pub batches: u64,
    /// Number of entries in those batches, including dead and superseded ones.
    pub entries: u64,
    /// Number of live entries.
    pub live_entries: u64,
    /// File and offset where each lane ends without a seal, as after a crash. Not an error.
    pub unsealed_ends: Vec<(String, u64)>,
    /// Corrupt data.
    pub found: Vec<CorruptRange>,
    /// Claims that were unfinished when the store was closed, and whose ttl ended before it was opened again. The store
    /// keeps them as outcome unknown, for their lease and ttl from opening on.
    pub overdue_claims: Vec<Address>,
}

impl StoreReport {
    pub(super) fn add_corruption(&mut self, segment: u32, offset: u64, length: Option<u64>, corruption: Corruption) {
        self.found.push(CorruptRange { file: file_name(segment), offset, length, corruption });
    }

    /// Adds the findings of another reader.
    pub(super) fn merge(&mut self, other: Self) {
        self.batches += other.batches;
        self.entries += other.entries;
        self.found.extend(other.found);
    }
}

/// A range that cannot be read. It is never served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CorruptRange {
    /// Name of the file.
    pub file: String,
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes, or `None` if the whole file is quarantined.
    pub length: Option<u64>,
    /// The kind of corruption.
    pub corruption: Corruption,
}

impl CorruptRange {
    /// Returns `true` if the whole file is unusable.
    pub fn is_whole_file(&self) -> bool {
        self.length.is_none()
    }
}

impl fmt::Display for CorruptRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, offset {}: {}", self.file, self.offset, self.corruption)
    }
}

impl fmt::Display for StoreReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { segments, covered, batches, entries, live_entries, .. } = self;
        writeln!(
            f,
            "{segments} segments ({covered} not read, but known from a snapshot), {batches} batches, {entries} entries, of which {live_entries} count"
        )?;
        for (file, offset) in &self.unsealed_ends {
            writeln!(f, "{file}, offset {offset}: the log ends here, unsealed (as after a crash)")?;
        }
        for found in &self.found {
            writeln!(f, "{found}")?;
        }
        if !self.overdue_claims.is_empty() {
            writeln!(
                f,
                "{} claims were unfinished when the store was closed, and their retention has ended since; a start keeps them as outcome unknown",
                self.overdue_claims.len()
            )?;
        }
        Ok(())
    }
}
