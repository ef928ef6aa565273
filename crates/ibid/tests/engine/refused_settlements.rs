//! Results that the store refuses for ever: they do not hold up others, and the queue is bounded.

use std::{sync::Arc, sync::atomic::Ordering::SeqCst, time::Duration};

use ibid::{Policy, RefusalReason, journal::Journal, store::ClaimOutcome, store::Store};
use tokio::time::sleep;

use super::common::{EngineFixture, TestOperation, assert_refused, assert_replay, claim_request};
use crate::rejecting_store::RejectingStore;

/// Two operations end while the store is away. Then the store comes back, and refuses the first for ever.
async fn first_is_refused(journal: Option<Arc<Journal>>) -> (EngineFixture<RejectingStore>, Arc<RejectingStore>) {
    let store = RejectingStore::new(usize::MAX);
    let world = EngineFixture::on(store.clone(), journal);
    store.is_unreachable.store(true, SeqCst);
    for key in ["k-1", "k-2"] {
        let _ = world.execute(&Policy::ietf(), claim_request(key), TestOperation::quick()).await;
    }
    *store.refused_address.lock() = Some(claim_request("k-1").address);
    store.is_unreachable.store(false, SeqCst);
    (world, store)
}

#[tokio::test(start_paused = true)]
async fn a_result_that_is_refused_for_ever_does_not_hold_up_the_others() {
    let (world, store) = first_is_refused(None).await;
    sleep(Duration::from_secs(3)).await;
    assert_replay(world.execute(&Policy::ietf(), claim_request("k-2"), TestOperation::quick()).await, b"run 2");
    assert_eq!(world.engine.settle_queue().pending(), 1, "the first is still tried");
    assert_refused(
        world.execute(&Policy::ietf(), claim_request("k-1"), TestOperation::quick()).await,
        RefusalReason::InProgress,
    );

    // What can be taken in the end is.
    *store.refused_address.lock() = None;
    sleep(Duration::from_secs(3)).await;
    assert_replay(world.execute(&Policy::ietf(), claim_request("k-1"), TestOperation::quick()).await, b"run 1");
    assert_eq!(world.runs(), 2);
}

/// A part of a store can be away: one shard of a cluster.
#[tokio::test(start_paused = true)]
async fn a_result_that_cannot_reach_its_part_of_the_store_does_not_hold_up_the_others() {
    let (world, store) = first_is_refused(None).await;
    store.drops_refused.store(true, SeqCst);
    sleep(Duration::from_secs(30)).await;
    assert_replay(world.execute(&Policy::ietf(), claim_request("k-2"), TestOperation::quick()).await, b"run 2");
    *store.refused_address.lock() = None;
    world.engine.settle_queue().wait_until_empty().await;
    assert_replay(world.execute(&Policy::ietf(), claim_request("k-1"), TestOperation::quick()).await, b"run 1");
}

#[tokio::test(start_paused = true)]
async fn a_result_that_is_refused_for_an_hour_is_given_up() {
    let (world, _store) = first_is_refused(None).await;
    sleep(Duration::from_secs(50 * 60)).await;
    assert_eq!(world.engine.settle_queue().pending(), 1);
    sleep(Duration::from_secs(11 * 60)).await;
    assert_eq!(world.engine.settle_queue().pending(), 0);
    assert_refused(
        world.execute(&Policy::ietf(), claim_request("k-1"), TestOperation::quick()).await,
        RefusalReason::OutcomeUnknown,
    );
    assert_eq!(world.runs(), 2);
}

#[tokio::test]
async fn a_journaled_answer_that_is_refused_for_ever_does_not_hold_up_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let journal = Arc::new(Journal::open(folder.path()).unwrap());
    let (world, store) = first_is_refused(Some(journal.clone())).await;
    while journal.len() > 1 {
        sleep(Duration::from_millis(10)).await;
    }
    assert!(matches!(store.get(&claim_request("k-2").address).await.unwrap(), Some(ClaimOutcome::Completed(_))));
    assert_replay(world.execute(&Policy::ietf(), claim_request("k-1"), TestOperation::quick()).await, b"run 1");
    *store.refused_address.lock() = None;
    world.engine.settle_queue().wait_until_empty().await;
    assert!(matches!(store.get(&claim_request("k-1").address).await.unwrap(), Some(ClaimOutcome::Completed(_))));
    assert_eq!((world.runs(), journal.len()), (2, 0));
}
