//! Turns the dials of a file into policies and routes.

use ibid::{Policy, RefusalReason, grpc::UnaryMethods, http::Protocol};

use super::{error::ConfigError, raw::RawDials, values::PRESET_OFF, webhooks};
use crate::routes::{Match, RouteEntry, RouteTable};

/// The preset if none is named.
const DEFAULT_PRESET: &str = "ietf";

/// Builds every route. `origin` is the file's name, for errors.
pub(super) fn build_route_table(
    policy: Option<&RawDials>, routes: &[RawDials], unary: Option<&UnaryMethods>, origin: &str,
) -> Result<RouteTable, ConfigError> {
    let wrong = |key: &str, what: String| ConfigError::new(origin, key, what);
    let default = policy.map(|dials| {
        if dials.route_match.is_some() {
            return Err(wrong("policy.match", "only a [[route]] has a match".into()));
        }
        let preset = dials.preset.as_ref().map_or(DEFAULT_PRESET, |preset| preset.0.0);
        let preset = if preset == PRESET_OFF { DEFAULT_PRESET } else { preset };
        let mut finished = preset_policy(preset);
        dials.apply_to(&mut finished);
        webhooks::apply_webhook_dials(dials, preset, false, &mut finished, "policy")
            .map_err(|(key, what)| wrong(&key, what))?;
        check_policy(&finished, Protocol::Http, "policy").map_err(|(key, what)| wrong(&key, what))?;
        Ok((finished, preset, dials.upstream.as_ref().map(|upstream| upstream.0.0.clone())))
    });
    let default = default.transpose()?;
    let writes_key = policy.is_some_and(|dials| dials.key.from.is_some());
    let mut finished: Vec<(&Match, RouteEntry)> = Vec::with_capacity(routes.len());
    for (at, dials) in routes.iter().enumerate() {
        let place = format!("route[{}]", at + 1);
        let Some(matches) = dials.route_match.as_ref().map(|at| &at.0) else {
            let what = "missing; write METHOD[|METHOD] PATTERN, such as \"POST /payments/*\"";
            return Err(wrong(&format!("{place}.match"), what.into()));
        };
        let in_route =
            |(key, what): (String, String)| ConfigError { route: Some(matches.to_string()), ..wrong(&key, what) };
        if let Some(earlier) = finished.iter().position(|(earlier, _)| is_same_match(earlier, matches)) {
            let what = format!("{:?} is the match of route[{}] already", matches.to_string(), earlier + 1);
            return Err(wrong(&format!("{place}.match"), what));
        }
        if dials.methods.is_some() {
            let what = "the methods of a route are those in its match; leave methods out";
            return Err(in_route((format!("{place}.methods"), what.into())));
        }
        if dials.preset.as_ref().is_some_and(|preset| preset.0.0 == PRESET_OFF) {
            let what = "only [policy] has the preset \"off\"; a route is switched off by mode = \"off\"";
            return Err(in_route((format!("{place}.preset"), what.into())));
        }
        let (mut policy, preset, via_policy, upstream) = match (&dials.preset, &default) {
            (Some(preset), _) => (preset_policy(preset.0.0), preset.0.0, false, None),
            (None, Some((policy, preset, upstream))) => (policy.clone(), *preset, true, upstream.clone()),
            (None, None) => (preset_policy(DEFAULT_PRESET), DEFAULT_PRESET, false, None),
        };
        dials.apply_to(&mut policy);
        webhooks::apply_webhook_dials(dials, preset, via_policy, &mut policy, &place).map_err(in_route)?;
        if matches.protocol() == Protocol::Grpc {
            if webhooks::is_webhook_preset(preset) {
                let what = format!(
                    "{preset:?} is for deliveries over HTTP, not for gRPC; write a route such as \"POST /hooks\""
                );
                return Err(in_route((format!("{place}.preset"), what)));
            }
            check_unary(matches, unary).map_err(|what| in_route((format!("{place}.match"), what)))?;
            policy = adapt_for_grpc(policy, dials.key.from.is_some() || via_policy && writes_key);
        }
        policy.methods = matches.methods().to_vec();
        check_policy(&policy, matches.protocol(), &place).map_err(in_route)?;
        let upstream = dials.upstream.as_ref().map(|upstream| upstream.0.0.clone()).or(upstream);
        finished.push((
            matches,
            RouteEntry { upstream, inherits_policy: via_policy, ..RouteEntry::new(matches, policy, preset) },
        ));
    }
    let mut routes: Vec<RouteEntry> = finished.into_iter().map(|(_, route)| route).collect();
    let is_off = policy.and_then(|dials| dials.preset.as_ref()).is_some_and(|preset| preset.0.0 == PRESET_OFF);
    if !is_off {
        let default = default.unwrap_or_else(|| (preset_policy(DEFAULT_PRESET), DEFAULT_PRESET, None));
        let is_beside_routes = !routes.is_empty();
        let rest = policy_routes(default, unary, writes_key).map_err(|(key, what)| wrong(&key, what))?;
        routes.extend(rest.into_iter().map(|route| RouteEntry { is_fallback_policy: is_beside_routes, ..route }));
    }
    Ok(RouteTable::new(routes).with_unary_methods(unary.cloned().unwrap_or_default()))
}

/// The routes of `[policy]`, for requests that no route names.
fn policy_routes(
    (policy, preset, upstream): (Policy, &'static str, Option<String>), unary: Option<&UnaryMethods>, writes_key: bool,
) -> Result<Vec<RouteEntry>, (String, String)> {
    let mut all = vec![RouteEntry { upstream: upstream.clone(), ..RouteEntry::for_all_paths(policy.clone(), preset) }];
    // Webhook deliveries are not gRPC calls.
    if unary.is_some() && !webhooks::is_webhook_preset(preset) {
        let policy = adapt_for_grpc(policy, writes_key);
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
    let (pattern, text) = (matches.pattern(), matches.to_string());
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
        (true, true) if unary.is_streaming(pattern.text()) => {
            Err(format!("{text:?} is a streaming method by the descriptors; only unary ones can be covered"))
        }
        (true, true) if methods.any(|path| path == pattern.text()) => Ok(()),
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
    let within = |a: &Match, b: &Match| a.methods().iter().all(|method| b.methods().contains(method));
    one.protocol() == two.protocol() && one.pattern() == two.pattern() && within(one, two) && within(two, one)
}

/// Returns the error of [`Policy::check`] as a key and a message.
fn check_policy(policy: &Policy, protocol: Protocol, place: &str) -> Result<(), (String, String)> {
    let checked = match protocol {
        Protocol::Http => policy.check(),
        Protocol::Grpc => policy.check_grpc(),
    };
    checked.map_err(|invalid| (format!("{place}.{}", invalid.setting()), invalid.message().to_owned()))
}

impl RawDials {
    /// Applies every dial that is set. A list replaces a list; a table of headers replaces a table of headers.
    fn apply_to(&self, policy: &mut Policy) {
        /// Each line names a dial and the pattern of its value in the file.
        macro_rules! turn {
            ($($($dial:ident).+ = $written:pat => $value:expr;)+) => {$(
                if let Some($written) = &self.$($dial).+ {
                    policy.$($dial).+ = $value.clone().into();
                }
            )+};
        }
        use super::{
            raw::{RawHeaders, RawRemember},
            scalar::{List, Single},
            values::{ByteSize, DigestStatus},
        };
        turn! {
            methods = List(value) => value;
            key.from = List(value) => value;
            key.required = Single(value) => value;
            key.format = Single(value) => value;
            key.max_length = Single(value) => value;
            scope = List(value) => value;
            label.tenant = Single(value) => Some(value.clone());
            label.user = Single(value) => Some(value.clone());
            label.key = Single(value) => value;
            fingerprint = List(value) => value;
            json_ignore = List(value) => value;
            on_mismatch = Single(value) => value;
            on_concurrent = Single(value) => value;
            on_unknown = Single(value) => value;
            resolve = Single(value) => Some(value.clone());
            on_store_down = Single(value) => value;
            remember = RawRemember(value) => value;
            refusals = Single(value) => value;
            unknown_status = List(value) => value;
            remember_body = Single(value) => value;
            max_request = Single(ByteSize(value)) => value;
            max_response = Single(ByteSize(value)) => value;
            digest_status = Single(DigestStatus(value)) => value;
            ttl = Single(value) => value;
            lease = Single(value) => value;
            timeout = Single(value) => value;
            wait_timeout = Single(value) => value;
            late_answer = Single(value) => value;
            first_headers = RawHeaders(value) => value;
            replay_headers = RawHeaders(value) => value;
            drop_headers = List(value) => value;
            envelope = Single(value) => value;
            mode = Single(value) => value;
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
