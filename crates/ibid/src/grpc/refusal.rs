//! Refusals as gRPC responses: always trailers-only, so that stock clients can retry on them.
//!
//! `grpc-status` and `grpc-message` are for all clients. `grpc-status-details-bin` contains the error model of
//! `google.rpc` for programs: an `ErrorInfo` with the refusal's name, a `RetryInfo` if a retry makes sense, and a
//! `BadRequest` if the key is invalid.

use std::time::Duration;

use data_encoding::BASE64_NOPAD;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use prost::Message;
use prost_types::Any;

use super::{
    GrpcStatusCode,
    messages::{BadRequest, ErrorInfo, FieldViolation, RetryInfo, RpcStatus},
};
use crate::{
    http::{WholeBody, key_headers, whole_response},
    policy::Policy,
    refusal::{Refusal, RefusalReason},
};

pub(super) const STATUS: HeaderName = HeaderName::from_static("grpc-status");
pub(super) const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const DETAILS: HeaderName = HeaderName::from_static("grpc-status-details-bin");
const PUSHBACK: HeaderName = HeaderName::from_static("grpc-retry-pushback-ms");

/// The domain of every `ErrorInfo`.
const DOMAIN: &str = "ibid";

/// Builds a refusal as a trailers-only response.
pub(super) fn refuse(refusal: &Refusal, policy: &Policy, masked: &str) -> Response<WholeBody> {
    let reason = refusal.reason;
    let code = GrpcStatusCode::from_number(policy.grpc_status_of(reason).into());
    let place = format!("/.well-known/idempotency#{}", reason.name());
    // `in-progress` is `IN_PROGRESS` in gRPC.
    let name = reason.name().replace('-', "_").to_ascii_uppercase();
    let mut details = vec![error_info(&name, &[("key", masked), ("type", &place)])];
    if let Some(after) = refusal.retry_after {
        details.push(retry_info(after));
    }
    if matches!(reason, RefusalReason::KeyMissing | RefusalReason::KeyInvalid) {
        let headers = key_headers(policy);
        let field = headers.first().map_or("idempotency-key", HeaderName::as_str);
        details.push(bad_request(field, &refusal.detail));
    }
    let mut answer = trailers_only(code, &refusal.detail, details);
    if let (RefusalReason::InProgress, Some(after)) = (reason, refusal.retry_after) {
        let millis = after.as_millis().min(i32::MAX as u128);
        answer.headers_mut().insert(PUSHBACK, HeaderValue::from_str(&millis.to_string()).expect("digits"));
    }
    answer
}

/// Builds a response for an error outside of the refusal table, by its HTTP status.
pub(super) fn fail(status: StatusCode, detail: &str) -> Response<WholeBody> {
    let (code, name) = match status {
        StatusCode::REQUEST_TIMEOUT => (GrpcStatusCode::DeadlineExceeded, "REQUEST_TIMEOUT"),
        StatusCode::BAD_REQUEST => (GrpcStatusCode::InvalidArgument, "REQUEST_BROKEN_OFF"),
        StatusCode::BAD_GATEWAY => (GrpcStatusCode::Unavailable, "UPSTREAM_UNREACHABLE"),
        // The handler failed, and it is unknown how far it got.
        _ => (GrpcStatusCode::Unknown, "HANDLER_FAILED"),
    };
    trailers_only(code, detail, vec![error_info(name, &[])])
}

/// Replaces a response that was too large to store: the call took place, but only its first caller got the response. A
/// retry does not help, so the code is not one that clients retry.
pub(super) fn body_not_kept(length: u64, sha256: &str) -> Response<WholeBody> {
    let message = format!(
        "the call took place with status OK, and its answer of {length} bytes was too large to be remembered; \
         look the result up"
    );
    let info = error_info("ANSWER_TOO_LARGE", &[("length", &length.to_string()), ("sha256", sha256)]);
    trailers_only(GrpcStatusCode::FailedPrecondition, &message, vec![info])
}

fn trailers_only(code: GrpcStatusCode, message: &str, details: Vec<Any>) -> Response<WholeBody> {
    let status = RpcStatus { code: code.number().into(), message: message.into(), details };
    let value = |text: String| HeaderValue::from_str(&text).expect("encoded to visible ASCII");
    let mut headers = HeaderMap::with_capacity(5);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert(STATUS, u16::from(code.number()).into());
    headers.insert(MESSAGE, value(percent_encode(message)));
    headers.insert(DETAILS, value(base64_encode(&status.encode_to_vec())));
    whole_response(StatusCode::OK, headers, "", None)
}

/// Encodes `grpc-message`: visible ASCII except `%` stays, everything else is escaped as UTF-8 bytes.
fn percent_encode(text: &str) -> String {
    const ESCAPED: &AsciiSet = &CONTROLS.add(b'%');
    utf8_percent_encode(text, ESCAPED).to_string()
}

/// Encodes a `-bin` header: standard base64 without padding, as the protocol requires.
fn base64_encode(bytes: &[u8]) -> String {
    BASE64_NOPAD.encode(bytes)
}

fn any(name: &str, message: &impl Message) -> Any {
    Any { type_url: format!("type.googleapis.com/google.rpc.{name}"), value: message.encode_to_vec() }
}

fn error_info(reason: &str, metadata: &[(&str, &str)]) -> Any {
    let present = metadata.iter().filter(|(_, value)| !value.is_empty());
    let metadata = present.map(|(name, value)| (name.to_string(), value.to_string())).collect();
    any("ErrorInfo", &ErrorInfo { reason: reason.into(), domain: DOMAIN.into(), metadata })
}

fn retry_info(after: Duration) -> Any {
    // The maximum of google.protobuf.Duration.
    let seconds = after.as_secs().min(315_576_000_000) as i64;
    let delay = prost_types::Duration { seconds, nanos: after.subsec_nanos() as i32 };
    any("RetryInfo", &RetryInfo { retry_delay: Some(delay) })
}

fn bad_request(field: &str, description: &str) -> Any {
    let violation = FieldViolation { field: field.into(), description: description.into() };
    any("BadRequest", &BadRequest { field_violations: vec![violation] })
}

#[cfg(test)]
mod tests {
    use super::*;

    type TestGrpcResponse = Response<WholeBody>;

    fn value<'a>(answer: &'a TestGrpcResponse, name: &str) -> Option<&'a str> {
        answer.headers().get(name).map(|value| value.to_str().unwrap())
    }

    #[test]
    fn a_refusal_is_one_block_of_headers() {
        let refusal = Refusal::new(RefusalReason::InProgress, "l\u{e4}uft").retry_after(Duration::from_millis(1500));
        let answer: TestGrpcResponse = refuse(&refusal, &Policy::platform(), "ab****yz");
        assert_eq!(answer.status(), 200);
        assert!(answer.body().data.is_empty() && answer.body().trailers.is_none());
        assert_eq!(value(&answer, "content-type"), Some("application/grpc"));
        assert_eq!(value(&answer, "grpc-status"), Some("10"));
        assert_eq!(value(&answer, "grpc-message"), Some("l%C3%A4uft"));
        assert_eq!(value(&answer, "grpc-retry-pushback-ms"), Some("1500"));
        assert_eq!(answer.headers().len(), 5);
        let delay = prost_types::Duration { seconds: 1, nanos: 500_000_000 };
        let status = RpcStatus {
            code: 10,
            message: "l\u{e4}uft".into(),
            details: vec![
                error_info("IN_PROGRESS", &[("key", "ab****yz"), ("type", "/.well-known/idempotency#in-progress")]),
                any("RetryInfo", &RetryInfo { retry_delay: Some(delay) }),
            ],
        };
        let bytes = "CAoSBmzDpHVmdBp+Cih0eXBlLmdvb2dsZWFwaXMuY29tL2dvb2dsZS5ycGMuRXJyb3JJbmZvElIKC0lOX1BST0dSRVNTEgRp\
             YmlkGg8KA2tleRIIYWIqKioqeXoaLAoEdHlwZRIkLy53ZWxsLWtub3duL2lkZW1wb3RlbmN5I2luLXByb2dyZXNzGjYKKHR5\
             cGUuZ29vZ2xlYXBpcy5jb20vZ29vZ2xlLnJwYy5SZXRyeUluZm8SCgoICAEQgMq17gE";
        assert_eq!(base64_encode(&status.encode_to_vec()), bytes);
        assert_eq!(value(&answer, "grpc-status-details-bin"), Some(bytes));
    }

    #[test]
    fn a_key_at_fault_is_a_field_violation() {
        let answer: TestGrpcResponse =
            refuse(&Refusal::new(RefusalReason::KeyMissing, "no key"), &Policy::leads().for_grpc(), "");
        let violation = FieldViolation { field: "x-idempotency-key".into(), description: "no key".into() };
        let status = RpcStatus {
            code: 3,
            message: "no key".into(),
            details: vec![
                error_info("KEY_MISSING", &[("type", "/.well-known/idempotency#key-missing")]),
                any("BadRequest", &BadRequest { field_violations: vec![violation] }),
            ],
        };
        let bytes = "CAMSBm5vIGtleRptCih0eXBlLmdvb2dsZWFwaXMuY29tL2dvb2dsZS5ycGMuRXJyb3JJbmZvEkEKC0tFWV9NSVNTSU5HEgRp\
             YmlkGiwKBHR5cGUSJC8ud2VsbC1rbm93bi9pZGVtcG90ZW5jeSNrZXktbWlzc2luZxpKCil0eXBlLmdvb2dsZWFwaXMuY29t\
             L2dvb2dsZS5ycGMuQmFkUmVxdWVzdBIdChsKEXgtaWRlbXBvdGVuY3kta2V5EgZubyBrZXk";
        assert_eq!(base64_encode(&status.encode_to_vec()), bytes);
        assert_eq!(value(&answer, "grpc-status-details-bin"), Some(bytes));
    }

    #[test]
    fn every_refusal_has_the_code_of_the_table_unless_the_policy_sets_another() {
        for reason in RefusalReason::all() {
            let refusal = Refusal::new(reason, format!("why {reason}"));
            let answer: TestGrpcResponse = refuse(&refusal, &Policy::ietf(), "");
            assert_eq!(value(&answer, "grpc-status"), Some(reason.grpc_status().to_string().as_str()));
            assert_eq!(value(&answer, "grpc-retry-pushback-ms"), None, "only where there is a time to wait");
        }
        let mut policy = Policy::platform();
        policy.grpc_status = vec![(RefusalReason::KeyReused, GrpcStatusCode::AlreadyExists.number())];
        let answer: TestGrpcResponse = refuse(&Refusal::new(RefusalReason::KeyReused, ""), &policy, "");
        assert_eq!(value(&answer, "grpc-status"), Some("6"));
    }

    #[test]
    fn what_is_not_in_the_table_has_a_status_too() {
        for (status, code) in [(408, "4"), (400, "3"), (502, "14"), (500, "2")] {
            let answer: TestGrpcResponse = fail(StatusCode::from_u16(status).unwrap(), "why");
            assert_eq!(value(&answer, "grpc-status"), Some(code));
            assert_eq!(value(&answer, "grpc-message"), Some("why"));
        }
    }

    #[test]
    fn messages_are_encoded_byte_by_byte() {
        for (text, encoded) in [
            ("plain text, 100 times", "plain text, 100 times"),
            ("100%", "100%25"),
            ("a\nb\tc", "a%0Ab%09c"),
            ("café ☕", "caf%C3%A9 %E2%98%95"),
            ("~\u{7f}", "~%7F"),
            ("", ""),
        ] {
            assert_eq!(percent_encode(text), encoded);
        }
    }

    #[test]
    fn base64_is_that_of_rfc_4648_without_padding() {
        for (bytes, encoded) in [
            ("", ""),
            ("f", "Zg"),
            ("fo", "Zm8"),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg"),
            ("fooba", "Zm9vYmE"),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64_encode(bytes.as_bytes()), encoded);
        }
        assert_eq!(base64_encode(&[0xff, 0xef, 0xfe]), "/+/+");
    }
}
