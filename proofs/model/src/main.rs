//! Explores the larger worlds, then every red variant, and prints what was found. Fails if anything is not as it must be.
//!
//! `ibid-model PART` explores only the worlds whose name contains PART; `ibid-model trace PART` prints the steps of the red
//! variants' counterexamples.

use std::{env, process::ExitCode, time::Instant};

use ibid_model::{red, setups};

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let (trace, part) = match arguments.as_slice() {
        [] => (false, ""),
        [first] if first == "trace" => (true, ""),
        [part] => (false, part.as_str()),
        [first, part, ..] => (first == "trace", part.as_str()),
    };
    let mut good = true;
    if !trace {
        println!("{:<46} {:>12} {:>6} {:>11} {:>8}  result", "world", "states", "depth", "properties", "seconds");
        for world in
            setups::small_setups().into_iter().chain(setups::large_setups()).filter(|world| world.name.contains(part))
        {
            let started = Instant::now();
            let found = setups::explore_setup(&world);
            let result = if found.violations.is_empty() { "holds" } else { "WRONG" };
            let seconds = started.elapsed().as_secs_f32();
            println!(
                "{:<46} {:>12} {:>6} {:>11} {seconds:>8.1}  {result}",
                found.name, found.states, found.depth, found.properties
            );
            for wrong in &found.violations {
                println!("  {wrong}");
            }
            good &= found.violations.is_empty();
        }
        println!();
    }
    println!("{:<76} {:>8} {:>6}  breaks", "left out", "states", "steps");
    for variant in red::all_mutants().into_iter().filter(|variant| variant.name.contains(part)) {
        let (states, steps) = setups::counterexample(&variant, None);
        let length = steps.as_ref().map_or("NONE".to_owned(), |steps| steps.len().to_string());
        println!("{:<76} {states:>8} {length:>6}  {}", variant.name, variant.broken_property);
        for step in steps.iter().flatten().filter(|_| trace) {
            println!("    {step}");
        }
        good &= steps.is_some();
    }
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
