//! Sorts members by the bytes of their canonical names.
//!
//! Invariant: sorted members are strictly ascending, so no two have the same name.
//!
//! Names are short. Each member therefore carries the first bytes of its name as a number, and most comparisons do not
//! read the names.
//!
//! Example: the prefixes of `"amount"` and `"currency"` differ, while those of `"customer"` and `"customer_id"` are
//! equal.

use std::cmp::Ordering;

use super::NameEquality;

/// The bits that distinguish the case of ASCII letters.
const CASE: u64 = 0x2020_2020_2020_2020;
/// The bits that bytes have if they are not ASCII.
const NON_ASCII: u64 = 0x8080_8080_8080_8080;
/// The maximum number of members that are sorted by counting.
pub(super) const MAX_FEW: usize = 16;

/// A member of an object.
#[derive(Clone, Copy, Debug)]
pub(super) struct JsonMember {
    /// The first bytes of the name, see [`prefix`].
    pub(super) prefix: u64,
    /// The position of its name in the output.
    pub(super) start: u32,
    /// The length of its name with the quotes.
    pub(super) size: u32,
}

/// The first eight bytes of a name as a number with the same order. `first` is a number whose low byte is the first, and
/// `size` is the length with the quotes. Short names are padded with zeros and sort first, because canonical text contains
/// no zero byte.
#[inline(always)]
pub(super) fn prefix(first: u64, size: usize) -> u64 {
    /// For each size of a name, the bits that belong to it.
    const SIZES: [u64; 16] = {
        let mut masks = [u64::MAX; 16];
        let mut size = 0;
        while size < 8 {
            masks[size + 2] = !(u64::MAX >> (8 * size));
            size += 1;
        }
        masks
    };
    first.swap_bytes() & SIZES.get(size).unwrap_or(&u64::MAX)
}

/// Compares the names of two members; `name` returns a name with its quotes.
#[inline(always)]
pub(super) fn compare<'t>(one: &JsonMember, other: &JsonMember, name: impl Fn(&JsonMember) -> &'t [u8]) -> Ordering {
    let by_name = || strip_quotes(name(one)).cmp(strip_quotes(name(other)));
    one.prefix.cmp(&other.prefix).then_with(by_name)
}

fn strip_quotes(text: &[u8]) -> &[u8] {
    &text[1..text.len() - 1]
}

/// Sorts members. Returns `None` if two have equal names.
pub(super) fn order_many<'t>(
    members: &[JsonMember], names: NameEquality, name: impl Fn(&JsonMember) -> &'t [u8],
) -> Option<Vec<u32>> {
    if names == NameEquality::IgnoreCase && has_case_insensitive_duplicates(members, &name) {
        return None;
    }
    let mut indexes: Vec<_> = (0..members.len() as u32).collect();
    let order = |a: &u32, b: &u32| compare(&members[*a as usize], &members[*b as usize], &name);
    indexes.sort_unstable_by(order);
    indexes.is_sorted_by(|a, b| order(a, b).is_lt()).then_some(indexes)
}

/// Sorts a few members by their prefixes. Returns `None` for many, and if the prefixes do not tell whether names are equal
/// apart from case. Counting the predecessors of each member is faster than the unpredictable branches of a sort.
#[inline(never)]
pub(super) fn order_few(members: &[JsonMember]) -> Option<[u8; MAX_FEW]> {
    if members.len() > MAX_FEW {
        return None;
    }
    let (mut prefixes, mut places, mut sorted) = ([0; MAX_FEW], [0_u8; MAX_FEW], [0_u8; MAX_FEW]);
    for (i, member) in members.iter().enumerate().take(MAX_FEW) {
        let prefix = member.prefix;
        if prefix & NON_ASCII != 0 {
            return None;
        }
        for other in 0..i {
            if prefixes[other] | CASE == prefix | CASE {
                return None;
            }
            let is_after = prefixes[other] > prefix;
            places[other] += u8::from(is_after);
            places[i] += u8::from(!is_after);
        }
        prefixes[i] = prefix;
    }
    for (i, place) in places[..members.len()].iter().enumerate() {
        sorted[usize::from(*place) % MAX_FEW] = i as u8;
    }
    Some(sorted)
}

/// Whether two members have names that differ only in case. False positives are harmless: the document is then compared
/// as it was sent.
#[inline(never)]
fn has_case_insensitive_duplicates<'t>(members: &[JsonMember], name: impl Fn(&JsonMember) -> &'t [u8]) -> bool {
    let mut all: Vec<_> = members.iter().map(|member| folded_hash(strip_quotes(name(member)))).collect();
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

/// FNV-1a over words, with ASCII letters in lower case.
fn case_insensitive_hash(name: &[u8]) -> u64 {
    const PRIME: u64 = 0x0000_0100_0000_01b3;
    let mix = |hash: u64, word: [u8; 8]| {
        let hash = (hash ^ u64::from_le_bytes(word.map(|byte| byte.to_ascii_lowercase()))).wrapping_mul(PRIME);
        hash ^ hash >> 32
    };
    let (words, rest) = name.as_chunks::<8>();
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    let hash = words.iter().fold(0xcbf2_9ce4_8422_2325 ^ name.len() as u64, |hash, word| mix(hash, *word));
    mix(hash, last)
}
