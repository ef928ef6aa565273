//! Puts a new HTTP/2 connection under hyper: limits, driver, and the meaning of errors.
//!
//! Invariant: an HTTP/2 connection's dispatch and its socket run in one task. hyper spawns two tasks;
//! then a GOAWAY could be read between "stream queued" and hyper's next look at the connection, and a
//! stream that the GOAWAY does *not* exclude would fail with the error that means "excluded", while its
//! HEADERS go out. In one task the two cannot interleave.

use std::error::Error as _;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use http_body::Body;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};

use super::BodyError;
use crate::gathered_socket::GatheredSocket;

/// Runs an HTTP/2 connection in its own task.
///
/// With `pings`, the gateway detects a vanished peer within 30 s, not only at the next request. gRPC servers treat
/// pings as an attack: after three of them they close the connection with all its calls.
pub(super) async fn start_h2<T, B>(io: T, pings: bool) -> hyper::Result<http2::SendRequest<B>>
where
    T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BodyError>,
{
    let (catch, gathered) = (CapturingExecutor::default(), GatheredSocket::new(io));
    let (sender, connection) = http2::Builder::new(catch.clone())
        .timer(TokioTimer::new())
        .initial_stream_window_size(1024 * 1024)
        .initial_connection_window_size(4 * 1024 * 1024)
        .max_header_list_size(256 * 1024)
        .keep_alive_interval(pings.then_some(Duration::from_secs(20)))
        .keep_alive_timeout(Duration::from_secs(10))
        .keep_alive_while_idle(true)
        .handshake(TokioIo::new(gathered.clone()))
        .await?;
    let mut socket = catch.take_task();
    let mut dispatch = Some(Box::pin(connection));
    tokio::spawn(poll_fn(move |cx| {
        // Poll dispatch first, so that the socket flushes in the same turn what dispatch queues. Each is dropped
        // as soon as it is done, because the drop informs its other side.
        if dispatch.as_mut().is_some_and(|d| d.as_mut().poll(cx).is_ready()) {
            dispatch = None;
        }
        if socket.as_mut().is_some_and(|s| s.as_mut().poll(cx).is_ready()) {
            socket = None;
        }
        // All requests of this turn are one write.
        gathered.poll_send(cx);
        if dispatch.is_none() && socket.is_none() { Poll::Ready(()) } else { Poll::Pending }
    }));
    Ok(sender)
}

type ConnectionTask = Pin<Box<dyn Future<Output = ()> + Send>>;

/// An executor that captures the first future (hyper's socket task) and spawns the others (one per stream).
#[derive(Clone, Default)]
struct CapturingExecutor(Arc<(AtomicBool, Mutex<Option<ConnectionTask>>)>);

impl CapturingExecutor {
    fn take_task(&self) -> Option<ConnectionTask> {
        self.0.0.store(true, SeqCst);
        self.0.1.lock().take()
    }
}

impl<F> hyper::rt::Executor<F> for CapturingExecutor
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, future: F) {
        if self.0.0.swap(true, SeqCst) {
            tokio::spawn(future);
        } else {
            *self.0.1.lock() = Some(Box::pin(future));
        }
    }
}

/// Whether the upstream declared that it did not process this stream: by REFUSED_STREAM, or by a GOAWAY whose
/// last stream is below ours.
///
/// h2 returns the error of a received GOAWAY only for streams that the GOAWAY excludes and for requests that have not
/// begun. Streams that it includes fail with an I/O error when the connection ends. The tests pin this behaviour.
pub(super) fn is_unprocessed(error: &hyper::Error) -> bool {
    let Some(e) = error.source().and_then(|e| e.downcast_ref::<h2::Error>()) else { return false };
    e.is_remote() && (e.is_go_away() || e.reason() == Some(h2::Reason::REFUSED_STREAM))
}
