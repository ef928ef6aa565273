//! ibid is killed while a handler runs in the app.

use std::time::Duration;

use serde_json::json;
use testbed::process::ProcessSignal;

use super::common::{ApiGateway, begin_until_settled, created, payment, payment_of};

#[tokio::test]
async fn an_exchange_ends_after_ibid_was_killed_and_restarted() {
    let mut gateway = ApiGateway::ietf("").await;
    let call = payment("key-1");
    let (exchange, message) = gateway.run(&call).await;
    gateway.process.restart().await;
    let again = gateway.run(&call).await.1;
    assert_eq!((&again["attempt"], &again["fence"]), (&message["attempt"], &message["fence"]), "the same claim");
    let other = gateway.begin(&payment("key-1")).await.answer();
    assert!(["in-progress", "outcome-unknown"].contains(&other.refusal().as_str()), "nobody else runs it: {other:?}");
    gateway.process.restart().await;
    let first = gateway.end(&exchange, &created("paid")).await.answer();
    assert_eq!((first.status, first.body.as_str(), first.is_replay()), (201, "paid", false));
    gateway.process.restart().await;
    let repeated = gateway.end(&exchange, &created("paid")).await.answer();
    assert_eq!((repeated.status, repeated.body.as_str()), (201, "paid"));
    let divergent = gateway.end(&exchange, &created("something else")).await;
    assert!(divergent.status == 409 || divergent.answer().body == "paid", "{divergent:?}");
    assert_eq!(gateway.begin(&payment("key-1")).await.answer().body, "paid");
}

/// The intent of a key is settled with it, by whichever process ends the exchange.
#[tokio::test]
async fn an_exchange_that_ends_after_a_restart_settles_its_intent() {
    let mut gateway = ApiGateway::ietf("guard = { fields = [\"/amount\"] }").await;
    let (exchange, _) = gateway.run(&payment("key-1")).await;
    gateway.process.restart().await;
    let duplicate = gateway.begin(&payment("key-2")).await.answer();
    assert_eq!((duplicate.status, duplicate.refusal().as_str()), (409, "duplicate-intent"));
    assert_eq!(gateway.end(&exchange, &created("paid")).await.answer().status, 201);
    assert_eq!(gateway.begin(&payment("key-2")).await.answer().refusal(), "duplicate-intent");
    let (exchange, _) = gateway.run(&payment_of("key-3", r#"{"amount":2}"#)).await;
    gateway.process.restart().await;
    gateway.failed(&exchange, "not-started").await.answer();
    assert_eq!(gateway.begin(&payment_of("key-4", r#"{"amount":2}"#)).await.status, 201, "it is free again");
}

#[tokio::test]
async fn a_failure_is_reported_after_a_restart() {
    let mut gateway = ApiGateway::ietf("").await;
    let (exchange, _) = gateway.run(&payment("key-1")).await;
    gateway.process.restart().await;
    gateway.failed(&exchange, "not-started").await.answer();
    let (_, message) = gateway.run(&payment("key-1")).await;
    assert_eq!(message["attempt"], 2);
}

#[tokio::test]
async fn an_extension_after_a_restart_keeps_the_claim_again() {
    let mut gateway = ApiGateway::ietf("lease = \"1s\"\ntimeout = \"30s\"").await;
    let (exchange, _) = gateway.run(&payment("key-1")).await;
    gateway.process.restart().await;
    assert_eq!(gateway.extend(&exchange).await.status, 200);
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert_eq!(gateway.begin(&payment("key-1")).await.answer().refusal(), "in-progress");
    assert_eq!(gateway.end(&exchange, &created("paid")).await.answer().body, "paid");
}

/// Nobody keeps the claim while ibid is away: its lease expires, and the end still counts.
#[tokio::test]
async fn an_end_counts_after_the_lease_has_expired() {
    let mut gateway = ApiGateway::ietf("lease = \"300ms\"").await;
    let (exchange, _) = gateway.run(&payment("key-1")).await;
    gateway.process.restart().await;
    let unknown = begin_until_settled(&gateway, "key-1").await.answer();
    assert_eq!(unknown.refusal(), "outcome-unknown");
    assert_eq!(gateway.end(&exchange, &created("paid")).await.answer().status, 201);
    assert_eq!(gateway.begin(&payment("key-1")).await.answer().body, "paid");
}

/// The time for a shutdown is over: the outcome is unknown, and a later end resolves it.
#[tokio::test]
async fn an_exchange_that_outlives_the_shutdown_can_still_end() {
    let config = format!("[limits]\nshutdown = \"200ms\"\n{}", crate::support::policy(""));
    let mut gateway = ApiGateway::start(&config).await;
    let (exchange, _) = gateway.run(&payment("key-1")).await;
    gateway.process.signal(ProcessSignal::Term);
    assert!(gateway.process.wait_exit(Duration::from_secs(10)).await.success());
    gateway.process.restart().await;
    assert_eq!(gateway.begin(&payment("key-1")).await.answer().refusal(), "outcome-unknown");
    assert_eq!(gateway.end(&exchange, &created("paid")).await.answer().body, "paid");
    assert_eq!(json!(gateway.begin(&payment("key-1")).await.answer().body), json!("paid"));
}
