//! The PostgreSQL store: shared by many gateways, decided by the database's clock and its transactions.
//!
//! One row per address in `ibid.idempotency_keys`, one statement per call, and so one transaction. What each call
//! decides is written in PL/pgSQL (`postgres/migrations/`), beside the data: atomic, and one round trip. A claim that
//! finds an answer writes nothing.
//!
//! ```text
//! place       the URL           pool, link   connections     lane       calls of many as one statement
//! statements  what is sent      rows         what is read    faults     what a failure means
//! waiting     who waits         checks       what is wanting migrate    the schema
//! ```
//!
//! A server that is not there yet is no error: calls fail as not applied until it is.

use std::{sync::Arc, time::Duration};

use ibid::store::{
    Address, Ask, Claim, Counters, End, ErrorKind, Fence, Held, Lease, Operators, Promise, Store, StoreError,
    StoreFuture, Swept,
};
use tokio::task::AbortHandle;
use tokio_postgres::Row;

pub use self::migrate::{Migrate, migrate, migrate_for};
use self::{
    faults::{STORE, failed},
    lane::Lane,
    place::Place,
    pool::Pool,
    rows::{Answer, What, column},
    statements::Statement,
    waiting::Waiting,
};
use crate::{near::Copies, remote::Remote};

mod checks;
mod faults;
mod lane;
mod link;
mod migrate;
mod operators;
mod place;
mod pool;
mod rows;
mod statements;
mod tls;
mod waiting;

/// A sweep may have to remove many rows.
const SWEEPING: Duration = Duration::from_secs(10);

/// The PostgreSQL store.
#[derive(Debug)]
pub struct Postgres {
    pool: Arc<Pool>,
    claims: Arc<Lane>,
    settles: Arc<Lane>,
    waiting: Arc<Waiting>,
    copies: Option<Copies>,
    tasks: [AbortHandle; 2],
}

/// Reads a URL, and says what is wrong with it. Nothing is opened.
///
/// # Errors
/// What is wrong, and what is allowed.
pub fn check(url: &str) -> Result<(), String> {
    url.parse::<Place>().map(drop)
}

impl Postgres {
    /// Opens the store that a URL names. A server that cannot be reached is no error: see [`Store::promise`].
    ///
    /// # Errors
    /// If the URL, or a file that it names, cannot be used.
    pub async fn open(url: &str, with: Remote) -> Result<Self, String> {
        let place: Place = url.parse()?;
        let certificates = place.tls.certificates()?;
        let pool = Pool::new(place, certificates, with.timeout);
        pool.is_tried().await;
        let waiting = Waiting::new(pool.clone(), with.copies.clone());
        let tasks = [tokio::spawn(waiting.clone().look()), tokio::spawn(waiting.clone().listen())];
        Ok(Self {
            claims: Lane::new(pool.clone(), Statement::Claim),
            settles: Lane::new(pool.clone(), Statement::Settle),
            waiting,
            copies: with.copies,
            tasks: tasks.map(|task| task.abort_handle()),
            pool,
        })
    }

    /// Which generation of copies elsewhere may be trusted.
    ///
    /// # Errors
    /// If the server does not say.
    pub async fn generation(&self) -> Result<u64, StoreError> {
        let found = self.pool.read("SELECT m.generation FROM ibid.meta m", &[], self.pool.timeout).await?;
        column::<i64>(self.first(&found)?, 0).map(|generation| generation.max(0) as u64)
    }

    /// Begins a new generation: copies of all before it are not to be trusted any more. Returns it.
    ///
    /// # Errors
    /// If the server does not say so; it may have begun all the same.
    pub async fn raise_generation(&self) -> Result<u64, StoreError> {
        let sql = "UPDATE ibid.meta m SET generation = m.generation + 1 RETURNING m.generation";
        let found = self.pool.write(sql).await?;
        column::<i64>(self.first(&found)?, 0).map(|generation| generation.max(0) as u64)
    }

    fn first<'a>(&self, found: &'a [Row]) -> Result<&'a Row, StoreError> {
        found.first().ok_or_else(|| failed(ErrorKind::Corrupt, "a statement was answered with no row"))
    }

    fn only(&self, found: &[Row], ask: Option<&Arc<Ask>>) -> Result<Answer, StoreError> {
        rows::answer(self.first(found)?, ask)
    }
}

impl Store for Postgres {
    fn claim<'a>(&'a self, ask: &'a Arc<Ask>) -> StoreFuture<'a, Claim> {
        let lease = Lease { ask: ask.clone(), fence: Fence::UNSEEN, attempt: 0, solo: false };
        StoreFuture::boxed(async move { self.claims.call(lease, What::Claim).await?.into_claim() })
    }

    fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, Held> {
        let call = self.settles.call(lease.clone(), What::Extend(hold));
        StoreFuture::boxed(async move { call.await?.into_held() })
    }

    fn settle<'a>(&'a self, lease: &'a Lease, end: &'a End) -> StoreFuture<'a, Held> {
        let call = self.settles.call(lease.clone(), What::End(end.clone()));
        StoreFuture::boxed(async move { call.await?.into_held() })
    }

    fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()> {
        StoreFuture::boxed(async move {
            self.waiting.wait(at, seen, limit).await;
            Ok(())
        })
    }

    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<Claim>> {
        StoreFuture::boxed(async move {
            let found = self.pool.call(Statement::Get, &[&&at.0[..]], self.pool.deadline()).await?;
            self.only(&found, None).map(|answer| answer.found)
        })
    }

    fn sweep(&self, at_most: u32) -> StoreFuture<'_, Swept> {
        StoreFuture::boxed(async move {
            let at_most = i32::try_from(at_most).unwrap_or(i32::MAX);
            let deadline = tokio::time::Instant::now() + SWEEPING;
            let found = self.pool.call(Statement::Sweep, &[&at_most], deadline).await?;
            let row = self.first(&found)?;
            let number = |at| column::<i32>(row, at).map(|number| number.max(0) as u32);
            Ok(Swept { removed: number(0)?, lapsed: number(1)?, more: column(row, 2)? })
        })
    }

    fn operators(&self) -> &dyn Operators {
        self
    }

    fn counters(&self) -> Option<&dyn Counters> {
        Some(self)
    }

    fn promise(&self) -> Promise {
        let findings = self.pool.findings();
        let mut wanting = findings.as_ref().map(|found| found.wanting.clone()).unwrap_or_default();
        if findings.is_none() {
            wanting.push(match self.pool.fault() {
                Some((ErrorKind::Rejected, why)) => why,
                Some((_, why)) => format!("{} could not be checked: {why}", self.pool.place),
                None => format!("{} could not be checked yet", self.pool.place),
            });
        }
        let durable = !findings.is_some_and(|found| found.loses);
        Promise { store: STORE, durable, shared: true, wanting }
    }
}

impl Counters for Postgres {
    fn reserve<'a>(&'a self, who: &'a Address, n: u64, window: Duration) -> StoreFuture<'a, ibid::store::Used> {
        let (n, window) = (n.min(1 << 48), rows::micros(window));
        // A window that is over begins anew. What others have left behind goes with it, some at a time.
        let sql = format!(
            "WITH gone AS (DELETE FROM ibid.quota WHERE tenant IN (SELECT q.tenant FROM ibid.quota q \
                 WHERE q.resets_at <= statement_timestamp() AND q.tenant <> decode('{who}', 'hex') \
                 ORDER BY q.resets_at LIMIT 16 FOR UPDATE SKIP LOCKED)) \
             INSERT INTO ibid.quota AS q (tenant, used, resets_at) \
             VALUES (decode('{who}', 'hex'), {n}, statement_timestamp() + {window} * interval '1 microsecond') \
             ON CONFLICT (tenant) DO UPDATE SET \
                 used = CASE WHEN q.resets_at <= statement_timestamp() THEN 0 ELSE q.used END + excluded.used, \
                 resets_at = CASE WHEN q.resets_at <= statement_timestamp() THEN excluded.resets_at ELSE q.resets_at END \
             RETURNING q.used, (extract(epoch FROM q.resets_at - statement_timestamp()) * 1000000)::bigint"
        );
        StoreFuture::boxed(async move {
            let found = self.pool.write(&sql).await?;
            let number = |at| column::<i64>(self.first(&found)?, at).map(|number| number.max(0).unsigned_abs());
            Ok(ibid::store::Used { total: number(0)?, resets_in: Duration::from_micros(number(1)?.max(1)) })
        })
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
        self.pool.close();
    }
}
