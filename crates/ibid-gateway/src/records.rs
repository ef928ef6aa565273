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
    view::{AnswerView, BodyView, HeldView, RecordList, RecordView, RevealedKey, UnknownView},
};

pub(crate) mod change;
pub(crate) mod notes;
mod reseal;
pub(crate) mod view;

/// A query for entries. All filters that are set must match.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RecordQuery {
    pub address: Option<AddressPattern>,
    pub state: Option<EntryState>,
    pub tenant: Option<String>,
    pub user: Option<String>,
    pub endpoint: Option<String>,
    /// The key as the client sent it, or as it is stored, which may be masked. With a `*` at its end, the beginning of
    /// the key as it is stored.
    pub key: Option<String>,
    /// Minimum time since the claim.
    pub older_than: Option<std::time::Duration>,
}

/// An address, the beginning of one, or one as the log shows it: `5ac2****fe5c`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddressPattern {
    prefix: String,
    suffix: String,
}

impl AddressPattern {
    const MIN_PREFIX: usize = 4;

    /// `None` if the text is no such pattern.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.to_ascii_lowercase();
        let (prefix, suffix) = text.split_once('*').unwrap_or((&text, ""));
        let suffix = suffix.trim_start_matches('*');
        let is_hex = |part: &str| part.bytes().all(|byte| byte.is_ascii_hexdigit());
        let fits = (Self::MIN_PREFIX..=64).contains(&prefix.len()) && prefix.len() + suffix.len() <= 64;
        (fits && is_hex(prefix) && is_hex(suffix)).then(|| Self { prefix: prefix.into(), suffix: suffix.into() })
    }

    /// The address, if the pattern is a whole one.
    pub fn whole(&self) -> Option<Address> {
        Address::from_hex(&self.prefix)
    }

    fn matches(&self, address: &Address) -> bool {
        let address = address.to_string();
        address.starts_with(&self.prefix) && address.ends_with(&self.suffix)
    }

    /// The address before the first one that can match, and the last one that can.
    fn bounds(&self) -> (Option<Address>, Option<Address>) {
        let padded = |digit: &str| Address::from_hex(&(self.prefix.clone() + &digit.repeat(64 - self.prefix.len())));
        let mut before = padded("0");
        if let Some(Address(bytes)) = &mut before {
            // Subtracts one; all zeros stay.
            for byte in bytes.iter_mut().rev() {
                let (less, borrowed) = byte.overflowing_sub(1);
                *byte = less;
                if !borrowed {
                    break;
                }
            }
        }
        (before.filter(|before| before.0 != [0xff; 32]), padded("f"))
    }
}

impl From<Address> for AddressPattern {
    fn from(address: Address) -> Self {
        Self { prefix: address.to_string(), suffix: String::new() }
    }
}

impl std::fmt::Display for AddressPattern {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.whole() {
            Some(address) => address.fmt(f),
            None => write!(f, "{}****{}", self.prefix, self.suffix),
        }
    }
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
    fn filters(self) -> EntrySearch {
        let Self { address, state, tenant, user, endpoint, key, older_than } = self;
        let whole = address.as_ref().and_then(AddressPattern::whole);
        let filter =
            EntryFilter { state, address: whole, tenant, user, endpoint, older_than, ..EntryFilter::default() };
        let mut search = EntrySearch { filters: vec![filter.clone()], address, key_prefix: None };
        let Some(key) = key else { return search };
        if let Some(prefix) = key.strip_suffix('*').filter(|prefix| !prefix.is_empty() && !prefix.ends_with("***")) {
            search.key_prefix = Some(prefix.to_owned());
            return search;
        }
        let lower = key.to_ascii_lowercase();
        let hashed = |key: &str| EntryFilter { key_hash: Some(key_hash(key)), ..filter.clone() };
        search.filters = vec![hashed(&key)];
        if lower != key && KeyFormat::Uuid.check(&key).is_ok() {
            search.filters.push(hashed(&lower));
        }
        search.filters.push(EntryFilter { key: Some(key), ..filter });
        search
    }

    /// Lists entries after `from`, in address order.
    pub async fn list(self, store: &dyn Store, from: Option<Address>, limit: usize) -> Result<RecordList, StoreError> {
        // One more than requested, to know whether there is a next page.
        let mut entries = self.filters().list(store, from, limit + 1).await?;
        let more = entries.len() > limit;
        entries.truncate(limit);
        let next = entries.last().filter(|_| more).map(|last| last.address.to_string());
        Ok(RecordList { records: entries.iter().map(RecordView::from).collect(), next })
    }

    pub async fn find_one(self, store: &dyn Store) -> Result<RecordEntry, RecordLookupError> {
        let search = self.filters();
        for _ in 0..MAX_READ_ATTEMPTS {
            let listed = match &search.list(store, None, 2).await?[..] {
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

/// A query as stores understand it, and what they cannot filter by.
struct EntrySearch {
    filters: Vec<EntryFilter>,
    address: Option<AddressPattern>,
    key_prefix: Option<String>,
}

impl EntrySearch {
    /// Lists entries that match any of the filters, in address order.
    async fn list(
        &self, store: &dyn Store, from: Option<Address>, at_most: usize,
    ) -> Result<Vec<EntryInfo>, StoreError> {
        let mut entries = Vec::new();
        for filter in &self.filters {
            entries.extend(self.collect(store, filter, from, at_most).await?);
        }
        entries.sort_unstable_by_key(|listed| listed.address);
        entries.dedup_by_key(|listed| listed.address);
        entries.truncate(at_most);
        Ok(entries)
    }

    /// Collects up to `at_most` entries after `from`. A page can be short without being the last.
    async fn collect(
        &self, store: &dyn Store, filter: &EntryFilter, from: Option<Address>, at_most: usize,
    ) -> Result<Vec<EntryInfo>, StoreError> {
        let (before, last) = self.address.as_ref().map(AddressPattern::bounds).unwrap_or_default();
        let mut entries: Vec<EntryInfo> = Vec::new();
        let mut from = ListCursor(from.max(before));
        let is_selective = self.key_prefix.is_some() || self.address.is_some();
        loop {
            let wanted = if is_selective { LIST_PAGE_SIZE } else { (at_most - entries.len()).min(LIST_PAGE_SIZE) };
            let page = store.admin().list(filter, from.clone(), wanted as u32).await?;
            entries.extend(page.entries.into_iter().filter(|entry| self.matches(entry)));
            entries.truncate(at_most);
            match page.next {
                // A cursor that does not advance would loop forever.
                Some(next)
                    if entries.len() < at_most && next.0 > from.0 && last.is_none_or(|last| next.0 < Some(last)) =>
                {
                    from = next;
                }
                _ => return Ok(entries),
            }
        }
    }

    fn matches(&self, entry: &EntryInfo) -> bool {
        !entry.address.is_note()
            && self.address.as_ref().is_none_or(|pattern| pattern.matches(&entry.address))
            && self.key_prefix.as_ref().is_none_or(|prefix| key_starts_with(entry.tags.key(), prefix))
    }
}

/// Of a masked key only the first four characters are known.
fn key_starts_with(stored: &str, prefix: &str) -> bool {
    let visible = stored.split_once("****").map_or(stored, |(visible, _)| visible);
    stored.starts_with(prefix) || visible.len() < stored.len() && !visible.is_empty() && prefix.starts_with(visible)
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
                front_only: false,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_named_by_their_beginning_or_as_the_log_shows_them() {
        let whole = "5ac2".to_owned() + &"0".repeat(56) + "fe5c";
        let address = Address::from_hex(&whole).unwrap();
        for text in [whole.as_str(), "5ac2", "5AC200", "5ac2****fe5c", "5ac2*"] {
            let pattern = AddressPattern::parse(text).unwrap();
            assert!(pattern.matches(&address), "{text}");
            let (before, last) = pattern.bounds();
            assert!(before < Some(address) && last >= Some(address), "{text}");
        }
        assert!(!AddressPattern::parse("5ac2****fe5d").unwrap().matches(&address));
        assert_eq!(AddressPattern::parse("0000").unwrap().bounds().0, None, "the very first can match");
        for wrong in ["", "5ac", "5ac2****xyz", "order-1841", &"0".repeat(65)] {
            assert_eq!(AddressPattern::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_masked_key_matches_what_may_be_its_beginning() {
        assert!(key_starts_with("order-1841", "order-"));
        assert!(!key_starts_with("order-1841", "order-2"));
        assert!(key_starts_with("orde****1841", "ord") && key_starts_with("orde****1841", "order-1"));
        assert!(!key_starts_with("orde****1841", "orb") && !key_starts_with("****", "order"));
    }
}
