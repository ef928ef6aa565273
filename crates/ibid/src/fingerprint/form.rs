//! Canonical form of `application/x-www-form-urlencoded` bodies.
//!
//! Clients that build a form from a map send the names in any order, and libraries differ in what they escape and how.
//! Neither changes what the server reads. But order has a meaning if a name repeats or nests: Rack reads
//! `i[][n]=a&i[][p]=1&i[][n]=b` as a list of two items, and PHP uses the last of `a.b` and `a_b` for both.
//!
//! Invariant: two forms have equal canonical forms only if they have the same decoded pairs, in the same order except
//! for plain names that occur once. Every name and value is preceded by its length, so no bytes can imitate a
//! delimiter. A form that servers could split differently has no canonical form.
//!
//! ```text
//! b=2&a=x%20y   =>   (1)a(3)x y(1)b(1)2   <=   a=x+y&b=%32
//! ```

use std::borrow::Cow;

use percent_encoding::percent_decode;

use super::frame;

/// The order of the pairs in a canonical form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PairOrder {
    /// Sorted by name: all names are plain, have a value and occur once.
    Sorted,
    /// Names that repeat or nest follow the others, in the order in which they were sent.
    PartlySorted,
}

/// A name and its value. `a` has none, which Rack distinguishes from `a=`.
type FormPair<'a> = (Cow<'a, [u8]>, Option<Cow<'a, [u8]>>);

/// Appends the canonical form of a form to `out`. Returns `None` if the raw bytes must be compared: the form contains
/// an invalid escape, an empty pair, or a `;`, which some servers treat as `&`.
pub(super) fn canonical(body: &[u8], out: &mut Vec<u8>) -> Option<PairOrder> {
    if body.is_empty() {
        return Some(PairOrder::Sorted);
    }
    if body.contains(&b';') {
        return None;
    }
    let mut pairs = body.split(|&byte| byte == b'&').map(pair).collect::<Option<Vec<_>>>()?;
    if !pairs.iter().all(|(name, _)| is_plain(name)) {
        write_in_sent_order(&pairs, out);
        return Some(PairOrder::PartlySorted);
    }
    let repeated = repeated_names(&pairs);
    if repeated.is_empty() && pairs.iter().all(|(_, value)| value.is_some()) {
        pairs.sort_unstable_by(|a, b| a.0.cmp(&b.0));
        for (name, value) in &pairs {
            frame(name, out);
            frame(value.as_deref().unwrap_or_default(), out);
        }
        return Some(PairOrder::Sorted);
    }
    let is_repeated = |name: &[u8]| repeated.binary_search(&name.to_ascii_lowercase()).is_ok();
    let (kept, mut single): (Vec<_>, Vec<_>) = pairs.into_iter().partition(|(name, _)| is_repeated(name));
    single.sort_unstable_by(|a, b| a.0.cmp(&b.0));
    write_in_sent_order(&single, out);
    write_in_sent_order(&kept, out);
    Some(PairOrder::PartlySorted)
}

fn pair(piece: &[u8]) -> Option<FormPair<'_>> {
    if piece.is_empty() {
        return None;
    }
    Some(match piece.iter().position(|&byte| byte == b'=') {
        Some(at) => (decode(&piece[..at])?, Some(decode(&piece[at + 1..])?)),
        None => (decode(piece)?, None),
    })
}

/// Whether no server reads the name as a nested path or as another spelling of another name.
fn is_plain(name: &[u8]) -> bool {
    !name.is_empty() && name.iter().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(byte))
}

/// The names that occur more than once, in lower case and sorted. Some servers treat `A` and `a` as equal.
fn repeated_names(pairs: &[FormPair<'_>]) -> Vec<Vec<u8>> {
    let mut names: Vec<_> = pairs.iter().map(|(name, _)| name.to_ascii_lowercase()).collect();
    names.sort_unstable();
    let mut repeated: Vec<_> = names.windows(2).filter(|two| two[0] == two[1]).map(|two| two[0].clone()).collect();
    repeated.dedup();
    repeated
}

/// Decodes `+` and escapes. Returns `None` if an escape is invalid.
pub(crate) fn decode(text: &[u8]) -> Option<Cow<'_, [u8]>> {
    let mut escapes = text.split(|&byte| byte == b'%').skip(1);
    let is_escape = |rest: &[u8]| rest.get(..2).is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit));
    if !escapes.all(is_escape) {
        return None;
    }
    if !text.iter().any(|byte| matches!(byte, b'%' | b'+')) {
        return Some(Cow::Borrowed(text));
    }
    let spaced: Vec<_> = text.iter().map(|&byte| if byte == b'+' { b' ' } else { byte }).collect();
    Some(Cow::Owned(percent_decode(&spaced).collect()))
}

/// The decoded value of a name. Returns `None` if it is absent, has no value or occurs twice, and for a form without a
/// canonical form.
pub(crate) fn find(body: &[u8], name: &str) -> Option<Vec<u8>> {
    let pairs = body.split(|&byte| byte == b'&').map(pair).collect::<Option<Vec<_>>>()?;
    let mut found = pairs.into_iter().filter(|(found, _)| **found == *name.as_bytes());
    let value = found.next()?.1?.into_owned();
    (found.next().is_none() && !body.contains(&b';')).then_some(value)
}

fn write_in_sent_order(pairs: &[FormPair<'_>], out: &mut Vec<u8>) {
    for (name, value) in pairs {
        frame(name, out);
        out.push(u8::from(value.is_some()));
        frame(value.as_deref().unwrap_or_default(), out);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::PairOrder;

    fn canonical(body: impl AsRef<[u8]>) -> Option<(PairOrder, Vec<u8>)> {
        let mut out = Vec::new();
        super::canonical(body.as_ref(), &mut out).map(|order| (order, out))
    }

    fn same(one: &str, two: &str) {
        assert!(canonical(one).is_some(), "{one}");
        assert_eq!(canonical(one), canonical(two), "{one} {two}");
    }

    fn different(one: &str, two: &str) {
        assert!(canonical(one).is_some(), "{one}");
        assert_ne!(canonical(one), canonical(two), "{one} {two}");
    }

    #[test]
    fn plain_names_that_occur_once_are_sorted() {
        same("b=2&a=1", "a=1&b=2");
        same("a=1&b=x%20y", "b=x+y&a=1");
        same("a=%32%42", "a=2B");
        different("a=1&b=2", "a=2&b=1");
        different("a=1", "a=1&b=");
        assert_eq!(canonical(""), Some((PairOrder::Sorted, Vec::new())));
    }

    #[test]
    fn names_that_repeat_keep_their_order() {
        different("a=1&a=2", "a=2&a=1");
        different("A=1&a=2", "a=2&A=1");
        different("%61=2&a=1", "a=1&a=2");
        different("n=a&p=1&n=b&p=2", "n=a&n=b&p=1&p=2");
        same("a=2&b=0&a=1", "b=0&a=2&a=1");
    }

    #[test]
    fn names_that_nest_keep_their_order() {
        different("i[][n]=a&i[][p]=1&i[][n]=b", "i[][n]=a&i[][n]=b&i[][p]=1");
        different("i=1&i[a]=2", "i[a]=2&i=1");
        different("a.b=1&a_b=2", "a_b=2&a.b=1");
        same("i[]=a+b&i%5B%5D=c", "i%5b]=a%20b&i[]=c");
    }

    #[test]
    fn a_name_without_a_value_is_not_one_with_an_empty_value() {
        different("a", "a=");
        same("a&b=1", "b=1&a");
    }

    #[test]
    fn what_servers_read_in_different_ways_is_raw() {
        for form in ["a=%zz", "a=%", "a=%4", "%g0=1", "a=%+1", "a=1;b=2", "a=1&&b=2", "&a=1", "a=1&", "a=%u00e9"] {
            assert_eq!(canonical(form), None, "{form}");
        }
        same("a=%25zz", "a=%25%7a%7A");
        different("a=%2B", "a=+");
        same("a=+", "a=%20");
    }

    #[test]
    fn escaped_delimiters_do_not_collide_with_real_ones() {
        different("a=1%26b=2", "a=1&b=2");
        different("a%3D=b", "a==b");
        different("ab=c", "a=bc");
        different("a=1%3Bb=2", "a=1&b=2");
    }

    proptest! {
        #[test]
        fn any_bytes_are_accepted(body: Vec<u8>) {
            let _ = canonical(body);
        }

        #[test]
        fn forms_with_other_pairs_differ(
            one in prop::collection::vec(("[aA]{1,2}(\\[\\])?", "[xy]{0,1}"), 0..4),
            two in prop::collection::vec(("[aA]{1,2}(\\[\\])?", "[xy]{0,1}"), 0..4),
        ) {
            let text = |pairs: &[(String, String)]| {
                pairs.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join("&")
            };
            let sorted = |pairs: &[(String, String)]| {
                let mut pairs = pairs.to_vec();
                pairs.sort();
                pairs
            };
            if sorted(&one) != sorted(&two) {
                prop_assert_ne!(canonical(text(&one)), canonical(text(&two)));
            }
        }
    }
}
