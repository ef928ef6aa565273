//! One request per connection, as raw bytes: a conformance run must be able to send invalid requests.
//!
//! Invariant: connections go only to the addresses that the URL's host had at the start. Redirects are not followed.
//! Every wait has a timeout, and every response a maximum size.

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

trait IoStream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> IoStream for T {}

/// An open connection to the server.
pub(super) struct RawConnection(Box<dyn IoStream>);

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
                Ok(Ok(stream)) => return Ok(RawConnection(stream)),
                Ok(Err(why)) => format!("{address}: {why}"),
                Err(_) => format!("{address}: no connection within {:?}", self.timeout),
            };
        }
        Err(ExchangeError::Unreachable(last))
    }

    async fn connect_to(&self, address: SocketAddr) -> io::Result<Box<dyn IoStream>> {
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

    /// Sends bytes, waits, and disconnects without reading.
    pub(super) async fn send_and_disconnect(&self, bytes: &[u8], after: Duration) -> Result<(), ExchangeError> {
        let RawConnection(mut stream) = self.connect().await?;
        let sent = timeout(self.timeout, stream.write_all(bytes)).await;
        sent.map_err(|_| ExchangeError::TimedOut(self.timeout))?.map_err(|_| ExchangeError::Closed)?;
        let _ = stream.flush().await;
        tokio::time::sleep(after).await;
        Ok(())
    }
}

/// hyper reads the response. The request that it writes is discarded; the server gets `bytes` instead.
async fn exchange_raw(RawConnection(stream): RawConnection, bytes: &[u8]) -> Result<Response<Bytes>, ExchangeError> {
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
    if why.is_parse() || why.is_parse_too_large() {
        return ExchangeError::Malformed(why.to_string());
    }
    ExchangeError::Closed
}

fn is_unexpected_eof(why: &hyper::Error) -> bool {
    let source = std::error::Error::source(why).and_then(|source| source.downcast_ref::<io::Error>());
    source.is_some_and(|source| source.kind() == ErrorKind::UnexpectedEof)
}

impl From<ExchangeError> for CommandError {
    fn from(why: ExchangeError) -> Self {
        Self::Unavailable(why.to_string())
    }
}
