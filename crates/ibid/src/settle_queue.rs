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
    observe::{EngineEvent, Observer, StoreCall},
    policy::Policy,
    record::{Record, RecordBody},
    store::{Address, ErrorKind, Lease, SettleOutcome, Settlement, Store, StoreError},
};

/// More ends than this, or more bytes of them, are not kept: their leases lapse instead.
const MAX_QUEUED: usize = 10_000;
const MAX_QUEUED_BYTES: usize = 64 << 20;
const INITIAL_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(2);
/// Of one end. Longer than the pause between any two, so that the others have their turn: only a part of a store may be away.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(5);
/// After so many ends in a row that did not reach the store, it is left alone for a while.
const MAX_CONSECUTIVE_FAILURES: u32 = 3;
/// An end that the store has refused for so long is given up.
const GIVE_UP_AFTER: Duration = Duration::from_secs(60 * 60);
/// Records smaller than this are not refused for their size.
const MIN_SHORTENED_RECORD_BYTES: usize = 64 << 10;

/// The queue. Cheap to clone.
#[derive(Clone)]
pub struct SettleQueue(Arc<SettleQueueState>);

struct SettleQueueState {
    store: Arc<dyn Store>,
    observer: Arc<dyn Observer>,
    journal: Option<Arc<Journal>>,
    queue: Mutex<PendingSettlements>,
    /// Something was added.
    added: Notify,
}

#[derive(Default)]
struct PendingSettlements {
    /// Only the task removes from it; others add to its back.
    entries: VecDeque<QueuedSettlement>,
    bytes: usize,
    /// A task works on it. Set and unset under the lock, so that no end is left without one.
    has_worker: bool,
}

struct QueuedSettlement {
    lease: Lease,
    settlement: Settlement,
    retry: SettleRetry,
}

/// When an end is told again. Each has its own pause: one that is refused for ever does not hold up the others.
#[derive(Clone, Copy)]
struct SettleRetry {
    due_at: Instant,
    backoff: Duration,
    rejected_since: Option<Instant>,
}

/// What became of one attempt to settle.
enum SettleAttempt {
    Settled,
    /// The store refuses this one. Others may be taken.
    Rejected,
    /// The store is away.
    Unreachable,
}

/// Parks a claim whose work was dropped before it settled.
pub(crate) struct AbandonGuard<'a> {
    queue: &'a SettleQueue,
    lease: Option<Lease>,
    ttl: Duration,
    retry_in: Duration,
}

impl SettleQueue {
    pub(crate) fn new(store: Arc<dyn Store>, observer: Arc<dyn Observer>, journal: Option<Arc<Journal>>) -> Self {
        let later = Self(Arc::new(SettleQueueState {
            store,
            observer,
            journal,
            queue: Mutex::default(),
            added: Notify::new(),
        }));
        later.wake();
        later
    }

    /// Settles later.
    pub(crate) fn push(&self, lease: Lease, mut end: Settlement) {
        {
            let mut queue = self.0.queue.lock();
            if queue.bytes + record_bytes(&end) > MAX_QUEUED_BYTES
                && let Some(short) = without_body(&end)
            {
                end = short;
            }
            let bytes = record_bytes(&end);
            if queue.entries.len() == MAX_QUEUED || queue.bytes + bytes > MAX_QUEUED_BYTES {
                self.0.observer.on_event(&EngineEvent::SettlementDropped(&lease.request.address));
                return;
            }
            queue.bytes += bytes;
            queue.entries.push_back(QueuedSettlement { lease, settlement: end, retry: SettleRetry::new() });
        }
        self.wake();
    }

    /// Starts the task if there is work and none is at it.
    pub(crate) fn wake(&self) {
        self.0.added.notify_one();
        let Ok(runtime) = Handle::try_current() else { return };
        let mut queue = self.0.queue.lock();
        if !queue.has_worker && (!queue.entries.is_empty() || self.0.has_journaled()) {
            queue.has_worker = true;
            runtime.spawn(run_worker(self.0.clone()));
        }
    }

    pub(crate) fn guard_claim(&self, lease: &Lease, policy: &Policy) -> AbandonGuard<'_> {
        AbandonGuard {
            queue: self,
            lease: Some(lease.clone()),
            ttl: policy.ttl.max(policy.lease),
            retry_in: policy.lease,
        }
    }

    /// How many ends wait for the store.
    pub fn pending(&self) -> usize {
        let journaled = self.0.journal.as_ref().map_or(0, |journal| journal.len());
        self.0.queue.lock().entries.len() + journaled
    }

    /// Returns once nothing waits any more. The caller bounds it.
    pub async fn wait_until_empty(&self) {
        self.wake();
        while self.pending() > 0 {
            sleep(Duration::from_millis(10)).await;
        }
    }
}

impl SettleQueueState {
    fn has_journaled(&self) -> bool {
        self.journal.as_ref().is_some_and(|journal| !journal.is_empty())
    }

    async fn settle(&self, lease: &Lease, end: &Settlement) -> Result<SettleOutcome, StoreError> {
        let sent = Instant::now();
        let answer = self.store.settle(lease, end).await;
        self.observer.asked(StoreCall::Settle, sent.elapsed());
        answer
    }

    /// Tells the store of one end. A record that it refuses for its size is recorded without its body.
    async fn settle_or_shorten(&self, lease: &Lease, end: &Settlement) -> Result<SettleOutcome, StoreError> {
        let refused = match self.settle(lease, end).await {
            Err(error) if error.kind == ErrorKind::Rejected => error,
            told => return told,
        };
        let Some(short) = without_body(end) else { return Err(refused) };
        let told = self.settle(lease, &short).await;
        if told.is_ok() {
            self.observer.on_event(&EngineEvent::BodyNotStored(&lease.request.address));
        }
        told
    }

    /// Settles the first end that is due. `None` if there is none.
    async fn settle_next(&self) -> Option<SettleAttempt> {
        let now = Instant::now();
        let (at, lease, end) = {
            let queue = self.queue.lock();
            let (at, waiting) = queue.entries.iter().enumerate().find(|(_, waiting)| waiting.retry.due_at <= now)?;
            (at, waiting.lease.clone(), waiting.settlement.clone())
        };
        let answer = self.settle_or_shorten(&lease, &end).await;
        if let Ok(SettleOutcome::ClaimLost(_)) = &answer
            && matches!(end, Settlement::Complete { .. })
        {
            self.observer.on_event(&EngineEvent::ClaimLost(&lease.request.address));
        }
        let (told, given_up) = {
            let mut queue = self.queue.lock();
            let told = answer
                .as_ref()
                .map_or_else(|error| queue.entries[at].retry.record_failure(error), |_| SettleAttempt::Settled);
            let given_up = queue.entries[at].retry.should_give_up();
            let waiting = queue.entries.remove(at).expect("only this task removes");
            if given_up || matches!(told, SettleAttempt::Settled) {
                queue.bytes -= record_bytes(&end);
            } else {
                queue.entries.push_back(waiting);
            }
            (told, given_up)
        };
        if let Err(error) = &answer {
            self.observer.on_event(&EngineEvent::StoreFailed { call: "settle", error });
        }
        if given_up {
            self.observer.on_event(&EngineEvent::SettlementDropped(&lease.request.address));
        }
        Some(told)
    }

    /// Brings what is due of the journal to the store.
    async fn drain_journal(&self, retries: &mut HashMap<Address, SettleRetry>) -> SettleAttempt {
        let Some(journal) = &self.journal else { return SettleAttempt::Settled };
        let all = journal.entries();
        let known: HashSet<_> = all.iter().map(|(lease, _)| lease.request.address).collect();
        retries.retain(|at, _| known.contains(at));
        let mut misses = 0;
        for (lease, end) in all {
            let at = &lease.request.address;
            let retry = retries.entry(*at).or_insert_with(SettleRetry::new);
            if retry.due_at > Instant::now() {
                continue;
            }
            let told = self.settle_or_shorten(&lease, &end).await;
            let notice = match &told {
                Ok(SettleOutcome::ClaimLost(_)) => EngineEvent::ClaimLost(at),
                Ok(_) => EngineEvent::JournalDrained(at),
                Err(error) => EngineEvent::StoreFailed { call: "settle", error },
            };
            self.observer.on_event(&notice);
            if let Err(error) = &told
                && let SettleAttempt::Unreachable = retry.record_failure(error)
            {
                misses += 1;
                if misses == MAX_CONSECUTIVE_FAILURES {
                    return SettleAttempt::Unreachable;
                }
                continue;
            }
            misses = 0;
            // Until then a retry gets it from the journal.
            let given_up = told.is_err() && retry.should_give_up() && is_expired(&end);
            if given_up {
                self.observer.on_event(&EngineEvent::SettlementDropped(at));
            }
            if (given_up || told.is_ok())
                && let Err(why) = journal.remove(at).await
            {
                self.observer.on_event(&EngineEvent::JournalFailed(&why));
                return SettleAttempt::Unreachable;
            }
        }
        if misses > 0 { SettleAttempt::Unreachable } else { SettleAttempt::Settled }
    }

    /// Whether nothing is left to do. Then nobody works any more.
    fn stop_if_idle(&self) -> bool {
        let mut queue = self.queue.lock();
        let done = queue.entries.is_empty() && !self.has_journaled();
        // Under the lock: what is pushed from here on finds nobody working and starts anew.
        queue.has_worker = !done;
        done
    }

    /// When the next end is due.
    fn next_due_at(&self, journaled: &HashMap<Address, SettleRetry>) -> Instant {
        let queue = self.queue.lock();
        let queued = queue.entries.iter().map(|waiting| waiting.retry.due_at);
        queued.chain(journaled.values().map(|retry| retry.due_at)).min().unwrap_or_else(Instant::now)
    }
}

impl SettleRetry {
    fn new() -> Self {
        Self { due_at: Instant::now(), backoff: INITIAL_BACKOFF, rejected_since: None }
    }

    fn record_failure(&mut self, error: &StoreError) -> SettleAttempt {
        let now = Instant::now();
        self.due_at = now + self.backoff;
        self.backoff = (self.backoff * 2).min(MAX_RETRY_DELAY);
        if matches!(error.kind, ErrorKind::Rejected | ErrorKind::Corrupt) {
            self.rejected_since.get_or_insert(now);
            return SettleAttempt::Rejected;
        }
        self.rejected_since = None;
        SettleAttempt::Unreachable
    }

    fn should_give_up(&self) -> bool {
        self.rejected_since.is_some_and(|since| since.elapsed() > GIVE_UP_AFTER)
    }
}

/// The memory that an end takes up besides its lease.
fn record_bytes(end: &Settlement) -> usize {
    match end {
        Settlement::Complete { record, .. } => record.len(),
        Settlement::Release | Settlement::Park { .. } => 0,
    }
}

/// Whether the answer of a journaled end is not to be given any more.
fn is_expired(end: &Settlement) -> bool {
    matches!(end, Settlement::Complete { ttl: keep, .. } if *keep <= Duration::from_millis(1))
}

/// The same end with a digest in place of a large body.
fn without_body(end: &Settlement) -> Option<Settlement> {
    let Settlement::Complete { failed, record, summary: outline, ttl: keep } = end else { return None };
    let mut record = Record::decode(record.clone()).ok().filter(|_| record.len() >= MIN_SHORTENED_RECORD_BYTES)?;
    let RecordBody::Whole(body) = &record.body else { return None };
    record.body = RecordBody::Digest { length: body.len() as u64, sha256: Sha256::digest(body).into() };
    Some(Settlement::Complete { failed: *failed, record: record.encode(), summary: *outline, ttl: *keep })
}

/// Says that no task works any more, even if the task is dropped with its runtime.
struct WorkerGuard(Arc<SettleQueueState>);

impl Drop for WorkerGuard {
    fn drop(&mut self) {
        self.0.queue.lock().has_worker = false;
    }
}

async fn run_worker(inner: Arc<SettleQueueState>) {
    let working = WorkerGuard(inner);
    let inner = &working.0;
    let mut pause = INITIAL_BACKOFF;
    let mut journaled = HashMap::new();
    loop {
        let told = match inner.settle_next().await {
            Some(told) => told,
            None => {
                let drained = inner.drain_journal(&mut journaled).await;
                if inner.stop_if_idle() {
                    std::mem::forget(working);
                    return;
                }
                if !matches!(drained, SettleAttempt::Unreachable) {
                    let _ = timeout_at(inner.next_due_at(&journaled), inner.added.notified()).await;
                    continue;
                }
                drained
            }
        };
        match told {
            SettleAttempt::Settled => pause = INITIAL_BACKOFF,
            SettleAttempt::Rejected => {}
            SettleAttempt::Unreachable => {
                sleep(pause).await;
                pause = (pause * 2).min(MAX_BACKOFF);
            }
        }
    }
}

impl AbandonGuard<'_> {
    pub(crate) fn disarm(mut self) {
        self.lease = None;
    }
}

impl Drop for AbandonGuard<'_> {
    fn drop(&mut self) {
        if let Some(lease) = self.lease.take() {
            self.queue.push(lease, Settlement::Park { ttl: self.ttl, retry_in: self.retry_in });
        }
    }
}

impl fmt::Debug for SettleQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SettleQueue").field("waiting", &self.pending()).finish()
    }
}
