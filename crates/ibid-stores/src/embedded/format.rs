//! The bytes of a segment, format version 1. Everything is little-endian.
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
//! Invariants: checksums are CRC-32C and begin with the segment's salt, so that what a recycled segment held before is
//! never mistaken for what it holds now. A batch begins and ends on a [`SECTOR`], so that no sector that is durable is
//! written again. The header's used part fits in one sector: it is there or not, never half.

use bytes::{Buf, BufMut};

/// The smallest piece that a disk writes wholly or not at all.
pub(super) const SECTOR_LEN: usize = 512;
/// Where a segment's first batch begins.
pub(super) const FIRST_BATCH_OFFSET: u64 = 4096;
/// What this build writes. Readers refuse what is newer.
pub(super) const FORMAT_VERSION: u32 = 1;
/// Before a batch's payload.
pub(super) const BATCH_HEADER_LEN: usize = 48;
/// The lane that all calls are written to.
pub(super) const MAIN_LANE: u8 = 0;
/// The lane that long-lived entries are moved to.
pub(super) const COLD_LANE: u8 = 1;

const SEGMENT_MAGIC: &[u8; 8] = b"ibid seg";
const BATCH_MAGIC: u32 = u32::from_le_bytes(*b"iBat");
const SEGMENT_HEADER_LEN: usize = 80;

/// What is wrong with bytes that do not decode.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Corruption {
    /// Does not begin as it must.
    #[error("no such thing begins here")]
    Magic,
    /// Written by a later version.
    #[error("it is of format version {0}, and this build reads up to {FORMAT_VERSION}")]
    Version(u32),
    /// The checksum does not fit.
    #[error("the checksum does not fit")]
    Checksum,
    /// Ends too early, or says that it is longer than it can be.
    #[error("the lengths do not fit")]
    Length,
    /// What stood behind it is gone.
    #[error("batches that follow are missing")]
    MissingBatches,
    /// A field has a value that it cannot have.
    #[error("a field has a value that it cannot have")]
    InvalidField,
}

/// What a segment says about itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SegmentHeader {
    pub(super) store: [u8; 16],
    pub(super) id: u32,
    pub(super) size: u64,
    pub(super) salt: u64,
    /// No batch of the main lane in it has a lower one.
    pub(super) sequence: u64,
    /// When it was prepared: later than everything it held before.
    pub(super) clock: u64,
    /// No lower fence will be given.
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
        Ok(Self {
            store,
            id,
            size: rest.get_u64_le(),
            salt: rest.get_u64_le(),
            sequence: rest.get_u64_le(),
            clock: rest.get_u64_le(),
            fence_floor: rest.get_u64_le(),
        })
    }
}

/// What a batch says about itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BatchHeader {
    /// Of the payload, without the zeroes behind it.
    pub(super) length: u32,
    pub(super) count: u32,
    /// One more than that of the batch before it in its lane.
    pub(super) sequence: u64,
    pub(super) clock: u64,
    /// The highest fence ever given.
    pub(super) highest_fence: u64,
    pub(super) lane: u8,
    /// The last one of its segment: nothing follows.
    pub(super) is_seal: bool,
}

impl BatchHeader {
    /// Writes the header over the first bytes of `batch`, whose payload is there already, and the checksum of both.
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

    /// Reads the header only: the checksum is [`verified`](Self::verify) once the payload is there too.
    pub(super) fn peek(bytes: &[u8]) -> Result<Self, Corruption> {
        let mut rest = bytes.get(..BATCH_HEADER_LEN).ok_or(Corruption::Length)?;
        if rest.get_u32_le() != BATCH_MAGIC {
            return Err(Corruption::Magic);
        }
        rest.advance(4);
        let header = Self {
            length: rest.get_u32_le(),
            count: rest.get_u32_le(),
            sequence: rest.get_u64_le(),
            clock: rest.get_u64_le(),
            highest_fence: rest.get_u64_le(),
            lane: rest.get_u8(),
            is_seal: rest.get_u8() == 1,
        };
        if header.lane > COLD_LANE { Err(Corruption::InvalidField) } else { Ok(header) }
    }

    /// Whether `batch`, from its first byte to the end of its payload, is what was written.
    pub(super) fn verify(&self, batch: &[u8], salt: u64) -> Result<(), Corruption> {
        let covered = batch.get(8..BATCH_HEADER_LEN + self.length as usize).ok_or(Corruption::Length)?;
        if salted_crc(salt, covered).to_le_bytes() == batch[4..8] { Ok(()) } else { Err(Corruption::Checksum) }
    }

    /// From its first byte to where the next one begins.
    pub(super) fn padded_len(&self) -> u64 {
        pad_to_sector(BATCH_HEADER_LEN + self.length as usize) as u64
    }
}

/// Up to the next sector.
pub(super) fn pad_to_sector(length: usize) -> usize {
    length.next_multiple_of(SECTOR_LEN)
}

/// The checksum of what stands in a segment with this salt.
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
        *batch.last_mut().unwrap() ^= 1;
        assert_eq!(read.verify(&batch, 42), Err(Corruption::Checksum));
    }
}
