use std::{
    collections::{HashMap, HashSet},
    mem,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use ibid::store::{Address, ClaimToken, CompletedEntry};
use parking_lot::Mutex;
use tokio::time::Instant;

/// Maximum time that a cached answer is served after the store last confirmed it.
pub const MAX_UNCONFIRMED_AGE: Duration = Duration::from_secs(10);

const SHARD_COUNT: usize = 64;
/// Fixed memory cost of a cached answer: its slot and its index entry.
const ENTRY_OVERHEAD_BYTES: usize = mem::size_of::<CachedAnswer>() + 64;
/// Maximum number of open claims tracked per shard. Beyond it, a settled answer is cached at its first read instead of
/// at its settlement.
const MAX_OPEN_CLAIMS_PER_SHARD: usize = 4096;
/// Upper limit of a ttl, so that adding it does not overflow the clock.
const MAX_TTL: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// Completed answers, shared by [`LocalCache`](super::LocalCache) and the store that reports forgotten entries. Clones
/// share the same cache.
#[derive(Debug, Clone)]
pub struct AnswerCache(Arc<AnswerCacheInner>);

#[derive(Debug)]
struct AnswerCacheInner {
    shards: Box<[Mutex<AnswerCacheShard>]>,
    max_bytes: usize,
    /// Total of all shards. Changed only under the lock of the affected shard.
    bytes: AtomicUsize,
}

/// All fields are changed under the shard's lock, which is never held across an await.
#[derive(Debug, Default)]
struct AnswerCacheShard {
    /// Positions in `answers`.
    index: HashMap<Address, usize>,
    /// Scanned by the clock hand.
    answers: Vec<CachedAnswer>,
    clock_hand: usize,
    /// Incremented by every invalidation. [`AnswerCache::fill`] drops an answer whose mark has another value.
    invalidations: u64,
    /// Claims granted through this cache and not settled yet.
    open_claims: HashSet<ClaimToken>,
    hits: u64,
}

#[derive(Debug)]
struct CachedAnswer {
    address: Address,
    entry: CompletedEntry,
    /// No later than the store's own expiry.
    expires_at: Instant,
    /// The answer is served without asking the store until then.
    confirmed_until: Instant,
    /// Set by a hit, cleared by the clock hand.
    recently_used: bool,
}

impl Default for AnswerCache {
    fn default() -> Self {
        Self::new(64 << 20)
    }
}

impl AnswerCache {
    /// Creates an empty cache that holds at most `max_bytes`. A record larger than a quarter of that is not cached.
    pub fn new(max_bytes: usize) -> Self {
        let shards = (0..SHARD_COUNT).map(|_| Mutex::default()).collect();
        Self(Arc::new(AnswerCacheInner { shards, max_bytes, bytes: AtomicUsize::new(0) }))
    }

    /// Removes an entry that was forgotten in the store.
    pub fn forget(&self, at: &Address) {
        let mut shard = self.shard(at).lock();
        shard.invalidations += 1;
        self.remove(&mut shard, at);
    }

    /// Removes all entries. Called after a gap in the notifications, which may have hidden a forget.
    pub fn flush(&self) {
        for shard in &self.0.shards {
            let mut shard = shard.lock();
            shard.invalidations += 1;
            let freed: usize = shard.answers.iter().map(CachedAnswer::bytes).sum();
            self.0.bytes.fetch_sub(freed, Relaxed);
            (shard.index, shard.answers) = (HashMap::new(), Vec::new());
        }
    }

    /// Returns the number of claims answered from the cache.
    pub fn hits(&self) -> u64 {
        self.0.shards.iter().map(|shard| shard.lock().hits).sum()
    }

    /// Returns the number of cached answers, including expired ones that are not removed yet.
    pub fn len(&self) -> usize {
        self.0.shards.iter().map(|shard| shard.lock().index.len()).sum()
    }

    /// Returns `true` if nothing is cached.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the approximate memory use in bytes.
    pub fn bytes(&self) -> usize {
        self.0.bytes.load(Relaxed)
    }

    /// Whether the cache has room for any answer. Without, calls need not ask it.
    pub(super) fn keeps_any(&self) -> bool {
        self.0.max_bytes > 0
    }

    pub(super) fn find(&self, at: &Address) -> Option<CompletedEntry> {
        if !self.keeps_any() {
            return None;
        }
        let now = Instant::now();
        let mut shard = self.shard(at).lock();
        let position = *shard.index.get(at)?;
        let copy = &mut shard.answers[position];
        if now < copy.valid_until() {
            copy.recently_used = true;
            let finished = CompletedEntry { expires_in: copy.expires_at - now, ..copy.entry.clone() };
            shard.hits += 1;
            return Some(finished);
        }
        self.remove(&mut shard, at);
        None
    }

    /// Whether a valid answer is cached, without counting a hit.
    pub(super) fn contains(&self, at: &Address) -> bool {
        let now = Instant::now();
        let shard = self.shard(at).lock();
        shard.index.get(at).is_some_and(|position| now < shard.answers[*position].valid_until())
    }

    /// Returns how many invalidations the shard has seen. Must be called before the store call whose answer is passed to
    /// [`Self::fill`].
    pub(super) fn invalidation_mark(&self, at: &Address) -> u64 {
        self.shard(at).lock().invalidations
    }

    /// Caches the answer of a store call made at `before`, unless the shard was invalidated since.
    pub(super) fn fill(&self, at: &Address, mark: u64, before: Instant, finished: &CompletedEntry) {
        // The authority may still decide otherwise.
        if finished.front_only {
            return;
        }
        let expires_at = before.checked_add(finished.expires_in.min(MAX_TTL)).unwrap_or(before);
        let (entry, confirmed_until) = (finished.clone(), before + MAX_UNCONFIRMED_AGE);
        let copy = CachedAnswer { address: *at, entry, expires_at, confirmed_until, recently_used: false };
        let bytes = copy.bytes();
        if bytes > self.0.max_bytes / 4 || copy.valid_until() <= Instant::now() {
            return;
        }
        {
            let mut shard = self.shard(at).lock();
            if shard.invalidations != mark {
                return;
            }
            self.remove(&mut shard, at);
            let position = shard.answers.len();
            shard.index.insert(*at, position);
            shard.answers.push(copy);
            self.0.bytes.fetch_add(bytes, Relaxed);
        }
        self.evict_to_fit(at);
    }

    /// Records a grant, so that the claim's first settlement is cached.
    pub(super) fn note_granted(&self, at: &Address, token: ClaimToken) {
        let mut shard = self.shard(at).lock();
        if shard.open_claims.len() >= MAX_OPEN_CLAIMS_PER_SHARD {
            shard.open_claims.clear();
        }
        shard.open_claims.insert(token);
    }

    /// Whether this is the first settlement of a claim granted through this cache.
    pub(super) fn is_first_settle(&self, at: &Address, token: ClaimToken) -> bool {
        self.shard(at).lock().open_claims.remove(&token)
    }

    fn shard(&self, at: &Address) -> &Mutex<AnswerCacheShard> {
        &self.0.shards[usize::from(at.0[31]) % SHARD_COUNT]
    }

    fn remove(&self, shard: &mut AnswerCacheShard, at: &Address) {
        if let Some(position) = shard.index.remove(at) {
            let gone = shard.answers.swap_remove(position);
            self.0.bytes.fetch_sub(gone.bytes(), Relaxed);
            if let Some(moved) = shard.answers.get(position).map(|moved| moved.address) {
                shard.index.insert(moved, position);
            }
        }
    }

    /// Evicts answers until the total fits, starting with the shard of `at`. Locks one shard at a time and visits each
    /// once; threads that insert meanwhile evict for themselves.
    fn evict_to_fit(&self, at: &Address) {
        let own = usize::from(at.0[31]) % SHARD_COUNT;
        for nth in 0..SHARD_COUNT {
            if self.bytes() <= self.0.max_bytes {
                return;
            }
            let mut shard = self.0.shards[(own + nth) % SHARD_COUNT].lock();
            while self.bytes() > self.0.max_bytes {
                // Keep the answer just inserted if others can be evicted.
                let spared = if nth == 0 { Some(at) } else { None };
                let Some(victim) = shard.pick_victim(spared) else { break };
                self.remove(&mut shard, &victim);
            }
        }
        if self.bytes() > self.0.max_bytes {
            self.remove(&mut self.shard(at).lock(), at);
        }
    }
}

impl AnswerCacheShard {
    /// Returns the next answer under the clock hand that is expired or was not used since the last pass. Takes at most
    /// two rounds: the first one clears the marks.
    fn pick_victim(&mut self, spared: Option<&Address>) -> Option<Address> {
        let now = Instant::now();
        for _ in 0..self.answers.len() * 2 {
            self.clock_hand = (self.clock_hand + 1) % self.answers.len();
            let copy = &mut self.answers[self.clock_hand];
            if spared == Some(&copy.address) {
                continue;
            }
            if copy.valid_until() <= now || !mem::take(&mut copy.recently_used) {
                return Some(copy.address);
            }
        }
        None
    }
}

impl CachedAnswer {
    fn bytes(&self) -> usize {
        ENTRY_OVERHEAD_BYTES + self.entry.record.len()
    }

    fn valid_until(&self) -> Instant {
        self.expires_at.min(self.confirmed_until)
    }
}
