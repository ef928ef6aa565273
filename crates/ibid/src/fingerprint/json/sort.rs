//! Sorts members by the bytes of their canonical names.
//!
//! Invariant: sorted members are strictly ascending, so no two have the same name.
//!
//! Sorting takes a considerable part of the time to read a document, and names are short. Each member therefore carries
//! the first bytes of its name as a number, and most comparisons do not read the names.
//!
//! Example: the prefixes of `"amount"` and `"currency"` differ, while those of `"customer"` and `"customer_id"` are
//! equal.

use std::cmp::Ordering;

use super::{
    NameEquality,
    document::{JsonNode, JsonSpan, bytes, strip_quotes},
};

/// The bits that distinguish the case of ASCII letters.
const CASE: u64 = 0x2020_2020_2020_2020;
/// The maximum number of members that are sorted by counting.
const MAX_COUNTING_SORT: usize = 16;

/// The first eight bytes of a name as a number with the same order, see [`JsonNode::prefix`]. Short names are padded
/// with zeros and sort first, because canonical text contains no zero byte.
#[inline(never)]
pub(super) fn prefix(body: &[u8], rewritten: &[u8], name: JsonSpan) -> u64 {
    let name = strip_quotes(bytes(body, rewritten, name));
    let size = name.len().min(8);
    let mut eight = [0; 8];
    eight[..size].copy_from_slice(&name[..size]);
    u64::from_be_bytes(eight)
}

/// The same, if eight bytes can be read from the body. The bytes after a short name are masked out, which is cheaper
/// than not reading them.
#[inline(always)]
pub(super) fn prefix_in(body: &[u8], name: JsonSpan) -> Option<u64> {
    /// For each size of a name, the bits that belong to it.
    const SIZES: [u64; 9] = {
        let mut masks = [u64::MAX; 9];
        let mut size = 0;
        while size < 8 {
            masks[size] = !(u64::MAX >> (8 * size));
            size += 1;
        }
        masks
    };
    let start = name.start as usize + 1;
    let eight: [u8; 8] = body.get(start..start + 8)?.try_into().ok()?;
    let size = (name.end - name.start - 2) as usize;
    Some(u64::from_be_bytes(eight) & SIZES[size.min(8)])
}

/// The orders of objects that were seen last. Objects in arrays mostly have the same names in the same order, and so do
/// the requests of one client.
pub(super) struct MemberOrders([MemberOrder; 8]);

impl MemberOrders {
    pub(super) const fn new() -> Self {
        Self([const { MemberOrder { prefixes: [0; MAX_COUNTING_SORT], sorted: [0; MAX_COUNTING_SORT], len: 0 } }; 8])
    }

    /// The order of a few members: the index of each, sorted. Returns `None` for many, and if two names start alike
    /// apart from the case of ASCII letters.
    #[inline]
    pub(super) fn of(&mut self, members: &[JsonNode]) -> Option<&[u8]> {
        let seed = members.first()?.prefix ^ members.last()?.prefix.rotate_left(16) ^ members.len() as u64;
        let order = &mut self.0[(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 61) as usize];
        if !order.is_of(members) && !order.find(members) {
            return None;
        }
        order.sorted.get(..members.len())
    }
}

/// The order of a few members, by their prefixes.
struct MemberOrder {
    prefixes: [u64; MAX_COUNTING_SORT],
    /// The index of each member in the order in which they are sorted.
    sorted: [u8; MAX_COUNTING_SORT],
    len: usize,
}

impl MemberOrder {
    #[inline]
    fn is_of(&self, members: &[JsonNode]) -> bool {
        self.len == members.len() && self.prefixes.iter().zip(members).all(|(prefix, node)| *prefix == node.prefix)
    }

    /// Counting the predecessors of each member is faster than the unpredictable branches of a sort.
    #[inline(never)]
    fn find(&mut self, members: &[JsonNode]) -> bool {
        self.len = 0;
        if members.len() > MAX_COUNTING_SORT {
            return false;
        }
        let mut places = [0_usize; MAX_COUNTING_SORT];
        for (i, one) in members.iter().enumerate() {
            for (other, other_place) in members[..i].iter().zip(&mut places) {
                if other.prefix | CASE == one.prefix | CASE {
                    return false;
                }
                *other_place += usize::from(other.prefix > one.prefix);
            }
            places[i] = members[..i].iter().map(|other| usize::from(other.prefix < one.prefix)).sum();
        }
        for (i, (one, place)) in members.iter().zip(places).enumerate() {
            self.prefixes[i] = one.prefix;
            self.sorted[place] = i as u8;
        }
        self.len = members.len();
        true
    }
}

/// Sorts members. Returns `None` if two have equal names.
#[inline(never)]
pub(super) fn sort(body: &[u8], rewritten: &[u8], members: &mut [JsonNode], names: NameEquality) -> Option<()> {
    if names == NameEquality::IgnoreCase && has_case_insensitive_duplicates(body, rewritten, members) {
        return None;
    }
    let order = |a: &JsonNode, b: &JsonNode| compare_names(body, rewritten, a, b);
    members.sort_unstable_by(order);
    members.is_sorted_by(|a, b| order(a, b).is_lt()).then_some(())
}

/// Whether two members have names that differ only in case. False positives are harmless: the document is then compared
/// as it was sent.
fn has_case_insensitive_duplicates(body: &[u8], rewritten: &[u8], members: &[JsonNode]) -> bool {
    let folded = |node: &JsonNode| folded_hash(strip_quotes(bytes(body, rewritten, node.name)));
    let mut all: Vec<_> = members.iter().map(folded).collect();
    all.sort_unstable();
    all.windows(2).any(|two| two[0] == two[1])
}

/// Hashes a name so that names that differ only in case are equal.
fn folded_hash(name: &[u8]) -> u64 {
    if name.is_ascii() {
        return case_insensitive_hash(name);
    }
    // Upper case first: the long s and the Kelvin sign only match s and k that way.
    let text = String::from_utf8_lossy(name);
    let folded: String = text.chars().flat_map(char::to_uppercase).flat_map(char::to_lowercase).collect();
    case_insensitive_hash(folded.as_bytes())
}

/// FNV-1a over words, with the case bit of ASCII letters set.
fn case_insensitive_hash(name: &[u8]) -> u64 {
    const PRIME: u64 = 0x0000_0100_0000_01b3;
    let mix = |hash: u64, word: [u8; 8]| {
        let hash = (hash ^ (u64::from_le_bytes(word) | CASE)).wrapping_mul(PRIME);
        hash ^ hash >> 32
    };
    let (words, rest) = name.as_chunks::<8>();
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    let hash = words.iter().fold(0xcbf2_9ce4_8422_2325 ^ name.len() as u64, |hash, word| mix(hash, *word));
    mix(hash, last)
}

#[inline(always)]
fn compare_names(body: &[u8], rewritten: &[u8], a: &JsonNode, b: &JsonNode) -> Ordering {
    a.prefix.cmp(&b.prefix).then_with(|| {
        let name = |node: &JsonNode| strip_quotes(bytes(body, rewritten, node.name));
        name(a).cmp(name(b))
    })
}
