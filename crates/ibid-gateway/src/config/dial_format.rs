//! Formats dials for people: one line each, in the order of the guide's table.

use std::{fmt::Display, time::Duration};

use ibid::{
    KeyPolicy, LabelKeyDisplay, Policy, ResolveProbe, ScopePart,
    http::Protocol,
    webhook::{DEFAULT_TOLERANCE, WebhookVerifier},
};

use super::{is_webhook_preset, values::GrpcCode};
use crate::routes::RouteEntry;

/// Returns every dial of a policy by name.
pub(crate) fn dial_values(policy: &Policy) -> Vec<(&'static str, String)> {
    let label = [("tenant", &policy.label.tenant), ("user", &policy.label.user)];
    let mut labels: Vec<String> = label
        .iter()
        .map(|(name, from)| format!("{name} {}", from.as_ref().map_or("from scope".into(), ScopePart::to_string)))
        .collect();
    labels.push(format!("key {}", if policy.label.key == LabelKeyDisplay::Clear { "clear" } else { "masked" }));
    let headers = |headers: &[(http::HeaderName, ibid::HeaderTemplate)]| {
        format_list(headers.iter().map(|(name, value)| format!("{name}: {value}")))
    };
    let codes =
        policy.status.iter().map(|(reason, status)| format!("{} {}", reason.name().replace('-', "_"), status.as_u16()));
    let grpc = policy.grpc_status.iter();
    let grpc = grpc.map(|(reason, code)| format!("{} {}", reason.name().replace('-', "_"), GrpcCode::name(*code)));
    vec![
        ("methods", format_list(&policy.methods)),
        ("key", format_key(&policy.key)),
        ("scope", format_list(&policy.scope)),
        ("label", labels.join(", ")),
        ("fingerprint", format_list(&policy.fingerprint)),
        ("json_ignore", format_list(&policy.json_ignore)),
        ("on_mismatch", policy.on_mismatch.to_string()),
        ("on_concurrent", policy.on_concurrent.to_string()),
        ("on_unknown", policy.on_unknown.to_string()),
        ("resolve", policy.resolve.as_ref().map_or("none".into(), ResolveProbe::to_string)),
        ("on_store_down", policy.on_store_down.to_string()),
        ("remember", policy.remember.to_string()),
        ("refusals", policy.refusals.to_string()),
        ("unknown_status", format_list(policy.unknown_status.iter().map(http::StatusCode::as_u16))),
        ("remember_body", policy.remember_body.to_string()),
        ("max_request", format_size(policy.max_request)),
        ("max_response", format_size(policy.max_response)),
        ("digest_status", policy.digest_status.map_or("original".into(), |code| code.as_u16().to_string())),
        ("ttl", format_duration(policy.ttl)),
        ("lease", format_duration(policy.lease)),
        ("timeout", format_duration(policy.timeout)),
        ("wait_timeout", format_duration(policy.wait_timeout)),
        ("late_answer", format_duration(policy.late_answer_or_lease())),
        ("first_headers", headers(&policy.first_headers)),
        ("replay_headers", headers(&policy.replay_headers)),
        ("drop_headers", format_list(&policy.drop_headers)),
        ("status", format_list(codes)),
        ("grpc_status", format_list(grpc)),
        ("envelope", policy.envelope.to_string()),
        ("mode", policy.mode.to_string()),
    ]
}

/// A dial of a route.
pub(crate) struct Dial {
    pub(crate) name: &'static str,
    pub(crate) value: String,
    /// Whether the value differs from the preset's.
    pub(crate) overridden: bool,
}

/// All dials of a route, compared with its preset.
pub(crate) fn route_dials(route: &RouteEntry) -> Vec<Dial> {
    let mut preset = Policy::preset(route.preset).expect("routes start from presets");
    if route.protocol == Protocol::Grpc {
        preset = preset.for_grpc();
    } else if !route.is_default_policy {
        // A route's methods always come from its match.
        preset.methods.clone_from(&route.policy.methods);
    }
    let both = dial_values(&route.policy).into_iter().zip(dial_values(&preset));
    let dials = both.map(|((name, value), (_, usual))| Dial { name, overridden: value != usual, value });
    let signature = is_webhook_preset(route.preset).then(|| signature(&route.policy)).into_iter().flatten();
    dials.chain(signature).collect()
}

/// For a route with a webhook preset: the dials of its signature.
fn signature(policy: &Policy) -> Vec<Dial> {
    let dial = |name, value, overridden| Dial { name, value, overridden };
    let Some(WebhookVerifier { scheme, secrets, tolerance }) = &policy.signature else {
        return vec![dial("signature", "none: deliveries are taken from anybody".into(), true)];
    };
    let mut shown =
        vec![dial("signature", scheme.to_string(), false), dial("secrets", secrets.len().to_string(), false)];
    if scheme.has_timestamp() {
        shown.push(dial("tolerance", format_duration(*tolerance), *tolerance != DEFAULT_TOLERANCE));
    }
    shown
}

fn format_key(key: &KeyPolicy) -> String {
    let required = if key.required { "required" } else { "optional" };
    format!("{}; {required}, {}, at most {} characters", format_list(&key.from), key.format, key.max_length)
}

/// `a, b`, or `none`.
pub(crate) fn format_list<T: Display>(items: impl IntoIterator<Item = T>) -> String {
    let items: Vec<String> = items.into_iter().map(|item| item.to_string()).collect();
    if items.is_empty() { "none".into() } else { items.join(", ") }
}

/// Formats as in a file: `5m`.
pub(crate) fn format_duration(duration: Duration) -> String {
    let millis = duration.as_millis();
    let units = [(3_600_000, "h"), (60_000, "m"), (1_000, "s")];
    let fits = units.iter().find(|(unit, _)| millis > 0 && millis.is_multiple_of(*unit));
    fits.map_or_else(|| format!("{millis}ms"), |(unit, name)| format!("{}{name}", millis / unit))
}

/// Formats as in a file: `64KiB`.
pub(crate) fn format_size(bytes: u64) -> String {
    let units = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    let fits = units.iter().find(|(unit, _)| bytes > 0 && bytes.is_multiple_of(*unit));
    fits.map_or_else(|| bytes.to_string(), |(unit, name)| format!("{}{name}", bytes / unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_and_sizes_read_as_they_are_written() {
        for (millis, text) in [
            (0, "0ms"),
            (500, "500ms"),
            (1500, "1500ms"),
            (30_000, "30s"),
            (90_000, "90s"),
            (300_000, "5m"),
            (86_400_000, "24h"),
        ] {
            assert_eq!(format_duration(Duration::from_millis(millis)), text);
        }
        for (bytes, text) in [(0, "0"), (1000, "1000"), (1024, "1KiB"), (1 << 20, "1MiB"), (3 << 30, "3GiB")] {
            assert_eq!(format_size(bytes), text);
        }
    }
}
