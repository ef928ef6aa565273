//! The upstream side of the gateway: sends a request, and says what is certain when that fails.
//!
//! Invariants:
//! - [`Failure::NeverWritten`] is a proof: not one byte of the request can have reached the upstream, or the
//!   upstream said in its protocol's terms that it did not process it. Everything else is [`Failure::Lost`].
//! - A request is sent again by itself only with that proof, at most [`TRIES`] times; except a GET or HEAD without a claim
//!   and without a body, once, on another connection, if a reused one ended before a byte of the answer.
//! - Dropping the future of [`Upstream::send`], or a reply's body before its end, closes the HTTP/1.1
//!   connection or resets the HTTP/2 stream. There are no time-outs here but those for a connection: to get one of
//!   the pool, and to open one.

mod body;
mod connect;
mod drive;
mod error;
mod pool;
mod slot;
mod wire;

use std::error::Error as StdError;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::header::{COOKIE, HOST};
use http::uri::{Authority, PathAndQuery};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, Version};
use http_body::Body;
use hyper::client::conn::http2;
use ibid::http::Unsent;
use parking_lot::Mutex;

pub use body::UpstreamBody;
pub use connect::{Scheme, Target};
pub(crate) use connect::{keep_client_alive, native_roots};
pub use error::{Error, Failure, SetupError};
pub use slot::Affinity;

use connect::{Connector, Line};
use error::chain;
use pool::{Grant, Permit, Pool, Share};
use slot::Lease;
use wire::Proof;

/// What request bodies may fail with.
pub type BoxError = Box<dyn StdError + Send + Sync>;

/// How often one request is tried while it is proved unwritten; the last time on a fresh connection.
const TRIES: u32 = 3;

/// What an upstream is configured with.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Open connections, busy, idle and upgraded together. Requests wait beyond it.
    pub max_connections: usize,
    /// For name, TCP and TLS together.
    pub connect_timeout: Duration,
    /// How long a request without a claim waits for a connection of the pool.
    pub pool_timeout: Duration,
    /// How long an unused connection is kept; the upstream's `Keep-Alive` may shorten it.
    pub idle_timeout: Duration,
    /// For `https`; None trusts what the system trusts. ALPN is filled in if empty.
    pub tls: Option<Arc<rustls::ClientConfig>>,
    /// For gRPC calls: HTTP/2 or nothing, and no pings, for which gRPC servers close a connection with all its calls.
    pub for_calls: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            max_connections: 1024,
            connect_timeout: Duration::from_secs(5),
            pool_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(60),
            tls: None,
            for_calls: false,
        }
    }
}

/// How much a request's outcome matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Care {
    /// An idempotent operation whose outcome must be proved: only connections used within the last second.
    Claimed,
    /// Pass-through.
    Plain,
}

/// One attempt's end without a reply.
enum Miss<B> {
    /// Untouched, to be tried again.
    Back(Box<Request<B>>, Error),
    /// The connection ended before a byte of the answer.
    Unanswered(Failure),
    Over(Failure),
}

enum Channel<B> {
    H1(Lease<B>),
    H2(Shared<B>),
}

impl<B> Channel<B> {
    /// Whether the upstream may have been about to close it.
    fn is_reused(&self) -> bool {
        match self {
            Self::H1(lease) => lease.is_reused(),
            Self::H2(shared) => shared.reused,
        }
    }
}

/// An HTTP/2 connection.
struct Shared<B> {
    sender: http2::SendRequest<B>,
    proof: Arc<Proof>,
    /// Whether it was there before this request came.
    reused: bool,
}

impl<B> Clone for Shared<B> {
    fn clone(&self) -> Self {
        Self { sender: self.sender.clone(), proof: Arc::clone(&self.proof), reused: true }
    }
}

const UNKNOWN: u8 = 0;
const SPEAKS_H1: u8 = 1;
const SPEAKS_H2: u8 = 2;

/// One upstream, its connections and what is known about it. `B` is the body type of its requests.
pub struct Upstream<B> {
    connector: Connector,
    host: HeaderValue,
    pool: Arc<Pool<B>>,
    pool_timeout: Duration,
    for_calls: bool,
    /// What it speaks: configured, or what ALPN last chose.
    speaks: AtomicU8,
    /// The HTTP/2 connection. Locked to clone or replace it.
    shared: Mutex<Option<Shared<B>>>,
    /// Held while connecting an upstream that speaks or may speak HTTP/2, so that a crowd opens one
    /// connection; holds the last attempt's error for those who queued up meanwhile, or each of them
    /// would wait out the connect time-out in turn.
    dial: tokio::sync::Mutex<Option<Error>>,
    /// Attempts finished, to tell who queued up before the last one.
    dials: AtomicU64,
}

impl<B> Upstream<B>
where
    B: Body<Data = Bytes> + Default + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    /// Nothing is connected yet.
    pub fn new(target: Target, settings: Settings) -> Result<Arc<Self>, SetupError> {
        let speaks = match target.scheme() {
            Scheme::Http => SPEAKS_H1,
            Scheme::H2c => SPEAKS_H2,
            Scheme::Https => UNKNOWN,
        };
        let host = HeaderValue::from_str(target.authority().as_str())
            .map_err(|e| SetupError::Target { text: target.authority().to_string(), why: e.to_string() })?;
        Ok(Arc::new(Self {
            connector: Connector::new(target, settings.connect_timeout, settings.tls, settings.for_calls)?,
            host,
            pool: Pool::new(settings.max_connections, settings.idle_timeout),
            pool_timeout: settings.pool_timeout,
            for_calls: settings.for_calls,
            speaks: AtomicU8::new(speaks),
            shared: Mutex::new(None),
            dial: tokio::sync::Mutex::new(None),
            dials: AtomicU64::new(0),
        }))
    }

    /// Whether it is for gRPC calls: see [`Settings::for_calls`].
    pub fn is_for_calls(&self) -> bool {
        self.for_calls
    }

    /// Sends `request` and returns the reply's head; the body follows by itself.
    ///
    /// The URI may be in origin or absolute form, `Host` goes as it is. Framing headers must agree with
    /// the body.
    pub async fn send(
        &self, mut request: Request<B>, care: Care, affinity: &Affinity<B>,
    ) -> Result<Response<UpstreamBody>, Failure> {
        // Whoever gives up while we wait for a connection knows that nothing was written.
        let unsent = request.extensions().get::<Unsent>().cloned();
        let mut tries = 1;
        // Whether it may be sent again although it may have been written.
        let mut repeatable = care == Care::Plain && is_safe(&request);
        let mut fresh = false;
        loop {
            unsent.iter().for_each(Unsent::hold);
            let channel = self.channel(care, affinity, fresh || tries == TRIES).await.map_err(Failure::NeverWritten)?;
            unsent.iter().for_each(Unsent::sending);
            let copy = (repeatable && channel.is_reused()).then(|| copy_of(&request));
            let result = match channel {
                Channel::H1(lease) => self.over_h1(lease, request, affinity).await,
                Channel::H2(shared) => self.over_h2(shared, request).await,
            };
            match result {
                Ok(response) => return Ok(response),
                Err(Miss::Unanswered(failure)) => match copy {
                    Some(copy) => (request, repeatable, fresh) = (copy, false, true),
                    None => return Err(failure),
                },
                Err(Miss::Over(failure)) => return Err(failure),
                Err(Miss::Back(_, error)) if tries == TRIES => return Err(Failure::NeverWritten(error)),
                Err(Miss::Back(back, _)) => request = *back,
            }
            tries += 1;
        }
    }

    async fn over_h1(
        &self, mut lease: Lease<B>, mut request: Request<B>, affinity: &Affinity<B>,
    ) -> Result<Response<UpstreamBody>, Miss<B>> {
        self.dress_h1(&mut request);
        let gone = || Error::Closed { reason: "found closed".to_owned() };
        let reply = match lease.send(request) {
            // From here to the reply, dropping us drops the lease, which closes the connection.
            Ok(reply) => lease.answered(reply).await,
            Err(back) => return Err(Miss::Back(Box::new(back), gone())),
        };
        match reply {
            Ok(response) if response.status() == StatusCode::SWITCHING_PROTOCOLS => {
                let share = lease.detach();
                Ok(response.map(|inner| UpstreamBody::upgraded(inner, share)))
            }
            Ok(response) => {
                affinity.remember(&lease);
                let limit = body::keep_alive(response.headers());
                Ok(response.map(|inner| UpstreamBody::h1(inner, lease.into_home(), limit)))
            }
            Err(mut e) => match e.take_message() {
                Some(back) => Err(Miss::Back(Box::new(back), Error::Closed { reason: chain(e.error()) })),
                None if lease.never_written() => {
                    Err(Miss::Unanswered(Failure::NeverWritten(Error::Closed { reason: chain(e.error()) })))
                }
                None if lease.is_answered() => Err(Miss::Over(Failure::Lost(Error::reply(e.error())))),
                None => Err(Miss::Unanswered(Failure::Lost(Error::reply(e.error())))),
            },
        }
    }

    async fn over_h2(&self, mut shared: Shared<B>, mut request: Request<B>) -> Result<Response<UpstreamBody>, Miss<B>> {
        self.dress_h2(&mut request);
        let reply = shared.sender.try_send_request(request);
        let proof = Arc::clone(&shared.proof);
        match self.answered_h2(shared, reply).await {
            Ok(response) => Ok(response.map(UpstreamBody::h2)),
            Err(mut e) => match e.take_message() {
                Some(back) => Err(Miss::Back(Box::new(back), Error::Closed { reason: chain(e.error()) })),
                None if drive::unprocessed(e.error()) => {
                    Err(Miss::Over(Failure::NeverWritten(Error::Refused { reason: chain(e.error()) })))
                }
                // The connection ended, not this stream only; and a head would have been an answer.
                None if proof.is_spent() => Err(Miss::Unanswered(Failure::Lost(Error::reply(e.error())))),
                None => Err(Miss::Over(Failure::Lost(Error::reply(e.error())))),
            },
        }
    }

    /// Something to send on. Nothing of the request exists for the upstream until it is.
    async fn channel(&self, care: Care, affinity: &Affinity<B>, fresh: bool) -> Result<Channel<B>, Error> {
        if self.speaks.load(Ordering::Acquire) != SPEAKS_H1 {
            if let Some(live) = self.live() {
                return Ok(Channel::H2(live));
            }
            let before = self.dials.load(Ordering::Acquire);
            let mut last = self.dial.lock().await;
            if let Some(live) = self.live() {
                return Ok(Channel::H2(live));
            }
            if self.speaks.load(Ordering::Acquire) != SPEAKS_H1 {
                if let Some(error) = last.as_ref()
                    && self.dials.load(Ordering::Acquire) != before
                {
                    return Err(error.clone());
                }
                let channel = match self.granted(care, affinity, true).await {
                    Ok(Grant::Permit(permit, share)) => self.open(permit, share).await,
                    Ok(Grant::Lease(lease)) => Ok(Channel::H1(lease)),
                    Err(error) => Err(error),
                };
                *last = channel.as_ref().err().cloned();
                self.dials.fetch_add(1, Ordering::Release);
                return channel;
            }
        }
        match self.granted(care, affinity, fresh).await? {
            Grant::Lease(lease) => Ok(Channel::H1(lease)),
            Grant::Permit(permit, share) => self.open(permit, share).await,
        }
    }

    /// A claimed request waits as long as its policy lets it; whoever sends it sees to that.
    async fn granted(&self, care: Care, affinity: &Affinity<B>, fresh: bool) -> Result<Grant<B>, Error> {
        let granted = self.pool.get(care, affinity, fresh);
        match care {
            Care::Claimed => Ok(granted.await),
            Care::Plain => tokio::time::timeout(self.pool_timeout, granted)
                .await
                .map_err(|_| Error::NoneFree { after: self.pool_timeout }),
        }
    }

    /// As [`Lease::answered`]: a request that was queued while its connection ended comes back once every sender is gone.
    async fn answered_h2<T>(&self, shared: Shared<B>, reply: impl Future<Output = T>) -> T {
        tokio::pin!(reply);
        tokio::select! {
            biased;
            reply = &mut reply => return reply,
            () = shared.proof.gone() => {}
        }
        {
            let mut current = self.shared.lock();
            if current.as_ref().is_some_and(|current| Arc::ptr_eq(&current.proof, &shared.proof)) {
                *current = None;
            }
        }
        drop(shared);
        reply.await
    }

    fn live(&self) -> Option<Shared<B>> {
        let mut shared = self.shared.lock();
        match &*shared {
            Some(live) if !live.sender.is_closed() && !live.proof.is_spent() => Some(live.clone()),
            Some(_) => {
                *shared = None;
                None
            }
            None => None,
        }
    }

    async fn open(&self, permit: Permit<B>, share: Option<Share>) -> Result<Channel<B>, Error> {
        let closed = |e: hyper::Error| Error::Closed { reason: chain(&e) };
        let line = self.connector.connect(Box::new(permit)).await?;
        let (proof, h2) = match &line {
            Line::Plain { wire, h2 } => (wire.proof(), *h2),
            Line::Tls { stream, h2 } => (stream.get_ref().0.proof(), *h2),
        };
        if h2 {
            let sender = match line {
                Line::Plain { wire, .. } => drive::h2(wire, !self.for_calls).await,
                Line::Tls { stream, .. } => drive::h2(stream, !self.for_calls).await,
            };
            let shared = Shared { sender: sender.map_err(closed)?, proof, reused: false };
            *self.shared.lock() = Some(shared.clone());
            self.speaks.store(SPEAKS_H2, Ordering::Release);
            return Ok(Channel::H2(shared));
        }
        if self.for_calls {
            let target = self.connector.target.authority().to_string();
            return Err(Error::Tls { target, reason: "the app does not speak HTTP/2, which gRPC needs".to_owned() });
        }
        self.speaks.store(SPEAKS_H1, Ordering::Release);
        let (sender, driver) = match line {
            Line::Plain { wire, .. } => drive::h1(wire, Arc::clone(&proof)).await,
            Line::Tls { stream, .. } => drive::h1(stream, Arc::clone(&proof)).await,
        }
        .map_err(closed)?;
        Ok(Channel::H1(self.pool.adopt(sender, proof, driver, share)))
    }

    /// Origin form, `Host` as given, else from the URI, else the upstream's own; cookies in one line.
    fn dress_h1(&self, request: &mut Request<B>) {
        *request.version_mut() = Version::HTTP_11;
        if !request.headers().contains_key(HOST) {
            let host = match request.uri().authority().map(|a| HeaderValue::from_str(a.as_str())) {
                Some(Ok(host)) => host,
                _ => self.host.clone(),
            };
            request.headers_mut().insert(HOST, host);
        }
        join_lines(request.headers_mut(), COOKIE, b"; ");
        if request.uri().authority().is_some() && request.method() != Method::CONNECT {
            *request.uri_mut() = match request.uri().path_and_query() {
                Some(path) => Uri::from(path.clone()),
                None => Uri::from_static("/"),
            };
        }
    }

    /// `:scheme` and `:authority`, the latter from `Host` if there is one.
    fn dress_h2(&self, request: &mut Request<B>) {
        *request.version_mut() = Version::HTTP_2;
        let host = request.headers_mut().remove(HOST);
        let target = &self.connector.target;
        let authority = host
            .and_then(|h| Authority::try_from(h.as_bytes()).ok())
            .or_else(|| request.uri().authority().cloned())
            .unwrap_or_else(|| target.authority().clone());
        let mut parts = http::uri::Parts::default();
        if request.method() != Method::CONNECT {
            parts.scheme = Some(target.uri_scheme());
            let path = request.uri().path_and_query();
            parts.path_and_query = Some(path.cloned().unwrap_or(PathAndQuery::from_static("/")));
        }
        parts.authority = Some(authority);
        // An authority with scheme and path, or alone, is always a URI.
        if let Ok(uri) = Uri::from_parts(parts) {
            *request.uri_mut() = uri;
        }
    }
}

/// Whether a request can be sent twice without harm, and without keeping a body for it.
fn is_safe<B: Body>(request: &Request<B>) -> bool {
    matches!(*request.method(), Method::GET | Method::HEAD) && request.body().is_end_stream()
}

/// The same request; it has no body.
fn copy_of<B: Default>(request: &Request<B>) -> Request<B> {
    let mut copy = Request::new(B::default());
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.version_mut() = request.version();
    *copy.headers_mut() = request.headers().clone();
    *copy.extensions_mut() = request.extensions().clone();
    copy
}

/// Makes one line of a header that was sent in several, in their order.
pub(crate) fn join_lines(headers: &mut HeaderMap, name: HeaderName, between: &[u8]) {
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
