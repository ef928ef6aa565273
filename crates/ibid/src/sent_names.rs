//! Which headers a message has: one pass over them spares the look-ups that follow. Most are of headers that most
//! messages do not have; of the others, few need the map's own hash.

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
    /// Adds a name, and returns the number of its bit.
    #[inline(always)]
    fn add(&mut self, name: &str) -> usize {
        let number = bit_number(name);
        self.bits |= 1 << number;
        self.has_underscore |= has_underscore(name.as_bytes());
        self.has_own_prefix |= name.starts_with("ibid-");
        number
    }

    /// The set of these names, without what a pass finds besides.
    pub(crate) const fn listed(names: &[&str]) -> Self {
        let (mut bits, mut at) = (0, 0);
        while at < names.len() {
            bits |= 1 << bit_number(names[at]);
            at += 1;
        }
        Self { bits, has_underscore: false, has_own_prefix: false }
    }

    /// Returns `false` if there is no header with this name. If there is none, it rarely returns `true`.
    #[inline]
    pub(crate) fn may_have(&self, name: &HeaderName) -> bool {
        self.bits & 1 << bit_number(name.as_str()) != 0
    }

    /// Returns `false` if there is no name in both.
    #[inline]
    pub(crate) const fn may_share(&self, other: &Self) -> bool {
        self.bits & other.bits != 0
    }
}

/// The headers of a message, each found by the bit of its name.
pub(crate) struct SentHeaders<'a> {
    headers: &'a HeaderMap,
    pub(crate) names: SentNames,
    /// Whether a name is sent more than once. Such messages are rare, and all their headers are looked up.
    any_repeated: bool,
    /// Where in `first` the header of each bit is. Headers beyond it are looked up.
    places: [u8; 64],
    first: [Option<(&'a HeaderName, &'a HeaderValue)>; MAX_PLACES],
}

/// How many headers of a message are found by their bits.
const MAX_PLACES: usize = 16;

impl<'a> SentHeaders<'a> {
    /// Finds all headers in one pass.
    #[inline]
    pub(crate) fn of(headers: &'a HeaderMap) -> Self {
        let mut sent = Self::unread(headers);
        sent.names = SentNames::default();
        for (place, header) in headers.iter().enumerate() {
            sent.places[sent.names.add(header.0.as_str())] = place as u8;
            if let Some(free) = sent.first.get_mut(place) {
                *free = Some(header);
            }
        }
        sent
    }

    /// Reads nothing, for few look-ups.
    #[inline]
    pub(crate) fn unread(headers: &'a HeaderMap) -> Self {
        let names = SentNames { bits: u64::MAX, has_underscore: true, has_own_prefix: true };
        let any_repeated = headers.len() > headers.keys_len();
        Self { headers, names, any_repeated, places: [0; 64], first: [None; MAX_PLACES] }
    }

    /// Looks a header up. Of several with this name, it is the first.
    #[inline]
    pub(crate) fn get(&self, name: &HeaderName) -> Option<&'a HeaderValue> {
        let number = bit_number(name.as_str());
        if self.names.bits & 1 << number == 0 {
            return None;
        }
        match self.first.get(usize::from(self.places[number])) {
            Some(Some((sent, value))) if *sent == name && !self.any_repeated => Some(value),
            _ => self.headers.get(name),
        }
    }

    /// Whether there are several headers with this name.
    #[inline]
    pub(crate) fn is_repeated(&self, name: &HeaderName) -> bool {
        self.any_repeated && self.headers.get_all(name).iter().nth(1).is_some()
    }
}

/// The number of a name's bit. The factors give common headers bits of their own.
const fn bit_number(name: &str) -> usize {
    match name.as_bytes() {
        [first, .., last] => (name.len() + 18 * *first as usize + 43 * *last as usize) % 64,
        _ => 0,
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
        SentHeaders::of(&names.iter().map(|name| (HeaderName::from_static(name), value.clone())).collect()).names
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
    fn every_header_is_found_whether_or_not_its_bit_is_its_own() {
        let names = (0..100).map(|number| HeaderName::try_from(format!("x-{number}")).unwrap());
        let mut headers: HeaderMap = names.zip((0..).map(HeaderValue::from)).collect();
        headers.append("x-7", HeaderValue::from_static("again"));
        for sent in [SentHeaders::of(&headers), SentHeaders::unread(&headers)] {
            for name in headers.keys().chain([&header::HOST, &HeaderName::from_static("x-100")]) {
                assert_eq!(sent.get(name), headers.get(name), "{name}");
                assert_eq!(sent.is_repeated(name), name == "x-7");
            }
        }
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
