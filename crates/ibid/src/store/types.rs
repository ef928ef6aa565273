use std::{cell::RefCell, fmt, str, time::Duration};

use bytes::Bytes;
use data_encoding::HEXLOWER_PERMISSIVE;

use crate::{fingerprint::HashStream, key::HexDigits};

/// The address of an entry: a digest of scope and key. Displays as 64 hex digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Address(pub [u8; 32]);

/// 128 random bits that identify one claim.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ClaimToken(pub [u8; 16]);

/// Identifies a holder. Fences only grow per address; the upstream receives them too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fence(pub u64);

/// A digest of the parts that make two requests the same, with the version of its rules.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint {
    /// The version of the rules.
    pub version: u8,
    /// A SHA-256 digest.
    pub digest: [u8; 32],
}

/// The tags that operators search by: tenant, user, endpoint, the displayed key, and a hash of the whole key. Stored in
/// one allocation.
#[derive(Clone, PartialEq, Eq, Hash, Default)]
pub struct Tags(Bytes);

impl Address {
    /// Parses 64 hex digits.
    pub fn from_hex(hex: &str) -> Option<Self> {
        let bytes = HEXLOWER_PERMISSIVE.decode(hex.as_bytes()).ok()?;
        bytes.try_into().ok().map(Self)
    }
}

impl ClaimToken {
    /// Creates a random token.
    ///
    /// # Panics
    /// If the system has no source of randomness.
    pub fn mint() -> Self {
        Self(RANDOM.with_borrow_mut(TokenRng::take))
    }

    /// Makes all tokens and pauses of this thread follow from a seed, so that a simulation can be repeated. Such tokens
    /// can be guessed.
    #[cfg(feature = "simulation")]
    pub fn seed_thread(seed: u64) {
        RANDOM.with_borrow_mut(|random| *random = TokenRng { seed: Some(seed), ..TokenRng::NEW });
    }
}

thread_local!(static RANDOM: RefCell<TokenRng> = const { RefCell::new(TokenRng::NEW) });

/// Buffers random bytes, so that one system call serves 64 tokens.
struct TokenRng {
    bytes: [[u8; 16]; 64],
    left: usize,
    #[cfg(feature = "simulation")]
    seed: Option<u64>,
}

impl TokenRng {
    const NEW: Self = Self {
        bytes: [[0; 16]; 64],
        left: 0,
        #[cfg(feature = "simulation")]
        seed: None,
    };

    fn take(&mut self) -> [u8; 16] {
        #[cfg(feature = "simulation")]
        if let Some(seed) = &mut self.seed {
            *seed += 1;
            return *<sha2::Sha256 as sha2::Digest>::digest(seed.to_le_bytes()).first_chunk().expect("32 bytes");
        }
        if self.left == 0 {
            getrandom::fill(self.bytes.as_flattened_mut()).expect("the system's source of randomness");
            self.left = self.bytes.len();
        }
        self.left -= 1;
        // Clears the bytes, so that no token is returned twice or stays in memory.
        std::mem::take(&mut self.bytes[self.left])
    }
}

impl Fence {
    /// The fence of a claim whose response was lost. Such a claim is settled by its token alone.
    pub const UNSEEN: Self = Self(0);
}

impl Fingerprint {
    /// The fingerprint of a request of which nothing is compared.
    pub const NONE: Self = Self { version: 0, digest: [0; 32] };
}

impl Tags {
    /// Creates tags without a hash of the key. Each part is cut to 1,024 bytes at a character boundary.
    pub fn new(tenant: &str, user: &str, endpoint: &str, key: &str) -> Self {
        Self::from_parts([tenant, user, endpoint, key, ""])
    }

    /// Like [`new`](Self::new), with `key_hash` as the last part. An empty hash is omitted.
    pub fn from_parts(parts: [&str; 5]) -> Self {
        Self::encode(parts.map(cut_tag))
    }

    /// Encodes parts that are short enough, and valid UTF-8.
    fn encode(parts: [&[u8]; 5]) -> Self {
        let mut all = Vec::new();
        Self::write(parts, &mut all);
        Self(all.into())
    }

    /// Appends what [`from_written`](Self::from_written) reads.
    pub(crate) fn write(parts: [&[u8]; 5], out: &mut Vec<u8>) {
        for part in if parts[4].is_empty() { &parts[..4] } else { &parts[..] } {
            out.extend_from_slice(&(part.len() as u16).to_be_bytes());
            out.extend_from_slice(part);
        }
    }

    /// The tags in bytes that [`write`](Self::write) appended.
    pub(crate) fn from_written(bytes: Bytes) -> Self {
        Self(bytes)
    }

    /// Parses the result of [`Self::as_bytes`]. Returns `None` if the bytes are malformed.
    pub fn from_bytes(bytes: Bytes) -> Option<Self> {
        let mut rest = &bytes[..];
        if !rest.is_empty() {
            let mut parts = 0;
            while parts < 4 || (parts == 4 && !rest.is_empty()) {
                parts += 1;
                let (length, tail) = rest.split_first_chunk::<2>()?;
                let (part, tail) = tail.split_at_checked(u16::from_be_bytes(*length).into())?;
                str::from_utf8(part).ok()?;
                rest = tail;
            }
        }
        rest.is_empty().then_some(Self(bytes))
    }

    /// The encoded form that stores keep.
    pub fn as_bytes(&self) -> &Bytes {
        &self.0
    }

    /// The tenant, which is the first part of the scope.
    pub fn tenant(&self) -> &str {
        self.part(0)
    }

    /// The user who sent the request.
    pub fn user(&self) -> &str {
        self.part(1)
    }

    /// Method and route, or the RPC.
    pub fn endpoint(&self) -> &str {
        self.part(2)
    }

    /// The key, clear or masked depending on the policy.
    pub fn key(&self) -> &str {
        self.part(3)
    }

    /// The [`key_hash`] of the whole key, as the store sees it. May be empty.
    pub fn key_hash(&self) -> &str {
        self.part(4)
    }

    fn part(&self, nth: usize) -> &str {
        let mut rest = &self.0[..];
        for at in 0.. {
            let Some((length, tail)) = rest.split_first_chunk::<2>() else { break };
            let (part, tail) = tail.split_at(u16::from_be_bytes(*length).into());
            if at == nth {
                return str::from_utf8(part).unwrap_or_default();
            }
            rest = tail;
        }
        ""
    }
}

/// The bytes of a tag, at most 1,024 and cut at a character boundary.
pub(crate) fn cut_tag(text: &str) -> &[u8] {
    &text.as_bytes()[..text.floor_char_boundary(1024)]
}

/// Returns a random duration between half of `pause` and all of it, so that many processes do not retry together.
pub fn with_jitter(pause: Duration) -> Duration {
    let [random, ..] = ClaimToken::mint().0;
    pause / 2 + pause / 2 * u32::from(random) / 255
}

/// Hashes a key, so that operators can find it although only a part is displayed: 16 hex digits of a SHA-256 with its
/// own prefix. A store that seals keys the hash with its secret.
pub fn key_hash(key: &str) -> String {
    key_hash_digits(key).as_str().to_owned()
}

/// Like [`key_hash`], without an allocation.
pub(crate) fn key_hash_digits(key: &str) -> HexDigits<16> {
    if key.is_empty() {
        return HexDigits::default();
    }
    let mut hash = HashStream::new();
    hash.bytes(b"ibid key ");
    hash.bytes(key.as_bytes());
    HexDigits::of(&hash.finish()[..8])
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Address({self})")
    }
}

impl fmt::Debug for ClaimToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, ..] = self.0;
        write!(f, "ClaimToken({a:02x}{b:02x}…)")
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, .., y, z] = self.digest;
        write!(f, "Fingerprint(v{} {a:02x}{b:02x}****{y:02x}{z:02x})", self.version)
    }
}

impl fmt::Debug for Tags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tags")
            .field("tenant", &self.tenant())
            .field("user", &self.user())
            .field("endpoint", &self.endpoint())
            .field("key", &self.key())
            .finish()
    }
}

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn tags_come_back_as_they_were_put_in() {
        let tags = Tags::new("acme", "", "POST /payments", "550e****0000");
        assert_eq!(
            (tags.tenant(), tags.user(), tags.endpoint(), tags.key()),
            ("acme", "", "POST /payments", "550e****0000")
        );
        assert_eq!(Tags::from_bytes(tags.as_bytes().clone()), Some(tags));
        assert_eq!(Tags::default().key(), "");
        assert_eq!(Tags::from_bytes(Bytes::from_static(b"\0\x05abc")), None);
        let hashed = Tags::from_parts(["acme", "", "POST /payments", "550e****0000", &key_hash("550e-0000")]);
        assert_eq!((hashed.key(), hashed.key_hash()), ("550e****0000", key_hash("550e-0000").as_str()));
        assert_eq!(Tags::from_bytes(hashed.as_bytes().clone()), Some(hashed.clone()));
        let longer = [&hashed.as_bytes()[..], b"\0\x01x"].concat();
        assert_eq!(Tags::from_bytes(longer.into()), None);
    }

    /// The SQL functions compute the same hash.
    #[test]
    fn a_hash_of_a_key_is_as_it_was() {
        assert_eq!(key_hash("abc-123"), "52859189666fa8e9");
        assert_eq!(key_hash(""), "");
    }

    #[test]
    fn no_two_tokens_are_the_same() {
        let tokens: HashSet<_> = (0..1000).map(|_| ClaimToken::mint()).collect();
        assert_eq!(tokens.len(), 1000);
        assert!(!tokens.contains(&ClaimToken([0; 16])));
    }

    #[test]
    fn a_long_tag_is_cut_between_characters() {
        let tags = Tags::new(&"é".repeat(600), "", "", "k");
        assert_eq!(tags.tenant().len(), 1024);
        assert_eq!(tags.key(), "k");
    }

    #[test]
    fn an_address_reads_its_own_hex_and_nothing_else() {
        let address = Address([0xa5; 32]);
        assert_eq!(Address::from_hex(&address.to_string()), Some(address));
        assert_eq!(Address::from_hex("a5"), None);
        assert_eq!(Address::from_hex(&"+f".repeat(32)), None);
    }
}
