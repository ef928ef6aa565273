//! Errors of [`run_tx`](crate::run_tx), and whether a retry can succeed.

use std::time::Duration;

use ibid::{key::KeyError, policy::InvalidSetting};

use crate::driver::DriverError;

pub(crate) type TxBoxError = Box<dyn std::error::Error + Send + Sync>;

/// Why [`run_tx`](crate::run_tx) has no answer. Except for [`InDoubt`](Self::InDoubt), this call certainly changed
/// nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TxError {
    /// The policy does not allow the key.
    #[error("the key is not valid: {0}")]
    KeyInvalid(KeyError),
    /// The policy contradicts itself, or a setting is out of range.
    #[error("the policy cannot be used: {0}")]
    PolicyInvalid(InvalidSetting),
    /// The key belongs to a different request.
    #[error("this key was first used for a different request; a new operation needs a fresh key")]
    KeyReused,
    /// Another call with the key is in progress.
    #[error("the first call with this key has not ended yet; try again with the same key")]
    InProgress,
    /// A gateway or layer started a request with this key, and its outcome is unknown.
    #[error(
        "an earlier request with this key was started outside a transaction and its end was never seen; \
         it is not run again until somebody has looked what became of it"
    )]
    OutcomeUnknown,
    /// The operation returned an error. It was rolled back, and nothing is remembered.
    #[error("the operation failed and was rolled back: {0}")]
    Failed(#[source] TxBoxError),
    /// The operation exceeded the policy's `timeout`.
    #[error("the operation took longer than {0:?} and was rolled back")]
    TimedOut(Duration),
    /// The operation returned `Ok`, but its transaction cannot be committed: one of its statements had failed, or the
    /// operation ended the transaction itself.
    #[error("the operation went on although its transaction could not be committed any more: {0}")]
    RolledBack(#[source] DriverError),
    /// Every attempt was rolled back by a serialization failure or deadlock.
    #[error("rolled back {tries} times, because others did the same at the same time: {source}")]
    Conflict {
        /// Number of attempts.
        tries: u32,
        /// Error of the last attempt.
        source: DriverError,
    },
    /// The reply to COMMIT was lost, and its outcome could not be determined in time.
    #[error(
        "whether the transaction was committed is not known, because the database cannot be asked: {0}; \
         a call with the same key gets the answer, or runs if there is none"
    )]
    InDoubt(#[source] DriverError),
    /// The database rejected the call or was unreachable.
    #[error("the database did not do it, and nothing was changed: {0}")]
    Database(#[source] DriverError),
    /// The remembered answer cannot be read. It is never served.
    #[error("what is remembered under this key cannot be read: {0}")]
    Corrupt(#[source] TxBoxError),
}

impl TxError {
    /// Returns `true` if the same call with the **same key** may succeed later. It never has its effect twice, even if
    /// this one is [in doubt](Self::InDoubt). Otherwise calls with this key keep failing until the cause is fixed.
    pub fn may_retry(&self) -> bool {
        match self {
            Self::InProgress | Self::Failed(_) | Self::TimedOut(_) => true,
            Self::Conflict { .. } | Self::InDoubt(_) | Self::Database(_) => true,
            Self::KeyInvalid(_) | Self::PolicyInvalid(_) | Self::KeyReused => false,
            Self::OutcomeUnknown | Self::RolledBack(_) | Self::Corrupt(_) => false,
        }
    }
}
