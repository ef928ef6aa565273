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

use super::document::{Node, Span, bytes, inner};

/// Up to how many members are sorted by counting.
const FEW: usize = 16;

/// See [`Node::prefix`]: the first eight bytes, as a number that sorts like they
/// do. Short names are filled up with zeros, which sorts them first as it
/// should, because no canonical text has a zero byte in it.
#[inline(always)]
pub(super) fn prefix(body: &[u8], rewritten: &[u8], name: Span) -> u64 {
    let size = name.end - name.start - 2;
    let start = name.start as usize + 1;
    // What follows a short name is masked out; cheaper than not to read it.
    let eight = match body.get(start..).and_then(|rest| rest.first_chunk()) {
        Some(eight) => *eight,
        None => {
            let name = inner(bytes(body, rewritten, name));
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
pub(super) fn follows(body: &[u8], rewritten: &[u8], last: Option<&Node>, prefix: u64, name: Span) -> bool {
    let inner = |name| inner(bytes(body, rewritten, name));
    match last {
        None => true,
        Some(last) if last.prefix != prefix => last.prefix < prefix,
        Some(last) => inner(last.name) < inner(name),
    }
}

/// Appends members to `sorted` in their order; `None` if two are the same.
#[inline(never)]
pub(super) fn append_sorted(body: &[u8], rewritten: &[u8], members: &mut [Node], sorted: &mut Vec<Node>) -> Option<()> {
    if members.len() <= FEW && append_by_prefix(members, sorted) {
        return Some(());
    }
    let order = |a: &Node, b: &Node| order(body, rewritten, a, b);
    members.sort_unstable_by(order);
    if !members.is_sorted_by(|a, b| order(a, b).is_lt()) {
        return None;
    }
    sorted.extend_from_slice(members);
    Some(())
}

/// Appends a few members to `sorted` in their order, unless two of them have the
/// same prefix. For a few it is faster to count who goes before whom than to
/// take the many unpredictable branches of sorting.
fn append_by_prefix(members: &[Node], sorted: &mut Vec<Node>) -> bool {
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
fn order(body: &[u8], rewritten: &[u8], a: &Node, b: &Node) -> Ordering {
    a.prefix.cmp(&b.prefix).then_with(|| {
        let name = |node: &Node| inner(bytes(body, rewritten, node.name));
        name(a).cmp(name(b))
    })
}
