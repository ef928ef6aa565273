use std::time::UNIX_EPOCH;

use super::*;

const FINAL: ResponseAction = ResponseAction::Answer { settled: true };
const OPEN: ResponseAction = ResponseAction::Answer { settled: false };

fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
    lines.iter().map(|(name, value)| (name.parse::<http::HeaderName>().unwrap(), value.parse().unwrap())).collect()
}

fn judged(status: u16, lines: &[(&'static str, &str)], body: &str, retry_5xx: bool) -> ResponseAction {
    let headers = headers(lines);
    let seen = ReceivedResponse { status: status.try_into().unwrap(), headers: &headers, body: Some(body.as_bytes()) };
    classify_response(&seen, retry_5xx, UNIX_EPOCH)
}

fn plain(status: u16) -> ResponseAction {
    judged(status, &[], "", false)
}

fn retry(why: RetryCause) -> ResponseAction {
    ResponseAction::Retry { why, after: None }
}

fn refused(refusal: Refused, status: u16, more: &[(&'static str, &str)]) -> ResponseAction {
    let body = format!(r#"{{"type":"/.well-known/idempotency#{refusal}","title":"t","status":{status},"detail":"d"}}"#);
    let mut lines = vec![("content-type", "application/problem+json")];
    lines.extend_from_slice(more);
    judged(status, &lines, &body, true)
}

#[test]
fn final_answers_settle_and_others_keep_the_key() {
    for status in [200, 201, 204, 302, 304, 400, 402, 404, 405, 410, 412, 413, 418, 422, 451] {
        assert_eq!(plain(status), FINAL, "{status}");
    }
    for status in [401, 403, 408, 425, 500, 501, 502, 504, 599] {
        assert_eq!(plain(status), OPEN, "{status}");
    }
}

#[test]
fn what_is_worth_another_attempt() {
    assert_eq!(plain(409), retry(RetryCause::InProgress));
    assert_eq!(plain(429), retry(RetryCause::Unavailable));
    assert_eq!(plain(503), retry(RetryCause::Unavailable));
    for status in [500, 502, 504] {
        assert_eq!(judged(status, &[], "", true), retry(RetryCause::ServerError), "{status}");
    }
    for status in [400, 401, 403, 404, 408, 422, 425] {
        assert!(!matches!(judged(status, &[], "", true), ResponseAction::Retry { .. }), "{status}");
    }
}

#[test]
fn a_replay_is_final_whatever_its_status() {
    for header in ["idempotent-replayed", "x-idempotency-replay", "x-idempotency-cached"] {
        for status in [200, 401, 409, 429, 500, 503] {
            assert_eq!(judged(status, &[(header, "true")], "", true), FINAL, "{header} {status}");
            assert_eq!(judged(status, &[(header, "false")], "", true), judged(status, &[], "", true), "{header}");
        }
    }
    let json = [("content-type", "application/json; charset=utf-8")];
    assert_eq!(judged(500, &json, r#"{"metadata":{"cached":true}}"#, true), FINAL);
    for body in [r#"{"metadata":{"cached":false}}"#, r#"{"metadata":7}"#, "[", ""] {
        assert_eq!(judged(500, &json, body, false), OPEN, "{body}");
    }
    assert_eq!(judged(500, &[("content-type", "text/plain")], r#"{"metadata":{"cached":true}}"#, false), OPEN);
}

#[test]
fn a_conflict_of_the_apps_own_is_an_answer() {
    assert_eq!(judged(409, &[("idempotency-stored", "false")], "", true), OPEN);
}

/// Covers every refusal, so that a new one fails here until it is classified.
#[test]
fn every_refusal_has_its_verdict() {
    for refusal in Refused::all() {
        let expected = match refusal.name() {
            "in-progress" => retry(RetryCause::InProgress),
            "store-unavailable" | "overloaded" | "quota-exceeded" => retry(RetryCause::Unavailable),
            "upstream-unreachable" | "upstream-lost" | "upstream-timeout" => retry(RetryCause::Upstream),
            "key-missing" | "key-invalid" | "scope-missing" | "request-ambiguous" | "identity-invalid"
            | "scope-refused" | "body-too-large" | "key-reused" | "duplicate-intent" | "method-unknown"
            | "outcome-unknown" => ResponseAction::Refused(Some(refusal)),
            new => panic!("{new} has no verdict yet"),
        };
        assert_eq!(refused(refusal, refusal.status().into(), &[]), expected, "{refusal}");
        // A route may use another status: the name decides.
        assert_eq!(refused(refusal, 418, &[]), expected, "{refusal}");
    }
}

/// In the form that the gateway uses under `refusals = "stripe"`.
#[test]
fn refusals_in_the_shape_of_stripe_are_the_same() {
    let json = [("content-type", "application/json"), ("stripe-should-retry", "false")];
    for refusal in Refused::all() {
        let error = match refusal.name() {
            "key-reused" => r#""type":"idempotency_error""#.to_owned(),
            "in-progress" => r#""type":"invalid_request_error","code":"idempotency_key_in_use""#.to_owned(),
            // Recognized by its status.
            "quota-exceeded" => continue,
            name => format!(r#""type":"api_error","code":"{}""#, name.replace('-', "_")),
        };
        let body = format!(r#"{{"error":{{{error},"message":"m"}}}}"#);
        let status = refusal.status().as_u16();
        assert_eq!(judged(status, &json, &body, true), refused(refusal, status, &[]), "{refusal}");
    }
    let own = r#"{"error":{"type":"card_error","code":"card_declined","message":"m"}}"#;
    assert_eq!(judged(402, &json, own, true), FINAL);
    assert_eq!(judged(409, &json[..1], r#"{"error":{"code":"outcome_unknown"}}"#, true), retry(RetryCause::InProgress));
}

#[test]
fn a_problem_of_somebody_else_is_judged_by_its_status() {
    let problem = [("content-type", "application/problem+json")];
    for kind in ["https://example.com/#outcome-unknown", "about:blank"] {
        let body = format!(r#"{{"type":"{kind}","title":"t"}}"#);
        assert_eq!(judged(409, &problem, &body, false), retry(RetryCause::InProgress), "{kind}");
        assert_eq!(judged(422, &problem, &body, false), FINAL, "{kind}");
    }
    let absolute = r#"{"type":"https://pay.example.com/.well-known/idempotency#outcome-unknown"}"#;
    assert_eq!(judged(409, &problem, absolute, false), ResponseAction::Refused(Some(Refused::OutcomeUnknown)));
    // An unknown refusal is still not an answer.
    let tomorrow = r#"{"type":"/.well-known/idempotency#of-tomorrow"}"#;
    assert_eq!(judged(409, &problem, tomorrow, false), ResponseAction::Refused(None));
}

#[test]
fn retry_after_is_read_as_seconds_and_as_a_date() {
    let after = |lines: &[(&'static str, &str)]| match judged(503, lines, "", false) {
        ResponseAction::Retry { after, .. } => after,
        other => panic!("{other:?}"),
    };
    let secs = |secs| Some(Duration::from_secs(secs));
    assert_eq!(after(&[("retry-after", "7")]), secs(7));
    assert_eq!(after(&[("retry-after", "0")]), secs(0));
    assert_eq!(after(&[("retry-after", "99999999999999999999999")]), secs(u64::MAX));
    // `now` is the epoch in this test.
    assert_eq!(after(&[("retry-after", "Thu, 01 Jan 1970 00:01:00 GMT")]), secs(60));
    let dated = ("date", "Sun, 06 Nov 1994 08:49:37 GMT");
    assert_eq!(after(&[dated, ("retry-after", "Sun, 06 Nov 1994 08:49:39 GMT")]), secs(2));
    assert_eq!(after(&[dated, ("retry-after", "Sun, 06 Nov 1994 08:00:00 GMT")]), secs(0));
    for bad in ["", "soon", "-1", "1.5"] {
        assert_eq!(after(&[("retry-after", bad)]), None, "{bad}");
    }
    let overloaded = refused(Refused::Overloaded, 503, &[("retry-after", "3")]);
    assert_eq!(overloaded, ResponseAction::Retry { why: RetryCause::Unavailable, after: secs(3) });
    // The schedule decides, and `Retry-After` is ignored.
    assert_eq!(refused(Refused::InProgress, 409, &[("retry-after", "3")]), retry(RetryCause::InProgress));
}
