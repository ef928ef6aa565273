//! Many at once, and those that hang up.

use std::collections::BTreeSet;

use ibid::OnConcurrent;

use super::{
    super::request::{Request, Seen},
    super::session::Session,
    super::wire::Answer,
    Stop, answered, count, ran_since, times,
};

/// What was seen of several bursts.
#[derive(Default)]
struct Bursts {
    /// One burst that ran more than once.
    twice: Option<(String, String, Option<u64>)>,
    /// Whether it could be told, each time.
    told: bool,
    refused: Option<Seen>,
    /// Something else than an answer or the conflict.
    strange: Option<Seen>,
}

pub(super) async fn burst(session: &mut Session) -> Result<(), Stop> {
    if !session.wants("concurrent.one-run") {
        return Ok(());
    }
    let mut seen = Bursts { told: true, ..Bursts::default() };
    for round in 1..=session.plan.rounds {
        let fresh = session.fresh();
        let request = slowed(session, fresh);
        let before = count(session).await?;
        let answers = at_once(session, &request).await;
        answers.iter().try_for_each(answered)?;
        let settled = session.settle(&request).await;
        let ran = ran_since(session, before).await?;
        look(session, &mut seen, &answers, &settled, ran);
        if round == session.plan.rounds {
            settles(session, &answers, &settled, ran);
        }
        if session.is_over() {
            break;
        }
    }
    report(session, seen);
    Ok(())
}

fn slowed(session: &mut Session, request: Request) -> Request {
    let Some(variant) = session.plan.slow.take() else { return request };
    let slowed = session.varied(request, &variant);
    session.plan.slow = Some(variant);
    slowed
}

/// Sends the same request on many connections, which are all open before the first byte is sent.
async fn at_once(session: &mut Session, request: &Request) -> Vec<Seen> {
    let bytes = request.bytes(&session.plan.server.authority);
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
    let sent = format!("{} times at once: {}", session.plan.parallel, request.shown());
    tasks.join_all().await.into_iter().map(|answer| Seen { sent: sent.clone(), answer }).collect()
}

fn look(session: &Session, bursts: &mut Bursts, answers: &[Seen], settled: &Seen, ran: Option<u64>) {
    let successes: Vec<&Answer> = answers
        .iter()
        .chain([settled])
        .filter_map(|seen| seen.answer.as_ref().ok())
        .filter(|answer| answer.is_success())
        .collect();
    let different: BTreeSet<_> = successes.iter().map(|answer| session.essence(answer)).collect();
    let unmarked = successes.iter().filter(|answer| !session.is_marked(answer)).count();
    let twice = match ran {
        Some(ran) => ran != 1,
        None if session.varies => different.len() > 1,
        // Each run has one answer that is no replay.
        None if session.marks => unmarked > 1,
        None => {
            bursts.told = false;
            false
        }
    };
    if twice && bursts.twice.is_none() {
        bursts.twice = Some((settled.sent.clone(), outline(session, answers), ran));
    }
    for seen in answers {
        match seen.status() {
            Some(status) if status == session.in_progress() => {
                bursts.refused.get_or_insert_with(|| seen.clone());
            }
            Some(200..300) => {}
            _ => {
                bursts.strange.get_or_insert_with(|| seen.clone());
            }
        }
    }
}

/// `1 × 201, 9 × 409; 3 different bodies of success`.
fn outline(session: &Session, answers: &[Seen]) -> String {
    let mut statuses = std::collections::BTreeMap::new();
    let mut bodies = BTreeSet::new();
    for seen in answers {
        let name = seen.status().map_or_else(|| seen.came(), |status| status.to_string());
        *statuses.entry(name).or_insert(0) += 1;
        if let Ok(answer) = &seen.answer
            && answer.is_success()
        {
            bodies.insert(session.essence(answer));
        }
    }
    let statuses: Vec<_> = statuses.into_iter().map(|(status, count)| format!("{count} × {status}")).collect();
    format!("{}; {} different bodies of success", statuses.join(", "), bodies.len())
}

/// Afterwards the key gives what the run gave.
fn settles(session: &mut Session, answers: &[Seen], settled: &Seen, ran: Option<u64>) {
    const ID: &str = "concurrent.settles";
    let won = answers.iter().filter_map(|seen| seen.answer.as_ref().ok()).find(|answer| answer.is_success());
    match (won, &settled.answer) {
        (None, _) => session.found(ID, false, "one success among the answers", settled),
        (Some(won), Ok(answer)) => {
            let fine = answer.is_success() && session.essence(won) == session.essence(answer);
            session.found_unless_reported(ID, fine, format!("the answer of the one that ran{}", times(ran)), settled);
        }
        (Some(_), Err(_)) => session.found(ID, false, "an answer", settled),
    }
}

fn report(session: &mut Session, bursts: Bursts) {
    let Bursts { twice, told, refused, strange } = bursts;
    let sent = format!("{} × {} requests at once", session.plan.rounds, session.plan.parallel);
    match (twice, told) {
        (Some((sent, came, ran)), _) => {
            session.found_in("concurrent.one-run", false, format!("one run{}", times(ran)), sent, came);
        }
        (None, false) => {
            let why = "nothing tells one run from another; name --count-url";
            session.not_performed("concurrent.one-run", why);
        }
        (None, true) => session.found_in("concurrent.one-run", true, "one run", sent, String::new()),
    }
    let status = session.in_progress();
    if session.plan.profile.policy.on_concurrent == OnConcurrent::Wait {
        match strange.or(refused) {
            Some(seen) => session.found("concurrent.waits", false, "the answer of the one that runs", &seen),
            None if session.plan.slow.is_none() => {
                let why = "needs an operation that takes a second or more: --slow-body or --slow-header";
                session.not_performed("concurrent.waits", why);
            }
            None => session.found_in("concurrent.waits", true, "", String::new(), String::new()),
        }
        return;
    }
    match (&strange, &refused) {
        (Some(seen), _) => session.found("concurrent.refused", false, format!("{status}, or the answer"), seen),
        (None, Some(seen)) => session.found("concurrent.refused", true, status.to_string(), seen),
        (None, None) if session.plan.slow.is_some() => {
            session.found_in(
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
            session.not_performed("concurrent.refused", why);
        }
    }
    match refused {
        None => session.not_performed("concurrent.retry-after", "no request was refused as a conflict"),
        Some(seen) => {
            let after = seen.answer.as_ref().ok().and_then(|answer| answer.header("retry-after"));
            let fine = after.is_some_and(|after| after.parse::<u64>().is_ok() || after.ends_with("GMT"));
            session.found("concurrent.retry-after", fine, "retry-after: seconds, or a date", &seen);
            session.refusals.push(("concurrent.refused", false, seen));
        }
    }
}

/// A client that hangs up in the middle of a slow operation, and retries.
pub(super) async fn disconnect(session: &mut Session) -> Result<(), Stop> {
    const ID: &str = "disconnect.answer";
    if !session.wants(ID) {
        return Ok(());
    }
    if session.plan.slow.is_none() {
        session.not_performed(ID, "needs an operation that takes a second or more: --slow-body or --slow-header");
        return Ok(());
    }
    if session.plan.counter.is_none() && !session.marks {
        session.not_performed(ID, "nothing tells a replay from a second run of it; name --count-url");
        return Ok(());
    }
    let fresh = session.fresh();
    let request = slowed(session, fresh);
    let before = count(session).await?;
    let bytes = request.bytes(&session.plan.server.authority);
    session.requests += 1;
    let grace = session.plan.grace;
    if let Err(broken) = session.plan.server.abandon(&bytes, grace).await {
        let seen = Seen { sent: request.shown(), answer: Err(broken) };
        answered(&seen)?;
        session.found(ID, false, "that the request is taken", &seen);
        return Ok(());
    }
    let mut seen = session.settle(&request).await;
    let ran = ran_since(session, before).await?;
    seen.sent = format!("{}, hung up after {grace:?}; then the same again", seen.sent);
    let once = match (&seen.answer, ran) {
        (Ok(_), Some(ran)) => ran == 1,
        (Ok(answer), None) => session.is_marked(answer),
        (Err(_), _) => false,
    };
    let expected = format!("success, from the one run{}", times(ran));
    session.found(ID, seen.is_success() && once, expected, &seen);
    Ok(())
}
