//! Pages that only show: policies, the store, the audit trail, and what went wrong.

use askama::Template;
use ibid::{Mode, StoreCall, store::Counts};
use ibid_stores::Role;

use super::{
    form::Form,
    page::Shell,
    row::{Deed, Field},
    words::{count, plain, size, took, when},
};
use crate::{
    admin::{
        audit::Audit,
        health::{Health, Works},
        stats::{self, Dial},
        store_state::StoreState,
    },
    metrics::Metrics,
    records::view::date,
    routes::{Route, RouteTable},
};

#[derive(Template)]
#[template(path = "console/policies.html")]
pub(super) struct Policies {
    shell: Shell,
    routes: Vec<Dials>,
}

struct Dials {
    name: String,
    preset: &'static str,
    mode: String,
    mode_kind: &'static str,
    dials: Vec<Dial>,
}

impl Policies {
    pub(super) fn new(shell: Shell, routes: &RouteTable) -> Self {
        Self { shell, routes: routes.iter().map(Dials::of).collect() }
    }
}

impl Dials {
    fn of(route: &Route) -> Self {
        let mut dials = stats::dials(route);
        let upstream = route.upstream.iter();
        dials.extend(upstream.map(|upstream| Dial { name: "upstream", value: upstream.clone(), unusual: true }));
        let mode = route.policy.mode;
        let mode_kind = match mode {
            Mode::Enforce => "good",
            Mode::Shadow => "warn",
            Mode::Off => "",
        };
        Self { name: route.title().to_owned(), preset: route.preset, mode: mode.to_string(), mode_kind, dials }
    }
}

#[derive(Template)]
#[template(path = "console/store.html")]
pub(super) struct StorePage {
    shell: Shell,
    name: &'static str,
    health: Health,
    trouble: Option<String>,
    advice: Vec<&'static str>,
    degraded: Option<String>,
    wanting: Vec<String>,
    stores: Vec<Member>,
    promise: Vec<Field>,
    counted: &'static str,
    holds: Vec<Field>,
    calls: Vec<Call>,
}

/// One of the stores.
struct Member {
    name: &'static str,
    role: &'static str,
    kind: &'static str,
    state: &'static str,
    since: String,
    last_error: String,
}

struct Call {
    name: &'static str,
    count: String,
    mean: String,
    p50: String,
    p99: String,
}

impl StorePage {
    pub(super) fn new(
        shell: Shell, health: Health, counts: Counts, metrics: &Metrics, promise: String, url: String,
    ) -> Self {
        let yes_no = |yes: bool, no: &'static str, so: &'static str| if yes { so } else { no };
        let promise = vec![
            Field::code("Named", url),
            Field::new("Promise", promise),
            Field::new("Survives a crash", yes_no(health.durable, "no", "yes")),
            Field::new("Shared", yes_no(health.shared, "no", "yes")),
            Field::new("Grants new keys", works(health.claims)),
            Field::new("Replays", works(health.replays)),
            Field::new("Answered in", took(health.took)),
            Field::new("Not taken yet", count(health.waiting)).under("told again and again until they are"),
        ];
        let holds = vec![
            Field::new("Finished", count(counts.finished)),
            Field::new("Running", count(counts.processing)),
            Field::new("Unknown", count(counts.unknown)),
            Field::new("Takes up", size(counts.bytes)).under("roughly"),
        ];
        let spreads = metrics.reading().store;
        let calls = StoreCall::ALL.into_iter().zip(spreads).map(|(call, spread)| Call {
            name: call.name(),
            count: count(spread.count()),
            mean: took(spread.mean()),
            p50: took(spread.quantile(0.5)),
            p99: took(spread.quantile(0.99)),
        });
        Self {
            shell,
            name: health.name,
            trouble: health.trouble.clone(),
            advice: STORE_LOST.to_vec(),
            degraded: health.degraded.clone(),
            wanting: health.wanting.clone(),
            stores: health.stores.iter().map(Member::of).collect(),
            promise,
            counted: if health.is_well() { "counted now" } else { "as last counted" },
            holds,
            calls: calls.collect(),
            health,
        }
    }
}

impl Member {
    fn of(store: &StoreState) -> Self {
        let (kind, state) = if store.is_up() { ("good", "up") } else { ("bad", "down") };
        let last_error = store.last_error.as_ref();
        Self {
            name: store.name,
            role: match store.role {
                Role::Authority => "decides",
                Role::Front => "in front, decides alone while the other is down",
                Role::Cache => "cache",
            },
            kind,
            state,
            since: when(&date(store.since_ms)),
            last_error: last_error
                .map_or("–".into(), |error| format!("{}: {}", when(&date(error.at_ms)), plain(&error.text))),
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

/// Entries of the audit trail on a page.
const DEEDS: usize = 50;

#[derive(Template)]
#[template(path = "console/audit.html")]
pub(super) struct AuditPage {
    shell: Shell,
    entries: Vec<Deed>,
    /// The first page, from any other.
    first: Option<String>,
    previous: Option<String>,
    next: Option<String>,
}

impl AuditPage {
    /// The entries below `before`, or the latest.
    pub(super) fn new(shell: Shell, audit: &Audit, before: Option<u64>) -> Self {
        let page = audit.page(before, DEEDS, None);
        let link =
            |id: Option<u64>| Form::link("/audit", &[("before", &id.map_or(String::new(), |id| id.to_string()))]);
        Self {
            shell,
            entries: page.entries.iter().map(Deed::of).collect(),
            first: before.map(|_| link(None)),
            previous: before.map(|before| link(audit.later(before, DEEDS))),
            next: page.next.map(|next| link(Some(next))),
        }
    }
}

#[derive(Template)]
#[template(path = "console/shadow.html")]
pub(super) struct ShadowPage {
    shell: Shell,
    lead: String,
    routes: Vec<Report>,
    names: [&'static str; 5],
}

/// What enforcement makes, or would make, of one route's requests.
struct Report {
    name: String,
    mode: String,
    mode_kind: &'static str,
    counts: [(&'static str, String); 5],
    /// Why it refuses, or would, and how often.
    reasons: Vec<(String, String)>,
    /// Who sends no key.
    agents: Vec<(String, String)>,
}

impl ShadowPage {
    pub(super) fn new(shell: Shell, report: &stats::ShadowReport) -> Self {
        let routes: Vec<Report> = report.routes.iter().map(Report::of).collect();
        let lead = format!("What enforcing each route does, or would do, since {} UTC", when(&report.since));
        Self { shell, lead, routes, names: ["Requests", "Run", "Replay", "Refuse", "No key"] }
    }
}

impl Report {
    fn of(route: &stats::ShadowRoute) -> Self {
        let refused = route.refuse.values().sum();
        let counts = [
            ("Requests", route.requests),
            ("Run", route.run),
            ("Replay", route.replay),
            ("Refuse", refused),
            ("No key", route.no_key),
        ];
        let agent = |agent: &stats::Agent| {
            let name = agent.user_agent.as_deref().map_or("no user agent".into(), |name| plain(name).into_owned());
            (name, count(agent.requests))
        };
        let mut agents: Vec<(String, String)> = route.no_key_by.iter().map(agent).collect();
        if route.no_key_by_others > 0 {
            agents.push(("others".into(), count(route.no_key_by_others)));
        }
        Self {
            name: route.route.clone(),
            mode: route.mode.clone(),
            mode_kind: if route.mode == "shadow" { "warn" } else { "good" },
            counts: counts.map(|(name, number)| (name, count(number))),
            reasons: route.refuse.iter().map(|(reason, number)| (reason.clone(), count(*number))).collect(),
            agents,
        }
    }
}

/// What a person can do about a store that is away.
const STORE_LOST: [&str; 2] = [
    "Check that it runs and can be reached from the gateway; the gateway's log has every failed call, and /readyz says the same as this page.",
    "Nothing is lost on this side: the gateway goes on asking, and this page comes back by itself.",
];

/// A page that says what is wrong and what to do.
#[derive(Template)]
#[template(path = "console/trouble.html")]
pub(super) struct TroublePage {
    pub(super) shell: Shell,
    pub(super) what: &'static str,
    pub(super) kind: &'static str,
    pub(super) why: String,
    pub(super) advice: Vec<&'static str>,
    /// Whether it may go away by itself.
    pub(super) retry: bool,
    pub(super) here: String,
    pub(super) back: &'static str,
    pub(super) back_name: &'static str,
}

impl TroublePage {
    /// About something that does not go away by itself.
    pub(super) fn new(shell: Shell, what: &'static str, why: impl Into<String>, advice: Vec<&'static str>) -> Self {
        Self {
            shell,
            what,
            kind: "warn",
            why: why.into(),
            advice,
            retry: false,
            here: String::new(),
            back: "/records",
            back_name: "To the records",
        }
    }

    /// Nothing may be changed.
    pub(super) fn unwritable(shell: Shell, why: String) -> Self {
        let advice = vec![
            "Look at the gateway's disk, and at the file that admin.audit names. Then repeat what you wanted to do.",
        ];
        Self { kind: "bad", ..Self::new(shell, "The audit trail cannot be written", why, advice) }
    }

    /// The store cannot be asked.
    pub(super) fn store_gone(shell: Shell, here: &str, why: String) -> Self {
        Self {
            kind: "bad",
            retry: true,
            here: here.to_owned(),
            back: "/",
            back_name: "To the overview",
            ..Self::new(shell, "The store does not answer", why, STORE_LOST.to_vec())
        }
    }
}
