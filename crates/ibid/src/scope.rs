//! Who may see a remembered answer, and where it lives.
//!
//! A replay answers in the app's place, so it must never cross from one caller to another. The scope says who the
//! caller is; scope and key together give the [`Address`]. Each part is length-framed, so that no two different
//! scopes can spell the same address.

use std::{borrow::Cow, fmt, net::IpAddr, str::FromStr};

use hmac::{Hmac, KeyInit, Mac};
use http::{HeaderMap, HeaderName, Method, Uri, header};
use sha2::{Digest, Sha256};

use crate::{
    refusal::{Reason, Refusal},
    store::{Address, Fingerprint},
};

/// Of the way in which addresses are computed. Another version forgets everything.
const VERSION: u8 = 1;

/// A part of the scope.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ScopePart {
    /// Authorization, else X-Api-Key, as sent.
    Credential,
    /// A cookie.
    Cookie(String),
    /// A header, believed only from trusted proxies.
    Header(HeaderName),
    /// A claim of a verified token.
    Jwt(String),
    /// The host.
    Host,
    /// The method.
    Method,
    /// The path.
    Path,
    /// The route's pattern.
    Route,
    /// One scope for all.
    Global,
}

/// Networks whose scope headers are believed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TrustedProxies {
    networks: Vec<(IpAddr, u8)>,
    everyone: bool,
}

/// Secret that turns addresses into HMACs, so that who reads the store cannot guess keys. Never rotates live.
#[derive(Clone)]
pub struct AddressSecret([u8; 32]);

/// Verified claims of a caller's token.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Claims(pub std::collections::BTreeMap<String, String>);

/// What became of a caller's token, put into a request's extensions by whoever verified it: its claims, or why it is not
/// believed. Only routes that [ask for claims](crate::Policy::claims) look at it.
#[derive(Debug, Clone)]
pub struct Identity(pub Result<Claims, Refusal>);

/// What a scope is read from.
#[derive(Debug, Clone, Copy)]
pub struct Caller<'a> {
    /// Of the request.
    pub method: &'a Method,
    /// Of the request.
    pub uri: &'a Uri,
    /// Of the request.
    pub headers: &'a HeaderMap,
    /// Who sent it, if that is known.
    pub peer: Option<IpAddr>,
    /// What became of its token, if somebody looked at it.
    pub identity: Option<&'a Identity>,
    /// The route's pattern.
    pub route: &'a str,
    /// Whose headers are believed.
    pub trusted: &'a TrustedProxies,
}

/// The values of a scope's parts, length-framed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scope(Vec<u8>);

impl Scope {
    /// Reads the scope of a request.
    ///
    /// # Errors
    /// A refusal if a part is missing, repeated or not believed; of several the first in the table of refusals.
    pub fn of(parts: &[ScopePart], caller: &Caller<'_>) -> Result<Self, Refusal> {
        let mut framed = Vec::with_capacity(96);
        let mut refused: Option<Refusal> = None;
        for part in parts {
            match part.value(caller) {
                Ok(value) => frame(&mut framed, part.tag(), value.as_ref()),
                Err(refusal) if refused.as_ref().is_none_or(|first| refusal.reason < first.reason) => {
                    refused = Some(refusal);
                }
                Err(_) => {}
            }
        }
        refused.map_or(Ok(Self(framed)), Err)
    }

    /// A scope of plain values, for handlers without a layer.
    pub fn from_parts(parts: &[&str]) -> Self {
        let mut framed = Vec::new();
        for part in parts {
            frame(&mut framed, b'v', part.as_bytes());
        }
        Self(framed)
    }

    /// Where the entry of a key in this scope lives. `fingerprint` is part of it where each gets its own entry.
    pub fn address(&self, key: &str, fingerprint: Option<&Fingerprint>, secret: Option<&AddressSecret>) -> Address {
        let mut framed = Vec::with_capacity(self.0.len() + key.len() + 64);
        framed.push(VERSION);
        framed.extend_from_slice(&self.0);
        frame(&mut framed, b'k', key.as_bytes());
        if let Some(fingerprint) = fingerprint {
            frame(&mut framed, b'f', &fingerprint.digest);
        }
        Address(match secret {
            None => Sha256::digest(&framed).into(),
            Some(secret) => {
                let mut mac = <Hmac<Sha256>>::new_from_slice(&secret.0).expect("any length will do");
                mac.update(&framed);
                mac.finalize().into_bytes().into()
            }
        })
    }
}

fn frame(out: &mut Vec<u8>, tag: u8, value: &[u8]) {
    out.push(tag);
    out.extend_from_slice(&(value.len() as u64).to_le_bytes());
    out.extend_from_slice(value);
}

impl ScopePart {
    /// Its value in one request.
    ///
    /// # Errors
    /// A refusal if it is missing, repeated or not believed.
    pub fn value<'a>(&self, caller: &Caller<'a>) -> Result<Cow<'a, [u8]>, Refusal> {
        Ok(match self {
            Self::Credential => credential(caller.headers)?,
            Self::Cookie(name) => cookie(caller.headers, name)?.into(),
            Self::Header(name) => believed(caller, name)?.into(),
            Self::Jwt(claim) => match caller.identity.map(|identity| &identity.0) {
                Some(Err(refusal)) => return Err(refusal.clone()),
                Some(Ok(claims)) => match claims.0.get(claim).filter(|value| !value.is_empty()) {
                    Some(value) => value.as_bytes().into(),
                    None => return Err(missing(format!("the caller's token has no claim {claim:?} to go by"))),
                },
                None => return Err(missing(format!("nobody has verified the caller's claim {claim:?}"))),
            },
            Self::Host => host(caller)?.to_ascii_lowercase().into_bytes().into(),
            Self::Method => caller.method.as_str().as_bytes().into(),
            Self::Path => caller.uri.path().as_bytes().into(),
            Self::Route => caller.route.as_bytes().to_vec().into(),
            Self::Global => b"".as_slice().into(),
        })
    }

    /// Told apart in the address, so that a header's value cannot pass for a cookie's.
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
        }
    }

    /// Whether it says who is calling, rather than where.
    pub fn names_caller(&self) -> bool {
        matches!(self, Self::Credential | Self::Cookie(_) | Self::Header(_) | Self::Jwt(_))
    }

    /// Whether its name says that it is a user: a header with `user` in its name, or the subject of a JWT.
    pub fn names_user(&self) -> bool {
        match self {
            Self::Header(name) => name.as_str().contains("user") && *name != http::header::USER_AGENT,
            Self::Jwt(claim) => claim == "sub",
            _ => false,
        }
    }

    /// The header that it is read from, if it is one.
    pub fn header(&self) -> Option<&HeaderName> {
        match self {
            Self::Header(name) => Some(name),
            _ => None,
        }
    }
}

fn credential(headers: &HeaderMap) -> Result<Cow<'_, [u8]>, Refusal> {
    if let Some(value) = only(headers, &header::AUTHORIZATION)? {
        return Ok(value.into());
    }
    if let Some(value) = only(headers, &HeaderName::from_static("x-api-key"))? {
        // No header value has a NUL, so the one header's value never passes for the other's.
        return Ok([b"\0", value].concat().into());
    }
    if headers.contains_key(header::COOKIE) {
        return Err(missing(
            "the caller is known by cookies only, and which of them names the caller is not configured; \
             the operator can set scope = [\"host\", \"cookie:session\"] with the session cookie's name",
        ));
    }
    Ok(b"".as_slice().into())
}

fn cookie<'a>(headers: &'a HeaderMap, name: &str) -> Result<&'a [u8], Refusal> {
    let mut found = None;
    for line in headers.get_all(header::COOKIE) {
        for pair in line.as_bytes().split(|byte| *byte == b';') {
            let pair = pair.trim_ascii();
            let Some((at, _)) = pair.iter().enumerate().find(|(_, byte)| **byte == b'=') else { continue };
            if &pair[..at] == name.as_bytes() && found.replace(&pair[at + 1..]).is_some() {
                return Err(Refusal::new(Reason::RequestAmbiguous, format!("the cookie {name:?} is sent twice")));
            }
        }
    }
    match found {
        Some(value) if !value.is_empty() => Ok(value),
        _ => Err(missing(format!("the cookie {name:?}, which says whose key this is, is missing"))),
    }
}

fn believed<'a>(caller: &Caller<'a>, name: &HeaderName) -> Result<&'a [u8], Refusal> {
    let Some(value) = only(caller.headers, name)?.filter(|value| !value.is_empty()) else {
        return Err(missing(format!("the header {name}, which says whose key this is, is missing")));
    };
    if !caller.trusted.trusts(caller.peer) {
        let detail = format!(
            "the header {name} says whose key this is and is believed only from trusted proxies; \
             this request came from elsewhere (the operator can add the network to trusted_proxies)"
        );
        return Err(Refusal::new(Reason::ScopeRefused, detail));
    }
    Ok(value)
}

fn host<'a>(caller: &Caller<'a>) -> Result<&'a str, Refusal> {
    if let Some(authority) = caller.uri.authority() {
        return Ok(authority.as_str());
    }
    let value = only(caller.headers, &header::HOST)?.unwrap_or_default();
    std::str::from_utf8(value).map_err(|_| Refusal::new(Reason::RequestAmbiguous, "the Host header is not ASCII"))
}

/// The value of a header that must not be repeated.
fn only<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a [u8]>, Refusal> {
    let mut values = headers.get_all(name).iter();
    let first = values.next();
    if values.next().is_some() {
        return Err(Refusal::new(Reason::RequestAmbiguous, format!("the header {name} is sent more than once")));
    }
    Ok(first.map(|value| value.as_bytes()))
}

fn missing(detail: impl Into<String>) -> Refusal {
    Refusal::new(Reason::ScopeMissing, detail)
}

impl TrustedProxies {
    /// Loopback only.
    pub fn loopback() -> Self {
        Self {
            networks: vec![([127, 0, 0, 0].into(), 8), (IpAddr::from_str("::1").expect("valid"), 128)],
            everyone: false,
        }
    }

    /// Every sender: for a service that only trusted proxies can reach.
    pub fn everyone() -> Self {
        Self { networks: Vec::new(), everyone: true }
    }

    /// These networks, such as `10.0.0.0/8` or `::1/128`.
    ///
    /// # Errors
    /// Names the one that is none.
    pub fn parse<'a>(networks: impl IntoIterator<Item = &'a str>) -> Result<Self, String> {
        let network = |text: &str| {
            let (address, bits) = text.split_once('/').unwrap_or((text, ""));
            let address = IpAddr::from_str(address).ok()?;
            let most = if address.is_ipv4() { 32 } else { 128 };
            let bits = if bits.is_empty() { most } else { bits.parse().ok()? };
            (bits <= most).then_some((address, bits))
        };
        let networks = networks.into_iter().map(|text| {
            network(text)
                .ok_or_else(|| format!("{text:?} is no network; write one such as \"10.0.0.0/8\" or \"::1/128\""))
        });
        Ok(Self { networks: networks.collect::<Result<_, _>>()?, everyone: false })
    }

    /// Whether this sender's scope headers are believed.
    pub fn trusts(&self, peer: Option<IpAddr>) -> bool {
        self.everyone || peer.is_some_and(|peer| self.networks.iter().any(|network| contains(*network, peer)))
    }
}

fn contains((network, bits): (IpAddr, u8), peer: IpAddr) -> bool {
    let wide = |address: IpAddr| match address.to_canonical() {
        IpAddr::V4(address) => (u128::from(address.to_bits()) << 96, true),
        IpAddr::V6(address) => (address.to_bits(), false),
    };
    let ((network, four), (peer, peer_four)) = (wide(network), wide(peer));
    four == peer_four && (bits == 0 || (network ^ peer) >> (128 - u32::from(bits)) == 0)
}

impl AddressSecret {
    /// From 32 bytes.
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
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match (text, text.split_once(':')) {
            ("credential", _) => Self::Credential,
            ("host", _) => Self::Host,
            ("method", _) => Self::Method,
            ("path", _) => Self::Path,
            ("route", _) => Self::Route,
            ("global", _) => Self::Global,
            (_, Some(("cookie", name))) if !name.is_empty() => Self::Cookie(name.into()),
            (_, Some(("jwt", claim))) if !claim.is_empty() => Self::Jwt(claim.into()),
            (_, Some(("header", name))) if HeaderName::from_str(name).is_ok() => {
                Self::Header(HeaderName::from_str(name).expect("just seen"))
            }
            _ => {
                return Err(format!(
                    "{text:?} is no part of a scope; allowed are \"credential\" \"cookie:NAME\" \"header:NAME\" \
                     \"jwt:CLAIM\" \"host\" \"method\" \"path\" \"route\" \"global\""
                ));
            }
        })
    }
}

impl fmt::Display for ScopePart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Credential => f.write_str("credential"),
            Self::Cookie(name) => write!(f, "cookie:{name}"),
            Self::Header(name) => write!(f, "header:{name}"),
            Self::Jwt(claim) => write!(f, "jwt:{claim}"),
            Self::Host => f.write_str("host"),
            Self::Method => f.write_str("method"),
            Self::Path => f.write_str("path"),
            Self::Route => f.write_str("route"),
            Self::Global => f.write_str("global"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(parts: &[ScopePart], headers: &[(&'static str, &str)], peer: &str) -> Result<Scope, Refusal> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(*name, value.parse().unwrap());
        }
        let caller = Caller {
            method: &Method::POST,
            uri: &Uri::from_static("/pay"),
            headers: &map,
            peer: Some(peer.parse().unwrap()),
            identity: None,
            route: "POST /pay",
            trusted: &TrustedProxies::loopback(),
        };
        Scope::of(parts, &caller)
    }

    #[test]
    fn callers_with_other_credentials_have_other_addresses() {
        let parts = [ScopePart::Host, ScopePart::Credential];
        let a = of(&parts, &[("host", "x"), ("authorization", "Bearer a")], "10.0.0.1").unwrap();
        let b = of(&parts, &[("host", "x"), ("authorization", "Bearer b")], "10.0.0.1").unwrap();
        let c = of(&parts, &[("host", "X"), ("authorization", "Bearer a")], "10.0.0.1").unwrap();
        assert_ne!(a.address("k", None, None), b.address("k", None, None));
        assert_eq!(a.address("k", None, None), c.address("k", None, None));
        let d = of(&parts, &[("host", "x"), ("x-api-key", "Bearer a")], "10.0.0.1").unwrap();
        assert_ne!(a.address("k", None, None), d.address("k", None, None));
    }

    #[test]
    fn parts_do_not_run_into_each_other() {
        assert_ne!(
            Scope::from_parts(&["ab", "c"]).address("k", None, None),
            Scope::from_parts(&["a", "bc"]).address("k", None, None)
        );
        assert_ne!(
            Scope::from_parts(&["a"]).address("bk", None, None),
            Scope::from_parts(&["ab"]).address("k", None, None)
        );
    }

    #[test]
    fn a_caller_known_by_cookies_only_is_told_which_setting_to_use() {
        let refusal = of(&[ScopePart::Credential], &[("cookie", "session=1")], "127.0.0.1").unwrap_err();
        assert_eq!(refusal.reason, Reason::ScopeMissing);
        assert!(refusal.detail.contains("cookie:session"), "{}", refusal.detail);
        assert!(of(&[ScopePart::Credential], &[], "127.0.0.1").is_ok());
    }

    #[test]
    fn a_scope_header_is_believed_only_from_trusted_proxies() {
        let parts = ["header:X-User-Id".parse().unwrap()];
        assert!(of(&parts, &[("x-user-id", "u1")], "127.0.0.9").is_ok());
        assert_eq!(of(&parts, &[("x-user-id", "u1")], "10.0.0.1").unwrap_err().reason, Reason::ScopeRefused);
        assert_eq!(of(&parts, &[], "127.0.0.1").unwrap_err().reason, Reason::ScopeMissing);
        let twice = of(&parts, &[("x-user-id", "u1"), ("x-user-id", "u2")], "127.0.0.1");
        assert_eq!(twice.unwrap_err().reason, Reason::RequestAmbiguous);
    }

    #[test]
    fn cookies_are_found_among_others() {
        let parts = ["cookie:sid".parse().unwrap()];
        let one = of(&parts, &[("cookie", "a=1; sid=x; b=2")], "127.0.0.1").unwrap();
        let other = of(&parts, &[("cookie", "sid=x")], "127.0.0.1").unwrap();
        assert_eq!(one, other);
        assert!(of(&parts, &[("cookie", "sid=x; sid=y")], "127.0.0.1").is_err());
    }

    #[test]
    fn networks_contain_what_they_should() {
        let trusted = TrustedProxies::parse(["10.1.0.0/16", "::1", "fd00::/8"]).unwrap();
        for (peer, is) in [
            ("10.1.2.3", true),
            ("10.2.0.1", false),
            ("::1", true),
            ("::2", false),
            ("fd12::1", true),
            ("::ffff:10.1.0.9", true),
        ] {
            assert_eq!(trusted.trusts(Some(peer.parse().unwrap())), is, "{peer}");
        }
        assert!(TrustedProxies::parse(["10.0.0.0/33"]).is_err());
        assert!(TrustedProxies::parse(["0.0.0.0/0"]).unwrap().trusts(Some([8, 8, 8, 8].into())));
    }

    #[test]
    fn a_secret_changes_every_address() {
        let scope = Scope::from_parts(&["a"]);
        let secret = AddressSecret::new([7; 32]);
        assert_ne!(scope.address("k", None, Some(&secret)), scope.address("k", None, None));
        assert_eq!(format!("{secret:?}"), "AddressSecret(****)");
    }
}
