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

use super::document::{JsonNode, JsonSpan, bytes, strip_quotes};

/// The maximum number of members that are sorted by counting.
const MAX_COUNTING_SORT: usize = 16;

/// The first eight bytes of a name as a number with the same order, see [`JsonNode::prefix`]. Short names are padded
/// with zeros and sort first, because canonical text contains no zero byte.
#[inline(always)]
pub(super) fn prefix(body: &[u8], rewritten: &[u8], name: JsonSpan) -> u64 {
    let size = name.end - name.start - 2;
    let start = name.start as usize + 1;
    // The bytes after a short name are masked out, which is cheaper than not reading them.
    let eight = match body.get(start..).and_then(|rest| rest.first_chunk()) {
        Some(eight) => *eight,
        None => {
            let name = strip_quotes(bytes(body, rewritten, name));
            let size = name.len().min(8);
            let mut eight = [0; 8];
            eight[..size].copy_from_slice(&name[..size]);
            eight
        }
    };
    let prefix = u64::from_be_bytes(eight);
    if size < 8 { prefix & !(u64::MAX >> (8 * size)) } else { prefix }
}

/// Whether a new member sorts after the last one.
#[inline(always)]
pub(super) fn sorts_after(body: &[u8], rewritten: &[u8], last: Option<&JsonNode>, prefix: u64, name: JsonSpan) -> bool {
    let inner = |name| strip_quotes(bytes(body, rewritten, name));
    match last {
        None => true,
        Some(last) if last.prefix != prefix => last.prefix < prefix,
        Some(last) => inner(last.name) < inner(name),
    }
}

/// Appends members to `sorted` in order. Returns `None` if two have the same name.
#[inline(never)]
pub(super) fn append_sorted(
    body: &[u8], rewritten: &[u8], members: &mut [JsonNode], sorted: &mut Vec<JsonNode>,
) -> Option<()> {
    if members.len() <= MAX_COUNTING_SORT && append_by_prefix(members, sorted) {
        return Some(());
    }
    let order = |a: &JsonNode, b: &JsonNode| compare_names(body, rewritten, a, b);
    members.sort_unstable_by(order);
    if !members.is_sorted_by(|a, b| order(a, b).is_lt()) {
        return None;
    }
    sorted.extend_from_slice(members);
    Some(())
}

/// Whether two members have names that differ only in case. False positives are harmless: the document is then compared
/// as it was sent.
pub(super) fn has_case_insensitive_duplicates(body: &[u8], rewritten: &[u8], members: &[JsonNode]) -> bool {
    let folded = |node: &JsonNode| folded_hash(strip_quotes(bytes(body, rewritten, node.name)));
    if members.len() <= MAX_COUNTING_SORT {
        let mut seen = [0; MAX_COUNTING_SORT];
        return members.iter().enumerate().any(|(count, node)| {
            seen[count] = folded(node);
            seen[..count].contains(&seen[count])
        });
    }
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
    const CASE: u64 = 0x2020_2020_2020_2020;
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

/// Appends a few members to `sorted` in order, unless two have the same prefix. For few members, counting the
/// predecessors of each is faster than the unpredictable branches of a sort.
fn append_by_prefix(members: &[JsonNode], sorted: &mut Vec<JsonNode>) -> bool {
    let mut taken = 0_u32;
    let from = sorted.len();
    sorted.resize(from + members.len(), members[0]);
    for member in members {
        let place = members.iter().map(|other| usize::from(other.prefix < member.prefix)).sum::<usize>();
        taken |= 1 << place;
        sorted[from + place] = *member;
    }
    if taken.count_ones() as usize != members.len() {
        sorted.truncate(from);
        return false;
    }
    true
}

#[inline(always)]
fn compare_names(body: &[u8], rewritten: &[u8], a: &JsonNode, b: &JsonNode) -> Ordering {
    a.prefix.cmp(&b.prefix).then_with(|| {
        let name = |node: &JsonNode| strip_quotes(bytes(body, rewritten, node.name));
        name(a).cmp(name(b))
    })
}
