//! tokio-postgres, bare and pooled by deadpool.
//!
//! Statements are sent with their types and without a name: one round trip, and a pooler in transaction mode is fine.

use tokio_postgres::{
    Error, IsolationLevel,
    error::{DbError, Severity},
    types::{FromSql, ToSql, Type},
};

use super::{Connection, Fault, FaultKind, Inner, Isolation, Pool, Row, Transaction, Value, sealed};

impl Transaction for tokio_postgres::Transaction<'_> {}
impl Transaction for deadpool_postgres::Transaction<'_> {}

impl sealed::Statements for tokio_postgres::Transaction<'_> {
    async fn rows<'a>(&'a mut self, sql: &'static str, values: &'a [Value<'a>]) -> Result<Vec<Row>, Fault> {
        rows(self, sql, values).await
    }
}

impl sealed::Statements for deadpool_postgres::Transaction<'_> {
    async fn rows<'a>(&'a mut self, sql: &'static str, values: &'a [Value<'a>]) -> Result<Vec<Row>, Fault> {
        rows(self, sql, values).await
    }
}

async fn rows(tx: &tokio_postgres::Transaction<'_>, sql: &str, values: &[Value<'_>]) -> Result<Vec<Row>, Fault> {
    let params: Vec<(&(dyn ToSql + Sync), Type)> = values.iter().map(param).collect();
    let rows = tx.query_typed(sql, &params).await.map_err(fault)?;
    Ok(rows.into_iter().map(|row| Row(Inner::TokioPostgres(row))).collect())
}

fn param<'a>(value: &'a Value<'a>) -> (&'a (dyn ToSql + Sync), Type) {
    match value {
        Value::Bytea(value) => (value, Type::BYTEA),
        Value::Text(value) => (value, Type::TEXT),
        Value::Bigint(value) => (value, Type::INT8),
        Value::Integer(value) => (value, Type::INT4),
        Value::Smallint(value) => (value, Type::INT2),
        Value::Boolean(value) => (value, Type::BOOL),
        Value::Byteas(values) => (values, Type::BYTEA_ARRAY),
        Value::Texts(values) => (values, Type::TEXT_ARRAY),
        Value::Bigints(values) => (values, Type::INT8_ARRAY),
    }
}

impl sealed::Ends for deadpool_postgres::Transaction<'_> {
    async fn commit(self) -> Result<(), Fault> {
        deadpool_postgres::Transaction::commit(self).await.map_err(fault)
    }

    async fn rollback(self) -> Result<(), Fault> {
        deadpool_postgres::Transaction::rollback(self).await.map_err(fault)
    }
}

impl Pool for deadpool_postgres::Pool {
    type Of = deadpool_postgres::Client;
}

impl sealed::Connections for deadpool_postgres::Pool {
    type Connection = deadpool_postgres::Client;

    async fn connection(&self) -> Result<Self::Connection, Fault> {
        self.get().await.map_err(|error| {
            let code = code(&error).or_else(|| code(std::error::Error::source(&error)?));
            Fault { kind: FaultKind::NotSent, code, said: error.to_string(), source: Some(Box::new(error)) }
        })
    }
}

impl Connection for deadpool_postgres::Client {
    type Tx<'c> = deadpool_postgres::Transaction<'c>;

    async fn begin(&mut self, isolation: Option<Isolation>) -> Result<Self::Tx<'_>, Fault> {
        let mut builder = self.build_transaction();
        if let Some(isolation) = isolation {
            builder = builder.isolation_level(match isolation {
                Isolation::ReadCommitted => IsolationLevel::ReadCommitted,
                Isolation::RepeatableRead => IsolationLevel::RepeatableRead,
                Isolation::Serializable => IsolationLevel::Serializable,
            });
        }
        builder.start().await.map_err(fault)
    }
}

impl sealed::Begins for deadpool_postgres::Client {
    fn discard(self) {
        drop(Self::take(self));
    }
}

pub(super) fn column<'r, T: FromSql<'r>>(row: &'r tokio_postgres::Row, at: usize) -> Result<Option<T>, Fault> {
    row.try_get(at).map_err(|error| Fault::unreadable(error.to_string()))
}

pub(super) fn code(error: &(dyn std::error::Error + 'static)) -> Option<String> {
    if let Some(error) = error.downcast_ref::<Error>() {
        return Some(error.code()?.code().to_owned());
    }
    error.downcast_ref::<DbError>().map(|error| error.code().code().to_owned())
}

fn fault(error: Error) -> Fault {
    let (kind, code, said) = match error.as_db_error() {
        Some(answer) => {
            // An unparsed severity is a translated one: only the parsed one is trusted.
            let is_error = answer.parsed_severity() == Some(Severity::Error);
            let kind = if is_error { FaultKind::RolledBack } else { FaultKind::Lost };
            let code = answer.code().code();
            (kind, Some(code.to_owned()), format!("{} (SQLSTATE {code})", answer.message()))
        }
        None => (FaultKind::Lost, None, error.to_string()),
    };
    Fault { kind, code, said, source: Some(Box::new(error)) }
}
