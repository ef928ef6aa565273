//! Simulates seeds until one fails, and says how many did not.

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::Parser;
use ibid_histories::event::write_history;
use ibid_simulation::world::{SimulationPlan, simulate};

/// Runs engine and layer on simulated time, network and store, once per seed.
#[derive(Debug, Parser)]
#[command(after_help = "Exit codes: 0 every history is explained, 1 one is not; its seed is printed.")]
struct SimulationArgs {
    /// The first seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How many seeds; 1 prints its history.
    #[arg(long, default_value_t = 1000)]
    seeds: u64,
    /// The store: contract, tiered, redis, redis-with-replica, postgres or redis-in-front. By default one after the other.
    #[arg(long, value_parser = parse_plan)]
    store: Option<PlanOfSeed>,
    /// Instead: as many seeds as fit into so many minutes.
    #[arg(long)]
    minutes: Option<u64>,
}

type PlanOfSeed = fn(u64) -> SimulationPlan;

fn parse_plan(store: &str) -> Result<PlanOfSeed, String> {
    Ok(match store {
        "contract" => SimulationPlan::new,
        "tiered" => SimulationPlan::tiered,
        "redis" => SimulationPlan::redis,
        "redis-with-replica" => SimulationPlan::redis_with_replica,
        "postgres" => SimulationPlan::postgres,
        "redis-in-front" => SimulationPlan::redis_in_front,
        _ => return Err(format!("{store:?} is none of these")),
    })
}

fn main() -> ExitCode {
    let args = SimulationArgs::parse();
    let plan = args.store.unwrap_or(SimulationPlan::any);
    let begun = Instant::now();
    let end = args.minutes.map(|minutes| begun + Duration::from_secs(minutes * 60));
    let (mut events, mut faults, mut lost_answers, mut seed) = (0, 0, 0, args.seed);
    while end.map_or(seed - args.seed < args.seeds, |end| Instant::now() < end) {
        let result = simulate(&plan(seed));
        if args.seeds == 1 {
            let _ = write_history(&result.history, std::io::stdout());
        }
        if let Some(wrong) = result.verdict.rejected.first() {
            eprintln!("seed {seed}: {}: {}", wrong.key, wrong.reason);
            return ExitCode::FAILURE;
        }
        events += result.verdict.events;
        faults += result.faults;
        lost_answers += result.lost_answers;
        seed += 1;
    }
    let (count, took) = (seed - args.seed, begun.elapsed().as_secs());
    eprintln!("{count} seeds, {events} requests and executions, {faults} faults, {took} s: every history is explained");
    if lost_answers > 0 {
        eprintln!("{lost_answers} answers were lost by failovers, as docs/redis.md says of wait_replicas");
    }
    ExitCode::SUCCESS
}
