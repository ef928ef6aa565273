//! Calls that no app should make. Each is explained; nothing is lost, and nothing runs twice.

use serde_json::{Value, json};

use super::common::{ApiGateway, TOKEN, created, payment, request_bytes};

fn with(name: &str, value: Value) -> Value {
    let mut call = payment("key-1");
    call[name] = value;
    call
}

#[tokio::test]
async fn a_malformed_begin_is_explained_and_claims_nothing() {
    let gateway = ApiGateway::ietf("").await;
    let mut missing = payment("key-1");
    missing.as_object_mut().unwrap().remove("method");
    for (call, expected) in [
        (missing, "missing field `method`"),
        (with("id", json!("request-1")), "32 hex digits"),
        (with("id", json!("00")), "32 hex digits"),
        (with("method", json!("PO ST")), "is no method"),
        (with("target", json!("pay")), "is no path"),
        (with("target", json!("http://other.example/pay")), "is no path"),
        (with("target", json!("/a b")), "is no path"),
        (with("headers", json!([["x-name", "a\r\nb"]])), "control characters"),
        (with("headers", json!([["x-name", "a\u{0}b"]])), "control characters"),
        (with("headers", json!([["x name", "a"]])), "is no name of a header"),
        (with("headers", json!([["x-name", "\u{1F600}"]])), "ISO 8859-1"),
        (with("headers", json!([["x-name"]])), "invalid length"),
        (with("headers", json!([["content-length", "5"]])), "content-length is 5, and body_base64 has 12 bytes"),
        (with("body_base64", json!("%%%")), "base64"),
        (with("body_base64", json!("YQ")), "base64"),
        (with("peer", json!("nobody")), "invalid IP address"),
        (with("extra", json!(1)), "unknown field `extra`"),
    ] {
        gateway.begin(&call).await.assert_problem(400, expected);
    }
    for text in ["", "{", "[]", "null", "\"x\"", "{\"id\":1}", "\u{0}", "{\"id\":\"a\",\"id\":\"b\"}"] {
        let reply = gateway.send(&request_bytes("/v1/exchanges", None, text)).await;
        reply.assert_problem(400, "the body is not");
    }
    assert_eq!(gateway.begin(&payment("key-1")).await.status, 201, "the key is free");
}

#[tokio::test]
async fn a_malformed_end_is_explained_and_the_exchange_goes_on() {
    let gateway = ApiGateway::ietf("").await;
    let (exchange, _) = gateway.run(&payment("key-1")).await;
    for (response, expected) in [
        (json!({}), "missing field `status`"),
        (json!({"status": 100, "headers": []}), "expected 200 to 599, got 100"),
        (json!({"status": 999, "headers": []}), "expected 200 to 599, got 999"),
        (json!({"status": -1, "headers": []}), "invalid value"),
        (json!({"status": 200, "headers": [["a", "\n"]]}), "control characters"),
        (json!({"status": 200, "headers": [], "body_base64": "?"}), "base64"),
        (json!({"status": 200, "headers": {}, "body_base64": ""}), "expected a sequence"),
    ] {
        gateway.end(&exchange, &response).await.assert_problem(400, expected);
    }
    gateway.failed(&exchange, "maybe").await.assert_problem(400, "unknown variant `maybe`");
    let extend = format!("/v1/exchanges/{exchange}/extend");
    gateway.call(&extend, &json!({"by": 1})).await.assert_problem(400, "unknown field");
    assert_eq!(gateway.begin(&payment("key-1")).await.answer().refusal(), "in-progress");
    assert_eq!(gateway.end(&exchange, &created("paid")).await.answer().body, "paid");
}

#[tokio::test]
async fn an_end_without_a_begin_is_refused() {
    let gateway = ApiGateway::ietf("").await;
    let (exchange, _) = gateway.run(&payment("key-1")).await;
    let mut damaged = exchange.clone();
    damaged.replace_range(10..11, if &exchange[10..11] == "A" { "B" } else { "A" });
    for handle in ["x", "0123456789abcdef0123456789abcdef", &damaged, &exchange[..exchange.len() - 2]] {
        gateway.end(handle, &created("forged")).await.assert_problem(404, "there is no such exchange");
        gateway.failed(handle, "not-started").await.assert_problem(404, "there is no such exchange");
        gateway.extend(handle).await.assert_problem(404, "there is no such exchange");
    }
    assert_eq!(gateway.begin(&payment("key-1")).await.answer().refusal(), "in-progress", "it still runs");
}

#[tokio::test]
async fn other_paths_methods_and_framings_are_refused() {
    let gateway = ApiGateway::ietf("").await;
    let call = |path: &str| request_bytes(path, Some(TOKEN), "{}");
    for path in [
        "/",
        "/v1",
        "/v1/exchange",
        "/v1/exchanges/",
        "/v1/exchanges/x",
        "/v1/exchanges/x/stop",
        "/v1/exchanges/x/end/y",
    ] {
        gateway.send(&call(path)).await.assert_problem(404, "there is no such endpoint");
    }
    gateway.send(&call("/v1/exchanges?a=1")).await.assert_problem(400, "query");
    let get = gateway.send(b"GET /v1/exchanges HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
    get.assert_problem(405, "only POST");
    assert!(get.head.contains("allow: POST"), "{get:?}");
    let chunked =
        b"POST /v1/exchanges HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n";
    gateway.send(chunked).await.assert_problem(411, "content-length is missing");
    let endless = b"POST /v1/exchanges HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 99999999999\r\n\r\n";
    gateway.send(endless).await.assert_problem(413, "at most 67108864");
}

#[tokio::test]
async fn a_request_that_two_readers_understand_differently_is_refused() {
    let gateway = ApiGateway::ietf("").await;
    let mut two_hosts = payment("key-1");
    two_hosts["headers"].as_array_mut().unwrap().push(json!(["host", "other.example.com"]));
    let refused = gateway.begin(&two_hosts).await.answer();
    assert_eq!((refused.status, refused.refusal().as_str()), (400, "request-ambiguous"));
    let mut two_keys = payment("key-1");
    two_keys["headers"].as_array_mut().unwrap().push(json!(["Idempotency-Key", "key-2"]));
    assert_eq!(gateway.begin(&two_keys).await.answer().status, 400);
    let mut own = payment("key-1");
    own["headers"].as_array_mut().unwrap().push(json!(["Ibid-Fence", "99"]));
    let (_, message) = gateway.run(&own).await;
    assert!(!message["headers"].to_string().contains("\"99\""), "{message}");
}

#[tokio::test]
async fn an_end_above_the_limit_of_a_call_is_refused_and_the_exchange_goes_on() {
    let gateway = ApiGateway::ietf("").await;
    let (exchange, _) = gateway.run(&payment("key-1")).await;
    let head = format!("POST /v1/exchanges/{exchange}/end HTTP/1.1\r\nhost: x\r\nconnection: close\r\n");
    let endless = format!("{head}content-length: 99999999999\r\n\r\n");
    gateway.send(endless.as_bytes()).await.assert_problem(413, "at most 67108864");
    assert_eq!(gateway.begin(&payment("key-1")).await.answer().refusal(), "in-progress");
    assert_eq!(gateway.end(&exchange, &created("paid")).await.answer().body, "paid");
}

/// Twenty ends with different bodies at once: one counts, and it is what a client gets from then on.
#[tokio::test]
async fn of_different_ends_at_once_one_counts() {
    let gateway = ApiGateway::ietf("").await;
    let (exchange, _) = gateway.run(&payment("key-1")).await;
    let ends = (0..20).map(async |nth| gateway.end(&exchange, &created(&format!("paid by {nth}"))).await);
    let replies = futures_util::future::join_all(ends).await;
    let (counted, others): (Vec<_>, Vec<_>) = replies.iter().partition(|reply| reply.status == 200);
    assert_eq!(counted.len(), 1, "{replies:?}");
    others.iter().for_each(|reply| reply.assert_problem(409, "ended with another response"));
    let replay = gateway.begin(&payment("key-1")).await.answer();
    assert_eq!((replay.is_replay(), &replay.body), (true, &counted[0].answer().body));
}

/// After a restart only the record knows how the exchange ended.
#[tokio::test]
async fn another_end_after_a_restart_gets_the_recorded_answer() {
    let mut gateway = ApiGateway::ietf("").await;
    let (exchange, _) = gateway.run(&payment("key-1")).await;
    gateway.end(&exchange, &created("paid")).await.answer();
    gateway.process.kill().await;
    gateway.process.restart().await;
    let other = gateway.end(&exchange, &created("something else")).await.answer();
    assert_eq!((other.is_replay(), other.body.as_str()), (true, "paid"));
    assert_eq!(gateway.begin(&payment("key-1")).await.answer().body, "paid");
}
