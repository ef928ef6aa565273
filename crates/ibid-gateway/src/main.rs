//! The binary. Only this file exits the process.

use std::{io, process::ExitCode};

use clap::Parser;
use ibid_gateway::{
    commands::{admin, check, demo, keys, openapi, serve, store},
    config::{Env, ServeArgs, StoreSelection},
    tls,
};
use ibid_tools::conform;

/// Most allocations of a request are freed by the core that made them, which mimalloc does without a lock.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Exit code for invalid arguments: `EX_USAGE` of sysexits.
const EXIT_USAGE: u8 = 64;

#[derive(Parser)]
#[command(
    name = "ibid",
    version,
    about = "A request that is retried has its effect once and gets the same answer every time."
)]
enum Command {
    /// Run the gateway in front of a built-in payments API, to try it without an app
    Demo(demo::DemoArgs),
    /// Run the gateway in front of your app
    Serve(ServeArgs),
    /// Validate a configuration, print each route's effective dials and report the answers that a change would forget
    Check(check::CheckArgs),
    /// Check the health of the gateway that uses the same settings
    Health(admin::HealthArgs),
    /// Inspect stored keys and resolve unknown outcomes
    Keys(Box<keys::KeysArgs>),
    /// Report what shadow mode observed: requests to replay or refuse, and callers that send no key
    Report(admin::ReportArgs),
    /// Remove expired entries from a store and mark expired leases as outcome unknown
    Sweep(StoreSelection),
    /// Create, update or remove the tables of a PostgreSQL store
    Migrate(store::MigrateArgs),
    /// Maintain an embedded store that no gateway has open
    Store(store::StoreArgs),
    /// Add the key header, the refusals and the replay headers to an OpenAPI document
    Openapi(openapi::OpenapiArgs),
    /// Check any server that claims to support idempotency keys, from outside
    Conform(Box<conform::ConformArgs>),
}

fn main() -> ExitCode {
    let command = match Command::try_parse() {
        Ok(command) => command,
        Err(why) => {
            let _ = why.print();
            // Printing help or the version is a success.
            return if why.use_stderr() { EXIT_USAGE.into() } else { ExitCode::SUCCESS };
        }
    };
    let (env, out, aside) = (&Env::process(), &mut io::stdout(), &mut io::stderr());
    let done = |()| true;
    let ended = match command {
        Command::Demo(args) => demo::run(&args).map(done),
        Command::Serve(args) => serve::run(args, env).map(done),
        Command::Check(args) => check::run(&args, env, out).map(|found| found.code() == 0),
        Command::Health(args) => admin::health(&args, env, out).map(done),
        Command::Keys(args) => keys::run(&args, env, out, aside).map(done),
        Command::Report(args) => admin::report(&args, env, out).map(done),
        Command::Sweep(args) => store::sweep(&args, env, out).map(done),
        Command::Migrate(args) => store::migrate(&args, env, out).map(done),
        Command::Store(args) => store::maintain(&args, out, aside),
        Command::Openapi(args) => openapi::run(&args, env, out, aside).map(done),
        Command::Conform(args) => conform::run(&args, &tls::for_checks, out),
    };
    match ended {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(why) => {
            if why.code() != 0 {
                eprintln!("{why}");
            }
            why.code().into()
        }
    }
}
