//! Checks of keys: their format, requests without one, and the same key on another request or from another caller.

use ibid::{
    RefusalReason,
    key::KeyFormat,
    policy::{FingerprintPart, OnMismatch},
    scope::ScopePart,
};
use serde_json::Value;

use super::{
    super::{
        connection::{ExchangeError, RawExchange, RawRequest},
        session::ConformSession,
    },
    ExpectedOutcome, format_run_count, judge_second,
};
use crate::CommandError;

pub(super) async fn check_all(session: &mut ConformSession<'_>) -> Result<(), CommandError> {
    check_missing(session).await?;
    check_longest(session).await;
    check_quoted(session).await?;
    let fresh = session.new_key();
    let long = session.policy.key.max_length + 1;
    // Uses the profile's format, if that allows long keys.
    let too_long = match session.policy.key.format {
        KeyFormat::Operation => format!("conform:check.run:{}:1", "k".repeat(long - 20)),
        _ => "k".repeat(long),
    };
    let refused = [
        ("key.empty", String::new()),
        ("key.blank", "\"\"".into()),
        ("key.too-long", too_long),
        ("key.format", "not-of-the-form".into()),
        ("key.list", format!("\"{fresh}\", \"{fresh}-2\"")),
        ("key.parameters", format!("\"{fresh}\";a=1")),
        ("key.bad-escape", format!("\"{fresh}\\x\"")),
        ("key.open-quote", format!("\"{fresh}")),
        ("key.control-byte", format!("{fresh}\u{1}")),
        ("key.non-ascii", format!("{fresh}\u{e9}")),
    ];
    for (id, key) in refused {
        let request = session.operation_with_key(key.as_bytes());
        check_refused(session, id, request).await?;
    }
    for (id, separator) in [("key.two-headers", "-"), ("key.twin", "_")] {
        let mut twice = session.new_operation();
        twice.keys.push((twice.keys[0].0.replace('-', separator), session.new_key().into_bytes()));
        check_refused(session, id, twice).await?;
    }
    let nominated = session.new_operation();
    let connection = format!("close, {}", nominated.keys[0].0);
    check_refused(session, "key.nominated", RawRequest { connection, ..nominated }).await
}

/// Sends a request that must be refused before anything runs.
async fn check_refused(
    session: &mut ConformSession<'_>, id: &'static str, request: RawRequest,
) -> Result<(), CommandError> {
    if !session.is_pending(id) {
        return Ok(());
    }
    let (seen, ran) = session.send_and_count(&request).await?;
    let status = session.status_of(RefusalReason::KeyInvalid);
    let foreign = session.args.profile.is_third_party();
    // A server often rejects bytes that are invalid in a header before it parses the request.
    let unframed = matches!(id, "key.control-byte" | "key.non-ascii");
    let refused = match &seen.response {
        Ok(answer) if foreign || unframed => answer.status().is_client_error(),
        Ok(answer) => answer.status() == status,
        Err(broken) => unframed && matches!(broken, ExchangeError::Closed),
    };
    let wanted = if foreign { "a refusal (4xx)".into() } else { status.to_string() };
    let expected = format!("{wanted}, and no run{}", format_run_count(ran));
    session.report(id, refused && ran.unwrap_or(0) == 0, expected, &seen);
    if refused && !unframed {
        session.refusals.push((id, true, seen));
    }
    Ok(())
}

/// Without a key: refused, or executed each time, as the profile says. The draft leaves this to the server.
async fn check_missing(session: &mut ConformSession<'_>) -> Result<(), CommandError> {
    const ID: &str = "key.missing";
    let request = session.operation_without_key();
    let (first, ran) = session.send_and_count(&request).await?;
    let required = match session.args.key_required {
        Some(required) => required,
        None if session.args.profile.name == "ietf" => first.success().is_none(),
        None => session.policy.key.required,
    };
    if required {
        let status = session.status_of(RefusalReason::KeyMissing);
        let fine = first.status() == Some(status) && ran.unwrap_or(0) == 0;
        session.report(ID, fine, format!("{status}, and no run{}", format_run_count(ran)), &first);
        if first.success().is_none() {
            session.refusals.push((ID, true, first));
        }
        return Ok(());
    }
    let Some(answer) = first.success() else {
        session.report(ID, false, "success: the key is optional", &first);
        return Ok(());
    };
    let (second, ran) = session.send_and_count(&request).await?;
    judge_second(session, ID, ExpectedOutcome::OwnRun, answer, &second, ran);
    Ok(())
}

async fn check_longest(session: &mut ConformSession<'_>) {
    const ID: &str = "key.longest";
    if !session.has_evidence() {
        session.skip(ID, "nothing shows that keys are looked at; name --count-url");
    }
    if session.is_pending(ID) {
        let mut key = session.new_key();
        key.push_str(&"k".repeat(session.policy.key.max_length - key.len()));
        let request = session.operation_with_key(key.as_bytes());
        let first = session.send(&request).await;
        session.report(ID, first.success().is_some(), "success", &first);
    }
}

/// Checks that `"k"` and `k` are the same key.
async fn check_quoted(session: &mut ConformSession<'_>) -> Result<(), CommandError> {
    const ID: &str = "key.quoted";
    if !session.is_pending(ID) {
        return Ok(());
    }
    let bare = session.new_operation();
    let (name, key) = bare.keys[0].clone();
    let quoted = RawRequest { keys: vec![(name, [b"\"", &key[..], b"\""].concat())], ..bare.clone() };
    let first = session.send(&quoted).await;
    let Some(answer) = first.success() else {
        session.report(ID, false, "success with the key in quotes", &first);
        return Ok(());
    };
    let (second, ran) = session.retry_and_count(&bare).await?;
    judge_second(session, ID, ExpectedOutcome::Replay, answer, &second, ran);
    Ok(())
}

/// Checks that a key does not affect a GET.
pub(super) async fn check_get(session: &mut ConformSession<'_>) {
    const ID: &str = "get.passes";
    if !session.is_pending(ID) {
        return;
    }
    let plain = RawRequest { method: "GET".into(), body: None, ..session.operation_without_key() };
    let keyed = RawRequest { keys: session.new_operation().keys, ..plain.clone() };
    let without = session.send(&plain).await;
    let with = [session.send(&keyed).await, session.send(&keyed).await];
    let expected = match without.status() {
        Some(status) => format!("{status}, as without a key, and no replay"),
        None => "what comes without a key".into(),
    };
    let differs = |seen: &&RawExchange| {
        let marked = seen.response.as_ref().is_ok_and(|answer| session.is_marked_as_replay(answer));
        seen.status().is_none() || seen.status() != without.status() || marked
    };
    let wrong = with.iter().find(differs);
    session.report(ID, wrong.is_none(), expected, wrong.unwrap_or(&with[1]));
}

/// How a request differs from the one whose key it has.
enum RequestChange<'a> {
    Body(&'a str),
    Target(&'a str),
    Method(&'a str),
    Headers(&'a [(String, String)]),
}

pub(super) async fn check_other_requests(session: &mut ConformSession<'_>) -> Result<(), CommandError> {
    let (body, target) = (session.other_body.clone(), session.other_target.clone());
    let glue = if session.target.contains('?') { '&' } else { '?' };
    let query = format!("{}{glue}conform=other", session.target);
    let layout = session.change_body(|body| Some(in_other_layout(&body)));
    let numbers = session.change_body(|mut body| with_fraction(&mut body).then(|| body.to_string()));
    // The check, the part that changes, the scope with that part, the change, and what to say if there is no such
    // change or the server does not accept it.
    let checks = [
        (
            "mismatch.body",
            (FingerprintPart::Body, None),
            body.as_deref().map(RequestChange::Body),
            "needs another body of this operation: --other-body",
            "needs another valid body of this operation: --other-body",
        ),
        (
            "mismatch.layout",
            (FingerprintPart::Raw, None),
            layout.as_deref().map(RequestChange::Body),
            "needs a JSON body without fractions: --body",
            "the operation takes no other layout of its body",
        ),
        (
            "mismatch.numbers",
            // Not compared: numbers of the same value are equal.
            (FingerprintPart::Raw, None),
            numbers.as_deref().map(RequestChange::Body),
            "needs a JSON body with a whole number: --body",
            "the operation takes no numbers with a fraction",
        ),
        (
            "mismatch.query",
            (FingerprintPart::Query, None),
            Some(RequestChange::Target(&query)),
            "",
            "the operation takes no other query",
        ),
        (
            "mismatch.path",
            (FingerprintPart::Path, Some(ScopePart::Path)),
            target.as_deref().map(RequestChange::Target),
            "needs another operation on this server: --other-url",
            "needs another operation that takes the same body: --other-url",
        ),
        (
            "mismatch.method",
            (FingerprintPart::Method, Some(ScopePart::Method)),
            session.args.other_method.as_deref().map(RequestChange::Method),
            "needs another method of this operation: --other-method",
            "needs a method that this operation has: --other-method",
        ),
    ];
    for (id, (part, scope), change, if_absent, if_refused) in checks {
        let expected = expected_for_part(session, &part, scope);
        let why = match change {
            None => if_absent,
            Some(change) if !check_change(session, id, expected, if_refused, &change).await? => if_refused,
            Some(_) => continue,
        };
        session.skip(id, why);
        if id == "mismatch.body" {
            session.skip("mismatch.keeps-first", why);
        }
    }
    check_caller(session).await
}

/// The same JSON with its members in reverse order, and with other space.
fn in_other_layout(body: &Value) -> String {
    match body {
        Value::Object(members) => {
            let members = members.iter().rev().map(|(name, value)| format!("{}: {value}", Value::from(name.as_str())));
            format!("{{ {} }}", members.collect::<Vec<_>>().join(" , "))
        }
        other => format!(" {other} "),
    }
}

/// Writes the first whole number with a fraction. Returns whether there is one.
fn with_fraction(value: &mut Value) -> bool {
    match value {
        Value::Number(number) => match number.as_i64().filter(|number| number.unsigned_abs() < 1 << 50) {
            Some(whole) => {
                *value = Value::from(whole as f64);
                true
            }
            None => false,
        },
        Value::Array(items) => items.iter_mut().any(with_fraction),
        Value::Object(members) => members.values_mut().any(with_fraction),
        _ => false,
    }
}

impl RequestChange<'_> {
    fn apply(&self, session: &ConformSession<'_>, request: RawRequest) -> RawRequest {
        match *self {
            Self::Body(body) => RawRequest { body: session.fill_nonce(body), ..request },
            Self::Target(target) => RawRequest { target: target.to_owned(), ..request },
            Self::Method(method) => RawRequest { method: method.to_owned(), ..request },
            Self::Headers(headers) => request.with_headers(headers),
        }
    }
}

/// Returns what the profile expects of a request that differs in one part.
fn expected_for_part(
    session: &ConformSession<'_>, part: &FingerprintPart, scope: Option<ScopePart>,
) -> ExpectedOutcome {
    let policy = session.policy;
    if scope.is_some_and(|part| policy.scope.contains(&part)) {
        return ExpectedOutcome::OwnRun;
    }
    let is_raw = *part == FingerprintPart::Body && policy.fingerprint.contains(&FingerprintPart::Raw);
    let is_compared = is_raw || policy.fingerprint.contains(part);
    match policy.on_mismatch {
        _ if !is_compared => ExpectedOutcome::Replay,
        OnMismatch::Reject => ExpectedOutcome::Refused(session.status_of(RefusalReason::KeyReused)),
        OnMismatch::New => ExpectedOutcome::OwnRun,
        OnMismatch::Ignore => ExpectedOutcome::Replay,
    }
}

/// Sends a changed request under the key of another one. First it checks that the server accepts the change under a
/// key of its own; otherwise the check is inconclusive, and it returns `false`.
async fn check_change(
    session: &mut ConformSession<'_>, id: &'static str, expected: ExpectedOutcome, if_refused: &str,
    change: &RequestChange<'_>,
) -> Result<bool, CommandError> {
    if !session.is_pending(id) {
        return Ok(true);
    }
    let apart = session.new_operation();
    let seen = session.send(&change.apply(session, apart)).await;
    if seen.success().is_none() {
        session.skip(id, format!("{if_refused} (under a key of its own it gets {})", seen.describe_response()));
        return Ok(false);
    }
    let request = session.new_operation();
    let first = session.send(&request).await;
    let Some(answer) = first.success() else {
        session.report(id, false, "success of the first request", &first);
        return Ok(true);
    };
    let differing = change.apply(session, request.clone());
    let (second, ran) = session.retry_and_count(&differing).await?;
    judge_second(session, id, expected, answer, &second, ran);
    if matches!(expected, ExpectedOutcome::Refused(_)) && second.success().is_none() {
        session.refusals.push((id, false, second));
    }
    if session.is_pending("mismatch.keeps-first") {
        let (again, ran) = session.retry_and_count(&request).await?;
        judge_second(session, "mismatch.keeps-first", ExpectedOutcome::Replay, answer, &again, ran);
    }
    Ok(true)
}

/// Checks the same request under the same key, from another caller.
async fn check_caller(session: &mut ConformSession<'_>) -> Result<(), CommandError> {
    const ID: &str = "caller.isolated";
    let mut others = session.args.other_header.clone();
    let gives =
        |headers: &[(String, String)], name: &str| headers.iter().any(|(found, _)| found.eq_ignore_ascii_case(name));
    match session.args.profile.scope_header() {
        // In this profile, requests with the same header come from the same caller.
        Some(name) if !gives(&others, name) && gives(&session.args.header, name) => {
            session.skip(ID, format!("needs the {name} of a second caller: --other-header '{name}: …'"));
        }
        Some(name) if !gives(&others, name) => others.push((name.to_owned(), "conform-b".into())),
        None if others.is_empty() => {
            session.skip(ID, "needs the credential of a second caller: --other-header 'Authorization: …'");
        }
        _ => {}
    }
    let needs = "needs a second caller who may do this: --other-header 'Authorization: …'";
    check_change(session, ID, ExpectedOutcome::OwnRun, needs, &RequestChange::Headers(&others)).await?;
    Ok(())
}
