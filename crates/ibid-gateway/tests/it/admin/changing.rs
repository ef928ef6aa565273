//! Changes: what they do, what they refuse, and what they compare before.

use std::time::Duration;

use serde_json::json;
use testbed::upstream::UpstreamReply;

use super::common::{ABSENT_ADDRESS, ADMIN_TOKEN, assert_problem};
use crate::support::{TestGateway, assert_refused};

const UNKNOWN_KEY: &str = "key-two-of-u1-lost";
const COMPLETED_KEY: &str = "key-one-of-u1-done";

#[tokio::test]
async fn a_released_one_runs_again_and_a_resolved_one_is_answered_as_told() {
    let office = TestGateway::with_records().await;
    let address = office.address(UNKNOWN_KEY).await;
    assert_refused(&office.pay_as("/pay/lost", UNKNOWN_KEY, "u1").send().await, 409, "outcome-unknown");
    let done = office
        .admin_post(ADMIN_TOKEN, &format!("/api/records/{address}/release"), r#"{"reason":"the bank has none"}"#)
        .await;
    assert_eq!(done.status, 200, "{done:?}");
    let told = done.json();
    assert_eq!((&told["action"], &told["changed"], &told["refused"]), (&"release".into(), &true.into(), &().into()));
    assert_eq!((&told["before"]["state"], &told["after"]), (&"unknown".into(), &().into()), "{told:#}");
    let again = office.pay_as("/pay/lost", UNKNOWN_KEY, "u1").send().await;
    assert_eq!(again.status, 502, "it ran, and was lost again");

    let ran = office.upstream.executions();
    let body = json!({
        "reason": "looked it up",
        "fence": office.record(UNKNOWN_KEY).await["fence"],
        "as": "done",
        "answer": { "status": 201, "headers": [["Content-Type", "application/json"], ["Link", "</a>"], ["Link", "</b>"]],
                    "body": "{\"paid\":\"by hand\"}" },
        "keep": "2h",
    });
    let done = office.admin_post(ADMIN_TOKEN, &format!("/api/records/{address}/resolve"), &body.to_string()).await;
    assert_eq!((done.status, &done.json()["after"]["state"]), (200, &"done".into()), "{done:?}");
    let answer = office.pay_as("/pay/lost", UNKNOWN_KEY, "u1").send().await;
    assert_eq!((answer.status, answer.text().as_str()), (201, r#"{"paid":"by hand"}"#), "{answer:?}");
    assert_eq!(answer.header("idempotent-replayed"), Some("true"));
    assert_eq!(answer.headers.get_all("link"), ["</a>", "</b>"]);
    assert_eq!(office.upstream.executions(), ran, "nothing ran");
    let left = office.record(UNKNOWN_KEY).await["expires_in_ms"].as_u64().unwrap();
    assert!((7_000_000..=7_200_000).contains(&left), "{left}");
}

#[tokio::test]
async fn one_that_never_happened_runs_and_a_forgotten_one_too() {
    let office = TestGateway::with_records().await;
    let address = office.address(UNKNOWN_KEY).await;
    let body = r#"{"reason":"r","as":"not-executed"}"#;
    assert_eq!(office.admin_post(ADMIN_TOKEN, &format!("/api/records/{address}/resolve"), body).await.status, 200);
    office.upstream.on("/pay/lost", UpstreamReply::usual());
    assert_eq!(office.pay_as("/pay/lost", UNKNOWN_KEY, "u1").send().await.status, 201);

    let address = office.address(COMPLETED_KEY).await;
    let done = office
        .admin_post(ADMIN_TOKEN, &format!("/api/records/{address}/forget"), r#"{"reason":"to be run again"}"#)
        .await;
    assert_eq!((done.status, &done.json()["before"]["status"]), (200, &201.into()), "{done:?}");
    let again = office.pay_as("/pay/ok", COMPLETED_KEY, "u1").send().await;
    assert_eq!((again.status, again.header("idempotent-replayed")), (201, None), "{again:?}");
}

#[tokio::test]
async fn bytes_that_are_no_text_come_back_as_they_were_given() {
    let office = TestGateway::with_records().await;
    let address = office.address(UNKNOWN_KEY).await;
    let body = json!({ "reason": "r", "as": "done", "answer": { "status": 200, "body": { "hex": "00ff80" } } });
    let done = office.admin_post(ADMIN_TOKEN, &format!("/api/records/{address}/resolve"), &body.to_string()).await;
    assert_eq!(done.status, 200, "{done:?}");
    assert_eq!(&office.pay_as("/pay/lost", UNKNOWN_KEY, "u1").send().await.body[..], b"\x00\xff\x80");
    assert_eq!(office.admin_json(&format!("/api/records/{address}")).await["response"]["body"]["hex"], "00ff80");
}

#[tokio::test]
async fn another_fence_is_a_conflict_that_says_what_is_there() {
    let office = TestGateway::with_records().await;
    let record = office.record(UNKNOWN_KEY).await;
    let (address, fence) = (record["address"].as_str().unwrap(), record["fence"].as_u64().unwrap());
    for (action, more) in [("release", ""), ("forget", ""), ("resolve", r#","as":"done","answer":{"status":200}"#)] {
        let body = format!(r#"{{"reason":"r","fence":{}{more}}}"#, fence - 1);
        let answer = office.admin_post(ADMIN_TOKEN, &format!("/api/records/{address}/{action}"), &body).await;
        assert_problem(&answer, 409, &format!("its fence is {fence}, not {}", fence - 1));
        let problem = answer.json();
        assert_eq!((&problem["changed"], &problem["after"]["fence"]), (&false.into(), &fence.into()), "{problem:#}");
        assert_eq!(problem["after"]["state"], "unknown");
    }
    // What was seen is gone: the client's retry has taken the address over since.
    let body = format!(r#"{{"reason":"r","fence":{fence}}}"#);
    assert_eq!(office.admin_post(ADMIN_TOKEN, &format!("/api/records/{address}/forget"), &body).await.status, 200);
    office.upstream.on("/pay/lost", UpstreamReply::usual());
    assert_eq!(office.pay_as("/pay/lost", UNKNOWN_KEY, "u1").send().await.status, 201);
    let answer = office.admin_post(ADMIN_TOKEN, &format!("/api/records/{address}/forget"), &body).await;
    assert_problem(&answer, 409, "it has changed meanwhile");
    assert_eq!(office.record(UNKNOWN_KEY).await["state"], "done", "the new one stays");
}

#[tokio::test]
async fn a_finished_one_and_a_running_one_are_not_resolved() {
    let office = TestGateway::with_records().await;
    let address = office.address(COMPLETED_KEY).await;
    for (action, body) in [
        ("release", r#"{"reason":"r"}"#),
        ("resolve", r#"{"reason":"r","as":"not-executed"}"#),
        ("resolve", r#"{"reason":"r","as":"done","answer":{"status":500}}"#),
    ] {
        let answer = office.admin_post(ADMIN_TOKEN, &format!("/api/records/{address}/{action}"), body).await;
        assert_problem(&answer, 409, "nothing left to resolve; forget it");
    }
    assert_eq!(
        office.admin_json(&format!("/api/records/{address}")).await["response"]["body"]["text"],
        r#"{"paid":1}"#
    );

    office.upstream.on("/pay/slow", UpstreamReply::usual().delay(Duration::from_secs(3)));
    let running = office.pay_as("/pay/slow", "key-of-the-slow-one", "u1").start().await;
    let slow = loop {
        let page = office.admin_json("/api/records?state=processing").await;
        if let Some(found) = page["records"].as_array().unwrap().first() {
            break found.clone();
        }
    };
    let address = slow["address"].as_str().unwrap();
    let answer = office.admin_post(ADMIN_TOKEN, &format!("/api/records/{address}/release"), r#"{"reason":"r"}"#).await;
    assert_problem(&answer, 409, "it is running");
    let mut running = running;
    assert_eq!(running.read_response().await.status, 201, "it was left alone");
}

#[tokio::test]
async fn what_is_not_there_is_not_changed() {
    let office = TestGateway::with_records().await;
    for (action, body) in [
        ("release", r#"{"reason":"r"}"#),
        ("forget", r#"{"reason":"r"}"#),
        ("resolve", r#"{"reason":"r","as":"not-executed"}"#),
    ] {
        let answer = office.admin_post(ADMIN_TOKEN, &format!("/api/records/{ABSENT_ADDRESS}/{action}"), body).await;
        assert_problem(&answer, 404, "nothing matches");
    }
    assert_eq!(office.admin_json("/api/audit").await["entries"], json!([]), "nothing was begun");
}
