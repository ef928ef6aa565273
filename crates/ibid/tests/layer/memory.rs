//! The memory for bodies: clients that send slowly, or do not read, take nothing from others.

use std::{
    convert::Infallible,
    future::pending,
    sync::{Arc, atomic::Ordering::SeqCst},
    time::Duration,
};

use axum::{Router, body::Body, routing::post};
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use ibid::{
    Ibid, Policy,
    http::{IbidBuilder, PeerAddress, PeerConnection},
    store::{Memory, Store},
};
use tokio::time::{Instant, sleep, timeout};
use tower::ServiceExt;

use crate::rejecting_store::RejectingStore;

const MIB: usize = 1 << 20;

fn large_limits_policy() -> Policy {
    let mut policy = Policy::ietf();
    (policy.max_request, policy.max_response) = (25 << 20, 25 << 20);
    policy
}

/// An app that answers with as many bytes as the path says, behind a layer.
fn app(builder: IbidBuilder) -> (Router, Ibid) {
    let ibid = builder.build();
    let app = Router::new()
        .route("/{bytes}", post(async |path: axum::extract::Path<usize>, _: Bytes| vec![b'x'; path.0]))
        .layer(axum::extract::DefaultBodyLimit::disable())
        .layer(ibid.layer(large_limits_policy()).unwrap());
    (app, ibid)
}

fn request(path: &str, key: &str, connection: &PeerConnection, body: Body) -> Request<Body> {
    let request = Request::post(path).header("authorization", "Bearer a").header("host", "x");
    let request = request.extension(PeerAddress([192, 0, 2, 7].into())).extension(connection.clone());
    request.header("idempotency-key", key).body(body).unwrap()
}

/// A body of which only the beginning is ever sent.
fn stalled_body(begun: usize) -> Body {
    let begun = stream::once(async move { Ok::<_, Infallible>(Bytes::from(vec![b'x'; begun])) });
    Body::from_stream(begun.chain(stream::once(pending())))
}

async fn send(app: &Router, request: Request<Body>) -> Response<Body> {
    app.clone().oneshot(request).await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn silent_bodies_take_neither_memory_nor_slots() {
    let (app, _ibid) = app(Ibid::builder(Arc::new(Memory::default())).buffer_memory(256 << 20).max_running(10));
    let silent: Vec<_> = (0..300)
        .map(|n| {
            let mut request = request("/1", &format!("silent-{n}"), &PeerConnection::default(), stalled_body(0));
            request.headers_mut().insert("content-length", (25 * MIB).into());
            tokio::spawn(app.clone().oneshot(request))
        })
        .collect();
    sleep(Duration::from_millis(1)).await;
    let begun = Instant::now();
    let answer = send(&app, request("/1", "k", &PeerConnection::default(), Body::from(vec![b'x'; 10 * MIB]))).await;
    assert_eq!(answer.status(), StatusCode::OK);
    assert!(begun.elapsed() < Duration::from_millis(100), "{:?}", begun.elapsed());
    for silent in silent {
        assert_eq!(silent.await.unwrap().unwrap().status(), StatusCode::REQUEST_TIMEOUT);
    }
}

/// A body in pieces, with a pause before each but the first.
fn paused_body(pieces: Vec<&'static str>, pause: Duration) -> Body {
    Body::from_stream(stream::iter(pieces.into_iter().enumerate()).then(move |(at, piece)| async move {
        if at > 0 && !pause.is_zero() {
            sleep(pause).await;
        }
        Ok::<_, Infallible>(piece)
    }))
}

#[tokio::test(start_paused = true)]
async fn a_body_is_the_same_however_it_arrives() {
    let (app, _ibid) = app(Ibid::builder(Arc::new(Memory::default())));
    let client = PeerConnection::default();
    let pause = Duration::from_millis(5);
    let bodies = |[a, b, c]: [&'static str; 3]| {
        let whole = Body::from([a, b, c].concat());
        [
            whole,
            paused_body(vec![a, b, c], Duration::ZERO),
            paused_body(vec![a, b, c], pause),
            paused_body(vec!["", a, b, c], pause),
        ]
    };
    for (at, body) in bodies(["one ", "two ", "three"]).into_iter().enumerate() {
        let answer = send(&app, request("/7", "k", &client, body)).await;
        assert_eq!(answer.status(), StatusCode::OK);
        assert_eq!(answer.headers().contains_key("idempotent-replayed"), at > 0, "{at}");
        assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), "xxxxxxx");
    }
    for body in bodies(["one ", "two ", "four"]) {
        assert_eq!(send(&app, request("/7", "k", &client, body)).await.status(), StatusCode::UNPROCESSABLE_ENTITY);
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_above_the_limit_is_refused_however_it_arrives() {
    let ibid = Ibid::new(Arc::new(Memory::default()));
    let mut policy = Policy::ietf();
    policy.max_request = 8;
    let app = Router::new().route("/", post(async |_: Bytes| "ran")).layer(ibid.layer(policy).unwrap());
    let cases: [(bool, &[&'static str]); 4] =
        [(true, &["12345678"]), (true, &["1234", "5678"]), (false, &["123456789"]), (false, &["1234", "56789"])];
    for (at, (fits, pieces)) in cases.into_iter().enumerate() {
        let expected = if fits { StatusCode::OK } else { StatusCode::PAYLOAD_TOO_LARGE };
        for pause in [Duration::ZERO, Duration::from_millis(5)] {
            for declared in [None, Some(8_u64)] {
                let key = format!("{at}-{pause:?}-{declared:?}");
                let mut request = request("/", &key, &PeerConnection::default(), paused_body(pieces.to_vec(), pause));
                // A body may be longer than its header declares.
                declared.map(|length| request.headers_mut().insert("content-length", length.into()));
                assert_eq!(send(&app, request).await.status(), expected, "{pieces:?} {pause:?} {declared:?}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn those_who_have_stopped_sending_make_room_for_others() {
    let (app, _ibid) = app(Ibid::builder(Arc::new(Memory::default())).buffer_memory(16 << 20));
    let slow = |n: u8, begun| {
        let mut request = request("/1", &format!("slow-{n}"), &PeerConnection::default(), stalled_body(begun));
        request.extensions_mut().insert(PeerAddress([198, 51, 100, n].into()));
        tokio::spawn(app.clone().oneshot(request))
    };
    let slow = [slow(1, 8 * MIB), slow(2, 4 * MIB), slow(3, 2 * MIB)];
    let large = |key: &str| request("/1", key, &PeerConnection::default(), Body::from(vec![b'x'; 4 * MIB]));
    sleep(Duration::from_millis(1)).await;
    let refused = send(&app, large("k-1")).await;
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE, "they have only begun");
    assert!(refused.headers().contains_key("retry-after"));
    sleep(Duration::from_secs(2)).await;
    assert_eq!(send(&app, large("k-1")).await.status(), StatusCode::OK);
    let mut ends = Vec::new();
    for slow in slow {
        ends.push(slow.await.unwrap().unwrap().status().as_u16());
    }
    assert_eq!(ends, [503, 408, 408], "the one that held most had to go, the others ran out of time");
}

#[tokio::test(start_paused = true)]
async fn replays_that_are_not_read_are_counted_and_cut() {
    let (app, _ibid) = app(Ibid::builder(Arc::new(Memory::default())).buffer_memory(64 << 20));
    let path = format!("/{MIB}");
    let replay = |connection: &PeerConnection| request(&path, "k", connection, Body::empty());
    let one = PeerConnection::default();
    let first = send(&app, replay(&one)).await.into_body().collect().await.unwrap().to_bytes();
    // As much as one connection may hold.
    let mut unread = Vec::new();
    for _ in 0..8 {
        unread.push(send(&app, replay(&one)).await);
    }
    assert!(unread.iter().all(|answer| answer.status() == StatusCode::OK));
    // Another client is not concerned.
    let begun = Instant::now();
    let other = send(&app, replay(&PeerConnection::default())).await;
    assert_eq!(other.into_body().collect().await.unwrap().to_bytes(), first);
    assert_eq!(begun.elapsed(), Duration::ZERO);
    // The next on the same connection waits until one of them may be cut.
    let next = timeout(Duration::from_secs(3), send(&app, replay(&one))).await.expect("one of them is cut");
    assert_eq!(next.into_body().collect().await.unwrap().to_bytes(), first);
    let mut cut = 0;
    for answer in unread {
        match answer.into_body().collect().await {
            Ok(body) => assert_eq!(body.to_bytes(), first),
            Err(_) => cut += 1,
        }
    }
    assert_eq!(cut, 1, "no more than needed");
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_is_too_large_for_the_store_is_recorded_without_its_body() {
    let store = RejectingStore::new(MIB);
    let (app, ibid) = app(Ibid::builder(store.clone()));
    let path = format!("/{}", 2 * MIB);
    let large = || request(&path, "k-1", &PeerConnection::default(), Body::empty());
    let small = || request("/10", "k-2", &PeerConnection::default(), Body::empty());
    store.is_unreachable.store(true, SeqCst);
    // Without a journal they are withheld until they are recorded.
    assert_eq!(send(&app, large()).await.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(send(&app, small()).await.status(), StatusCode::SERVICE_UNAVAILABLE);
    store.is_unreachable.store(false, SeqCst);
    timeout(Duration::from_secs(5), ibid.drained()).await.expect("both are recorded");
    assert_eq!(ibid.engine().settle_queue().pending(), 0, "drained flushes what is queued");
    assert_eq!(send(&app, small()).await.headers()["idempotent-replayed"], "true");
    let replay = send(&app, large()).await;
    assert_eq!(replay.headers()["idempotency-body"], "digest");
    let body = replay.into_body().collect().await.unwrap().to_bytes();
    assert!(body.starts_with(format!("{{\"length\":{}", 2 * MIB).as_bytes()), "{body:?}");
}

#[tokio::test(start_paused = true)]
async fn drained_does_not_wait_for_ever_for_a_store_that_is_away() {
    let store = RejectingStore::new(MIB);
    let (app, ibid) = app(Ibid::builder(store.clone()));
    store.is_unreachable.store(true, SeqCst);
    let _ = send(&app, request("/1", "k", &PeerConnection::default(), Body::empty())).await;
    timeout(Duration::from_secs(20), ibid.drained()).await.expect("its time is bounded");
    assert_eq!(ibid.engine().settle_queue().pending(), 1);
}

#[tokio::test(start_paused = true)]
async fn the_store_is_swept_for_as_long_as_there_is_a_layer() {
    let store = RejectingStore::new(MIB);
    let ibid = Ibid::builder(store.clone()).sweep_every(Some(Duration::from_secs(1))).build();
    let layer = ibid.layer(Policy::ietf());
    drop(ibid);
    sleep(Duration::from_millis(3500)).await;
    assert_eq!(store.sweeps.load(SeqCst), 3);
    drop(layer);
    sleep(Duration::from_secs(10)).await;
    assert_eq!(store.sweeps.load(SeqCst), 3);
    assert_eq!(Arc::strong_count(&store), 1, "nobody holds on to the store");

    let ibid = Ibid::builder(store.clone()).sweep_every(None).build();
    sleep(Duration::from_secs(300)).await;
    assert_eq!(store.sweeps.load(SeqCst), 3, "somebody else sweeps");
    drop(ibid);
    let _ibid = Ibid::new(store.clone());
    sleep(Duration::from_secs(61)).await;
    assert_eq!(store.sweeps.load(SeqCst), 4, "every minute by default");
}

#[test]
fn an_ibid_that_was_made_without_a_runtime_sweeps_once_there_is_one() {
    let store = RejectingStore::new(MIB);
    let (app, ibid) = app(Ibid::builder(store.clone()).sweep_every(Some(Duration::from_millis(1))));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async {
        assert_eq!(
            send(&app, request("/1", "k", &PeerConnection::default(), Body::empty())).await.status(),
            StatusCode::OK
        );
        while store.sweeps.load(SeqCst) == 0 {
            sleep(Duration::from_millis(1)).await;
        }
        let at = ibid.engine().store().clone();
        assert!(at.admin().counts().await.is_ok());
    });
}
