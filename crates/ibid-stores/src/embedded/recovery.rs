//! From files to an index: what a start finds, cuts, sets aside and reports.
//!
//! Segments are read one by one; of two entries at one address the higher version counts, so their order is of no
//! matter. What died is left out. Of a segment that no batch follows, in its lane, the end may be torn: it is cut
//! there. Everything else that does not read is a flaw: reported with file and offset, passed over, never served.
//!
//! Claims that were unfinished when the store was last written to, and whose retention has ended since, are not left out:
//! nobody could ask about them in the meantime. They are reported, and kept as outcome unknown.
//!
//! Invariants: after recovery every segment is sealed, and the store goes on in a new one. What the last batch held is
//! written again, for a file that was read back from the system's cache may never have reached the disk.

use std::{
    collections::{HashMap, HashSet},
    io,
    sync::{Arc, atomic::Ordering::SeqCst},
};

use super::{
    OpenError,
    disk::Disk,
    entry::{Entry, Kind, Micros},
    format::{FIRST_BATCH, Flaw, MAIN, SECTOR, SegmentHeader},
    index::{Index, SHARDS, Slot},
    reading::{Scanned, read_all},
    report::{Found, Report},
    segments::{SPARE, Sealed, Segment, SoFar, id_of, name, seal},
    snapshot,
};

/// What a start found.
#[derive(Debug)]
pub(super) struct Recovered {
    pub(super) index: Index,
    pub(super) segments: Vec<Arc<Segment>>,
    pub(super) store: Option<[u8; 16]>,
    pub(super) next_id: u32,
    /// The highest that were given, by lane for sequence numbers.
    pub(super) sequences: [u64; 2],
    pub(super) version: u64,
    /// When it was opened.
    pub(super) clock: Micros,
    /// The latest time that is in the log: what had died by then had died while the store was open. Nothing later is
    /// written before what was renewed.
    pub(super) seen: Micros,
    pub(super) fences: u64,
    /// The segments that were not read, because a snapshot covers them.
    pub(super) covered: HashSet<u32>,
    /// What was written last, in each lane, as far as it still counts.
    pub(super) last: Vec<Entry>,
    /// Claims that get a new retention; to be written again.
    pub(super) renewed: Vec<Entry>,
    pub(super) report: Report,
}

/// What need not be read again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Trust {
    /// What a snapshot of the index covers.
    Snapshot,
    /// Everything is read.
    Nothing,
}

impl Recovered {
    fn new(now: Micros) -> Self {
        Self {
            index: Index::new(),
            segments: Vec::new(),
            store: None,
            next_id: 1,
            sequences: [0; 2],
            version: 0,
            clock: now,
            seen: 0,
            fences: 0,
            covered: HashSet::new(),
            last: Vec::new(),
            renewed: Vec::new(),
            report: Report::default(),
        }
    }

    /// The size of the largest segment, if there is one.
    pub(super) fn largest_segment(disk: &dyn Disk) -> Result<Option<u64>, OpenError> {
        let mut found = Self::new(0);
        found.find_segments(disk)?;
        Ok(found.segments.iter().map(|segment| segment.header.size).max())
    }

    /// Reads all segments, or those that no snapshot covers. Changes nothing on the disk.
    pub(super) fn read(disk: &dyn Disk, now: Micros, trust: Trust) -> Result<(Self, Vec<Unsealed>), OpenError> {
        let mut recovered = Self::new(now);
        recovered.find_segments(disk)?;
        let by_id: HashMap<u32, Arc<Segment>> =
            recovered.segments.iter().map(|segment| (segment.header.id, segment.clone())).collect();
        let mut scanned = Vec::new();
        if trust == Trust::Snapshot {
            scanned = recovered.trust_snapshot(disk, &by_id)?;
        }
        // Nothing counts in one that was being recycled, and nothing new is in one that was covered.
        let counts = |segment: &&Arc<Segment>| segment.written.load(SeqCst) != 0 && segment.sealed.get().is_none();
        let unread: Vec<Arc<Segment>> = recovered.segments.iter().filter(counts).cloned().collect();
        for part in read_all(&unread, &by_id, &recovered.index, recovered.seen)? {
            recovered.report.add(part.report);
            recovered.version = recovered.version.max(part.version);
            recovered.seen = recovered.seen.max(part.clock);
            recovered.fences = recovered.fences.max(part.fences);
            scanned.extend(part.scanned);
        }
        recovered.clock = recovered.clock.max(recovered.seen);
        let unsealed = recovered.chain(scanned, &by_id);
        recovered.interrupt(&by_id);
        recovered.index.sweep(recovered.clock, u32::MAX, |slot| by_id[&slot.segment].lose(slot));
        recovered.report.live = (0..SHARDS).map(|nth| recovered.index.nth(nth).slots().count() as u64).sum();
        let (clock, renewed): (_, HashSet<u64>) =
            (recovered.clock, recovered.renewed.iter().map(|entry| entry.version).collect());
        recovered.last.retain(|entry| clock < entry.dies_at && !renewed.contains(&entry.version));
        Ok((recovered, unsealed))
    }

    fn see(&mut self, clock: Micros) {
        self.seen = self.seen.max(clock);
        self.clock = self.clock.max(clock);
    }

    fn find_segments(&mut self, disk: &dyn Disk) -> Result<(), OpenError> {
        let mut ids: Vec<u32> = disk.list()?.iter().filter_map(|name| id_of(name)).collect();
        ids.sort_unstable();
        for id in ids {
            self.next_id = self.next_id.max(id.saturating_add(1));
            let file = disk.open(&name(id))?;
            let mut bytes = vec![0; SECTOR];
            let header = match file.length()? {
                length if length < FIRST_BATCH => Err(Flaw::Length),
                _ => {
                    file.read_at(&mut bytes, 0)?;
                    SegmentHeader::decode(&bytes)
                }
            };
            let mut header = match header {
                Ok(header) => header,
                Err(Flaw::Version(version)) => return Err(OpenError::Version { file: name(id), version }),
                Err(flaw) => {
                    self.report.found.push(Found { file: name(id), offset: 0, length: None, flaw });
                    continue;
                }
            };
            if self.store.is_some_and(|store| store != header.store) {
                self.report.found.push(Found { file: name(id), offset: 16, length: None, flaw: Flaw::Field });
                continue;
            }
            self.store = Some(header.store);
            self.see(header.clock);
            self.fences = self.fences.max(header.fences);
            self.sequences[usize::from(MAIN)] = self.sequences[usize::from(MAIN)].max(header.sequence);
            let was_being_recycled = header.id != id;
            header.id = id;
            let segment = Segment::new(header, file);
            segment.close(if was_being_recycled { 0 } else { FIRST_BATCH });
            self.report.segments += 1;
            self.segments.push(Arc::new(segment));
        }
        Ok(())
    }

    /// Fills the index from a snapshot. Returns the segments that it covers.
    fn trust_snapshot(
        &mut self, disk: &dyn Disk, by_id: &HashMap<u32, Arc<Segment>>,
    ) -> Result<Vec<Scanned>, OpenError> {
        let Some(store) = self.store else { return Ok(Vec::new()) };
        let usable = by_id.iter().filter(|(_, segment)| segment.written.load(SeqCst) != 0);
        let usable = usable.map(|(id, segment)| (*id, segment.clone())).collect();
        let Some(snapshot) = snapshot::read(disk, &usable, store, &self.index)? else {
            self.index = Index::new();
            return Ok(Vec::new());
        };
        self.version = snapshot.version;
        self.see(snapshot.clock);
        self.fences = self.fences.max(snapshot.fences);
        for nth in 0..SHARDS {
            for slot in self.index.nth(nth).slots() {
                self.version = self.version.max(slot.version());
                by_id[&slot.segment].gain(slot);
            }
        }
        self.report.covered = snapshot.covers.len() as u64;
        self.covered = snapshot.covers.keys().copied().collect();
        let covered = snapshot.covers.into_iter().map(|(id, (_, ends))| {
            by_id[&id].complete(ends);
            Scanned { segment: by_id[&id].clone(), ends, sealed: true, last_batch: None }
        });
        Ok(covered.collect())
    }

    /// Whether each segment is continued by the next one of its lane. Returns those that must be sealed.
    fn chain(&mut self, mut scanned: Vec<Scanned>, by_id: &HashMap<u32, Arc<Segment>>) -> Vec<Unsealed> {
        scanned.sort_by_key(|scanned| (scanned.ends.lane, scanned.segment.header.id));
        let mut unsealed = Vec::new();
        for nth in 0..scanned.len() {
            let this = &scanned[nth];
            let lane = usize::from(this.ends.lane);
            self.sequences[lane] = self.sequences[lane].max(this.ends.last);
            let next = scanned.get(nth + 1).filter(|next| next.ends.lane == this.ends.lane);
            if this.sealed {
                continue;
            }
            match next {
                Some(next) if next.ends.first > this.ends.last + 1 => {
                    let file = name(this.segment.header.id);
                    self.report.found.push(Found { file, offset: this.ends.end, length: Some(0), flaw: Flaw::Missing });
                    continue;
                }
                Some(_) => {}
                None => {
                    self.report.torn.push((name(this.segment.header.id), this.ends.end));
                    let entries = this.last_batch.as_ref().and_then(|batch| batch.entries().ok()).unwrap_or_default();
                    self.last.extend(entries.into_iter().filter_map(|(offset, bytes)| {
                        self.index.slot_at(&bytes, this.segment.header.id, offset as u32)?;
                        Entry::decode(bytes, by_id[&this.segment.header.id].header.salt).ok()
                    }));
                }
            }
            let ends = Sealed { last: this.ends.last + 1, ..this.ends };
            unsealed.push(Unsealed { segment: this.segment.clone(), ends });
        }
        unsealed
    }

    /// Nobody is known to run any more. Of those whose retention ended while the store was closed, it begins again.
    fn interrupt(&mut self, by_id: &HashMap<u32, Arc<Segment>>) {
        for nth in 0..SHARDS {
            let claims: Vec<Slot> =
                self.index.nth(nth).slots().filter(|slot| slot.kind() == Kind::Claim).copied().collect();
            for slot in claims {
                // One that does not read any more is found corrupt by whoever asks for it.
                let Ok(mut entry) = by_id[&slot.segment].read(&slot) else { continue };
                entry.interrupt(self.clock);
                if (self.seen + 1..=self.clock).contains(&entry.expires) {
                    entry.renew(self.clock);
                    self.index.swap(&slot, Slot::new(&entry, slot.segment, slot.offset, slot.length()));
                    self.report.overdue.push(entry.ask.address);
                    self.renewed.push(entry.clone());
                }
                if entry.dies_at <= self.clock {
                    continue;
                }
                self.index.nth(nth).running.insert(entry.ask.address, Arc::new(entry));
            }
        }
    }
}

/// A segment whose end is not marked.
#[derive(Debug)]
pub(super) struct Unsealed {
    segment: Arc<Segment>,
    /// As it will be.
    ends: Sealed,
}

/// Cuts torn ends, sets aside what cannot be read, removes what was not finished, and makes the rest durable.
pub(super) fn mend(disk: &dyn Disk, recovered: &mut Recovered, unsealed: Vec<Unsealed>) -> io::Result<()> {
    for found in recovered.report.found.iter().filter(|found| found.is_whole_file()) {
        disk.rename(&found.file, &format!("{}.quarantined", found.file))?;
    }
    for unfinished in disk.list()?.iter().filter(|name| [SPARE, snapshot::UNFINISHED].contains(&name.as_str())) {
        disk.remove(unfinished)?;
    }
    for segment in &recovered.segments {
        segment.file.sync_data()?;
    }
    let (clock, fences) = (recovered.seen, recovered.fences);
    for Unsealed { segment, ends } in unsealed {
        if ends.end + SECTOR as u64 <= segment.header.size {
            seal(&segment, ends, SoFar { sequence: ends.last, clock, fences }, true)?;
        }
        let highest = &mut recovered.sequences[usize::from(ends.lane)];
        *highest = (*highest).max(ends.last);
    }
    disk.sync_dir()
}
