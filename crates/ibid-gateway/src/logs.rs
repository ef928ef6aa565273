//! Logs: text or JSON on standard error, one line per covered request, keys and hashes masked.
//!
//! Lines are gathered and written by a thread of their own, because a write per request would cost more than
//! everything else that the gateway does for it. Requests never wait for that thread: if standard error takes nothing for
//! long, lines are lost. They are counted ([`lost`]), and the log says how many once it is written again.

use std::{
    collections::HashSet,
    hash::{BuildHasher, RandomState},
    io::{self, Write},
    str::FromStr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
        mpsc,
    },
    thread,
    time::Duration,
};

use ibid::{Answered, Notice, Observer, Outcome, Reason, grpc::Code, http::current_request_id, mask};
use parking_lot::Mutex;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::fmt::MakeWriter;

use crate::config::{Log, LogFormat};

/// How long a line may wait for others to be written with.
const GATHER: Duration = Duration::from_millis(20);
/// More than this is written at once; beyond it the writing thread has fallen behind, and lines are dropped.
const MOST: usize = 4 << 20;
/// How long the end of the process waits for the last lines to be written.
const LAST_LINES: Duration = Duration::from_secs(2);

/// Lines that were never written, since the process began. There is one standard error.
static LOST: AtomicU64 = AtomicU64::new(0);

/// How many lines could not be written since the process began.
pub fn lost() -> u64 {
    LOST.load(Relaxed)
}

/// Writes what is logged. Dropped, it writes what is left.
pub struct Logs {
    stop: Option<mpsc::Sender<()>>,
    /// Closed once the last line is written.
    written: mpsc::Receiver<()>,
}

/// Lines that wait to be written.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Gathered>>);

#[derive(Default)]
struct Gathered {
    lines: Vec<u8>,
    /// Lines for which there was no room since the last ones were taken.
    lost: u64,
}

/// Starts logging.
///
/// # Errors
/// If a logger was set before.
pub fn start(log: &Log) -> Result<Logs, String> {
    let lines = Lines::default();
    let level = LevelFilter::from_str(&log.level.to_string()).expect("its names are ours");
    let builder = tracing_subscriber::fmt().with_max_level(level).with_writer(lines.clone()).with_target(false);
    let set = match log.format {
        LogFormat::Text => builder.with_ansi(false).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    set.map_err(|why| format!("logs: {why}"))?;
    let (stop, stopped) = mpsc::channel();
    let (writing, written) = mpsc::channel();
    let thread = thread::Builder::new().name("logs".into()).spawn(move || {
        while stopped.recv_timeout(GATHER) == Err(mpsc::RecvTimeoutError::Timeout) {
            lines.write_out();
        }
        while lines.write_out() {}
        drop(writing);
    });
    thread.map_err(|why| format!("logs: {why}"))?;
    Ok(Logs { stop: Some(stop), written })
}

impl Lines {
    /// Writes what was gathered. Returns whether there was anything.
    fn write_out(&self) -> bool {
        let Gathered { lines, lost } = std::mem::take(&mut *self.0.lock());
        if lost > 0 {
            // There is room again: it comes behind the lines that were gathered before the first was lost.
            tracing::warn!(lost, "{lost} log lines were lost, because standard error did not take them");
        }
        write_all(&mut io::stderr(), &lines);
        !lines.is_empty()
    }
}

/// Writes all lines; those that cannot be written are lost.
fn write_all(out: &mut impl Write, mut lines: &[u8]) {
    while !lines.is_empty() {
        match out.write(lines) {
            Ok(0) => break,
            Ok(some) => lines = &lines[some..],
            Err(why) if why.kind() == io::ErrorKind::Interrupted => {}
            // Somebody made standard error non-blocking.
            Err(why) if why.kind() == io::ErrorKind::WouldBlock => rest(),
            Err(_) => break,
        }
    }
    LOST.fetch_add(lines.iter().filter(|byte| **byte == b'\n').count() as u64, Relaxed);
}

#[expect(clippy::disallowed_methods, reason = "no task shares this thread")]
fn rest() {
    thread::sleep(GATHER);
}

impl Drop for Logs {
    fn drop(&mut self) {
        drop(self.stop.take());
        // A standard error that takes nothing must not keep the process from ending.
        let _ = self.written.recv_timeout(LAST_LINES);
    }
}

impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut gathered = self.0.lock();
        if gathered.lines.len() + line.len() <= MOST {
            gathered.lines.extend_from_slice(line);
        } else {
            gathered.lost += 1;
            LOST.fetch_add(1, Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// The most paths that a line is written about because requests with a key went there uncovered.
const MAX_UNCOVERED_PATHS: usize = 1000;

/// Logs what the engine tells.
#[derive(Debug, Default)]
pub struct Logged {
    /// Hashes of the paths that requests with a key went to uncovered. Written here only.
    uncovered: Mutex<HashSet<u64>>,
    hasher: RandomState,
}

impl Logged {
    /// One line per path: a client that sends keys in vain does so with every request.
    fn uncovered(&self, notice: &Notice<'_>, path: &str) {
        let hash = self.hasher.hash_one(path);
        let mut known = self.uncovered.lock();
        if known.len() >= MAX_UNCOVERED_PATHS || !known.insert(hash) {
            return;
        }
        tracing::warn!("{notice}");
        if known.len() == MAX_UNCOVERED_PATHS {
            tracing::warn!("requests with a key went to {MAX_UNCOVERED_PATHS} uncovered paths; no more are logged");
        }
    }
}

impl Observer for Logged {
    fn answered(&self, request: &Answered<'_>) {
        use Outcome::{Degraded, Keyless, Refused, Unknown};
        let code = Code::of_outline(request.status);
        macro_rules! line {
            ($level:ident, $text:expr) => {
                tracing::$level!(
                    outcome = request.outcome.name(),
                    route = request.route,
                    method = request.method,
                    path = request.path,
                    key = request.key,
                    address = request.address.map(|at| mask(&at.to_string())),
                    status = if code.is_some() { 200 } else { request.status },
                    grpc_status = code.map(Code::name),
                    attempt = request.attempt,
                    took_ms = request.took.as_secs_f64() * 1000.0,
                    ran_ms = request.ran_for.as_secs_f64() * 1000.0,
                    request_id = request.request_id,
                    peer = request.peer.map(|peer| peer.to_string()),
                    user_agent = request.user_agent.map(|agent| String::from_utf8_lossy(agent).into_owned()),
                    "{}",
                    $text
                )
            };
        }
        match request.outcome {
            Refused(Reason::KeyMissing) => line!(warn, "missing idempotency key"),
            Refused(Reason::KeyInvalid) => line!(warn, "invalid idempotency key"),
            Refused(Reason::StoreUnavailable) | Degraded => line!(error, "store unavailable"),
            Unknown => line!(warn, "outcome unknown"),
            Refused(Reason::UpstreamTimeout) => line!(warn, "no answer in time; it is still waited for"),
            Refused(Reason::InProgress) => line!(info, "duplicate while the first is running"),
            Refused(_) => line!(info, "refused"),
            Outcome::Replayed => line!(info, "duplicate: stored answer replayed"),
            Outcome::Executed => line!(info, "answer stored"),
            Keyless => line!(debug, "no key"),
            _ => line!(info, "answered"),
        }
    }

    fn noticed(&self, notice: &Notice<'_>) {
        let id = current_request_id();
        let request_id = id.as_ref().and_then(|id| id.to_str().ok());
        match notice {
            Notice::StoreFailed { .. } | Notice::JournalFailed(_) | Notice::Unreadable(_) | Notice::Dropped(_) => {
                tracing::error!(request_id, "{notice}")
            }
            Notice::LostClaim(_)
            | Notice::Restored(_)
            | Notice::Fallback { .. }
            | Notice::Solo(_)
            | Notice::Journaled(_)
            | Notice::Shortened(_)
            | Notice::LateAnswer { outcome: Outcome::Unknown, .. } => tracing::warn!(request_id, "{notice}"),
            Notice::Uncovered { path, .. } => self.uncovered(notice, path),
            _ => tracing::info!(request_id, "{notice}"),
        }
    }
}
