//! Checks of the key's format, and of requests without a key.

use ibid::{RefusalReason, key::KeyFormat};

use super::{
    super::{
        connection::ExchangeError,
        connection::{RawExchange, RawRequest},
        session::ConformSession,
    },
    ExpectedOutcome, format_run_count, judge_second,
};
use crate::CommandError;

pub(super) async fn check_all(session: &mut ConformSession<'_>) -> Result<(), CommandError> {
    check_missing(session).await?;
    check_longest(session).await;
    check_quoted(session).await?;
    let fresh = session.new_key();
    let long = session.policy.key.max_length + 1;
    // Uses the profile's format, if that allows long keys.
    let too_long = match session.policy.key.format {
        KeyFormat::Operation => format!("conform:check.run:{}:1", "k".repeat(long - 20)),
        _ => "k".repeat(long),
    };
    let refused = [
        ("key.empty", String::new()),
        ("key.blank", "\"\"".into()),
        ("key.too-long", too_long),
        ("key.format", "not-of-the-form".into()),
        ("key.list", format!("\"{fresh}\", \"{fresh}-2\"")),
        ("key.parameters", format!("\"{fresh}\";a=1")),
        ("key.bad-escape", format!("\"{fresh}\\x\"")),
        ("key.open-quote", format!("\"{fresh}")),
        ("key.control-byte", format!("{fresh}\u{1}")),
        ("key.non-ascii", format!("{fresh}\u{e9}")),
    ];
    for (id, key) in refused {
        let request = session.operation_with_key(key.as_bytes());
        check_refused(session, id, request).await?;
    }
    for (id, separator) in [("key.two-headers", "-"), ("key.twin", "_")] {
        let mut twice = session.new_operation();
        twice.keys.push((twice.keys[0].0.replace('-', separator), session.new_key().into_bytes()));
        check_refused(session, id, twice).await?;
    }
    let nominated = session.new_operation();
    let connection = format!("close, {}", nominated.keys[0].0);
    check_refused(session, "key.nominated", RawRequest { connection, ..nominated }).await
}

/// Sends a request that must be refused before anything runs.
async fn check_refused(
    session: &mut ConformSession<'_>, id: &'static str, request: RawRequest,
) -> Result<(), CommandError> {
    if !session.is_pending(id) {
        return Ok(());
    }
    let (seen, ran) = session.send_and_count(&request).await?;
    let status = session.status_of(RefusalReason::KeyInvalid);
    let foreign = session.args.profile.is_third_party();
    // A server often rejects bytes that are invalid in a header before it parses the request.
    let unframed = matches!(id, "key.control-byte" | "key.non-ascii");
    let refused = match &seen.response {
        Ok(answer) if foreign || unframed => answer.status().is_client_error(),
        Ok(answer) => answer.status() == status,
        Err(broken) => unframed && matches!(broken, ExchangeError::Closed),
    };
    let wanted = if foreign { "a refusal (4xx)".into() } else { status.to_string() };
    let expected = format!("{wanted}, and no run{}", format_run_count(ran));
    session.report(id, refused && ran.unwrap_or(0) == 0, expected, &seen);
    if refused && !unframed {
        session.refusals.push((id, true, seen));
    }
    Ok(())
}

/// Without a key: refused, or executed each time, as the profile says. The draft leaves this to the server.
async fn check_missing(session: &mut ConformSession<'_>) -> Result<(), CommandError> {
    const ID: &str = "key.missing";
    let request = session.operation_without_key();
    let (first, ran) = session.send_and_count(&request).await?;
    let required = match session.args.key_required {
        Some(required) => required,
        None if session.args.profile.name == "ietf" => first.success().is_none(),
        None => session.policy.key.required,
    };
    if required {
        let status = session.status_of(RefusalReason::KeyMissing);
        let fine = first.status() == Some(status) && ran.unwrap_or(0) == 0;
        session.report(ID, fine, format!("{status}, and no run{}", format_run_count(ran)), &first);
        session.refusals.push((ID, true, first));
        return Ok(());
    }
    let Some(answer) = first.success() else {
        session.report(ID, false, "success: the key is optional", &first);
        return Ok(());
    };
    let (second, ran) = session.send_and_count(&request).await?;
    judge_second(session, ID, ExpectedOutcome::OwnRun, answer, &second, ran);
    Ok(())
}

async fn check_longest(session: &mut ConformSession<'_>) {
    const ID: &str = "key.longest";
    if !session.has_evidence() {
        session.skip(ID, "nothing shows that keys are looked at; name --count-url");
    }
    if session.is_pending(ID) {
        let mut key = session.new_key();
        key.push_str(&"k".repeat(session.policy.key.max_length - key.len()));
        let request = session.operation_with_key(key.as_bytes());
        let first = session.send(&request).await;
        session.report(ID, first.success().is_some(), "success", &first);
    }
}

/// Checks that `"k"` and `k` are the same key.
async fn check_quoted(session: &mut ConformSession<'_>) -> Result<(), CommandError> {
    const ID: &str = "key.quoted";
    if !session.is_pending(ID) {
        return Ok(());
    }
    let bare = session.new_operation();
    let (name, key) = bare.keys[0].clone();
    let quoted = RawRequest { keys: vec![(name, [b"\"", &key[..], b"\""].concat())], ..bare.clone() };
    let first = session.send(&quoted).await;
    let Some(answer) = first.success() else {
        session.report(ID, false, "success with the key in quotes", &first);
        return Ok(());
    };
    let (second, ran) = session.retry_and_count(&bare).await?;
    judge_second(session, ID, ExpectedOutcome::Replay, answer, &second, ran);
    Ok(())
}

/// Checks that a key does not affect a GET.
pub(super) async fn check_get(session: &mut ConformSession<'_>) {
    const ID: &str = "get.passes";
    if !session.is_pending(ID) {
        return;
    }
    let plain = RawRequest { method: "GET".into(), body: None, ..session.operation_without_key() };
    let keyed = RawRequest { keys: session.new_operation().keys, ..plain.clone() };
    let without = session.send(&plain).await;
    let with = [session.send(&keyed).await, session.send(&keyed).await];
    let expected = match without.status() {
        Some(status) => format!("{status}, as without a key, and no replay"),
        None => "what comes without a key".into(),
    };
    let differs = |seen: &&RawExchange| {
        let marked = seen.response.as_ref().is_ok_and(|answer| session.is_marked_as_replay(answer));
        seen.status().is_none() || seen.status() != without.status() || marked
    };
    let wrong = with.iter().find(differs);
    session.report(ID, wrong.is_none(), expected, wrong.unwrap_or(&with[1]));
}
