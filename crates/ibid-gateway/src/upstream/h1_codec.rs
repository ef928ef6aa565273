//! HTTP/1.1 as bytes: encodes requests and decodes replies. Does no input or output.
//!
//! Invariant: a reply whose length could be understood in two ways is an error, or ends its connection.

use std::mem::MaybeUninit;

use bytes::{Buf as _, Bytes, BytesMut};
use http::header::{
    AUTHORIZATION, CACHE_CONTROL, CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, COOKIE,
    HOST, MAX_FORWARDS, SET_COOKIE, TE, TRAILER, TRANSFER_ENCODING,
};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Version};
use http_body::Body;
use httparse::{Header, ParserConfig, Status};
use hyper::ext::ReasonPhrase;

use super::{ATTEMPT, AddedHeaders, FENCE, OPERATION, REQUEST_ID};

/// Maximum size in bytes of a reply's head.
pub(super) const MAX_HEAD_BYTES: usize = 512 * 1024;
/// Maximum number of headers of a reply. One more would make an executed request's reply unreadable.
const MAX_REPLY_HEADERS: usize = 512;
/// Replies with at most this many headers are parsed without an allocation.
const USUAL_HEADERS: usize = 32;
/// Maximum size in bytes of the trailers of a reply, and of all its chunk extensions.
const MAX_CHUNK_META_BYTES: usize = 16 * 1024;

/// How a request's body is delimited.
#[derive(Debug, PartialEq)]
pub(super) enum RequestFraming {
    /// The number of bytes that are still to be sent.
    Length(u64),
    /// Chunked. Only the named trailers may be sent.
    Chunked(Vec<HeaderName>),
}

/// Appends a request's head with further headers to `out`. Returns the body's framing, and whether the request asks to
/// close the connection.
///
/// `Host` is sent as given, else from the URI, else as `default_host`. Cookies are joined into one line.
pub(super) fn encode_head<B: Body>(
    request: &Request<B>, more: AddedHeaders<'_>, default_host: &HeaderValue, out: &mut Vec<u8>,
) -> (RequestFraming, bool) {
    let (uri, headers, body) = (request.uri(), request.headers(), request.body());
    out.extend_from_slice(request.method().as_str().as_bytes());
    out.push(b' ');
    out.extend_from_slice(if uri.path().is_empty() { b"/" } else { uri.path().as_bytes() });
    if let Some(query) = uri.query() {
        out.push(b'?');
        out.extend_from_slice(query.as_bytes());
    }
    out.extend_from_slice(b" HTTP/1.1\r\n");
    if !headers.contains_key(HOST) {
        let host = uri.authority().map_or(default_host.as_bytes(), |authority| authority.as_str().as_bytes());
        encode_header(out, &HOST, host);
    }
    let (mut length, mut is_last, mut after_cookie) = (None, false, false);
    for (name, value) in headers {
        if *name == CONTENT_LENGTH {
            length = add_length(length, value);
            continue;
        }
        if *name == TRANSFER_ENCODING {
            continue;
        }
        is_last |= *name == CONNECTION && has_token(value, "close");
        let is_cookie = *name == COOKIE;
        if is_cookie && after_cookie {
            out.truncate(out.len() - 2);
            out.extend_from_slice(b"; ");
            out.extend_from_slice(value.as_bytes());
            out.extend_from_slice(b"\r\n");
        } else {
            encode_header(out, name, value.as_bytes());
        }
        after_cookie = is_cookie;
    }
    if let Some(run) = more.run {
        encode_number(out, &ATTEMPT, run.attempt.into());
        encode_number(out, &FENCE, run.fence);
        encode_header(out, &OPERATION, &run.operation.hex());
    }
    more.request_id.iter().for_each(|id| encode_header(out, &REQUEST_ID, id.as_bytes()));
    more.others.iter().for_each(|(name, value)| encode_header(out, name, value.as_bytes()));
    let length = match length {
        Some(Ok(length)) => Some(length),
        _ if body.is_end_stream() => None,
        _ => body.size_hint().exact(),
    };
    let framing = if let Some(length) = length {
        encode_number(out, &CONTENT_LENGTH, length);
        RequestFraming::Length(length)
    } else if body.is_end_stream() {
        RequestFraming::Length(0)
    } else {
        encode_header(out, &TRANSFER_ENCODING, b"chunked");
        let lines = headers.get_all(TRAILER).iter().filter_map(|line| line.to_str().ok());
        let names = lines.flat_map(|line| line.split(',')).filter_map(|name| name.trim().parse().ok());
        RequestFraming::Chunked(names.filter(is_trailer).collect())
    };
    out.extend_from_slice(b"\r\n");
    (framing, is_last)
}

/// Appends the end of a chunked body, with those trailers that the request's head has announced.
pub(super) fn encode_last_chunk(out: &mut Vec<u8>, trailers: Option<&HeaderMap>, announced: &[HeaderName]) {
    out.extend_from_slice(b"0\r\n");
    for (name, value) in trailers.into_iter().flatten().filter(|(name, _)| announced.contains(name)) {
        encode_header(out, name, value.as_bytes());
    }
    out.extend_from_slice(b"\r\n");
}

fn encode_header(out: &mut Vec<u8>, name: &HeaderName, value: &[u8]) {
    out.extend_from_slice(name.as_str().as_bytes());
    out.extend_from_slice(b": ");
    out.extend_from_slice(value);
    out.extend_from_slice(b"\r\n");
}

fn encode_number(out: &mut Vec<u8>, name: &HeaderName, number: u64) {
    out.extend_from_slice(name.as_str().as_bytes());
    out.extend_from_slice(b": ");
    encode_decimal(out, number);
    out.extend_from_slice(b"\r\n");
}

/// Whether a header may be a trailer: it neither delimits, routes nor authenticates the message.
fn is_trailer(name: &HeaderName) -> bool {
    !matches!(
        *name,
        AUTHORIZATION
            | CACHE_CONTROL
            | CONTENT_ENCODING
            | CONTENT_LENGTH
            | CONTENT_RANGE
            | CONTENT_TYPE
            | HOST
            | MAX_FORWARDS
            | SET_COOKIE
            | TE
            | TRAILER
            | TRANSFER_ENCODING
    )
}

/// How a reply's body is delimited.
#[derive(Debug)]
pub(super) enum ReplyFraming {
    /// The number of bytes that are still to be read.
    Length(u64),
    Chunked(ChunkDecoder),
    UntilClose,
}

/// The head of a reply.
#[derive(Debug)]
pub(super) struct ReplyHead {
    pub(super) response: Response<()>,
    pub(super) framing: ReplyFraming,
    /// Whether the upstream keeps the connection open after the reply.
    pub(super) keeps_alive: bool,
    /// The upstream's `Keep-Alive: timeout=`, in seconds.
    pub(super) keep_alive_secs: Option<u32>,
}

/// Where a header is in the head.
#[derive(Clone, Copy, Default)]
struct HeaderSpan {
    name: (u32, u32),
    value: (u32, u32),
}

struct ParsedHead {
    len: usize,
    status: u16,
    is_http11: bool,
    header_count: usize,
    /// The reason, unless it is the usual one of the status.
    reason: Option<ReasonPhrase>,
}

/// Removes a head from the beginning of `input`. `None`: the head is incomplete.
pub(super) fn decode_head(input: &mut BytesMut, method: &Method) -> Result<Option<ReplyHead>, String> {
    let mut spans = [HeaderSpan::default(); USUAL_HEADERS];
    match parse_head(input, &mut [const { MaybeUninit::uninit() }; USUAL_HEADERS], &mut spans) {
        Err(httparse::Error::TooManyHeaders) => {}
        Err(why) => return Err(format!("the reply is malformed: {why}")),
        Ok(None) => return Ok(None),
        Ok(Some(parsed)) => return build_head(input, parsed, &spans, method).map(Some),
    }
    let mut spans = vec![HeaderSpan::default(); MAX_REPLY_HEADERS];
    match parse_head(input, &mut vec![MaybeUninit::uninit(); MAX_REPLY_HEADERS], &mut spans) {
        Err(why) => Err(format!("the reply is malformed: {why}")),
        Ok(None) => Ok(None),
        Ok(Some(parsed)) => build_head(input, parsed, &spans, method).map(Some),
    }
}

fn parse_head<'b>(
    input: &'b [u8], headers: &mut [MaybeUninit<Header<'b>>], spans: &mut [HeaderSpan],
) -> Result<Option<ParsedHead>, httparse::Error> {
    let mut reply = httparse::Response::new(&mut []);
    let config = ParserConfig::default();
    let Status::Complete(len) = config.parse_response_with_uninit_headers(&mut reply, input, headers)? else {
        return Ok(None);
    };
    let start = input.as_ptr() as usize;
    // Heads are shorter than 4 GiB.
    let span = |part: &[u8]| ((part.as_ptr() as usize - start) as u32, part.len() as u32);
    for (header, at) in reply.headers.iter().zip(spans) {
        *at = HeaderSpan { name: span(header.name.as_bytes()), value: span(header.value) };
    }
    let (status, reason) = (reply.code.unwrap_or_default(), reply.reason.unwrap_or_default());
    let usual = StatusCode::from_u16(status).ok().and_then(|status| status.canonical_reason());
    let reason = if usual == Some(reason) { None } else { ReasonPhrase::try_from(reason.as_bytes()).ok() };
    let (is_http11, header_count) = (reply.version == Some(1), reply.headers.len());
    Ok(Some(ParsedHead { len, status, is_http11, header_count, reason }))
}

fn build_head(
    input: &mut BytesMut, parsed: ParsedHead, spans: &[HeaderSpan], method: &Method,
) -> Result<ReplyHead, String> {
    let head = input.split_to(parsed.len).freeze();
    let status = StatusCode::from_u16(parsed.status).map_err(|why| why.to_string())?;
    let mut response = Response::new(());
    *response.status_mut() = status;
    if !parsed.is_http11 {
        *response.version_mut() = Version::HTTP_10;
    }
    if let Some(reason) = parsed.reason {
        response.extensions_mut().insert(reason);
    }
    let headers = response.headers_mut();
    headers.reserve(parsed.header_count);
    let (mut length, mut last_coding) = (None, None);
    let (mut keeps_alive, mut closes, mut keep_alive_secs) = (parsed.is_http11, false, None);
    for HeaderSpan { name, value } in &spans[..parsed.header_count] {
        let range = |(from, len): (u32, u32)| from as usize..from as usize + len as usize;
        let name = HeaderName::from_bytes(&head[range(*name)]).map_err(|why| why.to_string())?;
        let value = HeaderValue::from_maybe_shared(head.slice(range(*value))).map_err(|why| why.to_string())?;
        match name {
            CONTENT_LENGTH => length = add_length(length, &value),
            TRANSFER_ENCODING => last_coding = Some(is_chunked(&value)),
            CONNECTION => {
                closes |= has_token(&value, "close");
                keeps_alive |= has_token(&value, "keep-alive");
            }
            ref name if name == "keep-alive" => keep_alive_secs = keep_alive_secs.or(keep_alive_timeout(&value)),
            _ => {}
        }
        headers.append(name, value);
    }
    let mut keeps_alive = keeps_alive && !closes;
    let has_no_body = status.is_informational() || matches!(status.as_u16(), 204 | 304) || *method == Method::HEAD;
    let framing = match (last_coding, length) {
        _ if has_no_body => ReplyFraming::Length(0),
        (Some(_), _) if !parsed.is_http11 => return Err("an HTTP/1.0 reply has a transfer coding".to_owned()),
        (Some(is_chunked), length) => {
            if length.is_some() {
                // The coding counts. A peer that believes the length would find another end.
                keeps_alive = false;
                headers.remove(CONTENT_LENGTH);
            }
            if is_chunked { ReplyFraming::Chunked(ChunkDecoder::default()) } else { ReplyFraming::UntilClose }
        }
        (None, Some(length)) => ReplyFraming::Length(length.map_err(|()| "the reply's length is malformed")?),
        (None, None) => ReplyFraming::UntilClose,
    };
    keeps_alive &= !matches!(framing, ReplyFraming::UntilClose);
    Ok(ReplyHead { response, framing, keeps_alive, keep_alive_secs })
}

/// Adds a `Content-Length` line. All lengths must be equal.
fn add_length(known: Option<Result<u64, ()>>, line: &HeaderValue) -> Option<Result<u64, ()>> {
    line.as_bytes().split(|byte| *byte == b',').fold(known, |known, length| {
        let length = parse_decimal(length.trim_ascii()).ok_or(());
        Some(if known.is_none_or(|known| known == length) { length } else { Err(()) })
    })
}

fn parse_decimal(digits: &[u8]) -> Option<u64> {
    let add = |number: u64, digit: &u8| {
        let digit = digit.is_ascii_digit().then(|| u64::from(digit - b'0'))?;
        number.checked_mul(10)?.checked_add(digit)
    };
    if digits.is_empty() { None } else { digits.iter().try_fold(0, add) }
}

fn encode_decimal(out: &mut Vec<u8>, mut number: u64) {
    let (mut digits, mut from) = ([0; 20], 20);
    loop {
        from -= 1;
        digits[from] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[from..]);
}

fn has_token(line: &HeaderValue, token: &str) -> bool {
    let tokens = line.as_bytes().split(|byte| *byte == b',');
    tokens.into_iter().any(|one| one.trim_ascii().eq_ignore_ascii_case(token.as_bytes()))
}

/// Whether `chunked` is the last transfer coding of a line.
fn is_chunked(line: &HeaderValue) -> bool {
    let last = line.as_bytes().rsplit(|byte| *byte == b',').next();
    last.is_some_and(|coding| coding.trim_ascii().eq_ignore_ascii_case(b"chunked"))
}

fn keep_alive_timeout(line: &HeaderValue) -> Option<u32> {
    line.to_str().ok()?.split(',').find_map(|part| {
        let (name, number) = part.split_once('=')?;
        let number = number.trim().trim_matches('"');
        name.trim().eq_ignore_ascii_case("timeout").then(|| number.parse().ok()).flatten()
    })
}

/// Decodes a chunked body.
#[derive(Debug, Default)]
pub(super) struct ChunkDecoder {
    part: ChunkPart,
    /// The number of bytes that are left of the current chunk.
    left: u64,
    extension_bytes: usize,
}

#[derive(Debug, Default, Clone, Copy)]
enum ChunkPart {
    #[default]
    Size,
    Data,
    DataEnd,
    Trailers,
}

#[derive(Debug, PartialEq)]
pub(super) enum DecodedChunk {
    Data(Bytes),
    End(Option<HeaderMap>),
    /// More bytes must be read first.
    Incomplete,
}

impl ChunkDecoder {
    /// Removes the next piece from the beginning of `input`.
    pub(super) fn decode(&mut self, input: &mut BytesMut) -> Result<DecodedChunk, String> {
        loop {
            match self.part {
                ChunkPart::Size => {
                    let Some((size, line_len, extension_len)) = parse_chunk_line(input)? else {
                        return self.wait_for_more(input.len());
                    };
                    self.extension_bytes += extension_len;
                    self.wait_for_more(0)?;
                    input.advance(line_len);
                    self.left = size;
                    self.part = if size == 0 { ChunkPart::Trailers } else { ChunkPart::Data };
                }
                ChunkPart::Data if input.is_empty() => return Ok(DecodedChunk::Incomplete),
                ChunkPart::Data => {
                    let len = usize::try_from(self.left).unwrap_or(usize::MAX).min(input.len());
                    self.left -= len as u64;
                    if self.left == 0 {
                        self.part = ChunkPart::DataEnd;
                    }
                    return Ok(DecodedChunk::Data(input.split_to(len).freeze()));
                }
                ChunkPart::DataEnd => {
                    if !b"\r\n".starts_with(&input[..input.len().min(2)]) {
                        return Err("a chunk is longer than its size".to_owned());
                    }
                    if input.len() < 2 {
                        return Ok(DecodedChunk::Incomplete);
                    }
                    input.advance(2);
                    self.part = ChunkPart::Size;
                }
                ChunkPart::Trailers => {
                    let Some((trailers, len)) = parse_trailers(input)? else {
                        return self.wait_for_more(input.len());
                    };
                    input.advance(len);
                    return Ok(DecodedChunk::End(trailers));
                }
            }
        }
    }

    /// Checks the size of what is neither data nor needed: `pending` bytes of an incomplete line, and extensions.
    fn wait_for_more(&self, pending: usize) -> Result<DecodedChunk, String> {
        let is_long = pending >= MAX_CHUNK_META_BYTES || self.extension_bytes >= MAX_CHUNK_META_BYTES;
        if is_long {
            Err("the trailers or chunk extensions are too long".to_owned())
        } else {
            Ok(DecodedChunk::Incomplete)
        }
    }
}

/// Parses the line before a chunk: returns the size, and the lengths of the line and of its extension.
fn parse_chunk_line(input: &[u8]) -> Result<Option<(u64, usize, usize)>, String> {
    let bad = |why: &str| Err(format!("a chunk size is malformed: {why}"));
    let digits = input.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
    let mut size = 0_u64;
    for digit in &input[..digits] {
        let digit = (*digit as char).to_digit(16).unwrap_or_default();
        match size.checked_mul(16) {
            Some(shifted) => size = shifted + u64::from(digit),
            None => return bad("it is too large"),
        }
    }
    let spaces = input[digits..].iter().take_while(|byte| matches!(byte, b' ' | b'\t')).count();
    let rest = &input[digits + spaces..];
    let extension = match rest.first() {
        _ if digits == 0 && !input.is_empty() => return bad("it has no digit"),
        None => return Ok(None),
        Some(b';') => rest.iter().take_while(|byte| !matches!(byte, b'\r' | b'\n')).count(),
        Some(b'\r') => 0,
        Some(_) => return bad("another byte follows"),
    };
    match rest[extension..] {
        [] | [b'\r'] => Ok(None),
        [b'\r', b'\n', ..] => Ok(Some((size, digits + spaces + extension + 2, extension))),
        _ => bad("its line does not end with CR LF"),
    }
}

/// Parses the end of a chunked body: returns the trailers and the length.
fn parse_trailers(input: &[u8]) -> Result<Option<(Option<HeaderMap>, usize)>, String> {
    if input.starts_with(b"\r\n") {
        return Ok(Some((None, 2)));
    }
    if input.is_empty() || input == b"\r" {
        return Ok(None);
    }
    let bad = |why: String| format!("the trailers are malformed: {why}");
    let mut lines = vec![httparse::EMPTY_HEADER; MAX_REPLY_HEADERS];
    match httparse::parse_headers(input, &mut lines).map_err(|why| bad(why.to_string()))? {
        Status::Partial => Ok(None),
        Status::Complete((len, lines)) => {
            let mut trailers = HeaderMap::with_capacity(lines.len());
            for line in lines {
                let name = HeaderName::from_bytes(line.name.as_bytes()).map_err(|why| bad(why.to_string()))?;
                trailers.append(name, HeaderValue::from_bytes(line.value).map_err(|why| bad(why.to_string()))?);
            }
            Ok(Some((Some(trailers), len)))
        }
    }
}

pub(super) mod fuzzing;
#[cfg(test)]
mod tests;
