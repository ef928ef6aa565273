//! A soak: mixed traffic at a fixed rate on one gateway, and whether memory, file descriptors, the store and response times
//! stay what they are.
//!
//! New requests, replays, mismatches, clients that hang up, replies of the upstream that break, and reloads of the
//! configuration. Records expire soon, so that the store reaches its size early.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt, fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use parking_lot::Mutex;
use testbed::{
    FaultProxy,
    client::{RawClient, TestResponse, post},
    process::GatewayProcess,
};
use tokio::{
    task::JoinSet,
    time::{sleep, sleep_until, timeout},
};

use self::samples::{SoakSample, write_curves};
use crate::{random::SplitMix64, upstream::Upstream};

pub mod samples;

/// How long records are kept, and up to which age one is asked for again.
const RECORD_TTL: Duration = Duration::from_secs(20);
const MAX_REPLAY_AGE: Duration = Duration::from_secs(8);
const MAX_SAMPLE_INTERVAL: Duration = Duration::from_secs(10);
const SAMPLE_COUNT: u32 = 30;
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// How many keys there are to ask for again.
const MAX_RECENT_KEYS: usize = 1000;

/// What to soak, and how long.
#[derive(Debug)]
pub struct SoakPlan<'a> {
    /// For the report.
    pub name: &'a str,
    /// The gateway's binary.
    pub bin: &'a Path,
    /// The `[store]` table.
    pub store: String,
    /// How long.
    pub length: Duration,
    /// How many connections clients have.
    pub clients: usize,
    /// Requests per second, of all clients.
    pub rate: f64,
    /// Decides what clients send.
    pub seed: u64,
    /// The folder for samples and curves, as `NAME.csv` and `NAME.svg`.
    pub curves: Option<&'a Path>,
}

/// What a soak shows.
#[derive(Debug)]
pub struct SoakReport {
    name: String,
    /// In the order of time.
    pub samples: Vec<SoakSample>,
    /// Requests by kind and answer.
    pub answers: BTreeMap<String, usize>,
    /// Keys that ran more than once.
    pub duplicates: usize,
    /// Configurations that were loaded while it ran.
    pub reloads: usize,
    wrong: Vec<String>,
}

/// What a client does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SoakAction {
    First,
    Replay,
    Mismatch,
    HangUp,
    BrokenReply,
}

struct SoakTraffic {
    addr: std::net::SocketAddr,
    upstream: Arc<FaultProxy>,
    next_key: AtomicUsize,
    /// Keys with their answer, and since when.
    recent: Mutex<VecDeque<(String, Bytes, Instant)>>,
    answers: Mutex<BTreeMap<String, usize>>,
    wrong: Mutex<Vec<String>>,
    latencies: Mutex<Vec<Duration>>,
}

/// Runs it. `store_bytes` says how large the store is, given the gateway's folder.
///
/// # Errors
///
/// If the upstream cannot be started, or the curves not be written.
///
/// # Panics
///
/// If the gateway does not start.
pub async fn run_soak(plan: &SoakPlan<'_>, store_bytes: impl Fn(&Path) -> u64) -> io::Result<SoakReport> {
    let folder = tempfile::Builder::new().prefix("ibid-soak-").tempdir()?;
    let began = Instant::now();
    let app = Upstream::start(folder.path(), began, plan.seed).await?;
    let link = Arc::new(FaultProxy::to(app.addr()));
    let launch = GatewayProcess::launch(plan.bin).config(config(&plan.store, 0));
    let gateway = launch.upstream(&format!("http://{}", link.addr())).start().await;
    let traffic = Arc::new(SoakTraffic {
        addr: gateway.addr(),
        upstream: link,
        next_key: AtomicUsize::new(0),
        recent: Mutex::default(),
        answers: Mutex::default(),
        wrong: Mutex::default(),
        latencies: Mutex::default(),
    });
    let start = tokio::time::Instant::now();
    let period = Duration::from_secs_f64(plan.clients as f64 / plan.rate);
    let mut clients = JoinSet::new();
    for nth in 0..plan.clients {
        let first = start + period * nth as u32 / plan.clients as u32;
        let random = SplitMix64::new(plan.seed ^ ((nth as u64 + 1) << 32));
        clients.spawn(Arc::clone(&traffic).run_client(first, period, start + plan.length, random));
    }
    let interval = (plan.length / SAMPLE_COUNT).clamp(Duration::from_secs(1), MAX_SAMPLE_INTERVAL);
    let (mut samples, mut reloads) = (Vec::new(), 0);
    let mut at = start + interval;
    while at <= start + plan.length {
        sleep_until(at).await;
        samples.push(SoakSample::take(
            at - start,
            &gateway,
            store_bytes(gateway.dir()),
            std::mem::take(&mut *traffic.latencies.lock()),
        ));
        reloads += 1;
        gateway.rewrite_config(&config(&plan.store, reloads));
        at += interval;
    }
    while let Some(client) = clients.join_next().await {
        client.expect("a client only ever complains in words");
    }
    let loaded = gateway.logs().iter().filter(|line| line.contains("configuration taken up")).count();
    let executions = app.executions();
    let report = SoakReport {
        name: plan.name.to_owned(),
        samples,
        answers: std::mem::take(&mut *traffic.answers.lock()),
        duplicates: executions.values().filter(|runs| runs.len() > 1).count(),
        reloads: loaded,
        wrong: std::mem::take(&mut *traffic.wrong.lock()),
    };
    if let Some(folder) = plan.curves {
        write_curves(folder, plan.name, &report.samples)?;
    }
    Ok(report)
}

/// The bytes that the files of a folder take on disk.
pub fn folder_bytes(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let sizes = entries.filter_map(|entry| entry.metadata().ok().map(|meta| (entry.path(), meta)));
    sizes.map(|(path, meta): (PathBuf, _)| if meta.is_dir() { folder_bytes(&path) } else { meta.blocks() * 512 }).sum()
}

/// Every second configuration has another limit, which no request reaches.
fn config(store: &str, nth: usize) -> String {
    let (ttl, timeout) = (RECORD_TTL.as_secs(), 8 + nth % 2);
    format!(
        "[log]\nlevel = \"info\"\n[policy]\npreset = \"ietf\"\nttl = \"{ttl}s\"\ntimeout = \"{timeout}s\"\n{store}\nsweep_every = \"5s\"\n"
    )
}

impl SoakAction {
    fn choose(random: &mut SplitMix64) -> SoakAction {
        match random.next_below(100) {
            0 => SoakAction::BrokenReply,
            1..=4 => SoakAction::HangUp,
            5..=9 => SoakAction::Mismatch,
            10..=39 => SoakAction::Replay,
            _ => SoakAction::First,
        }
    }
}

impl SoakTraffic {
    /// One request after the other, each at its time.
    async fn run_client(
        self: Arc<Self>, first: tokio::time::Instant, period: Duration, end: tokio::time::Instant,
        mut random: SplitMix64,
    ) {
        let (mut connection, mut at) = (None, first);
        while at < end {
            sleep_until(at).await;
            at += period;
            let action = SoakAction::choose(&mut random);
            if let Err(error) = self.act(action, &mut connection, &mut random).await {
                self.count(action, &error);
                connection = None;
            }
        }
    }

    async fn act(
        &self, action: SoakAction, connection: &mut Option<RawClient>, random: &mut SplitMix64,
    ) -> Result<(), String> {
        let fresh = || format!("soak-{}", self.next_key.fetch_add(1, SeqCst));
        let known = {
            let mut recent = self.recent.lock();
            while recent.front().is_some_and(|(_, _, at)| at.elapsed() > MAX_REPLAY_AGE) {
                recent.pop_front();
            }
            if recent.is_empty() { None } else { recent.get(random.next_below(recent.len())).cloned() }
        };
        let (action, key, told) = match (action, known) {
            (SoakAction::Replay | SoakAction::Mismatch, Some((key, told, _))) => (action, key, Some(told)),
            (SoakAction::Replay | SoakAction::Mismatch, None) => (SoakAction::First, fresh(), None),
            _ => (action, fresh(), None),
        };
        match action {
            SoakAction::HangUp => {
                let mut raw = RawClient::try_connect(self.addr).await.map_err(|error| error.to_string())?;
                let head =
                    "POST /5 HTTP/1.1\r\nHost: shop.example\r\nAuthorization: Bearer soak\r\nContent-Length: 0\r\n";
                raw.try_send(format!("{head}Idempotency-Key: {key}\r\n\r\n"))
                    .await
                    .map_err(|error| error.to_string())?;
                sleep(Duration::from_millis(2)).await;
                raw.abort();
                self.count(action, "hung up");
                return Ok(());
            }
            SoakAction::BrokenReply => self.upstream.break_answers(1),
            _ => {}
        }
        let amount = if action == SoakAction::Mismatch { 2 } else { 1 };
        let began = Instant::now();
        let answer = timeout(REQUEST_TIMEOUT, self.send(connection, &key, amount)).await;
        let answer = answer.map_err(|_| format!("no answer within {REQUEST_TIMEOUT:?}"))??;
        self.latencies.lock().push(began.elapsed());
        self.count(action, &answer.status.to_string());
        self.judge(action, key, told, &answer);
        Ok(())
    }

    async fn send(&self, connection: &mut Option<RawClient>, key: &str, amount: u32) -> Result<TestResponse, String> {
        let mut raw = match connection.take() {
            Some(raw) => raw,
            None => RawClient::try_connect(self.addr).await.map_err(|error| format!("cannot connect: {error}"))?,
        };
        let request =
            post(self.addr, "/5").header("Host", "shop.example").header("Authorization", "Bearer soak").key(key);
        let body = format!(r#"{{"amount":{amount},"note":"{}"}}"#, "x".repeat(400));
        let answer = request.json(&body).try_send_on(&mut raw).await.map_err(|broken| broken.to_string())?;
        if answer.header("connection") != Some("close") {
            *connection = Some(raw);
        }
        Ok(answer)
    }

    /// A remembered answer is given again, and another body refused. A reply that breaks may be another request's.
    fn judge(&self, action: SoakAction, key: String, told: Option<Bytes>, answer: &TestResponse) {
        let right = match (action, answer.status, told) {
            (SoakAction::Replay, 201, Some(told)) => answer.body == told,
            (SoakAction::Mismatch, 422, _) | (SoakAction::First | SoakAction::BrokenReply, 502, _) => true,
            (SoakAction::First | SoakAction::BrokenReply, 201, _) => {
                let mut recent = self.recent.lock();
                recent.push_back((key.clone(), answer.body.clone(), Instant::now()));
                if recent.len() > MAX_RECENT_KEYS {
                    recent.pop_front();
                }
                true
            }
            _ => false,
        };
        if !right {
            self.wrong.lock().push(format!("{key}, {action:?}: {answer:?}"));
        }
    }

    fn count(&self, action: SoakAction, answer: &str) {
        *self.answers.lock().entry(format!("{action:?}: {answer}")).or_default() += 1;
    }
}

impl SoakReport {
    /// What is wrong; nothing if everything stayed what it was.
    pub fn failures(&self) -> Vec<String> {
        let mut complaints = samples::find_growth(&self.samples);
        if self.duplicates > 0 {
            complaints.push(format!("{} keys ran more than once", self.duplicates));
        }
        if !self.wrong.is_empty() {
            complaints.push(format!("{} wrong answers, such as {}", self.wrong.len(), self.wrong[0]));
        }
        let lost: usize = self.answers.iter().filter(|(what, _)| what.contains("no answer")).map(|(_, n)| n).sum();
        if lost > 0 {
            complaints.push(format!("{lost} requests had no answer in time"));
        }
        if self.reloads == 0 {
            complaints.push("no configuration was reloaded: the run shows less than it should".to_owned());
        }
        complaints
    }
}

impl fmt::Display for SoakReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {} samples, {} reloads", self.name, self.samples.len(), self.reloads)?;
        for (what, n) in &self.answers {
            writeln!(f, "  {what:<46}{n:>9}")?;
        }
        for line in samples::compare_thirds(&self.samples) {
            writeln!(f, "  {line}")?;
        }
        writeln!(f, "  {:<46}{:>9}", "DUPLICATES", self.duplicates)
    }
}
