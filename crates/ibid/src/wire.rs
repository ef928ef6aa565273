//! Reads and writes length-framed bytes, for records and journal files.

use bytes::{Buf, Bytes};

/// Reads fields from the front. Every read returns `None` past the end.
pub(crate) struct ByteReader(pub(crate) Bytes);

impl ByteReader {
    pub(crate) fn u8(&mut self) -> Option<u8> {
        self.0.try_get_u8().ok()
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.0.try_get_u16_le().ok()
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.0.try_get_u32_le().ok()
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.0.try_get_u64_le().ok()
    }

    pub(crate) fn take(&mut self, length: usize) -> Option<Bytes> {
        (self.0.len() >= length).then(|| self.0.split_to(length))
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.as_ref().try_into().ok()
    }

    /// Reads what [`put_framed`] wrote.
    pub(crate) fn framed(&mut self) -> Option<Bytes> {
        let length = self.u32()?;
        self.take(length as usize)
    }
}

pub(crate) fn put_framed(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend_from_slice(&u32::try_from(bytes.len()).expect("bounded by max_response").to_le_bytes());
    out.extend_from_slice(bytes);
}

pub(crate) fn append_checksum(mut out: Vec<u8>) -> Bytes {
    let sum = crc32c::crc32c(&out);
    out.extend_from_slice(&sum.to_le_bytes());
    out.into()
}

/// Removes the checksum that [`append_checksum`] appended. Returns `None` if it does not match.
pub(crate) fn verify_checksum(mut bytes: Bytes) -> Option<Bytes> {
    let sum = bytes.len().checked_sub(4).map(|at| bytes.split_off(at))?;
    (crc32c::crc32c(&bytes) == u32::from_le_bytes(sum.as_ref().try_into().ok()?)).then_some(bytes)
}
