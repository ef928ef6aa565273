//! Reading a segment from its first batch to its end.
//!
//! Invariant: a batch is shown only if its checksum fits the segment's salt and it follows the one before it. What does
//! not is shown as a gap, up to the next batch that is whole; a gap with nothing whole behind it is the segment's end.

use std::io;

use bytes::Bytes;

use super::{
    entry::Entry,
    format::{BATCH_HEADER, BatchHeader, FIRST_BATCH, Flaw, SECTOR},
    segments::Segment,
};

/// How much is read at a time.
const WINDOW: usize = 1 << 20;

/// What comes next in a segment.
pub(super) enum Step {
    Batch(Batch),
    /// Bytes from `at` on that are no batch, although whole ones follow.
    Gap {
        at: u64,
        length: u64,
        flaw: Flaw,
    },
    /// Nothing whole from `at` on.
    End {
        at: u64,
        sealed: bool,
    },
}

pub(super) struct Batch {
    pub(super) at: u64,
    pub(super) header: BatchHeader,
    payload: Bytes,
}

pub(super) struct Scan<'a> {
    segment: &'a Segment,
    at: u64,
    /// Of the batch before, unless a gap was in between.
    sequence: Option<u64>,
    window: Bytes,
    window_at: u64,
    size: u64,
}

impl<'a> Scan<'a> {
    pub(super) fn new(segment: &'a Segment) -> io::Result<Self> {
        let size = segment.file.length()?.min(segment.header.size);
        Ok(Self { segment, at: FIRST_BATCH, sequence: None, window: Bytes::new(), window_at: 0, size })
    }

    pub(super) fn step(&mut self) -> io::Result<Step> {
        let begin = self.at;
        let flaw = match self.batch_at(begin)? {
            Ok(batch) => return Ok(self.pass(batch)),
            Err(flaw) => flaw,
        };
        let mut at = begin + SECTOR as u64;
        while at < self.size {
            if let Ok(batch) = self.batch_at(at)? {
                // A batch that does not follow the last one is no torn tail either, but the proof of a gap.
                if self.sequence.is_none_or(|before| batch.header.sequence > before) {
                    (self.at, self.sequence) = (at, None);
                    return Ok(Step::Gap { at: begin, length: at - begin, flaw });
                }
            }
            at += SECTOR as u64;
        }
        self.at = self.size;
        Ok(Step::End { at: begin, sealed: false })
    }

    fn pass(&mut self, batch: Batch) -> Step {
        if batch.header.seal {
            return Step::End { at: batch.at, sealed: true };
        }
        self.at = batch.at + batch.header.span();
        self.sequence = Some(batch.header.sequence);
        Step::Batch(batch)
    }

    fn batch_at(&mut self, at: u64) -> io::Result<Result<Batch, Flaw>> {
        let Some(head) = self.bytes(at, BATCH_HEADER)? else { return Ok(Err(Flaw::Length)) };
        let header = match BatchHeader::peek(&head) {
            Ok(header) => header,
            Err(flaw) => return Ok(Err(flaw)),
        };
        let Some(all) = self.bytes(at, BATCH_HEADER + header.length as usize)? else { return Ok(Err(Flaw::Length)) };
        if let Err(flaw) = header.verify(&all, self.segment.header.salt) {
            return Ok(Err(flaw));
        }
        if self.at == at && self.sequence.is_some_and(|before| header.sequence != before + 1) {
            return Ok(Err(Flaw::Field));
        }
        Ok(Ok(Batch { at, header, payload: all.slice(BATCH_HEADER..) }))
    }

    fn bytes(&mut self, at: u64, length: usize) -> io::Result<Option<Bytes>> {
        let end = at + length as u64;
        if end > self.size {
            return Ok(None);
        }
        if at < self.window_at || end > self.window_at + self.window.len() as u64 {
            let mut window = vec![0; length.max(WINDOW).min((self.size - at) as usize)];
            self.segment.file.read_at(&mut window, at)?;
            (self.window, self.window_at) = (Bytes::from(window), at);
        }
        let from = (at - self.window_at) as usize;
        Ok(Some(self.window.slice(from..from + length)))
    }
}

impl Batch {
    /// Its entries' bytes, each with its offset in the segment.
    pub(super) fn entries(&self) -> Result<Vec<(u64, Bytes)>, Flaw> {
        let mut entries = Vec::with_capacity(self.header.count.min(1 << 16) as usize);
        let mut from = 0;
        for _ in 0..self.header.count {
            let length = Entry::peek_length(&self.payload[from..])?;
            entries.push((self.at + (BATCH_HEADER + from) as u64, self.payload.slice(from..from + length)));
            from += length;
        }
        if from == self.payload.len() { Ok(entries) } else { Err(Flaw::Length) }
    }
}
