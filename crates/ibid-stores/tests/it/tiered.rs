//! Two stores as one.

use std::{sync::Arc, time::Duration};

use ibid::{
    Observer,
    observe::{EngineEvent, NoopObserver},
    store::{ClaimOutcome, Memory, Store},
};
use ibid_stores::{
    local_cache::{AnswerCache, LocalCache},
    tiered::{GenerationCounter, TieredMode, TieredStore},
};
use ibid_testkit::{
    broken::failing_cases,
    contract,
    property::{HistoryClock, check_histories},
    wrappers::{LossyStore, RetryingStore, losing_answers},
};

use parking_lot::Mutex;

use self::common::{LosableStore, TestGenerations};
use crate::local_cache::seed;

mod claim_table;
mod common;
mod front_only;
mod front_only_takeovers;
mod simulation;

fn tiered_store(mode: TieredMode) -> TieredStore {
    tiered_around(Memory::default(), Memory::default(), mode)
}

fn tiered_around(first: impl Store, last: impl Store, mode: TieredMode) -> TieredStore {
    TieredStore::new(Arc::new(first), Arc::new(last), mode, Arc::new(NoopObserver), None)
}

/// Every step in `first` goes wrong at some time.
fn tiered_on_lossy_front(mode: TieredMode) -> TieredStore {
    let swapped = Arc::new(LosableStore::default());
    let first = LossyStore::new(swapped.clone(), seed(), 4);
    let generations = Arc::new(TestGenerations::new(&swapped));
    TieredStore::new(Arc::new(first), Arc::new(Memory::default()), mode, Arc::new(NoopObserver), Some(generations))
}

ibid_testkit::contract_tests!(strict, async { tiered_store(TieredMode::Strict) });

ibid_testkit::contract_tests!(loose, async { tiered_store(TieredMode::Loose) });

ibid_testkit::contract_tests!(strict_losing_answers, async { losing_answers(tiered_store(TieredMode::Strict)) });

ibid_testkit::contract_tests!(loose_losing_answers, async { losing_answers(tiered_store(TieredMode::Loose)) });

ibid_testkit::contract_tests!(near_around_strict, async {
    LocalCache::new(Arc::new(tiered_store(TieredMode::Strict)), AnswerCache::default())
});

ibid_testkit::contract_tests!(near_around_loose, async {
    LocalCache::new(Arc::new(tiered_store(TieredMode::Loose)), AnswerCache::default())
});

ibid_testkit::contract_tests!(near_around_loose_losing_answers, async {
    let near = LocalCache::new(Arc::new(tiered_store(TieredMode::Loose)), AnswerCache::default());
    losing_answers(near)
});

#[tokio::test]
async fn one_store_serves_all_cases_at_the_same_time() {
    for mode in [TieredMode::Strict, TieredMode::Loose] {
        assert_eq!(failing_cases(Arc::new(tiered_store(mode)), Duration::from_secs(60)).await, [""; 0], "{mode:?}");
    }
}

/// What is released, forgotten or resolved in `last` but cannot be told to `first` costs the key its lease there: who comes
/// at once finds it busy, or unknown, and is not granted. So cases that end something in such a way need a `first` that hears it.
fn needs_front_at_once(case: &str) -> bool {
    const OTHERS: [&str; 6] = [
        "a_refused_token_is_granted_once_it_is_free",
        "fences_strictly_grow_over_a_long_history",
        "a_holder_is_put_back_where_somebody_else_came_and_went",
        "waiters_of_the_next_holder_are_not_lost",
        "wait_returns_soon_after_the_holder_settles",
        "resolve_need_not_wait_for_retry_in",
    ];
    ["release", "spent", "forget", "resolve_as"].iter().any(|word| case.contains(word)) || OTHERS.contains(&case)
}

#[tokio::test]
async fn a_first_that_loses_answers_does_not_change_what_is_decided() {
    let mut ran = 0;
    for mode in [TieredMode::Strict, TieredMode::Loose] {
        for (name, case) in contract::cases() {
            if !needs_front_at_once(name) {
                println!("{mode:?} {name}");
                case(Arc::new(RetryingStore::new(tiered_on_lossy_front(mode)))).await;
                ran += 1;
            }
        }
    }
    assert!(ran > 100, "only {ran} cases ran");
}

#[tokio::test]
async fn sweeps_count_what_they_remove() {
    for mode in [TieredMode::Strict, TieredMode::Loose] {
        contract::admin::sweeps_count_what_they_remove(&tiered_store(mode)).await;
    }
}

#[test]
fn it_answers_as_the_model_says() {
    for mode in [TieredMode::Strict, TieredMode::Loose] {
        check_histories(2000, HistoryClock::Paused, async || tiered_store(mode));
        check_histories(200, HistoryClock::Real, async || tiered_store(mode));
    }
}
