//! Claims whose outcome never reached the holder: only the token identifies them.

use ibid::store::{ClaimOutcome, ClaimRequest, Settlement, Store};

use super::common::*;

/// An unseen release frees a claim that was applied.
pub async fn an_unseen_release_frees_a_claim_that_was_applied(store: &dyn Store) {
    let ask = new_request();
    let lease = claim_granted(store, &ask).await;
    settle_applied(store, &unseen_lease(&ask), &Settlement::Release).await;
    settle_applied(store, &unseen_lease(&ask), &Settlement::Release).await;
    expect_token_spent(claim(store, &ask).await);
    let next = claim_granted(store, &competing_request(&ask)).await;
    assert!(next.fence > lease.fence, "fences only grow");
    assert_eq!(next.attempt, 2, "attempts go on");
}

/// An unseen release of a claim that was not applied spends its token, should the claim arrive later.
pub async fn an_unseen_release_spends_a_claim_that_never_came(store: &dyn Store) {
    let ask = new_request();
    settle_applied(store, &unseen_lease(&ask), &Settlement::Release).await;
    settle_applied(store, &unseen_lease(&ask), &Settlement::Release).await;
    assert_eq!(get(store, &ask).await, None, "nothing to see");
    expect_token_spent(claim(store, &ask).await);
    claim_granted(store, &competing_request(&ask)).await;
}

/// An unseen release with a foreign token changes nothing.
pub async fn an_unseen_release_with_a_foreign_token_changes_nothing(store: &dyn Store) {
    let ask = new_request();
    let lease = claim_granted(store, &ask).await;
    let foreign = unseen_lease(&competing_request(&ask));
    let found = expect_in_progress(expect_claim_lost(
        "a foreign unseen release",
        settle(store, &foreign, &Settlement::Release).await,
    ));
    assert_eq!(found.fence, lease.fence, "it is told who runs");
    let found =
        expect_claim_lost("a foreign unseen complete", settle(store, &foreign, &complete_settlement(b"no")).await);
    expect_in_progress(found);
    assert_eq!(
        expect_in_progress(claim(store, &competing_request(&ask)).await).fence,
        lease.fence,
        "the holder still runs"
    );
    settle_applied(store, &lease, &complete_settlement(b"yes")).await;
    expect_completed(expect_claim_lost(
        "a foreign unseen release",
        settle(store, &foreign, &Settlement::Release).await,
    ));
    assert_eq!(expect_completed(claim(store, &competing_request(&ask)).await).record, &b"yes"[..], "the record stays");
}

/// An unseen release beside another holder spends its token: the claim is never granted, not even after that holder is
/// gone.
pub async fn an_unseen_release_spends_its_token_beside_another_holder(store: &dyn Store) {
    let ask = new_request();
    let lease = claim_granted(store, &ask).await;
    let late = competing_request(&ask);
    let _ =
        expect_claim_lost("a foreign unseen release", settle(store, &unseen_lease(&late), &Settlement::Release).await);
    settle_applied(store, &lease, &Settlement::Release).await;
    expect_token_spent(claim(store, &late).await);
    claim_granted(store, &competing_request(&ask)).await;
    expect_token_spent(claim(store, &late).await);
}

/// An unseen release of an applied takeover restores the unknown outcome, like a seen one.
pub async fn an_unseen_release_of_a_takeover_is_unknown_again(store: &dyn Store) {
    let ask = new_request();
    let first = claim_and_park(store, &ask).await;
    let next = takeover_request(&ask, first.fence);
    claim_granted(store, &next).await;
    settle_applied(store, &unseen_lease(&next), &Settlement::Release).await;
    expect_outcome_unknown(claim(store, &competing_request(&ask)).await);
    expect_token_spent(claim(store, &next).await);
}

/// An unseen release of a refused takeover keeps the unknown outcome.
pub async fn an_unseen_release_of_a_refused_takeover_changes_nothing(store: &dyn Store) {
    let ask = new_request();
    let first = claim_and_park(store, &ask).await;
    let next = takeover_request(&ask, first.fence);
    let found = expect_outcome_unknown(expect_claim_lost(
        "a foreign release",
        settle(store, &unseen_lease(&next), &Settlement::Release).await,
    ));
    assert_eq!(found.fence, first.fence, "the parked holder is still there");
    settle_applied(store, &first, &complete_settlement(b"it happened")).await;
}

/// A holder that never received its grant cannot have run. Its completion of an absent entry is rejected.
pub async fn an_unseen_complete_of_a_claim_that_never_came_is_lost(store: &dyn Store) {
    let ask = new_request();
    let _ = expect_claim_lost(
        "an unseen complete of an absent entry",
        settle(store, &unseen_lease(&ask), &complete_settlement(b"no")).await,
    );
    assert!(!matches!(get(store, &ask).await, Some(ClaimOutcome::Completed(_))), "nothing was remembered");
    assert_ne!(
        claim_granted(store, &ClaimRequest { ..competing_request(&ask) }).await.fence,
        ibid::store::Fence::UNSEEN
    );
}
