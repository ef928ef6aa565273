//! The checks in their order. Each file has the checks of one kind.

use bytes::Bytes;
use http::Response;

use super::{
    connection::ExchangeError,
    request::RawExchange,
    session::{ConformSession, RunComparison},
};
use crate::CommandError;

mod concurrency;
mod keys;
mod mismatches;
mod problems;
mod replays;

const NO_EVIDENCE: &str = "nothing tells one run from another; name --count-url";
const NEEDS_SLOW: &str = "needs an operation that takes a second or more: --slow-body or --slow-header";

/// Runs every check of the profile. Stops early if the operation itself does not work.
pub(super) async fn run_all(session: &mut ConformSession<'_>) -> Result<(), CommandError> {
    let Some(first) = replays::run_first(session).await? else { return Ok(()) };
    replays::check_retries(session, first).await?;
    mismatches::check_all(session).await?;
    concurrency::check_bursts(session).await?;
    concurrency::check_disconnect(session).await?;
    replays::check_failure(session).await?;
    keys::check_all(session).await?;
    keys::check_get(session).await;
    problems::check_all(session);
    Ok(())
}

/// The expected result of the second of two requests.
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
fn format_run_count(ran: Option<u64>) -> String {
    match ran {
        None => String::new(),
        Some(1) => " (it ran once)".into(),
        Some(ran) => format!(" (it ran {ran} times)"),
    }
}

/// Ends the run if the server is gone.
fn require_reachable(seen: &RawExchange) -> Result<(), CommandError> {
    match &seen.response {
        Err(gone @ ExchangeError::Unreachable(_)) => Err(gone.clone().into()),
        _ => Ok(()),
    }
}
