use std::{fmt, time::Duration};

use ibid::inbox::{Event, Reply};
use tokio::time::timeout;

use super::{Claimed, Connection, Ends, FaultKind, Inbox, InboxError, Pool, Statements, given_up};
use crate::run::{BoxFuture, Tx};

/// When the database is in the way, rather than the event.
const SOON: Duration = Duration::from_secs(1);

/// What became of a delivery.
#[derive(Debug)]
#[must_use]
pub enum Handled<E> {
    /// Its effect and its mark are committed.
    Done,
    /// It was handled before.
    Duplicate,
    /// It happened so long ago that it may have been handled, and its mark removed since.
    TooOld,
    /// It failed too often before, and was not handled.
    Poisoned {
        /// How often.
        attempts: u32,
        /// What it failed of the last time.
        error: String,
    },
    /// It failed, nothing of it is committed, and that is counted.
    Failed {
        /// Why.
        why: Why<E>,
        /// How often it has failed by now.
        attempts: u32,
        /// Whether that is too often.
        poisoned: bool,
    },
}

/// Why an event was not handled.
#[derive(Debug)]
pub enum Why<E> {
    /// The handler said so.
    Handler(E),
    /// The handler said that all is well, but a statement of its transaction had failed.
    Spoilt,
    /// The transaction could not be committed: a deferred constraint, for example.
    Commit(InboxError),
}

impl Inbox {
    /// Claims an event, runs the handler in the same transaction, and commits. A failure is counted.
    ///
    /// The handler must not end the transaction. What it does outside of it, it may do twice.
    ///
    /// # Errors
    /// If the database was in the way: nothing is counted, and the event must come again.
    pub async fn handle<P, E, H>(&self, pool: &P, event: &Event, handler: H) -> Result<Handled<E>, InboxError>
    where
        P: Pool,
        E: fmt::Display + Send,
        H: for<'t, 'c> FnOnce(&'t mut Tx<'c, P>) -> BoxFuture<'t, Result<(), E>> + Send,
    {
        let mut connection = self.connection(pool).await?;
        let alone = timeout(self.limit, async {
            let mut tx = connection.begin(None).await?;
            match self.claim(&mut tx, event).await? {
                Claimed::New => {}
                other => {
                    tx.rollback().await?;
                    return Ok(Ok(not_new(other)));
                }
            }
            match handler(&mut tx).await {
                Err(error) => {
                    tx.rollback().await?;
                    Ok(Err(Why::Handler(error)))
                }
                Ok(()) => match commit(tx).await {
                    Ok(()) => Ok(Ok(Handled::Done)),
                    Err(why) => why.map(Err),
                },
            }
        });
        let ended = match alone.await {
            Ok(ended) => ended?,
            Err(_) => return Err(given_up(connection)),
        };
        // Back into its pool: counting a failure needs a connection too.
        drop(connection);
        match ended {
            Ok(handled) => Ok(handled),
            Err(why) => self.count(pool, event, why).await,
        }
    }

    /// Claims many events in one statement, runs the handler for each that is new, and commits them together. One that
    /// fails is rolled back to where it began, and does not take the others with it. The answers are in the order of
    /// the events.
    ///
    /// If the whole cannot be committed, the events are handled one by one, so that the one at fault is found: the
    /// handler may be called twice for an event, and commits once.
    ///
    /// # Errors
    /// If the database was in the way: nothing is counted, and all must come again.
    pub async fn handle_batch<P, E, H>(
        &self, pool: &P, events: &[Event], mut handler: H,
    ) -> Result<Vec<Handled<E>>, InboxError>
    where
        P: Pool,
        E: fmt::Display + Send,
        H: for<'t, 'c> FnMut(&'t mut Tx<'c, P>, usize) -> BoxFuture<'t, Result<(), E>> + Send,
    {
        let mut connection = self.connection(pool).await?;
        let ended = match timeout(self.limit, self.together::<P, E, H>(&mut connection, events, &mut handler)).await {
            Ok(ended) => ended?,
            Err(_) => return Err(given_up(connection)),
        };
        drop(connection);
        match ended {
            Some(ends) => {
                let mut handled = Vec::with_capacity(ends.len());
                for (event, end) in events.iter().zip(ends) {
                    handled.push(match end {
                        Ok(end) => end,
                        Err(why) => self.count(pool, event, why).await?,
                    });
                }
                Ok(handled)
            }
            None => {
                let mut handled = Vec::with_capacity(events.len());
                for (nth, event) in events.iter().enumerate() {
                    handled.push(self.handle(pool, event, |tx| handler(tx, nth)).await?);
                }
                Ok(handled)
            }
        }
    }

    /// All in one transaction. `None` if it could not be committed, and one of the events must be at fault.
    async fn together<P, E, H>(
        &self, connection: &mut P::Of, events: &[Event], handler: &mut H,
    ) -> Result<Option<Vec<Result<Handled<E>, Why<E>>>>, InboxError>
    where
        P: Pool,
        E: fmt::Display + Send,
        H: for<'t, 'c> FnMut(&'t mut Tx<'c, P>, usize) -> BoxFuture<'t, Result<(), E>> + Send,
    {
        let mut tx = connection.begin(None).await?;
        let claims = self.claim_batch(&mut tx, events).await?;
        let mut ends = Vec::with_capacity(events.len());
        for (nth, claim) in claims.into_iter().enumerate() {
            ends.push(match claim {
                Claimed::New => {
                    tx.rows("SAVEPOINT ibid_event", &[]).await?;
                    let ended = handler(&mut tx, nth).await.map_err(Why::Handler);
                    // Fails if a statement of the handler has failed, whatever the handler says.
                    let ended = match ended {
                        Ok(()) => match tx.rows("RELEASE SAVEPOINT ibid_event", &[]).await {
                            Ok(_) => Ok(Handled::Done),
                            Err(fault) if fault.kind == FaultKind::RolledBack => Err(Why::Spoilt),
                            Err(fault) => return Err(fault.into()),
                        },
                        Err(why) => Err(why),
                    };
                    if ended.is_err() {
                        tx.rows("ROLLBACK TO SAVEPOINT ibid_event", &[]).await?;
                        self.unclaim(&mut tx, &events[nth]).await?;
                    }
                    ended
                }
                other => Ok(not_new(other)),
            });
        }
        match commit(tx).await {
            Ok(()) => Ok(Some(ends)),
            Err(Ok(_at_fault)) => Ok(None),
            Err::<_, Result<Why<E>, _>>(Err(error)) => Err(error),
        }
    }

    async fn count<P: Pool, E: fmt::Display>(
        &self, pool: &P, event: &Event, why: Why<E>,
    ) -> Result<Handled<E>, InboxError> {
        let failures = self.failed(pool, event, &why).await?;
        Ok(Handled::Failed { why, attempts: failures.attempts, poisoned: failures.poisoned })
    }

    /// What to tell the broker about a delivery that was handled like this.
    pub fn reply<E: fmt::Display>(&self, handled: &Result<Handled<E>, InboxError>) -> Reply {
        match handled {
            Ok(Handled::Done | Handled::Duplicate) => Reply::Acknowledge,
            Ok(Handled::TooOld) => {
                let why = "it is older than handled events are remembered: it may have been handled already";
                Reply::DeadLetter { why: why.into() }
            }
            Ok(Handled::Poisoned { attempts, error }) => {
                Reply::DeadLetter { why: format!("it failed {attempts} times; the last time: {error}") }
            }
            Ok(Handled::Failed { why, attempts, poisoned: true }) => {
                Reply::DeadLetter { why: format!("it failed {attempts} times; the last time: {why}") }
            }
            Ok(Handled::Failed { attempts, .. }) => Reply::Again { after: self.backoff.after(*attempts) },
            Err(_) => Reply::Again { after: SOON },
        }
    }
}

/// Commits what is whole. What failed is either the event's own fault or the database's.
async fn commit<T: Statements + Ends, E>(mut tx: T) -> Result<(), Result<Why<E>, InboxError>> {
    // A failed transaction would be rolled back by its COMMIT, without an error.
    match tx.rows("SELECT 1", &[]).await {
        Ok(_) => {}
        Err(fault) if fault.kind == FaultKind::RolledBack => {
            let _ = tx.rollback().await;
            return Err(Ok(Why::Spoilt));
        }
        Err(fault) => return Err(Err(fault.into())),
    }
    match tx.commit().await {
        Ok(()) => Ok(()),
        Err(fault) if fault.kind == FaultKind::RolledBack && !fault.is_transient() => {
            Err(Ok(Why::Commit(fault.into())))
        }
        Err(fault) => Err(Err(fault.into())),
    }
}

fn not_new<E>(claim: Claimed) -> Handled<E> {
    match claim {
        Claimed::New => unreachable!("what is new is handled"),
        Claimed::Duplicate => Handled::Duplicate,
        Claimed::TooOld => Handled::TooOld,
        Claimed::Poisoned { attempts, error } => Handled::Poisoned { attempts, error },
    }
}

impl<E: fmt::Display> fmt::Display for Why<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Handler(error) => error.fmt(f),
            Self::Spoilt => f.write_str("a statement failed, and the handler went on as if it had not"),
            Self::Commit(error) => write!(f, "it could not be committed: {error}"),
        }
    }
}
