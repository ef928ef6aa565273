//! One request per connection, as raw bytes: a conformance run must be able to send invalid requests.
//!
//! Invariant: connections go only to the addresses that the URL's host had at the start. Redirects are not followed.
//! Every wait has a timeout, and every response a maximum size.

use std::{fmt, io, net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use http::Uri;
use rustls::{ClientConfig, pki_types::ServerName};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::TlsConnector;

/// Maximum bytes of a response's head.
const MAX_HEAD_BYTES: usize = 64 << 10;
/// Maximum bytes of a response's body.
const MAX_BODY_BYTES: usize = 16 << 20;
/// Maximum number of interim responses (1xx) before the final one.
const MAX_INTERIM_RESPONSES: usize = 10;

/// The server that a URL names.
#[derive(Clone)]
pub(super) struct TestedServer {
    addresses: Vec<SocketAddr>,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    /// For `Host`.
    pub(super) authority: String,
    timeout: Duration,
}

#[derive(Debug, Clone)]
pub(super) struct RawResponse {
    pub(super) status: u16,
    /// In the order received.
    pub(super) headers: Vec<(String, String)>,
    pub(super) body: Bytes,
}

#[derive(Debug, Clone)]
pub(super) enum ExchangeError {
    /// Nothing was sent.
    Unreachable(String),
    /// The response was not complete in time.
    TimedOut(Duration),
    /// The connection closed before the response was complete.
    Closed,
    /// The response is not HTTP/1.1, or too large.
    Malformed(String),
}

trait IoStream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> IoStream for T {}

pub(super) struct RawConnection {
    stream: Box<dyn IoStream>,
    timeout: Duration,
}

impl TestedServer {
    /// Resolves the host once.
    pub(super) async fn find(uri: &Uri, tls: &Arc<ClientConfig>, patience: Duration) -> Result<Self, ExchangeError> {
        let authority = uri.authority().expect("checked when it was read");
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        let secure = uri.scheme_str() == Some("https");
        let port = authority.port_u16().unwrap_or(if secure { 443 } else { 80 });
        let unreachable = |why: &dyn fmt::Display| ExchangeError::Unreachable(format!("{host}: {why}"));
        let found = match timeout(patience, tokio::net::lookup_host((host.as_str(), port))).await {
            Ok(found) => found.map_err(|why| unreachable(&why))?,
            Err(_) => return Err(unreachable(&"its address cannot be found in time")),
        };
        let addresses: Vec<_> = found.collect();
        if addresses.is_empty() {
            return Err(unreachable(&"it has no address"));
        }
        let tls = match secure {
            false => None,
            true => {
                let name = ServerName::try_from(host.clone()).map_err(|why| unreachable(&why))?;
                Some((TlsConnector::from(Arc::clone(tls)), name))
            }
        };
        Ok(Self { addresses, tls, authority: authority.as_str().to_owned(), timeout: patience })
    }

    pub(super) async fn connect(&self) -> Result<RawConnection, ExchangeError> {
        let mut last = None;
        for address in &self.addresses {
            match timeout(self.timeout, self.connect_to(*address)).await {
                Ok(Ok(stream)) => return Ok(RawConnection { stream, timeout: self.timeout }),
                Ok(Err(why)) => last = Some(format!("{address}: {why}")),
                Err(_) => last = Some(format!("{address}: no connection within {:?}", self.timeout)),
            }
        }
        Err(ExchangeError::Unreachable(last.unwrap_or_default()))
    }

    async fn connect_to(&self, address: SocketAddr) -> io::Result<Box<dyn IoStream>> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(match &self.tls {
            None => Box::new(stream),
            Some((connector, name)) => Box::new(connector.connect(name.clone(), stream).await?),
        })
    }

    /// Sends bytes on a new connection and reads the response.
    pub(super) async fn exchange(&self, bytes: &[u8]) -> Result<RawResponse, ExchangeError> {
        self.connect().await?.exchange(bytes).await
    }

    /// Sends bytes, waits, and disconnects without reading.
    pub(super) async fn send_and_disconnect(&self, bytes: &[u8], after: Duration) -> Result<(), ExchangeError> {
        let mut line = self.connect().await?;
        match timeout(self.timeout, line.stream.write_all(bytes)).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return Err(ExchangeError::Closed),
            Err(_) => return Err(ExchangeError::TimedOut(self.timeout)),
        }
        let _ = line.stream.flush().await;
        tokio::time::sleep(after).await;
        Ok(())
    }
}

impl RawConnection {
    /// Sends bytes and reads the response.
    pub(super) async fn exchange(mut self, bytes: &[u8]) -> Result<RawResponse, ExchangeError> {
        let patience = self.timeout;
        let work = async {
            // A server may close early; only its response counts.
            let _ = self.stream.write_all(bytes).await;
            let _ = self.stream.flush().await;
            let mut reader = ResponseReader { stream: self.stream, buffer: Vec::new(), consumed: 0 };
            let head_only = bytes.starts_with(b"HEAD ");
            for _ in 0..MAX_INTERIM_RESPONSES {
                let answer = reader.read_response(head_only).await?;
                if answer.status >= 200 {
                    return Ok(answer);
                }
            }
            Err(ExchangeError::Malformed(format!("more than {MAX_INTERIM_RESPONSES} interim answers")))
        };
        timeout(patience, work).await.unwrap_or(Err(ExchangeError::TimedOut(patience)))
    }
}

impl RawResponse {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.values(name).next()
    }

    pub(super) fn values<'a>(&'a self, name: &str) -> impl Iterator<Item = &'a str> {
        let of_it =
            move |(found, value): &'a (String, String)| found.eq_ignore_ascii_case(name).then_some(value.as_str());
        self.headers.iter().filter_map(of_it).collect::<Vec<_>>().into_iter()
    }

    pub(super) fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }
}

impl fmt::Display for ExchangeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable(why) => write!(f, "no connection to {why}"),
            Self::TimedOut(patience) => {
                write!(f, "no complete answer within {}", crate::config::dial_format::format_duration(*patience))
            }
            Self::Closed => f.write_str("the connection was closed without a complete answer"),
            Self::Malformed(why) => write!(f, "no answer of HTTP/1.1: {why}"),
        }
    }
}

/// The received bytes, and how many of them are parsed.
struct ResponseReader {
    stream: Box<dyn IoStream>,
    buffer: Vec<u8>,
    consumed: usize,
}

impl ResponseReader {
    async fn read_response(&mut self, head_only: bool) -> Result<RawResponse, ExchangeError> {
        let line = self.read_line().await?;
        let mut parts = line.splitn(3, ' ');
        let version = parts.next().unwrap_or_default();
        let status = parts.next().and_then(|code| code.parse::<u16>().ok()).filter(|code| (100..=999).contains(code));
        let (true, Some(status)) = (version.starts_with("HTTP/1."), status) else {
            return Err(ExchangeError::Malformed(format!("its first line is {:?}", truncate(&line))));
        };
        let mut headers = Vec::new();
        loop {
            let line = self.read_line().await?;
            if line.is_empty() {
                break;
            }
            let Some((name, value)) = line.split_once(':') else {
                return Err(ExchangeError::Malformed(format!("no colon in the header line {:?}", truncate(&line))));
            };
            headers.push((name.to_owned(), value.trim().to_owned()));
        }
        let mut answer = RawResponse { status, headers, body: Bytes::new() };
        if !head_only && status >= 200 && !matches!(status, 204 | 304) {
            answer.body = self.read_body(&answer).await?.into();
        }
        Ok(answer)
    }

    async fn read_body(&mut self, answer: &RawResponse) -> Result<Vec<u8>, ExchangeError> {
        let chunked =
            answer.header("transfer-encoding").is_some_and(|coding| coding.to_lowercase().contains("chunked"));
        if chunked {
            return self.read_chunked().await;
        }
        match answer.header("content-length") {
            Some(length) => {
                let length =
                    length.parse().map_err(|_| ExchangeError::Malformed(format!("content-length is {length:?}")))?;
                self.read_exact(length).await
            }
            None => {
                while self.read_more().await? {}
                Ok(self.buffer.split_off(self.consumed))
            }
        }
    }

    async fn read_chunked(&mut self) -> Result<Vec<u8>, ExchangeError> {
        let mut body = Vec::new();
        loop {
            let line = self.read_line().await?;
            let digits = line.split(';').next().unwrap_or_default().trim();
            let size = usize::from_str_radix(digits, 16)
                .map_err(|_| ExchangeError::Malformed(format!("{:?} is no size of a chunk", truncate(&line))))?;
            if size == 0 {
                while !self.read_line().await?.is_empty() {}
                return Ok(body);
            }
            body.extend(self.read_exact(size).await?);
            self.read_line().await?;
        }
    }

    /// Reads one line without its line break.
    async fn read_line(&mut self) -> Result<String, ExchangeError> {
        loop {
            let rest = &self.buffer[self.consumed..];
            if let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
                let line = String::from_utf8_lossy(&rest[..end]).trim_end_matches('\r').to_owned();
                self.consumed += end + 1;
                return Ok(line);
            }
            if rest.len() > MAX_HEAD_BYTES {
                return Err(ExchangeError::Malformed("a line has no end".into()));
            }
            if !self.read_more().await? {
                return Err(ExchangeError::Closed);
            }
        }
    }

    async fn read_exact(&mut self, length: usize) -> Result<Vec<u8>, ExchangeError> {
        while self.buffer.len() - self.consumed < length {
            if !self.read_more().await? {
                return Err(ExchangeError::Closed);
            }
        }
        let bytes = self.buffer[self.consumed..][..length].to_vec();
        self.consumed += length;
        Ok(bytes)
    }

    /// Returns `false` at the end of the stream.
    async fn read_more(&mut self) -> Result<bool, ExchangeError> {
        if self.buffer.len() > MAX_BODY_BYTES {
            return Err(ExchangeError::Malformed(format!("it has more than {MAX_BODY_BYTES} bytes")));
        }
        match self.stream.read_buf(&mut self.buffer).await {
            Ok(read) => Ok(read > 0),
            // Many servers close TLS without `close_notify`.
            Err(why) if why.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(_) => Err(ExchangeError::Closed),
        }
    }
}

fn truncate(text: &str) -> String {
    text.chars().take(80).collect()
}
