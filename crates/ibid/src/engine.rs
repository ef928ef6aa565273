//! Claims, runs and settles one request. Start with [`Engine::execute`].
//!
//! The engine knows no HTTP, no gRPC and no database. It runs an [`Operation`] and decides by the store's replies and
//! the [`Policy`](crate::Policy).
//!
//! Invariant: **record first, then answer.** A caller never sees the end of an answer that is not recorded, and a
//! holder that lost its claim returns the recorded answer, never its own response.

use std::{future::Future, sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::time::{Instant, sleep};

use crate::{
    fingerprint::FingerprintComparison,
    journal::Journal,
    observe::{EngineEvent, NoopObserver, Observer, StoreCall},
    policy::{OnConcurrent, OnMismatch, OnStoreDown, OnUnknown, Terms},
    quota::Quota,
    refusal::Refusal,
    running::RunningOperations,
    settle_queue::SettleQueue,
    store::{
        Address, ClaimOutcome, ClaimRequest, ClaimToken, CompletedEntry, ErrorKind, Fingerprint, Holder, Lease,
        RecordSummary, Settlement, Store, StoreError,
    },
    time::{call_at, from_now},
};

pub(crate) use self::refusals::store_unavailable;
use self::refusals::{NOT_COMPARABLE, in_progress, key_reused, outcome_unknown, quota_exceeded, retry_at_store};
pub(crate) use self::run::Heartbeat;
pub use self::{
    run::ClaimedRun,
    shadow::{ShadowClaim, ShadowResult, ShadowRunOutcome},
};

mod intent;
mod refusals;
mod run;
mod shadow;

/// The maximum number of attempts at one claim or settle call.
const MAX_STORE_ATTEMPTS: u32 = 3;
/// The maximum number of takeovers and token renewals per request; beyond it the request is refused as in progress.
const MAX_TAKEOVERS: u32 = 8;
/// `Retry-After` of refusals that clear up soon.
const RETRY_SOON: Duration = Duration::from_secs(1);

/// What the engine may ask about a request before it runs.
pub trait Claimant: Send {
    /// The longest time that the caller waits for a concurrent run to end. The policy may allow less.
    fn max_wait(&self) -> Duration {
        Duration::MAX
    }

    /// Computes the request's fingerprint by the rules of `version`. Returns `None` if the version is unknown; a record
    /// of that version cannot be compared with this request.
    fn fingerprint(&self, version: u8) -> Option<Fingerprint> {
        let _ = version;
        None
    }

    /// Whether an intent guard may hold the request's key.
    fn may_be_held(&self) -> bool {
        false
    }

    /// Asks the app whether an earlier run took place. A probe must have no side effects.
    fn probe(&mut self) -> impl Future<Output = ProbeOutcome> + Send {
        async { ProbeOutcome::Inconclusive }
    }
}

/// An operation that the engine runs at most once.
pub trait Operation: Claimant {
    /// The result that the caller gets.
    type Answer: Send;

    /// Runs the operation. The engine calls this at most once; without a lease the operation runs unprotected.
    fn run(&mut self, lease: Option<&Lease>) -> impl Future<Output = RunOutcome<Self::Answer>> + Send;
}

/// The result of [`Engine::begin`].
#[must_use]
pub enum BeginOutcome {
    /// The claim is granted: run the operation, then call [`Engine::end`].
    Run(ClaimedRun),
    /// The store is down, and the policy lets the operation run unprotected.
    RunUnprotected,
    /// A remembered answer, and whether it is in the store or still in the journal.
    Replay(CompletedEntry, StoredAs),
    /// The request is refused.
    Refused(Refusal),
}

impl BeginOutcome {
    /// Replays an answer that the store returned.
    fn replay(entry: CompletedEntry) -> Self {
        let stored = StoredAs::of(&entry);
        Self::Replay(entry, stored)
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
    /// The encoded [`crate::record::Record`].
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
    fn retry_in(self, policy: &Terms) -> Duration {
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

impl<A> Decision<A> {
    /// Replays an answer that the store returned.
    fn replay(entry: CompletedEntry) -> Self {
        let stored = StoredAs::of(&entry);
        Self::Replay(entry, stored)
    }

    /// The decision about a run without a claim.
    pub(crate) fn unprotected(outcome: RunOutcome<A>) -> Self {
        match outcome {
            RunOutcome::Complete(answer, _)
            | RunOutcome::Release(answer)
            | RunOutcome::Park(answer, _)
            | RunOutcome::DelegatedToTransaction(answer, _) => Self::Ran(answer, StoredAs::Unprotected),
            RunOutcome::NotStarted(refusal) => Self::Refused(refusal),
        }
    }
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
    /// In the journal or in the front store: only the front protected the run, and the authority has not recorded it
    /// yet.
    FrontOnly,
}

impl StoredAs {
    /// Where an answer is that the store returned.
    pub(crate) fn of(entry: &CompletedEntry) -> Self {
        if entry.front_only { Self::FrontOnly } else { Self::Recorded }
    }
}

/// The outcome of a claim, when the call ended, and whether a delayed copy of it could still be granted.
type ClaimAttempt = (Result<ClaimOutcome, StoreError>, Instant, bool);

/// Runs operations at most once. Cheap to clone.
#[derive(Clone)]
pub struct Engine {
    store: Arc<dyn Store>,
    observer: Arc<dyn Observer>,
    is_observed: bool,
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
        let (running, shadow_recordings) = (RunningOperations::default(), Arc::default());
        let is_observed = observer.is_active();
        Self { store, observer, is_observed, journal, settle_queue, running, quota: None, shadow_recordings }
    }

    /// Limits how many operations each tenant may start.
    #[must_use]
    pub fn with_quota(self, quota: Arc<Quota>) -> Self {
        Self { quota: Some(quota), ..self }
    }

    /// Decides what happens to one request, and runs `operation` if the claim is granted.
    pub async fn execute<O: Operation>(
        &self, policy: &Terms, request: ClaimRequest, mut operation: O,
    ) -> Decision<O::Answer> {
        match self.begin(policy, request, &mut operation).await {
            BeginOutcome::Run(run) => {
                let outcome = {
                    let mut work = Box::pin(operation.run(Some(run.lease())));
                    self.keep_alive(policy, run.lease(), work.as_mut()).await
                };
                let operation = &mut operation;
                Box::pin(self.end(policy, run, outcome, move |version| operation.fingerprint(version))).await
            }
            BeginOutcome::RunUnprotected => Decision::unprotected(Box::pin(operation.run(None)).await),
            BeginOutcome::Replay(entry, stored) => Decision::Replay(entry, stored),
            BeginOutcome::Refused(refusal) => Decision::Refused(refusal),
        }
    }

    /// Decides what happens to one request. The caller runs the operation if the claim is granted, under
    /// [`keep_alive`](Self::keep_alive), and settles it with [`end`](Self::end).
    ///
    /// Boxes the branches that only some requests take: futures are moved as a whole, and a replay should not pay for
    /// them.
    pub async fn begin<C: Claimant>(&self, policy: &Terms, request: ClaimRequest, claimant: &mut C) -> BeginOutcome {
        self.begin_at(Instant::now(), policy, Arc::new(request), claimant).await
    }

    /// Like [`begin`](Self::begin), for a caller that has just read the clock.
    pub(crate) async fn begin_at<C: Claimant>(
        &self, now: Instant, policy: &Terms, ask: Arc<ClaimRequest>, claimant: &mut C,
    ) -> BeginOutcome {
        if let Some(finished) = self.journal.as_ref().and_then(|journal| journal.find(&ask.address)) {
            if let Some(refusal) =
                mismatch(policy, &ask.fingerprint, &finished.fingerprint, |version| claimant.fingerprint(version))
            {
                return BeginOutcome::Refused(refusal);
            }
            let stored = if finished.front_only { StoredAs::FrontOnly } else { StoredAs::Pending };
            return BeginOutcome::Replay(finished, stored);
        }
        if let Some(quota) = self.active_quota()
            && let Some(refusal) = Box::pin(self.check_quota(quota, &ask)).await
        {
            return BeginOutcome::Refused(refusal);
        }
        match self.claim(&ask, now).await {
            (Ok(ClaimOutcome::Granted(lease)), granted_at, _) => {
                match self.try_start_run(policy, lease, now, granted_at) {
                    Ok(run) => BeginOutcome::Run(run),
                    Err(run) => Box::pin(self.start_run(policy, run)).await,
                }
            }
            (Ok(ClaimOutcome::Completed(finished)), ..) if finished.fingerprint == ask.fingerprint => {
                BeginOutcome::replay(finished)
            }
            attempt => Box::pin(self.decide_claim(policy, ask, now, attempt, claimant)).await,
        }
    }

    /// Decides by the claim that was `sent`, and by further claims until one is granted or the request is answered.
    async fn decide_claim<C: Claimant>(
        &self, policy: &Terms, mut ask: Arc<ClaimRequest>, mut sent: Instant, attempt: ClaimAttempt, claimant: &mut C,
    ) -> BeginOutcome {
        let own = ask.fingerprint;
        let mut attempt = Some(attempt);
        // Set when the request first waits.
        let mut patience = None;
        let mut takeovers = 0;
        let mut probed = false;
        loop {
            let (claim, granted_at, doubtful) = match attempt.take() {
                Some(attempt) => attempt,
                None => {
                    sent = Instant::now();
                    self.claim(&ask, sent).await
                }
            };
            if doubtful {
                ask = Arc::new(ClaimRequest { token: ClaimToken::mint(), ..ClaimRequest::clone(&ask) });
            }
            let claim = match claim {
                Ok(claim) => claim,
                Err(error) if error.kind == ErrorKind::Corrupt => return BeginOutcome::Refused(store_unavailable()),
                Err(_) if policy.on_store_down == OnStoreDown::Open => return BeginOutcome::RunUnprotected,
                Err(_) => return BeginOutcome::Refused(store_unavailable()),
            };
            if let Some(stored) = stored_fingerprint(&claim)
                && let Some(refusal) = mismatch(policy, &own, stored, |version| claimant.fingerprint(version))
            {
                return BeginOutcome::Refused(refusal);
            }
            match claim {
                ClaimOutcome::Granted(lease) => {
                    return match self.try_start_run(policy, lease, sent, granted_at) {
                        Ok(run) => BeginOutcome::Run(run),
                        Err(run) => Box::pin(self.start_run(policy, run)).await,
                    };
                }
                ClaimOutcome::Completed(finished) => return BeginOutcome::replay(finished),
                ClaimOutcome::InProgress(holder) => {
                    let left = time_left(&mut patience, policy, claimant);
                    if policy.on_concurrent == OnConcurrent::Reject || left.is_zero() {
                        return BeginOutcome::Refused(in_progress(RETRY_SOON));
                    }
                    Box::pin(self.wait(&ask, &holder, left)).await;
                }
                ClaimOutcome::OutcomeUnknown(holder) => {
                    if claimant.may_be_held()
                        && let Some(refusal) = Box::pin(self.check_held(&ask.address)).await
                    {
                        return BeginOutcome::Refused(refusal);
                    }
                    let left = time_left(&mut patience, policy, claimant);
                    let ripe = holder.takeover_in.is_zero();
                    if ripe && policy.can_probe && !probed {
                        probed = true;
                        if Box::pin(self.probe_and_resolve(policy, &ask, &holder, claimant)).await {
                            continue;
                        }
                    }
                    match policy.on_unknown {
                        // The earlier run may still be going on. Once its takeover time has come, probe the app or run
                        // again.
                        _ if !ripe && (policy.on_unknown == OnUnknown::Retry || policy.can_probe) => {
                            if policy.on_concurrent == OnConcurrent::Reject || left.is_zero() {
                                return BeginOutcome::Refused(in_progress(holder.takeover_in.max(RETRY_SOON)));
                            }
                            Box::pin(sleep(holder.takeover_in.min(left))).await;
                        }
                        OnUnknown::Hold => return BeginOutcome::Refused(outcome_unknown()),
                        OnUnknown::Retry if takeovers < MAX_TAKEOVERS => {
                            takeovers += 1;
                            ask = Arc::new(ClaimRequest { take_over: Some(holder.fence), ..ClaimRequest::clone(&ask) });
                        }
                        OnUnknown::Retry => return BeginOutcome::Refused(in_progress(RETRY_SOON)),
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
                ClaimOutcome::TokenSpent => return BeginOutcome::Refused(in_progress(RETRY_SOON)),
            }
        }
    }

    /// The quota, if it has a limit.
    fn active_quota(&self) -> Option<&Quota> {
        self.quota.as_deref().filter(|quota| quota.is_set())
    }

    /// Refuses a new key of a tenant without quota left. Known keys are still answered.
    async fn check_quota(&self, quota: &Quota, ask: &ClaimRequest) -> Option<Refusal> {
        let after = Box::pin(quota.check(self.store.as_ref(), &ask.tags)).await.err()?;
        // If the store call fails, the claim that follows decides.
        let is_new = matches!(self.store.get(&ask.address).await, Ok(None));
        is_new.then(|| quota_exceeded(after))
    }

    /// Spends quota for the first run at an address only; a rerun is not a new operation.
    async fn spend_quota(&self, lease: &Lease) -> Option<Refusal> {
        let quota = self.active_quota().filter(|_| lease.attempt <= 1)?;
        Box::pin(quota.spend(self.store.as_ref(), &lease.request.tags)).await.err().map(quota_exceeded)
    }

    /// Probes the app about an unknown outcome. Returns `true` if the entry was resolved and another claim is
    /// worthwhile.
    async fn probe_and_resolve<C: Claimant>(
        &self, policy: &Terms, ask: &ClaimRequest, holder: &Holder, claimant: &mut C,
    ) -> bool {
        let outcome = Box::pin(claimant.probe()).await;
        let happened = match &outcome {
            ProbeOutcome::Happened(_) => Some(true),
            ProbeOutcome::DidNotHappen => Some(false),
            ProbeOutcome::Inconclusive => None,
        };
        self.observer.on_event(&EngineEvent::Probed { address: &ask.address, happened });
        let end = match outcome {
            ProbeOutcome::Happened(answer) => answer.into_settlement(policy.ttl),
            ProbeOutcome::DidNotHappen => Settlement::Release,
            ProbeOutcome::Inconclusive => return false,
        };
        let resolved = self.store.admin().resolve(&ask.address, holder.fence, &end).await;
        resolved.inspect_err(|error| self.report_store_failure("resolve", error)).is_ok()
    }

    async fn wait(&self, ask: &ClaimRequest, holder: &Holder, left: Duration) {
        let limit = left.min(holder.takeover_in.max(Duration::from_millis(1)));
        let sent = Instant::now();
        let waited = self.store.wait(&ask.address, holder.fence, limit).await;
        self.observer.on_store_call(StoreCall::Wait, sent.elapsed());
        if let Err(error) = waited {
            self.report_store_failure("wait", &error);
            sleep(limit.min(Duration::from_millis(50))).await;
        }
    }

    /// Retries a claim whose response was lost with the same token, which yields the same outcome. The caller passes
    /// the current time to avoid another clock read.
    ///
    /// Also returns when the call ended (at `now`, if it was decided at once and nobody measures), and whether a delayed copy of the claim could still reach the store and be granted after the holder has
    /// gone. Its token is then released, and must not be used again.
    async fn claim(&self, ask: &Arc<ClaimRequest>, now: Instant) -> ClaimAttempt {
        let (mut asked, mut sent, mut doubtful) = (0, now, false);
        let (answer, ended) = loop {
            asked += 1;
            let call = call_at(sent, || self.store.claim(ask));
            let is_decided = call.is_ready();
            let answer = call.await;
            let ended = if is_decided { self.measured(sent) } else { Instant::now() };
            if self.is_observed {
                self.observer.on_store_call(StoreCall::Claim, ended - sent);
            }
            let Err(error) = &answer else { break (answer, ended) };
            self.report_store_failure("claim", error);
            doubtful |= error.kind == ErrorKind::Ambiguous;
            if error.kind != ErrorKind::Ambiguous || asked == MAX_STORE_ATTEMPTS {
                break (answer, ended);
            }
            Box::pin(sleep(retry_delay(asked))).await;
            sent = Instant::now();
        };
        doubtful &=
            !matches!(answer, Ok(ClaimOutcome::Granted(_) | ClaimOutcome::Completed(_) | ClaimOutcome::TokenSpent));
        if doubtful {
            self.settle_queue.push(Lease::unseen(ask), Settlement::Release);
        }
        (answer, ended, doubtful)
    }

    /// The current time if the observer measures with it, otherwise `recent`, the time a moment ago.
    pub(crate) fn measured(&self, recent: Instant) -> Instant {
        if self.is_observed { Instant::now() } else { recent }
    }

    fn report_store_failure(&self, call: &'static str, error: &StoreError) {
        self.observer.on_event(&EngineEvent::StoreFailed(call, error));
    }

    /// The operations that run now.
    pub fn running(&self) -> &RunningOperations {
        &self.running
    }

    /// Returns what a claim at this address would find, without claiming. Checks the journal first, then the store.
    pub(crate) async fn peek(&self, at: &Address) -> Result<Option<ClaimOutcome>, StoreError> {
        if let Some(finished) = self.journal.as_ref().and_then(|journal| journal.find(at)) {
            return Ok(Some(ClaimOutcome::Completed(finished)));
        }
        self.store.get(at).await.inspect_err(|error| self.report_store_failure("get", error))
    }

    /// Returns the answer to the same request if the store has it in memory. This is a fast path: a claim would return
    /// the same, but has to be prepared first.
    pub(crate) fn find_completed(&self, at: &Address, own: &Fingerprint, sent: Instant) -> Option<CompletedEntry> {
        if self.journal.as_ref().is_some_and(|journal| !journal.is_empty()) {
            return None;
        }
        let found = call_at(sent, || self.store.find_completed(at)).filter(|found| found.fingerprint == *own)?;
        if self.is_observed {
            self.observer.on_store_call(StoreCall::Claim, sent.elapsed());
        }
        Some(found)
    }

    /// The store that this engine claims from.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// Whether the observer uses reports.
    pub(crate) fn is_observed(&self) -> bool {
        self.is_observed
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

/// How long the caller still waits, from its first wait on.
fn time_left(patience: &mut Option<Instant>, policy: &Terms, claimant: &impl Claimant) -> Duration {
    let until = patience.get_or_insert_with(|| from_now(policy.wait_timeout.min(claimant.max_wait())));
    until.saturating_duration_since(Instant::now())
}

fn stored_fingerprint(claim: &ClaimOutcome) -> Option<&Fingerprint> {
    match claim {
        ClaimOutcome::InProgress(holder) | ClaimOutcome::OutcomeUnknown(holder) => Some(&holder.fingerprint),
        ClaimOutcome::Completed(finished) => Some(&finished.fingerprint),
        ClaimOutcome::Granted(_) | ClaimOutcome::TokenSpent => None,
    }
}

/// Returns a refusal if the stored fingerprint belongs to a different request or cannot be compared.
fn mismatch(
    policy: &Terms, own: &Fingerprint, stored: &Fingerprint, by_version: impl FnOnce(u8) -> Option<Fingerprint>,
) -> Option<Refusal> {
    if policy.on_mismatch != OnMismatch::Reject {
        return None;
    }
    match own.compare(stored, by_version) {
        FingerprintComparison::Same => None,
        FingerprintComparison::Different => Some(key_reused()),
        FingerprintComparison::UnknownVersion => Some(retry_at_store(NOT_COMPARABLE)),
    }
}

fn retry_delay(asked: u32) -> Duration {
    Duration::from_millis(10) * asked * asked
}
