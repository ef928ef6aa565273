//! Calls the app for a claimed request, within its time limits, and reads its reply to the end.

use std::{
    collections::{HashSet, VecDeque},
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::{Buf, Bytes};
use http::{HeaderName, Request, Response, StatusCode, Uri, header, request::Parts};
use http_body::Body;
use parking_lot::Mutex;
use pin_project_lite::pin_project;
use tokio::{
    sync::Notify,
    time::{Instant, timeout},
};

use super::{
    LayerState,
    anonymous::AnonymousCaller,
    app::{App, AppCall, AppError, DispatchOutcome, HandlerClaim, RunInfo, SendState},
    body::{BoxError, RequestBody, ResponseBody},
    budget::MemoryReservation,
    context::RequestContext,
    exchange::Exchange,
    future::WorkState,
    header_value,
    inner_response::{self, BufferedBody, ResponseStream, StreamTail},
    read_body::ReadBody,
    rules,
};
use crate::{
    engine::{ClaimedRun, Heartbeat, ProbeOutcome, RunOutcome, UnknownCause},
    json_rpc::{MAX_LIST_PAGES, ToolPage, is_event_stream, list_request},
    protocol::{AppReply, ReplyMeaning, RunTimes},
    record::RecordBody,
    refusal::{Refusal, RefusalReason},
};

const ATTEMPT_HEADER: HeaderName = HeaderName::from_static("ibid-attempt");
const FENCE_HEADER: HeaderName = HeaderName::from_static("ibid-fence");
const OPERATION_HEADER: HeaderName = HeaderName::from_static("ibid-operation");

/// What the client of a run gets.
pub(super) enum AppAnswer {
    /// The whole response, which is kept beside this.
    Whole,
    /// The end of a streamed response. The rest was already sent.
    Tail(StatusCode, Box<StreamTail>),
    /// A refusal after the run.
    Refused(Box<Refusal>),
    Panicked,
}

/// One call of the app.
struct Run<'a> {
    shared: &'a LayerState,
    context: &'a RequestContext,
    handler_claim: Option<&'a HandlerClaim>,
    anonymous: Option<&'a AnonymousCaller>,
    buffers: &'a mut MemoryReservation,
    info: Option<RunInfo>,
    heartbeat: Heartbeat<'a>,
    started: Instant,
    /// When the reply was complete.
    ended: Option<Instant>,
}

impl Exchange {
    /// Calls the app and reads its reply, while the lease is kept alive. Also returns when the run ended. A whole
    /// response goes to `state`, because outcomes are passed on and copied.
    pub(super) async fn run<A, B>(
        &mut self, app: &mut A, state: &WorkState<A::Body>,
    ) -> (RunOutcome<AppAnswer>, Instant)
    where
        A: App<B>,
        B: Send + 'static,
    {
        let Self { shared, context, run, handler_claim, anonymous, buffers, parts, body, .. } = self;
        let info = run.as_ref().map(|run| RunInfo::of(run.lease()));
        let started = run.as_ref().map_or_else(Instant::now, ClaimedRun::granted_at);
        let lease = run.as_ref().map(|run| (run.lease(), run.claimed_at()));
        let intent = run.as_ref().and_then(ClaimedRun::intent);
        let heartbeat = shared.engine.heartbeat(context.policy().terms(), lease, intent);
        let (handler_claim, anonymous) = (handler_claim.as_ref(), anonymous.as_deref());
        let buffers = buffers.as_mut().expect("the body was read");
        let mut call =
            Run { shared, context, handler_claim, anonymous, buffers, info, heartbeat, started, ended: None };
        let sent = match call.send(app, parts, body, state).await {
            Ok(sent) => sent,
            Err(outcome) => return (outcome, call.end()),
        };
        let outcome = call.read_reply(sent, state).await;
        (outcome, call.end())
    }
}

/// The reply of an app, or `None` if it panicked.
type CaughtReply<RB> = Option<Result<Response<RB>, AppError<RB>>>;

/// The response in a reply, or the outcome of a run without one.
fn received<RB>(sent: CaughtReply<RB>) -> Result<Response<RB>, RunOutcome<AppAnswer>> {
    match sent {
        Some(Ok(response)) => Ok(response),
        Some(Err(AppError { outcome: DispatchOutcome::NotSent(why), .. })) => {
            Err(RunOutcome::NotStarted(Refusal::new(RefusalReason::UpstreamUnreachable, why)))
        }
        Some(Err(AppError { outcome: DispatchOutcome::ResponseLost(why), .. })) => Err(lost(&why)),
        Some(Err(AppError { outcome: DispatchOutcome::TimedOut(why), .. })) => {
            let refusal = Refusal::new(RefusalReason::UpstreamTimeout, why);
            Err(RunOutcome::Park(AppAnswer::Refused(Box::new(refusal)), UnknownCause::NoLateAnswer))
        }
        None => Err(RunOutcome::Park(AppAnswer::Panicked, UnknownCause::AppSaidSo)),
    }
}

impl Run<'_> {
    /// Returns the head of the app's response and the deadline of its body. `Err` contains the outcome of a run without
    /// a response.
    async fn send<A, B>(
        &mut self, app: &mut A, parts: &mut Option<Parts>, body: &mut ReadBody, state: &WorkState<A::Body>,
    ) -> Result<(Response<A::Body>, Instant), RunOutcome<AppAnswer>>
    where
        A: App<B>,
    {
        let (context, policy, send_state) = (self.context, self.context.policy(), SendState::default());
        let adds_request_id = A::ADDS_HEADERS && context.adds_request_id();
        let request_id = adds_request_id.then_some(&context.request_id);
        let call = AppCall { run: self.info, request_id, claim: self.handler_claim, send_state: Some(&send_state) };
        // The call itself may panic before it returns a future. The request is built where it is needed: it is large.
        let mut sending = pin!(catch_panic(async move {
            let parts = parts.take().expect("an operation runs once");
            let request = prepare_request(context, call.run, A::ADDS_HEADERS, parts, std::mem::take(body));
            app.send(request, call).await
        }));
        let deadline = self.started + policy.timeout;
        let limit = (!A::HAS_OWN_DEADLINE).then_some(deadline);
        let sent = self.heartbeat.keep(limit, sending.as_mut()).await;
        match sent {
            // The app's own deadline is that of the response's head.
            Some(sent) if A::HAS_OWN_DEADLINE => {
                received(sent).map(|response| (response, Instant::now() + policy.timeout))
            }
            Some(sent) => received(sent).map(|response| (response, deadline)),
            None if send_state.is_unsent() => {
                let detail = "no connection to the app was free in time; nothing was sent to it";
                Err(RunOutcome::NotStarted(Refusal::new(RefusalReason::UpstreamUnreachable, detail)))
            }
            // Boxed, because it is rare.
            None => Box::pin(self.await_late(sending, deadline, state)).await,
        }
    }

    /// Refuses the client, and goes on waiting for the app.
    async fn await_late<RB>(
        &mut self, sending: Pin<&mut impl Future<Output = CaughtReply<RB>>>, deadline: Instant, state: &WorkState<RB>,
    ) -> Result<(Response<RB>, Instant), RunOutcome<AppAnswer>> {
        let refusal = Refusal::new(RefusalReason::UpstreamTimeout, "no answer came in time");
        let late_answer = self.context.policy().late_answer_or_lease();
        let Some(run) = self.info.filter(|_| !late_answer.is_zero()) else {
            return Err(RunOutcome::Park(AppAnswer::Refused(Box::new(refusal)), UnknownCause::TimedOut));
        };
        // The client is refused now; the work continues in the background.
        self.context.set_run(self.started.elapsed(), Some(run.attempt));
        self.context.set_late();
        state.respond_early(self.context.refuse_and_report(self.shared, &refusal));
        let waiting = Box::pin(self.shared.late_answers.wait(late_answer, sending));
        let sent = self.heartbeat.keep(None, pin!(waiting)).await.expect("it has no deadline");
        let sent = sent.map_err(|cause| RunOutcome::Park(AppAnswer::Refused(Box::new(refusal)), cause))?;
        received(sent).map(|response| (response, deadline + late_answer))
    }

    /// Records how long the run took, and returns when it ended.
    fn end(&self) -> Instant {
        let ended = self.ended.unwrap_or_else(Instant::now);
        self.context.set_run(ended - self.started, self.info.map(|run| run.attempt));
        ended
    }

    /// Reads the whole response and classifies it. The body must end before the deadline.
    ///
    /// Not an `async fn`, which would store the response twice.
    fn read_reply<RB>(
        &mut self, (response, deadline): (Response<RB>, Instant), state: &WorkState<RB>,
    ) -> impl Future<Output = RunOutcome<AppAnswer>>
    where
        RB: Body<Data: Buf + Send, Error: Into<BoxError>> + Send + 'static,
    {
        let (mut parts, body) = response.into_parts();
        async move {
            if parts.status.is_informational() {
                return lost("the app answered with an upgrade that was not asked for");
            }
            let policy = self.context.policy();
            let cookies = self.anonymous.map(|anonymous| anonymous.cookies_set_by(&parts)).unwrap_or_default();
            let mut body = pin!(body);
            let live = is_event_stream(&parts.headers);
            let read = {
                let reading = pin!(inner_response::read(body.as_mut(), policy.max_response, live));
                self.heartbeat.keep(Some(deadline), reading).await
            };
            self.ended = Some(Instant::now());
            let (body, trailers, answer) = match read {
                None => return timed_out(),
                Some(Err(error)) => return lost(&format!("the app's answer was lost: {error}")),
                Some(Ok(BufferedBody::Whole(whole, trailers))) => {
                    self.buffers.count(whole.len() as u64);
                    (RecordBody::Whole(whole), trailers, AppAnswer::Whole)
                }
                Some(Ok(BufferedBody::TooLong(begun))) => {
                    match Box::pin(self.stream(&parts, begun, body.as_mut(), state)).await {
                        Err(UnknownCause::TimedOut | UnknownCause::NoLateAnswer) => return timed_out(),
                        Err(UnknownCause::ConnectionLost | UnknownCause::AppSaidSo) => {
                            return lost("the app's answer broke off");
                        }
                        Ok((record, tail)) => {
                            self.ended = Some(Instant::now());
                            (record, tail.trailers.clone().map(Box::new), AppAnswer::Tail(parts.status, Box::new(tail)))
                        }
                    }
                }
            };
            let whole = match &body {
                RecordBody::Whole(whole) => whole.clone(),
                RecordBody::Digest { .. } | RecordBody::None => Bytes::new(),
            };
            let (status, headers, times) = (parts.status, &parts.headers, self.times());
            let app_reply = AppReply { status, headers, body, trailers: trailers.as_deref(), cookies, times };
            let meaning = self.context.route.protocol.rules().judge(policy, app_reply);
            if let AppAnswer::Whole = answer {
                parts.extensions.clear();
                let body = ResponseBody::whole(whole, trailers.map(|trailers| *trailers));
                state.set_reply(Response::from_parts(parts, body));
            }
            match meaning {
                ReplyMeaning::Remember(completed) => RunOutcome::Complete(answer, completed),
                ReplyMeaning::Release => RunOutcome::Release(answer),
                ReplyMeaning::Unknown => RunOutcome::Park(answer, UnknownCause::AppSaidSo),
                ReplyMeaning::Incomplete(why) => lost(why),
            }
        }
    }

    fn times(&self) -> RunTimes {
        let (requested_at_ms, ended) = (self.context.requested_at_ms, self.ended.unwrap_or(self.started));
        let completed_at_ms = requested_at_ms + (ended - self.context.started).as_millis() as u64;
        RunTimes { requested_at_ms, completed_at_ms, took: ended - self.started }
    }

    /// Responds while the body is still arriving.
    async fn stream<RB>(
        &mut self, parts: &http::response::Parts, begun: Bytes, body: Pin<&mut RB>, state: &WorkState<RB>,
    ) -> Result<(RecordBody, StreamTail), UnknownCause>
    where
        RB: Body<Data: Buf + Send, Error: Into<BoxError>> + Send + 'static,
    {
        let (policy, is_live) = (self.context.policy(), is_event_stream(&parts.headers));
        let rules = self.context.route.protocol.rules();
        let finder = if is_live { rules.response_event_finder(policy) } else { None };
        if self.context.is_late() {
            // The client was already refused.
            let (mut stream, _) = ResponseStream::new(policy, is_live, None, finder);
            self.heartbeat.keep(None, pin!(stream.pump(begun, body))).await.expect("it has no deadline")?;
            return Ok(stream.end());
        }
        let reservation = self.buffers.send(&self.context.client);
        let in_flight = Some(reservation.in_flight_counter());
        let (mut stream, pieces) = ResponseStream::new(policy, is_live, in_flight, finder);
        let length = parts.headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
        let mut head = Response::new(ResponseBody::streamed(pieces, length, Some(reservation)));
        *head.status_mut() = parts.status;
        *head.headers_mut() = parts.headers.clone();
        rules::complete_first_response(&mut head, None, self.context);
        state.respond_early(head);
        // Lets the polling future pass the head on and move the rest into a task.
        tokio::task::yield_now().await;
        self.heartbeat.keep(None, pin!(stream.pump(begun, body))).await.expect("it has no deadline")?;
        Ok(stream.end())
    }
}

/// Builds the request for an app, which may add the headers of the run itself.
fn prepare_request<B>(
    context: &RequestContext, run: Option<RunInfo>, app_adds_headers: bool, mut parts: Parts, body: ReadBody,
) -> Request<RequestBody<B>> {
    let ReadBody { data, trailers, .. } = body;
    // The stored response must be readable by every later client, whatever codings it accepts.
    let sent = &context.sent_names;
    for name in [header::ACCEPT_ENCODING, header::EXPECT].iter().filter(|name| sent.may_have(name)) {
        parts.headers.remove(name);
    }
    if !app_adds_headers {
        parts.headers.reserve(4);
    }
    if !app_adds_headers || !context.adds_request_id() {
        context.set_request_id(&mut parts.headers);
    }
    context.route.protocol.rules().prepare_request(&mut parts.headers, context.policy());
    if trailers.is_none()
        && sent.may_have(&header::TRANSFER_ENCODING)
        && parts.headers.remove(header::TRANSFER_ENCODING).is_some()
    {
        parts.headers.insert(header::CONTENT_LENGTH, data.len().into());
    }
    if let Some(run) = run.filter(|_| !app_adds_headers) {
        parts.headers.insert(ATTEMPT_HEADER, header_value::from_number(run.attempt.into()));
        parts.headers.insert(FENCE_HEADER, header_value::from_number(run.fence));
        parts.headers.insert(OPERATION_HEADER, header_value::from_bytes(&run.operation.hex()));
    }
    Request::from_parts(parts, RequestBody::whole(data, trailers.map(|trailers| *trailers)))
}

/// Reads the list of tools of an MCP server, in the name of the caller of one. Returns the names of those that need no
/// protection by their annotations; `None` if the list cannot be read.
pub(super) async fn list_tools<A, B>(
    app: &mut A, context: &RequestContext, parts: &Parts, call: &[u8],
) -> Option<HashSet<String>>
where
    A: App<B>,
{
    let (policy, mut app) = (context.policy(), app.clone());
    let reading = async {
        let (mut passing, mut cursor) = (HashSet::new(), None);
        for _ in 0..MAX_LIST_PAGES {
            let mut request = list_request(policy, parts, call, cursor.as_deref());
            context.set_request_id(request.headers_mut());
            let send_state = SendState::default();
            let request = request.map(|body| RequestBody::whole(body, None));
            let call = AppCall { run: None, request_id: None, claim: None, send_state: Some(&send_state) };
            let response = catch_panic(async { app.send(request, call).await }).await?.ok()?;
            let (head, body) = response.into_parts();
            let read = inner_response::read(pin!(body), policy.max_response, false).await.ok()?;
            let BufferedBody::Whole(body, _) = read else { return None };
            let page = ToolPage::read(&head.headers, body).filter(|_| head.status.is_success())?;
            passing.extend(page.passing);
            cursor = page.next;
            if cursor.is_none() {
                return Some(passing);
            }
        }
        None
    };
    timeout(policy.timeout, reading).await.ok()?
}

/// Asks the app whether an earlier run took place. The probe has the caller's headers, because it asks on the caller's
/// behalf.
pub(super) async fn probe<A, B>(app: &mut A, context: &RequestContext, parts: &Parts, key: &str) -> ProbeOutcome
where
    A: App<B>,
{
    let (started, policy) = (Instant::now(), context.policy());
    let Some(request) = probe_request(context, parts, key) else { return ProbeOutcome::Inconclusive };
    let mut app = app.clone();
    let asked = timeout(policy.timeout, async move {
        let send_state = SendState::default();
        let call = AppCall { run: None, request_id: None, claim: None, send_state: Some(&send_state) };
        let response = catch_panic(async { app.send(request, call).await }).await?.ok()?;
        let (parts, body) = response.into_parts();
        let read = inner_response::read(pin!(body), policy.max_response, false).await.ok()?;
        Some((parts, read))
    });
    match asked.await {
        Ok(Some((parts, BufferedBody::Whole(body, trailers)))) if parts.status.is_success() => {
            let (status, headers, trailers) = (parts.status, &parts.headers, trailers.as_deref());
            let (body, times) = (RecordBody::Whole(body), RunTimes::ending_now(context.requested_at_ms, started));
            let reply = AppReply { status, headers, body, trailers, cookies: Vec::new(), times };
            ProbeOutcome::Happened(rules::completed_answer(policy, reply))
        }
        Ok(Some((parts, _))) if parts.status == StatusCode::NOT_FOUND => ProbeOutcome::DidNotHappen,
        _ => ProbeOutcome::Inconclusive,
    }
}

fn probe_request<B>(context: &RequestContext, parts: &Parts, key: &str) -> Option<Request<RequestBody<B>>> {
    // Probes are HTTP requests.
    let is_http = context.route.protocol.rules().is_plain_http();
    let probe = context.policy().resolve.as_ref().filter(|_| is_http)?;
    let mut uri = parts.uri.clone().into_parts();
    uri.path_and_query = Some(probe.target(key).parse().ok()?);
    let mut request = Request::new(RequestBody::default());
    *request.method_mut() = probe.method().clone();
    *request.uri_mut() = Uri::from_parts(uri).ok()?;
    *request.version_mut() = parts.version;
    *request.extensions_mut() = parts.extensions.clone();
    let about_body = |name: &HeaderName| {
        name.as_str().starts_with("content-") || matches!(name.as_str(), "transfer-encoding" | "expect" | "trailer")
    };
    for (name, value) in parts.headers.iter().filter(|(name, _)| !about_body(name)) {
        request.headers_mut().append(name, value.clone());
    }
    request.headers_mut().remove(header::ACCEPT_ENCODING);
    context.set_request_id(request.headers_mut());
    Some(request)
}

/// Returns the output of a future, or `None` if it panicked. The panic hook has been called.
pub fn catch_panic<F: Future>(future: F) -> impl Future<Output = Option<F::Output>> {
    CatchPanic { future }
}

pin_project! {
    // Not an `async fn`, which would store its argument twice.
    struct CatchPanic<F> {
        #[pin]
        future: F,
    }
}

impl<F: Future> Future for CatchPanic<F> {
    type Output = Option<F::Output>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match catch_unwind(AssertUnwindSafe(|| self.project().future.poll(cx))) {
            Ok(poll) => poll.map(Some),
            Err(_) => Poll::Ready(None),
        }
    }
}

fn lost(why: &str) -> RunOutcome<AppAnswer> {
    let refusal = Refusal::new(RefusalReason::UpstreamLost, why);
    RunOutcome::Park(AppAnswer::Refused(Box::new(refusal)), UnknownCause::ConnectionLost)
}

fn timed_out() -> RunOutcome<AppAnswer> {
    let refusal = Refusal::new(RefusalReason::UpstreamTimeout, "the app's answer did not end in time");
    RunOutcome::Park(AppAnswer::Refused(Box::new(refusal)), UnknownCause::TimedOut)
}

/// Limits how many operations are awaited beyond their `timeout`, oldest first. Such an operation still occupies a
/// connection to the app. A newer one replaces the oldest.
#[derive(Debug)]
pub(super) struct LateAnswerLimiter {
    max: usize,
    waiting: Mutex<VecDeque<Arc<Notify>>>,
}

/// One awaited operation, until it is dropped.
struct LateAnswerSlot<'a> {
    owner: &'a LateAnswerLimiter,
    evicted: Arc<Notify>,
}

impl LateAnswerLimiter {
    pub(super) fn new(max: usize) -> Self {
        Self { max, waiting: Mutex::default() }
    }

    /// Waits for an answer for at most `limit`, or until `max` newer ones are awaited. `Err` contains why the outcome
    /// is unknown.
    pub(super) async fn wait<F: Future>(&self, limit: Duration, answer: F) -> Result<F::Output, UnknownCause> {
        let late = self.enter();
        tokio::select! {
            biased;
            answered = timeout(limit, answer) => answered.map_err(|_| UnknownCause::NoLateAnswer),
            () = late.evicted.notified() => Err(UnknownCause::TimedOut),
        }
    }

    fn enter(&self) -> LateAnswerSlot<'_> {
        let evicted = Arc::new(Notify::new());
        let mut waiting = self.waiting.lock();
        waiting.push_back(evicted.clone());
        if waiting.len() > self.max
            && let Some(oldest) = waiting.pop_front()
        {
            oldest.notify_one();
        }
        LateAnswerSlot { owner: self, evicted }
    }
}

impl Drop for LateAnswerSlot<'_> {
    fn drop(&mut self) {
        self.owner.waiting.lock().retain(|other| !Arc::ptr_eq(other, &self.evicted));
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_oldest_gives_way_to_a_newer_one() {
        let all = Arc::new(LateAnswerLimiter::new(2));
        let wait = |all: &Arc<LateAnswerLimiter>| {
            let all = all.clone();
            tokio::spawn(async move { all.wait(Duration::from_secs(60), pending::<()>()).await })
        };
        let oldest = wait(&all);
        tokio::task::yield_now().await;
        let others = [wait(&all), wait(&all)];
        assert_eq!(oldest.await.unwrap(), Err(UnknownCause::TimedOut), "it may still be running");
        for other in others {
            assert_eq!(other.await.unwrap(), Err(UnknownCause::NoLateAnswer));
        }
        assert!(all.waiting.lock().is_empty());
    }

    #[tokio::test]
    async fn an_answer_that_is_there_counts_even_if_none_may_be_waited_for() {
        let none = LateAnswerLimiter::new(0);
        assert_eq!(none.wait(Duration::ZERO, ready(7)).await, Ok(7));
        assert_eq!(none.wait(Duration::from_secs(60), pending::<()>()).await, Err(UnknownCause::TimedOut));
    }
}
