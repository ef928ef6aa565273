//! Remembers the fingerprints of recent replays. A retry is nearly always the same bytes as the retry before it, and then
//! needs no canonical form. First requests are not remembered: most are never retried, and they would displace the others.
//!
//! Two requests are the same bytes if their [tags](RequestTag) are equal. A tag has the method, the lengths of the target
//! and the body, and two sums of the universal hash NH (Black, Halevi, Krawczyk, Krovetz and Rogaway: "UMAC", 1999) under
//! a random secret of the process; the second sum uses the secret shifted by one pair. Any two different requests of the
//! same lengths have equal sums with a probability of 2⁻¹²⁸. No tag leaves the process.
//!
//! Invariant: the memo only spares work. What it returns is what would be computed: same address, same bytes, same route.

use std::sync::{Arc, LazyLock};

use http::Method;
use parking_lot::Mutex;

use super::{FingerprintInput, PartDigests};
use crate::{
    policy::{FingerprintPart, Policy},
    store::{Address, Fingerprint},
};

const SHARD_COUNT: usize = 64;
/// How many fingerprints a shard holds. A newer one replaces another one of its slot.
const SLOTS_PER_SHARD: usize = 256;
/// Requests with more bytes have no tag.
const MAX_TAGGED_BYTES: usize = 16 << 10;

/// The secret, and one pair of words more for the second sum.
static SECRET: LazyLock<Box<[[u64; 2]]>> = LazyLock::new(|| {
    let mut bytes = vec![[0; 16]; MAX_TAGGED_BYTES / 16 + 1];
    getrandom::fill(bytes.as_flattened_mut()).expect("the system's source of randomness");
    bytes.iter().map(words).collect()
});

/// Identifies the bytes that a fingerprint is computed of.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct RequestTag {
    method: Method,
    lengths: [usize; 2],
    sums: [u128; 2],
}

/// The fingerprints of recent replays. `R` is what determines how they are computed.
pub(crate) struct FingerprintMemo<R> {
    /// Allocated when first used.
    shards: [Mutex<MemoShard<R>>; SHARD_COUNT],
}

type MemoShard<R> = Box<[Option<MemoSlot<R>>]>;

struct MemoSlot<R> {
    address: Address,
    /// Kept, so that no other route can have its place in memory.
    route: Arc<R>,
    tag: RequestTag,
    made: (Fingerprint, PartDigests),
}

impl FingerprintInput<'_> {
    /// The tag of a request of which only the method, the target and a JSON body count.
    #[inline(never)]
    pub(crate) fn tag(&self, policy: &Policy) -> Option<RequestTag> {
        let found = &self.found;
        let has_other_headers = found.content_coding || found.method_override || found.precondition;
        let is_plain = found.is_plain_json && !has_other_headers && self.trailers.is_none();
        let counts = |part: &FingerprintPart| !matches!(part, FingerprintPart::Header(_));
        if !is_plain || !policy.fingerprint.iter().all(counts) {
            return None;
        }
        let target = self.uri.path_and_query()?.as_str();
        let parts = [self.body, target.as_bytes()];
        let lengths = parts.map(<[u8]>::len);
        let mut secret = &SECRET[..];
        if lengths.map(|length| length.div_ceil(16)).iter().sum::<usize>() >= secret.len() {
            return None;
        }
        let mut sums = [0; 2];
        for part in parts {
            let (pairs, rest) = part.as_chunks();
            add(&mut sums, pairs, &mut secret);
            if !rest.is_empty() {
                // It overlaps the pair before it.
                let last = part.last_chunk().copied().unwrap_or_else(|| padded(rest));
                add(&mut sums, &[last], &mut secret);
            }
        }
        Some(RequestTag { method: self.method.clone(), lengths, sums })
    }
}

/// Adds pairs of words to both sums, and takes their part of the secret.
#[inline]
fn add(sums: &mut [u128; 2], pairs: &[[u8; 16]], secret: &mut &[[u64; 2]]) {
    let product = |pair: [u64; 2], secret: [u64; 2]| {
        u128::from(pair[0].wrapping_add(secret[0])) * u128::from(pair[1].wrapping_add(secret[1]))
    };
    let [mut first, mut second] = *sums;
    // The second sum has the secret of the next pair.
    let mut own = secret[0];
    for (pair, next) in pairs.iter().zip(&secret[1..]) {
        let pair = words(pair);
        first = first.wrapping_add(product(pair, own));
        second = second.wrapping_add(product(pair, *next));
        own = *next;
    }
    (*sums, *secret) = ([first, second], &secret[pairs.len()..]);
}

fn padded(bytes: &[u8]) -> [u8; 16] {
    let mut padded = [0; 16];
    padded[..bytes.len()].copy_from_slice(bytes);
    padded
}

fn words(pair: &[u8; 16]) -> [u64; 2] {
    let pair = u128::from_le_bytes(*pair);
    [pair as u64, (pair >> 64) as u64]
}

impl<R> FingerprintMemo<R> {
    /// Returns the fingerprint of the same request at this address under the same route. Calls `tag` only if one with
    /// that address is remembered.
    pub(crate) fn find(
        &self, at: &Address, route: &Arc<R>, tag: impl FnOnce() -> Option<RequestTag>,
    ) -> Option<(Fingerprint, PartDigests)> {
        let (shard, slot) = place(at);
        let (known, made) = {
            let slots = self.shards[shard].lock();
            let found = slots.get(slot)?.as_ref()?;
            if found.address != *at || !Arc::ptr_eq(&found.route, route) {
                return None;
            }
            (found.tag.clone(), found.made)
        };
        (tag()? == known).then_some(made)
    }

    /// Remembers a fingerprint in the slot of its address, in place of the one that is there.
    pub(crate) fn insert(&self, at: &Address, route: &Arc<R>, tag: RequestTag, made: (Fingerprint, PartDigests)) {
        let (shard, slot) = place(at);
        let mut slots = self.shards[shard].lock();
        if slots.is_empty() {
            *slots = (0..SLOTS_PER_SHARD).map(|_| None).collect();
        }
        match &mut slots[slot] {
            Some(known) if Arc::ptr_eq(&known.route, route) => {
                (known.address, known.tag, known.made) = (*at, tag, made)
            }
            slot => *slot = Some(MemoSlot { address: *at, route: route.clone(), tag, made }),
        }
    }
}

/// The shard of an address, and the slot in it. Addresses are digests.
fn place(at: &Address) -> (usize, usize) {
    (usize::from(at.0[0]) % SHARD_COUNT, usize::from(at.0[1]) % SLOTS_PER_SHARD)
}

impl<R> Default for FingerprintMemo<R> {
    fn default() -> Self {
        Self { shards: std::array::from_fn(|_| Mutex::default()) }
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, HeaderValue, Uri, header};

    use super::*;
    use crate::{fingerprint::FoundHeaders, sent_names::SentHeaders};

    fn with_input<T>(
        method: &str, uri: &str, headers: &[(&'static str, &str)], body: &[u8],
        read: impl FnOnce(FingerprintInput<'_>) -> T,
    ) -> T {
        let mut all = HeaderMap::new();
        for (name, value) in headers {
            all.append(*name, HeaderValue::from_str(value).unwrap());
        }
        let (method, uri): (Method, Uri) = (method.parse().unwrap(), uri.parse().unwrap());
        let found = FoundHeaders::of(&SentHeaders::of(&all));
        read(FingerprintInput { method: &method, uri: &uri, headers: &all, found, body, trailers: None })
    }

    const JSON: (&str, &str) = ("content-type", "application/json");

    fn tag(method: &str, uri: &str, body: &[u8]) -> Option<RequestTag> {
        with_input(method, uri, &[JSON], body, |input| input.tag(&Policy::ietf()))
    }

    #[test]
    fn every_byte_counts_and_where_it_stands() {
        for length in [0, 1, 15, 16, 17, 300] {
            let mut body = vec![b'x'; length];
            let before = tag("POST", "/p?q", &body);
            assert!(before.is_some() && before == tag("POST", "/p?q", &body));
            for at in 0..length {
                body[at] ^= 1;
                assert!(before != tag("POST", "/p?q", &body), "{length} {at}");
                body[at] ^= 1;
            }
            body.push(0);
            assert!(before != tag("POST", "/p?q", &body), "{length}");
        }
        let all =
            [tag("POST", "/p", b"ab"), tag("POST", "/pa", b"b"), tag("POST", "/p?", b"ab"), tag("PUT", "/p", b"ab")];
        for (at, one) in all.iter().enumerate() {
            assert!(one.is_some() && !all[..at].contains(one), "{at}");
        }
        let swapped = [[1_u8; 16], [2; 16]].concat();
        assert!(tag("POST", "/p", &swapped) != tag("POST", "/p", &[[2_u8; 16], [1; 16]].concat()));
    }

    #[test]
    fn requests_of_which_more_counts_have_no_tag() {
        let is_tagged = |policy: &Policy, headers: &[(&'static str, &str)]| {
            with_input("POST", "/p", headers, b"{}", |input| input.tag(policy).is_some())
        };
        let ietf = Policy::ietf();
        assert!(is_tagged(&ietf, &[JSON, ("x-other", "1")]));
        assert!(
            !is_tagged(&ietf, &[])
                && !is_tagged(&ietf, &[JSON, JSON])
                && !is_tagged(&ietf, &[("content-type", "text/plain")])
        );
        for other in ["content-encoding", "if-match", "content-range", "x-http-method-override"] {
            assert!(!is_tagged(&ietf, &[JSON, (other, "a")]), "{other}");
        }
        let mut policy = Policy::ietf();
        policy.fingerprint.push(FingerprintPart::Header(header::ACCEPT));
        assert!(!is_tagged(&policy, &[JSON]));
        let trailers = HeaderMap::new();
        with_input("POST", "/p", &[JSON], b"{}", |input| {
            assert!(FingerprintInput { trailers: Some(&trailers), ..input }.tag(&ietf).is_none());
        });
        let long = vec![b'x'; MAX_TAGGED_BYTES];
        assert!(tag("POST", "/p", &long).is_none() && tag("POST", "/p", &long[16..]).is_some());
        assert!(tag("POST", "/p", &long[15..]).is_none());
    }

    #[test]
    fn only_the_same_request_at_the_same_address_and_route_is_found() {
        let (memo, route) = (FingerprintMemo::default(), Arc::new(()));
        let (at, mut other) = (Address([7; 32]), Address([7; 32]));
        other.0[31] = 8;
        let made = (Fingerprint { version: 3, digest: [9; 32] }, PartDigests::default());
        let [one, two] = [tag("POST", "/p", b"1").unwrap(), tag("POST", "/p", b"2").unwrap()];
        let find = |at: &Address, route: &Arc<()>, tag: &RequestTag| memo.find(at, route, || Some(tag.clone()));
        let is_unread = || -> Option<RequestTag> { panic!("no tag is needed") };
        assert_eq!(memo.find(&at, &route, is_unread), None);
        memo.insert(&at, &route, one.clone(), made);
        assert_eq!(find(&at, &route, &one), Some(made));
        assert_eq!(find(&at, &route, &two), None);
        assert_eq!(memo.find(&at, &route, || None), None);
        assert_eq!(memo.find(&other, &route, is_unread), None);
        assert_eq!(memo.find(&at, &Arc::new(()), is_unread), None);
        memo.insert(&other, &Arc::new(()), two, made);
        assert_eq!(memo.find(&at, &route, is_unread), None, "both have the same slot");
    }
}
