//! Gateways, an app, clients, and what goes wrong.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use ibid::{
    Ibid, Policy,
    http::ResponseBody,
    policy::OnUnknown,
    store::{ClaimToken, Store},
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
    network::{LinkFaults, SimulatedLink, SimulatedStore},
    random::SeededRandom,
};

const CALLER: &str = "simulation";
/// How long clients wait for an answer before they hang up.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(3);
/// Longer than every lease, timeout and repeated message.
const REST: Duration = Duration::from_secs(300);
const MAX_FAULT_MS: u64 = 3_000;
/// How often a gateway is asked at the end.
const MAX_FINAL_REQUESTS: usize = 100;

/// What a run is made of.
#[derive(Clone, Debug)]
pub struct SimulationPlan {
    /// Decides everything that is random.
    pub seed: u64,
    /// How many gateways share the store.
    pub gateways: usize,
    /// How many clients send at the same time.
    pub clients: usize,
    /// How many keys they share.
    pub keys: u64,
    /// How long faults and load last.
    pub load: Duration,
    /// Whether the store fails over to a replica that lacks the latest writes, which no promise covers.
    pub can_fail_over: bool,
    /// Whether each gateway has a store of its own, which cannot work.
    pub has_separate_stores: bool,
    /// What the policy does with an unknown outcome. `Retry` authorises another run.
    pub on_unknown: OnUnknown,
}

impl SimulationPlan {
    /// The plan of a seed: three gateways on one store.
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            gateways: 3,
            clients: 5,
            keys: 4,
            load: Duration::from_secs(20),
            can_fail_over: false,
            has_separate_stores: false,
            on_unknown: OnUnknown::Hold,
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
}

/// Runs a plan. Blocks this thread, for as long as it computes.
///
/// # Panics
/// If a gateway answers with a status that no request should get.
pub fn simulate(plan: &SimulationPlan) -> SimulationResult {
    ClaimToken::seed_thread(plan.seed);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let (history, faults) = runtime.expect("a runtime").block_on(run(plan));
    let verdict = check_history(&history).expect("a recorded history is consistent");
    SimulationResult { history, faults, verdict }
}

struct World {
    plan: SimulationPlan,
    start: Instant,
    random: Arc<SeededRandom>,
    stores: Vec<Arc<SimulatedStore>>,
    gateways: Mutex<Vec<Arc<SimulatedGateway>>>,
    events: Mutex<Vec<HistoryEvent>>,
}

struct SimulatedGateway {
    link: Arc<SimulatedLink>,
    service: Mutex<GatewayService>,
    requests: Mutex<Vec<AbortHandle>>,
}

type GatewayService = BoxCloneService<Request<Full<Bytes>>, (StatusCode, Bytes, bool), BoxError>;

async fn run(plan: &SimulationPlan) -> (Vec<HistoryEvent>, usize) {
    let store_count = if plan.has_separate_stores { plan.gateways } else { 1 };
    let world = Arc::new(World {
        plan: plan.clone(),
        start: Instant::now(),
        random: Arc::new(SeededRandom::new(plan.seed)),
        stores: (0..store_count).map(|_| Arc::default()).collect(),
        gateways: Mutex::default(),
        events: Mutex::default(),
    });
    let gateways = (0..plan.gateways).map(|nth| world.start_gateway(nth)).collect();
    *world.gateways.lock() = gateways;
    let mut clients = JoinSet::new();
    for _ in 0..plan.clients {
        clients.spawn(Arc::clone(&world).send_until_the_end());
    }
    let faults = world.break_things().await;
    while clients.join_next().await.is_some() {}
    sleep(REST).await;
    world.ask_at_rest().await;
    let events = std::mem::take(&mut *world.events.lock());
    (events, faults)
}

impl World {
    fn start_gateway(self: &Arc<Self>, nth: usize) -> Arc<SimulatedGateway> {
        let link = Arc::new(SimulatedLink::new(&self.stores[nth % self.stores.len()], &self.random));
        let store: Arc<dyn Store> = link.clone();
        let mut policy = Policy::ietf();
        (policy.lease, policy.timeout) = (Duration::from_secs(2), Duration::from_secs(5));
        policy.on_unknown = self.plan.on_unknown;
        let layer = Ibid::new(store).layer(policy).expect("a valid policy");
        let (world, app_link) = (Arc::clone(self), Arc::clone(&link));
        let app = service_fn(move |request: Request<_>| {
            let (world, link) = (Arc::clone(&world), Arc::clone(&app_link));
            async move { world.execute(&request, &link).await }
        });
        let service =
            layer.layer(app).map_err(BoxError::from).and_then(async |response: Response<ResponseBody<Full<Bytes>>>| {
                let (head, body) = response.into_parts();
                let body = body.collect().await?.to_bytes();
                let is_pending = head.headers.get("idempotency-stored").is_some_and(|value| value == "pending");
                Ok((head.status, body, is_pending))
            });
        let service = Mutex::new(BoxCloneService::new(service));
        Arc::new(SimulatedGateway { link, service, requests: Mutex::default() })
    }

    /// The app: logs the execution, takes its time, and sometimes loses its answer.
    async fn execute<B>(&self, request: &Request<B>, link: &SimulatedLink) -> Result<Response<Full<Bytes>>, BoxError> {
        link.wait_if_dead().await;
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
            let (key, gateway) = (self.random.below(self.plan.keys), self.random.below(self.plan.gateways as u64));
            self.send(key, gateway as usize, false).await;
            sleep(self.random.millis(800)).await;
        }
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
            match self.random.below(if self.plan.can_fail_over { 5 } else { 4 }) {
                0 => {
                    let often = 50 + self.random.below(400);
                    let (lost_calls, lost_answers) = (self.random.below(often), self.random.below(often));
                    gateway.link.set_faults(LinkFaults { lost_calls, lost_answers, repeated_calls: often });
                    sleep(self.random.millis(MAX_FAULT_MS)).await;
                    gateway.link.set_faults(LinkFaults::default());
                }
                1 => {
                    gateway.link.set_cut(true);
                    sleep(self.random.millis(MAX_FAULT_MS)).await;
                    gateway.link.set_cut(false);
                }
                2 => self.crash(nth),
                3 => {
                    self.stores[0].replicate();
                    gateway.link.set_faults(LinkFaults { repeated_calls: 1000, ..LinkFaults::default() });
                    sleep(self.random.millis(MAX_FAULT_MS)).await;
                    gateway.link.set_faults(LinkFaults::default());
                }
                _ => self.stores[0].fail_over(),
            }
        }
        count
    }

    /// Kills a gateway with all that it was doing, and starts a new one in its place.
    fn crash(self: &Arc<Self>, nth: usize) {
        let new = self.start_gateway(nth);
        let old = std::mem::replace(&mut self.gateways.lock()[nth], new);
        old.link.kill();
        old.requests.lock().iter().for_each(AbortHandle::abort);
    }

    /// Asks every gateway for every key, until it gives a final answer.
    async fn ask_at_rest(&self) {
        for key in 0..self.plan.keys {
            for gateway in 0..self.plan.gateways {
                for _ in 0..MAX_FINAL_REQUESTS {
                    let result = self.send(key, gateway, true).await;
                    if matches!(result, RequestResult::Answer { .. } | RequestResult::OutcomeUnknown) {
                        break;
                    }
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
