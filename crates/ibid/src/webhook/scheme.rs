//! How senders sign: which headers, which encoding, what is signed.

use std::fmt;

use http::{HeaderMap, HeaderName};

use super::{Content, Encoding, Signed, SigningSecret, Unverified, content::Piece};
use crate::key::KeySource;

/// How a sender signs its deliveries. All of them are HMAC-SHA256.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Scheme {
    /// Standard Webhooks: `webhook-id`, `webhook-timestamp`, `webhook-signature`.
    Standard,
    /// The same with `svix-` before the names, or `webhook-`.
    Svix,
    /// `X-Hub-Signature-256` over the body alone.
    GitHub,
    /// `Stripe-Signature` over a timestamp and the body.
    Stripe,
    /// `X-Shopify-Hmac-Sha256` over the body alone.
    Shopify,
    /// Anything alike.
    Custom(Custom),
}

/// One signature in a header of its own, over headers and the body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Custom {
    /// Where the signature is.
    pub header: HeaderName,
    /// What stands before it there, such as `sha256=`.
    pub prefix: String,
    /// How it is written.
    pub encoding: Encoding,
    /// What is signed.
    pub content: Content,
    /// The header with the time of the attempt, in seconds since the Unix epoch. Must be part of the content.
    pub timestamp: Option<HeaderName>,
}

static STANDARD: [HeaderName; 3] = family("webhook-id", "webhook-timestamp", "webhook-signature");
static SVIX: [HeaderName; 3] = family("svix-id", "svix-timestamp", "svix-signature");
const GITHUB: HeaderName = HeaderName::from_static("x-hub-signature-256");
const STRIPE: HeaderName = HeaderName::from_static("stripe-signature");
const SHOPIFY: HeaderName = HeaderName::from_static("x-shopify-hmac-sha256");

const fn family(id: &'static str, timestamp: &'static str, signature: &'static str) -> [HeaderName; 3] {
    [HeaderName::from_static(id), HeaderName::from_static(timestamp), HeaderName::from_static(signature)]
}

impl Scheme {
    /// The scheme of that name, such as `github`. `None` for `custom`, which a name does not describe.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Standard, Self::Svix, Self::GitHub, Self::Stripe, Self::Shopify]
            .into_iter()
            .find(|scheme| scheme.name() == name)
    }

    /// Its name.
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

    /// Where the id of a delivery is that stays the same on every attempt. Empty for custom ones.
    pub fn id(&self) -> Vec<KeySource> {
        let header = |name: &'static str| KeySource::Header(HeaderName::from_static(name));
        match self {
            Self::Standard => vec![header("webhook-id")],
            Self::Svix => vec![header("svix-id"), header("webhook-id")],
            Self::GitHub => vec![header("x-github-delivery")],
            Self::Stripe => vec!["json:/id".parse().expect("a source of keys")],
            // Not X-Shopify-Event-Id: deliveries of several subscriptions share that one.
            Self::Shopify => vec![header("x-shopify-webhook-id")],
            Self::Custom(_) => Vec::new(),
        }
    }

    /// Whether deliveries carry a time, so that an old one can be told from a new one.
    pub fn has_time(&self) -> bool {
        match self {
            Self::Standard | Self::Svix | Self::Stripe => true,
            Self::GitHub | Self::Shopify => false,
            Self::Custom(custom) => custom.timestamp.is_some(),
        }
    }

    /// The headers that are signed or carry a signature.
    pub fn headers(&self) -> Vec<HeaderName> {
        match self {
            Self::Standard => STANDARD.to_vec(),
            Self::Svix => [&SVIX[..], &STANDARD].concat(),
            Self::GitHub => vec![GITHUB],
            Self::Stripe => vec![STRIPE],
            Self::Shopify => vec![SHOPIFY],
            Self::Custom(custom) => [&custom.header].into_iter().chain(custom.content.headers()).cloned().collect(),
        }
    }

    /// A secret as its sender shows it.
    ///
    /// # Errors
    /// Why it cannot be one. The message does not hold it.
    pub fn secret(&self, shown: &str) -> Result<SigningSecret, String> {
        if shown.is_empty() {
            return Err("it is empty".into());
        }
        if !matches!(self, Self::Standard | Self::Svix) {
            return Ok(SigningSecret(shown.into()));
        }
        if shown.starts_with("whpk_") || shown.starts_with("whsk_") {
            return Err(
                "it is one of a key pair (v1a), which is not supported; ask the sender for a \"whsec_\" one".into()
            );
        }
        let encoded = shown.strip_prefix("whsec_").unwrap_or(shown);
        // Some show it without its padding.
        let encoded = encoded.trim_end_matches('=');
        let padding = &"==="[..(4 - encoded.len() % 4) % 4];
        let secret =
            Encoding::Base64.decode(format!("{encoded}{padding}").as_bytes()).filter(|secret| !secret.is_empty());
        secret
            .map(SigningSecret)
            .ok_or_else(|| "it is no secret of this sender; allowed is \"whsec_\" and base64".into())
    }

    /// Reads what a delivery says about itself.
    pub(super) fn read<'a>(&'a self, headers: &'a HeaderMap, body: &'a [u8]) -> Result<Signed<'a>, Unverified> {
        match self {
            Self::Standard => standard(&STANDARD, headers, body),
            Self::Svix => {
                let [svix, plain] = [&SVIX, &STANDARD].map(|family| headers.contains_key(&family[0]));
                if svix && plain && only(headers, &SVIX[0])? != only(headers, &STANDARD[0])? {
                    // Only one of them is signed; the other may be what the app goes by.
                    return Err(Unverified::Malformed(SVIX[0].clone(), "webhook-id says something else"));
                }
                standard(if svix || !plain { &SVIX } else { &STANDARD }, headers, body)
            }
            Self::GitHub => one(headers, &GITHUB, "sha256=", Encoding::Hex, vec![body], None),
            Self::Stripe => stripe(headers, body),
            Self::Shopify => one(headers, &SHOPIFY, "", Encoding::Base64, vec![body], None),
            Self::Custom(custom) => custom.read(headers, body),
        }
    }
}

/// `v1,BASE64 v1,BASE64`, over `id.timestamp.body`. Signatures of other versions are left alone.
fn standard<'a>(
    [id, timestamp, signature]: &[HeaderName; 3], headers: &'a HeaderMap, body: &'a [u8],
) -> Result<Signed<'a>, Unverified> {
    let value = only(headers, id)?;
    if value.contains(&b'.') {
        return Err(Unverified::Malformed(id.clone(), "a dot in it could also end it"));
    }
    let written = only(headers, timestamp)?;
    let versions = only(headers, signature)?.split(|byte| *byte == b' ');
    let signatures = versions.filter_map(|version| digest(Encoding::Base64, version.strip_prefix(b"v1,")?)).collect();
    Ok(Signed {
        header: signature.clone(),
        timestamp: Some(seconds(timestamp, written)?),
        content: vec![value, b".", written, b".", body],
        signatures: any(signature, signatures, "it has no \"v1,\" and base64 of 32 bytes")?,
    })
}

/// `t=SECONDS,v1=HEX,v1=HEX`, over `t.body`. Other members are left alone.
fn stripe<'a>(headers: &'a HeaderMap, body: &'a [u8]) -> Result<Signed<'a>, Unverified> {
    let mut time = None;
    let mut signatures = Vec::new();
    for member in only(headers, &STRIPE)?.split(|byte| *byte == b',') {
        let member = member.trim_ascii();
        if let Some(written) = member.strip_prefix(b"t=") {
            if time.replace(written).is_some() {
                return Err(Unverified::Malformed(STRIPE, "\"t=\" is there twice"));
            }
        } else if let Some(written) = member.strip_prefix(b"v1=") {
            signatures.extend(digest(Encoding::Hex, written));
        }
    }
    let written = time.ok_or(Unverified::Malformed(STRIPE, "\"t=\" is missing"))?;
    Ok(Signed {
        header: STRIPE,
        timestamp: Some(seconds(&STRIPE, written)?),
        content: vec![written, b".", body],
        signatures: any(&STRIPE, signatures, "it has no \"v1=\" and 64 hexadecimal digits")?,
    })
}

/// A header with nothing but one signature.
fn one<'a>(
    headers: &HeaderMap, header: &HeaderName, prefix: &str, encoding: Encoding, content: Vec<&'a [u8]>,
    timestamp: Option<u64>,
) -> Result<Signed<'a>, Unverified> {
    let written = only(headers, header)?.strip_prefix(prefix.as_bytes());
    let signatures = written.and_then(|written| digest(encoding, written)).into_iter().collect();
    let what = "it is not the prefix and 32 bytes that this sender writes";
    Ok(Signed { header: header.clone(), timestamp, content, signatures: any(header, signatures, what)? })
}

impl Custom {
    /// Whether it can be what it says.
    ///
    /// # Errors
    /// One sentence that names the setting.
    pub fn check(&self) -> Result<(), String> {
        match &self.timestamp {
            Some(name) if !self.content.headers().any(|signed| signed == name) => Err(format!(
                "signature.timestamp names {name}, which is not signed, so anybody could change it; add {{{name}}} to \
                 signature.content"
            )),
            _ => Ok(()),
        }
    }

    fn read<'a>(&'a self, headers: &'a HeaderMap, body: &'a [u8]) -> Result<Signed<'a>, Unverified> {
        let mut content: Vec<&[u8]> = Vec::with_capacity(self.content.pieces().len() + 1);
        for piece in self.content.pieces() {
            content.push(match piece {
                Piece::Text(text) => text.as_bytes(),
                Piece::Header(name, end) => {
                    let value = only(headers, name)?;
                    if value.contains(end) {
                        return Err(Unverified::Malformed(name.clone(), "what ends it is in it"));
                    }
                    value
                }
            });
        }
        content.push(body);
        let time = self.timestamp.as_ref().map(|name| seconds(name, only(headers, name)?)).transpose()?;
        one(headers, &self.header, &self.prefix, self.encoding, content, time)
    }
}

/// The value of a header that must be there once.
fn only<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<&'a [u8], Unverified> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (None, _) => Err(Unverified::Missing(name.clone())),
        (Some(_), Some(_)) => Err(Unverified::Malformed(name.clone(), "it is there more than once")),
        (Some(value), None) => Ok(value.as_bytes()),
    }
}

/// Digits only: signs and blanks would be second spellings of a number that is signed as text.
fn seconds(header: &HeaderName, written: &[u8]) -> Result<u64, Unverified> {
    let digits = std::str::from_utf8(written).ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    let number = digits.and_then(|digits| digits.parse().ok());
    number.ok_or(Unverified::Malformed(header.clone(), "its time is no number of seconds"))
}

fn digest(encoding: Encoding, written: &[u8]) -> Option<[u8; 32]> {
    encoding.decode(written)?.try_into().ok()
}

fn any(header: &HeaderName, found: Vec<[u8; 32]>, without: &'static str) -> Result<Vec<[u8; 32]>, Unverified> {
    if found.is_empty() { Err(Unverified::Malformed(header.clone(), without)) } else { Ok(found) }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Custom(custom) = self else { return f.write_str(self.name()) };
        let Custom { header, prefix, encoding, content, timestamp } = custom;
        write!(f, "{header}: {prefix}{encoding} of {content}")?;
        timestamp.as_ref().map_or(Ok(()), |name| write!(f, ", signed at {name}"))
    }
}
