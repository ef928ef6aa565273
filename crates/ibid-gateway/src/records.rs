//! What a store remembers, for people and programs: how it is found, shown and changed.
//!
//! `ibid keys` and the admin API both stand on this, so an entry looks the same and a change means the same whichever
//! way an operator takes.
//!
//! Invariant: every change is a compare-and-set on the fence of the entry that was seen, and has a reason.

use ibid::store::{Address, State, StoreError};

pub use self::{
    change::{Answer, Change, Changed, LARGEST_BODY, Made, Outcome, What},
    find::{Entry, Found, Wanted, at},
    reseal::{Resealed, Unopened},
    view::{BodyView, Page, Response, View},
};

pub(crate) mod change;
mod find;
mod reseal;
pub(crate) mod view;

/// What entries are asked for by. All that is set must match.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Query {
    /// At this address.
    pub address: Option<Address>,
    /// In this state.
    pub state: Option<State>,
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
pub enum NotFound {
    /// Nothing is there.
    #[error("nothing matches: it was never there, was released or forgotten, or has expired")]
    Absent,
    /// More than the one that was meant.
    #[error("more than one entry matches; name one by its address, such as {0} or {1}")]
    Many(Address, Address),
    /// It never stood still.
    #[error("it changes faster than it can be read; try again")]
    Restless,
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The state's name.
pub fn state_name(state: State) -> &'static str {
    match state {
        State::Processing => "processing",
        State::Done => "done",
        State::Failed => "failed",
        State::Unknown => "unknown",
    }
}

/// The state of that name.
pub fn state_named(name: &str) -> Option<State> {
    [State::Processing, State::Done, State::Failed, State::Unknown].into_iter().find(|state| state_name(*state) == name)
}
