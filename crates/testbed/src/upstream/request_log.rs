//! The state that all connections of the upstream share: the log and the rules.

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Instant,
};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::watch;

use super::UpstreamReply;
use crate::http1::{HeaderList, to_text};

/// One logged request.
#[derive(Clone)]
pub struct LoggedRequest {
    /// When it had arrived completely.
    pub at: Instant,
    /// The connection that carried it, counted from 1.
    pub connection: usize,
    /// The HTTP version.
    pub version: http::Version,
    /// The method.
    pub method: String,
    /// The path and query, as sent.
    pub target: String,
    /// The headers, as sent.
    pub headers: HeaderList,
    /// The body without the framing.
    pub body: Bytes,
    /// The trailers.
    pub trailers: HeaderList,
    /// The number of the execution, from 1; `None` for a request without effect.
    pub execution: Option<usize>,
}

impl LoggedRequest {
    /// The path without the query.
    pub fn path(&self) -> &str {
        path_of(&self.target)
    }

    /// The first value of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)
    }

    /// The key without quotes, from `Idempotency-Key`, else from `X-Idempotency-Key`.
    pub fn key(&self) -> Option<&str> {
        let sent = self.header("idempotency-key").or_else(|| self.header("x-idempotency-key"))?;
        Some(sent.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or(sent))
    }

    /// `Ibid-Attempt`, if it is a number.
    pub fn attempt(&self) -> Option<u64> {
        self.header("ibid-attempt")?.parse().ok()
    }

    /// `Ibid-Fence`, if it is a number.
    pub fn fence(&self) -> Option<u64> {
        self.header("ibid-fence")?.parse().ok()
    }

    /// The body as text.
    pub fn text(&self) -> String {
        to_text(&self.body)
    }
}

impl fmt::Debug for LoggedRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let start = to_text(&self.body[..self.body.len().min(200)]);
        f.debug_struct("LoggedRequest")
            .field("request", &format_args!("{} {} {:?}", self.method, self.target, self.version))
            .field("execution", &self.execution)
            .field("connection", &self.connection)
            .field("headers", &self.headers)
            .field("body", &format_args!("{} bytes, {start:?}", self.body.len()))
            .field("trailers", &self.trailers)
            .finish_non_exhaustive()
    }
}

/// See the module docs. The connections write the log and the counts, the test writes the rules.
#[derive(Debug, Default)]
pub(super) struct RequestLog {
    state: Mutex<RequestLogState>,
    /// The length of the log, for waiting.
    arrived: watch::Sender<usize>,
    connections: AtomicUsize,
    open: AtomicUsize,
    client_disconnects: AtomicUsize,
    malformed_requests: AtomicUsize,
}

#[derive(Debug, Default)]
struct RequestLogState {
    log: Vec<LoggedRequest>,
    executions: usize,
    /// Replies by path; `None` is every other path. The last reply of a rule is never removed.
    rules: HashMap<Option<String>, VecDeque<UpstreamReply>>,
}

impl RequestLog {
    pub(super) fn set_rule(&self, path: Option<&str>, replies: Vec<UpstreamReply>) {
        self.state.lock().rules.insert(path.map(str::to_owned), replies.into());
    }

    pub(super) fn clear_rules(&self) {
        self.state.lock().rules.clear();
    }

    /// Returns the reply to the next request with this method and target. A rule with the method takes precedence.
    pub(super) fn next_reply(&self, method: &str, target: &str) -> UpstreamReply {
        let mut book = self.state.lock();
        let path = path_of(target);
        let rules = [format!("{method} {path}"), format!("{method} *"), path.to_owned()];
        let rule = rules.into_iter().map(Some).find(|rule| book.rules.contains_key(rule)).flatten();
        match book.rules.get_mut(&rule) {
            None => UpstreamReply::usual(),
            Some(replies) if replies.len() > 1 => replies.pop_front().unwrap_or_default(),
            Some(replies) => replies.front().cloned().unwrap_or_default(),
        }
    }

    /// Logs a request and returns its number if it is an execution. `effect` is false if the upstream refuses it.
    pub(super) fn record(&self, mut seen: LoggedRequest, effect: bool) -> Option<usize> {
        let mut book = self.state.lock();
        if effect && !matches!(seen.method.as_str(), "GET" | "HEAD" | "OPTIONS" | "TRACE") {
            book.executions += 1;
            seen.execution = Some(book.executions);
        }
        let execution = seen.execution;
        book.log.push(seen);
        self.arrived.send_replace(book.log.len());
        execution
    }

    pub(super) async fn wait_arrived(&self, n: usize) {
        // `self` owns the sender, so waiting cannot fail.
        let _ = self.arrived.subscribe().wait_for(|count| *count >= n).await;
    }

    pub(super) fn log(&self) -> Vec<LoggedRequest> {
        self.state.lock().log.clone()
    }

    pub(super) fn count(&self, which: impl Fn(&LoggedRequest) -> bool) -> usize {
        self.state.lock().log.iter().filter(|seen| which(seen)).count()
    }

    pub(super) fn connections(&self) -> usize {
        self.connections.load(SeqCst)
    }

    pub(super) fn connections_open(&self) -> usize {
        self.open.load(SeqCst)
    }

    pub(super) fn client_disconnects(&self) -> usize {
        self.client_disconnects.load(SeqCst)
    }

    pub(super) fn malformed_requests(&self) -> usize {
        self.malformed_requests.load(SeqCst)
    }

    pub(super) fn count_disconnect(&self) {
        self.client_disconnects.fetch_add(1, SeqCst);
    }

    pub(super) fn count_malformed(&self) {
        self.malformed_requests.fetch_add(1, SeqCst);
    }

    pub(super) fn open(ledger: &Arc<RequestLog>) -> OpenUpstreamConnection {
        let number = ledger.connections.fetch_add(1, SeqCst) + 1;
        ledger.open.fetch_add(1, SeqCst);
        OpenUpstreamConnection { request_log: Arc::clone(ledger), number }
    }
}

/// An open connection. Dropping it ends the count as open.
#[derive(Debug)]
pub(super) struct OpenUpstreamConnection {
    pub(super) request_log: Arc<RequestLog>,
    pub(super) number: usize,
}

impl Drop for OpenUpstreamConnection {
    fn drop(&mut self) {
        self.request_log.open.fetch_sub(1, SeqCst);
    }
}

fn path_of(target: &str) -> &str {
    target.split_once('?').map_or(target, |(path, _)| path)
}
