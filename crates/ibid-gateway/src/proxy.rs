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
use hyper::{body::Incoming, upgrade::OnUpgrade};
use ibid::{
    Refusal, RefusalReason,
    http::{
        App, AppCall, AppError, DispatchOutcome, Protocol, RequestBody, ResponseBody, plain_response, refusal_response,
        sent_request_id,
    },
    policy::RefusalFormat,
    scope::TrustedProxies,
};
use tokio::sync::OwnedSemaphorePermit;

use self::outgoing_body::{BODY_TIMED_OUT, BodyFailure, BodyProgress, OutgoingBody};
use crate::{
    config::LimitSettings,
    server::interim::InterimResponses,
    trace::{self, RequestTrace},
    upstream::{self, Affinity, OnInterim, ReusePolicy, SendFailure, UpstreamBody, UpstreamClient, join_header_lines},
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

impl App<Incoming> for Proxy {
    type Body = ProxyResponseBody;
    type PassError = Infallible;
    type PassFuture = Pin<Box<dyn Future<Output = Result<Response<ProxyResponseBody>, Infallible>> + Send>>;

    fn pass(&mut self, request: Request<RequestBody<Incoming>>) -> Self::PassFuture {
        let proxy = self.clone();
        Box::pin(async move {
            let call = AppCall { run: None, claim: None, send_state: None };
            let failed = |error: ProxyError| error.response.expect("the proxy answers for the app");
            Ok(proxy.forward(request, call).await.unwrap_or_else(failed))
        })
    }

    async fn send(
        &mut self, request: Request<RequestBody<Incoming>>, call: AppCall<'_>,
    ) -> Result<Response<ProxyResponseBody>, AppError<ProxyResponseBody>> {
        self.forward(request, call).await.map_err(|error| *error)
    }
}

impl Proxy {
    async fn forward(
        &self, mut request: Request<RequestBody<Incoming>>, call: AppCall<'_>,
    ) -> Result<Response<ProxyResponseBody>, ProxyError> {
        let client = &self.client;
        let upgrade = tunnel::requested_upgrade(&mut request);
        remove_hop_by_hop(request.headers_mut());
        if let Some((protocol, _)) = &upgrade {
            request.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
            request.headers_mut().insert(header::UPGRADE, protocol.clone());
        }
        // The server has already answered `Expect: 100-continue`.
        request.headers_mut().remove(header::EXPECT);
        set_forwarded_headers(client, &mut request);
        let version = request.version();
        let failure = RequestFailure {
            protocol: Protocol::of_request(version, request.headers()),
            refusals: self.refusals,
            request_id: sent_request_id(request.headers()).cloned(),
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
        let (mut request, progress) = match start_request(client, request, is_timed).await {
            Ok(begun) => begun,
            Err(failure) => return Ok(body_error_response(failure, version, self.refusals)),
        };
        let sent = self.trace.as_ref().map(|trace| trace.send(request.headers_mut(), call.run.is_some()));
        let is_http11 = version == Version::HTTP_11;
        let serial = if is_http11 { client.interim.request_number() } else { 0 };
        let push = |status: StatusCode, headers: &HeaderMap| client.interim.push(serial, status, headers);
        let on_interim: Option<OnInterim<'_>> = if is_http11 { Some(&push) } else { None };
        let send = self.upstream.send_tracked(&mut request, care, &client.affinity, call.send_state, on_interim);
        let reply = pin!(send);
        let reply = pin!(async {
            match is_timed {
                true => outgoing_body::wait_for_reply(reply, progress.as_deref(), client.reply_timeout).await,
                false => Some(reply.await),
            }
        });
        let reply = match version {
            Version::HTTP_11 => client.interim.write_while_waiting(reply).await,
            _ => reply.await,
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

/// Returns the request to send upstream. A timed request waits here for the first frame of its body.
async fn start_request(
    client: &ProxyClient, request: Request<RequestBody<Incoming>>, is_timed: bool,
) -> Result<(Request<UpstreamRequestBody>, Option<Arc<BodyProgress>>), BodyFailure> {
    let (head, body) = request.into_parts();
    let (body, progress) = match is_timed {
        true => OutgoingBody::wait_for_first_frame(body, client.body_timeout).await?,
        false => (OutgoingBody::without_timeout(body), None),
    };
    Ok((Request::from_parts(head, body), progress))
}

fn build_response(
    client: &ProxyClient, mut reply: Response<UpstreamBody>, upgrade: Option<(HeaderValue, OnUpgrade)>,
    failure: &RequestFailure,
) -> Result<Response<ProxyResponseBody>, ProxyError> {
    if reply.status() != StatusCode::SWITCHING_PROTOCOLS {
        remove_hop_by_hop(reply.headers_mut());
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
        let request_id = self.request_id.as_ref().and_then(|id| id.to_str().ok());
        tracing::warn!(reason = reason.name(), why, request_id, "upstream");
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

/// Removes hop-by-hop headers, and the headers that `Connection` names.
fn remove_hop_by_hop(headers: &mut HeaderMap) {
    static HOP_BY_HOP: [HeaderName; 8] = [
        HeaderName::from_static("http2-settings"),
        HeaderName::from_static("keep-alive"),
        HeaderName::from_static("proxy-connection"),
        header::PROXY_AUTHENTICATE,
        header::PROXY_AUTHORIZATION,
        header::TRANSFER_ENCODING,
        header::UPGRADE,
        header::TE,
    ];
    // Most messages have none.
    if !headers.keys().any(|name| *name == header::CONNECTION || HOP_BY_HOP.contains(name)) {
        return;
    }
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
    static ALL: [HeaderName; 4] = [header::FORWARDED, FOR, PROTO, HOST];
    let own_host = match request.uri().authority() {
        Some(authority) => HeaderValue::from_str(authority.as_str()).ok(),
        None => request.headers().get(header::HOST).cloned(),
    };
    let own_proto = HeaderValue::from_static(if client.is_secure { "https" } else { "http" });
    let headers = request.headers_mut();
    let is_forwarded = headers.keys().any(|name| ALL.contains(name));
    if is_forwarded && !client.is_trusted {
        ALL.iter().for_each(|name| drop(headers.remove(name)));
    }
    headers.append(FOR, client.forwarded_for.clone());
    if is_forwarded {
        join_header_lines(headers, FOR, b", ");
        join_header_lines(headers, header::FORWARDED, b", ");
    }
    for (name, own) in [(PROTO, Some(own_proto)), (HOST, own_host)] {
        let last = if is_forwarded { headers.get_all(&name).iter().next_back().cloned() } else { None };
        if let Some(value) = last.or(own) {
            headers.insert(name, value);
        }
    }
}
