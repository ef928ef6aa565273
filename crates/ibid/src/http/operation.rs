//! One HTTP request as the engine's operation: calls the inner service, reads its reply, says how it ended.

use std::{
    future::{Future, poll_fn},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    sync::Arc,
    task::Poll,
    time::Duration,
};

use bytes::{Buf, Bytes};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, Uri, header, request::Parts};
use http_body::Body;
use tokio::time::{Instant, timeout, timeout_at};
use tower_service::Service;

use super::{
    Fate, Grant, Protocol, Route, Shared, Unsent,
    anonymous::AnonymousCaller,
    answer::{self, Telling},
    body::{BoxError, RequestBody, ResponseBody},
    budget::Reserved,
    claimed::Claimed,
    future::Side,
    reply::{self, Meaning, Read, Stream, Tail},
    request::{self, name_request},
    service::{Seen, refused},
};
use crate::{
    engine::{Ended, Operation, Otherwise, ParkedBy, Probed},
    grpc,
    record::RecordBody,
    refusal::{Reason, Refusal},
    store::{Fingerprint, Lease},
};

const ATTEMPT: HeaderName = HeaderName::from_static("ibid-attempt");
const FENCE: HeaderName = HeaderName::from_static("ibid-fence");

/// What the client gets of a run.
pub(super) enum Answer<B> {
    /// All of it, undecorated; with the bytes again for the envelope.
    Whole(Response<ResponseBody<B>>, Bytes),
    /// Its end: the rest is on the way already.
    Tail(Tail),
    /// A refusal after the fact.
    Refused(Refusal),
    /// The handler panicked.
    Panicked,
}

impl<B> Answer<B> {
    /// Gives a whole answer its head.
    fn under(mut self, head: http::response::Parts) -> Self {
        if let Self::Whole(answer, _) = &mut self {
            *answer.status_mut() = head.status;
            *answer.version_mut() = head.version;
            *answer.headers_mut() = head.headers;
        }
        self
    }
}

pub(super) struct HttpOperation<'a, S, B, RB> {
    pub(super) shared: &'a Shared,
    pub(super) seen: &'a Seen,
    pub(super) inner: S,
    /// Taken by the run.
    pub(super) request: Option<(Parts, Bytes, Option<HeaderMap>)>,
    pub(super) key: String,
    pub(super) route: Arc<Route>,
    pub(super) side: Arc<Side<RB>>,
    pub(super) telling: Telling,
    pub(super) buffers: Reserved,
    /// Until when the client waits, if it says so.
    pub(super) deadline: Option<Instant>,
    /// The caller, if it is anonymous.
    pub(super) anonymous: Option<Arc<AnonymousCaller>>,
    pub(super) _body: std::marker::PhantomData<fn(B)>,
}

impl<S, B, RB> Operation for HttpOperation<'_, S, B, RB>
where
    S: Service<Request<RequestBody<B>>, Response = Response<RB>, Future: Send> + Clone + Send,
    S::Error: Into<BoxError> + Send,
    B: Body<Data: Buf + Send, Error: Into<BoxError>> + Send,
    RB: Body<Data: Buf + Send, Error: Into<BoxError>> + Send + 'static,
{
    type Answer = Answer<RB>;

    async fn run(&mut self, lease: Option<&Lease>) -> Ended<Answer<RB>> {
        let started = Instant::now();
        let mut request = self.prepare(lease);
        let claimed = request.extensions().get::<Claimed>().cloned();
        let unsent = Unsent::default();
        request.extensions_mut().insert(unsent.clone());
        let ended = match self.call(request, lease, &unsent, started).await {
            Ok((response, deadline)) => self.ended(response, started, deadline).await,
            Err(ended) => ended,
        };
        self.seen.ran.set(started.elapsed(), lease.map(|lease| lease.attempt));
        let ended = match claimed {
            Some(claimed) => entrusted(&claimed, ended),
            None => ended,
        };
        let Ended::Complete(answer, complete) = ended else { return ended };
        if let Some(anonymous) = &self.anonymous {
            anonymous.mark_recorded();
        }
        Ended::Complete(answer, self.telling.compressed(complete))
    }

    fn patience(&self) -> Duration {
        self.deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()))
    }

    fn fingerprint(&self, version: u8) -> Option<Fingerprint> {
        let (parts, body, trailers) = self.request.as_ref()?;
        let made = request::fingerprint(version, &self.route, parts, (body, trailers.as_ref())).ok()??;
        Some(made.0)
    }

    async fn probe(&mut self) -> Probed {
        let started = Instant::now();
        let Some(request) = self.probe_request() else { return Probed::Unclear };
        let policy = &self.route.policy;
        let mut inner = self.inner.clone();
        let asked = timeout(policy.timeout, async move {
            poll_fn(|cx| inner.poll_ready(cx)).await.ok()?;
            let response = catching(async move { inner.call(request).await }).await?.ok()?;
            if response.extensions().get::<Fate>().is_some() {
                return None;
            }
            let (parts, body) = response.into_parts();
            let read = reply::read(&mut Box::pin(body), policy.max_response, false).await.ok()?;
            Some((parts, read))
        });
        match asked.await {
            Ok(Some((parts, Read::Whole(body, trailers)))) if parts.status.is_success() => {
                let body = RecordBody::Whole(body);
                let requested = self.telling.requested_at_ms;
                let trailers = trailers.as_ref();
                let complete = reply::complete(policy, &parts, body, trailers, Vec::new(), requested, started);
                Probed::Happened(self.telling.compressed(complete))
            }
            Ok(Some((parts, _))) if parts.status == StatusCode::NOT_FOUND => Probed::DidNotHappen,
            _ => Probed::Unclear,
        }
    }
}

impl<S, B, RB> HttpOperation<'_, S, B, RB>
where
    S: Service<Request<RequestBody<B>>, Response = Response<RB>, Future: Send>,
    S::Error: Into<BoxError>,
{
    /// The head of the app's reply, and until when its body must have come. `Err` says how the run ended without one.
    async fn call(
        &mut self, request: Request<RequestBody<B>>, lease: Option<&Lease>, unsent: &Unsent, started: Instant,
    ) -> Result<(Response<RB>, Instant), Ended<Answer<RB>>> {
        let policy = &self.route.policy;
        let inner = &mut self.inner;
        // The call itself may panic, before there is a future.
        let mut call = pin!(catching(async move { inner.call(request).await }));
        let (called, deadline) = match timeout(policy.timeout, &mut call).await {
            Ok(called) => (called, started + policy.timeout),
            Err(_) if unsent.is_held() => {
                let detail = "no connection to the app was free in time; nothing was sent to it";
                return Err(Ended::NotStarted(Refusal::new(Reason::UpstreamUnreachable, detail)));
            }
            Err(_) => {
                let refusal = Refusal::new(Reason::UpstreamTimeout, "no answer came in time");
                let late_answer = policy.late_answer();
                let Some(lease) = lease.filter(|_| !late_answer.is_zero()) else {
                    return Err(Ended::Park(Answer::Refused(refusal), ParkedBy::Timeout));
                };
                // The client gets its refusal now. The rest of the work goes on without it.
                self.seen.ran.set(started.elapsed(), Some(lease.attempt));
                self.seen.ran.set_late();
                self.side.answer_early(refused(self.shared, &refusal, self.seen, &mut self.telling));
                let called = self.shared.late.wait(late_answer, call).await;
                let deadline = started + policy.timeout + late_answer;
                (called.map_err(|by| Ended::Park(Answer::Refused(refusal), by))?, deadline)
            }
        };
        match called {
            None => Err(Ended::Park(Answer::Panicked, ParkedBy::Answer)),
            Some(Err(error)) => Err(park(Reason::UpstreamLost, &lost(&error.into()))),
            Some(Ok(response)) => Ok((response, deadline)),
        }
    }
}

impl<S, B, RB> HttpOperation<'_, S, B, RB>
where
    RB: Body<Data: Buf + Send, Error: Into<BoxError>> + Send + 'static,
{
    /// The request as the inner service gets it.
    fn prepare(&mut self, lease: Option<&Lease>) -> Request<RequestBody<B>> {
        let (mut parts, body, trailers) = self.request.take().expect("an operation runs once");
        // What is stored must suit every client that may ask for it later.
        parts.headers.remove(header::ACCEPT_ENCODING);
        parts.headers.remove(header::EXPECT);
        name_request(&mut parts.headers, &self.route.policy, &self.telling.request_id);
        if self.route.protocol == Protocol::Grpc {
            grpc::prepare(&mut parts.headers, &self.route.policy);
        }
        if trailers.is_none() && parts.headers.remove(header::TRANSFER_ENCODING).is_some() {
            parts.headers.insert(header::CONTENT_LENGTH, body.len().into());
        }
        if let Some(lease) = lease {
            parts.headers.insert(ATTEMPT, lease.attempt.into());
            parts.headers.insert(FENCE, lease.fence.0.into());
            parts.extensions.insert(Grant { attempt: lease.attempt, fence: lease.fence.0 });
            if self.route.protocol == Protocol::Http {
                parts.extensions.insert(Claimed::new(lease, &self.route, self.telling.requested_at_ms));
            }
        }
        Request::from_parts(parts, RequestBody::whole(body, trailers))
    }

    /// A probe carries the caller's headers, because it asks in the caller's name.
    fn probe_request(&self) -> Option<Request<RequestBody<B>>> {
        // Probes are HTTP requests.
        let probe = self.route.policy.resolve.as_ref().filter(|_| self.route.protocol == Protocol::Http)?;
        let (parts, _, _) = self.request.as_ref()?;
        let mut uri = parts.uri.clone().into_parts();
        uri.path_and_query = Some(probe.target(&self.key).parse().ok()?);
        let mut request = Request::new(RequestBody::default());
        *request.method_mut() = probe.method().clone();
        *request.uri_mut() = Uri::from_parts(uri).ok()?;
        *request.version_mut() = parts.version;
        *request.extensions_mut() = parts.extensions.clone();
        // It belongs to a claim: a proxy does not take it for a request without a key.
        request.extensions_mut().insert(Unsent::default());
        let about_body = |name: &HeaderName| {
            name.as_str().starts_with("content-") || matches!(name.as_str(), "transfer-encoding" | "expect" | "trailer")
        };
        for (name, value) in parts.headers.iter().filter(|(name, _)| !about_body(name)) {
            request.headers_mut().append(name, value.clone());
        }
        request.headers_mut().remove(header::ACCEPT_ENCODING);
        name_request(request.headers_mut(), &self.route.policy, &self.telling.request_id);
        Some(request)
    }

    /// What a reply means, once all of it has been read. Its body must end before the deadline.
    async fn ended(&mut self, response: Response<RB>, started: Instant, deadline: Instant) -> Ended<Answer<RB>> {
        match response.extensions().get::<Fate>() {
            Some(Fate::NotStarted(why)) => {
                return Ended::NotStarted(Refusal::new(Reason::UpstreamUnreachable, why.clone()));
            }
            Some(Fate::Lost(why)) => return park(Reason::UpstreamLost, why),
            None if response.status().is_informational() => {
                return park(Reason::UpstreamLost, "the app answered with an upgrade that was not asked for");
            }
            None => {}
        }
        let route = self.route.clone();
        let policy = &route.policy;
        let (parts, body) = response.into_parts();
        let cookies = self.anonymous.as_ref().map(|anonymous| anonymous.cookies_set_by(&parts)).unwrap_or_default();
        let mut body = Box::pin(body);
        let live = is_event_stream(&parts.headers);
        let (parts, record, trailers, answer) =
            match timeout_at(deadline, reply::read(&mut body, policy.max_response, live)).await {
                Err(_) => return park(Reason::UpstreamTimeout, "the app's answer did not end in time"),
                Ok(Err(error)) => return park(Reason::UpstreamLost, &lost(&error)),
                Ok(Ok(Read::Whole(whole, trailers))) => {
                    self.buffers.count(whole.len() as u64);
                    let answer = Response::new(ResponseBody::whole(whole.clone(), trailers.clone()));
                    (parts, RecordBody::Whole(whole.clone()), trailers, Answer::Whole(answer, whole))
                }
                Ok(Ok(Read::TooLong(begun))) => match self.stream(&parts, begun, &mut body).await {
                    Err(by) => return park_by(by),
                    Ok((record, tail)) => (parts, record, tail.trailers().cloned(), Answer::Tail(tail)),
                },
            };
        let has_body = record != RecordBody::Whole(Bytes::new());
        let (meaning, code) = match route.protocol {
            Protocol::Http => (reply::meaning(policy, parts.status), None),
            Protocol::Grpc => match grpc::status_of(&parts.headers, trailers.as_ref(), has_body) {
                Some(code) => (grpc::meaning(policy, code), Some(code)),
                None => return park(Reason::UpstreamLost, "the app's answer ended without a gRPC status"),
            },
        };
        match meaning {
            Meaning::Remember => {
                let (trailers, requested) = (trailers.as_ref(), self.telling.requested_at_ms);
                let complete = match code {
                    None => reply::complete(policy, &parts, record, trailers, cookies, requested, started),
                    Some(code) => grpc::complete(policy, &parts, code, record, trailers, requested, started),
                };
                Ended::Complete(answer.under(parts), complete)
            }
            Meaning::Release => Ended::Release(answer.under(parts)),
            Meaning::Unknown => Ended::Park(answer.under(parts), ParkedBy::Answer),
        }
    }

    /// Answers while the reply is still coming.
    async fn stream(
        &mut self, parts: &http::response::Parts, begun: Bytes, body: &mut Pin<Box<RB>>,
    ) -> Result<(RecordBody, Tail), ParkedBy> {
        let is_event_stream = is_event_stream(&parts.headers);
        if self.seen.ran.is_late() {
            // Its client has been refused.
            let (mut stream, _) = Stream::new(&self.route.policy, is_event_stream, None);
            stream.pump(begun, body).await?;
            return Ok(stream.end(parts.status));
        }
        let reservation = self.buffers.send(&self.seen.client);
        let ahead = Some(reservation.counter());
        let (mut stream, pieces) = Stream::new(&self.route.policy, is_event_stream, ahead);
        let length = parts.headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
        let mut head = Response::new(ResponseBody::streamed(pieces, length, Some(reservation)));
        *head.status_mut() = parts.status;
        *head.headers_mut() = parts.headers.clone();
        let head = answer::first(head, None, &self.route.policy, None, &mut self.telling);
        self.side.answer_early(head);
        // Lets the one who polls this hand the head on and put the rest into a task.
        tokio::task::yield_now().await;
        stream.pump(begun, body).await?;
        Ok(stream.end(parts.status))
    }
}

/// If the handler wrote its answer in a transaction of its own, what it returns decides only what becomes of the claim if
/// that transaction was rolled back.
fn entrusted<B>(claimed: &Claimed, ended: Ended<Answer<B>>) -> Ended<Answer<B>> {
    let complete = match &ended {
        Ended::Complete(_, complete) => Some(&complete.record),
        _ => None,
    };
    let Some(is_the_same) = claimed.is_entrusted(complete) else { return ended };
    match ended {
        Ended::Complete(answer, _) if is_the_same => Ended::Entrusted(answer, Otherwise::Refuse),
        Ended::Complete(answer, _) | Ended::Release(answer) => Ended::Entrusted(answer, Otherwise::Release),
        Ended::Park(answer, by) => Ended::Entrusted(answer, Otherwise::Park(by)),
        ended @ (Ended::Entrusted(..) | Ended::NotStarted(_)) => ended,
    }
}

/// The output of a future, or `None` if it panicked.
async fn catching<F: Future>(future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
        Ok(poll) => poll.map(Some),
        Err(_) => Poll::Ready(None),
    })
    .await
}

fn is_event_stream(headers: &HeaderMap) -> bool {
    let is = |value: &HeaderValue| {
        value.as_bytes().get(..17).is_some_and(|start| start.eq_ignore_ascii_case(b"text/event-stream"))
    };
    headers.get(header::CONTENT_TYPE).is_some_and(is)
}

fn park<B>(reason: Reason, why: &str) -> Ended<Answer<B>> {
    let by = if reason == Reason::UpstreamTimeout { ParkedBy::Timeout } else { ParkedBy::Lost };
    Ended::Park(Answer::Refused(Refusal::new(reason, why)), by)
}

fn park_by<B>(by: ParkedBy) -> Ended<Answer<B>> {
    match by {
        ParkedBy::Timeout | ParkedBy::NoLateAnswer => {
            park(Reason::UpstreamTimeout, "the app's answer did not end in time")
        }
        ParkedBy::Lost | ParkedBy::Answer => park(Reason::UpstreamLost, "the app's answer broke off"),
    }
}

fn lost(error: &BoxError) -> String {
    format!("the app's answer was lost: {error}")
}
