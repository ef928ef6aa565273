//! The checks, in the order in which they are made: each file has those of one kind.

use super::{
    request::Seen,
    session::{Runs, Session},
    wire::{Answer, Broken},
};

mod concurrency;
mod differences;
mod keys;
mod problems;
mod replays;

/// Why the run ended early.
#[derive(Debug)]
pub(super) enum Stop {
    /// Nobody is there.
    Unreachable(String),
    /// It was asked for in a way that cannot work.
    Usage(String),
}

/// Every check of the profile. They stop early if the operation itself does not work.
pub(super) async fn all(session: &mut Session) -> Result<(), Stop> {
    let Some(first) = replays::first(session).await? else { return Ok(()) };
    replays::retry(session, first).await?;
    differences::all(session).await?;
    concurrency::burst(session).await?;
    concurrency::disconnect(session).await?;
    replays::failure(session).await?;
    keys::all(session).await?;
    keys::get(session).await?;
    problems::all(session);
    Ok(())
}

/// How often the operation ran since `before`.
async fn ran_since(session: &mut Session, before: Option<u64>) -> Result<Option<u64>, Stop> {
    let after = count(session).await?;
    Ok(before.zip(after).map(|(before, after)| after.saturating_sub(before)))
}

async fn count(session: &mut Session) -> Result<Option<u64>, Stop> {
    session.count().await.map_err(Stop::Usage)
}

/// What the second of two requests may get.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Expected {
    /// A refusal with this status, and no run.
    Refused(u16),
    /// Its own run.
    Own,
    /// The first's answer.
    Same,
}

/// Judges the second of two requests, of which the first ran.
fn judge(session: &mut Session, id: &str, expected: Expected, first: &Answer, second: &Seen, ran: Option<u64>) {
    let told = "nothing tells one run from another; name --count-url";
    let Ok(answer) = &second.answer else {
        return session.found(id, false, "an answer", second);
    };
    let runs = session.same_run(first, answer, ran);
    match expected {
        Expected::Refused(status) => {
            let fine = answer.status == status && ran.unwrap_or(0) == 0;
            let expected = format!("{status}, and no run{}", times(ran));
            session.found(id, fine, expected, second);
        }
        Expected::Own if !answer.is_success() => session.found(id, false, "a run of its own, with success", second),
        Expected::Same if answer.status != first.status => {
            session.found(id, false, format!("the first answer, {}", first.status), second);
        }
        Expected::Own => match runs {
            Runs::Untold => session.not_performed(id, told),
            runs => session.found(id, runs == Runs::Another, format!("a run of its own{}", times(ran)), second),
        },
        Expected::Same => match runs {
            Runs::Untold => session.not_performed(id, told),
            runs => {
                let fine = runs == Runs::Same && session.essence(first) == session.essence(answer);
                session.found(id, fine, format!("the first answer, and no run{}", times(ran)), second);
            }
        },
    }
}

/// `(it ran 2 times)`.
fn times(ran: Option<u64>) -> String {
    match ran {
        None => String::new(),
        Some(1) => " (it ran once)".into(),
        Some(ran) => format!(" (it ran {ran} times)"),
    }
}

/// An answer, or the end of the run: whoever was there has gone.
fn answered(seen: &Seen) -> Result<(), Stop> {
    match &seen.answer {
        Err(Broken::Unreachable(why)) => Err(Stop::Unreachable(why.clone())),
        _ => Ok(()),
    }
}
