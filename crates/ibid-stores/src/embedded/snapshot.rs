//! Stores the index on disk, so that a start does not read the whole log.
//!
//! ```text
//! index.snap   blocks: shard 0 … shard 1023, each: slots (48 bytes), crc u32
//!              trailer: magic "ibid ix2"   store id [16]   version u64   clock u64   fences u64
//!                       1024 × slots in the block u32
//!                       count u32, then per segment: id u32  salt u64  lane u8  first u64  last u64  end u64
//!              crc u32 of the trailer   length of the trailer u32
//! ```
//!
//! The snapshot is fuzzy: shards are written one after the other while the writer continues. It lists the segments that
//! were sealed before the first shard was written. All their entries are in the snapshot, unless they were superseded
//! or moved since; the newer entry is then in another segment, which is read after the snapshot. Versions decide which
//! one counts.
//!
//! Invariants: a snapshot is used completely or not at all. Only slots that point into listed, unchanged segments are
//! used. A missing snapshot costs only time.

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
    format::{COLD_LANE, MAX_COUNTER},
    index::{Index, IndexSlot, SHARD_COUNT},
    log::SharedLog,
    segments::{LogPosition, LogSegment, SegmentEnd},
};

pub(super) const FILE_NAME: &str = "index.snap";
pub(super) const UNFINISHED_NAME: &str = "index.tmp";

const MAGIC: &[u8; 8] = b"ibid ix2";
/// Marks snapshots whose slots have no key checksum.
const V1_MAGIC: &[u8; 8] = b"ibid idx";
/// Bytes written before the thread yields.
const WRITE_CHUNK_BYTES: usize = 1 << 20;
const READER_THREADS: usize = 4;

/// The contents of a snapshot's trailer.
#[derive(Debug)]
pub(super) struct IndexSnapshot {
    pub(super) store_id: [u8; 16],
    pub(super) version: u64,
    pub(super) clock: u64,
    pub(super) highest_fence: u64,
    /// Length of an encoded slot in bytes.
    slot_len: usize,
    slot_counts: Vec<u32>,
    /// Salt and contents of the segments that need not be read, by id.
    pub(super) covered_segments: HashMap<u32, (u64, SegmentEnd)>,
}

/// Writes a snapshot. `pace` is called between chunks.
pub(super) fn write_snapshot(log: &SharedLog, version: u64, pace: &dyn Fn()) -> io::Result<()> {
    let disk = &log.segments.disk;
    let written = write_unfinished(log, version, pace).and_then(|()| {
        disk.rename(UNFINISHED_NAME, FILE_NAME)?;
        disk.sync_dir()
    });
    if written.is_err() {
        // If removal fails, the next start removes the file.
        let _ = disk.remove(UNFINISHED_NAME);
    }
    written
}

fn write_unfinished(log: &SharedLog, version: u64, pace: &dyn Fn()) -> io::Result<()> {
    let sealed = |segment: &Arc<LogSegment>| Some((segment.header.id, (segment.header.salt, *segment.end.get()?)));
    let covered_segments = log.segments.closed_segments().iter().filter_map(sealed).collect();
    let disk = &log.segments.disk;
    if disk.list()?.iter().any(|name| name == UNFINISHED_NAME) {
        disk.remove(UNFINISHED_NAME)?;
    }
    let file = disk.create(UNFINISHED_NAME)?;
    let (mut piece, mut at, mut slot_counts) = (Vec::new(), 0, Vec::with_capacity(SHARD_COUNT));
    for nth in 0..SHARD_COUNT {
        let begin = piece.len();
        let mut count = 0;
        for slot in log.index.shard_by_number(nth).slots() {
            slot.encode(&mut piece);
            count += 1;
        }
        slot_counts.push(count);
        let crc = crc32c::crc32c(&piece[begin..]);
        piece.put_u32_le(crc);
        if piece.len() >= WRITE_CHUNK_BYTES {
            file.write_at(&piece, at)?;
            file.sync_data()?;
            at += piece.len() as u64;
            piece.clear();
            pace();
        }
    }
    let LogPosition { clock, highest_fence, .. } = log.position();
    let (store_id, slot_len) = (log.segments.store_id, IndexSlot::ENCODED_LEN);
    IndexSnapshot { store_id, version, clock, highest_fence, slot_len, slot_counts, covered_segments }
        .encode(&mut piece);
    file.write_at(&piece, at)?;
    file.sync_data()
}

/// Reads a snapshot into an index, skipping slots that cannot be trusted. Returns `None` if it is missing or
/// unreadable.
pub(super) fn read_snapshot(
    disk: &dyn Disk, segments: &HashMap<u32, Arc<LogSegment>>, store: [u8; 16], index: &Index,
) -> io::Result<Option<IndexSnapshot>> {
    if !disk.list()?.iter().any(|name| name == FILE_NAME) {
        return Ok(None);
    }
    let file = disk.open(FILE_NAME)?;
    let Some(mut snapshot) = IndexSnapshot::read_trailer(&*file)?.filter(|snapshot| snapshot.store_id == store) else {
        return Ok(None);
    };
    snapshot
        .covered_segments
        .retain(|id, (salt, _)| segments.get(id).is_some_and(|segment| segment.header.salt == *salt));
    let whole = AtomicBool::new(true);
    thread::scope(|scope| {
        for reader in 0..READER_THREADS {
            let (snapshot, file, whole) = (&snapshot, &*file, &whole);
            scope.spawn(move || {
                let shards = reader * SHARD_COUNT / READER_THREADS..(reader + 1) * SHARD_COUNT / READER_THREADS;
                if !matches!(snapshot.read_shards(file, shards, index), Ok(true)) {
                    whole.store(false, SeqCst);
                }
            });
        }
    });
    Ok(whole.into_inner().then_some(snapshot))
}

impl IndexSnapshot {
    fn encode(&self, out: &mut Vec<u8>) {
        let begin = out.len();
        out.put_slice(MAGIC);
        out.put_slice(&self.store_id);
        for field in [self.version, self.clock, self.highest_fence] {
            out.put_u64_le(field);
        }
        for count in &self.slot_counts {
            out.put_u32_le(*count);
        }
        out.put_u32_le(self.covered_segments.len() as u32);
        for (id, (salt, sealed)) in &self.covered_segments {
            out.put_u32_le(*id);
            out.put_u64_le(*salt);
            out.put_u8(sealed.lane);
            for field in [sealed.first_sequence, sealed.last_sequence, sealed.offset] {
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
        Ok(decoded.filter(|snapshot| snapshot.blocks_len(0..SHARD_COUNT) == all - 8 - length))
    }

    fn decode(trailer: &[u8]) -> Option<Self> {
        let (mut rest, slot_len) = match trailer.strip_prefix(MAGIC) {
            Some(rest) => (rest, IndexSlot::ENCODED_LEN),
            None => (trailer.strip_prefix(V1_MAGIC)?, IndexSlot::V1_ENCODED_LEN),
        };
        let mut store_id = [0; 16];
        rest.try_copy_to_slice(&mut store_id).ok()?;
        let [version, clock, highest_fence] = three_numbers(&mut rest)?;
        let slot_counts = (0..SHARD_COUNT).map(|_| rest.try_get_u32_le().ok()).collect::<Option<Vec<u32>>>()?;
        let mut covered_segments = HashMap::new();
        for _ in 0..rest.try_get_u32_le().ok()? {
            let (id, salt) = (rest.try_get_u32_le().ok()?, rest.try_get_u64_le().ok()?);
            let lane = rest.try_get_u8().ok()?;
            let [first_sequence, last_sequence, offset] = three_numbers(&mut rest)?;
            if lane > COLD_LANE {
                return None;
            }
            covered_segments.insert(id, (salt, SegmentEnd { lane, first_sequence, last_sequence, offset }));
        }
        let snapshot = Self { store_id, version, clock, highest_fence, slot_len, slot_counts, covered_segments };
        rest.is_empty().then_some(snapshot)
    }

    /// Reads a range of shards. Returns whether all are valid.
    fn read_shards(&self, file: &dyn DiskFile, shards: std::ops::Range<usize>, index: &Index) -> io::Result<bool> {
        let mut at = self.blocks_len(0..shards.start);
        let mut bytes = Vec::new();
        for nth in shards {
            bytes.resize(self.blocks_len(nth..nth + 1) as usize, 0);
            file.read_at(&mut bytes, at)?;
            at += bytes.len() as u64;
            let (slots, crc) = bytes.split_at(bytes.len() - 4);
            if crc32c::crc32c(slots).to_le_bytes() != *crc {
                return Ok(false);
            }
            let slots: Option<Vec<IndexSlot>> = slots
                .chunks_exact(self.slot_len)
                .map(|bytes| IndexSlot::decode(bytes).filter(|slot| slot.shard() == nth))
                .collect();
            let Some(slots) = slots else { return Ok(false) };
            let mut shard = index.shard_by_number(nth);
            let covered = slots.into_iter().filter(|slot| self.covered_segments.contains_key(&slot.segment));
            covered.for_each(|slot| shard.insert(slot));
        }
        Ok(true)
    }

    /// Returns the length in bytes of the blocks of these shards.
    fn blocks_len(&self, shards: std::ops::Range<usize>) -> u64 {
        self.slot_counts[shards].iter().map(|slots| u64::from(*slots) * self.slot_len as u64 + 4).sum()
    }
}

fn three_numbers(rest: &mut &[u8]) -> Option<[u64; 3]> {
    let numbers = [rest.try_get_u64_le().ok()?, rest.try_get_u64_le().ok()?, rest.try_get_u64_le().ok()?];
    numbers.iter().all(|number| *number <= MAX_COUNTER).then_some(numbers)
}
