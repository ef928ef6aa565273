//! Counters of what each tenant has used, shared by all gateways on a store.

use std::{collections::HashMap, fmt, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;

use super::{Address, StoreFuture};

/// The maximum number of separate counters per process; all further tenants share one.
const MAX_COUNTERS: usize = 1 << 16;
/// The shared counter for tenants beyond [`MAX_COUNTERS`].
const OVERFLOW_ADDRESS: Address = Address([0; 32]);
/// The minimum time between two scans for expired entries. Each scan reads the whole table.
const PRUNE_INTERVAL: Duration = Duration::from_secs(1);

/// Counts the use of a limited resource.
pub trait Counters: Send + Sync {
    /// Adds `n` to the count of `who` in the current window and returns the sum. A window starts with the first use and
    /// ends after `window`, by the store's clock. Not repeatable: a call whose response is lost may have counted.
    fn reserve<'a>(&'a self, who: &'a Address, n: u64, window: Duration) -> StoreFuture<'a, CounterUsage>;
}

/// The state of a counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CounterUsage {
    /// The count in the current window, including what was just added.
    pub total: u64,
    /// The time until the window ends.
    pub resets_in: Duration,
}

/// Counters in this process. At most 65,536 tenants are counted separately; all further ones share one counter.
#[derive(Default)]
pub struct InMemoryCounters(Mutex<BoundedTable<(u64, Instant)>>);

pub(crate) struct BoundedTable<V> {
    pub(crate) entries: HashMap<Address, V>,
    pruned_at: Option<Instant>,
}

impl<V> BoundedTable<V> {
    /// Returns the table key for `who`, or the shared one if the table is full.
    pub(crate) fn slot_for(&mut self, who: &Address, now: Instant, may_go: impl Fn(&V) -> bool) -> Address {
        if self.entries.len() < MAX_COUNTERS || self.entries.contains_key(who) {
            return *who;
        }
        if self.pruned_at.is_none_or(|looked| now >= looked + PRUNE_INTERVAL) {
            self.pruned_at = Some(now);
            self.entries.retain(|_, value| !may_go(value));
        }
        if self.entries.len() < MAX_COUNTERS { *who } else { OVERFLOW_ADDRESS }
    }
}

impl<V> Default for BoundedTable<V> {
    fn default() -> Self {
        Self { entries: HashMap::new(), pruned_at: None }
    }
}

impl InMemoryCounters {
    fn count(&self, who: &Address, n: u64, window: Duration) -> CounterUsage {
        let now = Instant::now();
        let mut table = self.0.lock();
        let who = table.slot_for(who, now, |(_, until)| *until <= now);
        let entry = table.entries.entry(who).or_insert((0, now));
        if entry.1 <= now {
            // Adding a longer duration could overflow the `Instant`.
            *entry = (0, now + window.min(Duration::from_secs(365 * 24 * 3600)));
        }
        entry.0 = entry.0.saturating_add(n);
        CounterUsage { total: entry.0, resets_in: entry.1 - now }
    }
}

impl Counters for InMemoryCounters {
    fn reserve<'a>(&'a self, who: &'a Address, n: u64, window: Duration) -> StoreFuture<'a, CounterUsage> {
        StoreFuture::ready(Ok(self.count(who, n, window)))
    }
}

impl fmt::Debug for InMemoryCounters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "InMemoryCounters({})", self.0.lock().entries.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_window_begins_with_the_first_use_and_ends_by_itself() {
        let (windows, hour) = (InMemoryCounters::default(), Duration::from_secs(3600));
        let (one, other) = (Address([1; 32]), Address([2; 32]));
        assert_eq!(windows.count(&one, 3, hour), CounterUsage { total: 3, resets_in: hour });
        tokio::time::advance(hour / 2).await;
        assert_eq!(windows.count(&one, 2, hour), CounterUsage { total: 5, resets_in: hour / 2 });
        assert_eq!(windows.count(&other, 1, hour), CounterUsage { total: 1, resets_in: hour });
        tokio::time::advance(hour / 2).await;
        assert_eq!(windows.count(&one, 1, hour), CounterUsage { total: 1, resets_in: hour });
    }

    #[test]
    fn made_up_names_do_not_fill_the_memory() {
        let (windows, hour) = (InMemoryCounters::default(), Duration::from_secs(3600));
        for n in 0..(MAX_COUNTERS as u64 + 1000) {
            let mut who = [7; 32];
            who[..8].copy_from_slice(&n.to_le_bytes());
            windows.count(&Address(who), 1, hour);
        }
        assert!(windows.0.lock().entries.len() <= MAX_COUNTERS + 1);
        assert!(windows.count(&Address([9; 32]), 1, hour).total > 900, "newcomers share one count");
    }
}
