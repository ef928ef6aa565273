//! The small worlds hold, and every red variant breaks the property that it must.
#![allow(missing_docs, clippy::print_stdout)]

use std::collections::HashSet;

use ibid_model::{ModelSetup, guard, red, redis, setups};

fn holds(part: &str) {
    let chosen: Vec<ModelSetup> =
        setups::small_setups().into_iter().filter(|world| world.name.contains(part)).collect();
    assert!(!chosen.is_empty(), "no world is called {part}");
    for world in chosen {
        let found = setups::explore_setup(&world);
        println!("{}: {} states, {} properties", found.name, found.states, found.properties);
        assert!(found.violations.is_empty(), "{}:\n{}", found.name, found.violations.join("\n"));
        assert!(found.states > 10_000, "{}: only {} states", found.name, found.states);
    }
}

#[test]
fn one_store_keeps_its_promise() {
    holds("one store");
}

#[test]
fn a_strict_tiered_store_keeps_the_promise_of_its_last() {
    holds("strict");
}

#[test]
fn a_loose_tiered_store_starts_twice_only_in_its_windows() {
    holds("loose");
}

#[test]
fn every_rule_left_out_breaks_its_property() {
    let variants = red::all_mutants();
    let mut rules = HashSet::new();
    for variant in &variants {
        let (states, steps) = setups::counterexample(variant, None);
        let Some(steps) = steps else {
            panic!("\"{}\" must break \"{}\", but {states} states show nothing", variant.name, variant.broken_property)
        };
        println!("{}: {} steps to break \"{}\", {states} states", variant.name, steps.len(), variant.broken_property);
        assert!(rules.insert(variant.setup.rules.0), "{}: this rule is left out twice", variant.name);
    }
    assert_eq!(rules.len(), red::RULE_COUNT, "a rule without a red variant");
}

#[test]
fn the_redis_store_keeps_its_own_rules() {
    let (states, wrong) = redis::explore(redis::RedisModel::default());
    println!("{states} states");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(states > 10_000, "only {states} states");
}

#[test]
fn every_rule_of_the_redis_store_left_out_breaks_its_property() {
    for (name, rule, broken) in redis::RED_VARIANTS {
        let (states, wrong) = redis::explore(redis::RedisModel { left_out: Some(rule) });
        println!("{name}: {states} states, {}", wrong.first().map_or("", String::as_str));
        let broke = wrong.iter().any(|line| line.starts_with(&format!("broken: {broken}:")));
        assert!(broke, "\"{name}\" must break \"{broken}\": {wrong:?}");
    }
}

#[test]
fn the_intent_guard_lets_one_of_two_keys_run() {
    let (states, wrong) = guard::explore(guard::GuardModel::default());
    println!("{states} states");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(states > 10_000, "only {states} states");
}

#[test]
fn every_rule_of_the_intent_guard_left_out_breaks_its_property() {
    for (name, rule, broken) in guard::RED_GUARDS {
        let (states, wrong) = guard::explore(guard::GuardModel { left_out: Some(rule) });
        println!("{name}: {states} states, {}", wrong.first().map_or("", String::as_str));
        let broke = wrong.iter().any(|line| line.starts_with(&format!("broken: {broken}:")));
        assert!(broke, "\"{name}\" must break \"{broken}\": {wrong:?}");
    }
}

/// The counterexample is of the rule: with the rule, nothing as short breaks the property. That nothing longer does either
/// is what the worlds show.
#[test]
fn with_the_rule_nothing_as_short_breaks_it() {
    for mut variant in red::all_mutants() {
        let (_, steps) = setups::counterexample(&variant, None);
        let length = steps.map_or(0, |steps| steps.len());
        variant.setup.rules = red::ModelRules::default();
        let (states, steps) = setups::counterexample(&variant, Some(length + 1));
        assert!(
            steps.is_none(),
            "\"{}\" breaks without leaving anything out ({states} states):\n{}",
            variant.broken_property,
            steps.unwrap_or_default().join("\n")
        );
    }
}
