//! Claims whose outcome never reached the holder: only the token identifies them.

use super::common::*;

pub async fn an_unseen_release_frees_a_claim_that_was_applied(store: &dyn Store) {
    let (ask, lease) = new_claim(store).await;
    release(store, &unseen_lease(&ask)).await;
    release(store, &unseen_lease(&ask)).await;
    expect_token_spent(claim(store, &ask).await);
    let next = claim_next(store, &ask).await;
    assert!(next.fence > lease.fence, "fences only grow");
    assert_eq!(next.attempt, 2, "attempts go on");
}

pub async fn an_unseen_release_spends_a_claim_that_never_came(store: &dyn Store) {
    let ask = new_request();
    release(store, &unseen_lease(&ask)).await;
    release(store, &unseen_lease(&ask)).await;
    assert_eq!(get(store, &ask).await, None, "nothing to see");
    expect_token_spent(claim(store, &ask).await);
    claim_next(store, &ask).await;
}

pub async fn an_unseen_release_with_a_foreign_token_changes_nothing(store: &dyn Store) {
    let (ask, lease) = new_claim(store).await;
    let foreign = unseen_lease(&competing_request(&ask));
    let found =
        expect_in_progress(settle_lost("a foreign unseen release", store, &foreign, &Settlement::Release).await);
    assert_eq!(found.fence, lease.fence, "it is told who runs");
    let found = settle_lost("a foreign unseen complete", store, &foreign, &complete_settlement(b"no")).await;
    expect_in_progress(found);
    assert_eq!(find_in_progress(store, &ask).await.fence, lease.fence, "the holder still runs");
    complete(store, &lease, b"yes").await;
    expect_completed(settle_lost("a foreign unseen release", store, &foreign, &Settlement::Release).await);
    assert_record(store, &ask, b"yes").await;
}

/// An unseen release beside another holder spends its token: the claim is never granted, not even after that holder is
/// gone.
pub async fn an_unseen_release_spends_its_token_beside_another_holder(store: &dyn Store) {
    let (ask, lease) = new_claim(store).await;
    let late = competing_request(&ask);
    let _ = settle_lost("a foreign unseen release", store, &unseen_lease(&late), &Settlement::Release).await;
    release(store, &lease).await;
    expect_token_spent(claim(store, &late).await);
    claim_next(store, &ask).await;
    expect_token_spent(claim(store, &late).await);
}

pub async fn an_unseen_release_of_a_takeover_is_unknown_again(store: &dyn Store) {
    let (ask, first) = new_parked(store).await;
    let next = takeover_request(&ask, first.fence);
    claim_granted(store, &next).await;
    release(store, &unseen_lease(&next)).await;
    find_outcome_unknown(store, &ask).await;
    expect_token_spent(claim(store, &next).await);
}

pub async fn an_unseen_release_of_a_refused_takeover_changes_nothing(store: &dyn Store) {
    let (ask, first) = new_parked(store).await;
    let next = takeover_request(&ask, first.fence);
    let found = expect_outcome_unknown(
        settle_lost("a foreign release", store, &unseen_lease(&next), &Settlement::Release).await,
    );
    assert_eq!(found.fence, first.fence, "the parked holder is still there");
    complete(store, &first, b"it happened").await;
}

pub async fn an_unseen_complete_of_a_claim_that_never_came_is_lost(store: &dyn Store) {
    let ask = new_request();
    let _ =
        settle_lost("an unseen complete of an absent entry", store, &unseen_lease(&ask), &complete_settlement(b"no"))
            .await;
    assert!(!matches!(get(store, &ask).await, Some(ClaimOutcome::Completed(_))), "nothing was remembered");
    assert_ne!(claim_granted(store, &competing_request(&ask)).await.fence, Fence::UNSEEN);
}
