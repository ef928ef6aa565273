use futures_util::future::join_all;
use ibid::store::ErrorKind;
use ibid_testkit::wrappers::{CallFilter, DelayedStore, FailingStore};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep},
};

use super::*;

const WAITER_COUNT: usize = 10_000;

type CountedSlowStore = CountingStore<DelayedStore<FailingStore<Memory>>>;

async fn claim_held() -> (Arc<CountedSlowStore>, Arc<LocalCache>, Lease) {
    let watched = Arc::new(CountingStore::new(DelayedStore::new(FailingStore::new(Memory::default()))));
    let near = Arc::new(LocalCache::new(watched.clone(), AnswerCache::default()));
    let lease = granted(&*near, &Arc::new(ClaimRequest { lease: SECOND * 600, ..ClaimRequest::clone(&ask(1)) })).await;
    (watched, near, lease)
}

/// Waits, then claims, as the engine does. When it was back.
fn spawn_waiter(near: &Arc<LocalCache>, lease: &Lease, limit: Duration) -> JoinHandle<(Duration, ClaimOutcome)> {
    let (near, at, seen, began) = (near.clone(), lease.request.address, lease.fence, Instant::now());
    tokio::spawn(async move {
        near.wait(&at, seen, limit).await.unwrap();
        let back = began.elapsed();
        (back, near.claim(&ask(1)).await.unwrap())
    })
}

async fn join_tasks<T>(tasks: Vec<JoinHandle<T>>) -> Vec<T> {
    join_all(tasks).await.into_iter().map(Result::unwrap).collect()
}

#[tokio::test(start_paused = true)]
async fn ten_thousand_waiters_make_two_calls() {
    let (watched, near, lease) = claim_held().await;
    let crowd: Vec<_> = (0..WAITER_COUNT).map(|_| spawn_waiter(&near, &lease, SECOND * 60)).collect();
    sleep(SECOND).await;
    assert_eq!(watched.calls(), [1, 1, 0, 0], "one waits for all");
    // By another process: this one learns it from the store.
    assert_eq!(watched.inner.settle(&lease, &complete(b"answer", SECOND * 60)).await.unwrap(), SettleOutcome::Applied);
    for (back, claim) in join_tasks(crowd).await {
        assert_eq!(back, SECOND, "an answer that is here lets everybody go at once");
        assert!(matches!(claim, ClaimOutcome::Completed(finished) if finished.record == b"answer"[..]));
    }
    assert_eq!(watched.calls(), [1, 1, 1, 0], "one wait and one look for ten thousand waiters and their claims");
}

#[tokio::test(start_paused = true)]
async fn after_a_release_they_go_in_groups() {
    let (watched, near, lease) = claim_held().await;
    let crowd: Vec<_> = (0..WAITER_COUNT).map(|_| spawn_waiter(&near, &lease, SECOND * 60)).collect();
    sleep(SECOND).await;
    assert_eq!(watched.inner.settle(&lease, &Settlement::Release).await.unwrap(), SettleOutcome::Applied);
    let mut backs: Vec<Duration> = Vec::new();
    let mut granted = 0;
    for (back, claim) in join_tasks(crowd).await {
        backs.push(back);
        granted += usize::from(matches!(claim, ClaimOutcome::Granted(_)));
    }
    assert_eq!(granted, 1);
    backs.sort_unstable();
    assert_eq!(backs[0], SECOND, "the first go at once");
    assert!(*backs.last().unwrap() <= SECOND * 2, "the last is back after {:?}", backs.last());
    let busiest = backs.chunk_by(|a, b| a == b).map(<[_]>::len).max().unwrap();
    assert!(busiest <= 130, "{busiest} asked the store at the same time");
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_is_dropped_or_gives_up_hands_over() {
    let (watched, near, lease) = claim_held().await;
    let leader = spawn_waiter(&near, &lease, SECOND * 60);
    sleep(SECOND).await;
    let gives_up = spawn_waiter(&near, &lease, SECOND * 5);
    sleep(SECOND).await;
    let stays = spawn_waiter(&near, &lease, SECOND * 60);
    sleep(SECOND).await;
    assert_eq!(watched.calls()[1], 1);
    leader.abort();
    sleep(SECOND).await;
    assert_eq!(watched.calls()[1], 2, "the next one leads");
    let (back, claim) = gives_up.await.unwrap();
    assert_eq!(back, SECOND * 5, "its own limit counts");
    assert!(matches!(claim, ClaimOutcome::InProgress(_)));
    sleep(SECOND).await;
    assert_eq!(watched.calls()[1], 3, "and the one after it");
    assert_eq!(watched.inner.settle(&lease, &complete(b"answer", SECOND * 60)).await.unwrap(), SettleOutcome::Applied);
    let (back, claim) = stays.await.unwrap();
    assert_eq!(back, SECOND * 5);
    assert!(matches!(claim, ClaimOutcome::Completed(_)));
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_is_dropped_while_it_looks_hands_over() {
    let (watched, near, lease) = claim_held().await;
    let leader = spawn_waiter(&near, &lease, SECOND * 60);
    sleep(SECOND).await;
    let others: Vec<_> = (0..10).map(|_| spawn_waiter(&near, &lease, SECOND * 60)).collect();
    sleep(SECOND).await;
    watched.inner.delay(CallFilter::All, SECOND * 10, Duration::ZERO);
    // At the store itself: what is delayed are the calls of this process.
    assert_eq!(
        watched.inner.inner().settle(&lease, &complete(b"answer", SECOND * 60)).await.unwrap(),
        SettleOutcome::Applied
    );
    sleep(SECOND).await;
    assert_eq!(watched.calls()[2], 1, "it looks");
    leader.abort();
    watched.inner.heal();
    for (_, claim) in join_tasks(others).await {
        assert!(matches!(claim, ClaimOutcome::Completed(_)));
    }
}

#[tokio::test(start_paused = true)]
async fn everybody_keeps_its_own_limit() {
    let (watched, near, lease) = claim_held().await;
    let limits: Vec<_> = (1..=30).map(|nth| SECOND * nth).collect();
    let waiters = limits.iter().rev().map(|limit| spawn_waiter(&near, &lease, *limit)).collect();
    let backs: Vec<_> = join_tasks(waiters).await.into_iter().rev().map(|(back, _)| back).collect();
    assert_eq!(backs, limits);
    assert_eq!(watched.calls()[1], 1, "the one that waits longest came first and led");
}

#[tokio::test(start_paused = true)]
async fn who_saw_another_holder_is_back_at_once() {
    let (_, near, lease) = claim_held().await;
    let waits = spawn_waiter(&near, &lease, SECOND * 60);
    sleep(SECOND).await;
    let (back, _) = spawn_waiter(&near, &Lease { fence: Fence(7), ..lease.clone() }, SECOND * 60).await.unwrap();
    assert_eq!(back, Duration::ZERO);
    sleep(SECOND).await;
    assert!(!waits.is_finished(), "and disturbs nobody");
    waits.abort();
}

#[tokio::test(start_paused = true)]
async fn a_store_that_fails_lets_the_others_go_in_groups() {
    let (watched, near, lease) = claim_held().await;
    // The call hangs for a while, then fails.
    watched.inner.delay(CallFilter::All, SECOND, Duration::ZERO);
    watched.inner.inner().fail(CallFilter::All, ErrorKind::NotApplied);
    let at = lease.request.address;
    let waits = (0..500).map(|_| {
        let near = near.clone();
        tokio::spawn(async move { near.wait(&at, lease.fence, SECOND * 60).await.is_err() })
    });
    let failed = join_tasks(waits.collect()).await.into_iter().filter(|failed| *failed).count();
    let waits = watched.calls()[1];
    assert_eq!((failed, waits), (1, 1), "one tried for all, and was told of it");
}
