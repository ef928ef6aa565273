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
use http::{HeaderMap, HeaderName, Request, Response, StatusCode, Uri, header, request::Parts, response};
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
    app::{App, AppCall, DispatchOutcome, HandlerClaim, RunInfo, SendState},
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
    store::Lease,
};

const ATTEMPT_HEADER: HeaderName = HeaderName::from_static("ibid-attempt");
const FENCE_HEADER: HeaderName = HeaderName::from_static("ibid-fence");
const OPERATION_HEADER: HeaderName = HeaderName::from_static("ibid-operation");

const ONCE: &str = "an operation runs once";
const REPLY: &str = "a call that ended well has a reply";

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
    /// `None` if the operation runs unprotected.
    lease: Option<&'a Lease>,
    heartbeat: Heartbeat<'a>,
    started: Instant,
    /// When the reply was complete.
    ended: Option<Instant>,
}

impl Exchange {
    /// Calls the app and reads its reply, while the lease is kept alive. Also returns when the run ended. A whole
    /// response goes to `state`.
    pub(super) async fn run<A, B>(
        &mut self, app: &mut A, state: &WorkState<A::Body>,
    ) -> (RunOutcome<AppAnswer>, Instant)
    where
        A: App<B>,
        B: Send + 'static,
    {
        let Self { shared, context, run, handler_claim, anonymous, buffers, parts, body, .. } = self;
        let started = run.as_ref().map_or_else(Instant::now, ClaimedRun::granted_at);
        let lease = run.as_ref().map(ClaimedRun::lease);
        let held = run.as_ref().map(|run| (run.lease(), run.claimed_at()));
        let intent = run.as_ref().and_then(ClaimedRun::intent);
        let heartbeat = shared.engine.heartbeat(context.policy().terms(), held, intent);
        let (handler_claim, anonymous) = (handler_claim.as_ref(), anonymous.as_deref());
        let buffers = buffers.as_mut().expect("the body was read");
        let mut call =
            Run { shared, context, handler_claim, anonymous, buffers, lease, heartbeat, started, ended: None };
        let (mut head, mut reply_body) = (None, pin!(None));
        let deadline = match call.send(app, parts, body, (&mut head, reply_body.as_mut()), state).await {
            Ok(deadline) => deadline,
            Err(outcome) => return (outcome, call.end()),
        };
        let reply = (head.as_mut().expect(REPLY), reply_body.as_mut().as_pin_mut().expect(REPLY));
        let outcome = call.read_reply(reply, deadline, state).await;
        (outcome, call.end())
    }
}

/// Where the head and the body of an app's reply are put. Futures on their way would move them.
type ReplySlot<'a, RB> = (&'a mut Option<response::Parts>, Pin<&'a mut Option<RB>>);

/// How a call of an app ended, or `None` if it panicked.
type CaughtCall = Option<Result<(), DispatchOutcome>>;

/// The outcome of a run without a reply.
fn check_received(sent: CaughtCall) -> Result<(), RunOutcome<AppAnswer>> {
    match sent {
        Some(Ok(())) => Ok(()),
        Some(Err(DispatchOutcome::NotSent(why))) => {
            Err(RunOutcome::NotStarted(Refusal::new(RefusalReason::UpstreamUnreachable, why)))
        }
        Some(Err(DispatchOutcome::ResponseLost(why))) => Err(lost(&why)),
        Some(Err(DispatchOutcome::TimedOut(why))) => {
            let refusal = Refusal::new(RefusalReason::UpstreamTimeout, why);
            Err(RunOutcome::Park(AppAnswer::Refused(Box::new(refusal)), UnknownCause::NoLateAnswer))
        }
        None => Err(RunOutcome::Park(AppAnswer::Panicked, UnknownCause::AppSaidSo)),
    }
}

impl Run<'_> {
    /// Puts the app's reply into its slot, and returns the deadline of its body. `Err` contains the outcome of a run
    /// without a reply.
    async fn send<A, B>(
        &mut self, app: &mut A, parts: &mut Option<Parts>, body: &mut ReadBody,
        (reply_head, mut reply_body): ReplySlot<'_, A::Body>, state: &WorkState<A::Body>,
    ) -> Result<Instant, RunOutcome<AppAnswer>>
    where
        A: App<B>,
    {
        let (context, policy, send_state) = (self.context, self.context.policy(), SendState::default());
        let (lease, claim, sending_state) = (self.lease, self.handler_claim, &send_state);
        // The call itself may panic before it returns a future. The request is built where it is needed: it is large.
        let mut sending = pin!(catch_panic(async move {
            let run = lease.map(RunInfo::of);
            let request = {
                prepare_headers(context, run, A::ADDS_HEADERS, &mut parts.as_mut().expect(ONCE).headers, body);
                let ReadBody { data, trailers, .. } = std::mem::take(body);
                let body = RequestBody::whole(data, trailers.map(|trailers| *trailers));
                Request::from_parts(parts.take().expect(ONCE), body)
            };
            let adds_request_id = A::ADDS_HEADERS && context.adds_request_id();
            let request_id = adds_request_id.then_some(&context.request_id);
            let call = AppCall { run, request_id, claim, send_state: Some(sending_state) };
            let (head, body) = app.send(request, call).await.map_err(|error| error.outcome)?.into_parts();
            *reply_head = Some(head);
            reply_body.set(Some(body));
            Ok(())
        }));
        let deadline = self.started + policy.timeout;
        let limit = (!A::HAS_OWN_DEADLINE).then_some(deadline);
        let sent = self.heartbeat.keep(limit, sending.as_mut()).await;
        match sent {
            // The app's own deadline is that of the response's head.
            Some(sent) if A::HAS_OWN_DEADLINE => check_received(sent).map(|()| Instant::now() + policy.timeout),
            Some(sent) => check_received(sent).map(|()| deadline),
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
        &mut self, sending: Pin<&mut impl Future<Output = CaughtCall>>, deadline: Instant, state: &WorkState<RB>,
    ) -> Result<Instant, RunOutcome<AppAnswer>> {
        let refusal = Refusal::new(RefusalReason::UpstreamTimeout, "no answer came in time");
        let late_answer = self.context.policy().late_answer_or_lease();
        let Some(lease) = self.lease.filter(|_| !late_answer.is_zero()) else {
            return Err(RunOutcome::Park(AppAnswer::Refused(Box::new(refusal)), UnknownCause::TimedOut));
        };
        // The client is refused now; the work continues in the background.
        self.context.set_run(self.started.elapsed(), Some(lease.attempt));
        self.context.set_late();
        state.respond_early(self.context.refuse_and_report(self.shared, &refusal));
        let waiting = Box::pin(self.shared.late_answers.wait(late_answer, sending));
        let sent = self.heartbeat.keep(None, pin!(waiting)).await.expect("it has no deadline");
        let sent = sent.map_err(|cause| RunOutcome::Park(AppAnswer::Refused(Box::new(refusal)), cause))?;
        check_received(sent).map(|()| deadline + late_answer)
    }

    /// Records how long the run took, and returns when it ended.
    fn end(&self) -> Instant {
        let ended = self.ended.unwrap_or_else(Instant::now);
        if self.shared.engine.is_observed() {
            self.context.set_run(ended - self.started, self.lease.map(|lease| lease.attempt));
        }
        ended
    }

    /// Reads the whole response and classifies it. The body must end before the deadline.
    async fn read_reply<RB>(
        &mut self, (parts, mut body): (&mut response::Parts, Pin<&mut RB>), deadline: Instant, state: &WorkState<RB>,
    ) -> RunOutcome<AppAnswer>
    where
        RB: Body<Data: Buf + Send, Error: Into<BoxError>> + Send + 'static,
    {
        if parts.status.is_informational() {
            return lost("the app answered with an upgrade that was not asked for");
        }
        let policy = self.context.policy();
        let cookies = self.anonymous.map(|anonymous| anonymous.cookies_set_by(parts)).unwrap_or_default();
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
                match Box::pin(self.stream(parts, begun, body.as_mut(), state)).await {
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
            let mut response = Response::new(ResponseBody::whole(whole, trailers.map(|trailers| *trailers)));
            (*response.status_mut(), *response.version_mut()) = (parts.status, parts.version);
            *response.headers_mut() = std::mem::take(&mut parts.headers);
            state.set_response(response);
        }
        match meaning {
            ReplyMeaning::Remember(completed) => RunOutcome::Complete(answer, completed),
            ReplyMeaning::Release => RunOutcome::Release(answer),
            ReplyMeaning::Unknown => RunOutcome::Park(answer, UnknownCause::AppSaidSo),
            ReplyMeaning::Incomplete(why) => lost(why),
        }
    }

    fn times(&self) -> RunTimes {
        let (requested_at_ms, ended) = (self.context.requested_at_ms, self.ended.unwrap_or(self.started));
        let completed_at_ms = requested_at_ms + (ended - self.context.started).as_millis() as u64;
        RunTimes { requested_at_ms, completed_at_ms, took: ended - self.started }
    }

    /// Responds while the body is still arriving.
    async fn stream<RB>(
        &mut self, parts: &response::Parts, begun: Bytes, body: Pin<&mut RB>, state: &WorkState<RB>,
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

/// Sets the headers of the request for an app, which may add those of the run itself.
fn prepare_headers(
    context: &RequestContext, run: Option<RunInfo>, app_adds_headers: bool, headers: &mut HeaderMap, body: &ReadBody,
) {
    // The stored response must be readable by every later client, whatever codings it accepts.
    let sent = &context.sent_names;
    for name in [header::ACCEPT_ENCODING, header::EXPECT].iter().filter(|name| sent.may_have(name)) {
        headers.remove(name);
    }
    if !app_adds_headers {
        headers.reserve(4);
    }
    if !app_adds_headers || !context.adds_request_id() {
        context.set_request_id(headers);
    }
    context.route.protocol.rules().prepare_request(headers, context.policy());
    if body.trailers.is_none()
        && sent.may_have(&header::TRANSFER_ENCODING)
        && headers.remove(header::TRANSFER_ENCODING).is_some()
    {
        headers.insert(header::CONTENT_LENGTH, body.data.len().into());
    }
    if let Some(run) = run.filter(|_| !app_adds_headers) {
        headers.insert(ATTEMPT_HEADER, header_value::from_number(run.attempt.into()));
        headers.insert(FENCE_HEADER, header_value::from_number(run.fence));
        headers.insert(OPERATION_HEADER, header_value::from_bytes(&run.operation.hex()));
    }
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
