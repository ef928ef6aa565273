//! Records an answer in the transaction of the handler that produces it.

use std::time::Duration;

use bytes::Bytes;
use http::Response;
use ibid::{
    engine::CompletedAnswer,
    http::{HandlerClaim, NotRememberedError},
    store::{Address, ClaimToken, Fence},
};

use crate::driver::{DriverError, SqlValue, Transaction, call_sql, sealed::TransactionEnd};

const COMPLETE_SQL: &str = "SELECT FROM ibid._run_complete($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)";

/// Why [`complete_in`] did not record the answer. Roll the transaction back, except after
/// [`NotRemembered`](Self::NotRemembered).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CompleteError {
    /// The policy does not remember such an answer. Nothing was written.
    #[error(transparent)]
    NotRemembered(#[from] NotRememberedError),
    /// The claim is in another database: the layer's store is not the database of this transaction.
    #[error(
        "the claim of this request is not in the database of this transaction; \
         the layer must have the PostgreSQL store of the same database"
    )]
    OtherDatabase(#[source] DriverError),
    /// The claim was taken over, released or forgotten: another request may have run the same operation.
    #[error(
        "this request has lost its claim meanwhile; roll back, so that its effect does not come on top of another's"
    )]
    ClaimLost(#[source] DriverError),
    /// The answer was recorded before, in this transaction or a committed one.
    #[error("the answer of this request was recorded before; an answer is recorded once")]
    AlreadyRecorded(#[source] DriverError),
    /// The database failed to record the answer.
    #[error("the answer could not be recorded: {0}")]
    Database(#[source] DriverError),
}

/// Records the answer of a handler under the layer in the handler's own transaction. It is remembered if and only if
/// that transaction commits.
///
/// Take [`ibid::http::HandlerClaim`] from the request's extensions, write, call this function, commit, and return the
/// same response. The database then decides what the client gets:
///
/// | transaction | handler returns | client gets |
/// |---|---|---|
/// | committed | the same response | that response |
/// | committed (even if the handler could not know) | anything else, or it panicked | the recorded answer |
/// | rolled back | the same response | 503: nothing was done, retry with the same key |
/// | rolled back | anything else | that; nothing is remembered (`Idempotency-Stored: false`) |
///
/// ```no_run
/// # #[cfg(feature = "sqlx")] mod example {
/// use axum::{Extension, body::Body, extract::State, response::Response};
/// use bytes::Bytes;
/// use ibid::http::HandlerClaim;
/// use ibid_postgres_tx::complete_in;
/// use sqlx::PgPool;
///
/// async fn pay(
///     State(pool): State<PgPool>, Extension(claimed): Extension<HandlerClaim>,
/// ) -> Result<Response, axum::http::StatusCode> {
///     let answer = Response::new(Bytes::from("paid"));
///     let paid = async {
///         let mut tx = pool.begin().await?;
///         sqlx::query("INSERT INTO payments (cents) VALUES (1250)").execute(&mut *tx).await?;
///         complete_in(&mut tx, &claimed, &answer).await?;
///         tx.commit().await?;
///         Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
///     };
///     paid.await.map_err(|_| axum::http::StatusCode::INTERNAL_SERVER_ERROR)?;
///     Ok(answer.map(Body::from))
/// }
/// # }
/// ```
///
/// The function requires a transaction, of either driver:
///
/// ```
/// # use {bytes::Bytes, http::Response, ibid::http::HandlerClaim};
/// # async fn one(mut tx: sqlx::Transaction<'_, sqlx::Postgres>, claimed: HandlerClaim, answer: Response<Bytes>) {
/// ibid_postgres_tx::complete_in(&mut tx, &claimed, &answer).await;
/// # }
/// # async fn two(mut tx: tokio_postgres::Transaction<'_>, claimed: HandlerClaim, answer: Response<Bytes>) {
/// ibid_postgres_tx::complete_in(&mut tx, &claimed, &answer).await;
/// # }
/// # async fn three(mut tx: deadpool_postgres::Transaction<'_>, claimed: HandlerClaim, answer: Response<Bytes>) {
/// ibid_postgres_tx::complete_in(&mut tx, &claimed, &answer).await;
/// # }
/// ```
///
/// A pool, connection or client would commit the record by itself, and does not compile:
///
/// ```compile_fail
/// # use {bytes::Bytes, http::Response, ibid::http::HandlerClaim};
/// # async fn one(mut tx: sqlx::PgPool, claimed: HandlerClaim, answer: Response<Bytes>) {
/// ibid_postgres_tx::complete_in(&mut tx, &claimed, &answer).await;
/// # }
/// ```
/// ```compile_fail
/// # use {bytes::Bytes, http::Response, ibid::http::HandlerClaim};
/// # async fn one(mut tx: sqlx::PgConnection, claimed: HandlerClaim, answer: Response<Bytes>) {
/// ibid_postgres_tx::complete_in(&mut tx, &claimed, &answer).await;
/// # }
/// ```
/// ```compile_fail
/// # use {bytes::Bytes, http::Response, ibid::http::HandlerClaim};
/// # async fn one(mut tx: tokio_postgres::Client, claimed: HandlerClaim, answer: Response<Bytes>) {
/// ibid_postgres_tx::complete_in(&mut tx, &claimed, &answer).await;
/// # }
/// ```
/// ```compile_fail
/// # use {bytes::Bytes, http::Response, ibid::http::HandlerClaim};
/// # async fn one(mut tx: deadpool_postgres::Client, claimed: HandlerClaim, answer: Response<Bytes>) {
/// ibid_postgres_tx::complete_in(&mut tx, &claimed, &answer).await;
/// # }
/// ```
///
/// # Errors
/// See [`CompleteError`]. Return the error from the handler: a transaction with a failed statement commits nothing.
pub async fn complete_in<T: Transaction>(
    tx: &mut T, claimed: &HandlerClaim, response: &Response<Bytes>,
) -> Result<(), CompleteError> {
    let complete = claimed.delegate(response)?;
    let sent = tx.query_rows(COMPLETE_SQL, &answer_write(claimed, &complete).values()).await;
    sent.map(drop).map_err(complete_error)
}

/// As [`complete_in`], and commits, in the same round trip. If it fails, nothing is committed, unless the reply was lost
/// ([`DriverErrorKind::ConnectionLost`](crate::DriverErrorKind::ConnectionLost)); the layer then looks what became of it.
///
/// # Errors
/// See [`CompleteError`]. After [`NotRemembered`](CompleteError::NotRemembered) the transaction is rolled back.
pub async fn commit_with<T: Transaction + TransactionEnd>(
    tx: T, claimed: &HandlerClaim, response: &Response<Bytes>,
) -> Result<(), CompleteError> {
    let complete = claimed.delegate(response)?;
    tx.commit_after(answer_write(claimed, &complete).sql()).await.map_err(complete_error)
}

fn answer_write<'a>(claimed: &'a HandlerClaim, answer: &'a CompletedAnswer) -> AnswerWrite<'a> {
    let lease = claimed.lease();
    AnswerWrite {
        address: &lease.request.address,
        token: &lease.request.token,
        fence: lease.fence,
        in_run: false,
        answer,
        ttl: claimed.ttl(),
    }
}

fn complete_error(fault: DriverError) -> CompleteError {
    match fault.code.as_deref() {
        Some("IB001") => CompleteError::OtherDatabase(fault),
        Some("IB002") => CompleteError::ClaimLost(fault),
        Some("IB004") => CompleteError::AlreadyRecorded(fault),
        _ => CompleteError::Database(fault),
    }
}

/// An answer, and the claim that it completes.
pub(crate) struct AnswerWrite<'a> {
    pub(crate) address: &'a Address,
    pub(crate) token: &'a ClaimToken,
    pub(crate) fence: Fence,
    /// Whether the claim was made in this transaction, by `run_tx`.
    pub(crate) in_run: bool,
    pub(crate) answer: &'a CompletedAnswer,
    pub(crate) ttl: Duration,
}

impl AnswerWrite<'_> {
    fn values(&self) -> Vec<SqlValue<'_>> {
        let mut values = vec![
            SqlValue::Bytea(Some(&self.address.0)),
            SqlValue::Bytea(Some(&self.token.0)),
            SqlValue::Bigint(Some(i64::try_from(self.fence.0).unwrap_or(i64::MAX))),
            SqlValue::Boolean(Some(self.in_run)),
        ];
        values.extend(completed_values(self.answer));
        values.push(SqlValue::Bigint(Some(clamp_micros(self.ttl))));
        values
    }

    /// As a statement that travels with COMMIT.
    pub(crate) fn sql(&self) -> String {
        call_sql("_run_complete", &self.values())
    }
}

/// What is remembered of an answer, as the SQL functions take it.
pub(crate) fn completed_values(answer: &CompletedAnswer) -> [SqlValue<'_>; 6] {
    let CompletedAnswer { failed, record, summary } = answer;
    let ms = |ms: u64| SqlValue::Bigint(Some(i64::try_from(ms).unwrap_or(i64::MAX / 1000)));
    [
        SqlValue::Boolean(Some(*failed)),
        SqlValue::Bytea(Some(record)),
        SqlValue::Integer(Some(summary.status.into())),
        ms(summary.requested_at_ms),
        ms(summary.completed_at_ms),
        SqlValue::Bigint(Some(clamp_micros(summary.took))),
    ]
}

/// Clamps to ten thousand years, so that sums do not overflow a timestamp.
pub(crate) fn clamp_micros(span: Duration) -> i64 {
    span.as_micros().min(315_576_000_000_000_000) as i64
}
