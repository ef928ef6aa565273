//! How fast the embedded store is, against this disk's own fdatasync rate in the same run.
//!
//! `cargo run --release -p ibid-stores --example embedded-bench -- [DIRECTORY] [SECONDS] [MAX_IN_FLIGHT] [RECORDS]`
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
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant, SystemTime},
};

use bytes::Bytes;
use ibid::store::{
    Address, ClaimOutcome, ClaimRequest, ClaimToken, Fingerprint, RecordSummary, SettleOutcome, Settlement, Store, Tags,
};
use ibid_stores::embedded::{Directory, Durability, Embedded, EmbeddedOptions, TimeSource};

use crate::timed_disk::TimedDisk;

mod timed_disk;

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
    let (before, slow_before) = syncs_per_second(&path);
    let run = run(&path, in_flight, Duration::from_secs(seconds));
    let (after, slow_after) = syncs_per_second(&path);
    let syncs = (before + after) / 2.0;
    println!("this disk: {before:.0} and {after:.0} fdatasyncs of 4 KiB per second, before and after");
    println!(
        "slowest of what the store cannot help: {:?} for a sync of its own, {:?} until a thread ran that was due; \
         without the store {slow_before:?} and {slow_after:?} for a sync",
        run.slowest_sync, run.worst_start_delay
    );
    println!(
        "{in_flight} in flight: {:.0} operations per second (a claim or a completion each), p50 {:?}, p99 {:?}, worst {:?}",
        run.operations, run.p50, run.p99, run.worst
    );
    println!(
        "{:.0} batches per second: {:.2} of this disk's fdatasync rate; {:.0} operations per batch",
        run.batches,
        run.batches / syncs,
        run.operations / run.batches
    );
    println!("{:.0} replays per second, one thread", run.replays);
    println!(
        "opened again in {:?} with {} live records; without its snapshot in {:?}",
        run.reopened, run.live, run.reread
    );
    println!("all forgotten at {:.2} million keys per second", forget_all(&path) / 1e6);
    std::fs::remove_dir_all(&path).expect("the directory goes");
}

/// Puts records in, many at a time, and says what they take up.
fn fill_store(path: &Path, records: u64) {
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
                    claim_and_complete(&store, client | 1 << 20, nth, &mut Vec::new()).await;
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

struct EmbeddedBenchRun {
    operations: f64,
    batches: f64,
    replays: f64,
    p50: Duration,
    p99: Duration,
    worst: Duration,
    worst_start_delay: Duration,
    slowest_sync: Duration,
    reopened: Duration,
    reread: Duration,
    live: u64,
}

fn run(path: &Path, in_flight: usize, time: Duration) -> EmbeddedBenchRun {
    let runtime = runtime();
    let options = || EmbeddedOptions { max_size: 1 << 40, ..EmbeddedOptions::default() };
    let disk = Arc::new(TimedDisk::new(Directory::open(path.join("store")).expect("a directory")));
    let store = Arc::new(Embedded::open_on(disk.clone(), options()).expect("a store"));
    disk.slowest_sync();
    let done = Arc::new(AtomicBool::new(false));
    let finished = Arc::new(AtomicU64::new(0));
    let (began, batches_before) = (Instant::now(), store.batch_count());
    let clients: Vec<_> = (0..in_flight)
        .map(|client| {
            let (store, done, finished) = (store.clone(), done.clone(), finished.clone());
            runtime.spawn(client_loop(client, store, done, finished))
        })
        .collect();
    let late = worst_start_delay(time);
    done.store(true, Relaxed);
    let mut times: Vec<Duration> = Vec::new();
    for client in clients {
        times.extend(runtime.block_on(client).expect("a client ends"));
    }
    let elapsed = began.elapsed().as_secs_f64();
    let slowest_sync = disk.slowest_sync();
    let batches = (store.batch_count() - batches_before) as f64 / elapsed;
    times.sort_unstable();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    let (operations, p50, p99, worst) = (times.len() as f64 / elapsed, at(0.5), at(0.99), at(1.0));
    let replays = replays_per_second(&runtime, &store);
    drop(store);
    let began = Instant::now();
    let store = Embedded::open(path.join("store"), options()).expect("it opens again");
    let (reopened, live) = (began.elapsed(), store.report().live_entries);
    assert!(live >= finished.load(Relaxed), "{live} of {} are there", finished.load(Relaxed));
    drop(store);
    std::fs::remove_file(path.join("store/index.snap")).expect("there is a snapshot");
    let began = Instant::now();
    drop(Embedded::open(path.join("store"), options()).expect("it opens without a snapshot"));
    let reread = began.elapsed();
    EmbeddedBenchRun {
        operations,
        batches,
        replays,
        p50,
        p99,
        worst,
        worst_start_delay: late,
        slowest_sync,
        reopened,
        reread,
        live,
    }
}

async fn client_loop(
    client: usize, store: Arc<Embedded>, done: Arc<AtomicBool>, finished: Arc<AtomicU64>,
) -> Vec<Duration> {
    let mut times = Vec::new();
    for nth in 0.. {
        if done.load(Relaxed) {
            break;
        }
        claim_and_complete(&store, client as u64, nth, &mut times).await;
        finished.fetch_add(1, Relaxed);
    }
    times
}

/// Claims a key and completes it.
async fn claim_and_complete(store: &Embedded, client: u64, nth: u64, times: &mut Vec<Duration>) {
    let ask = Arc::new(ask(client, nth));
    let asked = Instant::now();
    let Ok(ClaimOutcome::Granted(lease)) = store.claim(&ask).await else { panic!("a fresh key is granted") };
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

/// Of 4 KiB each, into a file that is filled with zeroes; and how long the slowest took.
fn syncs_per_second(path: &Path) -> (f64, Duration) {
    let name = path.join("syncs");
    let file = OpenOptions::new().write(true).create(true).truncate(true).open(&name).expect("a file");
    file.write_all_at(&vec![0; 16 << 20], 0).expect("zeroes");
    file.sync_all().expect("a sync");
    let began = Instant::now();
    let (mut syncs, mut slowest) = (0, Duration::ZERO);
    while began.elapsed() < Duration::from_secs(1) {
        let one = Instant::now();
        file.write_all_at(&[0x5a; 4096], syncs % 4096 * 4096).expect("a write");
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
