//! The end of a lane: the segment that its batches are written to.

use std::{
    io,
    sync::{Arc, atomic::Ordering::SeqCst},
};

use super::{
    format::{BATCH_HEADER_LEN, BatchHeader, FIRST_BATCH_OFFSET, SECTOR_LEN, pad_to_sector, salted_crc},
    segments::{LogPosition, LogSegment, SegmentEnd, seal_segment},
};

/// Unit in bytes that the kernel caches.
const PAGE_LEN: u64 = 4096;

#[derive(Debug)]
pub(super) struct LaneTail {
    pub(super) segment: Arc<LogSegment>,
    /// Position of the next batch.
    pub(super) offset: u64,
    lane: u8,
    first_sequence: u64,
    /// A full tail is sealed from the start.
    pub(super) is_sealed: bool,
}

/// Why a batch is not durable.
pub(super) enum BatchWriteError {
    /// The batch is certainly not in the log.
    NotWritten(io::Error),
    /// The batch may be in the log.
    NotSynced(io::Error),
}

impl BatchWriteError {
    pub(super) fn not_written(why: String) -> Self {
        Self::NotWritten(io::Error::other(why))
    }
}

impl LaneTail {
    pub(super) fn new(lane: u8, segment: Arc<LogSegment>, first_sequence: u64) -> Self {
        Self { segment, offset: FIRST_BATCH_OFFSET, lane, first_sequence, is_sealed: false }
    }

    /// The tail of a store without room for another segment: no batch fits.
    pub(super) fn full(lane: u8, segment: Arc<LogSegment>) -> Self {
        let offset = segment.header.size;
        Self { segment, offset, lane, first_sequence: 0, is_sealed: true }
    }

    /// Whether a batch of this length fits, and the seal after it.
    pub(super) fn has_room_for(&self, length: usize) -> bool {
        self.offset + (pad_to_sector(length) + SECTOR_LEN) as u64 <= self.segment.header.size
    }

    /// Writes and syncs a batch, whose header is not filled in yet. `spans` are the offset and length of each entry.
    /// Zeroes up to the end of the page follow it, because the kernel reads a page that is written in part.
    pub(super) fn write_batch(
        &self, batch: &mut Vec<u8>, spans: impl ExactSizeIterator<Item = (usize, usize)>, at: LogPosition, synced: bool,
    ) -> Result<(), BatchWriteError> {
        let (salt, length, count) = (self.segment.header.salt, batch.len(), spans.len() as u32);
        for (begin, length) in spans {
            let crc = salted_crc(salt, &batch[begin + 8..begin + length]);
            batch[begin + 4..begin + 8].copy_from_slice(&crc.to_le_bytes());
        }
        let (LogPosition { sequence, clock, highest_fence }, lane) = (at, self.lane);
        let payload = (length - BATCH_HEADER_LEN) as u32;
        BatchHeader { length: payload, count, sequence, clock, highest_fence, lane, is_seal: false }
            .write_header(batch, salt);
        let end = (self.offset + pad_to_sector(length) as u64).next_multiple_of(PAGE_LEN);
        batch.resize((end.min(self.segment.header.size) - self.offset) as usize, 0);
        let written = self.segment.file.write_at(batch, self.offset);
        batch.truncate(length);
        written.map_err(|error| BatchWriteError::not_written(format!("the disk refused to write: {error}")))?;
        if synced { self.segment.file.sync_data().map_err(BatchWriteError::NotSynced) } else { Ok(()) }
    }

    /// Seals the segment with the batch number `so_far.sequence`. If that fails, the next segment of the lane must prove
    /// where this one ends.
    #[must_use]
    pub(super) fn seal(&self, so_far: LogPosition, synced: bool) -> bool {
        let (lane, first_sequence, last_sequence) = (self.lane, self.first_sequence, so_far.sequence);
        let end = SegmentEnd { lane, first_sequence, last_sequence, offset: self.offset };
        let sealed = self.is_sealed || seal_segment(&self.segment, end, so_far, synced).is_ok();
        if !sealed {
            self.segment.mark_spoiled(self.offset);
        }
        sealed
    }

    /// Replaces the segment with `next`, which proves where this one ends if it is not sealed.
    pub(super) fn continue_in(&mut self, next: Arc<LogSegment>, first_sequence: u64, is_sealed: bool) {
        if !is_sealed {
            next.proves_end_of.store(self.segment.header.id, SeqCst);
        }
        *self = Self::new(self.lane, next, first_sequence);
    }
}
