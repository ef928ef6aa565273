//! Finds, shows and changes stored entries, for operators.
//!
//! `ibid keys` and the admin API both use this module, so that an entry looks the same and a change means the same in
//! both.
//!
//! Invariant: every change is a compare-and-set on the fence of the entry that the operator saw, and has a reason.

use bytes::Bytes;
use ibid::{
    key::KeyFormat,
    store::{
        Address, ClaimOutcome, CompletedEntry, EntryFilter, EntryInfo, EntryState, ErrorKind, ListCursor, Store,
        StoreError, key_hash,
    },
};

pub(crate) use self::change::ChangeVerb;
pub use self::{
    change::{ChangeAction, ChangeReport, ChangeRequest, MAX_ANSWER_BODY_BYTES, ResolvedAnswer},
    reseal::{ResealReport, UnopenedRecord},
    view::{AnswerView, BodyView, RecordList, RecordView},
};

pub(crate) mod change;
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

/// Entries per call of the store's `list`.
const LIST_PAGE_SIZE: usize = 1000;
/// How often to read an entry that changes while it is read.
const MAX_READ_ATTEMPTS: u32 = 5;

/// One entry: the listed information and the outcome of a claim, read at the same state.
#[derive(Debug, Clone)]
pub struct RecordEntry {
    pub info: EntryInfo,
    /// What a claim of the entry would return.
    pub claim: ClaimOutcome,
}

impl RecordQuery {
    /// The store filters of the query, usually one. A query for a key has one for entries that store the key as given,
    /// and one for its hash, which finds masked keys (two for a UUID with capital letters: most policies store UUIDs in
    /// lower case).
    fn filters(self) -> Vec<EntryFilter> {
        let Self { address, state, tenant, user, endpoint, key, older_than } = self;
        let filter = EntryFilter { state, address, tenant, user, endpoint, older_than, ..EntryFilter::default() };
        let Some(key) = key else { return vec![filter] };
        let lower = key.to_ascii_lowercase();
        let hashed = |key: &str| EntryFilter { key_hash: Some(key_hash(key)), ..filter.clone() };
        let mut filters = vec![hashed(&key)];
        if lower != key && KeyFormat::Uuid.check(&key).is_ok() {
            filters.push(hashed(&lower));
        }
        filters.push(EntryFilter { key: Some(key), ..filter });
        filters
    }

    /// Lists entries after `from`, in address order.
    pub async fn list(self, store: &dyn Store, from: Option<Address>, limit: usize) -> Result<RecordList, StoreError> {
        // One more than requested, to know whether there is a next page.
        let mut entries = list_entries(store, &self.filters(), from, limit + 1).await?;
        let more = entries.len() > limit;
        entries.truncate(limit);
        let next = entries.last().filter(|_| more).map(|last| last.address.to_string());
        Ok(RecordList { records: entries.iter().map(RecordView::from).collect(), next })
    }

    pub async fn find_one(self, store: &dyn Store) -> Result<RecordEntry, RecordLookupError> {
        let filters = self.filters();
        for _ in 0..MAX_READ_ATTEMPTS {
            let listed = match &list_entries(store, &filters, None, 2).await?[..] {
                [listed] => listed.address,
                [] => return Err(RecordLookupError::NotFound),
                [one, other, ..] => return Err(RecordLookupError::Ambiguous(one.address, other.address)),
            };
            if let Some(entry) = read_entry(store, &listed).await? {
                return Ok(entry);
            }
        }
        Err(RecordLookupError::KeepsChanging)
    }
}

/// Lists entries that match any of the filters, in address order.
async fn list_entries(
    store: &dyn Store, filters: &[EntryFilter], from: Option<Address>, at_most: usize,
) -> Result<Vec<EntryInfo>, StoreError> {
    let mut entries = Vec::new();
    for filter in filters {
        entries.extend(collect_entries(store, filter, from, at_most).await?);
    }
    entries.sort_unstable_by_key(|listed| listed.address);
    entries.dedup_by_key(|listed| listed.address);
    entries.truncate(at_most);
    Ok(entries)
}

/// Reads the entry at an address; `None` if it is absent.
async fn read_at(store: &dyn Store, address: &Address) -> Result<Option<RecordEntry>, RecordLookupError> {
    for _ in 0..MAX_READ_ATTEMPTS {
        if let Some(entry) = read_entry(store, address).await? {
            return Ok(Some(entry));
        }
        if matches!(store.get(address).await, Ok(None)) {
            return Ok(None);
        }
    }
    Err(RecordLookupError::KeepsChanging)
}

/// Reads both views of an entry. `None` if it is absent, or if it changed between the two reads.
async fn read_entry(store: &dyn Store, address: &Address) -> Result<Option<RecordEntry>, StoreError> {
    let found = match store.get(address).await {
        Err(error) if error.kind == ErrorKind::Corrupt => Err(error),
        found => match found? {
            Some(claim) => Ok(claim),
            None => return Ok(None),
        },
    };
    let filter = EntryFilter { address: Some(*address), ..EntryFilter::default() };
    let page = store.admin().list(&filter, ListCursor::default(), 1).await?;
    let Some(listed) = page.entries.into_iter().next() else { return Ok(None) };
    let claim = match found {
        Ok(claim) => claim,
        // The record is corrupt. The entry must still be shown, so that an operator can deal with it.
        Err(_) if matches!(listed.state, EntryState::Done | EntryState::Failed) => {
            ClaimOutcome::Completed(CompletedEntry {
                fence: listed.fence,
                attempt: listed.attempt,
                fingerprint: listed.fingerprint,
                failed: listed.state == EntryState::Failed,
                record: Bytes::new(),
                expires_in: listed.expires_in,
            })
        }
        Err(error) => return Err(error),
    };
    let same = match (&claim, listed.state) {
        (ClaimOutcome::InProgress(holder), EntryState::Processing)
        | (ClaimOutcome::OutcomeUnknown(holder), EntryState::Unknown) => holder.fence == listed.fence,
        (ClaimOutcome::Completed(done), EntryState::Done | EntryState::Failed) => done.fence == listed.fence,
        _ => false,
    };
    Ok(same.then_some(RecordEntry { info: listed, claim }))
}

/// Collects up to `at_most` entries after `from`. A page can be short without being the last.
async fn collect_entries(
    store: &dyn Store, filter: &EntryFilter, from: Option<Address>, at_most: usize,
) -> Result<Vec<EntryInfo>, StoreError> {
    let mut entries: Vec<EntryInfo> = Vec::new();
    let mut from = ListCursor(from);
    loop {
        let left = at_most - entries.len();
        let page = store.admin().list(filter, from.clone(), left.min(LIST_PAGE_SIZE) as u32).await?;
        entries.extend(page.entries);
        entries.truncate(at_most);
        match page.next {
            // A cursor that does not advance would loop forever.
            Some(next) if entries.len() < at_most && next.0 > from.0 => from = next,
            _ => return Ok(entries),
        }
    }
}
