//! A UUID v4 and the body together name a submission for five minutes.

use super::*;

const PATH: &str = "/api/leads";
const LEAD: &str = r#"{"name":"Test","email":"test@example.com"}"#;

fn lead(bench: &TestGateway, body: &str) -> TestRequest {
    bench.post(PATH).header("X-Idempotency-Key", UUID).json(body)
}

async fn start_preset() -> TestGateway {
    TestGateway::shipped("leads").await
}

#[tokio::test]
async fn manual_test_duplicate_detection_returns_the_cached_response() {
    let bench = start_preset().await;
    let reply =
        UpstreamReply::usual().header("X-Lead", "17").header("Location", "/api/leads/17").header("ETag", "\"1\"");
    bench.upstream.on(PATH, reply.set_cookie("session=1").header("Server-Timing", "db;dur=5"));
    let first = lead(&bench, LEAD).send().await;
    assert_run(&first, 1);
    assert_eq!(first.header("set-cookie"), Some("session=1"), "{first:?}");
    let second = lead(&bench, LEAD).send().await;
    assert_eq!((second.status, second.text()), (201, r#"{"id":1,"run":1}"#.to_owned()));
    for (name, value) in [("x-lead", "17"), ("location", "/api/leads/17"), ("etag", "\"1\"")] {
        assert_eq!(second.header(name), Some(value), "{second:?}");
    }
    for never in ["set-cookie", "server-timing"] {
        assert_eq!(second.header(never), None, "{second:?}");
    }
    assert_eq!(ibid_headers(&second), NO_HEADERS, "{second:?}");
    bench.assert_executed(1);
}

#[tokio::test]
async fn manual_test_different_data_under_the_same_key_is_a_new_request() {
    let bench = start_preset().await;
    let other = r#"{"name":"Test2","email":"test@example.com"}"#;
    let first = lead(&bench, LEAD).send().await;
    assert_run(&first, 1);
    let second = lead(&bench, other).send().await;
    assert_run(&second, 2);
    // Both are remembered.
    assert_replay(&lead(&bench, LEAD).send().await, &first, &NO_HEADERS);
    assert_replay(&lead(&bench, other).send().await, &second, &NO_HEADERS);
    bench.assert_executed(2);
}

#[tokio::test]
async fn the_same_json_spelled_otherwise_is_a_duplicate() {
    let bench = start_preset().await;
    let first = lead(&bench, r#"{"name":"Test","more":{"b":[1,2],"a":"é"}}"#).send().await;
    assert_run(&first, 1);
    for same in [
        r#"{"more":{"a":"é","b":[1,2]},"name":"Test"}"#,
        "{\n  \"name\": \"Test\",\n  \"more\": { \"b\": [ 1, 2 ], \"a\": \"é\" }\n}\n",
        r#"{"name":"\u0054est","more":{"b":[1,2],"a":"\u00e9"}}"#,
    ] {
        assert_replay(&lead(&bench, same).send().await, &first, &NO_HEADERS);
    }
    let charset = bench.post(PATH).header("X-Idempotency-Key", UUID);
    let charset = charset.header("Content-Type", "application/json; charset=utf-8");
    let same = charset.body(r#"{"more":{"b":[1,2],"a":"é"},"name":"Test"}"#);
    assert_replay(&same.send().await, &first, &NO_HEADERS);
    bench.assert_executed(1);
}

#[tokio::test]
async fn json_that_differs_in_a_number_or_in_an_order_that_counts_is_a_new_request() {
    let bench = start_preset().await;
    for (run, body) in [
        r#"{"n":9007199254740992,"l":[1,2]}"#,
        r#"{"n":9007199254740993,"l":[1,2]}"#,
        r#"{"n":9007199254740993,"l":[2,1]}"#,
        r#"{"n":9007199254740993.0,"l":[2,1]}"#,
    ]
    .iter()
    .enumerate()
    {
        assert_run(&lead(&bench, body).send().await, run + 1);
    }
    bench.assert_executed(4);
}

#[tokio::test]
async fn form_fields_in_another_order_are_a_duplicate() {
    let bench = start_preset().await;
    let form = |body: &'static str| {
        let request = bench.post(PATH).header("X-Idempotency-Key", UUID);
        request.header("Content-Type", "application/x-www-form-urlencoded").body(body)
    };
    let first = form("name=John+Doe&email=john%40example.com&phone=1").send().await;
    assert_run(&first, 1);
    for same in ["phone=1&email=john%40example.com&name=John+Doe", "email=john@example.com&name=John%20Doe&phone=1"] {
        assert_replay(&form(same).send().await, &first, &NO_HEADERS);
    }
    assert_run(&form("name=John+Doe&email=john%40example.com&phone=2").send().await, 2);
    bench.assert_executed(2);
}

#[tokio::test]
async fn other_bodies_count_byte_by_byte() {
    let bench = start_preset().await;
    let text = |body: &'static str| {
        bench.post(PATH).header("X-Idempotency-Key", UUID).header("Content-Type", "text/plain").body(body)
    };
    let first = text("a b").send().await;
    assert_run(&first, 1);
    assert_replay(&text("a b").send().await, &first, &NO_HEADERS);
    assert_run(&text("a  b").send().await, 2);
    bench.assert_executed(2);
}

#[tokio::test]
async fn a_missing_key_is_refused_and_nothing_runs() {
    let bench = start_preset().await;
    let refusal = bench.post(PATH).json(LEAD).send().await;
    let problem = assert_refusal(&refusal, 400, "key-missing");
    assert!(problem["detail"].as_str().unwrap().contains("x-idempotency-key"), "{problem}");
    assert_eq!(problem.get("key"), None, "{problem}");
    // The header of other presets is not this one's.
    assert_refusal(&bench.post(PATH).key(UUID).json(LEAD).send().await, 400, "key-missing");
    assert_eq!(bench.upstream.requests(), 0);
}

#[tokio::test]
async fn what_is_no_uuid_of_version_4_is_refused() {
    let bench = start_preset().await;
    for key in [
        "abc-123",
        "550e8400e29b41d4a716446655440000",
        "{550e8400-e29b-41d4-a716-446655440000}",
        "550e8400-e29b-11d4-a716-446655440000",
        "550e8400-e29b-41d4-c716-446655440000",
        "550e8400-e29b-41d4-a716-44665544000",
        "550e8400-e29b-41d4-a716-4466554400000",
        "550e8400-e29b-41d4-a716-44665544000g",
        "550e8400-e29b-41d4-a716_446655440000",
        "550e8400-e29b-41d4-a716-446655440000, 550e8400-e29b-41d4-a716-446655440001",
        "\"550e8400-e29b-41d4-a716-446655440000",
        "\"\"",
        "",
    ] {
        key_is_invalid(&bench, &bench.post(PATH).header("X-Idempotency-Key", key).json(LEAD)).await;
    }
    let twice = bench.post(PATH).header("X-Idempotency-Key", UUID).header("X-Idempotency-Key", UUID);
    key_is_invalid(&bench, &twice.json(LEAD)).await;
}

#[tokio::test]
async fn the_key_is_the_same_in_any_case_and_in_quotes() {
    let bench = start_preset().await;
    let with = |key: &str| bench.post(PATH).header("X-Idempotency-Key", key).json(LEAD);
    let first = with(&UUID.to_uppercase()).send().await;
    assert_run(&first, 1);
    for same in [UUID.to_owned(), format!("\"{UUID}\""), UUID.replace('e', "E")] {
        assert_replay(&with(&same).send().await, &first, &NO_HEADERS);
    }
    for variant in ['8', '9', 'a', 'b'] {
        let key = format!("650e8400-e29b-41d4-{variant}716-446655440000");
        assert_eq!(with(&key).send().await.status, 201, "{key}");
    }
    bench.assert_executed(5);
}

#[tokio::test]
async fn the_upstream_gets_the_request_with_its_key() {
    let bench = start_preset().await;
    lead(&bench, LEAD).header("Accept-Encoding", "gzip").send().await;
    let seen = bench.upstream.last();
    assert_eq!((seen.method.as_str(), seen.target.as_str(), seen.text().as_str()), ("POST", PATH, LEAD));
    assert_eq!(seen.key(), Some(UUID));
    assert_eq!((seen.attempt(), seen.header("accept-encoding")), (Some(1), None), "{seen:#?}");
    assert!(seen.fence().is_some(), "{seen:#?}");
}

#[tokio::test]
async fn keys_are_shared_by_all_callers() {
    let bench = start_preset().await;
    let first = lead(&bench, LEAD).header("Authorization", "Bearer a").header("Host", "a.example").send().await;
    assert_run(&first, 1);
    let other = lead(&bench, LEAD).header("Authorization", "Bearer b").header("Host", "b.example").send().await;
    assert_replay(&other, &first, &NO_HEADERS);
    bench.assert_executed(1);
}

#[tokio::test]
async fn nothing_but_key_and_body_names_a_submission() {
    let bench = start_preset().await;
    let first = lead(&bench, LEAD).send().await;
    assert_run(&first, 1);
    let tracked = bench.post(&format!("{PATH}?utm_source=mail")).header("X-Idempotency-Key", UUID).json(LEAD);
    assert_replay(
        &tracked.header("If-Match", "\"1\"").header("User-Agent", "other/1").send().await,
        &first,
        &NO_HEADERS,
    );
    bench.assert_executed(1);
}

#[tokio::test]
async fn of_the_methods_only_post_is_covered() {
    let bench = TestGateway::everywhere("leads", "").await;
    assert_refusal(&bench.post("/any").json(LEAD).send().await, 400, "key-missing");
    for method in ["GET", "PUT", "PATCH", "DELETE"] {
        passes_through(&bench, &bench.request(method, "/any").header("X-Idempotency-Key", UUID).json(LEAD)).await;
    }
}

#[tokio::test]
async fn other_methods_and_other_paths_pass_through() {
    let bench = start_preset().await;
    for method in ["GET", "PUT", "PATCH", "DELETE"] {
        passes_through(&bench, &bench.request(method, PATH).header("X-Idempotency-Key", UUID).json(LEAD)).await;
    }
    passes_through(&bench, &bench.post("/api/other").header("X-Idempotency-Key", UUID).json(LEAD)).await;
    passes_through(&bench, &bench.post("/api/leads/17").json(LEAD)).await;
}

#[tokio::test]
async fn of_fifty_at_once_one_runs_and_all_get_its_answer() {
    let bench = start_preset().await;
    let answers = of_fifty_one_runs_and_the_others_wait(&bench, &lead(&bench, LEAD)).await;
    answers.iter().for_each(|answer| assert_run(answer, 1));
}

#[tokio::test]
async fn different_data_at_once_does_not_wait_for_each_other() {
    let bench = start_preset().await;
    let gate = ReplyGate::new();
    bench.upstream.on(PATH, UpstreamReply::usual().gated(&gate));
    let mut first = burst(1, &lead(&bench, LEAD));
    gate.arrived(1).await;
    let mut second = burst(1, &lead(&bench, r#"{"name":"Test2"}"#));
    gate.arrived(2).await;
    gate.open();
    assert_run(&next(&mut first).await, 1);
    assert_run(&next(&mut second).await, 2);
}

#[tokio::test]
async fn who_has_waited_long_enough_is_told_to_come_back() {
    let bench = TestGateway::shipped_with("leads", "wait_timeout = \"200ms\"").await;
    let gate = ReplyGate::new();
    bench.upstream.on(PATH, UpstreamReply::usual().gated(&gate));
    let mut first = burst(1, &lead(&bench, LEAD));
    gate.arrived(1).await;
    let problem = assert_refusal(&lead(&bench, LEAD).send().await, 409, "in-progress");
    assert_eq!(problem["key"], MASKED_UUID);
    gate.open();
    let first = next(&mut first).await;
    assert_run(&first, 1);
    assert_replay(&lead(&bench, LEAD).send().await, &first, &NO_HEADERS);
    bench.assert_executed(1);
}

#[tokio::test]
async fn every_answer_is_remembered_errors_too() {
    let bench = start_preset().await;
    let request = |status: u16| lead(&bench, &format!(r#"{{"n":{status}}}"#));
    remembered(&bench, &[200, 302, 400, 401, 404, 409, 422, 429, 500, 502, 503, 504], request, &NO_HEADERS).await;
}

#[tokio::test]
async fn a_failure_is_what_those_who_waited_get() {
    let bench = start_preset().await;
    let gate = ReplyGate::new();
    let failure = UpstreamReply::status(500).json(r#"{"error":"amoCRM is down"}"#).gated(&gate);
    bench.upstream.on_each(PATH, [failure, UpstreamReply::usual()]);
    let answers = burst(10, &lead(&bench, LEAD));
    gate.arrived(1).await;
    gate.open();
    for answer in answers.join_all().await {
        assert_eq!((answer.status, answer.text()), (500, r#"{"error":"amoCRM is down"}"#.to_owned()));
    }
    bench.assert_executed(1);
}

#[tokio::test]
async fn a_lost_answer_is_run_again_once_its_lease_has_lapsed() {
    let bench = TestGateway::shipped_with("leads", SHORT_LEASE).await;
    let (second, third) = a_lost_answer_runs_again(&bench, &lead(&bench, LEAD)).await;
    assert_run(&second, 2);
    assert_replay(&third, &second, &NO_HEADERS);
}

#[tokio::test]
async fn a_retry_after_a_time_out_waits_for_the_lease_and_runs() {
    let bench = TestGateway::shipped_with("leads", "timeout = \"200ms\"\nlease = \"1s\"").await;
    a_timed_out_operation_runs_again_after_its_lease(&bench, &lead(&bench, LEAD), Duration::from_secs(1)).await;
}

#[tokio::test]
async fn what_never_reached_the_upstream_is_not_remembered() {
    let bench = start_preset().await;
    bench.upstream.stop().await;
    assert_refusal(&lead(&bench, LEAD).send().await, 502, "upstream-unreachable");
    bench.upstream.restart().await;
    assert_run(&lead(&bench, LEAD).send().await, 1);
    bench.assert_executed(1);
}

#[tokio::test]
async fn after_its_time_a_submission_is_new() {
    let bench = TestGateway::shipped_with("leads", "ttl = \"1s\"").await;
    a_key_is_new_after(Duration::from_secs(1), &bench, &lead(&bench, LEAD)).await;
}

#[tokio::test]
async fn keys_and_hashes_are_masked_in_the_log() {
    let bench = start_preset().await;
    keys_are_masked_in_the_log(&bench, &lead(&bench, LEAD), UUID, MASKED_UUID).await;
    let hash = |line: &String| line.split("address=").nth(1).map(|rest| rest.split(' ').next().unwrap().to_owned());
    let hashes: Vec<_> = bench.gateway.logs().iter().filter_map(hash).collect();
    assert!(!hashes.is_empty());
    for hash in hashes {
        let hash = hash.trim_matches('"');
        assert!(hash.len() == 12 && hash[4..8] == *"****", "{hash}");
    }
}

#[tokio::test]
async fn log_events_have_the_levels_of_the_document() {
    let bench = start_preset().await;
    let agent = |request: TestRequest| request.header("User-Agent", "lead-form/2");
    agent(bench.post(PATH).json(LEAD)).send().await;
    let missing = bench.gateway.wait_for_log("missing idempotency key").await;
    let uuid1 = "550e8400-e29b-11d4-a716-446655440000";
    let refused = agent(bench.post(PATH).header("X-Idempotency-Key", uuid1).json(LEAD)).send().await;
    assert_eq!(refused.json()["key"], MASKED_UUID, "{refused:?}");
    let invalid = bench.gateway.wait_for_log("invalid idempotency key").await;
    assert!(invalid.contains(&format!("key=\"{MASKED_UUID}\"")), "{invalid}");
    agent(lead(&bench, LEAD)).send().await;
    let stored = bench.gateway.wait_for_log("answer stored").await;
    agent(lead(&bench, LEAD)).send().await;
    let duplicate = bench.gateway.wait_for_log("duplicate").await;
    for (line, level, status) in
        [(&missing, "WARN", "400"), (&invalid, "WARN", "400"), (&stored, "INFO", "201"), (&duplicate, "INFO", "201")]
    {
        assert!(line.contains(level), "{line}");
        assert!(line.contains(&format!("status={status}")), "{line}");
        assert!(line.contains("127.0.0.1") && line.contains("lead-form/2") && line.contains("took_ms"), "{line}");
    }
}

#[tokio::test]
async fn the_configuration_has_the_dials_of_the_column() {
    let column = [
        ("methods", "POST"),
        ("key", "header:x-idempotency-key; required, uuid4, at most 255 characters"),
        ("scope", "global"),
        ("fingerprint", "body"),
        ("on_mismatch", "new"),
        ("on_concurrent", "wait"),
        ("on_unknown", "retry"),
        ("on_store_down", "open"),
        ("remember", "all"),
        ("unknown_status", "none"),
        ("digest_status", "original"),
        ("ttl", "5m"),
        ("lease", "5m"),
        ("timeout", "5m"),
        ("first_headers", "none"),
        ("replay_headers", "none"),
        ("envelope", "none"),
    ];
    every_route_has("leads", &column).await;
    let routes: Vec<_> = checked_routes("leads").await.into_iter().map(|(name, _)| name).collect();
    assert_eq!(routes, ["POST /api/leads"]);
}
