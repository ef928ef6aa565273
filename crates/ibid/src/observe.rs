//! Hooks for metrics and logs.
//!
//! The engine tells an [`Observer`] how each covered request ended, how long store calls took, and which notable events
//! happened. It has no logger and no metrics registry of its own.

use std::{fmt, net::IpAddr, time::Duration};

use crate::{
    fingerprint::PartDigests,
    policy::OnMatch,
    refusal::RefusalReason,
    store::{Address, StoreError},
};

/// Receives reports. Methods are called on the request's path: they must not block and should not allocate.
pub trait Observer: Send + Sync + 'static {
    /// Whether the reports are used. If not, requests and store calls are not measured for them.
    fn is_active(&self) -> bool {
        true
    }

    /// Called when a covered request was answered.
    fn on_request(&self, _request: &RequestReport<'_>) {}

    /// Called after each attempt at a store call, successful or not, with its duration.
    fn on_store_call(&self, _call: StoreCall, _took: Duration) {}

    /// Called for events that operators may want to know about.
    fn on_event(&self, _event: &EngineEvent<'_>) {}
}

/// Ignores all reports.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoopObserver;

impl Observer for NoopObserver {
    fn is_active(&self) -> bool {
        false
    }
}

/// A store call that is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StoreCall {
    /// See [`Store::claim`](crate::store::Store::claim).
    Claim,
    /// See [`Store::extend`](crate::store::Store::extend).
    Extend,
    /// See [`Store::settle`](crate::store::Store::settle).
    Settle,
    /// See [`Store::wait`](crate::store::Store::wait). Takes as long as the run that it waits for.
    Wait,
    /// See [`Store::get`](crate::store::Store::get).
    Get,
}

impl StoreCall {
    /// All calls, in the order of the variants.
    pub const ALL: [Self; 5] = [Self::Claim, Self::Extend, Self::Settle, Self::Wait, Self::Get];

    /// The name for metric labels and logs.
    pub fn name(self) -> &'static str {
        ["claim", "extend", "settle", "wait", "get"][self as usize]
    }
}

/// The report about one covered request.
#[derive(Debug, Clone)]
pub struct RequestReport<'a> {
    /// The route's name. The number of names is bounded.
    pub route: &'a str,
    /// The request's method.
    pub method: &'a str,
    /// The request's path, without its query.
    pub path: &'a str,
    /// The key, masked; empty without a key.
    pub key: &'a str,
    /// The address of the entry, if it was computed.
    pub address: Option<Address>,
    /// What the request got.
    pub outcome: RequestOutcome,
    /// The HTTP status, or 1000 plus the gRPC code (see
    /// [`GrpcStatusCode::summary_status`](crate::grpc::GrpcStatusCode::summary_status)).
    pub status: u16,
    /// The number of the run, from 1, if the request ran.
    pub attempt: Option<u32>,
    /// The time from the request's head to its response.
    pub took: Duration,
    /// The part of `took` that the operation itself used.
    pub run_took: Duration,
    /// The client's address, past trusted proxies.
    pub client_address: Option<IpAddr>,
    /// The client's `X-Request-Id`, or a new id. The app gets the same.
    pub request_id: &'a str,
    /// The User-Agent header as sent, with arbitrary bytes.
    pub user_agent: Option<&'a [u8]>,
    /// Digests of the request's parts, if the fingerprint was computed.
    pub parts: Option<PartDigests>,
}

/// What a covered request got. The names are metric labels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RequestOutcome {
    /// The operation ran, and its answer was stored.
    Executed,
    /// The operation ran, and its answer is not remembered.
    Released,
    /// The operation ran, and its answer is in the journal.
    Pending,
    /// The operation ran, and its outcome is unknown.
    Unknown,
    /// The operation ran without protection, because the store was down.
    Degraded,
    /// The recorded answer was replayed.
    Replayed,
    /// The request was refused.
    Refused(RefusalReason),
    /// The request had no key and passed through.
    Keyless,
    /// The request passed through in shadow mode; enforcement would have done this.
    Shadow(ShadowOutcome),
}

/// What enforcement would have returned in shadow mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ShadowOutcome {
    /// The stored answer.
    Replay,
    /// The refusal with this reason.
    Refusal(RefusalReason),
}

/// An event that operators may want to know about.
#[derive(Debug)]
#[non_exhaustive]
pub enum EngineEvent<'a> {
    /// A holder found its claim taken over: the operation may have run twice.
    ClaimLost(&'a Address),
    /// A holder found its entry missing and restored it: the store had lost it.
    EntryRestored(&'a Address),
    /// A store call with this name failed.
    StoreFailed(&'static str, &'a StoreError),
    /// One of two stores was unreachable in a call with this name, and the other one decided.
    Fallback(&'static str, &'a StoreError),
    /// The front store granted a claim without the authority. Until the authority is back, another gateway may run the
    /// same operation.
    FrontOnlyClaim(&'a Address),
    /// An answer could not be recorded and was written to the journal.
    Journaled(&'a Address),
    /// A journaled answer has reached the store.
    JournalDrained(&'a Address),
    /// Writing the journal failed.
    JournalFailed(&'a std::io::Error),
    /// The store rejected the whole answer and recorded a digest instead: a replay has no body.
    BodyNotStored(&'a Address),
    /// A settlement was dropped, because the queue is full or the store keeps rejecting it. Its lease will expire.
    SettlementDropped(&'a Address),
    /// Two callers sent the same key with the same request. Reported up to a second later, so that neither caller can
    /// detect it by response time.
    SharedKey(&'a Address),
    /// A record could not be read. It is never used for an answer.
    RecordUnreadable(&'a Address),
    /// The app was asked whether an operation with an unknown outcome took place.
    Probed {
        /// The address of the entry.
        address: &'a Address,
        /// What the app said; `None` if it does not know.
        happened: Option<bool>,
    },
    /// An operation whose client was refused after `timeout` has ended, or the wait for it has.
    LateAnswer {
        /// The address of the entry.
        address: &'a Address,
        /// The outcome: [`RequestOutcome::Executed`] if the answer arrived and was recorded.
        outcome: RequestOutcome,
    },
    /// A key began an operation that another key of the same caller has begun, as an intent guard found.
    DuplicateIntent {
        /// The address of the second key.
        address: &'a Address,
        /// The address of the first key.
        first: &'a Address,
        /// What the second key gets.
        on_match: OnMatch,
    },
    /// A request with a key passed through unprotected, because no policy covers it.
    UncoveredKey {
        /// The request's method.
        method: &'a str,
        /// The request's path, without its query.
        path: &'a str,
    },
}

impl RequestOutcome {
    /// The name for metric labels and logs.
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
        let (address, what) = match self {
            Self::ClaimLost(at) => (at, "the claim was taken over while the operation ran; it may have run twice"),
            Self::EntryRestored(at) => (at, "the store had forgotten a running claim; it was put back"),
            Self::FrontOnlyClaim(at) => (at, "claimed without the store that decides; degraded"),
            Self::Journaled(at) => (at, "the answer could not be stored and waits in the journal"),
            Self::JournalDrained(at) => (at, "the journal's answer has reached the store"),
            Self::BodyNotStored(at) => (at, "the store refused the whole answer, so only its digest is recorded"),
            Self::SettlementDropped(at) => {
                (at, "the result could not be stored and is given up; its outcome will be unknown")
            }
            Self::SharedKey(at) => (at, "two callers sent the same key with the same request; each has its own answer"),
            Self::Probed { address, happened } => {
                let what = match happened {
                    Some(true) => "asked about an unknown outcome, the app said that it happened",
                    Some(false) => "asked about an unknown outcome, the app said that it did not happen",
                    None => "asked about an unknown outcome, the app did not know",
                };
                (address, what)
            }
            Self::RecordUnreadable(at) => (at, "the record cannot be read and was not answered from"),
            Self::LateAnswer { address, outcome: RequestOutcome::Unknown } => {
                (address, "no answer came during late_answer either; the outcome is unknown")
            }
            Self::LateAnswer { address, outcome } => {
                let at = crate::mask(&address.to_string());
                return write!(f, "{at}: the answer came after timeout; {}", outcome.name());
            }
            Self::DuplicateIntent { address, first, on_match } => {
                let [at, first] = [address, first].map(|address| crate::mask(&address.to_string()));
                let what = match on_match {
                    OnMatch::Reject => "refused",
                    OnMatch::Hold => "held until an operator releases it",
                    OnMatch::Count => "run all the same",
                };
                return write!(f, "{at}: the same operation as {first}, under another key; {what}");
            }
            Self::StoreFailed(call, error) => return write!(f, "{call}: {error}"),
            Self::Fallback(call, error) => return write!(f, "{call}: decided by the fallback store: {error}"),
            Self::JournalFailed(why) => return write!(f, "the journal could not be written: {why}"),
            Self::UncoveredKey { method, path } => {
                let what = "a request carried a key, but no policy covers it; it is not protected";
                return write!(f, "{method} {path}: {what}");
            }
        };
        write!(f, "{}: {what}", crate::mask(&address.to_string()))
    }
}
