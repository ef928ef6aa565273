//! From the dials of a file to finished policies and routes.

use ibid::{Policy, Reason};

use super::{error::ConfigError, raw::Dials, webhooks};
use crate::routes::{Match, Route, RouteTable};

/// The preset where nothing names one.
const DEFAULT_PRESET: &str = "ietf";

/// Finishes every route.
///
/// `origin` is the file, for errors.
pub(super) fn finish(policy: Option<&Dials>, routes: &[Dials], origin: &str) -> Result<RouteTable, ConfigError> {
    let wrong = |key: &str, what: String| ConfigError::new(origin, key, what);
    let default = policy.map(|dials| {
        if dials.at.is_some() {
            return Err(wrong("policy.match", "only a [[route]] has a match".into()));
        }
        let preset = dials.preset.as_ref().map_or(DEFAULT_PRESET, |preset| preset.0.0);
        let mut finished = start(preset);
        dials.turn(&mut finished);
        webhooks::turn(dials, preset, false, &mut finished, "policy").map_err(|(key, what)| wrong(&key, what))?;
        consistent(&finished, "policy").map_err(|(key, what)| wrong(&key, what))?;
        Ok((finished, preset, dials.upstream.as_ref().map(|upstream| upstream.0.0.clone())))
    });
    let default = default.transpose()?;
    if routes.is_empty() {
        let (policy, preset, upstream) = default.unwrap_or_else(|| (start(DEFAULT_PRESET), DEFAULT_PRESET, None));
        return Ok(RouteTable::new(vec![Route { upstream, ..Route::everything(policy, preset) }]));
    }
    let mut finished: Vec<(&Match, Route)> = Vec::with_capacity(routes.len());
    for (at, dials) in routes.iter().enumerate() {
        let place = format!("route[{}]", at + 1);
        let Some(matches) = dials.at.as_ref().map(|at| &at.0) else {
            let what = "missing; write METHOD[|METHOD] PATTERN, such as \"POST /payments/*\"";
            return Err(wrong(&format!("{place}.match"), what.into()));
        };
        let in_route =
            |(key, what): (String, String)| ConfigError { route: Some(matches.to_string()), ..wrong(&key, what) };
        if let Some(earlier) = finished.iter().position(|(earlier, _)| same(earlier, matches)) {
            let what = format!("{:?} is the match of route[{}] already", matches.to_string(), earlier + 1);
            return Err(wrong(&format!("{place}.match"), what));
        }
        if dials.methods.is_some() {
            let what = "the methods of a route are those in its match; leave methods out";
            return Err(in_route((format!("{place}.methods"), what.into())));
        }
        let (mut policy, preset, via_policy, upstream) = match (&dials.preset, &default) {
            (Some(preset), _) => (start(preset.0.0), preset.0.0, false, None),
            (None, Some((policy, preset, upstream))) => (policy.clone(), *preset, true, upstream.clone()),
            (None, None) => (start(DEFAULT_PRESET), DEFAULT_PRESET, false, None),
        };
        dials.turn(&mut policy);
        webhooks::turn(dials, preset, via_policy, &mut policy, &place).map_err(in_route)?;
        policy.methods = matches.methods().to_vec();
        consistent(&policy, &place).map_err(in_route)?;
        let upstream = dials.upstream.as_ref().map(|upstream| upstream.0.0.clone()).or(upstream);
        finished.push((matches, Route { upstream, via_policy, ..Route::new(matches, policy, preset) }));
    }
    Ok(RouteTable::new(finished.into_iter().map(|(_, route)| route).collect()))
}

fn start(preset: &str) -> Policy {
    Policy::preset(preset).expect("checked when it was read")
}

/// Whether two matches are the same line, whatever the order of their methods.
fn same(one: &Match, two: &Match) -> bool {
    let within = |a: &Match, b: &Match| a.methods().iter().all(|method| b.methods().contains(method));
    one.pattern() == two.pattern() && within(one, two) && within(two, one)
}

/// What [`Policy::check`] says, as a key and a sentence.
fn consistent(policy: &Policy, place: &str) -> Result<(), (String, String)> {
    policy.check().map_err(|sentence| {
        // The sentence starts with the dial.
        let (dial, what) = sentence.split_once(' ').unwrap_or(("", &sentence));
        (format!("{place}.{dial}"), what.to_owned())
    })
}

impl Dials {
    /// Sets every dial that is written. A list replaces a list, a table of headers a table of headers.
    fn turn(&self, policy: &mut Policy) {
        /// Each line: a dial, and where its written form is.
        macro_rules! turn {
            ($($($dial:ident).+ = $written:pat => $value:expr;)+) => {$(
                if let Some($written) = &self.$($dial).+ {
                    policy.$($dial).+ = $value.clone().into();
                }
            )+};
        }
        use super::{
            raw::{Headers, Remembered},
            scalar::{List, One},
            values::{DigestStatus, Size},
        };
        turn! {
            methods = List(value) => value;
            key.from = List(value) => value;
            key.required = One(value) => value;
            key.format = One(value) => value;
            key.max_length = One(value) => value;
            scope = List(value) => value;
            label.tenant = One(value) => Some(value.clone());
            label.user = One(value) => Some(value.clone());
            label.key = One(value) => value;
            fingerprint = List(value) => value;
            json_ignore = List(value) => value;
            on_mismatch = One(value) => value;
            on_concurrent = One(value) => value;
            on_unknown = One(value) => value;
            resolve = One(value) => Some(value.clone());
            on_store_down = One(value) => value;
            remember = Remembered(value) => value;
            unknown_status = List(value) => value;
            remember_body = One(value) => value;
            max_request = One(Size(value)) => value;
            max_response = One(Size(value)) => value;
            digest_status = One(DigestStatus(value)) => value;
            ttl = One(value) => value;
            lease = One(value) => value;
            timeout = One(value) => value;
            wait_timeout = One(value) => value;
            first_headers = Headers(value) => value;
            replay_headers = Headers(value) => value;
            drop_headers = List(value) => value;
            envelope = One(value) => value;
            mode = One(value) => value;
        }
        for (reason, status) in &self.status.0 {
            set(&mut policy.status, *reason, status.0);
        }
        for (reason, code) in &self.grpc_status.0 {
            set(&mut policy.grpc_status, *reason, code.0);
        }
    }
}

fn set<T>(values: &mut Vec<(Reason, T)>, reason: Reason, value: T) {
    values.retain(|(known, _)| *known != reason);
    values.push((reason, value));
}
