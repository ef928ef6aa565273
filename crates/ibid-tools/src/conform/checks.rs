//! The checks in their order. Each file has the checks of one kind.

use bytes::Bytes;
use http::{Response, header};
use ibid::policy::RefusalFormat;
use serde_json::Value;

use super::{
    connection::ExchangeError,
    connection::{RawExchange, header_of},
    session::{ConformSession, RunComparison},
};
use crate::CommandError;

mod concurrency;
mod keys;
mod protocols;
mod replays;

const NO_EVIDENCE: &str = "nothing tells one run from another; name --count-url";
const NEEDS_SLOW: &str = "needs an operation that takes a second or more: --slow-body or --slow-header";

/// Runs every check of the profile. Stops early if the operation itself does not work.
pub(super) async fn run_all(session: &mut ConformSession<'_>) -> Result<(), CommandError> {
    let Some(first) = replays::run_first(session).await? else { return Ok(()) };
    replays::check_retries(session, first).await?;
    keys::check_other_requests(session).await?;
    concurrency::check_bursts(session).await?;
    concurrency::check_disconnect(session).await?;
    replays::check_failure(session).await?;
    keys::check_all(session).await?;
    keys::check_get(session).await;
    protocols::check_echo(session).await;
    protocols::check_lifetime(session).await;
    check_problems(session);
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ExpectedOutcome {
    /// A refusal with this status, and no run.
    Refused(u16),
    OwnRun,
    /// The first request's response.
    Replay,
}

/// Judges the second of two requests. The first one ran.
fn judge_second(
    session: &mut ConformSession<'_>, id: &str, expected: ExpectedOutcome, first: &Response<Bytes>,
    second: &RawExchange, ran: Option<u64>,
) {
    let Ok(answer) = &second.response else { return session.report(id, false, "an answer", second) };
    let runs = session.compare_runs(first, answer, ran);
    let times = format_run_count(ran);
    let (fine, expected) = match expected {
        ExpectedOutcome::Refused(status) => {
            (answer.status() == status && ran.unwrap_or(0) == 0, format!("{status}, and no run{times}"))
        }
        ExpectedOutcome::OwnRun if !answer.status().is_success() => (false, "a run of its own, with success".into()),
        ExpectedOutcome::Replay if answer.status() != first.status() => {
            (false, format!("the first answer, {}", first.status().as_u16()))
        }
        _ if runs == RunComparison::Undetermined => return session.skip(id, NO_EVIDENCE),
        ExpectedOutcome::OwnRun => (runs == RunComparison::AnotherRun, format!("a run of its own{times}")),
        ExpectedOutcome::Replay => {
            let same = session.comparable_body(first) == session.comparable_body(answer);
            (runs == RunComparison::SameRun && same, format!("the first answer, and no run{times}"))
        }
    };
    session.report(id, fine, expected, second);
}

/// `(it ran 2 times)`.
pub(super) fn format_run_count(ran: Option<u64>) -> String {
    match ran {
        None => String::new(),
        Some(1) => " (it ran once)".into(),
        Some(ran) => format!(" (it ran {ran} times)"),
    }
}

/// Ends the run if the server is gone.
pub(super) fn require_reachable(seen: &RawExchange) -> Result<(), CommandError> {
    match &seen.response {
        Err(gone @ ExchangeError::Unreachable(_)) => Err(gone.clone().into()),
        _ => Ok(()),
    }
}

fn check_problems(session: &mut ConformSession<'_>) {
    let refusals = std::mem::take(&mut session.refusals);
    let format = session.policy.refusals;
    let shape = |id: &str, answer: &Response<Bytes>| find_problem_error(id, answer, format);
    let link = |_: &str, answer: &Response<Bytes>| {
        (!has_documentation_link(answer)).then(|| "a Link header, or a problem whose type is an address".to_owned())
    };
    let answers = |only_of_keys: bool| {
        let wanted = refusals.iter().filter(move |(_, of_key, _)| *of_key || !only_of_keys);
        wanted.filter_map(|(id, _, seen)| Some((id, seen, seen.response.as_ref().ok()?)))
    };
    type FindError<'a> = &'a dyn Fn(&str, &Response<Bytes>) -> Option<String>;
    let checks: [(_, _, _, _, FindError<'_>); 2] = [
        ("problem.shape", false, format.media_type(), "no refusal was seen", &shape),
        ("problem.link", true, "a link", "no key was refused", &link),
    ];
    for (check, only_of_keys, expected, without, find_error) in checks {
        let wrong = answers(only_of_keys).find_map(|(id, seen, answer)| Some((id, seen, find_error(id, answer)?)));
        match (answers(only_of_keys).next(), wrong) {
            (None, _) => session.skip(check, without),
            (Some((_, any, _)), None) => session.report(check, true, expected, any),
            (Some(_), Some((id, seen, why))) => session.report(check, false, format!("{why} (seen in {id})"), seen),
        }
    }
}

fn find_problem_error(id: &str, answer: &Response<Bytes>, refusals: RefusalFormat) -> Option<String> {
    let kind = header_of(answer, "content-type").unwrap_or_default().split(';').next().unwrap_or_default().trim();
    if !kind.eq_ignore_ascii_case(refusals.media_type()) {
        return Some(format!("content-type: {}", refusals.media_type()));
    }
    let Ok(Value::Object(problem)) = serde_json::from_slice(answer.body()) else {
        return Some("a JSON object".into());
    };
    let status = answer.status().as_u16();
    if refusals != RefusalFormat::Problem {
        return protocols::find_error(id, status, &Value::Object(problem), refusals);
    }
    if problem.get("status").is_some_and(|found| *found != status) {
        return Some(format!("the status of the answer, {status}, in the problem's status"));
    }
    let text = |name: &str| problem.get(name).and_then(Value::as_str).is_some_and(|text| !text.is_empty());
    ["type", "title", "detail"].into_iter().find(|name| !text(name)).map(|name| format!("a {name} in the problem"))
}

fn has_documentation_link(answer: &Response<Bytes>) -> bool {
    let mut links = answer.headers().get_all(header::LINK).iter().filter_map(|link| link.to_str().ok());
    let problem: Value = serde_json::from_slice(answer.body()).unwrap_or_default();
    let kind = problem["type"].as_str().unwrap_or_default();
    links.any(|link| link.contains("describedby") || link.contains("help"))
        || kind.contains('/') && kind != "about:blank"
}
