//! SHA-256 of many short pieces.
//!
//! The digest is that of the pieces one after another. It differs from [`sha2::Sha256`] in how pieces are gathered: a
//! short one takes a few instructions, and the state can be read between pieces, which makes a checksum of what was
//! hashed so far almost free.

use sha2::block_api::compress256;

use super::put_length;

const BLOCK_BYTES: usize = 64;
/// How many bytes [`text`](HashStream::text) copies at once; most pieces are shorter.
const COPY_BYTES: usize = 32;
/// The initial state, from the square roots of the first eight primes (FIPS 180-4, section 5.3.3).
const INITIAL_STATE: [u32; 8] =
    [0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a, 0x510e_527f, 0x9b05_688c, 0x1f83_d9ab, 0x5be0_cd19];

pub(crate) struct HashStream {
    state: [u32; 8],
    /// The number of bytes in compressed blocks.
    compressed: u64,
    /// The bytes that do not fill a block yet, and room for one copy more.
    buffer: [u8; BLOCK_BYTES + COPY_BYTES],
    len: usize,
}

impl HashStream {
    pub(crate) const fn new() -> Self {
        Self { state: INITIAL_STATE, compressed: 0, buffer: [0; BLOCK_BYTES + COPY_BYTES], len: 0 }
    }

    /// The number of bytes so far.
    pub(crate) fn len(&self) -> u64 {
        self.compressed + self.len as u64
    }

    /// Appends a whole block to whole blocks.
    #[inline]
    pub(crate) fn block(&mut self, block: &[u8; BLOCK_BYTES]) {
        debug_assert_eq!(self.len, 0);
        compress256(&mut self.state, std::slice::from_ref(block));
        self.compressed += BLOCK_BYTES as u64;
    }

    #[inline]
    pub(crate) fn byte(&mut self, byte: u8) {
        self.buffer[self.len] = byte;
        self.len += 1;
        self.compress_full();
    }

    /// Appends the first `size` bytes of `from`. If more follow, they are copied too and overwritten by the next piece,
    /// because a copy of fixed size is faster than one of the right size.
    #[inline]
    pub(crate) fn text(&mut self, from: &[u8], size: usize) {
        let to = self.buffer[self.len..].first_chunk_mut::<COPY_BYTES>();
        match (from.first_chunk::<COPY_BYTES>(), to) {
            (Some(from), Some(to)) if size <= COPY_BYTES => {
                *to = *from;
                self.len += size;
                self.compress_full();
            }
            _ => self.bytes(&from[..size]),
        }
    }

    /// Appends a tag, the length of a piece, and the piece.
    pub(crate) fn framed(&mut self, tag: u8, bytes: &[u8]) {
        // Most pieces are short: all is appended as one text.
        let mut text = [tag; COPY_BYTES];
        if let Some(to) = text.get_mut(2..2 + bytes.len()) {
            to.copy_from_slice(bytes);
            text[1] = bytes.len() as u8;
            return self.text(&text, 2 + bytes.len());
        }
        self.byte(tag);
        put_length(bytes.len(), |byte| self.byte(byte));
        self.bytes(bytes);
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        let room = BLOCK_BYTES - self.len;
        let Some((first, rest)) = bytes.split_at_checked(room).filter(|_| self.len > 0) else {
            if self.len > 0 {
                return self.keep(bytes);
            }
            return self.blocks(bytes);
        };
        self.buffer[self.len..BLOCK_BYTES].copy_from_slice(first);
        self.len = BLOCK_BYTES;
        self.compress_full();
        self.blocks(rest);
    }

    /// Appends bytes to whole blocks.
    fn blocks(&mut self, bytes: &[u8]) {
        let (blocks, rest) = bytes.as_chunks();
        if !blocks.is_empty() {
            compress256(&mut self.state, blocks);
            self.compressed += (bytes.len() - rest.len()) as u64;
        }
        self.keep(rest);
    }

    /// Appends bytes that do not fill the block.
    fn keep(&mut self, bytes: &[u8]) {
        self.buffer[self.len..self.len + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
    }

    #[inline]
    fn compress_full(&mut self) {
        if self.len >= BLOCK_BYTES {
            let (block, rest) = self.buffer.split_at_mut(BLOCK_BYTES);
            let block: &mut [u8; BLOCK_BYTES] = block.try_into().expect("a block");
            compress256(&mut self.state, std::slice::from_ref(block));
            block[..COPY_BYTES].copy_from_slice(rest);
            self.compressed += BLOCK_BYTES as u64;
            self.len -= BLOCK_BYTES;
        }
    }

    /// A checksum of everything so far.
    pub(crate) fn checksum(&self) -> u32 {
        checksum(self.state[0], &self.buffer[..self.len])
    }

    /// Returns the digest. The stream is of no use afterwards.
    pub(crate) fn finish(&mut self) -> [u8; 32] {
        let bits = self.len() * 8;
        self.buffer[self.len..].fill(0);
        self.buffer[self.len] = 0x80;
        if self.len >= BLOCK_BYTES - size_of_val(&bits) {
            self.len = BLOCK_BYTES;
            self.compress_full();
            self.buffer[..BLOCK_BYTES].fill(0);
        }
        let Some(block) = self.buffer.first_chunk_mut::<BLOCK_BYTES>() else { unreachable!() };
        block[BLOCK_BYTES - size_of_val(&bits)..].copy_from_slice(&bits.to_be_bytes());
        compress256(&mut self.state, std::slice::from_ref(block));
        let mut digest = [0; 32];
        for (bytes, word) in digest.as_chunks_mut().0.iter_mut().zip(self.state) {
            *bytes = word.to_be_bytes();
        }
        digest
    }
}

/// A quick checksum, for telling operators what differed. Nothing is decided by it.
pub(crate) fn checksum(seed: u32, bytes: &[u8]) -> u32 {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let mix = |sum: u64, word: [u8; 8]| (sum.rotate_left(23) ^ u64::from_le_bytes(word)).wrapping_mul(FACTOR);
    let (words, rest) = bytes.as_chunks::<8>();
    // The last word overlaps the one before it.
    let last =
        bytes.last_chunk().copied().unwrap_or_else(|| std::array::from_fn(|i| rest.get(i).copied().unwrap_or(0)));
    let sum = mix(words.iter().fold(bytes.len() as u64, |sum, word| mix(sum, *word)), last);
    let sum = (sum ^ u64::from(seed)).wrapping_mul(FACTOR);
    (sum >> 32) as u32 ^ sum as u32
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use sha2::{Digest, Sha256};

    use super::*;

    proptest! {
        #[test]
        fn the_digest_is_that_of_sha_256(pieces in prop::collection::vec((any::<u8>(), prop_oneof![
            prop::collection::vec(any::<u8>(), 0..8),
            prop::collection::vec(any::<u8>(), 0..300),
        ]), 0..12)) {
            let (mut stream, mut whole) = (HashStream::new(), Vec::new());
            for (kind, piece) in &pieces {
                match kind % 5 {
                    4 => {
                        stream.framed(*kind, piece);
                        whole.push(*kind);
                        put_length(piece.len(), |byte| whole.push(byte));
                    }
                    0 => stream.bytes(piece),
                    1 => piece.iter().for_each(|byte| stream.byte(*byte)),
                    2 => stream.text(piece, piece.len()),
                    _ => stream.text(&[piece, &[0xff; 40][..]].concat(), piece.len()),
                }
                whole.extend_from_slice(piece);
                prop_assert_eq!(stream.len(), whole.len() as u64);
            }
            prop_assert_eq!(stream.finish(), <[u8; 32]>::from(Sha256::digest(&whole)));
        }
    }

    #[test]
    fn every_length_is_padded() {
        for length in 0..200 {
            let bytes = vec![b'x'; length];
            let mut stream = HashStream::new();
            stream.bytes(&bytes);
            assert_eq!(stream.finish(), <[u8; 32]>::from(Sha256::digest(&bytes)), "{length}");
        }
    }

    #[test]
    fn checksums_depend_on_every_byte_and_on_the_length() {
        let of = |bytes: &[u8]| {
            let mut stream = HashStream::new();
            stream.bytes(bytes);
            stream.checksum()
        };
        for length in [0, 1, 7, 8, 9, 63, 64, 65, 130] {
            let mut bytes = vec![b'x'; length];
            let before = of(&bytes);
            assert_ne!(before, of(&[&bytes[..], b"\0"].concat()), "{length}");
            for at in 0..length {
                bytes[at] ^= 1;
                assert_ne!(before, of(&bytes), "{length} {at}");
                bytes[at] ^= 1;
            }
        }
    }
}
