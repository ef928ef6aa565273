//! The real binary on its default store, killed at random moments under load from clients that retry.
//!
//! Whatever the moment: a key runs at most once; an answer that a client has seen is the answer for ever; a key whose run
//! was cut short is "outcome unknown", and stays so. Some kills hit the start itself, while the log is being read.
//!
//! `cargo test` kills a few dozen times. `scripts/chaos-kill` kills 1,000 times, a release build; `IBID_KILLS` and
//! `IBID_SEED` say how often, and which moments. The figures are printed (`--nocapture`).

use std::{
    collections::HashMap,
    env,
    fmt::Display,
    net::SocketAddr,
    str::FromStr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use parking_lot::Mutex;
use testbed::{
    client::{Broken, RawClient, TestRequest, TestResponse, post},
    process::GatewayProcess,
    upstream::{TestUpstream, UpstreamReply},
};
use tokio::time::{sleep, timeout};

use crate::support::{BIN, caller, is_in_progress, policy};

const CLIENT_COUNT: usize = 12;
/// The slowest answer of the upstream, in milliseconds.
const MAX_RESPONSE_MILLIS: u64 = 20;
/// Each life begins a segment, and only one that lasts tidies up after those before it: every so often one does, or
/// thousands of short ones would fill the disk.
const KILLS_PER_LONG_LIFE: usize = 20;
const LONG_LIFE: Duration = Duration::from_millis(1500);
/// How long a client goes on asking about one key.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(60);

/// What a client knows about its key.
#[derive(Clone, Debug, PartialEq, Eq)]
enum CrashFinalAnswer {
    /// The body of a 201.
    Completed(Bytes),
    OutcomeUnknown,
}

/// Where the gateway is at present, and what all clients count.
struct CrashTestState {
    addr: Mutex<SocketAddr>,
    stopped: AtomicBool,
    replays: AtomicUsize,
    retries: AtomicUsize,
}

/// Pseudo-random: the same moments from the same seed, as far as the machine's timing allows.
struct CrashRandom(u64);

impl CrashRandom {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// One client: a key at a time, until it knows what became of it.
struct CrashClient {
    shared: Arc<CrashTestState>,
    random: CrashRandom,
    connection: Option<(SocketAddr, RawClient)>,
}

impl CrashClient {
    fn new(scene: &Arc<CrashTestState>, seed: u64) -> CrashClient {
        CrashClient { shared: Arc::clone(scene), random: CrashRandom(seed.max(1)), connection: None }
    }

    async fn run(mut self, name: usize) -> Vec<(String, u64, CrashFinalAnswer)> {
        let mut known: Vec<(String, u64, CrashFinalAnswer)> = Vec::new();
        while !self.shared.stopped.load(SeqCst) {
            let (key, path) = (format!("c{name}-{}", known.len()), self.random.below(MAX_RESPONSE_MILLIS + 1));
            let told = self.run_to_final_answer(&key, path).await;
            known.push((key, path, told));
            if self.random.below(4) == 0 {
                let again = self.random.below(known.len() as u64) as usize;
                self.assert_same_answer(&known[again]).await;
            }
        }
        known
    }

    /// The key still answers what it answered.
    async fn assert_same_answer(&mut self, (key, path, told): &(String, u64, CrashFinalAnswer)) {
        assert_eq!(&self.run_to_final_answer(key, *path).await, told, "{key} answers otherwise than before");
    }

    async fn run_to_final_answer(&mut self, key: &str, path: u64) -> CrashFinalAnswer {
        let end = Instant::now() + OPERATION_TIMEOUT;
        let mut last = String::new();
        while Instant::now() < end {
            match self.ask(key, path).await {
                Ok(answer) if answer.status == 201 => {
                    if answer.header("idempotent-replayed") == Some("true") {
                        self.shared.replays.fetch_add(1, SeqCst);
                    }
                    return CrashFinalAnswer::Completed(answer.body);
                }
                Ok(answer) if is_unknown(&answer) => return CrashFinalAnswer::OutcomeUnknown,
                Ok(answer) if is_in_progress(&answer) || [502, 503].contains(&answer.status) => {
                    last = format!("{answer:?}");
                }
                Ok(answer) => panic!("{key}: {answer:?}"),
                Err(broken) => last = broken.to_string(),
            }
            self.shared.retries.fetch_add(1, SeqCst);
            sleep(Duration::from_millis(1 + self.random.below(10))).await;
        }
        panic!("{key} has no answer after {OPERATION_TIMEOUT:?}; the last try gave {last}")
    }

    async fn ask(&mut self, key: &str, path: u64) -> Result<TestResponse, Broken> {
        let addr = *self.shared.addr.lock();
        let request = pay(addr, path, key);
        let Some((_, mut raw)) = self.connection.take().filter(|(to, _)| *to == addr) else {
            let Ok(mut raw) = RawClient::try_connect(addr).await else { return request.try_send().await };
            return self.keep_connection(addr, request.try_send_on(&mut raw).await, raw);
        };
        let answered = request.try_send_on(&mut raw).await;
        self.keep_connection(addr, answered, raw)
    }

    fn keep_connection(
        &mut self, addr: SocketAddr, answered: Result<TestResponse, Broken>, raw: RawClient,
    ) -> Result<TestResponse, Broken> {
        if answered.as_ref().is_ok_and(|answer| answer.header("connection") != Some("close")) {
            self.connection = Some((addr, raw));
        }
        answered
    }
}

/// The host is part of a key's scope, and the port is another after each restart.
fn pay(addr: SocketAddr, path: u64, key: &str) -> TestRequest {
    caller(post(addr, format!("/{path}"))).header("Host", "shop.example").key(key).json(r#"{"amount":1}"#)
}

fn is_unknown(answer: &TestResponse) -> bool {
    answer.status == 409 && answer.text().contains("#outcome-unknown")
}

#[allow(clippy::disallowed_methods, reason = "settings of the test, not of the gateway")]
fn env_setting<T: FromStr<Err: Display>>(name: &str) -> Option<T> {
    let text = env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|error| panic!("{name}={text}: {error}")))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_at_random_moments_it_runs_nothing_twice_and_forgets_nothing() {
    let kills: usize = env_setting("IBID_KILLS").unwrap_or(25);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock").as_nanos() as u64;
    let seed = env_setting("IBID_SEED").unwrap_or(now);
    println!("IBID_SEED={seed}");
    let upstream = TestUpstream::start().await;
    for delay in 0..=MAX_RESPONSE_MILLIS {
        upstream.on(&format!("/{delay}"), UpstreamReply::usual().delay(Duration::from_millis(delay)));
    }
    let launch = GatewayProcess::launch(BIN).config(policy("lease = \"1s\"")).upstream(&upstream.url());
    let mut gateway = launch.arg("--store").arg("embedded:data").start().await;
    let scene = Arc::new(CrashTestState {
        addr: Mutex::new(gateway.addr()),
        stopped: AtomicBool::new(false),
        replays: AtomicUsize::new(0),
        retries: AtomicUsize::new(0),
    });
    let began = Instant::now();
    let clients: Vec<_> = (0..CLIENT_COUNT)
        .map(|name| tokio::spawn(CrashClient::new(&scene, seed ^ (name as u64 + 1) << 32).run(name)))
        .collect();

    let (mut dice, mut while_starting) = (CrashRandom(seed.max(1)), 0);
    for nth in 1..=kills {
        if nth % KILLS_PER_LONG_LIFE == 0 {
            sleep(LONG_LIFE).await;
        }
        if dice.below(5) == 0 {
            // The next one is killed before it listens, unless it is faster than that.
            let early = timeout(Duration::from_millis(5 + dice.below(25)), gateway.restart()).await;
            while_starting += usize::from(early.is_err());
        } else {
            sleep(Duration::from_millis(dice.below(200))).await;
            gateway.kill().await;
        }
        gateway.restart().await;
        *scene.addr.lock() = gateway.addr();
    }
    sleep(Duration::from_millis(200)).await;
    scene.stopped.store(true, SeqCst);
    let mut known = Vec::new();
    for client in clients {
        known.push(client.await.expect("the client is content"));
    }
    let took = began.elapsed();

    // Once more from the disk alone, and every key is asked for the last time.
    gateway.restart().await;
    *scene.addr.lock() = gateway.addr();
    // Before the first check is spawned: a check may answer before this task runs again.
    let replays = scene.replays.swap(0, SeqCst);
    let mut checks = Vec::new();
    for keys in known.clone() {
        let mut client = CrashClient::new(&scene, seed);
        checks.push(tokio::spawn(async move {
            for key in &keys {
                client.assert_same_answer(key).await;
            }
        }));
    }
    for check in checks {
        check.await.expect("every key answers what it answered");
    }

    let mut runs: HashMap<String, usize> = HashMap::new();
    for seen in upstream.log().iter().filter(|seen| seen.execution.is_some()) {
        *runs.entry(seen.key().expect("every request has a key").to_owned()).or_default() += 1;
    }
    let (mut keys, mut done, mut unknown, mut unknown_ran) = (0, 0, 0, 0);
    for (key, _, told) in known.iter().flatten() {
        let runs = runs.remove(key).unwrap_or(0);
        keys += 1;
        match told {
            CrashFinalAnswer::Completed(_) => {
                assert_eq!(runs, 1, "{key} was answered, and ran {runs} times");
                done += 1;
            }
            CrashFinalAnswer::OutcomeUnknown => {
                assert!(runs <= 1, "{key} is unknown, and ran {runs} times");
                unknown += 1;
                unknown_ran += runs;
            }
        }
    }
    assert!(runs.is_empty(), "something ran that no client has asked for: {runs:?}");
    assert_eq!(scene.replays.load(SeqCst), done, "at the end every finished key is a replay");
    println!(
        "{kills} kills ({while_starting} more while starting) in {took:.1?}: {keys} keys, {} executions, 0 duplicates, \
         {done} finished and all replayed at the end, {unknown} unknown ({unknown_ran} had run), \
         {replays} replays and {} retries under way",
        upstream.executions(),
        scene.retries.load(SeqCst),
    );
    assert!(done > kills && (kills < 20 || unknown > 0), "the kills met no load");
}
