//! Those who wait in this process: one watch for all that wait for the same holder.
//!
//! A waiter takes its seat first and asks the store then, so that an end that comes in between finds it. One of those
//! who share a watch asks; the others go by what it learned. A watch that was woken is off the table: who comes later
//! makes a new one, and asks.

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
    /// Raised when messages may have been missed: what was learned before does not count.
    epoch: AtomicU64,
}

#[derive(Debug)]
pub(super) struct HolderWatch {
    seen: Fence,
    pub(super) changed: Notify,
    ended: AtomicBool,
    /// What was last learned. Held while the store is asked, so that one asks for all.
    pub(super) observed: tokio::sync::Mutex<Option<ObservedLease>>,
}

/// The holder ran, by an answer that came then.
#[derive(Debug, Clone, Copy)]
pub(super) struct ObservedLease {
    pub(super) observed_at: Instant,
    /// When its lease ends.
    pub(super) lease_until: Instant,
    pub(super) epoch: u64,
}

/// A place among those who wait; given back when dropped.
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

    /// The holder runs no more.
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

    /// Messages may have been missed: all ask again.
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
        // One in the table and this one: the last leaves no trace.
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
