//! Offline tools: check, dump and compact a store that no process has open.
//!
//! Invariant: each tool holds the store's lock, so it never reads data that a running process is writing.

use std::{
    fmt::Write as _,
    io::{self, Write},
    path::Path,
    sync::Arc,
};

use super::{
    Embedded, EmbeddedOptions, OpenError,
    compactor::Compactor,
    disk::{Directory, Disk},
    entry::{EntryPhase, LogEntry, LogEntryKind},
    index::{IndexSlot, SHARD_COUNT},
    log::StoreClock,
    recover_log,
    recovery::{RecoveredLog, RecoveryMode, StoreReport},
    segments::ReadMode,
};

/// The result of [`compact`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompactionResult {
    /// Bytes of all segments before compaction.
    pub before: u64,
    /// Bytes of all segments after compaction.
    pub after: u64,
}

/// Reads the whole store and reports corruption. Changes nothing.
///
/// # Errors
/// Returns an error if there is no store, if another process has it open, or if the disk fails.
pub fn check(path: impl AsRef<Path>) -> Result<StoreReport, OpenError> {
    let disk = open_existing(path.as_ref())?;
    let _lock = disk.lock()?;
    Ok(read_everything(&disk)?.report)
}

/// Writes one line of JSON per live entry, in address order: everything except the record's bytes.
///
/// # Errors
/// As [`check`], or if writing to `out` fails.
pub fn dump(path: impl AsRef<Path>, out: &mut dyn Write) -> Result<StoreReport, OpenError> {
    let disk = open_existing(path.as_ref())?;
    let _lock = disk.lock()?;
    let recovered = read_everything(&disk)?;
    for nth in 0..SHARD_COUNT {
        let slots: Vec<IndexSlot> = recovered.index.shard_by_number(nth).slots().copied().collect();
        let mut entries = Vec::with_capacity(slots.len());
        for slot in slots {
            let segment = recovered.segments.iter().find(|segment| segment.header.id == slot.segment);
            entries.extend(segment.and_then(|segment| segment.read(&slot, ReadMode::Blocking).ok()));
        }
        entries.sort_unstable_by_key(|entry| entry.request.address);
        for entry in entries {
            out.write_all(dump_line(&entry).as_bytes())?;
        }
    }
    out.flush()?;
    Ok(recovered.report)
}

/// Moves all live entries into as few segments as possible and frees the rest of the disk space.
///
/// # Errors
/// As [`check`], or if there is no space for the copy, or if the store is corrupt: corrupt files are kept as evidence.
pub fn compact(path: impl AsRef<Path>) -> Result<CompactionResult, OpenError> {
    let mut disk = open_existing(path.as_ref())?;
    let mut lock = disk.lock()?;
    let mut options = EmbeddedOptions { max_size: u64::MAX, ..EmbeddedOptions::default() };
    // Keep the segment size, so that a small store stays small.
    options.segment_size = RecoveredLog::largest_segment(&disk)?.unwrap_or(options.segment_size);
    let report = read_everything(&disk)?.report;
    if let Some(found) = report.found.first() {
        return Err(OpenError::Corrupt(found.to_string()));
    }
    if !report.overdue_claims.is_empty() {
        // Opening the store renews these entries; copied unchanged, they would count as dead.
        drop(lock);
        drop(Embedded::open_on(Arc::new(disk), options.clone())?);
        disk = open_existing(path.as_ref())?;
        lock = disk.lock()?;
    }
    let _lock = lock;
    let (log, recovered) = recover_log(Arc::new(disk), options)?;
    let before = log.segments.used_bytes();
    Compactor::new(log.clone(), &recovered).compact().map_err(|full| OpenError::NoSpace(full.to_string()))?;
    Ok(CompactionResult { before, after: log.segments.used_bytes() })
}

fn read_everything(disk: &Directory) -> Result<RecoveredLog, OpenError> {
    let now = StoreClock::new(EmbeddedOptions::default().time, 0).now();
    Ok(RecoveredLog::read(disk, now, RecoveryMode::ReadEverything)?.0)
}

fn open_existing(path: &Path) -> Result<Directory, OpenError> {
    if path.is_dir() {
        return Ok(Directory::open(path)?);
    }
    Err(io::Error::new(io::ErrorKind::NotFound, format!("{} is no directory", path.display())).into())
}

fn dump_line(entry: &LogEntry) -> String {
    let ask = &*entry.request;
    let kind = match entry.kind() {
        LogEntryKind::Running => "claim",
        LogEntryKind::Completed => "done",
        LogEntryKind::Failed => "failed",
        LogEntryKind::OutcomeUnknown => "unknown",
        LogEntryKind::Released => "free",
    };
    let mut line = format!(
        r#"{{"address":"{}","kind":"{kind}","fence":{},"attempt":{},"claimed_us":{},"answers_until_us":{},"dies_at_us":{}"#,
        ask.address, entry.fence, entry.attempt, entry.claimed_at, entry.expires_at, entry.dies_at
    );
    let tags = [ask.tags.tenant(), ask.tags.user(), ask.tags.endpoint(), ask.tags.key()];
    for (name, value) in ["tenant", "user", "endpoint", "key"].into_iter().zip(tags) {
        let _ = write!(line, r#","{name}":"#);
        write_json_string(value, &mut line);
    }
    if let EntryPhase::Completed { record, summary, .. } = &entry.phase {
        let _ = write!(line, r#","status":{},"record_bytes":{}"#, summary.status, record.len());
    }
    line.push_str("}\n");
    line
}

fn write_json_string(text: &str, out: &mut String) {
    out.push('"');
    for character in text.chars() {
        match character {
            '"' | '\\' => out.extend(['\\', character]),
            control if control < ' ' => drop(write!(out, "\\u{:04x}", u32::from(control))),
            other => out.push(other),
        }
    }
    out.push('"');
}
