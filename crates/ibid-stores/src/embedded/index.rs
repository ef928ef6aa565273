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
    hash::BuildHasher,
    sync::{Arc, LazyLock},
};

use bytes::{Buf, BufMut};
use hashbrown::HashTable;
use ibid::store::{Address, AddressHashBuilder, HolderWaits, transitions::UnixMicros};
use parking_lot::{Mutex, MutexGuard};

use super::entry::{LogEntry, LogEntryKind};

pub(super) const SHARD_COUNT: usize = 1024;
const KIND_SHIFT: u32 = 29;

static HASH_BUILDER: LazyLock<AddressHashBuilder> = LazyLock::new(AddressHashBuilder::default);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct IndexSlot {
    pub(super) prefix: [u8; 16],
    version: [u32; 2],
    /// Never 0.
    pub(super) segment: u32,
    pub(super) offset: u32,
    length_and_kind: u32,
    expires_s: u32,
    dies_s: u32,
    /// Rules out entries for an exact key without reading the disk.
    key_checksum: u32,
}

impl IndexSlot {
    /// Exclusive upper limit of an entry's length in bytes.
    pub(super) const MAX_LENGTH: usize = 1 << KIND_SHIFT;

    pub(super) fn new(entry: &LogEntry, segment: u32, offset: u32, length: usize) -> Self {
        assert!(segment != 0 && length < Self::MAX_LENGTH);
        Self {
            prefix: address_prefix(&entry.request.address),
            version: [entry.version as u32, (entry.version >> 32) as u32],
            segment,
            offset,
            length_and_kind: length as u32 | (entry.kind() as u32) << KIND_SHIFT,
            expires_s: ceil_seconds(entry.expires_at),
            dies_s: ceil_seconds(entry.dies_at),
            key_checksum: key_checksum(entry.request.tags.key_hash()),
        }
    }

    /// Length of a slot in a snapshot.
    pub(super) const ENCODED_LEN: usize = 48;
    /// Length in snapshots of format 1, which have no key checksum.
    pub(super) const V1_ENCODED_LEN: usize = 44;

    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        let [low, high] = self.version;
        let place = [low, high, self.segment, self.offset, self.length_and_kind];
        out.put_slice(&self.prefix);
        for field in place.into_iter().chain([self.expires_s, self.dies_s, self.key_checksum]) {
            out.put_u32_le(field);
        }
    }

    /// Decodes the output of [`Self::encode`]. Returns `None` if it is not a valid slot.
    pub(super) fn decode(mut bytes: &[u8]) -> Option<Self> {
        let mut prefix = [0; 16];
        bytes.try_copy_to_slice(&mut prefix).ok()?;
        let mut field = || bytes.try_get_u32_le().ok();
        let version = [field()?, field()?];
        let [segment, offset, length_and_kind] = [field()?, field()?, field()?];
        let [expires_s, dies_s] = [field()?, field()?];
        let key_checksum = field().unwrap_or_else(|| key_checksum(""));
        LogEntryKind::from_bits((length_and_kind >> KIND_SHIFT) as u8).filter(|_| segment != 0)?;
        Some(Self { prefix, version, segment, offset, length_and_kind, expires_s, dies_s, key_checksum })
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

    pub(super) fn dies_at(&self) -> UnixMicros {
        u64::from(self.dies_s) * 1_000_000
    }

    /// Returns the slot of the same entry at another position.
    pub(super) fn moved_to(self, segment: u32, offset: u32) -> Self {
        Self { segment, offset, ..self }
    }
}

#[derive(Debug)]
pub(super) struct Index {
    shards: Box<[Mutex<IndexShard>]>,
    pub(super) waits: HolderWaits,
}

/// All fields are changed under the shard's lock, which is never held across a disk access or an await. The writer, the
/// sweep and the compactor change slots and `running_entries`.
#[derive(Debug)]
pub(super) struct IndexShard {
    slots: HashTable<IndexSlot>,
    /// Lower bound of the death times of all slots, in seconds.
    earliest_death_s: u32,
    pub(super) running_entries: HashMap<Address, Arc<LogEntry>, AddressHashBuilder>,
}

pub(super) enum IndexLookup {
    Running(Arc<LogEntry>),
    /// All slots with the address's prefix: none, or usually one.
    Slots(Vec<IndexSlot>),
}

impl Index {
    pub(super) fn shard(&self, at: &Address) -> MutexGuard<'_, IndexShard> {
        self.shards[shard_of(&at.0)].lock()
    }

    /// Returns the memory use of the used slots in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.shards.iter().map(|shard| (shard.lock().slots.len() * size_of::<IndexSlot>()) as u64).sum()
    }

    /// Returns a shard by number; numbers are in address order.
    pub(super) fn shard_by_number(&self, nth: usize) -> MutexGuard<'_, IndexShard> {
        self.shards[nth].lock()
    }

    pub(super) fn find(&self, at: &Address) -> IndexLookup {
        let shard = self.shard(at);
        match shard.running_entries.get(at) {
            Some(entry) => IndexLookup::Running(entry.clone()),
            None => IndexLookup::Slots(shard.matching(address_prefix(at)).copied().collect()),
        }
    }

    pub(super) fn contains_slot(&self, slot: &IndexSlot) -> bool {
        self.current_slot(slot) == Some(*slot)
    }

    /// Returns the slot of the entry in `bytes`, if it points to this position.
    pub(super) fn slot_at(&self, bytes: &[u8], segment: u32, offset: u32) -> Option<IndexSlot> {
        let (version, address) = LogEntry::peek_version_and_address(bytes)?;
        let slot = *self.shard(&address).find(address_prefix(&address), version)?;
        (slot.segment == segment && slot.offset == offset).then_some(slot)
    }

    /// During recovery: inserts an entry unless a higher version is known. `is_same` checks whether a slot with the
    /// same prefix has the same address. Returns the slot that is superseded, if any.
    pub(super) fn insert_recovered(
        &self, entry: &LogEntry, slot: IndexSlot, is_same: impl Fn(&IndexSlot) -> bool,
    ) -> Option<IndexSlot> {
        let mut shard = self.shard(&entry.request.address);
        let known = shard.matching(slot.prefix).find(|known| is_same(known)).copied();
        match known {
            Some(known) if known.version() > slot.version() => return Some(slot),
            Some(known) => drop(shard.remove(known.prefix, known.version())),
            None => {}
        }
        shard.insert(slot);
        known
    }

    /// Replaces the slot of the superseded version with that of `entry`, and wakes the waiters of the previous holder
    /// if it no longer runs. Returns the replaced slot.
    pub(super) fn put(&self, entry: &Arc<LogEntry>, slot: IndexSlot, supersedes: Option<u64>) -> Option<IndexSlot> {
        let at = &entry.request.address;
        let mut shard = self.shard(at);
        let replaced = supersedes.and_then(|version| shard.remove(slot.prefix, version));
        shard.insert(slot);
        let runs = slot.kind() == LogEntryKind::Running;
        let before =
            if runs { shard.running_entries.insert(*at, entry.clone()) } else { shard.running_entries.remove(at) };
        if let Some(before) = before.filter(|before| !runs || before.fence != entry.fence) {
            self.waits.wake(at, before.fence);
        }
        replaced
    }

    /// Returns the current slot of an entry that may have been moved.
    pub(super) fn current_slot(&self, slot: &IndexSlot) -> Option<IndexSlot> {
        self.shards[slot.shard()].lock().find(slot.prefix, slot.version()).copied()
    }

    /// Replaces `from` with `to`, if `from` still exists.
    pub(super) fn swap(&self, from: &IndexSlot, to: IndexSlot) -> bool {
        let mut shard = self.shards[from.shard()].lock();
        let found = shard.slots.find_mut(hash_prefix(from.prefix), |slot| slot == from);
        found.map(|slot| *slot = to).is_some()
    }

    /// Removes at most `at_most` dead slots and passes each to `gone`. Returns their number, and whether there are
    /// more.
    pub(super) fn sweep(&self, now: UnixMicros, at_most: u32, mut gone: impl FnMut(&IndexSlot)) -> (u32, bool) {
        let mut removed = 0;
        let mut more = false;
        for shard in &self.shards {
            let mut shard = shard.lock();
            if shard.may_have_dead_slots(now) && removed < at_most {
                let dead = shard.take_dead(now, at_most - removed);
                dead.iter().for_each(&mut gone);
                removed += dead.len() as u32;
                if dead.iter().any(|slot| slot.kind() == LogEntryKind::Running) {
                    for (at, entry) in shard.running_entries.extract_if(|_, entry| entry.dies_at <= now) {
                        self.waits.wake(&at, entry.fence);
                    }
                }
            }
            more |= shard.may_have_dead_slots(now);
        }
        (removed, more)
    }
}

impl IndexShard {
    pub(super) fn slots(&self) -> impl Iterator<Item = &IndexSlot> {
        self.slots.iter()
    }

    fn matching(&self, prefix: [u8; 16]) -> impl Iterator<Item = &IndexSlot> {
        self.slots.iter_hash(hash_prefix(prefix)).filter(move |slot| slot.prefix == prefix)
    }

    fn find(&self, prefix: [u8; 16], version: u64) -> Option<&IndexSlot> {
        self.slots.find(hash_prefix(prefix), |slot| slot.prefix == prefix && slot.version() == version)
    }

    pub(super) fn insert(&mut self, slot: IndexSlot) {
        self.slots.insert_unique(hash_prefix(slot.prefix), slot, |slot| hash_prefix(slot.prefix));
        self.earliest_death_s = self.earliest_death_s.min(slot.dies_s);
    }

    fn remove(&mut self, prefix: [u8; 16], version: u64) -> Option<IndexSlot> {
        let is_it = |slot: &IndexSlot| slot.prefix == prefix && slot.version() == version;
        Some(self.slots.find_entry(hash_prefix(prefix), is_it).ok()?.remove().0)
    }

    fn may_have_dead_slots(&self, now: UnixMicros) -> bool {
        u64::from(self.earliest_death_s) * 1_000_000 <= now
    }

    fn take_dead(&mut self, now: UnixMicros, at_most: u32) -> Vec<IndexSlot> {
        let dead: Vec<IndexSlot> = self.slots.extract_if(|slot| slot.dies_at() <= now).take(at_most as usize).collect();
        self.earliest_death_s = self.slots.iter().map(|slot| slot.dies_s).min().unwrap_or(u32::MAX);
        if self.slots.len() * 4 < self.slots.capacity() {
            self.slots.shrink_to(self.slots.len() * 2, |slot| hash_prefix(slot.prefix));
        }
        dead
    }
}

impl Default for Index {
    fn default() -> Self {
        Self { shards: (0..SHARD_COUNT).map(|_| Mutex::default()).collect(), waits: HolderWaits::default() }
    }
}

impl Default for IndexShard {
    fn default() -> Self {
        Self {
            slots: HashTable::new(),
            earliest_death_s: u32::MAX,
            running_entries: HashMap::with_hasher(HASH_BUILDER.clone()),
        }
    }
}

fn hash_prefix(prefix: [u8; 16]) -> u64 {
    HASH_BUILDER.hash_one(prefix)
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
