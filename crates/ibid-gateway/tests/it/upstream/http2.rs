//! HTTP/2 and TLS upstreams.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::common::*;
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use ibid_gateway::upstream::{Affinity, ReusePolicy, UpstreamClient, UpstreamSettings};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{Barrier, Notify, mpsc};

type SendH2Response = h2::server::SendResponse<Bytes>;

/// An HTTP/2 server; `handle` gets each request of each connection in a task of its own.
async fn serve_http2<S, F, Fut>(stream: S, handle: F)
where
    S: AsyncRead + AsyncWrite + Unpin,
    F: Fn(Request<h2::RecvStream>, SendH2Response) -> Fut,
    Fut: Future<Output = ()> + Send + 'static,
{
    let mut connection = h2::server::handshake(stream).await.unwrap();
    while let Some(Ok((request, respond))) = connection.accept().await {
        tokio::spawn(handle(request, respond));
    }
}

async fn read_whole_body(mut body: h2::RecvStream) -> Vec<u8> {
    let mut all = Vec::new();
    while let Some(Ok(data)) = body.data().await {
        let _ = body.flow_control().release_capacity(data.len());
        all.extend_from_slice(&data);
    }
    all
}

async fn echo(request: Request<h2::RecvStream>, mut respond: SendH2Response) {
    let body = read_whole_body(request.into_body()).await;
    let mut send = respond.send_response(Response::new(()), false).unwrap();
    send.send_data(body.into(), true).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_at_once_share_a_connection() {
    let all = Arc::new(Barrier::new(50));
    let server = serve(move |s, _| {
        let all = all.clone();
        async move {
            serve_http2(s, move |request, respond| {
                let all = all.clone();
                async move {
                    assert_eq!(request.uri().to_string(), "http://app.example/pay?x=1");
                    assert!(!request.headers().contains_key("host"));
                    all.wait().await;
                    echo(request, respond).await;
                }
            })
            .await;
        }
    })
    .await;
    let up = new_upstream(&server.url("h2c"));
    let tasks: Vec<_> = (0..50)
        .map(|n| {
            let up = up.clone();
            tokio::spawn(async move {
                let body = vec![n; 100_000];
                let response =
                    within(up.send(post(body.clone()), ReusePolicy::Claimed, &Affinity::default())).await.unwrap();
                assert_eq!(read(response).await.unwrap(), body);
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(server.count(), 1);
}

#[tokio::test]
async fn refused_stream_is_never_written_and_other_resets_are_lost() {
    for (reason, proved) in [
        (h2::Reason::REFUSED_STREAM, true),
        (h2::Reason::INTERNAL_ERROR, false),
        (h2::Reason::CANCEL, false),
        (h2::Reason::NO_ERROR, false),
    ] {
        let server =
            serve(move |s, _| serve_http2(s, move |_, mut r: SendH2Response| async move { r.send_reset(reason) }))
                .await;
        let result = send(&new_upstream(&server.url("h2c")), ReusePolicy::Claimed).await;
        if proved {
            assert!(expect_never_written(result).starts_with("refused unprocessed"), "{reason:?}");
        } else {
            expect_lost(result);
        }
        assert_eq!(server.count(), 1);
    }
}

// --- GOAWAY by hand: the h2 crate's server does not let a test choose the last stream. ---

const PREFACE: usize = 24;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut f = Vec::new();
    f.extend_from_slice(&u32::try_from(payload.len()).unwrap().to_be_bytes()[1..]);
    f.extend_from_slice(&[kind, flags]);
    f.extend_from_slice(&stream.to_be_bytes());
    f.extend_from_slice(payload);
    f
}

fn go_away(last: u32, reason: u32) -> Vec<u8> {
    frame(7, 0, 0, &[last.to_be_bytes(), reason.to_be_bytes()].concat())
}

/// Settles the connection and reads until `count` requests have begun; returns their streams.
async fn begin(s: &mut TcpStream, count: usize) -> Vec<u32> {
    let mut preface = [0; PREFACE];
    s.read_exact(&mut preface).await.unwrap();
    s.write_all(&frame(4, 0, 0, &[])).await.unwrap();
    let mut streams = Vec::new();
    while streams.len() < count {
        let mut head = [0; 9];
        s.read_exact(&mut head).await.unwrap();
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        s.read_exact(&mut payload).await.unwrap();
        match head[3] {
            1 => streams.push(u32::from_be_bytes(head[5..].try_into().unwrap())),
            4 if head[4] == 0 => s.write_all(&frame(4, 1, 0, &[])).await.unwrap(),
            _ => {}
        }
    }
    streams
}

#[tokio::test]
async fn a_goaway_below_our_stream_is_never_written() {
    // Open afterwards or closed at once, in anger or in peace: what counts is the last stream.
    for (stay, reason) in [(true, 0), (true, 2), (false, 0), (false, 11)] {
        let server = serve(move |mut s, n| async move {
            if n > 0 {
                return serve_http2(s, echo).await;
            }
            begin(&mut s, 1).await;
            s.write_all(&go_away(0, reason)).await.unwrap();
            if stay {
                let mut rest = Vec::new();
                let _ = s.read_to_end(&mut rest).await;
            }
        })
        .await;
        let up = new_upstream(&server.url("h2c"));
        let error = expect_never_written(send(&up, ReusePolicy::Claimed).await);
        assert!(error.starts_with("refused unprocessed"), "{error}");
        // And that connection takes no more requests.
        assert_eq!(read(send(&up, ReusePolicy::Claimed).await.unwrap()).await.unwrap(), "hello");
        assert_eq!(server.count(), 2);
    }
}

#[tokio::test]
async fn a_goaway_that_includes_our_stream_is_lost_if_the_connection_then_ends() {
    for (last, reason) in [(1, 0), (1, 2), (i32::MAX as u32, 0)] {
        for reset in [false, true] {
            let server = serve(move |mut s, _| async move {
                assert_eq!(begin(&mut s, 1).await, [1]);
                s.write_all(&go_away(last, reason)).await.unwrap();
                tokio::time::sleep(Duration::from_millis(5)).await;
                if reset {
                    s.set_zero_linger().unwrap();
                }
            })
            .await;
            expect_lost(send(&new_upstream(&server.url("h2c")), ReusePolicy::Claimed).await);
        }
    }
}

#[tokio::test]
async fn a_goaway_splits_concurrent_streams_by_number() {
    let server = serve(|mut s, _| async move {
        let streams = begin(&mut s, 4).await;
        s.write_all(&go_away(streams[1], 0)).await.unwrap();
        // Static table entry 8 is ":status: 200".
        for stream in &streams[..2] {
            s.write_all(&frame(1, 5, *stream, &[0x88])).await.unwrap();
        }
        let mut rest = Vec::new();
        let _ = s.read_to_end(&mut rest).await;
    })
    .await;
    let up = new_upstream(&server.url("h2c"));
    let results = within(futures_util::future::join_all((0..4).map(|_| send(&up, ReusePolicy::Claimed)))).await;
    let (replies, failures): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
    assert_eq!(replies.len(), 2);
    for failure in failures {
        expect_never_written(failure);
    }
}

/// A server that is shutting down in the polite way says GOAWAY(2^31-1) first, and still takes streams.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_polite_shutdown_loses_nothing_and_runs_nothing_twice() {
    let executed = Arc::new(AtomicUsize::new(0));
    let count = executed.clone();
    let server = serve(move |s, _| {
        let count = count.clone();
        async move {
            let mut connection = h2::server::handshake(s).await.unwrap();
            let mut served = 0;
            while let Some(Ok((request, respond))) = connection.accept().await {
                count.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(echo(request, respond));
                served += 1;
                if served == 5 {
                    connection.graceful_shutdown();
                }
            }
        }
    })
    .await;
    let up = new_upstream(&server.url("h2c"));
    let (good, unwritten) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let tasks: Vec<_> = (0..8)
        .map(|_| {
            let (up, good, unwritten) = (up.clone(), good.clone(), unwritten.clone());
            tokio::spawn(async move {
                for _ in 0..50 {
                    match send(&up, ReusePolicy::Claimed).await {
                        Ok(response) => {
                            assert_eq!(read(response).await.unwrap(), "hello");
                            good.fetch_add(1, Ordering::SeqCst);
                        }
                        failure => {
                            expect_never_written(failure);
                            unwritten.fetch_add(1, Ordering::SeqCst);
                        }
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(executed.load(Ordering::SeqCst), good.load(Ordering::SeqCst));
    eprintln!("polite: {good:?} replies, {unwritten:?} refused, {} connections", server.count());
}

#[tokio::test]
async fn a_connection_cut_in_mid_request_is_lost_and_replaced() {
    let server = serve(|mut s, n| async move {
        if n > 0 {
            return serve_http2(s, echo).await;
        }
        begin(&mut s, 1).await;
    })
    .await;
    let up = new_upstream(&server.url("h2c"));
    expect_lost(send(&up, ReusePolicy::Claimed).await);
    assert_eq!(read(send(&up, ReusePolicy::Claimed).await.unwrap()).await.unwrap(), "hello");
    assert_eq!(server.count(), 2);
}

/// The first connection answers one request and ends at the next, without an answer.
async fn ends_at_the_second_request(mut s: TcpStream, n: usize) {
    if n > 0 {
        return serve_http2(s, echo).await;
    }
    let mut connection = h2::server::handshake(&mut s).await.unwrap();
    let (request, respond) = connection.accept().await.unwrap().unwrap();
    tokio::spawn(echo(request, respond));
    let _second = connection.accept().await;
}

#[tokio::test]
async fn only_what_is_safe_is_sent_again_when_a_reused_connection_ends() {
    let get = || Request::get("/list").header("host", "app.example").body(Full::default()).unwrap();
    for (request, care, again) in [
        (get(), ReusePolicy::PassThrough, true),
        (get(), ReusePolicy::Claimed, false),
        (post(""), ReusePolicy::PassThrough, false),
        (post("hello"), ReusePolicy::PassThrough, false),
    ] {
        let server = serve(ends_at_the_second_request).await;
        let up = new_upstream(&server.url("h2c"));
        assert_eq!(read(send(&up, care).await.unwrap()).await.unwrap(), "hello");
        let result = within(up.send(request, care, &Affinity::default())).await;
        match again {
            true => assert_eq!(read(result.unwrap()).await.unwrap(), ""),
            false => drop(expect_lost(result)),
        }
        assert_eq!(server.count(), if again { 2 } else { 1 });
    }
}

#[tokio::test]
async fn a_connection_closed_while_idle_is_replaced() {
    let closed = Arc::new(Notify::new());
    let tell = closed.clone();
    let server = serve(move |mut s, n| {
        let tell = tell.clone();
        async move {
            if n > 0 {
                return serve_http2(s, echo).await;
            }
            let stream = begin(&mut s, 1).await[0];
            s.write_all(&frame(1, 5, stream, &[0x88])).await.unwrap();
            s.shutdown().await.unwrap();
            tell.notify_one();
            let mut rest = Vec::new();
            let _ = s.read_to_end(&mut rest).await;
        }
    })
    .await;
    let up = new_upstream(&server.url("h2c"));
    read(send(&up, ReusePolicy::Claimed).await.unwrap()).await.unwrap();
    closed.notified().await;
    // HTTP/2 has no probe: give the driver a turn to read the end.
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(read(send(&up, ReusePolicy::Claimed).await.unwrap()).await.unwrap(), "hello");
    assert_eq!(server.count(), 2);
}

/// hyper would end these bodies quietly.
#[tokio::test]
async fn a_reply_cut_short_with_no_error_is_an_error() {
    for ending in [frame(3, 0, 1, &[0; 4]), go_away(0, 0)] {
        let server = serve(move |mut s, _| {
            let ending = ending.clone();
            async move {
                begin(&mut s, 1).await;
                s.write_all(&frame(1, 4, 1, &[0x88])).await.unwrap();
                s.write_all(&frame(0, 0, 1, b"some")).await.unwrap();
                s.write_all(&ending).await.unwrap();
                let mut rest = Vec::new();
                let _ = s.read_to_end(&mut rest).await;
            }
        })
        .await;
        let response = send(&new_upstream(&server.url("h2c")), ReusePolicy::Claimed).await.unwrap();
        let error = read(response).await.unwrap_err().to_string();
        assert!(error.starts_with("no complete reply"), "{error}");
    }
}

#[tokio::test]
async fn an_early_whole_reply_then_no_error_reset_is_fine() {
    let server = serve(|mut s, _| async move {
        begin(&mut s, 1).await;
        s.write_all(&frame(1, 4, 1, &[0x88])).await.unwrap();
        s.write_all(&frame(0, 1, 1, b"all")).await.unwrap();
        s.write_all(&frame(3, 0, 1, &[0; 4])).await.unwrap();
        let mut rest = Vec::new();
        let _ = s.read_to_end(&mut rest).await;
    })
    .await;
    let response = send(&new_upstream(&server.url("h2c")), ReusePolicy::Claimed).await.unwrap();
    assert_eq!(read(response).await.unwrap(), "all");
}

#[tokio::test]
async fn a_dropped_send_resets_the_stream_only() {
    let (tell, mut told) = mpsc::unbounded_channel();
    let server = serve(move |s, _| {
        let tell = tell.clone();
        serve_http2(s, move |request, mut respond: SendH2Response| {
            let tell = tell.clone();
            async move {
                if request.uri().path() == "/hang" {
                    tell.send(None).unwrap();
                    let reason = std::future::poll_fn(|cx| respond.poll_reset(cx)).await.unwrap();
                    tell.send(Some(reason)).unwrap();
                } else {
                    echo(request, respond).await;
                }
            }
        })
    })
    .await;
    let up = new_upstream(&server.url("h2c"));
    let request = Request::post("/hang").body(Full::from("x")).unwrap();
    let affinity = Affinity::default();
    tokio::select! {
        _ = up.send(request, ReusePolicy::Claimed, &affinity) => panic!("no reply was sent"),
        what = told.recv() => assert_eq!(what, Some(None)),
    }
    assert_eq!(within(told.recv()).await, Some(Some(h2::Reason::CANCEL)));
    assert_eq!(read(send(&up, ReusePolicy::Claimed).await.unwrap()).await.unwrap(), "hello");
    assert_eq!(server.count(), 1);
}

#[tokio::test]
async fn dropping_the_upstream_closes_the_connection() {
    let (tell, mut told) = mpsc::unbounded_channel();
    let server = serve(move |s, _| {
        let tell = tell.clone();
        async move {
            serve_http2(s, echo).await;
            tell.send(()).unwrap();
        }
    })
    .await;
    let up = new_upstream(&server.url("h2c"));
    read(send(&up, ReusePolicy::PassThrough).await.unwrap()).await.unwrap();
    drop(up);
    within(told.recv()).await.unwrap();
}

#[tokio::test]
async fn trailers_arrive() {
    let server = serve(|s, _| {
        serve_http2(s, |request, mut respond: SendH2Response| async move {
            read_whole_body(request.into_body()).await;
            let mut send = respond.send_response(Response::new(()), false).unwrap();
            send.send_data("data".into(), false).unwrap();
            let mut trailers = http::HeaderMap::new();
            trailers.insert("grpc-status", "0".parse().unwrap());
            send.send_trailers(trailers).unwrap();
        })
    })
    .await;
    let response = send(&new_upstream(&server.url("h2c")), ReusePolicy::Claimed).await.unwrap();
    let body = within(response.into_body().collect()).await.unwrap();
    assert_eq!(body.trailers().unwrap()["grpc-status"], "0");
}

// --- TLS ---

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

struct TlsFixture {
    acceptor: tokio_rustls::TlsAcceptor,
    trust: Arc<rustls::ClientConfig>,
}

fn tls(alpn: &[&str]) -> TlsFixture {
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()));
    let mut server = rustls::ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key)
        .unwrap();
    server.alpn_protocols = alpn.iter().map(|p| p.as_bytes().to_vec()).collect();
    let mut roots = rustls::RootCertStore::empty();
    roots.add(made.cert.der().clone()).unwrap();
    let trust = rustls::ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    TlsFixture { acceptor: Arc::new(server).into(), trust: Arc::new(trust) }
}

fn new_tls_upstream(server: &Server, trust: Arc<rustls::ClientConfig>) -> Arc<UpstreamUnderTest> {
    let target = format!("https://localhost:{}", server.addr.port());
    let settings = UpstreamSettings { tls: Some(trust), ..UpstreamSettings::default() };
    UpstreamClient::new(target.parse().unwrap(), settings).unwrap()
}

#[tokio::test]
async fn alpn_chooses_http1() {
    for alpn in [&["http/1.1"][..], &[]] {
        let TlsFixture { acceptor, trust } = tls(alpn);
        let server = serve(move |s, _| {
            let acceptor = acceptor.clone();
            async move {
                let mut s = acceptor.accept(s).await.unwrap();
                while read_request(&mut s).await.is_some() && answer(&mut s, OK).await {}
            }
        })
        .await;
        let up = new_tls_upstream(&server, trust);
        let affinity = Affinity::default();
        for _ in 0..20 {
            let response = within(up.send(post("hello"), ReusePolicy::Claimed, &affinity)).await.unwrap();
            assert_eq!(read(response).await.unwrap(), "ok");
        }
        assert_eq!(server.count(), 1);
        let results = within(futures_util::future::join_all((0..10).map(|_| send(&up, ReusePolicy::Claimed)))).await;
        assert!(results.iter().all(Result::is_ok));
    }
}

#[tokio::test]
async fn alpn_chooses_http2() {
    let TlsFixture { acceptor, trust } = tls(&["h2", "http/1.1"]);
    let server = serve(move |s, _| {
        let acceptor = acceptor.clone();
        async move { serve_http2(acceptor.accept(s).await.unwrap(), echo).await }
    })
    .await;
    let up = new_tls_upstream(&server, trust);
    let results = within(futures_util::future::join_all((0..50).map(|_| send(&up, ReusePolicy::Claimed)))).await;
    for response in results {
        assert_eq!(read(response.unwrap()).await.unwrap(), "hello");
    }
    assert_eq!(server.count(), 1);
}

fn new_grpc_upstream(server: &Server, trust: Arc<rustls::ClientConfig>) -> Arc<UpstreamUnderTest> {
    let target = format!("https://localhost:{}", server.addr.port());
    let settings = UpstreamSettings { tls: Some(trust), is_grpc: true, ..UpstreamSettings::default() };
    UpstreamClient::new(target.parse().unwrap(), settings).unwrap()
}

#[tokio::test]
async fn grpc_calls_take_http2_where_the_server_would_rather_have_http1() {
    let TlsFixture { acceptor, trust } = tls(&["http/1.1", "h2"]);
    let server = serve(move |s, _| {
        let acceptor = acceptor.clone();
        async move { serve_http2(acceptor.accept(s).await.unwrap(), echo).await }
    })
    .await;
    let response = send(&new_grpc_upstream(&server, trust), ReusePolicy::Claimed).await.unwrap();
    assert_eq!(read(response).await.unwrap(), "hello");
}

#[tokio::test]
async fn grpc_calls_are_never_written_to_a_server_without_http2() {
    for alpn in [&["http/1.1"][..], &[]] {
        let TlsFixture { acceptor, trust } = tls(alpn);
        let server = serve(move |s, _| {
            let acceptor = acceptor.clone();
            async move {
                if let Ok(mut s) = acceptor.accept(s).await {
                    assert!(read_request(&mut s).await.is_none(), "nothing is written");
                }
            }
        })
        .await;
        let error = expect_never_written(send(&new_grpc_upstream(&server, trust), ReusePolicy::Claimed).await);
        assert!(error.starts_with("TLS with localhost:"), "{error}");
    }
}

#[tokio::test]
async fn a_bad_certificate_is_never_written() {
    let TlsFixture { acceptor, .. } = tls(&["h2", "http/1.1"]);
    let server = serve(move |s, _| {
        let acceptor = acceptor.clone();
        async move { assert!(acceptor.accept(s).await.is_err()) }
    })
    .await;
    let up = new_tls_upstream(&server, tls(&[]).trust);
    let error = expect_never_written(send(&up, ReusePolicy::Claimed).await);
    assert!(error.starts_with("TLS with localhost:"), "{error}");
}

#[tokio::test]
async fn a_silent_tls_server_is_a_connect_timeout_for_everyone_at_once() {
    let server = serve(|mut s, _| async move {
        let mut rest = Vec::new();
        let _ = s.read_to_end(&mut rest).await;
    })
    .await;
    let settings = UpstreamSettings {
        tls: Some(tls(&[]).trust),
        connect_timeout: Duration::from_millis(200),
        ..UpstreamSettings::default()
    };
    let target = format!("https://localhost:{}", server.addr.port());
    let up: Arc<UpstreamUnderTest> = UpstreamClient::new(target.parse().unwrap(), settings).unwrap();
    let start = std::time::Instant::now();
    let results = within(futures_util::future::join_all((0..20).map(|_| send(&up, ReusePolicy::Claimed)))).await;
    for result in results {
        let error = expect_never_written(result);
        assert!(error.contains("no connection within 200ms"), "{error}");
    }
    assert!(start.elapsed() < Duration::from_millis(1000));
}

/// A close_notify and FIN before the next request: found by the probe through TLS.
#[test]
fn a_tls_server_that_closes_after_each_reply() {
    let TlsFixture { trust, acceptor } = tls(&["http/1.1"]);
    let (closed, is_closed) = std::sync::mpsc::channel();
    let executed = Arc::new(AtomicUsize::new(0));
    let count = executed.clone();
    let (tell, addr) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let server = serve(move |s, _| {
                let (acceptor, closed, count) = (acceptor.clone(), closed.clone(), count.clone());
                async move {
                    let mut s = acceptor.accept(s).await.unwrap();
                    if read_request(&mut s).await.is_some() {
                        count.fetch_add(1, Ordering::SeqCst);
                        answer(&mut s, OK).await;
                    }
                    s.shutdown().await.unwrap();
                    drop(s);
                    let _ = closed.send(());
                }
            })
            .await;
            tell.send(server).unwrap();
            std::future::pending::<()>().await;
        });
    });
    let server = addr.recv().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let up = new_tls_upstream(&server, trust);
        let affinity = Affinity::default();
        for n in 0..50 {
            let response = within(up.send(post("hello"), ReusePolicy::Claimed, &affinity)).await;
            let response = response.unwrap_or_else(|e| panic!("{n}: {e:?}"));
            assert_eq!(read(response).await.unwrap(), "ok");
            is_closed.recv().unwrap();
            assert_eq!(executed.load(Ordering::SeqCst), n + 1);
        }
    });
}
