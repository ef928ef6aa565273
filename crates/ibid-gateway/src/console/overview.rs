//! The first page: traffic, alerts, and records that need attention.

use std::sync::Arc;

use askama::Template;
use ibid::store::EntryCounts;

use super::{
    attention::AttentionLists,
    page::{PageShell, filters},
    visit::Visit,
};
use crate::{
    admin::health::{StoreHealth, Works},
    format::{display_date, format_count, format_date, format_duration, format_percent, format_rate, format_time},
    metrics::{CONFLICT_RATE_ALERT, ChartWindow, HIT_RATE_ALERT, Metrics, RequestCounts, TrafficCounts},
    records::RecordView,
};

const MAX_HISTORY_ROWS: usize = 12;
const MAX_ATTENTION_ROWS: usize = 8;

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
    counts: EntryCounts,
    routes: Vec<(String, RequestCounts)>,
}

/// A number at the top of the page.
#[derive(Default)]
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
            tiles: build_tiles(&state.history.recent_totals(), counts, running, health.is_healthy()),
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

impl TrafficCounts {
    /// When the period ended, RFC 3339.
    fn at(&self) -> String {
        format_date(self.at_ms)
    }

    fn time(&self) -> String {
        format_time(&self.at())
    }
}

impl RequestCounts {
    /// The columns of the table of routes.
    fn columns(&self) -> [(&'static str, u64); 9] {
        [
            ("Requests", self.total()),
            ("Ran", self.ran()),
            ("Replayed", self.replayed),
            ("In progress", self.conflicts),
            ("Key reused", self.reused),
            ("Otherwise refused", self.refused),
            ("Unknown", self.unknown),
            ("Unprotected", self.degraded),
            ("No key", self.passed_through()),
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
        let advice = format!("{waiting} wait to be recorded, and are told to the store again and again.");
        alerts.push(("The store has not taken every end.", advice));
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

fn build_tiles(lately: &TrafficCounts, counts: EntryCounts, running: usize, counted: bool) -> Vec<OverviewTile> {
    let over = if lately.over.as_secs() >= 295 { "last 5 minutes" } else { "since the start" };
    let share_tile = |name, of: u64, limit: f64| {
        let share = lately.share_of(of);
        let alert = share.is_some_and(|share| share > limit);
        let word = if alert { "above the alarm at" } else { "alarm above" };
        let under = format!("{word} {:.0} %", limit * 100.0);
        OverviewTile { name, value: format_percent(share), under, alert, ..OverviewTile::default() }
    };
    let [median, slow] = [0.5, 0.99].map(|part| format_duration(lately.overhead.quantile(part)));
    vec![
        OverviewTile {
            name: "Requests",
            value: format_rate(lately.per_second()),
            unit: "/s",
            under: format!("{over}, {running} at work"),
            ..OverviewTile::default()
        },
        share_tile("Hits", lately.hits, HIT_RATE_ALERT),
        share_tile("Conflicts", lately.requests.conflicts, CONFLICT_RATE_ALERT),
        OverviewTile {
            name: "Fallbacks",
            value: format_count(lately.fallbacks),
            under: if lately.fallbacks > 0 { "a store is away" } else { "alarm at any" }.into(),
            alert: lately.fallbacks > 0,
            ..OverviewTile::default()
        },
        OverviewTile {
            name: "Outcome unknown",
            value: format_count(counts.unknown),
            under: match (counted, counts.unknown) {
                (false, _) => "as last counted",
                (true, 0) => "no outcome is unknown",
                (true, _) => "say how they ended",
            }
            .into(),
            link: Some("/unknown"),
            alert: counts.unknown > 0,
            ..OverviewTile::default()
        },
        OverviewTile {
            name: "Overhead",
            value: median,
            under: format!("median; 99 % within {slow}"),
            ..OverviewTile::default()
        },
    ]
}
