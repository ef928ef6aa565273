//! The binary. The only place that exits.

use std::{io, process::ExitCode};

use clap::Parser;
use ibid_gateway::{
    commands::{CommandError, check, conform, demo, health, keys, migrate, openapi, report, serve, store, sweep},
    config::{Env, ServeArgs},
};

/// A setting is wrong: `EX_USAGE` of sysexits.
const EXIT_INVALID_CONFIG: u8 = 64;

#[derive(Parser)]
#[command(
    name = "ibid",
    version,
    about = "A request that is retried has its effect once and gets the same answer every time."
)]
enum Command {
    /// The gateway in front of a built-in payments API: try it without anything else
    Demo(demo::DemoArgs),
    /// The gateway in front of your app
    Serve(ServeArgs),
    /// Validate a configuration; print each route's effective dials; say what a change would forget
    Check(check::CheckArgs),
    /// Ask the gateway that has the same settings how it is
    Health(health::HealthArgs),
    /// What a store remembers: look at it, and say how it ended where nobody knows
    Keys(Box<keys::KeysArgs>),
    /// What shadow mode saw: what would be replayed and refused, and who sends no key
    Report(report::ReportArgs),
    /// Remove what has expired from a store, and mark what has lapsed
    Sweep(sweep::SweepArgs),
    /// Make, update or remove the tables of a PostgreSQL store
    Migrate(migrate::MigrateArgs),
    /// The embedded store, while no gateway has it open
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
            // Help and the version are what was asked for.
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
            // Whoever reads it has read enough.
            Err(conform::ConformError::Print(why)) if why.kind() == io::ErrorKind::BrokenPipe => None,
            Err(why) => Some((why.to_string(), why.code())),
        },
        Command::Check(args) => match check::run(&args, &env, &mut io::stdout()) {
            Ok(verdict) => return verdict.code().into(),
            // Whoever reads it has read enough.
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

/// The end of a command that worked on a store.
fn exit_code(end: Result<(), CommandError>) -> ExitCode {
    match end {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever reads it has read enough.
        Err(CommandError::Output(why)) if why.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            why.code().into()
        }
    }
}
