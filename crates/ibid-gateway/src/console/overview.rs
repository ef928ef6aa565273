//! The first page: traffic, alerts, and the records that need an operator: outcome unknown, or in progress for over a
//! minute.
//!
//! Stores list in address order, and some must scan all records for it. So these lists are cached and shared by all
//! viewers; listing uses at most 1/10 of the time.

use std::{sync::Arc, time::Duration};

use askama::Template;
use futures_util::{StreamExt as _, stream};
use ibid::store::{EntryCounts, EntryState, Store};
use tokio::{
    sync::Mutex,
    time::{Instant, timeout},
};

use super::{
    page::Visit,
    page::{PageShell, filters},
};
use crate::{
    admin::health::{StoreHealth, Works},
    format::{display_date, format_count, format_date, format_duration, format_percent, format_rate},
    metrics::{
        ALERT_WINDOW, CONFLICT_RATE_ALERT, ChartWindow, HIT_RATE_ALERT, Metrics, MetricsHistory, RequestCounts,
        TrafficCounts, conflict_share, hit_share,
    },
    records::{RecordQuery, RecordView},
};

const MAX_HISTORY_ROWS: usize = 12;
const MAX_ATTENTION_ROWS: usize = 8;
/// Notes of records that are read from the store at the same time.
const MAX_CONCURRENT_READS: usize = 16;

#[derive(Template)]
#[template(path = "console/overview.html")]
pub(super) struct OverviewPage {
    shell: PageShell,
    since: String,
    window: ChartWindow,
    /// What is wrong, and what to do.
    alerts: Vec<(&'static str, String)>,
    tiles: Vec<OverviewTile>,
    history: Vec<TrafficCounts>,
    attention: Arc<AttentionLists>,
    health: StoreHealth,
    has_two_stores: bool,
    counts: EntryCounts,
    routes: Vec<(String, RequestCounts)>,
}

/// A number at the top of the page.
struct OverviewTile {
    name: &'static str,
    value: String,
    unit: &'static str,
    under: String,
    link: Option<&'static str>,
    alert: bool,
}

impl OverviewPage {
    pub(super) fn new(
        visit: &Visit, window: ChartWindow, health: StoreHealth, counts: EntryCounts, attention: Arc<AttentionLists>,
    ) -> Self {
        let state = &visit.state;
        let running = state.ibid.engine().running().count();
        Self {
            shell: visit.shell(),
            since: display_date(&format_date(state.started_ms)),
            window,
            alerts: current_alerts(&health, &state.metrics),
            tiles: build_tiles(&state.history, counts, running, &health),
            has_two_stores: health.stores.len() > 1,
            history: state.history.rows(window, MAX_HISTORY_ROWS),
            attention,
            health,
            counts,
            routes: state.metrics.by_route().map(|(name, requests)| (name.to_owned(), requests)).collect(),
        }
    }

    fn attention_rows(&self) -> Vec<&RecordView> {
        self.attention.unknown.iter().chain(&self.attention.long_running).take(MAX_ATTENTION_ROWS).collect()
    }
}

impl RequestCounts {
    fn columns(&self) -> [(&'static str, u64); 12] {
        [
            ("Requests", self.total()),
            ("Ran", self.ran()),
            ("Replayed", self.replayed),
            ("In progress", self.conflicts),
            ("Key reused", self.reused),
            ("Outage", self.outages),
            ("App failed", self.upstream_errors),
            ("Otherwise refused", self.refused),
            ("Unknown", self.unknown),
            ("Unprotected", self.degraded),
            ("Shadow", self.shadowed),
            ("No key", self.keyless),
        ]
    }
}

fn current_alerts(health: &StoreHealth, metrics: &Metrics) -> Vec<(&'static str, String)> {
    let mut alerts = Vec::new();
    if let Some(why) = &health.error {
        let advice = format!(
            "{why}. Requests are refused, or run unprotected where the route says on_store_down = \"open\". \
             What is counted here goes on; records come back with the store."
        );
        let replays = health.replays != Works::None;
        alerts.push((if replays { "The store refuses new keys." } else { "The store does not answer." }, advice));
    }
    if let Some(why) = &health.degraded {
        alerts.push(("One of two stores is down.", format!("{why}.")));
    }
    if health.pending_settlements > 0 {
        let waiting = format_count(health.pending_settlements);
        let advice = format!("{waiting} results are not saved in the store yet; the gateway keeps retrying.");
        alerts.push(("Results are not saved yet.", advice));
    }
    let lost = metrics.lost_claims();
    if lost > 0 {
        let advice = format!(
            "{} claims were taken over while their operation ran. The log names them (\"it may have run twice\"); \
             a lease that is longer than the longest pause prevents it.",
            format_count(lost)
        );
        alerts.push(("Operations may have run twice.", advice));
    }
    alerts
}

fn build_tiles(
    history: &MetricsHistory, counts: EntryCounts, running: usize, health: &StoreHealth,
) -> Vec<OverviewTile> {
    let lately = &history.recent_totals();
    let over = if lately.over >= ALERT_WINDOW - Duration::from_secs(5) { "last 10 minutes" } else { "since the start" };
    let tile = |name, value, under, alert| OverviewTile { name, value, unit: "", under, link: None, alert };
    // An alert is what the shipped rule says, not a number above its limit.
    let share_tile = |name, of: fn(&TrafficCounts) -> (u64, u64), limit: f64| {
        let alert = history.has_fired(of, limit);
        let word = if alert { "alert: above" } else { "alert if above" };
        let under = format!("{word} {:.0} % for 10 minutes", limit * 100.0);
        tile(name, format_percent(lately.share(of)), under, alert)
    };
    let [median, slow] = [0.5, 0.99].map(|part| format_duration(lately.overhead.quantile(part)));
    let unknown = match (health.error.is_none(), counts.unknown) {
        (false, _) => "as last counted",
        (true, 0) => "no outcome is unknown",
        (true, _) => "resolve them",
    };
    let unknown = tile("Outcome unknown", format_count(counts.unknown), unknown.into(), counts.unknown > 0);
    let requests = tile("Requests", format_rate(lately.per_second()), format!("{over}, {running} running"), false);
    let RequestCounts { outages, upstream_errors, reused, degraded, .. } = lately.requests;
    let errors = lately.requests.errors();
    // As IbidStoreErrors and IbidUnprotected: the app's own failures are no alert of the gateway.
    let is_alert = outages + degraded > 0;
    let causes = match errors {
        0 => format!("{over}: none"),
        _ => format!("store {outages}, app {upstream_errors}, unknown or unprotected {}", lately.requests.open()),
    };
    let mut tiles = vec![
        OverviewTile { unit: "/s", ..requests },
        OverviewTile { link: Some("/recent?show=errors"), ..tile("Errors", format_count(errors), causes, is_alert) },
        OverviewTile { link: Some("/unknown"), ..unknown },
        share_tile("Hits", hit_share, HIT_RATE_ALERT),
        share_tile("Conflicts", conflict_share, CONFLICT_RATE_ALERT),
        tile("Reused keys", format_count(reused), format!("{over}: another request"), false),
        tile("Overhead", median, format!("median; 99 % within {slow}"), false),
    ];
    if health.stores.len() > 1 {
        let fallbacks = if lately.fallbacks > 0 { "a store was down" } else { "alert at any" };
        tiles.push(tile("Fallbacks", format_count(lately.fallbacks), fallbacks.into(), lately.fallbacks > 0));
    }
    tiles
}

/// A record in progress for longer than this (60 s) is listed.
pub(super) const LONG_RUNNING_AFTER: Duration = Duration::from_secs(60);
pub(super) const MAX_ROWS_PER_LIST: usize = 50;
const LIST_TIMEOUT: Duration = Duration::from_secs(2);
const MIN_CACHE_TTL: Duration = Duration::from_secs(1);
/// Lists are cached for this many times the duration of listing them.
const LIST_TIME_DIVISOR: u32 = 10;

#[derive(Debug, Default)]
pub(crate) struct Attention {
    /// Since when this process has had the store open, in milliseconds since the Unix epoch.
    opened_ms: u64,
    /// The cached lists, and until when they are valid.
    cached: Mutex<Option<(Instant, Arc<AttentionLists>)>>,
}

#[derive(Debug, Default)]
pub(super) struct AttentionLists {
    pub(super) unknown: Vec<RecordView>,
    /// Whether the store has more of them.
    pub(super) more_unknown: bool,
    pub(super) long_running: Vec<RecordView>,
    /// Whether the store has more of them.
    pub(super) more_long_running: bool,
    /// Why the lists may be incomplete.
    pub(super) error: Option<String>,
}

impl Attention {
    pub(crate) fn new(opened_ms: u64) -> Self {
        Self { opened_ms, ..Self::default() }
    }

    pub(super) async fn get(&self, store: &dyn Store) -> Arc<AttentionLists> {
        // Holds the lock while loading, so that concurrent callers share the result.
        let mut last = self.cached.lock().await;
        if let Some((until, lists)) = &*last
            && Instant::now() < *until
        {
            return lists.clone();
        }
        let begun = Instant::now();
        let lists = Arc::new(AttentionLists::load(store, self.opened_ms).await);
        let now = Instant::now();
        *last = Some((now + ((now - begun) * LIST_TIME_DIVISOR).max(MIN_CACHE_TTL), lists.clone()));
        lists
    }

    pub(super) async fn invalidate(&self) {
        *self.cached.lock().await = None;
    }
}

impl AttentionLists {
    async fn load(store: &dyn Store, opened_ms: u64) -> Self {
        let mut lists = Self::default();
        lists.error = lists.fill(store, opened_ms).await.err();
        lists
    }

    async fn fill(&mut self, store: &dyn Store, opened_ms: u64) -> Result<(), String> {
        let unknown = RecordQuery { state: Some(EntryState::Unknown), ..RecordQuery::default() };
        let (unknown, more_unknown) = list_rows(store, unknown).await?;
        let noted = stream::iter(unknown).map(|view| view.with_note(store, opened_ms)).buffered(MAX_CONCURRENT_READS);
        (self.unknown, self.more_unknown) = (noted.collect().await, more_unknown);
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
