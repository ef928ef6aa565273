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
