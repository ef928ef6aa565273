//! One request of a client connection: the checks that apply to all requests, then the exchange.

use std::{
    collections::HashSet,
    convert::Infallible,
    net::IpAddr,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, ready},
};

use http::{HeaderValue, Method, Request, Response, StatusCode, Version, header, request::Parts};
use ibid::{
    Refusal, RefusalReason,
    http::{
        App, PeerConnection, Protocol, RequestSender, ResponseBody, ResponseFuture, plain_response, refusal_response,
        sent_request_id,
    },
    policy::RefusalFormat,
};

use super::{
    ServerState,
    client_body::ClientBody,
    connection_activity::{ActivityGuard, ConnectionActivity, TrackedBody, WriteProgress},
};
use crate::{
    catalog_config::CatalogConfigRequest,
    contract_page,
    jwt::JwtVerifier,
    openapi_document::Asked,
    proxy::{Proxy, ProxyClient, ProxyResponseBody, RequestFailure, tunnel},
    snapshot::{RenderedContract, RequestHead, RoutedUpstream},
    trace::{self, CallerTrace, RequestTrace},
};

type ClientResponse = Response<ResponseBody<ProxyResponseBody>>;

/// What the requests of one connection share.
pub(super) struct ClientConnection {
    pub(super) server: Arc<ServerState>,
    pub(super) client: Arc<ProxyClient>,
    pub(super) peer: IpAddr,
    pub(super) link: PeerConnection,
    pub(super) activity: Arc<ConnectionActivity>,
    pub(super) sending: Arc<WriteProgress>,
}

/// The response to a request. hyper moves this future, so it is kept small.
pub(super) struct RequestFuture {
    work: ResponseWork,
    connection: Arc<ClientConnection>,
    /// Taken by the response.
    busy: Option<ActivityGuard>,
    protocol: Protocol,
    may_send_interim: bool,
}

enum ResponseWork {
    /// The exchange, without anything around it.
    Exchange(ResponseFuture<<Proxy as App<ClientBody>>::PassFuture, ProxyResponseBody>),
    Boxed(Pin<Box<dyn Future<Output = ClientResponse> + Send>>),
    Panicked,
}

/// The result of the checks that come before any policy.
enum Precheck {
    Respond(ClientResponse),
    /// Continue after verifying the token, if there is a verifier.
    Continue(RoutedUpstream, Option<(Arc<JwtVerifier>, HashSet<String>)>),
    /// The request is for an OpenAPI document that the gateway annotates.
    Document(RoutedUpstream, Box<Asked>),
    /// The request is for the configuration of an Iceberg catalog.
    CatalogConfig(RoutedUpstream, Box<CatalogConfigRequest>),
}

impl ClientConnection {
    pub(super) fn handle(this: &Arc<Self>, request: Request<ClientBody>) -> RequestFuture {
        let busy = Some(ConnectionActivity::begin(&this.activity));
        let protocol = Protocol::of_request(request.version(), request.headers());
        let may_send_interim = request.version() == Version::HTTP_11;
        if may_send_interim {
            this.client.interim.begin_request();
        }
        // A panic does not end the connection.
        let work = catch_unwind(AssertUnwindSafe(|| this.begin(request))).unwrap_or(ResponseWork::Panicked);
        RequestFuture { work, connection: this.clone(), busy, protocol, may_send_interim }
    }

    fn begin(self: &Arc<Self>, mut request: Request<ClientBody>) -> ResponseWork {
        // An HTTP/2 stream is polled in a task of its own, which knows its progress.
        let is_http2 = request.version() == Version::HTTP_2;
        if is_http2 || self.server.tracer.is_some() || request.headers().contains_key(trace::TRACEPARENT) {
            let this = self.clone();
            return ResponseWork::Boxed(Box::pin(async move { this.handle_traced(request).await }));
        }
        match self.server.precheck(&mut request) {
            Precheck::Continue(routed, None) => {
                ResponseWork::Exchange(self.exchange(request, self.sender(), routed, None))
            }
            precheck => {
                let (this, sender) = (self.clone(), self.sender());
                ResponseWork::Boxed(Box::pin(async move { this.respond(precheck, request, sender, None).await }))
            }
        }
    }

    fn sender(&self) -> RequestSender {
        RequestSender {
            peer: Some(self.peer),
            connection: Some(self.link.clone()),
            abort: Some(WriteProgress::current(&self.sending).cancellation.clone()),
            ..RequestSender::default()
        }
    }

    async fn handle_traced(&self, mut request: Request<ClientBody>) -> ClientResponse {
        let trace = self.server.tracer.as_ref().and_then(|tracer| RequestTrace::begin(tracer, &request));
        let caller = if trace.is_none() { CallerTrace::from_headers(request.headers()) } else { None };
        let precheck = self.server.precheck(&mut request);
        let poll_hook = trace.as_ref().map(RequestTrace::poll_hook).or_else(|| caller.map(CallerTrace::poll_hook));
        let sender = RequestSender { poll_hook, ..self.sender() };
        let response = pin!(self.respond(precheck, request, sender, trace.clone()));
        match (trace, caller) {
            (Some(trace), _) => {
                let mut response = trace.scope(response).await;
                trace.answered(&mut response);
                response
            }
            (None, Some(caller)) => caller.scope(response).await,
            (None, None) => response.await,
        }
    }

    async fn respond(
        &self, precheck: Precheck, request: Request<ClientBody>, mut sender: RequestSender, trace: Option<RequestTrace>,
    ) -> ClientResponse {
        let send = async |request, sender, routed| {
            let response = self.exchange(request, sender, routed, trace.clone()).await;
            response.unwrap_or_else(|never: Infallible| match never {})
        };
        match precheck {
            Precheck::Respond(response) => response,
            Precheck::Document(routed, asked) => asked.answer(request, |request| send(request, sender, routed)).await,
            Precheck::CatalogConfig(routed, asked) => {
                asked.answer(request, |request| send(request, sender, routed)).await
            }
            Precheck::Continue(routed, verifier) => {
                if let Some((verifier, wanted)) = verifier {
                    sender.identity = Some(verifier.identify_caller(request.headers(), &wanted).await);
                }
                send(request, sender, routed).await
            }
        }
    }

    fn exchange(
        &self, request: Request<ClientBody>, sender: RequestSender, routed: RoutedUpstream, trace: Option<RequestTrace>,
    ) -> ResponseFuture<<Proxy as App<ClientBody>>::PassFuture, ProxyResponseBody> {
        let RoutedUpstream { upstream, refusals, route_match } = routed;
        let proxy = Proxy { client: self.client.clone(), upstream, refusals, trace };
        let key_headers = |method: &Method, preflight: &Parts| self.server.live.now().key_headers(method, preflight);
        self.server.ibid.handle(proxy, request, sender, route_match, &key_headers)
    }
}

impl ResponseWork {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<ClientResponse>> {
        let poll = || match self {
            Self::Exchange(exchange) => Pin::new(exchange).poll(cx).map(|Ok(response)| Some(response)),
            Self::Boxed(work) => work.as_mut().poll(cx).map(Some),
            Self::Panicked => Poll::Ready(None),
        };
        catch_unwind(AssertUnwindSafe(poll)).unwrap_or(Poll::Ready(None))
    }
}

impl Future for RequestFuture {
    type Output = Result<Response<TrackedBody<ResponseBody<ProxyResponseBody>>>, Infallible>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        let response = ready!(this.work.poll(cx));
        let mut response = response.unwrap_or_else(|| panic_response(this.protocol));
        // A replayed response may carry the context of a trace that was recorded while tracing was on.
        trace::take_original_context(&mut response);
        if this.may_send_interim {
            this.connection.client.interim.end_request();
        }
        let busy = this.busy.take().expect("polled after it was ready");
        let sending = WriteProgress::current(&this.connection.sending);
        Poll::Ready(Ok(response.map(|body| busy.track_body(body, sending))))
    }
}

impl ServerState {
    fn precheck(&self, request: &mut Request<ClientBody>) -> Precheck {
        let protocol = Protocol::of_request(request.version(), request.headers());
        if let Some(detail) = ambiguity(request) {
            let refusal = Refusal::new(RefusalReason::RequestAmbiguous, detail);
            let format = self.live.now().settings.routes.refusal_shape(request.uri().path());
            let mut answer = refusal_response(&refusal, format, protocol);
            if request.version() != Version::HTTP_2 {
                // The rest of the misunderstood request may still follow on this connection.
                answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            return Precheck::Respond(answer);
        }
        let now = self.live.now();
        if request.uri().path() == contract_page::CONTRACT_PATH
            && matches!(*request.method(), Method::GET | Method::HEAD)
        {
            return Precheck::Respond(contract_response(&now.page, request));
        }
        ibid::http::remove_ibid_headers(request.headers_mut());
        let version = request.version();
        tunnel::retain_allowed_upgrades(request.headers_mut(), version, &now.settings.upgrades);
        let head = RequestHead { method: request.method(), uri: request.uri(), version, headers: request.headers() };
        let routed = now.route_request(head);
        let failure = || {
            let request_id = sent_request_id(request.headers()).cloned();
            RequestFailure { protocol, refusals: routed.refusals, request_id }
        };
        let (ibid, timeout) = (&self.ibid, self.limits.reply_timeout);
        if let Some(document) = now.document(head) {
            let asked = Asked { document, ibid: ibid.clone(), timeout, failure: failure() };
            return Precheck::Document(routed, Box::new(asked));
        }
        if let Some(lifetime) = now.key_lifetime(head, &routed) {
            let asked = CatalogConfigRequest { lifetime, ibid: ibid.clone(), timeout, failure: failure() };
            return Precheck::CatalogConfig(routed, Box::new(asked));
        }
        let verifier = now.verifier_for(&routed);
        Precheck::Continue(routed, verifier)
    }
}

/// The response after a panic in the gateway. A claimed operation is parked when it is dropped.
fn panic_response(protocol: Protocol) -> ClientResponse {
    tracing::error!("a request failed inside the gateway");
    let detail = "the gateway failed; whether the operation took place is not known";
    plain_response(StatusCode::INTERNAL_SERVER_ERROR, detail, RefusalFormat::default(), protocol)
}

/// Explains why the app, or a proxy in between, could interpret the request differently.
pub(crate) fn ambiguity<B>(request: &Request<B>) -> Option<&'static str> {
    framing_ambiguity(request).or_else(|| host_ambiguity(request)).or_else(|| target_ambiguity(request))
}

/// hyper only checks the last transfer coding. The gateway would remove the others without decoding them.
fn framing_ambiguity<B>(request: &Request<B>) -> Option<&'static str> {
    let mut codings = request.headers().get_all(header::TRANSFER_ENCODING).iter();
    let only = codings.next()?;
    let plain = codings.next().is_none() && only.as_bytes().eq_ignore_ascii_case(b"chunked");
    (!plain).then_some("the body has a transfer coding other than chunked")
}

/// The bytes that the name of a host may have.
const IS_HOST_BYTE: [bool; 256] = {
    let (mut is_allowed, mut byte) = ([false; 256], 0_u8);
    while byte < 128 {
        is_allowed[byte as usize] = byte.is_ascii_alphanumeric();
        byte += 1;
    }
    let marks = b"-._~!$&'()*+;=:[]%";
    let mut at = 0;
    while at < marks.len() {
        is_allowed[marks[at] as usize] = true;
        at += 1;
    }
    is_allowed
};

/// With two hosts, one would decide the scope and the other what the app serves. HTTP/1.1 requires exactly one.
fn host_ambiguity<B>(request: &Request<B>) -> Option<&'static str> {
    let mut hosts = request.headers().get_all(header::HOST).iter();
    let (first, second) = (hosts.next(), hosts.next());
    if second.is_some() {
        return Some("the header host is sent more than once");
    }
    let named = first.map(HeaderValue::as_bytes);
    let aimed = request.uri().authority().map(|authority| authority.as_str().as_bytes());
    let is_host = |host: &[u8]| host.iter().all(|byte| IS_HOST_BYTE[usize::from(*byte)]);
    if !named.is_none_or(is_host) || !aimed.is_none_or(is_host) {
        return Some("what should be the name of one host is not");
    }
    match (named, aimed) {
        (None, None) if request.version() != Version::HTTP_10 => Some("the request names no host"),
        (None, Some(_)) if request.version() == Version::HTTP_11 => Some("the header host is missing"),
        (Some(named), Some(aimed)) if !named.eq_ignore_ascii_case(aimed) => {
            Some("the target of the request and its header host name different hosts")
        }
        _ => None,
    }
}

/// Routes match paths, so a target without a path would escape all of them. A CONNECT tunnel would reach the app
/// unchecked.
fn target_ambiguity<B>(request: &Request<B>) -> Option<&'static str> {
    if request.method() == Method::CONNECT {
        return Some("there are no tunnels through here");
    }
    let path = request.uri().path();
    let fits = path.starts_with('/') || path == "*" && request.method() == Method::OPTIONS;
    (!fits).then_some("the target of the request is not a path")
}

fn contract_response(page: &RenderedContract, request: &Request<ClientBody>) -> ClientResponse {
    let accept = request.headers().get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    let html = accept.find("text/html");
    let json = accept.find("json");
    let wants_html = html.is_some_and(|html| json.is_none_or(|json| html < json));
    let (body, kind) =
        if wants_html { (&page.html, "text/html; charset=utf-8") } else { (&page.json, "application/json") };
    let mut answer = Response::new(ResponseBody::whole(body.clone(), None));
    let headers = answer.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(header::VARY, HeaderValue::from_static("accept"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("max-age=60"));
    let policy = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'";
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(policy));
    answer
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;

    #[tokio::test]
    async fn a_panic_before_or_after_the_first_await_is_a_500() {
        async fn fails(late: bool) -> ClientResponse {
            if late {
                tokio::task::yield_now().await;
            }
            panic!("a fault of ours");
        }
        for late in [false, true] {
            let mut work = ResponseWork::Boxed(Box::pin(fails(late)));
            assert!(poll_fn(|cx| work.poll(cx)).await.is_none());
        }
        assert_eq!(panic_response(Protocol::Http).status(), StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(panic_response(Protocol::Grpc).headers()["grpc-status"], "2");
        assert!(poll_fn(|cx| ResponseWork::Panicked.poll(cx)).await.is_none());
    }
}
