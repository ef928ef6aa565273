//! Waiting for a holder: the wait ends soon after the holder is gone, and not before.

use super::common::*;

/// The limit of waits: far beyond [`MAX_WAKE_DELAY`].
const WAIT_LIMIT: Duration = Duration::from_secs(60);
/// Maximum time between the end of a holder and the end of its waits.
const MAX_WAKE_DELAY: Duration = Duration::from_secs(6);

pub async fn wait_returns_at_once_unless_seen_runs(store: &dyn Store) {
    let ask = new_request();
    expect_woken(store, &ask, Fence(1), "where nothing is").await;
    let lease = claim_granted(store, &ask).await;
    expect_woken(store, &ask, Fence(lease.fence.0 + 1), "for another holder than the one that runs").await;
    park(store, &lease).await;
    expect_woken(store, &ask, lease.fence, "for a parked holder").await;
    let next = take_over(store, &ask, lease.fence).await;
    expect_woken(store, &ask, lease.fence, "for a holder that was taken over").await;
    complete(store, &next, b"done").await;
    expect_woken(store, &ask, next.fence, "for a holder that has finished").await;
    let (ask, lease) = new_claim(store).await;
    release(store, &lease).await;
    expect_woken(store, &ask, lease.fence, "for a holder that was released").await;
    let (ask, lease) = new_lapsed(store).await;
    expect_woken(store, &ask, lease.fence, "for a holder that has lapsed").await;
}

pub async fn wait_returns_soon_after_the_holder_settles(store: &dyn Store) {
    for end in [complete_settlement(b"done"), Settlement::Release, park_settlement()] {
        let (ask, lease) = new_claim(store).await;
        let settles = settle_after(SHORT_LEASE, store, &lease, end);
        join(settles, expect_woken(store, &ask, lease.fence, "for a holder that settles")).await;
    }
}

pub async fn wait_returns_soon_after_a_forget(store: &dyn Store) {
    let (ask, lease) = new_claim(store).await;
    let forgets = async {
        sleep(SHORT_LEASE).await;
        forget_applied(store, &lease).await;
    };
    join(forgets, expect_woken(store, &ask, lease.fence, "for a holder that is forgotten")).await;
}

/// A wait ends when the holder's lease expires, not only at its limit.
pub async fn wait_returns_soon_after_the_lease_lapses(store: &dyn Store) {
    let ask = new_request();
    let lease = claim_granted(store, &ClaimRequest { lease: SHORT_LEASE * 3, ..ask.clone() }).await;
    expect_woken(store, &ask, lease.fence, "for a holder that lapses").await;
}

pub async fn wait_goes_on_while_the_lease_is_extended(store: &dyn Store) {
    for hold in [SHORT_LEASE * 5, SHORT_LEASE * 15, SHORT_LEASE * 40] {
        let ask = new_request();
        let asked = Instant::now();
        let lease = claim_granted(store, &ClaimRequest { lease: hold, ..ask.clone() }).await;
        let extends = async {
            extend_applied("extend", store, &lease).await;
            let in_time = asked.elapsed() < hold;
            sleep(hold + SHORT_LEASE * 3).await;
            complete(store, &lease, b"done").await;
            in_time
        };
        let waits = async {
            let began = Instant::now();
            expect_woken(store, &ask, lease.fence, "for a holder that extends, then settles").await;
            began.elapsed()
        };
        let (in_time, waited) = join(extends, waits).await;
        // If the extension was acknowledged after the lease expired, the wait may have ended: the case is inconclusive.
        if in_time {
            assert!(waited >= hold + SHORT_LEASE * 3, "the waiter came back while the holder was running");
            return;
        }
    }
    panic!("no extend was answered within its lease");
}

/// While the holder is in progress, a wait ends at its limit, not before.
pub async fn wait_returns_after_its_limit(store: &dyn Store) {
    let (ask, lease) = new_claim(store).await;
    let limit = Duration::from_millis(150);
    let asked = Instant::now();
    let back = timeout(MAX_WAKE_DELAY, store.wait(&ask.address, lease.fence, limit)).await;
    expect_answer("wait", back.expect("a wait ends soon after its limit"));
    // Timers that count in milliseconds may be off by one.
    assert!(asked.elapsed() + Duration::from_millis(2) >= limit, "back after {:?} of {limit:?}", asked.elapsed());
    find_in_progress(store, &ask).await;
    let back = timeout(MAX_WAKE_DELAY, store.wait(&ask.address, lease.fence, Duration::ZERO)).await;
    expect_answer("wait", back.expect("a wait of zero ends soon"));
}

pub async fn all_of_200_waiters_wake(store: &dyn Store) {
    let (ask, lease) = new_claim(store).await;
    let settles = settle_after(SHORT_LEASE * 2, store, &lease, complete_settlement(b"done"));
    let waiters = (0..200).map(|_| expect_woken(store, &ask, lease.fence, "together with 199 others"));
    join(settles, join_all(waiters)).await;
    find_completed(store, &ask).await;
}

pub async fn waiters_of_the_next_holder_are_not_lost(store: &dyn Store) {
    let (ask, first) = new_claim(store).await;
    let hands_over = async {
        sleep(SHORT_LEASE).await;
        release(store, &first).await;
        let second = claim_next(store, &ask).await;
        let settles = settle_after(SHORT_LEASE * 2, store, &second, complete_settlement(b"done"));
        join(expect_woken(store, &ask, second.fence, "for the next holder"), settles).await;
    };
    let waits = || expect_woken(store, &ask, first.fence, "for the first holder");
    join3(hands_over, waits(), waits()).await;
}

pub async fn a_waiter_that_gives_up_disturbs_nobody(store: &dyn Store) {
    let (ask, lease) = new_claim(store).await;
    let gives_up = async {
        let wait = store.wait(&ask.address, lease.fence, WAIT_LIMIT);
        assert!(timeout(SHORT_LEASE, wait).await.is_err(), "a waiter was back while the holder was running");
    };
    let short = async { expect_answer("wait", store.wait(&ask.address, lease.fence, SHORT_LEASE).await) };
    let settles = settle_after(SHORT_LEASE * 3, store, &lease, complete_settlement(b"done"));
    let others = join_all((0..3).map(|_| expect_woken(store, &ask, lease.fence, "beside one that gave up")));
    join3(join(gives_up, short), settles, others).await;
}

async fn settle_after(delay: Duration, store: &dyn Store, lease: &Lease, end: Settlement) {
    sleep(delay).await;
    settle_applied(store, lease, &end).await;
}

/// Waits for `seen` with a long limit; the wait must end soon.
async fn expect_woken(store: &dyn Store, ask: &ClaimRequest, seen: Fence, what: &str) {
    let patience = MAX_WAKE_DELAY + SHORT_LEASE * 10;
    match timeout(patience, store.wait(&ask.address, seen, WAIT_LIMIT)).await {
        Ok(answered) => expect_answer("wait", answered),
        Err(_) => panic!("a wait {what} did not end within {patience:?}"),
    }
}
