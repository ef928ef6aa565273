//! Two gateways and a solo claim between them: who may run, who may answer, and what the store that decides hears of it.

use ibid::store::{ClaimRequest, ErrorKind, SettleOutcome, Settlement};
use ibid_testkit::wrappers::CallFilter;
use tokio::time::{advance, sleep};

use super::{
    common::{TieredGateway, failing_store},
    front_only::{HOUR, SECOND, claim_front_only, cut_authority, heal_stores, wait_for_background},
    *,
};
use crate::local_cache::{ask, complete, done, granted};

/// S stands in the first store and is slow on its way to the last one. Who takes over there may run only if the last store
/// says so: S would be granted there too.
#[tokio::test(start_paused = true)]
async fn who_took_over_in_first_does_not_run_solo() {
    let (s, t, first, last) = TieredGateway::two_gateways(TieredMode::Loose);
    s.authority.inner.delay(CallFilter::Claim, SECOND * 40, Duration::ZERO);
    let store = s.store.clone();
    let starts = tokio::spawn(async move { store.claim(&ask(1)).await });
    sleep(SECOND * 35).await;
    // The last store answers a look, and is gone when it is asked.
    failing_store(&t.authority).fail(CallFilter::Claim, ErrorKind::NotApplied);
    let asked = ask(1);
    for _ in 0..2 {
        assert_eq!(t.store.claim(&asked).await.unwrap_err().kind, ErrorKind::NotApplied, "also if asked again");
    }
    assert_eq!(t.log.count("solo"), 0);
    assert!(matches!(first.get(&asked.address).await.unwrap(), Some(ClaimOutcome::OutcomeUnknown(_))), "given back");
    assert!(matches!(starts.await.unwrap(), Ok(ClaimOutcome::Granted(lease)) if !lease.front_only), "S runs");
    assert!(matches!(last.get(&asked.address).await.unwrap(), Some(ClaimOutcome::InProgress(_))));
}

/// U runs solo and falls silent. T takes over in the first store without having seen its mark, and dies. The entry is T's
/// now, but the mark still says that somebody ran.
#[tokio::test(start_paused = true)]
async fn a_mark_is_believed_whoever_holds_the_entry() {
    let (u, v, first, last) = TieredGateway::two_gateways(TieredMode::Loose);
    let lease = claim_front_only(&u).await;
    advance(SECOND * 31).await;
    let dies = Arc::new(ClaimRequest { take_over: Some(lease.fence), ..ClaimRequest::clone(&ask(1)) });
    let taken = granted(&first, &dies).await;
    advance(SECOND * 31).await;
    for _ in 0..2 {
        let ClaimOutcome::OutcomeUnknown(holder) = v.store.claim(&ask(1)).await.unwrap() else { panic!("unknown") };
        assert_eq!(holder.fence, taken.fence);
        assert!(matches!(v.store.get(&lease.request.address).await.unwrap(), Some(ClaimOutcome::OutcomeUnknown(_))));
        assert_eq!(last.get(&lease.request.address).await.unwrap(), None, "nobody runs it again");
    }
}

/// Nothing was sent, and the claim is released: whoever comes next and dies between its two claims never started.
#[tokio::test(start_paused = true)]
async fn a_solo_claim_that_is_released_leaves_no_mark() {
    for last_is_back in [false, true] {
        let (u, v, first, _) = TieredGateway::two_gateways(TieredMode::Loose);
        let lease = claim_front_only(&u).await;
        if last_is_back {
            heal_stores(&u);
        }
        assert_eq!(u.store.settle(&lease, &Settlement::Release).await.is_ok(), last_is_back);
        granted(&first, &ask(1)).await;
        advance(SECOND * 31).await;
        assert!(!granted(&v.store, &ask(1)).await.front_only, "{last_is_back}");
    }
}

/// A mark that was left behind, and the late word of its owner, do no harm to the next one's.
#[tokio::test(start_paused = true)]
async fn the_latest_mark_stays() {
    let (u, w, first, _) = TieredGateway::two_gateways(TieredMode::Loose);
    let lease = claim_front_only(&u).await;
    // Out of sight of its owner, the entry goes, the mark stays.
    assert_eq!(first.admin().forget(&lease.request.address, lease.fence).await.unwrap(), SettleOutcome::Applied);
    advance(SECOND).await;
    let next = claim_front_only(&w).await;
    // The owner of the first mark gives up: it takes its own mark away, which is not there any more.
    assert!(u.store.settle(&lease, &Settlement::Release).await.is_err());
    advance(SECOND * 31).await;
    heal_stores(&w);
    let ClaimOutcome::OutcomeUnknown(holder) = w.store.claim(&ask(1)).await.unwrap() else { panic!("it may have run") };
    assert_eq!(holder.fence, next.fence);
}

/// Another request with the same key must not stand in the place of one that may have run: the entry would name it.
#[tokio::test(start_paused = true)]
async fn another_request_does_not_take_over_in_first() {
    for mode in [TieredMode::Strict, TieredMode::Loose] {
        let (gateway, first, last) = TieredGateway::one_gateway(mode);
        let between = granted(&first, &ask(1)).await;
        advance(SECOND * 31).await;
        let other =
            Arc::new(ClaimRequest { fingerprint: ibid::store::Fingerprint::NONE, ..ClaimRequest::clone(&ask(1)) });
        let ClaimOutcome::OutcomeUnknown(holder) = gateway.store.claim(&other).await.unwrap() else {
            panic!("unknown")
        };
        assert_eq!((holder.fence, holder.fingerprint), (between.fence, between.request.fingerprint), "{mode:?}");
        assert_eq!(last.get(&other.address).await.unwrap(), None);
        granted(&gateway.store, &ask(1)).await;
    }
}

/// Gateway U ran a key solo, and died before it could journal the answer. Gateway B could not see the first store, and ran
/// it on the last. What the last store remembers is the answer, as soon as it can be asked; and the double start is told.
#[tokio::test(start_paused = true)]
async fn a_solo_answer_that_last_does_not_have_does_not_win_over_it() {
    let (u, b, ..) = TieredGateway::two_gateways(TieredMode::Loose);
    let lease = claim_front_only(&u).await;
    assert!(u.store.settle(&lease, &complete(b"alone", HOUR)).await.is_err());
    failing_store(&b.front).fail(CallFilter::All, ErrorKind::NotApplied);
    let twice = granted(&b.store, &ask(1)).await;
    assert!(
        matches!(u.store.claim(&ask(1)).await.unwrap(), ClaimOutcome::Completed(finished) if finished.record == b"alone"[..])
    );
    heal_stores(&u);
    assert!(
        matches!(u.store.claim(&ask(1)).await.unwrap(), ClaimOutcome::InProgress(holder) if holder.fence == twice.fence)
    );
    assert_eq!(b.store.settle(&twice, &complete(b"decided", HOUR)).await.unwrap(), SettleOutcome::Applied);
    heal_stores(&b);
    for asking in [&b, &u, &b] {
        let finished = done(&asking.store, &ask(1)).await;
        assert_eq!((&finished.record[..], finished.fence), (&b"decided"[..], twice.fence));
    }
    assert_eq!((b.log.count("lost claim"), u.log.count("lost claim")), (1, 0), "once");
    // It is the answer from now on, also without the last store.
    cut_authority(&u);
    assert_eq!(&done(&u.store, &ask(1)).await.record[..], b"decided");
}

/// The same without a second run: whoever finds the answer tells the last store.
#[tokio::test(start_paused = true)]
async fn a_solo_answer_that_nobody_drains_is_told_by_who_finds_it() {
    let (u, other, first, last) = TieredGateway::two_gateways(TieredMode::Loose);
    let lease = claim_front_only(&u).await;
    let end = complete(b"alone", HOUR);
    assert!(u.store.settle(&lease, &end).await.is_err());
    let finished = done(&other.store, &ask(1)).await;
    assert_eq!((&finished.record[..], finished.fence), (&b"alone"[..], lease.fence));
    let finished = done(&last, &ask(1)).await;
    assert_eq!((&finished.record[..], finished.fence, finished.attempt), (&b"alone"[..], lease.fence, 1));
    assert_eq!(finished.fingerprint, lease.request.fingerprint);
    let calls = other.authority.calls();
    done(&other.store, &ask(1)).await;
    assert_eq!(other.authority.calls(), calls, "the copy is as good as any other now");
    assert!(matches!(first.get(&lease.request.address).await.unwrap(), Some(ClaimOutcome::Completed(_))));
    heal_stores(&u);
    assert_eq!(u.store.settle(&lease, &end).await.unwrap(), SettleOutcome::Applied, "the drain finds it done");
    assert_eq!(other.log.count("lost claim"), 0);
}

/// Somebody took over in the first store, found the mark, and gave back. What ran is told to the last store all the same.
#[tokio::test(start_paused = true)]
async fn a_solo_claim_that_is_lost_in_first_is_still_told_to_last() {
    let (u, _, first, last) = TieredGateway::two_gateways(TieredMode::Loose);
    let lease = claim_front_only(&u).await;
    advance(SECOND * 31).await;
    let gives_back = Arc::new(ClaimRequest { take_over: Some(lease.fence), ..ClaimRequest::clone(&ask(1)) });
    let taken = granted(&first, &gives_back).await;
    assert_eq!(first.settle(&taken, &Settlement::Release).await.unwrap(), SettleOutcome::Applied);
    let end = complete(b"alone", HOUR);
    assert_eq!(u.store.settle(&lease, &end).await.unwrap_err().kind, ErrorKind::NotApplied, "so it is journaled");
    heal_stores(&u);
    assert_eq!(u.store.settle(&lease, &end).await.unwrap(), SettleOutcome::Restored);
    assert_eq!(&done(&last, &ask(1)).await.record[..], b"alone");
}

/// The last store has heard of a solo claim, and is gone again: somebody may have taken over there, so that the first store
/// does not get the answer before.
#[tokio::test(start_paused = true)]
async fn a_solo_claim_that_last_knows_is_not_ended_by_first_alone() {
    for lost in [false, true] {
        let (u, _, first, _) = TieredGateway::two_gateways(TieredMode::Loose);
        let lease = claim_front_only(&u).await;
        heal_stores(&u);
        if lost {
            failing_store(&u.authority).lose_answers(CallFilter::All);
        }
        assert!(matches!(
            u.store.extend(&lease, SECOND * 30).await,
            Ok(SettleOutcome::Restored | SettleOutcome::Applied)
        ));
        wait_for_background().await;
        cut_authority(&u);
        let end = complete(b"alone", HOUR);
        assert!(u.store.settle(&lease, &end).await.is_err(), "journaled");
        assert!(
            matches!(first.get(&lease.request.address).await.unwrap(), Some(ClaimOutcome::InProgress(_))),
            "{lost}"
        );
        heal_stores(&u);
        assert_eq!(u.store.settle(&lease, &end).await.unwrap(), SettleOutcome::Applied);
        wait_for_background().await;
        assert!(matches!(first.get(&lease.request.address).await.unwrap(), Some(ClaimOutcome::Completed(_))));
    }
}

/// The takeover of a solo claim is a takeover in the last store too: released, it is unknown there, and the late word of
/// the solo claim does not come alive.
#[tokio::test(start_paused = true)]
async fn a_released_takeover_of_a_solo_claim_is_unknown_in_both() {
    let (u, v, first, last) = TieredGateway::two_gateways(TieredMode::Loose);
    let lease = claim_front_only(&u).await;
    advance(SECOND * 31).await;
    let named = Arc::new(ClaimRequest { take_over: Some(lease.fence), ..ClaimRequest::clone(&ask(1)) });
    let taken = granted(&v.store, &named).await;
    assert_eq!(taken.attempt, 2);
    assert_eq!(granted(&v.store, &named).await.fence, taken.fence, "repeatable");
    assert_eq!(v.store.settle(&taken, &Settlement::Release).await.unwrap(), SettleOutcome::Applied);
    heal_stores(&u);
    assert!(matches!(u.store.extend(&lease, SECOND * 30).await.unwrap(), SettleOutcome::ClaimLost(_)));
    for store in [&first, &last] {
        assert!(matches!(store.get(&lease.request.address).await.unwrap(), Some(ClaimOutcome::OutcomeUnknown(_))));
    }
    assert!(matches!(v.store.claim(&ask(1)).await.unwrap(), ClaimOutcome::OutcomeUnknown(_)));
}

/// B claimed in the last store alone, and has not looked at the first one yet. U runs solo: it goes on, and its answer waits
/// until B has given way.
#[tokio::test(start_paused = true)]
async fn a_solo_run_waits_for_a_holder_in_last_that_gives_way() {
    let (u, other, _, last) = TieredGateway::two_gateways(TieredMode::Loose);
    let lease = claim_front_only(&u).await;
    let between = granted(&last, &ask(1)).await;
    heal_stores(&u);
    let end = complete(b"alone", HOUR);
    for _ in 0..2 {
        let extended = u.store.extend(&lease, SECOND * 30).await.unwrap();
        assert_eq!(extended, SettleOutcome::Applied, "in the first store");
        // The second time, B's lease has expired.
        advance(SECOND * 29).await;
    }
    for _ in 0..2 {
        assert_eq!(u.store.settle(&lease, &end).await.unwrap_err().kind, ErrorKind::NotApplied, "so it is journaled");
    }
    assert_eq!(last.settle(&between, &Settlement::Release).await.unwrap(), SettleOutcome::Applied);
    assert_eq!(u.store.settle(&lease, &end).await.unwrap(), SettleOutcome::Restored);
    for asking in [&u.store as &dyn Store, &other.store, &last] {
        assert_eq!(&done(asking, &ask(1)).await.record[..], b"alone");
    }
    assert_eq!(u.log.count("lost claim"), 0);
}

/// B takes over in the last store and finds U's claim in the first one, without a mark. U starts to run solo before B has
/// removed that claim.
#[tokio::test(start_paused = true)]
async fn a_takeover_gives_way_to_a_solo_run_that_starts_while_it_is_shown_in_first() {
    let (u, b, _, last) = TieredGateway::two_gateways(TieredMode::Loose);
    let lapsed = granted(&last, &ask(1)).await;
    advance(SECOND * 31).await;
    let step = Duration::from_millis(10);
    u.authority.inner.delay(CallFilter::Claim, step * 5 / 2, Duration::ZERO);
    failing_store(&u.authority).fail(CallFilter::Claim, ErrorKind::NotApplied);
    b.front.inner.delay(CallFilter::All, step, Duration::ZERO);
    let over = Arc::new(ClaimRequest { take_over: Some(lapsed.fence), ..ClaimRequest::clone(&ask(1)) });
    let starts = ask(1);
    let (solo, refused) = tokio::join!(u.store.claim(&starts), b.store.claim(&over));
    assert!(matches!(solo.unwrap(), ClaimOutcome::Granted(lease) if lease.front_only), "U runs");
    assert!(matches!(refused.unwrap(), ClaimOutcome::InProgress(_)), "B does not");
    let there = last.get(&over.address).await.unwrap();
    assert!(matches!(there, Some(ClaimOutcome::OutcomeUnknown(_))), "as before: {there:?}");
}

#[tokio::test(start_paused = true)]
async fn a_solo_claim_that_is_released_under_another_holder_leaves_no_mark() {
    let (u, v, _, last) = TieredGateway::two_gateways(TieredMode::Loose);
    let lease = claim_front_only(&u).await;
    let between = granted(&last, &ask(1)).await;
    heal_stores(&u);
    assert!(matches!(u.store.settle(&lease, &Settlement::Release).await.unwrap(), SettleOutcome::ClaimLost(_)));
    wait_for_background().await;
    assert_eq!(last.settle(&between, &Settlement::Release).await.unwrap(), SettleOutcome::Applied);
    advance(SECOND * 31).await;
    assert!(!granted(&v.store, &ask(1)).await.front_only);
}
