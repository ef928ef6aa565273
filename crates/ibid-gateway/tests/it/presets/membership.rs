//! Keys per user and endpoint; duplicates wait; answers carry `metadata`.

use std::collections::HashSet;

use super::*;

const APPLY: &str = "/api/membership/apply";
const ENDPOINTS: [&str; 4] = [APPLY, "/api/coach/sessions", "/api/athlete/check-in", "/api/athlete/leave-request"];
const BODY: &str = r#"{"club_id":"club-uuid","personal_info":{},"documents":[]}"#;
const DATA: &str = r#"{"success":true,"data":{"applicationId":"550e8400-e29b-41d4-a716-446655440000"}}"#;

async fn start_preset() -> TestGateway {
    TestGateway::shipped("membership").await
}

fn request_of_user(bench: &TestGateway, user: &str, path: &str, key: &str) -> TestRequest {
    bench.post(path).header("X-User-Id", user).key(key).json(BODY)
}

fn apply(bench: &TestGateway, key: &str) -> TestRequest {
    request_of_user(bench, "user-1", APPLY, key)
}

/// Checks an answer's headers and, if it has one, its `metadata` against each other: `Some` original time for a replay.
#[track_caller]
fn assert_metadata(answer: &TestResponse, original: Option<&str>) -> Value {
    let id = answer.header("x-request-id").expect("a request id");
    assert!(!id.is_empty(), "{answer:?}");
    let mut expected = vec![("X-Idempotency-Cached", if original.is_some() { "true" } else { "false" })];
    expected.extend(original.map(|time| ("X-Original-Timestamp", time)));
    expected.push(("X-Request-Id", id));
    let said: Vec<_> = ibid_headers(answer).into_iter().filter(|said| *said != NOT_STORED[0]).collect();
    assert_eq!(said, expected, "{answer:?}");
    let Ok(Value::Object(object)) = serde_json::from_slice(&answer.body) else { return Value::Null };
    let metadata = object["metadata"].clone();
    assert_timestamp(metadata["timestamp"].as_str().expect("a time"));
    assert_eq!(metadata["requestId"], id, "{answer:?}");
    assert_eq!(metadata["cached"], original.is_some(), "{answer:?}");
    assert_eq!(metadata.get("originalTimestamp").and_then(Value::as_str), original, "{answer:?}");
    let members = if original.is_some() { 4 } else { 3 };
    assert_eq!(metadata.as_object().map(|members| members.len()), Some(members), "{answer:?}");
    metadata
}

/// Checks a first answer and returns its `timestamp`.
#[track_caller]
fn first_timestamp(answer: &TestResponse) -> String {
    assert_metadata(answer, None)["timestamp"].as_str().expect("the answer is an object").to_owned()
}

/// Such as `2025-11-27T10:30:00.000Z`.
#[track_caller]
fn assert_timestamp(text: &str) {
    let shape: String = text.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
    assert_eq!(shape, "0000-00-00T00:00:00.000Z", "{text}");
}

/// The body without the `metadata` that was spliced in after the last member.
#[track_caller]
fn without_metadata(answer: &TestResponse) -> String {
    let text = answer.text();
    let start = text.rfind(",\"metadata\":{").unwrap_or_else(|| panic!("no metadata: {answer:?}"));
    let end = start + text[start..].find('}').expect("it ends") + 1;
    format!("{}{}", &text[..start], &text[end..])
}

/// Checks a refusal under the envelope.
#[track_caller]
fn assert_enveloped_refusal(answer: &TestResponse, status: u16, name: &str) -> Value {
    let problem = assert_refusal(answer, status, name);
    assert_eq!(problem["success"], false, "{problem}");
    assert_eq!(problem["error"]["code"], name.replace('-', "_").to_uppercase(), "{problem}");
    assert_eq!(problem["error"]["message"], problem["detail"], "{problem}");
    assert_timestamp(problem["metadata"]["timestamp"].as_str().expect("a time"));
    let id = problem["metadata"]["requestId"].as_str().expect("an id");
    assert!(!id.is_empty(), "{problem}");
    assert!(answer.header("x-request-id").is_none_or(|header| header == id), "{answer:?}");
    assert_eq!(problem["metadata"].as_object().map(|members| members.len()), Some(2), "{problem}");
    problem
}

#[tokio::test]
async fn integration_test_duplicate_requests_get_the_same_result() {
    let bench = start_preset().await;
    bench.upstream.on(APPLY, UpstreamReply::status(201).json(DATA));
    let first = apply(&bench, UUID).send().await;
    let time = first_timestamp(&first);
    let second = apply(&bench, UUID).send().await;
    let metadata = assert_metadata(&second, Some(&time));
    assert!(metadata["timestamp"].as_str() >= Some(&time), "{metadata}");
    assert_eq!((first.status, second.status), (201, 201));
    assert_eq!(first.json()["data"], second.json()["data"]);
    assert_eq!((without_metadata(&first), without_metadata(&second)), (DATA.to_owned(), DATA.to_owned()));
    assert_eq!(replayed_headers_without_length(&first), replayed_headers_without_length(&second));
    bench.assert_executed(1);
}

fn replayed_headers_without_length(answer: &TestResponse) -> Vec<(String, String)> {
    replayed_headers(answer).into_iter().filter(|(name, _)| name != "content-length").collect()
}

#[tokio::test]
async fn every_request_has_its_own_id_and_replays_keep_the_first_time() {
    let bench = start_preset().await;
    let first = apply(&bench, UUID).send().await;
    let time = first_timestamp(&first);
    let mut ids = HashSet::from([first.header("x-request-id").unwrap().to_owned()]);
    for _ in 0..3 {
        let replay = apply(&bench, UUID).send().await;
        assert_metadata(&replay, Some(&time));
        ids.insert(replay.header("x-request-id").unwrap().to_owned());
    }
    assert_eq!(ids.len(), 4, "{ids:?}");
    bench.assert_executed(1);
}

#[tokio::test]
async fn metadata_is_spliced_in_and_no_other_byte_changes() {
    let bench = start_preset().await;
    for (at, body) in [
        "{ \"success\" : true ,\n  \"data\": {\"n\": 1.0, \"big\": 9007199254740993, \"s\": \"\\u00e9\\/\"}\n}\n",
        r#"{"z":1,"a":{"metadata":{"cached":"mine"}},"list":[{"metadata":1}]}"#,
        r#"{"data":"}{","e":1e-7}"#,
    ]
    .into_iter()
    .enumerate()
    {
        bench.upstream.on(APPLY, UpstreamReply::status(200).json(body));
        let request = apply(&bench, &format!("user_123_application_{at}"));
        let first = request.send().await;
        let time = first_timestamp(&first);
        assert_eq!(without_metadata(&first), body);
        let replay = request.send().await;
        assert_metadata(&replay, Some(&time));
        assert_eq!(without_metadata(&replay), body);
    }
    bench.assert_executed(3);
}

#[tokio::test]
async fn an_empty_object_gets_metadata_too() {
    let bench = start_preset().await;
    bench.upstream.on(APPLY, UpstreamReply::status(200).header("Content-Type", "application/vnd.api+json").body("{}"));
    let time = first_timestamp(&apply(&bench, UUID).send().await);
    let replay = apply(&bench, UUID).send().await;
    assert_metadata(&replay, Some(&time));
    assert!(replay.text().starts_with("{\"metadata\":{"), "{replay:?}");
}

#[tokio::test]
async fn metadata_of_the_app_is_replaced_in_its_place() {
    let bench = start_preset().await;
    let body = r#"{"metadata":{"cached":"no","x":[1,{"metadata":2}]},"success":true}"#;
    bench.upstream.on(APPLY, UpstreamReply::status(200).json(body));
    let first = apply(&bench, UUID).send().await;
    let time = first_timestamp(&first);
    let replay = apply(&bench, UUID).send().await;
    assert_metadata(&replay, Some(&time));
    for answer in [&first, &replay] {
        let text = answer.text();
        assert!(text.starts_with("{\"metadata\":{\"cached\":"), "{text}");
        assert!(text.ends_with("},\"success\":true}"), "{text}");
        assert_eq!(text.matches("metadata").count(), 1, "{text}");
    }
}

#[tokio::test]
async fn what_described_the_bytes_of_the_body_is_dropped() {
    let bench = start_preset().await;
    let described = ["etag", "digest", "content-digest", "repr-digest", "content-md5"];
    let reply =
        described.iter().fold(UpstreamReply::status(200).json(DATA), |reply, name| reply.header(*name, "\"x\""));
    bench.upstream.on(APPLY, reply.header("Location", "/a").header("Cache-Control", "no-store"));
    for _ in 0..2 {
        let answer = apply(&bench, UUID).send().await;
        for name in described {
            assert!(!answer.headers.contains(name), "{name}: {answer:?}");
        }
        assert_eq!((answer.header("location"), answer.header("cache-control")), (Some("/a"), Some("no-store")));
        let length = answer.header("content-length").and_then(|length| length.parse().ok());
        assert_eq!(length, Some(answer.body.len()), "{answer:?}");
    }
    bench.assert_executed(1);
}

#[tokio::test]
async fn answers_that_are_no_json_objects_are_untouched() {
    let bench = start_preset().await;
    let json = "application/json";
    for (at, (kind, body)) in [
        (json, "[{\"a\":1}]"),
        (json, "\"text\""),
        (json, "null"),
        (json, "{\"a\":1"),
        (json, "{\"a\":1,\"a\":2}"),
        (json, ""),
        ("text/plain", "{\"a\":1}"),
        ("text/html", "<p>"),
    ]
    .into_iter()
    .enumerate()
    {
        let reply = UpstreamReply::status(200).header("Content-Type", kind).header("ETag", "\"e\"").body(body);
        bench.upstream.on(APPLY, reply);
        let request = apply(&bench, &format!("user_123_application_{at}"));
        let first = request.send().await;
        let replay = request.send().await;
        for (answer, cached) in [(&first, "false"), (&replay, "true")] {
            assert_eq!(answer.text(), body, "{answer:?}");
            assert_eq!((answer.header("content-type"), answer.header("etag")), (Some(kind), Some("\"e\"")));
            assert_eq!(answer.header("x-idempotency-cached"), Some(cached), "{answer:?}");
            assert!(answer.headers.contains("x-request-id"), "{answer:?}");
        }
        assert_timestamp(replay.header("x-original-timestamp").expect("a time"));
        assert!(!first.headers.contains("x-original-timestamp"), "{first:?}");
        bench.assert_executed(at + 1);
    }
}

#[tokio::test]
async fn an_answer_too_large_to_keep_says_the_same_in_its_headers() {
    let bench = TestGateway::shipped_with("membership", "max_response = 64").await;
    let body = format!(r#"{{"success":true,"data":"{}"}}"#, "x".repeat(1000));
    bench.upstream.on(APPLY, UpstreamReply::status(201).json(&body));
    let first = apply(&bench, UUID).send().await;
    let id = first.header("x-request-id").expect("an id");
    assert_eq!((first.status, first.text()), (201, body.clone()));
    assert_eq!(ibid_headers(&first), [("X-Idempotency-Cached", "false"), ("X-Request-Id", id)]);
    let replay = apply(&bench, UUID).send().await;
    assert_eq!((replay.status, replay.header("idempotency-body")), (201, Some("digest")), "{replay:?}");
    assert_eq!(replay.json()["length"], body.len(), "{replay:?}");
    assert_eq!(replay.header("x-idempotency-cached"), Some("true"), "{replay:?}");
    assert_timestamp(replay.header("x-original-timestamp").expect("a time"));
    assert_ne!(replay.header("x-request-id"), Some(id), "{replay:?}");
    bench.assert_executed(1);
}

#[tokio::test]
async fn an_encoded_answer_is_untouched() {
    let bench = start_preset().await;
    let reply = UpstreamReply::status(200).header("Content-Encoding", "x-custom").json(DATA);
    bench.upstream.on(APPLY, reply);
    for _ in 0..2 {
        let answer = apply(&bench, UUID).send().await;
        assert_eq!((answer.text(), answer.header("content-encoding")), (DATA.to_owned(), Some("x-custom")));
    }
    bench.assert_executed(1);
}

#[tokio::test]
async fn an_id_of_the_app_gives_way_to_the_one_in_the_metadata() {
    let bench = start_preset().await;
    bench.upstream.on(APPLY, UpstreamReply::status(200).json(DATA).header("X-Request-Id", "app-1"));
    let time = first_timestamp(&apply(&bench, UUID).send().await);
    assert_metadata(&apply(&bench, UUID).send().await, Some(&time));
}

#[tokio::test]
async fn an_error_of_the_app_has_metadata_and_is_not_remembered() {
    let bench = start_preset().await;
    let body = r#"{"success":false,"error":{"code":"VALIDATION_ERROR","message":"Invalid input data"}}"#;
    bench.upstream.on_each(APPLY, [UpstreamReply::status(400).json(body), UpstreamReply::status(201).json(DATA)]);
    let failed = apply(&bench, UUID).send().await;
    first_timestamp(&failed);
    assert_eq!((failed.status, without_metadata(&failed)), (400, body.to_owned()));
    assert_eq!(failed.header("idempotency-stored"), Some("false"));
    let first = apply(&bench, UUID).send().await;
    let time = first_timestamp(&first);
    assert_eq!((first.status, first.header("idempotency-stored")), (201, None));
    assert_metadata(&apply(&bench, UUID).send().await, Some(&time));
    bench.assert_executed(2);
}

#[tokio::test]
async fn only_successes_are_remembered() {
    let bench = start_preset().await;
    for (count, status) in [307, 400, 401, 404, 409, 422, 429, 500, 502, 503, 504].into_iter().enumerate() {
        let request = apply(&bench, &format!("user_123_application_{status}"));
        bench.upstream.on(APPLY, UpstreamReply::status(status).numbered());
        let failed = request.send().await;
        assert_eq!((failed.status, failed.header("idempotency-stored")), (status, Some("false")), "{failed:?}");
        first_timestamp(&failed);
        bench.upstream.on(APPLY, UpstreamReply::usual());
        let time = first_timestamp(&request.send().await);
        assert_metadata(&request.send().await, Some(&time));
        bench.assert_executed(2 * count + 2);
    }
}

#[tokio::test]
async fn race_condition_of_fifty_at_once_one_runs_and_all_get_its_result() {
    let bench = start_preset().await;
    let answers = of_fifty_one_runs_and_the_others_wait(&bench, &apply(&bench, UUID)).await;
    let (first, others): (Vec<_>, Vec<_>) =
        answers.iter().partition(|answer| answer.header("x-idempotency-cached") == Some("false"));
    let [first] = first[..] else { panic!("{} first answers", first.len()) };
    let time = first_timestamp(first);
    assert_eq!(others.len(), 49);
    let mut ids = HashSet::from([first.header("x-request-id")]);
    for answer in others {
        assert_metadata(answer, Some(&time));
        assert_eq!((answer.status, without_metadata(answer)), (201, r#"{"id":1,"run":1}"#.to_owned()));
        ids.insert(answer.header("x-request-id"));
    }
    assert_eq!(ids.len(), 50);
}

#[tokio::test]
async fn after_a_failure_one_of_those_who_wait_runs_and_the_others_keep_waiting() {
    let bench = start_preset().await;
    let (first, second) = (ReplyGate::new(), ReplyGate::new());
    bench.upstream.on_each(APPLY, [UpstreamReply::status(500).gated(&first), UpstreamReply::usual().gated(&second)]);
    let mut answers = burst(10, &apply(&bench, UUID));
    first.arrived(1).await;
    first.open();
    let failed = next(&mut answers).await;
    assert_eq!((failed.status, failed.header("idempotency-stored")), (500, Some("false")), "{failed:?}");
    second.arrived(1).await;
    if let Ok(early) = timeout(SILENCE_DURATION, next(&mut answers)).await {
        panic!("answered while the second was running: {early:?}");
    }
    second.open();
    let answers = answers.join_all().await;
    assert_eq!(answers.len(), 9);
    for answer in &answers {
        assert_eq!((answer.status, without_metadata(answer)), (201, r#"{"id":2,"run":2}"#.to_owned()), "{answer:?}");
    }
    let ran = answers.iter().filter(|answer| answer.header("x-idempotency-cached") == Some("false"));
    assert_eq!(ran.count(), 1);
    bench.assert_executed(2);
}

#[tokio::test]
async fn who_has_waited_long_enough_is_told_to_come_back() {
    let bench = TestGateway::shipped_with("membership", "wait_timeout = \"200ms\"").await;
    let gate = ReplyGate::new();
    bench.upstream.on(APPLY, UpstreamReply::usual().gated(&gate));
    let mut first = burst(1, &apply(&bench, UUID));
    gate.arrived(1).await;
    let problem = assert_enveloped_refusal(&apply(&bench, UUID).send().await, 409, "in-progress");
    assert_eq!(problem["key"], MASKED_UUID);
    gate.open();
    let time = first_timestamp(&next(&mut first).await);
    assert_metadata(&apply(&bench, UUID).send().await, Some(&time));
    bench.assert_executed(1);
}

#[tokio::test]
async fn the_four_endpoints_run_once() {
    let bench = start_preset().await;
    for (at, endpoint) in ENDPOINTS.into_iter().enumerate() {
        // The same key for all of them: each endpoint has its own.
        let time = first_timestamp(&request_of_user(&bench, "user-1", endpoint, UUID).send().await);
        assert_metadata(&request_of_user(&bench, "user-1", endpoint, UUID).send().await, Some(&time));
        bench.assert_executed(at + 1);
    }
}

#[tokio::test]
async fn users_can_use_the_same_key() {
    let bench = start_preset().await;
    let (one, two) = (request_of_user(&bench, "user-1", APPLY, UUID), request_of_user(&bench, "user-2", APPLY, UUID));
    let (first, second) = (first_timestamp(&one.send().await), first_timestamp(&two.send().await));
    for (request, time, run) in [(one, first, 1), (two, second, 2)] {
        let replay = request.header("Authorization", "Bearer refreshed").send().await;
        assert_metadata(&replay, Some(&time));
        assert_eq!(replay.json()["run"], run);
    }
    bench.assert_executed(2);
}

#[tokio::test]
async fn methods_have_their_own_keys_and_patch_and_get_pass_through() {
    let bench = TestGateway::everywhere("membership", "").await;
    for (count, method) in ["POST", "PUT", "DELETE"].into_iter().enumerate() {
        let request = bench.request(method, "/any").header("X-User-Id", "user-1").key(UUID).json(BODY);
        let time = first_timestamp(&request.send().await);
        assert_metadata(&request.send().await, Some(&time));
        bench.assert_executed(count + 1);
    }
    for method in ["PATCH", "GET"] {
        passes_through(&bench, &bench.request(method, "/any").header("X-User-Id", "user-1").key(UUID)).await;
    }
}

#[tokio::test]
async fn other_methods_and_other_paths_pass_through() {
    let bench = start_preset().await;
    for (method, path) in [("GET", APPLY), ("PUT", APPLY), ("DELETE", APPLY), ("POST", "/api/other")] {
        passes_through(&bench, &bench.request(method, path).header("X-User-Id", "user-1").key(UUID).json(BODY)).await;
    }
}

#[tokio::test]
async fn without_a_key_every_request_runs_and_its_answer_is_the_apps() {
    let bench = start_preset().await;
    passes_through(&bench, &bench.post(APPLY).header("X-User-Id", "user-1").json(BODY)).await;
    passes_through(&bench, &bench.post(APPLY).json(BODY)).await;
    passes_through(&bench, &bench.post(APPLY).header("X-Idempotency-Key", UUID).json(BODY)).await;
    let answer = bench.post(APPLY).json(BODY).send().await;
    assert_eq!(answer.text(), r#"{"id":7,"run":7}"#);
}

#[tokio::test]
async fn a_key_without_a_user_is_refused() {
    let bench = start_preset().await;
    let problem = assert_enveloped_refusal(&bench.post(APPLY).key(UUID).json(BODY).send().await, 400, "scope-missing");
    assert!(problem["detail"].as_str().unwrap().contains("x-user-id"), "{problem}");
    assert_eq!(problem["key"], MASKED_UUID);
    assert_eq!(bench.upstream.requests(), 0);
}

#[tokio::test]
async fn a_user_is_believed_from_trusted_proxies_only() {
    let bench =
        TestGateway::in_memory(&format!("trusted_proxies = [\"192.0.2.0/24\"]\n{}", shipped_config("membership")))
            .await;
    assert_enveloped_refusal(&apply(&bench, UUID).send().await, 403, "scope-refused");
    assert_eq!(bench.upstream.requests(), 0);
}

#[tokio::test]
async fn keys_are_uuids_or_16_to_255_plain_characters() {
    let bench = start_preset().await;
    let long = "k".repeat(255);
    let valid = [
        UUID,
        "user_123_application_2024_abc123",
        "user_123_application_2024",
        "req-1234567890abcdef",
        "0123456789abcdef",
        &long,
    ];
    for (count, key) in valid.into_iter().enumerate() {
        first_timestamp(&apply(&bench, key).send().await);
        bench.assert_executed(count + 1);
    }
    for key in ["short", "contains spaces", "special@chars!", "0123456789abcde", "0123456789abcde.", &"k".repeat(256)] {
        key_is_invalid(&bench, &apply(&bench, key)).await;
        assert_enveloped_refusal(&apply(&bench, key).send().await, 400, "key-invalid");
    }
}

#[tokio::test]
async fn a_key_reused_for_another_operation_gets_the_cached_result() {
    let bench = start_preset().await;
    let time = first_timestamp(&apply(&bench, UUID).send().await);
    for target in [APPLY.to_owned(), format!("{APPLY}?x=1")] {
        let other = bench.post(&target).header("X-User-Id", "user-1").key(UUID).json(r#"{"club_id":"other"}"#);
        assert_metadata(&other.send().await, Some(&time));
    }
    bench.assert_executed(1);
}

#[tokio::test]
async fn a_lost_answer_is_run_again_once_its_lease_has_lapsed() {
    let bench = TestGateway::shipped_with("membership", SHORT_LEASE).await;
    let (second, third) = a_lost_answer_runs_again(&bench, &apply(&bench, UUID)).await;
    let time = first_timestamp(&second);
    assert_eq!(second.json()["run"], 2);
    assert_metadata(&third, Some(&time));
}

#[tokio::test]
async fn refusals_about_the_app_are_enveloped_too() {
    let bench = start_preset().await;
    bench.upstream.on(APPLY, UpstreamFault::ResetAfterRequest);
    assert_enveloped_refusal(&apply(&bench, UUID).send().await, 502, "upstream-lost");
    bench.upstream.stop().await;
    assert_enveloped_refusal(&apply(&bench, "user_123_application_2024").send().await, 502, "upstream-unreachable");
}

#[tokio::test]
async fn a_retry_after_a_time_out_waits_for_the_lease_and_runs() {
    let bench = TestGateway::shipped_with("membership", "timeout = \"200ms\"\nlease = \"1s\"").await;
    a_timed_out_operation_runs_again_after_its_lease(&bench, &apply(&bench, UUID), Duration::from_secs(1)).await;
}

#[tokio::test]
async fn after_its_time_a_key_is_new() {
    let bench = TestGateway::shipped_with("membership", "ttl = \"1s\"").await;
    a_key_is_new_after(Duration::from_secs(1), &bench, &apply(&bench, UUID)).await;
}

#[tokio::test]
async fn keys_are_masked_in_the_log() {
    let bench = start_preset().await;
    super::keys_are_masked_in_the_log(&bench, &apply(&bench, UUID), UUID, MASKED_UUID).await;
}

#[tokio::test]
async fn the_configuration_has_the_dials_of_the_column() {
    let column = [
        ("key", "header:idempotency-key; optional, token, at most 255 characters"),
        ("scope", "header:x-user-id, method, path"),
        ("fingerprint", "none"),
        ("on_mismatch", "ignore"),
        ("on_concurrent", "wait"),
        ("on_unknown", "retry"),
        ("on_store_down", "closed"),
        ("remember", "success"),
        ("unknown_status", "none"),
        ("digest_status", "original"),
        ("ttl", "24h"),
        ("lease", "5m"),
        ("timeout", "5m"),
        ("first_headers", "x-idempotency-cached: false, x-request-id: {request_id}"),
        (
            "replay_headers",
            "x-idempotency-cached: true, x-original-timestamp: {original_time}, x-request-id: {request_id}",
        ),
        ("envelope", "metadata"),
    ];
    every_route_has("membership", &column).await;
    let routes: Vec<_> = checked_routes("membership").await.into_iter().map(|(name, _)| name).collect();
    assert_eq!(routes, ENDPOINTS.map(|path| format!("POST {path}")));
}
