//! Caches completed answers in this process, in front of any store. It also limits concurrent claims per key, and
//! shares one store-side wait among all local waiters of a key.
//!
//! Completed answers never change, so a replay is served from memory without a store call. Invariants:
//!
//! - An answer is served at most for the ttl that the store reported, counted from **before** the call that fetched it,
//!   and at most [`MAX_UNCONFIRMED_AGE`] after that. So it never outlives the store's entry, and an answer forgotten
//!   elsewhere without a notification is served for a few seconds more at worst.
//! - An answer is cached only if its shard saw no invalidation since before that call. So a slow response is not cached
//!   after a [`forget`](AnswerCache::forget) or a [`flush`](AnswerCache::flush).
//! - Only completed answers are cached; every other state is read from the store. A claim with a spent token may
//!   receive the answer of a later claim: the store contract allows that, and the token is never granted.
//! - A holder's own record is cached when the store acknowledges its first settlement. A repeated settlement may find
//!   an earlier record, or a shorter remaining ttl, so it is not cached.
//!
//! ```
//! use std::sync::Arc;
//! use ibid::store::{Memory, Store};
//! use ibid_stores::local_cache::{AnswerCache, LocalCache};
//!
//! let answers = AnswerCache::new(64 << 20);
//! let store: Arc<dyn Store> = Arc::new(LocalCache::new(Arc::new(Memory::default()), answers.clone()));
//! assert_eq!((store.guarantees().store, answers.hits()), ("memory", 0));
//! ```

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::store::{
    Address, ClaimOutcome, ClaimRequest, CompletedEntry, Counters, EntryCounts, EntryFilter, EntryPage, Fence,
    Guarantees, Lease, ListCursor, SettleOutcome, Settlement, SharedMap, SharedValue, Store, StoreAdmin, StoreError,
    StoreFuture, SweepResult,
};
use tokio::{
    sync::{Semaphore, SemaphorePermit},
    time::Instant,
};

pub use self::answer_cache::{AnswerCache, MAX_UNCONFIRMED_AGE};
use self::shared_wait::SharedWaits;

mod answer_cache;
mod shared_wait;

/// Maximum number of concurrent store claims of one key.
const MAX_CONCURRENT_CLAIMS_PER_KEY: usize = 32;

/// A store that serves completed answers from memory.
#[derive(Debug)]
pub struct LocalCache {
    store: Arc<dyn Store>,
    answers: AnswerCache,
    claim_permits: ClaimPermits,
    shared_waits: SharedWaits,
}

/// Limits concurrent store claims per key.
///
/// Without it, ten thousand simultaneous requests with one key would be ten thousand calls in flight, and the holder's
/// heartbeat would queue behind them. Further claims of the key wait for a permit, and may find the answer cached by
/// then. Heartbeats and settlements need no permit.
type ClaimPermits = SharedMap<Address, Semaphore>;

fn join_permits<'a>(permits: &'a ClaimPermits, at: &Address) -> SharedValue<'a, Address, Semaphore> {
    permits.join(*at, || Semaphore::new(MAX_CONCURRENT_CLAIMS_PER_KEY))
}

/// Waits for a permit. Returns `true` if it was not available at once.
async fn acquire_permit(permits: &Semaphore) -> (SemaphorePermit<'_>, bool) {
    match permits.try_acquire() {
        Ok(permit) => (permit, false),
        Err(_) => (permits.acquire().await.expect("it is never closed"), true),
    }
}

impl LocalCache {
    /// Wraps `store`. A store that publishes invalidations must deliver them to the same `answers`.
    pub fn new(store: Arc<dyn Store>, answers: AnswerCache) -> Self {
        Self { store, answers, claim_permits: ClaimPermits::default(), shared_waits: SharedWaits::default() }
    }

    async fn claim_at_store(&self, ask: &Arc<ClaimRequest>) -> Result<ClaimOutcome, StoreError> {
        let permits = join_permits(&self.claim_permits, &ask.address);
        let (_permit, stood_in_line) = acquire_permit(&permits).await;
        if !self.answers.keeps_any() {
            return self.store.claim(ask).await;
        }
        if stood_in_line && let Some(finished) = self.answers.find(&ask.address) {
            return Ok(ClaimOutcome::Completed(finished));
        }
        let (ticket, before) = (self.answers.invalidation_mark(&ask.address), Instant::now());
        let found = self.store.claim(ask).await?;
        match &found {
            ClaimOutcome::Completed(finished) => self.answers.fill(&ask.address, ticket, before, finished),
            ClaimOutcome::Granted(lease) => self.answers.note_granted(&ask.address, lease.request.token),
            ClaimOutcome::InProgress(_) | ClaimOutcome::OutcomeUnknown(_) | ClaimOutcome::TokenSpent => {}
        }
        Ok(found)
    }

    async fn fetch(&self, at: &Address) -> Result<Option<ClaimOutcome>, StoreError> {
        let (ticket, before) = (self.answers.invalidation_mark(at), Instant::now());
        let found = self.store.get(at).await?;
        if let Some(ClaimOutcome::Completed(finished)) = &found {
            self.answers.fill(at, ticket, before, finished);
        }
        Ok(found)
    }

    async fn settle_at_store(&self, lease: &Lease, end: &Settlement) -> Result<SettleOutcome, StoreError> {
        let at = &lease.request.address;
        let is_first = self.answers.is_first_settle(at, lease.request.token);
        let (ticket, before) = (self.answers.invalidation_mark(at), Instant::now());
        let held = self.store.settle(lease, end).await?;
        if let (Settlement::Complete { failed, record, ttl: keep, .. }, SettleOutcome::Applied, true) =
            (end, &held, is_first)
        {
            let finished = CompletedEntry {
                fence: lease.fence,
                attempt: lease.attempt,
                fingerprint: lease.request.fingerprint,
                failed: *failed,
                record: record.clone(),
                expires_in: *keep,
                front_only: false,
            };
            if lease.fence != Fence::UNSEEN {
                self.answers.fill(at, ticket, before, &finished);
            }
        }
        Ok(held)
    }

    /// Invalidates the cached answer after an administrative change, whether it succeeds, fails or is dropped.
    async fn invalidate_after(
        &self, at: &Address, change: StoreFuture<'_, SettleOutcome>,
    ) -> Result<SettleOutcome, StoreError> {
        struct InvalidateOnDrop<'a>(&'a AnswerCache, &'a Address);
        impl Drop for InvalidateOnDrop<'_> {
            fn drop(&mut self) {
                self.0.forget(self.1);
            }
        }
        let _invalidates = InvalidateOnDrop(&self.answers, at);
        change.await
    }
}

impl Store for LocalCache {
    fn claim<'a>(&'a self, ask: &'a Arc<ClaimRequest>) -> StoreFuture<'a, ClaimOutcome> {
        match self.answers.find(&ask.address) {
            Some(finished) => StoreFuture::ready(Ok(ClaimOutcome::Completed(finished))),
            None => StoreFuture::boxed(self.claim_at_store(ask)),
        }
    }

    fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, SettleOutcome> {
        self.store.extend(lease, hold)
    }

    fn settle<'a>(&'a self, lease: &'a Lease, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome> {
        if !self.answers.keeps_any() {
            return self.store.settle(lease, end);
        }
        StoreFuture::boxed(self.settle_at_store(lease, end))
    }

    fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()> {
        StoreFuture::boxed(shared_wait::wait(self, at, seen, limit))
    }

    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<ClaimOutcome>> {
        StoreFuture::boxed(self.fetch(at))
    }

    fn sweep(&self, at_most: u32) -> StoreFuture<'_, SweepResult> {
        self.store.sweep(at_most)
    }

    fn admin(&self) -> &dyn StoreAdmin {
        self
    }

    fn counters(&self) -> Option<&dyn Counters> {
        self.store.counters()
    }

    fn guarantees(&self) -> Guarantees {
        self.store.guarantees()
    }
}

impl StoreAdmin for LocalCache {
    fn list<'a>(&'a self, filter: &'a EntryFilter, from: ListCursor, at_most: u32) -> StoreFuture<'a, EntryPage> {
        self.store.admin().list(filter, from, at_most)
    }

    fn resolve<'a>(&'a self, at: &'a Address, seen: Fence, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(self.invalidate_after(at, self.store.admin().resolve(at, seen, end)))
    }

    fn forget<'a>(&'a self, at: &'a Address, seen: Fence) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(self.invalidate_after(at, self.store.admin().forget(at, seen)))
    }

    fn replace_record<'a>(&'a self, at: &'a Address, seen: Fence, record: Bytes) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(self.invalidate_after(at, self.store.admin().replace_record(at, seen, record)))
    }

    fn counts(&self) -> StoreFuture<'_, EntryCounts> {
        self.store.admin().counts()
    }

    fn clock(&self) -> StoreFuture<'_, Option<Duration>> {
        self.store.admin().clock()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use super::*;

    #[tokio::test]
    async fn few_pass_at_a_time_and_nothing_is_left() {
        let gates = ClaimPermits::default();
        let (inside, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let one = async |nth: u8| {
            let visit = join_permits(&gates, &Address([nth % 2; 32]));
            let _pass = acquire_permit(&visit).await;
            most.fetch_max(inside.fetch_add(1, SeqCst) + 1, SeqCst);
            tokio::task::yield_now().await;
            inside.fetch_sub(1, SeqCst);
        };
        futures_util::future::join_all((0..200).map(one)).await;
        assert_eq!(most.into_inner(), 2 * MAX_CONCURRENT_CLAIMS_PER_KEY);
        assert!(gates.is_empty());
        let given_up = join_permits(&gates, &Address([0; 32]));
        drop(given_up);
        assert!(gates.is_empty());
    }
}
