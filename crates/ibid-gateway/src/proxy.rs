//! The app behind the gateway, as [`Ibid::handle`](ibid::Ibid::handle) sees it: sends a request to its upstream and returns the response.
//!
//! It never resends a request once a byte may have been written. It reports whether a failed request may have been
//! executed ([`DispatchOutcome`]), and the claim is settled accordingly.

use std::{
    convert::Infallible,
    future::Future,
    net::IpAddr,
    pin::{Pin, pin},
    sync::{Arc, Weak},
    time::Duration,
};

use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, Version, header};
use hyper::upgrade::OnUpgrade;
use ibid::{
    Refusal, RefusalReason,
    http::{
        App, AppCall, AppError, DispatchOutcome, Protocol, RequestBody, ResponseBody, current_request_id,
        plain_response, refusal_response, sent_request_id,
    },
    policy::RefusalFormat,
    scope::TrustedProxies,
};
use tokio::sync::OwnedSemaphorePermit;

use self::outgoing_body::{BODY_TIMED_OUT, BodyFailure, OutgoingBody};
use crate::{
    config::LimitSettings,
    server::{client_body::ClientBody, interim::InterimResponses},
    trace::{self, RequestTrace},
    upstream::{
        self, AddedHeaders, Affinity, OnInterim, ReusePolicy, SendFailure, UpstreamBody, UpstreamClient,
        UpstreamSendOptions, join_header_lines,
    },
};

mod outgoing_body;
pub mod tunnel;

pub type UpstreamRequestBody = OutgoingBody;
pub type ProxyResponseBody = ResponseBody<UpstreamBody>;

/// A client connection, as the proxy sees it.
pub struct ProxyClient {
    /// The peer's address, for `X-Forwarded-For`.
    forwarded_for: HeaderValue,
    /// Whether the connection uses TLS.
    pub is_secure: bool,
    /// Whether the peer is a trusted proxy, so that its forwarding headers count.
    pub is_trusted: bool,
    /// The connection's permit under `limits.max_connections`. Weak, because operations outlive the connection; a
    /// tunnel upgrades it.
    connection_permit: Weak<OwnedSemaphorePermit>,
    body_timeout: Duration,
    reply_timeout: Duration,
    tunnel_timeout: Duration,
    /// Interim (1xx) responses to send to the client.
    pub(crate) interim: Arc<InterimResponses>,
    affinity: Affinity,
}

/// Sends one request of a client to its upstream.
#[derive(Clone)]
pub struct Proxy {
    pub client: Arc<ProxyClient>,
    pub upstream: Arc<UpstreamClient<UpstreamRequestBody>>,
    /// The format of refusals if no policy covers the request.
    pub refusals: RefusalFormat,
    pub trace: Option<RequestTrace>,
}

/// A request without a response of the app. Boxed, because it contains the response for the client.
type ProxyError = Box<AppError<ProxyResponseBody>>;

impl ProxyClient {
    pub fn new(
        peer: IpAddr, is_secure: bool, trusted: &TrustedProxies, limits: &LimitSettings,
        connection_permit: Weak<OwnedSemaphorePermit>,
    ) -> Arc<Self> {
        let forwarded_for = HeaderValue::from_str(&peer.to_canonical().to_string()).expect("an address");
        Arc::new(Self {
            forwarded_for,
            is_secure,
            is_trusted: trusted.trusts(Some(peer)),
            connection_permit,
            body_timeout: limits.body_timeout,
            reply_timeout: limits.reply_timeout,
            tunnel_timeout: limits.tunnel_timeout,
            interim: Arc::default(),
            affinity: Affinity::default(),
        })
    }
}

impl App<ClientBody> for Proxy {
    type Body = ProxyResponseBody;
    type PassError = Infallible;
    type PassFuture = Pin<Box<dyn Future<Output = Result<Response<ProxyResponseBody>, Infallible>> + Send>>;

    const SENDS_OTHERS: bool = true;
    const ADDS_HEADERS: bool = true;

    fn pass(&mut self, request: Request<RequestBody<ClientBody>>) -> Self::PassFuture {
        let (proxy, mut request) = (self.clone(), request.map(OutgoingBody::new));
        Box::pin(async move {
            let call = AppCall { run: None, request_id: None, claim: None, send_state: None };
            let failed = |error: ProxyError| error.response.expect("the proxy answers for the app");
            Ok(proxy.forward(&mut request, call).await.unwrap_or_else(failed))
        })
    }

    async fn send(
        &mut self, request: Request<RequestBody<ClientBody>>, call: AppCall<'_>,
    ) -> Result<Response<ProxyResponseBody>, AppError<ProxyResponseBody>> {
        let mut request = request.map(OutgoingBody::new);
        self.forward(&mut request, call).await.map_err(|error| *error)
    }
}

impl Proxy {
    async fn forward(
        &self, request: &mut Request<UpstreamRequestBody>, call: AppCall<'_>,
    ) -> Result<Response<ProxyResponseBody>, ProxyError> {
        let client = &self.client;
        let found = HeaderScan::of(request.headers());
        let upgrade = if found.upgrade { tunnel::requested_upgrade(request) } else { None };
        if found.hop_by_hop {
            remove_hop_by_hop(request.headers_mut());
        }
        if let Some((protocol, _)) = &upgrade {
            request.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
            request.headers_mut().insert(header::UPGRADE, protocol.clone());
        }
        if found.expect {
            // The server has already answered `Expect: 100-continue`.
            request.headers_mut().remove(header::EXPECT);
        }
        let (forwarded, forwarded_count) = forwarded_headers(client, request, found.forwarded);
        let version = request.version();
        let failure = RequestFailure {
            protocol: Protocol::of_request(version, request.headers()),
            refusals: self.refusals,
            request_id: if found.request_id { sent_request_id(request.headers()).cloned() } else { None },
        };
        if failure.protocol == Protocol::Grpc {
            // gRPC servers assume that a call without `TE: trailers` came through a proxy that drops trailers.
            request.headers_mut().insert(header::TE, HeaderValue::from_static("trailers"));
        }
        // Probes also belong to a claim.
        let is_claimed = call.send_state.is_some();
        let care = if is_claimed { ReusePolicy::Claimed } else { ReusePolicy::PassThrough };
        // The policy limits the time of claimed requests. Clients limit that of gRPC calls, which may be silent streams.
        let is_timed = !is_claimed && !self.upstream.is_grpc;
        let mut progress = None;
        if is_timed {
            match request.body_mut().wait_for_first_frame(client.body_timeout).await {
                Ok(begun) => progress = begun,
                Err(failure) => return Ok(body_error_response(failure, version, self.refusals)),
            }
        }
        let sent = self.trace.as_ref().map(|trace| trace.send(request.headers_mut(), call.run.is_some()));
        let serial = client.interim.request_number();
        let push = |status: StatusCode, headers: &HeaderMap| client.interim.push(serial, status, headers);
        let on_interim: Option<OnInterim<'_>> = if version == Version::HTTP_11 { Some(&push) } else { None };
        let options = UpstreamSendOptions {
            care,
            affinity: &client.affinity,
            send_state: call.send_state,
            more_headers: AddedHeaders {
                run: call.run,
                request_id: call.request_id,
                others: &forwarded[..forwarded_count],
            },
            on_interim,
        };
        let reply = pin!(self.upstream.send_with(request, options));
        let reply = match is_timed {
            true => outgoing_body::wait_for_reply(reply, progress.as_deref(), client.reply_timeout).await,
            false => Some(reply.await),
        };
        let mut answer = match reply {
            Some(Ok(reply)) => build_response(client, reply, upgrade, &failure),
            Some(Err(SendFailure::NeverWritten(why))) => {
                let is_full = matches!(why, upstream::UpstreamError::PoolExhausted { .. });
                let reason = if is_full { RefusalReason::Overloaded } else { RefusalReason::UpstreamUnreachable };
                Err(failure.error(reason, &why.to_string()))
            }
            Some(Err(SendFailure::MaybeWritten(_)))
                if progress.as_ref().is_some_and(|progress| progress.has_timed_out()) =>
            {
                Ok(body_error_response(BODY_TIMED_OUT, version, self.refusals))
            }
            Some(Err(SendFailure::MaybeWritten(why))) => {
                Err(failure.error(RefusalReason::UpstreamLost, &why.to_string()))
            }
            None => Err(failure.error(RefusalReason::UpstreamTimeout, "no reply within limits.reply_timeout")),
        };
        if let Some(response) = answer.as_mut().map_or_else(|error| error.response.as_mut(), Some) {
            // Removes the gateway's own trace header if the app sent it.
            trace::take_original_context(response);
            if let Some(sent) = sent {
                sent.answered(response);
            }
        }
        answer
    }
}

fn build_response(
    client: &ProxyClient, mut reply: Response<UpstreamBody>, upgrade: Option<(HeaderValue, OnUpgrade)>,
    failure: &RequestFailure,
) -> Result<Response<ProxyResponseBody>, ProxyError> {
    if reply.status() != StatusCode::SWITCHING_PROTOCOLS {
        if HeaderScan::of(reply.headers()).hop_by_hop {
            remove_hop_by_hop(reply.headers_mut());
        }
        return Ok(reply.map(ProxyResponseBody::untouched));
    }
    let Some((_, onto)) = upgrade.filter(|(asked, _)| tunnel::is_upgrade_accepted(asked, reply.headers())) else {
        let why = "the app answered with an upgrade that was not asked for";
        return Err(failure.error(RefusalReason::UpstreamLost, why));
    };
    let (permit, limit) = (client.connection_permit.upgrade(), client.tunnel_timeout);
    let (head, body) = reply.into_parts();
    if let Some(upstream) = body.into_upgraded() {
        tokio::spawn(async move {
            tunnel::copy_both_ways(onto, upstream, limit).await;
            // The client's connection counts towards its limit until here.
            drop(permit);
        });
    }
    Ok(Response::from_parts(head, ProxyResponseBody::whole("", None)))
}

/// The response to a pass-through request whose body did not arrive.
fn body_error_response(
    (status, detail): BodyFailure, version: Version, refusals: RefusalFormat,
) -> Response<ProxyResponseBody> {
    let mut answer = plain_response(status, detail, refusals, Protocol::Http);
    if version != Version::HTTP_2 {
        // The rest of the body may still follow on this connection.
        answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    answer
}

/// What the refusal of a failed request depends on.
pub(crate) struct RequestFailure {
    pub(crate) protocol: Protocol,
    pub(crate) refusals: RefusalFormat,
    /// The id that the request carries. Without one, that of the current request counts.
    pub(crate) request_id: Option<HeaderValue>,
}

impl RequestFailure {
    fn error(&self, reason: RefusalReason, why: &str) -> ProxyError {
        let (response, detail) = self.refuse(reason, why);
        let outcome = match reason {
            RefusalReason::UpstreamUnreachable | RefusalReason::Overloaded => DispatchOutcome::NotSent(detail.into()),
            _ => DispatchOutcome::ResponseLost(detail.into()),
        };
        Box::new(AppError { outcome, response: Some(response) })
    }

    /// The refusal for a request whose response did not arrive, or broke off, and its detail.
    pub(crate) fn refuse(&self, reason: RefusalReason, why: &str) -> (Response<ProxyResponseBody>, &'static str) {
        // Callers must not learn the upstream's address; it goes to the log.
        let request_id = self.request_id.clone().or_else(current_request_id);
        let request_id = request_id.as_ref().and_then(|id| id.to_str().ok());
        tracing::warn!(reason = reason.name(), why, request_id, trace_id = trace::current_trace_id(), "upstream");
        let detail = match reason {
            RefusalReason::UpstreamUnreachable => "the app could not be reached; nothing was sent to it",
            RefusalReason::Overloaded => "no connection to the app was free in time; nothing was sent to it",
            RefusalReason::UpstreamTimeout => {
                "the app did not begin its answer in time; the request may have been executed"
            }
            _ => "the app's answer was lost; the request may have been executed",
        };
        let mut refusal = Refusal::new(reason, detail);
        if reason == RefusalReason::Overloaded {
            refusal = refusal.retry_after(Duration::from_secs(1));
        }
        (refusal_response(&refusal, self.refusals, self.protocol), detail)
    }
}

/// Which headers a message has that the proxy treats specially.
#[derive(Default)]
struct HeaderScan {
    /// `Connection`, `Upgrade`, or another one that concerns one connection only.
    hop_by_hop: bool,
    upgrade: bool,
    expect: bool,
    forwarded: bool,
    request_id: bool,
}

impl HeaderScan {
    fn of(headers: &HeaderMap) -> Self {
        let mut found = Self::default();
        for name in headers.keys() {
            match name.as_str() {
                "upgrade" => (found.upgrade, found.hop_by_hop) = (true, true),
                "connection"
                | "http2-settings"
                | "keep-alive"
                | "proxy-connection"
                | "proxy-authenticate"
                | "proxy-authorization"
                | "transfer-encoding"
                | "te" => found.hop_by_hop = true,
                "expect" => found.expect = true,
                "x-request-id" => found.request_id = true,
                "forwarded" | "x-forwarded-for" | "x-forwarded-proto" | "x-forwarded-host" => found.forwarded = true,
                _ => {}
            }
        }
        found
    }
}

/// Removes hop-by-hop headers, and the headers that `Connection` names.
fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let wants_trailers = headers.get(header::TE).is_some_and(|te| te.to_str().unwrap_or_default().contains("trailers"));
    let lines: Vec<_> = headers.get_all(header::CONNECTION).iter().cloned().collect();
    for name in lines.iter().filter_map(|line| line.to_str().ok()).flat_map(|line| line.split(',')) {
        headers.remove(name.trim());
    }
    for name in [header::CONNECTION, header::PROXY_AUTHENTICATE, header::PROXY_AUTHORIZATION, header::UPGRADE] {
        headers.remove(name);
    }
    for name in ["http2-settings", "keep-alive", "proxy-connection", "transfer-encoding", "te"] {
        headers.remove(name);
    }
    if wants_trailers {
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
    }
}

/// Returns the `X-Forwarded-*` headers to send. Values from a trusted peer are extended; others are replaced, because
/// they may be forged. `is_forwarded`: the request has some of them, which this removes. The last one counts only if
/// the returned number is 3: a request need not name a host.
///
/// Lists (`X-Forwarded-For`, `Forwarded`) are joined into one line, in order. For the other headers the last line
/// counts, because the nearest proxy wrote it.
fn forwarded_headers<B>(
    client: &ProxyClient, request: &mut Request<B>, is_forwarded: bool,
) -> ([(HeaderName, HeaderValue); 3], usize) {
    const FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
    const PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
    const HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
    let mut host = match request.uri().authority() {
        Some(authority) => HeaderValue::from_str(authority.as_str()).ok(),
        None => request.headers().get(header::HOST).cloned(),
    };
    let mut proto = HeaderValue::from_static(if client.is_secure { "https" } else { "http" });
    let mut clients = client.forwarded_for.clone();
    if is_forwarded {
        let headers = request.headers_mut();
        if client.is_trusted {
            headers.append(FOR, clients.clone());
            join_header_lines(headers, FOR, b", ");
            join_header_lines(headers, header::FORWARDED, b", ");
            let last = |name| headers.get_all(name).iter().next_back().cloned();
            (clients, proto, host) = (last(FOR).unwrap_or(clients), last(PROTO).unwrap_or(proto), last(HOST).or(host));
        } else {
            headers.remove(header::FORWARDED);
        }
        [FOR, PROTO, HOST].iter().for_each(|name| drop(headers.remove(name)));
    }
    let count = if host.is_some() { 3 } else { 2 };
    ([(FOR, clients), (PROTO, proto), (HOST, host.unwrap_or(HeaderValue::from_static("")))], count)
}
