//! Waiting for a holder at another gateway.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use ibid::store::{ClaimOutcome, Store};
use testbed::TestPostgres;
use tokio::time::timeout;

use super::common::{claim_granted, claim_request, competing_request, complete, database, open};

const LIMIT: Duration = Duration::from_secs(60);

#[tokio::test]
async fn a_waiter_at_another_gateway_wakes_and_finds_the_answer() {
    let server = TestPostgres::shared();
    let name = database(server);
    let url = server.url("gateway", &name);
    let (here, there) = (open(&url).await, Arc::new(open(&url).await));
    let ask = claim_request();
    let lease = claim_granted(&here, &ask).await;
    let waits = tokio::spawn({
        let (there, at, seen) = (there.clone(), ask.address, lease.fence);
        async move { there.wait(&at, seen, LIMIT).await }
    });
    // Its end is notified because somebody waits for it, and only then.
    let marked = "SELECT count(*) FROM ibid.idempotency_keys WHERE waited";
    for _ in 0..500 {
        if server.sql(&name, marked) == "1" {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(server.sql(&name, marked), "1", "the row is marked as waited for");
    assert!(!waits.is_finished(), "its holder still runs");
    let _ = here.settle(&lease, &complete(b"done")).await.unwrap();
    timeout(Duration::from_secs(20), waits).await.expect("it wakes").unwrap().unwrap();
    assert!(
        matches!(there.claim(&competing_request(&ask)).await.unwrap(), ClaimOutcome::Completed(done) if done.record == "done")
    );
    assert_eq!(server.sql(&name, marked), "0", "nobody waits any more");
}

#[tokio::test]
async fn a_thousand_waiters_hold_no_connections() {
    let server = TestPostgres::shared();
    let name = database(server);
    let url = server.url("gateway", &name) + "?pool=2";
    let store = open(&url).await;
    let mut leases = Vec::new();
    for _ in 0..50 {
        leases.push(claim_granted(&store, &claim_request()).await);
    }
    let waiters = join_all((0..1000).map(|nth| {
        let lease = &leases[nth % leases.len()];
        store.wait(&lease.request.address, lease.fence, LIMIT)
    }));
    let settles = async {
        tokio::time::sleep(Duration::from_millis(1500)).await;
        let used = format!("SELECT count(*) FROM pg_stat_activity WHERE datname = '{name}' AND usename = 'gateway'");
        let used: u32 = server.sql("postgres", &used).parse().unwrap();
        assert!((1..=3).contains(&used), "two connections and one that listens, and there are {used}");
        for lease in &leases {
            let _ = store.settle(lease, &complete(b"done")).await.unwrap();
        }
    };
    let (woken, ()) = timeout(LIMIT / 2, async { tokio::join!(waiters, settles) }).await.expect("all wake");
    assert!(woken.into_iter().all(|waited| waited.is_ok()));
}

#[tokio::test]
async fn a_waiter_wakes_although_the_listening_connection_was_cut() {
    let server = TestPostgres::shared();
    let name = database(server);
    let store = Arc::new(open(&server.url("gateway", &name)).await);
    let lease = claim_granted(&*store, &claim_request()).await;
    let waits = tokio::spawn({
        let (store, at, seen) = (store.clone(), lease.request.address, lease.fence);
        async move { store.wait(&at, seen, LIMIT).await }
    });
    let cut = format!(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = '{name}' AND query LIKE 'LISTEN%'"
    );
    let mut was_cut = false;
    for _ in 0..500 {
        was_cut = server.sql("postgres", &cut) != "0";
        if was_cut {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(was_cut, "somebody listened");
    let _ = store.settle(&lease, &complete(b"done")).await.unwrap();
    timeout(Duration::from_secs(20), waits).await.expect("it wakes").unwrap().unwrap();
}
