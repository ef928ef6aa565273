//! Reads a segment from its first batch to its end.
//!
//! Invariant: a batch is returned only if its checksum matches the segment's salt and it follows the previous one.
//! Other bytes are returned as a gap up to the next valid batch; a gap without a valid batch after it is the end of the
//! segment.

use std::io;

use bytes::Bytes;

use super::{
    entry::LogEntry,
    format::{BATCH_HEADER_LEN, BatchHeader, Corruption, FIRST_BATCH_OFFSET, SECTOR_LEN},
    segments::LogSegment,
};

/// Bytes read at a time.
const READ_WINDOW_BYTES: usize = 1 << 20;

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
        if let Err(flaw) = header.verify(&all, self.segment.header.salt) {
            return Ok(Err(flaw));
        }
        if self.offset == at && self.sequence.is_some_and(|before| header.sequence != before + 1) {
            return Ok(Err(Corruption::InvalidField));
        }
        Ok(Ok(ScannedBatch { offset: at, header, payload: all.slice(BATCH_HEADER_LEN..) }))
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
