//! One server that crashes, freezes, forgets its scripts or is full: what callers are told, and that it heals.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use ibid::observe::NoopObserver;
use ibid::store::{ClaimOutcome, ClaimRequest, ClaimToken, ErrorKind, Lease, SettleOutcome, Settlement, Store};
use ibid_stores::{
    RemoteOptions,
    redis::Redis,
    seal::{SealKey, SealOptions, SealedStore, Sealer},
};
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
    server.cli(&["CONFIG", "SET", "maxmemory", "1mb"]);
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
    let server = TestRedis::shared();
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
    for ask in [foreign, torn, cut] {
        for error in
            [store.claim(&competing_request(&ask)).await.unwrap_err(), store.get(&ask.address).await.unwrap_err()]
        {
            assert_eq!(error.kind, ErrorKind::Corrupt, "{error}");
        }
    }
    // A key that does not expire is a fault, not an expired lease.
    let kept = claim_request();
    claim_granted(&store, &kept).await;
    assert_eq!(server.cli(&["PERSIST", &key(&kept.address)]), "1");
    let error = store.claim(&competing_request(&kept)).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Corrupt, "{error}");
}

/// Writes another fence into an entry.
fn set_fence(server: &TestRedis, with: &RemoteOptions, at: &ibid::store::Address, fence: u64) {
    let sets = "local v = redis.call('GET', KEYS[1]) \
                return redis.call('SET', KEYS[1], string.sub(v, 1, 8) .. struct.pack('>I8', ARGV[1]) .. string.sub(v, 17), \
                'KEEPTTL')";
    let key = format!("{}:{{{:02x}}}:{at}", with.prefix, at.0[0]);
    assert_eq!(server.cli(&["EVAL", sets, "1", &key, &fence.to_string()]), "OK");
}

#[tokio::test]
async fn a_clock_that_goes_back_does_not_bring_old_fences_back() {
    for server in [TestRedis::shared(), TestRedis::shared_valkey()] {
        let with = remote();
        let store = Redis::open(&server.url(), with.clone()).await.unwrap();
        let ask = claim_request();
        let first = claim_granted(&store, &ask).await;
        assert_eq!(store.settle(&first, &Settlement::Release).await.unwrap(), SettleOutcome::Applied);
        // As if the clock had been an hour ahead when that fence was given.
        let ahead = first.fence.0 + 3_600_000_000;
        set_fence(server, &with, &ask.address, ahead);
        assert_eq!(claim_granted(&store, &competing_request(&ask)).await.fence.0, ahead + 1);
    }
}

#[tokio::test]
async fn the_fence_of_a_short_lived_entry_is_remembered_for_a_minute() {
    for server in [TestRedis::shared(), TestRedis::shared_valkey()] {
        let with = remote();
        let store = Redis::open(&server.url(), with.clone()).await.unwrap();
        let key = |at: &ibid::store::Address| format!("{}:{{{:02x}}}:{at}", with.prefix, at.0[0]);
        let short = Duration::from_millis(20);
        // Once by a short claim, once by a short answer of a long claim.
        let claimed = Arc::new(ClaimRequest { lease: short, ttl: short, ..(*claim_request()).clone() });
        claim_granted(&store, &claimed).await;
        let answered = claim_request();
        let lease = claim_granted(&store, &answered).await;
        let end = complete(b"short").map_record(Clone::clone);
        let Settlement::Complete { failed, record, summary, .. } = end else { unreachable!() };
        let end = Settlement::Complete { failed, record, summary, ttl: short };
        assert_eq!(store.settle(&lease, &end).await.unwrap(), SettleOutcome::Applied);
        for ask in [claimed, answered] {
            wait_for("the entry to expire", async || store.get(&ask.address).await.unwrap().is_none().then_some(()))
                .await;
            let left: i64 = server.cli(&["PTTL", &key(&ask.address)]).parse().unwrap();
            assert!(left > 30_000, "its key stays: {left} ms");
            let ahead = lease.fence.0 + 3_600_000_000;
            set_fence(server, &with, &ask.address, ahead);
            let next = claim_granted(&store, &competing_request(&ask)).await;
            assert_eq!((next.fence.0, next.attempt), (ahead + 1, 1), "a new entry, above the fence before");
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

#[tokio::test]
async fn claim_settle_and_replay_are_one_round_trip_each() {
    let server = TestRedis::start();
    let store = open(&server.url()).await;
    let warm = claim_request();
    claim_and_complete(&store, &warm, b"the server knows the scripts now").await;
    expect_completed(&store, &warm).await;
    server.cli(&["CONFIG", "RESETSTAT"]);
    for _ in 0..10 {
        let ask = claim_request();
        claim_and_complete(&store, &ask, b"answer").await;
        expect_completed(&store, &ask).await;
    }
    let stats = server.cli(&["INFO", "commandstats"]);
    let calls = |name: &str| -> u64 {
        let line = stats.lines().find(|line| line.starts_with(&format!("cmdstat_{name}:")));
        line.map_or(0, |line| line.split(['=', ',']).nth(1).unwrap().parse().unwrap())
    };
    // A script's own commands count too.
    assert_eq!((calls("set"), calls("evalsha")), (30, 10), "10 claims, 10 replays, 10 completions:\n{stats}");
    assert_eq!((calls("eval"), calls("script|load"), calls("multi"), calls("time")), (0, 0, 0, 0), "{stats}");
    assert_eq!(calls("rpush"), 20, "one per write that claims:\n{stats}");
}

#[tokio::test]
async fn where_the_server_compares_and_sets_no_script_runs() {
    let server = TestRedis::start_valkey();
    let store = open(&server.url()).await;
    for _ in 0..10 {
        let ask = claim_request();
        claim_and_complete(&store, &ask, b"answer").await;
        expect_completed(&store, &ask).await;
    }
    // An encrypted request is encrypted once: its holder names the same bytes when it completes.
    let key = SealKey::new("k", [7; 32]).unwrap();
    let sealer = Sealer::new(key, Vec::new(), &[9; 32], SealOptions::default());
    let sealed = SealedStore::new(Arc::new(store), sealer, Arc::new(NoopObserver));
    let ask = claim_request();
    claim_and_complete(&sealed, &ask, b"sealed").await;
    assert_eq!(expect_completed(&sealed, &ask).await, &b"sealed"[..]);
    let stats = server.cli(&["INFO", "commandstats"]);
    assert!(!stats.contains("cmdstat_evalsha"), "{stats}");
}

/// `SET … IFEQ` that is not applied proves nothing: the holder may have been extended by other means, completed before,
/// or the entry may be gone.
#[tokio::test]
async fn a_compare_and_set_that_is_not_applied_is_decided_by_the_script() {
    let server = TestRedis::shared_valkey();
    let with = remote();
    let store = Redis::open(&server.url(), with.clone()).await.unwrap();
    // Another claim of which only the token is known was spent beside the holder: the value has changed.
    let ask = claim_request();
    let lease = claim_granted(&store, &ask).await;
    let other = Lease::unseen(&competing_request(&ask));
    assert!(matches!(store.settle(&other, &Settlement::Release).await.unwrap(), SettleOutcome::ClaimLost(_)));
    assert_eq!(store.settle(&lease, &complete(b"mine")).await.unwrap(), SettleOutcome::Applied);
    // Applied before: the first record stays.
    assert_eq!(store.settle(&lease, &complete(b"again")).await.unwrap(), SettleOutcome::Applied);
    assert_eq!(expect_completed(&store, &ask).await, &b"mine"[..]);
    // Absent: put back.
    let gone = claim_request();
    let lease = claim_granted(&store, &gone).await;
    server.cli(&["DEL", &format!("{}:{{{:02x}}}:{}", with.prefix, gone.address.0[0], gone.address)]);
    assert_eq!(store.settle(&lease, &complete(b"put back")).await.unwrap(), SettleOutcome::Restored);
    assert_eq!(expect_completed(&store, &gone).await, &b"put back"[..]);
    // Somebody else's: lost.
    let taken = Arc::new(ClaimRequest { lease: Duration::from_millis(1), ..(*claim_request()).clone() });
    let lease = claim_granted(&store, &taken).await;
    let takes_over = Arc::new(ClaimRequest { take_over: Some(lease.fence), ..(*competing_request(&taken)).clone() });
    wait_for("the lapse", async || match store.claim(&takes_over).await.unwrap() {
        ClaimOutcome::Granted(_) => Some(()),
        _ => None,
    })
    .await;
    assert!(matches!(store.settle(&lease, &complete(b"late")).await.unwrap(), SettleOutcome::ClaimLost(_)));
}

#[tokio::test]
async fn a_server_that_refuses_writes_still_replays() {
    for server in [TestRedis::start(), TestRedis::start_valkey()] {
        let store = open(&server.url()).await;
        let (kept, running) = (claim_request(), claim_request());
        claim_and_complete(&store, &kept, b"kept").await;
        claim_granted(&store, &running).await;
        for (name, value, sound, kind) in
            [("maxmemory", "1mb", "0", ErrorKind::Rejected), ("min-replicas-to-write", "1", "0", ErrorKind::Rejected)]
        {
            server.cli(&["CONFIG", "SET", name, value]);
            assert_eq!(expect_completed(&store, &kept).await, &b"kept"[..], "{name}");
            let found = store.claim(&competing_request(&running)).await.unwrap();
            assert!(matches!(found, ClaimOutcome::InProgress(_)), "{name}: {found:?}");
            assert_eq!(store.claim(&claim_request()).await.unwrap_err().kind, kind, "{name}");
            server.cli(&["CONFIG", "SET", name, sound]);
        }
        assert!(matches!(store.claim(&competing_request(&running)).await.unwrap(), ClaimOutcome::InProgress(_)));
    }
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
    assert_eq!(lists().len(), 2, "one list, and the registry: {:?}", lists());
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
