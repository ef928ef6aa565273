//! Cuts off responses that a client does not read: after `limits.write_timeout`, or when other requests need the
//! memory. That resets an HTTP/2 stream and closes an HTTP/1 connection.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use hyper::rt::Executor;
use ibid::http::ResponseAbort;
use tokio::time::{Instant, Sleep, sleep_until};

/// Maximum duration of a timer. Longer ones could overflow the clock.
const MAX_TIMER: Duration = Duration::from_secs(365 * 24 * 60 * 60);

tokio::task_local! {
    /// The progress of the HTTP/2 stream that is being polled.
    static CURRENT_STREAM: Arc<WriteProgress>;
}

/// How far the client has read the responses of one stream, or of one HTTP/1 connection.
pub(super) struct WriteProgress {
    pub(super) cancellation: ResponseAbort,
    created: Instant,
    /// When the current piece began to wait for the client, in milliseconds after `created`, plus 1; 0 if none waits.
    waiting_since: AtomicU64,
}

/// Runs each stream of an HTTP/2 connection in its own task, and ends the streams whose client does not read.
#[derive(Debug, Clone)]
pub struct StreamExecutor {
    pub(super) write_timeout: Duration,
}

struct TimedStream<F> {
    future: Pin<Box<F>>,
    sending: Arc<WriteProgress>,
    timer: StallTimer,
    write_timeout: Duration,
}

/// Set only while a piece waits for the client.
pub(super) type StallTimer = Option<Pin<Box<Sleep>>>;

impl WriteProgress {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { cancellation: ResponseAbort::default(), created: Instant::now(), waiting_since: AtomicU64::new(0) })
    }

    /// Returns the progress of the stream that is being polled, or of the connection for HTTP/1.
    pub(super) fn current(connection: &Arc<Self>) -> Arc<Self> {
        CURRENT_STREAM.try_with(Clone::clone).unwrap_or_else(|_| connection.clone())
    }

    /// A piece was handed to hyper, which asks for the next one after the client has taken it.
    pub(super) fn mark_waiting_for_client(&self) {
        self.waiting_since.store(self.created.elapsed().as_millis() as u64 + 1, Relaxed);
    }

    /// There is nothing to send.
    pub(super) fn mark_waiting_for_app(&self) {
        self.waiting_since.store(0, Relaxed);
    }

    /// Ready once the client has not read for `limit`, or the response is aborted. Poll it after the future that sends.
    pub(super) fn poll_stalled(&self, cx: &mut Context<'_>, timer: &mut StallTimer, limit: Duration) -> Poll<()> {
        if self.cancellation.poll_aborted(cx).is_ready() {
            return Poll::Ready(());
        }
        loop {
            let Some(since) = self.waiting_since.load(Relaxed).checked_sub(1) else {
                *timer = None;
                return Poll::Pending;
            };
            let due = self.created + Duration::from_millis(since) + limit.min(MAX_TIMER);
            let sleep = timer.get_or_insert_with(|| Box::pin(sleep_until(due)));
            // A timer that fires too early is reset then, not for every piece.
            ready!(sleep.as_mut().poll(cx));
            if due <= Instant::now() {
                return Poll::Ready(());
            }
            sleep.as_mut().reset(due);
        }
    }
}

impl<F> Executor<F> for StreamExecutor
where
    F: Future + Send + 'static,
{
    fn execute(&self, future: F) {
        let sending = WriteProgress::new();
        let write_timeout = self.write_timeout;
        let stream = TimedStream { future: Box::pin(future), sending: sending.clone(), timer: None, write_timeout };
        tokio::spawn(CURRENT_STREAM.scope(sending, stream));
    }
}

impl<F: Future> Future for TimedStream<F> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        if this.future.as_mut().poll(cx).is_ready() {
            return Poll::Ready(());
        }
        // Dropping the future resets the stream.
        this.sending.poll_stalled(cx, &mut this.timer, this.write_timeout)
    }
}
