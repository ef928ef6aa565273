//! The intent guard: another key with the same values.

use ibid::{
    RefusalReason,
    fingerprint::JsonPointer,
    intent::{HeldKey, free_intent},
    observe::EngineEvent,
    policy::{IntentGuard, OnMatch, OnUnknown},
    store::{EntryInfo, EntryState},
};

use super::*;

/// Runs as the body's `do` says.
async fn act(State(app): State<LayerTestApp>, body: String) -> Response<Body> {
    let run = app.runs.fetch_add(1, SeqCst) + 1;
    let field = |name: &str| body.split(&format!("\"{name}\":\"")).nth(1).and_then(|rest| rest.split('"').next());
    match field("do") {
        Some("422") => StatusCode::UNPROCESSABLE_ENTITY.into_response(),
        Some("500") => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        Some("502") => StatusCode::BAD_GATEWAY.into_response(),
        Some("once-502") if run == 1 => StatusCode::BAD_GATEWAY.into_response(),
        Some("slow") => {
            tokio::time::sleep(Duration::from_millis(900)).await;
            StatusCode::CREATED.into_response()
        }
        _ => (StatusCode::CREATED, format!("run {run}")).into_response(),
    }
}

#[derive(Default)]
struct DuplicateCounter(Mutex<Vec<OnMatch>>);

impl Observer for DuplicateCounter {
    fn on_event(&self, event: &EngineEvent<'_>) {
        if let EngineEvent::DuplicateIntent { on_match, .. } = event {
            self.0.lock().push(*on_match);
        }
    }
}

struct GuardedApp {
    router: Router,
    app: LayerTestApp,
    store: Arc<Memory>,
    duplicates: Arc<DuplicateCounter>,
}

fn pointer(written: &str) -> JsonPointer {
    JsonPointer::parse(written).unwrap()
}

const WINDOW: Duration = Duration::from_secs(60);

fn guarded(on_match: OnMatch, change: impl FnOnce(&mut Policy)) -> GuardedApp {
    let fields = ["/order", "/amount"].map(pointer).to_vec();
    let mut policy = Policy::ietf();
    policy.guard = Some(IntentGuard { fields, window: WINDOW, on_match });
    policy.unknown_status = vec![StatusCode::BAD_GATEWAY];
    change(&mut policy);
    let (app, store, duplicates) = (LayerTestApp::default(), Arc::new(Memory::default()), Arc::default());
    let observer: Arc<DuplicateCounter> = Arc::clone(&duplicates);
    let ibid = Ibid::builder(store.clone()).observer(observer).build();
    let router = Router::new().route("/pay", post(act)).route("/refund", post(act));
    let router = router.layer(ibid.layer(policy).unwrap()).with_state(app.clone());
    GuardedApp { router, app, store, duplicates }
}

impl GuardedApp {
    async fn send(&self, key: &str, body: &str) -> (u16, String) {
        self.send_to("/pay", "Bearer a", key, body).await
    }

    async fn send_to(&self, path: &str, caller: &'static str, key: &str, body: &str) -> (u16, String) {
        let mut request = request(path, key, body);
        request.headers_mut().insert("authorization", HeaderValue::from_static(caller));
        request.headers_mut().insert("content-type", HeaderValue::from_static("application/json"));
        let response = self.router.clone().oneshot(request).await.unwrap();
        (response.status().as_u16(), text(response).await)
    }

    fn runs(&self) -> usize {
        self.app.runs.load(SeqCst)
    }

    async fn entries(&self) -> Vec<EntryInfo> {
        let listed = self.store.admin().list(&EntryFilter::default(), ListCursor::default(), 100).await.unwrap();
        listed.entries
    }

    /// The entries of keys, and those of intents.
    async fn states(&self) -> (Vec<EntryState>, Vec<EntryState>) {
        let is_intent = |entry: &EntryInfo| entry.tags.key().ends_with(" (intent)");
        let (intents, keys): (Vec<_>, Vec<_>) = self.entries().await.into_iter().partition(is_intent);
        let states = |entries: Vec<EntryInfo>| entries.iter().map(|entry| entry.state).collect();
        (states(keys), states(intents))
    }

    async fn intent_entry(&self) -> EntryInfo {
        let is_intent = |entry: &EntryInfo| entry.tags.key().ends_with(" (intent)");
        self.entries().await.into_iter().find(is_intent).expect("an intent")
    }

    async fn key_entry(&self, key: &str) -> EntryInfo {
        let filter = EntryFilter { key_hash: Some(ibid::store::key_hash(key)), ..EntryFilter::default() };
        let listed = self.store.admin().list(&filter, ListCursor::default(), 9).await.unwrap();
        listed.entries.into_iter().next().expect("the key has an entry")
    }
}

const ORDER: &str = r#"{"order":"o1","amount":5}"#;

#[tokio::test]
async fn another_key_with_the_same_values_is_refused_and_names_the_first() {
    let guarded = guarded(OnMatch::Reject, |_| {});
    assert_eq!(guarded.send("order-key-0001", ORDER).await, (201, "run 1".into()));
    let (status, body) = guarded.send("order-key-0002", r#"{"amount":5,"note":"again","order":"o1"}"#).await;
    assert_eq!(status, 409);
    assert!(body.contains("duplicate-intent") && body.contains("orde****0001"), "{body}");
    assert!(!body.contains("order-key-0001"), "{body}");
    assert_eq!(guarded.send("order-key-0001", ORDER).await, (201, "run 1".into()), "a replay never trips it");
    assert_eq!(guarded.runs(), 1);
    for (key, other) in [("x", r#"{"order":"o2","amount":5}"#), ("y", r#"{"order":"o1","amount":6}"#)] {
        assert_eq!(guarded.send(key, other).await.0, 201, "{other}");
    }
    assert_eq!(guarded.send_to("/pay", "Bearer b", "order-key-0003", ORDER).await.0, 201, "another caller");
    assert_eq!(guarded.send_to("/refund", "Bearer a", "order-key-0004", ORDER).await.0, 201, "another operation");
    for (nth, missing) in [r#"{"order":"o1"}"#, r#"{"order":null,"amount":5}"#, "[]"].into_iter().enumerate() {
        for key in ["x", "y"] {
            assert_eq!(guarded.send(&format!("{key}{nth}"), missing).await.0, 201, "{missing}");
        }
    }
    assert_eq!(*guarded.duplicates.0.lock(), [OnMatch::Reject]);
    let (status, _) = guarded.send("order-key-0002", r#"{"order":"o9","amount":5}"#).await;
    assert_eq!(status, 201, "the loser released its key");
}

#[tokio::test]
async fn the_window_counts_from_the_completion() {
    let guarded = guarded(OnMatch::Reject, |policy| {
        policy.guard.as_mut().unwrap().window = Duration::from_millis(600);
    });
    let slow = r#"{"order":"o1","amount":5,"do":"slow"}"#;
    assert_eq!(guarded.send("k1", slow).await.0, 201);
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(guarded.send("k2", ORDER).await.0, 409, "1100 ms after the start, 200 ms after the end");
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert_eq!(guarded.send("k3", ORDER).await.0, 201);
}

#[tokio::test]
async fn an_operation_that_failed_or_was_released_frees_its_intent() {
    for failure in ["422", "500"] {
        let guarded = guarded(OnMatch::Reject, |_| {});
        let failing = format!(r#"{{"order":"o1","amount":5,"do":"{failure}"}}"#);
        assert_eq!(guarded.send("k1", &failing).await.0.to_string(), failure);
        assert_eq!(guarded.send("k2", ORDER).await, (201, "run 2".into()));
        assert_eq!(guarded.send("k3", ORDER).await.0, 409);
    }
}

#[tokio::test]
async fn an_unknown_outcome_holds_key_and_intent_until_an_operator_decides() {
    let guarded = guarded(OnMatch::Reject, |_| {});
    assert_eq!(guarded.send("k1", r#"{"order":"o1","amount":5,"do":"502"}"#).await.0, 502);
    assert_eq!(guarded.send("k2", ORDER).await.0, 409);
    assert_eq!(guarded.states().await, (vec![EntryState::Unknown], vec![EntryState::Unknown]));
    let key = guarded.key_entry("k1").await;
    free_intent(&*guarded.store, &key).await.unwrap();
    let freed = guarded.store.admin().resolve(&key.address, key.fence, &Settlement::Release).await.unwrap();
    assert_eq!(freed, SettleOutcome::Applied);
    assert_eq!(guarded.send("k2", ORDER).await.0, 201);
}

#[tokio::test]
async fn a_retry_takes_over_key_and_intent() {
    let guarded = guarded(OnMatch::Reject, |policy| policy.on_unknown = OnUnknown::Retry);
    let body = r#"{"order":"o1","amount":5,"do":"once-502"}"#;
    assert_eq!(guarded.send("k1", body).await.0, 502);
    assert_eq!(guarded.send("k2", ORDER).await.0, 409);
    assert_eq!(guarded.send("k1", body).await, (201, "run 2".into()));
    assert_eq!(guarded.states().await, (vec![EntryState::Done], vec![EntryState::Done]));
    assert_eq!(guarded.send("k2", ORDER).await.0, 409);
}

#[tokio::test]
async fn heartbeats_extend_key_and_intent() {
    let guarded = Arc::new(guarded(OnMatch::Reject, |policy| policy.lease = Duration::from_millis(300)));
    let first = tokio::spawn({
        let guarded = guarded.clone();
        async move { guarded.send("k1", r#"{"order":"o1","amount":5,"do":"slow"}"#).await.0 }
    });
    tokio::time::sleep(Duration::from_millis(700)).await;
    assert_eq!(guarded.states().await, (vec![EntryState::Processing], vec![EntryState::Processing]));
    assert_eq!(guarded.send("k2", ORDER).await.0, 409);
    assert_eq!(first.await.unwrap(), 201);
}

#[tokio::test]
async fn fifty_keys_with_one_intent_run_once() {
    let guarded = Arc::new(guarded(OnMatch::Reject, |_| {}));
    let all = (0..50).map(|nth| {
        let guarded = guarded.clone();
        tokio::spawn(async move { guarded.send(&format!("k{nth}"), ORDER).await.0 })
    });
    let mut statuses = Vec::new();
    for one in all.collect::<Vec<_>>() {
        statuses.push(one.await.unwrap());
    }
    statuses.sort_unstable();
    assert_eq!((statuses[0], statuses[1], statuses[49]), (201, 409, 409));
    assert_eq!(guarded.runs(), 1);
    assert_eq!(guarded.states().await, (vec![EntryState::Done], vec![EntryState::Done]), "losers leave nothing");
}

#[tokio::test]
async fn a_held_key_is_refused_until_an_operator_releases_it() {
    for on_unknown in [OnUnknown::Hold, OnUnknown::Retry] {
        let guarded = guarded(OnMatch::Hold, |policy| {
            policy.on_unknown = on_unknown;
            policy.guard.as_mut().unwrap().window = Duration::from_millis(300);
        });
        assert_eq!(guarded.send("first-key-0001", ORDER).await.0, 201);
        let (status, body) = guarded.send("second-key-0002", ORDER).await;
        assert!(status == 409 && body.contains("held") && body.contains("firs****0001"), "{body}");
        tokio::time::sleep(Duration::from_millis(400)).await;
        let (status, body) = guarded.send("second-key-0002", ORDER).await;
        assert!(status == 409 && body.contains("duplicate-intent"), "the window is over, and it is still held: {body}");
        assert_eq!(guarded.runs(), 1);
        assert_eq!(guarded.send("third-key-0003", ORDER).await.0, 201, "the window is over for others");
        assert_eq!(guarded.send("fourth-key-0004", ORDER).await.0, 409);
        for key in ["second-key-0002", "fourth-key-0004"] {
            let key = guarded.key_entry(key).await;
            assert_eq!(key.state, EntryState::Unknown);
            let held = HeldKey::find(&*guarded.store, &key.address).await.unwrap().expect("a note");
            assert!(!held.is_permitted && held.permit(&*guarded.store, &key.address).await.unwrap());
            let freed = guarded.store.admin().resolve(&key.address, key.fence, &Settlement::Release).await.unwrap();
            assert_eq!(freed, SettleOutcome::Applied);
        }
        assert_eq!(guarded.send("second-key-0002", ORDER).await.0, 201, "an operator let it run");
        assert_eq!(guarded.send("fourth-key-0004", ORDER).await.0, 201);
        assert_eq!(guarded.send("fourth-key-0004", ORDER).await, (201, "run 4".into()), "and then it is replayed");
    }
}

#[tokio::test]
async fn duplicates_are_only_counted_on_demand() {
    let guarded = guarded(OnMatch::Count, |_| {});
    for key in ["k1", "k2", "k3"] {
        assert_eq!(guarded.send(key, ORDER).await.0, 201);
    }
    assert_eq!(guarded.runs(), 3);
    assert_eq!(*guarded.duplicates.0.lock(), [OnMatch::Count, OnMatch::Count]);
}

/// Puts the store into the state that a crash leaves: this intent was claimed, and its lease has expired.
async fn leave_intent(guarded: &GuardedApp, intent: &EntryInfo) {
    let _ = guarded.store.admin().forget(&intent.address, intent.fence).await.unwrap();
    let request = ClaimRequest {
        address: intent.address,
        token: ClaimToken::mint(),
        fingerprint: intent.fingerprint,
        tags: intent.tags.clone(),
        label: intent.label.clone(),
        lease: Duration::from_millis(1),
        ttl: Duration::from_secs(600),
        take_over: None,
    };
    assert!(matches!(guarded.store.claim(&Arc::new(request)).await.unwrap(), ClaimOutcome::Granted(_)));
    tokio::time::sleep(Duration::from_millis(5)).await;
}

#[tokio::test]
async fn a_run_that_lost_its_key_leaves_its_intent_to_the_next() {
    let guarded = Arc::new(guarded(OnMatch::Reject, |_| {}));
    let first = tokio::spawn({
        let guarded = guarded.clone();
        async move { guarded.send("k1", r#"{"order":"o1","amount":5,"do":"slow"}"#).await.0 }
    });
    tokio::time::sleep(Duration::from_millis(300)).await;
    let key = guarded.key_entry("k1").await;
    let _ = guarded.store.admin().forget(&key.address, key.fence).await.unwrap();
    let running = guarded.send("k1", ORDER).await;
    assert_eq!((running.0, running.1.contains("in-progress")), (409, true), "its intent is held: {}", running.1);
    assert_ne!(first.await.unwrap(), 201, "its claim is lost");
    assert_eq!(guarded.states().await.1, [EntryState::Unknown], "not completed");
    assert_eq!(guarded.send("k1", ORDER).await, (201, "run 2".into()), "the next run of the key takes it over");
    assert_eq!(guarded.states().await.1, [EntryState::Done]);
}

#[tokio::test]
async fn a_crash_between_the_completions_of_key_and_intent_blocks_no_longer_than_the_window() {
    let guarded = guarded(OnMatch::Reject, |policy| {
        policy.guard.as_mut().unwrap().window = Duration::from_millis(300);
    });
    assert_eq!(guarded.send("k1", ORDER).await.0, 201);
    leave_intent(&guarded, &guarded.intent_entry().await).await;
    assert_eq!(guarded.send("k1", ORDER).await, (201, "run 1".into()));
    assert_eq!(guarded.send("k2", ORDER).await.0, 409);
    assert_eq!(guarded.states().await.1, [EntryState::Done], "completed by the request that found it");
    tokio::time::sleep(Duration::from_millis(400)).await;
    assert_eq!(guarded.send("k2", ORDER).await.0, 201);
}

#[tokio::test]
async fn an_expired_intent_whose_key_is_free_or_failed_is_taken_over() {
    for fails in [false, true] {
        let guarded = guarded(OnMatch::Reject, |_| {});
        assert_eq!(guarded.send("k1", ORDER).await.0, 201);
        let (key, intent) = (guarded.key_entry("k1").await, guarded.intent_entry().await);
        let _ = guarded.store.admin().forget(&key.address, key.fence).await.unwrap();
        if fails {
            let _ = guarded.store.admin().forget(&intent.address, intent.fence).await.unwrap();
            assert_eq!(guarded.send("k1", r#"{"order":"o1","amount":5,"do":"422"}"#).await.0, 422);
        }
        leave_intent(&guarded, &intent).await;
        assert_eq!(guarded.send("k2", ORDER).await.0, 201);
        assert_eq!(guarded.send("k3", ORDER).await.0, 409);
    }
}

#[tokio::test]
async fn a_guard_on_a_form_and_on_the_arguments_of_a_tool() {
    let guarded = guarded(OnMatch::Reject, |_| {});
    for (key, expected) in [("k1", 201), ("k2", 409)] {
        let mut request = request("/pay", key, "order=o1&amount=5&try=1");
        let form = HeaderValue::from_static("application/x-www-form-urlencoded");
        request.headers_mut().insert("content-type", form);
        let response = guarded.router.clone().oneshot(request).await.unwrap();
        assert_eq!(response.status().as_u16(), expected);
    }
    async fn run_tool(State(app): State<LayerTestApp>, body: String) -> impl IntoResponse {
        app.runs.fetch_add(1, SeqCst);
        let message: serde_json::Value = serde_json::from_str(&body).unwrap();
        axum::Json(serde_json::json!({ "jsonrpc": "2.0", "id": message["id"], "result": {} }))
    }
    let mut policy = Policy::mcp();
    let fields = vec![pointer("/order")];
    policy.guard = Some(IntentGuard { fields, window: WINDOW, on_match: OnMatch::Reject });
    let (app, ibid) = (LayerTestApp::default(), Ibid::new(Arc::new(Memory::default())));
    let router = Router::new().route("/mcp", post(run_tool)).layer(ibid.layer(policy).unwrap());
    let router = router.with_state(app.clone());
    let call = async |key: &str, tool: &str| -> serde_json::Value {
        let (arguments, meta) =
            (serde_json::json!({ "order": "o1", "at": key }), serde_json::json!({ "idempotency-key": key }));
        let params = serde_json::json!({ "name": tool, "arguments": arguments, "_meta": meta });
        let message = serde_json::json!({ "jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params });
        let request = Request::post("/mcp").header("authorization", "Bearer a").header("host", "x");
        let request = request.header("content-type", "application/json").body(Body::from(message.to_string())).unwrap();
        serde_json::from_str(&text(router.clone().oneshot(request).await.unwrap()).await).unwrap()
    };
    assert!(call("k1", "pay").await["result"].is_object());
    let refused = call("k2", "pay").await;
    assert_eq!((&refused["id"], &refused["error"]["code"]), (&7.into(), &(-31018).into()), "{refused}");
    assert!(call("k3", "refund").await["result"].is_object(), "another tool");
    assert_eq!(app.runs.load(SeqCst), 2);
}

#[test]
fn a_guard_is_checked() {
    let check = |change: fn(&mut Policy)| {
        let mut policy = Policy::ietf();
        let fields = vec![pointer("/order")];
        policy.guard = Some(IntentGuard { fields, window: WINDOW, on_match: OnMatch::Reject });
        change(&mut policy);
        policy.check().map_err(|invalid| invalid.to_string())
    };
    assert_eq!(check(|_| {}), Ok(()));
    let error = |change| check(change).unwrap_err();
    assert!(error(|policy| policy.guard.as_mut().unwrap().fields.clear()).starts_with("guard.fields is empty"));
    assert!(error(|policy| policy.guard.as_mut().unwrap().window = Duration::ZERO).starts_with("guard.window is zero"));
    assert!(error(|policy| policy.ttl = Duration::from_secs(59)).contains("at most ttl"));
    assert!(error(|policy| policy.methods = vec![Method::GET, Method::DELETE]).starts_with("guard is set"));
    let mut grpc = Policy::ietf().for_grpc();
    grpc.guard = Some(IntentGuard { fields: vec![pointer("/a")], window: WINDOW, on_match: OnMatch::Count });
    assert!(grpc.check_grpc().unwrap_err().to_string().starts_with("guard is set; it reads fields of JSON"));
    assert_eq!(RefusalReason::DuplicateIntent.json_rpc_code(), -31018);
}
