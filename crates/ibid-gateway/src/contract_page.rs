//! The published contract of every route, `GET /.well-known/idempotency`, as JSON and as a page for people.
//!
//! The `type` of every refusal points to its section of this page. The contract contains what clients need, and nothing
//! about the upstream, the store or the operators' labels.

use ibid::{RefusalReason, grpc::GrpcStatusCode, http::Protocol, policy::PolicyMode};
use ibid_tools::describe::is_possible;
use serde_json::{Value, json};

use crate::routes::{RouteEntry, RouteTable};

pub(crate) mod describe;
mod html;

pub use html::render_html;

pub const CONTRACT_PATH: &str = "/.well-known/idempotency";

/// The contract for programs.
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

/// The gRPC methods that a route covers.
fn grpc_methods<'a>(routes: &'a RouteTable, route: &RouteEntry) -> Vec<&'a str> {
    if route.protocol == Protocol::Http {
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
    let refusal = |reason: RefusalReason| match is_call {
        true => refusal_json(reason, "grpc_status", describe::refusal_status(route, reason).into()),
        false => refusal_json(reason, "status", policy.status_of(reason).as_u16().into()),
    };
    let mut contract = json!({
        "match": route.name,
        "protocol": if is_call { "grpc" } else { "http" },
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
