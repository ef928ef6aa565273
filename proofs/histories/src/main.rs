//! `ibid-histories FILE…`: checks histories. Exit codes: 0 all are explained, 1 one is not, 2 one cannot be read.

use std::{fs::File, io::BufReader, process::ExitCode};

use ibid_histories::{checker::check_history, event::read_history};

/// How many rejected keys are printed.
const MAX_KEYS_SHOWN: usize = 10;

fn main() -> ExitCode {
    let files: Vec<String> = std::env::args().skip(1).collect();
    if files.is_empty() {
        eprintln!("usage: ibid-histories FILE…   (one JSON object per line; proofs/README.md has the format)");
        return ExitCode::from(64);
    }
    files.iter().map(|file| check_file(file)).max().map_or(ExitCode::SUCCESS, ExitCode::from)
}

fn check_file(file: &str) -> u8 {
    let read = File::open(file).map_err(|why| why.to_string()).and_then(|open| read_history(BufReader::new(open)));
    match read.and_then(|events| check_history(&events)) {
        Err(why) => {
            eprintln!("{file}: {why}");
            2
        }
        Ok(verdict) => {
            println!("{file}: {} keys, {} events, {} rejected", verdict.keys, verdict.events, verdict.rejected.len());
            for one in verdict.rejected.iter().take(MAX_KEYS_SHOWN) {
                println!("  {} of {}: {}", one.key, one.caller, one.reason);
            }
            u8::from(!verdict.rejected.is_empty())
        }
    }
}
