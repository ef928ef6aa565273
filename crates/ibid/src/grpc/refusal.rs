//! Refusals as gRPC responses: always trailers-only, so that stock clients can retry on them.
//!
//! `grpc-status` and `grpc-message` are for all clients. `grpc-status-details-bin` contains the error model of
//! `google.rpc` for programs: an `ErrorInfo` with the refusal's name, a `RetryInfo` if a retry makes sense, and a
//! `BadRequest` if the key is invalid.

use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};

use super::{GrpcStatusCode, header_encoding, proto::ProtoWriter};
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
    let mut details = vec![error_info(&to_upper_snake_case(reason.name()), &[("key", masked), ("type", &place)])];
    if let Some(after) = refusal.retry_after {
        details.push(retry_info(after));
    }
    if matches!(reason, RefusalReason::KeyMissing | RefusalReason::KeyInvalid) {
        let headers = key_headers(policy);
        let field = headers.first().map_or("idempotency-key", HeaderName::as_str);
        details.push(bad_request(field, &refusal.detail));
    }
    let mut answer = trailers_only(code, &refusal.detail, &details);
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
    trailers_only(code, detail, &[error_info(name, &[])])
}

/// Replaces a response that was too large to store: the call took place, but only its first caller got the response. A
/// retry does not help, so the code is not one that clients retry.
pub(super) fn body_not_kept(length: u64, sha256: &str) -> Response<WholeBody> {
    let message = format!(
        "the call took place with status OK, and its answer of {length} bytes was too large to be remembered; \
         look the result up"
    );
    let info = error_info("ANSWER_TOO_LARGE", &[("length", &length.to_string()), ("sha256", sha256)]);
    trailers_only(GrpcStatusCode::FailedPrecondition, &message, &[info])
}

fn trailers_only(code: GrpcStatusCode, message: &str, details: &[Vec<u8>]) -> Response<WholeBody> {
    let mut status = ProtoWriter::default().number(1, code.number().into()).text(2, message);
    for detail in details {
        status = status.bytes(3, detail);
    }
    let value = |text: String| HeaderValue::from_str(&text).expect("encoded to visible ASCII");
    let mut headers = HeaderMap::with_capacity(5);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert(STATUS, u16::from(code.number()).into());
    headers.insert(MESSAGE, value(header_encoding::percent_encode(message)));
    headers.insert(DETAILS, value(header_encoding::base64_encode(&status.finish())));
    whole_response(StatusCode::OK, headers, "", None)
}

/// Converts `in-progress` to `IN_PROGRESS`.
fn to_upper_snake_case(name: &str) -> String {
    name.replace('-', "_").to_ascii_uppercase()
}

/// A `google.protobuf.Any`.
fn any(name: &str, message: &[u8]) -> Vec<u8> {
    ProtoWriter::default().text(1, &format!("type.googleapis.com/google.rpc.{name}")).bytes(2, message).finish()
}

fn error_info(reason: &str, metadata: &[(&str, &str)]) -> Vec<u8> {
    let mut info = ProtoWriter::default().text(1, reason).text(2, DOMAIN);
    for (name, value) in metadata.iter().filter(|(_, value)| !value.is_empty()) {
        info = info.bytes(3, &ProtoWriter::default().text(1, name).text(2, value).finish());
    }
    any("ErrorInfo", &info.finish())
}

fn retry_info(after: Duration) -> Vec<u8> {
    // The maximum of google.protobuf.Duration.
    let seconds = after.as_secs().min(315_576_000_000);
    let delay = ProtoWriter::default().number(1, seconds).number(2, after.subsec_nanos().into()).finish();
    any("RetryInfo", &ProtoWriter::default().bytes(1, &delay).finish())
}

fn bad_request(field: &str, description: &str) -> Vec<u8> {
    let violation = ProtoWriter::default().text(1, field).text(2, description).finish();
    any("BadRequest", &ProtoWriter::default().bytes(1, &violation).finish())
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;

    type TestGrpcResponse = Response<WholeBody>;

    /// The google.rpc messages, as another implementation encodes them.
    mod rpc {
        use std::collections::BTreeMap;

        #[derive(prost::Message)]
        pub(super) struct Status {
            #[prost(int32, tag = "1")]
            pub(super) code: i32,
            #[prost(string, tag = "2")]
            pub(super) message: String,
            #[prost(message, repeated, tag = "3")]
            pub(super) details: Vec<Any>,
        }

        #[derive(prost::Message)]
        pub(super) struct Any {
            #[prost(string, tag = "1")]
            pub(super) type_url: String,
            #[prost(bytes = "vec", tag = "2")]
            pub(super) value: Vec<u8>,
        }

        #[derive(prost::Message)]
        pub(super) struct ErrorInfo {
            #[prost(string, tag = "1")]
            pub(super) reason: String,
            #[prost(string, tag = "2")]
            pub(super) domain: String,
            #[prost(btree_map = "string, string", tag = "3")]
            pub(super) metadata: BTreeMap<String, String>,
        }

        #[derive(prost::Message)]
        pub(super) struct Duration {
            #[prost(int64, tag = "1")]
            pub(super) seconds: i64,
            #[prost(int32, tag = "2")]
            pub(super) nanos: i32,
        }

        #[derive(prost::Message)]
        pub(super) struct RetryInfo {
            #[prost(message, optional, tag = "1")]
            pub(super) retry_delay: Option<Duration>,
        }

        #[derive(prost::Message)]
        pub(super) struct FieldViolation {
            #[prost(string, tag = "1")]
            pub(super) field: String,
            #[prost(string, tag = "2")]
            pub(super) description: String,
        }

        #[derive(prost::Message)]
        pub(super) struct BadRequest {
            #[prost(message, repeated, tag = "1")]
            pub(super) field_violations: Vec<FieldViolation>,
        }

        pub(super) fn any(name: &str, message: &impl prost::Message) -> Any {
            Any { type_url: format!("type.googleapis.com/google.rpc.{name}"), value: message.encode_to_vec() }
        }

        pub(super) fn error_info(reason: &str, metadata: &[(&str, &str)]) -> Any {
            let owned = |(name, value): &(&str, &str)| (name.to_string(), value.to_string());
            let metadata = metadata.iter().map(owned).collect();
            any("ErrorInfo", &ErrorInfo { reason: reason.into(), domain: "ibid".into(), metadata })
        }
    }

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
        let delay = rpc::Duration { seconds: 1, nanos: 500_000_000 };
        let status = rpc::Status {
            code: 10,
            message: "l\u{e4}uft".into(),
            details: vec![
                rpc::error_info(
                    "IN_PROGRESS",
                    &[("key", "ab****yz"), ("type", "/.well-known/idempotency#in-progress")],
                ),
                rpc::any("RetryInfo", &rpc::RetryInfo { retry_delay: Some(delay) }),
            ],
        };
        assert_eq!(
            value(&answer, "grpc-status-details-bin"),
            Some(header_encoding::base64_encode(&status.encode_to_vec()).as_str())
        );
    }

    #[test]
    fn a_key_at_fault_is_a_field_violation() {
        let answer: TestGrpcResponse =
            refuse(&Refusal::new(RefusalReason::KeyMissing, "no key"), &Policy::leads().for_grpc(), "");
        let violation = rpc::FieldViolation { field: "x-idempotency-key".into(), description: "no key".into() };
        let status = rpc::Status {
            code: 3,
            message: "no key".into(),
            details: vec![
                rpc::error_info("KEY_MISSING", &[("type", "/.well-known/idempotency#key-missing")]),
                rpc::any("BadRequest", &rpc::BadRequest { field_violations: vec![violation] }),
            ],
        };
        assert_eq!(
            value(&answer, "grpc-status-details-bin"),
            Some(header_encoding::base64_encode(&status.encode_to_vec()).as_str())
        );
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
}
