//! What differs between protocols. Everything else treats all requests alike.
//!
//! To add a protocol, implement [`ProtocolRules`] and add it to [`Protocol`].

use std::time::Duration;

use http::{HeaderMap, Response, StatusCode, Version, request::Parts};
use tokio::time::Instant;

use crate::{
    engine::{CompletedAnswer, StoredAs},
    fingerprint::{FingerprintInput, JsonPointer, PartDigests},
    grpc::{self, GrpcRules},
    http::{HttpRules, RequestContext, WholeBody},
    json_rpc::{JsonRpcRules, ResponseEventFinder},
    policy::Policy,
    record::{Record, RecordBody},
    refusal::Refusal,
    store::Fingerprint,
    time::now_ms,
};

/// The protocol of a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Protocol {
    /// HTTP requests and responses.
    #[default]
    Http,
    /// Unary gRPC calls, see [`grpc`].
    Grpc,
    /// JSON-RPC requests in the bodies of HTTP requests, see [`json_rpc`](crate::json_rpc).
    JsonRpc,
}

impl Protocol {
    /// The protocol that a request uses, by its version and its media type.
    pub fn of_request(version: Version, headers: &HeaderMap) -> Self {
        if grpc::is_call(version, headers) { Self::Grpc } else { Self::Http }
    }

    pub(crate) fn rules(self) -> &'static dyn ProtocolRules {
        match self {
            Self::Http => &HttpRules,
            Self::Grpc => &GrpcRules,
            Self::JsonRpc => &JsonRpcRules,
        }
    }
}

pub(crate) trait ProtocolRules: Send + Sync {
    /// Whether cookies, probes and [`HandlerClaim`](crate::http::HandlerClaim)s work, and a connection can be closed.
    fn is_plain_http(&self) -> bool;

    /// Reads what kind of message a request's body is.
    fn read_message(&self, _: &Policy, _body: &[u8]) -> Result<MessageKind, Refusal> {
        Ok(MessageKind::Operation { id: None })
    }

    /// Computes the fingerprint by the rules of `version`. `None` if the version is unknown.
    fn fingerprint(
        &self, version: u8, policy: &Policy, input: &FingerprintInput<'_>,
    ) -> Result<Option<(Fingerprint, PartDigests)>, Refusal>;

    /// Hashes the operation's name and the values of the fields that an intent guard names. `None` if one is missing.
    fn intent(&self, fields: &[JsonPointer], input: &FingerprintInput<'_>) -> Option<[u8; 32]> {
        input.intent(fields)
    }

    /// Appends the name of a request's endpoint, for a route whose name does not describe it.
    fn write_endpoint(&self, request: &Parts, out: &mut String);

    /// When the client stops waiting, if it says so.
    fn deadline(&self, _: &HeaderMap) -> Option<Instant> {
        None
    }

    /// Changes the request so that its response can be remembered.
    fn prepare_request(&self, _: &mut HeaderMap, _: &Policy) {}

    /// Finds the response in an event stream. `None`: the whole stream is the response.
    fn response_event_finder(&self, _: &Policy) -> Option<ResponseEventFinder> {
        None
    }

    /// Reads what a complete reply of the app means.
    fn judge(&self, policy: &Policy, reply: AppReply<'_>) -> ReplyMeaning;

    /// The status of a response, for operators.
    fn status(&self, status: StatusCode, headers: &HeaderMap, trailers: Option<&HeaderMap>) -> u16;

    /// Builds a refusal in the format of the route.
    fn refuse(&self, refusal: &Refusal, context: &RequestContext) -> Response<WholeBody>;

    /// Builds a response for an error outside of the refusal table.
    fn fail(&self, status: StatusCode, detail: &str, context: &RequestContext) -> Response<WholeBody>;

    fn replay(&self, record: Record, stored: StoredAs, context: &RequestContext) -> Response<WholeBody>;
}

/// The kind of a message in a request's body.
pub(crate) enum MessageKind {
    Operation {
        /// The id that the response must have, as JSON, if the protocol has one.
        id: Option<Box<str>>,
    },
    /// The message is no operation that the policy covers: it passes through.
    Other,
}

/// A reply of the app that has arrived completely.
pub(crate) struct AppReply<'a> {
    pub(crate) status: StatusCode,
    pub(crate) headers: &'a HeaderMap,
    pub(crate) body: RecordBody,
    pub(crate) trailers: Option<&'a HeaderMap>,
    /// Hashes of the cookies that the reply sets for an anonymous caller.
    pub(crate) cookies: Vec<[u8; 32]>,
    pub(crate) times: RunTimes,
}

/// When a request arrived, when its answer was complete, and how long the app took.
#[derive(Clone, Copy)]
pub(crate) struct RunTimes {
    pub(crate) requested_at_ms: u64,
    pub(crate) completed_at_ms: u64,
    pub(crate) took: Duration,
}

impl RunTimes {
    /// The times of a run that ends now.
    pub(crate) fn ending_now(requested_at_ms: u64, started: Instant) -> Self {
        Self { requested_at_ms, completed_at_ms: now_ms(), took: started.elapsed() }
    }
}

/// What a reply means for its operation.
pub(crate) enum ReplyMeaning {
    Remember(CompletedAnswer),
    /// The answer is not remembered, and the operation may run again.
    Release,
    /// The answer leaves the outcome open.
    Unknown,
    /// The reply lacks its end.
    Incomplete(&'static str),
}
