//! `count`: see [`USAGE`].

use std::{
    alloc::System,
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use ibid_count::{
    budget, json_body, measure,
    operations::{MODES, fingerprints, hash_bodies, sha_implementation},
    sorted_json_body,
};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

const USAGE: &str = "\
count MODE N                         runs an operation N times; prints its allocations and the bytes allocated
count table [OPTION...]              counts all operations exactly (needs valgrind)
    --operations N                   so many of each (768)
    --rows TEXT                      only rows whose name contains it
    --metrics PROGRAM                also first requests of count-metrics, which has no budget
    --check FILE                     fails if a figure exceeds its budget in FILE
    --write-budgets FILE             makes the figures the budgets
count ratios                         fingerprints against plain SHA-256 by the clock, in alternating batches
count sha                            how SHA-256 is computed where it runs
";

/// Of each operation, unless `--operations` says otherwise: a multiple of the keys that replays take turns with.
const OPERATIONS: u64 = 768;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<_> = args.iter().map(String::as_str).collect();
    let done = match args[..] {
        ["ratios"] => {
            print_ratios();
            Ok(())
        }
        ["sha"] => {
            println!("{}", sha_implementation());
            Ok(())
        }
        ["table", ref options @ ..] => TableOptions::parse(options).and_then(|options| print_table(&options)),
        [mode, count] => run(mode, count),
        _ => Err(usage()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("{problem}");
            ExitCode::FAILURE
        }
    }
}

fn usage() -> String {
    let modes: Vec<_> = MODES.iter().map(|(name, _)| *name).collect();
    format!("{USAGE}modes: {}", modes.join(" "))
}

fn run(mode: &str, count: &str) -> Result<(), String> {
    let (_, run) = MODES.iter().find(|(name, _)| *name == mode).ok_or_else(usage)?;
    let count = count.parse().map_err(|_| usage())?;
    let region = Region::new(ALLOCATOR);
    run(count);
    let change = region.change();
    println!("{} {}", change.allocations + change.reallocations, change.bytes_allocated);
    Ok(())
}

struct TableOptions {
    operations: u64,
    rows: String,
    metrics: Option<PathBuf>,
    check: Option<PathBuf>,
    write: Option<PathBuf>,
}

impl TableOptions {
    fn parse(options: &[&str]) -> Result<Self, String> {
        let mut parsed = Self { operations: OPERATIONS, rows: String::new(), metrics: None, check: None, write: None };
        for option in options.chunks(2) {
            match *option {
                ["--operations", count] => parsed.operations = count.parse().map_err(|_| usage())?,
                ["--rows", text] => parsed.rows = text.to_owned(),
                ["--metrics", program] => parsed.metrics = Some(program.into()),
                ["--check", file] => parsed.check = Some(file.into()),
                ["--write-budgets", file] => parsed.write = Some(file.into()),
                _ => return Err(usage()),
            }
        }
        if parsed.operations == 0 { Err(usage()) } else { Ok(parsed) }
    }
}

fn print_table(options: &TableOptions) -> Result<(), String> {
    let program = std::env::current_exe().map_err(|why| format!("this program's own path: {why}"))?;
    let rows = measure::count_rows(&program, options.metrics.as_deref(), &options.rows, options.operations)?;
    println!(
        "Per operation (300-byte JSON request and answer, memory store, ietf policy)\n\n{}",
        measure::table(&rows)
    );
    println!("Counted under valgrind, which has SHA-256 computed in software. System calls count as nothing.");
    let named = |path: &Path, why: &dyn std::fmt::Display| format!("{}: {why}", path.display());
    if let Some(path) = &options.write {
        fs::write(path, budget::write(&rows)).map_err(|why| named(path, &why))?;
        println!("{}: written", path.display());
    }
    let Some(path) = &options.check else { return Ok(()) };
    let budgets = budget::parse(&fs::read_to_string(path).map_err(|why| named(path, &why))?)?;
    budget::improved(&rows, &budgets).iter().for_each(|line| println!("{line}"));
    match budget::exceeded(&rows, &budgets) {
        lines if lines.is_empty() => {
            println!("All figures keep their budgets.");
            Ok(())
        }
        lines => Err(lines.join("\n")),
    }
}

/// The fastest of many short batches, taken in turns: what disturbs one disturbs the other.
fn print_ratios() {
    const BATCHES: u32 = 400;
    let batch = Duration::from_micros(500);
    println!(
        "| JSON body | members | fingerprint | SHA-256 ({}) | ratio |\n|---|---|---|---|---|",
        sha_implementation()
    );
    for size in [300, 1024, 16384, 1 << 20] {
        for (members, body) in [("sorted", sorted_json_body(size)), ("not sorted", json_body(size))] {
            let timed = |run: fn(u64, &str), count| {
                let start = Instant::now();
                run(count, &body);
                start.elapsed()
            };
            let enough = |run| (0..).map(|n| 1 << n).find(|count| timed(run, *count) > batch).unwrap_or(1);
            let (prints, shas) = (enough(fingerprints), enough(hash_bodies));
            let (mut print, mut sha) = (Duration::MAX, Duration::MAX);
            for _ in 0..BATCHES {
                print = print.min(timed(fingerprints, prints));
                sha = sha.min(timed(hash_bodies, shas));
            }
            let print = print.as_secs_f64() * 1e9 / prints as f64;
            let sha = sha.as_secs_f64() * 1e9 / shas as f64;
            println!("| {size} B | {members} | {print:.0} ns | {sha:.0} ns | {:.2} |", print / sha);
        }
    }
}
