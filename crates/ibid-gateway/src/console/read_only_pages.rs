//! Pages without actions: policies, the store, the audit trail, and the shadow report.

use askama::Template;
use ibid::{observe::StoreCall, store::EntryCounts};
use ibid_stores::StoreRole;

use super::{
    form::Form,
    page::Visit,
    page::{PageShell, filters},
};
use crate::{
    admin::{
        audit::{AuditEntry, AuditEntryPage, AuditTrail},
        health::StoreState,
        health::{StoreHealth, Works},
        stats::{ShadowReport, ShadowRoute},
    },
    format::{display_date, escape_invisible, format_date},
    metrics::HistogramSnapshot,
    routes::RouteTable,
};

#[derive(Template)]
#[template(path = "console/policies.html")]
pub(super) struct PoliciesPage<'a> {
    pub(super) shell: PageShell,
    pub(super) routes: &'a RouteTable,
}

#[derive(Template)]
#[template(path = "console/store.html")]
pub(super) struct StorePage {
    shell: PageShell,
    health: StoreHealth,
    counts: EntryCounts,
    url: String,
    guarantees: String,
    calls: Vec<(StoreCall, HistogramSnapshot)>,
}

impl StorePage {
    pub(super) fn new(visit: &Visit, health: StoreHealth, counts: EntryCounts) -> Self {
        let now = visit.state.live.now();
        let settings = &now.settings.store;
        Self {
            shell: visit.shell(),
            health,
            counts,
            url: settings.url.to_string(),
            guarantees: settings.store_config().guarantee_summary(),
            calls: visit.state.metrics.store_calls().collect(),
        }
    }
}

impl StoreState {
    fn role_text(&self) -> &'static str {
        match self.role {
            StoreRole::Authority => "decides",
            StoreRole::Front => "in front, decides alone while the other is down",
            StoreRole::Cache => "cache",
        }
    }

    fn last_error_text(&self) -> String {
        self.last_error.as_ref().map_or("–".into(), |error| {
            format!("{}: {}", display_date(&format_date(error.at_ms)), escape_invisible(&error.text))
        })
    }
}

impl Works {
    fn text(self) -> &'static str {
        match self {
            Self::Full => "yes",
            Self::FrontOnly => "only by the Redis in front",
            Self::None => "no",
        }
    }
}

pub(super) const AUDIT_PAGE_SIZE: usize = 50;

#[derive(Template)]
#[template(path = "console/audit.html")]
pub(super) struct AuditPage {
    shell: PageShell,
    reach: &'static str,
    entries: Vec<AuditEntry>,
    /// Link to the first page; `None` on it.
    first: Option<String>,
    previous: Option<String>,
    next: Option<String>,
}

impl AuditPage {
    /// Shows a page with entries below `before`, or the latest.
    pub(super) fn new(shell: PageShell, audit: &AuditTrail, page: AuditEntryPage, before: Option<u64>) -> Self {
        let link =
            |id: Option<u64>| Form::build_url("/audit", &[("before", &id.map_or(String::new(), |id| id.to_string()))]);
        Self {
            shell,
            reach: audit.reach(),
            entries: page.entries,
            first: before.map(|_| link(None)),
            previous: before.map(|before| link(audit.previous_page_start(before, AUDIT_PAGE_SIZE))),
            next: page.next.map(|next| link(Some(next))),
        }
    }
}

#[derive(Template)]
#[template(path = "console/shadow.html")]
pub(super) struct ShadowPage {
    pub(super) shell: PageShell,
    pub(super) report: ShadowReport,
}

impl ShadowRoute {
    fn columns(&self) -> [(&'static str, u64); 5] {
        [
            ("Requests", self.requests),
            ("Run", self.run),
            ("Replay", self.replay),
            ("Refuse", self.refuse.values().sum()),
            ("No key", self.no_key),
        ]
    }
}

pub(super) const STORE_DOWN_ADVICE: [&str; 2] = [
    "Check that it runs and can be reached from the gateway; the gateway's log has every failed call, and /readyz says the same as this page.",
    "Nothing is lost on this side: the gateway goes on asking, and this page comes back by itself.",
];
