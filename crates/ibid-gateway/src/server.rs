//! The listener: accepts connections, serves each one, and shuts down gracefully.
//!
//! At shutdown the server stops accepting, lets running requests finish, and waits for their operations. At the
//! deadline it stops waiting: unfinished operations get the state outcome unknown.

use std::{
    collections::HashSet,
    convert::Infallible,
    future::poll_fn,
    io,
    net::SocketAddr,
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Waker, ready},
    time::{Duration, Instant},
};

use http::{HeaderValue, Method, Request, Response, StatusCode, Version, header, request::Parts};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::conn::auto,
};
use ibid::{
    Ibid, Refusal, RefusalReason,
    http::{
        PeerConnection, Protocol, RequestSender, ResponseBody, catch_panic, plain_response, refusal_response,
        sent_request_id,
    },
    policy::RefusalFormat,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::watch,
    time::timeout,
};

use self::connection_activity::{ConnectionActivity, EventWaker, StreamExecutor, WriteProgress};
use crate::{
    config::LimitSettings,
    contract_page,
    cores::Cores,
    jwt::JwtVerifier,
    listener::{self, AcceptedConnection, ConnectionHandler, accept_connections},
    openapi_document::Asked,
    proxy::{Proxy, ProxyClient, ProxyResponseBody, RequestFailure, tunnel},
    snapshot::{RequestHead, RoutedUpstream},
    trace::{self, RequestTrace, Tracer},
    watch::LiveConfig,
};

mod connection_activity;
pub mod interim;

/// At shutdown: maximum time for the settlements of abandoned operations to reach the store.
const SETTLE_FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum time for an idle client to close its connection after the server asked it to.
const CLIENT_CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

type ClientResponse = Response<ResponseBody<ProxyResponseBody>>;

/// A listening gateway.
pub struct GatewayServer {
    listener: TcpListener,
    cores: Cores,
    state: Arc<ServerState>,
}

/// What happens to a connection besides its input and output.
enum ConnectionEvent {
    /// The server shuts down.
    Stop,
    /// The connection has been idle for too long.
    Idle,
    /// The connection must be closed at once, for this reason.
    Cut(&'static str),
}

/// The result of the checks that come before any policy.
enum Precheck {
    Respond(ClientResponse),
    /// Continue after verifying the token, if there is a verifier.
    Continue(RoutedUpstream, Option<(Arc<JwtVerifier>, HashSet<String>)>),
    /// The request is for an OpenAPI document that the gateway annotates.
    Document(RoutedUpstream, Box<Asked>),
}

/// State that all connections share.
struct ServerState {
    live: Arc<LiveConfig>,
    ibid: Ibid,
    limits: LimitSettings,
    trusted_proxies: ibid::scope::TrustedProxies,
    tracer: Option<Tracer>,
    is_secure: bool,
    /// Becomes true at shutdown.
    stop: watch::Receiver<bool>,
}

impl GatewayServer {
    /// Binds the listen address of the settings in force.
    pub async fn bind(
        live: Arc<LiveConfig>, ibid: Ibid, tracer: Option<Tracer>, stop: watch::Receiver<bool>,
    ) -> Result<Self, String> {
        let (listen, is_secure, limits, trusted_proxies) = {
            let now = live.now();
            let settings = &now.settings;
            (settings.listen, now.tls.is_some(), settings.limits.clone(), settings.trusted_proxies.clone())
        };
        let listener =
            TcpListener::bind(listen).await.map_err(|why| format!("listen: {listen} cannot be bound: {why}"))?;
        let cores =
            Cores::start().map_err(|why| format!("the threads that serve requests cannot be started: {why}"))?;
        let state = ServerState { live, ibid, limits, trusted_proxies, tracer, is_secure, stop };
        Ok(Self { listener, cores, state: Arc::new(state) })
    }

    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    pub fn is_secure(&self) -> bool {
        self.state.is_secure
    }

    /// Serves until `stop` becomes true, then shuts down gracefully.
    pub async fn run(self) {
        let mut stop = self.state.stop.clone();
        let stopped = async move { drop(stop.wait_for(|stop| *stop).await) };
        let Self { listener, cores, state } = self;
        accept_connections(listener, state.limits.max_connections, stopped, |socket, peer, permit| {
            // Leaves the acceptor's runtime, so that the core's runtime can adopt it.
            let socket = socket.into_std();
            let state = state.clone();
            cores.spawn(async move {
                match socket.and_then(TcpStream::from_std) {
                    Ok(socket) => listener::serve_connection(socket, peer, permit, state).await,
                    Err(why) => tracing::error!(%peer, %why, "a connection could not be served"),
                }
            });
        })
        .await;
        state.shut_down(&cores).await;
        cores.stop().await;
    }
}

impl ConnectionHandler for ServerState {
    fn tls(&self) -> Option<Arc<rustls::ServerConfig>> {
        if self.is_secure { self.live.now().tls.clone() } else { None }
    }

    async fn serve<S>(self: Arc<Self>, socket: S, connection: AcceptedConnection)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let AcceptedConnection { peer, is_secure, permit, .. } = &connection;
        let permit = Arc::downgrade(permit);
        let client = ProxyClient::new(peer.ip(), *is_secure, &self.trusted_proxies, &self.limits, permit);
        self.serve_connection(socket, *peer, client).await;
    }
}

impl ServerState {
    async fn shut_down(&self, cores: &Cores) {
        let running = self.ibid.engine().running();
        let all = async {
            cores.wait_idle().await;
            running.wait_idle().await;
        };
        if timeout(self.limits.shutdown, all).await.is_err() {
            tracing::warn!(running = running.count(), "shutdown: operations still run; their outcome is unknown");
            running.close();
            cores.abort().await;
        }
        let later = self.ibid.engine().settle_queue();
        if timeout(SETTLE_FLUSH_TIMEOUT, later.wait_until_empty()).await.is_err() {
            tracing::warn!(waiting = later.pending(), "shutdown: the store did not take every end; their leases lapse");
        }
    }

    async fn serve_connection<S>(self: &Arc<Self>, socket: S, peer: SocketAddr, client: Arc<ProxyClient>)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let interim = client.interim.clone();
        let traffic = Arc::new(ConnectionActivity::new());
        let sending = WriteProgress::new();
        let answer = {
            let (front, traffic, interim, sending) = (self.clone(), traffic.clone(), interim.clone(), sending.clone());
            let link = PeerConnection::default();
            service_fn(move |request: Request<Incoming>| {
                let busy = ConnectionActivity::begin(&traffic);
                let (front, client, connection, sending) =
                    (front.clone(), client.clone(), link.clone(), sending.clone());
                let protocol = Protocol::of_request(request.version(), request.headers());
                let interim = (request.version() == Version::HTTP_11).then(|| interim.clone());
                interim.iter().for_each(|interim| interim.begin_request());
                async move {
                    // Everything runs inside, so that a panic before the first await does not end the connection
                    // either.
                    let abort = WriteProgress::current(&sending).cancellation.clone();
                    let answer = catch_panic(async move {
                        let (peer, connection, abort) = (Some(peer.ip()), Some(connection), Some(abort));
                        let sender = RequestSender { peer, connection, abort, ..RequestSender::default() };
                        front.handle_request(client, request, sender).await
                    });
                    let answer = answer.await.unwrap_or_else(|| panic_response(protocol));
                    interim.iter().for_each(|interim| interim.end_request());
                    Ok::<_, Infallible>(answer.map(|body| busy.track_body(body, WriteProgress::current(&sending))))
                }
            })
        };
        let builder = connection_builder(&self.limits);
        let socket = interim::InterimSocket { io: socket, interim, activity: traffic.clone() };
        let mut connection = pin!(builder.serve_connection_with_upgrades(TokioIo::new(socket), answer));
        let (mut stopping, mut waker) = (false, None);
        let mut event = pin!(self.next_event(&traffic, &sending, stopping, None));
        poll_fn(|cx| {
            loop {
                // Poll the connection first: the events check the progress that it made.
                if let Poll::Ready(result) = connection.as_mut().poll(cx) {
                    let _ = result.inspect_err(|why| tracing::debug!(%peer, %why, "connection ended"));
                    return Poll::Ready(());
                }
                let waker = EventWaker::of_task(&mut waker, cx);
                if !(waker.take_woken() || sending.is_waiting_for_client() || traffic.has_partial_head()) {
                    return Poll::Pending;
                }
                let waker = Waker::from(waker.clone());
                let closing_since = match ready!(event.as_mut().poll(&mut Context::from_waker(&waker))) {
                    ConnectionEvent::Cut(why) => {
                        tracing::debug!(%peer, "{why}");
                        return Poll::Ready(());
                    }
                    ConnectionEvent::Stop => {
                        stopping = true;
                        None
                    }
                    ConnectionEvent::Idle => Some(Instant::now()),
                };
                connection.as_mut().graceful_shutdown();
                event.set(self.next_event(&traffic, &sending, stopping, closing_since));
                waker.wake_by_ref();
            }
        })
        .await;
    }

    /// Waits until something other than its input and output concerns a connection. `closing_since`: when the client was
    /// asked to close it.
    async fn next_event(
        &self, activity: &ConnectionActivity, sending: &WriteProgress, stopping: bool, closing_since: Option<Instant>,
    ) -> ConnectionEvent {
        let (mut stop, mut stall_timer, mut head_timer) = (self.stop.clone(), None, None);
        let LimitSettings { header_timeout, write_timeout, idle_timeout, .. } = self.limits;
        let (limit, since) = match closing_since {
            None => (idle_timeout, activity.opened_at),
            Some(since) => (CLIENT_CLOSE_TIMEOUT, since),
        };
        tokio::select! {
            biased;
            _ = stop.wait_for(|stop| *stop), if !stopping => ConnectionEvent::Stop,
            () = poll_fn(|cx| sending.poll_stalled(cx, &mut stall_timer, write_timeout)) => {
                ConnectionEvent::Cut("the client does not read its answer")
            }
            () = poll_fn(|cx| activity.poll_late_head(cx, &mut head_timer, header_timeout)) => {
                ConnectionEvent::Cut("the head of a request took too long")
            }
            () = activity.wait_until_idle(limit, since), if !stopping => match closing_since {
                // HTTP/2 waits for the client to acknowledge the shutdown; some clients never do.
                Some(_) => ConnectionEvent::Cut("the client does not hang up"),
                None => ConnectionEvent::Idle,
            }
        }
    }

    /// Handles one request: the checks that apply to all requests, then the exchange.
    async fn handle_request(
        &self, client: Arc<ProxyClient>, mut request: Request<Incoming>, mut sender: RequestSender,
    ) -> ClientResponse {
        let trace = self.tracer.as_ref().and_then(|tracer| RequestTrace::begin(tracer, &request));
        let precheck = self.precheck(&mut request);
        sender.poll_hook = trace.as_ref().map(RequestTrace::poll_hook);
        let answer = pin!(async {
            match precheck {
                Precheck::Respond(answer) => answer,
                Precheck::Document(routed, asked) => {
                    let send = |request| self.send(client, request, sender, routed, trace.clone());
                    Box::pin(asked.answer(request, send)).await
                }
                Precheck::Continue(routed, verifier) => {
                    if let Some((verifier, wanted)) = verifier {
                        sender.identity = Some(Box::pin(verifier.identify_caller(request.headers(), &wanted)).await);
                    }
                    self.send(client, request, sender, routed, trace.clone()).await
                }
            }
        });
        match &trace {
            Some(trace) => {
                let mut answer = trace.scope(answer).await;
                trace.answered(&mut answer);
                answer
            }
            None => {
                let mut answer = answer.await;
                // A replayed response may carry the context of a trace that was recorded while tracing was on.
                trace::take_original_context(&mut answer);
                answer
            }
        }
    }

    fn send(
        &self, client: Arc<ProxyClient>, request: Request<Incoming>, sender: RequestSender, routed: RoutedUpstream,
        trace: Option<RequestTrace>,
    ) -> impl Future<Output = ClientResponse> + use<> {
        let RoutedUpstream { upstream, refusals, route_match } = routed;
        let proxy = Proxy { client, upstream, refusals, trace };
        let key_headers = |method: &Method, preflight: &Parts| self.live.now().key_headers(method, preflight);
        let response = self.ibid.handle(proxy, request, sender, route_match, &key_headers);
        async move { response.await.unwrap_or_else(|never| match never {}) }
    }

    fn precheck(&self, request: &mut Request<Incoming>) -> Precheck {
        let protocol = Protocol::of_request(request.version(), request.headers());
        if let Some(detail) = ambiguity(request) {
            let refusal = Refusal::new(RefusalReason::RequestAmbiguous, detail);
            let format = self.live.now().settings.routes.refusal_shape(request.uri().path());
            let mut answer = refusal_response(&refusal, format, protocol);
            if request.version() != Version::HTTP_2 {
                // The rest of the misunderstood request may still follow on this connection.
                answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            return Precheck::Respond(answer);
        }
        let now = self.live.now();
        if request.uri().path() == contract_page::CONTRACT_PATH
            && matches!(*request.method(), Method::GET | Method::HEAD)
        {
            return Precheck::Respond(contract_response(&now.page, request));
        }
        let own: Vec<_> = request.headers().keys().filter(|name| name.as_str().starts_with("ibid-")).cloned().collect();
        own.iter().for_each(|name| drop(request.headers_mut().remove(name)));
        let version = request.version();
        tunnel::retain_allowed_upgrades(request.headers_mut(), version, &now.settings.upgrades);
        let head = RequestHead { method: request.method(), uri: request.uri(), version, headers: request.headers() };
        let routed = now.route_request(head);
        match now.document(head) {
            None => {
                let verifier = now.verifier_for(&routed);
                Precheck::Continue(routed, verifier)
            }
            Some(document) => {
                let request_id = sent_request_id(request.headers()).cloned();
                let failure = RequestFailure { protocol, refusals: routed.refusals, request_id };
                let timeout = self.limits.reply_timeout;
                let asked = Asked { document, ibid: self.ibid.clone(), timeout, failure };
                Precheck::Document(routed, Box::new(asked))
            }
        }
    }
}

/// The response after a panic in the gateway. A claimed operation is parked when it is dropped.
fn panic_response(protocol: Protocol) -> ClientResponse {
    tracing::error!("a request failed inside the gateway");
    let detail = "the gateway failed; whether the operation took place is not known";
    plain_response(StatusCode::INTERNAL_SERVER_ERROR, detail, RefusalFormat::default(), protocol)
}

/// Explains why the app, or a proxy in between, could interpret the request differently.
pub(crate) fn ambiguity<B>(request: &Request<B>) -> Option<&'static str> {
    framing_ambiguity(request).or_else(|| host_ambiguity(request)).or_else(|| target_ambiguity(request))
}

/// hyper only checks the last transfer coding. The gateway would remove the others without decoding them.
fn framing_ambiguity<B>(request: &Request<B>) -> Option<&'static str> {
    let mut codings = request.headers().get_all(header::TRANSFER_ENCODING).iter();
    let only = codings.next()?;
    let plain = codings.next().is_none() && only.as_bytes().eq_ignore_ascii_case(b"chunked");
    (!plain).then_some("the body has a transfer coding other than chunked")
}

/// With two hosts, one would decide the scope and the other what the app serves. HTTP/1.1 requires exactly one.
fn host_ambiguity<B>(request: &Request<B>) -> Option<&'static str> {
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

/// Routes match paths, so a target without a path would escape all of them. A CONNECT tunnel would reach the app
/// unchecked.
fn target_ambiguity<B>(request: &Request<B>) -> Option<&'static str> {
    if request.method() == Method::CONNECT {
        return Some("there are no tunnels through here");
    }
    let path = request.uri().path();
    let fits = path.starts_with('/') || path == "*" && request.method() == Method::OPTIONS;
    (!fits).then_some("the target of the request is not a path")
}

/// Configures hyper for client connections.
pub fn connection_builder(limits: &LimitSettings) -> auto::Builder<StreamExecutor> {
    let head = usize::try_from(limits.max_header_bytes).unwrap_or(usize::MAX).max(8192);
    let mut builder = auto::Builder::new(StreamExecutor { write_timeout: limits.write_timeout });
    builder
        .http1()
        // Tracked by `ConnectionActivity`: hyper would set a timer for every request.
        .header_read_timeout(None)
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

fn contract_response(page: &crate::snapshot::RenderedContract, request: &Request<Incoming>) -> ClientResponse {
    let accept = request.headers().get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    let html = accept.find("text/html");
    let json = accept.find("json");
    let wants_html = html.is_some_and(|html| json.is_none_or(|json| html < json));
    let (body, kind) =
        if wants_html { (&page.html, "text/html; charset=utf-8") } else { (&page.json, "application/json") };
    let mut answer = Response::new(ResponseBody::whole(body.clone(), None));
    let headers = answer.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(header::VARY, HeaderValue::from_static("accept"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("max-age=60"));
    let policy = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'";
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(policy));
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_before_or_after_the_first_await_is_a_500() {
        async fn fails(late: bool) -> ClientResponse {
            if late {
                tokio::task::yield_now().await;
            }
            panic!("a fault of ours");
        }
        for late in [false, true] {
            assert!(catch_panic(fails(late)).await.is_none());
        }
        assert_eq!(panic_response(Protocol::Http).status(), StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(panic_response(Protocol::Grpc).headers()["grpc-status"], "2");
        assert_eq!(catch_panic(async { 7 }).await, Some(7));
    }
}
