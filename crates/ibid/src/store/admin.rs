use std::time::Duration;

use bytes::Bytes;

use super::{Address, Fence, Fingerprint, RecordSummary, SettleOutcome, Settlement, StoreFuture, Tags};

/// The operations for operators. Every change is a compare-and-set on `seen`: if the entry has another holder, nothing
/// is written and [`SettleOutcome::ClaimLost`] contains the current entry.
pub trait StoreAdmin: Send + Sync {
    /// Lists matching entries, starting at a cursor.
    fn list<'a>(&'a self, filter: &'a EntryFilter, from: ListCursor, at_most: u32) -> StoreFuture<'a, EntryPage>;

    /// Sets an unknown outcome. Unlike a holder's release, [`Settlement::Release`] frees the entry here: it states that
    /// the operation did not happen.
    ///
    /// An entry that is completed, or whose lease has not expired, is not changed.
    fn resolve<'a>(&'a self, at: &'a Address, seen: Fence, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome>;

    /// Forgets an entry in any state and spends its token.
    fn forget<'a>(&'a self, at: &'a Address, seen: Fence) -> StoreFuture<'a, SettleOutcome>;

    /// Replaces the bytes of a completed record. Expiry and summary stay the same.
    fn replace_record<'a>(&'a self, at: &'a Address, seen: Fence, record: Bytes) -> StoreFuture<'a, SettleOutcome>;

    /// Counts the entries by state.
    fn counts(&self) -> StoreFuture<'_, EntryCounts>;

    /// Returns the time since the Unix epoch by the store's clock; `None` if that is the clock of this machine.
    fn clock(&self) -> StoreFuture<'_, Option<Duration>> {
        StoreFuture::ready(Ok(None))
    }
}

/// The state of an entry, as operators see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EntryState {
    /// In progress: the lease has not expired.
    Processing,
    /// Completed with a success.
    Done,
    /// Completed with a remembered failure.
    Failed,
    /// Outcome unknown: the holder was parked, or its lease expired.
    Unknown,
}

/// Selects entries to list. All fields that are set must match.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EntryFilter {
    /// Matches entries in this state.
    pub state: Option<EntryState>,
    /// Matches the entry at this address.
    pub address: Option<Address>,
    /// Matches the tenant tag.
    pub tenant: Option<String>,
    /// Matches the user tag.
    pub user: Option<String>,
    /// Matches the endpoint tag.
    pub endpoint: Option<String>,
    /// Matches the key tag.
    pub key: Option<String>,
    /// Matches the hash of the whole key, see [`key_hash`](super::key_hash).
    pub key_hash: Option<String>,
    /// Matches entries that were claimed longer ago than this.
    pub older_than: Option<Duration>,
}

impl EntryFilter {
    /// Returns whether an entry matches.
    pub fn matches(&self, entry: &EntryInfo) -> bool {
        let tag = |want: &Option<String>, have: &str| want.as_deref().is_none_or(|want| want == have);
        self.state.is_none_or(|state| state == entry.state)
            && self.address.is_none_or(|address| address == entry.address)
            && self.older_than.is_none_or(|age| entry.age > age)
            && tag(&self.tenant, entry.tags.tenant())
            && tag(&self.user, entry.tags.user())
            && tag(&self.endpoint, entry.tags.endpoint())
            && tag(&self.key, entry.tags.key())
            && tag(&self.key_hash, entry.tags.key_hash())
    }
}

/// The position where a listing continues. The default is the start.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ListCursor(pub Option<Address>);

/// One page of a listing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EntryPage {
    /// The entries, ordered by address.
    pub entries: Vec<EntryInfo>,
    /// The start of the next page; `None` on the last page.
    pub next: Option<ListCursor>,
}

impl EntryPage {
    /// Creates a page of the first `at_most` of these entries. The next page starts after the last of them.
    pub fn truncated(mut entries: Vec<EntryInfo>, at_most: usize) -> Self {
        let more = entries.len() > at_most;
        entries.truncate(at_most);
        let next = entries.last().filter(|_| more).map(|last| ListCursor(Some(last.address)));
        Self { entries, next }
    }
}

/// One entry, as operators see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EntryInfo {
    /// The address of the entry.
    pub address: Address,
    /// The current state.
    pub state: EntryState,
    /// The fence of the holder.
    pub fence: Fence,
    /// The number of the holder's run, from 1.
    pub attempt: u32,
    /// The fingerprint of the request.
    pub fingerprint: Fingerprint,
    /// The tags to search by.
    pub tags: Tags,
    /// The label of the claim.
    pub label: Bytes,
    /// The time since the claim was granted.
    pub age: Duration,
    /// The time until the entry expires.
    pub expires_in: Duration,
    /// The summary, if the entry is completed.
    pub summary: Option<RecordSummary>,
}

/// The number of entries by state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EntryCounts {
    /// Entries in progress.
    pub processing: u64,
    /// Entries whose outcome is unknown.
    pub unknown: u64,
    /// Completed entries, including failures.
    pub finished: u64,
    /// The approximate size of all entries in bytes.
    pub bytes: u64,
}

impl EntryCounts {
    /// Counts one entry.
    pub fn add(&mut self, state: EntryState) {
        match state {
            EntryState::Processing => self.processing += 1,
            EntryState::Unknown => self.unknown += 1,
            EntryState::Done | EntryState::Failed => self.finished += 1,
        }
    }
}
