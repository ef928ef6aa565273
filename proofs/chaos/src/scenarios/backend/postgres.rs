//! PostgreSQL: alone, and with Redis beside it. All behind links.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    sync::Arc,
};

use testbed::{TestPostgres, TestRedis, process};
use tokio::task::spawn_blocking;

use super::{Server, StoreBackend, redis};
use crate::fault::{FaultFuture, ServerProcess};

/// A server with a migrated database.
pub(super) struct PostgresBackend {
    postgres: Arc<TestPostgres>,
    database: String,
}

impl PostgresBackend {
    /// Starts it, and migrates it as an operator would, with the gateway's own command.
    pub(super) async fn start(bin: &Path) -> Result<PostgresBackend, String> {
        let starting = spawn_blocking(|| {
            let postgres = TestPostgres::start();
            let database = postgres.create_database();
            PostgresBackend { postgres: Arc::new(postgres), database }
        });
        let alone = starting.await.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
        let url = alone.postgres.url("migrator", &alone.database);
        let done = process::run(bin, &["migrate", "--store", &url], &[]).await;
        if !done.status.success() {
            return Err(format!("ibid migrate: {}", String::from_utf8_lossy(&done.stderr)));
        }
        Ok(alone)
    }

    fn server(&self) -> Server {
        let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, self.postgres.port()));
        Server { process: Arc::new(PostgresProcess(Arc::clone(&self.postgres))), addr, via_proxy: true }
    }

    fn url(&self, at: &dyn Fn(&str) -> SocketAddr) -> String {
        format!("postgres://gateway@{}/{}", at("postgres"), self.database)
    }
}

impl StoreBackend for PostgresBackend {
    fn servers(&self) -> Vec<Server> {
        vec![self.server()]
    }

    fn store(&self, at: &dyn Fn(&str) -> SocketAddr) -> String {
        format!("[store]\nurl = \"{}\"", self.url(at))
    }
}

/// Which of the two decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TieredBackendMode {
    /// PostgreSQL; Redis is its cache.
    Strict,
    /// Whichever is there.
    Loose,
}

/// PostgreSQL and Redis as one store.
pub(super) struct TieredBackend {
    postgres: PostgresBackend,
    redis: Arc<TestRedis>,
    mode: TieredBackendMode,
}

impl TieredBackend {
    pub(super) async fn start(bin: &Path, mode: TieredBackendMode) -> Result<TieredBackend, String> {
        let postgres = PostgresBackend::start(bin).await?;
        let redis = spawn_blocking(TestRedis::start).await;
        let redis = redis.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
        Ok(TieredBackend { postgres, redis: Arc::new(redis), mode })
    }
}

impl StoreBackend for TieredBackend {
    fn servers(&self) -> Vec<Server> {
        vec![self.postgres.server(), redis::redis_server(&self.redis)]
    }

    fn store(&self, at: &dyn Fn(&str) -> SocketAddr) -> String {
        let (postgres, redis) = (self.postgres.url(at), format!("redis://{}/0", at("redis")));
        match self.mode {
            TieredBackendMode::Strict => format!("[store]\nurl = \"{postgres}\"\ncache = \"{redis}\""),
            TieredBackendMode::Loose => format!("[store]\nurl = \"{redis}\"\nfallback = \"{postgres}\""),
        }
    }
}

struct PostgresProcess(Arc<TestPostgres>);

impl PostgresProcess {
    /// PostgreSQL's own harness blocks.
    fn blocking(&self, act: fn(&TestPostgres)) -> FaultFuture<'_> {
        let postgres = Arc::clone(&self.0);
        Box::pin(async move {
            let done = spawn_blocking(move || act(&postgres)).await;
            done.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
        })
    }
}

impl ServerProcess for PostgresProcess {
    fn name(&self) -> String {
        "postgres".to_owned()
    }

    fn kill(&self) -> FaultFuture<'_> {
        self.blocking(|server| server.kill())
    }

    fn restart(&self) -> FaultFuture<'_> {
        self.blocking(TestPostgres::restart)
    }

    fn pause(&self) -> FaultFuture<'_> {
        self.blocking(|server| server.pause())
    }

    fn resume(&self) -> FaultFuture<'_> {
        self.blocking(|server| server.resume())
    }
}
