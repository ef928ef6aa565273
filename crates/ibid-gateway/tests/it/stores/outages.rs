//! `on_store_down`, on stores that really go away and come back.

use std::time::Duration;

use ibid_testkit::{
    servers::redis,
    upstream::{Gate, Reply, Upstream},
};
use tokio::time::{Instant, sleep};

use super::kit::{
    Breakable, assert_degraded, assert_ran, assert_refused, assert_replay, journaled, once_protected, pay, two, until,
    until_ready,
};

/// Nothing is executed that could not be remembered; and no restart is needed afterwards.
async fn closed_refuses_and_goes_on_by_itself(store: &Breakable) {
    let upstream = Upstream::start().await;
    let [one, other] = two(&store.config(""), &upstream).await;
    let first = pay(&one, "before").send().await;
    assert_ran(&first);
    assert_replay(&pay(&other, "before").send().await, &first);

    store.lose();
    for gateway in [&one, &other] {
        for key in ["during", "before", "during"] {
            assert_refused(&pay(gateway, key).send().await, 503, "store-unavailable");
        }
        until_ready(gateway, false).await;
    }
    assert_eq!(upstream.executions(), 1, "nothing ran that could not be remembered");

    store.bring_back();
    for gateway in [&one, &other] {
        until_ready(gateway, true).await;
    }
    let during = once_protected(&pay(&one, "during")).await;
    assert_ran(&during);
    assert!(!during.headers.contains("idempotency-guarantee"), "{during:?}");
    for (key, answer) in [("during", &during), ("before", &first)] {
        for gateway in [&one, &other] {
            assert_replay(&once_protected(&pay(gateway, key)).await, answer);
        }
    }
    assert_eq!(upstream.executions(), 2);
}

/// Everything runs, and says that nothing protects it; until the store is back.
async fn open_runs_and_says_so(store: &Breakable) {
    let upstream = Upstream::start().await;
    let [one, other] = two(&store.config("on_store_down = \"open\""), &upstream).await;
    assert_ran(&pay(&one, "before").send().await);

    store.lose();
    for (gateway, runs) in [(&one, 2), (&other, 3)] {
        let answer = pay(gateway, "during").send().await;
        assert_degraded(&answer);
        assert!(!answer.headers.contains("idempotency-stored"), "it waits nowhere: {answer:?}");
        assert!(!answer.headers.contains("idempotent-replayed"), "{answer:?}");
        assert_eq!(upstream.executions(), runs);
    }

    store.bring_back();
    // Keys of their own until one is protected again: each that is not has run.
    let mut tries = 0;
    let (key, first) = until("an answer with the full guarantee", || {
        tries += 1;
        let (key, one) = (format!("after-{tries}"), &one);
        async move {
            let answer = pay(one, &key).send().await;
            (answer.header("idempotency-guarantee").is_none()).then_some((key, answer))
        }
    })
    .await;
    assert_ran(&first);
    until_ready(&other, true).await;
    let runs = upstream.executions();
    let again = pay(&other, &key).send().await;
    assert_replay(&again, &first);
    assert!(!again.headers.contains("idempotency-guarantee"), "{again:?}");
    assert_eq!(upstream.executions(), runs);
}

/// The store goes away while the operation runs: its answer waits in the journal of the gateway that has it.
async fn an_answer_that_cannot_be_recorded_is_journaled_and_drained(store: &Breakable) {
    let upstream = Upstream::start().await;
    let gate = Gate::new();
    upstream.on("/pay", Reply::usual().gated(&gate));
    let [mut one, other] = two(&store.config(""), &upstream).await;
    let mut running = pay(&one, "k-1").start().await;
    gate.arrived(1).await;
    assert_refused(&pay(&other, "k-1").send().await, 409, "in-progress");

    store.lose();
    gate.open();
    let first = running.read_response().await;
    assert_eq!((first.status, first.header("idempotency-stored")), (201, Some("pending")), "{first:?}");
    assert!(!first.headers.contains("idempotency-guarantee"), "it was claimed: {first:?}");
    assert_replay(&pay(&one, "k-1").send().await, &first);
    assert_refused(&pay(&other, "k-1").send().await, 503, "store-unavailable");
    // A crash of the gateway loses nothing of it.
    one.restart().await;
    assert_replay(&pay(&one, "k-1").send().await, &first);

    store.bring_back();
    until("the journal to drain", || async {
        one.logs().iter().any(|line| line.contains("the journal's answer has reached the store")).then_some(())
    })
    .await;
    assert_replay(&once_protected(&pay(&other, "k-1")).await, &first);
    assert_replay(&once_protected(&pay(&one, "k-1")).await, &first);
    let left = journaled(&one.dir().join("ibid-journal")).len();
    assert_eq!((upstream.executions(), left), (1, 0), "one run, and nothing waits any more");
}

/// Every case, on one way to lose a store.
macro_rules! when_lost {
    ($name:ident, $store:expr) => {
        mod $name {
            use super::*;

            #[tokio::test]
            async fn closed_refuses_and_goes_on_by_itself() {
                super::closed_refuses_and_goes_on_by_itself(&$store).await;
            }

            #[tokio::test]
            async fn open_runs_and_says_so() {
                super::open_runs_and_says_so(&$store).await;
            }

            #[tokio::test]
            async fn an_answer_that_cannot_be_recorded_is_journaled_and_drained() {
                super::an_answer_that_cannot_be_recorded_is_journaled_and_drained(&$store).await;
            }
        }
    };
}

when_lost!(redis_is_killed, Breakable::killed_redis());
when_lost!(redis_is_paused, Breakable::paused_redis());
when_lost!(redis_refuses, Breakable::refused_redis());
when_lost!(postgres_is_killed, Breakable::killed_postgres().await);

/// A full Redis refuses new keys. What runs keeps its lease for as long as it takes, and its answer is recorded.
#[tokio::test]
async fn what_runs_keeps_its_lease_on_a_full_redis() {
    let lease = Duration::from_millis(900);
    let store = Breakable::KilledRedis(redis::Server::start());
    let Breakable::KilledRedis(server) = &store else { unreachable!() };
    let upstream = Upstream::start().await;
    let gate = Gate::new();
    upstream.on("/pay", Reply::usual().gated(&gate));
    let [one, other] = two(&store.config("lease = \"900ms\""), &upstream).await;
    let mut running = pay(&one, "k-1").start().await;
    gate.arrived(1).await;

    // Less than it uses already; `noeviction` is the default.
    server.cli(&["CONFIG", "SET", "maxmemory", "100kb"]);
    let end = Instant::now() + lease * 3;
    while Instant::now() < end {
        assert_refused(&pay(&other, "k-1").send().await, 409, "in-progress");
        sleep(lease / 4).await;
    }
    assert_refused(&pay(&other, "k-2").send().await, 503, "store-unavailable");
    gate.open();
    let first = running.read_response().await;
    assert_ran(&first);
    assert!(!first.headers.contains("idempotency-stored"), "it is recorded: {first:?}");
    for gateway in [&one, &other] {
        assert_replay(&pay(gateway, "k-1").send().await, &first);
    }
    assert_eq!(upstream.executions(), 1);
}
