//! gRPC: unary calls through the same layer, engine and stores as HTTP requests.
//!
//! ```no_run
//! use std::sync::Arc;
//! use ibid::{Ibid, Policy, grpc::UnaryMethods, store::Memory};
//!
//! let ibid = Ibid::new(Arc::new(Memory::default()));
//! let layer = ibid.grpc_layer(UnaryMethods::methods(["shop.Orders/Create"]), Policy::platform())?;
//! // tonic::transport::Server::builder().layer(layer).add_service(orders)…
//! # let _ = layer;
//! # Ok::<(), ibid::InvalidPolicy>(())
//! ```
//!
//! A call takes the same path as a request. A [`Route`] of [`Protocol::Grpc`] differs only in these points:
//!
//! | | HTTP | gRPC |
//! |---|---|---|
//! | covered | methods | [unary methods](UnaryMethods) |
//! | body | canonical by its type | one message, compared after decompression (`framing`) |
//! | outcome | HTTP status | `grpc-status` ([`GrpcStatusCode`]) |
//! | refusals | problem documents | trailers-only responses (`refusal`) |
//! | wait of a duplicate | `wait_timeout` | `wait_timeout`, at most its own `grpc-timeout` (`timeout`) |
//!
//! Invariant: a call that is not known to be unary is never buffered. Waiting for the end of a bidirectional call
//! before forwarding its beginning would deadlock.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode, Version, header, request::Parts};
use tokio::time::Instant;

pub use self::{
    code::{CallOutcome, GrpcStatusCode},
    methods::{DescriptorError, MethodNameError, UnaryMethods},
    reflection::{ReflectionError, fetch_descriptors},
};
use crate::{
    engine::StoredAs,
    fingerprint::{FingerprintInput, PartDigests},
    http::{Ibid, IbidLayer, RequestContext, Route, RouteMatch, Routing, WholeBody, carries_key, match_uncovered},
    key::KeySource,
    policy::{InvalidPolicy, InvalidSetting, Policy, require},
    protocol::{AppReply, Protocol, ProtocolRules, ReplyMeaning},
    record::{Record, RecordBody},
    refusal::Refusal,
    store::Fingerprint,
};

mod code;
mod framing;
mod messages;
mod methods;
mod reflection;
mod refusal;
mod timeout;
mod unary_response;

/// The headers in which clients send keys, in order of precedence.
const GRPC_KEY_HEADERS: [&str; 2] = ["idempotency-key", "x-idempotency-key"];

/// Whether a message is gRPC by its Content-Type. gRPC-Web is not, because its trailers are in the body.
pub fn is_grpc(headers: &HeaderMap) -> bool {
    const TYPE: &[u8] = b"application/grpc";
    let Some(content_type) = headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes) else { return false };
    let (essence, rest) = content_type.split_at(content_type.len().min(TYPE.len()));
    essence.eq_ignore_ascii_case(TYPE) && matches!(rest.first(), None | Some(b'+' | b';' | b' '))
}

/// Whether a request is a gRPC call: HTTP/2 with a gRPC Content-Type.
pub fn is_call(version: Version, headers: &HeaderMap) -> bool {
    version == Version::HTTP_2 && is_grpc(headers)
}

impl Policy {
    /// Adapts the policy to gRPC calls, which are POST requests. If the key comes from `idempotency-key` or
    /// `x-idempotency-key`, both headers are accepted.
    pub fn for_grpc(mut self) -> Self {
        self.methods = vec![Method::POST];
        if let [KeySource::Header(name)] = &self.key.from[..]
            && let Some(at) = GRPC_KEY_HEADERS.iter().position(|usual| name == usual)
        {
            let other = http::HeaderName::from_static(GRPC_KEY_HEADERS[1 - at]);
            self.key.from.push(KeySource::Header(other));
        }
        self
    }

    /// Runs [`check`](Self::check), and checks that all settings are meaningful for gRPC calls.
    ///
    /// # Errors
    /// Names the first invalid setting, the expected range and the actual value.
    pub fn check_grpc(&self) -> Result<(), InvalidSetting> {
        self.check()?;
        for source in &self.key.from {
            let message = format!("has \"{source}\", which a gRPC call does not have; use \"header:NAME\"");
            require(!matches!(source, KeySource::Json(_) | KeySource::Query(_)), "key.from", message)?;
        }
        if let Some(probe) = &self.resolve {
            let message = format!("is \"{probe}\", an HTTP request; a gRPC route cannot ask by one, leave it out");
            return Err(InvalidSetting::new("resolve", message));
        }
        let message = "is set; it reads fields of JSON and form bodies, which a gRPC call does not have; leave it out";
        require(self.guard.is_none(), "guard", message)?;
        for (setting, headers) in [("first_headers", &self.first_headers), ("replay_headers", &self.replay_headers)] {
            for (name, _) in headers {
                let message = format!(
                    "has \"{name}\", which is no gRPC metadata; allowed are names of a to z, 0 to 9, \"_\" \"-\" \".\" \
                     that neither start with \"grpc-\" nor end with \"-bin\""
                );
                require(is_metadata(name.as_str()), setting, message)?;
            }
        }
        Ok(())
    }
}

fn is_metadata(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'_' | b'-' | b'.');
    name.bytes().all(plain)
        && !name.starts_with("grpc-")
        && !name.ends_with("-bin")
        && !matches!(name, "content-type" | "te" | "user-agent")
}

pub(crate) struct UnaryRouting {
    methods: UnaryMethods,
    grpc_route: Arc<Route>,
    /// For requests to these methods that are not gRPC: Connect, JSON.
    http_route: Arc<Route>,
}

impl UnaryRouting {
    pub(crate) fn new(unary: UnaryMethods, name: String, policy: Policy) -> Result<Self, InvalidPolicy> {
        let route = Route { name, policy: policy.for_grpc().checked_for_grpc()?, protocol: Protocol::Grpc };
        let for_http = Route { protocol: Protocol::Http, ..route.clone() };
        Ok(Self { methods: unary, grpc_route: Arc::new(route), http_route: Arc::new(for_http) })
    }
}

impl Routing for UnaryRouting {
    fn route(&self, request: &Parts) -> RouteMatch {
        let policy = &self.grpc_route.policy;
        if !policy.covers(&request.method) || !self.methods.contains(request.uri.path()) {
            return match_uncovered(&request.method, carries_key(policy, &request.uri, &request.headers));
        }
        let route = if is_grpc(&request.headers) { &self.grpc_route } else { &self.http_route };
        RouteMatch::covered(route.clone())
    }

    fn key_headers(&self, _: &Method, _: &Parts) -> Option<Vec<http::HeaderName>> {
        None
    }
}

impl Ibid {
    /// Creates a layer with one policy for the unary methods of a gRPC server. Other paths pass through unchanged. A
    /// request to a covered method without a gRPC media type is covered as an HTTP request. Use it with tonic's
    /// `Server::builder().layer(…)`, or around its `Routes`.
    ///
    /// # Errors
    /// As [`layer`](Self::layer), and if a setting has no meaning for gRPC calls.
    pub fn grpc_layer(&self, methods: UnaryMethods, policy: Policy) -> Result<IbidLayer, InvalidPolicy> {
        Ok(self.layer_with_routing(Arc::new(UnaryRouting::new(methods, String::new(), policy)?)))
    }
}

pub(crate) struct GrpcRules;

impl ProtocolRules for GrpcRules {
    fn is_plain_http(&self) -> bool {
        false
    }

    fn fingerprint(
        &self, version: u8, policy: &Policy, input: &FingerprintInput<'_>,
    ) -> Result<Option<(Fingerprint, PartDigests)>, Refusal> {
        framing::fingerprint(version, policy, input)
    }

    fn write_endpoint(&self, request: &Parts, out: &mut String) {
        out.push_str("grpc ");
        out.push_str(request.uri.path().trim_start_matches('/'));
    }

    fn deadline(&self, headers: &HeaderMap) -> Option<Instant> {
        timeout::deadline(headers)
    }

    /// Asks for a coding that every client reads, and sets the route's timeout. A server that stopped at this client's
    /// deadline would drop an answer that a retry could use.
    fn prepare_request(&self, headers: &mut HeaderMap, policy: &Policy) {
        headers.insert("grpc-accept-encoding", HeaderValue::from_static("identity"));
        let limit = policy.timeout.saturating_add(policy.late_answer_or_lease());
        headers.insert("grpc-timeout", timeout::format_timeout(limit));
    }

    fn judge(&self, policy: &Policy, reply: AppReply<'_>) -> ReplyMeaning {
        let has_body = reply.body != RecordBody::Whole(Bytes::new());
        let Some(code) = unary_response::status_of(reply.headers, reply.trailers, has_body) else {
            return ReplyMeaning::Incomplete("the app's answer ended without a gRPC status");
        };
        match CallOutcome::of(policy, code) {
            CallOutcome::Remembered => ReplyMeaning::Remember(unary_response::completed_answer(policy, reply, code)),
            CallOutcome::Released => ReplyMeaning::Release,
            CallOutcome::OutcomeUnknown => ReplyMeaning::Unknown,
        }
    }

    fn status(&self, _: StatusCode, headers: &HeaderMap, trailers: Option<&HeaderMap>) -> u16 {
        unary_response::status_of(headers, trailers, false).unwrap_or(GrpcStatusCode::Unknown).summary_status()
    }

    fn refuse(&self, refusal: &Refusal, context: &RequestContext) -> Response<WholeBody> {
        refusal::refuse(refusal, context.policy(), context.key.as_str())
    }

    fn fail(&self, status: StatusCode, detail: &str, _: &RequestContext) -> Response<WholeBody> {
        refusal::fail(status, detail)
    }

    fn replay(&self, record: Record, stored: StoredAs, context: &RequestContext) -> Response<WholeBody> {
        unary_response::replay(record, stored, context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grpc_is_told_by_its_type() {
        let is = |value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(value));
            is_grpc(&headers)
        };
        for yes in ["application/grpc", "application/grpc+proto", "Application/gRPC;x=1", "application/grpc+json"] {
            assert!(is(yes), "{yes}");
        }
        for no in ["application/grpc-web", "application/grpc-web+proto", "application/grp", "application/json", ""] {
            assert!(!is(no), "{no}");
        }
        assert!(!is_grpc(&HeaderMap::new()));
    }

    #[test]
    fn a_usual_key_may_come_under_either_name_and_an_own_one_may_not() {
        let from = |policy: Policy| policy.for_grpc().key.from.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(from(Policy::platform()), ["header:idempotency-key", "header:x-idempotency-key"]);
        assert_eq!(from(Policy::leads()), ["header:x-idempotency-key", "header:idempotency-key"]);
        let mut own = Policy::platform();
        own.key.from = vec!["header:x-order".parse().unwrap()];
        assert_eq!(from(own), ["header:x-order"]);
    }

    #[test]
    fn dials_that_make_no_sense_are_named() {
        for preset in crate::presets::PRESET_NAMES {
            assert_eq!(Policy::preset(preset).unwrap().for_grpc().check_grpc(), Ok(()), "{preset}");
        }
        let told = |turn: &dyn Fn(&mut Policy)| {
            let mut policy = Policy::ietf();
            turn(&mut policy);
            policy.check_grpc().unwrap_err().to_string()
        };
        let key = told(&|policy| policy.key.from = vec!["json:/id".parse().unwrap()]);
        assert!(key.starts_with("key.from has \"json:/id\""), "{key}");
        let probe = told(&|policy| policy.resolve = Some("GET /a".parse().unwrap()));
        assert!(probe.starts_with("resolve is \"GET /a\""), "{probe}");
        for name in ["grpc-replayed", "replayed-bin", "te", "x-a!"] {
            let header = told(&|policy| policy.replay_headers = vec![(name.parse().unwrap(), "1".parse().unwrap())]);
            assert!(header.starts_with(&format!("replay_headers has \"{name}\"")), "{header}");
        }
    }
}
