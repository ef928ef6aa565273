//! Runs claim, business write and answer as one transaction. Start with [`run_tx`], then `TxRun::next_action`.
//!
//! Where nothing is there, BEGIN and the claim are one message, and the answer and COMMIT are one: no round trip more than
//! the same transaction alone. The claim is then an advisory lock, and the row is written once, with its answer.
//!
//! Invariants:
//!
//! - A running operation holds the advisory lock of its address until its transaction ends. Duplicates do not wait for
//!   the lock on a connection: they return theirs to the pool and retry.
//! - If the reply to COMMIT is lost, the operation claims again with the same token. That claim cannot succeed before
//!   the old transaction has ended, because that holds the lock; then it finds the committed answer, or nothing.
//! - Every loop is bounded: by `wait_timeout` while other calls run, by [`MAX_ATTEMPTS`] after rollbacks.

use std::{
    future::Future,
    pin::Pin,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use data_encoding::HEXLOWER;
use http::{Response, header};
use ibid::{
    Policy,
    engine::CompletedAnswer,
    fingerprint::FingerprintComparison,
    http::completed_answer_of,
    policy::{OnConcurrent, OnMismatch, OnUnknown},
    record::{Record, RecordBody},
    store::{Address, ClaimToken, Fence, Fingerprint, key_hash, with_jitter},
};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::{
    call::IdempotentCall,
    claim_outcome::{CLAIM_SQL, LOOK_SQL, TxClaimOutcome},
    complete::{AnswerWrite, clamp_micros, completed_values},
    driver::{
        DriverError, DriverErrorKind, SqlRow, SqlValue, Transaction as _, TxCheckout, TxConnection, TxPool, call_sql,
        has_transient_sqlstate, sealed::TransactionEnd,
    },
    error::{TxBoxError, TxError},
};

/// Maximum attempts of a transaction that is rolled back by conflicts or loses its connection.
const MAX_ATTEMPTS: u32 = 10;
/// Timeout of one of our own statements. The driver itself would wait forever.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(15);
/// Minimum time spent on determining the outcome of a COMMIT without a reply.
const MIN_COMMIT_LOOKUP_TIME: Duration = Duration::from_secs(10);
/// Upper limit of a wait, so that adding it does not overflow the clock.
const MAX_WAIT: Duration = Duration::from_secs(365 * 24 * 3600);
/// Remembers an operation that committed its transaction itself.
const LOST_SQL: &str = "SELECT FROM ibid._run_lost($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)";
const INITIAL_BACKOFF: Duration = Duration::from_millis(5);
const MAX_BACKOFF: Duration = Duration::from_millis(250);

/// A future that borrows the transaction: `Box::pin(async move { … })`.
pub type TxFuture<'t, T> = Pin<Box<dyn Future<Output = T> + Send + 't>>;

/// The transaction type of a pool.
pub type Tx<'c, P> = <<P as TxPool>::Conn as TxConnection>::Tx<'c>;

/// The result of [`run_tx`].
#[derive(Debug)]
#[must_use]
pub enum TxOutcome {
    /// The operation ran and was committed now.
    Executed(Response<Bytes>),
    /// The operation was committed earlier; this is its answer.
    Replayed(Record),
}

impl TxOutcome {
    /// Returns `true` if the operation was committed earlier.
    pub fn is_replay(&self) -> bool {
        matches!(self, Self::Replayed(_))
    }

    /// Converts the outcome into a response. A body that was too large to store is described by its length and digest,
    /// as JSON.
    pub fn into_response(self) -> Response<Bytes> {
        let record = match self {
            Self::Executed(response) => return response,
            Self::Replayed(record) => record,
        };
        let mut response = Response::new(Bytes::new());
        *response.status_mut() = record.status;
        *response.headers_mut() = record.headers;
        *response.body_mut() = match record.body {
            RecordBody::Whole(body) => body,
            RecordBody::Digest { length, sha256 } => {
                let json = http::HeaderValue::from_static("application/json");
                response.headers_mut().insert(header::CONTENT_TYPE, json);
                format!("{{\"length\":{length},\"sha256\":\"{}\"}}", HEXLOWER.encode(&sha256)).into()
            }
            RecordBody::None => Bytes::new(),
        };
        response
    }
}

/// Runs an operation once per key and scope, in one transaction with its claim and its answer.
///
/// `Ok` commits and is remembered for the policy's `ttl`, with any status. `Err` rolls back, and the next call runs the
/// operation again. So do a panic, exceeding the policy's `timeout`, and dropping the returned future.
///
/// The operation may be called more than once, each time in a new transaction after the previous one was rolled back:
/// after serialization failures and deadlocks (also if they are the source of its error), and after lost connections.
/// Its effects outside the transaction are not undone.
///
/// These policy settings apply: `key`, `on_mismatch`, `on_concurrent` and `wait_timeout`, `on_unknown` (for requests
/// that a gateway started), `ttl`, `timeout`, `label.key`, and those about storing answers.
///
/// An operation that ends its transaction by itself (`tx.execute("COMMIT")`) fails with
/// [`RolledBack`](TxError::RolledBack).
///
/// # Errors
/// See [`TxError`].
pub async fn run_tx<P, F, E>(
    pool: &P, policy: &Policy, call: &IdempotentCall, mut operation: F,
) -> Result<TxOutcome, TxError>
where
    P: TxPool,
    F: for<'t, 'c> FnMut(&'t mut Tx<'c, P>) -> TxFuture<'t, Result<Response<Bytes>, E>> + Send,
    E: Into<TxBoxError> + Send,
{
    policy.check().map_err(TxError::PolicyInvalid)?;
    let key = call.key(policy)?;
    let waits = policy.on_concurrent == OnConcurrent::Wait;
    let mut run = TxRun {
        pool,
        policy,
        call,
        address: call.address(policy, &key),
        displayed_key: call.displayed_key(policy, &key),
        key_hash: key_hash(key.as_str()),
        token: ClaimToken::mint(),
        take_over: None,
        failed_attempts: 0,
        wait_deadline: Instant::now() + if waits { policy.wait_timeout.min(MAX_WAIT) } else { Duration::ZERO },
        uncertain_commit: None,
    };
    let mut pause = INITIAL_BACKOFF;
    loop {
        let step = run.attempt(&mut operation).await?;
        match run.next_action(step)? {
            TxNextAction::Finish(ran) => return Ok(*ran),
            TxNextAction::RetryNow => {}
            TxNextAction::RetryLater => {
                sleep(with_jitter(pause)).await;
                pause = (pause * 2).min(MAX_BACKOFF);
            }
        }
    }
}

struct TxRun<'a, P> {
    pool: &'a P,
    policy: &'a Policy,
    call: &'a IdempotentCall,
    address: Address,
    displayed_key: String,
    key_hash: String,
    token: ClaimToken,
    take_over: Option<Fence>,
    /// Number of temporary failures so far.
    failed_attempts: u32,
    wait_deadline: Instant,
    uncertain_commit: Option<UncertainCommit>,
}

enum TxAttempt {
    Committed(Response<Bytes>),
    /// The operation did not run, because somebody is or was there.
    NotVacant,
    /// The operation did not run, because of this entry.
    NotGranted(TxClaimOutcome),
    /// The database could not be used.
    Unreachable(DriverError),
    /// The operation ran, was rolled back, and is worth another attempt.
    RolledBack(DriverError),
    /// The operation ran, and may have been committed.
    CommitUncertain(UncertainCommit),
}

enum TxNextAction {
    RetryNow,
    RetryLater,
    Finish(Box<TxOutcome>),
}

/// A COMMIT without a reply.
struct UncertainCommit {
    response: Response<Bytes>,
    error: DriverError,
}

impl<P: TxPool> TxRun<'_, P> {
    /// Decides what follows an attempt. All branching is here.
    fn next_action(&mut self, step: TxAttempt) -> Result<TxNextAction, TxError> {
        match step {
            TxAttempt::Committed(response) => Ok(TxNextAction::Finish(Box::new(TxOutcome::Executed(response)))),
            TxAttempt::CommitUncertain(doubt) => {
                self.wait_deadline = self.wait_deadline.max(Instant::now() + MIN_COMMIT_LOOKUP_TIME);
                self.uncertain_commit = Some(doubt);
                self.count_failed_attempt().map_err(|_| self.in_doubt_error())
            }
            // A new run was possible only because the uncertain transaction was rolled back.
            TxAttempt::RolledBack(fault) => {
                self.uncertain_commit = None;
                self.count_failed_attempt().map_err(|tries| attempts_exhausted(tries, fault))
            }
            TxAttempt::Unreachable(_) if self.uncertain_commit.is_some() => self.retry_until_deadline(),
            TxAttempt::Unreachable(fault) if fault.kind == DriverErrorKind::NotSent => Err(TxError::Database(fault)),
            TxAttempt::Unreachable(fault) => {
                self.count_failed_attempt().map_err(|tries| attempts_exhausted(tries, fault))
            }
            TxAttempt::NotGranted(TxClaimOutcome::Done { is_ours, fingerprint, answer }) => {
                if let Some(doubt) = self.uncertain_commit.take_if(|_| is_ours) {
                    return Ok(TxNextAction::Finish(Box::new(TxOutcome::Executed(doubt.response))));
                }
                self.check_fingerprint(fingerprint)?;
                Ok(TxNextAction::Finish(Box::new(TxOutcome::Replayed(
                    *answer.map_err(|error| TxError::Corrupt(Box::new(error)))?,
                ))))
            }
            TxAttempt::NotGranted(TxClaimOutcome::Locked) => self.retry_until_deadline(),
            TxAttempt::NotGranted(TxClaimOutcome::Busy(fingerprint)) => {
                self.check_fingerprint(fingerprint)?;
                self.retry_until_deadline()
            }
            TxAttempt::NotGranted(TxClaimOutcome::OutcomeUnknown { fence, fingerprint, takeover_in }) => {
                self.check_fingerprint(fingerprint)?;
                match self.policy.on_unknown {
                    OnUnknown::Hold => Err(TxError::OutcomeUnknown),
                    OnUnknown::Retry if !takeover_in.is_zero() => self.retry_until_deadline(),
                    OnUnknown::Retry => {
                        self.take_over = Some(fence);
                        self.count_failed_attempt().map(|_| TxNextAction::RetryNow).map_err(|_| TxError::InProgress)
                    }
                }
            }
            // The holder ended between two looks.
            TxAttempt::NotVacant | TxAttempt::NotGranted(TxClaimOutcome::Vacant) => {
                self.count_failed_attempt().map_err(|_| TxError::InProgress)
            }
            // An operator forgot the claim meanwhile: use a new token. `Granted` does not occur here.
            TxAttempt::NotGranted(TxClaimOutcome::TokenSpent | TxClaimOutcome::Granted(_)) => {
                (self.token, self.take_over) = (ClaimToken::mint(), None);
                self.count_failed_attempt().map(|_| TxNextAction::RetryNow).map_err(|_| TxError::InProgress)
            }
        }
    }

    fn count_failed_attempt(&mut self) -> Result<TxNextAction, u32> {
        self.failed_attempts += 1;
        if self.failed_attempts < MAX_ATTEMPTS { Ok(TxNextAction::RetryLater) } else { Err(self.failed_attempts) }
    }

    fn retry_until_deadline(&mut self) -> Result<TxNextAction, TxError> {
        if Instant::now() < self.wait_deadline {
            return Ok(TxNextAction::RetryLater);
        }
        Err(if self.uncertain_commit.is_some() { self.in_doubt_error() } else { TxError::InProgress })
    }

    fn in_doubt_error(&mut self) -> TxError {
        let fault = self.uncertain_commit.take().map(|doubt| doubt.error);
        TxError::InDoubt(fault.unwrap_or_else(|| DriverError::timed_out("COMMIT")))
    }

    fn check_fingerprint(&self, seen: Fingerprint) -> Result<(), TxError> {
        if self.policy.on_mismatch != OnMismatch::Reject {
            return Ok(());
        }
        match self.call.fingerprint.compare(&seen, |version| self.call.fingerprint_of_version(version)) {
            FingerprintComparison::Same => Ok(()),
            FingerprintComparison::Different => Err(TxError::KeyReused),
            FingerprintComparison::UnknownVersion => {
                let why = format!("its request has a fingerprint of version {}, which is not known", seen.version);
                Err(TxError::Corrupt(why.into()))
            }
        }
    }

    /// Runs one transaction on one connection.
    async fn attempt<F, E>(&self, operation: &mut F) -> Result<TxAttempt, TxError>
    where
        F: for<'t, 'c> FnMut(&'t mut Tx<'c, P>) -> TxFuture<'t, Result<Response<Bytes>, E>> + Send,
        E: Into<TxBoxError> + Send,
    {
        let connecting = self.pool.connection();
        let connected = match &self.uncertain_commit {
            // The pool limits its own wait, unless the outcome of a COMMIT is pending.
            Some(_) => timeout_at(self.wait_deadline, connecting).await,
            None => Ok(connecting.await),
        };
        let connection =
            match connected.unwrap_or_else(|_| Err(DriverError::timed_out("a pool's call for a connection"))) {
                Ok(connection) => connection,
                Err(fault) => return Ok(TxAttempt::Unreachable(fault)),
            };
        // The connection is closed unless the attempt ends in order: it may be dead, or in an abandoned transaction.
        let mut connection = TxCheckout::new(connection);
        let mut ended = self.attempt_vacant(&mut connection, operation).await;
        if let Ok(TxAttempt::NotVacant) = ended {
            ended = match with_statement_timeout("what is there", self.look(&mut connection)).await {
                Ok(TxClaimOutcome::Vacant | TxClaimOutcome::Granted(_)) => {
                    self.attempt_occupied(&mut connection, operation).await
                }
                found => found.map_or_else(claim_failed, |found| Ok(TxAttempt::NotGranted(found))),
            };
        }
        let is_suspect = match &ended {
            Ok(TxAttempt::CommitUncertain(_)) | Err(TxError::TimedOut(_) | TxError::Database(_)) => true,
            Ok(TxAttempt::Unreachable(fault) | TxAttempt::RolledBack(fault)) => {
                fault.kind == DriverErrorKind::ConnectionLost
            }
            _ => false,
        };
        if !is_suspect {
            connection.give_back();
        }
        ended
    }

    /// Runs the operation if nothing is there.
    async fn attempt_vacant<F, E>(&self, connection: &mut P::Conn, operation: &mut F) -> Result<TxAttempt, TxError>
    where
        F: for<'t, 'c> FnMut(&'t mut Tx<'c, P>) -> TxFuture<'t, Result<Response<Bytes>, E>> + Send,
        E: Into<TxBoxError> + Send,
    {
        let values =
            [SqlValue::Bytea(Some(&self.address.0)), SqlValue::Bytea(Some(&self.token.0)), self.idle_timeout()];
        let beginning = connection.begin_claimed(self.call.isolation, "_run_begin", &values);
        let mut tx = match with_statement_timeout("BEGIN", beginning).await {
            Ok(Some(tx)) => tx,
            Ok(None) => return Ok(TxAttempt::NotVacant),
            Err(fault) => return claim_failed(fault),
        };
        let (response, complete) = match self.run_operation(&mut tx, operation).await {
            Ok(ran) => ran,
            Err(ended) => return roll_back(tx, ended).await,
        };
        let mut values = self.request_values();
        let [failed, record, answer @ ..] = completed_values(&complete);
        values.push(failed);
        values.extend(answer);
        let ended = commit(tx, call_sql("_run_finish", &[SqlValue::Row(&values), record]), response).await;
        if matches!(&ended, Err(TxError::RolledBack(fault)) if fault.code.as_deref() == Some("IB003")) {
            drop(with_statement_timeout("a claim", connection.query_outside(LOST_SQL, &self.request_values())).await);
        }
        ended
    }

    /// Runs the operation if the entry that is there allows it: it has expired, was released, or may be taken over.
    async fn attempt_occupied<F, E>(&self, connection: &mut P::Conn, operation: &mut F) -> Result<TxAttempt, TxError>
    where
        F: for<'t, 'c> FnMut(&'t mut Tx<'c, P>) -> TxFuture<'t, Result<Response<Bytes>, E>> + Send,
        E: Into<TxBoxError> + Send,
    {
        let mut tx = match with_statement_timeout("BEGIN", connection.begin(self.call.isolation)).await {
            Ok(tx) => tx,
            Err(fault) => return claim_failed(fault),
        };
        let claim = with_statement_timeout("the claim", self.claim(&mut tx)).await;
        let Ok(TxClaimOutcome::Granted(fence)) = claim else {
            let found = claim.map_or_else(claim_failed, |found| Ok(TxAttempt::NotGranted(found)));
            return roll_back(tx, found).await;
        };
        let (response, complete) = match self.run_operation(&mut tx, operation).await {
            Ok(ran) => ran,
            Err(ended) => return roll_back(tx, ended).await,
        };
        let written = AnswerWrite {
            address: &self.address,
            token: &self.token,
            fence,
            in_run: true,
            answer: &complete,
            ttl: self.policy.ttl,
        };
        commit(tx, written.sql(), response).await
    }

    /// Returns the operation's response and what is remembered of it, or how the attempt ends without it.
    async fn run_operation<F, E>(
        &self, tx: &mut Tx<'_, P>, operation: &mut F,
    ) -> Result<(Response<Bytes>, CompletedAnswer), Result<TxAttempt, TxError>>
    where
        F: for<'t, 'c> FnMut(&'t mut Tx<'c, P>) -> TxFuture<'t, Result<Response<Bytes>, E>> + Send,
        E: Into<TxBoxError> + Send,
    {
        let (started, requested_at_ms) = (Instant::now(), unix_now_ms());
        match timeout(self.policy.timeout, operation(tx)).await {
            Err(_) => Err(Err(TxError::TimedOut(self.policy.timeout))),
            Ok(Ok(response)) => {
                let complete = completed_answer_of(self.policy, &response, requested_at_ms, started);
                Ok((response, complete))
            }
            Ok(Err(error)) => {
                let error = error.into();
                Err(if has_transient_sqlstate(&*error) {
                    Ok(TxAttempt::RolledBack(DriverError::from_operation(error)))
                } else {
                    Err(TxError::Failed(error))
                })
            }
        }
    }

    async fn look(&self, connection: &mut P::Conn) -> Result<TxClaimOutcome, DriverError> {
        connection.end_unclaimed().await?;
        let values = [
            SqlValue::Bytea(Some(&self.address.0)),
            SqlValue::Bytea(Some(&self.token.0)),
            SqlValue::Bigint(self.take_over.map(fence_value)),
        ];
        read_outcome(&connection.query_outside(LOOK_SQL, &values).await?)
    }

    async fn claim(&self, tx: &mut Tx<'_, P>) -> Result<TxClaimOutcome, DriverError> {
        let mut values = self.request_values();
        values.extend([SqlValue::Bigint(self.take_over.map(fence_value)), self.idle_timeout()]);
        read_outcome(&tx.query_rows(CLAIM_SQL, &values).await?)
    }

    fn request_values(&self) -> Vec<SqlValue<'_>> {
        vec![
            SqlValue::Bytea(Some(&self.address.0)),
            SqlValue::Bytea(Some(&self.token.0)),
            SqlValue::Smallint(Some(self.call.fingerprint.version.into())),
            SqlValue::Bytea(Some(&self.call.fingerprint.digest)),
            SqlValue::Text(Some(&self.call.tenant)),
            SqlValue::Text(Some(&self.call.user)),
            SqlValue::Text(Some(&self.call.endpoint)),
            SqlValue::Text(Some(&self.displayed_key)),
            SqlValue::Text(Some(&self.key_hash)),
            SqlValue::Bigint(Some(clamp_micros(self.policy.lease))),
            SqlValue::Bigint(Some(clamp_micros(self.policy.ttl))),
        ]
    }

    /// A little longer than the operation's timeout.
    fn idle_timeout(&self) -> SqlValue<'static> {
        let idle = self.policy.timeout.saturating_add(Duration::from_secs(5)).as_millis();
        SqlValue::Bigint(Some(i64::try_from(idle).unwrap_or(i64::MAX)))
    }
}

fn fence_value(fence: Fence) -> i64 {
    i64::try_from(fence.0).unwrap_or(i64::MAX)
}

fn read_outcome(rows: &[SqlRow]) -> Result<TxClaimOutcome, DriverError> {
    TxClaimOutcome::read(rows.first().ok_or_else(|| DriverError::unreadable("a claim was answered with no row"))?)
}

/// Records the answer and commits, in one message. The answer is not recorded if a statement has failed, and if it is not,
/// nothing is committed.
async fn commit<T: TransactionEnd>(tx: T, sql: String, response: Response<Bytes>) -> Result<TxAttempt, TxError> {
    match with_statement_timeout("COMMIT", tx.commit_after(sql)).await {
        Ok(()) => Ok(TxAttempt::Committed(response)),
        Err(fault) if fault.is_transient() => Ok(TxAttempt::RolledBack(fault)),
        Err(fault) if fault.kind == DriverErrorKind::RolledBack => Err(commit_refused(fault)),
        Err(fault) => Ok(TxAttempt::CommitUncertain(UncertainCommit { response, error: fault })),
    }
}

async fn roll_back<T: TransactionEnd>(tx: T, ended: Result<TxAttempt, TxError>) -> Result<TxAttempt, TxError> {
    // After a timeout a statement may still run: the connection is closed instead.
    if !matches!(ended, Err(TxError::TimedOut(_))) {
        drop(with_statement_timeout("ROLLBACK", tx.rollback()).await);
    }
    ended
}

/// Classifies an error before the operation ran.
fn claim_failed(fault: DriverError) -> Result<TxAttempt, TxError> {
    match fault.kind {
        DriverErrorKind::Unreadable => Err(TxError::Corrupt(Box::new(fault))),
        DriverErrorKind::ConnectionLost | DriverErrorKind::NotSent => Ok(TxAttempt::Unreachable(fault)),
        // Includes a row that stays locked beyond the lock timeout.
        DriverErrorKind::RolledBack if fault.is_transient() || fault.code.as_deref() == Some("55P03") => {
            Ok(TxAttempt::Unreachable(fault))
        }
        DriverErrorKind::RolledBack => Err(TxError::Database(fault)),
    }
}

/// Classifies an error after the operation ran, with which the server refused to record its answer or to commit.
fn commit_refused(fault: DriverError) -> TxError {
    match fault.code.as_deref() {
        // in_failed_sql_transaction; the operation ended its transaction or removed its claim; a deferred constraint.
        Some("25P02" | "IB001" | "IB002" | "IB003" | "IB004") => TxError::RolledBack(fault),
        Some(code) if code.starts_with("23") => TxError::RolledBack(fault),
        _ => TxError::Database(fault),
    }
}

fn attempts_exhausted(tries: u32, source: DriverError) -> TxError {
    if source.is_transient() { TxError::Conflict { tries, source } } else { TxError::Database(source) }
}

async fn with_statement_timeout<T>(
    what: &str, work: impl Future<Output = Result<T, DriverError>>,
) -> Result<T, DriverError> {
    timeout(STATEMENT_TIMEOUT, work).await.unwrap_or_else(|_| Err(DriverError::timed_out(what)))
}

fn unix_now_ms() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}
