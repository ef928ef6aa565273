//! `ibid completions SHELL` and `ibid man DIRECTORY`: both come from the same definition as the command line.

use std::{fs, io, path::PathBuf};

use clap::CommandFactory;
use clap_complete::Shell;
use ibid_tools::CommandError;

use super::Command;

#[derive(Debug, Clone, clap::Args)]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub shell: Shell,
}

#[derive(Debug, Clone, clap::Args)]
pub struct ManArgs {
    /// Where ibid.1, ibid-serve.1 and so on are written
    #[arg(value_name = "DIRECTORY")]
    pub directory: PathBuf,
}

pub fn print_completions(args: &CompletionsArgs, out: &mut dyn io::Write) -> Result<(), CommandError> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Command::command(), "ibid", &mut script);
    Ok(out.write_all(&script)?)
}

pub fn write_pages(args: &ManArgs) -> Result<(), CommandError> {
    let failed = |why: io::Error| CommandError::Failed(format!("ibid: {}: {why}", args.directory.display()));
    fs::create_dir_all(&args.directory).map_err(failed)?;
    clap_mangen::generate_to(Command::command(), &args.directory).map_err(failed)
}
