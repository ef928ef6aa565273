//! Reads segments, from the first batch to the end, and into an index, several at a time.
//!
//! Invariants: a batch is returned only if its checksum matches the segment's salt and it follows the previous one. Other
//! bytes are returned as a gap up to the next valid batch; a gap without a valid batch after it is the end of the
//! segment. The order of segments does not matter, because of two entries at one address the higher version counts.

use std::{
    collections::HashMap,
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    thread,
};

use bytes::Bytes;
use ibid::store::Address;

use super::{
    entry::{LogEntry, UnixMicros},
    format::{BATCH_HEADER_LEN, BatchHeader, Corruption, FIRST_BATCH_OFFSET, SECTOR_LEN},
    index::{Index, IndexSlot},
    recovery::StoreReport,
    segments::{LogSegment, SegmentEnd},
};

/// Bytes read at a time.
const READ_WINDOW_BYTES: usize = 1 << 20;
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
                    let BatchHeader { sequence, lane, .. } = batch.header;
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

pub(super) enum ScanStep {
    Batch(ScannedBatch),
    /// Invalid bytes from `at` on, which valid batches follow.
    Gap {
        at: u64,
        length: u64,
        corruption: Corruption,
    },
    /// No valid batch from `at` on.
    End {
        at: u64,
        sealed: bool,
    },
}

pub(super) struct ScannedBatch {
    pub(super) offset: u64,
    pub(super) header: BatchHeader,
    payload: Bytes,
}

pub(super) struct SegmentScan<'a> {
    segment: &'a LogSegment,
    offset: u64,
    /// Sequence number of the previous batch, or `None` after a gap.
    sequence: Option<u64>,
    window: Bytes,
    window_offset: u64,
    size: u64,
}

impl<'a> SegmentScan<'a> {
    pub(super) fn new(segment: &'a LogSegment) -> io::Result<Self> {
        let size = segment.file.length()?.min(segment.header.size);
        Ok(Self { segment, offset: FIRST_BATCH_OFFSET, sequence: None, window: Bytes::new(), window_offset: 0, size })
    }

    pub(super) fn next_step(&mut self) -> io::Result<ScanStep> {
        let begin = self.offset;
        let flaw = match self.read_batch(begin)? {
            Ok(batch) => return Ok(self.accept(batch)),
            Err(flaw) => flaw,
        };
        let mut at = begin + SECTOR_LEN as u64;
        while at < self.size {
            if let Ok(batch) = self.read_batch(at)? {
                // A batch that does not directly follow proves a gap, not a torn end.
                if self.sequence.is_none_or(|before| batch.header.sequence > before) {
                    (self.offset, self.sequence) = (at, None);
                    return Ok(ScanStep::Gap { at: begin, length: at - begin, corruption: flaw });
                }
            }
            at += SECTOR_LEN as u64;
        }
        self.offset = self.size;
        Ok(ScanStep::End { at: begin, sealed: false })
    }

    fn accept(&mut self, batch: ScannedBatch) -> ScanStep {
        if batch.header.is_seal {
            return ScanStep::End { at: batch.offset, sealed: true };
        }
        self.offset = batch.offset + batch.header.padded_len();
        self.sequence = Some(batch.header.sequence);
        ScanStep::Batch(batch)
    }

    fn read_batch(&mut self, at: u64) -> io::Result<Result<ScannedBatch, Corruption>> {
        let Some(head) = self.read_bytes(at, BATCH_HEADER_LEN)? else { return Ok(Err(Corruption::Length)) };
        let header = match BatchHeader::peek(&head) {
            Ok(header) => header,
            Err(flaw) => return Ok(Err(flaw)),
        };
        let Some(all) = self.read_bytes(at, BATCH_HEADER_LEN + header.length as usize)? else {
            return Ok(Err(Corruption::Length));
        };
        let is_next = self.offset != at || self.sequence.is_none_or(|before| header.sequence == before + 1);
        let verified = header.verify(&all, self.segment.header.salt);
        let verified = verified.and(if is_next { Ok(()) } else { Err(Corruption::InvalidField) });
        Ok(verified.map(|()| ScannedBatch { offset: at, header, payload: all.slice(BATCH_HEADER_LEN..) }))
    }

    fn read_bytes(&mut self, at: u64, length: usize) -> io::Result<Option<Bytes>> {
        let end = at + length as u64;
        if end > self.size {
            return Ok(None);
        }
        if at < self.window_offset || end > self.window_offset + self.window.len() as u64 {
            let mut window = vec![0; length.max(READ_WINDOW_BYTES).min((self.size - at) as usize)];
            self.segment.file.read_at(&mut window, at)?;
            (self.window, self.window_offset) = (Bytes::from(window), at);
        }
        let from = (at - self.window_offset) as usize;
        Ok(Some(self.window.slice(from..from + length)))
    }
}

impl ScannedBatch {
    /// Returns the bytes of each entry with its offset in the segment.
    pub(super) fn entries(&self) -> Result<Vec<(u64, Bytes)>, Corruption> {
        let mut entries = Vec::with_capacity(self.header.count.min(1 << 16) as usize);
        let mut from = 0;
        for _ in 0..self.header.count {
            let length = LogEntry::peek_length(&self.payload[from..])?;
            entries.push((self.offset + (BATCH_HEADER_LEN + from) as u64, self.payload.slice(from..from + length)));
            from += length;
        }
        if from == self.payload.len() { Ok(entries) } else { Err(Corruption::Length) }
    }
}
