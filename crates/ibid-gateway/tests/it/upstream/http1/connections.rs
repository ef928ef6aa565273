//! Which connections are kept, reused and closed, and how many there may be.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::super::common::*;
use ibid_gateway::upstream::{Affinity, ReusePolicy, UpstreamSettings};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;

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
    let (server, mut told) = start_telling_ends().await;
    let up = new_upstream_with(
        &server.url("http"),
        UpstreamSettings { idle_timeout: Duration::from_millis(100), ..UpstreamSettings::default() },
    );
    let start = Instant::now();
    read(send(&up, ReusePolicy::PassThrough).await.unwrap()).await.unwrap();
    within(told.recv()).await.unwrap();
    assert!(start.elapsed() >= Duration::from_millis(100));
}

/// No further request looks at the connection; the gateway's side must close all the same.
#[tokio::test]
async fn an_idle_connection_that_the_upstream_closes_is_closed_here_too() {
    let (tell, mut told) = mpsc::unbounded_channel();
    let server = serve(move |mut s, _| {
        let tell = tell.clone();
        async move {
            read_request(&mut s).await.unwrap();
            answer(&mut s, OK).await;
            s.shutdown().await.unwrap();
            assert!(read_request(&mut s).await.is_none());
            tell.send(()).unwrap();
        }
    })
    .await;
    let up = new_upstream(&server.url("http"));
    read(send(&up, ReusePolicy::PassThrough).await.unwrap()).await.unwrap();
    tokio::time::timeout(Duration::from_secs(5), told.recv()).await.expect("noticed long before the idle timeout");
    drop(up);
}

#[tokio::test]
async fn dropping_the_upstream_closes_its_connections() {
    let (server, mut told) = start_telling_ends().await;
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
    let clients: Vec<Affinity> = (0..4).map(|_| Affinity::default()).collect();
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

/// What is not sent yet must not keep the place.
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

/// Answers every request, and tells when a connection has ended.
async fn start_telling_ends() -> (Server, mpsc::UnboundedReceiver<()>) {
    let (tell, told) = mpsc::unbounded_channel();
    let server = serve(move |mut s, _| {
        let tell = tell.clone();
        async move {
            while read_request(&mut s).await.is_some() && answer(&mut s, OK).await {}
            tell.send(()).unwrap();
        }
    })
    .await;
    (server, told)
}
