//! Maps addresses to log positions: many small hash tables in memory, so that growing one does not stall callers.
//!
//! ```text
//! slot (48 bytes)   address prefix [16]   version u64   segment u32   offset u32   length u32 (kind in its upper bits)
//!                   expires u32   dies u32 (seconds since the epoch, rounded up)   key u32 (checksum of its hash)
//! ```
//!
//! Invariants: an address has a slot exactly while its current entry has not died, and the slot changes only after the
//! entry is durable. Shards are in address order, so that listings go shard by shard. Prefix and version together
//! identify a slot: two addresses may share a prefix, but never a version. Running entries are also held completely, in
//! the shard's side table.

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    sync::{Arc, LazyLock},
};

use bytes::{Buf, BufMut};
use ibid::store::Address;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use super::entry::{LogEntry, LogEntryKind, UnixMicros};

pub(super) const SHARD_COUNT: usize = 1024;
const KIND_SHIFT: u32 = 29;

/// Addresses derive from client input. The seed keeps clients from choosing hash positions.
static HASH_SEED: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one(()));

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct IndexSlot {
    prefix: [u8; 16],
    version: [u32; 2],
    /// 0 in an empty slot.
    pub(super) segment: u32,
    pub(super) offset: u32,
    length_and_kind: u32,
    expires_s: u32,
    dies_s: u32,
    /// Rules out entries for an exact key without reading the disk.
    key_checksum: u32,
}

impl IndexSlot {
    const EMPTY: Self = Self {
        prefix: [0; 16],
        version: [0; 2],
        segment: 0,
        offset: 0,
        length_and_kind: 0,
        expires_s: 0,
        dies_s: 0,
        key_checksum: 0,
    };
    /// Exclusive upper limit of an entry's length in bytes.
    pub(super) const MAX_LENGTH: usize = 1 << KIND_SHIFT;

    pub(super) fn new(entry: &LogEntry, segment: u32, offset: u32, length: usize) -> Self {
        assert!(segment != 0 && length < Self::MAX_LENGTH);
        Self {
            prefix: address_prefix(&entry.ask.address),
            version: [entry.version as u32, (entry.version >> 32) as u32],
            segment,
            offset,
            length_and_kind: length as u32 | (entry.kind() as u32) << KIND_SHIFT,
            expires_s: ceil_seconds(entry.expires_at),
            dies_s: ceil_seconds(entry.dies_at),
            key_checksum: key_checksum(entry.ask.tags.key_hash()),
        }
    }

    /// Length of a slot in a snapshot.
    pub(super) const ENCODED_LEN: usize = 48;
    /// Length in snapshots of format 1, which have no key checksum.
    pub(super) const V1_ENCODED_LEN: usize = 44;

    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        out.put_slice(&self.prefix);
        for field in [self.version[0], self.version[1], self.segment, self.offset, self.length_and_kind] {
            out.put_u32_le(field);
        }
        out.put_u32_le(self.expires_s);
        out.put_u32_le(self.dies_s);
        out.put_u32_le(self.key_checksum);
    }

    /// Decodes the output of [`Self::encode`]. Returns `None` if it is not a valid slot.
    pub(super) fn decode(mut bytes: &[u8]) -> Option<Self> {
        let mut prefix = [0; 16];
        bytes.try_copy_to_slice(&mut prefix).ok()?;
        let mut field = || bytes.try_get_u32_le().ok();
        let version = [field()?, field()?];
        let [segment, offset, length_and_kind] = [field()?, field()?, field()?];
        let [expires, dies] = [field()?, field()?];
        let key = field().unwrap_or_else(|| key_checksum(""));
        LogEntryKind::from_bits((length_and_kind >> KIND_SHIFT) as u8).filter(|_| segment != 0)?;
        Some(Self {
            prefix,
            version,
            segment,
            offset,
            length_and_kind,
            expires_s: expires,
            dies_s: dies,
            key_checksum: key,
        })
    }

    pub(super) fn shard(&self) -> usize {
        shard_of(&self.prefix)
    }

    pub(super) fn version(&self) -> u64 {
        u64::from(self.version[0]) | u64::from(self.version[1]) << 32
    }

    pub(super) fn length(&self) -> usize {
        (self.length_and_kind & (Self::MAX_LENGTH as u32 - 1)) as usize
    }

    pub(super) fn kind(&self) -> LogEntryKind {
        LogEntryKind::from_bits((self.length_and_kind >> KIND_SHIFT) as u8).expect("only kinds are put in")
    }

    pub(super) fn may_match_key_hash(&self, key_hash: &str) -> bool {
        self.key_checksum == key_checksum(key_hash)
    }

    pub(super) fn has_expired(&self, now: UnixMicros) -> bool {
        u64::from(self.expires_s) * 1_000_000 <= now
    }

    fn is_dead(&self, now: UnixMicros) -> bool {
        self.dies_at() <= now
    }

    pub(super) fn dies_at(&self) -> UnixMicros {
        u64::from(self.dies_s) * 1_000_000
    }

    /// Returns the slot of the same entry at another position.
    pub(super) fn moved_to(self, segment: u32, offset: u32) -> Self {
        Self { segment, offset, ..self }
    }

    pub(super) fn prefix_bytes(&self) -> &[u8; 16] {
        &self.prefix
    }
}

#[derive(Debug)]
pub(super) struct Index {
    shards: Box<[Mutex<IndexShard>]>,
}

/// All fields are changed under the shard's lock, which is never held across a disk access or an await. The writer, the
/// sweep and the compactor change slots and `running_entries`.
#[derive(Debug, Default)]
pub(super) struct IndexShard {
    table: IndexTable,
    pub(super) running_entries: HashMap<Address, Arc<LogEntry>>,
    pub(super) waiters: HashMap<Address, Arc<Notify>>,
}

pub(super) enum IndexLookup {
    Running(Arc<LogEntry>),
    /// All slots with the address's prefix: none, or usually one.
    Slots(Vec<IndexSlot>),
}

impl Index {
    pub(super) fn new() -> Self {
        Self { shards: (0..SHARD_COUNT).map(|_| Mutex::default()).collect() }
    }

    pub(super) fn shard(&self, at: &Address) -> MutexGuard<'_, IndexShard> {
        self.shards[shard_of(&at.0)].lock()
    }

    /// Returns the memory use of the used slots in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.shards.iter().map(|shard| (shard.lock().table.used_slots * size_of::<IndexSlot>()) as u64).sum()
    }

    /// Returns a shard by number; numbers are in address order.
    pub(super) fn shard_by_number(&self, nth: usize) -> MutexGuard<'_, IndexShard> {
        self.shards[nth].lock()
    }

    pub(super) fn find(&self, at: &Address) -> IndexLookup {
        let shard = self.shard(at);
        match shard.running_entries.get(at) {
            Some(entry) => IndexLookup::Running(entry.clone()),
            None => IndexLookup::Slots(shard.table.matching(address_prefix(at)).copied().collect()),
        }
    }

    pub(super) fn contains_slot(&self, slot: &IndexSlot) -> bool {
        self.shards[slot.shard()].lock().table.position(slot.prefix, slot.version()).is_some_and(|at| at.1 == *slot)
    }

    /// Returns the slot of the entry in `bytes`, if it points to this position.
    pub(super) fn slot_at(&self, bytes: &[u8], segment: u32, offset: u32) -> Option<IndexSlot> {
        let (version, address) = LogEntry::peek_version_and_address(bytes)?;
        let (_, slot) = self.shard(&address).table.position(address_prefix(&address), version)?;
        (slot.segment == segment && slot.offset == offset).then_some(slot)
    }

    /// During recovery: inserts an entry unless a higher version is known. `is_same` checks whether a slot with the
    /// same prefix has the same address. Returns the slot that is superseded, if any.
    pub(super) fn insert_recovered(
        &self, entry: &LogEntry, slot: IndexSlot, is_same: impl Fn(&IndexSlot) -> bool,
    ) -> Option<IndexSlot> {
        let mut shard = self.shard(&entry.ask.address);
        let known = shard.table.matching(slot.prefix).find(|known| is_same(known)).copied();
        match known {
            Some(known) if known.version() > slot.version() => return Some(slot),
            Some(known) => drop(shard.table.remove(known.prefix, known.version())),
            None => {}
        }
        shard.table.insert(slot);
        known
    }

    /// Replaces the slot of the superseded version with that of `entry`, and wakes the waiters of the previous holder
    /// if it no longer runs. Returns the replaced slot.
    pub(super) fn put(&self, entry: &Arc<LogEntry>, slot: IndexSlot, supersedes: Option<u64>) -> Option<IndexSlot> {
        let at = &entry.ask.address;
        let mut shard = self.shard(at);
        let before = supersedes.and_then(|version| shard.table.remove(slot.prefix, version));
        shard.table.insert(slot);
        if slot.kind() == LogEntryKind::Running {
            shard.running_entries.insert(*at, entry.clone());
        } else {
            shard.running_entries.remove(at);
            shard.wake(at);
        }
        before
    }

    /// Returns the current slot of an entry that may have been moved.
    pub(super) fn current_slot(&self, slot: &IndexSlot) -> Option<IndexSlot> {
        let shard = self.shards[slot.shard()].lock();
        shard.table.position(slot.prefix, slot.version()).map(|(_, slot)| slot)
    }

    /// Replaces `from` with `to`, if `from` still exists.
    pub(super) fn swap(&self, from: &IndexSlot, to: IndexSlot) -> bool {
        let mut shard = self.shards[from.shard()].lock();
        match shard.table.position(from.prefix, from.version()) {
            Some((at, slot)) if slot == *from => {
                shard.table.slots[at] = to;
                true
            }
            _ => false,
        }
    }

    /// Removes at most `at_most` dead slots and passes each to `gone`. Returns their number, and whether there are
    /// more.
    pub(super) fn sweep(&self, now: UnixMicros, at_most: u32, mut gone: impl FnMut(&IndexSlot)) -> (u32, bool) {
        let mut removed = 0;
        let mut more = false;
        for shard in &self.shards {
            let mut shard = shard.lock();
            if shard.may_have_dead_slots(now) && removed < at_most {
                removed += shard.sweep(now, at_most - removed, &mut gone);
            }
            more |= shard.may_have_dead_slots(now);
        }
        (removed, more)
    }
}

impl IndexShard {
    pub(super) fn slots(&self) -> impl Iterator<Item = &IndexSlot> {
        self.table.slots.iter().filter(|slot| slot.segment != 0)
    }

    pub(super) fn insert_snapshot_slots(&mut self, slots: impl Iterator<Item = IndexSlot>) {
        slots.for_each(|slot| self.table.insert(slot));
    }

    pub(super) fn wake(&mut self, at: &Address) {
        if let Some(waiters) = self.waiters.remove(at) {
            waiters.notify_waiters();
        }
    }

    pub(super) fn is_listed(&self, at: &Address, waiters: &Arc<Notify>) -> bool {
        self.waiters.get(at).is_some_and(|listed| Arc::ptr_eq(listed, waiters))
    }

    fn may_have_dead_slots(&self, now: UnixMicros) -> bool {
        u64::from(self.table.earliest_death_s) * 1_000_000 <= now
    }

    fn sweep(&mut self, now: UnixMicros, at_most: u32, gone: &mut impl FnMut(&IndexSlot)) -> u32 {
        let dead: Vec<IndexSlot> =
            self.slots().filter(|slot| slot.is_dead(now)).take(at_most as usize).copied().collect();
        for slot in &dead {
            self.table.remove(slot.prefix, slot.version());
            gone(slot);
        }
        if dead.iter().any(|slot| slot.kind() == LogEntryKind::Running) {
            let over: Vec<Address> =
                self.running_entries.iter().filter(|(_, entry)| entry.dies_at <= now).map(|(at, _)| *at).collect();
            for at in over {
                self.running_entries.remove(&at);
                self.wake(&at);
            }
        }
        self.table.earliest_death_s = self.slots().map(|slot| slot.dies_s).min().unwrap_or(u32::MAX);
        self.table.shrink();
        dead.len() as u32
    }
}

/// Open addressing with linear probing; at most seven eighths full.
#[derive(Debug)]
struct IndexTable {
    /// The length is a power of two, or 0.
    slots: Vec<IndexSlot>,
    used_slots: usize,
    /// Lower bound of the death times of all slots, in seconds.
    earliest_death_s: u32,
}

impl Default for IndexTable {
    fn default() -> Self {
        Self { slots: Vec::new(), used_slots: 0, earliest_death_s: u32::MAX }
    }
}

impl IndexTable {
    fn home_position(&self, prefix: [u8; 16]) -> usize {
        // The first bytes select the shard.
        let [.., a, b, c, d, e, f, g, h] = prefix;
        let mixed = (u64::from_le_bytes([a, b, c, d, e, f, g, h]) ^ *HASH_SEED).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> 32) as usize & (self.slots.len() - 1)
    }

    fn matching(&self, prefix: [u8; 16]) -> impl Iterator<Item = &IndexSlot> {
        let mask = self.slots.len().wrapping_sub(1);
        let home = if self.slots.is_empty() { 0 } else { self.home_position(prefix) };
        (0..self.slots.len())
            .map(move |step| &self.slots[(home + step) & mask])
            .take_while(|slot| slot.segment != 0)
            .filter(move |slot| slot.prefix == prefix)
    }

    fn position(&self, prefix: [u8; 16], version: u64) -> Option<(usize, IndexSlot)> {
        if self.slots.is_empty() {
            return None;
        }
        let mut at = self.home_position(prefix);
        while self.slots[at].segment != 0 {
            if self.slots[at].prefix == prefix && self.slots[at].version() == version {
                return Some((at, self.slots[at]));
            }
            at = (at + 1) & (self.slots.len() - 1);
        }
        None
    }

    fn insert(&mut self, slot: IndexSlot) {
        if (self.used_slots + 1) * 8 > self.slots.len() * 7 {
            self.resize((self.slots.len() * 2).max(4));
        }
        let mut at = self.home_position(slot.prefix);
        while self.slots[at].segment != 0 {
            at = (at + 1) & (self.slots.len() - 1);
        }
        self.slots[at] = slot;
        self.used_slots += 1;
        self.earliest_death_s = self.earliest_death_s.min(slot.dies_s);
    }

    fn remove(&mut self, prefix: [u8; 16], version: u64) -> Option<IndexSlot> {
        let (mut hole, gone) = self.position(prefix, version)?;
        let mask = self.slots.len() - 1;
        let mut at = (hole + 1) & mask;
        // Move up later slots that could no longer be found from their home position.
        while self.slots[at].segment != 0 {
            let home = self.home_position(self.slots[at].prefix);
            if (at.wrapping_sub(home) & mask) >= (at.wrapping_sub(hole) & mask) {
                self.slots[hole] = self.slots[at];
                hole = at;
            }
            at = (at + 1) & mask;
        }
        self.slots[hole] = IndexSlot::EMPTY;
        self.used_slots -= 1;
        Some(gone)
    }

    fn shrink(&mut self) {
        if self.used_slots == 0 {
            self.slots = Vec::new();
        } else if self.slots.len() > 16 && self.used_slots * 4 < self.slots.len() {
            self.resize(self.slots.len() / 2);
        }
    }

    fn resize(&mut self, to: usize) {
        let before = std::mem::replace(&mut self.slots, vec![IndexSlot::EMPTY; to]);
        self.used_slots = 0;
        for slot in before.into_iter().filter(|slot| slot.segment != 0) {
            self.insert(slot);
        }
    }
}

pub(super) fn shard_of(address: &[u8]) -> usize {
    usize::from(address[0]) << 2 | usize::from(address[1] >> 6)
}

fn address_prefix(at: &Address) -> [u8; 16] {
    *at.0.first_chunk().expect("an address is longer")
}

fn key_checksum(key_hash: &str) -> u32 {
    crc32c::crc32c(key_hash.as_bytes())
}

/// Rounds up, so that no entry dies early.
fn ceil_seconds(at: UnixMicros) -> u32 {
    at.div_ceil(1_000_000).min(u64::from(u32::MAX - 1)) as u32
}
