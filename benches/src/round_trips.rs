//! How often a store's servers are asked per operation, counted on the wire.
//!
//! First of the stores alone, operation by operation; then of whole gateways, request by request. Each count is the median
//! of several, one operation at a time: what goes on beside it (a ping, a generation read every few seconds) hits few.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use ibid::{
    observe::NoopObserver,
    store::{ClaimOutcome, Lease, SettleOutcome, Store},
};
use ibid_stores::{StoreConfig, StoreOptions};
use testbed::FaultProxy;
use tokio::time::{Instant, sleep};

use crate::{
    args::BenchArgs,
    load::{LoadGenerator, LoadKeys, LoadPlan, LoadProtocol, StopCondition},
    rows::ContenderProgram,
    runner::start_server,
    server_child::ServerChild,
    store_limits::{address, claim_request, completed_settlement},
    stores::{BenchDatabase, STORE_CALL_TIMEOUT, SharedStores, StoreServers},
};

/// How many of each operation are counted.
const OPERATIONS_COUNTED: u64 = 15;

/// Round trips to Redis, and to PostgreSQL.
pub type TripCounts = [u64; 2];

/// Round trips of one operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoundTrips {
    /// Of what: a store or a gateway, and on which servers.
    pub subject: &'static str,
    /// The operation.
    pub operation: &'static str,
    /// How many there were.
    pub counted: TripCounts,
    /// How many there should be.
    pub expected: TripCounts,
}

impl RoundTrips {
    /// Whether there were as many as there should be.
    #[must_use]
    pub fn are_as_expected(&self) -> bool {
        self.counted == self.expected
    }
}

/// What is printed of them.
#[must_use]
pub fn table(trips: &[RoundTrips]) -> String {
    let mut table = String::from("Round trips per operation, counted on the wire\n\n");
    table += "| on | operation | Redis | PostgreSQL | due | verdict |\n|---|---|---|---|---|---|\n";
    for of_one in trips {
        let RoundTrips { subject: on, operation, counted: [redis, postgres], expected: [redis_due, postgres_due] } =
            of_one;
        let verdict = if of_one.are_as_expected() { "met" } else { "WRONG" };
        table += &format!("| {on} | {operation} | {redis} | {postgres} | {redis_due} + {postgres_due} | {verdict} |\n");
    }
    table
}

/// Servers with a link in front of each.
struct ProxiedServers<'a> {
    backing: StoreServers<'a>,
    redis: Option<FaultProxy>,
    postgres: Option<FaultProxy>,
}

impl<'a> ProxiedServers<'a> {
    fn start(stores: SharedStores, database: &'a BenchDatabase) -> Result<Self, String> {
        let backing = StoreServers::start(stores, Some(database))?;
        let link = |port: u16| FaultProxy::to(SocketAddr::from(([127, 0, 0, 1], port)));
        let redis = backing.redis().ok().map(|server| link(server.port()));
        let postgres = backing.database().ok().map(|database| link(database.port()));
        Ok(Self { backing, redis, postgres })
    }

    fn ports(&self) -> [Option<u16>; 2] {
        [&self.redis, &self.postgres].map(|link| link.as_ref().map(|link| link.addr().port()))
    }

    fn counts(&self) -> TripCounts {
        [&self.redis, &self.postgres].map(|link| link.as_ref().map_or(0, |link| link.counts().round_trips))
    }

    fn since(&self, before: TripCounts) -> TripCounts {
        let now = self.counts();
        [now[0] - before[0], now[1] - before[1]]
    }

    /// Waits until what a store does when it is opened is over: it subscribes, connects, prepares.
    async fn wait_until_quiet(&self) -> Result<(), String> {
        let until = Instant::now() + STORE_CALL_TIMEOUT;
        let (mut last, mut unchanged) = (self.counts(), 0);
        while unchanged < 10 {
            if Instant::now() > until {
                return Err(format!("a store with nothing to do is not quiet after {STORE_CALL_TIMEOUT:?}"));
            }
            sleep(Duration::from_millis(20)).await;
            let now = self.counts();
            unchanged = if now == last { unchanged + 1 } else { 0 };
            last = now;
        }
        Ok(())
    }

    async fn open(&self, stores: SharedStores) -> Result<Arc<dyn Store>, String> {
        let [redis, postgres] = self.ports();
        let (url, cache) = self.backing.urls_through(redis, postgres)?;
        let named = |url: String| url.parse().map_err(|why| format!("{url}: {why}"));
        let parts = StoreOptions {
            url: named(url)?,
            fallback: None,
            cache: cache.map(named).transpose()?,
            prefix: "idempotency".into(),
            timeout: STORE_CALL_TIMEOUT,
            wait_replicas: 0,
            local_cache: Some(stores.local_cache_bytes()),
        };
        Ok(StoreConfig::new(parts).map_err(|why| why.to_string())?.open(Arc::new(NoopObserver)).await?.store)
    }
}

/// Counts of the operations of stores.
///
/// # Errors
/// If a server cannot be started, or an operation fails.
pub async fn count_store_trips() -> Result<Vec<RoundTrips>, String> {
    let database = BenchDatabase::start().await?;
    let mut all = Vec::new();
    for (stores, on, due) in [
        (SharedStores::Redis, "store, Redis", [[1, 0], [1, 0], [0, 0], [1, 0]]),
        (SharedStores::RedisLocalCache, "store, Redis with near copies", [[1, 0], [1, 0], [0, 0], [0, 0]]),
        (SharedStores::Postgres, "store, PostgreSQL", [[0, 1], [0, 1], [0, 0], [0, 1]]),
        (SharedStores::Tiered, "store, PostgreSQL with Redis in front", [[1, 1], [0, 1], [1, 0], [1, 0]]),
    ] {
        let wired = ProxiedServers::start(stores, &database)?;
        let store = wired.open(stores).await?;
        wired.wait_until_quiet().await?;
        let mut counted = Vec::new();
        for n in 0..OPERATIONS_COUNTED {
            counted.push(count_lifecycle(&wired, &*store, n, due[2]).await?);
        }
        let operations = ["claim", "complete, before it is answered", "complete, behind the answer", "replay"];
        for (nth, operation) in operations.into_iter().enumerate() {
            let counted = median(counted.iter().map(|life| life[nth]));
            all.push(RoundTrips { subject: on, operation, counted, expected: due[nth] });
        }
    }
    Ok(all)
}

/// Claims, completes and asks again; what follows the completion is waited for, if something is to follow.
async fn count_lifecycle(
    wired: &ProxiedServers<'_>, store: &dyn Store, n: u64, behind: TripCounts,
) -> Result<[TripCounts; 4], String> {
    let mut before = wired.counts();
    let lease = granted(store, n).await?;
    let claim = wired.since(before);
    before = wired.counts();
    match store.settle(&lease, &completed_settlement()).await {
        Ok(SettleOutcome::Applied) => {}
        other => return Err(format!("a holder that completes was answered with {other:?}")),
    }
    // Nothing else has run on this thread since the answer: what follows it has not been sent yet.
    let complete = wired.since(before);
    before = wired.counts();
    let until = Instant::now() + STORE_CALL_TIMEOUT;
    while wired.since(before)[0] < behind[0] {
        if Instant::now() > until {
            return Err(format!("nothing followed a completion within {STORE_CALL_TIMEOUT:?}"));
        }
        sleep(Duration::from_millis(1)).await;
    }
    // Whatever else there might be has this long to show itself.
    sleep(Duration::from_millis(5)).await;
    let followed = wired.since(before);
    before = wired.counts();
    match store.claim(&claim_request(address(n))).await {
        Ok(ClaimOutcome::Completed(_)) => Ok([claim, complete, followed, wired.since(before)]),
        other => Err(format!("a finished address was answered with {other:?}")),
    }
}

async fn granted(store: &dyn Store, n: u64) -> Result<Lease, String> {
    match store.claim(&claim_request(address(n))).await {
        Ok(ClaimOutcome::Granted(lease)) => Ok(lease),
        other => Err(format!("a claim of a new address was not granted: {other:?}")),
    }
}

/// Counts of the requests of gateways.
///
/// # Errors
/// If a server cannot be started, or a request fails.
pub async fn count_gateway_trips(args: &BenchArgs) -> Result<Vec<RoundTrips>, String> {
    let database = BenchDatabase::start().await?;
    let app = start_server(args, ContenderProgram::Upstream, None, None).await?;
    let mut all = Vec::new();
    for (stores, on, keys, due) in [
        (SharedStores::Redis, "gateway, Redis", LoadKeys::Unique, [2, 0]),
        (SharedStores::Redis, "gateway, Redis", LoadKeys::Fixed(1), [1, 0]),
        (SharedStores::RedisLocalCache, "gateway, Redis with near copies", LoadKeys::Fixed(1), [0, 0]),
        (SharedStores::Postgres, "gateway, PostgreSQL", LoadKeys::Unique, [0, 2]),
        (SharedStores::Postgres, "gateway, PostgreSQL", LoadKeys::Fixed(1), [0, 1]),
        // A first request's copy goes to Redis behind the answer, or beside the next: only a replay can be told exactly.
        (SharedStores::Tiered, "gateway, PostgreSQL with Redis in front", LoadKeys::Fixed(1), [1, 0]),
    ] {
        let wired = ProxiedServers::start(stores, &database)?;
        let [redis, postgres] = wired.ports();
        let config = wired.backing.config_through(redis, postgres)?;
        let gateway = start_server(args, ContenderProgram::IbidOn(stores), Some(app.addr()), Some(config)).await?;
        let counted = count_request_trips(&wired, &gateway, keys).await?;
        let operation = if keys == LoadKeys::Unique { "first request" } else { "replay" };
        all.push(RoundTrips { subject: on, operation, counted, expected: due });
    }
    Ok(all)
}

async fn count_request_trips(
    wired: &ProxiedServers<'_>, gateway: &ServerChild, keys: LoadKeys,
) -> Result<TripCounts, String> {
    let plan = LoadPlan {
        addr: gateway.addr(),
        protocol: LoadProtocol::Http1,
        path: "/orders".into(),
        body_bytes: 300,
        connections: 1,
        namespace: 1,
        keys,
        api: None,
    };
    let failed = |error: std::io::Error| error.to_string();
    let mut load = LoadGenerator::connect(&plan).await.map_err(failed)?;
    if let Some(problem) = load.warm_up().await.map_err(failed)? {
        return Err(problem);
    }
    // What two stores do behind the answers too.
    wired.wait_until_quiet().await?;
    let mut counted = Vec::new();
    for _ in 0..OPERATIONS_COUNTED {
        let before = wired.counts();
        let run = load.run(StopCondition::Requests(1), gateway.pid()).await.map_err(failed)?;
        counted.push(wired.since(before));
        if let Some(problem) = run.problem {
            return Err(problem);
        }
    }
    Ok(median(counted.into_iter()))
}

/// Of each server's counts.
fn median(counts: impl Iterator<Item = TripCounts> + Clone) -> TripCounts {
    [0, 1].map(|server| {
        let mut counts: Vec<u64> = counts.clone().map(|counts| counts[server]).collect();
        counts.sort_unstable();
        counts.get(counts.len() / 2).copied().unwrap_or(0)
    })
}
