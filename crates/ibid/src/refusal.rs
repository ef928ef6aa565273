//! The table of all refusals: name, HTTP status, gRPC code and title.
//!
//! A refusal never reveals whether another caller used the key, or which part of a request differed.

use std::{fmt, time::Duration};

use http::StatusCode;

use crate::grpc::GrpcStatusCode;

/// Why a request was refused. The variants are ordered by precedence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum RefusalReason {
    KeyMissing,
    KeyInvalid,
    ScopeMissing,
    RequestAmbiguous,
    IdentityInvalid,
    ScopeRefused,
    BodyTooLarge,
    StoreUnavailable,
    Overloaded,
    KeyReused,
    MethodUnknown,
    InProgress,
    OutcomeUnknown,
    QuotaExceeded,
    UpstreamUnreachable,
    UpstreamLost,
    UpstreamTimeout,
}

/// The refusal of one request.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct Refusal {
    /// The reason, which determines status and title.
    pub reason: RefusalReason,
    /// What happened and what to do, for people.
    pub detail: String,
    /// When to try again, for refusals that may clear up.
    pub retry_after: Option<Duration>,
}

struct ReasonInfo {
    reason: RefusalReason,
    name: &'static str,
    http: u16,
    grpc: GrpcStatusCode,
    title: &'static str,
    help: &'static str,
}

#[rustfmt::skip]
const REASONS: [ReasonInfo; 17] = [
    ReasonInfo { reason: RefusalReason::KeyMissing, name: "key-missing", http: 400, grpc: GrpcStatusCode::InvalidArgument,
          title: "An idempotency key is required",
          help: "Send a key of your own with the request, a fresh one per operation, and the same one on every retry." },
    ReasonInfo { reason: RefusalReason::KeyInvalid, name: "key-invalid", http: 400, grpc: GrpcStatusCode::InvalidArgument,
          title: "The idempotency key is not valid here",
          help: "The detail says which rule the key breaks. Send one key, in the form that this route asks for." },
    ReasonInfo { reason: RefusalReason::ScopeMissing, name: "scope-missing", http: 400, grpc: GrpcStatusCode::InvalidArgument,
          title: "The request does not say whose key this is",
          help: "Keys belong to a caller. The detail names the header, cookie or claim that says who is calling." },
    ReasonInfo { reason: RefusalReason::RequestAmbiguous, name: "request-ambiguous", http: 400, grpc: GrpcStatusCode::InvalidArgument,
          title: "The request can be read in more than one way",
          help: "A header is repeated or has a twin, or the path could be understood differently by the app. Send it once, plainly." },
    ReasonInfo { reason: RefusalReason::IdentityInvalid, name: "identity-invalid", http: 401, grpc: GrpcStatusCode::Unauthenticated,
          title: "The caller's identity could not be verified",
          help: "A token or a signature does not hold. Get a new token, or sign anew with the current secret, and send the request again with the same key." },
    ReasonInfo { reason: RefusalReason::ScopeRefused, name: "scope-refused", http: 403, grpc: GrpcStatusCode::PermissionDenied,
          title: "The caller may not name this scope",
          help: "A header that says whose key this is is believed only from trusted proxies, and a key that names a user is good for that user only." },
    ReasonInfo { reason: RefusalReason::BodyTooLarge, name: "body-too-large", http: 413, grpc: GrpcStatusCode::ResourceExhausted,
          title: "The body is too large to be protected",
          help: "Send a smaller body, or ask the operator to raise max_request for this route." },
    ReasonInfo { reason: RefusalReason::StoreUnavailable, name: "store-unavailable", http: 503, grpc: GrpcStatusCode::Unavailable,
          title: "Requests cannot be remembered at the moment",
          help: "Try again with the same key after the time in Retry-After." },
    ReasonInfo { reason: RefusalReason::Overloaded, name: "overloaded", http: 503, grpc: GrpcStatusCode::Unavailable,
          title: "Too many requests are running",
          help: "Nothing was executed. Try again with the same key after the time in Retry-After." },
    ReasonInfo { reason: RefusalReason::KeyReused, name: "key-reused", http: 422, grpc: GrpcStatusCode::InvalidArgument,
          title: "The key was used for a different request",
          help: "A key names one operation. Send the first request unchanged, or use a fresh key for a new operation." },
    ReasonInfo { reason: RefusalReason::MethodUnknown, name: "method-unknown", http: 400, grpc: GrpcStatusCode::FailedPrecondition,
          title: "It is not known whether this gRPC method is unary",
          help: "Only unary methods can be protected, and a call that may be a stream is never buffered. Nothing was executed. Call it without a key, or ask the operator to name the method in a route or to provide descriptors." },
    ReasonInfo { reason: RefusalReason::InProgress, name: "in-progress", http: 409, grpc: GrpcStatusCode::Aborted,
          title: "A request with this key is still running",
          help: "Try again with the same key after the time in Retry-After: you will get the first request's answer." },
    ReasonInfo { reason: RefusalReason::OutcomeUnknown, name: "outcome-unknown", http: 409, grpc: GrpcStatusCode::FailedPrecondition,
          title: "It is not known whether the operation happened",
          help: "The operation was started and its end was never seen. Do not retry blindly with a fresh key: look up whether it happened, or ask the operator to resolve it." },
    ReasonInfo { reason: RefusalReason::QuotaExceeded, name: "quota-exceeded", http: 429, grpc: GrpcStatusCode::ResourceExhausted,
          title: "Too many new keys",
          help: "Retries of known keys are still answered. Send new operations after the time in Retry-After." },
    ReasonInfo { reason: RefusalReason::UpstreamUnreachable, name: "upstream-unreachable", http: 502, grpc: GrpcStatusCode::Unavailable,
          title: "The app could not be reached",
          help: "Nothing was sent to the app. Try again with the same key." },
    ReasonInfo { reason: RefusalReason::UpstreamLost, name: "upstream-lost", http: 502, grpc: GrpcStatusCode::Unknown,
          title: "The app's answer was lost",
          help: "The request was sent and may have been executed. A retry with the same key does not execute it a second time unless the route allows it." },
    ReasonInfo { reason: RefusalReason::UpstreamTimeout, name: "upstream-timeout", http: 504, grpc: GrpcStatusCode::DeadlineExceeded,
          title: "The app did not answer in time",
          help: "The request was sent and may still be executed. A retry with the same key does not execute it a second time unless the route allows it." },
];

impl RefusalReason {
    /// The number of reasons.
    pub const COUNT: usize = REASONS.len();

    /// All reasons, ordered by precedence.
    pub fn all() -> impl Iterator<Item = Self> {
        REASONS.iter().map(|row| row.reason)
    }

    /// Returns the reason with this name, such as `in-progress` (or `in_progress`, as in settings).
    pub fn from_name(name: &str) -> Option<Self> {
        let name = name.replace('_', "-");
        REASONS.iter().find(|row| row.name == name).map(|row| row.reason)
    }

    /// The name, which is the last segment of the problem's `type`.
    pub fn name(self) -> &'static str {
        self.info().name
    }

    /// The default HTTP status; a policy may set another.
    pub fn status(self) -> StatusCode {
        StatusCode::from_u16(self.info().http).expect("the table holds valid codes")
    }

    /// The default gRPC code; a policy may set another.
    pub fn grpc_status(self) -> u8 {
        self.info().grpc.number()
    }

    /// The title of the refusal, a sentence for people.
    pub fn title(self) -> &'static str {
        self.info().title
    }

    /// What the client should do.
    pub fn help(self) -> &'static str {
        self.info().help
    }

    /// Whether the refusal links to the route's contract.
    pub fn links_to_contract(self) -> bool {
        matches!(self, Self::KeyMissing | Self::KeyInvalid | Self::ScopeMissing | Self::RequestAmbiguous)
    }

    fn info(self) -> &'static ReasonInfo {
        &REASONS[self as usize]
    }
}

impl Refusal {
    /// Creates a refusal; `detail` says what happened and what to do.
    pub fn new(reason: RefusalReason, detail: impl Into<String>) -> Self {
        Self { reason, detail: detail.into(), retry_after: None }
    }

    /// Sets when to try again.
    pub fn retry_after(self, after: Duration) -> Self {
        Self { retry_after: Some(after), ..self }
    }
}

impl fmt::Display for RefusalReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.reason, self.detail)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_variants() {
        for (at, row) in REASONS.iter().enumerate() {
            assert_eq!(row.reason as usize, at, "{}", row.name);
            assert_eq!(RefusalReason::from_name(&row.name.replace('-', "_")), Some(row.reason));
        }
        assert!(REASONS.is_sorted_by_key(|row| row.reason));
    }
}
