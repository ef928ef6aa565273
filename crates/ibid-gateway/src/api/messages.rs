//! The JSON of the exchange API. Header values are text whose characters are bytes (ISO 8859-1), bodies are base64.

use std::{borrow::Cow, net::IpAddr, ops::Deref};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, header};
use http_body_util::Full;
use serde::{Deserialize, Serialize};

use super::problem::ApiProblem;

/// A string of a message, copied only if it has escapes.
#[derive(Deserialize, Default)]
pub(super) struct MessageText<'a>(#[serde(borrow)] Cow<'a, str>);

impl Deref for MessageText<'_> {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct BeginCall<'a> {
    #[serde(borrow)]
    pub(super) id: MessageText<'a>,
    #[serde(borrow)]
    method: MessageText<'a>,
    #[serde(borrow)]
    target: MessageText<'a>,
    #[serde(borrow)]
    headers: Vec<(MessageText<'a>, MessageText<'a>)>,
    #[serde(borrow, default)]
    body_base64: MessageText<'a>,
    pub(super) peer: Option<IpAddr>,
}

/// The handler's response.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EndCall<'a> {
    status: u16,
    #[serde(borrow)]
    headers: Vec<(MessageText<'a>, MessageText<'a>)>,
    #[serde(borrow, default)]
    body_base64: MessageText<'a>,
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

/// Tells the app to run its handler: what `begin` answers, besides the handle of the exchange.
#[derive(Serialize)]
pub(super) struct RunGrant<'a> {
    /// `None` without a claim, in shadow mode or if the store is down.
    pub(super) attempt: Option<u32>,
    pub(super) fence: Option<u64>,
    /// Equal in all attempts: the handler derives the keys of its own calls from it.
    pub(super) operation: Option<String>,
    /// The key as operators see it.
    pub(super) key: &'a str,
    pub(super) deadline_ms: u64,
    /// Set on the handler's request, in place of what the client sent under these names.
    pub(super) headers: Vec<(&'a str, &'a str)>,
}

impl RunGrant<'_> {
    /// The message with the handle, which has no character that JSON escapes.
    pub(super) fn encode(&self, handle: &str) -> Bytes {
        let mut json = Vec::with_capacity(handle.len() + 512);
        json.extend_from_slice(b"{\"exchange\":\"");
        json.extend_from_slice(handle.as_bytes());
        json.push(b'"');
        let members = json.len();
        serde_json::to_writer(&mut json, self).expect("text and numbers");
        json[members] = b',';
        json.into()
    }
}

#[derive(Serialize)]
pub(super) struct Deadline {
    pub(super) deadline_ms: u64,
}

#[derive(Serialize)]
struct AnswerHead<'a> {
    status: u16,
    headers: Vec<(&'a str, Cow<'a, str>)>,
}

pub(super) fn parse<'a, T: Deserialize<'a>>(body: &'a [u8], what: &str) -> Result<T, ApiProblem> {
    let wrong = |why: String| ApiProblem::bad_request(format!("the body is not {what}: {why}"));
    // An array would be read as the members in order.
    if !body.trim_ascii_start().starts_with(b"{") {
        return Err(wrong("expected a JSON object".into()));
    }
    // Once for the whole body, instead of for each string.
    let text = str::from_utf8(body).map_err(|why| wrong(format!("it is not UTF-8: {why}")))?;
    serde_json::from_str(text).map_err(|why| wrong(why.to_string()))
}

/// Reads a body as each kind of message, for the fuzzer.
#[doc(hidden)]
pub fn parse_any_message(body: &[u8]) -> Result<(), String> {
    let begin = parse::<BeginCall<'_>>(body, "a begin call").and_then(|call| call.request().map(drop));
    let end = parse::<EndCall<'_>>(body, "an end call").and_then(|call| call.response().map(drop));
    let failed = parse::<FailedCall>(body, "a failed call").map(drop);
    begin.or(end).or(failed).map_err(|why| format!("{why:?}"))
}

impl BeginCall<'_> {
    /// Builds the request that the client sent to the app.
    pub(super) fn request(&self) -> Result<Request<Full<Bytes>>, ApiProblem> {
        let wrong = |what: String| ApiProblem::bad_request(what);
        let method = Method::from_bytes(self.method.as_bytes());
        let method = method.map_err(|_| wrong(format!("method: {:?} is no method", &*self.method)))?;
        let target = self.target.parse::<Uri>().ok().filter(|uri| uri.scheme().is_none() && uri.authority().is_none());
        let target = target.filter(|uri| uri.path().starts_with('/') || uri.path() == "*").ok_or_else(|| {
            wrong(format!("target: {:?} is no path; send path and query as the client sent them", &*self.target))
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

impl EndCall<'_> {
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
    BASE64.decode(text).map(Bytes::from).map_err(wrong)
}

fn decode_headers(pairs: &[(MessageText<'_>, MessageText<'_>)]) -> Result<HeaderMap, ApiProblem> {
    let mut headers = HeaderMap::with_capacity(pairs.len());
    for (MessageText(name), MessageText(value)) in pairs {
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

/// Encodes what the app sends to its client. Base64 has no character that JSON escapes.
pub(super) fn encode_answer(status: StatusCode, headers: &HeaderMap, body: &[u8]) -> Bytes {
    let head = AnswerHead { status: status.as_u16(), headers: header_pairs(headers).collect() };
    let mut json = String::with_capacity(body.len() / 3 * 4 + 512);
    json.push_str("{\"answer\":");
    json.push_str(&serde_json::to_string(&head).expect("text and numbers"));
    json.truncate(json.len() - 1);
    json.push_str(",\"body_base64\":\"");
    BASE64.encode_string(body, &mut json);
    json.push_str("\"}}");
    json.into()
}

pub(super) fn encode(message: &impl Serialize) -> Bytes {
    serde_json::to_vec(message).expect("text and numbers").into()
}
