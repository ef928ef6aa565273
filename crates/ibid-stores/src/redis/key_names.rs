//! Names of keys.
//!
//! All keys of one address share the part between braces, and so the same cluster slot.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ibid::store::Address;

#[derive(Debug)]
pub(super) struct KeyNames {
    prefix: String,
    /// Part of the entry names if above 0. Raising it makes all earlier entries invisible.
    pub(super) generation: AtomicU64,
}

impl KeyNames {
    pub(super) fn new(prefix: &str) -> Result<Self, String> {
        if prefix.is_empty()
            || prefix.contains(['{', '}'])
            || prefix.chars().any(|c| c.is_whitespace() || c.is_control())
        {
            return Err(format!(
                "the prefix {prefix:?} cannot start the names of keys; write one without braces and blanks, such as \
                 \"idempotency\""
            ));
        }
        Ok(Self { prefix: prefix.to_owned(), generation: AtomicU64::new(0) })
    }

    /// Prefix of a bucket's entry names.
    pub(super) fn entry_prefix(&self, bucket: u8) -> String {
        match self.generation.load(Relaxed) {
            0 => format!("{}:{{{bucket:02x}}}:", self.prefix),
            generation => format!("{}:{generation}:{{{bucket:02x}}}:", self.prefix),
        }
    }

    /// Prefix of a bucket's keys that do not depend on the generation.
    fn bucket_prefix(&self, bucket: u8) -> String {
        format!("{}:{{{bucket:02x}}}:", self.prefix)
    }

    pub(super) fn entry_key(&self, at: &Address) -> Vec<u8> {
        const HEX: &[u8; 16] = b"0123456789abcdef";
        let mut digits = [0; 64];
        for (pair, byte) in digits.chunks_exact_mut(2).zip(at.0) {
            pair.copy_from_slice(&[HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)]]);
        }
        let mut key = Vec::with_capacity(self.prefix.len() + 96);
        key.extend_from_slice(self.prefix.as_bytes());
        match self.generation.load(Relaxed) {
            0 => {}
            generation => key.extend_from_slice(format!(":{generation}").as_bytes()),
        }
        key.extend_from_slice(&[b':', b'{', digits[0], digits[1], b'}', b':']);
        key.extend_from_slice(&digits);
        key
    }

    pub(super) fn index_key(&self, bucket: u8) -> String {
        format!("{}index", self.entry_prefix(bucket))
    }

    /// Key of the registry of claim lists.
    pub(super) fn claim_lists_key(&self, bucket: u8) -> String {
        format!("{}claims", self.entry_prefix(bucket))
    }

    pub(super) fn claim_list_key(&self, bucket: u8, name: &str) -> String {
        format!("{}claims:{name}", self.entry_prefix(bucket))
    }

    /// Key of a tenant's quota usage. It does not depend on the generation.
    pub(super) fn quota_key(&self, who: &Address) -> String {
        format!("{}quota:{who}", self.bucket_prefix(who.0[0]))
    }

    pub(super) fn sweeper_key(&self) -> String {
        format!("{}sweeper", self.bucket_prefix(0))
    }

    /// Key of the entries' format version, which a version of ibid sets if earlier ones must not use the entries.
    pub(super) fn format_key(&self) -> String {
        format!("{}format", self.bucket_prefix(0))
    }

    /// Glob pattern that matches the entry names, with the prefix escaped.
    pub(super) fn scan_pattern(&self) -> String {
        let mut pattern = String::new();
        for character in self.prefix.chars() {
            if matches!(character, '*' | '?' | '[' | ']' | '\\' | '^') {
                pattern.push('\\');
            }
            pattern.push(character);
        }
        match self.generation.load(Relaxed) {
            0 => pattern.push(':'),
            generation => pattern.push_str(&format!(":{generation}:")),
        }
        pattern + "{??}:*"
    }

    /// Returns the address in an entry name of the current generation.
    pub(super) fn parse_address(&self, key: &[u8]) -> Option<Address> {
        let hex = key.get(key.len().checked_sub(64)?..)?;
        let at = Address::from_hex(std::str::from_utf8(hex).ok()?)?;
        (self.entry_key(&at) == key).then_some(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_share_a_slot_and_are_read_again() {
        let names = KeyNames::new("a*b").unwrap();
        let at = Address([0xa5; 32]);
        assert_eq!(names.entry_key(&at), format!("a*b:{{a5}}:{at}").into_bytes());
        assert_eq!(names.entry_prefix(0xa5), "a*b:{a5}:");
        assert_eq!(names.parse_address(&names.entry_key(&at)), Some(at));
        assert_eq!(names.scan_pattern(), "a\\*b:{??}:*");
        let before = names.entry_key(&at);
        names.generation.store(7, Relaxed);
        assert_eq!(names.entry_key(&at), format!("a*b:7:{{a5}}:{at}").into_bytes());
        assert_eq!(names.parse_address(&names.entry_key(&at)), Some(at));
        assert_eq!(names.parse_address(&before), None, "of another generation");
        assert_eq!(names.parse_address(names.index_key(0xa5).as_bytes()), None);
        assert_eq!(names.parse_address(names.claim_list_key(0xa5, "x").as_bytes()), None);
        assert_eq!(names.quota_key(&at), format!("a*b:{{a5}}:quota:{at}"), "quotas outlive a generation");
    }

    #[test]
    fn a_prefix_must_not_choose_the_slot() {
        for wrong in ["", "a{b}", "a b", "a\n"] {
            assert!(KeyNames::new(wrong).is_err(), "{wrong:?}");
        }
    }
}
