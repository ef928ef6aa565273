//! The layer in an axum app.

mod coverage;

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{Router, body::Body, extract::State, response::IntoResponse, routing::post};
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use ibid::{Ibid, OnConcurrent, Policy, store::Memory};
use tower::ServiceExt;

#[derive(Clone, Default)]
struct App {
    runs: Arc<AtomicUsize>,
}

async fn pay(State(app): State<App>, body: String) -> impl IntoResponse {
    let run = app.runs.fetch_add(1, SeqCst) + 1;
    tokio::time::sleep(Duration::from_millis(20)).await;
    (StatusCode::CREATED, [("x-run", run.to_string())], format!("paid {body} in run {run}"))
}

async fn fail(State(app): State<App>) -> StatusCode {
    app.runs.fetch_add(1, SeqCst);
    StatusCode::INTERNAL_SERVER_ERROR
}

async fn boom(State(app): State<App>) -> StatusCode {
    app.runs.fetch_add(1, SeqCst);
    panic!("planned");
}

async fn large(State(app): State<App>) -> Vec<u8> {
    app.runs.fetch_add(1, SeqCst);
    vec![b'x'; 3 << 20]
}

fn app(policy: Policy) -> (Router, App, Ibid) {
    let app = App::default();
    let ibid = Ibid::new(Arc::new(Memory::default()));
    let router = Router::new()
        .route("/pay", post(pay))
        .route("/fail", post(fail))
        .route("/boom", post(boom))
        .route("/large", post(large))
        .layer(ibid.layer(policy))
        .with_state(app.clone());
    (router, app, ibid)
}

fn request(path: &str, key: &str, body: &str) -> Request<Body> {
    let request = Request::post(path).header("authorization", "Bearer a").header("host", "x");
    request.header("idempotency-key", key).body(Body::from(body.to_owned())).unwrap()
}

async fn text(response: Response<Body>) -> String {
    String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
}

#[tokio::test]
async fn a_retry_gets_the_first_answer_and_runs_nothing() {
    let (router, app, _) = app(Policy::ietf());
    let first = router.clone().oneshot(request("/pay", "k1", "10")).await.unwrap();
    assert_eq!(first.status(), StatusCode::CREATED);
    assert!(!first.headers().contains_key("idempotent-replayed"));
    assert_eq!(text(first).await, "paid 10 in run 1");
    for _ in 0..10 {
        let again = router.clone().oneshot(request("/pay", "k1", "10")).await.unwrap();
        assert_eq!(again.status(), StatusCode::CREATED);
        assert_eq!(again.headers()["idempotent-replayed"], "true");
        assert_eq!(again.headers()["x-run"], "1");
        assert_eq!(text(again).await, "paid 10 in run 1");
    }
    assert_eq!(app.runs.load(SeqCst), 1);
}

#[tokio::test]
async fn another_body_is_refused_and_another_caller_is_independent() {
    let (router, app, _) = app(Policy::ietf());
    let _ = router.clone().oneshot(request("/pay", "k1", "10")).await.unwrap();
    let other = router.clone().oneshot(request("/pay", "k1", "99")).await.unwrap();
    assert_eq!(other.status(), StatusCode::UNPROCESSABLE_ENTITY);
    assert_eq!(other.headers()["content-type"], "application/problem+json");
    let mut stranger = request("/pay", "k1", "10");
    stranger.headers_mut().insert("authorization", "Bearer b".parse().unwrap());
    let answer = router.clone().oneshot(stranger).await.unwrap();
    assert_eq!(text(answer).await, "paid 10 in run 2");
    assert_eq!(app.runs.load(SeqCst), 2);
}

#[tokio::test]
async fn fifty_at_once_run_once_under_each_concurrency_dial() {
    for dial in [OnConcurrent::Reject, OnConcurrent::Wait] {
        let mut policy = Policy::ietf();
        policy.on_concurrent = dial;
        let (router, app, _) = app(policy);
        let all: Vec<_> = (0..50).map(|_| tokio::spawn(router.clone().oneshot(request("/pay", "k1", "10")))).collect();
        let mut statuses = Vec::new();
        for one in all {
            statuses.push(one.await.unwrap().unwrap().status());
        }
        assert_eq!(app.runs.load(SeqCst), 1, "{dial}");
        let created = statuses.iter().filter(|status| **status == StatusCode::CREATED).count();
        match dial {
            OnConcurrent::Wait => assert_eq!(created, 50),
            OnConcurrent::Reject => {
                assert_eq!(created, 1);
                assert!(statuses.iter().all(|status| matches!(status.as_u16(), 201 | 409)));
            }
        }
    }
}

#[tokio::test]
async fn a_client_that_hangs_up_does_not_cancel_the_write() {
    let (router, app, ibid) = app(Policy::ietf());
    let call = router.clone().oneshot(request("/pay", "k1", "10"));
    assert!(tokio::time::timeout(Duration::from_millis(5), call).await.is_err());
    ibid.drained().await;
    let again = router.oneshot(request("/pay", "k1", "10")).await.unwrap();
    assert_eq!(again.headers()["idempotent-replayed"], "true");
    assert_eq!(app.runs.load(SeqCst), 1);
}

#[tokio::test]
async fn a_server_error_is_not_remembered_by_default() {
    let (router, app, _) = app(Policy::ietf());
    for run in 1..=2 {
        let answer = router.clone().oneshot(request("/fail", "k1", "")).await.unwrap();
        assert_eq!(answer.status(), StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(answer.headers()["idempotency-stored"], "false");
        assert_eq!(app.runs.load(SeqCst), run);
    }
}

#[tokio::test]
async fn a_panic_leaves_the_outcome_unknown() {
    let (router, app, _) = app(Policy::ietf());
    let first = router.clone().oneshot(request("/boom", "k1", "")).await.unwrap();
    assert_eq!(first.status(), StatusCode::INTERNAL_SERVER_ERROR);
    let again = router.oneshot(request("/boom", "k1", "")).await.unwrap();
    assert_eq!(again.status(), StatusCode::CONFLICT);
    assert!(!again.headers().contains_key("retry-after"));
    assert!(text(again).await.contains("#outcome-unknown"));
    assert_eq!(app.runs.load(SeqCst), 1);
}

#[tokio::test]
async fn a_large_answer_is_streamed_and_remembered_as_a_digest() {
    let (router, app, _) = app(Policy::ietf());
    let first = router.clone().oneshot(request("/large", "k1", "")).await.unwrap();
    assert_eq!(first.into_body().collect().await.unwrap().to_bytes().len(), 3 << 20);
    let again = router.oneshot(request("/large", "k1", "")).await.unwrap();
    assert_eq!(again.status(), StatusCode::OK);
    assert_eq!(again.headers()["idempotency-body"], "digest");
    let body: serde_json::Value = serde_json::from_str(&text(again).await).unwrap();
    assert_eq!(body["length"], 3 << 20);
    assert_eq!(body["sha256"].as_str().unwrap().len(), 64);
    assert_eq!(app.runs.load(SeqCst), 1);
}

/// GitHub's published example.
fn hook(path: &str, id: &str, body: &str) -> Request<Body> {
    let signature = "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17";
    let request = Request::post(path).header("x-github-delivery", id).header("x-hub-signature-256", signature);
    request.body(Body::from(body.to_owned())).unwrap()
}

#[tokio::test]
async fn a_forged_webhook_does_not_use_up_the_id_of_a_genuine_one() {
    let policy = Policy::webhook(ibid::webhook::Scheme::GitHub, ["It's a Secret to Everybody"]).unwrap();
    let (router, app, _) = app(policy);
    for forged in ["Hello, World?", "", "Hello, World! "] {
        let answer = router.clone().oneshot(hook("/pay", "72d3162e", forged)).await.unwrap();
        assert_eq!(answer.status(), StatusCode::UNAUTHORIZED);
    }
    assert_eq!(app.runs.load(SeqCst), 0);
    for _ in 0..3 {
        let answer = router.clone().oneshot(hook("/pay", "72d3162e", "Hello, World!")).await.unwrap();
        assert_eq!((answer.status(), answer.headers()["x-run"].to_str().unwrap()), (StatusCode::CREATED, "1"));
    }
    // A failure is not remembered.
    for _ in 0..2 {
        let answer = router.clone().oneshot(hook("/fail", "72d3162e", "Hello, World!")).await.unwrap();
        assert_eq!(answer.status(), StatusCode::INTERNAL_SERVER_ERROR);
    }
    assert_eq!(app.runs.load(SeqCst), 3);
}

/// A policy whose secrets were forgotten believes nobody.
#[tokio::test]
async fn without_a_secret_every_webhook_is_refused() {
    let (router, app, _) = app(Policy::preset("webhook:github").unwrap());
    let answer = router.oneshot(hook("/pay", "72d3162e", "Hello, World!")).await.unwrap();
    assert_eq!((answer.status(), app.runs.load(SeqCst)), (StatusCode::UNAUTHORIZED, 0));
}
