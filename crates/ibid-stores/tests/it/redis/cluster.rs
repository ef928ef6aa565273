//! A cluster: slots that move, nodes that die, and shards that do not care.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use ibid::store::{Claim, ErrorKind, Store};
use ibid_stores::{Remote, redis::Redis};
use ibid_testkit::servers::redis::{Cluster, Server};

use super::{ask_in, done, finished, granted, open, remote, until};

/// The slot of a bucket, as the server says.
fn slot(server: &Server, bucket: u8) -> usize {
    server.cli(&["CLUSTER", "KEYSLOT", &format!("{{{bucket:02x}}}")]).parse().unwrap()
}

/// A bucket that the nth primary owns.
fn bucket_of(cluster: &Cluster, nth: usize) -> u8 {
    (0..=u8::MAX).find(|bucket| cluster.first_owner(slot(&cluster.primaries[0], *bucket)) == nth).unwrap()
}

#[tokio::test]
async fn a_shard_that_fails_over_does_not_hold_up_the_others() {
    others_go_on_while(Server::kill).await;
}

#[tokio::test]
async fn a_node_that_is_silent_does_not_hold_up_the_others() {
    others_go_on_while(Server::pause).await;
}

async fn others_go_on_while(happens: fn(&Server)) {
    let cluster = Cluster::start();
    let with = Remote { timeout: Duration::from_secs(1), wait_replicas: 1, ..remote() };
    let store = Arc::new(Redis::open(&cluster.url(), with).await.unwrap());
    let (hit, spared) = (bucket_of(&cluster, 1), bucket_of(&cluster, 2));
    let kept = ask_in(hit);
    let _ = until("replicas that acknowledge", async || match store.claim(&kept).await {
        Ok(Claim::Granted(lease)) => store.settle(&lease, &super::complete(b"on both")).await.ok(),
        Ok(_) => Some(ibid::store::Held::Held),
        Err(_) => None,
    })
    .await;
    let _ = until("replicas of the other shard", async || store.claim(&ask_in(spared)).await.ok()).await;
    happens(&cluster.primaries[1]);
    let over = Arc::new(AtomicBool::new(false));
    let others = tokio::spawn({
        let (store, over) = (store.clone(), over.clone());
        async move {
            let mut claimed = 0;
            while !over.load(Relaxed) {
                let claim = store.claim(&ask_in(spared)).await;
                assert!(matches!(claim, Ok(Claim::Granted(_))), "another shard was held up: {claim:?}");
                claimed += 1;
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            claimed
        }
    });
    let mut failed = 0;
    until("the shard to fail over", async || match store.get(&kept.address).await {
        Ok(found) => {
            assert!(matches!(found, Some(Claim::Done(_))), "a replicated answer was lost: {found:?}");
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
    let cluster = Cluster::start();
    let with = remote();
    let store = Redis::open(&cluster.url(), with.clone()).await.unwrap();
    let replicated = Redis::open(&cluster.url(), Remote { wait_replicas: 1, ..with }).await.unwrap();
    let (from, to) = (&cluster.primaries[0], &cluster.primaries[1]);
    let bucket = bucket_of(&cluster, 0);
    let slot = slot(from, bucket).to_string();
    let (running, kept) = (ask_in(bucket), ask_in(bucket));
    let lease = granted(&store, &running).await;
    finished(&store, &kept, b"moves along").await;

    let (from_id, to_id) = (from.cli(&["CLUSTER", "MYID"]), to.cli(&["CLUSTER", "MYID"]));
    assert_eq!(to.cli(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from_id]), "OK");
    assert_eq!(from.cli(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to_id]), "OK");
    assert_eq!(done(&store, &kept).await, &b"moves along"[..], "nothing has moved yet");

    let keys = from.cli(&["CLUSTER", "GETKEYSINSLOT", &slot, "1000"]);
    let keys: Vec<&str> = keys.lines().collect();
    assert_eq!(keys.len(), 4, "two entries, the index, the fences: {keys:?}");
    let port = to.port().to_string();
    let mut migrate = vec!["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "KEYS"];
    migrate.extend(&keys);
    assert_eq!(from.cli(&migrate), "OK");
    // The old node still owns the slot and has nothing of it: ASK.
    assert_eq!(done(&store, &kept).await, &b"moves along"[..], "asked for where it is going to");
    assert!(matches!(store.claim(&running).await.unwrap(), Claim::Granted(again) if again.fence == lease.fence));

    assert!(matches!(replicated.claim(&running).await.unwrap(), Claim::Granted(again) if again.fence == lease.fence));
    for node in [to, from, &cluster.primaries[2]] {
        assert_eq!(node.cli(&["CLUSTER", "SETSLOT", &slot, "NODE", &to_id]), "OK");
    }
    // Now it belongs to the other: MOVED.
    assert_eq!(store.settle(&lease, &super::complete(b"in its new place")).await.unwrap(), ibid::store::Held::Held);
    assert_eq!(done(&store, &running).await, &b"in its new place"[..]);
    granted(&store, &ask_in(bucket)).await;
    assert_eq!(to.cli(&["CLUSTER", "COUNTKEYSINSLOT", &slot]), "5");
}

#[tokio::test]
async fn a_new_claim_waits_for_a_slot_that_is_half_moved() {
    let cluster = Cluster::start();
    let with = Remote { timeout: Duration::from_millis(700), ..remote() };
    let hasty = Redis::open(&cluster.url(), with.clone()).await.unwrap();
    let patient = Redis::open(&cluster.url(), Remote { timeout: Duration::from_secs(20), ..with }).await.unwrap();
    let (from, to) = (&cluster.primaries[2], &cluster.primaries[0]);
    let bucket = bucket_of(&cluster, 2);
    let slot = slot(from, bucket).to_string();
    let running = ask_in(bucket);
    granted(&hasty, &running).await;
    let (from_id, to_id) = (from.cli(&["CLUSTER", "MYID"]), to.cli(&["CLUSTER", "MYID"]));
    assert_eq!(to.cli(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from_id]), "OK");
    assert_eq!(from.cli(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to_id]), "OK");
    let fresh = ask_in(bucket);
    let error = hasty.claim(&fresh).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::NotApplied, "{error}");
    assert!(error.to_string().contains("is being moved"), "{error}");
    assert!(matches!(hasty.claim(&running).await.unwrap(), Claim::Granted(_)), "what is there is answered");
    let finishes = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let keys = from.cli(&["CLUSTER", "GETKEYSINSLOT", &slot, "1000"]);
        let port = to.port().to_string();
        let mut migrate = vec!["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "KEYS"];
        migrate.extend(keys.lines());
        assert_eq!(from.cli(&migrate), "OK");
        for node in [to, from, &cluster.primaries[1]] {
            assert_eq!(node.cli(&["CLUSTER", "SETSLOT", &slot, "NODE", &to_id]), "OK");
        }
    };
    let (claim, ()) = tokio::join!(patient.claim(&fresh), finishes);
    let Ok(Claim::Granted(lease)) = claim else { panic!("{claim:?}") };
    assert_eq!(lease.attempt, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_go_on_through_a_real_reshard() {
    let cluster = Cluster::start();
    let store = Arc::new(open(&cluster.url()).await);
    let asks: Vec<_> = (0..=u8::MAX).map(ask_in).collect();
    for ask in &asks {
        finished(&*store, ask, b"remembered").await;
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
                    assert_eq!(done(&*store, ask).await, &b"remembered"[..]);
                    granted(&*store, &ask_in(ask.address.0[0])).await;
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
        assert_eq!(done(&*store, ask).await, &b"remembered"[..]);
    }
}
