//! A store that refuses some settlements for ever, and counts what else is asked of it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use ibid::store::{
    Address, Ask, Claim, Counters, End, ErrorKind, Fence, Held, Lease, Memory, Operators, Promise, Store, StoreError,
    StoreFuture, Swept,
};
use parking_lot::Mutex;

#[derive(Debug)]
pub(crate) struct Picky {
    inner: Memory,
    /// Larger records are refused.
    pub(crate) largest: usize,
    /// What is settled there is refused.
    pub(crate) refuses: Mutex<Option<Address>>,
    /// While it is set, what it refuses does not reach it.
    pub(crate) loses: AtomicBool,
    /// While it is set, no settlement reaches the store.
    pub(crate) away: AtomicBool,
    pub(crate) sweeps: AtomicUsize,
}

impl Picky {
    pub(crate) fn new(largest: usize) -> Arc<Self> {
        Arc::new(Self {
            inner: Memory::default(),
            largest,
            refuses: Mutex::default(),
            loses: AtomicBool::new(false),
            away: AtomicBool::new(false),
            sweeps: AtomicUsize::new(0),
        })
    }
}

fn failed<T: Send + Unpin>(kind: ErrorKind) -> StoreFuture<'static, T> {
    StoreFuture::ready(Err(StoreError::new(kind, "picky", "as it was told")))
}

impl Store for Picky {
    fn claim<'a>(&'a self, ask: &'a Arc<Ask>) -> StoreFuture<'a, Claim> {
        self.inner.claim(ask)
    }

    fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, Held> {
        self.inner.extend(lease, hold)
    }

    fn settle<'a>(&'a self, lease: &'a Lease, end: &'a End) -> StoreFuture<'a, Held> {
        let too_large = matches!(end, End::Complete { record, .. } if record.len() > self.largest);
        if self.away.load(SeqCst) {
            failed(ErrorKind::NotApplied)
        } else if too_large || *self.refuses.lock() == Some(lease.ask.address) {
            failed(if self.loses.load(SeqCst) { ErrorKind::NotApplied } else { ErrorKind::Rejected })
        } else {
            self.inner.settle(lease, end)
        }
    }

    fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()> {
        self.inner.wait(at, seen, limit)
    }

    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<Claim>> {
        self.inner.get(at)
    }

    fn sweep(&self, at_most: u32) -> StoreFuture<'_, Swept> {
        self.sweeps.fetch_add(1, SeqCst);
        self.inner.sweep(at_most)
    }

    fn operators(&self) -> &dyn Operators {
        self.inner.operators()
    }

    fn counters(&self) -> Option<&dyn Counters> {
        self.inner.counters()
    }

    fn promise(&self) -> Promise {
        self.inner.promise()
    }
}
