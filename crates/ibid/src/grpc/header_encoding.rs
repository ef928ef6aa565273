//! Encodes text and bytes for headers: percent-encoding and base64.

use data_encoding::BASE64_NOPAD;
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

/// Encodes `grpc-message`: visible ASCII except `%` stays, everything else is escaped as UTF-8 bytes.
pub(super) fn percent_encode(text: &str) -> String {
    const ESCAPED: &AsciiSet = &CONTROLS.add(b'%');
    utf8_percent_encode(text, ESCAPED).to_string()
}

/// Encodes a `-bin` header: standard base64 without padding, as the protocol requires.
pub(super) fn base64_encode(bytes: &[u8]) -> String {
    BASE64_NOPAD.encode(bytes)
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
