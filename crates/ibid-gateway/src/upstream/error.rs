//! What can go wrong with an upstream, in words for operators, and what it means for the request.
//!
//! Invariant: [`SendFailure`] alone decides between release and park; [`Error`] only explains.

use std::error::Error as _;
use std::time::Duration;

/// A wrong configuration.
#[derive(Debug, Clone, thiserror::Error)]
pub enum SetupError {
    /// The address makes no sense.
    #[error("upstream {text:?}: {why}")]
    Target {
        /// As configured.
        text: String,
        /// What is wrong.
        why: String,
    },
    /// No certificate authority to trust.
    #[error("no usable root certificates on this system: {why}")]
    Roots {
        /// The first problem.
        why: String,
    },
}

/// What went wrong, in words for operators.
#[derive(Debug, Clone, thiserror::Error)]
pub enum UpstreamError {
    /// The name has no address.
    #[error("resolve {host}: {reason}")]
    Resolve {
        /// The name.
        host: String,
        /// The resolver's words.
        reason: String,
    },
    /// No address answered.
    #[error("connect to {tried}")]
    Connect {
        /// Each address and what it said.
        tried: String,
    },
    /// Every connection that this request may use is in use.
    #[error("no connection was free within {after:?}")]
    PoolExhausted {
        /// The limit.
        after: Duration,
    },
    /// TLS took too long.
    #[error("connect to {target}: no connection within {after:?}")]
    ConnectTimeout {
        /// Host and port.
        target: String,
        /// The limit.
        after: Duration,
    },
    /// The TLS handshake failed.
    #[error("TLS with {target}: {reason}")]
    Tls {
        /// Host and port.
        target: String,
        /// Why.
        reason: String,
    },
    /// Every connection tried was found closed before anything was written to it.
    #[error("connection closed before the request was written: {reason}")]
    Closed {
        /// The last one's error.
        reason: String,
    },
    /// HTTP/2: refused by the upstream, unprocessed.
    #[error("refused unprocessed by the upstream: {reason}")]
    Refused {
        /// The frame's words.
        reason: String,
    },
    /// No complete reply came.
    #[error("no complete reply: {reason}")]
    Reply {
        /// Why.
        reason: String,
    },
    /// HTTP/2: the stream was ended in the middle of the reply.
    #[error("no complete reply: the stream was ended early")]
    Truncated,
}

impl UpstreamError {
    pub(super) fn from_reply_error(e: &hyper::Error) -> Self {
        Self::Reply { reason: error_chain(e) }
    }
}

/// hyper's errors leave the cause to their source.
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

/// Why there is no reply, by what it means for the request.
#[derive(Debug, Clone, thiserror::Error)]
pub enum SendFailure {
    /// It certainly did not happen.
    #[error(transparent)]
    NeverWritten(UpstreamError),
    /// It may have happened.
    #[error(transparent)]
    MaybeWritten(UpstreamError),
}
