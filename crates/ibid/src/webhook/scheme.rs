//! The signature schemes of senders: headers, encoding and signed content.

use std::fmt;

use data_encoding::{BASE64_NOPAD, HEXLOWER_PERMISSIVE};
use http::{HeaderMap, HeaderName};

use super::{DeliverySignature, SignedContent, SigningSecret, WebhookSignatureError, content::SignedContentPart};
use crate::{
    key::KeySource,
    policy::{InvalidSetting, parse::words, require},
};

/// The signature scheme of a sender. All schemes use HMAC-SHA256.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum WebhookScheme {
    /// Standard Webhooks: `webhook-id`, `webhook-timestamp`, `webhook-signature`.
    Standard,
    /// Like [`Standard`](Self::Standard), with the header prefix `svix-` or `webhook-`.
    Svix,
    /// `X-Hub-Signature-256` over the body.
    GitHub,
    /// `Stripe-Signature` over a timestamp and the body.
    Stripe,
    /// `X-Shopify-Hmac-Sha256` over the body.
    Shopify,
    /// A similar scheme of another sender.
    Custom(CustomWebhookScheme),
}

/// A scheme with one signature in a header, over headers and the body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CustomWebhookScheme {
    /// The header that contains the signature.
    pub header: HeaderName,
    /// The text before the signature, such as `sha256=`.
    pub prefix: String,
    /// The encoding of the signature.
    pub encoding: SignatureEncoding,
    /// The signed content.
    pub content: SignedContent,
    /// The header with the time of the attempt, in seconds since the Unix epoch. It must be part of the content.
    pub timestamp: Option<HeaderName>,
}

/// The encoding of a signature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SignatureEncoding {
    /// Hexadecimal digits in either case.
    Hex,
    /// Base64 with padding (RFC 4648, section 4).
    Base64,
}

impl SignatureEncoding {
    /// Decodes the text. Returns `None` unless it is the only valid spelling of its bytes.
    pub fn decode(self, text: &[u8]) -> Option<Vec<u8>> {
        match self {
            Self::Hex => HEXLOWER_PERMISSIVE.decode(text).ok(),
            Self::Base64 => {
                let bare = text.strip_suffix(b"=").unwrap_or(text);
                let bare = bare.strip_suffix(b"=").unwrap_or(bare);
                // Not `BASE64`, which also accepts padding in the middle.
                text.len().is_multiple_of(4).then(|| BASE64_NOPAD.decode(bare).ok())?
            }
        }
    }
}

words!(SignatureEncoding, "encoding", { "hex" => Hex, "base64" => Base64 });

static STANDARD_HEADERS: [HeaderName; 3] = header_names("webhook-id", "webhook-timestamp", "webhook-signature");
static SVIX_HEADERS: [HeaderName; 3] = header_names("svix-id", "svix-timestamp", "svix-signature");
const GITHUB_HEADER: HeaderName = HeaderName::from_static("x-hub-signature-256");
const STRIPE_HEADER: HeaderName = HeaderName::from_static("stripe-signature");
const SHOPIFY_HEADER: HeaderName = HeaderName::from_static("x-shopify-hmac-sha256");

const fn header_names(id: &'static str, timestamp: &'static str, signature: &'static str) -> [HeaderName; 3] {
    [HeaderName::from_static(id), HeaderName::from_static(timestamp), HeaderName::from_static(signature)]
}

impl WebhookScheme {
    /// Returns the scheme with this name, such as `github`. `None` for `custom`, which needs further settings.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Standard, Self::Svix, Self::GitHub, Self::Stripe, Self::Shopify]
            .into_iter()
            .find(|scheme| scheme.name() == name)
    }

    /// The name of the scheme, such as `github`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Standard => "standard",
            Self::Svix => "svix",
            Self::GitHub => "github",
            Self::Stripe => "stripe",
            Self::Shopify => "shopify",
            Self::Custom(_) => "custom",
        }
    }

    /// The sources of the delivery id, which is the same on every attempt. Empty for custom schemes.
    pub fn key_sources(&self) -> Vec<KeySource> {
        let header = |name: &'static str| KeySource::Header(HeaderName::from_static(name));
        match self {
            Self::Standard => vec![header("webhook-id")],
            Self::Svix => vec![header("svix-id"), header("webhook-id")],
            Self::GitHub => vec![header("x-github-delivery")],
            Self::Stripe => vec!["json:/id".parse().expect("a source of keys")],
            // Not X-Shopify-Event-Id, which deliveries of several subscriptions share.
            Self::Shopify => vec![header("x-shopify-webhook-id")],
            Self::Custom(_) => Vec::new(),
        }
    }

    /// Whether deliveries have a timestamp, so that old ones can be refused.
    pub fn has_timestamp(&self) -> bool {
        match self {
            Self::Standard | Self::Svix | Self::Stripe => true,
            Self::GitHub | Self::Shopify => false,
            Self::Custom(custom) => custom.timestamp.is_some(),
        }
    }

    /// The headers that are signed or contain a signature.
    pub fn headers(&self) -> Vec<HeaderName> {
        match self {
            Self::Standard => STANDARD_HEADERS.to_vec(),
            Self::Svix => [&SVIX_HEADERS[..], &STANDARD_HEADERS].concat(),
            Self::GitHub => vec![GITHUB_HEADER],
            Self::Stripe => vec![STRIPE_HEADER],
            Self::Shopify => vec![SHOPIFY_HEADER],
            Self::Custom(custom) => [&custom.header].into_iter().chain(custom.content.headers()).cloned().collect(),
        }
    }

    /// Parses a secret as the sender displays it.
    ///
    /// # Errors
    /// Why the secret is invalid, without the secret itself.
    pub fn parse_secret(&self, shown: &str) -> Result<SigningSecret, InvalidSetting> {
        require(!shown.is_empty(), "", "it is empty")?;
        if !matches!(self, Self::Standard | Self::Svix) {
            return Ok(SigningSecret(shown.into()));
        }
        let message = "it is one of a key pair (v1a), which is not supported; ask the sender for a \"whsec_\" one";
        require(!shown.starts_with("whpk_") && !shown.starts_with("whsk_"), "", message)?;
        let encoded = shown.strip_prefix("whsec_").unwrap_or(shown);
        // Some senders display it without padding.
        let secret = BASE64_NOPAD.decode(encoded.trim_end_matches('=').as_bytes());
        let secret = secret.unwrap_or_default();
        require(!secret.is_empty(), "", "it is no secret of this sender; allowed is \"whsec_\" and base64")?;
        Ok(SigningSecret(secret))
    }

    /// Reads the headers of a delivery.
    pub(super) fn read<'a>(
        &'a self, headers: &'a HeaderMap, body: &'a [u8],
    ) -> Result<DeliverySignature<'a>, WebhookSignatureError> {
        match self {
            Self::Standard => parse_standard(&STANDARD_HEADERS, headers, body),
            Self::Svix => {
                let [svix, plain] = [&SVIX_HEADERS, &STANDARD_HEADERS].map(|family| headers.contains_key(&family[0]));
                let [svix_id, plain_id] = [&SVIX_HEADERS[0], &STANDARD_HEADERS[0]];
                if svix && plain && single_header(headers, svix_id)? != single_header(headers, plain_id)? {
                    // Only one of them is signed; the app might use the other.
                    let why = "webhook-id says something else";
                    return Err(WebhookSignatureError::Malformed(svix_id.clone(), why));
                }
                parse_standard(if svix || !plain { &SVIX_HEADERS } else { &STANDARD_HEADERS }, headers, body)
            }
            Self::GitHub => parse_single(headers, &GITHUB_HEADER, "sha256=", SignatureEncoding::Hex, vec![body], None),
            Self::Stripe => parse_stripe(headers, body),
            Self::Shopify => parse_single(headers, &SHOPIFY_HEADER, "", SignatureEncoding::Base64, vec![body], None),
            Self::Custom(custom) => custom.read(headers, body),
        }
    }
}

/// Parses `v1,BASE64 v1,BASE64`, over `id.timestamp.body`. Ignores signatures of other versions.
fn parse_standard<'a>(
    [id, timestamp, signature]: &[HeaderName; 3], headers: &'a HeaderMap, body: &'a [u8],
) -> Result<DeliverySignature<'a>, WebhookSignatureError> {
    let value = single_header(headers, id)?;
    if value.contains(&b'.') {
        return Err(WebhookSignatureError::Malformed(id.clone(), "a dot in it could also end it"));
    }
    let written = single_header(headers, timestamp)?;
    let versions = single_header(headers, signature)?.split(|byte| *byte == b' ');
    let signatures = versions
        .filter_map(|version| decode_digest(SignatureEncoding::Base64, version.strip_prefix(b"v1,")?))
        .collect();
    Ok(DeliverySignature {
        header: signature.clone(),
        timestamp: Some(parse_seconds(timestamp, written)?),
        content: vec![value, b".", written, b".", body],
        signatures: require_any(signature, signatures, "it has no \"v1,\" and base64 of 32 bytes")?,
    })
}

/// Parses `t=SECONDS,v1=HEX,v1=HEX`, over `t.body`. Ignores other members.
fn parse_stripe<'a>(headers: &'a HeaderMap, body: &'a [u8]) -> Result<DeliverySignature<'a>, WebhookSignatureError> {
    let mut time = None;
    let mut signatures = Vec::new();
    for member in single_header(headers, &STRIPE_HEADER)?.split(|byte| *byte == b',') {
        let member = member.trim_ascii();
        if let Some(written) = member.strip_prefix(b"t=") {
            if time.replace(written).is_some() {
                return Err(WebhookSignatureError::Malformed(STRIPE_HEADER, "\"t=\" is there twice"));
            }
        } else if let Some(written) = member.strip_prefix(b"v1=") {
            signatures.extend(decode_digest(SignatureEncoding::Hex, written));
        }
    }
    let written = time.ok_or(WebhookSignatureError::Malformed(STRIPE_HEADER, "\"t=\" is missing"))?;
    Ok(DeliverySignature {
        header: STRIPE_HEADER,
        timestamp: Some(parse_seconds(&STRIPE_HEADER, written)?),
        content: vec![written, b".", body],
        signatures: require_any(&STRIPE_HEADER, signatures, "it has no \"v1=\" and 64 hexadecimal digits")?,
    })
}

/// Parses a header that contains a single signature.
fn parse_single<'a>(
    headers: &HeaderMap, header: &HeaderName, prefix: &str, encoding: SignatureEncoding, content: Vec<&'a [u8]>,
    timestamp: Option<u64>,
) -> Result<DeliverySignature<'a>, WebhookSignatureError> {
    let written = single_header(headers, header)?.strip_prefix(prefix.as_bytes());
    let signatures = written.and_then(|written| decode_digest(encoding, written)).into_iter().collect();
    let what = "it is not the prefix and 32 bytes that this sender writes";
    let signatures = require_any(header, signatures, what)?;
    Ok(DeliverySignature { header: header.clone(), timestamp, content, signatures })
}

impl CustomWebhookScheme {
    /// Checks that the settings are consistent.
    ///
    /// # Errors
    /// One sentence that names the setting.
    pub fn check(&self) -> Result<(), InvalidSetting> {
        let Some(name) = &self.timestamp else { return Ok(()) };
        let message = format!(
            "names {name}, which is not signed, so anybody could change it; add {{{name}}} to signature.content"
        );
        require(self.content.headers().any(|signed| signed == name), "signature.timestamp", message)
    }

    fn read<'a>(
        &'a self, headers: &'a HeaderMap, body: &'a [u8],
    ) -> Result<DeliverySignature<'a>, WebhookSignatureError> {
        let mut content: Vec<&[u8]> = Vec::with_capacity(self.content.parts.len() + 1);
        for piece in &self.content.parts {
            content.push(match piece {
                SignedContentPart::Text(text) => text.as_bytes(),
                SignedContentPart::Header(name, end) => {
                    let value = single_header(headers, name)?;
                    if value.contains(end) {
                        return Err(WebhookSignatureError::Malformed(name.clone(), "what ends it is in it"));
                    }
                    value
                }
            });
        }
        content.push(body);
        let time =
            self.timestamp.as_ref().map(|name| parse_seconds(name, single_header(headers, name)?)).transpose()?;
        parse_single(headers, &self.header, &self.prefix, self.encoding, content, time)
    }
}

/// Returns the value of a header that must occur once.
fn single_header<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<&'a [u8], WebhookSignatureError> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (None, _) => Err(WebhookSignatureError::Missing(name.clone())),
        (Some(_), Some(_)) => Err(WebhookSignatureError::Malformed(name.clone(), "it is there more than once")),
        (Some(value), None) => Ok(value.as_bytes()),
    }
}

/// Digits only: signs and spaces would be other spellings of a number that is signed as text.
fn parse_seconds(header: &HeaderName, written: &[u8]) -> Result<u64, WebhookSignatureError> {
    let digits = std::str::from_utf8(written).ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    let number = digits.and_then(|digits| digits.parse().ok());
    number.ok_or(WebhookSignatureError::Malformed(header.clone(), "its time is no number of seconds"))
}

fn decode_digest(encoding: SignatureEncoding, written: &[u8]) -> Option<[u8; 32]> {
    encoding.decode(written)?.try_into().ok()
}

fn require_any(
    header: &HeaderName, found: Vec<[u8; 32]>, without: &'static str,
) -> Result<Vec<[u8; 32]>, WebhookSignatureError> {
    if found.is_empty() { Err(WebhookSignatureError::Malformed(header.clone(), without)) } else { Ok(found) }
}

impl fmt::Display for WebhookScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Custom(custom) = self else { return f.write_str(self.name()) };
        let CustomWebhookScheme { header, prefix, encoding, content, timestamp } = custom;
        write!(f, "{header}: {prefix}{encoding} of {content}")?;
        timestamp.as_ref().map_or(Ok(()), |name| write!(f, ", signed at {name}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 4648, section 10.
    #[test]
    fn published_vectors() {
        for (text, hex, base64) in [
            ("", "", ""),
            ("f", "66", "Zg=="),
            ("fo", "666F", "Zm8="),
            ("foo", "666f6f", "Zm9v"),
            ("foob", "666F6F62", "Zm9vYg=="),
            ("fooba", "666F6f6261", "Zm9vYmE="),
            ("foobar", "666F6F626172", "Zm9vYmFy"),
        ] {
            assert_eq!(SignatureEncoding::Hex.decode(hex.as_bytes()).as_deref(), Some(text.as_bytes()), "{hex}");
            assert_eq!(
                SignatureEncoding::Base64.decode(base64.as_bytes()).as_deref(),
                Some(text.as_bytes()),
                "{base64}"
            );
        }
        assert_eq!(SignatureEncoding::Base64.decode(b"+/+/").as_deref(), Some(&[0xfb, 0xff, 0xbf][..]));
    }

    #[test]
    fn nothing_has_a_second_spelling() {
        for text in ["6", "6g", " 66", "0x66", "66 ", "+6"] {
            assert_eq!(SignatureEncoding::Hex.decode(text.as_bytes()), None, "{text:?}");
        }
        for text in
            ["Zg", "Zg=", "Zh==", "Zm9=", "Zm8=Zm8=", "Z===", "====", "Zm9v\n", "Zm9-", "Zm9_", "Zm 9", "=Zm9", "Zg==="]
        {
            assert_eq!(SignatureEncoding::Base64.decode(text.as_bytes()), None, "{text:?}");
        }
    }
}
