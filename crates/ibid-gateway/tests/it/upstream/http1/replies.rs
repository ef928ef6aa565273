//! What is read of a reply.

use std::sync::Arc;
use std::time::Duration;

use super::super::common::*;
use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Full};
use ibid_gateway::proxy::UpstreamRequestBody;
use ibid_gateway::upstream::{Affinity, ReusePolicy, UpstreamClient, UpstreamSettings};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::sync::mpsc;

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

/// A body of many frames, all there: they are written one after the other.
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

/// The exact rules are tested at the codec. Here: such a reply is lost, and its connection is not used again.
#[tokio::test]
async fn after_a_reply_that_cannot_be_delimited_safely_the_connection_is_closed() {
    for (reply, body) in [
        ("content-length: 2\r\ncontent-length: 3\r\n\r\nabc", None),
        ("content-length: 9\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", Some("ok")),
        ("content-length: 2\r\n\r\nokHTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nstray", Some("ok")),
        ("\r\nok", Some("ok")),
    ] {
        let server = serve(move |mut s, _| async move {
            let closes = reply == "\r\nok";
            while read_request(&mut s).await.is_some() && answer(&mut s, &format!("HTTP/1.1 200 OK\r\n{reply}")).await {
                if closes {
                    return;
                }
            }
        })
        .await;
        let up = new_upstream(&server.url("http"));
        for count in 1..=2 {
            let sent = send(&up, ReusePolicy::Claimed).await;
            match body {
                Some(body) => {
                    let response = sent.unwrap();
                    let framings =
                        ["content-length", "transfer-encoding"].map(|name| response.headers().contains_key(name));
                    assert_ne!(framings, [true, true], "{reply}");
                    assert_eq!(read(response).await.unwrap(), body, "{reply}");
                }
                None => drop(expect_lost(sent)),
            }
            assert_eq!(server.count(), count, "{reply}");
        }
    }
}

/// Trailers need the announcement in the head, as HTTP demands.
#[tokio::test]
async fn trailers_pass_both_ways() {
    let (tell, mut told) = mpsc::unbounded_channel();
    let server = serve(move |s, _| {
        let tell = tell.clone();
        async move {
            let mut s = BufReader::new(s);
            let mut got = Vec::new();
            while !got.ends_with(b"x-sum: 7\r\n\r\n") {
                s.read_until(b'\n', &mut got).await.unwrap();
            }
            tell.send(String::from_utf8(got).unwrap()).unwrap();
            let reply = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2;a=b\r\nok\r\n0\r\nx-end: 8\r\n\r\n";
            answer(&mut s, reply).await;
        }
    })
    .await;
    let up = UpstreamClient::new(server.url("http").parse().unwrap(), UpstreamSettings::default()).unwrap();
    let trailers =
        [("x-sum", "7"), ("x-unannounced", "9")].map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()));
    let body = UpstreamRequestBody::complete(Bytes::from("hello"), Some(trailers.into_iter().collect()));
    let request = Request::post("/").header("trailer", "x-sum").body(body).unwrap();
    let response = within(up.send(request, ReusePolicy::Claimed, &Affinity::default())).await.unwrap();
    let reply = within(response.into_body().collect()).await.unwrap();
    assert_eq!(reply.trailers().unwrap()["x-end"], "8");
    assert_eq!(reply.to_bytes(), "ok");
    let request = told.recv().await.unwrap();
    assert!(request.ends_with("\r\n\r\n5\r\nhello\r\n0\r\nx-sum: 7\r\n\r\n"), "{request}");
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
        let mut io = response.into_body().into_upgraded().unwrap();
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
    let server = serve(move |s, n| {
        let resume = go.clone();
        async move {
            let mut s = BufReader::new(s);
            if n == 0 {
                let mut some = [0; 100];
                s.read_exact(&mut some).await.unwrap();
                answer(&mut s, OK).await;
                resume.notified().await;
                // The body ends with its only y. The next request may follow at once.
                s.read_until(b'y', &mut Vec::new()).await.unwrap();
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
