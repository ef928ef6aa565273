//! Waiting for a holder: a hint that comes soon after the holder is gone, and not before.

use std::time::{Duration, Instant};

use futures_util::future::{join, join_all, join3};
use ibid::store::{Ask, End, Fence, Store};
use tokio::time::{sleep, timeout};

use super::kit::*;

/// What waiters ask for: far beyond [`SOON`].
const LIMIT: Duration = Duration::from_secs(60);
/// Within this a waiter must be back once its holder is gone.
const SOON: Duration = Duration::from_secs(6);

/// There is nothing to wait for unless `seen` runs.
pub async fn wait_returns_at_once_unless_seen_runs(store: &dyn Store) {
    let ask = fresh();
    waited(store, &ask, Fence(1), "where nothing is").await;
    let lease = granted(store, &ask).await;
    waited(store, &ask, Fence(lease.fence.0 + 1), "for another holder than the one that runs").await;
    held(store, &lease, &park()).await;
    waited(store, &ask, lease.fence, "for a parked holder").await;
    let next = granted(store, &taking_over(&ask, lease.fence)).await;
    waited(store, &ask, lease.fence, "for a holder that was taken over").await;
    held(store, &next, &complete(b"done")).await;
    waited(store, &ask, next.fence, "for a holder that has finished").await;
    let ask = fresh();
    let lease = granted(store, &ask).await;
    held(store, &lease, &End::Release).await;
    waited(store, &ask, lease.fence, "for a holder that was released").await;
    let ask = fresh();
    let lease = lapsed(store, &ask).await;
    waited(store, &ask, lease.fence, "for a holder that has lapsed").await;
}

/// Each end of the holder wakes its waiter promptly.
pub async fn wait_returns_soon_after_the_holder_settles(store: &dyn Store) {
    for end in [complete(b"done"), End::Release, park()] {
        let ask = fresh();
        let lease = granted(store, &ask).await;
        let settles = async {
            sleep(SHORT).await;
            held(store, &lease, &end).await;
        };
        join(settles, waited(store, &ask, lease.fence, "for a holder that settles")).await;
    }
}

/// An operator who forgets the running entry wakes its waiters.
pub async fn wait_returns_soon_after_a_forget(store: &dyn Store) {
    let ask = fresh();
    let lease = granted(store, &ask).await;
    let forgets = async {
        sleep(SHORT).await;
        expect_held("forget", answer("forget", store.operators().forget(&ask.address, lease.fence).await));
    };
    join(forgets, waited(store, &ask, lease.fence, "for a holder that is forgotten")).await;
}

/// A holder that falls silent does not keep its waiters for the whole limit.
pub async fn wait_returns_soon_after_the_lease_lapses(store: &dyn Store) {
    let ask = fresh();
    let lease = granted(store, &Ask { hold: SHORT * 3, ..ask.clone() }).await;
    waited(store, &ask, lease.fence, "for a holder that lapses").await;
}

/// A waiter stays through an extension of the lease.
pub async fn wait_goes_on_while_the_lease_is_extended(store: &dyn Store) {
    for hold in [SHORT * 5, SHORT * 15, SHORT * 40] {
        let ask = fresh();
        let asked = Instant::now();
        let lease = granted(store, &Ask { hold, ..ask.clone() }).await;
        let extends = async {
            expect_held("extend", answer("extend", store.extend(&lease, LONG).await));
            let in_time = asked.elapsed() < hold;
            sleep(hold + SHORT * 3).await;
            held(store, &lease, &complete(b"done")).await;
            in_time
        };
        let waits = async {
            let began = Instant::now();
            waited(store, &ask, lease.fence, "for a holder that extends, then settles").await;
            began.elapsed()
        };
        let (in_time, waited) = join(extends, waits).await;
        // An extend that was answered later than the lease says nothing: the waiter may have found it lapsed.
        if in_time {
            assert!(waited >= hold + SHORT * 3, "the waiter came back while the holder was running");
            return;
        }
    }
    panic!("no extend was answered within its lease");
}

/// While the holder runs, a waiter is back after its limit and not before.
pub async fn wait_returns_after_its_limit(store: &dyn Store) {
    let ask = fresh();
    let lease = granted(store, &ask).await;
    let limit = Duration::from_millis(150);
    let asked = Instant::now();
    let back = timeout(SOON, store.wait(&ask.address, lease.fence, limit)).await;
    answer("wait", back.expect("a wait ends soon after its limit"));
    // Timers that count in milliseconds may be off by one.
    assert!(asked.elapsed() + Duration::from_millis(2) >= limit, "back after {:?} of {limit:?}", asked.elapsed());
    expect_busy(claim(store, &rival(&ask)).await);
    let back = timeout(SOON, store.wait(&ask.address, lease.fence, Duration::ZERO)).await;
    answer("wait", back.expect("a wait of zero ends soon"));
}

/// Two hundred waiters all wake.
pub async fn all_of_200_waiters_wake(store: &dyn Store) {
    let ask = fresh();
    let lease = granted(store, &ask).await;
    let settles = async {
        sleep(SHORT * 2).await;
        held(store, &lease, &complete(b"done")).await;
    };
    let waiters = (0..200).map(|_| waited(store, &ask, lease.fence, "together with 199 others"));
    join(settles, join_all(waiters)).await;
    expect_done(claim(store, &rival(&ask)).await);
}

/// Waiters of one holder that leave do not take the next holder's waiters with them.
pub async fn waiters_of_the_next_holder_are_not_lost(store: &dyn Store) {
    let ask = fresh();
    let first = granted(store, &ask).await;
    let hands_over = async {
        sleep(SHORT).await;
        held(store, &first, &End::Release).await;
        let second = granted(store, &rival(&ask)).await;
        let settles = async {
            sleep(SHORT * 2).await;
            held(store, &second, &complete(b"done")).await;
        };
        join(waited(store, &ask, second.fence, "for the next holder"), settles).await;
    };
    let waits = || waited(store, &ask, first.fence, "for the first holder");
    join3(hands_over, waits(), waits()).await;
}

/// A waiter that gives up leaves the others waiting, and they still wake.
pub async fn a_waiter_that_gives_up_disturbs_nobody(store: &dyn Store) {
    let ask = fresh();
    let lease = granted(store, &ask).await;
    let gives_up = async {
        let wait = store.wait(&ask.address, lease.fence, LIMIT);
        assert!(timeout(SHORT, wait).await.is_err(), "a waiter was back while the holder was running");
    };
    let short = async { answer("wait", store.wait(&ask.address, lease.fence, SHORT).await) };
    let settles = async {
        sleep(SHORT * 3).await;
        held(store, &lease, &complete(b"done")).await;
    };
    let others = join_all((0..3).map(|_| waited(store, &ask, lease.fence, "beside one that gave up")));
    join3(join(gives_up, short), settles, others).await;
}

/// Waits for `seen` with a long limit and must be back soon.
async fn waited(store: &dyn Store, ask: &Ask, seen: Fence, what: &str) {
    let patience = SOON + SHORT * 10;
    match timeout(patience, store.wait(&ask.address, seen, LIMIT)).await {
        Ok(answered) => answer("wait", answered),
        Err(_) => panic!("a wait {what} did not end within {patience:?}"),
    }
}
