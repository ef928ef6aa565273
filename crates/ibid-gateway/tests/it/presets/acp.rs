//! The Agentic Commerce Protocol: a key on every POST, equal JSON is the same request, server errors run again.

use super::*;

const CREATE: &str = "/checkout_sessions";
const UPDATE: &str = "/checkout_sessions/cs_1";
const REPLAY: [(&str, &str); 1] = [("Idempotent-Replayed", "true")];
const BODY: &str = r#"{"items":[{"id":"a","quantity":1},{"id":"b","quantity":2}],"buyer":{"email":null}}"#;

async fn start_preset() -> TestGateway {
    TestGateway::shipped("acp").await
}

fn with_body(bench: &TestGateway, path: &str, key: &str, body: &str) -> TestRequest {
    bench.post(path).header("Authorization", "Bearer agent-1").key(key).json(body)
}

fn checkout(bench: &TestGateway, key: &str) -> TestRequest {
    with_body(bench, CREATE, key, BODY)
}

#[tokio::test]
async fn a_retry_gets_the_first_answer_with_its_own_ids() {
    let bench = start_preset().await;
    bench.upstream.reply_by_default(UpstreamReply::usual().header("Request-Id", "of the app"));
    let request = |id: &str| checkout(&bench, UUID).header("Request-Id", id);
    let first = request("r-1").send().await;
    assert_run(&first, 1);
    assert_eq!((first.header("idempotency-key"), first.header("request-id")), (Some(UUID), Some("r-1")));
    let replay = request("r-2").send().await;
    assert_run_with_headers(&replay, 1, &REPLAY);
    assert_eq!((replay.header("idempotency-key"), replay.header("request-id")), (Some(UUID), Some("r-2")));
    assert_eq!(checkout(&bench, UUID).send().await.header("request-id"), None, "that of another request");
    let refused = with_body(&bench, CREATE, UUID, "{}").header("Request-Id", "r-3").send().await;
    assert_refusal(&refused, 422, "key-reused");
    assert_eq!((refused.header("idempotency-key"), refused.header("request-id")), (Some(UUID), Some("r-3")));
    bench.assert_executed(1);
}

#[tokio::test]
async fn every_post_needs_a_key() {
    let bench = start_preset().await;
    let posts = [
        CREATE,
        UPDATE,
        "/checkout_sessions/cs_1/complete",
        "/checkout_sessions/cs_1/cancel",
        "/carts",
        "/carts/c_1",
        "/carts/c_1/cancel",
        "/agentic_commerce/delegate_payment",
    ];
    for path in posts {
        let answer = bench.post(path).header("Authorization", "Bearer agent-1").json("{}").send().await;
        let refusal = assert_refusal(&answer, 400, "key-missing");
        assert_eq!((refusal["type"].as_str(), refusal["param"].as_str()), (Some("invalid_request"), None), "{path}");
    }
    bench.assert_executed(0);
    for method in ["GET", "PUT", "DELETE"] {
        passes_through(&bench, &bench.request(method, UPDATE).key(UUID)).await;
    }
}

/// The protocol contradicts itself: there the key is optional, and a reuse is a 409.
#[tokio::test]
async fn delegated_authentication_has_rules_of_its_own() {
    let bench = start_preset().await;
    for (at, path) in ["/delegate_authentication", "/delegate_authentication/s_1/authenticate"].into_iter().enumerate()
    {
        passes_through(&bench, &bench.post(path).header("Authorization", "Bearer agent-1").json("{}")).await;
        let first = with_body(&bench, path, UUID, "{}").send().await;
        assert_run(&first, 3 * at + 3);
        assert_replay(&with_body(&bench, path, UUID, "{}").send().await, &first, &REPLAY);
        assert_refusal(&with_body(&bench, path, UUID, r#"{"a":1}"#).send().await, 409, "key-reused");
    }
}

#[tokio::test]
async fn a_key_is_an_opaque_string_of_up_to_255_characters() {
    let bench = start_preset().await;
    let keys = ["k".to_owned(), "k".repeat(255), "order 1, part;2".into(), "\"k\"".into()];
    for (run, key) in keys.iter().enumerate() {
        let first = checkout(&bench, key).send().await;
        assert_run(&first, run + 1);
        assert_replay(&checkout(&bench, key).send().await, &first, &REPLAY);
    }
    for bad in ["k".repeat(256), String::new(), "  ".into()] {
        key_is_invalid(&bench, &checkout(&bench, &bad)).await;
    }
    bench.assert_executed(keys.len());
}

#[tokio::test]
async fn equal_json_is_the_same_request_and_nothing_else_is_compared() {
    let bench = start_preset().await;
    let first = checkout(&bench, UUID).send().await;
    assert_run(&first, 1);
    for same in [
        r#"{"buyer":{"email":null},"items":[{"quantity":1,"id":"a"},{"quantity":2,"id":"b"}]}"#,
        "{\n  \"items\": [{\"id\": \"a\", \"quantity\": 1}, {\"id\": \"b\", \"quantity\": 2}], \"buyer\": {\"email\": null}\n}",
        r#"{"items":[{"id":"a","quantity":1.0},{"id":"b","quantity":20e-1}],"buyer":{"email":null}}"#,
        r#"{"items":[{"id":"\u0061","quantity":1},{"id":"b","quantity":2.00}],"buyer":{"email":null}}"#,
    ] {
        let retry = with_body(&bench, CREATE, UUID, same).header("Accept-Language", "de").header("If-Match", "\"1\"");
        assert_replay(&retry.send().await, &first, &REPLAY);
    }
    for other in [
        r#"{"items":[{"id":"a","quantity":1},{"id":"b","quantity":2}],"buyer":{}}"#,
        r#"{"items":[{"id":"b","quantity":2},{"id":"a","quantity":1}],"buyer":{"email":null}}"#,
        r#"{"items":[{"id":"a","quantity":"1"},{"id":"b","quantity":2}],"buyer":{"email":null}}"#,
        r#"{"items":[{"id":"a","quantity":1},{"id":"b","quantity":2.01}],"buyer":{"email":null}}"#,
        r#"{"items":[{"id":"a","quantity":1},{"id":"b","quantity":2}],"buyer":{"email":null},"extension":true}"#,
    ] {
        assert_refusal(&with_body(&bench, CREATE, UUID, other).send().await, 422, "key-reused");
    }
    bench.assert_executed(1);
}

/// Numbers are compared by their exact value, however large, and never written out.
#[tokio::test]
async fn numbers_are_compared_exactly_whatever_their_exponent() {
    let bench = start_preset().await;
    let send = async |key: &str, number: &str| {
        let request = with_body(&bench, CREATE, key, &format!("{{\"n\":{number}}}"));
        timeout(Duration::from_secs(10), request.send()).await.expect("an exponent is not written out")
    };
    for (at, (first, same, others)) in [
        ("9007199254740992", &["9007199254740992.0", "9007199254740.992e3"][..], &["9007199254740993"][..]),
        ("0.1", &["1e-1", "0.10", "1E-1", "100e-3"], &["0.1000000000000000055511151231257827", "-0.1"]),
        ("0", &["-0", "0.0", "0e999999999", "-0.0e-7"], &["1e-999999999"]),
        ("1e999999999", &["10e999999998", "0.1e1000000000"], &["1e999999998", "1e1000000000"]),
        ("1e-999999999", &["10e-1000000000"], &["0"]),
        // Exponents beyond 64 bits are compared as written.
        ("1e99999999999999999999", &["1e99999999999999999999"], &["10e99999999999999999998", "1e99999999999999999998"]),
    ]
    .into_iter()
    .enumerate()
    {
        let key = format!("n-{at}");
        assert_run(&send(&key, first).await, at + 1);
        for same in same {
            assert_run_with_headers(&send(&key, same).await, at + 1, &REPLAY);
        }
        for other in others {
            assert_refusal(&send(&key, other).await, 422, "key-reused");
        }
    }
}

#[tokio::test]
async fn each_caller_and_each_endpoint_has_its_own_keys() {
    let bench = start_preset().await;
    let at = |agent: &str, path: &str| bench.post(path).header("Authorization", agent).key(UUID).json(BODY);
    let requests = [
        at("Bearer agent-1", CREATE),
        at("Bearer agent-2", CREATE),
        at("Bearer agent-1", UPDATE),
        at("Bearer agent-1", "/checkout_sessions/cs_2"),
    ];
    each_runs_once(&bench, &requests, &REPLAY).await;
}

#[tokio::test]
async fn of_fifty_at_once_one_runs_and_the_others_are_told_to_come_back() {
    let bench = start_preset().await;
    of_fifty_one_runs_and_the_others_come_back(&bench, &checkout(&bench, UUID), &REPLAY).await;
}

#[tokio::test]
async fn answers_are_remembered_and_server_errors_run_again() {
    let bench = start_preset().await;
    let request = |status| checkout(&bench, &format!("key-{status}"));
    remembered(&bench, &[200, 303, 400, 402, 404, 405, 409, 422, 429], request, &REPLAY).await;
    let bench = start_preset().await;
    let request = |status| checkout(&bench, &format!("key-{status}"));
    not_remembered(&bench, &[500, 502, 503, 504], request, &REPLAY).await;
}

#[tokio::test]
async fn a_lost_answer_is_held() {
    let bench = start_preset().await;
    super::a_lost_answer_is_held(&bench, &checkout(&bench, UUID)).await;
}

#[tokio::test]
async fn after_its_time_a_key_is_new() {
    let bench = TestGateway::shipped_with("acp", "ttl = \"1s\"").await;
    a_key_is_new_after(Duration::from_secs(1), &bench, &checkout(&bench, UUID)).await;
}

#[tokio::test]
async fn keys_are_masked_in_the_log() {
    let bench = start_preset().await;
    super::keys_are_masked_in_the_log(&bench, &checkout(&bench, UUID), UUID, MASKED_UUID).await;
}

#[tokio::test]
async fn the_configuration_has_the_dials_of_the_protocol() {
    let column = [
        ("methods", "POST"),
        ("scope", "credential, path"),
        ("fingerprint", "body"),
        ("json_numbers", "decimal"),
        ("on_mismatch", "reject"),
        ("on_concurrent", "reject"),
        ("on_unknown", "hold"),
        ("on_store_down", "closed"),
        ("remember", "2xx 3xx 4xx"),
        ("refusals", "acp"),
        ("unknown_status", "none"),
        ("ttl", "24h"),
        ("replay_headers", "idempotent-replayed: true"),
    ];
    every_route_has("acp", &column).await;
    let routes = checked_routes("acp").await;
    let dial = |route: usize, name: &str| routes[route].1[name].clone();
    assert_eq!(dial(0, "key"), "header:idempotency-key; required, raw, at most 255 characters");
    assert_eq!((dial(0, "status").as_str(), dial(5, "status").as_str()), ("none", "key_reused 409"));
}
