//! One server that crashes, freezes, forgets its scripts or is full: what callers are told, and that it heals.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use ibid::store::{ClaimOutcome, ClaimRequest, ClaimToken, ErrorKind, Lease, SettleOutcome, Settlement, Store};
use ibid_stores::{RemoteOptions, redis::Redis};
use testbed::TestRedis;

use super::{
    claim_and_complete, claim_granted, claim_request, claim_request_in_bucket, competing_request, complete,
    expect_completed, open, remote, wait_for,
};

async fn open_with_short_timeout(server: &TestRedis, timeout: Duration) -> Redis {
    Redis::open(&server.url(), RemoteOptions { timeout, ..remote() }).await.unwrap()
}

#[tokio::test]
async fn a_server_that_forgot_its_scripts_is_told_them_again() {
    let server = TestRedis::start();
    let store = open(&server.url()).await;
    let ask = claim_request();
    let lease = claim_granted(&store, &ask).await;
    server.cli(&["SCRIPT", "FLUSH"]);
    assert_eq!(store.settle(&lease, &complete(b"kept")).await.unwrap(), SettleOutcome::Applied);
    server.cli(&["SCRIPT", "FLUSH"]);
    assert_eq!(expect_completed(&store, &ask).await, &b"kept"[..]);
    // In the midst of many.
    let asks: Vec<_> = (0..200).map(|_| super::claim_request()).collect();
    let claims = join_all(asks.iter().map(|ask| store.claim(ask)));
    let (claims, ()) = tokio::join!(claims, async {
        for _ in 0..5 {
            server.cli(&["SCRIPT", "FLUSH"]);
            tokio::task::yield_now().await;
        }
    });
    assert!(claims.iter().all(|claim| matches!(claim, Ok(ClaimOutcome::Granted(_)))));
}

#[tokio::test]
async fn what_was_answered_survives_a_crash_and_the_store_heals_by_itself() {
    let server = TestRedis::start();
    let store = open(&server.url()).await;
    let (kept, running) = (claim_request(), claim_request());
    claim_and_complete(&store, &kept, b"kept").await;
    let lease = claim_granted(&store, &running).await;
    server.kill();
    let error = store.claim(&claim_request()).await.unwrap_err();
    assert!(matches!(error.kind, ErrorKind::NotApplied | ErrorKind::Ambiguous), "{error}");
    // By now it is known that the connection is gone: nothing is sent any more.
    let error = store.claim(&claim_request()).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::NotApplied, "{error}");
    server.restart();
    wait_for("the store to heal", async || store.get(&kept.address).await.ok()).await;
    assert_eq!(expect_completed(&store, &kept).await, &b"kept"[..]);
    let ClaimOutcome::Granted(again) = store.claim(&running).await.unwrap() else {
        panic!("the same token, the same answer")
    };
    assert_eq!((again.fence, again.attempt), (lease.fence, lease.attempt));
    assert_eq!(store.settle(&lease, &complete(b"after the crash")).await.unwrap(), SettleOutcome::Applied);
}

#[tokio::test]
async fn a_claim_that_was_under_way_when_the_server_died_is_ambiguous() {
    let server = TestRedis::start();
    let store = Arc::new(open(&server.url()).await);
    claim_granted(&*store, &claim_request()).await;
    server.pause();
    let (ask, asked) = (claim_request(), store.clone());
    let sent = ask.clone();
    let claim = tokio::spawn(async move { asked.claim(&sent).await });
    tokio::time::sleep(Duration::from_millis(200)).await;
    server.kill();
    let error = claim.await.unwrap().unwrap_err();
    assert_eq!(error.kind, ErrorKind::Ambiguous, "it was sent: {error}");
    server.restart();
    wait_for("the store to heal", async || store.get(&ask.address).await.ok()).await;
    claim_granted(&*store, &ask).await;
}

#[tokio::test]
async fn a_frozen_server_costs_a_deadline_then_nothing_and_repeats_are_safe() {
    let server = TestRedis::start();
    let store = open_with_short_timeout(&server, Duration::from_millis(400)).await;
    let ask = claim_request();
    claim_granted(&store, &super::claim_request()).await;
    server.pause();
    let mut kinds = Vec::new();
    let began = Instant::now();
    // Five failures in a row open the breaker.
    for _ in 0..6 {
        kinds.push(store.claim(&ask).await.unwrap_err().kind);
    }
    assert_eq!(kinds[0], ErrorKind::Ambiguous, "it was sent, and no answer came");
    assert!(began.elapsed() >= Duration::from_millis(400), "a deadline is waited for");
    let mut at_once = 0;
    for _ in 0..1000 {
        let asked = Instant::now();
        let error = store.claim(&super::claim_request()).await.unwrap_err();
        if error.kind == ErrorKind::NotApplied && asked.elapsed() < Duration::from_millis(400) {
            assert!(error.to_string().contains("left alone"), "{error}");
            at_once += 1;
            break;
        }
    }
    assert_eq!(at_once, 1, "an open breaker fails at once, saying that nothing was sent");
    server.resume();
    wait_for("the store to heal", async || store.get(&ask.address).await.ok()).await;
    // All copies that were under way have come by now: they are one claim.
    let lease = claim_granted(&store, &ask).await;
    assert_eq!(lease.attempt, 1);
    assert!(
        matches!(store.claim(&competing_request(&ask)).await.unwrap(), ClaimOutcome::InProgress(busy) if busy.fence == lease.fence)
    );
}

#[tokio::test]
async fn a_server_that_is_not_there_yet_is_no_reason_not_to_start() {
    let server = TestRedis::start();
    server.stop();
    let store = open_with_short_timeout(&server, Duration::from_millis(500)).await;
    let promise = store.guarantees();
    assert!(!promise.durable && promise.warnings.len() == 1, "{promise:?}");
    assert!(promise.warnings[0].contains("could not be checked"), "{promise:?}");
    let error = store.claim(&claim_request()).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::NotApplied, "{error}");
    server.restart();
    wait_for("the checks to be made", async || store.guarantees().warnings.is_empty().then_some(())).await;
    assert!(store.guarantees().durable);
    let _ = wait_for("a claim", async || store.claim(&claim_request()).await.ok()).await;
}

#[tokio::test]
async fn a_full_server_refuses_claims_and_still_settles_those_that_run() {
    let server = TestRedis::start();
    let store = open(&server.url()).await;
    let (first, second, third) = (claim_request(), claim_request(), claim_request());
    let runs = claim_granted(&store, &first).await;
    let released = claim_granted(&store, &second).await;
    let parked = claim_granted(&store, &third).await;
    // Below what it uses already.
    server.cli(&["CONFIG", "SET", "maxmemory", "100kb"]);
    let refused = claim_request();
    let error = store.claim(&refused).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Rejected, "{error}");
    assert!(error.to_string().contains("raise maxmemory"), "{error}");
    assert_eq!(
        store.extend(&runs, super::LONG_LEASE).await.unwrap(),
        SettleOutcome::Applied,
        "its lease must not lapse"
    );
    let waited = store.wait(&first.address, runs.fence, Duration::from_millis(1)).await;
    assert!(waited.is_ok(), "those who wait need no memory: {waited:?}");
    let never_came =
        Lease::unseen(&Arc::new(ClaimRequest { token: ClaimToken::mint(), ..ClaimRequest::clone(&first) }));
    assert!(matches!(store.settle(&never_came, &Settlement::Release).await.unwrap(), SettleOutcome::ClaimLost(_)));
    assert_eq!(store.settle(&runs, &complete(b"even so")).await.unwrap(), SettleOutcome::Applied);
    assert_eq!(store.settle(&released, &Settlement::Release).await.unwrap(), SettleOutcome::Applied);
    let park = Settlement::Park { ttl: super::LONG_LEASE, retry_in: Duration::ZERO };
    assert_eq!(store.settle(&parked, &park).await.unwrap(), SettleOutcome::Applied);
    assert_eq!(expect_completed(&store, &first).await, &b"even so"[..]);
    assert!(store.get(&refused.address).await.unwrap().is_none(), "a refused claim left nothing");
    server.cli(&["CONFIG", "SET", "maxmemory", "0"]);
    claim_granted(&store, &refused).await;
}

#[tokio::test]
async fn a_replica_is_not_claimed_on() {
    let primary = TestRedis::start();
    let replica = TestRedis::start_with_config(&[&format!("replicaof 127.0.0.1 {}", primary.port())]);
    replica.until("it has caught up", || replica.info("master_link_status") == "up");
    let store = open(&replica.url()).await;
    assert!(
        store.guarantees().warnings.iter().any(|wanting| wanting.contains("is a replica")),
        "{:?}",
        store.guarantees()
    );
    let error = store.claim(&claim_request()).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::NotApplied, "{error}");
}

#[tokio::test]
async fn what_somebody_else_wrote_is_corrupt_and_never_answered_from() {
    for server in [TestRedis::shared(), TestRedis::shared_valkey()] {
        let with = remote();
        let store = Redis::open(&server.url(), with.clone()).await.unwrap();
        let key = |at: &ibid::store::Address| format!("{}:{{{:02x}}}:{at}", with.prefix, at.0[0]);
        let (foreign, torn, cut) = (claim_request(), claim_request(), claim_request());
        server.cli(&["SET", &key(&foreign.address), "something else"]);
        claim_and_complete(&store, &torn, b"record").await;
        server.cli(&["SETRANGE", &key(&torn.address), "0", "2"]);
        claim_and_complete(&store, &cut, b"record").await;
        let cuts = "return redis.call('SET', KEYS[1], string.sub(redis.call('GET', KEYS[1]), 1, -8), 'KEEPTTL')";
        server.cli(&["EVAL", cuts, "1", &key(&cut.address)]);
        // A key that does not expire is a fault, not an expired lease.
        let endless = claim_request();
        claim_granted(&store, &endless).await;
        assert_eq!(server.cli(&["PERSIST", &key(&endless.address)]), "1");
        for ask in [foreign, torn, cut, endless] {
            for error in
                [store.claim(&competing_request(&ask)).await.unwrap_err(), store.get(&ask.address).await.unwrap_err()]
            {
                assert_eq!(error.kind, ErrorKind::Corrupt, "{error}");
            }
        }
    }
}

#[tokio::test]
async fn a_generation_starts_with_nothing_and_the_former_is_still_there() {
    let with = remote();
    let store = Redis::open(&TestRedis::shared().url(), with.clone()).await.unwrap();
    let ask = claim_request();
    let before = claim_and_complete(&store, &ask, b"of the first").await;
    store.set_generation(7);
    assert!(store.get(&ask.address).await.unwrap().is_none());
    let lease = claim_granted(&store, &competing_request(&ask)).await;
    assert!(lease.fence > before.fence, "fences grow beyond a generation");
    assert_eq!(store.admin().counts().await.unwrap().finished, 0);
    // What is left of a former generation is swept by nobody: it goes by itself.
    let index = format!("{}:7:{{{:02x}}}:index", with.prefix, ask.address.0[0]);
    let lives: i64 = TestRedis::shared().cli(&["PTTL", &index]).parse().unwrap();
    assert!(lives > (ask.lease + ask.ttl).as_millis() as i64 - 60_000, "{lives} ms");
    store.set_generation(0);
    assert_eq!(expect_completed(&store, &ask).await, &b"of the first"[..]);
}

/// What a crashed process leaves: its lists, which any other indexes.
#[tokio::test]
async fn claims_of_a_process_that_is_gone_are_indexed_by_others() {
    let server = TestRedis::start();
    let with = remote();
    let crashed = Redis::open(&server.url(), with.clone()).await.unwrap();
    let (open_claim, done) = (claim_request(), claim_request());
    claim_granted(&crashed, &open_claim).await;
    claim_and_complete(&crashed, &done, b"done").await;
    drop(crashed);
    let store = Redis::open(&server.url(), with.clone()).await.unwrap();
    let lists = || -> Vec<String> {
        let keys = server.cli(&["KEYS", &format!("{}:*:claims*", with.prefix)]);
        keys.lines().filter(|key| !key.is_empty()).map(str::to_owned).collect()
    };
    let counts = store.admin().counts().await.unwrap();
    assert_eq!((counts.processing, counts.unknown), (1, 0), "a listing reads the lists of all");
    // The two claims may fall into two seconds.
    assert!((2..=3).contains(&lists().len()), "a list for each second, and the registry: {:?}", lists());
    // As if it had been gone for a minute.
    let registry = lists().into_iter().find(|key| key.ends_with(":claims")).unwrap();
    let name = server.cli(&["ZRANGE", &registry, "0", "-1"]);
    server.cli(&["ZADD", &registry, "1", &name]);
    server.cli(&["DEL", &format!("{}:{{{:02x}}}:index", with.prefix, open_claim.address.0[0])]);
    let _ = store.sweep(10).await.unwrap();
    assert_eq!(lists(), [""; 0], "they are deleted once they are indexed");
    assert_eq!(store.admin().counts().await.unwrap().processing, 1);
}

#[tokio::test]
async fn claims_that_stay_open_are_indexed_and_their_lists_deleted() {
    let server = TestRedis::start();
    let with = remote();
    let store = Redis::open(&server.url(), with.clone()).await.unwrap();
    let ask = claim_request_in_bucket(0xa5);
    claim_granted(&store, &ask).await;
    let index = format!("{}:{{a5}}:index", with.prefix);
    wait_for("the index", async || (server.cli(&["ZCARD", &index]) == "1").then_some(())).await;
    wait_for("the list to be deleted", async || {
        server.cli(&["KEYS", &format!("{}:*:claims*", with.prefix)]).is_empty().then_some(())
    })
    .await;
    assert_eq!(store.admin().counts().await.unwrap().processing, 1);
}
