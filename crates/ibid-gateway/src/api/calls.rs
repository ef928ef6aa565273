//! The calls of the exchange API, from their HTTP request to their answer.

use std::{
    future::poll_fn,
    pin::{Pin, pin},
    sync::Arc,
    task::Context,
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full};
use ibid::{
    Ibid,
    http::{MemoryReservation, RequestSender, ResumedRun, Route, RouteMatch},
    store::{ClaimToken, SettleOutcome},
};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq as _;
use tokio::{
    sync::watch,
    task::JoinSet,
    time::{Instant, timeout},
};

use super::{
    OPENAPI_DOCUMENT,
    handle::{ExchangeHandle, ExchangeId, HandleSealer},
    handler_app::{HandlerApp, ProbeClient},
    messages::{self, BeginCall, Deadline, EndCall, ExtendCall, FailedCall, encode},
    pending::{BegunCall, ExchangeGuard, ExchangeTable, HandlerReply, PendingExchange, ReplyOutcome},
    problem::ApiProblem,
};
use crate::{
    format::now_ms,
    proxy::{Proxy, ProxyClient},
    server::{ambiguity, client_body::ClientBody},
    snapshot::RequestHead,
    watch::LiveConfig,
};

const COLLECTION_PATH: &str = "/v1/exchanges";
const DOCUMENT_PATH: &str = "/v1/openapi.json";

type CallResponse = Response<Full<Bytes>>;
type CallResult = Result<CallResponse, ApiProblem>;

pub(super) struct ApiState {
    pub(super) live: Arc<LiveConfig>,
    pub(super) ibid: Ibid,
    token: Option<String>,
    sealer: Arc<HandleSealer>,
    exchanges: ExchangeTable,
    /// The work on all exchanges.
    work: parking_lot::Mutex<JoinSet<()>>,
    /// Becomes true at shutdown: nothing more begins.
    stop: watch::Receiver<bool>,
}

impl ApiState {
    pub(super) fn new(live: Arc<LiveConfig>, ibid: Ibid, token: Option<String>, stop: watch::Receiver<bool>) -> Self {
        let sealer = Arc::new(HandleSealer::new(token.as_deref()));
        let (exchanges, work) = Default::default();
        Self { live, ibid, token, sealer, exchanges, work, stop }
    }

    /// Drops the work on all exchanges. Work that is dropped parks its claim.
    pub(super) async fn give_up_work(&self) {
        let mut work = std::mem::take(&mut *self.work.lock());
        work.shutdown().await;
    }

    pub(super) async fn handle(self: Arc<Self>, request: Request<ClientBody>) -> CallResponse {
        self.call(request).await.unwrap_or_else(ApiProblem::into_response)
    }

    async fn call(self: &Arc<Self>, request: Request<ClientBody>) -> CallResult {
        self.check_token(&request)?;
        let uri = request.uri().clone();
        let path = uri.path();
        if uri.query().is_some() {
            return Err(ApiProblem::bad_request("the query is not understood; send none"));
        }
        if path == DOCUMENT_PATH {
            check_method(&request, Method::GET)?;
            return Ok(json_response(StatusCode::OK, Bytes::from_static(OPENAPI_DOCUMENT.as_bytes())));
        }
        let rest = path.strip_prefix(COLLECTION_PATH).ok_or_else(not_found)?;
        let named = match rest.strip_prefix('/').map(|rest| rest.split_once('/')) {
            None if rest.is_empty() => None,
            Some(Some((handle, verb @ ("end" | "failed" | "extend")))) => Some((handle, verb)),
            _ => return Err(not_found()),
        };
        check_method(&request, Method::POST)?;
        let Some((handle, verb)) = named else {
            let (body, _reserved) = self.read(request).await?;
            return self.begin(&body).await;
        };
        let (body, _reserved) = self.read(request).await?;
        match verb {
            "end" => {
                let call: EndCall<'_> = messages::parse(&body, "{\"status\", \"headers\", \"body_base64\"}")?;
                self.end(handle, HandlerReply::Response(call.response()?), &body).await
            }
            "failed" => {
                let call: FailedCall = messages::parse(&body, "{\"how\": \"not-started\"} or {\"how\": \"unknown\"}")?;
                self.end(handle, HandlerReply::Failed(call.how), &body).await
            }
            _ => {
                let ExtendCall {} = messages::parse(&body, "{}")?;
                self.extend(handle).await
            }
        }
    }

    fn check_token(&self, request: &Request<ClientBody>) -> Result<(), ApiProblem> {
        let Some(token) = &self.token else { return Ok(()) };
        let sent = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let sent =
            sent.and_then(|value| value.split_once(' ')).filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
        if sent.is_some_and(|(_, sent)| bool::from(sent.trim().as_bytes().ct_eq(token.as_bytes()))) {
            return Ok(());
        }
        let detail = "the token is missing or wrong; send Authorization: Bearer TOKEN with the value of api.token";
        let how = HeaderValue::from_static("Bearer realm=\"ibid\"");
        Err(ApiProblem::new(StatusCode::UNAUTHORIZED, detail).with(header::WWW_AUTHENTICATE, how))
    }

    /// Reads the whole body. The memory is reserved for as long as the call lasts.
    async fn read(&self, request: Request<ClientBody>) -> Result<(Bytes, MemoryReservation), ApiProblem> {
        let (body_timeout, most) = {
            let now = self.live.now();
            (now.settings.limits.body_timeout, now.settings.buffer_memory / 4)
        };
        let length = request.headers().get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
        let length: u64 = length.ok_or_else(|| {
            ApiProblem::new(StatusCode::LENGTH_REQUIRED, "the header content-length is missing; send it")
        })?;
        if length > most {
            let detail =
                format!("the body has {length} bytes; at most {most} are accepted (a quarter of buffer_memory)");
            return Err(ApiProblem::new(StatusCode::PAYLOAD_TOO_LARGE, detail));
        }
        // The text and what is decoded from it.
        let reserved = self.ibid.reserve(length * 2).ok_or_else(|| ApiProblem::unavailable("buffer_memory is full"))?;
        match timeout(body_timeout, request.into_body().collect()).await {
            Ok(Ok(body)) => Ok((body.to_bytes(), reserved)),
            Ok(Err(_)) => Err(ApiProblem::bad_request("the body broke off")),
            Err(_) => Err(ApiProblem::new(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time")),
        }
    }

    async fn begin(self: &Arc<Self>, body: &[u8]) -> CallResult {
        if *self.stop.borrow() {
            return Err(ApiProblem::unavailable("ibid is stopping; nothing began"));
        }
        let call: BeginCall<'_> = messages::parse(body, "{\"id\", \"method\", \"target\", \"headers\", …}")?;
        let id = ExchangeId::parse(&call.id).ok_or_else(|| {
            ApiProblem::bad_request("id: expected 32 hex digits: 128 random bits, new for every start of a handler")
        })?;
        let request = call.request()?;
        let request_hash = message_hash(0, body);
        let Some((exchange, is_new)) = self.exchanges.enter(id, Some(request_hash)) else {
            let detail = "id: another request has used it; make 128 new random bits for every start of a handler";
            return Err(ApiProblem::new(StatusCode::CONFLICT, detail));
        };
        let mut begun = pin!(exchange.begun());
        let begun = if is_new {
            // Made of the id and the request: another request with the id is another claim, even after a restart.
            let claim_token = Some(claim_token(id, request_hash));
            let sender = RequestSender { peer: call.peer, claim_token, ..RequestSender::default() };
            let (state, exchange) = (self.clone(), exchange.clone());
            let work = Box::pin(async move { state.run(exchange, request, sender).await });
            // Decides here, without another task. What is left to do continues on its own, however this call ends.
            let mut work = WorkHandover { state: self, work: Some(work) };
            poll_fn(|cx| {
                work.poll(cx);
                begun.as_mut().poll(cx)
            })
            .await
        } else {
            begun.await
        };
        match begun {
            Some(BegunCall::Pass) => {
                let mut response = Response::new(Full::default());
                *response.status_mut() = StatusCode::NO_CONTENT;
                Ok(response)
            }
            Some(BegunCall::Run(grant)) => Ok(json_response(StatusCode::CREATED, grant)),
            Some(BegunCall::Answer(answer)) => Ok(json_response(StatusCode::OK, answer)),
            None => Err(ApiProblem::unavailable("ibid is stopping; nothing began")),
        }
    }

    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        let mut all = self.work.lock();
        while all.try_join_next().is_some() {}
        all.spawn(work);
    }

    /// Works on a request from its beginning to its end, as the gateway does.
    async fn run(&self, exchange: Arc<PendingExchange>, mut request: Request<Full<Bytes>>, mut sender: RequestSender) {
        let finishing = ExchangeGuard::new(&self.exchanges, &exchange);
        if let Some(detail) = ambiguity(&request) {
            let refusal = ibid::Refusal::new(ibid::RefusalReason::RequestAmbiguous, detail);
            let format = self.live.now().settings.routes.refusal_shape(request.uri().path());
            let protocol = ibid::http::Protocol::Http;
            return finishing.finish(ibid::http::refusal_response(&refusal, format, protocol)).await;
        }
        ibid::http::remove_ibid_headers(request.headers_mut());
        let now = self.live.now();
        let head = RequestHead {
            method: request.method(),
            uri: request.uri(),
            version: request.version(),
            headers: request.headers(),
        };
        let routed = now.route_request(head);
        if let Some((verifier, wanted)) = now.verifier_for(&routed) {
            sender.identity = Some(Box::pin(verifier.identify_caller(request.headers(), &wanted)).await);
        }
        let route = match &routed.route_match {
            RouteMatch::Covered { route, .. } | RouteMatch::UnknownCall(route) => Some(route.clone()),
            _ => None,
        };
        let asks_app = route.as_ref().is_some_and(|route| route.policy.resolve.is_some());
        let probes = asks_app.then(|| {
            let settings = &now.settings;
            let peer = sender.peer.unwrap_or(std::net::Ipv4Addr::LOCALHOST.into());
            let none = std::sync::Weak::new();
            let client = ProxyClient::new(peer, false, &settings.trusted_proxies, &settings.limits, none);
            let proxy = Proxy { client, upstream: routed.upstream, refusals: routed.refusals, trace: None };
            ProbeClient { method: request.method().clone(), uri: request.uri().clone(), proxy }
        });
        let app = HandlerApp {
            exchange: exchange.clone(),
            sealer: self.sealer.clone(),
            requested_at_ms: now_ms(),
            route,
            probes,
            resumed: None,
        };
        // An app answers preflights itself.
        let response = self.ibid.handle(app, request, sender, routed.route_match, &|_, _| None);
        drop(now);
        finishing.finish(response.await.unwrap_or_else(|never| match never {})).await;
    }

    async fn end(self: &Arc<Self>, handle: &str, reply: HandlerReply, body: &[u8]) -> CallResult {
        let hash = message_hash(matches!(reply, HandlerReply::Failed(_)).into(), body);
        let mut exchange = self.find(handle).await?;
        let mut taken = exchange.reply(reply, hash);
        if let ReplyOutcome::NotRunning(reply) = taken {
            // Its time was over a moment ago. The reply counts all the same, unless another run has taken over.
            exchange.answer().await;
            exchange = self.find(handle).await?;
            taken = exchange.reply(reply, hash);
        }
        match taken {
            // An exchange that has completed is answered from its record.
            ReplyOutcome::Taken | ReplyOutcome::NotRunning(_) => {}
            ReplyOutcome::EndedOtherwise => {
                let detail =
                    "the exchange has ended with another response or failure, which stays; this one is ignored";
                return Err(ApiProblem::new(StatusCode::CONFLICT, detail));
            }
        }
        let answer = exchange.answer().await;
        let answer = answer.ok_or_else(|| ApiProblem::unavailable("ibid is stopping; send it again"))?;
        Ok(json_response(StatusCode::OK, answer))
    }

    async fn extend(self: &Arc<Self>, handle: &str) -> CallResult {
        let lost = |detail| ApiProblem::new(StatusCode::CONFLICT, detail);
        let exchange = self.find(handle).await?;
        let handle = self.open(handle)?;
        let route = self.route(&handle);
        if let Some(route) = &route
            && let Some(lease) = handle.lease(route)
        {
            match self.ibid.engine().store().extend(&lease, route.policy.lease).await {
                Ok(SettleOutcome::Applied | SettleOutcome::Restored) => {}
                Ok(SettleOutcome::ClaimLost(_)) => {
                    return Err(lost(
                        "the claim was settled or taken over; send the response with /end to learn which counts",
                    ));
                }
                Err(_) => return Err(ApiProblem::unavailable("the store is unavailable; send it again")),
            }
        }
        let timeout = route.map_or(Duration::from_secs(60), |route| route.policy.timeout);
        if !exchange.extend(Instant::now() + timeout) {
            return Err(lost("the exchange has ended"));
        }
        let deadline_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        Ok(json_response(StatusCode::OK, encode(&Deadline { deadline_ms })))
    }

    fn open(&self, handle: &str) -> Result<ExchangeHandle, ApiProblem> {
        let detail = "there is no such exchange: the handle is damaged, or comes from an ibid with another api.token";
        self.sealer.open(handle).ok_or_else(|| ApiProblem::new(StatusCode::NOT_FOUND, detail))
    }

    /// Finds the exchange of a handle, or continues it if another process began it or its time was over.
    async fn find(self: &Arc<Self>, text: &str) -> Result<Arc<PendingExchange>, ApiProblem> {
        let known = |id| self.exchanges.get(id);
        if let Some(known) = ExchangeId::of_handle(text).and_then(known).filter(|known| known.has_handle(text)) {
            return Ok(known);
        }
        let handle = self.open(text)?;
        let exchange = match known(handle.id) {
            Some(known) => known,
            None => self.resume(text, handle)?,
        };
        exchange.started().await;
        Ok(exchange)
    }

    /// Continues an exchange with nothing but its handle.
    fn resume(self: &Arc<Self>, text: &str, handle: ExchangeHandle) -> Result<Arc<PendingExchange>, ApiProblem> {
        let gone = |detail| ApiProblem::new(StatusCode::NOT_FOUND, detail);
        let route = self.route(&handle).ok_or_else(|| {
            gone(match handle.route_name() {
                Some(_) => "the route of the exchange is no longer configured; nothing can be recorded",
                None => "the exchange ran without a claim, and ibid no longer knows it; nothing can be recorded",
            })
        })?;
        let (head, lease) = handle.head().zip(handle.lease(&route)).ok_or_else(|| gone("the handle is damaged"))?;
        let (exchange, is_new) = self.exchanges.enter(handle.id, None).expect("any request matches");
        if is_new {
            let requested_at_ms = handle.requested_at_ms;
            let app = HandlerApp {
                exchange: exchange.clone(),
                sealer: self.sealer.clone(),
                requested_at_ms,
                route: Some(route.clone()),
                probes: None,
                resumed: Some(text.to_owned()),
            };
            let run = ResumedRun { route, lease, requested_at_ms };
            let (state, exchange) = (self.clone(), exchange.clone());
            self.spawn(async move {
                let finishing = ExchangeGuard::new(&state.exchanges, &exchange);
                let response = state.ibid.resume(app, head, &RequestSender::default(), run);
                finishing.finish(response.await.unwrap_or_else(|never| match never {})).await;
            });
        }
        Ok(exchange)
    }

    fn route(&self, handle: &ExchangeHandle) -> Option<Arc<Route>> {
        let name = handle.route_name()?;
        let now = self.live.now();
        let route = now.settings.routes.iter().find(|route| route.guard(false).name == name);
        route.map(|route| route.guard(false).clone())
    }
}

/// Work that a call has begun. Dropping it leaves the rest to a task.
struct WorkHandover<'a, F: Future<Output = ()> + Send + 'static> {
    state: &'a ApiState,
    work: Option<Pin<Box<F>>>,
}

impl<F: Future<Output = ()> + Send + 'static> WorkHandover<'_, F> {
    fn poll(&mut self, cx: &mut Context<'_>) {
        if self.work.as_mut().is_some_and(|work| work.as_mut().poll(cx).is_ready()) {
            self.work = None;
        }
    }
}

impl<F: Future<Output = ()> + Send + 'static> Drop for WorkHandover<'_, F> {
    fn drop(&mut self) {
        if let Some(work) = self.work.take() {
            self.state.spawn(work);
        }
    }
}

/// Tells the messages about one exchange apart. The app that sends them gains nothing by a collision.
fn message_hash(kind: u64, body: &[u8]) -> u64 {
    const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
    let mix = |hash: u64, word: u64| (hash.rotate_left(23) ^ word).wrapping_mul(ODD);
    let (words, rest) = body.as_chunks();
    let hash = words.iter().fold(kind, |hash, word| mix(hash, u64::from_le_bytes(*word)));
    rest.iter().fold(mix(hash, body.len() as u64), |hash, byte| mix(hash, (*byte).into()))
}

/// The token of the claim of an exchange. The id makes it unique.
fn claim_token(id: ExchangeId, request_hash: u64) -> ClaimToken {
    let digest = Sha256::new().chain_update(b"ibid exchange ").chain_update(id.0);
    let digest: [u8; 32] = digest.chain_update(request_hash.to_le_bytes()).finalize().into();
    ClaimToken(*digest.first_chunk().expect("it is longer"))
}

fn check_method(request: &Request<ClientBody>, allowed: Method) -> Result<(), ApiProblem> {
    if *request.method() == allowed {
        return Ok(());
    }
    let detail = format!("only {allowed} is understood here");
    let allow = HeaderValue::from_str(allowed.as_str()).expect("a method");
    Err(ApiProblem::new(StatusCode::METHOD_NOT_ALLOWED, detail).with(header::ALLOW, allow))
}

fn not_found() -> ApiProblem {
    ApiProblem::new(StatusCode::NOT_FOUND, format!("there is no such endpoint; {DOCUMENT_PATH} says which there are"))
}

fn json_response(status: StatusCode, body: Bytes) -> CallResponse {
    let mut response = Response::new(Full::new(body));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_that_differ_in_one_bit_or_in_length_differ_in_their_hash() {
        let reply = *b"{\"status\":201,\"headers\":[]}";
        let known = message_hash(0, &reply);
        assert_ne!(message_hash(1, &reply), known);
        for at in 0..reply.len() {
            assert_ne!(message_hash(0, &reply[..at]), known, "{at}");
            let mut changed = reply;
            changed[at] ^= 1;
            assert_ne!(message_hash(0, &changed), known, "{at}");
        }
    }
}
