//! The body of a request on its way to the upstream, and whether it makes progress.
//!
//! Invariant: a request that passes through takes no connection to the upstream before its body has begun, and holds none
//! for a body that is silent for longer than its limit.

use std::{
    error::Error,
    fmt,
    future::{Future, poll_fn},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use ibid::http::{BoxError, RequestBody};
use tokio::time::{Instant, Sleep, sleep, timeout, timeout_at};

/// A request's body on its way to the upstream.
#[derive(Default)]
pub struct OutgoingBody {
    /// Read before there was a connection to send it on.
    first_frame: Option<Frame<Bytes>>,
    remaining: RequestBody<Incoming>,
    idle_watch: Option<BodyIdleWatch>,
}

struct BodyIdleWatch {
    progress: Arc<BodyProgress>,
    limit: Duration,
    /// Runs while nothing comes.
    idle_timer: Option<Pin<Box<Sleep>>>,
}

/// When a body last moved, and whether it was given up. Written by the task that sends the body, read by the one that waits
/// for the reply.
pub(super) struct BodyProgress {
    since: Instant,
    /// Milliseconds after `since`.
    last_progress_ms: AtomicU64,
    /// Whether it is the client that is waited for.
    awaits_client: AtomicBool,
    has_timed_out: AtomicBool,
}

/// Why a body was not begun.
pub(super) enum BodyStartError {
    TimedOut,
    Broken,
}

/// The client sent nothing of the body for too long.
#[derive(Debug, Clone, Copy)]
struct BodyIdleError;

impl OutgoingBody {
    /// All of it is there.
    pub fn complete(body: Bytes, trailers: Option<HeaderMap>) -> Self {
        Self::without_timeout(RequestBody::whole(body, trailers))
    }

    /// It may take as long as it likes.
    pub(super) fn without_timeout(body: RequestBody<Incoming>) -> Self {
        Self { remaining: body, ..Self::default() }
    }

    /// Waits for its first piece; from then on it must not be silent for longer than `limit`.
    pub(super) async fn wait_for_first_frame(
        mut body: RequestBody<Incoming>, limit: Duration,
    ) -> Result<(Self, Option<Arc<BodyProgress>>), BodyStartError> {
        if body.is_end_stream() {
            return Ok((Self::without_timeout(body), None));
        }
        let first = timeout(limit, poll_fn(|cx| Pin::new(&mut body).poll_frame(cx))).await;
        let first = match first.map_err(|_| BodyStartError::TimedOut)? {
            None => return Ok((Self::default(), None)),
            Some(frame) => frame.map_err(|_| BodyStartError::Broken)?,
        };
        let progress = Arc::new(BodyProgress::new());
        let watched = BodyIdleWatch { progress: progress.clone(), limit, idle_timer: None };
        Ok((Self { first_frame: Some(first), remaining: body, idle_watch: Some(watched) }, Some(progress)))
    }
}

impl BodyIdleWatch {
    fn moved(&mut self) {
        self.progress.moved();
        self.progress.awaits_client.store(false, Relaxed);
        self.idle_timer = None;
    }

    /// Ready once nothing has come for too long.
    fn poll_idle_timeout(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.progress.awaits_client.store(true, Relaxed);
        let silence = self.idle_timer.get_or_insert_with(|| Box::pin(sleep(self.limit)));
        ready!(silence.as_mut().poll(cx));
        self.progress.has_timed_out.store(true, Relaxed);
        Poll::Ready(())
    }
}

impl BodyProgress {
    fn new() -> Self {
        Self {
            since: Instant::now(),
            last_progress_ms: AtomicU64::new(0),
            awaits_client: AtomicBool::new(false),
            has_timed_out: AtomicBool::new(false),
        }
    }

    fn moved(&self) {
        self.last_progress_ms.store(self.since.elapsed().as_millis() as u64, Relaxed);
    }

    fn last_progress(&self) -> Instant {
        self.since + Duration::from_millis(self.last_progress_ms.load(Relaxed))
    }

    /// Whether the body was given up.
    pub(super) fn has_timed_out(&self) -> bool {
        self.has_timed_out.load(Relaxed)
    }
}

/// The reply, if it begins within `limit` of the last progress of the request's body; without one, of now. While it is the
/// client that is waited for, the limit on its silence decides.
pub(super) async fn wait_for_reply<T>(
    reply: impl Future<Output = T>, progress: Option<&BodyProgress>, limit: Duration,
) -> Option<T> {
    let mut reply = std::pin::pin!(reply);
    let mut due = Instant::now() + limit;
    loop {
        if let Ok(reply) = timeout_at(due, reply.as_mut()).await {
            return Some(reply);
        }
        let now = Instant::now();
        due = match progress {
            Some(progress) if progress.awaits_client.load(Relaxed) => now + limit,
            Some(progress) => progress.last_progress() + limit,
            None => return None,
        };
        if due <= now {
            return None;
        }
    }
}

impl Body for OutgoingBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        let frame = match this.first_frame.take() {
            Some(first) => Poll::Ready(Some(Ok(first))),
            None => Pin::new(&mut this.remaining).poll_frame(cx),
        };
        match (frame, &mut this.idle_watch) {
            (Poll::Ready(frame), Some(watched)) => {
                watched.moved();
                Poll::Ready(frame)
            }
            (Poll::Pending, Some(watched)) => watched.poll_idle_timeout(cx).map(|()| Some(Err(BodyIdleError.into()))),
            (frame, None) => frame,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.first_frame.is_none() && self.remaining.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let first = self.first_frame.as_ref().and_then(Frame::data_ref).map_or(0, |data| data.len() as u64);
        let rest = self.remaining.size_hint();
        let mut hint = SizeHint::new();
        hint.set_lower(rest.lower() + first);
        if let Some(upper) = rest.upper() {
            hint.set_upper(upper + first);
        }
        hint
    }
}

impl fmt::Display for BodyIdleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the client sent nothing of the body for too long")
    }
}

impl Error for BodyIdleError {}
