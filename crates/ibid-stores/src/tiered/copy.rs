//! Finished answers in `first`: whose they are goes with them.
//!
//! `first` has fences, attempts and, where somebody else's answer was copied, a fingerprint of its own. What is
//! remembered there is therefore `last`'s record behind a small head that says whose it is in `last`.
//!
//! ```text
//! "ibid-2t" kind u8 │ fence u64 │ attempt u32 │ fingerprint: version u8, digest 32 bytes │ the record
//! ```
//!
//! Kind 1: `last` has it. Kind 2: it ran solo, and `last` had not heard of it when it was written; the head goes on with
//! the holder's token (16 bytes), so that whoever finds it can tell `last`.

use bytes::{BufMut, Bytes, BytesMut};
use ibid::store::{End, Fence, Fingerprint, Finished, Lease, Outline, Token};
use tokio::time::Instant;

const MAGIC: [u8; 7] = *b"ibid-2t";
const CONFIRMED: u8 = 1;
const SOLO: u8 = 2;
const HEAD: usize = MAGIC.len() + 1 + 8 + 4 + 1 + 32;
const TOKEN: usize = 16;

/// A finished answer of `first`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Opened {
    /// As `last` would give it.
    pub(super) finished: Finished,
    /// Of the holder, if `last` may not have heard of it.
    pub(super) solo: Option<Token>,
}

/// What `first` is told of an end, later: its life is counted from when `last` was told.
#[derive(Debug, Clone)]
pub(super) struct Copied {
    end: End,
    told: Instant,
}

impl Copied {
    /// How `lease` ended in `last`, which was told at `told` or later.
    pub(super) fn of_end(lease: &Lease, end: &End, told: Instant) -> Self {
        Self::of(lease, end, told, None)
    }

    /// How `lease` ended that ran solo, while `last` is away.
    pub(super) fn of_solo_end(lease: &Lease, end: &End, told: Instant) -> Self {
        Self::of(lease, end, told, Some(lease.ask.token))
    }

    fn of(lease: &Lease, end: &End, told: Instant, solo: Option<Token>) -> Self {
        let end = match end {
            End::Complete { failed, record, outline, keep } => End::Complete {
                failed: *failed,
                record: headed(lease.fence, lease.attempt, lease.ask.fingerprint, solo, record),
                outline: *outline,
                keep: *keep,
            },
            other => other.clone(),
        };
        Self { end, told }
    }

    /// What `last` has remembered, as it said at `told` or later.
    pub(super) fn of_finished(finished: &Finished, told: Instant) -> Self {
        let end = End::Complete {
            failed: finished.failed,
            record: wrapped(finished.fence, finished.attempt, finished.fingerprint, &finished.record),
            outline: Outline::default(),
            keep: finished.expires_in,
        };
        Self { end, told }
    }

    pub(super) fn release() -> Self {
        Self { end: End::Release, told: Instant::now() }
    }

    /// What to tell `first` now. What `last` has forgotten by then ends at once there too.
    pub(super) fn now(&self) -> End {
        let late = self.told.elapsed();
        match &self.end {
            End::Complete { failed, record, outline, keep } => End::Complete {
                failed: *failed,
                record: record.clone(),
                outline: *outline,
                keep: keep.saturating_sub(late),
            },
            End::Park { keep, .. } if *keep <= late => End::Release,
            End::Park { keep, retry_in } => End::Park { keep: *keep - late, retry_in: retry_in.saturating_sub(late) },
            End::Release => End::Release,
        }
    }
}

/// A finished answer of `first`. A record without a head is somebody's who used `first` alone before: it is given as it
/// is.
pub(super) fn opened(mut finished: Finished) -> Opened {
    let record = &finished.record;
    let (head, solo) = match record.strip_prefix(&MAGIC).and_then(|rest| rest.first()) {
        Some(&CONFIRMED) if record.len() >= HEAD => (HEAD, None),
        Some(&SOLO) if record.len() >= HEAD + TOKEN => {
            (HEAD + TOKEN, Some(Token(record[HEAD..HEAD + TOKEN].try_into().expect("16 bytes"))))
        }
        _ => return Opened { finished, solo: None },
    };
    let number = |from: usize| u64::from_le_bytes(record[from..from + 8].try_into().expect("eight bytes"));
    let attempt = u32::from_le_bytes(record[16..20].try_into().expect("four bytes"));
    let digest = record[21..HEAD].try_into().expect("32 bytes");
    finished.fence = Fence(number(8));
    finished.attempt = attempt;
    finished.fingerprint = Fingerprint { version: record[20], digest };
    finished.record = finished.record.slice(head..);
    Opened { finished, solo }
}

/// A record behind a head that says whose it is in `last`, which has it.
pub(super) fn wrapped(fence: Fence, attempt: u32, fingerprint: Fingerprint, record: &Bytes) -> Bytes {
    headed(fence, attempt, fingerprint, None, record)
}

fn headed(fence: Fence, attempt: u32, fingerprint: Fingerprint, solo: Option<Token>, record: &Bytes) -> Bytes {
    let mut out = BytesMut::with_capacity(HEAD + TOKEN + record.len());
    out.put_slice(&MAGIC);
    out.put_u8(if solo.is_some() { SOLO } else { CONFIRMED });
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

    fn finished(record: Bytes) -> Finished {
        let expires_in = Duration::from_secs(9);
        Finished { fence: Fence(1), attempt: 1, fingerprint: Fingerprint::NONE, failed: true, record, expires_in }
    }

    #[test]
    fn whose_it_is_goes_with_it() {
        let fingerprint = Fingerprint { version: 3, digest: [7; 32] };
        for record in [&b""[..], b"an answer"] {
            for token in [None, Some(Token([6; 16]))] {
                let kept = headed(Fence(1 << 60), 4, fingerprint, token, &Bytes::copy_from_slice(record));
                let Opened { finished: opened, solo } = opened(finished(kept));
                assert_eq!((opened.fence, opened.attempt, opened.fingerprint), (Fence(1 << 60), 4, fingerprint));
                assert_eq!((&opened.record[..], opened.failed, solo), (record, true, token));
            }
        }
    }

    #[test]
    fn a_record_without_a_head_is_given_as_it_is() {
        let mut unknown = [0; 200];
        unknown[..8].copy_from_slice(b"ibid-2t\x03");
        let cut = &headed(Fence(1), 1, Fingerprint::NONE, Some(Token([6; 16])), &Bytes::new())[..HEAD + TOKEN - 1];
        for record in [&b""[..], b"ibid-2t", b"ibid-2t\x01 but cut short", cut, &unknown, &[0; 200]] {
            let plain = finished(Bytes::copy_from_slice(record));
            assert_eq!(opened(plain.clone()), Opened { finished: plain, solo: None });
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_copy_does_not_outlive_what_it_is_of() {
        let copied = Copied::of_finished(&finished(Bytes::new()), Instant::now());
        tokio::time::advance(Duration::from_secs(4)).await;
        assert_eq!(copied.now().keep(), Duration::from_secs(5));
        tokio::time::advance(Duration::from_secs(5)).await;
        assert_eq!(copied.now().keep(), Duration::ZERO);
    }
}
