//! Pages without actions: policies, the store, the audit trail, the shadow report, and errors.

use askama::Template;
use ibid::{PolicyMode, store::EntryCounts};
use ibid_stores::StoreRole;

use super::{
    form::Form,
    format::{display_date, escape_invisible, format_count, format_duration, format_size},
    page::PageShell,
    row::{AuditEntryRow, PageField},
};
use crate::{
    admin::{
        audit::AuditTrail,
        health::{StoreHealth, Works},
        stats,
        store_state::StoreState,
    },
    config::dial_format::{self, Dial},
    format::format_date,
    metrics::{Metrics, UserAgentCount},
    routes::{RouteEntry, RouteTable},
};

#[derive(Template)]
#[template(path = "console/policies.html")]
pub(super) struct PoliciesPage {
    shell: PageShell,
    routes: Vec<RoutePolicyView>,
}

struct RoutePolicyView {
    name: String,
    preset: &'static str,
    mode: String,
    mode_kind: &'static str,
    dials: Vec<Dial>,
}

impl PoliciesPage {
    pub(super) fn new(shell: PageShell, routes: &RouteTable) -> Self {
        Self { shell, routes: routes.iter().map(RoutePolicyView::from_route).collect() }
    }
}

impl RoutePolicyView {
    fn from_route(route: &RouteEntry) -> Self {
        let mut dials = dial_format::route_dials(route);
        let upstream = route.upstream.iter();
        dials.extend(upstream.map(|upstream| Dial { name: "upstream", value: upstream.clone(), overridden: true }));
        let mode = route.policy.mode;
        let mode_kind = match mode {
            PolicyMode::Enforce => "good",
            PolicyMode::Shadow => "warn",
            PolicyMode::Off => "",
        };
        Self { name: route.title().to_owned(), preset: route.preset, mode: mode.to_string(), mode_kind, dials }
    }
}

#[derive(Template)]
#[template(path = "console/store.html")]
pub(super) struct StorePage {
    shell: PageShell,
    name: &'static str,
    health: StoreHealth,
    error: Option<String>,
    advice: Vec<&'static str>,
    degraded: Option<String>,
    warnings: Vec<String>,
    stores: Vec<StoreMemberRow>,
    guarantees: Vec<PageField>,
    counted: &'static str,
    holds: Vec<PageField>,
    calls: Vec<StoreCallRow>,
}

struct StoreMemberRow {
    name: &'static str,
    role: &'static str,
    kind: &'static str,
    state: &'static str,
    since: String,
    last_error: String,
}

struct StoreCallRow {
    name: &'static str,
    count: String,
    mean: String,
    p50: String,
    p99: String,
}

impl StorePage {
    pub(super) fn new(
        shell: PageShell, health: StoreHealth, counts: EntryCounts, metrics: &Metrics, promise: String, url: String,
    ) -> Self {
        let yes_no = |yes: bool, no: &'static str, so: &'static str| if yes { so } else { no };
        let guarantees = vec![
            PageField::code("Named", url),
            PageField::new("Guarantees", promise),
            PageField::new("Survives a crash", yes_no(health.durable, "no", "yes")),
            PageField::new("Shared", yes_no(health.shared, "no", "yes")),
            PageField::new("Grants new keys", works(health.can_claim)),
            PageField::new("Replays", works(health.replays)),
            PageField::new("Answered in", format_duration(health.latency)),
            PageField::new("Not taken yet", format_count(health.pending_settlements))
                .with_note("told again and again until they are"),
        ];
        let holds = vec![
            PageField::new("Finished", format_count(counts.finished)),
            PageField::new("Running", format_count(counts.processing)),
            PageField::new("Unknown", format_count(counts.unknown)),
            PageField::new("Takes up", format_size(counts.bytes)).with_note("roughly"),
        ];
        let spreads = metrics.store_calls();
        let calls = spreads.map(|(call, spread)| StoreCallRow {
            name: call.name(),
            count: format_count(spread.count()),
            mean: format_duration(spread.mean()),
            p50: format_duration(spread.quantile(0.5)),
            p99: format_duration(spread.quantile(0.99)),
        });
        Self {
            shell,
            name: health.name,
            error: health.error.clone(),
            advice: STORE_DOWN_ADVICE.to_vec(),
            degraded: health.degraded.clone(),
            warnings: health.warnings.clone(),
            stores: health.stores.iter().map(StoreMemberRow::of).collect(),
            guarantees,
            counted: if health.is_healthy() { "counted now" } else { "as last counted" },
            holds,
            calls: calls.collect(),
            health,
        }
    }
}

impl StoreMemberRow {
    fn of(store: &StoreState) -> Self {
        let (kind, state) = if store.is_up() { ("good", "up") } else { ("bad", "down") };
        let last_error = store.last_error.as_ref();
        Self {
            name: store.name,
            role: match store.role {
                StoreRole::Authority => "decides",
                StoreRole::Front => "in front, decides alone while the other is down",
                StoreRole::Cache => "cache",
            },
            kind,
            state,
            since: display_date(&format_date(store.since_ms)),
            last_error: last_error.map_or("–".into(), |error| {
                format!("{}: {}", display_date(&format_date(error.at_ms)), escape_invisible(&error.text))
            }),
        }
    }
}

fn works(works: Works) -> &'static str {
    match works {
        Works::Full => "yes",
        Works::FrontOnly => "only by the Redis in front",
        Works::None => "no",
    }
}

/// Audit entries per page.
const AUDIT_PAGE_SIZE: usize = 50;

#[derive(Template)]
#[template(path = "console/audit.html")]
pub(super) struct AuditPage {
    shell: PageShell,
    entries: Vec<AuditEntryRow>,
    /// Link to the first page; `None` on it.
    first: Option<String>,
    previous: Option<String>,
    next: Option<String>,
}

impl AuditPage {
    /// Shows the entries with an id below `before`, or the latest.
    pub(super) fn new(shell: PageShell, audit: &AuditTrail, before: Option<u64>) -> Self {
        let page = audit.page(before, AUDIT_PAGE_SIZE, None);
        let link =
            |id: Option<u64>| Form::build_url("/audit", &[("before", &id.map_or(String::new(), |id| id.to_string()))]);
        Self {
            shell,
            entries: page.entries.iter().map(AuditEntryRow::from_entry).collect(),
            first: before.map(|_| link(None)),
            previous: before.map(|before| link(audit.previous_page_start(before, AUDIT_PAGE_SIZE))),
            next: page.next.map(|next| link(Some(next))),
        }
    }
}

#[derive(Template)]
#[template(path = "console/shadow.html")]
pub(super) struct ShadowPage {
    shell: PageShell,
    lead: String,
    routes: Vec<ShadowRouteRow>,
    names: [&'static str; 5],
}

/// Outcomes of one route's requests, enforced or as shadow mode predicts them.
struct ShadowRouteRow {
    name: String,
    mode: String,
    mode_kind: &'static str,
    counts: [(&'static str, String); 5],
    /// Refusals by reason.
    reasons: Vec<(String, String)>,
    /// Requests without a key by user agent.
    agents: Vec<(String, String)>,
}

impl ShadowPage {
    pub(super) fn new(shell: PageShell, report: &stats::ShadowReport) -> Self {
        let routes: Vec<ShadowRouteRow> = report.routes.iter().map(ShadowRouteRow::from_report).collect();
        let lead = format!("What enforcing each route does, or would do, since {} UTC", display_date(&report.since));
        Self { shell, lead, routes, names: ["Requests", "Run", "Replay", "Refuse", "No key"] }
    }
}

impl ShadowRouteRow {
    fn from_report(route: &stats::ShadowRoute) -> Self {
        let refused = route.refuse.values().sum();
        let counts = [
            ("Requests", route.requests),
            ("Run", route.run),
            ("Replay", route.replay),
            ("Refuse", refused),
            ("No key", route.no_key),
        ];
        let agent = |agent: &UserAgentCount| {
            let name =
                agent.user_agent.as_deref().map_or("no user agent".into(), |name| escape_invisible(name).into_owned());
            (name, format_count(agent.requests))
        };
        let mut agents: Vec<(String, String)> = route.no_key_by.iter().map(agent).collect();
        if route.no_key_by_others > 0 {
            agents.push(("others".into(), format_count(route.no_key_by_others)));
        }
        Self {
            name: route.route.clone(),
            mode: route.mode.clone(),
            mode_kind: if route.mode == "shadow" { "warn" } else { "good" },
            counts: counts.map(|(name, number)| (name, format_count(number))),
            reasons: route.refuse.iter().map(|(reason, number)| (reason.clone(), format_count(*number))).collect(),
            agents,
        }
    }
}

const STORE_DOWN_ADVICE: [&str; 2] = [
    "Check that it runs and can be reached from the gateway; the gateway's log has every failed call, and /readyz says the same as this page.",
    "Nothing is lost on this side: the gateway goes on asking, and this page comes back by itself.",
];

/// A page that says what is wrong and what to do.
#[derive(Template)]
#[template(path = "console/trouble.html")]
pub(super) struct ErrorPage {
    pub(super) shell: PageShell,
    pub(super) title: &'static str,
    pub(super) kind: &'static str,
    pub(super) detail: String,
    pub(super) advice: Vec<&'static str>,
    /// Whether the page offers to try again.
    pub(super) retry: bool,
    pub(super) retry_path: String,
    pub(super) back: &'static str,
    pub(super) back_name: &'static str,
}

impl ErrorPage {
    /// An error that a retry does not fix.
    pub(super) fn new(
        shell: PageShell, title: &'static str, why: impl Into<String>, advice: Vec<&'static str>,
    ) -> Self {
        Self {
            shell,
            title,
            kind: "warn",
            detail: why.into(),
            advice,
            retry: false,
            retry_path: String::new(),
            back: "/records",
            back_name: "To the records",
        }
    }

    pub(super) fn audit_unwritable(shell: PageShell, why: String) -> Self {
        let advice = vec![
            "Look at the gateway's disk, and at the file that admin.audit names. Then repeat what you wanted to do.",
        ];
        Self { kind: "bad", ..Self::new(shell, "The audit trail cannot be written", why, advice) }
    }

    pub(super) fn store_unavailable(shell: PageShell, here: &str, why: String) -> Self {
        Self {
            kind: "bad",
            retry: true,
            retry_path: here.to_owned(),
            back: "/",
            back_name: "To the overview",
            ..Self::new(shell, "The store does not answer", why, STORE_DOWN_ADVICE.to_vec())
        }
    }
}
