//! HTTP as a protocol: what a response means, and how the layer answers.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header, request::Parts};
use sha2::{Digest, Sha256};
use tokio::time::Instant;

use super::{
    body::{ResponseBody, WholeBody},
    context::RequestContext,
    cors, header_value, key_headers,
    refusal_style::RefusalInfo,
    request_id::REQUEST_ID,
};
use crate::{
    engine::{CompletedAnswer, StoredAs},
    fingerprint::{BodyFormat, FingerprintInput, PartDigests, json},
    key::{hex, is_uuid},
    policy::{HeaderTemplate, Policy, ResponseEnvelope},
    protocol::{AppReply, ProtocolRules, ReplyMeaning, RunTimes},
    record::{Record, RecordBody, RecordSource},
    refusal::{Refusal, RefusalReason},
    sent_names::SentNames,
    store::{Fingerprint, RecordSummary, Settlement},
    time::{now_ms, rfc3339},
};

const STORED_HEADER: HeaderName = HeaderName::from_static("idempotency-stored");
const GUARANTEE_HEADER: HeaderName = HeaderName::from_static("idempotency-guarantee");
const BODY_HEADER: HeaderName = HeaderName::from_static("idempotency-body");

/// Response headers that only the layer may set.
static OWN_HEADERS: [HeaderName; 3] = [STORED_HEADER, GUARANTEE_HEADER, BODY_HEADER];

/// Headers that describe the exact body bytes. They are removed when the layer changes the body.
static BODY_DIGEST_HEADERS: [HeaderName; 5] = [
    header::ETAG,
    HeaderName::from_static("digest"),
    HeaderName::from_static("content-digest"),
    HeaderName::from_static("repr-digest"),
    HeaderName::from_static("content-md5"),
];

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

    fn write_endpoint(&self, request: &Parts, out: &mut String) {
        out.push_str(request.method.as_str());
        out.push(' ');
        push_path_pattern(out, request.uri.path());
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
        let (policy, masked) = (context.policy(), context.key.as_str());
        let reason = refusal.reason;
        let status = if context.message_id.is_some() { StatusCode::OK } else { policy.status_of(reason) };
        let info = RefusalInfo::refusal(refusal, status, masked, context.message_id.as_deref());
        let mut body = policy.refusals.write_members(&info);
        if policy.envelope == ResponseEnvelope::Metadata {
            let (code, detail) = (reason.name().replace('-', "_").to_uppercase(), json_string(&refusal.detail));
            let error = match policy.refusals.has_error() {
                true => String::new(),
                false => format!("\"error\":{{\"code\":\"{code}\",\"message\":{detail}}},"),
            };
            let time = rfc3339(context.requested_at_ms);
            let id = json_string(context.request_id());
            body.push_str(&format!(
                ",\"success\":false,{error}\"metadata\":{{\"timestamp\":\"{time}\",\"requestId\":{id}}}"
            ));
        }
        body.push('}');
        let mut answer = error_response(&info, body, context);
        let headers = answer.headers_mut();
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if policy.envelope == ResponseEnvelope::Metadata {
            headers.insert(REQUEST_ID, context.request_id.clone());
        }
        if let Some(after) = refusal.retry_after {
            let seconds = after.as_millis().div_ceil(1000).max(1);
            headers.insert(header::RETRY_AFTER, seconds.to_string().parse().expect("digits"));
        }
        if reason == RefusalReason::IdentityInvalid && policy.claims().next().is_some() {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer error=\"invalid_token\""));
        }
        if reason.links_to_contract() {
            let link = "</.well-known/idempotency>; rel=\"describedby\"; type=\"text/html\"";
            headers.insert(header::LINK, HeaderValue::from_static(link));
        }
        answer
    }

    fn fail(&self, status: StatusCode, detail: &str, context: &RequestContext) -> Response<WholeBody> {
        let info = RefusalInfo::plain(status, detail);
        error_response(&info, context.policy().refusals.write_members(&info) + "}", context)
    }

    fn replay(&self, record: Record, stored: StoredAs, context: &RequestContext) -> Response<WholeBody> {
        let policy = context.policy();
        let (mut headers, mut status) = (record.headers, record.status);
        let mut body = match record.body {
            RecordBody::Whole(body) => body,
            RecordBody::Digest { length, sha256 } => {
                remove_body_digests(&mut headers);
                headers.remove(header::CONTENT_ENCODING);
                headers.remove(header::CONTENT_RANGE);
                headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
                headers.insert(BODY_HEADER, HeaderValue::from_static("digest"));
                status = policy.digest_status.unwrap_or(status);
                let hex = hex(&sha256);
                format!("{{\"length\":{length},\"sha256\":\"{hex}\"}}").into()
            }
            RecordBody::None => Bytes::new(),
        };
        set_replay_headers(&mut headers, record.requested_at_ms, stored, context);
        context.echo_headers(&mut headers);
        policy.refusals.write_replay_headers(status, &mut headers);
        if policy.envelope == ResponseEnvelope::Metadata
            && let Some(spliced) = with_metadata(&headers, &body, true, context, Some(record.requested_at_ms))
        {
            remove_body_digests(&mut headers);
            body = spliced;
        }
        if record.trailers.is_empty() && !matches!(status.as_u16(), 100..=199 | 204 | 304) {
            headers.insert(header::CONTENT_LENGTH, header_value::from_number(body.len() as u64));
        }
        whole_response(status, headers, body, Some(record.trailers))
    }
}

/// Removes headers that describe the exact body bytes.
pub(crate) fn remove_body_digests(headers: &mut HeaderMap) {
    BODY_DIGEST_HEADERS.iter().for_each(|name| drop(headers.remove(name)));
}

/// Builds what is remembered of a response.
pub(crate) fn completed_answer(policy: &Policy, reply: AppReply<'_>) -> CompletedAnswer {
    let body = if policy.remember_body { reply.body } else { RecordBody::None };
    let AppReply { status, times, headers, .. } = reply;
    let record = RecordSource {
        status,
        requested_at_ms: times.requested_at_ms,
        completed_at_ms: times.completed_at_ms,
        headers,
        is_stored: stored_headers(policy, headers, body == RecordBody::None),
        body: &body,
        trailers: reply.trailers.filter(|_| policy.remember_body),
        cookies: &reply.cookies,
    };
    let failed = status.is_client_error() || status.is_server_error();
    CompletedAnswer::new(&record, status.as_u16(), failed, times.took)
}

impl CompletedAnswer {
    pub(crate) fn new<F>(record: &RecordSource<'_, F>, status: u16, failed: bool, took: Duration) -> Self
    where
        F: Fn(&HeaderName) -> bool,
    {
        let RecordSource { requested_at_ms, completed_at_ms, .. } = *record;
        let summary = RecordSummary { status, requested_at_ms, completed_at_ms, took };
        Self { failed, record: record.encode(), summary }
    }

    pub(crate) fn into_settlement(self, ttl: Duration) -> Settlement {
        Settlement::Complete { failed: self.failed, record: self.record, summary: self.summary, ttl }
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
    let times = RunTimes::ending_now(requested_at_ms, started);
    let reply = AppReply { status, headers, body, trailers: None, cookies: Vec::new(), times };
    completed_answer(policy, reply)
}

/// Whether an answer with this status is remembered. `unknown_status` takes precedence over `remember`.
pub(crate) fn is_remembered(policy: &Policy, status: StatusCode) -> bool {
    !policy.unknown_status.contains(&status) && policy.remember.matches(status)
}

/// Selects the headers to store.
pub(crate) fn stored_headers(policy: &Policy, headers: &HeaderMap, without_body: bool) -> impl Fn(&HeaderName) -> bool {
    const NEVER: SentNames = SentNames::listed(&NEVER_STORED);
    // Looked for without the map's hash, because most responses have few headers and not this one.
    let has_connection = headers.keys().any(|name| *name == header::CONNECTION);
    let lines = has_connection.then(|| headers.get_all(header::CONNECTION)).into_iter().flatten();
    let lines = lines.filter_map(|line| line.to_str().ok());
    let named: Vec<_> = lines.flat_map(|line| line.split(',')).map(str::trim).collect();
    move |name| {
        let is_forgotten = NEVER.may_have(name) && NEVER_STORED.contains(&name.as_str())
            || is_own(name)
            || policy.drop_headers.contains(name)
            || named.iter().any(|named| named.eq_ignore_ascii_case(name.as_str()))
            || without_body && (name == header::ETAG || name.as_str().starts_with("content-"));
        !is_forgotten
    }
}

#[rustfmt::skip]
const NEVER_STORED: [&str; 11] = [
    "set-cookie", "date", "content-length", "connection", "keep-alive", "proxy-connection", "proxy-authenticate",
    "proxy-authorization", "te", "transfer-encoding", "upgrade",
];

/// Appends a path, with `:id` in place of each segment that is a number or a UUID.
fn push_path_pattern(out: &mut String, path: &str) {
    // Every UUID has hyphens.
    if !path.bytes().any(|byte| byte.is_ascii_digit() | (byte == b'-')) {
        return out.push_str(path);
    }
    for (at, segment) in path.split('/').enumerate() {
        if at > 0 {
            out.push('/');
        }
        let digits = !segment.is_empty() && segment.bytes().all(|byte| byte.is_ascii_digit());
        out.push_str(if digits || is_uuid(segment) { ":id" } else { segment });
    }
}

/// Adds headers that tell what a client cannot rely on.
fn set_guarantee_headers(headers: &mut HeaderMap, stored: StoredAs) {
    if matches!(stored, StoredAs::Pending | StoredAs::FrontOnly) {
        headers.insert(STORED_HEADER, HeaderValue::from_static("pending"));
    }
    if matches!(stored, StoredAs::Unprotected | StoredAs::FrontOnly) {
        headers.insert(GUARANTEE_HEADER, HeaderValue::from_static("degraded"));
    }
    if stored == StoredAs::NotRecorded {
        headers.insert(STORED_HEADER, HeaderValue::from_static("false"));
    }
}

/// Completes the app's response of a run that just ended.
pub(super) fn complete_first_response<B>(
    answer: &mut Response<ResponseBody<B>>, stored: Option<StoredAs>, context: &RequestContext,
) {
    let policy = context.policy();
    let headers = answer.headers_mut();
    remove_own_headers(headers, policy);
    set_policy_headers(headers, &policy.first_headers, context, context.requested_at_ms);
    if let Some(stored) = stored {
        set_guarantee_headers(headers, stored);
    }
    context.echo_headers(headers);
    if let Some(origin) = &context.cors_origin {
        cors::set_cors_headers(headers, origin, exposed_headers(policy));
    }
    if policy.envelope == ResponseEnvelope::Metadata
        && let Some(body) = answer.body().whole_data()
        && let Some(body) = with_metadata(answer.headers(), body, false, context, None)
    {
        let headers = answer.headers_mut();
        remove_body_digests(headers);
        headers.insert(header::CONTENT_LENGTH, body.len().into());
        *answer.body_mut() = ResponseBody::whole(body, None);
    }
}

/// Removes headers that only the layer may set from the app's response.
pub(super) fn remove_own_headers(headers: &mut HeaderMap, policy: &Policy) {
    remove_headers(headers, |name| is_own(name) || policy.replay_only_headers().any(|own| own == name));
}

/// Removes the headers with these names. Most messages have none, so it only looks at first.
pub(super) fn remove_headers(headers: &mut HeaderMap, is_removed: impl Fn(&HeaderName) -> bool) {
    while let Some(name) = headers.keys().find(|name| is_removed(name)).cloned() {
        headers.remove(name);
    }
}

/// Whether only the layer may set this response header, regardless of the policy.
pub(super) fn is_own(name: &HeaderName) -> bool {
    name.as_str().starts_with("i") && (OWN_HEADERS.contains(name) || name.as_str().starts_with("ibid-"))
}

/// Sets the policy's headers. Ids and times are only formatted if a header contains them.
fn set_policy_headers(
    headers: &mut HeaderMap, told: &[(HeaderName, HeaderTemplate)], context: &RequestContext, original_ms: u64,
) {
    for (name, value) in told {
        let value = match value.fixed() {
            Some(fixed) => fixed.clone(),
            None => value.fill(context.request_id(), &rfc3339(original_ms)),
        };
        headers.insert(name, value);
    }
}

pub(crate) fn set_replay_headers(
    headers: &mut HeaderMap, requested_at_ms: u64, stored: StoredAs, context: &RequestContext,
) {
    set_policy_headers(headers, &context.policy().replay_headers, context, requested_at_ms);
    set_guarantee_headers(headers, stored);
    if let Some(origin) = &context.cors_origin {
        headers.remove(header::ACCESS_CONTROL_EXPOSE_HEADERS);
        cors::set_cors_headers(headers, origin, exposed_headers(context.policy()));
    }
}

pub(crate) fn whole_response(
    status: StatusCode, headers: HeaderMap, data: impl Into<Bytes>, trailers: Option<HeaderMap>,
) -> Response<WholeBody> {
    let mut response = Response::new(WholeBody { data: data.into(), trailers });
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}

fn error_response(info: &RefusalInfo<'_>, body: String, context: &RequestContext) -> Response<WholeBody> {
    let mut headers = HeaderMap::new();
    context.policy().refusals.write_headers(info, &mut headers);
    context.echo_headers(&mut headers);
    if let Some(origin) = &context.cors_origin {
        cors::set_cors_headers(&mut headers, origin, exposed_headers(context.policy()));
    }
    whole_response(info.status, headers, body, None)
}

/// The response headers that scripts may read.
fn exposed_headers(policy: &Policy) -> impl Iterator<Item = HeaderName> + '_ {
    let own = [STORED_HEADER, GUARANTEE_HEADER, BODY_HEADER, header::RETRY_AFTER, header::LINK];
    let told = policy.first_headers.iter().chain(&policy.replay_headers).map(|(name, _)| name.clone());
    let echoed = policy.refusals.echoed_names(key_headers(policy));
    own.into_iter().chain(told).chain(policy.refusals.exposed_header()).chain(echoed)
}

/// Sets the member `metadata`, if the body is a JSON object.
fn with_metadata(
    headers: &HeaderMap, body: &Bytes, cached: bool, context: &RequestContext, original_ms: Option<u64>,
) -> Option<Bytes> {
    let content_type = headers.get(header::CONTENT_TYPE)?.to_str().ok()?;
    if BodyFormat::of(content_type) != BodyFormat::Json || headers.contains_key(header::CONTENT_ENCODING) {
        return None;
    }
    let (time, id) = (rfc3339(context.requested_at_ms), json_string(context.request_id()));
    let original = original_ms.map(|ms| format!(",\"originalTimestamp\":\"{}\"", rfc3339(ms))).unwrap_or_default();
    let metadata = format!("{{\"cached\":{cached}{original},\"timestamp\":\"{time}\",\"requestId\":{id}}}");
    json::splice_member(body, "metadata", metadata.as_bytes()).map(Bytes::from)
}

/// Builds `{"success":true,"data":…}`, a success under the envelope; the layer adds `metadata`.
///
/// `data` must be JSON.
pub fn success_answer(data: &str) -> String {
    format!("{{\"success\":true,\"data\":{data}}}")
}

/// Builds `{"success":false,"error":{…}}`, a failure under the envelope.
pub fn error_answer(code: &str, message: &str) -> String {
    format!("{{\"success\":false,\"error\":{{\"code\":{},\"message\":{}}}}}", json_string(code), json_string(message))
}

pub(crate) fn json_string(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for character in text.chars() {
        match character {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            control if control < ' ' => out.push_str(&format!("\\u{:04x}", control as u32)),
            other => out.push(other),
        }
    }
    out.push('"');
    out
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
