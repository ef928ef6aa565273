//! Waiting across processes, and local caches that stay coherent: the server reports changes, on few connections.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use ibid::store::{SettleOutcome, Settlement, Store};
use ibid_stores::{
    RemoteOptions,
    local_cache::{AnswerCache, LocalCache},
    redis::Redis,
};
use testbed::{RedisCluster, TestRedis};
use tokio::time::{sleep, timeout};

use super::{
    claim_and_complete, claim_granted, claim_request, claim_request_in_bucket, competing_request, complete,
    expect_completed, open, remote, wait_for,
};

const LIMIT: Duration = Duration::from_secs(120);

async fn open_two(url: &str) -> (Arc<Redis>, Arc<Redis>) {
    let with = remote();
    let one = Redis::open(url, with.clone()).await.unwrap();
    (Arc::new(one), Arc::new(Redis::open(url, with).await.unwrap()))
}

/// The number of keys whose changes the server reports.
fn tracked_keys(server: &TestRedis) -> u64 {
    server.info("tracking_total_keys").parse().unwrap()
}

/// The ids of connections to which the server reports changes.
fn tracking_clients(server: &TestRedis) -> Vec<String> {
    let list = server.cli(&["CLIENT", "LIST"]);
    let field = |line: &str, name: &str| line.split(' ').find_map(|field| field.strip_prefix(name).map(str::to_owned));
    let tracking = list.lines().filter(|line| field(line, "flags=").is_some_and(|flags| flags.contains('t')));
    tracking.filter_map(|line| field(line, "id=")).collect()
}

fn kill_tracking_clients(server: &TestRedis) {
    for id in tracking_clients(server) {
        server.try_cli(&["CLIENT", "KILL", "ID", &id]);
    }
}

/// Calls of a command since the last reset.
fn calls(server: &TestRedis, name: &str) -> u64 {
    let stats = server.cli(&["INFO", "commandstats"]);
    let line = stats.lines().find(|line| line.starts_with(&format!("cmdstat_{name}:")));
    line.map_or(0, |line| line.split(['=', ',']).nth(1).unwrap().parse().unwrap())
}

/// A bucket that the cluster's first primary keeps.
fn first_bucket(cluster: &RedisCluster) -> u8 {
    let slot = |bucket: u8| -> usize {
        cluster.primaries[0].cli(&["CLUSTER", "KEYSLOT", &format!("{{{bucket:02x}}}")]).parse().unwrap()
    };
    (0..=u8::MAX).find(|bucket| cluster.first_owner(slot(*bucket)) == 0).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_report_wakes_a_waiter_in_another_process() {
    let (server, valkey, cluster) = (TestRedis::start(), TestRedis::start_valkey(), RedisCluster::start());
    for (url, server, bucket) in [
        (server.url(), &server, 0xa5),
        (valkey.url(), &valkey, 0xa5),
        (cluster.url(), &cluster.primaries[0], first_bucket(&cluster)),
    ] {
        let (here, there) = open_two(&url).await;
        let mut woken_by_report = false;
        // A waiter also looks for itself, at the earliest after 2.5 s. On a slow machine a round may take that long.
        for _ in 0..20 {
            let ask = claim_request_in_bucket(bucket);
            let lease = claim_granted(&*there, &ask).await;
            let began = Instant::now();
            let waits = tokio::spawn({
                let (here, at, seen) = (here.clone(), ask.address, lease.fence);
                async move { here.wait(&at, seen, LIMIT).await }
            });
            wait_for("the key to be tracked", async || (tracked_keys(server) > 0).then_some(())).await;
            assert!(!waits.is_finished());
            assert_eq!(there.settle(&lease, &complete(b"done")).await.unwrap(), SettleOutcome::Applied);
            timeout(Duration::from_secs(20), waits).await.expect("it is woken").unwrap().unwrap();
            if began.elapsed() < Duration::from_secs(2) {
                woken_by_report = true;
                break;
            }
        }
        assert!(woken_by_report, "waiters came back by asking only, never by a report");
    }
}

#[tokio::test]
async fn nothing_is_published_and_nobody_listens_for_nothing() {
    let server = TestRedis::start();
    let store = open(&server.url()).await;
    let ask = claim_request();
    let lease = claim_granted(&store, &ask).await;
    assert!(tracking_clients(&server).is_empty());
    assert!(timeout(Duration::from_millis(300), store.wait(&ask.address, lease.fence, LIMIT)).await.is_err());
    assert_eq!(tracking_clients(&server).len(), 1);
    wait_for("its connection to close", async || tracking_clients(&server).is_empty().then_some(())).await;
    assert_eq!(store.settle(&lease, &Settlement::Release).await.unwrap(), SettleOutcome::Applied);
    assert_eq!(server.cli(&["INFO", "commandstats"]).lines().filter(|line| line.contains("publish")).count(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_waiters_need_few_connections() {
    let server = TestRedis::start();
    let store = Arc::new(open(&server.url()).await);
    let mut leases = Vec::new();
    let mut waits = Vec::new();
    for nth in 0..1000 {
        let ask = claim_request_in_bucket((nth % 256) as u8);
        let lease = claim_granted(&*store, &ask).await;
        waits.push(tokio::spawn({
            let (store, at, seen) = (store.clone(), ask.address, lease.fence);
            async move { store.wait(&at, seen, LIMIT).await }
        }));
        leases.push(lease);
    }
    wait_for("all keys to be tracked", async || (tracked_keys(&server) >= 1000).then_some(())).await;
    let clients = server.cli(&["CLIENT", "LIST"]).lines().filter(|line| !line.contains("cmd=client|list")).count();
    assert!(clients <= 4, "{clients} connections for 1,000 waiters: one per thread, and one on which they wait");
    for settled in join_all(leases.iter().map(|lease| store.settle(lease, &Settlement::Release))).await {
        assert_eq!(settled.unwrap(), SettleOutcome::Applied);
    }
    for waited in timeout(Duration::from_secs(60), join_all(waits)).await.expect("all wake") {
        waited.unwrap().unwrap();
    }
}

#[tokio::test]
async fn many_waiters_for_one_holder_ask_the_server_as_one() {
    let server = TestRedis::start();
    let store = LocalCache::new(Arc::new(open(&server.url()).await), AnswerCache::new(0));
    let ask = claim_request();
    let lease = claim_granted(&store, &ask).await;
    server.cli(&["CONFIG", "RESETSTAT"]);
    let waits = join_all((0..500).map(|_| store.wait(&ask.address, lease.fence, LIMIT)));
    let settles = async {
        sleep(Duration::from_secs(2)).await;
        let asked = calls(&server, "getrange");
        assert!((1..=60).contains(&asked), "500 waiters asked {asked} times in two seconds");
        assert_eq!(store.settle(&lease, &complete(b"done")).await.unwrap(), SettleOutcome::Applied);
    };
    let (waited, ()) = tokio::join!(timeout(Duration::from_secs(60), waits), settles);
    assert!(waited.expect("all wake").into_iter().all(|waited| waited.is_ok()));
}

#[tokio::test]
async fn a_heartbeat_does_not_end_a_wait() {
    let server = TestRedis::start();
    let (here, there) = open_two(&server.url()).await;
    let ask = claim_request();
    let lease = claim_granted(&*there, &ask).await;
    let (waited, ()) = tokio::join!(here.wait(&ask.address, lease.fence, LIMIT), async {
        wait_for("the key to be tracked", async || (tracked_keys(&server) > 0).then_some(())).await;
        server.cli(&["CONFIG", "RESETSTAT"]);
        assert_eq!(there.extend(&lease, LIMIT * 10).await.unwrap(), SettleOutcome::Applied);
        wait_for("the waiter to look again", async || (calls(&server, "getrange") > 0).then_some(())).await;
        sleep(Duration::from_millis(200)).await;
        assert_eq!(there.settle(&lease, &complete(b"done")).await.unwrap(), SettleOutcome::Applied);
    });
    waited.unwrap();
    assert_eq!(expect_completed(&*here, &ask).await, &b"done"[..], "it waited until the end");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_report_only_delays() {
    let server = TestRedis::start();
    let (here, there) = open_two(&server.url()).await;
    let ask = claim_request();
    let lease = claim_granted(&*there, &ask).await;
    let waits = tokio::spawn({
        let (here, at, seen) = (here.clone(), ask.address, lease.fence);
        async move { here.wait(&at, seen, LIMIT).await }
    });
    wait_for("the key to be tracked", async || (tracked_keys(&server) > 0).then_some(())).await;
    // Reports are cut off, and refused afterwards, while the holder ends.
    server.cli(&["ACL", "SETUSER", "default", "-client|tracking"]);
    kill_tracking_clients(&server);
    assert_eq!(there.settle(&lease, &complete(b"done")).await.unwrap(), SettleOutcome::Applied);
    timeout(Duration::from_secs(20), waits).await.expect("it looks for itself").unwrap().unwrap();
}

#[tokio::test]
async fn without_reports_waiters_poll_and_nothing_is_cached() {
    let server = TestRedis::start();
    let deaf = ["ACL", "SETUSER", "deaf", "on", "nopass", "+@all", "-client|tracking", "~*"];
    assert_eq!(server.cli(&deaf), "OK");
    let answers = AnswerCache::new(1 << 20);
    let with = RemoteOptions { answer_cache: Some(answers.clone()), ..remote() };
    let url = format!("redis://deaf:any@127.0.0.1:{}", server.port());
    let store = LocalCache::new(Arc::new(Redis::open(&url, with.clone()).await.unwrap()), answers.clone());
    let settles = Redis::open(&server.url(), RemoteOptions { answer_cache: None, ..with }).await.unwrap();
    let ask = claim_request();
    let lease = claim_granted(&settles, &ask).await;
    let began = Instant::now();
    let end = complete(b"done");
    let (waited, settled) = tokio::join!(store.wait(&ask.address, lease.fence, LIMIT), async {
        sleep(Duration::from_millis(300)).await;
        settles.settle(&lease, &end).await
    });
    waited.unwrap();
    assert_eq!(settled.unwrap(), SettleOutcome::Applied);
    assert!(began.elapsed() < LIMIT / 2, "{:?}", began.elapsed());
    assert_eq!(expect_completed(&store, &ask).await, &b"done"[..]);
    claim_and_complete(&store, &claim_request(), b"own").await;
    assert!(answers.is_empty(), "an answer of which no change is reported was cached");
}

/// A store with a local cache, as the gateway uses it.
async fn open_cached(url: &str, with: &RemoteOptions) -> (LocalCache, AnswerCache) {
    let answers = AnswerCache::new(1 << 20);
    let with = RemoteOptions { answer_cache: Some(answers.clone()), ..with.clone() };
    (LocalCache::new(Arc::new(Redis::open(url, with).await.unwrap()), answers.clone()), answers)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_elsewhere_reaches_every_local_cache() {
    let (server, valkey) = (TestRedis::start(), TestRedis::start_valkey());
    for url in [server.url(), valkey.url(), RedisCluster::shared().url()] {
        let with = remote();
        let (cached, answers) = open_cached(&url, &with).await;
        let elsewhere = Redis::open(&url, with).await.unwrap();
        let (read, own) = (claim_request(), claim_request());
        // One answer is cached by reading it, the other by recording it.
        let first = claim_and_complete(&elsewhere, &read, b"read").await;
        assert_eq!(expect_completed(&cached, &read).await, &b"read"[..]);
        let second = claim_and_complete(&cached, &own, b"own").await;
        assert_eq!(answers.len(), 2, "{url}");
        for ask in [&read, &own] {
            expect_completed(&cached, ask).await;
        }
        assert_eq!(answers.hits(), 2);
        assert_eq!(
            elsewhere.admin().forget(&read.address, first.fence).await.unwrap(),
            SettleOutcome::Applied,
            "{url}"
        );
        wait_for("the forgotten answer to go", async || (answers.len() == 1).then_some(())).await;
        let replaced = elsewhere.admin().replace_record(&own.address, second.fence, "new".into()).await.unwrap();
        assert_eq!(replaced, SettleOutcome::Applied);
        wait_for("the replaced answer to go", async || answers.is_empty().then_some(())).await;
        assert_eq!(expect_completed(&cached, &own).await, &b"new"[..]);
        claim_granted(&cached, &competing_request(&read)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gap_in_the_reports_empties_the_cache() {
    let server = TestRedis::start();
    let with = remote();
    let (cached, answers) = open_cached(&server.url(), &with).await;
    claim_and_complete(&cached, &claim_request(), b"own").await;
    assert_eq!(answers.len(), 1);
    kill_tracking_clients(&server);
    wait_for("the cache to be emptied", async || answers.is_empty().then_some(())).await;
    claim_and_complete(&cached, &claim_request(), b"again").await;
    assert_eq!(answers.len(), 1);
    server.cli(&["FLUSHALL"]);
    wait_for("a flush to be reported", async || answers.is_empty().then_some(())).await;
}
