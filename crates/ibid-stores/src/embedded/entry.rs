//! What is known about one address: who holds it, how it ended, when it may be forgotten. And its bytes in the log.
//!
//! ```text
//! 0 length u32   4 crc u32   8 kind u8   9 flags u8   10 fingerprint's version u8   11 spent tokens u8   12 attempt u32
//! 16 version u64   24 address [32]   56 token [16]   72 fence u64   80 fingerprint [32]   112 hold u64   120 keep u64
//! 128 over u64   136 claimed u64   144 answers_until u64   152 dies_at u64   160 until u64
//! 168 tags' length u32   172 label's length u32   176 record's length u32
//! 180 outline, of kinds done and failed: status u16, requested u64, completed u64 (ms), took u64 (ns)
//!     spent tokens: token [16], until u64, each; tags; label; record
//! ```
//!
//! Invariants: an entry stands for itself, nothing older is needed to understand it. `version` grows with every change,
//! so that of two entries at one address the higher one counts, wherever it stands. `dies_at` is not before that of
//! what it supersedes: as long as something older is in the log, so is this.

use std::{sync::Arc, time::Duration};

use bytes::{Buf, BufMut, Bytes};
use ibid::store::{
    Address, Ask, Claim, Fence, Fingerprint, Finished, Holder, Lease, Listed, Outline, State, Tags, Token,
};

use super::format::{Flaw, salted};

/// How many spent tokens an address remembers beside its latest; beyond that the oldest goes.
pub(super) const SPENT: usize = 32;
const FIXED: usize = 180;
const OUTLINE: usize = 26;

/// Microseconds since the Unix epoch, by the store's clock.
pub(super) type Micros = u64;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    /// Of the current holder, the last one if there is none.
    pub(super) ask: Arc<Ask>,
    pub(super) fence: Fence,
    pub(super) attempt: u32,
    /// The current holder took over an unknown one: its release restores that.
    pub(super) took_over: bool,
    pub(super) claimed: Micros,
    /// From then on nothing is there for claimers.
    pub(super) expires: Micros,
    /// Until then it must stay in the log.
    pub(super) dies_at: Micros,
    pub(super) version: u64,
    /// Tokens of earlier holders that were released or forgotten, each until when that is remembered. At most
    /// [`SPENT`].
    pub(super) spent: Vec<(Token, Micros)>,
    pub(super) phase: Phase,
}

/// `takeover`: not before. `released`: its takeover was, and has spent its token. `resolved`: by an operator, so that a
/// holder that comes back with an answer of its own has lost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Phase {
    Running { until: Micros, takeover: Micros },
    Unknown { takeover: Micros, released: bool },
    Done { failed: bool, record: Bytes, outline: Outline, resolved: bool },
    Free,
}

fn trim(spent: &mut Vec<(Token, Micros)>, now: Micros) {
    spent.retain(|(_, until)| now < *until);
    let too_many = spent.len().saturating_sub(SPENT);
    spent.drain(..too_many);
}

/// A phase's name in the log and in the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Claim = 0,
    Done = 1,
    Failed = 2,
    Unknown = 3,
    Free = 4,
}

impl Kind {
    pub(super) fn from_bits(bits: u8) -> Option<Self> {
        [Self::Claim, Self::Done, Self::Failed, Self::Unknown, Self::Free].into_iter().find(|kind| *kind as u8 == bits)
    }
}

impl Entry {
    pub(super) fn kind(&self) -> Kind {
        match self.phase {
            Phase::Running { .. } => Kind::Claim,
            Phase::Done { failed: false, .. } => Kind::Done,
            Phase::Done { failed: true, .. } => Kind::Failed,
            Phase::Unknown { .. } => Kind::Unknown,
            Phase::Free => Kind::Free,
        }
    }

    pub(super) fn is_live(&self, now: Micros) -> bool {
        now < self.expires
    }

    pub(super) fn is_held_by(&self, lease: &Lease) -> bool {
        self.ask.token == lease.ask.token && (self.fence == lease.fence || lease.fence == Fence::UNSEEN)
    }

    pub(super) fn remembers_as_spent(&self, token: Token, now: Micros) -> bool {
        self.spent.iter().any(|(spent, until)| *spent == token && now < *until)
    }

    /// Whether that token can never be granted here any more.
    pub(super) fn has_spent(&self, token: Token, now: Micros) -> bool {
        let own = matches!(self.phase, Phase::Free | Phase::Unknown { released: true, .. }) && self.ask.token == token;
        own || self.remembers_as_spent(token, now)
    }

    /// What is remembered as spent here once somebody else is the holder.
    pub(super) fn spent_for_next(&self, now: Micros) -> Vec<(Token, Micros)> {
        let mut spent = self.spent.clone();
        if matches!(self.phase, Phase::Free | Phase::Unknown { released: true, .. }) {
            spent.push((self.ask.token, self.expires));
        }
        trim(&mut spent, now);
        spent
    }

    /// A claim of which nobody knows whether it will still come: it shall find its token spent.
    pub(super) fn spend(&mut self, token: Token, until: Micros, now: Micros) {
        self.spent.push((token, until));
        trim(&mut self.spent, now);
    }

    /// Somebody else was here and has gone: for this holder, of whom nothing is said, it is as if nothing were here.
    pub(super) fn gives_way_to(&self, lease: &Lease, now: Micros) -> bool {
        matches!(self.phase, Phase::Free)
            && lease.fence != Fence::UNSEEN
            && self.ask.token != lease.ask.token
            && !self.remembers_as_spent(lease.ask.token, now)
    }

    /// Sets `dies_at` to when nothing about it, or about what it supersedes, has to be remembered any more.
    pub(super) fn outlive(&mut self, superseded: Option<&Entry>) {
        let own = self.spent.iter().map(|(_, until)| *until).fold(self.expires, Micros::max);
        self.dies_at = superseded.map_or(own, |before| own.max(before.dies_at));
    }

    pub(super) fn lease(&self) -> Lease {
        Lease { ask: self.ask.clone(), fence: self.fence, attempt: self.attempt, solo: false }
    }

    /// When `seen` lapses, if it runs.
    pub(super) fn runs_until(&self, seen: Fence, now: Micros) -> Option<Micros> {
        match self.phase {
            Phase::Running { until, .. } if self.fence == seen && now < until && self.is_live(now) => Some(until),
            _ => None,
        }
    }

    /// When it may be taken over; `None` if never.
    pub(super) fn takeover_in(&self, now: Micros) -> Option<Micros> {
        match self.phase {
            Phase::Running { takeover, .. } | Phase::Unknown { takeover, .. } => Some(takeover.saturating_sub(now)),
            Phase::Done { .. } | Phase::Free => None,
        }
    }

    /// What somebody else's claim finds here, and what a holder that lost its claim is told.
    pub(super) fn view(&self, now: Micros) -> Claim {
        let holder = || Holder {
            fence: self.fence,
            attempt: self.attempt,
            fingerprint: self.ask.fingerprint,
            age: Duration::from_micros(now.saturating_sub(self.claimed)),
            takeover_in: Duration::from_micros(self.takeover_in(now).unwrap_or(0)),
        };
        match &self.phase {
            Phase::Running { until, .. } if now < *until => Claim::Busy(holder()),
            Phase::Running { .. } | Phase::Unknown { .. } => Claim::Unknown(holder()),
            Phase::Done { failed, record, .. } => Claim::Done(Finished {
                fence: self.fence,
                attempt: self.attempt,
                fingerprint: self.ask.fingerprint,
                failed: *failed,
                record: record.clone(),
                expires_in: Duration::from_micros(self.expires.saturating_sub(now)),
            }),
            Phase::Free => Claim::Spent,
        }
    }

    pub(super) fn listed(&self, now: Micros) -> Option<Listed> {
        let (state, outline) = match &self.phase {
            Phase::Running { until, .. } if now < *until => (State::Processing, None),
            Phase::Running { .. } | Phase::Unknown { .. } => (State::Unknown, None),
            Phase::Done { failed: false, outline, .. } => (State::Done, Some(*outline)),
            Phase::Done { failed: true, outline, .. } => (State::Failed, Some(*outline)),
            Phase::Free => return None,
        };
        self.is_live(now).then(|| Listed {
            address: self.ask.address,
            state,
            fence: self.fence,
            attempt: self.attempt,
            fingerprint: self.ask.fingerprint,
            tags: self.ask.tags.clone(),
            label: self.ask.label.clone(),
            age: Duration::from_micros(now.saturating_sub(self.claimed)),
            expires_in: Duration::from_micros(self.expires - now),
            outline,
        })
    }

    /// After a restart nobody is known to run: unknown at once, taken over a full hold after opening at the earliest.
    pub(super) fn interrupt(&mut self, opened: Micros) {
        if let Phase::Running { until, takeover } = &mut self.phase {
            *takeover = (opened + micros(self.ask.hold)).max(*until);
            *until = opened.min(*until);
        }
    }

    /// Its retention ended while nobody could ask for it: that counts from the opening on.
    pub(super) fn renew(&mut self, opened: Micros) {
        let before = self.dies_at;
        self.expires = opened + micros(self.ask.hold) + micros(self.ask.keep);
        self.outlive(None);
        self.dies_at = self.dies_at.max(before);
    }

    pub(super) fn encoded_length(&self) -> usize {
        let record = match &self.phase {
            Phase::Done { record, .. } => OUTLINE + record.len(),
            _ => 0,
        };
        FIXED + self.spent.len() * 24 + self.ask.tags.as_bytes().len() + self.ask.label.len() + record
    }

    /// Appends its bytes, all but the checksum. Returns their length.
    pub(super) fn encode(&self, out: &mut Vec<u8>) -> usize {
        let begin = out.len();
        let nothing = Bytes::new();
        let (flag, until, record, outline) = match &self.phase {
            // Of a claim that a restart interrupted, the lease's end is past; when it may be taken over must not be lost.
            Phase::Running { takeover, .. } => (false, *takeover, &nothing, None),
            Phase::Unknown { takeover, released } => (*released, *takeover, &nothing, None),
            Phase::Done { record, outline, resolved, .. } => (*resolved, 0, record, Some(outline)),
            Phase::Free => (false, 0, &nothing, None),
        };
        let ask = &*self.ask;
        let tags = ask.tags.as_bytes();
        out.put_u64_le(0);
        out.put_u8(self.kind() as u8);
        out.put_u8(u8::from(self.took_over) | u8::from(ask.over.is_some()) << 1 | u8::from(flag) << 2);
        out.put_u8(ask.fingerprint.version);
        out.put_u8(self.spent.len() as u8);
        out.put_u32_le(self.attempt);
        out.put_u64_le(self.version);
        out.put_slice(&ask.address.0);
        out.put_slice(&ask.token.0);
        out.put_u64_le(self.fence.0);
        out.put_slice(&ask.fingerprint.digest);
        out.put_u64_le(micros(ask.hold));
        out.put_u64_le(micros(ask.keep));
        out.put_u64_le(ask.over.map_or(0, |over| over.0));
        for time in [self.claimed, self.expires, self.dies_at, until] {
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
        for (token, until) in &self.spent {
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

    /// The length of the entry that begins here.
    pub(super) fn peek_length(bytes: &[u8]) -> Result<usize, Flaw> {
        let length = bytes.first_chunk::<4>().map(|length| u32::from_le_bytes(*length) as usize).ok_or(Flaw::Length)?;
        if (FIXED..=bytes.len()).contains(&length) { Ok(length) } else { Err(Flaw::Length) }
    }

    /// Version and address of the entry that begins here.
    pub(super) fn peek_name(bytes: &[u8]) -> Option<(u64, Address)> {
        let version = u64::from_le_bytes(*bytes.get(16..)?.first_chunk()?);
        Some((version, Address(*bytes.get(24..)?.first_chunk()?)))
    }

    /// Reads the entry that is exactly `bytes`.
    pub(super) fn decode(bytes: Bytes, salt: u64) -> Result<Self, Flaw> {
        if Self::peek_length(&bytes)? != bytes.len() {
            return Err(Flaw::Length);
        }
        if salted(salt, &bytes[8..]).to_le_bytes() != bytes[4..8] {
            return Err(Flaw::Checksum);
        }
        let mut rest = &bytes[8..];
        let kind = Kind::from_bits(rest.get_u8()).ok_or(Flaw::Field)?;
        let flags = rest.get_u8();
        let fingerprint_version = rest.get_u8();
        let spent = usize::from(rest.get_u8());
        let attempt = rest.get_u32_le();
        let version = rest.get_u64_le();
        let address = Address(array(&mut rest));
        let token = Token(array(&mut rest));
        let fence = Fence(rest.get_u64_le());
        let fingerprint = Fingerprint { version: fingerprint_version, digest: array(&mut rest) };
        let hold = Duration::from_micros(rest.get_u64_le());
        let keep = Duration::from_micros(rest.get_u64_le());
        let over = rest.get_u64_le();
        let [claimed, expires, dies_at, until] = [(); 4].map(|()| rest.get_u64_le());
        let lengths = [(); 3].map(|()| rest.get_u32_le() as usize);
        let finished = matches!(kind, Kind::Done | Kind::Failed);
        let wanted = lengths.iter().sum::<usize>() + spent * 24 + if finished { OUTLINE } else { 0 };
        if rest.len() != wanted {
            return Err(Flaw::Length);
        }
        let mut outline = Outline::default();
        if finished {
            outline.status = rest.get_u16_le();
            outline.requested_at_ms = rest.get_u64_le();
            outline.completed_at_ms = rest.get_u64_le();
            outline.took = Duration::from_nanos(rest.get_u64_le());
        }
        let spent = (0..spent).map(|_| (Token(array(&mut rest)), rest.get_u64_le())).collect();
        let mut tail = bytes.slice(bytes.len() - rest.len()..);
        let [tags, label, record] = lengths.map(|length| tail.split_to(length));
        let tags = Tags::from_bytes(tags).ok_or(Flaw::Field)?;
        let flag = flags & 4 != 0;
        let phase = match kind {
            Kind::Claim => Phase::Running { until, takeover: until },
            Kind::Unknown => Phase::Unknown { takeover: until, released: flag },
            Kind::Done | Kind::Failed => Phase::Done { failed: kind == Kind::Failed, record, outline, resolved: flag },
            Kind::Free => Phase::Free,
        };
        let over = (flags & 2 != 0).then_some(Fence(over));
        let ask = Arc::new(Ask { address, token, fingerprint, tags, label, hold, keep, over });
        let took_over = flags & 1 != 0;
        Ok(Self { ask, fence, attempt, took_over, claimed, expires, dies_at, version, spent, phase })
    }
}

fn array<const N: usize>(from: &mut &[u8]) -> [u8; N] {
    let mut array = [0; N];
    from.copy_to_slice(&mut array);
    array
}

pub(super) fn micros(duration: Duration) -> Micros {
    // Sums of a few must not overflow, and neither must they with the time since the epoch.
    duration.as_micros().min(u128::from(u64::MAX / 16)) as Micros
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry(kind: u8, spent: usize, record: Vec<u8>) -> Entry {
        let phase = match kind {
            0 => Phase::Running { until: 7, takeover: 7 },
            1 => Phase::Unknown { takeover: 9, released: true },
            2 => {
                let outline =
                    Outline { status: 201, requested_at_ms: 1, completed_at_ms: 2, took: Duration::from_micros(3) };
                Phase::Done { failed: true, record: record.into(), outline, resolved: true }
            }
            _ => Phase::Free,
        };
        let ask = Ask {
            address: Address([1; 32]),
            token: Token([2; 16]),
            fingerprint: Fingerprint { version: 3, digest: [4; 32] },
            tags: Tags::new("acme", "", "POST /", "k"),
            label: Bytes::from_static(b"label"),
            hold: Duration::from_secs(5),
            keep: Duration::from_secs(6),
            over: kind.is_multiple_of(2).then_some(Fence(8)),
        };
        let spent = (0..spent).map(|nth| (Token([nth as u8; 16]), 10 + nth as u64)).collect();
        let (ask, fence) = (Arc::new(ask), Fence(11));
        let times = (12, 13, 14);
        let (claimed, expires, dies_at) = times;
        Entry { ask, fence, attempt: 2, took_over: kind == 1, claimed, expires, dies_at, version: 15, spent, phase }
    }

    fn encoded(entry: &Entry, salt: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        assert_eq!(entry.encode(&mut bytes), entry.encoded_length());
        let crc = salted(salt, &bytes[8..]);
        bytes[4..8].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    proptest! {
        #[test]
        fn an_entry_reads_what_it_wrote(kind in 0..4_u8, spent in 0..=SPENT, record: Vec<u8>, salt: u64) {
            let entry = entry(kind, spent, record);
            let bytes = encoded(&entry, salt);
            prop_assert_eq!(Entry::decode(bytes.clone().into(), salt), Ok(entry));
            prop_assert!(Entry::decode(bytes.into(), salt ^ 1).is_err());
        }

        /// Bytes that nobody wrote may pass the checksum; they must not panic.
        #[test]
        fn no_bytes_make_it_panic(kind in 0..4_u8, at in 8..300_usize, with: u8, cut in 0..300_usize) {
            let mut bytes = encoded(&entry(kind, 2, vec![5; 40]), 1);
            let at = at % bytes.len();
            bytes[at] = with;
            let length = (bytes.len() - cut % bytes.len()).max(8);
            bytes.truncate(length);
            bytes[..4].copy_from_slice(&(length as u32).to_le_bytes());
            let crc = salted(1, &bytes[8..]);
            bytes[4..8].copy_from_slice(&crc.to_le_bytes());
            let _ = Entry::decode(bytes.into(), 1);
        }
    }
}
