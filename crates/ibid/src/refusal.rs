//! The table of all refusals: name, HTTP status, gRPC code, JSON-RPC code and title.
//!
//! A refusal never reveals whether another caller used the key, or which part of a request differed.

use std::{fmt, time::Duration};

use http::StatusCode;

use crate::grpc::GrpcStatusCode;

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
    json_rpc: i32,
    title: &'static str,
    help: &'static str,
}

macro_rules! reasons {
    ($($reason:ident, $name:literal, $http:literal, $grpc:ident, $json_rpc:literal, $title:literal, $help:literal;)+) => {
        /// Why a request was refused. The variants are ordered by precedence.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(missing_docs)]
        pub enum RefusalReason { $($reason),+ }

        const REASONS: &[ReasonInfo] = &[$(ReasonInfo {
            reason: RefusalReason::$reason,
            name: $name,
            http: $http,
            grpc: GrpcStatusCode::$grpc,
            json_rpc: $json_rpc,
            title: $title,
            help: $help,
        }),+];
    };
}

reasons! {
    KeyMissing, "key-missing", 400, InvalidArgument, -31001, "An idempotency key is required",
        "Send a key of your own with the request, a fresh one per operation, and the same one on every retry.";
    KeyInvalid, "key-invalid", 400, InvalidArgument, -31002, "The idempotency key is not valid here",
        "The detail says which rule the key breaks. Send one key, in the form that this route asks for.";
    ScopeMissing, "scope-missing", 400, InvalidArgument, -31003, "The request does not say whose key this is",
        "Keys belong to a caller. The detail names the header, cookie or claim that says who is calling.";
    RequestAmbiguous, "request-ambiguous", 400, InvalidArgument, -31004, "The request can be read in more than one way",
        "A header is repeated or has a twin, or the path could be understood differently by the app. Send it once, plainly.";
    IdentityInvalid, "identity-invalid", 401, Unauthenticated, -31005, "The caller's identity could not be verified",
        "A token or a signature does not hold. Get a new token, or sign anew with the current secret, and send the request again with the same key.";
    ScopeRefused, "scope-refused", 403, PermissionDenied, -31006, "The caller may not name this scope",
        "A header that says whose key this is is believed only from trusted proxies, and a key that names a user is good for that user only.";
    BodyTooLarge, "body-too-large", 413, ResourceExhausted, -31007, "The body is too large to be protected",
        "Send a smaller body, or ask the operator to raise max_request for this route.";
    StoreUnavailable, "store-unavailable", 503, Unavailable, -31008, "Requests cannot be remembered at the moment",
        "Try again with the same key after the time in Retry-After.";
    Overloaded, "overloaded", 503, Unavailable, -31009, "Too many requests are running",
        "Nothing was executed. Try again with the same key after the time in Retry-After.";
    KeyReused, "key-reused", 422, InvalidArgument, -31010, "The key was used for a different request",
        "A key names one operation. Send the first request unchanged, or use a fresh key for a new operation.";
    DuplicateIntent, "duplicate-intent", 409, AlreadyExists, -31018, "The same operation was sent with another key",
        "Nothing was executed. If it is a retry, send it with the first key to get its answer. If it is a new operation, wait until the window is over, or ask the operator.";
    MethodUnknown, "method-unknown", 400, FailedPrecondition, -31011, "It is not known whether this gRPC method is unary",
        "Only unary methods can be protected, and a call that may be a stream is never buffered. Nothing was executed. Call it without a key, or ask the operator to name the method in a route or to provide descriptors.";
    InProgress, "in-progress", 409, Aborted, -31012, "A request with this key is still running",
        "Try again with the same key after the time in Retry-After: you will get the first request's answer.";
    OutcomeUnknown, "outcome-unknown", 409, FailedPrecondition, -31013, "It is not known whether the operation happened",
        "The operation was started and its end was never seen. Do not retry blindly with a fresh key: look up whether it happened, or ask the operator to resolve it.";
    QuotaExceeded, "quota-exceeded", 429, ResourceExhausted, -31014, "Too many new keys",
        "Retries of known keys are still answered. Send new operations after the time in Retry-After.";
    UpstreamUnreachable, "upstream-unreachable", 502, Unavailable, -31015, "The app could not be reached",
        "Nothing was sent to the app. Try again with the same key.";
    UpstreamLost, "upstream-lost", 502, Unknown, -31016, "The app's answer was lost",
        "The request was sent and may have been executed. A retry with the same key does not execute it a second time unless the route allows it.";
    UpstreamTimeout, "upstream-timeout", 504, DeadlineExceeded, -31017, "The app did not answer in time",
        "The request was sent and may still be executed. A retry with the same key does not execute it a second time unless the route allows it.";
}

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

    /// The code of the refusal as a JSON-RPC error.
    pub fn json_rpc_code(self) -> i32 {
        self.info().json_rpc
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
        let mut codes: Vec<i32> = REASONS.iter().map(|row| row.json_rpc).collect();
        codes.sort_unstable();
        codes.dedup();
        assert_eq!(codes.len(), REASONS.len());
        let is_reserved = |code: &i32| (-32768..=-32000).contains(code);
        assert!(!codes.iter().any(is_reserved), "{codes:?}");
    }
}
