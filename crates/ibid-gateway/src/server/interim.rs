//! Interim responses (1xx, such as 103 Early Hints) from the app to an HTTP/1.1 client.
//!
//! hyper's server cannot send them, so `InterimSocket` writes them below hyper.
//!
//! Invariant: an interim response is written only between two responses. hyper flushes its socket only after it has
//! written everything, so nothing is half-written between a flush and hyper's next write, as long as the final response
//! has not begun. The server therefore calls [`InterimResponses::end_request`] before it gives hyper the final
//! response.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
};

use http::{HeaderMap, StatusCode, header};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{client_socket::ClientSocket, connection_activity::ConnectionActivity};

/// Maximum bytes of pending interim responses. Further ones are dropped.
const MAX_PENDING_BYTES: usize = 64 << 10;

/// The interim responses that one client connection still has to send.
#[derive(Default)]
pub struct InterimResponses {
    pending: Mutex<PendingInterim>,
    /// Whether something may be pending. Avoids the lock; set while holding it.
    has_pending: AtomicBool,
    /// Whether hyper has flushed everything. Only the connection's task uses it.
    is_flushed: AtomicBool,
}

#[derive(Default)]
struct PendingInterim {
    /// Whether a request is waiting for its response.
    is_open: bool,
    request_number: u64,
    bytes: Vec<u8>,
    /// How many of `bytes` are already written.
    written: usize,
}

impl InterimResponses {
    pub(super) fn begin_request(&self) {
        let mut waiting = self.pending.lock();
        waiting.is_open = true;
        waiting.request_number += 1;
    }

    /// The final response is about to be written. Drops the interim responses that are not written yet.
    pub(super) fn end_request(&self) {
        let mut waiting = self.pending.lock();
        waiting.is_open = false;
        if waiting.written == 0 && !self.is_flushed.load(Relaxed) {
            waiting.bytes.clear();
            self.has_pending.store(false, Relaxed);
        }
    }

    /// Returns the number of the current request, for [`push`](Self::push).
    pub fn request_number(&self) -> u64 {
        self.pending.lock().request_number
    }

    /// Queues an interim response for a request. Call it in the connection's task: hyper flushes after it has polled the
    /// request, and that writes it. Drops it if that request has its final response, or if it is
    /// `100 Continue`: the gateway answers `Expect` itself.
    pub fn push(&self, serial: u64, status: StatusCode, headers: &HeaderMap) {
        let mut waiting = self.pending.lock();
        let is_late = !waiting.is_open || waiting.request_number != serial;
        if is_late || status == StatusCode::CONTINUE || waiting.bytes.len() > MAX_PENDING_BYTES {
            return;
        }
        let line = format!("HTTP/1.1 {} {}\r\n", status.as_u16(), status.canonical_reason().unwrap_or_default());
        waiting.bytes.extend_from_slice(line.as_bytes());
        for (name, value) in headers.iter().filter(|(name, _)| !is_hop_by_hop(name)) {
            for part in [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
                waiting.bytes.extend_from_slice(part);
            }
        }
        waiting.bytes.extend_from_slice(b"\r\n");
        self.has_pending.store(true, Relaxed);
    }
}

fn is_hop_by_hop(name: &header::HeaderName) -> bool {
    [header::CONNECTION, header::UPGRADE, header::TRANSFER_ENCODING, header::CONTENT_LENGTH].contains(name)
        || name == "keep-alive"
}

/// The socket below hyper.
pub(super) struct InterimSocket<S> {
    pub(super) io: ClientSocket<S>,
    pub(super) interim: Arc<InterimResponses>,
    pub(super) activity: Arc<ConnectionActivity>,
}

impl<S: AsyncWrite + Unpin> InterimSocket<S> {
    /// Writes pending bytes. Call it only between two responses, or to finish writing pending bytes.
    fn poll_write_pending(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.interim.has_pending.load(Relaxed) {
            return Poll::Ready(Ok(()));
        }
        let mut waiting = self.interim.pending.lock();
        while waiting.written < waiting.bytes.len() {
            let n = ready!(Pin::new(&mut self.io).poll_write(cx, &waiting.bytes[waiting.written..]))?;
            if n == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            waiting.written += n;
        }
        waiting.bytes.clear();
        waiting.written = 0;
        self.interim.has_pending.store(false, Relaxed);
        Poll::Ready(Ok(()))
    }

    fn poll_before_write(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.interim.is_flushed.load(Relaxed) {
            ready!(self.poll_write_pending(cx))?;
            self.interim.is_flushed.store(false, Relaxed);
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for InterimSocket<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let (this, before) = (self.get_mut(), buf.filled().len());
        ready!(Pin::new(&mut this.io).poll_read(cx, buf))?;
        this.activity.record_read(&buf.filled()[before..]);
        if this.activity.is_http2() {
            this.io.gather_writes();
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for InterimSocket<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        ready!(this.poll_before_write(cx))?;
        Pin::new(&mut this.io).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>, cx: &mut Context<'_>, bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        ready!(this.poll_before_write(cx))?;
        Pin::new(&mut this.io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.interim.is_flushed.store(true, Relaxed);
        ready!(this.poll_write_pending(cx))?;
        Pin::new(&mut this.io).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_shutdown(cx)
    }
}
