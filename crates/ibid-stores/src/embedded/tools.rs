//! What people do to a store that nobody has open: check it, dump it, compact it.
//!
//! Invariant: each of these holds the store's lock, so that it never reads what a running process is writing.

use std::{
    fmt::Write as _,
    io::{self, Write},
    path::Path,
    sync::Arc,
};

use super::{
    Embedded, OpenError, Options, Recovery,
    clock::Clock,
    disk::{Directory, Disk},
    entry::{Entry, Kind, Phase},
    index::{SHARDS, Slot},
    keeper::Keeper,
    recover,
    recovery::{Recovered, Trust},
    report::Report,
};

/// What compacting did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compacted {
    /// Bytes of its segments before.
    pub before: u64,
    /// And after.
    pub after: u64,
}

/// Reads everything and says what is wrong. Changes nothing.
///
/// # Errors
/// If there is no store, or somebody has it open, or the disk fails.
pub fn check(path: impl AsRef<Path>) -> Result<Report, OpenError> {
    let disk = existing(path.as_ref())?;
    let _lock = disk.lock()?;
    Ok(Recovered::read(&disk, Clock::new(Options::default().time, 0).now(), Trust::Nothing)?.0.report)
}

/// Writes one line of JSON per entry that still counts, in the order of addresses: everything but the record's bytes.
///
/// # Errors
/// As [`check`], or if `out` fails.
pub fn dump(path: impl AsRef<Path>, out: &mut dyn Write) -> Result<Report, OpenError> {
    let disk = existing(path.as_ref())?;
    let _lock = disk.lock()?;
    let recovered = Recovered::read(&disk, Clock::new(Options::default().time, 0).now(), Trust::Nothing)?.0;
    for nth in 0..SHARDS {
        let slots: Vec<Slot> = recovered.index.nth(nth).slots().copied().collect();
        let mut entries = Vec::with_capacity(slots.len());
        for slot in slots {
            let segment = recovered.segments.iter().find(|segment| segment.header.id == slot.segment);
            entries.extend(segment.and_then(|segment| segment.read(&slot).ok()));
        }
        entries.sort_unstable_by_key(|entry| entry.ask.address);
        for entry in entries {
            out.write_all(line(&entry).as_bytes())?;
        }
    }
    out.flush()?;
    Ok(recovered.report)
}

/// Moves what still counts into as few segments as it fits, and gives the rest back to the disk.
///
/// # Errors
/// As [`check`], or if there is no room for the copy, or if something does not read: that is evidence, and stays.
pub fn compact(path: impl AsRef<Path>) -> Result<Compacted, OpenError> {
    let mut disk = existing(path.as_ref())?;
    let mut lock = disk.lock()?;
    let mut options = Options { max_size: u64::MAX, ..Options::default() };
    // Segments of the size that they had, so that a small store stays small.
    options.segment_size = Recovered::largest_segment(&disk)?.unwrap_or(options.segment_size);
    let report = Recovered::read(&disk, Clock::new(Options::default().time, 0).now(), Trust::Nothing)?.0.report;
    if let Some(found) = report.found.first() {
        return Err(OpenError::Damaged(found.to_string()));
    }
    if !report.overdue.is_empty() {
        // Opening writes them again; a copy as they are would count as dead.
        drop(lock);
        drop(Embedded::open_on(Arc::new(disk), options.clone())?);
        disk = existing(path.as_ref())?;
        lock = disk.lock()?;
    }
    let _lock = lock;
    let Recovery { log, cold, covered, .. } = recover(Arc::new(disk), options)?;
    let log = Arc::new(log);
    let before = log.segments.taken();
    Keeper::new(log.clone(), cold + 1, covered).compact().map_err(|full| OpenError::NoRoom(full.to_string()))?;
    Ok(Compacted { before, after: log.segments.taken() })
}

fn existing(path: &Path) -> Result<Directory, OpenError> {
    if path.is_dir() {
        return Ok(Directory::open(path)?);
    }
    Err(io::Error::new(io::ErrorKind::NotFound, format!("{} is no directory", path.display())).into())
}

fn line(entry: &Entry) -> String {
    let ask = &*entry.ask;
    let kind = match entry.kind() {
        Kind::Claim => "claim",
        Kind::Done => "done",
        Kind::Failed => "failed",
        Kind::Unknown => "unknown",
        Kind::Free => "free",
    };
    let mut line = format!(
        r#"{{"address":"{}","kind":"{kind}","fence":{},"attempt":{},"claimed_us":{},"answers_until_us":{},"dies_at_us":{}"#,
        ask.address, entry.fence, entry.attempt, entry.claimed, entry.expires, entry.dies_at
    );
    let tags = [
        ("tenant", ask.tags.tenant()),
        ("user", ask.tags.user()),
        ("endpoint", ask.tags.endpoint()),
        ("key", ask.tags.key()),
    ];
    for (name, value) in tags {
        let _ = write!(line, r#","{name}":"#);
        quote(value, &mut line);
    }
    if let Phase::Done { record, outline, .. } = &entry.phase {
        let _ = write!(line, r#","status":{},"record_bytes":{}"#, outline.status, record.len());
    }
    line.push_str("}\n");
    line
}

fn quote(text: &str, out: &mut String) {
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
