//! sqlx.

use sqlx::{
    Connection as _, Postgres, Row as _,
    error::DatabaseError,
    pool::PoolConnection,
    postgres::{PgDatabaseError, PgPool, PgRow, PgSeverity},
};

use super::{Connection, Fault, FaultKind, Inner, Isolation, Pool, Row, Transaction, Value, sealed};

impl Transaction for sqlx::Transaction<'_, Postgres> {}

impl sealed::Statements for sqlx::Transaction<'_, Postgres> {
    async fn rows<'a>(&'a mut self, sql: &'static str, values: &'a [Value<'a>]) -> Result<Vec<Row>, Fault> {
        let mut query = sqlx::query(sql);
        for value in values {
            query = match *value {
                Value::Bytea(value) => query.bind(value),
                Value::Text(value) => query.bind(value),
                Value::Bigint(value) => query.bind(value),
                Value::Integer(value) => query.bind(value),
                Value::Smallint(value) => query.bind(value),
                Value::Boolean(value) => query.bind(value),
                Value::Byteas(values) => query.bind(values),
                Value::Texts(values) => query.bind(values),
                Value::Bigints(values) => query.bind(values),
            };
        }
        let rows = query.fetch_all(&mut **self).await.map_err(fault)?;
        Ok(rows.into_iter().map(|row| Row(Inner::Sqlx(row))).collect())
    }
}

impl sealed::Ends for sqlx::Transaction<'_, Postgres> {
    async fn commit(self) -> Result<(), Fault> {
        sqlx::Transaction::commit(self).await.map_err(fault)
    }

    async fn rollback(self) -> Result<(), Fault> {
        sqlx::Transaction::rollback(self).await.map_err(fault)
    }
}

impl Pool for PgPool {
    type Of = PoolConnection<Postgres>;
}

impl sealed::Connections for PgPool {
    type Connection = PoolConnection<Postgres>;

    async fn connection(&self) -> Result<Self::Connection, Fault> {
        self.acquire().await.map_err(|error| Fault { kind: FaultKind::NotSent, ..fault(error) })
    }
}

impl Connection for PoolConnection<Postgres> {
    type Tx<'c> = sqlx::Transaction<'c, Postgres>;

    async fn begin(&mut self, isolation: Option<Isolation>) -> Result<Self::Tx<'_>, Fault> {
        let began = match isolation {
            None => sqlx::Connection::begin(&mut **self).await,
            Some(Isolation::ReadCommitted) => self.begin_with("BEGIN ISOLATION LEVEL READ COMMITTED").await,
            Some(Isolation::RepeatableRead) => self.begin_with("BEGIN ISOLATION LEVEL REPEATABLE READ").await,
            Some(Isolation::Serializable) => self.begin_with("BEGIN ISOLATION LEVEL SERIALIZABLE").await,
        };
        began.map_err(fault)
    }
}

impl sealed::Begins for PoolConnection<Postgres> {
    fn discard(self) {
        drop(self.detach());
    }
}

/// Reads a column. `try_get` also checks that its type is the one that is meant.
pub(super) fn column<'r, T>(row: &'r PgRow, at: usize) -> Result<Option<T>, Fault>
where
    T: sqlx::Decode<'r, Postgres> + sqlx::Type<Postgres>,
{
    row.try_get(at).map_err(|error| Fault::unreadable(error.to_string()))
}

pub(super) fn code(error: &(dyn std::error::Error + 'static)) -> Option<String> {
    if let Some(error) = error.downcast_ref::<sqlx::Error>() {
        return Some(error.as_database_error()?.code()?.into_owned());
    }
    // What `sqlx::Error` has as its source.
    if let Some(error) = error.downcast_ref::<Box<dyn DatabaseError>>() {
        return Some(error.code()?.into_owned());
    }
    error.downcast_ref::<PgDatabaseError>().map(|error| error.code().to_owned())
}

fn fault(error: sqlx::Error) -> Fault {
    let answer = error.as_database_error().and_then(|answer| answer.try_downcast_ref::<PgDatabaseError>());
    let (kind, code, said) = match answer {
        Some(answer) => {
            let kind = if answer.severity() == PgSeverity::Error { FaultKind::RolledBack } else { FaultKind::Lost };
            (kind, Some(answer.code().to_owned()), format!("{} (SQLSTATE {})", answer.message(), answer.code()))
        }
        None => (FaultKind::Lost, None, error.to_string()),
    };
    Fault { kind, code, said, source: Some(Box::new(error)) }
}
