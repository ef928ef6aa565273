//! The binary. Only this file exits the process.

use std::{io, process::ExitCode};

use clap::Parser;
use ibid_gateway::{
    commands::{CommandError, check, conform, demo, health, keys, migrate, openapi, report, serve, store, sweep},
    config::{Env, ServeArgs},
};

/// Exit code for an invalid setting: `EX_USAGE` of sysexits.
const EXIT_INVALID_CONFIG: u8 = 64;

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
    Health(health::HealthArgs),
    /// Inspect stored keys and resolve unknown outcomes
    Keys(Box<keys::KeysArgs>),
    /// Report what shadow mode observed: requests to replay or refuse, and callers that send no key
    Report(report::ReportArgs),
    /// Remove expired entries from a store and mark expired leases as outcome unknown
    Sweep(sweep::SweepArgs),
    /// Create, update or remove the tables of a PostgreSQL store
    Migrate(migrate::MigrateArgs),
    /// Maintain an embedded store that no gateway has open
    Store(store::StoreArgs),
    /// Add the key header, the refusals and the replay headers to an OpenAPI document
    Openapi(openapi::OpenapiArgs),
    /// Check any server that claims to support idempotency keys, from outside
    Conform(Box<conform::ConformArgs>),
}

fn main() -> ExitCode {
    let env = Env::process();
    let command = match Command::try_parse() {
        Ok(command) => command,
        Err(why) => {
            let _ = why.print();
            // Printing help or the version is a success.
            return if why.use_stderr() { EXIT_INVALID_CONFIG.into() } else { ExitCode::SUCCESS };
        }
    };
    let failed = match command {
        Command::Demo(args) => demo::run(&args).err().map(|why| (why, 1)),
        Command::Serve(args) => serve::run(args, &env).err().map(|why| match why {
            serve::ServeError::Settings(line) => (line, EXIT_INVALID_CONFIG),
            why => (why.to_string(), 1),
        }),
        Command::Store(args) => match store::run(&args, &mut io::stdout(), &mut io::stderr()) {
            Ok(true) => None,
            Ok(false) => return ExitCode::FAILURE,
            Err(why) => Some((why, 1)),
        },
        Command::Health(args) => return exit_code(health::run(&args, &env, &mut io::stdout().lock())),
        Command::Keys(args) => return exit_code(keys::run(&args, &env, &mut io::stdout().lock(), &mut io::stderr())),
        Command::Report(args) => return exit_code(report::run(&args, &env, &mut io::stdout().lock())),
        Command::Sweep(args) => return exit_code(sweep::run(&args, &env, &mut io::stdout().lock())),
        Command::Migrate(args) => return exit_code(migrate::run(&args, &env, &mut io::stdout().lock())),
        Command::Openapi(args) => {
            return exit_code(openapi::run(&args, &env, &mut io::stdout().lock(), &mut io::stderr()));
        }
        Command::Conform(args) => match conform::run(&args, &mut io::stdout().lock()) {
            Ok(conforms) => return conforms.code().into(),
            // The reader closed the pipe, which is not a failure.
            Err(conform::ConformError::Print(why)) if why.kind() == io::ErrorKind::BrokenPipe => None,
            Err(why) => Some((why.to_string(), why.code())),
        },
        Command::Check(args) => match check::run(&args, &env, &mut io::stdout()) {
            Ok(verdict) => return verdict.code().into(),
            // The reader closed the pipe, which is not a failure.
            Err(check::CheckError::Print(why)) if why.kind() == io::ErrorKind::BrokenPipe => None,
            Err(why) => Some((why.to_string(), EXIT_INVALID_CONFIG)),
        },
    };
    match failed {
        None => ExitCode::SUCCESS,
        Some((line, code)) => {
            eprintln!("{line}");
            code.into()
        }
    }
}

fn exit_code(end: Result<(), CommandError>) -> ExitCode {
    match end {
        Ok(()) => ExitCode::SUCCESS,
        // The reader closed the pipe, which is not a failure.
        Err(CommandError::Output(why)) if why.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            why.code().into()
        }
    }
}
