//! One request per connection, as raw bytes: a conformance run must be able to send invalid requests.
//!
//! Invariants: connections go only to the addresses that the URL's host had at the start. Redirects are not followed.
//! Every wait has a timeout, and every response a maximum size. The shown text contains no control characters from the
//! server, and no value of a header that the user gave.

use std::{
    fmt,
    io::{self, ErrorKind},
    net::SocketAddr,
    sync::Arc,
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use futures_util::future::join;
use http::{Method, Request, Response, Uri, header};
use http_body_util::{BodyExt as _, Empty};
use hyper::{body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use rustls::{ClientConfig, pki_types::ServerName};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::TlsConnector;

use crate::{CommandError, format::format_duration};

const MAX_BODY_BYTES: usize = 16 << 20;

#[derive(Clone)]
pub(super) struct TestedServer {
    addresses: Vec<SocketAddr>,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    /// For `Host`.
    pub(super) authority: String,
    timeout: Duration,
}

#[derive(Debug, Clone, thiserror::Error)]
pub(super) enum ExchangeError {
    /// Nothing was sent.
    #[error("no connection to {0}")]
    Unreachable(String),
    #[error("no complete answer within {}", format_duration(*.0))]
    TimedOut(Duration),
    #[error("the connection was closed without a complete answer")]
    Closed,
    /// The response is not HTTP/1.1, or too large.
    #[error("no answer of HTTP/1.1: {0}")]
    Malformed(String),
}

pub(super) trait IoStream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> IoStream for T {}

pub(super) type RawConnection = Box<dyn IoStream>;

impl TestedServer {
    /// Resolves the host once.
    pub(super) async fn find(uri: &Uri, tls: &Arc<ClientConfig>, patience: Duration) -> Result<Self, ExchangeError> {
        let authority = uri.authority().expect("checked when it was read");
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        let secure = uri.scheme_str() == Some("https");
        let port = authority.port_u16().unwrap_or(if secure { 443 } else { 80 });
        let unreachable = |why: &dyn fmt::Display| ExchangeError::Unreachable(format!("{host}: {why}"));
        let found = timeout(patience, tokio::net::lookup_host((host.as_str(), port))).await;
        let found = found.map_err(|_| unreachable(&"its address cannot be found in time"))?;
        let addresses: Vec<_> = found.map_err(|why| unreachable(&why))?.collect();
        if addresses.is_empty() {
            return Err(unreachable(&"it has no address"));
        }
        let name = secure.then(|| ServerName::try_from(host.clone())).transpose().map_err(|why| unreachable(&why))?;
        let tls = name.map(|name| (TlsConnector::from(Arc::clone(tls)), name));
        Ok(Self { addresses, tls, authority: authority.as_str().to_owned(), timeout: patience })
    }

    pub(super) async fn connect(&self) -> Result<RawConnection, ExchangeError> {
        let mut last = String::new();
        for address in &self.addresses {
            last = match timeout(self.timeout, self.connect_to(*address)).await {
                Ok(Ok(stream)) => return Ok(stream),
                Ok(Err(why)) => format!("{address}: {why}"),
                Err(_) => format!("{address}: no connection within {:?}", self.timeout),
            };
        }
        Err(ExchangeError::Unreachable(last))
    }

    async fn connect_to(&self, address: SocketAddr) -> io::Result<RawConnection> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(match &self.tls {
            None => Box::new(stream),
            Some((connector, name)) => Box::new(connector.connect(name.clone(), stream).await?),
        })
    }

    pub(super) async fn exchange(&self, bytes: &[u8]) -> Result<Response<Bytes>, ExchangeError> {
        self.exchange_on(self.connect().await?, bytes).await
    }

    pub(super) async fn exchange_on(
        &self, line: RawConnection, bytes: &[u8],
    ) -> Result<Response<Bytes>, ExchangeError> {
        let exchange = timeout(self.timeout, exchange_raw(line, bytes)).await;
        exchange.unwrap_or(Err(ExchangeError::TimedOut(self.timeout)))
    }

    pub(super) async fn send_and_disconnect(&self, bytes: &[u8], after: Duration) -> Result<(), ExchangeError> {
        let mut stream = self.connect().await?;
        let sent = timeout(self.timeout, stream.write_all(bytes)).await;
        sent.map_err(|_| ExchangeError::TimedOut(self.timeout))?.map_err(|_| ExchangeError::Closed)?;
        let _ = stream.flush().await;
        tokio::time::sleep(after).await;
        Ok(())
    }
}

/// hyper reads the response. The request that it writes is discarded; the server gets `bytes` instead.
async fn exchange_raw(stream: RawConnection, bytes: &[u8]) -> Result<Response<Bytes>, ExchangeError> {
    let (reader, mut writer) = tokio::io::split(stream);
    let stand_in = TokioIo::new(tokio::io::join(reader, tokio::io::sink()));
    let (mut sender, connection) = http1::handshake(stand_in).await.map_err(receive_error)?;
    let mut request = Request::new(Empty::<Bytes>::new());
    if bytes.starts_with(b"HEAD ") {
        *request.method_mut() = Method::HEAD;
    }
    let response = sender.send_request(request);
    let write = async {
        // A server may close early; only its response counts.
        let _ = writer.write_all(bytes).await;
        let _ = writer.flush().await;
    };
    // hyper is polled first: it must have sent its request before the response arrives.
    let drive = async {
        let _ = join(connection, write).await;
        std::future::pending().await
    };
    tokio::select! {
        biased;
        never = drive => never,
        done = async { read_body(response.await.map_err(receive_error)?).await } => done,
    }
}

async fn read_body(response: Response<Incoming>) -> Result<Response<Bytes>, ExchangeError> {
    let (parts, mut body) = response.into_parts();
    let ends_with_connection =
        !parts.headers.contains_key(header::CONTENT_LENGTH) && !parts.headers.contains_key(header::TRANSFER_ENCODING);
    let mut read = BytesMut::new();
    let is_unexpected_eof = |why: &hyper::Error| {
        let source = std::error::Error::source(why).and_then(|source| source.downcast_ref::<io::Error>());
        source.is_some_and(|source| source.kind() == ErrorKind::UnexpectedEof)
    };
    while let Some(frame) = body.frame().await {
        match frame {
            Ok(frame) => read.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data)),
            // Many servers close TLS without `close_notify`.
            Err(why) if ends_with_connection && is_unexpected_eof(&why) => break,
            Err(why) => return Err(receive_error(why)),
        }
        if read.len() > MAX_BODY_BYTES {
            return Err(ExchangeError::Malformed(format!("it has more than {MAX_BODY_BYTES} bytes")));
        }
    }
    Ok(Response::from_parts(parts, read.freeze()))
}

fn receive_error(why: hyper::Error) -> ExchangeError {
    match why.is_parse() || why.is_parse_too_large() {
        true => ExchangeError::Malformed(why.to_string()),
        false => ExchangeError::Closed,
    }
}

impl From<ExchangeError> for CommandError {
    fn from(why: ExchangeError) -> Self {
        Self::Unavailable(why.to_string())
    }
}

const MAX_BODY_SHOWN: usize = 300;

#[derive(Debug, Clone)]
pub(super) struct RawRequest {
    pub(super) method: String,
    pub(super) target: String,
    /// Key headers: any number, with any bytes.
    pub(super) keys: Vec<(String, Vec<u8>)>,
    pub(super) headers: Vec<(String, String)>,
    pub(super) connection: String,
    pub(super) body: Option<Bytes>,
}

#[derive(Debug, Clone)]
pub(super) struct RawExchange {
    pub(super) request: String,
    pub(super) response: Result<Response<Bytes>, ExchangeError>,
}

impl RawRequest {
    pub(super) fn has_header(&self, name: &str) -> bool {
        self.headers.iter().any(|(found, _)| found.eq_ignore_ascii_case(name))
    }

    pub(super) fn with_headers(mut self, headers: &[(String, String)]) -> Self {
        self.headers.retain(|(name, _)| !headers.iter().any(|(other, _)| other.eq_ignore_ascii_case(name)));
        self.headers.extend_from_slice(headers);
        self
    }

    pub(super) fn to_bytes(&self, host: &str) -> Vec<u8> {
        let mut bytes = format!(
            "{} {} HTTP/1.1\r\nhost: {host}\r\nuser-agent: ibid-conform/{}\r\nconnection: {}\r\n",
            self.method,
            self.target,
            env!("CARGO_PKG_VERSION"),
            self.connection
        )
        .into_bytes();
        if !self.has_header("accept") {
            bytes.extend(b"accept: */*\r\n");
        }
        for (name, value) in &self.headers {
            bytes.extend(format!("{name}: {value}\r\n").into_bytes());
        }
        for (name, value) in &self.keys {
            bytes.extend([name.as_bytes(), b": ", value, b"\r\n"].concat());
        }
        if let Some(body) = &self.body {
            if !self.has_header("content-type") {
                bytes.extend(b"content-type: application/json\r\n");
            }
            bytes.extend(format!("content-length: {}\r\n\r\n", body.len()).into_bytes());
            bytes.extend(body);
        } else {
            let length = if self.method == "GET" { "" } else { "content-length: 0\r\n" };
            bytes.extend(format!("{length}\r\n").into_bytes());
        }
        bytes
    }

    /// Describes the request without the values of headers that may be secret.
    pub(super) fn redacted(&self) -> String {
        let mut shown = format!("{} {}", self.method, self.target);
        for (name, _) in self.headers.iter().filter(|(name, _)| !name.eq_ignore_ascii_case("content-type")) {
            shown.push_str(&format!(", {name}: ****"));
        }
        for (name, value) in &self.keys {
            shown.push_str(&format!(", {name}: {}", printable(value)));
        }
        if self.connection != "close" {
            shown.push_str(&format!(", connection: {}", self.connection));
        }
        if let Some(body) = &self.body {
            shown.push_str(&format!(", body {}", printable(body)));
        }
        shown
    }
}

impl RawExchange {
    pub(super) fn status(&self) -> Option<u16> {
        self.response.as_ref().ok().map(|answer| answer.status().as_u16())
    }

    pub(super) fn success(&self) -> Option<&Response<Bytes>> {
        self.response.as_ref().ok().filter(|answer| answer.status().is_success())
    }

    pub(super) fn describe_response(&self) -> String {
        let answer = match &self.response {
            Ok(answer) => answer,
            Err(broken) => return broken.to_string(),
        };
        let told = ["content-type", "location", "etag", "retry-after", "link", "set-cookie"];
        let mut came = answer.status().as_u16().to_string();
        for (name, value) in answer.headers() {
            if told.contains(&name.as_str()) || name.as_str().contains("idempoten") {
                came.push_str(&format!(", {name}: {}", printable(value.as_bytes())));
            }
        }
        if !answer.body().is_empty() {
            came.push_str(&format!(", body {}", printable(answer.body())));
        }
        came
    }
}

pub(super) fn header_of<'a>(answer: &'a Response<Bytes>, name: &str) -> Option<&'a str> {
    answer.headers().get(name)?.to_str().ok()
}

/// Makes foreign bytes safe for a terminal: no control characters, limited length.
fn printable(bytes: &[u8]) -> String {
    let cut = &bytes[..bytes.len().min(MAX_BODY_SHOWN)];
    let text: String = cut
        .utf8_chunks()
        .flat_map(|chunk| {
            let invalid = chunk.invalid().iter().map(|byte| format!("\\x{byte:02x}"));
            let valid = chunk.valid().chars().map(|character| match character {
                control if control.is_control() => control.escape_default().to_string(),
                other => other.to_string(),
            });
            valid.chain(invalid).collect::<Vec<_>>()
        })
        .collect();
    match bytes.len() - cut.len() {
        0 => text,
        more => format!("{text}… and {more} bytes more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_send_cannot_move_a_terminals_cursor() {
        assert_eq!(printable(b"a\x1b[2J\xff\n\xc3\xa9"), "a\\u{1b}[2J\\xff\\n\u{e9}");
        assert!(printable(&[b'x'; 1000]).ends_with("… and 700 bytes more"));
    }

    #[test]
    fn secrets_are_not_shown_and_keys_are_sent_as_they_are() {
        let request = RawRequest {
            method: "POST".into(),
            target: "/pay".into(),
            keys: vec![("Idempotency-Key".into(), b"a\x01".to_vec())],
            headers: vec![("Authorization".into(), "Bearer s3cret".into())],
            connection: "close".into(),
            body: Some("{}".into()),
        };
        assert_eq!(request.redacted(), "POST /pay, Authorization: ****, Idempotency-Key: a\\u{1}, body {}");
        let bytes = request.to_bytes("h");
        let text = String::from_utf8_lossy(&bytes);
        assert!(text.contains("Authorization: Bearer s3cret\r\nIdempotency-Key: a\u{1}\r\n"), "{text}");
        assert!(text.ends_with("content-type: application/json\r\ncontent-length: 2\r\n\r\n{}"), "{text}");
    }
}
