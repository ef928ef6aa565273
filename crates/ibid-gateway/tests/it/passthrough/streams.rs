//! Bodies that flow: nothing is held back, nothing is kept.

use std::fs;

use testbed::{
    client::{RawClient, post},
    process::GatewayProcess,
    upstream::{UpstreamFault, UpstreamReply},
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::ONE_ROUTE;
use crate::support::{ScriptedUpstream, TestGateway, within};

const STREAMED_BYTES: usize = 64 << 20;
/// How much the gateway may grow by while `STREAMED_BYTES` passes through it.
const MAX_MEMORY_GROWTH: u64 = 32 << 20;

/// The most memory that the process ever had, in bytes.
fn peak_memory_bytes(gateway: &GatewayProcess) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", gateway.id())).expect("the gateway runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("Linux says");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}

#[tokio::test]
async fn an_upload_flows_through_with_flat_memory() {
    let (upstream, gateway) = ScriptedUpstream::behind_gateway(ONE_ROUTE).await;
    let before = peak_memory_bytes(&gateway);
    let mut client = RawClient::connect(gateway.addr()).await;
    client.send(format!("POST /upload HTTP/1.1\r\nhost: a\r\ncontent-length: {STREAMED_BYTES}\r\n\r\nfirst")).await;
    let mut app = upstream.accept_head().await;
    while app.body.len() < 5 {
        assert!(within("the first bytes", app.read_more()).await > 0, "closed");
    }
    assert_eq!(app.body, b"first", "the upload has only begun, and the upstream sees it");
    let sending = async {
        let part = vec![b'x'; 1 << 20];
        let mut left = STREAMED_BYTES - 5;
        while left > 0 {
            let n = left.min(part.len());
            client.send(&part[..n]).await;
            left -= n;
        }
    };
    let receiving = async {
        let mut part = vec![0; 256 << 10];
        let mut left = STREAMED_BYTES - 5;
        while left > 0 {
            let n = within("more of the upload", app.stream.read(&mut part)).await.expect("no reset");
            assert!(n > 0, "closed with {left} bytes to come");
            left -= n;
        }
    };
    tokio::join!(sending, receiving);
    app.write("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
    assert_eq!(client.read_response().await.text(), "ok");
    let grown = peak_memory_bytes(&gateway) - before;
    assert!(grown < MAX_MEMORY_GROWTH, "the gateway grew by {} MiB", grown >> 20);
    println!("64 MiB up: the gateway grew by {} KiB", grown >> 10);
}

#[tokio::test]
async fn a_download_flows_through_with_flat_memory_however_slow_the_client() {
    let (upstream, gateway) = ScriptedUpstream::behind_gateway(ONE_ROUTE).await;
    let before = peak_memory_bytes(&gateway);
    let mut client = RawClient::connect(gateway.addr()).await;
    client.send("GET /download HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let mut app = upstream.accept_head().await;
    app.write(format!("HTTP/1.1 200 OK\r\ncontent-length: {STREAMED_BYTES}\r\n\r\nfirst")).await;
    client.read_until("first").await;
    let sending = async {
        let part = vec![b'x'; 1 << 20];
        let mut left = STREAMED_BYTES - 5;
        while left > 0 {
            let n = left.min(part.len());
            app.stream.write_all(&part[..n]).await.expect("the gateway reads");
            left -= n;
        }
    };
    let receiving = async {
        // The upstream is ahead: what the client does not read must stay where it is.
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
        let mut left = STREAMED_BYTES - 5;
        while left > 0 {
            let n = client.read_some().await.len();
            assert!(n > 0, "closed with {left} bytes to come");
            left -= n;
        }
    };
    tokio::join!(sending, receiving);
    let grown = peak_memory_bytes(&gateway) - before;
    assert!(grown < MAX_MEMORY_GROWTH, "the gateway grew by {} MiB", grown >> 20);
    println!("64 MiB down: the gateway grew by {} KiB", grown >> 10);
}

#[tokio::test]
async fn a_keyless_upload_to_a_covered_route_is_not_buffered_either() {
    let (upstream, gateway) = ScriptedUpstream::behind_gateway(ONE_ROUTE).await;
    let mut client = RawClient::connect(gateway.addr()).await;
    client.send("POST /pay HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n").await;
    let mut app = upstream.accept_head().await;
    while !app.body.windows(5).any(|window| window == b"first") {
        assert!(within("the first bytes", app.read_more()).await > 0, "closed");
    }
    client.send("4\r\nlast\r\n0\r\n\r\n").await;
    while !app.body.ends_with(b"0\r\n\r\n") {
        assert!(within("the rest", app.read_more()).await > 0, "closed");
    }
    app.write("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await;
    assert_eq!(client.read_response().await.text(), "ok");
}

#[tokio::test]
async fn an_early_answer_to_an_upload_is_delivered() {
    let TestGateway { upstream, gateway } = TestGateway::start(ONE_ROUTE).await;
    let body = vec![b'x'; 4 << 20];
    for (path, reply) in
        [("/drains", UpstreamReply::early(413)), ("/resets", UpstreamFault::EarlyReplyThenClose.into())]
    {
        upstream.on(path, reply);
        for n in 0..20 {
            let answer = post(gateway.addr(), path).body(body.clone()).send().await;
            assert_eq!(answer.status, 413, "{path} {n}: {answer:?}");
        }
    }
}

#[tokio::test]
async fn events_arrive_one_by_one() {
    let (upstream, gateway) = ScriptedUpstream::behind_gateway(ONE_ROUTE).await;
    let mut client = RawClient::connect(gateway.addr()).await;
    client.send("GET /events HTTP/1.1\r\nhost: a\r\naccept: text/event-stream\r\n\r\n").await;
    let mut app = upstream.accept_head().await;
    app.write("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n").await;
    for n in 1..=5 {
        let event = format!("data: {n}\n\n");
        app.chunk(&event).await;
        // Nothing else is on its way: the event was handed on by itself.
        client.read_until(&event).await;
    }
    app.write("0\r\n\r\n").await;
    client.read_until("0\r\n\r\n").await;
}

#[tokio::test]
async fn a_stream_that_breaks_off_breaks_off_for_the_client() {
    let (upstream, gateway) = ScriptedUpstream::behind_gateway(ONE_ROUTE).await;
    let mut client = RawClient::connect(gateway.addr()).await;
    client.send("GET /events HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let mut app = upstream.accept_head().await;
    app.write("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await;
    app.chunk("half").await;
    drop(app);
    let broken = client.try_read_response().await.expect_err("not a whole answer");
    assert!(broken.is_closed(), "{broken}");
}

#[tokio::test]
async fn a_client_that_leaves_a_stream_is_noticed_upstream() {
    let (upstream, gateway) = ScriptedUpstream::behind_gateway(ONE_ROUTE).await;
    let mut client = RawClient::connect(gateway.addr()).await;
    client.send("GET /events HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let mut app = upstream.accept_head().await;
    app.write("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await;
    app.chunk("half").await;
    client.read_until("half").await;
    drop(client);
    let mut rest = Vec::new();
    // An end or a reset, as long as it comes.
    let _ = within("the gateway to hang up", app.stream.read_to_end(&mut rest)).await;
}

#[tokio::test]
async fn an_upgraded_connection_carries_bytes_both_ways() {
    let TestGateway { upstream, gateway } = TestGateway::start(ONE_ROUTE).await;
    upstream.on("/socket", UpstreamReply::upgrade_echo().header("Sec-WebSocket-Accept", "x"));
    let mut client = RawClient::connect(gateway.addr()).await;
    client
        .send(
            "GET /socket HTTP/1.1\r\nhost: a\r\nconnection: keep-alive, Upgrade\r\nupgrade: websocket\r\n\
             sec-websocket-key: k\r\n\r\n",
        )
        .await;
    let answer = client.read_response().await;
    assert_eq!(answer.status, 101, "{answer:?}");
    assert_eq!(answer.header("upgrade"), Some("websocket"));
    assert_eq!(answer.header("sec-websocket-accept"), Some("x"));
    assert_eq!(upstream.last().header("sec-websocket-key"), Some("k"));
    for n in 0..20 {
        let frame = format!("\u{0}frame {n};");
        client.send(&frame).await;
        assert_eq!(client.read_until(";").await, frame);
    }
    drop(client);
    crate::support::until("the upstream's side to end", || upstream.connections_open() == 0).await;
}

#[tokio::test]
async fn early_hints_reach_the_client_before_the_answer() {
    let (upstream, gateway) = ScriptedUpstream::behind_gateway(ONE_ROUTE).await;
    let hint = "HTTP/1.1 103 Early Hints\r\nlink: </a.css>; rel=preload\r\nconnection: x\r\n\r\n";
    let mut client = RawClient::connect(gateway.addr()).await;
    let keyed = "POST /pay HTTP/1.1\r\nhost: a\r\nidempotency-key: k-1\r\ncontent-length: 2\r\n\r\n{}";
    for request in [keyed, "GET /list HTTP/1.1\r\nhost: a\r\n\r\n"] {
        client.send(request).await;
        let mut app = upstream.request().await;
        app.write("HTTP/1.1 100 Continue\r\n\r\n").await;
        for _ in 0..2 {
            app.write(hint).await;
            // The app has not answered yet.
            let early = client.read_next().await;
            assert_eq!((early.status, early.header("link")), (103, Some("</a.css>; rel=preload")), "{early:?}");
            assert_eq!(early.header("connection"), None, "{early:?}");
        }
        // The last one comes in one piece with the answer.
        app.write(format!("{hint}HTTP/1.1 201 Created\r\ncontent-length: 4\r\nconnection: close\r\n\r\ndone")).await;
        let answer = client.read_response().await;
        assert_eq!((answer.status, answer.text().as_str()), (201, "done"), "{answer:?}");
    }
    // A replay has none, and two requests at once are answered in step.
    client.send(format!("{keyed}GET /list HTTP/1.1\r\nhost: a\r\n\r\n")).await;
    let replay = client.read_response().await;
    assert_eq!((replay.status, replay.interim.len(), replay.text().as_str()), (201, 0, "done"), "{replay:?}");
    let mut app = upstream.request().await;
    app.write(format!("{hint}HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")).await;
    assert_eq!(client.read_response().await.text(), "ok");
}
