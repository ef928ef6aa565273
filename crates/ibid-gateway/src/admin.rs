//! The admin port: whether the gateway is alive and can do its work, what it has done, and what operators see and
//! change.
//!
//! [`Desk`] is everything that is known here; [`api`] gives it to programs, and the console to people. Health and metrics
//! need no token, everything else does ([`auth`]), and is asked by a name of this machine ([`hosts`]). No answer may be
//! cached, framed, or read by pages of other origins.

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
use ibid_stores::{Member, seal::Sealed};
use serde_json::json;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
    sync::{oneshot, watch},
    task::JoinSet,
    time::timeout,
};
use tokio_rustls::TlsAcceptor;

pub use self::problem::{Gone, Problem};
use self::{audit::Audit, auth::Auth, health::Health, problem::Reply, reseal::Reseals, store_state::StoreProbes};
use crate::{
    config,
    console::Console,
    live::Live,
    metrics::{self, Gauges, History, Metrics, Refusals, ShadowReport, Watched},
    records::view::now_ms,
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

/// Connections at a time; more wait in the system's queue.
const CONNECTIONS: usize = 1024;
/// A TLS handshake that takes longer is given up.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// The admin port, bound.
pub struct Admin {
    listener: TcpListener,
    /// Whether operators connect with TLS.
    secure: bool,
    desk: Arc<Desk>,
}

/// Who asks: from where, and whether nobody on the way could listen.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asking {
    pub(crate) client: IpAddr,
    pub(crate) secure: bool,
    /// The address of this machine that they connected to.
    pub(crate) connected_to: IpAddr,
}

/// Everything that operators may see, and what they change it through.
pub struct Desk {
    /// The engine and its store.
    pub ibid: Ibid,
    /// Brings what is sealed under the first key. `None` if nothing is.
    pub reseals: Option<Reseals>,
    /// The configuration in force.
    pub live: Arc<Live>,
    /// Who was seen; who may says the configuration.
    pub auth: Auth,
    /// Who did.
    pub audit: Audit,
    /// What was counted.
    pub metrics: Arc<Metrics>,
    /// What the store holds.
    pub gauges: Gauges,
    /// What shadow mode saw.
    pub shadow: Arc<ShadowReport>,
    /// The last refusals.
    pub refusals: Arc<Refusals>,
    /// How it went over the last day.
    pub history: Arc<History>,
    /// When it began, in milliseconds since the Unix epoch.
    pub started_ms: u64,
    /// How each store is.
    stores: StoreProbes,
}

impl Desk {
    /// For a gateway with these settings.
    ///
    /// # Errors
    /// If the audit trail cannot be opened.
    pub fn new(
        settings: &config::Admin, ibid: Ibid, members: Vec<Member>, sealed: Option<Arc<Sealed>>, live: Arc<Live>,
        watched: &Watched,
    ) -> Result<Self, String> {
        let audit = Audit::open(settings.audit.as_deref()).map_err(|why| {
            let path = settings.audit.as_deref().unwrap_or_else(|| "".as_ref()).display();
            format!("admin.audit: {path}: {why}")
        })?;
        Ok(Self {
            gauges: Gauges::new(ibid.engine().store().clone()),
            ibid,
            reseals: sealed.map(Reseals::new),
            live,
            auth: Auth::default(),
            audit,
            metrics: watched.metrics().clone(),
            shadow: watched.shadow().clone(),
            refusals: watched.refusals().clone(),
            history: History::new(watched.metrics()),
            started_ms: now_ms(),
            stores: StoreProbes::new(members),
        })
    }

    /// How the store is now.
    pub(crate) async fn health(&self) -> Health {
        Health::ask(&self.ibid, &self.stores).await
    }
}

impl Admin {
    /// Binds the address.
    ///
    /// # Errors
    /// If it cannot be bound, or the audit trail cannot be opened.
    pub async fn bind(
        settings: &config::Admin, ibid: Ibid, members: Vec<Member>, sealed: Option<Arc<Sealed>>, live: Arc<Live>,
        watched: &Watched,
    ) -> Result<Self, String> {
        let listen = settings.listen;
        let listener = TcpListener::bind(listen).await;
        let listener = listener.map_err(|why| format!("admin.listen: {listen} cannot be bound: {why}"))?;
        let secure = settings.tls.is_some();
        Ok(Self { listener, secure, desk: Arc::new(Desk::new(settings, ibid, members, sealed, live, watched)?) })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// If the system does not say.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Whether operators connect with TLS.
    pub fn is_secure(&self) -> bool {
        self.secure
    }

    /// Serves until `ended` is told, or cannot be any more; during a shutdown it says that the gateway is not ready. Nothing
    /// of it is left then: another gateway may have its address and its audit trail.
    pub async fn run(self, stop: watch::Receiver<bool>, mut ended: oneshot::Receiver<()>) {
        let Self { listener, secure, desk } = self;
        tokio::spawn(desk.history.clone().follow(desk.metrics.clone(), stop.clone()));
        let console = Arc::new(Console::default());
        let mut connections = JoinSet::new();
        loop {
            let accepted = tokio::select! {
                _ = &mut ended => break,
                Some(_) = connections.join_next() => continue,
                accepted = listener.accept(), if connections.len() < CONNECTIONS => accepted,
            };
            let Ok((socket, peer)) = accepted else {
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            // The certificates in force now: each connection has its own.
            let tls = if secure { desk.live.now().admin_tls.clone().map(TlsAcceptor::from) } else { None };
            let connected_to = socket.local_addr().map_or(Ipv4Addr::LOCALHOST.into(), |address| address.ip());
            let (desk, console, stop) = (desk.clone(), console.clone(), stop.clone());
            let connection = Connection { desk, console, peer: peer.ip(), connected_to, stop };
            connections.spawn(async move {
                match tls {
                    None => connection.serve(socket, false).await,
                    Some(tls) => match timeout(HANDSHAKE, tls.accept(socket)).await {
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

/// One of an operator.
struct Connection {
    desk: Arc<Desk>,
    console: Arc<Console>,
    peer: IpAddr,
    connected_to: IpAddr,
    stop: watch::Receiver<bool>,
}

impl Connection {
    async fn serve<S: AsyncRead + AsyncWrite + Unpin>(self, socket: S, secure: bool) {
        let Self { desk, console, peer, connected_to, stop } = self;
        let asking = Asking { client: peer, secure, connected_to };
        idle::serve(socket, |request| {
            let stopping = *stop.borrow();
            answer(&desk, &console, request, asking, stopping)
        })
        .await;
    }
}

async fn answer(desk: &Desk, console: &Console, request: Request<Incoming>, asking: Asking, stopping: bool) -> Reply {
    let path = request.uri().path();
    let known = matches!(path, "/healthz" | "/readyz" | "/metrics");
    if !known {
        let now = desk.live.now();
        let allowed = now.settings.admin.as_ref().map_or(&[][..], |admin| &admin.hosts);
        if let Err(problem) = hosts::check(&request, asking.connected_to, allowed) {
            return problem.into_reply();
        }
    }
    if path.starts_with("/api/") {
        return api::answer(desk, request, asking.client).await;
    }
    match *request.method() {
        Method::GET | Method::HEAD => {}
        Method::OPTIONS if known => {
            let mut reply = plain(StatusCode::NO_CONTENT, "");
            reply.headers_mut().insert(header::ALLOW, HeaderValue::from_static(READ));
            return reply;
        }
        _ if known => return Problem::method(READ).into_reply(),
        _ => {}
    }
    match path {
        "/healthz" => plain(StatusCode::OK, "ok\n"),
        "/readyz" => ready(desk, stopping).await,
        "/metrics" => exposition(desk).await,
        _ => {
            let page = console.answer(desk, request, asking).await;
            page.unwrap_or_else(|| plain(StatusCode::NOT_FOUND, NOTHING))
        }
    }
}

const READ: &str = "GET, HEAD, OPTIONS";
const NOTHING: &str = "there are the console at /, /healthz, /readyz, /metrics and /api/openapi.json here\n";

async fn exposition(desk: &Desk) -> Reply {
    // One after the other: the gauges would count the key that is claimed for the second.
    let stored = desk.gauges.read().await;
    let stores = desk.stores.ask().await;
    // Those of a configuration that was taken up since the last look, too.
    desk.metrics.show(&desk.live.now().settings.routes);
    let up: Vec<_> = stores.iter().map(|store| (store.name, store.is_up())).collect();
    reply(StatusCode::OK, metrics::CONTENT_TYPE, desk.metrics.render(stored, &up))
}

async fn ready(desk: &Desk, stopping: bool) -> Reply {
    let health = desk.health().await;
    let ready = health.is_well() && !stopping;
    let body = json!({
        "ready": ready,
        "stopping": stopping,
        "running": desk.ibid.engine().running().count(),
        // Without URLs: no token is asked for here.
        "store": health.to_json(|_| None),
    });
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    reply(status, "application/json", format!("{body}\n"))
}

fn plain(status: StatusCode, text: &str) -> Reply {
    reply(status, "text/plain; charset=utf-8", text.to_owned())
}

/// An answer of this port, with what holds for all of them.
pub(crate) fn reply(status: StatusCode, kind: &'static str, text: String) -> Reply {
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
