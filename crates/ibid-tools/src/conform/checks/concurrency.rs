//! Checks with concurrent requests and with clients that disconnect.

use std::collections::{BTreeMap, BTreeSet};

use ibid::{RefusalReason, policy::OnConcurrent};

use super::{
    super::{
        connection::{RawExchange, RawRequest, header_of},
        session::ConformSession,
    },
    NEEDS_SLOW, NO_EVIDENCE, format_run_count, require_reachable,
};
use crate::CommandError;

const DISCONNECT_AFTER: std::time::Duration = std::time::Duration::from_millis(300);

#[derive(Default)]
struct BurstFindings {
    /// A burst that ran more than once: the request, its responses, and how often.
    double_run: Option<(String, String, Option<u64>)>,
    is_inconclusive: bool,
    refused: Option<RawExchange>,
    /// A response that is neither the answer nor the conflict.
    unexpected: Option<RawExchange>,
}

pub(super) async fn check_bursts(session: &mut ConformSession<'_>) -> Result<(), CommandError> {
    if !session.is_pending("concurrent.one-run") {
        return Ok(());
    }
    let mut seen = BurstFindings::default();
    for round in 1..=session.args.rounds {
        let request = session.new_variant(session.slow.clone());
        let before = session.execution_count().await?;
        let answers = send_concurrently(session, &request).await;
        answers.iter().try_for_each(require_reachable)?;
        let settled = session.retry(&request).await;
        let ran = session.ran_since(before).await?;
        record_burst(session, &mut seen, &answers, &settled, ran);
        if round == session.args.rounds {
            check_settled(session, &answers, &settled, ran);
        }
        if session.is_past_deadline() {
            break;
        }
    }
    report_bursts(session, seen);
    Ok(())
}

/// Sends the same request on many connections. All of them are open before the first byte is sent.
async fn send_concurrently(session: &mut ConformSession<'_>, request: &RawRequest) -> Vec<RawExchange> {
    let bytes = request.to_bytes(&session.server.authority);
    let mut lines = Vec::new();
    for _ in 0..session.args.parallel {
        lines.push(session.server.connect().await);
    }
    session.requests += lines.len();
    let mut tasks = tokio::task::JoinSet::new();
    for line in lines {
        let (server, bytes) = (session.server.clone(), bytes.clone());
        tasks.spawn(async move { server.exchange_on(line?, &bytes).await });
    }
    let sent = format!("{} times at once: {}", session.args.parallel, request.redacted());
    tasks.join_all().await.into_iter().map(|response| RawExchange { request: sent.clone(), response }).collect()
}

fn record_burst(
    session: &ConformSession<'_>, bursts: &mut BurstFindings, answers: &[RawExchange], settled: &RawExchange,
    ran: Option<u64>,
) {
    let successes: Vec<_> = answers.iter().chain([settled]).filter_map(RawExchange::success).collect();
    let twice = match ran {
        Some(ran) => ran != 1,
        None if session.has_varying_bodies => {
            successes.iter().map(|answer| session.comparable_body(answer)).collect::<BTreeSet<_>>().len() > 1
        }
        // Each run has one response that is not marked as a replay.
        None if session.has_marked_replay => {
            successes.iter().filter(|answer| !session.is_marked_as_replay(answer)).count() > 1
        }
        None => {
            bursts.is_inconclusive = true;
            false
        }
    };
    if twice && bursts.double_run.is_none() {
        bursts.double_run = Some((settled.request.clone(), summarize_responses(session, answers), ran));
    }
    for seen in answers {
        match seen.status() {
            Some(200..300) => {}
            Some(status) if status == session.status_of(RefusalReason::InProgress) => {
                bursts.refused.get_or_insert_with(|| seen.clone());
            }
            _ => {
                bursts.unexpected.get_or_insert_with(|| seen.clone());
            }
        }
    }
}

/// `1 × 201, 9 × 409; 3 different bodies of success`.
fn summarize_responses(session: &ConformSession<'_>, answers: &[RawExchange]) -> String {
    let mut statuses = BTreeMap::new();
    for seen in answers {
        let name = seen.status().map_or_else(|| seen.describe_response(), |status| status.to_string());
        *statuses.entry(name).or_insert(0) += 1;
    }
    let successes = answers.iter().filter_map(RawExchange::success);
    let bodies: BTreeSet<_> = successes.map(|answer| session.comparable_body(answer)).collect();
    let statuses: Vec<_> = statuses.into_iter().map(|(status, count)| format!("{count} × {status}")).collect();
    format!("{}; {} different bodies of success", statuses.join(", "), bodies.len())
}

/// Checks that the key then returns the response of the run.
fn check_settled(session: &mut ConformSession<'_>, answers: &[RawExchange], settled: &RawExchange, ran: Option<u64>) {
    const ID: &str = "concurrent.settles";
    let Some(won) = answers.iter().find_map(RawExchange::success) else {
        return session.report(ID, false, "one success among the answers", settled);
    };
    if settled.response.is_err() {
        return session.report(ID, false, "an answer", settled);
    }
    let same = |answer: &_| session.comparable_body(won) == session.comparable_body(answer);
    let fine = settled.success().is_some_and(same);
    session.report_once(ID, fine, format!("the answer of the one that ran{}", format_run_count(ran)), settled);
}

fn report_bursts(session: &mut ConformSession<'_>, bursts: BurstFindings) {
    let BurstFindings { double_run, is_inconclusive, refused, unexpected } = bursts;
    match double_run {
        Some((sent, came, ran)) => {
            let expected = format!("one run{}", format_run_count(ran));
            session.report_text("concurrent.one-run", false, expected, sent, came);
        }
        None if is_inconclusive => session.skip("concurrent.one-run", NO_EVIDENCE),
        None => {
            let sent = format!("{} × {} requests at once", session.args.rounds, session.args.parallel);
            session.report_text("concurrent.one-run", true, "one run", sent, String::new());
        }
    }
    if session.policy.on_concurrent == OnConcurrent::Wait {
        // Who waited too long may be told to come back, if the protocol allows it.
        let refused = refused.filter(|seen| {
            let after = seen.response.as_ref().ok().and_then(|answer| header_of(answer, "retry-after"));
            !session.args.profile.is_third_party() || after.is_none()
        });
        return match unexpected.or(refused) {
            Some(seen) => session.report("concurrent.waits", false, "the answer of the one that runs", &seen),
            None if session.slow.is_none() => session.skip("concurrent.waits", NEEDS_SLOW),
            None => session.report_text("concurrent.waits", true, "", String::new(), String::new()),
        };
    }
    const ID: &str = "concurrent.refused";
    let status = session.status_of(RefusalReason::InProgress).to_string();
    match (unexpected, &refused) {
        (Some(seen), _) => session.report(ID, false, format!("{status}, or the answer"), &seen),
        (None, Some(seen)) => session.report(ID, true, status, seen),
        (None, None) if session.slow.is_some() => {
            session.report_text(ID, false, status, String::new(), "no request was refused".into());
        }
        (None, None) => {
            let why =
                "no two requests met: needs --slow-body or --slow-header, an operation that takes a second or more";
            session.skip(ID, why);
        }
    }
    let Some(seen) = refused else {
        return session.skip("concurrent.retry-after", "no request was refused as a conflict");
    };
    let after = seen.response.as_ref().ok().and_then(|answer| header_of(answer, "retry-after"));
    let fine = after.is_some_and(|after| after.parse::<u64>().is_ok() || after.ends_with("GMT"));
    session.report("concurrent.retry-after", fine, "retry-after: seconds, or a date", &seen);
    session.refusals.push((ID, false, seen));
}

/// Checks a client that disconnects during a slow operation and retries.
pub(super) async fn check_disconnect(session: &mut ConformSession<'_>) -> Result<(), CommandError> {
    const ID: &str = "disconnect.answer";
    if session.slow.is_none() {
        session.skip(ID, NEEDS_SLOW);
    } else if session.counter.is_none() && !session.has_marked_replay {
        session.skip(ID, "nothing tells a replay from a second run of it; name --count-url");
    }
    if !session.is_pending(ID) {
        return Ok(());
    }
    let request = session.new_variant(session.slow.clone());
    let before = session.execution_count().await?;
    let bytes = request.to_bytes(&session.server.authority);
    session.requests += 1;
    if let Err(broken) = session.server.send_and_disconnect(&bytes, DISCONNECT_AFTER).await {
        let seen = RawExchange { request: request.redacted(), response: Err(broken) };
        require_reachable(&seen)?;
        session.report(ID, false, "that the request is taken", &seen);
        return Ok(());
    }
    let mut seen = session.retry(&request).await;
    let ran = session.ran_since(before).await?;
    seen.request = format!("{}, hung up after {DISCONNECT_AFTER:?}; then the same again", seen.request);
    let once = |answer: &_| ran.map_or_else(|| session.is_marked_as_replay(answer), |ran| ran == 1);
    let fine = seen.success().is_some_and(once);
    session.report(ID, fine, format!("success, from the one run{}", format_run_count(ran)), &seen);
    Ok(())
}
