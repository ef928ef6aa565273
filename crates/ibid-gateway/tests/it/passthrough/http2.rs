//! HTTP/2 without TLS, on either side.

use std::net::SocketAddr;

use bytes::Bytes;
use http::{HeaderMap, Request, Response, Version};
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::{
    body::{Body, Frame},
    client::conn::http2::{SendRequest, handshake},
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use testbed::{
    client::{get, post},
    process::GatewayProcess,
    upstream::{TestUpstream, UpstreamReply},
};
use tokio::net::TcpStream;

use super::ONE_ROUTE;
use crate::support::{BIN, TestGateway, policy, within};

/// A connection with prior knowledge.
async fn connect<B>(addr: SocketAddr) -> SendRequest<B>
where
    B: Body<Data = Bytes, Error: std::error::Error + Send + Sync> + Send + Unpin + 'static,
{
    let tcp = TcpStream::connect(addr).await.expect("the gateway listens");
    let (sender, connection) = handshake(TokioExecutor::new(), TokioIo::new(tcp)).await.expect("it speaks HTTP/2");
    tokio::spawn(connection);
    sender
}

fn request(method: &str, addr: SocketAddr, path: &str, key: Option<&str>) -> Request<Full<Bytes>> {
    let builder = Request::builder().method(method).uri(format!("http://{addr}{path}"));
    let builder = builder.header("authorization", "Bearer one").header("content-type", "application/json");
    let builder = match key {
        Some(key) => builder.header("idempotency-key", key),
        None => builder,
    };
    let body = if method == "GET" { Bytes::new() } else { Bytes::from_static(br#"{"amount":1}"#) };
    builder.body(Full::new(body)).expect("a valid request")
}

struct PassthroughResponse {
    head: Response<()>,
    body: Bytes,
    trailers: HeaderMap,
}

impl PassthroughResponse {
    fn is_replayed(&self) -> bool {
        self.head.headers().contains_key("idempotent-replayed")
    }
}

async fn send<B>(sender: &mut SendRequest<B>, request: Request<B>) -> PassthroughResponse
where
    B: Body<Data = Bytes, Error: std::error::Error + Send + Sync> + Send + Unpin + 'static,
{
    let work = async {
        let (parts, body) = sender.send_request(request).await.expect("an answer").into_parts();
        let body = body.collect().await.expect("a whole answer");
        let trailers = body.trailers().cloned().unwrap_or_default();
        PassthroughResponse { head: Response::from_parts(parts, ()), body: body.to_bytes(), trailers }
    };
    within("an answer over HTTP/2", work).await
}

async fn start_h2c(config: &str) -> (TestUpstream, GatewayProcess) {
    let upstream = TestUpstream::start_h2c().await;
    let gateway = GatewayProcess::spawn(BIN, config, &format!("h2c://{}", upstream.addr())).await;
    (upstream, gateway)
}

#[tokio::test]
async fn an_http2_client_reaches_an_http1_upstream() {
    let TestGateway { upstream, gateway } = TestGateway::start(ONE_ROUTE).await;
    let mut client = connect(gateway.addr()).await;
    for n in 1..=3 {
        let answer = send(&mut client, request("GET", gateway.addr(), "/list?a=b", None)).await;
        assert_eq!((answer.head.status().as_u16(), answer.head.version()), (200, Version::HTTP_2));
        assert_eq!(answer.body, r#"{"ok":true}"#);
        let answer = send(&mut client, request("POST", gateway.addr(), "/other", Some("k-1"))).await;
        assert_eq!(answer.body, format!(r#"{{"id":{n},"run":{n}}}"#));
    }
    let seen = &upstream.log()[0];
    assert_eq!((seen.version, seen.target.as_str()), (Version::HTTP_11, "/list?a=b"));
    assert_eq!(seen.headers.get_all("host"), [gateway.addr().to_string()]);
    assert_eq!(seen.headers.get_all("x-forwarded-host"), [gateway.addr().to_string()]);
    assert_eq!(upstream.last().text(), r#"{"amount":1}"#);
}

#[tokio::test]
async fn an_http2_client_reaches_an_http2_upstream() {
    let (upstream, gateway) = start_h2c(ONE_ROUTE).await;
    let mut client = connect(gateway.addr()).await;
    let answer = send(&mut client, request("POST", gateway.addr(), "/other?a=b", None)).await;
    assert_eq!(answer.head.status(), 201);
    let seen = upstream.last();
    assert_eq!((seen.version, seen.target.as_str()), (Version::HTTP_2, "/other?a=b"));
    assert_eq!(seen.header(":authority"), Some(gateway.addr().to_string().as_str()));
    assert!(!seen.headers.contains("host"), "{seen:?}");
}

#[tokio::test]
async fn an_http1_client_reaches_an_http2_upstream() {
    let (upstream, gateway) = start_h2c(ONE_ROUTE).await;
    for path in ["/other", "/pay"] {
        let sent = post(gateway.addr(), path).header("Connection", "keep-alive, X-Hop").header("X-Hop", "1");
        let answer = sent.key(path).json("{}").send().await;
        assert_eq!(answer.status, 201, "{answer:?}");
        let seen = upstream.last();
        assert_eq!(seen.version, Version::HTTP_2);
        assert!(!seen.headers.contains("connection") && !seen.headers.contains("x-hop"), "{seen:?}");
    }
    assert_eq!(get(gateway.addr(), "/list").header("Host", "shop.example").send().await.status, 200);
    assert_eq!(upstream.last().header(":authority"), Some("shop.example"));
}

#[tokio::test]
async fn trailers_pass_over_http2_both_ways_and_are_replayed() {
    let (upstream, gateway) = start_h2c(ONE_ROUTE).await;
    let with_trailers = || {
        let mut trailers = HeaderMap::new();
        trailers.insert("x-there", "1".parse().expect("a value"));
        let frames = [Frame::data(Bytes::from_static(b"body")), Frame::trailers(trailers)];
        StreamBody::new(futures_util::stream::iter(frames.map(Ok::<_, std::convert::Infallible>)))
    };
    let mut client = connect(gateway.addr()).await;
    for (path, replays) in [("/other", false), ("/pay", true)] {
        upstream.on(path, UpstreamReply::chunks(["one", "two"]).trailer("x-back", "2"));
        for run in 0..2 {
            let builder = Request::builder().method("POST").uri(format!("http://{}{path}", gateway.addr()));
            let builder = builder.header("te", "trailers").header("idempotency-key", path);
            let answer = send(&mut client, builder.body(with_trailers()).expect("a valid request")).await;
            assert_eq!(answer.head.status(), 200);
            assert_eq!(answer.body, "onetwo");
            assert_eq!(answer.trailers.get("x-back").map(|value| value.as_bytes()), Some(&b"2"[..]), "{path}");
            assert_eq!(answer.is_replayed(), replays && run == 1);
        }
        let seen = upstream.last();
        assert_eq!((seen.text().as_str(), seen.trailers.get("x-there")), ("body", Some("1")), "{seen:?}");
    }
}

#[tokio::test]
async fn a_keyed_request_over_http2_is_replayed_whatever_the_next_one_speaks() {
    for h2_upstream in [false, true] {
        let (upstream, gateway) = match h2_upstream {
            true => start_h2c(&policy("")).await,
            false => {
                let TestGateway { upstream, gateway } = TestGateway::start(&policy("")).await;
                (upstream, gateway)
            }
        };
        let mut client = connect(gateway.addr()).await;
        let first = send(&mut client, request("POST", gateway.addr(), "/pay", Some("k-1"))).await;
        assert_eq!((first.head.status().as_u16(), first.is_replayed()), (201, false));
        assert_eq!(upstream.last().attempt(), Some(1));
        let again = send(&mut client, request("POST", gateway.addr(), "/pay", Some("k-1"))).await;
        assert_eq!((again.head.status().as_u16(), again.is_replayed()), (201, true));
        assert_eq!(again.body, first.body);
        // The host is part of the scope: `:authority` here, `Host` there.
        let over_h1 = crate::support::pay(&gateway, "k-1").send().await;
        assert_eq!((over_h1.status, over_h1.header("idempotent-replayed")), (201, Some("true")), "{over_h1:?}");
        assert_eq!(over_h1.body, first.body);
        assert_eq!(upstream.executions(), 1);
    }
}

#[tokio::test]
async fn fifty_streams_with_one_key_are_one_execution() {
    let TestGateway { upstream, gateway } = TestGateway::start(&policy("on_concurrent = \"wait\"")).await;
    let gate = upstream.gate("/pay");
    let client = connect(gateway.addr()).await;
    let streams = (0..50).map(|_| {
        let (mut client, request) = (client.clone(), request("POST", gateway.addr(), "/pay", Some("k-1")));
        async move { send(&mut client, request).await }
    });
    let opened = async {
        gate.arrived(1).await;
        gate.open();
    };
    let (answers, ()) = tokio::join!(futures_util::future::join_all(streams), opened);
    assert!(answers.iter().all(|answer| answer.head.status() == 201 && answer.body == answers[0].body));
    assert_eq!(answers.iter().filter(|answer| !answer.is_replayed()).count(), 1);
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn a_stream_that_is_reset_does_not_stop_its_request() {
    let TestGateway { upstream, gateway } = TestGateway::start(&policy("on_concurrent = \"wait\"")).await;
    let gate = upstream.gate("/pay");
    let mut client = connect(gateway.addr()).await;
    let left = tokio::time::timeout(std::time::Duration::from_millis(1), async {
        let answer = client.send_request(request("POST", gateway.addr(), "/pay", Some("k-1"))).await;
        drop(answer);
        std::future::pending::<()>().await;
    });
    // Dropping the future resets the stream; whether the request was out by then is left to chance.
    let _ = left.await;
    let held = {
        let mut client = client.clone();
        let request = request("POST", gateway.addr(), "/pay", Some("k-1"));
        tokio::spawn(async move { send(&mut client, request).await })
    };
    gate.arrived(1).await;
    gate.open();
    let answer = held.await.expect("no panic");
    assert_eq!(answer.head.status(), 201);
    let again = send(&mut client, request("POST", gateway.addr(), "/pay", Some("k-1"))).await;
    assert!(again.is_replayed() && again.body == answer.body);
    assert_eq!(upstream.executions(), 1);
}

#[tokio::test]
async fn a_stream_that_is_reset_before_its_body_is_whole_leaves_no_trace() {
    use futures_util::StreamExt as _;

    let TestGateway { upstream, gateway } = TestGateway::start(&policy("")).await;
    let mut client = connect(gateway.addr()).await;
    for _ in 0..5 {
        let half = Frame::data(Bytes::from_static(b"{\"amount\""));
        let frames = futures_util::stream::iter([Ok::<_, std::convert::Infallible>(half)]);
        let body = StreamBody::new(frames.chain(futures_util::stream::pending()));
        let sent = request("POST", gateway.addr(), "/pay", Some("k-1")).map(|_| body);
        let answer = tokio::time::timeout(std::time::Duration::from_millis(50), client.send_request(sent)).await;
        assert!(answer.is_err(), "answered before the body was there: {answer:?}");
    }
    let mut client = connect(gateway.addr()).await;
    let answer = send(&mut client, request("POST", gateway.addr(), "/pay", Some("k-1"))).await;
    assert_eq!((answer.head.status().as_u16(), answer.is_replayed()), (201, false));
    assert_eq!((upstream.executions(), upstream.last().attempt()), (1, Some(1)));
}

#[tokio::test]
async fn a_large_body_passes_over_http2_both_ways() {
    let (upstream, gateway) = start_h2c(ONE_ROUTE).await;
    let body = testbed::upstream::filler(3 << 20);
    upstream.on("/other", UpstreamReply::status(200).body(body.clone()));
    let mut client = connect(gateway.addr()).await;
    let builder = Request::builder().method("POST").uri(format!("http://{}/other", gateway.addr()));
    let answer = send(&mut client, builder.body(Full::new(body.clone())).expect("a valid request")).await;
    assert!(answer.body == body, "{} bytes back", answer.body.len());
    assert!(upstream.last().body == body, "{} bytes there", upstream.last().body.len());
}
