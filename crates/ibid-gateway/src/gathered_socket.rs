//! The socket of an HTTP/2 connection: what is written during one poll of the connection is one system call.
//!
//! h2 writes and flushes after every DATA frame of 256 bytes or more. So a unary gRPC response would take two system
//! calls, because trailers follow its DATA, and requests that share a connection to an upstream would take one each.
//!
//! Invariant: after every poll of the connection, its task calls [`GatheredSocket::poll_send`]. A flush by h2 does not
//! send what is gathered.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::{Buf, BytesMut};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// More bytes are written at once, without a copy. A DATA frame of h2 has at most as many, and its head.
const MAX_GATHERED_BYTES: usize = 16 << 10;

/// A socket with two owners: hyper's connection, and the task that polls it. They never use it at the same time.
pub(crate) struct GatheredSocket<S>(Arc<Mutex<GatheredWrites<S>>>);

struct GatheredWrites<S> {
    io: S,
    /// Accepted from h2, and not written yet.
    gathered: BytesMut,
    /// Why sending failed. The connection learns it from its next call.
    failure: Option<io::Error>,
}

impl<S> Clone for GatheredSocket<S> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<S: AsyncWrite + Unpin> GatheredSocket<S> {
    pub(crate) fn new(io: S) -> Self {
        Self(Arc::new(Mutex::new(GatheredWrites { io, gathered: BytesMut::new(), failure: None })))
    }

    /// Sends what the connection has written, as far as the socket accepts it. Wakes the task when it accepts more.
    pub(crate) fn poll_send(&self, cx: &mut Context<'_>) {
        let mut socket = self.0.lock();
        if let Poll::Ready(Err(why)) = socket.poll_send(cx) {
            socket.gathered.clear();
            socket.failure = Some(why);
            cx.waker().wake_by_ref();
        }
    }
}

impl<S> GatheredWrites<S> {
    fn take_failure(&mut self) -> io::Result<()> {
        self.failure.take().map_or(Ok(()), Err)
    }
}

impl<S: AsyncWrite + Unpin> GatheredWrites<S> {
    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.gathered.is_empty() {
            let n = ready!(Pin::new(&mut self.io).poll_write(cx, &self.gathered))?;
            if n == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.gathered.advance(n);
        }
        Pin::new(&mut self.io).poll_flush(cx)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for GatheredSocket<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut socket = self.0.lock();
        socket.take_failure()?;
        Pin::new(&mut socket.io).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for GatheredSocket<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(buf)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>, cx: &mut Context<'_>, bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let socket = &mut *self.0.lock();
        socket.take_failure()?;
        let length: usize = bufs.iter().map(|buf| buf.len()).sum();
        if socket.gathered.len() + length > MAX_GATHERED_BYTES {
            ready!(socket.poll_send(cx))?;
        }
        if length > MAX_GATHERED_BYTES {
            return Pin::new(&mut socket.io).poll_write_vectored(cx, bufs);
        }
        bufs.iter().for_each(|buf| socket.gathered.extend_from_slice(buf));
        Poll::Ready(Ok(length))
    }

    fn is_write_vectored(&self) -> bool {
        self.0.lock().io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let socket = &mut *self.0.lock();
        socket.take_failure()?;
        match socket.gathered.is_empty() {
            true => Pin::new(&mut socket.io).poll_flush(cx),
            // `poll_send` follows.
            false => Poll::Ready(Ok(())),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let socket = &mut *self.0.lock();
        socket.take_failure()?;
        ready!(socket.poll_send(cx))?;
        Pin::new(&mut socket.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, task::Waker};

    use super::*;

    /// Reports each write, and accepts as many bytes as it has room for.
    struct TestSocket {
        writes: mpsc::Sender<Vec<u8>>,
        room: usize,
        is_broken: bool,
    }

    impl AsyncRead for TestSocket {
        fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, _: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            Poll::Pending
        }
    }

    impl AsyncWrite for TestSocket {
        fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
            if self.is_broken {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            }
            if self.room == 0 {
                return Poll::Pending;
            }
            let accepted = buf.len().min(self.room);
            self.room -= accepted;
            self.writes.send(buf[..accepted].to_vec()).expect("the test receives it");
            Poll::Ready(Ok(accepted))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            self.writes.send(b"end".to_vec()).expect("the test receives it");
            Poll::Ready(Ok(()))
        }
    }

    fn socket(room: usize) -> (GatheredSocket<TestSocket>, mpsc::Receiver<Vec<u8>>) {
        let (writes, written) = mpsc::channel();
        (GatheredSocket::new(TestSocket { writes, room, is_broken: false }), written)
    }

    fn write(socket: &mut GatheredSocket<TestSocket>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let cx = &mut Context::from_waker(Waker::noop());
        let written = Pin::new(&mut *socket).poll_write(cx, bytes);
        assert!(matches!(Pin::new(socket).poll_flush(cx), Poll::Ready(Ok(()))));
        written
    }

    fn send(socket: &GatheredSocket<TestSocket>) {
        socket.poll_send(&mut Context::from_waker(Waker::noop()));
    }

    #[test]
    fn writes_of_one_poll_are_one_write_in_spite_of_flushes() {
        let (mut socket, written) = socket(usize::MAX);
        for part in ["head", "data", "trailers"] {
            assert!(matches!(write(&mut socket, part.as_bytes()), Poll::Ready(Ok(n)) if n == part.len()));
        }
        assert!(written.try_recv().is_err());
        send(&socket);
        send(&socket);
        assert_eq!(written.try_iter().collect::<Vec<_>>(), [b"headdatatrailers"]);
    }

    #[test]
    fn bytes_stay_in_order_when_the_socket_is_full_or_the_write_is_large() {
        let (mut socket, written) = socket(3);
        let large = vec![b'x'; MAX_GATHERED_BYTES + 1];
        assert!(write(&mut socket, b"head").is_ready());
        send(&socket);
        assert!(write(&mut socket, &large).is_pending(), "the head is not sent yet");
        socket.0.lock().io.room = usize::MAX;
        assert!(matches!(write(&mut socket, &large), Poll::Ready(Ok(n)) if n == large.len()));
        assert!(write(&mut socket, b"end").is_ready());
        send(&socket);
        assert_eq!(written.try_iter().collect::<Vec<_>>(), [b"hea".to_vec(), b"d".to_vec(), large, b"end".to_vec()]);
    }

    #[test]
    fn no_more_than_the_maximum_is_gathered() {
        let (mut socket, written) = socket(usize::MAX);
        let half = [b'x'; MAX_GATHERED_BYTES / 2];
        for _ in 0..3 {
            assert!(write(&mut socket, &half).is_ready());
        }
        assert_eq!(written.try_iter().map(|write| write.len()).collect::<Vec<_>>(), [MAX_GATHERED_BYTES]);
    }

    #[test]
    fn a_shutdown_sends_the_rest_first() {
        let (mut socket, written) = socket(usize::MAX);
        assert!(write(&mut socket, b"goodbye").is_ready());
        let cx = &mut Context::from_waker(Waker::noop());
        assert!(Pin::new(&mut socket).poll_shutdown(cx).is_ready());
        assert_eq!(written.try_iter().collect::<Vec<_>>(), [b"goodbye".to_vec(), b"end".to_vec()]);
    }

    #[test]
    fn the_connection_learns_that_sending_failed() {
        let (mut socket, _written) = socket(usize::MAX);
        assert!(write(&mut socket, b"head").is_ready());
        socket.0.lock().io.is_broken = true;
        send(&socket);
        let (mut bytes, cx) = ([0; 8], &mut Context::from_waker(Waker::noop()));
        let read = Pin::new(&mut socket).poll_read(cx, &mut ReadBuf::new(&mut bytes));
        assert!(matches!(read, Poll::Ready(Err(why)) if why.kind() == io::ErrorKind::BrokenPipe));
    }
}
