//! HTTP as a protocol: what a response means, and how the layer answers.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, Response, StatusCode, header, request::Parts};
use sha2::{Digest, Sha256};
use tokio::time::Instant;

use super::{body::WholeBody, client_response, context::RequestContext};
use crate::{
    engine::{CompletedAnswer, StoredAs},
    fingerprint::{FingerprintInput, PartDigests},
    key::is_uuid,
    policy::Policy,
    protocol::{AppReply, ProtocolRules, ReplyMeaning},
    record::{Record, RecordBody},
    refusal::Refusal,
    store::{Fingerprint, RecordSummary},
    time::now_ms,
};

pub(crate) struct HttpRules;

impl ProtocolRules for HttpRules {
    fn is_plain_http(&self) -> bool {
        true
    }

    fn fingerprint(
        &self, version: u8, policy: &Policy, input: &FingerprintInput<'_>,
    ) -> Result<Option<(Fingerprint, PartDigests)>, Refusal> {
        Ok(input.fingerprint(version, policy))
    }

    fn endpoint(&self, request: &Parts) -> String {
        let (method, path) = (request.method.as_str(), request.uri.path());
        let mut endpoint = String::with_capacity(method.len() + 1 + path.len());
        endpoint.push_str(method);
        endpoint.push(' ');
        push_path_pattern(&mut endpoint, path);
        endpoint
    }

    fn judge(&self, policy: &Policy, reply: AppReply<'_>) -> ReplyMeaning {
        match reply.status {
            status if is_remembered(policy, status) => ReplyMeaning::Remember(completed_answer(policy, reply)),
            status if policy.unknown_status.contains(&status) => ReplyMeaning::Unknown,
            _ => ReplyMeaning::Release,
        }
    }

    fn status(&self, status: StatusCode, _: &HeaderMap, _: Option<&HeaderMap>) -> u16 {
        status.as_u16()
    }

    fn refuse(&self, refusal: &Refusal, context: &RequestContext) -> Response<WholeBody> {
        client_response::refuse(refusal, context)
    }

    fn fail(&self, status: StatusCode, detail: &str, context: &RequestContext) -> Response<WholeBody> {
        client_response::fail(status, detail, context)
    }

    fn replay(&self, record: Record, stored: StoredAs, context: &RequestContext) -> Response<WholeBody> {
        client_response::replay(record, stored, context)
    }
}

/// Builds what is remembered of a response.
pub(super) fn completed_answer(policy: &Policy, reply: AppReply<'_>) -> CompletedAnswer {
    let body = if policy.remember_body { reply.body } else { RecordBody::None };
    let headers = stored_headers(policy, reply.headers, body == RecordBody::None);
    let trailers = if policy.remember_body { reply.trailers.cloned().unwrap_or_default() } else { HeaderMap::new() };
    let AppReply { status, cookies, requested_at_ms, started, .. } = reply;
    let failed = status.is_client_error() || status.is_server_error();
    let record = Record { status, requested_at_ms, completed_at_ms: now_ms(), headers, body, trailers, cookies };
    CompletedAnswer::new(&record, status.as_u16(), failed, started)
}

impl CompletedAnswer {
    pub(crate) fn new(record: &Record, status: u16, failed: bool, started: Instant) -> Self {
        let Record { requested_at_ms, completed_at_ms, .. } = *record;
        let summary = RecordSummary { status, requested_at_ms, completed_at_ms, took: started.elapsed() };
        Self { failed, record: record.encode(), summary }
    }

    /// An answer without a status: its record is a copy of these bytes.
    pub(crate) fn of_bytes(bytes: &[u8], failed: bool, requested_at_ms: u64, started: Instant) -> Self {
        let (completed_at_ms, took) = (now_ms(), started.elapsed());
        let summary = RecordSummary { status: 0, requested_at_ms, completed_at_ms, took };
        Self { failed, record: Bytes::copy_from_slice(bytes), summary }
    }
}

/// Builds what is remembered of a complete response, as the layer would. `started` is when its handler started.
pub fn completed_answer_of(
    policy: &Policy, response: &Response<Bytes>, requested_at_ms: u64, started: Instant,
) -> CompletedAnswer {
    let body = response.body();
    let body = if body.len() as u64 > policy.max_response {
        RecordBody::Digest { length: body.len() as u64, sha256: Sha256::digest(body).into() }
    } else {
        RecordBody::Whole(body.clone())
    };
    let (status, headers) = (response.status(), response.headers());
    let reply = AppReply { status, headers, body, trailers: None, cookies: Vec::new(), requested_at_ms, started };
    completed_answer(policy, reply)
}

/// Whether an answer with this status is remembered. `unknown_status` takes precedence over `remember`.
pub(super) fn is_remembered(policy: &Policy, status: StatusCode) -> bool {
    !policy.unknown_status.contains(&status) && policy.remember.matches(status)
}

/// Selects the headers to store.
pub(crate) fn stored_headers(policy: &Policy, headers: &HeaderMap, without_body: bool) -> HeaderMap {
    let lines = headers.get_all(header::CONNECTION).iter().filter_map(|line| line.to_str().ok());
    let named: Vec<_> = lines.flat_map(|line| line.split(',')).map(str::trim).collect();
    let is_forgotten = |name: &HeaderName| {
        NEVER_STORED.contains(&name.as_str())
            || client_response::is_own(name)
            || policy.drop_headers.contains(name)
            || named.iter().any(|named| named.eq_ignore_ascii_case(name.as_str()))
            || without_body && (name == header::ETAG || name.as_str().starts_with("content-"))
    };
    let mut remembered = HeaderMap::with_capacity(headers.keys_len());
    for (name, value) in headers.iter().filter(|(name, _)| !is_forgotten(name)) {
        remembered.append(name, value.clone());
    }
    remembered
}

#[rustfmt::skip]
const NEVER_STORED: [&str; 11] = [
    "set-cookie", "date", "content-length", "connection", "keep-alive", "proxy-connection", "proxy-authenticate",
    "proxy-authorization", "te", "transfer-encoding", "upgrade",
];

/// Appends a path, with `:id` in place of each segment that is a number or a UUID.
fn push_path_pattern(out: &mut String, path: &str) {
    for (at, segment) in path.split('/').enumerate() {
        if at > 0 {
            out.push('/');
        }
        let digits = !segment.is_empty() && segment.bytes().all(|byte| byte.is_ascii_digit());
        out.push_str(if digits || is_uuid(segment) { ":id" } else { segment });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_without_a_route_is_told_as_a_pattern() {
        for (path, pattern) in [
            ("/", "/"),
            ("/payments", "/payments"),
            ("/payments/42/refunds/", "/payments/:id/refunds/"),
            ("/a/550e8400-e29b-41d4-a716-446655440000", "/a/:id"),
            ("/v1/a2b", "/v1/a2b"),
        ] {
            let mut written = String::new();
            push_path_pattern(&mut written, path);
            assert_eq!(written, pattern);
        }
    }
}
