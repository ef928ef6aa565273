//! Claims, runs and settles one request. Start with [`Engine::execute`].
//!
//! The engine knows no HTTP, no gRPC and no database. It runs an [`Operation`] and decides by the store's replies and
//! the [`Policy`].
//!
//! Invariant: **record first, then answer.** A caller never sees the end of an answer that is not recorded, and a
//! holder that lost its claim returns the recorded answer, never its own response.

use std::{
    future::Future,
    pin::{Pin, pin},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use tokio::time::{Instant, sleep};

use crate::{
    fingerprint::FingerprintComparison,
    journal::Journal,
    observe::{EngineEvent, NoopObserver, Observer, StoreCall},
    policy::{CheckedPolicy, OnConcurrent, OnMismatch, OnStoreDown, OnUnknown, Policy},
    quota::Quota,
    refusal::{Refusal, RefusalReason},
    running::RunningOperations,
    settle_queue::SettleQueue,
    store::{
        Address, ClaimOutcome, ClaimRequest, ClaimToken, CompletedEntry, ErrorKind, Fingerprint, Holder, Lease,
        RecordSummary, SettleOutcome, Settlement, Store, StoreError,
    },
    time::from_now,
};

pub use self::shadow::{ShadowClaim, ShadowResult, ShadowRunOutcome};

mod shadow;

/// The maximum number of attempts at one claim or settle call.
const MAX_STORE_ATTEMPTS: u32 = 3;
/// The maximum number of takeovers and token renewals per request; beyond it the request is refused as in progress.
const MAX_TAKEOVERS: u32 = 8;
/// `Retry-After` of refusals that clear up soon.
const RETRY_SOON: Duration = Duration::from_secs(1);

/// An operation that the engine runs at most once.
pub trait Operation: Send {
    /// The result that the caller gets.
    type Answer: Send;

    /// Runs the operation. The engine calls this at most once; without a lease the operation runs unprotected.
    fn run(&mut self, lease: Option<&Lease>) -> impl Future<Output = RunOutcome<Self::Answer>> + Send;

    /// The longest time that the caller waits for a concurrent run to end. The policy may allow less.
    fn patience(&self) -> Duration {
        Duration::MAX
    }

    /// Computes the request's fingerprint by the rules of `version`. Returns `None` if the version is unknown; a record
    /// of that version cannot be compared with this request.
    fn fingerprint(&self, version: u8) -> Option<Fingerprint> {
        let _ = version;
        None
    }

    /// Asks the app whether an earlier run took place. A probe must have no side effects.
    fn probe(&mut self) -> impl Future<Output = ProbeOutcome> + Send {
        async { ProbeOutcome::Inconclusive }
    }
}

/// The outcome of a run.
#[derive(Debug)]
#[must_use]
pub enum RunOutcome<A> {
    /// The run produced an answer to remember.
    Complete(A, CompletedAnswer),
    /// The run produced a complete answer that is not remembered.
    Release(A),
    /// The operation provably did not start.
    NotStarted(Refusal),
    /// The outcome is unknown; the caller gets this answer.
    Park(A, UnknownCause),
    /// The operation wrote its answer to the store in its own transaction. The store knows whether that transaction
    /// committed.
    DelegatedToTransaction(A, OnRollback),
}

/// What happens to a claim whose answer was delegated to a transaction, if that transaction rolled back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnRollback {
    /// Release the claim and refuse the caller, because the answer was part of the transaction.
    Refuse,
    /// Release the claim and return the answer to the caller.
    Release,
    /// Settle the claim as outcome unknown and return the answer to the caller.
    Park(UnknownCause),
}

/// An answer to remember.
#[derive(Debug, Clone)]
pub struct CompletedAnswer {
    /// Whether the answer is a failure.
    pub failed: bool,
    /// The encoded [`crate::Record`].
    pub record: Bytes,
    /// The columns that operators query.
    pub summary: RecordSummary,
}

/// Why an outcome is unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnknownCause {
    /// The app's complete answer leaves the outcome open, or the handler panicked. The operation has stopped.
    AppSaidSo,
    /// The response was lost. The operation may still be running.
    ConnectionLost,
    /// The operation took too long and may still be running.
    TimedOut,
    /// No answer arrived within `timeout` plus `late_answer`. The engine treats the operation as ended.
    NoLateAnswer,
}

impl UnknownCause {
    /// Returns the delay until a takeover is allowed: one lease if the operation may still be running.
    fn retry_in(self, policy: &Policy) -> Duration {
        match self {
            Self::ConnectionLost | Self::TimedOut => policy.lease,
            Self::AppSaidSo | Self::NoLateAnswer => Duration::ZERO,
        }
    }
}

/// The app's reply to a probe about an earlier run.
#[derive(Debug)]
pub enum ProbeOutcome {
    /// The run took place and gave this answer.
    Happened(CompletedAnswer),
    /// The run did not take place.
    DidNotHappen,
    /// The app does not know.
    Inconclusive,
}

/// The result of [`Engine::execute`].
#[derive(Debug)]
#[must_use]
pub enum Decision<A> {
    /// The operation ran now and gave this answer.
    Ran(A, StoredAs),
    /// A remembered answer, and whether it is in the store or still in the journal.
    Replay(CompletedEntry, StoredAs),
    /// The request was refused.
    Refused(Refusal),
}

/// Where the answer of a run is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoredAs {
    /// In the store.
    Recorded,
    /// Nowhere: the policy does not remember it.
    NotRecorded,
    /// In the journal, until the store accepts it.
    Pending,
    /// The store records the outcome as unknown.
    OutcomeUnknown,
    /// Nowhere: the operation ran without protection.
    Unprotected,
    /// In the journal: only the front store protected the run, and the authority has not recorded it yet.
    FrontOnly,
}

/// Runs operations at most once. Cheap to clone.
#[derive(Clone)]
pub struct Engine {
    store: Arc<dyn Store>,
    observer: Arc<dyn Observer>,
    journal: Option<Arc<Journal>>,
    settle_queue: SettleQueue,
    running: RunningOperations,
    quota: Option<Arc<Quota>>,
    shadow_recordings: Arc<shadow::PendingRecordings>,
}

impl Engine {
    /// Creates an engine without observer and journal.
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self::with_observer(store, Arc::new(NoopObserver), None)
    }

    /// Creates an engine with an observer and, optionally, a journal for answers that the store cannot record.
    pub fn with_observer(store: Arc<dyn Store>, observer: Arc<dyn Observer>, journal: Option<Arc<Journal>>) -> Self {
        let settle_queue = SettleQueue::new(store.clone(), observer.clone(), journal.clone());
        let shadow_recordings = Arc::default();
        Self {
            store,
            observer,
            journal,
            settle_queue,
            running: RunningOperations::default(),
            quota: None,
            shadow_recordings,
        }
    }

    /// Limits how many operations each tenant may start.
    #[must_use]
    pub fn with_quota(self, quota: Arc<Quota>) -> Self {
        Self { quota: Some(quota), ..self }
    }

    /// Decides what happens to one request, and runs `operation` if the claim is granted.
    pub fn execute<O: Operation>(
        &self, policy: &CheckedPolicy, ask: ClaimRequest, mut operation: O,
    ) -> impl Future<Output = Decision<O::Answer>> {
        let ask = Arc::new(ask);
        // Not an `async fn`, which would store its arguments twice.
        async move { self.decide(policy, ask, &mut operation).await }
    }

    /// Boxes the branches that only some requests take: futures are moved as a whole, and a replay should not pay for
    /// them.
    async fn decide<O: Operation>(
        &self, policy: &Policy, mut ask: Arc<ClaimRequest>, operation: &mut O,
    ) -> Decision<O::Answer> {
        let own = ask.fingerprint;
        let patience = from_now(policy.wait_timeout.min(operation.patience()));
        let mut takeovers = 0;
        let mut probed = false;

        if let Some((finished, solo)) = self.journal.as_ref().and_then(|journal| journal.find(&ask.address)) {
            if let Some(refusal) = mismatch(policy, &own, &finished.fingerprint, operation) {
                return Decision::Refused(refusal);
            }
            return Decision::Replay(finished, if solo { StoredAs::FrontOnly } else { StoredAs::Pending });
        }
        if let Some(refusal) = self.check_quota(&ask).await {
            return Decision::Refused(refusal);
        }
        loop {
            let sent = Instant::now();
            let (claim, doubtful) = self.claim(&ask, sent).await;
            if doubtful
                && !matches!(
                    claim,
                    Ok(ClaimOutcome::Granted(_) | ClaimOutcome::Completed(_) | ClaimOutcome::TokenSpent)
                )
            {
                // A delayed copy of this claim could still reach the store and be granted after the holder has gone.
                // Release its token, and continue with a new one.
                self.settle_queue.push(Lease::unseen(&ask), Settlement::Release);
                ask = Arc::new(ClaimRequest { token: ClaimToken::mint(), ..ClaimRequest::clone(&ask) });
            }
            let claim = match claim {
                Ok(claim) => claim,
                Err(error) => return self.decide_without_store(policy, operation, &error).await,
            };
            if let Some(stored) = stored_fingerprint(&claim)
                && let Some(refusal) = mismatch(policy, &own, stored, operation)
            {
                return Decision::Refused(refusal);
            }
            match claim {
                ClaimOutcome::Granted(lease) => {
                    if let Some(refusal) = self.spend_quota(&lease).await {
                        let refused = || Decision::Refused(refusal);
                        return Box::pin(self.settle_without_answer(
                            policy,
                            &lease,
                            Settlement::Release,
                            Instant::now(),
                            operation,
                            refused,
                        ))
                        .await;
                    }
                    return Box::pin(self.run(policy, lease, sent, operation)).await;
                }
                ClaimOutcome::Completed(finished) => return Decision::Replay(finished, StoredAs::Recorded),
                ClaimOutcome::InProgress(holder) => {
                    let left = patience.saturating_duration_since(Instant::now());
                    if policy.on_concurrent == OnConcurrent::Reject || left.is_zero() {
                        return Decision::Refused(in_progress(RETRY_SOON));
                    }
                    self.wait(&ask, &holder, left).await;
                }
                ClaimOutcome::OutcomeUnknown(holder) => {
                    let left = patience.saturating_duration_since(Instant::now());
                    let ripe = holder.takeover_in.is_zero();
                    if ripe && policy.resolve.is_some() && !probed {
                        probed = true;
                        if self.probe_and_resolve(policy, &ask, &holder, operation).await {
                            continue;
                        }
                    }
                    match policy.on_unknown {
                        // The earlier run may still be going on. Once its takeover time has come, probe the app or run
                        // again.
                        _ if !ripe && (policy.on_unknown == OnUnknown::Retry || policy.resolve.is_some()) => {
                            if policy.on_concurrent == OnConcurrent::Reject || left.is_zero() {
                                return Decision::Refused(in_progress(holder.takeover_in.max(RETRY_SOON)));
                            }
                            sleep(holder.takeover_in.min(left)).await;
                        }
                        OnUnknown::Hold => return Decision::Refused(outcome_unknown()),
                        OnUnknown::Retry if takeovers < MAX_TAKEOVERS => {
                            takeovers += 1;
                            ask = Arc::new(ClaimRequest { take_over: Some(holder.fence), ..ClaimRequest::clone(&ask) });
                        }
                        OnUnknown::Retry => return Decision::Refused(in_progress(RETRY_SOON)),
                    }
                }
                // An operator forgot the claim before its response arrived: claim again with a new token.
                ClaimOutcome::TokenSpent if takeovers < MAX_TAKEOVERS => {
                    takeovers += 1;
                    ask = Arc::new(ClaimRequest {
                        token: ClaimToken::mint(),
                        take_over: None,
                        ..ClaimRequest::clone(&ask)
                    });
                }
                ClaimOutcome::TokenSpent => return Decision::Refused(in_progress(RETRY_SOON)),
            }
        }
    }

    /// Refuses a new key of a tenant without quota left. Known keys are still answered.
    async fn check_quota(&self, ask: &ClaimRequest) -> Option<Refusal> {
        let quota = self.quota.as_ref().filter(|quota| quota.is_set())?;
        let after = Box::pin(quota.check(self.store.as_ref(), &ask.tags)).await.err()?;
        // If the store call fails, the claim that follows decides.
        let is_new = matches!(self.store.get(&ask.address).await, Ok(None));
        is_new.then(|| quota_exceeded(after))
    }

    /// Spends quota for the first run at an address only; a rerun is not a new operation.
    async fn spend_quota(&self, lease: &Lease) -> Option<Refusal> {
        let quota = self.quota.as_ref().filter(|quota| quota.is_set() && lease.attempt <= 1)?;
        Box::pin(quota.spend(self.store.as_ref(), &lease.request.tags)).await.err().map(quota_exceeded)
    }

    /// Charges the recorded bytes to the tenant's quota.
    async fn charge_quota(&self, lease: &Lease, recorded: usize) {
        let Some(quota) = self.quota.as_ref().filter(|quota| quota.is_set()) else { return };
        let ClaimRequest { tags, label, .. } = &*lease.request;
        let bytes = (recorded + tags.as_bytes().len() + label.len()) as u64;
        Box::pin(quota.charge_bytes(self.store.as_ref(), tags, bytes)).await;
    }

    /// Runs a granted operation under its lease and settles the claim.
    async fn run<O: Operation>(
        &self, policy: &Policy, lease: Lease, sent: Instant, operation: &mut O,
    ) -> Decision<O::Answer> {
        let abandoned = self.settle_queue.guard_claim(&lease, policy);
        if sent.elapsed() > policy.lease * 2 / 3 && self.extend(&lease, policy).await == HeartbeatOutcome::ClaimLost {
            abandoned.disarm();
            return Decision::Refused(in_progress(RETRY_SOON));
        }
        let ended = self.run_with_heartbeat(&lease, policy, pin!(operation.run(Some(&lease)))).await;
        let now = Instant::now();
        let keep_unknown = policy.ttl.saturating_sub(now - sent).max(policy.lease);
        let verdict = match ended {
            RunOutcome::Complete(answer, CompletedAnswer { failed, record, summary }) => {
                let recorded = record.len();
                let end = Settlement::Complete { failed, record, summary, ttl: policy.ttl };
                let settled = self.settle(&lease, &end, now).await;
                self.charge_quota(&lease, recorded).await;
                match settled {
                    Ok(SettleOutcome::ClaimLost(there)) => self.decide_lost_claim(policy, &lease, *there, operation),
                    Ok(_) if lease.front_only => Decision::Ran(answer, StoredAs::Unprotected),
                    Ok(_) => Decision::Ran(answer, StoredAs::Recorded),
                    Err(_) => self.journal_or_queue(&lease, end, answer).await,
                }
            }
            RunOutcome::Release(answer) => {
                self.settle_without_answer(policy, &lease, Settlement::Release, now, operation, || {
                    Decision::Ran(answer, StoredAs::NotRecorded)
                })
                .await
            }
            RunOutcome::NotStarted(refusal) => {
                self.settle_without_answer(policy, &lease, Settlement::Release, now, operation, || {
                    Decision::Refused(refusal)
                })
                .await
            }
            RunOutcome::DelegatedToTransaction(answer, otherwise) => {
                self.settle_delegated(policy, &lease, answer, otherwise, (now, keep_unknown), operation).await
            }
            RunOutcome::Park(answer, by) => {
                let end = Settlement::Park { ttl: keep_unknown, retry_in: by.retry_in(policy) };
                self.settle_without_answer(policy, &lease, end, now, operation, || {
                    Decision::Ran(answer, StoredAs::OutcomeUnknown)
                })
                .await
            }
        };
        abandoned.disarm();
        verdict
    }

    /// Settles a run whose own transaction records the answer. The settle call blocks until that transaction ends, so
    /// its outcome tells whether it committed: `Completed` if it did, otherwise the operation did not happen.
    async fn settle_delegated<O: Operation>(
        &self, policy: &Policy, lease: &Lease, answer: O::Answer, otherwise: OnRollback,
        (now, ttl): (Instant, Duration), operation: &mut O,
    ) -> Decision<O::Answer> {
        let end = match otherwise {
            OnRollback::Park(by) => Settlement::Park { ttl, retry_in: by.retry_in(policy) },
            OnRollback::Refuse | OnRollback::Release => Settlement::Release,
        };
        let settled = self.settle(lease, &end, now).await;
        match (settled, otherwise) {
            (Ok(SettleOutcome::ClaimLost(there)), _) => match (*there, otherwise) {
                (ClaimOutcome::Completed(finished), OnRollback::Refuse) if finished.fence == lease.fence => {
                    Decision::Ran(answer, StoredAs::Recorded)
                }
                (ClaimOutcome::Completed(finished), _) if finished.fence == lease.fence => {
                    Decision::Replay(finished, StoredAs::Recorded)
                }
                (there, _) => self.decide_lost_claim(policy, lease, there, operation),
            },
            (Ok(_), OnRollback::Refuse) => Decision::Refused(rolled_back()),
            (Ok(_), OnRollback::Release) => Decision::Ran(answer, StoredAs::NotRecorded),
            (Ok(_), OnRollback::Park(_)) => Decision::Ran(answer, StoredAs::OutcomeUnknown),
            (Err(_), _) => {
                self.settle_queue.push(lease.clone(), end);
                Decision::Refused(commit_unknown())
            }
        }
    }

    /// Settles a run that has no answer to record. If the store call fails, the settle queue retries it.
    async fn settle_without_answer<O: Operation>(
        &self, policy: &Policy, lease: &Lease, end: Settlement, now: Instant, operation: &mut O,
        verdict: impl FnOnce() -> Decision<O::Answer>,
    ) -> Decision<O::Answer> {
        match self.settle(lease, &end, now).await {
            Ok(SettleOutcome::ClaimLost(there)) => self.decide_lost_claim(policy, lease, *there, operation),
            Ok(_) => verdict(),
            Err(_) => {
                self.settle_queue.push(lease.clone(), end);
                verdict()
            }
        }
    }

    /// Saves an answer that the store could not record. Without a journal, the caller is refused until the settle queue
    /// has stored the answer.
    async fn journal_or_queue<A>(&self, lease: &Lease, end: Settlement, answer: A) -> Decision<A> {
        if let Some(journal) = &self.journal {
            match journal.append(lease, &end).await {
                Ok(()) => {
                    self.observer.on_event(&EngineEvent::Journaled(&lease.request.address));
                    self.settle_queue.wake();
                    return Decision::Ran(
                        answer,
                        if lease.front_only { StoredAs::FrontOnly } else { StoredAs::Pending },
                    );
                }
                Err(why) => self.observer.on_event(&EngineEvent::JournalFailed(&why)),
            }
        }
        self.settle_queue.push(lease.clone(), end);
        Decision::Refused(
            Refusal::new(
                RefusalReason::StoreUnavailable,
                "the operation ran, but its answer could not be recorded yet; \
                 a retry with the same key gets it once it is, and does not run it again",
            )
            .retry_after(RETRY_SOON),
        )
    }

    /// Decides what the caller gets after its claim was lost: the recorded answer, never its own response. If the
    /// record belongs to a different request (the key was forgotten and reused), the caller is refused.
    fn decide_lost_claim<O: Operation>(
        &self, policy: &Policy, lease: &Lease, now: ClaimOutcome, operation: &O,
    ) -> Decision<O::Answer> {
        self.observer.on_event(&EngineEvent::ClaimLost(&lease.request.address));
        if let Some(stored) = stored_fingerprint(&now)
            && let Some(refusal) = mismatch(policy, &lease.request.fingerprint, stored, operation)
        {
            return Decision::Refused(refusal);
        }
        match now {
            ClaimOutcome::Completed(finished) => Decision::Replay(finished, StoredAs::Recorded),
            ClaimOutcome::InProgress(_) | ClaimOutcome::Granted(_) | ClaimOutcome::TokenSpent => {
                Decision::Refused(in_progress(RETRY_SOON))
            }
            ClaimOutcome::OutcomeUnknown(_) => Decision::Refused(outcome_unknown()),
        }
    }

    /// Probes the app about an unknown outcome. Returns `true` if the entry was resolved and another claim is
    /// worthwhile.
    async fn probe_and_resolve<O: Operation>(
        &self, policy: &Policy, ask: &ClaimRequest, holder: &Holder, operation: &mut O,
    ) -> bool {
        let end = match Box::pin(operation.probe()).await {
            ProbeOutcome::Happened(CompletedAnswer { failed, record, summary }) => {
                Settlement::Complete { failed, record, summary, ttl: policy.ttl }
            }
            ProbeOutcome::DidNotHappen => Settlement::Release,
            ProbeOutcome::Inconclusive => return false,
        };
        match self.store.admin().resolve(&ask.address, holder.fence, &end).await {
            Ok(_) => true,
            Err(error) => {
                self.report_store_failure("resolve", &error);
                false
            }
        }
    }

    /// Refuses the request or runs it unprotected, depending on `on_store_down`.
    async fn decide_without_store<O: Operation>(
        &self, policy: &Policy, operation: &mut O, error: &StoreError,
    ) -> Decision<O::Answer> {
        let open = policy.on_store_down == OnStoreDown::Open && error.kind != ErrorKind::Corrupt;
        if !open {
            return Decision::Refused(store_unavailable());
        }
        run_unprotected(operation, StoredAs::Unprotected).await
    }

    async fn wait(&self, ask: &ClaimRequest, holder: &Holder, left: Duration) {
        let limit = left.min(holder.takeover_in.max(Duration::from_millis(1)));
        let sent = Instant::now();
        let waited = self.store.wait(&ask.address, holder.fence, limit).await;
        self.observer.asked(StoreCall::Wait, sent.elapsed());
        if let Err(error) = waited {
            self.report_store_failure("wait", &error);
            sleep(limit.min(Duration::from_millis(50))).await;
        }
    }

    /// Retries a claim whose response was lost with the same token, which yields the same outcome. Also returns whether
    /// any attempt was ambiguous. The caller passes the current time to avoid another clock read.
    async fn claim(&self, ask: &Arc<ClaimRequest>, now: Instant) -> (Result<ClaimOutcome, StoreError>, bool) {
        let (mut asked, mut sent, mut doubtful) = (0, now, false);
        loop {
            asked += 1;
            let answer = self.store.claim(ask).await;
            self.observer.asked(StoreCall::Claim, sent.elapsed());
            match answer {
                Err(error) => {
                    self.report_store_failure("claim", &error);
                    doubtful |= error.kind == ErrorKind::Ambiguous;
                    if error.kind != ErrorKind::Ambiguous || asked == MAX_STORE_ATTEMPTS {
                        return (Err(error), doubtful);
                    }
                }
                answer => return (answer, doubtful),
            }
            sleep(retry_delay(asked)).await;
            sent = Instant::now();
        }
    }

    /// The caller passes the current time, as for [`claim`](Self::claim).
    async fn settle(&self, lease: &Lease, end: &Settlement, now: Instant) -> Result<SettleOutcome, StoreError> {
        let (mut asked, mut sent) = (0, now);
        loop {
            asked += 1;
            let answer = self.store.settle(lease, end).await;
            self.observer.asked(StoreCall::Settle, sent.elapsed());
            match answer {
                Ok(held) => {
                    if held == SettleOutcome::Restored {
                        self.observer.on_event(&EngineEvent::EntryRestored(&lease.request.address));
                    }
                    return Ok(held);
                }
                Err(error) => {
                    self.report_store_failure("settle", &error);
                    if asked == MAX_STORE_ATTEMPTS {
                        return Err(error);
                    }
                }
            }
            sleep(retry_delay(asked)).await;
            sent = Instant::now();
        }
    }

    /// Extends the lease after each third of its length while `work` runs. Losing the lease never cancels the work.
    async fn run_with_heartbeat<T>(
        &self, lease: &Lease, policy: &Policy, mut work: Pin<&mut impl Future<Output = T>>,
    ) -> T {
        let beat = sleep(policy.lease / 3);
        tokio::pin!(beat);
        loop {
            tokio::select! {
                biased;
                ended = &mut work => return ended,
                () = &mut beat => {}
            }
            let extended = self.extend(lease, policy);
            tokio::pin!(extended);
            let now = tokio::select! {
                biased;
                ended = &mut work => return ended,
                now = &mut extended => now,
            };
            match now {
                HeartbeatOutcome::Extended => beat.as_mut().reset(from_now(policy.lease / 3)),
                // The settle call detects the lost claim and reports it once.
                HeartbeatOutcome::ClaimLost => return work.await,
                HeartbeatOutcome::Failed => beat.as_mut().reset(from_now(policy.lease / 10)),
            }
        }
    }

    async fn extend(&self, lease: &Lease, policy: &Policy) -> HeartbeatOutcome {
        let sent = Instant::now();
        let answer = self.store.extend(lease, policy.lease).await;
        self.observer.asked(StoreCall::Extend, sent.elapsed());
        match answer {
            Ok(SettleOutcome::Applied) => HeartbeatOutcome::Extended,
            Ok(SettleOutcome::Restored) => {
                self.observer.on_event(&EngineEvent::EntryRestored(&lease.request.address));
                HeartbeatOutcome::Extended
            }
            Ok(SettleOutcome::ClaimLost(_)) => HeartbeatOutcome::ClaimLost,
            Err(error) => {
                self.report_store_failure("extend", &error);
                HeartbeatOutcome::Failed
            }
        }
    }

    fn report_store_failure(&self, call: &'static str, error: &StoreError) {
        self.observer.on_event(&EngineEvent::StoreFailed { call, error });
    }

    /// The operations that run now.
    pub fn running(&self) -> &RunningOperations {
        &self.running
    }

    /// Returns what a claim at this address would find, without claiming. Checks the journal first, then the store.
    pub(crate) async fn peek(&self, at: &Address) -> Result<Option<ClaimOutcome>, StoreError> {
        if let Some((finished, _)) = self.journal.as_ref().and_then(|journal| journal.find(at)) {
            return Ok(Some(ClaimOutcome::Completed(finished)));
        }
        self.store.get(at).await.inspect_err(|error| self.report_store_failure("get", error))
    }

    /// The store that this engine claims from.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// The observer that this engine reports to.
    pub fn observer(&self) -> &Arc<dyn Observer> {
        &self.observer
    }

    /// The settlements that the store has not acknowledged yet.
    pub fn settle_queue(&self) -> &SettleQueue {
        &self.settle_queue
    }
}

async fn run_unprotected<O: Operation>(operation: &mut O, stored: StoredAs) -> Decision<O::Answer> {
    match Box::pin(operation.run(None)).await {
        RunOutcome::Complete(answer, _)
        | RunOutcome::Release(answer)
        | RunOutcome::Park(answer, _)
        | RunOutcome::DelegatedToTransaction(answer, _) => Decision::Ran(answer, stored),
        RunOutcome::NotStarted(refusal) => Decision::Refused(refusal),
    }
}

#[derive(PartialEq, Eq)]
enum HeartbeatOutcome {
    Extended,
    ClaimLost,
    Failed,
}

fn stored_fingerprint(claim: &ClaimOutcome) -> Option<&Fingerprint> {
    match claim {
        ClaimOutcome::InProgress(holder) | ClaimOutcome::OutcomeUnknown(holder) => Some(&holder.fingerprint),
        ClaimOutcome::Completed(finished) => Some(&finished.fingerprint),
        ClaimOutcome::Granted(_) | ClaimOutcome::TokenSpent => None,
    }
}

/// Returns a refusal if the stored fingerprint belongs to a different request or cannot be compared.
fn mismatch<O: Operation>(policy: &Policy, own: &Fingerprint, stored: &Fingerprint, operation: &O) -> Option<Refusal> {
    mismatch_with(policy, own, stored, |version| operation.fingerprint(version))
}

fn mismatch_with(
    policy: &Policy, own: &Fingerprint, stored: &Fingerprint, by_version: impl FnOnce(u8) -> Option<Fingerprint>,
) -> Option<Refusal> {
    if policy.on_mismatch != OnMismatch::Reject {
        return None;
    }
    match own.compare(stored, by_version) {
        FingerprintComparison::Same => None,
        FingerprintComparison::Different => Some(key_reused()),
        FingerprintComparison::UnknownVersion => Some(not_comparable()),
    }
}

fn retry_delay(asked: u32) -> Duration {
    Duration::from_millis(10) * asked * asked
}

fn key_reused() -> Refusal {
    Refusal::new(
        RefusalReason::KeyReused,
        "this key was first used for a different request; a new operation needs a fresh key",
    )
}

fn not_comparable() -> Refusal {
    Refusal::new(
        RefusalReason::StoreUnavailable,
        "nothing was executed, because this key was recorded by a version that this one cannot compare with; \
         try again with the same key",
    )
    .retry_after(RETRY_SOON)
}

fn in_progress(after: Duration) -> Refusal {
    Refusal::new(
        RefusalReason::InProgress,
        "the first request with this key has not ended yet; try again with the same key",
    )
    .retry_after(after)
}

fn outcome_unknown() -> Refusal {
    Refusal::new(
        RefusalReason::OutcomeUnknown,
        "an earlier request with this key was started and its end was never seen; \
         it is not run again until somebody has looked what became of it",
    )
}

fn rolled_back() -> Refusal {
    Refusal::new(
        RefusalReason::StoreUnavailable,
        "the operation was rolled back together with the record of its answer, so nothing was executed; \
         try again with the same key",
    )
    .retry_after(RETRY_SOON)
}

fn commit_unknown() -> Refusal {
    Refusal::new(
        RefusalReason::StoreUnavailable,
        "whether the operation was committed could not be asked; a retry with the same key gets its answer, \
         or runs it if it was not",
    )
    .retry_after(RETRY_SOON)
}

fn quota_exceeded(after: Duration) -> Refusal {
    let detail = "nothing was executed, because this caller has begun or stored as much as they may for now; \
                  retries of earlier ones are still answered";
    Refusal::new(RefusalReason::QuotaExceeded, detail).retry_after(after)
}

pub(crate) fn store_unavailable() -> Refusal {
    Refusal::new(
        RefusalReason::StoreUnavailable,
        "nothing was executed, because the request could not be remembered; try again with the same key",
    )
    .retry_after(RETRY_SOON)
}
