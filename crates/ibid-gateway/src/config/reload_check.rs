//! Finds the remembered answers that a changed configuration would no longer find.
//!
//! A request that was answered under the old routes must find its answer under the new ones; otherwise a retry executes
//! again. So for every old route and method, this compares every new route that now handles some of its requests.

use http::Method;
use ibid::{
    Policy,
    http::Protocol,
    key::KeyFormat,
    policy::{IntentGuard, OnMismatch, PolicyMode},
    scope::ScopePart,
};

use ibid_tools::format::format_duration;

use super::{GatewaySettings, SealSettings};
use crate::routes::RouteEntry;

/// The handler of an old route's requests in the new configuration.
enum Successor<'a> {
    /// This route handles some or all of them.
    Route(&'a RouteEntry),
    /// Routes handle some of them, and none handles the rest.
    Partial,
    /// No route handles any.
    Uncovered,
}

/// Returns one sentence per group of answers that the change from `old` to `new` forgets. A reload that forgets answers
/// is rejected unless `accept_forgetting` is set.
pub fn forgotten_answers(old: &GatewaySettings, new: &GatewaySettings) -> Vec<String> {
    let mut found = Vec::new();
    // Compares URLs without the password: a new password leads to the same records. A cache has no records of its own.
    let (from, to) = (old.store.authority_url().to_string(), new.store.authority_url().to_string());
    if from != to {
        let one = old.store.fallback.is_none() && new.store.fallback.is_none();
        let what = if one { "store.url" } else { "the store that decides" };
        found.push(format!("{what} changed from {from} to {to}: what the old store remembers will not be found again"));
    } else if old.store.prefix != new.store.prefix {
        let (from, to) = (&old.store.prefix, &new.store.prefix);
        found.push(format!(
            "store.prefix changed from {from:?} to {to:?}: nothing that is remembered will be found again"
        ));
    }
    found.extend(SealSettings::forgotten_answers(old.seal.as_ref(), new.seal.as_ref()));
    for_each_successor(old, new, |route, what, successor| match successor {
        Successor::Route(successor) => {
            policy_changes(route, successor).into_iter().for_each(|change| push_unique(&mut found, change));
            if route.policy.scope.contains(&ScopePart::Credential) {
                push_credential_change(&mut found, old, new);
            }
        }
        Successor::Partial | Successor::Uncovered => {
            let on_all = if matches!(successor, Successor::Partial) { " on all its paths" } else { "" };
            push_unique(&mut found, format!("{}: {what} is no longer covered{on_all}: {RUNS_AGAIN}", route.title()));
        }
    });
    found
}

/// Returns one sentence per group of answers whose ttl becomes shorter, and per intent guard that forgets. A reload may
/// do this, because the addresses of answers stay.
pub fn shortened_memory(old: &GatewaySettings, new: &GatewaySettings) -> Vec<String> {
    let mut found = Vec::new();
    for_each_successor(old, new, |route, _, successor| {
        let Successor::Route(successor) = successor else { return };
        if successor.policy.ttl < route.policy.ttl {
            let (from, to) = (format_duration(route.policy.ttl), format_duration(successor.policy.ttl));
            let what = format!("ttl shortened from {from} to {to}: answers will be forgotten sooner");
            push_unique(&mut found, format!("{}: {what}", rename_title(route, successor)));
        }
        let Some(guard) = &route.policy.guard else { return };
        let fields = |guard: &IntentGuard| bracketed_list(&guard.fields);
        let (from, to) = (fields(guard), successor.policy.guard.as_ref().map_or("none".into(), fields));
        if from != to {
            let what = "operations of the last window will not be recognised under another key";
            let what = format!("guard.fields changed from {from} to {to}: {what}");
            push_unique(&mut found, format!("{}: {what}", rename_title(route, successor)));
        }
    });
    found
}

/// A header that is a credential in only one configuration changes the address of the requests that carry it.
fn push_credential_change(found: &mut Vec<String>, old: &GatewaySettings, new: &GatewaySettings) {
    let (from, to) = (old.credentials.headers(), new.credentials.headers());
    if from != to {
        let (from, to) = (bracketed_list(from), bracketed_list(to));
        let what = "answers to callers with these headers will not be found again";
        push_unique(found, format!("credentials changed from {from} to {to}: {what}"));
    }
}

const RUNS_AGAIN: &str = "retries of remembered requests will run again";

fn push_unique(found: &mut Vec<String>, sentence: String) {
    if !found.contains(&sentence) {
        found.push(sentence);
    }
}

/// For every old route and method, visits every new route that handles some of its requests, and the unhandled rest.
fn for_each_successor<'a>(
    old: &'a GatewaySettings, new: &'a GatewaySettings, mut visit: impl FnMut(&'a RouteEntry, &str, Successor<'a>),
) {
    // gRPC methods are known individually.
    for path in old.routes.calls() {
        let route = old.routes.find_call(path).expect("it covers this call");
        if route.policy.mode == PolicyMode::Enforce {
            let successor = new.routes.find_call(path).map_or(Successor::Uncovered, Successor::Route);
            visit(route, path.trim_start_matches('/'), successor);
        }
    }
    for (at, route) in old.routes.iter().enumerate() {
        if route.policy.mode != PolicyMode::Enforce || route.protocol == Protocol::Grpc {
            continue;
        }
        for method in &route.policy.methods {
            // An earlier old route handled these requests, so they never belonged to this one.
            let elsewhere = |successor: &RouteEntry| {
                let mut earlier = old.routes.iter().take(at);
                earlier.any(|earlier| covers_method(earlier, method) && earlier.pattern.covers(&successor.pattern))
            };
            let (mut covered, mut some) = (false, false);
            for successor in new.routes.iter().filter(|route| covers_method(route, method)) {
                if successor.pattern.overlaps(&route.pattern) && !elsewhere(successor) {
                    visit(route, method.as_str(), Successor::Route(successor));
                    some = true;
                }
                if successor.pattern.covers(&route.pattern) {
                    covered = true;
                    break;
                }
            }
            if !covered {
                visit(route, method.as_str(), if some { Successor::Partial } else { Successor::Uncovered });
            }
        }
    }
}

fn covers_method(route: &RouteEntry, method: &Method) -> bool {
    route.protocol != Protocol::Grpc && route.policy.methods.contains(method)
}

/// `POST /a`, or `POST /a (now POST|PUT /a)`.
fn rename_title(route: &RouteEntry, successor: &RouteEntry) -> String {
    if route.name == successor.name {
        return route.title().to_owned();
    }
    format!("{} (now {})", route.title(), successor.title())
}

/// Describes the differences between two routes that make answers unreachable: [`Policy::has_same_records_as`], dial by
/// dial.
fn policy_changes(old: &RouteEntry, new: &RouteEntry) -> Vec<String> {
    let name = rename_title(old, new);
    let (from, to) = (&old.policy, &new.policy);
    let lost = "remembered answers of this route will not be found again";
    let mismatch = "remembered requests of this route will not be recognised again";
    let mut found = Vec::new();
    let mut compare = |dial: &str, from: String, to: String, what: &str| {
        if from != to {
            found.push(format!("{name}: {dial} changed from {from} to {to}: {what}"));
        }
    };
    let reads = |policy: &Policy| match &policy.key.format {
        KeyFormat::Raw => "with their quotes",
        format if format.folds_case() => "lower-cased",
        _ => "as sent",
    };
    let apart = |policy: &Policy| policy.on_mismatch == OnMismatch::New;
    compare("key.from", bracketed_list(&from.key.from), bracketed_list(&to.key.from), lost);
    if reads(from) != reads(to) {
        let format = |policy: &Policy| format!("{} (keys {})", policy.key.format, reads(policy));
        compare("key.format", format(from), format(to), lost);
    }
    compare("scope", bracketed_list(&from.scope), bracketed_list(&to.scope), lost);
    compare("fingerprint", bracketed_list(&from.fingerprint), bracketed_list(&to.fingerprint), mismatch);
    let messages = |policy: &Policy| if policy.tools.is_some() { "calls of tools" } else { "requests" }.to_owned();
    compare("what is compared", messages(from), messages(to), mismatch);
    compare("json_ignore", bracketed_list(&from.json_ignore), bracketed_list(&to.json_ignore), mismatch);
    compare("json_numbers", from.json_numbers.to_string(), to.json_numbers.to_string(), mismatch);
    if apart(from) != apart(to) {
        compare("on_mismatch", from.on_mismatch.to_string(), to.on_mismatch.to_string(), lost);
    }
    if to.mode != PolicyMode::Enforce {
        compare("mode", from.mode.to_string(), to.mode.to_string(), RUNS_AGAIN);
    }
    if from.scope == to.scope && from.scope.contains(&ScopePart::Route) {
        let what = "it is part of scope, so remembered answers will not be found again";
        compare("match", format!("{:?}", old.name), format!("{:?}", new.name), what);
    }
    found
}

fn bracketed_list<T: std::fmt::Display>(items: &[T]) -> String {
    let items: Vec<String> = items.iter().map(ToString::to_string).collect();
    format!("[{}]", items.join(", "))
}
