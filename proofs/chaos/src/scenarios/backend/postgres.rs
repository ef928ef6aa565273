//! PostgreSQL: alone, and with Redis beside it. All behind links.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    sync::Arc,
};

use ibid_testkit::{
    process,
    servers::{postgres::Server as Postgres, redis::Server as Redis},
};
use tokio::task::spawn_blocking;

use super::{Backend, Server, redis};
use crate::fault::{Doing, Process};

/// A server with a migrated database.
pub(super) struct Alone {
    postgres: Arc<Postgres>,
    database: String,
}

impl Alone {
    /// Starts it, and migrates it as an operator would, with the gateway's own command.
    pub(super) async fn start(bin: &Path) -> Result<Alone, String> {
        let starting = spawn_blocking(|| {
            let postgres = Postgres::start();
            let database = postgres.create_database();
            Alone { postgres: Arc::new(postgres), database }
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
        Server { process: Arc::new(Running(Arc::clone(&self.postgres))), addr, linked: true }
    }

    fn url(&self, at: &dyn Fn(&str) -> SocketAddr) -> String {
        format!("postgres://gateway@{}/{}", at("postgres"), self.database)
    }
}

impl Backend for Alone {
    fn servers(&self) -> Vec<Server> {
        vec![self.server()]
    }

    fn store(&self, at: &dyn Fn(&str) -> SocketAddr) -> String {
        format!("[store]\nurl = \"{}\"", self.url(at))
    }
}

/// Which of the two decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// PostgreSQL; Redis is its cache.
    Strict,
    /// Whichever is there.
    Loose,
}

/// PostgreSQL and Redis as one store.
pub(super) struct Tiered {
    postgres: Alone,
    redis: Arc<Redis>,
    mode: Mode,
}

impl Tiered {
    pub(super) async fn start(bin: &Path, mode: Mode) -> Result<Tiered, String> {
        let postgres = Alone::start(bin).await?;
        let redis = spawn_blocking(Redis::start).await;
        let redis = redis.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
        Ok(Tiered { postgres, redis: Arc::new(redis), mode })
    }
}

impl Backend for Tiered {
    fn servers(&self) -> Vec<Server> {
        vec![self.postgres.server(), redis::alone(&self.redis)]
    }

    fn store(&self, at: &dyn Fn(&str) -> SocketAddr) -> String {
        let (postgres, redis) = (self.postgres.url(at), format!("redis://{}/0", at("redis")));
        match self.mode {
            Mode::Strict => format!("[store]\nurl = \"{postgres}\"\ncache = \"{redis}\""),
            Mode::Loose => format!("[store]\nurl = \"{redis}\"\nfallback = \"{postgres}\""),
        }
    }
}

struct Running(Arc<Postgres>);

impl Running {
    /// PostgreSQL's own harness blocks.
    fn blocking(&self, act: fn(&Postgres)) -> Doing<'_> {
        let postgres = Arc::clone(&self.0);
        Box::pin(async move {
            let done = spawn_blocking(move || act(&postgres)).await;
            done.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
        })
    }
}

impl Process for Running {
    fn name(&self) -> String {
        "postgres".to_owned()
    }

    fn kill(&self) -> Doing<'_> {
        self.blocking(Postgres::kill)
    }

    fn restart(&self) -> Doing<'_> {
        self.blocking(Postgres::restart)
    }

    fn pause(&self) -> Doing<'_> {
        self.blocking(Postgres::pause)
    }

    fn resume(&self) -> Doing<'_> {
        self.blocking(Postgres::resume)
    }
}
