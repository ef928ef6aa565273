//! Verifies callers' JWTs: `scope = ["jwt:sub"]`.
//!
//! Invariants:
//! - **The key decides which algorithms are valid**, never the token: a public key verifies no HMAC, and `none` is
//!   invalid.
//! - **An unverified token has no claims.** A token that is forged, expired or from another issuer is refused before
//!   the request claims anything.
//! - **A failed fetch changes nothing**: the known keys stay in force.
//!
//! [`keys`] parses and fetches keys, and this module parses tokens.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    sync::Arc,
    time::Duration,
};

use arc_swap::ArcSwap;
use http::{HeaderMap, HeaderValue, header};
use ibid::{
    Refusal, RefusalReason,
    scope::{TokenClaims, TokenVerification},
};
use jsonwebtoken::{Algorithm, Validation, decode, decode_header, errors::ErrorKind};
use serde_json::{Map, Value};

pub(crate) use self::keys::KeySet;
use self::keys::RemoteJwks;
use crate::config::{JwtKeys, JwtSettings, TokenSource};

mod keys;

/// `Retry-After` while no keys are loaded.
const RETRY_AFTER_NO_KEYS: Duration = Duration::from_secs(1);

pub struct JwtVerifier {
    pub(crate) settings: JwtSettings,
    /// The rules for tokens of each algorithm.
    validations: HashMap<Algorithm, Validation>,
    keys: ArcSwap<KeySet>,
    remote: Option<RemoteJwks>,
}

enum TokenError {
    /// The key may be new, so a fetch is worthwhile.
    UnknownKey,
    Invalid(String),
}

impl JwtVerifier {
    /// Fetches nothing yet.
    pub fn new(settings: &JwtSettings) -> Result<Self, String> {
        let (keys, remote) = match &settings.keys {
            JwtKeys::Secret(secret) => (KeySet::from_secret(secret.expose())?, None),
            JwtKeys::Pem(pem) => (KeySet::from_pem(pem.text())?, None),
            JwtKeys::Jwks(text) => (KeySet::from_jwks(text.expose().as_bytes())?, None),
            JwtKeys::JwksUrl(url) => (KeySet::default(), Some(RemoteJwks::new(url, settings)?)),
        };
        let rules = validation(settings);
        let of = |algorithm| (algorithm, Validation { algorithms: vec![algorithm], ..rules.clone() });
        let all = keys::HMAC_ALGORITHMS.into_iter().chain(keys::RSA_ALGORITHMS);
        let validations = all.chain([Algorithm::ES256, Algorithm::ES384, Algorithm::EdDSA]).map(of).collect();
        Ok(Self { settings: settings.clone(), validations, keys: ArcSwap::from_pointee(keys), remote })
    }

    pub(crate) async fn identify_caller(&self, headers: &HeaderMap, wanted: &HashSet<String>) -> TokenVerification {
        let token = match extract_token(headers, &self.settings.from) {
            Ok(token) => token,
            Err(refusal) => return TokenVerification(Err(refusal)),
        };
        let mut verified = self.verify(token);
        if let (Err(TokenError::UnknownKey), Some(remote)) = (&verified, &self.remote) {
            remote.refresh(&self.keys).await;
            verified = self.verify(token);
        }
        TokenVerification(match verified {
            Ok(claims) => Ok(select_claims(claims, wanted)),
            Err(TokenError::UnknownKey) if self.keys.load().is_empty() => {
                let detail = "nothing was executed, because the keys that tokens are verified with could not be fetched \
                              yet; try again with the same key";
                Err(Refusal::new(RefusalReason::StoreUnavailable, detail).retry_after(RETRY_AFTER_NO_KEYS))
            }
            Err(TokenError::UnknownKey) => Err(token_refusal("no key is known that it could be verified with")),
            Err(TokenError::Invalid(why)) => Err(token_refusal(&why)),
        })
    }

    /// Refreshes keys from a URL in a background task, for as long as the verifier exists.
    pub(crate) fn refresh_in_background(self: &Arc<Self>) {
        let Some(every) = self.remote.as_ref().map(|remote| remote.refresh_interval) else { return };
        let verifier = Arc::downgrade(self);
        tokio::spawn(async move {
            while let Some(verifier) = verifier.upgrade() {
                if let Some(remote) = &verifier.remote {
                    remote.refresh(&verifier.keys).await;
                }
                drop(verifier);
                tokio::time::sleep(every).await;
            }
        });
    }

    fn verify(&self, token: &str) -> Result<Map<String, Value>, TokenError> {
        let header = decode_header(token).map_err(|why| describe_error(why.kind()))?;
        if header.crit.is_some() {
            return Err(TokenError::Invalid("it asks for extensions (crit) that are not known here".into()));
        }
        let keys = self.keys.load();
        let candidates = keys.find(header.kid.as_deref(), header.alg)?;
        let rules = &self.validations[&header.alg];
        let mut doubt = TokenError::UnknownKey;
        for key in candidates {
            match decode::<Map<String, Value>>(token, key, rules) {
                Ok(verified) => return Ok(verified.claims),
                Err(why) => match why.kind() {
                    // A token without a key id may be signed with a key that is newer than the known ones.
                    ErrorKind::InvalidSignature if header.kid.is_none() && self.remote.is_some() => {}
                    ErrorKind::InvalidSignature => doubt = describe_error(&ErrorKind::InvalidSignature),
                    kind => return Err(describe_error(kind)),
                },
            }
        }
        Err(doubt)
    }
}

fn validation(settings: &JwtSettings) -> Validation {
    let mut rules = Validation { leeway: settings.leeway.as_secs(), validate_nbf: true, ..Validation::default() };
    if let Some(issuer) = &settings.issuer {
        rules.set_issuer(&[issuer]);
        rules.required_spec_claims.insert("iss".into());
    }
    // Without a configured audience, any audience is accepted.
    rules.validate_aud = !settings.audience.is_empty();
    if rules.validate_aud {
        rules.set_audience(&settings.audience);
        rules.required_spec_claims.insert("aud".into());
    }
    rules
}

fn extract_token<'a>(headers: &'a HeaderMap, from: &[TokenSource]) -> Result<&'a str, Refusal> {
    for source in from {
        let mut found: Vec<&[u8]> = match source {
            TokenSource::Header(name) => headers.get_all(name).iter().map(HeaderValue::as_bytes).collect(),
            TokenSource::Cookie(name) => cookie_values(headers, name),
        };
        let Some(value) = found.pop() else { continue };
        if !found.is_empty() {
            let detail = format!("the {} is sent more than once", describe_source(source));
            return Err(Refusal::new(RefusalReason::RequestAmbiguous, detail));
        }
        let value = std::str::from_utf8(value).map_err(|_| missing_token_refusal(from))?.trim();
        return match (source, value.split_once(' ')) {
            (TokenSource::Header(_), Some((scheme, token))) if scheme.eq_ignore_ascii_case("bearer") => {
                Ok(token.trim())
            }
            (TokenSource::Header(name), None) if name != header::AUTHORIZATION => Ok(value),
            (TokenSource::Cookie(_), None) => Ok(value),
            _ => Err(missing_token_refusal(from)),
        };
    }
    Err(missing_token_refusal(from))
}

pub(crate) fn cookie_values<'a>(headers: &'a HeaderMap, name: &str) -> Vec<&'a [u8]> {
    let pairs = headers.get_all(header::COOKIE).iter().flat_map(|line| line.as_bytes().split(|byte| *byte == b';'));
    let value = |pair: &'a [u8]| pair.trim_ascii().strip_prefix(name.as_bytes())?.strip_prefix(b"=");
    pairs.filter_map(value).collect()
}

fn describe_source(source: &TokenSource) -> String {
    match source {
        TokenSource::Header(name) => format!("header {name}"),
        TokenSource::Cookie(name) => format!("cookie {name:?}"),
    }
}

fn missing_token_refusal(from: &[TokenSource]) -> Refusal {
    let place = |source: &TokenSource| match source {
        TokenSource::Header(name) if name == header::AUTHORIZATION => "Authorization: Bearer TOKEN".to_owned(),
        source => describe_source(source),
    };
    let places: Vec<_> = from.iter().map(place).collect();
    let detail = format!("the caller is known by a token, and there is none; send it as {}", places.join(" or "));
    Refusal::new(RefusalReason::IdentityInvalid, detail)
}

/// Selects the wanted claims that are a string or an integer.
fn select_claims(all: Map<String, Value>, wanted: &HashSet<String>) -> TokenClaims {
    let text = |value: Value| match value {
        Value::String(text) => Some(text),
        Value::Number(number) if number.is_i64() || number.is_u64() => Some(number.to_string()),
        _ => None,
    };
    let asked = all.into_iter().filter(|(name, _)| wanted.contains(name));
    TokenClaims(asked.filter_map(|(name, value)| Some((name, text(value)?))).collect())
}

/// Describes the problem without quoting the token.
fn describe_error(kind: &ErrorKind) -> TokenError {
    TokenError::Invalid(match kind {
        ErrorKind::ExpiredSignature => "it has expired".into(),
        ErrorKind::ImmatureSignature => "it is not valid yet (nbf)".into(),
        ErrorKind::InvalidIssuer => "it is from another issuer (iss)".into(),
        ErrorKind::InvalidAudience => "it is for another audience (aud)".into(),
        ErrorKind::MissingRequiredClaim(claim) => format!("it has no claim {claim:?}, or one that cannot be read"),
        ErrorKind::InvalidClaimFormat(claim) => format!("its claim {claim:?} cannot be read"),
        ErrorKind::InvalidSignature => "its signature is invalid".into(),
        _ => "it is not a signed token in a form that is known here".into(),
    })
}

fn token_refusal(why: &str) -> Refusal {
    Refusal::new(RefusalReason::IdentityInvalid, format!("the token is not believed: {why}"))
}

impl fmt::Debug for JwtVerifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JwtVerifier({:?})", self.settings)
    }
}
