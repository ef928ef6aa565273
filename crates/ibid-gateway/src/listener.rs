//! Accepts the connections of both listeners: the limit on open ones, and TLS.

use std::{
    net::{IpAddr, SocketAddr},
    pin::pin,
    sync::Arc,
    time::Duration,
};

use rustls::ServerConfig;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};
use tokio_rustls::TlsAcceptor;

use crate::upstream::set_client_keep_alive;

/// Maximum time for a TLS handshake.
const TLS_HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// The pause after a failed accept. It is mostly caused by a lack of file descriptors: other connections must close.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Serves connections.
pub(crate) trait ConnectionHandler: Send + Sync + 'static {
    /// The TLS configuration in force, which new connections use. `None` without TLS.
    fn tls(&self) -> Option<Arc<ServerConfig>>;

    fn serve<S>(self: Arc<Self>, socket: S, connection: AcceptedConnection) -> impl Future<Output = ()> + Send
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static;
}

pub(crate) struct AcceptedConnection {
    pub(crate) peer: SocketAddr,
    /// The address that the client connected to.
    pub(crate) local: IpAddr,
    pub(crate) is_secure: bool,
    /// The connection's share of the limit. A tunnel keeps it after the connection stops being HTTP.
    pub(crate) permit: Arc<OwnedSemaphorePermit>,
}

/// Accepts connections until `stop`, at most `max_connections` at a time; further ones wait in the system's backlog.
/// `serve` starts to serve a connection, which holds its permit. Closes the listener on return.
pub(crate) async fn accept_connections(
    listener: TcpListener, max_connections: usize, stop: impl Future<Output = ()>,
    mut serve: impl FnMut(TcpStream, SocketAddr, OwnedSemaphorePermit),
) {
    let mut stop = pin!(stop);
    let room = Arc::new(Semaphore::new(max_connections));
    loop {
        let next = async {
            let permit = room.clone().acquire_owned().await.expect("never closed");
            (permit, listener.accept().await)
        };
        let (permit, accepted) = tokio::select! {
            () = &mut stop => return,
            next = next => next,
        };
        match accepted {
            Ok((socket, peer)) => serve(socket, peer, permit),
            Err(why) => {
                tracing::error!(%why, "a connection could not be accepted");
                tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
            }
        }
    }
}

/// Serves a connection until its end, after a TLS handshake if the listener uses TLS.
pub(crate) async fn serve_connection(
    socket: TcpStream, peer: SocketAddr, permit: OwnedSemaphorePermit, handler: Arc<impl ConnectionHandler>,
) {
    let _ = socket.set_nodelay(true);
    let _ = set_client_keep_alive(&socket);
    let local = socket.local_addr().map_or(peer.ip(), |address| address.ip());
    let connection = |is_secure| AcceptedConnection { peer, local, is_secure, permit: Arc::new(permit) };
    match handler.tls() {
        None => handler.serve(socket, connection(false)).await,
        Some(tls) => match timeout(TLS_HANDSHAKE_TIMEOUT, TlsAcceptor::from(tls).accept(socket)).await {
            Ok(Ok(socket)) => handler.serve(socket, connection(true)).await,
            Ok(Err(why)) => tracing::debug!(%peer, %why, "no TLS connection"),
            Err(_) => tracing::debug!(%peer, "the TLS handshake took too long"),
        },
    }
}
