//! The handle of an exchange: what ends it, even after ibid was restarted. It carries a code that only this
//! configuration's token makes, so that a damaged or invented one is refused.

use std::{sync::Arc, time::Duration};

use data_encoding::{BASE64URL_NOPAD, HEXLOWER, HEXLOWER_PERMISSIVE};
use hmac::{Hmac, KeyInit, Mac};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri, header, request::Parts};
use ibid::{
    http::{Route, key_headers},
    store::{Address, ClaimRequest, ClaimToken, Fence, Fingerprint, Lease, Tags},
};
use sha2::Sha256;

const CODE_BYTES: usize = 16;
const ID_DIGITS: usize = 32;
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
    /// `request` is what the handler gets: it has its final request id.
    pub(super) fn new<B>(
        id: ExchangeId, requested_at_ms: u64, request: &Request<B>, claim: Option<(&Route, &Lease)>,
    ) -> Self {
        let mut names = vec![HeaderName::from_static("x-request-id"), header::ORIGIN, header::USER_AGENT];
        names.extend(claim.into_iter().flat_map(|(route, _)| key_headers(&route.policy)));
        let value = |name: &HeaderName| {
            let value = request.headers().get(name)?.to_str().ok()?;
            let length = if name == header::USER_AGENT { MAX_AGENT_BYTES } else { usize::MAX };
            Some((name.to_string(), value[..value.len().min(length)].to_owned()))
        };
        Self {
            id,
            requested_at_ms,
            method: request.method().to_string(),
            path: request.uri().path().to_owned(),
            headers: names.iter().filter_map(value).collect(),
            claim: claim.map(|(route, lease)| ClaimContent { route: route.name.clone(), lease: lease.clone() }),
        }
    }

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

    fn write(&self, into: &mut Vec<u8>) {
        write_number(into, self.requested_at_ms);
        write_bytes(into, self.method.as_bytes());
        write_bytes(into, self.path.as_bytes());
        write_number(into, self.headers.len() as u64);
        for (name, value) in &self.headers {
            write_bytes(into, name.as_bytes());
            write_bytes(into, value.as_bytes());
        }
        let Some(ClaimContent { route, lease }) = &self.claim else { return };
        let Lease { request, fence, attempt, front_only } = lease;
        write_bytes(into, route.as_bytes());
        write_bytes(into, &request.address.0);
        write_bytes(into, &request.token.0);
        write_bytes(into, &request.fingerprint.digest);
        write_bytes(into, request.tags.as_bytes());
        write_bytes(into, &request.label);
        let numbers = [fence.0, (*attempt).into(), (*front_only).into(), request.fingerprint.version.into()];
        let take_over = request.take_over.into_iter().map(|fence| fence.0);
        numbers.into_iter().chain(take_over).for_each(|number| write_number(into, number));
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

fn write_number(into: &mut Vec<u8>, number: u64) {
    into.extend(number.to_le_bytes());
}

fn write_bytes(into: &mut Vec<u8>, bytes: &[u8]) {
    write_number(into, bytes.len() as u64);
    into.extend(bytes);
}

/// Reads the fields that `write_number` and `write_bytes` wrote.
struct HandleReader<'a>(&'a [u8]);

impl<'a> HandleReader<'a> {
    fn number(&mut self) -> Option<u64> {
        let (number, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*number))
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
        mac.update(b"ibid exchange handle 1 ");
        Self(mac)
    }

    pub(super) fn seal(&self, handle: &ExchangeHandle) -> String {
        let mut bytes = Vec::with_capacity(512);
        handle.write(&mut bytes);
        let code = self.code(handle.id, &bytes).finalize().into_bytes();
        bytes.extend_from_slice(&code[..CODE_BYTES]);
        let mut text = HEXLOWER.encode(&handle.id.0);
        BASE64URL_NOPAD.encode_append(&bytes, &mut text);
        text
    }

    /// Returns `None` if the text is no handle of this configuration.
    pub(super) fn open(&self, text: &str) -> Option<ExchangeHandle> {
        let id = ExchangeId::of_handle(text)?;
        let bytes = BASE64URL_NOPAD.decode(&text.as_bytes()[ID_DIGITS..]).ok()?;
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
        let handle = ExchangeHandle::new(ExchangeId([7; 16]), 1, &request, None);
        let sealer = HandleSealer::new(Some("secret"));
        let text = sealer.seal(&handle);
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
