//! The body of a request on its way to the upstream, with an idle timeout.
//!
//! Invariant: a pass-through request takes no upstream connection before its body has begun, and holds none for a body
//! that is silent for longer than the limit.

use std::{
    future::{Future, poll_fn},
    mem,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use http_body::{Body, Frame, SizeHint};
use ibid::http::{BoxError, RequestBody};
use tokio::time::{Instant, Sleep, sleep, timeout, timeout_at};

use crate::server::client_body::ClientBody;

#[derive(Default)]
pub struct OutgoingBody {
    remaining: RequestBody<ClientBody>,
    /// Boxed, because claimed requests have none, and requests are moved often.
    timed: Option<Box<TimedBody>>,
}

struct TimedBody {
    progress: Arc<BodyProgress>,
    limit: Duration,
    /// Runs while the client sends nothing.
    idle_timer: Option<Pin<Box<Sleep>>>,
}

/// When the body last made progress, and whether it timed out. The task that sends the body writes it; the task that
/// waits for the response reads it.
pub(super) struct BodyProgress {
    since: Instant,
    last_progress_ms: AtomicU64,
    /// Whether the body waits for the client, not for the upstream.
    awaits_client: AtomicBool,
    has_timed_out: AtomicBool,
}

/// The status and the detail of the response if the body did not arrive.
pub(super) type BodyFailure = (StatusCode, &'static str);
pub(super) const BODY_TIMED_OUT: BodyFailure = (StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time");
const BODY_BROKEN: BodyFailure = (StatusCode::BAD_REQUEST, "the body broke off or is malformed");

#[derive(Debug, thiserror::Error)]
#[error("the client sent nothing of the body for too long")]
struct BodyIdleError;

impl OutgoingBody {
    /// A body without an idle timeout.
    pub(super) fn new(body: RequestBody<ClientBody>) -> Self {
        Self { remaining: body, timed: None }
    }

    /// A body that is already complete.
    pub fn complete(body: Bytes, trailers: Option<HeaderMap>) -> Self {
        Self::new(RequestBody::whole(body, trailers))
    }

    /// Waits for the first frame. From then on, the body must not be silent for longer than `limit`.
    pub(super) async fn wait_for_first_frame(
        &mut self, limit: Duration,
    ) -> Result<Option<Arc<BodyProgress>>, BodyFailure> {
        if self.remaining.is_end_stream() {
            return Ok(None);
        }
        let first = timeout(limit, poll_fn(|cx| Pin::new(&mut self.remaining).poll_frame(cx))).await;
        let first = first.map_err(|_| BODY_TIMED_OUT)?;
        let body = mem::take(&mut self.remaining);
        let Some(first) = first else { return Ok(None) };
        self.remaining = body.with_first_frame(first.map_err(|_| BODY_BROKEN)?);
        let progress = Arc::new(BodyProgress::new());
        self.timed = Some(Box::new(TimedBody { progress: progress.clone(), limit, idle_timer: None }));
        Ok(Some(progress))
    }
}

impl TimedBody {
    fn moved(&mut self) {
        let progress = &self.progress;
        progress.last_progress_ms.store(progress.since.elapsed().as_millis() as u64, Relaxed);
        progress.awaits_client.store(false, Relaxed);
        self.idle_timer = None;
    }

    /// Ready once the client has sent nothing for the limit.
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
        let (awaits_client, has_timed_out) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { since: Instant::now(), last_progress_ms: AtomicU64::new(0), awaits_client, has_timed_out }
    }

    pub(super) fn has_timed_out(&self) -> bool {
        self.has_timed_out.load(Relaxed)
    }
}

/// Returns the response if it begins within `limit` of the last progress of the request's body, or of now without
/// `progress`. While the body waits for the client, the body's idle timeout applies instead.
pub(super) async fn wait_for_reply<T>(
    mut reply: Pin<&mut impl Future<Output = T>>, progress: Option<&BodyProgress>, limit: Duration,
) -> Option<T> {
    let mut due = Instant::now() + limit;
    loop {
        if let Ok(reply) = timeout_at(due, reply.as_mut()).await {
            return Some(reply);
        }
        let now = Instant::now();
        due = match progress {
            Some(progress) if progress.awaits_client.load(Relaxed) => now + limit,
            Some(progress) => progress.since + Duration::from_millis(progress.last_progress_ms.load(Relaxed)) + limit,
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
        match (Pin::new(&mut this.remaining).poll_frame(cx), &mut this.timed) {
            (Poll::Ready(frame), Some(timed)) => {
                timed.moved();
                Poll::Ready(frame)
            }
            (Poll::Pending, Some(timed)) => timed.poll_idle_timeout(cx).map(|()| Some(Err(BodyIdleError.into()))),
            (frame, None) => frame,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.remaining.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.remaining.size_hint()
    }
}
