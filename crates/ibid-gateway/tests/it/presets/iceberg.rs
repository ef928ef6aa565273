//! An Iceberg REST catalog: a duplicate waits, nothing is refused with a 409, and the lifetime of keys is advertised.
//! `iceberg_client.rs` has a real client.

use super::*;

/// The example of the specification.
const KEY: &str = "017F22E2-79B0-7CC3-98C4-DC0C0C07398F";
const COMMIT: &str = "/v1/namespaces/ns/tables/t";
const REPLAY: [(&str, &str); 1] = [("Idempotent-Replayed", "true")];
const BODY: &str = r#"{"requirements":[],"updates":[{"action":"set-properties","updates":{"a":"1"}}]}"#;

async fn start_preset() -> TestGateway {
    TestGateway::shipped("iceberg").await
}

fn send_at(bench: &TestGateway, method: &str, path: &str, key: &str) -> TestRequest {
    bench.request(method, path).header("Authorization", "Bearer spark").key(key)
}

fn commit(bench: &TestGateway, key: &str) -> TestRequest {
    send_at(bench, "POST", COMMIT, key).json(BODY)
}

#[tokio::test]
async fn a_key_is_a_uuid_of_version_7_in_any_case_and_optional() {
    let bench = start_preset().await;
    let first = commit(&bench, KEY).send().await;
    assert_run(&first, 1);
    assert_replay(&commit(&bench, &KEY.to_lowercase()).send().await, &first, &REPLAY);
    assert_eq!(bench.upstream.last().key(), Some(KEY), "as sent");
    for bad in [UUID, "017F22E2-79B0-7CC3-08C4-DC0C0C07398F", "017F22E279B07CC398C4DC0C0C07398F", "commit-1"] {
        key_is_invalid(&bench, &commit(&bench, bad)).await;
    }
    passes_through(&bench, &bench.post(COMMIT).header("Authorization", "Bearer spark").json(BODY)).await;
}

#[tokio::test]
async fn a_key_is_unique_among_all_operations_of_a_caller() {
    let bench = start_preset().await;
    assert_run(&commit(&bench, KEY).send().await, 1);
    for other in [
        send_at(&bench, "POST", "/v1/namespaces/ns/tables/u", KEY).json(BODY),
        send_at(&bench, "POST", COMMIT, KEY).json("{}"),
        send_at(&bench, "DELETE", COMMIT, KEY),
    ] {
        assert_refusal(&other.send().await, 422, "key-reused");
    }
    let other = bench.post(COMMIT).header("Authorization", "Bearer trino").key(KEY).json(BODY);
    assert_run(&other.send().await, 2);
    // What the client says about itself, and the order of members, make no other operation.
    let reordered = r#"{"updates":[{"updates":{"a":"1"},"action":"set-properties"}],"requirements":[]}"#;
    let same = send_at(&bench, "POST", COMMIT, KEY).json(reordered).header("X-Client-Version", "2");
    assert_run_with_headers(&same.send().await, 1, &REPLAY);
    bench.assert_executed(2);
}

#[tokio::test]
async fn posts_and_deletes_are_covered_but_for_tokens() {
    let bench = start_preset().await;
    bench.upstream.on(COMMIT, UpstreamReply::status(204));
    for _ in 0..2 {
        let dropped = send_at(&bench, "DELETE", &format!("{COMMIT}?purgeRequested=true"), KEY).send().await;
        assert_eq!((dropped.status, dropped.body.len()), (204, 0), "{dropped:?}");
    }
    bench.assert_executed(1);
    passes_through(&bench, &send_at(&bench, "POST", "/v1/oauth/tokens", KEY).body("grant_type=client_credentials"))
        .await;
    for method in ["GET", "PUT"] {
        passes_through(&bench, &send_at(&bench, method, "/v1/namespaces/ns", KEY)).await;
    }
}

fn key_of(status: u16) -> String {
    format!("017f22e2-79b0-7cc3-98c4-dc0c0c073{status}")
}

#[tokio::test]
async fn answers_about_the_operation_are_remembered() {
    let bench = start_preset().await;
    let request = |status| commit(&bench, &key_of(status));
    remembered(&bench, &[200, 201, 400, 404, 406, 409, 422], request, &REPLAY).await;
    let bench = start_preset().await;
    let request = |status| commit(&bench, &key_of(status));
    not_remembered(&bench, &[401, 403, 419, 429, 500, 501, 503], request, &REPLAY).await;
}

/// A client would take a 409 for a failed commit, and delete the files that it has committed.
#[tokio::test]
async fn an_unknown_outcome_is_never_a_conflict_and_not_to_be_retried() {
    let bench = start_preset().await;
    bench.upstream.reply_by_default(UpstreamFault::ResetAfterRequest);
    assert_refusal(&commit(&bench, KEY).send().await, 502, "upstream-lost");
    bench.upstream.clear_rules();
    for _ in 0..2 {
        let answer = commit(&bench, KEY).send().await;
        assert_refusal(&answer, 503, "outcome-unknown");
        assert_eq!(answer.header("retry-after"), None, "clients would send it again: {answer:?}");
    }
    // A proxy in front of the catalog that lost its answer.
    bench.upstream.reply_by_default(UpstreamReply::status(504));
    assert_eq!(commit(&bench, &key_of(504)).send().await.status, 504);
    bench.upstream.clear_rules();
    assert_refusal(&commit(&bench, &key_of(504)).send().await, 503, "outcome-unknown");
    bench.assert_executed(2);
}

#[tokio::test]
async fn of_fifty_at_once_one_runs_and_the_others_wait() {
    let bench = start_preset().await;
    let answers = super::of_fifty_one_runs_and_the_others_wait(&bench, &commit(&bench, KEY)).await;
    assert_eq!(answers.iter().filter(|answer| ibid_headers(answer).is_empty()).count(), 1);
    assert!(answers.iter().all(|answer| answer.text() == r#"{"id":1,"run":1}"#));
}

#[tokio::test]
async fn who_waits_too_long_is_told_to_come_back() {
    let bench = TestGateway::shipped_with("iceberg", "wait_timeout = \"200ms\"").await;
    let gate = bench.upstream.gate(COMMIT);
    let request = commit(&bench, KEY);
    let first = tokio::spawn(async move { request.send().await });
    gate.arrived(1).await;
    let answer = commit(&bench, KEY).send().await;
    assert_refusal(&answer, 503, "in-progress");
    assert!(answer.header("retry-after").is_some(), "{answer:?}");
    gate.open();
    let first = first.await.unwrap();
    assert_replay(&commit(&bench, KEY).send().await, &first, &REPLAY);
    bench.assert_executed(1);
}

/// The metadata of a table grows with its snapshots.
#[tokio::test]
async fn large_metadata_is_replayed_in_full() {
    let bench = start_preset().await;
    bench.upstream.reply_by_default(UpstreamReply::status(200).large(5 << 20));
    let first = commit(&bench, KEY).send().await;
    let replay = commit(&bench, KEY).send().await;
    assert!(first.body.len() >= 5 << 20 && replay.body == first.body, "{} bytes", replay.body.len());
    bench.assert_executed(1);
}

const CONFIG: &str =
    r#"{"defaults":{"clients":"4"},"overrides":{"warehouse":"w"},"endpoints":["GET /v1/{prefix}/namespaces"]}"#;

#[tokio::test]
async fn the_configuration_of_the_catalog_advertises_the_lifetime() {
    let bench = start_preset().await;
    let own: Value = serde_json::from_str(CONFIG).unwrap();
    for path in ["/v1/config", "/catalog/v1/config?warehouse=w", "/api/catalog/v1/config"] {
        let reply = UpstreamReply::status(200).json(CONFIG).header("ETag", "\"1\"").header("X-Catalog", "c");
        bench.upstream.on(path.split('?').next().unwrap(), reply);
        let request = bench.request("GET", path).header("Accept-Encoding", "gzip").header("If-None-Match", "\"1\"");
        let answer = request.header("Authorization", "Bearer spark").send().await;
        let mut body = answer.json();
        let lifetime = body.as_object_mut().unwrap().remove("idempotency-key-lifetime");
        assert_eq!((answer.status, lifetime, body), (200, Some("PT24H".into()), own.clone()), "{path}");
        assert_eq!((answer.header("etag"), answer.header("x-catalog")), (None, Some("c")), "{answer:?}");
        let seen = bench.upstream.last();
        assert_eq!(format!("{}{}", seen.path(), path.split_once('?').map_or("", |_| "?warehouse=w")), path);
        let sent = ["accept-encoding", "if-none-match", "authorization"].map(|name| seen.header(name));
        assert_eq!(sent, [Some("identity"), None, Some("Bearer spark")]);
    }
}

#[tokio::test]
async fn the_lifetime_is_the_ttl_and_replaces_that_of_the_catalog() {
    let bench = TestGateway::shipped_with("iceberg", "ttl = \"90m\"").await;
    bench.upstream.on("/v1/config", UpstreamReply::status(200).json(r#"{"idempotency-key-lifetime":"PT1M"}"#));
    let answer = bench.request("GET", "/v1/config").send().await;
    assert_eq!(answer.text(), r#"{"idempotency-key-lifetime":"PT1H30M"}"#);
}

#[tokio::test]
async fn every_other_answer_passes_unchanged() {
    let bench = start_preset().await;
    let plain = "not JSON";
    let cases = [
        ("GET", "/v1/config", UpstreamReply::status(401).json(r#"{"error":{}}"#), r#"{"error":{}}"#),
        ("GET", "/v1/config", UpstreamReply::status(200).json(plain), plain),
        ("GET", "/v1/config", UpstreamReply::status(200).json("[]"), "[]"),
        ("GET", "/v1/config", UpstreamReply::status(200).header("Content-Type", "text/plain").body("{}"), "{}"),
        ("GET", "/v1/config/x", UpstreamReply::status(200).json("{}"), "{}"),
        ("GET", "/v1/namespaces", UpstreamReply::status(200).json("{}"), "{}"),
        ("HEAD", "/v1/config", UpstreamReply::status(200).json("{}"), ""),
    ];
    for (method, path, reply, body) in cases {
        bench.upstream.on(path, reply);
        assert_eq!(bench.request(method, path).send().await.text(), body, "{method} {path}");
    }
    for dials in ["mode = \"off\"", "mode = \"shadow\"", "refusals = \"problem\""] {
        let bench = TestGateway::everywhere("iceberg", dials).await;
        bench.upstream.on("/v1/config", UpstreamReply::status(200).json("{}"));
        assert_eq!(bench.request("GET", "/v1/config").send().await.text(), "{}", "{dials}");
    }
}

#[tokio::test]
async fn a_configuration_that_breaks_off_is_no_answer() {
    let bench = start_preset().await;
    bench.upstream.on("/v1/config", UpstreamFault::ResetAfterRequest);
    assert_refusal(&bench.request("GET", "/v1/config").send().await, 502, "upstream-lost");
}

#[tokio::test]
async fn after_its_time_a_key_is_new() {
    let bench = TestGateway::shipped_with("iceberg", "ttl = \"1s\"").await;
    a_key_is_new_after(Duration::from_secs(1), &bench, &commit(&bench, KEY)).await;
}

#[tokio::test]
async fn the_configuration_has_the_dials_of_the_protocol() {
    let column = [
        ("key", "header:idempotency-key; optional, uuid7, at most 36 characters"),
        ("scope", "credential"),
        ("fingerprint", "method, path, body"),
        ("on_mismatch", "reject"),
        ("on_concurrent", "wait"),
        ("on_unknown", "hold"),
        ("on_store_down", "closed"),
        ("remember", "2xx 4xx !401 !403 !408 !419 !425 !429"),
        ("refusals", "iceberg"),
        ("unknown_status", "502, 504"),
        ("ttl", "24h"),
        ("status", "in_progress 503, outcome_unknown 503"),
    ];
    every_route_has("iceberg", &column).await;
}
