//! The embedded store, from outside: the store contract, histories across restarts, crash images, faults of the disk.

#![allow(clippy::disallowed_methods, reason = "what is tested with may read the environment and block")]

use std::{fmt, io, sync::Arc};

use ibid::store::Store;
use ibid_stores::embedded::{Directory, Disk, DiskFile, Embedded, EmbeddedOptions, TimeSource};
use ibid_testkit::{
    broken::failing_cases,
    contract,
    property::{HistoryClock, check_histories, check_restarts},
    wrappers::losing_answers,
};
use tempfile::TempDir;

use crate::sim_disk::SimDisk;

mod counts;
mod crash;
mod faults;
mod fixtures;
mod floods;
mod format_v1;
mod inbox;
mod local_cache;
mod offline_commands;
mod postgres;
mod process_crash;
mod redis;
mod reopening;
mod seal;
mod sim_disk;
mod staging;
mod store_configs;
mod tiered;

/// A directory that goes with the store.
#[derive(Debug)]
struct TemporaryDisk {
    directory: Directory,
    _path: TempDir,
}

impl TemporaryDisk {
    fn new() -> Self {
        let path = TempDir::new().unwrap();
        Self { directory: Directory::open(path.path()).unwrap(), _path: path }
    }
}

impl Disk for TemporaryDisk {
    fn list(&self) -> io::Result<Vec<String>> {
        self.directory.list()
    }
    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        self.directory.create(name)
    }
    fn open(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        self.directory.open(name)
    }
    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.directory.rename(from, to)
    }
    fn remove(&self, name: &str) -> io::Result<()> {
        self.directory.remove(name)
    }
    fn sync_dir(&self) -> io::Result<()> {
        self.directory.sync_dir()
    }
    fn lock(&self) -> io::Result<Box<dyn fmt::Debug + Send + Sync>> {
        self.directory.lock()
    }
}

fn open_temporary() -> Embedded {
    Embedded::open_on(Arc::new(TemporaryDisk::new()), EmbeddedOptions::default()).unwrap()
}

/// Segments so small that they are filled and recycled within a test.
fn small() -> EmbeddedOptions {
    EmbeddedOptions { segment_size: 16 << 10, max_size: 8 << 20, ..EmbeddedOptions::default() }
}

ibid_testkit::contract_tests!(embedded, async { open_temporary() });

ibid_testkit::contract_tests!(embedded_in_an_arc, async { Arc::new(open_temporary()) as Arc<dyn Store> });

ibid_testkit::contract_tests!(embedded_losing_answers, async { losing_answers(open_temporary()) });

#[tokio::test]
async fn one_store_serves_all_cases_at_the_same_time() {
    let failing = failing_cases(Arc::new(open_temporary()), std::time::Duration::from_secs(60)).await;
    assert_eq!(failing, [""; 0]);
}

#[tokio::test]
async fn sweeps_count_what_they_remove() {
    contract::admin::sweeps_count_what_they_remove(&open_temporary()).await;
}

#[test]
fn it_answers_as_the_model_says() {
    let open = || Arc::new(Embedded::open_on(Arc::new(SimDisk::default()), small()).unwrap()) as Arc<dyn Store>;
    check_histories(500, HistoryClock::Paused, async || open());
    check_histories(100, HistoryClock::Real, async || open());
}

#[test]
fn it_answers_as_the_model_says_across_restarts() {
    check_restarts(
        300,
        async || (SimDisk::default(), TimeSource::default()),
        async |(disk, time)| {
            let options = EmbeddedOptions { time: time.clone(), ..small() };
            Embedded::open_on(Arc::new(disk.clone()), options).unwrap()
        },
    );
}
