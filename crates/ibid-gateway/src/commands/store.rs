//! `ibid store check|dump|compact PATH`: the embedded store, while no gateway has it open.

use std::{io, path::PathBuf};

use clap::{Args, Subcommand};
use ibid_stores::embedded::{self, OpenError};

/// What to do to which store.
#[derive(Debug, Args)]
pub struct StoreArgs {
    #[command(subcommand)]
    command: StoreCommand,
}

#[derive(Debug, Subcommand)]
enum StoreCommand {
    /// Read everything and say what is wrong, with file and offset; change nothing
    Check {
        /// The store's folder
        path: PathBuf,
    },
    /// Print one line of JSON per entry that still counts
    Dump {
        /// The store's folder
        path: PathBuf,
    },
    /// Move what still counts together, and give the rest back to the disk
    Compact {
        /// The store's folder
        path: PathBuf,
    },
}

/// Does it. `false` if something in the store does not read.
///
/// # Errors
/// If there is no store, or a gateway has it open, or the disk fails.
pub fn run(args: &StoreArgs, out: &mut dyn io::Write, aside: &mut dyn io::Write) -> Result<bool, String> {
    let (StoreCommand::Check { path } | StoreCommand::Dump { path } | StoreCommand::Compact { path }) = &args.command;
    let named = |why: &dyn std::fmt::Display| format!("{}: {why}", path.display());
    let failed = |why: OpenError| named(&why);
    match &args.command {
        StoreCommand::Check { .. } => {
            let report = embedded::check(path).map_err(failed)?;
            write!(out, "{report}").map_err(|why| named(&why))?;
            Ok(report.found.is_empty())
        }
        StoreCommand::Dump { .. } => {
            let report = embedded::dump(path, out).map_err(failed)?;
            for found in &report.found {
                writeln!(aside, "{found}").map_err(|why| named(&why))?;
            }
            Ok(report.found.is_empty())
        }
        StoreCommand::Compact { .. } => {
            let done = embedded::compact(path).map_err(failed)?;
            writeln!(out, "{} bytes before, {} after", done.before, done.after).map_err(|why| named(&why))?;
            Ok(true)
        }
    }
}
