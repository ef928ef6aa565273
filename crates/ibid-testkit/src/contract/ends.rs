//! Settlements: complete, release, park. Each may be repeated, and each may come too late.

use super::common::*;

pub async fn a_completed_claim_is_done_with_its_record(store: &dyn Store) {
    for failed in [false, true] {
        let (ask, lease) = new_claim(store).await;
        let record = Bytes::from((0..=255).collect::<Vec<u8>>());
        let keep = Duration::from_secs(100);
        settle_applied(store, &lease, &completion(failed, record.clone(), keep)).await;
        for asked in [competing_request(&ask), ask.clone()] {
            let done = expect_completed(claim(store, &asked).await);
            assert_eq!(done.record, record, "the record comes back as it was given");
            assert_eq!(done.failed, failed, "the failed flag comes back");
            assert_eq!(done.fingerprint, ask.fingerprint, "the fingerprint is that of the request that was run");
            assert_eq!((done.fence, done.attempt), (lease.fence, lease.attempt), "of the holder that finished");
            assert!(done.expires_in <= keep, "expires_in {:?} of a keep of {keep:?}", done.expires_in);
            assert!(done.expires_in + POLL_TIMEOUT * 2 > keep, "expires_in {:?} just now", done.expires_in);
        }
    }
}

/// A second completion is accepted and changes nothing, whatever its record.
pub async fn complete_is_repeatable_and_the_first_record_stays(store: &dyn Store) {
    let (ask, lease) = new_claim(store).await;
    complete(store, &lease, b"first").await;
    complete(store, &lease, b"first").await;
    settle_applied(store, &lease, &completion(true, "second", LONG_LEASE)).await;
    let done = find_completed(store, &ask).await;
    assert_eq!(done.record, &b"first"[..], "a record seen as finished never changes");
    assert!(!done.failed, "a record seen as finished never changes");
}

pub async fn a_finished_entry_cannot_be_undone(store: &dyn Store) {
    let (ask, lease) = new_claim(store).await;
    complete(store, &lease, b"kept").await;
    for end in [Settlement::Release, park_settlement()] {
        let found = settle_lost("an end other than complete, after complete", store, &lease, &end).await;
        assert_eq!(expect_completed(found).record, &b"kept"[..], "and it is told what is there");
    }
    let _ = extend_lost("extend after complete", store, &lease).await;
    let found = claim(store, &takeover_request(&ask, lease.fence)).await;
    assert_eq!(expect_completed(found).record, &b"kept"[..], "what is done is not taken over");
}

pub async fn a_stale_settle_is_lost_and_writes_nothing(store: &dyn Store) {
    let (ask, stale) = new_parked(store).await;
    let current = take_over(store, &ask, stale.fence).await;
    for end in [complete_settlement(b"stale"), Settlement::Release, park_settlement()] {
        let found = expect_in_progress(settle_lost("a stale settle", store, &stale, &end).await);
        assert_eq!(found.fence, current.fence, "a stale holder is told who runs now");
        assert_eq!(find_in_progress(store, &ask).await.fence, current.fence, "it wrote nothing");
    }
    complete(store, &current, b"current").await;
    let found = settle_lost("a stale settle", store, &stale, &complete_settlement(b"stale")).await;
    assert_eq!(expect_completed(found).record, &b"current"[..], "a stale holder is told what was remembered");
    assert_record(store, &ask, b"current").await;
}

pub async fn a_settle_needs_both_fence_and_token(store: &dyn Store) {
    let (ask, lease) = new_claim(store).await;
    let mut foreign = lease.clone();
    foreign.request = competing_request(&ask).into();
    let mut wrong = lease.clone();
    wrong.fence.0 += 1;
    for (what, other) in [("with a foreign token", foreign), ("with a wrong fence", wrong)] {
        expect_in_progress(settle_lost(what, store, &other, &complete_settlement(b"no")).await);
        let _ = extend_lost(what, store, &other).await;
    }
    complete(store, &lease, b"yes").await;
}

pub async fn after_a_release_the_next_claim_is_granted(store: &dyn Store) {
    let ask = new_request();
    let mut before = claim_granted(store, &ask).await;
    for attempt in 2..5 {
        release(store, &before).await;
        let next = claim_next(store, &ask).await;
        assert_eq!(next.attempt, attempt, "attempts go on after a release");
        assert!(next.fence > before.fence, "fences only grow: {} after {}", next.fence, before.fence);
        before = next;
    }
}

pub async fn a_released_token_is_spent(store: &dyn Store) {
    let (ask, lease) = new_claim(store).await;
    release(store, &lease).await;
    for _ in 0..3 {
        expect_token_spent(claim(store, &ask).await);
    }
    assert_eq!(get(store, &ask).await, None, "a released entry is not there for readers");
    sleep(SHORT_LEASE * 3).await;
    expect_token_spent(claim(store, &ask).await);
}

pub async fn a_spent_token_stays_spent_when_others_come_and_go(store: &dyn Store) {
    let ask = new_request();
    let mut spent = vec![ask.clone()];
    release(store, &claim_granted(store, &ask).await).await;
    for _ in 0..3 {
        let next = competing_request(&ask);
        let lease = claim_granted(store, &next).await;
        for late in &spent {
            let found = claim(store, late).await;
            let is_refused = matches!(found, ClaimOutcome::InProgress(_) | ClaimOutcome::TokenSpent);
            assert!(is_refused, "a late copy beside a holder found {found:?}");
        }
        release(store, &lease).await;
        spent.push(next);
        for late in &spent {
            expect_token_spent(claim(store, late).await);
        }
    }
    let lease = claim_next(store, &ask).await;
    settle_applied(store, &lease, &completion(false, &b"short"[..], SHORT_LEASE)).await;
    wait_until_absent(store, &ask).await;
    for late in &spent {
        expect_token_spent(claim(store, late).await);
    }
}

/// A released token stays spent, also with the shortest lease and ttl.
pub async fn a_released_token_is_spent_beyond_hold_and_keep(store: &dyn Store) {
    let ask = ClaimRequest { lease: SHORT_LEASE, ttl: Duration::ZERO, ..new_request() };
    let lease = claim_granted(store, &ask).await;
    // On a slow machine the entry may have expired. The release then restores it, and the token is spent as well.
    let _ = settle(store, &lease, &Settlement::Release).await;
    sleep(SHORT_LEASE * 5).await;
    expect_token_spent(claim(store, &ask).await);
}

/// A repeated release is acknowledged, also if others have claimed since.
pub async fn a_release_is_repeatable_when_others_have_come(store: &dyn Store) {
    let (ask, lease) = new_claim(store).await;
    release(store, &lease).await;
    let next = claim_next(store, &ask).await;
    release(store, &lease).await;
    expect_in_progress(settle_lost("complete after release", store, &lease, &complete_settlement(b"late")).await);
    complete(store, &next, b"theirs").await;
    release(store, &lease).await;
    assert_record(store, &ask, b"theirs").await;
}

pub async fn after_a_release_only_a_release_is_held(store: &dyn Store) {
    let (ask, lease) = new_claim(store).await;
    release(store, &lease).await;
    release(store, &lease).await;
    expect_token_spent(settle_lost("complete after release", store, &lease, &complete_settlement(b"late")).await);
    expect_token_spent(settle_lost("park after release", store, &lease, &park_settlement()).await);
    let _ = extend_lost("extend after release", store, &lease).await;
    assert_eq!(get(store, &ask).await, None, "none of them wrote anything");
    claim_next(store, &ask).await;
}

pub async fn a_parked_claim_is_unknown(store: &dyn Store) {
    let (ask, lease) = new_claim(store).await;
    let end = Settlement::Park { ttl: LONG_LEASE, retry_in: Duration::from_secs(100) };
    settle_applied(store, &lease, &end).await;
    settle_applied(store, &lease, &end).await;
    for asked in [competing_request(&ask), ask.clone()] {
        let holder = expect_outcome_unknown(claim(store, &asked).await);
        assert_eq!((holder.fence, holder.attempt), (lease.fence, 1), "unknown names the holder");
        assert_eq!(holder.fingerprint, ask.fingerprint, "unknown carries the holder's fingerprint");
        assert!(holder.takeover_in <= Duration::from_secs(100), "not later than retry_in");
        assert!(holder.takeover_in + POLL_TIMEOUT * 2 > Duration::from_secs(100), "not before retry_in");
    }
}

pub async fn a_holder_may_complete_after_its_own_park(store: &dyn Store) {
    let (ask, lease) = new_parked(store).await;
    complete(store, &lease, b"it happened").await;
    assert_record(store, &ask, b"it happened").await;
}

/// A release after a park does not free the entry, because the operation may have run.
pub async fn a_release_after_its_own_park_does_not_free(store: &dyn Store) {
    let (ask, lease) = new_parked(store).await;
    expect_outcome_unknown(settle_lost("release after park", store, &lease, &Settlement::Release).await);
    find_outcome_unknown(store, &ask).await;
}

pub async fn an_empty_record_comes_back_empty(store: &dyn Store) {
    let (ask, lease) = new_claim(store).await;
    complete(store, &lease, b"").await;
    let done = expect_completed(get(store, &ask).await.expect("a record is there"));
    assert!(done.record.is_empty(), "an empty record");
}

pub async fn a_large_record_comes_back_whole(store: &dyn Store) {
    let (ask, lease) = new_claim(store).await;
    let record: Bytes = (0_u32..512 * 1024).flat_map(|n| n.wrapping_mul(0x9e37_79b9).to_le_bytes()).collect();
    settle_applied(store, &lease, &completion(false, record.clone(), LONG_LEASE)).await;
    assert!(find_completed(store, &ask).await.record == record, "2 MiB come back unchanged");
}
