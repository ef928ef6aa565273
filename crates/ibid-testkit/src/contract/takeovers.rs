//! Lapse and takeover: what nobody knows the end of runs again only by naming its holder.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use ibid::store::{Ask, Claim, End, Fence, Held, Store};

use super::kit::*;

/// A lapsed claim is unknown: neither busy nor free, for whomever asks without naming it.
pub async fn a_lapsed_claim_is_unknown_and_never_free(store: &dyn Store) {
    let ask = fresh();
    let lease = lapsed(store, &ask).await;
    for _ in 0..3 {
        let holder = expect_unknown(claim(store, &rival(&ask)).await);
        assert_eq!((holder.fence, holder.attempt), (lease.fence, 1), "unknown names the lapsed holder");
        assert_eq!(holder.fingerprint, ask.fingerprint, "unknown carries the lapsed holder's fingerprint");
        assert_eq!(holder.takeover_in, Duration::ZERO, "a lapsed holder may be taken over");
        assert!(holder.age + Duration::from_millis(2) >= SHORT, "age {:?} of a lapsed holder", holder.age);
    }
}

/// The lapsed holder's own claim, asked again, never starts a second run.
pub async fn a_lapsed_holder_that_asks_again_is_still_itself(store: &dyn Store) {
    let ask = fresh();
    let lease = lapsed(store, &ask).await;
    match claim(store, &Ask { hold: SHORT, ..ask }).await {
        Claim::Granted(again) => {
            assert_eq!((again.fence, again.attempt), (lease.fence, lease.attempt), "same token, same lease");
        }
        found => assert_eq!(expect_unknown(found).fence, lease.fence, "still the lapsed holder"),
    }
}

/// Taking over a lapsed claim grants the next attempt, with a higher fence.
pub async fn a_lapsed_claim_can_be_taken_over(store: &dyn Store) {
    let ask = fresh();
    let stale = lapsed(store, &ask).await;
    let next = taking_over(&ask, stale.fence);
    let lease = granted(store, &next).await;
    assert_eq!(lease.attempt, 2, "a takeover is the next attempt");
    assert!(lease.fence > stale.fence, "fences only grow: {} after {}", lease.fence, stale.fence);
    let again = granted(store, &next).await;
    assert_eq!((again.fence, again.attempt), (lease.fence, 2), "a repeated takeover gets the same lease");
    let holder = expect_busy(claim(store, &rival(&ask)).await);
    assert_eq!(holder.fingerprint, next.fingerprint, "the fingerprint is now that of the new holder");
    // A late copy of the first claim: neither granted nor believed.
    let holder = expect_busy(claim(store, &Ask { hold: SHORT, ..ask }).await);
    assert_eq!(holder.fence, lease.fence, "the first holder's claim, asked again, finds the new holder");
}

/// Only the current fence may be named.
pub async fn a_takeover_that_names_another_holder_is_refused(store: &dyn Store) {
    let ask = fresh();
    let first = parked(store, &ask).await;
    let second = granted(store, &taking_over(&ask, first.fence)).await;
    held(store, &second, &park()).await;
    for wrong in
        [first.fence, Fence(second.fence.0 + 1), Fence(second.fence.0 - 1), Fence::UNSEEN, Fence(u64::MAX >> 1)]
    {
        let holder = expect_unknown(claim(store, &taking_over(&ask, wrong)).await);
        assert_eq!((holder.fence, holder.attempt), (second.fence, 2), "a stale takeover changes nothing");
    }
    assert_eq!(granted(store, &taking_over(&ask, second.fence)).await.attempt, 3);
}

/// A live holder is not taken over, even by name.
pub async fn a_live_holder_is_not_taken_over(store: &dyn Store) {
    let ask = fresh();
    let lease = granted(store, &ask).await;
    let holder = expect_busy(claim(store, &taking_over(&ask, lease.fence)).await);
    assert_eq!(holder.fence, lease.fence, "the live holder stays");
    held(store, &lease, &complete(b"mine")).await;
}

/// A parked claim is not taken over before `retry_in`, and is afterwards.
pub async fn a_parked_claim_is_not_taken_over_before_retry_in(store: &dyn Store) {
    let ask = fresh();
    let lease = granted(store, &ask).await;
    let retry_in = Duration::from_millis(200);
    let asked = Instant::now();
    held(store, &lease, &End::Park { keep: LONG, retry_in }).await;
    let next = until("the parked claim to be taken over", || async {
        match claim(store, &taking_over(&ask, lease.fence)).await {
            Claim::Granted(next) => Some(next),
            found => {
                assert_eq!(expect_unknown(found).fence, lease.fence, "still parked");
                None
            }
        }
    })
    .await;
    assert!(asked.elapsed() >= retry_in, "taken over {:?} after a park with retry_in {retry_in:?}", asked.elapsed());
    assert_eq!(next.attempt, 2, "a takeover is the next attempt");
    let ask = fresh();
    let lease = granted(store, &ask).await;
    held(store, &lease, &End::Park { keep: LONG, retry_in: LONG }).await;
    expect_unknown(claim(store, &taking_over(&ask, lease.fence)).await);
}

/// Of many that take over one holder at the same time, one runs.
pub async fn of_concurrent_takeovers_exactly_one_is_granted(store: &dyn Store) {
    for _ in 0..4 {
        let ask = fresh();
        let stale = parked(store, &ask).await;
        let asks: Vec<Arc<Ask>> = (0..16).map(|_| Arc::new(taking_over(&ask, stale.fence))).collect();
        let answers = join_all(asks.iter().map(|ask| store.claim(ask))).await;
        let granted = answers
            .into_iter()
            .filter(|found| matches!(found, Ok(Claim::Granted(lease)) if lease.fence > stale.fence))
            .count();
        assert_eq!(granted, 1, "exactly one of 16 concurrent takeovers is granted");
    }
}

/// A holder that was silent for too long and was not taken over still brings the answer.
pub async fn a_late_completion_is_held_if_nobody_took_over(store: &dyn Store) {
    let ask = fresh();
    let lease = lapsed(store, &ask).await;
    held(store, &lease, &complete(b"late, and right")).await;
    assert_eq!(expect_done(claim(store, &rival(&ask)).await).record, &b"late, and right"[..]);
}

/// An extended claim outlives its first lease.
pub async fn extend_keeps_a_claim_alive(store: &dyn Store) {
    let ask = fresh();
    let lease = granted(store, &Ask { hold: SHORT * 3, ..ask.clone() }).await;
    expect_held("extend", answer("extend", store.extend(&lease, LONG).await));
    expect_held("extend, repeated", answer("extend", store.extend(&lease, LONG).await));
    tokio::time::sleep(SHORT * 4).await;
    let holder = expect_busy(claim(store, &taking_over(&ask, lease.fence)).await);
    assert!(holder.takeover_in > PATIENCE, "takeover_in {:?} after extending by {LONG:?}", holder.takeover_in);
}

/// Extending moves the expiry with the lease.
pub async fn extend_moves_the_expiry_too(store: &dyn Store) {
    let ask = Ask { hold: SHORT * 3, keep: SHORT * 3, ..fresh() };
    let lease = granted(store, &ask).await;
    let answered = answer("extend", store.extend(&lease, LONG).await);
    assert!(matches!(answered, Held::Held | Held::Restored), "extend of a claim that nobody took: {answered:?}");
    tokio::time::sleep(SHORT * 8).await;
    assert_eq!(expect_busy(claim(store, &rival(&ask)).await).fence, lease.fence, "it runs beyond its first expiry");
}

/// An extend brings a lapsed claim back to life if nobody took it over.
pub async fn extend_revives_a_lapsed_claim(store: &dyn Store) {
    let ask = fresh();
    let lease = lapsed(store, &ask).await;
    expect_held("extend of a lapsed claim", answer("extend", store.extend(&lease, LONG).await));
    let holder = expect_busy(claim(store, &taking_over(&ask, lease.fence)).await);
    assert_eq!((holder.fence, holder.attempt), (lease.fence, 1), "it is the same holder");
}

/// A holder that was taken over learns it from its next heartbeat.
pub async fn extend_after_a_takeover_is_lost(store: &dyn Store) {
    let ask = fresh();
    let stale = lapsed(store, &ask).await;
    let current = granted(store, &taking_over(&ask, stale.fence)).await;
    let found = expect_lost("extend after a takeover", answer("extend", store.extend(&stale, LONG).await));
    assert_eq!(expect_busy(found).fence, current.fence, "it is told who runs now");
    held(store, &current, &End::Release).await;
    expect_unknown(expect_lost("extend after a takeover", answer("extend", store.extend(&stale, LONG).await)));
}

/// Who took over and then did not run says nothing about the first: it is unknown again.
pub async fn a_released_takeover_is_unknown_again(store: &dyn Store) {
    let ask = fresh();
    let first = lapsed(store, &ask).await;
    let second_ask = taking_over(&ask, first.fence);
    let second = granted(store, &second_ask).await;
    held(store, &second, &End::Release).await;
    held(store, &second, &End::Release).await;
    let holder = expect_unknown(claim(store, &rival(&ask)).await);
    assert_eq!(holder.takeover_in, Duration::ZERO, "it may be taken over at once");
    assert!(matches!(get(store, &ask).await, Some(Claim::Unknown(_))), "unknown for readers too");
    expect_spent(claim(store, &second_ask).await);
    let _ = expect_lost("complete after release", settle(store, &second, &complete(b"no")).await);
    let _ = expect_lost("a stale complete", settle(store, &first, &complete(b"no")).await);
    let third = granted(store, &taking_over(&ask, holder.fence)).await;
    assert!(third.fence > second.fence, "fences only grow: {} after {}", third.fence, second.fence);
    assert_eq!(third.attempt, 3, "attempts go on");
    // Again: a takeover of a released takeover is a takeover too.
    held(store, &third, &End::Release).await;
    expect_unknown(claim(store, &rival(&ask)).await);
}

/// Who takes over and finishes is remembered.
pub async fn a_takeover_that_completes_is_done(store: &dyn Store) {
    let ask = fresh();
    let first = parked(store, &ask).await;
    let next = taking_over(&ask, first.fence);
    let second = granted(store, &next).await;
    held(store, &second, &complete(b"by the second")).await;
    let done = expect_done(claim(store, &rival(&ask)).await);
    assert_eq!((done.fence, done.attempt), (second.fence, 2), "of the holder that finished");
    assert_eq!(done.fingerprint, next.fingerprint, "of the request that was run last");
}
