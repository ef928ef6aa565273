//! The driver for sqlx.

use sqlx::{
    AssertSqlSafe, Connection as _, PgConnection, Postgres, Row as _,
    error::DatabaseError,
    pool::PoolConnection,
    postgres::{PgDatabaseError, PgPool, PgRow, PgSeverity},
};

use super::{
    DriverError, DriverErrorKind, DriverRow, Isolation, NOT_CLAIMED, SqlRow, SqlValue, Transaction, TxConnection,
    TxPool, begin_sql, call_sql, sealed,
};

impl sealed::Sealed for PgPool {}
impl sealed::Sealed for PoolConnection<Postgres> {}
impl sealed::Sealed for sqlx::Transaction<'_, Postgres> {}

impl Transaction for sqlx::Transaction<'_, Postgres> {
    async fn query_rows<'a>(
        &'a mut self, sql: &'static str, values: &'a [SqlValue<'a>],
    ) -> Result<Vec<SqlRow>, DriverError> {
        query_rows(self, sql, values).await
    }
}

async fn query_rows(
    connection: &mut PgConnection, sql: &'static str, values: &[SqlValue<'_>],
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
            SqlValue::Row(_) => unreachable!("a row is no parameter"),
        };
    }
    let rows = query.fetch_all(connection).await.map_err(driver_error)?;
    Ok(rows.into_iter().map(|row| SqlRow(DriverRow::Sqlx(row))).collect())
}

impl sealed::TransactionEnd for sqlx::Transaction<'_, Postgres> {
    async fn commit(self) -> Result<(), DriverError> {
        sqlx::Transaction::commit(self).await.map_err(driver_error)
    }

    async fn rollback(self) -> Result<(), DriverError> {
        sqlx::Transaction::rollback(self).await.map_err(driver_error)
    }

    /// Leaves an empty transaction to sqlx, which knows nothing of our COMMIT and ends it before the connection is used
    /// again.
    async fn commit_after(mut self, sql: String) -> Result<(), DriverError> {
        let sql = AssertSqlSafe(sql + "; COMMIT AND CHAIN");
        sqlx::raw_sql(sql).execute(&mut *self).await.map(drop).map_err(driver_error)
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
        self.begin_with(begin_sql(isolation)).await.map_err(driver_error)
    }

    async fn begin_claimed<'c>(
        &'c mut self, isolation: Option<Isolation>, function: &'static str, values: &'c [SqlValue<'c>],
    ) -> Result<Option<Self::Tx<'c>>, DriverError> {
        let raises = [SqlValue::Boolean(Some(true))];
        let sql = format!("{}; {}", begin_sql(isolation), call_sql(function, &[values, &raises].concat()));
        // sqlx drops the rows of what travels with BEGIN.
        match self.begin_with(AssertSqlSafe(sql)).await.map_err(driver_error) {
            Ok(tx) => Ok(Some(tx)),
            Err(error) if error.code.as_deref() == Some(NOT_CLAIMED) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn end_unclaimed(&mut self) -> Result<(), DriverError> {
        sqlx::raw_sql("ROLLBACK").execute(&mut **self).await.map(drop).map_err(driver_error)
    }

    async fn query_outside<'a>(
        &'a mut self, sql: &'static str, values: &'a [SqlValue<'a>],
    ) -> Result<Vec<SqlRow>, DriverError> {
        query_rows(self, sql, values).await
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
