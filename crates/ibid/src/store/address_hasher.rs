//! Hashes addresses. Addresses are digests, so little mixing is needed besides the secret.

use std::hash::{BuildHasher, Hasher};

use super::ClaimToken;

/// Builds hashers of addresses with one random secret per table: callers choose what addresses are digests of, and must
/// not be able to force collisions.
#[derive(Debug, Clone)]
pub struct AddressHashBuilder([u64; 2]);

/// Hashes one address.
#[derive(Debug)]
pub struct AddressHasher {
    seeds: [u64; 2],
    hash: u64,
}

impl Default for AddressHashBuilder {
    fn default() -> Self {
        // From the source of tokens, so that a simulation can repeat the order of a table's entries.
        let secret = u128::from_le_bytes(ClaimToken::mint().0);
        Self([secret as u64, (secret >> 64) as u64])
    }
}

impl BuildHasher for AddressHashBuilder {
    type Hasher = AddressHasher;

    #[inline]
    fn build_hasher(&self) -> AddressHasher {
        AddressHasher { seeds: self.0, hash: 0 }
    }
}

impl AddressHasher {
    #[inline]
    fn mix(&mut self, pair: &[u8; 16]) {
        let pair = u128::from_le_bytes(*pair);
        let (first, second) = (pair as u64, (pair >> 64) as u64);
        let folded = u128::from(first ^ self.seeds[0]) * u128::from(second ^ self.seeds[1]);
        self.hash = self.hash.rotate_left(23) ^ folded as u64 ^ (folded >> 64) as u64;
    }
}

impl Hasher for AddressHasher {
    #[inline]
    fn write(&mut self, digest: &[u8]) {
        let (pairs, rest) = digest.as_chunks();
        pairs.iter().for_each(|pair| self.mix(pair));
        if !rest.is_empty() {
            let mut last = [0; 16];
            last[..rest.len()].copy_from_slice(rest);
            self.mix(&last);
        }
    }

    /// No length prefix is needed: all addresses have the same length.
    fn write_usize(&mut self, _: usize) {}

    fn finish(&self) -> u64 {
        self.hash
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use sha2::{Digest, Sha256};

    use super::{super::Address, *};

    #[test]
    fn every_byte_of_an_address_and_the_secret_matter() {
        let (one, other) = (AddressHashBuilder::default(), AddressHashBuilder::default());
        let mut seen = HashSet::from([one.hash_one(Address([7; 32]))]);
        for at in 0..32 {
            let mut address = Address([7; 32]);
            address.0[at] = 8;
            assert!(seen.insert(one.hash_one(address)), "byte {at}");
            assert_ne!(one.hash_one(address), other.hash_one(address));
        }
    }

    #[test]
    fn addresses_spread_over_the_low_and_the_high_bits() {
        let seeded = AddressHashBuilder::default();
        let hashes = (0..4096_u64).map(|n| {
            // Real addresses are digests too.
            seeded.hash_one(Address(Sha256::digest(n.to_le_bytes()).into()))
        });
        let (low, high): (HashSet<_>, HashSet<_>) = hashes.map(|hash| (hash % 1024, hash >> 57)).unzip();
        assert!(low.len() > 900 && high.len() > 100, "{} {}", low.len(), high.len());
    }
}
