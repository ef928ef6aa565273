//! The body of a reply, which returns or closes the connection when it ends.
//!
//! Invariant: a body that ends without an error is complete. Only then does the connection return to the pool. An
//! error, or dropping the body early, closes it.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;

use super::error::{UpstreamError, error_chain};
use super::h1_connection::ReturnConnection;
use super::pool::UnclaimedPermit;

pub struct UpstreamBody {
    inner: Incoming,
    /// HTTP/1.1: the connection to return. `None` after that, and for HTTP/2 and upgrades.
    connection: Option<Arc<dyn ReturnConnection>>,
    /// When the upstream will close the idle connection, minus a margin.
    reuse_until: Option<Instant>,
    /// Held until the connection is free again; for an upgraded connection, until this is dropped.
    unclaimed_permit: Option<UnclaimedPermit>,
    is_h2: bool,
}

impl UpstreamBody {
    pub(super) fn h1(
        inner: Incoming, (home, share): (Arc<dyn ReturnConnection>, Option<UnclaimedPermit>), limit: Option<Instant>,
    ) -> Self {
        let mut this =
            Self { inner, connection: Some(home), reuse_until: limit, unclaimed_permit: share, is_h2: false };
        if this.inner.is_end_stream() {
            this.return_connection();
        }
        this
    }

    pub(super) fn upgraded(inner: Incoming, unclaimed_permit: Option<UnclaimedPermit>) -> Self {
        Self { inner, connection: None, reuse_until: None, unclaimed_permit, is_h2: false }
    }

    pub(super) fn h2(inner: Incoming) -> Self {
        Self { inner, connection: None, reuse_until: None, unclaimed_permit: None, is_h2: true }
    }

    fn return_connection(&mut self) {
        if let Some(home) = self.connection.take() {
            home.return_after_reply(self.reuse_until, self.unclaimed_permit.take());
        }
    }

    fn close_connection(&mut self) {
        if let Some(home) = self.connection.take() {
            home.abort();
            self.unclaimed_permit = None;
        }
    }
}

impl Drop for UpstreamBody {
    fn drop(&mut self) {
        self.close_connection();
    }
}

impl std::fmt::Debug for UpstreamBody {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UpstreamBody").field("h2", &self.is_h2).finish_non_exhaustive()
    }
}

impl Body for UpstreamBody {
    type Data = Bytes;
    type Error = UpstreamError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, UpstreamError>>> {
        let frame = ready!(Pin::new(&mut self.inner).poll_frame(cx));
        Poll::Ready(match frame {
            Some(Ok(frame)) => {
                // A body of known length ends with its last frame; the reader may not poll again.
                if self.inner.is_end_stream() {
                    self.return_connection();
                }
                Some(Ok(frame))
            }
            Some(Err(e)) => {
                self.close_connection();
                Some(Err(UpstreamError::Reply { reason: error_chain(&e) }))
            }
            // hyper ends an HTTP/2 body without an error on RST_STREAM(NO_ERROR) and GOAWAY(NO_ERROR). That is
            // right for a request body, but it hides an incomplete reply.
            None if self.is_h2 && !self.inner.is_end_stream() => {
                self.is_h2 = false;
                Some(Err(UpstreamError::Truncated))
            }
            None => {
                self.return_connection();
                None
            }
        })
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// Returns the end of a connection's reuse by the upstream's `Keep-Alive: timeout=N`, minus one second.
///
/// Counts from the arrival of the head, because the upstream's clock may start before we have read the
/// body. A long reply merely costs its connection.
pub(super) fn keep_alive_deadline(headers: &HeaderMap) -> Option<Instant> {
    let value = headers.get("keep-alive")?.to_str().ok()?;
    let seconds = value.split(',').find_map(|part| {
        let (name, number) = part.split_once('=')?;
        let number = number.trim().trim_matches('"');
        name.trim().eq_ignore_ascii_case("timeout").then(|| number.parse::<u32>().ok()).flatten()
    })?;
    Some(Instant::now() + Duration::from_secs(u64::from(seconds.saturating_sub(1))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keep_alive_is_read_with_a_second_to_spare() {
        let left = |value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert("keep-alive", value.parse().unwrap());
            keep_alive_deadline(&headers).map(|t| t.saturating_duration_since(Instant::now()).as_secs_f64().round())
        };
        assert_eq!(left("timeout=5"), Some(4.0));
        assert_eq!(left("max=100, Timeout = 2"), Some(1.0));
        assert_eq!(left("timeout=1"), Some(0.0));
        assert_eq!(left("timeout=0"), Some(0.0));
        assert_eq!(left("max=3"), None);
        assert_eq!(left("timeout=soon"), None);
        assert!(keep_alive_deadline(&HeaderMap::new()).is_none());
    }
}
