//! Two stores as one.

use std::{sync::Arc, time::Duration};

use ibid::{
    Notice, Observer, Silent,
    store::{Claim, Memory, Store},
};
use ibid_stores::{
    near::{Copies, Near},
    tiered::{Generations, Mode, Tiered},
};
use ibid_testkit::{
    broken::failing_cases,
    contract,
    property::{Clock, check_histories},
    wrappers::{LosesAnswers, Resending},
};

use parking_lot::Mutex;

use self::two::{Counted, Swapped};
use crate::near::seed;

mod alone;
mod between;
mod simulated;
mod steps;
mod two;

fn tiered(mode: Mode) -> Tiered {
    around(Memory::default(), Memory::default(), mode)
}

fn around(first: impl Store, last: impl Store, mode: Mode) -> Tiered {
    Tiered::new(Arc::new(first), Arc::new(last), mode, Arc::new(Silent), None)
}

/// Every step in `first` goes wrong at some time.
fn on_a_shaky_first(mode: Mode) -> Tiered {
    let swapped = Arc::new(Swapped::default());
    let first = LosesAnswers::new(swapped.clone(), seed(), 4);
    let generations = Arc::new(Counted::new(&swapped));
    Tiered::new(Arc::new(first), Arc::new(Memory::default()), mode, Arc::new(Silent), Some(generations))
}

ibid_testkit::contract_tests!(strict, async { Arc::new(tiered(Mode::Strict)) as Arc<dyn Store> });

ibid_testkit::contract_tests!(loose, async { Arc::new(tiered(Mode::Loose)) as Arc<dyn Store> });

ibid_testkit::contract_tests!(strict_losing_answers, async {
    Arc::new(Resending::new(LosesAnswers::new(tiered(Mode::Strict), seed(), 3))) as Arc<dyn Store>
});

ibid_testkit::contract_tests!(loose_losing_answers, async {
    Arc::new(Resending::new(LosesAnswers::new(tiered(Mode::Loose), seed(), 3))) as Arc<dyn Store>
});

ibid_testkit::contract_tests!(near_around_strict, async {
    Arc::new(Near::new(Arc::new(tiered(Mode::Strict)), Copies::default())) as Arc<dyn Store>
});

ibid_testkit::contract_tests!(near_around_loose, async {
    Arc::new(Near::new(Arc::new(tiered(Mode::Loose)), Copies::default())) as Arc<dyn Store>
});

ibid_testkit::contract_tests!(near_around_loose_losing_answers, async {
    let near = Near::new(Arc::new(tiered(Mode::Loose)), Copies::default());
    Arc::new(Resending::new(LosesAnswers::new(near, seed(), 3))) as Arc<dyn Store>
});

#[tokio::test]
async fn one_store_serves_all_cases_at_the_same_time() {
    for mode in [Mode::Strict, Mode::Loose] {
        assert_eq!(failing_cases(Arc::new(tiered(mode)), Duration::from_secs(60)).await, [""; 0], "{mode:?}");
    }
}

/// What is released, forgotten or resolved in `last` but cannot be told to `first` costs the key its lease there: who comes
/// at once finds it busy, or unknown, and is not granted. So cases that end something in such a way need a `first` that hears it.
fn needs_first_at_once(case: &str) -> bool {
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
    for mode in [Mode::Strict, Mode::Loose] {
        for (name, case) in contract::cases() {
            if !needs_first_at_once(name) {
                println!("{mode:?} {name}");
                case(Arc::new(Resending::new(on_a_shaky_first(mode)))).await;
                ran += 1;
            }
        }
    }
    assert!(ran > 100, "only {ran} cases ran");
}

#[tokio::test]
async fn sweeps_count_what_they_remove() {
    for mode in [Mode::Strict, Mode::Loose] {
        contract::operating::sweeps_count_what_they_remove(&tiered(mode)).await;
    }
}

#[test]
fn it_answers_as_the_model_says() {
    for mode in [Mode::Strict, Mode::Loose] {
        check_histories(2000, Clock::Paused, async || Arc::new(tiered(mode)) as Arc<dyn Store>);
        check_histories(200, Clock::Real, async || Arc::new(tiered(mode)) as Arc<dyn Store>);
    }
}
