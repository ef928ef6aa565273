//! The small worlds hold, and every red variant breaks the property that it must.
#![allow(missing_docs, clippy::print_stdout)]

use std::collections::HashSet;

use ibid_model::{World, red, worlds};

fn holds(part: &str) {
    let chosen: Vec<World> = worlds::small().into_iter().filter(|world| world.name.contains(part)).collect();
    assert!(!chosen.is_empty(), "no world is called {part}");
    for world in chosen {
        let found = worlds::explore(&world);
        println!("{}: {} states, {} properties", found.name, found.states, found.properties);
        assert!(found.wrong.is_empty(), "{}:\n{}", found.name, found.wrong.join("\n"));
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
    let variants = red::variants();
    let mut rules = HashSet::new();
    for variant in &variants {
        let (states, steps) = worlds::counterexample(variant, None);
        let Some(steps) = steps else {
            panic!("\"{}\" must break \"{}\", but {states} states show nothing", variant.name, variant.breaks)
        };
        println!("{}: {} steps to break \"{}\", {states} states", variant.name, steps.len(), variant.breaks);
        assert!(rules.insert(variant.world.rules.0), "{}: this rule is left out twice", variant.name);
    }
    assert_eq!(rules.len(), red::RULES, "a rule without a red variant");
}

/// The counterexample is of the rule: with the rule, nothing as short breaks the property. That nothing longer does either
/// is what the worlds show.
#[test]
fn with_the_rule_nothing_as_short_breaks_it() {
    for mut variant in red::variants() {
        let (_, steps) = worlds::counterexample(&variant, None);
        let length = steps.map_or(0, |steps| steps.len());
        variant.world.rules = red::Rules::default();
        let (states, steps) = worlds::counterexample(&variant, Some(length + 1));
        assert!(
            steps.is_none(),
            "\"{}\" breaks without leaving anything out ({states} states):\n{}",
            variant.breaks,
            steps.unwrap_or_default().join("\n")
        );
    }
}
