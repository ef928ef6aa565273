//! Keys that can be read in two ways, or not at all.

use super::{BODY, HOST, TestGateway, assert_problem, with_key};

/// A route for every preset that has an opinion about keys; everything else is under `ietf`.
const ROUTES: &str = r#"
[[route]]
match = "POST /leads"
preset = "leads"
[[route]]
match = "POST /portal"
preset = "appsportal"
[[route]]
match = "POST /bookings"
preset = "bookings"
[[route]]
match = "POST /members"
preset = "membership"
[[route]]
match = "POST /orders"
key.format = "regex:ord_[0-9]+"
[[route]]
match = "POST|PUT|PATCH|DELETE /strict"
key.required = true
[[route]]
match = "POST|PUT|PATCH|DELETE /*"
"#;

/// A POST with exactly these bytes as the value of its key header.
fn with_value(value: &[u8]) -> Vec<u8> {
    let mut bytes = format!("POST /pay HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {}\r\n", BODY.len()).into_bytes();
    bytes.extend(b"Content-Type: application/json\r\nIdempotency-Key: ");
    bytes.extend(value);
    bytes.extend(b"\r\n\r\n");
    bytes.extend(BODY.as_bytes());
    bytes
}

#[tokio::test]
async fn a_key_that_breaks_a_rule_is_refused() {
    let world = TestGateway::in_memory("").await;
    let cases: [(&str, &[u8]); 28] = [
        ("empty", b""),
        ("blank", b"   \t "),
        ("quotes around nothing", b"\"\""),
        ("blank inside quotes", b"\"   \""),
        ("a list", b"K, other"),
        ("a list of quoted keys", b"\"K\", \"other\""),
        ("a list of the same key", b"\"K\",\"K\""),
        ("a bare comma", b","),
        ("a comma at the end", b"K,"),
        ("a comma at the beginning", b",K"),
        ("parameters", b"\"K\";p=1"),
        ("parameters without quotes", b"K;p"),
        ("a bad escape", b"\"K\\x\""),
        ("an escape at the end", b"\"K\\"),
        ("an unclosed quote", b"\"K"),
        ("an escaped closing quote", b"\"K\\\""),
        ("a quote at the end only", b"K\""),
        ("something after the quote", b"\"K\"x"),
        ("a space inside", b"K x"),
        ("a space inside quotes", b"\"K x\""),
        ("a tab inside", b"K\tx"),
        ("a tab inside quotes", b"\"K\tx\""),
        ("UTF-8", b"K\xc3\xa9"),
        ("UTF-8 inside quotes", b"\"K\xc3\xa9\""),
        ("the byte 0x80", b"K\x80"),
        ("the byte 0xff", b"\xffK"),
        ("a byte sequence of RFC 8941", b":K:;"),
        ("single quotes with a space", b"'K x'"),
    ];
    for (at, (case, template)) in cases.into_iter().enumerate() {
        let key = format!("bad-value-{at:03}-key");
        let answer = world.exchange(with_value(&with_key(template, &key))).await;
        assert_problem(case, &answer, 400, "key-invalid", None);
        world.assert_runs_once(case, &key).await;
    }
    assert_eq!(world.upstream.requests(), cases.len());
}

#[tokio::test]
async fn control_bytes_do_not_get_past_the_server() {
    let world = TestGateway::in_memory("").await;
    for byte in (0..=0x1f_u8).chain([0x7f]).filter(|byte| !matches!(byte, b'\t' | b'\r' | b'\n')) {
        for quote in ["", "\""] {
            let (case, key) =
                (format!("the byte {byte:#04x} after {quote:?}"), format!("control-{byte:02x}-{}", quote.len()));
            let mut value = format!("{quote}{key}").into_bytes();
            value.push(byte);
            value.extend(quote.as_bytes());
            // hyper answers 400 by itself, before there is a request to judge.
            world.assert_rejected(&case, with_value(&value), &[400]).await;
            world.assert_runs_once(&case, &key).await;
        }
    }
}

#[tokio::test]
async fn two_key_headers_are_refused_even_if_they_agree() {
    let world = TestGateway::in_memory("").await;
    for (case, other) in [("two keys", "another-key"), ("the same key twice", "two-headers-1"), ("an empty second", "")]
    {
        for (at, other_first) in [false, true].into_iter().enumerate() {
            let key = format!("two-headers-{at}-{}", case.len());
            let other = if other == "two-headers-1" { &key } else { other };
            let (first, second) = if other_first { (other, key.as_str()) } else { (key.as_str(), other) };
            let answer = world.shop_post("/pay").key(first).header("idempotency-KEY", second).json(BODY).send().await;
            assert_problem(case, &answer, 400, "key-invalid", None);
            world.assert_runs_once(case, &key).await;
        }
    }
}

#[tokio::test]
async fn a_key_over_the_limit_is_refused_and_one_at_the_limit_runs() {
    let world = TestGateway::in_memory(ROUTES).await;
    let (long, too_long) = ("a".repeat(255), "a".repeat(256));
    for sent in [too_long.clone(), format!("\"{too_long}\""), "b".repeat(4000)] {
        let answer = world.valid_request(&sent).send().await;
        assert_problem("over 255", &answer, 400, "key-invalid", None);
    }
    world.assert_runs_once("255", &long).await;
    // The limit counts what is inside the quotes.
    let answer = world.valid_request(&format!("\"{long}\"")).send().await;
    assert_eq!((answer.status, answer.header("idempotent-replayed")), (201, Some("true")));

    let portal =
        |key: &str| world.shop_post("/portal").header("X-Tenant-Id", "t1").header("X-Idempotency-Key", key).json(BODY);
    let answer = portal(&"p".repeat(129)).send().await;
    assert_problem("129 under appsportal", &answer, 400, "key-invalid", None);
    let key = "p".repeat(128);
    world.assert_request_runs_once("128 under appsportal", &key, &portal(&key)).await;
}

#[tokio::test]
async fn a_missing_key_is_refused_only_where_it_is_required() {
    let world = TestGateway::in_memory(ROUTES).await;
    for (case, path) in [("ietf, required", "/strict"), ("leads", "/leads"), ("bookings", "/bookings")] {
        let answer = world.shop_post(path).json(BODY).send().await;
        assert_problem(case, &answer, 400, "key-missing", None);
    }
    // The other presets' header is not this one's.
    let answer = world.shop_post("/leads").key("550e8400-e29b-41d4-a716-446655440000").json(BODY).send().await;
    assert_problem("the wrong header", &answer, 400, "key-missing", None);
    assert_eq!(world.upstream.requests(), 0);
    let answer = world.shop_post("/pay").json(BODY).send().await;
    assert_eq!((answer.status, world.upstream.executions()), (201, 1));
    world
        .assert_request_runs_once(
            "required and there",
            "a-key-that-is-there",
            &world.shop_post("/strict").key("a-key-that-is-there"),
        )
        .await;
}

#[tokio::test]
async fn a_key_in_the_trailers_is_no_key() {
    let world = TestGateway::in_memory(ROUTES).await;
    let key = "key-in-the-trailers";
    let answer = world.shop_post("/strict").json(BODY).trailer("Idempotency-Key", key).send().await;
    assert_problem("only in the trailers", &answer, 400, "key-missing", None);
    let strict = world.shop_post("/strict").key(key).json(BODY);
    world.assert_request_runs_once("only in the trailers", key, &strict).await;
    // Where none is required it runs without protection, and claims nothing.
    let keyless = world.shop_post("/pay").json(BODY).trailer("Idempotency-Key", "another-in-trailers");
    assert_eq!(keyless.send().await.status, 201);
    assert_eq!(keyless.send().await.status, 201);
    assert_eq!(world.upstream.executions_at("/pay"), 2);
    world.assert_runs_once("not required", "another-in-trailers").await;
}

#[tokio::test]
async fn a_key_in_the_wrong_format_is_refused() {
    let world = TestGateway::in_memory(ROUTES).await;
    let uuid = "550e8400-e29b-41d4-a716-446655440000";
    let cases: [(&str, &str, &[&str]); 4] = [
        (
            "/leads",
            uuid,
            &[
                "not-a-uuid",
                "550e8400e29b41d4a716446655440000",
                "550e8400-e29b-11d4-a716-446655440000",
                "550e8400-e29b-41d4-c716-446655440000",
                "{550e8400-e29b-41d4-a716-446655440000}",
            ],
        ),
        (
            "/bookings",
            "usr_1:booking.create:res_1:1704067200000",
            &[
                "usr_1:booking.create:res_1",
                "usr_1:booking.create:res_1:soon",
                ":booking.create:res_1:1",
                "usr_1::res_1:1",
                "usr_1:a:b:c:1",
                "usr_1:booking.create:res_1:123456789012345678901",
                uuid,
            ],
        ),
        ("/members", "req-1234567890abcdef", &["short", "special@chars!and-more-of-them", "fifteen-chars-x"]),
        ("/orders", "ord_12", &["ord_", "xord_12", "ord_12x", "ORD_12"]),
    ];
    for (path, good, bad) in cases {
        let header = if path == "/leads" { "X-Idempotency-Key" } else { "Idempotency-Key" };
        let with = |key: &str| world.shop_post(path).header(header, key).header("X-User-Id", "u1").json(BODY);
        for key in bad {
            let answer = with(key).send().await;
            assert_problem(&format!("{path}: {key}"), &answer, 400, "key-invalid", None);
        }
        assert_eq!(world.upstream.executions_at(path), 0);
        world.assert_request_runs_once(path, good, &with(good)).await;
    }
    // Any case of a UUID is one key.
    let shouted = world.shop_post("/leads").header("X-Idempotency-Key", uuid.to_uppercase()).json(BODY).send().await;
    assert_eq!((shouted.status, world.upstream.executions_at("/leads")), (201, 1));
}

#[tokio::test]
async fn a_quoted_and_a_bare_key_are_one_key() {
    let world = TestGateway::in_memory("").await;
    world.assert_runs_once("bare", "abc").await;
    let cases: [&[u8]; 3] = [b"\"abc\"", b"  \"abc\"\t", b" abc "];
    for value in cases {
        let answer = world.exchange(with_value(value)).await;
        assert_eq!((answer.status, answer.header("idempotent-replayed")), (201, Some("true")), "{answer:?}");
    }
    assert_eq!(world.upstream.executions(), 1);
    // Case is significant; quotes let a comma in.
    assert_eq!(world.exchange(with_value(b"ABC")).await.json()["run"], 2);
    assert_eq!(world.exchange(with_value(b"\"a,b;c\"")).await.json()["run"], 3);
    assert_eq!(world.exchange(with_value(b"\"a\\\"b\\\\\"")).await.json()["run"], 4);
}

#[tokio::test]
async fn a_key_on_a_method_that_is_not_covered_passes_through() {
    let world = TestGateway::in_memory("").await;
    for (method, target) in [("GET", "/things?x=1"), ("OPTIONS", "/things"), ("GET", "/things")] {
        let bytes = format!("{method} {target} HTTP/1.1\r\nHost: {HOST}\r\nIdempotency-Key: \"a, b\r\n\r\n");
        for _ in 0..2 {
            assert_eq!(world.exchange(&bytes).await.status, 200);
            let seen = world.upstream.last();
            assert_eq!((seen.method.as_str(), seen.target.as_str()), (method, target));
            assert_eq!(seen.header("idempotency-key"), Some("\"a, b"));
        }
    }
    assert_eq!((world.upstream.requests(), world.upstream.executions()), (6, 0));
}
