//! What a store remembers, for people and programs: how it is found, shown and changed.
//!
//! `ibid keys` and the admin API both stand on this, so an entry looks the same and a change means the same whichever
//! way an operator takes.
//!
//! Invariant: every change is a compare-and-set on the fence of the entry that was seen, and has a reason.

use ibid::store::{Address, EntryState, StoreError};

pub use self::{
    change::{
        ChangeAction, ChangeOutcome, ChangeReport, ChangeRequest, ChangeResult, MAX_ANSWER_BODY_BYTES, ResolvedAnswer,
    },
    find::{FilterSet, FoundEntries, RecordEntry, at},
    reseal::{ResealReport, UnopenedRecord},
    view::{AnswerView, BodyView, RecordList, RecordView},
};

pub(crate) mod change;
mod find;
mod reseal;
pub(crate) mod view;

/// What entries are asked for by. All that is set must match.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RecordQuery {
    /// At this address.
    pub address: Option<Address>,
    /// In this state.
    pub state: Option<EntryState>,
    /// Of this tenant.
    pub tenant: Option<String>,
    /// Of this user.
    pub user: Option<String>,
    /// Of this endpoint.
    pub endpoint: Option<String>,
    /// With this key: as the client sent it, or as it is stored, which may be masked.
    pub key: Option<String>,
    /// Claimed longer ago.
    pub older_than: Option<std::time::Duration>,
}

/// Why entries could not be found.
#[derive(Debug, thiserror::Error)]
pub enum RecordLookupError {
    /// Nothing is there.
    #[error("nothing matches: it was never there, was released or forgotten, or has expired")]
    NotFound,
    /// More than the one that was meant.
    #[error("more than one entry matches; name one by its address, such as {0} or {1}")]
    Ambiguous(Address, Address),
    /// It never stood still.
    #[error("it changes faster than it can be read; try again")]
    KeepsChanging,
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The state's name.
pub fn state_name(state: EntryState) -> &'static str {
    match state {
        EntryState::Processing => "processing",
        EntryState::Done => "done",
        EntryState::Failed => "failed",
        EntryState::Unknown => "unknown",
    }
}

/// The state of that name.
pub fn state_from_name(name: &str) -> Option<EntryState> {
    [EntryState::Processing, EntryState::Done, EntryState::Failed, EntryState::Unknown]
        .into_iter()
        .find(|state| state_name(*state) == name)
}
