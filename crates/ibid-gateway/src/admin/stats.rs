//! Numbers and settings for people: what was counted, how it went over time, what holds, and on what store.

use std::{
    collections::{BTreeMap, btree_map::Entry as Slot},
    time::Duration,
};

use ibid::{
    LabelText, Mode, Policy, Reason,
    http::Protocol,
    store::{Address, Counts, Cursor, Filter, Store},
};
use ibid_stores::Role;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::time::{Instant, timeout_at};

use super::Desk;
use crate::{
    config::{is_for_webhooks, show},
    metrics::Refused,
    records::view::{date, now_ms},
    routes::Route,
};

/// How long the store may take to say what the first requests of reused keys were, all together.
const PATIENCE: Duration = Duration::from_secs(1);

/// What shadow mode, or enforcement, makes of one route's requests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShadowRoute {
    /// Its name.
    pub route: String,
    /// `shadow` or `enforce`; `gone` if the configuration in force does not have it.
    pub mode: String,
    /// All of them.
    pub requests: u64,
    /// Found no answer, and ran as they would have.
    pub run: u64,
    /// Would have been (under `enforce`: were) answered from the record.
    pub replay: u64,
    /// Would have been (were) refused, by reason.
    pub refuse: BTreeMap<String, u64>,
    /// Had no key.
    pub no_key: u64,
    /// Who sent no key, most first.
    pub no_key_by: Vec<Agent>,
    /// Had no key and came from agents that are not in the list.
    pub no_key_by_others: u64,
}

/// Requests of one kind of client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Agent {
    /// The first word of its user agent; `None`: it sent none.
    pub user_agent: Option<String>,
    /// How many.
    pub requests: u64,
}

/// The shadow report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShadowReport {
    /// Since when it was counted.
    pub since: String,
    /// In the order of the configuration.
    pub routes: Vec<ShadowRoute>,
}

/// `GET /api/stats`.
pub async fn stats(desk: &Desk) -> Value {
    let stored = desk.gauges.read().await;
    desk.metrics.show(&desk.live.now().settings.routes);
    let engine = desk.ibid.engine();
    json!({
        "since": date(desk.started_ms),
        "now": date(now_ms()),
        "running": engine.running().count(),
        "waiting": engine.later().waiting(),
        "stored": counts(stored),
        "totals": desk.metrics.totals(),
        "history": desk.history.hour(),
    })
}

/// `GET /api/policies`: what holds for every route, in the words of `ibid check`.
pub fn policies(desk: &Desk) -> Value {
    let now = desk.live.now();
    let routes: Vec<Value> = now.settings.routes.iter().map(policy).collect();
    json!({ "routes": routes })
}

/// A dial of a route.
pub(crate) struct Dial {
    pub(crate) name: &'static str,
    pub(crate) value: String,
    /// Whether the preset has another value.
    pub(crate) unusual: bool,
}

/// All dials of a route, in the words of `ibid check`.
pub(crate) fn dials(route: &Route) -> Vec<Dial> {
    let mut preset = Policy::preset(route.preset).expect("routes start from presets");
    if route.protocol == Protocol::Grpc {
        preset = preset.for_grpc();
    } else if !route.is_policy {
        // Always those of the match.
        preset.methods.clone_from(&route.policy.methods);
    }
    let both = show::dials(&route.policy).into_iter().zip(show::dials(&preset));
    let mut dials: Vec<Dial> =
        both.map(|((name, value), (_, usual))| Dial { name, unusual: value != usual, value }).collect();
    if is_for_webhooks(route.preset) {
        let signature = show::signature(&route.policy).into_iter();
        dials.extend(signature.map(|(name, value, unusual)| Dial { name, value, unusual }));
    }
    dials
}

fn policy(route: &Route) -> Value {
    let dials = dials(route);
    let unusual: Vec<&str> = dials.iter().filter(|dial| dial.unusual).map(|dial| dial.name).collect();
    let shown: BTreeMap<&str, &str> = dials.iter().map(|dial| (dial.name, dial.value.as_str())).collect();
    json!({
        "match": route.name,
        "preset": route.preset,
        "mode": route.policy.mode.to_string(),
        "upstream": route.upstream,
        "dials": shown,
        "unusual": unusual,
    })
}

/// `GET /api/store`: the store's promise, and how it is.
pub async fn store(desk: &Desk) -> Value {
    // One after the other: the gauges would count the key that is claimed for the first.
    let health = desk.health().await;
    let stored = desk.gauges.read().await;
    let now = desk.live.now();
    let settings = &now.settings.store;
    let url = |role: Role| match role {
        Role::Authority => Some(settings.fallback.as_ref().unwrap_or(&settings.url).to_string()),
        Role::Front => Some(settings.url.to_string()),
        Role::Cache => settings.cache.as_ref().map(ToString::to_string),
    };
    let mut shown = health.to_json(url);
    shown["url"] = settings.url.to_string().into();
    shown["fallback"] = settings.fallback.as_ref().map(ToString::to_string).into();
    shown["cache"] = settings.cache.as_ref().map(ToString::to_string).into();
    shown["stored"] = counts(stored);
    shown
}

fn counts(stored: Counts) -> Value {
    let Counts { processing, unknown, finished, bytes } = stored;
    json!({ "processing": processing, "unknown": unknown, "finished": finished, "bytes": bytes })
}

/// `GET /api/shadow`: what enforcement makes, or would make, of every route's requests, and who sends no key.
pub fn shadow(desk: &Desk) -> ShadowReport {
    let now = desk.live.now();
    desk.metrics.show(&now.settings.routes);
    let totals = desk.metrics.totals();
    let mode = |name: &str| now.settings.routes.iter().find(|route| route.name == name).map(|route| route.policy.mode);
    let routes = totals.routes.iter().filter_map(|counted| {
        let mode = mode(&counted.route);
        let of = |names: &[&str]| names.iter().filter_map(|name| counted.outcomes.get(name)).sum::<u64>();
        let requests = counted.outcomes.values().sum();
        if mode == Some(Mode::Off) || mode.is_none() && requests == 0 {
            return None;
        }
        let enforced = Reason::all().map(|reason| (reason.name(), of(&[reason.name()])));
        let mut refuse = BTreeMap::new();
        for (name, count) in enforced.chain(desk.shadow.refusals(&counted.route)).filter(|(_, count)| *count > 0) {
            *refuse.entry(name.to_owned()).or_default() += count;
        }
        let (agents, others) = desk.shadow.unkeyed(&counted.route);
        let agents: Vec<Agent> = agents
            .into_iter()
            .map(|unkeyed| Agent { user_agent: unkeyed.user_agent, requests: unkeyed.requests })
            .collect();
        Some(ShadowRoute {
            route: counted.route.clone(),
            mode: mode.map_or("gone".into(), |mode| mode.to_string()),
            requests,
            run: of(&["executed", "released", "pending", "unknown", "degraded"]),
            replay: of(&["replayed", "shadow-replay"]),
            refuse,
            no_key: agents.iter().map(|agent| agent.requests).sum::<u64>() + others,
            no_key_by: agents,
            no_key_by_others: others,
        })
    });
    ShadowReport { since: date(desk.started_ms), routes: routes.collect() }
}

/// `GET /api/refusals`: the latest, with what was different from the first request where a key was used again.
pub async fn refusals(desk: &Desk, reason: Option<Reason>, limit: usize) -> Value {
    let mut shown = Vec::new();
    // A storm of one key's is asked about once.
    let mut known: BTreeMap<Address, Option<LabelText>> = BTreeMap::new();
    // For all of them together: a store that hangs must not make people wait for each.
    let until = Instant::now() + PATIENCE;
    for refused in desk.refusals.latest(reason, limit) {
        let first = match (refused.reason, refused.address) {
            (Reason::KeyReused, Some(at)) => {
                let first = match known.entry(at) {
                    Slot::Occupied(known) => known.into_mut(),
                    Slot::Vacant(new) => new.insert(first(&**desk.ibid.engine().store(), &at, until).await),
                };
                first.as_ref()
            }
            _ => None,
        };
        shown.push(refusal(&refused, first));
    }
    json!({ "refusals": shown })
}

fn refusal(refused: &Refused, first: Option<&LabelText>) -> Value {
    let differs = match (refused.parts, first.and_then(|first| first.parts)) {
        (Some(own), Some(first)) => Some(first.differing(&own)),
        _ => None,
    };
    json!({
        "at": date(refused.at_ms),
        "reason": refused.reason.name(),
        "shadow": refused.shadow,
        "route": refused.route,
        "method": refused.method,
        "path": refused.path,
        "key": refused.key,
        "address": refused.address.map(|at| at.to_string()),
        "status": refused.status,
        "client": refused.peer.map(|peer| peer.to_string()),
        "user_agent": refused.user_agent,
        "differs": differs,
        "first": first.map(|first| json!({
            "requested_at": date(first.requested_at_ms),
            "method": first.method,
            "path": first.path,
            "client": first.peer,
            "user_agent": first.user_agent,
        })),
    })
}

/// What is known of the request that used a key first. `None` if its entry is gone.
async fn first(store: &dyn Store, at: &Address, until: Instant) -> Option<LabelText> {
    let filter = Filter { address: Some(*at), ..Filter::default() };
    let page = timeout_at(until, store.operators().list(&filter, Cursor::default(), 1)).await.ok()?.ok()?;
    LabelText::decode(&page.entries.first()?.label)
}
