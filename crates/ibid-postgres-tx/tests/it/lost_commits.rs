//! Connections and servers that are lost while a transaction is being committed.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};

use ibid::Policy;
use ibid_postgres_tx::{TxError, TxOutcome};
use testbed::{FaultProxy, TestPostgres};
use tokio::task::JoinHandle;

use crate::support::{
    TestDriver, TestError, TxDatabase, call, database, paid_response, patient_policy, run, wait_until,
    with_both_drivers,
};

with_both_drivers! {
    a_commit_whose_answer_is_lost_is_looked_up
    a_backend_that_is_ended_at_commit_is_run_again
    a_connection_that_breaks_before_the_commit_is_run_again
    a_commit_that_cannot_be_looked_up_is_in_doubt_and_the_next_call_finds_it
    a_server_that_dies_at_commit_has_one_effect_in_the_end
}

/// Whoever commits an effect waits at the gate.
const COMMIT_GATE_SQL: &str =
    "CREATE TABLE gate (closed boolean); INSERT INTO gate VALUES (true); GRANT SELECT ON gate TO gateway;
    CREATE FUNCTION wait_at_gate() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        FOR nth IN 1..3000 LOOP
            EXIT WHEN NOT (SELECT closed FROM gate);
            PERFORM pg_sleep(0.02);
        END LOOP;
        RETURN NULL;
    END $$;
    CREATE CONSTRAINT TRIGGER wait_at_gate AFTER INSERT ON effects DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION wait_at_gate();";
const OPEN_GATE_SQL: &str = "UPDATE gate SET closed = false";

struct PaymentRun {
    runs: Arc<AtomicU32>,
    task: JoinHandle<Result<TxOutcome, TxError>>,
}

fn pay<D: TestDriver>(pool: &D::Pool) -> PaymentRun {
    pay_with_policy::<D>(pool, patient_policy())
}

fn pay_with_policy<D: TestDriver>(pool: &D::Pool, policy: Policy) -> PaymentRun {
    let runs = Arc::new(AtomicU32::new(0));
    let (pool, counted) = (pool.clone(), runs.clone());
    let task = tokio::spawn(async move {
        run::<D, _, _>(&pool, policy, call("k-1"), |tx| {
            let nth = counted.fetch_add(1, SeqCst) + 1;
            Box::pin(async move {
                D::execute(tx, "INSERT INTO effects VALUES ('once')").await?;
                Ok::<_, TestError>(paid_response(&format!("run {nth}")))
            })
        })
        .await
    });
    PaymentRun { runs, task }
}

/// The backend that is committing, once it is.
async fn wait_for_commit(server: &TestPostgres, name: &str) -> String {
    let query = format!(
        "SELECT pid FROM pg_stat_activity WHERE datname = '{name}' AND state = 'active' \
         AND query LIKE '%; COMMIT%' AND pid <> pg_backend_pid()"
    );
    let mut pid = String::new();
    wait_until("a commit at the gate", || {
        pid = server.sql(name, &query);
        !pid.is_empty()
    })
    .await;
    pid
}

fn proxied_database(scene: &TxDatabase) -> (FaultProxy, String) {
    let link = FaultProxy::to(([127, 0, 0, 1], scene.server.port()).into());
    let url = format!("postgres://gateway@{}/{}", link.addr(), scene.name);
    (link, url)
}

async fn a_commit_whose_answer_is_lost_is_looked_up<D: TestDriver>() {
    let scene = TxDatabase::new();
    scene.sql(COMMIT_GATE_SQL);
    let (link, url) = proxied_database(&scene);
    let pool = D::pool(&url, 3).await;
    let paying = pay::<D>(&pool);
    wait_for_commit(scene.server, &scene.name).await;
    link.reset();
    // While the old transaction is not over nobody may run it again.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(paying.runs.load(SeqCst), 1);
    assert!(!paying.task.is_finished());
    scene.sql(OPEN_GATE_SQL);
    let TxOutcome::Executed(response) = paying.task.await.unwrap().unwrap() else { panic!("it ran here") };
    assert_eq!(response.body(), "run 1");
    assert_eq!((paying.runs.load(SeqCst), scene.effects(), scene.remembered_answers()), (1, 1, 1));
}

async fn a_backend_that_is_ended_at_commit_is_run_again<D: TestDriver>() {
    let scene = TxDatabase::new();
    scene.sql(COMMIT_GATE_SQL);
    let pool = D::pool(&scene.url(), 3).await;
    let paying = pay::<D>(&pool);
    let pid = wait_for_commit(scene.server, &scene.name).await;
    scene.sql(&format!("SELECT pg_terminate_backend({pid})"));
    wait_until("the second run", || paying.runs.load(SeqCst) == 2).await;
    scene.sql(OPEN_GATE_SQL);
    let TxOutcome::Executed(response) = paying.task.await.unwrap().unwrap() else { panic!("it ran here") };
    assert_eq!(response.body(), "run 2");
    assert_eq!((scene.effects(), scene.remembered_answers()), (1, 1));
}

async fn a_connection_that_breaks_before_the_commit_is_run_again<D: TestDriver>() {
    let scene = TxDatabase::new();
    let (link, url) = proxied_database(&scene);
    let (pool, link) = (D::pool(&url, 3).await, Arc::new(link));
    let runs = AtomicU32::new(0);
    let ran = run::<D, _, _>(&pool, patient_policy(), call("k-1"), |tx| {
        let (nth, link) = (runs.fetch_add(1, SeqCst) + 1, link.clone());
        Box::pin(async move {
            D::execute(tx, "INSERT INTO effects VALUES ('once')").await?;
            if nth == 1 {
                link.reset();
            }
            Ok::<_, TestError>(paid_response(&format!("run {nth}")))
        })
    });
    assert_eq!(ran.await.unwrap().into_response().body(), "run 2");
    assert_eq!((scene.effects(), scene.remembered_answers()), (1, 1));
}

async fn a_commit_that_cannot_be_looked_up_is_in_doubt_and_the_next_call_finds_it<D: TestDriver>() {
    let scene = TxDatabase::new();
    scene.sql(COMMIT_GATE_SQL);
    let (link, url) = proxied_database(&scene);
    let pool = D::pool(&url, 3).await;
    // Who does not wait for others still waits to hear what became of its own commit.
    let paying = pay_with_policy::<D>(&pool, Policy::ietf());
    wait_for_commit(scene.server, &scene.name).await;
    link.refuse();
    link.reset();
    scene.sql(OPEN_GATE_SQL);
    let error = paying.task.await.unwrap().unwrap_err();
    assert!(matches!(error, TxError::InDoubt(_)) && error.may_retry(), "{error:?}");
    link.heal();
    let TxOutcome::Replayed(record) = pay::<D>(&pool).task.await.unwrap().unwrap() else {
        panic!("it had been committed")
    };
    assert_eq!(record.body, ibid::record::RecordBody::Whole("run 1".into()));
    assert_eq!((scene.effects(), scene.remembered_answers()), (1, 1));
}

async fn a_server_that_dies_at_commit_has_one_effect_in_the_end<D: TestDriver>() {
    let server = TestPostgres::start();
    let name = database(&server);
    server.sql(&name, COMMIT_GATE_SQL);
    let pool = D::pool(&server.url("gateway", &name), 3).await;
    let paying = pay::<D>(&pool);
    wait_for_commit(&server, &name).await;
    server.kill();
    server.restart();
    server.sql(&name, OPEN_GATE_SQL);
    // If the restart took too long it is in doubt, and the next call tells.
    let mut ran = paying.task.await.unwrap();
    for _ in 0..5 {
        match ran {
            Ok(_) => break,
            Err(error) => assert!(error.may_retry(), "{error:?}"),
        }
        ran = pay::<D>(&pool).task.await.unwrap();
    }
    assert!(ran.is_ok(), "{ran:?}");
    assert_eq!(server.sql(&name, "SELECT count(*) FROM effects"), "1");
    assert_eq!(server.sql(&name, "SELECT count(*) FROM ibid.idempotency_keys WHERE state = 'done'"), "1");
}
