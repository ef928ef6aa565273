//! The servers behind a store. Everything else is in the table.

use std::{net::SocketAddr, sync::Arc};

use self::redis::{Alone, Clustered, Watched};
use super::Kind;
use crate::fault::{Fault, Process};

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

/// Starts what a store needs.
///
/// # Errors
///
/// If that is not possible here.
///
/// # Panics
///
/// If a server does not start, with its log.
pub async fn start(kind: Kind) -> Result<Box<dyn Backend>, String> {
    let starting = tokio::task::spawn_blocking(move || -> Result<Box<dyn Backend>, String> {
        match kind {
            Kind::Memory => Ok(Box::new(OwnStore("memory:"))),
            Kind::Embedded => Ok(Box::new(OwnStore("embedded:data"))),
            Kind::Redis => Ok(Box::new(Alone::start(&[]))),
            Kind::RedisWithoutLog => Ok(Box::new(Alone::start(&["appendonly no"]))),
            Kind::Sentinel => Ok(Box::new(Watched::start())),
            Kind::Cluster => Ok(Box::new(Clustered::start())),
            Kind::Postgres | Kind::TieredStrict | Kind::TieredLoose => {
                Err(format!("this build cannot start the servers of {kind:?}"))
            }
        }
    });
    starting.await.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
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
