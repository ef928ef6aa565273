//! Tracks whether a connection is active: it has a request, or a response whose last byte is not handed to hyper yet.

use std::{
    mem,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::sync::Notify;

use super::write_progress::WriteProgress;

/// Frames are split into pieces of at most this many bytes, so that a slow reader still shows progress.
const MAX_FRAME_BYTES: usize = 64 << 10;

pub(super) struct ConnectionActivity {
    pub(super) opened_at: Instant,
    running: AtomicUsize,
    /// When the last activity ended, in milliseconds after `opened_at`.
    last_end_ms: AtomicU64,
    /// Notified when `running` becomes 0.
    idle: Notify,
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
        Self { opened_at, running: AtomicUsize::new(0), last_end_ms: AtomicU64::new(0), idle: Notify::new() }
    }

    pub(super) fn begin(this: &Arc<Self>) -> ActivityGuard {
        this.running.fetch_add(1, Relaxed);
        ActivityGuard(this.clone())
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
