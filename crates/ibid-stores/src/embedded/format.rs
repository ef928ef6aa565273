//! Encoding of a segment, format version 1. All numbers are little-endian.
//!
//! ```text
//! segment   ┌────────────┬─────────┬─────────┬───┬──────┬──────────────┐
//!           │ header 4 K │ batch   │ batch   │ … │ seal │ zeroes, or … │  … what it held before it was recycled
//!           └────────────┴─────────┴─────────┴───┴──────┴──────────────┘
//!
//! header    0 magic "ibid seg"   8 version u32   12 crc u32   16 store id [16]   32 segment id u32   36 zero u32
//! (80 used) 40 size u64   48 salt u64   56 sequence u64   64 clock u64   72 fences u64
//!
//! batch     0 magic u32   4 crc u32    8 payload length u32   12 count u32   16 sequence u64
//! (48 +)    24 clock u64  32 fences u64   40 lane u8   41 kind u8 (0 entries, 1 seal)   42 zero [6]
//!           48 payload: `count` entries, then zeroes up to the next sector
//! ```
//!
//! Invariants: checksums are CRC-32C seeded with the segment's salt, so the previous contents of a recycled segment are
//! never mistaken for current ones. A batch begins and ends on a sector boundary ([`SECTOR_LEN`]), so no durable sector
//! is written again. The used part of the header fits into one sector: it is written completely or not at all.

use bytes::{Buf, BufMut};

/// Unit in bytes that a disk writes completely or not at all.
pub(super) const SECTOR_LEN: usize = 512;
pub(super) const FIRST_BATCH_OFFSET: u64 = 4096;
/// The version that this build writes. It rejects later ones.
pub(super) const FORMAT_VERSION: u32 = 1;
/// Length in bytes of the header before a batch's payload.
pub(super) const BATCH_HEADER_LEN: usize = 48;
/// The lane of all calls.
pub(super) const MAIN_LANE: u8 = 0;
/// The lane that the compactor moves long-lived entries to.
pub(super) const COLD_LANE: u8 = 1;

const SEGMENT_MAGIC: &[u8; 8] = b"ibid seg";
const BATCH_MAGIC: u32 = u32::from_le_bytes(*b"iBat");
const SEGMENT_HEADER_LEN: usize = 80;

/// Why bytes cannot be decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Corruption {
    /// The expected magic bytes are missing.
    #[error("no such thing begins here")]
    Magic,
    /// A later version of ibid wrote the data.
    #[error(
        "it is of format version {0}, and this ibid reads up to version {FORMAT_VERSION}; use the ibid that wrote it"
    )]
    Version(u32),
    /// The checksum does not match.
    #[error("the checksum does not fit")]
    Checksum,
    /// The data ends early, or states an impossible length.
    #[error("the lengths do not fit")]
    Length,
    /// Later batches are missing.
    #[error("batches that follow are missing")]
    MissingBatches,
    /// A field has an invalid value.
    #[error("a field has a value that it cannot have")]
    InvalidField,
}

/// The maximum of a valid time in microseconds, sequence number, version or fence. No store gets there, and what is added
/// to one does not overflow.
pub(super) const MAX_COUNTER: u64 = u64::MAX / 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SegmentHeader {
    pub(super) store: [u8; 16],
    pub(super) id: u32,
    pub(super) size: u64,
    pub(super) salt: u64,
    /// Lower bound of the sequence numbers of main-lane batches in this segment.
    pub(super) sequence: u64,
    /// Time of preparation, later than all previous contents.
    pub(super) clock: u64,
    /// Fences granted later are not lower.
    pub(super) fence_floor: u64,
}

impl SegmentHeader {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(FIRST_BATCH_OFFSET as usize);
        out.put_slice(SEGMENT_MAGIC);
        out.put_u32_le(FORMAT_VERSION);
        out.put_u32_le(0);
        out.put_slice(&self.store);
        out.put_u32_le(self.id);
        out.put_u32_le(0);
        for field in [self.size, self.salt, self.sequence, self.clock, self.fence_floor] {
            out.put_u64_le(field);
        }
        let crc = crc32c::crc32c(&out);
        out[12..16].copy_from_slice(&crc.to_le_bytes());
        out.resize(FIRST_BATCH_OFFSET as usize, 0);
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, Corruption> {
        let used = bytes.get(..SEGMENT_HEADER_LEN).ok_or(Corruption::Length)?;
        if &used[..8] != SEGMENT_MAGIC {
            return Err(Corruption::Magic);
        }
        let mut rest = &used[8..];
        let version = rest.get_u32_le();
        if version > FORMAT_VERSION {
            return Err(Corruption::Version(version));
        }
        let crc = rest.get_u32_le();
        let zero_crc = crc32c::crc32c_append(crc32c::crc32c(&used[..12]), &[0; 4]);
        if crc32c::crc32c_append(zero_crc, &used[16..]) != crc {
            return Err(Corruption::Checksum);
        }
        let mut store = [0; 16];
        rest.copy_to_slice(&mut store);
        let id = rest.get_u32_le();
        rest.advance(4);
        let [size, salt, sequence, clock, fence_floor] = [(); 5].map(|()| rest.get_u64_le());
        let header = Self { store, id, size, salt, sequence, clock, fence_floor };
        // Positions in a segment have 32 bits.
        let is_valid = (FIRST_BATCH_OFFSET..=u32::MAX.into()).contains(&size)
            && [sequence, clock, fence_floor].iter().all(|n| *n <= MAX_COUNTER);
        if is_valid { Ok(header) } else { Err(Corruption::InvalidField) }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BatchHeader {
    /// Length of the payload in bytes, without padding.
    pub(super) length: u32,
    pub(super) count: u32,
    /// One more than that of the previous batch in the lane.
    pub(super) sequence: u64,
    pub(super) clock: u64,
    pub(super) highest_fence: u64,
    pub(super) lane: u8,
    pub(super) is_seal: bool,
}

impl BatchHeader {
    /// Writes the header and the checksum into the first bytes of `batch`, whose payload is already in place.
    pub(super) fn write_header(&self, batch: &mut [u8], salt: u64) {
        let mut out = &mut batch[..BATCH_HEADER_LEN];
        out.put_u32_le(BATCH_MAGIC);
        out.put_u32_le(0);
        out.put_u32_le(self.length);
        out.put_u32_le(self.count);
        out.put_u64_le(self.sequence);
        out.put_u64_le(self.clock);
        out.put_u64_le(self.highest_fence);
        out.put_slice(&[self.lane, u8::from(self.is_seal), 0, 0, 0, 0, 0, 0]);
        let crc = salted_crc(salt, &batch[8..BATCH_HEADER_LEN + self.length as usize]);
        batch[4..8].copy_from_slice(&crc.to_le_bytes());
    }

    /// Decodes the header only; [`Self::verify`] checks the checksum once the payload is read.
    pub(super) fn peek(bytes: &[u8]) -> Result<Self, Corruption> {
        let mut rest = bytes.get(..BATCH_HEADER_LEN).ok_or(Corruption::Length)?;
        if rest.get_u32_le() != BATCH_MAGIC {
            return Err(Corruption::Magic);
        }
        rest.advance(4);
        let [length, count] = [(); 2].map(|()| rest.get_u32_le());
        let [sequence, clock, highest_fence] = [(); 3].map(|()| rest.get_u64_le());
        let (lane, is_seal) = (rest.get_u8(), rest.get_u8() == 1);
        let header = Self { length, count, sequence, clock, highest_fence, lane, is_seal };
        let is_valid = lane <= COLD_LANE && [sequence, clock, highest_fence].iter().all(|n| *n <= MAX_COUNTER);
        if is_valid { Ok(header) } else { Err(Corruption::InvalidField) }
    }

    /// Checks `batch`, from its first byte to the end of its payload, against the checksum.
    pub(super) fn verify(&self, batch: &[u8], salt: u64) -> Result<(), Corruption> {
        let covered = batch.get(8..BATCH_HEADER_LEN + self.length as usize).ok_or(Corruption::Length)?;
        if salted_crc(salt, covered).to_le_bytes() == batch[4..8] { Ok(()) } else { Err(Corruption::Checksum) }
    }

    /// Length from the first byte to the next batch.
    pub(super) fn padded_len(&self) -> u64 {
        pad_to_sector(BATCH_HEADER_LEN + self.length as usize) as u64
    }
}

/// Rounds up to a multiple of [`SECTOR_LEN`].
pub(super) fn pad_to_sector(length: usize) -> usize {
    length.next_multiple_of(SECTOR_LEN)
}

/// Returns the checksum of bytes in a segment with this salt.
pub(super) fn salted_crc(salt: u64, bytes: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&salt.to_le_bytes()), bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_reads_what_it_wrote_and_nothing_else() {
        let header =
            SegmentHeader { store: [7; 16], id: 3, size: 1 << 26, salt: 99, sequence: 5, clock: 6, fence_floor: 7 };
        let bytes = header.encode();
        assert_eq!(SegmentHeader::decode(&bytes), Ok(header));
        for at in 0..SEGMENT_HEADER_LEN {
            let mut flipped = bytes.clone();
            flipped[at] ^= 0x10;
            assert!(SegmentHeader::decode(&flipped).is_err(), "byte {at} may not change unnoticed");
        }
        for impossible in [
            SegmentHeader { clock: MAX_COUNTER + 1, ..header },
            SegmentHeader { size: FIRST_BATCH_OFFSET - 1, ..header },
            SegmentHeader { size: 1 << 32, ..header },
        ] {
            assert_eq!(SegmentHeader::decode(&impossible.encode()), Err(Corruption::InvalidField));
        }
    }

    #[test]
    fn a_batch_of_another_salt_is_not_believed() {
        let mut batch = vec![0; BATCH_HEADER_LEN];
        batch.extend_from_slice(b"payload");
        let header = BatchHeader {
            length: 7,
            count: 1,
            sequence: 1,
            clock: 2,
            highest_fence: 3,
            lane: MAIN_LANE,
            is_seal: false,
        };
        header.write_header(&mut batch, 42);
        let read = BatchHeader::peek(&batch).unwrap();
        assert_eq!((read, read.padded_len()), (header, SECTOR_LEN as u64));
        assert_eq!(read.verify(&batch, 42), Ok(()));
        assert_eq!(read.verify(&batch, 43), Err(Corruption::Checksum));
        let mut late = batch.clone();
        BatchHeader { clock: MAX_COUNTER + 1, ..header }.write_header(&mut late, 42);
        assert_eq!(BatchHeader::peek(&late), Err(Corruption::InvalidField));
        *batch.last_mut().unwrap() ^= 1;
        assert_eq!(read.verify(&batch, 42), Err(Corruption::Checksum));
    }
}
