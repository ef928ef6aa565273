//! The handle of an exchange: what ends it, even after ibid was restarted. It carries a code that only this
//! configuration's token makes, so that a damaged or invented one is refused.

use std::{sync::Arc, time::Duration};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD as BASE64URL};
use data_encoding::{HEXLOWER, HEXLOWER_PERMISSIVE};
use hmac::{Hmac, KeyInit, Mac};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri, header, request::Parts};
use ibid::{
    http::{Route, key_headers},
    store::{Address, ClaimRequest, ClaimToken, Fence, Fingerprint, Lease, Tags},
};
use sha2::Sha256;

const CODE_BYTES: usize = 16;
const ID_DIGITS: usize = 32;
/// The digits at the end of a handle that have the code.
pub(super) const SECRET_DIGITS: usize = (CODE_BYTES * 4).div_ceil(3) + 1;
/// Longer user agents are cut: they only appear in reports.
const MAX_AGENT_BYTES: usize = 120;

/// 128 random bits that the caller made for one start of a handler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct ExchangeId(pub(super) [u8; 16]);

/// The content of a handle.
#[derive(Debug, Clone)]
pub(super) struct ExchangeHandle {
    pub(super) id: ExchangeId,
    pub(super) requested_at_ms: u64,
    method: String,
    path: String,
    headers: Vec<(String, String)>,
    /// `None` if the handler runs without a claim.
    claim: Option<ClaimContent>,
}

#[derive(Debug, Clone)]
struct ClaimContent {
    route: String,
    lease: Lease,
}

/// Seals and opens handles. As text, a handle is the id in hex, and then the other fields and their code in base64.
pub(super) struct HandleSealer(Hmac<Sha256>);

impl ExchangeHandle {
    /// The head of the request, as far as it matters for the end.
    pub(super) fn head(&self) -> Option<Parts> {
        let mut request = Request::new(());
        *request.method_mut() = Method::from_bytes(self.method.as_bytes()).ok()?;
        *request.uri_mut() = self.path.parse::<Uri>().ok()?;
        let pair = |(name, value): &(String, String)| {
            Some((HeaderName::from_bytes(name.as_bytes()).ok()?, HeaderValue::from_str(value).ok()?))
        };
        *request.headers_mut() = self.headers.iter().map(pair).collect::<Option<HeaderMap>>()?;
        Some(request.into_parts().0)
    }

    /// The name of the route that governs the request.
    pub(super) fn route_name(&self) -> Option<&str> {
        self.claim.as_ref().map(|claim| claim.route.as_str())
    }

    /// The claim under this route, whose durations may have changed.
    pub(super) fn lease(&self, route: &Route) -> Option<Lease> {
        let Lease { request, fence, attempt, front_only } = self.claim.as_ref()?.lease.clone();
        let (lease, ttl) = (route.policy.lease, route.policy.ttl);
        let request = Arc::new(ClaimRequest { lease, ttl, ..(*request).clone() });
        Some(Lease { request, fence, attempt, front_only })
    }

    fn read(id: ExchangeId, mut from: HandleReader<'_>) -> Option<Self> {
        let (requested_at_ms, method, path) = (from.number()?, from.text()?, from.text()?);
        let headers = (0..from.number()?).map(|_| Some((from.text()?, from.text()?))).collect::<Option<_>>()?;
        let claim = if from.0.is_empty() { None } else { Some(ClaimContent::read(from)?) };
        Some(Self { id, requested_at_ms, method, path, headers, claim })
    }
}

impl ClaimContent {
    fn read(mut from: HandleReader<'_>) -> Option<Self> {
        let (route, address, token, digest) = (from.text()?, from.array()?, from.array()?, from.array()?);
        let (tags, label) = (Tags::from_bytes(from.bytes()?.to_vec().into())?, from.bytes()?.to_vec().into());
        let (fence, attempt) = (Fence(from.number()?), from.number()?.try_into().ok()?);
        let (front_only, version) = (from.number()? != 0, from.number()?.try_into().ok()?);
        let request = ClaimRequest {
            address: Address(address),
            token: ClaimToken(token),
            fingerprint: Fingerprint { version, digest },
            tags,
            label,
            lease: Duration::ZERO,
            ttl: Duration::ZERO,
            take_over: if from.0.is_empty() { None } else { Some(Fence(from.number()?)) },
        };
        Some(Self { route, lease: Lease { request: Arc::new(request), fence, attempt, front_only } })
    }
}

fn write_headers(into: &mut Vec<u8>, headers: &HeaderMap, route: Option<&Route>) {
    let fixed = [HeaderName::from_static("x-request-id"), header::ORIGIN, header::USER_AGENT];
    let names = fixed.into_iter().chain(route.into_iter().flat_map(|route| key_headers(&route.policy)));
    let (count_at, mut count) = (into.len(), 0);
    into.push(count);
    for name in names {
        let Some(value) = headers.get(&name).and_then(|value| value.to_str().ok()) else { continue };
        let length = if name == header::USER_AGENT { MAX_AGENT_BYTES } else { usize::MAX };
        write_bytes(into, name.as_str().as_bytes());
        write_bytes(into, &value.as_bytes()[..value.len().min(length)]);
        count += 1;
    }
    into[count_at] = count;
}

fn write_claim(into: &mut Vec<u8>, route: &Route, lease: &Lease) {
    let Lease { request, fence, attempt, front_only } = lease;
    let fields: [&[u8]; 6] = [
        route.name.as_bytes(),
        &request.address.0,
        &request.token.0,
        &request.fingerprint.digest,
        request.tags.as_bytes(),
        &request.label,
    ];
    fields.into_iter().for_each(|field| write_bytes(into, field));
    let numbers = [fence.0, (*attempt).into(), (*front_only).into(), request.fingerprint.version.into()];
    let take_over = request.take_over.into_iter().map(|fence| fence.0);
    numbers.into_iter().chain(take_over).for_each(|number| write_number(into, number));
}

/// Seven bits per byte, the lowest first; the top bit says that more follow.
fn write_number(into: &mut Vec<u8>, mut number: u64) {
    while number > 0x7f {
        into.push(number as u8 | 0x80);
        number >>= 7;
    }
    into.push(number as u8);
}

fn write_bytes(into: &mut Vec<u8>, bytes: &[u8]) {
    write_number(into, bytes.len() as u64);
    into.extend(bytes);
}

/// Reads the fields that `write_number` and `write_bytes` wrote.
struct HandleReader<'a>(&'a [u8]);

impl<'a> HandleReader<'a> {
    fn number(&mut self) -> Option<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let (byte, rest) = self.0.split_first()?;
            self.0 = rest;
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(number);
            }
        }
        None
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = self.number()?.try_into().ok()?;
        let (bytes, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(bytes)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes()?.try_into().ok()
    }

    fn text(&mut self) -> Option<String> {
        String::from_utf8(self.bytes()?.to_vec()).ok()
    }
}

impl HandleSealer {
    /// Without a token only the socket's permissions protect the API: the code then detects damage.
    pub(super) fn new(token: Option<&str>) -> Self {
        let mut mac = Hmac::new_from_slice(token.unwrap_or_default().as_bytes()).expect("any length");
        mac.update(b"ibid exchange handle 2 ");
        Self(mac)
    }

    /// `request` is what the handler gets: it has its final request id.
    pub(super) fn seal<B>(
        &self, id: ExchangeId, requested_at_ms: u64, request: &Request<B>, claim: Option<(&Route, &Lease)>,
    ) -> String {
        let mut bytes = Vec::with_capacity(512);
        write_number(&mut bytes, requested_at_ms);
        write_bytes(&mut bytes, request.method().as_str().as_bytes());
        write_bytes(&mut bytes, request.uri().path().as_bytes());
        write_headers(&mut bytes, request.headers(), claim.map(|(route, _)| route));
        if let Some((route, lease)) = claim {
            write_claim(&mut bytes, route, lease);
        }
        let code = self.code(id, &bytes).finalize().into_bytes();
        bytes.extend_from_slice(&code[..CODE_BYTES]);
        let mut text = String::with_capacity(ID_DIGITS + bytes.len() * 4 / 3 + 4);
        HEXLOWER.encode_append(&id.0, &mut text);
        BASE64URL.encode_string(&bytes, &mut text);
        text
    }

    /// Returns `None` if the text is no handle of this configuration.
    pub(super) fn open(&self, text: &str) -> Option<ExchangeHandle> {
        let id = ExchangeId::of_handle(text)?;
        let bytes = BASE64URL.decode(&text.as_bytes()[ID_DIGITS..]).ok()?;
        let (content, code) = bytes.split_at_checked(bytes.len().checked_sub(CODE_BYTES)?)?;
        self.code(id, content).verify_truncated_left(code).ok()?;
        ExchangeHandle::read(id, HandleReader(content))
    }

    fn code(&self, id: ExchangeId, content: &[u8]) -> Hmac<Sha256> {
        self.0.clone().chain_update(id.0).chain_update(content)
    }
}

impl ExchangeId {
    pub(super) fn parse(text: &str) -> Option<Self> {
        let bytes = HEXLOWER_PERMISSIVE.decode(text.as_bytes()).ok()?;
        bytes.try_into().ok().map(Self)
    }

    /// The id that a handle names, which is not checked.
    pub(super) fn of_handle(text: &str) -> Option<Self> {
        let bytes = HEXLOWER.decode(text.as_bytes().get(..ID_DIGITS)?).ok()?;
        bytes.try_into().ok().map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_unchanged_handle_of_the_same_token_is_opened() {
        let request = Request::post("/payments").header("x-request-id", "r1").body(()).unwrap();
        let sealer = HandleSealer::new(Some("secret"));
        let text = sealer.seal(ExchangeId([7; 16]), 1, &request, None);
        let opened = sealer.open(&text).expect("it is ours");
        assert_eq!((opened.id, opened.head().unwrap().uri.path()), (ExchangeId([7; 16]), "/payments"));
        assert!(HandleSealer::new(Some("other")).open(&text).is_none());
        for at in 0..text.len() {
            let mut changed = text.clone().into_bytes();
            changed[at] = if changed[at] == b'A' { b'B' } else { b'A' };
            assert!(sealer.open(std::str::from_utf8(&changed).unwrap()).is_none(), "{at}");
        }
        assert!(sealer.open("").is_none());
    }
}
