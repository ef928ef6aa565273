//! A request's way through the layer, top to bottom.

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
    Peer, Protocol, Route, Routed, Routing, Shared,
    anonymous::{self, AnonymousCaller},
    answer::{self, Telling},
    around::{Around, Inside},
    body::{BoxError, RequestBody, ResponseBody},
    budget::{Client, Full},
    cors::{Cors, Preflight},
    forwarded::client_address,
    future::{Patch, ResponseFuture, Side, Work},
    key_headers,
    operation::{Answer, HttpOperation},
    read_body::{overloaded, read_body},
    reply::Tail,
    request::{self, Asked, Judged, Keyed, Unread},
    request_id::UnderRequestId,
    shadow, shape,
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
    scope::{CallerKind, ScopePart},
    store::{Address, Finished},
    time::now_ms,
};

/// Smaller answers are not counted: they take up less than the request's own task.
const SMALL_ANSWER: u64 = 4 << 10;
/// The status of what is told before there is an answer.
pub(super) const NO_ANSWER: u16 = 100;

/// What the operation tells of its run.
#[derive(Debug, Default)]
pub(super) struct Ran {
    /// How long it took, and which attempt it was.
    run: OnceLock<(Duration, Option<u32>)>,
    /// The client was refused after `timeout`, and the answer is still waited for.
    is_late: AtomicBool,
}

impl Ran {
    /// The first one counts: of a run that is late, what it took until its client was refused.
    pub(super) fn set(&self, took: Duration, attempt: Option<u32>) {
        let _ = self.run.set((took, attempt));
    }

    pub(super) fn set_late(&self) {
        self.is_late.store(true, Relaxed);
    }

    pub(super) fn is_late(&self) -> bool {
        self.is_late.load(Relaxed)
    }
}

/// What is told about one request when it has been answered.
pub(super) struct Seen {
    pub(super) route: Arc<Route>,
    method: http::Method,
    uri: http::Uri,
    pub(super) key: String,
    pub(super) address: Option<Address>,
    pub(super) parts: Option<PartDigests>,
    peer: Option<std::net::IpAddr>,
    pub(super) client: Client,
    user_agent: Option<HeaderValue>,
    pub(super) request_id: HeaderValue,
    started: Instant,
    pub(super) ran: Ran,
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
    let (route, also) = match routing.route(&parts) {
        Routed::Covered { route, also } => (route, also),
        Routed::UnknownCall(route) => return unknown_call(shared, inner, parts, body, &route),
        routed @ (Routed::Pass | Routed::Uncovered) => {
            if let Routed::Uncovered = routed {
                let notice = Notice::Uncovered { method: parts.method.as_str(), path: parts.uri.path() };
                shared.engine.observer().noticed(&notice);
            }
            let preflight = preflight(shared, routing, &parts);
            let request = Request::from_parts(parts, RequestBody::untouched(body));
            return ResponseFuture::passed(inner.call(request), preflight);
        }
        Routed::Refused(refusal) => {
            let policy = Policy { refusals: routing.refusals(&parts), ..Policy::ietf() };
            let protocol = if grpc::is_call(parts.version, &parts.headers) { Protocol::Grpc } else { Protocol::Http };
            let mut telling = telling(shared, &parts, protocol, &policy, request::request_id(&parts.headers));
            return ResponseFuture::ready(answer::refuse(&refusal, &policy, "", &mut telling));
        }
    };
    let (route, keyed, others) = request::judge_all(shared, route, also, &parts);
    strip_own_headers(&mut parts.headers, &route.policy);
    let mut seen = Seen::of(shared, &route, &parts);
    match keyed {
        Judged::Keyless => {
            seen.name_request(&mut parts.headers);
            seen.tell(shared, Outcome::Keyless, NO_ANSWER);
            let future = inner.call(Request::from_parts(parts, RequestBody::untouched(body)));
            match route.policy.mode {
                Mode::Shadow => ResponseFuture::passed(future, None),
                Mode::Enforce | Mode::Off => ResponseFuture::keyless(future, route),
            }
        }
        Judged::Refused(refusal, _) if route.policy.mode == Mode::Shadow => {
            seen.name_request(&mut parts.headers);
            seen.tell(shared, Outcome::Shadow(Shadow::Refusal(refusal.reason)), NO_ANSWER);
            ResponseFuture::passed(inner.call(Request::from_parts(parts, RequestBody::untouched(body))), None)
        }
        Judged::Refused(refusal, masked) => {
            seen.key = masked;
            let mut telling = telling(shared, &parts, route.protocol, &route.policy, seen.request_id.clone());
            let answer = answer::refuse(&refusal, &route.policy, &seen.key, &mut telling);
            seen.tell(shared, Outcome::Refused(refusal.reason), seen.status(&answer));
            ResponseFuture::ready(answer)
        }
        Judged::Keyed(keyed) => {
            shared.sweeping.start(&shared.engine);
            seen.key = keyed.masked();
            let side = Side::new();
            let around = parts.extensions.get::<Around>().cloned();
            let id = seen.request_id.clone();
            let mut work: Work<RB> = if route.policy.mode == Mode::Shadow {
                Box::pin(UnderRequestId::new(id, shadow::work(shared.clone(), inner, parts, body, keyed, seen)))
            } else {
                let work = work(shared.clone(), inner, parts, body, keyed, others, seen, side.clone());
                Box::pin(UnderRequestId::new(id, work))
            };
            if let Some(around) = around {
                work = Box::pin(Inside { work, around });
            }
            ResponseFuture::covered(work, side, shared.engine.running().clone())
        }
    }
}

/// A gRPC call that may be a stream, and so cannot be claimed.
fn unknown_call<S, B, RB>(
    shared: &Shared, mut inner: S, mut parts: Parts, body: B, route: &Arc<Route>,
) -> ResponseFuture<S::Future, RB>
where
    S: Service<Request<RequestBody<B>>, Response = Response<RB>>,
{
    let policy = &route.policy;
    let seen = Seen::of(shared, route, &parts);
    let is_protected = policy.key.required || request::carries_key(policy, &parts.uri, &parts.headers);
    if is_protected && policy.mode == Mode::Enforce {
        let detail = format!(
            "whether {} is a unary method is not known, so the call cannot be protected; name it in a route (match = \
             \"grpc package.Service/Method\"), set descriptors to a file or \"reflection\", or let such calls pass \
             unprotected with grpc_unknown = \"pass\"",
            parts.uri.path()
        );
        let refusal = Refusal::new(Reason::MethodUnknown, detail);
        let answer = grpc::refuse(&refusal, policy, "");
        seen.tell(shared, Outcome::Refused(refusal.reason), seen.call_status(answer.headers(), None));
        return ResponseFuture::ready(answer);
    }
    let outcome = if is_protected { Outcome::Shadow(Shadow::Refusal(Reason::MethodUnknown)) } else { Outcome::Keyless };
    seen.tell(shared, outcome, NO_ANSWER);
    strip_own_headers(&mut parts.headers, policy);
    seen.name_request(&mut parts.headers);
    ResponseFuture::passed(inner.call(Request::from_parts(parts, RequestBody::untouched(body))), None)
}

/// Everything about a request with a key. Once `side` is told of the claim, it runs to its end whatever the client
/// does.
#[expect(clippy::manual_async_fn, reason = "an async fn would hold its arguments twice")]
#[allow(clippy::too_many_arguments)]
fn work<S, B, RB>(
    shared: Arc<Shared>, mut inner: S, mut parts: Parts, body: B, mut keyed: Keyed, others: Vec<(Arc<Route>, Keyed)>,
    mut seen: Seen, side: Arc<Side<RB>>,
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
        let mut telling = telling(&shared, &parts, route.protocol, policy, seen.request_id.clone());
        let deadline = if route.protocol == Protocol::Grpc { grpc::deadline(&parts.headers) } else { None };
        // Before the body is read, where the key is known already: most of these requests are refused.
        if let Some(at) = keyed.cookies_only_at(&shared, policy)
            && let Err(refusal) = Box::pin(anonymous::check_cookies(&shared, &parts.headers, &at, None)).await
        {
            return Some(refused(&shared, &refusal, &seen, &mut telling));
        }
        let (body, trailers, buffers) = match read_body(&shared, &route, &seen.client, &parts, body).await {
            Ok(read) => read,
            Err(Unread::Broken(status, detail)) => return Some(broken(status, detail, &route, &telling)),
            Err(Unread::Late(..)) => {
                return Some(broken(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time", &route, &telling));
            }
            Err(Unread::Refused(refusal, ..)) => return Some(refused(&shared, &refusal, &seen, &mut telling)),
        };
        // Routes in shadow mode require nothing, and do not govern.
        let others: Vec<_> = others.into_iter().filter(|(other, _)| other.policy.mode == Mode::Enforce).collect();
        let mut signed =
            std::iter::once(&route).chain(others.iter().map(|(other, _)| other)).map(|route| &route.policy);
        if let Err(refusal) = signed.try_for_each(|policy| request::check_signature(policy, &parts, &body)) {
            return Some(refused(&shared, &refusal, &seen, &mut telling));
        }
        let (content, mut others) = ((&*body, trailers.as_ref()), others.into_iter());
        let asked = loop {
            match (keyed.ask(&shared, &seen.route, &parts, content, telling.requested_at_ms), others.next()) {
                // It has no key by this route after all.
                (Ok(None), Some((other, next))) => (seen.route, keyed) = (other, next),
                (asked, _) => break asked,
            }
        };
        let route = seen.route.clone();
        let policy = &route.policy;
        telling.protocol = route.protocol;
        let kind = keyed.caller;
        let asked = match asked {
            Ok(Some(asked)) if asked.older.is_some() => Box::pin(asked.settled(&shared, policy)).await.map(Some),
            asked => asked,
        };
        let Asked { ask, key, digests, .. } = match asked {
            Ok(Some(asked)) => asked,
            Ok(None) => {
                seen.tell(&shared, Outcome::Keyless, NO_ANSWER);
                seen.name_request(&mut parts.headers);
                let request = Request::from_parts(parts, RequestBody::whole(body, trailers));
                return Some(pass(inner.call(request).await, policy, &telling));
            }
            Err(refusal) => {
                if seen.key.is_empty() {
                    seen.key = request::refused_key(policy, &parts, &body);
                }
                return Some(refused(&shared, &refusal, &seen, &mut telling));
            }
        };
        // Not before the body is complete: those who send slowly take no slot from others.
        let Some(_slot) = shared.engine.running().enter(shared.settings.max_running) else {
            return Some(refused(&shared, &overloaded(), &seen, &mut telling));
        };
        seen.address = Some(ask.address);
        seen.parts = digests;
        if seen.key.is_empty() {
            seen.key = mask(&key);
        }
        let (at, same) = (ask.address, Some(&ask.fingerprint));
        if kind == CallerKind::CookiesOnly
            && let Err(refusal) = Box::pin(anonymous::check_cookies(&shared, &parts.headers, &at, same)).await
        {
            return Some(refused(&shared, &refusal, &seen, &mut telling));
        }
        let anonymous = AnonymousCaller::of(kind, &ask, policy, shared.settings.secret.as_ref());
        if policy.scope.iter().any(ScopePart::names_caller) {
            shared.twins.look(&key, &ask.fingerprint, &ask.address);
        }
        side.claim();
        let operation = HttpOperation {
            shared: &shared,
            seen: &seen,
            inner,
            request: Some((parts, body, trailers)),
            key,
            route: route.clone(),
            side,
            telling: telling.clone(),
            buffers,
            deadline,
            anonymous: anonymous.clone(),
            _body: std::marker::PhantomData::<fn(B)>,
        };
        let verdict = shared.engine.execute(policy, ask, operation).await;
        if let Some(anonymous) = anonymous.filter(|caller| caller.has_unrecorded()) {
            Box::pin(anonymous.keep_cookies(&shared.engine)).await;
        }
        if seen.ran.is_late() {
            let notice = Notice::LateAnswer { address: &at, outcome: late_outcome(&verdict) };
            shared.engine.observer().noticed(&notice);
            return None;
        }
        answered(&shared, verdict, &seen, &mut telling).await
    }
}

/// What became of an operation whose client has been refused already.
fn late_outcome<RB>(verdict: &Verdict<Answer<RB>>) -> Outcome {
    match verdict {
        Verdict::Ran(_, stored) => outcome(*stored),
        Verdict::Replay(..) => Outcome::Replayed,
        Verdict::Refused(refusal) => Outcome::Refused(refusal.reason),
    }
}

/// What the client gets for a verdict. `None` if it has its answer already.
async fn answered<RB>(
    shared: &Shared, verdict: Verdict<Answer<RB>>, seen: &Seen, telling: &mut Telling,
) -> Option<Response<ResponseBody<RB>>> {
    let policy = &seen.route.policy;
    let (answer, outcome) = match verdict {
        Verdict::Ran(Answer::Whole(answer, whole), stored) => {
            let mut answer = answer::first(answer, Some(whole), policy, Some(stored), telling);
            let length = answer.body().whole_length();
            if length > SMALL_ANSWER {
                let reservation = shared.budget.send(&seen.client);
                reservation.count(length);
                answer.body_mut().hold(reservation);
            }
            (answer, outcome(stored))
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
            Ok(record) => {
                let mut answer = answer::replay(record, policy, stored, telling);
                let length = answer.body().whole_length();
                let reservation = match length > SMALL_ANSWER {
                    true => Some(Box::pin(shared.budget.answer(&seen.client, length)).await),
                    false => None,
                };
                match reservation {
                    Some(Err(Full)) => {
                        let refusal = overloaded();
                        let outcome = Outcome::Refused(refusal.reason);
                        (answer::refuse(&refusal, policy, &seen.key, telling), outcome)
                    }
                    reservation => {
                        reservation.into_iter().flatten().for_each(|held| answer.body_mut().hold(held));
                        (answer, Outcome::Replayed)
                    }
                }
            }
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
    let at = seen.address.expect("what was found has an address");
    Record::decode(shared.records.share(&at, finished.record)).map_err(|why| {
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
    }
}

/// Refuses a request and tells so.
pub(super) fn refused<RB>(
    shared: &Shared, refusal: &Refusal, seen: &Seen, telling: &mut Telling,
) -> Response<ResponseBody<RB>> {
    let answer = answer::refuse(refusal, &seen.route.policy, &seen.key, telling);
    seen.tell(shared, Outcome::Refused(refusal.reason), seen.status(&answer));
    answer
}

/// The answer to a body that did not come to its end: what follows it on the connection cannot be told from the rest.
pub(super) fn broken<RB>(
    status: StatusCode, detail: &str, route: &Route, telling: &Telling,
) -> Response<ResponseBody<RB>> {
    let mut answer = answer::plain(status, detail, &route.policy, telling);
    if route.protocol == Protocol::Http {
        answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    answer
}

pub(super) fn pass<RB, E>(
    response: Result<Response<RB>, E>, policy: &Policy, telling: &Telling,
) -> Response<ResponseBody<RB>> {
    match response {
        Ok(response) => response.map(ResponseBody::untouched),
        Err(_) => answer::plain(StatusCode::BAD_GATEWAY, "the app could not answer", policy, telling),
    }
}

/// What only we may say about a request.
fn strip_own_headers(headers: &mut HeaderMap, policy: &Policy) {
    let own: Vec<_> = headers.keys().filter(|name| name.as_str().starts_with("ibid-")).cloned().collect();
    own.iter().chain(policy.said_of_replays()).for_each(|name| drop(headers.remove(name)));
}

pub(super) fn telling(
    shared: &Shared, parts: &Parts, protocol: Protocol, policy: &Policy, request_id: HeaderValue,
) -> Telling {
    let origin = shared.settings.cors.as_ref().and_then(|cors| cors.origin(&parts.headers));
    let echoes = protocol == Protocol::Http && policy.refusals.shape().echoes_key;
    let sent_key = if echoes { shape::sent_key(&parts.headers, &key_headers(policy)) } else { None };
    let compress = shared.settings.compress;
    Telling { requested_at_ms: now_ms(), request_id, origin, protocol, compress, sent_key }
}

fn preflight(shared: &Shared, routing: &dyn Routing, parts: &Parts) -> Option<Box<Patch>> {
    let cors = shared.settings.cors.as_ref().filter(|_| Cors::is_preflight(parts))?;
    let origin = cors.origin(&parts.headers)?;
    let asked = Preflight::of(&parts.headers)?;
    let keys = routing.key_headers(&asked.method()?, parts)?;
    Some(Box::new(Patch { origin, asked, keys }))
}

impl Seen {
    fn of(shared: &Shared, route: &Arc<Route>, parts: &Parts) -> Self {
        let peer = parts.extensions.get::<Peer>().map(|peer| peer.0);
        Self {
            route: route.clone(),
            method: parts.method.clone(),
            uri: parts.uri.clone(),
            key: String::new(),
            address: None,
            parts: None,
            peer: client_address(&parts.headers, peer, &shared.settings.trusted),
            client: Client::of(&parts.extensions),
            request_id: request::request_id(&parts.headers),
            user_agent: parts.headers.get(header::USER_AGENT).cloned(),
            started: Instant::now(),
            ran: Ran::default(),
        }
    }

    fn name_request(&self, headers: &mut HeaderMap) {
        request::name_request(headers, &self.route.policy, &self.request_id);
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

    pub(super) fn tell(&self, shared: &Shared, outcome: Outcome, status: u16) {
        let (ran_for, attempt) = self.ran.run.get().copied().unwrap_or_default();
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
            request_id: self.request_id.to_str().unwrap_or_default(),
            user_agent: self.user_agent.as_ref().map(|agent| agent.as_bytes()),
            parts: self.parts,
        });
    }
}
