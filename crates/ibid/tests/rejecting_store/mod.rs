//! A store that refuses some settlements for ever, and counts what else is asked of it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use ibid::store::{
    Address, ClaimOutcome, ClaimRequest, Counters, ErrorKind, Fence, Guarantees, Lease, Memory, SettleOutcome,
    Settlement, Store, StoreAdmin, StoreError, StoreFuture, SweepResult,
};
use parking_lot::Mutex;

#[derive(Debug)]
pub(crate) struct RejectingStore {
    inner: Memory,
    /// Larger records are refused.
    pub(crate) max_record_bytes: usize,
    /// What is settled there is refused.
    pub(crate) refused_address: Mutex<Option<Address>>,
    /// While it is set, what it refuses does not reach it.
    pub(crate) drops_refused: AtomicBool,
    /// While it is set, no settlement reaches the store.
    pub(crate) is_unreachable: AtomicBool,
    pub(crate) sweeps: AtomicUsize,
}

impl RejectingStore {
    pub(crate) fn new(largest: usize) -> Arc<Self> {
        Arc::new(Self {
            inner: Memory::default(),
            max_record_bytes: largest,
            refused_address: Mutex::default(),
            drops_refused: AtomicBool::new(false),
            is_unreachable: AtomicBool::new(false),
            sweeps: AtomicUsize::new(0),
        })
    }
}

fn failed_call<T: Send + Unpin>(kind: ErrorKind) -> StoreFuture<'static, T> {
    StoreFuture::ready(Err(StoreError::new(kind, "picky", "as it was told")))
}

impl Store for RejectingStore {
    fn claim<'a>(&'a self, ask: &'a Arc<ClaimRequest>) -> StoreFuture<'a, ClaimOutcome> {
        self.inner.claim(ask)
    }

    fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, SettleOutcome> {
        self.inner.extend(lease, hold)
    }

    fn settle<'a>(&'a self, lease: &'a Lease, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome> {
        let too_large = matches!(end, Settlement::Complete { record, .. } if record.len() > self.max_record_bytes);
        if self.is_unreachable.load(SeqCst) {
            failed_call(ErrorKind::NotApplied)
        } else if too_large || *self.refused_address.lock() == Some(lease.request.address) {
            failed_call(if self.drops_refused.load(SeqCst) { ErrorKind::NotApplied } else { ErrorKind::Rejected })
        } else {
            self.inner.settle(lease, end)
        }
    }

    fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()> {
        self.inner.wait(at, seen, limit)
    }

    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<ClaimOutcome>> {
        self.inner.get(at)
    }

    fn sweep(&self, at_most: u32) -> StoreFuture<'_, SweepResult> {
        self.sweeps.fetch_add(1, SeqCst);
        self.inner.sweep(at_most)
    }

    fn admin(&self) -> &dyn StoreAdmin {
        self.inner.admin()
    }

    fn counters(&self) -> Option<&dyn Counters> {
        self.inner.counters()
    }

    fn guarantees(&self) -> Guarantees {
        self.inner.guarantees()
    }
}
