//! What shadow mode saw beyond its counts: for which reasons it would have refused, and who sends no key.
//!
//! Bound: [`ROUTES`] routes, and of each the [`AGENTS`] user agents that send no key most often. A new one takes the
//! place of the rarest, whose requests are then counted with all others: a flood of made-up names does not drive out
//! those that matter.

use std::collections::HashMap;

use ibid::{Answered, Outcome, Reason, Shadow};
use parking_lot::Mutex;
use serde::Serialize;

/// Routes that are told apart.
const ROUTES: usize = 200;
/// User agents that are told apart on a route.
const AGENTS: usize = 50;
/// What is kept of a user agent.
const LONGEST: usize = 64;

/// Counts what would have been.
#[derive(Debug, Default)]
pub struct ShadowReport(Mutex<HashMap<Box<str>, Route>>);

#[derive(Debug)]
struct Route {
    refusals: [u64; Reason::COUNT],
    agents: Vec<(Box<str>, u64)>,
    /// Without a key, by agents that are not told apart.
    others: u64,
}

/// Requests without a key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Unkeyed {
    /// The first word of the user agent: mostly a product and its version. `None`: they sent none.
    pub user_agent: Option<String>,
    /// How many.
    pub requests: u64,
}

impl ShadowReport {
    /// Called for every request; nothing but shadow refusals and missing keys costs anything.
    pub(super) fn answered(&self, request: &Answered<'_>) {
        match request.outcome {
            Outcome::Shadow(Shadow::Refusal(reason)) => {
                self.on(request.route, |route| {
                    route.refusals[reason as usize] += 1;
                    if reason == Reason::KeyMissing {
                        route.count(request.user_agent);
                    }
                });
            }
            Outcome::Keyless | Outcome::Refused(Reason::KeyMissing) => {
                self.on(request.route, |route| route.count(request.user_agent));
            }
            _ => {}
        }
    }

    fn on(&self, name: &str, count: impl FnOnce(&mut Route)) {
        let mut routes = self.0.lock();
        if let Some(route) = routes.get_mut(name) {
            return count(route);
        }
        if routes.len() < ROUTES {
            count(routes.entry(name.into()).or_default());
        }
    }

    /// Why requests of a route would have been refused, and how many.
    pub fn refusals(&self, route: &str) -> Vec<(&'static str, u64)> {
        let routes = self.0.lock();
        let Some(route) = routes.get(route) else { return Vec::new() };
        let counted = Reason::all().map(|reason| (reason.name(), route.refusals[reason as usize]));
        counted.filter(|(_, count)| *count > 0).collect()
    }

    /// Who sent no key to a route, most first; and how many requests were of others.
    pub fn unkeyed(&self, route: &str) -> (Vec<Unkeyed>, u64) {
        let routes = self.0.lock();
        let Some(route) = routes.get(route) else { return (Vec::new(), 0) };
        let shown = |(agent, requests): &(Box<str>, u64)| Unkeyed {
            user_agent: (!agent.is_empty()).then(|| agent.to_string()),
            requests: *requests,
        };
        let mut agents: Vec<Unkeyed> = route.agents.iter().map(shown).collect();
        agents.sort_by(|a, b| b.requests.cmp(&a.requests).then_with(|| a.user_agent.cmp(&b.user_agent)));
        (agents, route.others)
    }
}

impl Default for Route {
    fn default() -> Self {
        Self { refusals: [0; Reason::COUNT], agents: Vec::new(), others: 0 }
    }
}

impl Route {
    fn count(&mut self, agent: Option<&[u8]>) {
        let first = agent.unwrap_or_default().split(|byte| *byte == b' ').next().unwrap_or_default();
        let agent = String::from_utf8_lossy(&first[..first.len().min(LONGEST)]);
        if let Some((_, count)) = self.agents.iter_mut().find(|(known, _)| **known == *agent) {
            *count += 1;
            return;
        }
        if self.agents.len() == AGENTS {
            let rarest = self.agents.iter().enumerate().min_by_key(|(_, (_, count))| *count);
            let at = rarest.map(|(at, _)| at).expect("there are some");
            let (_, count) = self.agents.swap_remove(at);
            self.others += count;
        }
        self.agents.push((agent.into(), 1));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn told(report: &ShadowReport, route: &str, outcome: Outcome, agent: Option<&[u8]>) {
        report.answered(&Answered {
            route,
            method: "POST",
            path: "/",
            key: "",
            address: None,
            outcome,
            status: 100,
            attempt: None,
            took: Duration::ZERO,
            ran_for: Duration::ZERO,
            peer: None,
            request_id: "",
            user_agent: agent,
            parts: None,
        });
    }

    #[test]
    fn reasons_and_agents_are_counted_per_route() {
        let report = ShadowReport::default();
        for _ in 0..3 {
            told(&report, "a", Outcome::Shadow(Shadow::Refusal(Reason::KeyReused)), Some(b"x/1"));
            told(&report, "a", Outcome::Keyless, Some(b"Shop/3.2 (Linux)"));
        }
        told(&report, "a", Outcome::Keyless, None);
        told(&report, "a", Outcome::Shadow(Shadow::Refusal(Reason::KeyMissing)), Some(b"Shop/3.2 (Mac)"));
        told(&report, "b", Outcome::Executed, Some(b"x/1"));
        assert_eq!(report.refusals("a"), [("key-missing", 1), ("key-reused", 3)]);
        let shop = Unkeyed { user_agent: Some("Shop/3.2".into()), requests: 4 };
        assert_eq!(report.unkeyed("a"), (vec![shop, Unkeyed { user_agent: None, requests: 1 }], 0));
        assert_eq!((report.refusals("b"), report.unkeyed("b")), (Vec::new(), (Vec::new(), 0)));
    }

    #[test]
    fn a_flood_of_names_is_bounded_and_leaves_the_frequent_ones() {
        let report = ShadowReport::default();
        for nth in 0..10_000 {
            told(&report, "a", Outcome::Keyless, Some(format!("made-up-{nth}").as_bytes()));
            told(&report, "a", Outcome::Keyless, Some(b"genuine"));
        }
        let (agents, others) = report.unkeyed("a");
        assert_eq!((agents.len(), agents[0].user_agent.as_deref()), (AGENTS, Some("genuine")));
        assert_eq!(agents[0].requests, 10_000);
        assert_eq!(agents.iter().map(|agent| agent.requests).sum::<u64>() + others, 20_000, "nothing is lost");
        for nth in 0..2 * ROUTES {
            told(&report, &format!("route {nth}"), Outcome::Keyless, None);
        }
        assert_eq!(report.0.lock().len(), ROUTES);
    }
}
