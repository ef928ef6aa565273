//! The servers behind a store. Everything else is in the table.

use std::{net::SocketAddr, path::Path, sync::Arc};

use super::Kind;
use crate::fault::{Fault, Process};

mod postgres;
mod redis;

/// One server that a store needs.
pub struct Server {
    /// It can be killed and paused.
    pub process: Arc<dyn Process>,
    /// Where it listens.
    pub addr: SocketAddr,
    /// Whether gateways reach it over links. Not where servers tell clients each other's addresses: those lead past links.
    pub linked: bool,
}

/// A store's servers, running. Dropping it ends them.
pub trait Backend: Send + Sync {
    /// The servers.
    fn servers(&self) -> Vec<Server>;

    /// The `[store]` table of a gateway that finds each server where `at` says, by its process's name.
    fn store(&self, at: &dyn Fn(&str) -> SocketAddr) -> String;

    /// What else can happen to it: a failover, a reshard.
    fn others(&self) -> Vec<Box<dyn Fault>> {
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
pub async fn start(kind: Kind, bin: &Path) -> Result<Box<dyn Backend>, String> {
    Ok(match kind {
        Kind::Memory => Box::new(OwnStore("memory:")),
        Kind::Embedded => Box::new(OwnStore("embedded:data")),
        Kind::Redis => Box::new(blocking(|| redis::Alone::start(&[])).await),
        Kind::RedisWithoutLog => Box::new(blocking(|| redis::Alone::start(&["appendonly no"])).await),
        Kind::Sentinel => Box::new(blocking(redis::Watched::start).await),
        Kind::Failover { wait_replicas } => {
            Box::new(blocking(move || redis::Watched::failing_over(wait_replicas)).await)
        }
        Kind::Cluster => Box::new(blocking(redis::Clustered::start).await),
        Kind::Postgres => Box::new(postgres::Alone::start(bin).await?),
        Kind::TieredStrict => Box::new(postgres::Tiered::start(bin, postgres::Mode::Strict).await?),
        Kind::TieredLoose => Box::new(postgres::Tiered::start(bin, postgres::Mode::Loose).await?),
    })
}

async fn blocking<T: Send + 'static>(start: impl FnOnce() -> T + Send + 'static) -> T {
    let started = tokio::task::spawn_blocking(start).await;
    started.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
}

/// A store that every gateway has to itself, in its own folder.
struct OwnStore(&'static str);

impl Backend for OwnStore {
    fn servers(&self) -> Vec<Server> {
        Vec::new()
    }

    fn store(&self, _: &dyn Fn(&str) -> SocketAddr) -> String {
        format!("[store]\nurl = \"{}\"", self.0)
    }
}
