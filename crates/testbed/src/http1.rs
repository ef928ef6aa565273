//! Reads HTTP/1.1 from the wire without interpretation.
//!
//! Both ends of the harness, [`TestUpstream`](crate::upstream::TestUpstream) and
//! [`RawClient`](crate::client::RawClient), use it, so a test sees exactly what was sent: the order and spelling of
//! headers, trailers, interim responses, half a body. Nothing here repairs or hides anything.

use std::{io, ops::Deref, time::Duration};

use tokio::{io::AsyncReadExt as _, net::tcp::OwnedReadHalf};

/// Maximum time of any single wait of the harness.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum length of a line in bytes, so that a faulty peer cannot fill the memory.
const MAX_LINE_BYTES: usize = 1 << 20;

/// Header or trailer fields in the order and spelling in which they were sent.
///
/// A value is text: valid UTF-8 as such, otherwise each byte is the character of that number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeaderList(Vec<(String, String)>);

impl HeaderList {
    /// The first value of `name`, ignoring case.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(other, _)| other.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    pub fn get_all(&self, name: &str) -> Vec<&str> {
        self.iter().filter(|(other, _)| other.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str()).collect()
    }

    pub fn contains(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    pub(crate) fn push(&mut self, name: impl Into<String>, value: impl Into<String>) {
        self.0.push((name.into(), value.into()));
    }

    /// Whether the list-valued header `name` has the element `token`.
    pub(crate) fn has_token(&self, name: &str, token: &str) -> bool {
        self.get_all(name).iter().flat_map(|value| value.split(',')).any(|it| it.trim().eq_ignore_ascii_case(token))
    }
}

impl Deref for HeaderList {
    type Target = [(String, String)];

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl From<&http::HeaderMap> for HeaderList {
    fn from(map: &http::HeaderMap) -> Self {
        HeaderList(map.iter().map(|(name, value)| (name.to_string(), to_text(value.as_bytes()))).collect())
    }
}

/// Converts bytes to text without loss of information.
pub(crate) fn to_text(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().map(|byte| char::from(*byte)).collect(),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyFraming {
    Length(usize),
    Chunked,
    UntilClose,
}

impl BodyFraming {
    /// Returns the framing by the headers, or `otherwise` if they do not define it.
    pub(crate) fn of(headers: &HeaderList, otherwise: BodyFraming) -> io::Result<BodyFraming> {
        if headers.has_token("transfer-encoding", "chunked") {
            return Ok(BodyFraming::Chunked);
        }
        let Some(length) = headers.get("content-length") else { return Ok(otherwise) };
        let parsed = length.parse().map(BodyFraming::Length);
        parsed.map_err(|_| malformed(format!("content-length is {length:?}")))
    }
}

/// The reading half of a connection, message by message.
#[derive(Debug)]
pub(crate) struct MessageReader {
    half: OwnedReadHalf,
    /// Everything since the start of the current message, so that a failure can show it.
    buffer: Vec<u8>,
    /// How much of the buffer is parsed.
    position: usize,
}

impl MessageReader {
    pub(crate) fn new(half: OwnedReadHalf) -> Self {
        MessageReader { half, buffer: Vec::new(), position: 0 }
    }

    /// Drops the message just read and waits for the first byte of the next one. Returns `false` if the peer closed.
    pub(crate) async fn next_message(&mut self) -> io::Result<bool> {
        self.buffer.drain(..self.position);
        self.position = 0;
        if self.buffer.is_empty() { self.fill().await } else { Ok(true) }
    }

    pub(crate) fn received(&self) -> &[u8] {
        &self.buffer
    }

    /// Reads more bytes. Returns `false` at the end. Cancel-safe.
    pub(crate) async fn fill(&mut self) -> io::Result<bool> {
        self.buffer.reserve(16 << 10);
        Ok(self.half.read_buf(&mut self.buffer).await? > 0)
    }

    /// Returns once the peer has closed or reset the connection. Cancel-safe; bytes that arrive meanwhile are kept.
    pub(crate) async fn wait_closed(&mut self) {
        while let Ok(true) = self.fill().await {}
    }

    async fn fill_or_fail(&mut self) -> io::Result<()> {
        if self.fill().await? {
            return Ok(());
        }
        Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the connection was closed in the middle of a message"))
    }

    pub(crate) async fn read_line(&mut self) -> io::Result<String> {
        let mut searched = self.position;
        loop {
            if let Some(found) = self.buffer[searched..].iter().position(|byte| *byte == b'\n') {
                let end = searched + found;
                let line = &self.buffer[self.position..end];
                let line = to_text(line.strip_suffix(b"\r").unwrap_or(line));
                self.position = end + 1;
                return Ok(line);
            }
            searched = self.buffer.len();
            if searched - self.position > MAX_LINE_BYTES {
                return Err(malformed("a line has no end"));
            }
            self.fill_or_fail().await?;
        }
    }

    /// Reads header or trailer fields, up to and including the empty line.
    pub(crate) async fn read_fields(&mut self) -> io::Result<HeaderList> {
        let mut headers = HeaderList::default();
        loop {
            let line = self.read_line().await?;
            if line.is_empty() {
                return Ok(headers);
            }
            let Some((name, value)) = line.split_once(':') else {
                return Err(malformed(format!("no colon in the header line {line:?}")));
            };
            headers.push(name, value.trim_matches([' ', '\t']));
        }
    }

    pub(crate) async fn read_exactly(&mut self, length: usize) -> io::Result<Vec<u8>> {
        while self.buffer.len() - self.position < length {
            self.fill_or_fail().await?;
        }
        let bytes = self.buffer[self.position..][..length].to_vec();
        self.position += length;
        Ok(bytes)
    }

    /// Reads at least one byte. Returns nothing at the end.
    pub(crate) async fn read_some(&mut self) -> io::Result<Vec<u8>> {
        if self.position == self.buffer.len() {
            self.fill().await?;
        }
        let bytes = self.buffer.split_off(self.position);
        Ok(bytes)
    }

    pub(crate) async fn body(&mut self, framing: BodyFraming) -> io::Result<(Vec<u8>, HeaderList)> {
        match framing {
            BodyFraming::Length(length) => Ok((self.read_exactly(length).await?, HeaderList::default())),
            BodyFraming::UntilClose => {
                while self.fill().await? {}
                let rest = self.buffer.len() - self.position;
                Ok((self.read_exactly(rest).await?, HeaderList::default()))
            }
            BodyFraming::Chunked => self.read_chunked().await,
        }
    }

    async fn read_chunked(&mut self) -> io::Result<(Vec<u8>, HeaderList)> {
        let mut body = Vec::new();
        loop {
            let line = self.read_line().await?;
            let size = line.split(';').next().unwrap_or_default().trim();
            let size = usize::from_str_radix(size, 16).map_err(|_| malformed(format!("chunk size {line:?}")))?;
            if size == 0 {
                return Ok((body, self.read_fields().await?));
            }
            body.extend(self.read_exactly(size).await?);
            let end = self.read_line().await?;
            if !end.is_empty() {
                return Err(malformed(format!("{end:?} after a chunk")));
            }
        }
    }
}

/// Writes header or trailer fields.
pub(crate) fn field_lines(fields: &[(String, String)]) -> String {
    fields.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect()
}

pub(crate) fn chunk(bytes: &[u8]) -> Vec<u8> {
    [format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat()
}

pub(crate) fn last_chunk(trailers: &[(String, String)]) -> String {
    format!("0\r\n{}\r\n", field_lines(trailers))
}

pub(crate) fn malformed(why: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.into())
}
