//! A multi-tenant API with optional keys, each tenant its own; every answer is remembered, errors too.

use testbed::upstream::filler;

use super::*;

const PATH: &str = "/api/invoices";
const BODY: &str = r#"{"customer":123}"#;
const REPLAY: [(&str, &str); 1] = [("X-Idempotency-Replay", "true")];

async fn start_preset() -> TestGateway {
    TestGateway::shipped("appsportal").await
}

fn keyed(bench: &TestGateway, method: &str, path: &str, key: &str) -> TestRequest {
    bench.request(method, path).header("X-Tenant-Id", "tenant-a").header("X-Idempotency-Key", key).json(BODY)
}

fn invoice(bench: &TestGateway, key: &str) -> TestRequest {
    keyed(bench, "POST", PATH, key)
}

#[tokio::test]
async fn test_1_a_duplicate_gets_the_first_answer_with_the_replay_header() {
    let bench = start_preset().await;
    bench.upstream.on(PATH, UpstreamReply::usual().header("Location", "/api/invoices/1").set_cookie("a=b"));
    let first = invoice(&bench, "abc-123").send().await;
    assert_run(&first, 1);
    let second = invoice(&bench, "abc-123").send().await;
    assert_replay(&second, &first, &REPLAY);
    assert_eq!(second.header("location"), Some("/api/invoices/1"));
    assert_eq!(second.header("set-cookie"), None);
    bench.assert_executed(1);
}

#[tokio::test]
async fn test_2_of_concurrent_requests_one_runs_the_others_get_409_and_then_its_answer() {
    let bench = start_preset().await;
    of_fifty_one_runs_and_the_others_come_back(&bench, &invoice(&bench, "abc-123"), &REPLAY).await;
}

#[tokio::test]
async fn test_3_after_a_network_time_out_a_retry_gets_the_answer_of_the_one_execution() {
    let bench = start_preset().await;
    let gate = ReplyGate::new();
    bench.upstream.on(PATH, UpstreamReply::usual().gated(&gate));
    let request = invoice(&bench, "abc-123");
    let gone = request.start().await;
    gate.arrived(1).await;
    gone.abort();
    assert_refusal(&request.send().await, 409, "in-progress");
    gate.open();
    let retry = send_until_not_in_progress(&request).await;
    assert_run_with_headers(&retry, 1, &REPLAY);
    bench.assert_executed(1);
}

#[tokio::test]
async fn test_4_two_keys_are_two_operations() {
    let bench = start_preset().await;
    assert_run(&invoice(&bench, "key-1").send().await, 1);
    assert_run(&invoice(&bench, "key-2").send().await, 2);
    bench.assert_executed(2);
}

#[tokio::test]
async fn scenario_4_without_a_key_every_request_runs() {
    let bench = start_preset().await;
    for method in ["POST", "PUT", "PATCH"] {
        passes_through(&bench, &bench.request(method, PATH).header("X-Tenant-Id", "tenant-a").json(BODY)).await;
        passes_through(&bench, &bench.request(method, PATH).json(BODY)).await;
    }
    // The header of other presets is not this one's.
    passes_through(&bench, &bench.post(PATH).header("X-Tenant-Id", "tenant-a").key("abc-123").json(BODY)).await;
}

#[tokio::test]
async fn scenario_5_after_its_time_a_key_is_new() {
    let bench = TestGateway::shipped_with("appsportal", "ttl = \"1s\"").await;
    a_key_is_new_after(Duration::from_secs(1), &bench, &invoice(&bench, "abc-123")).await;
}

#[tokio::test]
async fn put_and_patch_are_covered() {
    let bench = start_preset().await;
    for (run, method) in ["POST", "PUT", "PATCH"].into_iter().enumerate() {
        let request = keyed(&bench, method, "/api/invoices/7", &format!("key-{method}"));
        let first = request.send().await;
        assert_run(&first, run + 1);
        assert_replay(&request.send().await, &first, &REPLAY);
    }
    bench.assert_executed(3);
}

#[tokio::test]
async fn on_other_paths_too_post_put_and_patch_are_covered_and_nothing_else() {
    let bench = TestGateway::everywhere("appsportal", "").await;
    for (run, method) in ["POST", "PUT", "PATCH"].into_iter().enumerate() {
        let request = keyed(&bench, method, "/any", &format!("key-{method}"));
        let first = request.send().await;
        assert_run(&first, run + 1);
        assert_replay(&request.send().await, &first, &REPLAY);
    }
    for method in ["GET", "DELETE"] {
        passes_through(&bench, &keyed(&bench, method, "/any", "abc-123")).await;
    }
}

#[tokio::test]
async fn get_and_delete_and_paths_outside_the_api_pass_through() {
    let bench = start_preset().await;
    for method in ["GET", "DELETE"] {
        passes_through(&bench, &keyed(&bench, method, PATH, "abc-123")).await;
    }
    passes_through(&bench, &keyed(&bench, "POST", "/health", "abc-123")).await;
}

#[tokio::test]
async fn tenants_can_use_the_same_key() {
    let bench = start_preset().await;
    let of =
        |tenant: &str| bench.post(PATH).header("X-Tenant-Id", tenant).header("X-Idempotency-Key", "abc-123").json(BODY);
    let (a, b) = (of("tenant-a").send().await, of("tenant-b").send().await);
    assert_run(&a, 1);
    assert_run(&b, 2);
    assert_replay(&of("tenant-a").send().await, &a, &REPLAY);
    assert_replay(&of("tenant-b").send().await, &b, &REPLAY);
    // Who within the tenant asks does not count.
    assert_replay(&of("tenant-a").header("Authorization", "Bearer x").send().await, &a, &REPLAY);
    bench.assert_executed(2);
}

#[tokio::test]
async fn a_key_without_a_tenant_is_refused() {
    let bench = start_preset().await;
    let request = bench.post(PATH).header("X-Idempotency-Key", UUID).json(BODY);
    for request in [request.clone(), request.header("X-Tenant-Id", "")] {
        let problem = assert_refusal(&request.send().await, 400, "scope-missing");
        assert!(problem["detail"].as_str().unwrap().contains("x-tenant-id"), "{problem}");
        assert_eq!(problem["key"], MASKED_UUID);
    }
    assert_eq!(bench.upstream.requests(), 0);
}

#[tokio::test]
async fn a_tenant_is_believed_from_trusted_proxies_only() {
    let trusted = r#"["127.0.0.0/8", "::1/128"]"#;
    let config = shipped_config("appsportal");
    assert!(config.contains(trusted), "{config}");
    let bench = TestGateway::in_memory(&config.replace(trusted, r#"["192.0.2.0/24"]"#)).await;
    let problem = assert_refusal(&invoice(&bench, "abc-123").send().await, 403, "scope-refused");
    assert!(problem["detail"].as_str().unwrap().contains("trusted_proxies"), "{problem}");
    assert_eq!(bench.upstream.requests(), 0);
}

#[tokio::test]
async fn keys_of_more_than_128_characters_are_refused() {
    let bench = start_preset().await;
    assert_run(&invoice(&bench, &"k".repeat(128)).send().await, 1);
    assert_run(&invoice(&bench, &format!("\"{}\"", "q".repeat(128))).send().await, 2);
    key_is_invalid(&bench, &invoice(&bench, &"k".repeat(129))).await;
    bench.assert_executed(2);
}

#[tokio::test]
async fn any_visible_ascii_is_a_key() {
    let bench = start_preset().await;
    for (run, key) in [UUID, "abc-123", "1", "a:b/c?d=e&f", "\"with, comma; and more\""].into_iter().enumerate() {
        let key = key.replace(' ', "_");
        let first = invoice(&bench, &key).send().await;
        assert_run(&first, run + 1);
        assert_replay(&invoice(&bench, &key).send().await, &first, &REPLAY);
    }
    for key in ["", "\"\"", "a b", "a,b", "a;b", "clé", "\"open", "\"a\\n\""] {
        key_is_invalid(&bench, &invoice(&bench, key)).await;
    }
}

#[tokio::test]
async fn a_key_used_for_something_else_gets_the_first_answer() {
    let bench = start_preset().await;
    let first = invoice(&bench, "abc-123").send().await;
    assert_run(&first, 1);
    let other = bench.request("PUT", "/api/other?x=1").header("X-Tenant-Id", "tenant-a");
    let other = other.header("X-Idempotency-Key", "abc-123").json(r#"{"customer":456}"#);
    assert_replay(&other.send().await, &first, &REPLAY);
    bench.assert_executed(1);
}

#[tokio::test]
async fn every_answer_is_remembered_errors_too() {
    let bench = start_preset().await;
    let request = |status: u16| invoice(&bench, &format!("key-{status}"));
    remembered(&bench, &[200, 204, 303, 400, 403, 404, 409, 422, 429, 500, 502, 503, 504], request, &REPLAY).await;
}

#[tokio::test]
async fn a_lost_answer_is_run_again_once_its_lease_has_lapsed() {
    let bench = TestGateway::shipped_with("appsportal", SHORT_LEASE).await;
    let (second, third) = a_lost_answer_runs_again(&bench, &invoice(&bench, "abc-123")).await;
    assert_run(&second, 2);
    assert_replay(&third, &second, &REPLAY);
}

#[tokio::test]
async fn a_conflict_persists_until_the_lock_expires() {
    let bench = TestGateway::shipped_with("appsportal", "timeout = \"200ms\"\nlease = \"1s\"").await;
    let request = invoice(&bench, "abc-123");
    a_timed_out_operation_runs_again_after_its_lease(&bench, &request, Duration::from_secs(1)).await;
}

#[tokio::test]
async fn a_replay_too_large_to_keep_has_the_first_status() {
    let bench = TestGateway::shipped_with("appsportal", "max_response = 64").await;
    bench.upstream.on(PATH, UpstreamReply::status(202).header("Content-Type", "text/plain").large(1000));
    let first = invoice(&bench, "abc-123").send().await;
    assert_eq!((first.status, &first.body), (202, &filler(1000)));
    assert_eq!(ibid_headers(&first), NO_HEADERS);
    let replay = invoice(&bench, "abc-123").send().await;
    assert_eq!(replay.status, 202, "{replay:?}");
    assert_eq!(ibid_headers(&replay), [("Idempotency-Body", "digest"), REPLAY[0]], "{replay:?}");
    assert_eq!(replay.json()["length"], 1000);
    bench.assert_executed(1);
}

#[tokio::test]
async fn a_complete_response_of_three_megabytes_is_kept_and_a_request_of_two_is_taken() {
    let bench = start_preset().await;
    bench.upstream.on(PATH, UpstreamReply::status(200).header("Content-Type", "text/plain").large(3_000_000));
    let request = || invoice(&bench, "abc-123").body(vec![b'a'; 2_000_000]);
    let first = request().send().await;
    assert_eq!((first.status, first.body.len()), (200, 3_000_000));
    let replay = request().send().await;
    assert_eq!((replay.status, ibid_headers(&replay)), (200, REPLAY.to_vec()), "{}", replay.status);
    assert!(replay.body == first.body, "the whole response");
    bench.assert_executed(1);
}

#[tokio::test]
async fn keys_are_masked_in_the_log() {
    let bench = start_preset().await;
    super::keys_are_masked_in_the_log(&bench, &invoice(&bench, UUID), UUID, MASKED_UUID).await;
}

#[tokio::test]
async fn the_configuration_has_the_dials_of_the_column() {
    let column = [
        ("methods", "POST, PUT, PATCH"),
        ("key", "header:x-idempotency-key; optional, any, at most 128 characters"),
        ("scope", "header:x-tenant-id"),
        ("fingerprint", "none"),
        ("on_mismatch", "ignore"),
        ("on_concurrent", "reject"),
        ("on_unknown", "retry"),
        ("on_store_down", "open"),
        ("remember", "all"),
        ("unknown_status", "none"),
        ("digest_status", "original"),
        ("ttl", "24h"),
        ("lease", "5m"),
        ("timeout", "5m"),
        ("max_request", "10MiB"),
        ("max_response", "10MiB"),
        ("first_headers", "none"),
        ("replay_headers", "x-idempotency-replay: true"),
        ("envelope", "none"),
    ];
    every_route_has("appsportal", &column).await;
}
