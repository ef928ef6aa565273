//! Connections on which nothing moves any more are closed. How long a connection lasts, or an answer takes, is not limited.

use std::{
    convert::Infallible,
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, sleep_until},
};

/// How long a client may neither send nor take a byte. While an answer is being made, it need not.
pub(super) const IDLE: Duration = Duration::from_secs(60);
/// How long the head of a request may take.
const HEAD: Duration = Duration::from_secs(10);

/// Serves HTTP/1.1 until the client closes the connection, or nothing has moved on it for [`IDLE`].
pub(super) async fn serve<S, F>(socket: S, answer: impl Fn(Request<Incoming>) -> F)
where
    S: AsyncRead + AsyncWrite + Unpin,
    F: Future<Output = Response<Full<Bytes>>>,
{
    let activity = Arc::new(Activity::new());
    let service = service_fn(|request| {
        let (working, answer) = (Working::begin(&activity), answer(request));
        async move {
            let answer = answer.await;
            drop(working);
            Ok::<_, Infallible>(answer)
        }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .serve_connection(TokioIo::new(TrackedSocket { socket, activity: activity.clone() }), service);
    tokio::select! {
        _ = connection => {}
        () = activity.ended() => tracing::debug!("a connection to the admin port was idle for {IDLE:?} and was closed"),
    }
}

/// When something moved last, and how many answers are being made.
struct Activity {
    began: Instant,
    /// In milliseconds since `began`.
    last: AtomicU64,
    working: AtomicUsize,
}

impl Activity {
    fn new() -> Self {
        Self { began: Instant::now(), last: AtomicU64::new(0), working: AtomicUsize::new(0) }
    }

    fn touch(&self) {
        self.last.store(self.began.elapsed().as_millis() as u64, SeqCst);
    }

    /// Returns once nothing has moved for [`IDLE`], and nobody was at work.
    async fn ended(&self) {
        loop {
            let last = self.began + Duration::from_millis(self.last.load(SeqCst));
            let working = self.working.load(SeqCst) > 0;
            if !working && last.elapsed() >= IDLE {
                return;
            }
            sleep_until(if working { Instant::now() } else { last } + IDLE).await;
        }
    }
}

struct Working(Arc<Activity>);

impl Working {
    fn begin(activity: &Arc<Activity>) -> Self {
        activity.working.fetch_add(1, SeqCst);
        Self(activity.clone())
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        self.0.touch();
        self.0.working.fetch_sub(1, SeqCst);
    }
}

/// Notes when bytes move.
struct TrackedSocket<S> {
    socket: S,
    activity: Arc<Activity>,
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

    fn poll_write_vectored(
        mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write_vectored(cx, bytes);
        if matches!(written, Poll::Ready(Ok(1..))) {
            self.activity.touch();
        }
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
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
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex},
        time::sleep,
    };

    use super::*;

    const LENGTH: usize = 256 << 10;

    /// A client whose request is answered with [`LENGTH`] bytes after so long.
    async fn asked(takes: Duration) -> DuplexStream {
        let (mut client, server) = duplex(1024);
        tokio::spawn(serve(server, move |_| async move {
            sleep(takes).await;
            Response::new(Full::new(Bytes::from(vec![b'x'; LENGTH])))
        }));
        client.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await.unwrap();
        client
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_is_read_slowly_is_not_cut() {
        let mut client = asked(Duration::ZERO).await;
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
        let mut client = asked(Duration::from_secs(3600)).await;
        let mut all = Vec::new();
        client.read_to_end(&mut all).await.unwrap();
        assert!(all.len() > LENGTH, "only {} bytes came", all.len());
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_reads_nothing_is_cut() {
        let mut client = asked(Duration::ZERO).await;
        sleep(IDLE * 2).await;
        let mut rest = Vec::new();
        client.read_to_end(&mut rest).await.unwrap();
        assert!(rest.len() <= 1024, "{} bytes were waiting", rest.len());
    }
}
