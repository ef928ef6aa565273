//! A real upstream in the test's own process, which counts what it runs.
//!
//! A request with a mutating method is an *execution*: it is written to the log before it is answered, and the answer,
//! `201 {"id":N,"run":N}`, carries its number, so that a test can tell a replay from a second run by the body alone.
//! A GET is logged and answered with `200 {"ok":true}`. Rules by path change the answer ([`UpstreamReply`]) or break the
//! connection ([`UpstreamFault`]).
//!
//! Invariant: an execution is in the log before the first byte of its answer, or its fault, is on the wire.
//!
//! ```no_run
//! # async fn example() {
//! use ibid_testkit::upstream::{Fault, Gate, Reply, Upstream};
//!
//! let upstream = Upstream::start().await;
//! let gate = Gate::new();
//! upstream.on("/pay", Reply::usual().gated(&gate));
//! upstream.on("/lost", Fault::ResetAfterRequest);
//! upstream.on_each("/flaky", [Reply::status(500), Reply::usual()]);
//! // … send something …
//! gate.arrived(1).await;
//! gate.open();
//! assert_eq!(upstream.executions_at("/pay"), 1);
//! # }
//! ```

use std::{
    fmt,
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    net::{TcpListener, TcpSocket},
    task::{JoinHandle, JoinSet},
    time::{sleep, timeout},
};

use self::request_log::RequestLog;
pub use self::{
    gate::ReplyGate,
    reply::{UpstreamFault, UpstreamReply, filler},
    request_log::LoggedRequest,
};
use crate::http1::WAIT_TIMEOUT;

mod gate;
mod h1;
mod h2c;
mod reply;
mod request_log;

/// The upstream. Dropping it closes everything.
pub struct TestUpstream {
    request_log: Arc<RequestLog>,
    addr: SocketAddr,
    protocol: UpstreamProtocol,
    state: Mutex<UpstreamState>,
}

/// What is spoken on new connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UpstreamProtocol {
    /// HTTP/1.1 by hand, with every fault.
    Http1,
    /// HTTP/2 with prior knowledge (HTTP/1.1 too), by hyper.
    H2c,
}

enum UpstreamState {
    Listening(JoinHandle<()>),
    /// The port stays bound, so that nobody else gets it, but refuses connections.
    Refusing(TcpSocket),
    Changing,
}

impl TestUpstream {
    /// Starts an HTTP/1.1 upstream on a free port of the loopback.
    pub async fn start() -> TestUpstream {
        TestUpstream::start_with(UpstreamProtocol::Http1)
    }

    /// Starts an upstream that speaks HTTP/2 without TLS (and HTTP/1.1). Faults act on the stream; those that only make
    /// sense on a raw connection are refused by [`on`](TestUpstream::on).
    pub async fn start_h2c() -> TestUpstream {
        TestUpstream::start_with(UpstreamProtocol::H2c)
    }

    fn start_with(protocol: UpstreamProtocol) -> TestUpstream {
        let socket = bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).expect("a free port");
        let addr = socket.local_addr().expect("a bound socket has an address");
        let ledger = Arc::new(RequestLog::default());
        let upstream =
            TestUpstream { request_log: ledger, addr, protocol, state: Mutex::new(UpstreamState::Refusing(socket)) };
        upstream.start_listening();
        upstream
    }

    /// An upstream whose port is taken but refuses every connection, until [`restart`](TestUpstream::restart).
    pub async fn start_refusing() -> TestUpstream {
        let upstream = TestUpstream::start().await;
        upstream.stop().await;
        upstream
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Its address as a URL without a path.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Answers requests with exactly this path (the query does not count) like this from now on. `"OPTIONS /pay"` is for one
    /// method only, `"OPTIONS *"` for it at every path; these come before a path alone.
    ///
    /// # Panics
    ///
    /// If this upstream's protocol cannot do it.
    pub fn on(&self, path: &str, reply: impl Into<UpstreamReply>) {
        self.on_each(path, [reply.into()]);
    }

    /// Answers the first request at this path with the first reply, and so on; the last one stays.
    ///
    /// # Panics
    ///
    /// If there is no reply, or this upstream's protocol cannot do one.
    pub fn on_each(&self, path: &str, replies: impl IntoIterator<Item = UpstreamReply>) {
        self.request_log.set_rule(Some(path), self.check_replies(replies));
    }

    /// Answers every path without a rule of its own like this from now on.
    ///
    /// # Panics
    ///
    /// If this upstream's protocol cannot do it.
    pub fn reply_by_default(&self, reply: impl Into<UpstreamReply>) {
        self.request_log.set_rule(None, self.check_replies([reply.into()]));
    }

    /// Removes every rule; the log stays.
    pub fn clear_rules(&self) {
        self.request_log.clear_rules();
    }

    fn check_replies(&self, replies: impl IntoIterator<Item = UpstreamReply>) -> Vec<UpstreamReply> {
        let replies: Vec<_> = replies.into_iter().collect();
        assert!(!replies.is_empty(), "a rule needs a reply");
        if self.protocol == UpstreamProtocol::H2c {
            replies.iter().for_each(h2c::check_supported);
        }
        replies
    }

    /// Closes every connection, answered or not, and refuses new ones.
    pub async fn stop(&self) {
        let state = std::mem::replace(&mut *self.state.lock(), UpstreamState::Changing);
        let socket = match state {
            UpstreamState::Listening(task) => {
                task.abort();
                let _ = task.await;
                self.wait_all_closed().await;
                self.rebind().await
            }
            UpstreamState::Refusing(socket) => socket,
            UpstreamState::Changing => panic!("two tasks stop or restart one upstream"),
        };
        *self.state.lock() = UpstreamState::Refusing(socket);
    }

    /// Accepts connections again, on the same port, with the same log and rules.
    pub async fn restart(&self) {
        self.stop().await;
        self.start_listening();
    }

    fn start_listening(&self) {
        let mut state = self.state.lock();
        let UpstreamState::Refusing(socket) = std::mem::replace(&mut *state, UpstreamState::Changing) else {
            panic!("the upstream is listening already");
        };
        let listener = socket.listen(1024).expect("a bound socket can listen");
        *state = UpstreamState::Listening(tokio::spawn(accept_connections(
            listener,
            Arc::clone(&self.request_log),
            self.protocol,
        )));
    }

    async fn wait_all_closed(&self) {
        let closed = async {
            while self.connections_open() > 0 {
                sleep(Duration::from_millis(2)).await;
            }
        };
        timeout(WAIT_TIMEOUT, closed).await.expect("the upstream's connections end");
    }

    async fn rebind(&self) -> TcpSocket {
        let bound = async {
            loop {
                match bind(self.addr) {
                    Ok(socket) => return socket,
                    Err(_) => sleep(Duration::from_millis(20)).await,
                }
            }
        };
        timeout(WAIT_TIMEOUT, bound).await.unwrap_or_else(|_| panic!("{} was taken by another process", self.addr))
    }
}

/// What happened so far.
impl TestUpstream {
    /// How many requests with a mutating method arrived whole and were carried out.
    pub fn executions(&self) -> usize {
        self.count(|seen| seen.execution.is_some())
    }

    /// The executions with this path, whatever their query.
    pub fn executions_at(&self, path: &str) -> usize {
        self.count(|seen| seen.execution.is_some() && seen.path() == path)
    }

    /// The executions whose `Idempotency-Key` or `X-Idempotency-Key` is this, quoted or not.
    pub fn executions_with_key(&self, key: &str) -> usize {
        self.count(|seen| seen.execution.is_some() && seen.key() == Some(key))
    }

    /// How many requests of any kind arrived.
    pub fn requests(&self) -> usize {
        self.count(|_| true)
    }

    /// Everything that arrived, in order.
    pub fn log(&self) -> Vec<LoggedRequest> {
        self.request_log.log()
    }

    /// The last request that arrived.
    ///
    /// # Panics
    ///
    /// If there was none.
    pub fn last(&self) -> LoggedRequest {
        self.log().pop().expect("a request reached the upstream")
    }

    /// Waits until `n` requests of any kind have arrived since the start.
    ///
    /// # Panics
    ///
    /// If they do not arrive within ten seconds, with what did.
    pub async fn wait_for(&self, n: usize) {
        if timeout(WAIT_TIMEOUT, self.request_log.wait_arrived(n)).await.is_err() {
            let log = self.log();
            panic!("waited {WAIT_TIMEOUT:?} for {n} requests at the upstream; {} arrived: {log:#?}", log.len());
        }
    }

    /// How many connections were ever accepted.
    pub fn connections(&self) -> usize {
        self.request_log.connections()
    }

    /// How many connections are open now.
    pub fn connections_open(&self) -> usize {
        self.request_log.connections_open()
    }

    /// How often the other side closed the connection while its answer was being held back (HTTP/1.1 only).
    pub fn client_disconnects(&self) -> usize {
        self.request_log.client_disconnects()
    }

    /// How many requests broke off or were malformed; these are not in the log.
    pub fn broken(&self) -> usize {
        self.request_log.malformed_requests()
    }

    fn count(&self, which: impl Fn(&LoggedRequest) -> bool) -> usize {
        self.request_log.count(which)
    }
}

impl fmt::Debug for TestUpstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TestUpstream").field("addr", &self.addr).field("log", &self.log()).finish_non_exhaustive()
    }
}

impl Drop for TestUpstream {
    fn drop(&mut self) {
        if let UpstreamState::Listening(task) = &*self.state.lock() {
            task.abort();
        }
    }
}

fn bind(addr: SocketAddr) -> std::io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    // Connections of before a restart linger in the kernel and would otherwise keep the port.
    socket.set_reuseaddr(true)?;
    socket.bind(addr)?;
    Ok(socket)
}

/// Serves until aborted; the connections end with it, for they are tasks of the set.
async fn accept_connections(listener: TcpListener, ledger: Arc<RequestLog>, protocol: UpstreamProtocol) {
    let mut connections = JoinSet::new();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(_) => {
                sleep(Duration::from_millis(10)).await;
                continue;
            }
        };
        while connections.try_join_next().is_some() {}
        let _ = stream.set_nodelay(true);
        let open = RequestLog::open(&ledger);
        match protocol {
            UpstreamProtocol::Http1 => connections.spawn(h1::serve(stream, open)),
            UpstreamProtocol::H2c => connections.spawn(h2c::serve(stream, open)),
        };
    }
}
