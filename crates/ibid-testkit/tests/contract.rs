//! The contract on the stores that need no server, and the contract itself on stores that must fail it.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use futures_util::{StreamExt, stream};
use ibid::store::{
    ClaimOutcome, ClaimRequest, ClaimToken, EntryCounts, ErrorKind, Fence, Fingerprint, Memory, SPENT_TOKEN_TTL,
    SettleOutcome, Settlement, Store, Tags,
};
use ibid_testkit::{
    broken::{BUGS, Bug, FaultyStore, failing_cases},
    contract,
    property::{HistoryClock, check_histories, check_history, histories},
    wrappers::{CallFilter, DelayedStore, FailingStore, LossyStore, RetryingStore, losing_answers},
};
use proptest::{
    strategy::{Strategy, ValueTree},
    test_runner::TestRunner,
};

ibid_testkit::contract_tests!(memory, async { Memory::default() });

ibid_testkit::contract_tests!(memory_in_an_arc, async { Arc::new(Memory::default()) as Arc<dyn Store> });

ibid_testkit::contract_tests!(memory_losing_answers, async { losing_answers(Memory::default()) });

#[tokio::test]
async fn one_memory_serves_all_cases_at_the_same_time() {
    assert_eq!(failing_cases(Arc::new(Memory::default()), Duration::from_secs(60)).await, [""; 0]);
}

#[tokio::test]
async fn memory_sweeps_count_what_they_remove() {
    contract::admin::sweeps_count_what_they_remove(&Memory::default()).await;
}

#[tokio::test]
async fn every_broken_store_fails_the_contract() {
    let began = Instant::now();
    let runs = stream::iter(BUGS).map(|&(bug, catcher)| async move {
        let failing = failing_cases(Arc::new(FaultyStore::new(bug)), Duration::from_secs(20)).await;
        (bug, catcher, failing)
    });
    let runs: Vec<_> = runs.buffer_unordered(9).collect().await;
    for (bug, catcher, failing) in &runs {
        println!("{bug:?}: {} cases fail: {failing:?}", failing.len());
        assert!(failing.contains(catcher), "{bug:?} must be caught by {catcher}, and is by {failing:?}");
    }
    println!("{} broken stores in {:?}", runs.len(), began.elapsed());
}

#[test]
fn memory_answers_as_the_model_says() {
    check_histories(1500, HistoryClock::Paused, async || Memory::default());
    check_histories(200, HistoryClock::Real, async || Memory::default());
}

#[test]
fn memory_losing_answers_answers_as_the_model_says() {
    check_histories(300, HistoryClock::Paused, async || RetryingStore::new(LossyStore::new(Memory::default(), 7, 3)));
}

#[test]
fn histories_find_broken_stores() {
    for bug in [
        Bug::LapsedIsFree,
        Bug::TakeoverIgnoresFence,
        Bug::SettleIgnoresHolder,
        Bug::NeverRestores,
        Bug::ReleasedTakeoverIsFree,
        Bug::TtlCountsFromClaim,
        Bug::FencesRestart,
    ] {
        let check = || check_histories(3000, HistoryClock::Paused, async || FaultyStore::new(bug));
        assert!(catch_unwind(AssertUnwindSafe(check)).is_err(), "{bug:?} answers as the model says");
    }
}

/// Real threads, where the cases of the contract only interleave.
#[test]
fn of_threads_that_claim_and_take_over_one_runs() {
    for _ in 0..50 {
        let store = Memory::default();
        let mut over = None;
        for _ in 0..4 {
            let grants: Vec<_> = thread::scope(|scope| {
                let racers: Vec<_> = (0..4).map(|_| scope.spawn(|| claim(&store, over))).collect();
                racers.into_iter().map(|racer| racer.join().unwrap()).collect()
            });
            let mut grants = grants.into_iter().filter_map(|found| match found {
                ClaimOutcome::Granted(lease) => Some(lease),
                _ => None,
            });
            let lease = grants.next().expect("one of four is granted");
            assert_eq!(grants.next(), None, "only one of four is granted");
            let park = Settlement::Park { ttl: Duration::from_secs(9), retry_in: Duration::ZERO };
            assert_eq!(expect_ready(store.settle(&lease, &park)), SettleOutcome::Applied);
            over = Some(lease.fence);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_spent_token_is_remembered_for_free_for_whatever_its_life_was() {
    let store = Memory::default();
    let short = |over| {
        Arc::new(ClaimRequest { lease: Duration::from_millis(9), ttl: Duration::from_millis(9), ..claim_request(over) })
    };
    let plain = short(None);
    let ClaimOutcome::Granted(lease) = store.claim(&plain).await.unwrap() else { panic!("granted") };
    assert_eq!(store.settle(&lease, &Settlement::Release).await.unwrap(), SettleOutcome::Applied);
    tokio::time::advance(SPENT_TOKEN_TTL - Duration::from_millis(1)).await;
    assert_eq!(store.claim(&plain).await.unwrap(), ClaimOutcome::TokenSpent);

    let ClaimOutcome::Granted(first) = store.claim(&short(None)).await.unwrap() else { panic!("granted") };
    let park = Settlement::Park { ttl: Duration::from_millis(9), retry_in: Duration::ZERO };
    assert_eq!(store.settle(&first, &park).await.unwrap(), SettleOutcome::Applied);
    let takeover = short(Some(first.fence));
    let ClaimOutcome::Granted(second) = store.claim(&takeover).await.unwrap() else { panic!("granted") };
    assert_eq!(store.settle(&second, &Settlement::Release).await.unwrap(), SettleOutcome::Applied);
    tokio::time::advance(SPENT_TOKEN_TTL - Duration::from_millis(1)).await;
    assert_eq!(store.claim(&takeover).await.unwrap(), ClaimOutcome::TokenSpent);
}

#[tokio::test(start_paused = true)]
async fn what_has_expired_takes_up_nothing_after_a_sweep() {
    let store = Memory::default();
    let mut runner = TestRunner::deterministic();
    for _ in 0..200 {
        let history = histories(HistoryClock::Paused).new_tree(&mut runner).unwrap().current();
        check_history(&store, &history, HistoryClock::Paused).await.unwrap();
    }
    tokio::time::advance(Duration::from_secs(1_000_000)).await;
    while store.sweep(10_000).await.unwrap().more {}
    assert_eq!(store.admin().counts().await.unwrap(), EntryCounts::default());
}

#[tokio::test]
async fn a_store_fails_as_it_is_told_until_it_is_healed() {
    let store = FailingStore::new(Memory::default());
    let ask = Arc::new(claim_request(None));
    store.fail(CallFilter::Claim, ErrorKind::NotApplied);
    assert_eq!(store.claim(&ask).await.unwrap_err().kind, ErrorKind::NotApplied);
    assert_eq!(store.get(&ask.address).await.unwrap(), None, "nothing was applied");
    store.lose_answers(CallFilter::Claim);
    assert_eq!(store.claim(&ask).await.unwrap_err().kind, ErrorKind::Ambiguous);
    assert!(matches!(store.get(&ask.address).await.unwrap(), Some(ClaimOutcome::InProgress(_))), "it was applied");
    store.heal();
    let ClaimOutcome::Granted(lease) = store.claim(&ask).await.unwrap() else { panic!("same token, same answer") };
    store.fail(CallFilter::Settle, ErrorKind::Rejected);
    assert_eq!(store.settle(&lease, &Settlement::Release).await.unwrap_err().kind, ErrorKind::Rejected);
    assert_eq!(
        store.extend(&lease, Duration::from_secs(1)).await.unwrap(),
        SettleOutcome::Applied,
        "only settles fail"
    );
    store.fail(CallFilter::All, ErrorKind::NotApplied);
    assert!(store.admin().counts().await.is_err());
    assert!(store.extend(&lease, Duration::from_secs(1)).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn a_store_delays_as_it_is_told() {
    let store = DelayedStore::new(Memory::default());
    let ask = Arc::new(claim_request(None));
    store.delay(CallFilter::Claim, Duration::from_secs(1), Duration::from_secs(2));
    let asked = tokio::time::Instant::now();
    let mut answer = std::pin::pin!(store.claim(&ask));
    assert!(tokio::time::timeout(Duration::from_millis(900), &mut answer).await.is_err());
    assert_eq!(store.get(&ask.address).await.unwrap(), None, "not applied yet");
    assert!(tokio::time::timeout(Duration::from_millis(200), &mut answer).await.is_err());
    assert!(store.get(&ask.address).await.unwrap().is_some(), "applied, not answered yet");
    assert!(matches!(answer.await, Ok(ClaimOutcome::Granted(_))));
    assert_eq!(asked.elapsed().as_secs(), 3);
}

fn claim(store: &Memory, over: Option<Fence>) -> ClaimOutcome {
    expect_ready(store.claim(&Arc::new(claim_request(over))))
}

fn claim_request(over: Option<Fence>) -> ClaimRequest {
    ClaimRequest {
        address: ibid::store::Address([7; 32]),
        token: ClaimToken::mint(),
        fingerprint: Fingerprint::NONE,
        tags: Tags::default(),
        label: bytes::Bytes::new(),
        lease: Duration::from_secs(100),
        ttl: Duration::from_secs(100),
        take_over: over,
    }
}

/// The answer of a store that never has to wait.
fn expect_ready<T: Unpin>(answer: ibid::store::StoreFuture<'_, T>) -> T {
    futures_util::FutureExt::now_or_never(answer).expect("it is ready at once").expect("it does not fail")
}
