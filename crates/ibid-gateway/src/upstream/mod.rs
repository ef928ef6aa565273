//! Sends requests to an upstream, and reports what is certain when that fails.
//!
//! Invariants:
//! - [`SendFailure::NeverWritten`] is a proof: no byte of the request can have reached the upstream, or the
//!   upstream declared in its protocol that it did not process the request. All other failures are
//!   [`SendFailure::MaybeWritten`].
//! - A request is resent only with that proof, in at most [`MAX_SEND_ATTEMPTS`] attempts. Exception: a GET or HEAD
//!   without a claim and without a body is resent once, on another connection, if a reused connection ended before a
//!   byte of the reply.
//! - Dropping the future of [`UpstreamClient::send`], or a reply's body before its end, closes the HTTP/1.1 connection
//!   or resets the HTTP/2 stream. The only timeouts here are those for getting a connection from the pool and for
//!   opening one.

mod body;
mod checkout;
mod connect;
mod error;
mod h1_codec;
#[doc(hidden)]
pub use h1_codec::fuzzing::decode_reply;
mod h1_connection;
mod handshake;
mod pool;
mod socket;

use std::error::Error as StdError;
use std::future::poll_fn;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use http::header::HOST;
use http::uri::{Authority, PathAndQuery};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, Version};
use http_body::Body;
use http_body_util::BodyExt as _;
use hyper::client::conn::http2;
use ibid::http::{RunInfo, SendState};
use parking_lot::Mutex;

pub use body::{UpgradedConnection, UpstreamBody};
pub use checkout::Affinity;
pub(crate) use connect::set_client_keep_alive;
pub use connect::{UpstreamScheme, UpstreamTarget};
pub use error::{SendFailure, SetupError, UpstreamError};
pub use h1_connection::OnInterim;

use body::UnsentBody;
use checkout::Checkout;
use connect::UpstreamConnector;
use error::error_chain;
use pool::{ConnectionPermit, PoolTicket, UnclaimedPermit, UpstreamPool};
use socket::SocketState;

use crate::cores;

/// The error type of request bodies.
pub type BodyError = Box<dyn StdError + Send + Sync>;

/// Maximum number of attempts for a request that is proved unwritten. The last one uses a new connection.
const MAX_SEND_ATTEMPTS: u32 = 3;

#[derive(Clone, Debug)]
pub struct UpstreamSettings {
    /// Maximum number of open connections: in use, idle and upgraded. Further requests wait.
    pub max_connections: usize,
    /// For DNS, TCP and TLS together.
    pub connect_timeout: Duration,
    /// How long a request without a claim waits for a connection from the pool.
    pub pool_timeout: Duration,
    /// How long an idle connection is kept. The upstream's `Keep-Alive` may shorten it.
    pub idle_timeout: Duration,
    /// For `https`. `None` trusts the system's CAs. An empty ALPN list is filled in.
    pub tls: Option<Arc<rustls::ClientConfig>>,
    /// For gRPC calls: only HTTP/2, and no pings, because gRPC servers close a connection with all its calls over them.
    pub is_grpc: bool,
}

impl Default for UpstreamSettings {
    fn default() -> Self {
        Self {
            max_connections: 1024,
            connect_timeout: Duration::from_secs(5),
            pool_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(60),
            tls: None,
            is_grpc: false,
        }
    }
}

/// Which idle connections a request may reuse.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReusePolicy {
    /// An operation under a claim, whose outcome must be proved: only connections used within the last second.
    Claimed,
    /// A request without a claim: any idle connection.
    PassThrough,
}

/// How a request is sent.
#[derive(Clone, Copy)]
pub struct UpstreamSendOptions<'a> {
    pub care: ReusePolicy,
    pub affinity: &'a Affinity,
    /// Tracks whether a byte of the request may have been written.
    pub send_state: Option<&'a SendState>,
    /// Sent after the request's own headers, which contain none of these.
    pub more_headers: AddedHeaders<'a>,
    /// Called for the interim replies of an HTTP/1.1 upstream.
    pub on_interim: Option<OnInterim<'a>>,
}

/// Headers that are written out without a place in the request's map.
#[derive(Clone, Copy, Default)]
pub struct AddedHeaders<'a> {
    /// For `Ibid-Attempt`, `Ibid-Fence` and `Ibid-Operation`.
    pub run: Option<RunInfo>,
    /// For `X-Request-Id`.
    pub request_id: Option<&'a HeaderValue>,
    pub others: &'a [(HeaderName, HeaderValue)],
}

const ATTEMPT: HeaderName = HeaderName::from_static("ibid-attempt");
const FENCE: HeaderName = HeaderName::from_static("ibid-fence");
const OPERATION: HeaderName = HeaderName::from_static("ibid-operation");
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

impl AddedHeaders<'_> {
    fn to_list(self) -> Vec<(HeaderName, HeaderValue)> {
        let run = self.run.map(|run| {
            let operation = HeaderValue::try_from(run.operation.to_string()).expect("hex digits");
            [(ATTEMPT, run.attempt.into()), (FENCE, run.fence.into()), (OPERATION, operation)]
        });
        let request_id = self.request_id.map(|id| (REQUEST_ID, id.clone()));
        run.into_iter().flatten().chain(request_id).chain(self.others.iter().cloned()).collect()
    }
}

/// Why one attempt returned no reply.
enum AttemptError {
    /// The request was not sent and can be tried again.
    NotSent(UpstreamError),
    /// The connection ended before a byte of the reply.
    Unanswered(SendFailure),
    Final(SendFailure),
}

impl AttemptError {
    fn maybe_written(is_final: bool, reason: String) -> Self {
        let failure = SendFailure::MaybeWritten(UpstreamError::Reply { reason });
        if is_final { Self::Final(failure) } else { Self::Unanswered(failure) }
    }
}

enum SendChannel<B> {
    H1(Checkout),
    H2(H2Connection<B>),
}

impl<B> SendChannel<B> {
    /// Whether the upstream may have been about to close the connection.
    fn is_reused(&self) -> bool {
        match self {
            Self::H1(checkout) => checkout.is_reused,
            Self::H2(shared) => shared.is_reused,
        }
    }
}

struct H2Connection<B> {
    sender: http2::SendRequest<B>,
    socket: Arc<SocketState>,
    /// Whether the connection is older than this request.
    is_reused: bool,
}

impl<B> Clone for H2Connection<B> {
    fn clone(&self) -> Self {
        Self { sender: self.sender.clone(), socket: Arc::clone(&self.socket), is_reused: true }
    }
}

const SPEAKS_UNKNOWN: u8 = 0;
const SPEAKS_H1: u8 = 1;
const SPEAKS_H2: u8 = 2;

/// One upstream and its connections. `B` is the body type of its requests.
pub struct UpstreamClient<B> {
    connector: UpstreamConnector,
    host: HeaderValue,
    pool: Arc<UpstreamPool>,
    pool_timeout: Duration,
    pub is_grpc: bool,
    /// The configured protocol, or the one that ALPN chose last.
    protocol: AtomicU8,
    /// One connection per core, whose runtime drives it. Locked only to clone or replace it.
    h2_connections: Box<[Mutex<Option<H2Connection<B>>>]>,
    /// Held while connecting to an upstream that may speak HTTP/2, so that concurrent requests open one
    /// connection. Contains the last attempt's error for the requests that queued meanwhile; otherwise each of them
    /// would wait for its own connect timeout in turn.
    connect_lock: tokio::sync::Mutex<Option<UpstreamError>>,
    /// Number of finished attempts. Tells which requests queued before the last one.
    connect_attempts: AtomicU64,
}

impl<B> UpstreamClient<B>
where
    B: Body<Data = Bytes> + Default + Send + Unpin + 'static,
    B::Error: Into<BodyError>,
{
    /// Opens no connection.
    pub fn new(target: UpstreamTarget, settings: UpstreamSettings) -> Result<Arc<Self>, SetupError> {
        let speaks = match target.scheme {
            UpstreamScheme::Http => SPEAKS_H1,
            UpstreamScheme::H2c => SPEAKS_H2,
            UpstreamScheme::Https => SPEAKS_UNKNOWN,
        };
        let host = HeaderValue::from_str(target.authority.as_str())
            .map_err(|e| SetupError::Target { text: target.authority.to_string(), why: e.to_string() })?;
        Ok(Arc::new(Self {
            connector: UpstreamConnector::new(target, settings.connect_timeout, settings.tls, settings.is_grpc)?,
            host,
            pool: UpstreamPool::new(settings.max_connections, settings.idle_timeout),
            pool_timeout: settings.pool_timeout,
            is_grpc: settings.is_grpc,
            protocol: AtomicU8::new(speaks),
            h2_connections: (0..cores::count()).map(|_| Mutex::new(None)).collect(),
            connect_lock: tokio::sync::Mutex::new(None),
            connect_attempts: AtomicU64::new(0),
        }))
    }

    /// Sends `request` and returns the reply's head with a streaming body.
    ///
    /// The URI may be in origin or absolute form; `Host` is sent unchanged. Framing headers must agree with
    /// the body.
    pub async fn send(
        &self, mut request: Request<B>, care: ReusePolicy, affinity: &Affinity,
    ) -> Result<Response<UpstreamBody>, SendFailure> {
        let options = UpstreamSendOptions {
            care,
            affinity,
            send_state: None,
            more_headers: AddedHeaders::default(),
            on_interim: None,
        };
        self.send_with(&mut request, options).await
    }

    /// Like [`send`](Self::send). Leaves an empty body in `request`.
    pub async fn send_with(
        &self, request: &mut Request<B>, options: UpstreamSendOptions<'_>,
    ) -> Result<Response<UpstreamBody>, SendFailure> {
        let UpstreamSendOptions { care, affinity, send_state, .. } = options;
        let mut tries = 1;
        // Whether the request may be resent even if it may have been written.
        let mut repeatable = care == ReusePolicy::PassThrough && is_safe_to_resend(request);
        let mut fresh = false;
        loop {
            // Lets a caller that gives up while we wait for a connection know that nothing was written.
            send_state.iter().for_each(|state| state.mark_unsent());
            let fresh_only = fresh || tries == MAX_SEND_ATTEMPTS;
            let channel = match self.try_acquire_channel(care, affinity, fresh_only) {
                Some(channel) => channel,
                // Boxed: futures are moved as a whole, and most requests find an open connection.
                None => {
                    let channel = Box::pin(self.acquire_channel(care, affinity, fresh_only)).await;
                    channel.map_err(SendFailure::NeverWritten)?
                }
            };
            send_state.iter().for_each(|state| state.mark_sending());
            let may_repeat = repeatable && channel.is_reused();
            let result = match channel {
                SendChannel::H1(checkout) => self.send_h1(checkout, request, options).await,
                SendChannel::H2(shared) => {
                    Box::pin(self.send_h2(shared, request, options.more_headers, may_repeat)).await
                }
            };
            match result {
                Ok(response) => return Ok(response),
                Err(AttemptError::Unanswered(_)) if may_repeat => (repeatable, fresh) = (false, true),
                Err(AttemptError::Unanswered(failure) | AttemptError::Final(failure)) => return Err(failure),
                Err(AttemptError::NotSent(error)) if tries == MAX_SEND_ATTEMPTS => {
                    return Err(SendFailure::NeverWritten(error));
                }
                Err(AttemptError::NotSent(_)) => {}
            }
            tries += 1;
        }
    }

    /// Until the reply is read, dropping this future drops the checkout, which closes the connection.
    async fn send_h1(
        &self, mut checkout: Checkout, request: &mut Request<B>, options: UpstreamSendOptions<'_>,
    ) -> Result<Response<UpstreamBody>, AttemptError> {
        let reply = poll_fn(|cx| {
            if !checkout.is_used {
                checkout.is_used = true;
                if !checkout.connection().is_silent(cx) {
                    let reason = "found closed".to_owned();
                    return Poll::Ready(Err(AttemptError::NotSent(UpstreamError::Closed { reason })));
                }
                checkout.connection().begin(request, options.more_headers, &self.host);
            }
            let connection = checkout.connection();
            connection.poll_reply(cx, request, options.on_interim).map_err(|reason| match connection.is_unwritten() {
                true => AttemptError::Unanswered(SendFailure::NeverWritten(UpstreamError::Closed { reason })),
                false => AttemptError::maybe_written(connection.has_reply_bytes(), reason),
            })
        });
        let reply = reply.await?;
        if reply.status() == StatusCode::SWITCHING_PROTOCOLS {
            return Ok(reply.map(|()| UpstreamBody::upgraded(checkout)));
        }
        options.affinity.remember(&checkout);
        let unsent = match checkout.connection().is_sent() {
            true => None,
            false => Some(Box::pin(mem::take(request.body_mut()).map_err(Into::into)) as UnsentBody),
        };
        Ok(reply.map(|()| UpstreamBody::h1(checkout, unsent)))
    }

    /// With `keeps_copy`, leaves the request as it was, except for its body, which is empty.
    async fn send_h2(
        &self, mut shared: H2Connection<B>, request: &mut Request<B>, more: AddedHeaders<'_>, keeps_copy: bool,
    ) -> Result<Response<UpstreamBody>, AttemptError> {
        let copy = if keeps_copy { clone_without_body(request) } else { Request::new(B::default()) };
        let mut sent = mem::replace(request, copy);
        self.rewrite_for_http2(&mut sent);
        let more = more.to_list();
        more.iter().for_each(|(name, value)| drop(sent.headers_mut().insert(name, value.clone())));
        let reply = shared.sender.try_send_request(sent);
        let socket = Arc::clone(&shared.socket);
        match self.await_h2_reply(shared, reply).await {
            Ok(response) => Ok(response.map(UpstreamBody::h2)),
            Err(mut e) => {
                let (back, reason) = (e.take_message(), error_chain(e.error()));
                Err(match back {
                    Some(back) => {
                        *request = back;
                        more.iter().for_each(|(name, _)| drop(request.headers_mut().remove(name)));
                        AttemptError::NotSent(UpstreamError::Closed { reason })
                    }
                    None if handshake::is_unprocessed(e.error()) => {
                        AttemptError::Final(SendFailure::NeverWritten(UpstreamError::Refused { reason }))
                    }
                    // If the whole connection ended, not only this stream, no head had arrived.
                    None => AttemptError::maybe_written(!socket.is_unusable(), reason),
                })
            }
        }
    }

    /// Returns an open connection without waiting.
    fn try_acquire_channel(&self, care: ReusePolicy, affinity: &Affinity, fresh: bool) -> Option<SendChannel<B>> {
        match self.protocol.load(Ordering::Acquire) {
            SPEAKS_H1 if fresh => None,
            SPEAKS_H1 => self.pool.try_get(care, affinity).map(SendChannel::H1),
            _ => self.live_h2_connection().map(SendChannel::H2),
        }
    }

    /// Returns a channel to send on. Nothing of the request reaches the upstream before that.
    async fn acquire_channel(
        &self, care: ReusePolicy, affinity: &Affinity, fresh: bool,
    ) -> Result<SendChannel<B>, UpstreamError> {
        if self.protocol.load(Ordering::Acquire) != SPEAKS_H1 {
            if let Some(live) = self.live_h2_connection() {
                return Ok(SendChannel::H2(live));
            }
            let before = self.connect_attempts.load(Ordering::Acquire);
            let mut last = self.connect_lock.lock().await;
            if let Some(live) = self.live_h2_connection() {
                return Ok(SendChannel::H2(live));
            }
            if self.protocol.load(Ordering::Acquire) != SPEAKS_H1 {
                if let Some(error) = last.as_ref()
                    && self.connect_attempts.load(Ordering::Acquire) != before
                {
                    return Err(error.clone());
                }
                let channel = match self.acquire_ticket(care, affinity, true).await {
                    Ok(PoolTicket::Permit(permit, share)) => self.open_channel(permit, share).await,
                    Ok(PoolTicket::Connection(lease)) => Ok(SendChannel::H1(lease)),
                    Err(error) => Err(error),
                };
                *last = channel.as_ref().err().cloned();
                self.connect_attempts.fetch_add(1, Ordering::Release);
                return channel;
            }
        }
        match self.acquire_ticket(care, affinity, fresh).await? {
            PoolTicket::Connection(lease) => Ok(SendChannel::H1(lease)),
            PoolTicket::Permit(permit, share) => self.open_channel(permit, share).await,
        }
    }

    /// A claimed request waits without a limit here; its caller enforces the policy's timeout.
    async fn acquire_ticket(
        &self, care: ReusePolicy, affinity: &Affinity, fresh: bool,
    ) -> Result<PoolTicket, UpstreamError> {
        let granted = self.pool.get(care, affinity, fresh);
        match care {
            ReusePolicy::Claimed => Ok(granted.await),
            ReusePolicy::PassThrough => tokio::time::timeout(self.pool_timeout, granted)
                .await
                .map_err(|_| UpstreamError::PoolExhausted { after: self.pool_timeout }),
        }
    }

    /// Waits for a reply. hyper returns a request that was queued while its connection ended, but only once every sender
    /// is gone.
    async fn await_h2_reply<T>(&self, shared: H2Connection<B>, reply: impl Future<Output = T>) -> T {
        tokio::pin!(reply);
        tokio::select! {
            biased;
            reply = &mut reply => return reply,
            () = shared.socket.dropped.cancelled() => {}
        }
        for connection in &self.h2_connections {
            let mut current = connection.lock();
            if current.as_ref().is_some_and(|current| Arc::ptr_eq(&current.socket, &shared.socket)) {
                *current = None;
            }
        }
        drop(shared);
        reply.await
    }

    /// Returns this core's connection. If it has none and no more may be opened, returns another core's.
    fn live_h2_connection(&self) -> Option<H2Connection<B>> {
        let own = cores::index();
        self.live_h2_connection_of(own).or_else(|| {
            let others = (0..self.h2_connections.len()).filter(|core| *core != own && self.pool.is_full());
            others.into_iter().find_map(|core| self.live_h2_connection_of(core))
        })
    }

    fn live_h2_connection_of(&self, core: usize) -> Option<H2Connection<B>> {
        let mut shared = self.h2_connections[core].lock();
        let is_live = |live: &H2Connection<B>| !live.sender.is_closed() && !live.socket.is_unusable();
        if !shared.as_ref().is_some_and(is_live) {
            *shared = None;
        }
        shared.clone()
    }

    async fn open_channel(
        &self, permit: ConnectionPermit, share: Option<UnclaimedPermit>,
    ) -> Result<SendChannel<B>, UpstreamError> {
        let closed = |e: hyper::Error| UpstreamError::Closed { reason: error_chain(&e) };
        let (stream, is_h2) = self.connector.connect(permit).await?;
        if is_h2 {
            let socket = stream.state();
            let sender = handshake::start_h2(stream, !self.is_grpc).await.map_err(closed)?;
            let shared = H2Connection { sender, socket, is_reused: false };
            *self.h2_connections[cores::index()].lock() = Some(shared.clone());
            self.protocol.store(SPEAKS_H2, Ordering::Release);
            return Ok(SendChannel::H2(shared));
        }
        if self.is_grpc {
            let target = self.connector.target.authority.to_string();
            let reason = "the app does not speak HTTP/2, which gRPC needs".to_owned();
            return Err(UpstreamError::Tls { target, reason });
        }
        self.protocol.store(SPEAKS_H1, Ordering::Release);
        Ok(SendChannel::H1(self.pool.register(stream, share)))
    }

    /// Sets `:scheme` and `:authority`, the latter from `Host` if present.
    fn rewrite_for_http2(&self, request: &mut Request<B>) {
        *request.version_mut() = Version::HTTP_2;
        let host = request.headers_mut().remove(HOST);
        let target = &self.connector.target;
        let authority = host
            .and_then(|h| Authority::try_from(h.as_bytes()).ok())
            .or_else(|| request.uri().authority().cloned())
            .unwrap_or_else(|| target.authority.clone());
        let mut parts = http::uri::Parts::default();
        if request.method() != Method::CONNECT {
            parts.scheme = Some(target.uri_scheme());
            let path = request.uri().path_and_query();
            parts.path_and_query = Some(path.cloned().unwrap_or(PathAndQuery::from_static("/")));
        }
        parts.authority = Some(authority);
        // An authority with scheme and path, or alone, is always a valid URI.
        if let Ok(uri) = Uri::from_parts(parts) {
            *request.uri_mut() = uri;
        }
    }
}

/// Whether a request can be sent twice without harm and without buffering a body.
fn is_safe_to_resend<B: Body>(request: &Request<B>) -> bool {
    matches!(*request.method(), Method::GET | Method::HEAD) && request.body().is_end_stream()
}

/// Copies a request that has no body.
fn clone_without_body<B: Default>(request: &Request<B>) -> Request<B> {
    let mut copy = Request::new(B::default());
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.version_mut() = request.version();
    *copy.headers_mut() = request.headers().clone();
    *copy.extensions_mut() = request.extensions().clone();
    copy
}

/// Joins the lines of a header into one, in order.
pub(crate) fn join_header_lines(headers: &mut HeaderMap, name: HeaderName, between: &[u8]) {
    let mut lines = headers.get_all(&name).iter();
    let (Some(first), Some(second)) = (lines.next(), lines.next()) else { return };
    let mut joined = first.as_bytes().to_vec();
    for line in std::iter::once(second).chain(lines) {
        joined.extend_from_slice(between);
        joined.extend_from_slice(line.as_bytes());
    }
    if let Ok(joined) = HeaderValue::from_bytes(&joined) {
        headers.insert(name, joined);
    }
}
