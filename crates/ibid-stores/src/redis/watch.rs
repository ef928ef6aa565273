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
pub(super) struct Watches {
    table: Mutex<HashMap<Address, Vec<Arc<Watch>>>>,
    /// Raised when messages may have been missed: what was learned before does not count.
    epoch: AtomicU64,
}

#[derive(Debug)]
pub(super) struct Watch {
    seen: Fence,
    pub(super) bell: Notify,
    woken: AtomicBool,
    /// What was last learned. Held while the store is asked, so that one asks for all.
    pub(super) learned: tokio::sync::Mutex<Option<Learned>>,
}

/// The holder ran, by an answer that came then.
#[derive(Debug, Clone, Copy)]
pub(super) struct Learned {
    pub(super) at: Instant,
    /// When its lease ends.
    pub(super) until: Instant,
    pub(super) epoch: u64,
}

/// A place among those who wait; given back when dropped.
pub(super) struct Seat<'a> {
    watches: &'a Watches,
    at: Address,
    pub(super) watch: Arc<Watch>,
}

impl Watches {
    pub(super) fn sit(&self, at: &Address, seen: Fence) -> Seat<'_> {
        let mut table = self.table.lock();
        let here = table.entry(*at).or_default();
        let watch = match here.iter().find(|watch| watch.seen == seen) {
            Some(watch) => watch.clone(),
            None => {
                let watch = Arc::new(Watch {
                    seen,
                    bell: Notify::new(),
                    woken: AtomicBool::new(false),
                    learned: tokio::sync::Mutex::default(),
                });
                here.push(watch.clone());
                watch
            }
        };
        Seat { watches: self, at: *at, watch }
    }

    /// The holder runs no more.
    pub(super) fn wake(&self, at: &Address, seen: Fence) {
        let mut table = self.table.lock();
        let Some(here) = table.get_mut(at) else { return };
        here.retain(|watch| {
            let goes = watch.seen == seen;
            if goes {
                watch.woken.store(true, Release);
                watch.bell.notify_waiters();
            }
            !goes
        });
        if here.is_empty() {
            table.remove(at);
        }
    }

    /// Messages may have been missed: all ask again.
    pub(super) fn doubt(&self) {
        self.epoch.fetch_add(1, Release);
        for watch in self.table.lock().values().flatten() {
            watch.bell.notify_waiters();
        }
    }

    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(Acquire)
    }
}

impl Watch {
    pub(super) fn is_woken(&self) -> bool {
        self.woken.load(Acquire)
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        let mut table = self.watches.table.lock();
        let Some(here) = table.get_mut(&self.at) else { return };
        // One in the table and this one: the last leaves no trace.
        here.retain(|watch| !(Arc::ptr_eq(watch, &self.watch) && Arc::strong_count(watch) <= 2));
        if here.is_empty() {
            table.remove(&self.at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_to_leave_leaves_no_trace() {
        let watches = Watches::default();
        let at = Address([1; 32]);
        let (first, second) = (watches.sit(&at, Fence(1)), watches.sit(&at, Fence(1)));
        let other = watches.sit(&at, Fence(2));
        assert!(Arc::ptr_eq(&first.watch, &second.watch));
        drop(first);
        watches.wake(&at, Fence(1));
        assert!(second.watch.is_woken() && !other.watch.is_woken());
        let late = watches.sit(&at, Fence(1));
        assert!(!late.watch.is_woken(), "who comes later asks anew");
        drop((second, other, late));
        assert!(watches.table.lock().is_empty());
    }
}
