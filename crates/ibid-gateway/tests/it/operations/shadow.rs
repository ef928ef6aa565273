//! Shadow mode: looks on, and changes nothing for anybody.

use testbed::{
    client::{TestResponse, post},
    process::GatewayProcess,
    upstream::{ReplyGate, TestUpstream, UpstreamReply, filler},
};

use crate::support::{anonymous_pay, lines, start_gateway};

const SHADOW: &str = "[policy]\nmode = \"shadow\"\nkey.required = true\nmax_request = \"1KiB\"\n\
                      first_headers = { X-First = \"1\" }";

async fn shadowed(config: &str, upstream: &TestUpstream) -> GatewayProcess {
    let config = format!("cors = {{ origins = [\"https://shop.example.com\"] }}\n{config}");
    start_gateway(&config, upstream).await
}

/// What the app says by itself, as a client without a gateway sees it; the names only.
fn names(answer: &TestResponse) -> Vec<String> {
    let mut names: Vec<_> = answer.headers.iter().map(|(name, _)| name.to_lowercase()).collect();
    names.retain(|name| name != "date" && name != "connection");
    names.sort();
    names
}

#[tokio::test]
async fn it_never_replays_and_adds_nothing() {
    let upstream = TestUpstream::start().await;
    upstream.on("/pay", UpstreamReply::usual().header("X-App", "yes").set_cookie("a=b"));
    let gateway = shadowed(SHADOW, &upstream).await;
    let direct = anonymous_pay(upstream.addr(), "k-0").send().await;
    for run in 2..=4 {
        let answer = anonymous_pay(gateway.addr(), "k-1").header("Origin", "https://shop.example.com").send().await;
        assert_eq!((answer.status, upstream.executions()), (201, run), "{answer:?}");
        assert_eq!(answer.text(), format!(r#"{{"id":{run},"run":{run}}}"#));
        assert_eq!(names(&answer), names(&direct), "{answer:?}");
    }
    lines(&gateway, "shadow-replay", 2).await;
}

#[tokio::test]
async fn it_refuses_neither_missing_nor_invalid_keys_nor_other_requests() {
    let upstream = TestUpstream::start().await;
    let gateway = shadowed(SHADOW, &upstream).await;
    let addr = gateway.addr();
    assert_eq!(post(addr, "/pay").json("{}").send().await.status, 201, "no key");
    assert_eq!(anonymous_pay(addr, "a, b").send().await.status, 201, "no valid key");
    assert_eq!(anonymous_pay(addr, "k-1").send().await.status, 201);
    let other = post(addr, "/pay").key("k-1").json(r#"{"amount":2}"#).send().await;
    assert_eq!((other.status, upstream.executions()), (201, 4), "a reused key: {other:?}");
    assert_eq!(upstream.last().text(), r#"{"amount":2}"#);
    lines(&gateway, "shadow-refusal", 3).await;
}

#[tokio::test]
async fn it_neither_refuses_nor_holds_up_a_second_request_while_the_first_runs() {
    let (upstream, gate) = (TestUpstream::start().await, ReplyGate::new());
    upstream.on_each("/pay", [UpstreamReply::usual().gated(&gate), UpstreamReply::usual()]);
    let gateway = shadowed(&format!("{SHADOW}\non_concurrent = \"wait\""), &upstream).await;
    let mut first = anonymous_pay(gateway.addr(), "k-1").start().await;
    gate.arrived(1).await;
    let second = anonymous_pay(gateway.addr(), "k-1").send().await;
    assert_eq!((second.status, second.text().as_str()), (201, r#"{"id":2,"run":2}"#));
    gate.open();
    let first = first.read_response().await;
    assert_eq!((first.status, first.text().as_str()), (201, r#"{"id":1,"run":1}"#));
}

#[tokio::test]
async fn a_body_over_the_limit_passes_whole() {
    let upstream = TestUpstream::start().await;
    let gateway = shadowed(SHADOW, &upstream).await;
    for (n, chunked) in [(1, false), (2, true)] {
        let request = post(gateway.addr(), "/pay").key(format!("k-{n}")).body(filler(300_000));
        let request = if chunked { request.chunked() } else { request };
        let answer = request.send().await;
        assert_eq!((answer.status, upstream.executions()), (201, n), "{answer:?}");
        assert!(upstream.last().body == filler(300_000), "all of it arrives, in order");
    }
}

#[tokio::test]
async fn failures_of_the_app_pass_as_they_are() {
    let upstream = TestUpstream::start().await;
    let gateway = shadowed(SHADOW, &upstream).await;
    for status in [500, 502, 504] {
        upstream.on("/pay", UpstreamReply::status(status).json(r#"{"error":"app"}"#));
        for _ in 0..2 {
            let answer = anonymous_pay(gateway.addr(), &format!("k-{status}")).send().await;
            assert_eq!((answer.status, answer.text().as_str()), (status, r#"{"error":"app"}"#));
            assert!(!answer.headers.contains("idempotency-stored"), "{answer:?}");
        }
    }
    assert_eq!(upstream.executions(), 6);
}
