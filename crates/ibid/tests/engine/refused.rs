//! Results that the store refuses for ever: they do not hold up others, and the queue is bounded.

use std::{sync::Arc, sync::atomic::Ordering::SeqCst, time::Duration};

use ibid::{Journal, Policy, Reason, store::Claim, store::Store};
use tokio::time::sleep;

use super::kit::{Op, World, ask, is_refused, is_replay};
use crate::picky::Picky;

/// Two operations end while the store is away. Then the store comes back, and refuses the first for ever.
async fn first_is_refused(journal: Option<Arc<Journal>>) -> (World<Picky>, Arc<Picky>) {
    let store = Picky::new(usize::MAX);
    let world = World::on(store.clone(), journal);
    store.away.store(true, SeqCst);
    for key in ["k-1", "k-2"] {
        let _ = world.execute(&Policy::ietf(), ask(key), Op::quick()).await;
    }
    *store.refuses.lock() = Some(ask("k-1").address);
    store.away.store(false, SeqCst);
    (world, store)
}

#[tokio::test(start_paused = true)]
async fn a_result_that_is_refused_for_ever_does_not_hold_up_the_others() {
    let (world, store) = first_is_refused(None).await;
    sleep(Duration::from_secs(3)).await;
    is_replay(world.execute(&Policy::ietf(), ask("k-2"), Op::quick()).await, b"run 2");
    assert_eq!(world.engine.later().waiting(), 1, "the first is still tried");
    is_refused(world.execute(&Policy::ietf(), ask("k-1"), Op::quick()).await, Reason::InProgress);

    // What can be taken in the end is.
    *store.refuses.lock() = None;
    sleep(Duration::from_secs(3)).await;
    is_replay(world.execute(&Policy::ietf(), ask("k-1"), Op::quick()).await, b"run 1");
    assert_eq!(world.runs(), 2);
}

/// A part of a store can be away: one shard of a cluster.
#[tokio::test(start_paused = true)]
async fn a_result_that_cannot_reach_its_part_of_the_store_does_not_hold_up_the_others() {
    let (world, store) = first_is_refused(None).await;
    store.loses.store(true, SeqCst);
    sleep(Duration::from_secs(30)).await;
    is_replay(world.execute(&Policy::ietf(), ask("k-2"), Op::quick()).await, b"run 2");
    *store.refuses.lock() = None;
    world.engine.later().flushed().await;
    is_replay(world.execute(&Policy::ietf(), ask("k-1"), Op::quick()).await, b"run 1");
}

#[tokio::test(start_paused = true)]
async fn a_result_that_is_refused_for_an_hour_is_given_up() {
    let (world, _store) = first_is_refused(None).await;
    sleep(Duration::from_secs(50 * 60)).await;
    assert_eq!(world.engine.later().waiting(), 1);
    sleep(Duration::from_secs(11 * 60)).await;
    assert_eq!(world.engine.later().waiting(), 0);
    is_refused(world.execute(&Policy::ietf(), ask("k-1"), Op::quick()).await, Reason::OutcomeUnknown);
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
    assert!(matches!(store.get(&ask("k-2").address).await.unwrap(), Some(Claim::Done(_))));
    is_replay(world.execute(&Policy::ietf(), ask("k-1"), Op::quick()).await, b"run 1");
    *store.refuses.lock() = None;
    world.engine.later().flushed().await;
    assert!(matches!(store.get(&ask("k-1").address).await.unwrap(), Some(Claim::Done(_))));
    assert_eq!((world.runs(), journal.len()), (2, 0));
}
