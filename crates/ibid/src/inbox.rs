//! Deduplicates events from a message broker: identifies the event of each delivery and runs its handler once.
//!
//! Brokers deliver at least once. [`InboxEvent::of`] identifies the event of a delivery; an [`Inbox`] remembers in any
//! [`Store`] which events were handled. Handlers that write to PostgreSQL should use the inbox of `ibid-postgres-tx`
//! instead, which commits the effect and the record together.
//!
//! Guarantee: a handled event is not handled again while it is remembered. If a handler has its effect and crashes
//! before it reports success, the event runs again ([`OnUnknown::Retry`], the default) or waits for an operator
//! ([`OnUnknown::Hold`]). The inbox thus delivers *at least once, without repeats after success*.
//!
//! Invariant: an event is marked as handled only after its handler has returned `Ok`. A failure is remembered together
//! with the number of attempts; the next delivery runs the handler again, until it has failed too often.
//!
//! ```
//! # use std::sync::Arc;
//! # use ibid::{inbox::{HandleOutcome, Inbox, InboxEvent}, store::Memory};
//! # #[tokio::main(flavor = "current_thread")] async fn main() {
//! let inbox = Inbox::new(Arc::new(Memory::default()));
//! let event = InboxEvent::new("mailer", "/orders", "17").unwrap();
//! let send = |_attempt| async { Ok::<_, std::io::Error>(()) };
//!
//! assert_eq!(inbox.handle(&event, send).await.unwrap(), HandleOutcome::Handled);
//! assert_eq!(inbox.handle(&event, send).await.unwrap(), HandleOutcome::Duplicate);
//! # }
//! ```

use std::{
    fmt,
    future::Future,
    sync::Arc,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::task::JoinError;

use crate::{
    engine::{Decision, Engine},
    observe::{NoopObserver, Observer},
    policy::{CheckedPolicy, MAX_DURATION, OnConcurrent, OnMismatch, OnUnknown, Policy},
    refusal::{Refusal, RefusalReason},
    store::{
        ClaimOutcome, ClaimRequest, Fingerprint, RecordSummary, SettleOutcome, Settlement, Store, StoreError, Tags,
    },
};

pub use self::event::{
    BrokerMessageId, BrokerReply, DeliveredMessage, EventIdentityError, InboxEvent, MAX_CONSUMER_BYTES,
    MAX_IDENTITY_PART_BYTES, RedeliveryBackoff,
};
use self::run::{CRASHED_ERROR, FailureRecord, HandlerOutcome, HandlerRun};

mod event;
mod identity;
mod run;
#[cfg(test)]
mod tests;

/// The default number of runs per event.
const DEFAULT_POISON_AFTER: u32 = 5;
/// The default time for which a handled event is remembered.
const DEFAULT_TTL: Duration = Duration::from_secs(7 * 24 * 3600);
/// How often one delivery tries to rerun a failed event before it is sent back to the broker.
const MAX_RERUN_ATTEMPTS: u32 = 8;
const RETRY_SOON: Duration = Duration::from_secs(1);

/// Remembers which events were handled. Cheap to clone.
#[derive(Clone)]
pub struct Inbox {
    engine: Engine,
    policy: CheckedPolicy,
    poison_after: u32,
    backoff: RedeliveryBackoff,
}

/// The outcome of a delivery.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum HandleOutcome {
    /// The event was handled now, and this is recorded.
    Handled,
    /// The event was handled before.
    Duplicate,
    /// Another consumer handles the event, or its lease has not expired yet.
    InProgress {
        /// When to deliver the event again.
        retry_in: Duration,
    },
    /// The event failed too often and does not run again until it is [forgotten](Inbox::forget).
    Poisoned {
        /// The number of runs.
        attempts: u32,
        /// The error of the last run.
        error: String,
    },
    /// The outcome of a run is unknown, and the inbox waits for an operator to resolve it.
    OutcomeUnknown,
    /// The event is so old that it may have been handled and forgotten.
    TooOld,
}

/// Why a delivery was not handled. In every case it must be delivered again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandleError<E> {
    /// The handler failed.
    #[error("the handler failed in run {attempt}: {error}; {}", if *poisoned {
        "it is not run again until it is forgotten"
    } else {
        "it runs again when it comes again"
    })]
    Failed {
        /// The error of the handler.
        #[source]
        error: E,
        /// The number of this run, from 1.
        attempt: u32,
        /// Whether this was the last run: the next delivery finds the event poisoned.
        poisoned: bool,
    },
    /// The handler exceeded the time limit. It may have had its effect.
    #[error("the handler did not end in time; it may have had its effect")]
    TimedOut,
    /// The handler panicked or was cancelled. It may have had its effect.
    #[error("the handler was aborted: {0}; it may have had its effect")]
    Aborted(#[source] JoinError),
    /// The store could not grant the run, or could not record it; the refusal says which.
    #[error("{0}")]
    Store(Refusal),
}

impl Inbox {
    /// Creates an inbox with five runs per event, which remembers events for seven days.
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self::with_observer(store, Arc::new(NoopObserver))
    }

    /// Creates an inbox that reports failed store calls and lost claims to an observer.
    pub fn with_observer(store: Arc<dyn Store>, observer: Arc<dyn Observer>) -> Self {
        let mut policy = Policy::ietf();
        policy.ttl = DEFAULT_TTL;
        (policy.on_mismatch, policy.on_concurrent) = (OnMismatch::Ignore, OnConcurrent::Reject);
        policy.on_unknown = OnUnknown::Retry;
        let engine = Engine::with_observer(store, observer, None);
        let policy = policy.checked().expect("every dial is within its range");
        Self { engine, policy, poison_after: DEFAULT_POISON_AFTER, backoff: RedeliveryBackoff::default() }
    }

    /// Sets how long a handled event is remembered. Use a longer time than the broker's retention; otherwise a late
    /// copy runs again.
    #[must_use]
    pub fn keep(self, keep: Duration) -> Self {
        self.with_policy(|policy| policy.ttl = keep)
    }

    /// Changes the policy. Durations out of range are clamped.
    fn with_policy(self, turn: impl FnOnce(&mut Policy)) -> Self {
        let mut policy = self.policy.into_policy();
        turn(&mut policy);
        policy.ttl = policy.ttl.clamp(Duration::from_millis(1), MAX_DURATION);
        policy.timeout = policy.timeout.clamp(Duration::from_millis(1), MAX_DURATION);
        policy.lease = policy.lease.clamp(Duration::from_millis(100), MAX_DURATION);
        Self { policy: policy.checked().expect("every dial is within its range"), ..self }
    }

    /// Sets how long a handler may take, and how long its claim stays valid without being extended.
    #[must_use]
    pub fn timeouts(self, timeout: Duration, lease: Duration) -> Self {
        self.with_policy(|policy| (policy.timeout, policy.lease) = (timeout, lease))
    }

    /// Sets the number of runs per event, at least 1.
    #[must_use]
    pub fn poison_after(mut self, runs: u32) -> Self {
        self.poison_after = runs.max(1);
        self
    }

    /// Sets what happens to an event whose handler crashed.
    #[must_use]
    pub fn on_crash(self, on_unknown: OnUnknown) -> Self {
        self.with_policy(|policy| policy.on_unknown = on_unknown)
    }

    /// Sets the delay before failed events are delivered again.
    #[must_use]
    pub fn backoff(mut self, backoff: RedeliveryBackoff) -> Self {
        self.backoff = backoff;
        self
    }

    /// Claims the event, runs the handler with the number of this run, and records the outcome.
    ///
    /// The handler runs in its own task: dropping the returned future does not cancel it.
    ///
    /// # Errors
    /// See [`HandleError`]; [`reply`](Self::reply) converts it to a reply for the broker.
    pub async fn handle<F, R, E>(&self, event: &InboxEvent, handler: F) -> Result<HandleOutcome, HandleError<E>>
    where
        F: FnOnce(u32) -> R + Send + 'static,
        R: Future<Output = Result<(), E>> + Send + 'static,
        E: fmt::Display + Send + 'static,
    {
        if self.is_too_old(event).await.map_err(HandleError::Store)? {
            return Ok(HandleOutcome::TooOld);
        }
        let failure = Arc::new(Mutex::new(None));
        let (handler, timeout, poison_after) = (Some(handler), self.policy.timeout, self.poison_after);
        let run = HandlerRun { handler, timeout, poison_after, uncounted_attempts: 0, failure: failure.clone() };
        let (inbox, event) = (self.clone(), event.clone());
        let verdict = tokio::spawn(async move { inbox.execute(&event, run).await }).await;
        let failure = failure.lock().take();
        match (verdict.map_err(HandleError::Aborted)?, failure) {
            (Decision::Replay(finished, _), _) if !finished.failed => Ok(HandleOutcome::Duplicate),
            (_, Some((error, attempt))) => {
                Err(HandleError::Failed { error, attempt, poisoned: attempt >= self.poison_after })
            }
            (Decision::Replay(finished, _), None) => {
                let failed = FailureRecord::decode(&finished);
                Ok(HandleOutcome::Poisoned { attempts: failed.attempts, error: failed.error })
            }
            (Decision::Ran(HandlerOutcome::Handled, _), None) => Ok(HandleOutcome::Handled),
            (Decision::Ran(HandlerOutcome::Failed, _), None) => unreachable!("what a handler failed of is in its slot"),
            (Decision::Ran(HandlerOutcome::TimedOut, _), None) => Err(HandleError::TimedOut),
            (Decision::Ran(HandlerOutcome::Poisoned(attempts), _), None) => {
                Ok(HandleOutcome::Poisoned { attempts, error: CRASHED_ERROR.to_owned() })
            }
            (Decision::Refused(refusal), None) => match refusal.reason {
                RefusalReason::InProgress => {
                    Ok(HandleOutcome::InProgress { retry_in: refusal.retry_after.unwrap_or(RETRY_SOON) })
                }
                RefusalReason::OutcomeUnknown => Ok(HandleOutcome::OutcomeUnknown),
                _ => Err(HandleError::Store(refusal)),
            },
        }
    }

    /// Returns the reply to the broker for the outcome of a delivery.
    pub fn reply<E: fmt::Display>(&self, handled: &Result<HandleOutcome, HandleError<E>>) -> BrokerReply {
        let poisoned = |attempts: &u32, error: &dyn fmt::Display| BrokerReply::DeadLetter {
            why: format!("it was tried {attempts} times; the last time: {error}"),
        };
        let after = match handled {
            Ok(HandleOutcome::Handled | HandleOutcome::Duplicate) => return BrokerReply::Acknowledge,
            Ok(HandleOutcome::Poisoned { attempts, error }) => return poisoned(attempts, error),
            Err(HandleError::Failed { error, attempt, poisoned: true }) => return poisoned(attempt, error),
            Ok(HandleOutcome::OutcomeUnknown) => {
                let why = "a run of it was never heard of again: look what became of it, then resolve or forget it";
                return BrokerReply::DeadLetter { why: why.into() };
            }
            Ok(HandleOutcome::TooOld) => return BrokerReply::too_old(),
            Ok(HandleOutcome::InProgress { retry_in }) => *retry_in,
            Err(HandleError::Failed { attempt, .. }) => self.backoff.after(*attempt),
            Err(HandleError::TimedOut | HandleError::Aborted(_)) => self.policy.lease,
            Err(HandleError::Store(refusal)) => refusal.retry_after.unwrap_or(RETRY_SOON),
        };
        BrokerReply::Redeliver { after }
    }

    /// Forgets an event, so that its next delivery runs with a new count of attempts. Use it before redelivery from a
    /// dead-letter queue. Returns `false` if the event is in progress and was not forgotten.
    ///
    /// If a run crashes afterwards, the earlier runs count again, because their number is only stored with a failure.
    ///
    /// # Errors
    /// If a store call fails. The call may be repeated.
    pub async fn forget(&self, event: &InboxEvent) -> Result<bool, StoreError> {
        let (store, ask) = (self.engine.store(), Arc::new(self.claim_request(event)));
        let fence = match store.get(&ask.address).await? {
            Some(ClaimOutcome::Completed(finished)) => finished.fence,
            Some(ClaimOutcome::OutcomeUnknown(holder)) => holder.fence,
            Some(ClaimOutcome::InProgress(_) | ClaimOutcome::Granted(_)) => return Ok(false),
            None | Some(ClaimOutcome::TokenSpent) => return Ok(true),
        };
        let forgotten = store.admin().forget(&ask.address, fence).await?;
        if matches!(forgotten, SettleOutcome::ClaimLost(now) if !matches!(*now, ClaimOutcome::TokenSpent)) {
            return Ok(false);
        }
        // The store keeps counting attempts at this address for a while. A failure record notes how many of them not to
        // count.
        let ClaimOutcome::Granted(lease) = store.claim(&ask).await? else { return Ok(false) };
        let record = FailureRecord::encode(lease.attempt, "it is to be handled again");
        let end =
            Settlement::Complete { failed: true, record, summary: RecordSummary::default(), ttl: self.policy.ttl };
        Ok(!matches!(store.settle(&lease, &end).await?, SettleOutcome::ClaimLost(_)))
    }

    /// Whether the event is older than the retention and has no entry: it may have been handled and forgotten.
    async fn is_too_old(&self, event: &InboxEvent) -> Result<bool, Refusal> {
        let age = event.at().and_then(|at| SystemTime::now().duration_since(at).ok()).unwrap_or_default();
        if age <= self.policy.ttl {
            return Ok(false);
        }
        let found = self.engine.store().get(&event.scope().address(event.id(), None, None)).await;
        found.map(|found| found.is_none()).map_err(|error| store_failed(&error))
    }

    /// Runs the event. If its record is a failure below the limit, forgets the failure and runs again.
    async fn execute<F, R, E>(&self, event: &InboxEvent, run: HandlerRun<F, E>) -> Decision<HandlerOutcome>
    where
        F: FnOnce(u32) -> R + Send,
        R: Future<Output = Result<(), E>> + Send,
        E: fmt::Display + Send,
    {
        let mut run = Some(run);
        for _ in 0..MAX_RERUN_ATTEMPTS {
            let ask = self.claim_request(event);
            let address = ask.address;
            let verdict = self.engine.execute(self.policy.terms(), ask, &mut run).await;
            let Decision::Replay(finished, _) = &verdict else { return verdict };
            // The handler ran here and lost its claim: the record decides.
            let Some(run) = &mut run else { return verdict };
            let failed = FailureRecord::decode(finished);
            if !finished.failed || failed.attempts >= self.poison_after {
                return verdict;
            }
            run.uncounted_attempts = failed.uncounted_attempts;
            // Only one of several concurrent deliveries forgets this failure; the others find the next run.
            if let Err(error) = self.engine.store().admin().forget(&address, finished.fence).await {
                return Decision::Refused(store_failed(&error));
            }
        }
        Decision::Refused(
            Refusal::new(RefusalReason::InProgress, "others handle the same event again and again")
                .retry_after(RETRY_SOON),
        )
    }

    fn claim_request(&self, event: &InboxEvent) -> ClaimRequest {
        let address = event.scope().address(event.id(), None, None);
        let tags = Tags::new(event.consumer(), "", event.source(), event.id());
        ClaimRequest::new(address, Fingerprint::NONE, tags, Bytes::new(), self.policy.terms())
    }
}

fn store_failed(error: &StoreError) -> Refusal {
    Refusal::new(RefusalReason::StoreUnavailable, format!("nothing was executed: {error}")).retry_after(RETRY_SOON)
}

impl fmt::Debug for Inbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Inbox");
        shown.field("store", self.engine.store()).field("poison_after", &self.poison_after).finish_non_exhaustive()
    }
}
