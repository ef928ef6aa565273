//! Whether one caller can see by the time of its answers that another has used a key: `timing`, or `scripts/bench --timing`.
//! The figures of docs/identity.md.
//!
//! Caller A uses half of the keys. Then caller B sends requests with all of them, one at a time on one connection, in random
//! order, and the times of its answers are compared: those of keys that A has used with those that nobody has. Every kind
//! of answer that B can get has a row. Requests of A and B are the same but for their credential: what A did would be answered
//! to B, were it not for the scope.
//!
//! Controls: keys that nobody has used against others of the same kind (nothing may be seen), and what must be seen: an app
//! that takes 20 µs longer for half of the requests, and B's own replays against its first answers.

#![allow(clippy::disallowed_methods, reason = "what is tested with may read the environment and block")]

use std::{
    path::PathBuf,
    process::ExitCode,
    time::{SystemTime, UNIX_EPOCH},
};

use ibid_bench::{
    server_child::ServerChild,
    stores::{SharedStores, StoreServers, installed_path},
    timing::TimingDifference,
};

use self::{
    app::TimingApp,
    comparisons::{TimingComparison, TimingRow},
};

mod app;
mod caller;
mod comparisons;

const HELP: &str = "\
timing: can one caller see by the time of its answers that another has used a key?

  --each N          requests of each kind that is compared (4000)
  --stores NAME,... of memory, embedded and redis (all)
  --seed N          of the random order (the time)
  --strict          exit 2 if something is told apart, or a control is not
  --ibid-bin PATH   the gateway (ibid beside this program)
";

const STORES: [&str; 3] = ["memory", "embedded", "redis"];

struct TimingArgs {
    samples_per_kind: usize,
    stores: Vec<String>,
    seed: u64,
    strict: bool,
    ibid_bin: PathBuf,
}

fn main() -> ExitCode {
    let args = match parse() {
        Ok(Some(args)) => args,
        Ok(None) => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Err(why) => {
            eprintln!("timing: {why}");
            return ExitCode::FAILURE;
        }
    };
    match run(&args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) if args.strict => ExitCode::from(2),
        Ok(false) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("timing: {why}");
            ExitCode::FAILURE
        }
    }
}

fn parse() -> Result<Option<TimingArgs>, String> {
    let program = std::env::current_exe().map_err(|error| format!("this program's own path: {error}"))?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut args = TimingArgs {
        samples_per_kind: 4000,
        stores: STORES.map(str::to_owned).to_vec(),
        seed: now.as_nanos() as u64 | 1,
        strict: false,
        ibid_bin: program.with_file_name("ibid"),
    };
    let mut words = std::env::args().skip(1);
    while let Some(name) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{name}: unknown, or it needs a value; see --help"));
        match &*name {
            "--help" | "-h" => return Ok(None),
            "--strict" => args.strict = true,
            "--each" => args.samples_per_kind = value()?.parse().map_err(|_| "--each: a number is needed")?,
            "--stores" => args.stores = value()?.split(',').map(str::to_owned).collect(),
            "--seed" => args.seed = value()?.parse::<u64>().map_err(|_| "--seed: a number is needed")?.max(1),
            "--ibid-bin" => args.ibid_bin = value()?.into(),
            _ => return Err(format!("{name}: unknown; see --help")),
        }
    }
    if let Some(unknown) = args.stores.iter().find(|store| !STORES.contains(&store.as_str())) {
        return Err(format!("--stores: {unknown} is none; allowed are {}", STORES.join(", ")));
    }
    if args.samples_per_kind < 50 { Err("--each must be at least 50".into()) } else { Ok(Some(args)) }
}

/// Whether everything is as it should be.
fn run(args: &TimingArgs) -> Result<bool, String> {
    println!("{} requests of each kind, one at a time; seed {}\n", args.samples_per_kind, args.seed);
    println!("| store | B's answer | key used by A, median | by nobody, median | AUC | away | |");
    println!("|---|---|---|---|---|---|---|");
    let app = TimingApp::start().map_err(|why| format!("the app: {why}"))?;
    let mut good = true;
    let mut seed = args.seed;
    for store in args.stores.iter().map(String::as_str) {
        if store == "redis" && installed_path("redis-server").is_none() {
            println!("\nRedis is left out: install the Debian package redis-server");
            continue;
        }
        for limited in [false, true] {
            // Each has a store of its own, which is gone with it.
            let folder = tempfile::tempdir().map_err(|why| format!("no folder: {why}"))?;
            let backing = if store == "redis" { Some(StoreServers::start(SharedStores::Redis, None)?) } else { None };
            let config = match &backing {
                Some(backing) => backing.config()?,
                None if store == "memory" => "[store]\nurl = \"memory:\"\n".into(),
                None => format!("[store]\nurl = \"embedded:{}\"\n", folder.path().join("data").display()),
            };
            let gateway = start(args, &app, &folder, &format!("{config}{}", quota(args, limited)))?;
            let mut scene = TimingComparison::new(gateway.addr(), &app, args.samples_per_kind, &mut seed)?;
            let mut tell = |row: &TimingRow| good &= print_row(store, row);
            let told = if limited { scene.compare_over_quota(&mut tell) } else { scene.compare_all(&mut tell) };
            told.map_err(|why| format!("{store}: {why}"))?;
        }
    }
    Ok(good)
}

/// A and B may each begin as much as A needs.
fn quota(args: &TimingArgs, limited: bool) -> String {
    match limited {
        true => format!("[quota]\nnew_keys = \"{}/24h\"\n", comparisons::quota_needed(args.samples_per_kind)),
        false => String::new(),
    }
}

/// With its log as it is by default: what is logged takes time, too.
fn start(args: &TimingArgs, app: &TimingApp, folder: &tempfile::TempDir, config: &str) -> Result<ServerChild, String> {
    let file = folder.path().join("ibid.toml");
    let config = format!("{config}[policy]\nlease = \"10m\"\ntimeout = \"10m\"\n");
    std::fs::write(&file, config).map_err(|why| format!("{}: {why}", file.display()))?;
    let (file, upstream) = (file.display().to_string(), format!("http://{}", app.addr()));
    let journal = folder.path().join("journal").display().to_string();
    let flags = ["serve", "--listen", "127.0.0.1:0", "--admin", "off", "--journal", &journal, "--upstream", &upstream];
    let flags: Vec<String> = flags.into_iter().chain(["--config", &file]).map(str::to_owned).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|why| why.to_string())?;
    runtime.block_on(ServerChild::start(&args.ibid_bin, &flags))
}

/// Prints a row. Whether it is as it should be.
fn print_row(store: &str, row: &TimingRow) -> bool {
    let TimingDifference { medians: [first, second], auc, standard_error: error } = row.comparison;
    let verdict = match (row.must_differ, row.comparison.is_distinguishable()) {
        (false, false) => "not told apart",
        (false, true) => "TOLD APART",
        (true, true) => "told apart, as it must be",
        (true, false) => "NOT SEEN",
    };
    println!(
        "| {store} | {} | {first:.0} µs | {second:.0} µs | {auc:.3} ± {error:.3} | {:+.1} | {verdict} |",
        row.name,
        row.comparison.standard_errors_away()
    );
    row.must_differ == row.comparison.is_distinguishable() || (row.must_differ && row.may_be_undetected)
}
