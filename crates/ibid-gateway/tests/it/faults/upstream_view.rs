//! What the upstream gets of a claimed request, and who answers `Expect`.

use testbed::{
    client::{RawClient, get, post},
    process::GatewayProcess,
    upstream::{TestUpstream, filler},
};

use crate::support::{BIN, TestGateway, assert_ran, assert_refused, assert_replay, caller, pay};

#[tokio::test]
async fn the_upstream_is_told_attempt_and_fence_by_us_alone() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("").await;
    let lying = pay(&gateway, "k-1").header("Ibid-Attempt", "99").header("Ibid-Fence", "99").header("Ibid-Other", "x");
    assert_ran(&lying.send().await);
    let seen = upstream.last();
    assert_eq!(seen.headers.get_all("ibid-attempt"), ["1"]);
    assert_eq!(seen.headers.get_all("ibid-fence").len(), 1);
    assert!(seen.fence().is_some_and(|fence| fence != 99), "{seen:?}");
    assert!(!seen.headers.contains("ibid-other"), "{seen:?}");
    assert_eq!(seen.header("idempotency-key"), Some("k-1"));
    // Nor can it be said about what is not claimed.
    for request in [get(gateway.addr(), "/list"), caller(post(gateway.addr(), "/keyless")).json("{}")] {
        request.header("Ibid-Attempt", "99").header("Ibid-Fence", "99").send().await;
        let seen = upstream.last();
        assert!(!seen.headers.contains("ibid-attempt") && !seen.headers.contains("ibid-fence"), "{seen:?}");
    }
}

#[tokio::test]
async fn fences_grow_from_run_to_run() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("").await;
    upstream.on("/pay", testbed::upstream::UpstreamReply::status(500));
    for _ in 0..10 {
        assert_eq!(pay(&gateway, "k-1").send().await.status, 500);
    }
    let runs: Vec<_> = upstream.log().iter().map(|seen| (seen.attempt().unwrap(), seen.fence().unwrap())).collect();
    assert!(runs.windows(2).all(|two| two[0].0 + 1 == two[1].0 && two[0].1 < two[1].1), "{runs:?}");
}

#[tokio::test]
async fn only_claimed_requests_lose_their_accept_encoding() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("").await;
    let claimed = pay(&gateway, "k-1").header("Accept-Encoding", "gzip, br");
    let first = claimed.send().await;
    assert_ran(&first);
    assert!(!upstream.last().headers.contains("accept-encoding"));
    // What was stored suits a client that asks for something else.
    assert_replay(&pay(&gateway, "k-1").send().await, &first);
    for request in [get(gateway.addr(), "/list").key("k-2"), caller(post(gateway.addr(), "/keyless")).json("{}")] {
        request.header("Accept-Encoding", "gzip, br").send().await;
        assert_eq!(upstream.last().header("accept-encoding"), Some("gzip, br"));
    }
}

#[tokio::test]
async fn the_gateway_answers_expect_itself() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("").await;
    let bytes = pay(&gateway, "k-1").header("Expect", "100-continue").to_bytes();
    let head = crate::support::find(&bytes, b"\r\n\r\n").expect("a head") + 4;
    for replayed in [false, true] {
        let mut raw = RawClient::connect(gateway.addr()).await;
        raw.send(&bytes[..head]).await;
        assert_eq!(raw.read_next().await.status, 100);
        assert_eq!(upstream.requests(), usize::from(replayed), "nothing is sent on before the body is there");
        raw.send(&bytes[head..]).await;
        let answer = raw.read_response().await;
        assert_eq!((answer.status, answer.headers.contains("idempotent-replayed")), (201, replayed), "{answer:?}");
    }
    let seen = upstream.last();
    assert!(!seen.headers.contains("expect"), "{seen:?}");
    assert_eq!(seen.text(), r#"{"amount":1}"#);
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn nobody_is_asked_for_a_body_that_is_refused_anyway() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("key.required = true\nmax_request = \"64KiB\"").await;
    let at = || caller(post(gateway.addr(), "/pay"));
    let cases = [
        ("key-missing", 400, at().json("{}")),
        ("key-invalid", 400, at().key("a, b").json("{}")),
        ("scope-missing", 400, post(gateway.addr(), "/pay").key("k").header("Cookie", "a=b").json("{}")),
        ("request-ambiguous", 400, at().key("k").header("Idempotency_Key", "l").json("{}")),
        ("body-too-large", 413, at().key("k").body(filler((64 << 10) + 1))),
    ];
    for (name, status, request) in cases {
        let bytes = request.header("Expect", "100-continue").to_bytes();
        let head = crate::support::find(&bytes, b"\r\n\r\n").expect("a head") + 4;
        let mut raw = RawClient::connect(gateway.addr()).await;
        raw.send(&bytes[..head]).await;
        let answer = raw.read_response().await;
        assert_refused(&answer, status, name);
        assert!(answer.interim.is_empty(), "{name}: {:?}", answer.interim);
    }
    assert_eq!(upstream.requests(), 0);
}

#[tokio::test]
async fn a_chunked_request_reaches_the_upstream_whole_in_one_framing() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("").await;
    let first = pay(&gateway, "k-1").chunked().send().await;
    assert_ran(&first);
    let seen = upstream.last();
    assert_eq!(seen.text(), r#"{"amount":1}"#);
    let framings = seen.headers.get_all("content-length").len() + seen.headers.get_all("transfer-encoding").len();
    assert_eq!(framings, 1, "{seen:?}");
    // How it was framed is nothing that tells two requests apart.
    assert_replay(&pay(&gateway, "k-1").send().await, &first);
}

#[tokio::test]
async fn trailers_of_a_claimed_request_reach_the_upstream() {
    let TestGateway { upstream, gateway } = TestGateway::ietf("").await;
    let request = pay(&gateway, "k-1").header("Trailer", "X-Sum").trailer("X-Sum", "42");
    assert_ran(&request.send().await);
    assert_eq!(upstream.last().trailers.get("x-sum"), Some("42"), "{:?}", upstream.last());
}

#[tokio::test]
async fn each_route_goes_to_its_own_upstream() {
    let (main, payments, orders) =
        (TestUpstream::start().await, TestUpstream::start().await, TestUpstream::start().await);
    let config = format!(
        "[[route]]\nmatch = \"POST /payments\"\nupstream = \"{}\"\n[[route]]\nmatch = \"POST /orders\"\nupstream = \
         \"{}\"\n[[route]]\nmatch = \"POST /other\"\n",
        payments.url(),
        orders.url()
    );
    let gateway = GatewayProcess::spawn(BIN, &config, &main.url()).await;
    let mut raw = RawClient::connect(gateway.addr()).await;
    for n in 0..3 {
        for (path, upstream) in [("/payments", &payments), ("/orders", &orders), ("/other", &main)] {
            let request = caller(post(gateway.addr(), path)).key(format!("{path}-{n}")).json("{}");
            let first = request.send_on(&mut raw).await;
            assert_ran(&first);
            assert_replay(&request.send_on(&mut raw).await, &first);
            assert_eq!(upstream.executions_at(path), n + 1);
        }
    }
    assert_eq!((main.requests(), payments.requests(), orders.requests()), (3, 3, 3));
    payments.stop().await;
    let request = caller(post(gateway.addr(), "/payments")).key("down").json("{}");
    assert_refused(&request.send().await, 502, "upstream-unreachable");
    assert_eq!((main.requests(), orders.requests()), (3, 3), "no other upstream stands in");
}
