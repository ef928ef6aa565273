//! A directory that says how much is written and how long its slowest sync took: what of a pause is the disk's and what
//! is the store's.

use std::{
    fmt, io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use ibid_stores::embedded::{Directory, Disk, DiskFile};

#[derive(Debug)]
pub(crate) struct TimedDisk {
    directory: Directory,
    usage: Arc<DiskUsage>,
}

/// Of all files together.
#[derive(Debug, Default)]
struct DiskUsage {
    slowest_us: AtomicU64,
    written: AtomicU64,
}

#[derive(Debug)]
struct TimedFile {
    file: Arc<dyn DiskFile>,
    usage: Arc<DiskUsage>,
}

impl TimedDisk {
    pub(crate) fn new(directory: Directory) -> Self {
        Self { directory, usage: Arc::default() }
    }

    /// Begins to measure.
    pub(crate) fn restart(&self) {
        self.usage.slowest_us.store(0, Relaxed);
        self.usage.written.store(0, Relaxed);
    }

    pub(crate) fn slowest_sync(&self) -> Duration {
        Duration::from_micros(self.usage.slowest_us.load(Relaxed))
    }

    /// Without the zeroes that new segments are filled with.
    pub(crate) fn written_bytes(&self) -> u64 {
        self.usage.written.load(Relaxed)
    }

    fn file(&self, file: Arc<dyn DiskFile>) -> Arc<dyn DiskFile> {
        Arc::new(TimedFile { file, usage: self.usage.clone() })
    }
}

impl Disk for TimedDisk {
    fn list(&self) -> io::Result<Vec<String>> {
        self.directory.list()
    }
    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        Ok(self.file(self.directory.create(name)?))
    }
    fn open(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        Ok(self.file(self.directory.open(name)?))
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

impl DiskFile for TimedFile {
    fn length(&self) -> io::Result<u64> {
        self.file.length()
    }
    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        self.file.read_at(into, at)
    }
    fn read_cached_at(&self, into: &mut [u8], at: u64) -> io::Result<bool> {
        self.file.read_cached_at(into, at)
    }
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.usage.written.fetch_add(bytes.len() as u64, Relaxed);
        self.file.write_at(bytes, at)
    }
    fn sync_data(&self) -> io::Result<()> {
        let began = Instant::now();
        let synced = self.file.sync_data();
        self.usage.slowest_us.fetch_max(began.elapsed().as_micros() as u64, Relaxed);
        synced
    }
    fn allocate(&self, length: u64) -> io::Result<()> {
        self.file.allocate(length)
    }
    fn fill_with_zeroes(&self, length: u64, go_on: &dyn Fn() -> bool) -> io::Result<()> {
        self.file.fill_with_zeroes(length, go_on)
    }
}
