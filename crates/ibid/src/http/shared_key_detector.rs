//! Detects when two callers send the same key with the same request. Usually a client changed its credential between
//! retries and is treated as another caller. Operators are notified; each caller keeps its own response.
//!
//! A fixed table of hashes: it forgets and may miss cases, but costs one atomic swap.
//!
//! Invariant: no caller can detect the other one, not even by response time. Therefore a background task reports once
//! per second, and it runs whether or not a shared key was found.

use std::{
    array,
    hash::{BuildHasher, Hasher},
    mem,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{runtime::Handle, time::sleep};

use crate::{
    observe::{EngineEvent, Observer},
    store::{Address, AddressHashBuilder, Fingerprint},
};

const SLOTS: usize = 4096;
const REPORT_INTERVAL: Duration = Duration::from_secs(1);
/// The maximum number of reports per interval; further ones are dropped.
const MAX_REPORTED: usize = 1000;

pub(crate) struct SharedKeyDetector {
    slots: Box<[AtomicU64; SLOTS]>,
    hash_state: AddressHashBuilder,
    observer: Arc<dyn Observer>,
    pending: Mutex<Vec<Address>>,
    /// Whether the reporting task is running.
    has_reporter: AtomicBool,
    /// Whether a request was checked since the last report.
    used_since_report: AtomicBool,
}

impl SharedKeyDetector {
    pub(crate) fn new(observer: Arc<dyn Observer>) -> Arc<Self> {
        Arc::new(Self {
            slots: Box::new(array::from_fn(|_| AtomicU64::new(0))),
            hash_state: AddressHashBuilder::default(),
            observer,
            pending: Mutex::default(),
            has_reporter: AtomicBool::new(false),
            used_since_report: AtomicBool::new(false),
        })
    }

    /// Queues a report if this key and fingerprint were last seen at another address.
    pub(crate) fn check(self: &Arc<Self>, key: &str, fingerprint: &Fingerprint, at: &Address) {
        if self.seen_elsewhere(key, fingerprint, at) {
            let mut found = self.pending.lock();
            if found.len() < MAX_REPORTED {
                found.push(*at);
            }
        }
        self.used_since_report.store(true, Relaxed);
        if !self.has_reporter.load(Relaxed)
            && let Ok(runtime) = Handle::try_current()
            && !self.has_reporter.swap(true, Relaxed)
        {
            runtime.spawn(self.clone().report());
        }
    }

    fn seen_elsewhere(&self, key: &str, fingerprint: &Fingerprint, at: &Address) -> bool {
        let mut hasher = self.hash_state.build_hasher();
        hasher.write(key.as_bytes());
        hasher.write(&fingerprint.digest);
        let hash = hasher.finish();
        let who = u64::from_le_bytes(at.0[..8].try_into().expect("8 of 32")) & 0xffff_ffff;
        let tag = hash & 0xffff_ffff_0000_0000;
        let before = self.slots[hash as usize % SLOTS].swap(tag | who, Relaxed);
        before & 0xffff_ffff_0000_0000 == tag && before & 0xffff_ffff != who && before != 0
    }

    /// Runs until no request was checked during an interval; the next request starts it again.
    async fn report(self: Arc<Self>) {
        while self.used_since_report.swap(false, Relaxed) {
            sleep(REPORT_INTERVAL).await;
            let found = mem::take(&mut *self.pending.lock());
            found.iter().for_each(|at| self.observer.on_event(&EngineEvent::SharedKey(at)));
        }
        // A request at this moment may still see `true`. Its finding is then reported together with the next one.
        self.has_reporter.store(false, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Default)]
    struct SharedKeyRecorder(Mutex<Vec<Address>>);

    impl Observer for SharedKeyRecorder {
        fn on_event(&self, notice: &EngineEvent<'_>) {
            if let EngineEvent::SharedKey(at) = notice {
                self.0.lock().push(**at);
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn only_another_address_with_the_same_key_and_request_counts_and_nobody_is_told_at_once() {
        let told = Arc::new(SharedKeyRecorder::default());
        let twins = SharedKeyDetector::new(told.clone());
        let (a, b) = (Address([1; 32]), Address([2; 32]));
        let print = Fingerprint::of_bytes(b"x");
        twins.check("k", &print, &a);
        twins.check("k", &print, &a);
        twins.check("k", &Fingerprint::of_bytes(b"y"), &b);
        twins.check("other", &print, &b);
        sleep(REPORT_INTERVAL * 3).await;
        assert_eq!(*told.0.lock(), []);
        twins.check("k", &print, &b);
        assert_eq!(*told.0.lock(), [], "whoever asks does not wait for that");
        sleep(REPORT_INTERVAL * 3).await;
        assert_eq!(*told.0.lock(), [b]);
        assert!(!twins.has_reporter.load(Relaxed), "nobody works where nobody comes");
        twins.check("k", &print, &a);
        sleep(REPORT_INTERVAL * 3).await;
        assert_eq!(*told.0.lock(), [b, a]);
    }

    #[tokio::test(start_paused = true)]
    async fn many_at_once_are_not_all_told() {
        let told = Arc::new(SharedKeyRecorder::default());
        let twins = SharedKeyDetector::new(told.clone());
        let print = Fingerprint::of_bytes(b"x");
        for n in 0..3 * MAX_REPORTED {
            twins.check("k", &print, &Address([(n % 2) as u8 + 1; 32]));
        }
        sleep(REPORT_INTERVAL * 3).await;
        assert_eq!(told.0.lock().len(), MAX_REPORTED);
    }
}
