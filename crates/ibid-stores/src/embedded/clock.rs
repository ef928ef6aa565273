//! The store's clock: wall time at opening plus monotonic time, never behind what the log has seen.
//!
//! Invariant: two readings never go backwards, across threads and restarts. Background threads use
//! [`StoreClock::latest`]: for them time stands still while nobody calls, when nothing has to be done anyway.

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
    /// From a function. It is called on the threads of those who call the store.
    pub fn new(read: impl Fn() -> Duration + Send + Sync + 'static) -> Self {
        Self(Arc::new(read))
    }
}

impl Default for TimeSource {
    /// Wall time now, and from then on monotonic time: steps of the wall clock are not seen.
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
    /// Added to what the source says, so that time goes on from what the log has seen.
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

    /// The latest that anybody was told.
    pub(super) fn latest(&self) -> UnixMicros {
        self.latest.load(SeqCst)
    }
}
