//! What passes through has limits too, but none on what flows.

use std::time::Duration;

use testbed::{
    client::{RawClient, TestRequest, TestResponse, get, post, request},
    process::GatewayProcess,
    upstream::{TestUpstream, UpstreamFault, UpstreamReply},
};
use tokio::{io::AsyncReadExt as _, time::sleep};

use super::ONE_ROUTE;
use crate::support::{BIN, ScriptedUpstream, TestGateway, assert_refused, pay, start_gateway, within};

const SHORT_TIMEOUTS: &str =
    "[limits]\nbody_timeout = \"400ms\"\nreply_timeout = \"400ms\"\npool_timeout = \"400ms\"\n";

async fn gateway(top: &str, upstream: &str) -> GatewayProcess {
    GatewayProcess::spawn(BIN, &format!("{top}{SHORT_TIMEOUTS}{ONE_ROUTE}"), upstream).await
}

fn spawn(request: TestRequest) -> tokio::task::JoinHandle<TestResponse> {
    tokio::spawn(async move { request.send().await })
}

async fn begin_upload(gateway: &GatewayProcess, path: &str, rest: &str) -> RawClient {
    let mut raw = RawClient::connect(gateway.addr()).await;
    raw.send(format!("POST {path} HTTP/1.1\r\nhost: a\r\n{rest}")).await;
    raw
}

#[tokio::test]
async fn silent_uploads_take_no_connection_to_the_app() {
    let upstream = TestUpstream::start().await;
    let config = format!("max_upstream = 4\n{ONE_ROUTE}");
    let gateway = start_gateway(&config, &upstream).await;
    let mut silent = Vec::new();
    for rest in ["content-length: 5\r\n\r\n", "transfer-encoding: chunked\r\n\r\n"] {
        for path in ["/other", "/other", "/pay", "/other"] {
            silent.push(begin_upload(&gateway, path, rest).await);
        }
    }
    // With usual limits: nothing here has timed out yet.
    assert_eq!(get(gateway.addr(), "/list").send().await.status, 200);
    assert_eq!(post(gateway.addr(), "/other").json("{}").send().await.status, 201);
    assert_eq!(pay(&gateway, "k-1").send().await.status, 201);
    assert_eq!(upstream.broken(), 0);
    for raw in &mut silent[..4] {
        raw.send("hello").await;
        assert_eq!(raw.read_response().await.status, 201, "they may still begin");
    }
}

#[tokio::test]
async fn an_upload_that_stops_is_given_up() {
    let upstream = ScriptedUpstream::start().await;
    let gateway = gateway("", &upstream.url()).await;
    let mut silent = begin_upload(&gateway, "/other", "content-length: 5\r\n\r\n").await;
    let answer = silent.read_response().await;
    assert_eq!((answer.status, answer.header("connection")), (408, Some("close")), "{answer:?}");
    assert_eq!(answer.json()["type"], "about:blank");
    let mut stopped = begin_upload(&gateway, "/other", "content-length: 5\r\n\r\nhe").await;
    // The silent one never got here.
    let mut app = upstream.accept_head().await;
    let answer = stopped.read_response().await;
    assert_eq!(answer.status, 408, "{answer:?}");
    assert!(stopped.is_closed().await);
    let mut rest = Vec::new();
    let _ = within("the gateway to hang up", app.stream.read_to_end(&mut rest)).await;
    // An answer that is there before the body does not keep the connection either.
    let _stopped = begin_upload(&gateway, "/other", "content-length: 5\r\n\r\nhe").await;
    let mut app = upstream.accept_head().await;
    app.write("HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n").await;
    let _ = within("the gateway to hang up", app.stream.read_to_end(&mut rest)).await;
}

#[tokio::test]
async fn an_upload_that_flows_takes_as_long_as_it_takes() {
    let upstream = TestUpstream::start().await;
    let gateway = gateway("", &upstream.url()).await;
    let mut raw = begin_upload(&gateway, "/other", "content-length: 6\r\n\r\n").await;
    for piece in ["s", "l", "o", "w", "l", "y"] {
        sleep(Duration::from_millis(150)).await;
        raw.send(piece).await;
    }
    assert_eq!(raw.read_response().await.status, 201);
    assert_eq!(upstream.last().text(), "slowly");
}

#[tokio::test]
async fn an_app_that_does_not_begin_its_answer_is_not_waited_for() {
    let upstream = TestUpstream::start().await;
    upstream.on("/hangs", UpstreamFault::Hang);
    let gateway = gateway("", &upstream.url()).await;
    for method in ["GET", "POST", "DELETE"] {
        let answer = request(method, gateway.addr(), "/hangs").send().await;
        assert_refused(&answer, 504, "upstream-timeout");
    }
    crate::support::until("the app to be hung up on", || upstream.client_disconnects() == 3).await;
    assert_eq!(upstream.requests(), 3, "none of them was sent again");
}

#[tokio::test]
async fn an_answer_that_has_begun_may_be_quiet() {
    let upstream = TestUpstream::start().await;
    upstream.on("/events", UpstreamReply::events(2, Duration::from_millis(1200)));
    let gateway = gateway("", &upstream.url()).await;
    let answer = get(gateway.addr(), "/events").send().await;
    assert_eq!(answer.text(), "data: 1\n\ndata: 2\n\n");
}

#[tokio::test]
async fn a_quarter_of_the_connections_is_for_requests_with_a_key() {
    let upstream = TestUpstream::start().await;
    let gate = upstream.gate("/slow");
    let config = format!("max_upstream = 4\n[limits]\npool_timeout = \"400ms\"\n{ONE_ROUTE}");
    let gateway = start_gateway(&config, &upstream).await;
    let slow: Vec<_> = (0..3).map(|_| spawn(get(gateway.addr(), "/slow"))).collect();
    gate.arrived(3).await;
    for key in ["k-1", "k-2", "k-3"] {
        assert_eq!(pay(&gateway, key).send().await.status, 201);
    }
    let turned_away = get(gateway.addr(), "/list").send().await;
    assert_refused(&turned_away, 503, "overloaded");
    assert_eq!(turned_away.header("retry-after"), Some("1"));
    gate.open();
    for slow in slow {
        assert_eq!(slow.await.expect("an answer").status, 200);
    }
    assert_eq!(get(gateway.addr(), "/list").send().await.status, 200);
}

#[tokio::test]
async fn what_is_safe_is_sent_again_when_a_reused_connection_ends() {
    let TestGateway { upstream, gateway } = TestGateway::start(ONE_ROUTE).await;
    upstream.on("/reused", UpstreamFault::CloseReused);
    upstream.on("/pay", UpstreamFault::CloseReused);
    let warm = async || assert_eq!(get(gateway.addr(), "/list").send().await.status, 200);
    for method in ["GET", "HEAD"] {
        warm().await;
        let before = upstream.requests();
        let answer = request(method, gateway.addr(), "/reused").send().await;
        assert_eq!(answer.status, 200, "{method}: {answer:?}");
        assert_eq!(upstream.requests(), before + 2, "{method}: once more, on a fresh connection");
    }
    warm().await;
    // It ends on every connection: sent twice, not for ever.
    upstream.on("/gone", UpstreamFault::CloseWithoutReply);
    let before = upstream.requests();
    assert_refused(&get(gateway.addr(), "/gone").send().await, 502, "upstream-lost");
    assert_eq!(upstream.requests(), before + 2);
    // A byte of the answer, a body, another method or a claim: never again.
    upstream.on("/truncated", UpstreamFault::Garbage);
    for (request, status) in [
        (get(gateway.addr(), "/truncated"), 502),
        (get(gateway.addr(), "/reused").body("a body"), 502),
        (post(gateway.addr(), "/reused").json("{}"), 502),
        (request("DELETE", gateway.addr(), "/reused"), 502),
        (pay(&gateway, "k-1"), 502),
    ] {
        warm().await;
        let before = upstream.requests();
        let answer = request.send().await;
        assert_eq!(answer.status, status, "{answer:?}");
        assert_eq!(upstream.requests(), before + 1, "{answer:?}");
    }
}

#[tokio::test]
async fn idle_connections_are_reused_for_as_long_as_the_setting_says() {
    let upstream = TestUpstream::start().await;
    for (setting, connections) in [("upstream_idle = \"1m\"\n", 1), ("upstream_idle = \"0s\"\n", 3)] {
        let gateway = start_gateway(&format!("{setting}{ONE_ROUTE}"), &upstream).await;
        let before = upstream.connections();
        for _ in 0..3 {
            assert_eq!(get(gateway.addr(), "/list").send().await.status, 200);
        }
        assert_eq!(upstream.connections() - before, connections, "{setting}");
    }
}
