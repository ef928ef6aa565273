//! The order of members: by the bytes of their canonical names.
//!
//! Invariant: sorted members are strictly ascending, so no two are the same.
//!
//! Sorting is a good part of the time it takes to read a document, and names
//! are short. So each member carries the first bytes of its name as a number,
//! and the names themselves are seldom looked at.
//!
//! Example: `"amount"` and `"currency"` are told apart by prefix, while the prefix
//! of `"customer"` and of `"customer_id"` is the same.

use std::cmp::Ordering;

use super::document::{JsonNode, JsonSpan, bytes, strip_quotes};

/// Up to how many members are sorted by counting.
const MAX_COUNTING_SORT: usize = 16;

/// See [`Node::prefix`]: the first eight bytes, as a number that sorts like they
/// do. Short names are filled up with zeros, which sorts them first as it
/// should, because no canonical text has a zero byte in it.
#[inline(always)]
pub(super) fn prefix(body: &[u8], rewritten: &[u8], name: JsonSpan) -> u64 {
    let size = name.end - name.start - 2;
    let start = name.start as usize + 1;
    // What follows a short name is masked out; cheaper than not to read it.
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

/// Does a new member sort behind the last one, if there is one?
#[inline(always)]
pub(super) fn sorts_after(body: &[u8], rewritten: &[u8], last: Option<&JsonNode>, prefix: u64, name: JsonSpan) -> bool {
    let inner = |name| strip_quotes(bytes(body, rewritten, name));
    match last {
        None => true,
        Some(last) if last.prefix != prefix => last.prefix < prefix,
        Some(last) => inner(last.name) < inner(name),
    }
}

/// Appends members to `sorted` in their order; `None` if two are the same.
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

/// Whether two members have names that differ in case only. It may also say so of names that differ in other bits, which
/// does no harm: the document is then compared as it was sent.
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

/// The same for names that differ in case only.
fn folded_hash(name: &[u8]) -> u64 {
    if name.is_ascii() {
        return case_insensitive_hash(name);
    }
    // By way of upper case, because the long s and the Kelvin sign are letters that have only that in common with theirs.
    let text = String::from_utf8_lossy(name);
    let folded: String = text.chars().flat_map(char::to_uppercase).flat_map(char::to_lowercase).collect();
    case_insensitive_hash(folded.as_bytes())
}

/// FNV-1a over words, with the bit that tells the case of ASCII letters set.
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

/// Appends a few members to `sorted` in their order, unless two of them have the
/// same prefix. For a few it is faster to count who goes before whom than to
/// take the many unpredictable branches of sorting.
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

/// Members sort by the bytes of their canonical names.
#[inline(always)]
fn compare_names(body: &[u8], rewritten: &[u8], a: &JsonNode, b: &JsonNode) -> Ordering {
    a.prefix.cmp(&b.prefix).then_with(|| {
        let name = |node: &JsonNode| strip_quotes(bytes(body, rewritten, node.name));
        name(a).cmp(name(b))
    })
}
