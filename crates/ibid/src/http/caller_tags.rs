//! The tags that tell operators who sent a request: its tenant and its user.

use std::cell::RefCell;

use sha2::{Digest, Sha256};

use crate::{
    key::{HexDigits, IdempotencyKey, KeyFormat},
    policy::Policy,
    scope::{Scope, ScopeInput, ScopePart},
    store::cut_tag,
};

/// The number of secrets whose tags each thread caches.
const CACHED_SECRETS: usize = 16;

/// A tag of a caller.
pub(super) enum CallerTag {
    Text(String),
    /// A prefix of the hash of the scope's credential.
    Hash(HexDigits<12>),
}

impl CallerTag {
    /// The tags of a request's tenant and user.
    pub(super) fn of(
        policy: &Policy, caller: &ScopeInput<'_>, scope: &Scope, key: Option<&IdempotencyKey>,
    ) -> (Self, Self) {
        let mut who = policy.scope.iter().filter(|part| part.names_caller());
        let tenant = policy.label.tenant.as_ref().or_else(|| who.next());
        // A scope of users only has no separate tenant: both tags are then the same.
        let named = policy.scope.iter().find(|part| part.names_user());
        let user = policy.label.user.as_ref().or(named).or_else(|| who.next());
        let tag = |part: Option<&ScopePart>| {
            part.and_then(|part| Self::of_part(part, caller, scope)).unwrap_or(Self::Text(String::new()))
        };
        let mut user = tag(user);
        if matches!(&user, Self::Text(text) if text.is_empty())
            && policy.key.format == KeyFormat::Operation
            && let Some((owner, _)) = key.and_then(|key| key.as_str().split_once(':'))
        {
            user = Self::Text(owner.to_owned());
        }
        (tag(tenant), user)
    }

    fn of_part(part: &ScopePart, caller: &ScopeInput<'_>, scope: &Scope) -> Option<Self> {
        if *part == ScopePart::Credential
            && let Some(credential) = scope.credential()
        {
            return (!credential.is_empty()).then(|| Self::Hash(cached_secret_tag(credential)));
        }
        let value = part.value(caller).ok().filter(|value| !value.is_empty())?;
        Some(Self::Text(match part.part() {
            ScopePart::Credential | ScopePart::Cookie(_) => secret_tag(&value).as_str().to_owned(),
            _ => String::from_utf8_lossy(&value).into_owned(),
        }))
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Text(text) => cut_tag(text),
            Self::Hash(digits) => digits.as_bytes(),
        }
    }
}

/// Of a secret, operators see only a prefix of its hash.
fn secret_tag(secret: &[u8]) -> HexDigits<12> {
    HexDigits::of(&Sha256::digest(secret)[..6])
}

/// Like [`secret_tag`]. Callers send many requests with the same secret.
fn cached_secret_tag(secret: &[u8]) -> HexDigits<12> {
    thread_local!(static CACHE: RefCell<[(Vec<u8>, HexDigits<12>); CACHED_SECRETS]> = RefCell::default());
    let last = secret.iter().rev().take(8).fold(0, |word: u64, byte| word << 8 | u64::from(*byte));
    let slot = (last.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60) as usize % CACHED_SECRETS;
    CACHE.with_borrow_mut(|cache| {
        let (cached, tag) = &mut cache[slot];
        if cached != secret {
            (*cached, *tag) = (secret.to_vec(), secret_tag(secret));
        }
        *tag
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cached_tag_is_that_of_its_secret() {
        for round in 0..3 {
            for caller in 0..100 {
                let secret = format!("Bearer {caller}");
                let (cached, tag) = (cached_secret_tag(secret.as_bytes()), secret_tag(secret.as_bytes()));
                assert_eq!(cached.as_str(), tag.as_str(), "{round}");
            }
        }
        assert_ne!(cached_secret_tag(b"a").as_str(), cached_secret_tag(b"b").as_str());
    }
}
