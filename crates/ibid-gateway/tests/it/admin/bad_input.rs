//! What cannot be asked for is refused and named, and changes nothing.

use testbed::client::{RawClient, get, request};

use super::common::{ABSENT_ADDRESS, ADMIN_TOKEN, USER_TOKEN, assert_problem};
use crate::support::TestGateway;

#[tokio::test]
async fn queries_that_are_not_understood_are_refused() {
    let office = TestGateway::with_records().await;
    let long = format!("tenant={}", "x".repeat(1025));
    for (query, part) in [
        ("limit=0", "allowed is 1 to 1000"),
        ("limit=1001", "allowed is 1 to 1000"),
        ("limit=", "allowed is 1 to 1000"),
        ("limit=-1", "allowed is 1 to 1000"),
        ("limit=1.0", "allowed is 1 to 1000"),
        ("limit=ten", "allowed is 1 to 1000"),
        ("limit=99999999999999999999", "allowed is 1 to 1000"),
        ("limit=5&limit=5", "there twice"),
        ("state=lost", "processing, done, failed, unknown"),
        ("state=Done", "processing, done, failed, unknown"),
        ("older_than=5", "such as 500ms"),
        ("older_than=-5m", "such as 500ms"),
        ("older_than=5 m", "such as 500ms"),
        ("cursor=5", "64 hex digits"),
        ("tennant=acme", "\"tennant\" is no parameter; allowed are state, tenant"),
        ("tenant=%zz", "broken % escape"),
        ("tenant=%ff", "no UTF-8"),
        ("key=%00", "can be shown"),
        ("key=%1b[2J", "can be shown"),
        (&long, "up to 1024 characters"),
    ] {
        let answer = office.admin_get(ADMIN_TOKEN, &format!("/api/records?{}", query.replace(' ', "%20"))).await;
        assert_problem(&answer, 400, part);
    }
    for path in ["/api/stats", "/api/policies", "/api/store", "/api/shadow", "/api/openapi.json"] {
        assert_problem(&office.admin_get(ADMIN_TOKEN, &format!("{path}?verbose=1")).await, 400, "none is allowed here");
    }
    assert_problem(
        &office.admin_get(ADMIN_TOKEN, &format!("/api/records/{ABSENT_ADDRESS}?full=1")).await,
        400,
        "none is allowed here",
    );
    assert_problem(&office.admin_get(ADMIN_TOKEN, "/api/refusals?reason=bad").await, 400, "key-reused");
    assert_problem(&office.admin_get(ADMIN_TOKEN, "/api/refusals?limit=257").await, 400, "1 to 256");
}

#[tokio::test]
async fn addresses_are_64_hex_digits() {
    let office = TestGateway::with_records().await;
    let address = office.address("key-one-of-u1-done").await;
    for wrong in ["5", &address[1..], &format!("{address}0"), &format!("{}g", &address[1..]), "%00", "..", "*"] {
        assert_problem(&office.admin_get(ADMIN_TOKEN, &format!("/api/records/{wrong}")).await, 400, "64 hex digits");
        let answer = office.admin_post(ADMIN_TOKEN, &format!("/api/records/{wrong}/forget"), r#"{"reason":"r"}"#).await;
        assert_problem(&answer, 400, "64 hex digits");
    }
    // Whoever may not change anything does not learn what an address is.
    assert_eq!(office.admin_post(USER_TOKEN, "/api/records/5/forget", r#"{"reason":"r"}"#).await.status, 403);
}

#[tokio::test]
async fn bodies_that_cannot_be_used_are_refused_and_change_nothing() {
    let office = TestGateway::with_records().await;
    let address = office.address("key-two-of-u1-lost").await;
    let long = format!(r#"{{"reason":"{}"}}"#, "x".repeat(1001));
    let deep = format!(r#"{{"reason":{}1{}}}"#, "[".repeat(100_000), "]".repeat(100_000));
    for action in ["release", "forget", "resolve"] {
        let path = format!("/api/records/{address}/{action}");
        for body in [
            "",
            "null",
            "[]",
            "\"reason\"",
            "{",
            "{}",
            "reason=r",
            r#"{"reason":null}"#,
            r#"{"reason":""}"#,
            r#"{"reason":" \n\t "}"#,
            r#"{"reason":7}"#,
            r#"{"reason":"a\u0000b"}"#,
            r#"{"reason":"\ud800"}"#,
            r#"{"reason":"r","reason":"s"}"#,
            r#"{"reason":"r","force":true}"#,
            r#"{"reason":"r","fence":"5"}"#,
            r#"{"reason":"r","fence":0}"#,
            r#"{"reason":"r","fence":-5}"#,
            r#"{"reason":"r","fence":1e300}"#,
            r#"{"reason":"r","fence":18446744073709551616}"#,
            &long,
            &deep,
        ] {
            // Also with all that a resolution needs, so that nothing else is missing.
            let whole = body.strip_suffix('}').filter(|_| action == "resolve" && body.len() > 2);
            let whole = whole.map_or(body.to_owned(), |start| format!("{start},\"as\":\"not-executed\"}}"));
            let answer = office.admin_post(ADMIN_TOKEN, &path, &whole).await;
            assert_problem(&answer, 400, "");
        }
        let answer = office.admin_request("POST", ADMIN_TOKEN, &path).body(&b"{\"reason\":\"\xff\"}"[..]).send().await;
        assert_problem(&answer, 400, "");
    }
    for body in [
        r#"{"reason":"r"}"#,
        r#"{"as":"not-executed"}"#,
        r#"{"as":"done","answer":{"status":200}}"#,
        r#"{"reason":"r","as":"maybe"}"#,
        r#"{"reason":"r","as":"done"}"#,
        r#"{"reason":"r","as":"not-executed","answer":{"status":200}}"#,
        r#"{"reason":"r","as":"not-executed","keep":"1h"}"#,
        r#"{"reason":"r","as":"done","answer":{}}"#,
        r#"{"reason":"r","as":"done","answer":{"status":199}}"#,
        r#"{"reason":"r","as":"done","answer":{"status":600}}"#,
        r#"{"reason":"r","as":"done","answer":{"status":200,"trailers":[]}}"#,
        r#"{"reason":"r","as":"done","answer":{"status":200,"headers":{"a":"b"}}}"#,
        r#"{"reason":"r","as":"done","answer":{"status":200,"headers":[["a"]]}}"#,
        r#"{"reason":"r","as":"done","answer":{"status":200,"headers":[["a","b\r\nc: d"]]}}"#,
        r#"{"reason":"r","as":"done","answer":{"status":200,"headers":[["Transfer-Encoding","chunked"]]}}"#,
        r#"{"reason":"r","as":"done","answer":{"status":200,"headers":[["Set-Cookie","a=b"]]}}"#,
        r#"{"reason":"r","as":"done","answer":{"status":200,"body":{"hex":"0"}}}"#,
        r#"{"reason":"r","as":"done","answer":{"status":200,"body":{"hex":"00","text":"a"}}}"#,
        r#"{"reason":"r","as":"done","answer":{"status":200,"body":[1]}}"#,
        r#"{"reason":"r","as":"done","answer":{"status":200},"keep":"0s"}"#,
        r#"{"reason":"r","as":"done","answer":{"status":200},"keep":"soon"}"#,
    ] {
        let answer = office.admin_post(ADMIN_TOKEN, &format!("/api/records/{address}/resolve"), body).await;
        assert_problem(&answer, 400, "");
    }
    assert_eq!(office.record("key-two-of-u1-lost").await["state"], "unknown");
    assert_eq!(office.admin_json("/api/audit").await["entries"].as_array().map(Vec::len), Some(0));
}

#[tokio::test]
async fn a_body_beyond_the_limit_is_refused_before_it_is_all_there() {
    let office = TestGateway::with_records().await;
    let address = office.address("key-two-of-u1-lost").await;
    let path = format!("/api/records/{address}/resolve");
    for chunked in [false, true] {
        let request = office.admin_request("POST", ADMIN_TOKEN, &path).body(vec![b' '; (16 << 20) + 1]);
        let request = if chunked { request.chunked() } else { request };
        assert_problem(&request.send().await, 413, "16 MiB");
    }
    // Nobody's body is read.
    let mut raw = RawClient::connect(office.gateway.admin_addr()).await;
    raw.send(format!("POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n").into_bytes()).await;
    assert_eq!(raw.read_response().await.status, 401);
}

#[tokio::test]
async fn methods_and_paths_that_there_are_not() {
    let office = TestGateway::with_records().await;
    let address = office.address("key-two-of-u1-lost").await;
    let change = format!("/api/records/{address}/forget");
    for (path, allow) in [
        ("/api/records", "GET, HEAD, OPTIONS"),
        (&format!("/api/records/{address}"), "GET, HEAD, OPTIONS"),
        ("/api/stats", "GET, HEAD, OPTIONS"),
        ("/api/openapi.json", "GET, HEAD, OPTIONS"),
        ("/healthz", "GET, HEAD, OPTIONS"),
        ("/metrics", "GET, HEAD, OPTIONS"),
        (&change, "POST, OPTIONS"),
    ] {
        for method in ["GET", "POST", "PUT", "PATCH", "DELETE", "TRACE", "FROB"] {
            if allow.contains(method) {
                continue;
            }
            for token in ["", ADMIN_TOKEN] {
                let answer = office.admin_request(method, token, path).send().await;
                assert_eq!(answer.header("allow"), Some(allow), "{method} {path}: {answer:?}");
                assert_problem(&answer, 405, "are understood here");
            }
        }
        let options = request("OPTIONS", office.gateway.admin_addr(), path).header("Origin", "http://evil.example");
        let answer = options.header("Access-Control-Request-Method", "POST").send().await;
        assert_eq!((answer.status, answer.header("allow")), (204, Some(allow)), "{path}");
        assert!(!answer.headers.contains("access-control-allow-origin"), "{answer:?}");
    }
    for path in [
        "/api/",
        "/api/nothing",
        "/api/records/",
        &format!("/api/records/{address}/"),
        &format!("/api/records/{address}/frobnicate"),
        &format!("/api/records/{address}/forget/it"),
        "/api/stats/",
    ] {
        let answer = get(office.gateway.admin_addr(), path)
            .header("Authorization", format!("Bearer {ADMIN_TOKEN}"))
            .send()
            .await;
        let expected =
            if path == "/api/records/" || path.ends_with(&format!("{address}/")) { [400, 404] } else { [404, 404] };
        assert!(expected.contains(&answer.status), "{path}: {answer:?}");
    }
    assert_eq!(office.record("key-two-of-u1-lost").await["state"], "unknown");
}
