//! The upstream as the raw client sees it.

use std::{
    io::ErrorKind,
    time::{Duration, Instant},
};

use testbed::{
    client::{RawClient, delete, get, many, patch, post, put, request},
    upstream::{ReplyGate, TestUpstream, UpstreamFault, UpstreamReply, filler},
};

#[tokio::test]
async fn only_mutating_methods_are_executions_and_each_has_its_number() {
    let upstream = TestUpstream::start().await;
    let addr = upstream.addr();
    let first = post(addr, "/pay?a=1").key("\"k-1\"").header("Ibid-Attempt", "2").header("Ibid-Fence", "7");
    let first = first.json(r#"{"amount":1}"#).send().await;
    assert_eq!((first.status, first.text().as_str()), (201, r#"{"id":1,"run":1}"#));
    assert_eq!(first.header("Content-Type"), Some("application/json"));
    let read = get(addr, "/pay").send().await;
    assert_eq!((read.status, read.text().as_str()), (200, r#"{"ok":true}"#));
    assert_eq!(put(addr, "/b").header("x-idempotency-key", "k-2").send().await.json()["run"], 2);
    assert_eq!(patch(addr, "/b").send().await.json()["run"], 3);
    assert_eq!(delete(addr, "/b").send().await.json()["run"], 4);
    assert_eq!(request("HEAD", addr, "/b").send().await.body.len(), 0);

    assert_eq!((upstream.executions(), upstream.requests()), (4, 6));
    assert_eq!((upstream.executions_at("/pay"), upstream.executions_at("/b")), (1, 3));
    assert_eq!((upstream.executions_with_key("k-1"), upstream.executions_with_key("k-2")), (1, 1));
    let seen = &upstream.log()[0];
    assert_eq!((seen.method.as_str(), seen.target.as_str(), seen.path()), ("POST", "/pay?a=1", "/pay"));
    assert_eq!((seen.attempt(), seen.fence(), seen.execution), (Some(2), Some(7), Some(1)));
    assert_eq!(seen.text(), r#"{"amount":1}"#);
    assert_eq!(upstream.last().method, "HEAD");
}

#[tokio::test]
async fn rules_set_status_headers_body_and_order() {
    let upstream = TestUpstream::start().await;
    let addr = upstream.addr();
    upstream.on("/a", UpstreamReply::status(500).body("no").header("X-A", "1").header("X-A", "2").set_cookie("s=1"));
    let answer = post(addr, "/a?query=ignored").send().await;
    assert_eq!((answer.status, answer.text().as_str()), (500, "no"));
    assert_eq!(answer.headers.get_all("x-a"), ["1", "2"]);
    assert_eq!(answer.header("set-cookie"), Some("s=1"));

    upstream.on_each("/b", [UpstreamReply::status(500).numbered(), UpstreamReply::usual()]);
    let statuses = [post(addr, "/b").send().await, post(addr, "/b").send().await, post(addr, "/b").send().await];
    assert_eq!(statuses.each_ref().map(|answer| answer.status), [500, 201, 201]);
    assert_eq!(statuses.map(|answer| answer.json()["run"].as_u64()), [Some(2), Some(3), Some(4)]);

    upstream.reply_by_default(UpstreamReply::status(204));
    assert_eq!(post(addr, "/else").send().await.status, 204);
    upstream.on("POST *", UpstreamReply::status(205));
    upstream.on("POST /a", UpstreamReply::status(206));
    assert_eq!([post(addr, "/a").send().await.status, post(addr, "/b").send().await.status], [206, 205]);
    assert_eq!([get(addr, "/a").send().await.status, get(addr, "/else").send().await.status], [500, 204]);
    upstream.clear_rules();
    assert_eq!(post(addr, "/else").send().await.status, 201);
}

#[tokio::test]
async fn bodies_may_be_large_chunked_with_trailers_or_streamed() {
    let upstream = TestUpstream::start().await;
    let addr = upstream.addr();
    upstream.on("/large", UpstreamReply::status(200).large(3_000_001));
    upstream.on("/chunks", UpstreamReply::chunks(["one", "two"]).trailer("x-sum", "6"));
    upstream.on("/headers", UpstreamReply::usual().many_headers(150));
    upstream.on("/events", UpstreamReply::events(3, Duration::from_millis(20)));
    assert_eq!(post(addr, "/large").send().await.body, filler(3_000_001));
    let mut raw = RawClient::connect(addr).await;
    let chunks = post(addr, "/chunks").send_on(&mut raw).await;
    assert_eq!((chunks.text().as_str(), chunks.trailers.get("X-Sum")), ("onetwo", Some("6")));
    assert_eq!(post(addr, "/headers").send_on(&mut raw).await.header("x-filler-150"), Some("150"));
    let start = Instant::now();
    let events = get(addr, "/events").send_on(&mut raw).await;
    assert_eq!(events.text(), "data: 1\n\ndata: 2\n\ndata: 3\n\n");
    assert!(start.elapsed() >= Duration::from_millis(60));
    assert_eq!(upstream.connections(), 2, "the second connection was used three times");
}

#[tokio::test]
async fn a_gate_holds_the_answer_but_not_the_log() {
    let upstream = TestUpstream::start().await;
    let gate = ReplyGate::new();
    upstream.on("/pay", UpstreamReply::usual().gated(&gate).delay(Duration::from_millis(30)));
    let waiting = {
        let request = post(upstream.addr(), "/pay");
        tokio::spawn(async move { request.send().await })
    };
    gate.arrived(1).await;
    assert_eq!(upstream.executions(), 1);
    assert!(!waiting.is_finished());
    let second = post(upstream.addr(), "/pay").start().await;
    upstream.wait_for(2).await;
    gate.arrived(2).await;
    drop(second);
    while upstream.client_disconnects() == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let opened = Instant::now();
    gate.let_through(1);
    assert_eq!(waiting.await.unwrap().status, 201);
    assert!(opened.elapsed() >= Duration::from_millis(30));
    gate.open();
    assert_eq!(post(upstream.addr(), "/pay").send().await.json()["run"], 3);
    assert_eq!(gate.count(), 3);
}

#[tokio::test]
async fn an_upgrade_echoes_and_an_early_answer_does_not_wait_for_the_body() {
    let upstream = TestUpstream::start().await;
    upstream.on("/ws", UpstreamReply::upgrade_echo());
    upstream.on("/early", UpstreamReply::early(413).body("too large"));
    let mut raw = RawClient::connect(upstream.addr()).await;
    raw.send("GET /ws HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: chat\r\n\r\n").await;
    let switched = raw.read_response().await;
    assert_eq!((switched.status, switched.header("upgrade")), (101, Some("chat")));
    raw.send("hello").await;
    assert_eq!(raw.read_until("hello").await, "hello");

    let refused = post(upstream.addr(), "/early").body(filler(5_000_000)).send().await;
    assert_eq!((refused.status, refused.text().as_str()), (413, "too large"));
    assert_eq!((upstream.executions(), upstream.requests()), (0, 2));
}

#[tokio::test]
async fn faults_break_the_connection_after_the_request_is_logged() {
    let upstream = TestUpstream::start().await;
    let addr = upstream.addr();
    let broken = async |fault: UpstreamFault| {
        upstream.on("/f", fault);
        let before = upstream.executions();
        let broken = post(addr, "/f").body("x").try_send().await.unwrap_err();
        assert_eq!(upstream.executions(), before + 1, "{fault:?}");
        broken
    };
    assert_eq!(broken(UpstreamFault::ResetAfterRequest).await.kind, ErrorKind::ConnectionReset);
    let closed = broken(UpstreamFault::CloseWithoutReply).await;
    assert_eq!((closed.kind, closed.received.len()), (ErrorKind::UnexpectedEof, 0));
    let cut = broken(UpstreamFault::Truncated { content_length: 100, sent: 10 }).await;
    assert_eq!(cut.kind, ErrorKind::UnexpectedEof);
    assert!(cut.received.ends_with(&filler(10)) && cut.to_string().contains("content-length: 100"));
    let cut = broken(UpstreamFault::TruncatedChunked).await;
    assert!(cut.is_closed() && cut.received.ends_with(b"5\r\nhello\r\n"));
    assert_eq!(broken(UpstreamFault::Garbage).await.kind, ErrorKind::InvalidData);
}

#[tokio::test]
async fn faults_that_answer_or_keep_silent() {
    let upstream = TestUpstream::start().await;
    let addr = upstream.addr();
    upstream.on("/upgrade", UpstreamFault::UnexpectedUpgrade);
    assert_eq!(post(addr, "/upgrade").send().await.status, 101);

    upstream.on("/idle", UpstreamFault::CloseIdle);
    let mut raw = RawClient::connect(addr).await;
    let answer = post(addr, "/idle").send_on(&mut raw).await;
    assert_eq!((answer.status, answer.header("connection")), (201, None));
    assert!(raw.is_closed().await);

    upstream.on("/hang", UpstreamFault::Hang);
    let mut raw = post(addr, "/hang").start().await;
    upstream.wait_for(3).await;
    assert!(!raw.is_closed_within(Duration::from_millis(50)).await);
    raw.abort();
    while upstream.client_disconnects() == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }

    upstream.on("/reused", UpstreamFault::CloseReused);
    let mut raw = RawClient::connect(addr).await;
    assert_eq!(post(addr, "/reused").send_on(&mut raw).await.status, 201);
    assert!(post(addr, "/reused").try_send_on(&mut raw).await.unwrap_err().is_closed());
    assert_eq!((upstream.executions_at("/reused"), upstream.requests()), (1, 5));

    upstream.on("/early", UpstreamFault::EarlyReplyThenClose);
    let mut raw = RawClient::connect(addr).await;
    raw.send("POST /early HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\nabc").await;
    assert_eq!(raw.read_response().await.status, 413);
    assert!(raw.is_closed().await);
    assert_eq!(upstream.executions_at("/early"), 0);
}

#[tokio::test]
async fn a_request_that_breaks_off_is_not_an_execution() {
    let upstream = TestUpstream::start().await;
    for request in ["POST / HTTP/1.1\r\ncontent-length: 5\r\n\r\nabc", "POST / HTTP/1.1\r\ntransfer-enc"] {
        let mut raw = RawClient::connect(upstream.addr()).await;
        raw.send(request).await;
        raw.half_close().await;
        assert!(raw.is_closed().await);
    }
    let mut raw = RawClient::connect(upstream.addr()).await;
    raw.send("nonsense\r\n\r\n").await;
    assert_eq!(raw.read_response().await.status, 400);
    assert_eq!((upstream.requests(), upstream.broken()), (0, 3));
}

#[tokio::test]
async fn a_stopped_upstream_refuses_and_comes_back_on_its_port() {
    let upstream = TestUpstream::start().await;
    upstream.on("/hang", UpstreamFault::Hang);
    let mut hanging = post(upstream.addr(), "/hang").start().await;
    upstream.wait_for(1).await;
    for _ in 0..3 {
        upstream.stop().await;
        assert_eq!(post(upstream.addr(), "/").try_send().await.unwrap_err().kind, ErrorKind::ConnectionRefused);
        upstream.restart().await;
        assert_eq!(post(upstream.addr(), "/").send().await.status, 201);
    }
    assert!(hanging.is_closed().await);
    assert_eq!(upstream.executions(), 4);
    upstream.restart().await;
    assert_eq!(upstream.connections_open(), 0);
    let refusing = TestUpstream::start_refusing().await;
    assert_eq!(RawClient::try_connect(refusing.addr()).await.unwrap_err().kind(), ErrorKind::ConnectionRefused);
}

#[tokio::test]
async fn many_requests_at_once_are_all_counted() {
    let upstream = TestUpstream::start().await;
    let gate = ReplyGate::new();
    upstream.on("/pay", UpstreamReply::usual().gated(&gate));
    let all = tokio::spawn(many(100, {
        let addr = upstream.addr();
        move || post(addr, "/pay").key("k")
    }));
    gate.arrived(100).await;
    gate.open();
    let mut runs: Vec<_> = all.await.unwrap().iter().map(|answer| answer.json()["run"].as_u64().unwrap()).collect();
    runs.sort_unstable();
    assert_eq!(runs, (1..=100).collect::<Vec<_>>());
    assert_eq!((upstream.executions_with_key("k"), upstream.connections()), (100, 100));
}
