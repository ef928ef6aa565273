//! Canonical form of `application/x-www-form-urlencoded` bodies.
//!
//! A form is a list of pairs. Clients that build it from a map send the names in any order, and libraries differ in
//! what they escape and how. None of this changes what the server reads, so none of it may change the fingerprint.
//!
//! Invariant: two forms have equal canonical forms exactly when for each name they have the same decoded values in the
//! same order. Every name and value is preceded by its length, so no bytes can imitate a delimiter.
//!
//! ```text
//! b=2&a=x%20y   =>   (1)a(3)x y(1)b(1)2   <=   a=x+y&&b=%32
//! ```

use std::borrow::Cow;

use crate::fingerprint::{form::decode_lenient, frame};

/// Appends the canonical form of a form to `out`.
///
/// `a` and `a=` are the same pair, as in servers. Invalid escapes stay as written.
pub(crate) fn canonical(body: &[u8], out: &mut Vec<u8>) {
    let mut pairs: Vec<_> = body.split(|&byte| byte == b'&').filter(|piece| !piece.is_empty()).map(pair).collect();
    // Stable: the order of several values of one name has a meaning.
    pairs.sort_by(|a, b| a.0.cmp(&b.0));
    for (name, value) in pairs {
        frame(&name, out);
        frame(&value, out);
    }
}

fn pair(piece: &[u8]) -> (Cow<'_, [u8]>, Cow<'_, [u8]>) {
    let mut halves = piece.splitn(2, |&byte| byte == b'=').map(decode_lenient);
    (halves.next().unwrap_or_default(), halves.next().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    fn canonical(body: impl AsRef<[u8]>) -> Vec<u8> {
        let mut out = Vec::new();
        super::canonical(body.as_ref(), &mut out);
        out
    }

    /// The expected canonical form of these pairs.
    fn framed(pairs: &[(&[u8], &[u8])]) -> Vec<u8> {
        let mut out = Vec::new();
        for text in pairs.iter().flat_map(|pair| [pair.0, pair.1]) {
            out.extend_from_slice(&(text.len() as u64).to_le_bytes());
            out.extend_from_slice(text);
        }
        out
    }

    #[test]
    fn pairs_are_framed_and_sorted_by_name() {
        assert_eq!(canonical("b=2&a=1"), framed(&[(b"a", b"1"), (b"b", b"2")]));
        assert_eq!(canonical("b=2&a=1"), canonical("a=1&b=2"));
    }

    #[test]
    fn output_is_appended() {
        let mut out = b"before".to_vec();
        super::canonical(b"a=1", &mut out);
        assert_eq!(out, [b"before".to_vec(), framed(&[(b"a", b"1")])].concat());
    }

    #[test]
    fn order_of_values_of_one_name_is_kept() {
        assert_eq!(canonical("a=2&b=0&a=1"), framed(&[(b"a", b"2"), (b"a", b"1"), (b"b", b"0")]));
        assert_ne!(canonical("a=1&a=2"), canonical("a=2&a=1"));
    }

    #[test]
    fn names_that_are_equal_only_when_decoded_keep_their_order() {
        assert_eq!(canonical("%61=2&a=1"), framed(&[(b"a", b"2"), (b"a", b"1")]));
    }

    #[test]
    fn escapes_and_plus_are_decoded_on_both_sides() {
        assert_eq!(canonical("a+%26=%3d%C3%a9+"), framed(&[(b"a &", "=é ".as_bytes())]));
    }

    #[test]
    fn malformed_escapes_stay_as_written() {
        assert_eq!(
            canonical("a=%&b=%4&c=%zz&d=%4g%41"),
            framed(&[(b"a", b"%"), (b"b", b"%4"), (b"c", b"%zz"), (b"d", b"%4gA")])
        );
    }

    #[test]
    fn value_may_hold_more_equals_signs() {
        assert_eq!(canonical("a=b=c"), framed(&[(b"a", b"b=c")]));
    }

    #[test]
    fn missing_value_is_an_empty_one() {
        assert_eq!(canonical("a"), canonical("a="));
        assert_eq!(canonical("a"), framed(&[(b"a", b"")]));
    }

    #[test]
    fn empty_pieces_do_not_count_but_empty_names_do() {
        assert_eq!(canonical("&&a=1&"), canonical("a=1"));
        assert_eq!(canonical(""), b"");
        assert_eq!(canonical("=1"), framed(&[(b"", b"1")]));
    }

    #[test]
    fn escaped_delimiters_do_not_collide_with_real_ones() {
        assert_ne!(canonical("a=1%26b=2"), canonical("a=1&b=2"));
        assert_ne!(canonical("a%3D=b"), canonical("a==b"));
        assert_ne!(canonical("ab=c"), canonical("a=bc"));
    }

    fn encode(text: &[u8], style: u64, out: &mut Vec<u8>) {
        for (i, &byte) in text.iter().enumerate() {
            let plain = byte.is_ascii_alphanumeric() && (style >> (i % 64)) & 1 == 0;
            match byte {
                _ if plain => out.push(byte),
                b' ' if style & 1 == 1 => out.push(b'+'),
                _ => out.extend_from_slice(format!("%{byte:02x}").as_bytes()),
            }
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_accepted(body: Vec<u8>) {
            canonical(body);
        }

        #[test]
        fn any_pairs_survive_any_encoding(pairs in prop::collection::vec((any::<Vec<u8>>(), any::<Vec<u8>>()), 0..8), style: u64) {
            let mut body = Vec::new();
            for (name, value) in &pairs {
                body.push(b'&');
                encode(name, style, &mut body);
                body.push(b'=');
                encode(value, style.rotate_left(7), &mut body);
            }
            let mut sorted: Vec<_> = pairs.iter().map(|(name, value)| (&name[..], &value[..])).collect();
            sorted.sort_by_key(|pair| pair.0);
            prop_assert_eq!(canonical(body), framed(&sorted));
        }
    }
}
