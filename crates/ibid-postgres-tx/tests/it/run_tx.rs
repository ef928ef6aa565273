//! What is run once and remembered, between this crate and the store.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};

use bytes::Bytes;
use http::StatusCode;
use ibid::{
    Ibid, Policy, Scope,
    key::KeyFormat,
    policy::OnMismatch,
    record::{Record, RecordBody},
    scope::{Credentials, ScopeInput, ScopePart, TrustedProxies},
    store::{ClaimOutcome, ClaimRequest, ClaimToken, EntryState, Fingerprint, RecordSummary, Settlement, Store, Tags},
};
use ibid_postgres_tx::{IdempotentCall, TxError, TxOutcome};
use tower::ServiceExt as _;

use crate::support::{
    TestDriver, TestError, TxDatabase, call, paid_response, patient_policy, retrying_policy, run, scope,
    with_both_drivers,
};

with_both_drivers! {
    the_first_call_runs_and_the_next_replays
    the_store_replays_what_a_transaction_remembered
    a_transaction_replays_what_the_store_remembered
    another_request_with_the_same_key_is_refused
    an_operation_that_fails_leaves_nothing_behind
    a_panic_leaves_nothing_behind
    who_runs_elsewhere_is_waited_for
    what_is_unknown_is_held_or_taken_over_as_the_policy_says
    a_bad_key_is_refused_before_anything_is_asked
    an_operator_sees_who_asked_for_what
    a_uuid_is_one_key_in_any_case_by_every_way_in
}

async fn the_first_call_runs_and_the_next_replays<D: TestDriver>() {
    let scene = TxDatabase::new();
    let pool = D::pool(&scene.url(), 2).await;
    let pay = || run_tx_paying::<D>(&pool, &scene, "k-1");
    let TxOutcome::Executed(first) = pay().await.unwrap() else { panic!("nobody was there before") };
    assert_eq!(first.headers()["set-cookie"], "never=stored", "the first caller gets all of it");
    for _ in 0..2 {
        let TxOutcome::Replayed(record) = pay().await.unwrap() else { panic!("it was done before") };
        assert_eq!(record.status, StatusCode::CREATED);
        assert_eq!(record.body, RecordBody::Whole(first.body().clone()));
        assert_eq!(record.headers["content-type"], "text/plain");
        assert!(!record.headers.contains_key("set-cookie"));
    }
    assert_eq!(scene.effects(), 1);
    let again = pay().await.unwrap();
    assert!(again.is_replay());
    let again = again.into_response();
    assert_eq!((again.status(), again.body()), (StatusCode::CREATED, first.body()));
}

async fn run_tx_paying<D: TestDriver>(pool: &D::Pool, _: &TxDatabase, key: &str) -> Result<TxOutcome, TxError> {
    let insert = format!("INSERT INTO effects VALUES ('{key}')");
    let insert = &insert;
    run::<D, _, _>(pool, patient_policy(), call(key), |tx| {
        let insert = insert.clone();
        Box::pin(async move {
            D::execute(tx, &insert).await?;
            Ok::<_, TestError>(paid_response("paid"))
        })
    })
    .await
}

async fn the_store_replays_what_a_transaction_remembered<D: TestDriver>() {
    let scene = TxDatabase::new();
    let pool = D::pool(&scene.url(), 2).await;
    assert!(!run_tx_paying::<D>(&pool, &scene, "k-1").await.unwrap().is_replay());
    let store = scene.store().await;
    let ClaimOutcome::Completed(done) = store.claim(&gateway_request("k-1")).await.unwrap() else {
        panic!("it is done")
    };
    assert_eq!(done.fingerprint, Fingerprint::of_bytes(b"12.50 EUR"));
    assert!(!done.failed && done.attempt == 1 && done.fence.0 > 0);
    assert!(done.expires_in > Policy::ietf().ttl - Duration::from_secs(600));
    let record = Record::decode(done.record).unwrap();
    assert_eq!(record.body, RecordBody::Whole(Bytes::from_static(b"paid")));
    assert!(record.completed_at_ms >= record.requested_at_ms && record.requested_at_ms > 0);
}

async fn a_transaction_replays_what_the_store_remembered<D: TestDriver>() {
    let scene = TxDatabase::new();
    let (pool, store) = (D::pool(&scene.url(), 2).await, scene.store().await);
    let ClaimOutcome::Granted(lease) = store.claim(&gateway_request("k-1")).await.unwrap() else {
        panic!("nobody is there")
    };
    let record = Record {
        status: StatusCode::ACCEPTED,
        requested_at_ms: 1000,
        completed_at_ms: 2000,
        headers: [(http::header::LOCATION, "/payments/1".parse().unwrap())].into_iter().collect(),
        body: RecordBody::Whole(Bytes::from_static(b"\0by a gateway")),
        trailers: http::HeaderMap::new(),
        cookies: Vec::new(),
    };
    let outline =
        RecordSummary { status: 202, requested_at_ms: 1000, completed_at_ms: 2000, took: Duration::from_secs(1) };
    let end = Settlement::Complete {
        failed: false,
        record: record.encode(),
        summary: outline,
        ttl: Duration::from_secs(600),
    };
    let _ = store.settle(&lease, &end).await.unwrap();
    let TxOutcome::Replayed(replayed) = run_tx_paying::<D>(&pool, &scene, "k-1").await.unwrap() else {
        panic!("it was done before")
    };
    assert_eq!(replayed, record);
    assert_eq!(scene.effects(), 0);
}

async fn another_request_with_the_same_key_is_refused<D: TestDriver>() {
    let scene = TxDatabase::new();
    let pool = D::pool(&scene.url(), 2).await;
    assert!(!run_tx_paying::<D>(&pool, &scene, "k-1").await.unwrap().is_replay());
    let other = call("k-1").request(b"99.00 EUR");
    let ran = run::<D, _, _>(&pool, patient_policy(), other.clone(), |_| {
        Box::pin(async { Err::<_, TestError>("it runs".into()) })
    })
    .await;
    let error = ran.unwrap_err();
    assert!(matches!(error, TxError::KeyReused) && !error.may_retry(), "{error:?}");
    // Unless each request has an entry of its own.
    let mut policy = patient_policy();
    policy.on_mismatch = OnMismatch::New;
    let ran = run::<D, _, _>(&pool, policy, other, |_| Box::pin(async { Ok::<_, TestError>(paid_response("other")) }))
        .await
        .unwrap();
    assert!(!ran.is_replay());
    assert_eq!(scene.effects(), 1);
}

async fn an_operation_that_fails_leaves_nothing_behind<D: TestDriver>() {
    let scene = TxDatabase::new();
    let pool = D::pool(&scene.url(), 2).await;
    let ran = run::<D, _, _>(&pool, patient_policy(), call("k-1"), |tx| {
        Box::pin(async move {
            D::execute(tx, "INSERT INTO effects VALUES ('half')").await?;
            Err(TestError::from("no money"))
        })
    });
    let error = ran.await.unwrap_err();
    assert!(matches!(&error, TxError::Failed(why) if why.to_string() == "no money"), "{error:?}");
    assert!(error.may_retry());
    assert_eq!((scene.effects(), scene.remembered_answers()), (0, 0));
    assert!(!run_tx_paying::<D>(&pool, &scene, "k-1").await.unwrap().is_replay(), "so it may run now");
}

async fn a_panic_leaves_nothing_behind<D: TestDriver>() {
    let scene = TxDatabase::new();
    let pool = D::pool(&scene.url(), 2).await;
    let same = pool.clone();
    let task = tokio::spawn(async move {
        run::<D, _, _>(&same, patient_policy(), call("k-1"), |tx| {
            Box::pin(async move {
                D::execute(tx, "INSERT INTO effects VALUES ('half')").await?;
                if true {
                    panic!("planned");
                }
                Ok::<_, TestError>(paid_response("never"))
            })
        })
        .await
    });
    assert!(task.await.unwrap_err().is_panic());
    assert!(!run_tx_paying::<D>(&pool, &scene, "k-1").await.unwrap().is_replay());
    assert_eq!(scene.sql("SELECT string_agg(what, ',') FROM effects"), "k-1");
}

async fn who_runs_elsewhere_is_waited_for<D: TestDriver>() {
    let scene = TxDatabase::new();
    let (pool, store) = (D::pool(&scene.url(), 2).await, Arc::new(scene.store().await));
    let ClaimOutcome::Granted(lease) = store.claim(&gateway_request("k-1")).await.unwrap() else {
        panic!("nobody is there")
    };
    let refused = run::<D, _, _>(&pool, Policy::ietf(), call("k-1"), |_| {
        Box::pin(async { Err::<_, TestError>("it runs".into()) })
    });
    let error = refused.await.unwrap_err();
    assert!(matches!(error, TxError::InProgress) && error.may_retry(), "{error:?}");
    let same = store.clone();
    let ends = tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(300)).await;
        same.settle(&lease, &Settlement::Release).await.unwrap()
    });
    assert!(!run_tx_paying::<D>(&pool, &scene, "k-1").await.unwrap().is_replay(), "released, so it runs");
    let _ = ends.await.unwrap();
    assert_eq!(scene.effects(), 1);
}

async fn what_is_unknown_is_held_or_taken_over_as_the_policy_says<D: TestDriver>() {
    let scene = TxDatabase::new();
    let (pool, store) = (D::pool(&scene.url(), 2).await, scene.store().await);
    let ClaimOutcome::Granted(lease) = store.claim(&gateway_request("k-1")).await.unwrap() else {
        panic!("nobody is there")
    };
    let park = Settlement::Park { ttl: Duration::from_secs(600), retry_in: Duration::ZERO };
    let _ = store.settle(&lease, &park).await.unwrap();
    let error = run_tx_paying::<D>(&pool, &scene, "k-1").await.unwrap_err();
    assert!(matches!(error, TxError::OutcomeUnknown) && !error.may_retry(), "{error:?}");
    // Another request must not take it over.
    let other = call("k-1").request(b"99.00 EUR");
    let ran = run::<D, _, _>(&pool, retrying_policy(), other, |_| {
        Box::pin(async { Ok::<_, TestError>(paid_response("other")) })
    })
    .await;
    assert!(matches!(ran.unwrap_err(), TxError::KeyReused));
    let runs = AtomicU32::new(0);
    let ran = run::<D, _, _>(&pool, retrying_policy(), call("k-1"), |_| {
        runs.fetch_add(1, SeqCst);
        Box::pin(async { Ok::<_, TestError>(paid_response("second")) })
    });
    assert!(!ran.await.unwrap().is_replay());
    assert_eq!(runs.into_inner(), 1);
    let ClaimOutcome::Completed(done) = store.claim(&gateway_request("k-1")).await.unwrap() else {
        panic!("it is done")
    };
    assert_eq!(done.attempt, 2);
    assert!(done.fence > lease.fence);
}

async fn a_bad_key_is_refused_before_anything_is_asked<D: TestDriver>() {
    // Nobody listens there.
    let pool = D::pool("postgres://gateway@127.0.0.1:1/none", 1).await;
    for key in ["", &"k".repeat(256), "a b", "\u{e9}"] {
        let ran = run::<D, _, _>(&pool, patient_policy(), call(key), |_| {
            Box::pin(async { Ok::<_, TestError>(paid_response("never")) })
        })
        .await;
        assert!(matches!(ran.unwrap_err(), TxError::KeyInvalid(_)), "{key:?}");
    }
}

async fn an_operator_sees_who_asked_for_what<D: TestDriver>() {
    let scene = TxDatabase::new();
    let (pool, store) = (D::pool(&scene.url(), 2).await, scene.store().await);
    let strange = call("order-key-0000017").user("zero\0byte");
    let ran = run::<D, _, _>(&pool, patient_policy(), strange, |_| {
        Box::pin(async { Ok::<_, TestError>(paid_response("paid")) })
    })
    .await;
    assert!(!ran.unwrap().is_replay());
    let page = store.admin().list(&Default::default(), Default::default(), 10).await.unwrap();
    let [entry] = &page.entries[..] else { panic!("{page:?}") };
    assert_eq!(entry.state, EntryState::Done);
    let tags = &entry.tags;
    assert_eq!(
        (tags.tenant(), tags.user(), tags.endpoint(), tags.key()),
        ("acme", "zero\u{2400}byte", "POST /payments", "orde****0017")
    );
    assert_eq!(entry.summary.unwrap().status, 201);
}

async fn a_uuid_is_one_key_in_any_case_by_every_way_in<D: TestDriver>() {
    const UPPER: &str = "550E8400-E29B-41D4-A716-446655440000";
    let scene = TxDatabase::new();
    let (pool, store): (_, Arc<dyn Store>) = (D::pool(&scene.url(), 2).await, Arc::new(scene.store().await));
    let mut policy = patient_policy();
    (policy.key.format, policy.scope) = (KeyFormat::Uuid, vec![ScopePart::Global]);
    (policy.fingerprint, policy.on_mismatch) = (Vec::new(), OnMismatch::Ignore);
    let caller = ScopeInput {
        method: &http::Method::POST,
        uri: &http::Uri::from_static("/pay"),
        headers: &http::HeaderMap::new(),
        peer: None,
        identity: None,
        route: "",
        trusted: &TrustedProxies::loopback(),
        credentials: &Credentials::default(),
    };
    let scope = Scope::of(&policy.scope, &caller).unwrap();
    let in_a_transaction = |key: String| {
        let call = IdempotentCall::new(&scope, key);
        run::<D, _, _>(&pool, policy.clone(), call, |tx| {
            Box::pin(async move {
                D::execute(tx, "INSERT INTO effects VALUES ('run_tx')").await?;
                Ok::<_, TestError>(paid_response("paid"))
            })
        })
    };
    assert!(!in_a_transaction(UPPER.into()).await.unwrap().is_replay());
    assert!(in_a_transaction(UPPER.to_lowercase()).await.unwrap().is_replay());
    for key in [UPPER.to_owned(), UPPER.to_lowercase()] {
        let never = |_| async { Err::<Bytes, _>("it ran again") };
        let ran = ibid::run(&store, &policy, key.clone(), &scope, never).await.unwrap();
        assert!(matches!(ran, ibid::RunResult::Replayed(_)), "{ran:?}");
        let app = axum::Router::new().route("/pay", axum::routing::post(|| async { "it ran again" }));
        let app = app.layer(Ibid::new(store.clone()).layer(policy.clone()).unwrap());
        let request = http::Request::post("/pay").header("idempotency-key", key);
        let answer = app.oneshot(request.body(axum::body::Body::empty()).unwrap()).await.unwrap();
        assert_eq!(
            (answer.status(), &answer.headers()["idempotent-replayed"]),
            (StatusCode::CREATED, &"true".parse().unwrap())
        );
    }
    assert_eq!((scene.effects(), scene.remembered_answers()), (1, 1));
}

/// As a gateway would ask for the same.
fn gateway_request(key: &str) -> Arc<ClaimRequest> {
    Arc::new(ClaimRequest {
        address: scope().address(key, None, None),
        token: ClaimToken::mint(),
        fingerprint: Fingerprint::of_bytes(b"12.50 EUR"),
        tags: Tags::new("acme", "u1", "POST /payments", key),
        label: Bytes::new(),
        lease: Duration::from_secs(600),
        ttl: Duration::from_secs(600),
        take_over: None,
    })
}
