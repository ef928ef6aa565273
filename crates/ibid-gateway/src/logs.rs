//! Logs: text or JSON on standard error, one line per covered request, with keys and hashes masked.
//!
//! A separate thread writes the lines in batches, because a write per request would cost more than everything else that
//! the gateway does for it. Requests never wait for that thread: if standard error blocks for long, lines are dropped
//! and counted ([`lost_lines`]), and the log reports the number once it is writable again.
//!
//! An unavailable store fails every request, so its failures are condensed into a few lines ([`OutageLog`]).

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
    time::{Duration, Instant},
};

use ibid::{
    Observer, RefusalReason, RequestOutcome, RequestReport, grpc::GrpcStatusCode, http::current_request_id, mask,
    observe::EngineEvent,
};
use parking_lot::Mutex;
use tracing::level_filters::LevelFilter;

use self::outage::OutageLog;
use crate::{
    config::{LogFormat, LogSettings},
    trace::current_trace_id,
};

mod outage;

/// How long a line waits for a batch.
const FLUSH_INTERVAL: Duration = Duration::from_millis(20);
/// Maximum size of the buffer (4 MiB). When it is full, lines are dropped.
const MAX_BUFFERED_BYTES: usize = 4 << 20;
/// How long the process waits at exit for the last lines.
const FINAL_FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

static LOST_LINES: AtomicU64 = AtomicU64::new(0);

pub fn lost_lines() -> u64 {
    LOST_LINES.load(Relaxed)
}

/// Keeps the writer thread running. Dropping it writes the remaining lines.
pub struct LogFlushGuard {
    stop: Option<mpsc::Sender<()>>,
    /// Closed once the last line is written.
    finished: mpsc::Receiver<()>,
}

#[derive(Clone, Default)]
struct LogBuffer(Arc<Mutex<BufferedLines>>);

#[derive(Default)]
struct BufferedLines {
    lines: Vec<u8>,
    /// Lines dropped since the last flush.
    lost: u64,
}

pub fn start(log: &LogSettings) -> Result<LogFlushGuard, String> {
    let lines = LogBuffer::default();
    let level = LevelFilter::from_str(&log.level.to_string()).expect("its names are ours");
    let buffer = lines.clone();
    let builder =
        tracing_subscriber::fmt().with_max_level(level).with_writer(move || buffer.clone()).with_target(false);
    let set = match log.format {
        LogFormat::Text => builder.with_ansi(false).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    set.map_err(|why| format!("logs: {why}"))?;
    let (stop, stopped) = mpsc::channel();
    let (writing, written) = mpsc::channel();
    let thread = thread::Builder::new().name("logs".into()).spawn(move || {
        let mut batch = Vec::new();
        while stopped.recv_timeout(FLUSH_INTERVAL) == Err(mpsc::RecvTimeoutError::Timeout) {
            lines.flush_buffer(&mut batch);
        }
        while lines.flush_buffer(&mut batch) {}
        drop(writing);
    });
    thread.map_err(|why| format!("logs: {why}"))?;
    Ok(LogFlushGuard { stop: Some(stop), finished: written })
}

impl LogBuffer {
    /// Writes the buffered lines. `batch` takes the buffer's place, so that both keep their capacity.
    fn flush_buffer(&self, batch: &mut Vec<u8>) -> bool {
        batch.clear();
        let lost = {
            let mut buffered = self.0.lock();
            std::mem::swap(&mut buffered.lines, batch);
            std::mem::take(&mut buffered.lost)
        };
        if lost > 0 {
            // The buffer is empty now, so this line follows the lines that were buffered before the loss.
            tracing::warn!(lost, "{lost} log lines were lost because standard error blocked");
        }
        write_all(&mut io::stderr(), batch);
        !batch.is_empty()
    }
}

/// Writes all lines, and counts those that fail as lost.
fn write_all(out: &mut impl Write, mut lines: &[u8]) {
    while !lines.is_empty() {
        match out.write(lines) {
            Ok(0) => break,
            Ok(some) => lines = &lines[some..],
            Err(why) if why.kind() == io::ErrorKind::Interrupted => {}
            // Another process made standard error non-blocking.
            Err(why) if why.kind() == io::ErrorKind::WouldBlock => pause(),
            Err(_) => break,
        }
    }
    LOST_LINES.fetch_add(lines.iter().filter(|byte| **byte == b'\n').count() as u64, Relaxed);
}

#[expect(clippy::disallowed_methods, reason = "no task shares this thread")]
fn pause() {
    thread::sleep(FLUSH_INTERVAL);
}

impl Drop for LogFlushGuard {
    fn drop(&mut self) {
        drop(self.stop.take());
        // A blocked standard error must not keep the process from exiting.
        let _ = self.finished.recv_timeout(FINAL_FLUSH_TIMEOUT);
    }
}

impl Write for LogBuffer {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut gathered = self.0.lock();
        if gathered.lines.len() + line.len() <= MAX_BUFFERED_BYTES {
            gathered.lines.extend_from_slice(line);
        } else {
            gathered.lost += 1;
            LOST_LINES.fetch_add(1, Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

const MAX_UNCOVERED_PATHS: usize = 1000;

#[derive(Debug, Default)]
pub struct LogObserver {
    /// Hashes of the logged paths that got a key but are not covered.
    uncovered_paths: Mutex<HashSet<u64>>,
    hasher: RandomState,
    /// Calls that the store failed.
    store_outage: OutageLog,
    /// Calls that one of two stores decided alone.
    fallback_outage: OutageLog,
}

impl LogObserver {
    fn log_ended_outages(&self) {
        if let Some(outage) = self.store_outage.take_ended(Instant::now) {
            let (failures, lasted_s) = (outage.failures, outage.seconds());
            tracing::info!(failures, lasted_s, "the store answers again");
        }
        if let Some(outage) = self.fallback_outage.take_ended(Instant::now) {
            let (failures, lasted_s) = (outage.failures, outage.seconds());
            tracing::info!(failures, lasted_s, "both stores answer again");
        }
    }

    /// Each path is logged once, because a client that sends keys there does so with every request.
    fn is_first_uncovered(&self, path: &str) -> bool {
        let hash = self.hasher.hash_one(path);
        let mut known = self.uncovered_paths.lock();
        let is_first = known.len() < MAX_UNCOVERED_PATHS && known.insert(hash);
        if is_first && known.len() == MAX_UNCOVERED_PATHS {
            tracing::warn!("requests with a key went to {MAX_UNCOVERED_PATHS} uncovered paths; no more are logged");
        }
        is_first
    }
}

impl Observer for LogObserver {
    fn on_request(&self, request: &RequestReport<'_>) {
        use RequestOutcome::{Degraded, Keyless, Refused, Unknown};
        self.log_ended_outages();
        let code = GrpcStatusCode::from_summary_status(request.status);
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
                    grpc_status = code.map(GrpcStatusCode::name),
                    attempt = request.attempt,
                    took_ms = milliseconds(request.took),
                    ran_ms = milliseconds(request.run_took),
                    request_id = request.request_id,
                    trace_id = current_trace_id(),
                    peer = request.client_address.map(|peer| peer.to_string()),
                    user_agent = request.user_agent.map(|agent| String::from_utf8_lossy(agent).into_owned()),
                    "{}",
                    $text
                )
            };
        }
        match request.outcome {
            Refused(RefusalReason::KeyMissing) => line!(warn, "missing idempotency key"),
            Refused(RefusalReason::KeyInvalid) => line!(warn, "invalid idempotency key"),
            Refused(RefusalReason::StoreUnavailable) => line!(info, "refused: store unavailable"),
            Degraded => line!(warn, "answered without protection: store unavailable"),
            Unknown => line!(warn, "outcome unknown"),
            Refused(RefusalReason::UpstreamTimeout) => line!(warn, "no answer in time; it is still waited for"),
            Refused(RefusalReason::InProgress) => line!(info, "duplicate while the first is running"),
            Refused(_) => line!(info, "refused"),
            RequestOutcome::Replayed => line!(info, "duplicate: stored answer replayed"),
            RequestOutcome::Executed => line!(info, "answer stored"),
            Keyless => line!(debug, "no key"),
            _ => line!(info, "answered"),
        }
    }

    fn on_event(&self, notice: &EngineEvent<'_>) {
        let id = current_request_id();
        let (request_id, trace_id) = (id.as_ref().and_then(|id| id.to_str().ok()), current_trace_id());
        match notice {
            EngineEvent::StoreFailed(..) => {
                if let Some(outage) = self.store_outage.record_failure(Instant::now()) {
                    tracing::error!(request_id, trace_id, failures = outage.failures, "{notice}");
                }
            }
            EngineEvent::Fallback(..) | EngineEvent::FrontOnlyClaim(_) => {
                if let Some(outage) = self.fallback_outage.record_failure(Instant::now()) {
                    tracing::warn!(request_id, trace_id, failures = outage.failures, "{notice}");
                }
            }
            EngineEvent::JournalFailed(_) | EngineEvent::RecordUnreadable(_) | EngineEvent::SettlementDropped(_) => {
                tracing::error!(request_id, trace_id, "{notice}")
            }
            EngineEvent::DuplicateIntent { .. }
            | EngineEvent::ClaimLost(_)
            | EngineEvent::EntryRestored(_)
            | EngineEvent::Journaled(_)
            | EngineEvent::BodyNotStored(_)
            | EngineEvent::LateAnswer { outcome: RequestOutcome::Unknown, .. } => {
                tracing::warn!(request_id, trace_id, "{notice}")
            }
            EngineEvent::UncoveredKey { path, .. } => {
                if self.is_first_uncovered(path) {
                    tracing::warn!(request_id, trace_id, "{notice}");
                }
            }
            _ => tracing::info!(request_id, trace_id, "{notice}"),
        }
    }
}

/// With three digits after the point.
fn milliseconds(took: Duration) -> f64 {
    took.as_micros() as f64 / 1000.0
}
