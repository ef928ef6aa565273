//! Every mutation needs a key; a repeat gets the same answer, a failure too; another request is refused.

use super::*;

const PATH: &str = "/v1/orders";
const KEY: &str = "order-2025-10-01-000017";
const BODY: &str = r#"{"sku":"a-1","count":2}"#;

async fn start_preset() -> TestGateway {
    TestGateway::shipped("platform").await
}

fn order(bench: &TestGateway, key: &str) -> TestRequest {
    bench.post(PATH).key(key).json(BODY)
}

#[tokio::test]
async fn done_a_repeat_gets_the_same_answer_and_code() {
    let bench = start_preset().await;
    bench
        .upstream
        .on(PATH, UpstreamReply::usual().header("Location", "/v1/orders/1").header("ETag", "\"1\"").set_cookie("a=b"));
    let first = order(&bench, KEY).send().await;
    assert_run(&first, 1);
    let repeat = order(&bench, KEY).send().await;
    assert_replay(&repeat, &first, &NO_HEADERS);
    assert_eq!((repeat.header("etag"), repeat.header("set-cookie")), (Some("\"1\""), None));
    bench.assert_executed(1);
}

#[tokio::test]
async fn failed_a_repeat_gets_the_error() {
    let bench = start_preset().await;
    bench
        .upstream
        .on_each(PATH, [UpstreamReply::status(500).json(r#"{"error":"out of stock"}"#), UpstreamReply::usual()]);
    let first = order(&bench, KEY).send().await;
    assert_eq!((first.status, first.text(), ibid_headers(&first)), (500, r#"{"error":"out of stock"}"#.into(), vec![]));
    for _ in 0..2 {
        assert_replay(&order(&bench, KEY).send().await, &first, &NO_HEADERS);
    }
    bench.assert_executed(1);
}

#[tokio::test]
async fn every_answer_is_remembered_errors_too() {
    let bench = start_preset().await;
    let request = |status: u16| order(&bench, &format!("key-{status}"));
    remembered(&bench, &[200, 301, 400, 401, 404, 409, 422, 425, 429, 500, 502, 503, 504], request, &NO_HEADERS).await;
}

#[tokio::test]
async fn processing_of_fifty_at_once_one_runs_and_the_others_get_409() {
    let bench = start_preset().await;
    of_fifty_one_runs_and_the_others_come_back(&bench, &order(&bench, KEY), &NO_HEADERS).await;
}

#[tokio::test]
async fn processing_is_425_by_dial() {
    let bench = TestGateway::shipped_with("platform", "status.in_progress = 425").await;
    let gate = ReplyGate::new();
    bench.upstream.on(PATH, UpstreamReply::usual().gated(&gate));
    let mut first = burst(1, &order(&bench, KEY));
    gate.arrived(1).await;
    let problem = assert_refusal(&order(&bench, KEY).send().await, 425, "in-progress");
    assert_eq!(problem["key"], "orde****0017");
    gate.open();
    let first = next(&mut first).await;
    assert_run(&first, 1);
    assert_replay(&order(&bench, KEY).send().await, &first, &NO_HEADERS);
    bench.assert_executed(1);
}

#[tokio::test]
async fn every_mutation_needs_a_key() {
    let bench = start_preset().await;
    for method in ["POST", "PUT", "PATCH", "DELETE"] {
        let problem = assert_refusal(&bench.request(method, PATH).json(BODY).send().await, 400, "key-missing");
        assert!(problem["detail"].as_str().unwrap().contains("idempotency-key"), "{problem}");
    }
    let other = bench.post(PATH).header("X-Idempotency-Key", KEY).json(BODY);
    assert_refusal(&other.send().await, 400, "key-missing");
    assert_eq!(bench.upstream.requests(), 0);
}

#[tokio::test]
async fn every_mutating_method_runs_once_on_every_path_and_reading_passes_through() {
    let bench = start_preset().await;
    for (run, method) in ["POST", "PUT", "PATCH", "DELETE"].into_iter().enumerate() {
        let request = bench.request(method, &format!("/any/{method}")).key(format!("key-{method}")).json(BODY);
        let first = request.send().await;
        assert_run(&first, run + 1);
        assert_replay(&request.send().await, &first, &NO_HEADERS);
    }
    bench.assert_executed(4);
    passes_through(&bench, &bench.request("GET", PATH).key(KEY)).await;
    passes_through(&bench, &bench.request("GET", PATH)).await;
}

#[tokio::test]
async fn a_repeat_with_another_method_path_or_body_is_refused() {
    let bench = start_preset().await;
    let first = order(&bench, KEY).send().await;
    assert_run(&first, 1);
    for other in [
        bench.request("PUT", PATH).key(KEY).json(BODY),
        bench.post("/v1/orders/2").key(KEY).json(BODY),
        bench.post(PATH).key(KEY).json(r#"{"sku":"a-1","count":3}"#),
        bench.post(PATH).key(KEY).json(r#"{"sku":"a-1","count":2.0}"#),
        bench.post(PATH).key(KEY),
    ] {
        let problem = assert_refusal(&other.send().await, 422, "key-reused");
        assert_eq!(problem["key"], "orde****0017");
    }
    assert_replay(&order(&bench, KEY).send().await, &first, &NO_HEADERS);
    bench.assert_executed(1);
}

#[tokio::test]
async fn the_same_body_in_another_spelling_with_other_headers_or_query_is_the_same_request() {
    let bench = start_preset().await;
    let first = order(&bench, KEY).send().await;
    assert_run(&first, 1);
    for same in [
        bench.post(PATH).key(KEY).json("{ \"count\": 2, \"sku\": \"a\\u002d1\" }"),
        bench.post(&format!("{PATH}?trace=1")).key(KEY).json(BODY),
        order(&bench, KEY).header("X-Currency", "EUR").header("If-Match", "\"1\"").header("User-Agent", "b"),
        order(&bench, KEY).header("Authorization", "Bearer b").header("Host", "b.example"),
        order(&bench, &format!("\"{KEY}\"")),
    ] {
        assert_replay(&same.send().await, &first, &NO_HEADERS);
    }
    bench.assert_executed(1);
}

#[tokio::test]
async fn critical_headers_count_where_they_are_listed() {
    let listed = r#"fingerprint = ["method", "path", "body", "header:X-Currency"]"#;
    let bench = TestGateway::shipped_with("platform", listed).await;
    let with = |currency: &str| order(&bench, KEY).header("X-Currency", currency);
    let first = with("EUR").send().await;
    assert_run(&first, 1);
    assert_replay(&with("EUR").header("X-Other", "1").send().await, &first, &NO_HEADERS);
    assert_refusal(&with("USD").send().await, 422, "key-reused");
    assert_refusal(&order(&bench, KEY).send().await, 422, "key-reused");
    bench.assert_executed(1);
}

#[tokio::test]
async fn another_request_is_refused_as_such_while_the_first_is_running_and_after_it_failed() {
    let bench = start_preset().await;
    let gate = ReplyGate::new();
    bench.upstream.on(PATH, UpstreamReply::status(500).gated(&gate));
    let mut first = burst(1, &order(&bench, KEY));
    gate.arrived(1).await;
    let other = bench.post(PATH).key(KEY).json(r#"{"sku":"b"}"#);
    assert_refusal(&other.send().await, 422, "key-reused");
    gate.open();
    assert_eq!(next(&mut first).await.status, 500);
    assert_refusal(&other.send().await, 422, "key-reused");
    bench.assert_executed(1);
}

#[tokio::test]
async fn another_request_is_refused_as_such_after_a_lost_answer() {
    let bench = start_preset().await;
    bench.upstream.on(PATH, UpstreamFault::ResetAfterRequest);
    assert_refusal(&order(&bench, KEY).send().await, 502, "upstream-lost");
    assert_refusal(&bench.post(PATH).key(KEY).json(r#"{"sku":"b"}"#).send().await, 422, "key-reused");
    bench.assert_executed(1);
}

#[tokio::test]
async fn any_visible_ascii_up_to_255_characters_is_a_key() {
    let bench = start_preset().await;
    for (run, key) in [UUID, "1", "a:b/c", &"k".repeat(255), &format!("\"{}\"", "q".repeat(255))].iter().enumerate() {
        assert_run(&order(&bench, key).send().await, run + 1);
    }
    for key in ["", "\"\"", "a b", "a,b", "a;b", "clé", &"k".repeat(256)] {
        key_is_invalid(&bench, &order(&bench, key)).await;
    }
    bench.assert_executed(5);
}

#[tokio::test]
async fn a_lost_answer_is_run_again_once_its_lease_has_lapsed() {
    let bench = TestGateway::shipped_with("platform", SHORT_LEASE).await;
    let (second, third) = a_lost_answer_runs_again(&bench, &order(&bench, KEY)).await;
    assert_run(&second, 2);
    assert_replay(&third, &second, &NO_HEADERS);
}

#[tokio::test]
async fn a_timed_out_operation_runs_again_after_its_lease() {
    let bench = TestGateway::shipped_with("platform", "timeout = \"200ms\"\nlease = \"1s\"").await;
    let request = order(&bench, KEY);
    super::a_timed_out_operation_runs_again_after_its_lease(&bench, &request, Duration::from_secs(1)).await;
}

#[tokio::test]
async fn after_its_time_a_key_is_new() {
    let bench = TestGateway::shipped_with("platform", "ttl = \"1s\"").await;
    a_key_is_new_after(Duration::from_secs(1), &bench, &order(&bench, KEY)).await;
}

#[tokio::test]
async fn after_its_time_a_key_is_free_for_another_request() {
    let bench = TestGateway::shipped_with("platform", "ttl = \"500ms\"").await;
    assert_run(&order(&bench, KEY).send().await, 1);
    let other = bench.post(PATH).key(KEY).json(r#"{"sku":"b"}"#);
    let free = async {
        loop {
            let answer = other.send().await;
            if answer.status != 422 {
                return answer;
            }
            sleep(Duration::from_millis(50)).await;
        }
    };
    assert_run(&timeout(LIFETIME_TIMEOUT, free).await.expect("the key becomes free"), 2);
}

#[tokio::test]
async fn alternative_only_the_status_is_kept() {
    let bench = TestGateway::shipped_with("platform", "remember_body = false").await;
    let first = order(&bench, KEY).send().await;
    assert_run(&first, 1);
    let repeat = order(&bench, KEY).send().await;
    assert_eq!((repeat.status, repeat.text(), ibid_headers(&repeat)), (201, String::new(), vec![]), "{repeat:?}");
    assert_eq!(repeat.header("content-type"), None, "{repeat:?}");
    bench.assert_executed(1);
}

#[tokio::test]
async fn keys_are_masked_in_the_log() {
    let bench = start_preset().await;
    super::keys_are_masked_in_the_log(&bench, &order(&bench, UUID), UUID, MASKED_UUID).await;
}

#[tokio::test]
async fn the_configuration_has_the_dials_of_the_column() {
    let column = [
        ("methods", "POST, PUT, PATCH, DELETE"),
        ("key", "header:idempotency-key; required, any, at most 255 characters"),
        ("scope", "global"),
        ("fingerprint", "method, path, body"),
        ("on_mismatch", "reject"),
        ("on_concurrent", "reject"),
        ("on_unknown", "retry"),
        ("on_store_down", "closed"),
        ("remember", "all"),
        ("unknown_status", "none"),
        ("digest_status", "original"),
        ("ttl", "24h"),
        ("lease", "5m"),
        ("timeout", "5m"),
        ("first_headers", "none"),
        ("replay_headers", "none"),
        ("status", "none"),
        ("envelope", "none"),
    ];
    every_route_has("platform", &column).await;
}
