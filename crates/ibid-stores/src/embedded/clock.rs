//! The store's clock: wall time at opening plus monotonic time, never behind the times in the log.
//!
//! Invariant: readings never go backwards, across threads and restarts. Background threads use [`StoreClock::latest`]:
//! for them time stands still while no calls arrive, when there is no work anyway.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, SystemTime},
};

use tokio::time::Instant;

use super::entry::{UnixMicros, micros};

/// A source of time, as the duration since the Unix epoch.
#[derive(Clone)]
pub struct TimeSource(Arc<dyn Fn() -> Duration + Send + Sync>);

impl TimeSource {
    /// Creates a time source from a function. Callers of the store run it on their own threads.
    pub fn new(read: impl Fn() -> Duration + Send + Sync + 'static) -> Self {
        Self(Arc::new(read))
    }
}

impl Default for TimeSource {
    /// Wall time at creation, then monotonic time: later steps of the wall clock have no effect.
    fn default() -> Self {
        let began_at = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let began = Instant::now();
        Self::new(move || began_at + began.elapsed())
    }
}

impl fmt::Debug for TimeSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TimeSource")
    }
}

#[derive(Debug)]
pub(super) struct StoreClock {
    source: TimeSource,
    /// Added to the source's time, so that time continues from the latest time in the log.
    offset: UnixMicros,
    latest: AtomicU64,
}

impl StoreClock {
    pub(super) fn new(source: TimeSource, seen: UnixMicros) -> Self {
        let offset = seen.saturating_sub(micros(source.0()));
        Self { source, offset, latest: AtomicU64::new(seen) }
    }

    pub(super) fn now(&self) -> UnixMicros {
        let now = micros(self.source.0()) + self.offset;
        self.latest.fetch_max(now, SeqCst).max(now)
    }

    /// Returns the latest reading, without reading the clock.
    pub(super) fn latest(&self) -> UnixMicros {
        self.latest.load(SeqCst)
    }
}
