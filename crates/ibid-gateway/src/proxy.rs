//! Takes a request to its upstream and brings the reply back: the innermost service of the gateway.
//!
//! It never sends a request again by itself once a byte may have been written. What it knows about a failure it says
//! in the reply's extensions ([`Fate`]), and the layer around it settles by that.

use std::{
    convert::Infallible,
    future::Future,
    net::IpAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, Version, header};
use hyper::{body::Incoming, upgrade::OnUpgrade};
use hyper_util::rt::TokioIo;
use ibid::{
    Policy, Reason, Refusal, Refusals, TrustedProxies, grpc,
    http::{Around, Fate, Grant, RequestBody, ResponseBody, refusal_response},
};
use tower_service::Service;

use crate::{
    live::Chosen,
    trace::{self, Trace},
    upstream::{Affinity, Care, Failure, UpstreamBody},
};

/// A request's body on its way to the upstream.
pub type Body = RequestBody<Incoming>;
/// A reply's body on its way back.
pub type Reply = ResponseBody<UpstreamBody>;

/// What the gateway knows about one client's connection.
pub struct Client {
    /// Who is at its other end.
    pub peer: IpAddr,
    /// Whether it came over TLS.
    pub secure: bool,
    /// Whether its forwarding headers are believed.
    pub trusted: bool,
    affinity: Affinity<Body>,
}

/// The innermost service: one per client connection.
#[derive(Clone)]
pub struct Proxy {
    client: Arc<Client>,
}

impl Client {
    /// A connection that has just been accepted.
    pub fn new(peer: IpAddr, secure: bool, trusted: &TrustedProxies) -> Arc<Self> {
        Arc::new(Self { peer, secure, trusted: trusted.trusts(Some(peer)), affinity: Affinity::default() })
    }
}

impl Proxy {
    /// For one client.
    pub fn new(client: Arc<Client>) -> Self {
        Self { client }
    }
}

impl Service<Request<Body>> for Proxy {
    type Response = Response<Reply>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Reply>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let client = self.client.clone();
        Box::pin(async move { Ok(forward(&client, request).await) })
    }
}

async fn forward(client: &Client, mut request: Request<Body>) -> Response<Reply> {
    let upgrade = wanted_upgrade(&mut request);
    remove_hop_by_hop(request.headers_mut());
    if let Some((protocol, _)) = &upgrade {
        request.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        request.headers_mut().insert(header::UPGRADE, protocol.clone());
    }
    // The server has answered it by now.
    request.headers_mut().remove(header::EXPECT);
    say_who_asked(client, &mut request);
    let is_call = grpc::is_call(request.version(), request.headers());
    if is_call {
        // Servers take a call without it for one that came through a proxy which loses trailers.
        request.headers_mut().insert(header::TE, HeaderValue::from_static("trailers"));
    }
    let care = if request.extensions().get::<Grant>().is_some() { Care::Claimed } else { Care::Plain };
    let chosen = request.extensions_mut().remove::<Chosen>().expect("the server chose an upstream");
    request.extensions_mut().remove::<Around>();
    let traced = request.extensions_mut().remove::<Trace>();
    let sent = traced.map(|trace| trace.send(request.headers_mut(), care == Care::Claimed));
    let refusals = chosen.refusals;
    let mut answer = match chosen.upstream.send(request, care, &client.affinity).await {
        Ok(reply) => answer(reply, upgrade, refusals),
        Err(Failure::NeverWritten(why)) => {
            failed(Reason::UpstreamUnreachable, &why.to_string(), Fate::NotStarted, is_call, refusals)
        }
        Err(Failure::Lost(why)) => failed(Reason::UpstreamLost, &why.to_string(), Fate::Lost, is_call, refusals),
    };
    // Whatever the app means by it: here it means what the gateway says.
    trace::take_kept(&mut answer);
    if let Some(sent) = sent {
        sent.answered(&mut answer);
    }
    answer
}

fn answer(
    mut reply: Response<UpstreamBody>, upgrade: Option<(HeaderValue, OnUpgrade)>, refusals: Refusals,
) -> Response<Reply> {
    if reply.status() != StatusCode::SWITCHING_PROTOCOLS {
        remove_hop_by_hop(reply.headers_mut());
        return reply.map(Reply::untouched);
    }
    let Some((_, client)) = upgrade else {
        let why = "the app answered with an upgrade that was not asked for";
        return failed(Reason::UpstreamLost, why, Fate::Lost, false, refusals);
    };
    let upstream = hyper::upgrade::on(&mut reply);
    tokio::spawn(async move {
        if let (Ok(client), Ok(upstream)) = tokio::join!(client, upstream) {
            // Either side ends it; there is nobody left to tell how.
            let _ = tokio::io::copy_bidirectional(&mut TokioIo::new(client), &mut TokioIo::new(upstream)).await;
        }
    });
    reply.map(|_| Reply::whole("", None))
}

fn failed(reason: Reason, why: &str, fate: fn(String) -> Fate, is_call: bool, refusals: Refusals) -> Response<Reply> {
    // Where the upstream is is not the caller's business; operators read it in the log.
    tracing::warn!(reason = reason.name(), why, "upstream");
    let detail = match reason {
        Reason::UpstreamUnreachable => "the app could not be reached; nothing was sent to it",
        _ => "the app's answer was lost; the request may have been executed",
    };
    let (refusal, mut policy) = (Refusal::new(reason, detail), Policy::ietf());
    policy.refusals = refusals;
    let mut answer = match is_call {
        true => grpc::refusal_response(&refusal, &policy, ""),
        false => refusal_response(&refusal, &policy, ""),
    };
    answer.extensions_mut().insert(fate(detail.to_owned()));
    answer
}

fn wanted_upgrade(request: &mut Request<Body>) -> Option<(HeaderValue, OnUpgrade)> {
    if request.version() != Version::HTTP_11 {
        return None;
    }
    let named = |line: &HeaderValue| {
        let line = line.to_str().unwrap_or_default();
        line.split(',').any(|token| token.trim().eq_ignore_ascii_case("upgrade"))
    };
    let asked = request.headers().get_all(header::CONNECTION).iter().any(named);
    let protocol = request.headers().get(header::UPGRADE).filter(|_| asked)?.clone();
    Some((protocol, hyper::upgrade::on(request)))
}

/// Removes what concerns one connection only, and what `Connection` names.
fn remove_hop_by_hop(headers: &mut HeaderMap) {
    const HOP_BY_HOP: [HeaderName; 7] = [
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

/// `X-Forwarded-*`: continued if the sender is trusted, else begun anew, so that nobody can lie about where they are.
fn say_who_asked(client: &Client, request: &mut Request<Body>) {
    const FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
    const PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
    const HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
    let host = match request.uri().authority() {
        Some(authority) => HeaderValue::from_str(authority.as_str()).ok(),
        None => request.headers().get(header::HOST).cloned(),
    };
    let headers = request.headers_mut();
    if !client.trusted {
        headers.remove(header::FORWARDED);
        headers.remove(FOR);
    }
    let peer = client.peer.to_canonical().to_string();
    let chain = match headers.get(FOR).and_then(|before| before.to_str().ok()) {
        Some(before) => format!("{before}, {peer}"),
        None => peer,
    };
    headers.insert(FOR, HeaderValue::from_str(&chain).expect("an address"));
    if !client.trusted || !headers.contains_key(PROTO) {
        headers.insert(PROTO, HeaderValue::from_static(if client.secure { "https" } else { "http" }));
    }
    if let Some(host) = host.filter(|_| !client.trusted || !headers.contains_key(HOST)) {
        headers.insert(HOST, host);
    }
}
