//! The response of a unary call: its status, its record, and its replay if the message was not stored.

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, header, response::Parts};
use tokio::time::Instant;

use super::{
    GrpcStatusCode,
    refusal::{self, MESSAGE, STATUS},
};
use crate::{
    engine::CompletedAnswer,
    http::{ResponseBody, stored_headers},
    key::hex,
    policy::Policy,
    record::{Record, RecordBody},
    store::RecordSummary,
    time::now_ms,
};

/// The frame of an empty message, which is valid for every message type.
const EMPTY_MESSAGE: &[u8] = &[0; 5];

/// The status of a whole response: in its trailers, or in its headers if there is no body. `None` if the status is
/// missing or ambiguous; the response is then incomplete.
pub(crate) fn status_of(headers: &HeaderMap, trailers: Option<&HeaderMap>, has_body: bool) -> Option<GrpcStatusCode> {
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
pub(crate) fn completed_answer(
    policy: &Policy, parts: &Parts, code: GrpcStatusCode, body: RecordBody, trailers: Option<&HeaderMap>,
    requested_at_ms: u64, started: Instant,
) -> CompletedAnswer {
    let mut headers = stored_headers(policy, &parts.headers, false);
    let mut trailers = trailers.cloned().unwrap_or_default();
    let body = if policy.remember_body { body } else { status_only(code, &mut headers, &mut trailers) };
    let completed_at_ms = now_ms();
    let (status, cookies) = (parts.status, Vec::new());
    let record = Record { status, requested_at_ms, completed_at_ms, headers, body, trailers, cookies };
    CompletedAnswer {
        failed: code != GrpcStatusCode::Ok,
        record: record.encode(),
        summary: RecordSummary { status: code.outline(), requested_at_ms, completed_at_ms, took: started.elapsed() },
    }
}

fn status_only(code: GrpcStatusCode, headers: &mut HeaderMap, trailers: &mut HeaderMap) -> RecordBody {
    let keep = |from: &HeaderMap, names: &[http::HeaderName]| {
        let found = names.iter().filter_map(|name| Some((name.clone(), from.get(name)?.clone())));
        found.collect::<HeaderMap>()
    };
    *headers = keep(headers, &[header::CONTENT_TYPE, STATUS, MESSAGE]);
    *trailers = keep(trailers, &[STATUS, MESSAGE]);
    RecordBody::Whole(if code == GrpcStatusCode::Ok { Bytes::from_static(EMPTY_MESSAGE) } else { Bytes::new() })
}

/// Replays a response whose message was too large to store. A failure is replayed by its trailers; an OK without its
/// message would be wrong.
pub(crate) fn replay_without_message<B>(
    headers: HeaderMap, trailers: HeaderMap, length: u64, sha256: &[u8; 32],
) -> Response<ResponseBody<B>> {
    if status_of(&headers, Some(&trailers), true) == Some(GrpcStatusCode::Ok) {
        return refusal::body_not_kept(length, &hex(sha256));
    }
    let mut answer = Response::new(ResponseBody::whole("", Some(trailers)));
    *answer.headers_mut() = headers;
    answer.headers_mut().entry(header::CONTENT_TYPE).or_insert(HeaderValue::from_static("application/grpc"));
    answer
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
