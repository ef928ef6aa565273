//! A directory that says how long its slowest sync took: what of a pause is the disk's and what is the store's.

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
    slowest_us: Arc<AtomicU64>,
}

#[derive(Debug)]
struct TimedFile {
    file: Arc<dyn DiskFile>,
    slowest_us: Arc<AtomicU64>,
}

impl TimedDisk {
    pub(crate) fn new(directory: Directory) -> Self {
        Self { directory, slowest_us: Arc::default() }
    }

    /// Of all files, since the last time that somebody asked.
    pub(crate) fn slowest_sync(&self) -> Duration {
        Duration::from_micros(self.slowest_us.swap(0, Relaxed))
    }

    fn file(&self, file: Arc<dyn DiskFile>) -> Arc<dyn DiskFile> {
        Arc::new(TimedFile { file, slowest_us: self.slowest_us.clone() })
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
        self.file.write_at(bytes, at)
    }
    fn sync_data(&self) -> io::Result<()> {
        let began = Instant::now();
        let synced = self.file.sync_data();
        self.slowest_us.fetch_max(began.elapsed().as_micros() as u64, Relaxed);
        synced
    }
    fn allocate(&self, length: u64) -> io::Result<()> {
        self.file.allocate(length)
    }
}
