//! The first page: traffic, what is wrong, and what needs somebody.

use askama::Template;
use ibid::store::Counts;

use super::{
    needs::Lists,
    page::Shell,
    row::{Field, Row},
    words::{clock, count, percent, rate, size, took, when},
};
use crate::{
    admin::health::{Health, Works},
    metrics::{CONFLICTS_LIMIT, HITS_LIMIT, History, Lately, Metrics, Requests, Window},
    records::view::date,
};

/// Rows of the table of numbers.
const ROWS: usize = 12;
/// Rows of records that need somebody.
const NEEDY: usize = 8;

#[derive(Template)]
#[template(path = "console/overview.html")]
pub(super) struct Overview {
    shell: Shell,
    since: String,
    window: &'static str,
    windows: Vec<Choice>,
    troubles: Vec<Trouble>,
    tiles: Vec<Tile>,
    rows: Vec<Numbers>,
    open: Open,
    store: StoreCard,
    routes: Vec<Route>,
}

struct Choice {
    name: &'static str,
    current: bool,
}

/// Something that is wrong now.
struct Trouble {
    what: &'static str,
    advice: String,
}

/// A number at the top.
struct Tile {
    name: &'static str,
    value: String,
    unit: &'static str,
    under: String,
    link: Option<&'static str>,
    alert: bool,
}

struct Numbers {
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

/// Records that need somebody.
struct Open {
    unknown: String,
    running: String,
    rows: Vec<Row>,
    empty: &'static str,
    empty_more: &'static str,
}

struct StoreCard {
    name: &'static str,
    health: Health,
    fields: Vec<Field>,
}

struct Route {
    name: String,
    counts: [(&'static str, String); 9],
}

/// What the page is made of.
pub(super) struct Sources<'a> {
    pub(super) shell: Shell,
    pub(super) window: Window,
    pub(super) metrics: &'a Metrics,
    pub(super) history: &'a History,
    pub(super) started_ms: u64,
    pub(super) counts: Counts,
    pub(super) health: Health,
    pub(super) needs: &'a Lists,
    /// Requests with a key at work.
    pub(super) running: usize,
}

impl Overview {
    pub(super) fn new(sources: Sources<'_>) -> Self {
        let Sources { shell, window, metrics, history, started_ms, counts, health, needs, running } = sources;
        let lately = history.lately();
        Self {
            shell,
            since: when(&date(started_ms)),
            window: window.name(),
            windows: Window::ALL.map(|one| Choice { name: one.name(), current: one == window }).into(),
            troubles: troubles(&health, metrics),
            tiles: tiles(&lately, counts, running, health.is_well()),
            rows: history.rows(window, ROWS).iter().map(|(at, row)| Numbers::of(*at, row)).collect(),
            open: Open::of(needs, counts),
            store: StoreCard::of(health, counts),
            routes: metrics.by_route().iter().map(|(name, requests)| Route::of(name, requests)).collect(),
        }
    }
}

fn troubles(health: &Health, metrics: &Metrics) -> Vec<Trouble> {
    let mut troubles = Vec::new();
    if let Some(why) = &health.trouble {
        let advice = format!(
            "{why}. Requests are refused, or run unprotected where the route says on_store_down = \"open\". \
             What is counted here goes on; records come back with the store."
        );
        let what =
            if health.replays != Works::None { "The store refuses new keys." } else { "The store does not answer." };
        troubles.push(Trouble { what, advice });
    }
    if let Some(why) = &health.degraded {
        troubles.push(Trouble { what: "One of two stores is down.", advice: format!("{why}.") });
    }
    if health.waiting > 0 {
        let advice =
            format!("{} wait to be recorded, and are told to the store again and again.", count(health.waiting));
        troubles.push(Trouble { what: "The store has not taken every end.", advice });
    }
    let lost = metrics.reading().lost_claims;
    if lost > 0 {
        let advice = format!(
            "{} claims were taken over while their operation ran. The log names them (\"it may have run twice\"); \
             a lease that is longer than the longest pause prevents it.",
            count(lost)
        );
        troubles.push(Trouble { what: "Operations may have run twice.", advice });
    }
    troubles
}

fn tiles(lately: &Lately, counts: Counts, running: usize, counted: bool) -> Vec<Tile> {
    let over = if lately.over.as_secs() >= 295 { "last 5 minutes" } else { "since the start" };
    let tile = |name, value: String, under: String| Tile { name, value, unit: "", under, link: None, alert: false };
    let (hits, conflicts) = (lately.part(lately.hits), lately.part(lately.requests.conflicts));
    let above = |part: Option<f64>, limit: f64| part.is_some_and(|part| part > limit);
    let against = |part: Option<f64>, limit: f64| {
        let word = if above(part, limit) { "above the alarm at" } else { "alarm above" };
        format!("{word} {:.0} %", limit * 100.0)
    };
    let stuck = match (counted, counts.unknown) {
        (false, _) => "as last counted".into(),
        (true, 0) => "nothing is stuck".into(),
        (true, _) => "say how they ended".to_owned(),
    };
    vec![
        Tile { unit: "/s", ..tile("Requests", rate(lately.per_second()), format!("{over}, {running} at work")) },
        Tile { alert: above(hits, HITS_LIMIT), ..tile("Hits", percent(hits), against(hits, HITS_LIMIT)) },
        Tile {
            alert: above(conflicts, CONFLICTS_LIMIT),
            ..tile("Conflicts", percent(conflicts), against(conflicts, CONFLICTS_LIMIT))
        },
        Tile {
            alert: lately.fallbacks > 0,
            ..tile(
                "Fallbacks",
                count(lately.fallbacks),
                if lately.fallbacks > 0 { "a store is away".into() } else { "alarm at any".into() },
            )
        },
        Tile { alert: counts.unknown > 0, link: Some("/stuck"), ..tile("Unknown ends", count(counts.unknown), stuck) },
        tile(
            "Overhead",
            took(lately.overhead.quantile(0.5)),
            format!("median; 99 % within {}", took(lately.overhead.quantile(0.99))),
        ),
    ]
}

impl Numbers {
    fn of(at_ms: u64, row: &Lately) -> Self {
        let (at, requests) = (date(at_ms), &row.requests);
        Self {
            when: clock(&at),
            at,
            requests: count(requests.all()),
            ran: count(requests.ran()),
            replayed: count(requests.replayed),
            refused: count(requests.all_refused()),
            open: count(requests.open()),
            hits: percent(row.part(row.hits)),
            conflicts: percent(row.part(requests.conflicts)),
            fallbacks: count(row.fallbacks),
            p50: took(row.overhead.quantile(0.5)),
            p99: took(row.overhead.quantile(0.99)),
        }
    }
}

impl Open {
    fn of(needs: &Lists, counts: Counts) -> Self {
        let rows = needs.unknown.iter().chain(&needs.long).take(NEEDY).cloned().collect();
        let (empty, empty_more) = match needs.trouble {
            Some(_) => ("The store could not list them.", "It is asked again every few seconds."),
            None => ("Nothing.", "No end is unknown, and nothing has been running for over a minute."),
        };
        Self { unknown: count(counts.unknown), running: count(counts.processing), rows, empty, empty_more }
    }
}

impl StoreCard {
    fn of(health: Health, counts: Counts) -> Self {
        let mut fields = vec![
            Field::new("Finished", count(counts.finished)),
            Field::new("Running", count(counts.processing)),
            Field::new("Unknown", count(counts.unknown)),
            Field::new("Takes up", size(counts.bytes)),
            Field::new("Answered in", took(health.took)),
            Field::new("Not taken yet", count(health.waiting)),
        ];
        if !health.wanting.is_empty() {
            fields.push(Field::new("Wanting", health.wanting.join("; ")));
        }
        Self { name: health.name, health, fields }
    }
}

impl Route {
    fn of(name: &str, requests: &Requests) -> Self {
        let counts = [
            ("Requests", requests.all()),
            ("Ran", requests.ran()),
            ("Replayed", requests.replayed),
            ("In progress", requests.conflicts),
            ("Key reused", requests.reused),
            ("Otherwise refused", requests.refused),
            ("Unknown", requests.unknown),
            ("Unprotected", requests.degraded),
            ("No key", requests.passed()),
        ];
        Self { name: name.to_owned(), counts: counts.map(|(name, number)| (name, count(number))) }
    }
}
