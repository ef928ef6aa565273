//! The path of a request through the layer.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Buf;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header, request::Parts};
use http_body::Body;
use tokio::time::Instant;
use tower_service::Service;

use super::{
    LayerState, PeerAddress, Protocol, Route, RouteMatch, Routing,
    anonymous::{self, AnonymousCaller},
    body::{BoxError, RequestBody, ResponseBody},
    budget::{BudgetClient, BudgetExhausted},
    client_response::{self, ResponseContext},
    cors::{Cors, Preflight},
    forwarded::client_address,
    future::{PreflightPatch, RequestWork, ResponseFuture, WorkState},
    inner_response::StreamTail,
    key_headers,
    operation::{HttpOperation, HttpRunResponse},
    poll_hook::{HookedFuture, PollHook},
    read_body::{overloaded, read_body},
    refusal_style,
    request::{self, HeadCheck, KeyedRequest, PreparedClaim, ReadBodyError},
    request_id::UnderRequestId,
    shadow,
};
use crate::{
    engine::{Decision, StoredAs},
    fingerprint::PartDigests,
    grpc::{self, GrpcStatusCode},
    key::mask,
    observe::{EngineEvent, RequestOutcome, RequestReport, ShadowOutcome},
    policy::{Policy, PolicyMode},
    record::Record,
    refusal::{Refusal, RefusalReason},
    scope::{CallerKind, ScopePart},
    store::{Address, CompletedEntry},
    time::now_ms,
};

/// Responses up to this size in bytes are not counted: they need less memory than the request's own task.
const MAX_UNCOUNTED_RESPONSE_BYTES: u64 = 4 << 10;
/// The status in reports that precede the response.
pub(super) const NO_RESPONSE_STATUS: u16 = 100;

/// Timings of the run, set by the operation.
#[derive(Debug, Default)]
pub(super) struct RunTimings {
    /// The duration, and the number of the run.
    duration_and_attempt: OnceLock<(Duration, Option<u32>)>,
    /// The client was refused after `timeout`, and the answer is still awaited.
    is_late: AtomicBool,
}

impl RunTimings {
    /// Keeps the first value. For a late run, that is the time until its client was refused.
    pub(super) fn set(&self, took: Duration, attempt: Option<u32>) {
        let _ = self.duration_and_attempt.set((took, attempt));
    }

    pub(super) fn set_late(&self) {
        self.is_late.store(true, Relaxed);
    }

    pub(super) fn is_late(&self) -> bool {
        self.is_late.load(Relaxed)
    }
}

/// The data for the report about one request.
pub(super) struct RequestContext {
    pub(super) route: Arc<Route>,
    method: http::Method,
    uri: http::Uri,
    pub(super) key: String,
    pub(super) address: Option<Address>,
    pub(super) part_digests: Option<PartDigests>,
    peer: Option<std::net::IpAddr>,
    pub(super) client: BudgetClient,
    user_agent: Option<HeaderValue>,
    pub(super) request_id: HeaderValue,
    started: Instant,
    pub(super) timings: RunTimings,
}

pub(super) fn call<S, B, RB>(
    shared: &Arc<LayerState>, routing: &dyn Routing, mut inner: S, request: Request<B>,
) -> ResponseFuture<S::Future, RB>
where
    S: Service<Request<RequestBody<B>>, Response = Response<RB>, Future: Send> + Clone + Send + 'static,
    S::Error: Into<BoxError> + Send,
    B: Body<Data: Buf + Send, Error: Into<BoxError>> + Send + 'static,
    RB: Body<Data: Buf + Send, Error: Into<BoxError>> + Send + 'static,
{
    let (mut parts, body) = request.into_parts();
    let (route, also) = match routing.route(&parts) {
        RouteMatch::Covered { route, alternatives: also } => (route, also),
        RouteMatch::UnknownCall(route) => return handle_unknown_call(shared, inner, parts, body, &route),
        routed @ (RouteMatch::NotCovered | RouteMatch::UncoveredKey) => {
            if let RouteMatch::UncoveredKey = routed {
                let notice = EngineEvent::UncoveredKey { method: parts.method.as_str(), path: parts.uri.path() };
                shared.engine.observer().on_event(&notice);
            }
            let preflight = preflight_patch(shared, routing, &parts);
            let request = Request::from_parts(parts, RequestBody::untouched(body));
            return ResponseFuture::pass_through(inner.call(request), preflight);
        }
        RouteMatch::Refused(refusal) => {
            let policy = Policy { refusals: routing.refusals(&parts), ..Policy::ietf() };
            let protocol = if grpc::is_call(parts.version, &parts.headers) { Protocol::Grpc } else { Protocol::Http };
            let mut telling = response_context(shared, &parts, protocol, &policy, request::request_id(&parts.headers));
            return ResponseFuture::ready(client_response::refusal_with_context(&refusal, &policy, "", &mut telling));
        }
    };
    let (route, keyed, others) = request::choose_route(shared, route, also, &parts);
    strip_own_headers(&mut parts.headers, &route.policy);
    let mut seen = RequestContext::of(shared, &route, &parts);
    match keyed {
        HeadCheck::Keyless => {
            seen.set_request_id(&mut parts.headers);
            seen.report(shared, RequestOutcome::Keyless, NO_RESPONSE_STATUS);
            let future = inner.call(Request::from_parts(parts, RequestBody::untouched(body)));
            match route.policy.mode {
                PolicyMode::Shadow => ResponseFuture::pass_through(future, None),
                PolicyMode::Enforce | PolicyMode::Off => ResponseFuture::keyless(future, route),
            }
        }
        HeadCheck::Refused(refusal, _) if route.policy.mode == PolicyMode::Shadow => {
            seen.set_request_id(&mut parts.headers);
            seen.report(shared, RequestOutcome::Shadow(ShadowOutcome::Refusal(refusal.reason)), NO_RESPONSE_STATUS);
            ResponseFuture::pass_through(inner.call(Request::from_parts(parts, RequestBody::untouched(body))), None)
        }
        HeadCheck::Refused(refusal, masked) => {
            seen.key = masked;
            let mut telling = response_context(shared, &parts, route.protocol, &route.policy, seen.request_id.clone());
            let answer = client_response::refusal_with_context(&refusal, &route.policy, &seen.key, &mut telling);
            seen.report(shared, RequestOutcome::Refused(refusal.reason), seen.status(&answer));
            ResponseFuture::ready(answer)
        }
        HeadCheck::Keyed(keyed) => {
            shared.sweeper.start(&shared.engine);
            seen.key = keyed.masked();
            let side = WorkState::new();
            let around = parts.extensions.get::<PollHook>().cloned();
            let id = seen.request_id.clone();
            let mut work: RequestWork<RB> = if route.policy.mode == PolicyMode::Shadow {
                Box::pin(UnderRequestId::new(id, shadow::handle_keyed(shared.clone(), inner, parts, body, keyed, seen)))
            } else {
                let work = handle_keyed(shared.clone(), inner, parts, body, keyed, others, seen, side.clone());
                Box::pin(UnderRequestId::new(id, work))
            };
            if let Some(around) = around {
                work = Box::pin(HookedFuture { work, hook: around });
            }
            ResponseFuture::covered(work, side, shared.engine.running().clone())
        }
    }
}

/// Handles a gRPC call that may be a stream and therefore cannot be claimed.
fn handle_unknown_call<S, B, RB>(
    shared: &LayerState, mut inner: S, mut parts: Parts, body: B, route: &Arc<Route>,
) -> ResponseFuture<S::Future, RB>
where
    S: Service<Request<RequestBody<B>>, Response = Response<RB>>,
{
    let policy = &route.policy;
    let seen = RequestContext::of(shared, route, &parts);
    let is_protected = policy.key.required || request::carries_key(policy, &parts.uri, &parts.headers);
    if is_protected && policy.mode == PolicyMode::Enforce {
        let detail = format!(
            "whether {} is a unary method is not known, so the call cannot be protected; name it in a route (match = \
             \"grpc package.Service/Method\"), set descriptors to a file or \"reflection\", or let such calls pass \
             unprotected with grpc_unknown = \"pass\"",
            parts.uri.path()
        );
        let refusal = Refusal::new(RefusalReason::MethodUnknown, detail);
        let answer = grpc::refusal_with_masked_key(&refusal, policy, "");
        seen.report(shared, RequestOutcome::Refused(refusal.reason), seen.call_status(answer.headers(), None));
        return ResponseFuture::ready(answer);
    }
    let outcome = if is_protected {
        RequestOutcome::Shadow(ShadowOutcome::Refusal(RefusalReason::MethodUnknown))
    } else {
        RequestOutcome::Keyless
    };
    seen.report(shared, outcome, NO_RESPONSE_STATUS);
    strip_own_headers(&mut parts.headers, policy);
    seen.set_request_id(&mut parts.headers);
    ResponseFuture::pass_through(inner.call(Request::from_parts(parts, RequestBody::untouched(body))), None)
}

/// Handles a request with a key. After `side.mark_claimed()`, the work runs to its end even if the client leaves.
#[expect(clippy::manual_async_fn, reason = "an async fn would hold its arguments twice")]
#[allow(clippy::too_many_arguments)]
fn handle_keyed<S, B, RB>(
    shared: Arc<LayerState>, mut inner: S, mut parts: Parts, body: B, mut keyed: KeyedRequest,
    others: Vec<(Arc<Route>, KeyedRequest)>, mut seen: RequestContext, side: Arc<WorkState<RB>>,
) -> impl Future<Output = Option<Response<ResponseBody<RB>>>> + Send
where
    S: Service<Request<RequestBody<B>>, Response = Response<RB>, Future: Send> + Clone + Send + 'static,
    S::Error: Into<BoxError> + Send,
    B: Body<Data: Buf + Send, Error: Into<BoxError>> + Send + 'static,
    RB: Body<Data: Buf + Send, Error: Into<BoxError>> + Send + 'static,
{
    async move {
        let route = seen.route.clone();
        let policy = &route.policy;
        let mut telling = response_context(&shared, &parts, route.protocol, policy, seen.request_id.clone());
        let deadline = if route.protocol == Protocol::Grpc { grpc::deadline(&parts.headers) } else { None };
        // Check before reading the body if the key is already known: most of these requests are refused.
        if let Some(at) = keyed.cookies_only_at(&shared, policy)
            && let Err(refusal) = Box::pin(anonymous::check_cookies(&shared, &parts.headers, &at, None)).await
        {
            return Some(refuse_and_report(&shared, &refusal, &seen, &mut telling));
        }
        let (body, trailers, buffers) = match read_body(&shared, &route, &seen.client, &parts, body).await {
            Ok(read) => read,
            Err(ReadBodyError::Malformed(status, detail)) => {
                return Some(respond_to_incomplete_body(status, detail, &route, &telling));
            }
            Err(ReadBodyError::TimedOut(..)) => {
                return Some(respond_to_incomplete_body(
                    StatusCode::REQUEST_TIMEOUT,
                    "the body did not arrive in time",
                    &route,
                    &telling,
                ));
            }
            Err(ReadBodyError::Refused(refusal, ..)) => {
                return Some(refuse_and_report(&shared, &refusal, &seen, &mut telling));
            }
        };
        // Routes in shadow mode require nothing and do not govern.
        let others: Vec<_> = others.into_iter().filter(|(other, _)| other.policy.mode == PolicyMode::Enforce).collect();
        let mut signed =
            std::iter::once(&route).chain(others.iter().map(|(other, _)| other)).map(|route| &route.policy);
        if let Err(refusal) = signed.try_for_each(|policy| request::check_signature(policy, &parts, &body)) {
            return Some(refuse_and_report(&shared, &refusal, &seen, &mut telling));
        }
        let (content, mut others) = ((&*body, trailers.as_ref()), others.into_iter());
        let asked = loop {
            match (keyed.prepare_claim(&shared, &seen.route, &parts, content, telling.requested_at_ms), others.next()) {
                // The body contains no key under this route: try the next one.
                (Ok(None), Some((other, next))) => (seen.route, keyed) = (other, next),
                (asked, _) => break asked,
            }
        };
        let route = seen.route.clone();
        let policy = &route.policy;
        telling.protocol = route.protocol;
        let kind = keyed.caller;
        let asked = match asked {
            Ok(Some(asked)) if asked.legacy.is_some() => {
                Box::pin(asked.choose_existing(&shared, policy)).await.map(Some)
            }
            asked => asked,
        };
        let PreparedClaim { request: ask, key, digests, .. } = match asked {
            Ok(Some(asked)) => asked,
            Ok(None) => {
                seen.report(&shared, RequestOutcome::Keyless, NO_RESPONSE_STATUS);
                seen.set_request_id(&mut parts.headers);
                let request = Request::from_parts(parts, RequestBody::whole(body, trailers));
                return Some(pass_through(inner.call(request).await, policy, &telling));
            }
            Err(refusal) => {
                if seen.key.is_empty() {
                    seen.key = request::refused_key(policy, &parts, &body);
                }
                return Some(refuse_and_report(&shared, &refusal, &seen, &mut telling));
            }
        };
        // Only after the body is complete, so that slow senders do not occupy slots.
        let Some(_slot) = shared.engine.running().try_enter(shared.settings.max_running) else {
            return Some(refuse_and_report(&shared, &overloaded(), &seen, &mut telling));
        };
        seen.address = Some(ask.address);
        seen.part_digests = digests;
        if seen.key.is_empty() {
            seen.key = mask(&key);
        }
        let (at, same) = (ask.address, Some(&ask.fingerprint));
        if kind == CallerKind::CookiesOnly
            && let Err(refusal) = Box::pin(anonymous::check_cookies(&shared, &parts.headers, &at, same)).await
        {
            return Some(refuse_and_report(&shared, &refusal, &seen, &mut telling));
        }
        let anonymous = AnonymousCaller::of(kind, &ask, policy, shared.settings.address_secret.as_ref());
        if policy.scope.iter().any(ScopePart::names_caller) {
            shared.shared_key_detector.check(&key, &ask.fingerprint, &ask.address);
        }
        side.mark_claimed();
        let operation = HttpOperation {
            shared: &shared,
            context: &seen,
            inner,
            request: Some((parts, body, trailers)),
            key,
            route: route.clone(),
            work_state: side,
            response_context: telling.clone(),
            buffers,
            deadline,
            anonymous: anonymous.clone(),
            _body: std::marker::PhantomData::<fn(B)>,
        };
        let verdict = shared.engine.execute(policy, ask, operation).await;
        if let Some(anonymous) = anonymous.filter(|caller| caller.has_unrecorded()) {
            Box::pin(anonymous.store_cookies(&shared.engine)).await;
        }
        if seen.timings.is_late() {
            let notice = EngineEvent::LateAnswer { address: &at, outcome: late_outcome(&verdict) };
            shared.engine.observer().on_event(&notice);
            return None;
        }
        respond(&shared, verdict, &seen, &mut telling).await
    }
}

fn late_outcome<RB>(verdict: &Decision<HttpRunResponse<RB>>) -> RequestOutcome {
    match verdict {
        Decision::Ran(_, stored) => request_outcome(*stored),
        Decision::Replay(..) => RequestOutcome::Replayed,
        Decision::Refused(refusal) => RequestOutcome::Refused(refusal.reason),
    }
}

/// Builds the response for a decision. Returns `None` if the client already has it.
async fn respond<RB>(
    shared: &LayerState, verdict: Decision<HttpRunResponse<RB>>, seen: &RequestContext, telling: &mut ResponseContext,
) -> Option<Response<ResponseBody<RB>>> {
    let policy = &seen.route.policy;
    let (answer, outcome) = match verdict {
        Decision::Ran(HttpRunResponse::Whole(answer, whole), stored) => {
            let mut answer = client_response::first_response(answer, Some(whole), policy, Some(stored), telling);
            let length = answer.body().whole_length();
            if length > MAX_UNCOUNTED_RESPONSE_BYTES {
                let reservation = shared.budget.send(&seen.client);
                reservation.count(length);
                answer.body_mut().attach_reservation(reservation);
            }
            (answer, request_outcome(stored))
        }
        Decision::Ran(HttpRunResponse::Tail(tail), stored) => {
            let status = seen.tail_status(&tail);
            Box::pin(tail.send()).await;
            seen.report(shared, request_outcome(stored), status);
            return None;
        }
        Decision::Ran(HttpRunResponse::Refused(refusal), stored) => {
            (client_response::refusal_with_context(&refusal, policy, &seen.key, telling), request_outcome(stored))
        }
        Decision::Ran(HttpRunResponse::Panicked, stored) => {
            let detail = "the handler failed; whether the operation took place is not known";
            (
                client_response::plain_with_context(StatusCode::INTERNAL_SERVER_ERROR, detail, policy, telling),
                request_outcome(stored),
            )
        }
        Decision::Replay(finished, stored) => match read_record(shared, finished, seen) {
            Ok(record) => {
                let mut answer = client_response::replay_response(record, policy, stored, telling);
                let length = answer.body().whole_length();
                let reservation = match length > MAX_UNCOUNTED_RESPONSE_BYTES {
                    true => Some(Box::pin(shared.budget.answer(&seen.client, length)).await),
                    false => None,
                };
                match reservation {
                    Some(Err(BudgetExhausted)) => {
                        let refusal = overloaded();
                        let outcome = RequestOutcome::Refused(refusal.reason);
                        (client_response::refusal_with_context(&refusal, policy, &seen.key, telling), outcome)
                    }
                    reservation => {
                        reservation.into_iter().flatten().for_each(|held| answer.body_mut().attach_reservation(held));
                        (answer, RequestOutcome::Replayed)
                    }
                }
            }
            Err(refusal) => (
                client_response::refusal_with_context(&refusal, policy, &seen.key, telling),
                RequestOutcome::Refused(refusal.reason),
            ),
        },
        Decision::Refused(refusal) => (
            client_response::refusal_with_context(&refusal, policy, &seen.key, telling),
            RequestOutcome::Refused(refusal.reason),
        ),
    };
    seen.report(shared, outcome, seen.status(&answer));
    Some(answer)
}

fn read_record(shared: &LayerState, finished: CompletedEntry, seen: &RequestContext) -> Result<Record, Refusal> {
    let at = seen.address.expect("what was found has an address");
    Record::decode(shared.shared_records.share(&at, finished.record)).map_err(|why| {
        shared.engine.observer().on_event(&EngineEvent::RecordUnreadable(&at));
        Refusal::new(RefusalReason::StoreUnavailable, format!("the remembered answer cannot be read: {why}"))
    })
}

fn request_outcome(stored: StoredAs) -> RequestOutcome {
    match stored {
        StoredAs::Recorded => RequestOutcome::Executed,
        StoredAs::NotRecorded => RequestOutcome::Released,
        StoredAs::Pending => RequestOutcome::Pending,
        StoredAs::OutcomeUnknown => RequestOutcome::Unknown,
        StoredAs::Unprotected | StoredAs::FrontOnly => RequestOutcome::Degraded,
    }
}

/// Refuses a request and reports it.
pub(super) fn refuse_and_report<RB>(
    shared: &LayerState, refusal: &Refusal, seen: &RequestContext, telling: &mut ResponseContext,
) -> Response<ResponseBody<RB>> {
    let answer = client_response::refusal_with_context(refusal, &seen.route.policy, &seen.key, telling);
    seen.report(shared, RequestOutcome::Refused(refusal.reason), seen.status(&answer));
    answer
}

/// Responds to an incomplete body. The connection must close, because the next request cannot be told from the rest of
/// the body.
pub(super) fn respond_to_incomplete_body<RB>(
    status: StatusCode, detail: &str, route: &Route, telling: &ResponseContext,
) -> Response<ResponseBody<RB>> {
    let mut answer = client_response::plain_with_context(status, detail, &route.policy, telling);
    if route.protocol == Protocol::Http {
        answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    answer
}

pub(super) fn pass_through<RB, E>(
    response: Result<Response<RB>, E>, policy: &Policy, telling: &ResponseContext,
) -> Response<ResponseBody<RB>> {
    match response {
        Ok(response) => response.map(ResponseBody::untouched),
        Err(_) => {
            client_response::plain_with_context(StatusCode::BAD_GATEWAY, "the app could not answer", policy, telling)
        }
    }
}

/// Removes headers that only the layer may set.
fn strip_own_headers(headers: &mut HeaderMap, policy: &Policy) {
    let own: Vec<_> = headers.keys().filter(|name| name.as_str().starts_with("ibid-")).cloned().collect();
    own.iter().chain(policy.replay_marker_headers()).for_each(|name| drop(headers.remove(name)));
}

pub(super) fn response_context(
    shared: &LayerState, parts: &Parts, protocol: Protocol, policy: &Policy, request_id: HeaderValue,
) -> ResponseContext {
    let origin = shared.settings.cors.as_ref().and_then(|cors| cors.origin(&parts.headers));
    let echoes = protocol == Protocol::Http && policy.refusals.style().echoes_key;
    let sent_key = if echoes { refusal_style::sent_key(&parts.headers, &key_headers(policy)) } else { None };
    let compress = shared.settings.compress;
    ResponseContext { requested_at_ms: now_ms(), request_id, origin, protocol, compress, sent_key }
}

fn preflight_patch(shared: &LayerState, routing: &dyn Routing, parts: &Parts) -> Option<Box<PreflightPatch>> {
    let cors = shared.settings.cors.as_ref().filter(|_| Cors::is_preflight(parts))?;
    let origin = cors.origin(&parts.headers)?;
    let asked = Preflight::of(&parts.headers)?;
    let keys = routing.key_headers(&asked.method()?, parts)?;
    Some(Box::new(PreflightPatch { origin, preflight: asked, key_headers: keys }))
}

impl RequestContext {
    fn of(shared: &LayerState, route: &Arc<Route>, parts: &Parts) -> Self {
        let peer = parts.extensions.get::<PeerAddress>().map(|peer| peer.0);
        Self {
            route: route.clone(),
            method: parts.method.clone(),
            uri: parts.uri.clone(),
            key: String::new(),
            address: None,
            part_digests: None,
            peer: client_address(&parts.headers, peer, &shared.settings.trusted_proxies),
            client: BudgetClient::of(&parts.extensions),
            request_id: request::request_id(&parts.headers),
            user_agent: parts.headers.get(header::USER_AGENT).cloned(),
            started: Instant::now(),
            timings: RunTimings::default(),
        }
    }

    fn set_request_id(&self, headers: &mut HeaderMap) {
        request::set_request_id(headers, &self.route.policy, &self.request_id);
    }

    /// The status for operators, see [`GrpcStatusCode::outline`](crate::grpc::GrpcStatusCode::outline).
    fn status<B>(&self, answer: &Response<ResponseBody<B>>) -> u16 {
        match self.route.protocol {
            Protocol::Http => answer.status().as_u16(),
            Protocol::Grpc => self.call_status(answer.headers(), answer.body().trailers()),
        }
    }

    fn tail_status(&self, tail: &StreamTail) -> u16 {
        match self.route.protocol {
            Protocol::Http => tail.status.as_u16(),
            Protocol::Grpc => self.call_status(&HeaderMap::new(), tail.trailers()),
        }
    }

    fn call_status(&self, headers: &HeaderMap, trailers: Option<&HeaderMap>) -> u16 {
        grpc::status_of(headers, trailers, false).unwrap_or(GrpcStatusCode::Unknown).outline()
    }

    pub(super) fn report(&self, shared: &LayerState, outcome: RequestOutcome, status: u16) {
        let (ran_for, attempt) = self.timings.duration_and_attempt.get().copied().unwrap_or_default();
        shared.engine.observer().answered(&RequestReport {
            route: &self.route.name,
            method: self.method.as_str(),
            path: self.uri.path(),
            key: &self.key,
            address: self.address,
            outcome,
            status,
            attempt,
            took: self.started.elapsed(),
            run_took: ran_for,
            client_address: self.peer,
            request_id: self.request_id.to_str().unwrap_or_default(),
            user_agent: self.user_agent.as_ref().map(|agent| agent.as_bytes()),
            parts: self.part_digests,
        });
    }
}
