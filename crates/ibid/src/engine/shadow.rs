//! Shadow mode forwards every request unchanged. A background task claims and records in parallel, to find out what
//! enforcement would have done.
//!
//! Invariant: nothing here can delay, refuse, replay or fail the request. The code that runs the request only reports
//! its outcome, with [`ShadowClaim::end`].

use std::{pin::pin, sync::Arc};

use parking_lot::Mutex;
use tokio::{
    sync::{Notify, oneshot},
    time::{Duration, Instant},
};

use super::{CompletedAnswer, Engine, mismatch, stored_fingerprint};
use crate::{
    http::UnderRequestId,
    observe::{RequestOutcome, ShadowOutcome},
    policy::Terms,
    refusal::RefusalReason,
    running::RunSlot,
    store::{Address, ClaimOutcome, ClaimRequest, ClaimToken, Fingerprint, Lease, SettleOutcome, Settlement},
};

/// The outcome of an observed run.
#[derive(Debug)]
pub enum ShadowRunOutcome {
    /// The policy would remember this answer.
    Complete(CompletedAnswer),
    /// The policy would not remember the answer, or the operation did not start.
    Release,
    /// The outcome is unknown.
    Park,
}

/// A claim that is made in parallel to a run. If it is dropped before [`end`](Self::end), the run's outcome is unknown.
#[derive(Debug)]
#[must_use]
pub struct ShadowClaim {
    outcome_sender: oneshot::Sender<ShadowRunOutcome>,
    run: RunId,
    recording: Arc<PendingRecordings>,
}

impl ShadowClaim {
    /// Reports how the run ended. Call it before the client can see the end of the response.
    pub fn end(self, finish: ShadowRunOutcome) {
        self.recording.pending.lock().push(self.run);
        if self.outcome_sender.send(finish).is_err() {
            self.recording.mark_recorded(self.run);
        }
    }
}

type RunId = (Address, ClaimToken);

/// Runs that have ended and are being recorded. Under enforcement they would be recorded before their clients get the
/// response. A request that follows one of them is therefore compared with the record, not with the run.
#[derive(Debug, Default)]
pub(super) struct PendingRecordings {
    pending: Mutex<Vec<RunId>>,
    changed: Notify,
}

impl PendingRecordings {
    fn mark_recorded(&self, run: RunId) {
        self.pending.lock().retain(|other| *other != run);
        self.changed.notify_waiters();
    }

    fn runs_at(&self, address: &Address) -> Vec<RunId> {
        self.pending.lock().iter().filter(|(at, _)| at == address).copied().collect()
    }

    async fn wait_recorded(&self, runs: &[RunId]) {
        while !runs.is_empty() {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if !self.pending.lock().iter().any(|run| runs.contains(run)) {
                return;
            }
            changed.await;
        }
    }
}

/// What the background task observed about one run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShadowResult {
    /// How the run was recorded, or what enforcement would have returned.
    pub outcome: RequestOutcome,
    /// The number of the run, from 1, if enforcement would have run it.
    pub attempt: Option<u32>,
}

impl Engine {
    /// Observes a request that runs in any case. `by_version` computes the request's fingerprint by the rules of other
    /// versions. `report` is called once, after the run has ended and is recorded.
    pub fn observe(
        &self, policy: Terms, ask: ClaimRequest,
        by_version: impl Fn(u8) -> Option<Fingerprint> + Send + Sync + 'static, slot: Option<RunSlot>,
        report: impl FnOnce(ShadowResult) + Send + 'static,
    ) -> ShadowClaim {
        let (outcome_sender, ended) = oneshot::channel();
        let (engine, run, recording) = (self.clone(), (ask.address, ask.token), self.shadow_recordings.clone());
        let before = recording.runs_at(&ask.address);
        self.running.detach(UnderRequestId::current(async move {
            engine.shadow_recordings.wait_recorded(&before).await;
            let observed = engine.run_shadow_claim(&policy, Arc::new(ask), by_version, ended).await;
            engine.shadow_recordings.mark_recorded(run);
            report(observed);
            drop(slot);
        }));
        ShadowClaim { outcome_sender, run, recording }
    }

    async fn run_shadow_claim(
        &self, policy: &Terms, ask: Arc<ClaimRequest>, by_version: impl Fn(u8) -> Option<Fingerprint>,
        ended: oneshot::Receiver<ShadowRunOutcome>,
    ) -> ShadowResult {
        match self.shadow_claim(policy, ask, by_version).await {
            Ok(lease) => {
                let mut abandoned = self.settle_queue.guard_claim(lease.clone(), policy);
                let finish = self.keep_alive(policy, &lease, pin!(ended)).await;
                let outcome = self.record_shadow_outcome(policy, &lease, finish.ok()).await;
                abandoned.disarm();
                ShadowResult { outcome, attempt: Some(lease.attempt) }
            }
            Err(would) => {
                let _ = ended.await;
                ShadowResult { outcome: RequestOutcome::Shadow(would), attempt: None }
            }
        }
    }

    /// Claims the address. `Err` contains what enforcement would have done instead of running the operation.
    async fn shadow_claim(
        &self, policy: &Terms, mut ask: Arc<ClaimRequest>, by_version: impl Fn(u8) -> Option<Fingerprint>,
    ) -> Result<Lease, ShadowOutcome> {
        let refusal = |reason| Err(ShadowOutcome::Refusal(reason));
        let compare =
            |ask: &ClaimRequest, stored: &Fingerprint| match mismatch(policy, &ask.fingerprint, stored, &by_version) {
                Some(refusal) => Err(ShadowOutcome::Refusal(refusal.reason)),
                None => Ok(()),
            };
        if let Some(finished) = self.journal.as_ref().and_then(|journal| journal.find(&ask.address)) {
            compare(&ask, &finished.fingerprint)?;
            return Err(ShadowOutcome::Replay);
        }
        if let Some(quota) = self.active_quota()
            && let Some(refused) = self.check_quota(quota, &ask).await
        {
            return refusal(refused.reason);
        }
        // Claims once more if an operator forgot the claim before its response arrived.
        for _ in 0..2 {
            let (claim, ..) = self.claim(&ask, Instant::now()).await;
            let Ok(claim) = claim else { return refusal(RefusalReason::StoreUnavailable) };
            if let Some(stored) = stored_fingerprint(&claim) {
                compare(&ask, stored)?;
            }
            match claim {
                ClaimOutcome::Granted(lease) => {
                    let _ = self.spend_quota(&lease).await;
                    return Ok(lease);
                }
                ClaimOutcome::Completed(_) => return Err(ShadowOutcome::Replay),
                ClaimOutcome::InProgress(_) => return refusal(RefusalReason::InProgress),
                ClaimOutcome::OutcomeUnknown(_) => return refusal(RefusalReason::OutcomeUnknown),
                ClaimOutcome::TokenSpent => {
                    ask = Arc::new(ClaimRequest { token: ClaimToken::mint(), ..ClaimRequest::clone(&ask) })
                }
            }
        }
        refusal(RefusalReason::InProgress)
    }

    /// Records the outcome of a run. A lost claim records nothing.
    async fn record_shadow_outcome(
        &self, policy: &Terms, lease: &Lease, finish: Option<ShadowRunOutcome>,
    ) -> RequestOutcome {
        let (end, outcome) = match finish {
            Some(ShadowRunOutcome::Complete(answer)) => {
                let stored = if lease.front_only { RequestOutcome::Degraded } else { RequestOutcome::Executed };
                (answer.into_settlement(policy.ttl), stored)
            }
            Some(ShadowRunOutcome::Release) => (Settlement::Release, RequestOutcome::Released),
            abandoned_or_parked => {
                // An abandoned run may still be going on.
                let retry_in = if abandoned_or_parked.is_none() { policy.lease } else { Duration::ZERO };
                (Settlement::Park { ttl: policy.ttl.max(policy.lease), retry_in }, RequestOutcome::Unknown)
            }
        };
        let settled = self.settle(lease, &end, Instant::now()).await;
        if let Settlement::Complete { record, .. } = &end {
            self.charge_quota(lease, record.len()).await;
        }
        match settled {
            Ok(SettleOutcome::ClaimLost(_)) => RequestOutcome::Released,
            Ok(_) => outcome,
            Err(_) => {
                self.settle_queue.push(lease.clone(), end);
                RequestOutcome::Released
            }
        }
    }
}
