//! The trail of one gateway, in a file or only in memory.
//!
//! One process writes to a file and holds its lock (`FILE.lock`); any process may read it. The file is append-only, with
//! one JSON object per line; the last line of an id counts. Bound: two files of 4 MiB. When the newer one is full it
//! replaces the older one, whose entries are lost. All entries of both files are also in memory.

use std::{collections::VecDeque, io, path::Path, sync::Arc};

use ibid::store::Address;
use parking_lot::Mutex;
use tokio::task::spawn_blocking;

use super::{
    AuditEntry, AuditEntryPage,
    files::{self, AuditFiles},
};

/// Without a file, the trail keeps this many entries.
const MAX_ENTRIES_IN_MEMORY: usize = 1000;

/// The trail of one gateway. Lock order: `files` before `index`.
#[derive(Debug)]
pub(super) struct LocalTrail {
    pub(super) is_in_file: bool,
    /// Locked while a line is written and synced; `None` if the trail is in memory only.
    files: Mutex<Option<AuditFiles>>,
    /// Never locked during disk I/O, so that readers do not wait for a disk.
    index: Mutex<AuditIndex>,
}

#[derive(Debug)]
struct AuditIndex {
    /// Oldest first. The first `in_older_file` of them are in the older file.
    entries: VecDeque<AuditEntry>,
    in_older_file: usize,
    next_id: u64,
}

impl LocalTrail {
    /// Opens the trail and creates its file if it is missing. Without a path, the trail is in memory only.
    pub(super) fn open(path: Option<&Path>) -> io::Result<Self> {
        let mut known = AuditIndex { entries: VecDeque::new(), in_older_file: 0, next_id: 1 };
        let files = path.map(AuditFiles::open).transpose()?;
        if let Some(path) = path {
            known.load(&files::older_path(path))?;
            known.in_older_file = known.entries.len();
            known.load(path)?;
        }
        Ok(Self { is_in_file: files.is_some(), files: Mutex::new(files), index: Mutex::new(known) })
    }

    pub(super) fn page(&self, before: Option<u64>, limit: usize, user: Option<&str>) -> AuditEntryPage {
        let known = self.index.lock();
        let wanted = |entry: &&AuditEntry| {
            before.is_none_or(|before| entry.id < before) && user.is_none_or(|user| entry.user == user)
        };
        let mut entries: Vec<AuditEntry> = known.entries.iter().rev().filter(wanted).take(limit + 1).cloned().collect();
        let more = entries.len() > limit;
        entries.truncate(limit);
        let next = entries.last().filter(|_| more).map(|last| last.id);
        AuditEntryPage { entries, next }
    }

    pub(super) fn previous_page_start(&self, before: u64, limit: usize) -> Option<u64> {
        let known = self.index.lock();
        known.entries.iter().filter(|entry| entry.id >= before).nth(limit).map(|entry| entry.id)
    }

    pub(super) fn entries_for(&self, record: &Address, at_most: usize) -> Vec<AuditEntry> {
        let address = record.to_string();
        let of_record = |entry: &&AuditEntry| entry.address.as_ref() == Some(&address);
        self.index.lock().entries.iter().rev().filter(of_record).take(at_most).cloned().collect()
    }

    pub(super) fn update_in_memory(&self, entry: &AuditEntry) {
        self.index.lock().update(entry.clone());
    }

    /// Runs disk work on a blocking thread, because a sync takes milliseconds.
    pub(super) async fn run_blocking<T: Send + 'static>(
        self: &Arc<Self>, work: impl FnOnce(&Self) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let trail = self.clone();
        let done = spawn_blocking(move || work(&trail)).await;
        done.unwrap_or_else(|why| Err(io::Error::other(why)))
    }

    pub(super) fn append(&self, mut entry: AuditEntry) -> io::Result<AuditEntry> {
        let mut files = self.files.lock();
        entry.id = self.index.lock().next_id;
        self.write(&mut files, &entry)?;
        let mut known = self.index.lock();
        known.insert(entry.clone());
        if files.is_none() && known.entries.len() > MAX_ENTRIES_IN_MEMORY {
            known.entries.pop_front();
        }
        Ok(entry)
    }

    pub(super) fn amend(&self, entry: AuditEntry) -> io::Result<()> {
        let mut files = self.files.lock();
        let written = self.write(&mut files, &entry);
        self.index.lock().update(entry);
        written
    }

    fn write(&self, files: &mut Option<AuditFiles>, entry: &AuditEntry) -> io::Result<()> {
        let Some(files) = files else { return Ok(()) };
        let (turned, written) = files.write(entry);
        if turned {
            self.index.lock().rotate(entry.id);
        }
        written
    }
}

impl AuditIndex {
    fn load(&mut self, path: &Path) -> io::Result<()> {
        for line in files::read_file(path)?.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            match serde_json::from_slice::<AuditEntry>(line) {
                Ok(entry) => self.insert(entry),
                // Usually the last line of a process that was killed.
                Err(why) => tracing::warn!(file = %path.display(), %why, "a line of the audit trail cannot be read"),
            }
        }
        Ok(())
    }

    fn insert(&mut self, entry: AuditEntry) {
        self.next_id = self.next_id.max(entry.id.saturating_add(1));
        match self.entries.iter_mut().rev().find(|known| known.id <= entry.id) {
            Some(known) if known.id == entry.id => *known = entry,
            _ => self.entries.push_back(entry),
        }
    }

    fn update(&mut self, entry: AuditEntry) {
        if let Some(known) = self.entries.iter_mut().rev().find(|known| known.id == entry.id) {
            *known = entry;
        }
    }

    /// Drops the entries of the older file; those of the newer file are in the older one now.
    fn rotate(&mut self, written: u64) {
        self.entries.drain(..self.in_older_file);
        // The entry being written belongs to the newer file.
        self.in_older_file = self.entries.partition_point(|known| known.id < written);
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, File, OpenOptions},
        io::Write as _,
        os::unix::fs::PermissionsExt as _,
    };

    use super::{
        files::{MAX_FILE_BYTES, older_path},
        *,
    };
    use crate::{
        admin::audit::{AuditActor, AuditBackend, AuditOutcome, AuditTrail},
        records::{ChangeReport, RecordView},
    };

    fn actor() -> AuditActor {
        AuditActor { by: "Ada".into(), role: "admin".into(), client: "127.0.0.1".into() }
    }

    fn local(audit: &AuditTrail) -> &LocalTrail {
        let AuditBackend::Local(trail) = &audit.0 else { panic!("a local one") };
        trail
    }

    fn view(user: &str) -> RecordView {
        let view = serde_json::json!({
            "address": "5a".repeat(32), "state": "unknown", "key": "key-of-the-lost-one", "tenant": "acme", "user": user,
            "endpoint": "POST /pay", "method": "POST", "path": "/pay", "client": "127.0.0.1", "user_agent": "",
            "status": null, "requested_at": "", "completed_at": null, "duration_ms": null, "success": null,
            "age_ms": 1, "expires_at": "", "expires_in_ms": 1, "attempt": 1, "fence": 7, "fingerprint": "none",
        });
        serde_json::from_value(view).unwrap()
    }

    fn changed(before: &RecordView) -> ChangeReport {
        ChangeReport {
            action: "forget".into(),
            changed: Some(true),
            reason: "r".into(),
            refused: None,
            before: before.clone(),
            after: None,
        }
    }

    async fn one(audit: &AuditTrail, user: &str, reason: &str) -> AuditEntry {
        let view = view(user);
        let begun = audit.begin(&actor(), "forget", reason, Some(&view)).await.unwrap();
        audit.ended(begun, &changed(&view), None).await
    }

    #[tokio::test]
    async fn entries_come_back_after_a_restart_newest_first_and_page_by_page() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/audit.jsonl");
        let audit = AuditTrail::local(Some(&path)).unwrap();
        for nth in 0..5 {
            one(&audit, ["u1", "u2"][nth % 2], &format!("reason {nth}")).await;
        }
        // The process died while it wrote this entry's line.
        audit.begin(&actor(), "release", "cut off", Some(&view("u1"))).await.unwrap();
        drop(audit);
        let half = OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"id\":99,");
        half.unwrap();

        let audit = AuditTrail::local(Some(&path)).unwrap();
        let all = audit.page(None, 100, None).await.unwrap();
        assert_eq!(all.entries.iter().map(|entry| entry.id).collect::<Vec<_>>(), [6, 5, 4, 3, 2, 1]);
        assert_eq!((all.entries[0].outcome, all.entries[1].outcome), (AuditOutcome::Unknown, AuditOutcome::Changed));
        assert_eq!((all.entries[5].reason.as_str(), all.entries[5].key.as_str()), ("reason 0", "key-****-one"));
        assert_eq!(all.next, None);
        let first = audit.page(None, 4, None).await.unwrap();
        assert_eq!((first.entries.len(), first.next), (4, Some(3)));
        let second = audit.page(first.next, 4, None).await.unwrap();
        assert_eq!((second.entries.len(), second.next), (2, None));
        assert_eq!(
            (audit.previous_page_start(3, 4), audit.previous_page_start(3, 2), audit.previous_page_start(3, 1)),
            (None, Some(5), Some(4))
        );
        assert_eq!(audit.page(audit.previous_page_start(3, 2), 2, None).await.unwrap().next, Some(3), "back and forth");
        let own = audit.page(None, 100, Some("u2")).await.unwrap();
        assert_eq!(own.entries.iter().map(|entry| entry.id).collect::<Vec<_>>(), [4, 2]);
        assert_eq!(one(&audit, "u1", "after").await.id, 7, "numbers go on");
        drop(audit);
        assert_eq!(
            AuditTrail::local(Some(&path)).unwrap().page(None, 100, None).await.unwrap().entries.len(),
            7,
            "and nothing is swallowed"
        );
    }

    #[tokio::test]
    async fn files_are_bounded_and_memory_holds_what_they_hold() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.jsonl");
        let audit = AuditTrail::local(Some(&path)).unwrap();
        let reason = "r".repeat(200_000);
        for _ in 0..40 {
            one(&audit, "u1", &reason).await;
        }
        let length = |path: &Path| fs::metadata(path).unwrap().len();
        assert!(length(&path) <= MAX_FILE_BYTES && length(&older_path(&path)) <= MAX_FILE_BYTES);
        let ids = |audit: &AuditTrail| {
            local(audit).page(None, 100, None).entries.iter().map(|entry| entry.id).collect::<Vec<_>>()
        };
        let here = ids(&audit);
        assert!(here.len() < 40 && here[0] == 40, "{here:?}");
        drop(audit);
        assert_eq!(ids(&AuditTrail::local(Some(&path)).unwrap()), here);
    }

    #[tokio::test]
    async fn one_process_writes_and_anybody_reads() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.jsonl");
        let audit = AuditTrail::local(Some(&path)).unwrap();
        let refused = AuditTrail::local(Some(&path)).unwrap_err().to_string();
        assert!(refused.contains("it is in use by process") && refused.contains("name another"), "{refused}");
        // Also after a rotation, which replaces the file that was opened first.
        let reason = "r".repeat(200_000);
        for _ in 0..15 {
            one(&audit, "u1", &reason).await;
        }
        assert!(older_path(&path).exists() && AuditTrail::local(Some(&path)).is_err());
        assert!(
            fs::read_to_string(&path).unwrap().lines().all(|line| serde_json::from_str::<AuditEntry>(line).is_ok())
        );
        let modes = [&path, &older_path(&path)].map(|path| fs::metadata(path).unwrap().permissions().mode() & 0o777);
        assert_eq!(modes, [0o600; 2]);
        drop(audit);
        assert!(AuditTrail::local(Some(&path)).is_ok());
    }

    #[tokio::test]
    async fn what_cannot_be_written_down_is_not_begun() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.jsonl");
        let audit = AuditTrail::local(Some(&path)).unwrap();
        one(&audit, "u1", "r").await;
        local(&audit).files.lock().as_mut().unwrap().file = File::open(&path).unwrap();
        assert!(audit.begin(&actor(), "forget", "r", Some(&view("u1"))).await.is_err(), "opened for reading only");
        assert_eq!(audit.page(None, 10, None).await.unwrap().entries.len(), 1);
        assert!(AuditTrail::local(Some(Path::new("/proc/nowhere/audit.jsonl"))).is_err());
    }

    #[tokio::test]
    async fn who_looks_does_not_wait_for_a_disk() {
        let folder = tempfile::tempdir().unwrap();
        let audit = AuditTrail::local(Some(&folder.path().join("audit.jsonl"))).unwrap();
        let entry = one(&audit, "u1", "r").await;
        let trail = local(&audit);
        let _writing = trail.files.lock();
        assert_eq!(
            (trail.page(None, 10, None).entries.len(), trail.entries_for(&Address([0x5a; 32]), 10).len()),
            (1, 1)
        );
        trail.update_in_memory(&AuditEntry { reason: "so far".into(), ..entry });
        assert_eq!(trail.page(None, 10, None).entries[0].reason, "so far");
    }

    #[tokio::test]
    async fn without_a_file_the_last_thousand_are_remembered() {
        let audit = AuditTrail::local(None).unwrap();
        for _ in 0..MAX_ENTRIES_IN_MEMORY + 5 {
            one(&audit, "u1", "r").await;
        }
        let page = audit.page(None, 2 * MAX_ENTRIES_IN_MEMORY, None).await.unwrap();
        assert_eq!((page.entries.len(), page.entries[0].id), (MAX_ENTRIES_IN_MEMORY, MAX_ENTRIES_IN_MEMORY as u64 + 5));
    }
}
