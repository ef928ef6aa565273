//! One HTTP request as an engine operation: calls the inner service, reads its response and determines the outcome.

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
    DispatchOutcome, LayerState, Protocol, Route, RunInfo, SendState,
    anonymous::AnonymousCaller,
    body::{BoxError, RequestBody, ResponseBody},
    budget::MemoryReservation,
    client_response::{self, ResponseContext},
    future::WorkState,
    handler_claim::HandlerClaim,
    inner_response::{self, BufferedBody, ResponseMeaning, ResponseStream, StreamTail},
    request::{self, set_request_id},
    service::{RequestContext, refuse_and_report},
};
use crate::{
    engine::{Claimant, OnRollback, Operation, ProbeOutcome, RunOutcome, UnknownCause},
    grpc,
    record::RecordBody,
    refusal::{Refusal, RefusalReason},
    store::{Fingerprint, Lease},
};

const ATTEMPT_HEADER: HeaderName = HeaderName::from_static("ibid-attempt");
const FENCE_HEADER: HeaderName = HeaderName::from_static("ibid-fence");

pub(super) enum HttpRunResponse<B> {
    /// The whole response, unmodified, and its bytes for the envelope.
    Whole(Response<ResponseBody<B>>, Bytes),
    /// The end of a streamed response. The rest was already sent.
    Tail(StreamTail),
    /// A refusal after the run.
    Refused(Refusal),
    Panicked,
}

impl<B> HttpRunResponse<B> {
    /// Attaches the head to a whole response.
    fn with_head(mut self, head: http::response::Parts) -> Self {
        if let Self::Whole(answer, _) = &mut self {
            *answer.status_mut() = head.status;
            *answer.version_mut() = head.version;
            *answer.headers_mut() = head.headers;
        }
        self
    }
}

pub(super) struct HttpOperation<'a, S, B, RB> {
    pub(super) shared: &'a LayerState,
    pub(super) context: &'a RequestContext,
    pub(super) inner: S,
    /// The run takes this.
    pub(super) request: Option<(Parts, Bytes, Option<HeaderMap>)>,
    pub(super) key: String,
    pub(super) route: Arc<Route>,
    pub(super) work_state: Arc<WorkState<RB>>,
    pub(super) response_context: ResponseContext,
    pub(super) buffers: MemoryReservation,
    /// The client's deadline, if it sent one.
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
    type Answer = HttpRunResponse<RB>;

    async fn run(&mut self, lease: Option<&Lease>) -> RunOutcome<HttpRunResponse<RB>> {
        let started = Instant::now();
        let mut request = self.prepare(lease);
        let claimed = request.extensions().get::<HandlerClaim>().cloned();
        let unsent = SendState::default();
        request.extensions_mut().insert(unsent.clone());
        let ended = match self.call(request, lease, &unsent, started).await {
            Ok((response, deadline)) => self.read_outcome(response, started, deadline).await,
            Err(ended) => ended,
        };
        self.context.timings.set(started.elapsed(), lease.map(|lease| lease.attempt));
        let ended = match claimed {
            Some(claimed) => delegated_outcome(&claimed, ended),
            None => ended,
        };
        let RunOutcome::Complete(answer, complete) = ended else { return ended };
        if let Some(anonymous) = &self.anonymous {
            anonymous.mark_recorded();
        }
        RunOutcome::Complete(answer, self.response_context.compress(complete))
    }
}

impl<S, B, RB> Claimant for HttpOperation<'_, S, B, RB>
where
    S: Service<Request<RequestBody<B>>, Response = Response<RB>, Future: Send> + Clone + Send,
    S::Error: Into<BoxError> + Send,
    B: Body<Data: Buf + Send, Error: Into<BoxError>> + Send,
    RB: Body<Data: Buf + Send, Error: Into<BoxError>> + Send + 'static,
{
    fn max_wait(&self) -> Duration {
        self.deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()))
    }

    fn fingerprint(&self, version: u8) -> Option<Fingerprint> {
        let (parts, body, trailers) = self.request.as_ref()?;
        let made = request::fingerprint(version, &self.route, parts, (body, trailers.as_ref())).ok()??;
        Some(made.0)
    }

    async fn probe(&mut self) -> ProbeOutcome {
        let started = Instant::now();
        let Some(request) = self.probe_request() else { return ProbeOutcome::Inconclusive };
        let policy = &self.route.policy;
        let mut inner = self.inner.clone();
        let asked = timeout(policy.timeout, async move {
            poll_fn(|cx| inner.poll_ready(cx)).await.ok()?;
            let response = catch_panic(async move { inner.call(request).await }).await?.ok()?;
            if response.extensions().get::<DispatchOutcome>().is_some() {
                return None;
            }
            let (parts, body) = response.into_parts();
            let read = inner_response::read(&mut Box::pin(body), policy.max_response, false).await.ok()?;
            Some((parts, read))
        });
        match asked.await {
            Ok(Some((parts, BufferedBody::Whole(body, trailers)))) if parts.status.is_success() => {
                let body = RecordBody::Whole(body);
                let requested = self.response_context.requested_at_ms;
                let trailers = trailers.as_ref();
                let complete =
                    inner_response::completed_answer(policy, &parts, body, trailers, Vec::new(), requested, started);
                ProbeOutcome::Happened(self.response_context.compress(complete))
            }
            Ok(Some((parts, _))) if parts.status == StatusCode::NOT_FOUND => ProbeOutcome::DidNotHappen,
            _ => ProbeOutcome::Inconclusive,
        }
    }
}

impl<S, B, RB> HttpOperation<'_, S, B, RB>
where
    S: Service<Request<RequestBody<B>>, Response = Response<RB>, Future: Send>,
    S::Error: Into<BoxError>,
{
    /// Returns the head of the app's response and the deadline of its body. `Err` contains the outcome of a run without
    /// a response.
    async fn call(
        &mut self, request: Request<RequestBody<B>>, lease: Option<&Lease>, unsent: &SendState, started: Instant,
    ) -> Result<(Response<RB>, Instant), RunOutcome<HttpRunResponse<RB>>> {
        let policy = &self.route.policy;
        let inner = &mut self.inner;
        // The call itself may panic before it returns a future.
        let mut call = pin!(catch_panic(async move { inner.call(request).await }));
        let (called, deadline) = match timeout(policy.timeout, &mut call).await {
            Ok(called) => (called, started + policy.timeout),
            Err(_) if unsent.is_unsent() => {
                let detail = "no connection to the app was free in time; nothing was sent to it";
                return Err(RunOutcome::NotStarted(Refusal::new(RefusalReason::UpstreamUnreachable, detail)));
            }
            Err(_) => {
                let refusal = Refusal::new(RefusalReason::UpstreamTimeout, "no answer came in time");
                let late_answer = policy.late_answer_or_lease();
                let Some(lease) = lease.filter(|_| !late_answer.is_zero()) else {
                    return Err(RunOutcome::Park(HttpRunResponse::Refused(refusal), UnknownCause::TimedOut));
                };
                // The client is refused now; the work continues in the background.
                self.context.timings.set(started.elapsed(), Some(lease.attempt));
                self.context.timings.set_late();
                self.work_state.respond_early(refuse_and_report(
                    self.shared,
                    &refusal,
                    self.context,
                    &mut self.response_context,
                ));
                let called = self.shared.late_answers.wait(late_answer, call).await;
                let deadline = started + policy.timeout + late_answer;
                (called.map_err(|by| RunOutcome::Park(HttpRunResponse::Refused(refusal), by))?, deadline)
            }
        };
        match called {
            None => Err(RunOutcome::Park(HttpRunResponse::Panicked, UnknownCause::AppSaidSo)),
            Some(Err(error)) => Err(outcome_unknown(RefusalReason::UpstreamLost, &lost_detail(&error.into()))),
            Some(Ok(response)) => Ok((response, deadline)),
        }
    }
}

impl<S, B, RB> HttpOperation<'_, S, B, RB>
where
    RB: Body<Data: Buf + Send, Error: Into<BoxError>> + Send + 'static,
{
    /// Builds the request for the inner service.
    fn prepare(&mut self, lease: Option<&Lease>) -> Request<RequestBody<B>> {
        let (mut parts, body, trailers) = self.request.take().expect("an operation runs once");
        // The stored response must be readable by every later client, whatever codings it accepts.
        parts.headers.remove(header::ACCEPT_ENCODING);
        parts.headers.remove(header::EXPECT);
        set_request_id(&mut parts.headers, &self.route.policy, &self.response_context.request_id);
        if self.route.protocol == Protocol::Grpc {
            grpc::prepare(&mut parts.headers, &self.route.policy);
        }
        if trailers.is_none() && parts.headers.remove(header::TRANSFER_ENCODING).is_some() {
            parts.headers.insert(header::CONTENT_LENGTH, body.len().into());
        }
        if let Some(lease) = lease {
            parts.headers.insert(ATTEMPT_HEADER, lease.attempt.into());
            parts.headers.insert(FENCE_HEADER, lease.fence.0.into());
            parts.extensions.insert(RunInfo { attempt: lease.attempt, fence: lease.fence.0 });
            if self.route.protocol == Protocol::Http {
                parts.extensions.insert(HandlerClaim::new(lease, &self.route, self.response_context.requested_at_ms));
            }
        }
        Request::from_parts(parts, RequestBody::whole(body, trailers))
    }

    /// Builds the probe. It has the caller's headers, because it asks on the caller's behalf.
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
        // The probe belongs to a claim. Without this, a proxy would treat it as a request without a key.
        request.extensions_mut().insert(SendState::default());
        let about_body = |name: &HeaderName| {
            name.as_str().starts_with("content-") || matches!(name.as_str(), "transfer-encoding" | "expect" | "trailer")
        };
        for (name, value) in parts.headers.iter().filter(|(name, _)| !about_body(name)) {
            request.headers_mut().append(name, value.clone());
        }
        request.headers_mut().remove(header::ACCEPT_ENCODING);
        set_request_id(request.headers_mut(), &self.route.policy, &self.response_context.request_id);
        Some(request)
    }

    /// Reads the whole response and classifies it. The body must end before the deadline.
    async fn read_outcome(
        &mut self, response: Response<RB>, started: Instant, deadline: Instant,
    ) -> RunOutcome<HttpRunResponse<RB>> {
        match response.extensions().get::<DispatchOutcome>() {
            Some(DispatchOutcome::NotSent(why)) => {
                return RunOutcome::NotStarted(Refusal::new(RefusalReason::UpstreamUnreachable, why.clone()));
            }
            Some(DispatchOutcome::ResponseLost(why)) => return outcome_unknown(RefusalReason::UpstreamLost, why),
            None if response.status().is_informational() => {
                return outcome_unknown(
                    RefusalReason::UpstreamLost,
                    "the app answered with an upgrade that was not asked for",
                );
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
            match timeout_at(deadline, inner_response::read(&mut body, policy.max_response, live)).await {
                Err(_) => {
                    return outcome_unknown(RefusalReason::UpstreamTimeout, "the app's answer did not end in time");
                }
                Ok(Err(error)) => return outcome_unknown(RefusalReason::UpstreamLost, &lost_detail(&error)),
                Ok(Ok(BufferedBody::Whole(whole, trailers))) => {
                    self.buffers.count(whole.len() as u64);
                    let answer = Response::new(ResponseBody::whole(whole.clone(), trailers.clone()));
                    (parts, RecordBody::Whole(whole.clone()), trailers, HttpRunResponse::Whole(answer, whole))
                }
                Ok(Ok(BufferedBody::TooLong(begun))) => match self.stream(&parts, begun, &mut body).await {
                    Err(by) => return outcome_unknown_because(by),
                    Ok((record, tail)) => (parts, record, tail.trailers().cloned(), HttpRunResponse::Tail(tail)),
                },
            };
        let has_body = record != RecordBody::Whole(Bytes::new());
        let (meaning, code) = match route.protocol {
            Protocol::Http => (inner_response::classify_status(policy, parts.status), None),
            Protocol::Grpc => match grpc::status_of(&parts.headers, trailers.as_ref(), has_body) {
                Some(code) => (grpc::classify_code(policy, code), Some(code)),
                None => {
                    return outcome_unknown(
                        RefusalReason::UpstreamLost,
                        "the app's answer ended without a gRPC status",
                    );
                }
            },
        };
        match meaning {
            ResponseMeaning::Remember => {
                let (trailers, requested) = (trailers.as_ref(), self.response_context.requested_at_ms);
                let complete = match code {
                    None => {
                        inner_response::completed_answer(policy, &parts, record, trailers, cookies, requested, started)
                    }
                    Some(code) => grpc::completed_answer(policy, &parts, code, record, trailers, requested, started),
                };
                RunOutcome::Complete(answer.with_head(parts), complete)
            }
            ResponseMeaning::Release => RunOutcome::Release(answer.with_head(parts)),
            ResponseMeaning::Unknown => RunOutcome::Park(answer.with_head(parts), UnknownCause::AppSaidSo),
        }
    }

    /// Responds while the body is still arriving.
    async fn stream(
        &mut self, parts: &http::response::Parts, begun: Bytes, body: &mut Pin<Box<RB>>,
    ) -> Result<(RecordBody, StreamTail), UnknownCause> {
        let is_event_stream = is_event_stream(&parts.headers);
        if self.context.timings.is_late() {
            // The client was already refused.
            let (mut stream, _) = ResponseStream::new(&self.route.policy, is_event_stream, None);
            stream.pump(begun, body).await?;
            return Ok(stream.end(parts.status));
        }
        let reservation = self.buffers.send(&self.context.client);
        let ahead = Some(reservation.in_flight_counter());
        let (mut stream, pieces) = ResponseStream::new(&self.route.policy, is_event_stream, ahead);
        let length = parts.headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
        let mut head = Response::new(ResponseBody::streamed(pieces, length, Some(reservation)));
        *head.status_mut() = parts.status;
        *head.headers_mut() = parts.headers.clone();
        let head = client_response::first_response(head, None, &self.route.policy, None, &mut self.response_context);
        self.work_state.respond_early(head);
        // Lets the polling future pass the head on and move the rest into a task.
        tokio::task::yield_now().await;
        stream.pump(begun, body).await?;
        Ok(stream.end(parts.status))
    }
}

/// If the handler delegated its answer to a transaction, its return value only decides what happens to the claim after
/// a rollback.
fn delegated_outcome<B>(
    claimed: &HandlerClaim, ended: RunOutcome<HttpRunResponse<B>>,
) -> RunOutcome<HttpRunResponse<B>> {
    let complete = match &ended {
        RunOutcome::Complete(_, complete) => Some(&complete.record),
        _ => None,
    };
    let Some(is_the_same) = claimed.is_delegated(complete) else { return ended };
    match ended {
        RunOutcome::Complete(answer, _) if is_the_same => {
            RunOutcome::DelegatedToTransaction(answer, OnRollback::Refuse)
        }
        RunOutcome::Complete(answer, _) | RunOutcome::Release(answer) => {
            RunOutcome::DelegatedToTransaction(answer, OnRollback::Release)
        }
        RunOutcome::Park(answer, by) => RunOutcome::DelegatedToTransaction(answer, OnRollback::Park(by)),
        ended @ (RunOutcome::DelegatedToTransaction(..) | RunOutcome::NotStarted(_)) => ended,
    }
}

/// Returns the output of a future, or `None` if it panicked. The panic hook has been called.
pub async fn catch_panic<F: Future>(future: F) -> Option<F::Output> {
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

fn outcome_unknown<B>(reason: RefusalReason, why: &str) -> RunOutcome<HttpRunResponse<B>> {
    let by =
        if reason == RefusalReason::UpstreamTimeout { UnknownCause::TimedOut } else { UnknownCause::ConnectionLost };
    RunOutcome::Park(HttpRunResponse::Refused(Refusal::new(reason, why)), by)
}

fn outcome_unknown_because<B>(by: UnknownCause) -> RunOutcome<HttpRunResponse<B>> {
    match by {
        UnknownCause::TimedOut | UnknownCause::NoLateAnswer => {
            outcome_unknown(RefusalReason::UpstreamTimeout, "the app's answer did not end in time")
        }
        UnknownCause::ConnectionLost | UnknownCause::AppSaidSo => {
            outcome_unknown(RefusalReason::UpstreamLost, "the app's answer broke off")
        }
    }
}

fn lost_detail(error: &BoxError) -> String {
    format!("the app's answer was lost: {error}")
}
