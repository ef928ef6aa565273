//! `complete_in` from handlers under the layer.

use std::{
    marker::PhantomData,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{Extension, Router, body::Body, extract::State, http::StatusCode, response::Response, routing::post};
use bytes::Bytes;
use http::{HeaderMap, Request};
use http_body_util::BodyExt as _;
use ibid::{
    Ibid, Policy,
    http::HandlerClaim,
    store::{Memory, Store},
};
use ibid_postgres_tx::{commit_with, complete_in};
use tower::ServiceExt as _;

use crate::support::{TestDriver, TestError, TxDatabase, paid_response, with_both_drivers};

with_both_drivers! {
    what_is_committed_is_answered_and_replayed
    an_answer_that_travels_with_commit_is_committed_or_nothing_is
    what_is_rolled_back_is_not_answered_as_success
    a_commit_that_silently_rolls_back_is_not_answered_as_success
    what_was_committed_is_answered_even_if_the_handler_does_not_know
    after_a_rollback_another_answer_is_given_and_not_remembered
    a_claim_in_another_store_cannot_be_completed
    an_answer_is_completed_once
    an_answer_that_the_policy_does_not_remember_is_refused
    a_claim_that_was_forgotten_meanwhile_cannot_be_completed
    a_long_transaction_outlives_its_lease
    a_large_answer_is_remembered_by_its_digest
}

/// What a handler does, told by the request's header `x-how`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum HandlerBehaviour {
    Commit,
    Rollback,
    /// A statement fails after the answer was recorded, and is ignored.
    IgnoreFailedStatement,
    CompleteTwice,
    /// The answer travels with COMMIT.
    CommitWith,
    /// The same, after a statement that fails and is ignored.
    CommitWithFailed,
    Slow,
    ForgottenBefore,
}

struct TxHandlerApp<D: TestDriver> {
    pool: D::Pool,
    store: Arc<dyn Store>,
    runs: Arc<AtomicUsize>,
    marker: PhantomData<fn() -> D>,
}

impl<D: TestDriver> Clone for TxHandlerApp<D> {
    fn clone(&self) -> Self {
        Self { pool: self.pool.clone(), store: self.store.clone(), runs: self.runs.clone(), marker: PhantomData }
    }
}

async fn pay<D: TestDriver + CompletingDriver>(
    State(app): State<TxHandlerApp<D>>, Extension(claimed): Extension<HandlerClaim>, headers: HeaderMap,
) -> Response {
    let run = app.runs.fetch_add(1, SeqCst) + 1;
    let text = |name: &str| headers.get(name).map_or("", |value| value.to_str().unwrap()).to_owned();
    let how = match text("x-how").as_str() {
        "rollback" => HandlerBehaviour::Rollback,
        "swallow" => HandlerBehaviour::IgnoreFailedStatement,
        "twice" => HandlerBehaviour::CompleteTwice,
        "together" => HandlerBehaviour::CommitWith,
        "together, failed" => HandlerBehaviour::CommitWithFailed,
        "slow" => HandlerBehaviour::Slow,
        "forgotten" => HandlerBehaviour::ForgottenBefore,
        _ => HandlerBehaviour::Commit,
    };
    let mut answer = match text("x-large").as_str() {
        "" => paid_response(&format!("run {run}")),
        _ => paid_response(&"x".repeat(2 << 20)),
    };
    if let Ok(status) = text("x-record-status").parse() {
        *answer.status_mut() = status;
    }
    if how == HandlerBehaviour::ForgottenBefore {
        let lease = claimed.lease();
        let _ = app.store.admin().forget(&lease.request.address, lease.fence).await.unwrap();
    }
    let insert = format!("INSERT INTO effects VALUES ('run {run}')");
    if let Err(error) = D::completes(&app.pool, &insert, &claimed, &answer, how).await {
        let response = Response::builder().status(500).header("x-error", error.to_string().replace('\n', " "));
        return response.body(Body::from("failed")).unwrap();
    }
    match text("x-answer").as_str() {
        "panic" => panic!("planned"),
        "other" => Response::new(Body::from("something else")),
        "" => answer.map(Body::from),
        status => Response::builder().status(status).body(Body::from("another")).unwrap(),
    }
}

/// What the handlers do with a transaction of each driver.
trait CompletingDriver: TestDriver {
    fn completes(
        pool: &Self::Pool, sql: &str, claimed: &HandlerClaim, answer: &http::Response<Bytes>, how: HandlerBehaviour,
    ) -> impl Future<Output = Result<(), TestError>> + Send;
}

impl CompletingDriver for crate::support::SqlxDriver {
    async fn completes(
        pool: &Self::Pool, sql: &str, claimed: &HandlerClaim, answer: &http::Response<Bytes>, how: HandlerBehaviour,
    ) -> Result<(), TestError> {
        let mut tx = pool.begin().await?;
        Self::execute(&mut tx, sql).await?;
        if matches!(how, HandlerBehaviour::CommitWith | HandlerBehaviour::CommitWithFailed) {
            if how == HandlerBehaviour::CommitWithFailed {
                drop(Self::execute(&mut tx, "SELECT 1 / 0").await);
            }
            return Ok(commit_with(tx, claimed, answer).await?);
        }
        complete_in(&mut tx, claimed, answer).await?;
        match how {
            HandlerBehaviour::Rollback => return Ok(tx.rollback().await?),
            HandlerBehaviour::CompleteTwice => complete_in(&mut tx, claimed, answer).await?,
            HandlerBehaviour::IgnoreFailedStatement => drop(Self::execute(&mut tx, "SELECT 1 / 0").await),
            HandlerBehaviour::Slow => tokio::time::sleep(Duration::from_millis(1500)).await,
            _ => {}
        }
        Ok(tx.commit().await?)
    }
}

impl CompletingDriver for crate::support::TokioPostgresDriver {
    async fn completes(
        pool: &Self::Pool, sql: &str, claimed: &HandlerClaim, answer: &http::Response<Bytes>, how: HandlerBehaviour,
    ) -> Result<(), TestError> {
        let mut client = pool.get().await?;
        // The bare driver's, not the pool's.
        let mut tx = tokio_postgres::Client::transaction(&mut client).await?;
        tx.batch_execute(sql).await?;
        if matches!(how, HandlerBehaviour::CommitWith | HandlerBehaviour::CommitWithFailed) {
            if how == HandlerBehaviour::CommitWithFailed {
                drop(tx.batch_execute("SELECT 1 / 0").await);
            }
            return Ok(commit_with(tx, claimed, answer).await?);
        }
        complete_in(&mut tx, claimed, answer).await?;
        match how {
            HandlerBehaviour::Rollback => return Ok(tx.rollback().await?),
            HandlerBehaviour::CompleteTwice => complete_in(&mut tx, claimed, answer).await?,
            HandlerBehaviour::IgnoreFailedStatement => drop(tx.batch_execute("SELECT 1 / 0").await),
            HandlerBehaviour::Slow => tokio::time::sleep(Duration::from_millis(1500)).await,
            _ => {}
        }
        Ok(tx.commit().await?)
    }
}

struct TxLayerFixture<D: TestDriver> {
    scene: TxDatabase,
    router: Router,
    runs: Arc<AtomicUsize>,
    marker: PhantomData<D>,
}

/// What a client got.
#[derive(Debug)]
struct TxLayerResponse {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
}

impl TxLayerResponse {
    fn is_replay(&self) -> bool {
        self.headers.contains_key("idempotent-replayed")
    }

    fn is_not_stored(&self) -> bool {
        self.headers.get("idempotency-stored").is_some_and(|value| value == "false")
    }

    fn error(&self) -> &str {
        self.headers["x-error"].to_str().unwrap()
    }
}

impl<D: CompletingDriver> TxLayerFixture<D> {
    async fn new() -> Self {
        let scene = TxDatabase::new();
        let store = Arc::new(scene.store().await);
        Self::on(scene, store, Policy::ietf()).await
    }

    async fn on(scene: TxDatabase, store: Arc<dyn Store>, policy: Policy) -> Self {
        let pool = D::pool(&scene.url(), 4).await;
        let runs = Arc::new(AtomicUsize::new(0));
        let app = TxHandlerApp::<D> { pool, store: store.clone(), runs: runs.clone(), marker: PhantomData };
        let router =
            Router::new().route("/pay", post(pay::<D>)).layer(Ibid::new(store).layer(policy).unwrap()).with_state(app);
        Self { scene, router, runs, marker: PhantomData }
    }

    async fn send_request(&self, key: &str, how: &[(&str, &str)]) -> TxLayerResponse {
        let mut request = Request::post("/pay").header("host", "shop").header("authorization", "Bearer a");
        request = request.header("idempotency-key", key);
        for (name, value) in how {
            request = request.header(*name, *value);
        }
        let response = self.router.clone().oneshot(request.body(Body::from("12.50")).unwrap()).await.unwrap();
        let (parts, body) = response.into_parts();
        TxLayerResponse { status: parts.status, headers: parts.headers, body: body.collect().await.unwrap().to_bytes() }
    }

    fn runs(&self) -> usize {
        self.runs.load(SeqCst)
    }
}

async fn what_is_committed_is_answered_and_replayed<D: CompletingDriver>() {
    let stage = TxLayerFixture::<D>::new().await;
    let first = stage.send_request("k-1", &[]).await;
    assert_eq!((first.status, &first.body[..]), (StatusCode::CREATED, &b"run 1"[..]));
    assert!(!first.is_replay() && !first.is_not_stored(), "{first:?}");
    assert_eq!(first.headers["set-cookie"], "never=stored");
    let again = stage.send_request("k-1", &[]).await;
    assert!(again.is_replay() && again.status == first.status && again.body == first.body, "{again:?}");
    assert_eq!((stage.runs(), stage.scene.effects()), (1, 1));
}

async fn an_answer_that_travels_with_commit_is_committed_or_nothing_is<D: CompletingDriver>() {
    let stage = TxLayerFixture::<D>::new().await;
    for key in ["k-1", "k-2"] {
        let failed = stage.send_request(key, &[("x-how", "together, failed")]).await;
        assert_eq!(failed.status, StatusCode::INTERNAL_SERVER_ERROR, "{failed:?}");
        assert!(failed.is_not_stored() && failed.error().contains("25P02"), "{failed:?}");
        let first = stage.send_request(key, &[("x-how", "together")]).await;
        assert!(first.status == StatusCode::CREATED && !first.is_replay(), "{first:?}");
        let again = stage.send_request(key, &[("x-how", "together")]).await;
        assert!(again.is_replay() && again.body == first.body, "{again:?}");
    }
    assert_eq!((stage.runs(), stage.scene.effects()), (4, 2));
}

async fn what_is_rolled_back_is_not_answered_as_success<D: CompletingDriver>() {
    let stage = TxLayerFixture::<D>::new().await;
    let first = stage.send_request("k-1", &[("x-how", "rollback")]).await;
    assert_eq!(first.status, StatusCode::SERVICE_UNAVAILABLE, "{first:?}");
    assert!(String::from_utf8_lossy(&first.body).contains("rolled back"), "{first:?}");
    assert_eq!(stage.scene.effects(), 0);
    let again = stage.send_request("k-1", &[]).await;
    assert_eq!((again.status, &again.body[..]), (StatusCode::CREATED, &b"run 2"[..]));
    assert!(!again.is_replay());
    assert_eq!(stage.scene.effects(), 1);
}

async fn a_commit_that_silently_rolls_back_is_not_answered_as_success<D: CompletingDriver>() {
    let stage = TxLayerFixture::<D>::new().await;
    let first = stage.send_request("k-1", &[("x-how", "swallow")]).await;
    assert_eq!(first.status, StatusCode::SERVICE_UNAVAILABLE, "{first:?}");
    assert_eq!(stage.scene.effects(), 0);
    assert_eq!(stage.send_request("k-1", &[]).await.body, "run 2");
}

async fn what_was_committed_is_answered_even_if_the_handler_does_not_know<D: CompletingDriver>() {
    let stage = TxLayerFixture::<D>::new().await;
    for (nth, answer) in ["500", "502", "panic", "other", "422"].into_iter().enumerate() {
        let (key, run) = (format!("k-{answer}"), format!("run {}", nth + 1));
        let first = stage.send_request(&key, &[("x-answer", answer)]).await;
        assert_eq!((first.status, &first.body[..]), (StatusCode::CREATED, run.as_bytes()), "{answer}");
        let again = stage.send_request(&key, &[]).await;
        assert_eq!((again.status, &again.body[..]), (StatusCode::CREATED, run.as_bytes()), "{answer}");
    }
    assert_eq!((stage.runs(), stage.scene.effects()), (5, 5));
}

async fn after_a_rollback_another_answer_is_given_and_not_remembered<D: CompletingDriver>() {
    let stage = TxLayerFixture::<D>::new().await;
    for answer in ["500", "422"] {
        let key = format!("k-{answer}");
        let first = stage.send_request(&key, &[("x-how", "rollback"), ("x-answer", answer)]).await;
        assert_eq!((first.status.as_str(), &first.body[..]), (answer, &b"another"[..]));
        assert!(first.is_not_stored(), "{first:?}");
        assert_eq!(stage.send_request(&key, &[]).await.status, StatusCode::CREATED, "{answer}");
    }
    // Where the answer says that nobody knows, a rollback of this database does not say more.
    let first = stage.send_request("k-502", &[("x-how", "rollback"), ("x-answer", "502")]).await;
    assert_eq!(first.status, StatusCode::BAD_GATEWAY);
    assert_eq!(stage.send_request("k-502", &[]).await.status, StatusCode::CONFLICT, "unknown, and held");
    assert_eq!(stage.scene.effects(), 2);
}

async fn a_claim_in_another_store_cannot_be_completed<D: CompletingDriver>() {
    let stage = TxLayerFixture::<D>::on(TxDatabase::new(), Arc::new(Memory::default()), Policy::ietf()).await;
    let got = stage.send_request("k-1", &[]).await;
    assert_eq!(got.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert!(got.error().contains("not in the database of this transaction"), "{got:?}");
    assert_eq!((stage.scene.effects(), stage.scene.remembered_answers()), (0, 0));
}

async fn an_answer_is_completed_once<D: CompletingDriver>() {
    let stage = TxLayerFixture::<D>::new().await;
    let got = stage.send_request("k-1", &[("x-how", "twice")]).await;
    assert!(got.error().contains("recorded once"), "{got:?}");
    assert_eq!(stage.scene.effects(), 0);
    assert_eq!(stage.send_request("k-1", &[]).await.body, "run 2");
}

async fn an_answer_that_the_policy_does_not_remember_is_refused<D: CompletingDriver>() {
    let stage = TxLayerFixture::<D>::new().await;
    for status in ["500", "409", "502"] {
        let got = stage.send_request(&format!("k-{status}"), &[("x-record-status", status)]).await;
        assert!(got.error().contains(status), "{got:?}");
    }
    assert_eq!(stage.scene.effects(), 0);
}

async fn a_claim_that_was_forgotten_meanwhile_cannot_be_completed<D: CompletingDriver>() {
    let stage = TxLayerFixture::<D>::new().await;
    let got = stage.send_request("k-1", &[("x-how", "forgotten")]).await;
    assert_ne!(got.status, StatusCode::CREATED, "{got:?}");
    assert_eq!(stage.scene.effects(), 0);
    assert_eq!(stage.send_request("k-1", &[]).await.body, "run 2");
}

async fn a_long_transaction_outlives_its_lease<D: CompletingDriver>() {
    let scene = TxDatabase::new();
    let store = Arc::new(scene.store().await);
    let mut policy = Policy::ietf();
    policy.lease = Duration::from_millis(300);
    let stage = TxLayerFixture::<D>::on(scene, store, policy).await;
    let first = stage.send_request("k-1", &[("x-how", "slow")]).await;
    assert_eq!((first.status, &first.body[..]), (StatusCode::CREATED, &b"run 1"[..]));
    assert!(stage.send_request("k-1", &[]).await.is_replay());
    assert_eq!(stage.scene.effects(), 1);
}

async fn a_large_answer_is_remembered_by_its_digest<D: CompletingDriver>() {
    let stage = TxLayerFixture::<D>::new().await;
    let first = stage.send_request("k-1", &[("x-large", "yes")]).await;
    assert_eq!((first.status, first.body.len()), (StatusCode::CREATED, 2 << 20));
    let again = stage.send_request("k-1", &[]).await;
    assert_eq!(again.headers["idempotency-body"], "digest");
    assert!(String::from_utf8_lossy(&again.body).contains("\"length\":2097152"), "{again:?}");
    assert_eq!(stage.scene.effects(), 1);
}
