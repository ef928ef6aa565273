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
    Check {
        /// The store's directory
        path: PathBuf,
    },
    /// Print one line of JSON per live entry
    Dump {
        /// The store's directory
        path: PathBuf,
    },
    /// Rewrite the live entries compactly, and free the rest of the disk space
    Compact {
        /// The store's directory
        path: PathBuf,
    },
}

/// Runs the subcommand. Returns `false` if a part of the store is unreadable.
pub fn run(args: &StoreArgs, out: &mut dyn io::Write, aside: &mut dyn io::Write) -> Result<bool, CommandError> {
    let (StoreCommand::Check { path } | StoreCommand::Dump { path } | StoreCommand::Compact { path }) = &args.command;
    let failed = |why: OpenError| CommandError::Failed(format!("{}: {why}", path.display()));
    match &args.command {
        StoreCommand::Check { .. } => {
            let report = embedded::check(path).map_err(failed)?;
            write!(out, "{report}")?;
            Ok(report.found.is_empty())
        }
        StoreCommand::Dump { .. } => {
            let report = embedded::dump(path, out).map_err(failed)?;
            report.found.iter().try_for_each(|found| writeln!(aside, "{found}"))?;
            Ok(report.found.is_empty())
        }
        StoreCommand::Compact { .. } => {
            let done = embedded::compact(path).map_err(failed)?;
            writeln!(out, "{} bytes before, {} after", done.before, done.after)?;
            Ok(true)
        }
    }
}
