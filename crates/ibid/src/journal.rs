//! Stores answers that the store could not record in files, until it can.
//!
//! Each file contains one answer. It is written to a temporary file, synced, renamed, and the folder synced; only then
//! is the answer returned. Claims check the journal first, so that a retry at this process gets the answer while the
//! store is down. The journal stays small: while the store is down no new claim is granted, so only operations that
//! were already running end up here.
//!
//! Files are in clear text unless the journal is opened with a [`JournalSeal`]. Only their owner can read them.

use std::{
    collections::HashMap,
    fmt, fs,
    io::{self, Write},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::{BufMut, Bytes};
use parking_lot::Mutex;
use tokio::task::spawn_blocking;

use crate::{
    store::{
        Address, ClaimRequest, ClaimToken, CompletedEntry, Fence, Fingerprint, Lease, RecordSummary, Settlement, Tags,
    },
    time::now_ms,
    wire::{self, ByteReader},
};

const JOURNAL_VERSION: u8 = 1;
const FAILED_FLAG: u8 = 1;
const FRONT_ONLY_FLAG: u8 = 2;

/// Encrypts and decrypts journal files.
pub trait JournalSeal: fmt::Debug + Send + Sync + 'static {
    /// Seals the file of this address.
    fn seal(&self, at: &Address, plain: &[u8]) -> Bytes;

    /// Opens the sealed file of this address. Returns `None` if it was not sealed for it; the file is then never used.
    fn open(&self, at: &Address, sealed: Bytes) -> Option<Bytes>;
}

/// A folder of answers that wait for the store.
pub struct Journal {
    folder: PathBuf,
    seal: Option<Arc<dyn JournalSeal>>,
    entries: Mutex<HashMap<Address, JournalEntry>>,
    /// The length of `entries`, which can be read without the lock.
    count: AtomicUsize,
    /// Files that could not be read on opening. They were renamed and are never used.
    unreadable: Vec<PathBuf>,
}

#[derive(Clone)]
struct JournalEntry {
    lease: Lease,
    failed: bool,
    record: Bytes,
    summary: RecordSummary,
    /// Wall-clock time, because it outlives the process.
    expires_at_ms: u64,
}

impl Journal {
    /// Opens the journal in a folder, and creates the folder if it is missing.
    ///
    /// # Errors
    /// If the folder cannot be created, read or written, or has a file of a later version.
    pub fn open(folder: impl AsRef<Path>) -> io::Result<Self> {
        Self::open_with(folder, None)
    }

    /// Opens a journal with sealed files.
    ///
    /// # Errors
    /// If the folder cannot be created, read or written, or has a file of a later version.
    pub fn open_sealed(folder: impl AsRef<Path>, seal: Arc<dyn JournalSeal>) -> io::Result<Self> {
        Self::open_with(folder, Some(seal))
    }

    fn open_with(folder: impl AsRef<Path>, seal: Option<Arc<dyn JournalSeal>>) -> io::Result<Self> {
        let folder = folder.as_ref().to_owned();
        make_folder(&folder)?;
        // All files are read before any is changed: those of a later version are left as they are.
        let (mut unfinished, mut answers) = (Vec::new(), Vec::new());
        for file in fs::read_dir(&folder)? {
            let path = file?.path();
            match path.extension().and_then(|extension| extension.to_str()) {
                Some("part") => unfinished.push(path),
                Some("answer") => answers.push((read_entry(&path, seal.as_deref())?, path)),
                _ => {}
            }
        }
        unfinished.iter().try_for_each(fs::remove_file)?;
        let mut entries = HashMap::new();
        let mut unreadable = Vec::new();
        for (entry, path) in answers {
            if let Some(entry) = entry {
                entries.insert(entry.lease.request.address, entry);
                continue;
            }
            let aside = path.with_extension("unreadable");
            fs::rename(&path, &aside)?;
            unreadable.push(aside);
        }
        let probe = folder.join("writable.part");
        fs::write(&probe, b"")?;
        fs::remove_file(&probe)?;
        Ok(Self { count: AtomicUsize::new(entries.len()), entries: Mutex::new(entries), folder, seal, unreadable })
    }

    /// The new names of files that could not be read.
    pub fn unreadable(&self) -> &[PathBuf] {
        &self.unreadable
    }

    /// The number of waiting answers.
    pub fn len(&self) -> usize {
        self.count.load(Relaxed)
    }

    /// Whether no answer is waiting.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn find(&self, at: &Address) -> Option<CompletedEntry> {
        if self.is_empty() {
            return None;
        }
        let entries = self.entries.lock();
        let entry = entries.get(at)?;
        let left = entry.expires_at_ms.saturating_sub(now_ms());
        let finished = CompletedEntry {
            fence: entry.lease.fence,
            attempt: entry.lease.attempt,
            fingerprint: entry.lease.request.fingerprint,
            failed: entry.failed,
            record: entry.record.clone(),
            expires_in: Duration::from_millis(left),
            front_only: entry.lease.front_only,
        };
        (left > 0).then_some(finished)
    }

    pub(crate) fn entries(&self) -> Vec<(Lease, Settlement)> {
        let now = now_ms();
        let end = |entry: &JournalEntry| Settlement::Complete {
            failed: entry.failed,
            record: entry.record.clone(),
            summary: entry.summary,
            ttl: Duration::from_millis(entry.expires_at_ms.saturating_sub(now).max(1)),
        };
        self.entries.lock().values().map(|entry| (entry.lease.clone(), end(entry))).collect()
    }

    /// Returns once the answer is synced to disk. Only for answers that are remembered.
    pub(crate) async fn append(self: &Arc<Self>, lease: &Lease, end: &Settlement) -> io::Result<()> {
        let Settlement::Complete { failed, record, summary, ttl } = end.clone() else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "only remembered answers are journaled"));
        };
        let expires_at_ms = now_ms() + ttl.as_millis() as u64;
        let entry = JournalEntry { lease: lease.clone(), failed, record, summary, expires_at_ms };
        let journal = self.clone();
        spawn_blocking(move || {
            let address = entry.lease.request.address;
            let path = journal.entry_path(&address);
            let part = path.with_extension("part");
            let mut file = create_private_file(&part)?;
            let plain = encode(&entry);
            file.write_all(&journal.seal.as_ref().map_or(plain.clone(), |seal| seal.seal(&address, &plain)))?;
            file.sync_all()?;
            fs::rename(&part, &path)?;
            fs::File::open(&journal.folder)?.sync_all()?;
            let mut entries = journal.entries.lock();
            entries.insert(address, entry);
            journal.count.store(entries.len(), Relaxed);
            Ok(())
        })
        .await?
    }

    pub(crate) async fn remove(self: &Arc<Self>, at: &Address) -> io::Result<()> {
        let (journal, at) = (self.clone(), *at);
        spawn_blocking(move || {
            // Under the lock: once the file is removed, no request is answered from it.
            let mut entries = journal.entries.lock();
            match fs::remove_file(journal.entry_path(&at)) {
                Err(why) if why.kind() != io::ErrorKind::NotFound => return Err(why),
                _ => {}
            }
            entries.remove(&at);
            journal.count.store(entries.len(), Relaxed);
            Ok(())
        })
        .await?
    }

    fn entry_path(&self, at: &Address) -> PathBuf {
        self.folder.join(format!("{at}.answer"))
    }
}

/// Creates the folder for its owner only. An existing folder is left unchanged.
fn make_folder(folder: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.recursive(true).create(folder)
}

/// Creates a file that only its owner can read, because it contains whole answers.
fn create_private_file(path: &Path) -> io::Result<fs::File> {
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

/// Returns `None` if the file is not a valid journal entry. A sealed file opens only under its original name.
fn read_entry(path: &Path, seal: Option<&dyn JournalSeal>) -> io::Result<Option<JournalEntry>> {
    let bytes = Bytes::from(fs::read(path)?);
    let at = path.file_stem().and_then(|name| name.to_str()).and_then(Address::from_hex);
    let opened = match seal {
        None => Some(bytes),
        Some(seal) => at.and_then(|at| seal.open(&at, bytes)),
    };
    let Some(content) = opened.and_then(wire::verify_checksum) else { return Ok(None) };
    if let Some(version) = content.first().filter(|version| **version > JOURNAL_VERSION) {
        let why = format!(
            "{} is of format version {version}, and this ibid reads up to version {JOURNAL_VERSION}; use the ibid that \
             wrote it",
            path.display()
        );
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    Ok(decode(content).filter(|entry| seal.is_none() || Some(entry.lease.request.address) == at))
}

fn encode(entry: &JournalEntry) -> Bytes {
    let ask = &entry.lease.request;
    let mut out = Vec::with_capacity(256 + ask.tags.as_bytes().len() + ask.label.len() + entry.record.len());
    out.put_u8(JOURNAL_VERSION);
    out.put_u8(u8::from(entry.failed) | if entry.lease.front_only { FRONT_ONLY_FLAG } else { 0 });
    out.put_slice(&ask.address.0);
    out.put_slice(&ask.token.0);
    out.put_u8(ask.fingerprint.version);
    out.put_slice(&ask.fingerprint.digest);
    out.put_u64_le(entry.lease.fence.0);
    out.put_u32_le(entry.lease.attempt);
    out.put_u64_le(ask.lease.as_millis() as u64);
    out.put_u64_le(ask.ttl.as_millis() as u64);
    out.put_u64_le(ask.take_over.map_or(0, |fence| fence.0));
    out.put_u64_le(entry.expires_at_ms);
    out.put_u16_le(entry.summary.status);
    out.put_u64_le(entry.summary.requested_at_ms);
    out.put_u64_le(entry.summary.completed_at_ms);
    out.put_u64_le(entry.summary.took.as_micros() as u64);
    wire::put_framed(&mut out, ask.tags.as_bytes());
    wire::put_framed(&mut out, &ask.label);
    wire::put_framed(&mut out, &entry.record);
    wire::append_checksum(out)
}

/// Decodes the content of a file, without its checksum.
fn decode(content: Bytes) -> Option<JournalEntry> {
    let mut reader = ByteReader(content);
    if reader.u8()? != JOURNAL_VERSION {
        return None;
    }
    let flags = reader.u8()?;
    let (failed, front_only) = (flags & FAILED_FLAG != 0, flags & FRONT_ONLY_FLAG != 0);
    let address = Address(reader.array()?);
    let token = ClaimToken(reader.array()?);
    let fingerprint = Fingerprint { version: reader.u8()?, digest: reader.array()? };
    let fence = Fence(reader.u64()?);
    let attempt = reader.u32()?;
    let lease = Duration::from_millis(reader.u64()?);
    let ttl = Duration::from_millis(reader.u64()?);
    let take_over = Some(Fence(reader.u64()?)).filter(|fence| fence.0 != 0);
    let expires_at_ms = reader.u64()?;
    let summary = RecordSummary {
        status: reader.u16()?,
        requested_at_ms: reader.u64()?,
        completed_at_ms: reader.u64()?,
        took: Duration::from_micros(reader.u64()?),
    };
    let tags = Tags::from_bytes(reader.framed()?)?;
    let label = reader.framed()?;
    let record = reader.framed()?;
    let request = Arc::new(ClaimRequest { address, token, fingerprint, tags, label, lease, ttl, take_over });
    let lease = Lease { request, fence, attempt, front_only };
    reader.0.is_empty().then_some(JournalEntry { lease, failed, record, summary, expires_at_ms })
}

impl fmt::Debug for Journal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Journal").field("folder", &self.folder).field("waiting", &self.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fixture() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/journal-v1.answer")
    }

    fn sample() -> JournalEntry {
        let request = ClaimRequest {
            address: Address([1; 32]),
            token: ClaimToken([2; 16]),
            fingerprint: Fingerprint { version: 3, digest: [4; 32] },
            tags: Tags::new("acme", "üser", "POST /payments", "550e****0000"),
            label: Bytes::from_static(b"a label"),
            lease: Duration::from_secs(30),
            ttl: Duration::from_secs(600),
            take_over: Some(Fence(5)),
        };
        let summary =
            RecordSummary { status: 201, requested_at_ms: 6, completed_at_ms: 7, took: Duration::from_micros(8) };
        let lease = Lease { request: Arc::new(request), fence: Fence(9), attempt: 10, front_only: true };
        let record = Bytes::from_static(b"a record");
        JournalEntry { lease, failed: true, record, summary, expires_at_ms: 1 << 43 }
    }

    #[test]
    #[ignore = "writes the file that is kept"]
    fn write_the_file_of_version_1() {
        fs::write(fixture(), encode(&sample())).unwrap();
    }

    /// It must stay readable for ever.
    #[test]
    fn version_1_stays_readable() {
        let folder = tempfile::tempdir().unwrap();
        let wanted = sample();
        let at = wanted.lease.request.address;
        fs::copy(fixture(), folder.path().join(format!("{at}.answer"))).unwrap();
        let journal = Journal::open(folder.path()).unwrap();
        let entries = journal.entries.lock();
        let found = &entries[&at];
        assert_eq!(found.lease, wanted.lease);
        assert_eq!((found.failed, &found.record, found.summary), (true, &wanted.record, wanted.summary));
        assert_eq!(found.expires_at_ms, wanted.expires_at_ms);
    }

    #[test]
    fn a_file_of_a_later_version_is_refused_and_nothing_is_changed() {
        let folder = tempfile::tempdir().unwrap();
        let mut later = encode(&sample())[..20].to_vec();
        later[0] = JOURNAL_VERSION + 1;
        fs::write(folder.path().join("later.answer"), wire::append_checksum(later)).unwrap();
        for other in ["damaged.answer", "cut.part"] {
            fs::write(folder.path().join(other), b"damaged").unwrap();
        }
        let why = Journal::open(folder.path()).unwrap_err().to_string();
        assert!(why.contains("later.answer is of format version 2, and this ibid reads up to version 1; use"), "{why}");
        let mut names: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["cut.part", "damaged.answer", "later.answer"]);
    }
}
