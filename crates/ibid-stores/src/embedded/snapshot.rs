//! The index on the disk, so that a start need not read the whole log.
//!
//! ```text
//! index.snap   blocks: shard 0 … shard 1023, each: slots (48 bytes), crc u32
//!              trailer: magic "ibid ix2"   store id [16]   version u64   clock u64   fences u64
//!                       1024 × slots in the block u32
//!                       count u32, then per segment: id u32  salt u64  lane u8  first u64  last u64  end u64
//!              crc u32 of the trailer   length of the trailer u32
//! ```
//!
//! It is fuzzy: shards are written one after the other while the writer goes on. That is enough, because it names the
//! segments that were sealed before the first shard was written: all that they hold is in it, unless it has been
//! superseded or moved since, and then what did so stands in another segment, which is read after it. Versions tell
//! which counts.
//!
//! Invariants: a snapshot is used as a whole or not at all. Only slots into segments that it names, and that are still
//! what they were, are believed. Without a snapshot nothing is lost but time.

use std::{
    collections::HashMap,
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread,
};

use bytes::{Buf, BufMut};

use super::{
    disk::{Disk, DiskFile},
    index::{Index, SHARDS, Slot},
    log::Log,
    segments::{Sealed, Segment, SoFar},
};

pub(super) const NAME: &str = "index.snap";
pub(super) const UNFINISHED: &str = "index.tmp";

const MAGIC: &[u8; 8] = b"ibid ix2";
/// Of snapshots whose slots say nothing about keys.
const FIRST_MAGIC: &[u8; 8] = b"ibid idx";
/// How much is written before others get a turn.
const PIECE: usize = 1 << 20;
/// How many threads read it.
const READERS: usize = 4;

/// What a snapshot says beside the slots.
#[derive(Debug)]
pub(super) struct Snapshot {
    pub(super) store: [u8; 16],
    pub(super) version: u64,
    pub(super) clock: u64,
    pub(super) fences: u64,
    /// The length of a slot in it.
    slot: usize,
    /// Slots per shard.
    counts: Vec<u32>,
    /// The segments that need not be read: salt, and what they hold, by number.
    pub(super) covers: HashMap<u32, (u64, Sealed)>,
}

/// Writes a snapshot. `pace` is called between pieces.
pub(super) fn write(log: &Log, version: u64, pace: &dyn Fn()) -> io::Result<()> {
    let disk = &log.segments.disk;
    let written = write_unfinished(log, version, pace).and_then(|()| {
        disk.rename(UNFINISHED, NAME)?;
        disk.sync_dir()
    });
    if written.is_err() {
        // If that fails too, the next start removes it.
        let _ = disk.remove(UNFINISHED);
    }
    written
}

fn write_unfinished(log: &Log, version: u64, pace: &dyn Fn()) -> io::Result<()> {
    let covers = log
        .segments
        .closed()
        .iter()
        .filter_map(|segment| Some((segment.header.id, (segment.header.salt, *segment.sealed.get()?))))
        .collect();
    let disk = &log.segments.disk;
    if disk.list()?.iter().any(|name| name == UNFINISHED) {
        disk.remove(UNFINISHED)?;
    }
    let file = disk.create(UNFINISHED)?;
    let (mut piece, mut at, mut counts) = (Vec::new(), 0, Vec::with_capacity(SHARDS));
    for nth in 0..SHARDS {
        let begin = piece.len();
        let mut count = 0;
        for slot in log.index.nth(nth).slots() {
            slot.encode(&mut piece);
            count += 1;
        }
        counts.push(count);
        let crc = crc32c::crc32c(&piece[begin..]);
        piece.put_u32_le(crc);
        if piece.len() >= PIECE {
            file.write_at(&piece, at)?;
            file.sync_data()?;
            at += piece.len() as u64;
            piece.clear();
            pace();
        }
    }
    let SoFar { clock, fences, .. } = log.so_far();
    let slot = Slot::ENCODED;
    Snapshot { store: log.segments.store, version, clock, fences, slot, counts, covers }.encode(&mut piece);
    file.write_at(&piece, at)?;
    file.sync_data()
}

/// Reads a snapshot and fills an index with those slots that are to be believed. `None` if there is none, or it does
/// not read.
pub(super) fn read(
    disk: &dyn Disk, segments: &HashMap<u32, Arc<Segment>>, store: [u8; 16], index: &Index,
) -> io::Result<Option<Snapshot>> {
    if !disk.list()?.iter().any(|name| name == NAME) {
        return Ok(None);
    }
    let file = disk.open(NAME)?;
    let Some(mut snapshot) = Snapshot::read_trailer(&*file)?.filter(|snapshot| snapshot.store == store) else {
        return Ok(None);
    };
    snapshot.covers.retain(|id, (salt, _)| segments.get(id).is_some_and(|segment| segment.header.salt == *salt));
    let whole = AtomicBool::new(true);
    thread::scope(|scope| {
        for reader in 0..READERS {
            let (snapshot, file, whole) = (&snapshot, &*file, &whole);
            scope.spawn(move || {
                let shards = reader * SHARDS / READERS..(reader + 1) * SHARDS / READERS;
                if !matches!(snapshot.read_shards(file, shards, index), Ok(true)) {
                    whole.store(false, SeqCst);
                }
            });
        }
    });
    Ok(whole.into_inner().then_some(snapshot))
}

impl Snapshot {
    fn encode(&self, out: &mut Vec<u8>) {
        let begin = out.len();
        out.put_slice(MAGIC);
        out.put_slice(&self.store);
        for field in [self.version, self.clock, self.fences] {
            out.put_u64_le(field);
        }
        for count in &self.counts {
            out.put_u32_le(*count);
        }
        out.put_u32_le(self.covers.len() as u32);
        for (id, (salt, sealed)) in &self.covers {
            out.put_u32_le(*id);
            out.put_u64_le(*salt);
            out.put_u8(sealed.lane);
            for field in [sealed.first, sealed.last, sealed.end] {
                out.put_u64_le(field);
            }
        }
        let (crc, length) = (crc32c::crc32c(&out[begin..]), out.len() - begin);
        out.put_u32_le(crc);
        out.put_u32_le(length as u32);
    }

    fn read_trailer(file: &dyn DiskFile) -> io::Result<Option<Self>> {
        let all = file.length()?;
        let mut end = [0; 8];
        if all < 8 {
            return Ok(None);
        }
        file.read_at(&mut end, all - 8)?;
        let mut end = &end[..];
        let (crc, length) = (end.get_u32_le(), u64::from(end.get_u32_le()));
        if length + 8 > all {
            return Ok(None);
        }
        let mut trailer = vec![0; length as usize];
        file.read_at(&mut trailer, all - 8 - length)?;
        let decoded = if crc32c::crc32c(&trailer) == crc { Self::decode(&trailer) } else { None };
        Ok(decoded.filter(|snapshot| snapshot.blocks(0..SHARDS) == all - 8 - length))
    }

    fn decode(trailer: &[u8]) -> Option<Self> {
        let (mut rest, slot) = match trailer.strip_prefix(MAGIC) {
            Some(rest) => (rest, Slot::ENCODED),
            None => (trailer.strip_prefix(FIRST_MAGIC)?, Slot::FIRST_ENCODED),
        };
        let mut store = [0; 16];
        rest.try_copy_to_slice(&mut store).ok()?;
        let [version, clock, fences] =
            [rest.try_get_u64_le().ok()?, rest.try_get_u64_le().ok()?, rest.try_get_u64_le().ok()?];
        let counts = (0..SHARDS).map(|_| rest.try_get_u32_le().ok()).collect::<Option<Vec<u32>>>()?;
        let mut covers = HashMap::new();
        for _ in 0..rest.try_get_u32_le().ok()? {
            let id = rest.try_get_u32_le().ok()?;
            let salt = rest.try_get_u64_le().ok()?;
            let lane = rest.try_get_u8().ok()?;
            let [first, last, end] =
                [rest.try_get_u64_le().ok()?, rest.try_get_u64_le().ok()?, rest.try_get_u64_le().ok()?];
            covers.insert(id, (salt, Sealed { lane, first, last, end }));
        }
        rest.is_empty().then_some(Self { store, version, clock, fences, slot, counts, covers })
    }

    /// Whether all of these shards read.
    fn read_shards(&self, file: &dyn DiskFile, shards: std::ops::Range<usize>, index: &Index) -> io::Result<bool> {
        let mut at = self.blocks(0..shards.start);
        let mut bytes = Vec::new();
        for nth in shards {
            bytes.resize(self.blocks(nth..nth + 1) as usize, 0);
            file.read_at(&mut bytes, at)?;
            at += bytes.len() as u64;
            let (slots, crc) = bytes.split_at(bytes.len() - 4);
            if crc32c::crc32c(slots).to_le_bytes() != *crc {
                return Ok(false);
            }
            let slots: Option<Vec<Slot>> = slots
                .chunks_exact(self.slot)
                .map(|bytes| Slot::decode(bytes).filter(|slot| slot.shard() == nth))
                .collect();
            let Some(slots) = slots else { return Ok(false) };
            index.nth(nth).fill(slots.into_iter().filter(|slot| self.covers.contains_key(&slot.segment)));
        }
        Ok(true)
    }

    /// The length of the blocks of these shards.
    fn blocks(&self, shards: std::ops::Range<usize>) -> u64 {
        self.counts[shards].iter().map(|slots| u64::from(*slots) * self.slot as u64 + 4).sum()
    }
}
