//! The raw client against a server that is only a script.

use std::{net::SocketAddr, time::Duration};

use testbed::{
    client::{RawClient, post},
    upstream::TestUpstream,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
};

/// Answers one connection with these bytes, and closes it if so told.
async fn serve_bytes(answer: &'static str, close: bool) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let _ = stream.read(&mut [0; 4096]).await.unwrap();
        stream.write_all(answer.as_bytes()).await.unwrap();
        if !close {
            std::future::pending::<()>().await;
        }
    });
    addr
}

#[tokio::test]
async fn every_framing_is_understood() {
    let mut raw = RawClient::connect(
        serve_bytes(
            "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n\
             HTTP/1.1 200 OK\r\nContent-Length: 2\r\nB: 1\r\nA: 2\r\nb: 3\r\n\r\nhi\
             HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\nab\r\n1\r\nc\r\n0\r\nT: 1\r\n\r\n\
             HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\nHTTP/1.0 200 OK\r\n\r\nto the end",
            true,
        )
        .await,
    )
    .await;
    raw.send("GET / HTTP/1.1\r\n\r\n").await;
    let first = raw.read_response().await;
    assert_eq!((first.interim.as_slice(), first.text().as_str()), ([100, 103].as_slice(), "hi"));
    assert_eq!(first.headers.iter().map(|(name, _)| name).collect::<Vec<_>>(), ["Content-Length", "B", "A", "b"]);
    assert_eq!(first.headers.get_all("b"), ["1", "3"]);
    let second = raw.read_response().await;
    assert_eq!((second.text().as_str(), second.trailers.get("t")), ("abc", Some("1")));
    assert_eq!(raw.read_response().await.status, 304);
    assert_eq!(raw.read_response().await.text(), "to the end");
    assert!(raw.is_closed().await);
}

#[tokio::test]
async fn a_continue_is_visible_on_its_own() {
    let upstream = TestUpstream::start().await;
    let mut raw = RawClient::connect(upstream.addr()).await;
    raw.send("POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n").await;
    assert_eq!(raw.read_next().await.status, 100);
    raw.send("hi").await;
    assert_eq!(raw.read_response().await.status, 201);
    assert_eq!(upstream.last().text(), "hi");
}

#[tokio::test]
async fn a_request_may_be_chunked_with_trailers() {
    let upstream = TestUpstream::start().await;
    let request = post(upstream.addr(), "/").body("hello").trailer("x-t", "1");
    let mut raw = RawClient::connect(upstream.addr()).await;
    for _ in 0..2 {
        assert_eq!(request.send_on(&mut raw).await.status, 201);
        assert_eq!((upstream.last().text().as_str(), upstream.last().trailers.get("x-t")), ("hello", Some("1")));
    }
    assert_eq!((upstream.connections(), upstream.last().headers.contains("content-length")), (1, false));
}

#[tokio::test]
#[should_panic(expected = "received so far:\nHTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhel")]
async fn an_answer_that_breaks_off_panics_with_what_was_received() {
    post(serve_bytes("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhel", true).await, "/").send().await;
}

#[tokio::test]
async fn an_answer_that_never_ends_meets_the_deadline() {
    let addr = serve_bytes("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhel", false).await;
    let mut raw = post(addr, "/").start().await;
    assert!(!raw.is_closed_within(Duration::from_millis(200)).await, "by now the beginning is here");
    tokio::time::pause();
    let broken = raw.try_read_response().await.unwrap_err();
    assert!(broken.is_timeout() && broken.to_string().contains("10s"), "{broken}");
    assert!(broken.received.ends_with(b"hel"));
}

#[tokio::test]
async fn an_abort_is_a_reset_and_a_drop_is_an_end() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let raw = RawClient::connect(addr).await;
    let (mut stream, _) = listener.accept().await.unwrap();
    raw.abort();
    let error = stream.read(&mut [0; 10]).await.unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);

    let mut raw = RawClient::connect(addr).await;
    let (mut stream, _) = listener.accept().await.unwrap();
    assert!(!raw.is_closed_within(Duration::from_millis(20)).await);
    raw.half_close().await;
    assert_eq!(stream.read(&mut [0; 10]).await.unwrap(), 0);
    stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
    drop(stream);
    assert!(raw.is_closed().await);
    assert_eq!(raw.read_response().await.status, 200, "what came before the end is kept");
}
