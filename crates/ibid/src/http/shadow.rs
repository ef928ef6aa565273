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
    body::{BoxError, RequestBody, ResponseBody},
    context::{NO_RESPONSE_STATUS, RequestContext},
    exchange::{self, KeyedHead, NotClaimed, NotClaimedReason, PreparedExchange},
    request, service,
};
use crate::{
    engine::{ShadowClaim, ShadowResult, ShadowRunOutcome},
    observe::{RequestOutcome, ShadowOutcome},
    protocol::{AppReply, ReplyMeaning},
    record::RecordBody,
};

/// Handles a request with a key in shadow mode.
pub(super) async fn handle_keyed<A, B>(
    shared: Arc<LayerState>, mut app: A, mut parts: Parts, body: B, head: KeyedHead,
) -> Option<Response<ResponseBody<A::Body>>>
where
    A: App<B>,
    B: Body<Data: Buf + Send, Error: Into<BoxError>> + Send + 'static,
{
    let KeyedHead { mut context, keyed, .. } = head;
    let prepared = match exchange::prepare(&shared, &parts, body, keyed, Vec::new(), &mut context).await {
        Ok(prepared) => prepared,
        Err(NotClaimed { why, body }) => {
            match why {
                NotClaimedReason::Malformed(detail) => {
                    return Some(exchange::incomplete_body(StatusCode::BAD_REQUEST, detail, &context));
                }
                // A body that arrives too slowly is not reported.
                NotClaimedReason::TimedOut => {}
                NotClaimedReason::Keyless => context.report(&shared, RequestOutcome::Keyless, NO_RESPONSE_STATUS),
                NotClaimedReason::Refused(refusal) => {
                    let outcome = RequestOutcome::Shadow(ShadowOutcome::Refusal(refusal.reason));
                    context.report(&shared, outcome, NO_RESPONSE_STATUS);
                }
            }
            context.set_request_id(&mut parts.headers);
            return Some(service::pass_through(app.pass(Request::from_parts(parts, body)).await, &context));
        }
    };
    let (started, run_report) = (Instant::now(), ShadowRunReport::default());
    let context: Arc<RequestContext> = Arc::from(context);
    let body = RequestBody::whole(prepared.body.clone(), prepared.trailers.clone());
    let observation = observe(&shared, prepared, &parts, context.clone(), run_report.clone());
    context.set_request_id(&mut parts.headers);
    let call = AppCall { run: None, claim: None, send_state: None };
    let response = match app.send(Request::from_parts(parts, body), call).await {
        Ok(response) => response,
        Err(AppError { outcome, response }) => {
            if let Some(response) = &response {
                let _ = run_report.set((response.status().as_u16(), started.elapsed()));
            }
            observation.end(match outcome {
                DispatchOutcome::NotSent(_) => ShadowRunOutcome::Release,
                DispatchOutcome::ResponseLost(_) | DispatchOutcome::TimedOut(_) => ShadowRunOutcome::Park,
            });
            return Some(service::pass_through(response.ok_or(()), &context));
        }
    };
    let (head, body) = response.into_parts();
    if head.status.is_informational() {
        let _ = run_report.set((head.status.as_u16(), started.elapsed()));
        observation.end(ShadowRunOutcome::Park);
        return Some(Response::from_parts(head, ResponseBody::untouched(body)));
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
    Some(Response::from_parts(head, ResponseBody::with_tap(body, Box::new(tap))))
}

/// Status and duration of the run, for the report.
type ShadowRunReport = Arc<OnceLock<(u16, Duration)>>;

/// Claims in parallel to the run, and reports once it has ended.
fn observe(
    shared: &Arc<LayerState>, prepared: PreparedExchange, parts: &Parts, context: Arc<RequestContext>,
    run_report: ShadowRunReport,
) -> ShadowClaim {
    let PreparedExchange { identity, keyed, slot, buffers, body, trailers } = prepared;
    let request = keyed.claim(&identity, &context, parts);
    let (mut compared, ()) = Request::new(()).into_parts();
    (compared.method, compared.uri, compared.headers) =
        (parts.method.clone(), parts.uri.clone(), parts.headers.clone());
    let route = context.route.clone();
    let by_version = move |version| {
        let made = request::fingerprint(version, &route, &compared, (&body, trailers.as_ref())).ok()??;
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
    engine.observe(terms, request, by_version, Some(slot), report)
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
        let (cookies, requested_at_ms, started) = (Vec::new(), self.context.requested_at_ms, self.started);
        let reply = AppReply { status, headers, body, trailers, cookies, requested_at_ms, started };
        let status = rules.status(status, headers, trailers);
        match rules.judge(self.context.policy(), reply) {
            ReplyMeaning::Remember(answer) => (ShadowRunOutcome::Complete(self.shared.compress(answer)), status),
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
