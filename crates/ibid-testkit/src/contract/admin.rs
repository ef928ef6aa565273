//! Changes by operators, which are compare-and-set on the fence that they read; and the sweep.

use super::common::*;

pub async fn resolve_as_complete_makes_an_unknown_entry_done(store: &dyn Store) {
    for by_lapse in [true, false] {
        let (ask, lease) = if by_lapse { new_lapsed(store).await } else { new_parked(store).await };
        resolve_applied(store, &lease, &complete_settlement(b"as the operator says")).await;
        let done = find_completed(store, &ask).await;
        assert_eq!(done.record, &b"as the operator says"[..]);
        assert_eq!((done.fence, done.attempt), (lease.fence, 1), "of the holder that it was about");
        assert_eq!(done.fingerprint, ask.fingerprint, "of the request that was run");
    }
}

/// All answers for one address are equal: a holder that returns after its entry was resolved has lost it.
pub async fn a_holder_comes_back_too_late_after_resolve_as_complete(store: &dyn Store) {
    let (ask, lease) = new_parked(store).await;
    resolve_applied(store, &lease, &complete_settlement(b"the operator's")).await;
    let found = settle_lost("a complete after resolve", store, &lease, &complete_settlement(b"the holder's")).await;
    assert_eq!(expect_completed(found).record, &b"the operator's"[..], "it is told what is remembered");
    assert_record(store, &ask, b"the operator's").await;
}

pub async fn resolve_as_release_frees_an_unknown_entry(store: &dyn Store) {
    for by_lapse in [true, false] {
        let (ask, lease) = if by_lapse { new_lapsed(store).await } else { new_parked(store).await };
        resolve_applied(store, &lease, &Settlement::Release).await;
        assert_eq!(get(store, &ask).await, None, "it is free");
        expect_token_spent(claim(store, &lease.request).await);
        let _ = settle_lost("a settle after resolve", store, &lease, &complete_settlement(b"late")).await;
        let _ = extend_lost("an extend after resolve", store, &lease).await;
        let next = claim_next(store, &ask).await;
        assert_eq!(next.attempt, 2, "attempts go on");
        assert!(next.fence > lease.fence, "fences only grow");
        let _ = settle_lost("a settle after resolve", store, &lease, &complete_settlement(b"late")).await;
    }
}

/// Unlike the holder's own release, an operator's release frees a takeover too.
pub async fn resolve_as_release_frees_a_takeover(store: &dyn Store) {
    let (ask, first) = new_parked(store).await;
    let second = take_over(store, &ask, first.fence).await;
    park(store, &second).await;
    resolve_applied(store, &second, &Settlement::Release).await;
    assert_eq!(claim_next(store, &ask).await.attempt, 3, "it is free for anybody");
}

pub async fn a_released_takeover_stays_spent_when_it_is_resolved(store: &dyn Store) {
    for end in [
        park_settlement(),
        completion(false, &b"short"[..], SHORT_LEASE),
        Settlement::Park { ttl: SHORT_LEASE, retry_in: Duration::ZERO },
    ] {
        let (ask, first) = new_parked(store).await;
        let second_ask = takeover_request(&ask, first.fence);
        let second = claim_granted(store, &second_ask).await;
        release(store, &second).await;
        let holder = expect_outcome_unknown(get(store, &ask).await.expect("a released takeover is unknown"));
        expect_applied("resolve", resolve(store, &ask, holder.fence, &end).await);
        let found = claim(store, &second_ask).await;
        assert!(!matches!(found, ClaimOutcome::Granted(_)), "a spent token must not be granted: {found:?}");
        if end.ttl() == SHORT_LEASE {
            wait_until_absent(store, &ask).await;
        } else {
            let _ = settle_lost("complete after release", store, &second, &complete_settlement(b"late")).await;
        }
        expect_token_spent(claim(store, &second_ask).await);
    }
}

/// `retry_in` delays takeovers, not operators.
pub async fn resolve_need_not_wait_for_retry_in(store: &dyn Store) {
    let (ask, lease) = new_claim(store).await;
    settle_applied(store, &lease, &Settlement::Park { ttl: LONG_LEASE, retry_in: LONG_LEASE }).await;
    resolve_applied(store, &lease, &complete_settlement(b"known by now")).await;
    find_completed(store, &ask).await;
}

pub async fn resolve_is_refused_unless_it_is_unknown_and_seen(store: &dyn Store) {
    let ends = [complete_settlement(b"no"), Settlement::Release, park_settlement()];
    let ask = new_request();
    for end in &ends {
        let _ = expect_claim_lost("resolve of nothing", resolve(store, &ask, Fence(1), end).await);
        assert_eq!(get(store, &ask).await, None, "nothing was made");
    }
    let lease = claim_granted(store, &ask).await;
    for end in &ends {
        let found = expect_claim_lost("resolve of a live holder", resolve(store, &ask, lease.fence, end).await);
        assert_eq!(expect_in_progress(found).fence, lease.fence, "it says who runs");
    }
    extend_applied("extend", store, &lease).await;
    park(store, &lease).await;
    for end in &ends {
        let found = expect_claim_lost("resolve of another", resolve(store, &ask, Fence(lease.fence.0 + 1), end).await);
        assert_eq!(expect_outcome_unknown(found).fence, lease.fence, "it says who is there");
    }
    complete(store, &lease, b"kept").await;
    for end in &ends {
        let found = expect_claim_lost("resolve of a finished entry", resolve(store, &ask, lease.fence, end).await);
        assert_eq!(expect_completed(found).record, &b"kept"[..], "it says what is there");
    }
    assert_record(store, &ask, b"kept").await;
}

pub async fn forget_takes_a_running_entry_from_its_holder(store: &dyn Store) {
    let (ask, lease) = new_claim(store).await;
    forget_applied(store, &lease).await;
    assert_eq!(get(store, &ask).await, None, "it is forgotten");
    expect_token_spent(claim(store, &ask).await);
    let _ = settle_lost("complete after forget", store, &lease, &complete_settlement(b"late")).await;
    let _ = extend_lost("extend after forget", store, &lease).await;
    assert_eq!(get(store, &ask).await, None, "neither brought it back");
    let next = claim_next(store, &ask).await;
    assert!(next.fence > lease.fence, "fences only grow");
    let _ = settle_lost("complete after forget", store, &lease, &complete_settlement(b"late")).await;
    find_in_progress(store, &ask).await;
}

pub async fn forget_works_in_every_state(store: &dyn Store) {
    for state in [EntryState::Done, EntryState::Failed, EntryState::Unknown, EntryState::Processing] {
        let (ask, lease) = match state {
            EntryState::Processing => new_lapsed(store).await,
            EntryState::Unknown => new_parked(store).await,
            EntryState::Done | EntryState::Failed => {
                let (ask, lease) = new_claim(store).await;
                let end = completion(state == EntryState::Failed, "to be forgotten", LONG_LEASE);
                settle_applied(store, &lease, &end).await;
                (ask, lease)
            }
        };
        forget_applied(store, &lease).await;
        assert_eq!(get(store, &ask).await, None, "forgotten");
        expect_token_spent(claim(store, &lease.request).await);
        let _ = settle_lost("complete after forget", store, &lease, &complete_settlement(b"late")).await;
        let next = claim_next(store, &ask).await;
        assert!(next.fence > lease.fence, "fences only grow");
        // A record may be empty, also where a longer one was before.
        complete(store, &next, b"").await;
        assert_eq!(find_completed(store, &ask).await.record, "", "an empty record");
    }
}

/// Forget is a compare-and-set: a wrong fence changes nothing and returns the current state.
pub async fn forget_with_a_wrong_fence_is_lost(store: &dyn Store) {
    let ask = new_request();
    let _ = expect_claim_lost("forget of nothing", forget(store, &ask, Fence(1)).await);
    let lease = claim_granted(store, &ask).await;
    let wrong = Fence(lease.fence.0 + 1);
    let found = async |wrong| expect_claim_lost("forget", forget(store, &ask, wrong).await);
    for wrong in [wrong, Fence::UNSEEN] {
        assert_eq!(expect_in_progress(found(wrong).await).fence, lease.fence);
    }
    park(store, &lease).await;
    assert_eq!(expect_outcome_unknown(found(wrong).await).fence, lease.fence);
    complete(store, &lease, b"kept").await;
    assert_eq!(expect_completed(found(wrong).await).record, &b"kept"[..]);
    find_completed(store, &ask).await;
}

pub async fn replace_swaps_bytes_and_keeps_life(store: &dyn Store) {
    let (ask, lease) = new_claim(store).await;
    let outline = RecordSummary { status: 200, requested_at_ms: 1, completed_at_ms: 2, took: Duration::from_millis(1) };
    let keep = Duration::from_secs(100);
    let end = Settlement::Complete { failed: true, record: Bytes::from_static(b"before"), summary: outline, ttl: keep };
    settle_applied(store, &lease, &end).await;
    let before = find_completed(store, &ask).await;
    expect_applied("replace", replace(store, &ask, lease.fence, b"after, and longer").await);
    expect_applied("replace, repeated", replace(store, &ask, lease.fence, b"after, and longer").await);
    let after = find_completed(store, &ask).await;
    assert_eq!(after.record, &b"after, and longer"[..], "the new bytes");
    // A cached copy counts its age from before the read, so its remaining ttl may be slightly shorter.
    assert!(after.expires_in <= before.expires_in + POLL_TIMEOUT, "its life goes on: {:?}", after.expires_in);
    assert!(after.expires_in + POLL_TIMEOUT * 2 > keep, "its life goes on: {:?}", after.expires_in);
    let rest = |done: CompletedEntry| (done.fence, done.attempt, done.fingerprint, done.failed);
    assert_eq!(rest(after), rest(before), "nothing else changed");
    let seen = find_listed(store, &ask).await;
    assert_eq!((seen.state, seen.summary), (EntryState::Failed, Some(outline)), "state and outline stay");
}

pub async fn replace_of_anything_else_is_lost(store: &dyn Store) {
    let ask = new_request();
    let _ = expect_claim_lost("replace of nothing", replace(store, &ask, Fence(1), b"no").await);
    let lease = claim_granted(store, &ask).await;
    expect_in_progress(expect_claim_lost("replace", replace(store, &ask, lease.fence, b"no").await));
    park(store, &lease).await;
    expect_outcome_unknown(expect_claim_lost("replace", replace(store, &ask, lease.fence, b"no").await));
    complete(store, &lease, b"kept").await;
    let wrong = Fence(lease.fence.0 + 1);
    expect_completed(expect_claim_lost("replace", replace(store, &ask, wrong, b"no").await));
    assert_record(store, &ask, b"kept").await;
}

pub async fn sweep_removes_only_what_has_expired(store: &dyn Store) {
    let (running, lease) = new_claim(store).await;
    let done = new_request();
    complete(store, &claim_granted(store, &done).await, b"kept").await;
    let (unknown, _) = new_parked(store).await;
    let (kept_on, _) = new_lapsed(store).await;
    let released = new_request();
    release(store, &claim_granted(store, &released).await).await;
    for _ in 0..20 {
        claim_granted(store, &short_request()).await;
    }
    // Stores may look for expired entries only once a second.
    sleep(Duration::from_millis(1200)).await;
    for at_most in [0, 1, 3, 1000] {
        let swept = expect_answer("sweep", store.sweep(at_most).await);
        assert!(swept.removed <= at_most, "a sweep of at most {at_most} removed {}", swept.removed);
    }
    poll_until("a sweep to find nothing more", || async {
        (!expect_answer("sweep", store.sweep(1000).await).more).then_some(())
    })
    .await;
    find_in_progress(store, &running).await;
    assert_record(store, &done, b"kept").await;
    find_outcome_unknown(store, &unknown).await;
    find_outcome_unknown(store, &kept_on).await;
    expect_token_spent(claim(store, &released).await);
    complete(store, &lease, b"still the holder").await;
}

/// On a store of its own: sweeps remove every expired entry, count each once, and report whether more are left.
///
/// # Panics
/// If the counts differ. Nobody else may use the store.
pub async fn sweeps_count_what_they_remove(store: &dyn Store) {
    const EXPIRED_ENTRIES: u32 = 10;
    for _ in 0..EXPIRED_ENTRIES {
        claim_granted(store, &short_request()).await;
    }
    let (kept, _) = new_claim(store).await;
    sleep(Duration::from_millis(1500)).await;
    let first = expect_answer("sweep", store.sweep(4).await);
    assert_eq!((first.removed, first.more), (4, true), "four of ten, and more are waiting");
    let second = expect_answer("sweep", store.sweep(6).await);
    assert_eq!((second.removed, second.more), (6, false), "the other six, and no more");
    let third = expect_answer("sweep", store.sweep(100).await);
    assert_eq!((third.removed, third.more), (0, false), "nothing is left to remove");
    assert!(matches!(get(store, &kept).await, Some(ClaimOutcome::InProgress(_))), "what lives stays");
}

async fn replace(store: &dyn Store, at: &ClaimRequest, seen: Fence, record: &'static [u8]) -> SettleOutcome {
    expect_answer("replace", store.admin().replace_record(&at.address, seen, Bytes::from_static(record)).await)
}
