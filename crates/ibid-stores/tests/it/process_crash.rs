//! A real process on a real disk, killed at any time: what it has acknowledged is there.

use std::{
    collections::HashSet,
    env,
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
    sync::Arc,
    thread,
    time::Duration,
};

use bytes::Bytes;
use futures_util::future::join_all;
use ibid::store::{ClaimOutcome, RecordSummary, SettleOutcome, Settlement, Store};
use ibid_stores::embedded::{Embedded, EmbeddedOptions};
use tempfile::TempDir;

use crate::crash::{MINUTE, address, ask};

const DIRECTORY: &str = "IBID_TEST_KILLED";
const FROM: &str = "IBID_TEST_KILLED_FROM";

fn open(path: &Path) -> Embedded {
    Embedded::open(path, EmbeddedOptions { segment_size: 64 << 10, ..EmbeddedOptions::default() }).unwrap()
}

fn record(nth: usize) -> Bytes {
    (0..nth % 2000).map(|at| (at + nth) as u8).collect()
}

/// What runs in the process that is killed. Says what it was told, as soon as it was.
#[tokio::test]
#[ignore = "runs in a process that is killed"]
async fn until_killed() {
    let store = open(Path::new(&env::var(DIRECTORY).unwrap()));
    let from: usize = env::var(FROM).unwrap().parse().unwrap();
    for round in 0.. {
        join_all((0..16).map(async |nth| {
            let nth = from + round * 16 + nth;
            let found = store.claim(&Arc::new(ask(address(nth), MINUTE * 60))).await.unwrap();
            let ClaimOutcome::Granted(lease) = found else { panic!("key {nth} found {found:?}") };
            println!("claimed {nth}");
            let outline = RecordSummary::default();
            let end = Settlement::Complete { failed: false, record: record(nth), summary: outline, ttl: MINUTE * 60 };
            assert_eq!(store.settle(&lease, &end).await.unwrap(), SettleOutcome::Applied);
            println!("done {nth}");
        }))
        .await;
    }
}

#[tokio::test]
async fn a_killed_process_loses_nothing_that_it_acknowledged() {
    let path = TempDir::new().unwrap();
    let (mut claimed, mut done) = (HashSet::new(), HashSet::new());
    for round in 0..12 {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "process_crash::until_killed", "--ignored", "--nocapture"])
            .env(DIRECTORY, path.path())
            .env(FROM, (round * 1_000_000).to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let reader = thread::spawn(move || lines.map_while(Result::ok).collect::<Vec<_>>());
        thread::sleep(Duration::from_millis(60 + round as u64 * 13));
        child.kill().unwrap();
        child.wait().unwrap();
        for line in reader.join().unwrap() {
            match line.split_once(' ').map(|(what, nth)| (what, nth.parse::<usize>())) {
                Some(("claimed", Ok(nth))) => drop(claimed.insert(nth)),
                Some(("done", Ok(nth))) => drop(done.insert(nth)),
                _ => {}
            }
        }
        let store = open(path.path());
        assert_eq!(store.report().found, []);
        for nth in &claimed {
            match store.get(&address(*nth)).await.unwrap() {
                Some(ClaimOutcome::Completed(found)) => assert_eq!(found.record, record(*nth)),
                Some(ClaimOutcome::OutcomeUnknown(_)) if !done.contains(nth) => {}
                other => panic!("key {nth} was {other:?}, and {}", if done.contains(nth) { "done" } else { "claimed" }),
            }
        }
    }
    println!("{} claims and {} completions acknowledged by processes that were killed", claimed.len(), done.len());
    assert!(done.len() > 100, "the processes hardly ran");
}
