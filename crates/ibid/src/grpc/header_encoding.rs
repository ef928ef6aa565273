//! Encodes text and bytes for headers: percent-encoding and base64.

/// Encodes `grpc-message`: visible ASCII except `%` stays, everything else is escaped as UTF-8 bytes.
pub(super) fn percent_encode(text: &str) -> String {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b' '..=b'~' if byte != b'%' => out.push(byte.into()),
            _ => {
                out.push('%');
                out.push(DIGITS[usize::from(byte >> 4)].into());
                out.push(DIGITS[usize::from(byte & 15)].into());
            }
        }
    }
    out
}

/// Encodes a `-bin` header: standard base64 without padding, as the protocol requires.
pub(super) fn base64_encode(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let at = |nth: usize| u32::from(three.get(nth).copied().unwrap_or(0));
        let bits = at(0) << 16 | at(1) << 8 | at(2);
        for nth in 0..=three.len() {
            out.push(LETTERS[(bits >> (18 - 6 * nth) & 63) as usize].into());
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_encoded_byte_by_byte() {
        for (text, encoded) in [
            ("plain text, 100 times", "plain text, 100 times"),
            ("100%", "100%25"),
            ("a\nb\tc", "a%0Ab%09c"),
            ("café ☕", "caf%C3%A9 %E2%98%95"),
            ("~\u{7f}", "~%7F"),
            ("", ""),
        ] {
            assert_eq!(percent_encode(text), encoded);
        }
    }

    #[test]
    fn base64_is_that_of_rfc_4648_without_padding() {
        for (bytes, encoded) in [
            ("", ""),
            ("f", "Zg"),
            ("fo", "Zm8"),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg"),
            ("fooba", "Zm9vYmE"),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64_encode(bytes.as_bytes()), encoded);
        }
        assert_eq!(base64_encode(&[0xff, 0xef, 0xfe]), "/+/+");
    }
}
