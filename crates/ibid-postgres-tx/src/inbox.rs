//! The inbox: an event of a broker has its effect in this database exactly once, however often it is delivered.
//!
//! The mark that an event was handled is written in the transaction that has its effect, so that both commit or neither
//! does. The broker is told afterwards: what was committed and not acknowledged comes again, and is a duplicate.
//!
//! Invariants: nothing is marked outside the handler's transaction; what is so old that its mark may have been removed is
//! [`Claimed::TooOld`], never new; events of one batch are marked in the order of their names, so that two batches
//! that overlap never wait for each other in a circle.
//!
//! ```no_run
//! use ibid::inbox::Event;
//! use ibid_postgres_tx::inbox::{Claimed, Inbox};
//!
//! # async fn ship(pool: sqlx::PgPool, event: Event) -> Result<(), Box<dyn std::error::Error>> {
//! let inbox = Inbox::default();
//! let mut tx = pool.begin().await?;
//! if inbox.claim(&mut tx, &event).await? == Claimed::New {
//!     sqlx::query("INSERT INTO shipments (order_id) VALUES ($1)").bind(event.id()).execute(&mut *tx).await?;
//!     tx.commit().await?; // and only now is the broker told
//! }
//! # Ok(()) }
//! ```
//!
//! [`Inbox::handle`] does all of this, counts failures and says what the broker is to be told; [`Inbox::handle_batch`] does
//! it for many events in one transaction.

use std::{
    error::Error,
    fmt,
    time::{Duration, SystemTime},
};

use ibid::inbox::{Backoff, Event};
use tokio::time::timeout;

use crate::driver::{
    Connection, Fault, FaultKind, Pool, Row, Transaction, Value,
    sealed::{Ends, Statements},
};

pub use self::handle::{Handled, Why};

mod handle;

/// How many events one call marks at most: the statement and its locks stay small.
pub const MAX_BATCH: usize = 10_000;

/// Nobody knows when it happened.
const NEVER: i64 = i64::MIN;
/// What a timestamp of PostgreSQL can hold with room to spare: the years 1 to 9999.
const FIRST_US: i64 = -62_135_596_800_000_000;
const LAST_US: i64 = 253_402_300_799_000_000;
const LIMIT: Duration = Duration::from_secs(5 * 60);
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// How events are marked, and for how long. The table belongs to all inboxes of a database; consumers are told apart
/// by the names in their events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inbox {
    keep: Duration,
    poison_after: u32,
    backoff: Backoff,
    limit: Duration,
}

/// What a claim found.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum Claimed {
    /// It is marked as handled, if this transaction commits: handle it now.
    New,
    /// It was handled before.
    Duplicate,
    /// It happened so long ago that it may have been handled, and its mark removed since.
    TooOld,
    /// It failed too often.
    Poisoned {
        /// How often.
        attempts: u32,
        /// What it failed of the last time.
        error: String,
    },
}

/// How often an event has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failures {
    /// So often, in all.
    pub attempts: u32,
    /// Whether that is too often: further claims find it poisoned.
    pub poisoned: bool,
}

/// What a sweep did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Swept {
    /// Marks and failures removed.
    pub removed: u32,
    /// Whether more were waiting when it stopped.
    pub more: bool,
}

/// The database could not be asked. The event was not handled, unless it [may have been](Self::may_have_committed); let
/// it come again in any case.
#[derive(Debug)]
pub struct InboxError(Fault);

impl Default for Inbox {
    /// Marks are kept for seven days; an event that has failed five times is poisoned; a transaction has five minutes.
    fn default() -> Self {
        Self { keep: Duration::from_secs(7 * 24 * 3600), poison_after: 5, backoff: Backoff::default(), limit: LIMIT }
    }
}

impl Inbox {
    /// How long a mark is kept, and so how old an event may be. Longer than the broker keeps and redelivers messages.
    #[must_use]
    pub fn keep(self, keep: Duration) -> Self {
        Self { keep, ..self }
    }

    /// How many failures an event may have, at least one.
    #[must_use]
    pub fn poison_after(self, failures: u32) -> Self {
        Self { poison_after: failures.max(1), ..self }
    }

    /// When failed events should come again.
    #[must_use]
    pub fn backoff(self, backoff: Backoff) -> Self {
        Self { backoff, ..self }
    }

    /// How long a transaction of [`handle`](Self::handle) or [`handle_batch`](Self::handle_batch) may take, handlers included.
    /// One that takes longer, because the server is silent for example, is given up with its connection.
    #[must_use]
    pub fn limit(self, limit: Duration) -> Self {
        Self { limit, ..self }
    }

    /// Marks an event as handled in your transaction. The mark is there once you commit, and gone if you do not.
    ///
    /// If another transaction has marked it and not ended yet, this waits for it (as long as `lock_timeout` allows): a
    /// duplicate if that one commits. Whoever claims several events in one transaction one by one may wait in a circle
    /// with somebody who does so in another order; [`claim_batch`](Self::claim_batch) does not.
    ///
    /// Commit only if nothing failed: PostgreSQL answers the COMMIT of a failed transaction by rolling back, without an
    /// error, and an event that is acknowledged then is lost.
    ///
    /// # Errors
    /// If the database could not be asked: roll back, and let the event come again.
    pub async fn claim<T: Transaction>(&self, tx: &mut T, event: &Event) -> Result<Claimed, InboxError> {
        let mut claims = self.claim_batch(tx, std::slice::from_ref(event)).await?;
        claims.pop().ok_or_else(|| InboxError(Fault::unreadable("a claim without an answer")))
    }

    /// Marks many events, in one statement. The answers are in the order of the events; of an event that is there twice
    /// the second is a duplicate.
    ///
    /// If one of them then fails, roll back to a savepoint from before it was handled and [take back](Self::unclaim) its
    /// mark; the others keep theirs. [`handle_batch`](Self::handle_batch) does that.
    ///
    /// # Errors
    /// As [`claim`](Self::claim); also if there are more than [`MAX_BATCH`].
    pub async fn claim_batch<T: Transaction>(&self, tx: &mut T, events: &[Event]) -> Result<Vec<Claimed>, InboxError> {
        if events.is_empty() {
            return Ok(Vec::new());
        }
        if events.len() > MAX_BATCH {
            let said = format!("a batch of {} events; allowed are at most {MAX_BATCH}", events.len());
            return Err(InboxError(Fault::unreadable(said)));
        }
        let consumers: Vec<&str> = events.iter().map(Event::consumer).collect();
        let sources: Vec<&str> = events.iter().map(Event::source).collect();
        let ids: Vec<&str> = events.iter().map(Event::id).collect();
        let ats: Vec<i64> = events.iter().map(|event| event.at().map_or(NEVER, micros)).collect();
        let values = [
            Value::Texts(&consumers),
            Value::Texts(&sources),
            Value::Texts(&ids),
            Value::Bigints(&ats),
            Value::Bigint(Some(self.keep_us())),
            Value::Integer(Some(i32::try_from(self.poison_after).unwrap_or(i32::MAX))),
        ];
        let sql =
            "SELECT c.found, c.attempts, c.error FROM ibid._claim_events($1, $2, $3, $4, $5, $6) c ORDER BY c.nth";
        let rows = tx.rows(sql, &values).await?;
        if rows.len() != events.len() {
            let said = format!("{} answers to {} claims", rows.len(), events.len());
            return Err(InboxError(Fault::unreadable(said)));
        }
        rows.iter().map(|row| Ok(claimed(row)?)).collect()
    }

    /// Takes back the mark that this transaction made, so that it can commit without this event. `false` if there is none.
    ///
    /// # Errors
    /// As [`claim`](Self::claim).
    pub async fn unclaim<T: Transaction>(&self, tx: &mut T, event: &Event) -> Result<bool, InboxError> {
        let sql = "SELECT ibid._unclaim_event($1, $2, $3)";
        let rows = tx.rows(sql, &named(event)).await?;
        Ok(only(&rows)?.boolean(0)?.unwrap_or(false))
    }

    /// Counts a failure, in a transaction of its own, because the handler's was rolled back. Roll back first: this must not
    /// wait for a transaction that waits for this.
    ///
    /// # Errors
    /// If it could not be counted. Let the event come again all the same.
    pub async fn failed<P: Pool>(
        &self, pool: &P, event: &Event, error: &(impl fmt::Display + ?Sized),
    ) -> Result<Failures, InboxError> {
        // Text in PostgreSQL has no zero bytes.
        let error = error.to_string().replace('\0', " ");
        let keep = Value::Bigint(Some(self.keep_us()));
        let [consumer, source, id] = named(event);
        let values = [consumer, source, id, Value::Text(Some(&error)), keep];
        let rows = self.in_its_own(pool, "SELECT ibid._event_failed($1, $2, $3, $4, $5)", &values).await?;
        let attempts = Row::known(only(&rows)?.integer(0)?, "the number of failures")?;
        let attempts = u32::try_from(attempts).unwrap_or_default();
        Ok(Failures { attempts, poisoned: attempts >= self.poison_after })
    }

    /// Forgets an event, its mark and its failures, so that the next delivery of it is new whatever its age: before it is
    /// sent again from a dead-letter queue. Whether there was anything to forget: it was handled, or has failed.
    ///
    /// # Errors
    /// As [`claim`](Self::claim).
    pub async fn forget<T: Transaction>(&self, tx: &mut T, event: &Event) -> Result<bool, InboxError> {
        let [consumer, source, id] = named(event);
        let values = [consumer, source, id, Value::Bigint(Some(self.keep_us()))];
        let rows = tx.rows("SELECT ibid._forget_event($1, $2, $3, $4)", &values).await?;
        Ok(only(&rows)?.boolean(0)?.unwrap_or(false))
    }

    /// Removes at most so many marks and failures that have had their time, in a transaction of its own. Gateways on this
    /// database and `ibid sweep` do the same; without any of them call it now and then, until there is no more.
    ///
    /// # Errors
    /// If the database could not be asked.
    pub async fn sweep<P: Pool>(&self, pool: &P, at_most: u32) -> Result<Swept, InboxError> {
        let at_most = Value::Integer(Some(i32::try_from(at_most).unwrap_or(i32::MAX)));
        let rows = self.in_its_own(pool, "SELECT s.removed, s.more FROM ibid._sweep_events($1) s", &[at_most]).await?;
        let row = only(&rows)?;
        let removed = u32::try_from(row.integer(0)?.unwrap_or_default()).unwrap_or_default();
        Ok(Swept { removed, more: row.boolean(1)?.unwrap_or(false) })
    }

    async fn in_its_own<P: Pool>(
        &self, pool: &P, sql: &'static str, values: &[Value<'_>],
    ) -> Result<Vec<Row>, InboxError> {
        let mut connection = self.connection(pool).await?;
        let done = timeout(self.limit, async {
            let mut tx = connection.begin(None).await?;
            let rows = tx.rows(sql, values).await?;
            tx.commit().await?;
            Ok(rows)
        });
        done.await.unwrap_or_else(|_| Err(given_up(connection)))
    }

    async fn connection<P: Pool>(&self, pool: &P) -> Result<P::Of, InboxError> {
        let connected = timeout(self.limit, pool.connection()).await;
        Ok(connected.unwrap_or_else(|_| Err(Fault::silent("a pool's call for a connection")))?)
    }

    fn keep_us(&self) -> i64 {
        i64::try_from(self.keep.min(LONGEST).as_micros()).unwrap_or(i64::MAX)
    }
}

/// What is given up may be silent, or busy with what nobody wants any more: nobody gets it again.
fn given_up(connection: impl Connection) -> InboxError {
    connection.discard();
    Fault::silent("a transaction of the inbox").into()
}

fn named(event: &Event) -> [Value<'_>; 3] {
    [event.consumer(), event.source(), event.id()].map(|part| Value::Text(Some(part)))
}

fn only(rows: &[Row]) -> Result<&Row, Fault> {
    rows.first().ok_or_else(|| Fault::unreadable("an empty answer"))
}

fn claimed(row: &Row) -> Result<Claimed, Fault> {
    Ok(match Row::known(row.smallint(0)?, "what a claim found")? {
        0 => Claimed::New,
        1 => Claimed::Duplicate,
        2 => Claimed::TooOld,
        3 => Claimed::Poisoned {
            attempts: u32::try_from(row.integer(1)?.unwrap_or_default()).unwrap_or_default(),
            error: row.text(2)?.unwrap_or_default(),
        },
        other => return Err(Fault::unreadable(format!("a claim found {other}"))),
    })
}

fn micros(at: SystemTime) -> i64 {
    let us = |span: Duration| i64::try_from(span.as_micros()).unwrap_or(i64::MAX);
    match at.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(after) => us(after).min(LAST_US),
        Err(before) => (-us(before.duration())).max(FIRST_US),
    }
}

impl InboxError {
    /// Whether the transaction was only in the way of another (a serialization failure, a deadlock) and is worth another
    /// try at once.
    pub fn is_transient(&self) -> bool {
        self.0.is_transient()
    }

    /// Whether the connection broke while something was to be committed: the event may have been handled. The next
    /// delivery finds out.
    pub fn may_have_committed(&self) -> bool {
        self.0.kind == FaultKind::Lost
    }

    /// The server's SQLSTATE, if it answered.
    pub fn sqlstate(&self) -> Option<&str> {
        self.0.code.as_deref()
    }
}

impl From<Fault> for InboxError {
    fn from(fault: Fault) -> Self {
        Self(fault)
    }
}

impl fmt::Display for InboxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let then = match self.sqlstate() {
            Some("3F000" | "42P01" | "42883") => "; run ibid migrate on this database",
            Some("42501") => "; this role must be a member of ibid_service",
            _ => "",
        };
        write!(f, "the inbox: {}{then}", self.0)
    }
}

impl Error for InboxError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source()
    }
}
