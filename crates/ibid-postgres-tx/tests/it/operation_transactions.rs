//! What operations do with their transaction.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};

use ibid_postgres_tx::{DriverErrorKind, Isolation, TxError};
use tokio::time::timeout;

use crate::support::{
    TestDriver, TestError, TxDatabase, call, paid_response, patient_policy, run, wait_until, with_both_drivers,
};

with_both_drivers! {
    a_cancelled_operation_leaves_nothing_behind
    a_savepoint_may_be_rolled_back_inside
    what_takes_too_long_is_rolled_back
    a_failed_statement_that_is_ignored_is_not_called_success
    an_operation_that_ends_its_transaction_is_refused
    a_serialization_failure_is_tried_again
    a_serialization_failure_in_an_error_of_ones_own_is_tried_again
    what_conflicts_for_ever_is_given_up
    a_constraint_that_fails_at_commit_is_an_error
    the_server_ends_what_its_caller_has_left
    without_the_schema_the_error_says_so
}

async fn a_cancelled_operation_leaves_nothing_behind<D: TestDriver>() {
    let scene = TxDatabase::new();
    let pool = D::pool(&scene.url(), 2).await;
    let began = Arc::new(tokio::sync::Notify::new());
    let running = run::<D, _, _>(&pool, patient_policy(), call("k-1"), |tx| {
        let began = began.clone();
        Box::pin(async move {
            D::execute(tx, "INSERT INTO effects VALUES ('half')").await?;
            began.notify_one();
            std::future::pending::<()>().await;
            Ok::<_, TestError>(paid_response("never"))
        })
    });
    tokio::select! {
        ran = running => panic!("it ended: {ran:?}"),
        () = began.notified() => {}
    }
    // Its lock and its row go with it.
    let ran = run::<D, _, _>(&pool, patient_policy(), call("k-1"), |tx| {
        Box::pin(async move {
            D::execute(tx, "INSERT INTO effects VALUES ('whole')").await?;
            Ok::<_, TestError>(paid_response("paid"))
        })
    });
    assert!(!ran.await.unwrap().is_replay());
    assert_eq!(scene.sql("SELECT string_agg(what, ',') FROM effects"), "whole");
}

async fn a_savepoint_may_be_rolled_back_inside<D: TestDriver>() {
    let scene = TxDatabase::new();
    let pool = D::pool(&scene.url(), 2).await;
    let ran = run::<D, _, _>(&pool, patient_policy(), call("k-1"), |tx| {
        Box::pin(async move {
            D::execute(tx, "INSERT INTO effects VALUES ('kept')").await?;
            D::execute_and_roll_back(tx, "INSERT INTO effects VALUES ('undone')").await?;
            D::execute_and_roll_back(tx, "INSERT INTO effects VALUES ('kept')").await?;
            Ok::<_, TestError>(paid_response("paid"))
        })
    });
    assert!(!ran.await.unwrap().is_replay());
    assert_eq!(scene.sql("SELECT string_agg(what, ',') FROM effects"), "kept");
    assert_eq!(scene.remembered_answers(), 1);
}

async fn what_takes_too_long_is_rolled_back<D: TestDriver>() {
    let scene = TxDatabase::new();
    let pool = D::pool(&scene.url(), 2).await;
    let mut policy = patient_policy();
    policy.timeout = Duration::from_millis(200);
    let ran = run::<D, _, _>(&pool, policy, call("k-1"), |tx| {
        Box::pin(async move {
            D::execute(tx, "INSERT INTO effects VALUES ('half'); SELECT pg_sleep(2)").await?;
            Ok::<_, TestError>(paid_response("never"))
        })
    });
    let error = ran.await.unwrap_err();
    assert!(matches!(error, TxError::TimedOut(_)) && error.may_retry(), "{error:?}");
    let again = run::<D, _, _>(&pool, patient_policy(), call("k-1"), |_| {
        Box::pin(async { Ok::<_, TestError>(paid_response("paid")) })
    });
    assert!(!again.await.unwrap().is_replay(), "it waited for the end of the first, and then ran");
    assert_eq!(scene.effects(), 0);
}

async fn a_failed_statement_that_is_ignored_is_not_called_success<D: TestDriver>() {
    let scene = TxDatabase::new();
    let pool = D::pool(&scene.url(), 2).await;
    let ran = run::<D, _, _>(&pool, patient_policy(), call("k-1"), |tx| {
        Box::pin(async move {
            D::execute(tx, "INSERT INTO effects VALUES ('lost')").await?;
            // A COMMIT after this would be answered with ROLLBACK, and no error.
            drop(D::execute(tx, "SELECT 1 / 0").await);
            Ok::<_, TestError>(paid_response("a lie"))
        })
    });
    let error = ran.await.unwrap_err();
    let TxError::RolledBack(fault) = &error else { panic!("{error:?}") };
    assert_eq!((fault.kind, fault.code.as_deref()), (DriverErrorKind::RolledBack, Some("25P02")));
    assert!(!error.may_retry(), "the operation itself is wrong");
    assert_eq!((scene.effects(), scene.remembered_answers()), (0, 0));
}

async fn an_operation_that_ends_its_transaction_is_refused<D: TestDriver>() {
    let scene = TxDatabase::new();
    let pool = D::pool(&scene.url(), 2).await;
    let rolls_back = run::<D, _, _>(&pool, patient_policy(), call("k-1"), |tx| {
        Box::pin(async move {
            D::execute(tx, "INSERT INTO effects VALUES ('lost'); ROLLBACK").await?;
            Ok::<_, TestError>(paid_response("a lie"))
        })
    });
    let error = rolls_back.await.unwrap_err();
    assert!(matches!(&error, TxError::RolledBack(fault) if fault.code.as_deref() == Some("IB003")), "{error:?}");
    assert_eq!((scene.effects(), scene.remembered_answers()), (0, 0));
    // Here the claim is committed without an answer, and stays what it is: unknown, once its lease has lapsed.
    let commits = run::<D, _, _>(&pool, patient_policy(), call("k-2"), |tx| {
        Box::pin(async move {
            D::execute(tx, "INSERT INTO effects VALUES ('by itself'); COMMIT; BEGIN").await?;
            Ok::<_, TestError>(paid_response("not recorded"))
        })
    });
    let error = commits.await.unwrap_err();
    assert!(matches!(&error, TxError::RolledBack(fault) if fault.code.as_deref() == Some("IB003")), "{error:?}");
    assert_eq!(scene.sql("SELECT state FROM ibid.idempotency_keys"), "processing");
}

/// Reads a sum and writes what follows from it: at most one of those who do so at the same time may.
async fn adds<D: TestDriver>(tx: &mut ibid_postgres_tx::Tx<'_, D::Pool>) -> Result<(), TestError> {
    let sum = D::query_number(tx, "SELECT count(*) FROM effects").await?;
    tokio::time::sleep(Duration::from_millis(100)).await;
    D::execute(tx, &format!("INSERT INTO effects VALUES ('{sum}')")).await
}

async fn a_serialization_failure_is_tried_again<D: TestDriver>() {
    let scene = TxDatabase::new();
    let pool = D::pool(&scene.url(), 4).await;
    let tries = AtomicU32::new(0);
    let runs = |key| {
        let (pool, tries) = (&pool, &tries);
        async move {
            let call = call(key).isolation(Isolation::Serializable);
            let ran = run::<D, _, _>(pool, patient_policy(), call, |tx| {
                tries.fetch_add(1, SeqCst);
                Box::pin(async move {
                    adds::<D>(tx).await?;
                    Ok::<_, TestError>(paid_response(key))
                })
            });
            assert!(!ran.await.unwrap().is_replay());
        }
    };
    tokio::join!(runs("k-1"), runs("k-2"), runs("k-3"));
    assert_eq!(scene.sql("SELECT string_agg(what, ',' ORDER BY what) FROM effects"), "0,1,2");
    assert!(tries.into_inner() > 3, "they were in each other's way");
}

async fn a_serialization_failure_in_an_error_of_ones_own_is_tried_again<D: TestDriver>() {
    #[derive(Debug, thiserror::Error)]
    #[error("the ledger is busy")]
    struct LedgerError(#[source] LedgerErrorSource);
    #[derive(Debug, thiserror::Error)]
    #[error(transparent)]
    struct LedgerErrorSource(TestError);
    let scene = TxDatabase::new();
    let pool = D::pool(&scene.url(), 2).await;
    for code in ["40001", "40P01"] {
        let tries = AtomicU32::new(0);
        let ran = run::<D, _, _>(&pool, patient_policy(), call(code), |tx| {
            let nth = tries.fetch_add(1, SeqCst);
            Box::pin(async move {
                if nth < 2 {
                    let raise = format!("DO $$ BEGIN RAISE EXCEPTION 'planned' USING ERRCODE = '{code}'; END $$");
                    D::execute(tx, &raise).await.map_err(|error| LedgerError(LedgerErrorSource(error)))?;
                }
                Ok::<_, LedgerError>(paid_response("third time"))
            })
        });
        assert!(!ran.await.unwrap().is_replay());
        assert_eq!(tries.into_inner(), 3, "{code}");
    }
}

async fn what_conflicts_for_ever_is_given_up<D: TestDriver>() {
    let scene = TxDatabase::new();
    let pool = D::pool(&scene.url(), 2).await;
    let ran = run::<D, _, _>(&pool, patient_policy(), call("k-1"), |tx| {
        Box::pin(async move {
            D::execute(tx, "DO $$ BEGIN RAISE EXCEPTION 'planned' USING ERRCODE = '40001'; END $$").await?;
            Ok::<_, TestError>(paid_response("never"))
        })
    });
    let error = ran.await.unwrap_err();
    assert!(matches!(error, TxError::Conflict { tries: 10, .. }) && error.may_retry(), "{error:?}");
    assert_eq!(scene.remembered_answers(), 0);
}

async fn a_constraint_that_fails_at_commit_is_an_error<D: TestDriver>() {
    let scene = TxDatabase::new();
    scene.sql(
        "CREATE TABLE owners (id int PRIMARY KEY); \
         CREATE TABLE things (owner int REFERENCES owners DEFERRABLE INITIALLY DEFERRED); \
         GRANT ALL ON owners, things TO gateway",
    );
    let pool = D::pool(&scene.url(), 2).await;
    let ran = run::<D, _, _>(&pool, patient_policy(), call("k-1"), |tx| {
        Box::pin(async move {
            D::execute(tx, "INSERT INTO things VALUES (1)").await?;
            Ok::<_, TestError>(paid_response("a lie"))
        })
    });
    let error = ran.await.unwrap_err();
    assert!(matches!(&error, TxError::RolledBack(fault) if fault.code.as_deref() == Some("23503")), "{error:?}");
    assert_eq!(scene.remembered_answers(), 0);
}

async fn the_server_ends_what_its_caller_has_left<D: TestDriver>() {
    let scene = TxDatabase::new();
    let pool = D::pool(&scene.url(), 2).await;
    let mut policy = patient_policy();
    policy.timeout = Duration::from_secs(7);
    let ran = run::<D, _, _>(&pool, policy, call("k-1"), |tx| {
        Box::pin(async move {
            let setting = "SELECT setting::bigint FROM pg_settings WHERE name = 'idle_in_transaction_session_timeout'";
            let inside = D::query_number(tx, setting).await?;
            Ok::<_, TestError>(paid_response(&inside.to_string()))
        })
    });
    assert_eq!(ran.await.unwrap().into_response().body(), "12000", "a little more than the operation's time");
    // And only in that transaction.
    let sessions = "SELECT current_setting('idle_in_transaction_session_timeout')";
    assert_eq!(scene.sql(sessions), "0");
    let ran = timeout(Duration::from_secs(60), async {
        D::execute_outside(
            &pool,
            "DO $$ BEGIN ASSERT current_setting('idle_in_transaction_session_timeout') = '0'; END $$",
        )
        .await
    });
    ran.await.unwrap().unwrap();
}

async fn without_the_schema_the_error_says_so<D: TestDriver>() {
    let scene = TxDatabase::new();
    let bare = scene.server.create_database();
    let pool = D::pool(&scene.server.url("gateway", &bare), 2).await;
    let ran = run::<D, _, _>(&pool, patient_policy(), call("k-1"), |_| {
        Box::pin(async { Ok::<_, TestError>(paid_response("never")) })
    });
    let error = ran.await.unwrap_err();
    assert!(matches!(error, TxError::Database(_)), "{error:?}");
    assert!(error.to_string().contains("schema \"ibid\" does not exist"), "{error}");
    wait_until("connections are given back", || true).await;
}
