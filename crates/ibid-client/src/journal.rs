//! Where the key of a named operation is kept, so that a client that was killed goes on with the same key, and one that runs
//! the operation again gets the same answer.
//!
//! The order that makes it safe: the key is kept *before* the first byte is sent, and its end is noted *after* the whole
//! final answer has arrived. Whatever happens between the two, the next try has the same key. After a success the key
//! stays for as long as the server remembers it; after a final refusal by the app it is forgotten.

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

/// What a journal answers, later.
pub type JournalFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, JournalError>> + Send + 'a>>;

/// Keeps keys by the names of their operations.
///
/// Everybody who shares a journal (tasks, threads, processes) must get the same key for the same name, however they
/// race: `keep` is one atomic step.
pub trait KeyJournal: fmt::Debug + Send + Sync {
    /// The key that is kept for this operation. If there is none, or only one of an operation that has ended and whose
    /// time is over, `fresh` is kept from now on.
    ///
    /// When this returns, the key survives whatever the journal promises to survive.
    fn load_or_store<'a>(&'a self, operation: &'a str, fresh: ClientKey) -> JournalFuture<'a, StoredKey>;

    /// The operation has succeeded: if its key still is this one, it stays until then, and is removed some time later. If
    /// it has succeeded before, nothing changes.
    fn finish<'a>(&'a self, operation: &'a str, key: &'a ClientKey, until: SystemTime) -> JournalFuture<'a, ()>;

    /// Forgets the key of this operation; if one is given, only if it still is that one, because another one belongs to
    /// somebody who began anew.
    fn forget<'a>(&'a self, operation: &'a str, key: Option<&'a ClientKey>) -> JournalFuture<'a, ()>;

    /// The operations that have not had their final answer, the oldest first: what to go on with after a restart.
    fn pending(&self) -> JournalFuture<'_, Vec<PendingOperation>>;
}

/// A kept key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredKey {
    /// The key.
    pub key: ClientKey,
    /// Since when it is kept.
    pub created_at: SystemTime,
    /// If the operation has succeeded: until when its key stays.
    pub expires_at: Option<SystemTime>,
}

impl StoredKey {
    /// A key that is kept from now on.
    fn new_key(key: ClientKey, created_at: SystemTime) -> StoredKey {
        StoredKey { key, created_at, expires_at: None }
    }

    /// Whether the operation has ended, and its key is not needed any more.
    fn is_expired(&self, now: SystemTime) -> bool {
        self.expires_at.is_some_and(|until| until < now)
    }
}

/// An operation without its final answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PendingOperation {
    /// Its name.
    pub operation: String,
    /// Its key.
    pub key: ClientKey,
    /// Since when.
    pub created_at: SystemTime,
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

/// How many operations that have succeeded are kept in memory.
const MAX_FINISHED_KEYS: usize = 100_000;

/// Keeps keys in memory: across retries, not across restarts. Of the operations that have succeeded it keeps the latest
/// 100,000.
#[derive(Default)]
pub struct MemoryJournal {
    /// Written by whoever calls.
    entries: Mutex<JournalEntries>,
}

#[derive(Default)]
struct JournalEntries {
    /// By operation.
    keys: HashMap<String, StoredKey>,
    /// Those that have succeeded, in that order; some may have been forgotten since.
    finished: VecDeque<(String, ClientKey)>,
}

impl JournalEntries {
    /// Removes what is over from the front, and the oldest of what is too much.
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
            let StoredKey { key, created_at: since, .. } = kept.clone();
            PendingOperation { operation: operation.clone(), key, created_at: since }
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
