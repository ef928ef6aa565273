//! The server's side of the Redis protocol: reads commands, writes replies.

use bytes::Bytes;

/// What the server answers.
#[derive(Debug, Clone, PartialEq)]
pub enum ServerReply {
    /// Nothing is there.
    Nil,
    /// A status, such as `OK`.
    Status(&'static str),
    /// A number.
    Int(i64),
    /// A string.
    Bytes(Bytes),
    /// A list.
    Array(Vec<ServerReply>),
    /// An error: a code in capitals, then text.
    Error(String),
}

impl ServerReply {
    /// The status of a command that did what it was asked.
    pub const OK: Self = Self::Status("OK");

    /// A string.
    pub fn text(text: impl Into<String>) -> Self {
        Self::Bytes(text.into().into())
    }

    /// Appends the reply in RESP3.
    pub fn encode(&self, buffer: &mut Vec<u8>) {
        match self {
            Self::Nil => buffer.extend_from_slice(b"_\r\n"),
            Self::Status(status) => buffer.extend_from_slice(format!("+{status}\r\n").as_bytes()),
            Self::Int(number) => buffer.extend_from_slice(format!(":{number}\r\n").as_bytes()),
            Self::Error(error) => buffer.extend_from_slice(format!("-{error}\r\n").as_bytes()),
            Self::Bytes(bytes) => {
                buffer.extend_from_slice(format!("${}\r\n", bytes.len()).as_bytes());
                buffer.extend_from_slice(bytes);
                buffer.extend_from_slice(b"\r\n");
            }
            Self::Array(parts) => {
                buffer.extend_from_slice(format!("*{}\r\n", parts.len()).as_bytes());
                parts.iter().for_each(|part| part.encode(buffer));
            }
        }
    }
}

/// The message that these keys are not as they were read.
pub fn invalidation(key: &Bytes) -> Vec<u8> {
    let mut message = b">2\r\n$10\r\ninvalidate\r\n".to_vec();
    ServerReply::Array(vec![ServerReply::Bytes(key.clone())]).encode(&mut message);
    message
}

/// Takes the first command from the buffer, if it has arrived in full.
///
/// # Panics
/// If the client does not speak the protocol.
pub fn take_command(buffer: &mut Vec<u8>) -> Option<Vec<Bytes>> {
    let mut at = 0;
    let count = number_line(buffer, &mut at, b'*')?;
    let mut args = Vec::with_capacity(count);
    for _ in 0..count {
        let length = number_line(buffer, &mut at, b'$')?;
        let arg = buffer.get(at..at + length + 2)?.strip_suffix(b"\r\n").expect("a string ends with a line end");
        args.push(Bytes::copy_from_slice(arg));
        at += length + 2;
    }
    buffer.drain(..at);
    Some(args)
}

fn number_line(buffer: &[u8], at: &mut usize, kind: u8) -> Option<usize> {
    let rest = buffer.get(*at..)?;
    let end = rest.windows(2).position(|pair| pair == b"\r\n")?;
    assert_eq!(rest[0], kind, "the client does not speak the protocol");
    *at += end + 2;
    Some(std::str::from_utf8(&rest[1..end]).ok()?.parse().expect("a number"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_taken_once_it_is_complete() {
        let whole = b"*2\r\n$3\r\nGET\r\n$4\r\na\r\nb\r\n*1\r\n$4\r\nPING\r\n";
        for cut in 0..23 {
            assert_eq!(take_command(&mut whole[..cut].to_vec()), None, "{cut} bytes");
        }
        let mut buffer = whole.to_vec();
        assert_eq!(take_command(&mut buffer).unwrap(), ["GET", "a\r\nb"]);
        assert_eq!(take_command(&mut buffer).unwrap(), ["PING"]);
        assert!(buffer.is_empty());
    }
}
