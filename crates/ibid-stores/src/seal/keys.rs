//! Encryption keys by id, and the secret for derived keys that must never change.

use std::{fmt, sync::Arc};

use chacha20poly1305::{KeyInit as _, XChaCha20Poly1305};
use hkdf::Hkdf;
use parking_lot::RwLock;
use sha2::Sha256;

use super::blind_index::BlindIndex;

/// Maximum length of a key id in bytes.
pub(super) const MAX_KEY_ID_LEN: usize = 64;

/// An encryption key and its id, which encrypted bytes carry. `Debug` hides the key.
#[derive(Clone, PartialEq, Eq)]
pub struct SealKey {
    id: String,
    key: [u8; 32],
}

/// An id that a key cannot have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no key's id; allowed are 1 to {MAX_KEY_ID_LEN} letters, digits, \"_\" \"-\" \".\"")]
pub struct SealKeyIdError(String);

/// Encrypts and decrypts records. Clones share their keys, and change them together.
#[derive(Clone)]
pub struct Sealer(pub(super) Arc<SealerInner>);

pub(super) struct SealerInner {
    pub(super) blind_index: BlindIndex,
    key_ring: RwLock<Arc<KeyRing>>,
}

/// The part that can change at run time.
pub(super) struct KeyRing {
    /// The first key encrypts, all decrypt.
    keys: Vec<(String, XChaCha20Poly1305)>,
    pub(super) options: SealOptions,
}

/// Encryption settings besides the keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SealOptions {
    /// Accepts records that are not encrypted. Anyone who can write to the store can then forge answers.
    pub accept_plain: bool,
    /// Compresses records before they are encrypted.
    pub compress: bool,
}

impl Default for SealOptions {
    fn default() -> Self {
        Self { accept_plain: false, compress: true }
    }
}

impl SealKey {
    /// Creates a key from 32 random bytes and an id of up to 64 letters, digits, `_`, `-`, `.`
    ///
    /// # Errors
    /// Returns an error if the id is not allowed.
    pub fn new(id: &str, key: [u8; 32]) -> Result<Self, SealKeyIdError> {
        if !is_key_id(id.as_bytes()) {
            return Err(SealKeyIdError(id.into()));
        }
        Ok(Self { id: id.into(), key })
    }

    /// Returns the key's id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Returns `true` if the key consists of these bytes.
    pub fn has_key_bytes(&self, bytes: &[u8; 32]) -> bool {
        self.key == *bytes
    }
}

/// Restricts the characters, so that an id from any source can be displayed.
pub(super) fn is_key_id(id: &[u8]) -> bool {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    (1..=MAX_KEY_ID_LEN).contains(&id.len()) && id.iter().all(plain)
}

impl Sealer {
    /// Creates a sealer. `first` encrypts; `first` and `others` decrypt. The keys of tags and fingerprints derive from
    /// `secret`, which must not change while records exist.
    pub fn new(first: SealKey, others: Vec<SealKey>, secret: &[u8; 32], rules: SealOptions) -> Self {
        let with = RwLock::new(Arc::new(KeyRing::new(first, others, rules)));
        Self(Arc::new(SealerInner { blind_index: BlindIndex::new(secret), key_ring: with }))
    }

    /// Replaces the keys and options for all later calls.
    pub fn rekey(&self, first: SealKey, others: Vec<SealKey>, rules: SealOptions) {
        *self.0.key_ring.write() = Arc::new(KeyRing::new(first, others, rules));
    }

    /// Returns the ids of the keys. The first one encrypts.
    pub fn key_ids(&self) -> Vec<String> {
        self.key_ring().keys.iter().map(|(id, _)| id.clone()).collect()
    }

    pub(super) fn key_ring(&self) -> Arc<KeyRing> {
        self.0.key_ring.read().clone()
    }
}

impl KeyRing {
    fn new(first: SealKey, others: Vec<SealKey>, options: SealOptions) -> Self {
        let cipher = |key: SealKey| (key.id, XChaCha20Poly1305::new(&key.key.into()));
        Self { keys: [first].into_iter().chain(others).map(cipher).collect(), options }
    }

    pub(super) fn sealing_key(&self) -> (&str, &XChaCha20Poly1305) {
        let (id, cipher) = &self.keys[0];
        (id, cipher)
    }

    pub(super) fn find_cipher(&self, id: &str) -> Option<&XChaCha20Poly1305> {
        self.keys.iter().find(|(known, _)| known == id).map(|(_, cipher)| cipher)
    }
}

/// HKDF with SHA-256 (RFC 5869), to 32 bytes.
pub(super) fn derive_key(secret: &[u8], salt: &[u8], info: &[u8]) -> [u8; 32] {
    let mut key = [0; 32];
    Hkdf::<Sha256>::new(Some(salt), secret).expand(info, &mut key).expect("32 bytes is a valid length");
    key
}

impl fmt::Debug for SealKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SealKey({}, ****)", self.id)
    }
}

impl fmt::Debug for Sealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sealer")
            .field("keys", &self.key_ids())
            .field("rules", &self.key_ring().options)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(hex: &str) -> Vec<u8> {
        hex.as_bytes().chunks(2).map(|pair| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
    }

    /// RFC 5869, A.1 and A.3: the first 32 bytes of their output.
    #[test]
    fn published_vectors() {
        let (secret, salt, info) = ([0x0b; 22], bytes("000102030405060708090a0b0c"), bytes("f0f1f2f3f4f5f6f7f8f9"));
        let given = "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf";
        assert_eq!(derive_key(&secret, &salt, &info)[..], bytes(given));
        let given = "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d";
        assert_eq!(derive_key(&secret, b"", b"")[..], bytes(given));
    }

    #[test]
    fn names_are_plain() {
        for id in ["2026-11", "a", "A_b.c-9", &"x".repeat(64)] {
            assert!(SealKey::new(id, [1; 32]).is_ok(), "{id}");
        }
        for id in ["", "a b", "é", "a\n", "\"", &"x".repeat(65)] {
            let why = SealKey::new(id, [1; 32]).unwrap_err().to_string();
            assert!(why.ends_with("allowed are 1 to 64 letters, digits, \"_\" \"-\" \".\""), "{why}");
        }
    }

    #[test]
    fn keys_are_shown_by_nothing() {
        let key = |id, byte| SealKey::new(id, [byte; 32]).unwrap();
        let sealing = Sealer::new(key("new", 0xab), vec![key("old", 0xcd)], &[0xef; 32], SealOptions::default());
        let shown = format!("{:?} {sealing:?} {sealing:#?}", key("new", 0xab));
        assert!(shown.contains("new") && shown.contains("old"), "{shown}");
        for secret in ["171", "205", "239", "ab", "cd", "ef"] {
            assert!(!shown.contains(secret), "{secret}: {shown}");
        }
    }
}
