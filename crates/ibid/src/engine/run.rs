//! Runs under a claim: the heartbeat while the operation runs, and the settlement at its end.

use std::{future::Future, pin::Pin};

use tokio::time::{Instant, sleep, timeout_at};

use super::{
    BeginOutcome, Decision, Engine, MAX_STORE_ATTEMPTS, OnRollback, RETRY_SOON, RunOutcome, StoredAs, UnknownCause,
    intent::HeldIntent,
    mismatch,
    refusals::{self, COMMIT_UNKNOWN, NOT_RECORDED, ROLLED_BACK, retry_at_store},
    retry_delay, stored_fingerprint,
};
use crate::{
    observe::{EngineEvent, StoreCall},
    policy::{CheckedPolicy, Terms},
    refusal::Refusal,
    settle_queue::AbandonGuard,
    store::{ClaimOutcome, ClaimRequest, Fingerprint, Lease, SettleOutcome, Settlement, StoreError},
    time::{call_at, from_now, until},
};

/// A granted claim whose operation runs now. If it is dropped before [`Engine::end`], the outcome is unknown.
#[must_use]
pub struct ClaimedRun {
    guard: AbandonGuard,
    claimed_at: Instant,
    granted_at: Instant,
    /// Boxed, because most routes have no guard.
    pub(super) intent: Option<Box<HeldIntent>>,
}

impl ClaimedRun {
    /// The lease of the claim.
    pub fn lease(&self) -> &Lease {
        self.guard.lease()
    }

    /// The lease of the intent, if one is held.
    pub(crate) fn intent(&self) -> Option<&Lease> {
        self.intent.as_ref().map(|held| held.lease())
    }

    /// The claim is settled.
    pub(super) fn disarm(&mut self) {
        self.guard.disarm();
    }

    /// When the claim was sent to the store.
    pub(crate) fn claimed_at(&self) -> Instant {
        self.claimed_at
    }

    /// When the engine knew that the claim was granted.
    pub(crate) fn granted_at(&self) -> Instant {
        self.granted_at
    }

    /// Whether most of the lease has passed before the run can start.
    fn is_late(&self, policy: &Terms, now: Instant) -> bool {
        now != self.claimed_at && now - self.claimed_at > policy.lease * 2 / 3
    }
}

#[derive(PartialEq, Eq)]
enum HeartbeatOutcome {
    Extended,
    ClaimLost,
    Failed,
}

/// Extends a lease after each third of its length.
pub(crate) struct Heartbeat<'a> {
    engine: &'a Engine,
    policy: &'a Terms,
    /// `None` if the operation runs unprotected.
    lease: Option<&'a Lease>,
    intent: Option<&'a Lease>,
    /// When the lease is next extended. `None` once it is lost: the settle call detects that and reports it once.
    next_at: Option<Instant>,
}

impl Heartbeat<'_> {
    /// Returns what `work` returns, or `None` at the deadline. The lease is kept alive meanwhile. One timer serves both.
    pub(crate) async fn keep<T>(
        &mut self, deadline: Option<Instant>, mut work: Pin<&mut impl Future<Output = T>>,
    ) -> Option<T> {
        loop {
            let Some(wake_at) = self.next_at.into_iter().chain(deadline).min() else { return Some(work.await) };
            if let Some(ended) = until(wake_at, work.as_mut()).await {
                return Some(ended);
            }
            if deadline == Some(wake_at) {
                return None;
            }
            // Boxed, because most runs end before.
            let lease = self.lease.expect("only a lease is extended");
            let extend = Box::pin(async {
                let extended = self.engine.extend(lease, self.policy).await;
                // The key's lease decides: an operator may have freed the intent.
                if let Some(intent) = self.intent.filter(|_| extended != HeartbeatOutcome::ClaimLost) {
                    self.engine.extend(intent, self.policy).await;
                }
                extended
            });
            let both = Box::pin(async {
                tokio::select! {
                    biased;
                    ended = work.as_mut() => Ok(ended),
                    extended = extend => Err(extended),
                }
            });
            let outcome = match deadline {
                Some(deadline) => timeout_at(deadline, both).await.ok()?,
                None => both.await,
            };
            self.next_at = match outcome {
                Ok(ended) => return Some(ended),
                Err(HeartbeatOutcome::Extended) => Some(from_now(self.policy.lease / 3)),
                Err(HeartbeatOutcome::ClaimLost) => None,
                Err(HeartbeatOutcome::Failed) => Some(from_now(self.policy.lease / 10)),
            };
        }
    }
}

/// What the caller gets once the claim is settled, unless the claim was lost.
enum Ending<A> {
    Answer(A, StoredAs),
    Refused(Refusal),
    /// The operation's own transaction records the answer.
    Delegated(A, OnRollback),
}

impl Engine {
    /// Continues a run whose claim was granted earlier.
    pub(crate) fn resume(&self, policy: &CheckedPolicy, lease: Lease) -> ClaimedRun {
        let (now, terms) = (Instant::now(), policy.terms());
        let intent = policy.guard.as_ref().and_then(|guard| self.resume_intent(terms, guard, &lease));
        ClaimedRun { guard: self.settle_queue.guard_claim(lease, terms), claimed_at: now, granted_at: now, intent }
    }

    /// Starts a run at once, if no quota applies and the claim took little time.
    pub(super) fn try_start_run(
        &self, policy: &Terms, lease: Lease, claimed_at: Instant, granted_at: Instant,
    ) -> Result<ClaimedRun, ClaimedRun> {
        let guard = self.settle_queue.guard_claim(lease, policy);
        let run = ClaimedRun { guard, claimed_at, granted_at, intent: None };
        if self.active_quota().is_none() && !run.is_late(policy, granted_at) { Ok(run) } else { Err(run) }
    }

    /// Spends quota and extends a lease that has nearly expired before the run starts.
    pub(super) async fn start_run(&self, policy: &Terms, mut run: ClaimedRun) -> BeginOutcome {
        if let Some(refusal) = self.spend_quota(run.lease()).await {
            self.settle_or_queue(run.lease(), Settlement::Release).await;
            run.guard.disarm();
            return BeginOutcome::Refused(refusal);
        }
        self.start_in_time(policy, run).await
    }

    /// Settles a claim now, or in the background if the store fails.
    pub(super) async fn settle_or_queue(&self, lease: &Lease, settlement: Settlement) {
        if self.settle(lease, &settlement, Instant::now()).await.is_err() {
            self.settle_queue.push(lease.clone(), settlement);
        }
    }

    /// Extends a lease that has nearly expired before the run starts.
    pub(super) async fn start_in_time(&self, policy: &Terms, mut run: ClaimedRun) -> BeginOutcome {
        let now = Instant::now();
        run.granted_at = now;
        if run.is_late(policy, now) {
            match self.extend(run.lease(), policy).await {
                HeartbeatOutcome::Extended => run.claimed_at = now,
                HeartbeatOutcome::Failed => {}
                HeartbeatOutcome::ClaimLost => {
                    run.guard.disarm();
                    return BeginOutcome::Refused(refusals::in_progress(RETRY_SOON));
                }
            }
        }
        BeginOutcome::Run(run)
    }

    /// Extends the lease after each third of its length while `work` runs. Losing the lease never cancels the work.
    pub async fn keep_alive<T>(&self, policy: &Terms, lease: &Lease, work: Pin<&mut impl Future<Output = T>>) -> T {
        let kept = self.heartbeat(policy, Some((lease, Instant::now())), None).keep(None, work).await;
        kept.expect("without a deadline, only the work ends it")
    }

    /// The heartbeat of a lease that was granted or extended at this time, and of its intent's.
    pub(crate) fn heartbeat<'a>(
        &'a self, policy: &'a Terms, lease: Option<(&'a Lease, Instant)>, intent: Option<&'a Lease>,
    ) -> Heartbeat<'a> {
        let next_at = lease.and_then(|(_, since)| since.checked_add(policy.lease / 3));
        Heartbeat { engine: self, policy, lease: lease.map(|(lease, _)| lease), intent, next_at }
    }

    async fn extend(&self, lease: &Lease, policy: &Terms) -> HeartbeatOutcome {
        let sent = Instant::now();
        let answer = self.store.extend(lease, policy.lease).await;
        self.observer.on_store_call(StoreCall::Extend, sent.elapsed());
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

    /// Settles the claim and decides what the caller gets. `by_version` computes the request's fingerprint by the rules
    /// of other versions, see [`Claimant::fingerprint`](super::Claimant::fingerprint).
    pub async fn end<A>(
        &self, policy: &Terms, run: ClaimedRun, outcome: RunOutcome<A>,
        by_version: impl FnOnce(u8) -> Option<Fingerprint>,
    ) -> Decision<A> {
        let mut run = run;
        self.end_at(Instant::now(), policy, &mut run, outcome, by_version).await
    }

    /// Like [`end`](Self::end), for a caller that has just read the clock.
    ///
    /// Not an `async fn`, which would store its arguments twice.
    pub(crate) fn end_at<'a, A>(
        &'a self, now: Instant, policy: &'a Terms, run: &'a mut ClaimedRun, outcome: RunOutcome<A>,
        by_version: impl FnOnce(u8) -> Option<Fingerprint>,
    ) -> impl Future<Output = Decision<A>> {
        let claimed_at = run.claimed_at;
        let park = |cause: UnknownCause| {
            let ttl = policy.ttl.saturating_sub(now - claimed_at).max(policy.lease);
            Settlement::Park { ttl, retry_in: cause.retry_in(policy) }
        };
        let (settlement, ending) = match outcome {
            RunOutcome::Complete(answer, completed) => {
                let stored = if run.lease().front_only { StoredAs::Unprotected } else { StoredAs::Recorded };
                (completed.into_settlement(policy.ttl), Ending::Answer(answer, stored))
            }
            RunOutcome::Release(answer) => (Settlement::Release, Ending::Answer(answer, StoredAs::NotRecorded)),
            RunOutcome::NotStarted(refusal) => (Settlement::Release, Ending::Refused(refusal)),
            RunOutcome::Park(answer, cause) => (park(cause), Ending::Answer(answer, StoredAs::OutcomeUnknown)),
            RunOutcome::DelegatedToTransaction(answer, on_rollback) => {
                let settlement = match on_rollback {
                    OnRollback::Park(cause) => park(cause),
                    OnRollback::Refuse | OnRollback::Release => Settlement::Release,
                };
                (settlement, Ending::Delegated(answer, on_rollback))
            }
        };
        async move {
            let mut intent = run.intent.take();
            if let (Some(held), Settlement::Release, false) =
                (&mut intent, &settlement, matches!(ending, Ending::Delegated(..)))
            {
                // Before the key, so that a crash in between leaves no intent whose key is free.
                Box::pin(self.end_intent(held, Settlement::Release)).await;
                intent = None;
            }
            let settled = self.settle(run.lease(), &settlement, now).await;
            if let Some(mut held) = intent {
                let end = held.settlement(run.lease(), &settlement, &settled);
                Box::pin(self.end_intent(&mut held, end)).await;
            }
            if let Settlement::Complete { record, .. } = &settlement
                && self.active_quota().is_some()
            {
                Box::pin(self.charge_quota(run.lease(), record.len())).await;
            }
            let decision = self.decide_end(policy, run.lease(), settled, settlement, ending, by_version);
            let decision = match decision {
                Ok(decision) => decision,
                Err((settlement, answer)) => Box::pin(self.journal_or_queue(run.lease(), settlement, answer)).await,
            };
            run.guard.disarm();
            decision
        }
    }

    /// Decides what the caller gets. `Err` contains an answer that the store could not record.
    fn decide_end<A>(
        &self, policy: &Terms, lease: &Lease, settled: Result<SettleOutcome, StoreError>, settlement: Settlement,
        ending: Ending<A>, by_version: impl FnOnce(u8) -> Option<Fingerprint>,
    ) -> Result<Decision<A>, (Settlement, A)> {
        Ok(match (settled, ending) {
            (Ok(SettleOutcome::ClaimLost(entry)), ending) => match (*entry, ending) {
                // The settle call waited for the operation's transaction, which has committed this answer.
                (ClaimOutcome::Completed(entry), Ending::Delegated(answer, on_rollback))
                    if entry.fence == lease.fence =>
                {
                    match on_rollback {
                        OnRollback::Refuse => Decision::Ran(answer, StoredAs::Recorded),
                        OnRollback::Release | OnRollback::Park(_) => Decision::replay(entry),
                    }
                }
                (entry, _) => self.decide_lost_claim(policy, lease, entry, by_version),
            },
            (Ok(_), Ending::Answer(answer, stored)) => Decision::Ran(answer, stored),
            (Ok(_), Ending::Delegated(answer, on_rollback)) => match on_rollback {
                OnRollback::Refuse => Decision::Refused(retry_at_store(ROLLED_BACK)),
                OnRollback::Release => Decision::Ran(answer, StoredAs::NotRecorded),
                OnRollback::Park(_) => Decision::Ran(answer, StoredAs::OutcomeUnknown),
            },
            (Err(_), Ending::Answer(answer, _)) if matches!(settlement, Settlement::Complete { .. }) => {
                return Err((settlement, answer));
            }
            (Err(_), ending) => {
                self.settle_queue.push(lease.clone(), settlement);
                match ending {
                    Ending::Answer(answer, stored) => Decision::Ran(answer, stored),
                    Ending::Refused(refusal) => Decision::Refused(refusal),
                    Ending::Delegated(..) => Decision::Refused(retry_at_store(COMMIT_UNKNOWN)),
                }
            }
            (Ok(_), Ending::Refused(refusal)) => Decision::Refused(refusal),
        })
    }

    /// Saves an answer that the store could not record. Without a journal, the caller is refused until the settle queue
    /// has stored the answer.
    async fn journal_or_queue<A>(&self, lease: &Lease, settlement: Settlement, answer: A) -> Decision<A> {
        if let Some(journal) = &self.journal {
            match journal.append(lease, &settlement).await {
                Ok(()) => {
                    self.observer.on_event(&EngineEvent::Journaled(&lease.request.address));
                    self.settle_queue.wake();
                    let stored = if lease.front_only { StoredAs::FrontOnly } else { StoredAs::Pending };
                    return Decision::Ran(answer, stored);
                }
                Err(why) => self.observer.on_event(&EngineEvent::JournalFailed(&why)),
            }
        }
        self.settle_queue.push(lease.clone(), settlement);
        Decision::Refused(retry_at_store(NOT_RECORDED))
    }

    /// Decides what the caller gets after its claim was lost: the recorded answer, never its own response. If the
    /// record belongs to a different request (the key was forgotten and reused), the caller is refused.
    fn decide_lost_claim<A>(
        &self, policy: &Terms, lease: &Lease, entry: ClaimOutcome, by_version: impl FnOnce(u8) -> Option<Fingerprint>,
    ) -> Decision<A> {
        self.observer.on_event(&EngineEvent::ClaimLost(&lease.request.address));
        if let Some(stored) = stored_fingerprint(&entry)
            && let Some(refusal) = mismatch(policy, &lease.request.fingerprint, stored, by_version)
        {
            return Decision::Refused(refusal);
        }
        match entry {
            ClaimOutcome::Completed(entry) => Decision::replay(entry),
            ClaimOutcome::OutcomeUnknown(_) => Decision::Refused(refusals::outcome_unknown()),
            ClaimOutcome::InProgress(_) | ClaimOutcome::Granted(_) | ClaimOutcome::TokenSpent => {
                Decision::Refused(refusals::in_progress(RETRY_SOON))
            }
        }
    }

    /// The caller passes the current time, as for [`claim`](Self::claim).
    pub(super) async fn settle(
        &self, lease: &Lease, end: &Settlement, now: Instant,
    ) -> Result<SettleOutcome, StoreError> {
        let (mut asked, mut sent) = (0, now);
        loop {
            asked += 1;
            let answer = call_at(sent, || self.store.settle(lease, end)).await;
            if self.is_observed {
                self.observer.on_store_call(StoreCall::Settle, sent.elapsed());
            }
            match &answer {
                Ok(SettleOutcome::Restored) => {
                    self.observer.on_event(&EngineEvent::EntryRestored(&lease.request.address));
                }
                Ok(_) => {}
                Err(error) => self.report_store_failure("settle", error),
            }
            if answer.is_ok() || asked == MAX_STORE_ATTEMPTS {
                return answer;
            }
            Box::pin(sleep(retry_delay(asked))).await;
            sent = Instant::now();
        }
    }

    /// Charges the recorded bytes to the tenant's quota.
    pub(super) async fn charge_quota(&self, lease: &Lease, recorded: usize) {
        let Some(quota) = self.active_quota() else { return };
        let ClaimRequest { tags, label, .. } = &*lease.request;
        let bytes = (recorded + tags.as_bytes().len() + label.len()) as u64;
        Box::pin(quota.charge_bytes(self.store.as_ref(), tags, bytes)).await;
    }
}
