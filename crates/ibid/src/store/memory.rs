//! The in-process store: sharded hash tables, a coarse expiry wheel, waiters woken without polling.
//!
//! At most one run per key and process; a restart forgets everything. It is bounded in bytes and never evicts a live
//! entry: a full store refuses new claims ([`ErrorKind::Rejected`]) and still settles those that run.

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
    entry::{ENTRY_BYTES, Entry, Micros, Phase, ask_bytes, micros, turn_of},
    seeded::Seeded,
};
use super::{
    Address, Ask, Claim, Counters, Counts, Cursor, End, ErrorKind, FREE_FOR, Fence, Filter, Held, Lease, Operators,
    Page, Promise, Store, StoreError, StoreFuture, Swept, Windows,
};

mod entry;
mod seeded;

const SHARDS: usize = 64;
/// How much later than its expiry an entry may be removed, so that most changes of expiry need no new place.
const SLACK: Micros = 60_000_000;
/// How many expired entries a claim removes at most to find room in a full store.
const SWEPT_WHEN_FULL: u32 = 256;

/// How much a [`Memory`] store may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryLimits {
    /// Claims are refused beyond this.
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
/// assert!(!Memory::default().promise().durable);
/// ```
#[derive(Debug)]
pub struct Memory {
    shards: Box<[Mutex<Shard>]>,
    opened: Instant,
    opened_at: Micros,
    limits: MemoryLimits,
    bytes: AtomicU64,
    windows: Windows,
}

/// Everything in it is written under the shard's lock, which is never held across an await.
#[derive(Debug, Default)]
struct Shard {
    /// Boxed, because a table that grows moves all that is in it, under the lock.
    entries: HashMap<Address, Box<Entry>, Seeded>,
    /// Entries by the second after which they may be removed. An entry whose expiry has moved is put back when its
    /// turn comes.
    wheel: BTreeMap<u64, Vec<Address>>,
    waiters: HashMap<Address, Arc<Notify>>,
    /// The highest fence ever given in this shard, so that fences grow beyond an entry's life.
    fences: u64,
}

impl Default for Memory {
    fn default() -> Self {
        Self::new(MemoryLimits::default())
    }
}

impl Memory {
    /// An empty store.
    pub fn new(limits: MemoryLimits) -> Self {
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            opened: Instant::now(),
            opened_at: micros(since_epoch),
            limits,
            bytes: AtomicU64::new(0),
            windows: Windows::default(),
        }
    }

    fn now(&self) -> Micros {
        micros(self.opened.elapsed())
    }

    /// The shard of an address, cleared of what expired there.
    fn shard(&self, at: &Address, now: Micros) -> MutexGuard<'_, Shard> {
        let mut shard = self.shards[usize::from(at.0[31]) % SHARDS].lock();
        if shard.is_due(now) {
            self.clear(&mut shard, now, 64);
        }
        shard
    }

    /// Removes at most `at_most` expired entries. Returns how many.
    fn clear(&self, shard: &mut Shard, now: Micros, at_most: u32) -> u32 {
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
                // Only the place that the entry itself names counts; older ones are left-overs.
                Some(entry) if entry.turn == due => {
                    entry.turn = turn_of(entry.removable_at());
                    let turn = entry.turn;
                    shard.wheel.entry(turn).or_default().push(address);
                }
                _ => {}
            }
        }
        removed
    }

    fn sweep_now(&self, at_most: u32) -> Swept {
        let now = self.now();
        let mut swept = Swept::default();
        for shard in &self.shards {
            let mut shard = shard.lock();
            let left = at_most.saturating_sub(swept.removed);
            swept.removed += self.clear(&mut shard, now, left);
            swept.more |= shard.is_due(now);
        }
        swept
    }

    fn claim_now(&self, ask: &Arc<Ask>) -> Result<Claim, StoreError> {
        let now = self.now();
        let mut shard = self.shard(&ask.address, now);
        let shard = &mut *shard;
        if shard.entries.get(&ask.address).is_some_and(|entry| entry.remembers_as_spent(ask.token, now)) {
            return Ok(Claim::Spent);
        }
        if let Some(entry) = shard.live(&ask.address, now) {
            let same = entry.ask.token == ask.token;
            match &entry.phase {
                Phase::Running { .. } if same => return Ok(Claim::Granted(entry.lease())),
                Phase::Free if same => return Ok(Claim::Spent),
                Phase::Unknown { released: true, .. } if same => return Ok(Claim::Spent),
                Phase::Free => {}
                _ if ask.over == Some(entry.fence) && entry.takeover_in(now) == Some(0) => {}
                _ => return Ok(entry.view(now)),
            }
        }
        let grown = ENTRY_BYTES + ask_bytes(ask);
        if self.bytes.load(Relaxed) + grown > self.limits.max_bytes {
            return Err(self.full());
        }
        Ok(Claim::Granted(self.grant(shard, ask, now)))
    }

    fn grant(&self, shard: &mut Shard, ask: &Arc<Ask>, now: Micros) -> Lease {
        shard.fences = (shard.fences + 1).max(self.opened_at + now);
        let mut entry = Entry {
            ask: ask.clone(),
            fence: Fence(shard.fences),
            attempt: 1,
            took_over: false,
            claimed: now,
            expires: now + micros(ask.hold) + micros(ask.keep),
            turn: u64::MAX,
            spent: Vec::new(),
            phase: Phase::Running { until: now + micros(ask.hold) },
        };
        if let Some(before) = self.remove(shard, &ask.address) {
            if now < before.expires {
                entry.attempt = before.attempt.saturating_add(1);
                entry.took_over = !matches!(before.phase, Phase::Free);
            }
            entry.turn = before.turn;
            entry.spent = before.into_spent(now);
        }
        let lease = entry.lease();
        self.insert(shard, entry);
        lease
    }

    fn extend_now(&self, lease: &Lease, hold: Duration) -> Held {
        let now = self.now();
        let mut shard = self.shard(&lease.ask.address, now);
        let shard = &mut *shard;
        match shard.live(&lease.ask.address, now).filter(|entry| !entry.gives_way_to(lease, now)) {
            None => {
                let keep = hold.saturating_add(lease.ask.keep);
                self.restore(shard, lease, now, Phase::Running { until: now + micros(hold) }, keep)
            }
            Some(entry) if entry.is_held_by(lease) && matches!(entry.phase, Phase::Running { .. }) => {
                entry.phase = Phase::Running { until: now + micros(hold) };
                let expires = entry.expires.max(now + micros(hold) + micros(entry.ask.keep));
                shard.set_expiry(&lease.ask.address, expires);
                Held::Held
            }
            Some(entry) => Held::Lost(Box::new(entry.view(now))),
        }
    }

    fn settle_now(&self, lease: &Lease, end: &End) -> Held {
        let now = self.now();
        let mut shard = self.shard(&lease.ask.address, now);
        let shard = &mut *shard;
        let spent_for = FREE_FOR.max(lease.ask.hold);
        let live = shard.live(&lease.ask.address, now).filter(|entry| !entry.gives_way_to(lease, now));
        let Some(entry) = live else {
            return match end {
                // A lost claim never came: nothing to put back, but a late copy of it must find its token spent.
                _ if lease.fence == Fence::UNSEEN => {
                    let _ = self.restore(shard, lease, now, Phase::Free, spent_for);
                    if matches!(end, End::Release) { Held::Held } else { Held::Lost(Box::new(Claim::Spent)) }
                }
                End::Release if lease.ask.over.is_some() => {
                    let phase = Phase::Unknown { takeover: now, released: true };
                    self.restore(shard, lease, now, phase, spent_for.max(lease.ask.keep))
                }
                End::Release => self.restore(shard, lease, now, Phase::Free, spent_for),
                _ => self.restore(shard, lease, now, Phase::of(end, now), end.keep()),
            };
        };
        if !entry.is_held_by(lease) {
            let spent = entry.has_spent(lease.ask.token, now);
            if lease.fence == Fence::UNSEEN && !spent {
                let before = entry.bytes();
                entry.spend(lease.ask.token, now + micros(spent_for), now);
                self.account(before, entry.bytes());
            } else if spent && lease.fence != Fence::UNSEEN && matches!(end, End::Release) {
                return Held::Held;
            }
            return Held::Lost(Box::new(entry.view(now)));
        }
        match (&entry.phase, end) {
            (Phase::Running { .. }, _) | (Phase::Unknown { released: false, .. }, End::Complete { .. }) => {}
            (Phase::Done { resolved: false, .. }, End::Complete { .. })
            | (Phase::Unknown { released: false, .. }, End::Park { .. })
            | (Phase::Unknown { released: true, .. } | Phase::Free, End::Release) => return Held::Held,
            _ => return Held::Lost(Box::new(entry.view(now))),
        }
        if entry.took_over && matches!(end, End::Release) {
            entry.phase = Phase::Unknown { takeover: now, released: true };
            let spent_until = now + micros(FREE_FOR.max(entry.ask.hold));
            let expires = entry.expires.max(spent_until);
            shard.set_expiry(&lease.ask.address, expires);
        } else {
            self.apply(shard, &lease.ask.address, end, now);
        }
        shard.wake(&lease.ask.address);
        Held::Held
    }

    fn resolve_now(&self, at: &Address, seen: Fence, end: &End) -> Held {
        let now = self.now();
        let mut shard = self.shard(at, now);
        let Some(entry) = shard.live(at, now) else { return Held::Lost(Box::new(Claim::Spent)) };
        // Not `takeover_in`: a parked entry that may not be taken over yet may well be resolved.
        if entry.fence != seen || !matches!(entry.view(now), Claim::Unknown(_)) {
            return Held::Lost(Box::new(entry.view(now)));
        }
        let was_released = matches!(entry.phase, Phase::Unknown { released: true, .. });
        self.apply(&mut shard, at, end, now);
        match shard.live(at, now).map(|entry| &mut entry.phase) {
            Some(Phase::Done { resolved, .. }) => *resolved = true,
            Some(Phase::Unknown { released, .. }) => *released = was_released,
            _ => {}
        }
        shard.wake(at);
        Held::Held
    }

    fn forget_now(&self, at: &Address, seen: Fence) -> Held {
        let now = self.now();
        let mut shard = self.shard(at, now);
        let Some(entry) = shard.live(at, now) else { return Held::Lost(Box::new(Claim::Spent)) };
        if entry.fence != seen || matches!(entry.phase, Phase::Free) {
            return Held::Lost(Box::new(entry.view(now)));
        }
        self.apply(&mut shard, at, &End::Release, now);
        shard.wake(at);
        Held::Held
    }

    fn replace_now(&self, at: &Address, seen: Fence, with: Bytes) -> Held {
        let now = self.now();
        let mut shard = self.shard(at, now);
        let Some(entry) = shard.live(at, now) else { return Held::Lost(Box::new(Claim::Spent)) };
        let before = entry.bytes();
        match &mut entry.phase {
            Phase::Done { record, .. } if entry.fence == seen => *record = with,
            _ => return Held::Lost(Box::new(entry.view(now))),
        }
        let after = entry.bytes();
        self.account(before, after);
        Held::Held
    }

    /// Writes the end of the entry at `at`, which is there.
    fn apply(&self, shard: &mut Shard, at: &Address, end: &End, now: Micros) {
        let entry = shard.entries.get_mut(at).expect("the caller found it");
        let before = entry.bytes();
        if matches!(entry.phase, Phase::Unknown { released: true, .. })
            && !entry.remembers_as_spent(entry.ask.token, now)
        {
            entry.spent.push((entry.ask.token, entry.expires));
        }
        entry.phase = Phase::of(end, now);
        let after = entry.bytes();
        let least = if matches!(end, End::Release) { micros(entry.ask.hold) } else { 0 };
        shard.set_expiry(at, now + micros(end.keep()).max(least));
        self.account(before, after);
    }

    fn restore(&self, shard: &mut Shard, lease: &Lease, now: Micros, phase: Phase, keep: Duration) -> Held {
        shard.fences = shard.fences.max(lease.fence.0);
        let spent = self.remove(shard, &lease.ask.address).map(|before| before.into_spent(now)).unwrap_or_default();
        let entry = Entry {
            ask: lease.ask.clone(),
            fence: lease.fence,
            attempt: lease.attempt,
            took_over: lease.ask.over.is_some(),
            claimed: now,
            expires: now + micros(keep),
            turn: u64::MAX,
            spent,
            phase,
        };
        self.insert(shard, entry);
        shard.wake(&lease.ask.address);
        Held::Restored
    }

    fn insert(&self, shard: &mut Shard, entry: Entry) {
        self.bytes.fetch_add(entry.bytes(), Relaxed);
        let (at, expires) = (entry.ask.address, entry.expires);
        shard.entries.insert(at, Box::new(entry));
        shard.set_expiry(&at, expires);
    }

    fn remove(&self, shard: &mut Shard, at: &Address) -> Option<Entry> {
        let gone = shard.entries.remove(at)?;
        self.bytes.fetch_sub(gone.bytes(), Relaxed);
        Some(*gone)
    }

    fn account(&self, before: u64, after: u64) {
        if after >= before {
            self.bytes.fetch_add(after - before, Relaxed);
        } else {
            self.bytes.fetch_sub(before - after, Relaxed);
        }
    }

    fn full(&self) -> StoreError {
        let used = self.bytes.load(Relaxed) >> 20;
        let limit = self.limits.max_bytes >> 20;
        let why =
            format!("{used} of {limit} MiB are taken by records that still answer; raise max_size or shorten ttl");
        StoreError::new(ErrorKind::Rejected, "memory", why)
    }
}

impl Shard {
    fn is_due(&self, now: Micros) -> bool {
        self.wheel.first_key_value().is_some_and(|(turn, _)| turn * 1_000_000 <= now)
    }

    fn live(&mut self, at: &Address, now: Micros) -> Option<&mut Entry> {
        self.entries.get_mut(at).map(|entry| &mut **entry).filter(|entry| now < entry.expires)
    }

    fn set_expiry(&mut self, at: &Address, expires: Micros) {
        let entry = self.entries.get_mut(at).expect("the caller found it");
        entry.expires = expires;
        if entry.turn > turn_of(expires.saturating_add(SLACK)) {
            entry.turn = turn_of(expires);
            self.wheel.entry(entry.turn).or_default().push(*at);
        }
    }

    fn is_listed(&self, at: &Address, waiters: &Arc<Notify>) -> bool {
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
    fn claim<'a>(&'a self, ask: &'a Arc<Ask>) -> StoreFuture<'a, Claim> {
        let claim = match self.claim_now(ask) {
            // What has expired elsewhere may make room.
            Err(_) if self.sweep_now(SWEPT_WHEN_FULL).removed > 0 => self.claim_now(ask),
            claim => claim,
        };
        StoreFuture::ready(claim)
    }

    fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, Held> {
        StoreFuture::ready(Ok(self.extend_now(lease, hold)))
    }

    fn settle<'a>(&'a self, lease: &'a Lease, end: &'a End) -> StoreFuture<'a, Held> {
        StoreFuture::ready(Ok(self.settle_now(lease, end)))
    }

    fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()> {
        StoreFuture::boxed(async move {
            let deadline = self.now().saturating_add(micros(limit));
            loop {
                let (waiters, lapses) = {
                    let now = self.now();
                    let mut shard = self.shard(at, now);
                    let Some(lapses) = shard.live(at, now).and_then(|entry| entry.runs_until(seen, now)) else {
                        return Ok(());
                    };
                    (shard.waiters.entry(*at).or_default().clone(), lapses)
                };
                // `notify_waiters` reaches every `Notified` made before it was called; the one that is made below
                // could come too late, so look once more after it was made.
                let notified = waiters.notified();
                tokio::pin!(notified);
                notified.as_mut().enable();
                let now = self.now();
                if !self.shard(at, now).is_listed(at, &waiters) {
                    return Ok(());
                }
                let silence = Duration::from_micros(lapses.min(deadline).saturating_sub(now));
                let woken = timeout(silence, notified).await.is_ok();
                let now = self.now();
                let mut shard = self.shard(at, now);
                // One in the table and this one: the last waiter leaves no trace. The table may by now hold those who
                // wait for the next holder: they are not ours to remove.
                if Arc::strong_count(&waiters) == 2 && shard.is_listed(at, &waiters) {
                    shard.waiters.remove(at);
                }
                if woken || now >= deadline {
                    return Ok(());
                }
                // The lease ended, or was extended meanwhile: look again.
            }
        })
    }

    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<Claim>> {
        let now = self.now();
        let mut shard = self.shard(at, now);
        let found = shard.live(at, now).filter(|entry| !matches!(entry.phase, Phase::Free));
        StoreFuture::ready(Ok(found.map(|entry| entry.view(now))))
    }

    fn sweep(&self, at_most: u32) -> StoreFuture<'_, Swept> {
        StoreFuture::ready(Ok(self.sweep_now(at_most)))
    }

    fn operators(&self) -> &dyn Operators {
        self
    }

    fn counters(&self) -> Option<&dyn Counters> {
        Some(&self.windows)
    }

    fn promise(&self) -> Promise {
        Promise { store: "memory", durable: false, shared: false, wanting: Vec::new() }
    }
}

impl Operators for Memory {
    fn list<'a>(&'a self, filter: &'a Filter, from: Cursor, at_most: u32) -> StoreFuture<'a, Page> {
        let now = self.now();
        let mut entries = Vec::new();
        for shard in &self.shards {
            let shard = shard.lock();
            entries.extend(
                shard
                    .entries
                    .values()
                    .filter(|entry| from.0.is_none_or(|from| entry.ask.address > from))
                    .filter_map(|entry| entry.listed(now))
                    .filter(|listed| filter.matches(listed)),
            );
        }
        entries.sort_unstable_by_key(|listed| listed.address);
        let more = entries.len() > at_most as usize;
        entries.truncate(at_most as usize);
        let next = if more { entries.last().map(|last| Cursor(Some(last.address))) } else { None };
        StoreFuture::ready(Ok(Page { entries, next }))
    }

    fn resolve<'a>(&'a self, at: &'a Address, seen: Fence, end: &'a End) -> StoreFuture<'a, Held> {
        StoreFuture::ready(Ok(self.resolve_now(at, seen, end)))
    }

    fn forget<'a>(&'a self, at: &'a Address, seen: Fence) -> StoreFuture<'a, Held> {
        StoreFuture::ready(Ok(self.forget_now(at, seen)))
    }

    fn replace<'a>(&'a self, at: &'a Address, seen: Fence, record: Bytes) -> StoreFuture<'a, Held> {
        StoreFuture::ready(Ok(self.replace_now(at, seen, record)))
    }

    fn counts(&self) -> StoreFuture<'_, Counts> {
        let now = self.now();
        let mut counts = Counts { bytes: self.bytes.load(Relaxed), ..Counts::default() };
        for shard in &self.shards {
            for entry in shard.lock().entries.values().filter(|entry| now < entry.expires) {
                match entry.phase {
                    Phase::Running { until } if now < until => counts.processing += 1,
                    Phase::Running { .. } | Phase::Unknown { .. } => counts.unknown += 1,
                    Phase::Done { .. } => counts.finished += 1,
                    Phase::Free => {}
                }
            }
        }
        StoreFuture::ready(Ok(counts))
    }
}
