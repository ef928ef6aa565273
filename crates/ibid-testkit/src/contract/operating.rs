//! What operators may change: compare-and-set on the fence that they saw. And the sweep.

use std::time::Duration;

use bytes::Bytes;
use ibid::store::{Ask, Claim, End, Fence, Held, Outline, State, Store};

use super::kit::*;

/// An operator who knows the answer ends an unknown entry with it.
pub async fn resolve_as_complete_makes_an_unknown_entry_done(store: &dyn Store) {
    for by_lapse in [true, false] {
        let ask = fresh();
        let lease = if by_lapse { lapsed(store, &ask).await } else { parked(store, &ask).await };
        expect_held("resolve", resolve(store, &ask, lease.fence, &complete(b"as the operator says")).await);
        let done = expect_done(claim(store, &rival(&ask)).await);
        assert_eq!(done.record, &b"as the operator says"[..]);
        assert_eq!((done.fence, done.attempt), (lease.fence, 1), "of the holder that it was about");
        assert_eq!(done.fingerprint, ask.fingerprint, "of the request that was run");
    }
}

/// All answers given for one address are equal: a holder that comes back after its entry was resolved has lost.
pub async fn a_holder_comes_back_too_late_after_resolve_as_complete(store: &dyn Store) {
    let ask = fresh();
    let lease = parked(store, &ask).await;
    expect_held("resolve", resolve(store, &ask, lease.fence, &complete(b"the operator's")).await);
    let found = expect_lost("a complete after resolve", settle(store, &lease, &complete(b"the holder's")).await);
    assert_eq!(expect_done(found).record, &b"the operator's"[..], "it is told what is remembered");
    assert_eq!(expect_done(claim(store, &rival(&ask)).await).record, &b"the operator's"[..]);
}

/// An operator who knows that it never happened frees an unknown entry.
pub async fn resolve_as_release_frees_an_unknown_entry(store: &dyn Store) {
    for by_lapse in [true, false] {
        let ask = fresh();
        let lease = if by_lapse { lapsed(store, &ask).await } else { parked(store, &ask).await };
        expect_held("resolve", resolve(store, &ask, lease.fence, &End::Release).await);
        assert_eq!(get(store, &ask).await, None, "it is free");
        expect_spent(claim(store, &lease.ask).await);
        let _ = expect_lost("a settle after resolve", settle(store, &lease, &complete(b"late")).await);
        let _ = expect_lost("an extend after resolve", answer("extend", store.extend(&lease, LONG).await));
        let next = granted(store, &rival(&ask)).await;
        assert_eq!(next.attempt, 2, "attempts go on");
        assert!(next.fence > lease.fence, "fences only grow");
        let _ = expect_lost("a settle after resolve", settle(store, &lease, &complete(b"late")).await);
    }
}

/// Unlike the holder's own release, an operator's frees a takeover too.
pub async fn resolve_as_release_frees_a_takeover(store: &dyn Store) {
    let ask = fresh();
    let first = parked(store, &ask).await;
    let second = granted(store, &taking_over(&ask, first.fence)).await;
    held(store, &second, &park()).await;
    expect_held("resolve", resolve(store, &ask, second.fence, &End::Release).await);
    assert_eq!(granted(store, &rival(&ask)).await.attempt, 3, "it is free for anybody");
}

/// An operator who parks an entry does not bring its released takeover back to life.
pub async fn a_released_takeover_stays_spent_when_it_is_resolved(store: &dyn Store) {
    for end in [park(), complete_for(b"short", SHORT), End::Park { keep: SHORT, retry_in: Duration::ZERO }] {
        let ask = fresh();
        let first = parked(store, &ask).await;
        let second_ask = taking_over(&ask, first.fence);
        let second = granted(store, &second_ask).await;
        held(store, &second, &End::Release).await;
        let Some(Claim::Unknown(holder)) = get(store, &ask).await else { panic!("a released takeover is unknown") };
        expect_held("resolve", resolve(store, &ask, holder.fence, &end).await);
        let found = claim(store, &second_ask).await;
        assert!(!matches!(found, Claim::Granted(_)), "a spent token must not be granted: {found:?}");
        if end.keep() == SHORT {
            gone(store, &ask).await;
        } else {
            let _ = expect_lost("complete after release", settle(store, &second, &complete(b"late")).await);
        }
        expect_spent(claim(store, &second_ask).await);
    }
}

/// `retry_in` holds off takeovers, not operators.
pub async fn resolve_need_not_wait_for_retry_in(store: &dyn Store) {
    let ask = fresh();
    let lease = granted(store, &ask).await;
    held(store, &lease, &End::Park { keep: LONG, retry_in: LONG }).await;
    expect_held("resolve", resolve(store, &ask, lease.fence, &complete(b"known by now")).await);
    expect_done(claim(store, &rival(&ask)).await);
}

/// Resolve changes neither another holder's entry, nor a live one, nor a finished one, nor what is not there.
pub async fn resolve_is_refused_unless_it_is_unknown_and_seen(store: &dyn Store) {
    let ends = [complete(b"no"), End::Release, park()];
    let ask = fresh();
    for end in &ends {
        let _ = expect_lost("resolve of nothing", resolve(store, &ask, Fence(1), end).await);
        assert_eq!(get(store, &ask).await, None, "nothing was made");
    }
    let lease = granted(store, &ask).await;
    for end in &ends {
        let found = expect_lost("resolve of a live holder", resolve(store, &ask, lease.fence, end).await);
        assert_eq!(expect_busy(found).fence, lease.fence, "it says who runs");
    }
    expect_held("extend", answer("extend", store.extend(&lease, LONG).await));
    held(store, &lease, &park()).await;
    for end in &ends {
        let found = expect_lost("resolve of another", resolve(store, &ask, Fence(lease.fence.0 + 1), end).await);
        assert_eq!(expect_unknown(found).fence, lease.fence, "it says who is there");
    }
    held(store, &lease, &complete(b"kept")).await;
    for end in &ends {
        let found = expect_lost("resolve of a finished entry", resolve(store, &ask, lease.fence, end).await);
        assert_eq!(expect_done(found).record, &b"kept"[..], "it says what is there");
    }
    assert_eq!(expect_done(claim(store, &rival(&ask)).await).record, &b"kept"[..]);
}

/// A running entry may be forgotten: its holder has lost, its token is spent.
pub async fn forget_takes_a_running_entry_from_its_holder(store: &dyn Store) {
    let ask = fresh();
    let lease = granted(store, &ask).await;
    expect_held("forget", forget(store, &ask, lease.fence).await);
    assert_eq!(get(store, &ask).await, None, "it is forgotten");
    expect_spent(claim(store, &ask).await);
    let _ = expect_lost("complete after forget", settle(store, &lease, &complete(b"late")).await);
    let _ = expect_lost("extend after forget", answer("extend", store.extend(&lease, LONG).await));
    assert_eq!(get(store, &ask).await, None, "neither brought it back");
    let next = granted(store, &rival(&ask)).await;
    assert!(next.fence > lease.fence, "fences only grow");
    let _ = expect_lost("complete after forget", settle(store, &lease, &complete(b"late")).await);
    expect_busy(claim(store, &rival(&ask)).await);
}

/// A finished, unknown or lapsed entry may be forgotten: the next claim is granted.
pub async fn forget_works_in_every_state(store: &dyn Store) {
    for state in [State::Done, State::Failed, State::Unknown, State::Processing] {
        let ask = fresh();
        let lease = match state {
            State::Processing => lapsed(store, &ask).await,
            State::Unknown => parked(store, &ask).await,
            State::Done | State::Failed => {
                let lease = granted(store, &ask).await;
                let (failed, record) = (state == State::Failed, Bytes::from_static(b"to be forgotten"));
                held(store, &lease, &End::Complete { failed, record, outline: Outline::default(), keep: LONG }).await;
                lease
            }
        };
        expect_held("forget", forget(store, &ask, lease.fence).await);
        assert_eq!(get(store, &ask).await, None, "forgotten");
        expect_spent(claim(store, &lease.ask).await);
        let _ = expect_lost("complete after forget", settle(store, &lease, &complete(b"late")).await);
        let next = granted(store, &rival(&ask)).await;
        assert!(next.fence > lease.fence, "fences only grow");
        // An answer may be empty, also where others were before.
        held(store, &next, &complete(b"")).await;
        assert_eq!(expect_done(claim(store, &rival(&ask)).await).record, "", "an empty record");
    }
}

/// Forget is a compare-and-set: a wrong fence changes nothing and says what is there.
pub async fn forget_with_a_wrong_fence_is_lost(store: &dyn Store) {
    let ask = fresh();
    let _ = expect_lost("forget of nothing", forget(store, &ask, Fence(1)).await);
    let lease = granted(store, &ask).await;
    let wrong = Fence(lease.fence.0 + 1);
    for wrong in [wrong, Fence::UNSEEN] {
        assert_eq!(expect_busy(expect_lost("forget", forget(store, &ask, wrong).await)).fence, lease.fence);
    }
    held(store, &lease, &park()).await;
    assert_eq!(expect_unknown(expect_lost("forget", forget(store, &ask, wrong).await)).fence, lease.fence);
    held(store, &lease, &complete(b"kept")).await;
    assert_eq!(expect_done(expect_lost("forget", forget(store, &ask, wrong).await)).record, &b"kept"[..]);
    expect_done(claim(store, &rival(&ask)).await);
}

/// Replace swaps the bytes of a record; everything else about it stays.
pub async fn replace_swaps_bytes_and_keeps_life(store: &dyn Store) {
    let ask = fresh();
    let lease = granted(store, &ask).await;
    let outline = Outline { status: 200, requested_at_ms: 1, completed_at_ms: 2, took: Duration::from_millis(1) };
    let keep = Duration::from_secs(100);
    let end = End::Complete { failed: true, record: Bytes::from_static(b"before"), outline, keep };
    held(store, &lease, &end).await;
    let before = expect_done(claim(store, &rival(&ask)).await);
    expect_held("replace", replace(store, &ask, lease.fence, b"after, and longer").await);
    expect_held("replace, repeated", replace(store, &ask, lease.fence, b"after, and longer").await);
    let after = expect_done(claim(store, &rival(&ask)).await);
    assert_eq!(after.record, &b"after, and longer"[..], "the new bytes");
    // Copies of an answer count from before they were asked for, so that one may seem to live a little shorter.
    assert!(after.expires_in <= before.expires_in + PATIENCE, "its life goes on: {:?}", after.expires_in);
    assert!(after.expires_in + PATIENCE * 2 > keep, "its life goes on: {:?}", after.expires_in);
    let rest = |done: ibid::store::Finished| (done.fence, done.attempt, done.fingerprint, done.failed);
    assert_eq!(rest(after), rest(before), "nothing else changed");
    let seen = listed(store, &ask).await;
    assert_eq!((seen.state, seen.outline), (State::Failed, Some(outline)), "state and outline stay");
}

/// Only the finished entry that was seen has bytes to replace.
pub async fn replace_of_anything_else_is_lost(store: &dyn Store) {
    let ask = fresh();
    let _ = expect_lost("replace of nothing", replace(store, &ask, Fence(1), b"no").await);
    let lease = granted(store, &ask).await;
    expect_busy(expect_lost("replace", replace(store, &ask, lease.fence, b"no").await));
    held(store, &lease, &park()).await;
    expect_unknown(expect_lost("replace", replace(store, &ask, lease.fence, b"no").await));
    held(store, &lease, &complete(b"kept")).await;
    let wrong = Fence(lease.fence.0 + 1);
    expect_done(expect_lost("replace", replace(store, &ask, wrong, b"no").await));
    assert_eq!(expect_done(claim(store, &rival(&ask)).await).record, &b"kept"[..], "nothing was written");
}

/// A sweep removes what has expired and nothing else, at most as many as it was told.
pub async fn sweep_removes_only_what_has_expired(store: &dyn Store) {
    let running = fresh();
    let lease = granted(store, &running).await;
    let done = fresh();
    held(store, &granted(store, &done).await, &complete(b"kept")).await;
    let unknown = fresh();
    parked(store, &unknown).await;
    let kept_on = fresh();
    lapsed(store, &kept_on).await;
    let released = fresh();
    held(store, &granted(store, &released).await, &End::Release).await;
    for _ in 0..20 {
        let short = Ask { hold: SHORT, keep: SHORT, ..fresh() };
        granted(store, &short).await;
    }
    // Stores may look for what has expired once a second only.
    tokio::time::sleep(Duration::from_millis(1200)).await;
    for at_most in [0, 1, 3, 1000] {
        let swept = answer("sweep", store.sweep(at_most).await);
        assert!(swept.removed <= at_most, "a sweep of at most {at_most} removed {}", swept.removed);
    }
    until("a sweep to find nothing more", || async { (!answer("sweep", store.sweep(1000).await).more).then_some(()) })
        .await;
    expect_busy(claim(store, &rival(&running)).await);
    assert_eq!(expect_done(claim(store, &rival(&done)).await).record, &b"kept"[..]);
    expect_unknown(claim(store, &rival(&unknown)).await);
    expect_unknown(claim(store, &rival(&kept_on)).await);
    expect_spent(claim(store, &released).await);
    held(store, &lease, &complete(b"still the holder")).await;
}

/// On a store of its own: sweeps remove every expired entry, count each once, and say when more are waiting.
///
/// # Panics
/// If the store, on which nobody else may work, counts otherwise.
pub async fn sweeps_count_what_they_remove(store: &dyn Store) {
    const EXPIRED: u32 = 10;
    for _ in 0..EXPIRED {
        granted(store, &Ask { hold: SHORT, keep: SHORT, ..fresh() }).await;
    }
    let kept = fresh();
    granted(store, &kept).await;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let first = answer("sweep", store.sweep(4).await);
    assert_eq!((first.removed, first.more), (4, true), "four of ten, and more are waiting");
    let second = answer("sweep", store.sweep(6).await);
    assert_eq!((second.removed, second.more), (6, false), "the other six, and no more");
    let third = answer("sweep", store.sweep(100).await);
    assert_eq!((third.removed, third.more), (0, false), "nothing is left to remove");
    assert!(matches!(get(store, &kept).await, Some(Claim::Busy(_))), "what lives stays");
}

async fn resolve(store: &dyn Store, at: &Ask, seen: Fence, end: &End) -> Held {
    answer("resolve", store.operators().resolve(&at.address, seen, end).await)
}

async fn forget(store: &dyn Store, at: &Ask, seen: Fence) -> Held {
    answer("forget", store.operators().forget(&at.address, seen).await)
}

async fn replace(store: &dyn Store, at: &Ask, seen: Fence, record: &'static [u8]) -> Held {
    answer("replace", store.operators().replace(&at.address, seen, Bytes::from_static(record)).await)
}
