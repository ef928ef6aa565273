//! How fast the embedded store is, against this disk's own fdatasync rate in the same run.
//!
//! `cargo run --release -p ibid-stores --example embedded-bench -- [DIRECTORY] [SECONDS] [IN_FLIGHT] [RECORDS]`
//!
//! The store is loaded by clients on one runtime per core, as in the gateway: fully, in turns with the disk alone; then
//! with half of that load, which shows pauses.
//!
//! With RECORDS, so many are put in first (not synced one by one), and what they take up is printed; in the end they are
//! all forgotten. Absolute figures depend on the disk and on who else uses it: only ratios within one run count.

#![allow(clippy::disallowed_methods, reason = "what is tested with may read the environment and block")]

use std::{
    env,
    fs::OpenOptions,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant, SystemTime},
};

use bytes::Bytes;
use ibid::store::{
    Address, ClaimOutcome, ClaimRequest, ClaimToken, Fingerprint, RecordSummary, SettleOutcome, Settlement, Store, Tags,
};
use ibid_stores::embedded::{Directory, Durability, Embedded, EmbeddedOptions, TimeSource};

use tokio::task::JoinSet;

use crate::timed_disk::TimedDisk;

mod timed_disk;

/// Rounds of a run. In each, the disk is measured alone and then the store.
const ROUNDS: u32 = 20;
/// How long the disk is measured in a round.
const DISK_ROUND: Duration = Duration::from_millis(125);

fn main() {
    let mut arguments = env::args().skip(1);
    let path = arguments.next().map_or_else(|| env::temp_dir().join("ibid-embedded-bench"), PathBuf::from);
    let seconds = arguments.next().map_or(5, |seconds| seconds.parse().expect("SECONDS: a number"));
    let in_flight = arguments.next().map_or(64, |number| number.parse().expect("IN_FLIGHT: a number"));
    let records: u64 = arguments.next().map_or(0, |number| number.parse().expect("RECORDS: a number"));
    std::fs::create_dir_all(&path).expect("a directory");
    if records > 0 {
        fill_store(&path, records);
        // They were not synced one by one: else the kernel writes gigabytes of them while the pauses are measured.
        assert!(Command::new("sync").status().expect("the sync command").success());
    }
    run(&path, in_flight, Duration::from_secs(seconds));
    println!("all forgotten at {:.2} million keys per second", forget_all(&path) / 1e6);
    std::fs::remove_dir_all(&path).expect("the directory goes");
}

/// Puts records in, many at a time, and says what they take up.
fn fill_store(path: &Path, records: u64) {
    // Beyond those of the rounds. A client has 24 bits in an address.
    const CLIENTS: u64 = 1024;
    let runtime = runtime();
    let memory = resident_bytes();
    let options = EmbeddedOptions { durability: Durability::Crash, max_size: 1 << 40, ..EmbeddedOptions::default() };
    let store = Arc::new(Embedded::open(path.join("store"), options).expect("a store"));
    let clients: Vec<_> = (0..CLIENTS)
        .map(|client| {
            let store = store.clone();
            runtime.spawn(async move {
                for nth in 0..records / CLIENTS {
                    claim_and_complete(&store, client | 1 << 23, nth, &mut Vec::new()).await;
                }
            })
        })
        .collect();
    for client in clients {
        runtime.block_on(client).expect("a client ends");
    }
    let per_record = |bytes: u64| bytes as f64 / records as f64;
    let memory = per_record(resident_bytes() - memory);
    drop(store);
    let files = std::fs::read_dir(path.join("store")).expect("the store");
    let disk: u64 = files.map(|file| file.and_then(|file| file.metadata()).expect("a file").len()).sum();
    println!("{records} records: {memory:.0} bytes of memory and {:.0} of disk each", per_record(disk));
}

/// How many keys per second are forgotten, a week later.
fn forget_all(path: &Path) -> f64 {
    let began_at = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("a clock");
    let began = Instant::now();
    let late = Arc::new(AtomicBool::new(false));
    let (week, is_late) = (Duration::from_secs(7 * 24 * 3600), late.clone());
    let time =
        TimeSource::new(move || began_at + began.elapsed() + if is_late.load(Relaxed) { week } else { Duration::ZERO });
    let options = EmbeddedOptions { time, max_size: 1 << 40, ..EmbeddedOptions::default() };
    let store = Embedded::open(path.join("store"), options).expect("it opens");
    late.store(true, Relaxed);
    let began = Instant::now();
    let mut removed = 0.0;
    loop {
        let swept = runtime().block_on(store.sweep(100_000)).expect("a sweep");
        removed += f64::from(swept.removed);
        if !swept.more {
            return removed / began.elapsed().as_secs_f64();
        }
    }
}

/// Bytes of memory that this process has.
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) << 10
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

/// Full load and the disk alone in turns, then half of that load, then replays and starts.
fn run(path: &Path, in_flight: u64, time: Duration) {
    let options = || EmbeddedOptions { max_size: 1 << 40, ..EmbeddedOptions::default() };
    let disk = Arc::new(TimedDisk::new(Directory::open(path.join("store")).expect("a directory")));
    let store = Arc::new(Embedded::open_on(disk.clone(), options()).expect("a store"));
    let (mut full, mut shares) = (Vec::new(), Vec::new());
    let mut batch_bytes = 16 << 10;
    for round in 0..ROUNDS {
        let (before, _) = syncs_per_second(path, batch_bytes);
        let load = LoadRun::measure(&store, &disk, round, in_flight, time / ROUNDS, None);
        batch_bytes = load.batch_bytes();
        let (after, _) = syncs_per_second(path, batch_bytes);
        shares.push(load.batches / ((before + after) / 2.0));
        full.push(load);
    }
    full.sort_unstable_by(|one, other| one.operations.total_cmp(&other.operations));
    shares.sort_unstable_by(f64::total_cmp);
    let (median, best) = (&full[full.len() / 2], &full[full.len() - 1]);
    median.print(&format!("{in_flight} in flight"));
    best.print("best round");
    println!(
        "  {:.0} batches per second of {} bytes: {:.2} of this disk's fdatasync rate for such writes ({:.2} to {:.2})",
        median.batches,
        median.batch_bytes(),
        shares[shares.len() / 2],
        shares[0],
        shares[shares.len() - 1]
    );
    let half = LoadRun::measure(&store, &disk, ROUNDS, in_flight, time, Some(median.operations / 2.0));
    half.print("half of that load");
    let (_, alone) = syncs_per_second(path, half.batch_bytes());
    println!(
        "  slowest of what the store cannot help: {:?} for a sync of its own, {:?} until a thread ran that was due; \
         without the store {alone:?} for a sync",
        half.slowest_sync, half.worst_start_delay
    );
    println!("{:.0} replays per second, one thread", replays_per_second(&runtime(), &store));
    let finished = full.iter().chain([&half]).map(|load| load.times.len() as u64 / 2).sum::<u64>();
    drop(store);
    let began = Instant::now();
    let store = Embedded::open(path.join("store"), options()).expect("it opens again");
    let (reopened, live) = (began.elapsed(), store.report().live_entries);
    assert!(live >= finished, "{live} of {finished} are there");
    drop(store);
    std::fs::remove_file(path.join("store/index.snap")).expect("there is a snapshot");
    let began = Instant::now();
    drop(Embedded::open(path.join("store"), options()).expect("it opens without a snapshot"));
    let reread = began.elapsed();
    println!("opened again in {reopened:?} with {live} live records; without its snapshot in {reread:?}");
}

/// What callers on one runtime per core have seen, as in the gateway.
struct LoadRun {
    operations: f64,
    batches: f64,
    written: f64,
    /// Microseconds of CPU per operation.
    cpu: f64,
    /// Of all threads, per operation.
    context_switches: f64,
    /// How long each operation took, sorted.
    times: Vec<Duration>,
    worst_start_delay: Duration,
    slowest_sync: Duration,
}

impl LoadRun {
    fn measure(
        store: &Arc<Embedded>, disk: &TimedDisk, round: u32, in_flight: u64, time: Duration, rate: Option<f64>,
    ) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
        // A client claims and completes, and so makes two operations in an interval.
        let interval = rate.map(|rate| Duration::from_secs_f64(2.0 * in_flight as f64 / rate));
        disk.restart();
        let done = Arc::new(AtomicBool::new(false));
        let usage = ProcessUsage::now();
        let (began, batches_before) = (Instant::now(), store.batch_count());
        let (times, usage, late) = std::thread::scope(|scope| {
            let done = &done;
            let threads: Vec<_> = (0..cores)
                .map(|core| {
                    let clients = (0..in_flight).filter(move |client| client % cores == core);
                    scope.spawn(move || run_core(store, clients, round, done, interval))
                })
                .collect();
            let late = worst_start_delay(time);
            let usage = usage.elapsed();
            done.store(true, Relaxed);
            let times: Vec<Duration> = threads.into_iter().flat_map(|core| core.join().expect("a core ends")).collect();
            (times, usage, late)
        });
        let mut times = times;
        times.sort_unstable();
        let (elapsed, made) = (began.elapsed().as_secs_f64(), times.len() as f64);
        Self {
            operations: made / elapsed,
            batches: (store.batch_count() - batches_before) as f64 / elapsed,
            written: disk.written_bytes() as f64 / elapsed,
            cpu: usage.cpu.as_secs_f64() * 1e6 / made,
            context_switches: usage.context_switches as f64 / made,
            times,
            worst_start_delay: late,
            slowest_sync: disk.slowest_sync(),
        }
    }

    fn batch_bytes(&self) -> usize {
        (self.written / self.batches.max(1.0)) as usize
    }

    fn print(&self, what: &str) {
        let at = |share: f64| self.times[((self.times.len() - 1) as f64 * share) as usize];
        println!(
            "{what}: {:.0} operations per second (a claim or a completion each), p50 {:?}, p99 {:?}, worst {:?}",
            self.operations,
            at(0.5),
            at(0.99),
            at(1.0)
        );
        println!(
            "  {:.1} µs of CPU and {:.3} context switches per operation; {:.0} operations per batch",
            self.cpu,
            self.context_switches,
            self.operations / self.batches
        );
    }
}

/// Runs clients on a runtime of this thread's own.
fn run_core(
    store: &Arc<Embedded>, clients: impl Iterator<Item = u64>, round: u32, done: &Arc<AtomicBool>,
    interval: Option<Duration>,
) -> Vec<Duration> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let run = |client| run_client(store.clone(), client | u64::from(round) << 16, done.clone(), interval);
        let clients: JoinSet<Vec<Duration>> = clients.map(run).collect();
        clients.join_all().await.concat()
    })
}

async fn run_client(
    store: Arc<Embedded>, client: u64, done: Arc<AtomicBool>, interval: Option<Duration>,
) -> Vec<Duration> {
    let mut times = Vec::new();
    let mut next = tokio::time::Instant::now() + interval.unwrap_or_default().mul_f64((client % 64) as f64 / 64.0);
    for nth in 0.. {
        if let Some(interval) = interval {
            tokio::time::sleep_until(next).await;
            next += interval;
        }
        if done.load(Relaxed) {
            break;
        }
        claim_and_complete(&store, client, nth, &mut times).await;
    }
    times
}

/// CPU time and context switches of this process.
struct ProcessUsage {
    cpu: Duration,
    context_switches: u64,
}

impl ProcessUsage {
    fn now() -> Self {
        let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
        let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields).split_whitespace();
        let ticks: u64 = fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<u64>().ok()).sum();
        let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
        let statuses = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("status")).ok());
        let context_switches = statuses.map(|status| {
            let lines = status.lines().filter(|line| line.contains("ctxt_switches"));
            lines.filter_map(|line| line.rsplit_once('\t')?.1.parse::<u64>().ok()).sum::<u64>()
        });
        Self { cpu: Duration::from_millis(ticks * 10), context_switches: context_switches.sum() }
    }

    fn elapsed(&self) -> Self {
        let now = Self::now();
        Self { cpu: now.cpu - self.cpu, context_switches: now.context_switches - self.context_switches }
    }
}

/// Claims a key and completes it.
async fn claim_and_complete(store: &Embedded, client: u64, nth: u64, times: &mut Vec<Duration>) {
    let ask = Arc::new(ask(client, nth));
    let asked = Instant::now();
    let lease = match store.claim(&ask).await {
        Ok(ClaimOutcome::Granted(lease)) => lease,
        other => panic!("a fresh key is granted, but it was {other:?}"),
    };
    times.push(asked.elapsed());
    let (record, outline, keep) = (Bytes::from_static(&[0x5a; 400]), RecordSummary::default(), ask.ttl);
    let end = Settlement::Complete { failed: false, record, summary: outline, ttl: keep };
    let asked = Instant::now();
    assert_eq!(store.settle(&lease, &end).await.expect("it is recorded"), SettleOutcome::Applied);
    times.push(asked.elapsed());
}

fn replays_per_second(runtime: &tokio::runtime::Runtime, store: &Embedded) -> f64 {
    let began = Instant::now();
    let mut found = 0_u64;
    runtime.block_on(async {
        for nth in 0..100_000 {
            found +=
                u64::from(matches!(store.get(&address(0, nth % 1000)).await, Ok(Some(ClaimOutcome::Completed(_)))));
        }
    });
    found as f64 / began.elapsed().as_secs_f64()
}

/// Waits, and says how late this thread ran at worst when it was due: what two busy cores do to any thread.
fn worst_start_delay(time: Duration) -> Duration {
    const SLEEP_INTERVAL: Duration = Duration::from_millis(1);
    let began = Instant::now();
    let mut latest = Duration::ZERO;
    while began.elapsed() < time {
        let slept = Instant::now();
        std::thread::sleep(SLEEP_INTERVAL);
        latest = latest.max(slept.elapsed().saturating_sub(SLEEP_INTERVAL));
    }
    latest
}

/// Writes of this size, each synced, into a file that is filled with zeroes; and how long the slowest took.
fn syncs_per_second(path: &Path, bytes: usize) -> (f64, Duration) {
    const FILE_LEN: usize = 16 << 20;
    let name = path.join("syncs");
    let file = OpenOptions::new().write(true).create(true).truncate(true).open(&name).expect("a file");
    file.write_all_at(&vec![0; FILE_LEN], 0).expect("zeroes");
    file.sync_all().expect("a sync");
    let (data, began) = (vec![0x5a; bytes.next_multiple_of(512)], Instant::now());
    let (mut syncs, mut slowest) = (0, Duration::ZERO);
    while began.elapsed() < DISK_ROUND {
        let one = Instant::now();
        let at = syncs * data.len() % (FILE_LEN - data.len());
        file.write_all_at(&data, at as u64 & !511).expect("a write");
        file.sync_data().expect("a sync");
        slowest = slowest.max(one.elapsed());
        syncs += 1;
    }
    std::fs::remove_file(name).expect("the file goes");
    (syncs as f64 / began.elapsed().as_secs_f64(), slowest)
}

fn ask(client: u64, nth: u64) -> ClaimRequest {
    let hold = Duration::from_secs(60);
    let keep = Duration::from_secs(3600);
    ClaimRequest {
        address: address(client, nth),
        token: ClaimToken::mint(),
        fingerprint: Fingerprint::NONE,
        tags: Tags::new("acme", "", "POST /payments", "550e****0000"),
        label: Bytes::new(),
        lease: hold,
        ttl: keep,
        take_over: None,
    }
}

/// As a digest would spread them.
fn address(client: u64, nth: u64) -> Address {
    let mut address = [0; 32];
    for (part, at) in address.chunks_exact_mut(8).zip(1_u64..) {
        let mixed = (client << 40 | nth).wrapping_add(at).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        part.copy_from_slice(&(mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9).to_le_bytes());
    }
    Address(address)
}
