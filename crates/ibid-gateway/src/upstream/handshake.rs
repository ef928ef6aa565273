//! Putting a new connection under hyper: limits, drivers, and what HTTP/2 errors prove.
//!
//! Invariant: an HTTP/2 connection's dispatch and its socket run in one task. hyper spawns them as two;
//! then a GOAWAY could be read between "stream queued" and hyper's next look at the connection, and a
//! stream that it does *not* exclude would fail with the very error that says "excluded", while its
//! HEADERS go out. In one task the two cannot interleave.

use std::error::Error as _;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use http_body::Body;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::AbortHandle;

use super::BodyError;
use super::socket::{ReplyDetector, WriteProof};

/// hyper's default is 100, and one more makes an executed request's answer unreadable. hyper allocates
/// 64 bytes for each of these per reply, so not a million either.
const MAX_REPLY_HEADERS: usize = 512;
/// Bounds the head of an HTTP/1.1 reply, and how far read and write buffers may grow.
const MAX_BUFFER_BYTES: usize = 512 * 1024;

/// Runs an HTTP/1.1 connection in a task of its own.
pub(super) async fn start_h1<T, B>(io: T, proof: Arc<WriteProof>) -> hyper::Result<(http1::SendRequest<B>, AbortHandle)>
where
    T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BodyError>,
{
    let io = ReplyDetector::new(io, proof);
    let (sender, connection) = http1::Builder::new()
        .max_headers(MAX_REPLY_HEADERS)
        .max_buf_size(MAX_BUFFER_BYTES)
        .handshake(TokioIo::new(io))
        .await?;
    // Its error, if any, has been given to the request it befell; an idle connection's concerns nobody.
    let driver = tokio::spawn(async move { drop(connection.with_upgrades().await) });
    Ok((sender, driver.abort_handle()))
}

/// Runs an HTTP/2 connection in a task of its own.
///
/// With `pings`, a peer that vanished without a word is found out in 30 s rather than at the next request. gRPC servers
/// take them for an attack: after three of them they close the connection, whatever runs on it.
pub(super) async fn start_h2<T, B>(io: T, pings: bool) -> hyper::Result<http2::SendRequest<B>>
where
    T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BodyError>,
{
    let catch = CapturingExecutor::default();
    let (sender, connection) = http2::Builder::new(catch.clone())
        .timer(TokioTimer::new())
        .initial_stream_window_size(1024 * 1024)
        .initial_connection_window_size(4 * 1024 * 1024)
        .max_header_list_size(256 * 1024)
        .keep_alive_interval(pings.then_some(Duration::from_secs(20)))
        .keep_alive_timeout(Duration::from_secs(10))
        .keep_alive_while_idle(true)
        .handshake(TokioIo::new(io))
        .await?;
    let mut socket = catch.take_task();
    let mut dispatch = Some(Box::pin(connection));
    tokio::spawn(poll_fn(move |cx| {
        // Dispatch first, so that the socket flushes what it queues in the same turn. Both are dropped as
        // soon as they are done: the other side of each learns of the end by the drop.
        if dispatch.as_mut().is_some_and(|d| d.as_mut().poll(cx).is_ready()) {
            dispatch = None;
        }
        if socket.as_mut().is_some_and(|s| s.as_mut().poll(cx).is_ready()) {
            socket = None;
        }
        if dispatch.is_none() && socket.is_none() { Poll::Ready(()) } else { Poll::Pending }
    }));
    Ok(sender)
}

type ConnectionTask = Pin<Box<dyn Future<Output = ()> + Send>>;

/// An executor that keeps the first future (hyper's socket task) and spawns the rest (one per stream).
#[derive(Clone, Default)]
struct CapturingExecutor(Arc<Mutex<CapturedTask>>);

#[derive(Default)]
enum CapturedTask {
    #[default]
    Empty,
    Task(ConnectionTask),
    Taken,
}

impl CapturingExecutor {
    fn take_task(&self) -> Option<ConnectionTask> {
        match std::mem::replace(&mut *self.0.lock(), CapturedTask::Taken) {
            CapturedTask::Task(task) => Some(task),
            _ => None,
        }
    }
}

impl<F> hyper::rt::Executor<F> for CapturingExecutor
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, future: F) {
        let mut caught = self.0.lock();
        if matches!(*caught, CapturedTask::Empty) {
            *caught = CapturedTask::Task(Box::pin(future));
        } else {
            drop(caught);
            tokio::spawn(future);
        }
    }
}

/// Whether the upstream itself said that it did not process this stream: REFUSED_STREAM, or a GOAWAY whose
/// last stream is below ours.
///
/// h2 gives the error of a received GOAWAY to a stream only if that GOAWAY excludes it, and to requests not
/// yet begun; streams it includes fail with an I/O error when the connection ends. The tests pin that.
pub(super) fn is_unprocessed(error: &hyper::Error) -> bool {
    let Some(e) = error.source().and_then(|e| e.downcast_ref::<h2::Error>()) else { return false };
    e.is_remote() && (e.is_go_away() || e.reason() == Some(h2::Reason::REFUSED_STREAM))
}
