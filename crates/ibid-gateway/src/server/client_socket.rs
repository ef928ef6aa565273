//! The socket of a client. It gathers the writes of an HTTP/2 connection; those of HTTP/1 go to the system at once.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context, Poll},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::gathered_socket::GatheredSocket;

/// The socket of an HTTP/2 connection, which its task sends from after each poll; empty for HTTP/1.
pub(super) type Http2Socket<S> = Arc<OnceLock<GatheredSocket<S>>>;

pub(super) struct ClientSocket<S> {
    io: ClientIo<S>,
    http2: Http2Socket<S>,
}

enum ClientIo<S> {
    Direct(S),
    Gathered(GatheredSocket<S>),
    /// Only while one becomes the other.
    Moved,
}

impl<S: AsyncWrite + Unpin> ClientSocket<S> {
    pub(super) fn new(io: S) -> (Self, Http2Socket<S>) {
        let http2 = Http2Socket::default();
        (Self { io: ClientIo::Direct(io), http2: http2.clone() }, http2)
    }

    /// The connection speaks HTTP/2.
    pub(super) fn gather_writes(&mut self) {
        self.io = match std::mem::replace(&mut self.io, ClientIo::Moved) {
            ClientIo::Direct(io) => ClientIo::Gathered(self.http2.get_or_init(|| GatheredSocket::new(io)).clone()),
            gathered => gathered,
        };
    }
}

/// Calls a method of the socket.
macro_rules! delegate {
    ($socket:expr, $io:ident => $call:expr) => {
        match &mut $socket.get_mut().io {
            ClientIo::Direct($io) => $call,
            ClientIo::Gathered($io) => $call,
            ClientIo::Moved => unreachable!("the socket was being moved"),
        }
    };
}

impl<S: AsyncRead + Unpin> AsyncRead for ClientSocket<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        delegate!(self, io => Pin::new(io).poll_read(cx, buf))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ClientSocket<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        delegate!(self, io => Pin::new(io).poll_write(cx, buf))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>, cx: &mut Context<'_>, bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        delegate!(self, io => Pin::new(io).poll_write_vectored(cx, bufs))
    }

    fn is_write_vectored(&self) -> bool {
        match &self.io {
            ClientIo::Direct(io) => io.is_write_vectored(),
            ClientIo::Gathered(io) => io.is_write_vectored(),
            ClientIo::Moved => false,
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        delegate!(self, io => Pin::new(io).poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        delegate!(self, io => Pin::new(io).poll_shutdown(cx))
    }
}
