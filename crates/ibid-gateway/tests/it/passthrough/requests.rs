//! Requests and their headers.

use testbed::{
    client::{get, post, request},
    upstream::{TestUpstream, UpstreamReply},
};

use super::ONE_ROUTE;
use crate::support::{TestGateway, start_gateway};

#[tokio::test]
async fn safe_methods_pass_with_a_key() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("").await;
    for method in ["GET", "HEAD", "OPTIONS"] {
        for _ in 0..2 {
            let arrived = upstream.requests();
            let answer = request(method, gateway.addr(), "/pay").key("k-1").send().await;
            assert_eq!(answer.status, 200, "{method}: {answer:?}");
            assert!(!answer.headers.contains("idempotent-replayed"), "{method}: {answer:?}");
            assert_eq!(upstream.requests(), arrived + 1, "{method}");
            let seen = upstream.last();
            assert_eq!((seen.method.as_str(), seen.key()), (method, Some("k-1")));
            assert!(seen.attempt().is_none(), "{seen:?}");
        }
    }
}

#[tokio::test]
async fn uncovered_routes_and_keyless_requests_run_every_time() {
    let TestGateway { upstream: _upstream, gateway } = TestGateway::start(ONE_ROUTE).await;
    let requests = [
        post(gateway.addr(), "/other").key("k-1").json("{}"),
        request("DELETE", gateway.addr(), "/pay").key("k-1"),
        post(gateway.addr(), "/pay/deeper").key("k-1").json("{}"),
        post(gateway.addr(), "/pay").json("{}"),
    ];
    for (n, request) in requests.iter().enumerate() {
        for run in 1..=2 {
            let answer = request.send().await;
            assert_eq!(answer.status, 201, "{answer:?}");
            assert_eq!(answer.json()["run"], n * 2 + run, "{answer:?}");
            assert!(!answer.headers.contains("idempotency-stored"), "{answer:?}");
        }
    }
}

#[tokio::test]
async fn head_keeps_the_length_and_has_no_body() {
    let TestGateway { upstream, gateway } = TestGateway::start(ONE_ROUTE).await;
    upstream.on("/file", UpstreamReply::status(200).header("ETag", "\"v1\"").large(12_345));
    let mut raw = testbed::client::RawClient::connect(gateway.addr()).await;
    for _ in 0..2 {
        let answer = request("HEAD", gateway.addr(), "/file").send_on(&mut raw).await;
        assert_eq!((answer.status, answer.header("content-length")), (200, Some("12345")), "{answer:?}");
        assert_eq!(answer.header("etag"), Some("\"v1\""));
    }
    // The connection is still in step.
    assert_eq!(get(gateway.addr(), "/file").send_on(&mut raw).await.body.len(), 12_345);
}

#[tokio::test]
async fn the_target_and_the_body_go_through_as_sent() {
    let TestGateway { upstream, gateway } = TestGateway::start(ONE_ROUTE).await;
    for target in ["/a%20b/%7Ec?x=1&x=2&y=%2F", "/", "/?", "/a;v=1/b,c?q", "/%e2%82%ac", "*"] {
        let method = if target == "*" { "OPTIONS" } else { "PATCH" };
        let body: &[u8] = &[0, 255, 13, 10, 13, 10];
        let sent = request(method, gateway.addr(), target).header("X-Many", "1").header("X-Many", "2");
        let answer = if target == "*" { sent.send().await } else { sent.body(body).send().await };
        assert!(answer.status < 300, "{target}: {answer:?}");
        let seen = upstream.last();
        assert_eq!((seen.target.as_str(), seen.method.as_str()), (target, method));
        assert_eq!(seen.headers.get_all("x-many"), ["1", "2"]);
        assert!(target == "*" || seen.body == body, "{seen:?}");
    }
}

#[tokio::test]
async fn what_concerns_one_connection_is_removed_both_ways() {
    let upstream = TestUpstream::start().await;
    let reply = UpstreamReply::usual()
        .header("Connection", "X-Back")
        .header("X-Back", "1")
        .header("Keep-Alive", "timeout=30")
        .header("Proxy-Authenticate", "Basic")
        .header("X-Stays", "1");
    upstream.on("/other", reply);
    let gateway = start_gateway(ONE_ROUTE, &upstream).await;
    let answer = post(gateway.addr(), "/other")
        .header("Connection", "keep-alive, X-Hop")
        .header("X-Hop", "1")
        .header("Keep-Alive", "timeout=5")
        .header("Proxy-Connection", "keep-alive")
        .header("Proxy-Authorization", "Basic x")
        .header("TE", "gzip")
        .header("X-Stays", "1")
        .json("{}")
        .send()
        .await;
    let seen = upstream.last();
    for name in ["connection", "x-hop", "keep-alive", "proxy-connection", "proxy-authorization", "te"] {
        assert!(!seen.headers.contains(name), "{name}: {seen:?}");
    }
    assert_eq!(seen.header("x-stays"), Some("1"));
    for name in ["x-back", "keep-alive", "proxy-authenticate"] {
        assert!(!answer.headers.contains(name), "{name}: {answer:?}");
    }
    assert_eq!(answer.header("x-stays"), Some("1"));
}

#[tokio::test]
async fn trailers_pass_both_ways() {
    let TestGateway { upstream, gateway } = TestGateway::start(ONE_ROUTE).await;
    upstream.on("/other", UpstreamReply::chunks(["one", "two"]).header("Trailer", "X-Back").trailer("X-Back", "2"));
    let sent = post(gateway.addr(), "/other").header("TE", "trailers").header("Trailer", "X-There").body("body");
    let answer = sent.trailer("X-There", "1").send().await;
    assert_eq!((answer.text().as_str(), answer.trailers.get("x-back")), ("onetwo", Some("2")), "{answer:?}");
    let seen = upstream.last();
    assert_eq!((seen.text().as_str(), seen.trailers.get("x-there")), ("body", Some("1")), "{seen:?}");
}

#[tokio::test]
async fn the_upstream_is_told_who_asked() {
    let TestGateway { upstream, gateway } = TestGateway::start(ONE_ROUTE).await;
    get(gateway.addr(), "/list").header("Host", "shop.example:8443").send().await;
    let seen = upstream.last();
    assert_eq!(seen.headers.get_all("host"), ["shop.example:8443"]);
    assert_eq!(seen.headers.get_all("x-forwarded-for"), ["127.0.0.1"]);
    assert_eq!(seen.headers.get_all("x-forwarded-proto"), ["http"]);
    assert_eq!(seen.headers.get_all("x-forwarded-host"), ["shop.example:8443"]);
}

#[tokio::test]
async fn a_trusted_proxys_word_is_continued_and_anyone_elses_begun_anew() {
    let upstream = TestUpstream::start().await;
    for (trusted, chain, proto, host) in [
        ("", "203.0.113.7, 127.0.0.1", "https", "shop.example"),
        ("trusted_proxies = [\"10.0.0.0/8\"]\n", "127.0.0.1", "http", "inner.example"),
    ] {
        let gateway = start_gateway(&format!("{trusted}{ONE_ROUTE}"), &upstream).await;
        let claimed = post(gateway.addr(), "/pay").key("k-1").json("{}");
        for request in [get(gateway.addr(), "/list"), claimed] {
            let answer = request
                .header("Host", "inner.example")
                .header("X-Forwarded-For", "203.0.113.7")
                .header("X-Forwarded-Proto", "https")
                .header("X-Forwarded-Host", "shop.example")
                .send()
                .await;
            assert!(answer.status < 300, "{answer:?}");
            let seen = upstream.last();
            assert_eq!(seen.headers.get_all("x-forwarded-for"), [chain], "{trusted}");
            assert_eq!(seen.headers.get_all("x-forwarded-proto"), [proto], "{trusted}");
            assert_eq!(seen.headers.get_all("x-forwarded-host"), [host], "{trusted}");
            assert_eq!(seen.headers.get_all("host"), ["inner.example"]);
        }
    }
}

#[tokio::test]
async fn an_upstream_that_cannot_be_reached_is_a_502_for_everything() {
    let upstream = TestUpstream::start_refusing().await;
    let gateway = start_gateway(ONE_ROUTE, &upstream).await;
    let answer = get(gateway.addr(), "/list").send().await;
    crate::support::assert_refused(&answer, 502, "upstream-unreachable");
    upstream.restart().await;
    assert_eq!(get(gateway.addr(), "/list").send().await.status, 200);
}
