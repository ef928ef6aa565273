//! What a request costs on the wire between gateway and store.
//!
//! Gateways also talk to their stores on their own (a listening connection is pinged, the generation is read), so a single
//! count may be too high. It is never too low: the least of several is what the request itself costs.

use std::{net::SocketAddr, time::Duration};

use testbed::{
    FaultProxy, TestPostgres, TestRedis,
    client::{TestRequest, post},
    process::GatewayProcess,
    upstream::TestUpstream,
};
use tokio::time::sleep;

use super::common::{migrated_database, proxy_to};
use crate::support::{assert_ran, assert_replay, start_gateway, until_some};

const ROUNDS: usize = 5;
/// Claims before it counts: connections are made, scripts loaded and statements prepared.
const WARM_UP_CLAIMS: usize = 8;

/// What a request cost at each link: until it ran, until it was answered, with all that is done behind the answer, and its replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RoundTripCost<const N: usize> {
    claim: [u64; N],
    answer: [u64; N],
    background: [u64; N],
    replay: [u64; N],
}

fn pay(addr: SocketAddr, key: &str) -> TestRequest {
    post(addr, "/pay").header("Host", "shop.example").key(key).json(r#"{"amount":1}"#)
}

/// The least that each step cost at each link.
async fn least_cost<const N: usize>(
    gateway: &GatewayProcess, upstream: &TestUpstream, links: [&FaultProxy; N],
) -> RoundTripCost<N> {
    for n in 0..WARM_UP_CLAIMS {
        assert_ran(&pay(gateway.addr(), &format!("warm-{n}")).send().await);
    }
    for n in 0..WARM_UP_CLAIMS {
        assert_eq!(pay(gateway.addr(), &format!("warm-{n}")).send().await.status, 201);
    }
    let now = || links.map(|link| link.counts().round_trips);
    let since = |before: [u64; N]| std::array::from_fn(|n| now()[n] - before[n]);
    let mut least =
        RoundTripCost { claim: [u64::MAX; N], answer: [u64::MAX; N], background: [u64::MAX; N], replay: [u64::MAX; N] };
    let lower = |least: &mut [u64; N], cost: [u64; N]| {
        for (least, cost) in least.iter_mut().zip(cost) {
            *least = cost.min(*least);
        }
    };
    for round in 0..ROUNDS {
        let gate = upstream.gate("/pay");
        wait_until_quiet(&now).await;
        let (before, request) = (now(), pay(gateway.addr(), &format!("k-{round}")));
        let mut running = request.start().await;
        gate.arrived(1).await;
        lower(&mut least.claim, since(before));
        let before = now();
        gate.open();
        let first = running.read_response().await;
        lower(&mut least.answer, since(before));
        assert_ran(&first);
        wait_until_quiet(&now).await;
        lower(&mut least.background, since(before));
        let before = now();
        assert_replay(&request.send().await, &first);
        lower(&mut least.replay, since(before));
    }
    least
}

/// Returns once nothing has passed for a moment.
async fn wait_until_quiet<const N: usize>(now: &impl Fn() -> [u64; N]) {
    until_some("the links to fall silent", || async {
        let before = now();
        sleep(Duration::from_millis(100)).await;
        (now() == before).then_some(())
    })
    .await;
}

async fn gateway(store: &str, upstream: &TestUpstream) -> GatewayProcess {
    let config = format!("[store]\n{store}\ntimeout = \"5s\"\n[policy]\npreset = \"ietf\"\n");
    start_gateway(&config, upstream).await
}

#[tokio::test]
async fn redis_one_to_claim_one_to_settle_one_to_replay() {
    let (server, upstream) = (TestRedis::start(), TestUpstream::start().await);
    let link = proxy_to(server.port());
    let gateway = gateway(&format!("url = \"redis://{}/0\"\nlocal_cache = \"0\"", link.addr()), &upstream).await;
    let cost = least_cost(&gateway, &upstream, [&link]).await;
    assert_eq!(cost, RoundTripCost { claim: [1], answer: [1], background: [1], replay: [1] });
}

#[tokio::test]
async fn redis_none_to_replay_what_is_near() {
    let (server, upstream) = (TestRedis::start(), TestUpstream::start().await);
    let link = proxy_to(server.port());
    let gateway = gateway(&format!("url = \"redis://{}/0\"", link.addr()), &upstream).await;
    let cost = least_cost(&gateway, &upstream, [&link]).await;
    assert_eq!(cost, RoundTripCost { claim: [1], answer: [1], background: [1], replay: [0] });
}

#[tokio::test]
async fn postgres_one_to_claim_one_to_settle_one_to_replay() {
    let (server, upstream) = (TestPostgres::start(), TestUpstream::start().await);
    let link = proxy_to(server.port());
    let (url, _) = migrated_database(&server, link.addr().port()).await;
    let gateway = gateway(&format!("url = {url:?}\nlocal_cache = \"0\""), &upstream).await;
    let cost = least_cost(&gateway, &upstream, [&link]).await;
    assert_eq!(cost, RoundTripCost { claim: [1], answer: [1], background: [1], replay: [1] });
}

/// Two stores as one, Redis first: what each costs.
async fn assert_tiered_cost(table: impl FnOnce(&str, &str) -> String) {
    let (redis, postgres, upstream) = (TestRedis::start(), TestPostgres::start(), TestUpstream::start().await);
    let links = [proxy_to(redis.port()), proxy_to(postgres.port())];
    let (url, _) = migrated_database(&postgres, links[1].addr().port()).await;
    let table = table(&format!("redis://{}/0", links[0].addr()), &url);
    let gateway = gateway(&format!("{table}\nlocal_cache = \"0\""), &upstream).await;
    let cost = least_cost(&gateway, &upstream, [&links[0], &links[1]]).await;
    assert_eq!((cost.claim, cost.answer[1], cost.background, cost.replay), ([1, 1], 1, [1, 1], [1, 0]), "{cost:?}");

    // What Redis is told is told behind the answer: it comes without Redis, and in full.
    let gate = upstream.gate("/pay");
    let mut running = pay(gateway.addr(), "cut").start().await;
    gate.arrived(1).await;
    links[0].cut();
    let before = links[0].counts();
    gate.open();
    let first = running.read_response().await;
    assert_ran(&first);
    assert!(!first.headers.contains("idempotency-guarantee"), "{first:?}");
    assert_eq!(links[0].counts().bytes_to_server, before.bytes_to_server, "nothing reached Redis");
    links[0].heal();
}

#[tokio::test]
async fn redis_before_postgres_one_each_to_claim_one_to_settle_one_to_replay() {
    assert_tiered_cost(|redis, postgres| format!("url = {redis:?}\nfallback = {postgres:?}")).await;
}

#[tokio::test]
async fn postgres_with_a_cache_costs_the_same() {
    assert_tiered_cost(|redis, postgres| format!("url = {postgres:?}\ncache = {redis:?}")).await;
}
