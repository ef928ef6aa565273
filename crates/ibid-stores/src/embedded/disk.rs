//! What the log asks of a file system: one directory, few calls. Tests put a simulated disk in its place, which loses
//! power between any two of them.
//!
//! Invariants the log relies on: what was written before a successful [`DiskFile::sync_data`] survives; names survive a
//! successful [`Disk::sync_dir`]; a sector is written wholly or not at all. Nothing else: not the order of writes, not
//! that a failed sync can be tried again.

use std::{
    fmt,
    fs::{self, DirBuilder, File, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt},
    path::PathBuf,
    sync::Arc,
};

use rustix::fs::FallocateFlags;

use crate::ProcessLock;

/// A directory of files.
pub trait Disk: fmt::Debug + Send + Sync {
    /// The names of its files, in any order.
    fn list(&self) -> io::Result<Vec<String>>;
    /// A new file, which must not be there yet.
    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>>;
    /// A file that is there.
    fn open(&self, name: &str) -> io::Result<Arc<dyn DiskFile>>;
    /// Under another name; a file that had it is gone.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    /// Gone.
    fn remove(&self, name: &str) -> io::Result<()>;
    /// Makes names durable.
    fn sync_dir(&self) -> io::Result<()>;
    /// For as long as the answer lives, nobody else gets it.
    ///
    /// # Errors
    /// Says who has it.
    fn lock(&self) -> io::Result<Box<dyn fmt::Debug + Send + Sync>>;
}

/// A file that is read and written at any place, by several threads.
pub trait DiskFile: fmt::Debug + Send + Sync {
    /// How long it is.
    fn length(&self) -> io::Result<u64>;
    /// Fills `into`.
    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<()>;
    /// Writes all of `bytes`.
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()>;
    /// Makes what was written durable.
    fn sync_data(&self) -> io::Result<()>;
    /// Makes room, so that writing up to `length` cannot find the disk full, where the file system can.
    fn allocate(&self, length: u64) -> io::Result<()>;
}

/// A directory of the operating system. Records are nobody else's business: what is made here is readable by its owner
/// only.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
}

impl Directory {
    /// Makes the directory if it is not there.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn open(path: impl Into<PathBuf>) -> io::Result<Self> {
        let path = path.into();
        if !path.is_dir() {
            DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
            if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
                File::open(parent)?.sync_all()?;
            }
        }
        Ok(Self { path })
    }

    fn at(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

impl Disk for Directory {
    fn list(&self) -> io::Result<Vec<String>> {
        let entries = fs::read_dir(&self.path)?;
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        Ok(Arc::new(OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(self.at(name))?))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        Ok(Arc::new(OpenOptions::new().read(true).write(true).open(self.at(name))?))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        fs::rename(self.at(from), self.at(to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.at(name))
    }

    fn sync_dir(&self) -> io::Result<()> {
        File::open(&self.path)?.sync_all()
    }

    fn lock(&self) -> io::Result<Box<dyn fmt::Debug + Send + Sync>> {
        Ok(Box::new(ProcessLock::acquire_directory(&self.path, "lock")?))
    }
}

impl DiskFile for File {
    fn length(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        self.read_exact_at(into, at)
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.write_all_at(bytes, at)
    }

    fn sync_data(&self) -> io::Result<()> {
        File::sync_data(self)
    }

    fn allocate(&self, length: u64) -> io::Result<()> {
        match rustix::fs::fallocate(self, FallocateFlags::empty(), 0, length) {
            Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => self.set_len(length),
            allocated => Ok(allocated?),
        }
    }
}
