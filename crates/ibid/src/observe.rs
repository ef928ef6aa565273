//! What can be watched: metrics and logs hang here.
//!
//! The engine tells an [`Observer`] how every covered request ended, how long its store took, and what happened besides.
//! It has no logger and no registry of its own.

use std::{fmt, net::IpAddr, time::Duration};

use crate::{
    fingerprint::PartDigests,
    refusal::RefusalReason,
    store::{Address, StoreError},
};

/// Is told how requests ended. Called on the request's path: it must not block, and should not allocate.
pub trait Observer: Send + Sync + 'static {
    /// One covered request was answered.
    fn answered(&self, request: &RequestReport<'_>) {
        let _ = request;
    }

    /// The store was asked, and answered or failed after this long. Every call counts, also one that is sent again.
    fn asked(&self, call: StoreCall, took: Duration) {
        let _ = (call, took);
    }

    /// Something happened that an operator may want to know.
    fn on_event(&self, notice: &EngineEvent<'_>) {
        let _ = notice;
    }
}

/// Watches nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoopObserver;

impl Observer for NoopObserver {}

/// A call of the store that is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StoreCall {
    /// See [`Store::claim`](crate::store::Store::claim).
    Claim,
    /// See [`Store::extend`](crate::store::Store::extend).
    Extend,
    /// See [`Store::settle`](crate::store::Store::settle).
    Settle,
    /// See [`Store::wait`](crate::store::Store::wait): as long as somebody else's run takes.
    Wait,
    /// See [`Store::get`](crate::store::Store::get).
    Get,
}

impl StoreCall {
    /// All of them, in the order of the variants.
    pub const ALL: [Self; 5] = [Self::Claim, Self::Extend, Self::Settle, Self::Wait, Self::Get];

    /// Its name, for labels and logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Claim => "claim",
            Self::Extend => "extend",
            Self::Settle => "settle",
            Self::Wait => "wait",
            Self::Get => "get",
        }
    }
}

/// How one covered request ended.
#[derive(Debug, Clone)]
pub struct RequestReport<'a> {
    /// The route's name, bounded in number.
    pub route: &'a str,
    /// Of the request.
    pub method: &'a str,
    /// Of the request, without its query.
    pub path: &'a str,
    /// Masked; empty if there was none.
    pub key: &'a str,
    /// Where the entry lives, if it got that far.
    pub address: Option<Address>,
    /// What it got.
    pub outcome: RequestOutcome,
    /// The status of the answer; of a gRPC call its code and 1000, as [`Code::outline`](crate::grpc::GrpcStatusCode::outline) has it.
    pub status: u16,
    /// Of the run, if it ran.
    pub attempt: Option<u32>,
    /// From the request's head to its answer.
    pub took: Duration,
    /// Of `took`, what the operation itself took.
    pub run_took: Duration,
    /// Who sent it: the client's address, past the proxies that are trusted.
    pub client_address: Option<IpAddr>,
    /// What the client calls the request (`X-Request-Id`), or a new name. The app gets the same.
    pub request_id: &'a str,
    /// As sent; may hold anything.
    pub user_agent: Option<&'a [u8]>,
    /// What tells its parts apart, if it got that far and anything of it is compared.
    pub parts: Option<PartDigests>,
}

/// What a covered request got.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RequestOutcome {
    /// Ran, and its answer was stored.
    Executed,
    /// Ran, and its answer is not remembered.
    Released,
    /// Ran, and its answer waits in the journal.
    Pending,
    /// Ran, and nobody knows how it ended.
    Unknown,
    /// Ran without protection, because the store was down.
    Degraded,
    /// Answered from the record.
    Replayed,
    /// Refused.
    Refused(RefusalReason),
    /// Had no key and passed through.
    Keyless,
    /// Shadow mode: passed through; enforced it would have been this.
    Shadow(ShadowOutcome),
}

/// What a request in shadow mode would have got.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ShadowOutcome {
    /// The stored answer.
    Replay,
    /// A refusal.
    Refusal(RefusalReason),
}

/// Something that an operator may want to know.
#[derive(Debug)]
#[non_exhaustive]
pub enum EngineEvent<'a> {
    /// A holder found its claim taken over: the operation may have run twice.
    ClaimLost(&'a Address),
    /// A holder found its entry gone and put it back: the store forgot it.
    EntryRestored(&'a Address),
    /// A store call failed.
    StoreFailed {
        /// Which call.
        call: &'static str,
        /// Why.
        error: &'a StoreError,
    },
    /// One of two stores could not be reached, and the other decided.
    Fallback {
        /// Which call.
        call: &'static str,
        /// Why the first could not.
        error: &'a StoreError,
    },
    /// A claim was granted without the store that decides: until that is back, another gateway may run it too.
    FrontOnlyClaim(&'a Address),
    /// An answer could not be recorded and went to the journal.
    Journaled(&'a Address),
    /// The journal's answer has reached the store.
    JournalDrained(&'a Address),
    /// The journal could not be written.
    JournalFailed(&'a std::io::Error),
    /// The store refused the whole answer, and recorded its digest: a replay does not have the body.
    BodyNotStored(&'a Address),
    /// Too many ends wait to be settled, or the store refuses this one for good. It was dropped; its lease will lapse.
    SettlementDropped(&'a Address),
    /// Two callers sent the same key with the same request. Told up to a second later, so that neither can see it by the time
    /// of an answer.
    SharedKey(&'a Address),
    /// A record could not be read. It is never answered from.
    RecordUnreadable(&'a Address),
    /// An operation whose client was refused after `timeout` has ended, or is waited for no longer.
    LateAnswer {
        /// Where its entry lives.
        address: &'a Address,
        /// What became of it: [`RequestOutcome::Executed`] if its answer came and was recorded.
        outcome: RequestOutcome,
    },
    /// A request carried a key, and no policy covers it: it passed through unprotected.
    UncoveredKey {
        /// Of the request.
        method: &'a str,
        /// Of the request, without its query.
        path: &'a str,
    },
}

impl RequestOutcome {
    /// Its name, for labels and logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Executed => "executed",
            Self::Released => "released",
            Self::Pending => "pending",
            Self::Unknown => "unknown",
            Self::Degraded => "degraded",
            Self::Replayed => "replayed",
            Self::Refused(reason) => reason.name(),
            Self::Keyless => "keyless",
            Self::Shadow(ShadowOutcome::Replay) => "shadow-replay",
            Self::Shadow(ShadowOutcome::Refusal(_)) => "shadow-refusal",
        }
    }
}

impl fmt::Display for EngineEvent<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let short = |address: &Address| {
            let hex = address.to_string();
            crate::mask(&hex)
        };
        match self {
            Self::ClaimLost(at) => {
                write!(f, "{}: the claim was taken over while the operation ran; it may have run twice", short(at))
            }
            Self::EntryRestored(at) => {
                write!(f, "{}: the store had forgotten a running claim; it was put back", short(at))
            }
            Self::StoreFailed { call, error } => write!(f, "{call}: {error}"),
            Self::Fallback { call, error } => write!(f, "{call}: decided by the fallback store: {error}"),
            Self::FrontOnlyClaim(at) => write!(f, "{}: claimed without the store that decides; degraded", short(at)),
            Self::Journaled(at) => write!(f, "{}: the answer could not be stored and waits in the journal", short(at)),
            Self::JournalDrained(at) => write!(f, "{}: the journal's answer has reached the store", short(at)),
            Self::JournalFailed(why) => write!(f, "the journal could not be written: {why}"),
            Self::BodyNotStored(at) => {
                write!(f, "{}: the store refused the whole answer, so only its digest is recorded", short(at))
            }
            Self::SettlementDropped(at) => {
                write!(f, "{}: the result could not be stored and is given up; its outcome will be unknown", short(at))
            }
            Self::SharedKey(at) => {
                write!(f, "{}: two callers sent the same key with the same request; each has its own answer", short(at))
            }
            Self::RecordUnreadable(at) => {
                write!(f, "{}: the record cannot be read and was not answered from", short(at))
            }
            Self::LateAnswer { address, outcome: RequestOutcome::Unknown } => {
                write!(f, "{}: no answer came during late_answer either; the outcome is unknown", short(address))
            }
            Self::LateAnswer { address, outcome } => {
                write!(f, "{}: the answer came after timeout; {}", short(address), outcome.name())
            }
            Self::UncoveredKey { method, path } => {
                write!(f, "{method} {path}: a request carried a key, but no policy covers it; it is not protected")
            }
        }
    }
}
