//! Which headers a message has, in one word: most look-ups are of headers that most messages do not have.

use http::{HeaderMap, HeaderName, HeaderValue};

/// What one pass over the names of a message's headers finds.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SentNames {
    /// One bit for each name. Some names share a bit.
    bits: u64,
    /// Whether a name has an underscore.
    pub(crate) has_underscore: bool,
    /// Whether a name starts with `ibid-`.
    pub(crate) has_own_prefix: bool,
}

impl SentNames {
    pub(crate) fn of(headers: &HeaderMap) -> Self {
        let mut sent = Self::default();
        for name in headers.keys() {
            let name = name.as_str();
            sent.bits |= bit(name);
            sent.has_underscore |= has_underscore(name.as_bytes());
            sent.has_own_prefix |= name.starts_with("ibid-");
        }
        sent
    }

    /// The set of these names, without what a pass finds besides.
    pub(crate) const fn listed(names: &[&str]) -> Self {
        let (mut bits, mut at) = (0, 0);
        while at < names.len() {
            bits |= bit(names[at]);
            at += 1;
        }
        Self { bits, has_underscore: false, has_own_prefix: false }
    }

    /// Returns `false` if there is no header with this name. If there is none, it rarely returns `true`.
    #[inline]
    pub(crate) fn may_have(&self, name: &HeaderName) -> bool {
        self.bits & bit(name.as_str()) != 0
    }

    /// Returns `false` if there is no name in both.
    #[inline]
    pub(crate) const fn may_share(&self, other: &Self) -> bool {
        self.bits & other.bits != 0
    }

    /// Looks a header up.
    #[inline]
    pub(crate) fn get<'a>(&self, headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a HeaderValue> {
        if self.may_have(name) { headers.get(name) } else { None }
    }
}

/// The bit of a name. The factors give common headers bits of their own.
const fn bit(name: &str) -> u64 {
    match name.as_bytes() {
        [first, .., last] => 1 << ((name.len() + 5 * *first as usize + 17 * *last as usize) % 64),
        _ => 1,
    }
}

fn has_underscore(name: &[u8]) -> bool {
    const EACH: u64 = 0x0101_0101_0101_0101;
    // The high bit of the lowest byte that is an underscore, and maybe of others after it.
    let underscores = |word: [u8; 8]| {
        let word = u64::from_le_bytes(word) ^ (EACH * 0x5f);
        word.wrapping_sub(EACH) & !word & (EACH * 0x80)
    };
    // The last word overlaps the one before it.
    match (name.first_chunk(), name.last_chunk()) {
        (Some(first), Some(last)) if name.len() <= 16 => underscores(*first) | underscores(*last) != 0,
        (_, Some(last)) => name.as_chunks().0.iter().any(|word| underscores(*word) != 0) || underscores(*last) != 0,
        _ => name.contains(&b'_'),
    }
}

#[cfg(test)]
mod tests {
    use http::header;

    use super::*;

    fn sent(names: &[&'static str]) -> SentNames {
        let value = HeaderValue::from_static("v");
        SentNames::of(&names.iter().map(|name| (HeaderName::from_static(name), value.clone())).collect())
    }

    #[test]
    fn a_name_that_was_sent_is_never_missed() {
        let names = ["host", "authorization", "x", "x-api-key", "idempotency-key", "a-name-that-is-rather-long-indeed"];
        for count in 0..=names.len() {
            let few = sent(&names[..count]);
            assert!(names[..count].iter().all(|name| few.may_have(&HeaderName::from_static(name))), "{count}");
        }
        let usual = sent(&["host", "authorization", "content-type", "content-length", "idempotency-key"]);
        for absent in [header::COOKIE, header::CONNECTION, header::UPGRADE, header::EXPECT, header::USER_AGENT] {
            assert!(!usual.may_have(&absent), "{absent}");
        }
        assert!(SentNames::listed(&["te", "date"]).may_have(&header::DATE));
    }

    #[test]
    fn underscores_and_own_names_are_found_everywhere() {
        for name in ["_", "a_", "_a", "abcdefg_", "abcdefgh_", "_bcdefghi", "abcdefghijklm_op", "x-a_b-c-d-e-f-g-h"] {
            assert!(sent(&["host", name]).has_underscore, "{name}");
        }
        let plain = sent(&["x-a", "abcdefgh", "ab^defghi", "content-security-policy"]);
        assert!(!plain.has_underscore && !plain.has_own_prefix);
        assert!(sent(&["host", "ibid-fence"]).has_own_prefix && !sent(&["x-ibid-", "ibid"]).has_own_prefix);
    }
}
