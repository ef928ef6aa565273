//! The body of a reply, which returns or closes the connection when it ends.
//!
//! Invariant: a body that ends without an error is complete. Only then does the connection return to the pool. An
//! error, or dropping the body early, closes it.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::BodyError;
use super::checkout::Checkout;
use super::error::{UpstreamError, error_chain};

/// The rest of a request's body, whose reply came early.
pub(super) type UnsentBody = Pin<Box<dyn Body<Data = Bytes, Error = BodyError> + Send>>;

pub struct UpstreamBody(BodySource);

enum BodySource {
    Ended,
    H1(Checkout, Option<UnsentBody>),
    H2(Incoming),
    Upgraded(Checkout),
}

impl UpstreamBody {
    /// Reads the body of the reply whose head was read from the connection.
    pub(super) fn h1(mut checkout: Checkout, unsent: Option<UnsentBody>) -> Self {
        if checkout.connection().is_reply_complete() {
            checkout.finish(unsent);
            return Self(BodySource::Ended);
        }
        Self(BodySource::H1(checkout, unsent))
    }

    pub(super) fn upgraded(checkout: Checkout) -> Self {
        Self(BodySource::Upgraded(checkout))
    }

    pub(super) fn h2(inner: Incoming) -> Self {
        Self(BodySource::H2(inner))
    }

    /// Returns the connection after a reply with status 101.
    pub fn into_upgraded(self) -> Option<UpgradedConnection> {
        match self.0 {
            BodySource::Upgraded(checkout) => Some(UpgradedConnection(checkout)),
            _ => None,
        }
    }

    fn end(&mut self) -> BodySource {
        std::mem::replace(&mut self.0, BodySource::Ended)
    }
}

impl std::fmt::Debug for UpstreamBody {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UpstreamBody").finish_non_exhaustive()
    }
}

impl Body for UpstreamBody {
    type Data = Bytes;
    type Error = UpstreamError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, UpstreamError>>> {
        let this = &mut *self;
        match &mut this.0 {
            BodySource::Ended | BodySource::Upgraded(_) => Poll::Ready(None),
            BodySource::H1(checkout, unsent) => {
                let failed = |reason| Some(Err(UpstreamError::Reply { reason }));
                if let Some(body) = unsent {
                    match checkout.connection().poll_send(cx, body) {
                        Poll::Ready(Ok(())) => *unsent = None,
                        Poll::Ready(Err(why)) => {
                            this.end();
                            return Poll::Ready(failed(why));
                        }
                        Poll::Pending => {}
                    }
                }
                let frame = match ready!(checkout.connection().poll_frame(cx)) {
                    Some(Err(why)) => {
                        this.end();
                        return Poll::Ready(failed(why));
                    }
                    frame => frame.and_then(Result::ok),
                };
                // A body of known length ends with its last frame; the reader may not poll again.
                if checkout.connection().is_reply_complete()
                    && let BodySource::H1(checkout, unsent) = this.end()
                {
                    checkout.finish(unsent);
                }
                Poll::Ready(frame.map(Ok))
            }
            BodySource::H2(inner) => Poll::Ready(match ready!(Pin::new(&mut *inner).poll_frame(cx)) {
                Some(Ok(frame)) => Some(Ok(frame)),
                Some(Err(e)) => Some(Err(UpstreamError::Reply { reason: error_chain(&e) })),
                // hyper ends an HTTP/2 body without an error on RST_STREAM(NO_ERROR) and GOAWAY(NO_ERROR). That is
                // right for a request body, but it hides an incomplete reply.
                None if !inner.is_end_stream() => {
                    this.end();
                    Some(Err(UpstreamError::Truncated))
                }
                None => None,
            }),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            BodySource::Ended | BodySource::Upgraded(_) => true,
            BodySource::H1(..) => false,
            BodySource::H2(inner) => inner.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            BodySource::Ended | BodySource::Upgraded(_) => SizeHint::with_exact(0),
            BodySource::H1(checkout, _) => checkout.size_hint(),
            BodySource::H2(inner) => inner.size_hint(),
        }
    }
}

/// An upstream connection that no longer speaks HTTP. It counts towards the limits until it is dropped.
pub struct UpgradedConnection(Checkout);

impl AsyncRead for UpgradedConnection {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.get_mut().0.connection().poll_read_raw(cx, buf)
    }
}

impl AsyncWrite for UpgradedConnection {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.get_mut().0.connection().stream().poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().0.connection().stream().poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().0.connection().stream().poll_shutdown(cx)
    }
}
