//! What a key may look like, and what happens without one.

use ibid::{KeyFormat, Reason};

use super::{
    super::request::Request, super::session::Session, super::wire::Broken, Expected, Stop, count, judge, ran_since,
    times,
};

pub(super) async fn all(session: &mut Session) -> Result<(), Stop> {
    missing(session).await?;
    longest(session).await?;
    quoted(session).await?;
    let fresh = session.fresh_key();
    let long = session.plan.profile.policy.key.max_length + 1;
    // Of the right form, where there is one that can be long.
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
        let request = session.with_key(&key);
        refuses(session, id, request).await?;
    }
    let mut twice = session.fresh();
    twice.keys.push((twice.keys[0].0.clone(), session.fresh_key().into_bytes()));
    refuses(session, "key.two-headers", twice).await?;
    let mut twin = session.fresh();
    twin.keys.push((twin.keys[0].0.replace('-', "_"), session.fresh_key().into_bytes()));
    refuses(session, "key.twin", twin).await?;
    let nominated = session.fresh();
    let connection = format!("close, {}", nominated.keys[0].0);
    refuses(session, "key.nominated", Request { connection, ..nominated }).await
}

/// Sends what must be refused before anything runs.
async fn refuses(session: &mut Session, id: &'static str, request: Request) -> Result<(), Stop> {
    if !session.wants(id) {
        return Ok(());
    }
    let before = count(session).await?;
    let seen = session.send(&request).await;
    let ran = ran_since(session, before).await?;
    let status = session.status_of(Reason::KeyInvalid);
    let foreign = session.plan.profile.is_foreign();
    // Bytes that no header may have are often refused before there is a request at all.
    let unframed = matches!(id, "key.control-byte" | "key.non-ascii");
    let refused = match &seen.answer {
        Ok(answer) if foreign || unframed => (400..500).contains(&answer.status),
        Ok(answer) => answer.status == status,
        Err(broken) => unframed && matches!(broken, Broken::Closed),
    };
    let wanted = if foreign { "a refusal (4xx)".into() } else { status.to_string() };
    session.found(id, refused && ran.unwrap_or(0) == 0, format!("{wanted}, and no run{}", times(ran)), &seen);
    if refused && !unframed {
        session.refusals.push((id, true, seen));
    }
    Ok(())
}

/// Without a key: refused, or run each time, as the profile says; the draft leaves it to the server.
async fn missing(session: &mut Session) -> Result<(), Stop> {
    const ID: &str = "key.missing";
    let before = count(session).await?;
    let request = session.keyless();
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
        let status = session.status_of(Reason::KeyMissing);
        let fine = first.status() == Some(status) && ran.unwrap_or(0) == 0;
        session.found(ID, fine, format!("{status}, and no run{}", times(ran)), &first);
        session.refusals.push((ID, true, first));
        return Ok(());
    }
    let Some(answer) = first.answer.as_ref().ok().filter(|answer| answer.is_success()) else {
        session.found(ID, false, "success: the key is optional", &first);
        return Ok(());
    };
    let before = count(session).await?;
    let second = session.send(&request).await;
    let ran = ran_since(session, before).await?;
    judge(session, ID, Expected::Own, answer, &second, ran);
    Ok(())
}

async fn longest(session: &mut Session) -> Result<(), Stop> {
    const ID: &str = "key.longest";
    if !session.wants(ID) {
        return Ok(());
    }
    if !session.has_evidence() {
        session.not_performed(ID, "nothing shows that keys are looked at; name --count-url");
        return Ok(());
    }
    let mut key = session.fresh_key();
    key.push_str(&"k".repeat(session.plan.profile.policy.key.max_length - key.len()));
    let request = session.with_key(key.as_bytes());
    let first = session.send(&request).await;
    session.found(ID, first.is_success(), "success", &first);
    Ok(())
}

/// `"k"` is `k`.
async fn quoted(session: &mut Session) -> Result<(), Stop> {
    const ID: &str = "key.quoted";
    if !session.wants(ID) {
        return Ok(());
    }
    let bare = session.fresh();
    let (name, key) = bare.keys[0].clone();
    let quoted = Request { keys: vec![(name, [b"\"", &key[..], b"\""].concat())], ..bare.clone() };
    let first = session.send(&quoted).await;
    let Some(answer) = first.answer.as_ref().ok().filter(|answer| answer.is_success()) else {
        session.found(ID, false, "success with the key in quotes", &first);
        return Ok(());
    };
    let before = count(session).await?;
    let second = session.settle(&bare).await;
    let ran = ran_since(session, before).await?;
    judge(session, ID, Expected::Same, answer, &second, ran);
    Ok(())
}

/// A GET with a key is a GET.
pub(super) async fn get(session: &mut Session) -> Result<(), Stop> {
    const ID: &str = "get.passes";
    if !session.wants(ID) {
        return Ok(());
    }
    let plain = Request { method: "GET".into(), body: None, ..session.keyless() };
    let keyed = Request { keys: session.fresh().keys, ..plain.clone() };
    let without = session.send(&plain).await;
    let with = [session.send(&keyed).await, session.send(&keyed).await];
    let expected = match without.status() {
        Some(status) => format!("{status}, as without a key, and no replay"),
        None => "what comes without a key".into(),
    };
    let same = |seen: &&super::super::request::Seen| {
        let marked = seen.answer.as_ref().is_ok_and(|answer| session.is_marked(answer));
        seen.status().is_none() || seen.status() != without.status() || marked
    };
    match with.iter().find(same) {
        Some(wrong) => session.found(ID, false, expected, &wrong.clone()),
        None => session.found(ID, true, expected, &with[1]),
    }
    Ok(())
}
