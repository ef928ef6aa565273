//! What the benchmark's own servers share: their flags, their runtime, their answer and the count of executions.

use std::{
    io,
    net::SocketAddr,
    sync::atomic::{AtomicU64, Ordering},
};

use bytes::Bytes;
use tokio::runtime::{Builder, Runtime};

use ibid_count::json_body;

/// Flags of `bare-upstream` and `layer-app`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AppFlags {
    /// `--listen ADDR`; port 0 by default.
    pub listen: SocketAddr,
    /// `--answer BYTES`: size of the JSON answer, 300 by default.
    pub response_bytes: usize,
    /// `--threads N`: 0, the default, is the current-thread runtime; otherwise a multi-threaded one of N workers.
    pub threads: usize,
}

impl AppFlags {
    /// Reads the flags.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn parse(args: impl IntoIterator<Item = String>) -> Result<Self, String> {
        let mut flags = Self { listen: ([127, 0, 0, 1], 0).into(), response_bytes: 300, threads: 0 };
        let mut args = args.into_iter();
        while let Some(name) = args.next() {
            let value = args.next().ok_or_else(|| format!("{name} needs a value"))?;
            let bad = || format!("{name} {value}: not understood");
            match name.as_str() {
                "--listen" => flags.listen = value.parse().map_err(|_| bad())?,
                "--answer" => flags.response_bytes = value.parse().map_err(|_| bad())?,
                "--threads" => flags.threads = value.parse().map_err(|_| bad())?,
                _ => {
                    return Err(format!("unknown flag {name}; known: --listen ADDR --answer BYTES --threads N"));
                }
            }
        }
        Ok(flags)
    }
}

/// The runtime that `--threads` asks for.
///
/// # Errors
/// If threads cannot be started.
pub fn runtime(threads: usize) -> io::Result<Runtime> {
    match threads {
        0 => Builder::new_current_thread().enable_all().build(),
        workers => Builder::new_multi_thread().worker_threads(workers).enable_all().build(),
    }
}

/// The app under every contender: a fixed answer, and a count of how often it was executed.
#[derive(Debug)]
pub struct CountingApp {
    response_body: Bytes,
    executions: AtomicU64,
}

impl CountingApp {
    /// An app that answers with `answer` bytes of JSON.
    #[must_use]
    pub fn new(answer: usize) -> Self {
        Self { response_body: json_body(answer).into(), executions: AtomicU64::new(0) }
    }

    /// Executes once.
    pub fn execute(&self) -> Bytes {
        self.executions.fetch_add(1, Ordering::Relaxed);
        self.response_body.clone()
    }

    /// How often [`CountingApp::execute`] was called: what `GET /count` answers.
    pub fn executions(&self) -> u64 {
        self.executions.load(Ordering::Relaxed)
    }
}
