//! Describes a policy in OpenAPI.

use std::collections::BTreeMap;

use http::{HeaderName, header};
use ibid::{
    Policy, RefusalReason,
    key::{KeyFormat, KeySource},
    policy::{RefusalFormat, ResponseEnvelope},
    scope::ScopePart,
};

use super::new_value::{NewValue, new_reference, object};
use crate::describe::{self, is_possible};

/// A character of an unquoted header value: visible ASCII without quotes, commas and semicolons; then also without
/// colons.
const BARE_CHAR: &str = "[!#-+\\--:<-~]";
const BARE_CHAR_NO_COLON: &str = "[!#-+\\--9<-~]";
/// A character between quotes.
const QUOTED_CHAR: &str = r#"([!#-\[\]-~]|\\["\\])"#;

/// OpenAPI ignores parameters with these names.
const DESCRIBED_ELSEWHERE: [HeaderName; 3] = [header::ACCEPT, header::CONTENT_TYPE, header::AUTHORIZATION];

/// A parameter for a key, or for the scope of keys.
pub(super) struct KeyParameter {
    pub(super) name: String,
    /// `header` or `query`.
    pub(super) location: &'static str,
    /// A reference to another document that contains this text, in lower case, counts as this parameter.
    pub(super) known_by: String,
    pub(super) value: NewValue,
}

/// The parameters of a policy: its key, then the headers of its scope.
pub(super) fn key_parameters(policy: &Policy) -> Vec<KeyParameter> {
    let mut all = keys(policy);
    for part in &policy.scope {
        let Some(header) = part.header().filter(|name| !DESCRIBED_ELSEWHERE.contains(name)) else { continue };
        if !all.iter().any(|known| known.location == "header" && known.name.eq_ignore_ascii_case(header.as_str())) {
            all.push(scope(policy, header, matches!(part, ScopePart::Optional(_))));
        }
    }
    all
}

/// A header of the scope. It is required only with a key.
fn scope(policy: &Policy, header: &HeaderName, is_optional: bool) -> KeyParameter {
    let needed = if is_optional || policy.key.required { "" } else { " Required with a key." };
    let name = describe::header(header);
    let value = object! {
        "name" => name.as_str(),
        "in" => "header",
        "required" => policy.key.required && !is_optional,
        "description" => format!("Whose key it is: the same key with another value names another operation.{needed}"),
        "schema" => object! { "type" => "string", "minLength" => 1u64 },
    };
    KeyParameter { name, location: "header", known_by: header.as_str().replace('-', ""), value }
}

/// Keys from the body have no parameter.
fn keys(policy: &Policy) -> Vec<KeyParameter> {
    let sources = policy.key.from.iter().filter_map(|source| match source {
        KeySource::Header(name) => Some((describe::header(name), "header")),
        KeySource::Query(name) => Some((name.clone(), "query")),
        _ => None,
    });
    // If there are several sources, no single one is required.
    let required = policy.key.required && policy.key.from.len() == 1;
    let parameter = |(name, place): (String, &'static str)| {
        let value = object! {
            "name" => name.as_str(),
            "in" => place,
            "required" => required,
            "description" => key_description(policy),
            "schema" => key_schema(policy, place),
        };
        KeyParameter { name, location: place, known_by: "idempotency".into(), value }
    };
    sources.map(parameter).collect()
}

fn key_description(policy: &Policy) -> String {
    let form = describe::key_format(&policy.key.format);
    let without = if policy.key.required { "" } else { " Without a key nothing protects a retry." };
    format!(
        "Names one operation: make it once, send the same one with every retry. A retry gets the first answer and has no \
         second effect, for {}. The key is {form}.{without}",
        crate::describe::duration(policy.ttl)
    )
}

fn key_schema(policy: &Policy, place: &str) -> NewValue {
    let pattern = match &policy.key.format {
        // The gateway also accepts a quoted key that exceeds maxLength only by its quotes; a schema cannot express
        // that.
        KeyFormat::Any if place == "header" => format!("^({BARE_CHAR}+|\"{QUOTED_CHAR}+\")$"),
        KeyFormat::Any => "^[!-~]+$".into(),
        KeyFormat::Raw => "^[ -~]+$".into(),
        KeyFormat::Uuid => "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$".into(),
        KeyFormat::Uuid4 => uuid_pattern('4'),
        KeyFormat::Uuid7 => uuid_pattern('7'),
        KeyFormat::Token => "^[A-Za-z0-9_-]{16,255}$".into(),
        KeyFormat::Operation => format!("^({BARE_CHAR_NO_COLON}+:){{3}}[0-9]{{1,20}}$"),
        KeyFormat::Regex(_) => format!("^(?:{})$", policy.key.format.to_string().trim_start_matches("regex:")),
    };
    let is_uuid = matches!(policy.key.format, KeyFormat::Uuid | KeyFormat::Uuid4 | KeyFormat::Uuid7);
    let longest = if is_uuid { policy.key.max_length.min(36) } else { policy.key.max_length } as u64;
    match is_uuid {
        true => object! {
            "type" => "string", "format" => "uuid", "minLength" => 1u64, "maxLength" => longest, "pattern" => pattern,
        },
        false => object! { "type" => "string", "minLength" => 1u64, "maxLength" => longest, "pattern" => pattern },
    }
}

fn uuid_pattern(version: char) -> String {
    format!("^[0-9a-fA-F]{{8}}-[0-9a-fA-F]{{4}}-{version}[0-9a-fA-F]{{3}}-[89abAB][0-9a-fA-F]{{3}}-[0-9a-fA-F]{{12}}$")
}

/// Returns the refusals of a policy by status, in order. `schema` is the component that describes their bodies.
pub(super) fn refusal_responses(policy: &Policy, is_limited: bool, schema: &str) -> Vec<(u16, NewValue)> {
    let mut by_status: BTreeMap<u16, Vec<RefusalReason>> = BTreeMap::new();
    for reason in RefusalReason::all().filter(|reason| is_possible(policy, is_limited, *reason)) {
        by_status.entry(policy.status_of(reason).as_u16()).or_default().push(reason);
    }
    let media_type = policy.refusals.media_type();
    by_status.into_iter().map(|(status, reasons)| (status, refusal_response(&reasons, media_type, schema))).collect()
}

fn refusal_response(reasons: &[RefusalReason], media_type: &str, schema: &str) -> NewValue {
    let told: Vec<_> = reasons.iter().map(|reason| format!("{}: {}.", reason.name(), reason.title())).collect();
    let mut headers = Vec::new();
    let later = |reason: &RefusalReason| {
        use RefusalReason::{InProgress, Overloaded, QuotaExceeded, StoreUnavailable};
        matches!(reason, StoreUnavailable | Overloaded | InProgress | QuotaExceeded)
    };
    if reasons.iter().any(later) {
        let told = "Seconds after which the same request, with the same key, may be sent again.";
        let schema = object! { "type" => "integer", "minimum" => 1u64 };
        headers.push(("Retry-After".to_owned(), object! { "description" => told, "schema" => schema }));
    }
    if reasons.iter().any(|reason| reason.links_to_contract()) {
        let told = "Where the rules for keys are published.";
        headers.push(("Link".to_owned(), object! { "description" => told, "schema" => string() }));
    }
    let mut response = vec![("description".to_owned(), NewValue::from(told.join(" ")))];
    if !headers.is_empty() {
        response.push(("headers".into(), NewValue::Map(headers)));
    }
    response.push(("content".into(), object! { media_type => media_type_for(schema) }));
    NewValue::Map(response)
}

pub(super) fn media_type_for(component: &str) -> NewValue {
    object! { "schema" => new_reference(format!("#/components/schemas/{component}")) }
}

pub(super) fn refusal_body_schema(refusals: RefusalFormat) -> (&'static str, NewValue) {
    match refusals {
        RefusalFormat::Problem => ("IdempotencyProblem", problem_schema()),
        RefusalFormat::Stripe => ("IdempotencyError", stripe_error_schema()),
        RefusalFormat::Acp => ("IdempotencyAcpError", strings_schema(&["type", "code", "message"])),
        RefusalFormat::Ucp => ("IdempotencyUcpError", strings_schema(&["code", "content"])),
        RefusalFormat::Iceberg => ("IdempotencyIcebergError", iceberg_error_schema()),
        RefusalFormat::JsonRpc => ("IdempotencyJsonRpcError", json_rpc_error_schema()),
    }
}

fn string() -> NewValue {
    object! { "type" => "string" }
}

fn names(names: &[&str]) -> NewValue {
    NewValue::List(names.iter().map(|name| NewValue::from(*name)).collect())
}

/// An object that has these members, all of them text.
fn strings_schema(members: &[&str]) -> NewValue {
    let properties = members.iter().map(|name| ((*name).to_owned(), string())).collect();
    object! { "type" => "object", "required" => names(members), "properties" => NewValue::Map(properties) }
}

fn iceberg_error_schema() -> NewValue {
    let properties = object! { "message" => string(), "type" => string(), "code" => object! { "type" => "integer" } };
    let required = names(&["message", "type", "code"]);
    let error = object! { "type" => "object", "required" => required, "properties" => properties };
    object! { "type" => "object", "required" => names(&["error"]), "properties" => object! { "error" => error } }
}

fn json_rpc_error_schema() -> NewValue {
    let data =
        object! { "type" => "object", "required" => names(&["type"]), "properties" => object! { "type" => string() } };
    let properties = object! { "code" => object! { "type" => "integer" }, "message" => string(), "data" => data };
    let required = names(&["code", "message", "data"]);
    let error = object! { "type" => "object", "required" => required, "properties" => properties };
    let properties = object! { "jsonrpc" => string(), "id" => object! {}, "error" => error };
    object! { "type" => "object", "required" => names(&["jsonrpc", "id", "error"]), "properties" => properties }
}

fn stripe_error_schema() -> NewValue {
    let properties = object! { "type" => string(), "code" => string(), "message" => string(), "doc_url" => string() };
    let error = object! { "type" => "object", "required" => names(&["type", "message"]), "properties" => properties };
    object! {
        "type" => "object",
        "description" => "Why a request was refused, as Stripe writes errors.",
        "required" => names(&["error"]),
        "properties" => object! { "error" => error },
    }
}

fn problem_schema() -> NewValue {
    object! {
        "type" => "object",
        "description" => "Why a request was refused, as RFC 9457 has it.",
        "required" => names(&["type", "title", "status", "detail"]),
        "properties" => object! {
            "type" => object! { "type" => "string", "format" => "uri-reference" },
            "title" => string(),
            "status" => object! { "type" => "integer" },
            "detail" => string(),
            "key" => object! { "type" => "string", "description" => "The key, masked." },
        },
    }
}

pub(super) fn replay_headers(policy: &Policy) -> Vec<(String, NewValue)> {
    let mut all: Vec<(String, NewValue)> = Vec::new();
    for (name, replayed) in &policy.replay_headers {
        let first = policy.first_headers.iter().find(|(found, _)| found == name).map(|(_, value)| value.to_string());
        all.push((describe::header(name), replay_header(first.as_deref(), Some(&replayed.to_string()))));
    }
    for (name, first) in &policy.first_headers {
        if !policy.replay_headers.iter().any(|(found, _)| found == name) {
            all.push((describe::header(name), replay_header(Some(&first.to_string()), None)));
        }
    }
    all
}

fn replay_header(first: Option<&str>, replayed: Option<&str>) -> NewValue {
    let when = match (first, replayed) {
        (None, _) => "Only on replays: this answer was given before, and nothing ran again.",
        (Some(_), None) => "Only on first answers.",
        (Some(first), Some(replayed)) if first == replayed => "On first answers and on replays.",
        _ => "Whether this answer is a replay.",
    };
    let mut values: Vec<&str> = [first, replayed].into_iter().flatten().collect();
    let schema = if values.iter().any(|value| value.contains("{original_time}")) {
        object! { "type" => "string", "format" => "date-time" }
    } else if values.iter().any(|value| value.contains('{')) {
        string()
    } else {
        values.dedup();
        object! { "type" => "string", "enum" => names(&values) }
    };
    object! { "description" => when, "schema" => schema }
}

pub(super) fn policy_remarks(policy: &Policy) -> Vec<&'static str> {
    let mut remarks = Vec::new();
    if policy.envelope == ResponseEnvelope::Metadata {
        remarks.push("JSON answers get a member \"metadata\", which is not described");
    }
    if policy.key.from.iter().any(|source| matches!(source, KeySource::Json(_))) {
        remarks.push("the key is in the body, whose schema is left as it is");
    }
    remarks
}
