//! `ibid store check|dump|compact PATH`: maintains an embedded store that no gateway has open.

use std::{io, path::PathBuf};

use clap::{Args, Subcommand};
use ibid_stores::embedded::{self, OpenError};
use ibid_tools::CommandError;

#[derive(Debug, Args)]
pub struct StoreArgs {
    #[command(subcommand)]
    command: StoreCommand,
}

#[derive(Debug, Subcommand)]
enum StoreCommand {
    /// Read everything and report errors with file and offset; change nothing
    Check(StoreDirectory),
    /// Print one line of JSON per live entry
    Dump(StoreDirectory),
    /// Rewrite the live entries compactly, and free the rest of the disk space
    Compact(StoreDirectory),
}

#[derive(Debug, Args)]
struct StoreDirectory {
    /// The store's directory
    path: PathBuf,
}

/// Runs the subcommand. Returns `false` if a part of the store is unreadable.
pub fn run(args: &StoreArgs, out: &mut dyn io::Write, aside: &mut dyn io::Write) -> Result<bool, CommandError> {
    let (StoreCommand::Check(at) | StoreCommand::Dump(at) | StoreCommand::Compact(at)) = &args.command;
    let path = &at.path;
    let failed = |why: OpenError| CommandError::Failed(format!("{}: {why}", path.display()));
    match &args.command {
        StoreCommand::Check(_) => {
            let report = embedded::check(path).map_err(failed)?;
            write!(out, "{report}")?;
            Ok(report.found.is_empty())
        }
        StoreCommand::Dump(_) => {
            let report = embedded::dump(path, out).map_err(failed)?;
            report.found.iter().try_for_each(|found| writeln!(aside, "{found}"))?;
            Ok(report.found.is_empty())
        }
        StoreCommand::Compact(_) => {
            let done = embedded::compact(path).map_err(failed)?;
            writeln!(out, "{} bytes before, {} after", done.before, done.after)?;
            Ok(true)
        }
    }
}
