//! Keys in files: one folder, one file per operation.
//!
//! A file is written beside its place, synced, renamed into it, and the folder synced: after a loss of power it is there
//! whole, or not at all. Every step that looks and then writes holds the folder's lock, which the system lets go of
//! when its holder dies. Nothing else is needed for two processes to agree.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Write as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::time::{Instant, sleep};

use super::{JournalError, JournalFuture, Kept, KeyJournal, Pending};
use crate::Key;

/// How long to wait for the lock. Its holders need milliseconds, unless they are stopped.
const LOCK_WAIT: Duration = Duration::from_secs(10);
const LOCK_RETRY: Duration = Duration::from_millis(3);

const LOCK: &str = "lock";
const SUFFIX: &str = "key";
const VERSION: u32 = 1;
/// How often the folder is looked through for keys that are not needed any more. The lock's time says when it last was.
const SWEEP_EVERY: Duration = Duration::from_secs(3600);

/// Keeps keys in a folder of their own. Clones share it, and so do processes.
///
/// On a network file system it is as good as that system's `flock` and `rename`.
#[derive(Debug, Clone)]
pub struct FileJournal {
    folder: Arc<Path>,
    lock_wait: Duration,
}

/// What a file says.
#[derive(Serialize, Deserialize)]
struct Page {
    version: u32,
    operation: String,
    key: String,
    since_ms: u64,
    /// Set once the operation has succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    until_ms: Option<u64>,
}

impl FileJournal {
    /// A journal in this folder, which is made when it is first needed, readable by its owner only.
    pub fn at(folder: impl Into<PathBuf>) -> FileJournal {
        FileJournal { folder: folder.into().into(), lock_wait: LOCK_WAIT }
    }

    /// Runs `work` under the lock. Only the waiting is asynchronous; `work` runs to its end even if this is dropped.
    async fn locked<T: Send + 'static>(
        &self, work: impl FnOnce(&Path) -> Result<T, JournalError> + Send + 'static,
    ) -> Result<T, JournalError> {
        let until = Instant::now() + self.lock_wait;
        let mut work = Some(work);
        loop {
            let (folder, job) = (Arc::clone(&self.folder), work.take());
            let tried = tokio::task::spawn_blocking(move || {
                let job = job.expect("given back until it has run");
                match try_lock(&folder)? {
                    Some(_held) => job(&folder).map(Ok),
                    None => Ok(Err(job)),
                }
            });
            match tried.await.map_err(|error| JournalError::Other(error.into()))?? {
                Ok(done) => return Ok(done),
                Err(job) => work = Some(job),
            }
            if Instant::now() >= until {
                return Err(JournalError::Locked { path: self.folder.join(LOCK), waited: self.lock_wait });
            }
            sleep(LOCK_RETRY).await;
        }
    }
}

impl KeyJournal for FileJournal {
    fn keep<'a>(&'a self, operation: &'a str, fresh: Key) -> JournalFuture<'a, Kept> {
        let operation = operation.to_owned();
        Box::pin(self.locked(move |folder| {
            let path = path_of(folder, &operation);
            let now = SystemTime::now();
            if let Some(page) = read(&path)? {
                let (_, kept) = kept(&path, page)?;
                if !kept.is_over(now) {
                    return Ok(kept);
                }
            }
            // As it will be read back: whole milliseconds.
            let since_ms = millis(now);
            let page = Page { version: VERSION, operation, key: fresh.as_str().into(), since_ms, until_ms: None };
            write(folder, &path, &page)?;
            Ok(Kept::fresh(fresh, SystemTime::UNIX_EPOCH + Duration::from_millis(since_ms)))
        }))
    }

    fn finish<'a>(&'a self, operation: &'a str, key: &'a Key, until: SystemTime) -> JournalFuture<'a, ()> {
        let (operation, key) = (operation.to_owned(), key.clone());
        Box::pin(self.locked(move |folder| {
            let path = path_of(folder, &operation);
            match read(&path)? {
                Some(page) if page.key == key.as_str() && page.until_ms.is_none() => {
                    write(folder, &path, &Page { until_ms: Some(millis(until)), ..page })?;
                }
                _ => {}
            }
            sweep(folder, SystemTime::now())
        }))
    }

    fn forget<'a>(&'a self, operation: &'a str, key: Option<&'a Key>) -> JournalFuture<'a, ()> {
        let (operation, key) = (operation.to_owned(), key.cloned());
        Box::pin(self.locked(move |folder| {
            let path = path_of(folder, &operation);
            match read(&path)? {
                Some(page) if key.is_none_or(|key| page.key == key.as_str()) => {}
                _ => return Ok(()),
            }
            fs::remove_file(&path).map_err(io_error("remove", &path))?;
            // Or a loss of power would bring it back, and the next operation of this name would be taken for this one.
            sync_folder(folder)
        }))
    }

    fn pending(&self) -> JournalFuture<'_, Vec<Pending>> {
        Box::pin(self.locked(|folder| {
            let mut found = Vec::new();
            for path in pages(folder)? {
                let Some(page) = read(&path)? else { continue };
                let (operation, Kept { key, since, until }) = kept(&path, page)?;
                if until.is_none() {
                    found.push(Pending { operation, key, since });
                }
            }
            found.sort_by(|a, b| (a.since, &a.operation).cmp(&(b.since, &b.operation)));
            Ok(found)
        }))
    }
}

/// The lock, or none if somebody else has it. Let go of when dropped.
fn try_lock(folder: &Path) -> Result<Option<File>, JournalError> {
    let path = folder.join(LOCK);
    let open = || OpenOptions::new().create(true).append(true).open(&path);
    let file = match open() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            make_folder(folder)?;
            open()
        }
        opened => opened,
    };
    let file = file.map_err(io_error("open", &path))?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(io_error("lock", &path)(error)),
    }
}

fn make_folder(folder: &Path) -> Result<(), JournalError> {
    let mut builder = fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    // Each new folder is an entry of the one above it, and as lasting as that.
    let new: Vec<_> = folder.ancestors().take_while(|path| !path.exists()).map(Path::to_owned).collect();
    builder.recursive(true).create(folder).map_err(io_error("make", folder))?;
    for parent in new.iter().filter_map(|path| path.parent()) {
        sync_folder(if parent.as_os_str().is_empty() { Path::new(".") } else { parent })?;
    }
    Ok(())
}

/// The name is hashed, so that it may be anything, and of any length.
fn path_of(folder: &Path, operation: &str) -> PathBuf {
    let digest = Sha256::digest(operation.as_bytes());
    let name: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    folder.join(name).with_extension(SUFFIX)
}

fn read(path: &Path) -> Result<Option<Page>, JournalError> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(io_error("read", path)(error)),
    };
    let page: Page = serde_json::from_slice(&bytes).map_err(|why| damaged(path, why.to_string()))?;
    if page.version != VERSION {
        return Err(damaged(path, format!("it has version {}, and this client reads {VERSION}", page.version)));
    }
    if path.file_name() != path_of(Path::new(""), &page.operation).file_name() {
        return Err(damaged(path, format!("it belongs to the operation {:?}", page.operation)));
    }
    Ok(Some(page))
}

/// The name of an operation, and its key.
fn kept(path: &Path, page: Page) -> Result<(String, Kept), JournalError> {
    let key = Key::new(page.key).map_err(|why| damaged(path, why.to_string()))?;
    let time = |ms| SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(ms));
    let out_of_range = || damaged(path, "its time is out of range".into());
    let since = time(page.since_ms).ok_or_else(out_of_range)?;
    let until = page.until_ms.map(|ms| time(ms).ok_or_else(out_of_range)).transpose()?;
    Ok((page.operation, Kept { key, since, until }))
}

fn millis(time: SystemTime) -> u64 {
    let since_epoch = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis();
    // 64 bits of milliseconds are more than some systems' clocks hold.
    u64::try_from(since_epoch).unwrap_or(u64::MAX).min(i64::MAX as u64)
}

/// The files of all keys.
fn pages(folder: &Path) -> Result<Vec<PathBuf>, JournalError> {
    let entries = fs::read_dir(folder).map_err(io_error("list", folder))?;
    let paths = entries.map(|entry| entry.map(|entry| entry.path()).map_err(io_error("list", folder)));
    let is_page = |path: &PathBuf| path.extension().is_some_and(|extension| extension == SUFFIX);
    paths.filter(|path| path.as_ref().map_or(true, is_page)).collect()
}

/// Removes the keys of operations that have ended and whose time is over. The lock is held. What cannot be read is
/// left for somebody to look at.
fn sweep(folder: &Path, now: SystemTime) -> Result<(), JournalError> {
    let lock = folder.join(LOCK);
    let last = fs::metadata(&lock).and_then(|data| data.modified()).map_err(io_error("read", &lock))?;
    if now.duration_since(last).unwrap_or_default() < SWEEP_EVERY {
        return Ok(());
    }
    for path in pages(folder)? {
        let found = read(&path).ok().flatten().and_then(|page| kept(&path, page).ok());
        if found.is_some_and(|(_, kept)| kept.is_over(now)) {
            fs::remove_file(&path).map_err(io_error("remove", &path))?;
        }
    }
    let file = OpenOptions::new().append(true).open(&lock).map_err(io_error("open", &lock))?;
    file.set_modified(now).map_err(io_error("write", &lock))
}

fn write(folder: &Path, path: &Path, page: &Page) -> Result<(), JournalError> {
    // The lock is held, so one name is enough; a leftover of a crash is overwritten.
    let next = folder.join("next");
    let mut options = OpenOptions::new();
    options.create(true).write(true).truncate(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(&next).map_err(io_error("make", &next))?;
    let bytes = serde_json::to_vec(page).expect("strings and numbers");
    file.write_all(&bytes).and_then(|()| file.sync_all()).map_err(io_error("write", &next))?;
    fs::rename(&next, path).map_err(io_error("rename", &next))?;
    sync_folder(folder)
}

/// Makes what was renamed or removed in a folder last.
fn sync_folder(folder: &Path) -> Result<(), JournalError> {
    if cfg!(unix) {
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(io_error("sync", folder))?;
    }
    Ok(())
}

fn io_error(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> JournalError {
    let path = path.to_owned();
    move |source| JournalError::Io { doing, path, source }
}

fn damaged(path: &Path, why: String) -> JournalError {
    JournalError::Damaged { path: path.to_owned(), why }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Mint;

    fn fresh() -> Key {
        Mint::V4.mint(SystemTime::now()).unwrap()
    }

    fn journal() -> (tempfile::TempDir, FileJournal) {
        let folder = tempfile::tempdir().unwrap();
        let journal = FileJournal::at(folder.path().join("keys/of/mine"));
        (folder, journal)
    }

    #[tokio::test]
    async fn a_key_is_kept_until_it_is_forgotten() {
        let (_folder, journal) = journal();
        let first = journal.keep("order-17", fresh()).await.unwrap();
        // Another process, as it were.
        let again = FileJournal::at(&*journal.folder);
        assert_eq!(again.keep("order-17", fresh()).await.unwrap(), first);
        let other = again.keep("order-18", fresh()).await.unwrap();
        assert_ne!(other.key, first.key);
        let names: Vec<_> = again.pending().await.unwrap().into_iter().map(|entry| entry.operation).collect();
        assert_eq!(names, ["order-17", "order-18"]);
        journal.forget("order-17", Some(&first.key)).await.unwrap();
        let second = journal.keep("order-17", fresh()).await.unwrap();
        assert_ne!(second.key, first.key);
        journal.forget("order-17", None).await.unwrap();
        assert_ne!(journal.keep("order-17", fresh()).await.unwrap().key, second.key);
    }

    #[tokio::test]
    async fn the_key_of_an_operation_that_succeeded_stays_until_its_time_is_over() {
        let (_folder, journal) = journal();
        let (now, hour) = (SystemTime::now(), Duration::from_secs(3600));
        let first = journal.keep("order-17", fresh()).await.unwrap();
        journal.finish("order-17", &first.key, now + hour).await.unwrap();
        let again = journal.keep("order-17", fresh()).await.unwrap();
        assert_eq!((again.key, again.until.map(millis)), (first.key.clone(), Some(millis(now + hour))));
        assert_eq!(journal.pending().await.unwrap(), []);
        // A replay does not make it last longer.
        journal.finish("order-17", &first.key, now + 9 * hour).await.unwrap();
        assert_eq!(journal.keep("order-17", fresh()).await.unwrap().until.map(millis), Some(millis(now + hour)));
        journal.forget("order-17", None).await.unwrap();
        let second = journal.keep("order-17", fresh()).await.unwrap();
        journal.finish("order-17", &second.key, now - hour).await.unwrap();
        assert_ne!(journal.keep("order-17", fresh()).await.unwrap().key, second.key);
    }

    #[tokio::test]
    async fn what_is_over_is_removed_once_an_hour_and_what_has_not_ended_never() {
        let (_folder, journal) = journal();
        let (now, hour) = (SystemTime::now(), Duration::from_secs(3600));
        for (name, until) in [("over", Some(now - hour)), ("kept", Some(now + hour)), ("pending", None)] {
            let key = journal.keep(name, fresh()).await.unwrap().key;
            if let Some(until) = until {
                journal.finish(name, &key, until).await.unwrap();
            }
        }
        let left = || ["over", "kept", "pending"].map(|name| path_of(&journal.folder, name).exists());
        assert_eq!(left(), [true; 3], "its folder is new");
        let lock = OpenOptions::new().append(true).open(journal.folder.join(LOCK)).unwrap();
        lock.set_modified(now - 2 * hour).unwrap();
        journal.finish("kept", &fresh(), now).await.unwrap();
        assert_eq!(left(), [false, true, true]);
        assert!(lock.metadata().unwrap().modified().unwrap() > now - hour);
    }

    #[tokio::test]
    async fn only_the_key_that_is_named_is_forgotten() {
        let (_folder, journal) = journal();
        let kept = journal.keep("order-17", fresh()).await.unwrap();
        journal.forget("order-17", Some(&fresh())).await.unwrap();
        journal.forget("never-begun", Some(&kept.key)).await.unwrap();
        journal.finish("order-17", &fresh(), SystemTime::now()).await.unwrap();
        assert_eq!(journal.keep("order-17", fresh()).await.unwrap(), kept);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn however_many_begin_at_once_there_is_one_key() {
        let (_folder, journal) = journal();
        let begin = |_| {
            let journal = FileJournal::at(&*journal.folder);
            tokio::spawn(async move { journal.keep("order-17", fresh()).await.unwrap().key })
        };
        let tasks: Vec<_> = (0..40).map(begin).collect();
        let mut keys = std::collections::HashSet::new();
        for task in tasks {
            keys.insert(task.await.unwrap());
        }
        assert_eq!(keys.len(), 1);
    }

    #[tokio::test]
    async fn a_damaged_file_is_an_error_and_no_fresh_key() {
        let (_folder, journal) = journal();
        journal.keep("order-17", fresh()).await.unwrap();
        let path = path_of(&journal.folder, "order-17");
        let whole = fs::read(&path).unwrap();
        let other = String::from_utf8(whole.clone()).unwrap().replace("order-17", "order-18").into_bytes();
        for bad in [&whole[..whole.len() / 2], b"", b"{}", &other] {
            fs::write(&path, bad).unwrap();
            let error = journal.keep("order-17", fresh()).await.unwrap_err();
            assert!(matches!(error, JournalError::Damaged { .. }), "{error}");
            assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
            assert_eq!(fs::read(&path).unwrap(), bad, "it is left for somebody to look at");
        }
    }

    #[tokio::test]
    async fn a_lock_that_is_never_let_go_of_is_an_error_in_time() {
        let (_folder, journal) = journal();
        let journal = FileJournal { lock_wait: Duration::from_millis(50), ..journal };
        let held = try_lock(&journal.folder).unwrap().expect("nobody else has it");
        let error = journal.keep("order-17", fresh()).await.unwrap_err();
        assert!(matches!(error, JournalError::Locked { .. }), "{error}");
        drop(held);
        journal.keep("order-17", fresh()).await.unwrap();
    }

    #[cfg(unix)]
    #[tokio::test]
    async fn others_cannot_read_the_keys() {
        use std::os::unix::fs::PermissionsExt as _;
        let (_folder, journal) = journal();
        journal.keep("order-17", fresh()).await.unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&journal.folder), 0o700);
        assert_eq!(mode(&path_of(&journal.folder, "order-17")), 0o600);
    }
}
