//! The body of a client's request, and how its connection is polled.
//!
//! When a part of an HTTP/1 body is taken, hyper wakes the connection's task to read the next part. After the last part
//! there is nothing to read, and the task would be polled once more per request, with all that it contains. So the
//! connection gets a waker of ours, which holds wake-ups back while a part is taken, and the last part drops them.

use std::{
    cell::Cell,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;

thread_local! {
    /// Whether this thread takes a part of a body now.
    static IS_TAKING: Cell<bool> = const { Cell::new(false) };
    /// The wake-up that was held back meanwhile.
    static HELD_BACK: Cell<Option<Arc<ConnectionWaker>>> = const { Cell::new(None) };
}

/// The body of a client's request.
pub struct ClientBody {
    body: Incoming,
    is_http2: bool,
}

impl ClientBody {
    pub fn new(body: Incoming, version: http::Version) -> Self {
        Self { body, is_http2: version == http::Version::HTTP_2 }
    }
}

impl Body for ClientBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Self { body, is_http2 } = self.get_mut();
        // HTTP/2 needs every wake-up: taking a part enlarges windows.
        IS_TAKING.set(!*is_http2);
        let polled = Pin::new(&mut *body).poll_frame(cx);
        IS_TAKING.set(false);
        if let Some(waker) = HELD_BACK.take()
            && !body.is_end_stream()
        {
            waker.task.wake_by_ref();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Wakes the task of a connection, except while a body's last part is taken.
struct ConnectionWaker {
    task: Waker,
}

impl Wake for ConnectionWaker {
    fn wake(self: Arc<Self>) {
        match IS_TAKING.get() {
            true => HELD_BACK.set(Some(self)),
            false => self.task.wake_by_ref(),
        }
    }
}

/// Polls one of hyper's connections. Keeps the waker that the connection gets.
#[derive(Default)]
pub struct ConnectionPoller {
    /// The waker of the task, and that of the connection.
    wakers: Option<(Waker, Waker)>,
}

impl ConnectionPoller {
    pub fn poll<F: Future>(&mut self, connection: Pin<&mut F>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let known = self.wakers.take().filter(|(task, _)| task.will_wake(cx.waker()));
        let (_, waker) = self.wakers.insert(known.unwrap_or_else(|| {
            let task = cx.waker().clone();
            (task.clone(), Waker::from(Arc::new(ConnectionWaker { task })))
        }));
        connection.poll(&mut Context::from_waker(waker))
    }
}
