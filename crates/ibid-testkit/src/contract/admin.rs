//! Changes by operators, which are compare-and-set on the fence that they read; and the sweep.

use std::time::Duration;

use bytes::Bytes;
use ibid::store::{ClaimOutcome, ClaimRequest, EntryState, Fence, RecordSummary, SettleOutcome, Settlement, Store};

use super::common::*;

/// Resolving an entry with unknown outcome as complete records the answer.
pub async fn resolve_as_complete_makes_an_unknown_entry_done(store: &dyn Store) {
    for by_lapse in [true, false] {
        let ask = new_request();
        let lease = if by_lapse { claim_and_lapse(store, &ask).await } else { claim_and_park(store, &ask).await };
        expect_applied(
            "resolve",
            resolve(store, &ask, lease.fence, &complete_settlement(b"as the operator says")).await,
        );
        let done = expect_completed(claim(store, &competing_request(&ask)).await);
        assert_eq!(done.record, &b"as the operator says"[..]);
        assert_eq!((done.fence, done.attempt), (lease.fence, 1), "of the holder that it was about");
        assert_eq!(done.fingerprint, ask.fingerprint, "of the request that was run");
    }
}

/// All answers for one address are equal: a holder that returns after its entry was resolved has lost it.
pub async fn a_holder_comes_back_too_late_after_resolve_as_complete(store: &dyn Store) {
    let ask = new_request();
    let lease = claim_and_park(store, &ask).await;
    expect_applied("resolve", resolve(store, &ask, lease.fence, &complete_settlement(b"the operator's")).await);
    let found = expect_claim_lost(
        "a complete after resolve",
        settle(store, &lease, &complete_settlement(b"the holder's")).await,
    );
    assert_eq!(expect_completed(found).record, &b"the operator's"[..], "it is told what is remembered");
    assert_eq!(expect_completed(claim(store, &competing_request(&ask)).await).record, &b"the operator's"[..]);
}

/// Resolving an entry with unknown outcome as released frees it.
pub async fn resolve_as_release_frees_an_unknown_entry(store: &dyn Store) {
    for by_lapse in [true, false] {
        let ask = new_request();
        let lease = if by_lapse { claim_and_lapse(store, &ask).await } else { claim_and_park(store, &ask).await };
        expect_applied("resolve", resolve(store, &ask, lease.fence, &Settlement::Release).await);
        assert_eq!(get(store, &ask).await, None, "it is free");
        expect_token_spent(claim(store, &lease.request).await);
        let _ = expect_claim_lost("a settle after resolve", settle(store, &lease, &complete_settlement(b"late")).await);
        let _ = expect_claim_lost(
            "an extend after resolve",
            expect_answer("extend", store.extend(&lease, LONG_LEASE).await),
        );
        let next = claim_granted(store, &competing_request(&ask)).await;
        assert_eq!(next.attempt, 2, "attempts go on");
        assert!(next.fence > lease.fence, "fences only grow");
        let _ = expect_claim_lost("a settle after resolve", settle(store, &lease, &complete_settlement(b"late")).await);
    }
}

/// Unlike the holder's own release, an operator's release frees a takeover too.
pub async fn resolve_as_release_frees_a_takeover(store: &dyn Store) {
    let ask = new_request();
    let first = claim_and_park(store, &ask).await;
    let second = claim_granted(store, &takeover_request(&ask, first.fence)).await;
    settle_applied(store, &second, &park_settlement()).await;
    expect_applied("resolve", resolve(store, &ask, second.fence, &Settlement::Release).await);
    assert_eq!(claim_granted(store, &competing_request(&ask)).await.attempt, 3, "it is free for anybody");
}

/// An operator that parks an entry does not revive its released takeover.
pub async fn a_released_takeover_stays_spent_when_it_is_resolved(store: &dyn Store) {
    for end in [
        park_settlement(),
        complete_settlement_for(b"short", SHORT_LEASE),
        Settlement::Park { ttl: SHORT_LEASE, retry_in: Duration::ZERO },
    ] {
        let ask = new_request();
        let first = claim_and_park(store, &ask).await;
        let second_ask = takeover_request(&ask, first.fence);
        let second = claim_granted(store, &second_ask).await;
        settle_applied(store, &second, &Settlement::Release).await;
        let Some(ClaimOutcome::OutcomeUnknown(holder)) = get(store, &ask).await else {
            panic!("a released takeover is unknown")
        };
        expect_applied("resolve", resolve(store, &ask, holder.fence, &end).await);
        let found = claim(store, &second_ask).await;
        assert!(!matches!(found, ClaimOutcome::Granted(_)), "a spent token must not be granted: {found:?}");
        if end.ttl() == SHORT_LEASE {
            wait_until_absent(store, &ask).await;
        } else {
            let _ = expect_claim_lost(
                "complete after release",
                settle(store, &second, &complete_settlement(b"late")).await,
            );
        }
        expect_token_spent(claim(store, &second_ask).await);
    }
}

/// `retry_in` delays takeovers, not operators.
pub async fn resolve_need_not_wait_for_retry_in(store: &dyn Store) {
    let ask = new_request();
    let lease = claim_granted(store, &ask).await;
    settle_applied(store, &lease, &Settlement::Park { ttl: LONG_LEASE, retry_in: LONG_LEASE }).await;
    expect_applied("resolve", resolve(store, &ask, lease.fence, &complete_settlement(b"known by now")).await);
    expect_completed(claim(store, &competing_request(&ask)).await);
}

/// Resolve changes no entry that has another holder, is in progress, is completed or is absent.
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
    expect_applied("extend", expect_answer("extend", store.extend(&lease, LONG_LEASE).await));
    settle_applied(store, &lease, &park_settlement()).await;
    for end in &ends {
        let found = expect_claim_lost("resolve of another", resolve(store, &ask, Fence(lease.fence.0 + 1), end).await);
        assert_eq!(expect_outcome_unknown(found).fence, lease.fence, "it says who is there");
    }
    settle_applied(store, &lease, &complete_settlement(b"kept")).await;
    for end in &ends {
        let found = expect_claim_lost("resolve of a finished entry", resolve(store, &ask, lease.fence, end).await);
        assert_eq!(expect_completed(found).record, &b"kept"[..], "it says what is there");
    }
    assert_eq!(expect_completed(claim(store, &competing_request(&ask)).await).record, &b"kept"[..]);
}

/// Forgetting an entry in progress takes it from its holder and spends the holder's token.
pub async fn forget_takes_a_running_entry_from_its_holder(store: &dyn Store) {
    let ask = new_request();
    let lease = claim_granted(store, &ask).await;
    expect_applied("forget", forget(store, &ask, lease.fence).await);
    assert_eq!(get(store, &ask).await, None, "it is forgotten");
    expect_token_spent(claim(store, &ask).await);
    let _ = expect_claim_lost("complete after forget", settle(store, &lease, &complete_settlement(b"late")).await);
    let _ = expect_claim_lost("extend after forget", expect_answer("extend", store.extend(&lease, LONG_LEASE).await));
    assert_eq!(get(store, &ask).await, None, "neither brought it back");
    let next = claim_granted(store, &competing_request(&ask)).await;
    assert!(next.fence > lease.fence, "fences only grow");
    let _ = expect_claim_lost("complete after forget", settle(store, &lease, &complete_settlement(b"late")).await);
    expect_in_progress(claim(store, &competing_request(&ask)).await);
}

/// An entry that is completed, parked or has an expired lease can be forgotten; the next claim is granted.
pub async fn forget_works_in_every_state(store: &dyn Store) {
    for state in [EntryState::Done, EntryState::Failed, EntryState::Unknown, EntryState::Processing] {
        let ask = new_request();
        let lease = match state {
            EntryState::Processing => claim_and_lapse(store, &ask).await,
            EntryState::Unknown => claim_and_park(store, &ask).await,
            EntryState::Done | EntryState::Failed => {
                let lease = claim_granted(store, &ask).await;
                let (failed, record) = (state == EntryState::Failed, Bytes::from_static(b"to be forgotten"));
                settle_applied(
                    store,
                    &lease,
                    &Settlement::Complete { failed, record, summary: RecordSummary::default(), ttl: LONG_LEASE },
                )
                .await;
                lease
            }
        };
        expect_applied("forget", forget(store, &ask, lease.fence).await);
        assert_eq!(get(store, &ask).await, None, "forgotten");
        expect_token_spent(claim(store, &lease.request).await);
        let _ = expect_claim_lost("complete after forget", settle(store, &lease, &complete_settlement(b"late")).await);
        let next = claim_granted(store, &competing_request(&ask)).await;
        assert!(next.fence > lease.fence, "fences only grow");
        // A record may be empty, also where a longer one was before.
        settle_applied(store, &next, &complete_settlement(b"")).await;
        assert_eq!(expect_completed(claim(store, &competing_request(&ask)).await).record, "", "an empty record");
    }
}

/// Forget is a compare-and-set: a wrong fence changes nothing and returns the current state.
pub async fn forget_with_a_wrong_fence_is_lost(store: &dyn Store) {
    let ask = new_request();
    let _ = expect_claim_lost("forget of nothing", forget(store, &ask, Fence(1)).await);
    let lease = claim_granted(store, &ask).await;
    let wrong = Fence(lease.fence.0 + 1);
    for wrong in [wrong, Fence::UNSEEN] {
        assert_eq!(
            expect_in_progress(expect_claim_lost("forget", forget(store, &ask, wrong).await)).fence,
            lease.fence
        );
    }
    settle_applied(store, &lease, &park_settlement()).await;
    assert_eq!(
        expect_outcome_unknown(expect_claim_lost("forget", forget(store, &ask, wrong).await)).fence,
        lease.fence
    );
    settle_applied(store, &lease, &complete_settlement(b"kept")).await;
    assert_eq!(expect_completed(expect_claim_lost("forget", forget(store, &ask, wrong).await)).record, &b"kept"[..]);
    expect_completed(claim(store, &competing_request(&ask)).await);
}

/// Replace changes only the bytes of a record.
pub async fn replace_swaps_bytes_and_keeps_life(store: &dyn Store) {
    let ask = new_request();
    let lease = claim_granted(store, &ask).await;
    let outline = RecordSummary { status: 200, requested_at_ms: 1, completed_at_ms: 2, took: Duration::from_millis(1) };
    let keep = Duration::from_secs(100);
    let end = Settlement::Complete { failed: true, record: Bytes::from_static(b"before"), summary: outline, ttl: keep };
    settle_applied(store, &lease, &end).await;
    let before = expect_completed(claim(store, &competing_request(&ask)).await);
    expect_applied("replace", replace(store, &ask, lease.fence, b"after, and longer").await);
    expect_applied("replace, repeated", replace(store, &ask, lease.fence, b"after, and longer").await);
    let after = expect_completed(claim(store, &competing_request(&ask)).await);
    assert_eq!(after.record, &b"after, and longer"[..], "the new bytes");
    // A cached copy counts its age from before the read, so its remaining ttl may be slightly shorter.
    assert!(after.expires_in <= before.expires_in + POLL_TIMEOUT, "its life goes on: {:?}", after.expires_in);
    assert!(after.expires_in + POLL_TIMEOUT * 2 > keep, "its life goes on: {:?}", after.expires_in);
    let rest = |done: ibid::store::CompletedEntry| (done.fence, done.attempt, done.fingerprint, done.failed);
    assert_eq!(rest(after), rest(before), "nothing else changed");
    let seen = find_listed(store, &ask).await;
    assert_eq!((seen.state, seen.summary), (EntryState::Failed, Some(outline)), "state and outline stay");
}

/// Replace changes only the completed entry that was read.
pub async fn replace_of_anything_else_is_lost(store: &dyn Store) {
    let ask = new_request();
    let _ = expect_claim_lost("replace of nothing", replace(store, &ask, Fence(1), b"no").await);
    let lease = claim_granted(store, &ask).await;
    expect_in_progress(expect_claim_lost("replace", replace(store, &ask, lease.fence, b"no").await));
    settle_applied(store, &lease, &park_settlement()).await;
    expect_outcome_unknown(expect_claim_lost("replace", replace(store, &ask, lease.fence, b"no").await));
    settle_applied(store, &lease, &complete_settlement(b"kept")).await;
    let wrong = Fence(lease.fence.0 + 1);
    expect_completed(expect_claim_lost("replace", replace(store, &ask, wrong, b"no").await));
    assert_eq!(
        expect_completed(claim(store, &competing_request(&ask)).await).record,
        &b"kept"[..],
        "nothing was written"
    );
}

/// A sweep removes only expired entries, and at most the given number.
pub async fn sweep_removes_only_what_has_expired(store: &dyn Store) {
    let running = new_request();
    let lease = claim_granted(store, &running).await;
    let done = new_request();
    settle_applied(store, &claim_granted(store, &done).await, &complete_settlement(b"kept")).await;
    let unknown = new_request();
    claim_and_park(store, &unknown).await;
    let kept_on = new_request();
    claim_and_lapse(store, &kept_on).await;
    let released = new_request();
    settle_applied(store, &claim_granted(store, &released).await, &Settlement::Release).await;
    for _ in 0..20 {
        let short = ClaimRequest { lease: SHORT_LEASE, ttl: SHORT_LEASE, ..new_request() };
        claim_granted(store, &short).await;
    }
    // Stores may look for expired entries only once a second.
    tokio::time::sleep(Duration::from_millis(1200)).await;
    for at_most in [0, 1, 3, 1000] {
        let swept = expect_answer("sweep", store.sweep(at_most).await);
        assert!(swept.removed <= at_most, "a sweep of at most {at_most} removed {}", swept.removed);
    }
    poll_until("a sweep to find nothing more", || async {
        (!expect_answer("sweep", store.sweep(1000).await).more).then_some(())
    })
    .await;
    expect_in_progress(claim(store, &competing_request(&running)).await);
    assert_eq!(expect_completed(claim(store, &competing_request(&done)).await).record, &b"kept"[..]);
    expect_outcome_unknown(claim(store, &competing_request(&unknown)).await);
    expect_outcome_unknown(claim(store, &competing_request(&kept_on)).await);
    expect_token_spent(claim(store, &released).await);
    settle_applied(store, &lease, &complete_settlement(b"still the holder")).await;
}

/// On a store of its own: sweeps remove every expired entry, count each once, and report whether more are left.
///
/// # Panics
/// If the counts differ. Nobody else may use the store.
pub async fn sweeps_count_what_they_remove(store: &dyn Store) {
    const EXPIRED_ENTRIES: u32 = 10;
    for _ in 0..EXPIRED_ENTRIES {
        claim_granted(store, &ClaimRequest { lease: SHORT_LEASE, ttl: SHORT_LEASE, ..new_request() }).await;
    }
    let kept = new_request();
    claim_granted(store, &kept).await;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let first = expect_answer("sweep", store.sweep(4).await);
    assert_eq!((first.removed, first.more), (4, true), "four of ten, and more are waiting");
    let second = expect_answer("sweep", store.sweep(6).await);
    assert_eq!((second.removed, second.more), (6, false), "the other six, and no more");
    let third = expect_answer("sweep", store.sweep(100).await);
    assert_eq!((third.removed, third.more), (0, false), "nothing is left to remove");
    assert!(matches!(get(store, &kept).await, Some(ClaimOutcome::InProgress(_))), "what lives stays");
}

async fn resolve(store: &dyn Store, at: &ClaimRequest, seen: Fence, end: &Settlement) -> SettleOutcome {
    expect_answer("resolve", store.admin().resolve(&at.address, seen, end).await)
}

async fn forget(store: &dyn Store, at: &ClaimRequest, seen: Fence) -> SettleOutcome {
    expect_answer("forget", store.admin().forget(&at.address, seen).await)
}

async fn replace(store: &dyn Store, at: &ClaimRequest, seen: Fence, record: &'static [u8]) -> SettleOutcome {
    expect_answer("replace", store.admin().replace_record(&at.address, seen, Bytes::from_static(record)).await)
}
