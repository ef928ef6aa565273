//! `on_store_down`, on stores that really go away and come back.

use std::time::Duration;

use testbed::{TestRedis, upstream::TestUpstream};
use tokio::time::{Instant, sleep};

use super::common::{
    BreakableStore, assert_degraded, journal_files, pay, send_until_protected, start_two, wait_until_ready,
};
use crate::support::{assert_ran, assert_refused, assert_replay, until_some};

/// Nothing is executed that could not be remembered; and no restart is needed afterwards.
async fn closed_refuses_and_goes_on_by_itself(store: &BreakableStore) {
    let upstream = TestUpstream::start().await;
    let [one, other] = start_two(&store.config(""), &upstream).await;
    let first = pay(&one, "before").send().await;
    assert_ran(&first);
    assert_replay(&pay(&other, "before").send().await, &first);

    store.take_down();
    for gateway in [&one, &other] {
        for key in ["during", "before", "during"] {
            assert_refused(&pay(gateway, key).send().await, 503, "store-unavailable");
        }
        wait_until_ready(gateway, false).await;
    }
    assert_eq!(upstream.executions(), 1, "nothing ran that could not be remembered");

    store.restore();
    for gateway in [&one, &other] {
        wait_until_ready(gateway, true).await;
    }
    let during = send_until_protected(&pay(&one, "during")).await;
    assert_ran(&during);
    assert!(!during.headers.contains("idempotency-guarantee"), "{during:?}");
    for (key, answer) in [("during", &during), ("before", &first)] {
        for gateway in [&one, &other] {
            assert_replay(&send_until_protected(&pay(gateway, key)).await, answer);
        }
    }
    assert_eq!(upstream.executions(), 2);
}

/// Everything runs, and says that nothing protects it; until the store is back.
async fn open_runs_and_says_so(store: &BreakableStore) {
    let upstream = TestUpstream::start().await;
    let [one, other] = start_two(&store.config("on_store_down = \"open\""), &upstream).await;
    assert_ran(&pay(&one, "before").send().await);

    store.take_down();
    for (gateway, runs) in [(&one, 2), (&other, 3)] {
        let answer = pay(gateway, "during").send().await;
        assert_degraded(&answer);
        assert!(!answer.headers.contains("idempotency-stored"), "it waits nowhere: {answer:?}");
        assert!(!answer.headers.contains("idempotent-replayed"), "{answer:?}");
        assert_eq!(upstream.executions(), runs);
    }

    store.restore();
    // Keys of their own until one is protected again: each that is not has run.
    let mut tries = 0;
    let (key, first) = until_some("an answer with the full guarantee", || {
        tries += 1;
        let (key, one) = (format!("after-{tries}"), &one);
        async move {
            let answer = pay(one, &key).send().await;
            (answer.header("idempotency-guarantee").is_none()).then_some((key, answer))
        }
    })
    .await;
    assert_ran(&first);
    wait_until_ready(&other, true).await;
    let runs = upstream.executions();
    let again = pay(&other, &key).send().await;
    assert_replay(&again, &first);
    assert!(!again.headers.contains("idempotency-guarantee"), "{again:?}");
    assert_eq!(upstream.executions(), runs);
}

/// The store goes away while the operation runs: its answer waits in the journal of the gateway that has it.
async fn an_answer_that_cannot_be_recorded_is_journaled_and_drained(store: &BreakableStore) {
    let upstream = TestUpstream::start().await;
    let gate = upstream.gate("/pay");
    let [mut one, other] = start_two(&store.config(""), &upstream).await;
    let mut running = pay(&one, "k-1").start().await;
    gate.arrived(1).await;
    assert_refused(&pay(&other, "k-1").send().await, 409, "in-progress");

    store.take_down();
    gate.open();
    let first = running.read_response().await;
    assert_eq!((first.status, first.header("idempotency-stored")), (201, Some("pending")), "{first:?}");
    assert!(!first.headers.contains("idempotency-guarantee"), "it was claimed: {first:?}");
    assert_replay(&pay(&one, "k-1").send().await, &first);
    assert_refused(&pay(&other, "k-1").send().await, 503, "store-unavailable");
    // A crash of the gateway loses nothing of it.
    one.restart().await;
    assert_replay(&pay(&one, "k-1").send().await, &first);

    store.restore();
    until_some("the journal to drain", || async {
        one.logs().iter().any(|line| line.contains("the journal's answer has reached the store")).then_some(())
    })
    .await;
    assert_replay(&send_until_protected(&pay(&other, "k-1")).await, &first);
    assert_replay(&send_until_protected(&pay(&one, "k-1")).await, &first);
    let left = journal_files(&one.dir().join("ibid-journal")).len();
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

when_lost!(redis_is_killed, BreakableStore::killed_redis());
when_lost!(redis_is_paused, BreakableStore::paused_redis());
when_lost!(redis_refuses, BreakableStore::refused_redis());
when_lost!(postgres_is_killed, BreakableStore::killed_postgres().await);

/// A full Redis refuses new keys. What runs keeps its lease for as long as it takes, and its answer is recorded.
#[tokio::test]
async fn what_runs_keeps_its_lease_on_a_full_redis() {
    let lease = Duration::from_millis(900);
    let store = BreakableStore::KilledRedis(TestRedis::start());
    let BreakableStore::KilledRedis(server) = &store else { unreachable!() };
    let upstream = TestUpstream::start().await;
    let gate = upstream.gate("/pay");
    let [one, other] = start_two(&store.config("lease = \"900ms\""), &upstream).await;
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
