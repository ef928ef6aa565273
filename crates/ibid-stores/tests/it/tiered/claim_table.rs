//! Every row of the claim table, every end, and what happens when either store is away in the middle of it.

use bytes::Bytes;
use ibid::store::{
    Address, ClaimRequest, ErrorKind, Fence, Guarantees, Lease, SettleOutcome, Settlement, StoreAdmin, StoreFuture,
    SweepResult,
};
use ibid_testkit::wrappers::CallFilter;
use tokio::time::{advance, sleep};

use super::{
    common::{LosableStore, TestGenerations, TieredGateway, failing_store},
    *,
};
use crate::local_cache::{ask, complete, done, granted};

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);
const BOTH: [TieredMode; 2] = [TieredMode::Strict, TieredMode::Loose];

/// Lets what is done behind the answers be done.
async fn wait_for_background() {
    sleep(Duration::from_millis(1)).await;
}

fn cut_store(link: &super::common::FaultyStoreLink) {
    failing_store(link).fail(CallFilter::All, ErrorKind::NotApplied);
}

fn heal_store(link: &super::common::FaultyStoreLink) {
    failing_store(link).heal();
    link.inner.heal();
}

#[tokio::test(start_paused = true)]
async fn a_claim_costs_two_calls_a_replay_one() {
    for mode in BOTH {
        let (gateway, ..) = TieredGateway::one_gateway(mode);
        let lease = granted(&gateway.store, &ask(1)).await;
        assert_eq!((gateway.front.calls(), gateway.authority.calls()), ([1, 0, 0, 0], [1, 0, 0, 0]));
        assert_eq!(gateway.store.settle(&lease, &complete(b"answer", HOUR)).await.unwrap(), SettleOutcome::Applied);
        wait_for_background().await;
        assert_eq!((gateway.front.calls(), gateway.authority.calls()), ([1, 0, 0, 1], [1, 0, 0, 1]));
        let finished = done(&gateway.store, &ask(1)).await;
        assert_eq!((gateway.front.calls(), gateway.authority.calls()), ([2, 0, 0, 1], [1, 0, 0, 1]), "{mode:?}");
        assert_eq!((finished.fence, finished.attempt), (lease.fence, 1), "as the store that decides says");
        assert_eq!((finished.fingerprint, &finished.record[..]), (lease.request.fingerprint, &b"answer"[..]));
    }
}

#[tokio::test(start_paused = true)]
async fn a_slow_first_does_not_delay_an_answer() {
    let (gateway, ..) = TieredGateway::one_gateway(TieredMode::Strict);
    let lease = granted(&gateway.store, &ask(1)).await;
    gateway.front.inner.delay(CallFilter::Settle, SECOND * 100, Duration::ZERO);
    let asked = tokio::time::Instant::now();
    assert_eq!(gateway.store.settle(&lease, &complete(b"answer", HOUR)).await.unwrap(), SettleOutcome::Applied);
    assert_eq!(asked.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn what_the_last_store_says_counts() {
    for mode in BOTH {
        let (gateway, first, last) = TieredGateway::one_gateway(mode);
        let holder = granted(&last, &ask(1)).await;
        let refused = ask(1);
        let ClaimOutcome::InProgress(seen) = gateway.store.claim(&refused).await.unwrap() else { panic!("busy") };
        assert_eq!(seen.fence, holder.fence);
        match (mode, first.get(&refused.address).await.unwrap()) {
            // Given back: free, or at least nobody's.
            (TieredMode::Strict, None) | (TieredMode::Loose, Some(ClaimOutcome::OutcomeUnknown(_))) => {}
            (_, other) => panic!("{mode:?}: {other:?}"),
        }
        assert_eq!(
            last.settle(&holder, &Settlement::Park { ttl: HOUR, retry_in: SECOND }).await.unwrap(),
            SettleOutcome::Applied
        );
        assert!(matches!(gateway.store.claim(&refused).await.unwrap(), ClaimOutcome::OutcomeUnknown(_)));
        assert_eq!(last.admin().forget(&refused.address, holder.fence).await.unwrap(), SettleOutcome::Applied);
        assert_eq!(granted(&gateway.store, &refused).await.attempt, 2, "{mode:?}: the refused token is granted");
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_done_in_the_last_store_is_copied() {
    for mode in BOTH {
        let (gateway, _, last) = TieredGateway::one_gateway(mode);
        let holder = granted(&last, &ask(1)).await;
        assert_eq!(last.settle(&holder, &complete(b"answer", SECOND * 10)).await.unwrap(), SettleOutcome::Applied);
        advance(SECOND).await;
        let other =
            Arc::new(ClaimRequest { fingerprint: ibid::store::Fingerprint::NONE, ..ClaimRequest::clone(&ask(1)) });
        done(&gateway.store, &other).await;
        wait_for_background().await;
        let calls = gateway.authority.calls();
        let finished = done(&gateway.store, &ask(1)).await;
        assert_eq!(gateway.authority.calls(), calls, "from the first store");
        assert_eq!((finished.fence, finished.fingerprint), (holder.fence, holder.request.fingerprint), "whose it is");
        assert!(finished.expires_in <= SECOND * 9);
        advance(SECOND * 9).await;
        granted(&gateway.store, &ask(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn busy_in_first_does_not_hide_what_is_done_in_last() {
    for mode in BOTH {
        let (gateway, first, last) = TieredGateway::one_gateway(mode);
        let holder = granted(&last, &ask(1)).await;
        granted(&first, &ask(1)).await;
        assert!(
            matches!(gateway.store.claim(&ask(1)).await.unwrap(), ClaimOutcome::InProgress(seen) if seen.fence == holder.fence)
        );
        assert_eq!(last.settle(&holder, &complete(b"answer", HOUR)).await.unwrap(), SettleOutcome::Applied);
        done(&gateway.store, &ask(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_holder_between_its_two_claims_is_busy_and_once_lapsed_taken_over() {
    for mode in BOTH {
        let (gateway, first, _) = TieredGateway::one_gateway(mode);
        let between = granted(&first, &ask(1)).await;
        let ClaimOutcome::InProgress(seen) = gateway.store.claim(&ask(1)).await.unwrap() else { panic!("busy") };
        assert_eq!(seen.fence, between.fence);
        advance(SECOND * 31).await;
        assert_eq!(gateway.store.get(&between.request.address).await.unwrap(), None, "nothing ever started");
        let lease = granted(&gateway.store, &ask(1)).await;
        assert_eq!((lease.attempt, lease.front_only), (1, false), "it had never started");
        // The late one is refused where it counts.
        assert!(matches!(gateway.store.claim(&between.request).await.unwrap(), ClaimOutcome::InProgress(_)));
    }
}

#[tokio::test(start_paused = true)]
async fn strict_claims_nothing_without_last() {
    let (gateway, first, last) = TieredGateway::one_gateway(TieredMode::Strict);
    cut_store(&gateway.authority);
    let asked = ask(1);
    assert_eq!(gateway.store.claim(&asked).await.unwrap_err().kind, ErrorKind::NotApplied);
    wait_for_background().await;
    assert_eq!(first.get(&asked.address).await.unwrap(), None, "released");
    heal_store(&gateway.authority);
    assert!(!granted(&gateway.store, &asked).await.front_only);
    assert!(matches!(last.get(&asked.address).await.unwrap(), Some(ClaimOutcome::InProgress(_))));
}

#[tokio::test(start_paused = true)]
async fn an_ambiguous_answer_is_never_followed_by_solo() {
    for mode in BOTH {
        let (gateway, _, last) = TieredGateway::one_gateway(mode);
        failing_store(&gateway.authority).lose_answers(CallFilter::Claim);
        let asked = ask(1);
        assert_eq!(gateway.store.claim(&asked).await.unwrap_err().kind, ErrorKind::Ambiguous);
        // Now it is certain that the call was not applied. The one before may have been, and was.
        cut_store(&gateway.authority);
        assert_eq!(gateway.store.claim(&asked).await.unwrap_err().kind, ErrorKind::Ambiguous, "{mode:?}");
        assert_eq!(gateway.log.count("solo"), 0);
        heal_store(&gateway.authority);
        let Some(ClaimOutcome::InProgress(holder)) = last.get(&asked.address).await.unwrap() else { panic!("applied") };
        let lease = granted(&gateway.store, &asked).await;
        assert_eq!((lease.fence, lease.front_only), (holder.fence, false), "same token, same lease");
    }
}

#[tokio::test(start_paused = true)]
async fn an_unclear_claim_is_released_in_both() {
    for mode in BOTH {
        let (gateway, first, last) = TieredGateway::one_gateway(mode);
        failing_store(&gateway.authority).lose_answers(CallFilter::Claim);
        let asked = ask(1);
        assert!(gateway.store.claim(&asked).await.is_err());
        heal_store(&gateway.authority);
        let unseen = Lease { request: asked.clone(), fence: Fence::UNSEEN, attempt: 0, front_only: false };
        assert_eq!(gateway.store.settle(&unseen, &Settlement::Release).await.unwrap(), SettleOutcome::Applied);
        assert_eq!(first.get(&asked.address).await.unwrap(), None, "{mode:?}");
        assert_eq!(last.get(&asked.address).await.unwrap(), None);
        assert_eq!(gateway.store.claim(&asked).await.unwrap(), ClaimOutcome::TokenSpent);
        granted(&gateway.store, &ask(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn without_first_the_last_store_decides() {
    for mode in BOTH {
        let (gateway, other, ..) = TieredGateway::two_gateways(mode);
        cut_store(&gateway.front);
        let asked = ask(1);
        let lease = granted(&gateway.store, &asked).await;
        assert_eq!((lease.front_only, gateway.log.count("fallback")), (false, 1));
        // Somebody else stands in the first store meanwhile; the claim still knows itself.
        assert!(matches!(other.store.claim(&ask(1)).await.unwrap(), ClaimOutcome::InProgress(_)));
        heal_store(&gateway.front);
        assert_eq!(granted(&gateway.store, &asked).await.fence, lease.fence, "{mode:?}: same token, same lease");
        cut_store(&gateway.front);
        assert_eq!(gateway.store.settle(&lease, &complete(b"answer", HOUR)).await.unwrap(), SettleOutcome::Applied);
        for asked in [&gateway, &other] {
            assert_eq!(done(&asked.store, &ask(1)).await.fence, lease.fence);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_first_that_applies_but_does_not_answer_is_a_fallback_too() {
    for mode in BOTH {
        let (gateway, other, ..) = TieredGateway::two_gateways(mode);
        failing_store(&gateway.front).lose_answers(CallFilter::All);
        let lease = granted(&gateway.store, &ask(1)).await;
        assert!(
            matches!(other.store.claim(&ask(1)).await.unwrap(), ClaimOutcome::InProgress(seen) if seen.fence == lease.fence)
        );
        assert_eq!(gateway.store.settle(&lease, &complete(b"answer", HOUR)).await.unwrap(), SettleOutcome::Applied);
        wait_for_background().await;
        assert_eq!(done(&other.store, &ask(1)).await.fence, lease.fence);
        assert!(gateway.log.count("fallback") >= 2, "{mode:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn with_neither_store_nothing_is_claimed() {
    for mode in BOTH {
        let (gateway, ..) = TieredGateway::one_gateway(mode);
        cut_store(&gateway.front);
        cut_store(&gateway.authority);
        assert_eq!(gateway.store.claim(&ask(1)).await.unwrap_err().kind, ErrorKind::NotApplied);
        assert_eq!(gateway.log.count("solo"), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_that_fails_in_first_costs_the_lease_and_no_more() {
    for mode in BOTH {
        let (gateway, other, ..) = TieredGateway::two_gateways(mode);
        let lease = granted(&gateway.store, &ask(1)).await;
        cut_store(&gateway.front);
        assert_eq!(gateway.store.settle(&lease, &Settlement::Release).await.unwrap(), SettleOutcome::Applied);
        assert!(
            matches!(other.store.claim(&ask(1)).await.unwrap(), ClaimOutcome::InProgress(_)),
            "{mode:?}: for its lease"
        );
        sleep(SECOND * 31).await;
        granted(&other.store, &ask(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn takeovers_go_to_last_and_overwrite_first() {
    for mode in BOTH {
        let (gateway, first, last) = TieredGateway::one_gateway(mode);
        let lease = granted(&gateway.store, &ask(1)).await;
        // Parked where it counts, still running for all that the first store knows.
        assert_eq!(
            last.settle(&lease, &Settlement::Park { ttl: HOUR, retry_in: Duration::ZERO }).await.unwrap(),
            SettleOutcome::Applied
        );
        let next = Arc::new(ClaimRequest { take_over: Some(lease.fence), ..ClaimRequest::clone(&ask(1)) });
        let taken = granted(&gateway.store, &next).await;
        assert_eq!(taken.attempt, 2, "{mode:?}");
        assert_eq!(
            granted(&first, &Arc::new(ClaimRequest { take_over: None, ..ClaimRequest::clone(&next) }))
                .await
                .request
                .token,
            next.token
        );
        assert_eq!(granted(&gateway.store, &next).await.fence, taken.fence, "repeatable");
        assert!(matches!(
            gateway.store.settle(&lease, &complete(b"stale", HOUR)).await.unwrap(),
            SettleOutcome::ClaimLost(_)
        ));
        assert_eq!(gateway.store.settle(&taken, &complete(b"answer", HOUR)).await.unwrap(), SettleOutcome::Applied);
        wait_for_background().await;
        assert_eq!(done(&gateway.store, &ask(1)).await.attempt, 2);
    }
}

#[tokio::test(start_paused = true)]
async fn a_first_that_lost_a_running_claim_gets_it_back_with_the_heartbeat() {
    for mode in BOTH {
        let first = Arc::new(LosableStore::default());
        let gateway = TieredGateway::new(mode, first.clone(), Arc::new(Memory::default()));
        let lease = granted(&gateway.store, &ask(1)).await;
        first.lose_everything();
        assert_eq!(gateway.store.extend(&lease, SECOND * 30).await.unwrap(), SettleOutcome::Applied);
        wait_for_background().await;
        assert!(
            matches!(first.get(&lease.request.address).await.unwrap(), Some(ClaimOutcome::InProgress(_))),
            "{mode:?}"
        );
        assert_eq!(gateway.store.settle(&lease, &complete(b"answer", HOUR)).await.unwrap(), SettleOutcome::Applied);
        wait_for_background().await;
        let calls = gateway.authority.calls();
        done(&gateway.store, &ask(1)).await;
        assert_eq!(gateway.authority.calls(), calls, "from the first store");
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_forgotten_is_forgotten_in_both() {
    for mode in BOTH {
        let (gateway, first, _) = TieredGateway::one_gateway(mode);
        let lease = granted(&gateway.store, &ask(1)).await;
        // Its record is still on its way to the first store when it is forgotten: it must not come alive there.
        gateway.front.inner.delay(CallFilter::Settle, SECOND, Duration::ZERO);
        assert_eq!(gateway.store.settle(&lease, &complete(b"answer", HOUR)).await.unwrap(), SettleOutcome::Applied);
        let at = lease.request.address;
        assert_eq!(gateway.store.admin().forget(&at, lease.fence).await.unwrap(), SettleOutcome::Applied);
        gateway.front.inner.heal();
        sleep(SECOND * 2).await;
        assert_eq!(first.get(&at).await.unwrap(), None, "{mode:?}");
        granted(&gateway.store, &ask(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_forget_that_cannot_reach_first_raises_the_generation() {
    for mode in BOTH {
        let (first, last) = (Arc::new(LosableStore::default()), Arc::new(Memory::default()));
        let number = Arc::new(Mutex::new(0));
        let gateway = |is_down: &Arc<Mutex<bool>>| {
            let generations =
                TestGenerations { front: first.clone(), generation: number.clone(), is_down: is_down.clone() };
            TieredGateway::with(mode, first.clone(), last.clone(), Some(Arc::new(generations)))
        };
        let is_down = Arc::new(Mutex::new(false));
        let (gateway, other) = (gateway(&is_down), gateway(&is_down));
        let lease = granted(&gateway.store, &ask(1)).await;
        assert_eq!(gateway.store.settle(&lease, &complete(b"answer", HOUR)).await.unwrap(), SettleOutcome::Applied);
        wait_for_background().await;
        done(&other.store, &ask(1)).await;
        cut_store(&gateway.front);
        let at = lease.request.address;
        assert_eq!(gateway.store.admin().forget(&at, lease.fence).await.unwrap(), SettleOutcome::Applied);
        assert_eq!(*number.lock(), 1, "{mode:?}");
        sleep(SECOND * 5).await;
        granted(&other.store, &ask(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn without_a_generation_a_forget_that_cannot_reach_first_is_repeated() {
    let (gateway, first, _) = TieredGateway::one_gateway(TieredMode::Strict);
    let lease = granted(&gateway.store, &ask(1)).await;
    assert_eq!(gateway.store.settle(&lease, &complete(b"answer", HOUR)).await.unwrap(), SettleOutcome::Applied);
    wait_for_background().await;
    cut_store(&gateway.front);
    let at = lease.request.address;
    let error = gateway.store.admin().forget(&at, lease.fence).await.unwrap_err();
    assert!(error.to_string().contains("repeat it"), "{error}");
    heal_store(&gateway.front);
    assert_eq!(gateway.store.admin().forget(&at, lease.fence).await.unwrap(), SettleOutcome::Applied);
    assert_eq!(first.get(&at).await.unwrap(), None);
}

#[tokio::test(start_paused = true)]
async fn first_is_believed_again_only_after_the_generation_was_read() {
    let (first, last) = (Arc::new(LosableStore::default()), Arc::new(Memory::default()));
    let counted = Arc::new(TestGenerations::new(&first));
    let gateway = TieredGateway::with(TieredMode::Strict, first.clone(), last, Some(counted.clone()));
    let lease = granted(&gateway.store, &ask(1)).await;
    assert_eq!(gateway.store.settle(&lease, &complete(b"answer", HOUR)).await.unwrap(), SettleOutcome::Applied);
    wait_for_background().await;
    done(&gateway.store, &ask(1)).await;
    let calls = gateway.authority.calls()[0];
    // While the number cannot be read, but the first store was in sight all the time, it is believed.
    *counted.is_down.lock() = true;
    sleep(SECOND * 60).await;
    done(&gateway.store, &ask(1)).await;
    assert_eq!(gateway.authority.calls()[0], calls);
    // It was out of sight for a moment: somebody may have forgotten the key, and could not say so.
    cut_store(&gateway.front);
    assert!(matches!(gateway.store.claim(&ask(2)).await.unwrap(), ClaimOutcome::Granted(_)));
    heal_store(&gateway.front);
    done(&gateway.store, &ask(1)).await;
    assert!(gateway.authority.calls()[0] > calls + 1, "the last store answered");
    *counted.is_down.lock() = false;
    done(&gateway.store, &ask(1)).await;
    let calls = gateway.authority.calls()[0];
    done(&gateway.store, &ask(1)).await;
    assert_eq!(gateway.authority.calls()[0], calls, "believed again");
}

#[tokio::test(start_paused = true)]
async fn without_last_loose_replays_what_first_has_even_to_who_never_read_the_generation() {
    for mode in BOTH {
        let (first, last) = (Arc::new(LosableStore::default()), Arc::new(Memory::default()));
        let counted = Arc::new(TestGenerations::new(&first));
        let gateway = || TieredGateway::with(mode, first.clone(), last.clone(), Some(counted.clone()));
        let one = gateway();
        let lease = granted(&one.store, &ask(1)).await;
        assert_eq!(one.store.settle(&lease, &complete(b"answer", HOUR)).await.unwrap(), SettleOutcome::Applied);
        wait_for_background().await;
        let fresh = gateway();
        *counted.is_down.lock() = true;
        cut_store(&fresh.authority);
        fresh.store.follow_generation().await;
        match (mode, fresh.store.claim(&ask(1)).await) {
            (TieredMode::Loose, Ok(ClaimOutcome::Completed(finished))) => assert_eq!(finished.record, &b"answer"[..]),
            (TieredMode::Strict, Err(error)) => assert_eq!(error.kind, ErrorKind::NotApplied),
            (_, found) => panic!("{mode:?}: {found:?}"),
        }
        // An answer that was lost is no proof that `last` is not there.
        failing_store(&fresh.authority).heal();
        failing_store(&fresh.authority).lose_answers(CallFilter::All);
        assert_eq!(fresh.store.claim(&ask(1)).await.unwrap_err().kind, ErrorKind::Ambiguous, "{mode:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn who_follows_the_generation_knows_it_without_having_needed_it() {
    for mode in BOTH {
        let (first, last) = (Arc::new(LosableStore::default()), Arc::new(Memory::default()));
        let counted = Arc::new(TestGenerations::new(&first));
        let gateway = || TieredGateway::with(mode, first.clone(), last.clone(), Some(counted.clone()));
        let (one, other) = (gateway(), gateway());
        *counted.generation.lock() = 3;
        other.store.follow_generation().await;
        let lease = granted(&one.store, &ask(1)).await;
        assert_eq!(one.store.settle(&lease, &complete(b"answer", HOUR)).await.unwrap(), SettleOutcome::Applied);
        wait_for_background().await;
        // From here on nobody can read it, and `last` says nothing.
        *counted.is_down.lock() = true;
        cut_store(&other.authority);
        sleep(SECOND * 60).await;
        assert_eq!(done(&other.store, &ask(1)).await.record, &b"answer"[..], "{mode:?}");
        // Raised by somebody else, it is followed within seconds.
        (*counted.is_down.lock(), *counted.generation.lock()) = (false, 4);
        sleep(SECOND * 6).await;
        assert_eq!(first.get(&lease.request.address).await.unwrap(), None, "{mode:?}: out of sight");
    }
}

#[tokio::test(start_paused = true)]
async fn a_generation_that_was_read_while_first_was_away_does_not_make_it_credible() {
    let (first, last) = (Arc::new(LosableStore::default()), Arc::new(Memory::default()));
    let counted = Arc::new(TestGenerations::new(&first));
    let gateway = TieredGateway::with(TieredMode::Strict, first.clone(), last, Some(counted.clone()));
    gateway.store.follow_generation().await;
    let lease = granted(&gateway.store, &ask(1)).await;
    assert_eq!(gateway.store.settle(&lease, &complete(b"answer", HOUR)).await.unwrap(), SettleOutcome::Applied);
    wait_for_background().await;
    cut_store(&gateway.front);
    done(&gateway.store, &ask(1)).await;
    sleep(SECOND * 6).await;
    *counted.is_down.lock() = true;
    heal_store(&gateway.front);
    cut_store(&gateway.authority);
    assert_eq!(gateway.store.claim(&ask(1)).await.unwrap_err().kind, ErrorKind::NotApplied);
}

#[tokio::test(start_paused = true)]
async fn operators_changes_reach_first() {
    for mode in BOTH {
        let (gateway, first, _) = TieredGateway::one_gateway(mode);
        let lease = granted(&gateway.store, &ask(1)).await;
        let at = lease.request.address;
        let park = Settlement::Park { ttl: HOUR, retry_in: HOUR };
        assert_eq!(gateway.store.settle(&lease, &park).await.unwrap(), SettleOutcome::Applied);
        wait_for_background().await;
        let operators = gateway.store.admin();
        assert_eq!(
            operators.resolve(&at, lease.fence, &complete(b"known", HOUR)).await.unwrap(),
            SettleOutcome::Applied
        );
        assert!(matches!(first.get(&at).await.unwrap(), Some(ClaimOutcome::Completed(_))), "{mode:?}: a copy");
        assert_eq!(&done(&gateway.store, &ask(1)).await.record[..], b"known");
        assert_eq!(
            operators.replace_record(&at, lease.fence, Bytes::from_static(b"sealed")).await.unwrap(),
            SettleOutcome::Applied
        );
        let finished = done(&gateway.store, &ask(1)).await;
        assert_eq!((&finished.record[..], finished.fence), (&b"sealed"[..], lease.fence));
    }
}

#[tokio::test(start_paused = true)]
async fn while_last_is_away_first_shows_that_somebody_runs() {
    for mode in BOTH {
        let (gateway, first, _) = TieredGateway::one_gateway(mode);
        let lease = granted(&gateway.store, &ask(1)).await;
        cut_store(&gateway.authority);
        for _ in 0..5 {
            sleep(SECOND * 10).await;
            assert_eq!(gateway.store.extend(&lease, SECOND * 30).await.unwrap_err().kind, ErrorKind::NotApplied);
            wait_for_background().await;
            assert!(
                matches!(first.get(&lease.request.address).await.unwrap(), Some(ClaimOutcome::InProgress(_))),
                "{mode:?}"
            );
        }
        match (mode, gateway.store.claim(&ask(1)).await) {
            (TieredMode::Strict, Err(error)) => assert_eq!(error.kind, ErrorKind::NotApplied),
            (TieredMode::Loose, Ok(ClaimOutcome::InProgress(_))) => {}
            (_, other) => panic!("{mode:?}: {other:?}"),
        }
        assert_eq!(gateway.log.count("solo"), 0, "a running claim is no reason to run alone");
        let end = complete(b"answer", HOUR);
        assert!(gateway.store.settle(&lease, &end).await.is_err(), "so it is journaled");
        heal_store(&gateway.authority);
        assert_eq!(gateway.store.settle(&lease, &end).await.unwrap(), SettleOutcome::Applied, "and drained");
        wait_for_background().await;
        assert_eq!(done(&first, &ask(1)).await.record.len(), 6 + 53, "with a head that says whose it is");
        assert_eq!(&done(&gateway.store, &ask(1)).await.record[..], b"answer");
    }
}

#[tokio::test(start_paused = true)]
async fn lost_answers_of_last_are_asked_for_again() {
    for mode in BOTH {
        let (gateway, ..) = TieredGateway::one_gateway(mode);
        let lease = granted(&gateway.store, &ask(1)).await;
        failing_store(&gateway.authority).lose_answers(CallFilter::All);
        assert_eq!(gateway.store.extend(&lease, SECOND * 30).await.unwrap_err().kind, ErrorKind::Ambiguous);
        let end = complete(b"answer", HOUR);
        assert_eq!(gateway.store.settle(&lease, &end).await.unwrap_err().kind, ErrorKind::Ambiguous);
        heal_store(&gateway.authority);
        assert_eq!(
            gateway.store.settle(&lease, &end).await.unwrap(),
            SettleOutcome::Applied,
            "{mode:?}: same call, same answer"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_done_behind_the_answers_is_bounded() {
    let (gateway, first, _) = TieredGateway::one_gateway(TieredMode::Strict);
    gateway.front.inner.delay(CallFilter::Settle, SECOND * 10, Duration::ZERO);
    for nth in 0..1100_u16 {
        let mut address = [9; 32];
        address[..2].copy_from_slice(&nth.to_le_bytes());
        let asked = Arc::new(ClaimRequest { address: ibid::store::Address(address), ..ClaimRequest::clone(&ask(9)) });
        let lease = granted(&gateway.store, &asked).await;
        assert_eq!(gateway.store.settle(&lease, &complete(b"answer", HOUR)).await.unwrap(), SettleOutcome::Applied);
    }
    assert_eq!(gateway.log.count("dropped"), 1100 - 1024);
    sleep(SECOND * 11).await;
    assert_eq!(first.admin().counts().await.unwrap().finished, 1024);
}

#[tokio::test]
async fn promises_are_honest() {
    let strict = tiered_store(TieredMode::Strict).guarantees();
    let loose = tiered_store(TieredMode::Loose).guarantees();
    assert_eq!((strict.store, loose.store), ("tiered", "tiered"));
    assert!(!loose.durable && !loose.shared && loose.warnings.is_empty());
    assert_eq!((strict.durable, strict.shared), (false, false), "as the last store");
    // What either store lacks, loose lacks.
    let wanting = |what: &str| StoreWithWarning(Memory::default(), what.to_owned());
    let around = |mode| tiered_around(wanting("no persistence"), wanting("no replica"), mode).guarantees().warnings;
    assert_eq!(around(TieredMode::Strict), ["no replica"]);
    assert_eq!(around(TieredMode::Loose), ["no persistence", "no replica"]);
}

/// A store that start-up found wanting.
#[derive(Debug)]
struct StoreWithWarning(Memory, String);

impl Store for StoreWithWarning {
    fn claim<'a>(&'a self, ask: &'a Arc<ClaimRequest>) -> StoreFuture<'a, ClaimOutcome> {
        self.0.claim(ask)
    }
    fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, SettleOutcome> {
        self.0.extend(lease, hold)
    }
    fn settle<'a>(&'a self, lease: &'a Lease, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome> {
        self.0.settle(lease, end)
    }
    fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()> {
        self.0.wait(at, seen, limit)
    }
    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<ClaimOutcome>> {
        self.0.get(at)
    }
    fn sweep(&self, at_most: u32) -> StoreFuture<'_, SweepResult> {
        self.0.sweep(at_most)
    }
    fn admin(&self) -> &dyn StoreAdmin {
        self.0.admin()
    }
    fn counters(&self) -> Option<&dyn ibid::store::Counters> {
        self.0.counters()
    }
    fn guarantees(&self) -> Guarantees {
        Guarantees { warnings: vec![self.1.clone()], ..self.0.guarantees() }
    }
}
