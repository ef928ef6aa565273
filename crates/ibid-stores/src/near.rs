//! Finished answers in this process, around any store; one waiter per key at that store, and few who claim it at the same
//! time, however many are here.
//!
//! What is finished does not change, so a replay need not ask the store again. Invariants:
//!
//! - A copy answers at most for as long as the store said, counted from **before** the call that fetched it, and at
//!   most [`CONFIRMED_FOR`] after that. So it never outlives the entry, and what was forgotten elsewhere unnoticed is
//!   answered for a few seconds more at worst.
//! - A copy is kept only if nothing was invalidated at its place since before that call: what a slow answer brings is
//!   not kept after somebody forgot it ([`Copies::forget`]), or may have ([`Copies::flush`]).
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
    Address, Ask, Claim, Counters, Counts, Cursor, End, Fence, Filter, Finished, Held, Lease, Operators, Page, Promise,
    Store, StoreError, StoreFuture, Swept,
};
use tokio::time::Instant;

pub use self::copies::{CONFIRMED_FOR, Copies};
use self::{gate::Gates, room::Rooms};

mod copies;
mod gate;
mod room;

/// A store with copies of its finished answers in this process.
#[derive(Debug)]
pub struct Near {
    store: Arc<dyn Store>,
    copies: Copies,
    gates: Gates,
    rooms: Rooms,
}

impl Near {
    /// Around `store`, whose channel of invalidations, if it has one, tells the same `copies`.
    pub fn new(store: Arc<dyn Store>, copies: Copies) -> Self {
        Self { store, copies, gates: Gates::default(), rooms: Rooms::default() }
    }

    async fn claim_there(&self, ask: &Arc<Ask>) -> Result<Claim, StoreError> {
        let visit = self.gates.visit(&ask.address);
        let (_pass, stood_in_line) = visit.pass().await;
        if stood_in_line && let Some(finished) = self.copies.find(&ask.address) {
            return Ok(Claim::Done(finished));
        }
        let (ticket, before) = (self.copies.ticket(&ask.address), Instant::now());
        let found = self.store.claim(ask).await?;
        match &found {
            Claim::Done(finished) => self.copies.fill(&ask.address, ticket, before, finished),
            Claim::Granted(lease) => self.copies.granted(&ask.address, lease.ask.token),
            Claim::Busy(_) | Claim::Unknown(_) | Claim::Spent => {}
        }
        Ok(found)
    }

    async fn look(&self, at: &Address) -> Result<Option<Claim>, StoreError> {
        let (ticket, before) = (self.copies.ticket(at), Instant::now());
        let found = self.store.get(at).await?;
        if let Some(Claim::Done(finished)) = &found {
            self.copies.fill(at, ticket, before, finished);
        }
        Ok(found)
    }

    async fn settle_there(&self, lease: &Lease, end: &End) -> Result<Held, StoreError> {
        let at = &lease.ask.address;
        let is_first = self.copies.settles(at, lease.ask.token);
        let (ticket, before) = (self.copies.ticket(at), Instant::now());
        let held = self.store.settle(lease, end).await?;
        if let (End::Complete { failed, record, keep, .. }, Held::Held, true) = (end, &held, is_first) {
            let finished = Finished {
                fence: lease.fence,
                attempt: lease.attempt,
                fingerprint: lease.ask.fingerprint,
                failed: *failed,
                record: record.clone(),
                expires_in: *keep,
            };
            if lease.fence != Fence::UNSEEN {
                self.copies.fill(at, ticket, before, &finished);
            }
        }
        Ok(held)
    }

    /// A change by operators: whatever comes of it, even if nobody waits for that, the copy is not to be trusted.
    async fn changes(&self, at: &Address, change: StoreFuture<'_, Held>) -> Result<Held, StoreError> {
        struct Invalidates<'a>(&'a Copies, &'a Address);
        impl Drop for Invalidates<'_> {
            fn drop(&mut self) {
                self.0.forget(self.1);
            }
        }
        let _invalidates = Invalidates(&self.copies, at);
        change.await
    }
}

impl Store for Near {
    fn claim<'a>(&'a self, ask: &'a Arc<Ask>) -> StoreFuture<'a, Claim> {
        match self.copies.find(&ask.address) {
            Some(finished) => StoreFuture::ready(Ok(Claim::Done(finished))),
            None => StoreFuture::boxed(self.claim_there(ask)),
        }
    }

    fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, Held> {
        self.store.extend(lease, hold)
    }

    fn settle<'a>(&'a self, lease: &'a Lease, end: &'a End) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(self.settle_there(lease, end))
    }

    fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()> {
        StoreFuture::boxed(room::wait(self, at, seen, limit))
    }

    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<Claim>> {
        StoreFuture::boxed(self.look(at))
    }

    fn sweep(&self, at_most: u32) -> StoreFuture<'_, Swept> {
        self.store.sweep(at_most)
    }

    fn operators(&self) -> &dyn Operators {
        self
    }

    fn counters(&self) -> Option<&dyn Counters> {
        self.store.counters()
    }

    fn promise(&self) -> Promise {
        self.store.promise()
    }
}

impl Operators for Near {
    fn list<'a>(&'a self, filter: &'a Filter, from: Cursor, at_most: u32) -> StoreFuture<'a, Page> {
        self.store.operators().list(filter, from, at_most)
    }

    fn resolve<'a>(&'a self, at: &'a Address, seen: Fence, end: &'a End) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(self.changes(at, self.store.operators().resolve(at, seen, end)))
    }

    fn forget<'a>(&'a self, at: &'a Address, seen: Fence) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(self.changes(at, self.store.operators().forget(at, seen)))
    }

    fn replace<'a>(&'a self, at: &'a Address, seen: Fence, record: Bytes) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(self.changes(at, self.store.operators().replace(at, seen, record)))
    }

    fn counts(&self) -> StoreFuture<'_, Counts> {
        self.store.operators().counts()
    }
}
