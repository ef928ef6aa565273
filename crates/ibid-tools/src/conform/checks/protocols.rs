//! Checks that only some protocols have, and the formats of their errors.

use ibid::policy::RefusalFormat;
use serde_json::Value;

use super::super::{
    connection::{RawRequest, header_of},
    session::ConformSession,
};

const LIFETIME_MEMBER: &str = "idempotency-key-lifetime";

/// Explains what is wrong with the error that the check `id` received.
pub(super) fn find_error(id: &str, status: u16, body: &Value, refusals: RefusalFormat) -> Option<String> {
    let missing = |object: &Value, names: &[&str]| {
        let missing = names.iter().find(|name| !object[**name].is_string())?;
        Some(format!("a {missing} in the error"))
    };
    match refusals {
        RefusalFormat::Acp => {
            let code = match id {
                "key.missing" => Some("idempotency_key_required"),
                "mismatch.body" => Some("idempotency_conflict"),
                "concurrent.refused" => Some("idempotency_in_flight"),
                _ => None,
            };
            let is_other = code.is_some_and(|code| body["code"] != code || body["type"] != "invalid_request");
            let known = ["type", "code", "message", "param"];
            let unknown = body.as_object()?.keys().find(|name| !known.contains(&name.as_str()));
            missing(body, &["type", "code", "message"])
                .or_else(|| is_other.then(|| format!("type invalid_request and code {}", code.unwrap_or_default())))
                .or_else(|| unknown.map(|name| format!("no member {name}")))
        }
        RefusalFormat::Ucp => missing(body, &["code", "content"]),
        RefusalFormat::Iceberg => missing(&body["error"], &["message", "type"])
            .or_else(|| (body["error"]["code"] != status).then(|| format!("the code {status} in the error"))),
        _ => missing(&body["error"], &["type", "message"]),
    }
}

/// Checks that answers repeat the key and the id of the request.
pub(super) async fn check_echo(session: &mut ConformSession<'_>) {
    const ID: &str = "answer.echo";
    if !session.is_pending(ID) {
        return;
    }
    let request = session.new_operation().with_headers(&[("Request-Id".into(), "conform-echo".into())]);
    let key = String::from_utf8_lossy(&request.keys[0].1).into_owned();
    let (first, replay) = (session.send(&request).await, session.retry(&request).await);
    let echoes = |seen: &super::RawExchange| {
        let found = |name: &str| seen.response.as_ref().ok().and_then(|answer| header_of(answer, name));
        found("idempotency-key") == Some(&key) && found("request-id") == Some("conform-echo")
    };
    let wrong = [&first, &replay].into_iter().find(|seen| !echoes(seen));
    session.report(ID, wrong.is_none(), "Idempotency-Key and Request-Id as sent", wrong.unwrap_or(&replay));
}

/// Checks that a catalog advertises its keys: clients send none otherwise.
pub(super) async fn check_lifetime(session: &mut ConformSession<'_>) {
    const ID: &str = "config.lifetime";
    let Some((base, _)) = session.target.split_once("/v1/") else {
        return session.skip(ID, "needs a URL of the catalog, with /v1/ in its path");
    };
    let target = format!("{base}/v1/config");
    if !session.is_pending(ID) {
        return;
    }
    let request = RawRequest { method: "GET".into(), target, body: None, ..session.operation_without_key() };
    let seen = session.send(&request).await;
    let config: Value =
        seen.success().and_then(|answer| serde_json::from_slice(answer.body()).ok()).unwrap_or_default();
    let fine = config[LIFETIME_MEMBER].as_str().is_some_and(is_iso_duration);
    session.report(ID, fine, format!("{LIFETIME_MEMBER}: an ISO 8601 duration such as PT24H"), &seen);
}

/// Whether a text is a duration of ISO 8601 with a positive part: `PT30M`, `P1DT12H`.
fn is_iso_duration(text: &str) -> bool {
    let Some(rest) = text.strip_prefix('P') else { return false };
    let (days, time) = rest.split_once('T').unwrap_or((rest, ""));
    let parts = |text: &str, units: &str| {
        let mut units = units.chars();
        let numbers = text.split_inclusive(|letter: char| letter.is_ascii_alphabetic());
        let mut all = numbers.map(|part| {
            let (number, unit) = part.split_at(part.len() - 1);
            number.parse::<f64>().is_ok_and(|number| number >= 0.0) && units.any(|allowed| unit.starts_with(allowed))
        });
        all.all(|fine| fine)
    };
    let is_positive = text.chars().any(|letter| matches!(letter, '1'..='9'));
    is_positive && parts(days, "YMWD") && parts(time, "HMS") && (time.is_empty() != rest.contains('T'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_of_iso_8601_are_told_from_others() {
        for fine in ["PT24H", "PT30M", "P1D", "P1DT12H", "PT1H30M0.5S"] {
            assert!(is_iso_duration(fine), "{fine}");
        }
        for wrong in ["", "P", "PT", "24h", "PT0S", "PT30", "P1H", "PT30M1H", "PT-1H", "PTxH"] {
            assert!(!is_iso_duration(wrong), "{wrong}");
        }
    }
}
