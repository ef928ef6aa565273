//! `ibid-bench`: plays the chosen rows and prints one table. See `--help`.

#![allow(clippy::disallowed_methods, reason = "what is tested with may read the environment and block")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use ibid_bench::{
    args::{BenchArgs, HELP},
    gateway_counts, half_load,
    report::BenchReport,
    round_trips, rows, runner,
};
use tokio::{
    runtime::Builder,
    signal::unix::{SignalKind, signal},
};

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(problem) => {
            eprintln!("ibid-bench: {problem}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<ExitCode, String> {
    let program = std::env::current_exe().map_err(|error| format!("this program's own path: {error}"))?;
    let own_bins = program.parent().map(Path::to_path_buf).unwrap_or_default();
    let args = BenchArgs::parse(std::env::args().skip(1), |name| std::env::var_os(name).map(PathBuf::from), own_bins)?;
    if args.help {
        print!("{HELP}");
        return Ok(ExitCode::SUCCESS);
    }
    if args.list {
        rows::BENCHMARKS.iter().flat_map(|scene| scene.rows).for_each(|row| println!("{}", row.name));
        return Ok(ExitCode::SUCCESS);
    }
    // The load generator has threads of its own.
    let runtime = Builder::new_current_thread().enable_all().build().map_err(|error| error.to_string())?;
    if args.gateway_counts {
        print!("{}", runtime.block_on(until_terminated(gateway_counts::table(&args)))?);
        return Ok(ExitCode::SUCCESS);
    }
    if args.half_load {
        print!("{}", runtime.block_on(until_terminated(half_load::table(&args)))?);
        return Ok(ExitCode::SUCCESS);
    }
    let report = runtime.block_on(until_terminated(run_benchmarks(&args)))?;
    print!("{}", report.table());
    if let Some(file) = &args.json {
        fs::write(file, report.json()).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    Ok(match (report.any_invalid(), args.strict && report.any_missed()) {
        (true, _) => ExitCode::FAILURE,
        (false, true) => ExitCode::from(2),
        (false, false) => ExitCode::SUCCESS,
    })
}

async fn run_benchmarks(args: &BenchArgs) -> Result<BenchReport, String> {
    let chosen = rows::select(&args.rows)?;
    runner::check_programs(args, &chosen)?;
    let (stores, gateways) = runner::shared_stores(&chosen);
    let mut played = Vec::new();
    for (scene, rows) in chosen {
        played.push(runner::run_benchmark(args, scene, rows).await?);
    }
    let mut trips = if stores { round_trips::count_store_trips().await? } else { Vec::new() };
    if gateways {
        trips.extend(round_trips::count_gateway_trips(args).await?);
    }
    Ok(BenchReport::new(args, &played, trips))
}

/// Dropping `work` on a signal drops the servers, and dropping a server kills it.
async fn until_terminated<T>(work: impl Future<Output = Result<T, String>>) -> Result<T, String> {
    tokio::select! {
        done = work => done,
        () = wait_for_termination() => Err("interrupted; all servers were stopped".into()),
    }
}

async fn wait_for_termination() {
    let wait = async |kind| match signal(kind) {
        Ok(mut signal) => {
            signal.recv().await;
        }
        Err(_) => std::future::pending().await,
    };
    tokio::select! {
        () = wait(SignalKind::interrupt()) => {}
        () = wait(SignalKind::terminate()) => {}
        () = wait(SignalKind::hangup()) => {}
    }
}
