//! The journal stores the key of each named operation, so that a restarted client continues with the same key and a
//! repeated operation returns the same response.
//!
//! Safety depends on the order: the key is stored *before* the first byte is sent, and the result is recorded *after*
//! the whole final response has arrived. Whatever happens in between, the next attempt has the same key. After a
//! success the key stays for as long as the server remembers it; after a final refusal by the app it is deleted.

use std::{
    collections::{HashMap, VecDeque},
    fmt, io,
    path::PathBuf,
    pin::Pin,
    time::{Duration, SystemTime},
};

use parking_lot::Mutex;

use crate::ClientKey;

pub use self::file::FileJournal;

mod file;

/// The future that [`KeyJournal`] methods return.
pub type JournalFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, JournalError>> + Send + 'a>>;

/// Stores one key per operation name.
///
/// All tasks, threads and processes that share a journal must get the same key for the same name, even when they race:
/// [`load_or_store`](KeyJournal::load_or_store) is one atomic step.
pub trait KeyJournal: fmt::Debug + Send + Sync {
    /// Returns the stored key of this operation. If there is none, or the stored one has expired, stores and returns
    /// `fresh`.
    ///
    /// When this returns, the key is as durable as the journal makes any key.
    fn load_or_store<'a>(&'a self, operation: &'a str, fresh: ClientKey) -> JournalFuture<'a, StoredKey>;

    /// Records that the operation has succeeded. If its key still is `key`, the journal keeps it until `until` and
    /// removes it some time later. Has no effect on an operation that is already finished.
    fn finish<'a>(&'a self, operation: &'a str, key: &'a ClientKey, until: SystemTime) -> JournalFuture<'a, ()>;

    /// Deletes the key of this operation. If `key` is given and the stored key differs, does nothing: that key belongs
    /// to a newer operation of the same name.
    fn forget<'a>(&'a self, operation: &'a str, key: Option<&'a ClientKey>) -> JournalFuture<'a, ()>;

    /// Lists the operations without a final response, oldest first. Resume these after a restart.
    fn pending(&self) -> JournalFuture<'_, Vec<PendingOperation>>;
}

/// The key that a journal holds for an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredKey {
    /// The key to send.
    pub key: ClientKey,
    /// When the journal stored it.
    pub created_at: SystemTime,
    /// When it expires; `None` until the operation has succeeded.
    pub expires_at: Option<SystemTime>,
}

impl StoredKey {
    fn new_key(key: ClientKey, created_at: SystemTime) -> StoredKey {
        StoredKey { key, created_at, expires_at: None }
    }

    fn is_expired(&self, now: SystemTime) -> bool {
        self.expires_at.is_some_and(|until| until < now)
    }
}

/// An operation that has no final response yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PendingOperation {
    /// The name given with [`OperationSpec::named`](crate::OperationSpec::named).
    pub operation: String,
    /// The key that it is sent with.
    pub key: ClientKey,
    /// When its key was stored.
    pub created_at: SystemTime,
}

/// The journal failed. If this happens before the first attempt, nothing is sent.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JournalError {
    /// A file operation failed.
    #[error("the journal cannot {doing} {path}", path = path.display())]
    Io {
        /// The failed operation, a verb such as `read`.
        doing: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A key file that cannot be parsed. It may hold a key that was sent, so the journal does not replace it with a
    /// fresh one.
    #[error(
        "the journal's file {path} cannot be read ({why}); the operation may have been sent under the key in it: look up \
         whether it happened, then remove the file", path = path.display()
    )]
    Damaged {
        /// The key file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// Another process holds the journal's lock.
    #[error("another process has held the journal's lock {path} for {waited:?}; is it stopped?", path = path.display())]
    Locked {
        /// The lock file.
        path: PathBuf,
        /// How long this process waited for it.
        waited: Duration,
    },
    /// An error of a journal outside this crate, or a failed background task.
    #[error("the journal failed")]
    Other(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// Most finished operations that the memory journal keeps.
const MAX_FINISHED_KEYS: usize = 100_000;

/// Keeps keys in memory: they survive retries but not a restart. Of the finished operations it keeps the latest
/// 100,000.
#[derive(Default)]
pub struct MemoryJournal {
    entries: Mutex<JournalEntries>,
}

#[derive(Default)]
struct JournalEntries {
    /// By operation name.
    keys: HashMap<String, StoredKey>,
    /// Finished operations in the order of finishing; some may have been deleted since.
    finished: VecDeque<(String, ClientKey)>,
}

impl JournalEntries {
    /// Removes expired keys, and the oldest finished ones above the limit.
    fn evict(&mut self, now: SystemTime) {
        while let Some((operation, key)) = self.finished.front() {
            let found = self.keys.get(operation).filter(|kept| kept.key == *key);
            match found {
                Some(kept) if !kept.is_expired(now) && self.finished.len() <= MAX_FINISHED_KEYS => return,
                Some(_) => drop(self.keys.remove(operation)),
                None => {}
            }
            self.finished.pop_front();
        }
    }
}

impl KeyJournal for MemoryJournal {
    fn load_or_store<'a>(&'a self, operation: &'a str, fresh: ClientKey) -> JournalFuture<'a, StoredKey> {
        let (mut entries, now) = (self.entries.lock(), SystemTime::now());
        entries.evict(now);
        let entry = entries.keys.entry(operation.to_owned()).or_insert_with(|| StoredKey::new_key(fresh.clone(), now));
        if entry.is_expired(now) {
            *entry = StoredKey::new_key(fresh, now);
        }
        let found = entry.clone();
        Box::pin(async move { Ok(found) })
    }

    fn finish<'a>(&'a self, operation: &'a str, key: &'a ClientKey, until: SystemTime) -> JournalFuture<'a, ()> {
        let mut entries = self.entries.lock();
        let found = entries.keys.get_mut(operation).filter(|kept| kept.key == *key && kept.expires_at.is_none());
        if let Some(kept) = found {
            kept.expires_at = Some(until);
            entries.finished.push_back((operation.to_owned(), key.clone()));
            entries.evict(SystemTime::now());
        }
        Box::pin(async { Ok(()) })
    }

    fn forget<'a>(&'a self, operation: &'a str, key: Option<&'a ClientKey>) -> JournalFuture<'a, ()> {
        let kept = &mut self.entries.lock().keys;
        if kept.get(operation).is_some_and(|kept| key.is_none_or(|key| kept.key == *key)) {
            kept.remove(operation);
        }
        Box::pin(async { Ok(()) })
    }

    fn pending(&self) -> JournalFuture<'_, Vec<PendingOperation>> {
        let kept = &self.entries.lock().keys;
        let entries = kept.iter().filter(|(_, kept)| kept.expires_at.is_none()).map(|(operation, kept)| {
            let StoredKey { key, created_at, .. } = kept.clone();
            PendingOperation { operation: operation.clone(), key, created_at }
        });
        let mut entries: Vec<_> = entries.collect();
        entries.sort_by(|a, b| (a.created_at, &a.operation).cmp(&(b.created_at, &b.operation)));
        Box::pin(async { Ok(entries) })
    }
}

impl fmt::Debug for MemoryJournal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryJournal").field("kept", &self.entries.lock().keys.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn memory_keeps_what_has_not_ended_and_the_latest_that_have() {
        let journal = MemoryJournal::default();
        let (now, key) = (SystemTime::now(), |name: String| ClientKey::new(name).unwrap());
        journal.load_or_store("pending", key("p".into())).await.unwrap();
        for at in 0..MAX_FINISHED_KEYS + 10 {
            let name = format!("o-{at}");
            journal.load_or_store(&name, key(name.clone())).await.unwrap();
            journal.finish(&name, &key(name.clone()), now + Duration::from_secs(3600)).await.unwrap();
        }
        assert_eq!(journal.entries.lock().keys.len(), MAX_FINISHED_KEYS + 1);
        assert_eq!(journal.load_or_store("pending", key("q".into())).await.unwrap().key, key("p".into()));
        assert_eq!(journal.load_or_store("o-9", key("q".into())).await.unwrap().key, key("q".into()));
        assert_eq!(journal.load_or_store("o-10", key("q".into())).await.unwrap().key, key("o-10".into()));
        assert_eq!(journal.pending().await.unwrap().len(), 2);
    }
}
