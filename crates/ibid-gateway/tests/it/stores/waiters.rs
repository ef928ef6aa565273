//! Who waits at one gateway for what runs at another.

use std::time::{Duration, Instant};

use ibid_testkit::{
    process::Gateway,
    upstream::{Gate, Reply, Upstream},
};
use tokio::time::{sleep, timeout};

use super::kit::{assert_ran, assert_replay, pay, two};
use crate::keys::{self, Place};

/// Beneath being told, a waiter looks for itself: at the earliest this long after it came.
const FIRST_LOOK: Duration = Duration::from_millis(500);
/// By then it waits.
const SETTLED_IN: Duration = Duration::from_millis(150);
/// On a busy machine a round may be slow; that all of them are is no accident.
const ROUNDS: usize = 12;
const WAITERS: usize = 5;

/// The answer of one gateway is told to those who wait at the other: they do not have to look for it.
async fn are_told(place: Place) {
    let upstream = Upstream::start().await;
    let dials = "[policy]\npreset = \"ietf\"\non_concurrent = \"wait\"\n";
    let [one, other] = two(&format!("{}{dials}", place.settings()), &upstream).await;
    let mut took = Vec::new();
    for round in 0..ROUNDS {
        took.push(waited(&upstream, [&one, &other], &format!("k-{round}")).await);
        assert_eq!(upstream.executions(), round + 1);
        // The first round makes the connection on which it is told.
        if round > 0 && took[round] < FIRST_LOOK {
            return;
        }
    }
    panic!("nobody was told before they looked: {took:?}");
}

/// How long those at the second gateway waited, from when they came.
async fn waited(upstream: &Upstream, [one, other]: [&Gateway; 2], key: &str) -> Duration {
    let gate = Gate::new();
    upstream.on("/pay", Reply::usual().gated(&gate));
    let mut running = pay(one, key).start().await;
    gate.arrived(1).await;
    let came = Instant::now();
    let mut waiting = Vec::new();
    for _ in 0..WAITERS {
        waiting.push(pay(other, key).start().await);
    }
    sleep(SETTLED_IN).await;
    for waiter in &mut waiting {
        let early = timeout(Duration::from_millis(1), waiter.read_some()).await;
        assert!(early.is_err(), "answered while the first is running: {early:?}");
    }
    gate.open();
    let first = running.read_response().await;
    assert_ran(&first);
    for waiter in &mut waiting {
        assert_replay(&waiter.read_response().await, &first);
    }
    let took = came.elapsed();
    assert_eq!(gate.count(), 1);
    took
}

#[tokio::test]
async fn at_a_redis_are_told() {
    are_told(keys::redis().await).await;
}

#[tokio::test]
async fn at_a_postgres_are_told() {
    are_told(keys::postgres().await).await;
}

#[tokio::test]
async fn at_a_redis_with_postgres_behind_it_are_told() {
    are_told(keys::fallback().await).await;
}
