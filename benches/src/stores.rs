//! The servers behind the rows of shared stores: private ones, which are gone with the run.
//!
//! | | how it runs |
//! |---|---|
//! | Redis | a fresh server for every run, as it is shipped but without snapshots: nothing is written to disk. Those are the terms of the targets. Two rows show what its log costs, written every second and before every answer |
//! | Valkey | the same, with the server that `scripts/tools` installs |
//! | Sentinel | the same, with a replica and three sentinels |
//! | Cluster | the same, as three primaries with a replica each. All six share the cores, so this shows what a cluster costs, not how it scales |
//! | PostgreSQL | one server for all runs, as it is shipped (synchronous commit) but for 128 MiB of shared buffers and small WAL segments; emptied, with a checkpoint, before every run |
//!
//! Invariant: no server outlives this process, however that ends.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use ibid_stores::postgres::{MigrateAction, migrate};
use testbed::{RedisCluster, RedisOptions, RedisSentinels, TestPostgres, TestRedis};

use crate::cpu;

/// Every call may take so long: a machine that is slow for a moment is to be measured as that, not as a failure.
pub const STORE_CALL_TIMEOUT: Duration = Duration::from_secs(10);

const POSTGRES_BIN: &str = "/usr/lib/postgresql/15/bin";

/// Which stores a gateway, or a caller of a store, works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharedStores {
    /// A Redis that writes nothing to disk, as it is shipped.
    Redis,
    /// The same, with finished answers kept in the gateway.
    RedisLocalCache,
    /// A Valkey that writes nothing to disk; otherwise as it is shipped.
    Valkey,
    /// As [`SharedStores::Redis`], with a replica, found by way of sentinels.
    Sentinel,
    /// As [`SharedStores::Redis`], as a cluster of three primaries with a replica each.
    Cluster,
    /// A Redis that syncs its log every second.
    RedisEverySecond,
    /// A Redis that syncs its log before it answers.
    RedisAlways,
    /// A PostgreSQL.
    Postgres,
    /// A PostgreSQL that decides, with a Redis as in [`SharedStores::Redis`] in front of it.
    Tiered,
}

impl SharedStores {
    /// What its Redis is told, if it has one.
    fn redis(self) -> Option<&'static [&'static str]> {
        match self {
            Self::Redis | Self::RedisLocalCache | Self::Valkey | Self::Sentinel | Self::Cluster | Self::Tiered => {
                Some(&["appendonly no"])
            }
            Self::RedisEverySecond => Some(&["appendonly yes", "appendfsync everysec"]),
            Self::RedisAlways => Some(&["appendonly yes", "appendfsync always"]),
            Self::Postgres => None,
        }
    }

    /// Whether it needs a PostgreSQL.
    #[must_use]
    pub fn has_postgres(self) -> bool {
        matches!(self, Self::Postgres | Self::Tiered)
    }

    /// How many bytes of finished answers are kept in the gateway.
    #[must_use]
    pub fn local_cache_bytes(self) -> u64 {
        if self == Self::RedisLocalCache { 64 << 20 } else { 0 }
    }

    /// What it takes, by path or name, with the Debian package that has it.
    pub fn programs(self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let redis = self.redis().map(|_| [("redis-server", "redis-server"), ("redis-cli", "redis-tools")]);
        let postgres = self.has_postgres().then_some([("postgres", "postgresql-15"), ("psql", "postgresql-15")]);
        redis.into_iter().chain(postgres).flatten()
    }
}

/// Where a program of the distribution is, if it is installed.
#[must_use]
pub fn installed_path(program: &str) -> Option<PathBuf> {
    let folders = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin", POSTGRES_BIN];
    folders.iter().map(|folder| Path::new(folder).join(program)).find(|path| path.is_file())
}

/// Where a program of PostgreSQL is.
#[must_use]
pub fn postgres_program(name: &str) -> String {
    format!("{POSTGRES_BIN}/{name}")
}

/// A PostgreSQL with the store's schema in it.
#[derive(Debug)]
pub struct BenchDatabase {
    server: TestPostgres,
    name: String,
    pid: u32,
}

impl BenchDatabase {
    /// Starts it.
    ///
    /// # Errors
    /// Why the schema cannot be made.
    pub async fn start() -> Result<Self, String> {
        let server = TestPostgres::start_with(&["shared_buffers=128MB", "track_activity_query_size=16kB"]);
        let name = server.create_database();
        migrate(&server.url("migrator", &name), MigrateAction::Up).await.map_err(|why| format!("the schema: {why}"))?;
        let pid = server.sql("postgres", "SELECT split_part(pg_read_file('postmaster.pid'), E'\\n', 1)");
        let pid = pid.parse().map_err(|_| format!("postmaster.pid says {pid:?}"))?;
        Ok(Self { server, name, pid })
    }

    /// Where it listens on 127.0.0.1.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.server.port()
    }

    /// Its name on the server.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How the store reaches it, through this port.
    #[must_use]
    pub fn url(&self, port: u16) -> String {
        format!("postgres://gateway@127.0.0.1:{port}/{}", self.name)
    }

    /// What superusers are told.
    #[must_use]
    pub fn sql(&self, sql: &str) -> String {
        self.server.sql(&self.name, sql)
    }

    /// How many entries there are.
    ///
    /// # Errors
    /// If that is no number.
    pub fn entries(&self) -> Result<u64, String> {
        let count = self.sql("SELECT count(*) FROM ibid.idempotency_keys");
        count.parse().map_err(|_| format!("the number of entries is {count:?}"))
    }

    /// What it has done so far.
    ///
    /// # Errors
    /// If it does not tell.
    pub fn figures(&self) -> Result<DatabaseFigures, String> {
        let sql = "SELECT pg_current_wal_insert_lsn() - '0/0', n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables \
            WHERE relname = 'idempotency_keys'";
        let told = self.sql(sql);
        let numbers: Vec<u64> = told.split('|').filter_map(|number| number.parse().ok()).collect();
        let cpu = cpu::family_cpu_time(self.pid).map_err(|error| error.to_string())?;
        match numbers[..] {
            [wal_bytes, updates, hot_updates] => Ok(DatabaseFigures { cpu, wal_bytes, updates, hot_updates }),
            _ => Err(format!("the server tells {told:?} of its table")),
        }
    }

    /// Forgets all entries, and writes what earlier runs left to write.
    fn clear(&self) {
        let _ = self.sql("TRUNCATE ibid.idempotency_keys, ibid.unfinished_keys");
        let _ = self.sql("CHECKPOINT");
    }
}

/// What a PostgreSQL has done: counts that a loaded machine does not change.
#[derive(Clone, Copy, Debug)]
pub struct DatabaseFigures {
    cpu: Duration,
    wal_bytes: u64,
    updates: u64,
    hot_updates: u64,
}

impl DatabaseFigures {
    /// What it did for each of so many requests since `before`. The share of heap-only updates, which touch no index, is that
    /// of all updates so far: the server counts them late.
    #[must_use]
    pub fn per_request(&self, before: &Self, requests: u64) -> String {
        let each = |total: f64| total / requests.max(1) as f64;
        let cpu = each(self.cpu.saturating_sub(before.cpu).as_secs_f64() * 1e6);
        let wal = each(self.wal_bytes.saturating_sub(before.wal_bytes) as f64);
        let hot = self.hot_updates as f64 / self.updates.max(1) as f64 * 100.0;
        format!("PostgreSQL per request: CPU {cpu:.1} µs, WAL {wal:.0} bytes; {hot:.1} % of updates heap-only")
    }
}

/// The servers of one run.
#[derive(Debug)]
pub struct StoreServers<'a> {
    stores: SharedStores,
    redis: Option<RedisServers>,
    database: Option<&'a BenchDatabase>,
}

/// The Redis servers of one run.
#[derive(Debug)]
struct RedisServers {
    layout: RedisLayout,
    pids: Vec<u32>,
}

#[derive(Debug)]
enum RedisLayout {
    Single(TestRedis),
    Sentinels(RedisSentinels),
    Cluster(RedisCluster),
}

impl RedisServers {
    fn start(stores: SharedStores, config: &[&str]) -> Result<Self, String> {
        let layout = match stores {
            SharedStores::Sentinel => RedisLayout::Sentinels(RedisSentinels::start()),
            SharedStores::Cluster => RedisLayout::Cluster(RedisCluster::start()),
            _ => {
                let config = config.iter().map(|line| (*line).to_owned()).collect();
                let valkey = stores == SharedStores::Valkey;
                RedisLayout::Single(TestRedis::start_with(RedisOptions { config, valkey, ..RedisOptions::default() }))
            }
        };
        let mut pids = Vec::new();
        for server in layout.data_servers() {
            // A replica or a node of a cluster is started with a log.
            if config == ["appendonly no"] {
                server.cli(&["CONFIG", "SET", "appendonly", "no"]);
            }
            let pid = server.info("process_id");
            pids.push(pid.trim().parse().map_err(|_| format!("INFO says process_id:{pid}"))?);
        }
        Ok(Self { layout, pids })
    }
}

impl RedisLayout {
    /// Those that keep entries, the first one a primary.
    fn data_servers(&self) -> Vec<&TestRedis> {
        match self {
            Self::Single(server) => vec![server],
            Self::Sentinels(servers) => vec![&servers.primary, &servers.replica],
            Self::Cluster(nodes) => nodes.primaries.iter().chain(&nodes.replicas).collect(),
        }
    }

    /// The URL of a store on them, whose single server is behind `port`.
    fn url(&self, port: u16) -> String {
        match self {
            Self::Single(_) => format!("redis://127.0.0.1:{port}/0"),
            Self::Sentinels(servers) => servers.url(),
            Self::Cluster(nodes) => nodes.url(),
        }
    }
}

impl<'a> StoreServers<'a> {
    /// Starts or empties what the stores need.
    ///
    /// # Errors
    /// What is not there.
    pub fn start(stores: SharedStores, database: Option<&'a BenchDatabase>) -> Result<Self, String> {
        let database = database.filter(|_| stores.has_postgres());
        if stores.has_postgres() && database.is_none() {
            return Err("no PostgreSQL was started for this scene".into());
        }
        database.iter().for_each(|database| database.clear());
        let redis = stores.redis().map(|config| RedisServers::start(stores, config)).transpose()?;
        Ok(Self { stores, redis, database })
    }

    /// Its Redis; a primary, if there are several servers.
    ///
    /// # Errors
    /// If it has none.
    pub fn redis(&self) -> Result<&TestRedis, String> {
        let servers = self.redis.as_ref().map(|redis| redis.layout.data_servers());
        servers.and_then(|servers| servers.first().copied()).ok_or_else(|| format!("{:?} has no Redis", self.stores))
    }

    /// Its PostgreSQL.
    ///
    /// # Errors
    /// If it has none.
    pub fn database(&self) -> Result<&'a BenchDatabase, String> {
        self.database.ok_or_else(|| format!("{:?} has no PostgreSQL", self.stores))
    }

    /// The `[store]` table of a gateway on them.
    ///
    /// # Errors
    /// If a server is missing.
    pub fn config(&self) -> Result<String, String> {
        self.config_through(self.redis().ok().map(|server| server.port()), self.database.map(BenchDatabase::port))
    }

    /// The same, with a single Redis and its PostgreSQL behind other ports.
    ///
    /// # Errors
    /// If a server is missing.
    pub fn config_through(&self, redis: Option<u16>, postgres: Option<u16>) -> Result<String, String> {
        let (url, cache) = self.urls_through(redis, postgres)?;
        let cache = cache.map(|cache| format!("cache = \"{cache}\"\n")).unwrap_or_default();
        let (near, timeout) = (self.stores.local_cache_bytes(), STORE_CALL_TIMEOUT.as_secs());
        Ok(format!("[store]\nurl = \"{url}\"\n{cache}local_cache = {near}\ntimeout = \"{timeout}s\"\n"))
    }

    /// The URL of the store, and of the Redis in front of it if there are two.
    ///
    /// # Errors
    /// If a server is missing.
    pub fn urls_through(&self, redis: Option<u16>, postgres: Option<u16>) -> Result<(String, Option<String>), String> {
        let redis = self.redis.as_ref().zip(redis).map(|(servers, port)| servers.layout.url(port));
        let postgres = self.database.zip(postgres).map(|(database, port)| database.url(port));
        match (redis, postgres) {
            (Some(redis), None) => Ok((redis, None)),
            (cache, Some(postgres)) => Ok((postgres, cache)),
            (None, None) => Err(format!("{:?} has no server", self.stores)),
        }
    }

    /// CPU time that its servers have consumed so far.
    ///
    /// # Errors
    /// If one of them is gone.
    pub fn cpu(&self) -> io::Result<Duration> {
        let redis: io::Result<Duration> =
            self.redis.iter().flat_map(|redis| &redis.pids).map(|pid| cpu::cpu_time(*pid)).sum();
        let postgres = self.database.map_or(Ok(Duration::ZERO), |database| cpu::family_cpu_time(database.pid))?;
        Ok(redis? + postgres)
    }
}
