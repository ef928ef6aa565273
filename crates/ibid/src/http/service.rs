//! A request's way through the layer, top to bottom.

use std::{
    pin::Pin,
    sync::{Arc, OnceLock},
    time::Duration,
};

use bytes::{Buf, Bytes, BytesMut};
use http::{HeaderMap, Request, Response, StatusCode, header, request::Parts};
use http_body::Body;
use tokio::time::{Instant, timeout_at};
use tower_service::Service;

use super::{
    Peer, Protocol, Route, Routed, Routing, Shared,
    answer::{self, Telling},
    around::{Around, Inside},
    body::{BoxError, RequestBody, ResponseBody},
    budget::Reserved,
    cors::{Cors, Preflight},
    future::{Patch, ResponseFuture, Side, Work},
    key_headers,
    operation::{Answer, HttpOperation},
    reply::{self, Tail},
    request::{self, Judged, Keyed, Unread},
    shape,
};
use crate::{
    engine::{Stored, Verdict},
    fingerprint::PartDigests,
    grpc::{self, Code},
    key::mask,
    observe::{Answered, Notice, Outcome, Shadow},
    policy::{Mode, Policy},
    record::Record,
    refusal::{Reason, Refusal},
    scope::ScopePart,
    store::{Address, Finished},
    time::now_ms,
};

/// The status of what is told before there is an answer.
const NO_ANSWER: u16 = 100;

/// How long the run itself took, told by the operation.
#[derive(Debug, Default)]
pub(super) struct Ran(OnceLock<(Duration, Option<u32>)>);

impl Ran {
    pub(super) fn set(&self, took: Duration, attempt: Option<u32>) {
        let _ = self.0.set((took, attempt));
    }
}

/// What is told about one request when it has been answered.
struct Seen {
    route: Arc<Route>,
    method: http::Method,
    uri: http::Uri,
    key: String,
    address: Option<Address>,
    parts: Option<PartDigests>,
    peer: Option<std::net::IpAddr>,
    user_agent: Option<http::HeaderValue>,
    started: Instant,
    ran: Arc<Ran>,
}

pub(super) fn call<S, B, RB>(
    shared: &Arc<Shared>, routing: &dyn Routing, mut inner: S, request: Request<B>,
) -> ResponseFuture<S::Future, RB>
where
    S: Service<Request<RequestBody<B>>, Response = Response<RB>, Future: Send> + Clone + Send + 'static,
    S::Error: Into<BoxError> + Send,
    B: Body<Data: Buf + Send, Error: Into<BoxError>> + Send + 'static,
    RB: Body<Data: Buf + Send, Error: Into<BoxError>> + Send + 'static,
{
    let (mut parts, body) = request.into_parts();
    let route = match routing.route(&parts) {
        Routed::Covered(route) => route,
        Routed::Pass => {
            let preflight = preflight(shared, routing, &parts);
            let request = Request::from_parts(parts, RequestBody::untouched(body));
            return ResponseFuture::passed(inner.call(request), preflight);
        }
        Routed::Refused(refusal) => {
            let policy = Policy { refusals: routing.refusals(&parts), ..Policy::ietf() };
            let protocol = if grpc::is_call(parts.version, &parts.headers) { Protocol::Grpc } else { Protocol::Http };
            let mut telling = telling(shared, &parts, protocol, &policy);
            return ResponseFuture::ready(answer::refuse(&refusal, &policy, "", &mut telling));
        }
    };
    let keyed = request::judge(shared, &route, &parts);
    strip_own_headers(&mut parts.headers, &route.policy);
    let mut seen = Seen::of(&route, &parts);
    match keyed {
        Judged::Keyless => {
            seen.tell(shared, Outcome::Keyless, NO_ANSWER);
            ResponseFuture::passed(inner.call(Request::from_parts(parts, RequestBody::untouched(body))), None)
        }
        Judged::Refused(refusal, _) if route.policy.mode == Mode::Shadow => {
            seen.tell(shared, Outcome::Shadow(Shadow::Refusal(refusal.reason)), NO_ANSWER);
            ResponseFuture::passed(inner.call(Request::from_parts(parts, RequestBody::untouched(body))), None)
        }
        Judged::Refused(refusal, masked) => {
            seen.key = masked;
            let mut telling = telling(shared, &parts, route.protocol, &route.policy);
            let answer = answer::refuse(&refusal, &route.policy, &seen.key, &mut telling);
            seen.tell(shared, Outcome::Refused(refusal.reason), seen.status(&answer));
            ResponseFuture::ready(answer)
        }
        Judged::Keyed(keyed) => {
            seen.key = keyed.masked();
            let side = Side::new();
            let around = parts.extensions.get::<Around>().cloned();
            let work = work(shared.clone(), inner, parts, body, keyed, seen, side.clone());
            let mut work: Work<RB> = Box::pin(work);
            if let Some(around) = around {
                work = Box::pin(Inside { work, around });
            }
            ResponseFuture::covered(work, side, shared.engine.running().clone())
        }
    }
}

/// Everything about a request with a key. Once `side` is told of the claim, it runs to its end whatever the client
/// does.
#[expect(clippy::manual_async_fn, reason = "an async fn would hold its arguments twice")]
fn work<S, B, RB>(
    shared: Arc<Shared>, mut inner: S, parts: Parts, body: B, keyed: Keyed, mut seen: Seen, side: Arc<Side<RB>>,
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
        let shadow = policy.mode == Mode::Shadow;
        let mut telling = telling(&shared, &parts, route.protocol, policy);
        let deadline = if route.protocol == Protocol::Grpc { grpc::deadline(&parts.headers) } else { None };
        let Some(_slot) = shared.engine.running().enter(shared.settings.max_running) else {
            let body = RequestBody::untouched(body);
            return Some(refused(&shared, inner, parts, body, overloaded(), shadow, &seen, &mut telling).await);
        };
        let (body, trailers, buffers) = match read_body(&shared, &route, &parts, body).await {
            Ok(read) => read,
            Err(Unread::Broken(status, detail)) => {
                let mut answer = answer::plain(status, detail, policy, &telling);
                if route.protocol == Protocol::Http {
                    answer.headers_mut().insert(header::CONNECTION, http::HeaderValue::from_static("close"));
                }
                return Some(answer);
            }
            Err(Unread::Refused(refusal, begun, rest)) => {
                let body = RequestBody::begun(begun, rest);
                return Some(refused(&shared, inner, parts, body, refusal, shadow, &seen, &mut telling).await);
            }
        };
        if let Err(refusal) = request::check_signature(policy, &parts, &body) {
            let body = RequestBody::whole(body, trailers);
            return Some(refused(&shared, inner, parts, body, refusal, shadow, &seen, &mut telling).await);
        }
        let (ask, key, digests) = match keyed.ask(&shared, &route, &parts, &body, telling.requested_at_ms) {
            Ok(Some(ask)) => ask,
            Ok(None) => {
                seen.tell(&shared, Outcome::Keyless, NO_ANSWER);
                let request = Request::from_parts(parts, RequestBody::whole(body, trailers));
                return Some(pass(inner.call(request).await, policy, &telling));
            }
            Err(refusal) => {
                let body = RequestBody::whole(body, trailers);
                return Some(refused(&shared, inner, parts, body, refusal, shadow, &seen, &mut telling).await);
            }
        };
        seen.address = Some(ask.address);
        seen.parts = digests;
        if seen.key.is_empty() {
            seen.key = mask(&key);
        }
        if policy.scope.iter().any(ScopePart::names_caller) {
            shared.twins.look(&key, &ask.fingerprint, &ask.address);
        }
        side.claim();
        let operation = HttpOperation {
            inner,
            request: Some((parts, body, trailers)),
            key,
            route: route.clone(),
            side,
            telling: telling.clone(),
            buffers,
            ran: seen.ran.clone(),
            deadline,
            _body: std::marker::PhantomData::<fn(B)>,
        };
        let verdict = shared.engine.execute(policy, ask, operation).await;
        answered(&shared, verdict, &seen, &mut telling).await
    }
}

/// What the client gets for a verdict. `None` if it has its answer already.
async fn answered<RB>(
    shared: &Shared, verdict: Verdict<Answer<RB>>, seen: &Seen, telling: &mut Telling,
) -> Option<Response<ResponseBody<RB>>> {
    let policy = &seen.route.policy;
    let (answer, outcome) = match verdict {
        Verdict::Ran(Answer::Whole(answer, whole), stored) => {
            (answer::first(answer, Some(whole), policy, Some(stored), telling), outcome(stored))
        }
        Verdict::Ran(Answer::Tail(tail), stored) => {
            let status = seen.tail_status(&tail);
            Box::pin(tail.send()).await;
            seen.tell(shared, outcome(stored), status);
            return None;
        }
        Verdict::Ran(Answer::Refused(refusal), stored) => {
            (answer::refuse(&refusal, policy, &seen.key, telling), outcome(stored))
        }
        Verdict::Ran(Answer::Panicked, stored) => {
            let detail = "the handler failed; whether the operation took place is not known";
            (answer::plain(StatusCode::INTERNAL_SERVER_ERROR, detail, policy, telling), outcome(stored))
        }
        Verdict::Replay(finished, stored) => match replayed(shared, finished, seen) {
            Ok(record) => (answer::replay(record, policy, stored, telling), Outcome::Replayed),
            Err(refusal) => (answer::refuse(&refusal, policy, &seen.key, telling), Outcome::Refused(refusal.reason)),
        },
        Verdict::Refused(refusal) => {
            (answer::refuse(&refusal, policy, &seen.key, telling), Outcome::Refused(refusal.reason))
        }
    };
    seen.tell(shared, outcome, seen.status(&answer));
    Some(answer)
}

fn replayed(shared: &Shared, finished: Finished, seen: &Seen) -> Result<Record, Refusal> {
    Record::decode(finished.record).map_err(|why| {
        let at = seen.address.expect("what was found has an address");
        shared.engine.observer().noticed(&Notice::Unreadable(&at));
        Refusal::new(Reason::StoreUnavailable, format!("the remembered answer cannot be read: {why}"))
    })
}

fn outcome(stored: Stored) -> Outcome {
    match stored {
        Stored::Yes => Outcome::Executed,
        Stored::No => Outcome::Released,
        Stored::Pending => Outcome::Pending,
        Stored::Unknown => Outcome::Unknown,
        Stored::Degraded | Stored::Solo => Outcome::Degraded,
        Stored::Shadowed(would) => Outcome::Shadow(would),
    }
}

/// A refusal; in shadow mode the request passes through.
#[allow(clippy::too_many_arguments)]
async fn refused<S, B, RB>(
    shared: &Shared, mut inner: S, parts: Parts, body: RequestBody<B>, refusal: Refusal, shadow: bool, seen: &Seen,
    telling: &mut Telling,
) -> Response<ResponseBody<RB>>
where
    S: Service<Request<RequestBody<B>>, Response = Response<RB>>,
{
    if shadow {
        seen.tell(shared, Outcome::Shadow(Shadow::Refusal(refusal.reason)), NO_ANSWER);
        return pass(inner.call(Request::from_parts(parts, body)).await, &seen.route.policy, telling);
    }
    let answer = answer::refuse(&refusal, &seen.route.policy, &seen.key, telling);
    seen.tell(shared, Outcome::Refused(refusal.reason), seen.status(&answer));
    answer
}

fn pass<RB, E>(response: Result<Response<RB>, E>, policy: &Policy, telling: &Telling) -> Response<ResponseBody<RB>> {
    match response {
        Ok(response) => response.map(ResponseBody::untouched),
        Err(_) => answer::plain(StatusCode::BAD_GATEWAY, "the app could not answer", policy, telling),
    }
}

type WholeBody = (Bytes, Option<HeaderMap>, Reserved);

/// Reads a request's body: bounded by the policy, by the memory budget and in time.
async fn read_body<B>(shared: &Shared, route: &Route, parts: &Parts, body: B) -> Result<WholeBody, Unread<Pin<Box<B>>>>
where
    B: Body<Data: Buf, Error: Into<BoxError>>,
{
    let policy = &route.policy;
    let mut body = Box::pin(body);
    let declared = request::content_length(&parts.headers);
    let Some(mut buffers) = shared.budget.reserve(declared.unwrap_or(0)) else {
        return Err(Unread::Refused(overloaded(), Bytes::new(), body));
    };
    let mut trailers = None;
    let mut only = Bytes::new();
    let mut more = BytesMut::new();
    let deadline = Instant::now() + shared.settings.body_timeout;
    loop {
        let frame = match timeout_at(deadline, reply::next(&mut body)).await {
            Err(_) => return Err(Unread::Broken(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time")),
            Ok(Some(Err(_))) => {
                return Err(Unread::Broken(StatusCode::BAD_REQUEST, "the body broke off or is malformed"));
            }
            Ok(None) => break,
            Ok(Some(Ok(frame))) => frame,
        };
        match frame.into_data() {
            Ok(data) if only.is_empty() && more.is_empty() => only = data,
            Ok(data) => {
                if more.is_empty() {
                    more.reserve(declared.unwrap_or(0).min(policy.max_request) as usize);
                    more.extend_from_slice(&only);
                }
                more.extend_from_slice(&data);
            }
            Err(frame) => trailers = frame.into_trailers().ok(),
        }
        let length = only.len().max(more.len()) as u64;
        let refusal = match request::check_length(policy, length) {
            Err(refusal) => Some(refusal),
            // Without a declared length the reservation grows by doubling.
            Ok(()) if declared.is_none() && !buffers.grow_to(length.next_power_of_two()) => Some(overloaded()),
            Ok(()) => None,
        };
        if let Some(refusal) = refusal {
            let begun = if more.is_empty() { only } else { more.freeze() };
            return Err(Unread::Refused(refusal, begun, body));
        }
    }
    Ok((if more.is_empty() { only } else { more.freeze() }, trailers, buffers))
}

fn overloaded() -> Refusal {
    let detail = "more requests are running or being read than this gateway was given room for";
    Refusal::new(Reason::Overloaded, detail).retry_after(Duration::from_secs(1))
}

/// What only we may say about a request.
fn strip_own_headers(headers: &mut HeaderMap, policy: &Policy) {
    let own: Vec<_> = headers.keys().filter(|name| name.as_str().starts_with("ibid-")).cloned().collect();
    own.iter().chain(policy.said_of_replays()).for_each(|name| drop(headers.remove(name)));
}

fn telling(shared: &Shared, parts: &Parts, protocol: Protocol, policy: &Policy) -> Telling {
    let origin = shared.settings.cors.as_ref().and_then(|cors| cors.origin(&parts.headers));
    let echoes = protocol == Protocol::Http && policy.refusals.shape().echoes_key;
    let sent_key = if echoes { shape::sent_key(&parts.headers, &key_headers(policy)) } else { None };
    Telling { requested_at_ms: now_ms(), request_id: None, origin, protocol, sent_key }
}

fn preflight(shared: &Shared, routing: &dyn Routing, parts: &Parts) -> Option<Box<Patch>> {
    let cors = shared.settings.cors.as_ref().filter(|_| Cors::is_preflight(parts))?;
    let origin = cors.origin(&parts.headers)?;
    let asked = Preflight::of(&parts.headers)?;
    let keys = routing.key_headers(&asked.method()?, parts)?;
    Some(Box::new(Patch { origin, asked, keys }))
}

impl Seen {
    fn of(route: &Arc<Route>, parts: &Parts) -> Self {
        Self {
            route: route.clone(),
            method: parts.method.clone(),
            uri: parts.uri.clone(),
            key: String::new(),
            address: None,
            parts: None,
            peer: parts.extensions.get::<Peer>().map(|peer| peer.0),
            user_agent: parts.headers.get(header::USER_AGENT).cloned(),
            started: Instant::now(),
            ran: Arc::default(),
        }
    }

    /// The status of an answer, as it is told to operators: see [`Code::outline`].
    fn status<B>(&self, answer: &Response<ResponseBody<B>>) -> u16 {
        match self.route.protocol {
            Protocol::Http => answer.status().as_u16(),
            Protocol::Grpc => self.call_status(answer.headers(), answer.body().trailers()),
        }
    }

    fn tail_status(&self, tail: &Tail) -> u16 {
        match self.route.protocol {
            Protocol::Http => tail.status.as_u16(),
            Protocol::Grpc => self.call_status(&HeaderMap::new(), tail.trailers()),
        }
    }

    fn call_status(&self, headers: &HeaderMap, trailers: Option<&HeaderMap>) -> u16 {
        grpc::status_of(headers, trailers, false).unwrap_or(Code::Unknown).outline()
    }

    fn tell(&self, shared: &Shared, outcome: Outcome, status: u16) {
        let (ran_for, attempt) = self.ran.0.get().copied().unwrap_or_default();
        shared.engine.observer().answered(&Answered {
            route: &self.route.name,
            method: self.method.as_str(),
            path: self.uri.path(),
            key: &self.key,
            address: self.address,
            outcome,
            status,
            attempt,
            took: self.started.elapsed(),
            ran_for,
            peer: self.peer,
            user_agent: self.user_agent.as_ref().map(|agent| agent.as_bytes()),
            parts: self.parts,
        });
    }
}
