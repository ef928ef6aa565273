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
    observe::{Notice, Observer},
    store::{Address, Fingerprint},
};

const SLOTS: usize = 4096;
/// How often operators are told.
const TELL_EVERY: Duration = Duration::from_secs(1);
/// Of more than these in that time, nobody is told.
const AT_MOST: usize = 1000;

pub(crate) struct Twins {
    slots: Box<[AtomicU64; SLOTS]>,
    hash: RandomState,
    observer: Arc<dyn Observer>,
    /// What operators will be told.
    found: Mutex<Vec<Address>>,
    /// Whether a task tells them.
    telling: AtomicBool,
    /// Whether anybody was here since it last did.
    used: AtomicBool,
}

impl Twins {
    pub(crate) fn new(observer: Arc<dyn Observer>) -> Arc<Self> {
        Arc::new(Self {
            slots: Box::new(array::from_fn(|_| AtomicU64::new(0))),
            hash: RandomState::new(),
            observer,
            found: Mutex::default(),
            telling: AtomicBool::new(false),
            used: AtomicBool::new(false),
        })
    }

    /// Has operators told, in a while, if this key and fingerprint were last seen at another address.
    pub(crate) fn look(self: &Arc<Self>, key: &str, fingerprint: &Fingerprint, at: &Address) {
        if self.seen_elsewhere(key, fingerprint, at) {
            let mut found = self.found.lock();
            if found.len() < AT_MOST {
                found.push(*at);
            }
        }
        self.used.store(true, Relaxed);
        if !self.telling.load(Relaxed)
            && let Ok(runtime) = Handle::try_current()
            && !self.telling.swap(true, Relaxed)
        {
            runtime.spawn(self.clone().tell());
        }
    }

    fn seen_elsewhere(&self, key: &str, fingerprint: &Fingerprint, at: &Address) -> bool {
        let hash = self.hash.hash_one((key, fingerprint.digest));
        let who = u64::from_le_bytes(at.0[..8].try_into().expect("8 of 32")) & 0xffff_ffff;
        let tag = hash & 0xffff_ffff_0000_0000;
        let before = self.slots[hash as usize % SLOTS].swap(tag | who, Relaxed);
        before & 0xffff_ffff_0000_0000 == tag && before & 0xffff_ffff != who && before != 0
    }

    /// Until nobody has come for a while: the next who does starts another.
    async fn tell(self: Arc<Self>) {
        while self.used.swap(false, Relaxed) {
            sleep(TELL_EVERY).await;
            let found = mem::take(&mut *self.found.lock());
            found.iter().for_each(|at| self.observer.noticed(&Notice::SharedKey(at)));
        }
        // Who comes right now may find it still set; then what they found is told with what is found next.
        self.telling.store(false, Relaxed);
    }
}

impl fmt::Debug for Twins {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Twins").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Default)]
    struct Told(Mutex<Vec<Address>>);

    impl Observer for Told {
        fn noticed(&self, notice: &Notice<'_>) {
            if let Notice::SharedKey(at) = notice {
                self.0.lock().push(**at);
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn only_another_address_with_the_same_key_and_request_counts_and_nobody_is_told_at_once() {
        let told = Arc::new(Told::default());
        let twins = Twins::new(told.clone());
        let (a, b) = (Address([1; 32]), Address([2; 32]));
        let print = Fingerprint::of_bytes(b"x");
        twins.look("k", &print, &a);
        twins.look("k", &print, &a);
        twins.look("k", &Fingerprint::of_bytes(b"y"), &b);
        twins.look("other", &print, &b);
        sleep(TELL_EVERY * 3).await;
        assert_eq!(*told.0.lock(), []);
        twins.look("k", &print, &b);
        assert_eq!(*told.0.lock(), [], "whoever asks does not wait for that");
        sleep(TELL_EVERY * 3).await;
        assert_eq!(*told.0.lock(), [b]);
        assert!(!twins.telling.load(Relaxed), "nobody works where nobody comes");
        twins.look("k", &print, &a);
        sleep(TELL_EVERY * 3).await;
        assert_eq!(*told.0.lock(), [b, a]);
    }

    #[tokio::test(start_paused = true)]
    async fn many_at_once_are_not_all_told() {
        let told = Arc::new(Told::default());
        let twins = Twins::new(told.clone());
        let print = Fingerprint::of_bytes(b"x");
        for n in 0..3 * AT_MOST {
            twins.look("k", &print, &Address([(n % 2) as u8 + 1; 32]));
        }
        sleep(TELL_EVERY * 3).await;
        assert_eq!(told.0.lock().len(), AT_MOST);
    }
}
