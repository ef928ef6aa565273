//! Reads segments into an index, several at a time.
//!
//! Invariant: the order of segments does not matter, because of two entries at one address the higher version counts.

use std::{
    collections::HashMap,
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    thread,
};

use ibid::store::Address;

use super::{
    entry::{LogEntry, UnixMicros},
    format::Corruption,
    index::{Index, IndexSlot},
    report::StoreReport,
    scan::{ScanStep, ScannedBatch, SegmentScan},
    segments::{LogSegment, SegmentEnd},
};

/// Number of segments read concurrently.
const READER_THREADS: usize = 4;

/// A segment that contains batches.
pub(super) struct ScannedSegment {
    pub(super) segment: Arc<LogSegment>,
    pub(super) end: SegmentEnd,
    pub(super) sealed: bool,
    /// Last batch of an unsealed segment.
    pub(super) last_batch: Option<ScannedBatch>,
}

pub(super) struct SegmentReader<'a> {
    index: &'a Index,
    by_id: &'a HashMap<u32, Arc<LogSegment>>,
    /// Entries that died before this time are skipped.
    now: UnixMicros,
    pub(super) report: StoreReport,
    pub(super) version: u64,
    pub(super) clock: UnixMicros,
    pub(super) fences: u64,
    pub(super) scanned: Vec<ScannedSegment>,
}

pub(super) fn read_segments<'a>(
    segments: &[Arc<LogSegment>], by_id: &'a HashMap<u32, Arc<LogSegment>>, index: &'a Index, now: UnixMicros,
) -> io::Result<Vec<SegmentReader<'a>>> {
    let next = AtomicUsize::new(0);
    let read = || -> io::Result<SegmentReader<'a>> {
        let (report, scanned) = (StoreReport::default(), Vec::new());
        let mut part = SegmentReader { index, by_id, now, report, version: 0, clock: 0, fences: 0, scanned };
        while let Some(segment) = segments.get(next.fetch_add(1, SeqCst)) {
            part.read_segment(segment)?;
        }
        Ok(part)
    };
    thread::scope(|scope| {
        let others: Vec<_> = (0..(segments.len() / 4).min(READER_THREADS - 1)).map(|_| scope.spawn(read)).collect();
        let mut parts = vec![read()?];
        for other in others {
            parts.push(other.join().expect("a reader does not panic")?);
        }
        Ok(parts)
    })
}

impl SegmentReader<'_> {
    fn read_segment(&mut self, segment: &Arc<LogSegment>) -> io::Result<()> {
        let mut scan = SegmentScan::new(segment)?;
        let mut scanned: Option<ScannedSegment> = None;
        loop {
            match scan.next_step()? {
                ScanStep::Batch(batch) => {
                    self.index_batch(&batch, segment);
                    let sequence = batch.header.sequence;
                    let lane = batch.header.lane;
                    let scanned = scanned.get_or_insert_with(|| ScannedSegment {
                        segment: segment.clone(),
                        end: SegmentEnd { lane, first_sequence: sequence, last_sequence: 0, offset: 0 },
                        sealed: false,
                        last_batch: None,
                    });
                    scanned.end.last_sequence = sequence;
                    scanned.last_batch = Some(batch);
                }
                ScanStep::Gap { at, length, corruption } => {
                    self.report.add_corruption(segment.header.id, at, Some(length), corruption);
                }
                ScanStep::End { at, sealed } => {
                    segment.close(at);
                    if let Some(scanned) = &mut scanned {
                        (scanned.end.offset, scanned.sealed) = (at, sealed);
                        scanned.end.last_sequence += u64::from(sealed);
                        if sealed {
                            segment.close_sealed(scanned.end);
                            scanned.last_batch = None;
                        }
                    }
                    self.scanned.extend(scanned);
                    return Ok(());
                }
            }
        }
    }

    fn index_batch(&mut self, batch: &ScannedBatch, segment: &LogSegment) {
        self.report.batches += 1;
        self.clock = self.clock.max(batch.header.clock);
        self.fences = self.fences.max(batch.header.highest_fence);
        let entries = batch.entries().unwrap_or_else(|flaw| {
            self.report.add_corruption(segment.header.id, batch.offset, Some(batch.header.padded_len()), flaw);
            Vec::new()
        });
        for (offset, bytes) in entries {
            let length = bytes.len();
            let entry = match LogEntry::decode(bytes, segment.header.salt) {
                Ok(entry) if length < IndexSlot::MAX_LENGTH => entry,
                read => {
                    let corruption = read.err().unwrap_or(Corruption::Length);
                    self.report.add_corruption(segment.header.id, offset, Some(length as u64), corruption);
                    continue;
                }
            };
            self.report.entries += 1;
            self.version = self.version.max(entry.version);
            if entry.dies_at <= self.now {
                continue;
            }
            let slot = IndexSlot::new(&entry, segment.header.id, offset as u32, length);
            segment.add_slot(&slot);
            let is_same = |known: &IndexSlot| self.read_address(known) == Some(entry.request.address);
            if let Some(not_needed) = self.index.insert_recovered(&entry, slot, is_same) {
                self.by_id[&not_needed.segment].remove_slot(&not_needed);
            }
        }
    }

    fn read_address(&self, slot: &IndexSlot) -> Option<Address> {
        let mut bytes = [0; 56];
        self.by_id.get(&slot.segment)?.file.read_at(&mut bytes, slot.offset.into()).ok()?;
        Some(LogEntry::peek_version_and_address(&bytes)?.1)
    }
}
