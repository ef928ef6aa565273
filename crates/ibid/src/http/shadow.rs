//! Shadow mode on the way of a request: it reaches the app as it came, and its client gets what the app says, as it comes.
//! What enforcement would have done is found out beside it ([`Engine::observe`](crate::Engine::observe)).
//!
//! The body of the request is read before it is passed on, as far as it is within the limits: without it there is no
//! fingerprint. The body of the response is watched while it passes ([`Tap`]).

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use bytes::{Buf, Bytes, BytesMut};
use http::{HeaderMap, Request, Response, StatusCode, header, request::Parts};
use http_body::{Body, Frame};
use sha2::{Digest, Sha256};
use tokio::time::Instant;
use tower_service::Service;

use super::{
    Fate, Protocol, Route, Shared, anonymous,
    answer::Telling,
    body::{BoxError, RequestBody, ResponseBody},
    budget::Reserved,
    read_body::{overloaded, read_body},
    reply::{self, Meaning},
    request::{self, Asked, Keyed, Unread},
    service::{self, NO_ANSWER, Seen},
};
use crate::{
    engine::{Finish, Observation, Observed},
    grpc::{self, Code},
    key::mask,
    observe::{Outcome, Shadow},
    record::RecordBody,
    refusal::Refusal,
    running::Slot,
    scope::{CallerKind, ScopePart},
    store::Ask,
};

/// Everything about a request with a key in shadow mode.
pub(super) async fn work<S, B, RB>(
    shared: Arc<Shared>, mut inner: S, mut parts: Parts, body: B, keyed: Keyed, mut seen: Seen,
) -> Option<Response<ResponseBody<RB>>>
where
    S: Service<Request<RequestBody<B>>, Response = Response<RB>, Future: Send> + Clone + Send + 'static,
    S::Error: Into<BoxError> + Send,
    B: Body<Data: Buf + Send, Error: Into<BoxError>> + Send + 'static,
    RB: Body<Data: Buf + Send, Error: Into<BoxError>> + Send + 'static,
{
    let route = seen.route.clone();
    let telling = service::telling(&shared, &parts, route.protocol, &route.policy, seen.request_id.clone());
    let (body, would) = match look(&shared, &parts, body, keyed, &mut seen, telling.requested_at_ms).await {
        Ok(looked) => looked,
        Err((status, detail)) => return Some(service::broken(status, detail, &route, &telling)),
    };
    let would = match would {
        Would::Claim(would) => would,
        Would::Pass(outcome) => {
            if let Some(outcome) = outcome {
                seen.tell(&shared, outcome, NO_ANSWER);
            }
            request::name_request(&mut parts.headers, &route.policy, &telling.request_id);
            return Some(service::pass(inner.call(Request::from_parts(parts, body)).await, &route.policy, &telling));
        }
    };
    let (started, answered) = (Instant::now(), Answered::default());
    let observation = would.observe(&shared, &parts, seen, answered.clone());
    request::name_request(&mut parts.headers, &route.policy, &telling.request_id);
    let response = match inner.call(Request::from_parts(parts, body)).await {
        Ok(response) => response,
        failed => {
            observation.end(Finish::Park);
            return Some(service::pass(failed, &route.policy, &telling));
        }
    };
    let (head, body) = response.into_parts();
    let finish = match head.extensions.get::<Fate>() {
        Some(Fate::NotStarted(_)) => Some(Finish::Release),
        Some(Fate::Lost(_)) => Some(Finish::Park),
        None => head.status.is_informational().then_some(Finish::Park),
    };
    if let Some(finish) = finish {
        let _ = answered.set((head.status.as_u16(), started.elapsed()));
        observation.end(finish);
        return Some(Response::from_parts(head, ResponseBody::untouched(body)));
    }
    let tap = Tap {
        observation: Some(observation),
        answered,
        policy_of: route,
        status: head.status,
        headers: head.headers.clone(),
        trailers: None,
        telling,
        started,
        expected: body.size_hint().exact(),
        length: 0,
        hash: Sha256::new(),
        kept: Some(BytesMut::new()),
    };
    Some(Response::from_parts(head, ResponseBody::tapped(body, Box::new(tap))))
}

/// Status and duration of the run, for the report.
type Answered = Arc<OnceLock<(u16, Duration)>>;

/// What enforcement would do with a request before its claim.
enum Would {
    Claim(Box<Claiming>),
    /// It would not get that far. There is nothing to report of a body that comes too slowly.
    Pass(Option<Outcome>),
}

struct Claiming {
    ask: Ask,
    slot: Slot,
    buffers: Reserved,
    body: Bytes,
    trailers: Option<HeaderMap>,
}

/// Reads the body and what follows from it. `Err`: the body broke off, and there is nothing to pass on.
async fn look<B>(
    shared: &Arc<Shared>, parts: &Parts, body: B, keyed: Keyed, seen: &mut Seen, requested_at_ms: u64,
) -> Result<(RequestBody<B>, Would), (StatusCode, &'static str)>
where
    B: Body<Data: Buf, Error: Into<BoxError>>,
{
    let route = seen.route.clone();
    let refused = |refusal: &Refusal| Would::Pass(Some(Outcome::Shadow(Shadow::Refusal(refusal.reason))));
    let (body, trailers, buffers) = match read_body(shared, &route, &seen.client, parts, body).await {
        Ok(read) => read,
        Err(Unread::Broken(status, detail)) => return Err((status, detail)),
        Err(Unread::Late(begun, rest)) => return Ok((RequestBody::begun(begun, rest), Would::Pass(None))),
        Err(Unread::Refused(refusal, begun, rest)) => {
            return Ok((RequestBody::begun(begun, rest), refused(&refusal)));
        }
    };
    let whole = RequestBody::whole(body.clone(), trailers.clone());
    let kind = keyed.caller;
    let asked = match request::check_signature(&route.policy, parts, &body) {
        Ok(()) => keyed.ask(shared, &route, parts, (&body, trailers.as_ref()), requested_at_ms),
        Err(refusal) => Err(refusal),
    };
    let asked = match asked {
        Ok(Some(asked)) => asked.settled(shared, &route.policy).await.map(Some),
        asked => asked,
    };
    let Asked { ask, key, digests, .. } = match asked {
        Ok(Some(asked)) => asked,
        Ok(None) => return Ok((whole, Would::Pass(Some(Outcome::Keyless)))),
        Err(refusal) => return Ok((whole, refused(&refusal))),
    };
    if kind == CallerKind::CookiesOnly
        && let Err(refusal) =
            anonymous::check_cookies(shared, &parts.headers, &ask.address, Some(&ask.fingerprint)).await
    {
        return Ok((whole, refused(&refusal)));
    }
    let Some(slot) = shared.engine.running().enter(shared.settings.max_running) else {
        return Ok((whole, refused(&overloaded())));
    };
    (seen.address, seen.parts) = (Some(ask.address), digests);
    if seen.key.is_empty() {
        seen.key = mask(&key);
    }
    if route.policy.scope.iter().any(ScopePart::names_caller) {
        shared.twins.look(&key, &ask.fingerprint, &ask.address);
    }
    Ok((whole, Would::Claim(Box::new(Claiming { ask, slot, buffers, body, trailers }))))
}

impl Claiming {
    /// Makes the claim beside the run, and reports once that has ended.
    fn observe(self, shared: &Arc<Shared>, parts: &Parts, seen: Seen, answered: Answered) -> Observation {
        let Self { ask, slot, buffers, body, trailers } = self;
        let (mut compared, ()) = Request::new(()).into_parts();
        (compared.method, compared.uri, compared.headers) =
            (parts.method.clone(), parts.uri.clone(), parts.headers.clone());
        let route = seen.route.clone();
        let by_version = move |version| {
            let made = request::fingerprint(version, &route, &compared, (&body, trailers.as_ref())).ok()??;
            Some(made.0)
        };
        let (policy, shared) = (seen.route.policy.clone(), shared.clone());
        let engine = shared.engine.clone();
        let report = move |Observed { outcome, attempt }| {
            let (status, took) = answered.get().copied().unwrap_or((NO_ANSWER, Duration::ZERO));
            seen.ran.set(took, attempt);
            seen.tell(&shared, outcome, status);
            drop(buffers);
        };
        engine.observe(policy, ask, by_version, Some(slot), report)
    }
}

/// Watches a response pass, and says how it ended. Dropped before its end, the run's outcome is unknown.
#[derive(Debug)]
pub(super) struct Tap {
    observation: Option<Observation>,
    answered: Answered,
    policy_of: Arc<Route>,
    status: StatusCode,
    headers: HeaderMap,
    trailers: Option<HeaderMap>,
    telling: Telling,
    started: Instant,
    /// The length of the body, if it is known. Servers do not always ask for an end that they expect.
    expected: Option<u64>,
    length: u64,
    hash: Sha256,
    /// Everything, while it is short enough to be kept.
    kept: Option<BytesMut>,
}

impl Tap {
    /// One frame has passed; `is_last` if the body says so.
    pub(super) fn frame(&mut self, frame: &Frame<Bytes>, is_last: bool) {
        if let Some(data) = frame.data_ref() {
            self.length += data.len() as u64;
            self.hash.update(data);
            if self.length > self.policy_of.policy.max_response {
                self.kept = None;
            } else if let Some(kept) = &mut self.kept {
                kept.extend_from_slice(data);
            }
        } else if let Some(trailers) = frame.trailers_ref() {
            self.trailers = Some(trailers.clone());
        }
        let is_whole = self.policy_of.protocol == Protocol::Http && self.expected == Some(self.length);
        if is_last || is_whole {
            self.end();
        }
    }

    /// The body has passed.
    pub(super) fn end(&mut self) {
        let Some(observation) = self.observation.take() else { return };
        let (finish, status) = self.finish();
        let _ = self.answered.set((status, self.started.elapsed()));
        observation.end(finish);
    }

    /// What the response means, and its status as operators see it.
    fn finish(&mut self) -> (Finish, u16) {
        let route = self.policy_of.clone();
        let (policy, trailers) = (&route.policy, self.trailers.as_ref());
        let (meaning, code) = match route.protocol {
            Protocol::Http => (reply::meaning(policy, self.status), None),
            Protocol::Grpc => match grpc::status_of(&self.headers, trailers, self.length > 0) {
                Some(code) => (grpc::meaning(policy, code), Some(code)),
                None => return (Finish::Park, Code::Unknown.outline()),
            },
        };
        let status = code.map_or(self.status.as_u16(), Code::outline);
        // The app answered this client: another one may not understand the coding.
        let is_encoded = self.headers.contains_key(header::CONTENT_ENCODING);
        let body = match self.kept.take().filter(|_| !is_encoded) {
            Some(kept) => RecordBody::Whole(kept.freeze()),
            None => RecordBody::Digest { length: self.length, sha256: self.hash.finalize_reset().into() },
        };
        let finish = match meaning {
            Meaning::Release => Finish::Release,
            Meaning::Unknown => Finish::Park,
            Meaning::Remember => {
                let (mut head, ()) = Response::new(()).into_parts();
                (head.status, head.headers) = (self.status, std::mem::take(&mut self.headers));
                let (requested, started) = (self.telling.requested_at_ms, self.started);
                Finish::Complete(self.telling.compressed(match code {
                    None => reply::complete(policy, &head, body, trailers, Vec::new(), requested, started),
                    Some(code) => grpc::complete(policy, &head, code, body, trailers, requested, started),
                }))
            }
        };
        (finish, status)
    }
}
