//! Gateways, an app, clients, and what goes wrong.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use ibid::{
    Ibid, Policy,
    http::ResponseBody,
    policy::{OnConcurrent, OnUnknown},
    store::ClaimToken,
};
use ibid_histories::{
    checker::{HistoryVerdict, check_history},
    event::{HistoryEvent, RequestResult},
};
use parking_lot::Mutex;
use tokio::{
    task::{AbortHandle, JoinSet},
    time::{Instant, sleep, timeout},
};
use tower::{BoxError, Layer as _, ServiceExt as _, service_fn, util::BoxCloneService};

use crate::{
    backend::{GatewayLinks, RedisPlan, SimulatedBackend, StorePlan},
    random::SeededRandom,
};

const CALLER: &str = "simulation";
/// How long clients wait for an answer before they hang up.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(3);
/// Longer than every lease, timeout and repeated message.
const REST: Duration = Duration::from_secs(100);
/// What the checker says of an answer that a client had, and that is in progress or unknown later.
const ANSWER_WAS_LOST: &str = "a client had the answer before";
/// How long clients use the same keys.
const KEY_SECONDS: u64 = 4;
/// So many of a thousand faults are crashes of a gateway.
const CRASHES: u64 = 200;
/// How often a gateway is asked at the end.
const MAX_FINAL_REQUESTS: usize = 100;

/// What a run is made of.
#[derive(Clone, Debug)]
pub struct SimulationPlan {
    /// Decides everything that is random.
    pub seed: u64,
    /// What the gateways share.
    pub store: StorePlan,
    /// How many gateways there are.
    pub gateways: usize,
    /// How many clients send at the same time.
    pub clients: usize,
    /// How many keys they use at a time. Now and then they go on to others.
    pub keys: u64,
    /// How long faults and load last.
    pub load: Duration,
    /// Whether the store fails over to a replica that lacks the latest writes, which no promise covers.
    pub can_fail_over: bool,
    /// Whether each gateway has a store of its own, which cannot work.
    pub has_separate_stores: bool,
    /// What the policy does with an unknown outcome. `Retry` authorises another run.
    pub on_unknown: OnUnknown,
    /// What the policy does with a request whose operation is in progress.
    pub on_concurrent: OnConcurrent,
    /// How often gateways remove expired entries.
    pub sweep_every: Option<Duration>,
    /// Whether an answer that was replayed may be unknown later. It never runs again.
    pub may_lose_answers: bool,
}

impl SimulationPlan {
    /// The plan of a seed: three gateways on the contract's reference store.
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            store: StorePlan::Contract,
            gateways: 3,
            clients: 5,
            keys: 4,
            load: Duration::from_secs(20),
            can_fail_over: false,
            has_separate_stores: false,
            on_unknown: OnUnknown::Hold,
            on_concurrent: OnConcurrent::Reject,
            sweep_every: None,
            may_lose_answers: false,
        }
    }

    /// On two reference stores as one, of which the one in front forgets.
    pub fn tiered(seed: u64) -> Self {
        Self { store: StorePlan::Tiered, can_fail_over: true, ..Self::new(seed) }
    }

    /// On the Redis client and a simulated server, in one of several variants.
    pub fn redis(seed: u64) -> Self {
        let on_concurrent = if seed / 4 % 2 == 1 { OnConcurrent::Wait } else { OnConcurrent::Reject };
        let sweep_every = seed.is_multiple_of(32).then_some(Duration::from_secs(10));
        Self { store: StorePlan::Redis(RedisPlan::new(seed)), on_concurrent, sweep_every, ..Self::new(seed) }
    }

    /// On the Redis client, with failovers that lose what the replica does not have. Writes wait for the replica, but a
    /// replay does not: a failover may lose an answer that another gateway is just writing.
    pub fn redis_with_replica(seed: u64) -> Self {
        let redis = RedisPlan { wait_replicas: 1, ..RedisPlan::new(seed) };
        let store = StorePlan::Redis(redis);
        Self { store, can_fail_over: true, may_lose_answers: true, ..Self::redis(seed) }
    }

    /// On the PostgreSQL client and a simulated server.
    pub fn postgres(seed: u64) -> Self {
        Self { store: StorePlan::Postgres, ..Self::new(seed) }
    }

    /// On the Redis client in front of the PostgreSQL client. Redis forgets.
    pub fn redis_in_front(seed: u64) -> Self {
        let on_concurrent = OnConcurrent::Reject;
        let store = StorePlan::RedisInFront(RedisPlan::new(seed));
        Self { store, can_fail_over: true, on_concurrent, ..Self::redis(seed) }
    }

    /// One after the other, all plans that must be explained.
    pub fn any(seed: u64) -> Self {
        match seed % 6 {
            0 => Self::new(seed),
            1 => Self::tiered(seed),
            2 => Self::redis(seed),
            3 => Self::redis_with_replica(seed),
            4 => Self::postgres(seed),
            _ => Self::redis_in_front(seed),
        }
    }
}

/// What happened.
#[derive(Clone, Debug)]
pub struct SimulationResult {
    /// In the order of time.
    pub history: Vec<HistoryEvent>,
    /// How many faults were injected, apart from those of single messages.
    pub faults: usize,
    /// What the checker says.
    pub verdict: HistoryVerdict,
    /// How many of the rejected keys the plan excuses.
    pub lost_answers: usize,
}

impl SimulationResult {
    /// Moves the keys that ran at most once, and whose answer was forgotten, from the rejected ones to the lost answers.
    fn excuse_lost_answers(&mut self) {
        let runs = |wanted: &str| {
            let is_run = |event: &&HistoryEvent| matches!(event, HistoryEvent::Execute { key, .. } if key == wanted);
            self.history.iter().filter(is_run).count()
        };
        let rejected = self.verdict.rejected.len();
        self.verdict.rejected.retain(|wrong| runs(&wrong.key) > 1 || !wrong.reason.ends_with(ANSWER_WAS_LOST));
        self.lost_answers = rejected - self.verdict.rejected.len();
    }
}

/// Runs a plan. Blocks this thread, for as long as it computes.
///
/// # Panics
/// If a gateway answers with a status that no request should get, or gives no final answer after all faults.
pub fn simulate(plan: &SimulationPlan) -> SimulationResult {
    ClaimToken::seed_thread(plan.seed);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let (history, faults) = runtime.expect("a runtime").block_on(run(plan));
    let verdict = check_history(&history).expect("a recorded history is consistent");
    let mut result = SimulationResult { history, faults, verdict, lost_answers: 0 };
    if plan.may_lose_answers {
        result.excuse_lost_answers();
    }
    result
}

struct World {
    plan: SimulationPlan,
    start: Instant,
    random: Arc<SeededRandom>,
    backend: SimulatedBackend,
    gateways: Mutex<Vec<Arc<SimulatedGateway>>>,
    events: Mutex<Vec<HistoryEvent>>,
}

struct SimulatedGateway {
    links: Arc<GatewayLinks>,
    service: Mutex<GatewayService>,
    requests: Mutex<Vec<AbortHandle>>,
}

type GatewayService = BoxCloneService<Request<Full<Bytes>>, (StatusCode, Bytes, bool), BoxError>;

async fn run(plan: &SimulationPlan) -> (Vec<HistoryEvent>, usize) {
    let store_count = if plan.has_separate_stores { plan.gateways } else { 1 };
    let random = Arc::new(SeededRandom::new(plan.seed));
    let world = Arc::new(World {
        plan: plan.clone(),
        start: Instant::now(),
        backend: SimulatedBackend::new(plan.store, store_count, plan.can_fail_over, &random),
        random,
        gateways: Mutex::default(),
        events: Mutex::default(),
    });
    for nth in 0..plan.gateways {
        let gateway = world.start_gateway(nth).await;
        world.gateways.lock().push(gateway);
    }
    let mut clients = JoinSet::new();
    for _ in 0..plan.clients {
        clients.spawn(Arc::clone(&world).send_until_the_end());
    }
    let faults = world.break_things().await;
    while clients.join_next().await.is_some() {}
    sleep(REST).await;
    world.ask_at_rest().await;
    assert!(!world.backend.has_server_panicked(), "seed {}: a server does not know what it was sent", plan.seed);
    let events = std::mem::take(&mut *world.events.lock());
    (events, faults)
}

impl World {
    async fn start_gateway(self: &Arc<Self>, nth: usize) -> Arc<SimulatedGateway> {
        let (store, links) = self.backend.open(nth).await;
        let links = Arc::new(links);
        let mut policy = Policy::ietf();
        (policy.lease, policy.timeout) = (Duration::from_secs(2), Duration::from_secs(5));
        (policy.on_unknown, policy.on_concurrent) = (self.plan.on_unknown, self.plan.on_concurrent);
        policy.wait_timeout = Duration::from_secs(2);
        let ibid = Ibid::builder(store).sweep_every(self.plan.sweep_every).build();
        let layer = ibid.layer(policy).expect("a valid policy");
        let (world, app_links) = (Arc::clone(self), Arc::clone(&links));
        let app = service_fn(move |request: Request<_>| {
            let (world, links) = (Arc::clone(&world), Arc::clone(&app_links));
            async move { world.execute(&request, &links).await }
        });
        let service =
            layer.layer(app).map_err(BoxError::from).and_then(async |response: Response<ResponseBody<Full<Bytes>>>| {
                let (head, body) = response.into_parts();
                let body = body.collect().await?.to_bytes();
                let is_pending = head.headers.get("idempotency-stored").is_some_and(|value| value == "pending");
                Ok((head.status, body, is_pending))
            });
        let service = Mutex::new(BoxCloneService::new(service));
        Arc::new(SimulatedGateway { links, service, requests: Mutex::default() })
    }

    /// The app: logs the execution, takes its time, and sometimes loses its answer.
    async fn execute<B>(&self, request: &Request<B>, links: &GatewayLinks) -> Result<Response<Full<Bytes>>, BoxError> {
        links.wait_if_dead().await;
        sleep(self.random.millis(20)).await;
        let key = request.headers()["idempotency-key"].to_str().unwrap_or_default().to_owned();
        let answer = {
            let mut events = self.events.lock();
            let answer = format!("run {}", events.len());
            let caller = CALLER.to_owned();
            events.push(HistoryEvent::Execute { at: self.now(), caller, key, answer: answer.clone() });
            answer
        };
        let is_slow = self.random.happens(100);
        sleep(self.random.millis(if is_slow { 7_000 } else { 60 })).await;
        if self.random.happens(50) {
            return Err("the answer was lost".into());
        }
        let response = Response::builder().status(StatusCode::CREATED);
        Ok(response.body(Full::new(answer.into())).expect("a valid response"))
    }

    /// A client: requests with any of the keys through any gateway.
    async fn send_until_the_end(self: Arc<Self>) {
        while self.start.elapsed() < self.plan.load {
            let (key, gateway) = (self.pick_key(), self.random.below(self.plan.gateways as u64));
            self.send(key, gateway as usize, false).await;
            sleep(self.random.millis(800)).await;
        }
    }

    /// One of the current keys, or now and then of an earlier one.
    fn pick_key(&self) -> u64 {
        let used = self.plan.keys * (self.start.elapsed().as_secs() / KEY_SECONDS);
        let first = if self.random.happens(200) { self.random.below(used + 1) } else { used };
        first + self.random.below(self.plan.keys)
    }

    /// How many keys there were in all.
    fn key_count(&self) -> u64 {
        self.plan.keys * (self.plan.load.as_secs() / KEY_SECONDS + 1)
    }

    async fn send(&self, key: u64, gateway: usize, at_rest: bool) -> RequestResult {
        let gateway = Arc::clone(&self.gateways.lock()[gateway]);
        let (request, key) = (self.new_request_number(), format!("key-{key}"));
        let (caller, at) = (CALLER.to_owned(), self.now());
        self.events.lock().push(HistoryEvent::Invoke { at, request, caller, key: key.clone(), at_rest });
        let message = Request::post("/orders").header("host", "shop").header("authorization", "Bearer a");
        let message = message.header("content-type", "application/json").header("idempotency-key", &key);
        let message = message.body(Full::new(Bytes::from_static(br#"{"amount":1}"#))).expect("a valid request");
        let service = gateway.service.lock().clone();
        // A task of its own, so that it can die with its gateway.
        let call = tokio::spawn(async move { timeout(CLIENT_TIMEOUT, service.oneshot(message)).await });
        gateway.requests.lock().push(call.abort_handle());
        let Ok(Ok(Ok((status, body, is_pending)))) = call.await else { return RequestResult::Lost };
        let text = String::from_utf8_lossy(&body);
        let result = match status.as_u16() {
            201 => RequestResult::Answer { answer: text.into_owned(), pending: is_pending },
            409 if text.contains("#outcome-unknown") => RequestResult::OutcomeUnknown,
            409 if text.contains("#in-progress") => RequestResult::InProgress,
            502..=504 => RequestResult::Lost,
            _ => panic!("seed {}: {key} got {status}: {text}", self.plan.seed),
        };
        self.events.lock().push(HistoryEvent::Return { at: self.now(), request, result: result.clone() });
        result
    }

    /// Injects faults, one after the other, and heals them all.
    async fn break_things(self: &Arc<Self>) -> usize {
        let mut count = 0;
        while self.start.elapsed() < self.plan.load {
            sleep(self.random.millis(1_500)).await;
            let nth = self.random.below(self.plan.gateways as u64) as usize;
            let gateway = Arc::clone(&self.gateways.lock()[nth]);
            count += 1;
            if self.random.happens(CRASHES) {
                self.crash(nth).await;
            } else {
                self.backend.break_one(&gateway.links).await;
            }
            // A fault may have ended it.
            if gateway.links.is_dead() && Arc::ptr_eq(&gateway, &self.gateways.lock()[nth].clone()) {
                self.crash(nth).await;
            }
        }
        count
    }

    /// Kills a gateway with all that it was doing, and starts a new one in its place.
    async fn crash(self: &Arc<Self>, nth: usize) {
        let old = Arc::clone(&self.gateways.lock()[nth]);
        old.links.kill();
        old.requests.lock().iter().for_each(AbortHandle::abort);
        let new = self.start_gateway(nth).await;
        self.gateways.lock()[nth] = new;
        old.requests.lock().iter().for_each(AbortHandle::abort);
    }

    /// Asks every gateway for every key, until it gives a final answer.
    async fn ask_at_rest(&self) {
        for key in 0..self.key_count() {
            for gateway in 0..self.plan.gateways {
                let mut left = MAX_FINAL_REQUESTS;
                while !matches!(
                    self.send(key, gateway, true).await,
                    RequestResult::Answer { .. } | RequestResult::OutcomeUnknown
                ) {
                    left -= 1;
                    assert!(left > 0, "seed {}: gateway {gateway} gives no final answer to key-{key}", self.plan.seed);
                    sleep(Duration::from_secs(5)).await;
                }
            }
        }
    }

    fn now(&self) -> u64 {
        self.start.elapsed().as_micros() as u64
    }

    fn new_request_number(&self) -> u64 {
        self.events.lock().len() as u64
    }
}
