//! The Redis store on real servers: the store contract, histories, and what happens when servers fail.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::store::{
    Address, ClaimOutcome, ClaimRequest, ClaimToken, Fingerprint, Lease, RecordSummary, SettleOutcome, Settlement,
    Store, Tags,
};
use ibid_stores::{
    RemoteOptions,
    local_cache::{AnswerCache, LocalCache},
    redis::Redis,
};
use ibid_testkit::{
    broken::failing_cases,
    contract,
    property::{HistoryClock, check_histories},
    wrappers::losing_answers,
};
use testbed::{RedisCluster, RedisSentinels, TestRedis};

mod certificates;
mod cluster;
mod faults;
mod rules;
mod sentinel;
mod setup;
mod waiting;

const LONG_LEASE: Duration = Duration::from_secs(600);

/// A prefix that nobody else uses, and a deadline that a loaded machine keeps.
fn remote() -> RemoteOptions {
    let prefix: String = ClaimToken::mint().0[..6].iter().map(|byte| format!("{byte:02x}")).collect();
    RemoteOptions { prefix: format!("test-{prefix}"), timeout: Duration::from_secs(10), ..RemoteOptions::default() }
}

/// With a cache in front, as the gateway uses it.
async fn open_cached(url: &str) -> LocalCache {
    let answers = AnswerCache::new(1 << 20);
    let with = RemoteOptions { answer_cache: Some(answers.clone()), ..remote() };
    LocalCache::new(Arc::new(Redis::open(url, with).await.unwrap()), answers)
}

async fn open(url: &str) -> Redis {
    Redis::open(url, remote()).await.unwrap()
}

ibid_testkit::contract_tests!(single, async { open(&TestRedis::shared().url()).await });

ibid_testkit::contract_tests!(sentinels, async { open(&RedisSentinels::shared().url()).await });

ibid_testkit::contract_tests!(of_a_cluster, async { open(&RedisCluster::shared().url()).await });

ibid_testkit::contract_tests!(single_losing_answers, async { losing_answers(open(&TestRedis::shared().url()).await) });

ibid_testkit::contract_tests!(sentinels_losing_answers, async {
    losing_answers(open(&RedisSentinels::shared().url()).await)
});

ibid_testkit::contract_tests!(of_a_cluster_losing_answers, async {
    losing_answers(open(&RedisCluster::shared().url()).await)
});

ibid_testkit::contract_tests!(valkey, async { open(&TestRedis::shared_valkey().url()).await });

ibid_testkit::contract_tests!(valkey_losing_answers, async {
    losing_answers(open(&TestRedis::shared_valkey().url()).await)
});

ibid_testkit::contract_tests!(valkey_sentinels, async { open(&RedisSentinels::shared_valkey().url()).await });

ibid_testkit::contract_tests!(valkey_cluster, async { open(&RedisCluster::shared_valkey().url()).await });

ibid_testkit::contract_tests!(valkey_cluster_losing_answers, async {
    losing_answers(open(&RedisCluster::shared_valkey().url()).await)
});

ibid_testkit::contract_tests!(single_with_local_cache, async { open_cached(&TestRedis::shared().url()).await });

ibid_testkit::contract_tests!(valkey_with_local_cache, async { open_cached(&TestRedis::shared_valkey().url()).await });

ibid_testkit::contract_tests!(waiting_for_a_replica, async {
    let with = RemoteOptions { wait_replicas: 1, ..remote() };
    Redis::open(&RedisSentinels::shared().url(), with).await.unwrap()
});

ibid_testkit::contract_tests!(valkey_waiting_for_a_replica, async {
    let with = RemoteOptions { wait_replicas: 1, ..remote() };
    Redis::open(&RedisSentinels::shared_valkey().url(), with).await.unwrap()
});

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_store_serves_all_cases_at_the_same_time() {
    let store = Arc::new(open(&TestRedis::shared().url()).await);
    assert_eq!(failing_cases(store, Duration::from_secs(120)).await, [""; 0]);
}

#[tokio::test]
async fn sweeps_count_what_they_remove() {
    contract::admin::sweeps_count_what_they_remove(&open(&TestRedis::shared().url()).await).await;
    contract::admin::sweeps_count_what_they_remove(&open(&RedisCluster::shared().url()).await).await;
}

#[test]
fn it_answers_as_the_model_says() {
    check_histories(60, HistoryClock::Real, async || open(&TestRedis::shared().url()).await);
    check_histories(60, HistoryClock::Real, async || open(&TestRedis::shared_valkey().url()).await);
}

/// An ask in the bucket of `first`.
fn claim_request_in_bucket(first: u8) -> Arc<ClaimRequest> {
    let mut address = [first; 32];
    address[1..17].copy_from_slice(&ClaimToken::mint().0);
    Arc::new(ClaimRequest {
        address: Address(address),
        token: ClaimToken::mint(),
        fingerprint: Fingerprint { version: 1, digest: [7; 32] },
        tags: Tags::new("acme", "u1", "POST /payments", "k"),
        label: Bytes::from_static(b"a label"),
        lease: LONG_LEASE,
        ttl: LONG_LEASE,
        take_over: None,
    })
}

fn claim_request() -> Arc<ClaimRequest> {
    let [first, ..] = ClaimToken::mint().0;
    claim_request_in_bucket(first)
}

/// Somebody else at the same address.
fn competing_request(of: &ClaimRequest) -> Arc<ClaimRequest> {
    Arc::new(ClaimRequest { token: ClaimToken::mint(), ..of.clone() })
}

fn complete(record: &'static [u8]) -> Settlement {
    Settlement::Complete {
        failed: false,
        record: Bytes::from_static(record),
        summary: RecordSummary::default(),
        ttl: LONG_LEASE,
    }
}

async fn claim_granted(store: &dyn Store, ask: &Arc<ClaimRequest>) -> Lease {
    match store.claim(ask).await.unwrap() {
        ClaimOutcome::Granted(lease) => lease,
        other => panic!("{other:?}"),
    }
}

async fn expect_completed(store: &dyn Store, ask: &Arc<ClaimRequest>) -> Bytes {
    match store.claim(&competing_request(ask)).await.unwrap() {
        ClaimOutcome::Completed(done) => done.record,
        other => panic!("{other:?}"),
    }
}

/// Claims and completes.
async fn claim_and_complete(store: &dyn Store, ask: &Arc<ClaimRequest>, record: &'static [u8]) -> Lease {
    let lease = claim_granted(store, ask).await;
    assert_eq!(store.settle(&lease, &complete(record)).await.unwrap(), SettleOutcome::Applied);
    lease
}

/// Asks again and again, for at most a minute, until there is an answer.
async fn wait_for<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    for _ in 0..1200 {
        if let Some(found) = look().await {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("waited in vain for {what}");
}
