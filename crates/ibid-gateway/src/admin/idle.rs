//! Closes idle connections. The lifetime of a connection and the duration of a response are not limited.

use std::{
    convert::Infallible,
    error::Error,
    future::poll_fn,
    io,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, sleep_until},
};

use crate::{
    config::LimitSettings,
    server::client_body::{ClientBody, ConnectionPoller, EventWaker},
};

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
    socket: S, limits: IdleLimits, stop: impl Future<Output = ()>, answer: impl Fn(Request<ClientBody>) -> F,
) where
    S: AsyncRead + AsyncWrite + Unpin,
    F: Future<Output = Response<B>>,
    B: Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>> + 'static,
{
    let activity = Arc::new(IdleTracker::new());
    let service = service_fn(|request: Request<Incoming>| {
        let version = request.version();
        let answer = answer(request.map(|body| ClientBody::new(body, version)));
        let activity = activity.clone();
        async move {
            // HTTP/1.1 has one request at a time. If this future is dropped, so is the connection.
            activity.state.lock().phase = ConnectionPhase::Working;
            let answer = answer.await;
            *activity.state.lock() = IdleState { last_activity: Instant::now(), phase: ConnectionPhase::Waiting };
            Ok::<_, Infallible>(answer)
        }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        // The tracker limits the time of a head: one timer per connection instead of one per request.
        .header_read_timeout(None)
        .max_headers(limits.max_headers)
        .max_buf_size(limits.max_header_bytes)
        .serve_connection(TokioIo::new(TrackedSocket { socket, activity: activity.clone() }), service);
    let (mut connection, mut stop, mut is_stopping) = (pin!(connection), pin!(stop), false);
    let mut idle = pin!(activity.wait_until_idle(&limits));
    let (mut poller, mut waker) = (ConnectionPoller::default(), None);
    poll_fn(|cx| {
        loop {
            if poller.poll(connection.as_mut(), cx).is_ready() {
                return Poll::Ready(());
            }
            let waker = EventWaker::of_task(&mut waker, cx);
            if !waker.take_woken() {
                return Poll::Pending;
            }
            let waker = Waker::from(waker.clone());
            let events = &mut Context::from_waker(&waker);
            if idle.as_mut().poll(events).is_ready() {
                tracing::debug!("a connection was idle, or its request head took too long, and was closed");
                return Poll::Ready(());
            }
            if is_stopping || stop.as_mut().poll(events).is_pending() {
                return Poll::Pending;
            }
            is_stopping = true;
            connection.as_mut().graceful_shutdown();
        }
    })
    .await;
}

struct IdleTracker {
    state: Mutex<IdleState>,
}

#[derive(Clone, Copy)]
struct IdleState {
    last_activity: Instant,
    phase: ConnectionPhase,
}

#[derive(Clone, Copy)]
enum ConnectionPhase {
    /// No byte of the next request has come.
    Waiting,
    /// The first byte of a request head came at this time.
    ReadingHead(Instant),
    /// A response is being computed.
    Working,
}

impl IdleTracker {
    fn new() -> Self {
        Self { state: Mutex::new(IdleState { last_activity: Instant::now(), phase: ConnectionPhase::Waiting }) }
    }

    fn on_bytes(&self, were_read: bool) {
        let now = Instant::now();
        let mut state = self.state.lock();
        state.last_activity = now;
        if let (ConnectionPhase::Waiting, true) = (state.phase, were_read) {
            state.phase = ConnectionPhase::ReadingHead(now);
        }
    }

    /// Returns once no byte has moved for `idle` and no request is active, or a head takes longer than `header`.
    async fn wait_until_idle(&self, limits: &IdleLimits) {
        loop {
            let IdleState { last_activity, phase } = *self.state.lock();
            let now = Instant::now();
            let closes_at = match phase {
                ConnectionPhase::Waiting => last_activity + limits.idle,
                ConnectionPhase::ReadingHead(began) => (began + limits.header).min(last_activity + limits.idle),
                ConnectionPhase::Working => now + limits.idle,
            };
            if closes_at <= now {
                return;
            }
            // A head may begin meanwhile.
            sleep_until(closes_at.min(now + limits.header)).await;
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
            self.activity.on_bytes(true);
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for TrackedSocket<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write(cx, bytes);
        if matches!(written, Poll::Ready(Ok(1..))) {
            self.activity.on_bytes(false);
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
    async fn a_head_that_drips_is_cut_and_a_second_request_is_not() {
        let (mut client, server) = duplex(LENGTH * 2);
        tokio::spawn(serve(server, ADMIN_LIMITS, pending(), |_| async { Response::new(Full::<Bytes>::default()) }));
        let mut answer = [0; 512];
        for _ in 0..2 {
            client.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
            assert!(client.read(&mut answer).await.unwrap() > 0);
            sleep(ADMIN_LIMITS.header * 2).await;
        }
        let began = Instant::now();
        client.write_all(b"GET / HTTP/1.1\r\nx: ").await.unwrap();
        while client.write_all(b"x").await.is_ok() {
            assert!(began.elapsed() < ADMIN_LIMITS.header * 3, "it still reads");
            sleep(Duration::from_secs(1)).await;
        }
        assert!(began.elapsed() >= ADMIN_LIMITS.header, "{:?}", began.elapsed());
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
