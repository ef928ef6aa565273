//! The socket under every upstream connection. It counts the bytes that it writes.
//!
//! All data to the upstream passes [`UpstreamSocket`], which is below TLS. So [`UpstreamStream::written`] proves
//! whether a byte of a request can have reached the upstream: a write call that fails queues nothing.

use std::io::{self, IoSlice, Read as _};
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker, ready};

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;
use tokio_util::sync::CancellationToken;

use super::pool::ConnectionPermit;

/// The state of one socket, for those who do not own it: the requests that share an HTTP/2 connection.
#[derive(Debug, Default)]
pub(super) struct SocketState {
    is_unusable: AtomicBool,
    /// Cancelled when the socket is dropped: no task drives this connection any more.
    pub(super) dropped: CancellationToken,
}

impl SocketState {
    /// Whether the socket must carry no further request: its read side ended, a write failed, or it is gone.
    pub(super) fn is_unusable(&self) -> bool {
        self.is_unusable.load(Ordering::Acquire)
    }

    fn mark_unusable(&self) {
        self.is_unusable.store(true, Ordering::Release);
    }
}

pub(super) struct UpstreamSocket {
    // Declared first, hence dropped first: the socket closes before `_permit` lets another one open.
    stream: TcpStream,
    pub(super) state: Arc<SocketState>,
    /// The number of bytes that the system has accepted.
    written: u64,
    /// Reads ask the system, not tokio's readiness flags.
    is_probing: bool,
    /// The permit under the connection limit.
    _permit: ConnectionPermit,
}

impl UpstreamSocket {
    pub(super) fn new(stream: TcpStream, permit: ConnectionPermit) -> Self {
        Self { stream, state: Arc::default(), written: 0, is_probing: false, _permit: permit }
    }

    /// Whether the system reports neither data nor the end.
    fn is_silent(&self) -> bool {
        let mut one = [MaybeUninit::uninit(); 1];
        loop {
            match SockRef::from(&self.stream).peek(&mut one) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                result => return matches!(result, Err(e) if e.kind() == io::ErrorKind::WouldBlock),
            }
        }
    }

    /// Reads without tokio's readiness flags.
    fn probe(&self, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut some = [0; 1024];
        let room = some.len().min(buf.remaining());
        match (&*SockRef::from(&self.stream)).read(&mut some[..room]) {
            // The read that led here has registered the waker.
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Poll::Pending,
            result => Poll::Ready(result.map(|n| buf.put_slice(&some[..n]))),
        }
    }

    fn count_write(&mut self, result: io::Result<usize>) -> io::Result<usize> {
        match &result {
            Ok(n) => self.written += *n as u64,
            Err(_) => self.state.mark_unusable(),
        }
        result
    }
}

impl Drop for UpstreamSocket {
    fn drop(&mut self) {
        self.state.mark_unusable();
        self.state.dropped.cancel();
    }
}

impl AsyncRead for UpstreamSocket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        let result = match Pin::new(&mut this.stream).poll_read(cx, buf) {
            Poll::Pending if this.is_probing => this.probe(buf),
            polled => polled,
        };
        let result = ready!(result);
        if result.is_err() || (buf.filled().len() == before && buf.remaining() > 0) {
            this.state.mark_unusable();
        }
        Poll::Ready(result)
    }
}

impl AsyncWrite for UpstreamSocket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let result = ready!(Pin::new(&mut this.stream).poll_write(cx, buf));
        Poll::Ready(this.count_write(result))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>, cx: &mut Context<'_>, bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let result = ready!(Pin::new(&mut this.stream).poll_write_vectored(cx, bufs));
        Poll::Ready(this.count_write(result))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}

/// A connection to an upstream, with or without TLS.
pub(super) enum UpstreamStream {
    Plain(UpstreamSocket),
    Tls(Box<TlsStream<UpstreamSocket>>),
}

impl UpstreamStream {
    fn socket(&self) -> &UpstreamSocket {
        match self {
            Self::Plain(socket) => socket,
            Self::Tls(stream) => stream.get_ref().0,
        }
    }

    /// The number of bytes that the system has accepted, TLS included.
    pub(super) fn written(&self) -> u64 {
        self.socket().written
    }

    pub(super) fn state(&self) -> Arc<SocketState> {
        self.socket().state.clone()
    }

    /// Whether an idle connection is open, and nothing has arrived that would be mistaken for a reply.
    ///
    /// Asks the system, not tokio's readiness flags: under load a FIN may have arrived milliseconds before the reactor
    /// polls epoll again, which causes the keep-alive race. Under TLS, reads what has arrived: it may be a session
    /// ticket or the alert that closes the connection.
    pub(super) fn is_silent(&mut self, cx: &mut Context<'_>) -> bool {
        match self {
            Self::Plain(socket) => socket.is_silent(),
            Self::Tls(stream) => {
                stream.get_mut().0.is_probing = true;
                let mut byte = [0; 1];
                let read = Pin::new(&mut **stream).poll_read(cx, &mut ReadBuf::new(&mut byte));
                stream.get_mut().0.is_probing = false;
                read.is_pending()
            }
        }
    }

    /// Closes an idle connection. Under TLS, announces it.
    pub(super) fn close(mut self) {
        if let Self::Tls(stream) = &mut self {
            let _ = Pin::new(&mut **stream).poll_shutdown(&mut Context::from_waker(Waker::noop()));
        }
    }
}

impl AsyncRead for UpstreamStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_read(cx, buf),
            Self::Tls(stream) => Pin::new(&mut **stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for UpstreamStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_write(cx, buf),
            Self::Tls(stream) => Pin::new(&mut **stream).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>, cx: &mut Context<'_>, bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_write_vectored(cx, bufs),
            Self::Tls(stream) => Pin::new(&mut **stream).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_flush(cx),
            Self::Tls(stream) => Pin::new(&mut **stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_shutdown(cx),
            Self::Tls(stream) => Pin::new(&mut **stream).poll_shutdown(cx),
        }
    }
}
