//! The keys that verify tokens, each with its valid algorithms, and how they are fetched from a URL: by a timer, and when a
//! token names an unknown key.
//!
//! Only one fetch runs at a time, with a minimum interval, so that tokens with invented key ids cannot flood the
//! issuer.

use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::{HeaderValue, Request, StatusCode, Uri, header};
use jsonwebtoken::{
    Algorithm, DecodingKey,
    jwk::{AlgorithmParameters, EllipticCurve, Jwk, KeyOperations, PublicKeyUse},
};
use rustls::pki_types::{SubjectPublicKeyInfoDer, alg_id, pem::PemObject as _};
use serde_json::Value;
use tokio::{
    sync::Mutex,
    time::{Instant, timeout},
};

use super::TokenError;
use crate::{config::JwtSettings, outbound::OutboundClient};

pub(super) const HMAC_ALGORITHMS: [Algorithm; 3] = [Algorithm::HS256, Algorithm::HS384, Algorithm::HS512];
pub(super) const RSA_ALGORITHMS: [Algorithm; 6] =
    [Algorithm::RS256, Algorithm::RS384, Algorithm::RS512, Algorithm::PS256, Algorithm::PS384, Algorithm::PS512];

/// Minimum length of a shared secret. A shorter one can be guessed from any token (RFC 7518, 3.2).
const MIN_SECRET_BYTES: usize = 32;
/// Minimum length of an RSA modulus: 2048 bits.
const MIN_MODULUS_BYTES: usize = 256;
/// Maximum number of keys in a set. No issuer has as many.
const MAX_KEYS: usize = 100;

/// Keys in the order in which they are tried.
#[derive(Debug, Default)]
pub(crate) struct KeySet(Vec<JwtKey>);

#[derive(Debug)]
struct JwtKey {
    id: Option<String>,
    algorithms: Vec<Algorithm>,
    key: DecodingKey,
}

impl KeySet {
    pub(crate) fn from_secret(secret: &str) -> Result<Self, String> {
        if secret.len() < MIN_SECRET_BYTES {
            return Err(format!(
                "it has {} bytes; allowed is {MIN_SECRET_BYTES} and more, because a shorter one can be guessed from a token",
                secret.len()
            ));
        }
        let key = DecodingKey::from_secret(secret.as_bytes());
        Ok(Self(vec![JwtKey { id: None, algorithms: HMAC_ALGORITHMS.to_vec(), key }]))
    }

    /// Parses public keys, one `-----BEGIN PUBLIC KEY-----` each.
    pub(crate) fn from_pem(text: &str) -> Result<Self, String> {
        if text.contains("PRIVATE KEY-----") {
            return Err(
                "there is a private key in it; tokens are verified with the public one, keep the other away".into()
            );
        }
        let all: Result<Vec<_>, _> = SubjectPublicKeyInfoDer::pem_slice_iter(text.as_bytes()).collect();
        let all = all.map_err(|why| format!("it cannot be read: {why}"))?;
        if all.is_empty() {
            return Err("there is no public key in it; allowed is -----BEGIN PUBLIC KEY-----".into());
        }
        all.iter().map(|der| parse_public_key(der)).collect::<Result<_, _>>().map(Self)
    }

    /// Parses a JWK set. Skips keys for other purposes and of unknown types.
    pub(crate) fn from_jwks(text: &[u8]) -> Result<Self, String> {
        let mut set: Value = serde_json::from_slice(text).map_err(|why| format!("it is no JSON: {why}"))?;
        let Some(keys) = set.get_mut("keys").and_then(Value::as_array_mut) else {
            return Err("it is no JWK set; it has no list \"keys\"".into());
        };
        if keys.len() > MAX_KEYS {
            return Err(format!("it has {} keys; allowed is {MAX_KEYS}", keys.len()));
        }
        let keys = keys.drain(..).filter_map(|key| key_from_jwk(&serde_json::from_value(key).ok()?));
        let keys: Vec<_> = keys.collect();
        if keys.is_empty() {
            return Err("there is no key in it that tokens can be verified with; \
                        allowed are RSA from 2048 bits on, EC with P-256 or P-384, and Ed25519"
                .into());
        }
        Ok(Self(keys))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns the keys that may have signed a token: the keys with the id that the token names, and all keys without
    /// an id.
    pub(super) fn find(&self, id: Option<&str>, algorithm: Algorithm) -> Result<Vec<&DecodingKey>, TokenError> {
        let meant = |key: &&JwtKey| id.is_none() || key.id.is_none() || key.id.as_deref() == id;
        let meant: Vec<_> = self.0.iter().filter(meant).collect();
        if meant.is_empty() {
            return Err(TokenError::UnknownKey);
        }
        let fit: Vec<_> = meant.iter().filter(|key| key.algorithms.contains(&algorithm)).map(|key| &key.key).collect();
        if fit.is_empty() {
            return Err(TokenError::Invalid(format!("{algorithm:?} is no algorithm for the key that it names")));
        }
        Ok(fit)
    }
}

/// Skips symmetric keys: a secret in a public document is not secret.
fn key_from_jwk(jwk: &Jwk) -> Option<JwtKey> {
    let signs = jwk.common.public_key_use.as_ref().is_none_or(|purpose| *purpose == PublicKeyUse::Signature);
    let verifies = jwk.common.key_operations.as_ref().is_none_or(|all| all.contains(&KeyOperations::Verify));
    if !signs || !verifies {
        return None;
    }
    let mut algorithms = match &jwk.algorithm {
        AlgorithmParameters::RSA(key) if key.n.len() * 3 / 4 >= MIN_MODULUS_BYTES => RSA_ALGORITHMS.to_vec(),
        AlgorithmParameters::EllipticCurve(key) if key.curve == EllipticCurve::P256 => vec![Algorithm::ES256],
        AlgorithmParameters::EllipticCurve(key) if key.curve == EllipticCurve::P384 => vec![Algorithm::ES384],
        AlgorithmParameters::OctetKeyPair(key) if key.curve == EllipticCurve::Ed25519 => vec![Algorithm::EdDSA],
        _ => return None,
    };
    if let Some(only) = &jwk.common.key_algorithm {
        algorithms.retain(|algorithm| format!("{algorithm:?}") == format!("{only:?}"));
    }
    let key = DecodingKey::from_jwk(jwk).ok()?;
    (!algorithms.is_empty()).then(|| JwtKey { id: jwk.common.key_id.clone(), algorithms, key })
}

/// Parses a DER-encoded `SubjectPublicKeyInfo` (RFC 5280, 4.1).
fn parse_public_key(der: &[u8]) -> Result<JwtKey, String> {
    const SEQUENCE: u8 = 0x30;
    const BITS: u8 = 0x03;

    let parts = || {
        let (outer, _) = split_der_value(der, SEQUENCE)?;
        let (kind, rest) = split_der_value(outer, SEQUENCE)?;
        let (bits, _) = split_der_value(rest, BITS)?;
        let (unused, key) = bits.split_first()?;
        (*unused == 0).then_some((kind, key))
    };
    let (kind, key) = parts().ok_or("a public key in it cannot be read")?;
    let (algorithms, key) = match kind {
        kind if kind == &*alg_id::RSA_ENCRYPTION && key.len() < MIN_MODULUS_BYTES => {
            return Err("an RSA key in it is shorter than 2048 bits".into());
        }
        kind if kind == &*alg_id::RSA_ENCRYPTION => (RSA_ALGORITHMS.to_vec(), DecodingKey::from_rsa_der(key)),
        kind if kind == &*alg_id::ECDSA_P256 => (vec![Algorithm::ES256], DecodingKey::from_ec_der(key)),
        kind if kind == &*alg_id::ECDSA_P384 => (vec![Algorithm::ES384], DecodingKey::from_ec_der(key)),
        kind if kind == &*alg_id::ED25519 => (vec![Algorithm::EdDSA], DecodingKey::from_ed_der(key)),
        _ => {
            let what = "a public key in it is of a kind that is not known here; \
                        allowed are RSA, EC with P-256 or P-384, and Ed25519";
            return Err(what.into());
        }
    };
    Ok(JwtKey { id: None, algorithms, key })
}

/// Splits off the value at the start if it has this tag. Returns it and the rest.
fn split_der_value(bytes: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (found, rest) = bytes.split_first()?;
    let (first, rest) = rest.split_first()?;
    let (length, rest) = match first {
        0..=0x7f => (usize::from(*first), rest),
        0x81 | 0x82 => {
            let (length, rest) = rest.split_at_checked(usize::from(*first & 0x7f))?;
            (length.iter().fold(0, |all, byte| all << 8 | usize::from(*byte)), rest)
        }
        _ => return None,
    };
    (*found == tag).then(|| rest.split_at_checked(length)).flatten()
}

const FETCH_TIMEOUT: Duration = Duration::from_secs(5);
/// Minimum interval between two fetches, unless the timer's is shorter.
const MIN_FETCH_INTERVAL: Duration = Duration::from_secs(10);
const MAX_JWKS_BYTES: usize = 1 << 20;

pub(super) struct RemoteJwks {
    url: String,
    path: Uri,
    issuer: OutboundClient,
    pub(super) refresh_interval: Duration,
    /// When the last fetch ended. Locked during a fetch.
    last_fetch: Mutex<Option<Instant>>,
}

impl RemoteJwks {
    pub(super) fn new(url: &str, settings: &JwtSettings) -> Result<Self, String> {
        let uri: Uri = url.parse().map_err(|why| format!("jwt.jwks: {why}"))?;
        let (Some(scheme), Some(authority)) = (uri.scheme(), uri.authority()) else {
            return Err("jwt.jwks: it is no URL".into());
        };
        let origin = format!("{scheme}://{authority}");
        let issuer = OutboundClient::new(&origin, ("jwt", "jwks"), &settings.tls, FETCH_TIMEOUT)?;
        let path = uri.into_parts().path_and_query.map_or(Uri::from_static("/"), Uri::from);
        let (url, refresh_interval) = (url.split('?').next().unwrap_or_default().into(), settings.refresh);
        Ok(Self { url, path, issuer, refresh_interval, last_fetch: Mutex::new(None) })
    }

    /// Fetches the keys unless the last fetch is too recent. The known keys stay in force if the fetch fails.
    pub(super) async fn refresh(&self, keys: &ArcSwap<KeySet>) {
        let mut last = self.last_fetch.lock().await;
        if last.is_some_and(|last| last.elapsed() < MIN_FETCH_INTERVAL.min(self.refresh_interval)) {
            return;
        }
        let fetched = timeout(FETCH_TIMEOUT, self.fetch()).await;
        *last = Some(Instant::now());
        match fetched.unwrap_or_else(|_| Err(format!("no answer within {FETCH_TIMEOUT:?}"))) {
            Ok(fetched) => {
                tracing::debug!(url = self.url, keys = fetched.len(), "keys of tokens fetched");
                keys.store(Arc::new(fetched));
            }
            Err(why) if keys.load().is_empty() => {
                tracing::error!(url = self.url, "the keys of tokens cannot be fetched, and none are known yet: {why}");
            }
            Err(why) => {
                tracing::warn!(url = self.url, "the keys of tokens cannot be fetched; the known ones stay: {why}")
            }
        }
    }

    async fn fetch(&self) -> Result<KeySet, String> {
        let mut request = Request::get(self.path.clone()).body(Bytes::new()).expect("a request");
        request.headers_mut().insert(header::ACCEPT, HeaderValue::from_static("application/json"));
        let answer = self.issuer.send(request, MAX_JWKS_BYTES).await.map_err(|why| why.to_string())?;
        match answer.status() {
            StatusCode::OK => KeySet::from_jwks(answer.body()),
            status => Err(format!("the answer is {status}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_public_key_that_is_cut_off_anywhere_is_refused_and_nothing_panics() {
        let made = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).unwrap();
        let der = rcgen::PublicKeyData::subject_public_key_info(&made);
        assert_eq!(parse_public_key(&der).unwrap().algorithms, [Algorithm::ES256]);
        for length in 0..der.len() {
            assert!(parse_public_key(&der[..length]).is_err(), "{length}");
        }
    }

    #[test]
    fn only_keys_for_signatures_are_taken_from_a_set() {
        let point = |crv: &str, more: &str| {
            format!(
                r#"{{"kty":"EC","crv":"{crv}","x":"f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU","y":"x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0"{more}}}"#
            )
        };
        let set = |key: &str| KeySet::from_jwks(format!(r#"{{"keys":[{key}]}}"#).as_bytes());
        assert_eq!(set(&point("P-256", "")).unwrap().len(), 1);
        assert_eq!(set(&point("P-256", r#","use":"sig","alg":"ES256""#)).unwrap().len(), 1);
        for other in [
            point("P-256", r#","use":"enc""#),
            point("P-256", r#","key_ops":["sign"]"#),
            point("P-256", r#","alg":"ES384""#),
            point("P-521", ""),
            r#"{"kty":"oct","k":"c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0LXNlY3JldA"}"#.into(),
            r#"{"kty":"RSA","n":"AQAB","e":"AQAB"}"#.into(),
            r#"{"kty":"future"}"#.into(),
        ] {
            assert!(set(&other).unwrap_err().contains("no key in it"), "{other}");
        }
        let mixed = format!("{}, {}", r#"{"kty":"future"}"#, point("P-256", r#","kid":"a""#));
        assert_eq!(set(&mixed).unwrap().len(), 1);
    }
}
