//! The layer in an axum app.

mod coverage;
mod guard;
mod json_rpc;
mod memory;

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{Router, body::Body, extract::State, response::IntoResponse, routing::post};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri};
use http_body_util::BodyExt;
use ibid::{
    Ibid, Observer, Policy, RequestReport,
    http::PeerAddress,
    label::LabelText,
    policy::{OnConcurrent, PolicyMode},
    store::{
        ClaimOutcome, ClaimRequest, ClaimToken, EntryFilter, Fingerprint, ListCursor, Memory, RecordSummary,
        SettleOutcome, Settlement, Store, Tags,
    },
};
use parking_lot::Mutex;
use tower::ServiceExt;

#[derive(Clone, Default)]
struct LayerTestApp {
    runs: Arc<AtomicUsize>,
}

async fn pay(State(app): State<LayerTestApp>, body: String) -> impl IntoResponse {
    let run = app.runs.fetch_add(1, SeqCst) + 1;
    tokio::time::sleep(Duration::from_millis(20)).await;
    (StatusCode::CREATED, [("x-run", run.to_string())], format!("paid {body} in run {run}"))
}

async fn fail(State(app): State<LayerTestApp>) -> StatusCode {
    app.runs.fetch_add(1, SeqCst);
    StatusCode::INTERNAL_SERVER_ERROR
}

async fn panic_in_handler(State(app): State<LayerTestApp>) -> StatusCode {
    app.runs.fetch_add(1, SeqCst);
    panic!("planned");
}

async fn large(State(app): State<LayerTestApp>) -> Vec<u8> {
    app.runs.fetch_add(1, SeqCst);
    vec![b'x'; 3 << 20]
}

fn app(policy: Policy) -> (Router, LayerTestApp, Ibid) {
    let app = LayerTestApp::default();
    let ibid = Ibid::new(Arc::new(Memory::default()));
    let router = Router::new()
        .route("/pay", post(pay))
        .route("/fail", post(fail))
        .route("/boom", post(panic_in_handler))
        .route("/large", post(large))
        .layer(ibid.layer(policy).unwrap())
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

/// The layer remembers the fingerprints of recent requests, and must not take one for another.
#[tokio::test]
async fn a_retry_of_json_is_told_from_other_requests_in_any_order() {
    let (router, app, _) = app(Policy::ietf());
    let send = async |path: &str, body: &str, other: Option<(&'static str, &'static str)>| {
        let mut request = request(path, "k1", body);
        request.headers_mut().insert("content-type", "application/json".parse().unwrap());
        other.map(|(name, value)| request.headers_mut().insert(name, value.parse().unwrap()));
        let answer = router.clone().oneshot(request).await.unwrap();
        (answer.status(), answer.headers().contains_key("idempotent-replayed"))
    };
    let (first, reordered) = (r#"{"b":2,"a":1}"#, r#"{"a":1,"b":2}"#);
    assert_eq!(send("/pay", first, None).await, (StatusCode::CREATED, false));
    for _ in 0..3 {
        assert_eq!(send("/pay", first, None).await, (StatusCode::CREATED, true));
        assert_eq!(send("/pay", reordered, None).await, (StatusCode::CREATED, true));
        for other in [r#"{"b":2,"a":3}"#, r#"{"b":2,"a":"1"}"#, r#"{"b":2,"a":10}"#] {
            assert_eq!(send("/pay", other, None).await, (StatusCode::UNPROCESSABLE_ENTITY, false), "{other}");
            assert_eq!(send("/pay", first, None).await, (StatusCode::CREATED, true));
        }
        assert_eq!(send("/pay?x", first, None).await.0, StatusCode::UNPROCESSABLE_ENTITY);
        assert_eq!(send("/fail", first, None).await.0, StatusCode::UNPROCESSABLE_ENTITY);
        for other in [("if-match", "a"), ("content-encoding", "gzip"), ("content-type", "text/plain")] {
            let answer = send("/pay", first, Some(other)).await;
            assert_eq!(answer, (StatusCode::UNPROCESSABLE_ENTITY, false), "{other:?}");
        }
    }
    assert_eq!(app.runs.load(SeqCst), 1);
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

#[tokio::test(start_paused = true)]
async fn a_handler_that_is_late_is_refused_and_its_answer_is_remembered() {
    let mut policy = Policy::ietf();
    policy.timeout = Duration::from_millis(5);
    let (router, app, ibid) = app(policy);
    let first = router.clone().oneshot(request("/pay", "k1", "10")).await.unwrap();
    assert_eq!(first.status(), StatusCode::GATEWAY_TIMEOUT);
    let meanwhile = router.clone().oneshot(request("/pay", "k1", "10")).await.unwrap();
    assert!(text(meanwhile).await.contains("#in-progress"));
    ibid.drained().await;
    let again = router.oneshot(request("/pay", "k1", "10")).await.unwrap();
    assert_eq!(
        (again.status(), &again.headers()["idempotent-replayed"]),
        (StatusCode::CREATED, &"true".parse().unwrap())
    );
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
async fn a_handler_that_panics_before_there_is_a_future_leaves_the_outcome_unknown() {
    let ibid = Ibid::new(Arc::new(Memory::default()));
    let service = tower::service_fn(|_: Request<ibid::http::RequestBody<Body>>| {
        if true {
            panic!("planned");
        }
        std::future::ready(Ok::<_, std::convert::Infallible>(Response::new(Body::empty())))
    });
    let service = tower_layer::Layer::layer(&ibid.layer(Policy::ietf()).unwrap(), service);
    let first = service.clone().oneshot(request("/boom", "k1", "")).await.unwrap();
    assert_eq!(first.status(), StatusCode::INTERNAL_SERVER_ERROR);
    let again = service.oneshot(request("/boom", "k1", "")).await.unwrap();
    assert_eq!(again.status(), StatusCode::CONFLICT);
}

#[tokio::test]
async fn the_app_cannot_speak_for_the_layer() {
    async fn send_ibid_headers() -> impl IntoResponse {
        let lies = [
            ("idempotency-stored", "false"),
            ("idempotency-guarantee", "degraded"),
            ("idempotency-body", "digest"),
            ("idempotent-replayed", "true"),
            ("ibid-fence", "7"),
            ("x-other", "1"),
        ];
        (StatusCode::CREATED, lies, "paid")
    }
    let mut shadow = Policy::ietf();
    shadow.mode = PolicyMode::Shadow;
    for (policy, is_removed) in [(Policy::ietf(), true), (shadow, false)] {
        let ibid = Ibid::new(Arc::new(Memory::default()));
        let router = Router::new().route("/pay", post(send_ibid_headers)).layer(ibid.layer(policy).unwrap());
        let mut keyless = request("/pay", "k1", "10");
        keyless.headers_mut().remove("idempotency-key");
        let keyless = router.clone().oneshot(keyless).await.unwrap();
        let first = router.clone().oneshot(request("/pay", "k1", "10")).await.unwrap();
        for answer in [&keyless, &first] {
            assert_eq!(answer.headers()["x-other"], "1");
            for name in
                ["idempotency-stored", "idempotency-guarantee", "idempotency-body", "idempotent-replayed", "ibid-fence"]
            {
                assert_eq!(!answer.headers().contains_key(name), is_removed, "{name}: {answer:?}");
            }
        }
        let again = router.oneshot(request("/pay", "k1", "10")).await.unwrap();
        if is_removed {
            assert_eq!(again.headers()["idempotent-replayed"], "true");
            for name in ["idempotency-stored", "idempotency-guarantee", "idempotency-body", "ibid-fence"] {
                assert!(!again.headers().contains_key(name), "{name}: {again:?}");
            }
        }
    }
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
fn github_delivery(path: &str, id: &str, body: &str) -> Request<Body> {
    let signature = "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17";
    let request = Request::post(path).header("x-github-delivery", id).header("x-hub-signature-256", signature);
    request.body(Body::from(body.to_owned())).unwrap()
}

#[tokio::test]
async fn a_forged_webhook_does_not_use_up_the_id_of_a_genuine_one() {
    let policy = Policy::webhook(ibid::webhook::WebhookScheme::GitHub, ["It's a Secret to Everybody"]).unwrap();
    let (router, app, _) = app(policy);
    for forged in ["Hello, World?", "", "Hello, World! "] {
        let answer = router.clone().oneshot(github_delivery("/pay", "72d3162e", forged)).await.unwrap();
        assert_eq!(answer.status(), StatusCode::UNAUTHORIZED);
    }
    assert_eq!(app.runs.load(SeqCst), 0);
    for _ in 0..3 {
        let answer = router.clone().oneshot(github_delivery("/pay", "72d3162e", "Hello, World!")).await.unwrap();
        assert_eq!((answer.status(), answer.headers()["x-run"].to_str().unwrap()), (StatusCode::CREATED, "1"));
    }
    // A failure is not remembered.
    for _ in 0..2 {
        let answer = router.clone().oneshot(github_delivery("/fail", "72d3162e", "Hello, World!")).await.unwrap();
        assert_eq!(answer.status(), StatusCode::INTERNAL_SERVER_ERROR);
    }
    assert_eq!(app.runs.load(SeqCst), 3);
}

#[test]
fn a_policy_that_contradicts_itself_makes_no_layer() {
    let ibid = Ibid::new(Arc::new(Memory::default()));
    let why = |policy: Policy| ibid.layer(policy).unwrap_err().to_string();
    let with = |turn: fn(&mut Policy)| {
        let mut policy = Policy::ietf();
        turn(&mut policy);
        policy
    };
    let forgotten = Policy::preset("webhook:github").unwrap();
    assert!(why(forgotten).starts_with("secrets is missing"), "a policy whose secrets were forgotten");
    assert!(why(with(|policy| policy.lease = Duration::ZERO)).starts_with("lease is zero"));
    assert!(why(with(|policy| policy.wait_timeout = Duration::MAX)).starts_with("wait_timeout is"));
    assert!(why(with(|policy| policy.ttl = Duration::MAX)).starts_with("ttl is"));
    let unary = ibid::grpc::UnaryMethods::methods(["shop.Orders/Create"]);
    let no_call = with(|policy| policy.resolve = Some("GET /a".parse().unwrap()));
    assert!(ibid.grpc_layer(unary, no_call).unwrap_err().to_string().starts_with("resolve is"));
}

#[tokio::test]
async fn the_longest_durations_are_waited_for_and_not_panicked_about() {
    let century = Duration::from_secs(100 * 366 * 24 * 3600);
    let mut policy = Policy::ietf();
    policy.on_concurrent = OnConcurrent::Wait;
    (policy.wait_timeout, policy.timeout, policy.ttl, policy.lease) = (century, century, century, century);
    let (router, app, _) = app(policy);
    let send = || router.clone().oneshot(request("/pay", "k1", "10"));
    let (first, second) = tokio::join!(send(), send());
    assert_eq!((first.unwrap().status(), second.unwrap().status()), (StatusCode::CREATED, StatusCode::CREATED));
    assert_eq!(app.runs.load(SeqCst), 1);
}

/// Puts what is recorded at the only address that there is under another fingerprint, as if another version had recorded
/// it.
async fn replace_fingerprint(store: &dyn Store, fingerprint: Fingerprint) {
    let all = store.admin().list(&Default::default(), Default::default(), 10).await.unwrap().entries;
    let [entry] = &all[..] else { panic!("{all:?}") };
    let Some(ClaimOutcome::Completed(finished)) = store.get(&entry.address).await.unwrap() else { panic!("not done") };
    let _: SettleOutcome = store.admin().forget(&entry.address, entry.fence).await.unwrap();
    let ask = ClaimRequest {
        address: entry.address,
        token: ClaimToken::mint(),
        fingerprint,
        tags: Tags::default(),
        label: Bytes::new(),
        lease: Duration::from_secs(30),
        ttl: Duration::from_secs(60),
        take_over: None,
    };
    let ClaimOutcome::Granted(lease) = store.claim(&Arc::new(ask)).await.unwrap() else { panic!("not free") };
    let outline = RecordSummary::default();
    let end =
        Settlement::Complete { failed: false, record: finished.record, summary: outline, ttl: Duration::from_secs(60) };
    assert_eq!(store.settle(&lease, &end).await.unwrap(), SettleOutcome::Applied);
}

fn fingerprint_v1(policy: &Policy, body: &str) -> Fingerprint {
    let (uri, headers) = (Uri::from_static("/pay"), HeaderMap::new());
    Fingerprint::of_version(1, policy, &Method::POST, &uri, &headers, body.as_bytes()).unwrap()
}

#[tokio::test]
async fn what_an_older_version_recorded_is_compared_by_its_rules() {
    let policy = Policy::ietf();
    let (router, app, ibid) = app(policy.clone());
    let store = ibid.engine().store().clone();
    let send = |body: &'static str| router.clone().oneshot(request("/pay", "k1", body));
    assert_eq!(send("10").await.unwrap().status(), StatusCode::CREATED);

    replace_fingerprint(&*store, fingerprint_v1(&policy, "10")).await;
    let retry = send("10").await.unwrap();
    assert_eq!(
        (retry.status(), &retry.headers()["idempotent-replayed"]),
        (StatusCode::CREATED, &"true".parse().unwrap())
    );
    assert_eq!(send("11").await.unwrap().status(), StatusCode::UNPROCESSABLE_ENTITY, "another request");

    let unknown = Fingerprint { version: 99, digest: [7; 32] };
    replace_fingerprint(&*store, unknown).await;
    let refused = send("10").await.unwrap();
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE, "nobody can compare it");
    assert!(text(refused).await.contains("store-unavailable"));
    assert_eq!(app.runs.load(SeqCst), 1);
}

/// Forgets the only key that runs, once there is one.
async fn forget_running(store: &dyn Store) {
    loop {
        let all = store.admin().list(&Default::default(), Default::default(), 10).await.unwrap().entries;
        if let Some(entry) = all.iter().find(|entry| entry.state == ibid::store::EntryState::Processing) {
            let _: SettleOutcome = store.admin().forget(&entry.address, entry.fence).await.unwrap();
            return;
        }
        tokio::task::yield_now().await;
    }
}

/// The statuses that a client in shadow mode gets for two requests with one key, of an app that answers so, while an
/// operator forgets every key that is running.
async fn in_shadow_mode(path: &str, forgets: bool) -> [StatusCode; 2] {
    let mut policy = Policy::ietf();
    policy.mode = ibid::policy::PolicyMode::Shadow;
    let ibid = Ibid::new(Arc::new(Memory::default()));
    let store = ibid.engine().store().clone();
    let handler = move |status: StatusCode| {
        let store = store.clone();
        async move {
            if forgets {
                forget_running(&*store).await;
            }
            status
        }
    };
    let (ok, failed) = (handler.clone(), handler);
    let router = Router::new()
        .route("/ok", post(move || ok(StatusCode::CREATED)))
        .route("/failed", post(move || failed(StatusCode::INTERNAL_SERVER_ERROR)))
        .layer(ibid.layer(policy).unwrap());
    let mut statuses = [StatusCode::OK; 2];
    for status in &mut statuses {
        let answer = router.clone().oneshot(request(path, "k1", "10")).await.unwrap();
        *status = answer.status();
        assert_eq!(answer.headers().keys().filter(|name| name.as_str().starts_with("idempot")).count(), 0);
        assert_eq!(text(answer).await, "");
        ibid.drained().await;
    }
    statuses
}

#[tokio::test]
async fn in_shadow_mode_the_client_gets_what_the_app_says_whatever_becomes_of_the_key() {
    for forgets in [false, true] {
        assert_eq!(in_shadow_mode("/ok", forgets).await, [StatusCode::CREATED; 2]);
        assert_eq!(in_shadow_mode("/failed", forgets).await, [StatusCode::INTERNAL_SERVER_ERROR; 2]);
    }
}

/// Keys, client addresses and request ids of what was answered.
#[derive(Default)]
struct RequestReports(Mutex<Vec<(String, String, String)>>);

impl Observer for RequestReports {
    fn on_request(&self, request: &RequestReport<'_>) {
        let peer = request.client_address.map(|peer| peer.to_string()).unwrap_or_default();
        self.0.lock().push((request.key.into(), peer, request.request_id.into()));
    }
}

#[tokio::test]
async fn an_observer_that_is_not_active_gets_no_reports() {
    #[derive(Default)]
    struct InactiveObserver(RequestReports);
    impl Observer for InactiveObserver {
        fn is_active(&self) -> bool {
            false
        }
        fn on_request(&self, request: &RequestReport<'_>) {
            self.0.on_request(request);
        }
    }
    let observer = Arc::new(InactiveObserver::default());
    let ibid = Ibid::builder(Arc::new(Memory::default())).observer(observer.clone()).build();
    let router = Router::new().route("/pay", post(|| async { "paid" })).layer(ibid.layer(Policy::ietf()).unwrap());
    for _ in 0..2 {
        assert_eq!(text(router.clone().oneshot(request("/pay", "k1", "10")).await.unwrap()).await, "paid");
    }
    assert!(observer.0.0.lock().is_empty());
}

/// An app that answers with the id of the request as it got it.
fn app_naming_requests(policy: Policy) -> (Router, Arc<RequestReports>) {
    app_naming_requests_on(Arc::new(Memory::default()), policy)
}

fn app_naming_requests_on(store: Arc<dyn Store>, policy: Policy) -> (Router, Arc<RequestReports>) {
    let told = Arc::new(RequestReports::default());
    let ibid = Ibid::builder(store).observer(told.clone()).build();
    let name = |headers: HeaderMap| async move {
        let ids: Vec<_> = headers.get_all("x-request-id").iter().map(|id| id.to_str().unwrap().to_owned()).collect();
        ids.join(" and ")
    };
    (Router::new().route("/pay", post(name)).layer(ibid.layer(policy).unwrap()), told)
}

#[tokio::test]
async fn an_invalid_key_is_masked_in_the_refusal_and_for_observers() {
    let mut from_body = Policy::ietf();
    from_body.key.from = vec!["json:/key".parse().unwrap()];
    from_body.key.format = "uuid".parse().unwrap();
    let uuid1 = "550e8400-e29b-11d4-a716-446655440000";
    let in_body = format!("{{\"key\":\"{uuid1}x\"}}");
    for (policy, key, body, masked) in [
        (Policy::leads(), uuid1, "", "550e****0000"),
        (Policy::leads(), "\"550e8400 e29b 0000\"", "", "550e****0000"),
        (Policy::leads(), "550e8400-é-0000", "", "550e****0000"),
        (Policy::leads(), "short", "", "****"),
        (from_body, "", in_body.as_str(), "550e****000x"),
    ] {
        let (router, told) = app_naming_requests(policy);
        let mut request = Request::post("/pay").header("host", "x").header("content-type", "application/json");
        if !key.is_empty() {
            request = request.header("x-idempotency-key", HeaderValue::from_bytes(key.as_bytes()).unwrap());
        }
        let answer = router.oneshot(request.body(Body::from(body.to_owned())).unwrap()).await.unwrap();
        assert_eq!(answer.status(), StatusCode::BAD_REQUEST, "{key}{body}");
        let problem: serde_json::Value = serde_json::from_str(&text(answer).await).unwrap();
        assert_eq!(problem["key"], masked, "{key}{body}: {problem}");
        assert_eq!(told.0.lock()[0].0, masked, "{key}{body}");
    }
}

#[tokio::test]
async fn a_valid_request_id_is_kept_and_another_is_made() {
    let mut policy = Policy::membership();
    policy.scope = vec!["global".parse().unwrap()];
    let (router, told) = app_naming_requests(policy);
    let (longest, too_long) = ("x".repeat(128), "x".repeat(129));
    let sent: [(&[&str], bool); 6] = [
        (&["req-1"], true),
        (&[&longest], true),
        (&[&too_long], false),
        (&["with space"], false),
        (&["req-1", "req-2"], false),
        (&[], false),
    ];
    for (nth, (ids, kept)) in sent.into_iter().enumerate() {
        for with_key in [true, false] {
            let mut request = request("/pay", &format!("a-key-of-this-case-{nth}"), "");
            if !with_key {
                request.headers_mut().remove("idempotency-key");
            }
            for id in ids {
                request.headers_mut().append("x-request-id", id.parse().unwrap());
            }
            let answer = router.clone().oneshot(request).await.unwrap();
            let answered = answer.headers().get("x-request-id").map(|id| id.to_str().unwrap().to_owned());
            let got = text(answer).await;
            let (_, _, logged) = told.0.lock().last().unwrap().clone();
            assert_eq!(got, logged, "the app has the same id, and one");
            assert_eq!(got == *ids.first().unwrap_or(&""), kept, "{ids:?} became {got}");
            assert!(kept || got.len() == 36, "{got}");
            if with_key {
                assert_eq!(answered.as_deref(), Some(got.as_str()), "the preset says so in its answers");
            }
        }
    }
}

#[tokio::test]
async fn a_header_that_the_key_comes_from_reaches_the_app_as_it_was_sent() {
    let mut policy = Policy::ietf();
    policy.key.from = vec!["header:X-Request-Id".parse().unwrap()];
    let (router, _) = app_naming_requests(policy);
    let long = "x".repeat(200);
    let mut request = request("/pay", "unused", "");
    request.headers_mut().insert("x-request-id", long.parse().unwrap());
    assert_eq!(text(router.oneshot(request).await.unwrap()).await, long);
}

#[tokio::test]
async fn the_client_is_found_behind_trusted_proxies() {
    let store: Arc<dyn Store> = Arc::new(Memory::default());
    let (router, told) = app_naming_requests_on(store.clone(), Policy::ietf());
    for (peer, chain, client) in
        [("127.0.0.1", "198.51.100.9, 203.0.113.7", "203.0.113.7"), ("192.0.2.4", "203.0.113.7", "192.0.2.4")]
    {
        let mut request = request("/pay", "k1", "");
        request.headers_mut().insert("x-forwarded-for", chain.parse().unwrap());
        request.extensions_mut().insert(PeerAddress(peer.parse().unwrap()));
        let _ = router.clone().oneshot(request).await.unwrap();
        assert_eq!(told.0.lock().last().unwrap().1, client);
    }
    let page = store.admin().list(&EntryFilter::default(), ListCursor::default(), 9).await.unwrap();
    let record = LabelText::decode(&page.entries[0].label).unwrap();
    assert_eq!(record.peer, "203.0.113.7", "the first");
}

#[tokio::test]
async fn large_answers_are_compressed_in_the_store_and_read_by_everybody() {
    let store: Arc<dyn Store> = Arc::new(Memory::default());
    let runs = Arc::new(AtomicUsize::new(0));
    let routers = [true, false].map(|compress| {
        let (ibid, runs) = (Ibid::builder(store.clone()).compress(compress).build(), runs.clone());
        let report = move || {
            let run = runs.fetch_add(1, SeqCst);
            async move { format!("{run} {}", "{\"id\":17,\"paid\":true}".repeat(400)) }
        };
        Router::new().route("/report", post(report)).layer(ibid.layer(Policy::ietf()).unwrap())
    });
    for (by, key) in [(0, "compressed-1"), (1, "plain-key-2")] {
        let first = text(routers[by].clone().oneshot(request("/report", key, "")).await.unwrap()).await;
        for router in &routers {
            let again = router.clone().oneshot(request("/report", key, "")).await.unwrap();
            assert_eq!(again.headers()["idempotent-replayed"], "true");
            assert_eq!(text(again).await, first);
        }
    }
    let page = store.admin().list(&EntryFilter::default(), ListCursor::default(), 9).await.unwrap();
    let mut sizes = Vec::new();
    for entry in &page.entries {
        let Some(ClaimOutcome::Completed(done)) = store.get(&entry.address).await.unwrap() else { panic!("{entry:?}") };
        sizes.push((entry.tags.key().to_owned(), done.record.len()));
    }
    sizes.sort_by_key(|(_, size)| *size);
    assert!(sizes[0].0 == "comp****ed-1" && sizes[0].1 < 1000, "{sizes:?}");
    assert!(sizes[1].1 > 8000, "{sizes:?}");
}
