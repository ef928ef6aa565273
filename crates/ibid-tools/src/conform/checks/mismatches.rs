//! Checks with the same key on another request, or from another caller.

use ibid::{
    RefusalReason,
    policy::{FingerprintPart, OnMismatch},
    scope::ScopePart,
};

use super::{
    super::{connection::RawRequest, session::ConformSession},
    ExpectedOutcome, judge_second,
};
use crate::CommandError;

/// How a request differs from the one whose key it has.
enum RequestChange<'a> {
    Body(&'a str),
    Target(&'a str),
    Method(&'a str),
    Headers(&'a [(String, String)]),
}

pub(super) async fn check_all(session: &mut ConformSession<'_>) -> Result<(), CommandError> {
    let (body, target) = (session.other_body.clone(), session.other_target.clone());
    let glue = if session.target.contains('?') { '&' } else { '?' };
    let query = format!("{}{glue}conform=other", session.target);
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
    match policy.on_mismatch {
        _ if !policy.fingerprint.contains(part) => ExpectedOutcome::Replay,
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
    if matches!(expected, ExpectedOutcome::Refused(_)) {
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
