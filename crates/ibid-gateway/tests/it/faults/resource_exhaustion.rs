//! Clients that hold connections, streams, bodies or unread answers: others are served.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use bytes::Bytes;
use h2::{SendStream, client::ResponseFuture};
use testbed::{
    client::{RawClient, TestRequest, get, post},
    upstream::{TestUpstream, UpstreamReply, filler},
};
use tokio::{net::TcpStream, time::timeout};

use crate::support::{assert_ran, assert_refused, assert_replay, caller, pay, policy, start_gateway};

const MIB: usize = 1 << 20;
/// As many as a client opens on one HTTP/2 connection.
const STREAMS_PER_CONNECTION: usize = 240;
/// Others must be served at once. On a loaded machine that may take a moment.
const MAX_RESPONSE_DELAY: Duration = Duration::from_secs(10);

/// An HTTP/2 connection of a client that keeps its windows as they are.
async fn h2_client(addr: SocketAddr, window: u32) -> h2::client::SendRequest<Bytes> {
    let socket = TcpStream::connect(addr).await.expect("it listens");
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(window).max_concurrent_streams(1000);
    let (to, connection) = builder.handshake(socket).await.expect("it speaks HTTP/2");
    tokio::spawn(connection);
    to
}

async fn h2_begin(
    to: &h2::client::SendRequest<Bytes>, key: &str, length: usize, ended: bool,
) -> (ResponseFuture, SendStream<Bytes>) {
    let request = http::Request::post("http://shop.example/pay").header("authorization", "Bearer one");
    let request = request.header("idempotency-key", key).header("content-length", length).body(()).expect("a request");
    let mut to = to.clone().ready().await.expect("a stream");
    to.send_request(request, ended).expect("it is sent")
}

async fn assert_served_promptly(request: TestRequest) {
    let begun = Instant::now();
    assert_ran(&request.send().await);
    assert!(begun.elapsed() < MAX_RESPONSE_DELAY, "{:?}", begun.elapsed());
}

/// Whether an answer begins, and is cut off before its first byte.
async fn is_cut_off(answer: ResponseFuture) -> bool {
    match answer.await {
        Ok(answer) if answer.status() == 201 => matches!(answer.into_body().data().await, Some(Err(_)) | None),
        _ => false,
    }
}

/// `VmRSS` of a process, in bytes.
fn resident_bytes(id: u32) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{id}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("it has a size");
    line.trim().trim_end_matches(" kB").parse::<usize>().expect("a number") << 10
}

#[tokio::test]
async fn bodies_that_are_announced_and_never_sent_take_nothing_from_others() {
    let upstream = TestUpstream::start().await;
    let config = format!(
        "max_running = 100\n{}\n[[route]]\nmatch = \"POST /hooks/github\"\npreset = \"webhook:github\"\n\
         secrets = [\"a secret of some length\"]\n",
        policy("")
    );
    let gateway = start_gateway(&config, &upstream).await;
    // Together more than `buffer_memory`, if it were reserved by the declared length.
    let mut silent = Vec::new();
    for n in 0..11 {
        let mut raw = RawClient::connect(gateway.addr()).await;
        let head = format!(
            "POST /hooks/github HTTP/1.1\r\nHost: x\r\nX-GitHub-Delivery: 72d3162e-cc78-11e3-81ab-4c9367dc09{n:02}\r\n\
             X-Hub-Signature-256: sha256=00\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            25 * MIB
        );
        raw.send(head).await;
        silent.push(raw);
    }
    let mut streams = Vec::new();
    for connection in 0..2 {
        let to = h2_client(gateway.addr(), 65_535).await;
        for n in 0..STREAMS_PER_CONNECTION {
            streams.push(h2_begin(&to, &format!("silent-{connection}-{n}"), MIB, false).await);
        }
        // It is answered after them: then all have arrived.
        let (answer, _) = h2_begin(&to, &format!("ended-{connection}"), 0, true).await;
        assert_eq!(timeout(MAX_RESPONSE_DELAY, answer).await.expect("at once").expect("an answer").status(), 201);
    }
    assert_served_promptly(pay(&gateway, "k-1")).await;
    assert_served_promptly(caller(post(gateway.addr(), "/pay")).key("k-2").body(filler(MIB))).await;
    assert_eq!(upstream.executions(), 4);
}

#[tokio::test]
async fn senders_that_have_stopped_are_cut_off_when_memory_is_short() {
    let upstream = TestUpstream::start().await;
    let config = format!("buffer_memory = \"4MiB\"\n{}", policy(""));
    let gateway = start_gateway(&config, &upstream).await;
    let mut stopped = Vec::new();
    for n in 0..4 {
        let mut raw = RawClient::connect(gateway.addr()).await;
        let head =
            format!("POST /pay HTTP/1.1\r\nHost: x\r\nIdempotency-Key: slow-{n}\r\nContent-Length: {MIB}\r\n\r\n");
        raw.send(head).await;
        raw.send(filler(MIB - 1)).await;
        stopped.push(raw);
    }
    let large = || caller(post(gateway.addr(), "/pay")).key("k-1").body(filler(900 << 10));
    // Until they have been silent for a moment there is no room.
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        let answer = large().send().await;
        if answer.status == 201 {
            break;
        }
        assert_refused(&answer, 503, "overloaded");
        assert!(Instant::now() < end, "nobody made room");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let answers = stopped.iter_mut().map(|raw| Box::pin(raw.read_response()));
    let (evicted, _, _) = futures_util::future::select_all(answers).await;
    assert_refused(&evicted, 503, "overloaded");
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn answers_that_are_not_read_are_bounded_in_memory_and_cut_off() {
    let upstream = TestUpstream::start().await;
    let body = filler(MIB - 1000);
    upstream.on("/pay", UpstreamReply::status(201).body(body.clone()));
    let config = format!("store.url = \"embedded:records\"\n[limits]\nwrite_timeout = \"2s\"\n{}", policy(""));
    let gateway = start_gateway(&config, &upstream).await;
    let request = caller(post(gateway.addr(), "/pay")).header("Host", "shop.example").key("k-1").body(Bytes::new());
    let first = request.send().await;
    assert_ran(&first);
    let before = resident_bytes(gateway.id());

    let mut unread = Vec::new();
    for _ in 0..8 {
        // Its windows are never opened: no byte of a body can be sent.
        let to = h2_client(gateway.addr(), 0).await;
        for _ in 0..STREAMS_PER_CONNECTION {
            let (answer, _) = h2_begin(&to, "k-1", 0, true).await;
            unread.push(tokio::spawn(is_cut_off(answer)));
        }
    }
    let mut most = 0;
    for _ in 0..6 {
        tokio::time::sleep(Duration::from_millis(500)).await;
        most = most.max(resident_bytes(gateway.id()));
    }
    assert!(most < before + (90 << 20), "{} MiB before, {} MiB with unread answers", before >> 20, most >> 20);
    // Others get it.
    let begun = Instant::now();
    assert_replay(&request.send().await, &first);
    assert!(begun.elapsed() < MAX_RESPONSE_DELAY, "{:?}", begun.elapsed());
    // Those that were answered are cut off, because nothing could be sent; the others were told to come back.
    for connection in unread.chunks_mut(STREAMS_PER_CONNECTION) {
        let mut cut_off = 0;
        for answer in connection {
            let ended = timeout(Duration::from_secs(30), answer).await.expect("none is held for ever");
            cut_off += usize::from(ended.expect("no panic"));
        }
        assert!(cut_off >= 8, "{cut_off}");
    }
    assert_eq!(get(gateway.admin_addr(), "/healthz").send().await.status, 200);
}

#[tokio::test]
async fn a_client_that_stops_reading_over_http1_is_cut_off() {
    let upstream = TestUpstream::start().await;
    let body = filler(24 * MIB);
    upstream.on("/pay", UpstreamReply::status(201).body(body.clone()));
    upstream.on("/free", UpstreamReply::status(201).body(body.clone()));
    let dials = "max_response = \"25MiB\"";
    let config = format!("[limits]\nwrite_timeout = \"1s\"\n{}", policy(dials));
    let gateway = start_gateway(&config, &upstream).await;
    assert_eq!(pay(&gateway, "k-1").send().await.body, body);
    // A replay, and one that passes through.
    let free = caller(post(gateway.addr(), "/free")).json("{}");
    for request in [pay(&gateway, "k-1"), free] {
        let mut raw = request.start().await;
        tokio::time::sleep(Duration::from_secs(5)).await;
        let broken = raw.try_read_response().await;
        assert!(broken.is_err(), "all of it came");
    }
    assert_eq!(pay(&gateway, "k-1").send().await.body, body, "others get it");
}
