//! Claim, business write and answer as one transaction. Read [`run_tx`], then `Run::decide`.
//!
//! Invariants:
//!
//! - Whoever runs holds the advisory lock of its address until its transaction ends. Nobody waits for that lock on a
//!   connection: duplicates give theirs back and come again.
//! - A COMMIT whose answer was lost is looked up by claiming again with the same token. That cannot be answered before
//!   the old transaction has ended, because that holds the lock; then it finds what was committed, or nothing.
//! - Every loop is bounded: by `wait_timeout` where others are at it, by [`TRIES`] where it was rolled back.

use std::{
    future::Future,
    pin::Pin,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use http::{Response, header};
use ibid::{
    Comparison, OnConcurrent, OnMismatch, OnUnknown, Policy, Record, RecordBody,
    http::complete_of,
    store::{Address, Fence, Fingerprint, Token, key_hash},
};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::{
    call::Call,
    complete::{Written, micros},
    driver::{
        Connection, Fault, FaultKind, Pool, Value, is_transient_in,
        sealed::{Begins as _, Ends as _, Statements as _},
    },
    error::{BoxError, TxError},
    found::{CLAIM, Found, Remembered},
};

/// How often a transaction is tried that others roll back, or whose connection breaks.
const TRIES: u32 = 10;
/// How long one of our own statements may take. The driver itself would wait for ever.
const STATEMENT: Duration = Duration::from_secs(15);
/// How long at least the end of a transaction in doubt is looked for.
const DOUBT: Duration = Duration::from_secs(10);
/// Nobody waits longer.
const A_YEAR: Duration = Duration::from_secs(365 * 24 * 3600);
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LAST_PAUSE: Duration = Duration::from_millis(250);

/// A future that borrows the transaction: `Box::pin(async move { … })`.
pub type BoxFuture<'t, T> = Pin<Box<dyn Future<Output = T> + Send + 't>>;

/// A transaction of a pool.
pub type Tx<'c, P> = <<P as Pool>::Of as Connection>::Tx<'c>;

/// What [`run_tx`] gives back.
#[derive(Debug)]
#[must_use]
pub enum Ran {
    /// The operation ran and was committed now.
    First(Response<Bytes>),
    /// It was done before; this was its answer.
    Replayed(Record),
}

impl Ran {
    /// Whether it was done before.
    pub fn is_replay(&self) -> bool {
        matches!(self, Self::Replayed(_))
    }

    /// As an answer for whoever asked. A body that was too large to be kept is told by its length and digest, as JSON.
    pub fn into_response(self) -> Response<Bytes> {
        let record = match self {
            Self::First(response) => return response,
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
                let hex: String = sha256.iter().map(|byte| format!("{byte:02x}")).collect();
                format!("{{\"length\":{length},\"sha256\":\"{hex}\"}}").into()
            }
            RecordBody::None => Bytes::new(),
        };
        response
    }
}

/// Runs an operation once per key and scope, in one transaction with its claim and its answer.
///
/// `Ok` commits and is remembered for the policy's `ttl`, whatever its status; `Err` rolls back, and the next call runs
/// it again. So does a panic, a run beyond the policy's `timeout`, and dropping the returned future.
///
/// The operation may be called more than once, each time in a fresh transaction, and only after the one before was rolled
/// back: on serialization failures and deadlocks (also if they are the source of its error), and on connections that
/// break. What it does besides its transaction is not undone.
///
/// Of the policy these dials count: `key`, `on_mismatch`, `on_concurrent` and `wait_timeout`, `on_unknown` (of what a
/// gateway began), `ttl`, `timeout`, `label.key`; and those about what is kept of an answer.
///
/// An operation that ends its transaction by itself (`tx.execute("COMMIT")`) is refused as
/// [`RolledBack`](TxError::RolledBack).
///
/// # Errors
/// See [`TxError`].
pub async fn run_tx<P, F, E>(pool: &P, policy: &Policy, call: &Call, mut operation: F) -> Result<Ran, TxError>
where
    P: Pool,
    F: for<'t, 'c> FnMut(&'t mut Tx<'c, P>) -> BoxFuture<'t, Result<Response<Bytes>, E>> + Send,
    E: Into<BoxError> + Send,
{
    policy.check().map_err(TxError::PolicyInvalid)?;
    let key = call.key(policy)?;
    let waits = policy.on_concurrent == OnConcurrent::Wait;
    let mut run = Run {
        pool,
        policy,
        call,
        address: call.address(policy, &key),
        shown: call.shown(policy, &key),
        key_hash: key_hash(key.as_str()),
        token: Token::mint(),
        over: None,
        tries: 0,
        patience: Instant::now() + if waits { policy.wait_timeout.min(A_YEAR) } else { Duration::ZERO },
        doubt: None,
    };
    run.decide(&mut operation).await
}

struct Run<'a, P> {
    pool: &'a P,
    policy: &'a Policy,
    call: &'a Call,
    address: Address,
    shown: String,
    key_hash: String,
    token: Token,
    /// Whom to take over.
    over: Option<Fence>,
    /// How often something went wrong that may go better next time.
    tries: u32,
    /// Until when others are waited for.
    patience: Instant,
    doubt: Option<Doubt>,
}

/// How one transaction ended.
enum Step {
    Committed(Response<Bytes>),
    /// Nothing was run: this is there.
    Found(Found),
    /// The database could not be asked.
    Unreached(Fault),
    /// It was ours to run, was rolled back, and is worth another try.
    Again(Fault),
    /// It was run, and nobody knows whether it was committed.
    InDoubt(Doubt),
}

/// What comes after a step.
enum Next {
    /// Another transaction, at once.
    Now,
    /// Another one after a pause.
    Pause,
    Over(Box<Ran>),
}

/// A commit that was not answered.
struct Doubt {
    fence: Fence,
    response: Response<Bytes>,
    fault: Fault,
}

impl<P: Pool> Run<'_, P> {
    async fn decide<F, E>(&mut self, operation: &mut F) -> Result<Ran, TxError>
    where
        F: for<'t, 'c> FnMut(&'t mut Tx<'c, P>) -> BoxFuture<'t, Result<Response<Bytes>, E>> + Send,
        E: Into<BoxError> + Send,
    {
        let mut pause = FIRST_PAUSE;
        loop {
            let step = self.attempt(operation).await?;
            match self.after(step)? {
                Next::Over(ran) => return Ok(*ran),
                Next::Now => {}
                Next::Pause => {
                    sleep(jittered(pause)).await;
                    pause = (pause * 2).min(LAST_PAUSE);
                }
            }
        }
    }

    /// All branching, top to bottom.
    fn after(&mut self, step: Step) -> Result<Next, TxError> {
        match step {
            Step::Committed(response) => Ok(Next::Over(Box::new(Ran::First(response)))),
            Step::InDoubt(doubt) => {
                self.patience = self.patience.max(Instant::now() + DOUBT);
                self.doubt = Some(doubt);
                self.once_more().map_err(|_| self.still_in_doubt())
            }
            // Nothing is in doubt any more: it could be run again only because the one before was rolled back.
            Step::Again(fault) => {
                self.doubt = None;
                self.once_more().map_err(|tries| given_up(tries, fault))
            }
            Step::Unreached(_) if self.doubt.is_some() => self.wait(),
            Step::Unreached(fault) if fault.kind == FaultKind::NotSent => Err(TxError::Database(fault)),
            Step::Unreached(fault) => self.once_more().map_err(|tries| given_up(tries, fault)),
            Step::Found(Found::Done { fence, fingerprint, answer }) => {
                if let Some(doubt) = self.doubt.take_if(|doubt| doubt.fence == fence) {
                    return Ok(Next::Over(Box::new(Ran::First(doubt.response))));
                }
                self.compare(fingerprint)?;
                Ok(Next::Over(Box::new(Ran::Replayed(answer.read()?))))
            }
            Step::Found(Found::Locked) => self.wait(),
            Step::Found(Found::Busy(fingerprint)) => {
                self.compare(fingerprint)?;
                self.wait()
            }
            Step::Found(Found::Unknown { fence, fingerprint, takeover_in }) => {
                self.compare(fingerprint)?;
                match self.policy.on_unknown {
                    OnUnknown::Hold => Err(TxError::OutcomeUnknown),
                    OnUnknown::Retry if !takeover_in.is_zero() => self.wait(),
                    OnUnknown::Retry => {
                        self.over = Some(fence);
                        self.once_more().map(|_| Next::Now).map_err(|_| TxError::InProgress)
                    }
                }
            }
            // Somebody forgot it while its answer was on the way: another name. What is granted is not found.
            Step::Found(Found::Spent | Found::Granted { .. }) => {
                (self.token, self.over) = (Token::mint(), None);
                self.once_more().map(|_| Next::Now).map_err(|_| TxError::InProgress)
            }
        }
    }

    fn once_more(&mut self) -> Result<Next, u32> {
        self.tries += 1;
        if self.tries < TRIES { Ok(Next::Pause) } else { Err(self.tries) }
    }

    fn wait(&mut self) -> Result<Next, TxError> {
        if Instant::now() < self.patience {
            return Ok(Next::Pause);
        }
        Err(if self.doubt.is_some() { self.still_in_doubt() } else { TxError::InProgress })
    }

    fn still_in_doubt(&mut self) -> TxError {
        let fault = self.doubt.take().map(|doubt| doubt.fault);
        TxError::InDoubt(fault.unwrap_or_else(|| Fault::silent("COMMIT")))
    }

    fn compare(&self, seen: Fingerprint) -> Result<(), TxError> {
        if self.policy.on_mismatch != OnMismatch::Reject {
            return Ok(());
        }
        match self.call.fingerprint.compare(&seen, |version| self.call.by_version(version)) {
            Comparison::Same => Ok(()),
            Comparison::Different => Err(TxError::Reused),
            Comparison::UnknownVersion => {
                let why = format!("its request has a fingerprint of version {}, which is not known", seen.version);
                Err(TxError::Corrupt(why.into()))
            }
        }
    }

    /// One connection, one transaction.
    async fn attempt<F, E>(&self, operation: &mut F) -> Result<Step, TxError>
    where
        F: for<'t, 'c> FnMut(&'t mut Tx<'c, P>) -> BoxFuture<'t, Result<Response<Bytes>, E>> + Send,
        E: Into<BoxError> + Send,
    {
        let connecting = self.pool.connection();
        let connected = match &self.doubt {
            // How long a pool tries is its own business, unless somebody waits to hear what became of a commit.
            Some(_) => timeout_at(self.patience, connecting).await,
            None => Ok(connecting.await),
        };
        let mut connection = match connected.unwrap_or_else(|_| Err(Fault::silent("a pool's call for a connection"))) {
            Ok(connection) => connection,
            Err(fault) => return Ok(Step::Unreached(fault)),
        };
        let ended = self.on(&mut connection, operation).await;
        let is_suspect = match &ended {
            Ok(Step::InDoubt(_)) | Err(TxError::TimedOut(_)) => true,
            Ok(Step::Unreached(fault) | Step::Again(fault)) => fault.kind == FaultKind::Lost,
            _ => false,
        };
        if is_suspect {
            // It may be silent, or busy with what nobody wants any more.
            connection.discard();
        }
        ended
    }

    async fn on<F, E>(&self, connection: &mut P::Of, operation: &mut F) -> Result<Step, TxError>
    where
        F: for<'t, 'c> FnMut(&'t mut Tx<'c, P>) -> BoxFuture<'t, Result<Response<Bytes>, E>> + Send,
        E: Into<BoxError> + Send,
    {
        let mut tx = match within("BEGIN", connection.begin(self.call.isolation)).await {
            Ok(tx) => tx,
            Err(fault) => return unclaimed(fault),
        };
        let (fence, xid) = match within("the claim", self.claim(&mut tx)).await {
            Ok(Found::Granted { fence, xid }) => (fence, xid),
            Ok(found) => {
                // Nothing was changed: if this fails, only the connection is lost.
                drop(within("ROLLBACK", tx.rollback()).await);
                return Ok(Step::Found(found));
            }
            Err(fault) => {
                drop(within("ROLLBACK", tx.rollback()).await);
                return unclaimed(fault);
            }
        };
        let (started, requested_at_ms) = (Instant::now(), now_ms());
        let response = match timeout(self.policy.timeout, operation(&mut tx)).await {
            Err(_) => return Err(TxError::TimedOut(self.policy.timeout)),
            Ok(Ok(response)) => response,
            Ok(Err(error)) => {
                drop(within("ROLLBACK", tx.rollback()).await);
                let error = error.into();
                if is_transient_in(&*error) {
                    return Ok(Step::Again(Fault::of_operation(error)));
                }
                return Err(TxError::Failed(error));
            }
        };
        let complete = complete_of(self.policy, &response, requested_at_ms, started);
        let written = Written {
            address: &self.address,
            token: &self.token,
            fence,
            xid: Some(xid),
            complete: &complete,
            keep: self.policy.ttl,
        };
        if let Err(fault) = within("the answer", written.to(&mut tx)).await {
            drop(within("ROLLBACK", tx.rollback()).await);
            return unanswered(fault);
        }
        // Nothing failed in the transaction: the statement before would have, and a COMMIT that rolls back says so.
        match within("COMMIT", tx.commit()).await {
            Ok(()) => Ok(Step::Committed(response)),
            Err(fault) if fault.is_transient() => Ok(Step::Again(fault)),
            Err(fault) if fault.kind == FaultKind::RolledBack => Err(TxError::RolledBack(fault)),
            Err(fault) => Ok(Step::InDoubt(Doubt { fence, response, fault })),
        }
    }

    async fn claim(&self, tx: &mut Tx<'_, P>) -> Result<Found, Fault> {
        let policy = self.policy;
        // A little longer than the operation may take.
        let idle = policy.timeout.saturating_add(Duration::from_secs(5)).as_millis();
        let values = [
            Value::Bytea(Some(&self.address.0)),
            Value::Bytea(Some(&self.token.0)),
            Value::Smallint(Some(self.call.fingerprint.version.into())),
            Value::Bytea(Some(&self.call.fingerprint.digest)),
            Value::Text(Some(&self.call.tenant)),
            Value::Text(Some(&self.call.user)),
            Value::Text(Some(&self.call.endpoint)),
            Value::Text(Some(&self.shown)),
            Value::Text(Some(&self.key_hash)),
            Value::Bigint(Some(micros(policy.lease))),
            Value::Bigint(Some(micros(policy.ttl))),
            Value::Bigint(self.over.map(|fence| i64::try_from(fence.0).unwrap_or(i64::MAX))),
            Value::Bigint(Some(i64::try_from(idle).unwrap_or(i64::MAX))),
        ];
        let rows = tx.rows(CLAIM, &values).await?;
        Found::read(rows.first().ok_or_else(|| Fault::unreadable("a claim was answered with no row"))?)
    }
}

/// Nothing was run.
fn unclaimed(fault: Fault) -> Result<Step, TxError> {
    match fault.kind {
        FaultKind::Unreadable => Err(TxError::Corrupt(Box::new(fault))),
        FaultKind::Lost | FaultKind::NotSent => Ok(Step::Unreached(fault)),
        // Also a row that is locked for longer than we wait.
        FaultKind::RolledBack if fault.is_transient() || fault.code.as_deref() == Some("55P03") => {
            Ok(Step::Unreached(fault))
        }
        FaultKind::RolledBack => Err(TxError::Database(fault)),
    }
}

/// It was run, and cannot be committed.
fn unanswered(fault: Fault) -> Result<Step, TxError> {
    match fault.code.as_deref() {
        // in_failed_sql_transaction; and the operation ended its transaction, or took its claim away.
        Some("25P02" | "IB001" | "IB002" | "IB003" | "IB004") => Err(TxError::RolledBack(fault)),
        _ if fault.is_transient() || fault.kind == FaultKind::Lost => Ok(Step::Again(fault)),
        _ => Err(TxError::Database(fault)),
    }
}

fn given_up(tries: u32, source: Fault) -> TxError {
    if source.is_transient() { TxError::Conflict { tries, source } } else { TxError::Database(source) }
}

impl Remembered {
    fn read(self) -> Result<Record, TxError> {
        match self {
            Self::Encoded(record) => Record::decode(record).map_err(|error| TxError::Corrupt(Box::new(error))),
            Self::Columns(record) => Ok(*record),
        }
    }
}

async fn within<T>(what: &str, work: impl Future<Output = Result<T, Fault>>) -> Result<T, Fault> {
    timeout(STATEMENT, work).await.unwrap_or_else(|_| Err(Fault::silent(what)))
}

/// Between half of it and all of it.
fn jittered(pause: Duration) -> Duration {
    let [random, ..] = Token::mint().0;
    pause / 2 + pause / 2 * u32::from(random) / 255
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}
