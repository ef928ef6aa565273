//! The state of one address: its holder, its outcome and its expiry. Also its encoding in the log:
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

use std::{sync::Arc, time::Duration};

use bytes::{Buf, BufMut, Bytes};
use ibid::store::{
    Address, ClaimOutcome, ClaimRequest, ClaimToken, CompletedEntry, EntryInfo, EntryState, Fence, Fingerprint, Holder,
    Lease, RecordSummary, Tags,
};

use super::format::{Corruption, salted_crc};

/// Maximum number of spent tokens remembered beside the latest. Beyond it, the oldest is dropped.
pub(super) const MAX_SPENT_TOKENS: usize = 32;
const FIXED_LEN: usize = 180;
const SUMMARY_LEN: usize = 26;

/// Microseconds since the Unix epoch, by the store's clock.
pub(super) type UnixMicros = u64;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LogEntry {
    /// Request of the current holder, or of the last one.
    pub(super) ask: Arc<ClaimRequest>,
    pub(super) fence: Fence,
    pub(super) attempt: u32,
    /// The holder took over an entry with unknown outcome. Its release restores that state.
    pub(super) took_over: bool,
    pub(super) claimed_at: UnixMicros,
    /// From then on, claims find no entry.
    pub(super) expires_at: UnixMicros,
    /// The entry must stay in the log until then.
    pub(super) dies_at: UnixMicros,
    pub(super) version: u64,
    /// Tokens of earlier holders that were released or forgotten, each with the time until which it is remembered. At
    /// most [`MAX_SPENT_TOKENS`].
    pub(super) spent_tokens: Vec<(ClaimToken, UnixMicros)>,
    pub(super) phase: LogEntryPhase,
}

/// `takeover_at`: earliest takeover. `released`: a takeover was released, and its token is spent. `resolved`: an
/// operator resolved the entry, so a holder that returns with its own answer has lost the claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum LogEntryPhase {
    Running { lease_until: UnixMicros, takeover_at: UnixMicros },
    OutcomeUnknown { takeover_at: UnixMicros, released: bool },
    Completed { failed: bool, record: Bytes, outline: RecordSummary, resolved: bool },
    Released,
}

fn trim_spent(spent: &mut Vec<(ClaimToken, UnixMicros)>, now: UnixMicros) {
    spent.retain(|(_, until)| now < *until);
    let too_many = spent.len().saturating_sub(MAX_SPENT_TOKENS);
    spent.drain(..too_many);
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
    pub(super) fn kind(&self) -> LogEntryKind {
        match self.phase {
            LogEntryPhase::Running { .. } => LogEntryKind::Running,
            LogEntryPhase::Completed { failed: false, .. } => LogEntryKind::Completed,
            LogEntryPhase::Completed { failed: true, .. } => LogEntryKind::Failed,
            LogEntryPhase::OutcomeUnknown { .. } => LogEntryKind::OutcomeUnknown,
            LogEntryPhase::Released => LogEntryKind::Released,
        }
    }

    pub(super) fn is_live(&self, now: UnixMicros) -> bool {
        now < self.expires_at
    }

    pub(super) fn is_held_by(&self, lease: &Lease) -> bool {
        self.ask.token == lease.request.token && (self.fence == lease.fence || lease.fence == Fence::UNSEEN)
    }

    pub(super) fn remembers_as_spent(&self, token: ClaimToken, now: UnixMicros) -> bool {
        self.spent_tokens.iter().any(|(spent, until)| *spent == token && now < *until)
    }

    /// Whether the token can never be granted again at this address.
    pub(super) fn has_spent_token(&self, token: ClaimToken, now: UnixMicros) -> bool {
        let own = matches!(self.phase, LogEntryPhase::Released | LogEntryPhase::OutcomeUnknown { released: true, .. })
            && self.ask.token == token;
        own || self.remembers_as_spent(token, now)
    }

    /// Returns the spent tokens to remember once there is another holder.
    pub(super) fn spent_after_handover(&self, now: UnixMicros) -> Vec<(ClaimToken, UnixMicros)> {
        let mut spent = self.spent_tokens.clone();
        if matches!(self.phase, LogEntryPhase::Released | LogEntryPhase::OutcomeUnknown { released: true, .. }) {
            spent.push((self.ask.token, self.expires_at));
        }
        trim_spent(&mut spent, now);
        spent
    }

    /// Remembers the token of a claim that may still arrive late as spent.
    pub(super) fn add_spent(&mut self, token: ClaimToken, until: UnixMicros, now: UnixMicros) {
        self.spent_tokens.push((token, until));
        trim_spent(&mut self.spent_tokens, now);
    }

    /// True if the entry is released by another holder and does not list this lease's token as spent; the lease is then
    /// restored as if the entry were absent.
    pub(super) fn yields_to(&self, lease: &Lease, now: UnixMicros) -> bool {
        matches!(self.phase, LogEntryPhase::Released)
            && lease.fence != Fence::UNSEEN
            && self.ask.token != lease.request.token
            && !self.remembers_as_spent(lease.request.token, now)
    }

    /// Sets `dies_at` to the time from which neither this entry nor the one it supersedes is needed.
    pub(super) fn extend_death(&mut self, superseded: Option<&LogEntry>) {
        let own = self.spent_tokens.iter().map(|(_, until)| *until).fold(self.expires_at, UnixMicros::max);
        self.dies_at = superseded.map_or(own, |before| own.max(before.dies_at));
    }

    pub(super) fn lease(&self) -> Lease {
        Lease { request: self.ask.clone(), fence: self.fence, attempt: self.attempt, front_only: false }
    }

    /// Returns when the lease of `seen` ends, if it is running.
    pub(super) fn running_lease_end(&self, seen: Fence, now: UnixMicros) -> Option<UnixMicros> {
        match self.phase {
            LogEntryPhase::Running { lease_until: until, .. }
                if self.fence == seen && now < until && self.is_live(now) =>
            {
                Some(until)
            }
            _ => None,
        }
    }

    /// Returns the time until a takeover is allowed, or `None` if it never is.
    pub(super) fn takeover_in(&self, now: UnixMicros) -> Option<UnixMicros> {
        match self.phase {
            LogEntryPhase::Running { takeover_at: takeover, .. }
            | LogEntryPhase::OutcomeUnknown { takeover_at: takeover, .. } => Some(takeover.saturating_sub(now)),
            LogEntryPhase::Completed { .. } | LogEntryPhase::Released => None,
        }
    }

    /// Returns the outcome for another claim, or for a holder that lost its claim.
    pub(super) fn claim_outcome(&self, now: UnixMicros) -> ClaimOutcome {
        let holder = || Holder {
            fence: self.fence,
            attempt: self.attempt,
            fingerprint: self.ask.fingerprint,
            age: Duration::from_micros(now.saturating_sub(self.claimed_at)),
            takeover_in: Duration::from_micros(self.takeover_in(now).unwrap_or(0)),
        };
        match &self.phase {
            LogEntryPhase::Running { lease_until: until, .. } if now < *until => ClaimOutcome::InProgress(holder()),
            LogEntryPhase::Running { .. } | LogEntryPhase::OutcomeUnknown { .. } => {
                ClaimOutcome::OutcomeUnknown(holder())
            }
            LogEntryPhase::Completed { failed, record, .. } => ClaimOutcome::Completed(CompletedEntry {
                fence: self.fence,
                attempt: self.attempt,
                fingerprint: self.ask.fingerprint,
                failed: *failed,
                record: record.clone(),
                expires_in: Duration::from_micros(self.expires_at.saturating_sub(now)),
            }),
            LogEntryPhase::Released => ClaimOutcome::TokenSpent,
        }
    }

    pub(super) fn entry_info(&self, now: UnixMicros) -> Option<EntryInfo> {
        let (state, outline) = match &self.phase {
            LogEntryPhase::Running { lease_until: until, .. } if now < *until => (EntryState::Processing, None),
            LogEntryPhase::Running { .. } | LogEntryPhase::OutcomeUnknown { .. } => (EntryState::Unknown, None),
            LogEntryPhase::Completed { failed: false, outline, .. } => (EntryState::Done, Some(*outline)),
            LogEntryPhase::Completed { failed: true, outline, .. } => (EntryState::Failed, Some(*outline)),
            LogEntryPhase::Released => return None,
        };
        self.is_live(now).then(|| EntryInfo {
            address: self.ask.address,
            state,
            fence: self.fence,
            attempt: self.attempt,
            fingerprint: self.ask.fingerprint,
            tags: self.ask.tags.clone(),
            label: self.ask.label.clone(),
            age: Duration::from_micros(now.saturating_sub(self.claimed_at)),
            expires_in: Duration::from_micros(self.expires_at - now),
            summary: outline,
        })
    }

    /// After a restart no holder is known to run: the outcome is unknown at once, and a takeover is allowed one full
    /// lease after opening at the earliest.
    pub(super) fn mark_interrupted(&mut self, opened: UnixMicros) {
        if let LogEntryPhase::Running { lease_until: until, takeover_at: takeover } = &mut self.phase {
            *takeover = (opened + micros(self.ask.lease)).max(*until);
            *until = opened.min(*until);
        }
    }

    /// Restarts the ttl at opening, if it ended while the store was closed.
    pub(super) fn renew_retention(&mut self, opened: UnixMicros) {
        let before = self.dies_at;
        self.expires_at = opened + micros(self.ask.lease) + micros(self.ask.ttl);
        self.extend_death(None);
        self.dies_at = self.dies_at.max(before);
    }

    pub(super) fn encoded_length(&self) -> usize {
        let record = match &self.phase {
            LogEntryPhase::Completed { record, .. } => SUMMARY_LEN + record.len(),
            _ => 0,
        };
        FIXED_LEN + self.spent_tokens.len() * 24 + self.ask.tags.as_bytes().len() + self.ask.label.len() + record
    }

    /// Appends the encoding, without the checksum. Returns its length.
    pub(super) fn encode(&self, out: &mut Vec<u8>) -> usize {
        let begin = out.len();
        let nothing = Bytes::new();
        let (flag, until, record, outline) = match &self.phase {
            // After a restart the lease's end is past; the earliest takeover must be kept.
            LogEntryPhase::Running { takeover_at: takeover, .. } => (false, *takeover, &nothing, None),
            LogEntryPhase::OutcomeUnknown { takeover_at: takeover, released } => (*released, *takeover, &nothing, None),
            LogEntryPhase::Completed { record, outline, resolved, .. } => (*resolved, 0, record, Some(outline)),
            LogEntryPhase::Released => (false, 0, &nothing, None),
        };
        let ask = &*self.ask;
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
        if let Some(outline) = outline {
            out.put_u16_le(outline.status);
            out.put_u64_le(outline.requested_at_ms);
            out.put_u64_le(outline.completed_at_ms);
            out.put_u64_le(outline.took.as_nanos().min(u128::from(u64::MAX)) as u64);
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
        let hold = Duration::from_micros(rest.get_u64_le());
        let keep = Duration::from_micros(rest.get_u64_le());
        let over = rest.get_u64_le();
        let [claimed, expires, dies_at, until] = [(); 4].map(|()| rest.get_u64_le());
        let lengths = [(); 3].map(|()| rest.get_u32_le() as usize);
        let finished = matches!(kind, LogEntryKind::Completed | LogEntryKind::Failed);
        let wanted = lengths.iter().sum::<usize>() + spent * 24 + if finished { SUMMARY_LEN } else { 0 };
        if rest.len() != wanted {
            return Err(Corruption::Length);
        }
        let mut outline = RecordSummary::default();
        if finished {
            outline.status = rest.get_u16_le();
            outline.requested_at_ms = rest.get_u64_le();
            outline.completed_at_ms = rest.get_u64_le();
            outline.took = Duration::from_nanos(rest.get_u64_le());
        }
        let spent = (0..spent).map(|_| (ClaimToken(array(&mut rest)), rest.get_u64_le())).collect();
        let mut tail = bytes.slice(bytes.len() - rest.len()..);
        let [tags, label, record] = lengths.map(|length| tail.split_to(length));
        let tags = Tags::from_bytes(tags).ok_or(Corruption::InvalidField)?;
        let flag = flags & 4 != 0;
        let phase = match kind {
            LogEntryKind::Running => LogEntryPhase::Running { lease_until: until, takeover_at: until },
            LogEntryKind::OutcomeUnknown => LogEntryPhase::OutcomeUnknown { takeover_at: until, released: flag },
            LogEntryKind::Completed | LogEntryKind::Failed => {
                LogEntryPhase::Completed { failed: kind == LogEntryKind::Failed, record, outline, resolved: flag }
            }
            LogEntryKind::Released => LogEntryPhase::Released,
        };
        let over = (flags & 2 != 0).then_some(Fence(over));
        let ask = Arc::new(ClaimRequest {
            address,
            token,
            fingerprint,
            tags,
            label,
            lease: hold,
            ttl: keep,
            take_over: over,
        });
        let took_over = flags & 1 != 0;
        Ok(Self {
            ask,
            fence,
            attempt,
            took_over,
            claimed_at: claimed,
            expires_at: expires,
            dies_at,
            version,
            spent_tokens: spent,
            phase,
        })
    }
}

fn array<const N: usize>(from: &mut &[u8]) -> [u8; N] {
    let mut array = [0; N];
    from.copy_to_slice(&mut array);
    array
}

pub(super) fn micros(duration: Duration) -> UnixMicros {
    // Leaves room to add several such values to the current time.
    duration.as_micros().min(u128::from(u64::MAX / 16)) as UnixMicros
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry(kind: u8, spent: usize, record: Vec<u8>) -> LogEntry {
        let phase = match kind {
            0 => LogEntryPhase::Running { lease_until: 7, takeover_at: 7 },
            1 => LogEntryPhase::OutcomeUnknown { takeover_at: 9, released: true },
            2 => {
                let outline = RecordSummary {
                    status: 201,
                    requested_at_ms: 1,
                    completed_at_ms: 2,
                    took: Duration::from_micros(3),
                };
                LogEntryPhase::Completed { failed: true, record: record.into(), outline, resolved: true }
            }
            _ => LogEntryPhase::Released,
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
        let (ask, fence) = (Arc::new(ask), Fence(11));
        let times = (12, 13, 14);
        let (claimed, expires, dies_at) = times;
        LogEntry {
            ask,
            fence,
            attempt: 2,
            took_over: kind == 1,
            claimed_at: claimed,
            expires_at: expires,
            dies_at,
            version: 15,
            spent_tokens: spent,
            phase,
        }
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
