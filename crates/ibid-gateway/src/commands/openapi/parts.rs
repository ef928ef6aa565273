//! What a policy says to a client, in the words of OpenAPI.

use http::{HeaderName, header};
use ibid::{Envelope, KeyFormat, KeySource, Policy, Reason, Refusals, ScopePart};

use super::made::{Made, map, reference, text};
use crate::contract_page::{possible, words};

/// What may stand in a header without quotes: visible ASCII without quotes, commas and semicolons. The same without colons.
const BARE: &str = "[!#-+\\--:<-~]";
const BARE_PART: &str = "[!#-+\\--9<-~]";
/// What may stand between quotes.
const QUOTED: &str = r#"([!#-\[\]-~]|\\["\\])"#;

/// OpenAPI ignores parameters for these.
const DESCRIBED_ELSEWHERE: [HeaderName; 3] = [header::ACCEPT, header::CONTENT_TYPE, header::AUTHORIZATION];

/// A parameter that carries a key, or says whose key it is.
pub(super) struct Parameter {
    pub(super) name: String,
    /// `header` or `query`.
    pub(super) place: &'static str,
    /// A reference to another document that has this in it, in lower case, is taken for this parameter.
    pub(super) known_by: String,
    pub(super) made: Made,
}

/// The parameters of a policy: its key, then the headers of its scope.
pub(super) fn parameters(policy: &Policy) -> Vec<Parameter> {
    let mut all = keys(policy);
    for part in &policy.scope {
        let Some(header) = part.header().filter(|name| !DESCRIBED_ELSEWHERE.contains(name)) else { continue };
        if !all.iter().any(|known| known.place == "header" && known.name.eq_ignore_ascii_case(header.as_str())) {
            all.push(scope(policy, header, matches!(part, ScopePart::Optional(_))));
        }
    }
    all
}

/// A header of the scope. It is needed for a key: where the key may be left out, so may the header.
fn scope(policy: &Policy, header: &HeaderName, is_optional: bool) -> Parameter {
    let needed = if is_optional || policy.key.required { "" } else { " Required with a key." };
    let told = format!("Whose key it is: the same key with another value names another operation.{needed}");
    let name = words::header(header);
    let made = map([
        ("name", text(&name)),
        ("in", text("header")),
        ("required", Made::Bool(policy.key.required && !is_optional)),
        ("description", text(told)),
        ("schema", map([("type", text("string")), ("minLength", Made::Number(1))])),
    ]);
    Parameter { name, place: "header", known_by: header.as_str().replace('-', ""), made }
}

/// Keys in the body, and bodies as keys, have no parameter.
fn keys(policy: &Policy) -> Vec<Parameter> {
    let sources = policy.key.from.iter().filter_map(|source| match source {
        KeySource::Header(name) => Some((words::header(name), "header")),
        KeySource::Query(name) => Some((name.clone(), "query")),
        _ => None,
    });
    // One of several is required, which cannot be said of any of them.
    let required = policy.key.required && policy.key.from.len() == 1;
    let parameter = |(name, place): (String, &'static str)| {
        let made = map([
            ("name", text(&name)),
            ("in", text(place)),
            ("required", Made::Bool(required)),
            ("description", text(description(policy))),
            ("schema", schema(policy, place)),
        ]);
        Parameter { name, place, known_by: "idempotency".into(), made }
    };
    sources.map(parameter).collect()
}

fn description(policy: &Policy) -> String {
    let form = words::format(&policy.key.format);
    let without = if policy.key.required { "" } else { " Without a key nothing protects a retry." };
    format!(
        "Names one operation: make it once, send the same one with every retry. A retry gets the first answer and has no \
         second effect, for {}. The key is {form}.{without}",
        words::duration(policy.ttl)
    )
}

fn schema(policy: &Policy, place: &str) -> Made {
    let pattern = match &policy.key.format {
        // A longer one in quotes is taken too, but has more characters than can be said beside a bare one.
        KeyFormat::Any if place == "header" => format!("^({BARE}+|\"{QUOTED}+\")$"),
        KeyFormat::Any => "^[!-~]+$".into(),
        KeyFormat::Raw => "^[ -~]+$".into(),
        KeyFormat::Uuid => "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$".into(),
        KeyFormat::Uuid4 => {
            "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-4[0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}$".into()
        }
        KeyFormat::Token => "^[A-Za-z0-9_-]{16,255}$".into(),
        KeyFormat::Operation => format!("^({BARE_PART}+:){{3}}[0-9]{{1,20}}$"),
        KeyFormat::Regex(_) => format!("^(?:{})$", policy.key.format.to_string().trim_start_matches("regex:")),
    };
    let is_uuid = matches!(policy.key.format, KeyFormat::Uuid | KeyFormat::Uuid4);
    let mut schema = vec![("type".to_owned(), text("string"))];
    if is_uuid {
        schema.push(("format".into(), text("uuid")));
    }
    let longest = if is_uuid { policy.key.max_length.min(36) } else { policy.key.max_length };
    schema.push(("minLength".into(), Made::Number(1)));
    schema.push(("maxLength".into(), Made::Number(longest as u64)));
    schema.push(("pattern".into(), text(pattern)));
    Made::Map(schema)
}

/// The refusals of a policy by status, in order.
pub(super) fn refusals(policy: &Policy, is_limited: bool) -> Vec<(u16, Made)> {
    let mut by_status: Vec<(u16, Vec<Reason>)> = Vec::new();
    for reason in Reason::all().filter(|reason| possible(policy, is_limited, *reason)) {
        let status = policy.status_of(reason).as_u16();
        match by_status.iter_mut().find(|(found, _)| *found == status) {
            Some((_, reasons)) => reasons.push(reason),
            None => by_status.push((status, vec![reason])),
        }
    }
    by_status.sort_by_key(|(status, _)| *status);
    by_status.into_iter().map(|(status, reasons)| (status, response(&reasons, policy.refusals))).collect()
}

fn response(reasons: &[Reason], refusals: Refusals) -> Made {
    let told: Vec<_> = reasons.iter().map(|reason| format!("{}: {}.", reason.name(), reason.title())).collect();
    let mut headers = Vec::new();
    let later = |reason: &Reason| {
        matches!(reason, Reason::StoreUnavailable | Reason::Overloaded | Reason::InProgress | Reason::QuotaExceeded)
    };
    if reasons.iter().any(later) {
        headers.push((
            "Retry-After".to_owned(),
            map([
                ("description", text("Seconds after which the same request, with the same key, may be sent again.")),
                ("schema", map([("type", text("integer")), ("minimum", Made::Number(1))])),
            ]),
        ));
    }
    if reasons.iter().any(|reason| reason.links_to_contract()) {
        headers.push((
            "Link".to_owned(),
            map([
                ("description", text("Where the rules for keys are published.")),
                ("schema", map([("type", text("string"))])),
            ]),
        ));
    }
    let mut response = vec![("description".to_owned(), text(told.join(" ")))];
    if !headers.is_empty() {
        response.push(("headers".into(), Made::Map(headers)));
    }
    let (name, _) = body(refusals);
    response.push(("content".into(), map([(refusals.media_type(), described_by(name))])));
    Made::Map(response)
}

/// The media type of a response whose body is this component.
pub(super) fn described_by(component: &str) -> Made {
    map([("schema", reference(format!("#/components/schemas/{component}")))])
}

/// The component that all refusals of a shape refer to.
pub(super) fn body(refusals: Refusals) -> (&'static str, Made) {
    match refusals {
        Refusals::Problem => ("IdempotencyProblem", problem()),
        Refusals::Stripe => ("IdempotencyError", error()),
    }
}

fn error() -> Made {
    let string = || map([("type", text("string"))]);
    let error = map([
        ("type", text("object")),
        ("required", Made::List(["type", "message"].map(text).to_vec())),
        ("properties", map([("type", string()), ("code", string()), ("message", string()), ("doc_url", string())])),
    ]);
    map([
        ("type", text("object")),
        ("description", text("Why a request was refused, as Stripe writes errors.")),
        ("required", Made::List(vec![text("error")])),
        ("properties", map([("error", error)])),
    ])
}

fn problem() -> Made {
    let string = || map([("type", text("string"))]);
    let required = ["type", "title", "status", "detail"].map(text).to_vec();
    map([
        ("type", text("object")),
        ("description", text("Why a request was refused, as RFC 9457 has it.")),
        ("required", Made::List(required)),
        (
            "properties",
            map([
                ("type", map([("type", text("string")), ("format", text("uri-reference"))])),
                ("title", string()),
                ("status", map([("type", text("integer"))])),
                ("detail", string()),
                ("key", map([("type", text("string")), ("description", text("The key, masked."))])),
            ]),
        ),
    ])
}

/// The headers by which answers say whether they are replays.
pub(super) fn headers(policy: &Policy) -> Vec<(String, Made)> {
    let mut all: Vec<(String, Made)> = Vec::new();
    for (name, replayed) in &policy.replay_headers {
        let first = policy.first_headers.iter().find(|(found, _)| found == name).map(|(_, value)| value.to_string());
        all.push((words::header(name), header(first.as_deref(), Some(&replayed.to_string()))));
    }
    for (name, first) in &policy.first_headers {
        if !policy.replay_headers.iter().any(|(found, _)| found == name) {
            all.push((words::header(name), header(Some(&first.to_string()), None)));
        }
    }
    all
}

fn header(first: Option<&str>, replayed: Option<&str>) -> Made {
    let when = match (first, replayed) {
        (None, _) => "Only on replays: this answer was given before, and nothing ran again.",
        (Some(_), None) => "Only on first answers.",
        (Some(first), Some(replayed)) if first == replayed => "On first answers and on replays.",
        _ => "Whether this answer is a replay.",
    };
    let values: Vec<&str> = [first, replayed].into_iter().flatten().collect();
    let schema = if values.iter().any(|value| value.contains("{original_time}")) {
        map([("type", text("string")), ("format", text("date-time"))])
    } else if values.iter().any(|value| value.contains('{')) {
        map([("type", text("string"))])
    } else {
        let mut values: Vec<Made> = values.into_iter().map(text).collect();
        values.dedup();
        map([("type", text("string")), ("enum", Made::List(values))])
    };
    map([("description", text(when)), ("schema", schema)])
}

/// What a reader of the document should know besides.
pub(super) fn remarks(policy: &Policy) -> Vec<&'static str> {
    let mut remarks = Vec::new();
    if policy.envelope == Envelope::Metadata {
        remarks.push("JSON answers get a member \"metadata\", which is not described");
    }
    if policy.key.from.iter().any(|source| matches!(source, KeySource::Json(_))) {
        remarks.push("the key is in the body, whose schema is left as it is");
    }
    remarks
}
