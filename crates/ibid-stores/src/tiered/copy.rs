//! Finished answers in `first`: whose they are goes with them.
//!
//! `first` has fences, attempts and, where somebody else's answer was copied, a fingerprint of its own. What is
//! remembered there is therefore `last`'s record behind a small head that says whose it is in `last`.
//!
//! ```text
//! "ibid-2t" version u8 │ fence u64 │ attempt u32 │ fingerprint: version u8, digest 32 bytes │ the record
//! ```

use bytes::{BufMut, Bytes, BytesMut};
use ibid::store::{End, Fence, Fingerprint, Finished, Lease, Outline};
use tokio::time::Instant;

const MAGIC: [u8; 8] = *b"ibid-2t\x01";
const HEAD: usize = MAGIC.len() + 8 + 4 + 1 + 32;

/// What `first` is told of an end, later: its life is counted from when `last` was told.
#[derive(Debug, Clone)]
pub(super) struct Copied {
    end: End,
    told: Instant,
}

impl Copied {
    /// How `lease` ended in `last`, which was told at `told` or later.
    pub(super) fn of_end(lease: &Lease, end: &End, told: Instant) -> Self {
        let end = match end {
            End::Complete { failed, record, outline, keep } => End::Complete {
                failed: *failed,
                record: wrapped(lease.fence, lease.attempt, lease.ask.fingerprint, record),
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

/// A finished answer of `first`, as `last` would give it. A record without a head is somebody's who used `first` alone
/// before: it is given as it is.
pub(super) fn opened(mut finished: Finished) -> Finished {
    let record = &finished.record;
    if record.len() < HEAD || record[..MAGIC.len()] != MAGIC {
        return finished;
    }
    let number = |from: usize| u64::from_le_bytes(record[from..from + 8].try_into().expect("eight bytes"));
    let attempt = u32::from_le_bytes(record[16..20].try_into().expect("four bytes"));
    let digest = record[21..HEAD].try_into().expect("32 bytes");
    finished.fence = Fence(number(8));
    finished.attempt = attempt;
    finished.fingerprint = Fingerprint { version: record[20], digest };
    finished.record = finished.record.slice(HEAD..);
    finished
}

/// The same bytes as `finished` has, with another record behind its head.
pub(super) fn wrapped(fence: Fence, attempt: u32, fingerprint: Fingerprint, record: &Bytes) -> Bytes {
    let mut out = BytesMut::with_capacity(HEAD + record.len());
    out.put_slice(&MAGIC);
    out.put_u64_le(fence.0);
    out.put_u32_le(attempt);
    out.put_u8(fingerprint.version);
    out.put_slice(&fingerprint.digest);
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
            let kept = wrapped(Fence(1 << 60), 4, fingerprint, &Bytes::copy_from_slice(record));
            let opened = opened(finished(kept));
            assert_eq!((opened.fence, opened.attempt, opened.fingerprint), (Fence(1 << 60), 4, fingerprint));
            assert_eq!((&opened.record[..], opened.failed), (record, true));
        }
    }

    #[test]
    fn a_record_without_a_head_is_given_as_it_is() {
        for record in [&b""[..], b"ibid-2t", b"ibid-2t\x01 but cut short", &[0; 200]] {
            let plain = finished(Bytes::copy_from_slice(record));
            assert_eq!(opened(plain.clone()), plain);
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
