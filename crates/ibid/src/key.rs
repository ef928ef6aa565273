//! Extracts, validates and masks idempotency keys.
//!
//! A key header contains an RFC 8941 string (`"k"`) or a bare key (`k`); both mean the same key. Ambiguous input is
//! refused: two headers, lists, parameters, bad escapes, spaces, and anything but visible ASCII. Under
//! [`KeyFormat::Raw`] the header's value is the key.
//!
//! All sources create an [`IdempotencyKey`], whose constructors check characters, length and format and fold the case.
//! Each key therefore has one spelling and one address.
//!
//! ```
//! use ibid::{key::KeyFormat, mask};
//!
//! let key = ibid::key::extract_key(b"\"550e8400-e29b-41d4-a716-446655440000\"").unwrap();
//! assert!(KeyFormat::Uuid4.check(&key).is_ok());
//! assert_eq!(mask(&key), "550e****0000");
//! ```

use std::{fmt, str::FromStr};

use data_encoding::HEXLOWER;
use http::HeaderName;
use sha2::{Digest, Sha256};

use crate::{
    fingerprint::JsonPointer,
    policy::{InvalidSetting, KeyPolicy, parse::words},
    store::Fingerprint,
};

#[cfg(test)]
mod tests;

/// A key that a policy accepts, in its canonical spelling.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct IdempotencyKey(String);

/// A source of the key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeySource {
    /// A header.
    Header(HeaderName),
    /// A string or number in a JSON body.
    Json(JsonPointer),
    /// A query parameter.
    Query(String),
    /// The fingerprint itself, for double clicks of clients that send no key.
    Body,
}

/// The format of valid keys.
#[derive(Debug, Clone, PartialEq)]
pub enum KeyFormat {
    /// Visible ASCII.
    Any,
    /// Visible ASCII and spaces, including quotes: the value is used as it is.
    Raw,
    /// A hyphenated UUID in any case.
    Uuid,
    /// A hyphenated UUID of version 4 in any case.
    Uuid4,
    /// A hyphenated UUID of version 7 in any case.
    Uuid7,
    /// A UUID, or 16 to 255 letters, digits, `_` and `-`.
    Token,
    /// `user:operation:resource:timestamp`.
    Operation,
    /// Keys that the pattern matches as a whole.
    Regex(KeyFormatPattern),
}

/// Why a key is not valid: one sentence with the rule that it violates.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct KeyError(String);

impl From<&str> for KeyError {
    fn from(message: &str) -> Self {
        Self(message.into())
    }
}

impl KeyError {
    fn bad_byte(byte: u8) -> Self {
        Self(format!("the key has the byte {byte:#04x}; only visible ASCII is allowed"))
    }
}

impl From<KeyError> for String {
    fn from(error: KeyError) -> Self {
        error.0
    }
}

/// A regular expression that must match the whole key.
#[derive(Debug, Clone)]
pub struct KeyFormatPattern {
    source: String,
    regex: regex_lite::Regex,
}

impl IdempotencyKey {
    /// Creates a key from a header's value, which is unquoted unless the format is raw.
    ///
    /// # Errors
    /// One sentence with the rule that the key violates.
    pub fn from_header(rules: &KeyPolicy, value: &[u8]) -> Result<Self, KeyError> {
        match rules.format {
            KeyFormat::Raw => Self::new(rules, value.trim_ascii()),
            _ => Self::checked(rules, extract_key(value)?),
        }
    }

    /// Creates a key from the bytes of any other source.
    ///
    /// # Errors
    /// One sentence with the rule that the key violates.
    pub fn new(rules: &KeyPolicy, key: impl Into<Vec<u8>>) -> Result<Self, KeyError> {
        let key = key.into();
        let first = if rules.format == KeyFormat::Raw { b' ' } else { b'!' };
        match key.iter().find(|byte| !(first..=b'~').contains(*byte)) {
            None if key.is_empty() => Err("the key is empty".into()),
            None if key.trim_ascii().is_empty() => Err("the key is blank".into()),
            None => Self::checked(rules, String::from_utf8(key).expect("just seen to be ASCII")),
            Some(byte) => Err(KeyError::bad_byte(*byte)),
        }
    }

    /// Uses the request's fingerprint as key, for clients that send none.
    pub(crate) fn of_request(fingerprint: &Fingerprint) -> Self {
        Self(hex(&fingerprint.digest))
    }

    fn checked(rules: &KeyPolicy, mut key: String) -> Result<Self, KeyError> {
        if key.len() > rules.max_length {
            let (length, most) = (key.len(), rules.max_length);
            return Err(KeyError(format!("the key has {length} characters; at most {most} are allowed")));
        }
        rules.format.check(&key)?;
        if rules.format.folds_case() {
            key.make_ascii_lowercase();
        }
        Ok(Self(key))
    }

    /// The key as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Converts the key into its text.
    pub fn into_string(self) -> String {
        self.0
    }
}

impl fmt::Debug for IdempotencyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IdempotencyKey({})", mask(&self.0))
    }
}

/// Parses the value of a key header: an RFC 8941 string or a bare key.
///
/// # Errors
/// One sentence with the rule that the value violates.
pub fn extract_key(value: &[u8]) -> Result<String, KeyError> {
    let value = value.trim_ascii();
    let Some((first, rest)) = value.split_first() else {
        return Err("the key is empty".into());
    };
    if *first != b'"' {
        return parse_bare_key(value);
    }
    let mut key = String::with_capacity(rest.len());
    let mut bytes = rest.iter();
    loop {
        match bytes.next() {
            None => return Err("the quote around the key is not closed".into()),
            Some(b'"') => break,
            Some(b'\\') => match bytes.next() {
                Some(escaped @ (b'"' | b'\\')) => key.push(char::from(*escaped)),
                _ => return Err("in a quoted key a backslash may only stand before \" or another backslash".into()),
            },
            Some(byte @ 0x20..=0x7e) => key.push(char::from(*byte)),
            Some(byte) => return Err(KeyError::bad_byte(*byte)),
        }
    }
    match bytes.as_slice().trim_ascii() {
        [] if key.trim().is_empty() => Err("the key is blank".into()),
        [] if key.contains(' ') => Err("the key has a space in it; only visible ASCII is allowed".into()),
        [] => Ok(key),
        [b',', ..] => Err("the header has a list of keys; send one".into()),
        [b';', ..] => Err("the key has parameters; send it alone".into()),
        _ => Err("something follows the key's closing quote".into()),
    }
}

fn parse_bare_key(value: &[u8]) -> Result<String, KeyError> {
    let is_plain = |byte: u8| (0x21..=0x7e).contains(&byte) & (byte != b',') & (byte != b';') & (byte != b'"');
    // Without an early exit, so that it is checked many bytes at a time. The loop finds out what is wrong.
    let is_valid = value.iter().fold(true, |is_valid, byte| is_valid & is_plain(*byte));
    for byte in if is_valid { &[] } else { value } {
        match byte {
            b',' => return Err("the header has a comma; send one key, and quote it if it has a comma in it".into()),
            b';' => return Err("the header has a semicolon; quote a key that has one in it".into()),
            b'"' => return Err("a quote stands inside a key that is not quoted".into()),
            0x21..=0x7e => {}
            b' ' => return Err("the key has a space in it; only visible ASCII is allowed".into()),
            _ => return Err(KeyError::bad_byte(*byte)),
        }
    }
    Ok(String::from_utf8(value.to_vec()).expect("just seen to be ASCII"))
}

/// Generates a random key: a UUID of version 4.
pub fn generate_key() -> String {
    format_uuid4(crate::store::ClaimToken::mint().0)
}

/// Derives a key from parts that identify the operation. Equal parts give equal keys, so no two operations may have the
/// same parts.
pub fn derive_key(parts: &[&str]) -> String {
    format_uuid4(*framed_digest(parts).first_chunk().expect("16 of 32"))
}

/// Identifies an operation: equal in all its attempts, and another one for each key and each caller. Displays as 32 hex
/// digits, the value of the header `Ibid-Operation`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct OperationId([u8; 16]);

impl OperationId {
    /// The operation of the key at this address: the second half of it.
    pub fn of(address: &crate::store::Address) -> Self {
        Self(*address.0.last_chunk().expect("16 of 32"))
    }

    /// The hex digits.
    pub fn hex(&self) -> [u8; 32] {
        HexDigits::<32>::of(&self.0).digits
    }
}

impl fmt::Display for OperationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(HexDigits::<32>::of(&self.0).as_str())
    }
}

/// The key of a call that a handler makes to another service: equal in all attempts of the operation, and another one
/// for each name. A handler that runs again then repeats its calls under their keys, and none takes effect twice.
///
/// `operation` is the header `Ibid-Operation` of the handler's request, or [`RunInfo`](crate::http::RunInfo)'s.
///
/// ```
/// let operation = "2a8b6c1f9d3e4075b1c2d3e4f5061728";
/// assert_eq!(ibid::outbound_key(operation, "charge"), "a9678bcf-85c6-47ab-85f3-0557ab89a3c5");
/// ```
pub fn outbound_key(operation: impl fmt::Display, name: &str) -> String {
    derive_key(&[&operation.to_string(), name])
}

/// Hashes parts, each with its length.
pub(crate) fn framed_digest(parts: &[&str]) -> [u8; 32] {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

fn format_uuid4(bytes: [u8; 16]) -> String {
    String::from_utf8(uuid4_text(bytes).to_vec()).expect("hex digits and hyphens")
}

/// The text of a UUID of version 4, in hex digits and hyphens.
pub(crate) fn uuid4_text(mut bytes: [u8; 16]) -> [u8; 36] {
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let mut text = [b'-'; 36];
    let (words, _) = bytes.as_chunks();
    let (second, third) = (hex_digits(words[1]), hex_digits(words[2]));
    text[..8].copy_from_slice(&hex_digits(words[0]));
    text[9..13].copy_from_slice(&second[..4]);
    text[14..18].copy_from_slice(&second[4..]);
    text[19..23].copy_from_slice(&third[..4]);
    text[24..28].copy_from_slice(&third[4..]);
    text[28..].copy_from_slice(&hex_digits(words[3]));
    text
}

/// The lower-case hex digits of four bytes, all at once.
#[inline]
fn hex_digits(bytes: [u8; 4]) -> [u8; 8] {
    const EACH: u64 = 0x0101_0101_0101_0101;
    // One nibble in each byte, in the order of the digits.
    let mut nibbles = u64::from(u32::from_be_bytes(bytes));
    nibbles = (nibbles | nibbles << 16) & 0x0000_ffff_0000_ffff;
    nibbles = (nibbles | nibbles << 8) & 0x00ff_00ff_00ff_00ff;
    nibbles = (nibbles | nibbles << 4) & (EACH * 0x0f);
    // Six more than nine carries into the next nibble: a letter.
    let letters = (nibbles + EACH * 6) >> 4 & EACH;
    (nibbles + EACH * u64::from(b'0') + letters * u64::from(b'a' - b'9' - 1)).to_be_bytes()
}

/// Whether a key is a UUID, or 16 to 255 letters, digits, `_` and `-`.
pub fn is_valid_key(key: &str) -> bool {
    KeyFormat::Token.check(key).is_ok()
}

/// Masks a key for logs: shows the first and last four characters, and nothing of a key under twelve.
pub fn mask(key: &str) -> String {
    MaskedKey::of(key).as_str().to_owned()
}

/// A masked key. The default is empty.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MaskedKey {
    /// Eight characters of at most four bytes, and four asterisks.
    text: [u8; 36],
    length: u8,
}

impl MaskedKey {
    pub(crate) fn of(key: &str) -> Self {
        let mut masked = Self::default();
        let is_ascii = key.is_ascii();
        let length = if is_ascii { key.len() } else { key.chars().take(12).count() };
        if length < 12 {
            masked.push("****");
            return masked;
        }
        let at = |nth: Option<(usize, char)>| nth.map_or(0, |(at, _)| at);
        let (first, last) = match is_ascii {
            true => (4, key.len() - 4),
            false => (at(key.char_indices().nth(4)), at(key.char_indices().nth_back(3))),
        };
        [&key[..first], "****", &key[last..]].into_iter().for_each(|part| masked.push(part));
        masked
    }

    fn push(&mut self, part: &str) {
        self.text[usize::from(self.length)..][..part.len()].copy_from_slice(part.as_bytes());
        self.length += part.len() as u8;
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.text[..usize::from(self.length)]
    }

    pub(crate) fn as_str(&self) -> &str {
        std::str::from_utf8(self.as_bytes()).expect("cut between characters")
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.length == 0
    }
}

impl Default for MaskedKey {
    fn default() -> Self {
        Self { text: [0; 36], length: 0 }
    }
}

/// `N` lower-case hex digits. The default is empty.
#[derive(Clone, Copy)]
pub(crate) struct HexDigits<const N: usize> {
    digits: [u8; N],
    is_empty: bool,
}

impl<const N: usize> HexDigits<N> {
    /// Formats `N / 2` bytes.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        let mut digits = [0; N];
        for (digits, bytes) in digits.chunks_mut(8).zip(bytes.chunks(4)) {
            let mut word = [0; 4];
            word[..bytes.len()].copy_from_slice(bytes);
            digits.copy_from_slice(&hex_digits(word)[..digits.len()]);
        }
        Self { digits, is_empty: false }
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        if self.is_empty { &[] } else { &self.digits }
    }

    pub(crate) fn as_str(&self) -> &str {
        std::str::from_utf8(self.as_bytes()).expect("hex digits")
    }
}

impl<const N: usize> Default for HexDigits<N> {
    fn default() -> Self {
        Self { digits: [0; N], is_empty: true }
    }
}

/// Formats bytes as lower-case hex digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    HEXLOWER.encode(bytes)
}

impl KeyFormat {
    /// Checks that a key has this format.
    ///
    /// # Errors
    /// A description of the format, for the sender.
    pub fn check(&self, key: &str) -> Result<(), KeyError> {
        let is_word = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
        let (fits, must, what) = match self {
            Self::Any | Self::Raw => return Ok(()),
            Self::Uuid => (is_uuid(key), "be", "a UUID with hyphens, such as 550e8400-e29b-41d4-a716-446655440000"),
            Self::Uuid4 => {
                let example = "a UUID of version 4 with hyphens, such as 550e8400-e29b-41d4-a716-446655440000";
                (is_uuid_of_version(key, b'4'), "be", example)
            }
            Self::Uuid7 => {
                let example = "a UUID of version 7 with hyphens, such as 017f22e2-79b0-7cc3-98c4-dc0c0c07398f";
                (is_uuid_of_version(key, b'7'), "be", example)
            }
            Self::Token => {
                let fits = is_uuid(key) || (16..=255).contains(&key.len()) && key.bytes().all(is_word);
                (fits, "be", "a UUID, or 16 to 255 letters, digits, _ and -")
            }
            Self::Operation => {
                (is_operation(key), "be", "user:operation:resource:timestamp, the timestamp in 1 to 20 digits")
            }
            Self::Regex(pattern) => (pattern.regex.is_match(key), "match", &*pattern.source),
        };
        if fits { Ok(()) } else { Err(KeyError(format!("the key must {must} {what}"))) }
    }

    /// Whether keys are lower-cased before the address is computed.
    pub fn folds_case(&self) -> bool {
        matches!(self, Self::Uuid | Self::Uuid4 | Self::Uuid7)
    }
}

/// Whether a text is a UUID with hyphens, in any case.
pub(crate) fn is_uuid(key: &str) -> bool {
    key.len() == 36
        && key.bytes().enumerate().all(|(at, byte)| match at {
            8 | 13 | 18 | 23 => byte == b'-',
            _ => byte.is_ascii_hexdigit(),
        })
}

fn is_uuid_of_version(key: &str, version: u8) -> bool {
    is_uuid(key) && key.as_bytes()[14] == version && b"89abAB".contains(&key.as_bytes()[19])
}

fn is_operation(key: &str) -> bool {
    let parts: Vec<_> = key.split(':').collect();
    let [user, operation, resource, timestamp] = parts[..] else { return false };
    let digits = timestamp.bytes().all(|byte| byte.is_ascii_digit());
    ![user, operation, resource].contains(&"") && (1..=20).contains(&timestamp.len()) && digits
}

impl PartialEq for KeyFormatPattern {
    fn eq(&self, other: &Self) -> bool {
        self.source == other.source
    }
}

impl fmt::Display for KeyFormatPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.source)
    }
}

fn parse_pattern(pattern: &str) -> Result<Option<KeyFormatPattern>, InvalidSetting> {
    let regex = regex_lite::Regex::new(&format!("^(?:{pattern})$"))
        .map_err(|why| format!("{pattern:?} is no regular expression: {why}"))?;
    Ok(Some(KeyFormatPattern { source: pattern.into(), regex }))
}

words!(
    KeyFormat, "key format",
    {
        "any" => Any, "raw" => Raw, "uuid" => Uuid, "uuid4" => Uuid4, "uuid7" => Uuid7, "token" => Token,
        "operation" => Operation,
    },
    "regex:" "PATTERN" => Regex by parse_pattern
);

impl FromStr for KeySource {
    type Err = InvalidSetting;

    fn from_str(text: &str) -> Result<Self, InvalidSetting> {
        let source = match text.split_once(':') {
            None if text == "body" => Some(Self::Body),
            Some(("header", name)) => HeaderName::from_str(name).ok().map(Self::Header),
            Some(("json", pointer)) => {
                Some(Self::Json(JsonPointer::parse(pointer).map_err(|why| format!("{text:?}: {why}"))?))
            }
            Some(("query", name)) if !name.is_empty() => Some(Self::Query(name.into())),
            _ => None,
        };
        let allowed = "\"header:NAME\" \"json:/pointer\" \"query:NAME\" \"body\"";
        source.ok_or_else(|| format!("{text:?} is no source of a key; allowed are {allowed}").into())
    }
}

impl fmt::Display for KeySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Header(name) => write!(f, "header:{name}"),
            Self::Json(pointer) => write!(f, "json:{pointer}"),
            Self::Query(name) => write!(f, "query:{name}"),
            Self::Body => f.write_str("body"),
        }
    }
}
