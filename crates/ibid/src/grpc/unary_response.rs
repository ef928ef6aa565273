//! The response of a unary call: its status, its record, and its replay if the message was not stored.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};

use super::{
    GrpcStatusCode,
    refusal::{self, MESSAGE, STATUS},
};
use crate::{
    engine::{CompletedAnswer, StoredAs},
    http::{RequestContext, WholeBody, set_replay_headers, stored_headers, whole_response},
    key::hex,
    policy::Policy,
    protocol::AppReply,
    record::{Record, RecordBody, RecordSource},
};

/// The frame of an empty message, which is valid for every message type.
const EMPTY_MESSAGE: &[u8] = &[0; 5];

/// The status of a whole response: in its trailers, or in its headers if there is no body. `None` if the status is
/// missing or ambiguous; the response is then incomplete.
pub(super) fn status_of(headers: &HeaderMap, trailers: Option<&HeaderMap>, has_body: bool) -> Option<GrpcStatusCode> {
    let ends_with = match trailers.filter(|trailers| !trailers.is_empty()) {
        Some(trailers) => trailers,
        None if has_body => return None,
        None => headers,
    };
    let mut values = ends_with.get_all(STATUS).iter();
    let (only, another) = (values.next()?, values.next());
    let digits = only.to_str().ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()))?;
    another.is_none().then_some(GrpcStatusCode::from_number(digits.parse().ok()?))
}

/// Builds what is remembered of a response. With `remember_body = false` that is its status and an empty message.
pub(super) fn completed_answer(policy: &Policy, reply: AppReply<'_>, code: GrpcStatusCode) -> CompletedAnswer {
    let of_status;
    let (body, trailers) = if policy.remember_body {
        (reply.body, reply.trailers)
    } else {
        let lines = reply.trailers.into_iter().flatten().filter(|(name, _)| [STATUS, MESSAGE].contains(name));
        of_status = lines.map(|(name, value)| (name.clone(), value.clone())).collect();
        let message: &[u8] = if code == GrpcStatusCode::Ok { EMPTY_MESSAGE } else { b"" };
        (RecordBody::Whole(Bytes::from_static(message)), Some(&of_status))
    };
    let AppReply { status, times, headers, .. } = reply;
    let is_stored = stored_headers(policy, headers, false);
    let is_kept = |name: &HeaderName| policy.remember_body || [header::CONTENT_TYPE, STATUS, MESSAGE].contains(name);
    let record = RecordSource {
        status,
        requested_at_ms: times.requested_at_ms,
        completed_at_ms: times.completed_at_ms,
        headers,
        is_stored: |name: &HeaderName| is_kept(name) && is_stored(name),
        body: &body,
        trailers,
        cookies: &[],
    };
    CompletedAnswer::new(&record, code.summary_status(), code != GrpcStatusCode::Ok, times.took)
}

/// Builds the response from a record. A failure whose message was too large to store is replayed by its trailers; an OK
/// without its message would be wrong.
pub(super) fn replay(record: Record, stored: StoredAs, context: &RequestContext) -> Response<WholeBody> {
    let Record { status, mut headers, trailers, requested_at_ms, body, .. } = record;
    let mut response = match body {
        RecordBody::Digest { length, sha256 } => match status_of(&headers, Some(&trailers), true) {
            Some(GrpcStatusCode::Ok) => refusal::body_not_kept(length, &hex(&sha256)),
            _ => {
                headers.entry(header::CONTENT_TYPE).or_insert(HeaderValue::from_static("application/grpc"));
                whole_response(StatusCode::OK, headers, "", Some(trailers))
            }
        },
        RecordBody::Whole(body) => whole_response(status, headers, body, Some(trailers)),
        RecordBody::None => whole_response(status, headers, "", Some(trailers)),
    };
    set_replay_headers(response.headers_mut(), requested_at_ms, stored, context);
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in lines {
            map.append(*name, HeaderValue::from_static(value));
        }
        map
    }

    #[test]
    fn a_status_is_in_the_trailers_or_alone_in_the_headers() {
        let (none, ok, lost) = (map(&[]), map(&[("grpc-status", "0")]), map(&[("grpc-status", "14")]));
        assert_eq!(status_of(&none, Some(&lost), true), Some(GrpcStatusCode::Unavailable));
        assert_eq!(status_of(&lost, None, false), Some(GrpcStatusCode::Unavailable));
        assert_eq!(status_of(&lost, Some(&none), false), Some(GrpcStatusCode::Unavailable));
        assert_eq!(status_of(&ok, Some(&lost), true), Some(GrpcStatusCode::Unavailable), "the end decides");
        assert_eq!(status_of(&ok, None, true), None, "the headers of a reply that was cut off say nothing");
        assert_eq!(status_of(&none, None, false), None);
        assert_eq!(status_of(&none, Some(&map(&[("x", "1")])), true), None);
        assert_eq!(status_of(&none, Some(&map(&[("grpc-status", "99")])), true), Some(GrpcStatusCode::Unknown));
        for bad in ["", "OK", "-1", "0, 0", "99999999999"] {
            assert_eq!(status_of(&none, Some(&map(&[("grpc-status", bad)])), true), None, "{bad:?}");
        }
        assert_eq!(status_of(&none, Some(&map(&[("grpc-status", "0"), ("grpc-status", "2")])), true), None);
    }
}
