//! The tokens of JSON, eight or sixteen bytes at a time.

use wide::{i8x16, u8x16};

#[inline(always)]
pub(super) fn peek(text: &[u8], pos: usize) -> Option<u8> {
    text.get(pos).copied()
}

/// A text that can be read in chunks of sixteen bytes, also at its ends.
#[derive(Clone, Copy)]
pub(super) struct ChunkedText<'t> {
    text: &'t [u8],
    edges: &'t TextEdges,
}

/// A zero and the first bytes of a text, and its last bytes and zeros.
pub(super) struct TextEdges([u8; 48]);

impl TextEdges {
    pub(super) fn of(text: &[u8]) -> Self {
        let mut edges = [0; 48];
        match (text.first_chunk::<15>(), text.last_chunk::<16>()) {
            // Copies of fixed size are faster.
            (Some(first), Some(last)) => {
                edges[1..16].copy_from_slice(first);
                edges[16..32].copy_from_slice(last);
            }
            _ => {
                edges[1..=text.len()].copy_from_slice(text);
                edges[32 - text.len()..32].copy_from_slice(text);
            }
        }
        Self(edges)
    }
}

impl<'t> ChunkedText<'t> {
    pub(super) fn new(text: &'t [u8], edges: &'t TextEdges) -> Self {
        Self { text, edges }
    }

    /// The chunk at a position, which is not beyond the end. Zeros follow the end, and one precedes the start, whose
    /// position is the maximum.
    #[inline(always)]
    pub(super) fn chunk(self, pos: u32) -> &'t [u8; 16] {
        match self.text.get(pos as usize..pos as usize + 16).and_then(|chunk| chunk.first_chunk()) {
            Some(chunk) => chunk,
            None => self.chunk_at_edge(pos),
        }
    }

    /// The end of the space at a position.
    #[inline(always)]
    pub(super) fn after_space(self, mut pos: u32) -> u32 {
        loop {
            let bytes = u8x16::new(*self.chunk(pos));
            let is = |byte| bytes.simd_eq(u8x16::splat(byte));
            let size = (is(b' ') | is(b'\n') | is(b'\r') | is(b'\t')).to_bitmask().trailing_ones();
            pos += size;
            if size < 16 {
                return pos;
            }
        }
    }

    /// The length of the string at a position, if it has only plain characters.
    #[inline(never)]
    pub(super) fn plain_string(self, pos: u32) -> Option<u32> {
        let mut end = pos + 1;
        while (end as usize) < self.text.len() {
            let specials = specials(self.chunk(end));
            end += (specials | 1 << 16).trailing_zeros();
            if specials != 0 {
                return (peek(self.text, end as usize) == Some(b'"')).then_some(end + 1 - pos);
            }
        }
        None
    }

    /// The length of the number at a position.
    pub(super) fn number(self, pos: u32) -> Option<u32> {
        number(self.text, pos)
    }

    #[cold]
    #[inline(never)]
    fn chunk_at_edge(self, pos: u32) -> &'t [u8; 16] {
        let start = if pos == u32::MAX { 0 } else { (32 + pos as usize).saturating_sub(self.text.len()).clamp(16, 32) };
        self.edges.0[start..].first_chunk().expect("sixteen bytes")
    }
}

/// The bytes that are equal in two chunks, one bit for each.
#[inline(always)]
pub(super) fn equal_bytes(one: &[u8; 16], other: &[u8; 16]) -> u32 {
    u8x16::new(*one).simd_eq(u8x16::new(*other)).to_bitmask()
}

/// The index of the first byte after the first two that is no plain character of a string: a quote, a backslash, a
/// control character or not ASCII. Sixteen if there is none.
#[inline(always)]
pub(super) fn plain_end(chunk: &[u8; 16]) -> usize {
    (specials(chunk) & !3 | 1 << 16).trailing_zeros() as usize
}

/// The bytes that are no plain characters of a string, one bit for each.
#[inline(always)]
pub(super) fn specials(chunk: &[u8; 16]) -> u32 {
    // Signed, bytes that are not ASCII are negative.
    let bytes = u8x16::new(*chunk).cast_signed();
    let is = |byte: u8| bytes.simd_eq(i8x16::splat(byte as i8));
    (is(b'"') | is(b'\\') | i8x16::splat(0x20).simd_gt(bytes)).to_bitmask()
}

pub(super) fn after_space(text: &[u8], mut pos: usize) -> usize {
    while let Some(b' ' | b'\n' | b'\r' | b'\t') = peek(text, pos) {
        pos += 1;
    }
    pos
}

/// The length of the literal after the first byte of a chunk.
#[inline(always)]
pub(super) fn literal(chunk: &[u8; 16]) -> Option<u32> {
    match chunk {
        [_, b't', b'r', b'u', b'e', ..] | [_, b'n', b'u', b'l', b'l', ..] => Some(4),
        [_, b'f', b'a', b'l', b's', b'e', ..] => Some(5),
        _ => None,
    }
}

/// The number of digits after the first byte of a chunk, which is no digit.
#[inline(always)]
pub(super) fn digits(chunk: &[u8; 16]) -> u32 {
    let values = u8x16::new(*chunk) - u8x16::splat(b'0');
    let digits = values.min(u8x16::splat(9)).simd_eq(values).to_bitmask();
    (digits | 1).trailing_ones() - 1
}

/// The length of the number at a position.
#[inline(never)]
pub(super) fn number(text: &[u8], start: u32) -> Option<u32> {
    let start = start as usize;
    let digits = start + usize::from(peek(text, start) == Some(b'-'));
    let mut pos = after_digits(text, digits)?;
    if peek(text, digits) == Some(b'0') && pos > digits + 1 {
        return None;
    }
    if peek(text, pos) == Some(b'.') {
        pos = after_digits(text, pos + 1)?;
    }
    if let Some(b'e' | b'E') = peek(text, pos) {
        let is_signed = matches!(peek(text, pos + 1), Some(b'+' | b'-'));
        pos = after_digits(text, pos + 1 + usize::from(is_signed))?;
    }
    Some((pos - start) as u32)
}

/// The end of one or more digits.
fn after_digits(text: &[u8], start: usize) -> Option<usize> {
    let mut pos = start;
    while let Some(b'0'..=b'9') = peek(text, pos) {
        pos += 1;
    }
    (pos > start).then_some(pos)
}
