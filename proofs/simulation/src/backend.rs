//! The stores of a world, what each gateway has of them, and what goes wrong with them.

use std::{collections::BTreeMap, future::pending, sync::Arc};

use ibid::{observe::NoopObserver, store::Store};
use ibid_stores::{
    RemoteOptions,
    local_cache::{AnswerCache, LocalCache},
    postgres::Postgres,
    redis::Redis,
    simulation::simulate_connections,
    tiered::{TieredMode, TieredStore},
};
use parking_lot::Mutex;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::{
    network::{LinkFaults, SimulatedLink, SimulatedStore},
    postgres::SimulatedPostgres,
    random::SeededRandom,
    redis::{
        database::BrokenRule,
        server::{RedisSetup, SimulatedRedis},
    },
    tcp::{LinkCondition, ServerCondition, SimulatedServer, TcpLink},
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
    /// The PostgreSQL client and a simulated server.
    Postgres,
    /// The Redis client in front of the PostgreSQL client, strict.
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
    postgres: Option<Arc<SimulatedPostgres>>,
    /// By the name of the host to which a gateway connects.
    tcp_links: Arc<Mutex<BTreeMap<String, Arc<TcpLink>>>>,
}

/// The ways of one gateway to its stores.
pub(crate) struct GatewayLinks {
    calls: Vec<Arc<SimulatedLink>>,
    redis: Option<Arc<TcpLink>>,
    postgres: Option<Arc<TcpLink>>,
    death: CancellationToken,
}

impl GatewayLinks {
    fn tcp(&self) -> impl Iterator<Item = &Arc<TcpLink>> {
        self.redis.iter().chain(&self.postgres)
    }

    /// The gateway crashes.
    pub(crate) fn kill(&self) {
        self.death.cancel();
        self.calls.iter().for_each(|link| link.kill());
        self.tcp().for_each(|link| link.kill());
    }

    /// Whether the gateway has crashed.
    pub(crate) fn is_dead(&self) -> bool {
        self.death.is_cancelled() || self.tcp().any(|link| link.is_dead())
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
            StorePlan::Postgres | StorePlan::RedisInFront(_) => 1,
        };
        let stores: Vec<Arc<SimulatedStore>> = (0..store_count).map(|_| Arc::default()).collect();
        let redis = match plan {
            StorePlan::Redis(redis) | StorePlan::RedisInFront(redis) => {
                let has_compare_and_set = redis.has_compare_and_set;
                let setup = RedisSetup { has_compare_and_set, has_replica: can_fail_over, broken: redis.broken };
                Some(Arc::new(SimulatedRedis::new(setup, random)))
            }
            _ => None,
        };
        let has_postgres = matches!(plan, StorePlan::Postgres | StorePlan::RedisInFront(_));
        let postgres = has_postgres.then(|| Arc::new(SimulatedPostgres::new(&stores[0], random)));
        let tcp_links: Arc<Mutex<BTreeMap<String, Arc<TcpLink>>>> = Arc::default();
        let known = Arc::clone(&tcp_links);
        simulate_connections(Arc::new(move |host| known.lock()[host].connect()));
        Self { plan, can_fail_over, random: Arc::clone(random), stores, redis, postgres, tcp_links }
    }

    /// Opens the store as the gateway of this number does when it starts.
    pub(crate) async fn open(&self, nth: usize) -> (Arc<dyn Store>, GatewayLinks) {
        let link = |store: &Arc<SimulatedStore>| Arc::new(SimulatedLink::new(store, &self.random));
        let mut links =
            GatewayLinks { calls: Vec::new(), redis: None, postgres: None, death: CancellationToken::new() };
        let store: Arc<dyn Store> = match self.plan {
            StorePlan::Contract => {
                let link = link(&self.stores[nth % self.stores.len()]);
                links.calls = vec![link.clone()];
                link
            }
            StorePlan::Tiered => {
                let (front, authority) = (link(&self.stores[0]), link(&self.stores[1]));
                links.calls = vec![front.clone(), authority.clone()];
                tiered(front, authority)
            }
            StorePlan::Redis(plan) => self.open_redis(plan, &mut links).await,
            StorePlan::Postgres => self.open_postgres(&mut links).await,
            StorePlan::RedisInFront(plan) => {
                let front = self.open_redis(plan, &mut links).await;
                tiered(front, self.open_postgres(&mut links).await)
            }
        };
        (store, links)
    }

    async fn open_redis(&self, plan: RedisPlan, links: &mut GatewayLinks) -> Arc<dyn Store> {
        let (host, link) = self.new_link(self.redis.clone().expect("a server"));
        links.redis = Some(link);
        let answers = plan.has_local_cache.then(|| AnswerCache::new(1 << 20));
        let options = RemoteOptions {
            answer_cache: answers.clone(),
            wait_replicas: plan.wait_replicas,
            ..RemoteOptions::default()
        };
        let store = Redis::open(&format!("redis://{host}"), options).await.expect("a valid URL");
        let store: Arc<dyn Store> = Arc::new(store);
        answers.map(|answers| Arc::new(LocalCache::new(store.clone(), answers)) as _).unwrap_or(store)
    }

    /// Statements are unnamed, because the driver numbers all names of a process: their lengths would not follow from the
    /// seed.
    async fn open_postgres(&self, links: &mut GatewayLinks) -> Arc<dyn Store> {
        let (host, link) = self.new_link(self.postgres.clone().expect("a server"));
        links.postgres = Some(link);
        let url = format!("postgres://ibid@{host}/ibid?sslmode=disable&statements=unnamed");
        Arc::new(Postgres::open(&url, RemoteOptions::default()).await.expect("a valid URL"))
    }

    fn new_link(&self, server: Arc<dyn SimulatedServer>) -> (String, Arc<TcpLink>) {
        let link = Arc::new(TcpLink::new(server, &self.random));
        let mut links = self.tcp_links.lock();
        let host = format!("gateway-{}", links.len());
        links.insert(host.clone(), Arc::clone(&link));
        (host, link)
    }

    /// Whether a server got something that it does not know.
    pub(crate) fn has_server_panicked(&self) -> bool {
        self.tcp_links.lock().values().any(|link| link.has_server_panicked())
    }

    /// Injects one fault into the links of a gateway or into a store, for a while.
    pub(crate) async fn break_one(&self, links: &GatewayLinks) {
        let tcp: Vec<&Arc<TcpLink>> = links.tcp().collect();
        let nth = self.random.below((tcp.len() + links.calls.len()) as u64) as usize;
        match tcp.get(nth) {
            None => self.break_contract(&links.calls[nth - tcp.len()]).await,
            Some(link) if self.random.happens(500) => self.break_link(link).await,
            Some(_) if links.redis.is_some() && nth == 0 => self.break_redis().await,
            Some(_) => self.break_postgres().await,
        }
    }

    async fn break_contract(&self, link: &SimulatedLink) {
        match self.random.below(if self.can_fail_over { 7 } else { 6 }) {
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
            3..=5 => self.break_store().await,
            _ => self.stores[0].fail_over(),
        }
    }

    /// A full store, or a wrong clock.
    async fn break_store(&self) {
        let store = &self.stores[self.random.below(self.stores.len() as u64) as usize];
        match self.random.below(4) {
            0 => {
                store.set_full(true);
                self.while_it_lasts().await;
                store.set_full(false);
            }
            1 => store.step_clock(self.random.millis(MAX_CLOCK_STEP_MS)),
            2 => {
                store.stop_clock();
                self.while_it_lasts().await;
                store.correct_clock(self.random.millis(MAX_CLOCK_STEP_MS));
            }
            _ => store.set_clock_rate(700 + self.random.below(600) as u32),
        }
    }

    async fn break_link(&self, link: &TcpLink) {
        let healthy = LinkCondition::default();
        let condition = match self.random.below(6) {
            0 => LinkCondition { resets: 20 + self.random.below(200), in_pieces: self.random.happens(500), ..healthy },
            1 => LinkCondition { in_pieces: true, ..healthy },
            2 => LinkCondition { calls_stall: true, ..healthy },
            3 => LinkCondition { answers_stall: true, ..healthy },
            4 => LinkCondition { is_cut: true, ..healthy },
            _ => {
                // At any await between two pieces; the world starts the gateway again.
                link.kill_after(self.random.below(30));
                healthy
            }
        };
        link.set_condition(condition);
        self.while_it_lasts().await;
        link.set_condition(healthy);
        link.kill_after(u64::MAX);
    }

    async fn break_redis(&self) {
        let server = self.redis.as_ref().expect("a server");
        let set_condition = |condition| server.set_condition(condition);
        match self.random.below(if self.can_fail_over { 5 } else { 3 }) {
            0 => {
                server.restart();
                self.stay_down(set_condition).await;
            }
            1 => self.refuse_writes(set_condition).await,
            2 => {
                let micros = self.random.millis(MAX_CLOCK_STEP_MS).as_micros() as i64;
                if self.random.happens(500) {
                    // A clock that stays behind makes leases last so much longer.
                    server.step_clock(-micros);
                    self.while_it_lasts().await;
                }
                server.step_clock(micros);
            }
            3 => server.stall_replication(self.random.millis(MAX_FAULT_MS)),
            _ => {
                server.fail_over();
                self.stay_down(set_condition).await;
            }
        }
    }

    async fn break_postgres(&self) {
        let server = self.postgres.as_ref().expect("a server");
        let set_condition = |condition| server.set_condition(condition);
        // Behind Redis it is Redis that forgets.
        let forgets = self.can_fail_over && self.plan == StorePlan::Postgres;
        match self.random.below(4) {
            0 => {
                server.restart();
                if forgets {
                    self.stores[0].fail_over();
                    self.stores[0].replicate();
                }
                self.stay_down(set_condition).await;
            }
            1 => self.refuse_writes(set_condition).await,
            2 => {
                server.set_conflicts(50 + self.random.below(500));
                self.while_it_lasts().await;
                server.set_conflicts(0);
            }
            _ => self.break_store().await,
        }
    }

    /// A server that was stopped comes back after a while.
    async fn stay_down(&self, set_condition: impl Fn(ServerCondition)) {
        set_condition(ServerCondition { is_down: true, ..ServerCondition::default() });
        sleep(self.random.millis(MAX_FAULT_MS / 2)).await;
        set_condition(ServerCondition::default());
    }

    /// A server is full or read-only for a while.
    async fn refuse_writes(&self, set_condition: impl Fn(ServerCondition)) {
        let is_full = self.random.happens(500);
        set_condition(ServerCondition { is_full, is_read_only: !is_full, is_down: false });
        self.while_it_lasts().await;
        set_condition(ServerCondition::default());
    }

    async fn while_it_lasts(&self) {
        let most = if self.random.happens(50) { MAX_LONG_STALL_MS } else { MAX_FAULT_MS };
        sleep(self.random.millis(most)).await;
    }
}

fn tiered(front: Arc<dyn Store>, authority: Arc<dyn Store>) -> Arc<dyn Store> {
    Arc::new(TieredStore::new(front, authority, TieredMode::Strict, Arc::new(NoopObserver), None))
}
