//! First answers, retries of them, and failures.

use serde_json::Value;

use super::{
    super::request::{Request, Seen},
    super::session::{Runs, Session},
    super::wire::Answer,
    Expected, Stop, answered, count, judge, ran_since, times,
};

/// Headers that are part of the answer, not of how it travels.
const DESCRIBING: [&str; 8] = [
    "content-type",
    "content-language",
    "content-location",
    "content-disposition",
    "location",
    "etag",
    "last-modified",
    "link",
];

/// The first operation, with its answer.
pub(super) struct First {
    request: Request,
    seen: Seen,
    answer: Answer,
}

/// A first operation, and another beside it, by which runs can be told apart. `None` if it does not work at all.
pub(super) async fn first(session: &mut Session) -> Result<Option<First>, Stop> {
    let before = count(session).await?;
    let request = session.fresh();
    let seen = session.send(&request).await;
    answered(&seen)?;
    let ran = ran_since(session, before).await?;
    let Some(answer) = seen.answer.as_ref().ok().filter(|answer| answer.is_success()).cloned() else {
        session.found("first.processed", false, "success (2xx)", &seen);
        let why = "the operation does not succeed: give it what it needs with --method, --header and --body";
        session.nothing_else(why);
        return Ok(None);
    };
    if ran.is_some_and(|ran| ran != 1) {
        let why =
            format!("--count-url does not count this operation: a first request moved it by {}", ran.unwrap_or(0));
        return Err(Stop::Usage(why));
    }
    session.marks_all = session.is_marked(&answer);
    let expected = format!("not {}", session.markers());
    session.found("first.unmarked", !session.marks_all, expected, &seen);

    let before = count(session).await?;
    let other = session.fresh();
    let beside = session.send(&other).await;
    let ran = ran_since(session, before).await?;
    if let Ok(second) = &beside.answer {
        session.varies = session.essence(&answer) != session.essence(second);
    }
    // A server that gives one answer to all keys cannot be told from one whose runs are alike, but by a counter.
    match ran {
        None if beside.is_success() && !session.varies => {
            let why = "two keys got the same bytes: either runs are alike, or the key is ignored; name --count-url";
            session.not_performed("first.independent", why);
        }
        ran => {
            let fine = beside.is_success() && ran.is_none_or(|ran| ran == 1);
            session.found("first.independent", fine, format!("success, and a run of its own{}", times(ran)), &beside);
        }
    }
    Ok(Some(First { request, seen, answer }))
}

/// Two retries of the first operation.
pub(super) async fn retry(session: &mut Session, first: First) -> Result<(), Stop> {
    let First { request, seen: sent, answer: first } = first;
    let before = count(session).await?;
    let retries = [session.settle(&request).await, session.settle(&request).await];
    let ran = ran_since(session, before).await?;
    // What is wrong with either of them is shown.
    let wrong = |fine: &dyn Fn(&Answer) -> bool| {
        retries
            .iter()
            .find(|seen| !seen.answer.as_ref().is_ok_and(fine))
            .map_or((true, &retries[0]), |seen| (false, seen))
    };
    // What is on first answers too says nothing.
    let (fine, seen) = wrong(&|answer| session.is_marked(answer) && !session.marks_all);
    let expected = format!("{}, which a first answer does not say", session.markers());
    session.marks = fine && session.plan.profile.marks_replays();
    session.found("replay.marker", fine, expected, seen);

    if !session.has_evidence() {
        let why =
            "every operation gets the same answer, so nothing shows that any ran or was remembered; name --count-url";
        for id in
            ["first.processed", "replay.status", "replay.body", "replay.headers", "replay.once", "concurrent.settles"]
        {
            session.not_performed(id, why);
        }
    }
    if session.wants("first.processed") {
        session.found("first.processed", true, "success (2xx)", &sent);
    }
    retried(session, &sent, &first, &retries, ran);
    Ok(())
}

/// What two retries got, held against the first answer.
fn retried(session: &mut Session, sent: &Seen, first: &Answer, retries: &[Seen; 2], ran: Option<u64>) {
    let wrong = |fine: &dyn Fn(&Answer) -> bool| {
        retries
            .iter()
            .find(|seen| !seen.answer.as_ref().is_ok_and(fine))
            .map_or((true, &retries[0]), |seen| (false, seen))
    };
    let (fine, seen) = wrong(&|answer| answer.status == first.status);
    session.found_unless_reported("replay.status", fine, format!("{}, as first", first.status), seen);
    let (fine, seen) = wrong(&|answer| session.essence(answer) == session.essence(first));
    session.found_unless_reported("replay.body", fine, format!("the first body: {}", sent.came()), seen);
    let (fine, seen) = wrong(&|answer| is_enveloped(first, answer));
    let expected = "metadata.cached true, and originalTimestamp the first timestamp";
    session.found("replay.envelope", fine, expected, seen);
    let lost = |answer: &Answer| DESCRIBING.into_iter().find(|name| !answer.values(name).eq(first.values(name)));
    let (fine, seen) = wrong(&|answer| lost(answer).is_none());
    let expected = match seen.answer.as_ref().ok().and_then(lost) {
        Some(name) => format!("{name}: {}", first.header(name).unwrap_or("(none)")),
        None => "the first answer's headers".into(),
    };
    session.found_unless_reported("replay.headers", fine, expected, seen);
    match first.header("set-cookie") {
        None => session.not_performed("replay.cookies", "the operation sets no cookie"),
        Some(_) => {
            let (fine, seen) = wrong(&|answer| answer.header("set-cookie").is_none());
            session.found("replay.cookies", fine, "no set-cookie", seen);
        }
    }
    let told = |seen: &&Seen| {
        let runs = seen.answer.as_ref().map(|answer| session.same_run(first, answer, ran));
        !matches!(runs, Ok(Runs::Same))
    };
    match retries.iter().find(told) {
        None => session.found("replay.once", true, "no run", &retries[1]),
        Some(seen) => {
            let expected = format!("no run{}", times(ran));
            session.found_unless_reported("replay.once", false, expected, &seen.clone());
        }
    }
}

/// Whether both say in their `metadata` which is the replay of which.
fn is_enveloped(first: &Answer, replay: &Answer) -> bool {
    let of = |answer: &Answer| serde_json::from_slice(&answer.body).unwrap_or(Value::Null)["metadata"].take();
    let (first, replay) = (of(first), of(replay));
    first["cached"] == false
        && replay["cached"] == true
        && first["timestamp"].is_string()
        && replay["originalTimestamp"] == first["timestamp"]
}

/// An operation that fails: its answer is remembered, or a retry runs again.
pub(super) async fn failure(session: &mut Session) -> Result<(), Stop> {
    const ID: &str = "error.answer";
    if !session.wants(ID) {
        return Ok(());
    }
    let fresh = session.fresh();
    let Some(variant) = session.plan.error.take() else {
        session.not_performed(ID, "needs an operation that fails: --error-body or --error-header");
        return Ok(());
    };
    let request = session.varied(fresh, &variant);
    let seen = session.send(&request).await;
    // Whether failures differ from run to run is not what successes do.
    let fresh = session.fresh();
    let other = session.varied(fresh, &variant);
    let beside = session.send(&other).await;
    session.plan.error = Some(variant);
    let (Ok(answer), Ok(beside)) = (&seen.answer, &beside.answer) else {
        session.found(ID, false, "an answer", &seen);
        return Ok(());
    };
    let policy = &session.plan.profile.policy;
    let status = http::StatusCode::from_u16(answer.status).unwrap_or_default();
    if answer.is_success() {
        session
            .not_performed(ID, format!("--error-body and --error-header give {}, which is no failure", answer.status));
        return Ok(());
    }
    if policy.unknown_status.contains(&status) {
        session.not_performed(ID, format!("{} leaves the outcome open; use another failure", answer.status));
        return Ok(());
    }
    let kept = policy.remember.keeps(status);
    let alike = session.essence(answer) == session.essence(beside);
    let varied = std::mem::replace(&mut session.varies, !alike);
    let before = count(session).await?;
    let retry = session.settle(&request).await;
    let ran = ran_since(session, before).await?;
    let (first, answer) = (answer.clone(), retry.answer.clone());
    match (kept, answer) {
        (true, _) => judge(session, ID, Expected::Same, &first, &retry, ran),
        (false, Ok(answer)) => match session.same_run(&first, &answer, ran) {
            Runs::Untold => {
                session.not_performed(ID, "every failure is alike, and no marker tells a replay; name --count-url")
            }
            runs => session.found(ID, runs == Runs::Another, format!("another run{}", times(ran)), &retry),
        },
        (false, Err(_)) => session.found(ID, false, "an answer", &retry),
    }
    session.varies = varied;
    Ok(())
}
