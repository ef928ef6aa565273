//! The stored form of an entry: one string per address.
//!
//! A header of fixed length, then spent tokens, tags, label, and for a completed entry its summary and record. The
//! scripts read the same header (`lua/entry.lua`). Numbers are big-endian.
//!
//! The key's own expiry decides about a running or completed entry, by the server's clock. The time that a completed
//! entry names only tells readers how long it is still remembered. The key lives
//! `linger` longer than the entry, because spent tokens must be remembered, and because the fence of a short-lived entry
//! must not be forgotten too soon. A lease has expired when the entry lives no longer than `lapse`, which is normally
//! the ttl: the key of a running entry lives for lease + ttl.

use bytes::Buf;
use ibid::store::{CompletedEntry, Fingerprint, Holder, RecordSummary, SPENT_TOKEN_TTL, Tags};

use super::{resp::Reply, *};

pub(super) const HEADER_LEN: usize = 113;
/// The format version that this build writes. It rejects all others.
pub(super) const VERSION: u8 = 1;
const SPENT_LEN: usize = 24;
const SUMMARY_LEN: usize = 26;
const TAKEOVER_AT: usize = 97;
const TOOK_OVER: u8 = 1;
const FAILED: u8 = 4;

/// How long a key stays at least after its fence was minted, in milliseconds. A command that was minted before is
/// written within 30 s and delivered within 30 s, or never, so the fence of the next entry is higher.
pub(super) const FENCE_MEMORY_MS: u64 = 60_000;

/// An entry as the server returns it.
pub(super) struct EntryView {
    value: Bytes,
    /// Milliseconds until the key expires.
    pttl: u64,
    /// The server's time, in microseconds.
    now: u64,
}

/// The value of a granted claim: exactly what the native claim of this lease wrote.
pub(super) fn running_value(request: &ClaimRequest, fence: Fence, attempt: u32) -> Vec<u8> {
    let mut value = Vec::with_capacity(running_length(request));
    encode_running(&mut value, request, fence, attempt);
    value
}

/// Appends [`running_value`].
pub(super) fn encode_running(buffer: &mut Vec<u8>, request: &ClaimRequest, fence: Fence, attempt: u32) {
    encode(buffer, request, &encode_header(request, fence, attempt, b'r', 0, 0));
}

/// The length of [`running_value`].
pub(super) fn running_length(request: &ClaimRequest) -> usize {
    HEADER_LEN + request.tags.as_bytes().len() + request.label.len()
}

/// The value of a completed claim, and how long its key stays. `now` is the server's time, if it is known.
pub(super) fn completed_value(lease: &Lease, completion: &Completion<'_>, now: Option<u64>) -> (Vec<u8>, u64) {
    let flags = if completion.failed { FAILED } else { 0 };
    let (ttl, record) = (life_millis(completion.ttl), completion.record);
    let linger = FENCE_MEMORY_MS.saturating_sub(ttl);
    let mut header = encode_header(&lease.request, lease.fence, lease.attempt, b'd', flags, linger);
    // Of a completed entry the earliest takeover is when it expires.
    let expires_at = now.map_or(0, |now| now + ttl * 1000);
    header[TAKEOVER_AT..TAKEOVER_AT + 8].copy_from_slice(&expires_at.to_be_bytes());
    let mut value = Vec::with_capacity(running_length(&lease.request) + SUMMARY_LEN + record.len());
    encode(&mut value, &lease.request, &header);
    value.extend_from_slice(&encode_summary(completion.summary));
    value.extend_from_slice(record);
    (value, ttl + linger)
}

/// The parts of [`Settlement::Complete`].
pub(super) struct Completion<'a> {
    pub(super) failed: bool,
    pub(super) record: &'a [u8],
    pub(super) summary: &'a RecordSummary,
    pub(super) ttl: Duration,
}

fn encode(buffer: &mut Vec<u8>, request: &ClaimRequest, header: &[u8; HEADER_LEN]) {
    buffer.extend_from_slice(header);
    buffer.extend_from_slice(request.tags.as_bytes());
    buffer.extend_from_slice(&request.label);
}

fn encode_header(
    request: &ClaimRequest, fence: Fence, attempt: u32, phase: u8, flags: u8, linger: u64,
) -> [u8; HEADER_LEN] {
    let flags = flags | if request.take_over.is_some() { TOOK_OVER } else { 0 };
    let ttl = millis(request.ttl);
    let mut header = [0; HEADER_LEN];
    header[..4].copy_from_slice(&[VERSION, phase, flags, 0]);
    header[4..8].copy_from_slice(&attempt.to_be_bytes());
    header[8..16].copy_from_slice(&fence.0.to_be_bytes());
    header[16..32].copy_from_slice(&request.token.0);
    header[32] = request.fingerprint.version;
    header[33..65].copy_from_slice(&request.fingerprint.digest);
    // Lease, ttl, lapse, linger. The earliest takeover stays 0.
    for (field, number) in
        header[65..TAKEOVER_AT].chunks_exact_mut(8).zip([life_millis(request.lease), ttl, ttl, linger])
    {
        field.copy_from_slice(&number.to_be_bytes());
    }
    header[105..109].copy_from_slice(&(request.tags.as_bytes().len() as u32).to_be_bytes());
    header[109..].copy_from_slice(&(request.label.len() as u32).to_be_bytes());
    header
}

/// Encodes a summary: status, requested, completed, took.
pub(super) fn encode_summary(summary: &RecordSummary) -> [u8; SUMMARY_LEN] {
    let took = summary.took.as_micros().min(u128::from(u64::MAX)) as u64;
    let mut bytes = [0; SUMMARY_LEN];
    bytes[..2].copy_from_slice(&summary.status.to_be_bytes());
    bytes[2..10].copy_from_slice(&summary.requested_at_ms.to_be_bytes());
    bytes[10..18].copy_from_slice(&summary.completed_at_ms.to_be_bytes());
    bytes[18..].copy_from_slice(&took.to_be_bytes());
    bytes
}

/// Converts a duration to milliseconds, rounded up.
pub(super) fn millis(duration: Duration) -> u64 {
    duration.as_micros().min(u128::from(MAX_DURATION_US)).div_ceil(1000) as u64
}

/// Like [`millis`], and one more: the server counts whole milliseconds, and nothing must expire early.
pub(super) fn life_millis(duration: Duration) -> u64 {
    millis(duration) + 1
}

/// The bytes that identify a holder in a header: its fence and token.
pub(super) fn holder_id(fence: Fence, token: &ibid::store::ClaimToken) -> [u8; 24] {
    let mut id = [0; 24];
    id[..8].copy_from_slice(&fence.0.to_be_bytes());
    id[8..].copy_from_slice(&token.0);
    id
}

/// Checks that a value of this version is a whole entry.
fn check(value: &[u8]) -> Option<()> {
    let rest = value.len().checked_sub(HEADER_LEN)?;
    let (tags, label) = (u32_at(value, 105) as usize, u32_at(value, 109) as usize);
    let summary = if value[1] == b'd' { SUMMARY_LEN } else { 0 };
    let least = usize::from(value[3]) * SPENT_LEN + tags + label + summary;
    let is_known = matches!(value[1], b'r' | b'u' | b'd' | b'f');
    (is_known && least <= rest && (value[1] == b'd' || least == rest)).then_some(())
}

/// Says that entries of this version cannot be used.
pub(super) fn other_version(version: u64) -> String {
    format!(
        "entries are of format version {version}, and this ibid reads version {VERSION}; use the ibid that wrote them"
    )
}

fn u64_at(value: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(value[at..at + 8].try_into().expect("eight bytes"))
}

fn u32_at(value: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(value[at..at + 4].try_into().expect("four bytes"))
}

impl EntryView {
    pub(super) fn new(value: Bytes, pttl: i64, now: u64) -> Result<Self, StoreError> {
        if let Some(version) = value.first().filter(|version| **version != VERSION) {
            return Err(corrupt_reply(&other_version(u64::from(*version))));
        }
        check(&value).ok_or_else(|| corrupt_reply("this is no entry"))?;
        let pttl = u64::try_from(pttl).map_err(|_| corrupt_reply("an entry does not expire"))?;
        Ok(Self { value, pttl, now })
    }

    /// Reads the three parts that scripts return: value, milliseconds until the key expires, time.
    pub(super) fn from_parts(parts: &[Reply]) -> Result<Self, StoreError> {
        let [Reply::Bytes(value), Reply::Int(pttl), now, ..] = parts else {
            return Err(corrupt_reply("an entry's parts are missing"));
        };
        Self::new(value.clone(), *pttl, reply_number(now)?)
    }

    /// Reads a value alone, if that tells what is there: no part of it can have expired while the key exists. `now` is
    /// the server's time.
    pub(super) fn from_value(value: Bytes, now: u64) -> Result<Option<Self>, StoreError> {
        let mut view = Self::new(value, 0, now)?;
        let expires_at = u64_at(&view.value, TAKEOVER_AT);
        if view.phase() == b'd' && expires_at == 0 || view.value[3] != 0 || view.linger() != 0 {
            return Ok(None);
        }
        view.pttl = expires_at.saturating_sub(now) / 1000;
        Ok(Some(view))
    }

    pub(super) fn phase(&self) -> u8 {
        self.value[1]
    }

    pub(super) fn has_token(&self, token: &ibid::store::ClaimToken) -> bool {
        self.value[16..32] == token.0
    }

    pub(super) fn fence(&self) -> Fence {
        Fence(u64_at(&self.value, 8))
    }

    pub(super) fn attempt(&self) -> u32 {
        u32_at(&self.value, 4)
    }

    fn linger(&self) -> u64 {
        u64_at(&self.value, 89)
    }

    fn fingerprint(&self) -> Fingerprint {
        Fingerprint { version: self.value[32], digest: self.value[33..65].try_into().expect("32 bytes") }
    }

    /// How long the entry still lives.
    fn life(&self) -> Duration {
        Duration::from_millis(self.pttl.saturating_sub(self.linger()))
    }

    /// [`Self::life`] without the millisecond that [`life_millis`] adds.
    fn expires_in(&self) -> Duration {
        self.life().saturating_sub(Duration::from_millis(1))
    }

    /// How long the lease is still valid.
    pub(super) fn lease_left(&self) -> Duration {
        self.life().saturating_sub(Duration::from_millis(u64_at(&self.value, 81)))
    }

    fn age(&self) -> Duration {
        Duration::from_micros(self.now.saturating_sub(self.fence().0))
    }

    /// Where tags, label and what follows start.
    fn parts(&self) -> [usize; 3] {
        let tags = HEADER_LEN + usize::from(self.value[3]) * SPENT_LEN;
        let label = tags + u32_at(&self.value, 105) as usize;
        [tags, label, label + u32_at(&self.value, 109) as usize]
    }

    /// The same with the key's expiry as the server told it.
    pub(super) fn with_pttl(self, pttl: i64) -> Result<Self, StoreError> {
        Self::new(self.value, pttl, self.now)
    }

    /// What somebody else's claim finds here, and what a holder that lost its claim is told.
    pub(super) fn into_claim_outcome(self) -> ClaimOutcome {
        let takeover_in = match self.phase() {
            b'r' => self.lease_left(),
            _ => Duration::from_micros(u64_at(&self.value, TAKEOVER_AT).saturating_sub(self.now)),
        };
        let holder = || Holder {
            fence: self.fence(),
            attempt: self.attempt(),
            fingerprint: self.fingerprint(),
            age: self.age(),
            takeover_in,
        };
        match self.phase() {
            b'r' if !takeover_in.is_zero() => ClaimOutcome::InProgress(holder()),
            b'r' | b'u' => ClaimOutcome::OutcomeUnknown(holder()),
            b'd' => ClaimOutcome::Completed(CompletedEntry {
                fence: self.fence(),
                attempt: self.attempt(),
                fingerprint: self.fingerprint(),
                failed: self.value[2] & FAILED != 0,
                expires_in: self.expires_in(),
                front_only: false,
                record: {
                    // A slice would share the value, which takes another allocation.
                    let at = self.parts()[2] + SUMMARY_LEN;
                    let mut value = self.value;
                    value.advance(at);
                    value
                },
            }),
            _ => ClaimOutcome::TokenSpent,
        }
    }

    /// What operators see. `None` if the entry is released or has expired.
    pub(super) fn entry_info(&self, address: Address) -> Result<Option<EntryInfo>, StoreError> {
        let state = match self.phase() {
            _ if self.life().is_zero() => return Ok(None),
            b'r' if !self.lease_left().is_zero() => EntryState::Processing,
            b'r' | b'u' => EntryState::Unknown,
            b'd' if self.value[2] & FAILED != 0 => EntryState::Failed,
            b'd' => EntryState::Done,
            _ => return Ok(None),
        };
        let [tags, label, rest] = self.parts();
        let summary = |at: usize| RecordSummary {
            status: u16::from_be_bytes([self.value[at], self.value[at + 1]]),
            requested_at_ms: u64_at(&self.value, at + 2),
            completed_at_ms: u64_at(&self.value, at + 10),
            took: Duration::from_micros(u64_at(&self.value, at + 18)),
        };
        Ok(Some(EntryInfo {
            address,
            state,
            fence: self.fence(),
            attempt: self.attempt(),
            fingerprint: self.fingerprint(),
            tags: Tags::from_bytes(self.value.slice(tags..label)).ok_or_else(|| corrupt_reply("tags"))?,
            label: self.value.slice(label..rest),
            age: self.age(),
            expires_in: self.expires_in(),
            summary: (self.phase() == b'd').then(|| summary(rest)),
        }))
    }
}

/// Returns the fence and the remaining lease of a running entry, from its header and the expiry of its key.
pub(super) fn running_holder(header: &[u8], pttl: i64) -> Option<(Fence, Duration)> {
    let is_running = header.len() >= HEADER_LEN && header[..2] == [VERSION, b'r'];
    let pttl = u64::try_from(pttl).ok().filter(|_| is_running)?;
    let left = pttl.saturating_sub(u64_at(header, 81)).saturating_sub(u64_at(header, 89));
    (left > 0).then(|| (Fence(u64_at(header, 8)), Duration::from_millis(left)))
}

/// Whether an entry is completed and live, from its header and the expiry of its key.
pub(super) fn has_completed(header: &[u8], pttl: i64) -> bool {
    let is_completed = header.len() >= HEADER_LEN && header[..2] == [VERSION, b'd'];
    is_completed && u64::try_from(pttl).is_ok_and(|pttl| pttl > u64_at(header, 89))
}

/// Reads a number that a script returned, also as text.
pub(super) fn reply_number(reply: &Reply) -> Result<u64, StoreError> {
    match reply {
        Reply::Int(number) => u64::try_from(*number).map_err(|_| corrupt_reply("a number is below zero")),
        Reply::Bytes(digits) => {
            let number = std::str::from_utf8(digits).ok().and_then(|digits| digits.parse().ok());
            number.ok_or_else(|| corrupt_reply("a number is not one"))
        }
        _ => Err(corrupt_reply("a number is missing")),
    }
}

const _: () = assert!(SPENT_TOKEN_TTL.as_millis() as u64 == FENCE_MEMORY_MS);

#[cfg(test)]
mod tests {
    use ibid::store::ClaimToken;
    use proptest::prelude::*;

    use super::*;

    fn lease() -> Lease {
        let request = ClaimRequest {
            address: Address([7; 32]),
            token: ClaimToken([9; 16]),
            fingerprint: Fingerprint { version: 3, digest: [8; 32] },
            tags: Tags::new("tenant", "user", "POST /", "key"),
            label: Bytes::from_static(b"label"),
            lease: Duration::from_secs(30),
            ttl: Duration::from_secs(100),
            take_over: None,
        };
        Lease { request: Arc::new(request), fence: Fence(1_000_000), attempt: 2, front_only: false }
    }

    #[test]
    fn a_running_entry_comes_back() {
        let lease = lease();
        let value = Bytes::from(running_value(&lease.request, lease.fence, lease.attempt));
        assert_eq!(value[8..32], holder_id(lease.fence, &lease.request.token));
        let view = EntryView::new(value.clone(), 100_001, 3_000_000).unwrap();
        let ClaimOutcome::InProgress(holder) = view.into_claim_outcome() else {
            panic!("it runs for another millisecond")
        };
        assert_eq!((holder.fence, holder.attempt, holder.fingerprint), (lease.fence, 2, lease.request.fingerprint));
        assert_eq!((holder.takeover_in, holder.age), (Duration::from_millis(1), Duration::from_secs(2)));
        assert_eq!(running_holder(&value, 100_001), Some((lease.fence, Duration::from_millis(1))));
        assert_eq!(running_holder(&value, 100_000), None);
        let lapsed = EntryView::new(value.clone(), 100_000, 3_000_000).unwrap();
        assert!(matches!(lapsed.into_claim_outcome(), ClaimOutcome::OutcomeUnknown(_)), "exactly the ttl is left");
        assert_eq!(EntryView::new(value, -1, 0).err().unwrap().kind, ErrorKind::Corrupt, "a key without an expiry");
    }

    #[test]
    fn a_completed_entry_comes_back() {
        let took = Duration::from_micros(1_234_567);
        let summary = RecordSummary { status: 201, requested_at_ms: 1, completed_at_ms: u64::MAX, took };
        let completion =
            Completion { failed: true, record: b"record", summary: &summary, ttl: Duration::from_secs(50) };
        let (value, stays) = completed_value(&lease(), &completion, Some(7));
        assert_eq!(stays, FENCE_MEMORY_MS);
        let value = Bytes::from(value);
        assert!(EntryView::from_value(value.clone(), 9).unwrap().is_none(), "it is kept for longer than it lives");
        assert!(has_completed(&value, 10_000) && !has_completed(&value, 9_999));
        let view = EntryView::new(value, 55_000, 0).unwrap();
        let info = view.entry_info(Address([7; 32])).unwrap().unwrap();
        let ClaimOutcome::Completed(entry) = view.into_claim_outcome() else { panic!() };
        assert_eq!(
            (entry.failed, &entry.record[..], entry.expires_in),
            (true, &b"record"[..], Duration::from_secs(45))
        );
        assert_eq!((info.state, info.summary, &info.label[..]), (EntryState::Failed, Some(summary), &b"label"[..]));
        assert_eq!(info.tags, lease().request.tags);
    }

    proptest! {
        #[test]
        fn no_value_makes_it_panic(mut value in proptest::collection::vec(any::<u8>(), 0..200), known in any::<bool>(), phase in 0_usize..4) {
            if known && value.len() > HEADER_LEN {
                let [spent, tags, label] = [value[3] % 3, value[105] % 8, value[109] % 8];
                value[..4].copy_from_slice(&[VERSION, b"rudf"[phase], 0, spent]);
                value[105..113].copy_from_slice(&[0, 0, 0, tags, 0, 0, 0, label]);
            }
            let _ = (running_holder(&value, 1), EntryView::from_value(value.clone().into(), 1));
            if let Ok(view) = EntryView::new(value.into(), 1, 1) {
                let _ = (view.entry_info(Address([0; 32])), view.into_claim_outcome());
            }
        }
    }
}
