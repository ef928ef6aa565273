//! Findings about a store's files, for people.

use std::fmt;

use ibid::store::Address;

use super::{format::Corruption, segments::file_name};

/// The result of reading a store's files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StoreReport {
    /// Number of segment files.
    pub segments: u64,
    /// Number of segments that were not read, because a snapshot of the index covers them.
    pub covered: u64,
    /// Number of valid batches read.
    pub batches: u64,
    /// Number of entries in those batches, including dead and superseded ones.
    pub entries: u64,
    /// Number of live entries.
    pub live_entries: u64,
    /// File and offset where each lane ends without a seal, as after a crash. Not an error.
    pub unsealed_ends: Vec<(String, u64)>,
    /// Corrupt data.
    pub found: Vec<CorruptRange>,
    /// Claims that were unfinished when the store was closed, and whose ttl ended before it was opened again. The store
    /// keeps them as outcome unknown, for their lease and ttl from opening on.
    pub overdue_claims: Vec<Address>,
}

impl StoreReport {
    pub(super) fn add_corruption(&mut self, segment: u32, offset: u64, length: Option<u64>, corruption: Corruption) {
        self.found.push(CorruptRange { file: file_name(segment), offset, length, corruption });
    }

    /// Adds the findings of another reader.
    pub(super) fn merge(&mut self, other: Self) {
        self.batches += other.batches;
        self.entries += other.entries;
        self.found.extend(other.found);
    }
}

/// A range that cannot be read. It is never served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CorruptRange {
    /// Name of the file.
    pub file: String,
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes, or `None` if the whole file is quarantined.
    pub length: Option<u64>,
    /// The kind of corruption.
    pub corruption: Corruption,
}

impl CorruptRange {
    /// Returns `true` if the whole file is unusable.
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
        let Self { segments, covered, batches, entries, live_entries, .. } = self;
        writeln!(
            f,
            "{segments} segments ({covered} not read, but known from a snapshot), {batches} batches, {entries} entries, of which {live_entries} count"
        )?;
        for (file, offset) in &self.unsealed_ends {
            writeln!(f, "{file}, offset {offset}: the log ends here, unsealed (as after a crash)")?;
        }
        for found in &self.found {
            writeln!(f, "{found}")?;
        }
        if !self.overdue_claims.is_empty() {
            writeln!(
                f,
                "{} claims were unfinished when the store was closed, and their retention has ended since; a start keeps them as outcome unknown",
                self.overdue_claims.len()
            )?;
        }
        Ok(())
    }
}
