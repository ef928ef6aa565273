//! Verifies webhook deliveries and recognizes their retries.
//!
//! A sender repeats a delivery until it gets a 2xx, with the same id but a new timestamp and signature each time.
//! [`Policy::webhook`](crate::Policy::webhook) uses that id as the key. It verifies the signature over the exact bytes
//! of the body before the claim, so that a forged delivery cannot use up the id of a genuine one.
//!
//! Invariant: a delivery without proof that its sender has a secret is refused, also if there is no secret, no
//! signature, or an unreadable header.
//!
//! ```
//! use std::time::{Duration, UNIX_EPOCH};
//! use http::HeaderMap;
//! use ibid::webhook::{WebhookScheme, WebhookVerifier};
//!
//! let verifier = WebhookVerifier::new(WebhookScheme::GitHub, ["It's a Secret to Everybody"]).unwrap();
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
    scheme::{CustomWebhookScheme, SignatureEncoding, WebhookScheme},
};
use crate::policy::{InvalidSetting, require};

mod content;
mod scheme;
#[cfg(test)]
mod tests;

/// The default maximum difference between a delivery's timestamp and the current time.
pub const DEFAULT_TOLERANCE: Duration = Duration::from_secs(5 * 60);

/// Verifies the signatures of one endpoint's deliveries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WebhookVerifier {
    /// How the sender signs.
    pub scheme: WebhookScheme,
    /// The accepted secrets: one, or two during a rotation. Without a secret every delivery is refused.
    pub secrets: Vec<SigningSecret>,
    /// The maximum difference between a delivery's timestamp and the current time, in both directions. Not used by
    /// schemes without a timestamp.
    pub tolerance: Duration,
}

/// A secret that sender and receiver share. Never displayed.
#[derive(Clone)]
pub struct SigningSecret(Vec<u8>);

/// Why a delivery is refused. Contains no secrets.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WebhookSignatureError {
    /// A required header is missing.
    #[error("the header {0}, which every signed delivery has, is missing")]
    Missing(HeaderName),
    /// A header cannot be read.
    #[error("the header {0} cannot be read: {1}")]
    Malformed(HeaderName, &'static str),
    /// The timestamp is too old or in the future.
    #[error("it was signed at {0}, more than {1:?} from now; every attempt has to be signed anew")]
    Stale(u64, Duration),
    /// No signature matches this body under any of the secrets.
    #[error("no signature in the header {0} is one of this body under a secret of this route")]
    Mismatch(HeaderName),
}

/// The unverified content of a delivery's headers.
struct DeliverySignature<'a> {
    /// The header that contains the signatures.
    header: HeaderName,
    /// Seconds since the Unix epoch, if the scheme has a timestamp.
    timestamp: Option<u64>,
    /// The pieces of the signed content.
    content: Vec<&'a [u8]>,
    /// At least one signature.
    signatures: Vec<[u8; 32]>,
}

impl WebhookVerifier {
    /// Creates a verifier with the default tolerance. Secrets are given as the sender displays them.
    ///
    /// # Errors
    /// One sentence about an invalid secret, without the secret itself.
    pub fn new<'a>(scheme: WebhookScheme, secrets: impl IntoIterator<Item = &'a str>) -> Result<Self, InvalidSetting> {
        let secrets = secrets.into_iter().map(|secret| scheme.parse_secret(secret)).collect::<Result<_, _>>()?;
        Ok(Self { scheme, secrets, tolerance: DEFAULT_TOLERANCE })
    }

    /// Checks that the verifier can accept any delivery.
    ///
    /// # Errors
    /// One sentence that names the setting, the expected value and the actual value.
    pub fn check(&self) -> Result<(), InvalidSetting> {
        let message = "is missing; name what the sender signs with, such as [\"env:HOOK_SECRET\"], or say unsigned = true \
                       to take deliveries from anybody";
        require(!self.secrets.is_empty(), "secrets", message)?;
        let is_long_enough = !self.scheme.has_timestamp() || self.tolerance >= Duration::from_secs(1);
        let message = "is under a second; timestamps are in seconds, so it must be longer, such as \"5m\"";
        require(is_long_enough, "tolerance", message)?;
        match &self.scheme {
            WebhookScheme::Custom(custom) => custom.check(),
            _ => Ok(()),
        }
    }

    /// Verifies that a sender with one of the secrets signed the delivery at about `now`.
    ///
    /// # Errors
    /// Why the delivery is refused.
    pub fn verify(&self, headers: &HeaderMap, body: &[u8], now: SystemTime) -> Result<(), WebhookSignatureError> {
        let signed = self.scheme.read(headers, body)?;
        if let Some(timestamp) = signed.timestamp {
            let now = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
            if now.abs_diff(timestamp) > self.tolerance.as_secs() {
                return Err(WebhookSignatureError::Stale(timestamp, self.tolerance));
            }
        }
        // Compares all signatures even after a match, so that the time reveals nothing.
        let mut fits = Choice::from(0);
        for secret in &self.secrets {
            let expected = secret.sign(&signed.content);
            for signature in &signed.signatures {
                fits |= expected.ct_eq(signature);
            }
        }
        if fits.into() { Ok(()) } else { Err(WebhookSignatureError::Mismatch(signed.header)) }
    }

    /// Whether the signature uses this header. `name` is in lower case.
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
