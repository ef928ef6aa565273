//! One request per connection, byte by byte: a conformance run must be able to send what no proper client would.
//!
//! Invariant: connections go to the addresses that the URL's host had at the start, and nowhere else. No redirect is
//! followed. Every wait ends, every answer is bounded.

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

/// A head larger than this is no answer.
const MAX_HEAD: usize = 64 << 10;
/// Nor is a body.
const MAX_BODY: usize = 16 << 20;
/// Interim answers (1xx) before the final one.
const MAX_INTERIM: usize = 10;

/// A server, as a URL names it.
#[derive(Clone)]
pub(super) struct Server {
    addresses: Vec<SocketAddr>,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    /// For `Host`.
    pub(super) authority: String,
    patience: Duration,
}

/// A complete answer.
#[derive(Debug, Clone)]
pub(super) struct Answer {
    pub(super) status: u16,
    /// In the order in which they came.
    pub(super) headers: Vec<(String, String)>,
    pub(super) body: Bytes,
}

/// Why there is none.
#[derive(Debug, Clone)]
pub(super) enum Broken {
    /// Nothing was sent.
    Unreachable(String),
    /// Nothing, or not all of it, came in time.
    Late(Duration),
    /// The connection ended before a complete answer.
    Closed,
    /// What came is not HTTP/1.1, or too large.
    Malformed(String),
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// An open connection.
pub(super) struct Line {
    stream: Box<dyn Stream>,
    patience: Duration,
}

impl Server {
    /// Looks the host up, once.
    ///
    /// # Errors
    /// Why it cannot be reached.
    pub(super) async fn find(uri: &Uri, tls: &Arc<ClientConfig>, patience: Duration) -> Result<Self, Broken> {
        let authority = uri.authority().expect("checked when it was read");
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        let secure = uri.scheme_str() == Some("https");
        let port = authority.port_u16().unwrap_or(if secure { 443 } else { 80 });
        let unreachable = |why: &dyn fmt::Display| Broken::Unreachable(format!("{host}: {why}"));
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
        Ok(Self { addresses, tls, authority: authority.as_str().to_owned(), patience })
    }

    /// Opens a connection.
    pub(super) async fn connect(&self) -> Result<Line, Broken> {
        let mut last = None;
        for address in &self.addresses {
            match timeout(self.patience, self.connect_to(*address)).await {
                Ok(Ok(stream)) => return Ok(Line { stream, patience: self.patience }),
                Ok(Err(why)) => last = Some(format!("{address}: {why}")),
                Err(_) => last = Some(format!("{address}: no connection within {:?}", self.patience)),
            }
        }
        Err(Broken::Unreachable(last.unwrap_or_default()))
    }

    async fn connect_to(&self, address: SocketAddr) -> io::Result<Box<dyn Stream>> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(match &self.tls {
            None => Box::new(stream),
            Some((connector, name)) => Box::new(connector.connect(name.clone(), stream).await?),
        })
    }

    /// Sends these bytes on a connection of their own and reads the answer.
    pub(super) async fn exchange(&self, bytes: &[u8]) -> Result<Answer, Broken> {
        self.connect().await?.exchange(bytes).await
    }

    /// Sends these bytes, waits, and hangs up without reading.
    pub(super) async fn abandon(&self, bytes: &[u8], after: Duration) -> Result<(), Broken> {
        let mut line = self.connect().await?;
        match timeout(self.patience, line.stream.write_all(bytes)).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return Err(Broken::Closed),
            Err(_) => return Err(Broken::Late(self.patience)),
        }
        let _ = line.stream.flush().await;
        tokio::time::sleep(after).await;
        Ok(())
    }
}

impl Line {
    /// Sends these bytes and reads the answer.
    pub(super) async fn exchange(mut self, bytes: &[u8]) -> Result<Answer, Broken> {
        let patience = self.patience;
        let work = async {
            // A server that has heard enough may close; its answer is what counts.
            let _ = self.stream.write_all(bytes).await;
            let _ = self.stream.flush().await;
            let mut reader = Reader { stream: self.stream, buffer: Vec::new(), read: 0 };
            let head_only = bytes.starts_with(b"HEAD ");
            for _ in 0..MAX_INTERIM {
                let answer = reader.answer(head_only).await?;
                if answer.status >= 200 {
                    return Ok(answer);
                }
            }
            Err(Broken::Malformed(format!("more than {MAX_INTERIM} interim answers")))
        };
        timeout(patience, work).await.unwrap_or(Err(Broken::Late(patience)))
    }
}

impl Answer {
    /// The first value of a header.
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.values(name).next()
    }

    /// Every value of a header.
    pub(super) fn values<'a>(&'a self, name: &str) -> impl Iterator<Item = &'a str> {
        let of_it =
            move |(found, value): &'a (String, String)| found.eq_ignore_ascii_case(name).then_some(value.as_str());
        self.headers.iter().filter_map(of_it).collect::<Vec<_>>().into_iter()
    }

    /// 2xx.
    pub(super) fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable(why) => write!(f, "no connection to {why}"),
            Self::Late(patience) => write!(f, "no complete answer within {}", crate::config::show::duration(*patience)),
            Self::Closed => f.write_str("the connection was closed without a complete answer"),
            Self::Malformed(why) => write!(f, "no answer of HTTP/1.1: {why}"),
        }
    }
}

/// What came, and how much of it has been understood.
struct Reader {
    stream: Box<dyn Stream>,
    buffer: Vec<u8>,
    read: usize,
}

impl Reader {
    async fn answer(&mut self, head_only: bool) -> Result<Answer, Broken> {
        let line = self.line().await?;
        let mut parts = line.splitn(3, ' ');
        let version = parts.next().unwrap_or_default();
        let status = parts.next().and_then(|code| code.parse::<u16>().ok()).filter(|code| (100..=999).contains(code));
        let (true, Some(status)) = (version.starts_with("HTTP/1."), status) else {
            return Err(Broken::Malformed(format!("its first line is {:?}", shortened(&line))));
        };
        let mut headers = Vec::new();
        loop {
            let line = self.line().await?;
            if line.is_empty() {
                break;
            }
            let Some((name, value)) = line.split_once(':') else {
                return Err(Broken::Malformed(format!("no colon in the header line {:?}", shortened(&line))));
            };
            headers.push((name.to_owned(), value.trim().to_owned()));
        }
        let mut answer = Answer { status, headers, body: Bytes::new() };
        if !head_only && status >= 200 && !matches!(status, 204 | 304) {
            answer.body = self.body(&answer).await?.into();
        }
        Ok(answer)
    }

    async fn body(&mut self, answer: &Answer) -> Result<Vec<u8>, Broken> {
        let chunked =
            answer.header("transfer-encoding").is_some_and(|coding| coding.to_lowercase().contains("chunked"));
        if chunked {
            return self.chunks().await;
        }
        match answer.header("content-length") {
            Some(length) => {
                let length = length.parse().map_err(|_| Broken::Malformed(format!("content-length is {length:?}")))?;
                self.exactly(length).await
            }
            None => {
                while self.more().await? {}
                Ok(self.buffer.split_off(self.read))
            }
        }
    }

    async fn chunks(&mut self) -> Result<Vec<u8>, Broken> {
        let mut body = Vec::new();
        loop {
            let line = self.line().await?;
            let digits = line.split(';').next().unwrap_or_default().trim();
            let size = usize::from_str_radix(digits, 16)
                .map_err(|_| Broken::Malformed(format!("{:?} is no size of a chunk", shortened(&line))))?;
            if size == 0 {
                while !self.line().await?.is_empty() {}
                return Ok(body);
            }
            body.extend(self.exactly(size).await?);
            self.line().await?;
        }
    }

    /// One line without its end.
    async fn line(&mut self) -> Result<String, Broken> {
        loop {
            let rest = &self.buffer[self.read..];
            if let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
                let line = String::from_utf8_lossy(&rest[..end]).trim_end_matches('\r').to_owned();
                self.read += end + 1;
                return Ok(line);
            }
            if rest.len() > MAX_HEAD {
                return Err(Broken::Malformed("a line has no end".into()));
            }
            if !self.more().await? {
                return Err(Broken::Closed);
            }
        }
    }

    async fn exactly(&mut self, length: usize) -> Result<Vec<u8>, Broken> {
        while self.buffer.len() - self.read < length {
            if !self.more().await? {
                return Err(Broken::Closed);
            }
        }
        let bytes = self.buffer[self.read..][..length].to_vec();
        self.read += length;
        Ok(bytes)
    }

    /// False at the end.
    async fn more(&mut self) -> Result<bool, Broken> {
        if self.buffer.len() > MAX_BODY {
            return Err(Broken::Malformed(format!("it has more than {MAX_BODY} bytes")));
        }
        match self.stream.read_buf(&mut self.buffer).await {
            Ok(read) => Ok(read > 0),
            // TLS without a farewell is how many servers end.
            Err(why) if why.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(_) => Err(Broken::Closed),
        }
    }
}

fn shortened(text: &str) -> String {
    text.chars().take(80).collect()
}
