//! Seeds that must be explained, and worlds that cannot keep the promise.

use std::ops::Range;

use ibid::policy::OnUnknown;
use ibid_histories::event::{HistoryEvent, RequestResult};
use ibid_simulation::world::{SimulationPlan, simulate};

// Two tests, for two cores.
#[test]
fn every_history_is_explained() {
    assert_explained(0..1_000);
}

#[test]
fn every_other_history_is_explained() {
    assert_explained(1_000..2_000);
}

fn assert_explained(seeds: Range<u64>) {
    let (mut answers, mut unknown, mut faults) = (0, 0, 0);
    for seed in seeds {
        let result = simulate(&SimulationPlan::new(seed));
        assert!(result.verdict.rejected.is_empty(), "seed {seed}: {:?}", result.verdict.rejected);
        let returned = |wanted: fn(&RequestResult) -> bool| {
            let is_wanted =
                |event: &&HistoryEvent| matches!(event, HistoryEvent::Return { result, .. } if wanted(result));
            result.history.iter().filter(is_wanted).count()
        };
        answers += returned(|result| matches!(result, RequestResult::Answer { .. }));
        unknown += returned(|result| matches!(result, RequestResult::OutcomeUnknown));
        faults += result.faults;
    }
    // The worlds show something.
    assert!(
        answers > 1_000 && unknown > 100 && faults > 1_000,
        "{answers} answers, {unknown} unknown, {faults} faults"
    );
}

#[test]
fn a_seed_gives_the_same_history_every_time() {
    for seed in [3, 17, 4711] {
        let (first, second) = (simulate(&SimulationPlan::new(seed)), simulate(&SimulationPlan::new(seed)));
        assert_eq!(first.history, second.history, "seed {seed}");
    }
}

/// Worlds that must be rejected: otherwise the explained ones show nothing.
#[test]
fn worlds_that_cannot_keep_the_promise_are_rejected() {
    let separate = |seed| SimulationPlan { has_separate_stores: true, ..SimulationPlan::new(seed) };
    let retrying = |seed| SimulationPlan { on_unknown: OnUnknown::Retry, ..SimulationPlan::new(seed) };
    let forgetful = |seed| SimulationPlan { can_fail_over: true, ..SimulationPlan::new(seed) };
    let is_rejected = |plan: SimulationPlan| !simulate(&plan).verdict.rejected.is_empty();
    assert!((0..20).any(|seed| is_rejected(separate(seed))), "each gateway with its own store");
    assert!((0..50).any(|seed| is_rejected(retrying(seed))), "unknown outcomes run again");
    assert!((0..50).any(|seed| is_rejected(forgetful(seed))), "a failover forgets");
}
