//! Paths that an app could understand as another one.

use super::{BODY, HOST, TestGateway, assert_problem};

const ROUTES: &str = "[[route]]\nmatch = \"POST|PUT|DELETE /pay\"\n[[route]]\nmatch = \"POST /pay/*\"\n";

/// Each may lead anywhere.
const DOT_SEGMENT_PATHS: [&str; 18] = [
    "/pay/.",
    "/pay/..",
    "/pay/./",
    "/pay/./1",
    "/pay/../static",
    "/static/../pay",
    "/static/../pay/1",
    "/./pay",
    "/../pay",
    "/pay\\..\\static",
    "/static\\..\\pay",
    "/static/%2e%2e/pay",
    "/static/%2E%2e/pay/1",
    "/static/.%2e/pay",
    "/pay/%2e",
    "/pay/%2e%2e%2fstatic",
    "/static%2f..%2fpay",
    "/static/..;x/pay",
];

/// Each could be taken for `/pay` or something below it, or is below it and could be taken for something else.
const AMBIGUOUS_PATHS: [&str; 15] = [
    "//pay",
    "///pay",
    "/pay//",
    "/pay//1",
    "/pay\\1",
    "/pay%2f1",
    "/pay%2F1",
    "/pay/a%2Fb",
    "/pay%5c1",
    "/pay/a%5Cb",
    "/pay;x=1",
    "/;/pay",
    "/pay/",
    "/Pay",
    "/PAY;a/1",
];

fn request(method: &str, target: &str, key: &str) -> String {
    let length = BODY.len();
    format!(
        "{method} {target} HTTP/1.1\r\nHost: {HOST}\r\nIdempotency-Key: {key}\r\nContent-Length: {length}\r\n\r\n{BODY}"
    )
}

#[tokio::test]
async fn dot_segments_are_refused_where_a_key_is_carried_or_required() {
    let world = TestGateway::in_memory(ROUTES).await;
    for (at, path) in DOT_SEGMENT_PATHS.into_iter().enumerate() {
        let key = format!("path-{at:02}");
        for target in [path.to_owned(), format!("{path}?x=1"), format!("http://{HOST}{path}")] {
            let answer = world.exchange(request("POST", &target, &key)).await;
            assert_problem(&target, &answer, 400, "request-ambiguous", None);
        }
        world.assert_runs_once(path, &key).await;
        // Without a key nothing is protected, and nothing is refused.
        let keyless = format!("POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 0\r\n\r\n");
        assert_eq!(world.exchange(&keyless).await.status, 201, "{path}");
        assert_eq!(world.upstream.last().target, path);
    }
    let world = TestGateway::in_memory("[policy]\npreset = \"platform\"\n").await;
    for path in DOT_SEGMENT_PATHS.into_iter().chain(["/static/../b"]) {
        let keyless = format!("POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 0\r\n\r\n");
        assert_problem(path, &world.exchange(keyless).await, 400, "request-ambiguous", None);
    }
    assert_eq!(world.upstream.requests(), 0);
}

/// Only what a path could lead to is asked for.
#[tokio::test]
async fn dot_segments_pass_where_no_route_that_they_lead_to_requires_anything() {
    let required = "[policy]\npreset = \"off\"\n[[route]]\nmatch = \"POST /pay\"\npreset = \"platform\"\n";
    let world = TestGateway::in_memory(required).await;
    let keyless = |path: &str| format!("POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 0\r\n\r\n");
    for path in ["/static/../b", "/pay/..", "/%2e%2e/static"] {
        assert_eq!(world.exchange(keyless(path)).await.status, 201, "{path}");
    }
    for path in ["/static/../pay", "/static/..;/Pay/", "/x/%2e%2e%2fpay"] {
        assert_problem(path, &world.exchange(keyless(path)).await, 400, "request-ambiguous", None);
    }
    assert_eq!(world.upstream.requests(), 3);
}

#[tokio::test]
async fn a_path_that_is_read_in_two_ways_is_covered_and_goes_on_as_sent() {
    for config in [ROUTES.to_owned(), String::new(), format!("[policy]\npreset = \"off\"\n{ROUTES}")] {
        let world = TestGateway::in_memory(&config).await;
        for (at, path) in AMBIGUOUS_PATHS.into_iter().enumerate() {
            let key = format!("two-ways-{at}");
            let answer = world.exchange(request("POST", path, &key)).await;
            assert_eq!(answer.status, 201, "{path}: {answer:?}");
            assert_eq!(world.upstream.last().target, path);
            let again = world.exchange(request("POST", path, &key)).await;
            assert_eq!((again.status, again.header("idempotent-replayed")), (201, Some("true")), "{path}: {again:?}");
        }
        assert_eq!(world.upstream.requests(), AMBIGUOUS_PATHS.len());
    }
}

#[tokio::test]
async fn the_same_paths_pass_byte_for_byte_where_they_are_not_covered() {
    let world = TestGateway::in_memory(&format!("[policy]\npreset = \"off\"\n{ROUTES}")).await;
    for method in ["GET", "PATCH", "REPORT"] {
        for path in DOT_SEGMENT_PATHS.into_iter().chain(AMBIGUOUS_PATHS) {
            for target in [path.to_owned(), format!("{path}?x=../y//%2f")] {
                let answer = world.exchange(request(method, &target, "passing")).await;
                assert!(answer.status < 300, "{method} {target}: {answer:?}");
                let seen = world.upstream.last();
                assert_eq!((seen.method.as_str(), seen.target.as_str()), (method, target.as_str()));
            }
        }
    }
    for path in ["/static//a", "/static/../b", "/static%2Fa", "/other\\x", "/%2e/static", "/@scope%2fname"] {
        assert_eq!(world.exchange(request("POST", path, "elsewhere")).await.status, 201, "{path}");
        assert_eq!(world.upstream.last().target, path);
    }
}

#[tokio::test]
async fn a_path_with_one_reading_is_left_alone() {
    let world = TestGateway::in_memory(ROUTES).await;
    for (at, target) in [
        "/pay/1?next=/../x//y%2f",
        "/pay/...",
        "/pay/.well-known",
        "/pay/a.b..c",
        "/pay/%252e%252e",
        "/pay/%20",
        "/pay/%C3%A9",
        "/pay/~a",
        "/pay/a:b@c;d=e",
        "/%70ay",
        "/pay/1%3Fx",
        "/pay/%zz",
    ]
    .into_iter()
    .enumerate()
    {
        let key = format!("plain-path-{at}");
        let answer = world.exchange(request("POST", target, &key)).await;
        assert_eq!(answer.status, 201, "{target}: {answer:?}");
        assert_eq!(world.upstream.last().target, target, "the original goes upstream");
        // Covered, whatever its spelling: a retry replays.
        let answer = world.exchange(request("POST", target, &key)).await;
        assert_eq!((answer.status, answer.header("idempotent-replayed")), (201, Some("true")), "{target}: {answer:?}");
    }
}

#[tokio::test]
async fn a_target_that_is_no_path_does_not_pass_its_routes_by() {
    let world = TestGateway::in_memory("").await;
    for (case, line) in [
        ("an asterisk", "POST *"),
        ("authority form", "POST shop.test"),
        ("a tunnel", "CONNECT shop.test"),
        ("a tunnel to a path", "CONNECT /pay"),
        ("no host", "POST http:///pay"),
    ] {
        let bytes = format!("{line} HTTP/1.1\r\nHost: {HOST}\r\nIdempotency-Key: no-path\r\nContent-Length: 0\r\n\r\n");
        world.assert_rejected(case, bytes, &[400]).await;
        assert_eq!(world.upstream.requests(), 0, "{case}");
    }
    world.assert_runs_once("no path", "no-path").await;
    assert_eq!(world.exchange(format!("OPTIONS * HTTP/1.1\r\nHost: {HOST}\r\n\r\n")).await.status, 200);
    assert_eq!(world.upstream.last().target, "*");
    // A fragment is no part of a target; what is matched without it goes upstream without it.
    assert_eq!(world.exchange(request("POST", "/pay#x", "fragment")).await.status, 201);
    assert_eq!(world.upstream.last().target, "/pay");
}
