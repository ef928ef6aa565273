//! The published contract of every route, `GET /.well-known/idempotency`, as JSON and as a page for people.
//!
//! The `type` of every refusal points to its section of this page. The contract contains what clients need, and nothing
//! about the upstream, the store or the operators' labels.

use askama::Template;
use ibid::{
    RefusalReason,
    grpc::GrpcStatusCode,
    http::Protocol,
    key::KeySource,
    policy::{PolicyMode, RefusalFormat},
};
use ibid_tools::describe::is_possible;
use serde_json::{Value, json};

use crate::{
    format::{capitalize, duration_in_words, size_in_words},
    routes::{RouteEntry, RouteTable},
};

pub(crate) mod describe;

pub const CONTRACT_PATH: &str = "/.well-known/idempotency";

pub fn json(routes: &RouteTable) -> Value {
    json!({
        "contract": CONTRACT_PATH,
        "routes": published_routes(routes).map(|found| route_json(found, &grpc_methods(routes, found))).collect::<Vec<_>>(),
        "refusals": RefusalReason::all().map(|reason| {
            let mut refusal = refusal_json(reason, "status", reason.status().as_u16().into());
            refusal["grpc_status"] = GrpcStatusCode::from_number(reason.grpc_status().into()).name().into();
            refusal
        }).collect::<Vec<_>>(),
    })
}

fn refusal_json(reason: RefusalReason, member: &str, status: Value) -> Value {
    json!({
        "name": reason.name(),
        "type": format!("{CONTRACT_PATH}#{}", reason.name()),
        member: status,
        "title": reason.title(),
        "help": reason.help(),
    })
}

/// Leaves out routes that are off.
fn published_routes(routes: &RouteTable) -> impl Iterator<Item = &RouteEntry> {
    routes.iter().filter(|route| route.policy.mode != PolicyMode::Off)
}

fn grpc_methods<'a>(routes: &'a RouteTable, route: &RouteEntry) -> Vec<&'a str> {
    if route.protocol != Protocol::Grpc {
        return Vec::new();
    }
    let is_its_own = |path: &&str| routes.find_call(path).is_some_and(|found| found.name == route.name);
    routes.calls().into_iter().filter(is_its_own).collect()
}

fn route_json(route: &RouteEntry, calls: &[&str]) -> Value {
    let policy = &route.policy;
    let headers = |headers: &[(http::HeaderName, ibid::policy::HeaderTemplate)]| {
        let headers = headers.iter().map(|(name, value)| (describe::header(name), Value::from(value.to_string())));
        Value::Object(headers.collect())
    };
    let is_call = route.protocol == Protocol::Grpc;
    let protocol = match route.protocol {
        Protocol::Http => "http",
        Protocol::Grpc => "grpc",
        Protocol::JsonRpc => "json-rpc",
    };
    let refusal = |reason: RefusalReason| match route.protocol {
        Protocol::Grpc => refusal_json(reason, "grpc_status", describe::refusal_status(route, reason).into()),
        Protocol::Http => refusal_json(reason, "status", policy.status_of(reason).as_u16().into()),
        Protocol::JsonRpc => refusal_json(reason, "code", reason.json_rpc_code().into()),
    };
    let mut contract = json!({
        "match": route.name,
        "protocol": protocol,
        "methods": policy.methods.iter().map(http::Method::as_str).collect::<Vec<_>>(),
        "path": route.pattern.to_string(),
        "enforced": policy.mode == PolicyMode::Enforce,
        "key": {
            "from": policy.key.from.iter().map(describe::key_source_code).collect::<Vec<_>>(),
            "required": policy.key.required,
            "format": policy.key.format.to_string(),
            "format_in_words": describe::key_format(&policy.key.format),
            "max_length": policy.key.max_length,
        },
        "signature": policy.signature.as_ref().map(|signature| json!({
            "scheme": signature.scheme.name(),
            "in_words": describe::signature(signature),
            "headers": signature.scheme.headers().iter().map(describe::header).collect::<Vec<_>>(),
            "tolerance_seconds": signature.scheme.has_timestamp().then_some(signature.tolerance.as_secs()),
        })),
        "scope": describe::scope(&policy.scope),
        "same_request": describe::fingerprint(policy),
        "ttl_seconds": policy.ttl.as_secs(),
        "remembered": policy.remember.to_string(),
        "remembered_in_words": describe::remembered(route),
        "body_remembered": policy.remember_body,
        "max_request_bytes": policy.max_request,
        "max_response_bytes": policy.max_response,
        "timeout_seconds": policy.timeout.as_secs_f64(),
        "on_mismatch": policy.on_mismatch.to_string(),
        "on_concurrent": policy.on_concurrent.to_string(),
        "wait_timeout_seconds": policy.wait_timeout.as_secs_f64(),
        "late_answer_seconds": policy.late_answer_or_lease().as_secs_f64(),
        "on_unknown": policy.on_unknown.to_string(),
        "on_store_down": policy.on_store_down.to_string(),
        "first_headers": headers(&policy.first_headers),
        "replay_headers": headers(&policy.replay_headers),
        "refusal_shape": policy.refusals.to_string(),
        "refusals": RefusalReason::all().filter(|reason| is_possible(policy, route.has_quota, *reason)).map(refusal).collect::<Vec<_>>(),
    });
    if is_call {
        contract["calls"] = calls.iter().map(|path| path.trim_start_matches('/')).collect();
    }
    contract
}

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
    fn methods(&self) -> Vec<&str> {
        match self.route.protocol {
            Protocol::Http | Protocol::JsonRpc => self.route.policy.methods.iter().map(http::Method::as_str).collect(),
            Protocol::Grpc => vec!["gRPC"],
        }
    }

    fn path(&self) -> String {
        match (self.route.protocol, self.route.is_default_policy) {
            (Protocol::Http | Protocol::JsonRpc, true) => self.route.title().into(),
            (Protocol::Http | Protocol::JsonRpc, false) => self.route.pattern.to_string(),
            (Protocol::Grpc, _) => self.route.pattern.to_string().trim_start_matches('/').to_owned(),
        }
    }

    fn can_refuse(&self, reason: RefusalReason) -> bool {
        is_possible(&self.route.policy, self.route.has_quota, reason)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Env, GatewaySettings, ServeArgs};

    fn routes(text: &str) -> RouteTable {
        let text = format!("upstream = \"http://10.9.8.7:3000\"\n{text}");
        GatewaySettings::from_text(&text, None, &ServeArgs::default(), &Env::from_pairs(&[])).unwrap().routes
    }

    #[test]
    fn the_json_says_what_a_client_needs() {
        let routes = routes(
            "[policy]\npreset = \"off\"\n[[route]]\nmatch = \"POST /pay/*\"\npreset = \"stripe\"\nttl = \"72h\"\nkey.required = true\n\
             status.in_progress = 425\n[[route]]\nmatch = \"POST /off\"\nmode = \"off\"",
        );
        let page = json(&routes);
        assert_eq!(page["routes"].as_array().unwrap().len(), 1);
        let route = &page["routes"][0];
        assert_eq!(route["match"], "POST /pay/*");
        assert_eq!(route["path"], "/pay/*");
        assert_eq!(route["ttl_seconds"], 72 * 3600);
        assert_eq!(route["key"]["from"][0], "header:Idempotency-Key");
        assert_eq!(route["key"]["required"], true);
        assert_eq!(route["replay_headers"]["Idempotent-Replayed"], "true");
        let status = |name: &str| {
            let refusals = route["refusals"].as_array().unwrap();
            refusals.iter().find(|refusal| refusal["name"] == name).map(|refusal| refusal["status"].clone())
        };
        assert_eq!(status("in-progress"), Some(425.into()));
        assert_eq!(status("key-reused"), Some(400.into()));
        assert_eq!(status("key-missing"), Some(400.into()));
        assert_eq!(status("quota-exceeded"), None);
        let limited = json(&self::routes("[quota]\nrate = \"1/s\""));
        let names = limited["routes"][0]["refusals"].as_array().unwrap().iter().map(|refusal| &refusal["name"]);
        assert!(names.into_iter().any(|name| name == "quota-exceeded"));
        assert_eq!(status("scope-refused"), None);
        assert_eq!(page["refusals"].as_array().unwrap().len(), RefusalReason::all().count());
    }

    #[test]
    fn every_preset_has_a_page_and_every_refusal_its_place_on_it() {
        for preset in ibid::presets::PRESET_NAMES {
            let routes = routes(&format!("[policy]\npreset = {preset:?}"));
            let page = render_html(&routes);
            for reason in RefusalReason::all() {
                assert_eq!(page.matches(&format!("id=\"{}\"", reason.name())).count(), 1, "{preset} {reason}");
            }
            assert!(!page.contains("<script"));
            assert!(!page.contains("10.9.8.7"), "the upstream is nobody's business");
            assert_eq!(json(&routes)["routes"].as_array().unwrap().len(), 1);
        }
    }

    #[test]
    fn what_came_from_the_file_is_escaped() {
        let routes = routes(
            "[[route]]\nmatch = \"POST /<em2>&'\"\nkey.format = \"regex:<i>&\\\"\"\nkey.from = \"query:<u>\"\n\
             scope = \"cookie:<s>\"\nreplay_headers = { X-A = \"<q>\" }",
        );
        let page = render_html(&routes);
        for tag in ["<em2>", "<i>", "<u>", "<s>", "<q>"] {
            assert!(!page.contains(tag), "{tag}");
        }
        assert!(page.contains("/&lt;em2&gt;&amp;&#39;"));
    }
}
