//! Describes policy settings in words for API clients.

use ibid::{
    Policy, RefusalReason,
    grpc::{CallOutcome, GrpcStatusCode},
    http::Protocol,
    key::KeySource,
    policy::{FingerprintPart, OnConcurrent, OnMismatch, OnUnknown, Remember, StatusRange},
    scope::ScopePart,
    webhook::{WebhookScheme, WebhookVerifier},
};

pub(crate) use ibid_tools::describe::{header, key_format};

use crate::{
    format::{duration_in_words, join_with_and},
    routes::RouteEntry,
};

/// In the syntax of the configuration file.
pub(super) fn key_source_code(source: &KeySource) -> String {
    match source {
        KeySource::Header(name) => format!("header:{}", header(name)),
        other => other.to_string(),
    }
}

pub(super) fn key_source(source: &KeySource) -> String {
    match source {
        KeySource::Header(name) => format!("the header {}", header(name)),
        KeySource::Json(pointer) => format!("{pointer} in the JSON body"),
        KeySource::Query(name) => format!("the query parameter {name}"),
        KeySource::Body => "the request itself: sending it again is a retry".into(),
    }
}

pub(super) fn scope(parts: &[ScopePart]) -> String {
    if parts.contains(&ScopePart::Global) {
        return "one key space for all callers".into();
    }
    let by_proxy = if parts.contains(&ScopePart::Credential) { "" } else { ", set by a trusted proxy" };
    let word = |part: &ScopePart| match part.part() {
        ScopePart::Credential => "your credentials (Authorization and every other header that carries one)".into(),
        ScopePart::Cookie(name) => format!("your cookie {name}"),
        ScopePart::Header(name) => format!("the header {}{by_proxy}", header(name)),
        ScopePart::Jwt(claim) => format!("the claim {claim} of your token"),
        ScopePart::Host => "the host".into(),
        ScopePart::Method => "the method".into(),
        ScopePart::Path => "the path".into(),
        ScopePart::Route => "this route".into(),
        ScopePart::Global | ScopePart::Optional(_) => String::new(),
    };
    let words = parts.iter().map(|part| match part {
        ScopePart::Optional(_) => format!("{} (if there is one)", word(part)),
        _ => word(part),
    });
    let words: Vec<String> = words.collect();
    let whose = if parts.iter().any(ScopePart::names_caller) {
        "a key is yours alone: it is"
    } else {
        "callers share their keys, which are"
    };
    format!("{whose} kept apart by {}", join_with_and(&words))
}

pub(super) fn signature(verifier: &WebhookVerifier) -> String {
    let WebhookVerifier { scheme, tolerance, .. } = verifier;
    let mut words = match scheme {
        WebhookScheme::Standard => "as Standard Webhooks has it (webhook-signature, v1)".into(),
        WebhookScheme::Svix => "as Svix has it (svix-signature or webhook-signature, v1)".into(),
        WebhookScheme::GitHub => "as GitHub has it (X-Hub-Signature-256)".into(),
        WebhookScheme::Stripe => "as Stripe has it (Stripe-Signature, v1)".into(),
        WebhookScheme::Shopify => "as Shopify has it (X-Shopify-Hmac-Sha256)".into(),
        other => format!("HMAC-SHA256, {other}"),
    };
    if scheme.has_timestamp() {
        words.push_str(&format!("; at most {} from now", duration_in_words(*tolerance)));
    }
    words
}

/// Describes what two requests must have in common to be the same.
pub(super) fn fingerprint(policy: &Policy) -> String {
    if policy.on_mismatch == OnMismatch::Ignore || policy.fingerprint.is_empty() {
        return "key; nothing else is compared".into();
    }
    let mut words = vec!["key".to_owned()];
    words.extend(policy.fingerprint.iter().map(|part| match part {
        FingerprintPart::Method => "method".into(),
        FingerprintPart::Path => "path".into(),
        FingerprintPart::Query => "query".into(),
        FingerprintPart::Type => "media type".into(),
        FingerprintPart::Raw => "body, byte by byte".into(),
        FingerprintPart::Body if policy.tools.is_some() => "tool and arguments".into(),
        FingerprintPart::Body if policy.json_ignore.is_empty() => "body".into(),
        FingerprintPart::Body => format!("body without {}", join_with_and(&policy.json_ignore)),
        FingerprintPart::Header(name) => format!("the header {}", header(name)),
        FingerprintPart::Preconditions => "preconditions (If-Match and the like)".into(),
    }));
    join_with_and(&words)
}

/// The status of a refusal: `409`, `ABORTED` for gRPC, or the code of a JSON-RPC error.
pub(super) fn refusal_status(route: &RouteEntry, reason: RefusalReason) -> String {
    match route.protocol {
        Protocol::Http => route.policy.status_of(reason).as_u16().to_string(),
        Protocol::JsonRpc => reason.json_rpc_code().to_string(),
        Protocol::Grpc => GrpcStatusCode::from_number(route.policy.grpc_status_of(reason).into()).name().into(),
    }
}

pub(super) fn remembered(route: &RouteEntry) -> String {
    match route.protocol {
        Protocol::Http => remembered_answers(&route.policy),
        Protocol::JsonRpc if route.policy.remember_tool_errors => "results and errors of tools".into(),
        Protocol::JsonRpc => "results of tools, unless the tool failed".into(),
        Protocol::Grpc => remembered_statuses(&route.policy),
    }
}

fn remembered_statuses(policy: &Policy) -> String {
    let which = |end: CallOutcome| {
        GrpcStatusCode::all().filter(|code| CallOutcome::of(policy, *code) == end).collect::<Vec<_>>()
    };
    let (kept, open) = (which(CallOutcome::Remembered), which(CallOutcome::OutcomeUnknown));
    let mut words = match &kept[..] {
        [] => "none: only running calls are protected".into(),
        all if all.len() == GrpcStatusCode::all().count() => "every status".into(),
        some => join_with_and(some),
    };
    if !policy.remember_body {
        words.push_str("; the status only, over an empty message");
    }
    if !open.is_empty() {
        words.push_str(&format!("; {} leave the outcome open", join_with_and(&open)));
    }
    words
}

fn statuses(ranges: &[StatusRange]) -> String {
    join_with_and(&ranges.iter().map(StatusRange::to_string).collect::<Vec<_>>())
}

fn remembered_answers(policy: &Policy) -> String {
    let mut words = match &policy.remember {
        Remember::All => "every answer, errors included".into(),
        Remember::Final => "2xx, 3xx, and 4xx except 401, 403, 408, 409, 425 and 429".into(),
        Remember::Success => "2xx and 3xx only; after any other answer a retry runs again".into(),
        Remember::List { include, exclude } if include.is_empty() && exclude.is_empty() => {
            "none: only running requests are protected".into()
        }
        Remember::List { include, exclude } => match (statuses(include), statuses(exclude)) {
            (included, _) if exclude.is_empty() => included,
            (_, excluded) if include.is_empty() => format!("every answer except {excluded}"),
            (included, excluded) => format!("{included}, except {excluded}"),
        },
    };
    if !policy.remember_body {
        words.push_str("; status and headers only, without the body");
    }
    if !policy.unknown_status.is_empty() {
        let codes: Vec<u16> = policy.unknown_status.iter().map(http::StatusCode::as_u16).collect();
        words.push_str(&format!("; {} leave the outcome open", join_with_and(&codes)));
    }
    words
}

pub(super) fn mismatch(policy: &Policy) -> &'static str {
    match policy.on_mismatch {
        OnMismatch::Reject => "refused (key-reused)",
        OnMismatch::New => "counts as another operation and runs",
        OnMismatch::Ignore => "gets the first answer",
    }
}

pub(super) fn concurrent(policy: &Policy) -> String {
    match policy.on_concurrent {
        OnConcurrent::Reject => "refused (in-progress); try again after Retry-After".into(),
        OnConcurrent::Wait => {
            format!(
                "waits up to {} for the first answer, then is refused (in-progress)",
                duration_in_words(policy.wait_timeout)
            )
        }
    }
}

pub(super) fn unknown(policy: &Policy) -> &'static str {
    match policy.on_unknown {
        OnUnknown::Hold => "refused (outcome-unknown) until an operator resolves it",
        OnUnknown::Retry => "runs again",
    }
}

/// A header's value, with placeholders explained.
pub(super) fn header_value(value: &ibid::policy::HeaderTemplate) -> String {
    let value = value.to_string().replace("{request_id}", "(yours, or a new one)");
    value.replace("{original_time}", "(when it was first answered)")
}
