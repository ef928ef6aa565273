//! Where the exchange API listens: a Unix socket that only this user may open, or a loopback address.

use std::{
    fs, io,
    net::SocketAddr,
    os::unix::{fs::PermissionsExt as _, net::UnixStream as StdUnixStream},
    path::{Path, PathBuf},
};

use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
};

use crate::config::ApiListen;

pub(super) enum ApiListener {
    Tcp(TcpListener),
    Unix(UnixListener, #[expect(dead_code, reason = "removes the file on drop")] SocketFile),
}

/// Removes the socket's file when it is dropped.
pub(super) struct SocketFile(PathBuf);

/// An accepted connection, which becomes a stream on the thread that serves it.
pub(super) enum ApiSocket {
    Tcp(std::net::TcpStream),
    Unix(StdUnixStream),
}

/// A connection of either kind.
pub(super) type ApiStream = Box<dyn ByteStream>;

pub(super) trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for T {}

impl ApiListener {
    pub(super) async fn bind(listen: &ApiListen) -> io::Result<Self> {
        match listen {
            ApiListen::Tcp(address) => Ok(Self::Tcp(TcpListener::bind(address).await?)),
            ApiListen::Unix(path) => Ok(Self::Unix(bind_unix(path)?, SocketFile(path.clone()))),
        }
    }

    pub(super) fn address(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(listener) => listener.local_addr().ok(),
            Self::Unix(..) => None,
        }
    }

    /// Accepts a connection. `None` if its user may not use the API.
    pub(super) async fn accept(&self) -> io::Result<Option<ApiSocket>> {
        match self {
            Self::Tcp(listener) => {
                let (socket, _) = listener.accept().await?;
                let _ = socket.set_nodelay(true);
                socket.into_std().map(|socket| Some(ApiSocket::Tcp(socket)))
            }
            Self::Unix(listener, _) => {
                let (socket, _) = listener.accept().await?;
                let is_allowed = is_same_user(&socket);
                is_allowed.then(|| socket.into_std().map(ApiSocket::Unix)).transpose()
            }
        }
    }
}

impl ApiSocket {
    /// Registers the connection with the runtime of this thread.
    pub(super) fn into_stream(self) -> io::Result<ApiStream> {
        Ok(match self {
            Self::Tcp(socket) => Box::new(TcpStream::from_std(socket)?),
            Self::Unix(socket) => Box::new(UnixStream::from_std(socket)?),
        })
    }
}

/// Whether the peer runs as the same user as this process, or as root.
fn is_same_user(socket: &UnixStream) -> bool {
    let own = rustix::process::geteuid().as_raw();
    match socket.peer_cred() {
        Ok(peer) if peer.uid() == own || peer.uid() == 0 => true,
        Ok(peer) => {
            tracing::warn!(uid = peer.uid(), "api: a connection of another user was closed; run the app as uid {own}");
            false
        }
        Err(why) => {
            tracing::warn!(%why, "api: a connection whose user is not known was closed");
            false
        }
    }
}

/// Binds the socket in a private directory and then moves it to its path, so that it never has other permissions. A
/// file that a killed process left behind is replaced.
fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    if fs::symlink_metadata(path).is_ok() {
        use std::os::unix::fs::FileTypeExt as _;
        if !fs::symlink_metadata(path)?.file_type().is_socket() {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "there is a file that is no socket"));
        }
        if StdUnixStream::connect(path).is_ok() {
            return Err(io::Error::new(io::ErrorKind::AddrInUse, "another process listens there"));
        }
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let private = tempfile::Builder::new().prefix(".ibid-api-").tempdir_in(folder)?;
    let unfinished = private.path().join("s");
    let listener = UnixListener::bind(&unfinished)?;
    fs::set_permissions(&unfinished, fs::Permissions::from_mode(0o600))?;
    fs::rename(&unfinished, path)?;
    Ok(listener)
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}
