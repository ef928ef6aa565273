//! Finished answers in this process, around any store; one waiter per key at that store, and few who claim it at the same
//! time, however many are here.
//!
//! What is finished does not change, so a replay need not ask the store again. Invariants:
//!
//! - A copy answers at most for as long as the store said, counted from **before** the call that fetched it, and at
//!   most [`MAX_UNCONFIRMED_AGE`] after that. So it never outlives the entry, and what was forgotten elsewhere unnoticed is
//!   answered for a few seconds more at worst.
//! - A copy is kept only if nothing was invalidated at its place since before that call: what a slow answer brings is
//!   not kept after somebody forgot it ([`AnswerCache::forget`]), or may have ([`AnswerCache::flush`]).
//! - Only what is done is copied. Who runs, who is released and who is spent, the store alone says. A token that was
//!   spent may find the answer of those who came after it: the contract allows that, and it is never granted.
//! - A holder's own record is copied when its first settle is answered. A repeated one may find an earlier record in
//!   place, or an earlier end of its life, so it copies nothing.
//!
//! ```
//! use std::sync::Arc;
//! use ibid::store::{Memory, Store};
//! use ibid_stores::near::{Copies, Near};
//!
//! let copies = Copies::new(64 << 20);
//! let store: Arc<dyn Store> = Arc::new(Near::new(Arc::new(Memory::default()), copies.clone()));
//! assert_eq!((store.promise().store, copies.hits()), ("memory", 0));
//! ```

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::store::{
    Address, ClaimOutcome, ClaimRequest, CompletedEntry, Counters, EntryCounts, EntryFilter, EntryPage, Fence,
    Guarantees, Lease, ListCursor, SettleOutcome, Settlement, Store, StoreAdmin, StoreError, StoreFuture, SweepResult,
};
use tokio::time::Instant;

pub use self::answer_cache::{AnswerCache, MAX_UNCONFIRMED_AGE};
use self::{claim_limiter::ClaimLimiter, shared_wait::SharedWaits};

mod answer_cache;
mod claim_limiter;
mod shared_wait;

/// A store with copies of its finished answers in this process.
#[derive(Debug)]
pub struct LocalCache {
    store: Arc<dyn Store>,
    answers: AnswerCache,
    gates: ClaimLimiter,
    shared_waits: SharedWaits,
}

impl LocalCache {
    /// Around `store`, whose channel of invalidations, if it has one, tells the same `copies`.
    pub fn new(store: Arc<dyn Store>, answers: AnswerCache) -> Self {
        Self { store, answers, gates: ClaimLimiter::default(), shared_waits: SharedWaits::default() }
    }

    async fn claim_at_store(&self, ask: &Arc<ClaimRequest>) -> Result<ClaimOutcome, StoreError> {
        let visit = self.gates.visit(&ask.address);
        let (_pass, stood_in_line) = visit.pass().await;
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
            };
            if lease.fence != Fence::UNSEEN {
                self.answers.fill(at, ticket, before, &finished);
            }
        }
        Ok(held)
    }

    /// A change by operators: whatever comes of it, even if nobody waits for that, the copy is not to be trusted.
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
}
