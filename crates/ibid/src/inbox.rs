//! Events of a message broker: which event a delivery is, and handlers that run once per event.
//!
//! Brokers deliver at least once. [`InboxEvent::of`] says which event a delivery is; an [`Inbox`] remembers, in any
//! [`Store`], which events were handled. Handlers that write to PostgreSQL do better with the inbox of
//! `ibid-postgres-tx`, where the effect and the memory of it commit together.
//!
//! What is promised here: an event that was handled is not handled again while it is remembered. What is not: a handler
//! that had its effect and died before it could say so runs again ([`OnUnknown::Retry`], the default), or is held for
//! somebody to look at ([`OnUnknown::Hold`]). So it is *at least once, without repeats after success*.
//!
//! Invariant: an event is never marked as handled before its handler has returned `Ok`. A failure is remembered as a
//! failure, with how often it happened; the next delivery runs it again, until it has failed too often.
//!
//! ```
//! # use std::sync::Arc;
//! # use ibid::{inbox::{Event, Handled, Inbox}, store::Memory};
//! # #[tokio::main(flavor = "current_thread")] async fn main() {
//! let inbox = Inbox::new(Arc::new(Memory::default()));
//! let event = Event::new("mailer", "/orders", "17").unwrap();
//! let send = |_attempt| async { Ok::<_, std::io::Error>(()) };
//!
//! assert_eq!(inbox.handle(&event, send).await.unwrap(), Handled::Done);
//! assert_eq!(inbox.handle(&event, send).await.unwrap(), Handled::Duplicate);
//! # }
//! ```

use std::{
    error::Error,
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
        ClaimOutcome, ClaimRequest, ClaimToken, Fingerprint, RecordSummary, SettleOutcome, Settlement, Store,
        StoreError, Tags,
    },
};

use self::run::{BorrowedOperation, CRASHED_ERROR, FailureRecord, HandlerOutcome, HandlerRun};
pub use self::{
    broker_reply::{BrokerReply, RedeliveryBackoff},
    event::{
        BrokerMessageId, DeliveredMessage, EventIdentityError, InboxEvent, MAX_CONSUMER_BYTES, MAX_IDENTITY_PART_BYTES,
    },
};

mod broker_reply;
mod event;
mod identity;
mod run;
#[cfg(test)]
mod tests;

/// How many runs an event gets, unless said otherwise.
const DEFAULT_POISON_AFTER: u32 = 5;
/// How long a handled event is remembered, unless said otherwise.
const DEFAULT_TTL: Duration = Duration::from_secs(7 * 24 * 3600);
/// How often one delivery tries to run a failed event again before it is told to come back.
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

/// What became of a delivery.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum HandleOutcome {
    /// Handled now, and remembered.
    Handled,
    /// Handled before.
    Duplicate,
    /// Being handled elsewhere, or by somebody who is silent and may still be at it.
    InProgress {
        /// When to come back.
        retry_in: Duration,
    },
    /// It failed too often and is not run again, until it is [forgotten](Inbox::forget).
    Poisoned {
        /// How often it was tried.
        attempts: u32,
        /// What it failed of the last time.
        error: String,
    },
    /// A run of it was never heard of again, and the inbox is told to hold such events until somebody resolves it.
    OutcomeUnknown,
    /// It is so old that it may have been handled and forgotten since.
    TooOld,
}

/// Why a delivery was not handled. In every case it must come again.
#[derive(Debug)]
#[non_exhaustive]
pub enum HandleError<E> {
    /// The handler failed.
    Failed {
        /// What it said.
        error: E,
        /// Which run of this event it was.
        attempt: u32,
        /// Whether it was the last one: the next delivery finds it poisoned.
        poisoned: bool,
    },
    /// The handler took longer than the inbox allows. It may have had its effect.
    TimedOut,
    /// The handler panicked or was cancelled. It may have had its effect.
    Aborted(JoinError),
    /// The store could not say whether it may run, or could not remember that it ran; the refusal says which.
    Store(Refusal),
}

impl Inbox {
    /// An inbox in a store: five runs per event, remembered for seven days.
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self::with_observer(store, Arc::new(NoopObserver))
    }

    /// The same, with somebody who is told of failing store calls and lost claims.
    pub fn with_observer(store: Arc<dyn Store>, observer: Arc<dyn Observer>) -> Self {
        let mut policy = Policy::ietf();
        policy.ttl = DEFAULT_TTL;
        policy.on_mismatch = OnMismatch::Ignore;
        policy.on_concurrent = OnConcurrent::Reject;
        policy.on_unknown = OnUnknown::Retry;
        let engine = Engine::with_observer(store, observer, None);
        let policy = policy.checked().expect("every dial is within its range");
        Self { engine, policy, poison_after: DEFAULT_POISON_AFTER, backoff: RedeliveryBackoff::default() }
    }

    /// How long a handled event is remembered. Longer than a broker keeps a message, or a late copy runs again.
    #[must_use]
    pub fn keep(self, keep: Duration) -> Self {
        self.with_policy(|policy| policy.ttl = keep)
    }

    /// Durations that are too short or too long count as the shortest or the longest.
    fn with_policy(self, turn: impl FnOnce(&mut Policy)) -> Self {
        let mut policy = self.policy.into_policy();
        turn(&mut policy);
        policy.ttl = policy.ttl.clamp(Duration::from_millis(1), MAX_DURATION);
        policy.timeout = policy.timeout.clamp(Duration::from_millis(1), MAX_DURATION);
        policy.lease = policy.lease.clamp(Duration::from_millis(100), MAX_DURATION);
        Self { policy: policy.checked().expect("every dial is within its range"), ..self }
    }

    /// How long a handler may take, and how long its claim may stay silent before it counts as crashed.
    #[must_use]
    pub fn timeouts(self, timeout: Duration, lease: Duration) -> Self {
        self.with_policy(|policy| (policy.timeout, policy.lease) = (timeout, lease))
    }

    /// How many runs an event gets, at least one.
    #[must_use]
    pub fn poison_after(mut self, runs: u32) -> Self {
        self.poison_after = runs.max(1);
        self
    }

    /// What becomes of an event whose handler crashed.
    #[must_use]
    pub fn on_crash(self, on_unknown: OnUnknown) -> Self {
        self.with_policy(|policy| policy.on_unknown = on_unknown)
    }

    /// When failed events should come again.
    #[must_use]
    pub fn backoff(mut self, backoff: RedeliveryBackoff) -> Self {
        self.backoff = backoff;
        self
    }

    /// Claims the event, runs the handler with the number of this run, and remembers how it ended.
    ///
    /// The handler runs in a task of its own: dropping the returned future does not cancel it.
    ///
    /// # Errors
    /// See [`HandleError`]; [`reply`](Self::reply) says what to tell the broker.
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
        let run = HandlerRun {
            handler: Some(handler),
            timeout: self.policy.timeout,
            poison_after: self.poison_after,
            uncounted_attempts: 0,
            failure: failure.clone(),
        };
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

    /// What to tell the broker about a delivery that was handled like this.
    pub fn reply<E: fmt::Display>(&self, handled: &Result<HandleOutcome, HandleError<E>>) -> BrokerReply {
        match handled {
            Ok(HandleOutcome::Handled | HandleOutcome::Duplicate) => BrokerReply::Acknowledge,
            Ok(HandleOutcome::InProgress { retry_in }) => BrokerReply::Redeliver { after: *retry_in },
            Ok(HandleOutcome::Poisoned { attempts, error }) => {
                BrokerReply::DeadLetter { why: format!("it was tried {attempts} times; the last time: {error}") }
            }
            Ok(HandleOutcome::OutcomeUnknown) => {
                let why = "a run of it was never heard of again: look what became of it, then resolve or forget it";
                BrokerReply::DeadLetter { why: why.into() }
            }
            Ok(HandleOutcome::TooOld) => {
                let why = "it is older than handled events are remembered: it may have been handled already";
                BrokerReply::DeadLetter { why: why.into() }
            }
            Err(HandleError::Failed { error, attempt, poisoned: true }) => {
                BrokerReply::DeadLetter { why: format!("it was tried {attempt} times; the last time: {error}") }
            }
            Err(HandleError::Failed { attempt, .. }) => BrokerReply::Redeliver { after: self.backoff.after(*attempt) },
            Err(HandleError::TimedOut | HandleError::Aborted(_)) => BrokerReply::Redeliver { after: self.policy.lease },
            Err(HandleError::Store(refusal)) => {
                BrokerReply::Redeliver { after: refusal.retry_after.unwrap_or(RETRY_SOON) }
            }
        }
    }

    /// Forgets an event, so that a delivery of it runs again, with as many runs as a new one: before it is sent again from
    /// a dead-letter queue. `false` if it is being handled right now, and so was not forgotten.
    ///
    /// (If a run of it then crashes, the runs before it count again: their number is only kept with a failure.)
    ///
    /// # Errors
    /// If the store cannot be used. It may be called again.
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
        // The store goes on counting for a while. What it has counted so far is noted, as a failure that counts nothing.
        let ClaimOutcome::Granted(lease) = store.claim(&ask).await? else { return Ok(false) };
        let record = FailureRecord::encode(lease.attempt, "it is to be handled again");
        let end =
            Settlement::Complete { failed: true, record, summary: RecordSummary::default(), ttl: self.policy.ttl };
        Ok(!matches!(store.settle(&lease, &end).await?, SettleOutcome::ClaimLost(_)))
    }

    /// An event that happened longer ago than handled ones are remembered may have been handled and forgotten. If
    /// there is an entry, it says more.
    async fn is_too_old(&self, event: &InboxEvent) -> Result<bool, Refusal> {
        let age = event.at().and_then(|at| SystemTime::now().duration_since(at).ok()).unwrap_or_default();
        if age <= self.policy.ttl {
            return Ok(false);
        }
        let found = self.engine.store().get(&event.scope().address(event.id(), None, None)).await;
        found.map(|found| found.is_none()).map_err(|error| {
            Refusal::new(RefusalReason::StoreUnavailable, format!("nothing was executed: {error}"))
                .retry_after(RETRY_SOON)
        })
    }

    /// Runs it, also if all that is remembered are failures, but not too many.
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
            let verdict = self.engine.execute(&self.policy, ask, BorrowedOperation(&mut run)).await;
            let Decision::Replay(finished, _) = &verdict else { return verdict };
            // If it ran here and lost its claim, what the record says counts.
            let Some(run) = &mut run else { return verdict };
            let failed = FailureRecord::decode(finished);
            if !finished.failed || failed.attempts >= self.poison_after {
                return verdict;
            }
            run.uncounted_attempts = failed.uncounted_attempts;
            // Only one of several deliveries forgets this very failure; the others find the next run.
            if let Err(error) = self.engine.store().admin().forget(&address, finished.fence).await {
                let what = format!("nothing was executed: {error}");
                return Decision::Refused(Refusal::new(RefusalReason::StoreUnavailable, what).retry_after(RETRY_SOON));
            }
        }
        Decision::Refused(
            Refusal::new(RefusalReason::InProgress, "others handle the same event again and again")
                .retry_after(RETRY_SOON),
        )
    }

    fn claim_request(&self, event: &InboxEvent) -> ClaimRequest {
        ClaimRequest {
            address: event.scope().address(event.id(), None, None),
            token: ClaimToken::mint(),
            fingerprint: Fingerprint::NONE,
            tags: Tags::new(event.consumer(), "", event.source(), event.id()),
            label: Bytes::new(),
            lease: self.policy.lease,
            ttl: self.policy.ttl,
            take_over: None,
        }
    }
}

impl fmt::Debug for Inbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Inbox");
        shown.field("store", self.engine.store()).field("poison_after", &self.poison_after).finish_non_exhaustive()
    }
}

impl<E: fmt::Display> fmt::Display for HandleError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed { error, attempt, poisoned } => {
                let then = if *poisoned {
                    "it is not run again until it is forgotten"
                } else {
                    "it runs again when it comes again"
                };
                write!(f, "the handler failed in run {attempt}: {error}; {then}")
            }
            Self::TimedOut => f.write_str("the handler did not end in time; it may have had its effect"),
            Self::Aborted(error) => write!(f, "the handler was aborted: {error}; it may have had its effect"),
            Self::Store(refusal) => refusal.fmt(f),
        }
    }
}

impl<E: Error + 'static> Error for HandleError<E> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Failed { error, .. } => Some(error),
            Self::Aborted(error) => Some(error),
            Self::TimedOut | Self::Store(_) => None,
        }
    }
}
