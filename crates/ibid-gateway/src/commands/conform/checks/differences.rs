//! The same key on something else, or from somebody else.

use ibid::{OnMismatch, Part, Reason, ScopePart};

use super::{super::request::Request, super::session::Session, Expected, Stop, count, judge, ran_since};

pub(super) async fn all(session: &mut Session) -> Result<(), Stop> {
    body(session).await?;
    let target = session.plan.target.clone();
    let glue = if target.contains('?') { '&' } else { '?' };
    let query = format!("{target}{glue}conform=other");
    let needs = "the operation takes no other query";
    let change = |request| Request { target: query.clone(), ..request };
    differs(session, "mismatch.query", Part::Query, None, needs, change).await?;
    match session.plan.other_target.clone() {
        Some(target) => {
            let (by, needs) = (Some(ScopePart::Path), "needs another operation that takes the same body: --other-url");
            let change = |request| Request { target: target.clone(), ..request };
            differs(session, "mismatch.path", Part::Path, by, needs, change).await?;
        }
        None => session.not_performed("mismatch.path", "needs another operation on this server: --other-url"),
    }
    match session.plan.other_method.clone() {
        Some(method) => {
            let (by, needs) = (Some(ScopePart::Method), "needs a method that this operation has: --other-method");
            let change = |request| Request { method: method.clone(), ..request };
            differs(session, "mismatch.method", Part::Method, by, needs, change).await?;
        }
        None => session.not_performed("mismatch.method", "needs another method of this operation: --other-method"),
    }
    caller(session).await
}

/// What the profile says about a request that differs in one part.
fn expected(session: &Session, part: &Part, scope: Option<ScopePart>) -> Expected {
    let policy = &session.plan.profile.policy;
    if scope.is_some_and(|part| policy.scope.contains(&part)) {
        return Expected::Own;
    }
    if !policy.fingerprint.contains(part) {
        return Expected::Same;
    }
    match policy.on_mismatch {
        OnMismatch::Reject => Expected::Refused(session.status_of(Reason::KeyReused)),
        OnMismatch::New => Expected::Own,
        OnMismatch::Ignore => Expected::Same,
    }
}

async fn body(session: &mut Session) -> Result<(), Stop> {
    let Some(other) = session.plan.other_body.clone() else {
        let why = "needs another body of this operation: --other-body";
        session.not_performed("mismatch.body", why);
        session.not_performed("mismatch.keeps-first", why);
        return Ok(());
    };
    let needs = "needs another valid body of this operation: --other-body";
    let apart = session.fresh();
    let apart = Request { body: session.filled(&other), ..apart };
    if !works(session, "mismatch.body", &apart, needs).await {
        session.not_performed("mismatch.keeps-first", needs);
        return Ok(());
    }
    let request = session.fresh();
    let differing = Request { body: session.filled(&other), ..request.clone() };
    differs_from(session, "mismatch.body", &request, &differing, expected(session, &Part::Body, None)).await
}

/// Whether what differs works at all, under a key of its own. Where it does not, nothing can be said about the key.
async fn works(session: &mut Session, id: &'static str, apart: &Request, needs: &str) -> bool {
    let seen = session.send(apart).await;
    if !seen.is_success() {
        session.not_performed(id, format!("{needs} (under a key of its own it gets {})", seen.came()));
    }
    seen.is_success()
}

async fn differs(
    session: &mut Session, id: &'static str, part: Part, scope: Option<ScopePart>, needs: &str,
    change: impl Fn(Request) -> Request,
) -> Result<(), Stop> {
    if !session.wants(id) {
        return Ok(());
    }
    let apart = change(session.fresh());
    if !works(session, id, &apart, needs).await {
        return Ok(());
    }
    let request = session.fresh();
    let differing = change(request.clone());
    let expected = expected(session, &part, scope);
    differs_from(session, id, &request, &differing, expected).await
}

async fn differs_from(
    session: &mut Session, id: &'static str, request: &Request, differing: &Request, expected: Expected,
) -> Result<(), Stop> {
    let first = session.send(request).await;
    let Some(answer) = first.answer.as_ref().ok().filter(|answer| answer.is_success()) else {
        session.found(id, false, "success of the first request", &first);
        return Ok(());
    };
    let before = count(session).await?;
    let second = session.settle(differing).await;
    let ran = ran_since(session, before).await?;
    judge(session, id, expected, answer, &second, ran);
    if matches!(expected, Expected::Refused(_)) {
        session.refusals.push((id, false, second));
    }
    if session.wants("mismatch.keeps-first") {
        let before = count(session).await?;
        let again = session.settle(request).await;
        let ran = ran_since(session, before).await?;
        judge(session, "mismatch.keeps-first", Expected::Same, answer, &again, ran);
    }
    Ok(())
}

/// The same request under the same key, from somebody else.
async fn caller(session: &mut Session) -> Result<(), Stop> {
    const ID: &str = "caller.isolated";
    if !session.wants(ID) {
        return Ok(());
    }
    let mut others = session.plan.other_headers.clone();
    let gives =
        |headers: &[(String, String)], name: &str| headers.iter().any(|(found, _)| found.eq_ignore_ascii_case(name));
    match session.plan.profile.scope_header() {
        // By the profile, who sends the same header is the same caller.
        Some(name) if !gives(&others, name) && gives(&session.plan.headers, name) => {
            session.not_performed(ID, format!("needs the {name} of a second caller: --other-header '{name}: …'"));
            return Ok(());
        }
        Some(name) if !gives(&others, name) => others.push((name.to_owned(), "conform-b".into())),
        None if others.is_empty() => {
            session.not_performed(ID, "needs the credential of a second caller: --other-header 'Authorization: …'");
            return Ok(());
        }
        _ => {}
    }
    let request = session.fresh();
    let other = request.clone().with_headers(&others);
    let key = session.fresh().keys;
    let needs = "needs a second caller who may do this: --other-header 'Authorization: …'";
    if !works(session, ID, &Request { keys: key, ..other.clone() }, needs).await {
        return Ok(());
    }
    differs_from(session, ID, &request, &other, Expected::Own).await
}
