//! Finds probable mistakes, and facts that a reader of the configuration should know.

use http::Method;
use ibid::{
    http::Protocol,
    policy::{OnConcurrent, PolicyMode},
    scope::ScopePart,
};

use ibid_tools::{
    describe,
    format::{format_duration, format_list, format_size},
};

use super::{GatewaySettings, JwtKeys, JwtSettings, is_webhook_preset};
use crate::routes::RouteEntry;

/// Minimum length of a token that cannot be guessed.
const MIN_TOKEN_BYTES: usize = 16;

pub(super) fn find_warnings(settings: &GatewaySettings, nobody_trusted: bool) -> Vec<String> {
    let routes: Vec<&RouteEntry> = settings.routes.iter().collect();
    let mut found = Vec::new();
    for (at, route) in routes.iter().enumerate() {
        let place = route_label(at, route);
        let warnings = route_warnings(settings, &routes, at, nobody_trusted);
        found.extend(warnings.into_iter().map(|what| format!("{place}: {what}")));
    }
    let covers_get = |path: &&String| {
        settings.routes.find(&Method::GET, path).is_some_and(|route| route.policy.covers(&Method::GET))
    };
    let covered = settings.openapi.iter().filter(covers_get);
    let has_calls = routes.iter().any(|route| route.protocol == Protocol::Grpc);
    let has_claims =
        routes.iter().any(|route| route.policy.mode != PolicyMode::Off && route.policy.claims().next().is_some());
    let is_unlimited =
        |jwt: &JwtSettings| has_claims && jwt.issuer.is_none() && !matches!(jwt.keys, JwtKeys::Secret(_));
    let sentences = [
        (routes.is_empty(), "policy: preset is \"off\" and there is no route, so nothing is covered"),
        (
            settings.descriptors.is_some() && !has_calls,
            "descriptors: no route uses it; write one such as match = \"grpc *\"",
        ),
        (
            settings.seal.as_ref().is_some_and(|seal| seal.rules.accept_plain),
            "seal.accept_plain: what is not sealed is believed, so whoever can write to the store can have anything \
             answered; switch it off once what was remembered in clear is resealed or has expired",
        ),
        (settings.jwt.is_some() && !has_claims, "jwt: no route uses it; write one with scope = [\"jwt:sub\"]"),
        (
            settings.jwt.as_ref().is_some_and(is_unlimited),
            "jwt: issuer is not set, so every token is believed that one of the keys has signed",
        ),
    ];
    let [empty, others @ ..] = sentences;
    found.extend(empty.0.then(|| empty.1.to_owned()));
    found.extend(covered.map(|path| format!("openapi: a route covers GET {path}, so it is not annotated")));
    found.extend(others.into_iter().filter(|(applies, _)| *applies).map(|(_, what)| what.to_owned()));
    if let Some(admin) = settings.admin.as_ref().filter(|admin| !admin.listen.ip().is_loopback()) {
        let reachable = format!("admin.listen: {} is reachable from other machines", admin.listen);
        if admin.tokens.is_empty() {
            found.push(format!("{reachable}, and no token is set"));
        }
        if admin.tls.is_none() {
            let what = "so tokens and answers can be read on the way; set [admin.tls]";
            found.push(format!("{reachable} without TLS, {what}"));
        }
    }
    if let Some(address) = settings.ext_proc.filter(|address| !address.ip().is_loopback()) {
        found.push(format!(
            "ext_proc.listen: {address} is reachable from other machines, and who can connect can name any caller; let \
             only Envoy connect"
        ));
    }
    let tokens = settings.admin.iter().flat_map(|admin| &admin.tokens);
    found.extend(tokens.filter(|token| token.token.expose().len() < MIN_TOKEN_BYTES).map(|token| {
        format!("{}: its token is shorter than {MIN_TOKEN_BYTES} characters, and may be guessed", token.name)
    }));
    found
}

fn route_warnings(settings: &GatewaySettings, routes: &[&RouteEntry], at: usize, nobody_trusted: bool) -> Vec<String> {
    let route = routes[at];
    let policy = &route.policy;
    let shadowing = shadowing_routes(&routes[..at], route).filter(|_| !route.is_default_policy);
    let mut found = Vec::from_iter(
        shadowing.map(|earlier| format!("never matches, because all its requests go to {earlier} before it")),
    );
    if policy.mode == PolicyMode::Off {
        return found;
    }
    found.extend(bare_path_warning(routes, route));
    if policy.lease > policy.ttl {
        let (lease, ttl) = (format_duration(policy.lease), format_duration(policy.ttl));
        found.push(format!("lease ({lease}) is longer than ttl ({ttl}), so a silent claim outlives its answer"));
    }
    // With a credential in the scope, a header is used as sent.
    let believes = nobody_trusted && !policy.scope.contains(&ScopePart::Credential);
    let part = policy.scope.iter().find_map(|part| Some((part, part.header()?)));
    if let Some((part, header)) = part.filter(|_| believes) {
        let is_optional = matches!(part, ScopePart::Optional(_));
        let (needs, with) = if is_optional { ("reads", " with it") } else { ("needs", "") };
        found.push(format!(
            "scope {needs} the header {header}, and trusted_proxies is empty: nobody is believed, every keyed \
             request{with} is refused (403)"
        ));
    }
    if is_webhook_preset(route.preset) && policy.signature.is_none() {
        let what = "unsigned: whoever knows the address can send deliveries, and use up the ids of genuine ones";
        found.push(what.into());
    }
    if policy.max_request > settings.buffer_memory {
        let (request, memory) = (format_size(policy.max_request), format_size(settings.buffer_memory));
        found.push(format!("max_request ({request}) is more than buffer_memory ({memory}), so the largest never fit"));
    }
    let largest = settings.store.store_config().authority().max_record_size();
    if let Some(most) = largest.filter(|most| policy.max_response > *most) {
        let (response, most) = (format_size(policy.max_response), format_size(most));
        let then = "larger answers are remembered as digests";
        found.push(format!("max_response ({response}) is more than the store can hold ({most}); {then}"));
    }
    if policy.on_concurrent == OnConcurrent::Wait && policy.wait_timeout.is_zero() {
        found.push("on_concurrent is \"wait\" and wait_timeout is zero, so nobody waits".into());
    }
    let safe = [Method::GET, Method::HEAD, Method::OPTIONS, Method::TRACE].into_iter();
    found.extend(
        safe.filter(|method| policy.covers(method))
            .map(|method| format!("{method} changes nothing by its definition; remembered answers of it grow stale")),
    );
    found
}

/// A route for `/a/*` is often meant to match `/a` too.
fn bare_path_warning(routes: &[&RouteEntry], route: &RouteEntry) -> Option<String> {
    let bare = route.pattern.bare().filter(|_| !route.is_default_policy)?;
    let methods = route.policy.methods.iter();
    let left = methods.filter(|method| {
        let takes = |other: &&&RouteEntry| other.policy.lists_method(method) && other.pattern.covers(&bare);
        !routes.iter().filter(|other| !other.is_default_policy).any(|other| takes(&other))
    });
    let left = left.map(Method::as_str).collect::<Vec<_>>().join("|");
    let has_policy = routes.iter().any(|route| route.is_default_policy);
    let what = if has_policy { "is under [policy]" } else { "is not covered" };
    (!left.is_empty()).then(|| format!("{left} {bare} itself is none of its paths and {what}; write a route for it"))
}

pub(super) fn find_notes(settings: &GatewaySettings) -> Vec<String> {
    let mut found = Vec::new();
    for (at, route) in settings.routes.iter().enumerate() {
        if route.policy.mode != PolicyMode::Off && route.policy.scope.contains(&ScopePart::Credential) {
            let headers = format_list(settings.credentials.headers().iter().map(describe::header));
            found.push(format!(
                "{}: scope has \"credential\": requests with none of {headers} share one anonymous scope",
                route_label(at, route)
            ));
        }
    }
    if settings.ext_proc.is_some() {
        found.push(
            "ext_proc: with failure_mode_allow: true, Envoy sends requests to the app unprotected whenever ibid does not \
             answer; set it to false"
                .into(),
        );
    }
    if settings.seal.as_ref().is_some_and(|seal| seal.plain_addresses) {
        let what = "seal.plain_addresses: who reads the store can try out callers and keys, one guess at a time";
        found.push(what.into());
    }
    found
}

/// `route[2] (POST /payments/*)`.
fn route_label(at: usize, route: &RouteEntry) -> String {
    if route.is_default_policy { "policy".into() } else { format!("route[{}] ({})", at + 1, route.name) }
}

/// Returns the earlier routes that together match all requests of a route.
fn shadowing_routes(earlier: &[&RouteEntry], route: &RouteEntry) -> Option<String> {
    let mut by: Vec<String> = Vec::new();
    for method in &route.policy.methods {
        let takes = |known: &&RouteEntry| {
            let known_calls = known.protocol == Protocol::Grpc && !known.pattern.is_single_method();
            let same = known.protocol == route.protocol || !known_calls;
            same && known.policy.lists_method(method) && known.pattern.covers(&route.pattern)
        };
        let at = earlier.iter().position(takes)?;
        let place = route_label(at, earlier[at]);
        if !by.contains(&place) {
            by.push(place);
        }
    }
    Some(by.join(" and "))
}
