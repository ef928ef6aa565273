//! Describes a policy to people: its dials as `ibid check` prints them, and its parts in words.

use std::time::Duration;

use http::{HeaderName, StatusCode};
use ibid::{
    Policy, RefusalReason,
    grpc::GrpcStatusCode,
    key::{KeyFormat, KeySource},
    policy::{
        HeaderTemplate, IntentGuard, KeyPolicy, LabelKeyDisplay, OnMatch, OnMismatch, OnStoreDown, OnUnknown,
        PolicyMode, ResolveProbe,
    },
    scope::ScopePart,
    webhook::{DEFAULT_TOLERANCE, WebhookVerifier},
};

use crate::format::{format_duration, format_list, format_size};

pub fn dial_values(policy: &Policy) -> Vec<(&'static str, String)> {
    let label = [("tenant", &policy.label.tenant), ("user", &policy.label.user)];
    let mut labels: Vec<String> = label
        .iter()
        .map(|(name, from)| format!("{name} {}", from.as_ref().map_or("from scope".into(), ScopePart::to_string)))
        .collect();
    labels.push(format!("key {}", if policy.label.key == LabelKeyDisplay::Clear { "clear" } else { "masked" }));
    let headers = |headers: &[(HeaderName, HeaderTemplate)]| {
        format_list(headers.iter().map(|(name, value)| format!("{name}: {value}")))
    };
    let codes =
        policy.status.iter().map(|(reason, status)| format!("{} {}", reason.name().replace('-', "_"), status.as_u16()));
    let grpc = policy.grpc_status.iter();
    let grpc = grpc.map(|(reason, code)| {
        format!("{} {}", reason.name().replace('-', "_"), GrpcStatusCode::from_number((*code).into()).name())
    });
    let tools = policy.tools.iter().flat_map(|tools| {
        [("tools", tools.to_string()), ("remember_tool_errors", policy.remember_tool_errors.to_string())]
    });
    let guard = policy.guard.as_ref().map_or("none".into(), |IntentGuard { fields, window, on_match }| {
        format!("{}; {}, {on_match}", format_list(fields), format_duration(*window))
    });
    let mut dials = vec![
        ("methods", format_list(&policy.methods)),
        ("key", format_key(&policy.key)),
        ("scope", format_list(&policy.scope)),
        ("label", labels.join(", ")),
        ("fingerprint", format_list(&policy.fingerprint)),
        ("json_ignore", format_list(&policy.json_ignore)),
        ("json_numbers", policy.json_numbers.to_string()),
        ("on_mismatch", policy.on_mismatch.to_string()),
        ("on_concurrent", policy.on_concurrent.to_string()),
        ("on_unknown", policy.on_unknown.to_string()),
        ("resolve", policy.resolve.as_ref().map_or("none".into(), ResolveProbe::to_string)),
        ("on_store_down", policy.on_store_down.to_string()),
        ("remember", policy.remember.to_string()),
        ("refusals", policy.refusals.to_string()),
        ("unknown_status", format_list(policy.unknown_status.iter().map(StatusCode::as_u16))),
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
        ("guard", guard),
        ("mode", policy.mode.to_string()),
    ];
    dials.extend(tools);
    dials
}

/// For a route with a webhook preset: the dials of its signature, each with its name, its value and whether it differs
/// from the default.
pub fn signature(policy: &Policy) -> Vec<(&'static str, String, bool)> {
    let Some(WebhookVerifier { scheme, secrets, tolerance }) = &policy.signature else {
        return vec![("signature", "none: deliveries are taken from anybody".into(), true)];
    };
    let mut shown = vec![("signature", scheme.to_string(), false), ("secrets", secrets.len().to_string(), false)];
    if scheme.has_timestamp() {
        shown.push(("tolerance", format_duration(*tolerance), *tolerance != DEFAULT_TOLERANCE));
    }
    shown
}

fn format_key(key: &KeyPolicy) -> String {
    let required = if key.required { "required" } else { "optional" };
    format!("{}; {required}, {}, at most {} characters", format_list(&key.from), key.format, key.max_length)
}

/// The header name in its usual spelling, such as `Idempotency-Key`.
pub fn header(name: &HeaderName) -> String {
    let words = name.as_str().split('-');
    words
        .map(|word| word.get(..1).unwrap_or_default().to_uppercase() + word.get(1..).unwrap_or_default())
        .collect::<Vec<_>>()
        .join("-")
}

pub fn key_format(format: &KeyFormat) -> String {
    match format {
        KeyFormat::Any => "any visible ASCII characters".into(),
        KeyFormat::Raw => "visible ASCII characters and spaces, taken as they are".into(),
        KeyFormat::Uuid => "a UUID with hyphens".into(),
        KeyFormat::Uuid4 => "a UUID of version 4 with hyphens".into(),
        KeyFormat::Uuid7 => "a UUID of version 7 with hyphens".into(),
        KeyFormat::Token => "a UUID, or 16 to 255 letters, digits, _ and -".into(),
        KeyFormat::Operation => "four parts, user:operation:resource:timestamp".into(),
        KeyFormat::Regex(_) => format!("text that matches {}", format.to_string().trim_start_matches("regex:")),
    }
}

/// Such as `24 hours`.
pub fn duration(duration: Duration) -> String {
    let written = format_duration(duration);
    let digits = written.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let unit = match &written[digits.len()..] {
        "h" => "hour",
        "m" => "minute",
        "s" => "second",
        _ => "millisecond",
    };
    format!("{digits} {unit}{}", if digits == "1" { "" } else { "s" })
}

/// Whether a client of this route can get this refusal. A policy in shadow mode refuses nothing.
pub fn is_possible(policy: &Policy, is_limited: bool, reason: RefusalReason) -> bool {
    if policy.mode != PolicyMode::Enforce {
        return false;
    }
    let scope = |wanted: fn(&ScopePart) -> bool| policy.scope.iter().any(wanted);
    match reason {
        RefusalReason::KeyMissing => policy.key.required && !policy.key.from.contains(&KeySource::Body),
        RefusalReason::ScopeMissing => scope(ScopePart::names_caller),
        RefusalReason::IdentityInvalid => policy.signature.is_some() || policy.claims().next().is_some(),
        RefusalReason::ScopeRefused => {
            let believes = scope(|part| part.header().is_some()) && !scope(|part| *part == ScopePart::Credential);
            believes || policy.checks_key_owner()
        }
        RefusalReason::StoreUnavailable => policy.on_store_down == OnStoreDown::Closed,
        // Refuses only calls that belong to no route.
        RefusalReason::MethodUnknown => false,
        RefusalReason::KeyReused => policy.on_mismatch == OnMismatch::Reject,
        RefusalReason::DuplicateIntent => policy.guard.as_ref().is_some_and(|guard| guard.on_match != OnMatch::Count),
        RefusalReason::OutcomeUnknown => policy.on_unknown == OnUnknown::Hold,
        RefusalReason::QuotaExceeded => is_limited,
        _ => true,
    }
}
