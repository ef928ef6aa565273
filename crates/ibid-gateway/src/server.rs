//! The listener: accepts, hands each connection its services, and ends in good order.
//!
//! A shutdown stops accepting, lets every request that has begun run to its end, and waits for the operations behind
//! them. What still runs at the deadline is given up: its claim is parked with the lease kept.

use std::{
    collections::HashSet,
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use http::{HeaderValue, Method, Request, Response, StatusCode, Version, header};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
};
use ibid::{
    Ibid, Policy, Reason, Refusal, grpc,
    http::{IbidLayer, IbidService, Peer, Protocol, ResponseBody, refusal_response},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::{Semaphore, watch},
    task::JoinSet,
    time::timeout,
};
use tokio_rustls::TlsAcceptor;
use tower_layer::Layer;
use tower_service::Service;

use self::traffic::Traffic;
use crate::{
    config::Limits,
    contract_page,
    jwt::Verifier,
    live::{ByChoice, Live},
    proxy::{Client, Proxy, Reply},
    trace::{self, Trace, Tracer},
};

mod traffic;

/// How long the ends of given-up operations may take to reach the store.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// A TLS handshake that takes longer is given up.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How long a client may take to hang up when it has been told to, and nothing goes on.
const GOODBYE: Duration = Duration::from_secs(2);

/// What clients get.
type Answer = Response<ResponseBody<Reply>>;

/// A gateway that listens.
pub struct Server {
    listener: TcpListener,
    secure: bool,
    front: Arc<Front>,
}

/// What is known about a request before any policy.
enum Early {
    Answer(Answer),
    /// It goes on, once this has looked at its token.
    Goes(Option<(Arc<Verifier>, HashSet<String>)>),
}

/// What all connections share.
struct Front {
    live: Arc<Live>,
    ibid: Ibid,
    layer: IbidLayer,
    limits: Limits,
    trusted: ibid::TrustedProxies,
    tracer: Option<Tracer>,
}

impl Server {
    /// Binds the address of the settings in force.
    ///
    /// # Errors
    /// If the address cannot be bound, or the certificate makes no sense.
    pub async fn bind(live: Arc<Live>, ibid: Ibid, tracer: Option<Tracer>) -> Result<Self, String> {
        let (listen, secure, limits, trusted) = {
            let now = live.now();
            let settings = &now.settings;
            (settings.listen, now.tls.is_some(), settings.limits.clone(), settings.trusted_proxies.clone())
        };
        let listener =
            TcpListener::bind(listen).await.map_err(|why| format!("listen: {listen} cannot be bound: {why}"))?;
        let layer = ibid.layer_by(Arc::new(ByChoice(live.clone())));
        let front = Arc::new(Front { live, ibid, layer, limits, trusted, tracer });
        Ok(Self { listener, secure, front })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// If the system does not say.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Whether clients connect with TLS.
    pub fn is_secure(&self) -> bool {
        self.secure
    }

    /// Serves until `stop` says so, then ends in good order.
    pub async fn run(self, mut stop: watch::Receiver<bool>) {
        let mut connections = JoinSet::new();
        let room = Arc::new(Semaphore::new(self.front.limits.max_connections));
        loop {
            // At the limit nobody is accepted; newcomers wait in the system's queue.
            let permit = tokio::select! {
                permit = room.clone().acquire_owned() => permit.expect("never closed"),
                _ = stop.wait_for(|stop| *stop) => break,
            };
            let accepted = tokio::select! {
                accepted = self.listener.accept() => accepted,
                _ = stop.wait_for(|stop| *stop) => break,
            };
            while connections.try_join_next().is_some() {}
            match accepted {
                Ok((socket, peer)) => {
                    // The certificates in force now: each connection has its own.
                    let tls = if self.secure { self.front.live.now().tls.clone() } else { None };
                    let (front, tls, stop) = (self.front.clone(), tls.map(TlsAcceptor::from), stop.clone());
                    connections.spawn(async move {
                        front.connection(socket, peer, tls, stop).await;
                        drop(permit);
                    });
                }
                Err(why) => {
                    tracing::error!(%why, "a connection could not be accepted");
                    // Out of file descriptors, mostly: others must end first.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
        drop(self.listener);
        self.front.end(connections).await;
    }
}

impl Front {
    async fn end(&self, mut connections: JoinSet<()>) {
        let running = self.ibid.engine().running();
        let all = async {
            while connections.join_next().await.is_some() {}
            running.drained().await;
        };
        if timeout(self.limits.shutdown, all).await.is_err() {
            tracing::warn!(running = running.count(), "shutdown: operations still run; their outcome is unknown");
            running.close();
            connections.shutdown().await;
        }
        let later = self.ibid.engine().later();
        if timeout(LAST_WORDS, later.flushed()).await.is_err() {
            tracing::warn!(waiting = later.waiting(), "shutdown: the store did not take every end; their leases lapse");
        }
    }

    async fn connection(
        self: Arc<Self>, socket: TcpStream, peer: SocketAddr, tls: Option<TlsAcceptor>, stop: watch::Receiver<bool>,
    ) {
        let _ = socket.set_nodelay(true);
        match tls {
            None => self.serve(socket, peer, false, stop).await,
            Some(tls) => match timeout(HANDSHAKE, tls.accept(socket)).await {
                Ok(Ok(socket)) => self.serve(socket, peer, true, stop).await,
                Ok(Err(why)) => tracing::debug!(%peer, %why, "no TLS connection"),
                Err(_) => tracing::debug!(%peer, "the TLS handshake took too long"),
            },
        }
    }

    async fn serve<S>(self: Arc<Self>, socket: S, peer: SocketAddr, secure: bool, mut stop: watch::Receiver<bool>)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let client = Client::new(peer.ip(), secure, &self.trusted);
        let service = self.layer.layer(Proxy::new(client));
        let traffic = Arc::new(Traffic::new());
        let answer = {
            let (front, traffic) = (self.clone(), traffic.clone());
            service_fn(move |request| {
                let busy = Traffic::begin(&traffic);
                let answer = front.answer(service.clone(), request, peer);
                async move { Ok::<_, Infallible>(answer.await.map(|body| busy.during(body))) }
            })
        };
        let builder = protocol(&self.limits);
        let connection = builder.serve_connection_with_upgrades(TokioIo::new(socket), answer);
        let mut connection = std::pin::pin!(connection);
        let (mut stopping, mut idle) = (false, None);
        loop {
            let (limit, since) = match idle {
                None => (self.limits.idle_timeout, traffic.opened()),
                Some(since) => (GOODBYE, since),
            };
            tokio::select! {
                result = connection.as_mut() => {
                    if let Err(why) = result {
                        tracing::debug!(%peer, %why, "connection ended");
                    }
                    return;
                }
                _ = stop.wait_for(|stop| *stop), if !stopping => {
                    stopping = true;
                    connection.as_mut().graceful_shutdown();
                }
                () = traffic.idle_for(limit, since), if !stopping => {
                    if idle.is_some() {
                        // Over HTTP/2 clients are asked whether they have understood; some would never say.
                        tracing::debug!(%peer, "the client does not hang up");
                        return;
                    }
                    idle = Some(Instant::now());
                    connection.as_mut().graceful_shutdown();
                }
            }
        }
    }

    /// One request: what holds for all of them, before any policy.
    fn answer(
        &self, mut service: IbidService<Proxy>, mut request: Request<Incoming>, peer: SocketAddr,
    ) -> impl Future<Output = Answer> + Send + use<> {
        let trace = self.tracer.as_ref().and_then(|tracer| Trace::begin(tracer, &mut request));
        let early = self.before_policies(&mut request, peer);
        async move {
            let answer = async {
                let verifier = match early {
                    Early::Answer(answer) => return answer,
                    Early::Goes(verifier) => verifier,
                };
                if let Some((verifier, wanted)) = verifier {
                    let identity = Box::pin(verifier.identify(request.headers(), &wanted)).await;
                    request.extensions_mut().insert(identity);
                }
                service.call(request).await.unwrap_or_else(|never| match never {})
            };
            match trace {
                Some(trace) => {
                    let mut answer = trace.around(answer).await;
                    trace.answered(&mut answer);
                    answer
                }
                None => {
                    let mut answer = answer.await;
                    // Of an answer that was remembered while there was tracing.
                    trace::take_kept(&mut answer);
                    answer
                }
            }
        }
    }

    fn before_policies(&self, request: &mut Request<Incoming>, peer: SocketAddr) -> Early {
        let is_call = grpc::is_call(request.version(), request.headers());
        let protocol = if is_call { Protocol::Grpc } else { Protocol::Http };
        if let Some(detail) = unclear(request) {
            let refusal = Refusal::new(Reason::RequestAmbiguous, detail);
            let mut policy = Policy::ietf();
            policy.refusals = self.live.now().settings.routes.refusals(request.uri().path());
            let mut answer = match protocol {
                Protocol::Http => refusal_response(&refusal, &policy, ""),
                Protocol::Grpc => grpc::refusal_response(&refusal, &policy, ""),
            };
            if request.version() != Version::HTTP_2 {
                // What follows on this connection may be the rest of what was not understood.
                answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            return Early::Answer(answer);
        }
        let now = self.live.now();
        if request.uri().path() == contract_page::PATH && matches!(*request.method(), Method::GET | Method::HEAD) {
            return Early::Answer(contract(&now.page, request));
        }
        let own: Vec<_> = request.headers().keys().filter(|name| name.as_str().starts_with("ibid-")).cloned().collect();
        own.iter().for_each(|name| drop(request.headers_mut().remove(name)));
        let chosen = now.choose(protocol, request.method(), request.uri().path());
        let verifier = now.verifier(&chosen);
        request.extensions_mut().insert(chosen);
        request.extensions_mut().insert(Peer(peer.ip()));
        Early::Goes(verifier)
    }
}

/// Why the app, or a proxy on the way, could take a request for another one, whatever its policy.
fn unclear(request: &Request<Incoming>) -> Option<&'static str> {
    unclear_framing(request).or_else(|| unclear_host(request)).or_else(|| unclear_target(request))
}

/// hyper looks at the last coding only; the others would be taken off here without having been decoded.
fn unclear_framing(request: &Request<Incoming>) -> Option<&'static str> {
    let mut codings = request.headers().get_all(header::TRANSFER_ENCODING).iter();
    let only = codings.next()?;
    let plain = codings.next().is_none() && only.as_bytes().eq_ignore_ascii_case(b"chunked");
    (!plain).then_some("the body has a transfer coding other than chunked")
}

/// Of two hosts one would decide the scope, the other what the app serves. HTTP/1.1 asks for exactly one.
fn unclear_host(request: &Request<Incoming>) -> Option<&'static str> {
    let mut hosts = request.headers().get_all(header::HOST).iter();
    let (first, second) = (hosts.next(), hosts.next());
    if second.is_some() {
        return Some("the header host is sent more than once");
    }
    let named = first.map(HeaderValue::as_bytes);
    let aimed = request.uri().authority().map(|authority| authority.as_str().as_bytes());
    let in_a_host = |byte: &u8| byte.is_ascii_alphanumeric() || b"-._~!$&'()*+;=:[]%".contains(byte);
    if named.into_iter().chain(aimed).flatten().any(|byte| !in_a_host(byte)) {
        return Some("what should be the name of one host is not");
    }
    match (named, aimed) {
        (None, None) if request.version() != Version::HTTP_10 => Some("the request names no host"),
        (None, Some(_)) if request.version() == Version::HTTP_11 => Some("the header host is missing"),
        (Some(named), Some(aimed)) if !named.eq_ignore_ascii_case(aimed) => {
            Some("the target of the request and its header host name different hosts")
        }
        _ => None,
    }
}

/// Routes match paths, so that a target without one would pass all of them by; and who asks for a tunnel would speak to
/// the app unseen.
fn unclear_target(request: &Request<Incoming>) -> Option<&'static str> {
    if request.method() == Method::CONNECT {
        return Some("there are no tunnels through here");
    }
    let path = request.uri().path();
    let fits = path.starts_with('/') || path == "*" && request.method() == Method::OPTIONS;
    (!fits).then_some("the target of the request is not a path")
}

/// How connections of clients are spoken to.
pub fn protocol(limits: &Limits) -> auto::Builder<TokioExecutor> {
    let head = usize::try_from(limits.max_header_bytes).unwrap_or(usize::MAX).max(8192);
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_timeout)
        .max_headers(limits.max_headers)
        .max_buf_size(head);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_header_list_size(u32::try_from(head).unwrap_or(u32::MAX))
        .max_concurrent_streams(250)
        .initial_stream_window_size(1 << 20)
        .initial_connection_window_size(4 << 20)
        .keep_alive_interval(Some(Duration::from_secs(30)))
        .keep_alive_timeout(Duration::from_secs(20));
    builder
}

fn contract(page: &crate::live::Page, request: &Request<Incoming>) -> Answer {
    let accept = request.headers().get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    let html = accept.find("text/html");
    let json = accept.find("json");
    let wants_html = html.is_some_and(|html| json.is_none_or(|json| html < json));
    let (body, kind) =
        if wants_html { (&page.html, "text/html; charset=utf-8") } else { (&page.json, "application/json") };
    let mut answer = Response::new(ResponseBody::whole(body.clone(), None));
    *answer.status_mut() = StatusCode::OK;
    let headers = answer.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(header::VARY, HeaderValue::from_static("accept"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("max-age=60"));
    headers.insert(
        header::CONTENT_SECURITY_POLICY,
        HeaderValue::from_static("default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"),
    );
    answer
}
