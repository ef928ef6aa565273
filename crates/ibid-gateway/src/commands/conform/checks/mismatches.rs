//! Checks with the same key on another request, or from another caller.

use ibid::{FingerprintPart, OnMismatch, RefusalReason, ScopePart};

use super::{
    super::request::RawRequest, super::session::ConformSession, ExpectedOutcome, RunAborted, count, judge_second,
    ran_since,
};

pub(super) async fn check_all(session: &mut ConformSession) -> Result<(), RunAborted> {
    check_body(session).await?;
    let target = session.plan.target.clone();
    let glue = if target.contains('?') { '&' } else { '?' };
    let query = format!("{target}{glue}conform=other");
    let needs = "the operation takes no other query";
    let change = |request| RawRequest { target: query.clone(), ..request };
    check_part(session, "mismatch.query", FingerprintPart::Query, None, needs, change).await?;
    match session.plan.other_target.clone() {
        Some(target) => {
            let (by, needs) = (Some(ScopePart::Path), "needs another operation that takes the same body: --other-url");
            let change = |request| RawRequest { target: target.clone(), ..request };
            check_part(session, "mismatch.path", FingerprintPart::Path, by, needs, change).await?;
        }
        None => session.report_not_performed("mismatch.path", "needs another operation on this server: --other-url"),
    }
    match session.plan.other_method.clone() {
        Some(method) => {
            let (by, needs) = (Some(ScopePart::Method), "needs a method that this operation has: --other-method");
            let change = |request| RawRequest { method: method.clone(), ..request };
            check_part(session, "mismatch.method", FingerprintPart::Method, by, needs, change).await?;
        }
        None => {
            session.report_not_performed("mismatch.method", "needs another method of this operation: --other-method")
        }
    }
    check_caller(session).await
}

/// Returns what the profile expects of a request that differs in one part.
fn expected_for_part(session: &ConformSession, part: &FingerprintPart, scope: Option<ScopePart>) -> ExpectedOutcome {
    let policy = &session.plan.profile.policy;
    if scope.is_some_and(|part| policy.scope.contains(&part)) {
        return ExpectedOutcome::OwnRun;
    }
    if !policy.fingerprint.contains(part) {
        return ExpectedOutcome::Replay;
    }
    match policy.on_mismatch {
        OnMismatch::Reject => ExpectedOutcome::Refused(session.status_of(RefusalReason::KeyReused)),
        OnMismatch::New => ExpectedOutcome::OwnRun,
        OnMismatch::Ignore => ExpectedOutcome::Replay,
    }
}

async fn check_body(session: &mut ConformSession) -> Result<(), RunAborted> {
    let Some(other) = session.plan.other_body.clone() else {
        let why = "needs another body of this operation: --other-body";
        session.report_not_performed("mismatch.body", why);
        session.report_not_performed("mismatch.keeps-first", why);
        return Ok(());
    };
    let needs = "needs another valid body of this operation: --other-body";
    let apart = session.new_operation();
    let apart = RawRequest { body: session.fill_nonce(&other), ..apart };
    if !is_variant_accepted(session, "mismatch.body", &apart, needs).await {
        session.report_not_performed("mismatch.keeps-first", needs);
        return Ok(());
    }
    let request = session.new_operation();
    let differing = RawRequest { body: session.fill_nonce(&other), ..request.clone() };
    check_changed_request(
        session,
        "mismatch.body",
        &request,
        &differing,
        expected_for_part(session, &FingerprintPart::Body, None),
    )
    .await
}

/// Whether the server accepts the different request under its own key. Otherwise the check is inconclusive.
async fn is_variant_accepted(session: &mut ConformSession, id: &'static str, apart: &RawRequest, needs: &str) -> bool {
    let seen = session.send(apart).await;
    if !seen.is_success() {
        session
            .report_not_performed(id, format!("{needs} (under a key of its own it gets {})", seen.describe_response()));
    }
    seen.is_success()
}

async fn check_part(
    session: &mut ConformSession, id: &'static str, part: FingerprintPart, scope: Option<ScopePart>, needs: &str,
    change: impl Fn(RawRequest) -> RawRequest,
) -> Result<(), RunAborted> {
    if !session.is_pending(id) {
        return Ok(());
    }
    let apart = change(session.new_operation());
    if !is_variant_accepted(session, id, &apart, needs).await {
        return Ok(());
    }
    let request = session.new_operation();
    let differing = change(request.clone());
    let expected = expected_for_part(session, &part, scope);
    check_changed_request(session, id, &request, &differing, expected).await
}

async fn check_changed_request(
    session: &mut ConformSession, id: &'static str, request: &RawRequest, differing: &RawRequest,
    expected: ExpectedOutcome,
) -> Result<(), RunAborted> {
    let first = session.send(request).await;
    let Some(answer) = first.response.as_ref().ok().filter(|answer| answer.is_success()) else {
        session.report_exchange(id, false, "success of the first request", &first);
        return Ok(());
    };
    let before = count(session).await?;
    let second = session.send_until_settled(differing).await;
    let ran = ran_since(session, before).await?;
    judge_second(session, id, expected, answer, &second, ran);
    if matches!(expected, ExpectedOutcome::Refused(_)) {
        session.refusals.push((id, false, second));
    }
    if session.is_pending("mismatch.keeps-first") {
        let before = count(session).await?;
        let again = session.send_until_settled(request).await;
        let ran = ran_since(session, before).await?;
        judge_second(session, "mismatch.keeps-first", ExpectedOutcome::Replay, answer, &again, ran);
    }
    Ok(())
}

/// Checks the same request under the same key, from another caller.
async fn check_caller(session: &mut ConformSession) -> Result<(), RunAborted> {
    const ID: &str = "caller.isolated";
    if !session.is_pending(ID) {
        return Ok(());
    }
    let mut others = session.plan.other_headers.clone();
    let gives =
        |headers: &[(String, String)], name: &str| headers.iter().any(|(found, _)| found.eq_ignore_ascii_case(name));
    match session.plan.profile.scope_header() {
        // In this profile, requests with the same header come from the same caller.
        Some(name) if !gives(&others, name) && gives(&session.plan.headers, name) => {
            session
                .report_not_performed(ID, format!("needs the {name} of a second caller: --other-header '{name}: …'"));
            return Ok(());
        }
        Some(name) if !gives(&others, name) => others.push((name.to_owned(), "conform-b".into())),
        None if others.is_empty() => {
            session
                .report_not_performed(ID, "needs the credential of a second caller: --other-header 'Authorization: …'");
            return Ok(());
        }
        _ => {}
    }
    let request = session.new_operation();
    let other = request.clone().with_headers(&others);
    let key = session.new_operation().keys;
    let needs = "needs a second caller who may do this: --other-header 'Authorization: …'";
    if !is_variant_accepted(session, ID, &RawRequest { keys: key, ..other.clone() }, needs).await {
        return Ok(());
    }
    check_changed_request(session, ID, &request, &other, ExpectedOutcome::OwnRun).await
}
