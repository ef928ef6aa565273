//! Checks of first responses, of retries and of failures.

use bytes::Bytes;
use http::Response;
use serde_json::Value;

use super::{
    super::{
        connection::{RawExchange, RawRequest, header_of},
        session::{ConformSession, RunComparison},
    },
    ExpectedOutcome, format_run_count, judge_second, require_reachable,
};
use crate::CommandError;

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
    answer: Response<Bytes>,
}

/// Runs a first operation, and another one to compare runs with. `None` if the operation does not work.
pub(super) async fn run_first(session: &mut ConformSession<'_>) -> Result<Option<FirstOperation>, CommandError> {
    let request = session.new_operation();
    let before = session.execution_count().await?;
    let seen = session.send(&request).await;
    require_reachable(&seen)?;
    let ran = session.ran_since(before).await?;
    let Some(answer) = seen.success().cloned() else {
        session.report("first.processed", false, "success (2xx)", &seen);
        session.skip_rest("the operation does not succeed: give it what it needs with --method, --header and --body");
        return Ok(None);
    };
    if let Some(ran) = ran.filter(|ran| *ran != 1) {
        let why = format!("--count-url does not count this operation: a first request moved it by {ran}");
        return Err(CommandError::Usage(why));
    }
    session.marks_first_answers = session.is_marked_as_replay(&answer);
    let expected = format!("not {}", session.markers());
    session.report("first.unmarked", !session.marks_first_answers, expected, &seen);

    let other = session.new_operation();
    let (beside, ran) = session.send_and_count(&other).await?;
    if let Ok(second) = &beside.response {
        session.has_varying_bodies = session.comparable_body(&answer) != session.comparable_body(second);
    }
    let succeeds = beside.success().is_some();
    // Without a counter, a server that returns one response for all keys looks like one whose runs are identical.
    if ran.is_none() && succeeds && !session.has_varying_bodies {
        let why = "two keys got the same bytes: either runs are alike, or the key is ignored; name --count-url";
        session.skip("first.independent", why);
    } else {
        let expected = format!("success, and a run of its own{}", format_run_count(ran));
        session.report("first.independent", succeeds && ran.is_none_or(|ran| ran == 1), expected, &beside);
    }
    Ok(Some(FirstOperation { request, seen, answer }))
}

/// Finds the first retry that is wrong. Returns whether there is none, and the retry to show.
fn find_wrong(retries: &[RawExchange; 2], fine: impl Fn(&Response<Bytes>) -> bool) -> (bool, &RawExchange) {
    let wrong = retries.iter().find(|seen| !seen.response.as_ref().is_ok_and(&fine));
    (wrong.is_none(), wrong.unwrap_or(&retries[0]))
}

pub(super) async fn check_retries(session: &mut ConformSession<'_>, first: FirstOperation) -> Result<(), CommandError> {
    let FirstOperation { request, seen: sent, answer: first } = first;
    let before = session.execution_count().await?;
    let retries = [session.retry(&request).await, session.retry(&request).await];
    let ran = session.ran_since(before).await?;
    // A marker that is also on first responses proves nothing.
    let marked = |answer: &_| session.is_marked_as_replay(answer) && !session.marks_first_answers;
    let (fine, seen) = find_wrong(&retries, marked);
    let expected = format!("{}, which a first answer does not say", session.markers());
    session.has_marked_replay = fine && !session.policy.replay_headers.is_empty();
    session.report("replay.marker", fine, expected, seen);

    if !session.has_evidence() {
        let why =
            "every operation gets the same answer, so nothing shows that any ran or was remembered; name --count-url";
        for id in
            ["first.processed", "replay.status", "replay.body", "replay.headers", "replay.once", "concurrent.settles"]
        {
            session.skip(id, why);
        }
    }
    session.report_once("first.processed", true, "success (2xx)", &sent);
    compare_retries(session, &sent, &first, &retries, ran);
    Ok(())
}

fn compare_retries(
    session: &mut ConformSession<'_>, sent: &RawExchange, first: &Response<Bytes>, retries: &[RawExchange; 2],
    ran: Option<u64>,
) {
    let (fine, seen) = find_wrong(retries, |answer| answer.status() == first.status());
    session.report_once("replay.status", fine, format!("{}, as first", first.status().as_u16()), seen);
    let body = session.comparable_body(first);
    let (fine, seen) = find_wrong(retries, |answer| session.comparable_body(answer) == body);
    session.report_once("replay.body", fine, format!("the first body: {}", sent.describe_response()), seen);
    let (fine, seen) = find_wrong(retries, |answer| has_replay_metadata(first, answer));
    let expected = "metadata.cached true, and originalTimestamp the first timestamp";
    session.report("replay.envelope", fine, expected, seen);
    let lost = |answer: &Response<Bytes>| {
        let values = |answer: &Response<Bytes>, name| answer.headers().get_all(name).into_iter().cloned().collect();
        REPRESENTATION_HEADERS.into_iter().find(|name| {
            let (first, replayed): (Vec<_>, Vec<_>) = (values(first, *name), values(answer, *name));
            first != replayed
        })
    };
    let (fine, seen) = find_wrong(retries, |answer| lost(answer).is_none());
    let expected = match seen.response.as_ref().ok().and_then(lost) {
        Some(name) => format!("{name}: {}", header_of(first, name).unwrap_or("(none)")),
        None => "the first answer's headers".into(),
    };
    session.report_once("replay.headers", fine, expected, seen);
    if first.headers().contains_key("set-cookie") {
        let (fine, seen) = find_wrong(retries, |answer| !answer.headers().contains_key("set-cookie"));
        session.report("replay.cookies", fine, "no set-cookie", seen);
    } else {
        session.skip("replay.cookies", "the operation sets no cookie");
    }
    let once = |answer: &_| session.compare_runs(first, answer, ran) == RunComparison::SameRun;
    match find_wrong(retries, once) {
        (true, _) => session.report("replay.once", true, "no run", &retries[1]),
        (false, seen) => session.report_once("replay.once", false, format!("no run{}", format_run_count(ran)), seen),
    }
}

/// Whether both responses state in their `metadata` which one is the replay.
fn has_replay_metadata(first: &Response<Bytes>, replay: &Response<Bytes>) -> bool {
    let of = |answer: &Response<Bytes>| serde_json::from_slice(answer.body()).unwrap_or(Value::Null)["metadata"].take();
    let (first, replay) = (of(first), of(replay));
    first["cached"] == false
        && replay["cached"] == true
        && first["timestamp"].is_string()
        && replay["originalTimestamp"] == first["timestamp"]
}

/// Checks an operation that fails: its response is remembered, or a retry runs again.
pub(super) async fn check_failure(session: &mut ConformSession<'_>) -> Result<(), CommandError> {
    const ID: &str = "error.answer";
    if session.error.is_none() {
        session.skip(ID, "needs an operation that fails: --error-body or --error-header");
    }
    if !session.is_pending(ID) {
        return Ok(());
    }
    let request = session.new_variant(session.error.clone());
    let seen = session.send(&request).await;
    // Successes do not show whether failures differ from run to run.
    let other = session.new_variant(session.error.clone());
    let beside = session.send(&other).await;
    let (Ok(first), Ok(beside)) = (&seen.response, &beside.response) else {
        session.report(ID, false, "an answer", &seen);
        return Ok(());
    };
    let status = first.status();
    if status.is_success() {
        let why = format!("--error-body and --error-header give {}, which is no failure", status.as_u16());
        session.skip(ID, why);
        return Ok(());
    }
    if session.policy.unknown_status.contains(&status) {
        session.skip(ID, format!("{} leaves the outcome open; use another failure", status.as_u16()));
        return Ok(());
    }
    let alike = session.comparable_body(first) == session.comparable_body(beside);
    let varied = std::mem::replace(&mut session.has_varying_bodies, !alike);
    let (retry, ran) = session.retry_and_count(&request).await?;
    match &retry.response {
        _ if session.policy.remember.matches(status) => {
            judge_second(session, ID, ExpectedOutcome::Replay, first, &retry, ran);
        }
        Ok(answer) => match session.compare_runs(first, answer, ran) {
            RunComparison::Undetermined => {
                session.skip(ID, "every failure is alike, and no marker tells a replay; name --count-url");
            }
            runs => {
                let expected = format!("another run{}", format_run_count(ran));
                session.report(ID, runs == RunComparison::AnotherRun, expected, &retry);
            }
        },
        Err(_) => session.report(ID, false, "an answer", &retry),
    }
    session.has_varying_bodies = varied;
    Ok(())
}
