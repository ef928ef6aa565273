//! The scenarios that ship, as data: which store, which faults, what is excused.
//!
//! Every scenario has its gateways killed and paused, and the ways from the clients and to the upstream torn. What the table
//! adds is the store's part. Each gateway reaches each of the store's servers over a link of its own, so that a partition
//! can separate one gateway and not the others.
//!
//! The servers themselves are made in [`backend`], the only place that knows how.

use std::{
    io,
    net::SocketAddr,
    path::Path,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use testbed::{FaultProxy, TestEnvoy};

use self::backend::StoreBackend;
use crate::{
    crowd::{self, WaiterPlan, WaiterReport},
    evaluation::ChaosReport,
    fault::{
        ChaosFault, FaultFuture, GatewayFault, NetworkFault, ProcessFault, ProxyFault, ServerFault, ServerProcess,
    },
    fleet::FleetLayout,
    report::Exemption,
    run::{ChaosPlan, FaultTargets, run},
    sandbox::Sandbox,
    soak::{SoakPlan, SoakReport, run_soak},
};

pub mod backend;

/// The store of a scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "as the stores' names")]
pub enum ScenarioStore {
    Memory,
    Embedded,
    Redis,
    Valkey,
    /// It keeps nothing on disk.
    RedisWithoutLog,
    Postgres,
    /// PostgreSQL decides, Redis is a cache.
    TieredStrict,
    /// Redis first, PostgreSQL behind it; goes on with either alone.
    TieredLoose,
    Sentinel,
    /// Servers die and nothing else happens to them: the primary while its replica is in step with it, unless replicas are
    /// waited for.
    Failover {
        wait_replicas: u32,
    },
    Cluster,
}

/// What is done in a scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScenarioAction {
    /// Load, while these happen to the store's servers, and to each gateway's link to each of them.
    Faults {
        /// To the processes.
        process_faults: &'static [ProcessFault],
        /// To the links.
        network_faults: &'static [NetworkFault],
    },
    /// So many waiters for one key; at most so many connections per link, and round trips per waiter.
    Waiters {
        /// How many wait.
        waiters: usize,
        /// Connections from one gateway to one server, at once.
        max_connections: usize,
        /// Round trips over one link, by waiter.
        max_round_trips_each: u64,
    },
    /// Mixed traffic: does anything grow?
    Soak,
}

/// One of them.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    /// By which it is asked for.
    pub name: &'static str,
    /// What it shows.
    pub description: &'static str,
    /// The store.
    pub store: ScenarioStore,
    /// What clients connect to.
    pub layout: FleetLayout,
    /// How many gateways share it.
    pub gateways: usize,
    /// What is done.
    pub action: ScenarioAction,
    /// What is excused.
    pub exemptions: &'static [Exemption],
}

const KILL_AND_PAUSE: &[ProcessFault] = &[ProcessFault::Kill, ProcessFault::Pause];
const NO_NETWORK_FAULTS: &[NetworkFault] = &[];
const WAITERS: ScenarioAction =
    ScenarioAction::Waiters { waiters: 10_000, max_connections: 16, max_round_trips_each: 3 };

/// All scenarios.
pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "embedded",
        description: "one gateway on its own disk, killed and paused",
        store: ScenarioStore::Embedded,
        layout: FleetLayout::Gateway,
        gateways: 1,
        action: ScenarioAction::Faults { process_faults: &[], network_faults: NO_NETWORK_FAULTS },
        exemptions: &[],
    },
    Scenario {
        name: "redis",
        description: "three gateways, one Redis that syncs every write: killed, paused, cut off, its answers lost",
        store: ScenarioStore::Redis,
        layout: FleetLayout::Gateway,
        gateways: 3,
        action: ScenarioAction::Faults { process_faults: KILL_AND_PAUSE, network_faults: &NetworkFault::ALL },
        exemptions: &[],
    },
    Scenario {
        name: "valkey",
        description: "three gateways, one Valkey that syncs every write: killed, paused, cut off, its answers lost",
        store: ScenarioStore::Valkey,
        layout: FleetLayout::Gateway,
        gateways: 3,
        action: ScenarioAction::Faults { process_faults: KILL_AND_PAUSE, network_faults: &NetworkFault::ALL },
        exemptions: &[],
    },
    Scenario {
        name: "redis-without-log",
        description: "a Redis that keeps nothing on disk: what it forgets when killed is measured, not excluded",
        store: ScenarioStore::RedisWithoutLog,
        layout: FleetLayout::Gateway,
        gateways: 3,
        action: ScenarioAction::Faults { process_faults: &[ProcessFault::Kill], network_faults: NO_NETWORK_FAULTS },
        exemptions: &[Exemption::Loss],
    },
    Scenario {
        name: "postgres",
        description: "three gateways, one PostgreSQL: killed, paused, cut off, its answers lost",
        store: ScenarioStore::Postgres,
        layout: FleetLayout::Gateway,
        gateways: 3,
        action: ScenarioAction::Faults { process_faults: KILL_AND_PAUSE, network_faults: &NetworkFault::ALL },
        exemptions: &[],
    },
    Scenario {
        name: "tiered-strict",
        description: "PostgreSQL with Redis as a cache; either is killed, paused, cut off from one gateway or all",
        store: ScenarioStore::TieredStrict,
        layout: FleetLayout::Gateway,
        gateways: 3,
        action: ScenarioAction::Faults { process_faults: KILL_AND_PAUSE, network_faults: &NetworkFault::ALL },
        exemptions: &[],
    },
    Scenario {
        name: "tiered-loose",
        description: "Redis with PostgreSQL behind it: runs twice only where an answer said degraded, or a gateway announced it",
        store: ScenarioStore::TieredLoose,
        layout: FleetLayout::Gateway,
        gateways: 3,
        action: ScenarioAction::Faults { process_faults: KILL_AND_PAUSE, network_faults: &NetworkFault::ALL },
        exemptions: &[Exemption::IfDegraded, Exemption::IfAnnounced, Exemption::Temporary],
    },
    Scenario {
        name: "redis-sentinel",
        description: "a Redis that fails over to its replica: what that loses is measured, not excluded",
        store: ScenarioStore::Sentinel,
        layout: FleetLayout::Gateway,
        gateways: 3,
        action: ScenarioAction::Faults { process_faults: KILL_AND_PAUSE, network_faults: NO_NETWORK_FAULTS },
        exemptions: &[Exemption::Loss],
    },
    Scenario {
        name: "redis-failover",
        description: "a Redis that dies while its replica is in step with it: what is lost is measured, not excluded",
        store: ScenarioStore::Failover { wait_replicas: 0 },
        layout: FleetLayout::Gateway,
        gateways: 3,
        action: ScenarioAction::Faults { process_faults: &[], network_faults: NO_NETWORK_FAULTS },
        exemptions: &[Exemption::Loss],
    },
    Scenario {
        name: "redis-failover-waiting",
        description: "either server dies, in step or not, and gateways wait for one replica",
        store: ScenarioStore::Failover { wait_replicas: 1 },
        layout: FleetLayout::Gateway,
        gateways: 3,
        action: ScenarioAction::Faults { process_faults: &[], network_faults: NO_NETWORK_FAULTS },
        exemptions: &[Exemption::Loss],
    },
    Scenario {
        name: "redis-cluster",
        description: "a Redis cluster: a primary dies, slots move; what a failover loses is measured, not excluded",
        store: ScenarioStore::Cluster,
        layout: FleetLayout::Gateway,
        gateways: 3,
        action: ScenarioAction::Faults { process_faults: KILL_AND_PAUSE, network_faults: NO_NETWORK_FAULTS },
        exemptions: &[Exemption::Loss],
    },
    Scenario {
        name: "ext-proc",
        description: "three Envoys that ask an ibid each, on one Redis: all are killed, paused and cut off",
        store: ScenarioStore::Redis,
        layout: FleetLayout::ExtProc,
        gateways: 3,
        action: ScenarioAction::Faults { process_faults: KILL_AND_PAUSE, network_faults: &NetworkFault::ALL },
        exemptions: &[],
    },
    Scenario {
        name: "exchange-api",
        description: "three apps that ask an ibid each by the exchange API, on one Redis: ibid and Redis are killed, paused and cut off",
        store: ScenarioStore::Redis,
        layout: FleetLayout::ExchangeApi,
        gateways: 3,
        action: ScenarioAction::Faults { process_faults: KILL_AND_PAUSE, network_faults: &NetworkFault::ALL },
        exemptions: &[],
    },
    Scenario {
        name: "crowd-embedded",
        description: "10,000 waiters for one key, one gateway",
        store: ScenarioStore::Embedded,
        layout: FleetLayout::Gateway,
        gateways: 1,
        action: WAITERS,
        exemptions: &[],
    },
    Scenario {
        name: "crowd-redis",
        description: "10,000 waiters for one key, two gateways on one Redis",
        store: ScenarioStore::Redis,
        layout: FleetLayout::Gateway,
        gateways: 2,
        action: WAITERS,
        exemptions: &[],
    },
    Scenario {
        name: "crowd-postgres",
        description: "10,000 waiters for one key, two gateways on one PostgreSQL",
        store: ScenarioStore::Postgres,
        layout: FleetLayout::Gateway,
        gateways: 2,
        action: WAITERS,
        exemptions: &[],
    },
    Scenario {
        name: "soak-embedded",
        description: "mixed traffic at a fixed rate, one gateway on its own disk: memory, files, store and p99 stay flat",
        store: ScenarioStore::Embedded,
        layout: FleetLayout::Gateway,
        gateways: 1,
        action: ScenarioAction::Soak,
        exemptions: &[],
    },
    Scenario {
        name: "soak-redis",
        description: "the same with one gateway on Redis",
        store: ScenarioStore::Redis,
        layout: FleetLayout::Gateway,
        gateways: 1,
        action: ScenarioAction::Soak,
        exemptions: &[],
    },
];

/// The scenario of that name.
///
/// # Errors
///
/// If there is none; says which there are.
pub fn find(name: &str) -> Result<&'static Scenario, String> {
    let names = || SCENARIOS.iter().map(|scenario| scenario.name).collect::<Vec<_>>().join(", ");
    SCENARIOS
        .iter()
        .find(|scenario| scenario.name == name)
        .ok_or_else(|| format!("there is no {name:?}; there is {}", names()))
}

/// How to run a scenario.
#[derive(Clone, Debug)]
pub struct ScenarioOptions<'a> {
    /// The gateway's binary.
    pub bin: &'a Path,
    /// How long the load lasts.
    pub length: Duration,
    /// Decides the faults.
    pub seed: u64,
    /// How many clients.
    pub clients: usize,
    /// How many operations all clients together begin in a second; as many as they can if not given.
    pub rate: Option<f64>,
    /// How many gateways, if not as the scenario says. A store that belongs to one gateway has one.
    pub gateways: Option<usize>,
    /// How many faults may be at work at once.
    pub concurrent_faults: usize,
    /// Whether what is beneath the gateways fails too. Only [inside](crate::sandbox::sandbox_command).
    pub sandboxed: bool,
    /// How many waiters in a crowd, if not as the scenario says.
    pub waiters: Option<usize>,
    /// What is excused beyond what the scenario excuses.
    pub exemptions: &'a [Exemption],
    /// The folder for the samples and curves of soaks.
    pub curves: Option<&'a Path>,
    /// The folder for the history, as `SCENARIO-SEED.jsonl`.
    pub histories: Option<&'a Path>,
}

impl<'a> ScenarioOptions<'a> {
    /// With this binary for so long; the seed is of the moment.
    pub fn new(bin: &'a Path, length: Duration) -> ScenarioOptions<'a> {
        let seed = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |now| now.as_micros() as u64);
        ScenarioOptions {
            bin,
            length,
            seed,
            clients: 12,
            rate: None,
            gateways: None,
            concurrent_faults: 2,
            sandboxed: false,
            waiters: None,
            exemptions: &[],
            curves: None,
            histories: None,
        }
    }
}

/// What came of it.
#[derive(Debug)]
pub enum ScenarioResult {
    /// Of load and faults.
    Faults(Box<ChaosReport>),
    /// Of waiters.
    Waiters(WaiterReport),
    /// Of a soak.
    Soak(SoakReport),
}

/// Requests per second of a soak, if not given.
const SOAK_RATE: f64 = 200.0;

/// Runs a scenario, prints what it shows, and returns what is wrong and not excused.
///
/// # Errors
///
/// If it cannot be run at all: then it shows nothing.
///
/// # Panics
///
/// If a process does not start, or does not come back.
pub async fn run_scenario(scenario: &Scenario, how: &ScenarioOptions<'_>) -> io::Result<(ScenarioResult, Vec<String>)> {
    let gateways = match scenario.store {
        ScenarioStore::Memory | ScenarioStore::Embedded => 1,
        _ => how.gateways.unwrap_or(scenario.gateways),
    };
    let backend = backend::start(scenario.store, how.bin).await.map_err(io::Error::other)?;
    let links: Vec<Vec<StoreProxy>> = (0..gateways).map(|nth| connect_gateway(&*backend, nth)).collect();
    let stores: Vec<String> = links.iter().map(|wired| backend.store(&|name| proxy_address(wired, name))).collect();
    match scenario.action {
        ScenarioAction::Faults { process_faults: blows, network_faults: tears } => {
            let sandbox = if how.sandboxed { Some(Arc::new(Sandbox::new()?)) } else { None };
            let name_servers = |store: &String| match &sandbox {
                Some(sandbox) => sandbox.with_names(store),
                None => store.clone(),
            };
            let configs = stores.iter().map(|store| config(&name_servers(store))).collect();
            let mut plan = ChaosPlan::new(scenario.name, how.bin, configs, how.seed, how.length);
            let history_name = format!("{}-{}.jsonl", scenario.name, how.seed);
            plan.history_file = how.histories.map(|folder| folder.join(history_name));
            (plan.clients, plan.rate, plan.layout) = (how.clients, how.rate, scenario.layout);
            plan.fault_rate.max_concurrent = how.concurrent_faults;
            plan.fault_rate.mean_interval = plan.fault_rate.mean_interval * 2 / how.concurrent_faults.max(1) as u32;
            plan.sandbox = sandbox.clone();
            let faults = |stage: &FaultTargets| {
                let mut faults = build_faults(stage, &*backend, &links, blows, tears);
                faults.extend(sandbox.iter().flat_map(|sandbox| sandbox_faults(sandbox, stage, &links)));
                faults
            };
            let outcome = run(&plan, faults).await?;
            println!("{outcome}");
            let allow: Vec<Exemption> = scenario.exemptions.iter().chain(how.exemptions).copied().collect();
            let complaints = outcome.failures(&allow);
            Ok((ScenarioResult::Faults(Box::new(outcome)), complaints))
        }
        ScenarioAction::Waiters { waiters, max_connections: most_open, max_round_trips_each: round_trips_each } => {
            let waiters = how.waiters.unwrap_or(waiters);
            let links = links.into_iter().flatten().map(|wired| (wired.name, wired.proxy)).collect();
            let waited =
                crowd::run_waiters(&WaiterPlan { bin: how.bin.to_owned(), stores, waiters, proxies: links }).await?;
            println!("{}: {waited}", scenario.name);
            let complaints = waited.complaints(most_open, round_trips_each * waiters as u64);
            Ok((ScenarioResult::Waiters(waited), complaints))
        }
        ScenarioAction::Soak => {
            let plan = SoakPlan {
                name: scenario.name,
                bin: how.bin,
                store: stores[0].clone(),
                length: how.length,
                clients: how.clients,
                rate: how.rate.unwrap_or(SOAK_RATE),
                seed: how.seed,
                curves: how.curves,
            };
            let report = run_soak(&plan, |folder| backend.bytes(folder)).await?;
            println!("{report}");
            let complaints = report.failures();
            Ok((ScenarioResult::Soak(report), complaints))
        }
    }
}

/// One gateway's way to one of the store's servers.
struct StoreProxy {
    name: String,
    server: String,
    proxy: Arc<FaultProxy>,
}

fn connect_gateway(backend: &dyn StoreBackend, gateway: usize) -> Vec<StoreProxy> {
    let wired = |server: backend::Server| StoreProxy {
        name: format!("gateway {gateway} to {}", server.process.name()),
        server: server.process.name(),
        proxy: Arc::new(FaultProxy::to(server.addr)),
    };
    backend.servers().into_iter().filter(|server| server.via_proxy).map(wired).collect()
}

fn proxy_address(wired: &[StoreProxy], server: &str) -> SocketAddr {
    let found = wired.iter().find(|wired| wired.server == server);
    found.unwrap_or_else(|| panic!("there is no link to a server called {server:?}")).proxy.addr()
}

/// A lease and time-outs short enough for pauses to outlast them. The store's own is shorter than a lease, so that a claim
/// that got no answer can be asked for again.
fn config(store: &str) -> String {
    // The last table of the configuration is the store's.
    let timeout = if store.contains("://") { "timeout = \"300ms\"" } else { "" };
    format!(
        "[log]\nlevel = \"warn\"\n[policy]\npreset = \"ietf\"\nlease = \"1s\"\ntimeout = \"2s\"\nwait_timeout = \"2s\"\n{store}\n{timeout}\n"
    )
}

/// An Envoy, as a process that breaks.
struct FrontEnvoy(usize, Arc<TestEnvoy>);

impl FrontEnvoy {
    fn act(&self, action: impl FnOnce(&TestEnvoy) + Send + 'static) -> FaultFuture<'_> {
        let envoy = Arc::clone(&self.1);
        Box::pin(backend::run_blocking(move || action(&envoy)))
    }
}

impl ServerProcess for FrontEnvoy {
    fn name(&self) -> String {
        format!("envoy {}", self.0)
    }

    fn kill(&self) -> FaultFuture<'_> {
        self.act(|envoy| envoy.kill())
    }

    fn restart(&self) -> FaultFuture<'_> {
        self.act(TestEnvoy::restart)
    }

    fn pause(&self) -> FaultFuture<'_> {
        self.act(|envoy| envoy.pause())
    }

    fn resume(&self) -> FaultFuture<'_> {
        self.act(|envoy| envoy.resume())
    }
}

fn build_faults(
    stage: &FaultTargets, backend: &dyn StoreBackend, links: &[Vec<StoreProxy>], blows: &[ProcessFault],
    tears: &[NetworkFault],
) -> Vec<Box<dyn ChaosFault>> {
    let mut faults = GatewayFault::all(&stage.fleet);
    for nth in 0..stage.fleet.len() {
        for tear in [NetworkFault::Reset, NetworkFault::BreakAnswers(5)] {
            faults.push(ProxyFault::to_gateway(&stage.fleet, nth, tear));
        }
    }
    for tear in [NetworkFault::Reset, NetworkFault::Refuse, NetworkFault::BreakAnswers(3)] {
        faults.push(ProxyFault::one("upstream", &stage.upstream, tear));
    }
    for (nth, link) in stage.fleet.front_proxies().iter().enumerate() {
        let name = format!("front {nth} to gateway {nth}");
        faults.extend(NetworkFault::ALL.map(|tear| ProxyFault::one(&name, link, tear)));
    }
    for (nth, envoy) in stage.fleet.envoys().into_iter().enumerate() {
        let envoy: Arc<dyn ServerProcess> = Arc::new(FrontEnvoy(nth, envoy));
        faults.extend(KILL_AND_PAUSE.iter().map(|blow| ServerFault::boxed(&envoy, *blow)));
    }
    for server in backend.servers() {
        faults.extend(blows.iter().map(|blow| ServerFault::boxed(&server.process, *blow)));
    }
    for wired in links.iter().flatten() {
        faults.extend(tears.iter().map(|tear| ProxyFault::one(&wired.name, &wired.proxy, *tear)));
    }
    // A server that all gateways lose at once, in the same way.
    for server in backend.servers().iter().filter(|server| server.via_proxy) {
        let name = server.process.name();
        let all: Vec<_> = links.iter().flatten().filter(|wired| wired.server == name).collect();
        let all: Vec<_> = all.iter().map(|wired| (wired.name.clone(), Arc::clone(&wired.proxy))).collect();
        let separating = tears.iter().filter(|tear| tear.isolates());
        faults.extend(separating.map(|tear| ProxyFault::many(&format!("all to {name}"), &all, *tear)));
    }
    faults.extend(backend.other_faults());
    faults
}

/// What fails beneath the gateways: packets on every link, and what else the sandbox has.
fn sandbox_faults(sandbox: &Arc<Sandbox>, stage: &FaultTargets, links: &[Vec<StoreProxy>]) -> Vec<Box<dyn ChaosFault>> {
    let mut faults = sandbox.faults(&stage.fleet);
    for tear in NetworkFault::PACKETS {
        faults.push(ProxyFault::one("upstream", &stage.upstream, tear));
        faults.extend((0..stage.fleet.len()).map(|nth| ProxyFault::to_gateway(&stage.fleet, nth, tear)));
        faults.extend(links.iter().flatten().map(|wired| ProxyFault::one(&wired.name, &wired.proxy, tear)));
    }
    faults
}
