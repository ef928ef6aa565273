//! The checks in their order. Each file has the checks of one kind.

use super::{
    connection::{ExchangeError, RawResponse},
    request::RawExchange,
    session::{ConformSession, RunComparison},
};

mod concurrency;
mod keys;
mod mismatches;
mod problems;
mod replays;

#[derive(Debug)]
pub(super) enum RunAborted {
    Unreachable(String),
    /// The arguments cannot work.
    Usage(String),
}

/// Runs every check of the profile. Stops early if the operation itself does not work.
pub(super) async fn run_all(session: &mut ConformSession) -> Result<(), RunAborted> {
    let Some(first) = replays::run_first(session).await? else { return Ok(()) };
    replays::check_retries(session, first).await?;
    mismatches::check_all(session).await?;
    concurrency::check_bursts(session).await?;
    concurrency::check_disconnect(session).await?;
    replays::check_failure(session).await?;
    keys::check_all(session).await?;
    keys::check_get(session).await?;
    problems::check_all(session);
    Ok(())
}

/// Returns how often the operation ran since `before`.
async fn ran_since(session: &mut ConformSession, before: Option<u64>) -> Result<Option<u64>, RunAborted> {
    let after = count(session).await?;
    Ok(before.zip(after).map(|(before, after)| after.saturating_sub(before)))
}

async fn count(session: &mut ConformSession) -> Result<Option<u64>, RunAborted> {
    session.execution_count().await.map_err(RunAborted::Usage)
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
    session: &mut ConformSession, id: &str, expected: ExpectedOutcome, first: &RawResponse, second: &RawExchange,
    ran: Option<u64>,
) {
    let told = "nothing tells one run from another; name --count-url";
    let Ok(answer) = &second.response else {
        return session.report_exchange(id, false, "an answer", second);
    };
    let runs = session.compare_runs(first, answer, ran);
    match expected {
        ExpectedOutcome::Refused(status) => {
            let fine = answer.status == status && ran.unwrap_or(0) == 0;
            let expected = format!("{status}, and no run{}", format_run_count(ran));
            session.report_exchange(id, fine, expected, second);
        }
        ExpectedOutcome::OwnRun if !answer.is_success() => {
            session.report_exchange(id, false, "a run of its own, with success", second)
        }
        ExpectedOutcome::Replay if answer.status != first.status => {
            session.report_exchange(id, false, format!("the first answer, {}", first.status), second);
        }
        ExpectedOutcome::OwnRun => match runs {
            RunComparison::Undetermined => session.report_not_performed(id, told),
            runs => session.report_exchange(
                id,
                runs == RunComparison::AnotherRun,
                format!("a run of its own{}", format_run_count(ran)),
                second,
            ),
        },
        ExpectedOutcome::Replay => match runs {
            RunComparison::Undetermined => session.report_not_performed(id, told),
            runs => {
                let fine =
                    runs == RunComparison::SameRun && session.comparable_body(first) == session.comparable_body(answer);
                session.report_exchange(
                    id,
                    fine,
                    format!("the first answer, and no run{}", format_run_count(ran)),
                    second,
                );
            }
        },
    }
}

/// `(it ran 2 times)`.
fn format_run_count(ran: Option<u64>) -> String {
    match ran {
        None => String::new(),
        Some(1) => " (it ran once)".into(),
        Some(ran) => format!(" (it ran {ran} times)"),
    }
}

/// Requires a response; ends the run if the server is gone.
fn require_answer(seen: &RawExchange) -> Result<(), RunAborted> {
    match &seen.response {
        Err(ExchangeError::Unreachable(why)) => Err(RunAborted::Unreachable(why.clone())),
        _ => Ok(()),
    }
}
