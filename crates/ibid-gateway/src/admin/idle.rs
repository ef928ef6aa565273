//! Closes idle connections. The lifetime of a connection and the duration of a response are not limited.

use std::{
    convert::Infallible,
    error::Error,
    io,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, sleep_until},
};

use crate::config::LimitSettings;

/// What a client may take of a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct IdleLimits {
    /// A connection on which no byte moves for this long is closed, unless a response is being computed.
    pub(crate) idle: Duration,
    /// A request head that takes longer closes the connection.
    pub(crate) header: Duration,
    pub(crate) max_headers: usize,
    pub(crate) max_header_bytes: usize,
}

/// The limits of the admin port.
pub(super) const ADMIN_LIMITS: IdleLimits = IdleLimits {
    idle: Duration::from_secs(60),
    header: Duration::from_secs(10),
    max_headers: 100,
    max_header_bytes: 400 << 10,
};

impl From<&LimitSettings> for IdleLimits {
    fn from(limits: &LimitSettings) -> Self {
        Self {
            idle: limits.idle_timeout.min(limits.write_timeout),
            header: limits.header_timeout,
            max_headers: limits.max_headers,
            max_header_bytes: usize::try_from(limits.max_header_bytes).unwrap_or(usize::MAX).max(8192),
        }
    }
}

/// Serves HTTP/1.1 until the client closes the connection, or it is idle for too long. After `stop`, a request that has
/// begun is still answered.
pub(crate) async fn serve<S, F, B>(
    socket: S, limits: IdleLimits, stop: impl Future<Output = ()>, answer: impl Fn(Request<Incoming>) -> F,
) where
    S: AsyncRead + AsyncWrite + Unpin,
    F: Future<Output = Response<B>>,
    B: Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>> + 'static,
{
    let activity = Arc::new(IdleTracker { last_activity: Instant::now().into(), is_working: AtomicBool::new(false) });
    let service = service_fn(|request| {
        let (activity, answer) = (activity.clone(), answer(request));
        async move {
            // HTTP/1.1 has one request at a time. If this future is dropped, so is the connection.
            activity.is_working.store(true, SeqCst);
            let answer = answer.await;
            activity.touch();
            activity.is_working.store(false, SeqCst);
            Ok::<_, Infallible>(answer)
        }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header)
        .max_headers(limits.max_headers)
        .max_buf_size(limits.max_header_bytes)
        .serve_connection(TokioIo::new(TrackedSocket { socket, activity: activity.clone() }), service);
    let (mut connection, mut stop, mut is_stopping) = (pin!(connection), pin!(stop), false);
    loop {
        tokio::select! {
            _ = connection.as_mut() => return,
            () = &mut stop, if !is_stopping => {
                is_stopping = true;
                connection.as_mut().graceful_shutdown();
            }
            () = activity.wait_until_idle(limits.idle) => {
                tracing::debug!("a connection was idle for {:?} and was closed", limits.idle);
                return;
            }
        }
    }
}

struct IdleTracker {
    last_activity: Mutex<Instant>,
    is_working: AtomicBool,
}

impl IdleTracker {
    fn touch(&self) {
        *self.last_activity.lock() = Instant::now();
    }

    /// Returns once no byte has moved for this long and no request is active.
    async fn wait_until_idle(&self, idle: Duration) {
        loop {
            let (last, working) = (*self.last_activity.lock(), self.is_working.load(SeqCst));
            if !working && last.elapsed() >= idle {
                return;
            }
            sleep_until(if working { Instant::now() } else { last } + idle).await;
        }
    }
}

/// Records when bytes move.
struct TrackedSocket<S> {
    socket: S,
    activity: Arc<IdleTracker>,
}

impl<S: AsyncRead + Unpin> AsyncRead for TrackedSocket<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = into.filled().len();
        let read = Pin::new(&mut self.socket).poll_read(cx, into);
        if into.filled().len() > before {
            self.activity.touch();
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for TrackedSocket<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write(cx, bytes);
        if matches!(written, Poll::Ready(Ok(1..))) {
            self.activity.touch();
        }
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use http_body_util::Full;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex},
        time::sleep,
    };

    use super::*;

    const LENGTH: usize = 256 << 10;

    /// Sends a request whose response has [`LENGTH`] bytes and takes this long.
    async fn send_request(takes: Duration) -> DuplexStream {
        let (mut client, server) = duplex(1024);
        tokio::spawn(serve(server, ADMIN_LIMITS, pending(), move |_| async move {
            sleep(takes).await;
            Response::new(Full::new(Bytes::from(vec![b'x'; LENGTH])))
        }));
        client.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await.unwrap();
        client
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_is_read_slowly_is_not_cut() {
        let mut client = send_request(Duration::ZERO).await;
        let (began, mut read, mut piece) = (Instant::now(), 0, [0; 256]);
        loop {
            match client.read(&mut piece).await.unwrap() {
                0 => break,
                some => read += some,
            }
            sleep(Duration::from_secs(1)).await;
        }
        assert!(read > LENGTH, "only {read} bytes came");
        assert!(began.elapsed() > Duration::from_secs(600), "{:?}", began.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_takes_long_to_make_is_not_cut() {
        let mut client = send_request(Duration::from_secs(3600)).await;
        let mut all = Vec::new();
        client.read_to_end(&mut all).await.unwrap();
        assert!(all.len() > LENGTH, "only {} bytes came", all.len());
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_reads_nothing_is_cut() {
        let mut client = send_request(Duration::ZERO).await;
        sleep(ADMIN_LIMITS.idle * 2).await;
        let mut rest = Vec::new();
        client.read_to_end(&mut rest).await.unwrap();
        assert!(rest.len() <= 1024, "{} bytes were waiting", rest.len());
    }
}
