//! Checks of first responses, of retries and of failures.

use serde_json::Value;

use super::{
    super::connection::RawResponse,
    super::request::{RawExchange, RawRequest},
    super::session::{ConformSession, RunComparison},
    ExpectedOutcome, RunAborted, count, format_run_count, judge_second, ran_since, require_answer,
};

/// Headers that belong to the representation, not to the transport.
const REPRESENTATION_HEADERS: [&str; 8] = [
    "content-type",
    "content-language",
    "content-location",
    "content-disposition",
    "location",
    "etag",
    "last-modified",
    "link",
];

pub(super) struct FirstOperation {
    request: RawRequest,
    seen: RawExchange,
    answer: RawResponse,
}

/// Runs a first operation, and another one to compare runs with. `None` if the operation does not work.
pub(super) async fn run_first(session: &mut ConformSession) -> Result<Option<FirstOperation>, RunAborted> {
    let before = count(session).await?;
    let request = session.new_operation();
    let seen = session.send(&request).await;
    require_answer(&seen)?;
    let ran = ran_since(session, before).await?;
    let Some(answer) = seen.response.as_ref().ok().filter(|answer| answer.is_success()).cloned() else {
        session.report_exchange("first.processed", false, "success (2xx)", &seen);
        let why = "the operation does not succeed: give it what it needs with --method, --header and --body";
        session.report_rest_not_performed(why);
        return Ok(None);
    };
    if ran.is_some_and(|ran| ran != 1) {
        let why =
            format!("--count-url does not count this operation: a first request moved it by {}", ran.unwrap_or(0));
        return Err(RunAborted::Usage(why));
    }
    session.marks_first_answers = session.is_marked_as_replay(&answer);
    let expected = format!("not {}", session.markers());
    session.report_exchange("first.unmarked", !session.marks_first_answers, expected, &seen);

    let before = count(session).await?;
    let other = session.new_operation();
    let beside = session.send(&other).await;
    let ran = ran_since(session, before).await?;
    if let Ok(second) = &beside.response {
        session.has_varying_bodies = session.comparable_body(&answer) != session.comparable_body(second);
    }
    // Without a counter, a server that returns one response for all keys looks like one whose runs are identical.
    match ran {
        None if beside.is_success() && !session.has_varying_bodies => {
            let why = "two keys got the same bytes: either runs are alike, or the key is ignored; name --count-url";
            session.report_not_performed("first.independent", why);
        }
        ran => {
            let fine = beside.is_success() && ran.is_none_or(|ran| ran == 1);
            session.report_exchange(
                "first.independent",
                fine,
                format!("success, and a run of its own{}", format_run_count(ran)),
                &beside,
            );
        }
    }
    Ok(Some(FirstOperation { request, seen, answer }))
}

/// Retries the first operation twice.
pub(super) async fn check_retries(session: &mut ConformSession, first: FirstOperation) -> Result<(), RunAborted> {
    let FirstOperation { request, seen: sent, answer: first } = first;
    let before = count(session).await?;
    let retries = [session.send_until_settled(&request).await, session.send_until_settled(&request).await];
    let ran = ran_since(session, before).await?;
    // Reports the first retry that is wrong.
    let wrong = |fine: &dyn Fn(&RawResponse) -> bool| {
        retries
            .iter()
            .find(|seen| !seen.response.as_ref().is_ok_and(fine))
            .map_or((true, &retries[0]), |seen| (false, seen))
    };
    // A marker that is also on first responses proves nothing.
    let (fine, seen) = wrong(&|answer| session.is_marked_as_replay(answer) && !session.marks_first_answers);
    let expected = format!("{}, which a first answer does not say", session.markers());
    session.has_marked_replay = fine && session.plan.profile.has_replay_marker();
    session.report_exchange("replay.marker", fine, expected, seen);

    if !session.has_evidence() {
        let why =
            "every operation gets the same answer, so nothing shows that any ran or was remembered; name --count-url";
        for id in
            ["first.processed", "replay.status", "replay.body", "replay.headers", "replay.once", "concurrent.settles"]
        {
            session.report_not_performed(id, why);
        }
    }
    if session.is_pending("first.processed") {
        session.report_exchange("first.processed", true, "success (2xx)", &sent);
    }
    compare_retries(session, &sent, &first, &retries, ran);
    Ok(())
}

/// Compares the responses of two retries with the first response.
fn compare_retries(
    session: &mut ConformSession, sent: &RawExchange, first: &RawResponse, retries: &[RawExchange; 2], ran: Option<u64>,
) {
    let wrong = |fine: &dyn Fn(&RawResponse) -> bool| {
        retries
            .iter()
            .find(|seen| !seen.response.as_ref().is_ok_and(fine))
            .map_or((true, &retries[0]), |seen| (false, seen))
    };
    let (fine, seen) = wrong(&|answer| answer.status == first.status);
    session.report_unless_reported("replay.status", fine, format!("{}, as first", first.status), seen);
    let (fine, seen) = wrong(&|answer| session.comparable_body(answer) == session.comparable_body(first));
    session.report_unless_reported("replay.body", fine, format!("the first body: {}", sent.describe_response()), seen);
    let (fine, seen) = wrong(&|answer| has_replay_metadata(first, answer));
    let expected = "metadata.cached true, and originalTimestamp the first timestamp";
    session.report_exchange("replay.envelope", fine, expected, seen);
    let lost = |answer: &RawResponse| {
        REPRESENTATION_HEADERS.into_iter().find(|name| !answer.values(name).eq(first.values(name)))
    };
    let (fine, seen) = wrong(&|answer| lost(answer).is_none());
    let expected = match seen.response.as_ref().ok().and_then(lost) {
        Some(name) => format!("{name}: {}", first.header(name).unwrap_or("(none)")),
        None => "the first answer's headers".into(),
    };
    session.report_unless_reported("replay.headers", fine, expected, seen);
    match first.header("set-cookie") {
        None => session.report_not_performed("replay.cookies", "the operation sets no cookie"),
        Some(_) => {
            let (fine, seen) = wrong(&|answer| answer.header("set-cookie").is_none());
            session.report_exchange("replay.cookies", fine, "no set-cookie", seen);
        }
    }
    let told = |seen: &&RawExchange| {
        let runs = seen.response.as_ref().map(|answer| session.compare_runs(first, answer, ran));
        !matches!(runs, Ok(RunComparison::SameRun))
    };
    match retries.iter().find(told) {
        None => session.report_exchange("replay.once", true, "no run", &retries[1]),
        Some(seen) => {
            let expected = format!("no run{}", format_run_count(ran));
            session.report_unless_reported("replay.once", false, expected, &seen.clone());
        }
    }
}

/// Whether both responses state in their `metadata` which one is the replay.
fn has_replay_metadata(first: &RawResponse, replay: &RawResponse) -> bool {
    let of = |answer: &RawResponse| serde_json::from_slice(&answer.body).unwrap_or(Value::Null)["metadata"].take();
    let (first, replay) = (of(first), of(replay));
    first["cached"] == false
        && replay["cached"] == true
        && first["timestamp"].is_string()
        && replay["originalTimestamp"] == first["timestamp"]
}

/// Checks an operation that fails: its response is remembered, or a retry runs again.
pub(super) async fn check_failure(session: &mut ConformSession) -> Result<(), RunAborted> {
    const ID: &str = "error.answer";
    if !session.is_pending(ID) {
        return Ok(());
    }
    let fresh = session.new_operation();
    let Some(variant) = session.plan.error.take() else {
        session.report_not_performed(ID, "needs an operation that fails: --error-body or --error-header");
        return Ok(());
    };
    let request = session.apply_variant(fresh, &variant);
    let seen = session.send(&request).await;
    // Successes do not show whether failures differ from run to run.
    let fresh = session.new_operation();
    let other = session.apply_variant(fresh, &variant);
    let beside = session.send(&other).await;
    session.plan.error = Some(variant);
    let (Ok(answer), Ok(beside)) = (&seen.response, &beside.response) else {
        session.report_exchange(ID, false, "an answer", &seen);
        return Ok(());
    };
    let policy = &session.plan.profile.policy;
    let status = http::StatusCode::from_u16(answer.status).unwrap_or_default();
    if answer.is_success() {
        session.report_not_performed(
            ID,
            format!("--error-body and --error-header give {}, which is no failure", answer.status),
        );
        return Ok(());
    }
    if policy.unknown_status.contains(&status) {
        session.report_not_performed(ID, format!("{} leaves the outcome open; use another failure", answer.status));
        return Ok(());
    }
    let kept = policy.remember.matches(status);
    let alike = session.comparable_body(answer) == session.comparable_body(beside);
    let varied = std::mem::replace(&mut session.has_varying_bodies, !alike);
    let before = count(session).await?;
    let retry = session.send_until_settled(&request).await;
    let ran = ran_since(session, before).await?;
    let (first, answer) = (answer.clone(), retry.response.clone());
    match (kept, answer) {
        (true, _) => judge_second(session, ID, ExpectedOutcome::Replay, &first, &retry, ran),
        (false, Ok(answer)) => match session.compare_runs(&first, &answer, ran) {
            RunComparison::Undetermined => session
                .report_not_performed(ID, "every failure is alike, and no marker tells a replay; name --count-url"),
            runs => session.report_exchange(
                ID,
                runs == RunComparison::AnotherRun,
                format!("another run{}", format_run_count(ran)),
                &retry,
            ),
        },
        (false, Err(_)) => session.report_exchange(ID, false, "an answer", &retry),
    }
    session.has_varying_bodies = varied;
    Ok(())
}
