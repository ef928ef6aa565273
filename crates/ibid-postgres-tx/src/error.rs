//! Why there is no answer, and whether it helps to ask again.

use std::time::Duration;

use crate::driver::DriverError;

pub(crate) type TxBoxError = Box<dyn std::error::Error + Send + Sync>;

/// Why [`run_tx`](crate::run_tx) has no answer. Of all of them but [`InDoubt`](Self::InDoubt) it is known that this call
/// changed nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TxError {
    /// The key is not what the policy allows.
    #[error("the key is not valid: {0}")]
    KeyInvalid(String),
    /// The policy contradicts itself, or a dial is out of its range.
    #[error("the policy cannot be used: {0}")]
    PolicyInvalid(String),
    /// The key belongs to another request.
    #[error("this key was first used for a different request; a new operation needs a fresh key")]
    KeyReused,
    /// Somebody else is at it.
    #[error("the first call with this key has not ended yet; try again with the same key")]
    InProgress,
    /// A gateway or a layer began it and nobody knows how that ended.
    #[error(
        "an earlier request with this key was started outside a transaction and its end was never seen; \
         it is not run again until somebody has looked what became of it"
    )]
    OutcomeUnknown,
    /// The operation said so. It was rolled back, and nothing is remembered.
    #[error("the operation failed and was rolled back: {0}")]
    Failed(#[source] TxBoxError),
    /// It took longer than the policy's `timeout`.
    #[error("the operation took longer than {0:?} and was rolled back")]
    TimedOut(Duration),
    /// The operation said that all went well, but its transaction cannot be committed: a statement in it had failed, or
    /// it ended the transaction itself.
    #[error("the operation went on although its transaction could not be committed any more: {0}")]
    RolledBack(#[source] DriverError),
    /// Rolled back as often as it is tried, because it was in the way of others each time.
    #[error("rolled back {tries} times, because others did the same at the same time: {source}")]
    Conflict {
        /// How often it was tried.
        tries: u32,
        /// The last time.
        source: DriverError,
    },
    /// The answer to COMMIT was lost, and what became of it could not be looked up in time.
    #[error(
        "whether the transaction was committed is not known, because the database cannot be asked: {0}; \
         a call with the same key gets the answer, or runs if there is none"
    )]
    InDoubt(#[source] DriverError),
    /// The database did not do it.
    #[error("the database did not do it, and nothing was changed: {0}")]
    Database(#[source] DriverError),
    /// What is remembered cannot be read. Never answered from.
    #[error("what is remembered under this key cannot be read: {0}")]
    Corrupt(#[source] TxBoxError),
}

impl TxError {
    /// Whether the same call with the **same key** may succeed later. It never has its effect twice: also if this one's
    /// is [in doubt](Self::InDoubt). Of the others, no call with this key will ever do better until somebody has changed
    /// something.
    pub fn may_retry(&self) -> bool {
        match self {
            Self::InProgress
            | Self::Failed(_)
            | Self::TimedOut(_)
            | Self::Conflict { .. }
            | Self::InDoubt(_)
            | Self::Database(_) => true,
            Self::KeyInvalid(_)
            | Self::PolicyInvalid(_)
            | Self::KeyReused
            | Self::OutcomeUnknown
            | Self::RolledBack(_)
            | Self::Corrupt(_) => false,
        }
    }
}
