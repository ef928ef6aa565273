//! Whether anything goes on on a connection: a request, or its answer until the last byte of it was handed on.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};

use http_body::{Body, Frame, SizeHint};

pub(super) struct Traffic {
    opened: Instant,
    running: AtomicUsize,
    /// When something last ended, in milliseconds after `opened`.
    last: AtomicU64,
}

/// Something goes on, until this is dropped.
pub(super) struct Busy(Arc<Traffic>);

/// A body during which something goes on.
pub(super) struct During<B> {
    body: B,
    _busy: Busy,
}

impl Traffic {
    pub(super) fn new() -> Self {
        Self { opened: Instant::now(), running: AtomicUsize::new(0), last: AtomicU64::new(0) }
    }

    pub(super) fn begin(this: &Arc<Self>) -> Busy {
        this.running.fetch_add(1, Relaxed);
        Busy(this.clone())
    }

    /// Returns once nothing has gone on for that long, counted from `since` at the earliest.
    pub(super) async fn idle_for(&self, limit: Duration, since: Instant) {
        loop {
            let last = self.opened + Duration::from_millis(self.last.load(Relaxed));
            let quiet = last.max(since).elapsed();
            if self.running.load(Relaxed) == 0 && quiet >= limit {
                return;
            }
            tokio::time::sleep(limit.saturating_sub(quiet).max(Duration::from_millis(100))).await;
        }
    }

    pub(super) fn opened(&self) -> Instant {
        self.opened
    }
}

impl Busy {
    pub(super) fn during<B>(self, body: B) -> During<B> {
        During { body, _busy: self }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.last.store(self.0.opened.elapsed().as_millis() as u64, Relaxed);
        self.0.running.fetch_sub(1, Relaxed);
    }
}

impl<B: Body + Unpin> Body for During<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
