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
pub struct Outgoing {
    /// Read before there was a connection to send it on.
    first: Option<Frame<Bytes>>,
    rest: RequestBody<Incoming>,
    watched: Option<Watched>,
}

struct Watched {
    progress: Arc<Progress>,
    limit: Duration,
    /// Runs while nothing comes.
    silence: Option<Pin<Box<Sleep>>>,
}

/// When a body last moved, and whether it was given up. Written by the task that sends the body, read by the one that waits
/// for the reply.
pub(super) struct Progress {
    since: Instant,
    /// Milliseconds after `since`.
    last: AtomicU64,
    /// Whether it is the client that is waited for.
    awaits_client: AtomicBool,
    is_silent: AtomicBool,
}

/// Why a body was not begun.
pub(super) enum NotBegun {
    Silent,
    Broken,
}

/// The client sent nothing of the body for too long.
#[derive(Debug, Clone, Copy)]
struct Silent;

impl Outgoing {
    /// All of it is there.
    pub fn whole(body: Bytes, trailers: Option<HeaderMap>) -> Self {
        Self::unwatched(RequestBody::whole(body, trailers))
    }

    /// It may take as long as it likes.
    pub(super) fn unwatched(body: RequestBody<Incoming>) -> Self {
        Self { rest: body, ..Self::default() }
    }

    /// Waits for its first piece; from then on it must not be silent for longer than `limit`.
    pub(super) async fn begun(
        mut body: RequestBody<Incoming>, limit: Duration,
    ) -> Result<(Self, Option<Arc<Progress>>), NotBegun> {
        if body.is_end_stream() {
            return Ok((Self::unwatched(body), None));
        }
        let first = timeout(limit, poll_fn(|cx| Pin::new(&mut body).poll_frame(cx))).await;
        let first = match first.map_err(|_| NotBegun::Silent)? {
            None => return Ok((Self::default(), None)),
            Some(frame) => frame.map_err(|_| NotBegun::Broken)?,
        };
        let progress = Arc::new(Progress::new());
        let watched = Watched { progress: progress.clone(), limit, silence: None };
        Ok((Self { first: Some(first), rest: body, watched: Some(watched) }, Some(progress)))
    }
}

impl Watched {
    fn moved(&mut self) {
        self.progress.moved();
        self.progress.awaits_client.store(false, Relaxed);
        self.silence = None;
    }

    /// Ready once nothing has come for too long.
    fn poll_silence(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.progress.awaits_client.store(true, Relaxed);
        let silence = self.silence.get_or_insert_with(|| Box::pin(sleep(self.limit)));
        ready!(silence.as_mut().poll(cx));
        self.progress.is_silent.store(true, Relaxed);
        Poll::Ready(())
    }
}

impl Progress {
    fn new() -> Self {
        Self {
            since: Instant::now(),
            last: AtomicU64::new(0),
            awaits_client: AtomicBool::new(false),
            is_silent: AtomicBool::new(false),
        }
    }

    fn moved(&self) {
        self.last.store(self.since.elapsed().as_millis() as u64, Relaxed);
    }

    fn last(&self) -> Instant {
        self.since + Duration::from_millis(self.last.load(Relaxed))
    }

    /// Whether the body was given up.
    pub(super) fn is_silent(&self) -> bool {
        self.is_silent.load(Relaxed)
    }
}

/// The reply, if it begins within `limit` of the last progress of the request's body; without one, of now. While it is the
/// client that is waited for, the limit on its silence decides.
pub(super) async fn in_time<T>(
    reply: impl Future<Output = T>, progress: Option<&Progress>, limit: Duration,
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
            Some(progress) => progress.last() + limit,
            None => return None,
        };
        if due <= now {
            return None;
        }
    }
}

impl Body for Outgoing {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        let frame = match this.first.take() {
            Some(first) => Poll::Ready(Some(Ok(first))),
            None => Pin::new(&mut this.rest).poll_frame(cx),
        };
        match (frame, &mut this.watched) {
            (Poll::Ready(frame), Some(watched)) => {
                watched.moved();
                Poll::Ready(frame)
            }
            (Poll::Pending, Some(watched)) => watched.poll_silence(cx).map(|()| Some(Err(Silent.into()))),
            (frame, None) => frame,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.first.is_none() && self.rest.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let first = self.first.as_ref().and_then(Frame::data_ref).map_or(0, |data| data.len() as u64);
        let rest = self.rest.size_hint();
        let mut hint = SizeHint::new();
        hint.set_lower(rest.lower() + first);
        if let Some(upper) = rest.upper() {
            hint.set_upper(upper + first);
        }
        hint
    }
}

impl fmt::Display for Silent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the client sent nothing of the body for too long")
    }
}

impl Error for Silent {}
