//! The in-process store: sharded hash tables, a coarse expiry wheel, and waiters that are woken without polling.
//!
//! An operation runs at most once per key and process; a restart forgets everything. The store is bounded in bytes and
//! never evicts a live entry: when full it refuses new claims ([`ErrorKind::Rejected`]) and still settles running ones.

use std::{
    collections::BTreeMap,
    hash::BuildHasher,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use hashbrown::{HashTable, hash_table};
use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

use self::kept_entry::{ENTRY_OVERHEAD_BYTES, KeptEntry, request_bytes};
use super::{
    Address, ClaimOutcome, ClaimRequest, CompletedEntry, Counters, EntryCounts, EntryFilter, EntryPage, ErrorKind,
    Fence, Guarantees, HolderWaits, InMemoryCounters, Lease, ListCursor, SettleOutcome, Settlement, Store, StoreAdmin,
    StoreError, StoreFuture, SweepResult,
    address_hasher::AddressHashBuilder,
    transitions::{self, EntryDecision, EntryPhase, StoredEntry, UnixMicros, micros},
};
use crate::time::called_at;

mod kept_entry;

/// A small table grows in a short time, in which its lock is held.
const SHARD_COUNT: usize = 256;
/// How long after its expiry an entry may be removed, in microseconds. The slack lets most expiry changes keep their
/// slot in the wheel.
const MAX_REMOVAL_DELAY: UnixMicros = 60_000_000;
/// The maximum number of expired entries that a claim removes when the store is full.
const MAX_SWEPT_WHEN_FULL: u32 = 256;

/// The in-process store.
///
/// ```
/// # use ibid::store::{Memory, Store};
/// assert!(!Memory::default().guarantees().durable);
/// ```
#[derive(Debug)]
pub struct Memory {
    shards: Box<[Mutex<MemoryShard>]>,
    hasher: AddressHashBuilder,
    opened: Instant,
    opened_at: UnixMicros,
    max_bytes: u64,
    bytes: AtomicU64,
    waits: HolderWaits,
    counters: InMemoryCounters,
}

/// All fields are written under the shard's lock, which is never held across an await.
#[derive(Debug, Default)]
struct MemoryShard {
    entries: HashTable<EntrySlot>,
    /// Hashes of addresses by the second after which their entry may be removed. An entry whose expiry has changed is
    /// reinserted when its second comes.
    wheel: BTreeMap<u64, Vec<u64>>,
    /// The highest fence granted in this shard. It makes fences grow beyond an entry's lifetime.
    last_fence: u64,
}

/// A growing table moves its slots under the lock. So they are small, and have what is needed to move them.
#[derive(Debug)]
struct EntrySlot {
    /// The hash of the address.
    hash: u64,
    entry: Box<MemoryEntry>,
}

#[derive(Debug)]
struct MemoryEntry {
    kept: KeptEntry,
    /// The second under which the wheel lists the entry.
    wheel_second: u64,
}

impl Default for Memory {
    fn default() -> Self {
        Self::new(Self::DEFAULT_MAX_BYTES)
    }
}

impl Memory {
    /// The default limit in bytes.
    pub const DEFAULT_MAX_BYTES: u64 = 1 << 30;

    /// Creates an empty store that refuses claims beyond this size.
    pub fn new(max_bytes: u64) -> Self {
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self {
            shards: (0..SHARD_COUNT).map(|_| Mutex::default()).collect(),
            hasher: AddressHashBuilder::default(),
            opened: Instant::now(),
            opened_at: micros(since_epoch),
            max_bytes,
            bytes: AtomicU64::new(0),
            waits: HolderWaits::default(),
            counters: InMemoryCounters::default(),
        }
    }

    fn now(&self) -> UnixMicros {
        self.opened_at + micros(called_at().saturating_duration_since(self.opened))
    }

    /// Locks the shard of an address and removes its expired entries.
    fn shard(&self, at: &Address, now: UnixMicros) -> MutexGuard<'_, MemoryShard> {
        let mut shard = self.shards[usize::from(at.0[31]) % SHARD_COUNT].lock();
        if shard.is_due(now) {
            self.remove_expired(&mut shard, now, 64);
        }
        shard
    }

    /// Removes at most `at_most` expired entries and returns their number.
    fn remove_expired(&self, shard: &mut MemoryShard, now: UnixMicros, at_most: u32) -> u32 {
        let mut removed = 0;
        for _ in 0..at_most {
            let Some(mut turn) = shard.wheel.first_entry().filter(|turn| *turn.key() * 1_000_000 <= now) else { break };
            let due = *turn.key();
            let hash = turn.get_mut().pop().expect("no turn is kept empty");
            if turn.get().is_empty() {
                turn.remove();
            }
            // Only the second named by the entry is current; older ones are stale.
            let is_listed = |slot: &EntrySlot| slot.hash == hash && slot.entry.wheel_second == due;
            let Ok(mut found) = shard.entries.find_entry(hash, is_listed) else { continue };
            let removable_at = found.get().entry.kept.removable_at();
            if removable_at <= now {
                let gone = found.remove().0.entry.kept;
                self.bytes.fetch_sub(gone.bytes(), Relaxed);
                self.waits.wake(gone.address(), gone.fence());
                removed += 1;
            } else {
                found.get_mut().entry.wheel_second = wheel_second_of(removable_at);
                shard.wheel.entry(wheel_second_of(removable_at)).or_default().push(hash);
            }
        }
        removed
    }

    /// Reads the entry of an address.
    fn read<T>(&self, at: &Address, read: impl FnOnce(&KeptEntry, UnixMicros) -> Option<T>) -> Option<T> {
        let now = self.now();
        let shard = self.shard(at, now);
        let is_at = |slot: &EntrySlot| slot.entry.kept.address() == at;
        shard.entries.find(self.hasher.hash_one(at), is_at).and_then(|slot| read(&slot.entry.kept, now))
    }

    fn sweep_now(&self, at_most: u32) -> SweepResult {
        let now = self.now();
        let mut swept = SweepResult::default();
        for shard in &self.shards {
            let mut shard = shard.lock();
            let left = at_most.saturating_sub(swept.removed);
            swept.removed += self.remove_expired(&mut shard, now, left);
            swept.more |= shard.is_due(now);
        }
        swept
    }

    fn claim_now(&self, ask: &Arc<ClaimRequest>) -> Result<ClaimOutcome, StoreError> {
        let now = self.now();
        let mut shard = self.shard(&ask.address, now);
        let fence = Fence((shard.last_fence + 1).max(now));
        let MemoryShard { entries, wheel, last_fence } = &mut *shard;
        let slot = self.slot(entries, &ask.address);
        if let Some(KeptEntry::Compact(entry)) = found(&slot)
            && let Some(completed) = entry.completed(now)
        {
            return Ok(ClaimOutcome::Completed(completed));
        }
        let current = found(&slot).map(KeptEntry::whole);
        let (outcome, granted) = transitions::claim(current.as_deref(), ask, fence, now);
        drop(current);
        if let Some(granted) = granted {
            let grown = ENTRY_OVERHEAD_BYTES + request_bytes(ask);
            if self.bytes.load(Relaxed) + grown > self.max_bytes {
                return Err(self.store_full_error());
            }
            self.put(slot, granted, wheel, last_fence);
        }
        Ok(outcome)
    }

    /// Decides a call about the entry at `at`, and stores the change.
    fn change(
        &self, at: &Address, decide: impl FnOnce(Option<&StoredEntry>, UnixMicros) -> EntryDecision<SettleOutcome>,
    ) -> StoreFuture<'_, SettleOutcome> {
        let now = self.now();
        let mut shard = self.shard(at, now);
        let MemoryShard { entries, wheel, last_fence } = &mut *shard;
        let slot = self.slot(entries, at);
        let current = found(&slot).map(KeptEntry::whole);
        let (outcome, changed) = decide(current.as_deref(), now);
        drop(current);
        if let Some(changed) = changed {
            self.put(slot, changed, wheel, last_fence);
        }
        StoreFuture::ready(Ok(outcome))
    }

    /// Completes the entry of a running holder where it is, which is what most calls do. Returns `None` otherwise.
    fn complete_in_place(&self, lease: &Lease, end: &Settlement) -> Option<SettleOutcome> {
        let (now, at) = (self.now(), &lease.request.address);
        let mut shard = self.shard(at, now);
        let MemoryShard { entries, wheel, .. } = &mut *shard;
        let slot = entries.find_mut(self.hasher.hash_one(at), |slot| slot.entry.kept.address() == at)?;
        let (completed, expires_at) = slot.entry.kept.completing(lease, end, now)?;
        self.replace(slot, completed, None);
        list_in_wheel(slot, expires_at, wheel);
        Some(SettleOutcome::Applied)
    }

    /// The slot of an address, whether or not it has an entry.
    fn slot<'a>(&self, entries: &'a mut HashTable<EntrySlot>, at: &Address) -> hash_table::Entry<'a, EntrySlot> {
        entries.entry(self.hasher.hash_one(at), |slot| slot.entry.kept.address() == at, |slot| slot.hash)
    }

    /// Stores an entry in its slot.
    #[inline]
    fn put(
        &self, slot: hash_table::Entry<'_, EntrySlot>, entry: StoredEntry, wheel: &mut BTreeMap<u64, Vec<u64>>,
        last_fence: &mut u64,
    ) {
        let (at, expires_at) = (entry.request.address, entry.expires_at);
        let running = matches!(entry.phase, EntryPhase::Running { .. }).then_some(entry.fence);
        *last_fence = entry.fence.0.max(*last_fence);
        let kept = KeptEntry::new(entry);
        let slot = match slot {
            hash_table::Entry::Vacant(free) => {
                self.bytes.fetch_add(kept.bytes(), Relaxed);
                let entry = Box::new(MemoryEntry { kept, wheel_second: u64::MAX });
                free.insert(EntrySlot { hash: self.hasher.hash_one(at), entry }).into_mut()
            }
            hash_table::Entry::Occupied(found) => {
                let slot = found.into_mut();
                self.replace(slot, kept, running);
                slot
            }
        };
        list_in_wheel(slot, expires_at, wheel);
    }

    /// Puts `kept` in place of the entry before it, whose waiters are woken unless their holder still runs.
    #[inline]
    fn replace(&self, slot: &mut EntrySlot, kept: KeptEntry, running: Option<Fence>) {
        let before = &mut slot.entry.kept;
        let (fence, bytes) = (before.fence(), before.bytes());
        self.bytes.fetch_add(kept.bytes(), Relaxed);
        *before = kept;
        self.bytes.fetch_sub(bytes, Relaxed);
        if running != Some(fence) {
            self.waits.wake(slot.entry.kept.address(), fence);
        }
    }

    fn store_full_error(&self) -> StoreError {
        let (used, limit) = (self.bytes.load(Relaxed) >> 20, self.max_bytes >> 20);
        let why =
            format!("{used} of {limit} MiB are taken by records that still answer; raise max_size or shorten ttl");
        StoreError::new(ErrorKind::Rejected, "memory", why)
    }
}

impl MemoryShard {
    fn is_due(&self, now: UnixMicros) -> bool {
        self.wheel.first_key_value().is_some_and(|(turn, _)| turn * 1_000_000 <= now)
    }
}

fn found<'a>(slot: &'a hash_table::Entry<'_, EntrySlot>) -> Option<&'a KeptEntry> {
    match slot {
        hash_table::Entry::Occupied(found) => Some(&found.get().entry.kept),
        hash_table::Entry::Vacant(_) => None,
    }
}

/// Lists an entry in the wheel, unless it is listed soon enough.
fn list_in_wheel(slot: &mut EntrySlot, expires_at: UnixMicros, wheel: &mut BTreeMap<u64, Vec<u64>>) {
    let listed = &mut slot.entry.wheel_second;
    if *listed > wheel_second_of(expires_at.saturating_add(MAX_REMOVAL_DELAY)) {
        *listed = wheel_second_of(expires_at);
        wheel.entry(*listed).or_default().push(slot.hash);
    }
}

fn wheel_second_of(at: UnixMicros) -> u64 {
    at.div_ceil(1_000_000)
}

impl Store for Memory {
    fn claim<'a>(&'a self, ask: &'a Arc<ClaimRequest>) -> StoreFuture<'a, ClaimOutcome> {
        let claim = match self.claim_now(ask) {
            // Removing expired entries of other shards may free enough memory.
            Err(_) if self.sweep_now(MAX_SWEPT_WHEN_FULL).removed > 0 => self.claim_now(ask),
            claim => claim,
        };
        StoreFuture::ready(claim)
    }

    fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, SettleOutcome> {
        self.change(&lease.request.address, |entry, now| transitions::extend(entry, lease, hold, now))
    }

    fn settle<'a>(&'a self, lease: &'a Lease, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome> {
        match self.complete_in_place(lease, end) {
            Some(outcome) => StoreFuture::ready(Ok(outcome)),
            None => self.change(&lease.request.address, |entry, now| transitions::settle(entry, lease, end, now)),
        }
    }

    fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()> {
        StoreFuture::boxed(self.waits.wait(at, seen, limit, move || async move {
            Ok(self.read(at, |entry, now| entry.whole().runs_for(seen, now)))
        }))
    }

    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<ClaimOutcome>> {
        StoreFuture::ready(Ok(self.read(at, |entry, now| entry.whole().read(now))))
    }

    fn find_completed(&self, at: &Address) -> Option<CompletedEntry> {
        self.read(at, KeptEntry::completed)
    }

    fn sweep(&self, at_most: u32) -> StoreFuture<'_, SweepResult> {
        StoreFuture::ready(Ok(self.sweep_now(at_most)))
    }

    fn admin(&self) -> &dyn StoreAdmin {
        self
    }

    fn counters(&self) -> Option<&dyn Counters> {
        Some(&self.counters)
    }

    fn guarantees(&self) -> Guarantees {
        Guarantees { store: "memory", durable: false, shared: false, warnings: Vec::new() }
    }
}

impl StoreAdmin for Memory {
    fn list<'a>(&'a self, filter: &'a EntryFilter, from: ListCursor, at_most: u32) -> StoreFuture<'a, EntryPage> {
        let now = self.now();
        let mut entries = Vec::new();
        for shard in &self.shards {
            let shard = shard.lock();
            let all = shard.entries.iter().map(|slot| &slot.entry.kept);
            let after = all.filter(|entry| from.0.is_none_or(|from| *entry.address() > from));
            let listed = after.filter_map(|entry| entry.whole().entry_info(now));
            entries.extend(listed.filter(|listed| filter.matches(listed)));
        }
        entries.sort_unstable_by_key(|listed| listed.address);
        StoreFuture::ready(Ok(EntryPage::truncated(entries, at_most as usize)))
    }

    fn resolve<'a>(&'a self, at: &'a Address, seen: Fence, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome> {
        self.change(at, |entry, now| transitions::resolve(entry, seen, end, now))
    }

    fn forget<'a>(&'a self, at: &'a Address, seen: Fence) -> StoreFuture<'a, SettleOutcome> {
        self.change(at, |entry, now| transitions::forget(entry, seen, now))
    }

    fn replace_record<'a>(&'a self, at: &'a Address, seen: Fence, record: Bytes) -> StoreFuture<'a, SettleOutcome> {
        self.change(at, |entry, now| transitions::replace_record(entry, seen, &record, now))
    }

    fn counts(&self) -> StoreFuture<'_, EntryCounts> {
        let now = self.now();
        let mut counts = EntryCounts { bytes: self.bytes.load(Relaxed), ..EntryCounts::default() };
        for shard in &self.shards {
            let shard = shard.lock();
            shard.entries.iter().filter_map(|slot| slot.entry.kept.state(now)).for_each(|state| counts.add(state));
        }
        StoreFuture::ready(Ok(counts))
    }
}
