//! The driver for sqlx.

use sqlx::{
    Connection as _, Postgres, Row as _,
    error::DatabaseError,
    pool::PoolConnection,
    postgres::{PgDatabaseError, PgPool, PgRow, PgSeverity},
};

use super::{
    DriverError, DriverErrorKind, DriverRow, Isolation, SqlRow, SqlValue, Transaction, TxConnection, TxPool, sealed,
};

impl sealed::Sealed for PgPool {}
impl sealed::Sealed for PoolConnection<Postgres> {}
impl sealed::Sealed for sqlx::Transaction<'_, Postgres> {}

impl Transaction for sqlx::Transaction<'_, Postgres> {
    async fn query_rows<'a>(
        &'a mut self, sql: &'static str, values: &'a [SqlValue<'a>],
    ) -> Result<Vec<SqlRow>, DriverError> {
        let mut query = sqlx::query(sql);
        for value in values {
            query = match *value {
                SqlValue::Bytea(value) => query.bind(value),
                SqlValue::Text(value) => query.bind(value),
                SqlValue::Bigint(value) => query.bind(value),
                SqlValue::Integer(value) => query.bind(value),
                SqlValue::Smallint(value) => query.bind(value),
                SqlValue::Boolean(value) => query.bind(value),
                SqlValue::Byteas(values) => query.bind(values),
                SqlValue::Texts(values) => query.bind(values),
                SqlValue::Bigints(values) => query.bind(values),
            };
        }
        let rows = query.fetch_all(&mut **self).await.map_err(driver_error)?;
        Ok(rows.into_iter().map(|row| SqlRow(DriverRow::Sqlx(row))).collect())
    }
}

impl sealed::TransactionEnd for sqlx::Transaction<'_, Postgres> {
    async fn commit(self) -> Result<(), DriverError> {
        sqlx::Transaction::commit(self).await.map_err(driver_error)
    }

    async fn rollback(self) -> Result<(), DriverError> {
        sqlx::Transaction::rollback(self).await.map_err(driver_error)
    }
}

impl TxPool for PgPool {
    type Conn = PoolConnection<Postgres>;

    async fn connection(&self) -> Result<Self::Conn, DriverError> {
        self.acquire().await.map_err(|error| DriverError { kind: DriverErrorKind::NotSent, ..driver_error(error) })
    }
}

impl TxConnection for PoolConnection<Postgres> {
    type Tx<'c> = sqlx::Transaction<'c, Postgres>;

    async fn begin(&mut self, isolation: Option<Isolation>) -> Result<Self::Tx<'_>, DriverError> {
        let began = match isolation {
            None => sqlx::Connection::begin(&mut **self).await,
            Some(Isolation::ReadCommitted) => self.begin_with("BEGIN ISOLATION LEVEL READ COMMITTED").await,
            Some(Isolation::RepeatableRead) => self.begin_with("BEGIN ISOLATION LEVEL REPEATABLE READ").await,
            Some(Isolation::Serializable) => self.begin_with("BEGIN ISOLATION LEVEL SERIALIZABLE").await,
        };
        began.map_err(driver_error)
    }

    fn discard(self) {
        drop(self.detach());
    }
}

/// Reads a column. `try_get` also checks its type.
pub(super) fn column<'r, T>(row: &'r PgRow, at: usize) -> Result<Option<T>, DriverError>
where
    T: sqlx::Decode<'r, Postgres> + sqlx::Type<Postgres>,
{
    row.try_get(at).map_err(|error| DriverError::unreadable(error.to_string()))
}

pub(super) fn sqlstate(error: &(dyn std::error::Error + 'static)) -> Option<String> {
    if let Some(error) = error.downcast_ref::<sqlx::Error>() {
        return Some(error.as_database_error()?.code()?.into_owned());
    }
    // The source type of `sqlx::Error`.
    if let Some(error) = error.downcast_ref::<Box<dyn DatabaseError>>() {
        return Some(error.code()?.into_owned());
    }
    error.downcast_ref::<PgDatabaseError>().map(|error| error.code().to_owned())
}

fn driver_error(error: sqlx::Error) -> DriverError {
    let reply = error.as_database_error().and_then(|reply| reply.try_downcast_ref::<PgDatabaseError>());
    let reply = reply.map(|reply| (reply.severity() == PgSeverity::Error, reply.code().into(), reply.message().into()));
    DriverError::from_driver(error, reply)
}
