//! The driver interface: runs statements inside a transaction, the first with its BEGIN and the last with its COMMIT.
//!
//! Statements that travel with BEGIN or COMMIT are one simple-query message: if one fails, the rest is not run, and there is
//! one Sync for all. Their arguments are constants of digits and letters, so nothing has to be escaped.
//!
//! Invariant: pools, clients and connections do not implement it. Outside a transaction each statement commits by
//! itself, so nothing would commit together with the business write.

use std::ops::{Deref, DerefMut};

use bytes::Bytes;
use data_encoding::HEXLOWER;

#[cfg(feature = "sqlx")]
mod sqlx_driver;
#[cfg(feature = "tokio-postgres")]
mod tokio_postgres_driver;
#[cfg(feature = "tokio-postgres")]
pub use self::tokio_postgres_driver::PooledTransaction;

/// An open transaction: `sqlx::Transaction<'_, Postgres>`, `tokio_postgres::Transaction<'_>`, deadpool's, or the one that
/// `run_tx` opens on a deadpool connection, `PooledTransaction<'_>`.
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

    /// Begins a transaction.
    #[doc(hidden)]
    fn begin(&mut self, isolation: Option<Isolation>)
    -> impl Future<Output = Result<Self::Tx<'_>, DriverError>> + Send;

    /// Begins a transaction and calls `function` in it, in one round trip. Its last parameter says whether it must raise
    /// `NOT_CLAIMED` instead of returning false. After that, which is `None`, [`end_unclaimed`](Self::end_unclaimed) makes the
    /// connection usable again.
    #[doc(hidden)]
    fn begin_claimed<'c>(
        &'c mut self, isolation: Option<Isolation>, function: &'static str, values: &'c [SqlValue<'c>],
    ) -> impl Future<Output = Result<Option<Self::Tx<'c>>, DriverError>> + Send;

    #[doc(hidden)]
    fn end_unclaimed(&mut self) -> impl Future<Output = Result<(), DriverError>> + Send;

    /// Runs one statement outside a transaction.
    #[doc(hidden)]
    fn query_outside<'a>(
        &'a mut self, sql: &'static str, values: &'a [SqlValue<'a>],
    ) -> impl Future<Output = Result<Vec<SqlRow>, DriverError>> + Send + 'a;

    /// Closes the connection instead of returning it to its pool.
    #[doc(hidden)]
    fn discard(self);
}

/// A connection that is closed when it is dropped, unless it was given back: a future that is dropped, or a panic, may leave
/// it in the middle of a transaction.
pub(crate) struct TxCheckout<C: TxConnection>(Option<C>);

impl<C: TxConnection> TxCheckout<C> {
    pub(crate) fn new(connection: C) -> Self {
        Self(Some(connection))
    }

    /// Returns the connection to its pool.
    pub(crate) fn give_back(mut self) {
        drop(self.0.take());
    }
}

impl<C: TxConnection> Deref for TxCheckout<C> {
    type Target = C;

    fn deref(&self) -> &C {
        self.0.as_ref().expect("it is there until it is given back")
    }
}

impl<C: TxConnection> DerefMut for TxCheckout<C> {
    fn deref_mut(&mut self) -> &mut C {
        self.0.as_mut().expect("it is there until it is given back")
    }
}

impl<C: TxConnection> Drop for TxCheckout<C> {
    fn drop(&mut self) {
        if let Some(connection) = self.0.take() {
            connection.discard();
        }
    }
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
        /// Runs a statement and commits, in one round trip. If the statement fails, so does the whole.
        fn commit_after(self, sql: String) -> impl Future<Output = Result<(), DriverError>> + Send;
    }
}

/// SQLSTATE of a claim that is not granted.
pub(crate) const NOT_CLAIMED: &str = "IB005";

/// Returns the SQL of a call with literal arguments.
pub(crate) fn call_sql(function: &str, values: &[SqlValue<'_>]) -> String {
    let mut sql = format!("SELECT ibid.{function}(");
    for (nth, value) in values.iter().enumerate() {
        sql += if nth == 0 { "" } else { ", " };
        value.write_literal(&mut sql);
    }
    sql + ")"
}

fn begin_sql(isolation: Option<Isolation>) -> &'static str {
    match isolation {
        None => "BEGIN",
        Some(Isolation::ReadCommitted) => "BEGIN ISOLATION LEVEL READ COMMITTED",
        Some(Isolation::RepeatableRead) => "BEGIN ISOLATION LEVEL REPEATABLE READ",
        Some(Isolation::Serializable) => "BEGIN ISOLATION LEVEL SERIALIZABLE",
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
    /// A value of a composite type. Only in the SQL of [`call_sql`].
    Row(&'a [Self]),
}

impl SqlValue<'_> {
    /// Writes a constant of the SQL type. The server reads it by itself; a call, even of a cast, would cost it more than all
    /// the rest of the constant.
    fn write_literal(&self, sql: &mut String) {
        match *self {
            Self::Bytea(Some(value)) => write_bytea(value, sql),
            Self::Text(Some(value)) => write_text(value, sql),
            Self::Bigint(Some(value)) => *sql += &format!("bigint '{value}'"),
            Self::Integer(Some(value)) => *sql += &format!("integer '{value}'"),
            Self::Smallint(Some(value)) => *sql += &format!("smallint '{value}'"),
            Self::Boolean(Some(value)) => *sql += if value { "true" } else { "false" },
            Self::Byteas(values) => write_list("bytea", values, sql, |value, sql| write_bytea(value, sql)),
            Self::Texts(values) => write_list("text", values, sql, |value, sql| write_text(value, sql)),
            Self::Bigints(values) => write_list("bigint", values, sql, |value, sql| *sql += &format!("({value})")),
            Self::Row(values) => write_row(values, sql),
            Self::Bytea(None) => *sql += "NULL::bytea",
            Self::Text(None) => *sql += "NULL::text",
            Self::Bigint(None) => *sql += "NULL::bigint",
            Self::Integer(None) => *sql += "NULL::integer",
            Self::Smallint(None) => *sql += "NULL::smallint",
            Self::Boolean(None) => *sql += "NULL::boolean",
        }
    }
}

/// In a string with `E` two backslashes are one, whatever the server's `standard_conforming_strings` is.
fn write_bytea(value: &[u8], sql: &mut String) {
    *sql += r"bytea E'\\x";
    HEXLOWER.encode_append(value, sql);
    *sql += "'";
}

/// Text of [plain](is_plain_byte) characters is written as it is, any other by its bytes.
fn write_text(value: &str, sql: &mut String) {
    if value.bytes().all(is_plain_byte) {
        *sql += &format!("text '{value}'");
    } else {
        *sql += "convert_from(";
        write_bytea(value.as_bytes(), sql);
        *sql += ", 'UTF8')";
    }
}

/// One constant for many columns: the server reads it much faster than a constant each. Whatever is not
/// [plain](is_plain_byte) is written by its bytes, and a quote or backslash of a value is doubled.
fn write_row(values: &[SqlValue<'_>], sql: &mut String) {
    *sql += "E'(";
    for (nth, value) in values.iter().enumerate() {
        *sql += if nth == 0 { "" } else { "," };
        match *value {
            SqlValue::Bytea(Some(value)) => {
                *sql += r"\\\\x";
                HEXLOWER.encode_append(value, sql);
            }
            SqlValue::Text(Some(value)) => write_row_text(value, sql),
            SqlValue::Bigint(Some(value)) => *sql += &value.to_string(),
            SqlValue::Integer(Some(value)) => *sql += &value.to_string(),
            SqlValue::Smallint(Some(value)) => *sql += &value.to_string(),
            SqlValue::Boolean(Some(value)) => *sql += if value { "t" } else { "f" },
            SqlValue::Byteas(_) | SqlValue::Texts(_) | SqlValue::Bigints(_) | SqlValue::Row(_) => {
                unreachable!("a row has neither lists nor rows in it")
            }
            _ => {} // NULL
        }
    }
    *sql += ")'";
}

fn write_row_text(value: &str, sql: &mut String) {
    sql.push('"');
    for byte in value.bytes() {
        match byte {
            b'"' | b'\\' => *sql += &format!(r"\x{byte:02x}\x{byte:02x}"),
            byte if is_plain_byte(byte) => sql.push(char::from(byte)),
            byte => *sql += &format!(r"\x{byte:02x}"),
        }
    }
    sql.push('"');
}

/// Whether a character means nothing to the server in any string.
fn is_plain_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b" -_./:@".contains(&byte)
}

fn write_list<T>(of: &str, values: &[T], sql: &mut String, write: impl Fn(&T, &mut String)) {
    *sql += "ARRAY[";
    for (nth, value) in values.iter().enumerate() {
        *sql += if nth == 0 { "" } else { ", " };
        write(value, sql);
    }
    *sql += &format!("]::{of}[]");
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_constants_in_which_nothing_ends_the_string() {
        let values = [
            SqlValue::Bytea(Some(b"\0'\\")),
            SqlValue::Text(Some("POST /orders")),
            SqlValue::Text(Some("o'clock \\ \u{e9}")),
            SqlValue::Bigint(Some(-5)),
            SqlValue::Smallint(None),
            SqlValue::Boolean(Some(true)),
            SqlValue::Byteas(&[b"a", b"b"]),
        ];
        let expected = r"SELECT ibid.f(bytea E'\\x00275c', text 'POST /orders', \
            convert_from(bytea E'\\x6f27636c6f636b205c20c3a9', 'UTF8'), bigint '-5', NULL::smallint, true, \
            ARRAY[bytea E'\\x61', bytea E'\\x62']::bytea[])";
        let expected: String = expected.split("\\\n").map(str::trim_start).collect();
        assert_eq!(call_sql("f", &values), expected);
    }

    #[test]
    fn a_row_is_one_constant_in_which_nothing_ends_the_string_or_the_column() {
        let values = [
            SqlValue::Bytea(Some(b"\0'")),
            SqlValue::Text(Some("")),
            SqlValue::Text(Some("it's \"a\\b\", \u{e9}")),
            SqlValue::Bigint(Some(-5)),
            SqlValue::Smallint(None),
            SqlValue::Boolean(Some(true)),
        ];
        let expected = r#"SELECT ibid.f(E'(\\\\x0027,"","it\x27s \x22\x22a\x5c\x5cb\x22\x22\x2c \xc3\xa9",-5,,t)')"#;
        assert_eq!(call_sql("f", &[SqlValue::Row(&values)]), expected);
    }
}
