//! Ends that the store could not take yet: told again until it has acknowledged them.
//!
//! A release that is not acknowledged would leave a key blocked for its lease; an answer that waits in the journal
//! must reach the store. One background task works on both while there is something to do, and ends when there is not.
//! An end that the store refuses waits for its next attempt by itself; if its record may be too large for the store, the
//! answer is recorded without its body, as one above `max_response` is.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    fmt,
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use tokio::{
    runtime::Handle,
    sync::Notify,
    time::{Instant, sleep, timeout_at},
};

use crate::{
    journal::Journal,
    observe::{Notice, Observer, StoreCall},
    policy::Policy,
    record::{Record, RecordBody},
    store::{Address, End, ErrorKind, Held, Lease, Store, StoreError},
};

/// More ends than this, or more bytes of them, are not kept: their leases lapse instead.
const MAX_QUEUED: usize = 10_000;
const MAX_QUEUED_BYTES: usize = 64 << 20;
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LAST_PAUSE: Duration = Duration::from_secs(2);
/// Of one end. Longer than the pause between any two, so that the others have their turn: only a part of a store may be away.
const LAST_RETRY: Duration = Duration::from_secs(5);
/// After so many ends in a row that did not reach the store, it is left alone for a while.
const MISSES_IN_A_ROW: u32 = 3;
/// An end that the store has refused for so long is given up.
const GIVE_UP_AFTER: Duration = Duration::from_secs(60 * 60);
/// Records smaller than this are not refused for their size.
const LARGE_RECORD: usize = 64 << 10;

/// The queue. Cheap to clone.
#[derive(Clone)]
pub struct Later(Arc<Inner>);

struct Inner {
    store: Arc<dyn Store>,
    observer: Arc<dyn Observer>,
    journal: Option<Arc<Journal>>,
    queue: Mutex<Queue>,
    /// Something was added.
    added: Notify,
}

#[derive(Default)]
struct Queue {
    /// Only the task removes from it; others add to its back.
    ends: VecDeque<Waiting>,
    bytes: usize,
    /// A task works on it. Set and unset under the lock, so that no end is left without one.
    working: bool,
}

struct Waiting {
    lease: Lease,
    end: End,
    retry: Retry,
}

/// When an end is told again. Each has its own pause: one that is refused for ever does not hold up the others.
#[derive(Clone, Copy)]
struct Retry {
    due: Instant,
    pause: Duration,
    refused_since: Option<Instant>,
}

/// What became of one attempt to settle.
enum Told {
    Taken,
    /// The store refuses this one. Others may be taken.
    Refused,
    /// The store is away.
    Away,
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
        let later = Self(Arc::new(Inner { store, observer, journal, queue: Mutex::default(), added: Notify::new() }));
        later.wake();
        later
    }

    /// Settles later.
    pub(crate) fn push(&self, lease: Lease, mut end: End) {
        {
            let mut queue = self.0.queue.lock();
            if queue.bytes + bytes_of(&end) > MAX_QUEUED_BYTES
                && let Some(short) = without_body(&end)
            {
                end = short;
            }
            let bytes = bytes_of(&end);
            if queue.ends.len() == MAX_QUEUED || queue.bytes + bytes > MAX_QUEUED_BYTES {
                self.0.observer.noticed(&Notice::Dropped(&lease.ask.address));
                return;
            }
            queue.bytes += bytes;
            queue.ends.push_back(Waiting { lease, end, retry: Retry::new() });
        }
        self.wake();
    }

    /// Starts the task if there is work and none is at it.
    pub(crate) fn wake(&self) {
        self.0.added.notify_one();
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

    /// Tells the store of one end. A record that it refuses for its size is recorded without its body.
    async fn tell(&self, lease: &Lease, end: &End) -> Result<Held, StoreError> {
        let refused = match self.settle(lease, end).await {
            Err(error) if error.kind == ErrorKind::Rejected => error,
            told => return told,
        };
        let Some(short) = without_body(end) else { return Err(refused) };
        let told = self.settle(lease, &short).await;
        if told.is_ok() {
            self.observer.noticed(&Notice::Shortened(&lease.ask.address));
        }
        told
    }

    /// Settles the first end that is due. `None` if there is none.
    async fn one(&self) -> Option<Told> {
        let now = Instant::now();
        let (at, lease, end) = {
            let queue = self.queue.lock();
            let (at, waiting) = queue.ends.iter().enumerate().find(|(_, waiting)| waiting.retry.due <= now)?;
            (at, waiting.lease.clone(), waiting.end.clone())
        };
        let answer = self.tell(&lease, &end).await;
        if let Ok(Held::Lost(_)) = &answer
            && matches!(end, End::Complete { .. })
        {
            self.observer.noticed(&Notice::LostClaim(&lease.ask.address));
        }
        let (told, given_up) = {
            let mut queue = self.queue.lock();
            let told = answer.as_ref().map_or_else(|error| queue.ends[at].retry.failed(error), |_| Told::Taken);
            let given_up = queue.ends[at].retry.is_given_up();
            let waiting = queue.ends.remove(at).expect("only this task removes");
            if given_up || matches!(told, Told::Taken) {
                queue.bytes -= bytes_of(&end);
            } else {
                queue.ends.push_back(waiting);
            }
            (told, given_up)
        };
        if let Err(error) = &answer {
            self.observer.noticed(&Notice::StoreFailed { call: "settle", error });
        }
        if given_up {
            self.observer.noticed(&Notice::Dropped(&lease.ask.address));
        }
        Some(told)
    }

    /// Brings what is due of the journal to the store.
    async fn drain(&self, retries: &mut HashMap<Address, Retry>) -> Told {
        let Some(journal) = &self.journal else { return Told::Taken };
        let all = journal.all();
        let known: HashSet<_> = all.iter().map(|(lease, _)| lease.ask.address).collect();
        retries.retain(|at, _| known.contains(at));
        let mut misses = 0;
        for (lease, end) in all {
            let at = &lease.ask.address;
            let retry = retries.entry(*at).or_insert_with(Retry::new);
            if retry.due > Instant::now() {
                continue;
            }
            let told = self.tell(&lease, &end).await;
            let notice = match &told {
                Ok(Held::Lost(_)) => Notice::LostClaim(at),
                Ok(_) => Notice::Drained(at),
                Err(error) => Notice::StoreFailed { call: "settle", error },
            };
            self.observer.noticed(&notice);
            if let Err(error) = &told
                && let Told::Away = retry.failed(error)
            {
                misses += 1;
                if misses == MISSES_IN_A_ROW {
                    return Told::Away;
                }
                continue;
            }
            misses = 0;
            // Until then a retry gets it from the journal.
            let given_up = told.is_err() && retry.is_given_up() && is_over(&end);
            if given_up {
                self.observer.noticed(&Notice::Dropped(at));
            }
            if (given_up || told.is_ok())
                && let Err(why) = journal.remove(at).await
            {
                self.observer.noticed(&Notice::JournalFailed(&why));
                return Told::Away;
            }
        }
        if misses > 0 { Told::Away } else { Told::Taken }
    }

    /// Whether nothing is left to do. Then nobody works any more.
    fn is_done(&self) -> bool {
        let mut queue = self.queue.lock();
        let done = queue.ends.is_empty() && !self.has_journaled();
        // Under the lock: what is pushed from here on finds nobody working and starts anew.
        queue.working = !done;
        done
    }

    /// When the next end is due.
    fn next_due(&self, journaled: &HashMap<Address, Retry>) -> Instant {
        let queue = self.queue.lock();
        let queued = queue.ends.iter().map(|waiting| waiting.retry.due);
        queued.chain(journaled.values().map(|retry| retry.due)).min().unwrap_or_else(Instant::now)
    }
}

impl Retry {
    fn new() -> Self {
        Self { due: Instant::now(), pause: FIRST_PAUSE, refused_since: None }
    }

    fn failed(&mut self, error: &StoreError) -> Told {
        let now = Instant::now();
        self.due = now + self.pause;
        self.pause = (self.pause * 2).min(LAST_RETRY);
        if matches!(error.kind, ErrorKind::Rejected | ErrorKind::Corrupt) {
            self.refused_since.get_or_insert(now);
            return Told::Refused;
        }
        self.refused_since = None;
        Told::Away
    }

    fn is_given_up(&self) -> bool {
        self.refused_since.is_some_and(|since| since.elapsed() > GIVE_UP_AFTER)
    }
}

/// The memory that an end takes up besides its lease.
fn bytes_of(end: &End) -> usize {
    match end {
        End::Complete { record, .. } => record.len(),
        End::Release | End::Park { .. } => 0,
    }
}

/// Whether the answer of a journaled end is not to be given any more.
fn is_over(end: &End) -> bool {
    matches!(end, End::Complete { keep, .. } if *keep <= Duration::from_millis(1))
}

/// The same end with a digest in place of a large body.
fn without_body(end: &End) -> Option<End> {
    let End::Complete { failed, record, outline, keep } = end else { return None };
    let mut record = Record::decode(record.clone()).ok().filter(|_| record.len() >= LARGE_RECORD)?;
    let RecordBody::Whole(body) = &record.body else { return None };
    record.body = RecordBody::Digest { length: body.len() as u64, sha256: Sha256::digest(body).into() };
    Some(End::Complete { failed: *failed, record: record.encode(), outline: *outline, keep: *keep })
}

/// Says that no task works any more, even if the task is dropped with its runtime.
struct Working(Arc<Inner>);

impl Drop for Working {
    fn drop(&mut self) {
        self.0.queue.lock().working = false;
    }
}

async fn work(inner: Arc<Inner>) {
    let working = Working(inner);
    let inner = &working.0;
    let mut pause = FIRST_PAUSE;
    let mut journaled = HashMap::new();
    loop {
        let told = match inner.one().await {
            Some(told) => told,
            None => {
                let drained = inner.drain(&mut journaled).await;
                if inner.is_done() {
                    std::mem::forget(working);
                    return;
                }
                if !matches!(drained, Told::Away) {
                    let _ = timeout_at(inner.next_due(&journaled), inner.added.notified()).await;
                    continue;
                }
                drained
            }
        };
        match told {
            Told::Taken => pause = FIRST_PAUSE,
            Told::Refused => {}
            Told::Away => {
                sleep(pause).await;
                pause = (pause * 2).min(LAST_PAUSE);
            }
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
