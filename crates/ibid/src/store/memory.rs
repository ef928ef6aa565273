//! The in-process store: sharded hash tables, a coarse expiry wheel, and waiters that are woken without polling.
//!
//! An operation runs at most once per key and process; a restart forgets everything. The store is bounded in bytes and
//! never evicts a live entry: when full it refuses new claims ([`ErrorKind::Rejected`]) and still settles running ones.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use tokio::{
    sync::Notify,
    time::{Instant, timeout},
};

use self::{
    entry::{
        ENTRY_OVERHEAD_BYTES, MemoryEntry, MemoryEntryPhase, MemoryMicros, micros, request_bytes, wheel_second_of,
    },
    hasher::AddressHashBuilder,
};
use super::{
    Address, ClaimOutcome, ClaimRequest, Counters, EntryCounts, EntryFilter, EntryPage, ErrorKind, Fence, Guarantees,
    InMemoryCounters, Lease, ListCursor, SPENT_TOKEN_TTL, SettleOutcome, Settlement, Store, StoreAdmin, StoreError,
    StoreFuture, SweepResult,
};

mod entry;
mod hasher;

const SHARD_COUNT: usize = 64;
/// How long after its expiry an entry may be removed, in microseconds. The slack lets most expiry changes keep their
/// slot in the wheel.
const MAX_REMOVAL_DELAY: MemoryMicros = 60_000_000;
/// The maximum number of expired entries that a claim removes when the store is full.
const MAX_SWEPT_WHEN_FULL: u32 = 256;

/// The limits of a [`Memory`] store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryLimits {
    /// The store refuses claims beyond this size.
    pub max_bytes: u64,
}

impl Default for MemoryLimits {
    fn default() -> Self {
        Self { max_bytes: 1 << 30 }
    }
}

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
    opened_at: MemoryMicros,
    limits: MemoryLimits,
    bytes: AtomicU64,
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
    waiters: HashMap<Address, Arc<Notify>>,
    /// The highest fence granted in this shard. It makes fences grow beyond an entry's lifetime.
    last_fence: u64,
}

impl Default for Memory {
    fn default() -> Self {
        Self::new(MemoryLimits::default())
    }
}

impl Memory {
    /// Creates an empty store.
    pub fn new(limits: MemoryLimits) -> Self {
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self {
            shards: (0..SHARD_COUNT).map(|_| Mutex::default()).collect(),
            opened: Instant::now(),
            opened_at: micros(since_epoch),
            limits,
            bytes: AtomicU64::new(0),
            counters: InMemoryCounters::default(),
        }
    }

    fn now(&self) -> MemoryMicros {
        micros(self.opened.elapsed())
    }

    /// Locks the shard of an address and removes its expired entries.
    fn shard(&self, at: &Address, now: MemoryMicros) -> MutexGuard<'_, MemoryShard> {
        let mut shard = self.shards[usize::from(at.0[31]) % SHARD_COUNT].lock();
        if shard.is_due(now) {
            self.remove_expired(&mut shard, now, 64);
        }
        shard
    }

    /// Removes at most `at_most` expired entries and returns their number.
    fn remove_expired(&self, shard: &mut MemoryShard, now: MemoryMicros, at_most: u32) -> u32 {
        let mut removed = 0;
        let mut looked_at = 0;
        while looked_at < at_most {
            let Some(mut turn) = shard.wheel.first_entry().filter(|turn| *turn.key() * 1_000_000 <= now) else { break };
            let due = *turn.key();
            let address = turn.get_mut().pop().expect("no turn is kept empty");
            if turn.get().is_empty() {
                turn.remove();
            }
            looked_at += 1;
            match shard.entries.get_mut(&address) {
                Some(entry) if entry.removable_at() <= now => {
                    self.remove(shard, &address);
                    shard.wake(&address);
                    removed += 1;
                }
                // Only the slot named by the entry is current; older slots are stale.
                Some(entry) if entry.wheel_second == due => {
                    entry.wheel_second = wheel_second_of(entry.removable_at());
                    let turn = entry.wheel_second;
                    shard.wheel.entry(turn).or_default().push(address);
                }
                _ => {}
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
        let shard = &mut *shard;
        if shard.entries.get(&ask.address).is_some_and(|entry| entry.remembers_as_spent(ask.token, now)) {
            return Ok(ClaimOutcome::TokenSpent);
        }
        if let Some(entry) = shard.live_entry(&ask.address, now) {
            let same = entry.request.token == ask.token;
            match &entry.phase {
                MemoryEntryPhase::Running { .. } if same => return Ok(ClaimOutcome::Granted(entry.lease())),
                MemoryEntryPhase::Released if same => return Ok(ClaimOutcome::TokenSpent),
                MemoryEntryPhase::OutcomeUnknown { released: true, .. } if same => return Ok(ClaimOutcome::TokenSpent),
                MemoryEntryPhase::Released => {}
                _ if ask.take_over == Some(entry.fence) && entry.takeover_in(now) == Some(0) => {}
                _ => return Ok(entry.claim_outcome(now)),
            }
        }
        let grown = ENTRY_OVERHEAD_BYTES + request_bytes(ask);
        if self.bytes.load(Relaxed) + grown > self.limits.max_bytes {
            return Err(self.store_full_error());
        }
        Ok(ClaimOutcome::Granted(self.grant(shard, ask, now)))
    }

    fn grant(&self, shard: &mut MemoryShard, ask: &Arc<ClaimRequest>, now: MemoryMicros) -> Lease {
        shard.last_fence = (shard.last_fence + 1).max(self.opened_at + now);
        let mut entry = MemoryEntry {
            request: ask.clone(),
            fence: Fence(shard.last_fence),
            attempt: 1,
            took_over: false,
            claimed_at: now,
            expires_at: now + micros(ask.lease) + micros(ask.ttl),
            wheel_second: u64::MAX,
            spent_tokens: Vec::new(),
            phase: MemoryEntryPhase::Running { lease_ends_at: now + micros(ask.lease) },
        };
        if let Some(before) = self.remove(shard, &ask.address) {
            if now < before.expires_at {
                entry.attempt = before.attempt.saturating_add(1);
                entry.took_over = !matches!(before.phase, MemoryEntryPhase::Released);
            }
            entry.wheel_second = before.wheel_second;
            entry.spent_tokens = before.into_spent(now);
        }
        let lease = entry.lease();
        self.insert(shard, entry);
        lease
    }

    fn extend_now(&self, lease: &Lease, hold: Duration) -> SettleOutcome {
        let now = self.now();
        let mut shard = self.shard(&lease.request.address, now);
        let shard = &mut *shard;
        match shard.live_entry(&lease.request.address, now).filter(|entry| !entry.is_restorable_by(lease, now)) {
            None => {
                let keep = hold.saturating_add(lease.request.ttl);
                self.restore(shard, lease, now, MemoryEntryPhase::Running { lease_ends_at: now + micros(hold) }, keep)
            }
            Some(entry) if entry.is_held_by(lease) && matches!(entry.phase, MemoryEntryPhase::Running { .. }) => {
                entry.phase = MemoryEntryPhase::Running { lease_ends_at: now + micros(hold) };
                let expires = entry.expires_at.max(now + micros(hold) + micros(entry.request.ttl));
                shard.set_expiry(&lease.request.address, expires);
                SettleOutcome::Applied
            }
            Some(entry) => SettleOutcome::ClaimLost(Box::new(entry.claim_outcome(now))),
        }
    }

    fn settle_now(&self, lease: &Lease, end: &Settlement) -> SettleOutcome {
        let now = self.now();
        let mut shard = self.shard(&lease.request.address, now);
        let shard = &mut *shard;
        let spent_for = SPENT_TOKEN_TTL.max(lease.request.lease);
        let live = shard.live_entry(&lease.request.address, now).filter(|entry| !entry.is_restorable_by(lease, now));
        let Some(entry) = live else {
            return match end {
                // The claim never arrived, so there is nothing to restore. A delayed copy of it must find its token
                // spent.
                _ if lease.fence == Fence::UNSEEN => {
                    let _ = self.restore(shard, lease, now, MemoryEntryPhase::Released, spent_for);
                    if matches!(end, Settlement::Release) {
                        SettleOutcome::Applied
                    } else {
                        SettleOutcome::ClaimLost(Box::new(ClaimOutcome::TokenSpent))
                    }
                }
                Settlement::Release if lease.request.take_over.is_some() => {
                    let phase = MemoryEntryPhase::OutcomeUnknown { takeover_at: now, released: true };
                    self.restore(shard, lease, now, phase, spent_for.max(lease.request.ttl))
                }
                Settlement::Release => self.restore(shard, lease, now, MemoryEntryPhase::Released, spent_for),
                _ => self.restore(shard, lease, now, MemoryEntryPhase::of(end, now), end.ttl()),
            };
        };
        if !entry.is_held_by(lease) {
            let spent = entry.has_spent(lease.request.token, now);
            if lease.fence == Fence::UNSEEN && !spent {
                let before = entry.bytes();
                entry.spend(lease.request.token, now + micros(spent_for), now);
                self.account_bytes(before, entry.bytes());
            } else if spent && lease.fence != Fence::UNSEEN && matches!(end, Settlement::Release) {
                return SettleOutcome::Applied;
            }
            return SettleOutcome::ClaimLost(Box::new(entry.claim_outcome(now)));
        }
        match (&entry.phase, end) {
            (MemoryEntryPhase::Running { .. }, _)
            | (MemoryEntryPhase::OutcomeUnknown { released: false, .. }, Settlement::Complete { .. }) => {}
            (MemoryEntryPhase::Completed { resolved: false, .. }, Settlement::Complete { .. })
            | (MemoryEntryPhase::OutcomeUnknown { released: false, .. }, Settlement::Park { .. })
            | (
                MemoryEntryPhase::OutcomeUnknown { released: true, .. } | MemoryEntryPhase::Released,
                Settlement::Release,
            ) => return SettleOutcome::Applied,
            _ => return SettleOutcome::ClaimLost(Box::new(entry.claim_outcome(now))),
        }
        if entry.took_over && matches!(end, Settlement::Release) {
            entry.phase = MemoryEntryPhase::OutcomeUnknown { takeover_at: now, released: true };
            let spent_until = now + micros(SPENT_TOKEN_TTL.max(entry.request.lease));
            let expires = entry.expires_at.max(spent_until);
            shard.set_expiry(&lease.request.address, expires);
        } else {
            self.apply(shard, &lease.request.address, end, now);
        }
        shard.wake(&lease.request.address);
        SettleOutcome::Applied
    }

    fn resolve_now(&self, at: &Address, seen: Fence, end: &Settlement) -> SettleOutcome {
        let now = self.now();
        let mut shard = self.shard(at, now);
        let Some(entry) = shard.live_entry(at, now) else {
            return SettleOutcome::ClaimLost(Box::new(ClaimOutcome::TokenSpent));
        };
        // `takeover_in` does not matter: a parked entry can be resolved before it may be taken over.
        if entry.fence != seen || !matches!(entry.claim_outcome(now), ClaimOutcome::OutcomeUnknown(_)) {
            return SettleOutcome::ClaimLost(Box::new(entry.claim_outcome(now)));
        }
        let was_released = matches!(entry.phase, MemoryEntryPhase::OutcomeUnknown { released: true, .. });
        self.apply(&mut shard, at, end, now);
        match shard.live_entry(at, now).map(|entry| &mut entry.phase) {
            Some(MemoryEntryPhase::Completed { resolved, .. }) => *resolved = true,
            Some(MemoryEntryPhase::OutcomeUnknown { released, .. }) => *released = was_released,
            _ => {}
        }
        shard.wake(at);
        SettleOutcome::Applied
    }

    fn forget_now(&self, at: &Address, seen: Fence) -> SettleOutcome {
        let now = self.now();
        let mut shard = self.shard(at, now);
        let Some(entry) = shard.live_entry(at, now) else {
            return SettleOutcome::ClaimLost(Box::new(ClaimOutcome::TokenSpent));
        };
        if entry.fence != seen || matches!(entry.phase, MemoryEntryPhase::Released) {
            return SettleOutcome::ClaimLost(Box::new(entry.claim_outcome(now)));
        }
        self.apply(&mut shard, at, &Settlement::Release, now);
        shard.wake(at);
        SettleOutcome::Applied
    }

    fn replace_record_now(&self, at: &Address, seen: Fence, with: Bytes) -> SettleOutcome {
        let now = self.now();
        let mut shard = self.shard(at, now);
        let Some(entry) = shard.live_entry(at, now) else {
            return SettleOutcome::ClaimLost(Box::new(ClaimOutcome::TokenSpent));
        };
        let before = entry.bytes();
        match &mut entry.phase {
            MemoryEntryPhase::Completed { record, .. } if entry.fence == seen => *record = with,
            _ => return SettleOutcome::ClaimLost(Box::new(entry.claim_outcome(now))),
        }
        let after = entry.bytes();
        self.account_bytes(before, after);
        SettleOutcome::Applied
    }

    /// Applies the settlement to the entry at `at`, which must exist.
    fn apply(&self, shard: &mut MemoryShard, at: &Address, end: &Settlement, now: MemoryMicros) {
        let entry = shard.entries.get_mut(at).expect("the caller found it");
        let before = entry.bytes();
        if matches!(entry.phase, MemoryEntryPhase::OutcomeUnknown { released: true, .. })
            && !entry.remembers_as_spent(entry.request.token, now)
        {
            entry.spent_tokens.push((entry.request.token, entry.expires_at));
        }
        entry.phase = MemoryEntryPhase::of(end, now);
        let after = entry.bytes();
        let least = if matches!(end, Settlement::Release) { micros(entry.request.lease) } else { 0 };
        shard.set_expiry(at, now + micros(end.ttl()).max(least));
        self.account_bytes(before, after);
    }

    fn restore(
        &self, shard: &mut MemoryShard, lease: &Lease, now: MemoryMicros, phase: MemoryEntryPhase, keep: Duration,
    ) -> SettleOutcome {
        shard.last_fence = shard.last_fence.max(lease.fence.0);
        let spent = self.remove(shard, &lease.request.address).map(|before| before.into_spent(now)).unwrap_or_default();
        let entry = MemoryEntry {
            request: lease.request.clone(),
            fence: lease.fence,
            attempt: lease.attempt,
            took_over: lease.request.take_over.is_some(),
            claimed_at: now,
            expires_at: now + micros(keep),
            wheel_second: u64::MAX,
            spent_tokens: spent,
            phase,
        };
        self.insert(shard, entry);
        shard.wake(&lease.request.address);
        SettleOutcome::Restored
    }

    fn insert(&self, shard: &mut MemoryShard, entry: MemoryEntry) {
        self.bytes.fetch_add(entry.bytes(), Relaxed);
        let (at, expires) = (entry.request.address, entry.expires_at);
        shard.entries.insert(at, Box::new(entry));
        shard.set_expiry(&at, expires);
    }

    fn remove(&self, shard: &mut MemoryShard, at: &Address) -> Option<MemoryEntry> {
        let gone = shard.entries.remove(at)?;
        self.bytes.fetch_sub(gone.bytes(), Relaxed);
        Some(*gone)
    }

    fn account_bytes(&self, before: u64, after: u64) {
        if after >= before {
            self.bytes.fetch_add(after - before, Relaxed);
        } else {
            self.bytes.fetch_sub(before - after, Relaxed);
        }
    }

    fn store_full_error(&self) -> StoreError {
        let used = self.bytes.load(Relaxed) >> 20;
        let limit = self.limits.max_bytes >> 20;
        let why =
            format!("{used} of {limit} MiB are taken by records that still answer; raise max_size or shorten ttl");
        StoreError::new(ErrorKind::Rejected, "memory", why)
    }
}

impl MemoryShard {
    fn is_due(&self, now: MemoryMicros) -> bool {
        self.wheel.first_key_value().is_some_and(|(turn, _)| turn * 1_000_000 <= now)
    }

    fn live_entry(&mut self, at: &Address, now: MemoryMicros) -> Option<&mut MemoryEntry> {
        self.entries.get_mut(at).map(|entry| &mut **entry).filter(|entry| now < entry.expires_at)
    }

    fn set_expiry(&mut self, at: &Address, expires: MemoryMicros) {
        let entry = self.entries.get_mut(at).expect("the caller found it");
        entry.expires_at = expires;
        if entry.wheel_second > wheel_second_of(expires.saturating_add(MAX_REMOVAL_DELAY)) {
            entry.wheel_second = wheel_second_of(expires);
            self.wheel.entry(entry.wheel_second).or_default().push(*at);
        }
    }

    fn is_waiting(&self, at: &Address, waiters: &Arc<Notify>) -> bool {
        self.waiters.get(at).is_some_and(|listed| Arc::ptr_eq(listed, waiters))
    }

    fn wake(&mut self, at: &Address) {
        if self.waiters.is_empty() {
            return;
        }
        if let Some(waiters) = self.waiters.remove(at) {
            waiters.notify_waiters();
        }
    }
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
        StoreFuture::ready(Ok(self.extend_now(lease, hold)))
    }

    fn settle<'a>(&'a self, lease: &'a Lease, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::ready(Ok(self.settle_now(lease, end)))
    }

    fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()> {
        StoreFuture::boxed(async move {
            let deadline = self.now().saturating_add(micros(limit));
            loop {
                let (waiters, lapses) = {
                    let now = self.now();
                    let mut shard = self.shard(at, now);
                    let Some(lapses) = shard.live_entry(at, now).and_then(|entry| entry.runs_until(seen, now)) else {
                        return Ok(());
                    };
                    (shard.waiters.entry(*at).or_default().clone(), lapses)
                };
                // `notify_waiters` wakes every `Notified` created before the call. The change may have happened before
                // `notified` was created, so check again after creating it.
                let notified = waiters.notified();
                tokio::pin!(notified);
                notified.as_mut().enable();
                let now = self.now();
                if !self.shard(at, now).is_waiting(at, &waiters) {
                    return Ok(());
                }
                let silence = Duration::from_micros(lapses.min(deadline).saturating_sub(now));
                let woken = timeout(silence, notified).await.is_ok();
                let now = self.now();
                let mut shard = self.shard(at, now);
                // Two references (the table's and this one) mean that this is the last waiter. Check identity: the
                // table may already contain the waiters of the next holder.
                if Arc::strong_count(&waiters) == 2 && shard.is_waiting(at, &waiters) {
                    shard.waiters.remove(at);
                }
                if woken || now >= deadline {
                    return Ok(());
                }
                // The lease has expired or was extended: check again.
            }
        })
    }

    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<ClaimOutcome>> {
        let now = self.now();
        let mut shard = self.shard(at, now);
        let found = shard.live_entry(at, now).filter(|entry| !matches!(entry.phase, MemoryEntryPhase::Released));
        StoreFuture::ready(Ok(found.map(|entry| entry.claim_outcome(now))))
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
            entries.extend(
                shard
                    .entries
                    .values()
                    .filter(|entry| from.0.is_none_or(|from| entry.request.address > from))
                    .filter_map(|entry| entry.entry_info(now))
                    .filter(|listed| filter.matches(listed)),
            );
        }
        entries.sort_unstable_by_key(|listed| listed.address);
        let more = entries.len() > at_most as usize;
        entries.truncate(at_most as usize);
        let next = if more { entries.last().map(|last| ListCursor(Some(last.address))) } else { None };
        StoreFuture::ready(Ok(EntryPage { entries, next }))
    }

    fn resolve<'a>(&'a self, at: &'a Address, seen: Fence, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::ready(Ok(self.resolve_now(at, seen, end)))
    }

    fn forget<'a>(&'a self, at: &'a Address, seen: Fence) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::ready(Ok(self.forget_now(at, seen)))
    }

    fn replace_record<'a>(&'a self, at: &'a Address, seen: Fence, record: Bytes) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::ready(Ok(self.replace_record_now(at, seen, record)))
    }

    fn counts(&self) -> StoreFuture<'_, EntryCounts> {
        let now = self.now();
        let mut counts = EntryCounts { bytes: self.bytes.load(Relaxed), ..EntryCounts::default() };
        for shard in &self.shards {
            for entry in shard.lock().entries.values().filter(|entry| now < entry.expires_at) {
                match entry.phase {
                    MemoryEntryPhase::Running { lease_ends_at: until } if now < until => counts.processing += 1,
                    MemoryEntryPhase::Running { .. } | MemoryEntryPhase::OutcomeUnknown { .. } => counts.unknown += 1,
                    MemoryEntryPhase::Completed { .. } => counts.finished += 1,
                    MemoryEntryPhase::Released => {}
                }
            }
        }
        StoreFuture::ready(Ok(counts))
    }
}
