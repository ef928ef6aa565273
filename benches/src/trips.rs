//! How often a store's servers are asked per operation, counted on the wire.
//!
//! First of the stores alone, operation by operation; then of whole gateways, request by request. Each count is the median
//! of several, one operation at a time: what goes on beside it (a ping, a generation read every few seconds) hits few.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use ibid::{
    Silent,
    store::{Claim, Held, Lease, Store},
};
use ibid_stores::{Layout, Parts};
use ibid_testkit::servers::link::Link;
use tokio::time::{Instant, sleep};

use crate::{
    args::Args,
    child::Server,
    limits::{address, ask, completed},
    load::{Keys, Load, Plan, Protocol, Stop},
    rows::Program,
    runner::start,
    stores::{Backing, Database, PATIENCE, Stores},
};

/// How many of each operation are counted.
const TIMES: u64 = 15;

/// Round trips to Redis, and to PostgreSQL.
pub type Counts = [u64; 2];

/// Round trips of one operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trips {
    /// Of what: a store or a gateway, and on which servers.
    pub on: &'static str,
    /// The operation.
    pub operation: &'static str,
    /// How many there were.
    pub counted: Counts,
    /// How many there should be.
    pub due: Counts,
}

impl Trips {
    /// Whether there were as many as there should be.
    #[must_use]
    pub fn are_as_due(&self) -> bool {
        self.counted == self.due
    }
}

/// What is printed of them.
#[must_use]
pub fn table(trips: &[Trips]) -> String {
    let mut table = String::from("Round trips per operation, counted on the wire\n\n");
    table += "| on | operation | Redis | PostgreSQL | due | verdict |\n|---|---|---|---|---|---|\n";
    for of_one in trips {
        let Trips { on, operation, counted: [redis, postgres], due: [redis_due, postgres_due] } = of_one;
        let verdict = if of_one.are_as_due() { "met" } else { "WRONG" };
        table += &format!("| {on} | {operation} | {redis} | {postgres} | {redis_due} + {postgres_due} | {verdict} |\n");
    }
    table
}

/// Servers with a link in front of each.
struct Wired<'a> {
    backing: Backing<'a>,
    redis: Option<Link>,
    postgres: Option<Link>,
}

impl<'a> Wired<'a> {
    fn start(stores: Stores, database: &'a Database) -> Result<Self, String> {
        let backing = Backing::start(stores, Some(database))?;
        let link = |port: u16| Link::to(SocketAddr::from(([127, 0, 0, 1], port)));
        let redis = backing.redis().ok().map(|server| link(server.port()));
        let postgres = backing.database().ok().map(|database| link(database.port()));
        Ok(Self { backing, redis, postgres })
    }

    fn ports(&self) -> [Option<u16>; 2] {
        [&self.redis, &self.postgres].map(|link| link.as_ref().map(|link| link.addr().port()))
    }

    fn counts(&self) -> Counts {
        [&self.redis, &self.postgres].map(|link| link.as_ref().map_or(0, |link| link.counts().round_trips))
    }

    fn since(&self, before: Counts) -> Counts {
        let now = self.counts();
        [now[0] - before[0], now[1] - before[1]]
    }

    /// Waits until what a store does when it is opened is over: it subscribes, connects, prepares.
    async fn is_quiet(&self) -> Result<(), String> {
        let until = Instant::now() + PATIENCE;
        let (mut last, mut unchanged) = (self.counts(), 0);
        while unchanged < 10 {
            if Instant::now() > until {
                return Err(format!("a store with nothing to do is not quiet after {PATIENCE:?}"));
            }
            sleep(Duration::from_millis(20)).await;
            let now = self.counts();
            unchanged = if now == last { unchanged + 1 } else { 0 };
            last = now;
        }
        Ok(())
    }

    async fn open(&self, stores: Stores) -> Result<Arc<dyn Store>, String> {
        let [redis, postgres] = self.ports();
        let (url, cache) = self.backing.urls_through(redis, postgres)?;
        let named = |url: String| url.parse().map_err(|why| format!("{url}: {why}"));
        let parts = Parts {
            url: named(url)?,
            fallback: None,
            cache: cache.map(named).transpose()?,
            prefix: "idempotency".into(),
            timeout: PATIENCE,
            wait_replicas: 0,
            near: Some(stores.near()),
        };
        Ok(Layout::new(parts).map_err(|why| why.to_string())?.open(Arc::new(Silent)).await?.store)
    }
}

/// Counts of the operations of stores.
///
/// # Errors
/// If a server cannot be started, or an operation fails.
pub async fn of_stores() -> Result<Vec<Trips>, String> {
    let database = Database::start().await?;
    let mut all = Vec::new();
    for (stores, on, due) in [
        (Stores::Redis, "store, Redis", [[1, 0], [1, 0], [0, 0], [1, 0]]),
        (Stores::RedisNear, "store, Redis with near copies", [[1, 0], [1, 0], [0, 0], [0, 0]]),
        (Stores::Postgres, "store, PostgreSQL", [[0, 1], [0, 1], [0, 0], [0, 1]]),
        (Stores::Tiered, "store, PostgreSQL with Redis in front", [[1, 1], [0, 1], [1, 0], [1, 0]]),
    ] {
        let wired = Wired::start(stores, &database)?;
        let store = wired.open(stores).await?;
        wired.is_quiet().await?;
        let mut counted = Vec::new();
        for n in 0..TIMES {
            counted.push(one_life(&wired, &*store, n, due[2]).await?);
        }
        let operations = ["claim", "complete, before it is answered", "complete, behind the answer", "replay"];
        for (nth, operation) in operations.into_iter().enumerate() {
            let counted = median(counted.iter().map(|life| life[nth]));
            all.push(Trips { on, operation, counted, due: due[nth] });
        }
    }
    Ok(all)
}

/// Claims, completes and asks again; what follows the completion is waited for, if something is to follow.
async fn one_life(wired: &Wired<'_>, store: &dyn Store, n: u64, behind: Counts) -> Result<[Counts; 4], String> {
    let mut before = wired.counts();
    let lease = granted(store, n).await?;
    let claim = wired.since(before);
    before = wired.counts();
    match store.settle(&lease, &completed()).await {
        Ok(Held::Held) => {}
        other => return Err(format!("a holder that completes was answered with {other:?}")),
    }
    // Nothing else has run on this thread since the answer: what follows it has not been sent yet.
    let complete = wired.since(before);
    before = wired.counts();
    let until = Instant::now() + PATIENCE;
    while wired.since(before)[0] < behind[0] {
        if Instant::now() > until {
            return Err(format!("nothing followed a completion within {PATIENCE:?}"));
        }
        sleep(Duration::from_millis(1)).await;
    }
    // Whatever else there might be has this long to show itself.
    sleep(Duration::from_millis(5)).await;
    let followed = wired.since(before);
    before = wired.counts();
    match store.claim(&ask(address(n))).await {
        Ok(Claim::Done(_)) => Ok([claim, complete, followed, wired.since(before)]),
        other => Err(format!("a finished address was answered with {other:?}")),
    }
}

async fn granted(store: &dyn Store, n: u64) -> Result<Lease, String> {
    match store.claim(&ask(address(n))).await {
        Ok(Claim::Granted(lease)) => Ok(lease),
        other => Err(format!("a claim of a new address was not granted: {other:?}")),
    }
}

/// Counts of the requests of gateways.
///
/// # Errors
/// If a server cannot be started, or a request fails.
pub async fn of_gateways(args: &Args) -> Result<Vec<Trips>, String> {
    let database = Database::start().await?;
    let app = start(args, Program::Upstream, None, None).await?;
    let mut all = Vec::new();
    for (stores, on, keys, due) in [
        (Stores::Redis, "gateway, Redis", Keys::Unique, [2, 0]),
        (Stores::Redis, "gateway, Redis", Keys::Fixed(1), [1, 0]),
        (Stores::RedisNear, "gateway, Redis with near copies", Keys::Fixed(1), [0, 0]),
        (Stores::Postgres, "gateway, PostgreSQL", Keys::Unique, [0, 2]),
        (Stores::Postgres, "gateway, PostgreSQL", Keys::Fixed(1), [0, 1]),
        // A first request's copy goes to Redis behind the answer, or beside the next: only a replay can be told exactly.
        (Stores::Tiered, "gateway, PostgreSQL with Redis in front", Keys::Fixed(1), [1, 0]),
    ] {
        let wired = Wired::start(stores, &database)?;
        let [redis, postgres] = wired.ports();
        let config = wired.backing.config_through(redis, postgres)?;
        let gateway = start(args, Program::IbidOn(stores), Some(app.addr()), Some(config)).await?;
        let counted = of_requests(&wired, &gateway, keys).await?;
        let operation = if keys == Keys::Unique { "first request" } else { "replay" };
        all.push(Trips { on, operation, counted, due });
    }
    Ok(all)
}

async fn of_requests(wired: &Wired<'_>, gateway: &Server, keys: Keys) -> Result<Counts, String> {
    let plan = Plan {
        addr: gateway.addr(),
        protocol: Protocol::Http1,
        path: "/orders".into(),
        body_bytes: 300,
        connections: 1,
        namespace: 1,
        keys,
    };
    let failed = |error: std::io::Error| error.to_string();
    let mut load = Load::connect(&plan).await.map_err(failed)?;
    if let Some(problem) = load.warm_up().await.map_err(failed)? {
        return Err(problem);
    }
    // What two stores do behind the answers too.
    wired.is_quiet().await?;
    let mut counted = Vec::new();
    for _ in 0..TIMES {
        let before = wired.counts();
        let run = load.run(Stop::Requests(1), gateway.pid()).await.map_err(failed)?;
        counted.push(wired.since(before));
        if let Some(problem) = run.problem {
            return Err(problem);
        }
    }
    Ok(median(counted.into_iter()))
}

/// Of each server's counts.
fn median(counts: impl Iterator<Item = Counts> + Clone) -> Counts {
    [0, 1].map(|server| {
        let mut counts: Vec<u64> = counts.clone().map(|counts| counts[server]).collect();
        counts.sort_unstable();
        counts.get(counts.len() / 2).copied().unwrap_or(0)
    })
}
