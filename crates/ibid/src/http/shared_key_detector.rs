//! Notices when two callers send the same key with the same request: mostly a client that changed its credential
//! between retries, and so is taken for somebody else. Operators are told; each caller keeps its own answer.
//!
//! A fixed table of hashes: it forgets, and may miss some, but costs one atomic swap.
//!
//! Invariant: no caller learns of the other, by the time that an answer takes neither. So operators are told by a task of
//! its own, once a second, and whether there is such a task does not depend on what was found.

use std::{
    array, fmt,
    hash::{BuildHasher, RandomState},
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
    store::{Address, Fingerprint},
};

const SLOTS: usize = 4096;
/// How often operators are told.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);
/// Of more than these in that time, nobody is told.
const MAX_REPORTED: usize = 1000;

pub(crate) struct SharedKeyDetector {
    slots: Box<[AtomicU64; SLOTS]>,
    hash_state: RandomState,
    observer: Arc<dyn Observer>,
    /// What operators will be told.
    pending: Mutex<Vec<Address>>,
    /// Whether a task tells them.
    has_reporter: AtomicBool,
    /// Whether anybody was here since it last did.
    used_since_report: AtomicBool,
}

impl SharedKeyDetector {
    pub(crate) fn new(observer: Arc<dyn Observer>) -> Arc<Self> {
        Arc::new(Self {
            slots: Box::new(array::from_fn(|_| AtomicU64::new(0))),
            hash_state: RandomState::new(),
            observer,
            pending: Mutex::default(),
            has_reporter: AtomicBool::new(false),
            used_since_report: AtomicBool::new(false),
        })
    }

    /// Has operators told, in a while, if this key and fingerprint were last seen at another address.
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
        let hash = self.hash_state.hash_one((key, fingerprint.digest));
        let who = u64::from_le_bytes(at.0[..8].try_into().expect("8 of 32")) & 0xffff_ffff;
        let tag = hash & 0xffff_ffff_0000_0000;
        let before = self.slots[hash as usize % SLOTS].swap(tag | who, Relaxed);
        before & 0xffff_ffff_0000_0000 == tag && before & 0xffff_ffff != who && before != 0
    }

    /// Until nobody has come for a while: the next who does starts another.
    async fn report(self: Arc<Self>) {
        while self.used_since_report.swap(false, Relaxed) {
            sleep(REPORT_INTERVAL).await;
            let found = mem::take(&mut *self.pending.lock());
            found.iter().for_each(|at| self.observer.on_event(&EngineEvent::SharedKey(at)));
        }
        // Who comes right now may find it still set; then what they found is told with what is found next.
        self.has_reporter.store(false, Relaxed);
    }
}

impl fmt::Debug for SharedKeyDetector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedKeyDetector").finish_non_exhaustive()
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
