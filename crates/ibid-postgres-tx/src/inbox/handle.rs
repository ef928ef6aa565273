use std::{fmt, time::Duration};

use ibid::inbox::{BrokerReply, InboxEvent};

use super::{
    DriverErrorKind, SqlValue, Transaction, TransactionEnd, TxConnection, TxEventClaim, TxInbox, TxInboxError, TxPool,
    event_params, event_time,
};
use crate::run::{Tx, TxFuture};

/// Redelivery delay after a database error, which is not the event's fault.
const DATABASE_RETRY_DELAY: Duration = Duration::from_secs(1);

/// The outcome of handling a delivery.
#[derive(Debug)]
#[must_use]
pub enum TxEventOutcome<E> {
    /// The event's effect and its mark are committed.
    Done,
    /// The event was handled before.
    Duplicate,
    /// The event is so old that it may have been handled and its mark removed since.
    TooOld,
    /// The event failed too often before, and was not handled.
    Poisoned {
        /// Number of failures.
        attempts: u32,
        /// The last error.
        error: String,
    },
    /// Handling failed. Nothing is committed, and the failure is counted.
    Failed {
        /// The cause of the failure.
        why: TxEventFailure<E>,
        /// Number of failures so far.
        attempts: u32,
        /// Whether the limit is reached.
        poisoned: bool,
    },
}

/// Why an event was not handled.
#[derive(Debug, thiserror::Error)]
pub enum TxEventFailure<E> {
    /// The handler returned an error.
    #[error("{0}")]
    Handler(E),
    /// The handler returned `Ok`, but a statement of its transaction had failed.
    #[error("a statement failed, and the handler went on as if it had not")]
    Spoilt,
    /// The transaction could not be committed, for example because of a deferred constraint.
    #[error("it could not be committed: {0}")]
    CommitFailed(TxInboxError),
}

impl TxInbox {
    /// Claims an event, runs the handler in the same transaction, and commits. A failure is counted.
    ///
    /// The handler must not end the transaction. Its effects outside the transaction may happen twice.
    ///
    /// # Errors
    /// Returns an error if the database cannot be used: nothing is counted, and the event must be delivered again.
    pub async fn handle<P, E, H>(
        &self, pool: &P, event: &InboxEvent, handler: H,
    ) -> Result<TxEventOutcome<E>, TxInboxError>
    where
        P: TxPool,
        E: fmt::Display + Send,
        H: for<'t, 'c> FnOnce(&'t mut Tx<'c, P>) -> TxFuture<'t, Result<(), E>> + Send,
    {
        let alone = async |connection: &mut P::Conn| {
            let mut handler = Some(handler);
            if let Some(handled) = self.handle_unknown::<P, E, H>(connection, event, &mut handler).await? {
                return Ok(handled);
            }
            connection.end_unclaimed().await?;
            let mut tx = connection.begin(None).await?;
            let claim = self.claim(&mut tx, event).await?;
            match handler {
                Some(handler) if claim == TxEventClaim::New => run_handler::<P, E, H>(tx, handler).await,
                _ => {
                    tx.rollback().await?;
                    Ok(Ok(skipped_outcome(claim)))
                }
            }
        };
        // The connection is back in the pool by then: counting a failure needs one.
        match self.on_connection(pool, alone).await? {
            Ok(handled) => Ok(handled),
            Err(why) => self.count_failure(pool, event, why).await,
        }
    }

    /// Handles an event of which nothing is known: BEGIN and the claim are one message. Returns `None` for any other.
    async fn handle_unknown<P, E, H>(
        &self, connection: &mut P::Conn, event: &InboxEvent, handler: &mut Option<H>,
    ) -> Result<Option<Result<TxEventOutcome<E>, TxEventFailure<E>>>, TxInboxError>
    where
        P: TxPool,
        E: fmt::Display + Send,
        H: for<'t, 'c> FnOnce(&'t mut Tx<'c, P>) -> TxFuture<'t, Result<(), E>> + Send,
    {
        let [consumer, source, id] = event_params(event);
        let (at, keep) = (SqlValue::Bigint(Some(event_time(event))), SqlValue::Bigint(Some(self.ttl_us())));
        let values = [consumer, source, id, at, keep];
        let Some(tx) = connection.begin_claimed(None, "_begin_event", &values).await? else { return Ok(None) };
        let handler = handler.take().expect("it is called once");
        run_handler::<P, E, H>(tx, handler).await.map(Some)
    }

    /// Claims many events in one statement, runs the handler for each new one, and commits them together. A failed
    /// event is rolled back to its savepoint, and does not affect the others. The results are in the order of the
    /// events.
    ///
    /// If the transaction cannot be committed, the events are handled one by one to find the faulty one. The handler
    /// may then be called twice for an event, but commits once.
    ///
    /// # Errors
    /// Returns an error if the database cannot be used: nothing is counted, and all events must be delivered again.
    pub async fn handle_batch<P, E, H>(
        &self, pool: &P, events: &[InboxEvent], mut handler: H,
    ) -> Result<Vec<TxEventOutcome<E>>, TxInboxError>
    where
        P: TxPool,
        E: fmt::Display + Send,
        H: for<'t, 'c> FnMut(&'t mut Tx<'c, P>, usize) -> TxFuture<'t, Result<(), E>> + Send,
    {
        let together = async |connection: &mut P::Conn| {
            self.handle_in_one_transaction::<P, E, H>(connection, events, &mut handler).await
        };
        let mut handled = Vec::with_capacity(events.len());
        match self.on_connection(pool, together).await? {
            Some(ends) => {
                for (event, end) in events.iter().zip(ends) {
                    handled.push(match end {
                        Ok(end) => end,
                        Err(why) => self.count_failure(pool, event, why).await?,
                    });
                }
            }
            None => {
                for (nth, event) in events.iter().enumerate() {
                    handled.push(self.handle(pool, event, |tx| handler(tx, nth)).await?);
                }
            }
        }
        Ok(handled)
    }

    /// Handles all events in one transaction. Returns `None` if it cannot be committed because of one of the events.
    async fn handle_in_one_transaction<P, E, H>(
        &self, connection: &mut P::Conn, events: &[InboxEvent], handler: &mut H,
    ) -> Result<Option<Vec<Result<TxEventOutcome<E>, TxEventFailure<E>>>>, TxInboxError>
    where
        P: TxPool,
        E: fmt::Display + Send,
        H: for<'t, 'c> FnMut(&'t mut Tx<'c, P>, usize) -> TxFuture<'t, Result<(), E>> + Send,
    {
        let mut tx = connection.begin(None).await?;
        let claims = self.claim_batch(&mut tx, events).await?;
        let mut ends = Vec::with_capacity(events.len());
        for (nth, claim) in claims.into_iter().enumerate() {
            ends.push(match claim {
                TxEventClaim::New => {
                    tx.query_rows("SAVEPOINT ibid_event", &[]).await?;
                    let ended = match handler(&mut tx, nth).await {
                        Err(error) => Err(TxEventFailure::Handler(error)),
                        // Fails if a statement of the handler has failed, even if the handler returned `Ok`.
                        Ok(()) => match tx.query_rows("RELEASE SAVEPOINT ibid_event", &[]).await {
                            Ok(_) => Ok(TxEventOutcome::Done),
                            Err(fault) if fault.kind == DriverErrorKind::RolledBack => Err(TxEventFailure::Spoilt),
                            Err(fault) => return Err(fault.into()),
                        },
                    };
                    if ended.is_err() {
                        tx.query_rows("ROLLBACK TO SAVEPOINT ibid_event", &[]).await?;
                        self.unclaim(&mut tx, &events[nth]).await?;
                    }
                    ended
                }
                other => Ok(skipped_outcome(other)),
            });
        }
        match commit_checked(tx).await {
            Ok(()) => Ok(Some(ends)),
            Err(Ok(_at_fault)) => Ok(None),
            Err::<_, Result<TxEventFailure<E>, _>>(Err(error)) => Err(error),
        }
    }

    async fn count_failure<P: TxPool, E: fmt::Display>(
        &self, pool: &P, event: &InboxEvent, why: TxEventFailure<E>,
    ) -> Result<TxEventOutcome<E>, TxInboxError> {
        let failures = self.record_failure(pool, event, &why).await?;
        Ok(TxEventOutcome::Failed { why, attempts: failures.attempts, poisoned: failures.poisoned })
    }

    /// Returns the reply to the broker for this result.
    pub fn reply<E: fmt::Display>(&self, handled: &Result<TxEventOutcome<E>, TxInboxError>) -> BrokerReply {
        match handled {
            Ok(TxEventOutcome::Done | TxEventOutcome::Duplicate) => BrokerReply::Acknowledge,
            Ok(TxEventOutcome::TooOld) => BrokerReply::too_old(),
            Ok(TxEventOutcome::Poisoned { attempts, error }) => {
                BrokerReply::DeadLetter { why: format!("it failed {attempts} times; the last time: {error}") }
            }
            Ok(TxEventOutcome::Failed { why, attempts, poisoned: true }) => {
                BrokerReply::DeadLetter { why: format!("it failed {attempts} times; the last time: {why}") }
            }
            Ok(TxEventOutcome::Failed { attempts, .. }) => {
                BrokerReply::Redeliver { after: self.backoff.after(*attempts) }
            }
            Err(_) => BrokerReply::Redeliver { after: DATABASE_RETRY_DELAY },
        }
    }
}

async fn run_handler<P, E, H>(
    mut tx: Tx<'_, P>, handler: H,
) -> Result<Result<TxEventOutcome<E>, TxEventFailure<E>>, TxInboxError>
where
    P: TxPool,
    E: fmt::Display + Send,
    H: for<'t, 'c> FnOnce(&'t mut Tx<'c, P>) -> TxFuture<'t, Result<(), E>> + Send,
{
    match handler(&mut tx).await {
        Err(error) => {
            tx.rollback().await?;
            Ok(Err(TxEventFailure::Handler(error)))
        }
        Ok(()) => match commit_checked(tx).await {
            Ok(()) => Ok(Ok(TxEventOutcome::Done)),
            Err(why) => why.map(Err),
        },
    }
}

/// Commits, unless a statement failed. The error is either the event's fault or the database's.
async fn commit_checked<T: Transaction + TransactionEnd, E>(
    tx: T,
) -> Result<(), Result<TxEventFailure<E>, TxInboxError>> {
    // COMMIT of a failed transaction would roll back without an error: a statement that goes with it fails.
    match tx.commit_after("SELECT 1".into()).await {
        Ok(()) => Ok(()),
        // in_failed_sql_transaction
        Err(fault) if fault.code.as_deref() == Some("25P02") => Err(Ok(TxEventFailure::Spoilt)),
        Err(fault) if fault.kind == DriverErrorKind::RolledBack && !fault.is_transient() => {
            Err(Ok(TxEventFailure::CommitFailed(fault.into())))
        }
        Err(fault) => Err(Err(fault.into())),
    }
}

fn skipped_outcome<E>(claim: TxEventClaim) -> TxEventOutcome<E> {
    match claim {
        TxEventClaim::New => unreachable!("what is new is handled"),
        TxEventClaim::Duplicate => TxEventOutcome::Duplicate,
        TxEventClaim::TooOld => TxEventOutcome::TooOld,
        TxEventClaim::Poisoned { attempts, error } => TxEventOutcome::Poisoned { attempts, error },
    }
}
