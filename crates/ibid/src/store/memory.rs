//! The in-process store: sharded hash tables, a coarse expiry wheel, and waiters that are woken without polling.
//!
//! An operation runs at most once per key and process; a restart forgets everything. The store is bounded in bytes and
//! never evicts a live entry: when full it refuses new claims ([`ErrorKind::Rejected`]) and still settles running ones.

use std::{
    collections::{BTreeMap, HashMap, hash_map},
    mem,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

use super::{
    Address, ClaimOutcome, ClaimRequest, CompletedEntry, Counters, EntryCounts, EntryFilter, EntryPage, ErrorKind,
    Fence, Guarantees, HolderWaits, InMemoryCounters, Lease, ListCursor, SettleOutcome, Settlement, Store, StoreAdmin,
    StoreError, StoreFuture, SweepResult,
    address_hasher::AddressHashBuilder,
    transitions::{self, EntryDecision, EntryPhase, StoredEntry, UnixMicros, micros},
};
use crate::time::called_at;

const SHARD_COUNT: usize = 64;
/// How long after its expiry an entry may be removed, in microseconds. The slack lets most expiry changes keep their
/// slot in the wheel.
const MAX_REMOVAL_DELAY: UnixMicros = 60_000_000;
/// The maximum number of expired entries that a claim removes when the store is full.
const MAX_SWEPT_WHEN_FULL: u32 = 256;
/// The fixed memory cost of an entry in bytes: table slot, claim request and wheel slot.
const ENTRY_OVERHEAD_BYTES: u64 = 480;

/// The in-process store.
///
/// ```
/// # use ibid::store::{Memory, Store};
/// assert!(!Memory::default().guarantees().durable);
/// ```
#[derive(Debug)]
pub struct Memory {
    shards: Box<[Mutex<MemoryShard>]>,
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
    /// Boxed, because a growing table moves its values under the lock.
    entries: HashMap<Address, Box<MemoryEntry>, AddressHashBuilder>,
    /// Addresses by the second after which their entry may be removed. An entry whose expiry has changed is reinserted
    /// when its second comes.
    wheel: BTreeMap<u64, Vec<Address>>,
    /// The highest fence granted in this shard. It makes fences grow beyond an entry's lifetime.
    last_fence: u64,
}

type EntrySlot<'a> = hash_map::Entry<'a, Address, Box<MemoryEntry>>;

#[derive(Debug)]
struct MemoryEntry {
    entry: StoredEntry,
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
            let address = turn.get_mut().pop().expect("no turn is kept empty");
            if turn.get().is_empty() {
                turn.remove();
            }
            let hash_map::Entry::Occupied(mut found) = shard.entries.entry(address) else { continue };
            let removable_at = found.get().entry.removable_at();
            if removable_at <= now {
                let gone = found.remove().entry;
                self.bytes.fetch_sub(entry_bytes(&gone), Relaxed);
                self.waits.wake(&address, gone.fence);
                removed += 1;
            } else if found.get().wheel_second == due {
                // Only the slot named by the entry is current; older slots are stale.
                found.get_mut().wheel_second = wheel_second_of(removable_at);
                shard.wheel.entry(wheel_second_of(removable_at)).or_default().push(address);
            }
        }
        removed
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
        let slot = entries.entry(ask.address);
        let current = match &slot {
            hash_map::Entry::Occupied(found) => Some(&found.get().entry),
            hash_map::Entry::Vacant(_) => None,
        };
        let (outcome, granted) = transitions::claim(current, ask, fence, now);
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
        let slot = entries.entry(*at);
        let current = match &slot {
            hash_map::Entry::Occupied(found) => Some(&found.get().entry),
            hash_map::Entry::Vacant(_) => None,
        };
        let (outcome, changed) = decide(current, now);
        if let Some(changed) = changed {
            self.put(slot, changed, wheel, last_fence);
        }
        StoreFuture::ready(Ok(outcome))
    }

    /// Stores an entry in its slot.
    #[inline]
    fn put(
        &self, slot: EntrySlot<'_>, entry: StoredEntry, wheel: &mut BTreeMap<u64, Vec<Address>>, last_fence: &mut u64,
    ) {
        let (at, expires_at, after) = (entry.request.address, entry.expires_at, entry_bytes(&entry));
        let running = matches!(entry.phase, EntryPhase::Running { .. }).then_some(entry.fence);
        *last_fence = entry.fence.0.max(*last_fence);
        self.bytes.fetch_add(after, Relaxed);
        let slot = match slot {
            hash_map::Entry::Vacant(free) => free.insert(Box::new(MemoryEntry { entry, wheel_second: u64::MAX })),
            hash_map::Entry::Occupied(found) => {
                let slot = found.into_mut();
                let before = mem::replace(&mut slot.entry, entry);
                self.bytes.fetch_sub(entry_bytes(&before), Relaxed);
                if running != Some(before.fence) {
                    self.waits.wake(&at, before.fence);
                }
                slot
            }
        };
        if slot.wheel_second > wheel_second_of(expires_at.saturating_add(MAX_REMOVAL_DELAY)) {
            slot.wheel_second = wheel_second_of(expires_at);
            wheel.entry(slot.wheel_second).or_default().push(at);
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

    fn entry(&self, at: &Address) -> Option<&StoredEntry> {
        self.entries.get(at).map(|found| &found.entry)
    }
}

fn entry_bytes(entry: &StoredEntry) -> u64 {
    let record = match &entry.phase {
        EntryPhase::Completed { record, .. } => record.len() as u64,
        _ => 0,
    };
    ENTRY_OVERHEAD_BYTES + request_bytes(&entry.request) + mem::size_of_val(&entry.spent_tokens[..]) as u64 + record
}

fn request_bytes(ask: &ClaimRequest) -> u64 {
    (mem::size_of::<ClaimRequest>() + ask.tags.as_bytes().len() + ask.label.len()) as u64
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
        self.change(&lease.request.address, |entry, now| transitions::settle(entry, lease, end, now))
    }

    fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()> {
        StoreFuture::boxed(self.waits.wait(at, seen, limit, move || async move {
            let now = self.now();
            Ok(self.shard(at, now).entry(at).and_then(|entry| entry.runs_for(seen, now)))
        }))
    }

    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<ClaimOutcome>> {
        let now = self.now();
        StoreFuture::ready(Ok(self.shard(at, now).entry(at).and_then(|entry| entry.read(now))))
    }

    fn find_completed(&self, at: &Address) -> Option<CompletedEntry> {
        let now = self.now();
        match self.shard(at, now).entry(at).and_then(|entry| entry.read(now)) {
            Some(ClaimOutcome::Completed(found)) => Some(found),
            _ => None,
        }
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
            let all = shard.entries.values().map(|found| &found.entry);
            let after = all.filter(|entry| from.0.is_none_or(|from| entry.request.address > from));
            entries.extend(after.filter_map(|entry| entry.entry_info(now)).filter(|listed| filter.matches(listed)));
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
            shard.entries.values().filter_map(|found| found.entry.state(now)).for_each(|state| counts.add(state));
        }
        StoreFuture::ready(Ok(counts))
    }
}
