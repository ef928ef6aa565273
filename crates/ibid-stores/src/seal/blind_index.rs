//! Keyed forms of tags and fingerprints that the store and its operators can still use.
//!
//! - A **tag** becomes the first half of its HMAC. Equal tags have equal values, so they can be searched with the
//!   secret. Without it, a reader sees only which entries share a tag.
//! - A **fingerprint** is enciphered, not hashed, because callers need the holder's fingerprint back. A Feistel network
//!   of four rounds over HMAC-SHA-256 permutes its 256 bits (Luby and Rackoff), differently for every address. So the
//!   same request looks different at each address, and requests cannot be guessed without the secret.
//!
//! Both keys derive from the address secret and stay the same when the record keys are rotated.

use data_encoding::HEXLOWER;
use hmac::{Hmac, KeyInit as _, Mac};
use ibid::store::{Address, EntryFilter, Fingerprint, Tags};
use sha2::Sha256;

use super::keys::derive_key;

const HKDF_SALT: &[u8] = b"ibid seal v1";
const FEISTEL_ROUNDS: u8 = 4;
/// Set in the version of an enciphered fingerprint.
const ENCIPHERED_FLAG: u8 = 0x80;

pub(super) struct BlindIndex {
    tags: Hmac<Sha256>,
    fingerprints: Hmac<Sha256>,
}

impl BlindIndex {
    pub(super) fn new(secret: &[u8; 32]) -> Self {
        let keyed = |info: &[u8]| {
            <Hmac<Sha256>>::new_from_slice(&derive_key(secret, HKDF_SALT, info)).expect("any length will do")
        };
        Self { tags: keyed(b"tags"), fingerprints: keyed(b"fingerprints") }
    }

    pub(super) fn index_tags(&self, tags: &Tags) -> Tags {
        let tags = [tags.tenant(), tags.user(), tags.endpoint(), tags.key(), tags.key_hash()];
        if tags.iter().all(|tag| tag.is_empty()) {
            return Tags::default();
        }
        let mut which = 0..;
        let hidden = tags.map(|tag| self.index_tag(which.next().unwrap_or_default(), tag));
        Tags::from_parts(hidden.each_ref().map(String::as_str))
    }

    pub(super) fn index_filter(&self, filter: &EntryFilter) -> EntryFilter {
        let keyed = |which, tag: &Option<String>| tag.as_deref().map(|tag| self.index_tag(which, truncate_tag(tag)));
        EntryFilter {
            tenant: keyed(0, &filter.tenant),
            user: keyed(1, &filter.user),
            endpoint: keyed(2, &filter.endpoint),
            key: keyed(3, &filter.key),
            key_hash: keyed(4, &filter.key_hash),
            ..filter.clone()
        }
    }

    /// Returns 32 hex digits. An empty tag stays empty: that there is no user is not secret.
    fn index_tag(&self, which: u8, tag: &str) -> String {
        if tag.is_empty() {
            return String::new();
        }
        let mut mac = self.tags.clone();
        mac.update(&[which]);
        mac.update(tag.as_bytes());
        let mac: [u8; 32] = mac.finalize().into_bytes().into();
        HEXLOWER.encode(&mac[..16])
    }

    pub(super) fn encipher(&self, at: &Address, plain: &Fingerprint) -> Fingerprint {
        let [mut left, mut right] = halves(&plain.digest);
        for round in 0..FEISTEL_ROUNDS {
            (left, right) = (right, left ^ self.round_mask(round, plain.version, at, right));
        }
        Fingerprint { version: plain.version | ENCIPHERED_FLAG, digest: join_halves(left, right) }
    }

    /// Returns `None` if the fingerprint is not enciphered.
    pub(super) fn decipher(&self, at: &Address, hidden: &Fingerprint) -> Option<Fingerprint> {
        if !is_enciphered(hidden) {
            return None;
        }
        let version = hidden.version & !ENCIPHERED_FLAG;
        let [mut left, mut right] = halves(&hidden.digest);
        for round in (0..FEISTEL_ROUNDS).rev() {
            (left, right) = (right ^ self.round_mask(round, version, at, left), left);
        }
        Some(Fingerprint { version, digest: join_halves(left, right) })
    }

    fn round_mask(&self, round: u8, version: u8, at: &Address, half: u128) -> u128 {
        let mut mac = self.fingerprints.clone();
        mac.update(&[round, version]);
        mac.update(&at.0);
        mac.update(&half.to_be_bytes());
        let mac: [u8; 32] = mac.finalize().into_bytes().into();
        halves(&mac)[0]
    }
}

pub(super) fn is_enciphered(fingerprint: &Fingerprint) -> bool {
    fingerprint.version & ENCIPHERED_FLAG != 0
}

/// Truncates as [`Tags::new`] does.
fn truncate_tag(tag: &str) -> &str {
    &tag[..tag.floor_char_boundary(1024)]
}

fn halves(digest: &[u8; 32]) -> [u128; 2] {
    [&digest[..16], &digest[16..]].map(|half| u128::from_be_bytes(half.try_into().expect("a half")))
}

fn join_halves(left: u128, right: u128) -> [u8; 32] {
    let mut digest = [0; 32];
    digest[..16].copy_from_slice(&left.to_be_bytes());
    digest[16..].copy_from_slice(&right.to_be_bytes());
    digest
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_same_tag_is_the_same_text_and_says_nothing() {
        let hiding = BlindIndex::new(&[1; 32]);
        let hidden = hiding.index_tags(&Tags::new("acme", "acme", "", "k-1"));
        assert_eq!(hidden, hiding.index_tags(&Tags::new("acme", "acme", "", "k-1")));
        assert_ne!(hidden.tenant(), hidden.user(), "a tenant is not found as a user");
        assert_eq!((hidden.endpoint(), hidden.tenant().len()), ("", 32));
        assert_ne!(hidden, BlindIndex::new(&[2; 32]).index_tags(&Tags::new("acme", "acme", "", "k-1")));
        let long = "x".repeat(2000);
        let filter = EntryFilter { tenant: Some("acme".into()), key: Some(long.clone()), ..EntryFilter::default() };
        let asked = hiding.index_filter(&filter);
        let found = hiding.index_tags(&Tags::new("acme", "", "", &long));
        assert_eq!((asked.tenant.as_deref(), asked.user), (Some(found.tenant()), None));
        assert_eq!(asked.key.as_deref(), Some(found.key()), "cut at the same place");
        let exact = hiding.index_tags(&Tags::from_parts(["acme", "", "", "****", "0123456789abcdef"]));
        let filter = EntryFilter { key_hash: Some("0123456789abcdef".into()), ..EntryFilter::default() };
        assert_eq!(hiding.index_filter(&filter).key_hash.as_deref(), Some(exact.key_hash()));
        assert_ne!(exact.key_hash(), "0123456789abcdef");
    }

    proptest! {
        #[test]
        fn a_fingerprint_comes_back_at_its_own_address_only(
            digest: [u8; 32], version in 0_u8..0x80, at: [u8; 32], other: [u8; 32],
        ) {
            let hiding = BlindIndex::new(&[1; 32]);
            let plain = Fingerprint { version, digest };
            let hidden = hiding.encipher(&Address(at), &plain);
            prop_assert_eq!(hidden, hiding.encipher(&Address(at), &plain));
            prop_assert_ne!(hidden.digest, plain.digest);
            prop_assert_eq!(hiding.decipher(&Address(at), &hidden), Some(plain));
            prop_assert_eq!(hiding.decipher(&Address(at), &plain), None);
            if at != other {
                prop_assert_ne!(hiding.decipher(&Address(other), &hidden), Some(plain));
            }
            prop_assert_ne!(BlindIndex::new(&[2; 32]).decipher(&Address(at), &hidden), Some(plain));
        }
    }
}
