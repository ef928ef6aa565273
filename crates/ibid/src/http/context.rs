//! What is known about one request, from its arrival to its report.

use std::{
    net::IpAddr,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use http::{Extensions, HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, header, request::Parts};
use tokio::time::Instant;

use super::{
    LayerSettings, LayerState, PeerAddress, PeerConnection, PollHook, ResponseAbort, Route,
    body::{ResponseBody, WholeBody},
    budget::BudgetClient,
    forwarded::client_address,
    key_headers, refusal_style,
    request_id::{self, REQUEST_ID},
};
use crate::{
    fingerprint::PartDigests,
    key::KeySource,
    observe::{RequestOutcome, RequestReport},
    policy::{CheckedPolicy, Policy, RefusalFormat},
    protocol::Protocol,
    refusal::Refusal,
    scope::TokenVerification,
    store::Address,
    time::now_ms,
};

/// The status in reports that precede the response.
pub(super) const NO_RESPONSE_STATUS: u16 = 100;

/// What a server knows about a request besides its content. A tower layer reads it from the request's extensions.
#[derive(Debug, Clone, Default)]
pub struct RequestSender {
    /// The address of the peer.
    pub peer: Option<IpAddr>,
    /// The connection that the request came on.
    pub connection: Option<PeerConnection>,
    /// Aborts the response if its client does not read it.
    pub abort: Option<ResponseAbort>,
    /// The verified claims of the caller's token.
    pub identity: Option<TokenVerification>,
    /// Polls all work on the request.
    pub poll_hook: Option<PollHook>,
}

impl RequestSender {
    pub(super) fn from_extensions(extensions: &Extensions) -> Self {
        Self {
            peer: extensions.get::<PeerAddress>().map(|peer| peer.0).or_else(|| connect_info(extensions)),
            connection: extensions.get().cloned(),
            abort: extensions.get().cloned(),
            identity: extensions.get().cloned(),
            poll_hook: extensions.get().cloned(),
        }
    }
}

/// The peer's address that axum's `into_make_service_with_connect_info` provides.
#[cfg(feature = "axum")]
fn connect_info(extensions: &Extensions) -> Option<IpAddr> {
    extensions.get::<axum::extract::ConnectInfo<std::net::SocketAddr>>().map(|info| info.0.ip())
}

#[cfg(not(feature = "axum"))]
fn connect_info(_: &Extensions) -> Option<IpAddr> {
    None
}

/// What is known about one request.
pub(crate) struct RequestContext {
    pub(super) route: Arc<Route>,
    /// The masked key; empty without one.
    pub(super) key: String,
    pub(super) address: Option<Address>,
    pub(super) part_digests: Option<PartDigests>,
    pub(super) client: BudgetClient,
    /// The client's address, past trusted proxies.
    pub(super) client_address: Option<IpAddr>,
    /// The client's request id, or a new one.
    pub(super) request_id: HeaderValue,
    pub(super) requested_at_ms: u64,
    /// The origin of a script that may read the response.
    pub(super) cors_origin: Option<HeaderValue>,
    /// The key header as sent, for refusal styles that echo it.
    sent_key: Option<(HeaderName, HeaderValue)>,
    method: http::Method,
    uri: http::Uri,
    user_agent: Option<HeaderValue>,
    started: Instant,
    /// The duration and the number of the run.
    run: OnceLock<(Duration, Option<u32>)>,
    is_late: AtomicBool,
}

impl RequestContext {
    pub(super) fn new(shared: &LayerState, route: &Arc<Route>, parts: &Parts, sender: &RequestSender) -> Self {
        Self::with_settings(Some(&shared.settings), route, parts, sender)
    }

    fn with_settings(
        settings: Option<&LayerSettings>, route: &Arc<Route>, parts: &Parts, sender: &RequestSender,
    ) -> Self {
        let policy = &route.policy;
        let echoes = route.protocol.rules().is_plain_http() && policy.refusals.echoes_key();
        let sent_key = if echoes { refusal_style::sent_key(&parts.headers, &key_headers(policy)) } else { None };
        Self {
            route: route.clone(),
            key: String::new(),
            address: None,
            part_digests: None,
            client: BudgetClient::new(sender),
            client_address: settings
                .and_then(|settings| client_address(&parts.headers, sender.peer, &settings.trusted_proxies)),
            request_id: request_id::sent_or_new(&parts.headers),
            requested_at_ms: now_ms(),
            cors_origin: settings.and_then(|settings| settings.cors.as_ref()?.origin(&parts.headers)),
            sent_key,
            method: parts.method.clone(),
            uri: parts.uri.clone(),
            user_agent: parts.headers.get(header::USER_AGENT).cloned(),
            started: Instant::now(),
            run: OnceLock::new(),
            is_late: AtomicBool::new(false),
        }
    }

    /// The context of a request that no route covers.
    pub(super) fn uncovered(settings: Option<&LayerSettings>, format: RefusalFormat, parts: &Parts) -> Self {
        let policy = Policy { refusals: format, ..Policy::ietf() }.checked().expect("valid with every refusal format");
        let protocol = Protocol::of_request(parts.version, &parts.headers);
        let route = Arc::new(Route { name: String::new(), policy, protocol });
        Self::with_settings(settings, &route, parts, &RequestSender::default())
    }

    fn minimal(format: RefusalFormat, protocol: Protocol) -> Self {
        let (parts, ()) = Request::new(()).into_parts();
        let mut context = Self::uncovered(None, format, &parts);
        Arc::make_mut(&mut context.route).protocol = protocol;
        context
    }

    pub(crate) fn policy(&self) -> &CheckedPolicy {
        &self.route.policy
    }

    /// The masked key; empty without one.
    pub(crate) fn masked_key(&self) -> &str {
        &self.key
    }

    pub(super) fn request_id(&self) -> &str {
        self.request_id.to_str().expect("visible ASCII")
    }

    /// Sets the request id for the app. A header that carries the key is not changed.
    pub(super) fn set_request_id(&self, headers: &mut HeaderMap) {
        if !self.policy().key.from.contains(&KeySource::Header(REQUEST_ID)) {
            headers.insert(REQUEST_ID, self.request_id.clone());
        }
    }

    pub(super) fn echo_key(&self, headers: &mut HeaderMap) {
        if let Some((name, value)) = &self.sent_key {
            headers.insert(name, value.clone());
        }
    }

    /// Keeps the first value. For a late run, that is the time until its client was refused.
    pub(super) fn set_run(&self, took: Duration, attempt: Option<u32>) {
        let _ = self.run.set((took, attempt));
    }

    /// The client was refused after `timeout`, and the answer is still awaited.
    pub(super) fn set_late(&self) {
        self.is_late.store(true, Relaxed);
    }

    pub(super) fn is_late(&self) -> bool {
        self.is_late.load(Relaxed)
    }

    /// Builds a refusal in the format of the route.
    pub(super) fn refuse<B>(&self, refusal: &Refusal) -> Response<ResponseBody<B>> {
        self.route.protocol.rules().refuse(refusal, self).map(WholeBody::into)
    }

    /// Builds a response for an error outside of the refusal table.
    pub(super) fn fail<B>(&self, status: StatusCode, detail: &str) -> Response<ResponseBody<B>> {
        self.route.protocol.rules().fail(status, detail, self).map(WholeBody::into)
    }

    /// Refuses a request and reports it.
    pub(super) fn refuse_and_report<B>(&self, shared: &LayerState, refusal: &Refusal) -> Response<ResponseBody<B>> {
        let response = self.refuse(refusal);
        self.report(shared, RequestOutcome::Refused(refusal.reason), self.status(&response));
        response
    }

    /// The status of a response, for operators.
    pub(super) fn status<B>(&self, response: &Response<ResponseBody<B>>) -> u16 {
        let rules = self.route.protocol.rules();
        rules.status(response.status(), response.headers(), response.body().trailers())
    }

    pub(super) fn report(&self, shared: &LayerState, outcome: RequestOutcome, status: u16) {
        let (run_took, attempt) = self.run.get().copied().unwrap_or_default();
        shared.engine.observer().on_request(&RequestReport {
            route: &self.route.name,
            method: self.method.as_str(),
            path: self.uri.path(),
            key: &self.key,
            address: self.address,
            outcome,
            status,
            attempt,
            took: self.started.elapsed(),
            run_took,
            client_address: self.client_address,
            request_id: self.request_id.to_str().unwrap_or_default(),
            user_agent: self.user_agent.as_ref().map(|agent| agent.as_bytes()),
            parts: self.part_digests,
        });
    }
}

/// Builds a refusal for a request that no route covers.
pub fn refusal_response<B>(refusal: &Refusal, format: RefusalFormat, protocol: Protocol) -> Response<ResponseBody<B>> {
    RequestContext::minimal(format, protocol).refuse(refusal)
}

/// Builds a response for an error outside of the refusal table, such as a body that did not arrive in time.
pub fn plain_response<B>(
    status: StatusCode, detail: &str, format: RefusalFormat, protocol: Protocol,
) -> Response<ResponseBody<B>> {
    RequestContext::minimal(format, protocol).fail(status, detail)
}
