//! Checks of the key's format, and of requests without a key.

use ibid::{KeyFormat, RefusalReason};

use super::{
    super::connection::ExchangeError, super::request::RawRequest, super::session::ConformSession, ExpectedOutcome,
    RunAborted, count, format_run_count, judge_second, ran_since,
};

pub(super) async fn check_all(session: &mut ConformSession) -> Result<(), RunAborted> {
    check_missing(session).await?;
    check_longest(session).await?;
    check_quoted(session).await?;
    let fresh = session.new_key();
    let long = session.plan.profile.policy.key.max_length + 1;
    // Uses the profile's format, if that allows long keys.
    let too_long = match session.plan.profile.policy.key.format {
        KeyFormat::Operation => format!("conform:check.run:{}:1", "k".repeat(long - 20)),
        _ => "k".repeat(long),
    };
    let refused: Vec<(&str, Vec<u8>)> = vec![
        ("key.empty", Vec::new()),
        ("key.blank", b"\"\"".to_vec()),
        ("key.too-long", too_long.into_bytes()),
        ("key.format", b"not-of-the-form".to_vec()),
        ("key.list", format!("\"{fresh}\", \"{fresh}-2\"").into_bytes()),
        ("key.parameters", format!("\"{fresh}\";a=1").into_bytes()),
        ("key.bad-escape", format!("\"{fresh}\\x\"").into_bytes()),
        ("key.open-quote", format!("\"{fresh}").into_bytes()),
        ("key.control-byte", format!("{fresh}\u{1}").into_bytes()),
        ("key.non-ascii", format!("{fresh}\u{e9}").into_bytes()),
    ];
    for (id, key) in refused {
        let request = session.operation_with_key(&key);
        check_refused(session, id, request).await?;
    }
    let mut twice = session.new_operation();
    twice.keys.push((twice.keys[0].0.clone(), session.new_key().into_bytes()));
    check_refused(session, "key.two-headers", twice).await?;
    let mut twin = session.new_operation();
    twin.keys.push((twin.keys[0].0.replace('-', "_"), session.new_key().into_bytes()));
    check_refused(session, "key.twin", twin).await?;
    let nominated = session.new_operation();
    let connection = format!("close, {}", nominated.keys[0].0);
    check_refused(session, "key.nominated", RawRequest { connection, ..nominated }).await
}

/// Sends a request that must be refused before anything runs.
async fn check_refused(session: &mut ConformSession, id: &'static str, request: RawRequest) -> Result<(), RunAborted> {
    if !session.is_pending(id) {
        return Ok(());
    }
    let before = count(session).await?;
    let seen = session.send(&request).await;
    let ran = ran_since(session, before).await?;
    let status = session.status_of(RefusalReason::KeyInvalid);
    let foreign = session.plan.profile.is_third_party();
    // A server often rejects bytes that are invalid in a header before it parses the request.
    let unframed = matches!(id, "key.control-byte" | "key.non-ascii");
    let refused = match &seen.response {
        Ok(answer) if foreign || unframed => (400..500).contains(&answer.status),
        Ok(answer) => answer.status == status,
        Err(broken) => unframed && matches!(broken, ExchangeError::Closed),
    };
    let wanted = if foreign { "a refusal (4xx)".into() } else { status.to_string() };
    session.report_exchange(
        id,
        refused && ran.unwrap_or(0) == 0,
        format!("{wanted}, and no run{}", format_run_count(ran)),
        &seen,
    );
    if refused && !unframed {
        session.refusals.push((id, true, seen));
    }
    Ok(())
}

/// Without a key: refused, or executed each time, as the profile says. The draft leaves this to the server.
async fn check_missing(session: &mut ConformSession) -> Result<(), RunAborted> {
    const ID: &str = "key.missing";
    let before = count(session).await?;
    let request = session.operation_without_key();
    let first = session.send(&request).await;
    let ran = ran_since(session, before).await?;
    let policy_says = session.plan.profile.policy.key.required;
    let either = session.plan.profile.name == "ietf" && session.plan.key_required.is_none();
    let required = match session.plan.key_required {
        Some(required) => required,
        None if either => !first.is_success(),
        None => policy_says,
    };
    if required {
        let status = session.status_of(RefusalReason::KeyMissing);
        let fine = first.status() == Some(status) && ran.unwrap_or(0) == 0;
        session.report_exchange(ID, fine, format!("{status}, and no run{}", format_run_count(ran)), &first);
        session.refusals.push((ID, true, first));
        return Ok(());
    }
    let Some(answer) = first.response.as_ref().ok().filter(|answer| answer.is_success()) else {
        session.report_exchange(ID, false, "success: the key is optional", &first);
        return Ok(());
    };
    let before = count(session).await?;
    let second = session.send(&request).await;
    let ran = ran_since(session, before).await?;
    judge_second(session, ID, ExpectedOutcome::OwnRun, answer, &second, ran);
    Ok(())
}

async fn check_longest(session: &mut ConformSession) -> Result<(), RunAborted> {
    const ID: &str = "key.longest";
    if !session.is_pending(ID) {
        return Ok(());
    }
    if !session.has_evidence() {
        session.report_not_performed(ID, "nothing shows that keys are looked at; name --count-url");
        return Ok(());
    }
    let mut key = session.new_key();
    key.push_str(&"k".repeat(session.plan.profile.policy.key.max_length - key.len()));
    let request = session.operation_with_key(key.as_bytes());
    let first = session.send(&request).await;
    session.report_exchange(ID, first.is_success(), "success", &first);
    Ok(())
}

/// Checks that `"k"` and `k` are the same key.
async fn check_quoted(session: &mut ConformSession) -> Result<(), RunAborted> {
    const ID: &str = "key.quoted";
    if !session.is_pending(ID) {
        return Ok(());
    }
    let bare = session.new_operation();
    let (name, key) = bare.keys[0].clone();
    let quoted = RawRequest { keys: vec![(name, [b"\"", &key[..], b"\""].concat())], ..bare.clone() };
    let first = session.send(&quoted).await;
    let Some(answer) = first.response.as_ref().ok().filter(|answer| answer.is_success()) else {
        session.report_exchange(ID, false, "success with the key in quotes", &first);
        return Ok(());
    };
    let before = count(session).await?;
    let second = session.send_until_settled(&bare).await;
    let ran = ran_since(session, before).await?;
    judge_second(session, ID, ExpectedOutcome::Replay, answer, &second, ran);
    Ok(())
}

/// Checks that a key does not affect a GET.
pub(super) async fn check_get(session: &mut ConformSession) -> Result<(), RunAborted> {
    const ID: &str = "get.passes";
    if !session.is_pending(ID) {
        return Ok(());
    }
    let plain = RawRequest { method: "GET".into(), body: None, ..session.operation_without_key() };
    let keyed = RawRequest { keys: session.new_operation().keys, ..plain.clone() };
    let without = session.send(&plain).await;
    let with = [session.send(&keyed).await, session.send(&keyed).await];
    let expected = match without.status() {
        Some(status) => format!("{status}, as without a key, and no replay"),
        None => "what comes without a key".into(),
    };
    let same = |seen: &&super::super::request::RawExchange| {
        let marked = seen.response.as_ref().is_ok_and(|answer| session.is_marked_as_replay(answer));
        seen.status().is_none() || seen.status() != without.status() || marked
    };
    match with.iter().find(same) {
        Some(wrong) => session.report_exchange(ID, false, expected, &wrong.clone()),
        None => session.report_exchange(ID, true, expected, &with[1]),
    }
    Ok(())
}
