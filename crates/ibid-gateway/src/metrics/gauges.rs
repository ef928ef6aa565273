//! Entry counts, read from the store on demand and cached.
//!
//! One count runs at a time, in its own task. A count that takes longer than [`READ_TIMEOUT`] continues in the
//! background; the next reader gets its result. If the store is down, the last counts are shown.

use std::{sync::Arc, time::Duration};

use ibid::store::{EntryCounts, Store};
use tokio::{
    sync::Mutex,
    time::{Instant, timeout},
};

/// How long a reader waits for a count.
const READ_TIMEOUT: Duration = Duration::from_secs(1);
const MIN_CACHE_TTL: Duration = Duration::from_secs(1);
const MAX_CACHE_TTL: Duration = Duration::from_secs(60);
/// Counting uses at most 1/10 of the time: counts are cached for this many times their duration.
const COUNT_TIME_DIVISOR: u32 = 10;
/// A count that takes longer is aborted.
const COUNT_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug, Clone)]
pub struct StoreGauges(Arc<StoreGaugesInner>);

#[derive(Debug)]
struct StoreGaugesInner {
    store: Arc<dyn Store>,
    /// The latest counts; 0 until the first count ends.
    counts: parking_lot::Mutex<EntryCounts>,
    /// Until when they are valid. Locked while a count runs.
    valid_until: Mutex<Option<Instant>>,
}

impl StoreGauges {
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self(Arc::new(StoreGaugesInner { store, counts: Default::default(), valid_until: Mutex::default() }))
    }

    /// Returns the latest counts without waiting.
    pub fn latest(&self) -> EntryCounts {
        *self.0.counts.lock()
    }

    /// Returns the latest counts, after waiting up to `READ_TIMEOUT` for a running count.
    pub async fn read(&self) -> EntryCounts {
        let this = self.0.clone();
        let _ = timeout(READ_TIMEOUT, tokio::spawn(async move { this.refresh().await })).await;
        *self.0.counts.lock()
    }
}

impl StoreGaugesInner {
    /// Counts, unless the latest counts are still valid once a running count has ended.
    async fn refresh(&self) {
        let mut valid_until = self.valid_until.lock().await;
        let begun = Instant::now();
        if valid_until.is_some_and(|until| begun < until) {
            return;
        }
        let counted = timeout(COUNT_TIMEOUT, self.store.admin().counts()).await;
        let now = Instant::now();
        // A failed count needs no report: failing requests and /readyz show it.
        let mut ttl = MIN_CACHE_TTL;
        if let Ok(Ok(counts)) = counted {
            *self.counts.lock() = counts;
            ttl = ((now - begun) * COUNT_TIME_DIVISOR).clamp(MIN_CACHE_TTL, MAX_CACHE_TTL);
        }
        *valid_until = Some(now + ttl);
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use ibid::store::{Address, ClaimOutcome, ClaimRequest, ClaimToken, ErrorKind, Fingerprint, Memory, Tags};
    use ibid_testkit::wrappers::{CallFilter, DelayedStore, FailingStore};
    use tokio::time::sleep;

    use super::*;

    type GaugesTestStore = FailingStore<DelayedStore<Memory>>;

    fn store() -> Arc<GaugesTestStore> {
        Arc::new(FailingStore::new(DelayedStore::new(Memory::default())))
    }

    async fn claim(store: &GaugesTestStore, at: u8) {
        let ask = ClaimRequest {
            address: Address([at; 32]),
            token: ClaimToken::mint(),
            fingerprint: Fingerprint::NONE,
            tags: Tags::new("", "", "", ""),
            label: Bytes::new(),
            lease: Duration::from_secs(600),
            ttl: Duration::from_secs(600),
            take_over: None,
        };
        let claim = store.inner().inner().claim(&Arc::new(ask)).await;
        assert!(matches!(claim, Ok(ClaimOutcome::Granted(_))), "{claim:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn numbers_are_kept_for_a_moment_and_then_counted_anew() {
        let store = store();
        let gauges = StoreGauges::new(store.clone());
        assert_eq!(gauges.read().await.processing, 0);
        claim(&store, 1).await;
        assert_eq!(gauges.read().await.processing, 0, "still good");
        sleep(MIN_CACHE_TTL).await;
        assert_eq!(gauges.read().await.processing, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_fails_leaves_the_last_numbers() {
        let store = store();
        let gauges = StoreGauges::new(store.clone());
        claim(&store, 1).await;
        let before = gauges.read().await;
        assert_eq!(before.processing, 1);
        claim(&store, 2).await;
        store.fail(CallFilter::All, ErrorKind::NotApplied);
        sleep(MIN_CACHE_TTL).await;
        assert_eq!(gauges.read().await, before);
        store.heal();
        sleep(MIN_CACHE_TTL).await;
        assert_eq!(gauges.read().await.processing, 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_hangs_is_waited_for_no_longer_than_said_and_asked_once() {
        let store = store();
        let gauges = StoreGauges::new(store.clone());
        claim(&store, 1).await;
        store.inner().delay(CallFilter::All, Duration::from_secs(3600), Duration::ZERO);
        let begun = Instant::now();
        assert_eq!(gauges.read().await, EntryCounts::default());
        assert_eq!(begun.elapsed(), READ_TIMEOUT);
        // The store responds again, but the running count still hangs until its timeout.
        store.inner().heal();
        sleep(MIN_CACHE_TTL).await;
        assert_eq!(gauges.read().await, EntryCounts::default());
        sleep(COUNT_TIMEOUT).await;
        assert_eq!(gauges.read().await.processing, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_count_is_found_by_who_looks_later_and_not_repeated_at_once() {
        let store = store();
        let gauges = StoreGauges::new(store.clone());
        claim(&store, 1).await;
        store.inner().delay(CallFilter::All, Duration::from_secs(3), Duration::ZERO);
        assert_eq!(gauges.read().await.processing, 0);
        sleep(Duration::from_secs(3)).await;
        let begun = Instant::now();
        assert_eq!((gauges.read().await.processing, begun.elapsed()), (1, Duration::ZERO));
        sleep(Duration::from_secs(25)).await;
        let begun = Instant::now();
        assert_eq!((gauges.read().await.processing, begun.elapsed()), (1, Duration::ZERO), "3 s in 30");
        sleep(Duration::from_secs(5)).await;
        let begun = Instant::now();
        assert_eq!((gauges.read().await.processing, begun.elapsed()), (1, READ_TIMEOUT), "counted anew");
    }
}
