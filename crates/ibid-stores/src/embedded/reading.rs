//! Reading segments into an index, several at a time.
//!
//! Invariant: the order in which segments are read is of no matter, because of two entries at one address the higher
//! version counts.

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
    entry::{Entry, Micros},
    format::Flaw,
    index::{Index, Slot},
    report::{Found, Report},
    scan::{Batch, Scan, Step},
    segments::{Sealed, Segment, name},
};

/// How many segments are read at the same time.
const READERS: usize = 4;

/// A segment in which something was found.
pub(super) struct Scanned {
    pub(super) segment: Arc<Segment>,
    pub(super) ends: Sealed,
    pub(super) sealed: bool,
    /// Of a segment that is not sealed.
    pub(super) last_batch: Option<Batch>,
}

/// What one reader found.
pub(super) struct Part<'a> {
    index: &'a Index,
    by_id: &'a HashMap<u32, Arc<Segment>>,
    /// What has died by then is left out.
    now: Micros,
    pub(super) report: Report,
    pub(super) version: u64,
    pub(super) clock: Micros,
    pub(super) fences: u64,
    pub(super) scanned: Vec<Scanned>,
}

/// Reads `segments` into the index.
pub(super) fn read_all<'a>(
    segments: &[Arc<Segment>], by_id: &'a HashMap<u32, Arc<Segment>>, index: &'a Index, now: Micros,
) -> io::Result<Vec<Part<'a>>> {
    let next = AtomicUsize::new(0);
    let read = || -> io::Result<Part<'a>> {
        let (report, scanned) = (Report::default(), Vec::new());
        let mut part = Part { index, by_id, now, report, version: 0, clock: 0, fences: 0, scanned };
        while let Some(segment) = segments.get(next.fetch_add(1, SeqCst)) {
            part.read(segment)?;
        }
        Ok(part)
    };
    thread::scope(|scope| {
        let others: Vec<_> = (0..(segments.len() / 4).min(READERS - 1)).map(|_| scope.spawn(read)).collect();
        let mut parts = vec![read()?];
        for other in others {
            parts.push(other.join().expect("a reader does not panic")?);
        }
        Ok(parts)
    })
}

impl Part<'_> {
    fn read(&mut self, segment: &Arc<Segment>) -> io::Result<()> {
        let mut scan = Scan::new(segment)?;
        let mut scanned: Option<Scanned> = None;
        loop {
            match scan.step()? {
                Step::Batch(batch) => {
                    self.take_in(&batch, segment);
                    let sequence = batch.header.sequence;
                    let scanned = scanned.get_or_insert_with(|| Scanned {
                        segment: segment.clone(),
                        ends: Sealed { lane: batch.header.lane, first: sequence, last: 0, end: 0 },
                        sealed: false,
                        last_batch: None,
                    });
                    scanned.ends.last = sequence;
                    scanned.last_batch = Some(batch);
                }
                Step::Gap { at, length, flaw } => self.found(segment, at, length, flaw),
                Step::End { at, sealed } => {
                    segment.close(at);
                    if let Some(scanned) = &mut scanned {
                        (scanned.ends.end, scanned.sealed) = (at, sealed);
                        scanned.ends.last += u64::from(sealed);
                        if sealed {
                            segment.complete(scanned.ends);
                            scanned.last_batch = None;
                        }
                    }
                    self.scanned.extend(scanned);
                    return Ok(());
                }
            }
        }
    }

    fn take_in(&mut self, batch: &Batch, segment: &Segment) {
        self.report.batches += 1;
        self.clock = self.clock.max(batch.header.clock);
        self.fences = self.fences.max(batch.header.fences);
        let entries = batch.entries().unwrap_or_else(|flaw| {
            self.found(segment, batch.at, batch.header.span(), flaw);
            Vec::new()
        });
        for (offset, bytes) in entries {
            let length = bytes.len();
            let entry = match Entry::decode(bytes, segment.header.salt) {
                Ok(entry) if length < Slot::MAX_LENGTH => entry,
                read => {
                    self.found(segment, offset, length as u64, read.err().unwrap_or(Flaw::Length));
                    continue;
                }
            };
            self.report.entries += 1;
            self.version = self.version.max(entry.version);
            if entry.dies_at <= self.now {
                continue;
            }
            let slot = Slot::new(&entry, segment.header.id, offset as u32, length);
            segment.gain(&slot);
            let is_same = |known: &Slot| self.address_at(known) == Some(entry.ask.address);
            if let Some(not_needed) = self.index.adopt(&entry, slot, is_same) {
                self.by_id[&not_needed.segment].lose(&not_needed);
            }
        }
    }

    fn found(&mut self, segment: &Segment, offset: u64, length: u64, flaw: Flaw) {
        let file = name(segment.header.id);
        self.report.found.push(Found { file, offset, length: Some(length), flaw });
    }

    fn address_at(&self, slot: &Slot) -> Option<Address> {
        let mut bytes = [0; 56];
        self.by_id.get(&slot.segment)?.file.read_at(&mut bytes, slot.offset.into()).ok()?;
        Some(Entry::peek_name(&bytes)?.1)
    }
}
