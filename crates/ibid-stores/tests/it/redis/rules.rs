//! Rules that follow from what Redis and Valkey do, each shown on both: compare-and-set, fences, servers that refuse
//! writes, and servers without RESP3.

use std::{fs, sync::Arc, time::Duration};

use ibid::observe::NoopObserver;
use ibid::store::{Address, ClaimOutcome, ClaimRequest, ErrorKind, Lease, SettleOutcome, Settlement, Store};
use ibid_stores::{
    RemoteOptions,
    local_cache::{AnswerCache, LocalCache},
    redis::Redis,
    seal::{SealKey, SealOptions, SealedStore, Sealer},
};
use ibid_testkit::broken::failing_cases;
use testbed::{RedisOptions, TestRedis};

use super::{
    LONG_LEASE, claim_and_complete, claim_granted, claim_request, competing_request, complete, expect_completed, open,
    remote, wait_for,
};

/// Writes another fence into an entry.
fn set_fence(server: &TestRedis, with: &RemoteOptions, at: &Address, fence: u64) {
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

/// As the front of a tiered store is completed. The whole script would read the key's expiry.
#[tokio::test]
async fn completing_by_the_token_alone_takes_a_read_and_a_write_and_keeps_the_fence() {
    for server in [TestRedis::start(), TestRedis::start_valkey()] {
        let store = open(&server.url()).await;
        let ask = claim_request();
        let lease = claim_granted(&store, &ask).await;
        server.cli(&["CONFIG", "RESETSTAT"]);
        let settled = store.settle(&Lease::unseen(&ask), &complete(b"by token")).await;
        assert_eq!(settled.unwrap(), SettleOutcome::Applied);
        let stats = server.cli(&["INFO", "commandstats"]);
        let is_called = |command: &str| stats.contains(&format!("cmdstat_{command}:calls=1"));
        assert!(is_called("get") && is_called("set") && !stats.contains("cmdstat_pttl"), "{stats}");
        let found = store.claim(&competing_request(&ask)).await.unwrap();
        let ClaimOutcome::Completed(found) = found else { panic!("{found:?}") };
        assert_eq!((found.fence, found.attempt, &found.record[..]), (lease.fence, 1, &b"by token"[..]));
    }
}

#[tokio::test]
async fn the_fence_of_a_short_lived_entry_is_remembered_for_a_minute() {
    for server in [TestRedis::shared(), TestRedis::shared_valkey()] {
        let with = remote();
        let store = Redis::open(&server.url(), with.clone()).await.unwrap();
        let key = |at: &Address| format!("{}:{{{:02x}}}:{at}", with.prefix, at.0[0]);
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
    // A script's own commands count too. Redis compares and sets since 8.4.
    let version = server.info("redis_version");
    let compares = version.split('.').take(2).map(|part| part.parse::<u32>().unwrap()).ge([8, 4]);
    let scripts = if compares { 0 } else { 10 };
    assert_eq!((calls("set"), calls("evalsha")), (30, scripts), "10 claims, 10 replays, 10 completions:\n{stats}");
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

/// A server that refuses writes, and how it is made to and cured.
struct RefusingServer {
    name: &'static str,
    refuse: fn(&TestRedis),
    accept: fn(&TestRedis),
    /// The kind of error that a new claim gets.
    kind: ErrorKind,
    /// Whether what runs can be extended and settled.
    settles: bool,
}

const REFUSING_SERVERS: [RefusingServer; 4] = [
    RefusingServer {
        name: "OOM",
        refuse: |server| assert_eq!(server.cli(&["CONFIG", "SET", "maxmemory", "100kb"]), "OK"),
        accept: |server| assert_eq!(server.cli(&["CONFIG", "SET", "maxmemory", "0"]), "OK"),
        kind: ErrorKind::Rejected,
        settles: true,
    },
    RefusingServer {
        name: "NOREPLICAS",
        refuse: |server| assert_eq!(server.cli(&["CONFIG", "SET", "min-replicas-to-write", "1"]), "OK"),
        accept: |server| assert_eq!(server.cli(&["CONFIG", "SET", "min-replicas-to-write", "0"]), "OK"),
        kind: ErrorKind::Rejected,
        settles: false,
    },
    RefusingServer {
        name: "MISCONF",
        refuse: |server| {
            // A snapshot cannot replace a folder.
            fs::create_dir_all(server.path("dump.rdb")).unwrap();
            server.cli(&["CONFIG", "SET", "save", "3600 1"]);
            server.cli(&["BGSAVE"]);
            server.until("the snapshot to fail", || server.info("rdb_last_bgsave_status") == "err");
        },
        accept: |server| assert_eq!(server.cli(&["CONFIG", "SET", "save", ""]), "OK"),
        kind: ErrorKind::Rejected,
        settles: false,
    },
    RefusingServer {
        name: "READONLY",
        // Nobody listens on that port.
        refuse: |server| assert_eq!(server.cli(&["REPLICAOF", "127.0.0.1", "1"]), "OK"),
        accept: |server| assert_eq!(server.cli(&["REPLICAOF", "NO", "ONE"]), "OK"),
        kind: ErrorKind::NotApplied,
        settles: false,
    },
];

#[tokio::test]
async fn a_server_that_refuses_writes_still_replays() {
    for server in [TestRedis::start(), TestRedis::start_valkey()] {
        let store = open(&server.url()).await;
        for RefusingServer { name, refuse, accept, kind, settles } in REFUSING_SERVERS {
            let (kept, running, refused) = (claim_request(), claim_request(), claim_request());
            claim_and_complete(&store, &kept, b"kept").await;
            let lease = claim_granted(&store, &running).await;
            refuse(&server);
            assert_eq!(expect_completed(&store, &kept).await, &b"kept"[..], "{name}");
            let found = store.claim(&competing_request(&running)).await.unwrap();
            assert!(matches!(found, ClaimOutcome::InProgress(_)), "{name}: {found:?}");
            let error = store.claim(&refused).await.unwrap_err();
            assert_eq!(error.kind, kind, "{name}: {error}");
            assert!(error.to_string().contains(name), "{name}: {error}");
            let waited = store.wait(&running.address, lease.fence, Duration::from_millis(1)).await;
            assert!(waited.is_ok(), "{name}: {waited:?}");
            for call in [store.extend(&lease, LONG_LEASE).await, store.settle(&lease, &complete(b"late")).await] {
                match call {
                    Ok(outcome) => assert!(settles && outcome == SettleOutcome::Applied, "{name}: {outcome:?}"),
                    // Nothing was written, so the same call is safe to repeat.
                    Err(error) => assert!(!settles && error.kind == kind, "{name}: {error}"),
                }
            }
            accept(&server);
            let settled = wait_for("writes", async || store.settle(&lease, &complete(b"late")).await.ok()).await;
            assert_eq!(settled, SettleOutcome::Applied, "{name}");
            assert_eq!(expect_completed(&store, &running).await, &b"late"[..], "{name}");
            claim_granted(&store, &refused).await;
        }
    }
}

/// As behind a proxy that speaks RESP2 only.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_resp3_waiters_poll_nothing_is_cached_and_the_contract_holds() {
    for valkey in [false, true] {
        let config = vec![r#"rename-command HELLO """#.to_owned()];
        let password = Some("pw".to_owned());
        let server = TestRedis::start_with(RedisOptions { config, valkey, password, ..RedisOptions::default() });
        let answers = AnswerCache::new(1 << 20);
        let with = RemoteOptions { answer_cache: Some(answers.clone()), ..remote() };
        let redis = Redis::open(&server.url(), with.clone()).await.unwrap();
        let cached = Arc::new(LocalCache::new(Arc::new(redis), answers.clone()));
        let ask = claim_request();
        let lease = claim_granted(&*cached, &ask).await;
        let settles = Redis::open(&server.url(), RemoteOptions { answer_cache: None, ..with }).await.unwrap();
        let end = complete(b"done");
        let (waited, settled) = tokio::join!(cached.wait(&ask.address, lease.fence, LONG_LEASE), async {
            tokio::time::sleep(Duration::from_millis(300)).await;
            settles.settle(&lease, &end).await
        });
        waited.unwrap();
        assert_eq!(settled.unwrap(), SettleOutcome::Applied);
        assert_eq!(expect_completed(&*cached, &ask).await, &b"done"[..]);
        assert_eq!(failing_cases(cached, Duration::from_secs(120)).await, [""; 0]);
        assert!(answers.is_empty(), "an answer of which no change is reported was cached");
        assert_eq!(server.info("tracking_clients"), "0");
    }
}
