//! Shadow mode for a request: the app gets it unchanged, and the client gets the app's response unchanged.
//! [`Engine::observe`](crate::Engine::observe) finds out what enforcement would have done.
//!
//! The request's body is read before it is passed on, within the limits, because the fingerprint needs it. The
//! response's body is observed while it passes ([`ResponseTap`]).

use std::{
    fmt,
    sync::{Arc, OnceLock},
    time::Duration,
};

use bytes::{Buf, Bytes, BytesMut};
use http::{HeaderMap, Request, Response, StatusCode, header, request::Parts};
use http_body::{Body, Frame};
use sha2::{Digest, Sha256};
use tokio::time::Instant;

use super::{
    LayerState,
    app::{App, AppCall, AppError, DispatchOutcome},
    body::{BoxError, ResponseBody},
    budget::MemoryReservation,
    context::{NO_RESPONSE_STATUS, RequestContext},
    exchange::{self, Exchange, NotClaimedReason},
    future::WorkState,
    request, service,
};
use crate::{
    engine::{ShadowClaim, ShadowResult, ShadowRunOutcome},
    observe::{RequestOutcome, ShadowOutcome},
    protocol::{AppReply, ReplyMeaning, RunTimes},
    record::RecordBody,
    running::RunSlot,
    store::ClaimRequest,
};

/// Handles a request with a key in shadow mode. The response goes to `state`.
pub(super) async fn handle_keyed<A, B>(exchange: Box<Exchange>, app: A, body: B, state: Arc<WorkState<A::Body>>)
where
    A: App<B>,
    B: Body<Data: Buf + Send, Error: Into<BoxError>> + Send + 'static,
{
    state.set_response(respond(exchange, app, body).await);
}

async fn respond<A, B>(mut exchange: Box<Exchange>, mut app: A, body: B) -> Response<ResponseBody<A::Body>>
where
    A: App<B>,
    B: Body<Data: Buf + Send, Error: Into<BoxError>> + Send + 'static,
{
    let mut body = Box::pin(body);
    exchange.others.clear();
    if let Err(why) = exchange.prepare(body.as_mut()).await {
        let Exchange { shared, context, .. } = &*exchange;
        match why {
            NotClaimedReason::Malformed(detail) => {
                return exchange::incomplete_body(StatusCode::BAD_REQUEST, detail, context);
            }
            // A body that arrives too slowly is not reported.
            NotClaimedReason::TimedOut => {}
            NotClaimedReason::Keyless => context.report(shared, RequestOutcome::Keyless, NO_RESPONSE_STATUS),
            NotClaimedReason::Refused(refusal) => {
                let outcome = RequestOutcome::Shadow(ShadowOutcome::Refusal(refusal.reason));
                context.report(shared, outcome, NO_RESPONSE_STATUS);
            }
        }
        let response = app.pass(exchange.take_unclaimed(Some(body))).await;
        return service::pass_through(response, &exchange.context);
    }
    let (started, run_report) = (Instant::now(), ShadowRunReport::default());
    let (shared, observed) = (exchange.shared.clone(), exchange.take_observed());
    let request = exchange.take_unclaimed(None);
    let Exchange { context, keyed, .. } = *exchange;
    let context = Arc::new(*context);
    let claim = keyed.claim(&context, &observed.parts);
    let observation = observe(&shared, claim, observed, context.clone(), run_report.clone());
    let call = AppCall { run: None, request_id: None, claim: None, send_state: None };
    let response = match app.send(request, call).await {
        Ok(response) => response,
        Err(AppError { outcome, response }) => {
            if let Some(response) = &response {
                let _ = run_report.set((response.status().as_u16(), started.elapsed()));
            }
            observation.end(match outcome {
                DispatchOutcome::NotSent(_) => ShadowRunOutcome::Release,
                DispatchOutcome::ResponseLost(_) | DispatchOutcome::TimedOut(_) => ShadowRunOutcome::Park,
            });
            return service::pass_through(response.ok_or(()), &context);
        }
    };
    let (head, body) = response.into_parts();
    if head.status.is_informational() {
        let _ = run_report.set((head.status.as_u16(), started.elapsed()));
        observation.end(ShadowRunOutcome::Park);
        return Response::from_parts(head, ResponseBody::untouched(body));
    }
    let tap = ResponseTap {
        observation: Some(observation),
        run_report,
        shared,
        context,
        status: head.status,
        headers: head.headers.clone(),
        trailers: None,
        started,
        expected_length: body.size_hint().exact(),
        length: 0,
        hash: Sha256::new(),
        kept: Some(BytesMut::new()),
    };
    Response::from_parts(head, ResponseBody::with_tap(body, Box::new(tap)))
}

/// Status and duration of the run, for the report.
type ShadowRunReport = Arc<OnceLock<(u16, Duration)>>;

/// What the observation of a request needs of it while the app has it.
struct ObservedRequest {
    parts: Parts,
    body: Bytes,
    trailers: Option<Box<HeaderMap>>,
    buffers: Option<MemoryReservation>,
    slot: Option<RunSlot>,
}

impl Exchange {
    fn take_observed(&mut self) -> ObservedRequest {
        let (mut parts, ()) = Request::new(()).into_parts();
        let sent = self.parts.as_ref().expect("it was not sent yet");
        (parts.method, parts.uri, parts.headers) = (sent.method.clone(), sent.uri.clone(), sent.headers.clone());
        let (body, trailers) = (self.body.data.clone(), self.body.trailers.clone());
        ObservedRequest { parts, body, trailers, buffers: self.buffers.take(), slot: self.slot.take() }
    }
}

/// Claims in parallel to the run, and reports once it has ended.
fn observe(
    shared: &Arc<LayerState>, claim: ClaimRequest, request: ObservedRequest, context: Arc<RequestContext>,
    run_report: ShadowRunReport,
) -> ShadowClaim {
    let ObservedRequest { parts, body, trailers, buffers, slot } = request;
    let compared = context.clone();
    let by_version = move |version| {
        let made = request::fingerprint(version, &compared, &parts, (&body, trailers.as_deref())).ok()??;
        Some(made.0)
    };
    let (terms, shared) = (*context.policy().terms(), shared.clone());
    let engine = shared.engine.clone();
    let report = move |ShadowResult { outcome, attempt }| {
        let (status, took) = run_report.get().copied().unwrap_or((NO_RESPONSE_STATUS, Duration::ZERO));
        context.set_run(took, attempt);
        context.report(&shared, outcome, status);
        drop(buffers);
    };
    engine.observe(terms, claim, by_version, slot, report)
}

/// Observes a response and reports its outcome. If it is dropped before the end, the outcome is unknown.
pub(super) struct ResponseTap {
    observation: Option<ShadowClaim>,
    run_report: ShadowRunReport,
    shared: Arc<LayerState>,
    context: Arc<RequestContext>,
    status: StatusCode,
    headers: HeaderMap,
    trailers: Option<HeaderMap>,
    started: Instant,
    /// The length of the body, if it is known: servers do not always poll for the end after the last byte.
    expected_length: Option<u64>,
    length: u64,
    hash: Sha256,
    /// The whole body, while it is short enough to store.
    kept: Option<BytesMut>,
}

impl ResponseTap {
    /// Observes one frame; `is_last` if the body reports its end.
    pub(super) fn observe_frame(&mut self, frame: &Frame<Bytes>, is_last: bool) {
        if let Some(data) = frame.data_ref() {
            self.length += data.len() as u64;
            self.hash.update(data);
            if self.length > self.context.policy().max_response {
                self.kept = None;
            } else if let Some(kept) = &mut self.kept {
                kept.extend_from_slice(data);
            }
        } else if let Some(trailers) = frame.trailers_ref() {
            self.trailers = Some(trailers.clone());
        }
        let is_whole = self.context.route.protocol.rules().is_plain_http() && self.expected_length == Some(self.length);
        if is_last || is_whole {
            self.finish();
        }
    }

    /// Called at the end of the body.
    pub(super) fn finish(&mut self) {
        let Some(observation) = self.observation.take() else { return };
        let (finish, status) = self.outcome();
        let _ = self.run_report.set((status, self.started.elapsed()));
        observation.end(finish);
    }

    /// Classifies the response. Also returns its status for operators.
    fn outcome(&mut self) -> (ShadowRunOutcome, u16) {
        let rules = self.context.route.protocol.rules();
        // The coding was negotiated with this client; another client may not support it.
        let is_encoded = self.headers.contains_key(header::CONTENT_ENCODING);
        let body = match self.kept.take().filter(|_| !is_encoded) {
            Some(kept) => RecordBody::Whole(kept.freeze()),
            None => RecordBody::Digest { length: self.length, sha256: self.hash.finalize_reset().into() },
        };
        let (status, headers, trailers) = (self.status, &self.headers, self.trailers.as_ref());
        let (cookies, times) = (Vec::new(), RunTimes::ending_now(self.context.requested_at_ms, self.started));
        let reply = AppReply { status, headers, body, trailers, cookies, times };
        let status = rules.status(status, headers, trailers);
        match rules.judge(self.context.policy(), reply) {
            ReplyMeaning::Remember(mut answer) => {
                self.shared.compress(&mut answer);
                (ShadowRunOutcome::Complete(answer), status)
            }
            ReplyMeaning::Release => (ShadowRunOutcome::Release, status),
            ReplyMeaning::Unknown => (ShadowRunOutcome::Park, status),
            ReplyMeaning::Incomplete(_) => {
                (ShadowRunOutcome::Park, rules.status(self.status, &HeaderMap::new(), trailers))
            }
        }
    }
}

impl fmt::Debug for ResponseTap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseTap")
            .field("status", &self.status)
            .field("length", &self.length)
            .finish_non_exhaustive()
    }
}
