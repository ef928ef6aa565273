//! The files of the log: reading from them, and making the next one ready.
//!
//! A file is named after its segment's number. A new one is made under another name, filled, given its header, synced,
//! and renamed; a recycled one gets its new header, is synced, and renamed. So whatever has a segment's name has a
//! header that was durable before, and one whose number is not that of its name was being recycled: nothing in it
//! counts any more.
//!
//! Invariant: a segment is recycled only when no slot of the index points into it.

use std::{
    collections::HashMap,
    io,
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
    entry::Entry,
    format::{BatchHeader, COLD, FIRST_BATCH, Flaw, SECTOR, SegmentHeader},
    index::Slot,
};

/// The name under which a new segment is made ready.
pub(super) const SPARE: &str = "spare.tmp";
/// How much is filled with zeroes at a time.
const FILL: usize = 256 << 10;

/// What a segment holds that is complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sealed {
    pub(super) lane: u8,
    /// The first batch's sequence number, and the seal's.
    pub(super) first: u64,
    pub(super) last: u64,
    /// Where the seal stands.
    pub(super) end: u64,
}

#[derive(Debug)]
pub(super) struct Segment {
    pub(super) header: SegmentHeader,
    pub(super) file: Arc<dyn DiskFile>,
    /// Slots that point into it, and the bytes that they stand for. Written by whoever changes the index.
    live: AtomicU32,
    live_bytes: AtomicU64,
    /// Up to where it was written. Set once, when no more is written to it.
    pub(super) written: AtomicU64,
    /// Set once, when it is complete.
    pub(super) sealed: OnceLock<Sealed>,
    /// It proves where an older one ends, which could not be sealed, and is not recycled before that one.
    pub(super) proves: AtomicU32,
    /// Not before then is it worth looking what could be moved out of it. Written by the keeper.
    pub(super) look_again: AtomicU64,
    closed: AtomicBool,
    /// A sync of it has failed: what is written to it may never reach the disk.
    spoiled: AtomicBool,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum ReadError {
    #[error("segment {0} is gone")]
    Gone(u32),
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("{}, offset {offset}: {flaw}", name(*segment))]
    Flaw { segment: u32, offset: u32, flaw: Flaw },
}

impl Segment {
    pub(super) fn new(header: SegmentHeader, file: Arc<dyn DiskFile>) -> Self {
        Self {
            header,
            file,
            live: AtomicU32::new(0),
            live_bytes: AtomicU64::new(0),
            written: AtomicU64::new(FIRST_BATCH),
            sealed: OnceLock::new(),
            proves: AtomicU32::new(0),
            look_again: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            spoiled: AtomicBool::new(false),
        }
    }

    /// From now on nothing is written to it.
    pub(super) fn close(&self, written: u64) {
        self.written.store(written, SeqCst);
        self.closed.store(true, SeqCst);
    }

    /// From now on nothing is written to it, and it is known where it ends.
    pub(super) fn complete(&self, sealed: Sealed) {
        self.close(sealed.end);
        let _ = self.sealed.set(sealed);
    }

    /// A sync of it has failed: nothing is written to it again, and it is not recycled.
    pub(super) fn spoil(&self, written: u64) {
        self.spoiled.store(true, SeqCst);
        self.close(written);
    }

    /// A slot is about to point into it.
    pub(super) fn gain(&self, slot: &Slot) {
        self.live.fetch_add(1, SeqCst);
        self.live_bytes.fetch_add(slot.length() as u64, Relaxed);
    }

    /// A slot no longer points into it.
    pub(super) fn lose(&self, slot: &Slot) {
        self.live_bytes.fetch_sub(slot.length() as u64, Relaxed);
        self.live.fetch_sub(1, SeqCst);
    }

    pub(super) fn live_bytes(&self) -> u64 {
        self.live_bytes.load(Relaxed)
    }

    fn is_recyclable(&self) -> bool {
        self.closed.load(SeqCst) && self.live.load(SeqCst) == 0
    }

    pub(super) fn read(&self, slot: &Slot) -> Result<Entry, ReadError> {
        let mut bytes = vec![0; slot.length()];
        self.file.read_at(&mut bytes, slot.offset.into())?;
        Entry::decode(Bytes::from(bytes), self.header.salt).map_err(|flaw| ReadError::Flaw {
            segment: slot.segment,
            offset: slot.offset,
            flaw,
        })
    }
}

/// How many bytes the log may take up, in what pieces.
#[derive(Debug, Clone, Copy)]
pub(super) struct Room {
    pub(super) segment_size: u64,
    pub(super) max_size: u64,
}

#[derive(Debug)]
pub(super) struct Segments {
    pub(super) disk: Arc<dyn Disk>,
    pub(super) room: Room,
    pub(super) store: [u8; 16],
    by_id: RwLock<HashMap<u32, Arc<Segment>>>,
    /// Bytes of all files, those included that are being made ready.
    taken: AtomicU64,
    next_id: AtomicU32,
}

/// What a new segment's header says about the log so far.
#[derive(Debug, Clone, Copy)]
pub(super) struct SoFar {
    pub(super) sequence: u64,
    pub(super) clock: u64,
    pub(super) fences: u64,
}

/// Why no segment could be made ready.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoRoom {
    #[error("{taken} of {max} MiB are taken by records that still answer; raise max_size or shorten ttl")]
    Full { taken: u64, max: u64 },
    #[error("no room for another segment: {0}")]
    Io(#[from] io::Error),
}

impl Segments {
    pub(super) fn new(
        disk: Arc<dyn Disk>, room: Room, store: [u8; 16], found: Vec<Arc<Segment>>, next_id: u32,
    ) -> Self {
        let taken = found.iter().map(|segment| segment.header.size).sum();
        let by_id = found.into_iter().map(|segment| (segment.header.id, segment)).collect();
        let (by_id, taken, next_id) = (RwLock::new(by_id), AtomicU64::new(taken), AtomicU32::new(next_id));
        Self { disk, room, store, by_id, taken, next_id }
    }

    /// Bytes of all files.
    pub(super) fn taken(&self) -> u64 {
        self.taken.load(Relaxed)
    }

    pub(super) fn read(&self, slot: &Slot) -> Result<Entry, ReadError> {
        let segment = self.get(slot.segment).ok_or(ReadError::Gone(slot.segment))?;
        segment.read(slot)
    }

    pub(super) fn get(&self, id: u32) -> Option<Arc<Segment>> {
        self.by_id.read().get(&id).cloned()
    }

    /// Those that are no longer written to and hold little that lives: most of it died, or a restart cut them short.
    pub(super) fn stragglers(&self) -> Vec<Arc<Segment>> {
        let holds_little = |segment: &Segment| {
            let live = segment.live.load(SeqCst) > 0;
            live && segment.live_bytes() * 4 < segment.header.size - FIRST_BATCH
        };
        self.closed().into_iter().filter(|segment| holds_little(segment)).collect()
    }

    pub(super) fn gain(&self, slot: &Slot) {
        if let Some(segment) = self.by_id.read().get(&slot.segment) {
            segment.gain(slot);
        }
    }

    pub(super) fn lose(&self, slot: &Slot) {
        if let Some(segment) = self.by_id.read().get(&slot.segment) {
            segment.lose(slot);
        }
    }

    /// Makes a segment ready: recycles one in which nothing lives, or makes a new one. `fill` is asked before each
    /// piece of zeroes; without it the file is only allocated. The last segment that `max_size` allows is for the cold
    /// lane: without it a full store could not be tidied up.
    pub(super) fn prepare(&self, lane: u8, so_far: SoFar, fill: Option<&dyn Fn()>) -> Result<Arc<Segment>, NoRoom> {
        let mut salt = [0; 8];
        getrandom::fill(&mut salt).map_err(|error| io::Error::other(error.to_string()))?;
        let header = SegmentHeader {
            store: self.store,
            id: self.next_id.fetch_add(1, SeqCst),
            size: self.room.segment_size,
            salt: u64::from_le_bytes(salt),
            sequence: so_far.sequence,
            clock: so_far.clock,
            fences: so_far.fences,
        };
        self.drop_useless();
        let segment = match self.take_dead(|segment| self.is_useful(segment)) {
            Some(dead) => self.recycle(&dead, header)?,
            None => self.create(header, if lane == COLD { 0 } else { header.size }, fill)?,
        };
        let segment = Arc::new(segment);
        self.by_id.write().insert(header.id, segment.clone());
        Ok(segment)
    }

    /// Whether it could be recycled once it is dead.
    fn is_useful(&self, segment: &Segment) -> bool {
        segment.header.size == self.room.segment_size && !segment.spoiled.load(SeqCst)
    }

    /// Those that are no longer written to, oldest first.
    pub(super) fn closed(&self) -> Vec<Arc<Segment>> {
        let mut closed: Vec<_> =
            self.by_id.read().values().filter(|segment| segment.closed.load(SeqCst)).cloned().collect();
        closed.sort_unstable_by_key(|segment| segment.header.id);
        closed
    }

    /// Gives the disk back what is dead.
    pub(super) fn remove_dead(&self) -> io::Result<()> {
        while let Some(dead) = self.take_dead(|_| true) {
            self.disk.remove(&name(dead.header.id))?;
            self.taken.fetch_sub(dead.header.size, Relaxed);
        }
        self.disk.sync_dir()
    }

    fn drop_useless(&self) {
        while let Some(dead) = self.take_dead(|segment| !self.is_useful(segment)) {
            // If that fails, it is dead at the next start too.
            let _ = self.disk.remove(&name(dead.header.id));
            self.taken.fetch_sub(dead.header.size, Relaxed);
        }
    }

    fn take_dead(&self, such: impl Fn(&Segment) -> bool) -> Option<Arc<Segment>> {
        let mut by_id = self.by_id.write();
        let is_needed = |proves: u32| proves != 0 && by_id.contains_key(&proves);
        let dead = by_id
            .values()
            .find(|segment| segment.is_recyclable() && such(segment) && !is_needed(segment.proves.load(SeqCst)))?
            .header
            .id;
        by_id.remove(&dead)
    }

    fn recycle(&self, dead: &Segment, header: SegmentHeader) -> Result<Segment, NoRoom> {
        let again = || {
            dead.file.write_at(&header.encode(), 0)?;
            dead.file.sync_data()?;
            self.disk.rename(&name(dead.header.id), &name(header.id))?;
            self.disk.sync_dir()
        };
        match again() {
            Ok(()) => Ok(Segment::new(header, dead.file.clone())),
            Err(error) => {
                // Whichever name it has by now, what it held is dead.
                let _ = self.disk.remove(&name(dead.header.id)).or_else(|_| self.disk.remove(&name(header.id)));
                self.taken.fetch_sub(dead.header.size, Relaxed);
                Err(error.into())
            }
        }
    }

    fn create(&self, header: SegmentHeader, reserved: u64, fill: Option<&dyn Fn()>) -> Result<Segment, NoRoom> {
        let taken = self.taken.fetch_add(header.size, Relaxed);
        let made = if taken + header.size + reserved > self.room.max_size {
            Err(NoRoom::Full { taken: taken >> 20, max: self.room.max_size >> 20 })
        } else {
            self.create_file(header, fill).map_err(|error| {
                let _ = self.disk.remove(SPARE);
                NoRoom::Io(error)
            })
        };
        if made.is_err() {
            self.taken.fetch_sub(header.size, Relaxed);
        }
        made
    }

    fn create_file(&self, header: SegmentHeader, fill: Option<&dyn Fn()>) -> io::Result<Segment> {
        let file = self.disk.create(SPARE)?;
        file.allocate(header.size)?;
        if let Some(pace) = fill {
            let zeroes = vec![0; FILL];
            let mut at = 0;
            while at < header.size {
                let piece = (header.size - at).min(FILL as u64);
                file.write_at(&zeroes[..piece as usize], at)?;
                file.sync_data()?;
                at += piece;
                pace();
            }
        }
        file.write_at(&header.encode(), 0)?;
        file.sync_data()?;
        self.disk.rename(SPARE, &name(header.id))?;
        self.disk.sync_dir()?;
        Ok(Segment::new(header, file))
    }
}

/// Writes the batch after which nothing follows, and closes the segment.
pub(super) fn seal(segment: &Segment, sealed: Sealed, so_far: SoFar, synced: bool) -> io::Result<()> {
    let (SoFar { clock, fences, .. }, Sealed { lane, last: sequence, end, .. }) = (so_far, sealed);
    let mut batch = vec![0; SECTOR];
    BatchHeader { length: 0, count: 0, sequence, clock, fences, lane, seal: true }
        .finish(&mut batch, segment.header.salt);
    segment.file.write_at(&batch, end)?;
    if synced {
        segment.file.sync_data()?;
    }
    segment.complete(sealed);
    Ok(())
}

/// The file of a segment.
pub(super) fn name(id: u32) -> String {
    format!("{id:08x}.seg")
}

/// The segment whose file has this name.
pub(super) fn id_of(name: &str) -> Option<u32> {
    u32::from_str_radix(name.strip_suffix(".seg").filter(|hex| hex.len() == 8)?, 16).ok()
}
