//! The embedded store, from outside: the store contract, histories across restarts, crash images, faults of the disk.

#![allow(clippy::disallowed_methods, reason = "what is tested with may read the environment and block")]

use std::{fmt, io, sync::Arc};

use ibid::store::{Store, Token};
use ibid_stores::embedded::{Directory, Disk, DiskFile, Embedded, Options, TimeSource};
use ibid_testkit::{
    broken::failing_cases,
    contract,
    property::{Clock, check_histories, check_restarts},
    wrappers::{LosesAnswers, Resending},
};
use tempfile::TempDir;

use crate::sim::SimDisk;

mod closed;
mod counts;
mod crash;
mod faults;
mod fixtures;
mod floods;
mod inbox;
mod killed;
mod layouts;
mod near;
mod postgres;
mod redis;
mod seal;
mod sim;
mod tiered;
mod tools;

/// A directory that goes with the store.
#[derive(Debug)]
struct Temporary {
    directory: Directory,
    _path: TempDir,
}

impl Temporary {
    fn new() -> Self {
        let path = TempDir::new().unwrap();
        Self { directory: Directory::open(path.path()).unwrap(), _path: path }
    }
}

impl Disk for Temporary {
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

fn temporary() -> Embedded {
    Embedded::open_on(Arc::new(Temporary::new()), Options::default()).unwrap()
}

/// Segments so small that they are filled and recycled within a test.
fn small() -> Options {
    Options { segment_size: 16 << 10, max_size: 8 << 20, ..Options::default() }
}

ibid_testkit::contract_tests!(embedded, async { Arc::new(temporary()) as Arc<dyn Store> });

ibid_testkit::contract_tests!(embedded_in_an_arc, async {
    Arc::new(Arc::new(temporary()) as Arc<dyn Store>) as Arc<dyn Store>
});

ibid_testkit::contract_tests!(embedded_losing_answers, async {
    let seed = u64::from_le_bytes(Token::mint().0[..8].try_into().unwrap());
    println!("seed {seed}");
    Arc::new(Resending::new(LosesAnswers::new(temporary(), seed, 3))) as Arc<dyn Store>
});

#[tokio::test]
async fn one_store_serves_all_cases_at_the_same_time() {
    let failing = failing_cases(Arc::new(temporary()), std::time::Duration::from_secs(60)).await;
    assert_eq!(failing, [""; 0]);
}

#[tokio::test]
async fn sweeps_count_what_they_remove() {
    contract::operating::sweeps_count_what_they_remove(&temporary()).await;
}

#[test]
fn it_answers_as_the_model_says() {
    let open = || Arc::new(Embedded::open_on(Arc::new(SimDisk::default()), small()).unwrap()) as Arc<dyn Store>;
    check_histories(500, Clock::Paused, async || open());
    check_histories(100, Clock::Real, async || open());
}

#[test]
fn it_answers_as_the_model_says_across_restarts() {
    check_restarts(
        300,
        async || (SimDisk::default(), TimeSource::default()),
        async |(disk, time)| {
            let options = Options { time: time.clone(), ..small() };
            Arc::new(Embedded::open_on(Arc::new(disk.clone()), options).unwrap()) as Arc<dyn Store>
        },
    );
}
