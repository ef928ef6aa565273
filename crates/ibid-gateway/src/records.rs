//! Finds, shows and changes stored entries, for operators.
//!
//! `ibid keys` and the admin API both use this module, so that an entry looks the same and a change means the same in
//! both.
//!
//! Invariant: every change is a compare-and-set on the fence of the entry that the operator saw, and has a reason.

use ibid::store::{Address, EntryState, StoreError};

pub(crate) use self::change::ChangeVerb;
pub use self::{
    change::{ChangeAction, ChangeReport, ChangeRequest, MAX_ANSWER_BODY_BYTES, ResolvedAnswer},
    find::RecordEntry,
    reseal::{ResealReport, UnopenedRecord},
    view::{AnswerView, BodyView, RecordList, RecordView},
};

pub(crate) mod change;
mod find;
mod reseal;
pub(crate) mod view;

/// A query for entries. All filters that are set must match.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RecordQuery {
    pub address: Option<Address>,
    pub state: Option<EntryState>,
    pub tenant: Option<String>,
    pub user: Option<String>,
    pub endpoint: Option<String>,
    /// The key as the client sent it, or as it is stored, which may be masked.
    pub key: Option<String>,
    /// Minimum time since the claim.
    pub older_than: Option<std::time::Duration>,
}

#[derive(Debug, thiserror::Error)]
pub enum RecordLookupError {
    #[error("nothing matches: it was never there, was released or forgotten, or has expired")]
    NotFound,
    /// A query for one entry matches several; two of their addresses.
    #[error("more than one entry matches; name one by its address, such as {0} or {1}")]
    Ambiguous(Address, Address),
    /// The record changed during every read attempt.
    #[error("it changes faster than it can be read; try again")]
    KeepsChanging,
    #[error(transparent)]
    Store(#[from] StoreError),
}

pub fn state_name(state: EntryState) -> &'static str {
    match state {
        EntryState::Processing => "processing",
        EntryState::Done => "done",
        EntryState::Failed => "failed",
        EntryState::Unknown => "unknown",
    }
}

pub fn state_from_name(name: &str) -> Option<EntryState> {
    [EntryState::Processing, EntryState::Done, EntryState::Failed, EntryState::Unknown]
        .into_iter()
        .find(|state| state_name(*state) == name)
}
