//! One process at a time.

use std::{
    fs::{File, OpenOptions, TryLockError},
    io::{self, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

/// A file that one process has for itself. Held by the open file: it ends with the process, however that ends. The file
/// says who has it, and stays.
#[derive(Debug)]
pub struct Lock(#[expect(dead_code, reason = "held, and never looked at")] File);

impl Lock {
    /// Takes it, making the file if it is missing.
    ///
    /// # Errors
    /// If another has it ([`io::ErrorKind::WouldBlock`]; the message says who), or the file cannot be used.
    pub fn take(path: &Path) -> io::Result<Self> {
        let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
        match file.try_lock() {
            Ok(()) => {
                let host = rustix::system::uname();
                file.set_len(0)?;
                write!(file, "process {} on {}", std::process::id(), host.nodename().to_string_lossy())?;
                Ok(Self(file))
            }
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                file.read_to_string(&mut holder)?;
                let holder = if holder.is_empty() { "another process" } else { &holder };
                Err(io::Error::new(io::ErrorKind::WouldBlock, format!("it is in use by {holder}")))
            }
            Err(TryLockError::Error(error)) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_has_it_until_it_lets_go() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let lock = Lock::take(&path).unwrap();
        let refused = Lock::take(&path).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
        assert!(refused.to_string().contains(&format!("in use by process {} on ", std::process::id())), "{refused}");
        drop(lock);
        Lock::take(&path).unwrap();
    }
}
