//! What is asked of a driver: one statement at a time, inside a transaction.
//!
//! Invariant: nothing here is implemented for a pool, a client or a connection. Outside a transaction each statement
//! commits by itself, and "together with the business write" would mean nothing.

use bytes::Bytes;

#[cfg(feature = "sqlx")]
mod sqlx_driver;
#[cfg(feature = "tokio-postgres")]
mod tokio_postgres_driver;

/// An open transaction: `sqlx::Transaction<'_, Postgres>`, `tokio_postgres::Transaction<'_>` or deadpool's.
///
/// Sealed, and implemented for nothing else: whatever is written through a pool or a bare connection would commit by
/// itself.
pub trait Transaction: sealed::StatementExecutor {}

/// Where transactions come from: `sqlx::PgPool` or `deadpool_postgres::Pool`. Sealed.
pub trait TxPool: sealed::ConnectionSource<Connection = Self::Conn> + Send + Sync {
    /// One of its connections.
    type Conn: TxConnection;
}

/// A connection of a [`TxPool`]. Sealed.
pub trait TxConnection: sealed::DiscardableConnection + Send + 'static {
    /// A transaction on it.
    type Tx<'c>: Transaction + sealed::TransactionEnd + Send;

    #[doc(hidden)]
    fn begin(&mut self, isolation: Option<Isolation>)
    -> impl Future<Output = Result<Self::Tx<'_>, DriverError>> + Send;
}

/// How much of other transactions a transaction sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isolation {
    /// What was committed before each statement.
    ReadCommitted,
    /// What was committed before the first statement.
    RepeatableRead,
    /// As if transactions ran one after the other.
    Serializable,
}

pub(crate) mod sealed {
    use super::{DriverError, SqlRow, SqlValue};

    /// Runs one statement.
    pub trait StatementExecutor: Send {
        /// All its rows. The number of values is the number of parameters.
        fn query_rows<'a>(
            &'a mut self, sql: &'static str, values: &'a [SqlValue<'a>],
        ) -> impl Future<Output = Result<Vec<SqlRow>, DriverError>> + Send + 'a;
    }

    /// Gives connections.
    pub trait ConnectionSource {
        /// One of them.
        type Connection;
        /// Waits for a free one.
        fn connection(&self) -> impl Future<Output = Result<Self::Connection, DriverError>> + Send;
    }

    /// Can be thrown away.
    pub trait DiscardableConnection {
        /// Not to be used by anybody again.
        fn discard(self);
    }

    /// Ends.
    pub trait TransactionEnd: Sized {
        /// Commits. An `Ok` does not say that there was something left to commit.
        fn commit(self) -> impl Future<Output = Result<(), DriverError>> + Send;
        /// Rolls back.
        fn rollback(self) -> impl Future<Output = Result<(), DriverError>> + Send;
    }
}

/// A parameter of a statement. What it is called is its type in SQL.
#[derive(Debug, Clone, Copy)]
pub enum SqlValue<'a> {
    /// `bytea`.
    Bytea(Option<&'a [u8]>),
    /// `text`.
    Text(Option<&'a str>),
    /// `bigint`.
    Bigint(Option<i64>),
    /// `integer`.
    Integer(Option<i32>),
    /// `smallint`.
    Smallint(Option<i16>),
    /// `boolean`.
    Boolean(Option<bool>),
    /// `bytea[]`.
    Byteas(&'a [&'a [u8]]),
    /// `text[]`.
    Texts(&'a [&'a str]),
    /// `bigint[]`.
    Bigints(&'a [i64]),
}

/// A row of either driver. Columns count from 0; NULL is `None`.
#[derive(Debug)]
pub struct SqlRow(DriverRow);

#[derive(Debug)]
enum DriverRow {
    #[cfg(feature = "sqlx")]
    Sqlx(sqlx::postgres::PgRow),
    #[cfg(feature = "tokio-postgres")]
    TokioPostgres(tokio_postgres::Row),
}

/// What a driver could not do.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct DriverError {
    /// What became of the transaction.
    pub kind: DriverErrorKind,
    /// The server's SQLSTATE, if it answered.
    pub code: Option<String>,
    /// For people.
    pub message: String,
    /// The driver's error.
    #[source]
    pub source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// What a failure says about the transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DriverErrorKind {
    /// The server answered with an ERROR: it can only be rolled back. Of a COMMIT: it was.
    RolledBack,
    /// No connection was to be had: nothing was sent.
    NotSent,
    /// The connection broke or fell silent. Of a COMMIT: it may have taken place.
    ConnectionLost,
    /// The answer is not what was asked for.
    Unreadable,
}

impl DriverError {
    /// Whether the transaction was only in the way of another, and may succeed if it is run again.
    pub fn is_transient(&self) -> bool {
        self.kind == DriverErrorKind::RolledBack && self.code.as_deref().is_some_and(is_transient_code)
    }

    pub(crate) fn unreadable(said: impl Into<String>) -> Self {
        Self { kind: DriverErrorKind::Unreadable, code: None, message: said.into(), source: None }
    }

    /// Of a transaction that the operation itself gave up, for a reason that passes.
    pub(crate) fn from_operation(error: Box<dyn std::error::Error + Send + Sync>) -> Self {
        let code = find_sqlstate(&*error);
        Self { kind: DriverErrorKind::RolledBack, code, message: error.to_string(), source: Some(error) }
    }

    pub(crate) fn timed_out(what: &str) -> Self {
        Self {
            kind: DriverErrorKind::ConnectionLost,
            code: None,
            message: format!("no answer to {what} in time"),
            source: None,
        }
    }
}

/// serialization_failure and deadlock_detected.
fn is_transient_code(code: &str) -> bool {
    matches!(code, "40001" | "40P01")
}

/// The SQLSTATE somewhere in a chain of errors, if one of the drivers put it there.
pub(crate) fn find_sqlstate(error: &(dyn std::error::Error + 'static)) -> Option<String> {
    let mut next = Some(error);
    // No chain is as long as this, unless it has no end.
    for _ in 0..32 {
        let error = next?;
        if let Some(fault) = error.downcast_ref::<DriverError>() {
            return fault.code.clone();
        }
        #[cfg(feature = "sqlx")]
        if let Some(code) = sqlx_driver::sqlstate(error) {
            return Some(code);
        }
        #[cfg(feature = "tokio-postgres")]
        if let Some(code) = tokio_postgres_driver::sqlstate(error) {
            return Some(code);
        }
        next = error.source();
    }
    None
}

pub(crate) fn has_transient_sqlstate(error: &(dyn std::error::Error + 'static)) -> bool {
    find_sqlstate(error).as_deref().is_some_and(is_transient_code)
}

macro_rules! getters {
    ($($(#[$doc:meta])* $name:ident: $type:ty;)*) => {
        $($(#[$doc])*
        pub(crate) fn $name(&self, at: usize) -> Result<Option<$type>, DriverError> {
            match &self.0 {
                #[cfg(feature = "sqlx")]
                DriverRow::Sqlx(row) => sqlx_driver::column(row, at),
                #[cfg(feature = "tokio-postgres")]
                DriverRow::TokioPostgres(row) => tokio_postgres_driver::column(row, at),
            }
        })*
    };
}

// What only one of our two users reads is still part of what a row can do.
#[allow(dead_code)]
impl SqlRow {
    getters! {
        /// A `bigint`.
        bigint: i64;
        /// An `integer`.
        integer: i32;
        /// A `smallint`.
        smallint: i16;
        /// A `boolean`.
        boolean: bool;
        /// A `text`.
        text: String;
        /// A `text[]`.
        texts: Vec<String>;
    }

    /// A `bytea`.
    pub(crate) fn bytea(&self, at: usize) -> Result<Option<Bytes>, DriverError> {
        let found: Option<Vec<u8>> = match &self.0 {
            #[cfg(feature = "sqlx")]
            DriverRow::Sqlx(row) => sqlx_driver::column(row, at)?,
            #[cfg(feature = "tokio-postgres")]
            DriverRow::TokioPostgres(row) => tokio_postgres_driver::column(row, at)?,
        };
        Ok(found.map(Bytes::from))
    }

    /// What must not be NULL.
    pub(crate) fn require<T>(found: Option<T>, what: &str) -> Result<T, DriverError> {
        found.ok_or_else(|| DriverError::unreadable(format!("{what} is NULL")))
    }
}
