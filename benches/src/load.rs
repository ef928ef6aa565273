//! A load generator for HTTP/1.1 and for unary gRPC calls. Every connection sends its next request when the answer to the
//! last arrived, or when the next one of a fixed rate is due ([`LoadGenerator::run_at_rate`]).
//!
//! It shares the machine's two cores with the servers it measures, so it does as little as it can: request bytes are
//! made once and patched in place, a request costs one write, one read and one look at the clock. It has a thread per core:
//! with one thread it would be the limit of every server that answers faster than it can ask. Requests in flight when
//! time is up are waited for, so a run leaves nothing behind.
//!
//! ```no_run
//! # use ibid_bench::load::{LoadGenerator, LoadKeys, LoadPlan, LoadProtocol, StopCondition};
//! # async fn example() -> std::io::Result<()> {
//! let plan = LoadPlan { addr: ([127, 0, 0, 1], 8080).into(), protocol: LoadProtocol::Http1, path: "/".into(), body_bytes: 300,
//!                   connections: 64, namespace: 1, keys: LoadKeys::Unique, api: None };
//! let mut load = LoadGenerator::connect(&plan).await?;
//! let run = load.run(StopCondition::Requests(100_000), std::process::id()).await?;
//! println!("{:.0} req/s, p99 {:?}", run.per_second(), run.latency.quantile(0.99));
//! # Ok(()) }
//! ```

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use tokio::{io::AsyncWriteExt, net::TcpStream, sync::Semaphore, task::JoinSet, time::timeout};

use self::{
    exchange_api::ExchangeLoadConnection,
    grpc::GrpcLoadConnection,
    http1::{Http1LoadConnection, INITIAL_BUFFER_BYTES, read_response},
    threads::LoadThreads,
};
use crate::{cpu, histogram::LatencyHistogram};

mod exchange_api;
mod grpc;
mod http1;
mod threads;

pub use self::exchange_api::ApiLoad;

/// A server that leaves a request unanswered for so long has failed the run.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(15);

/// What to send, where to, and what to expect.
#[derive(Clone, Debug)]
pub struct LoadPlan {
    /// The server.
    pub addr: SocketAddr,
    /// What to speak with it.
    pub protocol: LoadProtocol,
    /// The request's path.
    pub path: String,
    /// Size of the JSON body.
    pub body_bytes: usize,
    /// Connections, each with one request in flight.
    pub connections: usize,
    /// The first half of every key: two plans with different namespaces share no key.
    pub namespace: u64,
    /// Which keys to use.
    pub keys: LoadKeys,
    /// The app on the exchange API that is sent the requests, in place of a gateway at `addr`.
    pub api: Option<ApiLoad>,
}

/// What is spoken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadProtocol {
    /// HTTP/1.1, answered with 201.
    Http1,
    /// Unary gRPC calls over HTTP/2 without TLS, answered with OK. A failed call counts under 1000 and its code.
    Grpc,
}

impl LoadProtocol {
    /// The only status that does not invalidate the run.
    fn expected(self) -> u16 {
        match self {
            Self::Http1 => 201,
            Self::Grpc => 1000,
        }
    }
}

/// Which idempotency keys a load uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadKeys {
    /// A new key for every request.
    Unique,
    /// The same few keys again and again; [`LoadGenerator::warm_up`] makes them known.
    Fixed(u64),
}

/// When to stop.
#[derive(Clone, Copy, Debug)]
pub enum StopCondition {
    /// After this time, and the requests then in flight.
    After(Duration),
    /// After this many requests, divided evenly among the connections (rounded up).
    Requests(u64),
}

/// What a run came to.
#[derive(Clone, Debug, Default)]
pub struct LoadResult {
    /// Responses received, of any status.
    pub requests: u64,
    /// From the first request to the last response.
    pub elapsed: Duration,
    /// Responses by status.
    pub statuses: BTreeMap<u16, u64>,
    /// Time from sending a request to having its whole response.
    pub latency: LatencyHistogram,
    /// CPU time the server's processes consumed meanwhile.
    pub server_cpu: Duration,
    /// CPU time this process consumed meanwhile.
    pub own_cpu: Duration,
    /// How often the handlers of an app on the exchange API ran.
    pub executed: u64,
    /// The first thing that went wrong; such a run's figures mean nothing.
    pub problem: Option<String>,
}

impl LoadResult {
    /// Requests per second.
    #[must_use]
    pub fn per_second(&self) -> f64 {
        self.requests as f64 / self.elapsed.as_secs_f64()
    }

    /// Microseconds of `cpu` per request.
    #[must_use]
    pub fn cpu_us(&self, cpu: Duration) -> f64 {
        cpu.as_secs_f64() * 1e6 / self.requests.max(1) as f64
    }
}

/// Open connections to one server.
#[derive(Debug)]
pub struct LoadGenerator {
    threads: LoadThreads,
    connections: Vec<LoadConnection>,
    keys: LoadKeys,
    expect: u16,
}

impl LoadGenerator {
    /// Opens all connections of `plan`.
    ///
    /// # Errors
    /// If one of them cannot be opened.
    pub async fn connect(plan: &LoadPlan) -> io::Result<Self> {
        let threads = LoadThreads::start()?;
        let mut connections = Vec::with_capacity(plan.connections);
        for index in 0..plan.connections {
            let connecting = threads.runtime(index).spawn(LoadConnection::connect(plan.clone(), index));
            connections.push(connecting.await.map_err(io::Error::other)??);
        }
        Ok(Self { threads, connections, keys: plan.keys, expect: plan.protocol.expected() })
    }

    /// Sends every fixed key once, one after the other, or a few unique ones; says what went wrong, if anything.
    ///
    /// # Errors
    /// As [`LoadGenerator::run`].
    pub async fn warm_up(&mut self) -> io::Result<Option<String>> {
        let requests = match self.keys {
            LoadKeys::Unique => 16,
            LoadKeys::Fixed(count) => count,
        };
        let rest = self.connections.split_off(1);
        let outcome = self.run(StopCondition::Requests(requests), std::process::id()).await;
        self.connections.extend(rest);
        Ok(outcome?.problem)
    }

    /// Loads the server until `stop`, counting the CPU time of `server_pid` and its children meanwhile.
    ///
    /// # Errors
    /// If the process cannot be observed or the server stops answering. Wrong answers are not errors but an
    /// [`LoadResult::problem`].
    pub async fn run(&mut self, stop: StopCondition, server_pid: u32) -> io::Result<LoadResult> {
        self.run_paced(stop, None, server_pid).await
    }

    /// Sends `rate` requests per second for a time. A request's latency counts from when it was due, even if it had to
    /// wait for a free connection.
    ///
    /// # Errors
    /// As [`LoadGenerator::run`].
    pub async fn run_at_rate(&mut self, rate: f64, time: Duration, server_pid: u32) -> io::Result<LoadResult> {
        self.run_paced(StopCondition::After(time), Some(Pacer::start(rate, time)), server_pid).await
    }

    async fn run_paced(
        &mut self, stop: StopCondition, pacer: Option<Arc<Pacer>>, server_pid: u32,
    ) -> io::Result<LoadResult> {
        let limit = match stop {
            StopCondition::After(duration) => duration + RESPONSE_TIMEOUT,
            StopCondition::Requests(_) => RESPONSE_TIMEOUT * 4,
        };
        let share = match stop {
            StopCondition::After(_) => u64::MAX,
            StopCondition::Requests(total) => total.div_ceil(self.connections.len().max(1) as u64),
        };
        let server_cpu = cpu::family_cpu_time(server_pid)?;
        let own_cpu = cpu::cpu_time(std::process::id())?;
        let start = Instant::now();
        let until = match stop {
            StopCondition::After(duration) => start + duration,
            StopCondition::Requests(_) => start + limit,
        };
        let mut tasks = JoinSet::new();
        for connection in self.connections.drain(..) {
            let runtime = self.threads.runtime(connection.index);
            tasks.spawn_on(connection.drive(share, until, pacer.clone(), self.expect), runtime);
        }
        let mut outcome = LoadResult::default();
        let all = async {
            while let Some(done) = tasks.join_next().await {
                let (connection, tally) = done.map_err(io::Error::other)?;
                self.connections.push(connection);
                tally.add_to(&mut outcome);
            }
            io::Result::Ok(())
        };
        timeout(limit, all)
            .await
            .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "the server stopped answering"))??;
        outcome.elapsed = start.elapsed();
        outcome.server_cpu = cpu::family_cpu_time(server_pid)?.saturating_sub(server_cpu);
        outcome.own_cpu = cpu::cpu_time(std::process::id())?.saturating_sub(own_cpu);
        Ok(outcome)
    }
}

async fn connect(addr: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(addr).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// The serial numbers of one connection's keys.
#[derive(Debug)]
enum KeySerials {
    /// Counts up from a start that no other connection reaches.
    Unique(u64),
    /// Goes round the fixed keys.
    Round { next: u64, count: u64 },
}

impl KeySerials {
    fn of(keys: LoadKeys, connection: u64) -> Self {
        match keys {
            LoadKeys::Unique => Self::Unique(connection << 40),
            LoadKeys::Fixed(count) => Self::Round { next: connection % count.max(1), count: count.max(1) },
        }
    }

    fn advance(&mut self) -> u64 {
        match self {
            Self::Unique(next) => {
                *next += 1;
                *next
            }
            Self::Round { next, count } => {
                *next = (*next + 1) % *count;
                *next
            }
        }
    }
}

#[derive(Debug)]
struct LoadConnection {
    /// Which connection of its generator this is.
    index: usize,
    protocol: ProtocolConnection,
    serials: KeySerials,
}

#[derive(Debug)]
enum ProtocolConnection {
    Http1(Http1LoadConnection),
    Grpc(Box<GrpcLoadConnection>),
    ExchangeApi(ExchangeLoadConnection),
}

impl LoadConnection {
    async fn connect(plan: LoadPlan, index: usize) -> io::Result<Self> {
        let serial = index as u64;
        let protocol = match (&plan.api, plan.protocol) {
            (Some(api), _) => {
                ProtocolConnection::ExchangeApi(ExchangeLoadConnection::connect(api, &plan, serial).await?)
            }
            (None, LoadProtocol::Http1) => {
                ProtocolConnection::Http1(Http1LoadConnection::new(connect(plan.addr).await?, &plan))
            }
            (None, LoadProtocol::Grpc) => {
                let stream = connect(plan.addr).await?;
                ProtocolConnection::Grpc(Box::new(GrpcLoadConnection::connect(stream, &plan).await?))
            }
        };
        Ok(Self { index, protocol, serials: KeySerials::of(plan.keys, serial) })
    }

    /// Sends up to `requests`, none after `until`, and hands the connection back for the next run.
    async fn drive(
        mut self, requests: u64, until: Instant, pacer: Option<Arc<Pacer>>, expect: u16,
    ) -> (Self, ConnectionTally) {
        let mut tally = ConnectionTally::default();
        let mut sent = Instant::now();
        for _ in 0..requests {
            if let Some(pacer) = &pacer {
                let Some(due) = pacer.next_due().await else { break };
                sent = due;
            } else if sent >= until {
                break;
            }
            let status = match self.exchange().await {
                Ok(status) => status,
                Err(error) => {
                    tally.problem.get_or_insert_with(|| error.to_string());
                    break;
                }
            };
            let arrived = Instant::now();
            tally.latency.record(arrived.saturating_duration_since(sent));
            sent = arrived;
            if status == expect {
                tally.expected += 1;
            } else {
                *tally.others.entry(status).or_default() += 1;
                tally
                    .problem
                    .get_or_insert_with(|| format!("status {status} instead of {expect}:\n{}", self.last_response()));
            }
        }
        if let ProtocolConnection::ExchangeApi(app) = &mut self.protocol {
            tally.executed = std::mem::take(&mut app.executed);
        }
        tally.status = expect;
        (self, tally)
    }

    /// One request and its whole answer, of which the status is told.
    async fn exchange(&mut self) -> io::Result<u16> {
        let serial = self.serials.advance();
        match &mut self.protocol {
            ProtocolConnection::Http1(line) => line.exchange(serial).await,
            ProtocolConnection::Grpc(calls) => calls.exchange(serial).await,
            ProtocolConnection::ExchangeApi(app) => app.exchange(serial).await,
        }
    }

    /// The last answer, for people.
    fn last_response(&self) -> String {
        match &self.protocol {
            ProtocolConnection::Http1(line) => line.last(),
            ProtocolConnection::Grpc(calls) => calls.last(),
            ProtocolConnection::ExchangeApi(app) => app.last(),
        }
    }
}

/// Says when the next request of a fixed rate is due. Timers of the runtime are too coarse for that, so a thread does.
#[derive(Debug)]
struct Pacer {
    start: Instant,
    rate: f64,
    total: u64,
    /// One permit per request that is due.
    due: Semaphore,
    taken: AtomicU64,
}

impl Pacer {
    /// How long the thread sleeps between two looks at the clock.
    const TICK: Duration = Duration::from_micros(50);

    #[expect(clippy::disallowed_methods, reason = "sleeps on a thread of its own")]
    fn start(rate: f64, time: Duration) -> Arc<Self> {
        let (start, due, total) = (Instant::now(), Semaphore::new(0), (time.as_secs_f64() * rate) as u64);
        let pacer = Arc::new(Self { start, rate, total, due, taken: AtomicU64::new(0) });
        let paced = pacer.clone();
        std::thread::spawn(move || {
            let mut released = 0;
            while released < total {
                let due = ((start.elapsed().as_secs_f64() * rate) as u64).min(total);
                paced.due.add_permits((due - released) as usize);
                released = due;
                std::thread::sleep(Self::TICK);
            }
        });
        pacer
    }

    /// Waits for the next request; returns when it was due, or `None` after the last.
    async fn next_due(&self) -> Option<Instant> {
        let nth = self.taken.fetch_add(1, Relaxed);
        if nth >= self.total {
            return None;
        }
        self.due.acquire().await.expect("it is never closed").forget();
        Some(self.start + Duration::from_secs_f64((nth + 1) as f64 / self.rate))
    }
}

/// One connection's share of an [`Outcome`].
#[derive(Default)]
struct ConnectionTally {
    status: u16,
    expected: u64,
    others: BTreeMap<u16, u64>,
    executed: u64,
    latency: LatencyHistogram,
    problem: Option<String>,
}

impl ConnectionTally {
    fn add_to(self, outcome: &mut LoadResult) {
        let expected = (self.expected > 0).then_some((self.status, self.expected));
        for (status, count) in expected.into_iter().chain(self.others) {
            *outcome.statuses.entry(status).or_default() += count;
            outcome.requests += count;
        }
        outcome.latency.merge(&self.latency);
        outcome.executed += self.executed;
        outcome.problem = outcome.problem.take().or(self.problem);
    }
}

/// Asks one of the benchmark's own servers how many POSTs its app has executed.
///
/// # Errors
/// If it does not answer with a number.
pub async fn executions(addr: SocketAddr) -> io::Result<u64> {
    let ask = async {
        let mut stream = TcpStream::connect(addr).await?;
        stream.write_all(format!("GET /count HTTP/1.1\r\nHost: {addr}\r\n\r\n").as_bytes()).await?;
        let mut buffer = vec![0; INITIAL_BUFFER_BYTES];
        let response = read_response(&mut stream, &mut buffer).await?;
        let body = String::from_utf8_lossy(&buffer[response.body_at..response.len]);
        body.trim().parse().map_err(|_| io::Error::new(io::ErrorKind::InvalidData, format!("{addr}/count: {body:?}")))
    };
    timeout(RESPONSE_TIMEOUT, ask).await?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_pacer_makes_its_rate_due_and_ends() {
        let pacer = Pacer::start(2000.0, Duration::from_millis(250));
        let mut last = pacer.start;
        let mut count = 0;
        while let Some(due) = pacer.next_due().await {
            assert!(due > last && due <= pacer.start + Duration::from_millis(251));
            (last, count) = (due, count + 1);
        }
        assert_eq!(count, 500);
    }
}
