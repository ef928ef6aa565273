//! A real upstream in the test's process, which counts executions.
//!
//! A request with a mutating method is an *execution*: it is logged before it is answered, and the answer, `201
//! {"id":N,"run":N}`, contains its number, so a test can distinguish a replay from a second run by the body. A GET is
//! logged and answered with `200 {"ok":true}`. Rules by path change the answer ([`UpstreamReply`]) or break the
//! connection ([`UpstreamFault`]).
//!
//! Invariant: an execution is in the log before the first byte of its answer, or its fault, is on the wire.
//!
//! ```no_run
//! # async fn example() {
//! use testbed::upstream::{ReplyGate, TestUpstream, UpstreamFault, UpstreamReply};
//!
//! let upstream = TestUpstream::start().await;
//! let gate = ReplyGate::new();
//! upstream.on("/pay", UpstreamReply::usual().gated(&gate));
//! upstream.on("/lost", UpstreamFault::ResetAfterRequest);
//! upstream.on_each("/flaky", [UpstreamReply::status(500), UpstreamReply::usual()]);
//! // … send something …
//! gate.arrived(1).await;
//! gate.open();
//! assert_eq!(upstream.executions_at("/pay"), 1);
//! # }
//! ```

use std::{
    collections::VecDeque,
    io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use tokio::{
    net::TcpStream,
    sync::watch,
    task::JoinSet,
    time::{sleep, timeout},
};

use self::{
    reply::ReplyContent,
    request_log::{OpenUpstreamConnection, RequestLog},
};
use crate::{
    http1::{HeaderList, WAIT_TIMEOUT},
    loopback::LoopbackPort,
};

pub use self::{
    gate::ReplyGate,
    reply::{UpstreamFault, UpstreamReply, filler},
    request_log::LoggedRequest,
};

mod gate;
mod h1;
mod h2c;
mod reply;
mod request_log;

#[derive(Debug)]
pub struct TestUpstream {
    request_log: Arc<RequestLog>,
    port: LoopbackPort,
    /// HTTP/2 with prior knowledge, and HTTP/1.1, by hyper; else a handwritten HTTP/1.1 server that supports every
    /// fault.
    is_h2c: bool,
}

impl TestUpstream {
    /// Starts an HTTP/1.1 upstream on a free loopback port.
    pub async fn start() -> TestUpstream {
        TestUpstream::start_with(false)
    }

    /// Starts an upstream with HTTP/2 without TLS (and HTTP/1.1). Faults act on the stream; [`on`](TestUpstream::on)
    /// rejects those that need a raw connection.
    pub async fn start_h2c() -> TestUpstream {
        TestUpstream::start_with(true)
    }

    fn start_with(is_h2c: bool) -> TestUpstream {
        let upstream = TestUpstream { request_log: Arc::default(), port: LoopbackPort::reserve(), is_h2c };
        upstream.start_listening();
        upstream
    }

    /// Starts an upstream that refuses every connection until [`restart`](TestUpstream::restart).
    pub async fn start_refusing() -> TestUpstream {
        let upstream = TestUpstream::start().await;
        upstream.stop().await;
        upstream
    }

    pub fn addr(&self) -> SocketAddr {
        self.port.addr
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.addr())
    }

    /// Sets the answer for requests with exactly this path, ignoring the query. `"OPTIONS /pay"` is for one
    /// method only, `"OPTIONS *"` for one method at every path; both take precedence over a path alone.
    pub fn on(&self, path: &str, reply: impl Into<UpstreamReply>) {
        self.on_each(path, [reply.into()]);
    }

    /// Sets the answers for the first request at this path, the second, and so on; the last one stays.
    pub fn on_each(&self, path: &str, replies: impl IntoIterator<Item = UpstreamReply>) {
        self.set_rule(Some(path), replies);
    }

    /// Sets the answer for every path without its own rule.
    pub fn reply_by_default(&self, reply: impl Into<UpstreamReply>) {
        self.set_rule(None, [reply.into()]);
    }

    /// Holds back the usual answer at this path.
    pub fn gate(&self, path: &str) -> ReplyGate {
        let gate = ReplyGate::new();
        self.on(path, UpstreamReply::usual().gated(&gate));
        gate
    }

    /// Removes every rule; the log stays.
    pub fn clear_rules(&self) {
        self.request_log.state().rules.clear();
    }

    fn set_rule(&self, path: Option<&str>, replies: impl IntoIterator<Item = UpstreamReply>) {
        let replies: VecDeque<_> = replies.into_iter().collect();
        assert!(!replies.is_empty(), "a rule needs a reply");
        if self.is_h2c {
            replies.iter().for_each(h2c::check_supported);
        }
        self.request_log.state().rules.insert(path.map(str::to_owned), replies);
    }

    /// Closes every connection, answered or not, and refuses new ones.
    pub async fn stop(&self) {
        self.port.refuse().await;
        let closed = async {
            while self.connections_open() > 0 {
                sleep(Duration::from_millis(2)).await;
            }
        };
        timeout(WAIT_TIMEOUT, closed).await.expect("the upstream's connections end");
    }

    /// Accepts connections again, on the same port, with the same log and rules.
    pub async fn restart(&self) {
        self.stop().await;
        self.start_listening();
    }

    fn start_listening(&self) {
        let (request_log, is_h2c) = (Arc::clone(&self.request_log), self.is_h2c);
        // The connections end with the set.
        let mut connections = JoinSet::new();
        self.port.listen(move |stream| {
            while connections.try_join_next().is_some() {}
            let _ = stream.set_nodelay(true);
            let open = RequestLog::open(&request_log);
            match is_h2c {
                false => connections.spawn(h1::serve(stream, open)),
                true => connections.spawn(h2c::serve(stream, open)),
            };
        });
    }
}

impl TestUpstream {
    /// The number of complete requests with a mutating method that were executed.
    pub fn executions(&self) -> usize {
        self.count(|seen| seen.execution.is_some())
    }

    /// The number of executions with this path, ignoring the query.
    pub fn executions_at(&self, path: &str) -> usize {
        self.count(|seen| seen.execution.is_some() && seen.path() == path)
    }

    /// The number of executions with this `Idempotency-Key` or `X-Idempotency-Key`, quoted or not.
    pub fn executions_with_key(&self, key: &str) -> usize {
        self.count(|seen| seen.execution.is_some() && seen.key() == Some(key))
    }

    pub fn requests(&self) -> usize {
        self.count(|_| true)
    }

    pub fn log(&self) -> Vec<LoggedRequest> {
        self.request_log.state().log.clone()
    }

    pub fn last(&self) -> LoggedRequest {
        self.log().pop().expect("a request reached the upstream")
    }

    /// Waits until `n` requests of any kind have arrived since the start.
    pub async fn wait_for(&self, n: usize) {
        let mut arrived = self.request_log.arrived.subscribe();
        if timeout(WAIT_TIMEOUT, arrived.wait_for(|count| *count >= n)).await.is_err() {
            let log = self.log();
            panic!("waited {WAIT_TIMEOUT:?} for {n} requests at the upstream; {} arrived: {log:#?}", log.len());
        }
    }

    pub fn connections(&self) -> usize {
        self.request_log.state().connections
    }

    pub fn connections_open(&self) -> usize {
        self.request_log.state().connections_open
    }

    /// How often the client closed the connection while it waited for a delayed answer (HTTP/1.1 only).
    pub fn client_disconnects(&self) -> usize {
        self.request_log.state().client_disconnects
    }

    /// The number of requests that broke off or were malformed; these are not in the log.
    pub fn broken(&self) -> usize {
        self.request_log.state().malformed_requests
    }

    fn count(&self, which: impl Fn(&LoggedRequest) -> bool) -> usize {
        self.request_log.state().log.iter().filter(|seen| which(seen)).count()
    }
}
