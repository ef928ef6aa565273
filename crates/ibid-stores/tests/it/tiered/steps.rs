//! Every row of the claim table, every end, and what happens when either store is away in the middle of it.

use bytes::Bytes;
use ibid::store::{Address, Ask, End, ErrorKind, Fence, Held, Lease, Operators, Promise, StoreFuture, Swept};
use ibid_testkit::wrappers::Calls;
use tokio::time::{advance, sleep};

use super::{
    two::{Counted, Gateway, Swapped, faults},
    *,
};
use crate::near::{ask, complete, done, granted};

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);
const BOTH: [Mode; 2] = [Mode::Strict, Mode::Loose];

/// Lets what is done behind the answers be done.
async fn settled() {
    sleep(Duration::from_millis(1)).await;
}

fn cut(link: &super::two::Link) {
    faults(link).fail(Calls::All, ErrorKind::NotApplied);
}

fn heal(link: &super::two::Link) {
    faults(link).heal();
    link.inner.heal();
}

#[tokio::test(start_paused = true)]
async fn a_claim_costs_two_calls_a_replay_one() {
    for mode in BOTH {
        let (gateway, ..) = Gateway::alone(mode);
        let lease = granted(&gateway.store, &ask(1)).await;
        assert_eq!((gateway.first.calls(), gateway.last.calls()), ([1, 0, 0, 0], [1, 0, 0, 0]));
        assert_eq!(gateway.store.settle(&lease, &complete(b"answer", HOUR)).await.unwrap(), Held::Held);
        settled().await;
        assert_eq!((gateway.first.calls(), gateway.last.calls()), ([1, 0, 0, 1], [1, 0, 0, 1]));
        let finished = done(&gateway.store, &ask(1)).await;
        assert_eq!((gateway.first.calls(), gateway.last.calls()), ([2, 0, 0, 1], [1, 0, 0, 1]), "{mode:?}");
        assert_eq!((finished.fence, finished.attempt), (lease.fence, 1), "as the store that decides says");
        assert_eq!((finished.fingerprint, &finished.record[..]), (lease.ask.fingerprint, &b"answer"[..]));
    }
}

#[tokio::test(start_paused = true)]
async fn a_slow_first_does_not_delay_an_answer() {
    let (gateway, ..) = Gateway::alone(Mode::Strict);
    let lease = granted(&gateway.store, &ask(1)).await;
    gateway.first.inner.delay(Calls::Settle, SECOND * 100, Duration::ZERO);
    let asked = tokio::time::Instant::now();
    assert_eq!(gateway.store.settle(&lease, &complete(b"answer", HOUR)).await.unwrap(), Held::Held);
    assert_eq!(asked.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn what_the_last_store_says_counts() {
    for mode in BOTH {
        let (gateway, first, last) = Gateway::alone(mode);
        let holder = granted(&last, &ask(1)).await;
        let refused = ask(1);
        let Claim::Busy(seen) = gateway.store.claim(&refused).await.unwrap() else { panic!("busy") };
        assert_eq!(seen.fence, holder.fence);
        match (mode, first.get(&refused.address).await.unwrap()) {
            // Given back: free, or at least nobody's.
            (Mode::Strict, None) | (Mode::Loose, Some(Claim::Unknown(_))) => {}
            (_, other) => panic!("{mode:?}: {other:?}"),
        }
        assert_eq!(last.settle(&holder, &End::Park { keep: HOUR, retry_in: SECOND }).await.unwrap(), Held::Held);
        assert!(matches!(gateway.store.claim(&refused).await.unwrap(), Claim::Unknown(_)));
        assert_eq!(last.operators().forget(&refused.address, holder.fence).await.unwrap(), Held::Held);
        assert_eq!(granted(&gateway.store, &refused).await.attempt, 2, "{mode:?}: the refused token is granted");
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_done_in_the_last_store_is_copied() {
    for mode in BOTH {
        let (gateway, _, last) = Gateway::alone(mode);
        let holder = granted(&last, &ask(1)).await;
        assert_eq!(last.settle(&holder, &complete(b"answer", SECOND * 10)).await.unwrap(), Held::Held);
        advance(SECOND).await;
        let other = Arc::new(Ask { fingerprint: ibid::store::Fingerprint::NONE, ..Ask::clone(&ask(1)) });
        done(&gateway.store, &other).await;
        settled().await;
        let calls = gateway.last.calls();
        let finished = done(&gateway.store, &ask(1)).await;
        assert_eq!(gateway.last.calls(), calls, "from the first store");
        assert_eq!((finished.fence, finished.fingerprint), (holder.fence, holder.ask.fingerprint), "whose it is");
        assert!(finished.expires_in <= SECOND * 9);
        advance(SECOND * 9).await;
        granted(&gateway.store, &ask(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn busy_in_first_does_not_hide_what_is_done_in_last() {
    for mode in BOTH {
        let (gateway, first, last) = Gateway::alone(mode);
        let holder = granted(&last, &ask(1)).await;
        granted(&first, &ask(1)).await;
        assert!(matches!(gateway.store.claim(&ask(1)).await.unwrap(), Claim::Busy(seen) if seen.fence == holder.fence));
        assert_eq!(last.settle(&holder, &complete(b"answer", HOUR)).await.unwrap(), Held::Held);
        done(&gateway.store, &ask(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_holder_between_its_two_claims_is_busy_and_once_lapsed_taken_over() {
    for mode in BOTH {
        let (gateway, first, _) = Gateway::alone(mode);
        let between = granted(&first, &ask(1)).await;
        let Claim::Busy(seen) = gateway.store.claim(&ask(1)).await.unwrap() else { panic!("busy") };
        assert_eq!(seen.fence, between.fence);
        advance(SECOND * 31).await;
        assert_eq!(gateway.store.get(&between.ask.address).await.unwrap(), None, "nothing ever started");
        let lease = granted(&gateway.store, &ask(1)).await;
        assert_eq!((lease.attempt, lease.solo), (1, false), "it had never started");
        // The late one is refused where it counts.
        assert!(matches!(gateway.store.claim(&between.ask).await.unwrap(), Claim::Busy(_)));
    }
}

#[tokio::test(start_paused = true)]
async fn strict_claims_nothing_without_last() {
    let (gateway, first, last) = Gateway::alone(Mode::Strict);
    cut(&gateway.last);
    let asked = ask(1);
    assert_eq!(gateway.store.claim(&asked).await.unwrap_err().kind, ErrorKind::NotApplied);
    settled().await;
    assert_eq!(first.get(&asked.address).await.unwrap(), None, "released");
    heal(&gateway.last);
    assert!(!granted(&gateway.store, &asked).await.solo);
    assert!(matches!(last.get(&asked.address).await.unwrap(), Some(Claim::Busy(_))));
}

#[tokio::test(start_paused = true)]
async fn an_ambiguous_answer_is_never_followed_by_solo() {
    for mode in BOTH {
        let (gateway, _, last) = Gateway::alone(mode);
        faults(&gateway.last).lose(Calls::Claim);
        let asked = ask(1);
        assert_eq!(gateway.store.claim(&asked).await.unwrap_err().kind, ErrorKind::Ambiguous);
        // Now it is certain that the call was not applied. The one before may have been, and was.
        cut(&gateway.last);
        assert_eq!(gateway.store.claim(&asked).await.unwrap_err().kind, ErrorKind::Ambiguous, "{mode:?}");
        assert_eq!(gateway.log.count("solo"), 0);
        heal(&gateway.last);
        let Some(Claim::Busy(holder)) = last.get(&asked.address).await.unwrap() else { panic!("applied") };
        let lease = granted(&gateway.store, &asked).await;
        assert_eq!((lease.fence, lease.solo), (holder.fence, false), "same token, same lease");
    }
}

#[tokio::test(start_paused = true)]
async fn an_unclear_claim_is_released_in_both() {
    for mode in BOTH {
        let (gateway, first, last) = Gateway::alone(mode);
        faults(&gateway.last).lose(Calls::Claim);
        let asked = ask(1);
        assert!(gateway.store.claim(&asked).await.is_err());
        heal(&gateway.last);
        let unseen = Lease { ask: asked.clone(), fence: Fence::UNSEEN, attempt: 0, solo: false };
        assert_eq!(gateway.store.settle(&unseen, &End::Release).await.unwrap(), Held::Held);
        assert_eq!(first.get(&asked.address).await.unwrap(), None, "{mode:?}");
        assert_eq!(last.get(&asked.address).await.unwrap(), None);
        assert_eq!(gateway.store.claim(&asked).await.unwrap(), Claim::Spent);
        granted(&gateway.store, &ask(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn without_first_the_last_store_decides() {
    for mode in BOTH {
        let (gateway, other, ..) = Gateway::two(mode);
        cut(&gateway.first);
        let asked = ask(1);
        let lease = granted(&gateway.store, &asked).await;
        assert_eq!((lease.solo, gateway.log.count("fallback")), (false, 1));
        // Somebody else stands in the first store meanwhile; the claim still knows itself.
        assert!(matches!(other.store.claim(&ask(1)).await.unwrap(), Claim::Busy(_)));
        heal(&gateway.first);
        assert_eq!(granted(&gateway.store, &asked).await.fence, lease.fence, "{mode:?}: same token, same lease");
        cut(&gateway.first);
        assert_eq!(gateway.store.settle(&lease, &complete(b"answer", HOUR)).await.unwrap(), Held::Held);
        for asked in [&gateway, &other] {
            assert_eq!(done(&asked.store, &ask(1)).await.fence, lease.fence);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_first_that_applies_but_does_not_answer_is_a_fallback_too() {
    for mode in BOTH {
        let (gateway, other, ..) = Gateway::two(mode);
        faults(&gateway.first).lose(Calls::All);
        let lease = granted(&gateway.store, &ask(1)).await;
        assert!(matches!(other.store.claim(&ask(1)).await.unwrap(), Claim::Busy(seen) if seen.fence == lease.fence));
        assert_eq!(gateway.store.settle(&lease, &complete(b"answer", HOUR)).await.unwrap(), Held::Held);
        settled().await;
        assert_eq!(done(&other.store, &ask(1)).await.fence, lease.fence);
        assert!(gateway.log.count("fallback") >= 2, "{mode:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn with_neither_store_nothing_is_claimed() {
    for mode in BOTH {
        let (gateway, ..) = Gateway::alone(mode);
        cut(&gateway.first);
        cut(&gateway.last);
        assert_eq!(gateway.store.claim(&ask(1)).await.unwrap_err().kind, ErrorKind::NotApplied);
        assert_eq!(gateway.log.count("solo"), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_that_fails_in_first_costs_the_lease_and_no_more() {
    for mode in BOTH {
        let (gateway, other, ..) = Gateway::two(mode);
        let lease = granted(&gateway.store, &ask(1)).await;
        cut(&gateway.first);
        assert_eq!(gateway.store.settle(&lease, &End::Release).await.unwrap(), Held::Held);
        assert!(matches!(other.store.claim(&ask(1)).await.unwrap(), Claim::Busy(_)), "{mode:?}: for its lease");
        sleep(SECOND * 31).await;
        granted(&other.store, &ask(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn takeovers_go_to_last_and_overwrite_first() {
    for mode in BOTH {
        let (gateway, first, last) = Gateway::alone(mode);
        let lease = granted(&gateway.store, &ask(1)).await;
        // Parked where it counts, still running for all that the first store knows.
        assert_eq!(last.settle(&lease, &End::Park { keep: HOUR, retry_in: Duration::ZERO }).await.unwrap(), Held::Held);
        let next = Arc::new(Ask { over: Some(lease.fence), ..Ask::clone(&ask(1)) });
        let taken = granted(&gateway.store, &next).await;
        assert_eq!(taken.attempt, 2, "{mode:?}");
        assert_eq!(granted(&first, &Arc::new(Ask { over: None, ..Ask::clone(&next) })).await.ask.token, next.token);
        assert_eq!(granted(&gateway.store, &next).await.fence, taken.fence, "repeatable");
        assert!(matches!(gateway.store.settle(&lease, &complete(b"stale", HOUR)).await.unwrap(), Held::Lost(_)));
        assert_eq!(gateway.store.settle(&taken, &complete(b"answer", HOUR)).await.unwrap(), Held::Held);
        settled().await;
        assert_eq!(done(&gateway.store, &ask(1)).await.attempt, 2);
    }
}

#[tokio::test(start_paused = true)]
async fn a_first_that_lost_a_running_claim_gets_it_back_with_the_heartbeat() {
    for mode in BOTH {
        let first = Arc::new(Swapped::default());
        let gateway = Gateway::new(mode, first.clone(), Arc::new(Memory::default()));
        let lease = granted(&gateway.store, &ask(1)).await;
        first.lose_everything();
        assert_eq!(gateway.store.extend(&lease, SECOND * 30).await.unwrap(), Held::Held);
        settled().await;
        assert!(matches!(first.get(&lease.ask.address).await.unwrap(), Some(Claim::Busy(_))), "{mode:?}");
        assert_eq!(gateway.store.settle(&lease, &complete(b"answer", HOUR)).await.unwrap(), Held::Held);
        settled().await;
        let calls = gateway.last.calls();
        done(&gateway.store, &ask(1)).await;
        assert_eq!(gateway.last.calls(), calls, "from the first store");
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_forgotten_is_forgotten_in_both() {
    for mode in BOTH {
        let (gateway, first, _) = Gateway::alone(mode);
        let lease = granted(&gateway.store, &ask(1)).await;
        // Its record is still on its way to the first store when it is forgotten: it must not come alive there.
        gateway.first.inner.delay(Calls::Settle, SECOND, Duration::ZERO);
        assert_eq!(gateway.store.settle(&lease, &complete(b"answer", HOUR)).await.unwrap(), Held::Held);
        let at = lease.ask.address;
        assert_eq!(gateway.store.operators().forget(&at, lease.fence).await.unwrap(), Held::Held);
        gateway.first.inner.heal();
        sleep(SECOND * 2).await;
        assert_eq!(first.get(&at).await.unwrap(), None, "{mode:?}");
        granted(&gateway.store, &ask(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_forget_that_cannot_reach_first_raises_the_generation() {
    for mode in BOTH {
        let (first, last) = (Arc::new(Swapped::default()), Arc::new(Memory::default()));
        let number = Arc::new(Mutex::new(0));
        let gateway = |is_down: &Arc<Mutex<bool>>| {
            let generations = Counted { first: first.clone(), number: number.clone(), is_down: is_down.clone() };
            Gateway::with(mode, first.clone(), last.clone(), Some(Arc::new(generations)))
        };
        let is_down = Arc::new(Mutex::new(false));
        let (gateway, other) = (gateway(&is_down), gateway(&is_down));
        let lease = granted(&gateway.store, &ask(1)).await;
        assert_eq!(gateway.store.settle(&lease, &complete(b"answer", HOUR)).await.unwrap(), Held::Held);
        settled().await;
        done(&other.store, &ask(1)).await;
        cut(&gateway.first);
        let at = lease.ask.address;
        assert_eq!(gateway.store.operators().forget(&at, lease.fence).await.unwrap(), Held::Held);
        assert_eq!(*number.lock(), 1, "{mode:?}");
        sleep(SECOND * 5).await;
        granted(&other.store, &ask(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn without_a_generation_a_forget_that_cannot_reach_first_is_repeated() {
    let (gateway, first, _) = Gateway::alone(Mode::Strict);
    let lease = granted(&gateway.store, &ask(1)).await;
    assert_eq!(gateway.store.settle(&lease, &complete(b"answer", HOUR)).await.unwrap(), Held::Held);
    settled().await;
    cut(&gateway.first);
    let at = lease.ask.address;
    let error = gateway.store.operators().forget(&at, lease.fence).await.unwrap_err();
    assert!(error.to_string().contains("repeat it"), "{error}");
    heal(&gateway.first);
    assert_eq!(gateway.store.operators().forget(&at, lease.fence).await.unwrap(), Held::Held);
    assert_eq!(first.get(&at).await.unwrap(), None);
}

#[tokio::test(start_paused = true)]
async fn first_is_believed_again_only_after_the_generation_was_read() {
    let (first, last) = (Arc::new(Swapped::default()), Arc::new(Memory::default()));
    let counted = Arc::new(Counted::new(&first));
    let gateway = Gateway::with(Mode::Strict, first.clone(), last, Some(counted.clone()));
    let lease = granted(&gateway.store, &ask(1)).await;
    assert_eq!(gateway.store.settle(&lease, &complete(b"answer", HOUR)).await.unwrap(), Held::Held);
    settled().await;
    done(&gateway.store, &ask(1)).await;
    let calls = gateway.last.calls()[0];
    // While the number cannot be read, but the first store was in sight all the time, it is believed.
    *counted.is_down.lock() = true;
    sleep(SECOND * 60).await;
    done(&gateway.store, &ask(1)).await;
    assert_eq!(gateway.last.calls()[0], calls);
    // It was out of sight for a moment: somebody may have forgotten the key, and could not say so.
    cut(&gateway.first);
    assert!(matches!(gateway.store.claim(&ask(2)).await.unwrap(), Claim::Granted(_)));
    heal(&gateway.first);
    done(&gateway.store, &ask(1)).await;
    assert!(gateway.last.calls()[0] > calls + 1, "the last store answered");
    *counted.is_down.lock() = false;
    done(&gateway.store, &ask(1)).await;
    let calls = gateway.last.calls()[0];
    done(&gateway.store, &ask(1)).await;
    assert_eq!(gateway.last.calls()[0], calls, "believed again");
}

#[tokio::test(start_paused = true)]
async fn without_last_loose_replays_what_first_has_even_to_who_never_read_the_generation() {
    for mode in BOTH {
        let (first, last) = (Arc::new(Swapped::default()), Arc::new(Memory::default()));
        let counted = Arc::new(Counted::new(&first));
        let gateway = || Gateway::with(mode, first.clone(), last.clone(), Some(counted.clone()));
        let one = gateway();
        let lease = granted(&one.store, &ask(1)).await;
        assert_eq!(one.store.settle(&lease, &complete(b"answer", HOUR)).await.unwrap(), Held::Held);
        settled().await;
        let fresh = gateway();
        *counted.is_down.lock() = true;
        cut(&fresh.last);
        fresh.store.follow().await;
        match (mode, fresh.store.claim(&ask(1)).await) {
            (Mode::Loose, Ok(Claim::Done(finished))) => assert_eq!(finished.record, &b"answer"[..]),
            (Mode::Strict, Err(error)) => assert_eq!(error.kind, ErrorKind::NotApplied),
            (_, found) => panic!("{mode:?}: {found:?}"),
        }
        // An answer that was lost is no proof that `last` is not there.
        faults(&fresh.last).heal();
        faults(&fresh.last).lose(Calls::All);
        assert_eq!(fresh.store.claim(&ask(1)).await.unwrap_err().kind, ErrorKind::Ambiguous, "{mode:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn who_follows_the_generation_knows_it_without_having_needed_it() {
    for mode in BOTH {
        let (first, last) = (Arc::new(Swapped::default()), Arc::new(Memory::default()));
        let counted = Arc::new(Counted::new(&first));
        let gateway = || Gateway::with(mode, first.clone(), last.clone(), Some(counted.clone()));
        let (one, other) = (gateway(), gateway());
        *counted.number.lock() = 3;
        other.store.follow().await;
        let lease = granted(&one.store, &ask(1)).await;
        assert_eq!(one.store.settle(&lease, &complete(b"answer", HOUR)).await.unwrap(), Held::Held);
        settled().await;
        // From here on nobody can read it, and `last` says nothing.
        *counted.is_down.lock() = true;
        cut(&other.last);
        sleep(SECOND * 60).await;
        assert_eq!(done(&other.store, &ask(1)).await.record, &b"answer"[..], "{mode:?}");
        // Raised by somebody else, it is followed within seconds.
        (*counted.is_down.lock(), *counted.number.lock()) = (false, 4);
        sleep(SECOND * 6).await;
        assert_eq!(first.get(&lease.ask.address).await.unwrap(), None, "{mode:?}: out of sight");
    }
}

#[tokio::test(start_paused = true)]
async fn a_generation_that_was_read_while_first_was_away_does_not_make_it_credible() {
    let (first, last) = (Arc::new(Swapped::default()), Arc::new(Memory::default()));
    let counted = Arc::new(Counted::new(&first));
    let gateway = Gateway::with(Mode::Strict, first.clone(), last, Some(counted.clone()));
    gateway.store.follow().await;
    let lease = granted(&gateway.store, &ask(1)).await;
    assert_eq!(gateway.store.settle(&lease, &complete(b"answer", HOUR)).await.unwrap(), Held::Held);
    settled().await;
    cut(&gateway.first);
    done(&gateway.store, &ask(1)).await;
    sleep(SECOND * 6).await;
    *counted.is_down.lock() = true;
    heal(&gateway.first);
    cut(&gateway.last);
    assert_eq!(gateway.store.claim(&ask(1)).await.unwrap_err().kind, ErrorKind::NotApplied);
}

#[tokio::test(start_paused = true)]
async fn operators_changes_reach_first() {
    for mode in BOTH {
        let (gateway, first, _) = Gateway::alone(mode);
        let lease = granted(&gateway.store, &ask(1)).await;
        let at = lease.ask.address;
        let park = End::Park { keep: HOUR, retry_in: HOUR };
        assert_eq!(gateway.store.settle(&lease, &park).await.unwrap(), Held::Held);
        settled().await;
        let operators = gateway.store.operators();
        assert_eq!(operators.resolve(&at, lease.fence, &complete(b"known", HOUR)).await.unwrap(), Held::Held);
        assert!(matches!(first.get(&at).await.unwrap(), Some(Claim::Done(_))), "{mode:?}: a copy");
        assert_eq!(&done(&gateway.store, &ask(1)).await.record[..], b"known");
        assert_eq!(operators.replace(&at, lease.fence, Bytes::from_static(b"sealed")).await.unwrap(), Held::Held);
        let finished = done(&gateway.store, &ask(1)).await;
        assert_eq!((&finished.record[..], finished.fence), (&b"sealed"[..], lease.fence));
    }
}

#[tokio::test(start_paused = true)]
async fn while_last_is_away_first_shows_that_somebody_runs() {
    for mode in BOTH {
        let (gateway, first, _) = Gateway::alone(mode);
        let lease = granted(&gateway.store, &ask(1)).await;
        cut(&gateway.last);
        for _ in 0..5 {
            sleep(SECOND * 10).await;
            assert_eq!(gateway.store.extend(&lease, SECOND * 30).await.unwrap_err().kind, ErrorKind::NotApplied);
            settled().await;
            assert!(matches!(first.get(&lease.ask.address).await.unwrap(), Some(Claim::Busy(_))), "{mode:?}");
        }
        match (mode, gateway.store.claim(&ask(1)).await) {
            (Mode::Strict, Err(error)) => assert_eq!(error.kind, ErrorKind::NotApplied),
            (Mode::Loose, Ok(Claim::Busy(_))) => {}
            (_, other) => panic!("{mode:?}: {other:?}"),
        }
        assert_eq!(gateway.log.count("solo"), 0, "a running claim is no reason to run alone");
        let end = complete(b"answer", HOUR);
        assert!(gateway.store.settle(&lease, &end).await.is_err(), "so it is journaled");
        heal(&gateway.last);
        assert_eq!(gateway.store.settle(&lease, &end).await.unwrap(), Held::Held, "and drained");
        settled().await;
        assert_eq!(done(&first, &ask(1)).await.record.len(), 6 + 53, "with a head that says whose it is");
        assert_eq!(&done(&gateway.store, &ask(1)).await.record[..], b"answer");
    }
}

#[tokio::test(start_paused = true)]
async fn lost_answers_of_last_are_asked_for_again() {
    for mode in BOTH {
        let (gateway, ..) = Gateway::alone(mode);
        let lease = granted(&gateway.store, &ask(1)).await;
        faults(&gateway.last).lose(Calls::All);
        assert_eq!(gateway.store.extend(&lease, SECOND * 30).await.unwrap_err().kind, ErrorKind::Ambiguous);
        let end = complete(b"answer", HOUR);
        assert_eq!(gateway.store.settle(&lease, &end).await.unwrap_err().kind, ErrorKind::Ambiguous);
        heal(&gateway.last);
        assert_eq!(gateway.store.settle(&lease, &end).await.unwrap(), Held::Held, "{mode:?}: same call, same answer");
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_done_behind_the_answers_is_bounded() {
    let (gateway, first, _) = Gateway::alone(Mode::Strict);
    gateway.first.inner.delay(Calls::Settle, SECOND * 10, Duration::ZERO);
    for nth in 0..1100_u16 {
        let mut address = [9; 32];
        address[..2].copy_from_slice(&nth.to_le_bytes());
        let asked = Arc::new(Ask { address: ibid::store::Address(address), ..Ask::clone(&ask(9)) });
        let lease = granted(&gateway.store, &asked).await;
        assert_eq!(gateway.store.settle(&lease, &complete(b"answer", HOUR)).await.unwrap(), Held::Held);
    }
    assert_eq!(gateway.log.count("dropped"), 1100 - 1024);
    sleep(SECOND * 11).await;
    assert_eq!(first.operators().counts().await.unwrap().finished, 1024);
}

#[tokio::test]
async fn promises_are_honest() {
    let strict = tiered(Mode::Strict).promise();
    let loose = tiered(Mode::Loose).promise();
    assert_eq!((strict.store, loose.store), ("tiered", "tiered"));
    assert!(!loose.durable && !loose.shared && loose.wanting.is_empty());
    assert_eq!((strict.durable, strict.shared), (false, false), "as the last store");
    // What either store lacks, loose lacks.
    let wanting = |what: &str| Wanting(Memory::default(), what.to_owned());
    let around = |mode| around(wanting("no persistence"), wanting("no replica"), mode).promise().wanting;
    assert_eq!(around(Mode::Strict), ["no replica"]);
    assert_eq!(around(Mode::Loose), ["no persistence", "no replica"]);
}

/// A store that start-up found wanting.
#[derive(Debug)]
struct Wanting(Memory, String);

impl Store for Wanting {
    fn claim<'a>(&'a self, ask: &'a Arc<Ask>) -> StoreFuture<'a, Claim> {
        self.0.claim(ask)
    }
    fn extend<'a>(&'a self, lease: &'a Lease, hold: Duration) -> StoreFuture<'a, Held> {
        self.0.extend(lease, hold)
    }
    fn settle<'a>(&'a self, lease: &'a Lease, end: &'a End) -> StoreFuture<'a, Held> {
        self.0.settle(lease, end)
    }
    fn wait<'a>(&'a self, at: &'a Address, seen: Fence, limit: Duration) -> StoreFuture<'a, ()> {
        self.0.wait(at, seen, limit)
    }
    fn get<'a>(&'a self, at: &'a Address) -> StoreFuture<'a, Option<Claim>> {
        self.0.get(at)
    }
    fn sweep(&self, at_most: u32) -> StoreFuture<'_, Swept> {
        self.0.sweep(at_most)
    }
    fn operators(&self) -> &dyn Operators {
        self.0.operators()
    }
    fn counters(&self) -> Option<&dyn ibid::store::Counters> {
        self.0.counters()
    }
    fn promise(&self) -> Promise {
        Promise { wanting: vec![self.1.clone()], ..self.0.promise() }
    }
}
