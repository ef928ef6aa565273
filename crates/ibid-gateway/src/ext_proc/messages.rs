//! Envoy's messages, as the types of `http` and back.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use bytes::Bytes;
use envoy_types::pb::{
    envoy::{
        config::core::v3::{HeaderMap as EnvoyHeaders, HeaderValue as EnvoyHeader, HeaderValueOption},
        extensions::filters::http::ext_proc::v3::{
            ProcessingMode,
            processing_mode::{BodySendMode, HeaderSendMode},
        },
        service::ext_proc::v3::{
            BodyMutation, BodyResponse, CommonResponse, GrpcStatus, HeaderMutation, HeadersResponse, HttpHeaders,
            HttpTrailers, ImmediateResponse, ProcessingRequest, ProcessingResponse, StreamedBodyResponse,
            StreamedImmediateResponse, TrailersResponse, body_mutation::Mutation,
            processing_response::Response as EnvoyResponse, streamed_immediate_response::Response as ImmediatePart,
        },
        r#type::v3::HttpStatus,
    },
    google::protobuf::{self, value::Kind},
};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, Version, header};
use ibid::{grpc, http::DispatchOutcome};

/// The name of the filter, under which Envoy sends attributes.
const FILTER_NAME: &str = "envoy.filters.http.ext_proc";
/// A header that Envoy adds to responses of the app.
const ENVOY_TIME: &str = "x-envoy-upstream-service-time";
/// The value of `response.code_details` for a response that came from the app.
const VIA_UPSTREAM: &str = "via_upstream";
const RESET_BEFORE_RESPONSE: &str = "upstream_reset_before_response_started{";
/// Why Envoy had no connection to the app, so that it sent nothing.
const CONNECT_FAILURES: [&str; 4] =
    ["remote_connection_failure", "local_connection_failure", "connection_timeout", "overflow"];
/// Why Envoy did not try to connect.
const NOT_ROUTED: [&str; 4] = ["no_healthy_upstream", "cluster_not_found", "route_not_found", "maintenance_mode"];

/// Which message of Envoy a reply is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AwaitedMessage {
    RequestHeaders,
    RequestBody,
    ResponseHeaders,
}

/// Whose body ibid sends in chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BodyDirection {
    Request,
    Response,
}

/// Reads the head of a request. Envoy has pseudo-headers for every version of HTTP.
pub(super) fn request_head(message: HttpHeaders) -> Result<Request<()>, String> {
    let (mut request, mut authority) = (Request::new(()), None);
    for EnvoyHeader { key, value, raw_value } in message.headers.unwrap_or_default().headers {
        let value = if raw_value.is_empty() { value.into_bytes() } else { raw_value };
        let invalid = || format!("the header {key} is not valid");
        match key.as_str() {
            ":method" => *request.method_mut() = Method::from_bytes(&value).map_err(|_| invalid())?,
            ":path" => *request.uri_mut() = Uri::try_from(value).map_err(|_| invalid())?,
            ":authority" => {
                authority = Some(HeaderValue::from_maybe_shared(Bytes::from(value)).map_err(|_| invalid())?)
            }
            pseudo if pseudo.starts_with(':') => {}
            _ => append_header(request.headers_mut(), &key, value)?,
        }
    }
    if let Some(authority) = authority {
        request.headers_mut().append(header::HOST, authority);
    }
    if grpc::is_call(Version::HTTP_2, request.headers()) {
        *request.version_mut() = Version::HTTP_2;
    }
    Ok(request)
}

/// Reads the head of a response.
pub(super) fn response_head(headers: Option<EnvoyHeaders>) -> Result<Response<()>, String> {
    let mut response = Response::new(());
    for EnvoyHeader { key, value, raw_value } in headers.unwrap_or_default().headers {
        let value = if raw_value.is_empty() { value.into_bytes() } else { raw_value };
        match key.as_str() {
            ":status" => {
                *response.status_mut() = StatusCode::from_bytes(&value).map_err(|_| "the status is not valid")?
            }
            ENVOY_TIME => {}
            _ => append_header(response.headers_mut(), &key, value)?,
        }
    }
    Ok(response)
}

pub(super) fn trailers(message: HttpTrailers) -> Result<HeaderMap, String> {
    let mut trailers = HeaderMap::new();
    for EnvoyHeader { key, value, raw_value } in message.trailers.unwrap_or_default().headers {
        append_header(&mut trailers, &key, if raw_value.is_empty() { value.into_bytes() } else { raw_value })?;
    }
    Ok(trailers)
}

fn append_header(headers: &mut HeaderMap, name: &str, value: Vec<u8>) -> Result<(), String> {
    let value = HeaderValue::from_maybe_shared(Bytes::from(value)).ok();
    let pair = HeaderName::from_bytes(name.as_bytes()).ok().zip(value);
    let (name, value) = pair.ok_or_else(|| format!("the header {name} is not valid"))?;
    headers.append(name, value);
    Ok(())
}

/// The address of the client's connection, if Envoy sends it.
pub(super) fn peer(message: &ProcessingRequest) -> Option<IpAddr> {
    match attribute(message, "source.address")? {
        Kind::StringValue(address) => address.parse::<SocketAddr>().ok().map(|address| address.ip()),
        _ => None,
    }
}

/// Whether the app sent the response, or how the request failed if Envoy made it. Returns `None` if Envoy does not say.
pub(super) fn response_origin(message: &ProcessingRequest) -> Option<Result<(), DispatchOutcome>> {
    let Kind::StringValue(details) = attribute(message, "response.code_details")? else { return None };
    if details == VIA_UPSTREAM {
        return Some(Ok(()));
    }
    let was_tried_once = match attribute(message, "upstream.request_attempt_count") {
        Some(Kind::NumberValue(attempts)) => *attempts <= 1.0,
        _ => false,
    };
    let why = format!("Envoy answered instead of the app: {details}");
    Some(Err(match details.strip_prefix(RESET_BEFORE_RESPONSE) {
        Some(reset) if CONNECT_FAILURES.iter().any(|failure| reset.starts_with(failure)) && was_tried_once => {
            DispatchOutcome::NotSent(why)
        }
        None if NOT_ROUTED.contains(&details.as_str()) && was_tried_once => DispatchOutcome::NotSent(why),
        _ if details.contains("timeout") => DispatchOutcome::TimedOut(why),
        _ => DispatchOutcome::ResponseLost(why),
    }))
}

/// How often Envoy sent the request to the app, if it says so.
pub(super) fn attempt_count(message: &ProcessingRequest) -> Option<f64> {
    match attribute(message, "upstream.request_attempt_count")? {
        Kind::NumberValue(attempts) => Some(*attempts),
        _ => None,
    }
}

fn attribute<'a>(message: &'a ProcessingRequest, name: &str) -> Option<&'a Kind> {
    message.attributes.get(FILTER_NAME)?.fields.get(name)?.kind.as_ref()
}

/// Lets a message pass with changed headers.
pub(super) fn pass(
    kind: AwaitedMessage, changes: HeaderMutation, mode_override: Option<ProcessingMode>,
) -> ProcessingResponse {
    let response = Some(CommonResponse { header_mutation: Some(changes), ..CommonResponse::default() });
    let response = match kind {
        AwaitedMessage::RequestHeaders => EnvoyResponse::RequestHeaders(HeadersResponse { response }),
        AwaitedMessage::RequestBody => EnvoyResponse::RequestBody(BodyResponse { response }),
        AwaitedMessage::ResponseHeaders => EnvoyResponse::ResponseHeaders(HeadersResponse { response }),
    };
    ProcessingResponse { mode_override, response: Some(response), ..ProcessingResponse::default() }
}

/// Asks for the body of the request like this, and for the response as it arrives.
pub(super) fn run_mode(request_body: BodySendMode) -> ProcessingMode {
    let mut mode = headers_only();
    mode.set_request_body_mode(request_body);
    if request_body == BodySendMode::FullDuplexStreamed {
        mode.set_request_trailer_mode(HeaderSendMode::Send);
    }
    mode.set_response_header_mode(HeaderSendMode::Send);
    mode.set_response_body_mode(BodySendMode::FullDuplexStreamed);
    mode.set_response_trailer_mode(HeaderSendMode::Send);
    mode
}

/// Changes what Envoy sends, before the reply to the request's headers. Envoy knows it since version 1.40.
pub(super) fn change_mode(mode: ProcessingMode) -> ProcessingResponse {
    ProcessingResponse { mode_override: Some(mode), ..ProcessingResponse::default() }
}

/// Asks for no further message.
pub(super) fn headers_only() -> ProcessingMode {
    let mut mode = ProcessingMode::default();
    mode.set_response_header_mode(HeaderSendMode::Skip);
    mode.set_request_body_mode(BodySendMode::None);
    mode.set_response_body_mode(BodySendMode::None);
    mode.set_request_trailer_mode(HeaderSendMode::Skip);
    mode.set_response_trailer_mode(HeaderSendMode::Skip);
    mode
}

/// Gives ibid this long for its next reply.
pub(super) fn extend_timeout(timeout: Duration) -> ProcessingResponse {
    let seconds = timeout.as_secs().cast_signed();
    let timeout = protobuf::Duration { seconds, ..protobuf::Duration::default() };
    ProcessingResponse { override_message_timeout: Some(timeout), ..ProcessingResponse::default() }
}

/// Passes a chunk of a body on.
pub(super) fn chunk(direction: BodyDirection, data: Bytes, end_of_stream: bool) -> ProcessingResponse {
    let chunk = StreamedBodyResponse { body: data.into(), end_of_stream, ..StreamedBodyResponse::default() };
    let body_mutation = Some(BodyMutation { mutation: Some(Mutation::StreamedResponse(chunk)) });
    let response = BodyResponse { response: Some(CommonResponse { body_mutation, ..CommonResponse::default() }) };
    let response = Some(match direction {
        BodyDirection::Request => EnvoyResponse::RequestBody(response),
        BodyDirection::Response => EnvoyResponse::ResponseBody(response),
    });
    ProcessingResponse { response, ..ProcessingResponse::default() }
}

/// Passes trailers on, with changes.
pub(super) fn pass_trailers(direction: BodyDirection, changes: HeaderMutation) -> ProcessingResponse {
    let response = TrailersResponse { header_mutation: Some(changes) };
    let response = Some(match direction {
        BodyDirection::Request => EnvoyResponse::RequestTrailers(response),
        BodyDirection::Response => EnvoyResponse::ResponseTrailers(response),
    });
    ProcessingResponse { response, ..ProcessingResponse::default() }
}

/// A response with trailers in place of the app's, part by part. Envoy accepts it before the reply to the request's
/// headers, unless it buffers the request.
pub(super) fn streamed_immediate(response: Response<Bytes>, trailers: &HeaderMap) -> [ProcessingResponse; 3] {
    let (head, body) = response.into_parts();
    let mut headers = envoy_headers(&head.headers);
    let (key, raw_value) = (":status".to_owned(), head.status.as_str().as_bytes().to_vec());
    headers.headers.push(EnvoyHeader { key, raw_value, ..EnvoyHeader::default() });
    let headers = HttpHeaders { headers: Some(headers), ..HttpHeaders::default() };
    let parts = [
        ImmediatePart::HeadersResponse(headers),
        ImmediatePart::BodyResponse(StreamedBodyResponse { body: body.into(), ..StreamedBodyResponse::default() }),
        ImmediatePart::TrailersResponse(envoy_headers(trailers)),
    ];
    parts.map(|part| {
        let part = StreamedImmediateResponse { response: Some(part) };
        let response = Some(EnvoyResponse::StreamedImmediateResponse(part));
        ProcessingResponse { response, ..ProcessingResponse::default() }
    })
}

/// Joins the values of each name, as gRPC defines: of several headers with one name, Envoy keeps the last.
fn envoy_headers(headers: &HeaderMap) -> EnvoyHeaders {
    let header = |name: &HeaderName| {
        let values: Vec<_> = headers.get_all(name).iter().map(HeaderValue::as_bytes).collect();
        let comma: &[u8] = if name.as_str().ends_with("-bin") { b"," } else { b", " };
        EnvoyHeader { key: name.to_string(), raw_value: values.join(comma), ..EnvoyHeader::default() }
    };
    EnvoyHeaders { headers: headers.keys().map(header).collect() }
}

/// A response in place of the app's.
pub(super) fn immediate(response: &Response<Bytes>) -> ProcessingResponse {
    let headers = response.headers();
    let grpc_status = headers.get("grpc-status").and_then(|status| status.to_str().ok()?.parse().ok());
    let mut kept = headers.clone();
    // Envoy sets them itself.
    for name in ["content-length", "transfer-encoding", "connection", "grpc-status", "grpc-message"] {
        kept.remove(name);
    }
    let body = match headers.get("grpc-message").filter(|_| grpc_status.is_some()) {
        // Envoy encodes it again.
        Some(message) => percent_encoding::percent_decode(message.as_bytes()).collect(),
        None => response.body().to_vec(),
    };
    let immediate = ImmediateResponse {
        status: Some(HttpStatus { code: response.status().as_u16().into() }),
        headers: Some(header_changes(&HeaderMap::new(), &kept)),
        body,
        grpc_status: grpc_status.map(|status| GrpcStatus { status }),
        details: "ibid".into(),
    };
    let response = Some(EnvoyResponse::ImmediateResponse(immediate));
    ProcessingResponse { response, ..ProcessingResponse::default() }
}

/// What turns `before` into `after`. The framing stays Envoy's.
pub(super) fn header_changes(before: &HeaderMap, after: &HeaderMap) -> HeaderMutation {
    let is_framing = |name: &HeaderName| *name == header::CONTENT_LENGTH || *name == header::TRANSFER_ENCODING;
    let mut changes = HeaderMutation::default();
    for name in before.keys().filter(|name| !is_framing(name) && !after.contains_key(*name)) {
        changes.remove_headers.push(name.to_string());
    }
    for name in after.keys().filter(|name| !is_framing(name)) {
        if before.get_all(name).iter().eq(after.get_all(name)) {
            continue;
        }
        let values = after.get_all(name).iter().enumerate();
        changes.set_headers.extend(values.map(|(at, value)| header_change(name, value, at > 0)));
    }
    changes
}

/// Changes the length of a body that is not the one that Envoy has.
pub(super) fn change_length(changes: &mut HeaderMutation, sent: &HeaderMap, length: Option<u64>) {
    if let Some((sent, length)) = sent.get(header::CONTENT_LENGTH).zip(length.map(HeaderValue::from))
        && *sent != length
    {
        changes.set_headers.push(header_change(&header::CONTENT_LENGTH, &length, false));
    }
}

#[expect(deprecated, reason = "Envoy reads `append`, not `append_action`")]
fn header_change(name: &HeaderName, value: &HeaderValue, append: bool) -> HeaderValueOption {
    let (key, raw_value) = (name.to_string(), value.as_bytes().to_vec());
    HeaderValueOption {
        header: Some(EnvoyHeader { key, raw_value, ..EnvoyHeader::default() }),
        append: Some(protobuf::BoolValue { value: append }),
        keep_empty_value: true,
        ..HeaderValueOption::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, HeaderValue::from_static(value));
        }
        headers
    }

    fn response_message(attributes: &[(&str, Kind)]) -> ProcessingRequest {
        let value = |kind: &Kind| protobuf::Value { kind: Some(kind.clone()) };
        let fields = attributes.iter().map(|(name, kind)| ((*name).to_owned(), value(kind))).collect();
        let attributes = [(FILTER_NAME.to_owned(), protobuf::Struct { fields })].into();
        ProcessingRequest { attributes, ..ProcessingRequest::default() }
    }

    #[test]
    fn only_headers_that_differ_change_and_framing_stays() {
        let before = headers(&[("a", "1"), ("b", "1"), ("b", "2"), ("gone", "1"), ("content-length", "3")]);
        let after = headers(&[("a", "1"), ("b", "1"), ("b", "3"), ("new", ""), ("content-length", "4")]);
        let changes = header_changes(&before, &after);
        assert_eq!(changes.remove_headers, ["gone"]);
        let set: Vec<_> = changes.set_headers.into_iter().map(|option| option.header.unwrap()).collect();
        let set: Vec<_> = set.iter().map(|header| (header.key.as_str(), header.raw_value.as_slice())).collect();
        assert_eq!(set, [("b", &b"1"[..]), ("b", b"3"), ("new", b"")]);
    }

    #[test]
    fn a_request_was_not_sent_only_if_envoy_proves_it() {
        let text = |text: &str| Kind::StringValue(text.to_owned());
        let refused = "upstream_reset_before_response_started{remote_connection_failure|Connection_refused}";
        let origin = |details: &str, attempts: Option<f64>| {
            let mut all = vec![("response.code_details", text(details))];
            all.extend(attempts.map(|attempts| ("upstream.request_attempt_count", Kind::NumberValue(attempts))));
            response_origin(&response_message(&all)).expect("Envoy says it")
        };
        assert!(origin("via_upstream", None).is_ok());
        assert!(matches!(origin(refused, Some(1.0)), Err(DispatchOutcome::NotSent(_))));
        assert!(matches!(origin("no_healthy_upstream", Some(0.0)), Err(DispatchOutcome::NotSent(_))));
        for attempts in [None, Some(2.0)] {
            assert!(matches!(origin(refused, attempts), Err(DispatchOutcome::ResponseLost(_))));
        }
        let broken = "upstream_reset_before_response_started{connection_termination}";
        assert!(matches!(origin(broken, Some(1.0)), Err(DispatchOutcome::ResponseLost(_))));
        assert!(matches!(origin("response_timeout", Some(1.0)), Err(DispatchOutcome::TimedOut(_))));
        assert!(response_origin(&response_message(&[])).is_none());
    }
}
