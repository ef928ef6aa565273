//! The tower layer for axum, hyper, tonic and everything else that speaks `http`.
//!
//! ```no_run
//! use std::sync::Arc;
//! use axum::{Router, routing::post};
//! use ibid::{Ibid, Policy, store::Memory};
//!
//! # async fn pay() -> &'static str { "paid" }
//! let ibid = Ibid::new(Arc::new(Memory::default()));
//! let app: Router = Router::new().route("/payments", post(pay)).layer(ibid.layer(Policy::ietf())?);
//! # Ok::<(), ibid::InvalidPolicy>(())
//! ```
//!
//! The life of a request: `service` finds the route and checks key and scope (`request`), reads the body, and passes an
//! operation to the [engine](crate::Engine). The operation calls the inner service and reads its response;
//! `rules` builds what the client gets. After the claim, a client cannot cancel the work: if its future is
//! dropped, the work continues in its own task.

use std::{net::IpAddr, sync::Arc, time::Duration};

use bytes::Buf;
use http::{HeaderName, Method, Request, request::Parts};
use http_body::Body;
use tokio::time::timeout;

pub use self::{
    app::{App, AppCall, AppError, DispatchOutcome, HandlerClaim, NotRememberedError, RunInfo, SendState},
    body::{BoxError, RequestBody, ResponseBody, TruncatedResponse},
    budget::MemoryReservation,
    call_app::catch_panic,
    context::{PeerConnection, RequestSender, ResponseAbort, plain_response, refusal_response},
    cors::Cors,
    exchange::ResumedRun,
    future::{PollHook, ResponseFuture},
    request::carries_key,
    request_id::{current_request_id, sent_request_id},
    rules::{completed_answer_of, error_answer, success_answer},
    service::{IbidLayer, IbidService, KeyHeaderLookup, remove_ibid_headers},
};
pub(crate) use self::{
    body::WholeBody,
    context::RequestContext,
    request_id::UnderRequestId,
    rules::{
        HttpRules, completed_answer, is_remembered, json_string, remove_body_digests, set_replay_headers,
        stored_headers, whole_response,
    },
};
pub use crate::protocol::Protocol;
use crate::{
    engine::{CompletedAnswer, Engine},
    fingerprint::FingerprintMemo,
    journal::Journal,
    json_rpc::ToolLists,
    key::KeySource,
    observe::{NoopObserver, Observer},
    policy::{CheckedPolicy, InvalidPolicy, MAX_DURATION, Policy, RefusalFormat},
    quota::Quota,
    record,
    refusal::Refusal,
    scope::{AddressSecret, Credentials, TrustedProxies},
    store::Store,
};

mod ambiguity;
mod anonymous;
mod app;
mod body;
mod budget;
mod call_app;
mod caller_tags;
mod context;
mod cors;
mod exchange;
mod future;
mod header_value;
mod inner_response;
mod read_body;
mod refusal_style;
mod request;
mod request_id;
mod rules;
mod service;
mod shadow;
mod shared_key_detector;
mod shared_records;
mod sweeper;

/// How long [`Ibid::drained`] waits for the settle queue to empty.
const SETTLE_QUEUE_FLUSH_TIMEOUT: Duration = Duration::from_secs(10);

/// Creates layers for HTTP services that share one store and one set of limits.
#[derive(Clone)]
pub struct Ibid {
    shared: Arc<LayerState>,
}

/// Configures an [`Ibid`].
pub struct IbidBuilder {
    store: Arc<dyn Store>,
    observer: Arc<dyn Observer>,
    journal: Option<Arc<Journal>>,
    quota: Option<Arc<Quota>>,
    settings: LayerSettings,
}

/// Settings of all routes.
struct LayerSettings {
    trusted_proxies: TrustedProxies,
    credentials: Credentials,
    address_secret: Option<AddressSecret>,
    label_key: bool,
    max_running: usize,
    max_late_answers: usize,
    buffer_memory: u64,
    body_timeout: Duration,
    cors: Option<Cors>,
    compress: bool,
    sweep_every: Option<Duration>,
}

impl LayerState {
    /// Compresses an answer that the layer records itself. An answer recorded by a handler's transaction stays
    /// uncompressed, because SQL functions read it.
    fn compress(&self, answer: &mut CompletedAnswer) {
        if self.settings.compress {
            answer.record = record::compress(std::mem::take(&mut answer.record));
        }
    }
}

struct LayerState {
    engine: Engine,
    settings: LayerSettings,
    budget: budget::MemoryBudget,
    shared_records: shared_records::SharedRecords,
    sweeper: sweeper::Sweeper,
    late_answers: call_app::LateAnswerLimiter,
    tool_lists: ToolLists,
    shared_key_detector: Arc<shared_key_detector::SharedKeyDetector>,
    fingerprint_memo: FingerprintMemo<Route>,
}

/// Finds the policy of a request.
pub trait Routing: Send + Sync + 'static {
    /// Returns whether and how a request is covered.
    fn route(&self, request: &Parts) -> RouteMatch;

    /// The headers that carry the key of requests with this method, for a CORS preflight. `None` if such a request is
    /// not covered; the app then answers its preflight alone.
    fn key_headers(&self, method: &Method, preflight: &Parts) -> Option<Vec<HeaderName>>;
}

/// The result of [`Routing::route`].
#[derive(Debug, Clone)]
pub enum RouteMatch {
    /// No route covers the request: it passes through unchanged.
    NotCovered,
    /// No route covers the request although it has a key: it passes through unchanged, and the observer is notified.
    UncoveredKey,
    /// A route covers the request.
    Covered {
        /// The route of the request.
        route: Arc<Route>,
        /// Further routes that an app could match. Their requirements (key, signature) apply too. If the request has no
        /// key under `route`, the first of these under which it has one replaces `route`.
        alternatives: Vec<Arc<Route>>,
    },
    /// A gRPC call whose method is not known to be unary. It is never buffered: if it has a key, or the policy requires
    /// one, it is refused (`method-unknown`); otherwise it passes through.
    UnknownCall(Arc<Route>),
    /// The request is refused in this format, regardless of its route.
    Refused(Refusal, RefusalFormat),
}

impl RouteMatch {
    /// Creates a match with one route and no alternatives.
    pub fn covered(route: Arc<Route>) -> Self {
        Self::Covered { route, alternatives: Vec::new() }
    }
}

/// A policy with a name for operators.
#[derive(Debug, Clone, PartialEq)]
pub struct Route {
    /// A name such as `POST /payments/*`. If empty, the method and path of each request.
    pub name: String,
    /// The policy of the route.
    pub policy: CheckedPolicy,
    /// The protocol of the route.
    pub protocol: Protocol,
}

/// The sender's address. The server puts it into the request's extensions. Without it, axum's `ConnectInfo` counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerAddress(pub IpAddr);

impl Ibid {
    /// Creates an instance with default limits and no observer.
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self::builder(store).build()
    }

    /// Creates a builder.
    pub fn builder(store: Arc<dyn Store>) -> IbidBuilder {
        IbidBuilder {
            store,
            observer: Arc::new(NoopObserver),
            journal: None,
            quota: None,
            settings: LayerSettings {
                trusted_proxies: TrustedProxies::loopback(),
                credentials: Credentials::default(),
                address_secret: None,
                label_key: false,
                max_running: 10_000,
                max_late_answers: 256,
                buffer_memory: 256 << 20,
                body_timeout: Duration::from_secs(30),
                cors: None,
                compress: false,
                sweep_every: Some(Duration::from_secs(60)),
            },
        }
    }

    /// Creates a layer with one policy for all requests. It cannot buffer a gRPC call, which may be a stream: a call
    /// without a key passes through, and a call with a key is refused (`method-unknown`). For gRPC, wrap
    /// [`grpc_layer`](Self::grpc_layer) around this layer, which then ignores the calls that the other one covers.
    ///
    /// # Errors
    /// The policy contradicts itself, or a setting is out of range.
    pub fn layer(&self, policy: Policy) -> Result<IbidLayer, InvalidPolicy> {
        self.layer_named("", policy)
    }

    /// Creates a layer with one policy and a route name for operators.
    ///
    /// # Errors
    /// As [`layer`](Self::layer).
    pub fn layer_named(&self, name: impl Into<String>, policy: Policy) -> Result<IbidLayer, InvalidPolicy> {
        let protocol = policy.protocol();
        let route = Route { name: name.into(), policy: policy.checked()?, protocol };
        let grpc_route = Arc::new(Route { protocol: Protocol::Grpc, ..route.clone() });
        Ok(self.layer_with_routing(Arc::new(SingleRoute { route: Arc::new(route), grpc_route })))
    }

    /// Creates a layer that looks up the policy of each request.
    pub fn layer_with_routing(&self, routing: Arc<dyn Routing>) -> IbidLayer {
        IbidLayer { shared: self.shared.clone(), routing }
    }

    /// Handles a request in a server that sends requests to the app itself. `key_headers` is only called for CORS
    /// preflights.
    pub fn handle<A, B>(
        &self, app: A, request: Request<B>, sender: RequestSender, route: RouteMatch, key_headers: &KeyHeaderLookup<'_>,
    ) -> ResponseFuture<A::PassFuture, A::Body>
    where
        A: App<B>,
        B: Body<Data: Buf + Send, Error: Into<BoxError>> + Send + 'static,
    {
        let (parts, body) = request.into_parts();
        service::call(&self.shared, app, parts, body, sender, route, key_headers)
    }

    /// Continues a run whose claim was granted earlier, to another process or to this one: `app` is called with the
    /// head of the request and returns the response of the handler. The result is settled unless another run has taken
    /// over.
    pub fn resume<A, B>(
        &self, app: A, head: Parts, sender: &RequestSender, run: ResumedRun,
    ) -> ResponseFuture<A::PassFuture, A::Body>
    where
        A: App<B>,
        B: Send + 'static,
    {
        exchange::resume(&self.shared, app, head, sender, run)
    }

    /// Returns once no operation is running and the store has all results. Await it before the process ends. It waits
    /// at most ten seconds for the store.
    pub async fn drained(&self) {
        self.shared.engine.running().wait_idle().await;
        let _ = timeout(SETTLE_QUEUE_FLUSH_TIMEOUT, self.shared.engine.settle_queue().wait_until_empty()).await;
    }

    /// Reserves a part of [`buffer_memory`](IbidBuilder::buffer_memory) for a body that is buffered outside of the
    /// layers. Returns `None` if too little is free.
    pub fn reserve(&self, bytes: u64) -> Option<MemoryReservation> {
        self.shared.budget.reserve(bytes)
    }

    /// The underlying engine.
    pub fn engine(&self) -> &Engine {
        &self.shared.engine
    }
}

/// Defines setters by name, argument, field and value.
macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident($value:ident: $type:ty) => $($field:ident).+ = $set:expr;)+) => {$(
        $(#[$doc])*
        pub fn $name(mut self, $value: $type) -> Self {
            self.$($field).+ = $set;
            self
        }
    )+};
}

impl IbidBuilder {
    setters! {
        /// Sets the observer for metrics and logs.
        observer(observer: Arc<dyn Observer>) => observer = observer;
        /// Sets the journal for answers that the store cannot record.
        journal(journal: Arc<Journal>) => journal = Some(journal);
        /// Compresses answers above 1 KiB before they are stored; off by default. All readers accept both forms. Leave it
        /// off for a store that seals, which compresses by itself, and if SQL functions read the answers.
        compress(compress: bool) => settings.compress = compress;
        /// Limits how much each tenant may start; unlimited by default. The tenant tag identifies the tenant. Keep an `Arc`
        /// of the quota to [change](Quota::set) the limits later.
        quota(quota: impl Into<Arc<Quota>>) => quota = Some(quota.into());
        /// Sets the proxies whose scope headers are accepted; loopback by default. Needs [`PeerAddress`] in each request's
        /// extensions.
        trusted_proxies(trusted: TrustedProxies) => settings.trusted_proxies = trusted;
        /// Sets the headers that carry credentials. Do not change them while records are live.
        credentials(credentials: Credentials) => settings.credentials = credentials;
        /// Makes addresses unguessable. Never change the secret while records are live.
        address_secret(secret: AddressSecret) => settings.address_secret = Some(secret);
        /// Keeps the whole key in the [label](crate::label::LabelText) of each entry, so that operators can reveal a masked
        /// key; off by default. Only for a store that seals labels.
        label_key(keep: bool) => settings.label_key = keep;
        /// Limits the number of running operations; further requests are refused before they are claimed. 10,000 by
        /// default.
        max_running(at_most: usize) => settings.max_running = at_most;
        /// Limits how many operations are awaited beyond their policy's `timeout`, for up to its `late_answer`; 256 by
        /// default. A newer operation replaces the oldest, whose outcome is then unknown.
        max_late_answers(at_most: usize) => settings.max_late_answers = at_most;
        /// Limits the memory of all buffered bodies: requests, and responses not yet sent. When it is exhausted, the
        /// slowest clients are disconnected first, then requests are refused. 256 MiB by default. One client address may
        /// use a quarter of it unless it is a trusted proxy ([`PeerAddress`]), one connection an eighth
        /// ([`PeerConnection`]).
        buffer_memory(bytes: u64) => settings.buffer_memory = bytes;
        /// Limits how long a client may take to send a body that must be read; 30 seconds by default.
        body_timeout(at_most: Duration) => settings.body_timeout = at_most.min(MAX_DURATION);
        /// Makes responses readable for browsers on these origins.
        cors(cors: Cors) => settings.cors = Some(cors);
        /// Sets the interval at which expired entries are removed, while an [`Ibid`] or one of its layers exists; one
        /// minute by default. `None`: another process sweeps.
        sweep_every(every: Option<Duration>) => settings.sweep_every = every;
    }

    /// Builds the [`Ibid`].
    pub fn build(self) -> Ibid {
        let Self { store, observer, journal, quota, settings } = self;
        let shared_key_detector = shared_key_detector::SharedKeyDetector::new(observer.clone());
        let mut engine = Engine::with_observer(store, observer, journal);
        if let Some(quota) = quota {
            engine = engine.with_quota(quota);
        }
        let budget = budget::MemoryBudget::new(settings.buffer_memory, settings.trusted_proxies.clone());
        let shared_records = shared_records::SharedRecords::default();
        let sweeper = sweeper::Sweeper::new(settings.sweep_every);
        sweeper.start(&engine);
        let late_answers = call_app::LateAnswerLimiter::new(settings.max_late_answers);
        let tool_lists = ToolLists::default();
        let shared = LayerState {
            engine,
            settings,
            budget,
            shared_records,
            sweeper,
            late_answers,
            tool_lists,
            shared_key_detector,
            fingerprint_memo: FingerprintMemo::default(),
        };
        Ibid { shared: Arc::new(shared) }
    }
}

struct SingleRoute {
    route: Arc<Route>,
    /// The same route for gRPC calls, whose refusals are gRPC responses.
    grpc_route: Arc<Route>,
}

impl Routing for SingleRoute {
    fn route(&self, request: &Parts) -> RouteMatch {
        let policy = &self.route.policy;
        if !policy.covers(&request.method) {
            return match_uncovered(&request.method, carries_key(policy, &request.uri, &request.headers));
        }
        // gRPC calls may be streams, which must not be buffered, and they report their outcome in trailers.
        match Protocol::of_request(request.version, &request.headers) {
            Protocol::Http | Protocol::JsonRpc => RouteMatch::covered(self.route.clone()),
            Protocol::Grpc if request.extensions.get::<RunInfo>().is_some() => RouteMatch::NotCovered,
            Protocol::Grpc => RouteMatch::UnknownCall(self.grpc_route.clone()),
        }
    }

    fn key_headers(&self, method: &Method, _: &Parts) -> Option<Vec<HeaderName>> {
        self.route.policy.covers(method).then(|| key_headers(&self.route.policy))
    }
}

/// Returns the match for a request that no route covers. A key on GET, HEAD or OPTIONS is not reported, because they
/// change nothing.
pub fn match_uncovered(method: &Method, has_key: bool) -> RouteMatch {
    let is_safe = ["GET", "HEAD", "OPTIONS"].iter().any(|safe| method.as_str().eq_ignore_ascii_case(safe));
    if has_key && !is_safe { RouteMatch::UncoveredKey } else { RouteMatch::NotCovered }
}

/// The headers that carry a policy's keys.
pub fn key_headers(policy: &Policy) -> Vec<HeaderName> {
    let header = |source: &KeySource| match source {
        KeySource::Header(name) => Some(name.clone()),
        _ => None,
    };
    policy.key.from.iter().filter_map(header).collect()
}
