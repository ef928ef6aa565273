//! Waiting across processes, on few connections, through lost messages.

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
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    time::{sleep, timeout},
};

use super::{claim_granted, claim_request, claim_request_in_bucket, complete, open, remote, wait_for};

const LIMIT: Duration = Duration::from_secs(120);

async fn open_two(url: &str) -> (Arc<Redis>, Arc<Redis>) {
    let with = remote();
    let one = Redis::open(url, with.clone()).await.unwrap();
    (Arc::new(one), Arc::new(Redis::open(url, with).await.unwrap()))
}

/// Waits until the server has so many subscribers to wake channels.
fn wait_for_subscribers(server: &TestRedis, sharded: bool, least: usize) -> bool {
    let verb = if sharded { "SHARDCHANNELS" } else { "CHANNELS" };
    server.cli(&["PUBSUB", verb, "*:wake"]).lines().filter(|line| !line.is_empty()).count() >= least
}

/// A bucket that the cluster's first primary keeps.
fn first_bucket(cluster: &RedisCluster) -> u8 {
    let slot = |bucket: u8| -> usize {
        cluster.primaries[0].cli(&["CLUSTER", "KEYSLOT", &format!("{{{bucket:02x}}}")]).parse().unwrap()
    };
    (0..=u8::MAX).find(|bucket| cluster.first_owner(slot(*bucket)) == 0).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_wakes_a_waiter_in_another_process() {
    let (server, cluster) = (TestRedis::start(), RedisCluster::start());
    for (url, server, bucket) in
        [(server.url(), &server, 0xa5), (cluster.url(), &cluster.primaries[0], first_bucket(&cluster))]
    {
        let with = remote();
        let here = Arc::new(Redis::open(&url, with.clone()).await.unwrap());
        let there = Redis::open(&url, with.clone()).await.unwrap();
        let sharded = bucket != 0xa5;
        let mut woken_by_message = false;
        // A waiter looks for itself now and then, and that asks the server. In one of many rounds it has no time to.
        for _ in 0..20 {
            let ask = claim_request_in_bucket(bucket);
            let key = format!("{}:{{{bucket:02x}}}:{}", with.prefix, ask.address);
            let lease = claim_granted(&there, &ask).await;
            let waits = tokio::spawn({
                let (here, at, seen) = (here.clone(), ask.address, lease.fence);
                async move { here.wait(&at, seen, LIMIT).await }
            });
            wait_for("the subscription", async || wait_for_subscribers(server, sharded, 1).then_some(())).await;
            wait_for("the mark that somebody waits", async || (server.cli(&["HGET", &key, "w"]) == "1").then_some(()))
                .await;
            assert!(!waits.is_finished());
            server.cli(&["CONFIG", "RESETSTAT"]);
            assert_eq!(there.settle(&lease, &complete(b"done")).await.unwrap(), SettleOutcome::Applied);
            timeout(Duration::from_secs(20), waits).await.expect("it is woken").unwrap().unwrap();
            if scripts_run(server) == 1 {
                woken_by_message = true;
                break;
            }
        }
        assert!(woken_by_message, "waiters came back by asking only, never by a message");
    }
}

/// Since the last reset.
fn scripts_run(server: &TestRedis) -> u64 {
    let stats = server.cli(&["INFO", "commandstats"]);
    let calls = |line: &str| line.split(['=', ',']).nth(1).unwrap().parse::<u64>().unwrap();
    stats.lines().filter(|line| line.starts_with("cmdstat_eval")).map(calls).sum()
}

#[tokio::test]
async fn only_what_is_waited_for_is_published_and_nobody_listens_for_nothing() {
    let server = TestRedis::start();
    let store = open(&server.url()).await;
    super::claim_and_complete(&store, &claim_request(), b"nobody waits").await;
    assert_eq!(server.cli(&["INFO", "commandstats"]).lines().filter(|line| line.contains("publish")).count(), 0);
    assert!(!wait_for_subscribers(&server, false, 1));
    let ask = claim_request();
    let lease = claim_granted(&store, &ask).await;
    assert!(timeout(Duration::from_millis(300), store.wait(&ask.address, lease.fence, LIMIT)).await.is_err());
    wait_for("the subscription to end", async || (!wait_for_subscribers(&server, false, 1)).then_some(())).await;
    wait_for("its connection to close", async || {
        let list = server.cli(&["CLIENT", "LIST", "TYPE", "pubsub"]);
        list.is_empty().then_some(())
    })
    .await;
    assert_eq!(store.settle(&lease, &Settlement::Release).await.unwrap(), SettleOutcome::Applied);
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
    wait_for("all channels to be heard", async || wait_for_subscribers(&server, false, 256).then_some(())).await;
    let clients = server.cli(&["CLIENT", "LIST"]).lines().filter(|line| !line.contains("cmd=client|list")).count();
    assert!(clients <= 3, "{clients} connections for 1,000 waiters");
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
        let asked = scripts_run(&server);
        assert!((1..=60).contains(&asked), "500 waiters asked {asked} times in two seconds");
        assert_eq!(store.settle(&lease, &complete(b"done")).await.unwrap(), SettleOutcome::Applied);
    };
    let (waited, ()) = tokio::join!(timeout(Duration::from_secs(60), waits), settles);
    assert!(waited.expect("all wake").into_iter().all(|waited| waited.is_ok()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_message_only_delays() {
    let server = TestRedis::start();
    let (here, there) = open_two(&server.url()).await;
    let ask = claim_request();
    let lease = claim_granted(&*there, &ask).await;
    let waits = tokio::spawn({
        let (here, at, seen) = (here.clone(), ask.address, lease.fence);
        async move { here.wait(&at, seen, LIMIT).await }
    });
    wait_for("the subscription", async || wait_for_subscribers(&server, false, 1).then_some(())).await;
    // Listening is cut off again and again while the end is published.
    server.cli(&["ACL", "SETUSER", "default", "resetchannels"]);
    server.cli(&["CLIENT", "KILL", "TYPE", "pubsub"]);
    server.cli(&["ACL", "SETUSER", "default", "&*"]);
    server.cli(&["CLIENT", "KILL", "TYPE", "pubsub"]);
    assert_eq!(there.settle(&lease, &complete(b"done")).await.unwrap(), SettleOutcome::Applied);
    timeout(Duration::from_secs(20), waits).await.expect("it looks for itself").unwrap().unwrap();
}

#[tokio::test]
async fn without_leave_to_listen_waiters_poll() {
    let server = TestRedis::start();
    assert_eq!(
        server.cli(&["ACL", "SETUSER", "deaf", "on", "nopass", "+@all", "~*", "resetchannels", "-subscribe"]),
        "OK"
    );
    let with = remote();
    let url = format!("redis://deaf:any@127.0.0.1:{}", server.port());
    let store = Redis::open(&url, with.clone()).await.unwrap();
    let settles = Redis::open(&server.url(), with).await.unwrap();
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
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_forgotten_is_heard_everywhere_for_as_long_as_copies_are_kept() {
    for (url, servers, sharded) in [
        (TestRedis::shared().url(), vec![TestRedis::shared()], false),
        (RedisCluster::shared().url(), RedisCluster::shared().primaries.iter().collect(), true),
    ] {
        let with = RemoteOptions { answer_cache: Some(Default::default()), ..remote() };
        let store = Redis::open(&url, with.clone()).await.unwrap();
        let verb = if sharded { "SHARDCHANNELS" } else { "CHANNELS" };
        let pattern = format!("{}:*:forget", with.prefix);
        let count = || -> usize {
            let all = servers
                .iter()
                .map(|server| server.cli(&["PUBSUB", verb, &pattern]).lines().filter(|line| !line.is_empty()).count());
            all.sum()
        };
        wait_for("all channels to be heard", async || (count() == 256).then_some(())).await;
        // A gap is closed by itself.
        for server in &servers {
            server.cli(&["CLIENT", "KILL", "TYPE", "pubsub"]);
        }
        wait_for("all channels to be heard again", async || (count() == 256).then_some(())).await;
        drop(store);
        wait_for("nobody to listen any more", async || (count() == 0).then_some(())).await;
    }
}

#[tokio::test]
async fn every_forget_is_published() {
    let server = TestRedis::start();
    let with = remote();
    let store = Redis::open(&server.url(), with.clone()).await.unwrap();
    let ask = claim_request_in_bucket(0xa5);
    let lease = super::claim_and_complete(&store, &ask, b"to be forgotten").await;
    let channel = format!("{}:{{a5}}:forget", with.prefix);
    let mut listens = tokio::process::Command::new("redis-cli");
    listens.args(["-p", &server.port().to_string(), "SUBSCRIBE", &channel]).stdout(std::process::Stdio::piped());
    let mut listens = listens.kill_on_drop(true).spawn().unwrap();
    wait_for("the subscription", async || {
        server.cli(&["PUBSUB", "CHANNELS", &channel]).contains(&channel).then_some(())
    })
    .await;
    assert!(matches!(
        store.admin().forget(&ask.address, ibid::store::Fence(1)).await.unwrap(),
        SettleOutcome::ClaimLost(_)
    ));
    assert_eq!(store.admin().forget(&ask.address, lease.fence).await.unwrap(), SettleOutcome::Applied);
    server.cli(&["PUBLISH", &channel, "the end"]);
    let mut heard = String::new();
    let reads = async {
        let mut lines = BufReader::new(listens.stdout.take().unwrap()).lines();
        while let Some(line) = lines.next_line().await.unwrap().filter(|line| line != "the end") {
            heard.push_str(&line);
        }
    };
    timeout(Duration::from_secs(20), reads).await.expect("it hears");
    assert_eq!(heard.matches(&ask.address.to_string()).count(), 1, "{heard}");
}
