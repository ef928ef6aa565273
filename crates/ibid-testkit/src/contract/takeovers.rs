//! Expired leases and takeovers: an operation with an unknown outcome runs again only if the claim names its holder.

use super::common::*;

/// A claim with an expired lease has an unknown outcome for all claims that do not name it: it is neither in progress
/// nor free.
pub async fn a_lapsed_claim_is_unknown_and_never_free(store: &dyn Store) {
    let (ask, lease) = new_lapsed(store).await;
    for _ in 0..3 {
        let holder = find_outcome_unknown(store, &ask).await;
        assert_eq!((holder.fence, holder.attempt), (lease.fence, 1), "unknown names the lapsed holder");
        assert_eq!(holder.fingerprint, ask.fingerprint, "unknown carries the lapsed holder's fingerprint");
        assert_eq!(holder.takeover_in, Duration::ZERO, "a lapsed holder may be taken over");
        assert!(holder.age + Duration::from_millis(2) >= SHORT_LEASE, "age {:?} of a lapsed holder", holder.age);
    }
}

pub async fn a_lapsed_holder_that_asks_again_is_still_itself(store: &dyn Store) {
    let (ask, lease) = new_lapsed(store).await;
    match claim(store, &ClaimRequest { lease: SHORT_LEASE, ..ask }).await {
        ClaimOutcome::Granted(again) => {
            assert_eq!((again.fence, again.attempt), (lease.fence, lease.attempt), "same token, same lease");
        }
        found => assert_eq!(expect_outcome_unknown(found).fence, lease.fence, "still the lapsed holder"),
    }
}

pub async fn a_lapsed_claim_can_be_taken_over(store: &dyn Store) {
    let (ask, stale) = new_lapsed(store).await;
    let next = takeover_request(&ask, stale.fence);
    let lease = claim_granted(store, &next).await;
    assert_eq!(lease.attempt, 2, "a takeover is the next attempt");
    assert!(lease.fence > stale.fence, "fences only grow: {} after {}", lease.fence, stale.fence);
    let again = claim_granted(store, &next).await;
    assert_eq!((again.fence, again.attempt), (lease.fence, 2), "a repeated takeover gets the same lease");
    let holder = find_in_progress(store, &ask).await;
    assert_eq!(holder.fingerprint, next.fingerprint, "the fingerprint is now that of the new holder");
    // A late copy of the first claim is not granted.
    let holder = expect_in_progress(claim(store, &ClaimRequest { lease: SHORT_LEASE, ..ask }).await);
    assert_eq!(holder.fence, lease.fence, "the first holder's claim, asked again, finds the new holder");
}

pub async fn a_takeover_that_names_another_holder_is_refused(store: &dyn Store) {
    let (ask, first) = new_parked(store).await;
    let second = take_over(store, &ask, first.fence).await;
    park(store, &second).await;
    for wrong in
        [first.fence, Fence(second.fence.0 + 1), Fence(second.fence.0 - 1), Fence::UNSEEN, Fence(u64::MAX >> 1)]
    {
        let holder = expect_outcome_unknown(claim(store, &takeover_request(&ask, wrong)).await);
        assert_eq!((holder.fence, holder.attempt), (second.fence, 2), "a stale takeover changes nothing");
    }
    assert_eq!(take_over(store, &ask, second.fence).await.attempt, 3);
}

pub async fn a_live_holder_is_not_taken_over(store: &dyn Store) {
    let (ask, lease) = new_claim(store).await;
    let holder = expect_in_progress(claim(store, &takeover_request(&ask, lease.fence)).await);
    assert_eq!(holder.fence, lease.fence, "the live holder stays");
    complete(store, &lease, b"mine").await;
}

/// A parked claim can be taken over after `retry_in`, not before.
pub async fn a_parked_claim_is_not_taken_over_before_retry_in(store: &dyn Store) {
    let (ask, lease) = new_claim(store).await;
    let retry_in = Duration::from_millis(200);
    let asked = Instant::now();
    settle_applied(store, &lease, &Settlement::Park { ttl: LONG_LEASE, retry_in }).await;
    let next = poll_until("the parked claim to be taken over", || async {
        match claim(store, &takeover_request(&ask, lease.fence)).await {
            ClaimOutcome::Granted(next) => Some(next),
            found => {
                assert_eq!(expect_outcome_unknown(found).fence, lease.fence, "still parked");
                None
            }
        }
    })
    .await;
    assert!(asked.elapsed() >= retry_in, "taken over {:?} after a park with retry_in {retry_in:?}", asked.elapsed());
    assert_eq!(next.attempt, 2, "a takeover is the next attempt");
    let (ask, lease) = new_claim(store).await;
    settle_applied(store, &lease, &Settlement::Park { ttl: LONG_LEASE, retry_in: LONG_LEASE }).await;
    expect_outcome_unknown(claim(store, &takeover_request(&ask, lease.fence)).await);
}

pub async fn of_concurrent_takeovers_exactly_one_is_granted(store: &dyn Store) {
    for _ in 0..4 {
        let (ask, stale) = new_parked(store).await;
        let asks: Vec<Arc<ClaimRequest>> = (0..16).map(|_| Arc::new(takeover_request(&ask, stale.fence))).collect();
        let answers = join_all(asks.iter().map(|ask| store.claim(ask))).await;
        let granted = answers
            .into_iter()
            .filter(|found| matches!(found, Ok(ClaimOutcome::Granted(lease)) if lease.fence > stale.fence))
            .count();
        assert_eq!(granted, 1, "exactly one of 16 concurrent takeovers is granted");
    }
}

pub async fn a_late_completion_is_held_if_nobody_took_over(store: &dyn Store) {
    let (ask, lease) = new_lapsed(store).await;
    complete(store, &lease, b"late, and right").await;
    assert_record(store, &ask, b"late, and right").await;
}

pub async fn extend_keeps_a_claim_alive(store: &dyn Store) {
    let ask = new_request();
    let lease = claim_granted(store, &ClaimRequest { lease: SHORT_LEASE * 3, ..ask.clone() }).await;
    extend_applied("extend", store, &lease).await;
    extend_applied("extend, repeated", store, &lease).await;
    sleep(SHORT_LEASE * 4).await;
    let holder = expect_in_progress(claim(store, &takeover_request(&ask, lease.fence)).await);
    let rest = holder.takeover_in;
    assert!(rest > POLL_TIMEOUT, "takeover_in {rest:?} after extending by {LONG_LEASE:?}");
}

pub async fn extend_moves_the_expiry_too(store: &dyn Store) {
    let ask = ClaimRequest { lease: SHORT_LEASE * 3, ttl: SHORT_LEASE * 3, ..new_request() };
    let lease = claim_granted(store, &ask).await;
    let answered = extend(store, &lease, LONG_LEASE).await;
    assert!(!matches!(answered, SettleOutcome::ClaimLost(_)), "extend of a claim that nobody took: {answered:?}");
    sleep(SHORT_LEASE * 8).await;
    assert_eq!(find_in_progress(store, &ask).await.fence, lease.fence, "it runs beyond its first expiry");
}

pub async fn extend_revives_a_lapsed_claim(store: &dyn Store) {
    let (ask, lease) = new_lapsed(store).await;
    extend_applied("extend of a lapsed claim", store, &lease).await;
    let holder = expect_in_progress(claim(store, &takeover_request(&ask, lease.fence)).await);
    assert_eq!((holder.fence, holder.attempt), (lease.fence, 1), "it is the same holder");
}

pub async fn extend_after_a_takeover_is_lost(store: &dyn Store) {
    let (ask, stale) = new_lapsed(store).await;
    let current = take_over(store, &ask, stale.fence).await;
    let found = extend_lost("extend after a takeover", store, &stale).await;
    assert_eq!(expect_in_progress(found).fence, current.fence, "it is told who runs now");
    release(store, &current).await;
    expect_outcome_unknown(extend_lost("extend after a takeover", store, &stale).await);
}

/// Releasing a takeover restores the unknown outcome: it proves nothing about the first holder.
pub async fn a_released_takeover_is_unknown_again(store: &dyn Store) {
    let (ask, first) = new_lapsed(store).await;
    let second_ask = takeover_request(&ask, first.fence);
    let second = claim_granted(store, &second_ask).await;
    release(store, &second).await;
    release(store, &second).await;
    let holder = find_outcome_unknown(store, &ask).await;
    assert_eq!(holder.takeover_in, Duration::ZERO, "it may be taken over at once");
    assert!(matches!(get(store, &ask).await, Some(ClaimOutcome::OutcomeUnknown(_))), "unknown for readers too");
    expect_token_spent(claim(store, &second_ask).await);
    let _ = settle_lost("complete after release", store, &second, &complete_settlement(b"no")).await;
    let _ = settle_lost("a stale complete", store, &first, &complete_settlement(b"no")).await;
    let third = take_over(store, &ask, holder.fence).await;
    assert!(third.fence > second.fence, "fences only grow: {} after {}", third.fence, second.fence);
    assert_eq!(third.attempt, 3, "attempts go on");
    // The same holds for a takeover of a released takeover.
    release(store, &third).await;
    find_outcome_unknown(store, &ask).await;
}

pub async fn a_takeover_that_completes_is_done(store: &dyn Store) {
    let (ask, first) = new_parked(store).await;
    let next = takeover_request(&ask, first.fence);
    let second = claim_granted(store, &next).await;
    complete(store, &second, b"by the second").await;
    let done = find_completed(store, &ask).await;
    assert_eq!((done.fence, done.attempt), (second.fence, 2), "of the holder that finished");
    assert_eq!(done.fingerprint, next.fingerprint, "of the request that was run last");
}
