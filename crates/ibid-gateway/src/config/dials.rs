//! Turns the dials of a file into policies and routes, and shows the dials of a route to people.
//!
//! Invariant: a route with a webhook preset has a signature scheme and secrets, or `unsigned = true`.

use ibid::{
    Policy, RefusalReason,
    grpc::UnaryMethods,
    http::Protocol,
    webhook::{CustomWebhookScheme, DEFAULT_TOLERANCE, WebhookScheme, WebhookVerifier},
};
use ibid_tools::describe;

use super::{
    env::ValueResolver,
    error::ConfigError,
    raw::{RawDials, RawSignature},
    secret::Secret,
    values::PRESET_OFF,
};
use crate::routes::{Match, RouteEntry, RouteTable};

const DEFAULT_PRESET: &str = "ietf";

/// Builds all routes. An error is kept in `lookup`, and its route left out.
pub(super) fn build_route_table(
    policy: Option<&RawDials>, routes: &[RawDials], unary: Option<&UnaryMethods>, lookup: &ValueResolver<'_>,
) -> RouteTable {
    let default = policy.map(build_default_policy).transpose();
    let Some(default) = lookup.collect(default) else { return RouteTable::new(Vec::new()) };
    let writes_key = policy.is_some_and(|dials| dials.key.from.is_some());
    let mut finished: Vec<RouteEntry> = Vec::with_capacity(routes.len());
    for (at, dials) in routes.iter().enumerate() {
        let place = format!("route[{}]", at + 1);
        let Some(matches) = &dials.route_match else {
            let what = "missing; write METHOD[|METHOD] PATTERN, such as \"POST /payments/*\"";
            lookup.collect(Err::<(), _>(ConfigError::at(format!("{place}.match"), what)));
            continue;
        };
        let is_same = |earlier: &RawDials| earlier.route_match.as_ref().is_some_and(|it| is_same_match(it, matches));
        if let Some(earlier) = routes[..at].iter().position(is_same) {
            let what = format!("{:?} is the match of route[{}] already", matches.to_string(), earlier + 1);
            lookup.collect(Err::<(), _>(ConfigError::at(format!("{place}.match"), what)));
            continue;
        }
        finished.extend(lookup.collect(build_route(dials, matches, default.as_ref(), unary, writes_key, &place)));
    }
    if policy.and_then(|dials| dials.preset) != Some(PRESET_OFF) {
        let default = default.unwrap_or_else(|| (preset_policy(DEFAULT_PRESET), DEFAULT_PRESET, None));
        let is_beside_routes = !routes.is_empty();
        let rest = lookup.collect(policy_routes(default, unary, writes_key)).unwrap_or_default();
        finished.extend(rest.into_iter().map(|route| RouteEntry { is_fallback_policy: is_beside_routes, ..route }));
    }
    RouteTable::new(finished).with_unary_methods(unary.cloned().unwrap_or_default())
}

/// The policy of `[policy]`, its preset and its upstream.
type DefaultPolicy = (Policy, &'static str, Option<String>);

fn build_default_policy(dials: &RawDials) -> Result<DefaultPolicy, ConfigError> {
    if dials.route_match.is_some() {
        return Err(ConfigError::at("policy.match", "only a [[route]] has a match"));
    }
    let preset = dials.preset.filter(|preset| *preset != PRESET_OFF).unwrap_or(DEFAULT_PRESET);
    let mut policy = preset_policy(preset);
    dials.apply_to(&mut policy);
    apply_webhook_dials(dials, preset, false, &mut policy, "policy")?;
    check_tool_dials(dials, preset, "policy")?;
    check_policy(&policy, Protocol::Http, "policy")?;
    Ok((policy, preset, dials.upstream.as_ref().map(|upstream| upstream.0.clone())))
}

fn build_route(
    dials: &RawDials, matches: &Match, default: Option<&DefaultPolicy>, unary: Option<&UnaryMethods>,
    policy_writes_key: bool, place: &str,
) -> Result<RouteEntry, ConfigError> {
    let wrong = |name: &str, what: &str| ConfigError::at(format!("{place}.{name}"), what);
    if dials.methods.is_some() {
        return Err(wrong("methods", "the methods of a route are those in its match; leave methods out"));
    }
    if dials.preset == Some(PRESET_OFF) {
        let what = "only [policy] has the preset \"off\"; a route is switched off by mode = \"off\"";
        return Err(wrong("preset", what));
    }
    let (mut policy, preset, via_policy, upstream) = match (dials.preset, default) {
        (None, Some((policy, preset, upstream))) => (policy.clone(), *preset, true, upstream.clone()),
        (preset, _) => {
            let preset = preset.unwrap_or(DEFAULT_PRESET);
            (preset_policy(preset), preset, false, None)
        }
    };
    dials.apply_to(&mut policy);
    apply_webhook_dials(dials, preset, via_policy, &mut policy, place)?;
    check_tool_dials(dials, preset, place)?;
    if matches.protocol == Protocol::Grpc {
        if is_webhook_preset(preset) {
            let what = "is for deliveries over HTTP, not for gRPC; write a route such as \"POST /hooks\"";
            return Err(wrong("preset", &format!("{preset:?} {what}")));
        }
        if policy.tools.is_some() {
            let what = "is for JSON-RPC over HTTP, not for gRPC; write a route such as \"POST /mcp\"";
            return Err(wrong("preset", &format!("{preset:?} {what}")));
        }
        check_unary(matches, unary).map_err(|what| wrong("match", &what))?;
        policy = adapt_for_grpc(policy, dials.key.from.is_some() || via_policy && policy_writes_key);
        if dials.guard.is_none() {
            policy.guard = None;
        }
    }
    policy.methods = matches.methods.clone();
    check_policy(&policy, matches.protocol, place)?;
    let upstream = dials.upstream.as_ref().map(|upstream| upstream.0.clone()).or(upstream);
    Ok(RouteEntry { upstream, inherits_policy: via_policy, ..RouteEntry::new(matches, policy, preset) })
}

/// The routes of `[policy]`, for requests that no route names.
fn policy_routes(
    (policy, preset, upstream): DefaultPolicy, unary: Option<&UnaryMethods>, writes_key: bool,
) -> Result<Vec<RouteEntry>, ConfigError> {
    let mut all = vec![RouteEntry { upstream: upstream.clone(), ..RouteEntry::for_all_paths(policy.clone(), preset) }];
    // Webhook deliveries and JSON-RPC messages are not gRPC calls.
    if unary.is_some() && !is_webhook_preset(preset) && policy.tools.is_none() {
        let mut policy = adapt_for_grpc(policy, writes_key);
        policy.guard = None;
        check_policy(&policy, Protocol::Grpc, "policy")?;
        all.push(RouteEntry { upstream, ..RouteEntry::for_all_calls(policy, preset) });
    }
    Ok(all)
}

/// Adapts a policy to gRPC calls. Leaves the source of the key as it is if the file sets it.
fn adapt_for_grpc(policy: Policy, writes_key: bool) -> Policy {
    let from = policy.key.from.clone();
    let mut policy = policy.for_grpc();
    if writes_key {
        policy.key.from = from;
    }
    policy
}

/// Rejects a gRPC route unless its methods can be unary by the descriptors. A streaming call must never be buffered.
fn check_unary(matches: &Match, unary: Option<&UnaryMethods>) -> Result<(), String> {
    let (pattern, text) = (&matches.pattern, matches.to_string());
    let Some(unary) = unary else {
        return if pattern.is_single_method() {
            Ok(())
        } else {
            Err(format!(
                "{text:?} does not say which methods are unary; name them one by one, or name a file of descriptors \
                 at the top: descriptors = \"FILE\", or \"reflection\" to ask the upstream"
            ))
        };
    };
    // The upstreams have not been queried yet.
    if unary.is_empty() {
        return Ok(());
    }
    let Some(service) = pattern.service() else { return Ok(()) };
    let mut methods = unary.known_in_service(service).peekable();
    match (methods.peek().is_some(), pattern.is_single_method()) {
        (true, true) if unary.is_streaming(&pattern.text) => {
            Err(format!("{text:?} is a streaming method by the descriptors; only unary ones can be covered"))
        }
        (true, true) if methods.any(|path| path == pattern.text) => Ok(()),
        (true, true) => {
            let all: Vec<&str> = unary.known_in_service(service).filter_map(|path| path.rsplit('/').next()).collect();
            Err(format!("{text:?} is not in the descriptors; {service} has {}", all.join(", ")))
        }
        (true, false) if unary.covered_in_service(service).next().is_some() => Ok(()),
        (true, false) => Err(format!("{text:?} covers nothing: {service} has no unary method in the descriptors")),
        // A route that names a method of an undescribed service declares it unary.
        (false, true) => Ok(()),
        (false, false) => Err(format!("{text:?}: the descriptors have no service {service}")),
    }
}

fn preset_policy(preset: &str) -> Policy {
    Policy::preset(preset).expect("checked when it was read")
}

/// Whether two matches are equal, ignoring the order of their methods.
fn is_same_match(one: &Match, two: &Match) -> bool {
    let within = |a: &Match, b: &Match| a.methods.iter().all(|method| b.methods.contains(method));
    one.protocol == two.protocol && one.pattern == two.pattern && within(one, two) && within(two, one)
}

fn check_policy(policy: &Policy, protocol: Protocol, place: &str) -> Result<(), ConfigError> {
    let checked = match protocol {
        Protocol::Http | Protocol::JsonRpc => policy.check(),
        Protocol::Grpc => policy.check_grpc(),
    };
    checked.map_err(|invalid| ConfigError::at(format!("{place}.{}", invalid.setting()), invalid.message()))
}

impl RawDials {
    /// Applies every dial that is set. A list replaces a list; a table of headers replaces a table of headers.
    fn apply_to(&self, policy: &mut Policy) {
        macro_rules! apply {
            ($($($dial:ident).+),+ $(,)?) => {$(
                if let Some(value) = self.$($dial).+.clone() {
                    policy.$($dial).+ = value.into();
                }
            )+};
        }
        apply! {
            methods, key.from, key.required, key.format, key.max_length, scope, label.tenant, label.user, label.key,
            fingerprint, json_ignore, json_numbers, on_mismatch, on_concurrent, on_unknown, resolve, on_store_down, remember,
            refusals, unknown_status, remember_body, max_request, max_response, digest_status, ttl, lease, timeout,
            wait_timeout, late_answer, first_headers, replay_headers, drop_headers, envelope, guard, tools,
            remember_tool_errors, mode,
        }
        for (reason, status) in &self.status.0 {
            set_for_reason(&mut policy.status, *reason, status.0);
        }
        for (reason, code) in &self.grpc_status.0 {
            set_for_reason(&mut policy.grpc_status, *reason, code.0);
        }
    }
}

fn set_for_reason<T>(values: &mut Vec<(RefusalReason, T)>, reason: RefusalReason, value: T) {
    values.retain(|(known, _)| *known != reason);
    values.push((reason, value));
}

pub(crate) struct Dial {
    pub(crate) name: &'static str,
    pub(crate) value: String,
    /// Whether the value differs from the preset's.
    pub(crate) overridden: bool,
}

/// All dials of a route, in the order of the guide's table.
pub(crate) fn route_dials(route: &RouteEntry) -> Vec<Dial> {
    let mut preset = Policy::preset(route.preset).expect("routes start from presets");
    if route.protocol == Protocol::Grpc {
        preset = preset.for_grpc();
    } else if !route.is_default_policy {
        // A route's methods always come from its match.
        preset.methods.clone_from(&route.policy.methods);
    }
    let both = describe::dial_values(&route.policy).into_iter().zip(describe::dial_values(&preset));
    let dials = both.map(|((name, value), (_, usual))| Dial { name, overridden: value != usual, value });
    let signature = is_webhook_preset(route.preset).then(|| describe::signature(&route.policy)).into_iter().flatten();
    dials.chain(signature.map(|(name, value, overridden)| Dial { name, value, overridden })).collect()
}

pub(crate) fn is_webhook_preset(preset: &str) -> bool {
    ibid::presets::WEBHOOK_PRESET_NAMES.contains(&preset)
}

/// Rejects the dials that only routes for agents have on all others.
fn check_tool_dials(dials: &RawDials, preset: &str, place: &str) -> Result<(), ConfigError> {
    let written = [("tools", dials.tools.is_some()), ("remember_tool_errors", dials.remember_tool_errors.is_some())];
    match written.iter().find(|(_, is_written)| *is_written) {
        Some((name, _)) if !ibid::presets::AGENT_PRESET_NAMES.contains(&preset) => {
            let what = format!("only the preset \"mcp\" has it, and this one is {preset:?}");
            Err(ConfigError::at(format!("{place}.{name}"), what))
        }
        _ => Ok(()),
    }
}

/// Applies the dials that only webhook routes have. `inherits`: `policy` is the finished `[policy]`. `place` is the
/// path of the dials, such as `route[2]`.
pub(super) fn apply_webhook_dials(
    dials: &RawDials, preset: &str, inherits: bool, policy: &mut Policy, place: &str,
) -> Result<(), ConfigError> {
    let wrong = |name: &str, what: String| ConfigError::at(format!("{place}.{name}"), what);
    let written = [
        ("secrets", dials.secrets.is_some()),
        ("unsigned", dials.unsigned.is_some()),
        ("tolerance", dials.tolerance.is_some()),
        ("signature", dials.signature.is_some()),
    ];
    let written =
        |allowed: &str| written.iter().find(|(name, there)| *there && *name != allowed).map(|(name, _)| *name);
    if !is_webhook_preset(preset) {
        let what = || format!("only presets for webhooks have it, and this one is {preset:?}");
        return written("").map_or(Ok(()), |name| Err(wrong(name, what())));
    }
    if inherits && written("").is_none() {
        return Ok(());
    }
    if dials.unsigned == Some(true) {
        policy.signature = None;
        let what = "there is nothing to check with it where unsigned is true; leave one out";
        return written("unsigned").map_or(Ok(()), |name| Err(wrong(name, what.into())));
    }
    let scheme = signature_scheme(dials, preset, policy).map_err(|(name, what)| wrong(name, what))?;
    // A route inherits the signature of `[policy]` unless it sets its own.
    let above = policy.signature.take();
    let secrets = match &dials.secrets {
        None => above.as_ref().map(|above| above.secrets.clone()).unwrap_or_default(),
        Some(secrets) => {
            let read = |(at, secret): (usize, &Secret)| {
                scheme
                    .parse_secret(secret.expose())
                    .map_err(|why| wrong(&format!("secrets[{}]", at + 1), why.to_string()))
            };
            secrets.iter().enumerate().map(read).collect::<Result<_, _>>()?
        }
    };
    let tolerance = match dials.tolerance {
        Some(_) if !scheme.has_timestamp() => {
            let what = format!("{scheme} signs no time, so nothing can be too old; leave it out");
            return Err(wrong("tolerance", what));
        }
        Some(tolerance) => tolerance,
        None => above.map_or(DEFAULT_TOLERANCE, |above| above.tolerance),
    };
    policy.signature = Some(WebhookVerifier { scheme, secrets, tolerance });
    Ok(())
}

/// Returns the signature scheme: that of the preset, or the one written here or in `[policy]`. An error is a name and a
/// message.
fn signature_scheme(dials: &RawDials, preset: &str, policy: &Policy) -> Result<WebhookScheme, (&'static str, String)> {
    let known = WebhookScheme::from_name(preset.trim_start_matches("webhook:"));
    match (&dials.signature, known, &policy.signature) {
        (Some(_), Some(_), _) => {
            let what = format!("{preset:?} has its own; leave it out, or take the preset \"webhook:custom\"");
            Err(("signature", what))
        }
        (None, Some(scheme), _) => Ok(scheme),
        (Some(written), None, _) => custom_scheme(written).map(WebhookScheme::Custom),
        (None, None, Some(above)) => Ok(above.scheme.clone()),
        (None, None, None) => {
            let what =
                "missing; say how the sender signs, such as { header = \"X-Signature\" }, or say unsigned = true";
            Err(("signature", what.into()))
        }
    }
}

fn custom_scheme(written: &RawSignature) -> Result<CustomWebhookScheme, (&'static str, String)> {
    let RawSignature { header, prefix, encoding, content, timestamp } = written;
    let missing = "missing; name the header that has the signature, such as \"X-Signature\"";
    let custom = CustomWebhookScheme {
        header: header.clone().ok_or_else(|| ("signature.header", missing.into()))?,
        prefix: prefix.clone(),
        encoding: *encoding,
        content: content.clone(),
        timestamp: timestamp.clone(),
    };
    custom.check().map_err(|invalid| ("signature.timestamp", invalid.message().to_owned()))?;
    Ok(custom)
}
