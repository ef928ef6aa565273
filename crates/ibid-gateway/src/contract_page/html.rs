//! The contract as a self-contained HTML page, without scripts, in the reader's light or dark mode.

use askama::Template;
use ibid::{
    Policy, RefusalReason,
    http::Protocol,
    key::KeySource,
    policy::{PolicyMode, RefusalFormat},
};

use ibid_tools::describe::is_possible;

use super::{describe, grpc_methods, published_routes};
use crate::{
    format::{capitalize, duration_in_words, size_in_words},
    routes::{RouteEntry, RouteTable},
};

#[derive(Template)]
#[template(path = "contract.html")]
struct ContractPage<'a> {
    routes: Vec<RouteSection<'a>>,
}

struct RouteSection<'a> {
    route: &'a RouteEntry,
    /// Terms and their descriptions.
    rows: Vec<(&'static str, String)>,
}

/// The contract for people.
pub fn render_html(routes: &RouteTable) -> String {
    let section = |route| RouteSection { route, rows: rows(route, &grpc_methods(routes, route)) };
    ContractPage { routes: published_routes(routes).map(section).collect() }.render().expect("only text is written")
}

impl ContractPage<'_> {
    /// The statuses with which routes send a refusal; empty if none does.
    fn codes(&self, reason: &RefusalReason) -> Vec<String> {
        let mut codes = Vec::new();
        for section in self.routes.iter().filter(|section| section.can_refuse(*reason)) {
            let code = section.status(reason);
            if !codes.contains(&code) {
                codes.push(code);
            }
        }
        codes
    }
}

impl RouteSection<'_> {
    fn policy(&self) -> &Policy {
        &self.route.policy
    }

    fn methods(&self) -> Vec<&str> {
        match self.route.protocol {
            Protocol::Http => self.policy().methods.iter().map(http::Method::as_str).collect(),
            Protocol::Grpc => vec!["gRPC"],
        }
    }

    fn path(&self) -> String {
        match (self.route.protocol, self.route.is_default_policy) {
            (Protocol::Http, true) => self.route.title().into(),
            (Protocol::Http, false) => self.route.pattern.to_string(),
            (Protocol::Grpc, _) => self.route.pattern.to_string().trim_start_matches('/').to_owned(),
        }
    }

    fn can_refuse(&self, reason: RefusalReason) -> bool {
        is_possible(self.policy(), self.route.has_quota, reason)
    }

    fn refusals(&self) -> Vec<RefusalReason> {
        RefusalReason::all().filter(|reason| self.can_refuse(*reason)).collect()
    }

    fn status(&self, reason: &RefusalReason) -> String {
        describe::refusal_status(self.route, *reason)
    }
}

fn rows(route: &RouteEntry, calls: &[&str]) -> Vec<(&'static str, String)> {
    let policy = &route.policy;
    let from: Vec<String> = policy.key.from.iter().map(describe::key_source).collect();
    let mut rows = vec![("Key", capitalize(&from.join(", else ")))];
    if policy.key.from.iter().any(|source| *source != KeySource::Body) {
        let (format, longest) = (describe::key_format(&policy.key.format), policy.key.max_length);
        rows.push(("Form", capitalize(&format!("{format}; at most {longest} characters"))));
    }
    rows.extend(policy.signature.as_ref().map(|signature| ("Signed", capitalize(&describe::signature(signature)))));
    rows.push(("Whose key", capitalize(&describe::scope(&policy.scope))));
    rows.push(("A retry has the same", capitalize(&describe::fingerprint(policy))));
    if route.protocol == Protocol::Grpc && !route.pattern.is_single_method() {
        let calls: Vec<&str> = calls.iter().map(|path| path.trim_start_matches('/')).collect();
        rows.push(("Methods", calls.join(", ")));
    }
    let (request, response) = (size_in_words(policy.max_request), size_in_words(policy.max_response));
    rows.extend([
        ("Remembered", capitalize(&describe::remembered(route))),
        ("Remembered for", duration_in_words(policy.ttl)),
        ("Same key, other request", capitalize(describe::mismatch(policy))),
        ("Still running", capitalize(&describe::concurrent(policy))),
        ("Outcome unknown", capitalize(describe::unknown(policy))),
        ("Sizes", format!("Requests up to {request}, answers up to {response} in full")),
    ]);
    let replay = policy.replay_headers.iter();
    let replay = replay.map(|(name, value)| format!("{}: {}", describe::header(name), describe::header_value(value)));
    let replay: Vec<String> = replay.collect();
    if !replay.is_empty() {
        rows.push(("A replay says", replay.join(", ")));
    }
    if policy.refusals != RefusalFormat::Problem {
        rows.push(("Shape of refusals", format!("{} ({})", policy.refusals, policy.refusals.media_type())));
    }
    rows
}

mod filters {
    #![allow(unreachable_pub, reason = "the macro makes public items")]

    use std::fmt::Display;

    use askama::{Result, Values, filter_fn, filters::Safe};

    /// Escapes with named entities, which people who read the source understand.
    #[filter_fn]
    pub(crate) fn text(text: impl Display, _: &dyn Values) -> Result<Safe<String>> {
        let text = text.to_string().replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        Ok(Safe(text.replace('"', "&quot;").replace('\'', "&#39;")))
    }
}
