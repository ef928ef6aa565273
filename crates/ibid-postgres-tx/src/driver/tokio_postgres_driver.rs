//! The driver for tokio-postgres, bare and pooled by deadpool.
//!
//! Statements are unnamed and sent with their types: one round trip, and compatible with a pooler in transaction mode.

use std::{
    ops::Deref,
    pin::pin,
    task::{Context, Waker},
};

use tokio_postgres::{
    Error, SimpleQueryMessage,
    error::{DbError, Severity},
    types::{FromSql, ToSql, Type},
};

use super::{
    DriverError, DriverErrorKind, DriverRow, Isolation, SqlRow, SqlValue, Transaction, TxConnection, TxPool, begin_sql,
    call_sql, sealed,
};

impl sealed::Sealed for deadpool_postgres::Pool {}
impl sealed::Sealed for deadpool_postgres::Client {}
impl sealed::Sealed for deadpool_postgres::Transaction<'_> {}
impl sealed::Sealed for tokio_postgres::Transaction<'_> {}
impl sealed::Sealed for PooledTransaction<'_> {}

/// A transaction, or a savepoint in one, on a connection of a deadpool pool: what `run_tx` and the inbox give to operations.
///
/// Dereferences to the client, whose statements run in the transaction. (tokio-postgres has a type of its own for this, which
/// always waits for its BEGIN before anything else can be sent.)
#[derive(Debug)]
pub struct PooledTransaction<'c> {
    client: &'c mut deadpool_postgres::Client,
    /// Nested so deep: 0 is the transaction itself.
    depth: u32,
    is_ended: bool,
}

impl<'c> PooledTransaction<'c> {
    fn new(client: &'c mut deadpool_postgres::Client) -> Self {
        Self { client, depth: 0, is_ended: false }
    }

    /// Begins a savepoint, which is rolled back if it is dropped.
    ///
    /// # Errors
    /// Returns an error if the server does not begin it.
    pub async fn savepoint(&mut self) -> Result<PooledTransaction<'_>, Error> {
        let depth = self.depth + 1;
        self.client.batch_execute(&format!("SAVEPOINT ibid_{depth}")).await?;
        Ok(PooledTransaction { client: self.client, depth, is_ended: false })
    }

    /// Keeps what was done since the savepoint. Only savepoints are yours to end.
    ///
    /// # Errors
    /// Returns an error if a statement has failed since.
    pub async fn commit(mut self) -> Result<(), Error> {
        let sql = if self.depth == 0 { "COMMIT".into() } else { format!("RELEASE SAVEPOINT ibid_{}", self.depth) };
        self.is_ended = true;
        self.client.batch_execute(&sql).await
    }

    /// Undoes what was done since the savepoint.
    ///
    /// # Errors
    /// Returns an error if the connection is lost.
    pub async fn rollback(mut self) -> Result<(), Error> {
        self.is_ended = true;
        self.client.batch_execute(&self.rollback_sql()).await
    }

    fn rollback_sql(&self) -> String {
        if self.depth == 0 { "ROLLBACK".into() } else { format!("ROLLBACK TO SAVEPOINT ibid_{}", self.depth) }
    }
}

impl Deref for PooledTransaction<'_> {
    type Target = deadpool_postgres::ClientWrapper;

    fn deref(&self) -> &Self::Target {
        self.client
    }
}

impl Drop for PooledTransaction<'_> {
    fn drop(&mut self) {
        if !self.is_ended {
            // The first poll sends it; the reply is nobody's.
            let rollback = self.rollback_sql();
            let rollback = pin!(self.client.batch_execute(&rollback));
            let _ = rollback.poll(&mut Context::from_waker(Waker::noop()));
        }
    }
}

async fn query_rows(
    client: &tokio_postgres::Client, sql: &'static str, values: &[SqlValue<'_>],
) -> Result<Vec<SqlRow>, DriverError> {
    let params: Vec<(&(dyn ToSql + Sync), Type)> = values.iter().map(typed_param).collect();
    let rows = client.query_typed(sql, &params).await.map_err(driver_error)?;
    Ok(rows.into_iter().map(|row| SqlRow(DriverRow::TokioPostgres(row))).collect())
}

impl Transaction for PooledTransaction<'_> {
    async fn query_rows<'a>(
        &'a mut self, sql: &'static str, values: &'a [SqlValue<'a>],
    ) -> Result<Vec<SqlRow>, DriverError> {
        query_rows(self.client, sql, values).await
    }
}

impl Transaction for tokio_postgres::Transaction<'_> {
    async fn query_rows<'a>(
        &'a mut self, sql: &'static str, values: &'a [SqlValue<'a>],
    ) -> Result<Vec<SqlRow>, DriverError> {
        let params: Vec<(&(dyn ToSql + Sync), Type)> = values.iter().map(typed_param).collect();
        let rows = self.query_typed(sql, &params).await.map_err(driver_error)?;
        Ok(rows.into_iter().map(|row| SqlRow(DriverRow::TokioPostgres(row))).collect())
    }
}

impl Transaction for deadpool_postgres::Transaction<'_> {
    async fn query_rows<'a>(
        &'a mut self, sql: &'static str, values: &'a [SqlValue<'a>],
    ) -> Result<Vec<SqlRow>, DriverError> {
        Transaction::query_rows(&mut **self, sql, values).await
    }
}

fn typed_param<'a>(value: &'a SqlValue<'a>) -> (&'a (dyn ToSql + Sync), Type) {
    match value {
        SqlValue::Bytea(value) => (value, Type::BYTEA),
        SqlValue::Text(value) => (value, Type::TEXT),
        SqlValue::Bigint(value) => (value, Type::INT8),
        SqlValue::Integer(value) => (value, Type::INT4),
        SqlValue::Smallint(value) => (value, Type::INT2),
        SqlValue::Boolean(value) => (value, Type::BOOL),
        SqlValue::Byteas(values) => (values, Type::BYTEA_ARRAY),
        SqlValue::Texts(values) => (values, Type::TEXT_ARRAY),
        SqlValue::Bigints(values) => (values, Type::INT8_ARRAY),
        SqlValue::Row(_) => unreachable!("a row is no parameter"),
    }
}

impl sealed::TransactionEnd for PooledTransaction<'_> {
    async fn commit(self) -> Result<(), DriverError> {
        Self::commit(self).await.map_err(driver_error)
    }

    async fn rollback(self) -> Result<(), DriverError> {
        Self::rollback(self).await.map_err(driver_error)
    }

    async fn commit_after(mut self, sql: String) -> Result<(), DriverError> {
        self.client.batch_execute(&(sql + "; COMMIT")).await.map_err(driver_error)?;
        self.is_ended = true;
        Ok(())
    }
}

/// These end their transaction when they are dropped, and know nothing of our COMMIT: an empty one is left to them.
macro_rules! end_of_driver_transaction {
    ($($transaction:ty)*) => {
        $(impl sealed::TransactionEnd for $transaction {
            async fn commit(self) -> Result<(), DriverError> {
                <$transaction>::commit(self).await.map_err(driver_error)
            }

            async fn rollback(self) -> Result<(), DriverError> {
                <$transaction>::rollback(self).await.map_err(driver_error)
            }

            async fn commit_after(self, sql: String) -> Result<(), DriverError> {
                self.batch_execute(&(sql + "; COMMIT AND CHAIN")).await.map_err(driver_error)
            }
        })*
    };
}

end_of_driver_transaction! {
    tokio_postgres::Transaction<'_>
    deadpool_postgres::Transaction<'_>
}

impl TxPool for deadpool_postgres::Pool {
    type Conn = deadpool_postgres::Client;

    async fn connection(&self) -> Result<Self::Conn, DriverError> {
        self.get().await.map_err(|error| {
            let code = sqlstate(&error).or_else(|| sqlstate(std::error::Error::source(&error)?));
            DriverError { kind: DriverErrorKind::NotSent, code, ..DriverError::from_driver(error, None) }
        })
    }
}

impl TxConnection for deadpool_postgres::Client {
    type Tx<'c> = PooledTransaction<'c>;

    async fn begin(&mut self, isolation: Option<Isolation>) -> Result<Self::Tx<'_>, DriverError> {
        self.batch_execute(begin_sql(isolation)).await.map_err(driver_error)?;
        Ok(PooledTransaction::new(self))
    }

    async fn begin_claimed<'c>(
        &'c mut self, isolation: Option<Isolation>, function: &'static str, values: &'c [SqlValue<'c>],
    ) -> Result<Option<Self::Tx<'c>>, DriverError> {
        let raises = [SqlValue::Boolean(Some(false))];
        let sql = format!("{}; {}", begin_sql(isolation), call_sql(function, &[values, &raises].concat()));
        let messages = self.simple_query(&sql).await.map_err(driver_error)?;
        let is_claimed = messages.iter().any(|message| {
            matches!(message, SimpleQueryMessage::Row(row) if row.try_get(0).is_ok_and(|value| value == Some("t")))
        });
        Ok(if is_claimed { Some(PooledTransaction::new(self)) } else { None })
    }

    async fn end_unclaimed(&mut self) -> Result<(), DriverError> {
        self.batch_execute("ROLLBACK").await.map_err(driver_error)
    }

    async fn query_outside<'a>(
        &'a mut self, sql: &'static str, values: &'a [SqlValue<'a>],
    ) -> Result<Vec<SqlRow>, DriverError> {
        query_rows(self, sql, values).await
    }

    fn discard(self) {
        drop(Self::take(self));
    }
}

pub(super) fn column<'r, T: FromSql<'r>>(row: &'r tokio_postgres::Row, at: usize) -> Result<Option<T>, DriverError> {
    row.try_get(at).map_err(|error| DriverError::unreadable(error.to_string()))
}

pub(super) fn sqlstate(error: &(dyn std::error::Error + 'static)) -> Option<String> {
    if let Some(error) = error.downcast_ref::<Error>() {
        return Some(error.code()?.code().to_owned());
    }
    error.downcast_ref::<DbError>().map(|error| error.code().code().to_owned())
}

fn driver_error(error: Error) -> DriverError {
    let reply = error.as_db_error().map(|reply| {
        // An unparsed severity is a localized one: trust only the parsed one.
        let is_error = reply.parsed_severity() == Some(Severity::Error);
        (is_error, reply.code().code().to_owned(), reply.message().to_owned())
    });
    DriverError::from_driver(error, reply)
}
