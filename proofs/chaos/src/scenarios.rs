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

use ibid_testkit::servers::link::Link;

use self::backend::Backend;
use crate::{
    crowd::{self, Crowd, Waited},
    fault::{Blow, Fault, OfGateway, OfLink, OfProcess, Tear},
    judge::Outcome,
    report::Allow,
    run::{Plan, Stage, run},
};

pub mod backend;

/// The store of a scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "as the stores' names")]
pub enum Kind {
    Memory,
    Embedded,
    Redis,
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
pub enum What {
    /// Load, while these happen to the store's servers, and to each gateway's link to each of them.
    Faults {
        /// To the processes.
        blows: &'static [Blow],
        /// To the links.
        tears: &'static [Tear],
    },
    /// So many waiters for one key; at most so many connections per link, and round trips per waiter.
    Crowd {
        /// How many wait.
        waiters: usize,
        /// Connections from one gateway to one server, at once.
        most_open: usize,
        /// Round trips over one link, by waiter.
        round_trips_each: u64,
    },
}

/// One of them.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    /// By which it is asked for.
    pub name: &'static str,
    /// What it shows.
    pub about: &'static str,
    /// The store.
    pub store: Kind,
    /// How many gateways share it.
    pub gateways: usize,
    /// What is done.
    pub what: What,
    /// What is excused.
    pub allow: &'static [Allow],
}

const BOTH: &[Blow] = &[Blow::Kill, Blow::Pause];
const NO_TEARS: &[Tear] = &[];
const CROWD: What = What::Crowd { waiters: 10_000, most_open: 16, round_trips_each: 3 };

/// All scenarios.
pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "embedded",
        about: "one gateway on its own disk, killed and paused",
        store: Kind::Embedded,
        gateways: 1,
        what: What::Faults { blows: &[], tears: NO_TEARS },
        allow: &[],
    },
    Scenario {
        name: "redis",
        about: "three gateways, one Redis that syncs every write: killed, paused, cut off, its answers lost",
        store: Kind::Redis,
        gateways: 3,
        what: What::Faults { blows: BOTH, tears: &Tear::ALL },
        allow: &[],
    },
    Scenario {
        name: "redis-without-log",
        about: "a Redis that keeps nothing on disk: what it forgets when killed is measured, not excluded",
        store: Kind::RedisWithoutLog,
        gateways: 3,
        what: What::Faults { blows: &[Blow::Kill], tears: NO_TEARS },
        allow: &[Allow::Loss],
    },
    Scenario {
        name: "postgres",
        about: "three gateways, one PostgreSQL: killed, paused, cut off, its answers lost",
        store: Kind::Postgres,
        gateways: 3,
        what: What::Faults { blows: BOTH, tears: &Tear::ALL },
        allow: &[],
    },
    Scenario {
        name: "tiered-strict",
        about: "PostgreSQL with Redis as a cache; either is killed, paused, cut off from one gateway or all",
        store: Kind::TieredStrict,
        gateways: 3,
        what: What::Faults { blows: BOTH, tears: &Tear::ALL },
        allow: &[],
    },
    Scenario {
        name: "tiered-loose",
        about: "Redis with PostgreSQL behind it: runs twice only where an answer said degraded, or a gateway announced it",
        store: Kind::TieredLoose,
        gateways: 3,
        what: What::Faults { blows: BOTH, tears: &Tear::ALL },
        allow: &[Allow::IfDegraded, Allow::IfAnnounced, Allow::ForAWhile],
    },
    Scenario {
        name: "redis-sentinel",
        about: "a Redis that fails over to its replica: what that loses is measured, not excluded",
        store: Kind::Sentinel,
        gateways: 3,
        what: What::Faults { blows: BOTH, tears: NO_TEARS },
        allow: &[Allow::Loss],
    },
    Scenario {
        name: "redis-failover",
        about: "a Redis that dies while its replica is in step with it: what is lost is measured, not excluded",
        store: Kind::Failover { wait_replicas: 0 },
        gateways: 3,
        what: What::Faults { blows: &[], tears: NO_TEARS },
        allow: &[Allow::Loss],
    },
    Scenario {
        name: "redis-failover-waiting",
        about: "either server dies, in step or not, and gateways wait for one replica",
        store: Kind::Failover { wait_replicas: 1 },
        gateways: 3,
        what: What::Faults { blows: &[], tears: NO_TEARS },
        allow: &[Allow::Loss],
    },
    Scenario {
        name: "redis-cluster",
        about: "a Redis cluster: a primary dies, slots move; what a failover loses is measured, not excluded",
        store: Kind::Cluster,
        gateways: 3,
        what: What::Faults { blows: BOTH, tears: NO_TEARS },
        allow: &[Allow::Loss],
    },
    Scenario {
        name: "crowd-embedded",
        about: "10,000 waiters for one key, one gateway",
        store: Kind::Embedded,
        gateways: 1,
        what: CROWD,
        allow: &[],
    },
    Scenario {
        name: "crowd-redis",
        about: "10,000 waiters for one key, two gateways on one Redis",
        store: Kind::Redis,
        gateways: 2,
        what: CROWD,
        allow: &[],
    },
    Scenario {
        name: "crowd-postgres",
        about: "10,000 waiters for one key, two gateways on one PostgreSQL",
        store: Kind::Postgres,
        gateways: 2,
        what: CROWD,
        allow: &[],
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
pub struct How<'a> {
    /// The gateway's binary.
    pub bin: &'a Path,
    /// How long the load lasts.
    pub length: Duration,
    /// Decides the faults.
    pub seed: u64,
    /// How many clients.
    pub clients: usize,
    /// How many gateways, if not as the scenario says.
    pub gateways: Option<usize>,
    /// How many waiters in a crowd, if not as the scenario says.
    pub waiters: Option<usize>,
    /// What is excused beyond what the scenario excuses.
    pub allow: &'a [Allow],
}

impl<'a> How<'a> {
    /// With this binary for so long; the seed is of the moment.
    pub fn new(bin: &'a Path, length: Duration) -> How<'a> {
        let seed = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |now| now.as_micros() as u64);
        How { bin, length, seed, clients: 12, gateways: None, waiters: None, allow: &[] }
    }
}

/// What came of it.
#[derive(Debug)]
pub enum Shown {
    /// Of load and faults.
    Faults(Box<Outcome>),
    /// Of waiters.
    Crowd(Waited),
}

/// Runs a scenario, prints what it shows, and returns what is wrong and not excused.
///
/// # Errors
///
/// If it cannot be run at all: then it shows nothing.
///
/// # Panics
///
/// If a process does not start, or does not come back.
pub async fn play(scenario: &Scenario, how: &How<'_>) -> io::Result<(Shown, Vec<String>)> {
    let gateways = how.gateways.unwrap_or(scenario.gateways);
    if gateways > 1 && matches!(scenario.store, Kind::Memory | Kind::Embedded) {
        return Err(io::Error::other(format!(
            "{}: its store belongs to one gateway, not to {gateways}",
            scenario.name
        )));
    }
    let backend = backend::start(scenario.store, how.bin).await.map_err(io::Error::other)?;
    let links: Vec<Vec<Wired>> = (0..gateways).map(|nth| wire(&*backend, nth)).collect();
    let stores: Vec<String> = links.iter().map(|wired| backend.store(&|name| address(wired, name))).collect();
    match scenario.what {
        What::Faults { blows, tears } => {
            let configs = stores.iter().map(|store| config(store)).collect();
            let mut plan = Plan::new(scenario.name, how.bin, configs, how.seed, how.length);
            plan.clients = how.clients;
            let faults = |stage: &Stage| all_faults(stage, &*backend, &links, blows, tears);
            let outcome = run(&plan, faults).await?;
            println!("{outcome}");
            let allow: Vec<Allow> = scenario.allow.iter().chain(how.allow).copied().collect();
            let complaints = outcome.complaints(&allow);
            Ok((Shown::Faults(Box::new(outcome)), complaints))
        }
        What::Crowd { waiters, most_open, round_trips_each } => {
            let waiters = how.waiters.unwrap_or(waiters);
            let links = links.into_iter().flatten().map(|wired| (wired.name, wired.link)).collect();
            let waited = crowd::wait(&Crowd { bin: how.bin.to_owned(), stores, waiters, links }).await?;
            println!("{}: {waited}", scenario.name);
            let complaints = waited.complaints(most_open, round_trips_each * waiters as u64);
            Ok((Shown::Crowd(waited), complaints))
        }
    }
}

/// One gateway's way to one of the store's servers.
struct Wired {
    name: String,
    server: String,
    link: Arc<Link>,
}

fn wire(backend: &dyn Backend, gateway: usize) -> Vec<Wired> {
    let wired = |server: backend::Server| Wired {
        name: format!("gateway {gateway} to {}", server.process.name()),
        server: server.process.name(),
        link: Arc::new(Link::to(server.addr)),
    };
    backend.servers().into_iter().filter(|server| server.linked).map(wired).collect()
}

fn address(wired: &[Wired], server: &str) -> SocketAddr {
    let found = wired.iter().find(|wired| wired.server == server);
    found.unwrap_or_else(|| panic!("there is no link to a server called {server:?}")).link.addr()
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

fn all_faults(
    stage: &Stage, backend: &dyn Backend, links: &[Vec<Wired>], blows: &[Blow], tears: &[Tear],
) -> Vec<Box<dyn Fault>> {
    let mut faults = OfGateway::all(&stage.fleet);
    for nth in 0..stage.fleet.len() {
        for tear in [Tear::Reset, Tear::BreakAnswers(5)] {
            faults.push(OfLink::to_gateway(&stage.fleet, nth, tear));
        }
    }
    for tear in [Tear::Reset, Tear::Refuse, Tear::BreakAnswers(3)] {
        faults.push(OfLink::one("upstream", &stage.upstream, tear));
    }
    for server in backend.servers() {
        faults.extend(blows.iter().map(|blow| OfProcess::by(&server.process, *blow)));
    }
    for wired in links.iter().flatten() {
        faults.extend(tears.iter().map(|tear| OfLink::one(&wired.name, &wired.link, *tear)));
    }
    // A server that all gateways lose at once, in the same way.
    for server in backend.servers().iter().filter(|server| server.linked) {
        let name = server.process.name();
        let all: Vec<_> = links.iter().flatten().filter(|wired| wired.server == name).collect();
        let all: Vec<_> = all.iter().map(|wired| (wired.name.clone(), Arc::clone(&wired.link))).collect();
        let separating = tears.iter().filter(|tear| tear.separates());
        faults.extend(separating.map(|tear| OfLink::many(&format!("all to {name}"), &all, *tear)));
    }
    faults.extend(backend.others());
    faults
}
