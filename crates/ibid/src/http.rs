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
//! A request's way: `service` finds the route and judges key and scope ([`request`](self)), reads the body, and hands
//! an operation to the [engine](crate::Engine); the operation calls the inner service and reads its reply; what the
//! client gets is made in `answer`. From the claim on nothing that the client does can stop it: a future that is
//! dropped carries on in a task of its own.

use std::{
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use http::{HeaderName, Method, request::Parts};
use tokio::time::timeout;

pub use self::{
    body::{BoxError, RequestBody, ResponseBody, TruncatedResponse},
    budget::MemoryReservation,
    client_response::{error_answer, plain_response, refusal_response, success_answer},
    connection::{PeerConnection, ResponseAbort},
    cors::Cors,
    future::ResponseFuture,
    handler_claim::{HandlerClaim, NotRememberedError},
    inner_response::completed_answer_of,
    layer::{IbidLayer, IbidService},
    poll_hook::PollHook,
    request::carries_key,
    request_id::{current_request_id, sent_request_id},
};
pub(crate) use self::{
    inner_response::{ResponseMeaning, stored_headers},
    request_id::UnderRequestId,
};
use crate::{
    engine::Engine,
    grpc::{self, UnaryMethods},
    journal::Journal,
    key::KeySource,
    observe::{NoopObserver, Observer},
    policy::{CheckedPolicy, InvalidPolicy, MAX_DURATION, Policy, RefusalFormat},
    quota::Quota,
    refusal::Refusal,
    scope::{AddressSecret, Credentials, TrustedProxies},
    store::Store,
};

mod ambiguity;
mod anonymous;
mod body;
mod budget;
mod client_response;
mod connection;
mod cors;
mod forwarded;
mod future;
mod handler_claim;
mod inner_response;
mod late_answers;
mod layer;
mod operation;
mod poll_hook;
mod read_body;
mod refusal_style;
mod request;
mod request_id;
mod service;
mod shadow;
mod shared_key_detector;
mod shared_records;
mod sweeper;

/// How long [`Ibid::drained`] waits for the store.
const SETTLE_QUEUE_FLUSH_TIMEOUT: Duration = Duration::from_secs(10);

/// Idempotency for HTTP services: makes layers that share one store and one set of limits.
#[derive(Clone)]
pub struct Ibid {
    shared: Arc<LayerState>,
}

/// Sets up an [`Ibid`].
pub struct IbidBuilder {
    store: Arc<dyn Store>,
    observer: Arc<dyn Observer>,
    journal: Option<Arc<Journal>>,
    quota: Option<Arc<Quota>>,
    settings: LayerSettings,
}

/// What holds for every route.
struct LayerSettings {
    trusted_proxies: TrustedProxies,
    credentials: Credentials,
    address_secret: Option<AddressSecret>,
    max_running: usize,
    max_late_answers: usize,
    buffer_memory: u64,
    body_timeout: Duration,
    cors: Option<Cors>,
    compress: bool,
    sweep_every: Option<Duration>,
}

struct LayerState {
    engine: Engine,
    settings: LayerSettings,
    budget: budget::MemoryBudget,
    shared_records: shared_records::SharedRecords,
    sweeper: sweeper::Sweeper,
    late_answers: late_answers::LateAnswerLimiter,
    shared_key_detector: Arc<shared_key_detector::SharedKeyDetector>,
}

/// Finds the policy of a request.
pub trait Routing: Send + Sync + 'static {
    /// Whether and how a request is covered.
    fn route(&self, request: &Parts) -> RouteMatch;

    /// The headers that carry the key of a request with this method, for the preflight that asks about it. `None` if
    /// such a request would not be covered: then its preflight is not ours to answer.
    fn key_headers(&self, method: &Method, preflight: &Parts) -> Option<Vec<HeaderName>>;

    /// The shape of a refusal that no route's policy gives.
    fn refusals(&self, _request: &Parts) -> RefusalFormat {
        RefusalFormat::Problem
    }
}

/// What a [`Routing`] found.
#[derive(Debug, Clone)]
pub enum RouteMatch {
    /// Nothing covers it: it passes through untouched.
    NotCovered,
    /// Nothing covers it although it carries a key: it passes through untouched, and the observer is told.
    UncoveredKey,
    /// This covers it.
    Covered {
        /// The route that the request is under.
        route: Arc<Route>,
        /// Further routes that an app could take the request for. What they require holds too: a key, a signature. If the
        /// request has no key by `route`, the first of these by which it has one takes its place.
        alternatives: Vec<Arc<Route>>,
    },
    /// A gRPC call under this policy whose method is not known to be unary. It is never buffered: if it carries a key, or
    /// the policy requires one, it is refused (`method-unknown`), else it passes through.
    UnknownCall(Arc<Route>),
    /// It is refused, whatever covers it.
    Refused(Refusal),
}

impl RouteMatch {
    /// One route covers it, and it cannot be taken for a request of another.
    pub fn covered(route: Arc<Route>) -> Self {
        Self::Covered { route, alternatives: Vec::new() }
    }
}

/// A policy and the name under which operators know it.
#[derive(Debug, Clone, PartialEq)]
pub struct Route {
    /// Such as `POST /payments/*`. The method and path of each request if empty.
    pub name: String,
    /// What holds for it.
    pub policy: CheckedPolicy,
    /// What its requests are.
    pub protocol: Protocol,
}

/// What is spoken on a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Protocol {
    /// Requests and answers.
    #[default]
    Http,
    /// Unary calls: see [`grpc`].
    Grpc,
}

/// The address of who sent a request, put into its extensions by the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerAddress(pub IpAddr);

/// Which run of its operation a request is, put into its extensions for the handler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunInfo {
    /// 1 for the first run.
    pub attempt: u32,
    /// Grows with every run of the same operation: a resource can refuse a lower one than it has seen.
    pub fence: u64,
}

/// How a proxy says what became of a request, in the extensions of its response.
#[derive(Debug, Clone)]
pub enum DispatchOutcome {
    /// Not one byte of it was written.
    NotSent(String),
    /// It may have been executed.
    ResponseLost(String),
}

/// How a proxy says that it has not begun to send a request, which has this in its extensions: given up meanwhile,
/// the request provably did not happen. Handlers that know nothing of it have always begun.
#[derive(Debug, Clone, Default)]
pub struct SendState(Arc<AtomicBool>);

impl SendState {
    /// Nothing was sent, and nothing will be before [`sending`](Self::mark_sending).
    pub fn hold(&self) {
        self.0.store(true, SeqCst);
    }

    /// From now on something may have been sent.
    pub fn mark_sending(&self) {
        self.0.store(false, SeqCst);
    }

    fn is_unsent(&self) -> bool {
        self.0.load(SeqCst)
    }
}

impl Ibid {
    /// With default limits, unobserved.
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self::builder(store).build()
    }

    /// With everything that can be set.
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

    /// A layer with one policy for all requests. A gRPC call may be a stream, which cannot be buffered: without a key it passes
    /// through, with one it is refused (`method-unknown`). gRPC has [a layer of its own](Self::grpc_layer); put that one
    /// around this one, which then passes the calls that it covers.
    ///
    /// # Errors
    /// The policy contradicts itself, or a dial is out of its range.
    pub fn layer(&self, policy: Policy) -> Result<IbidLayer, InvalidPolicy> {
        self.layer_named("", policy)
    }

    /// A layer with one policy, under a name that operators see.
    ///
    /// # Errors
    /// As [`layer`](Self::layer).
    pub fn layer_named(&self, name: impl Into<String>, policy: Policy) -> Result<IbidLayer, InvalidPolicy> {
        let route = Route { name: name.into(), policy: policy.checked()?, protocol: Protocol::Http };
        Ok(self.layer_with_routing(Arc::new(SingleRoute(Arc::new(route)))))
    }

    /// A layer with one policy for the unary methods of a gRPC server; requests to every other path pass through it untouched.
    /// A request to such a method that is not gRPC by its media type is covered as an HTTP request. For tonic's
    /// `Server::builder().layer(…)`, or around its `Routes`.
    ///
    /// # Errors
    /// As [`layer`](Self::layer), and if a dial makes no sense for gRPC calls.
    pub fn grpc_layer(&self, methods: UnaryMethods, policy: Policy) -> Result<IbidLayer, InvalidPolicy> {
        Ok(self.layer_with_routing(Arc::new(grpc::UnaryRouting::new(methods, String::new(), policy)?)))
    }

    /// A layer that looks the policy up for each request.
    pub fn layer_with_routing(&self, routing: Arc<dyn Routing>) -> IbidLayer {
        IbidLayer { shared: self.shared.clone(), routing }
    }

    /// Returns once no operation runs and the store has every result that waited for it: await it before the process
    /// ends. It waits at most ten seconds for the store.
    pub async fn drained(&self) {
        self.shared.engine.running().wait_idle().await;
        let _ = timeout(SETTLE_QUEUE_FLUSH_TIMEOUT, self.shared.engine.settle_queue().wait_until_empty()).await;
    }

    /// Reserves a part of [`buffer_memory`](IbidBuilder::buffer_memory) for a body that is buffered outside of the layers. `None`
    /// if there is no room.
    pub fn reserve(&self, bytes: u64) -> Option<MemoryReservation> {
        self.shared.budget.reserve(bytes)
    }

    /// The engine beneath.
    pub fn engine(&self) -> &Engine {
        &self.shared.engine
    }
}

impl IbidBuilder {
    /// Who is told what happens.
    pub fn observer(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observer = observer;
        self
    }

    /// Where answers go that the store cannot record.
    pub fn journal(mut self, journal: Arc<Journal>) -> Self {
        self.journal = Some(journal);
        self
    }

    /// Whether answers above 1 KiB are compressed before they are remembered; not by default. Every reader reads both. Leave it off
    /// for a store that seals, which compresses by itself, and where SQL functions are to read the answers.
    pub fn compress(mut self, compress: bool) -> Self {
        self.settings.compress = compress;
        self
    }

    /// How much tenants may begin; as much as they like by default. The tenant is what operators see as such.
    /// Who keeps a share of it can [set](Quota::set) other limits later.
    pub fn quota(mut self, quota: impl Into<Arc<Quota>>) -> Self {
        self.quota = Some(quota.into());
        self
    }

    /// Whose scope headers are believed; loopback by default. Needs the [`PeerAddress`] in each request's extensions.
    pub fn trusted_proxies(mut self, trusted: TrustedProxies) -> Self {
        self.settings.trusted_proxies = trusted;
        self
    }

    /// Which headers carry credentials. Must not change while records live.
    pub fn credentials(mut self, credentials: Credentials) -> Self {
        self.settings.credentials = credentials;
        self
    }

    /// Makes addresses unguessable. Must never change while records live.
    pub fn address_secret(mut self, secret: AddressSecret) -> Self {
        self.settings.address_secret = Some(secret);
        self
    }

    /// More operations at a time are refused before they are claimed; 10,000 by default.
    pub fn max_running(mut self, at_most: usize) -> Self {
        self.settings.max_running = at_most;
        self
    }

    /// How many operations are waited for beyond their policy's `timeout`, for up to its `late_answer`; 256 by default. A newer
    /// one replaces the oldest, whose outcome is then unknown.
    pub fn max_late_answers(mut self, at_most: usize) -> Self {
        self.settings.max_late_answers = at_most;
        self
    }

    /// All buffered bodies together, of requests and of answers that have not been sent yet. When it is exhausted, the
    /// slowest clients are cut off first, and then requests are refused. 256 MiB by default. One address of a client that
    /// is no trusted proxy holds at most a quarter of it ([`PeerAddress`]), one connection an eighth ([`PeerConnection`]).
    pub fn buffer_memory(mut self, bytes: u64) -> Self {
        self.settings.buffer_memory = bytes;
        self
    }

    /// How long a client may take to send a body that must be read; 30 seconds by default.
    pub fn body_timeout(mut self, at_most: Duration) -> Self {
        self.settings.body_timeout = at_most.min(MAX_DURATION);
        self
    }

    /// Makes answers readable for browsers on these origins.
    pub fn cors(mut self, cors: Cors) -> Self {
        self.settings.cors = Some(cors);
        self
    }

    /// How often what has expired is removed from the store, for as long as there is an [`Ibid`] or a layer of it; every
    /// minute by default. `None`: somebody else does that.
    pub fn sweep_every(mut self, every: Option<Duration>) -> Self {
        self.settings.sweep_every = every;
        self
    }

    /// Done.
    pub fn build(self) -> Ibid {
        let twins = shared_key_detector::SharedKeyDetector::new(self.observer.clone());
        let mut engine = Engine::with_observer(self.store, self.observer, self.journal);
        if let Some(quota) = self.quota {
            engine = engine.with_quota(quota);
        }
        let budget = budget::MemoryBudget::new(self.settings.buffer_memory, self.settings.trusted_proxies.clone());
        let records = shared_records::SharedRecords::default();
        let sweeping = sweeper::Sweeper::new(self.settings.sweep_every);
        sweeping.start(&engine);
        let late = late_answers::LateAnswerLimiter::new(self.settings.max_late_answers);
        Ibid {
            shared: Arc::new(LayerState {
                engine,
                settings: self.settings,
                budget,
                shared_records: records,
                sweeper: sweeping,
                late_answers: late,
                shared_key_detector: twins,
            }),
        }
    }
}

/// One policy for everything.
struct SingleRoute(Arc<Route>);

impl Routing for SingleRoute {
    fn route(&self, request: &Parts) -> RouteMatch {
        let policy = &self.0.policy;
        if !policy.covers(&request.method) {
            return match_uncovered(&request.method, carries_key(policy, &request.uri, &request.headers));
        }
        // gRPC calls may be streams, which must not be buffered, and say how they ended in their trailers only.
        match grpc::is_call(request.version, &request.headers) {
            false => RouteMatch::covered(self.0.clone()),
            true if request.extensions.get::<RunInfo>().is_some() => RouteMatch::NotCovered,
            true => RouteMatch::UnknownCall(self.0.clone()),
        }
    }

    fn key_headers(&self, method: &Method, _: &Parts) -> Option<Vec<HeaderName>> {
        self.0.policy.covers(method).then(|| key_headers(&self.0.policy))
    }
}

/// What becomes of a request that nothing covers. A key on GET, HEAD or OPTIONS is no mistake: they change nothing.
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
