//! The admin port: health checks, metrics, the admin API and the console, served by one router.
//!
//! [`AdminState`] holds everything these share; [`api`] serves it to programs, the console to people. Health and
//! metrics need no token. Everything else needs one ([`auth`]) and an allowed host name ([`hosts`]). Responses cannot
//! be cached, framed, or read by pages of other origins.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use axum::{
    Extension, Router,
    extract::{Request, State},
    handler::Handler,
    middleware::{Next, from_fn_with_state},
    response::{IntoResponse, Response},
    routing::{MethodRouter, get},
};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Uri, header};
use ibid::Ibid;
use ibid_stores::{StoreMember, seal::SealedStore};
use serde_json::json;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
    sync::{oneshot, watch},
    task::JoinSet,
};
use tower_service::Service as _;

pub use self::problem::{AdminProblem, UnavailablePart};
use self::{audit::AuditTrail, auth::Authenticator, health::StoreHealth, health::StoreProbes, records::Resealer};
use crate::{
    config,
    console::{self, Attention},
    format::now_ms,
    listener::{self, AcceptedConnection, ConnectionHandler, accept_connections},
    metrics::{
        self, Metrics, MetricsHistory, MetricsObserver, RecentRequests, RefusalLog, ShadowCounters, StoreGauges,
    },
    watch::LiveConfig,
};

pub mod api;
pub mod audit;
pub mod auth;
pub(crate) mod health;
pub(crate) mod hosts;
pub(crate) mod idle;
pub mod input;
mod problem;
pub mod records;
pub mod stats;

/// Makes types that handlers take as arguments, from the head of a request.
macro_rules! extractors {
    ($($type:ty, $rejection:ty: |$parts:ident, $state:ident| $made:block;)+) => {$(
        impl axum::extract::FromRequestParts<std::sync::Arc<$crate::admin::AdminState>> for $type {
            type Rejection = $rejection;

            async fn from_request_parts(
                $parts: &mut http::request::Parts, $state: &std::sync::Arc<$crate::admin::AdminState>,
            ) -> Result<Self, $rejection> $made
        }
    )+};
}
pub(crate) use extractors;

/// Concurrent connections; more wait in the listen backlog.
const MAX_CONNECTIONS: usize = 1024;

pub struct AdminServer {
    listener: TcpListener,
    pub is_secure: bool,
    state: Arc<AdminState>,
}

/// The client's address, whether it connected over TLS, and the local address it connected to. Every request has it as
/// an extension.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ClientInfo {
    pub(crate) client: IpAddr,
    pub(crate) secure: bool,
    connected_to: IpAddr,
}

pub struct AdminState {
    pub ibid: Ibid,
    /// Reseals stored records with the first key; `None` if the gateway seals nothing.
    pub resealer: Option<Resealer>,
    pub live: Arc<LiveConfig>,
    pub auth: Authenticator,
    pub audit: AuditTrail,
    pub metrics: Arc<Metrics>,
    pub gauges: StoreGauges,
    pub shadow: Arc<ShadowCounters>,
    pub refusals: Arc<RefusalLog>,
    pub recent: Arc<RecentRequests>,
    pub history: Arc<MetricsHistory>,
    /// Start time in milliseconds since the Unix epoch.
    pub started_ms: u64,
    pub(crate) attention: Attention,
    stores: StoreProbes,
}

impl AdminState {
    pub(crate) async fn store_health(&self) -> StoreHealth {
        StoreHealth::check(&self.ibid, &self.stores).await
    }
}

impl AdminServer {
    pub async fn bind(
        settings: &config::AdminSettings, ibid: Ibid, members: Vec<StoreMember>, sealed: Option<Arc<SealedStore>>,
        live: Arc<LiveConfig>, watched: &MetricsObserver,
    ) -> Result<Self, String> {
        let listen = settings.listen;
        let listener = TcpListener::bind(listen).await;
        let listener = listener.map_err(|why| format!("admin.listen: {listen} cannot be bound: {why}"))?;
        let audit = AuditTrail::open(&settings.audit, ibid.engine().store());
        let audit = audit.map_err(|why| format!("admin.audit: {}: {why}", settings.audit))?;
        let started_ms = now_ms();
        let state = AdminState {
            gauges: StoreGauges::new(ibid.engine().store().clone()),
            ibid,
            resealer: sealed.map(Resealer::new),
            live,
            auth: Authenticator::default(),
            audit,
            metrics: watched.metrics.clone(),
            shadow: watched.shadow.clone(),
            refusals: watched.refusals.clone(),
            recent: watched.recent.clone(),
            history: MetricsHistory::new(&watched.metrics),
            started_ms,
            attention: Attention::new(started_ms),
            stores: StoreProbes::new(members),
        };
        Ok(Self { listener, is_secure: settings.tls.is_some(), state: Arc::new(state) })
    }

    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// See [`Authenticator::create_login_link`].
    pub fn create_login_link(&self) -> String {
        self.state.auth.create_login_link(&self.state.live.now().tokens)
    }

    /// Serves until `ended` fires or its sender is dropped; during a shutdown `/readyz` reports not ready. On return
    /// the listener and the audit trail's lock are released, so another gateway can use them.
    pub async fn run(self, stop: watch::Receiver<bool>, ended: oneshot::Receiver<()>) {
        let Self { listener, is_secure: secure, state } = self;
        tokio::spawn(state.history.clone().run_sampler(state.metrics.clone(), stop.clone()));
        tokio::spawn(state.recent.clone().run_clock(stop.clone()));
        let handler = AdminConnections { router: router(state.clone(), stop), live: state.live.clone(), secure };
        let (handler, mut connections) = (Arc::new(handler), JoinSet::new());
        let ended = async move { drop(ended.await) };
        accept_connections(listener, MAX_CONNECTIONS, ended, |socket, peer, permit| {
            while connections.try_join_next().is_some() {}
            connections.spawn(listener::serve_connection(socket, peer, permit, handler.clone()));
        })
        .await;
        connections.shutdown().await;
    }
}

struct AdminConnections {
    router: Router,
    live: Arc<LiveConfig>,
    secure: bool,
}

impl ConnectionHandler for AdminConnections {
    fn tls(&self) -> Option<Arc<rustls::ServerConfig>> {
        if self.secure { self.live.now().admin_tls.clone() } else { None }
    }

    async fn serve<S>(self: Arc<Self>, socket: S, connection: AcceptedConnection)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let AcceptedConnection { peer, local, is_secure, .. } = connection;
        let client = ClientInfo { client: peer.ip(), secure: is_secure, connected_to: local };
        idle::serve(socket, idle::ADMIN_LIMITS, std::future::pending(), |mut request| {
            request.extensions_mut().insert(client);
            let answer = self.router.clone().call(request);
            async { answer.await.unwrap_or_else(|never| match never {}) }
        })
        .await;
    }
}

fn router(state: Arc<AdminState>, stop: watch::Receiver<bool>) -> Router {
    // Probes and scrapers use various host names. These reveal nothing about requests.
    let open = Router::new()
        .route("/healthz", read_only(async || "ok\n"))
        .route(
            "/readyz",
            read_only(async move |State(state): State<_>| {
                let stopping = *stop.borrow();
                readiness(state, stopping).await
            }),
        )
        .route("/metrics", read_only(metrics_page))
        .layer(from_fn_with_state(&API_HEADERS[..], set_headers));
    let guarded = api::routes()
        .fallback(
            async |uri: Uri| {
                if uri.path().starts_with("/api/") { api::not_found().into_response() } else { not_found() }
            },
        )
        .layer(from_fn_with_state(&API_HEADERS[..], set_headers))
        .merge(console::routes())
        .layer(from_fn_with_state(state.clone(), check_host));
    open.merge(guarded).with_state(state)
}

async fn check_host(
    State(state): State<Arc<AdminState>>, Extension(client): Extension<ClientInfo>, request: Request, next: Next,
) -> Result<Response, AdminProblem> {
    let now = state.live.now();
    let allowed = now.settings.admin.as_ref().map_or(&[][..], |admin| &admin.hosts);
    hosts::check_host(&request, client.connected_to, allowed)?;
    Ok(next.run(request).await)
}

const READ_METHODS: &str = "GET, HEAD, OPTIONS";

/// A route that only reads. The response to any other method says which ones there are.
fn read_only<T: 'static>(handler: impl Handler<T, Arc<AdminState>>) -> MethodRouter<Arc<AdminState>> {
    with_methods(get(handler), READ_METHODS)
}

fn with_methods(route: MethodRouter<Arc<AdminState>>, allowed: &'static str) -> MethodRouter<Arc<AdminState>> {
    route
        .options(async move || (StatusCode::NO_CONTENT, [(header::ALLOW, allowed)]))
        .fallback(async move || AdminProblem::method_not_allowed(allowed))
}

async fn metrics_page(State(state): State<Arc<AdminState>>) -> impl IntoResponse {
    // One after the other: the gauges would count the key that the store probe claims.
    let stored = state.gauges.read().await;
    let stores = state.stores.ask().await;
    // Includes routes that a reload added since the last scrape.
    state.metrics.register_routes(&state.live.now().settings.routes);
    let up: Vec<_> = stores.iter().map(|store| (store.name, store.is_up())).collect();
    ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], state.metrics.render(stored, &up))
}

async fn readiness(state: Arc<AdminState>, stopping: bool) -> impl IntoResponse {
    let health = state.store_health().await;
    let ready = health.error.is_none() && !stopping;
    let body = json!({
        "ready": ready,
        "stopping": stopping,
        "running": state.ibid.engine().running().count(),
        // Without URLs, because this endpoint needs no token.
        "store": health.to_json(|_| None),
    });
    (if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, api::ApiJson(body))
}

pub(crate) fn not_found() -> Response {
    let text = "there are the console at /, /healthz, /readyz, /metrics and /api/openapi.json here\n";
    let mut answer = (StatusCode::NOT_FOUND, text).into_response();
    add_headers(answer.headers_mut(), &API_HEADERS);
    answer
}

/// Adds headers to every response of a router.
pub(crate) async fn set_headers(State(more): State<MoreHeaders>, request: Request, next: Next) -> Response {
    let mut answer = next.run(request).await;
    add_headers(answer.headers_mut(), more);
    answer
}

pub(crate) type MoreHeaders = &'static [(HeaderName, &'static str)];

/// The headers of all responses except the console's.
static API_HEADERS: [(HeaderName, &str); 5] = [
    (header::CACHE_CONTROL, "no-store"),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::CONTENT_SECURITY_POLICY, "default-src 'none'; frame-ancestors 'none'"),
    (header::REFERRER_POLICY, "no-referrer"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
];

pub(crate) fn add_headers(headers: &mut HeaderMap, more: &[(HeaderName, &'static str)]) {
    for (name, value) in more {
        headers.entry(name).or_insert(HeaderValue::from_static(value));
    }
}
