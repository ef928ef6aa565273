//! The upstream over HTTP/2 without TLS.

use std::time::Duration;

use bytes::Bytes;
use http::{Request, Version};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http2::{SendRequest, handshake};
use hyper_util::rt::{TokioExecutor, TokioIo};
use testbed::{
    client::post,
    upstream::{ReplyGate, TestUpstream, UpstreamFault, UpstreamReply, filler},
};
use tokio::net::TcpStream;

async fn connect(upstream: &TestUpstream) -> SendRequest<Full<Bytes>> {
    let stream = TcpStream::connect(upstream.addr()).await.unwrap();
    let (sender, connection) = handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    sender
}

fn request(upstream: &TestUpstream, path: &str) -> Request<Full<Bytes>> {
    let uri = format!("{}{path}", upstream.url());
    Request::post(uri).header("idempotency-key", "k").body(Full::from("hello")).unwrap()
}

#[tokio::test]
async fn it_counts_and_answers_like_the_other() {
    let upstream = TestUpstream::start_h2c().await;
    upstream.on(
        "/grpc",
        UpstreamReply::chunks(["abc"]).header("content-type", "application/grpc").trailer("grpc-status", "0"),
    );
    upstream.on("/large", UpstreamReply::status(200).large(300_000));
    let mut sender = connect(&upstream).await;
    let answer = sender.send_request(request(&upstream, "/pay?x")).await.unwrap();
    assert_eq!((answer.status().as_u16(), answer.version()), (201, Version::HTTP_2));
    assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), r#"{"id":1,"run":1}"#);
    let answer = sender.send_request(request(&upstream, "/grpc")).await.unwrap();
    let body = answer.into_body().collect().await.unwrap();
    assert_eq!(body.trailers().unwrap()["grpc-status"], "0");
    assert_eq!(body.to_bytes(), "abc");
    let answer = sender.send_request(request(&upstream, "/large")).await.unwrap();
    assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), filler(300_000));

    let seen = &upstream.log()[0];
    assert_eq!((seen.version, seen.target.as_str(), seen.text().as_str()), (Version::HTTP_2, "/pay?x", "hello"));
    assert_eq!(seen.header(":authority"), Some(upstream.addr().to_string().as_str()));
    assert_eq!((upstream.executions_with_key("k"), upstream.connections()), (3, 1));
    assert_eq!(post(upstream.addr(), "/pay").send().await.status, 201, "HTTP/1.1 is served too");
}

#[tokio::test]
async fn faults_act_on_the_stream() {
    let upstream = TestUpstream::start_h2c().await;
    let mut sender = connect(&upstream).await;
    upstream.on("/f", UpstreamFault::ResetAfterRequest);
    assert!(sender.send_request(request(&upstream, "/f")).await.is_err());
    for fault in [UpstreamFault::Truncated { content_length: 100, sent: 10 }, UpstreamFault::TruncatedChunked] {
        upstream.on("/f", fault);
        let answer = sender.send_request(request(&upstream, "/f")).await.unwrap();
        assert!(answer.into_body().collect().await.is_err(), "{fault:?}");
    }
    assert_eq!((upstream.executions(), upstream.connections()), (3, 1));
}

#[tokio::test]
async fn stopping_ends_streams_that_wait() {
    let upstream = TestUpstream::start_h2c().await;
    let gate = ReplyGate::new();
    upstream.on("/gated", UpstreamReply::usual().gated(&gate));
    upstream.on("/hang", UpstreamFault::Hang);
    let mut sender = connect(&upstream).await;
    let gated = tokio::spawn(sender.send_request(request(&upstream, "/gated")));
    let hanging = tokio::spawn(sender.send_request(request(&upstream, "/hang")));
    upstream.wait_for(2).await;
    tokio::time::timeout(Duration::from_secs(5), upstream.stop()).await.unwrap();
    assert!(gated.await.unwrap().is_err() && hanging.await.unwrap().is_err());
    upstream.restart().await;
    let answer = connect(&upstream).await.send_request(request(&upstream, "/")).await.unwrap();
    assert_eq!(answer.status(), 201);
}

#[tokio::test]
#[should_panic(expected = "an h2c upstream cannot do this")]
async fn a_fault_that_needs_a_raw_connection_is_refused() {
    TestUpstream::start_h2c().await.on("/f", UpstreamFault::Garbage);
}
