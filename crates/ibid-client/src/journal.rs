//! Where the key of a named operation is kept until its final answer, so that a client that was killed in between goes on
//! with the same key.
//!
//! The order that makes it safe: the key is kept *before* the first byte is sent, and forgotten *after* the whole
//! final answer has arrived. Whatever happens between the two, the next try has the same key.

use std::{
    collections::HashMap,
    fmt, io,
    path::PathBuf,
    pin::Pin,
    time::{Duration, SystemTime},
};

use parking_lot::Mutex;

use crate::Key;

pub use self::file::FileJournal;

mod file;

/// What a journal answers, later.
pub type JournalFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, JournalError>> + Send + 'a>>;

/// Keeps keys by the names of their operations.
///
/// Everybody who shares a journal (tasks, threads, processes) must get the same key for the same name, however they
/// race: `keep` is one atomic step.
pub trait KeyJournal: fmt::Debug + Send + Sync {
    /// The key that is kept for this operation. If there is none, `fresh` is kept from now on.
    ///
    /// When this returns, the key survives whatever the journal promises to survive.
    fn keep<'a>(&'a self, operation: &'a str, fresh: Key) -> JournalFuture<'a, Kept>;

    /// Forgets the key of this operation, if it still is this one. Another one belongs to somebody who began anew.
    fn forget<'a>(&'a self, operation: &'a str, key: &'a Key) -> JournalFuture<'a, ()>;

    /// The operations that have not had their final answer, the oldest first: what to go on with after a restart.
    fn pending(&self) -> JournalFuture<'_, Vec<Pending>>;
}

/// A kept key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    /// The key.
    pub key: Key,
    /// Since when it is kept.
    pub since: SystemTime,
}

/// An operation without its final answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pending {
    /// Its name.
    pub operation: String,
    /// Its key.
    pub key: Key,
    /// Since when.
    pub since: SystemTime,
}

/// A journal that cannot be used. Nothing was sent.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JournalError {
    /// The disk, or the rights on it.
    #[error("the journal cannot {doing} {path}", path = path.display())]
    Io {
        /// What it tried.
        doing: &'static str,
        /// With which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file that is not as it was written. It may name a key that was sent, so no fresh key takes its place.
    #[error(
        "the journal's file {path} cannot be read ({why}); the operation may have been sent under the key in it: look up \
         whether it happened, then remove the file", path = path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// Somebody keeps the lock.
    #[error("another process has held the journal's lock {path} for {waited:?}; is it stopped?", path = path.display())]
    Locked {
        /// The lock.
        path: PathBuf,
        /// How long this one has waited.
        waited: Duration,
    },
    /// A journal of another make.
    #[error("the journal failed")]
    Other(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// Keeps keys in memory: across retries, not across restarts.
#[derive(Default)]
pub struct MemoryJournal {
    /// By operation. Written by whoever calls.
    kept: Mutex<HashMap<String, Kept>>,
}

impl KeyJournal for MemoryJournal {
    fn keep<'a>(&'a self, operation: &'a str, fresh: Key) -> JournalFuture<'a, Kept> {
        let mut kept = self.kept.lock();
        let entry = kept.entry(operation.to_owned()).or_insert_with(|| Kept { key: fresh, since: SystemTime::now() });
        let found = entry.clone();
        Box::pin(async move { Ok(found) })
    }

    fn forget<'a>(&'a self, operation: &'a str, key: &'a Key) -> JournalFuture<'a, ()> {
        let mut kept = self.kept.lock();
        if kept.get(operation).is_some_and(|kept| kept.key == *key) {
            kept.remove(operation);
        }
        Box::pin(async { Ok(()) })
    }

    fn pending(&self) -> JournalFuture<'_, Vec<Pending>> {
        let kept = self.kept.lock();
        let entries = kept.iter().map(|(operation, kept)| {
            let Kept { key, since } = kept.clone();
            Pending { operation: operation.clone(), key, since }
        });
        let mut entries: Vec<_> = entries.collect();
        entries.sort_by(|a, b| (a.since, &a.operation).cmp(&(b.since, &b.operation)));
        Box::pin(async { Ok(entries) })
    }
}

impl fmt::Debug for MemoryJournal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryJournal").field("pending", &self.kept.lock().len()).finish()
    }
}
