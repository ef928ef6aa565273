//! Deliveries of webhooks: who sent them, and how their retries are told apart from new ones.
//!
//! A sender repeats a delivery until it is answered with a 2xx, under one id and with a new timestamp and signature each
//! time. [`Policy::webhook`](crate::Policy::webhook) takes that id as the key and checks the signature over the exact
//! bytes of the body before anything is claimed, so that a forged delivery cannot use up the id of a genuine one.
//!
//! Invariant: what is not proved to come from a holder of a secret is refused. No secret, no signature, a header that
//! cannot be read: refused.
//!
//! ```
//! use std::time::{Duration, UNIX_EPOCH};
//! use http::HeaderMap;
//! use ibid::webhook::{Scheme, Verifier};
//!
//! let verifier = Verifier::new(Scheme::GitHub, ["It's a Secret to Everybody"]).unwrap();
//! let mut headers = HeaderMap::new();
//! headers.insert(
//!     "x-hub-signature-256",
//!     "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17".parse().unwrap(),
//! );
//! assert!(verifier.verify(&headers, b"Hello, World!", UNIX_EPOCH).is_ok());
//! assert!(verifier.verify(&headers, b"Hello, World?", UNIX_EPOCH).is_err());
//! ```

use std::{
    fmt,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use hmac::{Hmac, KeyInit, Mac};
use http::{HeaderMap, HeaderName};
use sha2::Sha256;
use subtle::{Choice, ConstantTimeEq};

pub use self::{
    content::SignedContent,
    encoding::SignatureEncoding,
    scheme::{CustomWebhookScheme, WebhookScheme},
};

mod content;
mod encoding;
mod scheme;
#[cfg(test)]
mod tests;

/// How far a delivery's timestamp may be from now, unless said otherwise.
pub const DEFAULT_TOLERANCE: Duration = Duration::from_secs(5 * 60);

/// Checks the signatures of one endpoint's deliveries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WebhookVerifier {
    /// How the sender signs.
    pub scheme: WebhookScheme,
    /// Any of these will do: two of them while one takes the other's place. With none, nothing is believed.
    pub secrets: Vec<SigningSecret>,
    /// How far a delivery's timestamp may be from now, to either side. Schemes without one take nothing from it.
    pub tolerance: Duration,
}

/// What a sender and its receiver share. Never shown.
#[derive(Clone)]
pub struct SigningSecret(Vec<u8>);

/// Why a delivery is not believed. Nothing in it is secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WebhookSignatureError {
    /// A header that every delivery has.
    #[error("the header {0}, which every signed delivery has, is missing")]
    Missing(HeaderName),
    /// A header that cannot be read.
    #[error("the header {0} cannot be read: {1}")]
    Malformed(HeaderName, &'static str),
    /// It was signed too long ago, or for a time to come.
    #[error("it was signed at {0}, more than {1:?} from now; every attempt has to be signed anew")]
    Stale(u64, Duration),
    /// None of the signatures is one of this body under one of the secrets.
    #[error("no signature in the header {0} is one of this body under a secret of this route")]
    Mismatch(HeaderName),
}

/// What a delivery says about itself, before any of it is believed.
struct DeliverySignature<'a> {
    /// The header that the signatures came from.
    header: HeaderName,
    /// In seconds since the Unix epoch, if the scheme has one.
    timestamp: Option<u64>,
    /// What was signed, piece by piece.
    content: Vec<&'a [u8]>,
    /// At least one.
    signatures: Vec<[u8; 32]>,
}

impl WebhookVerifier {
    /// With the usual tolerance. A secret is written as its sender shows it.
    ///
    /// # Errors
    /// One sentence about the secret that cannot be one, which it does not hold.
    pub fn new<'a>(scheme: WebhookScheme, secrets: impl IntoIterator<Item = &'a str>) -> Result<Self, String> {
        let secrets = secrets.into_iter().map(|secret| scheme.parse_secret(secret)).collect::<Result<_, _>>()?;
        Ok(Self { scheme, secrets, tolerance: DEFAULT_TOLERANCE })
    }

    /// Whether it can believe anybody at all.
    ///
    /// # Errors
    /// One sentence that names the setting, what was found and what is allowed.
    pub fn check(&self) -> Result<(), String> {
        if self.secrets.is_empty() {
            let what = "secrets is missing; name what the sender signs with, such as [\"env:HOOK_SECRET\"], or say \
                        unsigned = true to take deliveries from anybody";
            return Err(what.into());
        }
        if self.scheme.has_timestamp() && self.tolerance < Duration::from_secs(1) {
            let what = "tolerance is under a second; timestamps are in seconds, so it must be longer, such as \"5m\"";
            return Err(what.into());
        }
        match &self.scheme {
            WebhookScheme::Custom(custom) => custom.check(),
            _ => Ok(()),
        }
    }

    /// Whether a delivery comes from somebody who has one of the secrets, and was signed about `now`.
    ///
    /// # Errors
    /// Why it is not believed.
    pub fn verify(&self, headers: &HeaderMap, body: &[u8], now: SystemTime) -> Result<(), WebhookSignatureError> {
        let signed = self.scheme.read(headers, body)?;
        if let Some(timestamp) = signed.timestamp {
            let now = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
            if now.abs_diff(timestamp) > self.tolerance.as_secs() {
                return Err(WebhookSignatureError::Stale(timestamp, self.tolerance));
            }
        }
        // All are compared, whatever has fitted: how long it takes says nothing about which.
        let mut fits = Choice::from(0);
        for secret in &self.secrets {
            let expected = secret.sign(&signed.content);
            for signature in &signed.signatures {
                fits |= expected.ct_eq(signature);
            }
        }
        if fits.into() { Ok(()) } else { Err(WebhookSignatureError::Mismatch(signed.header)) }
    }

    /// Whether this header has a part in the signature. `name` is in lower case.
    pub(crate) fn uses_header(&self, name: &str) -> bool {
        self.scheme.headers().iter().any(|header| header == name)
    }
}

impl SigningSecret {
    fn sign(&self, content: &[&[u8]]) -> [u8; 32] {
        let mut mac = <Hmac<Sha256>>::new_from_slice(&self.0).expect("any length will do");
        content.iter().for_each(|piece| mac.update(piece));
        mac.finalize().into_bytes().into()
    }
}

impl PartialEq for SigningSecret {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Eq for SigningSecret {}

impl fmt::Debug for SigningSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("****")
    }
}
