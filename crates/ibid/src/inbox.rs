//! Events of a message broker: which event a delivery is, and handlers that run once per event.
//!
//! Brokers deliver at least once. [`Event::of`] says which event a delivery is; an [`Inbox`] remembers, in any
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
    engine::{Engine, Verdict},
    observe::{Observer, Silent},
    policy::{CheckedPolicy, LONGEST, OnConcurrent, OnMismatch, OnUnknown, Policy},
    refusal::{Reason, Refusal},
    store::{Ask, Claim, End, Fingerprint, Held, Outline, Store, StoreError, Tags, Token},
};

use self::run::{CRASHED, Did, Failed, Lent, Run};
pub use self::{
    event::{BrokerId, Delivered, Event, MAX_CONSUMER, MAX_PART, Unidentified},
    reply::{Backoff, Reply},
};

mod event;
mod identity;
mod reply;
mod run;
#[cfg(test)]
mod tests;

/// How many runs an event gets, unless said otherwise.
const POISON_AFTER: u32 = 5;
/// How long a handled event is remembered, unless said otherwise.
const KEEP: Duration = Duration::from_secs(7 * 24 * 3600);
/// How often one delivery tries to run a failed event again before it is told to come back.
const TRIES: u32 = 8;
const SOON: Duration = Duration::from_secs(1);

/// Remembers which events were handled. Cheap to clone.
#[derive(Clone)]
pub struct Inbox {
    engine: Engine,
    policy: CheckedPolicy,
    poison_after: u32,
    backoff: Backoff,
}

/// What became of a delivery.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum Handled {
    /// Handled now, and remembered.
    Done,
    /// Handled before.
    Duplicate,
    /// Being handled elsewhere, or by somebody who is silent and may still be at it.
    Busy {
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
    Held,
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
        Self::watched(store, Arc::new(Silent))
    }

    /// The same, with somebody who is told of failing store calls and lost claims.
    pub fn watched(store: Arc<dyn Store>, observer: Arc<dyn Observer>) -> Self {
        let mut policy = Policy::ietf();
        policy.ttl = KEEP;
        policy.on_mismatch = OnMismatch::Ignore;
        policy.on_concurrent = OnConcurrent::Reject;
        policy.on_unknown = OnUnknown::Retry;
        let engine = Engine::with(store, observer, None);
        let policy = policy.checked().expect("every dial is within its range");
        Self { engine, policy, poison_after: POISON_AFTER, backoff: Backoff::default() }
    }

    /// How long a handled event is remembered. Longer than a broker keeps a message, or a late copy runs again.
    #[must_use]
    pub fn keep(self, keep: Duration) -> Self {
        self.with(|policy| policy.ttl = keep)
    }

    /// Durations that are too short or too long count as the shortest or the longest.
    fn with(self, turn: impl FnOnce(&mut Policy)) -> Self {
        let mut policy = self.policy.into_policy();
        turn(&mut policy);
        policy.ttl = policy.ttl.clamp(Duration::from_millis(1), LONGEST);
        policy.timeout = policy.timeout.clamp(Duration::from_millis(1), LONGEST);
        policy.lease = policy.lease.clamp(Duration::from_millis(100), LONGEST);
        Self { policy: policy.checked().expect("every dial is within its range"), ..self }
    }

    /// How long a handler may take, and how long its claim may stay silent before it counts as crashed.
    #[must_use]
    pub fn times(self, timeout: Duration, lease: Duration) -> Self {
        self.with(|policy| (policy.timeout, policy.lease) = (timeout, lease))
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
        self.with(|policy| policy.on_unknown = on_unknown)
    }

    /// When failed events should come again.
    #[must_use]
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.backoff = backoff;
        self
    }

    /// Claims the event, runs the handler with the number of this run, and remembers how it ended.
    ///
    /// The handler runs in a task of its own: dropping the returned future does not cancel it.
    ///
    /// # Errors
    /// See [`HandleError`]; [`reply`](Self::reply) says what to tell the broker.
    pub async fn handle<F, R, E>(&self, event: &Event, handler: F) -> Result<Handled, HandleError<E>>
    where
        F: FnOnce(u32) -> R + Send + 'static,
        R: Future<Output = Result<(), E>> + Send + 'static,
        E: fmt::Display + Send + 'static,
    {
        if self.is_too_old(event).await.map_err(HandleError::Store)? {
            return Ok(Handled::TooOld);
        }
        let failure = Arc::new(Mutex::new(None));
        let run = Run {
            handler: Some(handler),
            timeout: self.policy.timeout,
            poison_after: self.poison_after,
            forgiven: 0,
            failure: failure.clone(),
        };
        let (inbox, event) = (self.clone(), event.clone());
        let verdict = tokio::spawn(async move { inbox.execute(&event, run).await }).await;
        let failure = failure.lock().take();
        match (verdict.map_err(HandleError::Aborted)?, failure) {
            (Verdict::Replay(finished, _), _) if !finished.failed => Ok(Handled::Duplicate),
            (_, Some((error, attempt))) => {
                Err(HandleError::Failed { error, attempt, poisoned: attempt >= self.poison_after })
            }
            (Verdict::Replay(finished, _), None) => {
                let failed = Failed::read(&finished);
                Ok(Handled::Poisoned { attempts: failed.attempts, error: failed.error })
            }
            (Verdict::Ran(Did::Handle, _), None) => Ok(Handled::Done),
            (Verdict::Ran(Did::Fail, _), None) => unreachable!("what a handler failed of is in its slot"),
            (Verdict::Ran(Did::TimeOut, _), None) => Err(HandleError::TimedOut),
            (Verdict::Ran(Did::Refuse(attempts), _), None) => {
                Ok(Handled::Poisoned { attempts, error: CRASHED.to_owned() })
            }
            (Verdict::Refused(refusal), None) => match refusal.reason {
                Reason::InProgress => Ok(Handled::Busy { retry_in: refusal.retry_after.unwrap_or(SOON) }),
                Reason::OutcomeUnknown => Ok(Handled::Held),
                _ => Err(HandleError::Store(refusal)),
            },
        }
    }

    /// What to tell the broker about a delivery that was handled like this.
    pub fn reply<E: fmt::Display>(&self, handled: &Result<Handled, HandleError<E>>) -> Reply {
        match handled {
            Ok(Handled::Done | Handled::Duplicate) => Reply::Acknowledge,
            Ok(Handled::Busy { retry_in }) => Reply::Again { after: *retry_in },
            Ok(Handled::Poisoned { attempts, error }) => {
                Reply::DeadLetter { why: format!("it was tried {attempts} times; the last time: {error}") }
            }
            Ok(Handled::Held) => {
                let why = "a run of it was never heard of again: look what became of it, then resolve or forget it";
                Reply::DeadLetter { why: why.into() }
            }
            Ok(Handled::TooOld) => {
                let why = "it is older than handled events are remembered: it may have been handled already";
                Reply::DeadLetter { why: why.into() }
            }
            Err(HandleError::Failed { error, attempt, poisoned: true }) => {
                Reply::DeadLetter { why: format!("it was tried {attempt} times; the last time: {error}") }
            }
            Err(HandleError::Failed { attempt, .. }) => Reply::Again { after: self.backoff.after(*attempt) },
            Err(HandleError::TimedOut | HandleError::Aborted(_)) => Reply::Again { after: self.policy.lease },
            Err(HandleError::Store(refusal)) => Reply::Again { after: refusal.retry_after.unwrap_or(SOON) },
        }
    }

    /// Forgets an event, so that a delivery of it runs again, with as many runs as a new one: before it is sent again from
    /// a dead-letter queue. `false` if it is being handled right now, and so was not forgotten.
    ///
    /// (If a run of it then crashes, the runs before it count again: their number is only kept with a failure.)
    ///
    /// # Errors
    /// If the store cannot be used. It may be called again.
    pub async fn forget(&self, event: &Event) -> Result<bool, StoreError> {
        let (store, ask) = (self.engine.store(), Arc::new(self.ask(event)));
        let fence = match store.get(&ask.address).await? {
            Some(Claim::Done(finished)) => finished.fence,
            Some(Claim::Unknown(holder)) => holder.fence,
            Some(Claim::Busy(_) | Claim::Granted(_)) => return Ok(false),
            None | Some(Claim::Spent) => return Ok(true),
        };
        let forgotten = store.operators().forget(&ask.address, fence).await?;
        if matches!(forgotten, Held::Lost(now) if !matches!(*now, Claim::Spent)) {
            return Ok(false);
        }
        // The store goes on counting for a while. What it has counted so far is noted, as a failure that counts nothing.
        let Claim::Granted(lease) = store.claim(&ask).await? else { return Ok(false) };
        let record = Failed::record(lease.attempt, "it is to be handled again");
        let end = End::Complete { failed: true, record, outline: Outline::default(), keep: self.policy.ttl };
        Ok(!matches!(store.settle(&lease, &end).await?, Held::Lost(_)))
    }

    /// An event that happened longer ago than handled ones are remembered may have been handled and forgotten. If
    /// there is an entry, it says more.
    async fn is_too_old(&self, event: &Event) -> Result<bool, Refusal> {
        let age = event.at().and_then(|at| SystemTime::now().duration_since(at).ok()).unwrap_or_default();
        if age <= self.policy.ttl {
            return Ok(false);
        }
        let found = self.engine.store().get(&event.scope().address(event.id(), None, None)).await;
        found.map(|found| found.is_none()).map_err(|error| {
            Refusal::new(Reason::StoreUnavailable, format!("nothing was executed: {error}")).retry_after(SOON)
        })
    }

    /// Runs it, also if all that is remembered are failures, but not too many.
    async fn execute<F, R, E>(&self, event: &Event, run: Run<F, E>) -> Verdict<Did>
    where
        F: FnOnce(u32) -> R + Send,
        R: Future<Output = Result<(), E>> + Send,
        E: fmt::Display + Send,
    {
        let mut run = Some(run);
        for _ in 0..TRIES {
            let ask = self.ask(event);
            let address = ask.address;
            let verdict = self.engine.execute(&self.policy, ask, Lent(&mut run)).await;
            let Verdict::Replay(finished, _) = &verdict else { return verdict };
            // If it ran here and lost its claim, what the record says counts.
            let Some(run) = &mut run else { return verdict };
            let failed = Failed::read(finished);
            if !finished.failed || failed.attempts >= self.poison_after {
                return verdict;
            }
            run.forgiven = failed.forgiven;
            // Only one of several deliveries forgets this very failure; the others find the next run.
            if let Err(error) = self.engine.store().operators().forget(&address, finished.fence).await {
                let what = format!("nothing was executed: {error}");
                return Verdict::Refused(Refusal::new(Reason::StoreUnavailable, what).retry_after(SOON));
            }
        }
        Verdict::Refused(
            Refusal::new(Reason::InProgress, "others handle the same event again and again").retry_after(SOON),
        )
    }

    fn ask(&self, event: &Event) -> Ask {
        Ask {
            address: event.scope().address(event.id(), None, None),
            token: Token::mint(),
            fingerprint: Fingerprint::NONE,
            tags: Tags::new(event.consumer(), "", event.source(), event.id()),
            label: Bytes::new(),
            hold: self.policy.lease,
            keep: self.policy.ttl,
            over: None,
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
