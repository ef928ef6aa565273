//! What only the store knows: asked when somebody looks, and never for longer than they want to wait.
//!
//! At most one count runs at a time, in a task of its own. One that takes longer than [`PATIENCE`] goes on, and whoever
//! looks next finds what it found; a store that is down leaves the last known numbers in place.

use std::{sync::Arc, time::Duration};

use ibid::store::{Counts, Store};
use parking_lot::Mutex;
use tokio::{
    sync::watch,
    time::{Instant, timeout},
};

/// How long one who looks waits for the store.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long numbers are good for at least.
const FRESH: Duration = Duration::from_secs(1);
/// How long numbers are good for at most.
const STALE: Duration = Duration::from_secs(60);
/// A count that takes long is not begun again at once: of the time, at most one part in this many goes into counting.
const SHARE: u32 = 10;
/// A count that takes longer than this is given up.
const GIVE_UP: Duration = Duration::from_secs(60);

/// The numbers of a store.
#[derive(Debug, Clone)]
pub struct Gauges(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    store: Arc<dyn Store>,
    last: Mutex<Last>,
}

#[derive(Debug, Default)]
struct Last {
    counts: Counts,
    /// Not before the first count.
    good_until: Option<Instant>,
    /// Closed once the count has ended, however it did.
    counting: Option<watch::Receiver<()>>,
}

impl Gauges {
    /// Of this store. All are 0 until it has been counted.
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self(Arc::new(Inner { store, last: Mutex::default() }))
    }

    /// The latest that can be had in time.
    pub async fn read(&self) -> Counts {
        let counting = self.counting();
        if let Some(mut counting) = counting {
            // Nothing is ever sent: it ends by being closed.
            let _ = timeout(PATIENCE, counting.changed()).await;
        }
        self.0.last.lock().counts
    }

    /// The count to wait for, begun if need be. `None` if the last one is still good.
    fn counting(&self) -> Option<watch::Receiver<()>> {
        let mut last = self.0.last.lock();
        if let Some(counting) = last.counting.as_ref().filter(|counting| counting.has_changed().is_ok()) {
            return Some(counting.clone());
        }
        if last.good_until.is_some_and(|until| Instant::now() < until) {
            return None;
        }
        let (done, counting) = watch::channel(());
        last.counting = Some(counting.clone());
        let this = self.0.clone();
        tokio::spawn(async move {
            this.count().await;
            drop(done);
        });
        Some(counting)
    }
}

impl Inner {
    async fn count(&self) {
        let begun = Instant::now();
        let counted = timeout(GIVE_UP, self.store.operators().counts()).await;
        let now = Instant::now();
        let mut last = self.last.lock();
        // A failure is told by the calls that matter, and by /readyz.
        last.good_until = Some(now + FRESH);
        if let Ok(Ok(counts)) = counted {
            last.counts = counts;
            last.good_until = Some(now + ((now - begun) * SHARE).clamp(FRESH, STALE));
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use ibid::store::{Address, Ask, Claim, ErrorKind, Fingerprint, Memory, Tags, Token};
    use ibid_testkit::wrappers::{Calls, Delays, FailsOnDemand};
    use tokio::time::sleep;

    use super::*;

    type Failing = FailsOnDemand<Delays<Memory>>;

    fn store() -> Arc<Failing> {
        Arc::new(FailsOnDemand::new(Delays::new(Memory::default())))
    }

    async fn claim(store: &Failing, at: u8) {
        let ask = Ask {
            address: Address([at; 32]),
            token: Token::mint(),
            fingerprint: Fingerprint::NONE,
            tags: Tags::new("", "", "", ""),
            label: Bytes::new(),
            hold: Duration::from_secs(600),
            keep: Duration::from_secs(600),
            over: None,
        };
        let claim = store.inner().inner().claim(&Arc::new(ask)).await;
        assert!(matches!(claim, Ok(Claim::Granted(_))), "{claim:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn numbers_are_kept_for_a_moment_and_then_counted_anew() {
        let store = store();
        let gauges = Gauges::new(store.clone());
        assert_eq!(gauges.read().await.processing, 0);
        claim(&store, 1).await;
        assert_eq!(gauges.read().await.processing, 0, "still good");
        sleep(FRESH).await;
        assert_eq!(gauges.read().await.processing, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_fails_leaves_the_last_numbers() {
        let store = store();
        let gauges = Gauges::new(store.clone());
        claim(&store, 1).await;
        let before = gauges.read().await;
        assert_eq!(before.processing, 1);
        claim(&store, 2).await;
        store.fail(Calls::All, ErrorKind::NotApplied);
        sleep(FRESH).await;
        assert_eq!(gauges.read().await, before);
        store.heal();
        sleep(FRESH).await;
        assert_eq!(gauges.read().await.processing, 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_hangs_is_waited_for_no_longer_than_said_and_asked_once() {
        let store = store();
        let gauges = Gauges::new(store.clone());
        claim(&store, 1).await;
        store.inner().delay(Calls::All, Duration::from_secs(3600), Duration::ZERO);
        let begun = Instant::now();
        assert_eq!(gauges.read().await, Counts::default());
        assert_eq!(begun.elapsed(), PATIENCE);
        // It answers again, but the count that was begun still hangs: given up in the end.
        store.inner().heal();
        sleep(FRESH).await;
        assert_eq!(gauges.read().await, Counts::default());
        sleep(GIVE_UP).await;
        assert_eq!(gauges.read().await.processing, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_count_is_found_by_who_looks_later_and_not_repeated_at_once() {
        let store = store();
        let gauges = Gauges::new(store.clone());
        claim(&store, 1).await;
        store.inner().delay(Calls::All, Duration::from_secs(3), Duration::ZERO);
        assert_eq!(gauges.read().await.processing, 0);
        sleep(Duration::from_secs(3)).await;
        let begun = Instant::now();
        assert_eq!((gauges.read().await.processing, begun.elapsed()), (1, Duration::ZERO));
        sleep(Duration::from_secs(25)).await;
        let begun = Instant::now();
        assert_eq!((gauges.read().await.processing, begun.elapsed()), (1, Duration::ZERO), "3 s in 30");
        sleep(Duration::from_secs(5)).await;
        let begun = Instant::now();
        assert_eq!((gauges.read().await.processing, begun.elapsed()), (1, PATIENCE), "counted anew");
    }
}
