//! Which claims are granted.

use std::collections::HashSet;

use super::common::*;

pub async fn a_first_claim_is_granted_as_attempt_1(store: &dyn Store) {
    let lease = claim_granted(store, &new_request()).await;
    assert_eq!(lease.attempt, 1, "the first run at an address is attempt 1");
}

pub async fn the_same_token_gets_the_same_lease(store: &dyn Store) {
    let (ask, first) = new_claim(store).await;
    for _ in 0..3 {
        let again = claim_granted(store, &ask).await;
        assert_eq!((again.fence, again.attempt), (first.fence, first.attempt), "same token, same lease");
    }
}

pub async fn another_token_finds_the_holder_busy(store: &dyn Store) {
    let ask = new_request();
    let before = Instant::now();
    let lease = claim_granted(store, &ask).await;
    sleep(SHORT_LEASE).await;
    let seen_from = Instant::now();
    let holder = find_in_progress(store, &ask).await;
    let at_most = before.elapsed();
    assert_eq!((holder.fence, holder.attempt), (lease.fence, 1), "busy names the holder");
    assert_eq!(holder.fingerprint, ask.fingerprint, "busy carries the holder's fingerprint, not the asker's");
    // Stores that count in milliseconds may be off by one on either side.
    let tick = Duration::from_millis(2);
    assert!(holder.age <= at_most + tick, "age {:?} after {at_most:?}", holder.age);
    assert!(holder.age + tick >= SHORT_LEASE, "age {:?} at least {SHORT_LEASE:?} after the claim", holder.age);
    assert!(holder.takeover_in <= ask.lease, "takeover_in {:?} of a hold of {:?}", holder.takeover_in, ask.lease);
    let rest = holder.takeover_in;
    let is_the_rest = rest + (seen_from - before) + POLL_TIMEOUT > ask.lease;
    assert!(is_the_rest, "takeover_in {rest:?} is the rest of a hold of {:?}", ask.lease);
}

/// A claim that finds a holder changes nothing: the holder stays, and the same token may be granted later.
pub async fn a_refused_token_is_granted_once_it_is_free(store: &dyn Store) {
    let (ask, lease) = new_claim(store).await;
    let next = competing_request(&ask);
    expect_in_progress(claim(store, &next).await);
    release(store, &lease).await;
    assert!(claim_granted(store, &next).await.fence > lease.fence, "fences only grow");
}

pub async fn of_64_concurrent_claims_exactly_one_is_granted(store: &dyn Store) {
    for _ in 0..4 {
        let ask = new_request();
        let asks: Vec<Arc<ClaimRequest>> = (0..64).map(|_| Arc::new(competing_request(&ask))).collect();
        let answers = join_all(asks.iter().map(|ask| store.claim(ask))).await;
        let mut granted: Vec<Lease> = Vec::new();
        let mut seen = HashSet::new();
        for found in answers {
            match expect_answer("claim", found) {
                ClaimOutcome::Granted(lease) => granted.push(lease),
                found => drop(seen.insert(expect_in_progress(found).fence)),
            }
        }
        assert_eq!(granted.len(), 1, "exactly one of 64 concurrent claims is granted");
        assert_eq!(seen, HashSet::from([granted[0].fence]), "all others see the one holder");
    }
}

pub async fn concurrent_copies_of_one_claim_get_one_lease(store: &dyn Store) {
    let ask = Arc::new(new_request());
    let answers = join_all((0..16).map(|_| store.claim(&ask))).await;
    let fences: HashSet<_> = answers
        .into_iter()
        .map(|found| match expect_answer("claim", found) {
            ClaimOutcome::Granted(lease) => (lease.fence, lease.attempt),
            other => panic!("a copy of the granted claim found {other:?}"),
        })
        .collect();
    assert_eq!(fences.len(), 1, "all copies get the same fence and attempt: {fences:?}");
}

pub async fn addresses_do_not_disturb_each_other(store: &dyn Store) {
    let (ask, lease) = new_claim(store).await;
    for byte in [0, 7, 15, 16, 31] {
        let mut other = competing_request(&ask);
        other.address.0[byte] ^= 1;
        let neighbour = claim_granted(store, &other).await;
        complete(store, &neighbour, b"of the neighbour").await;
    }
    find_in_progress(store, &ask).await;
    complete(store, &lease, b"its own").await;
    assert_record(store, &ask, b"its own").await;
}

pub async fn a_takeover_of_nobody_is_a_plain_claim(store: &dyn Store) {
    let ask = new_request();
    let lease = claim_granted(store, &ClaimRequest { take_over: Some(Fence(7)), ..ask.clone() }).await;
    assert_eq!(lease.attempt, 1, "nobody was there to be taken over");
}

pub async fn live_entries_are_not_evicted_by_new_ones(store: &dyn Store) {
    let asks: Vec<ClaimRequest> = (0..8).map(|_| new_request()).collect();
    let mut leases = Vec::new();
    for ask in &asks {
        leases.push(claim_granted(store, ask).await);
    }
    complete(store, &leases[0], b"remembered").await;
    park(store, &leases[1]).await;
    let crowd: Vec<Arc<ClaimRequest>> = (0..600).map(|_| Arc::new(short_request())).collect();
    for some in crowd.chunks(100) {
        for found in join_all(some.iter().map(|ask| store.claim(ask))).await {
            let _ = expect_answer("claim", found);
        }
    }
    assert_record(store, &asks[0], b"remembered").await;
    find_outcome_unknown(store, &asks[1]).await;
    for ask in &asks[2..] {
        find_in_progress(store, ask).await;
    }
}
