//! How a call ends: with an answer, or stopped for a reason.

use std::{error::Error, fmt, time::Duration};

use http::StatusCode;
use reqwest::Response;

use crate::{ClientKey, InvalidKey, JournalError, classify::ServerProblem};

/// The operation's own answer, whatever its status.
#[derive(Debug)]
pub struct SentResponse {
    /// As the server gave it. Read to its end already, up to `max_answer`.
    pub response: Response,
    /// Whether the operation had been carried out before, and this is what was answered then.
    pub replayed: bool,
    /// Whether the server said that it ran without protection: sending it again may run it again.
    pub degraded: bool,
    /// The key that it was sent with.
    pub key: ClientKey,
    /// How many attempts it took.
    pub attempts: u32,
    /// Why the journal takes the operation for pending after a final answer, if it could not note the end.
    pub journal_error: Option<JournalError>,
}

/// Why there is no answer. The key of a named operation is kept, so sending it again is safe unless the reason says
/// otherwise.
#[derive(Debug)]
pub struct SendError {
    /// Why.
    pub reason: SendErrorReason,
    /// How many attempts were made.
    pub attempts: u32,
    /// What the last attempt brought.
    pub last_attempt: LastAttempt,
    /// The key, if it came to that.
    pub key: Option<ClientKey>,
    /// The operation under whose name the key is kept.
    pub operation: Option<String>,
}

/// Why a call was stopped.
#[derive(Debug)]
#[non_exhaustive]
pub enum SendErrorReason {
    /// It was started once, and nobody knows how it ended. Never retried.
    OutcomeUnknown,
    /// The key belongs to another request.
    KeyReused,
    /// The server refuses the request as it is.
    Refused,
    /// After the last attempt the first one was still running.
    StillInProgress,
    /// After the last attempt the server still had no room, no store, or no app.
    Unavailable,
    /// After the last attempt it was still a 5xx.
    ServerError,
    /// The network failed on the last attempt too. Whether the request arrived is not known.
    Network,
    /// The server asks for more patience than is allowed.
    RetryAfterTooLong {
        /// What it asks for.
        asked: Duration,
        /// What is allowed.
        allowed: Duration,
    },
    /// There is no time for another attempt.
    DeadlineExceeded(Duration),
    /// It was begun so long ago that the server may have forgotten the key. Nothing was sent this time.
    KeyExpired {
        /// When it was begun.
        age: Duration,
        /// How long the server remembers.
        lifetime: Duration,
    },
    /// The body is a stream, which can be sent once only. Nothing was sent.
    BodyNotReplayable,
    /// There is no key that could be sent. Nothing was sent.
    BadKey(InvalidKey),
    /// The journal failed. Nothing was sent.
    Journal(Box<JournalError>),
    /// The request cannot be sent at all.
    InvalidRequest,
}

/// What the last attempt brought.
#[derive(Debug)]
pub enum LastAttempt {
    /// There was none.
    NotMade,
    /// An answer.
    Response {
        /// The answer, still readable.
        response: Box<Response>,
        /// What it says, if it is a problem of RFC 9457.
        problem: Option<Box<ServerProblem>>,
    },
    /// No answer, or not the whole of it.
    Failed(Box<dyn Error + Send + Sync>),
}

impl SendError {
    /// The status of the last answer, if there was one.
    pub fn status(&self) -> Option<StatusCode> {
        match &self.last_attempt {
            LastAttempt::Response { response, .. } => Some(response.status()),
            _ => None,
        }
    }

    /// Whether sending the same operation again, later and with the same key, is what to do.
    pub fn is_retryable(&self) -> bool {
        match self.reason {
            SendErrorReason::StillInProgress
            | SendErrorReason::Unavailable
            | SendErrorReason::ServerError
            | SendErrorReason::Network
            | SendErrorReason::RetryAfterTooLong { .. }
            | SendErrorReason::DeadlineExceeded(_)
            | SendErrorReason::Journal(_) => true,
            SendErrorReason::OutcomeUnknown
            | SendErrorReason::KeyReused
            | SendErrorReason::Refused
            | SendErrorReason::KeyExpired { .. }
            | SendErrorReason::BodyNotReplayable
            | SendErrorReason::BadKey(_)
            | SendErrorReason::InvalidRequest => false,
        }
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

/// An error and what it comes from, in one line: the cause alone says what was refused or broke.
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

impl fmt::Display for SendErrorReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutcomeUnknown => f.write_str(
                "it is not known whether the operation happened. Do not send it with a fresh key: look up whether it \
                 happened, or ask the operator to resolve it",
            ),
            Self::KeyReused => f.write_str(
                "the key was used for a different request. Send the first request unchanged, or give the new operation \
                 a name and a key of its own",
            ),
            Self::Refused => f.write_str("the server refuses the request as it is"),
            Self::StillInProgress => {
                f.write_str("the first request with this key is still running. Send it again later, with the same key")
            }
            Self::Unavailable => {
                f.write_str("the server could not take it at the moment. Send it again later, with the same key")
            }
            Self::ServerError => f.write_str("the server failed each time"),
            Self::Network => f.write_str(
                "no whole answer arrived. It may have happened all the same: send it again with the same key, never with \
                 a fresh one",
            ),
            Self::RetryAfterTooLong { asked, allowed } => write!(
                f,
                "the server asks to wait for {asked:?}, and at most {allowed:?} is allowed here (max_retry_after). Send it \
                 again then, with the same key"
            ),
            Self::DeadlineExceeded(deadline) => write!(
                f,
                "there is no time left for another attempt within {deadline:?}. Send it again with the same key"
            ),
            Self::KeyExpired { age, lifetime } => write!(
                f,
                "the operation was begun {age:?} ago, and the server remembers keys for {lifetime:?} (lifetime): it might \
                 run a second time. Look up whether it happened, then forget its key in the journal"
            ),
            Self::BodyNotReplayable => f.write_str(
                "the body is a stream and can be sent only once; read it into bytes first, so that it can be sent again",
            ),
            Self::BadKey(error) => error.fmt(f),
            Self::Journal(error) => ErrorChain(error.as_ref()).fmt(f),
            Self::InvalidRequest => f.write_str("the request cannot be sent as it is"),
        }
    }
}
