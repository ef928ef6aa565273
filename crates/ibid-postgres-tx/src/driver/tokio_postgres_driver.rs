//! The driver for tokio-postgres, bare and pooled by deadpool.
//!
//! Statements are unnamed and sent with their types: one round trip, and compatible with a pooler in transaction mode.

use tokio_postgres::{
    Error, IsolationLevel,
    error::{DbError, Severity},
    types::{FromSql, ToSql, Type},
};

use super::{
    DriverError, DriverErrorKind, DriverRow, Isolation, SqlRow, SqlValue, Transaction, TxConnection, TxPool, sealed,
};

impl sealed::Sealed for deadpool_postgres::Pool {}
impl sealed::Sealed for deadpool_postgres::Client {}
impl sealed::Sealed for deadpool_postgres::Transaction<'_> {}
impl sealed::Sealed for tokio_postgres::Transaction<'_> {}

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
    }
}

impl sealed::TransactionEnd for deadpool_postgres::Transaction<'_> {
    async fn commit(self) -> Result<(), DriverError> {
        deadpool_postgres::Transaction::commit(self).await.map_err(driver_error)
    }

    async fn rollback(self) -> Result<(), DriverError> {
        deadpool_postgres::Transaction::rollback(self).await.map_err(driver_error)
    }
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
    type Tx<'c> = deadpool_postgres::Transaction<'c>;

    async fn begin(&mut self, isolation: Option<Isolation>) -> Result<Self::Tx<'_>, DriverError> {
        let mut builder = self.build_transaction();
        if let Some(isolation) = isolation {
            builder = builder.isolation_level(match isolation {
                Isolation::ReadCommitted => IsolationLevel::ReadCommitted,
                Isolation::RepeatableRead => IsolationLevel::RepeatableRead,
                Isolation::Serializable => IsolationLevel::Serializable,
            });
        }
        builder.start().await.map_err(driver_error)
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
