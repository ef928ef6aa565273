//! Stores keys in one folder, one file per operation.
//!
//! A write goes to a temporary file, which is synced and renamed, and then the folder is synced: after a power failure
//! the file is either complete or absent. Every read-then-write step holds the folder's lock, which the system releases
//! when its holder dies. Processes need nothing else to agree on a key.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Write as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use data_encoding::HEXLOWER;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::time::{Instant, sleep};

use super::{JournalError, JournalFuture, KeyJournal, PendingOperation, StoredKey};
use crate::ClientKey;

/// How long to wait for the lock (10 s). A running holder needs only milliseconds.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(3);

const LOCK_FILE_NAME: &str = "lock";
const KEY_FILE_SUFFIX: &str = "key";
const FILE_FORMAT_VERSION: u32 = 1;
/// How often the folder is swept for expired keys (1 h). The lock file's modification time records the last sweep.
const SWEEP_INTERVAL: Duration = Duration::from_secs(3600);

/// Stores keys in a folder. Clones of the journal and other processes may share it.
///
/// On a network file system it is only as reliable as that system's `flock` and `rename`.
#[derive(Debug, Clone)]
pub struct FileJournal {
    folder: Arc<Path>,
    lock_wait: Duration,
}

/// The JSON content of a key file.
#[derive(Serialize, Deserialize)]
struct KeyFile {
    version: u32,
    operation: String,
    key: String,
    since_ms: u64,
    /// Set once the operation has succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    until_ms: Option<u64>,
}

impl FileJournal {
    /// Opens a journal in this folder. The first use creates the folder, readable by its owner only.
    pub fn at(folder: impl Into<PathBuf>) -> FileJournal {
        FileJournal { folder: folder.into().into(), lock_wait: LOCK_TIMEOUT }
    }

    /// Runs `work` under the lock. Only the wait is asynchronous: once started, `work` finishes even if this future is
    /// dropped.
    async fn with_lock<T: Send + 'static>(
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
                return Err(JournalError::Locked { path: self.folder.join(LOCK_FILE_NAME), waited: self.lock_wait });
            }
            sleep(LOCK_RETRY_INTERVAL).await;
        }
    }
}

impl KeyJournal for FileJournal {
    fn load_or_store<'a>(&'a self, operation: &'a str, fresh: ClientKey) -> JournalFuture<'a, StoredKey> {
        let operation = operation.to_owned();
        Box::pin(self.with_lock(move |folder| {
            let path = key_path(folder, &operation);
            let now = SystemTime::now();
            if let Some(page) = read_key_file(&path)? {
                let (_, kept) = parse_key_file(&path, page)?;
                if !kept.is_expired(now) {
                    return Ok(kept);
                }
            }
            // Whole milliseconds, as the file stores them.
            let (version, key, since_ms) = (FILE_FORMAT_VERSION, fresh.as_str().into(), unix_millis(now));
            write_key_file(folder, &path, &KeyFile { version, operation, key, since_ms, until_ms: None })?;
            Ok(StoredKey::new_key(fresh, SystemTime::UNIX_EPOCH + Duration::from_millis(since_ms)))
        }))
    }

    fn finish<'a>(&'a self, operation: &'a str, key: &'a ClientKey, until: SystemTime) -> JournalFuture<'a, ()> {
        let (operation, key) = (operation.to_owned(), key.clone());
        Box::pin(self.with_lock(move |folder| {
            let path = key_path(folder, &operation);
            let unfinished = |page: &KeyFile| page.key == key.as_str() && page.until_ms.is_none();
            if let Some(page) = read_key_file(&path)?.filter(unfinished) {
                write_key_file(folder, &path, &KeyFile { until_ms: Some(unix_millis(until)), ..page })?;
            }
            sweep_expired(folder, SystemTime::now())
        }))
    }

    fn forget<'a>(&'a self, operation: &'a str, key: Option<&'a ClientKey>) -> JournalFuture<'a, ()> {
        let (operation, key) = (operation.to_owned(), key.cloned());
        Box::pin(self.with_lock(move |folder| {
            let path = key_path(folder, &operation);
            let Some(page) = read_key_file(&path)? else { return Ok(()) };
            if key.is_some_and(|key| page.key != key.as_str()) {
                return Ok(());
            }
            fs::remove_file(&path).map_err(io_error("remove", &path))?;
            // Without the sync, a power failure could bring the key back, and the next operation of this name would
            // reuse it.
            sync_folder(folder)
        }))
    }

    fn pending(&self) -> JournalFuture<'_, Vec<PendingOperation>> {
        Box::pin(self.with_lock(|folder| {
            let mut found = Vec::new();
            for path in list_key_files(folder)? {
                let Some(page) = read_key_file(&path)? else { continue };
                let (operation, StoredKey { key, created_at, expires_at }) = parse_key_file(&path, page)?;
                if expires_at.is_none() {
                    found.push(PendingOperation { operation, key, created_at });
                }
            }
            found.sort_by(|a, b| (a.created_at, &a.operation).cmp(&(b.created_at, &b.operation)));
            Ok(found)
        }))
    }
}

/// Tries to take the lock; `None` if another holder has it. Dropping the file releases the lock.
fn try_lock(folder: &Path) -> Result<Option<File>, JournalError> {
    let path = folder.join(LOCK_FILE_NAME);
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
    // A new folder is durable only once its parent is synced.
    let new: Vec<_> = folder.ancestors().take_while(|path| !path.exists()).map(Path::to_owned).collect();
    builder.recursive(true).create(folder).map_err(io_error("make", folder))?;
    for parent in new.iter().filter_map(|path| path.parent()) {
        sync_folder(if parent.as_os_str().is_empty() { Path::new(".") } else { parent })?;
    }
    Ok(())
}

/// Hashes the name, so that operation names may have any length and characters.
fn key_path(folder: &Path, operation: &str) -> PathBuf {
    folder.join(HEXLOWER.encode(&Sha256::digest(operation))).with_extension(KEY_FILE_SUFFIX)
}

fn read_key_file(path: &Path) -> Result<Option<KeyFile>, JournalError> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(io_error("read", path)(error)),
    };
    let page: KeyFile = serde_json::from_slice(&bytes).map_err(|why| damaged_file_error(path, why.to_string()))?;
    if page.version != FILE_FORMAT_VERSION {
        let why = format!("it has version {}, and this client reads {FILE_FORMAT_VERSION}", page.version);
        return Err(damaged_file_error(path, why));
    }
    if path.file_name() != key_path(Path::new(""), &page.operation).file_name() {
        return Err(damaged_file_error(path, format!("it belongs to the operation {:?}", page.operation)));
    }
    Ok(Some(page))
}

fn parse_key_file(path: &Path, page: KeyFile) -> Result<(String, StoredKey), JournalError> {
    let key = ClientKey::new(page.key).map_err(|why| damaged_file_error(path, why.to_string()))?;
    let time = |ms| SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(ms));
    let out_of_range = || damaged_file_error(path, "its time is out of range".into());
    let created_at = time(page.since_ms).ok_or_else(out_of_range)?;
    let expires_at = page.until_ms.map(|ms| time(ms).ok_or_else(out_of_range)).transpose()?;
    Ok((page.operation, StoredKey { key, created_at, expires_at }))
}

fn unix_millis(time: SystemTime) -> u64 {
    let since_epoch = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis();
    // Some systems' clocks cannot represent 64 bits of milliseconds.
    u64::try_from(since_epoch).unwrap_or(u64::MAX).min(i64::MAX as u64)
}

fn list_key_files(folder: &Path) -> Result<Vec<PathBuf>, JournalError> {
    let entries = fs::read_dir(folder).map_err(io_error("list", folder))?;
    let paths = entries.map(|entry| entry.map(|entry| entry.path()).map_err(io_error("list", folder)));
    let is_page = |path: &PathBuf| path.extension().is_some_and(|extension| extension == KEY_FILE_SUFFIX);
    paths.filter(|path| path.as_ref().map_or(true, is_page)).collect()
}

/// Removes expired keys. The caller holds the lock. Unreadable files stay for inspection.
fn sweep_expired(folder: &Path, now: SystemTime) -> Result<(), JournalError> {
    let lock = folder.join(LOCK_FILE_NAME);
    let last = fs::metadata(&lock).and_then(|data| data.modified()).map_err(io_error("read", &lock))?;
    if now.duration_since(last).unwrap_or_default() < SWEEP_INTERVAL {
        return Ok(());
    }
    for path in list_key_files(folder)? {
        let found = read_key_file(&path).ok().flatten().and_then(|page| parse_key_file(&path, page).ok());
        if found.is_some_and(|(_, kept)| kept.is_expired(now)) {
            fs::remove_file(&path).map_err(io_error("remove", &path))?;
        }
    }
    let file = OpenOptions::new().append(true).open(&lock).map_err(io_error("open", &lock))?;
    file.set_modified(now).map_err(io_error("write", &lock))
}

fn write_key_file(folder: &Path, path: &Path, page: &KeyFile) -> Result<(), JournalError> {
    // The lock is held, so one temporary name is enough; leftovers of a crash are overwritten.
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

/// Makes renames and removals in a folder durable.
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

fn damaged_file_error(path: &Path, why: String) -> JournalError {
    JournalError::Damaged { path: path.to_owned(), why }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::KeyGenerator;

    fn fresh() -> ClientKey {
        KeyGenerator::UuidV4.generate(SystemTime::now()).unwrap()
    }

    fn journal() -> (tempfile::TempDir, FileJournal) {
        let folder = tempfile::tempdir().unwrap();
        let journal = FileJournal::at(folder.path().join("keys/of/mine"));
        (folder, journal)
    }

    #[tokio::test]
    async fn a_key_is_kept_until_it_is_forgotten() {
        let (_folder, journal) = journal();
        let first = journal.load_or_store("order-17", fresh()).await.unwrap();
        // Stands in for another process.
        let again = FileJournal::at(&*journal.folder);
        assert_eq!(again.load_or_store("order-17", fresh()).await.unwrap(), first);
        let other = again.load_or_store("order-18", fresh()).await.unwrap();
        assert_ne!(other.key, first.key);
        let names: Vec<_> = again.pending().await.unwrap().into_iter().map(|entry| entry.operation).collect();
        assert_eq!(names, ["order-17", "order-18"]);
        journal.forget("order-17", Some(&first.key)).await.unwrap();
        let second = journal.load_or_store("order-17", fresh()).await.unwrap();
        assert_ne!(second.key, first.key);
        journal.forget("order-17", None).await.unwrap();
        assert_ne!(journal.load_or_store("order-17", fresh()).await.unwrap().key, second.key);
    }

    #[tokio::test]
    async fn the_key_of_an_operation_that_succeeded_stays_until_its_time_is_over() {
        let (_folder, journal) = journal();
        let (now, hour) = (SystemTime::now(), Duration::from_secs(3600));
        let first = journal.load_or_store("order-17", fresh()).await.unwrap();
        journal.finish("order-17", &first.key, now + hour).await.unwrap();
        let again = journal.load_or_store("order-17", fresh()).await.unwrap();
        assert_eq!((again.key, again.expires_at.map(unix_millis)), (first.key.clone(), Some(unix_millis(now + hour))));
        assert_eq!(journal.pending().await.unwrap(), []);
        // A replay does not extend the expiry.
        journal.finish("order-17", &first.key, now + 9 * hour).await.unwrap();
        assert_eq!(
            journal.load_or_store("order-17", fresh()).await.unwrap().expires_at.map(unix_millis),
            Some(unix_millis(now + hour))
        );
        journal.forget("order-17", None).await.unwrap();
        let second = journal.load_or_store("order-17", fresh()).await.unwrap();
        journal.finish("order-17", &second.key, now - hour).await.unwrap();
        assert_ne!(journal.load_or_store("order-17", fresh()).await.unwrap().key, second.key);
    }

    #[tokio::test]
    async fn what_is_over_is_removed_once_an_hour_and_what_has_not_ended_never() {
        let (_folder, journal) = journal();
        let (now, hour) = (SystemTime::now(), Duration::from_secs(3600));
        for (name, until) in [("over", Some(now - hour)), ("kept", Some(now + hour)), ("pending", None)] {
            let key = journal.load_or_store(name, fresh()).await.unwrap().key;
            if let Some(until) = until {
                journal.finish(name, &key, until).await.unwrap();
            }
        }
        let left = || ["over", "kept", "pending"].map(|name| key_path(&journal.folder, name).exists());
        assert_eq!(left(), [true; 3], "its folder is new");
        let lock = OpenOptions::new().append(true).open(journal.folder.join(LOCK_FILE_NAME)).unwrap();
        lock.set_modified(now - 2 * hour).unwrap();
        journal.finish("kept", &fresh(), now).await.unwrap();
        assert_eq!(left(), [false, true, true]);
        assert!(lock.metadata().unwrap().modified().unwrap() > now - hour);
    }

    #[tokio::test]
    async fn only_the_key_that_is_named_is_forgotten() {
        let (_folder, journal) = journal();
        let kept = journal.load_or_store("order-17", fresh()).await.unwrap();
        journal.forget("order-17", Some(&fresh())).await.unwrap();
        journal.forget("never-begun", Some(&kept.key)).await.unwrap();
        journal.finish("order-17", &fresh(), SystemTime::now()).await.unwrap();
        assert_eq!(journal.load_or_store("order-17", fresh()).await.unwrap(), kept);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn however_many_begin_at_once_there_is_one_key() {
        let (_folder, journal) = journal();
        let begin = |_| {
            let journal = FileJournal::at(&*journal.folder);
            tokio::spawn(async move { journal.load_or_store("order-17", fresh()).await.unwrap().key })
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
        journal.load_or_store("order-17", fresh()).await.unwrap();
        let path = key_path(&journal.folder, "order-17");
        let whole = fs::read(&path).unwrap();
        let other = String::from_utf8(whole.clone()).unwrap().replace("order-17", "order-18").into_bytes();
        for bad in [&whole[..whole.len() / 2], b"", b"{}", &other] {
            fs::write(&path, bad).unwrap();
            let error = journal.load_or_store("order-17", fresh()).await.unwrap_err();
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
        let error = journal.load_or_store("order-17", fresh()).await.unwrap_err();
        assert!(matches!(error, JournalError::Locked { .. }), "{error}");
        drop(held);
        journal.load_or_store("order-17", fresh()).await.unwrap();
    }

    #[cfg(unix)]
    #[tokio::test]
    async fn others_cannot_read_the_keys() {
        use std::os::unix::fs::PermissionsExt as _;
        let (_folder, journal) = journal();
        journal.load_or_store("order-17", fresh()).await.unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&journal.folder), 0o700);
        assert_eq!(mode(&key_path(&journal.folder, "order-17")), 0o600);
    }
}
