//! Seeds that must be explained, and worlds that cannot keep the promise.

use std::ops::Range;

use ibid::policy::OnUnknown;
use ibid_histories::event::{HistoryEvent, RequestResult};
use ibid_simulation::{
    backend::{RedisPlan, StorePlan},
    redis::database::BrokenRule,
    world::{SimulationPlan, simulate},
};

#[test]
fn every_history_on_the_contract_is_explained() {
    assert_explained(SimulationPlan::new, 0..700);
}

#[test]
fn every_history_on_two_stores_is_explained() {
    assert_explained(SimulationPlan::tiered, 1_000..1_300);
}

#[test]
fn every_history_on_redis_is_explained() {
    assert_explained(SimulationPlan::redis, 2_000..2_150);
}

#[test]
fn every_history_on_redis_that_fails_over_to_what_writes_waited_for_is_explained() {
    assert_explained(SimulationPlan::redis_with_replica, 3_000..3_100);
}

#[test]
fn every_history_on_postgres_is_explained() {
    assert_explained(SimulationPlan::postgres, 5_000..5_200);
}

#[test]
fn every_history_on_a_redis_that_forgets_in_front_of_postgres_is_explained() {
    assert_explained(SimulationPlan::redis_in_front, 4_000..4_100);
}

fn assert_explained(plan: fn(u64) -> SimulationPlan, seeds: Range<u64>) {
    let count = seeds.end - seeds.start;
    let (mut answers, mut unknown, mut faults) = (0, 0, 0);
    for seed in seeds {
        let result = simulate(&plan(seed));
        assert!(result.verdict.rejected.is_empty(), "seed {seed}: {:?}", result.verdict.rejected);
        let returned = |wanted: fn(&RequestResult) -> bool| {
            let is_wanted =
                |event: &&HistoryEvent| matches!(event, HistoryEvent::Return { result, .. } if wanted(result));
            result.history.iter().filter(is_wanted).count() as u64
        };
        answers += returned(|result| matches!(result, RequestResult::Answer { .. }));
        unknown += returned(|result| matches!(result, RequestResult::OutcomeUnknown));
        faults += result.faults as u64;
    }
    // The worlds show something.
    let summary = format!("{answers} answers, {unknown} unknown, {faults} faults in {count} worlds");
    assert!(answers > 20 * count && unknown > count && faults > 5 * count, "{summary}");
}

#[test]
fn a_seed_gives_the_same_history_every_time() {
    let plans = [
        SimulationPlan::new,
        SimulationPlan::tiered,
        SimulationPlan::redis,
        SimulationPlan::redis_with_replica,
        SimulationPlan::postgres,
        SimulationPlan::redis_in_front,
    ];
    for seed in [3, 17, 64] {
        for plan in plans {
            let (first, second) = (simulate(&plan(seed)).history, simulate(&plan(seed)).history);
            let differs_at = first.iter().zip(&second).position(|(first, second)| first != second);
            assert_eq!(differs_at, None, "seed {seed} on {:?}", plan(seed).store);
            assert_eq!(first.len(), second.len(), "seed {seed} on {:?}", plan(seed).store);
        }
    }
}

/// Worlds that must be rejected: otherwise the explained ones show nothing.
#[test]
fn worlds_that_cannot_keep_the_promise_are_rejected() {
    let separate = |seed| SimulationPlan { has_separate_stores: true, ..SimulationPlan::new(seed) };
    let retrying = |seed| SimulationPlan { on_unknown: OnUnknown::Retry, ..SimulationPlan::new(seed) };
    let forgetful = |seed| SimulationPlan { can_fail_over: true, ..SimulationPlan::new(seed) };
    assert!((0..20).any(|seed| is_rejected(&separate(seed))), "each gateway with its own store");
    assert!((0..50).any(|seed| is_rejected(&retrying(seed))), "unknown outcomes run again");
    assert!((0..50).any(|seed| is_rejected(&forgetful(seed))), "a failover forgets");
}

#[test]
fn a_server_that_forgets_or_breaks_a_rule_is_rejected() {
    let forgetful = |seed| SimulationPlan { can_fail_over: true, ..SimulationPlan::postgres(seed) };
    assert!((0..50).any(|seed| is_rejected(&forgetful(seed))), "a restart forgets what was committed");
    let forgetful = |seed| SimulationPlan { can_fail_over: true, ..SimulationPlan::redis(seed) };
    assert!((0..50).any(|seed| is_rejected(&forgetful(seed))), "a failover forgets, and nobody waits for the replica");
    for rule in [BrokenRule::IgnoresNx, BrokenRule::DropsIfeq, BrokenRule::ForgetsEarly] {
        let broken = |seed| {
            let redis = RedisPlan { broken: Some(rule), has_compare_and_set: true, ..RedisPlan::new(seed) };
            SimulationPlan { store: StorePlan::Redis(redis), ..SimulationPlan::redis(seed) }
        };
        assert!((0..50).any(|seed| is_rejected(&broken(seed))), "{rule:?}");
    }
}

fn is_rejected(plan: &SimulationPlan) -> bool {
    !simulate(plan).verdict.rejected.is_empty()
}
