//! The admin port: health checks, metrics, the admin API and the console.
//!
//! [`AdminState`] holds everything these share; [`api`] serves it to programs, the console to people. Health and
//! metrics need no token. Everything else needs one ([`auth`]) and an allowed host name ([`hosts`]). Responses cannot
//! be cached, framed, or read by pages of other origins.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::Incoming;
use ibid::Ibid;
use ibid_stores::{StoreMember, seal::SealedStore};
use serde_json::json;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
    sync::{oneshot, watch},
    task::JoinSet,
    time::timeout,
};
use tokio_rustls::TlsAcceptor;

pub use self::problem::{AdminProblem, UnavailablePart};
use self::{
    audit::AuditTrail, auth::Authenticator, health::StoreHealth, problem::AdminResponse, reseal::Resealer,
    store_state::StoreProbes,
};
use crate::{
    config,
    console::Console,
    format::now_ms,
    live_config::LiveConfig,
    metrics::{self, Metrics, MetricsHistory, MetricsObserver, RefusalLog, ShadowCounters, StoreGauges},
};

pub mod api;
pub mod audit;
pub mod auth;
pub mod body;
pub(crate) mod health;
pub(crate) mod hosts;
mod idle;
mod problem;
pub(crate) mod query;
pub mod records;
mod reseal;
pub mod stats;
pub(crate) mod store_state;

/// Concurrent connections; more wait in the listen backlog.
const MAX_CONNECTIONS: usize = 1024;
/// A TLS handshake that takes longer is aborted.
const TLS_HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// The bound admin port.
pub struct AdminServer {
    listener: TcpListener,
    secure: bool,
    state: Arc<AdminState>,
}

/// The client's address, whether it connected over TLS, and the local address it connected to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ClientInfo {
    pub(crate) client: IpAddr,
    pub(crate) secure: bool,
    pub(crate) connected_to: IpAddr,
}

/// The state that the admin API and the console share.
pub struct AdminState {
    pub ibid: Ibid,
    /// Reseals stored records with the first key; `None` if the gateway seals nothing.
    pub resealer: Option<Resealer>,
    pub live: Arc<LiveConfig>,
    /// Authenticates callers. The configuration lists the accepted tokens.
    pub auth: Authenticator,
    pub audit: AuditTrail,
    pub metrics: Arc<Metrics>,
    /// Cached counts of the store's entries.
    pub gauges: StoreGauges,
    pub shadow: Arc<ShadowCounters>,
    /// The latest refusals.
    pub refusals: Arc<RefusalLog>,
    /// Samples of the metrics over the last day.
    pub history: Arc<MetricsHistory>,
    /// Start time in milliseconds since the Unix epoch.
    pub started_ms: u64,
    stores: StoreProbes,
}

impl AdminState {
    /// # Errors
    /// If the audit trail cannot be opened.
    pub fn new(
        settings: &config::AdminSettings, ibid: Ibid, members: Vec<StoreMember>, sealed: Option<Arc<SealedStore>>,
        live: Arc<LiveConfig>, watched: &MetricsObserver,
    ) -> Result<Self, String> {
        let audit = AuditTrail::open(settings.audit.as_deref()).map_err(|why| {
            let path = settings.audit.as_deref().unwrap_or_else(|| "".as_ref()).display();
            format!("admin.audit: {path}: {why}")
        })?;
        Ok(Self {
            gauges: StoreGauges::new(ibid.engine().store().clone()),
            ibid,
            resealer: sealed.map(Resealer::new),
            live,
            auth: Authenticator::default(),
            audit,
            metrics: watched.metrics.clone(),
            shadow: watched.shadow.clone(),
            refusals: watched.refusals.clone(),
            history: MetricsHistory::new(&watched.metrics),
            started_ms: now_ms(),
            stores: StoreProbes::new(members),
        })
    }

    /// Probes every store.
    pub(crate) async fn store_health(&self) -> StoreHealth {
        StoreHealth::check(&self.ibid, &self.stores).await
    }
}

impl AdminServer {
    /// # Errors
    /// If the address cannot be bound, or the audit trail cannot be opened.
    pub async fn bind(
        settings: &config::AdminSettings, ibid: Ibid, members: Vec<StoreMember>, sealed: Option<Arc<SealedStore>>,
        live: Arc<LiveConfig>, watched: &MetricsObserver,
    ) -> Result<Self, String> {
        let listen = settings.listen;
        let listener = TcpListener::bind(listen).await;
        let listener = listener.map_err(|why| format!("admin.listen: {listen} cannot be bound: {why}"))?;
        let secure = settings.tls.is_some();
        Ok(Self { listener, secure, state: Arc::new(AdminState::new(settings, ibid, members, sealed, live, watched)?) })
    }

    /// # Errors
    /// If the operating system does not return the local address.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Whether the port uses TLS.
    pub fn is_secure(&self) -> bool {
        self.secure
    }

    /// Serves until `ended` fires or its sender is dropped; during a shutdown `/readyz` reports not ready. On return
    /// the listener and the audit trail's lock are released, so another gateway can use them.
    pub async fn run(self, stop: watch::Receiver<bool>, mut ended: oneshot::Receiver<()>) {
        let Self { listener, secure, state: desk } = self;
        tokio::spawn(desk.history.clone().run_sampler(desk.metrics.clone(), stop.clone()));
        let console = Arc::new(Console::default());
        let mut connections = JoinSet::new();
        loop {
            let accepted = tokio::select! {
                _ = &mut ended => break,
                Some(_) = connections.join_next() => continue,
                accepted = listener.accept(), if connections.len() < MAX_CONNECTIONS => accepted,
            };
            let Ok((socket, peer)) = accepted else {
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            // The current certificates: a reload applies to new connections.
            let tls = if secure { desk.live.now().admin_tls.clone().map(TlsAcceptor::from) } else { None };
            let connected_to = socket.local_addr().map_or(Ipv4Addr::LOCALHOST.into(), |address| address.ip());
            let (desk, console, stop) = (desk.clone(), console.clone(), stop.clone());
            let connection = AdminConnection { state: desk, console, peer: peer.ip(), connected_to, stop };
            connections.spawn(async move {
                match tls {
                    None => connection.serve(socket, false).await,
                    Some(tls) => match timeout(TLS_HANDSHAKE_TIMEOUT, tls.accept(socket)).await {
                        Ok(Ok(socket)) => connection.serve(socket, true).await,
                        Ok(Err(why)) => tracing::debug!(%peer, %why, "no TLS connection to the admin port"),
                        Err(_) => tracing::debug!(%peer, "the TLS handshake with the admin port took too long"),
                    },
                }
            });
        }
        connections.shutdown().await;
    }
}

struct AdminConnection {
    state: Arc<AdminState>,
    console: Arc<Console>,
    peer: IpAddr,
    connected_to: IpAddr,
    stop: watch::Receiver<bool>,
}

impl AdminConnection {
    async fn serve<S: AsyncRead + AsyncWrite + Unpin>(self, socket: S, secure: bool) {
        let Self { state: desk, console, peer, connected_to, stop } = self;
        let asking = ClientInfo { client: peer, secure, connected_to };
        idle::serve(socket, |request| {
            let stopping = *stop.borrow();
            handle_request(&desk, &console, request, asking, stopping)
        })
        .await;
    }
}

async fn handle_request(
    desk: &AdminState, console: &Console, request: Request<Incoming>, asking: ClientInfo, stopping: bool,
) -> AdminResponse {
    let path = request.uri().path();
    let known = matches!(path, "/healthz" | "/readyz" | "/metrics");
    if !known {
        let now = desk.live.now();
        let allowed = now.settings.admin.as_ref().map_or(&[][..], |admin| &admin.hosts);
        if let Err(problem) = hosts::check_host(&request, asking.connected_to, allowed) {
            return problem.into_response();
        }
    }
    if path.starts_with("/api/") {
        return api::respond(desk, request, asking.client).await;
    }
    match *request.method() {
        Method::GET | Method::HEAD => {}
        Method::OPTIONS if known => {
            let mut reply = text_response(StatusCode::NO_CONTENT, "");
            reply.headers_mut().insert(header::ALLOW, HeaderValue::from_static(READ_METHODS));
            return reply;
        }
        _ if known => return AdminProblem::method_not_allowed(READ_METHODS).into_response(),
        _ => {}
    }
    match path {
        "/healthz" => text_response(StatusCode::OK, "ok\n"),
        "/readyz" => readiness_response(desk, stopping).await,
        "/metrics" => metrics_response(desk).await,
        _ => {
            let page = console.answer(desk, request, asking).await;
            page.unwrap_or_else(|| text_response(StatusCode::NOT_FOUND, NOT_FOUND_TEXT))
        }
    }
}

const READ_METHODS: &str = "GET, HEAD, OPTIONS";
const NOT_FOUND_TEXT: &str = "there are the console at /, /healthz, /readyz, /metrics and /api/openapi.json here\n";

async fn metrics_response(desk: &AdminState) -> AdminResponse {
    // One after the other: the gauges would count the key that the store probe claims.
    let stored = desk.gauges.read().await;
    let stores = desk.stores.ask().await;
    // Includes routes that a reload added since the last scrape.
    desk.metrics.register_routes(&desk.live.now().settings.routes);
    let up: Vec<_> = stores.iter().map(|store| (store.name, store.is_up())).collect();
    build_response(StatusCode::OK, metrics::CONTENT_TYPE, desk.metrics.render(stored, &up))
}

async fn readiness_response(desk: &AdminState, stopping: bool) -> AdminResponse {
    let health = desk.store_health().await;
    let ready = health.is_healthy() && !stopping;
    let body = json!({
        "ready": ready,
        "stopping": stopping,
        "running": desk.ibid.engine().running().count(),
        // Without URLs, because this endpoint needs no token.
        "store": health.to_json(|_| None),
    });
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    build_response(status, "application/json", format!("{body}\n"))
}

fn text_response(status: StatusCode, text: &str) -> AdminResponse {
    build_response(status, "text/plain; charset=utf-8", text.to_owned())
}

/// Builds a response with the headers that all responses of this port have.
pub(crate) fn build_response(status: StatusCode, kind: &'static str, text: String) -> AdminResponse {
    let mut answer = Response::new(Full::new(Bytes::from(text)));
    *answer.status_mut() = status;
    let headers = answer.headers_mut();
    for (name, value) in [
        (header::CONTENT_TYPE, kind),
        (header::CACHE_CONTROL, "no-store"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::CONTENT_SECURITY_POLICY, "default-src 'none'; frame-ancestors 'none'"),
        (header::REFERRER_POLICY, "no-referrer"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    answer
}
