//! Who waits at one gateway for what runs at another.

use std::time::{Duration, Instant};

use testbed::{process::GatewayProcess, upstream::TestUpstream};
use tokio::time::{sleep, timeout};

use super::common::{pay, start_two};
use crate::keys::{self, TestStore};
use crate::support::{assert_ran, assert_replay};

/// Beneath being told, a waiter looks for itself: at the earliest this long after it came.
const FIRST_POLL_DELAY: Duration = Duration::from_millis(500);
/// By then it waits.
const WAIT_SETUP_DELAY: Duration = Duration::from_millis(150);
/// On a busy machine a round may be slow; that all of them are is no accident.
const ROUNDS: usize = 12;
const WAITERS: usize = 5;

/// The answer of one gateway is told to those who wait at the other: they do not have to look for it.
async fn assert_waiters_notified(place: TestStore) {
    let upstream = TestUpstream::start().await;
    let dials = "[policy]\npreset = \"ietf\"\non_concurrent = \"wait\"\n";
    let [one, other] = start_two(&format!("{}{dials}", place.settings()), &upstream).await;
    let mut took = Vec::new();
    for round in 0..ROUNDS {
        took.push(wait_duration(&upstream, [&one, &other], &format!("k-{round}")).await);
        assert_eq!(upstream.executions(), round + 1);
        // The first round makes the connection on which it is told.
        if round > 0 && took[round] < FIRST_POLL_DELAY {
            return;
        }
    }
    panic!("nobody was told before they looked: {took:?}");
}

/// How long those at the second gateway waited, from when they came.
async fn wait_duration(upstream: &TestUpstream, [one, other]: [&GatewayProcess; 2], key: &str) -> Duration {
    let gate = upstream.gate("/pay");
    let mut running = pay(one, key).start().await;
    gate.arrived(1).await;
    let came = Instant::now();
    let mut waiting = Vec::new();
    for _ in 0..WAITERS {
        waiting.push(pay(other, key).start().await);
    }
    sleep(WAIT_SETUP_DELAY).await;
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
    assert_waiters_notified(keys::redis().await).await;
}

#[tokio::test]
async fn at_a_postgres_are_told() {
    assert_waiters_notified(keys::postgres().await).await;
}

#[tokio::test]
async fn at_a_redis_with_postgres_behind_it_are_told() {
    assert_waiters_notified(keys::fallback().await).await;
}
