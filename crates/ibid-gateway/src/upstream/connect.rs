//! Connects to an upstream: target, DNS, TCP, TLS and ALPN.
//!
//! Invariant: no byte of a request exists here, so every error means "never written"; each error says what
//! was tried. One timeout covers everything. Each address gets an equal share of the remaining time, so an
//! unresponsive address does not use up the time of the others.

use std::fmt::Write as _;
use std::io;
use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use http::uri::{Authority, Scheme as UriScheme};
use parking_lot::Mutex;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::pool::ConnectionPermit;
use super::socket::{UpstreamSocket, UpstreamStream};
use super::{SetupError, UpstreamError};

/// How long a DNS answer is used. Short, because names move; a failed connect drops it anyway.
const DNS_CACHE_TTL: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UpstreamScheme {
    /// HTTP/1.1 in cleartext.
    Http,
    /// TLS; ALPN chooses between HTTP/2 and HTTP/1.1.
    Https,
    /// HTTP/2 in cleartext, with prior knowledge.
    H2c,
}

/// The upstream's address: `http://host:port`, `https://host:port` or `h2c://host:port`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpstreamTarget {
    pub scheme: UpstreamScheme,
    /// As configured, for `Host` and `:authority` of requests that have none.
    pub authority: Authority,
    /// Without the brackets of an IPv6 address.
    host: String,
    port: u16,
}

impl UpstreamTarget {
    pub(super) fn uri_scheme(&self) -> UriScheme {
        if self.scheme == UpstreamScheme::Https { UriScheme::HTTPS } else { UriScheme::HTTP }
    }
}

impl FromStr for UpstreamTarget {
    type Err = SetupError;

    fn from_str(text: &str) -> Result<Self, SetupError> {
        let bad = |why: &str| SetupError::Target { text: text.to_owned(), why: why.to_owned() };
        let (scheme, rest) = text
            .split_once("://")
            .ok_or_else(|| bad("expected http://host:port, https://host:port or h2c://host:port"))?;
        let (scheme, default_port) = match scheme.to_ascii_lowercase().as_str() {
            "http" => (UpstreamScheme::Http, 80),
            "https" => (UpstreamScheme::Https, 443),
            "h2c" => (UpstreamScheme::H2c, 80),
            _ => return Err(bad("the scheme must be http, https or h2c")),
        };
        let authority = rest.strip_suffix('/').unwrap_or(rest);
        if authority.contains(['/', '?', '#']) {
            return Err(bad("an upstream has no path, query or fragment; requests bring their own"));
        }
        if authority.contains('@') {
            return Err(bad("user and password do not belong in an upstream's address"));
        }
        let authority: Authority = authority.parse().map_err(|_| bad("not a valid host and port"))?;
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        // `Authority` parses "host:" and "host:99999" as a host without a port.
        let port = match authority.as_str().get(authority.host().len()..) {
            Some("") => default_port,
            _ => authority.port_u16().filter(|p| *p != 0).ok_or_else(|| bad("the port must be 1 to 65535"))?,
        };
        if host.is_empty() {
            return Err(bad("the host is missing"));
        }
        Ok(Self { scheme, authority, host, port })
    }
}

struct ResolvedAddresses {
    resolved_at: Instant,
    /// Addresses that have not failed since they were resolved. Never empty.
    addresses: Vec<SocketAddr>,
}

pub(super) struct UpstreamConnector {
    pub(super) target: UpstreamTarget,
    timeout: Duration,
    /// See [`UpstreamSettings::is_grpc`](super::UpstreamSettings::is_grpc).
    is_grpc: bool,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    /// Locked only to copy or replace the value, never across an await.
    dns_cache: Mutex<Option<ResolvedAddresses>>,
    /// Distributes connections over the addresses of a name.
    next_address: AtomicUsize,
}

impl UpstreamConnector {
    pub(super) fn new(
        target: UpstreamTarget, timeout: Duration, config: Option<Arc<ClientConfig>>, is_grpc: bool,
    ) -> Result<Self, SetupError> {
        let tls = if target.scheme == UpstreamScheme::Https {
            let mut config = config.map_or_else(|| native_root_config().map(Arc::new), Ok)?;
            if is_grpc {
                Arc::make_mut(&mut config).alpn_protocols = vec![b"h2".to_vec()];
            } else if config.alpn_protocols.is_empty() {
                Arc::make_mut(&mut config).alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
            }
            let name = ServerName::try_from(target.host.clone()).map_err(|_| SetupError::Target {
                text: target.authority.to_string(),
                why: "not a name a certificate can be checked against".to_owned(),
            })?;
            Some((TlsConnector::from(config), name))
        } else {
            None
        };
        let (dns_cache, next_address) = (Mutex::default(), AtomicUsize::new(0));
        Ok(Self { target, timeout, is_grpc, tls, dns_cache, next_address })
    }

    /// Opens a connection, and returns whether it speaks HTTP/2. Its socket drops `permit` when it closes, for whatever
    /// reason.
    pub(super) async fn connect(&self, permit: ConnectionPermit) -> Result<(UpstreamStream, bool), UpstreamError> {
        let until = tokio::time::Instant::now() + self.timeout;
        let late = |_| UpstreamError::ConnectTimeout { target: self.target.authority.to_string(), after: self.timeout };
        let socket = UpstreamSocket::new(self.connect_tcp(until).await?, permit);
        let Some((connector, name)) = &self.tls else {
            return Ok((UpstreamStream::Plain(socket), self.target.scheme == UpstreamScheme::H2c));
        };
        let stream = tokio::time::timeout_at(until, connector.connect(name.clone(), socket))
            .await
            .map_err(late)?
            .map_err(|e| UpstreamError::Tls { target: self.target.authority.to_string(), reason: e.to_string() })?;
        let h2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
        Ok((UpstreamStream::Tls(Box::new(stream)), h2))
    }

    async fn connect_tcp(&self, until: tokio::time::Instant) -> Result<TcpStream, UpstreamError> {
        let mut addresses = self.resolve(until).await?;
        let turn = self.next_address.fetch_add(1, Ordering::Relaxed) % addresses.len();
        addresses.rotate_left(turn);
        let mut tried = String::new();
        let count = addresses.len();
        for (n, address) in addresses.into_iter().enumerate() {
            let left = until.saturating_duration_since(tokio::time::Instant::now());
            let share = left / u32::try_from(count - n).unwrap_or(u32::MAX);
            let result = match tokio::time::timeout(share, TcpStream::connect(address)).await {
                Ok(result) => result.and_then(|tcp| set_socket_options(tcp, self.is_grpc)),
                Err(_) => Err(io::ErrorKind::TimedOut.into()),
            };
            match result {
                Ok(tcp) => return Ok(tcp),
                Err(e) => {
                    self.remove_address(address);
                    let gap = if tried.is_empty() { "" } else { "; " };
                    let _ = write!(tried, "{gap}{address}: {}", describe_io_error(&e));
                }
            }
        }
        Err(UpstreamError::Connect { tried })
    }

    async fn resolve(&self, until: tokio::time::Instant) -> Result<Vec<SocketAddr>, UpstreamError> {
        let target = &self.target;
        if let Ok(ip) = target.host.parse() {
            return Ok(vec![SocketAddr::new(ip, target.port)]);
        }
        if let Some(known) = self.dns_cache.lock().as_ref().filter(|a| a.resolved_at.elapsed() < DNS_CACHE_TTL) {
            return Ok(known.addresses.clone());
        }
        let fail = |reason: String| UpstreamError::Resolve { host: target.host.clone(), reason };
        let found = tokio::time::timeout_at(until, tokio::net::lookup_host((target.host.as_str(), target.port)))
            .await
            .map_err(|_| fail(format!("no answer within {:?}", self.timeout)))?
            .map_err(|e| fail(e.to_string()))?;
        let addresses: Vec<_> = found.collect();
        if addresses.is_empty() {
            return Err(fail("no addresses".to_owned()));
        }
        *self.dns_cache.lock() = Some(ResolvedAddresses { resolved_at: Instant::now(), addresses: addresses.clone() });
        Ok(addresses)
    }

    /// Removes a failed address until the name is resolved again, which happens at once if it was the last one.
    fn remove_address(&self, address: SocketAddr) {
        let mut answer = self.dns_cache.lock();
        if let Some(known) = answer.as_mut() {
            known.addresses.retain(|a| *a != address);
            if known.addresses.is_empty() {
                *answer = None;
            }
        }
    }
}

/// Sets `TCP_NODELAY` and TCP keep-alive, which no server minds. Keep-alive detects a peer that vanished, also under a
/// tunnel or a reply that is silent for hours. gRPC calls share one connection without HTTP/2 pings, so they also get a
/// shorter limit: without it they could wait a quarter of an hour until the system gives up.
fn set_socket_options(tcp: TcpStream, for_calls: bool) -> io::Result<TcpStream> {
    tcp.set_nodelay(true)?;
    let (after, every) = if for_calls { (20, 5) } else { (KEEP_ALIVE_IDLE_SECS, KEEP_ALIVE_INTERVAL_SECS) };
    set_keep_alive(&tcp, after, every)?;
    if for_calls {
        let socket = SockRef::from(&tcp);
        #[cfg(any(target_os = "linux", target_os = "android"))]
        socket.set_tcp_user_timeout(Some(Duration::from_secs(30)))?;
    }
    Ok(tcp)
}

/// Seconds of silence before the first keep-alive probe.
const KEEP_ALIVE_IDLE_SECS: u64 = 60;
/// Seconds between two keep-alive probes.
const KEEP_ALIVE_INTERVAL_SECS: u64 = 10;

/// Lets the system detect clients that have vanished.
pub(crate) fn set_client_keep_alive(tcp: &TcpStream) -> io::Result<()> {
    set_keep_alive(tcp, KEEP_ALIVE_IDLE_SECS, KEEP_ALIVE_INTERVAL_SECS)
}

fn set_keep_alive(tcp: &TcpStream, after: u64, every: u64) -> io::Result<()> {
    let seconds = Duration::from_secs;
    SockRef::from(tcp).set_tcp_keepalive(&TcpKeepalive::new().with_time(seconds(after)).with_interval(seconds(every)))
}

/// Prefers "connection refused" to "Connection refused (os error 111)", where such a text exists.
fn describe_io_error(e: &io::Error) -> String {
    match e.kind() {
        io::ErrorKind::Other => e.to_string(),
        kind if kind.to_string().starts_with("uncategorized") => e.to_string(),
        kind => kind.to_string(),
    }
}

pub(crate) fn native_root_config() -> Result<ClientConfig, SetupError> {
    let roots = crate::tls::native_roots().map_err(|why| SetupError::Roots { why })?;
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    Ok(ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| SetupError::Roots { why: e.to_string() })?
        .with_root_certificates(roots)
        .with_no_client_auth())
}
