//! The socket under every upstream connection, and the proof it keeps.
//!
//! Purpose: tell "not one byte of this request can have reached the upstream" from "some may have".
//! Everything that leaves for the upstream passes [`Wire`], which sits underneath TLS.
//!
//! Invariant: [`Proof::seal`] answers `true` only if no write call was begun for the request since
//! [`Proof::arm`], or the first such call failed (a failed `send` queues nothing); and after that
//! answer none ever will be. It is one atomic, moved by compare-and-swap by both sides, so that a
//! driver task that still holds the request in a buffer cannot write it after we called it unwritten:
//!
//! ```text
//!   OPEN --arm--> ARMED --first write--> OPEN          (seal: false)
//!                   \----seal, or first write failed--> SEALED   (seal: true, writes refused)
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

const OPEN: u8 = 0;
const ARMED: u8 = 1;
const SEALED: u8 = 2;

/// What is known about one socket; shared by the wire (in the driver task) and the pool.
#[derive(Debug, Default)]
pub(super) struct Proof {
    phase: AtomicU8,
    /// The socket must carry no further request: its read side ended, a write failed, or it is gone.
    spent: AtomicBool,
    /// Something came from the upstream since the last request was armed.
    answered: AtomicBool,
    /// The wire was dropped: nobody drives this connection any more.
    gone: AtomicBool,
    /// Told when it is.
    left: Notify,
}

impl Proof {
    /// A request is about to be handed to the driver. `false`: the socket is of no use any more.
    ///
    /// Called before the request enters the driver's channel; the channel's own synchronisation
    /// makes the driver see ARMED when it sees the request.
    pub(super) fn arm(&self) -> bool {
        self.answered.store(false, Ordering::Release);
        !self.is_spent() && self.step(OPEN, ARMED)
    }

    /// Whether a byte of the answer to the armed request has come, beneath HTTP and above TLS.
    pub(super) fn is_answered(&self) -> bool {
        self.answered.load(Ordering::Acquire)
    }

    /// Forbids further writes if none was begun since `arm`. `true` is the proof.
    pub(super) fn seal(&self) -> bool {
        self.step(ARMED, SEALED) || self.phase.load(Ordering::Acquire) == SEALED
    }

    pub(super) fn is_spent(&self) -> bool {
        self.spent.load(Ordering::Acquire)
    }

    fn spend(&self) {
        self.spent.store(true, Ordering::Release);
    }

    /// Returns once nobody drives the connection any more.
    pub(super) async fn gone(&self) {
        let left = self.left.notified();
        tokio::pin!(left);
        // Registered before looking, so that the end cannot come unseen in between.
        left.as_mut().enable();
        if !self.gone.load(Ordering::Acquire) {
            left.await;
        }
    }

    fn is_armed(&self) -> bool {
        self.phase.load(Ordering::Acquire) == ARMED
    }

    fn step(&self, from: u8, to: u8) -> bool {
        self.phase.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

/// What HTTP/1.1 is spoken over: notes in the proof that the upstream has begun to answer. It is above TLS, because an
/// alert that closes the connection is no answer.
pub(super) struct Noted<T> {
    io: T,
    proof: Arc<Proof>,
}

impl<T> Noted<T> {
    pub(super) fn new(io: T, proof: Arc<Proof>) -> Self {
        Self { io, proof }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Noted<T> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        let read = Pin::new(&mut this.io).poll_read(cx, buf);
        if buf.filled().len() > before && !this.proof.is_answered() {
            this.proof.answered.store(true, Ordering::Release);
        }
        read
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Noted<T> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().io).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>, cx: &mut Context<'_>, bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_shutdown(cx)
    }
}

/// A TCP stream that proves what it wrote.
pub(super) struct Wire {
    // Declared first, hence dropped first: the socket is closed before `hold` lets another one open.
    stream: TcpStream,
    proof: Arc<Proof>,
    /// What passes here is encrypted.
    tls: bool,
    /// The socket was asked, by system call, since the request was armed, and had nothing to say.
    probed: bool,
    /// The write that began the request has not succeeded yet: nothing has left.
    first: bool,
    /// A write failed and was hidden: all later ones vanish too.
    mute: bool,
    /// The place under the connection bound. It lives here, not in the driver, because an upgraded
    /// connection outlives its driver and still counts.
    _hold: Box<dyn Send>,
}

impl Wire {
    pub(super) fn new(stream: TcpStream, tls: bool, hold: Box<dyn Send>) -> Self {
        Self { stream, proof: Arc::default(), tls, probed: false, first: false, mute: false, _hold: hold }
    }

    pub(super) fn proof(&self) -> Arc<Proof> {
        Arc::clone(&self.proof)
    }

    /// Asks the kernel, not tokio's readiness flags: under load a FIN may have been received for
    /// milliseconds before the reactor looks at epoll again, and that is the keep-alive race.
    fn peek(&self) -> io::Result<usize> {
        let mut one = [MaybeUninit::uninit(); 1];
        loop {
            match SockRef::from(&self.stream).peek(&mut one) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                other => return other,
            }
        }
    }

    /// Called when tokio says there is nothing to read and a request is about to be written.
    ///
    /// What it finds goes up as an ordinary read. hyper reads before it writes, in the same poll:
    /// EOF or stray bytes on an idle connection make it hand the queued request back untouched,
    /// which is what lets `send` try again elsewhere. TLS gets to see its alerts and tickets.
    fn probe(&mut self, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.peek() {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                // The waker was registered by the read that got us here.
                self.probed = true;
                Poll::Pending
            }
            Err(e) => {
                self.proof.spend();
                Poll::Ready(Err(e))
            }
            Ok(0) => {
                self.proof.spend();
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

    /// Decides whether a write may go out, and marks the request as possibly written *before* it does.
    fn begin(&mut self) -> io::Result<()> {
        match self.proof.phase.load(Ordering::Acquire) {
            OPEN => return Ok(()),
            ARMED => {}
            _ => return Err(refused()),
        }
        // hyper has read by now, unless the request was armed in the middle of its turn. It has also
        // encoded the request by now: refusing is still a proof, but no second try.
        if !self.probed {
            let clean = match self.peek() {
                // Under TLS this is most likely a session ticket. In the clear it would be taken for the reply.
                Ok(n) => n > 0 && self.tls,
                Err(e) => e.kind() == io::ErrorKind::WouldBlock,
            };
            if !clean {
                self.proof.spend();
                self.proof.seal();
                return Err(refused());
            }
        }
        self.probed = false;
        // Fails if `seal` was quicker: then the request has been reported as never written.
        if !self.proof.step(ARMED, OPEN) {
            return Err(refused());
        }
        self.first = true;
        Ok(())
    }

    /// Judges what the socket said to a write of `len` bytes.
    fn end(&mut self, result: io::Result<usize>, len: usize) -> io::Result<usize> {
        match result {
            Ok(n) => {
                self.first = false;
                Ok(n)
            }
            // Nothing of this request was taken: say so, both to hyper and in the proof.
            Err(e) if self.first => {
                self.proof.spend();
                self.proof.phase.store(SEALED, Ordering::Release);
                Err(e)
            }
            // The peer stopped reading, perhaps because it has already answered (413, then close).
            // hyper would drop the connection, and the answer with it. Pretend, and let the read
            // side tell: after a reset it yields what had arrived, then ends, so nothing hangs.
            Err(_) => {
                self.proof.spend();
                self.mute = true;
                Ok(len)
            }
        }
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.proof.spend();
        self.proof.gone.store(true, Ordering::Release);
        self.proof.left.notify_waiters();
    }
}

#[cold]
fn refused() -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, "refused to write to a connection that is closing")
}

impl AsyncRead for Wire {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        match Pin::new(&mut this.stream).poll_read(cx, buf) {
            Poll::Pending if this.proof.is_armed() => this.probe(buf),
            Poll::Pending => Poll::Pending,
            Poll::Ready(result) => {
                if result.is_err() || (buf.filled().len() == before && buf.remaining() > 0) {
                    this.proof.spend();
                }
                Poll::Ready(result)
            }
        }
    }
}

impl AsyncWrite for Wire {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.mute {
            return Poll::Ready(Ok(buf.len()));
        }
        this.begin()?;
        let result = ready!(Pin::new(&mut this.stream).poll_write(cx, buf));
        Poll::Ready(this.end(result, buf.len()))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>, cx: &mut Context<'_>, bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let len = || bufs.iter().map(|b| b.len()).sum();
        if this.mute {
            return Poll::Ready(Ok(len()));
        }
        this.begin()?;
        let result = ready!(Pin::new(&mut this.stream).poll_write_vectored(cx, bufs));
        Poll::Ready(this.end(result, len()))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.mute {
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut this.stream).poll_shutdown(cx)
    }
}
