//! Runs scenarios by name and says what they show.

#![allow(clippy::disallowed_methods, reason = "a harness may read the environment")]

use std::{
    env,
    os::unix::process::CommandExt as _,
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::Parser;
use ibid_chaos::{
    report::Exemption,
    sandbox,
    scenarios::{SCENARIOS, Scenario, ScenarioOptions, ScenarioResult, find, run_scenario},
};

/// Puts load on gateways while things break, and says what ran twice, what was lost and what is unknown.
#[derive(Debug, Parser)]
#[command(
    after_help = "Exit codes: 0 every promise was kept, 1 one was not, 2 something could not be run, 64 wrong usage."
)]
struct ChaosArgs {
    /// Which to run, one after the other; all of them if none is named.
    #[arg(value_name = "SCENARIO", value_parser = find)]
    scenarios: Vec<&'static Scenario>,
    /// How long the load of each lasts.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: u64,
    /// The faults of an earlier run; of the moment if not given.
    #[arg(long)]
    seed: Option<u64>,
    /// How many clients.
    #[arg(long, default_value_t = 12, value_parser = clap::value_parser!(u16).range(1..=1000))]
    clients: u16,
    /// How many operations the clients begin in a second, all together; as many as they can if not given.
    #[arg(long)]
    rate: Option<f64>,
    /// How many faults may be at work at once.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=32))]
    concurrent_faults: u16,
    /// Leaves out what fails beneath the gateways (packets, names, disks, clocks, file descriptors), which needs root.
    #[arg(long)]
    plain: bool,
    /// How many gateways, if not as the scenario says.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=32))]
    gateways: Option<u16>,
    /// How many waiters in a crowd, if not as the scenario says.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    waiters: Option<u32>,
    /// The gateway's binary; `ibid` beside this program if not given.
    #[arg(long, value_name = "PATH")]
    bin: Option<PathBuf>,
    /// Excuses more than the scenario does: duplicates-if-degraded, duplicates-if-announced, loss.
    #[arg(long, value_name = "WHAT")]
    allow: Vec<Exemption>,
    /// The folder for the samples and curves of soaks.
    #[arg(long, value_name = "DIR")]
    curves: Option<PathBuf>,
    /// The folder for the history of each scenario, which `ibid-histories` and other checkers read.
    #[arg(long, value_name = "DIR")]
    histories: Option<PathBuf>,
    /// Says which scenarios there are.
    #[arg(long)]
    list: bool,
}

const EXIT_USAGE: u8 = 64;
const EXIT_NOT_RUN: u8 = 2;
const EXIT_GUARANTEE_BROKEN: u8 = 1;

fn main() -> ExitCode {
    let args = match ChaosArgs::try_parse() {
        Ok(args) => args,
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(EXIT_USAGE) } else { ExitCode::SUCCESS };
        }
    };
    if args.list {
        for Scenario { name, description: about, .. } in SCENARIOS {
            println!("{name:<16} {about}");
        }
        return ExitCode::SUCCESS;
    }
    let bin = match find_binary(args.bin.clone()) {
        Ok(bin) => bin,
        Err(why) => {
            eprintln!("ibid-chaos: {why}");
            return ExitCode::from(EXIT_USAGE);
        }
    };
    if !args.plain && !sandbox::is_inside() {
        let error = match env::current_exe().and_then(|this| sandbox::sandbox_command(&this)) {
            Ok(mut inside) => inside.args(env::args_os().skip(1)).exec(),
            Err(error) => error,
        };
        eprintln!("ibid-chaos: {error}; --plain leaves out what needs them");
        return ExitCode::from(EXIT_NOT_RUN);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    runtime.block_on(run_all(&args, &bin))
}

/// One after the other; the worst of it is the exit code.
async fn run_all(args: &ChaosArgs, bin: &std::path::Path) -> ExitCode {
    let chosen: Vec<&Scenario> =
        if args.scenarios.is_empty() { SCENARIOS.iter().collect() } else { args.scenarios.clone() };
    let mut worst = 0;
    for scenario in chosen {
        let mut how = ScenarioOptions::new(bin, Duration::from_secs(args.seconds));
        how.seed = args.seed.unwrap_or(how.seed);
        (how.clients, how.gateways) = (usize::from(args.clients), args.gateways.map(usize::from));
        (how.rate, how.sandboxed) = (args.rate, !args.plain);
        how.concurrent_faults = usize::from(args.concurrent_faults);
        how.curves = args.curves.as_deref();
        how.waiters = args.waiters.map(|waiters| waiters as usize);
        (how.exemptions, how.histories) = (&args.allow, args.histories.as_deref());
        println!("== {}: {} (--seed {})", scenario.name, scenario.description, how.seed);
        let began = Instant::now();
        let (code, verdict) = match run_scenario(scenario, &how).await {
            Ok((ScenarioResult::Faults(outcome), complaints))
                if complaints.is_empty() && outcome.finding_count() > 0 =>
            {
                (0, format!("kept, as far as it promises anything: {} findings are excused", outcome.finding_count()))
            }
            Ok((_, complaints)) if complaints.is_empty() => (0, "kept".to_owned()),
            Ok((_, complaints)) => (EXIT_GUARANTEE_BROKEN, format!("NOT KEPT: {}", complaints.join("; "))),
            Err(error) => (EXIT_NOT_RUN, format!("COULD NOT BE RUN: {error}")),
        };
        println!("== {}: {verdict} ({:.1}s)\n", scenario.name, began.elapsed().as_secs_f64());
        worst = worst.max(code);
    }
    ExitCode::from(worst)
}

fn find_binary(given: Option<PathBuf>) -> Result<PathBuf, String> {
    let beside = || Some(env::current_exe().ok()?.with_file_name("ibid"));
    let path = given.or_else(beside).ok_or("say where the gateway's binary is: --bin PATH")?;
    match path.canonicalize() {
        Ok(path) if path.is_file() => Ok(path),
        _ => Err(format!(
            "there is no gateway at {}; build it (cargo build --bin ibid), or say where it is: --bin PATH",
            path.display()
        )),
    }
}
