//! Lifetimes: how long entries are remembered, and what follows.

use super::common::*;

pub async fn a_finished_entry_answers_for_keep_and_is_gone_afterwards(store: &dyn Store) {
    let (ask, lease) = new_claim(store).await;
    let keep = Duration::from_millis(250);
    let asked = Instant::now();
    settle_applied(store, &lease, &completion(false, &b"for a while"[..], keep)).await;
    poll_until("the record to expire", || async {
        match get(store, &ask).await {
            Some(ClaimOutcome::Completed(done)) => {
                assert_eq!(done.record, &b"for a while"[..], "it answers unchanged until it expires");
                None
            }
            Some(other) => panic!("a finished entry became {other:?}"),
            None => Some(()),
        }
    })
    .await;
    assert!(asked.elapsed() >= keep, "the record was gone after {:?} of {keep:?}", asked.elapsed());
    let next = claim_next(store, &ask).await;
    assert_eq!(next.attempt, 1, "after its expiry an address starts over");
    assert!(next.fence > lease.fence, "fences grow beyond an entry's life: {} after {}", next.fence, lease.fence);
}

/// A record's ttl counts from the completion, not from the claim.
pub async fn keep_counts_from_completion(store: &dyn Store) {
    let ask = ClaimRequest { lease: LONG_LEASE, ttl: Duration::from_millis(1), ..new_request() };
    let lease = claim_granted(store, &ask).await;
    let keep = Duration::from_millis(400);
    sleep(keep).await;
    let asked = Instant::now();
    settle_applied(store, &lease, &completion(false, &b"answer"[..], keep)).await;
    wait_until_absent(store, &ask).await;
    assert!(asked.elapsed() >= keep, "gone {:?} after completion, kept for {keep:?}", asked.elapsed());
}

pub async fn an_unfinished_entry_is_kept_after_its_lease(store: &dyn Store) {
    let ask = ClaimRequest { lease: SHORT_LEASE, ttl: Duration::from_millis(300), ..new_request() };
    let asked = Instant::now();
    let lease = claim_granted(store, &ask).await;
    wait_until_absent(store, &ask).await;
    let kept = ask.lease + ask.ttl;
    assert!(asked.elapsed() >= kept, "an unfinished entry was gone after {:?} of {kept:?}", asked.elapsed());
    let next = claim_next(store, &ask).await;
    assert!(next.fence > lease.fence, "fences grow beyond an entry's life");
    let ask = new_request();
    claim_and_lapse(store, &ask).await;
    sleep(SHORT_LEASE * 4).await;
    find_outcome_unknown(store, &ask).await;
}

pub async fn a_parked_entry_is_kept_for_its_own_keep(store: &dyn Store) {
    let (ask, lease) = new_claim(store).await;
    let keep = Duration::from_millis(200);
    let asked = Instant::now();
    settle_applied(store, &lease, &Settlement::Park { ttl: keep, retry_in: Duration::ZERO }).await;
    wait_until_absent(store, &ask).await;
    assert!(asked.elapsed() >= keep, "a parked entry was gone after {:?} of {keep:?}", asked.elapsed());
}

pub async fn extend_puts_an_absent_entry_back(store: &dyn Store) {
    let (ask, lease) = new_expired(store).await;
    let answered = extend(store, &lease, LONG_LEASE).await;
    assert_eq!(answered, SettleOutcome::Restored, "extend of an absent entry puts it back");
    let holder = find_in_progress(store, &ask).await;
    assert_eq!((holder.fence, holder.attempt), (lease.fence, lease.attempt), "under its own fence and attempt");
    assert_eq!(holder.fingerprint, ask.fingerprint, "with its fingerprint");
    extend_applied("extend of a restored entry", store, &lease).await;
    complete(store, &lease, b"in the end").await;
    assert_record(store, &ask, b"in the end").await;
}

pub async fn complete_puts_an_absent_entry_back(store: &dyn Store) {
    let (ask, lease) = new_expired(store).await;
    let answered = settle(store, &lease, &complete_settlement(b"after all")).await;
    assert_eq!(answered, SettleOutcome::Restored, "complete of an absent entry puts it back");
    let done = find_completed(store, &ask).await;
    assert_eq!(done.record, &b"after all"[..], "with its record");
    assert_eq!((done.fence, done.attempt), (lease.fence, lease.attempt), "under its own fence and attempt");
    complete(store, &lease, b"after all").await;
}

/// The store lost a holder's entry, and another holder claimed and released it. The first holder's settlement is still
/// applied.
pub async fn a_holder_is_put_back_where_somebody_else_came_and_went(store: &dyn Store) {
    let expired_and_released_by_other = async || {
        let (ask, lease) = new_expired(store).await;
        let other = competing_request(&ask);
        release(store, &claim_granted(store, &other).await).await;
        (ask, lease, other)
    };
    let (ask, lease, other) = expired_and_released_by_other().await;
    let answered = extend(store, &lease, LONG_LEASE).await;
    assert_eq!(answered, SettleOutcome::Restored, "extend puts the holder back");
    assert_eq!(find_in_progress(store, &ask).await.fence, lease.fence);
    expect_token_spent(claim(store, &other).await);

    let (ask, lease, other) = expired_and_released_by_other().await;
    let answered = settle(store, &lease, &complete_settlement(b"it ran")).await;
    assert_eq!(answered, SettleOutcome::Restored, "its answer is remembered");
    // This comes before any read of the answer: a spent token may also receive a cached copy.
    expect_token_spent(claim(store, &other).await);
    assert_record(store, &ask, b"it ran").await;
}

pub async fn fences_grow_after_a_restored_entry(store: &dyn Store) {
    let (ask, lease) = new_expired(store).await;
    let answered = settle(store, &lease, &completion(false, &b"short"[..], SHORT_LEASE)).await;
    assert_eq!(answered, SettleOutcome::Restored, "complete of an absent entry puts it back");
    wait_until_absent(store, &ask).await;
    assert!(claim_next(store, &ask).await.fence > lease.fence, "fences grow beyond a restored entry's life");
}

/// A takeover that is released after its entry expired restores an unknown outcome: it proves nothing about the first
/// holder.
pub async fn a_takeover_released_after_expiry_is_unknown(store: &dyn Store) {
    let (ask, first) = new_parked(store).await;
    let second_ask = ClaimRequest { lease: SHORT_LEASE, ttl: SHORT_LEASE, ..takeover_request(&ask, first.fence) };
    let second = claim_granted(store, &second_ask).await;
    wait_until_absent(store, &ask).await;
    let answered = settle(store, &second, &Settlement::Release).await;
    assert_eq!(answered, SettleOutcome::Restored, "a release of an absent entry leaves its mark");
    find_outcome_unknown(store, &ask).await;
    expect_token_spent(claim(store, &second_ask).await);
}

pub async fn a_release_after_expiry_spends_the_token(store: &dyn Store) {
    let (ask, lease) = new_expired(store).await;
    let answered = settle(store, &lease, &Settlement::Release).await;
    assert_eq!(answered, SettleOutcome::Restored, "a release of an absent entry leaves its mark");
    expect_token_spent(claim(store, &ask).await);
    assert!(claim_next(store, &ask).await.fence > lease.fence, "others may run");
}

/// A lifetime longer than any clock means for ever, not never.
pub async fn endless_lifetimes_do_not_overflow(store: &dyn Store) {
    for endless in [Duration::MAX, Duration::from_micros(u64::MAX), Duration::from_millis(u64::MAX / 2)] {
        let ask = ClaimRequest { lease: endless, ttl: endless, ..new_request() };
        let lease = claim_granted(store, &ask).await;
        find_in_progress(store, &ask).await;
        expect_applied("extend for ever", extend(store, &lease, endless).await);
        find_in_progress(store, &ask).await;
        settle_applied(store, &lease, &Settlement::Park { ttl: endless, retry_in: endless }).await;
        expect_outcome_unknown(claim(store, &takeover_request(&ask, lease.fence)).await);
        settle_applied(store, &lease, &completion(false, &b"for ever"[..], endless)).await;
        find_completed(store, &ask).await;
        let ask = ClaimRequest { ttl: endless, ..new_request() };
        let never_came = Lease { fence: lease.fence, ..unseen_lease(&ask) };
        let answered = extend(store, &never_came, endless).await;
        assert_eq!(answered, SettleOutcome::Restored, "extend of an absent entry puts it back");
        find_in_progress(store, &ask).await;
    }
}

pub async fn fences_strictly_grow_over_a_long_history(store: &dyn Store) {
    let ask = new_request();
    let mut highest = Fence(0);
    let mut attempt = 0;
    for _ in 0..60 {
        let over = match get(store, &ask).await {
            Some(ClaimOutcome::OutcomeUnknown(holder)) => Some(holder.fence),
            _ => None,
        };
        let lease = claim_granted(store, &ClaimRequest { take_over: over, ..competing_request(&ask) }).await;
        assert!(lease.fence > highest, "fence {} after {highest}", lease.fence);
        highest = lease.fence;
        attempt += 1;
        assert_eq!(lease.attempt, attempt, "attempts count up while the address is remembered");
        match ClaimToken::mint().0[0] % 5 {
            0 => release(store, &lease).await,
            1 => park(store, &lease).await,
            2 => {
                complete(store, &lease, b"x").await;
                forget_applied(store, &lease).await;
            }
            3 => {
                // A repeated settlement after a lost answer may find its entry expired, and restore it.
                let answered = settle(store, &lease, &completion(false, &b"x"[..], Duration::from_millis(10))).await;
                assert!(!matches!(answered, SettleOutcome::ClaimLost(_)), "a holder's settle: {answered:?}");
                wait_until_absent(store, &ask).await;
                attempt = 0;
            }
            _ => {
                park(store, &lease).await;
                resolve_applied(store, &lease, &Settlement::Release).await;
            }
        }
    }
}
