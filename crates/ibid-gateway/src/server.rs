//! The listener: accepts connections, serves each one, and shuts down gracefully.
//!
//! At shutdown the server stops accepting, lets running requests finish, and waits for their operations. At the
//! deadline it stops waiting: unfinished operations get the state outcome unknown.

use std::{
    future::poll_fn,
    io,
    net::SocketAddr,
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Waker, ready},
    time::{Duration, Instant},
};

use http::Request;
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::conn::auto,
};
use ibid::{Ibid, http::PeerConnection};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::watch,
    time::timeout,
};

use self::{
    client_body::{ClientBody, ConnectionPoller, EventWaker},
    client_socket::ClientSocket,
    connection_activity::{ConnectionActivity, StreamExecutor, WriteProgress},
    request::ClientConnection,
};
use crate::{
    config::LimitSettings,
    cores::Cores,
    listener::{self, AcceptedConnection, ConnectionHandler, accept_connections},
    proxy::ProxyClient,
    trace::Tracer,
    watch::LiveConfig,
};

pub mod client_body;
mod client_socket;
mod connection_activity;
pub mod interim;
mod request;

pub(crate) use self::request::ambiguity;

/// At shutdown: maximum time for the settlements of abandoned operations to reach the store.
const SETTLE_FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum time for an idle client to close its connection after the server asked it to.
const CLIENT_CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

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
            running.close().await;
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
        let connection = Arc::new(ClientConnection {
            server: self.clone(),
            client,
            peer: peer.ip(),
            link: PeerConnection::default(),
            activity: traffic.clone(),
            sending: sending.clone(),
        });
        let answer = service_fn(move |request: Request<Incoming>| {
            let version = request.version();
            ClientConnection::handle(&connection, request.map(|body| ClientBody::new(body, version)))
        });
        let builder = connection_builder(&self.limits);
        let (socket, http2) = ClientSocket::new(socket);
        let socket = interim::InterimSocket { io: socket, interim, activity: traffic.clone() };
        let mut connection = pin!(builder.serve_connection_with_upgrades(TokioIo::new(socket), answer));
        let (mut stopping, mut poller, mut waker) = (false, ConnectionPoller::default(), None);
        let mut event = pin!(self.next_event(&traffic, &sending, stopping, None));
        poll_fn(|cx| {
            loop {
                // Poll the connection first: the events check the progress that it made.
                let polled = poller.poll(connection.as_mut(), cx);
                if let Some(socket) = http2.get() {
                    socket.poll_send(cx);
                }
                if let Poll::Ready(result) = polled {
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
