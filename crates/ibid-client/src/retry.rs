//! Runs one call: store the key, send, classify the response, wait, send again.
//!
//! Dropping the future at any point leaves the key in the journal, so the next call continues with it.
//!
//! A response body is buffered before the response counts: if the connection breaks inside it, the next attempt with the
//! same key gets the whole response. Event streams and bodies above the limit are streamed to the caller.

use std::{error::Error, time::SystemTime};

use bytes::{Bytes, BytesMut};
use futures_util::{StreamExt as _, stream};
use http::{HeaderValue, header};
use http_body::Frame;
use http_body_util::{BodyExt as _, BodyStream, StreamBody};
use reqwest::{Body, Request, Response, ResponseBuilderExt as _};
use tokio::time::{Duration, Instant, sleep_until, timeout_at};

use crate::{
    ClientKey, KeyGenerator, LastAttempt, OperationSpec, SendError, SendErrorReason, SendOptions, SentResponse,
    classify::{ReceivedResponse, ResponseAction, RetryCause, classify_response},
};

pub(crate) trait Transport: Send {
    fn send_once(&mut self, request: Request) -> impl Future<Output = Result<Response, TransportError>> + Send;
}

/// An attempt that got no response.
#[derive(Debug)]
pub(crate) struct TransportError {
    pub(crate) error: Box<dyn Error + Send + Sync>,
    /// Whether the request itself is at fault, so that a retry would fail too.
    pub(crate) is_permanent: bool,
}

struct CallState<'a> {
    options: &'a SendOptions,
    key: ClientKey,
    /// The operation's name in the journal; `None` if the key is not stored there.
    name: Option<&'a str>,
    /// Whether no earlier call can have sent this key.
    key_is_new: bool,
    attempts: u32,
    deadline: Option<Instant>,
}

enum SendAttemptOutcome {
    Finished(Result<SentResponse, SendError>),
    Retry { reason: SendErrorReason, after: Option<Duration>, last: LastAttempt },
}

pub(crate) async fn send_with_retries(
    request: Request, options: &SendOptions, operation: &OperationSpec, sender: &mut impl Transport,
) -> Result<SentResponse, SendError> {
    let until = options.deadline.and_then(|deadline| Instant::now().checked_add(deadline));
    if request.try_clone().is_none() {
        return Err(error_before_send(SendErrorReason::BodyNotReplayable));
    }
    let mut course = prepare_key(&request, options, operation, until).await?;
    let value = course.key.header();
    loop {
        let mut attempt = request.try_clone().expect("it could be cloned before");
        attempt.headers_mut().insert(options.header.clone(), value.clone());
        course.attempts += 1;
        match course.attempt(attempt, sender).await {
            SendAttemptOutcome::Finished(end) => return end,
            SendAttemptOutcome::Retry { reason, after, last } => course.wait_before_retry(reason, after, last).await?,
        }
    }
}

/// Chooses the key, and stores it before anything is sent.
async fn prepare_key<'a>(
    request: &Request, options: &'a SendOptions, operation: &'a OperationSpec, until: Option<Instant>,
) -> Result<CallState<'a>, SendError> {
    let bad = |why| error_before_send(SendErrorReason::BadKey(why));
    let mint =
        operation.key_generator.as_ref().or(options.operation.key_generator.as_ref()).unwrap_or(&KeyGenerator::UuidV4);
    let by_hand = |value: &HeaderValue| ClientKey::from_header(value).map_err(bad);
    let given = request.headers().get(&options.header).map(by_hand).transpose()?;
    // A deterministic key needs no journal.
    let name = operation.name.as_deref().filter(|_| given.is_none() && !mint.is_deterministic());
    let fresh = given.is_none() && !mint.is_deterministic();
    let key = match given {
        Some(key) => key,
        None => mint.generate(SystemTime::now()).map_err(bad)?,
    };
    let mut course = CallState { options, key, name, key_is_new: fresh, attempts: 0, deadline: until };
    if let Some(name) = name {
        course.store_key(name).await?;
    }
    Ok(course)
}

impl CallState<'_> {
    async fn store_key(&mut self, name: &str) -> Result<(), SendError> {
        let storing = self.options.journal.load_or_store(name, self.key.clone());
        let stored = match self.deadline {
            Some(until) => timeout_at(until, storing).await,
            None => Ok(storing.await),
        };
        let stored = stored.map_err(|_| error_before_send(self.deadline_exceeded()))?;
        let kept = stored.map_err(|error| error_before_send(SendErrorReason::Journal(Box::new(error))))?;
        self.key_is_new = kept.key == self.key;
        self.key = kept.key;
        // If the clock was set back, the key counts as new, and the server decides whether it remembers it.
        let age = SystemTime::now().duration_since(kept.created_at).unwrap_or_default();
        // A finished operation is not checked: the server replays it.
        if kept.expires_at.is_none() && age > self.options.server_ttl {
            let reason = SendErrorReason::KeyExpired { age, lifetime: self.options.server_ttl };
            return Err(self.send_error(reason, LastAttempt::NotMade));
        }
        Ok(())
    }

    async fn attempt(&self, request: Request, sender: &mut impl Transport) -> SendAttemptOutcome {
        let limit = Instant::now().checked_add(self.options.attempt_timeout);
        let limit = limit.into_iter().chain(self.deadline).min();
        let whole = async {
            let response = sender.send_once(request).await?;
            buffer_response(response, self.options.max_response).await
        };
        let ended = match limit {
            Some(limit) => timeout_at(limit, whole).await,
            None => Ok(whole.await),
        };
        match ended {
            Ok(Ok((response, body))) => self.handle_response(response, body).await,
            Ok(Err(TransportError { error, is_permanent: true })) => SendAttemptOutcome::Finished(Err(
                self.send_error(SendErrorReason::InvalidRequest, LastAttempt::Failed(error))
            )),
            Ok(Err(failure)) => network_failure(failure.error),
            Err(_) if limit == self.deadline => network_failure("no whole answer before the deadline".into()),
            Err(_) => network_failure(format!("no whole answer within {:?}", self.options.attempt_timeout).into()),
        }
    }

    async fn handle_response(&self, response: Response, body: Option<Bytes>) -> SendAttemptOutcome {
        let seen = ReceivedResponse { status: response.status(), headers: response.headers(), body: body.as_deref() };
        let verdict = classify_response(&seen, self.options.retry_5xx, SystemTime::now());
        let (replayed, degraded) = (seen.is_replayed(), seen.is_degraded());
        let problem = seen.problem().map(Box::new);
        let last = |response| LastAttempt::Response { response: Box::new(response), problem };
        match verdict {
            ResponseAction::Answer { settled } => {
                let journal_error = match settled {
                    false => None,
                    // The app refused and nothing happened, so the next call is a new operation.
                    true if response.status().is_client_error() => self.forget().await,
                    true => self.finish().await,
                };
                let (key, attempts) = (self.key.clone(), self.attempts);
                let sent = SentResponse { response, replayed, degraded, key, attempts, journal_error };
                SendAttemptOutcome::Finished(Ok(sent))
            }
            ResponseAction::Retry { why, after } => {
                SendAttemptOutcome::Retry { reason: why.into(), after, last: last(response) }
            }
            ResponseAction::Refused(refusal) => {
                let mut stopped = self.send_error(refusal.into(), last(response));
                // The server never accepts this key, so nothing can run under it: the next call takes a new one.
                let never = refusal == Some(ibid::RefusalReason::KeyInvalid) && self.key_is_new && self.attempts == 1;
                if never && self.forget().await.is_none() {
                    stopped.operation = None;
                }
                SendAttemptOutcome::Finished(Err(stopped))
            }
        }
    }

    /// Waits for the next attempt, or fails with `reason` if there is none.
    async fn wait_before_retry(
        &self, reason: SendErrorReason, after: Option<Duration>, last: LastAttempt,
    ) -> Result<(), SendError> {
        let schedule = &self.options.schedule;
        let Some(wait) = schedule.wait(self.attempts) else {
            return Err(self.send_error(reason, last));
        };
        let allowed = self.options.max_retry_after;
        if let Some(asked) = after.filter(|asked| *asked > allowed) {
            return Err(self.send_error(SendErrorReason::RetryAfterTooLong { asked, allowed }, last));
        }
        // Waits for the longer of `Retry-After` and the schedule.
        let wait = schedule.with_jitter(wait.max(after.unwrap_or_default()));
        let next = Instant::now() + wait;
        if self.deadline.is_some_and(|until| next >= until) {
            return Err(self.send_error(self.deadline_exceeded(), last));
        }
        sleep_until(next).await;
        Ok(())
    }

    /// Frees the name. A journal error does not withhold the response.
    async fn forget(&self) -> Option<crate::JournalError> {
        self.options.journal.forget(self.name?, Some(&self.key)).await.err()
    }

    /// Keeps the key for as long as the server remembers it, so that a repeated operation is replayed.
    async fn finish(&self) -> Option<crate::JournalError> {
        const MAX_KEY_TTL: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
        let until = SystemTime::now() + self.options.server_ttl.min(MAX_KEY_TTL);
        self.options.journal.finish(self.name?, &self.key, until).await.err()
    }

    fn deadline_exceeded(&self) -> SendErrorReason {
        SendErrorReason::DeadlineExceeded(self.options.deadline.unwrap_or_default())
    }

    fn send_error(&self, reason: SendErrorReason, last: LastAttempt) -> SendError {
        let (key, operation) = (Some(self.key.clone()), self.name.map(str::to_owned));
        SendError { reason, attempts: self.attempts, last_attempt: last, key, operation }
    }
}

fn network_failure(error: Box<dyn Error + Send + Sync>) -> SendAttemptOutcome {
    SendAttemptOutcome::Retry { reason: SendErrorReason::Network, after: None, last: LastAttempt::Failed(error) }
}

fn error_before_send(reason: SendErrorReason) -> SendError {
    SendError { reason, attempts: 0, last_attempt: LastAttempt::NotMade, key: None, operation: None }
}

impl From<RetryCause> for SendErrorReason {
    fn from(why: RetryCause) -> Self {
        match why {
            RetryCause::InProgress => SendErrorReason::StillInProgress,
            RetryCause::Unavailable | RetryCause::Upstream => SendErrorReason::Unavailable,
            RetryCause::ServerError => SendErrorReason::ServerError,
        }
    }
}

impl From<Option<ibid::RefusalReason>> for SendErrorReason {
    fn from(refusal: Option<ibid::RefusalReason>) -> Self {
        match refusal {
            Some(ibid::RefusalReason::OutcomeUnknown) => SendErrorReason::OutcomeUnknown,
            Some(ibid::RefusalReason::KeyReused) => SendErrorReason::KeyReused,
            _ => SendErrorReason::Refused,
        }
    }
}

/// Returns the response, whose body can still be read from the start, and the whole body; `None` if it is streamed.
async fn buffer_response(response: Response, max: usize) -> Result<(Response, Option<Bytes>), TransportError> {
    let kind = response.headers().get(header::CONTENT_TYPE).map(|value| value.as_bytes().to_ascii_lowercase());
    let streams = kind.is_some_and(|kind| kind.starts_with(b"text/event-stream"));
    let large = response.content_length().is_some_and(|length| length > max as u64);
    if streams || large {
        return Ok((response, None));
    }
    let url = response.url().clone();
    let (mut parts, mut rest) = http::Response::<Body>::from(response).into_parts();
    // The conversion to `http::Response` drops the URL.
    let (addressed, ()) = http::Response::builder().url(url).body(()).expect("nothing but a URL").into_parts();
    parts.extensions.extend(addressed.extensions);
    let mut read = BytesMut::new();
    while let Some(frame) = rest.frame().await {
        let frame = frame.map_err(|error| TransportError { error: error.into(), is_permanent: false })?;
        let Ok(data) = frame.into_data() else { continue };
        read.extend_from_slice(&data);
        if read.len() > max {
            let body = stream::iter([Ok(Frame::data(read.freeze()))]).chain(BodyStream::new(rest));
            let body = Body::wrap(StreamBody::new(body));
            return Ok((http::Response::from_parts(parts, body).into(), None));
        }
    }
    let body = read.freeze();
    Ok((http::Response::from_parts(parts, Body::from(body.clone())).into(), Some(body)))
}
