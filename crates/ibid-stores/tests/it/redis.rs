//! The Redis store on real servers: the store contract, histories, and what happens when servers fail.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::store::{Address, Ask, Claim, End, Fingerprint, Held, Lease, Outline, Store, Tags, Token};
use ibid_stores::{Remote, redis::Redis};
use ibid_testkit::{
    broken::failing_cases,
    contract,
    property::{Clock, check_histories},
    servers::redis::{Cluster, Sentinels, Server},
    wrappers::{LosesAnswers, Resending},
};

mod certificates;
mod cluster;
mod faults;
mod sentinel;
mod setup;
mod waiting;

const LONG: Duration = Duration::from_secs(600);

/// A prefix that nobody else uses, and a deadline that a loaded machine keeps.
fn remote() -> Remote {
    let prefix: String = Token::mint().0[..6].iter().map(|byte| format!("{byte:02x}")).collect();
    Remote { prefix: format!("test-{prefix}"), timeout: Duration::from_secs(10), ..Remote::default() }
}

async fn open(url: &str) -> Redis {
    Redis::open(url, remote()).await.unwrap()
}

ibid_testkit::contract_tests!(single, async { Arc::new(open(&Server::shared().url()).await) as Arc<dyn Store> });

ibid_testkit::contract_tests!(sentinels, async { Arc::new(open(&Sentinels::shared().url()).await) as Arc<dyn Store> });

ibid_testkit::contract_tests!(of_a_cluster, async { Arc::new(open(&Cluster::shared().url()).await) as Arc<dyn Store> });

async fn losing_answers(url: &str) -> Arc<dyn Store> {
    let seed = u64::from_le_bytes(Token::mint().0[..8].try_into().unwrap());
    println!("seed {seed}");
    Arc::new(Resending::new(LosesAnswers::new(open(url).await, seed, 3)))
}

ibid_testkit::contract_tests!(single_losing_answers, losing_answers(&Server::shared().url()));

ibid_testkit::contract_tests!(sentinels_losing_answers, losing_answers(&Sentinels::shared().url()));

ibid_testkit::contract_tests!(of_a_cluster_losing_answers, losing_answers(&Cluster::shared().url()));

ibid_testkit::contract_tests!(waiting_for_a_replica, async {
    let with = Remote { wait_replicas: 1, ..remote() };
    Arc::new(Redis::open(&Sentinels::shared().url(), with).await.unwrap()) as Arc<dyn Store>
});

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_store_serves_all_cases_at_the_same_time() {
    let store = Arc::new(open(&Server::shared().url()).await);
    assert_eq!(failing_cases(store, Duration::from_secs(120)).await, [""; 0]);
}

#[tokio::test]
async fn sweeps_count_what_they_remove() {
    contract::operating::sweeps_count_what_they_remove(&open(&Server::shared().url()).await).await;
    contract::operating::sweeps_count_what_they_remove(&open(&Cluster::shared().url()).await).await;
}

#[test]
fn it_answers_as_the_model_says() {
    check_histories(60, Clock::Real, async || Arc::new(open(&Server::shared().url()).await) as Arc<dyn Store>);
}

/// An ask in the bucket of `first`.
fn ask_in(first: u8) -> Arc<Ask> {
    let mut address = [first; 32];
    address[1..17].copy_from_slice(&Token::mint().0);
    Arc::new(Ask {
        address: Address(address),
        token: Token::mint(),
        fingerprint: Fingerprint { version: 1, digest: [7; 32] },
        tags: Tags::new("acme", "u1", "POST /payments", "k"),
        label: Bytes::from_static(b"a label"),
        hold: LONG,
        keep: LONG,
        over: None,
    })
}

fn ask() -> Arc<Ask> {
    let [first, ..] = Token::mint().0;
    ask_in(first)
}

/// Somebody else at the same address.
fn rival(of: &Ask) -> Arc<Ask> {
    Arc::new(Ask { token: Token::mint(), ..of.clone() })
}

fn complete(record: &'static [u8]) -> End {
    End::Complete { failed: false, record: Bytes::from_static(record), outline: Outline::default(), keep: LONG }
}

async fn granted(store: &dyn Store, ask: &Arc<Ask>) -> Lease {
    match store.claim(ask).await.unwrap() {
        Claim::Granted(lease) => lease,
        other => panic!("{other:?}"),
    }
}

async fn done(store: &dyn Store, ask: &Arc<Ask>) -> Bytes {
    match store.claim(&rival(ask)).await.unwrap() {
        Claim::Done(done) => done.record,
        other => panic!("{other:?}"),
    }
}

/// Claims and completes.
async fn finished(store: &dyn Store, ask: &Arc<Ask>, record: &'static [u8]) -> Lease {
    let lease = granted(store, ask).await;
    assert_eq!(store.settle(&lease, &complete(record)).await.unwrap(), Held::Held);
    lease
}

/// Asks again and again, for at most a minute, until there is an answer.
async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    for _ in 0..1200 {
        if let Some(found) = look().await {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("waited in vain for {what}");
}
