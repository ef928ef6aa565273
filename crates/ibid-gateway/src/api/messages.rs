//! The JSON of the exchange API. Header values are text whose characters are bytes (ISO 8859-1), bodies are base64.

use std::{borrow::Cow, net::IpAddr};

use bytes::Bytes;
use data_encoding::BASE64;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, header};
use http_body_util::Full;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::problem::ApiProblem;

type MessageHeaders = Vec<(String, String)>;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct BeginCall {
    pub(super) id: String,
    method: String,
    target: String,
    headers: MessageHeaders,
    #[serde(default)]
    body_base64: String,
    pub(super) peer: Option<IpAddr>,
}

/// The handler's response.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EndCall {
    status: u16,
    headers: MessageHeaders,
    #[serde(default)]
    body_base64: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FailedCall {
    pub(super) how: HandlerFailure,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum HandlerFailure {
    /// The handler provably did nothing.
    NotStarted,
    /// The handler failed, and may have done something.
    Unknown,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ExtendCall {}

/// Tells the app to run its handler.
#[derive(Debug, Clone, Serialize)]
pub(super) struct RunGrant {
    pub(super) exchange: String,
    /// `None` without a claim, in shadow mode or if the store is down.
    pub(super) attempt: Option<u32>,
    pub(super) fence: Option<u64>,
    /// Equal in all attempts: the handler derives the keys of its own calls from it.
    pub(super) operation: Option<String>,
    /// The key as operators see it.
    pub(super) key: String,
    pub(super) deadline_ms: u64,
    /// Set on the handler's request, in place of what the client sent under these names.
    pub(super) headers: MessageHeaders,
}

#[derive(Serialize)]
pub(super) struct Deadline {
    pub(super) deadline_ms: u64,
}

#[derive(Serialize)]
struct AnswerMessage<'a> {
    answer: EncodedAnswer<'a>,
}

#[derive(Serialize)]
struct EncodedAnswer<'a> {
    status: u16,
    headers: Vec<(&'a str, Cow<'a, str>)>,
    body_base64: String,
}

pub(super) fn parse<T: DeserializeOwned>(body: &[u8], what: &str) -> Result<T, ApiProblem> {
    let wrong = |why: String| ApiProblem::bad_request(format!("the body is not {what}: {why}"));
    // An array would be read as the members in order.
    if !body.trim_ascii_start().starts_with(b"{") {
        return Err(wrong("expected a JSON object".into()));
    }
    serde_json::from_slice(body).map_err(|why| wrong(why.to_string()))
}

/// Reads a body as each kind of message, for the fuzzer.
#[doc(hidden)]
pub fn parse_any_message(body: &[u8]) -> Result<(), String> {
    let begin = parse::<BeginCall>(body, "a begin call").and_then(|call| call.request().map(drop));
    let end = parse::<EndCall>(body, "an end call").and_then(|call| call.response().map(drop));
    let failed = parse::<FailedCall>(body, "a failed call").map(drop);
    begin.or(end).or(failed).map_err(|why| format!("{why:?}"))
}

impl BeginCall {
    /// Builds the request that the client sent to the app.
    pub(super) fn request(&self) -> Result<Request<Full<Bytes>>, ApiProblem> {
        let wrong = |what: String| ApiProblem::bad_request(what);
        let method = Method::from_bytes(self.method.as_bytes());
        let method = method.map_err(|_| wrong(format!("method: {:?} is no method", self.method)))?;
        let target = self.target.parse::<Uri>().ok().filter(|uri| uri.scheme().is_none() && uri.authority().is_none());
        let target = target.filter(|uri| uri.path().starts_with('/') || uri.path() == "*").ok_or_else(|| {
            wrong(format!("target: {:?} is no path; send path and query as the client sent them", self.target))
        })?;
        let body = decode_body(&self.body_base64)?;
        let mut headers = decode_headers(&self.headers)?;
        if let Some(length) = headers.get(header::CONTENT_LENGTH)
            && length.as_bytes() != body.len().to_string().as_bytes()
        {
            let (said, sent) = (length.to_str().unwrap_or("?"), body.len());
            return Err(wrong(format!("the header content-length is {said}, and body_base64 has {sent} bytes")));
        }
        // The app has decoded the message.
        headers.remove(header::TRANSFER_ENCODING);
        let mut request = Request::new(Full::new(body));
        (*request.method_mut(), *request.uri_mut(), *request.headers_mut()) = (method, target, headers);
        Ok(request)
    }
}

impl EndCall {
    pub(super) fn response(&self) -> Result<Response<Full<Bytes>>, ApiProblem> {
        let status = StatusCode::from_u16(self.status).ok().filter(|status| (200..600).contains(&status.as_u16()));
        let wrong = || ApiProblem::bad_request(format!("status: expected 200 to 599, got {}", self.status));
        let mut response = Response::new(Full::new(decode_body(&self.body_base64)?));
        *response.status_mut() = status.ok_or_else(wrong)?;
        *response.headers_mut() = decode_headers(&self.headers)?;
        Ok(response)
    }
}

fn decode_body(text: &str) -> Result<Bytes, ApiProblem> {
    let wrong = |why| ApiProblem::bad_request(format!("body_base64: expected base64 with padding: {why}"));
    BASE64.decode(text.as_bytes()).map(Bytes::from).map_err(wrong)
}

fn decode_headers(pairs: &[(String, String)]) -> Result<HeaderMap, ApiProblem> {
    let mut headers = HeaderMap::with_capacity(pairs.len());
    for (name, value) in pairs {
        let wrong = |what: &str| ApiProblem::bad_request(format!("headers: {name:?} {what}"));
        let parsed = HeaderName::from_bytes(name.as_bytes()).map_err(|_| wrong("is no name of a header"))?;
        let value = if value.is_ascii() {
            HeaderValue::from_str(value)
        } else {
            let bytes: Option<Vec<u8>> = value.chars().map(|char| u8::try_from(char).ok()).collect();
            let beyond = || wrong("has characters beyond ISO 8859-1; send each byte as one character");
            HeaderValue::from_bytes(&bytes.ok_or_else(beyond)?)
        };
        let value = value.map_err(|_| wrong("has control characters in its value"))?;
        headers.try_append(parsed, value).map_err(|_| wrong("is one header too many"))?;
    }
    Ok(headers)
}

fn header_text(value: &HeaderValue) -> Cow<'_, str> {
    let text = || value.as_bytes().iter().map(|byte| char::from(*byte)).collect();
    value.to_str().map_or_else(|_| Cow::Owned(text()), Cow::Borrowed)
}

/// The names and values of headers as messages have them.
fn header_pairs(headers: &HeaderMap) -> impl Iterator<Item = (&str, Cow<'_, str>)> {
    headers.iter().map(|(name, value)| (name.as_str(), header_text(value)))
}

/// Encodes what the app sends to its client.
pub(super) fn encode_answer(status: StatusCode, headers: &HeaderMap, body: &[u8]) -> Bytes {
    let body_base64 = BASE64.encode(body);
    let answer = EncodedAnswer { status: status.as_u16(), headers: header_pairs(headers).collect(), body_base64 };
    encode(&AnswerMessage { answer })
}

pub(super) fn encode(message: &impl Serialize) -> Bytes {
    serde_json::to_vec(message).expect("text and numbers").into()
}
