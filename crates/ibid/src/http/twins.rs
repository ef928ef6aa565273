//! Notices when two callers send the same key with the same request: mostly a client that changed its credential
//! between retries, and so is taken for somebody else. Only counted; each caller keeps its own answer.
//!
//! A fixed table of hashes: it forgets, and may miss some, but costs one atomic swap.

use std::{
    array,
    hash::{BuildHasher, RandomState},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use crate::store::{Address, Fingerprint};

const SLOTS: usize = 4096;

#[derive(Debug)]
pub(crate) struct Twins {
    slots: Box<[AtomicU64; SLOTS]>,
    hash: RandomState,
}

impl Default for Twins {
    fn default() -> Self {
        Self { slots: Box::new(array::from_fn(|_| AtomicU64::new(0))), hash: RandomState::new() }
    }
}

impl Twins {
    /// Whether this key and fingerprint were last seen at another address.
    pub(crate) fn seen_elsewhere(&self, key: &str, fingerprint: &Fingerprint, at: &Address) -> bool {
        let hash = self.hash.hash_one((key, fingerprint.digest));
        let who = u64::from_le_bytes(at.0[..8].try_into().expect("8 of 32")) & 0xffff_ffff;
        let tag = hash & 0xffff_ffff_0000_0000;
        let before = self.slots[hash as usize % SLOTS].swap(tag | who, Relaxed);
        before & 0xffff_ffff_0000_0000 == tag && before & 0xffff_ffff != who && before != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_another_address_with_the_same_key_and_request_counts() {
        let twins = Twins::default();
        let (a, b) = (Address([1; 32]), Address([2; 32]));
        let print = Fingerprint::of_bytes(b"x");
        assert!(!twins.seen_elsewhere("k", &print, &a));
        assert!(!twins.seen_elsewhere("k", &print, &a));
        assert!(twins.seen_elsewhere("k", &print, &b));
        assert!(!twins.seen_elsewhere("k", &Fingerprint::of_bytes(b"y"), &a));
    }
}
