//! The scope: who may see a remembered answer, and at which address it is stored.
//!
//! A replay answers in the app's place, so it must never cross from one caller to another. The scope identifies the
//! caller; scope and key determine the [`Address`]. Each part is length-framed, so that two different scopes never
//! share an address.

use std::{borrow::Cow, cell::Cell, fmt, net::IpAddr, str::FromStr};

use hmac::{Hmac, KeyInit, Mac};
use http::{HeaderMap, HeaderName, Method, Uri, header};
use sha2::Sha256;

pub(crate) use self::credentials::{cookies, cookies_set};
pub use self::{credentials::Credentials, trusted::TrustedProxies};
use crate::{
    fingerprint::HashStream,
    policy::InvalidSetting,
    refusal::{Refusal, RefusalReason},
    sent_names::SentHeaders,
    store::{Address, Fingerprint},
};

mod credentials;
#[cfg(test)]
mod tests;
mod trusted;

/// The version of the address format. Changing it makes all records unreachable.
const ADDRESS_VERSION: u8 = 2;

/// The memory that a scope takes first, in bytes. Most scopes need no more.
const SCOPE_BYTES: usize = 192;
/// The maximum memory that a thread keeps for its next scope, in bytes.
const MAX_SCRATCH_BYTES: usize = 4096;

thread_local!(static SCRATCH: Cell<Vec<u8>> = const { Cell::new(Vec::new()) });

/// A part of the scope.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ScopePart {
    /// All [credential headers](Credentials) together, as sent.
    Credential,
    /// A cookie with this name.
    Cookie(String),
    /// A header. Accepted only from trusted proxies, unless the scope also contains [`Credential`](Self::Credential).
    Header(HeaderName),
    /// A claim of a verified token.
    Jwt(String),
    /// The host name in lower case, without the port.
    Host,
    /// The request's method.
    Method,
    /// The request's path.
    Path,
    /// The route's pattern.
    Route,
    /// One scope for all callers.
    Global,
    /// A cookie, header or claim that may be missing. Missing is a distinct value.
    Optional(Box<ScopePart>),
}

/// The parts without a name of their own, as in settings.
const PLAIN_PARTS: [(&str, ScopePart); 6] = [
    ("credential", ScopePart::Credential),
    ("host", ScopePart::Host),
    ("method", ScopePart::Method),
    ("path", ScopePart::Path),
    ("route", ScopePart::Route),
    ("global", ScopePart::Global),
];

/// A secret that turns addresses into HMACs, so that readers of the store cannot guess keys. It cannot be rotated while
/// records are live.
#[derive(Clone)]
pub struct AddressSecret([u8; 32]);

/// The claims of a caller's verified token.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenClaims(pub std::collections::BTreeMap<String, String>);

/// The result of verifying a caller's token: its claims, or why it was rejected. The verifying code puts it into the
/// request's extensions. Only routes that [read claims](crate::Policy::claims) use it.
#[derive(Debug, Clone)]
pub struct TokenVerification(pub Result<TokenClaims, Refusal>);

/// The input from which a scope is computed.
#[derive(Debug, Clone, Copy)]
pub struct ScopeInput<'a> {
    /// The request's method.
    pub method: &'a Method,
    /// The request's URI.
    pub uri: &'a Uri,
    /// The request's headers.
    pub headers: &'a HeaderMap,
    /// The address of the sender, if known.
    pub peer: Option<IpAddr>,
    /// The result of token verification, if it took place.
    pub identity: Option<&'a TokenVerification>,
    /// The route's pattern.
    pub route: &'a str,
    /// The proxies whose scope headers are accepted.
    pub trusted: &'a TrustedProxies,
    /// The headers that carry credentials.
    pub credentials: &'a Credentials,
}

/// How [`ScopePart::Credential`] identifies a caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallerKind {
    /// By a credential, or the scope needs none.
    Named,
    /// The caller has neither credential nor cookies.
    Anonymous,
    /// By cookies only: refused, unless a response to the same anonymous request set these cookies.
    CookiesOnly,
}

/// The values of a scope's parts, length-framed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Scope(Vec<u8>);

impl Scope {
    /// Computes the scope of a request.
    ///
    /// # Errors
    /// A refusal if a part is missing, repeated or not accepted. Of several, the first in the table of refusals.
    pub fn of(parts: &[ScopePart], caller: &ScopeInput<'_>) -> Result<Self, Refusal> {
        match Self::read(parts, caller, &SentHeaders::of(caller.headers))? {
            (_, CallerKind::CookiesOnly) => Err(cookies_only()),
            (scope, CallerKind::Named | CallerKind::Anonymous) => Ok(scope),
        }
    }

    /// Like [`of`](Self::of), but a caller with cookies only gets the anonymous scope.
    pub(crate) fn read(
        parts: &[ScopePart], caller: &ScopeInput<'_>, sent: &SentHeaders<'_>,
    ) -> Result<(Self, CallerKind), Refusal> {
        // With a credential, a header only narrows the scope: a forged value selects other keys of the same caller.
        let narrows = parts.contains(&ScopePart::Credential);
        let mut framed = SCRATCH.take();
        framed.clear();
        framed.reserve(SCOPE_BYTES);
        let mut kind = CallerKind::Named;
        let mut refused: Option<Refusal> = None;
        for part in parts {
            let appended = match part {
                ScopePart::Credential => append_credential(caller, sent, &mut framed).map(|found| kind = found),
                part => part.append(caller, sent, narrows, &mut framed),
            };
            if let Err(refusal) = appended
                && refused.as_ref().is_none_or(|first| refusal.reason < first.reason)
            {
                refused = Some(refusal);
            }
        }
        match refused {
            Some(refusal) if kind == CallerKind::CookiesOnly && refusal.reason > RefusalReason::ScopeMissing => {
                Err(cookies_only())
            }
            Some(refusal) => Err(refusal),
            None => Ok((Self(framed), kind)),
        }
    }

    /// Creates a scope from plain values, for handlers without a layer.
    pub fn from_parts(parts: &[&str]) -> Self {
        let mut framed = Vec::new();
        for part in parts {
            frame(&mut framed, b'v', part.as_bytes());
        }
        Self(framed)
    }

    /// The address of a key in this scope. Pass `fingerprint` if each fingerprint has its own entry.
    pub fn address(&self, key: &str, fingerprint: Option<&Fingerprint>, secret: Option<&AddressSecret>) -> Address {
        let fingerprint = fingerprint.map(|fingerprint| (b'f', &fingerprint.digest[..]));
        Address(digest(secret, &self.0, [Some((b'k', key.as_bytes())), fingerprint]))
    }

    /// The address of a key in this scope, which is not needed any more. Its memory serves the next scope on this thread.
    pub(crate) fn into_address(mut self, key: &str, secret: Option<&AddressSecret>) -> Address {
        frame(&mut self.0, b'k', key.as_bytes());
        let address = Address(digest(secret, &self.0, []));
        if self.0.capacity() <= MAX_SCRATCH_BYTES {
            SCRATCH.set(self.0);
        }
        address
    }

    /// The address of an intent in this scope.
    pub(crate) fn intent_address(&self, intent: &[u8; 32], secret: Option<&AddressSecret>) -> Address {
        Address(digest(secret, &self.0, [Some((b'i', intent))]))
    }

    /// The value of [`ScopePart::Credential`], if the scope contains it.
    pub(crate) fn credential(&self) -> Option<&[u8]> {
        let mut rest = &self.0[..];
        while let Some((tag, tail)) = rest.split_first() {
            let (length, tail) = tail.split_first_chunk::<8>()?;
            let (value, tail) = tail.split_at_checked(u64::from_le_bytes(*length) as usize)?;
            if *tag == ScopePart::Credential.tag() {
                return Some(value);
            }
            rest = tail;
        }
        None
    }
}

/// Hashes the version, framed bytes, and further values that it frames.
fn digest<const N: usize>(secret: Option<&AddressSecret>, framed: &[u8], values: [Option<(u8, &[u8])>; N]) -> [u8; 32] {
    let feed = |update: &mut dyn FnMut(&[u8])| {
        update(&[ADDRESS_VERSION]);
        update(framed);
        for (tag, value) in values.into_iter().flatten() {
            update(&frame_head(tag, value));
            update(value);
        }
    };
    match secret {
        None => {
            let mut hash = HashStream::new();
            feed(&mut |bytes| hash.bytes(bytes));
            hash.finish()
        }
        Some(secret) => {
            let mut mac = <Hmac<Sha256>>::new_from_slice(&secret.0).expect("any length will do");
            feed(&mut |bytes| mac.update(bytes));
            mac.finalize().into_bytes().into()
        }
    }
}

/// The end of the addresses of entries that are no records, which lists of records leave out. No digest ends so in
/// practice.
const NOTE_SUFFIX: [u8; 8] = [0xff; 8];

impl Address {
    /// Makes this the address of a note: an entry that is no record, and that lists of records leave out.
    #[must_use]
    pub fn into_note(mut self) -> Self {
        self.0[24..].copy_from_slice(&NOTE_SUFFIX);
        self
    }

    /// Whether the entry at this address is a note.
    pub fn is_note(&self) -> bool {
        self.0.ends_with(&NOTE_SUFFIX)
    }

    /// The address of the note that an intent guard holds the key at this address.
    pub fn of_hold(&self) -> Self {
        Self(digest(None, &[], [Some((b'a', &self.0)), Some((b'n', b"hold"))])).into_note()
    }

    /// The address of a cookie that a response at this address set.
    pub(crate) fn of_cookie(&self, name: &[u8], value: &[u8], secret: Option<&AddressSecret>) -> Self {
        Self(digest(secret, &[], [Some((b'a', &self.0)), Some((b'n', name)), Some((b'v', value))]))
    }
}

/// Appends the credential, and fills in its length afterwards.
fn append_credential(
    caller: &ScopeInput<'_>, sent: &SentHeaders<'_>, out: &mut Vec<u8>,
) -> Result<CallerKind, Refusal> {
    frame(out, ScopePart::Credential.tag(), b"");
    let start = out.len();
    caller.credentials.append(sent, out)?;
    let length = out.len() - start;
    out[start - 8..start].copy_from_slice(&(length as u64).to_le_bytes());
    Ok(match length {
        0 if cookies(caller.headers).next().is_some() => CallerKind::CookiesOnly,
        0 => CallerKind::Anonymous,
        _ => CallerKind::Named,
    })
}

fn frame(out: &mut Vec<u8>, tag: u8, value: &[u8]) {
    out.extend_from_slice(&frame_head(tag, value));
    out.extend_from_slice(value);
}

fn frame_head(tag: u8, value: &[u8]) -> [u8; 9] {
    let mut head = [tag; 9];
    head[1..].copy_from_slice(&(value.len() as u64).to_le_bytes());
    head
}

impl ScopePart {
    /// Returns the value in a request; empty if the part is optional and missing.
    ///
    /// # Errors
    /// A refusal if the part is missing, repeated or not accepted.
    pub fn value<'a>(&self, caller: &ScopeInput<'a>) -> Result<Cow<'a, [u8]>, Refusal> {
        let sent = &SentHeaders::unread(caller.headers);
        match self {
            Self::Optional(part) => Ok(part.find(caller, sent, false)?.unwrap_or_default()),
            part => part.required_value(caller, sent, false),
        }
    }

    fn append(
        &self, caller: &ScopeInput<'_>, sent: &SentHeaders<'_>, narrows: bool, out: &mut Vec<u8>,
    ) -> Result<(), Refusal> {
        match self {
            Self::Optional(part) => match part.find(caller, sent, narrows)? {
                Some(value) => frame(out, part.tag(), &value),
                None => frame(out, self.tag(), b""),
            },
            part => frame(out, part.tag(), &part.required_value(caller, sent, narrows)?),
        }
        Ok(())
    }

    fn required_value<'a>(
        &self, caller: &ScopeInput<'a>, sent: &SentHeaders<'a>, narrows: bool,
    ) -> Result<Cow<'a, [u8]>, Refusal> {
        let may_be_empty = !matches!(self, Self::Cookie(_) | Self::Header(_) | Self::Jwt(_));
        match self.find(caller, sent, narrows)? {
            Some(value) if may_be_empty || !value.is_empty() => Ok(value),
            _ => Err(scope_missing(match self {
                Self::Jwt(claim) => format!("the caller's token has no claim {claim:?} to go by"),
                Self::Cookie(name) => format!("the cookie {name:?}, which says whose key this is, is missing"),
                part => format!("the {}, which says whose key this is, is missing", part.to_string().replace(':', " ")),
            })),
        }
    }

    fn find<'a>(
        &self, caller: &ScopeInput<'a>, sent: &SentHeaders<'a>, narrows: bool,
    ) -> Result<Option<Cow<'a, [u8]>>, Refusal> {
        Ok(Some(match self {
            Self::Credential => {
                let mut value = Vec::new();
                caller.credentials.append(sent, &mut value)?;
                if value.is_empty() && cookies(caller.headers).next().is_some() {
                    return Err(cookies_only());
                }
                value.into()
            }
            Self::Cookie(name) => return cookie(caller.headers, name).map(|value| value.map(Cow::from)),
            Self::Header(name) => return trusted_header(caller, sent, name, narrows).map(|value| value.map(Cow::from)),
            Self::Jwt(claim) => match caller.identity.map(|identity| &identity.0) {
                Some(Err(refusal)) => return Err(refusal.clone()),
                Some(Ok(claims)) => return Ok(claims.0.get(claim).map(|value| value.as_bytes().into())),
                None => return Err(scope_missing(format!("nobody has verified the caller's claim {claim:?}"))),
            },
            Self::Host => match host(caller, sent)? {
                host if host.iter().any(u8::is_ascii_uppercase) => host.to_ascii_lowercase().into(),
                host => host.into(),
            },
            Self::Method => caller.method.as_str().as_bytes().into(),
            Self::Path => caller.uri.path().as_bytes().into(),
            Self::Route => caller.route.as_bytes().into(),
            Self::Global => b"".as_slice().into(),
            Self::Optional(part) => return part.find(caller, sent, narrows),
        }))
    }

    /// The tag in the address. It separates kinds, so that a header cannot imitate a cookie.
    fn tag(&self) -> u8 {
        match self {
            Self::Credential => b'c',
            Self::Cookie(_) => b'o',
            Self::Header(_) => b'h',
            Self::Jwt(_) => b'j',
            Self::Host => b'H',
            Self::Method => b'm',
            Self::Path => b'p',
            Self::Route => b'r',
            Self::Global => b'g',
            // The tag of a missing part; a present one has the tag of its kind.
            Self::Optional(_) => b'-',
        }
    }

    /// The part itself, without `Optional`.
    pub fn part(&self) -> &Self {
        match self {
            Self::Optional(part) => part,
            part => part,
        }
    }

    /// Whether the part identifies the caller rather than the target.
    pub fn names_caller(&self) -> bool {
        matches!(self.part(), Self::Credential | Self::Cookie(_) | Self::Header(_) | Self::Jwt(_))
    }

    /// Whether the part's name suggests a user: a header with `user` in its name (but not User-Agent), or the subject
    /// of a JWT.
    pub fn names_user(&self) -> bool {
        match self.part() {
            Self::Header(name) => name.as_str().contains("user") && !name.as_str().contains("user-agent"),
            Self::Jwt(claim) => claim == "sub",
            _ => false,
        }
    }

    /// The header that the part reads, if any.
    pub fn header(&self) -> Option<&HeaderName> {
        match self.part() {
            Self::Header(name) => Some(name),
            _ => None,
        }
    }
}

pub(crate) fn cookies_only() -> Refusal {
    scope_missing(
        "the caller is known by cookies only, and which of them names the caller is not configured; \
         the operator can set scope = [\"host\", \"cookie:session\"] with the session cookie's name",
    )
}

fn cookie<'a>(headers: &'a HeaderMap, name: &str) -> Result<Option<&'a [u8]>, Refusal> {
    let mut found = None;
    for (cookie, value) in cookies(headers) {
        if cookie == name.as_bytes() && found.replace(value).is_some() {
            return Err(Refusal::new(RefusalReason::RequestAmbiguous, format!("the cookie {name:?} is sent twice")));
        }
    }
    Ok(found)
}

fn trusted_header<'a>(
    caller: &ScopeInput<'a>, sent: &SentHeaders<'a>, name: &HeaderName, narrows: bool,
) -> Result<Option<&'a [u8]>, Refusal> {
    let found = single_header(sent, name)?;
    if found.is_some_and(|value| !value.is_empty()) && !narrows && !caller.trusted.trusts(caller.peer) {
        let detail = format!(
            "the header {name} says whose key this is and is believed only from trusted proxies; \
             this request came from elsewhere (the operator can add the network to trusted_proxies)"
        );
        return Err(Refusal::new(RefusalReason::ScopeRefused, detail));
    }
    Ok(found)
}

fn host<'a>(caller: &ScopeInput<'a>, sent: &SentHeaders<'a>) -> Result<&'a [u8], Refusal> {
    if let Some(authority) = caller.uri.authority() {
        return Ok(authority.host().as_bytes());
    }
    let value = single_header(sent, &header::HOST)?.unwrap_or_default();
    if !value.is_ascii() && std::str::from_utf8(value).is_err() {
        return Err(Refusal::new(RefusalReason::RequestAmbiguous, "the Host header is not ASCII"));
    }
    Ok(without_port(value))
}

/// Removes the port from `shop.example:8080` and `[::1]:8080`. Other text is returned unchanged.
fn without_port(host: &[u8]) -> &[u8] {
    let digits = host.iter().rev().take_while(|byte| byte.is_ascii_digit()).count();
    match host[..host.len() - digits].split_last() {
        Some((b':', name)) if !name.contains(&b':') || name.starts_with(b"[") && name.ends_with(b"]") => name,
        _ => host,
    }
}

/// Returns the value of a header that must not be repeated.
fn single_header<'a>(sent: &SentHeaders<'a>, name: &HeaderName) -> Result<Option<&'a [u8]>, Refusal> {
    if sent.is_repeated(name) {
        return Err(Refusal::new(RefusalReason::RequestAmbiguous, format!("the header {name} is sent more than once")));
    }
    Ok(sent.get(name).map(|value| value.as_bytes()))
}

fn scope_missing(detail: impl Into<String>) -> Refusal {
    Refusal::new(RefusalReason::ScopeMissing, detail)
}

impl AddressSecret {
    /// Creates a secret from 32 bytes.
    pub fn new(secret: [u8; 32]) -> Self {
        Self(secret)
    }
}

impl fmt::Debug for AddressSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AddressSecret(****)")
    }
}

impl FromStr for ScopePart {
    type Err = InvalidSetting;

    fn from_str(text: &str) -> Result<Self, InvalidSetting> {
        if let Some(part) = text.strip_suffix('?') {
            return match part.parse()? {
                part @ (Self::Cookie(_) | Self::Header(_) | Self::Jwt(_)) => Ok(Self::Optional(Box::new(part))),
                _ => {
                    Err(format!("{text:?}: {part:?} is never missing; only a cookie, a header or a claim is optional"))?
                }
            };
        }
        let part = match text.split_once(':').unwrap_or((text, "")) {
            ("cookie", name) if !name.is_empty() => Some(Self::Cookie(name.into())),
            ("jwt", claim) if !claim.is_empty() => Some(Self::Jwt(claim.into())),
            ("header", name) => HeaderName::from_str(name).ok().map(Self::Header),
            _ => PLAIN_PARTS.into_iter().find(|(name, _)| *name == text).map(|(_, part)| part),
        };
        part.ok_or_else(|| {
            let allowed = "\"credential\" \"cookie:NAME\" \"header:NAME\" \"jwt:CLAIM\" \"host\" \"method\" \"path\" \
                           \"route\" \"global\"";
            format!("{text:?} is no part of a scope; allowed are {allowed}").into()
        })
    }
}

impl fmt::Display for ScopePart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cookie(name) => write!(f, "cookie:{name}"),
            Self::Header(name) => write!(f, "header:{name}"),
            Self::Jwt(claim) => write!(f, "jwt:{claim}"),
            Self::Optional(part) => write!(f, "{part}?"),
            plain => f.write_str(PLAIN_PARTS.iter().find(|(_, part)| part == plain).expect("a plain part").0),
        }
    }
}
