//! Records that need an operator: outcome unknown, or in progress for over a minute.
//!
//! Stores list in address order, and some must scan all records for it. So the lists are cached and shared by all
//! viewers; listing uses at most 1/10 of the time.

use std::{sync::Arc, time::Duration};

use ibid::store::{EntryState, Store};
use tokio::{
    sync::Mutex,
    time::{Instant, timeout},
};

use crate::records::{RecordQuery, RecordView};

/// A record in progress for longer than this (60 s) is listed.
pub(super) const LONG_RUNNING_AFTER: Duration = Duration::from_secs(60);
pub(super) const MAX_ROWS_PER_LIST: usize = 50;
/// Time limit of the store for each list.
const LIST_TIMEOUT: Duration = Duration::from_secs(2);
/// Minimum time for which lists are cached.
const MIN_CACHE_TTL: Duration = Duration::from_secs(1);
/// Lists are cached for this many times the duration of listing them.
const LIST_TIME_DIVISOR: u32 = 10;

/// The cached lists, and until when they are valid.
#[derive(Debug, Default)]
pub(crate) struct Attention(Mutex<Option<(Instant, Arc<AttentionLists>)>>);

#[derive(Debug, Default)]
pub(super) struct AttentionLists {
    /// Records with an unknown outcome.
    pub(super) unknown: Vec<RecordView>,
    /// Whether the store has more of them.
    pub(super) more_unknown: bool,
    /// Records in progress for long.
    pub(super) long_running: Vec<RecordView>,
    /// Whether the store has more of them.
    pub(super) more_long_running: bool,
    /// Why the lists may be incomplete.
    pub(super) error: Option<String>,
}

impl Attention {
    /// Returns the cached lists, or loads them.
    pub(super) async fn get(&self, store: &dyn Store) -> Arc<AttentionLists> {
        // Holds the lock while loading, so that concurrent callers share the result.
        let mut last = self.0.lock().await;
        if let Some((until, lists)) = &*last
            && Instant::now() < *until
        {
            return lists.clone();
        }
        let begun = Instant::now();
        let lists = Arc::new(AttentionLists::load(store).await);
        let now = Instant::now();
        *last = Some((now + ((now - begun) * LIST_TIME_DIVISOR).max(MIN_CACHE_TTL), lists.clone()));
        lists
    }

    /// Drops the cached lists after a change.
    pub(super) async fn invalidate(&self) {
        *self.0.lock().await = None;
    }
}

impl AttentionLists {
    async fn load(store: &dyn Store) -> Self {
        let mut lists = Self::default();
        lists.error = lists.fill(store).await.err();
        lists
    }

    async fn fill(&mut self, store: &dyn Store) -> Result<(), String> {
        let unknown = RecordQuery { state: Some(EntryState::Unknown), ..RecordQuery::default() };
        (self.unknown, self.more_unknown) = list_rows(store, unknown).await?;
        let (state, older_than) = (Some(EntryState::Processing), Some(LONG_RUNNING_AFTER));
        let long_running = RecordQuery { state, older_than, ..RecordQuery::default() };
        (self.long_running, self.more_long_running) = list_rows(store, long_running).await?;
        Ok(())
    }
}

async fn list_rows(store: &dyn Store, query: RecordQuery) -> Result<(Vec<RecordView>, bool), String> {
    match timeout(LIST_TIMEOUT, query.list(store, None, MAX_ROWS_PER_LIST)).await {
        Ok(Ok(mut list)) => {
            list.records.sort_by_key(|view| std::cmp::Reverse(view.age_ms));
            Ok((list.records, list.next.is_some()))
        }
        Ok(Err(why)) => Err(why.to_string()),
        Err(_) => Err(format!("the store did not list them within {LIST_TIMEOUT:?}")),
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use ibid::store::{Address, ClaimOutcome, ClaimRequest, ClaimToken, ErrorKind, Fingerprint, Memory, Tags};
    use ibid_testkit::wrappers::{CallFilter, DelayedStore, FailingStore};

    use super::*;

    type AttentionTestStore = FailingStore<DelayedStore<Memory>>;

    async fn claim(store: &AttentionTestStore, at: u8) {
        let ask = ClaimRequest {
            address: Address([at; 32]),
            token: ClaimToken::mint(),
            fingerprint: Fingerprint::NONE,
            tags: Tags::new("acme", "u", "POST /pay", "k"),
            label: Bytes::new(),
            lease: Duration::from_secs(5),
            ttl: Duration::from_secs(6000),
            take_over: None,
        };
        assert!(matches!(store.inner().inner().claim(&Arc::new(ask)).await, Ok(ClaimOutcome::Granted(_))));
    }

    #[tokio::test(start_paused = true)]
    async fn what_lapsed_is_listed_and_a_slow_store_is_not_asked_all_the_time() {
        let store = FailingStore::new(DelayedStore::new(Memory::default()));
        let needs = Attention::default();
        claim(&store, 1).await;
        assert!(needs.get(&store).await.unknown.is_empty(), "it still runs");
        tokio::time::sleep(Duration::from_secs(6)).await;
        assert_eq!(needs.get(&store).await.unknown.len(), 1);
        claim(&store, 2).await;
        store.inner().delay(CallFilter::All, Duration::from_secs(1), Duration::ZERO);
        tokio::time::sleep(Duration::from_secs(6)).await;
        let begun = Instant::now();
        assert_eq!(needs.get(&store).await.unknown.len(), 2);
        assert!(begun.elapsed() >= Duration::from_secs(2), "two lists of a second each");
        let begun = Instant::now();
        assert_eq!((needs.get(&store).await.unknown.len(), begun.elapsed()), (2, Duration::ZERO), "kept");
        tokio::time::sleep(Duration::from_secs(19)).await;
        let begun = Instant::now();
        needs.get(&store).await;
        assert_eq!(begun.elapsed(), Duration::ZERO, "still kept: 2 s in 20");
        needs.invalidate().await;
        needs.get(&store).await;
        assert!(begun.elapsed() > Duration::ZERO, "asked anew");
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_fails_or_hangs_is_said_and_asked_again() {
        let store = FailingStore::new(DelayedStore::new(Memory::default()));
        let needs = Attention::default();
        store.fail(CallFilter::All, ErrorKind::NotApplied);
        assert!(needs.get(&store).await.error.is_some());
        store.heal();
        tokio::time::sleep(MIN_CACHE_TTL).await;
        assert_eq!(needs.get(&store).await.error, None);
        store.inner().delay(CallFilter::All, Duration::from_secs(3600), Duration::ZERO);
        tokio::time::sleep(MIN_CACHE_TTL).await;
        let begun = Instant::now();
        assert!(needs.get(&store).await.error.as_ref().is_some_and(|why| why.contains("2s")));
        assert_eq!(begun.elapsed(), LIST_TIMEOUT);
    }
}
