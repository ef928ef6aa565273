//! Which entries are meant, and what the store holds of them.

use std::time::Duration;

use ibid::{
    mask,
    store::{Address, Claim, Cursor, ErrorKind, Filter, Listed, State, Store},
};

use super::{Failed, TagArgs, WhichArgs};
use crate::commands::outside::Opened;

/// How many entries are asked for at once.
const PAGE: usize = 1000;
/// How often an entry that changes while it is read is read again.
const TRIES: u32 = 5;

/// What is looked for. Usually one filter; two if a key was given in clear, because it may be stored masked.
pub(super) struct Wanted(Vec<Filter>);

/// A part of a list.
pub(super) struct Found {
    pub(super) entries: Vec<Listed>,
    pub(super) next: Option<Address>,
}

/// One entry: what lists show of it, and what a claim would find, of the same moment.
pub(super) struct Entry {
    pub(super) listed: Listed,
    pub(super) claim: Claim,
}

impl Wanted {
    /// Any number of entries.
    pub(super) fn many(tags: &TagArgs, state: Option<State>, older_than: Option<Duration>) -> Self {
        Self::of(tags, Filter { state, older_than, ..Filter::default() })
    }

    /// One entry, whose name must have been given.
    pub(super) fn one(which: &WhichArgs) -> Result<Self, Failed> {
        let TagArgs { tenant, user, endpoint, key } = &which.tags;
        if which.address.is_none() && [tenant, user, endpoint, key].iter().all(|tag| tag.is_none()) {
            let what = "which one? name it by its ADDRESS, or by --key, --tenant, --user, --endpoint";
            return Err(Failed::Usage(what.into()));
        }
        Ok(Self::of(&which.tags, Filter { address: which.address, ..Filter::default() }))
    }

    fn of(tags: &TagArgs, filter: Filter) -> Self {
        let TagArgs { tenant, user, endpoint, key } = tags.clone();
        let masked = key.as_deref().map(mask).filter(|masked| key.as_ref() != Some(masked));
        let filter = Filter { tenant, user, endpoint, key, ..filter };
        let second = masked.map(|masked| Filter { key: Some(masked), ..filter.clone() });
        Self([filter].into_iter().chain(second).collect())
    }

    /// Those behind `from`, in the order of their addresses.
    pub(super) async fn list(&self, store: &dyn Store, from: Option<Address>, limit: usize) -> Result<Found, Failed> {
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
    pub(super) async fn find_one(&self, store: &Opened) -> Result<Entry, Failed> {
        for _ in 0..TRIES {
            let found = self.list(store.store(), None, 2).await?;
            let listed = match &found.entries[..] {
                [listed] => listed,
                [] => {
                    let what = "nothing matches: it was never there, was released or forgotten, or has expired";
                    return Err(Failed::NotSo(what.into()));
                }
                [one, other, ..] => {
                    let what = "more than one entry matches; name one by its address, such as";
                    return Err(Failed::NotSo(format!("{what} {} or {}", one.address, other.address)));
                }
            };
            if let Some(entry) = read(store, &listed.address).await? {
                return Ok(entry);
            }
        }
        Err(Failed::NotSo("it changes faster than it can be read; try again".into()))
    }
}

/// What is at an address now. `None` if nothing is.
pub(super) async fn at(store: &Opened, address: &Address) -> Result<Option<Entry>, Failed> {
    for _ in 0..TRIES {
        if let Some(entry) = read(store, address).await? {
            return Ok(Some(entry));
        }
        if store.beneath.get(address).await?.is_none() {
            return Ok(None);
        }
    }
    Err(Failed::NotSo("it changes faster than it can be read; look again".into()))
}

/// Both views of an entry. `None` if they are not of the same holder in the same state, or nothing is there.
async fn read(store: &Opened, address: &Address) -> Result<Option<Entry>, Failed> {
    let found = match store.store().get(address).await {
        // It is there, and somebody has to deal with it: as it is held, then.
        Err(error) if error.kind == ErrorKind::Corrupt => store.beneath.get(address).await?,
        found => found?,
    };
    let Some(claim) = found else { return Ok(None) };
    let filter = Filter { address: Some(*address), ..Filter::default() };
    let page = store.store().operators().list(&filter, Cursor::default(), 1).await?;
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
) -> Result<Vec<Listed>, Failed> {
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
