//! Servers that die, stall, refuse and come back.

use std::{
    future::Future,
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use ibid::store::{ClaimOutcome, ErrorKind, Lease, SettleOutcome, Store, StoreError};
use ibid_stores::{
    RemoteOptions,
    postgres::{MigrateAction, Postgres, migrate},
};
use testbed::TestPostgres;

use super::common::{claim_granted, claim_request, competing_request, complete, database, open};

const RECOVERY_TIMEOUT: Duration = Duration::from_secs(40);

/// Asks again, with the same words, while that is allowed.
async fn retry_call<T, F: Future<Output = Result<T, StoreError>>>(mut call: impl FnMut() -> F) -> T {
    let began = Instant::now();
    loop {
        match call().await {
            Ok(answer) => return answer,
            Err(error) => {
                let passes = matches!(error.kind, ErrorKind::NotApplied | ErrorKind::Ambiguous);
                assert!(passes && began.elapsed() < RECOVERY_TIMEOUT, "{error}");
                tokio::time::sleep(Duration::from_millis(30)).await;
            }
        }
    }
}

async fn open_with_short_timeout(url: &str) -> Postgres {
    Postgres::open(url, RemoteOptions { timeout: Duration::from_millis(400), ..RemoteOptions::default() })
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_that_are_killed_in_mid_call_lose_and_double_nothing() {
    let server = TestPostgres::shared();
    let name = database(server);
    let store = Arc::new(open(&server.url("gateway", &name)).await);
    let kills = tokio::task::spawn_blocking({
        let kill = format!(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = '{name}' AND usename = 'gateway'"
        );
        move || (0..25).map(|_| server.sql("postgres", &kill).parse::<u32>().unwrap()).sum::<u32>()
    });
    let works = join_all((0..16).map(|_| {
        let store = store.clone();
        tokio::spawn(async move {
            for _ in 0..12 {
                let ask = claim_request();
                let ClaimOutcome::Granted(lease) = retry_call(|| store.claim(&ask)).await else { panic!("it is ours") };
                assert_eq!(lease.attempt, 1, "a repeated claim is no second start");
                let end = complete(b"once");
                let held = retry_call(|| store.settle(&lease, &end)).await;
                assert_eq!(held, SettleOutcome::Applied);
                let rival = competing_request(&ask);
                assert!(matches!(retry_call(|| store.claim(&rival)).await, ClaimOutcome::Completed(done) if done.fence == lease.fence));
            }
        })
    }));
    for worked in works.await {
        worked.unwrap();
    }
    assert!(kills.await.unwrap() > 0, "some were killed");
    assert_eq!(
        server.sql(&name, "SELECT count(*), max(attempt) FROM ibid.idempotency_keys WHERE state = 'done'"),
        "192|1"
    );
}

#[tokio::test]
async fn a_server_that_crashes_and_comes_back_is_used_again_and_knows_what_it_knew() {
    let server = TestPostgres::start();
    let name = database(&server);
    let store = open_with_short_timeout(&server.url("gateway", &name)).await;
    let (ask, other) = (claim_request(), claim_request());
    let lease = retry_call(|| store.claim(&ask)).await;
    server.kill();
    let failed = store.claim(&other).await.unwrap_err();
    assert!(matches!(failed.kind, ErrorKind::NotApplied | ErrorKind::Ambiguous), "{failed}");
    server.restart();
    assert_eq!(retry_call(|| store.claim(&ask)).await, lease, "committed before the crash");
    assert!(matches!(retry_call(|| store.claim(&other)).await, ClaimOutcome::Granted(_)));
}

#[tokio::test]
async fn a_server_that_stalls_is_left_alone_and_its_lost_answers_are_found_by_their_token() {
    let server = TestPostgres::start();
    let name = database(&server);
    let store = open_with_short_timeout(&server.url("gateway", &name)).await;
    let first = claim_request();
    let _ = retry_call(|| store.claim(&first)).await;
    server.pause();
    let lost = claim_request();
    let failed = store.claim(&lost).await.unwrap_err();
    assert_eq!(failed.kind, ErrorKind::Ambiguous, "it was sent: {failed}");
    let failed = store.get(&lost.address).await.unwrap_err();
    assert_eq!(failed.kind, ErrorKind::NotApplied, "a reader changes nothing: {failed}");
    for _ in 0..8 {
        let failed = store.claim(&claim_request()).await.unwrap_err();
        assert!(matches!(failed.kind, ErrorKind::NotApplied | ErrorKind::Ambiguous), "{failed}");
    }
    let began = Instant::now();
    let failed = store.claim(&claim_request()).await.unwrap_err();
    assert_eq!(failed.kind, ErrorKind::NotApplied, "nothing is sent any more: {failed}");
    assert!(began.elapsed() < Duration::from_secs(10), "and nobody waits for long");
    server.resume();
    let ClaimOutcome::Granted(lease) = retry_call(|| store.claim(&lost)).await else { panic!("it is ours, once") };
    assert_eq!(lease.attempt, 1);
    let rival = competing_request(&lost);
    assert!(
        matches!(retry_call(|| store.claim(&rival)).await, ClaimOutcome::InProgress(holder) if holder.fence == lease.fence)
    );
}

#[tokio::test]
async fn a_server_that_comes_later_is_checked_then() {
    let server = TestPostgres::start_with(&["synchronous_commit=off"]);
    let name = database(&server);
    server.stop();
    let store = open_with_short_timeout(&server.url("gateway", &name)).await;
    assert!(store.guarantees().warnings[0].contains("could not be checked"), "{:?}", store.guarantees());
    let failed = store.claim(&claim_request()).await.unwrap_err();
    assert_eq!(failed.kind, ErrorKind::NotApplied, "{failed}");
    server.restart();
    let first = claim_request();
    let _ = retry_call(|| store.claim(&first)).await;
    let promise = store.guarantees();
    assert!(promise.warnings.len() == 1 && promise.warnings[0].contains("synchronous_commit is off"), "{promise:?}");
    assert!(!promise.durable);
}

#[tokio::test]
async fn a_missing_schema_is_said_plainly_and_taken_up_once_it_is_there() {
    let server = TestPostgres::shared();
    let name = server.create_database();
    let store = open(&server.url("gateway", &name)).await;
    let failed = store.claim(&claim_request()).await.unwrap_err();
    assert_eq!(failed.kind, ErrorKind::Rejected);
    assert!(failed.to_string().contains("run ibid migrate --store postgres://127.0.0.1"), "{failed}");
    assert!(store.guarantees().warnings[0].contains("run ibid migrate"), "{:?}", store.guarantees());
    migrate(&server.url("migrator", &name), MigrateAction::Up).await.unwrap();
    let began = Instant::now();
    while store.claim(&claim_request()).await.is_err() {
        assert!(began.elapsed() < RECOVERY_TIMEOUT);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(store.guarantees().warnings.is_empty(), "{:?}", store.guarantees());
}

#[tokio::test]
async fn a_read_only_server_refuses_and_is_reported() {
    let server = TestPostgres::shared();
    let name = database(server);
    server.sql("postgres", &format!("ALTER DATABASE {name} SET default_transaction_read_only = on"));
    let store = open(&server.url("gateway", &name)).await;
    let failed = store.claim(&claim_request()).await.unwrap_err();
    assert_eq!(failed.kind, ErrorKind::Rejected, "{failed}");
    assert!(store.guarantees().warnings[0].contains("default_transaction_read_only"), "{:?}", store.guarantees());
}

#[tokio::test]
async fn a_read_only_server_still_replays() {
    let server = TestPostgres::shared();
    let name = database(server);
    let store = open(&server.url("gateway", &name)).await;
    let done: Vec<_> = (0..20).map(|_| claim_request()).collect();
    for ask in &done {
        let _ = store.settle(&claim_granted(&store, ask).await, &complete(b"done")).await.unwrap();
    }
    server.sql("postgres", &format!("ALTER DATABASE {name} SET default_transaction_read_only = on"));
    let store = open(&server.url("gateway", &name)).await;
    for _ in 0..3 {
        let new = claim_request();
        let replays = join_all(done.iter().map(|ask| store.claim(ask)));
        let (replayed, refused) = tokio::join!(replays, store.claim(&new));
        assert!(replayed.iter().all(|found| matches!(found, Ok(ClaimOutcome::Completed(_)))), "{replayed:?}");
        assert_eq!(refused.unwrap_err().kind, ErrorKind::Rejected);
    }
}

#[tokio::test]
async fn what_weakens_the_promise_is_reported() {
    let server = TestPostgres::start_with(&["fsync=off", "full_page_writes=off", "synchronous_commit=local"]);
    let name = database(&server);
    let promise = open(&server.url("postgres", &name)).await.guarantees();
    for what in ["fsync is off", "full_page_writes is off", "synchronous_commit is local", "superuser"] {
        assert!(promise.warnings.iter().any(|wanting| wanting.contains(what)), "{what}: {promise:?}");
    }
    assert!(!promise.durable && promise.shared);
    let promise = open(&TestPostgres::shared().url("gateway", &database(TestPostgres::shared()))).await.guarantees();
    assert!(promise.durable && promise.warnings.is_empty(), "{promise:?}");
}

#[tokio::test]
async fn a_row_that_somebody_else_has_locked_fails_alone() {
    let server = TestPostgres::shared();
    let name = database(server);
    let (url, name) = (server.url("gateway", &name) + "?pool=1", name);
    let store = Postgres::open(&url, RemoteOptions { timeout: Duration::from_secs(2), ..RemoteOptions::default() })
        .await
        .unwrap();
    let lease = claim_granted(&store, &claim_request()).await;
    let lock = String::from("BEGIN; SELECT 1 FROM ibid.idempotency_keys FOR UPDATE; SELECT pg_sleep(6)");
    let url_name = name.clone();
    let locks = tokio::task::spawn_blocking(move || server.sql_as("postgres", &url_name, &lock));
    let locked = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%FOR UPDATE; SELECT pg_sleep%' AND wait_event = 'PgSleep'";
    let began = Instant::now();
    while server.sql(&name, locked) == "0" {
        assert!(began.elapsed() < RECOVERY_TIMEOUT);
    }
    let leases: Vec<Lease> = join_all((0..8).map(|_| async { claim_granted(&store, &claim_request()).await })).await;
    let end = complete(b"done");
    let (stuck, others) =
        tokio::join!(store.settle(&lease, &end), join_all(leases.iter().map(|lease| store.settle(lease, &end))));
    assert_eq!(stuck.unwrap_err().kind, ErrorKind::NotApplied, "it was rolled back");
    assert!(others.into_iter().all(|held| matches!(held, Ok(SettleOutcome::Applied))));
    locks.await.unwrap().unwrap();
    assert_eq!(retry_call(|| store.settle(&lease, &end)).await, SettleOutcome::Applied);
}

#[tokio::test]
async fn tls_is_used_and_certificates_are_verified_as_told() {
    let (server, certificate) = TestPostgres::start_with_tls();
    let name = database(&server);
    let root = format!("sslrootcert={}", certificate.display());
    let at = |host: &str, options: &str| {
        format!("postgres://gateway@{host}:{}/{name}?sslmode={options}&pool=1", server.port())
    };
    for url in [
        at("127.0.0.1", "require"),
        at("127.0.0.1", &format!("verify-ca&{root}")),
        at("localhost", &format!("verify-full&{root}")),
    ] {
        let store = open(&url).await;
        claim_granted(&store, &claim_request()).await;
        let encrypted = format!(
            "SELECT bool_and(s.ssl) FROM pg_stat_ssl s JOIN pg_stat_activity a USING (pid) WHERE a.datname = '{name}' AND a.usename = 'gateway'"
        );
        assert_eq!(server.sql("postgres", &encrypted), "t", "{url}");
    }
    for url in [at("127.0.0.1", &format!("verify-full&{root}")), at("localhost", "verify-full")] {
        let store = Postgres::open(&url, RemoteOptions::default()).await;
        // A machine without any trusted certificate says so at once.
        let Ok(store) = store else { continue };
        let failed = store.claim(&claim_request()).await.unwrap_err();
        assert!(failed.kind == ErrorKind::NotApplied && failed.to_string().contains("certificate"), "{url}: {failed}");
    }
    let store = open(&at("127.0.0.1", "disable")).await;
    claim_granted(&store, &claim_request()).await;
}

#[tokio::test]
async fn a_server_that_asks_is_shown_the_clients_certificate() {
    let (server, certificate) = TestPostgres::start_with_tls();
    let name = database(&server);
    let key = certificate.with_file_name("server.key");
    let shown = format!("&sslcert={}&sslkey={}", certificate.display(), key.display());
    let who = format!(
        "SELECT bool_and(s.client_dn IS NOT NULL) FROM pg_stat_ssl s JOIN pg_stat_activity a USING (pid) WHERE a.datname = '{name}' AND a.usename = 'gateway'"
    );
    for (own, known) in [("", "f"), (shown.as_str(), "t")] {
        let url = format!("postgres://gateway@localhost:{}/{name}?sslmode=require&pool=1{own}", server.port());
        let store = open(&url).await;
        claim_granted(&store, &claim_request()).await;
        assert_eq!(server.sql("postgres", &who), known, "{url}");
        drop(store);
        wait_until("the connections to end", || {
            server.sql("postgres", &format!("SELECT count(*) FROM pg_stat_activity WHERE datname = '{name}'")) == "0"
        })
        .await;
    }
    for wrong in [
        "&sslcert=/nowhere.crt&sslkey=/nowhere.key",
        &format!("&sslcert={}&sslkey=/nowhere.key", certificate.display()),
    ] {
        let url = format!("postgres://gateway@localhost:{}/{name}?sslmode=require{wrong}", server.port());
        let why = Postgres::open(&url, RemoteOptions::default()).await.unwrap_err();
        assert!(why.to_string().contains("/nowhere."), "{why}");
    }
}

async fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    for _ in 0..200 {
        if is_so() {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    panic!("waited in vain for {what}");
}

/// Makes calls on a runtime of its own, which is shut down while they are under way.
fn call_on_a_runtime_that_ends(store: &Arc<Postgres>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        for _ in 0..50 {
            let store = store.clone();
            tokio::spawn(async move { drop(store.claim(&claim_request()).await) });
        }
        tokio::task::yield_now().await;
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_runtime_of_callers_that_ends_leaves_the_store_usable() {
    let server = TestPostgres::shared();
    let name = database(server);
    let store = Arc::new(open(&server.url("gateway", &name)).await);
    for _ in 0..5 {
        let there = store.clone();
        tokio::task::spawn_blocking(move || call_on_a_runtime_that_ends(&there)).await.unwrap();
        let ask = claim_request();
        let again = tokio::time::timeout(RECOVERY_TIMEOUT, claim_granted(&*store, &ask)).await;
        assert_eq!(again.expect("a call is answered").attempt, 1);
    }
}

#[tokio::test]
async fn a_store_whose_runtime_has_ended_fails_its_calls() {
    let server = TestPostgres::shared();
    let url = server.url("gateway", &database(server));
    let opened = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(open(&url))
    });
    let store = opened.join().unwrap();
    for _ in 0..2 {
        let ask = claim_request();
        let called = tokio::time::timeout(RECOVERY_TIMEOUT, store.claim(&ask)).await;
        assert_eq!(called.expect("a call is answered").unwrap_err().kind, ErrorKind::Ambiguous);
    }
}
