//! Stripe's published behaviour: every answer but 409 and 429 is remembered, a reuse is a 400, and refusals are as its SDKs
//! parse them. The SDKs themselves are in `stripe_clients.rs`.

use super::*;

const PATH: &str = "/v1/charges";
const KEY: &str = "KG5LxwFBepaKHyUD";
const REPLAY: [(&str, &str); 1] = [("Idempotent-Replayed", "true")];

async fn start_preset() -> TestGateway {
    TestGateway::shipped("stripe").await
}

fn with_body(bench: &TestGateway, key: &str, body: &str) -> TestRequest {
    let request = bench.post(PATH).header("Authorization", "Bearer sk_test_1").key(key);
    request.header("Content-Type", "application/x-www-form-urlencoded").body(body.to_owned())
}

fn charge(bench: &TestGateway, key: &str) -> TestRequest {
    with_body(bench, key, "amount=2000&currency=usd")
}

#[tokio::test]
async fn a_retry_gets_the_first_answer_and_is_told_so() {
    let bench = start_preset().await;
    let first = charge(&bench, KEY).send().await;
    assert_run(&first, 1);
    assert_replay(&charge(&bench, KEY).send().await, &first, &REPLAY);
    bench.assert_executed(1);
}

#[tokio::test]
async fn without_a_key_every_request_runs() {
    let bench = start_preset().await;
    passes_through(&bench, &bench.post(PATH).header("Authorization", "Bearer sk_test_1").body("amount=1")).await;
}

#[tokio::test]
async fn methods_other_than_post_pass_through() {
    let bench = start_preset().await;
    for method in ["GET", "PUT", "PATCH", "DELETE"] {
        passes_through(&bench, &bench.request(method, PATH).key(KEY)).await;
    }
}

#[tokio::test]
async fn every_answer_is_remembered_errors_too() {
    let bench = start_preset().await;
    let statuses = [200, 302, 400, 401, 402, 403, 404, 424, 500, 502, 503, 504];
    remembered(&bench, &statuses, |status| charge(&bench, &format!("key-{status}")), &REPLAY).await;
    for status in statuses {
        let replay = charge(&bench, &format!("key-{status}")).send().await;
        let retry = replay.header("stripe-should-retry");
        assert_eq!(retry, (status >= 400).then_some("false"), "a failure that is replayed stays: {replay:?}");
    }
}

#[tokio::test]
async fn conflicts_and_limits_of_the_app_are_not_remembered() {
    let bench = start_preset().await;
    not_remembered(&bench, &[409, 429], |status| charge(&bench, &format!("key-{status}")), &REPLAY).await;
}

#[tokio::test]
async fn every_answer_repeats_the_key_as_it_was_sent() {
    let bench = start_preset().await;
    for (key, status) in [("k-1".into(), 201), ("k-1".into(), 201), ("k".repeat(256), 400)] {
        let answer = charge(&bench, &key).send().await;
        assert_eq!((answer.status, answer.header("idempotency-key")), (status, Some(&*key)), "{answer:?}");
    }
    let reused = with_body(&bench, "k-1", "amount=1").send().await;
    assert_eq!((reused.status, reused.header("idempotency-key")), (400, Some("k-1")), "{reused:?}");
    let two = charge(&bench, "k-2").header("Idempotency-Key", "k-3").send().await;
    assert_eq!((two.status, two.header("idempotency-key")), (400, None), "{two:?}");
    bench.assert_executed(1);
}

#[tokio::test]
async fn refusals_that_no_route_gives_have_the_shape_too() {
    let bench = start_preset().await;
    // The path, the target and the head are judged before any policy.
    let spelled = bench.post("/v1/../v1/charges").key(KEY).body("amount=1").send().await;
    assert_refusal(&spelled, 400, "request-ambiguous");
    let mut raw = RawClient::connect(bench.gateway.addr()).await;
    raw.send(b"POST /v1/charges HTTP/1.1\r\nHost: a\r\nHost: b\r\nContent-Length: 0\r\n\r\n").await;
    assert_refusal(&raw.read_response().await, 400, "request-ambiguous");
    let large = charge(&bench, KEY).body(vec![b'a'; (1 << 20) + 1]).send().await;
    assert_refusal(&large, 413, "body-too-large");
    bench.upstream.stop().await;
    let answer = bench.request("GET", PATH).send().await;
    assert_refusal(&answer, 502, "upstream-unreachable");
    assert_eq!(answer.header("stripe-should-retry"), Some("true"), "{answer:?}");
    let head = bench.request("HEAD", PATH).send().await;
    assert_eq!((head.status, head.header("content-type"), head.body.len()), (502, Some("application/json"), 0));
}

#[tokio::test]
async fn the_shape_goes_with_the_envelope_and_with_other_presets() {
    let bench = TestGateway::everywhere("membership", "refusals = \"stripe\"").await;
    let answer = bench.post("/apply").header("X-User-Id", "u1").key("short").json("{}").send().await;
    let body = assert_refusal(&answer, 400, "key-invalid");
    assert_eq!((&body["success"], &body["error"]["code"]), (&false.into(), &"key_invalid".into()), "{body}");
    assert_eq!(body["metadata"]["requestId"].as_str(), answer.header("x-request-id"), "{body}");
    let plain = TestGateway::shipped_with("stripe", "refusals = \"problem\"").await;
    let answer = charge(&plain, &"k".repeat(256)).send().await;
    assert_eq!(answer.header("content-type"), Some("application/problem+json"), "{answer:?}");
    assert_eq!(answer.header("stripe-should-retry"), None, "{answer:?}");
}

#[tokio::test]
async fn a_key_used_with_other_parameters_is_a_400() {
    let bench = start_preset().await;
    let first = charge(&bench, KEY).send().await;
    assert_run(&first, 1);
    let post = |path: &str| {
        let request = bench.post(path).header("Authorization", "Bearer sk_test_1").key(KEY);
        request.header("Content-Type", "application/x-www-form-urlencoded").body("amount=2000&currency=usd")
    };
    for other in [
        with_body(&bench, KEY, "amount=2001&currency=usd"),
        with_body(&bench, KEY, "amount=2000"),
        post("/v1/refunds"),
        post("/v1/charges?expand=customer"),
    ] {
        let refused = assert_refusal(&other.send().await, 400, "key-reused");
        assert_eq!(refused["error"]["doc_url"], Value::Null, "{refused}");
    }
    // Preconditions are no parameters, and the order of fields does not count.
    for same in [
        charge(&bench, KEY).header("If-Match", "\"1\""),
        with_body(&bench, KEY, "currency=usd&amount=2000"),
        with_body(&bench, KEY, "amount=%32000&currency=usd"),
    ] {
        assert_replay(&same.send().await, &first, &REPLAY);
    }
    bench.assert_executed(1);
}

#[tokio::test]
async fn each_account_and_each_host_has_its_own_keys() {
    let bench = start_preset().await;
    let with = |account: &str| bench.post(PATH).header("Authorization", account).key(KEY).body("amount=1");
    assert_run(&with("Bearer sk_test_1").send().await, 1);
    assert_run(&with("Bearer sk_test_2").send().await, 2);
    assert_run(&with("Bearer sk_test_1").header("Host", "b.example").send().await, 3);
    assert_run_with_headers(&with("Bearer sk_test_2").send().await, 2, &REPLAY);
    bench.assert_executed(3);
}

/// The same secret key acts for several connected accounts.
#[tokio::test]
async fn each_connected_account_has_its_own_keys() {
    let trusting_nobody = format!("trusted_proxies = []\n{}", shipped_config("stripe"));
    for config in [shipped_config("stripe"), trusting_nobody] {
        let bench = TestGateway::in_memory(&config).await;
        let with = |headers: &[(&str, &str)]| {
            headers.iter().fold(charge(&bench, KEY), |request, (name, value)| request.header(*name, *value))
        };
        let callers = [
            with(&[]),
            with(&[("Stripe-Account", "acct_1")]),
            with(&[("Stripe-Account", "acct_2")]),
            with(&[("Stripe-Context", "acct_1")]),
            with(&[("Stripe-Account", "acct_1"), ("Stripe-Context", "acct_1")]),
        ];
        for (run, caller) in callers.iter().enumerate() {
            assert_run(&caller.send().await, run + 1);
        }
        for (run, caller) in callers.iter().enumerate() {
            assert_run_with_headers(&caller.send().await, run + 1, &REPLAY);
        }
        let twice = with(&[("Stripe-Account", "acct_1"), ("Stripe-Account", "acct_2")]);
        assert_refusal(&twice.send().await, 400, "request-ambiguous");
        bench.assert_executed(callers.len());
    }
}

#[tokio::test]
async fn a_key_is_the_headers_value_as_it_is() {
    let bench = start_preset().await;
    let keys = ["order 1", "order,1", "order;1", "\"order\"", "order", "a=\"b"];
    for (run, key) in keys.into_iter().enumerate() {
        let first = charge(&bench, key).send().await;
        assert_run(&first, run + 1);
        assert_replay(&charge(&bench, key).send().await, &first, &REPLAY);
    }
    bench.assert_executed(keys.len());
}

#[tokio::test]
async fn keys_have_up_to_255_characters() {
    let bench = start_preset().await;
    assert_run(&charge(&bench, &"k".repeat(255)).send().await, 1);
    key_is_invalid(&bench, &charge(&bench, &"k".repeat(256))).await;
    for bad in ["", "   ", "a\tb"] {
        key_is_invalid(&bench, &charge(&bench, bad)).await;
    }
}

#[tokio::test]
async fn of_fifty_at_once_one_runs_and_the_others_are_told_to_come_back() {
    let bench = start_preset().await;
    of_fifty_one_runs_and_the_others_come_back(&bench, &charge(&bench, KEY), &REPLAY).await;
}

#[tokio::test]
async fn a_lost_answer_is_held() {
    let bench = start_preset().await;
    super::a_lost_answer_is_held(&bench, &charge(&bench, KEY)).await;
    assert_refusal(&with_body(&bench, KEY, "amount=1").send().await, 400, "key-reused");
}

#[tokio::test]
async fn after_its_time_a_key_is_new() {
    let bench = TestGateway::shipped_with("stripe", "ttl = \"1s\"").await;
    a_key_is_new_after(Duration::from_secs(1), &bench, &charge(&bench, KEY)).await;
}

#[tokio::test]
async fn keys_are_masked_in_the_log() {
    let bench = start_preset().await;
    super::keys_are_masked_in_the_log(&bench, &charge(&bench, KEY), KEY, "KG5L****HyUD").await;
}

#[tokio::test]
async fn the_configuration_has_the_dials_of_the_column() {
    let column = [
        ("methods", "POST"),
        ("key", "header:idempotency-key; optional, raw, at most 255 characters"),
        ("scope", "host, credential, header:stripe-account?, header:stripe-context?"),
        ("fingerprint", "method, path, query, type, body"),
        ("on_mismatch", "reject"),
        ("on_concurrent", "reject"),
        ("on_unknown", "hold"),
        ("on_store_down", "closed"),
        ("remember", "!409 !429"),
        ("refusals", "stripe"),
        ("unknown_status", "none"),
        ("digest_status", "original"),
        ("ttl", "24h"),
        ("lease", "30s"),
        ("first_headers", "none"),
        ("replay_headers", "idempotent-replayed: true"),
        ("status", "key_reused 400"),
        ("envelope", "none"),
    ];
    every_route_has("stripe", &column).await;
}
