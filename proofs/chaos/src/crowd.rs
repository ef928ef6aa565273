//! Very many waiters for one key: one runs, all get its answer, and the store is hardly asked.
//!
//! The clients speak HTTP/2, a hundred requests to a connection, so that ten thousand of them need no more than a few
//! hundred file descriptors. The upstream holds its answer back until every gateway says that all of them are there.

use std::{
    collections::BTreeMap,
    fmt, io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http2::{SendRequest, handshake};
use hyper_util::rt::{TokioExecutor, TokioIo};
use testbed::{FaultProxy, ProxyCounts};
use tokio::{
    net::TcpStream,
    task::JoinSet,
    time::{sleep, timeout},
};

use crate::{
    fleet::{FleetLayout, GatewayFleet},
    random::SplitMix64,
    upstream::Upstream,
};

/// How many requests one connection carries at once; gateways allow more.
const STREAMS_PER_CONNECTION: usize = 100;
/// How long they may take to arrive, and to be answered.
const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(60);
/// Between two tries of one who was told to come back: doubled each time, with jitter.
const INITIAL_BACKOFF: Duration = Duration::from_millis(200);
const MAX_BACKOFF: Duration = Duration::from_secs(3);
const SHARED_KEY: &str = "the-one-key";

/// What to do.
#[derive(Debug)]
pub struct WaiterPlan {
    /// The gateway's binary.
    pub bin: PathBuf,
    /// The `[store]` table of each gateway.
    pub stores: Vec<String>,
    /// How many wait, all gateways together.
    pub waiters: usize,
    /// The ways to the store's servers, by name.
    pub proxies: Vec<(String, Arc<FaultProxy>)>,
}

/// What came of it.
#[derive(Debug)]
pub struct WaiterReport {
    /// How many waited.
    pub waiters: usize,
    /// How often it ran.
    pub executions: usize,
    /// How many got the answer of the one execution.
    pub answered: usize,
    /// How often one was told to come back, and did.
    pub told_to_retry: usize,
    /// What the others got.
    pub others: BTreeMap<String, usize>,
    /// What went over each link from the first waiter's arrival until all were answered.
    pub traffic: Vec<(String, ProxyTraffic)>,
    /// From the first request to the last answer.
    pub duration: Duration,
}

/// What went over a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProxyTraffic {
    /// Connections that were open at once, at most, since the link was made.
    pub most_open: usize,
    /// While they waited and were answered.
    pub round_trips: u64,
    /// The same, both ways.
    pub bytes: u64,
}

impl ProxyTraffic {
    fn between(before: ProxyCounts, after: ProxyCounts) -> ProxyTraffic {
        let bytes = |counts: ProxyCounts| counts.bytes_to_server + counts.bytes_to_client;
        ProxyTraffic {
            most_open: after.most_open,
            round_trips: after.round_trips - before.round_trips,
            bytes: bytes(after) - bytes(before),
        }
    }
}

impl WaiterReport {
    /// What is wrong; nothing if one ran, all were answered, and each link had at most so many connections and round trips.
    pub fn complaints(&self, most_open: usize, round_trips: u64) -> Vec<String> {
        let mut complaints = Vec::new();
        if self.executions != 1 {
            complaints.push(format!("it ran {} times", self.executions));
        }
        if self.answered != self.waiters {
            complaints
                .push(format!("{} of {} got the answer; the others: {:?}", self.answered, self.waiters, self.others));
        }
        for (name, traffic) in &self.traffic {
            if traffic.most_open > most_open || traffic.round_trips > round_trips {
                complaints.push(format!(
                    "{name}: {traffic:?}, allowed are {most_open} connections, {round_trips} round trips"
                ));
            }
        }
        complaints
    }
}

impl fmt::Display for WaiterReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let WaiterReport { waiters, executions, answered, told_to_retry: turned_away, duration: took, .. } = self;
        write!(f, "{waiters} waiters, {executions} execution, {answered} answered, ")?;
        writeln!(f, "{turned_away} times told to come back, {:.1}s", took.as_secs_f64())?;
        for (what, times) in &self.others {
            writeln!(f, "  {times} got: {what}")?;
        }
        for (name, ProxyTraffic { most_open, round_trips, bytes }) in &self.traffic {
            writeln!(f, "  {name}: {most_open} connections, {round_trips} round trips, {bytes} bytes")?;
        }
        Ok(())
    }
}

/// Lets them wait.
///
/// # Errors
///
/// If the upstream cannot be started, a connection not be opened, or not all of them arrive in time.
///
/// # Panics
///
/// If a gateway does not start.
pub async fn run_waiters(crowd: &WaiterPlan) -> io::Result<WaiterReport> {
    let folder = tempfile::Builder::new().prefix("ibid-crowd-").tempdir()?;
    let upstream = Upstream::start(folder.path(), Instant::now(), 1).await?;
    let configs: Vec<String> = crowd.stores.iter().map(|store| config(store, crowd.waiters)).collect();
    let fleet =
        GatewayFleet::start(FleetLayout::Gateway, Path::new(&crowd.bin), &configs, upstream.addr(), None).await?;

    let mut senders = Vec::new();
    for nth in 0..crowd.waiters.div_ceil(STREAMS_PER_CONNECTION) {
        senders.push(connect(fleet.addr(nth % fleet.len())).await?);
    }
    let before: Vec<ProxyCounts> = crowd.proxies.iter().map(|(_, link)| link.counts()).collect();
    let began = Instant::now();
    let turned_away = Arc::new(AtomicUsize::new(0));
    let mut waiting = JoinSet::new();
    for nth in 0..crowd.waiters {
        waiting.spawn(wait_for_answer(
            senders[nth / STREAMS_PER_CONNECTION].clone(),
            SplitMix64::new(nth as u64),
            Arc::clone(&turned_away),
        ));
    }
    let mut heard = WaiterAnswers::default();
    wait_for_arrival(&fleet, crowd.waiters, &mut waiting, &mut heard).await?;
    upstream.release_held();
    while let Some(answer) = waiting.join_next().await {
        heard.record_answer(answer.expect("a waiter never panics"));
    }
    let WaiterAnswers { mut answers, mut others, .. } = heard;
    let took = began.elapsed();
    let runs = upstream.executions().remove(SHARED_KEY).unwrap_or_default();
    let answered = runs.first().and_then(|run| answers.remove(&run.answer)).unwrap_or(0);
    for (body, times) in answers {
        others.insert(format!("another answer: {}", String::from_utf8_lossy(&body)), times);
    }
    let after = crowd.proxies.iter().map(|(name, link)| (name.clone(), link.counts()));
    let traffic =
        after.zip(before).map(|((name, after), before)| (name, ProxyTraffic::between(before, after))).collect();
    let turned_away = turned_away.load(SeqCst);
    Ok(WaiterReport {
        waiters: crowd.waiters,
        executions: runs.len(),
        answered,
        told_to_retry: turned_away,
        others,
        traffic,
        duration: took,
    })
}

fn config(store: &str, waiters: usize) -> String {
    let most = waiters + 100;
    format!(
        "max_running = {most}\n[log]\nlevel = \"warn\"\n[policy]\npreset = \"ietf\"\non_concurrent = \"wait\"\n\
         wait_timeout = \"120s\"\ntimeout = \"120s\"\n{store}\n"
    )
}

async fn connect(addr: SocketAddr) -> io::Result<SendRequest<Full<Bytes>>> {
    let stream = TcpStream::connect(addr).await?;
    stream.set_nodelay(true)?;
    let (sender, connection) = handshake(TokioExecutor::new(), TokioIo::new(stream)).await.map_err(io::Error::other)?;
    tokio::spawn(connection);
    Ok(sender)
}

/// Asks until there is an answer; those who are told to come back do.
async fn wait_for_answer(
    mut sender: SendRequest<Full<Bytes>>, mut dice: SplitMix64, turned_away: Arc<AtomicUsize>,
) -> Result<Bytes, String> {
    let end = Instant::now() + ARRIVAL_TIMEOUT * 2;
    let mut pause = INITIAL_BACKOFF;
    loop {
        let (status, body) = match timeout(ARRIVAL_TIMEOUT * 2, send_once(&mut sender)).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => return Err(format!("no answer: {error}")),
            Err(_) => return Err(format!("no answer within {:?}", ARRIVAL_TIMEOUT * 2)),
        };
        let text = String::from_utf8_lossy(&body);
        match status {
            201 => return Ok(body),
            503 | 409 if !text.contains("#outcome-unknown") && Instant::now() < end => {
                turned_away.fetch_add(1, SeqCst);
            }
            _ => return Err(format!("{status} {text}")),
        }
        sleep(dice.within(&(pause / 2..pause * 3 / 2))).await;
        pause = (pause * 2).min(MAX_BACKOFF);
    }
}

async fn send_once(sender: &mut SendRequest<Full<Bytes>>) -> Result<(u16, Bytes), hyper::Error> {
    let request = Request::post("http://shop.example/held").header("authorization", "Bearer chaos");
    let request = request.header("idempotency-key", SHARED_KEY).header("content-type", "application/json");
    let request = request.body(Full::new(Bytes::from_static(br#"{"amount":1}"#))).expect("a valid request");
    sender.ready().await?;
    let (head, body) = sender.send_request(request).await?.into_parts();
    Ok((head.status.as_u16(), body.collect().await?.to_bytes()))
}

/// What the waiters got so far.
#[derive(Debug, Default)]
struct WaiterAnswers {
    answers: BTreeMap<Bytes, usize>,
    others: BTreeMap<String, usize>,
    count: usize,
}

impl WaiterAnswers {
    fn record_answer(&mut self, answer: Result<Bytes, String>) {
        self.count += 1;
        match answer {
            Ok(body) => *self.answers.entry(body).or_default() += 1,
            Err(what) => *self.others.entry(what).or_default() += 1,
        }
    }
}

/// Returns once all of them are at work in the gateways, where one runs and the others wait, or have been turned away.
async fn wait_for_arrival(
    fleet: &GatewayFleet, waiters: usize, waiting: &mut JoinSet<Result<Bytes, String>>, heard: &mut WaiterAnswers,
) -> io::Result<()> {
    let end = Instant::now() + ARRIVAL_TIMEOUT;
    loop {
        let mut there = 0;
        for nth in 0..fleet.len() {
            there += fleet.health(nth).await.map_or(0, |health| health.requests_running);
        }
        while let Some(answer) = waiting.try_join_next() {
            heard.record_answer(answer.expect("a waiter never panics"));
        }
        if there + heard.count >= waiters {
            return Ok(());
        }
        if Instant::now() >= end {
            let what =
                format!("only {there} of {waiters} waiters wait after {ARRIVAL_TIMEOUT:?}; others: {:?}", heard.others);
            return Err(io::Error::other(what));
        }
        sleep(Duration::from_millis(20)).await;
    }
}
