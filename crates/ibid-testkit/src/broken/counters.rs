use std::{collections::HashMap, time::Duration};

use ibid::store::{Address, CounterUsage, Counters, StoreFuture};
use parking_lot::Mutex;
use tokio::time::Instant;

use super::Bug;

/// Maximum length of a window.
const MAX_WINDOW: Duration = Duration::from_secs(365 * 24 * 3600);

/// Counters with one bug, if the bug concerns counters.
#[derive(Debug)]
pub(super) struct FaultyCounters {
    pub(super) bug: Bug,
    /// The count and the end of each window.
    pub(super) windows: Mutex<HashMap<Address, (u64, Instant)>>,
}

impl FaultyCounters {
    async fn count(&self, who: &Address, n: u64, window: Duration) -> CounterUsage {
        let who = if self.bug == Bug::CountsAllTenantsTogether { Address([0; 32]) } else { *who };
        let window = match self.bug {
            // Milliseconds in a signed 32-bit number.
            Bug::WindowsOverflow => Duration::from_millis(u64::try_from(window.as_millis() as i32).unwrap_or(0)),
            _ => window.min(MAX_WINDOW),
        };
        let seen = self.windows.lock().get(&who).copied();
        if self.bug == Bug::CountsRace {
            tokio::task::yield_now().await;
        }
        let now = Instant::now();
        let mut windows = self.windows.lock();
        let seen = if self.bug == Bug::CountsRace { seen } else { windows.get(&who).copied() };
        let (used, until) = match (self.bug, seen) {
            (Bug::WindowsNeverEnd, Some(seen)) => seen,
            (Bug::WindowsSlide, Some((used, until))) if until > now => (used, now + window),
            (_, Some(seen)) if seen.1 > now => seen,
            _ => (0, now + window),
        };
        let used = used.saturating_add(n);
        windows.insert(who, (used, until));
        CounterUsage { total: used, resets_in: until.saturating_duration_since(now) }
    }
}

impl Counters for FaultyCounters {
    fn reserve<'a>(&'a self, who: &'a Address, n: u64, window: Duration) -> StoreFuture<'a, CounterUsage> {
        StoreFuture::boxed(async move { Ok(self.count(who, n, window).await) })
    }
}
