//! What operators see of refused requests: the latest refusals, the would-be refusals of shadow mode by reason, and the
//! clients that send no key.
//!
//! Bounds: the last [`MAX_PER_KIND`] requests with a reused key, and as many for all other reasons together, so that a
//! storm of retries does not push out reused keys. For shadow mode [`MAX_ROUTES`] routes, and for each the
//! [`MAX_AGENTS_PER_ROUTE`] user agents with the most keyless requests. A new agent replaces the rarest one, whose
//! requests then count as others: a flood of made-up names does not push out frequent ones.

use std::{
    collections::{HashMap, VecDeque},
    net::IpAddr,
};

use ibid::{
    RefusalReason, RequestOutcome, RequestReport, fingerprint::PartDigests, observe::ShadowOutcome, store::Address,
};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::{cores, format::now_ms};

const MAX_ROUTES: usize = 200;
const MAX_AGENTS_PER_ROUTE: usize = 50;
/// Longest user agent kept, in bytes.
const MAX_AGENT_BYTES: usize = 64;

/// One table per core, so that cores do not wait for each other.
#[derive(Debug)]
pub struct ShadowCounters(Box<[Mutex<CountersByRoute>]>);

type CountersByRoute = HashMap<Box<str>, ShadowRouteCounters>;

#[derive(Debug, Default)]
struct ShadowRouteCounters {
    refusals: [u64; RefusalReason::COUNT],
    agents: Vec<(Box<str>, u64)>,
    /// Requests without a key of agents that are not counted separately.
    others: u64,
}

/// Requests without a key of one user agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserAgentCount {
    /// The first word of the user agent, usually product and version; `None` if it was not sent.
    pub user_agent: Option<String>,
    pub requests: u64,
}

impl Default for ShadowCounters {
    fn default() -> Self {
        Self((0..cores::count()).map(|_| Mutex::default()).collect())
    }
}

impl ShadowCounters {
    /// Called for every request; returns at once unless it is a shadow refusal or has no key.
    pub(super) fn on_request(&self, request: &RequestReport<'_>) {
        match request.outcome {
            RequestOutcome::Shadow(ShadowOutcome::Refusal(reason)) => {
                self.with_route(request.route, |route| {
                    route.refusals[reason as usize] += 1;
                    if reason == RefusalReason::KeyMissing {
                        route.count_agent(request.user_agent);
                    }
                });
            }
            RequestOutcome::Keyless | RequestOutcome::Refused(RefusalReason::KeyMissing) => {
                self.with_route(request.route, |route| route.count_agent(request.user_agent));
            }
            _ => {}
        }
    }

    fn with_route(&self, name: &str, count: impl FnOnce(&mut ShadowRouteCounters)) {
        let mut routes = self.0[cores::index()].lock();
        if let Some(route) = routes.get_mut(name) {
            return count(route);
        }
        if routes.len() < MAX_ROUTES {
            count(routes.entry(name.into()).or_default());
        }
    }

    pub fn refusals(&self, route: &str) -> Vec<(&'static str, u64)> {
        let of = |core: &Mutex<CountersByRoute>, reason| {
            core.lock().get(route).map_or(0, |route| route.refusals[reason as usize])
        };
        let counted = RefusalReason::all().map(|reason| {
            let count = self.0.iter().map(|core| of(core, reason)).sum();
            (reason.name(), count)
        });
        counted.filter(|(_, count)| *count > 0).collect()
    }

    /// Requests without a key by user agent, most frequent first, and the number of all others.
    pub fn keyless_agents(&self, route: &str) -> (Vec<UserAgentCount>, u64) {
        let (mut counts, mut others) = (HashMap::<Box<str>, u64>::new(), 0);
        for core in &self.0 {
            if let Some(route) = core.lock().get(route) {
                route.agents.iter().for_each(|(agent, count)| *counts.entry(agent.clone()).or_default() += count);
                others += route.others;
            }
        }
        let shown = |(agent, requests): (Box<str>, u64)| UserAgentCount {
            user_agent: (!agent.is_empty()).then(|| agent.into()),
            requests,
        };
        let mut agents: Vec<UserAgentCount> = counts.into_iter().map(shown).collect();
        agents.sort_by(|a, b| b.requests.cmp(&a.requests).then_with(|| a.user_agent.cmp(&b.user_agent)));
        let rarest = agents.split_off(agents.len().min(MAX_AGENTS_PER_ROUTE));
        (agents, others + rarest.iter().map(|agent| agent.requests).sum::<u64>())
    }
}

impl ShadowRouteCounters {
    fn count_agent(&mut self, agent: Option<&[u8]>) {
        let first = agent.unwrap_or_default().split(|byte| *byte == b' ').next().unwrap_or_default();
        let agent = String::from_utf8_lossy(&first[..first.len().min(MAX_AGENT_BYTES)]);
        if let Some(at) = self.agents.iter().position(|(known, _)| **known == *agent) {
            self.agents[at].1 += 1;
            // Frequent agents move to the front, where they are found with few comparisons.
            self.agents.swap(at, at / 2);
            return;
        }
        if self.agents.len() == MAX_AGENTS_PER_ROUTE {
            let rarest = self.agents.iter().enumerate().min_by_key(|(_, (_, count))| *count);
            let at = rarest.map(|(at, _)| at).expect("there are some");
            let (_, count) = self.agents.swap_remove(at);
            self.others += count;
        }
        self.agents.push((agent.into(), 1));
    }
}

const MAX_PER_KIND: usize = 128;
/// Longest text kept of what a client sent, in bytes.
const MAX_TEXT_BYTES: usize = 200;

#[derive(Debug, Default)]
pub struct RefusalLog {
    reused: Mutex<VecDeque<RefusedRequest>>,
    others: Mutex<VecDeque<RefusedRequest>>,
}

/// A request that was refused, or would have been in shadow mode.
#[derive(Debug, Clone)]
pub struct RefusedRequest {
    /// Milliseconds since the Unix epoch.
    pub at_ms: u64,
    pub reason: RefusalReason,
    /// Whether shadow mode let it pass.
    pub shadow: bool,
    pub route: String,
    pub method: String,
    /// Without the query.
    pub path: String,
    /// Masked.
    pub key: String,
    /// The entry's address; `None` if the request was refused before it was known.
    pub address: Option<Address>,
    pub status: u16,
    pub peer: Option<IpAddr>,
    pub user_agent: String,
    /// Digests of the request's parts, to compare with those of the first request.
    pub parts: Option<PartDigests>,
}

impl RefusalLog {
    /// Called for every request; returns at once unless it is a refusal.
    pub(super) fn on_request(&self, request: &RequestReport<'_>) {
        let (reason, shadow) = match request.outcome {
            RequestOutcome::Refused(reason) => (reason, false),
            RequestOutcome::Shadow(ShadowOutcome::Refusal(reason)) => (reason, true),
            _ => return,
        };
        let agent = request.user_agent.unwrap_or_default();
        let refused = RefusedRequest {
            at_ms: now_ms(),
            reason,
            shadow,
            route: request.route.into(),
            method: request.method.into(),
            path: request.path[..request.path.floor_char_boundary(MAX_TEXT_BYTES)].into(),
            key: request.key.into(),
            address: request.address,
            status: request.status,
            peer: request.client_address,
            user_agent: String::from_utf8_lossy(&agent[..agent.len().min(MAX_TEXT_BYTES)]).into_owned(),
            parts: request.parts,
        };
        let mut last = if reason == RefusalReason::KeyReused { self.reused.lock() } else { self.others.lock() };
        if last.len() == MAX_PER_KIND {
            last.pop_front();
        }
        last.push_back(refused);
    }

    /// The latest refusals, newest first; with `reason`, only those.
    pub fn latest(&self, reason: Option<RefusalReason>, at_most: usize) -> Vec<RefusedRequest> {
        let mut all: Vec<RefusedRequest> =
            self.reused.lock().iter().chain(self.others.lock().iter()).cloned().collect();
        all.retain(|refused| reason.is_none_or(|reason| refused.reason == reason));
        all.reverse();
        all.sort_by_key(|refused| std::cmp::Reverse(refused.at_ms));
        all.truncate(at_most);
        all
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn told(report: &ShadowCounters, route: &str, outcome: RequestOutcome, agent: Option<&[u8]>) {
        report.on_request(&RequestReport {
            route,
            method: "POST",
            path: "/",
            key: "",
            address: None,
            outcome,
            status: 100,
            attempt: None,
            took: Duration::ZERO,
            run_took: Duration::ZERO,
            client_address: None,
            request_id: "",
            user_agent: agent,
            parts: None,
        });
    }

    #[test]
    fn reasons_and_agents_are_counted_per_route() {
        let report = ShadowCounters::default();
        for _ in 0..3 {
            told(&report, "a", RequestOutcome::Shadow(ShadowOutcome::Refusal(RefusalReason::KeyReused)), Some(b"x/1"));
            told(&report, "a", RequestOutcome::Keyless, Some(b"Shop/3.2 (Linux)"));
        }
        told(&report, "a", RequestOutcome::Keyless, None);
        told(
            &report,
            "a",
            RequestOutcome::Shadow(ShadowOutcome::Refusal(RefusalReason::KeyMissing)),
            Some(b"Shop/3.2 (Mac)"),
        );
        told(&report, "b", RequestOutcome::Executed, Some(b"x/1"));
        assert_eq!(report.refusals("a"), [("key-missing", 1), ("key-reused", 3)]);
        let shop = UserAgentCount { user_agent: Some("Shop/3.2".into()), requests: 4 };
        assert_eq!(report.keyless_agents("a"), (vec![shop, UserAgentCount { user_agent: None, requests: 1 }], 0));
        assert_eq!((report.refusals("b"), report.keyless_agents("b")), (Vec::new(), (Vec::new(), 0)));
    }

    #[test]
    fn a_flood_of_names_is_bounded_and_leaves_the_frequent_ones() {
        let report = ShadowCounters::default();
        for nth in 0..10_000 {
            told(&report, "a", RequestOutcome::Keyless, Some(format!("made-up-{nth}").as_bytes()));
            told(&report, "a", RequestOutcome::Keyless, Some(b"genuine"));
        }
        let (agents, others) = report.keyless_agents("a");
        assert_eq!((agents.len(), agents[0].user_agent.as_deref()), (MAX_AGENTS_PER_ROUTE, Some("genuine")));
        assert_eq!(agents[0].requests, 10_000);
        assert_eq!(agents.iter().map(|agent| agent.requests).sum::<u64>() + others, 20_000, "nothing is lost");
        for nth in 0..2 * MAX_ROUTES {
            told(&report, &format!("route {nth}"), RequestOutcome::Keyless, None);
        }
        assert_eq!(report.0[0].lock().len(), MAX_ROUTES);
    }
}
