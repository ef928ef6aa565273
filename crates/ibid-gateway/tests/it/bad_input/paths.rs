//! Paths that an app could understand as another one.

use super::{BODY, HOST, World, assert_problem};

const ROUTES: &str = "[[route]]\nmatch = \"POST|PUT|DELETE /pay\"\n[[route]]\nmatch = \"POST /pay/*\"\n";

/// Each could be taken for `/pay` or something below it, or is below it and could be taken for something else.
const AMBIGUOUS: [&str; 27] = [
    "/pay/.",
    "/pay/..",
    "/pay/./",
    "/pay/./1",
    "/pay/../static",
    "/static/../pay",
    "/static/../pay/1",
    "/./pay",
    "/../pay",
    "//pay",
    "///pay",
    "/pay//",
    "/pay//1",
    "/pay\\1",
    "/pay\\..\\static",
    "/static\\..\\pay",
    "/pay%2f1",
    "/pay%2F1",
    "/pay/a%2Fb",
    "/pay%5c1",
    "/pay/a%5Cb",
    "/static/%2e%2e/pay",
    "/static/%2E%2e/pay/1",
    "/static/.%2e/pay",
    "/pay/%2e",
    "/pay/%2e%2e%2fstatic",
    "/static%2f..%2fpay",
];

fn request(method: &str, target: &str, key: &str) -> String {
    let length = BODY.len();
    format!(
        "{method} {target} HTTP/1.1\r\nHost: {HOST}\r\nIdempotency-Key: {key}\r\nContent-Length: {length}\r\n\r\n{BODY}"
    )
}

#[tokio::test]
async fn a_path_with_a_second_reading_is_refused_where_it_is_covered() {
    let world = World::start(ROUTES).await;
    for (at, path) in AMBIGUOUS.into_iter().enumerate() {
        let key = format!("path-{at:02}");
        for target in [path.to_owned(), format!("{path}?x=1"), format!("http://{HOST}{path}")] {
            let answer = world.exchange(request("POST", &target, &key)).await;
            assert_problem(&target, &answer, 400, "request-ambiguous", None);
        }
        // Without a key it is the same path.
        let keyless = format!("POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 0\r\n\r\n");
        assert_problem(path, &world.exchange(keyless).await, 400, "request-ambiguous", None);
        world.runs_once(path, &key).await;
    }
    assert_eq!(world.upstream.requests(), AMBIGUOUS.len());
}

#[tokio::test]
async fn the_same_paths_pass_byte_for_byte_where_they_are_not_covered() {
    let world = World::start(ROUTES).await;
    for method in ["GET", "PATCH", "REPORT"] {
        for path in AMBIGUOUS {
            for target in [path.to_owned(), format!("{path}?x=../y//%2f")] {
                let answer = world.exchange(request(method, &target, "passing")).await;
                assert!(answer.status < 300, "{method} {target}: {answer:?}");
                let seen = world.upstream.last();
                assert_eq!((seen.method.as_str(), seen.target.as_str()), (method, target.as_str()));
            }
        }
    }
    for path in ["/static//a", "/static/../b", "/static%2Fa", "/other\\x", "/%2e/static"] {
        assert_eq!(world.exchange(request("POST", path, "elsewhere")).await.status, 201, "{path}");
        assert_eq!(world.upstream.last().target, path);
    }
}

#[tokio::test]
async fn every_odd_path_is_refused_where_everything_is_covered() {
    let world = World::start("").await;
    for path in AMBIGUOUS.into_iter().chain(["/static//a", "/a/../b", "/a%2fb", "/a%5Cb", "/a\\b", "//"]) {
        let answer = world.exchange(request("POST", path, "odd-path")).await;
        assert_problem(path, &answer, 400, "request-ambiguous", None);
    }
    assert_eq!(world.upstream.requests(), 0);
    world.runs_once("odd paths", "odd-path").await;
}

#[tokio::test]
async fn a_path_with_one_reading_is_left_alone() {
    let world = World::start(ROUTES).await;
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
    let world = World::start("").await;
    for (case, line) in [
        ("an asterisk", "POST *"),
        ("authority form", "POST shop.test"),
        ("a tunnel", "CONNECT shop.test"),
        ("a tunnel to a path", "CONNECT /pay"),
        ("no host", "POST http:///pay"),
    ] {
        let bytes = format!("{line} HTTP/1.1\r\nHost: {HOST}\r\nIdempotency-Key: no-path\r\nContent-Length: 0\r\n\r\n");
        world.turned_away(case, bytes, &[400]).await;
        assert_eq!(world.upstream.requests(), 0, "{case}");
    }
    world.runs_once("no path", "no-path").await;
    assert_eq!(world.exchange(format!("OPTIONS * HTTP/1.1\r\nHost: {HOST}\r\n\r\n")).await.status, 200);
    assert_eq!(world.upstream.last().target, "*");
    // A fragment is no part of a target; what is matched without it goes upstream without it.
    assert_eq!(world.exchange(request("POST", "/pay#x", "fragment")).await.status, 201);
    assert_eq!(world.upstream.last().target, "/pay");
}
