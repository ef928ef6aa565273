use std::time::Duration;

use bytes::Bytes;

use super::{Address, Fence, Fingerprint, RecordSummary, SettleOutcome, Settlement, StoreFuture, Tags};

/// What operators may see and change. Every change is a compare-and-set on `seen`: if another holder is there by
/// now, nothing is written and [`SettleOutcome::ClaimLost`] says what is.
pub trait StoreAdmin: Send + Sync {
    /// Entries that match, from a cursor on.
    fn list<'a>(&'a self, filter: &'a EntryFilter, from: ListCursor, at_most: u32) -> StoreFuture<'a, EntryPage>;

    /// Ends an entry as somebody who knows says it ended. Unlike the holder's own release, [`Settlement::Release`] here
    /// frees an unknown entry: it says that it never happened.
    ///
    /// An entry that is finished, or that is held by a lease that has not lapsed, is not changed.
    fn resolve<'a>(&'a self, at: &'a Address, seen: Fence, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome>;

    /// Forgets an entry in any state. Its token is spent.
    fn forget<'a>(&'a self, at: &'a Address, seen: Fence) -> StoreFuture<'a, SettleOutcome>;

    /// Swaps the bytes of a finished record, life and outline kept.
    fn replace_record<'a>(&'a self, at: &'a Address, seen: Fence, record: Bytes) -> StoreFuture<'a, SettleOutcome>;

    /// How many entries there are.
    fn counts(&self) -> StoreFuture<'_, EntryCounts>;
}

/// The state of an entry, as operators see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EntryState {
    /// Running, and heard of within its lease.
    Processing,
    /// Remembered as a success.
    Done,
    /// Remembered as a failure.
    Failed,
    /// Parked, or silent for longer than its lease.
    Unknown,
}

/// Which entries to list. All that are set must match.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EntryFilter {
    /// In this state.
    pub state: Option<EntryState>,
    /// At this address.
    pub address: Option<Address>,
    /// With this tenant tag.
    pub tenant: Option<String>,
    /// With this user tag.
    pub user: Option<String>,
    /// With this endpoint tag.
    pub endpoint: Option<String>,
    /// With this key tag.
    pub key: Option<String>,
    /// With this hash of the whole key: see [`key_hash`](super::key_hash).
    pub key_hash: Option<String>,
    /// Claimed longer ago than this.
    pub older_than: Option<Duration>,
}

impl EntryFilter {
    /// Whether an entry is one of those asked for.
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

/// Where a listing goes on. The default is the beginning.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ListCursor(pub Option<Address>);

/// Part of a listing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EntryPage {
    /// In the order of their addresses.
    pub entries: Vec<EntryInfo>,
    /// Where to go on; `None` at the end.
    pub next: Option<ListCursor>,
}

/// One entry, as operators see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EntryInfo {
    /// Where it lives.
    pub address: Address,
    /// Its state.
    pub state: EntryState,
    /// Of its holder.
    pub fence: Fence,
    /// Of its holder.
    pub attempt: u32,
    /// Of its request.
    pub fingerprint: Fingerprint,
    /// What it can be searched by.
    pub tags: Tags,
    /// As given with the claim.
    pub label: Bytes,
    /// Since the claim was granted.
    pub age: Duration,
    /// Until it is forgotten.
    pub expires_in: Duration,
    /// If it is finished.
    pub summary: Option<RecordSummary>,
}

/// How many entries there are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EntryCounts {
    /// Running.
    pub processing: u64,
    /// Unknown.
    pub unknown: u64,
    /// Finished.
    pub finished: u64,
    /// What they take up, roughly.
    pub bytes: u64,
}
