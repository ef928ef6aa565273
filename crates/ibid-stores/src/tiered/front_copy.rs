//! Encodes completed answers in the front store together with their identity in the authority.
//!
//! The front has its own fences and attempts and, for a copied answer, its own fingerprint. So its record is the
//! authority's record behind a header with the authority's values:
//!
//! ```text
//! "ibid-2t" kind u8 │ fence u64 │ attempt u32 │ fingerprint: version u8, digest 32 bytes │ the record
//! ```
//!
//! Kind 1: the authority has the answer. Kind 2: the claim ran front-only and the authority did not know it at the time
//! of writing. The header then continues with the holder's token (16 bytes), so that a reader can report the answer to
//! the authority.

use bytes::{Buf, BufMut, BytesMut};

use super::*;

const MAGIC: [u8; 7] = *b"ibid-2t";
const CONFIRMED: u8 = 1;
const FRONT_ONLY: u8 = 2;
const HEADER_LEN: usize = MAGIC.len() + 1 + 8 + 4 + 1 + 32;
const TOKEN_LEN: usize = 16;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FrontCopy {
    /// The entry as the authority would return it.
    pub(super) entry: CompletedEntry,
    /// The holder's token, if the authority may not have the answer yet.
    pub(super) front_only_token: Option<ClaimToken>,
}

/// A settlement to apply to the front later. Its ttl counts from `sent_at`, when the authority received it.
#[derive(Debug, Clone)]
pub(super) struct FrontSettlement {
    settlement: Settlement,
    sent_at: Instant,
}

impl FrontSettlement {
    /// Copies the settlement of `lease` that was sent to the authority at `sent_at` or later. `front_only`: the authority
    /// is unreachable, and does not have it.
    pub(super) fn new(lease: &Lease, end: &Settlement, sent_at: Instant, front_only: bool) -> Self {
        let token = front_only.then_some(lease.request.token);
        let head = |record: &Bytes| encode(lease.fence, lease.attempt, lease.request.fingerprint, token, record);
        Self { settlement: end.map_record(head), sent_at }
    }

    /// Copies an answer that the authority returned at `sent_at` or later.
    pub(super) fn from_completed(finished: &CompletedEntry, sent_at: Instant) -> Self {
        let settlement = Settlement::Complete {
            failed: finished.failed,
            record: encode_confirmed(finished.fence, finished.attempt, finished.fingerprint, &finished.record),
            summary: RecordSummary::default(),
            ttl: finished.expires_in,
        };
        Self { settlement, sent_at }
    }

    pub(super) fn release() -> Self {
        Self { settlement: Settlement::Release, sent_at: Instant::now() }
    }

    /// Returns the settlement with its ttl reduced by the time since `sent_at`. An answer that the authority has
    /// dropped by then expires in the front at once.
    pub(super) fn adjusted_for_delay(&self) -> Settlement {
        let late = self.sent_at.elapsed();
        let mut settlement = self.settlement.clone();
        match &mut settlement {
            Settlement::Complete { ttl, .. } => *ttl = ttl.saturating_sub(late),
            Settlement::Park { ttl, .. } if *ttl <= late => return Settlement::Release,
            Settlement::Park { ttl, retry_in } => (*ttl, *retry_in) = (*ttl - late, retry_in.saturating_sub(late)),
            Settlement::Release => {}
        }
        settlement
    }
}

/// Decodes a completed answer of the front. A record without a header predates the tiered setup, and is returned
/// unchanged.
pub(super) fn decode(mut finished: CompletedEntry) -> FrontCopy {
    let with_token = match finished.record.strip_prefix(&MAGIC).and_then(|rest| rest.first()) {
        Some(&CONFIRMED) if finished.record.len() >= HEADER_LEN => false,
        Some(&FRONT_ONLY) if finished.record.len() >= HEADER_LEN + TOKEN_LEN => true,
        _ => return FrontCopy { entry: finished, front_only_token: None },
    };
    let mut record = finished.record.split_off(MAGIC.len() + 1);
    finished.fence = Fence(record.get_u64_le());
    finished.attempt = record.get_u32_le();
    finished.fingerprint = Fingerprint { version: record.get_u8(), digest: [0; 32] };
    record.copy_to_slice(&mut finished.fingerprint.digest);
    let front_only_token = with_token.then(|| ClaimToken(record.get_u128().to_be_bytes()));
    finished.record = record;
    finished.front_only = with_token;
    FrontCopy { entry: finished, front_only_token }
}

/// Prefixes a record that the authority has with its header.
pub(super) fn encode_confirmed(fence: Fence, attempt: u32, fingerprint: Fingerprint, record: &Bytes) -> Bytes {
    encode(fence, attempt, fingerprint, None, record)
}

fn encode(fence: Fence, attempt: u32, fingerprint: Fingerprint, solo: Option<ClaimToken>, record: &Bytes) -> Bytes {
    let mut out = BytesMut::with_capacity(HEADER_LEN + TOKEN_LEN + record.len());
    out.put_slice(&MAGIC);
    out.put_u8(if solo.is_some() { FRONT_ONLY } else { CONFIRMED });
    out.put_u64_le(fence.0);
    out.put_u32_le(attempt);
    out.put_u8(fingerprint.version);
    out.put_slice(&fingerprint.digest);
    if let Some(token) = solo {
        out.put_slice(&token.0);
    }
    out.put_slice(record);
    out.freeze()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn finished(record: Bytes) -> CompletedEntry {
        let expires_in = Duration::from_secs(9);
        CompletedEntry {
            fence: Fence(1),
            attempt: 1,
            fingerprint: Fingerprint::NONE,
            failed: true,
            record,
            expires_in,
            front_only: false,
        }
    }

    #[test]
    fn whose_it_is_goes_with_it() {
        let fingerprint = Fingerprint { version: 3, digest: [7; 32] };
        for record in [&b""[..], b"an answer"] {
            for token in [None, Some(ClaimToken([6; 16]))] {
                let kept = encode(Fence(1 << 60), 4, fingerprint, token, &Bytes::copy_from_slice(record));
                let FrontCopy { entry: opened, front_only_token: solo } = decode(finished(kept));
                assert_eq!((opened.fence, opened.attempt, opened.fingerprint), (Fence(1 << 60), 4, fingerprint));
                assert_eq!((&opened.record[..], opened.failed, solo), (record, true, token));
                assert_eq!(opened.front_only, token.is_some());
            }
        }
    }

    #[test]
    fn a_record_without_a_head_is_given_as_it_is() {
        let mut unknown = [0; 200];
        unknown[..8].copy_from_slice(b"ibid-2t\x03");
        let cut = &encode(Fence(1), 1, Fingerprint::NONE, Some(ClaimToken([6; 16])), &Bytes::new())
            [..HEADER_LEN + TOKEN_LEN - 1];
        for record in [&b""[..], b"ibid-2t", b"ibid-2t\x01 but cut short", cut, &unknown, &[0; 200]] {
            let plain = finished(Bytes::copy_from_slice(record));
            assert_eq!(decode(plain.clone()), FrontCopy { entry: plain, front_only_token: None });
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_copy_does_not_outlive_what_it_is_of() {
        let copied = FrontSettlement::from_completed(&finished(Bytes::new()), Instant::now());
        tokio::time::advance(Duration::from_secs(4)).await;
        assert_eq!(copied.adjusted_for_delay().ttl(), Duration::from_secs(5));
        tokio::time::advance(Duration::from_secs(5)).await;
        assert_eq!(copied.adjusted_for_delay().ttl(), Duration::ZERO);
    }
}
