//! A cluster: slots that move, nodes that die, and shards that do not care.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use ibid::store::{ClaimOutcome, ErrorKind, SettleOutcome, Store};
use ibid_stores::{
    RemoteOptions,
    local_cache::{AnswerCache, LocalCache},
    redis::Redis,
};
use testbed::{RedisCluster, TestRedis};

use super::{
    claim_and_complete, claim_granted, claim_request_in_bucket, competing_request, expect_completed, open, remote,
    wait_for,
};

/// The slot of a bucket, as the server says.
fn slot(server: &TestRedis, bucket: u8) -> usize {
    server.cli(&["CLUSTER", "KEYSLOT", &format!("{{{bucket:02x}}}")]).parse().unwrap()
}

/// A bucket that the nth primary owns.
fn bucket_of(cluster: &RedisCluster, nth: usize) -> u8 {
    (0..=u8::MAX).find(|bucket| cluster.first_owner(slot(&cluster.primaries[0], *bucket)) == nth).unwrap()
}

#[tokio::test]
async fn a_shard_that_fails_over_does_not_hold_up_the_others() {
    assert_other_shards_serve(RedisCluster::start(), |server| server.kill()).await;
    assert_other_shards_serve(RedisCluster::start_valkey(), |server| server.kill()).await;
}

#[tokio::test]
async fn a_node_that_is_silent_does_not_hold_up_the_others() {
    assert_other_shards_serve(RedisCluster::start(), |server| server.pause()).await;
}

async fn assert_other_shards_serve(cluster: RedisCluster, happens: fn(&TestRedis)) {
    let with = RemoteOptions { timeout: Duration::from_secs(1), wait_replicas: 1, ..remote() };
    let store = Arc::new(Redis::open(&cluster.url(), with).await.unwrap());
    let (hit, spared) = (bucket_of(&cluster, 1), bucket_of(&cluster, 2));
    let kept = claim_request_in_bucket(hit);
    let _ = wait_for("replicas that acknowledge", async || match store.claim(&kept).await {
        Ok(ClaimOutcome::Granted(lease)) => store.settle(&lease, &super::complete(b"on both")).await.ok(),
        Ok(_) => Some(ibid::store::SettleOutcome::Applied),
        Err(_) => None,
    })
    .await;
    let _ = wait_for("replicas of the other shard", async || store.claim(&claim_request_in_bucket(spared)).await.ok())
        .await;
    happens(&cluster.primaries[1]);
    let over = Arc::new(AtomicBool::new(false));
    let others = tokio::spawn({
        let (store, over) = (store.clone(), over.clone());
        async move {
            let mut claimed = 0;
            while !over.load(Relaxed) {
                let claim = store.claim(&claim_request_in_bucket(spared)).await;
                assert!(matches!(claim, Ok(ClaimOutcome::Granted(_))), "another shard was held up: {claim:?}");
                claimed += 1;
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            claimed
        }
    });
    let mut failed = 0;
    wait_for("the shard to fail over", async || match store.get(&kept.address).await {
        Ok(found) => {
            assert!(matches!(found, Some(ClaimOutcome::Completed(_))), "a replicated answer was lost: {found:?}");
            Some(())
        }
        Err(error) => {
            failed += 1;
            assert!(matches!(error.kind, ErrorKind::NotApplied | ErrorKind::Ambiguous), "{error}");
            None
        }
    })
    .await;
    over.store(true, Relaxed);
    assert!(others.await.unwrap() > 0);
    assert!(failed > 0, "the shard was gone for a while");
    cluster.replicas[1].until("the replica is the primary", || cluster.replicas[1].info("role") == "master");
}

#[tokio::test]
async fn a_slot_that_moves_is_followed_while_it_moves_and_afterwards() {
    assert_moving_slot_followed(RedisCluster::start()).await;
    assert_moving_slot_followed(RedisCluster::start_valkey()).await;
}

async fn assert_moving_slot_followed(cluster: RedisCluster) {
    let with = remote();
    let store = Redis::open(&cluster.url(), with.clone()).await.unwrap();
    let replicated = Redis::open(&cluster.url(), RemoteOptions { wait_replicas: 1, ..with }).await.unwrap();
    let (from, to) = (&cluster.primaries[0], &cluster.primaries[1]);
    let bucket = bucket_of(&cluster, 0);
    let slot = slot(from, bucket).to_string();
    let (running, kept) = (claim_request_in_bucket(bucket), claim_request_in_bucket(bucket));
    let lease = claim_granted(&store, &running).await;
    claim_and_complete(&store, &kept, b"moves along").await;

    let (from_id, to_id) = (from.cli(&["CLUSTER", "MYID"]), to.cli(&["CLUSTER", "MYID"]));
    assert_eq!(to.cli(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from_id]), "OK");
    assert_eq!(from.cli(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to_id]), "OK");
    assert_eq!(expect_completed(&store, &kept).await, &b"moves along"[..], "nothing has moved yet");

    let keys = from.cli(&["CLUSTER", "GETKEYSINSLOT", &slot, "1000"]);
    let keys: Vec<&str> = keys.lines().collect();
    for ask in [&running, &kept] {
        assert!(keys.iter().any(|key| key.ends_with(&ask.address.to_string())), "both entries: {keys:?}");
    }
    let port = to.port().to_string();
    let mut migrate = vec!["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "KEYS"];
    migrate.extend(&keys);
    assert_eq!(from.cli(&migrate), "OK");
    // The old node still owns the slot and has nothing of it: ASK.
    assert_eq!(expect_completed(&store, &kept).await, &b"moves along"[..], "asked for where it is going to");
    assert!(matches!(store.claim(&running).await.unwrap(), ClaimOutcome::Granted(again) if again.fence == lease.fence));

    assert!(
        matches!(replicated.claim(&running).await.unwrap(), ClaimOutcome::Granted(again) if again.fence == lease.fence)
    );
    for node in [to, from, &cluster.primaries[2]] {
        assert_eq!(node.cli(&["CLUSTER", "SETSLOT", &slot, "NODE", &to_id]), "OK");
    }
    // Now it belongs to the other: MOVED.
    assert_eq!(
        store.settle(&lease, &super::complete(b"in its new place")).await.unwrap(),
        ibid::store::SettleOutcome::Applied
    );
    assert_eq!(expect_completed(&store, &running).await, &b"in its new place"[..]);
    claim_granted(&store, &claim_request_in_bucket(bucket)).await;
    let moved: u32 = to.cli(&["CLUSTER", "COUNTKEYSINSLOT", &slot]).parse().unwrap();
    assert!(moved >= 3, "two entries that have moved, and a new one: {moved}");
}

#[tokio::test]
async fn every_call_is_served_while_a_slot_is_half_moved() {
    assert_half_moved_slot_served(RedisCluster::start()).await;
    assert_half_moved_slot_served(RedisCluster::start_valkey()).await;
}

async fn assert_half_moved_slot_served(cluster: RedisCluster) {
    let store = open(&cluster.url()).await;
    let (from, to) = (&cluster.primaries[2], &cluster.primaries[0]);
    let bucket = bucket_of(&cluster, 2);
    let slot = slot(from, bucket).to_string();
    let running = claim_request_in_bucket(bucket);
    let lease = claim_granted(&store, &running).await;
    let (from_id, to_id) = (from.cli(&["CLUSTER", "MYID"]), to.cli(&["CLUSTER", "MYID"]));
    assert_eq!(to.cli(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from_id]), "OK");
    assert_eq!(from.cli(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to_id]), "OK");
    // What is there is answered by the old node, what is new goes to the next one.
    assert!(matches!(store.claim(&running).await.unwrap(), ClaimOutcome::Granted(again) if again.fence == lease.fence));
    assert!(matches!(store.claim(&competing_request(&running)).await.unwrap(), ClaimOutcome::InProgress(_)));
    let fresh = claim_request_in_bucket(bucket);
    let second = claim_granted(&store, &fresh).await;
    assert_eq!(to.cli(&["CLUSTER", "COUNTKEYSINSLOT", &slot]), "1");
    assert_eq!(store.extend(&lease, Duration::from_secs(900)).await.unwrap(), SettleOutcome::Applied);
    assert_eq!(store.extend(&second, Duration::from_secs(900)).await.unwrap(), SettleOutcome::Applied);
    assert_eq!(store.settle(&second, &super::complete(b"at the next node")).await.unwrap(), SettleOutcome::Applied);
    assert_eq!(expect_completed(&store, &fresh).await, &b"at the next node"[..]);
    let keys = from.cli(&["CLUSTER", "GETKEYSINSLOT", &slot, "1000"]);
    let port = to.port().to_string();
    let mut migrate = vec!["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "REPLACE", "KEYS"];
    migrate.extend(keys.lines());
    assert_eq!(from.cli(&migrate), "OK");
    for node in [to, from, &cluster.primaries[1]] {
        assert_eq!(node.cli(&["CLUSTER", "SETSLOT", &slot, "NODE", &to_id]), "OK");
    }
    assert_eq!(store.settle(&lease, &super::complete(b"moved along")).await.unwrap(), SettleOutcome::Applied);
    assert_eq!(expect_completed(&store, &running).await, &b"moved along"[..]);
}

/// A local cache, when a slot gets another owner: the former one reports nothing any more.
#[tokio::test]
async fn a_slot_that_moves_empties_the_local_cache() {
    assert_cache_emptied(RedisCluster::start()).await;
    assert_cache_emptied(RedisCluster::start_valkey()).await;
}

async fn assert_cache_emptied(cluster: RedisCluster) {
    let answers = AnswerCache::new(1 << 20);
    let with = RemoteOptions { answer_cache: Some(answers.clone()), ..remote() };
    let store = Redis::open(&cluster.url(), with).await.unwrap();
    let cached = LocalCache::new(Arc::new(store), answers.clone());
    let (from, to) = (&cluster.primaries[0], &cluster.primaries[1]);
    let bucket = bucket_of(&cluster, 0);
    let slot = slot(from, bucket).to_string();
    claim_and_complete(&cached, &claim_request_in_bucket(bucket), b"cached").await;
    assert_eq!(answers.len(), 1);
    // The other node takes the slot over by force.
    let to_id = to.cli(&["CLUSTER", "MYID"]);
    assert_eq!(to.cli(&["CLUSTER", "SETSLOT", &slot, "NODE", &to_id]), "OK");
    to.cli(&["CLUSTER", "BUMPEPOCH"]);
    from.until("it has lost the slot", || from.cli(&["CLUSTER", "COUNTKEYSINSLOT", &slot]) == "0");
    claim_granted(&cached, &claim_request_in_bucket(bucket)).await;
    wait_for("the cache to be emptied", async || answers.is_empty().then_some(())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_go_on_through_a_real_reshard() {
    assert_served_while_resharding(RedisCluster::start()).await;
    assert_served_while_resharding(RedisCluster::start_valkey()).await;
}

async fn assert_served_while_resharding(cluster: RedisCluster) {
    let store = Arc::new(open(&cluster.url()).await);
    let asks: Vec<_> = (0..=u8::MAX).map(claim_request_in_bucket).collect();
    for ask in &asks {
        claim_and_complete(&*store, ask, b"remembered").await;
    }
    let (from, to) = (cluster.primaries[0].cli(&["CLUSTER", "MYID"]), cluster.primaries[2].cli(&["CLUSTER", "MYID"]));
    let port = format!("127.0.0.1:{}", cluster.primaries[0].port());
    let mut reshard = tokio::process::Command::new("redis-cli");
    reshard.args(["--cluster", "reshard", &port, "--cluster-from", &from, "--cluster-to", &to]);
    reshard.args(["--cluster-slots", "1500", "--cluster-yes"]).kill_on_drop(true);
    let reshard = tokio::time::timeout(Duration::from_secs(120), reshard.output());
    let over = Arc::new(AtomicBool::new(false));
    let asking = tokio::spawn({
        let (store, over, asks) = (store.clone(), over.clone(), asks.clone());
        async move {
            let mut rounds = 0;
            while !over.load(Relaxed) || rounds == 0 {
                for ask in &asks {
                    assert_eq!(expect_completed(&*store, ask).await, &b"remembered"[..]);
                    claim_granted(&*store, &claim_request_in_bucket(ask.address.0[0])).await;
                }
                rounds += 1;
            }
        }
    });
    let output = reshard.await.expect("it ends").unwrap();
    over.store(true, Relaxed);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    asking.await.unwrap();
    for ask in &asks {
        assert_eq!(expect_completed(&*store, ask).await, &b"remembered"[..]);
    }
}
