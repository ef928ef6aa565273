use std::{fmt, str::FromStr};

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
            Self::Hex => decode_hex(text),
            Self::Base64 => decode_base64(text),
        }
    }
}

fn decode_hex(text: &[u8]) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let (pairs, []) = text.as_chunks::<2>() else { return None };
    pairs.iter().map(|[high, low]| Some(digit(*high)? << 4 | digit(*low)?)).collect()
}

/// Decodes strictly, so that every value has one spelling: padding is required, and unused bits must be zero.
fn decode_base64(text: &[u8]) -> Option<Vec<u8>> {
    let (groups, []) = text.as_chunks::<4>() else { return None };
    let mut bytes = Vec::with_capacity(groups.len() * 3);
    for (at, group) in groups.iter().enumerate() {
        let padding = group.iter().rev().take_while(|byte| **byte == b'=').count();
        if padding > 2 || padding > 0 && at + 1 < groups.len() {
            return None;
        }
        let mut bits = 0_u32;
        for byte in &group[..4 - padding] {
            bits = bits << 6 | sextet(*byte)?;
        }
        bits <<= 6 * padding;
        let [_, decoded @ ..] = bits.to_be_bytes();
        let (kept, behind) = decoded.split_at(3 - padding);
        if behind.iter().any(|byte| *byte != 0) {
            return None;
        }
        bytes.extend_from_slice(kept);
    }
    Some(bytes)
}

fn sextet(byte: u8) -> Option<u32> {
    Some(u32::from(match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    }))
}

impl FromStr for SignatureEncoding {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "hex" => Ok(Self::Hex),
            "base64" => Ok(Self::Base64),
            _ => Err(format!("{text:?} is no encoding; allowed are \"hex\" \"base64\"")),
        }
    }
}

impl fmt::Display for SignatureEncoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hex => "hex",
            Self::Base64 => "base64",
        })
    }
}

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
