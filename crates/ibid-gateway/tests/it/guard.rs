//! The intent guard on real stores: another key with the same values, crashes, and what operators see and do.

use std::time::Duration;

use serde_json::json;
use testbed::{
    TestPostgres, TestRedis,
    client::{TestRequest, TestResponse, get, many, post},
    process::GatewayProcess,
    upstream::{TestUpstream, UpstreamFault, UpstreamReply},
};
use tokio::time::sleep;

use crate::{
    sealing,
    stores::common::migrated_database,
    support::{BIN, assert_ran, assert_refused, assert_replay, caller, run_ibid, until_some},
};

const GUARD: &str = "guard = { fields = [\"/order\", \"/amount\"], window = \"1m\" }";
const TOKEN: &str = "token-of-the-operator";

fn config(store: &str, dials: &str) -> String {
    format!("[admin]\ntoken = {TOKEN:?}\n[store]\ntimeout = \"20s\"\n{store}\n[policy]\npreset = \"ietf\"\n{dials}\n")
}

/// An order of one article, with this key.
fn order(gateway: &GatewayProcess, key: &str) -> TestRequest {
    let body = format!(r#"{{"order":"o1","amount":5,"sent":"{key}"}}"#);
    caller(post(gateway.addr(), "/pay")).header("Host", "shop.example").key(key).json(&body)
}

#[track_caller]
fn assert_duplicate(answer: &TestResponse, first: &str) {
    let problem = assert_refused(answer, 409, "duplicate-intent");
    assert!(problem["detail"].as_str().is_some_and(|detail| detail.contains(first)), "{problem}");
}

/// Fifty keys at once run once on two gateways, and the first key is replayed; other values are another operation. An
/// operation that failed frees its intent.
async fn one_of_fifty_runs(store: &str) {
    let upstream = TestUpstream::start().await;
    let config = config(store, GUARD);
    let launch = || GatewayProcess::launch(BIN).config(config.clone()).upstream(&upstream.url()).start();
    let is_shared = !store.contains("embedded");
    let one = launch().await;
    let other = if is_shared { Some(launch().await) } else { None };
    let gateways = [&one, other.as_ref().unwrap_or(&one)];
    let mut nth = 0;
    let answers = many(50, || {
        nth += 1;
        order(gateways[nth % 2], &format!("order-number-{nth:04}"))
    })
    .await;
    let winner = answers.iter().position(|answer| answer.status == 201).expect("one runs");
    let first = format!("orde****{:04}", winner + 1);
    for (at, answer) in answers.iter().enumerate().filter(|(at, _)| *at != winner) {
        assert_eq!(answer.status, 409, "{at}: {answer:?}");
        assert_duplicate(answer, &first);
    }
    assert_eq!(upstream.executions(), 1);
    let again = order(gateways[1], &format!("order-number-{:04}", winner + 1)).send().await;
    assert_replay(&again, &answers[winner]);
    let different = caller(post(one.addr(), "/pay")).header("Host", "shop.example").key("order-number-9999");
    assert_ran(&different.json(r#"{"order":"o2","amount":5}"#).send().await);
    upstream.on("/refund", UpstreamReply::status(500));
    let refund = |gateway: &GatewayProcess, key: &str| {
        let request = caller(post(gateway.addr(), "/refund")).header("Host", "shop.example").key(key);
        request.json(r#"{"order":"o1","amount":5}"#)
    };
    assert_eq!(refund(gateways[0], "refund-number-0001").send().await.status, 500);
    upstream.on("/refund", UpstreamReply::status(201));
    assert_eq!(refund(gateways[1], "refund-number-0002").send().await.status, 201);
    assert_duplicate(&refund(gateways[0], "refund-number-0003").send().await, "refu****0002");
    let metrics = get(one.admin_addr(), "/metrics").header("Authorization", format!("Bearer {TOKEN}")).send().await;
    let metrics = metrics.text();
    let counted =
        metrics.lines().find(|line| line.starts_with("idempotency_duplicate_intents_total{on_match=\"reject\"}"));
    assert!(counted.is_some_and(|line| !line.ends_with(" 0")), "{counted:?}");
    one.wait_for_log("the same operation as").await;
}

#[tokio::test]
async fn one_of_fifty_keys_runs_on_the_embedded_store() {
    one_of_fifty_runs("url = \"embedded:data\"").await;
}

#[tokio::test]
async fn one_of_fifty_keys_runs_on_redis() {
    let redis = TestRedis::start();
    one_of_fifty_runs(&format!("url = {:?}", redis.url())).await;
}

#[tokio::test]
async fn one_of_fifty_keys_runs_on_postgres() {
    let postgres = TestPostgres::start();
    let (url, _) = migrated_database(&postgres, postgres.port()).await;
    one_of_fifty_runs(&format!("url = {url:?}")).await;
}

#[tokio::test]
async fn one_of_fifty_keys_runs_on_two_stores() {
    let (redis, postgres) = (TestRedis::start(), TestPostgres::start());
    let (url, _) = migrated_database(&postgres, postgres.port()).await;
    one_of_fifty_runs(&format!("url = {url:?}\ncache = {:?}", redis.url())).await;
}

#[tokio::test]
async fn one_of_fifty_keys_runs_on_a_sealed_store() {
    one_of_fifty_runs(&format!("url = \"embedded:data\"\n{}", sealing::table(&["k1"]))).await;
}

/// The gateway is killed while the operation runs: nobody knows what became of it, under this key or another, until it is
/// retried with its own key.
#[tokio::test]
async fn a_killed_gateway_leaves_key_and_intent_to_the_retry_of_the_key() {
    let upstream = TestUpstream::start().await;
    let dials = format!("{GUARD}\nlease = \"300ms\"\non_unknown = \"retry\"");
    let config = config("url = \"embedded:data\"", &dials);
    let mut gateway = GatewayProcess::launch(BIN).config(config).upstream(&upstream.url()).start().await;
    upstream.on_each("/pay", [UpstreamFault::Hang.into(), UpstreamReply::usual()]);
    let lost = order(&gateway, "order-number-0001").start().await;
    upstream.wait_for(1).await;
    gateway.restart().await;
    drop(lost);
    assert_duplicate(&order(&gateway, "order-number-0002").send().await, "orde****0001");
    sleep(Duration::from_millis(400)).await;
    assert_duplicate(&order(&gateway, "order-number-0002").send().await, "orde****0001");
    let retried = until_some("the lease to expire", || async {
        let answer = order(&gateway, "order-number-0001").send().await;
        (answer.status == 201).then_some(answer)
    })
    .await;
    assert_eq!(upstream.last().header("ibid-attempt"), Some("2"), "{retried:?}");
    assert_duplicate(&order(&gateway, "order-number-0002").send().await, "orde****0001");
    assert_eq!(upstream.executions_at("/pay"), 2, "both of the first key");
}

/// Releasing an unknown outcome frees key and intent.
#[tokio::test]
async fn an_operator_who_releases_the_key_frees_its_intent() {
    let upstream = TestUpstream::start().await;
    upstream.on_each("/pay", [UpstreamFault::CloseWithoutReply.into(), UpstreamReply::usual()]);
    let config = config("url = \"embedded:data\"", GUARD);
    let gateway = GatewayProcess::launch(BIN).config(config).upstream(&upstream.url()).start().await;
    assert_eq!(order(&gateway, "order-number-0001").send().await.status, 502);
    assert_duplicate(&order(&gateway, "order-number-0002").send().await, "orde****0001");
    let admin = format!("http://{}", gateway.admin_addr());
    for (verb, second) in [("release", "order-number-0002"), ("forget", "order-number-0003")] {
        let first = if verb == "release" { "order-number-0001" } else { "order-number-0002" };
        let args = ["keys", verb, "--key", first, "--reason", "ticket 7", "--admin", &admin];
        let changed = run_ibid(&args, &[("IBID_ADMIN_TOKEN", TOKEN)]).await;
        assert_eq!(changed.code, Some(0), "{}", changed.stderr);
        assert_ran(&order(&gateway, second).send().await);
    }
}

#[tokio::test]
async fn a_held_key_is_shown_beside_the_first_and_runs_once_it_is_released() {
    let upstream = TestUpstream::start().await;
    let dials = "guard = { fields = [\"/order\"], window = \"1m\", on_match = \"hold\" }";
    let gateway = GatewayProcess::launch(BIN).config(config("url = \"embedded:data\"", dials));
    let gateway = gateway.upstream(&upstream.url()).start().await;
    assert_ran(&order(&gateway, "order-number-0001").header("User-Agent", "shop/1").send().await);
    for _ in 0..2 {
        let held = order(&gateway, "order-number-0002").header("User-Agent", "agent/2").send().await;
        assert_duplicate(&held, "orde****0001");
        assert!(held.text().contains("operator"), "{held:?}");
    }
    let admin = format!("http://{}", gateway.admin_addr());
    let keys = async |args: &[&str]| {
        let shown = run_ibid(&[&["keys"], args, &["--admin", &admin]].concat(), &[("IBID_ADMIN_TOKEN", TOKEN)]).await;
        assert_eq!(shown.code, Some(0), "{}", shown.stderr);
        shown
    };
    let shown = keys(&["show", "--key", "order-number-0002", "--json"]).await.json();
    assert_eq!((&shown["state"], &shown["held"]["differs"]), (&json!("unknown"), &json!(["body"])), "{shown:#}");
    assert_eq!(shown["held"]["first"]["user_agent"], "shop/1", "{shown:#}");
    let text = String::from_utf8(keys(&["show", "--key", "order-number-0002"]).await.stdout).expect("text");
    assert!(text.contains("held by the intent guard: the key orde****0001"), "{text}");
    assert!(text.contains("differs in     body") && text.contains("first key      orde****0001"), "{text}");
    let address = shown["address"].as_str().expect("an address");
    let login = post(gateway.admin_addr(), "/login").header("Content-Type", "application/x-www-form-urlencoded");
    let login = login
        .header("Origin", admin.clone())
        .header("Sec-Fetch-Site", "same-origin")
        .body(format!("token={TOKEN}"))
        .send()
        .await;
    let cookie = login.header("set-cookie").and_then(|cookie| cookie.split(';').next()).expect("a session").to_owned();
    let page = get(gateway.admin_addr(), format!("/records/{address}")).header("Cookie", cookie).send().await.text();
    assert!(page.contains("Held by the intent guard") && page.contains("orde****0001"), "{page}");
    assert!(page.contains("shop/1") && page.contains("agent/2") && page.contains("differ in: body"), "{page}");
    keys(&["release", "--key", "order-number-0002", "--reason", "a second order"]).await;
    assert_ran(&order(&gateway, "order-number-0002").send().await);
    assert_eq!(upstream.executions(), 2);
    assert_duplicate(&order(&gateway, "order-number-0003").send().await, "orde****0001");
    let list = keys(&["list", "--json"]).await.json();
    let keys: Vec<_> = list["records"].as_array().expect("records").iter().map(|row| row["key"].clone()).collect();
    assert_eq!(keys.len(), 4, "three keys and one intent: {keys:?}");
}
