//! Ends that the store could not take yet: told again until it has acknowledged them.
//!
//! A release that is not acknowledged would leave a key blocked for its lease; an answer that waits in the journal
//! must reach the store. One background task works on both while there is something to do, and ends when there is not.

use std::{collections::VecDeque, fmt, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{
    runtime::Handle,
    time::{Instant, sleep},
};

use crate::{
    journal::Journal,
    observe::{Notice, Observer, StoreCall},
    policy::Policy,
    store::{End, Held, Lease, Store, StoreError},
};

/// More ends than this are not kept: their leases lapse instead.
const AT_MOST: usize = 10_000;
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LAST_PAUSE: Duration = Duration::from_secs(2);

/// The queue. Cheap to clone.
#[derive(Clone)]
pub struct Later(Arc<Inner>);

struct Inner {
    store: Arc<dyn Store>,
    observer: Arc<dyn Observer>,
    journal: Option<Arc<Journal>>,
    queue: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    ends: VecDeque<(Lease, End)>,
    /// A task works on it. Set and unset under the lock, so that no end is left without one.
    working: bool,
}

/// Parks a claim whose work was dropped before it settled.
pub(crate) struct Guard<'a> {
    later: &'a Later,
    lease: Option<Lease>,
    keep: Duration,
    hold: Duration,
}

impl Later {
    pub(crate) fn new(store: Arc<dyn Store>, observer: Arc<dyn Observer>, journal: Option<Arc<Journal>>) -> Self {
        let later = Self(Arc::new(Inner { store, observer, journal, queue: Mutex::default() }));
        later.wake();
        later
    }

    /// Settles later.
    pub(crate) fn push(&self, lease: Lease, end: End) {
        {
            let mut queue = self.0.queue.lock();
            if queue.ends.len() == AT_MOST {
                self.0.observer.noticed(&Notice::Dropped(&lease.ask.address));
                return;
            }
            queue.ends.push_back((lease, end));
        }
        self.wake();
    }

    /// Starts the task if there is work and none is at it.
    pub(crate) fn wake(&self) {
        let Ok(runtime) = Handle::try_current() else { return };
        let mut queue = self.0.queue.lock();
        if !queue.working && (!queue.ends.is_empty() || self.0.has_journaled()) {
            queue.working = true;
            runtime.spawn(work(self.0.clone()));
        }
    }

    pub(crate) fn guard(&self, lease: &Lease, policy: &Policy) -> Guard<'_> {
        Guard { later: self, lease: Some(lease.clone()), keep: policy.ttl.max(policy.lease), hold: policy.lease }
    }

    /// How many ends wait for the store.
    pub fn waiting(&self) -> usize {
        let journaled = self.0.journal.as_ref().map_or(0, |journal| journal.len());
        self.0.queue.lock().ends.len() + journaled
    }

    /// Returns once nothing waits any more. The caller bounds it.
    pub async fn flushed(&self) {
        self.wake();
        while self.waiting() > 0 {
            sleep(Duration::from_millis(10)).await;
        }
    }
}

impl Inner {
    fn has_journaled(&self) -> bool {
        self.journal.as_ref().is_some_and(|journal| !journal.is_empty())
    }

    async fn settle(&self, lease: &Lease, end: &End) -> Result<Held, StoreError> {
        let sent = Instant::now();
        let answer = self.store.settle(lease, end).await;
        self.observer.asked(StoreCall::Settle, sent.elapsed());
        answer
    }

    /// Settles the oldest end. `None` if there is none, else whether the store took it.
    async fn one(&self) -> Option<bool> {
        let (lease, end) = self.queue.lock().ends.front().cloned()?;
        match self.settle(&lease, &end).await {
            Ok(held) => {
                if matches!(held, Held::Lost(_)) && matches!(end, End::Complete { .. }) {
                    self.observer.noticed(&Notice::LostClaim(&lease.ask.address));
                }
                self.queue.lock().ends.pop_front();
                Some(true)
            }
            Err(error) => {
                self.observer.noticed(&Notice::StoreFailed { call: "settle", error: &error });
                Some(false)
            }
        }
    }

    /// Brings the journal to the store. Whether the store took all of it.
    async fn drain(&self) -> bool {
        let Some(journal) = &self.journal else { return true };
        for (lease, end) in journal.all() {
            match self.settle(&lease, &end).await {
                Ok(held) => {
                    let notice = match held {
                        Held::Lost(_) => Notice::LostClaim(&lease.ask.address),
                        _ => Notice::Drained(&lease.ask.address),
                    };
                    self.observer.noticed(&notice);
                    if let Err(why) = journal.remove(&lease.ask.address).await {
                        self.observer.noticed(&Notice::JournalFailed(&why));
                        return false;
                    }
                }
                Err(error) => {
                    self.observer.noticed(&Notice::StoreFailed { call: "settle", error: &error });
                    return false;
                }
            }
        }
        true
    }
}

/// Says that no task works any more, even if the task is dropped with its runtime.
struct Working(Arc<Inner>);

impl Drop for Working {
    fn drop(&mut self) {
        self.0.queue.lock().working = false;
    }
}

/// Only this task takes from the queue's front; [`Later::push`] adds to its back.
async fn work(inner: Arc<Inner>) {
    let working = Working(inner);
    let inner = &working.0;
    let mut pause = FIRST_PAUSE;
    loop {
        let taken = match inner.one().await {
            Some(taken) => taken,
            None => inner.drain().await,
        };
        if taken {
            pause = FIRST_PAUSE;
            let mut queue = inner.queue.lock();
            if queue.ends.is_empty() && !inner.has_journaled() {
                // Under the lock: what is pushed from here on finds nobody working and starts anew.
                queue.working = false;
                drop(queue);
                std::mem::forget(working);
                return;
            }
        } else {
            sleep(pause).await;
            pause = (pause * 2).min(LAST_PAUSE);
        }
    }
}

impl Guard<'_> {
    pub(crate) fn disarm(mut self) {
        self.lease = None;
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if let Some(lease) = self.lease.take() {
            self.later.push(lease, End::Park { keep: self.keep, retry_in: self.hold });
        }
    }
}

impl fmt::Debug for Later {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Later").field("waiting", &self.waiting()).finish()
    }
}
