//! What is known about one request, from its arrival to its report, and about its client.

use std::{
    net::IpAddr,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use http::{
    Extensions, HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, header, request::Parts,
    uri::PathAndQuery,
};
use parking_lot::Mutex;
use tokio::time::Instant;

use super::{
    LayerSettings, LayerState, PeerAddress, PollHook, Route,
    body::{ResponseBody, WholeBody},
    budget::{BudgetClient, MemoryAccount},
    key_headers, refusal_style,
    request::RequestIdentity,
    request_id::{self, REQUEST_ID},
};
use crate::{
    fingerprint::FoundHeaders,
    key::{KeySource, MaskedKey},
    observe::{RequestOutcome, RequestReport},
    policy::{CheckedPolicy, Policy, RefusalFormat},
    protocol::Protocol,
    refusal::Refusal,
    scope::{TokenVerification, TrustedProxies},
    sent_names::{SentHeaders, SentNames},
    store::ClaimToken,
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
    /// The token of the claim. A request that is sent again with its token is the same claim. By default a new one.
    pub claim_token: Option<ClaimToken>,
}

impl RequestSender {
    pub(super) fn from_extensions(extensions: &Extensions) -> Self {
        Self {
            peer: extensions.get::<PeerAddress>().map(|peer| peer.0).or_else(|| connect_info(extensions)),
            connection: extensions.get().cloned(),
            abort: extensions.get().cloned(),
            identity: extensions.get().cloned(),
            poll_hook: extensions.get().cloned(),
            claim_token: None,
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
    pub(crate) key: MaskedKey,
    /// Known once the body is read.
    pub(super) identity: Option<RequestIdentity>,
    pub(super) claim_token: Option<ClaimToken>,
    /// The id of a JSON-RPC request, as JSON.
    pub(crate) message_id: Option<Box<str>>,
    pub(super) client: BudgetClient,
    /// The client's address, past trusted proxies.
    pub(super) client_address: Option<IpAddr>,
    /// The client's request id, or a new one.
    pub(super) request_id: HeaderValue,
    pub(super) requested_at_ms: u64,
    /// Whether the label has the whole key.
    pub(super) has_label_key: bool,
    /// The origin of a script that may read the response.
    pub(super) cors_origin: Option<Box<HeaderValue>>,
    /// The names of the request's headers.
    pub(super) sent_names: SentNames,
    /// What the headers say about the body and the comparison of requests.
    pub(super) found_headers: FoundHeaders,
    /// The headers of the request that the response repeats.
    echoed: Box<[(HeaderName, HeaderValue)]>,
    method: http::Method,
    /// The target without scheme and authority.
    target: Option<PathAndQuery>,
    pub(super) user_agent: Option<HeaderValue>,
    pub(super) started: Instant,
    /// The duration and the number of the run.
    run: OnceLock<(Duration, Option<u32>)>,
    is_late: AtomicBool,
}

impl RequestContext {
    pub(super) fn new(
        shared: &LayerState, route: &Arc<Route>, parts: &Parts, sender: &RequestSender, sent: &SentHeaders<'_>,
    ) -> Self {
        Self::with_settings(Some(&shared.settings), route, parts, sender, sent)
    }

    fn with_settings(
        settings: Option<&LayerSettings>, route: &Arc<Route>, parts: &Parts, sender: &RequestSender,
        sent: &SentHeaders<'_>,
    ) -> Self {
        let policy = &route.policy;
        let echoed = match policy.refusals {
            RefusalFormat::Stripe | RefusalFormat::Acp if route.protocol.rules().is_plain_http() => {
                let names = policy.refusals.echoed_names(key_headers(policy));
                refusal_style::sent_once(&parts.headers, names)
            }
            _ => Box::default(),
        };
        Self {
            route: route.clone(),
            key: MaskedKey::default(),
            identity: None,
            claim_token: sender.claim_token,
            message_id: None,
            client: BudgetClient::new(sender),
            client_address: match settings {
                Some(settings) if sent.names.may_share(&FORWARDING) => {
                    client_address(&parts.headers, sender.peer, &settings.trusted_proxies)
                }
                Some(_) => sender.peer,
                None => None,
            },
            request_id: request_id::sent_or_new(&parts.headers, &sent.names),
            sent_names: sent.names,
            found_headers: FoundHeaders::of(sent),
            requested_at_ms: now_ms(),
            has_label_key: settings.is_some_and(|settings| settings.label_key),
            cors_origin: settings.and_then(|settings| settings.cors.as_ref()?.origin(&parts.headers)).map(Box::new),
            echoed,
            method: parts.method.clone(),
            target: parts.uri.path_and_query().cloned(),
            user_agent: sent.get(&header::USER_AGENT).cloned(),
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
        Self::with_settings(settings, &route, parts, &RequestSender::default(), &SentHeaders::of(&parts.headers))
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

    /// What tells a claimed request from all others.
    pub(super) fn identity(&self) -> &RequestIdentity {
        self.identity.as_ref().expect("a claimed request has an identity")
    }

    pub(super) fn request_id(&self) -> &str {
        self.request_id.to_str().expect("visible ASCII")
    }

    /// Sets the request id for the app. A header that carries the key is not changed.
    pub(super) fn set_request_id(&self, headers: &mut HeaderMap) {
        if self.sends_request_id() {
            headers.insert(REQUEST_ID, self.request_id.clone());
        }
    }

    /// Whether the app gets the request id: its header does not carry the key.
    fn sends_request_id(&self) -> bool {
        !self.policy().key.from.contains(&KeySource::Header(REQUEST_ID))
    }

    /// Whether the app gets a request id that the request does not have.
    pub(super) fn adds_request_id(&self) -> bool {
        !self.sent_names.may_have(&REQUEST_ID) && self.sends_request_id()
    }

    pub(super) fn echo_headers(&self, headers: &mut HeaderMap) {
        for (name, value) in &self.echoed {
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

    pub(super) fn status<B>(&self, response: &Response<ResponseBody<B>>) -> u16 {
        let rules = self.route.protocol.rules();
        rules.status(response.status(), response.headers(), response.body().trailers())
    }

    pub(super) fn report(&self, shared: &LayerState, outcome: RequestOutcome, status: u16) {
        if !shared.engine.is_observed() {
            return;
        }
        let (run_took, attempt) = self.run.get().copied().unwrap_or_default();
        shared.engine.observer().on_request(&RequestReport {
            route: &self.route.name,
            method: self.method.as_str(),
            path: self.target.as_ref().map_or("", PathAndQuery::path),
            key: self.key.as_str(),
            address: self.identity.as_ref().map(|identity| identity.address),
            outcome,
            status,
            attempt,
            took: self.started.elapsed(),
            run_took,
            client_address: self.client_address,
            request_id: self.request_id.to_str().unwrap_or_default(),
            user_agent: self.user_agent.as_ref().map(|agent| agent.as_bytes()),
            parts: self.identity.as_ref().and_then(|identity| identity.digests),
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

/// One connection of a client. The server puts a clone into the extensions of each of its requests. It limits the
/// memory for bodies per connection; without it there is no such limit.
#[derive(Debug, Clone, Default)]
pub struct PeerConnection(pub(super) Arc<MemoryAccount>);

/// Lets the layer abort a response that its client does not read. The server puts one into the request's extensions,
/// and closes the connection or resets the HTTP/2 stream once [`poll_aborted`](Self::poll_aborted) is ready. Without
/// it, a response is aborted when its body is next polled.
#[derive(Debug, Clone, Default)]
pub struct ResponseAbort(Arc<Mutex<ResponseAbortState>>);

#[derive(Debug, Default)]
struct ResponseAbortState {
    is_aborted: bool,
    waker: Option<Waker>,
}

impl ResponseAbort {
    /// Aborts the response.
    pub fn cut(&self) {
        let waker = {
            let mut state = self.0.lock();
            state.is_aborted = true;
            state.waker.take()
        };
        waker.into_iter().for_each(Waker::wake);
    }

    /// Ready once the response must be aborted. Only the last caller is woken.
    pub fn poll_aborted(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = self.0.lock();
        if state.is_aborted {
            return Poll::Ready(());
        }
        if !state.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            state.waker = Some(cx.waker().clone());
        }
        Poll::Pending
    }
}

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDING: SentNames = SentNames::listed(&["x-forwarded-for", "forwarded"]);

/// Finds the client's address: the last address in the chain that is not a trusted proxy. The chain is
/// `X-Forwarded-For`, or without it `Forwarded` (RFC 7239). Each proxy appends the address that it saw, so the chain is
/// walked from its end while its writers are trusted. An invalid entry ends it.
pub(super) fn client_address(headers: &HeaderMap, peer: Option<IpAddr>, trusted: &TrustedProxies) -> Option<IpAddr> {
    if !trusted.trusts(peer) {
        return peer;
    }
    let is_x = headers.contains_key(FORWARDED_FOR);
    let lines = headers.get_all(if is_x { FORWARDED_FOR } else { header::FORWARDED });
    let mut client = peer;
    for line in lines.iter().rev() {
        for entry in line.to_str().unwrap_or_default().rsplit(',') {
            let named = if is_x { Some(entry.trim()) } else { forwarded_for(entry) };
            let Some(address) = named.and_then(parse_node_address) else { return client };
            client = Some(address.to_canonical());
            if !trusted.trusts(client) {
                return client;
            }
        }
    }
    client
}

/// The node in an element of `Forwarded`.
fn forwarded_for(element: &str) -> Option<&str> {
    element.split(';').find_map(|pair| {
        let (name, value) = pair.split_once('=')?;
        name.trim().eq_ignore_ascii_case("for").then(|| value.trim().trim_matches('"'))
    })
}

/// Parses an address with or without a port: `192.0.2.1`, `192.0.2.1:80`, `2001:db8::1`, `[2001:db8::1]:80`.
fn parse_node_address(node: &str) -> Option<IpAddr> {
    if let Ok(address) = node.parse() {
        return Some(address);
    }
    match node.strip_prefix('[') {
        Some(rest) => rest.split_once(']').and_then(|(address, _)| address.parse().ok()),
        None => node.rsplit_once(':').and_then(|(address, _)| address.parse().ok()),
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn client(lines: &[(&'static str, &'static str)], peer: &str) -> String {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, HeaderValue::from_static(value));
        }
        let trusted = TrustedProxies::parse(["127.0.0.0/8", "10.0.0.0/8"]).expect("networks");
        client_address(&headers, Some(peer.parse().expect("an address")), &trusted).expect("one").to_string()
    }

    #[test]
    fn the_chain_is_walked_from_its_end_past_trusted_proxies() {
        const X: &str = "x-forwarded-for";
        for (lines, expected) in [
            (&[][..], "127.0.0.1"),
            (&[(X, "203.0.113.7")], "203.0.113.7"),
            (&[(X, "198.51.100.9, 203.0.113.7, 10.0.0.3")], "203.0.113.7"),
            (&[(X, "198.51.100.9"), (X, "203.0.113.7"), (X, "10.0.0.3, 10.0.0.4")], "203.0.113.7"),
            (&[(X, "10.0.0.2, 10.0.0.3")], "10.0.0.2"),
            (&[(X, "203.0.113.7, unknown, 10.0.0.3")], "10.0.0.3"),
            (&[(X, "203.0.113.7:4711")], "203.0.113.7"),
            (&[(X, "[2001:db8::1]:4711")], "2001:db8::1"),
            (&[("forwarded", "for=198.51.100.9, for=203.0.113.7;proto=https;by=10.0.0.3")], "203.0.113.7"),
            (&[("forwarded", "For=\"[2001:db8:cafe::17]:4711\"")], "2001:db8:cafe::17"),
            (&[("forwarded", "for=203.0.113.7, for=_hidden")], "127.0.0.1"),
            (&[("forwarded", "for=198.51.100.9"), (X, "203.0.113.7")], "203.0.113.7"),
        ] {
            assert_eq!(client(lines, "127.0.0.1"), expected, "{lines:?}");
        }
        assert_eq!(client(&[(X, "203.0.113.7")], "198.51.100.1"), "198.51.100.1", "who is not trusted is not believed");
    }
}
