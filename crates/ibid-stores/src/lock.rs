//! Exclusive use of a file or directory by one process.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    thread::sleep,
    time::Duration,
};

/// How often, and after which pause, a lock that this very process is named to hold is tried again. A child process
/// inherits the locked file until it executes its program: for that time a lock outlives its owner's `drop`.
const OWN_LOCK_RETRIES: u32 = 50;
const OWN_LOCK_PAUSE: Duration = Duration::from_millis(10);

/// Exclusive lock of a process on a file or directory. The operating system releases it when the process ends, even
/// after a crash. The lock file names its holder, and is never removed.
#[derive(Debug)]
#[allow(dead_code, reason = "held, and never read")]
pub struct ProcessLock {
    file: File,
    directory: Option<File>,
}

impl ProcessLock {
    /// Locks the file, creating it if it is missing.
    ///
    /// # Errors
    /// Returns [`io::ErrorKind::WouldBlock`] if another process holds the lock; the message names that process. Returns
    /// other errors if the file cannot be used.
    pub fn acquire(path: &Path) -> io::Result<Self> {
        retry_while_own(|| Self::try_acquire(path))
    }

    fn try_acquire(path: &Path) -> io::Result<Self> {
        let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
        match file.try_lock() {
            Ok(()) => {
                let host = rustix::system::uname();
                file.set_len(0)?;
                write!(file, "process {} on {}", std::process::id(), host.nodename().to_string_lossy())?;
                Ok(Self { file, directory: None })
            }
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                file.read_to_string(&mut holder)?;
                Err(in_use_error(&holder))
            }
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    /// Locks a directory and the file `name` in it. Removing the file does not release the lock: the directory itself
    /// is locked, too, where the file system supports it (NFS does not).
    ///
    /// # Errors
    /// As [`Self::acquire`].
    pub fn acquire_directory(folder: &Path, name: &str) -> io::Result<Self> {
        retry_while_own(|| Self::try_acquire_directory(folder, name))
    }

    fn try_acquire_directory(folder: &Path, name: &str) -> io::Result<Self> {
        let path = folder.join(name);
        let directory = File::open(folder)?;
        let directory = match directory.try_lock() {
            Ok(()) => Some(directory),
            Err(TryLockError::WouldBlock) => return Err(in_use_error(&fs::read_to_string(path).unwrap_or_default())),
            Err(TryLockError::Error(_)) => None,
        };
        Ok(Self { directory, ..Self::try_acquire(&path)? })
    }
}

#[allow(clippy::disallowed_methods, reason = "opening a store blocks on its files anyway")]
fn retry_while_own(acquire: impl Fn() -> io::Result<ProcessLock>) -> io::Result<ProcessLock> {
    let own = format!("in use by process {} on ", std::process::id());
    let is_own = |error: &io::Error| error.kind() == io::ErrorKind::WouldBlock && error.to_string().contains(&own);
    for _ in 0..OWN_LOCK_RETRIES {
        match acquire() {
            Err(error) if is_own(&error) => sleep(OWN_LOCK_PAUSE),
            acquired => return acquired,
        }
    }
    acquire()
}

fn in_use_error(holder: &str) -> io::Error {
    let holder = if holder.is_empty() { "another process" } else { holder };
    io::Error::new(io::ErrorKind::WouldBlock, format!("it is in use by {holder}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_has_it_until_it_lets_go() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let lock = ProcessLock::acquire(&path).unwrap();
        let refused = ProcessLock::acquire(&path).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
        assert!(refused.to_string().contains(&format!("in use by process {} on ", std::process::id())), "{refused}");
        drop(lock);
        ProcessLock::acquire(&path).unwrap();
    }

    #[allow(clippy::disallowed_methods, reason = "on a thread of its own")]
    /// As if a child process had inherited the file for a moment.
    #[test]
    fn a_lock_of_this_process_that_is_about_to_be_released_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let lock = ProcessLock::acquire(&path).unwrap();
        let inherited = lock.file.try_clone().unwrap();
        drop(lock);
        let released = std::thread::spawn(move || {
            sleep(OWN_LOCK_PAUSE * 5);
            drop(inherited);
        });
        ProcessLock::acquire(&path).unwrap();
        released.join().unwrap();
    }

    #[test]
    fn a_folder_stays_locked_when_its_file_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let lock = ProcessLock::acquire_directory(folder.path(), "lock").unwrap();
        fs::remove_file(folder.path().join("lock")).unwrap();
        let refused = ProcessLock::acquire_directory(folder.path(), "lock").unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::WouldBlock, "{refused}");
        assert_eq!(refused.to_string(), "it is in use by another process");
        drop(lock);
        ProcessLock::acquire_directory(folder.path(), "lock").unwrap();
    }
}
