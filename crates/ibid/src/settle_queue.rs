//! Retries settlements that the store has not acknowledged.
//!
//! Without it, a lost release would block its key until the lease expires, and a journaled answer would never reach the
//! store. One background task drains the queue and the journal, and exits when both are empty.
//!
//! A settlement that the store rejects is retried on its own schedule. If its record may be too large for the store,
//! the answer is recorded without its body, like an answer above `max_response`.

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
    policy::Terms,
    record::{Record, RecordBody},
    store::{Address, ErrorKind, Lease, SettleOutcome, Settlement, Store, StoreError},
};

/// The maximum number of queued settlements. Settlements beyond this or [`MAX_QUEUED_BYTES`] are dropped, and their
/// leases expire.
const MAX_QUEUED: usize = 10_000;
const MAX_QUEUED_BYTES: usize = 64 << 20;
const INITIAL_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(2);
/// The longest delay between two attempts at the same settlement. It exceeds [`MAX_BACKOFF`], so that one unreachable
/// part of a store does not keep the other settlements waiting.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(5);
/// The number of consecutive unreachable attempts after which draining pauses.
const MAX_CONSECUTIVE_FAILURES: u32 = 3;
/// How long a settlement may be rejected before it is dropped.
const GIVE_UP_AFTER: Duration = Duration::from_secs(60 * 60);
/// Records below this size in bytes are never shortened.
const MIN_SHORTENED_RECORD_BYTES: usize = 64 << 10;

/// Retries settlements in the background. Cheap to clone.
#[derive(Clone)]
pub struct SettleQueue(Arc<SettleQueueState>);

struct SettleQueueState {
    store: Arc<dyn Store>,
    observer: Arc<dyn Observer>,
    journal: Option<Arc<Journal>>,
    pending: Mutex<PendingSettlements>,
    added: Notify,
}

#[derive(Default)]
struct PendingSettlements {
    /// Only the worker removes entries; others append.
    entries: VecDeque<QueuedSettlement>,
    bytes: usize,
    /// Whether a worker is running. Changed under the lock, so that no settlement is left without a worker.
    has_worker: bool,
}

struct QueuedSettlement {
    lease: Lease,
    settlement: Settlement,
    retry: SettleRetry,
}

/// The retry schedule of one settlement. A rejected settlement does not delay the others.
#[derive(Clone, Copy)]
struct SettleRetry {
    due_at: Instant,
    backoff: Duration,
    rejected_since: Option<Instant>,
}

enum SettleAttempt {
    Settled,
    /// The store rejects this settlement. It may accept others.
    Rejected,
    /// The store did not respond.
    Unreachable,
}

/// Parks a claim if it is dropped before the claim was settled.
pub(crate) struct AbandonGuard {
    queue: SettleQueue,
    lease: Option<Lease>,
    ttl: Duration,
    retry_in: Duration,
}

impl SettleQueue {
    pub(crate) fn new(store: Arc<dyn Store>, observer: Arc<dyn Observer>, journal: Option<Arc<Journal>>) -> Self {
        let (pending, added) = (Mutex::default(), Notify::new());
        let queue = Self(Arc::new(SettleQueueState { store, observer, journal, pending, added }));
        queue.wake();
        queue
    }

    /// Queues a settlement and starts the worker if it is idle.
    pub(crate) fn push(&self, lease: Lease, mut end: Settlement) {
        {
            let mut queue = self.0.pending.lock();
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

    /// Starts the worker if there is work and none is running.
    pub(crate) fn wake(&self) {
        self.0.added.notify_one();
        let Ok(runtime) = Handle::try_current() else { return };
        let mut queue = self.0.pending.lock();
        if !queue.has_worker && (!queue.entries.is_empty() || self.0.has_journaled()) {
            queue.has_worker = true;
            runtime.spawn(run_worker(self.0.clone()));
        }
    }

    pub(crate) fn guard_claim(&self, lease: Lease, policy: &Terms) -> AbandonGuard {
        let ttl = policy.ttl.max(policy.lease);
        AbandonGuard { queue: self.clone(), lease: Some(lease), ttl, retry_in: policy.lease }
    }

    /// The number of settlements that wait in the queue and the journal.
    pub fn pending(&self) -> usize {
        let journaled = self.0.journal.as_ref().map_or(0, |journal| journal.len());
        self.0.pending.lock().entries.len() + journaled
    }

    /// Returns once the queue and the journal are empty. The caller sets a time limit.
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
        self.observer.on_store_call(StoreCall::Settle, sent.elapsed());
        answer
    }

    /// Settles once. If the store rejects a large record, settles again without its body.
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

    /// Attempts the first settlement that is due. Returns `None` if none is due.
    async fn settle_next(&self) -> Option<SettleAttempt> {
        let now = Instant::now();
        let (at, lease, end) = {
            let queue = self.pending.lock();
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
            let mut queue = self.pending.lock();
            let mut waiting = queue.entries.remove(at).expect("only this task removes");
            let told = match &answer {
                Ok(_) => SettleAttempt::Settled,
                Err(error) => waiting.retry.record_failure(error),
            };
            let given_up = waiting.retry.should_give_up();
            if given_up || matches!(told, SettleAttempt::Settled) {
                queue.bytes -= record_bytes(&end);
            } else {
                queue.entries.push_back(waiting);
            }
            (told, given_up)
        };
        if let Err(error) = &answer {
            self.observer.on_event(&EngineEvent::StoreFailed("settle", error));
        }
        if given_up {
            self.observer.on_event(&EngineEvent::SettlementDropped(&lease.request.address));
        }
        Some(told)
    }

    /// Attempts all journaled settlements that are due.
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
                Err(error) => EngineEvent::StoreFailed("settle", error),
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
            // A retry of the request gets an unexpired answer from the journal, so keep it until it expires.
            let is_expired = end.ttl() <= Duration::from_millis(1);
            let given_up = told.is_err() && retry.should_give_up() && is_expired;
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

    /// Returns whether the queue and the journal are empty, and if so marks the worker as stopped.
    fn stop_if_idle(&self) -> bool {
        let mut queue = self.pending.lock();
        let done = queue.entries.is_empty() && !self.has_journaled();
        // Changed under the lock, so that a later push sees no worker and starts one.
        queue.has_worker = !done;
        done
    }

    fn next_due_at(&self, journaled: &HashMap<Address, SettleRetry>) -> Instant {
        let queue = self.pending.lock();
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

/// The memory of a settlement besides its lease.
fn record_bytes(end: &Settlement) -> usize {
    match end {
        Settlement::Complete { record, .. } => record.len(),
        Settlement::Release | Settlement::Park { .. } => 0,
    }
}

/// Replaces a large body with its digest. Returns `None` if there is no large body.
fn without_body(end: &Settlement) -> Option<Settlement> {
    let &Settlement::Complete { failed, ref record, summary, ttl } = end else { return None };
    let mut record = Record::decode(record.clone()).ok().filter(|_| record.len() >= MIN_SHORTENED_RECORD_BYTES)?;
    let RecordBody::Whole(body) = &record.body else { return None };
    record.body = RecordBody::Digest { length: body.len() as u64, sha256: Sha256::digest(body).into() };
    Some(Settlement::Complete { failed, record: record.encode(), summary, ttl })
}

/// Clears `has_worker` even if the task is dropped with its runtime.
struct WorkerGuard(Arc<SettleQueueState>);

impl Drop for WorkerGuard {
    fn drop(&mut self) {
        self.0.pending.lock().has_worker = false;
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

impl AbandonGuard {
    pub(crate) fn lease(&self) -> &Lease {
        self.lease.as_ref().expect("set until the guard is disarmed")
    }

    pub(crate) fn disarm(&mut self) {
        self.lease = None;
    }
}

impl Drop for AbandonGuard {
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
