//! The stores of a world, what each gateway has of them, and what goes wrong with them.

use std::{
    collections::BTreeMap,
    future::pending,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
};

use ibid::{observe::NoopObserver, store::Store};
use ibid_stores::{
    RemoteOptions,
    local_cache::{AnswerCache, LocalCache},
    redis::{Redis, simulation::simulate_connections},
    tiered::{TieredMode, TieredStore},
};
use parking_lot::Mutex;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::{
    network::{LinkFaults, SimulatedLink, SimulatedStore},
    random::SeededRandom,
    redis::{
        database::BrokenRule,
        link::{LinkCondition, RedisLink},
        server::{RedisSetup, ServerCondition, SimulatedRedis},
    },
};

const MAX_FAULT_MS: u64 = 3_000;
/// Shorter than the time after which the system gives up a connection.
const MAX_LONG_STALL_MS: u64 = 20_000;
/// The furthest that a clock is stepped.
const MAX_CLOCK_STEP_MS: u64 = 3_600_000;

/// Which store the gateways share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StorePlan {
    /// The contract's reference store.
    Contract,
    /// Two of them as one, strict.
    Tiered,
    /// The Redis client and a simulated server.
    Redis(RedisPlan),
    /// The Redis client in front of the contract's reference store, strict.
    RedisInFront(RedisPlan),
}

/// How the Redis client and its server are set up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RedisPlan {
    /// Whether the server has `SET … IFEQ`.
    pub has_compare_and_set: bool,
    /// Whether gateways cache answers.
    pub has_local_cache: bool,
    /// How many replicas must have a write: 0 or 1.
    pub wait_replicas: u32,
    /// A rule that the server breaks.
    pub broken: Option<BrokenRule>,
}

impl RedisPlan {
    /// The variant of a seed.
    pub fn new(seed: u64) -> Self {
        let has_compare_and_set = seed.is_multiple_of(2);
        Self { has_compare_and_set, has_local_cache: seed / 2 % 2 == 1, wait_replicas: 0, broken: None }
    }
}

/// The stores of a world.
pub(crate) struct SimulatedBackend {
    plan: StorePlan,
    can_fail_over: bool,
    random: Arc<SeededRandom>,
    stores: Vec<Arc<SimulatedStore>>,
    redis: Option<Arc<SimulatedRedis>>,
    /// By the name of the host to which a gateway connects.
    redis_links: Arc<Mutex<BTreeMap<String, Arc<RedisLink>>>>,
    opened: AtomicUsize,
}

/// The ways of one gateway to its stores.
pub(crate) struct GatewayLinks {
    calls: Vec<Arc<SimulatedLink>>,
    redis: Option<Arc<RedisLink>>,
    death: CancellationToken,
}

impl GatewayLinks {
    /// The gateway crashes.
    pub(crate) fn kill(&self) {
        self.death.cancel();
        self.calls.iter().for_each(|link| link.kill());
        self.redis.iter().for_each(|link| link.kill());
    }

    /// Whether the gateway has crashed.
    pub(crate) fn is_dead(&self) -> bool {
        self.death.is_cancelled() || self.redis.as_ref().is_some_and(|link| link.is_dead())
    }

    /// Never returns if the gateway has crashed.
    pub(crate) async fn wait_if_dead(&self) {
        if self.is_dead() {
            pending::<()>().await;
        }
    }
}

impl SimulatedBackend {
    /// Creates the stores: one, or one for each of `separate` gateways.
    pub(crate) fn new(plan: StorePlan, separate: usize, can_fail_over: bool, random: &Arc<SeededRandom>) -> Self {
        let store_count = match plan {
            StorePlan::Contract => separate,
            StorePlan::Tiered => 2,
            StorePlan::Redis(_) => 0,
            StorePlan::RedisInFront(_) => 1,
        };
        let redis = match plan {
            StorePlan::Contract | StorePlan::Tiered => None,
            StorePlan::Redis(redis) | StorePlan::RedisInFront(redis) => {
                let has_compare_and_set = redis.has_compare_and_set;
                let setup = RedisSetup { has_compare_and_set, has_replica: can_fail_over, broken: redis.broken };
                Some(Arc::new(SimulatedRedis::new(setup, random)))
            }
        };
        let redis_links: Arc<Mutex<BTreeMap<String, Arc<RedisLink>>>> = Arc::default();
        let known = Arc::clone(&redis_links);
        simulate_connections(Arc::new(move |host| known.lock()[host].connect()));
        Self {
            plan,
            can_fail_over,
            random: Arc::clone(random),
            stores: (0..store_count).map(|_| Arc::default()).collect(),
            redis,
            redis_links,
            opened: AtomicUsize::new(0),
        }
    }

    /// Opens the store as the gateway of this number does when it starts.
    pub(crate) async fn open(&self, nth: usize) -> (Arc<dyn Store>, GatewayLinks) {
        let link = |store: &Arc<SimulatedStore>| Arc::new(SimulatedLink::new(store, &self.random));
        let death = CancellationToken::new();
        match self.plan {
            StorePlan::Contract => {
                let link = link(&self.stores[nth % self.stores.len()]);
                (link.clone(), GatewayLinks { calls: vec![link], redis: None, death })
            }
            StorePlan::Tiered => {
                let (front, authority) = (link(&self.stores[0]), link(&self.stores[1]));
                let store = tiered(front.clone(), authority.clone());
                (store, GatewayLinks { calls: vec![front, authority], redis: None, death })
            }
            StorePlan::Redis(plan) => {
                let (store, redis) = self.open_redis(plan).await;
                (store, GatewayLinks { calls: Vec::new(), redis: Some(redis), death })
            }
            StorePlan::RedisInFront(plan) => {
                let (front, redis) = self.open_redis(plan).await;
                let authority = link(&self.stores[0]);
                let store = tiered(front, authority.clone());
                (store, GatewayLinks { calls: vec![authority], redis: Some(redis), death })
            }
        }
    }

    async fn open_redis(&self, plan: RedisPlan) -> (Arc<dyn Store>, Arc<RedisLink>) {
        let link = Arc::new(RedisLink::new(self.redis.as_ref().expect("a server"), &self.random));
        let host = format!("gateway-{}", self.opened.fetch_add(1, SeqCst));
        self.redis_links.lock().insert(host.clone(), Arc::clone(&link));
        let answers = plan.has_local_cache.then(|| AnswerCache::new(1 << 20));
        let options = RemoteOptions {
            answer_cache: answers.clone(),
            wait_replicas: plan.wait_replicas,
            ..RemoteOptions::default()
        };
        let store = Redis::open(&format!("redis://{host}"), options).await.expect("a valid URL");
        let store: Arc<dyn Store> = Arc::new(store);
        (answers.map(|answers| Arc::new(LocalCache::new(store.clone(), answers)) as _).unwrap_or(store), link)
    }

    /// Injects one fault into the links of a gateway or into a store, for a while.
    pub(crate) async fn break_one(&self, links: &GatewayLinks) {
        let has_both = links.redis.is_some() && !links.calls.is_empty();
        match &links.redis {
            Some(link) if !has_both || self.random.happens(500) => self.break_redis(link).await,
            _ => {
                let link = &links.calls[self.random.below(links.calls.len() as u64) as usize];
                self.break_contract(link).await;
            }
        }
    }

    async fn break_contract(&self, link: &SimulatedLink) {
        let store = &self.stores[self.random.below(self.stores.len() as u64) as usize];
        // A store behind another may forget, but only the one in front.
        let can_fail_over = self.can_fail_over && self.redis.is_none();
        match self.random.below(if can_fail_over { 7 } else { 6 }) {
            0 => {
                let often = 50 + self.random.below(400);
                let (lost_calls, lost_answers) = (self.random.below(often), self.random.below(often));
                link.set_faults(LinkFaults { lost_calls, lost_answers, repeated_calls: often });
                self.while_it_lasts().await;
                link.set_faults(LinkFaults::default());
            }
            1 => {
                link.set_cut(true);
                self.while_it_lasts().await;
                link.set_cut(false);
            }
            2 => {
                self.stores[0].replicate();
                link.set_faults(LinkFaults { repeated_calls: 1000, ..LinkFaults::default() });
                self.while_it_lasts().await;
                link.set_faults(LinkFaults::default());
            }
            3 => {
                store.set_full(true);
                self.while_it_lasts().await;
                store.set_full(false);
            }
            4 if self.random.happens(500) => store.step_clock(self.random.millis(MAX_CLOCK_STEP_MS)),
            4 => {
                store.stop_clock();
                self.while_it_lasts().await;
                store.correct_clock(self.random.millis(MAX_CLOCK_STEP_MS));
            }
            5 => store.set_clock_rate(700 + self.random.below(600) as u32),
            _ => self.stores[0].fail_over(),
        }
    }

    async fn break_redis(&self, link: &RedisLink) {
        let server = self.redis.as_ref().expect("a server");
        let healthy = LinkCondition::default();
        let condition = match self.random.below(if self.can_fail_over { 11 } else { 9 }) {
            0 => LinkCondition { resets: 20 + self.random.below(200), in_pieces: self.random.happens(500), ..healthy },
            1 => LinkCondition { in_pieces: true, ..healthy },
            2 => LinkCondition { calls_stall: true, ..healthy },
            3 => LinkCondition { answers_stall: true, ..healthy },
            4 => LinkCondition { is_cut: true, ..healthy },
            5 => {
                // At any await between two pieces; the world starts it again.
                link.kill_after(self.random.below(30));
                healthy
            }
            6 => return self.stop_server(server, || server.restart()).await,
            7 => {
                let is_full = self.random.happens(500);
                server.set_condition(ServerCondition { is_full, is_read_only: !is_full, is_down: false });
                self.while_it_lasts().await;
                return server.set_condition(ServerCondition::default());
            }
            8 => {
                let micros = self.random.millis(MAX_CLOCK_STEP_MS).as_micros() as i64;
                if self.random.happens(500) {
                    // A clock that stays behind makes leases last so much longer.
                    server.step_clock(-micros);
                    self.while_it_lasts().await;
                }
                return server.step_clock(micros);
            }
            9 => return server.stall_replication(self.random.millis(MAX_FAULT_MS)),
            _ => return self.stop_server(server, || _ = server.fail_over()).await,
        };
        link.set_condition(condition);
        self.while_it_lasts().await;
        link.set_condition(healthy);
        link.kill_after(u64::MAX);
    }

    async fn stop_server(&self, server: &SimulatedRedis, stop: impl FnOnce()) {
        stop();
        server.set_condition(ServerCondition { is_down: true, ..ServerCondition::default() });
        sleep(self.random.millis(MAX_FAULT_MS / 2)).await;
        server.set_condition(ServerCondition::default());
    }

    async fn while_it_lasts(&self) {
        let most = if self.random.happens(50) { MAX_LONG_STALL_MS } else { MAX_FAULT_MS };
        sleep(self.random.millis(most)).await;
    }
}

fn tiered(front: Arc<dyn Store>, authority: Arc<dyn Store>) -> Arc<dyn Store> {
    Arc::new(TieredStore::new(front, authority, TieredMode::Strict, Arc::new(NoopObserver), None))
}
