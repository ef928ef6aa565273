//! What is wrong with a store's files, in words.

use std::fmt;

use ibid::store::Address;

use super::format::Corruption;

/// What reading a store's files found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StoreReport {
    /// Files that are segments.
    pub segments: u64,
    /// Of these, those that were not read, because a snapshot of the index covers them.
    pub covered: u64,
    /// Batches that were read, and are well.
    pub batches: u64,
    /// Entries in them, those that have died or were superseded included.
    pub entries: u64,
    /// Entries that still count.
    pub live_entries: u64,
    /// Where each lane of the log ends without a seal, as after a crash: file and offset. Not a fault.
    pub unsealed_ends: Vec<(String, u64)>,
    /// What does not read.
    pub found: Vec<CorruptRange>,
    /// Claims that were unfinished when the store was closed, and whose retention ended before it was opened again. A store
    /// keeps them as outcome unknown, for their lease and retention from the opening on.
    pub overdue_claims: Vec<Address>,
}

impl StoreReport {
    /// What another reader found.
    pub(super) fn merge(&mut self, other: Self) {
        self.batches += other.batches;
        self.entries += other.entries;
        self.found.extend(other.found);
    }
}

/// A place that does not read. Nothing is ever answered from it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CorruptRange {
    /// Which file.
    pub file: String,
    /// From where on.
    pub offset: u64,
    /// How far; `None` if the file as a whole is set aside.
    pub length: Option<u64>,
    /// What is wrong.
    pub corruption: Corruption,
}

impl CorruptRange {
    /// Whether the file as a whole cannot be used.
    pub fn is_whole_file(&self) -> bool {
        self.length.is_none()
    }
}

impl fmt::Display for CorruptRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, offset {}: {}", self.file, self.offset, self.corruption)
    }
}

impl fmt::Display for StoreReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            segments,
            covered,
            batches,
            entries,
            live_entries: live,
            unsealed_ends: torn,
            found,
            overdue_claims: overdue,
        } = self;
        writeln!(
            f,
            "{segments} segments ({covered} not read, but known from a snapshot), {batches} batches, {entries} entries, of which {live} count"
        )?;
        for (file, offset) in torn {
            writeln!(f, "{file}, offset {offset}: the log ends here, unsealed (as after a crash)")?;
        }
        for found in found {
            writeln!(f, "{found}")?;
        }
        if !overdue.is_empty() {
            writeln!(
                f,
                "{} claims were unfinished when the store was closed, and their retention has ended since; a start keeps them as outcome unknown",
                overdue.len()
            )?;
        }
        Ok(())
    }
}
