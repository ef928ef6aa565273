//! One call, from the key to its end.
//!
//! Keep the key, send, judge, wait, send again. Dropping the future at any point leaves the key in the journal, and so
//! costs nothing but the call.

use std::{error::Error, time::SystemTime};

use http::HeaderValue;
use reqwest::{Request, Response};
use tokio::time::{Duration, Instant, sleep_until, timeout_at};

use crate::{
    Answer, Key, Last, Mint, Operation, Options, Reason, Stopped,
    judge::{Seen, Verdict, Why, judge},
    whole::{Whole, read},
};

/// Sends a request once.
pub(crate) trait Once: Send {
    fn once(&mut self, request: Request) -> impl Future<Output = Result<Response, Failure>> + Send;
}

/// An attempt without an answer.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) error: Box<dyn Error + Send + Sync>,
    /// Whether it is the request's own fault, so that it would fail again.
    pub(crate) for_good: bool,
}

/// What the attempts so far have come to.
struct Course<'a> {
    options: &'a Options,
    key: Key,
    /// The name under which the key is kept.
    name: Option<&'a str>,
    /// Whether nobody can have sent anything with this key before this call.
    fresh: bool,
    attempts: u32,
    until: Option<Instant>,
}

/// What one attempt came to.
enum Step {
    Done(Result<Answer, Stopped>),
    Again { reason: Reason, after: Option<Duration>, last: Last },
}

pub(crate) async fn drive(
    request: Request, options: &Options, operation: &Operation, sender: &mut impl Once,
) -> Result<Answer, Stopped> {
    let until = options.deadline.and_then(|deadline| Instant::now().checked_add(deadline));
    if request.try_clone().is_none() {
        return Err(nothing_sent(Reason::BodyNotReplayable));
    }
    let mut course = begin(&request, options, operation, until).await?;
    let value = course.key.header();
    loop {
        let mut attempt = request.try_clone().expect("it could be cloned before");
        attempt.headers_mut().insert(options.header.clone(), value.clone());
        course.attempts += 1;
        let (reason, after, last) = match course.attempt(attempt, sender).await {
            Step::Done(end) => return end,
            Step::Again { reason, after, last } => (reason, after, last),
        };
        course.pause(reason, after, last).await?;
    }
}

/// Finds the key, and keeps it before anything is sent.
async fn begin<'a>(
    request: &Request, options: &'a Options, operation: &'a Operation, until: Option<Instant>,
) -> Result<Course<'a>, Stopped> {
    let bad = |why| nothing_sent(Reason::BadKey(why));
    let mint = operation.mint.as_ref().or(options.operation.mint.as_ref()).unwrap_or(&Mint::V4);
    let by_hand = |value: &HeaderValue| Key::from_header(value).map_err(bad);
    let given = request.headers().get(&options.header).map(by_hand).transpose()?;
    // A key that is the same each time needs no journal.
    let name = operation.name.as_deref().filter(|_| given.is_none() && !mint.repeats());
    let fresh = given.is_none() && !mint.repeats();
    let key = match given {
        Some(key) => key,
        None => mint.mint(SystemTime::now()).map_err(bad)?,
    };
    let mut course = Course { options, key, name, fresh, attempts: 0, until };
    if let Some(name) = name {
        course.keep(name).await?;
    }
    Ok(course)
}

impl Course<'_> {
    async fn keep(&mut self, name: &str) -> Result<(), Stopped> {
        let keeping = self.options.journal.keep(name, self.key.clone());
        let kept = match self.in_time(keeping).await {
            Some(kept) => kept.map_err(|error| nothing_sent(Reason::Journal(Box::new(error))))?,
            None => return Err(nothing_sent(Reason::Deadline(self.options.deadline.unwrap_or_default()))),
        };
        self.fresh = kept.key == self.key;
        self.key = kept.key;
        // A clock that was set back makes it young: then the server's own memory decides.
        let age = SystemTime::now().duration_since(kept.since).unwrap_or_default();
        // One that has ended is answered from the server's memory.
        if kept.until.is_none() && age > self.options.lifetime {
            return Err(self.stopped(Reason::KeyTooOld { age, lifetime: self.options.lifetime }, Last::Nothing));
        }
        Ok(())
    }

    async fn attempt(&self, request: Request, sender: &mut impl Once) -> Step {
        let limit = Instant::now().checked_add(self.options.attempt_timeout);
        let limit = limit.into_iter().chain(self.until).min();
        let whole = async {
            let response = sender.once(request).await?;
            read(response, self.options.max_answer).await
        };
        let ended = match limit {
            Some(limit) => timeout_at(limit, whole).await,
            None => Ok(whole.await),
        };
        match ended {
            Ok(Ok(whole)) => self.judged(whole).await,
            Ok(Err(Failure { error, for_good: true })) => {
                Step::Done(Err(self.stopped(Reason::Unsendable, Last::Failed(error))))
            }
            Ok(Err(failure)) => Step::Again { reason: Reason::Network, after: None, last: Last::Failed(failure.error) },
            Err(_) => {
                let error = match limit == self.until {
                    true => "no whole answer before the deadline".to_owned(),
                    false => format!("no whole answer within {:?}", self.options.attempt_timeout),
                };
                Step::Again { reason: Reason::Network, after: None, last: Last::Failed(error.into()) }
            }
        }
    }

    async fn judged(&self, whole: Whole) -> Step {
        let Whole { response, body } = whole;
        let seen = Seen { status: response.status(), headers: response.headers(), body: body.as_deref() };
        let (verdict, replayed, degraded) =
            (judge(&seen, self.options.retry_5xx, SystemTime::now()), seen.replayed(), seen.degraded());
        let problem = seen.problem().map(Box::new);
        let last = |response| Last::Answer { response: Box::new(response), problem };
        match verdict {
            Verdict::Answer { settled } => {
                let not_forgotten = match settled {
                    false => None,
                    // The app says no, and nothing has happened: the next try is another operation.
                    true if response.status().is_client_error() => self.forget().await,
                    true => self.finish().await,
                };
                let (key, attempts) = (self.key.clone(), self.attempts);
                Step::Done(Ok(Answer { response, replayed, degraded, key, attempts, not_forgotten }))
            }
            Verdict::Retry { why, after } => Step::Again { reason: why.into(), after, last: last(response) },
            Verdict::Refused(refusal) => {
                let mut stopped = self.stopped(refusal.into(), last(response));
                // Nothing has ever run under such a key, and nothing will: the next call had better take another.
                let never = refusal == Some(ibid::Reason::KeyInvalid) && self.fresh && self.attempts == 1;
                if never && self.forget().await.is_none() {
                    stopped.kept_for = None;
                }
                Step::Done(Err(stopped))
            }
        }
    }

    /// Waits for the next attempt, if there is one.
    async fn pause(&self, reason: Reason, after: Option<Duration>, last: Last) -> Result<(), Stopped> {
        let schedule = &self.options.schedule;
        let Some(wait) = schedule.wait(self.attempts) else {
            return Err(self.stopped(reason, last));
        };
        let allowed = self.options.max_retry_after;
        if let Some(asked) = after.filter(|asked| *asked > allowed) {
            return Err(self.stopped(Reason::RetryAfter { asked, allowed }, last));
        }
        // Not before the server asks for, nor before the schedule says.
        let wait = schedule.jittered(wait.max(after.unwrap_or_default()));
        let next = Instant::now() + wait;
        if self.until.is_some_and(|until| next >= until) {
            return Err(self.stopped(Reason::Deadline(self.options.deadline.unwrap_or_default()), last));
        }
        sleep_until(next).await;
        Ok(())
    }

    /// Frees the name. An answer is not withheld because the journal fails.
    async fn forget(&self) -> Option<crate::JournalError> {
        self.options.journal.forget(self.name?, Some(&self.key)).await.err()
    }

    /// Keeps the key for as long as the server remembers it: running the operation again gets the same answer.
    async fn finish(&self) -> Option<crate::JournalError> {
        const FOR_EVER: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
        let until = SystemTime::now() + self.options.lifetime.min(FOR_EVER);
        self.options.journal.finish(self.name?, &self.key, until).await.err()
    }

    async fn in_time<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        match self.until {
            Some(until) => timeout_at(until, work).await.ok(),
            None => Some(work.await),
        }
    }

    fn stopped(&self, reason: Reason, last: Last) -> Stopped {
        let (key, kept_for) = (Some(self.key.clone()), self.name.map(str::to_owned));
        Stopped { reason, attempts: self.attempts, last, key, kept_for }
    }
}

fn nothing_sent(reason: Reason) -> Stopped {
    Stopped { reason, attempts: 0, last: Last::Nothing, key: None, kept_for: None }
}

impl From<Why> for Reason {
    fn from(why: Why) -> Self {
        match why {
            Why::InProgress => Reason::StillInProgress,
            Why::Unavailable | Why::Upstream => Reason::Unavailable,
            Why::ServerError => Reason::ServerError,
        }
    }
}

impl From<Option<ibid::Reason>> for Reason {
    fn from(refusal: Option<ibid::Reason>) -> Self {
        match refusal {
            Some(ibid::Reason::OutcomeUnknown) => Reason::OutcomeUnknown,
            Some(ibid::Reason::KeyReused) => Reason::KeyReused,
            _ => Reason::Refused,
        }
    }
}
