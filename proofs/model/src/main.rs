//! Explores the larger worlds, then every red variant, and prints what was found. Fails if anything is not as it must be.
//!
//! `ibid-model PART` explores only the worlds whose name contains PART; `ibid-model trace PART` prints the steps of the red
//! variants' counterexamples.

use std::{env, process::ExitCode, time::Instant};

use ibid_model::{red, worlds};

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
        for world in worlds::small().into_iter().chain(worlds::large()).filter(|world| world.name.contains(part)) {
            let started = Instant::now();
            let found = worlds::explore(&world);
            let open = worlds::open().contains(&world.name);
            let result = match (found.wrong.is_empty(), open) {
                (true, false) => "holds",
                (true, true) => "HOLDS, no longer open",
                (false, false) => "WRONG",
                (false, true) => "open",
            };
            let seconds = started.elapsed().as_secs_f32();
            println!(
                "{:<46} {:>12} {:>6} {:>11} {seconds:>8.1}  {result}",
                found.name, found.states, found.depth, found.properties
            );
            for wrong in &found.wrong {
                println!("  {wrong}");
            }
            good &= found.wrong.is_empty() != open;
        }
        println!();
    }
    println!("{:<76} {:>8} {:>6}  breaks", "left out", "states", "steps");
    for variant in red::variants().into_iter().filter(|variant| variant.name.contains(part)) {
        let (states, steps) = worlds::counterexample(&variant, None);
        let length = steps.as_ref().map_or("NONE".to_owned(), |steps| steps.len().to_string());
        println!("{:<76} {states:>8} {length:>6}  {}", variant.name, variant.breaks);
        for step in steps.iter().flatten().filter(|_| trace) {
            println!("    {step}");
        }
        good &= steps.is_some();
    }
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
