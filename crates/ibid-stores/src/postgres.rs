//! The PostgreSQL store: shared by many gateways. The database's clock and transactions decide.
//!
//! Each address is one row in `ibid.idempotency_keys`. Calls that gather are one statement, and so one transaction: an INSERT
//! for the claims, and an UPDATE for the completions (`statements`). What those leave, because something else is there, is decided
//! by PL/pgSQL functions beside the data (`postgres/migrations/`), row by row. A claim that finds a completed answer
//! writes nothing.
//!
//! ```text
//! url         parses URLs        pool, connection  connections      batcher  many calls as one statement
//! statements  prepared SQL       rows              column mapping   error    classifies failures
//! waiters     waits for holders  checks            server settings  migrate  the schema
//! batch_queue calls that gather  replies           wakes callers
//! ```
//!
//! An unreachable server is not an error at opening: calls fail as not applied until it is reachable.

use std::{
    fmt, mem,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use ibid::store::{
    Address, ClaimOutcome, ClaimRequest, CounterUsage, Counters, EntryState, ErrorKind, Fence, Guarantees, Lease,
    SettleOutcome, Settlement, Store, StoreAdmin, StoreError, StoreFuture, SweepResult, with_jitter,
};
use parking_lot::Mutex;
use tokio::{
    sync::Notify,
    task::{AbortHandle, JoinHandle, JoinSet},
    time::{Instant, sleep, timeout},
};
use tokio_postgres::{
    Client, Error, Row,
    types::{ToSql, Type},
};

use self::{
    batcher::Batcher,
    checks::PostgresFindings,
    error::{STORE_NAME, store_error},
    pool::{CallFailure, PostgresPool},
    rows::{RowOperation, RowOutcome, SettlementParams, column},
    statements::Statement,
    url::PostgresUrl,
    waiters::PostgresWaiters,
};
use crate::{
    StoreSetupError, certificates::ReloadingTlsConfig, notifications::ServerNotifications, remote::RemoteOptions,
};

pub use self::migrate::{MigrateAction, MigrateOptions, migrate, migrate_with};

mod admin;
mod batch_queue;
mod batcher;
mod checks;
mod connection;
mod error;
mod migrate;
mod pool;
mod replies;
mod rows;
mod statements;
mod tls;
mod url;
mod waiters;

/// Deadline of a sweep, which may have to remove many rows.
const SWEEP_TIMEOUT: Duration = Duration::from_secs(10);

/// A store on PostgreSQL that many processes share.
pub struct Postgres {
    pool: Arc<PostgresPool>,
    batcher: Arc<Batcher>,
    waiters: Arc<PostgresWaiters>,
    /// Background tasks. They end when the store is dropped.
    _background: JoinSet<()>,
}

/// Checks that a URL names a PostgreSQL store. Errors do not contain its password.
pub(crate) fn check_url(url: &str) -> Result<(), String> {
    PostgresUrl::parse(url).map(drop)
}

impl Postgres {
    /// Opens the store that a URL names. An unreachable server is not an error: see [`Store::guarantees`].
    ///
    /// # Errors
    /// Returns an error if the URL, or a file that it names, cannot be used, or if a later version of ibid has changed the
    /// schema so that this one must not use it.
    pub async fn open(url: &str, with: RemoteOptions) -> Result<Self, StoreSetupError> {
        let place = PostgresUrl::parse(url)?;
        let certificates = place.tls.reloading_config()?;
        let pool = PostgresPool::new(place, certificates, with.timeout);
        pool.wait_until_tried().await;
        if let Some((ErrorKind::Corrupt, why)) = &*pool.last_error.lock() {
            return Err(why.clone().into());
        }
        let notifications = ServerNotifications::new(with.answer_cache);
        let (waiters, awaited) = PostgresWaiters::new(pool.clone(), notifications);
        let mut background = JoinSet::new();
        background.spawn(waiters.clone().run_poller(awaited));
        background.spawn(waiters.clone().run_listener());
        Ok(Self { batcher: Batcher::new(pool.clone()), waiters, _background: background, pool })
    }

    /// Returns the current generation of copies in a front store. Older copies must not be trusted.
    ///
    /// # Errors
    /// Returns an error if the server cannot be queried.
    pub async fn generation(&self) -> Result<u64, StoreError> {
        let found = self.pool.read("SELECT m.generation FROM ibid.meta m", &[], self.pool.timeout).await?;
        rows::count_at(first_row(&found)?, 0)
    }

    /// Starts a new generation and returns it. Copies of earlier generations must not be trusted any more.
    ///
    /// # Errors
    /// Returns an error if the server does not confirm it; the generation may have been raised nevertheless.
    pub async fn raise_generation(&self) -> Result<u64, StoreError> {
        let sql = "UPDATE ibid.meta m SET generation = m.generation + 1 RETURNING m.generation";
        rows::count_at(first_row(&self.pool.write(sql).await?)?, 0)
    }
}

fn first_row(found: &[Row]) -> Result<&Row, StoreError> {
    found.first().ok_or_else(|| store_error(ErrorKind::Corrupt, "a statement was answered with no row"))
}

impl Store for Postgres {
    fn claim<'a>(&'a self, ask: &'a Arc<ClaimRequest>) -> StoreFuture<'a, ClaimOutcome> {
        let call = self.batcher.call(Lease::unseen(ask), RowOperation::Claim);
        StoreFuture::boxed(async move { call.await?.into_claim_outcome() })
    }

    fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, SettleOutcome> {
        let call = self.batcher.call(lease.clone(), RowOperation::Extend(hold));
        StoreFuture::boxed(async move { call.await?.into_settle_outcome() })
    }

    fn settle<'a>(&'a self, lease: &'a Lease, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome> {
        let call = self.batcher.call(lease.clone(), RowOperation::Settle(end.clone()));
        StoreFuture::boxed(async move { call.await?.into_settle_outcome() })
    }

    fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()> {
        StoreFuture::boxed(self.waiters.wait(at, seen, limit))
    }

    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<ClaimOutcome>> {
        StoreFuture::boxed(async move {
            let found = self.pool.call(Statement::Get, &[&&at.0[..]], self.pool.deadline()).await?;
            Ok(rows::read_outcome(first_row(&found)?, None)?.outcome)
        })
    }

    fn sweep(&self, at_most: u32) -> StoreFuture<'_, SweepResult> {
        StoreFuture::boxed(async move {
            let at_most = i32::try_from(at_most).unwrap_or(i32::MAX);
            let deadline = tokio::time::Instant::now() + SWEEP_TIMEOUT;
            let found = self.pool.call(Statement::Sweep, &[&at_most], deadline).await?;
            let row = first_row(&found)?;
            let number = |at| column::<i32>(row, at).map(|number| number.max(0) as u32);
            Ok(SweepResult { removed: number(0)?, lapsed: number(1)?, more: column(row, 2)? })
        })
    }

    fn admin(&self) -> &dyn StoreAdmin {
        self
    }

    fn counters(&self) -> Option<&dyn Counters> {
        Some(self)
    }

    fn guarantees(&self) -> Guarantees {
        let findings = self.pool.findings.lock().clone();
        let mut wanting = findings.as_ref().map(|found| found.warnings.clone()).unwrap_or_default();
        if findings.is_none() {
            wanting.push(match self.pool.last_error.lock().clone() {
                Some((ErrorKind::Rejected, why)) => why,
                Some((_, why)) => format!("{} could not be checked: {why}", self.pool.url),
                None => format!("{} could not be checked yet", self.pool.url),
            });
        }
        let durable = !findings.is_some_and(|found| found.may_lose_commits);
        Guarantees { store: STORE_NAME, durable, shared: true, warnings: wanting }
    }
}

impl Counters for Postgres {
    fn reserve<'a>(&'a self, who: &'a Address, n: u64, window: Duration) -> StoreFuture<'a, CounterUsage> {
        let (n, window) = (n.min(1 << 48), rows::micros_param(window));
        // An expired window restarts. Each call also removes a few expired windows of other tenants.
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
            let row = first_row(&found)?;
            let resets_in = Duration::from_micros(rows::count_at(row, 1)?.max(1));
            Ok(CounterUsage { total: rows::count_at(row, 0)?, resets_in })
        })
    }
}

impl fmt::Debug for Postgres {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Postgres").field("url", &self.pool.url).finish_non_exhaustive()
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        self.pool.close();
    }
}
