//! Errors of an upstream, and what they mean for the request.
//!
//! Invariant: only [`SendFailure`] decides between release and park. [`UpstreamError`] is for operators.

use std::error::Error as _;
use std::time::Duration;

/// An invalid configuration.
#[derive(Debug, Clone, thiserror::Error)]
pub enum SetupError {
    #[error("upstream {text:?}: {why}")]
    Target { text: String, why: String },
    #[error("no usable root certificates on this system: {why}")]
    Roots { why: String },
}

/// The cause of a failure, for operators.
#[derive(Debug, Clone, thiserror::Error)]
pub enum UpstreamError {
    #[error("resolve {host}: {reason}")]
    Resolve { host: String, reason: String },
    #[error("connect to {tried}")]
    Connect { tried: String },
    /// All connections that this request may use are in use.
    #[error("no connection was free within {after:?}")]
    PoolExhausted { after: Duration },
    #[error("connect to {target}: no connection within {after:?}")]
    ConnectTimeout { target: String, after: Duration },
    #[error("TLS with {target}: {reason}")]
    Tls { target: String, reason: String },
    /// Every connection that was tried had closed before anything was written to it.
    #[error("connection closed before the request was written: {reason}")]
    Closed { reason: String },
    #[error("refused unprocessed by the upstream: {reason}")]
    Refused { reason: String },
    #[error("no complete reply: {reason}")]
    Reply { reason: String },
    /// HTTP/2: the stream ended in the middle of the reply.
    #[error("no complete reply: the stream was ended early")]
    Truncated,
}

/// Appends the sources: hyper's errors name the cause only there.
pub(super) fn error_chain(e: &hyper::Error) -> String {
    let mut text = e.to_string();
    let mut next = e.source();
    while let Some(e) = next {
        text.push_str(": ");
        text.push_str(&e.to_string());
        next = e.source();
    }
    text
}

/// Why there is no reply, by its meaning for the request.
#[derive(Debug, Clone, thiserror::Error)]
pub enum SendFailure {
    /// The request was certainly not executed.
    #[error(transparent)]
    NeverWritten(UpstreamError),
    /// The request may have been executed.
    #[error(transparent)]
    MaybeWritten(UpstreamError),
}
