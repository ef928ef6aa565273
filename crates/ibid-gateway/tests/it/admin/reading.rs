//! What is read: lists, one record, numbers, policies, the store.

use std::time::Duration;

use testbed::client::get;

use super::common::{ABSENT_ADDRESS, ADMIN_CONFIG, ADMIN_TOKEN, VIEWER_TOKEN, assert_problem, keys};
use crate::support::{TestGateway, pay, until_some};

#[tokio::test]
async fn records_are_listed_by_every_filter_and_page_by_page() {
    let office = TestGateway::with_records().await;
    for (query, expected) in [
        ("", &["key-one-of-u1-done", "key-one-of-u2-done", "key-two-of-u1-lost", "key-two-of-u2-failed"][..]),
        ("?state=unknown", &["key-two-of-u1-lost"]),
        ("?state=failed", &["key-two-of-u2-failed"]),
        ("?state=processing", &[]),
        ("?user=u2", &["key-one-of-u2-done", "key-two-of-u2-failed"]),
        ("?user=u2&state=done", &["key-one-of-u2-done"]),
        ("?tenant=acme&user=u1&state=done", &["key-one-of-u1-done"]),
        ("?tenant=globex", &[]),
        ("?endpoint=POST%20/pay/*&state=failed", &["key-two-of-u2-failed"]),
        ("?endpoint=POST+%2Fpay%2F*&state=failed", &["key-two-of-u2-failed"]),
        ("?key=key-one-of-u1-done", &["key-one-of-u1-done"]),
        ("?older_than=1h", &[]),
        ("?older_than=0ms&state=unknown", &["key-two-of-u1-lost"]),
        ("?state=&tenant=&user=&endpoint=&key=key-two-of-u1-lost&older_than=&cursor=", &["key-two-of-u1-lost"]),
    ] {
        let page = office.admin_json(&format!("/api/records{query}")).await;
        assert_eq!(keys(&page), expected, "{query}");
        assert!(page["next"].is_null(), "{query}");
    }
    let mut seen = Vec::new();
    let mut path = "/api/records?limit=3".to_owned();
    for expected in [3, 1] {
        let page = office.admin_json(&path).await;
        assert_eq!(keys(&page).len(), expected);
        seen.extend(keys(&page));
        let next = page["next"].as_str();
        assert_eq!(next.is_some(), expected == 3);
        path = format!("/api/records?limit=3&cursor={}", next.unwrap_or_default());
    }
    seen.sort_unstable();
    assert_eq!(seen.len(), 4);
    seen.dedup();
    assert_eq!(seen.len(), 4, "none is there twice");
}

#[tokio::test]
async fn one_record_is_shown_in_full() {
    let office = TestGateway::with_records().await;
    let address = office.address("key-one-of-u1-done").await;
    for address in [address.clone(), address.to_uppercase()] {
        let record = office.admin_json(&format!("/api/records/{address}")).await;
        assert_eq!(
            (&record["state"], &record["status"], &record["success"]),
            (&"done".into(), &201.into(), &true.into())
        );
        assert_eq!((&record["user"], &record["tenant"]), (&"u1".into(), &"acme".into()));
        assert_eq!(record["response"]["body"]["text"], r#"{"paid":1}"#);
        let headers = record["response"]["headers"].as_array().expect("a list");
        assert!(headers.contains(&serde_json::json!(["location", "/p/1"])), "{headers:?}");
    }
    let lost = office.admin_json(&format!("/api/records/{}", office.address("key-two-of-u1-lost").await)).await;
    assert_eq!(lost["state"], "unknown");
    assert!(lost["takeover_in_ms"].as_u64().is_some_and(|ms| ms > 0), "it may still be running: {lost:#}");
    assert!(lost.get("response").is_none(), "{lost:#}");
    assert_problem(
        &office.admin_get(ADMIN_TOKEN, &format!("/api/records/{ABSENT_ADDRESS}")).await,
        404,
        "nothing matches",
    );
}

/// A store that is not shared has one process at a time: what an earlier one claimed has no holder any more.
#[tokio::test]
async fn an_unknown_outcome_tells_of_a_crash() {
    let routes = "[[route]]\nmatch = \"POST /pay\"\nlease = \"300ms\"\nlabel = { key = \"clear\" }\n";
    let mut office =
        TestGateway::launch(&format!("{ADMIN_CONFIG}{routes}"), |launch| launch.arg("--store").arg("embedded:data"))
            .await;
    let gate = office.upstream.gate("/pay");
    let _crashed = pay(&office.gateway, "key-that-crashed").start().await;
    gate.arrived(1).await;
    office.gateway.kill().await;
    office.gateway.restart().await;
    let address = office.address("key-that-crashed").await;
    let told = until_some("its lease expires", async || {
        let record = office.admin_json(&format!("/api/records/{address}")).await;
        record["unknown"]["cause"].as_str().map(str::to_owned)
    });
    assert_eq!(told.await, "gateway crashed, or was killed");
}

/// Waits for the three finished records, and the note that says why the outcome of another is unknown: it is an entry
/// of the store, too.
async fn wait_for_finished(office: &TestGateway, path: &str) -> serde_json::Value {
    for _ in 0..200 {
        let shown = office.admin_json(path).await;
        if shown["stored"]["finished"] == 4 {
            return shown;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("{:#}", office.admin_json(path).await);
}

#[tokio::test]
async fn numbers_are_those_of_the_requests() {
    let office = TestGateway::with_records().await;
    let again = office.pay_as("/pay/ok", "key-one-of-u1-done", "u1").send().await;
    assert_eq!(again.header("idempotent-replayed"), Some("true"));
    let stats = wait_for_finished(&office, "/api/stats").await;
    let totals = &stats["totals"];
    assert_eq!(
        (&totals["hits"], &totals["misses"], &totals["unknown"]),
        (&1.into(), &4.into(), &1.into()),
        "{stats:#}"
    );
    let route = totals["routes"].as_array().unwrap().iter().find(|route| route["route"] == "POST /pay/*").unwrap();
    assert_eq!((&route["outcomes"]["executed"], &route["outcomes"]["replayed"]), (&3.into(), &1.into()));
    assert_eq!(stats["stored"]["unknown"], 1, "{stats:#}");
    assert_eq!((&stats["running"], &stats["waiting"]), (&0.into(), &0.into()));
    assert_eq!(stats["history"]["every_ms"], 10_000);
}

#[tokio::test]
async fn policies_and_store_are_as_configured() {
    let office = TestGateway::with_records().await;
    let policies = office.admin_json("/api/policies").await;
    let route = &policies["routes"][0];
    assert_eq!(
        (&route["match"], &route["preset"], &route["mode"]),
        (&"POST /pay/*".into(), &"ietf".into(), &"enforce".into())
    );
    assert_eq!((&route["dials"]["ttl"], &route["dials"]["on_unknown"]), (&"24h".into(), &"hold".into()));
    assert_eq!(route["overridden"], serde_json::json!(["label"]));
    let store = wait_for_finished(&office, "/api/store").await;
    assert_eq!((&store["name"], &store["url"]), (&"embedded".into(), &"embedded:data".into()));
    assert_eq!((&store["durable"], &store["shared"], &store["error"]), (&true.into(), &false.into(), &().into()));
}

/// What the console shows in bold, and `ibid check` marks, programs are told, too.
#[tokio::test]
async fn a_signature_that_is_not_asked_for_is_unusual() {
    let routes = "[[route]]\nmatch = \"POST /hooks\"\npreset = \"webhook:github\"\nunsigned = true\n";
    let office = TestGateway::embedded(&format!("{}{routes}", super::common::ADMIN_CONFIG)).await;
    let policies = office.admin_json("/api/policies").await;
    let route = &policies["routes"][0];
    assert_eq!(route["overridden"], serde_json::json!(["signature"]), "{route:#}");
    assert_eq!(route["dials"]["signature"], "none: deliveries are taken from anybody");
}

#[tokio::test]
async fn answers_are_for_who_asked_and_nobody_else() {
    let office = TestGateway::with_records().await;
    for path in
        ["/api/records", "/api/stats", "/api/policies", "/api/store", "/api/audit", "/api/shadow", "/api/refusals"]
    {
        let answer = office.admin_get(VIEWER_TOKEN, path).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        for (name, value) in [
            ("cache-control", "no-store"),
            ("x-content-type-options", "nosniff"),
            ("cross-origin-resource-policy", "same-origin"),
        ] {
            assert_eq!(answer.header(name), Some(value), "{path}");
        }
        assert!(!answer.headers.contains("access-control-allow-origin"), "{answer:?}");
        let head = office.admin_request("HEAD", VIEWER_TOKEN, path).send().await;
        assert_eq!((head.status, head.body.len()), (200, 0), "{path}");
    }
    let document = get(office.gateway.admin_addr(), "/api/openapi.json").send().await;
    assert_eq!(document.status, 200, "it is no secret");
}
