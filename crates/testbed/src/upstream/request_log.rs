//! The state that all connections of the upstream share: the log and the rules.

use std::{collections::HashMap, fmt};

use parking_lot::{Mutex, MutexGuard};

use super::*;
use crate::http1::to_text;

#[derive(Clone)]
pub struct LoggedRequest {
    /// When it had arrived completely.
    pub at: Instant,
    /// The connection that carried it, counted from 1.
    pub connection: usize,
    pub version: http::Version,
    pub method: String,
    /// The path and query, as sent.
    pub target: String,
    pub headers: HeaderList,
    /// The body without the framing.
    pub body: Bytes,
    pub trailers: HeaderList,
    /// The number of the execution, from 1; `None` for a request without effect.
    pub execution: Option<usize>,
}

impl LoggedRequest {
    pub fn path(&self) -> &str {
        path_of(&self.target)
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)
    }

    /// The key without quotes, from `Idempotency-Key`, else from `X-Idempotency-Key`.
    pub fn key(&self) -> Option<&str> {
        let sent = self.header("idempotency-key").or_else(|| self.header("x-idempotency-key"))?;
        Some(sent.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or(sent))
    }

    pub fn attempt(&self) -> Option<u64> {
        self.header("ibid-attempt")?.parse().ok()
    }

    pub fn fence(&self) -> Option<u64> {
        self.header("ibid-fence")?.parse().ok()
    }

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
    pub(super) arrived: watch::Sender<usize>,
}

#[derive(Debug, Default)]
pub(super) struct RequestLogState {
    pub(super) log: Vec<LoggedRequest>,
    executions: usize,
    pub(super) connections: usize,
    pub(super) connections_open: usize,
    pub(super) client_disconnects: usize,
    pub(super) malformed_requests: usize,
    /// Replies by path; `None` is every other path. The last reply of a rule is never removed.
    pub(super) rules: HashMap<Option<String>, VecDeque<UpstreamReply>>,
}

impl RequestLog {
    pub(super) fn state(&self) -> MutexGuard<'_, RequestLogState> {
        self.state.lock()
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

    pub(super) fn open(ledger: &Arc<RequestLog>) -> OpenUpstreamConnection {
        let mut state = ledger.state();
        state.connections += 1;
        state.connections_open += 1;
        OpenUpstreamConnection { request_log: Arc::clone(ledger), number: state.connections }
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
        self.request_log.state().connections_open -= 1;
    }
}

fn path_of(target: &str) -> &str {
    target.split_once('?').map_or(target, |(path, _)| path)
}
