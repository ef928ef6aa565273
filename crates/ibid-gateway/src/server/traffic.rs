//! Whether anything goes on on a connection: a request, or its answer until the last byte of it was handed on.

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

use super::sending::Sending;

/// Frames go out in pieces of this size at most, so that a client that reads slowly is seen to read.
const PIECE: usize = 64 << 10;

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
    /// Of a frame that is larger than a piece.
    rest: Bytes,
    sending: Arc<Sending>,
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
    pub(super) fn during<B: Body>(self, body: B, sending: Arc<Sending>) -> During<B> {
        if !body.is_end_stream() {
            sending.waits_for_client();
        }
        During { body, rest: Bytes::new(), sending, _busy: self }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.last.store(self.0.opened.elapsed().as_millis() as u64, Relaxed);
        self.0.running.fetch_sub(1, Relaxed);
    }
}

impl<B> Drop for During<B> {
    fn drop(&mut self) {
        self.sending.waits_for_app();
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for During<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let polled = match self.rest.is_empty() {
            true => Pin::new(&mut self.body).poll_frame(cx),
            false => Poll::Ready(Some(Ok(Frame::data(mem::take(&mut self.rest))))),
        };
        match polled {
            Poll::Ready(Some(Ok(frame))) => {
                self.sending.waits_for_client();
                let first = |mut data: Bytes| {
                    self.rest = data.split_off(data.len().min(PIECE));
                    data
                };
                Poll::Ready(Some(Ok(frame.map_data(first))))
            }
            polled => {
                self.sending.waits_for_app();
                polled
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (mut hint, rest) = (self.body.size_hint(), self.rest.len() as u64);
        if let Some(upper) = hint.upper() {
            hint.set_upper(upper + rest);
        }
        hint.set_lower(hint.lower() + rest);
        hint
    }
}
