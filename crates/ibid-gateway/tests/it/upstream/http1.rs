//! HTTP/1.1 upstreams: what is proved, what is read, what is reused.

use std::io::{Read as _, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::common::*;
use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Full};
use ibid_gateway::upstream::{Affinity, ReusePolicy, SendFailure, UpstreamClient, UpstreamSettings, UpstreamTarget};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;

#[test]
fn targets() {
    for good in ["http://a", "http://a:80/", "https://a.b:1", "h2c://[::1]:3000", "HTTP://127.0.0.1:5"] {
        assert!(good.parse::<UpstreamTarget>().is_ok(), "{good}");
    }
    for bad in [
        "",
        "a:80",
        "ftp://a",
        "http://",
        "http://a/b",
        "http://a?x",
        "http://a#x",
        "http://u@a",
        "http://a:0",
        "http://a:99999",
        "http://a:x",
        "http://a:",
        "http://a b",
        "http://:80",
    ] {
        assert!(bad.parse::<UpstreamTarget>().is_err(), "{bad}");
    }
}

#[tokio::test]
async fn refused_is_never_written_and_says_where() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let error = expect_never_written(send(&new_upstream(&format!("http://{free}")), ReusePolicy::Claimed).await);
    assert_eq!(error, format!("connect to {free}: connection refused"));
}

#[tokio::test]
async fn unknown_name_is_never_written() {
    let error = expect_never_written(send(&new_upstream("http://no-such-host.invalid:80"), ReusePolicy::Claimed).await);
    assert!(error.starts_with("resolve no-such-host.invalid: "), "{error}");
}

#[tokio::test]
async fn the_request_arrives_as_given() {
    let (tell, mut told) = mpsc::unbounded_channel();
    let server = serve(move |mut s, _| {
        let tell = tell.clone();
        async move {
            while let Some(text) = read_request(&mut s).await {
                tell.send(text).unwrap();
                answer(&mut s, OK).await;
            }
        }
    })
    .await;
    let up = new_upstream(&server.url("http"));
    let response = send(&up, ReusePolicy::PassThrough).await.unwrap();
    assert_eq!(read(response).await.unwrap(), "ok");
    let text = told.recv().await.unwrap().to_lowercase();
    assert!(text.starts_with("post /pay?x=1 http/1.1\r\nhost: app.example\r\n"), "{text}");
    assert!(text.ends_with("\r\n\r\nhello"), "{text}");
    // Absolute form and no Host header, as from an HTTP/2 client.
    let request = Request::get("http://other.example/a").version(http::Version::HTTP_2).body(Full::default()).unwrap();
    let response = up.send(request, ReusePolicy::PassThrough, &Affinity::default()).await.unwrap();
    read(response).await.unwrap();
    let text = told.recv().await.unwrap().to_lowercase();
    assert!(text.starts_with("get /a http/1.1\r\nhost: other.example\r\n"), "{text}");
}

/// The server is a plain thread that says when it has closed, so the FIN is there when the next request
/// goes out, whether or not the reactor has noticed. Each request must be executed once.
fn closes_after_each_reply(runtime: tokio::runtime::Runtime, announce: &'static str) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (closed, is_closed) = std::sync::mpsc::channel();
    let (close, may_close) = std::sync::mpsc::channel();
    let executed = Arc::new(AtomicUsize::new(0));
    let count = executed.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut buf = vec![0; 4096];
            let mut got = 0;
            while !buf[..got].ends_with(b"hello") {
                match stream.read(&mut buf[got..]) {
                    Ok(n) if n > 0 => got += n,
                    _ => break,
                }
            }
            if got > 0 {
                count.fetch_add(1, Ordering::SeqCst);
                let reply = format!("HTTP/1.1 200 OK\r\n{announce}content-length: 2\r\n\r\nok");
                stream.write_all(reply.as_bytes()).unwrap();
                // Not before the reply was read: FIN and reply together would be noticed together.
                let _ = may_close.recv();
            }
            drop(stream);
            let _ = closed.send(());
        }
    });
    runtime.block_on(async {
        let up = new_upstream(&url);
        let affinity = Affinity::default();
        for n in 0..200 {
            let care = if n % 2 == 0 { ReusePolicy::Claimed } else { ReusePolicy::PassThrough };
            let mut tries = 0;
            let response = loop {
                match within(up.send(post("hello"), care, &affinity)).await {
                    Ok(response) => break response,
                    // Proved, but hyper had encoded the request by then: whoever sent it may send it again.
                    Err(SendFailure::NeverWritten(_)) if tries < 3 => tries += 1,
                    Err(failure) => panic!("{n}: {failure:?}"),
                }
            };
            assert_eq!(read(response).await.unwrap(), "ok");
            // Blocks this thread: with one thread no driver runs until the next request is queued.
            close.send(()).unwrap();
            is_closed.recv().unwrap();
            // A busy system delivers the FIN a little later. What is not there yet cannot be found.
            std::thread::sleep(Duration::from_millis(10));
            assert_eq!(executed.load(Ordering::SeqCst), n + 1);
        }
    });
}

#[test]
fn an_unannounced_close_is_found_before_writing_one_thread() {
    closes_after_each_reply(tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap(), "");
}

#[test]
fn an_unannounced_close_is_found_before_writing_two_threads() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    closes_after_each_reply(runtime, "");
}

#[test]
fn an_announced_close_is_believed() {
    closes_after_each_reply(
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap(),
        "connection: close\r\n",
    );
}

/// No synchronisation at all: what cannot be proved may be lost, but nothing runs twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_keep_alive_race_never_runs_anything_twice() {
    let executed = Arc::new(AtomicUsize::new(0));
    let count = executed.clone();
    let server = serve(move |mut s, _| {
        let count = count.clone();
        async move {
            if read_request(&mut s).await.is_some() {
                count.fetch_add(1, Ordering::SeqCst);
                answer(&mut s, OK).await;
            }
        }
    })
    .await;
    let up = new_upstream(&server.url("http"));
    let (mut replies, mut unknown, mut unwritten) = (0, 0, 0);
    let affinity = Affinity::default();
    for _ in 0..200 {
        match within(up.send(post("hello"), ReusePolicy::Claimed, &affinity)).await {
            Ok(response) => {
                read(response).await.unwrap();
                replies += 1;
            }
            Err(SendFailure::MaybeWritten(_)) => unknown += 1,
            // Found closed when hyper had already taken the request in hand.
            Err(SendFailure::NeverWritten(_)) => unwritten += 1,
        }
    }
    let executed = executed.load(Ordering::SeqCst);
    assert!(replies <= executed && executed <= replies + unknown, "{replies} {unknown} {executed}");
    eprintln!("race: {replies} replies, {unknown} unknown, {unwritten} unwritten");
}

#[tokio::test]
async fn a_stray_byte_on_an_idle_connection_is_not_taken_for_a_reply() {
    let (go, gone) = (Arc::new(tokio::sync::Notify::new()), Arc::new(tokio::sync::Notify::new()));
    let (g, d) = (go.clone(), gone.clone());
    let server = serve(move |mut s, n| {
        let (go, gone) = (g.clone(), d.clone());
        async move {
            while read_request(&mut s).await.is_some() {
                answer(&mut s, OK).await;
                if n == 0 {
                    go.notified().await;
                    // A 408 for an idle connection, as some servers send.
                    answer(&mut s, "HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n").await;
                    gone.notify_one();
                }
            }
        }
    })
    .await;
    let up = new_upstream(&server.url("http"));
    read(send(&up, ReusePolicy::Claimed).await.unwrap()).await.unwrap();
    go.notify_one();
    gone.notified().await;
    let response = send(&up, ReusePolicy::Claimed).await.unwrap();
    assert_eq!(response.status(), 200);
    assert_eq!(server.count(), 2);
}

#[tokio::test]
async fn a_reset_after_the_request_was_read_is_lost() {
    let server = serve(|mut s, _| async move {
        read_request(&mut s).await.unwrap();
        s.set_zero_linger().unwrap();
    })
    .await;
    expect_lost(send(&new_upstream(&server.url("http")), ReusePolicy::Claimed).await);
    assert_eq!(server.count(), 1);
}

#[tokio::test]
async fn a_close_after_the_first_byte_is_lost() {
    let server = serve(|mut s, _| async move {
        s.read_u8().await.unwrap();
    })
    .await;
    expect_lost(send(&new_upstream(&server.url("http")), ReusePolicy::Claimed).await);
}

/// Accepts and closes. Whichever is said must be true: a byte the server saw must be a loss.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_close_at_once_is_judged_truthfully() {
    let mut said = [0, 0];
    for _ in 0..50 {
        let server = serve(|s, _| async move { drop(s) }).await;
        match send(&new_upstream(&server.url("http")), ReusePolicy::Claimed).await {
            Err(SendFailure::MaybeWritten(_)) => {
                said[0] += 1;
                assert!(server.count() <= 3);
            }
            Err(SendFailure::NeverWritten(_)) => {
                said[1] += 1;
                assert!(server.count() <= 3);
            }
            Ok(_) => panic!("a reply"),
        }
    }
    eprintln!("closed at once: {} lost, {} proved", said[0], said[1]);
}

#[tokio::test]
async fn garbage_is_lost() {
    let server = serve(|mut s, _| async move {
        read_request(&mut s).await.unwrap();
        answer(&mut s, "SSH-2.0-OpenSSH_9.2\r\n\r\n").await;
        let _ = s.read_u8().await;
    })
    .await;
    expect_lost(send(&new_upstream(&server.url("http")), ReusePolicy::Claimed).await);
}

#[tokio::test]
async fn truncated_bodies_are_errors() {
    for head in [
        "content-length: 10\r\n\r\nfour",
        "transfer-encoding: chunked\r\n\r\n4\r\nfour\r\n",
        "transfer-encoding: chunked\r\n\r\n4\r\nfo",
    ] {
        let server = serve(move |mut s, _| async move {
            read_request(&mut s).await.unwrap();
            answer(&mut s, &format!("HTTP/1.1 200 OK\r\n{head}")).await;
        })
        .await;
        let response = send(&new_upstream(&server.url("http")), ReusePolicy::Claimed).await.unwrap();
        let error = read(response).await.unwrap_err().to_string();
        assert!(error.starts_with("no complete reply: "), "{error}");
    }
}

/// A body of many frames, all there: hyper writes them one after the other without reading in between.
#[derive(Default)]
struct ManyFramesBody(usize);

impl http_body::Body for ManyFramesBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>, _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<http_body::Frame<Bytes>, Self::Error>>> {
        const FRAME: [u8; 4096] = [b'x'; 4096];
        std::task::Poll::Ready(self.0.checked_sub(1).map(|left| {
            self.0 = left;
            Ok(http_body::Frame::data(Bytes::from_static(&FRAME)))
        }))
    }
}

/// The server takes more or less of the body, answers, and closes with bytes unread, which is a reset; the
/// client is in the middle of writing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_early_413_is_always_read() {
    let server = serve(|mut s, n| async move {
        let mut some = vec![0; 1000 + n % 50 * 2000];
        s.read_exact(&mut some).await.unwrap();
        answer(&mut s, "HTTP/1.1 413 Payload Too Large\r\nconnection: close\r\ncontent-length: 4\r\n\r\nlong").await;
    })
    .await;
    let up = UpstreamClient::new(server.url("http").parse().unwrap(), UpstreamSettings::default()).unwrap();
    for n in 0..200 {
        let request = Request::post("/").body(ManyFramesBody(256)).unwrap();
        let response = within(up.send(request, ReusePolicy::Claimed, &Affinity::default())).await;
        let response = response.unwrap_or_else(|e| panic!("{n}: {e:?}"));
        assert_eq!(response.status(), 413);
        assert_eq!(read(response).await.unwrap(), "long", "{n}");
    }
}

#[tokio::test]
async fn many_headers_are_read() {
    let server = serve(|mut s, _| async move {
        read_request(&mut s).await.unwrap();
        let mut text = "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n".to_owned();
        for n in 0..400 {
            text += &format!("x-{n}: {}\r\n", "v".repeat(100));
        }
        answer(&mut s, &(text + "\r\n")).await;
    })
    .await;
    assert_eq!(send(&new_upstream(&server.url("http")), ReusePolicy::Claimed).await.unwrap().headers().len(), 401);
}

#[tokio::test]
async fn informational_replies_are_skipped() {
    let server = serve(|mut s, _| async move {
        while read_request(&mut s).await.is_some() {
            answer(&mut s, "HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n").await;
            answer(&mut s, OK).await;
        }
    })
    .await;
    let up = new_upstream(&server.url("http"));
    for _ in 0..3 {
        assert_eq!(read(send(&up, ReusePolicy::Claimed).await.unwrap()).await.unwrap(), "ok");
    }
    assert_eq!(server.count(), 1);
}

#[tokio::test]
async fn keep_alive_timeout_is_honoured() {
    for (seconds, wait, connections) in [(1, 0, 3), (2, 0, 1), (2, 1050, 3), (60, 0, 1)] {
        let server = serve(move |mut s, _| async move {
            while read_request(&mut s).await.is_some() {
                let reply =
                    format!("HTTP/1.1 200 OK\r\nkeep-alive: timeout={seconds}, max=9\r\ncontent-length: 2\r\n\r\nok");
                answer(&mut s, &reply).await;
            }
        })
        .await;
        let up = new_upstream(&server.url("http"));
        for n in 0..3 {
            if n > 0 {
                tokio::time::sleep(Duration::from_millis(wait)).await;
            }
            read(send(&up, ReusePolicy::PassThrough).await.unwrap()).await.unwrap();
        }
        assert_eq!(server.count(), connections, "timeout={seconds}, after {wait} ms");
    }
}

#[tokio::test]
async fn claimed_requests_want_a_young_connection() {
    let server = start_well_behaved().await;
    let up = new_upstream(&server.url("http"));
    let affinity = Affinity::default();
    for (care, wait, connections) in [
        (ReusePolicy::Claimed, 0, 1),
        (ReusePolicy::Claimed, 0, 1),
        (ReusePolicy::PassThrough, 1050, 1),
        (ReusePolicy::Claimed, 1050, 2),
    ] {
        tokio::time::sleep(Duration::from_millis(wait)).await;
        read(within(up.send(post("hello"), care, &affinity)).await.unwrap()).await.unwrap();
        assert_eq!(server.count(), connections);
    }
}

#[tokio::test]
async fn at_the_bound_a_claimed_request_replaces_an_old_connection() {
    let open = Arc::new(AtomicUsize::new(0));
    let most = Arc::new(AtomicUsize::new(0));
    let (o, m) = (open.clone(), most.clone());
    let server = serve(move |mut s, _| {
        let (open, most) = (o.clone(), m.clone());
        async move {
            most.fetch_max(open.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            while read_request(&mut s).await.is_some() && answer(&mut s, OK).await {}
            open.fetch_sub(1, Ordering::SeqCst);
        }
    })
    .await;
    let up =
        new_upstream_with(&server.url("http"), UpstreamSettings { max_connections: 1, ..UpstreamSettings::default() });
    read(send(&up, ReusePolicy::Claimed).await.unwrap()).await.unwrap();
    tokio::time::sleep(Duration::from_millis(1050)).await;
    read(send(&up, ReusePolicy::Claimed).await.unwrap()).await.unwrap();
    assert_eq!(server.count(), 2);
    until(|| open.load(Ordering::SeqCst) == 1).await;
}

#[tokio::test]
async fn idle_connections_are_closed_after_the_idle_timeout() {
    let (tell, mut told) = mpsc::unbounded_channel();
    let server = serve(move |mut s, _| {
        let tell = tell.clone();
        async move {
            while read_request(&mut s).await.is_some() && answer(&mut s, OK).await {}
            tell.send(()).unwrap();
        }
    })
    .await;
    let up = new_upstream_with(
        &server.url("http"),
        UpstreamSettings { idle_timeout: Duration::from_millis(100), ..UpstreamSettings::default() },
    );
    let start = Instant::now();
    read(send(&up, ReusePolicy::PassThrough).await.unwrap()).await.unwrap();
    within(told.recv()).await.unwrap();
    assert!(start.elapsed() >= Duration::from_millis(100));
}

#[tokio::test]
async fn dropping_the_upstream_closes_its_connections() {
    let (tell, mut told) = mpsc::unbounded_channel();
    let server = serve(move |mut s, _| {
        let tell = tell.clone();
        async move {
            while read_request(&mut s).await.is_some() && answer(&mut s, OK).await {}
            tell.send(()).unwrap();
        }
    })
    .await;
    let up = new_upstream(&server.url("http"));
    read(send(&up, ReusePolicy::PassThrough).await.unwrap()).await.unwrap();
    drop(up);
    within(told.recv()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_bound_holds_and_everyone_is_served() {
    let open = Arc::new(AtomicUsize::new(0));
    let most = Arc::new(AtomicUsize::new(0));
    let (o, m) = (open.clone(), most.clone());
    let server = serve(move |mut s, n| {
        let (open, most) = (o.clone(), m.clone());
        async move {
            most.fetch_max(open.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            let mut served = 0;
            while read_request(&mut s).await.is_some() {
                served += 1;
                // Some close now and then, so that permits change hands too.
                if (served + n) % 7 == 0 {
                    open.fetch_sub(1, Ordering::SeqCst);
                    answer(&mut s, "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok").await;
                    return;
                }
                tokio::task::yield_now().await;
                answer(&mut s, OK).await;
            }
            open.fetch_sub(1, Ordering::SeqCst);
        }
    })
    .await;
    let up =
        new_upstream_with(&server.url("http"), UpstreamSettings { max_connections: 4, ..UpstreamSettings::default() });
    let tasks: Vec<_> = (0..50)
        .map(|n| {
            let up = up.clone();
            tokio::spawn(async move {
                let affinity = Affinity::default();
                let care = if n % 2 == 0 { ReusePolicy::Claimed } else { ReusePolicy::PassThrough };
                for _ in 0..40 {
                    let response = within(up.send(post("hello"), care, &affinity)).await.unwrap();
                    assert_eq!(read(response).await.unwrap(), "ok");
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert!(most.load(Ordering::SeqCst) <= 4, "{most:?}");
}

#[tokio::test]
async fn waiting_at_the_bound_can_be_given_up() {
    let (release, hold) = (Arc::new(tokio::sync::Notify::new()), Arc::new(AtomicUsize::new(0)));
    let (r, h) = (release.clone(), hold.clone());
    let server = serve(move |mut s, _| {
        let (release, hold) = (r.clone(), h.clone());
        async move {
            while read_request(&mut s).await.is_some() {
                hold.fetch_add(1, Ordering::SeqCst);
                release.notified().await;
                answer(&mut s, OK).await;
            }
        }
    })
    .await;
    let up =
        new_upstream_with(&server.url("http"), UpstreamSettings { max_connections: 1, ..UpstreamSettings::default() });
    let first = tokio::spawn({
        let up = up.clone();
        async move { send(&up, ReusePolicy::PassThrough).await.map(drop) }
    });
    until(|| hold.load(Ordering::SeqCst) == 1).await;
    for _ in 0..5 {
        assert!(tokio::time::timeout(Duration::from_millis(5), send(&up, ReusePolicy::PassThrough)).await.is_err());
    }
    let second = tokio::spawn({
        let up = up.clone();
        async move { read(send(&up, ReusePolicy::PassThrough).await.unwrap()).await }
    });
    tokio::task::yield_now().await;
    release.notify_one();
    // The first one's body is dropped unread: its connection closes, the second gets its place.
    first.await.unwrap().unwrap();
    until(|| hold.load(Ordering::SeqCst) == 2).await;
    release.notify_one();
    assert_eq!(second.await.unwrap().unwrap(), "ok");
}

#[tokio::test]
async fn a_client_keeps_its_connection_if_it_can() {
    let server = serve(|mut s, n| async move {
        while read_request(&mut s).await.is_some() {
            answer(&mut s, &format!("HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n{n}")).await;
        }
    })
    .await;
    let up = new_upstream(&server.url("http"));
    let clients: Vec<Affinity<TestBody>> = (0..4).map(|_| Affinity::default()).collect();
    // All at once: four connections.
    let mut mine = Vec::new();
    let mut replies = Vec::new();
    for client in &clients {
        replies.push(up.send(post("hello"), ReusePolicy::Claimed, client).await.unwrap());
    }
    for reply in replies {
        mine.push(read(reply).await.unwrap());
    }
    assert_eq!(server.count(), 4);
    for n in [3, 1, 0, 2, 2, 1, 3, 0, 0] {
        let got = read(up.send(post("hello"), ReusePolicy::Claimed, &clients[n]).await.unwrap()).await.unwrap();
        assert_eq!(got, mine[n]);
    }
    assert_eq!(server.count(), 4);
    // Busy: another one will do.
    let busy = up.send(post("hello"), ReusePolicy::Claimed, &clients[0]).await.unwrap();
    let other = read(up.send(post("hello"), ReusePolicy::Claimed, &clients[0]).await.unwrap()).await.unwrap();
    assert_ne!(other, read(busy).await.unwrap());
    assert_eq!(server.count(), 4);
}

#[tokio::test]
async fn a_hint_from_another_upstream_is_ignored() {
    let (a, b) = (start_well_behaved().await, start_well_behaved().await);
    let affinity = Affinity::default();
    for server in [&a, &b, &a] {
        let up = new_upstream(&server.url("http"));
        read(up.send(post("hello"), ReusePolicy::PassThrough, &affinity).await.unwrap()).await.unwrap();
        read(up.send(post("hello"), ReusePolicy::PassThrough, &affinity).await.unwrap()).await.unwrap();
    }
    assert_eq!((a.count(), b.count()), (2, 1));
}

#[tokio::test]
async fn an_upgrade_passes_bytes_both_ways_and_counts() {
    let server = serve(|mut s, _| async move {
        let Some(text) = read_request(&mut s).await else { return };
        assert!(text.to_lowercase().contains("upgrade: echo"));
        answer(&mut s, "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: echo\r\n\r\nhi").await;
        let mut buf = [0; 100];
        while let Ok(n @ 1..) = s.read(&mut buf).await {
            s.write_all(&buf[..n]).await.unwrap();
        }
    })
    .await;
    let up =
        new_upstream_with(&server.url("http"), UpstreamSettings { max_connections: 1, ..UpstreamSettings::default() });
    for n in 1..=2 {
        let request =
            Request::get("/").header("connection", "upgrade").header("upgrade", "echo").body(Full::default()).unwrap();
        let response = within(up.send(request, ReusePolicy::PassThrough, &Affinity::default())).await.unwrap();
        assert_eq!(response.status(), 101);
        let upgraded = within(hyper::upgrade::on(response)).await.unwrap();
        let mut io = hyper_util::rt::TokioIo::new(upgraded);
        let mut buf = [0; 7];
        io.read_exact(&mut buf[..2]).await.unwrap();
        assert_eq!(&buf[..2], b"hi");
        io.write_all(b"and you").await.unwrap();
        io.read_exact(&mut buf).await.unwrap();
        assert_eq!(&buf, b"and you");
        // It takes the only place until it is closed.
        assert!(tokio::time::timeout(Duration::from_millis(20), send(&up, ReusePolicy::PassThrough)).await.is_err());
        assert_eq!(server.count(), n);
    }
}

#[tokio::test]
async fn a_dropped_send_closes_the_connection_even_if_nobody_reads() {
    let (tell, mut told) = mpsc::unbounded_channel();
    let server = serve(move |mut s, _| {
        let tell = tell.clone();
        async move {
            s.read_u8().await.unwrap();
            tell.send("read").unwrap();
            // Only what tells of the end: the rest of the body stays unread for now.
            tokio::time::sleep(Duration::from_millis(50)).await;
            let mut sink = vec![0; 65536];
            while let Ok(1..) = s.read(&mut sink).await {}
            tell.send("end").unwrap();
        }
    })
    .await;
    let up =
        new_upstream_with(&server.url("http"), UpstreamSettings { max_connections: 1, ..UpstreamSettings::default() });
    for size in [5, 16 * 1024 * 1024] {
        let affinity = Affinity::default();
        let send = up.send(post(vec![b'x'; size]), ReusePolicy::Claimed, &affinity);
        tokio::select! {
            _ = send => panic!("no reply was sent"),
            what = told.recv() => assert_eq!(what, Some("read")),
        }
        assert_eq!(within(told.recv()).await, Some("end"));
    }
    assert_eq!(server.count(), 2);
}

/// hyper alone would go on trying to flush, and keep the place.
#[tokio::test]
async fn a_dropped_send_frees_its_place_while_the_upstream_is_stuck() {
    let (tell, mut told) = mpsc::unbounded_channel();
    let server = serve(move |mut s, n| {
        let tell = tell.clone();
        async move {
            if n == 0 {
                s.read_u8().await.unwrap();
                tell.send(()).unwrap();
                tokio::time::sleep(Duration::from_secs(60)).await;
            }
            while read_request(&mut s).await.is_some() && answer(&mut s, OK).await {}
        }
    })
    .await;
    let up =
        new_upstream_with(&server.url("http"), UpstreamSettings { max_connections: 1, ..UpstreamSettings::default() });
    let affinity = Affinity::default();
    tokio::select! {
        _ = up.send(post(vec![b'x'; 64 * 1024 * 1024]), ReusePolicy::Claimed, &affinity) => panic!("no reply was sent"),
        _ = told.recv() => {}
    }
    read(send(&up, ReusePolicy::Claimed).await.unwrap()).await.unwrap();
}

#[tokio::test]
async fn a_dropped_body_closes_the_connection() {
    let (tell, mut told) = mpsc::unbounded_channel();
    let server = serve(move |mut s, _| {
        let tell = tell.clone();
        async move {
            read_request(&mut s).await.unwrap();
            answer(&mut s, "HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nsome").await;
            assert!(read_request(&mut s).await.is_none());
            tell.send(()).unwrap();
        }
    })
    .await;
    let up = new_upstream(&server.url("http"));
    let mut body = send(&up, ReusePolicy::PassThrough).await.unwrap().into_body();
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "some");
    drop(body);
    within(told.recv()).await.unwrap();
}

#[tokio::test]
async fn a_whole_body_frees_the_connection_before_it_is_dropped() {
    let server = start_well_behaved().await;
    let up = new_upstream(&server.url("http"));
    let mut body = send(&up, ReusePolicy::PassThrough).await.unwrap().into_body();
    body.frame().await.unwrap().unwrap();
    read(send(&up, ReusePolicy::PassThrough).await.unwrap()).await.unwrap();
    assert_eq!(server.count(), 1);
    drop(body);
    read(send(&up, ReusePolicy::PassThrough).await.unwrap()).await.unwrap();
    assert_eq!(server.count(), 1);
}

/// The first connection answers before it has the request, and takes the rest only when told to: it must
/// not carry another request before that, and may after.
#[tokio::test]
async fn an_early_reply_does_not_spoil_the_next_request() {
    let resume = Arc::new(tokio::sync::Notify::new());
    let go = resume.clone();
    let server = serve(move |mut s, n| {
        let resume = go.clone();
        async move {
            if n == 0 {
                let mut some = [0; 100];
                s.read_exact(&mut some).await.unwrap();
                answer(&mut s, OK).await;
                resume.notified().await;
                let mut sink = vec![0; 65536];
                // The body ends with its only y.
                loop {
                    let got = s.read(&mut sink).await.unwrap();
                    if sink[..got].ends_with(b"y") {
                        break;
                    }
                }
            }
            while read_request(&mut s).await.is_some() {
                answer(&mut s, &format!("HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n{n}")).await;
            }
        }
    })
    .await;
    let up =
        new_upstream_with(&server.url("http"), UpstreamSettings { max_connections: 2, ..UpstreamSettings::default() });
    let affinity = Affinity::default();
    let mut big = vec![b'x'; 16 * 1024 * 1024];
    big.push(b'y');
    let response = up.send(post(big), ReusePolicy::PassThrough, &affinity).await.unwrap();
    assert_eq!(read(response).await.unwrap(), "ok");
    let busy = up.send(post("hello"), ReusePolicy::PassThrough, &affinity).await.unwrap();
    resume.notify_one();
    // The only other connection: this waits until it has taken the rest.
    assert_eq!(read(send(&up, ReusePolicy::PassThrough).await.unwrap()).await.unwrap(), "0");
    assert_eq!(read(busy).await.unwrap(), "1");
    assert_eq!(server.count(), 2);
}
