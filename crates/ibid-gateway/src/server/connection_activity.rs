//! Tracks whether a connection is active, that is, it has a request, or a response whose last byte is not handed to hyper
//! yet; how long the head of an HTTP/1 request takes to arrive; and cuts off responses that a client does not read: after `limits.write_timeout`, or when other requests need
//! the memory. That resets an HTTP/2 stream and closes an HTTP/1 connection.

use std::{
    mem,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::rt::Executor;
use ibid::http::ResponseAbort;
use tokio::{
    sync::Notify,
    time::{Sleep, sleep_until},
};

/// Frames are split into pieces of at most this many bytes, so that a slow reader still shows progress.
const MAX_FRAME_BYTES: usize = 64 << 10;

pub(super) struct ConnectionActivity {
    pub(super) opened_at: Instant,
    running: AtomicUsize,
    /// When the last activity ended, in milliseconds after `opened_at`.
    last_end_ms: AtomicU64,
    /// Notified when `running` becomes 0.
    idle: Notify,
    /// Since when an HTTP/1 head is incomplete.
    partial_head: LazyTimestamp,
    /// How many bytes of the HTTP/2 preface have arrived, or [`IS_HTTP1`].
    preface_bytes: AtomicUsize,
}

/// No HTTP/1 request begins with this.
const HTTP2_PREFACE: &[u8] = b"PRI";
const IS_HTTP1: usize = usize::MAX;

/// The time at which something began. The clock is read when the time is first asked for, because most waits end before
/// that.
#[derive(Default)]
struct LazyTimestamp(AtomicU64);

impl LazyTimestamp {
    const UNSET: u64 = 0;
    /// Set, and not yet read. All other values are milliseconds after a start, plus 1.
    const UNREAD: u64 = u64::MAX;

    fn set(&self) {
        self.0.store(Self::UNREAD, Relaxed);
    }

    fn clear(&self) {
        self.0.store(Self::UNSET, Relaxed);
    }

    fn is_set(&self) -> bool {
        self.0.load(Relaxed) != Self::UNSET
    }

    /// Returns the time, if it is set. `start` is always the same.
    fn read(&self, start: Instant) -> Option<Instant> {
        let known = match self.0.load(Relaxed) {
            Self::UNSET => return None,
            Self::UNREAD => {
                let now = start.elapsed().as_millis() as u64 + 1;
                self.0.store(now, Relaxed);
                now
            }
            known => known,
        };
        Some(start + Duration::from_millis(known - 1))
    }
}

/// Marks the connection as active until it is dropped.
pub(super) struct ActivityGuard(Arc<ConnectionActivity>);

/// A body that keeps the connection active.
pub(super) struct TrackedBody<B> {
    body: B,
    /// The rest of a frame that was split.
    pending_frame: Bytes,
    sending: Arc<WriteProgress>,
    _busy: ActivityGuard,
}

impl ConnectionActivity {
    pub(super) fn new() -> Self {
        let opened_at = Instant::now();
        Self {
            opened_at,
            running: AtomicUsize::new(0),
            last_end_ms: AtomicU64::new(0),
            idle: Notify::new(),
            partial_head: LazyTimestamp::default(),
            preface_bytes: AtomicUsize::new(0),
        }
    }

    pub(super) fn begin(this: &Arc<Self>) -> ActivityGuard {
        this.running.fetch_add(1, Relaxed);
        this.partial_head.clear();
        ActivityGuard(this.clone())
    }

    /// Records bytes from the client. Between two HTTP/1 requests, they begin a head.
    pub(super) fn record_read(&self, bytes: &[u8]) {
        let known = self.preface_bytes.load(Relaxed);
        if known == HTTP2_PREFACE.len() || bytes.is_empty() {
            return;
        }
        if known != IS_HTTP1 {
            let expected = &HTTP2_PREFACE[known..];
            let compared = expected.len().min(bytes.len());
            let is_preface = expected[..compared] == bytes[..compared];
            self.preface_bytes.store(if is_preface { known + compared } else { IS_HTTP1 }, Relaxed);
            if is_preface {
                return;
            }
        }
        if self.running.load(Relaxed) == 0 && !self.has_partial_head() {
            self.partial_head.set();
        }
    }

    /// Whether the connection has begun as HTTP/2 does.
    pub(super) fn is_http2(&self) -> bool {
        self.preface_bytes.load(Relaxed) == HTTP2_PREFACE.len()
    }

    /// Whether a head has begun and not ended.
    pub(super) fn has_partial_head(&self) -> bool {
        self.partial_head.is_set()
    }

    /// Ready once a head has been incomplete for `limit`. Poll it while there is a partial head.
    pub(super) fn poll_late_head(&self, cx: &mut Context<'_>, timer: &mut EventTimer, limit: Duration) -> Poll<()> {
        poll_due(cx, timer, self.partial_head.read(self.opened_at).map(|began| began + limit.min(MAX_TIMER)))
    }

    /// Returns once the connection has been idle for `limit`, counted from `since` at the earliest.
    pub(super) async fn wait_until_idle(&self, limit: Duration, since: Instant) {
        loop {
            if self.running.load(Relaxed) > 0 {
                // A stored notification of an earlier request only costs another round.
                self.idle.notified().await;
                continue;
            }
            let last = self.opened_at + Duration::from_millis(self.last_end_ms.load(Relaxed));
            match limit.checked_sub(last.max(since).elapsed()) {
                Some(left) if !left.is_zero() => tokio::time::sleep(left).await,
                _ => return,
            }
        }
    }
}

impl ActivityGuard {
    pub(super) fn track_body<B: Body>(self, body: B, sending: Arc<WriteProgress>) -> TrackedBody<B> {
        if !body.is_end_stream() {
            sending.mark_waiting_for_client();
        }
        TrackedBody { body, pending_frame: Bytes::new(), sending, _busy: self }
    }
}

impl Drop for ActivityGuard {
    fn drop(&mut self) {
        self.0.last_end_ms.store(self.0.opened_at.elapsed().as_millis() as u64, Relaxed);
        if self.0.running.fetch_sub(1, Relaxed) == 1 {
            self.0.idle.notify_one();
        }
    }
}

impl<B> Drop for TrackedBody<B> {
    fn drop(&mut self) {
        self.sending.mark_waiting_for_app();
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for TrackedBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let polled = match self.pending_frame.is_empty() {
            true => Pin::new(&mut self.body).poll_frame(cx),
            false => Poll::Ready(Some(Ok(Frame::data(mem::take(&mut self.pending_frame))))),
        };
        match polled {
            Poll::Ready(Some(Ok(frame))) => {
                self.sending.mark_waiting_for_client();
                let first = |mut data: Bytes| {
                    self.pending_frame = data.split_off(data.len().min(MAX_FRAME_BYTES));
                    data
                };
                Poll::Ready(Some(Ok(frame.map_data(first))))
            }
            polled => {
                self.sending.mark_waiting_for_app();
                polled
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.pending_frame.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (mut hint, rest) = (self.body.size_hint(), self.pending_frame.len() as u64);
        if let Some(upper) = hint.upper() {
            hint.set_upper(upper + rest);
        }
        hint.set_lower(hint.lower() + rest);
        hint
    }
}

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
    /// Since when the current piece waits for the client.
    waiting: LazyTimestamp,
}

/// Runs each stream of an HTTP/2 connection in its own task, and ends the streams whose client does not read.
#[derive(Debug, Clone)]
pub struct StreamExecutor {
    pub(super) write_timeout: Duration,
}

struct TimedStream<F> {
    future: Pin<Box<F>>,
    sending: Arc<WriteProgress>,
    timer: EventTimer,
    write_timeout: Duration,
}

/// Set only while something is waited for.
pub(super) type EventTimer = Option<Pin<Box<Sleep>>>;

/// Ready at `due`. A timer that fires too early is reset then, not for every change of `due`.
fn poll_due(cx: &mut Context<'_>, timer: &mut EventTimer, due: Option<Instant>) -> Poll<()> {
    let Some(due) = due.map(tokio::time::Instant::from_std) else {
        *timer = None;
        return Poll::Pending;
    };
    loop {
        let sleep = timer.get_or_insert_with(|| Box::pin(sleep_until(due)));
        ready!(sleep.as_mut().poll(cx));
        if due <= tokio::time::Instant::now() {
            return Poll::Ready(());
        }
        sleep.as_mut().reset(due);
    }
}

impl WriteProgress {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            cancellation: ResponseAbort::default(),
            created: Instant::now(),
            waiting: LazyTimestamp::default(),
        })
    }

    /// Returns the progress of the stream that is being polled, or of the connection for HTTP/1.
    pub(super) fn current(connection: &Arc<Self>) -> Arc<Self> {
        CURRENT_STREAM.try_with(Clone::clone).unwrap_or_else(|_| connection.clone())
    }

    /// A piece was handed to hyper, which asks for the next one after the client has taken it.
    pub(super) fn mark_waiting_for_client(&self) {
        self.waiting.set();
    }

    /// There is nothing to send.
    pub(super) fn mark_waiting_for_app(&self) {
        self.waiting.clear();
    }

    /// Ready once the client has not read for `limit`, or the response is aborted. Poll it after the future that sends.
    pub(super) fn poll_stalled(&self, cx: &mut Context<'_>, timer: &mut EventTimer, limit: Duration) -> Poll<()> {
        if self.cancellation.poll_aborted(cx).is_ready() {
            return Poll::Ready(());
        }
        poll_due(cx, timer, self.waiting.read(self.created).map(|since| since + limit.min(MAX_TIMER)))
    }

    /// Whether the client has not taken a piece yet.
    pub(super) fn is_waiting_for_client(&self) -> bool {
        self.waiting.is_set()
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
