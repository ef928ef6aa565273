//! Checks with concurrent requests and with clients that disconnect.

use std::collections::BTreeSet;

use ibid::OnConcurrent;

use super::{
    super::connection::RawResponse,
    super::request::{RawExchange, RawRequest},
    super::session::ConformSession,
    RunAborted, count, format_run_count, ran_since, require_answer,
};

/// The findings of several bursts.
#[derive(Default)]
struct BurstFindings {
    /// A burst that ran more than once.
    double_run: Option<(String, String, Option<u64>)>,
    /// Whether every burst was conclusive.
    is_conclusive: bool,
    refused: Option<RawExchange>,
    /// A response that is neither the answer nor the conflict.
    unexpected: Option<RawExchange>,
}

pub(super) async fn check_bursts(session: &mut ConformSession) -> Result<(), RunAborted> {
    if !session.is_pending("concurrent.one-run") {
        return Ok(());
    }
    let mut seen = BurstFindings { is_conclusive: true, ..BurstFindings::default() };
    for round in 1..=session.plan.rounds {
        let fresh = session.new_operation();
        let request = with_slow_variant(session, fresh);
        let before = count(session).await?;
        let answers = send_concurrently(session, &request).await;
        answers.iter().try_for_each(require_answer)?;
        let settled = session.send_until_settled(&request).await;
        let ran = ran_since(session, before).await?;
        record_burst(session, &mut seen, &answers, &settled, ran);
        if round == session.plan.rounds {
            check_settled(session, &answers, &settled, ran);
        }
        if session.is_past_deadline() {
            break;
        }
    }
    report_bursts(session, seen);
    Ok(())
}

fn with_slow_variant(session: &mut ConformSession, request: RawRequest) -> RawRequest {
    let Some(variant) = session.plan.slow.take() else { return request };
    let slowed = session.apply_variant(request, &variant);
    session.plan.slow = Some(variant);
    slowed
}

/// Sends the same request on many connections. All of them are open before the first byte is sent.
async fn send_concurrently(session: &mut ConformSession, request: &RawRequest) -> Vec<RawExchange> {
    let bytes = request.to_bytes(&session.plan.server.authority);
    let mut lines = Vec::with_capacity(session.plan.parallel);
    for _ in 0..session.plan.parallel {
        lines.push(session.plan.server.connect().await);
    }
    session.requests += lines.len();
    let mut tasks = tokio::task::JoinSet::new();
    for line in lines {
        let bytes = bytes.clone();
        tasks.spawn(async move { line?.exchange(&bytes).await });
    }
    let sent = format!("{} times at once: {}", session.plan.parallel, request.redacted());
    tasks.join_all().await.into_iter().map(|answer| RawExchange { request: sent.clone(), response: answer }).collect()
}

fn record_burst(
    session: &ConformSession, bursts: &mut BurstFindings, answers: &[RawExchange], settled: &RawExchange,
    ran: Option<u64>,
) {
    let successes: Vec<&RawResponse> = answers
        .iter()
        .chain([settled])
        .filter_map(|seen| seen.response.as_ref().ok())
        .filter(|answer| answer.is_success())
        .collect();
    let different: BTreeSet<_> = successes.iter().map(|answer| session.comparable_body(answer)).collect();
    let unmarked = successes.iter().filter(|answer| !session.is_marked_as_replay(answer)).count();
    let twice = match ran {
        Some(ran) => ran != 1,
        None if session.has_varying_bodies => different.len() > 1,
        // Each run has one response that is not marked as a replay.
        None if session.has_marked_replay => unmarked > 1,
        None => {
            bursts.is_conclusive = false;
            false
        }
    };
    if twice && bursts.double_run.is_none() {
        bursts.double_run = Some((settled.request.clone(), summarize_responses(session, answers), ran));
    }
    for seen in answers {
        match seen.status() {
            Some(status) if status == session.in_progress_status() => {
                bursts.refused.get_or_insert_with(|| seen.clone());
            }
            Some(200..300) => {}
            _ => {
                bursts.unexpected.get_or_insert_with(|| seen.clone());
            }
        }
    }
}

/// `1 × 201, 9 × 409; 3 different bodies of success`.
fn summarize_responses(session: &ConformSession, answers: &[RawExchange]) -> String {
    let mut statuses = std::collections::BTreeMap::new();
    let mut bodies = BTreeSet::new();
    for seen in answers {
        let name = seen.status().map_or_else(|| seen.describe_response(), |status| status.to_string());
        *statuses.entry(name).or_insert(0) += 1;
        if let Ok(answer) = &seen.response
            && answer.is_success()
        {
            bodies.insert(session.comparable_body(answer));
        }
    }
    let statuses: Vec<_> = statuses.into_iter().map(|(status, count)| format!("{count} × {status}")).collect();
    format!("{}; {} different bodies of success", statuses.join(", "), bodies.len())
}

/// Checks that the key then returns the response of the run.
fn check_settled(session: &mut ConformSession, answers: &[RawExchange], settled: &RawExchange, ran: Option<u64>) {
    const ID: &str = "concurrent.settles";
    let won = answers.iter().filter_map(|seen| seen.response.as_ref().ok()).find(|answer| answer.is_success());
    match (won, &settled.response) {
        (None, _) => session.report_exchange(ID, false, "one success among the answers", settled),
        (Some(won), Ok(answer)) => {
            let fine = answer.is_success() && session.comparable_body(won) == session.comparable_body(answer);
            session.report_unless_reported(
                ID,
                fine,
                format!("the answer of the one that ran{}", format_run_count(ran)),
                settled,
            );
        }
        (Some(_), Err(_)) => session.report_exchange(ID, false, "an answer", settled),
    }
}

fn report_bursts(session: &mut ConformSession, bursts: BurstFindings) {
    let BurstFindings { double_run: twice, is_conclusive: told, refused, unexpected: strange } = bursts;
    let sent = format!("{} × {} requests at once", session.plan.rounds, session.plan.parallel);
    match (twice, told) {
        (Some((sent, came, ran)), _) => {
            session.report("concurrent.one-run", false, format!("one run{}", format_run_count(ran)), sent, came);
        }
        (None, false) => {
            let why = "nothing tells one run from another; name --count-url";
            session.report_not_performed("concurrent.one-run", why);
        }
        (None, true) => session.report("concurrent.one-run", true, "one run", sent, String::new()),
    }
    let status = session.in_progress_status();
    if session.plan.profile.policy.on_concurrent == OnConcurrent::Wait {
        match strange.or(refused) {
            Some(seen) => session.report_exchange("concurrent.waits", false, "the answer of the one that runs", &seen),
            None if session.plan.slow.is_none() => {
                let why = "needs an operation that takes a second or more: --slow-body or --slow-header";
                session.report_not_performed("concurrent.waits", why);
            }
            None => session.report("concurrent.waits", true, "", String::new(), String::new()),
        }
        return;
    }
    match (&strange, &refused) {
        (Some(seen), _) => {
            session.report_exchange("concurrent.refused", false, format!("{status}, or the answer"), seen)
        }
        (None, Some(seen)) => session.report_exchange("concurrent.refused", true, status.to_string(), seen),
        (None, None) if session.plan.slow.is_some() => {
            session.report(
                "concurrent.refused",
                false,
                status.to_string(),
                String::new(),
                "no request was refused".into(),
            );
        }
        (None, None) => {
            let why =
                "no two requests met: needs --slow-body or --slow-header, an operation that takes a second or more";
            session.report_not_performed("concurrent.refused", why);
        }
    }
    match refused {
        None => session.report_not_performed("concurrent.retry-after", "no request was refused as a conflict"),
        Some(seen) => {
            let after = seen.response.as_ref().ok().and_then(|answer| answer.header("retry-after"));
            let fine = after.is_some_and(|after| after.parse::<u64>().is_ok() || after.ends_with("GMT"));
            session.report_exchange("concurrent.retry-after", fine, "retry-after: seconds, or a date", &seen);
            session.refusals.push(("concurrent.refused", false, seen));
        }
    }
}

/// Checks a client that disconnects during a slow operation and retries.
pub(super) async fn check_disconnect(session: &mut ConformSession) -> Result<(), RunAborted> {
    const ID: &str = "disconnect.answer";
    if !session.is_pending(ID) {
        return Ok(());
    }
    if session.plan.slow.is_none() {
        session
            .report_not_performed(ID, "needs an operation that takes a second or more: --slow-body or --slow-header");
        return Ok(());
    }
    if session.plan.counter.is_none() && !session.has_marked_replay {
        session.report_not_performed(ID, "nothing tells a replay from a second run of it; name --count-url");
        return Ok(());
    }
    let fresh = session.new_operation();
    let request = with_slow_variant(session, fresh);
    let before = count(session).await?;
    let bytes = request.to_bytes(&session.plan.server.authority);
    session.requests += 1;
    let grace = session.plan.grace;
    if let Err(broken) = session.plan.server.send_and_disconnect(&bytes, grace).await {
        let seen = RawExchange { request: request.redacted(), response: Err(broken) };
        require_answer(&seen)?;
        session.report_exchange(ID, false, "that the request is taken", &seen);
        return Ok(());
    }
    let mut seen = session.send_until_settled(&request).await;
    let ran = ran_since(session, before).await?;
    seen.request = format!("{}, hung up after {grace:?}; then the same again", seen.request);
    let once = match (&seen.response, ran) {
        (Ok(_), Some(ran)) => ran == 1,
        (Ok(answer), None) => session.is_marked_as_replay(answer),
        (Err(_), _) => false,
    };
    let expected = format!("success, from the one run{}", format_run_count(ran));
    session.report_exchange(ID, seen.is_success() && once, expected, &seen);
    Ok(())
}
