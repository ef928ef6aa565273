//! Idempotency keys and their generation.
//!
//! Invariant: a [`ClientKey`] is 1 to 255 characters of visible ASCII, so it fits into a header. Its `Debug` output is
//! masked; only [`as_str`](ClientKey::as_str) reveals it.

use std::{fmt, time::SystemTime};

use http::HeaderValue;

/// Longest key that an ibid route accepts, in characters.
const MAX_KEY_LENGTH: usize = 255;

/// An idempotency key: the client's name for one operation.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct ClientKey(String);

/// The error of a key that cannot be sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the idempotency key {reason}; a key is 1 to 255 characters of visible ASCII")]
pub struct InvalidKey {
    reason: &'static str,
}

/// Generates the key of a new operation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum KeyGenerator {
    /// A random UUID. The right choice for nearly every operation.
    #[default]
    UuidV4,
    /// A UUID that starts with the current time, so that keys sort by age. Routes that require `uuid4` refuse it.
    UuidV7,
    /// `user:operation:resource:timestamp`, as the `bookings` preset requires. The timestamp is the time of generation
    /// in milliseconds, so the same three parts used twice make two operations.
    Operation {
        /// The user who runs the operation.
        user: String,
        /// The operation, such as `booking.create`.
        operation: String,
        /// The resource that the operation changes.
        resource: String,
    },
    /// A hash of the parts in the shape of a UUID. The same parts always give the same key, on every machine and
    /// without a journal. Safe only if no two operations have the same parts.
    Derived(Vec<String>),
    /// A key that the caller chose.
    Fixed(ClientKey),
}

impl ClientKey {
    /// Checks a key that the caller chose.
    ///
    /// # Errors
    /// [`InvalidKey`] if the text is empty, longer than 255 characters, or contains anything but visible ASCII.
    pub fn new(text: impl Into<String>) -> Result<ClientKey, InvalidKey> {
        let text = text.into();
        let why = match text.len() {
            0 => "is empty",
            length if length > MAX_KEY_LENGTH => "is too long",
            _ if !text.bytes().all(|byte| byte.is_ascii_graphic()) => "has a character that is not allowed",
            _ => return Ok(ClientKey(text)),
        };
        Err(InvalidKey { reason: why })
    }

    /// The key in clear.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The key for logs and messages: `550e****0000`.
    pub fn masked(&self) -> String {
        ibid::mask(&self.0)
    }

    /// The header value: the bare key if it parses back to the same key, else a quoted string.
    pub(crate) fn header(&self) -> HeaderValue {
        let bare = ibid::key::extract_key(self.0.as_bytes()).is_ok_and(|read| read == self.0);
        let sent =
            if bare { self.0.clone() } else { format!("\"{}\"", self.0.replace('\\', "\\\\").replace('"', "\\\"")) };
        HeaderValue::try_from(sent).expect("visible ASCII")
    }

    /// Parses the key header that the caller has set.
    pub(crate) fn from_header(value: &HeaderValue) -> Result<ClientKey, InvalidKey> {
        let read = ibid::key::extract_key(value.as_bytes())
            .map_err(|_| InvalidKey { reason: "in the request cannot be read" })?;
        ClientKey::new(read)
    }
}

impl KeyGenerator {
    /// Derives the key from these parts: `KeyGenerator::derived(["invoice", "17"])`.
    pub fn derived<T: Into<String>>(parts: impl IntoIterator<Item = T>) -> KeyGenerator {
        KeyGenerator::Derived(parts.into_iter().map(Into::into).collect())
    }

    /// Whether `generate` returns the same key every time.
    pub(crate) fn is_deterministic(&self) -> bool {
        matches!(self, KeyGenerator::Derived(_) | KeyGenerator::Fixed(_))
    }

    pub(crate) fn generate(&self, now: SystemTime) -> Result<ClientKey, InvalidKey> {
        match self {
            KeyGenerator::UuidV4 => Ok(ClientKey(ibid::generate_key())),
            KeyGenerator::UuidV7 => Ok(ClientKey(uuid_v7(now))),
            KeyGenerator::Operation { user, operation, resource } => {
                let key = ClientKey::new(format!("{user}:{operation}:{resource}:{}", unix_millis(now)))?;
                match ibid::key::KeyFormat::Operation.check(key.as_str()) {
                    Ok(()) => Ok(key),
                    Err(_) => Err(InvalidKey { reason: "has an empty part, or a part with a colon in it" }),
                }
            }
            KeyGenerator::Derived(parts) => {
                let parts: Vec<_> = parts.iter().map(String::as_str).collect();
                Ok(ClientKey(ibid::derive_key(&parts)))
            }
            KeyGenerator::Fixed(key) => Ok(key.clone()),
        }
    }
}

/// RFC 9562: 48 bits of milliseconds, then random bits. A random UUID supplies those and the variant.
fn uuid_v7(now: SystemTime) -> String {
    let time = format!("{:012x}", unix_millis(now) & 0xffff_ffff_ffff);
    let random = ibid::generate_key();
    format!("{}-{}-7{}", &time[..8], &time[8..], &random[15..])
}

fn unix_millis(time: SystemTime) -> u128 {
    time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis()
}

impl fmt::Debug for ClientKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ClientKey").field(&format_args!("{}", self.masked())).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(ms: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_millis(ms)
    }

    #[test]
    fn each_mint_makes_what_it_says() {
        let mint = |mint: &KeyGenerator| mint.generate(at(1_704_067_200_000)).unwrap();
        assert!(ibid::key::KeyFormat::Uuid4.check(mint(&KeyGenerator::UuidV4).as_str()).is_ok());
        let seven = mint(&KeyGenerator::UuidV7);
        assert!(seven.as_str().starts_with("018cc251-f400-7"), "{}", seven.as_str());
        assert!(ibid::key::KeyFormat::Uuid.check(seven.as_str()).is_ok(), "{}", seven.as_str());
        assert!(matches!(seven.as_str().as_bytes()[19], b'8' | b'9' | b'a' | b'b'));
        assert_ne!(seven, mint(&KeyGenerator::UuidV7));
        let named =
            KeyGenerator::Operation { user: "u1".into(), operation: "booking.create".into(), resource: "r9".into() };
        assert_eq!(mint(&named).as_str(), "u1:booking.create:r9:1704067200000");
        assert_eq!(mint(&KeyGenerator::derived(["ab", "c"])).as_str(), ibid::derive_key(&["ab", "c"]));
        // The JavaScript client derives the same key.
        assert_eq!(
            mint(&KeyGenerator::derived(["invoice", "17", "\u{fc}"])).as_str(),
            "0ee9896b-d819-4c46-9b73-128482f0ff3a"
        );
        assert_ne!(mint(&KeyGenerator::derived(["ab", "c"])), mint(&KeyGenerator::derived(["a", "bc"])));
    }

    #[test]
    fn later_keys_of_version_7_sort_after_earlier_ones() {
        let earlier = uuid_v7(at(1_704_067_200_000));
        assert!(earlier < uuid_v7(at(1_704_067_200_001)));
    }

    #[test]
    fn a_key_that_cannot_be_sent_is_refused() {
        for bad in ["", " ", "a b", "a\n", "schl\u{fc}ssel", &"k".repeat(256)] {
            assert!(ClientKey::new(bad).is_err(), "{bad:?}");
        }
        let colon = KeyGenerator::Operation { user: "u:1".into(), operation: "o".into(), resource: "r".into() };
        let empty = KeyGenerator::Operation { user: String::new(), operation: "o".into(), resource: "r".into() };
        for mint in [colon, empty] {
            assert!(mint.generate(SystemTime::now()).is_err(), "{mint:?}");
        }
    }

    #[test]
    fn what_is_sent_is_read_back_as_the_same_key() {
        for text in ["abc", "a,b", "a;b", "\"", "a\"b", "\\", "a\\b,", "u1:o:r:1"] {
            let key = ClientKey::new(text).unwrap();
            assert_eq!(ClientKey::from_header(&key.header()).unwrap(), key, "{text}");
        }
        assert_eq!(ClientKey::new("u1:o:r:1").unwrap().header(), "u1:o:r:1");
    }

    #[test]
    fn debug_shows_no_key() {
        let shown =
            format!("{:?}", KeyGenerator::Fixed(ClientKey::new("550e8400-e29b-41d4-a716-446655440000").unwrap()));
        assert_eq!(shown, "Fixed(ClientKey(550e****0000))");
    }
}
