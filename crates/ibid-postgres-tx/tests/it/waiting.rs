//! Duplicates wait without holding the pool's connections.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};

use futures_util::future::join_all;
use testbed::PgBouncer;
use tokio::{sync::Notify, time::timeout};

use crate::support::{
    TestDriver, TestError, TokioPostgresDriver, TxDatabase, call, paid_response, patient_policy, run, with_both_drivers,
};

with_both_drivers! {
    a_hundred_duplicates_on_five_connections_have_one_effect_and_all_are_answered
    many_different_keys_on_few_connections_all_run
}

async fn a_hundred_duplicates_on_five_connections_have_one_effect_and_all_are_answered<D: TestDriver>() {
    let scene = TxDatabase::new();
    let pool = D::pool(&scene.url(), 5).await;
    let (runs, began, may_end) = (AtomicU32::new(0), Arc::new(Notify::new()), Arc::new(Notify::new()));
    let pay = || {
        run::<D, _, _>(&pool, patient_policy(), call("k-1"), |tx| {
            runs.fetch_add(1, SeqCst);
            let (began, may_end) = (began.clone(), may_end.clone());
            Box::pin(async move {
                D::execute(tx, "INSERT INTO effects VALUES ('once')").await?;
                began.notify_one();
                may_end.notified().await;
                Ok::<_, TestError>(paid_response("paid"))
            })
        })
    };
    let all = join_all((0..100).map(|_| pay()));
    let others = async {
        began.notified().await;
        // The other 99 are waiting by now, or soon. Who has nothing to do with them still gets a connection.
        for _ in 0..50 {
            let other = timeout(Duration::from_secs(60), D::execute_outside(&pool, "SELECT 1")).await;
            other.expect("the pool is not used up by those who wait").unwrap();
        }
        for _ in 0..10 {
            let blocked = "SELECT count(*) FROM pg_stat_activity \
                WHERE datname = current_database() AND wait_event_type = 'Lock'";
            assert_eq!(scene.sql(blocked), "0", "nobody waits on a connection");
        }
        may_end.notify_one();
    };
    let (answers, ()) = tokio::join!(all, others);
    let mut first = 0;
    for answer in answers {
        let answer = answer.unwrap();
        first += usize::from(!answer.is_replay());
        assert_eq!(answer.into_response().body(), "paid");
    }
    assert_eq!((first, runs.into_inner(), scene.effects()), (1, 1, 1));
}

async fn many_different_keys_on_few_connections_all_run<D: TestDriver>() {
    let scene = TxDatabase::new();
    let pool = D::pool(&scene.url(), 3).await;
    let all = (0..40).map(|nth| {
        let pool = &pool;
        async move {
            // Each twice.
            let insert = format!("INSERT INTO effects VALUES ('{}')", nth / 2);
            let insert = &insert;
            let call = call(&format!("k-{}", nth / 2));
            let ran = run::<D, _, _>(pool, patient_policy(), call, |tx| {
                let insert = insert.clone();
                Box::pin(async move {
                    D::execute(tx, &insert).await?;
                    Ok::<_, TestError>(paid_response("paid"))
                })
            });
            ran.await.unwrap().is_replay()
        }
    });
    let replays = join_all(all).await.into_iter().filter(|is_replay| *is_replay).count();
    assert_eq!((replays, scene.effects()), (20, 20));
}

/// In transaction mode. sqlx gives its statements names, which this version of pgbouncer does not keep apart.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_pgbouncer_duplicates_have_one_effect_too() {
    type D = TokioPostgresDriver;
    let scene = TxDatabase::new();
    let bouncer = PgBouncer::start(scene.server);
    let url = bouncer.url("gateway", &scene.name);
    let url = url.split('?').next().unwrap();
    let pool = D::pool(url, 10).await;
    let all = (0..20).map(|_| {
        run::<D, _, _>(&pool, patient_policy(), call("k-1"), |tx| {
            Box::pin(async move {
                D::execute(tx, "INSERT INTO effects VALUES ('once')").await?;
                tokio::time::sleep(Duration::from_millis(200)).await;
                Ok::<_, TestError>(paid_response("paid"))
            })
        })
    });
    let replays = join_all(all).await.into_iter().filter(|ran| ran.as_ref().unwrap().is_replay()).count();
    assert_eq!((replays, scene.effects()), (19, 1));
}
