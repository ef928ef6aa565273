//! An entry in the log: the state of one address, its version and its encoding.
//!
//! ```text
//! 0 length u32   4 crc u32   8 kind u8   9 flags u8   10 fingerprint version u8   11 spent tokens u8   12 attempt u32
//! 16 version u64   24 address [32]   56 token [16]   72 fence u64   80 fingerprint [32]   112 lease u64   120 ttl u64
//! 128 take_over u64   136 claimed u64   144 answers_until u64   152 dies_at u64   160 until u64
//! 168 tags' length u32   172 label's length u32   176 record's length u32
//! 180 summary, of kinds done and failed: status u16, requested u64, completed u64 (ms), took u64 (ns)
//!     spent tokens: token [16], until u64, each; tags; label; record
//! ```
//!
//! Invariants: an entry is complete by itself, without older ones. `version` grows with every change, so of two entries
//! at one address the higher one counts, wherever it is stored. `dies_at` is never earlier than that of the superseded
//! entry: as long as an older entry is in the log, so is this one.

use std::{ops::Deref, sync::Arc, time::Duration};

use bytes::{Buf, BufMut, Bytes};
pub(super) use ibid::store::transitions::{EntryPhase, UnixMicros, micros};
use ibid::store::{
    Address, ClaimRequest, ClaimToken, Fence, Fingerprint, RecordSummary, Tags, transitions::StoredEntry,
};

use super::format::{Corruption, salted_crc};

const FIXED_LEN: usize = 180;
const SUMMARY_LEN: usize = 26;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LogEntry {
    pub(super) entry: StoredEntry,
    /// The entry must stay in the log until then.
    pub(super) dies_at: UnixMicros,
    pub(super) version: u64,
}

impl Deref for LogEntry {
    type Target = StoredEntry;

    fn deref(&self) -> &StoredEntry {
        &self.entry
    }
}

/// A phase's code in the log and in the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LogEntryKind {
    Running = 0,
    Completed = 1,
    Failed = 2,
    OutcomeUnknown = 3,
    Released = 4,
}

impl LogEntryKind {
    pub(super) fn from_bits(bits: u8) -> Option<Self> {
        [Self::Running, Self::Completed, Self::Failed, Self::OutcomeUnknown, Self::Released]
            .into_iter()
            .find(|kind| *kind as u8 == bits)
    }
}

impl LogEntry {
    /// Neither this entry nor the one it supersedes is needed after `dies_at`. The writer sets the version.
    pub(super) fn new(entry: StoredEntry, superseded: Option<&LogEntry>) -> Self {
        let dies_at = entry.removable_at().max(superseded.map_or(0, |before| before.dies_at));
        Self { entry, dies_at, version: 0 }
    }

    pub(super) fn kind(&self) -> LogEntryKind {
        match self.phase {
            EntryPhase::Running { .. } => LogEntryKind::Running,
            EntryPhase::Completed { failed: false, .. } => LogEntryKind::Completed,
            EntryPhase::Completed { failed: true, .. } => LogEntryKind::Failed,
            EntryPhase::OutcomeUnknown { .. } => LogEntryKind::OutcomeUnknown,
            EntryPhase::Released => LogEntryKind::Released,
        }
    }

    /// After a restart no holder is known to run: the outcome is unknown at once, and a takeover is allowed one full
    /// lease after opening at the earliest.
    pub(super) fn mark_interrupted(&mut self, opened: UnixMicros) {
        if let EntryPhase::Running { lease_until, takeover_at } = &mut self.entry.phase {
            *takeover_at = (opened + micros(self.entry.request.lease)).max(*lease_until);
            *lease_until = opened.min(*lease_until);
        }
    }

    /// Restarts the ttl at opening, if it ended while the store was closed.
    pub(super) fn renew_retention(&mut self, opened: UnixMicros) {
        self.entry.expires_at = opened + micros(self.request.lease) + micros(self.request.ttl);
        self.dies_at = self.dies_at.max(self.removable_at());
    }

    pub(super) fn encoded_length(&self) -> usize {
        let record = match &self.phase {
            EntryPhase::Completed { record, .. } => SUMMARY_LEN + record.len(),
            _ => 0,
        };
        FIXED_LEN
            + self.spent_tokens.len() * 24
            + self.request.tags.as_bytes().len()
            + self.request.label.len()
            + record
    }

    /// Appends the encoding, without the checksum. Returns its length.
    pub(super) fn encode(&self, out: &mut Vec<u8>) -> usize {
        let begin = out.len();
        let nothing = Bytes::new();
        let (flag, until, record, summary) = match &self.phase {
            // After a restart the lease's end is past; the earliest takeover must be kept.
            EntryPhase::Running { takeover_at, .. } => (false, *takeover_at, &nothing, None),
            EntryPhase::OutcomeUnknown { takeover_at, released } => (*released, *takeover_at, &nothing, None),
            EntryPhase::Completed { record, summary, resolved, .. } => (*resolved, 0, record, Some(summary)),
            EntryPhase::Released => (false, 0, &nothing, None),
        };
        let ask = &*self.request;
        let tags = ask.tags.as_bytes();
        out.put_u64_le(0);
        out.put_u8(self.kind() as u8);
        out.put_u8(u8::from(self.took_over) | u8::from(ask.take_over.is_some()) << 1 | u8::from(flag) << 2);
        out.put_u8(ask.fingerprint.version);
        out.put_u8(self.spent_tokens.len() as u8);
        out.put_u32_le(self.attempt);
        out.put_u64_le(self.version);
        out.put_slice(&ask.address.0);
        out.put_slice(&ask.token.0);
        out.put_u64_le(self.fence.0);
        out.put_slice(&ask.fingerprint.digest);
        out.put_u64_le(micros(ask.lease));
        out.put_u64_le(micros(ask.ttl));
        out.put_u64_le(ask.take_over.map_or(0, |over| over.0));
        for time in [self.claimed_at, self.expires_at, self.dies_at, until] {
            out.put_u64_le(time);
        }
        for part in [tags, &ask.label, record] {
            out.put_u32_le(part.len() as u32);
        }
        if let Some(summary) = summary {
            out.put_u16_le(summary.status);
            out.put_u64_le(summary.requested_at_ms);
            out.put_u64_le(summary.completed_at_ms);
            out.put_u64_le(summary.took.as_nanos().min(u128::from(u64::MAX)) as u64);
        }
        for (token, until) in &self.spent_tokens {
            out.put_slice(&token.0);
            out.put_u64_le(*until);
        }
        for part in [tags, &ask.label, record] {
            out.put_slice(part);
        }
        let length = out.len() - begin;
        out[begin..begin + 4].copy_from_slice(&(length as u32).to_le_bytes());
        length
    }

    /// Returns the length of the entry at the start of `bytes`.
    pub(super) fn peek_length(bytes: &[u8]) -> Result<usize, Corruption> {
        let length =
            bytes.first_chunk::<4>().map(|length| u32::from_le_bytes(*length) as usize).ok_or(Corruption::Length)?;
        if (FIXED_LEN..=bytes.len()).contains(&length) { Ok(length) } else { Err(Corruption::Length) }
    }

    /// Returns version and address of the entry at the start of `bytes`.
    pub(super) fn peek_version_and_address(bytes: &[u8]) -> Option<(u64, Address)> {
        let version = u64::from_le_bytes(*bytes.get(16..)?.first_chunk()?);
        Some((version, Address(*bytes.get(24..)?.first_chunk()?)))
    }

    /// Decodes an entry that occupies all of `bytes`.
    pub(super) fn decode(bytes: Bytes, salt: u64) -> Result<Self, Corruption> {
        if Self::peek_length(&bytes)? != bytes.len() {
            return Err(Corruption::Length);
        }
        if salted_crc(salt, &bytes[8..]).to_le_bytes() != bytes[4..8] {
            return Err(Corruption::Checksum);
        }
        let mut rest = &bytes[8..];
        let kind = LogEntryKind::from_bits(rest.get_u8()).ok_or(Corruption::InvalidField)?;
        let flags = rest.get_u8();
        let fingerprint_version = rest.get_u8();
        let spent = usize::from(rest.get_u8());
        let attempt = rest.get_u32_le();
        let version = rest.get_u64_le();
        let address = Address(array(&mut rest));
        let token = ClaimToken(array(&mut rest));
        let fence = Fence(rest.get_u64_le());
        let fingerprint = Fingerprint { version: fingerprint_version, digest: array(&mut rest) };
        let [lease, ttl] = [(); 2].map(|()| Duration::from_micros(rest.get_u64_le()));
        let take_over = rest.get_u64_le();
        let [claimed_at, expires_at, dies_at, until] = [(); 4].map(|()| rest.get_u64_le());
        let lengths = [(); 3].map(|()| rest.get_u32_le() as usize);
        let finished = matches!(kind, LogEntryKind::Completed | LogEntryKind::Failed);
        let wanted = lengths.iter().sum::<usize>() + spent * 24 + if finished { SUMMARY_LEN } else { 0 };
        if rest.len() != wanted {
            return Err(Corruption::Length);
        }
        let mut summary = RecordSummary::default();
        if finished {
            summary.status = rest.get_u16_le();
            summary.requested_at_ms = rest.get_u64_le();
            summary.completed_at_ms = rest.get_u64_le();
            summary.took = Duration::from_nanos(rest.get_u64_le());
        }
        let spent_tokens = (0..spent).map(|_| (ClaimToken(array(&mut rest)), rest.get_u64_le())).collect();
        let mut tail = bytes.slice(bytes.len() - rest.len()..);
        let [tags, label, record] = lengths.map(|length| tail.split_to(length));
        let tags = Tags::from_bytes(tags).ok_or(Corruption::InvalidField)?;
        let flag = flags & 4 != 0;
        let phase = match kind {
            LogEntryKind::Running => EntryPhase::Running { lease_until: until, takeover_at: until },
            LogEntryKind::OutcomeUnknown => EntryPhase::OutcomeUnknown { takeover_at: until, released: flag },
            LogEntryKind::Completed | LogEntryKind::Failed => {
                EntryPhase::Completed { failed: kind == LogEntryKind::Failed, record, summary, resolved: flag }
            }
            LogEntryKind::Released => EntryPhase::Released,
        };
        let (took_over, take_over) = (flags & 1 != 0, (flags & 2 != 0).then_some(Fence(take_over)));
        let request = Arc::new(ClaimRequest { address, token, fingerprint, tags, label, lease, ttl, take_over });
        let entry = StoredEntry { request, fence, attempt, took_over, claimed_at, expires_at, spent_tokens, phase };
        Ok(Self { entry, dies_at, version })
    }
}

fn array<const N: usize>(from: &mut &[u8]) -> [u8; N] {
    let mut array = [0; N];
    from.copy_to_slice(&mut array);
    array
}

#[cfg(test)]
mod tests {
    use ibid::store::transitions::MAX_SPENT_TOKENS;
    use proptest::prelude::*;

    use super::*;

    fn entry(kind: u8, spent: usize, record: Vec<u8>) -> LogEntry {
        let phase = match kind {
            0 => EntryPhase::Running { lease_until: 7, takeover_at: 7 },
            1 => EntryPhase::OutcomeUnknown { takeover_at: 9, released: true },
            2 => {
                let took = Duration::from_micros(3);
                let summary = RecordSummary { status: 201, requested_at_ms: 1, completed_at_ms: 2, took };
                EntryPhase::Completed { failed: true, record: record.into(), summary, resolved: true }
            }
            _ => EntryPhase::Released,
        };
        let ask = ClaimRequest {
            address: Address([1; 32]),
            token: ClaimToken([2; 16]),
            fingerprint: Fingerprint { version: 3, digest: [4; 32] },
            tags: Tags::new("acme", "", "POST /", "k"),
            label: Bytes::from_static(b"label"),
            lease: Duration::from_secs(5),
            ttl: Duration::from_secs(6),
            take_over: kind.is_multiple_of(2).then_some(Fence(8)),
        };
        let spent = (0..spent).map(|nth| (ClaimToken([nth as u8; 16]), 10 + nth as u64)).collect();
        let entry = StoredEntry {
            request: Arc::new(ask),
            fence: Fence(11),
            attempt: 2,
            took_over: kind == 1,
            claimed_at: 12,
            expires_at: 13,
            spent_tokens: spent,
            phase,
        };
        LogEntry { entry, dies_at: 14, version: 15 }
    }

    fn encoded(entry: &LogEntry, salt: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        assert_eq!(entry.encode(&mut bytes), entry.encoded_length());
        let crc = salted_crc(salt, &bytes[8..]);
        bytes[4..8].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    proptest! {
        #[test]
        fn an_entry_reads_what_it_wrote(kind in 0..4_u8, spent in 0..=MAX_SPENT_TOKENS, record: Vec<u8>, salt: u64) {
            let entry = entry(kind, spent, record);
            let bytes = encoded(&entry, salt);
            prop_assert_eq!(LogEntry::decode(bytes.clone().into(), salt), Ok(entry));
            prop_assert!(LogEntry::decode(bytes.into(), salt ^ 1).is_err());
        }

        /// Arbitrary bytes may pass the checksum; decoding must not panic.
        #[test]
        fn no_bytes_make_it_panic(kind in 0..4_u8, at in 8..300_usize, with: u8, cut in 0..300_usize) {
            let mut bytes = encoded(&entry(kind, 2, vec![5; 40]), 1);
            let at = at % bytes.len();
            bytes[at] = with;
            let length = (bytes.len() - cut % bytes.len()).max(8);
            bytes.truncate(length);
            bytes[..4].copy_from_slice(&(length as u32).to_le_bytes());
            let crc = salted_crc(1, &bytes[8..]);
            bytes[4..8].copy_from_slice(&crc.to_le_bytes());
            let _ = LogEntry::decode(bytes.into(), 1);
        }
    }
}
