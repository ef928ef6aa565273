//! BEGIN travels with the claim and COMMIT with the answer: what that saves, and what it must not break.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};

use bytes::Bytes;
use ibid::{
    Policy,
    inbox::InboxEvent,
    store::{ClaimOutcome, ClaimRequest, ClaimToken, Fingerprint, Store, Tags},
};
use ibid_postgres_tx::{
    TxError,
    inbox::{TxEventOutcome, TxInbox},
};
use sqlx::postgres::{PgPool, PgPoolOptions};
use testbed::FaultProxy;

use crate::support::{
    SqlxDriver, TestDriver, TestError, TokioPostgresDriver, TxDatabase, call, paid_response, run, scope, wait_until,
    with_both_drivers,
};

with_both_drivers! {
    a_gateway_that_claims_meanwhile_keeps_its_claim_and_the_transaction_has_no_effect
    whatever_a_key_and_its_labels_contain_is_stored_as_it_is
    a_connection_is_usable_after_a_run_a_replay_and_a_refusal
    a_call_that_is_dropped_leaves_no_transaction_and_no_lock
}

const INSERT: &str = "INSERT INTO effects VALUES ('%')";

async fn pay<D: TestDriver>(pool: &D::Pool, key: &str) -> bool {
    let insert = INSERT.replace('%', key);
    let ran = run::<D, _, _>(pool, Policy::ietf(), call(key), |tx| {
        let insert = insert.clone();
        Box::pin(async move {
            D::execute(tx, &insert).await?;
            Ok::<_, TestError>(paid_response("paid"))
        })
    });
    ran.await.unwrap().is_replay()
}

/// Round trips of one more of the same, once all is prepared and quiet.
async fn count_round_trips(proxy: &FaultProxy, mut work: impl AsyncFnMut(u32)) -> u64 {
    let mut counts = Vec::new();
    for nth in 0..5 {
        // A pool tests a connection that is given back.
        tokio::time::sleep(Duration::from_millis(50)).await;
        let before = proxy.counts().round_trips;
        work(nth).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        counts.push(proxy.counts().round_trips - before);
    }
    counts.sort_unstable();
    counts[counts.len() / 2]
}

fn proxied(scene: &TxDatabase) -> (FaultProxy, String) {
    let proxy = FaultProxy::to(([127, 0, 0, 1], scene.server.port()).into());
    let url = format!("postgres://gateway@{}/{}", proxy.addr(), scene.name);
    (proxy, url)
}

#[tokio::test]
async fn with_sqlx_a_run_and_an_event_have_no_round_trip_more_than_the_plain_transaction() {
    let scene = TxDatabase::new();
    let (proxy, url) = proxied(&scene);
    let pool = SqlxDriver::pool(&url, 1).await;
    let plain = count_round_trips(&proxy, async |nth| {
        let mut tx = pool.begin().await.unwrap();
        let insert = sqlx::AssertSqlSafe(INSERT.replace('%', &format!("plain {nth}")));
        sqlx::raw_sql(insert).execute(&mut *tx).await.unwrap();
        tx.commit().await.unwrap();
    })
    .await;
    let with_run = count_round_trips(&proxy, async |nth| assert!(!pay::<SqlxDriver>(&pool, &format!("k-{nth}")).await));
    let with_run = with_run.await;
    let with_event = count_round_trips(&proxy, async |nth| handle_event::<SqlxDriver>(&pool, nth).await).await;
    // BEGIN, INSERT, COMMIT, and sqlx's tests of the connection before and after.
    assert_eq!((plain, with_run, with_event), (5, 5, 5));
}

#[tokio::test]
async fn with_tokio_postgres_a_run_and_an_event_have_no_round_trip_more_than_the_plain_transaction() {
    let scene = TxDatabase::new();
    let (proxy, url) = proxied(&scene);
    let pool = TokioPostgresDriver::pool(&url, 1).await;
    let plain = count_round_trips(&proxy, async |nth| {
        let mut client = pool.get().await.unwrap();
        let tx = client.transaction().await.unwrap();
        tx.batch_execute(&INSERT.replace('%', &format!("plain {nth}"))).await.unwrap();
        tx.commit().await.unwrap();
    })
    .await;
    let with_run =
        count_round_trips(&proxy, async |nth| assert!(!pay::<TokioPostgresDriver>(&pool, &format!("k-{nth}")).await));
    let with_run = with_run.await;
    let with_event = count_round_trips(&proxy, async |nth| handle_event::<TokioPostgresDriver>(&pool, nth).await).await;
    assert_eq!((plain, with_run, with_event), (3, 3, 3));
}

async fn handle_event<D: TestDriver>(pool: &D::Pool, nth: u32) {
    let event = InboxEvent::new("shipping", "orders", &format!("e-{nth}")).unwrap();
    let insert = INSERT.replace('%', &format!("event {nth}"));
    let inbox = TxInbox::default();
    let handled = inbox.handle(pool, &event, |tx| {
        Box::pin(async move { D::execute(tx, &insert).await.map_err(|error| error.to_string()) })
    });
    assert!(matches!(handled.await.unwrap(), TxEventOutcome::<String>::Done));
}

/// The row is written with the answer: if that is not possible, COMMIT, which was sent with it, must commit nothing.
async fn a_gateway_that_claims_meanwhile_keeps_its_claim_and_the_transaction_has_no_effect<D: TestDriver>() {
    let scene = TxDatabase::new();
    let (pool, store) = (D::pool(&scene.url(), 2).await, Arc::new(scene.store().await));
    let runs = Arc::new(AtomicU32::new(0));
    let ran = run::<D, _, _>(&pool, Policy::ietf(), call("k-1"), |tx| {
        let (store, runs) = (store.clone(), runs.clone());
        Box::pin(async move {
            runs.fetch_add(1, SeqCst);
            D::execute(tx, "INSERT INTO effects VALUES ('half')").await?;
            let ask = Arc::new(ClaimRequest {
                address: scope().address("k-1", None, None),
                token: ClaimToken::mint(),
                fingerprint: Fingerprint::of_bytes(b"12.50 EUR"),
                tags: Tags::new("acme", "u1", "POST /payments", "k-1"),
                label: Bytes::new(),
                lease: Duration::from_secs(600),
                ttl: Duration::from_secs(600),
                take_over: None,
            });
            assert!(matches!(store.claim(&ask).await.unwrap(), ClaimOutcome::Granted(_)));
            Ok::<_, TestError>(paid_response("never"))
        })
    });
    let error = ran.await.unwrap_err();
    assert!(matches!(error, TxError::InProgress), "{error:?}");
    assert_eq!((runs.load(SeqCst), scene.effects()), (1, 0));
    assert_eq!(scene.sql("SELECT state FROM ibid.idempotency_keys"), "processing");
}

async fn whatever_a_key_and_its_labels_contain_is_stored_as_it_is<D: TestDriver>() {
    let scene = TxDatabase::new();
    // Where backslashes are escapes, a literal that is only quoted would end too early.
    scene.sql(&format!("ALTER DATABASE {} SET standard_conforming_strings = off", scene.name));
    let pool = D::pool(&scene.url(), 2).await;
    let odd = "\\'; DROP TABLE effects; -- $$ \u{1F600} %";
    let mut policy = Policy::ietf();
    policy.label.key = ibid::policy::LabelKeyDisplay::Clear;
    let strange = call("it's-\\'-$1").tenant(odd).user(odd).endpoint(odd);
    let ran = run::<D, _, _>(&pool, policy, strange, |tx| {
        Box::pin(async move {
            D::execute(tx, "INSERT INTO effects VALUES ('once')").await?;
            Ok::<_, TestError>(paid_response("paid"))
        })
    });
    assert!(!ran.await.unwrap().is_replay());
    let stored = scene.sql("SELECT tenant, user_id, endpoint, key FROM ibid.idempotency_keys");
    assert_eq!(stored, format!("{odd}|{odd}|{odd}|it's-\\'-$1"));
    assert_eq!(scene.effects(), 1);
}

async fn a_connection_is_usable_after_a_run_a_replay_and_a_refusal<D: TestDriver>() {
    let scene = TxDatabase::new();
    let pool = D::pool(&scene.url(), 1).await;
    for key in ["k-1", "k-2"] {
        assert!(!pay::<D>(&pool, key).await);
        assert!(pay::<D>(&pool, key).await);
        let other = run::<D, _, _>(&pool, Policy::ietf(), call(key).request(b"other"), |_| {
            Box::pin(async { Err::<_, TestError>("it runs".into()) })
        });
        assert!(matches!(other.await.unwrap_err(), TxError::KeyReused));
        D::execute_outside(&pool, &INSERT.replace('%', &format!("outside {key}"))).await.unwrap();
    }
    assert_eq!(scene.effects(), 4, "what is done outside is committed: no transaction was left open");
    let open = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = '{}' AND state LIKE 'idle in transaction%'",
        scene.name
    );
    wait_until("all transactions to end", || scene.sql(&open) == "0").await;
}

async fn a_call_that_is_dropped_leaves_no_transaction_and_no_lock<D: TestDriver>() {
    let scene = TxDatabase::new();
    let pool = D::pool(&scene.url(), 1).await;
    let stuck = run::<D, _, _>(&pool, Policy::ietf(), call("k-1"), |tx| {
        Box::pin(async move {
            D::execute(tx, "INSERT INTO effects VALUES ('half')").await?;
            std::future::pending::<()>().await;
            Ok::<_, TestError>(paid_response("never"))
        })
    });
    assert!(tokio::time::timeout(Duration::from_secs(2), stuck).await.is_err());
    let mut policy = Policy::ietf();
    policy.on_concurrent = ibid::policy::OnConcurrent::Wait;
    let ran =
        run::<D, _, _>(&pool, policy, call("k-1"), |_| Box::pin(async { Ok::<_, TestError>(paid_response("paid")) }));
    assert!(!ran.await.unwrap().is_replay());
    assert_eq!(scene.effects(), 0);
}

/// With a Sync of its own, BEGIN could fail and the claim be made nevertheless.
#[tokio::test]
async fn if_begin_fails_nothing_is_claimed() {
    let scene = TxDatabase::new();
    let pool = TokioPostgresDriver::pool(&scene.url(), 1).await;
    pool.get().await.unwrap().batch_execute("BEGIN; SELECT 1/0").await.unwrap_err();
    let ran = run::<TokioPostgresDriver, _, _>(&pool, Policy::ietf(), call("k-1"), |_| {
        Box::pin(async { Err::<_, TestError>("it runs".into()) })
    });
    let error = ran.await.unwrap_err();
    assert!(matches!(&error, TxError::Database(fault) if fault.code.as_deref() == Some("25P02")), "{error:?}");
    let locks = "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database \
        WHERE l.locktype = 'advisory' AND d.datname = current_database()";
    assert_eq!(scene.sql(locks), "0");
    assert!(!pay::<TokioPostgresDriver>(&pool, "k-1").await, "the broken connection was not used again");
}

/// The lock is taken before the look: a row that was committed in between is seen.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_at_once_exactly_one_runs() {
    let scene = TxDatabase::new();
    let pool: PgPool = PgPoolOptions::new().max_connections(8).connect(&scene.url()).await.unwrap();
    for key in 0..20 {
        let runs = Arc::new(AtomicU32::new(0));
        let calls = (0..8).map(|_| {
            let (pool, runs) = (pool.clone(), runs.clone());
            tokio::spawn(async move {
                let mut policy = Policy::ietf();
                policy.on_concurrent = ibid::policy::OnConcurrent::Wait;
                let ran = run::<SqlxDriver, _, _>(&pool, policy, call(&format!("k-{key}")), |_| {
                    runs.fetch_add(1, SeqCst);
                    Box::pin(async { Ok::<_, TestError>(paid_response("paid")) })
                });
                ran.await.map(|outcome| outcome.is_replay())
            })
        });
        let outcomes = futures_util::future::join_all(calls).await;
        let replays = outcomes.into_iter().filter(|outcome| *outcome.as_ref().unwrap().as_ref().unwrap()).count();
        assert_eq!((runs.load(SeqCst), replays), (1, 7));
    }
}
