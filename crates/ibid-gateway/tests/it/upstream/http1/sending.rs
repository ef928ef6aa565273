//! What is proved about a request: never written, or possibly.

use std::io::{Read as _, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::super::common::*;
use http::Request;
use http_body_util::Full;
use ibid_gateway::upstream::{Affinity, ReusePolicy, SendFailure, UpstreamTarget};
use tokio::io::AsyncReadExt;
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
                    // Proved, but too late to try again here: the caller may send it again.
                    Err(SendFailure::NeverWritten(_)) if tries < 3 => tries += 1,
                    Err(failure) => panic!("{n}: {failure:?}"),
                }
            };
            assert_eq!(read(response).await.unwrap(), "ok");
            // Blocks this thread: with one thread the reactor notices nothing until the next request.
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
            // Found closed when its body had already been taken.
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
