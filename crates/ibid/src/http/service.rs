//! The path of a request through the layer: route, head check, then the exchange.

use std::{
    fmt, mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Buf;
use http::{HeaderMap, HeaderName, Method, Request, Response, StatusCode, request::Parts};
use http_body::Body;
use pin_project_lite::pin_project;
use tower_layer::Layer;
use tower_service::Service;

use super::{
    LayerState, Route, RouteMatch, Routing,
    app::{App, ServiceApp},
    body::{BoxError, RequestBody, ResponseBody},
    context::{NO_RESPONSE_STATUS, RequestContext, RequestSender},
    cors::PreflightPatch,
    exchange::{BegunExchange, Exchange},
    future::{BegunWork, HookedFuture, NewWork, RequestWork, ResponseFuture, WorkState},
    request::{self, HeadCheck, KeyedRequest},
    request_id::{UnderRequestId, call_under},
    rules, shadow,
};
use crate::{
    observe::{EngineEvent, RequestOutcome, ShadowOutcome},
    policy::{Policy, PolicyMode},
    protocol::Protocol,
    refusal::{Refusal, RefusalReason},
    sent_names::{SentHeaders, SentNames},
};

/// Finds the key headers of requests with a method, for a CORS preflight. See
/// [`Routing::key_headers`](super::Routing::key_headers).
pub type KeyHeaderLookup<'a> = dyn Fn(&Method, &Parts) -> Option<Vec<HeaderName>> + 'a;

pub(super) fn call<A, B>(
    shared: &Arc<LayerState>, mut app: A, mut parts: Parts, body: B, sender: RequestSender, route: RouteMatch,
    key_headers: &KeyHeaderLookup<'_>,
) -> ResponseFuture<A::PassFuture, A::Body>
where
    A: App<B>,
    B: Body<Data: Buf + Send, Error: Into<BoxError>> + Send + 'static,
{
    let (route, also) = match route {
        RouteMatch::Covered { route, alternatives } => (route, alternatives),
        RouteMatch::UnknownCall(route) => return handle_unknown_call(shared, app, parts, body, &route, &sender),
        RouteMatch::NotCovered | RouteMatch::UncoveredKey => {
            if let RouteMatch::UncoveredKey = route {
                let event = EngineEvent::UncoveredKey { method: parts.method.as_str(), path: parts.uri.path() };
                shared.engine.observer().on_event(&event);
            }
            let cors = shared.settings.cors.as_ref();
            let preflight = cors.and_then(|cors| PreflightPatch::of(cors, key_headers, &parts));
            let request = Request::from_parts(parts, RequestBody::untouched(body));
            return ResponseFuture::pass_through(app.pass(request), preflight);
        }
        RouteMatch::Refused(refusal, format) => {
            let context = RequestContext::uncovered(Some(&shared.settings), format, &parts);
            return ResponseFuture::ready(context.refuse(&refusal));
        }
    };
    let sent = SentHeaders::of(&parts.headers);
    let (route, mut checked, mut others) = request::choose_route(shared, route, also, &parts, &sender, &sent);
    let mut context = Box::new(RequestContext::new(shared, &route, &parts, &sender, &sent));
    strip_own_headers(&mut parts.headers, &context.sent_names, &route.policy);
    let is_shadow = route.policy.mode == PolicyMode::Shadow;
    if !is_shadow && route.protocol == Protocol::JsonRpc {
        checked = match checked {
            // The refusal must name the message, and other messages pass.
            HeadCheck::Refused(refusal, masked) => {
                context.key = masked;
                HeadCheck::Keyed(KeyedRequest::refused(refusal, &parts.headers))
            }
            checked => checked,
        };
    }
    match checked {
        HeadCheck::Keyless => {
            context.set_request_id(&mut parts.headers);
            context.report(shared, RequestOutcome::Keyless, NO_RESPONSE_STATUS);
            let future = app.pass(Request::from_parts(parts, RequestBody::untouched(body)));
            if is_shadow { ResponseFuture::pass_through(future, None) } else { ResponseFuture::keyless(future, route) }
        }
        HeadCheck::Refused(refusal, _) if is_shadow => {
            context.set_request_id(&mut parts.headers);
            let outcome = RequestOutcome::Shadow(ShadowOutcome::Refusal(refusal.reason));
            context.report(shared, outcome, NO_RESPONSE_STATUS);
            ResponseFuture::pass_through(app.pass(Request::from_parts(parts, RequestBody::untouched(body))), None)
        }
        HeadCheck::Refused(refusal, masked) => {
            context.key = masked;
            ResponseFuture::ready(context.refuse_and_report(shared, &refusal))
        }
        HeadCheck::Keyed(keyed) => {
            shared.sweeper.start(&shared.engine);
            if context.key.is_empty() {
                context.key = keyed.masked();
            }
            if !is_shadow {
                // Routes in shadow mode require nothing and do not govern.
                others.retain(|(other, _)| other.policy.mode == PolicyMode::Enforce);
            }
            let running = shared.engine.running().clone();
            if !is_shadow && sender.poll_hook.is_none() {
                // Built where it is allocated: it is large.
                let exchange = Exchange::new(shared, context, parts, keyed, others);
                return ResponseFuture::new_work(Box::pin(KeyedWork { exchange, app, body }), running);
            }
            let exchange = Exchange::new(shared, context, parts, keyed, others);
            let (state, id) = (WorkState::new(), Some(exchange.context.request_id.clone()));
            let mut work: RequestWork = if is_shadow {
                Box::pin(UnderRequestId::new(id, shadow::handle_keyed(Box::new(exchange), app, body, state.clone())))
            } else {
                let work = Box::pin(KeyedWork { exchange, app, body });
                Box::pin(UnderRequestId::new(id, handle_keyed(work, state.clone())))
            };
            if let Some(hook) = sender.poll_hook {
                work = Box::pin(HookedFuture { work, hook });
            }
            ResponseFuture::running(work, state, running)
        }
    }
}

pin_project! {
    #[project = KeyedWorkProject]
    /// A request with a key, its app and its body. The steps of the work borrow from this one allocation.
    struct KeyedWork<A, B> {
        exchange: Exchange,
        app: A,
        #[pin]
        body: B,
    }
}

impl<A, B> NewWork<A::Body> for KeyedWork<A, B>
where
    A: App<B>,
    B: Body<Data: Buf + Send, Error: Into<BoxError>> + Send + 'static,
{
    fn begin(mut self: Pin<Box<Self>>, cx: &mut Context<'_>) -> BegunWork<A::Body> {
        let mut id = Some(self.exchange.context.request_id.clone());
        let replayed = call_under(&mut id, || {
            let this = self.as_mut().project();
            if let Some(replay) = this.exchange.replay_at_once(this.body, cx) {
                return Ok(replay);
            }
            let state = WorkState::new();
            let mut work = Box::pin(UnderRequestId::new(None, handle_keyed(self, state.clone())));
            let done = work.as_mut().poll_new(cx);
            Err((work, state, done))
        });
        match replayed {
            Ok(replay) => BegunWork::Answered(replay),
            Err((mut work, state, done)) => {
                work.as_mut().set_id(id);
                BegunWork::Running(work, state, done)
            }
        }
    }
}

/// Handles a request with a key. The response goes to `state`.
#[expect(clippy::manual_async_fn, reason = "an `async fn` would store its arguments twice")]
fn handle_keyed<A, B>(mut work: Pin<Box<KeyedWork<A, B>>>, state: Arc<WorkState<A::Body>>) -> impl Future<Output = ()>
where
    A: App<B>,
    B: Body<Data: Buf + Send, Error: Into<BoxError>> + Send + 'static,
{
    async move {
        let KeyedWorkProject { exchange, app, body } = work.as_mut().project();
        let is_claimed = match exchange.begin(app, body, &state).await {
            BegunExchange::Responded => return,
            BegunExchange::RespondLater(response) => return response.await,
            BegunExchange::Pass => false,
            BegunExchange::Run => true,
        };
        if is_claimed {
            let (outcome, now) = exchange.run(app, &state).await;
            exchange.end(now, outcome, &state).await;
        } else {
            let response = app.pass(exchange.take_unclaimed(None)).await;
            state.set_response(pass_through(response, &exchange.context));
        }
    }
}

/// Handles a gRPC call that may be a stream and therefore cannot be claimed.
fn handle_unknown_call<A, B>(
    shared: &LayerState, mut app: A, mut parts: Parts, body: B, route: &Arc<Route>, sender: &RequestSender,
) -> ResponseFuture<A::PassFuture, A::Body>
where
    A: App<B>,
{
    let policy = &route.policy;
    let context = RequestContext::new(shared, route, &parts, sender, &SentHeaders::of(&parts.headers));
    let is_protected = policy.key.required || request::carries_key(policy, &parts.uri, &parts.headers);
    if is_protected && policy.mode == PolicyMode::Enforce {
        let detail = format!(
            "whether {} is a unary method is not known, so the call cannot be protected; name it in a route (match = \
             \"grpc package.Service/Method\"), set descriptors to a file or \"reflection\", or let such calls pass \
             unprotected with grpc_unknown = \"pass\"",
            parts.uri.path()
        );
        let refusal = Refusal::new(RefusalReason::MethodUnknown, detail);
        return ResponseFuture::ready(context.refuse_and_report(shared, &refusal));
    }
    let outcome = if is_protected {
        RequestOutcome::Shadow(ShadowOutcome::Refusal(RefusalReason::MethodUnknown))
    } else {
        RequestOutcome::Keyless
    };
    context.report(shared, outcome, NO_RESPONSE_STATUS);
    strip_own_headers(&mut parts.headers, &context.sent_names, policy);
    context.set_request_id(&mut parts.headers);
    ResponseFuture::pass_through(app.pass(Request::from_parts(parts, RequestBody::untouched(body))), None)
}

pub(super) fn pass_through<RB, E>(
    response: Result<Response<RB>, E>, context: &RequestContext,
) -> Response<ResponseBody<RB>> {
    match response {
        Ok(response) => response.map(ResponseBody::untouched),
        Err(_) => context.fail(StatusCode::BAD_GATEWAY, "the app could not answer"),
    }
}

/// Removes the headers `Ibid-*` from a request. Only the layer may set them. A layer does this for the requests that it
/// covers; a server does it for all.
pub fn remove_ibid_headers(headers: &mut HeaderMap) {
    rules::remove_headers(headers, |name| name.as_str().starts_with("ibid-"));
}

/// Removes headers that only the layer may set.
fn strip_own_headers(headers: &mut HeaderMap, sent: &SentNames, policy: &Policy) {
    if sent.has_own_prefix {
        remove_ibid_headers(headers);
    }
    for marker in policy.replay_marker_headers().filter(|marker| sent.may_have(marker)) {
        headers.remove(marker);
    }
}

/// Adds idempotency to a service. Created by [`Ibid::layer`](super::Ibid::layer).
#[derive(Clone)]
pub struct IbidLayer {
    pub(super) shared: Arc<LayerState>,
    pub(super) routing: Arc<dyn Routing>,
}

/// A service with idempotency.
#[derive(Clone)]
pub struct IbidService<S> {
    inner: S,
    layer: IbidLayer,
}

impl<S> Layer<S> for IbidLayer {
    type Service = IbidService<S>;

    fn layer(&self, inner: S) -> IbidService<S> {
        IbidService { inner, layer: self.clone() }
    }
}

impl<S, B, RB> Service<Request<B>> for IbidService<S>
where
    S: Service<Request<RequestBody<B>>, Response = Response<RB>, Future: Send> + Clone + Send + 'static,
    S::Error: Into<BoxError> + Send,
    B: Body<Data: Buf + Send, Error: Into<BoxError>> + Send + 'static,
    RB: Body<Data: Buf + Send, Error: Into<BoxError>> + Send + 'static,
{
    type Response = Response<ResponseBody<RB>>;
    type Error = S::Error;
    type Future = ResponseFuture<S::Future, RB>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // Calls the instance that was polled ready, and keeps the clone.
        let fresh = self.inner.clone();
        let inner = mem::replace(&mut self.inner, fresh);
        let (parts, body) = request.into_parts();
        let (sender, route) = (RequestSender::from_extensions(&parts.extensions), self.layer.routing.route(&parts));
        let key_headers = |method: &Method, parts: &Parts| self.layer.routing.key_headers(method, parts);
        call(&self.layer.shared, ServiceApp(inner), parts, body, sender, route, &key_headers)
    }
}

impl fmt::Debug for IbidLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("IbidLayer")
    }
}

impl<S: fmt::Debug> fmt::Debug for IbidService<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IbidService").field("inner", &self.inner).finish()
    }
}
