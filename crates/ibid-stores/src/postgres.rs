//! Stand-in with the agreed signatures, for a server that is never there. Replaced by the real store.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::store::{
    Address, Ask, Claim, Counts, Cursor, End, ErrorKind, Fence, Filter, Held, Lease, Operators, Page, Promise, Store,
    StoreError, StoreFuture, Swept,
};

use crate::Remote;

/// Never reached.
#[derive(Debug)]
pub struct Postgres;

impl Postgres {
    /// Opens it.
    ///
    /// # Errors
    /// As [`check`].
    pub async fn open(url: &str, _with: Remote) -> Result<Self, String> {
        check(url).map(|()| Self)
    }

    /// The number under which a Redis beside it keeps everything.
    ///
    /// # Errors
    /// If the server cannot be reached.
    pub async fn generation(&self) -> Result<u64, StoreError> {
        away().await
    }

    /// Raises it.
    ///
    /// # Errors
    /// If the server cannot be reached.
    pub async fn raise_generation(&self) -> Result<u64, StoreError> {
        away().await
    }
}

/// Looks at the URL only.
///
/// # Errors
/// What is wrong with it.
pub fn check(url: &str) -> Result<(), String> {
    let rest = url.split_once("://").map_or("", |(_, rest)| rest);
    if rest.is_empty() { Err("it names no host".into()) } else { Ok(()) }
}

fn away<'a, T: Unpin>() -> StoreFuture<'a, T> {
    StoreFuture::ready(Err(StoreError::new(ErrorKind::NotApplied, "postgres", "no connection")))
}

impl Store for Postgres {
    fn claim<'a>(&'a self, _: &'a Arc<Ask>) -> StoreFuture<'a, Claim> {
        away()
    }
    fn extend<'a>(&'a self, _: &'a Lease, _: Duration) -> StoreFuture<'a, Held> {
        away()
    }
    fn settle<'a>(&'a self, _: &'a Lease, _: &'a End) -> StoreFuture<'a, Held> {
        away()
    }
    fn wait<'a>(&'a self, _: &'a Address, _: Fence, _: Duration) -> StoreFuture<'a, ()> {
        away()
    }
    fn get<'a>(&'a self, _: &'a Address) -> StoreFuture<'a, Option<Claim>> {
        away()
    }
    fn sweep(&self, _: u32) -> StoreFuture<'_, Swept> {
        away()
    }
    fn operators(&self) -> &dyn Operators {
        self
    }
    fn promise(&self) -> Promise {
        let wanting = vec!["it could not be reached, so nothing could be checked".into()];
        Promise { store: "postgres", durable: true, shared: true, wanting }
    }
}

impl Operators for Postgres {
    fn list<'a>(&'a self, _: &'a Filter, _: Cursor, _: u32) -> StoreFuture<'a, Page> {
        away()
    }
    fn resolve<'a>(&'a self, _: &'a Address, _: Fence, _: &'a End) -> StoreFuture<'a, Held> {
        away()
    }
    fn forget<'a>(&'a self, _: &'a Address, _: Fence) -> StoreFuture<'a, Held> {
        away()
    }
    fn replace<'a>(&'a self, _: &'a Address, _: Fence, _: Bytes) -> StoreFuture<'a, Held> {
        away()
    }
    fn counts(&self) -> StoreFuture<'_, Counts> {
        away()
    }
}

/// Which way to migrate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Migrate {
    /// To this version.
    Up,
    /// Say what would be done.
    DryRun,
    /// Remove everything.
    Down,
}

/// Migrates.
///
/// # Errors
/// If the server cannot be reached.
pub async fn migrate(url: &str, _how: Migrate) -> Result<Vec<String>, String> {
    check(url)?;
    Err("no connection".into())
}
