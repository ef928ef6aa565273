//! Which entries are meant, and what the store holds of them.

use ibid::{
    mask,
    store::{Address, Claim, Cursor, Filter, Listed, State, Store, StoreError},
};

use super::{NotFound, Query};

/// How many entries are asked for at once.
const PAGE: usize = 1000;
/// How often an entry that changes while it is read is read again.
const TRIES: u32 = 5;

/// What is looked for. Usually one filter; two if a key was given in clear, because it may be stored masked.
#[derive(Debug, Clone)]
pub struct Wanted(Vec<Filter>);

/// A part of a list.
#[derive(Debug)]
pub struct Found {
    /// In the order of their addresses.
    pub entries: Vec<Listed>,
    /// Where to go on.
    pub next: Option<Address>,
}

/// One entry: what lists show of it, and what a claim would find, of the same moment.
#[derive(Debug, Clone)]
pub struct Entry {
    /// What lists show.
    pub listed: Listed,
    /// What a claim would find.
    pub claim: Claim,
}

impl Wanted {
    /// What a query asks for.
    pub fn of(query: Query) -> Self {
        let Query { address, state, tenant, user, endpoint, key, older_than } = query;
        let masked = key.as_deref().map(mask).filter(|masked| key.as_ref() != Some(masked));
        let filter = Filter { state, address, tenant, user, endpoint, key, older_than };
        let second = masked.map(|masked| Filter { key: Some(masked), ..filter.clone() });
        Self([filter].into_iter().chain(second).collect())
    }

    /// Those behind `from`, in the order of their addresses.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn list(&self, store: &dyn Store, from: Option<Address>, limit: usize) -> Result<Found, StoreError> {
        let mut entries = Vec::new();
        for filter in &self.0 {
            // One more than is shown says whether there are more.
            entries.extend(collect(store, filter, from, limit + 1).await?);
        }
        entries.sort_unstable_by_key(|listed| listed.address);
        let more = entries.len() > limit;
        entries.truncate(limit);
        let next = entries.last().filter(|_| more).map(|last| last.address);
        Ok(Found { entries, next })
    }

    /// The only one.
    ///
    /// # Errors
    /// If there is none, or more than one, or the store fails.
    pub async fn find_one(&self, store: &dyn Store) -> Result<Entry, NotFound> {
        for _ in 0..TRIES {
            let found = self.list(store, None, 2).await?;
            let listed = match &found.entries[..] {
                [listed] => listed,
                [] => return Err(NotFound::Absent),
                [one, other, ..] => return Err(NotFound::Many(one.address, other.address)),
            };
            if let Some(entry) = read(store, &listed.address).await? {
                return Ok(entry);
            }
        }
        Err(NotFound::Restless)
    }
}

/// What is at an address now. `None` if nothing is.
///
/// # Errors
/// If it never stands still, or the store fails.
pub async fn at(store: &dyn Store, address: &Address) -> Result<Option<Entry>, NotFound> {
    for _ in 0..TRIES {
        if let Some(entry) = read(store, address).await? {
            return Ok(Some(entry));
        }
        if store.get(address).await?.is_none() {
            return Ok(None);
        }
    }
    Err(NotFound::Restless)
}

/// Both views of an entry. `None` if they are not of the same holder in the same state, or nothing is there.
async fn read(store: &dyn Store, address: &Address) -> Result<Option<Entry>, StoreError> {
    let Some(claim) = store.get(address).await? else { return Ok(None) };
    let filter = Filter { address: Some(*address), ..Filter::default() };
    let page = store.operators().list(&filter, Cursor::default(), 1).await?;
    let Some(listed) = page.entries.into_iter().next() else { return Ok(None) };
    let same = match (&claim, listed.state) {
        (Claim::Busy(holder), State::Processing) | (Claim::Unknown(holder), State::Unknown) => {
            holder.fence == listed.fence
        }
        (Claim::Done(done), State::Done | State::Failed) => done.fence == listed.fence,
        _ => false,
    };
    Ok(same.then_some(Entry { listed, claim }))
}

/// Up to so many entries behind `from`. A page may come short before the end.
async fn collect(
    store: &dyn Store, filter: &Filter, from: Option<Address>, at_most: usize,
) -> Result<Vec<Listed>, StoreError> {
    let mut entries: Vec<Listed> = Vec::new();
    let mut from = Cursor(from);
    loop {
        let left = at_most - entries.len();
        let page = store.operators().list(filter, from.clone(), left.min(PAGE) as u32).await?;
        entries.extend(page.entries);
        entries.truncate(at_most);
        match page.next {
            // A cursor that stands still would never end.
            Some(next) if entries.len() < at_most && next.0 > from.0 => from = next,
            _ => return Ok(entries),
        }
    }
}
