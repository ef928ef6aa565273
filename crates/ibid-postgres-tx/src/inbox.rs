//! The inbox: an event of a broker has its effect in this database exactly once, however often it is delivered.
//!
//! The mark that an event was handled is written in the transaction of its effect, so both commit or neither does. The
//! delivery is acknowledged afterwards: an event that was committed but not acknowledged is delivered again, as a
//! duplicate.
//!
//! Invariants: nothing is marked outside the handler's transaction; an event so old that its mark may have been removed
//! is [`TxEventClaim::TooOld`], never new; events of one batch are marked in the order of their names, so overlapping
//! batches do not deadlock.
//!
//! ```no_run
//! use ibid::inbox::InboxEvent;
//! use ibid_postgres_tx::inbox::{TxEventClaim, TxInbox};
//!
//! # async fn ship(pool: sqlx::PgPool, event: InboxEvent) -> Result<(), Box<dyn std::error::Error>> {
//! let inbox = TxInbox::default();
//! let mut tx = pool.begin().await?;
//! if inbox.claim(&mut tx, &event).await? == TxEventClaim::New {
//!     sqlx::query("INSERT INTO shipments (order_id) VALUES ($1)").bind(event.id()).execute(&mut *tx).await?;
//!     tx.commit().await?; // acknowledge to the broker only after this
//! }
//! # Ok(()) }
//! ```
//!
//! [`TxInbox::handle`] does all of this, counts failures and derives the broker's reply. [`TxInbox::handle_batch`]
//! handles many events in one transaction.

use std::{
    error::Error,
    fmt,
    time::{Duration, SystemTime},
};

use ibid::inbox::{InboxEvent, RedeliveryBackoff};
use tokio::time::timeout;

use crate::driver::{
    DriverError, DriverErrorKind, SqlRow, SqlValue, Transaction, TxCheckout, TxConnection, TxPool,
    sealed::TransactionEnd,
};

pub use self::handle::{TxEventFailure, TxEventOutcome};

mod handle;

/// Maximum number of events that one call marks, so that the statement and its locks stay small.
pub const MAX_BATCH: usize = 10_000;

/// Stands for an event without a time.
const NO_TIMESTAMP: i64 = i64::MIN;
/// Limits of a PostgreSQL timestamp with room to spare: the years 1 to 9999, in microseconds.
const MIN_TIMESTAMP_US: i64 = -62_135_596_800_000_000;
const MAX_TIMESTAMP_US: i64 = 253_402_300_799_000_000;
const DEFAULT_TRANSACTION_TIMEOUT: Duration = Duration::from_secs(5 * 60);
const MAX_TTL: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Settings for marking events. All inboxes of a database share one table; the consumer name in each event separates
/// them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TxInbox {
    ttl: Duration,
    poison_after: u32,
    backoff: RedeliveryBackoff,
    transaction_timeout: Duration,
}

/// The outcome of claiming an event.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum TxEventClaim {
    /// The event is new: handle it now. It is marked as handled if this transaction commits.
    New,
    /// The event was handled before.
    Duplicate,
    /// The event is so old that it may have been handled and its mark removed since.
    TooOld,
    /// The event failed too often.
    Poisoned {
        /// Number of failures.
        attempts: u32,
        /// The last error.
        error: String,
    },
}

/// The failures of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TxEventFailures {
    /// Number of failures so far.
    pub attempts: u32,
    /// Whether the limit is reached: further claims return [`TxEventClaim::Poisoned`].
    pub poisoned: bool,
}

/// The result of a sweep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TxInboxSweep {
    /// Number of marks and failures removed.
    pub removed: u32,
    /// Whether more are due.
    pub more: bool,
}

/// The database could not be used. The event was not handled, unless it [may have committed](Self::may_have_committed).
/// Let the broker deliver it again in either case.
#[derive(Debug)]
pub struct TxInboxError(DriverError);

impl Default for TxInbox {
    /// Keeps marks for seven days, poisons an event after five failures, and limits a transaction to five minutes.
    fn default() -> Self {
        Self {
            ttl: Duration::from_secs(7 * 24 * 3600),
            poison_after: 5,
            backoff: RedeliveryBackoff::default(),
            transaction_timeout: DEFAULT_TRANSACTION_TIMEOUT,
        }
    }
}

impl TxInbox {
    /// Sets how long marks are kept, and so the maximum age of an event. It must exceed the broker's retention and
    /// redelivery time.
    #[must_use]
    pub fn ttl(self, keep: Duration) -> Self {
        Self { ttl: keep, ..self }
    }

    /// Sets the number of failures after which an event is poisoned, at least 1.
    #[must_use]
    pub fn poison_after(self, failures: u32) -> Self {
        Self { poison_after: failures.max(1), ..self }
    }

    /// Sets the redelivery delay of failed events.
    #[must_use]
    pub fn backoff(self, backoff: RedeliveryBackoff) -> Self {
        Self { backoff, ..self }
    }

    /// Sets the maximum duration of a transaction of [`handle`](Self::handle) or [`handle_batch`](Self::handle_batch),
    /// handlers included. A longer one is abandoned and its connection closed.
    #[must_use]
    pub fn transaction_timeout(self, limit: Duration) -> Self {
        Self { transaction_timeout: limit, ..self }
    }

    /// Marks an event as handled in your transaction. The mark exists once you commit.
    ///
    /// If an unfinished transaction has marked the event, this waits for it (up to `lock_timeout`); the event is a
    /// duplicate if that one commits. Transactions that claim several events one by one, in different orders, can
    /// deadlock; [`claim_batch`](Self::claim_batch) cannot.
    ///
    /// Commit only if no statement failed: PostgreSQL rolls back the COMMIT of a failed transaction without an error,
    /// and an event acknowledged then is lost.
    ///
    /// # Errors
    /// Returns an error if the database cannot be used: roll back, and let the broker deliver the event again.
    pub async fn claim<T: Transaction>(&self, tx: &mut T, event: &InboxEvent) -> Result<TxEventClaim, TxInboxError> {
        let mut claims = self.claim_batch(tx, std::slice::from_ref(event)).await?;
        claims.pop().ok_or_else(|| TxInboxError(DriverError::unreadable("a claim without an answer")))
    }

    /// Marks many events in one statement. The results are in the order of the events; the second occurrence of an
    /// event is a duplicate.
    ///
    /// If handling one of them fails, roll back to a savepoint before it and [remove](Self::unclaim) its mark; the
    /// others keep theirs. [`handle_batch`](Self::handle_batch) does that.
    ///
    /// # Errors
    /// As [`claim`](Self::claim); also if there are more than [`MAX_BATCH`] events.
    pub async fn claim_batch<T: Transaction>(
        &self, tx: &mut T, events: &[InboxEvent],
    ) -> Result<Vec<TxEventClaim>, TxInboxError> {
        if events.is_empty() {
            return Ok(Vec::new());
        }
        if events.len() > MAX_BATCH {
            let said = format!("a batch of {} events; allowed are at most {MAX_BATCH}", events.len());
            return Err(TxInboxError(DriverError::unreadable(said)));
        }
        let consumers: Vec<&str> = events.iter().map(InboxEvent::consumer).collect();
        let sources: Vec<&str> = events.iter().map(InboxEvent::source).collect();
        let ids: Vec<&str> = events.iter().map(InboxEvent::id).collect();
        let ats: Vec<i64> = events.iter().map(event_time).collect();
        let values = [
            SqlValue::Texts(&consumers),
            SqlValue::Texts(&sources),
            SqlValue::Texts(&ids),
            SqlValue::Bigints(&ats),
            SqlValue::Bigint(Some(self.ttl_us())),
            SqlValue::Integer(Some(i32::try_from(self.poison_after).unwrap_or(i32::MAX))),
        ];
        let sql =
            "SELECT c.found, c.attempts, c.error FROM ibid._claim_events($1, $2, $3, $4, $5, $6) c ORDER BY c.nth";
        let rows = tx.query_rows(sql, &values).await?;
        if rows.len() != events.len() {
            let said = format!("{} answers to {} claims", rows.len(), events.len());
            return Err(TxInboxError(DriverError::unreadable(said)));
        }
        rows.iter().map(|row| Ok(read_claim(row)?)).collect()
    }

    /// Removes the mark that this transaction made, so that it can commit without the event. Returns `false` if there
    /// is none.
    ///
    /// # Errors
    /// As [`claim`](Self::claim).
    pub async fn unclaim<T: Transaction>(&self, tx: &mut T, event: &InboxEvent) -> Result<bool, TxInboxError> {
        let sql = "SELECT ibid._unclaim_event($1, $2, $3)";
        let rows = tx.query_rows(sql, &event_params(event)).await?;
        Ok(first_row(&rows)?.boolean(0)?.unwrap_or(false))
    }

    /// Counts a failure in its own transaction, because the handler's is rolled back. Roll back first: otherwise the
    /// two transactions can deadlock.
    ///
    /// # Errors
    /// Returns an error if the failure could not be counted. Let the broker deliver the event again nevertheless.
    pub async fn record_failure<P: TxPool>(
        &self, pool: &P, event: &InboxEvent, error: &(impl fmt::Display + ?Sized),
    ) -> Result<TxEventFailures, TxInboxError> {
        // PostgreSQL text cannot contain zero bytes.
        let error = error.to_string().replace('\0', " ");
        let keep = SqlValue::Bigint(Some(self.ttl_us()));
        let [consumer, source, id] = event_params(event);
        let values = [consumer, source, id, SqlValue::Text(Some(&error)), keep];
        let rows = self.run_in_own_transaction(pool, "SELECT ibid._event_failed($1, $2, $3, $4, $5)", &values).await?;
        let attempts = SqlRow::require(first_row(&rows)?.integer(0)?, "the number of failures")?;
        let attempts = u32::try_from(attempts).unwrap_or_default();
        Ok(TxEventFailures { attempts, poisoned: attempts >= self.poison_after })
    }

    /// Forgets an event, its mark and its failures, so that its next delivery is new at any age. Call it before
    /// resending from a dead-letter queue. Returns whether the event had been handled or had failed.
    ///
    /// # Errors
    /// As [`claim`](Self::claim).
    pub async fn forget<T: Transaction>(&self, tx: &mut T, event: &InboxEvent) -> Result<bool, TxInboxError> {
        let [consumer, source, id] = event_params(event);
        let values = [consumer, source, id, SqlValue::Bigint(Some(self.ttl_us()))];
        let rows = tx.query_rows("SELECT ibid._forget_event($1, $2, $3, $4)", &values).await?;
        Ok(first_row(&rows)?.boolean(0)?.unwrap_or(false))
    }

    /// Removes at most `at_most` expired marks and failures, in its own transaction. Gateways on this database and
    /// `ibid sweep` do the same; without them, call it periodically until nothing is left.
    ///
    /// # Errors
    /// Returns an error if the database cannot be used.
    pub async fn sweep<P: TxPool>(&self, pool: &P, at_most: u32) -> Result<TxInboxSweep, TxInboxError> {
        let at_most = SqlValue::Integer(Some(i32::try_from(at_most).unwrap_or(i32::MAX)));
        let rows = self
            .run_in_own_transaction(pool, "SELECT s.removed, s.more FROM ibid._sweep_events($1) s", &[at_most])
            .await?;
        let row = first_row(&rows)?;
        let removed = u32::try_from(row.integer(0)?.unwrap_or_default()).unwrap_or_default();
        Ok(TxInboxSweep { removed, more: row.boolean(1)?.unwrap_or(false) })
    }

    async fn run_in_own_transaction<P: TxPool>(
        &self, pool: &P, sql: &'static str, values: &[SqlValue<'_>],
    ) -> Result<Vec<SqlRow>, TxInboxError> {
        let work = async |connection: &mut P::Conn| {
            let mut tx = connection.begin(None).await?;
            let rows = tx.query_rows(sql, values).await?;
            tx.commit().await?;
            Ok(rows)
        };
        self.on_connection(pool, work).await
    }

    /// Runs `work` on a connection of the pool. If it fails or takes too long, the connection is closed: it may be dead, or
    /// in an abandoned transaction.
    async fn on_connection<P: TxPool, T>(
        &self, pool: &P, work: impl AsyncFnOnce(&mut P::Conn) -> Result<T, TxInboxError>,
    ) -> Result<T, TxInboxError> {
        let connected = timeout(self.transaction_timeout, pool.connection()).await;
        let connection = connected.unwrap_or_else(|_| Err(DriverError::timed_out("a pool's call for a connection")))?;
        let mut connection = TxCheckout::new(connection);
        let done = timeout(self.transaction_timeout, work(&mut connection)).await;
        let done = done.map_err(|_| DriverError::timed_out("a transaction of the inbox"))?;
        if done.is_ok() {
            connection.give_back();
        }
        done
    }

    fn ttl_us(&self) -> i64 {
        i64::try_from(self.ttl.min(MAX_TTL).as_micros()).unwrap_or(i64::MAX)
    }
}

fn event_time(event: &InboxEvent) -> i64 {
    event.at().map_or(NO_TIMESTAMP, clamp_timestamp_us)
}

fn event_params(event: &InboxEvent) -> [SqlValue<'_>; 3] {
    [event.consumer(), event.source(), event.id()].map(|part| SqlValue::Text(Some(part)))
}

fn first_row(rows: &[SqlRow]) -> Result<&SqlRow, DriverError> {
    rows.first().ok_or_else(|| DriverError::unreadable("an empty answer"))
}

fn read_claim(row: &SqlRow) -> Result<TxEventClaim, DriverError> {
    Ok(match SqlRow::require(row.smallint(0)?, "what a claim found")? {
        0 => TxEventClaim::New,
        1 => TxEventClaim::Duplicate,
        2 => TxEventClaim::TooOld,
        3 => TxEventClaim::Poisoned {
            attempts: u32::try_from(row.integer(1)?.unwrap_or_default()).unwrap_or_default(),
            error: row.text(2)?.unwrap_or_default(),
        },
        other => return Err(DriverError::unreadable(format!("a claim found {other}"))),
    })
}

fn clamp_timestamp_us(at: SystemTime) -> i64 {
    let us = |span: Duration| i64::try_from(span.as_micros()).unwrap_or(i64::MAX);
    match at.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(after) => us(after).min(MAX_TIMESTAMP_US),
        Err(before) => (-us(before.duration())).max(MIN_TIMESTAMP_US),
    }
}

impl TxInboxError {
    /// Returns `true` after a serialization failure or deadlock: an immediate retry may succeed.
    pub fn is_transient(&self) -> bool {
        self.0.is_transient()
    }

    /// Returns `true` if the connection broke, possibly during COMMIT: the event may have been handled. The next
    /// delivery shows it.
    pub fn may_have_committed(&self) -> bool {
        self.0.kind == DriverErrorKind::ConnectionLost
    }

    /// Returns the server's SQLSTATE, if it replied.
    pub fn sqlstate(&self) -> Option<&str> {
        self.0.code.as_deref()
    }
}

impl From<DriverError> for TxInboxError {
    fn from(fault: DriverError) -> Self {
        Self(fault)
    }
}

impl fmt::Display for TxInboxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let then = match self.sqlstate() {
            Some("3F000" | "42P01" | "42883") => "; run ibid migrate on this database",
            Some("42501") => "; this role must be a member of ibid_service",
            _ => "",
        };
        write!(f, "the inbox: {}{then}", self.0)
    }
}

impl Error for TxInboxError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source()
    }
}
