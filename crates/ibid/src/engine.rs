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
    fingerprint::Comparison,
    journal::Journal,
    later::Later,
    observe::{Notice, Observer, Silent, StoreCall},
    policy::{CheckedPolicy, OnConcurrent, OnMismatch, OnStoreDown, OnUnknown, Policy},
    quota::Quota,
    refusal::{Reason, Refusal},
    running::Running,
    store::{
        Address, Ask, Claim, End, ErrorKind, Fingerprint, Finished, Held, Holder, Lease, Outline, Store, StoreError,
        Token,
    },
    time::from_now,
};

pub use self::shadow::{Finish, Observation, Observed};

mod shadow;

/// How often a store call is sent again when its answer was lost.
const ASKS: u32 = 3;
/// How often one request tries to take over before it is told to come back.
const TAKEOVERS: u32 = 8;
/// Told to those who should come back soon.
const SOON: Duration = Duration::from_secs(1);

/// Something to run at most once.
pub trait Operation: Send {
    /// What the caller gets of it.
    type Answer: Send;

    /// Runs it; called at most once. Without a lease it runs unprotected.
    fn run(&mut self, lease: Option<&Lease>) -> impl Future<Output = Ended<Self::Answer>> + Send;

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
    fn probe(&mut self) -> impl Future<Output = Probed> + Send {
        async { Probed::Unclear }
    }
}

/// How a run ended.
#[derive(Debug)]
#[must_use]
pub enum Ended<A> {
    /// With an answer to remember.
    Complete(A, Complete),
    /// With a complete answer that is not remembered.
    Release(A),
    /// It provably did not start.
    NotStarted(Refusal),
    /// Nobody knows; the caller gets this.
    Park(A, ParkedBy),
    /// It wrote its answer to the store in a transaction of its own: the store knows whether that was committed.
    Entrusted(A, Otherwise),
}

/// What becomes of a claim whose answer was entrusted to a transaction, if that was not committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Otherwise {
    /// Its answer is the one that was to be recorded: it is released, and the caller must not get that answer.
    Refuse,
    /// It is released, and the caller gets its answer.
    Release,
    /// It is parked, and the caller gets its answer.
    Park(ParkedBy),
}

/// What is remembered.
#[derive(Debug, Clone)]
pub struct Complete {
    /// Whether it is a failure.
    pub failed: bool,
    /// See [`crate::Record`].
    pub record: Bytes,
    /// For people.
    pub outline: Outline,
}

/// Why an outcome is unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParkedBy {
    /// The app's complete answer leaves it open, or the handler panicked. It runs no more.
    Answer,
    /// The answer was lost. The operation may still be running.
    Lost,
    /// The operation took too long and may still be running.
    Timeout,
    /// No answer came within `timeout` and `late_answer`. The operation counts as ended.
    NoLateAnswer,
}

impl ParkedBy {
    /// When the claim may be taken over: an operation that may still be running has the time of a lease to end.
    fn retry_in(self, policy: &Policy) -> Duration {
        match self {
            Self::Lost | Self::Timeout => policy.lease,
            Self::Answer | Self::NoLateAnswer => Duration::ZERO,
        }
    }
}

/// What the app says about an earlier run.
#[derive(Debug)]
pub enum Probed {
    /// It took place; this was its answer.
    Happened(Complete),
    /// It did not.
    DidNotHappen,
    /// The app cannot say.
    Unclear,
}

/// What the caller of a request gets.
#[derive(Debug)]
#[must_use]
pub enum Verdict<A> {
    /// The answer of this run.
    Ran(A, Stored),
    /// The remembered answer, and where it is remembered: in the store, or still in the journal.
    Replay(Finished, Stored),
    /// A refusal.
    Refused(Refusal),
}

/// What became of the answer of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    /// It is recorded.
    Yes,
    /// It is not remembered.
    No,
    /// It waits in the journal.
    Pending,
    /// The outcome is recorded as unknown.
    Unknown,
    /// It ran without protection.
    Degraded,
    /// It ran with the protection of a part of the store only, and waits in the journal for the part that decides.
    Solo,
}

/// Runs operations at most once. Cheap to clone.
#[derive(Clone)]
pub struct Engine {
    store: Arc<dyn Store>,
    observer: Arc<dyn Observer>,
    journal: Option<Arc<Journal>>,
    later: Later,
    running: Running,
    quota: Option<Arc<Quota>>,
    recording: Arc<shadow::Recording>,
}

impl Engine {
    /// An engine on a store.
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self::with(store, Arc::new(Silent), None)
    }

    /// An engine that is watched and, if it has one, keeps unrecorded answers in a journal.
    pub fn with(store: Arc<dyn Store>, observer: Arc<dyn Observer>, journal: Option<Arc<Journal>>) -> Self {
        let later = Later::new(store.clone(), observer.clone(), journal.clone());
        let recording = Arc::default();
        Self { store, observer, journal, later, running: Running::default(), quota: None, recording }
    }

    /// The same, for tenants who may begin only so much.
    #[must_use]
    pub fn limited(self, quota: Arc<Quota>) -> Self {
        Self { quota: Some(quota), ..self }
    }

    /// Decides about one request, top to bottom.
    pub fn execute<O: Operation>(
        &self, policy: &CheckedPolicy, ask: Ask, mut operation: O,
    ) -> impl Future<Output = Verdict<O::Answer>> {
        let ask = Arc::new(ask);
        // Not an `async fn`: that would hold its arguments twice.
        async move { self.decide(policy, ask, &mut operation).await }
    }

    /// Futures are moved, with all that they have room for. What only some requests need is boxed, so that a replay
    /// does not pay for it.
    async fn decide<O: Operation>(&self, policy: &Policy, mut ask: Arc<Ask>, operation: &mut O) -> Verdict<O::Answer> {
        let own = ask.fingerprint;
        let patience = from_now(policy.wait_timeout.min(operation.patience()));
        let mut takeovers = 0;
        let mut probed = false;

        if let Some((finished, solo)) = self.journal.as_ref().and_then(|journal| journal.find(&ask.address)) {
            if let Some(refusal) = mismatch(policy, &own, &finished.fingerprint, operation) {
                return Verdict::Refused(refusal);
            }
            return Verdict::Replay(finished, if solo { Stored::Solo } else { Stored::Pending });
        }
        if let Some(refusal) = self.before_claiming(&ask).await {
            return Verdict::Refused(refusal);
        }
        loop {
            let sent = Instant::now();
            let (claim, doubtful) = self.claim(&ask, sent).await;
            if doubtful && !matches!(claim, Ok(Claim::Granted(_) | Claim::Done(_) | Claim::Spent)) {
                // A copy of it may still be on its way: it must not come alive once the holder is gone. Whoever goes on
                // asking does so under another name.
                self.later.push(Lease::unseen(&ask), End::Release);
                ask = Arc::new(Ask { token: Token::mint(), ..Ask::clone(&ask) });
            }
            let claim = match claim {
                Ok(claim) => claim,
                Err(error) => return self.without_store(policy, operation, &error).await,
            };
            if let Some(stored) = fingerprint_of(&claim)
                && let Some(refusal) = mismatch(policy, &own, stored, operation)
            {
                return Verdict::Refused(refusal);
            }
            match claim {
                Claim::Granted(lease) => {
                    if let Some(refusal) = self.after_grant(&lease).await {
                        let refused = || Verdict::Refused(refusal);
                        return Box::pin(self.end(policy, &lease, End::Release, Instant::now(), operation, refused))
                            .await;
                    }
                    return Box::pin(self.run(policy, lease, sent, operation)).await;
                }
                Claim::Done(finished) => return Verdict::Replay(finished, Stored::Yes),
                Claim::Busy(holder) => {
                    let left = patience.saturating_duration_since(Instant::now());
                    if policy.on_concurrent == OnConcurrent::Reject || left.is_zero() {
                        return Verdict::Refused(in_progress(SOON));
                    }
                    self.wait(&ask, &holder, left).await;
                }
                Claim::Unknown(holder) => {
                    let left = patience.saturating_duration_since(Instant::now());
                    let ripe = holder.takeover_in.is_zero();
                    if ripe && policy.resolve.is_some() && !probed {
                        probed = true;
                        if self.resolved(policy, &ask, &holder, operation).await {
                            continue;
                        }
                    }
                    match policy.on_unknown {
                        // It may still be running. Once it cannot be any more, the app is asked, or it runs again.
                        _ if !ripe && (policy.on_unknown == OnUnknown::Retry || policy.resolve.is_some()) => {
                            if policy.on_concurrent == OnConcurrent::Reject || left.is_zero() {
                                return Verdict::Refused(in_progress(holder.takeover_in.max(SOON)));
                            }
                            sleep(holder.takeover_in.min(left)).await;
                        }
                        OnUnknown::Hold => return Verdict::Refused(outcome_unknown()),
                        OnUnknown::Retry if takeovers < TAKEOVERS => {
                            takeovers += 1;
                            ask = Arc::new(Ask { over: Some(holder.fence), ..Ask::clone(&ask) });
                        }
                        OnUnknown::Retry => return Verdict::Refused(in_progress(SOON)),
                    }
                }
                // An operator forgot the claim while its answer was on the way: start over under another name.
                Claim::Spent if takeovers < TAKEOVERS => {
                    takeovers += 1;
                    ask = Arc::new(Ask { token: Token::mint(), over: None, ..Ask::clone(&ask) });
                }
                Claim::Spent => return Verdict::Refused(in_progress(SOON)),
            }
        }
    }

    /// A tenant who has used up their quota claims nothing new. What is known already is answered all the same.
    async fn before_claiming(&self, ask: &Ask) -> Option<Refusal> {
        let quota = self.quota.as_ref().filter(|quota| quota.is_set())?;
        let after = Box::pin(quota.has_room(self.store.as_ref(), &ask.tags)).await.err()?;
        // A store that does not say is asked again, by the claim.
        let is_new = matches!(self.store.get(&ask.address).await, Ok(None));
        is_new.then(|| quota_exceeded(after))
    }

    /// Only a grant spends, and only the first at its address: to run again is not to begin.
    async fn after_grant(&self, lease: &Lease) -> Option<Refusal> {
        let quota = self.quota.as_ref().filter(|quota| quota.is_set() && lease.attempt <= 1)?;
        Box::pin(quota.spend(self.store.as_ref(), &lease.ask.tags)).await.err().map(quota_exceeded)
    }

    /// What was recorded counts in its tenant's quota of bytes.
    async fn charge(&self, lease: &Lease, recorded: usize) {
        let Some(quota) = self.quota.as_ref().filter(|quota| quota.is_set()) else { return };
        let Ask { tags, label, .. } = &*lease.ask;
        let bytes = (recorded + tags.as_bytes().len() + label.len()) as u64;
        Box::pin(quota.recorded(self.store.as_ref(), tags, bytes)).await;
    }

    /// Runs a granted operation under its lease and settles it.
    async fn run<O: Operation>(
        &self, policy: &Policy, lease: Lease, sent: Instant, operation: &mut O,
    ) -> Verdict<O::Answer> {
        let abandoned = self.later.guard(&lease, policy);
        if sent.elapsed() > policy.lease * 2 / 3 && self.extend(&lease, policy).await == Beat::Lost {
            abandoned.disarm();
            return Verdict::Refused(in_progress(SOON));
        }
        let ended = self.beating(&lease, policy, pin!(operation.run(Some(&lease)))).await;
        let now = Instant::now();
        let keep_unknown = policy.ttl.saturating_sub(now - sent).max(policy.lease);
        let verdict = match ended {
            Ended::Complete(answer, Complete { failed, record, outline }) => {
                let recorded = record.len();
                let end = End::Complete { failed, record, outline, keep: policy.ttl };
                let settled = self.settle(&lease, &end, now).await;
                self.charge(&lease, recorded).await;
                match settled {
                    Ok(Held::Lost(there)) => self.lost(policy, &lease, *there, operation),
                    Ok(_) if lease.solo => Verdict::Ran(answer, Stored::Degraded),
                    Ok(_) => Verdict::Ran(answer, Stored::Yes),
                    Err(_) => self.record_later(&lease, end, answer).await,
                }
            }
            Ended::Release(answer) => {
                self.end(policy, &lease, End::Release, now, operation, || Verdict::Ran(answer, Stored::No)).await
            }
            Ended::NotStarted(refusal) => {
                self.end(policy, &lease, End::Release, now, operation, || Verdict::Refused(refusal)).await
            }
            Ended::Entrusted(answer, otherwise) => {
                self.entrusted(policy, &lease, answer, otherwise, (now, keep_unknown), operation).await
            }
            Ended::Park(answer, by) => {
                let end = End::Park { keep: keep_unknown, retry_in: by.retry_in(policy) };
                self.end(policy, &lease, end, now, operation, || Verdict::Ran(answer, Stored::Unknown)).await
            }
        };
        abandoned.disarm();
        verdict
    }

    /// Its own transaction was to record the answer. Whatever settles after that waits for the transaction's end, so that
    /// one call tells both: what was committed is found done, and what was not did not happen.
    async fn entrusted<O: Operation>(
        &self, policy: &Policy, lease: &Lease, answer: O::Answer, otherwise: Otherwise,
        (now, keep): (Instant, Duration), operation: &mut O,
    ) -> Verdict<O::Answer> {
        let end = match otherwise {
            Otherwise::Park(by) => End::Park { keep, retry_in: by.retry_in(policy) },
            Otherwise::Refuse | Otherwise::Release => End::Release,
        };
        let settled = self.settle(lease, &end, now).await;
        match (settled, otherwise) {
            (Ok(Held::Lost(there)), _) => match (*there, otherwise) {
                (Claim::Done(finished), Otherwise::Refuse) if finished.fence == lease.fence => {
                    Verdict::Ran(answer, Stored::Yes)
                }
                (Claim::Done(finished), _) if finished.fence == lease.fence => Verdict::Replay(finished, Stored::Yes),
                (there, _) => self.lost(policy, lease, there, operation),
            },
            (Ok(_), Otherwise::Refuse) => Verdict::Refused(rolled_back()),
            (Ok(_), Otherwise::Release) => Verdict::Ran(answer, Stored::No),
            (Ok(_), Otherwise::Park(_)) => Verdict::Ran(answer, Stored::Unknown),
            (Err(_), _) => {
                self.later.push(lease.clone(), end);
                Verdict::Refused(not_known_yet())
            }
        }
    }

    /// Settles an end that carries no answer: if the store cannot take it now, it is told until it does.
    async fn end<O: Operation>(
        &self, policy: &Policy, lease: &Lease, end: End, now: Instant, operation: &mut O,
        verdict: impl FnOnce() -> Verdict<O::Answer>,
    ) -> Verdict<O::Answer> {
        match self.settle(lease, &end, now).await {
            Ok(Held::Lost(there)) => self.lost(policy, lease, *there, operation),
            Ok(_) => verdict(),
            Err(_) => {
                self.later.push(lease.clone(), end);
                verdict()
            }
        }
    }

    /// An answer that the store cannot record: to the journal; without one, the answer is withheld until it is stored.
    async fn record_later<A>(&self, lease: &Lease, end: End, answer: A) -> Verdict<A> {
        if let Some(journal) = &self.journal {
            match journal.append(lease, &end).await {
                Ok(()) => {
                    self.observer.noticed(&Notice::Journaled(&lease.ask.address));
                    self.later.wake();
                    return Verdict::Ran(answer, if lease.solo { Stored::Solo } else { Stored::Pending });
                }
                Err(why) => self.observer.noticed(&Notice::JournalFailed(&why)),
            }
        }
        self.later.push(lease.clone(), end);
        Verdict::Refused(
            Refusal::new(
                Reason::StoreUnavailable,
                "the operation ran, but its answer could not be recorded yet; \
                 a retry with the same key gets it once it is, and does not run it again",
            )
            .retry_after(SOON),
        )
    }

    /// A claim that is lost gives what the record says, never its own reply; and never what it says to another request:
    /// the key may have been forgotten, or lost by the store, and used again since.
    fn lost<O: Operation>(&self, policy: &Policy, lease: &Lease, now: Claim, operation: &O) -> Verdict<O::Answer> {
        self.observer.noticed(&Notice::LostClaim(&lease.ask.address));
        if let Some(stored) = fingerprint_of(&now)
            && let Some(refusal) = mismatch(policy, &lease.ask.fingerprint, stored, operation)
        {
            return Verdict::Refused(refusal);
        }
        match now {
            Claim::Done(finished) => Verdict::Replay(finished, Stored::Yes),
            Claim::Busy(_) | Claim::Granted(_) | Claim::Spent => Verdict::Refused(in_progress(SOON)),
            Claim::Unknown(_) => Verdict::Refused(outcome_unknown()),
        }
    }

    /// Asks the app about an unknown outcome. `true` if the entry has changed and is worth another claim.
    async fn resolved<O: Operation>(&self, policy: &Policy, ask: &Ask, holder: &Holder, operation: &mut O) -> bool {
        let end = match Box::pin(operation.probe()).await {
            Probed::Happened(Complete { failed, record, outline }) => {
                End::Complete { failed, record, outline, keep: policy.ttl }
            }
            Probed::DidNotHappen => End::Release,
            Probed::Unclear => return false,
        };
        match self.store.operators().resolve(&ask.address, holder.fence, &end).await {
            Ok(_) => true,
            Err(error) => {
                self.failed("resolve", &error);
                false
            }
        }
    }

    /// The store cannot decide: refused, or run unprotected, as the policy says.
    async fn without_store<O: Operation>(
        &self, policy: &Policy, operation: &mut O, error: &StoreError,
    ) -> Verdict<O::Answer> {
        let open = policy.on_store_down == OnStoreDown::Open && error.kind != ErrorKind::Corrupt;
        if !open {
            return Verdict::Refused(store_unavailable());
        }
        unprotected(operation, Stored::Degraded).await
    }

    async fn wait(&self, ask: &Ask, holder: &Holder, left: Duration) {
        let limit = left.min(holder.takeover_in.max(Duration::from_millis(1)));
        let sent = Instant::now();
        let waited = self.store.wait(&ask.address, holder.fence, limit).await;
        self.observer.asked(StoreCall::Wait, sent.elapsed());
        if let Err(error) = waited {
            self.failed("wait", &error);
            sleep(limit.min(Duration::from_millis(50))).await;
        }
    }

    /// A claim whose answer is lost is sent again with the same token: the store gives the same answer. `now` is now:
    /// the clock is read often enough as it is.
    async fn claim(&self, ask: &Arc<Ask>, now: Instant) -> (Result<Claim, StoreError>, bool) {
        let (mut asked, mut sent, mut doubtful) = (0, now, false);
        loop {
            asked += 1;
            let answer = self.store.claim(ask).await;
            self.observer.asked(StoreCall::Claim, sent.elapsed());
            match answer {
                Err(error) => {
                    self.failed("claim", &error);
                    doubtful |= error.kind == ErrorKind::Ambiguous;
                    if error.kind != ErrorKind::Ambiguous || asked == ASKS {
                        return (Err(error), doubtful);
                    }
                }
                answer => return (answer, doubtful),
            }
            sleep(pause(asked)).await;
            sent = Instant::now();
        }
    }

    /// `now` is now, as for [`claim`](Self::claim).
    async fn settle(&self, lease: &Lease, end: &End, now: Instant) -> Result<Held, StoreError> {
        let (mut asked, mut sent) = (0, now);
        loop {
            asked += 1;
            let answer = self.store.settle(lease, end).await;
            self.observer.asked(StoreCall::Settle, sent.elapsed());
            match answer {
                Ok(held) => {
                    if held == Held::Restored {
                        self.observer.noticed(&Notice::Restored(&lease.ask.address));
                    }
                    return Ok(held);
                }
                Err(error) => {
                    self.failed("settle", &error);
                    if asked == ASKS {
                        return Err(error);
                    }
                }
            }
            sleep(pause(asked)).await;
            sent = Instant::now();
        }
    }

    /// Extends the lease at a third of its length while `work` goes on. Losing it never cancels the work.
    async fn beating<T>(&self, lease: &Lease, policy: &Policy, mut work: Pin<&mut impl Future<Output = T>>) -> T {
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
                Beat::Held => beat.as_mut().reset(from_now(policy.lease / 3)),
                // The settle will find out, and say so once.
                Beat::Lost => return work.await,
                Beat::Missed => beat.as_mut().reset(from_now(policy.lease / 10)),
            }
        }
    }

    async fn extend(&self, lease: &Lease, policy: &Policy) -> Beat {
        let sent = Instant::now();
        let answer = self.store.extend(lease, policy.lease).await;
        self.observer.asked(StoreCall::Extend, sent.elapsed());
        match answer {
            Ok(Held::Held) => Beat::Held,
            Ok(Held::Restored) => {
                self.observer.noticed(&Notice::Restored(&lease.ask.address));
                Beat::Held
            }
            Ok(Held::Lost(_)) => Beat::Lost,
            Err(error) => {
                self.failed("extend", &error);
                Beat::Missed
            }
        }
    }

    fn failed(&self, call: &'static str, error: &StoreError) {
        self.observer.noticed(&Notice::StoreFailed { call, error });
    }

    /// What is running now.
    pub fn running(&self) -> &Running {
        &self.running
    }

    /// What a claim at this address would find, without claiming: in the journal, else in the store.
    pub(crate) async fn seen(&self, at: &Address) -> Result<Option<Claim>, StoreError> {
        if let Some((finished, _)) = self.journal.as_ref().and_then(|journal| journal.find(at)) {
            return Ok(Some(Claim::Done(finished)));
        }
        self.store.get(at).await.inspect_err(|error| self.failed("get", error))
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
    pub fn later(&self) -> &Later {
        &self.later
    }
}

async fn unprotected<O: Operation>(operation: &mut O, stored: Stored) -> Verdict<O::Answer> {
    match Box::pin(operation.run(None)).await {
        Ended::Complete(answer, _) | Ended::Release(answer) | Ended::Park(answer, _) | Ended::Entrusted(answer, _) => {
            Verdict::Ran(answer, stored)
        }
        Ended::NotStarted(refusal) => Verdict::Refused(refusal),
    }
}

#[derive(PartialEq, Eq)]
enum Beat {
    Held,
    Lost,
    Missed,
}

/// What is compared of what the store holds.
fn fingerprint_of(claim: &Claim) -> Option<&Fingerprint> {
    match claim {
        Claim::Busy(holder) | Claim::Unknown(holder) => Some(&holder.fingerprint),
        Claim::Done(finished) => Some(&finished.fingerprint),
        Claim::Granted(_) | Claim::Spent => None,
    }
}

/// Why a request cannot have what is stored under its key: it is another one's, or nobody can tell.
fn mismatch<O: Operation>(policy: &Policy, own: &Fingerprint, stored: &Fingerprint, operation: &O) -> Option<Refusal> {
    mismatch_by(policy, own, stored, |version| operation.fingerprint(version))
}

fn mismatch_by(
    policy: &Policy, own: &Fingerprint, stored: &Fingerprint, by_version: impl FnOnce(u8) -> Option<Fingerprint>,
) -> Option<Refusal> {
    if policy.on_mismatch != OnMismatch::Reject {
        return None;
    }
    match own.compare(stored, by_version) {
        Comparison::Same => None,
        Comparison::Different => Some(reused()),
        Comparison::UnknownVersion => Some(not_comparable()),
    }
}

fn pause(asked: u32) -> Duration {
    Duration::from_millis(10) * asked * asked
}

fn reused() -> Refusal {
    Refusal::new(
        Reason::KeyReused,
        "this key was first used for a different request; a new operation needs a fresh key",
    )
}

fn not_comparable() -> Refusal {
    Refusal::new(
        Reason::StoreUnavailable,
        "nothing was executed, because this key was recorded by a version that this one cannot compare with; \
         try again with the same key",
    )
    .retry_after(SOON)
}

fn in_progress(after: Duration) -> Refusal {
    Refusal::new(Reason::InProgress, "the first request with this key has not ended yet; try again with the same key")
        .retry_after(after)
}

fn outcome_unknown() -> Refusal {
    Refusal::new(
        Reason::OutcomeUnknown,
        "an earlier request with this key was started and its end was never seen; \
         it is not run again until somebody has looked what became of it",
    )
}

fn rolled_back() -> Refusal {
    Refusal::new(
        Reason::StoreUnavailable,
        "the operation was rolled back together with the record of its answer, so nothing was executed; \
         try again with the same key",
    )
    .retry_after(SOON)
}

fn not_known_yet() -> Refusal {
    Refusal::new(
        Reason::StoreUnavailable,
        "whether the operation was committed could not be asked; a retry with the same key gets its answer, \
         or runs it if it was not",
    )
    .retry_after(SOON)
}

fn quota_exceeded(after: Duration) -> Refusal {
    let detail = "nothing was executed, because this caller has begun or stored as much as they may for now; \
                  retries of earlier ones are still answered";
    Refusal::new(Reason::QuotaExceeded, detail).retry_after(after)
}

pub(crate) fn store_unavailable() -> Refusal {
    Refusal::new(
        Reason::StoreUnavailable,
        "nothing was executed, because the request could not be remembered; try again with the same key",
    )
    .retry_after(SOON)
}
