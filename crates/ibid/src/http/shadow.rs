//! Shadow mode for a request: the app gets it unchanged, and the client gets the app's response unchanged.
//! [`Engine::observe`](crate::Engine::observe) finds out what enforcement would have done.
//!
//! The request's body is read before it is passed on, within the limits, because the fingerprint needs it. The
//! response's body is observed while it passes ([`ResponseTap`]).

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use bytes::{Buf, Bytes, BytesMut};
use http::{HeaderMap, Request, Response, StatusCode, header, request::Parts};
use http_body::{Body, Frame};
use sha2::{Digest, Sha256};
use tokio::time::Instant;
use tower_service::Service;

use super::{
    DispatchOutcome, LayerState, Protocol, Route, anonymous,
    body::{BoxError, RequestBody, ResponseBody},
    budget::MemoryReservation,
    client_response::ResponseContext,
    inner_response::{self, ResponseMeaning},
    read_body::{overloaded, read_body},
    request::{self, KeyedRequest, PreparedClaim, ReadBodyError},
    service::{self, NO_RESPONSE_STATUS, RequestContext},
};
use crate::{
    engine::{ShadowClaim, ShadowResult, ShadowRunOutcome},
    grpc::{self, GrpcStatusCode},
    key::mask,
    observe::{RequestOutcome, ShadowOutcome},
    record::RecordBody,
    refusal::Refusal,
    running::RunSlot,
    scope::{CallerKind, ScopePart},
    store::ClaimRequest,
};

/// Handles a request with a key in shadow mode.
pub(super) async fn handle_keyed<S, B, RB>(
    shared: Arc<LayerState>, mut inner: S, mut parts: Parts, body: B, keyed: KeyedRequest, mut seen: RequestContext,
) -> Option<Response<ResponseBody<RB>>>
where
    S: Service<Request<RequestBody<B>>, Response = Response<RB>, Future: Send> + Clone + Send + 'static,
    S::Error: Into<BoxError> + Send,
    B: Body<Data: Buf + Send, Error: Into<BoxError>> + Send + 'static,
    RB: Body<Data: Buf + Send, Error: Into<BoxError>> + Send + 'static,
{
    let route = seen.route.clone();
    let telling = service::response_context(&shared, &parts, route.protocol, &route.policy, seen.request_id.clone());
    let (body, would) = match plan(&shared, &parts, body, keyed, &mut seen, telling.requested_at_ms).await {
        Ok(looked) => looked,
        Err((status, detail)) => return Some(service::respond_to_incomplete_body(status, detail, &route, &telling)),
    };
    let would = match would {
        ShadowPlan::Claim(would) => would,
        ShadowPlan::Pass(outcome) => {
            if let Some(outcome) = outcome {
                seen.report(&shared, outcome, NO_RESPONSE_STATUS);
            }
            request::set_request_id(&mut parts.headers, &route.policy, &telling.request_id);
            return Some(service::pass_through(
                inner.call(Request::from_parts(parts, body)).await,
                &route.policy,
                &telling,
            ));
        }
    };
    let (started, answered) = (Instant::now(), ShadowRunReport::default());
    let observation = would.observe(&shared, &parts, seen, answered.clone());
    request::set_request_id(&mut parts.headers, &route.policy, &telling.request_id);
    let response = match inner.call(Request::from_parts(parts, body)).await {
        Ok(response) => response,
        failed => {
            observation.end(ShadowRunOutcome::Park);
            return Some(service::pass_through(failed, &route.policy, &telling));
        }
    };
    let (head, body) = response.into_parts();
    let finish = match head.extensions.get::<DispatchOutcome>() {
        Some(DispatchOutcome::NotSent(_)) => Some(ShadowRunOutcome::Release),
        Some(DispatchOutcome::ResponseLost(_)) => Some(ShadowRunOutcome::Park),
        None => head.status.is_informational().then_some(ShadowRunOutcome::Park),
    };
    if let Some(finish) = finish {
        let _ = answered.set((head.status.as_u16(), started.elapsed()));
        observation.end(finish);
        return Some(Response::from_parts(head, ResponseBody::untouched(body)));
    }
    let tap = ResponseTap {
        observation: Some(observation),
        run_report: answered,
        route,
        status: head.status,
        headers: head.headers.clone(),
        trailers: None,
        response_context: telling,
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

/// What enforcement would do before the claim.
enum ShadowPlan {
    Claim(Box<ShadowRequest>),
    /// Enforcement would not reach the claim. `None` for a body that arrives too slowly, which is not reported.
    Pass(Option<RequestOutcome>),
}

struct ShadowRequest {
    request: ClaimRequest,
    slot: RunSlot,
    buffers: MemoryReservation,
    body: Bytes,
    trailers: Option<HeaderMap>,
}

/// Reads the body and plans accordingly. `Err`: the body broke off, and there is nothing to pass on.
async fn plan<B>(
    shared: &Arc<LayerState>, parts: &Parts, body: B, keyed: KeyedRequest, seen: &mut RequestContext,
    requested_at_ms: u64,
) -> Result<(RequestBody<B>, ShadowPlan), (StatusCode, &'static str)>
where
    B: Body<Data: Buf, Error: Into<BoxError>>,
{
    let route = seen.route.clone();
    let refused =
        |refusal: &Refusal| ShadowPlan::Pass(Some(RequestOutcome::Shadow(ShadowOutcome::Refusal(refusal.reason))));
    let (body, trailers, buffers) = match read_body(shared, &route, &seen.client, parts, body).await {
        Ok(read) => read,
        Err(ReadBodyError::Malformed(status, detail)) => return Err((status, detail)),
        Err(ReadBodyError::TimedOut(begun, rest)) => {
            return Ok((RequestBody::begun(begun, rest), ShadowPlan::Pass(None)));
        }
        Err(ReadBodyError::Refused(refusal, begun, rest)) => {
            return Ok((RequestBody::begun(begun, rest), refused(&refusal)));
        }
    };
    let whole = RequestBody::whole(body.clone(), trailers.clone());
    let kind = keyed.caller;
    let asked = match request::check_signature(&route.policy, parts, &body) {
        Ok(()) => keyed.prepare_claim(shared, &route, parts, (&body, trailers.as_ref()), requested_at_ms),
        Err(refusal) => Err(refusal),
    };
    let asked = match asked {
        Ok(Some(asked)) => asked.choose_existing(shared, &route.policy).await.map(Some),
        asked => asked,
    };
    let PreparedClaim { request: ask, key, digests, .. } = match asked {
        Ok(Some(asked)) => asked,
        Ok(None) => return Ok((whole, ShadowPlan::Pass(Some(RequestOutcome::Keyless)))),
        Err(refusal) => return Ok((whole, refused(&refusal))),
    };
    if kind == CallerKind::CookiesOnly
        && let Err(refusal) =
            anonymous::check_cookies(shared, &parts.headers, &ask.address, Some(&ask.fingerprint)).await
    {
        return Ok((whole, refused(&refusal)));
    }
    let Some(slot) = shared.engine.running().try_enter(shared.settings.max_running) else {
        return Ok((whole, refused(&overloaded())));
    };
    (seen.address, seen.part_digests) = (Some(ask.address), digests);
    if seen.key.is_empty() {
        seen.key = mask(&key);
    }
    if route.policy.scope.iter().any(ScopePart::names_caller) {
        shared.shared_key_detector.check(&key, &ask.fingerprint, &ask.address);
    }
    Ok((whole, ShadowPlan::Claim(Box::new(ShadowRequest { request: ask, slot, buffers, body, trailers }))))
}

impl ShadowRequest {
    /// Claims in parallel to the run, and reports once it has ended.
    fn observe(
        self, shared: &Arc<LayerState>, parts: &Parts, seen: RequestContext, answered: ShadowRunReport,
    ) -> ShadowClaim {
        let Self { request: ask, slot, buffers, body, trailers } = self;
        let (mut compared, ()) = Request::new(()).into_parts();
        (compared.method, compared.uri, compared.headers) =
            (parts.method.clone(), parts.uri.clone(), parts.headers.clone());
        let route = seen.route.clone();
        let by_version = move |version| {
            let made = request::fingerprint(version, &route, &compared, (&body, trailers.as_ref())).ok()??;
            Some(made.0)
        };
        let (policy, shared) = (seen.route.policy.clone(), shared.clone());
        let engine = shared.engine.clone();
        let report = move |ShadowResult { outcome, attempt }| {
            let (status, took) = answered.get().copied().unwrap_or((NO_RESPONSE_STATUS, Duration::ZERO));
            seen.timings.set(took, attempt);
            seen.report(&shared, outcome, status);
            drop(buffers);
        };
        engine.observe(policy, ask, by_version, Some(slot), report)
    }
}

/// Observes a response and reports its outcome. If it is dropped before the end, the outcome is unknown.
#[derive(Debug)]
pub(super) struct ResponseTap {
    observation: Option<ShadowClaim>,
    run_report: ShadowRunReport,
    route: Arc<Route>,
    status: StatusCode,
    headers: HeaderMap,
    trailers: Option<HeaderMap>,
    response_context: ResponseContext,
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
            if self.length > self.route.policy.max_response {
                self.kept = None;
            } else if let Some(kept) = &mut self.kept {
                kept.extend_from_slice(data);
            }
        } else if let Some(trailers) = frame.trailers_ref() {
            self.trailers = Some(trailers.clone());
        }
        let is_whole = self.route.protocol == Protocol::Http && self.expected_length == Some(self.length);
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
        let route = self.route.clone();
        let (policy, trailers) = (&route.policy, self.trailers.as_ref());
        let (meaning, code) = match route.protocol {
            Protocol::Http => (inner_response::classify_status(policy, self.status), None),
            Protocol::Grpc => match grpc::status_of(&self.headers, trailers, self.length > 0) {
                Some(code) => (grpc::classify_code(policy, code), Some(code)),
                None => return (ShadowRunOutcome::Park, GrpcStatusCode::Unknown.outline()),
            },
        };
        let status = code.map_or(self.status.as_u16(), GrpcStatusCode::outline);
        // The coding was negotiated with this client; another client may not support it.
        let is_encoded = self.headers.contains_key(header::CONTENT_ENCODING);
        let body = match self.kept.take().filter(|_| !is_encoded) {
            Some(kept) => RecordBody::Whole(kept.freeze()),
            None => RecordBody::Digest { length: self.length, sha256: self.hash.finalize_reset().into() },
        };
        let finish = match meaning {
            ResponseMeaning::Release => ShadowRunOutcome::Release,
            ResponseMeaning::Unknown => ShadowRunOutcome::Park,
            ResponseMeaning::Remember => {
                let (mut head, ()) = Response::new(()).into_parts();
                (head.status, head.headers) = (self.status, std::mem::take(&mut self.headers));
                let (requested, started) = (self.response_context.requested_at_ms, self.started);
                ShadowRunOutcome::Complete(self.response_context.compress(match code {
                    None => {
                        inner_response::completed_answer(policy, &head, body, trailers, Vec::new(), requested, started)
                    }
                    Some(code) => grpc::completed_answer(policy, &head, code, body, trailers, requested, started),
                }))
            }
        };
        (finish, status)
    }
}
