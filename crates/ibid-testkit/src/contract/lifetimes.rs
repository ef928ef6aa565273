//! Retention: what is remembered for how long, and what comes after.

use std::time::{Duration, Instant};

use ibid::store::{Ask, Claim, End, Held, Lease, Store, Token};

use super::kit::*;

/// A finished entry answers until `keep` and is gone afterwards; the next claim starts over, with a higher fence.
pub async fn a_finished_entry_answers_for_keep_and_is_gone_afterwards(store: &dyn Store) {
    let ask = fresh();
    let lease = granted(store, &ask).await;
    let keep = Duration::from_millis(250);
    let asked = Instant::now();
    held(store, &lease, &complete_for(b"for a while", keep)).await;
    until("the record to expire", || async {
        match get(store, &ask).await {
            Some(Claim::Done(done)) => {
                assert_eq!(done.record, &b"for a while"[..], "it answers unchanged until it expires");
                None
            }
            Some(other) => panic!("a finished entry became {other:?}"),
            None => Some(()),
        }
    })
    .await;
    assert!(asked.elapsed() >= keep, "the record was gone after {:?} of {keep:?}", asked.elapsed());
    let next = granted(store, &rival(&ask)).await;
    assert_eq!(next.attempt, 1, "after its expiry an address starts over");
    assert!(next.fence > lease.fence, "fences grow beyond an entry's life: {} after {}", next.fence, lease.fence);
}

/// A record's life begins when it is completed, not when it was claimed.
pub async fn keep_counts_from_completion(store: &dyn Store) {
    let ask = Ask { hold: LONG, keep: Duration::from_millis(1), ..fresh() };
    let lease = granted(store, &ask).await;
    let keep = Duration::from_millis(400);
    tokio::time::sleep(keep).await;
    let asked = Instant::now();
    held(store, &lease, &complete_for(b"answer", keep)).await;
    gone(store, &ask).await;
    assert!(asked.elapsed() >= keep, "gone {:?} after completion, kept for {keep:?}", asked.elapsed());
}

/// A short lease with a long keep: the entry outlives its lease as unknown.
pub async fn an_unfinished_entry_is_kept_after_its_lease(store: &dyn Store) {
    let ask = Ask { hold: SHORT, keep: Duration::from_millis(300), ..fresh() };
    let asked = Instant::now();
    let lease = granted(store, &ask).await;
    gone(store, &ask).await;
    let kept = ask.hold + ask.keep;
    assert!(asked.elapsed() >= kept, "an unfinished entry was gone after {:?} of {kept:?}", asked.elapsed());
    let next = granted(store, &rival(&ask)).await;
    assert!(next.fence > lease.fence, "fences grow beyond an entry's life");
    let ask = fresh();
    lapsed(store, &ask).await;
    tokio::time::sleep(SHORT * 4).await;
    expect_unknown(claim(store, &rival(&ask)).await);
}

/// A parked entry is remembered for as long as the park says, and no longer.
pub async fn a_parked_entry_is_kept_for_its_own_keep(store: &dyn Store) {
    let ask = fresh();
    let lease = granted(store, &ask).await;
    let keep = Duration::from_millis(200);
    let asked = Instant::now();
    held(store, &lease, &End::Park { keep, retry_in: Duration::ZERO }).await;
    gone(store, &ask).await;
    assert!(asked.elapsed() >= keep, "a parked entry was gone after {:?} of {keep:?}", asked.elapsed());
}

/// A holder that outlived its entry puts it back by its heartbeat, and is busy for others.
pub async fn extend_puts_an_absent_entry_back(store: &dyn Store) {
    let ask = fresh();
    let lease = expired(store, &ask).await;
    let answered = answer("extend", store.extend(&lease, LONG).await);
    assert_eq!(answered, Held::Restored, "extend of an absent entry puts it back");
    let holder = expect_busy(claim(store, &rival(&ask)).await);
    assert_eq!((holder.fence, holder.attempt), (lease.fence, lease.attempt), "under its own fence and attempt");
    assert_eq!(holder.fingerprint, ask.fingerprint, "with its fingerprint");
    expect_held("extend of a restored entry", answer("extend", store.extend(&lease, LONG).await));
    held(store, &lease, &complete(b"in the end")).await;
    assert_eq!(expect_done(claim(store, &rival(&ask)).await).record, &b"in the end"[..]);
}

/// A holder that outlived its entry still brings its answer.
pub async fn complete_puts_an_absent_entry_back(store: &dyn Store) {
    let ask = fresh();
    let lease = expired(store, &ask).await;
    let answered = settle(store, &lease, &complete(b"after all")).await;
    assert_eq!(answered, Held::Restored, "complete of an absent entry puts it back");
    let done = expect_done(claim(store, &rival(&ask)).await);
    assert_eq!(done.record, &b"after all"[..], "with its record");
    assert_eq!((done.fence, done.attempt), (lease.fence, lease.attempt), "under its own fence and attempt");
    held(store, &lease, &complete(b"after all")).await;
}

/// The store forgot a holder; somebody else came, and left without an effect. What the first one says still counts.
pub async fn a_holder_is_put_back_where_somebody_else_came_and_went(store: &dyn Store) {
    let ask = fresh();
    let lease = expired(store, &ask).await;
    let other = rival(&ask);
    held(store, &granted(store, &other).await, &End::Release).await;
    let answered = answer("extend", store.extend(&lease, LONG).await);
    assert_eq!(answered, Held::Restored, "extend puts the holder back");
    assert_eq!(expect_busy(claim(store, &rival(&ask)).await).fence, lease.fence);
    expect_spent(claim(store, &other).await);

    let ask = fresh();
    let lease = expired(store, &ask).await;
    let other = rival(&ask);
    held(store, &granted(store, &other).await, &End::Release).await;
    assert_eq!(settle(store, &lease, &complete(b"it ran")).await, Held::Restored, "its answer is remembered");
    // Before anybody was given the answer: a copy of it may be told to a spent token too.
    expect_spent(claim(store, &other).await);
    assert_eq!(expect_done(claim(store, &rival(&ask)).await).record, &b"it ran"[..]);
}

/// A restored entry does not reset the fences.
pub async fn fences_grow_after_a_restored_entry(store: &dyn Store) {
    let ask = fresh();
    let lease = expired(store, &ask).await;
    let answered = settle(store, &lease, &complete_for(b"short", SHORT)).await;
    assert_eq!(answered, Held::Restored, "complete of an absent entry puts it back");
    gone(store, &ask).await;
    assert!(granted(store, &rival(&ask)).await.fence > lease.fence, "fences grow beyond a restored entry's life");
}

/// A takeover that is released after its entry expired leaves it unknown: it says nothing about the first.
pub async fn a_takeover_released_after_expiry_is_unknown(store: &dyn Store) {
    let ask = fresh();
    let first = parked(store, &ask).await;
    let second_ask = Ask { hold: SHORT, keep: SHORT, ..taking_over(&ask, first.fence) };
    let second = granted(store, &second_ask).await;
    gone(store, &ask).await;
    let answered = settle(store, &second, &End::Release).await;
    assert_eq!(answered, Held::Restored, "a release of an absent entry leaves its mark");
    expect_unknown(claim(store, &rival(&ask)).await);
    expect_spent(claim(store, &second_ask).await);
}

/// A late copy of a claim that expired and was then released cannot come alive.
pub async fn a_release_after_expiry_spends_the_token(store: &dyn Store) {
    let ask = fresh();
    let lease = expired(store, &ask).await;
    let answered = settle(store, &lease, &End::Release).await;
    assert_eq!(answered, Held::Restored, "a release of an absent entry leaves its mark");
    expect_spent(claim(store, &Ask { hold: SHORT, keep: SHORT, ..ask.clone() }).await);
    assert!(granted(store, &rival(&ask)).await.fence > lease.fence, "others may run");
}

/// A lifetime longer than any clock means for ever, not never.
pub async fn endless_lifetimes_do_not_overflow(store: &dyn Store) {
    for endless in [Duration::MAX, Duration::from_micros(u64::MAX), Duration::from_millis(u64::MAX / 2)] {
        let ask = Ask { hold: endless, keep: endless, ..fresh() };
        let lease = granted(store, &ask).await;
        expect_busy(claim(store, &rival(&ask)).await);
        expect_held("extend for ever", answer("extend", store.extend(&lease, endless).await));
        expect_busy(claim(store, &rival(&ask)).await);
        held(store, &lease, &End::Park { keep: endless, retry_in: endless }).await;
        expect_unknown(claim(store, &taking_over(&ask, lease.fence)).await);
        held(store, &lease, &complete_for(b"for ever", endless)).await;
        expect_done(claim(store, &rival(&ask)).await);
        let ask = Ask { keep: endless, ..fresh() };
        let never_came = Lease { fence: lease.fence, ..unseen(&ask) };
        let answered = answer("extend", store.extend(&never_came, endless).await);
        assert_eq!(answered, Held::Restored, "extend of an absent entry puts it back");
        expect_busy(claim(store, &rival(&ask)).await);
    }
}

/// Over a long random history, every grant at one address has a higher fence than all before it.
pub async fn fences_strictly_grow_over_a_long_history(store: &dyn Store) {
    let ask = fresh();
    let mut highest = ibid::store::Fence(0);
    let mut attempt = 0;
    for _ in 0..60 {
        let over = match get(store, &ask).await {
            Some(Claim::Unknown(holder)) => Some(holder.fence),
            _ => None,
        };
        let lease = granted(store, &Ask { over, ..rival(&ask) }).await;
        assert!(lease.fence > highest, "fence {} after {highest}", lease.fence);
        highest = lease.fence;
        attempt += 1;
        assert_eq!(lease.attempt, attempt, "attempts count up while the address is remembered");
        match Token::mint().0[0] % 5 {
            0 => held(store, &lease, &End::Release).await,
            1 => held(store, &lease, &park()).await,
            2 => {
                held(store, &lease, &complete(b"x")).await;
                expect_held("forget", answer("forget", store.operators().forget(&ask.address, lease.fence).await));
            }
            3 => {
                // Sent again after a lost answer, it may find that its life is over, and begin another.
                let answered = settle(store, &lease, &complete_for(b"x", Duration::from_millis(10))).await;
                assert!(matches!(answered, Held::Held | Held::Restored), "a holder's settle: {answered:?}");
                gone(store, &ask).await;
                attempt = 0;
            }
            _ => {
                held(store, &lease, &park()).await;
                let end = End::Release;
                let answered = store.operators().resolve(&ask.address, lease.fence, &end).await;
                expect_held("resolve", answer("resolve", answered));
            }
        }
    }
}

/// The lease of a claim whose entry has expired since.
async fn expired(store: &dyn Store, ask: &Ask) -> Lease {
    let lease = granted(store, &Ask { hold: SHORT, keep: SHORT, ..ask.clone() }).await;
    gone(store, ask).await;
    lease
}
