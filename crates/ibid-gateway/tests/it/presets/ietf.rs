//! The IETF draft, strict: what ibid does unless told otherwise.

use super::*;

const PATH: &str = "/payments";
const KEY: &str = "8e03978e-40d5-43e8-bc93-6894a57f9324";
const MASKED_KEY: &str = "8e03****9324";
const BODY: &str = r#"{"amount":100,"currency":"EUR"}"#;
const REPLAY: [(&str, &str); 1] = [("Idempotent-Replayed", "true")];

async fn start_preset() -> TestGateway {
    TestGateway::shipped("ietf").await
}

fn payment(bench: &TestGateway, key: &str) -> TestRequest {
    bench.post(PATH).header("Authorization", "Bearer alice").key(key).json(BODY)
}

#[tokio::test]
async fn a_retry_gets_the_first_answer_and_is_told_so() {
    let bench = start_preset().await;
    let reply =
        UpstreamReply::usual().header("Location", "/payments/1").header("ETag", "\"1\"").header("Vary", "Accept");
    let reply = reply.header("Cache-Control", "no-cache").set_cookie("a=b").header("Server-Timing", "db");
    bench.upstream.on(PATH, reply.header("Age", "1").header("Alt-Svc", "clear"));
    let first = payment(&bench, KEY).send().await;
    assert_run(&first, 1);
    let retry = payment(&bench, KEY).send().await;
    assert_eq!((retry.status, retry.text(), ibid_headers(&retry)), (201, first.text(), REPLAY.to_vec()), "{retry:?}");
    for (name, value) in
        [("location", "/payments/1"), ("etag", "\"1\""), ("vary", "Accept"), ("cache-control", "no-cache")]
    {
        assert_eq!(retry.header(name), Some(value), "{retry:?}");
    }
    for never in ["set-cookie", "server-timing", "age", "alt-svc"] {
        assert!(first.headers.contains(never), "{first:?}");
        assert!(!retry.headers.contains(never), "{retry:?}");
    }
    assert!(retry.headers.contains("date"), "{retry:?}");
    bench.assert_executed(1);
}

#[tokio::test]
async fn without_a_key_every_request_runs() {
    let bench = start_preset().await;
    for method in ["POST", "PUT", "PATCH", "DELETE"] {
        passes_through(&bench, &bench.request(method, PATH).json(BODY)).await;
    }
    passes_through(&bench, &bench.post(PATH).header("X-Idempotency-Key", KEY).json(BODY)).await;
}

#[tokio::test]
async fn mutating_methods_run_once_and_reading_passes_through() {
    let bench = start_preset().await;
    for (run, method) in ["POST", "PUT", "PATCH", "DELETE"].into_iter().enumerate() {
        let request = bench.request(method, "/any").key(format!("key-{method}")).json(BODY);
        let first = request.send().await;
        assert_run(&first, run + 1);
        assert_replay(&request.send().await, &first, &REPLAY);
    }
    bench.assert_executed(4);
    passes_through(&bench, &bench.request("GET", PATH).key(KEY)).await;
    passes_through(&bench, &bench.request("OPTIONS", PATH).key(KEY)).await;
}

#[tokio::test]
async fn a_quoted_key_and_a_bare_one_are_the_same() {
    let bench = start_preset().await;
    let first = payment(&bench, &format!("\"{KEY}\"")).send().await;
    assert_run(&first, 1);
    assert_replay(&payment(&bench, KEY).send().await, &first, &REPLAY);
    // Only UUID formats ignore case.
    assert_run(&payment(&bench, &KEY.to_uppercase()).send().await, 2);
    bench.assert_executed(2);
}

#[tokio::test]
async fn any_visible_ascii_up_to_255_characters_is_a_key() {
    let bench = start_preset().await;
    for (run, key) in ["1", "a:b/c?d", &"k".repeat(255), r#""a\"b\\c""#].iter().enumerate() {
        assert_run(&payment(&bench, key).send().await, run + 1);
    }
    let two = payment(&bench, "a").key("b");
    key_is_invalid(&bench, &two).await;
    for key in
        ["", " ", "\"\"", "\" \"", "a b", "a,b", "\"a\",\"b\"", "\"a\";p=1", "a;p=1", "clé", "\"a", "\"\\a\"", "a\tb"]
    {
        key_is_invalid(&bench, &payment(&bench, key)).await;
    }
    key_is_invalid(&bench, &payment(&bench, &"k".repeat(256))).await;
    bench.assert_executed(4);
}

#[tokio::test]
async fn each_caller_and_each_host_has_its_own_keys() {
    let bench = start_preset().await;
    let from = |name: &str, value: &str| bench.post(PATH).header(name, value).key(KEY).json(BODY);
    let callers = [
        from("Authorization", "Bearer alice"),
        from("Authorization", "Bearer bob"),
        from("X-Api-Key", "alice"),
        from("Authorization", "Bearer alice").header("Host", "other.example"),
        bench.post(PATH).key(KEY).json(BODY),
    ];
    for (run, caller) in callers.iter().enumerate() {
        assert_run(&caller.send().await, run + 1);
    }
    for (run, caller) in callers.iter().enumerate() {
        assert_run_with_headers(&caller.send().await, run + 1, &REPLAY);
    }
    bench.assert_executed(5);
}

#[tokio::test]
async fn a_caller_known_by_cookies_only_is_told_which_setting_to_use() {
    let bench = start_preset().await;
    let cookies = bench.post(PATH).header("Cookie", "session=1; theme=dark").json(BODY);
    let problem = assert_refusal(&cookies.clone().key(KEY).send().await, 400, "scope-missing");
    assert!(problem["detail"].as_str().unwrap().contains("cookie:session"), "{problem}");
    assert_eq!(bench.upstream.requests(), 0);
    assert_run(&cookies.header("Authorization", "Bearer alice").key(KEY).send().await, 1);
}

#[tokio::test]
async fn a_key_used_for_a_different_request_is_refused() {
    let bench = start_preset().await;
    let first = payment(&bench, KEY).send().await;
    assert_run(&first, 1);
    let alice = |method: &str, path: &str| bench.request(method, path).header("Authorization", "Bearer alice").key(KEY);
    for other in [
        alice("PUT", PATH).json(BODY),
        alice("POST", "/refunds").json(BODY),
        alice("POST", "/payments/x").json(BODY),
        alice("POST", "/payments?a=1").json(BODY),
        alice("POST", PATH).json(r#"{"amount":101,"currency":"EUR"}"#),
        alice("POST", PATH).header("Content-Type", "text/plain").body(BODY),
        payment(&bench, KEY).header("If-Match", "\"1\""),
        payment(&bench, KEY).header("If-None-Match", "*"),
        payment(&bench, KEY).header("If-Unmodified-Since", "Mon, 01 Jan 2024 00:00:00 GMT"),
        payment(&bench, KEY).header("Content-Range", "bytes 0-9/20"),
    ] {
        let problem = assert_refusal(&other.send().await, 422, "key-reused");
        assert_eq!(problem["key"], MASKED_KEY);
    }
    for same in [
        alice("POST", "/payments/").json(BODY),
        alice("POST", PATH).json("{ \"currency\" : \"EUR\", \"amount\" : 100 }"),
        payment(&bench, KEY).header("User-Agent", "other/1").header("X-Trace", "2"),
        payment(&bench, KEY).chunked(),
    ] {
        assert_replay(&same.send().await, &first, &REPLAY);
    }
    bench.assert_executed(1);
}

#[tokio::test]
async fn a_multipart_body_is_the_same_under_another_boundary() {
    let bench = start_preset().await;
    let upload = |boundary: &str, file: &str| {
        let part = "Content-Disposition: form-data; name=\"f\"; filename=\"a.txt\"\r\nContent-Type: text/plain";
        let request = bench.post("/files").key(KEY);
        let request = request.header("Content-Type", format!("multipart/form-data; boundary={boundary}"));
        request.body(format!("--{boundary}\r\n{part}\r\n\r\n{file}\r\n--{boundary}--\r\n"))
    };
    let first = upload("one", "hello").send().await;
    assert_run(&first, 1);
    assert_replay(&upload("two", "hello").send().await, &first, &REPLAY);
    assert_refusal(&upload("three", "bye").send().await, 422, "key-reused");
    bench.assert_executed(1);
}

#[tokio::test]
async fn of_fifty_at_once_one_runs_and_the_others_are_told_to_come_back() {
    let bench = start_preset().await;
    of_fifty_one_runs_and_the_others_come_back(&bench, &payment(&bench, KEY), &REPLAY).await;
}

#[tokio::test]
async fn another_request_is_refused_as_such_while_the_first_is_running() {
    let bench = start_preset().await;
    let gate = ReplyGate::new();
    bench.upstream.on(PATH, UpstreamReply::usual().gated(&gate));
    let mut first = burst(1, &payment(&bench, KEY));
    gate.arrived(1).await;
    let other = bench.post(PATH).header("Authorization", "Bearer alice").key(KEY).json("{}");
    assert_refusal(&other.send().await, 422, "key-reused");
    gate.open();
    assert_run(&next(&mut first).await, 1);
}

#[tokio::test]
async fn final_answers_are_remembered() {
    let bench = start_preset().await;
    let statuses = [200, 202, 204, 301, 303, 400, 402, 404, 405, 406, 410, 412, 413, 415, 418, 422, 451];
    remembered(&bench, &statuses, |status| payment(&bench, &format!("key-{status}")), &REPLAY).await;
}

#[tokio::test]
async fn answers_that_may_change_are_not_remembered() {
    let bench = start_preset().await;
    let statuses = [307, 308, 401, 403, 408, 409, 425, 429, 500, 501, 503, 505];
    not_remembered(&bench, &statuses, |status| payment(&bench, &format!("key-{status}")), &REPLAY).await;
}

#[tokio::test]
async fn answers_of_a_gateway_behind_leave_the_outcome_unknown() {
    let bench = start_preset().await;
    for (count, status) in [502, 504].into_iter().enumerate() {
        bench.upstream.reply_by_default(UpstreamReply::status(status).json(r#"{"who":"a proxy"}"#));
        let request = payment(&bench, &format!("key-{status}"));
        let answer = request.send().await;
        assert_eq!((answer.status, answer.text()), (status, r#"{"who":"a proxy"}"#.to_owned()), "{answer:?}");
        assert_eq!(ibid_headers(&answer), NO_HEADERS, "{answer:?}");
        bench.upstream.clear_rules();
        for _ in 0..2 {
            assert_refusal(&request.send().await, 409, "outcome-unknown");
        }
        bench.assert_executed(count + 1);
    }
}

#[tokio::test]
async fn a_lost_answer_is_held() {
    let bench = start_preset().await;
    super::a_lost_answer_is_held(&bench, &payment(&bench, KEY)).await;
    // What is known of it is compared all the same.
    let other = bench.post(PATH).header("Authorization", "Bearer alice").key(KEY).json("{}");
    assert_refusal(&other.send().await, 422, "key-reused");
}

#[tokio::test]
async fn a_timed_out_operation_is_held() {
    let bench = TestGateway::shipped_with("ietf", "timeout = \"200ms\"\nlease = \"1s\"").await;
    bench.upstream.on_each(PATH, [UpstreamFault::Hang.into(), UpstreamReply::usual()]);
    assert_refusal(&payment(&bench, KEY).send().await, 504, "upstream-timeout");
    assert_refusal(&payment(&bench, KEY).send().await, 409, "in-progress");
    // The outcome is unknown once `late_answer`, a lease, has passed.
    let held = async {
        loop {
            let answer = payment(&bench, KEY).send().await;
            if !answer.text().contains("#in-progress") {
                return answer;
            }
            sleep(Duration::from_millis(50)).await;
        }
    };
    let held = timeout(LIFETIME_TIMEOUT, held).await.expect("late_answer ends");
    assert_refusal(&held, 409, "outcome-unknown");
    // It stays unknown after another lease.
    sleep(Duration::from_millis(1100)).await;
    assert_refusal(&payment(&bench, KEY).send().await, 409, "outcome-unknown");
    bench.assert_executed(1);
}

#[tokio::test]
async fn what_never_reached_the_upstream_is_not_remembered() {
    let bench = start_preset().await;
    bench.upstream.stop().await;
    assert_refusal(&payment(&bench, KEY).send().await, 502, "upstream-unreachable");
    bench.upstream.restart().await;
    assert_run(&payment(&bench, KEY).send().await, 1);
}

#[tokio::test]
async fn a_body_too_large_to_protect_is_refused() {
    let bench = TestGateway::shipped_with("ietf", "max_request = 64").await;
    let large = |size: usize| bench.post(PATH).key(KEY).body("x".repeat(size));
    for request in [large(65), large(65).chunked()] {
        let problem = assert_refusal(&request.send().await, 413, "body-too-large");
        assert_eq!(problem["key"], MASKED_KEY);
    }
    assert_eq!(bench.upstream.requests(), 0);
    assert_run(&large(64).send().await, 1);
    passes_through(&bench, &bench.post(PATH).body("x".repeat(65))).await;
}

#[tokio::test]
async fn after_its_time_a_key_is_new() {
    let bench = TestGateway::shipped_with("ietf", "ttl = \"1s\"").await;
    a_key_is_new_after(Duration::from_secs(1), &bench, &payment(&bench, KEY)).await;
}

#[tokio::test]
async fn keys_are_masked_in_the_log() {
    let bench = start_preset().await;
    super::keys_are_masked_in_the_log(&bench, &payment(&bench, KEY), KEY, MASKED_KEY).await;
    // Under twelve characters nothing is shown.
    let short = "short-key-1";
    for _ in 0..2 {
        payment(&bench, short).send().await;
    }
    bench.gateway.wait_for_log("key=\"****\"").await;
    assert!(!bench.gateway.logs().iter().any(|line| line.contains(short)));
}

#[tokio::test]
async fn the_configuration_has_the_dials_of_the_column() {
    let column = [
        ("methods", "POST, PUT, PATCH, DELETE"),
        ("key", "header:idempotency-key; optional, any, at most 255 characters"),
        ("scope", "host, credential"),
        ("label", "tenant from scope, user from scope, key masked"),
        ("fingerprint", "method, path, query, type, body, preconditions"),
        ("json_ignore", "none"),
        ("on_mismatch", "reject"),
        ("on_concurrent", "reject"),
        ("on_unknown", "hold"),
        ("resolve", "none"),
        ("on_store_down", "closed"),
        ("remember", "final"),
        ("unknown_status", "502, 504"),
        ("remember_body", "true"),
        ("max_request", "1MiB"),
        ("max_response", "1MiB"),
        ("digest_status", "original"),
        ("ttl", "24h"),
        ("lease", "30s"),
        ("timeout", "1m"),
        ("wait_timeout", "10s"),
        ("first_headers", "none"),
        ("replay_headers", "idempotent-replayed: true"),
        ("drop_headers", "server-timing, alt-svc, age"),
        ("status", "none"),
        ("grpc_status", "none"),
        ("envelope", "none"),
        ("guard", "none"),
        ("mode", "enforce"),
    ];
    every_route_has("ietf", &column).await;
}
