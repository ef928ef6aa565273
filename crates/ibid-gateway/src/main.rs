//! The binary. Only this file exits the process.

use std::{io, process::ExitCode};

use clap::Parser;
use ibid_gateway::{commands::Command, config::Env};

/// Most allocations of a request are freed by the core that made them, which mimalloc does without a lock.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Exit code for invalid arguments: `EX_USAGE` of sysexits.
const EXIT_USAGE: u8 = 64;

fn main() -> ExitCode {
    let command = match Command::try_parse() {
        Ok(command) => command,
        Err(why) => {
            let _ = why.print();
            // Printing help or the version is a success.
            return if why.use_stderr() { EXIT_USAGE.into() } else { ExitCode::SUCCESS };
        }
    };
    let ended = command.run(&Env::process(), &mut io::stdout(), &mut io::stderr());
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
