//! The driver interface: runs one statement at a time, inside a transaction.
//!
//! Invariant: pools, clients and connections do not implement it. Outside a transaction each statement commits by
//! itself, so nothing would commit together with the business write.

use bytes::Bytes;

#[cfg(feature = "sqlx")]
mod sqlx_driver;
#[cfg(feature = "tokio-postgres")]
mod tokio_postgres_driver;

/// An open transaction: `sqlx::Transaction<'_, Postgres>`, `tokio_postgres::Transaction<'_>` or deadpool's.
///
/// Sealed, and implemented for nothing else: a write through a pool or a bare connection would commit by itself.
pub trait Transaction: sealed::Sealed + Send {
    /// Runs one statement and returns its rows. `values` has one value per parameter.
    #[doc(hidden)]
    fn query_rows<'a>(
        &'a mut self, sql: &'static str, values: &'a [SqlValue<'a>],
    ) -> impl Future<Output = Result<Vec<SqlRow>, DriverError>> + Send + 'a;
}

/// A source of transactions: `sqlx::PgPool` or `deadpool_postgres::Pool`. Sealed.
pub trait TxPool: sealed::Sealed + Send + Sync {
    /// The pool's connection type.
    type Conn: TxConnection;

    /// Waits for a free connection.
    #[doc(hidden)]
    fn connection(&self) -> impl Future<Output = Result<Self::Conn, DriverError>> + Send;
}

/// A connection of a [`TxPool`]. Sealed.
pub trait TxConnection: sealed::Sealed + Send + 'static {
    /// The connection's transaction type.
    type Tx<'c>: Transaction + sealed::TransactionEnd + Send;

    #[doc(hidden)]
    fn begin(&mut self, isolation: Option<Isolation>)
    -> impl Future<Output = Result<Self::Tx<'_>, DriverError>> + Send;

    /// Closes the connection instead of returning it to its pool.
    #[doc(hidden)]
    fn discard(self);
}

/// Isolation level of a transaction: which commits of others it sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isolation {
    /// Those before each statement.
    ReadCommitted,
    /// Those before its first statement.
    RepeatableRead,
    /// As if transactions ran one after the other.
    Serializable,
}

pub(crate) mod sealed {
    use super::DriverError;

    /// Implemented for the types of the supported drivers only.
    pub trait Sealed {}

    /// Ends a transaction.
    pub trait TransactionEnd: Sized {
        /// Commits. `Ok` does not prove that there was something left to commit.
        fn commit(self) -> impl Future<Output = Result<(), DriverError>> + Send;
        fn rollback(self) -> impl Future<Output = Result<(), DriverError>> + Send;
    }
}

/// A parameter of a statement. Each variant is named after its SQL type.
#[derive(Debug, Clone, Copy)]
pub enum SqlValue<'a> {
    Bytea(Option<&'a [u8]>),
    Text(Option<&'a str>),
    Bigint(Option<i64>),
    Integer(Option<i32>),
    Smallint(Option<i16>),
    Boolean(Option<bool>),
    Byteas(&'a [&'a [u8]]),
    Texts(&'a [&'a str]),
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

/// An error of the database driver.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct DriverError {
    /// The consequence for the transaction.
    pub kind: DriverErrorKind,
    /// The server's SQLSTATE, if it replied.
    pub code: Option<String>,
    /// Description for people.
    pub message: String,
    /// The driver's own error.
    #[source]
    pub source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// What an error means for the transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DriverErrorKind {
    /// The server replied with an ERROR: the transaction can only be rolled back. A failed COMMIT was rolled back.
    RolledBack,
    /// There was no connection: nothing was sent.
    NotSent,
    /// The connection broke or timed out. A COMMIT may have succeeded.
    ConnectionLost,
    /// The reply has an unexpected form.
    Unreadable,
}

impl DriverError {
    /// Returns `true` after a serialization failure or deadlock: the transaction may succeed if it is run again.
    pub fn is_transient(&self) -> bool {
        self.kind == DriverErrorKind::RolledBack && self.code.as_deref().is_some_and(is_transient_code)
    }

    pub(crate) fn unreadable(said: impl Into<String>) -> Self {
        Self { kind: DriverErrorKind::Unreadable, code: None, message: said.into(), source: None }
    }

    /// Error of a transaction that the operation itself aborted, for a temporary reason.
    pub(crate) fn from_operation(error: Box<dyn std::error::Error + Send + Sync>) -> Self {
        let code = find_sqlstate(&*error);
        Self { kind: DriverErrorKind::RolledBack, code, message: error.to_string(), source: Some(error) }
    }

    pub(crate) fn timed_out(what: &str) -> Self {
        let message = format!("no answer to {what} in time");
        Self { kind: DriverErrorKind::ConnectionLost, code: None, message, source: None }
    }

    /// Error of a driver. `reply` is the server's: whether it is an ERROR, which rolls back, its SQLSTATE and its message.
    fn from_driver(
        error: impl std::error::Error + Send + Sync + 'static, reply: Option<(bool, String, String)>,
    ) -> Self {
        let (kind, code, message) = match reply {
            Some((is_error, code, message)) => {
                let kind = if is_error { DriverErrorKind::RolledBack } else { DriverErrorKind::ConnectionLost };
                let message = format!("{message} (SQLSTATE {code})");
                (kind, Some(code), message)
            }
            None => (DriverErrorKind::ConnectionLost, None, error.to_string()),
        };
        Self { kind, code, message, source: Some(Box::new(error)) }
    }
}

/// serialization_failure and deadlock_detected.
fn is_transient_code(code: &str) -> bool {
    matches!(code, "40001" | "40P01")
}

/// Returns the SQLSTATE of a driver error in a chain of errors.
pub(crate) fn find_sqlstate(error: &(dyn std::error::Error + 'static)) -> Option<String> {
    let mut next = Some(error);
    // The limit protects against cyclic chains.
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
    ($($name:ident: $type:ty;)*) => {
        $(pub(crate) fn $name(&self, at: usize) -> Result<Option<$type>, DriverError> {
            match &self.0 {
                #[cfg(feature = "sqlx")]
                DriverRow::Sqlx(row) => sqlx_driver::column(row, at),
                #[cfg(feature = "tokio-postgres")]
                DriverRow::TokioPostgres(row) => tokio_postgres_driver::column(row, at),
            }
        })*
    };
}

// Not every driver combination uses all getters.
#[allow(dead_code)]
impl SqlRow {
    getters! {
        bigint: i64;
        integer: i32;
        smallint: i16;
        boolean: bool;
        text: String;
        texts: Vec<String>;
        byte_vec: Vec<u8>;
    }

    pub(crate) fn bytea(&self, at: usize) -> Result<Option<Bytes>, DriverError> {
        Ok(self.byte_vec(at)?.map(Bytes::from))
    }

    /// Rejects NULL.
    pub(crate) fn require<T>(found: Option<T>, what: &str) -> Result<T, DriverError> {
        found.ok_or_else(|| DriverError::unreadable(format!("{what} is NULL")))
    }
}
