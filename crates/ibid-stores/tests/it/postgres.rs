//! The PostgreSQL store, on a real server: the store contract, directly and through pgbouncer, and what is its own.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use ibid::store::Store;
use ibid_stores::{
    RemoteOptions,
    postgres::{MigrateAction, Postgres, migrate},
};
use ibid_testkit::{
    broken::failing_cases,
    contract,
    property::{HistoryClock, check_histories},
    wrappers::losing_answers,
};
use testbed::{PgBouncer, TestPostgres};

mod access_rights;
mod certificates;
mod common;
mod faults;
mod migrations;
mod postgres_only;
mod waiting;

pub(crate) use common::database;
use common::{open, patient_options};

/// One database for all cases: they use addresses of their own.
fn shared() -> &'static str {
    static SHARED: OnceLock<String> = OnceLock::new();
    SHARED.get_or_init(|| database(TestPostgres::shared()))
}

/// Where a gateway finds it.
pub(crate) fn url() -> String {
    TestPostgres::shared().url("gateway", shared())
}

async fn store() -> Postgres {
    open(&url()).await
}

fn bouncer() -> &'static PgBouncer {
    static BOUNCER: OnceLock<PgBouncer> = OnceLock::new();
    BOUNCER.get_or_init(|| PgBouncer::start(TestPostgres::shared()))
}

async fn open_through_pgbouncer() -> Postgres {
    open(&bouncer().url("gateway", shared())).await
}

ibid_testkit::contract_tests!(postgres, async { store().await });

ibid_testkit::contract_tests!(postgres_pooled, async { open_through_pgbouncer().await });

ibid_testkit::contract_tests!(postgres_losing_answers, async { losing_answers(store().await) });

ibid_testkit::contract_tests!(postgres_pooled_losing_answers, async { losing_answers(open_through_pgbouncer().await) });

#[tokio::test]
async fn one_store_serves_all_cases_at_the_same_time() {
    let failing = failing_cases(Arc::new(store().await), Duration::from_secs(60)).await;
    assert_eq!(failing, [""; 0]);
}

#[tokio::test]
async fn sweeps_count_what_they_remove() {
    let store = open(&TestPostgres::shared().url("gateway", &database(TestPostgres::shared()))).await;
    contract::admin::sweeps_count_what_they_remove(&store).await;
}

#[test]
fn it_answers_as_the_model_says() {
    // The store's tasks live on the runtime of the test: each history opens its own.
    check_histories(60, HistoryClock::Real, async || store().await);
    check_histories(20, HistoryClock::Real, async || open_through_pgbouncer().await);
}

#[tokio::test]
async fn a_wrong_url_is_an_error_and_a_missing_server_is_not() {
    assert!(
        Postgres::open("postgres://h/db?pool=none", patient_options())
            .await
            .unwrap_err()
            .to_string()
            .contains("from 1 to 64")
    );
    let store = Postgres::open("postgres://gateway:s3cret@127.0.0.1:1/db", RemoteOptions::default()).await.unwrap();
    let wanting = store.guarantees().warnings;
    assert!(wanting[0].contains("could not be checked"), "{wanting:?}");
    assert!(!format!("{store:?} {wanting:?}").contains("s3cret"));
    let _ = migrate("postgres://h:1/db?pool=0", MigrateAction::Up).await.unwrap_err();
}
