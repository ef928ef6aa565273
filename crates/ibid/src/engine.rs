//! Claim, run, settle: every decision about one request, in one function. Read [`Engine::execute`] first.
//!
//! The engine knows no HTTP, no gRPC and no database. What it runs is an [`Operation`]; what it decides by are the
//! store's answers and the [`Policy`].
//!
//! The one rule everything serves: **record first, then answer.** No caller sees the end of an answer that is not
//! recorded, and a holder that lost its claim gives what the record says, never its own reply.

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

/// How often a store call is sent again when its answer was lost.
const MAX_STORE_ATTEMPTS: u32 = 3;
/// How often one request tries to take over before it is told to come back.
const MAX_TAKEOVERS: u32 = 8;
/// Told to those who should come back soon.
const RETRY_SOON: Duration = Duration::from_secs(1);

/// Something to run at most once.
pub trait Operation: Send {
    /// What the caller gets of it.
    type Answer: Send;

    /// Runs it; called at most once. Without a lease it runs unprotected.
    fn run(&mut self, lease: Option<&Lease>) -> impl Future<Output = RunOutcome<Self::Answer>> + Send;

    /// How long its caller waits at most for another run of it to end, whatever the policy allows.
    fn patience(&self) -> Duration {
        Duration::MAX
    }

    /// The fingerprint of its request by the rules of a version. `None` if that version is not known: what was recorded by
    /// it cannot be compared with this request.
    fn fingerprint(&self, version: u8) -> Option<Fingerprint> {
        let _ = version;
        None
    }

    /// Asks whether an earlier run took place. Must have no effect of its own.
    fn probe(&mut self) -> impl Future<Output = ProbeOutcome> + Send {
        async { ProbeOutcome::Inconclusive }
    }
}

/// How a run ended.
#[derive(Debug)]
#[must_use]
pub enum RunOutcome<A> {
    /// With an answer to remember.
    Complete(A, CompletedAnswer),
    /// With a complete answer that is not remembered.
    Release(A),
    /// It provably did not start.
    NotStarted(Refusal),
    /// Nobody knows; the caller gets this.
    Park(A, UnknownCause),
    /// It wrote its answer to the store in a transaction of its own: the store knows whether that was committed.
    DelegatedToTransaction(A, OnRollback),
}

/// What becomes of a claim whose answer was entrusted to a transaction, if that was not committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnRollback {
    /// Its answer is the one that was to be recorded: it is released, and the caller must not get that answer.
    Refuse,
    /// It is released, and the caller gets its answer.
    Release,
    /// It is parked, and the caller gets its answer.
    Park(UnknownCause),
}

/// What is remembered.
#[derive(Debug, Clone)]
pub struct CompletedAnswer {
    /// Whether it is a failure.
    pub failed: bool,
    /// See [`crate::Record`].
    pub record: Bytes,
    /// For people.
    pub summary: RecordSummary,
}

/// Why an outcome is unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnknownCause {
    /// The app's complete answer leaves it open, or the handler panicked. It runs no more.
    AppSaidSo,
    /// The answer was lost. The operation may still be running.
    ConnectionLost,
    /// The operation took too long and may still be running.
    TimedOut,
    /// No answer came within `timeout` and `late_answer`. The operation counts as ended.
    NoLateAnswer,
}

impl UnknownCause {
    /// When the claim may be taken over: an operation that may still be running has the time of a lease to end.
    fn retry_in(self, policy: &Policy) -> Duration {
        match self {
            Self::ConnectionLost | Self::TimedOut => policy.lease,
            Self::AppSaidSo | Self::NoLateAnswer => Duration::ZERO,
        }
    }
}

/// What the app says about an earlier run.
#[derive(Debug)]
pub enum ProbeOutcome {
    /// It took place; this was its answer.
    Happened(CompletedAnswer),
    /// It did not.
    DidNotHappen,
    /// The app cannot say.
    Inconclusive,
}

/// What the caller of a request gets.
#[derive(Debug)]
#[must_use]
pub enum Decision<A> {
    /// The answer of this run.
    Ran(A, StoredAs),
    /// The remembered answer, and where it is remembered: in the store, or still in the journal.
    Replay(CompletedEntry, StoredAs),
    /// A refusal.
    Refused(Refusal),
}

/// What became of the answer of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoredAs {
    /// It is recorded.
    Recorded,
    /// It is not remembered.
    NotRecorded,
    /// It waits in the journal.
    Pending,
    /// The outcome is recorded as unknown.
    OutcomeUnknown,
    /// It ran without protection.
    Unprotected,
    /// It ran with the protection of a part of the store only, and waits in the journal for the part that decides.
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
    /// An engine on a store.
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self::with_observer(store, Arc::new(NoopObserver), None)
    }

    /// An engine that is watched and, if it has one, keeps unrecorded answers in a journal.
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

    /// The same, for tenants who may begin only so much.
    #[must_use]
    pub fn with_quota(self, quota: Arc<Quota>) -> Self {
        Self { quota: Some(quota), ..self }
    }

    /// Decides about one request, top to bottom.
    pub fn execute<O: Operation>(
        &self, policy: &CheckedPolicy, ask: ClaimRequest, mut operation: O,
    ) -> impl Future<Output = Decision<O::Answer>> {
        let ask = Arc::new(ask);
        // Not an `async fn`: that would hold its arguments twice.
        async move { self.decide(policy, ask, &mut operation).await }
    }

    /// Futures are moved, with all that they have room for. What only some requests need is boxed, so that a replay
    /// does not pay for it.
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
                // A copy of it may still be on its way: it must not come alive once the holder is gone. Whoever goes on
                // asking does so under another name.
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
                        // It may still be running. Once it cannot be any more, the app is asked, or it runs again.
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
                // An operator forgot the claim while its answer was on the way: start over under another name.
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

    /// A tenant who has used up their quota claims nothing new. What is known already is answered all the same.
    async fn check_quota(&self, ask: &ClaimRequest) -> Option<Refusal> {
        let quota = self.quota.as_ref().filter(|quota| quota.is_set())?;
        let after = Box::pin(quota.check(self.store.as_ref(), &ask.tags)).await.err()?;
        // A store that does not say is asked again, by the claim.
        let is_new = matches!(self.store.get(&ask.address).await, Ok(None));
        is_new.then(|| quota_exceeded(after))
    }

    /// Only a grant spends, and only the first at its address: to run again is not to begin.
    async fn spend_quota(&self, lease: &Lease) -> Option<Refusal> {
        let quota = self.quota.as_ref().filter(|quota| quota.is_set() && lease.attempt <= 1)?;
        Box::pin(quota.spend(self.store.as_ref(), &lease.request.tags)).await.err().map(quota_exceeded)
    }

    /// What was recorded counts in its tenant's quota of bytes.
    async fn charge_quota(&self, lease: &Lease, recorded: usize) {
        let Some(quota) = self.quota.as_ref().filter(|quota| quota.is_set()) else { return };
        let ClaimRequest { tags, label, .. } = &*lease.request;
        let bytes = (recorded + tags.as_bytes().len() + label.len()) as u64;
        Box::pin(quota.charge_bytes(self.store.as_ref(), tags, bytes)).await;
    }

    /// Runs a granted operation under its lease and settles it.
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

    /// Its own transaction was to record the answer. Whatever settles after that waits for the transaction's end, so that
    /// one call tells both: what was committed is found done, and what was not did not happen.
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

    /// Settles an end that carries no answer: if the store cannot take it now, it is told until it does.
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

    /// An answer that the store cannot record: to the journal; without one, the answer is withheld until it is stored.
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

    /// A claim that is lost gives what the record says, never its own reply; and never what it says to another request:
    /// the key may have been forgotten, or lost by the store, and used again since.
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

    /// Asks the app about an unknown outcome. `true` if the entry has changed and is worth another claim.
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

    /// The store cannot decide: refused, or run unprotected, as the policy says.
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

    /// A claim whose answer is lost is sent again with the same token: the store gives the same answer. `now` is now:
    /// the clock is read often enough as it is.
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

    /// `now` is now, as for [`claim`](Self::claim).
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

    /// Extends the lease at a third of its length while `work` goes on. Losing it never cancels the work.
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
                // The settle will find out, and say so once.
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

    /// What is running now.
    pub fn running(&self) -> &RunningOperations {
        &self.running
    }

    /// What a claim at this address would find, without claiming: in the journal, else in the store.
    pub(crate) async fn peek(&self, at: &Address) -> Result<Option<ClaimOutcome>, StoreError> {
        if let Some((finished, _)) = self.journal.as_ref().and_then(|journal| journal.find(at)) {
            return Ok(Some(ClaimOutcome::Completed(finished)));
        }
        self.store.get(at).await.inspect_err(|error| self.report_store_failure("get", error))
    }

    /// Its store.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// Its observer.
    pub fn observer(&self) -> &Arc<dyn Observer> {
        &self.observer
    }

    /// What waits for the store.
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

/// What is compared of what the store holds.
fn stored_fingerprint(claim: &ClaimOutcome) -> Option<&Fingerprint> {
    match claim {
        ClaimOutcome::InProgress(holder) | ClaimOutcome::OutcomeUnknown(holder) => Some(&holder.fingerprint),
        ClaimOutcome::Completed(finished) => Some(&finished.fingerprint),
        ClaimOutcome::Granted(_) | ClaimOutcome::TokenSpent => None,
    }
}

/// Why a request cannot have what is stored under its key: it is another one's, or nobody can tell.
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
