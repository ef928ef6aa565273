//! The innermost service of the gateway: sends a request to its upstream and returns the response.
//!
//! It never resends a request once a byte may have been written. It reports the kind of failure in the response's
//! extensions ([`DispatchOutcome`]); the layer around it settles accordingly.

use std::{
    convert::Infallible,
    future::Future,
    net::IpAddr,
    pin::Pin,
    sync::{Arc, Weak},
    task::{Context, Poll},
    time::Duration,
};

use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, Version, header};
use hyper::{body::Incoming, upgrade::OnUpgrade};
use ibid::{
    Policy, Refusal, RefusalFormat, RefusalReason, TrustedProxies, grpc,
    http::{
        DispatchOutcome, PollHook, Protocol, RequestBody, ResponseBody, RunInfo, SendState, plain_response,
        refusal_response, sent_request_id,
    },
};
use tokio::sync::OwnedSemaphorePermit;
use tower_service::Service;

use self::outgoing_body::{BodyProgress, BodyStartError, OutgoingBody};
use crate::{
    config::LimitSettings,
    live_config::RoutedUpstream,
    server::interim::InterimResponses,
    trace::{self, RequestTrace},
    upstream::{self, Affinity, ReusePolicy, SendFailure, UpstreamBody, join_header_lines},
};

mod outgoing_body;
pub mod tunnel;

pub type UpstreamRequestBody = OutgoingBody;
pub type ProxyResponseBody = ResponseBody<UpstreamBody>;

/// A client connection, as the proxy sees it.
pub struct ProxyClient {
    pub peer: IpAddr,
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
    affinity: Affinity<UpstreamRequestBody>,
}

/// The innermost service. Each client connection has one.
#[derive(Clone)]
pub struct Proxy {
    client: Arc<ProxyClient>,
}

impl ProxyClient {
    pub fn new(
        peer: IpAddr, secure: bool, trusted: &TrustedProxies, limits: &LimitSettings, place: Weak<OwnedSemaphorePermit>,
    ) -> Arc<Self> {
        Arc::new(Self {
            peer,
            is_secure: secure,
            is_trusted: trusted.trusts(Some(peer)),
            connection_permit: place,
            body_timeout: limits.body_timeout,
            reply_timeout: limits.reply_timeout,
            tunnel_timeout: limits.tunnel_timeout,
            interim: Arc::default(),
            affinity: Affinity::default(),
        })
    }
}

impl Proxy {
    pub fn new(client: Arc<ProxyClient>) -> Self {
        Self { client }
    }
}

impl Service<Request<RequestBody<Incoming>>> for Proxy {
    type Response = Response<ProxyResponseBody>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<ProxyResponseBody>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<RequestBody<Incoming>>) -> Self::Future {
        let client = self.client.clone();
        Box::pin(async move { Ok(forward(&client, request).await) })
    }
}

async fn forward(client: &ProxyClient, mut request: Request<RequestBody<Incoming>>) -> Response<ProxyResponseBody> {
    let upgrade = tunnel::requested_upgrade(&mut request);
    remove_hop_by_hop(request.headers_mut());
    if let Some((protocol, _)) = &upgrade {
        request.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        request.headers_mut().insert(header::UPGRADE, protocol.clone());
    }
    // The server has already answered `Expect: 100-continue`.
    request.headers_mut().remove(header::EXPECT);
    set_forwarded_headers(client, &mut request);
    let request_id = sent_request_id(request.headers()).cloned();
    let request_id = request_id.as_ref();
    let is_call = grpc::is_call(request.version(), request.headers());
    if is_call {
        // gRPC servers assume that a call without `TE: trailers` came through a proxy that drops trailers.
        request.headers_mut().insert(header::TE, HeaderValue::from_static("trailers"));
    }
    let runs = request.extensions().get::<RunInfo>().is_some();
    // Probes also belong to a claim.
    let is_claimed = runs || request.extensions().get::<SendState>().is_some();
    let care = if is_claimed { ReusePolicy::Claimed } else { ReusePolicy::PassThrough };
    let chosen = request.extensions_mut().remove::<RoutedUpstream>().expect("the server chose an upstream");
    request.extensions_mut().remove::<PollHook>();
    let traced = request.extensions_mut().remove::<RequestTrace>();
    let version = request.version();
    let refusals = chosen.refusals;
    // The policy limits the time of claimed requests. Clients limit that of gRPC calls, which may be silent streams.
    let is_timed = !is_claimed && !chosen.upstream.is_grpc();
    let (request, progress) = match start_request(client, request, is_timed).await {
        Ok(begun) => begun,
        Err(not_begun) => return body_error_response(&not_begun, version, refusals),
    };
    let (mut head, body) = request.into_parts();
    let sent = traced.map(|trace| trace.send(&mut head.headers, runs));
    let mut request = Request::from_parts(head, body);
    if version == Version::HTTP_11 {
        let (interim, serial) = (client.interim.clone(), client.interim.request_number());
        hyper::ext::on_informational(&mut request, move |reply| interim.push(serial, reply.status(), reply.headers()));
    }
    let reply = chosen.upstream.send(request, care, &client.affinity);
    let reply = async {
        match is_timed {
            true => outgoing_body::wait_for_reply(reply, progress.as_deref(), client.reply_timeout).await,
            false => Some(reply.await),
        }
    };
    let reply = match version {
        Version::HTTP_11 => client.interim.write_while_waiting(reply).await,
        _ => reply.await,
    };
    let mut answer = match reply {
        Some(Ok(reply)) => build_response(client, reply, upgrade, refusals, request_id),
        Some(Err(SendFailure::NeverWritten(why @ upstream::UpstreamError::PoolExhausted { .. }))) => {
            failed(RefusalReason::Overloaded, &why.to_string(), DispatchOutcome::NotSent, is_call, refusals, request_id)
        }
        Some(Err(SendFailure::NeverWritten(why))) => failed(
            RefusalReason::UpstreamUnreachable,
            &why.to_string(),
            DispatchOutcome::NotSent,
            is_call,
            refusals,
            request_id,
        ),
        Some(Err(SendFailure::MaybeWritten(_))) if progress.is_some_and(|progress| progress.has_timed_out()) => {
            body_error_response(&BodyStartError::TimedOut, version, refusals)
        }
        Some(Err(SendFailure::MaybeWritten(why))) => failed(
            RefusalReason::UpstreamLost,
            &why.to_string(),
            DispatchOutcome::ResponseLost,
            is_call,
            refusals,
            request_id,
        ),
        None => failed(
            RefusalReason::UpstreamTimeout,
            "no reply within limits.reply_timeout",
            DispatchOutcome::ResponseLost,
            is_call,
            refusals,
            request_id,
        ),
    };
    // Removes the gateway's own trace header if the app sent it.
    trace::take_original_context(&mut answer);
    if let Some(sent) = sent {
        sent.answered(&mut answer);
    }
    answer
}

/// Returns the request to send upstream. A timed request waits here for the first frame of its body.
async fn start_request(
    client: &ProxyClient, request: Request<RequestBody<Incoming>>, is_timed: bool,
) -> Result<(Request<UpstreamRequestBody>, Option<Arc<BodyProgress>>), BodyStartError> {
    let (head, body) = request.into_parts();
    let (body, progress) = match is_timed {
        true => OutgoingBody::wait_for_first_frame(body, client.body_timeout).await?,
        false => (OutgoingBody::without_timeout(body), None),
    };
    Ok((Request::from_parts(head, body), progress))
}

fn build_response(
    client: &ProxyClient, mut reply: Response<UpstreamBody>, upgrade: Option<(HeaderValue, OnUpgrade)>,
    refusals: RefusalFormat, request_id: Option<&HeaderValue>,
) -> Response<ProxyResponseBody> {
    if reply.status() != StatusCode::SWITCHING_PROTOCOLS {
        remove_hop_by_hop(reply.headers_mut());
        return reply.map(ProxyResponseBody::untouched);
    }
    let Some((_, onto)) = upgrade.filter(|(asked, _)| tunnel::is_upgrade_accepted(asked, reply.headers())) else {
        let why = "the app answered with an upgrade that was not asked for";
        return failed(RefusalReason::UpstreamLost, why, DispatchOutcome::ResponseLost, false, refusals, request_id);
    };
    let upstream = hyper::upgrade::on(&mut reply);
    let (place, limit) = (client.connection_permit.upgrade(), client.tunnel_timeout);
    let (head, body) = reply.into_parts();
    tokio::spawn(async move {
        tunnel::copy_both_ways(onto, upstream, limit).await;
        // Both connections count towards their limits until here.
        drop((place, body));
    });
    Response::from_parts(head, ProxyResponseBody::whole("", None))
}

/// The response to a pass-through request whose body did not arrive.
fn body_error_response(why: &BodyStartError, version: Version, refusals: RefusalFormat) -> Response<ProxyResponseBody> {
    let (status, detail) = match why {
        BodyStartError::TimedOut => (StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time"),
        BodyStartError::Broken => (StatusCode::BAD_REQUEST, "the body broke off or is malformed"),
    };
    let mut answer = plain_response(status, detail, &refusal_policy(refusals), Protocol::Http);
    if version != Version::HTTP_2 {
        // The rest of the body may still follow on this connection.
        answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    answer
}

/// A policy that only sets the format of the refusal.
fn refusal_policy(refusals: RefusalFormat) -> Policy {
    let mut policy = Policy::ietf();
    policy.refusals = refusals;
    policy
}

/// The refusal for a request whose response did not arrive, or broke off.
pub(crate) fn failed(
    reason: RefusalReason, why: &str, fate: fn(String) -> DispatchOutcome, is_call: bool, refusals: RefusalFormat,
    request_id: Option<&HeaderValue>,
) -> Response<ProxyResponseBody> {
    // Callers must not learn the upstream's address; it goes to the log.
    let request_id = request_id.and_then(|id| id.to_str().ok());
    tracing::warn!(reason = reason.name(), why, request_id, "upstream");
    let detail = match reason {
        RefusalReason::UpstreamUnreachable => "the app could not be reached; nothing was sent to it",
        RefusalReason::Overloaded => "no connection to the app was free in time; nothing was sent to it",
        RefusalReason::UpstreamTimeout => {
            "the app did not begin its answer in time; the request may have been executed"
        }
        _ => "the app's answer was lost; the request may have been executed",
    };
    let (mut refusal, policy) = (Refusal::new(reason, detail), refusal_policy(refusals));
    if reason == RefusalReason::Overloaded {
        refusal = refusal.retry_after(Duration::from_secs(1));
    }
    let mut answer = match is_call {
        true => grpc::refusal_response(&refusal, &policy, ""),
        false => refusal_response(&refusal, &policy, ""),
    };
    answer.extensions_mut().insert(fate(detail.to_owned()));
    answer
}

/// Removes hop-by-hop headers, and the headers that `Connection` names.
fn remove_hop_by_hop(headers: &mut HeaderMap) {
    const HOP_BY_HOP: [HeaderName; 8] = [
        HeaderName::from_static("http2-settings"),
        HeaderName::from_static("keep-alive"),
        HeaderName::from_static("proxy-connection"),
        header::PROXY_AUTHENTICATE,
        header::PROXY_AUTHORIZATION,
        header::TRANSFER_ENCODING,
        header::UPGRADE,
        header::TE,
    ];
    let wants_trailers = headers.get(header::TE).is_some_and(|te| te.to_str().unwrap_or_default().contains("trailers"));
    if headers.contains_key(header::CONNECTION) {
        let lines: Vec<_> = headers.get_all(header::CONNECTION).iter().cloned().collect();
        for name in lines.iter().filter_map(|line| line.to_str().ok()).flat_map(|line| line.split(',')) {
            headers.remove(name.trim());
        }
        headers.remove(header::CONNECTION);
    }
    HOP_BY_HOP.iter().for_each(|name| drop(headers.remove(name)));
    if wants_trailers {
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
    }
}

/// Sets the `X-Forwarded-*` headers. Values from a trusted peer are extended; others are replaced, because they may be
/// forged.
///
/// Lists (`X-Forwarded-For`, `Forwarded`) are joined into one line, in order. For the other headers the last line
/// counts, because the nearest proxy wrote it.
fn set_forwarded_headers<B>(client: &ProxyClient, request: &mut Request<B>) {
    const FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
    const PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
    const HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
    let own_host = match request.uri().authority() {
        Some(authority) => HeaderValue::from_str(authority.as_str()).ok(),
        None => request.headers().get(header::HOST).cloned(),
    };
    let own_proto = HeaderValue::from_static(if client.is_secure { "https" } else { "http" });
    let headers = request.headers_mut();
    if !client.is_trusted {
        [header::FORWARDED, FOR, PROTO, HOST].iter().for_each(|name| drop(headers.remove(name)));
    }
    let peer = client.peer.to_canonical().to_string();
    headers.append(FOR, HeaderValue::from_str(&peer).expect("an address"));
    join_header_lines(headers, FOR, b", ");
    join_header_lines(headers, header::FORWARDED, b", ");
    for (name, own) in [(PROTO, Some(own_proto)), (HOST, own_host)] {
        let last = headers.get_all(&name).iter().next_back().cloned();
        if let Some(value) = last.or(own) {
            headers.insert(name, value);
        }
    }
}
