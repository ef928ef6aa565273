//! Behind sentinels: the primary dies, another takes its place.

use std::time::Duration;

use ibid::store::{ClaimOutcome, ErrorKind, Store};
use ibid_stores::{RemoteOptions, redis::Redis};
use testbed::{RedisSentinels, TestRedis};

use super::{claim_and_complete, claim_granted, claim_request, expect_completed, open, remote, wait_for};

#[tokio::test]
async fn the_next_primary_is_found_without_reopening() {
    assert_next_primary_found(RedisSentinels::start()).await;
    assert_next_primary_found(RedisSentinels::start_valkey()).await;
}

async fn assert_next_primary_found(all: RedisSentinels) {
    let store =
        Redis::open(&all.url(), RemoteOptions { timeout: Duration::from_secs(2), wait_replicas: 1, ..remote() })
            .await
            .unwrap();
    let ask = claim_request();
    claim_and_complete(&store, &ask, b"on both").await;
    all.primary.kill();
    let error = store.claim(&super::claim_request()).await.unwrap_err();
    assert!(matches!(error.kind, ErrorKind::NotApplied | ErrorKind::Ambiguous), "{error}");
    wait_for("the next primary", async || match store.get(&ask.address).await {
        Ok(found) => {
            assert!(matches!(found, Some(ClaimOutcome::Completed(_))), "a replicated answer was lost: {found:?}");
            Some(())
        }
        Err(error) => {
            assert!(matches!(error.kind, ErrorKind::NotApplied | ErrorKind::Ambiguous), "{error}");
            None
        }
    })
    .await;
    assert_eq!(expect_completed_by_get(&store, &ask).await, &b"on both"[..]);
    assert_eq!(all.replica.info("role"), "master");
}

#[tokio::test]
async fn an_old_primary_that_still_answers_is_left_when_the_sentinels_say_so() {
    let all = RedisSentinels::start();
    let store = open(&all.url()).await;
    claim_granted(&store, &claim_request()).await;
    all.sentinels[0].cli(&["SENTINEL", "FAILOVER", "ibid-primary"]);
    all.replica.until("the replica is the primary", || all.replica.info("role") == "master");
    // The former primary may refuse for a while, or take claims that nobody will see: in the end they go to the other.
    wait_for("claims to go to the next primary", async || {
        let ask = claim_request();
        let _ = store.claim(&ask).await;
        all.replica.cli(&["KEYS", "*"]).contains(&ask.address.to_string()).then_some(())
    })
    .await;
    let _ = wait_for("a claim that is granted", async || store.claim(&claim_request()).await.ok()).await;
    let before: u64 = set_calls(&all.replica);
    wait_for("a claim at the next primary", async || {
        let ask = claim_request();
        let _ = store.claim(&ask).await.ok()?;
        (set_calls(&all.replica) > before).then_some(())
    })
    .await;
}

/// Valkey answers WAIT at once on a connection that wrote nothing, so a repeated call must write.
#[tokio::test]
async fn fewer_replicas_than_asked_for_is_ambiguous_and_the_repeat_says_so_too() {
    assert_replicas_counted(TestRedis::start()).await;
    assert_replicas_counted(TestRedis::start_valkey()).await;
}

async fn assert_replicas_counted(primary: TestRedis) {
    let replica = primary.start_replica();
    let with = RemoteOptions { timeout: Duration::from_secs(1), wait_replicas: 1, ..remote() };
    let store = Redis::open(&primary.url(), with.clone()).await.unwrap();
    // WAIT promises something for its own connection only: whoever asks again may do so on another.
    let other = Redis::open(&primary.url(), with).await.unwrap();
    let kept = claim_request();
    let _ = wait_for("the replica to acknowledge", async || store.claim(&claim_request()).await.ok()).await;
    claim_and_complete(&store, &kept, b"on both").await;
    replica.pause();
    let (lost, running) = (claim_request(), claim_request());
    let error = store.claim(&lost).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Ambiguous, "{error}");
    assert!(error.to_string().contains("0 of 1 replicas"), "{error}");
    // The claim is there by now, and this call writes nothing: its replicas are counted all the same.
    let error = other.claim(&lost).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Ambiguous, "a repeated claim was answered without a replica: {error}");
    // What needs no replica is answered.
    assert_eq!(expect_completed(&store, &kept).await, &b"on both"[..]);
    replica.resume();
    let lease = wait_for("the replica to catch up", async || match store.claim(&lost).await {
        Ok(ClaimOutcome::Granted(lease)) => Some(lease),
        _ => None,
    })
    .await;
    assert_eq!(lease.attempt, 1);
    let lease = claim_granted(&store, &running).await;
    replica.pause();
    for store in [&store, &other] {
        let error = store.settle(&lease, &super::complete(b"not yet on both")).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Ambiguous, "{error}");
    }
    replica.resume();
    let _ =
        wait_for("the completion to be there", async || store.settle(&lease, &super::complete(b"again")).await.ok())
            .await;
    assert_eq!(expect_completed(&store, &running).await, &b"not yet on both"[..], "the first record stays");
    // While replicas are waited for, other calls go on, on few connections.
    let connections = primary.cli(&["CLIENT", "LIST", "TYPE", "normal"]).lines().count();
    assert!(connections <= 40, "{connections} connections");
}

async fn expect_completed_by_get(store: &dyn Store, ask: &std::sync::Arc<ibid::store::ClaimRequest>) -> bytes::Bytes {
    match store.get(&ask.address).await.unwrap() {
        Some(ClaimOutcome::Completed(done)) => done.record,
        other => panic!("{other:?}"),
    }
}

fn set_calls(server: &TestRedis) -> u64 {
    let stats = server.cli(&["INFO", "commandstats"]);
    let count = |name: &str| {
        let line = stats.lines().find(|line| line.starts_with(name));
        line.map_or(0, |line| line.split(['=', ',']).nth(1).unwrap().parse::<u64>().unwrap())
    };
    count("cmdstat_set:")
}
