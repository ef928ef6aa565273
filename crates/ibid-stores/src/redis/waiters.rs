//! Waiters in this process: one watch per holder, shared by all of its waiters.
//!
//! A waiter registers first and then queries the store, so that it cannot miss a settlement in between. One waiter of a
//! watch queries; the others use its result. A notified watch leaves the table: later waiters create a new one, and
//! query.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Acquire, Ordering::Release},
    },
};

use ibid::store::{Address, Fence};
use parking_lot::Mutex;
use tokio::{sync::Notify, time::Instant};

#[derive(Debug, Default)]
pub(super) struct WaiterTable {
    by_address: Mutex<HashMap<Address, Vec<Arc<HolderWatch>>>>,
    /// Incremented when messages may have been missed; earlier observations are then void.
    epoch: AtomicU64,
}

#[derive(Debug)]
pub(super) struct HolderWatch {
    seen: Fence,
    pub(super) changed: Notify,
    ended: AtomicBool,
    /// The last observation. Locked during a query, so that one waiter queries for all.
    pub(super) observed: tokio::sync::Mutex<Option<ObservedLease>>,
}

/// An observation that the holder was running.
#[derive(Debug, Clone, Copy)]
pub(super) struct ObservedLease {
    pub(super) observed_at: Instant,
    pub(super) lease_until: Instant,
    pub(super) epoch: u64,
}

/// Registration of a waiter, removed when dropped.
pub(super) struct WatchGuard<'a> {
    table: &'a WaiterTable,
    address: Address,
    pub(super) watch: Arc<HolderWatch>,
}

impl WaiterTable {
    pub(super) fn register(&self, at: &Address, seen: Fence) -> WatchGuard<'_> {
        let mut table = self.by_address.lock();
        let here = table.entry(*at).or_default();
        let watch = match here.iter().find(|watch| watch.seen == seen) {
            Some(watch) => watch.clone(),
            None => {
                let watch = Arc::new(HolderWatch {
                    seen,
                    changed: Notify::new(),
                    ended: AtomicBool::new(false),
                    observed: tokio::sync::Mutex::default(),
                });
                here.push(watch.clone());
                watch
            }
        };
        WatchGuard { table: self, address: *at, watch }
    }

    /// Wakes the waiters of a holder that no longer runs.
    pub(super) fn notify_ended(&self, at: &Address, seen: Fence) {
        let mut table = self.by_address.lock();
        let Some(here) = table.get_mut(at) else { return };
        here.retain(|watch| {
            let goes = watch.seen == seen;
            if goes {
                watch.ended.store(true, Release);
                watch.changed.notify_waiters();
            }
            !goes
        });
        if here.is_empty() {
            table.remove(at);
        }
    }

    /// Makes all waiters query again, because messages may have been missed.
    pub(super) fn invalidate(&self) {
        self.epoch.fetch_add(1, Release);
        for watch in self.by_address.lock().values().flatten() {
            watch.changed.notify_waiters();
        }
    }

    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(Acquire)
    }
}

impl HolderWatch {
    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Acquire)
    }
}

impl Drop for WatchGuard<'_> {
    fn drop(&mut self) {
        let mut table = self.table.by_address.lock();
        let Some(here) = table.get_mut(&self.address) else { return };
        // Two references: the table's and this one. The last waiter removes the watch.
        here.retain(|watch| !(Arc::ptr_eq(watch, &self.watch) && Arc::strong_count(watch) <= 2));
        if here.is_empty() {
            table.remove(&self.address);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_to_leave_leaves_no_trace() {
        let watches = WaiterTable::default();
        let at = Address([1; 32]);
        let (first, second) = (watches.register(&at, Fence(1)), watches.register(&at, Fence(1)));
        let other = watches.register(&at, Fence(2));
        assert!(Arc::ptr_eq(&first.watch, &second.watch));
        drop(first);
        watches.notify_ended(&at, Fence(1));
        assert!(second.watch.has_ended() && !other.watch.has_ended());
        let late = watches.register(&at, Fence(1));
        assert!(!late.watch.has_ended(), "who comes later asks anew");
        drop((second, other, late));
        assert!(watches.by_address.lock().is_empty());
    }
}
