//! The Universal Commerce Protocol: keys are UUIDs per client and operation, requests are compared by their raw bytes.

use testbed::TestRedis;

use super::*;

const CREATE: &str = "/checkout-sessions";
const REPLAY: [(&str, &str); 1] = [("Idempotent-Replayed", "true")];
const BODY: &str = r#"{"line_items":[{"item":{"id":"item_123"},"quantity":2}]}"#;

async fn start_preset() -> TestGateway {
    TestGateway::shipped("ucp").await
}

fn send_at(bench: &TestGateway, method: &str, path: &str, key: &str, body: &str) -> TestRequest {
    bench.request(method, path).header("Authorization", "Bearer platform-1").key(key).json(body)
}

fn checkout(bench: &TestGateway, key: &str) -> TestRequest {
    send_at(bench, "POST", CREATE, key, BODY)
}

#[tokio::test]
async fn a_retry_gets_the_first_answer_byte_by_byte_with_its_signature() {
    let bench = start_preset().await;
    let signed =
        [("Content-Digest", "sha-256=:Y5fK8n==:"), ("Signature-Input", "sig1=(\"@status\")"), ("Signature", "a")];
    let reply = signed.iter().fold(UpstreamReply::usual(), |reply, (name, value)| reply.header(*name, *value));
    bench.upstream.reply_by_default(reply);
    let first = checkout(&bench, UUID).send().await;
    assert_run(&first, 1);
    let replay = checkout(&bench, UUID).send().await;
    assert_replay(&replay, &first, &REPLAY);
    for (name, value) in signed {
        assert_eq!(replay.header(name), Some(value), "{replay:?}");
    }
    bench.assert_executed(1);
}

#[tokio::test]
async fn what_is_signed_reaches_the_app_unchanged() {
    let bench = start_preset().await;
    let key = UUID.to_uppercase();
    let body = "{ \"line_items\" : [ ],\n\t\"n\": 1.0 }";
    let signed = [
        ("UCP-Agent", "profile=\"https://platform.example/.well-known/ucp\""),
        ("Content-Digest", "sha-256=:X48E9q==:"),
        ("Signature-Input", "sig1=(\"@method\" \"idempotency-key\");keyid=\"platform-2026\""),
        ("Signature", "sig1=:MEUCIQDTxNq8h7==:"),
    ];
    let request = signed
        .iter()
        .fold(send_at(&bench, "POST", CREATE, &key, body), |request, (name, value)| request.header(*name, *value));
    assert_run(&request.send().await, 1);
    let seen = bench.upstream.last();
    assert_eq!((seen.key(), seen.text().as_str()), (Some(key.as_str()), body));
    for (name, value) in signed {
        assert_eq!(seen.header(name), Some(value), "{seen:#?}");
    }
    // It is the same key in either case.
    assert_run_with_headers(&send_at(&bench, "POST", CREATE, UUID, body).send().await, 1, &REPLAY);
}

#[tokio::test]
async fn a_key_is_a_uuid_and_required() {
    let bench = start_preset().await;
    let without = bench.post(CREATE).header("Authorization", "Bearer platform-1").json(BODY).send().await;
    assert_refusal(&without, 400, "key-missing");
    for bad in ["order-1", "", "550e8400e29b41d4a716446655440000", "550e8400-e29b-41d4-a716-44665544000g"] {
        key_is_invalid(&bench, &checkout(&bench, bad)).await;
    }
    bench.assert_executed(0);
}

#[tokio::test]
async fn the_raw_bytes_are_compared() {
    let bench = start_preset().await;
    let first = checkout(&bench, UUID).send().await;
    assert_run(&first, 1);
    for other in [
        r#"{"line_items":[{"quantity":2,"item":{"id":"item_123"}}]}"#,
        r#"{"line_items":[{"item":{"id":"item_123"},"quantity":2.0}]}"#,
        r#"{"line_items": [{"item":{"id":"item_123"},"quantity":2}]}"#,
        r#"{"line_items":[{"item":{"id":"item_124"},"quantity":2}]}"#,
    ] {
        assert_refusal(&send_at(&bench, "POST", CREATE, UUID, other).send().await, 409, "key-reused");
    }
    assert_replay(&checkout(&bench, UUID).header("If-Match", "\"1\"").send().await, &first, &REPLAY);
    bench.assert_executed(1);
}

#[tokio::test]
async fn each_client_and_each_operation_has_its_own_keys() {
    let bench = start_preset().await;
    let other = bench.post(CREATE).header("Authorization", "Bearer platform-2").key(UUID).json(BODY);
    let requests = [
        checkout(&bench, UUID),
        other,
        send_at(&bench, "PUT", "/checkout-sessions/chk_1", UUID, BODY),
        send_at(&bench, "POST", "/checkout-sessions/chk_1", UUID, BODY),
        send_at(&bench, "POST", "/checkout-sessions/chk_1/complete", UUID, BODY),
        send_at(&bench, "POST", "/checkout-sessions/chk_1/cancel", UUID, BODY),
        send_at(&bench, "POST", "/carts", UUID, BODY),
        send_at(&bench, "PUT", "/carts/c_1", UUID, BODY),
    ];
    each_runs_once(&bench, &requests, &REPLAY).await;
}

#[tokio::test]
async fn searches_of_the_catalog_pass_through() {
    let bench = start_preset().await;
    for path in ["/catalog/search", "/catalog/lookup"] {
        passes_through(&bench, &bench.post(path).json("{}")).await;
    }
    for method in ["GET", "DELETE"] {
        passes_through(&bench, &bench.request(method, "/checkout-sessions/chk_1")).await;
    }
}

#[tokio::test]
async fn of_fifty_at_once_one_runs_and_the_others_are_told_to_come_back() {
    let bench = start_preset().await;
    of_fifty_one_runs_and_the_others_come_back(&bench, &checkout(&bench, UUID), &REPLAY).await;
}

#[tokio::test]
async fn final_answers_are_remembered() {
    let key = |status: u16| format!("550e8400-e29b-41d4-a716-446655440{status}");
    let bench = start_preset().await;
    remembered(&bench, &[200, 400, 402, 404, 422], |status| checkout(&bench, &key(status)), &REPLAY).await;
    let bench = start_preset().await;
    not_remembered(&bench, &[401, 403, 409, 429, 500, 503], |status| checkout(&bench, &key(status)), &REPLAY).await;
}

#[tokio::test]
async fn a_lost_answer_is_held() {
    let bench = start_preset().await;
    super::a_lost_answer_is_held(&bench, &checkout(&bench, UUID)).await;
}

#[tokio::test]
async fn without_the_store_requests_are_refused() {
    let redis = TestRedis::start();
    let config = format!("{}\n[store]\nurl = \"{}\"\n", shipped_config("ucp"), redis.url());
    let bench = TestGateway::start(&config).await;
    assert_run(&checkout(&bench, UUID).send().await, 1);
    drop(redis);
    let other = "650e8400-e29b-41d4-a716-446655440000";
    assert_refusal(&checkout(&bench, other).send().await, 503, "store-unavailable");
    bench.assert_executed(1);
}

#[tokio::test]
async fn after_its_time_a_key_is_new() {
    let bench = TestGateway::shipped_with("ucp", "ttl = \"1s\"").await;
    a_key_is_new_after(Duration::from_secs(1), &bench, &checkout(&bench, UUID)).await;
}

#[tokio::test]
async fn the_configuration_has_the_dials_of_the_protocol() {
    let column = [
        ("key", "header:idempotency-key; required, uuid, at most 36 characters"),
        ("scope", "credential, method, path"),
        ("fingerprint", "raw"),
        ("on_mismatch", "reject"),
        ("on_concurrent", "reject"),
        ("on_unknown", "hold"),
        ("on_store_down", "closed"),
        ("remember", "final"),
        ("refusals", "ucp"),
        ("ttl", "48h"),
        ("status", "key_reused 409"),
    ];
    every_route_has("ucp", &column).await;
}
