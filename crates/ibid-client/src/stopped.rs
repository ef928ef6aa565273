//! How a call ends: with an answer, or stopped for a reason.

use std::{error::Error, fmt, time::Duration};

use http::StatusCode;
use reqwest::Response;

use crate::{BadKey, JournalError, Key, judge::Problem};

/// The operation's own answer, whatever its status.
#[derive(Debug)]
pub struct Answer {
    /// As the server gave it. Read to its end already, up to `max_answer`.
    pub response: Response,
    /// Whether the operation had been carried out before, and this is what was answered then.
    pub replayed: bool,
    /// Whether the server said that it ran without protection: sending it again may run it again.
    pub degraded: bool,
    /// The key that it was sent with.
    pub key: Key,
    /// How many attempts it took.
    pub attempts: u32,
    /// Why the journal takes the operation for pending after a final answer, if it could not note the end.
    pub not_forgotten: Option<JournalError>,
}

/// Why there is no answer. The key of a named operation is kept, so sending it again is safe unless the reason says
/// otherwise.
#[derive(Debug)]
pub struct Stopped {
    /// Why.
    pub reason: Reason,
    /// How many attempts were made.
    pub attempts: u32,
    /// What the last attempt brought.
    pub last: Last,
    /// The key, if it came to that.
    pub key: Option<Key>,
    /// The operation under whose name the key is kept.
    pub kept_for: Option<String>,
}

/// Why a call was stopped.
#[derive(Debug)]
#[non_exhaustive]
pub enum Reason {
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
    RetryAfter {
        /// What it asks for.
        asked: Duration,
        /// What is allowed.
        allowed: Duration,
    },
    /// There is no time for another attempt.
    Deadline(Duration),
    /// It was begun so long ago that the server may have forgotten the key. Nothing was sent this time.
    KeyTooOld {
        /// When it was begun.
        age: Duration,
        /// How long the server remembers.
        lifetime: Duration,
    },
    /// The body is a stream, which can be sent once only. Nothing was sent.
    BodyNotReplayable,
    /// There is no key that could be sent. Nothing was sent.
    BadKey(BadKey),
    /// The journal failed. Nothing was sent.
    Journal(Box<JournalError>),
    /// The request cannot be sent at all.
    Unsendable,
}

/// What the last attempt brought.
#[derive(Debug)]
pub enum Last {
    /// There was none.
    Nothing,
    /// An answer.
    Answer {
        /// The answer, still readable.
        response: Box<Response>,
        /// What it says, if it is a problem of RFC 9457.
        problem: Option<Box<Problem>>,
    },
    /// No answer, or not the whole of it.
    Failed(Box<dyn Error + Send + Sync>),
}

impl Stopped {
    /// The status of the last answer, if there was one.
    pub fn status(&self) -> Option<StatusCode> {
        match &self.last {
            Last::Answer { response, .. } => Some(response.status()),
            _ => None,
        }
    }

    /// Whether sending the same operation again, later and with the same key, is what to do.
    pub fn may_be_sent_again(&self) -> bool {
        match self.reason {
            Reason::StillInProgress
            | Reason::Unavailable
            | Reason::ServerError
            | Reason::Network
            | Reason::RetryAfter { .. }
            | Reason::Deadline(_)
            | Reason::Journal(_) => true,
            Reason::OutcomeUnknown
            | Reason::KeyReused
            | Reason::Refused
            | Reason::KeyTooOld { .. }
            | Reason::BodyNotReplayable
            | Reason::BadKey(_)
            | Reason::Unsendable => false,
        }
    }
}

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.attempts {
            0 => write!(f, "nothing was sent: {}", self.reason)?,
            1 => write!(f, "stopped after one attempt: {}", self.reason)?,
            many => write!(f, "stopped after {many} attempts: {}", self.reason)?,
        }
        match &self.last {
            Last::Nothing => {}
            Last::Answer { response, problem: Some(problem) } => {
                let text = if problem.detail.is_empty() { &problem.title } else { &problem.detail };
                write!(f, ". The server said {}: {text}", response.status().as_u16())?;
            }
            Last::Answer { response, problem: None } => write!(f, ". The server said {}", response.status())?,
            Last::Failed(error) => write!(f, ". The last attempt failed: {}", Chain(error.as_ref()))?,
        }
        if let (Some(key), Some(name)) = (&self.key, &self.kept_for) {
            write!(f, ". The key {} is kept for {name:?}", key.masked())?;
        }
        Ok(())
    }
}

/// An error and what it comes from, in one line: the cause alone says what was refused or broke.
struct Chain<'a>(&'a (dyn Error + 'static));

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        std::iter::successors(self.0.source(), |&error| error.source()).try_for_each(|cause| write!(f, ": {cause}"))
    }
}

impl Error for Stopped {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match (&self.reason, &self.last) {
            (Reason::Journal(error), _) => Some(error.as_ref()),
            (Reason::BadKey(error), _) => Some(error),
            (_, Last::Failed(error)) => Some(error.as_ref()),
            _ => None,
        }
    }
}

impl fmt::Display for Reason {
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
            Self::RetryAfter { asked, allowed } => write!(
                f,
                "the server asks to wait for {asked:?}, and at most {allowed:?} is allowed here (max_retry_after). Send it \
                 again then, with the same key"
            ),
            Self::Deadline(deadline) => write!(
                f,
                "there is no time left for another attempt within {deadline:?}. Send it again with the same key"
            ),
            Self::KeyTooOld { age, lifetime } => write!(
                f,
                "the operation was begun {age:?} ago, and the server remembers keys for {lifetime:?} (lifetime): it might \
                 run a second time. Look up whether it happened, then forget its key in the journal"
            ),
            Self::BodyNotReplayable => f.write_str(
                "the body is a stream and can be sent only once; read it into bytes first, so that it can be sent again",
            ),
            Self::BadKey(error) => error.fmt(f),
            Self::Journal(error) => Chain(error.as_ref()).fmt(f),
            Self::Unsendable => f.write_str("the request cannot be sent as it is"),
        }
    }
}
