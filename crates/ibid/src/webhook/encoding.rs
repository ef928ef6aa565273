use data_encoding::{BASE64_NOPAD, HEXLOWER_PERMISSIVE};

use crate::policy::parse::words;

/// The encoding of a signature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SignatureEncoding {
    /// Hexadecimal digits in either case.
    Hex,
    /// Base64 with padding (RFC 4648, section 4).
    Base64,
}

impl SignatureEncoding {
    /// Decodes the text. Returns `None` unless it is the only valid spelling of its bytes.
    pub fn decode(self, text: &[u8]) -> Option<Vec<u8>> {
        match self {
            Self::Hex => HEXLOWER_PERMISSIVE.decode(text).ok(),
            Self::Base64 => {
                let bare = text.strip_suffix(b"=").unwrap_or(text);
                let bare = bare.strip_suffix(b"=").unwrap_or(bare);
                // Not `BASE64`, which also accepts padding in the middle.
                text.len().is_multiple_of(4).then(|| BASE64_NOPAD.decode(bare).ok())?
            }
        }
    }
}

words!(SignatureEncoding, "encoding", { "hex" => Hex, "base64" => Base64 });

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 4648, section 10.
    #[test]
    fn published_vectors() {
        for (text, hex, base64) in [
            ("", "", ""),
            ("f", "66", "Zg=="),
            ("fo", "666F", "Zm8="),
            ("foo", "666f6f", "Zm9v"),
            ("foob", "666F6F62", "Zm9vYg=="),
            ("fooba", "666F6f6261", "Zm9vYmE="),
            ("foobar", "666F6F626172", "Zm9vYmFy"),
        ] {
            assert_eq!(SignatureEncoding::Hex.decode(hex.as_bytes()).as_deref(), Some(text.as_bytes()), "{hex}");
            assert_eq!(
                SignatureEncoding::Base64.decode(base64.as_bytes()).as_deref(),
                Some(text.as_bytes()),
                "{base64}"
            );
        }
        assert_eq!(SignatureEncoding::Base64.decode(b"+/+/").as_deref(), Some(&[0xfb, 0xff, 0xbf][..]));
    }

    #[test]
    fn nothing_has_a_second_spelling() {
        for text in ["6", "6g", " 66", "0x66", "66 ", "+6"] {
            assert_eq!(SignatureEncoding::Hex.decode(text.as_bytes()), None, "{text:?}");
        }
        for text in
            ["Zg", "Zg=", "Zh==", "Zm9=", "Zm8=Zm8=", "Z===", "====", "Zm9v\n", "Zm9-", "Zm9_", "Zm 9", "=Zm9", "Zg==="]
        {
            assert_eq!(SignatureEncoding::Base64.decode(text.as_bytes()), None, "{text:?}");
        }
    }
}
