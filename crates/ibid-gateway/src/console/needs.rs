//! What needs somebody: records whose end nobody knows, and those that have been running for long.
//!
//! Stores list in the order of addresses, and some have to look at every record for it. So what was found is kept for a
//! while and shown to everybody, and looking takes at most one part in [`SHARE`] of the time, however many look on.

use std::{sync::Arc, time::Duration};

use ibid::store::{State, Store, StoreError};
use tokio::{
    sync::Mutex,
    time::{Instant, timeout},
};

use super::row::Row;
use crate::records::{Query, View, Wanted};

/// What runs for longer is shown.
pub(super) const LONG: Duration = Duration::from_secs(60);
/// How many of each are shown.
pub(super) const SHOWN: usize = 50;
/// How long the store may take for each list.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long lists are good for at least.
const FRESH: Duration = Duration::from_secs(1);
/// Of the time, at most one part in this many goes into looking.
const SHARE: u32 = 10;

/// The lists, and until when they are good.
#[derive(Debug, Default)]
pub(super) struct Needs(Mutex<Option<(Instant, Arc<Lists>)>>);

/// What was found.
#[derive(Debug, Default)]
pub(super) struct Lists {
    /// Nobody knows how they ended.
    pub(super) unknown: Vec<Row>,
    /// Whether there are more of them.
    pub(super) more_unknown: bool,
    /// Running for long.
    pub(super) long: Vec<Row>,
    /// Whether there are more of them.
    pub(super) more_long: bool,
    /// Why it may not be all.
    pub(super) trouble: Option<String>,
}

impl Needs {
    /// The latest that can be had in time.
    pub(super) async fn read(&self, store: &dyn Store) -> Arc<Lists> {
        // Those who come while somebody looks wait, and share what is found.
        let mut last = self.0.lock().await;
        if let Some((until, lists)) = &*last
            && Instant::now() < *until
        {
            return lists.clone();
        }
        let begun = Instant::now();
        let lists = Arc::new(Lists::look(store).await);
        let now = Instant::now();
        *last = Some((now + ((now - begun) * SHARE).max(FRESH), lists.clone()));
        lists
    }

    /// Something was changed: what is kept is not good any more.
    pub(super) async fn forget(&self) {
        *self.0.lock().await = None;
    }
}

impl Lists {
    async fn look(store: &dyn Store) -> Self {
        let mut lists = Self::default();
        let unknown = Query { state: Some(State::Unknown), ..Query::default() };
        match list(store, unknown).await {
            Ok((rows, more)) => (lists.unknown, lists.more_unknown) = (rows, more),
            Err(why) => lists.trouble = Some(why),
        }
        if lists.trouble.is_none() {
            let long = Query { state: Some(State::Processing), older_than: Some(LONG), ..Query::default() };
            match list(store, long).await {
                Ok((rows, more)) => (lists.long, lists.more_long) = (rows, more),
                Err(why) => lists.trouble = Some(why),
            }
        }
        lists
    }
}

async fn list(store: &dyn Store, query: Query) -> Result<(Vec<Row>, bool), String> {
    let wanted = Wanted::of(query);
    match timeout(PATIENCE, wanted.list(store, None, SHOWN)).await {
        Ok(Ok(found)) => {
            let mut views: Vec<View> = found.entries.iter().map(View::from).collect();
            views.sort_by_key(|view| std::cmp::Reverse(view.age_ms));
            Ok((views.iter().map(Row::of).collect(), found.next.is_some()))
        }
        Ok(Err(why)) => Err(StoreError::to_string(&why)),
        Err(_) => Err(format!("the store did not list them within {PATIENCE:?}")),
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use ibid::store::{Address, Ask, Claim, ErrorKind, Fingerprint, Memory, Tags, Token};
    use ibid_testkit::wrappers::{Calls, Delays, FailsOnDemand};

    use super::*;

    type Failing = FailsOnDemand<Delays<Memory>>;

    async fn claim(store: &Failing, at: u8) {
        let ask = Ask {
            address: Address([at; 32]),
            token: Token::mint(),
            fingerprint: Fingerprint::NONE,
            tags: Tags::new("acme", "u", "POST /pay", "k"),
            label: Bytes::new(),
            hold: Duration::from_secs(5),
            keep: Duration::from_secs(6000),
            over: None,
        };
        assert!(matches!(store.inner().inner().claim(&Arc::new(ask)).await, Ok(Claim::Granted(_))));
    }

    #[tokio::test(start_paused = true)]
    async fn what_lapsed_is_listed_and_a_slow_store_is_not_asked_all_the_time() {
        let store = FailsOnDemand::new(Delays::new(Memory::default()));
        let needs = Needs::default();
        claim(&store, 1).await;
        assert!(needs.read(&store).await.unknown.is_empty(), "it still runs");
        tokio::time::sleep(Duration::from_secs(6)).await;
        assert_eq!(needs.read(&store).await.unknown.len(), 1);
        claim(&store, 2).await;
        store.inner().delay(Calls::All, Duration::from_secs(1), Duration::ZERO);
        tokio::time::sleep(Duration::from_secs(6)).await;
        let begun = Instant::now();
        assert_eq!(needs.read(&store).await.unknown.len(), 2);
        assert!(begun.elapsed() >= Duration::from_secs(2), "two lists of a second each");
        let begun = Instant::now();
        assert_eq!((needs.read(&store).await.unknown.len(), begun.elapsed()), (2, Duration::ZERO), "kept");
        tokio::time::sleep(Duration::from_secs(19)).await;
        let begun = Instant::now();
        needs.read(&store).await;
        assert_eq!(begun.elapsed(), Duration::ZERO, "still kept: 2 s in 20");
        needs.forget().await;
        needs.read(&store).await;
        assert!(begun.elapsed() > Duration::ZERO, "asked anew");
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_fails_or_hangs_is_said_and_asked_again() {
        let store = FailsOnDemand::new(Delays::new(Memory::default()));
        let needs = Needs::default();
        store.fail(Calls::All, ErrorKind::NotApplied);
        assert!(needs.read(&store).await.trouble.is_some());
        store.heal();
        tokio::time::sleep(FRESH).await;
        assert_eq!(needs.read(&store).await.trouble, None);
        store.inner().delay(Calls::All, Duration::from_secs(3600), Duration::ZERO);
        tokio::time::sleep(FRESH).await;
        let begun = Instant::now();
        assert!(needs.read(&store).await.trouble.as_ref().is_some_and(|why| why.contains("2s")));
        assert_eq!(begun.elapsed(), PATIENCE);
    }
}
