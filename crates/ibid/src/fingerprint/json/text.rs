//! The canonical spelling of JSON strings.
//!
//! Invariant: every string has exactly one spelling. Quotes, backslashes and control characters are escaped in the
//! shortest way, with lower-case hex digits; everything else is plain UTF-8. No spelling is shorter, so rewriting a
//! string never makes it longer.
//!
//! Example: `"\u0041\u000a\/"` is spelled `"A\n/"`.

/// The canonical text of a string, with its quotes.
pub(super) fn quoted(plain: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(plain.len() + 2);
    out.push(b'"');
    plain.chars().for_each(|c| push_escaped(c, &mut out));
    out.push(b'"');
    out
}

/// Rewrites the string whose opening quote is at the start of `source`, and returns its length in `source`. Returns
/// `None` if it is not a JSON string.
///
/// `source` must be valid UTF-8.
pub(super) fn rewrite(source: &[u8], out: &mut Vec<u8>) -> Option<usize> {
    out.push(b'"');
    let mut at = 1;
    loop {
        let plain = source[at..].iter().position(|&byte| is_special(byte));
        let end = at + plain?;
        out.extend_from_slice(&source[at..end]);
        match source[end] {
            b'"' => {
                out.push(b'"');
                return Some(end + 1);
            }
            b'\\' => {
                let (c, size) = escape(&source[end..])?;
                push_escaped(c, out);
                at = end + size;
            }
            _ => return None,
        }
    }
}

/// The plain string of a canonical text without its quotes.
pub(super) fn unescape(mut inner: &[u8]) -> Option<String> {
    let mut plain = Vec::with_capacity(inner.len());
    while let Some(at) = inner.iter().position(|&byte| byte == b'\\') {
        plain.extend_from_slice(&inner[..at]);
        let (c, size) = escape(&inner[at..])?;
        plain.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
        inner = &inner[at + size..];
    }
    plain.extend_from_slice(inner);
    String::from_utf8(plain).ok()
}

/// Finds the special bytes inside a string: quotes, backslashes and control characters.
///
/// It searches in blocks ahead of the reader. Neither waits for the other's result, so a modern processor can do both
/// at once.
pub(super) struct SpecialBytes<'a> {
    source: &'a [u8],
    /// The start of the current block.
    block: usize,
    /// The remaining special bytes of the current block, one bit for each byte.
    left: u64,
}

impl<'a> SpecialBytes<'a> {
    pub(super) fn new(source: &'a [u8]) -> Self {
        SpecialBytes { source, block: 0, left: specials(source) }
    }

    /// The first special byte at or after `from`, or the end of the source. Discards everything before `from`.
    #[inline(always)]
    pub(super) fn next(&mut self, from: usize) -> usize {
        loop {
            while self.left == 0 {
                self.block += 64;
                match self.source.get(self.block..) {
                    Some(rest) => self.left = specials(rest),
                    None => return self.source.len(),
                }
            }
            let at = self.block + self.left.trailing_zeros() as usize;
            self.left &= self.left - 1;
            if at >= from {
                return at;
            }
        }
    }
}

/// One bit for each of the first 64 bytes: whether it is special.
#[inline(never)]
fn specials(source: &[u8]) -> u64 {
    match source.first_chunk() {
        Some(block) => specials_of_block(block),
        None => {
            let mut block = [b' '; 64];
            block[..source.len()].copy_from_slice(source);
            specials_of_block(&block)
        }
    }
}

#[inline(always)]
fn specials_of_block(block: &[u8; 64]) -> u64 {
    // Written so that the compiler vectorizes it: each special byte contributes its bit, and the sum of eight is a byte
    // of the result.
    let mut counts = [0; 64];
    for (i, count) in counts.iter_mut().enumerate() {
        *count = if is_special(block[i]) { 1 << (i % 8) } else { 0 };
    }
    let (eights, _) = counts.as_chunks::<8>();
    let mut bits = [0; 8];
    for (byte, eight) in bits.iter_mut().zip(eights) {
        *byte = eight.iter().map(|&count: &u8| u32::from(count)).sum::<u32>() as u8;
    }
    u64::from_le_bytes(bits)
}

#[inline(always)]
fn is_special(byte: u8) -> bool {
    (byte == b'"') | (byte == b'\\') | (byte < 0x20)
}

/// The character of the escape at the start of `source`, and its length.
fn escape(source: &[u8]) -> Option<(char, usize)> {
    let c = match source.get(1)? {
        b'"' => '"',
        b'\\' => '\\',
        b'/' => '/',
        b'b' => '\x08',
        b'f' => '\x0c',
        b'n' => '\n',
        b'r' => '\r',
        b't' => '\t',
        b'u' => return unicode_escape(source),
        _ => return None,
    };
    Some((c, 2))
}

fn unicode_escape(source: &[u8]) -> Option<(char, usize)> {
    let unit = hex4(source.get(2..6)?)?;
    if !(0xd800..0xdc00).contains(&unit) {
        // Fails for a low surrogate on its own.
        return Some((char::from_u32(unit)?, 6));
    }
    let low = match source.get(6..12)? {
        [b'\\', b'u', digits @ ..] => hex4(digits)?,
        _ => return None,
    };
    if !(0xdc00..0xe000).contains(&low) {
        return None;
    }
    let c = char::from_u32(0x1_0000 + ((unit - 0xd800) << 10) + (low - 0xdc00))?;
    Some((c, 12))
}

fn hex4(digits: &[u8]) -> Option<u32> {
    digits.iter().try_fold(0, |sum, &digit| Some(sum << 4 | char::from(digit).to_digit(16)?))
}

/// Appends the canonical spelling of one character.
fn push_escaped(c: char, out: &mut Vec<u8>) {
    let short = match c {
        '"' => b'"',
        '\\' => b'\\',
        '\x08' => b'b',
        '\x0c' => b'f',
        '\n' => b'n',
        '\r' => b'r',
        '\t' => b't',
        '\0'..'\x20' => {
            const HEX: &[u8; 16] = b"0123456789abcdef";
            out.extend_from_slice(b"\\u00");
            out.extend([HEX[c as usize >> 4], HEX[c as usize & 15]]);
            return;
        }
        plain => {
            out.extend_from_slice(plain.encode_utf8(&mut [0; 4]).as_bytes());
            return;
        }
    };
    out.extend([b'\\', short]);
}
