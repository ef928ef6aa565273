//! The file system operations that the log needs: one directory, few calls. Tests substitute a simulated disk that
//! loses power between any two of them.
//!
//! The log relies on this: data written before a successful [`DiskFile::sync_data`] survives; names survive a
//! successful [`Disk::sync_dir`]; a sector is written completely or not at all. It relies on nothing else: not on the
//! order of writes, and not on retrying a failed sync.

use std::{
    fmt,
    fs::{self, DirBuilder, File, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt},
    path::PathBuf,
    sync::Arc,
};

use rustix::{fs::FallocateFlags, io::Errno};
#[cfg(target_os = "linux")]
use rustix::{
    fs::{OFlags, fcntl_getfl, fcntl_setfl, fstatfs},
    io::{ReadWriteFlags, preadv2},
};

use crate::ProcessLock;

/// The type of a file system that keeps its files in memory, in `statfs`.
#[cfg(target_os = "linux")]
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// Bytes of zeroes written at a time.
const ZERO_FILL_CHUNK: usize = 512 << 10;
/// Alignment in memory that satisfies every disk which is written past the page cache.
#[cfg(target_os = "linux")]
const DIRECT_ALIGNMENT: usize = 4096;

/// A directory of files.
pub trait Disk: fmt::Debug + Send + Sync {
    /// Returns the names of the files, in any order.
    fn list(&self) -> io::Result<Vec<String>>;
    /// Creates a file. Fails if it exists.
    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>>;
    /// Opens an existing file.
    fn open(&self, name: &str) -> io::Result<Arc<dyn DiskFile>>;
    /// Renames a file, replacing a file that has the new name.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    /// Removes a file.
    fn remove(&self, name: &str) -> io::Result<()>;
    /// Makes created, renamed and removed names durable.
    fn sync_dir(&self) -> io::Result<()>;
    /// Locks the directory for as long as the returned value lives.
    ///
    /// # Errors
    /// Returns an error that names the current holder.
    fn lock(&self) -> io::Result<Box<dyn fmt::Debug + Send + Sync>>;
}

/// A file that several threads read and write at any offset.
pub trait DiskFile: fmt::Debug + Send + Sync {
    /// Returns the length in bytes.
    fn length(&self) -> io::Result<u64>;
    /// Fills `into` from offset `at`.
    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<()>;
    /// Fills `into` from offset `at` if that needs no disk access. Returns `false` if it does, or may.
    fn read_cached_at(&self, into: &mut [u8], at: u64) -> io::Result<bool>;
    /// Writes all of `bytes` at offset `at`.
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()>;
    /// Makes written data durable.
    fn sync_data(&self) -> io::Result<()>;
    /// Reserves space, so that writing up to `length` cannot fail for a full disk, where the file system supports it.
    fn allocate(&self, length: u64) -> io::Result<()>;
    /// Fills the file up to `length` with durable zeroes, piece by piece. `go_on` is called after each piece; once it
    /// returns `false`, the rest stays as it is.
    fn fill_with_zeroes(&self, length: u64, go_on: &dyn Fn() -> bool) -> io::Result<()> {
        fill(self, length, &vec![0; ZERO_FILL_CHUNK], go_on)
    }
}

fn fill(file: &(impl DiskFile + ?Sized), length: u64, zeroes: &[u8], go_on: &dyn Fn() -> bool) -> io::Result<()> {
    for at in (0..length).step_by(zeroes.len()) {
        let piece = (length - at).min(zeroes.len() as u64);
        file.write_at(&zeroes[..piece as usize], at)?;
        file.sync_data()?;
        if !go_on() {
            break;
        }
    }
    Ok(())
}

/// A directory of the operating system. Created files and directories are accessible to their owner only.
#[derive(Debug)]
pub struct Directory(PathBuf);

impl Directory {
    /// Opens the directory, creating it if it is missing.
    ///
    /// # Errors
    /// Returns an error if it cannot be created.
    pub fn open(path: impl Into<PathBuf>) -> io::Result<Self> {
        let path = path.into();
        if !path.is_dir() {
            DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
            if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
                File::open(parent)?.sync_all()?;
            }
        }
        Ok(Self(path))
    }
}

impl Disk for Directory {
    fn list(&self) -> io::Result<Vec<String>> {
        let entries = fs::read_dir(&self.0)?;
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        Ok(Arc::new(OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(self.0.join(name))?))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        Ok(Arc::new(OpenOptions::new().read(true).write(true).open(self.0.join(name))?))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        fs::rename(self.0.join(from), self.0.join(to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.0.join(name))
    }

    fn sync_dir(&self) -> io::Result<()> {
        File::open(&self.0)?.sync_all()
    }

    fn lock(&self) -> io::Result<Box<dyn fmt::Debug + Send + Sync>> {
        Ok(Box::new(ProcessLock::acquire_directory(&self.0, "lock")?))
    }
}

impl DiskFile for File {
    fn length(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        self.read_exact_at(into, at)
    }

    #[cfg(target_os = "linux")]
    fn read_cached_at(&self, into: &mut [u8], at: u64) -> io::Result<bool> {
        let length = into.len();
        match preadv2(self, &mut [io::IoSliceMut::new(into)], at, ReadWriteFlags::NOWAIT) {
            // The kernel may have only a part of it in memory.
            Ok(read) => Ok(read == length),
            // Files of this kind are memory, but cannot tell.
            Err(Errno::OPNOTSUPP) if fstatfs(self)?.f_type as u64 == TMPFS_MAGIC => {
                self.read_exact_at(into, at).map(|()| true)
            }
            Err(Errno::AGAIN | Errno::OPNOTSUPP | Errno::NOSYS) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn read_cached_at(&self, _: &mut [u8], _: u64) -> io::Result<bool> {
        Ok(false)
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.write_all_at(bytes, at)
    }

    fn sync_data(&self) -> io::Result<()> {
        File::sync_data(self)
    }

    fn allocate(&self, length: u64) -> io::Result<()> {
        match rustix::fs::fallocate(self, FallocateFlags::empty(), 0, length) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => self.set_len(length),
            allocated => Ok(allocated?),
        }
    }

    /// Past the page cache: a fifth of the CPU time, and no other data is pushed out of it.
    #[cfg(target_os = "linux")]
    fn fill_with_zeroes(&self, length: u64, go_on: &dyn Fn() -> bool) -> io::Result<()> {
        let buffer = vec![0; ZERO_FILL_CHUNK + DIRECT_ALIGNMENT];
        let begin = buffer.as_ptr().align_offset(DIRECT_ALIGNMENT);
        let zeroes = &buffer[begin..begin + ZERO_FILL_CHUNK];
        let flags = fcntl_getfl(self)?;
        let filled = match fcntl_setfl(self, flags | OFlags::DIRECT) {
            Ok(()) => fill(self, length, zeroes, go_on),
            Err(error) => Err(error.into()),
        };
        fcntl_setfl(self, flags)?;
        match filled {
            // The file system has no such writes.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => fill(self, length, zeroes, go_on),
            filled => filled,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_file_is_filled_piece_by_piece_and_then_written_at_any_offset() {
        let folder = tempfile::tempdir().unwrap();
        let file = Directory::open(folder.path()).unwrap().create("file").unwrap();
        let length = 2 * ZERO_FILL_CHUNK as u64 + 4096;
        let pieces = Cell::new(0);
        let count_up_to = |most: usize| {
            pieces.set(pieces.get() + 1);
            pieces.get() < most
        };
        file.fill_with_zeroes(length, &|| count_up_to(1)).unwrap();
        assert_eq!((pieces.take(), file.length().unwrap()), (1, ZERO_FILL_CHUNK as u64));
        file.fill_with_zeroes(length, &|| count_up_to(usize::MAX)).unwrap();
        assert_eq!((pieces.take(), file.length().unwrap()), (3, length));
        file.write_at(b"batch", 4099).unwrap();
        let mut read = [1; 7];
        file.read_at(&mut read, 4098).unwrap();
        assert_eq!(&read, b"\0batch\0");
    }
}
