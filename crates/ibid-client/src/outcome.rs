//! The two results of a call: a response, or an error with its reason.

use std::{error::Error, fmt, time::Duration};

use http::StatusCode;
use reqwest::Response;

use crate::{ClientKey, InvalidKey, JournalError, classify::ServerProblem};

/// The operation's own response, whatever its status.
#[derive(Debug)]
pub struct SentResponse {
    /// The response. Up to `max_response` bytes of the body are already buffered.
    pub response: Response,
    /// Whether this is the stored response of an earlier run.
    pub replayed: bool,
    /// Whether the server ran the operation without protection: sending it again may run it again.
    pub degraded: bool,
    /// The key that was sent.
    pub key: ClientKey,
    /// Number of attempts, at least 1.
    pub attempts: u32,
    /// Why the journal could not record the final response. It still lists the operation as pending.
    pub journal_error: Option<JournalError>,
}

/// The error of a call without the operation's response. The journal keeps the key of a named operation, so sending it
/// again is safe unless the reason says otherwise.
#[derive(Debug)]
pub struct SendError {
    /// Why the call gave up.
    pub reason: SendErrorReason,
    /// Number of attempts; 0 if nothing was sent.
    pub attempts: u32,
    /// The result of the last attempt.
    pub last_attempt: LastAttempt,
    /// The key; `None` if the call failed before it had one.
    pub key: Option<ClientKey>,
    /// The name under which the journal keeps the key, if it does.
    pub operation: Option<String>,
}

/// Why a call gave up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SendErrorReason {
    /// The operation started once, and its outcome is unknown. Never retried.
    #[error(
        "it is not known whether the operation happened. Do not send it with a fresh key: look up whether it happened, or \
         ask the operator to resolve it"
    )]
    OutcomeUnknown,
    /// The key was first used for a different request.
    #[error(
        "the key was used for a different request. Send the first request unchanged, or give the new operation a name and \
         a key of its own"
    )]
    KeyReused,
    /// The server refuses the request; a retry would not change that.
    #[error("the server refuses the request as it is")]
    Refused,
    /// The first attempt was still in progress after the last retry.
    #[error("the first request with this key is still running. Send it again later, with the same key")]
    StillInProgress,
    /// After the last attempt the server was still overloaded, or could not reach its store or the app.
    #[error("the server could not take it at the moment. Send it again later, with the same key")]
    Unavailable,
    /// The last attempt still got a 5xx.
    #[error("the server failed each time")]
    ServerError,
    /// The last attempt failed on the network. The request may have arrived.
    #[error(
        "no whole answer arrived. It may have happened all the same: send it again with the same key, never with a fresh one"
    )]
    Network,
    /// `Retry-After` exceeds the configured maximum.
    #[error(
        "the server asks to wait for {asked:?}, and at most {allowed:?} is allowed here (max_retry_after). Send it again \
         then, with the same key"
    )]
    RetryAfterTooLong {
        /// The value of `Retry-After`.
        asked: Duration,
        /// The configured maximum, [`SendOptions::max_retry_after`](crate::SendOptions::max_retry_after).
        allowed: Duration,
    },
    /// The deadline, given here, leaves no time for another attempt.
    #[error("there is no time left for another attempt within {0:?}. Send it again with the same key")]
    DeadlineExceeded(Duration),
    /// The key is so old that the server may have forgotten it. Nothing was sent.
    #[error(
        "the operation was begun {age:?} ago, and the server remembers keys for {lifetime:?} (lifetime): it might run a \
         second time. Look up whether it happened, then forget its key in the journal"
    )]
    KeyExpired {
        /// Age of the key.
        age: Duration,
        /// How long the server remembers keys, [`SendOptions::server_ttl`](crate::SendOptions::server_ttl).
        lifetime: Duration,
    },
    /// The body is a stream and cannot be sent twice. Nothing was sent.
    #[error("the body is a stream and can be sent only once; read it into bytes first, so that it can be sent again")]
    BodyNotReplayable,
    /// The key is invalid. Nothing was sent.
    #[error("{0}")]
    BadKey(InvalidKey),
    /// The journal failed. Nothing was sent.
    #[error("{}", ErrorChain(.0.as_ref()))]
    Journal(Box<JournalError>),
    /// The request is invalid, redirects too often, or another layer rejected it: a retry would fail too.
    #[error("the request cannot be sent as it is")]
    InvalidRequest,
}

/// The result of the last attempt.
#[derive(Debug)]
pub enum LastAttempt {
    /// No attempt was made.
    NotMade,
    /// The server responded.
    Response {
        /// The response, with its body still readable.
        response: Box<Response>,
        /// The problem document in the body, if there is one.
        problem: Option<Box<ServerProblem>>,
    },
    /// No response arrived, or only a part of it.
    Failed(Box<dyn Error + Send + Sync>),
}

impl SendError {
    /// The status of the last response, if there was one.
    pub fn status(&self) -> Option<StatusCode> {
        match &self.last_attempt {
            LastAttempt::Response { response, .. } => Some(response.status()),
            _ => None,
        }
    }

    /// Whether to send the same operation again later, with the same key.
    pub fn is_retryable(&self) -> bool {
        matches!(
            self.reason,
            SendErrorReason::StillInProgress
                | SendErrorReason::Unavailable
                | SendErrorReason::ServerError
                | SendErrorReason::Network
                | SendErrorReason::RetryAfterTooLong { .. }
                | SendErrorReason::DeadlineExceeded(_)
                | SendErrorReason::Journal(_)
        )
    }
}

impl fmt::Display for SendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.attempts {
            0 => write!(f, "nothing was sent: {}", self.reason)?,
            1 => write!(f, "stopped after one attempt: {}", self.reason)?,
            many => write!(f, "stopped after {many} attempts: {}", self.reason)?,
        }
        match &self.last_attempt {
            LastAttempt::NotMade => {}
            LastAttempt::Response { response, problem: Some(problem) } => {
                let text = if problem.detail.is_empty() { &problem.title } else { &problem.detail };
                write!(f, ". The server said {}: {text}", response.status().as_u16())?;
            }
            LastAttempt::Response { response, problem: None } => write!(f, ". The server said {}", response.status())?,
            LastAttempt::Failed(error) => write!(f, ". The last attempt failed: {}", ErrorChain(error.as_ref()))?,
        }
        if let (Some(key), Some(name)) = (&self.key, &self.operation) {
            write!(f, ". The key {} is kept for {name:?}", key.masked())?;
        }
        Ok(())
    }
}

/// Displays an error and its sources in one line, because reqwest names the cause only in the sources.
struct ErrorChain<'a>(&'a (dyn Error + 'static));

impl fmt::Display for ErrorChain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        std::iter::successors(self.0.source(), |&error| error.source()).try_for_each(|cause| write!(f, ": {cause}"))
    }
}

impl Error for SendError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match (&self.reason, &self.last_attempt) {
            (SendErrorReason::Journal(error), _) => Some(error.as_ref()),
            (SendErrorReason::BadKey(error), _) => Some(error),
            (_, LastAttempt::Failed(error)) => Some(error.as_ref()),
            _ => None,
        }
    }
}
