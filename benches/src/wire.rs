//! Request bytes and response framing for the load generator: only what a benchmark needs of HTTP/1.1, as cheap as it gets.

use ibid_count::json_body;

/// Digits of the part of a key that changes from request to request.
const SERIAL_DIGITS: usize = 16;

/// A POST whose bytes are ready to send; only the key's serial number is patched between requests.
#[derive(Clone, Debug)]
pub struct PreparedRequest {
    bytes: Vec<u8>,
    serial_at: usize,
}

impl PreparedRequest {
    /// A request to `path` with a JSON body of `body_bytes`. All its keys begin with `namespace`.
    #[must_use]
    pub fn new(host: &str, path: &str, namespace: u64, body_bytes: usize) -> Self {
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer bench\r\nContent-Type: application/json\r\n\
             Content-Length: {body_bytes}\r\nIdempotency-Key: {namespace:016x}"
        );
        let serial_at = head.len();
        let mut bytes = head.into_bytes();
        bytes.extend([b'0'; SERIAL_DIGITS]);
        bytes.extend(b"\r\n\r\n");
        bytes.extend(json_body(body_bytes).into_bytes());
        Self { bytes, serial_at }
    }

    /// Gives the request the key with this serial number.
    pub fn set_serial(&mut self, serial: u64) {
        let digits = &mut self.bytes[self.serial_at..self.serial_at + SERIAL_DIGITS];
        for (place, digit) in digits.iter_mut().rev().enumerate() {
            *digit = b"0123456789abcdef"[(serial >> (4 * place)) as usize & 0xf];
        }
    }

    /// What goes over the wire.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// A response whose bytes have all arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResponseFrame {
    /// The status code.
    pub status: u16,
    /// Length of head and body together, that is where the next response begins.
    pub len: usize,
    /// Where the body (still chunked, if it was) begins.
    pub body_at: usize,
}

/// A response the generator cannot frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MalformedResponse(pub &'static str);

/// Looks for one whole response at the start of `bytes`; `None` means that more must be read.
///
/// # Errors
/// [`MalformedResponse`] if no number of further bytes would help.
pub fn parse_response(bytes: &[u8]) -> Result<Option<ResponseFrame>, MalformedResponse> {
    let Some(end) = find(bytes, b"\r\n\r\n") else {
        return Ok(None);
    };
    let head = &bytes[..end];
    let body_at = end + 4;
    let digits = head
        .strip_prefix(b"HTTP/1.1 ")
        .and_then(|rest| rest.get(..3))
        .ok_or(MalformedResponse("no HTTP/1.1 status line"))?;
    let status = u16::try_from(parse_number(digits, 10)?).map_err(|_| MalformedResponse("status"))?;
    let body_len = match parse_framing(head)? {
        _ if matches!(status, 204 | 304) => Some(0),
        ResponseFraming::Length(len) => Some(len),
        ResponseFraming::Chunked => chunked_len(&bytes[body_at..])?,
        ResponseFraming::UntilClose => {
            return Err(MalformedResponse("a response without Content-Length or chunks"));
        }
    };
    Ok(body_len.and_then(|len| body_at.checked_add(len)).filter(|len| *len <= bytes.len()).map(|len| ResponseFrame {
        status,
        len,
        body_at,
    }))
}

enum ResponseFraming {
    Length(usize),
    Chunked,
    UntilClose,
}

fn parse_framing(head: &[u8]) -> Result<ResponseFraming, MalformedResponse> {
    let mut found = ResponseFraming::UntilClose;
    let mut rest = head;
    while let Some(at) = find(rest, b"\r\n") {
        rest = &rest[at + 2..];
        // Two letters decide for nearly every line that it is of no interest.
        match rest {
            [b'c' | b'C', b'o' | b'O', ..] => {
                if let Some(value) = header_value(rest, b"content-length:") {
                    found = ResponseFraming::Length(parse_number(value, 10)?);
                }
            }
            [b't' | b'T', b'r' | b'R', ..] if header_value(rest, b"transfer-encoding:").is_some_and(is_chunked) => {
                return Ok(ResponseFraming::Chunked);
            }
            _ => {}
        }
    }
    Ok(found)
}

fn is_chunked(value: &[u8]) -> bool {
    value.eq_ignore_ascii_case(b"chunked")
}

fn header_value<'a>(line: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let (start, rest) = line.split_at_checked(name.len())?;
    let end = find(rest, b"\r\n").unwrap_or(rest.len());
    start.eq_ignore_ascii_case(name).then(|| rest[..end].trim_ascii())
}

/// Length of a whole chunked body including its trailers; `None` while it is incomplete.
fn chunked_len(body: &[u8]) -> Result<Option<usize>, MalformedResponse> {
    let mut at = 0;
    loop {
        let Some(line) = find(&body[at..], b"\r\n") else {
            return Ok(None);
        };
        let size = body[at..at + line].split(|byte| *byte == b';').next().unwrap_or_default();
        let size = parse_number(size.trim_ascii(), 16)?;
        at += line + 2;
        if size == 0 {
            break;
        }
        at = at.checked_add(size + 2).ok_or(MalformedResponse("chunk size"))?;
        if at > body.len() {
            return Ok(None);
        }
    }
    loop {
        let Some(line) = find(&body[at..], b"\r\n") else {
            return Ok(None);
        };
        at += line + 2;
        if line == 0 {
            return Ok(Some(at));
        }
    }
}

fn parse_number(digits: &[u8], radix: u32) -> Result<usize, MalformedResponse> {
    if digits.is_empty() || digits.len() > 8 {
        return Err(MalformedResponse("a number of no or too many digits"));
    }
    digits.iter().try_fold(0_usize, |sum, digit| {
        let value = char::from(*digit).to_digit(radix).ok_or(MalformedResponse("not a number"))?;
        Ok(sum * radix as usize + value as usize)
    })
}

/// Where `needle`, which begins with a carriage return, begins in `hay`.
fn find(hay: &[u8], needle: &[u8]) -> Option<usize> {
    let mut from = 0;
    while let Some(at) = hay[from..].iter().position(|byte| *byte == b'\r') {
        if hay[from + at..].starts_with(needle) {
            return Some(from + at);
        }
        from += at + 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_have_exactly_the_size_asked_for() {
        for bytes in [2, 20, 53, 54, 55, 300, 301, 1024, 16 * 1024] {
            let body = json_body(bytes);
            assert_eq!(body.len(), bytes, "{body}");
            assert!(!body.contains(char::is_control));
        }
    }

    #[test]
    fn the_serial_is_the_end_of_the_key() {
        let mut request = PreparedRequest::new("h", "/p", 0xabc, 300);
        request.set_serial(0x1f);
        let text = String::from_utf8(request.bytes().to_vec()).unwrap();
        assert!(text.contains("Idempotency-Key: 0000000000000abc000000000000001f\r\n\r\n{"), "{text}");
        assert!(text.contains("Content-Length: 300\r\n"), "{text}");
    }

    /// Every proper prefix must ask for more, the whole must be recognised, and a following response must not matter.
    fn framed(bytes: &[u8], status: u16) {
        for cut in 0..bytes.len() {
            assert_eq!(parse_response(&bytes[..cut]), Ok(None), "cut at {cut}");
        }
        let more = [bytes, b"HTTP/1.1 200"].concat();
        let found = parse_response(&more).unwrap().unwrap();
        assert_eq!((found.status, found.len), (status, bytes.len()));
    }

    #[test]
    fn responses_are_framed_by_length_or_chunks() {
        framed(b"HTTP/1.1 201 Created\r\nDate: x\r\nConnection: keep-alive\r\ncontent-length: 5\r\n\r\nhello", 201);
        framed(b"HTTP/1.1 409 Conflict\r\nContent-Length:0\r\n\r\n", 409);
        framed(b"HTTP/1.1 204 No Content\r\nDate: x\r\n\r\n", 204);
        framed(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\nhello\r\nA\r\n0123456789\r\n0\r\n\r\n",
            200,
        );
        framed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\n\r\r\n0\r\nA: b\r\n\r\n", 200);
    }

    #[test]
    fn what_cannot_be_framed_is_refused() {
        for bytes in [
            &b"HTTP/1.1 200 OK\r\nDate: x\r\n\r\n"[..],
            b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        ] {
            assert!(parse_response(bytes).is_err(), "{}", String::from_utf8_lossy(bytes));
        }
    }
}
