//! Claims whose answer was lost for good: the token alone names them.

use ibid::store::{Ask, Claim, End, Store};

use super::kit::*;

/// The claim had been applied: releasing it unseen frees it.
pub async fn an_unseen_release_frees_a_claim_that_was_applied(store: &dyn Store) {
    let ask = fresh();
    let lease = granted(store, &ask).await;
    held(store, &unseen(&ask), &End::Release).await;
    held(store, &unseen(&ask), &End::Release).await;
    expect_spent(claim(store, &ask).await);
    let next = granted(store, &rival(&ask)).await;
    assert!(next.fence > lease.fence, "fences only grow");
    assert_eq!(next.attempt, 2, "attempts go on");
}

/// The claim had not been applied: when it comes after all, its token is spent.
pub async fn an_unseen_release_spends_a_claim_that_never_came(store: &dyn Store) {
    let ask = fresh();
    held(store, &unseen(&ask), &End::Release).await;
    held(store, &unseen(&ask), &End::Release).await;
    assert_eq!(get(store, &ask).await, None, "nothing to see");
    expect_spent(claim(store, &ask).await);
    granted(store, &rival(&ask)).await;
}

/// An unseen release of somebody who is not there changes nothing.
pub async fn an_unseen_release_with_a_foreign_token_changes_nothing(store: &dyn Store) {
    let ask = fresh();
    let lease = granted(store, &ask).await;
    let foreign = unseen(&rival(&ask));
    let found = expect_busy(expect_lost("a foreign unseen release", settle(store, &foreign, &End::Release).await));
    assert_eq!(found.fence, lease.fence, "it is told who runs");
    let found = expect_lost("a foreign unseen complete", settle(store, &foreign, &complete(b"no")).await);
    expect_busy(found);
    assert_eq!(expect_busy(claim(store, &rival(&ask)).await).fence, lease.fence, "the holder still runs");
    held(store, &lease, &complete(b"yes")).await;
    expect_done(expect_lost("a foreign unseen release", settle(store, &foreign, &End::Release).await));
    assert_eq!(expect_done(claim(store, &rival(&ask)).await).record, &b"yes"[..], "the record stays");
}

/// The claim was refused because somebody ran, or is still on its way: once released unseen, it can never be granted,
/// not even when whoever ran has gone.
pub async fn an_unseen_release_spends_its_token_beside_another_holder(store: &dyn Store) {
    let ask = fresh();
    let lease = granted(store, &ask).await;
    let late = rival(&ask);
    let _ = expect_lost("a foreign unseen release", settle(store, &unseen(&late), &End::Release).await);
    held(store, &lease, &End::Release).await;
    expect_spent(claim(store, &late).await);
    granted(store, &rival(&ask)).await;
    expect_spent(claim(store, &late).await);
}

/// An unseen release of an applied takeover restores the unknown, as a seen one does.
pub async fn an_unseen_release_of_a_takeover_is_unknown_again(store: &dyn Store) {
    let ask = fresh();
    let first = parked(store, &ask).await;
    let next = taking_over(&ask, first.fence);
    granted(store, &next).await;
    held(store, &unseen(&next), &End::Release).await;
    expect_unknown(claim(store, &rival(&ask)).await);
    expect_spent(claim(store, &next).await);
}

/// An unseen release of a takeover that was refused leaves the unknown as it was.
pub async fn an_unseen_release_of_a_refused_takeover_changes_nothing(store: &dyn Store) {
    let ask = fresh();
    let first = parked(store, &ask).await;
    let next = taking_over(&ask, first.fence);
    let found = expect_unknown(expect_lost("a foreign release", settle(store, &unseen(&next), &End::Release).await));
    assert_eq!(found.fence, first.fence, "the parked holder is still there");
    held(store, &first, &complete(b"it happened")).await;
}

/// Who never saw its claim answered cannot have run: an unseen answer where nothing is is not remembered.
pub async fn an_unseen_complete_of_a_claim_that_never_came_is_lost(store: &dyn Store) {
    let ask = fresh();
    let _ = expect_lost("an unseen complete of an absent entry", settle(store, &unseen(&ask), &complete(b"no")).await);
    assert!(!matches!(get(store, &ask).await, Some(Claim::Done(_))), "nothing was remembered");
    assert_ne!(granted(store, &Ask { ..rival(&ask) }).await.fence, ibid::store::Fence::UNSEEN);
}
