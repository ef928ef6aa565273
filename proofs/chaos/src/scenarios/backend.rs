//! The servers behind a store. Everything else is in the table.

use std::{net::SocketAddr, path::Path, sync::Arc};

use super::ScenarioStore;
use crate::{
    fault::{ChaosFault, ServerProcess},
    soak::folder_bytes,
};

mod postgres;
mod redis;

/// One server that a store needs.
pub struct Server {
    /// It can be killed and paused.
    pub process: Arc<dyn ServerProcess>,
    /// Where it listens.
    pub addr: SocketAddr,
    /// Whether gateways reach it over links. Not where servers tell clients each other's addresses: those lead past links.
    pub via_proxy: bool,
}

/// A store's servers, running. Dropping it ends them.
pub trait StoreBackend: Send + Sync {
    /// The servers.
    fn servers(&self) -> Vec<Server>;

    /// The `[store]` table of a gateway that finds each server where `at` says, by its process's name.
    fn store(&self, at: &dyn Fn(&str) -> SocketAddr) -> String;

    /// How large it is; `folder` is that of its gateway.
    fn bytes(&self, folder: &Path) -> u64 {
        folder_bytes(folder)
    }

    /// What else can happen to it: a failover, a reshard.
    fn other_faults(&self) -> Vec<Box<dyn ChaosFault>> {
        Vec::new()
    }
}

/// Starts what a store needs; `bin` is the gateway, whose own commands prepare it.
///
/// # Errors
///
/// If it cannot be prepared.
///
/// # Panics
///
/// If a server does not start, with its log.
pub async fn start(kind: ScenarioStore, bin: &Path) -> Result<Box<dyn StoreBackend>, String> {
    Ok(match kind {
        ScenarioStore::Memory => Box::new(LocalBackend("memory:")),
        ScenarioStore::Embedded => Box::new(LocalBackend("embedded:data")),
        ScenarioStore::Redis => Box::new(run_blocking(|| redis::RedisBackend::start(&[])).await),
        ScenarioStore::Valkey => Box::new(run_blocking(redis::RedisBackend::start_valkey).await),
        ScenarioStore::RedisWithoutLog => {
            Box::new(run_blocking(|| redis::RedisBackend::start(&["appendonly no"])).await)
        }
        ScenarioStore::Sentinel => Box::new(run_blocking(redis::SentinelBackend::start).await),
        ScenarioStore::Failover { wait_replicas } => {
            Box::new(run_blocking(move || redis::SentinelBackend::failing_over(wait_replicas)).await)
        }
        ScenarioStore::Cluster => Box::new(run_blocking(redis::ClusterBackend::start).await),
        ScenarioStore::Postgres => Box::new(postgres::PostgresBackend::start(bin).await?),
        ScenarioStore::TieredStrict => {
            Box::new(postgres::TieredBackend::start(bin, postgres::TieredBackendMode::Strict).await?)
        }
        ScenarioStore::TieredLoose => {
            Box::new(postgres::TieredBackend::start(bin, postgres::TieredBackendMode::Loose).await?)
        }
    })
}

pub(super) async fn run_blocking<T: Send + 'static>(start: impl FnOnce() -> T + Send + 'static) -> T {
    let started = tokio::task::spawn_blocking(start).await;
    started.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
}

/// A store that every gateway has to itself, in its own folder.
struct LocalBackend(&'static str);

impl StoreBackend for LocalBackend {
    fn servers(&self) -> Vec<Server> {
        Vec::new()
    }

    fn store(&self, _: &dyn Fn(&str) -> SocketAddr) -> String {
        format!("[store]\nurl = \"{}\"", self.0)
    }
}
