//! Shadow mode: a request runs as if nobody were there. Beside it, in a task of its own, its claim is made and recorded,
//! to see what enforcement would have done.
//!
//! Invariant: nothing here can delay, refuse, replay or fail the request. Whoever runs it only says how it ended, by
//! [`Observation::end`].

use std::{pin::pin, sync::Arc};

use parking_lot::Mutex;
use tokio::{
    sync::{Notify, oneshot},
    time::{Duration, Instant},
};

use super::{Complete, Engine, fingerprint_of, mismatch_by};
use crate::{
    http::UnderRequestId,
    observe::{Outcome, Shadow},
    policy::CheckedPolicy,
    refusal::Reason,
    running::Slot,
    store::{Address, Ask, Claim, End, Fingerprint, Held, Lease, Token},
};

/// How a run that was observed ended.
#[derive(Debug)]
pub enum Finish {
    /// With an answer that would be remembered.
    Complete(Complete),
    /// With an answer that would not be, or it did not start.
    Release,
    /// Nobody knows.
    Park,
}

/// A claim that is being made beside a run. Dropped without an end, the run's outcome is unknown.
#[derive(Debug)]
#[must_use]
pub struct Observation {
    ended: oneshot::Sender<Finish>,
    run: Run,
    recording: Arc<Recording>,
}

impl Observation {
    /// Says how the run ended: before its client can know.
    pub fn end(self, finish: Finish) {
        self.recording.ended.lock().push(self.run);
        if self.ended.send(finish).is_err() {
            self.recording.recorded(self.run);
        }
    }
}

/// One run, by its address and its token.
type Run = (Address, Token);

/// Runs that have ended and are being recorded. Enforced, they would have been recorded before their clients had the
/// answer: so a request that comes right after one of them has to be compared with the record, and not with the run.
#[derive(Debug, Default)]
pub(super) struct Recording {
    ended: Mutex<Vec<Run>>,
    changed: Notify,
}

impl Recording {
    fn recorded(&self, run: Run) {
        self.ended.lock().retain(|other| *other != run);
        self.changed.notify_waiters();
    }

    /// The runs at an address that are being recorded now.
    fn at(&self, address: &Address) -> Vec<Run> {
        self.ended.lock().iter().filter(|(at, _)| at == address).copied().collect()
    }

    /// Returns once these are recorded.
    async fn settled(&self, runs: &[Run]) {
        while !runs.is_empty() {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if !self.ended.lock().iter().any(|run| runs.contains(run)) {
                return;
            }
            changed.await;
        }
    }
}

/// What was seen beside a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Observed {
    /// What became of its record, or what it would have got.
    pub outcome: Outcome,
    /// Which run of its operation it was, if it would have run.
    pub attempt: Option<u32>,
}

impl Engine {
    /// Observes a request that runs in any case. `by_version` is the request's fingerprint by the rules of other versions;
    /// `report` is called once, after the run has ended and what it left is recorded.
    pub fn observe(
        &self, policy: CheckedPolicy, ask: Ask, by_version: impl Fn(u8) -> Option<Fingerprint> + Send + Sync + 'static,
        slot: Option<Slot>, report: impl FnOnce(Observed) + Send + 'static,
    ) -> Observation {
        let (sender, ended) = oneshot::channel();
        let (engine, run, recording) = (self.clone(), (ask.address, ask.token), self.recording.clone());
        let before = recording.at(&ask.address);
        self.running.detach(UnderRequestId::current(async move {
            engine.recording.settled(&before).await;
            let observed = engine.beside(&policy, Arc::new(ask), by_version, ended).await;
            engine.recording.recorded(run);
            report(observed);
            drop(slot);
        }));
        Observation { ended: sender, run, recording }
    }

    async fn beside(
        &self, policy: &CheckedPolicy, ask: Arc<Ask>, by_version: impl Fn(u8) -> Option<Fingerprint>,
        ended: oneshot::Receiver<Finish>,
    ) -> Observed {
        match self.would(policy, ask, by_version).await {
            Ok(lease) => {
                let abandoned = self.later.guard(&lease, policy);
                let finish = self.beating(&lease, policy, pin!(ended)).await;
                let outcome = self.note(policy, &lease, finish.ok()).await;
                abandoned.disarm();
                Observed { outcome, attempt: Some(lease.attempt) }
            }
            Err(would) => {
                let _ = ended.await;
                Observed { outcome: Outcome::Shadow(would), attempt: None }
            }
        }
    }

    /// What enforcement would do: run it, under this lease, or something else.
    async fn would(
        &self, policy: &CheckedPolicy, mut ask: Arc<Ask>, by_version: impl Fn(u8) -> Option<Fingerprint>,
    ) -> Result<Lease, Shadow> {
        let refusal = |reason| Err(Shadow::Refusal(reason));
        let compare = |ask: &Ask, stored: &Fingerprint| match mismatch_by(policy, &ask.fingerprint, stored, &by_version)
        {
            Some(refusal) => Err(Shadow::Refusal(refusal.reason)),
            None => Ok(()),
        };
        if let Some((finished, _)) = self.journal.as_ref().and_then(|journal| journal.find(&ask.address)) {
            compare(&ask, &finished.fingerprint)?;
            return Err(Shadow::Replay);
        }
        if let Some(refused) = self.before_claiming(&ask).await {
            return refusal(refused.reason);
        }
        // An operator may forget the claim while its answer is on the way: then it is made once more.
        for _ in 0..2 {
            let (claim, doubtful) = self.claim(&ask, Instant::now()).await;
            if doubtful && !matches!(claim, Ok(Claim::Granted(_) | Claim::Done(_) | Claim::Spent)) {
                self.later.push(Lease::unseen(&ask), End::Release);
            }
            let Ok(claim) = claim else { return refusal(Reason::StoreUnavailable) };
            if let Some(stored) = fingerprint_of(&claim) {
                compare(&ask, stored)?;
            }
            match claim {
                Claim::Granted(lease) => {
                    let _ = self.after_grant(&lease).await;
                    return Ok(lease);
                }
                Claim::Done(_) => return Err(Shadow::Replay),
                Claim::Busy(_) => return refusal(Reason::InProgress),
                Claim::Unknown(_) => return refusal(Reason::OutcomeUnknown),
                Claim::Spent => ask = Arc::new(Ask { token: Token::mint(), ..Ask::clone(&ask) }),
            }
        }
        refusal(Reason::InProgress)
    }

    /// Records how a run ended. Where the claim is lost, there is nothing to record.
    async fn note(&self, policy: &CheckedPolicy, lease: &Lease, finish: Option<Finish>) -> Outcome {
        let (end, outcome) = match finish {
            Some(Finish::Complete(Complete { failed, record, outline })) => {
                let stored = if lease.solo { Outcome::Degraded } else { Outcome::Executed };
                (End::Complete { failed, record, outline, keep: policy.ttl }, stored)
            }
            Some(Finish::Release) => (End::Release, Outcome::Released),
            // What was given up may still be running.
            None => (End::Park { keep: policy.ttl.max(policy.lease), retry_in: policy.lease }, Outcome::Unknown),
            Some(Finish::Park) => {
                (End::Park { keep: policy.ttl.max(policy.lease), retry_in: Duration::ZERO }, Outcome::Unknown)
            }
        };
        let settled = self.settle(lease, &end, Instant::now()).await;
        if let End::Complete { record, .. } = &end {
            self.charge(lease, record.len()).await;
        }
        match settled {
            Ok(Held::Lost(_)) => Outcome::Released,
            Ok(_) => outcome,
            Err(_) => {
                self.later.push(lease.clone(), end);
                Outcome::Released
            }
        }
    }
}
