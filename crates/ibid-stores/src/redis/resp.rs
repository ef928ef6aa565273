//! The Redis protocol (RESP2 and RESP3): commands are encoded into a buffer, replies are parsed from one.

use bytes::Bytes;

use super::error::RedisCallError;

/// Maximum nesting of a reply.
const MAX_DEPTH: u32 = 8;
/// Maximum length of a string, as of the server.
const MAX_BULK_BYTES: usize = 512 << 20;
/// Maximum number of elements of an array.
const MAX_ELEMENTS: usize = 1 << 24;

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Reply {
    Nil,
    Ok,
    Int(i64),
    Bytes(Bytes),
    /// An array, a set, or a map as a list of keys and values.
    Array(Vec<Reply>),
    /// A message that answers no command.
    Push(Vec<Reply>),
    Error(RedisCallError),
}

impl Reply {
    /// Converts an error reply into an error.
    pub(super) fn ok(self) -> Result<Self, RedisCallError> {
        match self {
            Self::Error(error) => Err(error),
            reply => Ok(reply),
        }
    }

    pub(super) fn as_bytes(&self) -> Option<&Bytes> {
        match self {
            Self::Bytes(bytes) => Some(bytes),
            _ => None,
        }
    }
}

/// Appends a command.
pub(super) fn encode_command(buffer: &mut Vec<u8>, args: &[&[u8]]) {
    buffer.reserve(8 + args.iter().map(|arg| arg.len() + 16).sum::<usize>());
    encode_header(buffer, args.len());
    for arg in args {
        encode_arg(buffer, arg);
    }
}

/// Appends the start of a command of `count` arguments, its name included.
pub(super) fn encode_header(buffer: &mut Vec<u8>, count: usize) {
    buffer.push(b'*');
    encode_number(buffer, count as u64);
    buffer.extend_from_slice(b"\r\n");
}

pub(super) fn encode_arg(buffer: &mut Vec<u8>, arg: &[u8]) {
    encode_arg_length(buffer, arg.len());
    buffer.extend_from_slice(arg);
    buffer.extend_from_slice(b"\r\n");
}

/// Appends the start of an argument of this length. The argument and a line end must follow.
pub(super) fn encode_arg_length(buffer: &mut Vec<u8>, length: usize) {
    buffer.push(b'$');
    encode_number(buffer, length as u64);
    buffer.extend_from_slice(b"\r\n");
}

fn encode_number(buffer: &mut Vec<u8>, number: u64) {
    let mut digits = [0; 20];
    buffer.extend_from_slice(decimal(number, &mut digits));
}

/// Writes a number in decimal to the end of `digits`, and returns the part that was written.
pub(super) fn decimal(mut number: u64, digits: &mut [u8; 20]) -> &[u8] {
    let mut first = digits.len();
    loop {
        first -= 1;
        digits[first] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            return &digits[first..];
        }
    }
}

/// Parses one reply at the start of the buffer. Returns it with its length, or `None` if it is incomplete.
pub(super) fn parse_reply(buffer: &[u8]) -> Result<Option<(Reply, usize)>, String> {
    let mut parser = Parser { buffer, at: 0 };
    Ok(parser.reply(0)?.map(|reply| (reply, parser.at)))
}

/// The length of the reply at the start of the buffer, for the fuzzer.
#[doc(hidden)]
pub fn reply_length(buffer: &[u8]) -> Result<Option<usize>, String> {
    Ok(parse_reply(buffer)?.map(|(_, length)| length))
}

struct Parser<'a> {
    buffer: &'a [u8],
    at: usize,
}

impl<'a> Parser<'a> {
    /// Returns the bytes up to the next line end.
    fn line(&mut self) -> Option<&'a [u8]> {
        let rest = &self.buffer[self.at..];
        let mut from = 0;
        loop {
            let end = from + rest[from..].iter().position(|byte| *byte == b'\r')?;
            if *rest.get(end + 1)? == b'\n' {
                self.at += end + 2;
                return Some(&rest[..end]);
            }
            from = end + 1;
        }
    }

    fn reply(&mut self, depth: u32) -> Result<Option<Reply>, String> {
        if depth > MAX_DEPTH {
            return Err("a reply is nested too deeply".into());
        }
        let Some(line) = self.line() else { return Ok(None) };
        let Some((kind, rest)) = line.split_first() else { return Err("a reply starts with an empty line".into()) };
        Ok(Some(match kind {
            b'+' if rest == b"OK" => Reply::Ok,
            b'+' | b',' | b'(' => Reply::Bytes(Bytes::copy_from_slice(rest)),
            b'-' => Reply::Error(RedisCallError::from_server(rest)),
            b':' => Reply::Int(number(rest)?),
            b'#' => Reply::Int(i64::from(rest == b"t")),
            b'_' => Reply::Nil,
            b'$' | b'=' | b'!' => return self.bulk(*kind, number(rest)?),
            b'*' | b'~' | b'%' | b'>' => return self.elements(*kind, number(rest)?, depth),
            // Attributes precede a reply, and nothing here asks for them.
            b'|' => {
                let Some(_) = self.elements(b'%', number(rest)?, depth)? else { return Ok(None) };
                return self.reply(depth + 1);
            }
            other => return Err(format!("a reply starts with byte {other:#04x}")),
        }))
    }

    fn bulk(&mut self, kind: u8, length: i64) -> Result<Option<Reply>, String> {
        let Ok(length) = usize::try_from(length) else { return Ok(Some(Reply::Nil)) };
        if length > MAX_BULK_BYTES {
            return Err(format!("a reply has {length} bytes"));
        }
        let Some(bytes) = self.buffer.get(self.at..self.at + length + 2) else { return Ok(None) };
        self.at += length + 2;
        let Some(bytes) = bytes.strip_suffix(b"\r\n") else { return Err("a string does not end where it says".into()) };
        Ok(Some(match kind {
            b'!' => Reply::Error(RedisCallError::from_server(bytes)),
            // The format of a verbatim string comes first: `txt:`.
            b'=' => Reply::Bytes(Bytes::copy_from_slice(bytes.get(4..).unwrap_or_default())),
            _ => Reply::Bytes(Bytes::copy_from_slice(bytes)),
        }))
    }

    fn elements(&mut self, kind: u8, count: i64, depth: u32) -> Result<Option<Reply>, String> {
        let Ok(count) = usize::try_from(count) else { return Ok(Some(Reply::Nil)) };
        let count = if kind == b'%' { count.saturating_mul(2) } else { count };
        if count > MAX_ELEMENTS {
            return Err(format!("a reply has {count} elements"));
        }
        let mut elements = Vec::with_capacity(count.min(1024));
        for _ in 0..count {
            let Some(element) = self.reply(depth + 1)? else { return Ok(None) };
            elements.push(element);
        }
        Ok(Some(if kind == b'>' { Reply::Push(elements) } else { Reply::Array(elements) }))
    }
}

fn number(digits: &[u8]) -> Result<i64, String> {
    let digits = std::str::from_utf8(digits).ok().and_then(|digits| digits.parse().ok());
    digits.ok_or_else(|| "a reply has a number that is not one".into())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parsed(text: &[u8]) -> Reply {
        let (reply, length) = parse_reply(text).unwrap().expect("it is complete");
        assert_eq!(length, text.len());
        for cut in 0..text.len() {
            assert_eq!(parse_reply(&text[..cut]).unwrap(), None, "{cut} bytes of it");
        }
        reply
    }

    #[test]
    fn commands_are_encoded() {
        let mut buffer = Vec::new();
        encode_command(&mut buffer, &[b"SET", b"k", b"a\r\nb", b"", b"1234567890"]);
        assert_eq!(buffer, b"*5\r\n$3\r\nSET\r\n$1\r\nk\r\n$4\r\na\r\nb\r\n$0\r\n\r\n$10\r\n1234567890\r\n");
        assert_eq!(decimal(u64::MAX, &mut [0; 20]), u64::MAX.to_string().as_bytes());
    }

    #[test]
    fn both_versions_of_the_protocol_are_read() {
        let bytes = |text: &'static str| Reply::Bytes(text.into());
        assert_eq!(parsed(b"+OK\r\n"), Reply::Ok);
        assert_eq!(parsed(b":-7\r\n"), Reply::Int(-7));
        for nil in [&b"$-1\r\n"[..], b"*-1\r\n", b"_\r\n"] {
            assert_eq!(parsed(nil), Reply::Nil);
        }
        assert_eq!(parsed(b"$4\r\na\r\nb\r\n"), bytes("a\r\nb"));
        assert_eq!(parsed(b"=8\r\ntxt:text\r\n"), bytes("text"));
        assert_eq!(
            parsed(b"%1\r\n+a\r\n*1\r\n:1\r\n"),
            Reply::Array(vec![bytes("a"), Reply::Array(vec![Reply::Int(1)])])
        );
        let keys = Reply::Array(vec![bytes("k")]);
        assert_eq!(
            parsed(b">2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\nk\r\n"),
            Reply::Push(vec![bytes("invalidate"), keys])
        );
        assert!(matches!(parsed(b"-MOVED 1 h:2\r\n"), Reply::Error(error) if error.has_code("MOVED")));
    }

    #[test]
    fn what_is_no_reply_is_refused() {
        for wrong in [&b"?\r\n"[..], b"\r\n", b":x\r\n", b"$1\r\nabc", b"$99999999999\r\n", b"*99999999999\r\n"] {
            assert!(parse_reply(wrong).is_err(), "{wrong:?}");
        }
        assert!(parse_reply(&b"*1\r\n".repeat(20)).is_err(), "nested too deeply");
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(prop_oneof![any::<u8>(), Just(b'\r'), Just(b'\n'), Just(b'*'), Just(b'$'), b'0'..=b'9'], 0..60)) {
            let _ = parse_reply(&bytes);
        }
    }
}
