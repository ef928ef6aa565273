//! The handle of an exchange: what ends it, even after ibid was restarted. It carries a code that only this
//! configuration's token makes, so that a damaged or invented one is refused.

use std::sync::Arc;

use data_encoding::BASE64URL_NOPAD;
use hmac::{Hmac, KeyInit, Mac};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri, header, request::Parts};
use ibid::{
    http::{Route, key_headers},
    store::{Address, ClaimRequest, ClaimToken, Fence, Fingerprint, Lease, Tags},
};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

const CODE_BYTES: usize = 16;
/// Longer user agents are cut: they only appear in reports.
const MAX_AGENT_BYTES: usize = 120;

/// 128 random bits that the caller made for one start of a handler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct ExchangeId(pub(super) [u8; 16]);

/// The content of a handle.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct ExchangeHandle {
    id: ByteText,
    pub(super) requested_at_ms: u64,
    method: String,
    path: String,
    headers: Vec<(String, String)>,
    /// `None` if the handler runs without a claim.
    claim: Option<ClaimContent>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct ClaimContent {
    route: String,
    address: ByteText,
    token: ByteText,
    fence: u64,
    attempt: u32,
    front_only: bool,
    take_over: Option<u64>,
    fingerprint: (u8, ByteText),
    tags: ByteText,
    label: ByteText,
}

/// Bytes as base64, which is a third of their length as a list of numbers.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct ByteText(String);

impl ByteText {
    fn new(bytes: &[u8]) -> Self {
        Self(BASE64URL_NOPAD.encode(bytes))
    }

    fn bytes(&self) -> Option<Vec<u8>> {
        BASE64URL_NOPAD.decode(self.0.as_bytes()).ok()
    }

    fn array<const N: usize>(&self) -> Option<[u8; N]> {
        self.bytes()?.try_into().ok()
    }
}

/// Seals and opens handles.
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
            id: ByteText::new(&id.0),
            requested_at_ms,
            method: request.method().to_string(),
            path: request.uri().path().to_owned(),
            headers: names.iter().filter_map(value).collect(),
            claim: claim.map(|(route, lease)| ClaimContent::new(route, lease)),
        }
    }

    pub(super) fn id(&self) -> Option<ExchangeId> {
        self.id.array().map(ExchangeId)
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

    /// The claim under this route.
    pub(super) fn lease(&self, route: &Route) -> Option<Lease> {
        self.claim.as_ref()?.lease(route)
    }
}

impl ClaimContent {
    fn new(route: &Route, lease: &Lease) -> Self {
        let Lease { request, fence, attempt, front_only } = lease;
        Self {
            route: route.name.clone(),
            address: ByteText::new(&request.address.0),
            token: ByteText::new(&request.token.0),
            fence: fence.0,
            attempt: *attempt,
            front_only: *front_only,
            take_over: request.take_over.map(|fence| fence.0),
            fingerprint: (request.fingerprint.version, ByteText::new(&request.fingerprint.digest)),
            tags: ByteText::new(request.tags.as_bytes()),
            label: ByteText::new(&request.label),
        }
    }

    fn lease(&self, route: &Route) -> Option<Lease> {
        let (version, digest) = &self.fingerprint;
        let request = ClaimRequest {
            address: Address(self.address.array()?),
            token: ClaimToken(self.token.array()?),
            fingerprint: Fingerprint { version: *version, digest: digest.array()? },
            tags: Tags::from_bytes(self.tags.bytes()?.into())?,
            label: self.label.bytes()?.into(),
            lease: route.policy.lease,
            ttl: route.policy.ttl,
            take_over: self.take_over.map(Fence),
        };
        let &Self { fence, attempt, front_only, .. } = self;
        Some(Lease { request: Arc::new(request), fence: Fence(fence), attempt, front_only })
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
        let mut bytes = serde_json::to_vec(handle).expect("text and numbers");
        let code = self.0.clone().chain_update(&bytes).finalize().into_bytes();
        bytes.extend_from_slice(&code[..CODE_BYTES]);
        BASE64URL_NOPAD.encode(&bytes)
    }

    /// Returns `None` if the text is no handle of this configuration.
    pub(super) fn open(&self, text: &str) -> Option<ExchangeHandle> {
        let bytes = BASE64URL_NOPAD.decode(text.as_bytes()).ok()?;
        let (content, code) = bytes.split_at_checked(bytes.len().checked_sub(CODE_BYTES)?)?;
        self.0.clone().chain_update(content).verify_truncated_left(code).ok()?;
        serde_json::from_slice(content).ok()
    }
}

impl ExchangeId {
    pub(super) fn parse(text: &str) -> Option<Self> {
        let bytes = data_encoding::HEXLOWER_PERMISSIVE.decode(text.as_bytes()).ok()?;
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
        assert_eq!((opened.id(), opened.head().unwrap().uri.path()), (Some(ExchangeId([7; 16])), "/payments"));
        assert!(HandleSealer::new(Some("other")).open(&text).is_none());
        for at in 0..text.len() {
            let mut changed = text.clone().into_bytes();
            changed[at] = if changed[at] == b'A' { b'B' } else { b'A' };
            assert!(sealer.open(std::str::from_utf8(&changed).unwrap()).is_none(), "{at}");
        }
        assert!(sealer.open("").is_none());
    }
}
