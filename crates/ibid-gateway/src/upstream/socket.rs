//! The socket under every upstream connection, and the proof that a request was not written.
//!
//! It distinguishes "no byte of this request can have reached the upstream" from "some bytes may have".
//! All data to the upstream passes [`UpstreamSocket`], which is below TLS.
//!
//! Invariant: [`WriteProof::seal_unwritten`] returns `true` only if no write call began for the request since
//! [`WriteProof::arm`], or the first such call failed (a failed `send` queues nothing); and no write begins
//! after that. The phase is one atomic that both sides change by compare-and-swap. So a driver task that still
//! has the request in a buffer cannot write it after the request was reported as unwritten:
//!
//! ```text
//!   PHASE_OPEN --arm--> PHASE_ARMED --first write--> PHASE_OPEN  (seal_unwritten: false)
//!                           \--seal_unwritten, or first write failed--> PHASE_SEALED
//!                                                                (seal_unwritten: true, writes fail)
//! ```

use std::io::{self, IoSlice, Read as _};
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::task::{Context, Poll, ready};

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::Notify;

const PHASE_OPEN: u8 = 0;
const PHASE_ARMED: u8 = 1;
const PHASE_SEALED: u8 = 2;

/// The state of one socket, shared by the socket (in the driver task) and the pool.
#[derive(Debug, Default)]
pub(super) struct WriteProof {
    phase: AtomicU8,
    /// The socket must carry no further request: its read side ended, a write failed, or it is gone.
    is_unusable: AtomicBool,
    /// The upstream has sent something since the last request was armed.
    has_reply_bytes: AtomicBool,
    /// The socket was dropped: no task drives this connection any more.
    is_dropped: AtomicBool,
    /// Notified when `is_dropped` is set.
    dropped: Notify,
}

impl WriteProof {
    /// Prepares for a request that is about to be handed to the driver. `false`: the socket is unusable.
    ///
    /// Call it before the request enters the driver's channel; the channel's synchronisation
    /// makes the driver see `PHASE_ARMED` when it sees the request.
    pub(super) fn arm(&self) -> bool {
        self.has_reply_bytes.store(false, Ordering::Release);
        !self.is_unusable() && self.transition(PHASE_OPEN, PHASE_ARMED)
    }

    /// Whether a byte of the reply to the armed request has arrived, measured below HTTP and above TLS.
    pub(super) fn has_reply_bytes(&self) -> bool {
        self.has_reply_bytes.load(Ordering::Acquire)
    }

    /// Records that the upstream has begun to reply to an HTTP/1.1 request.
    pub(super) fn record_read(&self, bytes: &[u8]) {
        if !bytes.is_empty() && !self.has_reply_bytes() {
            self.has_reply_bytes.store(true, Ordering::Release);
        }
    }

    /// Forbids further writes if none began since `arm`. `true` is the proof.
    pub(super) fn seal_unwritten(&self) -> bool {
        self.transition(PHASE_ARMED, PHASE_SEALED) || self.phase.load(Ordering::Acquire) == PHASE_SEALED
    }

    pub(super) fn is_unusable(&self) -> bool {
        self.is_unusable.load(Ordering::Acquire)
    }

    fn mark_unusable(&self) {
        self.is_unusable.store(true, Ordering::Release);
    }

    /// Returns once no task drives the connection any more.
    pub(super) async fn wait_dropped(&self) {
        let left = self.dropped.notified();
        tokio::pin!(left);
        // Register before the check, so that a drop in between is not missed.
        left.as_mut().enable();
        if !self.is_dropped.load(Ordering::Acquire) {
            left.await;
        }
    }

    fn is_armed(&self) -> bool {
        self.phase.load(Ordering::Acquire) == PHASE_ARMED
    }

    fn transition(&self, from: u8, to: u8) -> bool {
        self.phase.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

/// A TCP stream that records its writes in a [`WriteProof`].
pub(super) struct UpstreamSocket {
    // Declared first, hence dropped first: the socket closes before `_permit` lets another one open.
    stream: TcpStream,
    pub(super) proof: Arc<WriteProof>,
    /// The data is encrypted.
    is_tls: bool,
    /// A system call since the request was armed found nothing to read.
    is_probed: bool,
    /// The request's first write has not succeeded yet: nothing has left.
    is_first_write: bool,
    /// A write failed and was hidden; all later writes are discarded too.
    is_muted: bool,
    /// The permit under the connection limit. It is here and not in the driver, because an upgraded
    /// connection outlives its driver and still counts.
    _permit: Box<dyn Send>,
}

impl UpstreamSocket {
    pub(super) fn new(stream: TcpStream, is_tls: bool, hold: Box<dyn Send>) -> Self {
        let (is_probed, is_first_write, is_muted) = (false, false, false);
        Self { stream, proof: Arc::default(), is_tls, is_probed, is_first_write, is_muted, _permit: hold }
    }

    /// Asks the kernel, not tokio's readiness flags: under load a FIN may have arrived
    /// milliseconds before the reactor polls epoll again, which causes the keep-alive race.
    fn peek_socket(&self) -> io::Result<usize> {
        let mut one = [MaybeUninit::uninit(); 1];
        loop {
            match SockRef::from(&self.stream).peek(&mut one) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                other => return other,
            }
        }
    }

    /// Called when tokio reports nothing to read and a request is about to be written.
    ///
    /// The result is an ordinary read. hyper reads before it writes, in the same poll:
    /// EOF or stray bytes on an idle connection make it return the queued request untouched,
    /// so `send` can try again elsewhere. TLS sees its alerts and tickets.
    fn probe(&mut self, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.peek_socket() {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                // The read that led here has registered the waker.
                self.is_probed = true;
                Poll::Pending
            }
            Err(e) => {
                self.proof.mark_unusable();
                Poll::Ready(Err(e))
            }
            Ok(0) => {
                self.proof.mark_unusable();
                Poll::Ready(Ok(()))
            }
            Ok(_) => {
                let mut some = [0; 1024];
                let room = some.len().min(buf.remaining());
                let n = (&*SockRef::from(&self.stream)).read(&mut some[..room])?;
                buf.put_slice(&some[..n]);
                Poll::Ready(Ok(()))
            }
        }
    }

    /// Decides whether a write may begin, and marks the request as possibly written *before* it does.
    fn begin_write(&mut self) -> io::Result<()> {
        match self.proof.phase.load(Ordering::Acquire) {
            PHASE_OPEN => return Ok(()),
            PHASE_ARMED => {}
            _ => return Err(write_refused()),
        }
        // hyper has read by now, unless the request was armed in the middle of its turn. It has also
        // encoded the request: failing the write is still a proof, but the request cannot be retried.
        if !self.is_probed {
            let clean = match self.peek_socket() {
                // Under TLS this is most likely a session ticket. In cleartext it would be mistaken for the reply.
                Ok(n) => n > 0 && self.is_tls,
                Err(e) => e.kind() == io::ErrorKind::WouldBlock,
            };
            if !clean {
                self.proof.mark_unusable();
                self.proof.seal_unwritten();
                return Err(write_refused());
            }
        }
        self.is_probed = false;
        // Fails if `seal_unwritten` was first: then the request is already reported as never written.
        if !self.proof.transition(PHASE_ARMED, PHASE_OPEN) {
            return Err(write_refused());
        }
        self.is_first_write = true;
        Ok(())
    }

    /// Interprets the socket's result of a write of `len` bytes.
    fn finish_write(&mut self, result: io::Result<usize>, len: usize) -> io::Result<usize> {
        match result {
            Ok(n) => {
                self.is_first_write = false;
                Ok(n)
            }
            // No byte of this request was accepted: report that to hyper and in the proof.
            Err(e) if self.is_first_write => {
                self.proof.mark_unusable();
                self.proof.phase.store(PHASE_SEALED, Ordering::Release);
                Err(e)
            }
            // The peer stopped reading, perhaps because it has already replied (413, then close).
            // hyper would drop the connection with the reply. Pretend success and let the read
            // side decide: after a reset it returns what had arrived, then ends, so nothing hangs.
            Err(_) => {
                self.proof.mark_unusable();
                self.is_muted = true;
                Ok(len)
            }
        }
    }
}

impl Drop for UpstreamSocket {
    fn drop(&mut self) {
        self.proof.mark_unusable();
        self.proof.is_dropped.store(true, Ordering::Release);
        self.proof.dropped.notify_waiters();
    }
}

#[cold]
fn write_refused() -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, "refused to write to a connection that is closing")
}

impl AsyncRead for UpstreamSocket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        match Pin::new(&mut this.stream).poll_read(cx, buf) {
            Poll::Pending if this.proof.is_armed() => this.probe(buf),
            Poll::Pending => Poll::Pending,
            Poll::Ready(result) => {
                if result.is_err() || (buf.filled().len() == before && buf.remaining() > 0) {
                    this.proof.mark_unusable();
                }
                Poll::Ready(result)
            }
        }
    }
}

impl AsyncWrite for UpstreamSocket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.is_muted {
            return Poll::Ready(Ok(buf.len()));
        }
        this.begin_write()?;
        let result = ready!(Pin::new(&mut this.stream).poll_write(cx, buf));
        Poll::Ready(this.finish_write(result, buf.len()))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>, cx: &mut Context<'_>, bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let len = || bufs.iter().map(|b| b.len()).sum();
        if this.is_muted {
            return Poll::Ready(Ok(len()));
        }
        this.begin_write()?;
        let result = ready!(Pin::new(&mut this.stream).poll_write_vectored(cx, bufs));
        Poll::Ready(this.finish_write(result, len()))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.is_muted {
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut this.stream).poll_shutdown(cx)
    }
}
