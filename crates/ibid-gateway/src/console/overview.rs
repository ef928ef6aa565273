//! The first page: traffic, alerts, and records that need attention.

use askama::Template;
use ibid::store::EntryCounts;

use super::{
    attention::AttentionLists,
    format::{display_date, format_count, format_duration, format_percent, format_rate, format_size, format_time},
    page::PageShell,
    row::{PageField, RecordRow},
};
use crate::{
    admin::health::{StoreHealth, Works},
    format::format_date,
    metrics::{
        CONFLICT_RATE_ALERT, ChartWindow, HIT_RATE_ALERT, Metrics, MetricsHistory, RequestCounts, TrafficCounts,
    },
};

const MAX_HISTORY_ROWS: usize = 12;
const MAX_ATTENTION_ROWS: usize = 8;

#[derive(Template)]
#[template(path = "console/overview.html")]
pub(super) struct OverviewPage {
    shell: PageShell,
    since: String,
    window: &'static str,
    windows: Vec<WindowChoice>,
    alerts: Vec<OverviewAlert>,
    tiles: Vec<OverviewTile>,
    rows: Vec<HistoryRow>,
    attention: AttentionPanel,
    store: StoreCard,
    routes: Vec<RouteRow>,
}

struct WindowChoice {
    name: &'static str,
    current: bool,
}

struct OverviewAlert {
    what: &'static str,
    advice: String,
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

struct HistoryRow {
    at: String,
    when: String,
    requests: String,
    ran: String,
    replayed: String,
    refused: String,
    open: String,
    hits: String,
    conflicts: String,
    fallbacks: String,
    p50: String,
    p99: String,
}

/// Records that need attention.
struct AttentionPanel {
    unknown: String,
    running: String,
    rows: Vec<RecordRow>,
    empty: &'static str,
    empty_more: &'static str,
}

struct StoreCard {
    name: &'static str,
    health: StoreHealth,
    fields: Vec<PageField>,
}

struct RouteRow {
    name: String,
    counts: [(&'static str, String); 9],
}

/// The data of the page.
pub(super) struct OverviewSources<'a> {
    pub(super) shell: PageShell,
    pub(super) window: ChartWindow,
    pub(super) metrics: &'a Metrics,
    pub(super) history: &'a MetricsHistory,
    pub(super) started_ms: u64,
    pub(super) counts: EntryCounts,
    pub(super) health: StoreHealth,
    pub(super) attention: &'a AttentionLists,
    /// Requests with a key that are running now.
    pub(super) running: usize,
}

impl OverviewPage {
    pub(super) fn new(sources: OverviewSources<'_>) -> Self {
        let OverviewSources { shell, window, metrics, history, started_ms, counts, health, attention: needs, running } =
            sources;
        let lately = history.recent_totals();
        Self {
            shell,
            since: display_date(&format_date(started_ms)),
            window: window.name(),
            windows: ChartWindow::ALL.map(|one| WindowChoice { name: one.name(), current: one == window }).into(),
            alerts: current_alerts(&health, metrics),
            tiles: build_tiles(&lately, counts, running, health.is_healthy()),
            rows: history.rows(window, MAX_HISTORY_ROWS).iter().map(HistoryRow::new).collect(),
            attention: AttentionPanel::new(needs, counts),
            store: StoreCard::new(health, counts),
            routes: metrics.by_route().map(|(name, requests)| RouteRow::new(name, &requests)).collect(),
        }
    }
}

fn current_alerts(health: &StoreHealth, metrics: &Metrics) -> Vec<OverviewAlert> {
    let mut troubles = Vec::new();
    if let Some(why) = &health.error {
        let advice = format!(
            "{why}. Requests are refused, or run unprotected where the route says on_store_down = \"open\". \
             What is counted here goes on; records come back with the store."
        );
        let what =
            if health.replays != Works::None { "The store refuses new keys." } else { "The store does not answer." };
        troubles.push(OverviewAlert { what, advice });
    }
    if let Some(why) = &health.degraded {
        troubles.push(OverviewAlert { what: "One of two stores is down.", advice: format!("{why}.") });
    }
    if health.pending_settlements > 0 {
        let advice = format!(
            "{} wait to be recorded, and are told to the store again and again.",
            format_count(health.pending_settlements)
        );
        troubles.push(OverviewAlert { what: "The store has not taken every end.", advice });
    }
    let lost = metrics.lost_claims();
    if lost > 0 {
        let advice = format!(
            "{} claims were taken over while their operation ran. The log names them (\"it may have run twice\"); \
             a lease that is longer than the longest pause prevents it.",
            format_count(lost)
        );
        troubles.push(OverviewAlert { what: "Operations may have run twice.", advice });
    }
    troubles
}

fn build_tiles(lately: &TrafficCounts, counts: EntryCounts, running: usize, counted: bool) -> Vec<OverviewTile> {
    let over = if lately.over.as_secs() >= 295 { "last 5 minutes" } else { "since the start" };
    let tile =
        |name, value: String, under: String| OverviewTile { name, value, unit: "", under, link: None, alert: false };
    let (hits, conflicts) = (lately.share_of(lately.hits), lately.share_of(lately.requests.conflicts));
    let above = |part: Option<f64>, limit: f64| part.is_some_and(|part| part > limit);
    let against = |part: Option<f64>, limit: f64| {
        let word = if above(part, limit) { "above the alarm at" } else { "alarm above" };
        format!("{word} {:.0} %", limit * 100.0)
    };
    let stuck = match (counted, counts.unknown) {
        (false, _) => "as last counted".into(),
        (true, 0) => "no outcome is unknown".into(),
        (true, _) => "say how they ended".to_owned(),
    };
    vec![
        OverviewTile {
            unit: "/s",
            ..tile("Requests", format_rate(lately.per_second()), format!("{over}, {running} at work"))
        },
        OverviewTile {
            alert: above(hits, HIT_RATE_ALERT),
            ..tile("Hits", format_percent(hits), against(hits, HIT_RATE_ALERT))
        },
        OverviewTile {
            alert: above(conflicts, CONFLICT_RATE_ALERT),
            ..tile("Conflicts", format_percent(conflicts), against(conflicts, CONFLICT_RATE_ALERT))
        },
        OverviewTile {
            alert: lately.fallbacks > 0,
            ..tile(
                "Fallbacks",
                format_count(lately.fallbacks),
                if lately.fallbacks > 0 { "a store is away".into() } else { "alarm at any".into() },
            )
        },
        OverviewTile {
            alert: counts.unknown > 0,
            link: Some("/unknown"),
            ..tile("Outcome unknown", format_count(counts.unknown), stuck)
        },
        tile(
            "Overhead",
            format_duration(lately.overhead.quantile(0.5)),
            format!("median; 99 % within {}", format_duration(lately.overhead.quantile(0.99))),
        ),
    ]
}

impl HistoryRow {
    fn new(row: &TrafficCounts) -> Self {
        let (at, requests) = (format_date(row.at_ms), &row.requests);
        Self {
            when: format_time(&at),
            at,
            requests: format_count(requests.total()),
            ran: format_count(requests.ran()),
            replayed: format_count(requests.replayed),
            refused: format_count(requests.total_refused()),
            open: format_count(requests.open()),
            hits: format_percent(row.share_of(row.hits)),
            conflicts: format_percent(row.share_of(requests.conflicts)),
            fallbacks: format_count(row.fallbacks),
            p50: format_duration(row.overhead.quantile(0.5)),
            p99: format_duration(row.overhead.quantile(0.99)),
        }
    }
}

impl AttentionPanel {
    fn new(needs: &AttentionLists, counts: EntryCounts) -> Self {
        let rows = needs.unknown.iter().chain(&needs.long_running).take(MAX_ATTENTION_ROWS).cloned().collect();
        let (empty, empty_more) = match needs.error {
            Some(_) => ("The store could not list them.", "It is asked again every few seconds."),
            None => ("Nothing.", "No end is unknown, and nothing has been running for over a minute."),
        };
        Self {
            unknown: format_count(counts.unknown),
            running: format_count(counts.processing),
            rows,
            empty,
            empty_more,
        }
    }
}

impl StoreCard {
    fn new(health: StoreHealth, counts: EntryCounts) -> Self {
        let mut fields = vec![
            PageField::new("Finished", format_count(counts.finished)),
            PageField::new("Running", format_count(counts.processing)),
            PageField::new("Unknown", format_count(counts.unknown)),
            PageField::new("Takes up", format_size(counts.bytes)),
            PageField::new("Answered in", format_duration(health.latency)),
            PageField::new("Not taken yet", format_count(health.pending_settlements)),
        ];
        if !health.warnings.is_empty() {
            fields.push(PageField::new("Warnings", health.warnings.join("; ")));
        }
        Self { name: health.name, health, fields }
    }
}

impl RouteRow {
    fn new(name: &str, requests: &RequestCounts) -> Self {
        let counts = [
            ("Requests", requests.total()),
            ("Ran", requests.ran()),
            ("Replayed", requests.replayed),
            ("In progress", requests.conflicts),
            ("Key reused", requests.reused),
            ("Otherwise refused", requests.refused),
            ("Unknown", requests.unknown),
            ("Unprotected", requests.degraded),
            ("No key", requests.passed_through()),
        ];
        Self { name: name.to_owned(), counts: counts.map(|(name, number)| (name, format_count(number))) }
    }
}
