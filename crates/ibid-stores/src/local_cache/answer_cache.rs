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

/// How long a copy answers at most after the store last confirmed it.
pub const MAX_UNCONFIRMED_AGE: Duration = Duration::from_secs(10);

const SHARD_COUNT: usize = 64;
/// A copy's fixed cost: its slot, and its place in the table.
const ENTRY_OVERHEAD_BYTES: usize = mem::size_of::<Option<CachedAnswer>>() + 64;
/// So many running claims are known per shard; if there are more, some records are not copied before somebody asks.
const MAX_OPEN_CLAIMS_PER_SHARD: usize = 4096;
/// Longer than any process lives: what would overflow the clock.
const MAX_TTL: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// Copies of finished answers, shared by [`LocalCache`](super::LocalCache) and the store that says what was forgotten. Cheap to
/// clone.
#[derive(Debug, Clone)]
pub struct AnswerCache(Arc<AnswerCacheInner>);

#[derive(Debug)]
struct AnswerCacheInner {
    shards: Box<[Mutex<AnswerCacheShard>]>,
    max_bytes: usize,
    /// Of all shards. Written under the lock of the shard that it changes with.
    bytes: AtomicUsize,
}

/// Everything in it is written under the shard's lock, which is never held across an await.
#[derive(Debug, Default)]
struct AnswerCacheShard {
    index: HashMap<Address, u32>,
    /// What the clock's hand walks over.
    slots: Vec<Option<CachedAnswer>>,
    free_slots: Vec<u32>,
    clock_hand: usize,
    /// Goes up with every invalidation. A fill that began under another number is not kept.
    invalidations: u64,
    /// Claims that were granted through here and have not been settled yet.
    open_claims: HashSet<ClaimToken>,
    hits: u64,
}

#[derive(Debug)]
struct CachedAnswer {
    address: Address,
    entry: CompletedEntry,
    /// When the store forgets it, or earlier.
    expires_at: Instant,
    /// Until when it is believed without asking.
    confirmed_until: Instant,
    /// Asked for since the hand came by.
    recently_used: bool,
}

/// Says whether something was invalidated since it was taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct InvalidationMark(u64);

impl Default for AnswerCache {
    fn default() -> Self {
        Self::new(64 << 20)
    }
}

impl AnswerCache {
    /// None yet, and never more than `max_bytes` of them. A single record that takes up more than a quarter of that is
    /// not copied.
    pub fn new(max_bytes: usize) -> Self {
        let shards = (0..SHARD_COUNT).map(|_| Mutex::default()).collect();
        Self(Arc::new(AnswerCacheInner { shards, max_bytes, bytes: AtomicUsize::new(0) }))
    }

    /// Somebody forgot this entry.
    pub fn forget(&self, at: &Address) {
        let mut shard = self.shard(at).lock();
        shard.invalidations += 1;
        self.remove(&mut shard, at);
    }

    /// Something may have been forgotten unnoticed: the channel that says so had a gap.
    pub fn flush(&self) {
        for shard in &self.0.shards {
            let mut shard = shard.lock();
            shard.invalidations += 1;
            let freed: usize = shard.slots.iter().flatten().map(CachedAnswer::bytes).sum();
            self.0.bytes.fetch_sub(freed, Relaxed);
            shard.index = HashMap::new();
            shard.slots = Vec::new();
            shard.free_slots = Vec::new();
            shard.clock_hand = 0;
        }
    }

    /// How many claims were answered from here.
    pub fn hits(&self) -> u64 {
        self.0.shards.iter().map(|shard| shard.lock().hits).sum()
    }

    /// How many copies there are. Some may have expired and await their removal.
    pub fn len(&self) -> usize {
        self.0.shards.iter().map(|shard| shard.lock().index.len()).sum()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What they take up, roughly.
    pub fn bytes(&self) -> usize {
        self.0.bytes.load(Relaxed)
    }

    /// The answer, if it is here and still holds.
    pub(super) fn find(&self, at: &Address) -> Option<CompletedEntry> {
        let now = Instant::now();
        let mut shard = self.shard(at).lock();
        let slot = *shard.index.get(at)?;
        let copy = shard.slots[slot as usize].as_mut().expect("what is indexed is there");
        if now < copy.valid_until() {
            copy.recently_used = true;
            let finished = CompletedEntry { expires_in: copy.expires_at - now, ..copy.entry.clone() };
            shard.hits += 1;
            return Some(finished);
        }
        self.remove(&mut shard, at);
        None
    }

    /// Whether the answer is here, without counting a hit.
    pub(super) fn contains(&self, at: &Address) -> bool {
        let now = Instant::now();
        let shard = self.shard(at).lock();
        let copy = shard.index.get(at).and_then(|slot| shard.slots[*slot as usize].as_ref());
        copy.is_some_and(|copy| now < copy.valid_until())
    }

    /// To be taken before the call whose answer is to be kept.
    pub(super) fn invalidation_mark(&self, at: &Address) -> InvalidationMark {
        InvalidationMark(self.shard(at).lock().invalidations)
    }

    /// Keeps what a call brought that was made at `before`, unless something was invalidated since.
    pub(super) fn fill(&self, at: &Address, ticket: InvalidationMark, before: Instant, finished: &CompletedEntry) {
        let expires = before.checked_add(finished.expires_in.min(MAX_TTL)).unwrap_or(before);
        let confirmed = before + MAX_UNCONFIRMED_AGE;
        let copy = CachedAnswer {
            address: *at,
            entry: finished.clone(),
            expires_at: expires,
            confirmed_until: confirmed,
            recently_used: false,
        };
        let bytes = copy.bytes();
        if bytes > self.0.max_bytes / 4 || copy.valid_until() <= Instant::now() {
            return;
        }
        {
            let mut shard = self.shard(at).lock();
            if shard.invalidations != ticket.0 {
                return;
            }
            self.remove(&mut shard, at);
            shard.insert(copy);
            self.0.bytes.fetch_add(bytes, Relaxed);
        }
        self.evict_to_fit(at);
    }

    /// A claim was granted through here: its first settle may be copied.
    pub(super) fn note_granted(&self, at: &Address, token: ClaimToken) {
        let mut shard = self.shard(at).lock();
        if shard.open_claims.len() >= MAX_OPEN_CLAIMS_PER_SHARD {
            shard.open_claims.clear();
        }
        shard.open_claims.insert(token);
    }

    /// Whether this is the first settle of a claim that was granted through here.
    pub(super) fn is_first_settle(&self, at: &Address, token: ClaimToken) -> bool {
        self.shard(at).lock().open_claims.remove(&token)
    }

    fn shard(&self, at: &Address) -> &Mutex<AnswerCacheShard> {
        &self.0.shards[usize::from(at.0[31]) % SHARD_COUNT]
    }

    fn remove(&self, shard: &mut AnswerCacheShard, at: &Address) {
        if let Some(slot) = shard.index.remove(at) {
            let gone = shard.slots[slot as usize].take().expect("what is indexed is there");
            shard.free_slots.push(slot);
            self.0.bytes.fetch_sub(gone.bytes(), Relaxed);
        }
    }

    /// Evicts until all fit, from the shard of `at` first. One lock at a time; each shard is visited once, so that what
    /// others put in meanwhile is theirs to make room for.
    fn evict_to_fit(&self, at: &Address) {
        let own = usize::from(at.0[31]) % SHARD_COUNT;
        for nth in 0..SHARD_COUNT {
            if self.bytes() <= self.0.max_bytes {
                return;
            }
            let mut shard = self.0.shards[(own + nth) % SHARD_COUNT].lock();
            while self.bytes() > self.0.max_bytes {
                // What was just put in stays, as long as others can go.
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
    fn insert(&mut self, copy: CachedAnswer) {
        let at = copy.address;
        let slot = match self.free_slots.pop() {
            Some(slot) => {
                self.slots[slot as usize] = Some(copy);
                slot
            }
            None => {
                self.slots.push(Some(copy));
                (self.slots.len() - 1) as u32
            }
        };
        self.index.insert(at, slot);
    }

    /// The next copy under the hand that nobody has asked for since it last came by, or that holds no more. Two rounds
    /// at most: the first takes the marks away.
    fn pick_victim(&mut self, spared: Option<&Address>) -> Option<Address> {
        let now = Instant::now();
        for _ in 0..self.slots.len() * 2 {
            self.clock_hand = (self.clock_hand + 1) % self.slots.len();
            let Some(copy) = &mut self.slots[self.clock_hand] else { continue };
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
