//! Entries as the memory store keeps them. A completed entry stays for its whole lifetime, so it is kept in as few bytes
//! as possible: one allocation of fixed size, and one for tags, label and record together.

use std::{borrow::Cow, mem, sync::Arc, time::Duration};

use bytes::Bytes;

use super::super::{
    Address, ClaimOutcome, ClaimRequest, ClaimToken, CompletedEntry, EntryState, Fence, Fingerprint, Lease,
    RecordSummary, Settlement, Tags,
    transitions::{self, EntryPhase, StoredEntry, UnixMicros, micros},
};

/// Entries with longer records are kept as they are: copying them takes longer, and would save next to nothing.
const MAX_COMPACT_RECORD_BYTES: usize = 16 * 1024;
/// The fixed memory cost of an entry in bytes: the entry itself, its share of the table and of the wheel, and what the
/// allocator adds.
pub(super) const ENTRY_OVERHEAD_BYTES: u64 = mem::size_of::<KeptEntry>() as u64 + 96;

#[derive(Debug)]
pub(super) enum KeptEntry {
    Whole(StoredEntry),
    Compact(CompactEntry),
}

/// A completed entry. [`CompactEntry::completing`] says which ones.
#[derive(Debug)]
pub(super) struct CompactEntry {
    address: Address,
    token: ClaimToken,
    fingerprint: Fingerprint,
    lease: Duration,
    ttl: Duration,
    fence: Fence,
    attempt: u32,
    failed: bool,
    claimed_at: UnixMicros,
    expires_at: UnixMicros,
    // The fields of a `RecordSummary`, which as a whole takes eight bytes more.
    status: u16,
    requested_at_ms: u64,
    completed_at_ms: u64,
    took: Duration,
    tags_len: u16,
    label_len: u16,
    /// Tags, label and record.
    bytes: Bytes,
}

impl CompactEntry {
    /// Returns `None` if the entry is not completed, or is not kept compact.
    fn new(entry: &StoredEntry) -> Option<Self> {
        match &entry.phase {
            EntryPhase::Completed { failed, record, summary, resolved: false } => {
                Self::completing(entry, (*failed, record, summary), entry.expires_at)
            }
            _ => None,
        }
    }

    /// The entry with this answer. Returns `None` if it is large, or has something that few entries have.
    fn completing(
        entry: &StoredEntry, (failed, record, summary): (bool, &Bytes, &RecordSummary), expires_at: UnixMicros,
    ) -> Option<Self> {
        let ClaimRequest { address, token, fingerprint, tags, label, lease, ttl, take_over: None } = &*entry.request
        else {
            return None;
        };
        if entry.took_over || !entry.spent_tokens.is_empty() || record.len() > MAX_COMPACT_RECORD_BYTES {
            return None;
        }
        let RecordSummary { status, requested_at_ms, completed_at_ms, took } = *summary;
        let (tags_len, label_len) = (tags.as_bytes().len().try_into().ok()?, label.len().try_into().ok()?);
        // Of the exact size: a vector with room left would be allocated again as `Bytes`.
        let bytes = [tags.as_bytes(), label, record].map(|part| &part[..]).concat().into();
        Some(Self {
            address: *address,
            token: *token,
            fingerprint: *fingerprint,
            lease: *lease,
            ttl: *ttl,
            fence: entry.fence,
            attempt: entry.attempt,
            failed,
            claimed_at: entry.claimed_at,
            expires_at,
            status,
            requested_at_ms,
            completed_at_ms,
            took,
            tags_len,
            label_len,
            bytes,
        })
    }

    /// Returns the entry from which this one was made.
    fn to_whole(&self) -> StoredEntry {
        let Self { status, requested_at_ms, completed_at_ms, took, .. } = *self;
        let summary = RecordSummary { status, requested_at_ms, completed_at_ms, took };
        let label_at = usize::from(self.tags_len);
        let tags = Tags::from_bytes(self.bytes.slice(..label_at)).expect("the bytes of tags");
        let request = ClaimRequest {
            address: self.address,
            token: self.token,
            fingerprint: self.fingerprint,
            tags,
            label: self.bytes.slice(label_at..self.record_at()),
            lease: self.lease,
            ttl: self.ttl,
            take_over: None,
        };
        StoredEntry {
            request: Arc::new(request),
            fence: self.fence,
            attempt: self.attempt,
            took_over: false,
            claimed_at: self.claimed_at,
            expires_at: self.expires_at,
            spent_tokens: Vec::new(),
            phase: EntryPhase::Completed { failed: self.failed, record: self.record(), summary, resolved: false },
        }
    }

    /// What every claim and every reader finds, until the entry expires.
    pub(super) fn completed(&self, now: UnixMicros) -> Option<CompletedEntry> {
        (now < self.expires_at).then(|| CompletedEntry {
            fence: self.fence,
            attempt: self.attempt,
            fingerprint: self.fingerprint,
            failed: self.failed,
            record: self.record(),
            expires_in: Duration::from_micros(self.expires_at - now),
            front_only: false,
        })
    }

    fn record_at(&self) -> usize {
        usize::from(self.tags_len) + usize::from(self.label_len)
    }

    fn record(&self) -> Bytes {
        self.bytes.slice(self.record_at()..)
    }
}

impl KeptEntry {
    pub(super) fn new(entry: StoredEntry) -> Self {
        CompactEntry::new(&entry).map_or_else(|| Self::Whole(entry), Self::Compact)
    }

    /// The entry after its holder has completed, if it is then compact: without a copy of the record on the way. Of all
    /// other calls, [`transitions::settle`] makes the next entry.
    pub(super) fn completing(&self, lease: &Lease, end: &Settlement, now: UnixMicros) -> Option<(Self, UnixMicros)> {
        let (Self::Whole(entry), Settlement::Complete { failed, record, summary, ttl }) = (self, end) else {
            return None;
        };
        let expires_at = now + micros(*ttl);
        let is_completing = transitions::only_completes(entry, lease, now);
        let compact = is_completing.then(|| CompactEntry::completing(entry, (*failed, record, summary), expires_at))?;
        Some((Self::Compact(compact?), expires_at))
    }

    pub(super) fn whole(&self) -> Cow<'_, StoredEntry> {
        match self {
            Self::Whole(entry) => Cow::Borrowed(entry),
            Self::Compact(entry) => Cow::Owned(entry.to_whole()),
        }
    }

    pub(super) fn address(&self) -> &Address {
        match self {
            Self::Whole(entry) => &entry.request.address,
            Self::Compact(entry) => &entry.address,
        }
    }

    pub(super) fn fence(&self) -> Fence {
        match self {
            Self::Whole(entry) => entry.fence,
            Self::Compact(entry) => entry.fence,
        }
    }

    /// See [`StoredEntry::removable_at`].
    pub(super) fn removable_at(&self) -> UnixMicros {
        match self {
            Self::Whole(entry) => entry.removable_at(),
            Self::Compact(entry) => entry.expires_at,
        }
    }

    /// See [`StoredEntry::state`].
    pub(super) fn state(&self, now: UnixMicros) -> Option<EntryState> {
        match self {
            Self::Whole(entry) => entry.state(now),
            Self::Compact(entry) if now >= entry.expires_at => None,
            Self::Compact(entry) if entry.failed => Some(EntryState::Failed),
            Self::Compact(_) => Some(EntryState::Done),
        }
    }

    /// See [`Store::find_completed`](super::Store::find_completed).
    pub(super) fn completed(&self, now: UnixMicros) -> Option<CompletedEntry> {
        match self {
            Self::Whole(entry) => match entry.read(now)? {
                ClaimOutcome::Completed(found) => Some(found),
                _ => None,
            },
            Self::Compact(entry) => entry.completed(now),
        }
    }

    /// The memory that the entry takes.
    pub(super) fn bytes(&self) -> u64 {
        let own = match self {
            Self::Whole(entry) => {
                let record = match &entry.phase {
                    EntryPhase::Completed { record, .. } => record.len() as u64,
                    _ => 0,
                };
                request_bytes(&entry.request) + mem::size_of_val(&entry.spent_tokens[..]) as u64 + record
            }
            Self::Compact(entry) => entry.bytes.len() as u64,
        };
        ENTRY_OVERHEAD_BYTES + own
    }
}

/// The memory that the request of an unfinished entry takes.
pub(super) fn request_bytes(ask: &ClaimRequest) -> u64 {
    (mem::size_of::<ClaimRequest>() + ask.tags.as_bytes().len() + ask.label.len()) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completed(tags: Tags, record: &[u8], change: impl FnOnce(&mut StoredEntry)) -> StoredEntry {
        let request = ClaimRequest {
            address: Address([1; 32]),
            token: ClaimToken([2; 16]),
            fingerprint: Fingerprint { version: 3, digest: [4; 32] },
            tags,
            label: Bytes::from_static(b"label"),
            lease: Duration::from_secs(30),
            ttl: Duration::from_secs(86_400),
            take_over: None,
        };
        let took = Duration::from_nanos(7);
        let summary = RecordSummary { status: 201, requested_at_ms: 5, completed_at_ms: 6, took };
        let record = Bytes::copy_from_slice(record);
        let mut entry = StoredEntry {
            request: Arc::new(request),
            fence: Fence(8),
            attempt: 9,
            took_over: false,
            claimed_at: 10,
            expires_at: 20,
            spent_tokens: Vec::new(),
            phase: EntryPhase::Completed { failed: true, record, summary, resolved: false },
        };
        change(&mut entry);
        entry
    }

    #[test]
    fn an_entry_is_read_as_it_was_put_in_whether_or_not_it_is_compact() {
        let tags = || Tags::new("acme", "", "POST /payments", "550e****0000");
        let cases = [
            (true, completed(tags(), b"record", |_| {})),
            (true, completed(Tags::default(), b"", |_| {})),
            (false, completed(tags(), &[b'x'; MAX_COMPACT_RECORD_BYTES + 1], |_| {})),
            (false, completed(tags(), b"record", |entry| entry.took_over = true)),
            (false, completed(tags(), b"record", |entry| entry.spent_tokens.push((ClaimToken([3; 16]), 30)))),
            (false, completed(tags(), b"record", |entry| entry.phase = EntryPhase::Released)),
        ];
        for (is_compact, entry) in cases {
            let kept = KeptEntry::new(entry.clone());
            assert_eq!(matches!(kept, KeptEntry::Compact(_)), is_compact, "{entry:?}");
            assert_eq!(*kept.whole(), entry);
            assert_eq!((kept.address(), kept.fence()), (&entry.request.address, entry.fence));
            assert_eq!(kept.removable_at(), entry.removable_at());
            for now in [15, 20] {
                assert_eq!(kept.state(now), entry.state(now));
                let completed = kept.completed(now).map(ClaimOutcome::Completed);
                assert_eq!(completed, entry.read(now), "{entry:?}");
            }
        }
    }

    #[test]
    fn a_completed_entry_takes_no_more_memory_than_it_needs() {
        assert!(mem::size_of::<KeptEntry>() <= 216, "{}", mem::size_of::<KeptEntry>());
        let KeptEntry::Compact(entry) = KeptEntry::new(completed(Tags::default(), b"record", |_| {})) else { panic!() };
        assert_eq!(entry.bytes, "labelrecord");
    }
}
