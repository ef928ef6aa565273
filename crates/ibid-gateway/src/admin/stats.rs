//! Statistics, policies, store and shadow report for the API and the console.

use std::{collections::BTreeMap, time::Duration};

use ibid::{
    RefusalReason,
    label::LabelText,
    policy::PolicyMode,
    store::{Address, EntryCounts, EntryFilter, ListCursor},
};
use ibid_stores::StoreRole;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::time::{Instant, timeout_at};

use super::AdminState;
use crate::{
    config::dials,
    format::{format_date, now_ms},
    metrics::{RefusedRequest, UserAgentCount},
    routes::RouteEntry,
};

/// Time for all lookups of first requests of a response, so that a hanging store delays it only once.
pub(crate) const FIRST_REQUEST_LOOKUP_TIMEOUT: Duration = Duration::from_secs(1);

/// Outcomes of one route's requests, enforced or as shadow mode predicts them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShadowRoute {
    pub route: String,
    /// `shadow`, `enforce`, or `gone` if the current configuration does not have the route.
    pub mode: String,
    pub requests: u64,
    /// Found no stored answer and ran.
    pub run: u64,
    /// Would have been (under `enforce`: were) replayed.
    pub replay: u64,
    /// Would have been (were) refused, by reason.
    pub refuse: BTreeMap<String, u64>,
    /// Had no key.
    pub no_key: u64,
    /// Requests without a key by user agent, most frequent first.
    pub no_key_by: Vec<UserAgentCount>,
    /// Requests without a key of user agents that are not in the list.
    pub no_key_by_others: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShadowReport {
    /// Start of the counting, RFC 3339.
    pub since: String,
    /// In the order of the configuration.
    pub routes: Vec<ShadowRoute>,
}

/// `GET /api/stats`.
pub async fn stats(state: &AdminState) -> Value {
    let stored = state.gauges.read().await;
    state.metrics.register_routes(&state.live.now().settings.routes);
    let engine = state.ibid.engine();
    json!({
        "since": format_date(state.started_ms),
        "now": format_date(now_ms()),
        "running": engine.running().count(),
        "waiting": engine.settle_queue().pending(),
        "stored": counts_json(stored),
        "totals": state.metrics.totals(),
        "history": state.history.last_hour(),
    })
}

/// `GET /api/policies`: the settings of every route, in the format of `ibid check`.
pub fn policies(state: &AdminState) -> Value {
    let now = state.live.now();
    let routes: Vec<Value> = now.settings.routes.iter().map(policy_json).collect();
    json!({ "routes": routes })
}

fn policy_json(route: &RouteEntry) -> Value {
    let dials = dials::route_dials(route);
    let unusual: Vec<&str> = dials.iter().filter(|dial| dial.overridden).map(|dial| dial.name).collect();
    let shown: BTreeMap<&str, &str> = dials.iter().map(|dial| (dial.name, dial.value.as_str())).collect();
    json!({
        "match": route.name,
        "preset": route.preset,
        "mode": route.policy.mode.to_string(),
        "upstream": route.upstream,
        "dials": shown,
        "overridden": unusual,
    })
}

/// `GET /api/store`: the store's guarantees and health.
pub async fn store(state: &AdminState) -> Value {
    // One after the other: the gauges would count the key that the store probe claims.
    let health = state.store_health().await;
    let stored = state.gauges.read().await;
    let now = state.live.now();
    let settings = &now.settings.store;
    let url = |role: StoreRole| match role {
        StoreRole::Authority => Some(settings.fallback.as_ref().unwrap_or(&settings.url).to_string()),
        StoreRole::Front => Some(settings.url.to_string()),
        StoreRole::Cache => settings.cache.as_ref().map(ToString::to_string),
    };
    let mut shown = health.to_json(url);
    shown["url"] = settings.url.to_string().into();
    shown["fallback"] = settings.fallback.as_ref().map(ToString::to_string).into();
    shown["cache"] = settings.cache.as_ref().map(ToString::to_string).into();
    shown["stored"] = counts_json(stored);
    shown
}

fn counts_json(stored: EntryCounts) -> Value {
    let EntryCounts { processing, unknown, finished, bytes } = stored;
    json!({ "processing": processing, "unknown": unknown, "finished": finished, "bytes": bytes })
}

/// `GET /api/shadow`: the outcomes of every route's requests, and which clients send no key.
pub fn shadow(state: &AdminState) -> ShadowReport {
    let now = state.live.now();
    state.metrics.register_routes(&now.settings.routes);
    let mode = |name: &str| now.settings.routes.iter().find(|route| route.name == name).map(|route| route.policy.mode);
    let routes = state.metrics.routes().filter_map(|counted| {
        let (name, mode) = (counted.name(), mode(counted.name()));
        let counts = counted.by_name();
        let of = |names: &[&str]| names.iter().filter_map(|name| counts.get(name)).sum::<u64>();
        let requests = counts.values().sum();
        if mode == Some(PolicyMode::Off) || mode.is_none() && requests == 0 {
            return None;
        }
        let enforced = RefusalReason::all().map(|reason| (reason.name(), of(&[reason.name()])));
        let mut refuse = BTreeMap::new();
        for (reason, count) in enforced.chain(state.shadow.refusals(name)).filter(|(_, count)| *count > 0) {
            *refuse.entry(reason.to_owned()).or_default() += count;
        }
        let (agents, others) = state.shadow.keyless_agents(name);
        Some(ShadowRoute {
            route: name.to_owned(),
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
    ShadowReport { since: format_date(state.started_ms), routes: routes.collect() }
}

/// `GET /api/refusals`: the latest refusals. For a reused key, also what differs from the first request.
pub async fn refusals(state: &AdminState, reason: Option<RefusalReason>, limit: usize) -> Value {
    let mut shown = Vec::new();
    // Looks up each key once, even if many refusals have it.
    let mut known: BTreeMap<Address, Option<LabelText>> = BTreeMap::new();
    let until = Instant::now() + FIRST_REQUEST_LOOKUP_TIMEOUT;
    for refused in state.refusals.latest(reason, limit) {
        let mut first = None;
        if let (RefusalReason::KeyReused, Some(at)) = (refused.reason, refused.address) {
            first = match known.get(&at) {
                Some(label) => label.clone(),
                None => known.entry(at).or_insert(find_first_request(state, &at, until).await).clone(),
            };
        }
        shown.push(refusal_json(&refused, first.as_ref()));
    }
    json!({ "refusals": shown })
}

fn refusal_json(refused: &RefusedRequest, first: Option<&LabelText>) -> Value {
    let differs = match (refused.parts, first.and_then(|first| first.parts)) {
        (Some(own), Some(first)) => Some(first.differing(&own)),
        _ => None,
    };
    json!({
        "at": format_date(refused.at_ms),
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
            "requested_at": format_date(first.requested_at_ms),
            "method": first.method,
            "path": first.path,
            "client": first.peer,
            "user_agent": first.user_agent,
        })),
    })
}

/// The label of the request that first used a key; `None` if its entry is gone.
pub(crate) async fn find_first_request(state: &AdminState, at: &Address, until: Instant) -> Option<LabelText> {
    let filter = EntryFilter { address: Some(*at), ..EntryFilter::default() };
    let operators = state.ibid.engine().store().admin();
    let page = timeout_at(until, operators.list(&filter, ListCursor::default(), 1)).await.ok()?.ok()?;
    LabelText::decode(&page.entries.first()?.label)
}
