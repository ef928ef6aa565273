//! The body of a client's request, and how its connection is polled.
//!
//! When a part of an HTTP/1 body is taken, hyper wakes the connection's task to read the next part. After the last part
//! there is nothing to read, and the task would be polled once more per request, with all that it contains. So the
//! connection gets a waker of ours, which holds wake-ups back while a part is taken, and the last part drops them.

use std::{
    cell::Cell,
    pin::Pin,
    sync::{
        Arc,
        atomic::{
            AtomicBool,
            Ordering::{AcqRel, Acquire, Release},
        },
    },
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
        let polled = {
            // HTTP/2 needs every wake-up: taking a part enlarges windows.
            IS_TAKING.set(!*is_http2);
            let _taken = TakingGuard;
            Pin::new(&mut *body).poll_frame(cx)
        };
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

/// Ends the taking of a part, also if it panics: the server catches that, and goes on with this thread.
struct TakingGuard;

impl Drop for TakingGuard {
    fn drop(&mut self) {
        IS_TAKING.set(false);
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

/// Wakes a connection's task and records that its timers and signals must be polled. They have this waker of their own,
/// so that the task need not poll them for every request.
pub(crate) struct EventWaker {
    is_woken: AtomicBool,
    task: Waker,
}

impl EventWaker {
    /// Returns the waker of a task. Events count as woken when it is new.
    pub(crate) fn of_task<'a>(known: &'a mut Option<Arc<Self>>, cx: &Context<'_>) -> &'a Arc<Self> {
        let known_waker = known.take().filter(|waker| waker.task.will_wake(cx.waker()));
        let new = || Arc::new(Self { is_woken: AtomicBool::new(true), task: cx.waker().clone() });
        known.insert(known_waker.unwrap_or_else(new))
    }

    /// Whether an event was woken since the last call.
    pub(crate) fn take_woken(&self) -> bool {
        self.is_woken.load(Acquire) && self.is_woken.swap(false, AcqRel)
    }
}

impl Wake for EventWaker {
    fn wake(self: Arc<Self>) {
        self.is_woken.store(true, Release);
        self.task.wake_by_ref();
    }
}

#[cfg(test)]
mod tests {
    use std::{convert::Infallible, future::poll_fn, pin::pin};

    use http::{Request, Response, Version};
    use http_body_util::{BodyExt as _, Full};
    use hyper::{server::conn::http1, service::service_fn};
    use hyper_util::rt::TokioIo;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;

    /// Sends a request in these parts to a server that echoes the body. Returns the response and how often the
    /// connection was polled after its first poll.
    async fn echo(parts: &[&str]) -> (String, usize) {
        let (mut client, server) = duplex(4096);
        let server = tokio::spawn(async move {
            let service = service_fn(|request: Request<Incoming>| async {
                let body = ClientBody::new(request.into_body(), Version::HTTP_11).collect().await.expect("a body");
                Ok::<_, Infallible>(Response::new(Full::new(body.to_bytes())))
            });
            let mut connection = pin!(http1::Builder::new().serve_connection(TokioIo::new(server), service));
            let (mut poller, mut polls) = (ConnectionPoller::default(), 0);
            let ended = poll_fn(|cx| {
                polls += 1;
                poller.poll(connection.as_mut(), cx)
            });
            ended.await.expect("the client closes the connection");
            polls - 1
        });
        for part in parts {
            for _ in 0..4 {
                tokio::task::yield_now().await;
            }
            client.write_all(part.as_bytes()).await.expect("an open connection");
        }
        let mut response = vec![0; 4096];
        let length = client.read(&mut response).await.expect("a response");
        drop(client);
        let response = String::from_utf8_lossy(&response[..length]).into_owned();
        (response, server.await.expect("no panic"))
    }

    #[tokio::test]
    async fn a_connection_is_not_polled_again_after_a_whole_body() {
        let (response, polls) = echo(&["POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nhello"]).await;
        assert!(response.ends_with("\r\n\r\nhello"), "{response}");
        // For the request, and for the end of the connection.
        assert_eq!(polls, 2);
    }

    #[tokio::test]
    async fn a_body_in_parts_arrives_whole() {
        let head = "POST / HTTP/1.1\r\nhost: a\r\n";
        for parts in [
            &[head, "content-length: 10\r\n\r\n", "hel", "lo ", "body"][..],
            &[head, "content-length: 10\r\n\r\nhello", " body"],
            &[head, "transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n", "5\r\n body\r\n0\r\n\r\n"],
            &[head, "transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n5\r\n body\r\n", "0\r\n", "\r\n"],
        ] {
            let (response, _) = echo(parts).await;
            assert!(response.ends_with("\r\n\r\nhello body"), "{parts:?}: {response}");
        }
    }
}
