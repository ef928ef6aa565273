//! Fingerprints decide whether two requests are the same.
//!
//! A fingerprint is a hash of the parts that the policy names. Each part has a tag and its length, so that no part can
//! imitate another. Bodies are hashed in canonical form: a retry may contain the same JSON in another order, or the
//! same form with another multipart boundary. Path and query are hashed as sent, the path without one trailing slash,
//! because frameworks redirect between the two forms.
//!
//! The rule for everything else: if an app could read two requests differently, their fingerprints differ.
//!
//! The rules have a version, which is stored with each fingerprint. A stored fingerprint of an older version is
//! compared by computing the request's fingerprint under that version: see [`Fingerprint::compare`] and the module `v1`.

use http::{HeaderMap, HeaderName, Method, Uri, header};
use sha2::{Digest, Sha256};

pub use self::json::{JsonPointer, JsonPointerError};
use self::media::MediaType;
use crate::{
    policy::{FingerprintPart, Policy},
    store::Fingerprint,
};

pub(crate) mod form;
pub(crate) mod json;
mod media;
mod multipart;
mod v1;

const PRECONDITION_HEADERS: [HeaderName; 4] =
    [header::IF_MATCH, header::IF_NONE_MATCH, header::IF_UNMODIFIED_SINCE, header::CONTENT_RANGE];

/// Headers that override the method in some frameworks.
pub(crate) const METHOD_OVERRIDE_HEADERS: [HeaderName; 3] = [
    HeaderName::from_static("x-http-method-override"),
    HeaderName::from_static("x-http-method"),
    HeaderName::from_static("x-method-override"),
];

/// The version of fingerprints of plain bytes, which the SQL functions compute too.
const BYTES_VERSION: u8 = 1;

/// Checksums of the parts of a fingerprint. They tell operators which part of a second request differed. Nothing is
/// decided by them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PartDigests(pub(crate) [u32; 5]);

impl PartDigests {
    /// The names of the parts, in order. The media type counts as a header.
    pub const NAMES: [&str; 5] = ["method", "path", "query", "body", "headers"];

    /// The names of the parts that differ.
    pub fn differing(&self, other: &Self) -> Vec<&'static str> {
        let pairs = self.0.iter().zip(&other.0).zip(Self::NAMES);
        pairs.filter(|((own, others), _)| own != others).map(|(_, name)| name).collect()
    }
}

/// Computes a fingerprint part by part.
#[derive(Default)]
pub(crate) struct FingerprintHasher {
    hash: Sha256,
    parts: PartDigests,
    /// The index of the current part.
    current_part: usize,
}

impl FingerprintHasher {
    pub(crate) fn framed(&mut self, tag: u8, bytes: &[u8]) {
        framed(&mut self.hash, tag, bytes);
        let sum = &mut self.parts.0[self.current_part];
        *sum = crc32c::crc32c_append(*sum ^ u32::from(tag), bytes);
    }

    fn header(&mut self, headers: &HeaderMap, name: &HeaderName) {
        if headers.contains_key(name) {
            self.framed(b'n', name.as_str().as_bytes());
            for value in headers.get_all(name) {
                self.framed(b'v', value.as_bytes());
            }
        }
    }
}

/// The result of [`Fingerprint::compare`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum FingerprintComparison {
    /// The requests are the same.
    Same,
    /// The requests are different.
    Different,
    /// The version of the stored fingerprint is unknown, so the requests cannot be compared.
    UnknownVersion,
}

impl Fingerprint {
    /// The current version of the rules.
    pub const VERSION: u8 = 2;

    /// Computes the fingerprint of a request without trailers.
    pub fn of(policy: &Policy, method: &Method, uri: &Uri, headers: &HeaderMap, body: &[u8]) -> Self {
        Self::of_version(Self::VERSION, policy, method, uri, headers, body).expect("the current version is known")
    }

    /// Computes the fingerprint by the rules of another version. Returns `None` if the version is unknown.
    pub fn of_version(
        version: u8, policy: &Policy, method: &Method, uri: &Uri, headers: &HeaderMap, body: &[u8],
    ) -> Option<Self> {
        let input = FingerprintInput { method, uri, headers, body, trailers: None };
        input.fingerprint(version, policy).map(|(fingerprint, _)| fingerprint)
    }

    /// Computes the fingerprint of plain bytes, for handlers without a layer. It is the same in every version.
    pub fn of_bytes(bytes: &[u8]) -> Self {
        let mut hash = Sha256::new();
        framed(&mut hash, b'r', bytes);
        Self { version: BYTES_VERSION, digest: hash.finalize().into() }
    }

    /// Compares a request's fingerprint with a stored one, which may have another version. `by_version` computes the
    /// request's fingerprint by the rules of that version, or returns `None` if it does not know them.
    pub fn compare(&self, stored: &Self, by_version: impl FnOnce(u8) -> Option<Self>) -> FingerprintComparison {
        let is_same = |is_same| if is_same { FingerprintComparison::Same } else { FingerprintComparison::Different };
        let nothing = Self::NONE.version;
        if self.version == stored.version || self.version == nothing || stored.version == nothing {
            return is_same(self == stored);
        }
        by_version(stored.version).map_or(FingerprintComparison::UnknownVersion, |own| is_same(own == *stored))
    }
}

#[derive(Clone, Copy)]
pub(crate) struct FingerprintInput<'a> {
    pub(crate) method: &'a Method,
    pub(crate) uri: &'a Uri,
    pub(crate) headers: &'a HeaderMap,
    pub(crate) body: &'a [u8],
    pub(crate) trailers: Option<&'a HeaderMap>,
}

impl FingerprintInput<'_> {
    /// Computes the fingerprint by the rules of a version, and the digests of its parts. Returns `None` if the version
    /// is unknown.
    pub(crate) fn fingerprint(&self, version: u8, policy: &Policy) -> Option<(Fingerprint, PartDigests)> {
        self.with_body(version, policy, |printing| match version {
            1 => v1::hash_body(printing, policy, self.headers, self.body),
            _ => self.hash_body(printing, policy),
        })
    }

    /// Computes the fingerprint with a protocol-specific way to hash the body.
    pub(crate) fn with_body(
        &self, version: u8, policy: &Policy, body: impl Fn(&mut FingerprintHasher),
    ) -> Option<(Fingerprint, PartDigests)> {
        if policy.fingerprint.is_empty() {
            return Some((Fingerprint::NONE, PartDigests::default()));
        }
        let mut printing = FingerprintHasher::default();
        for part in &policy.fingerprint {
            printing.current_part = match part {
                FingerprintPart::Method => 0,
                FingerprintPart::Path => 1,
                FingerprintPart::Query => 2,
                FingerprintPart::Body | FingerprintPart::Raw => 3,
                FingerprintPart::Type | FingerprintPart::Header(_) | FingerprintPart::Preconditions => 4,
            };
            match version {
                1 => v1::hash_part(&mut printing, part, self, &body),
                Fingerprint::VERSION => self.hash_part(&mut printing, part, &body),
                _ => return None,
            }
        }
        Some((Fingerprint { version, digest: printing.hash.finalize().into() }, printing.parts))
    }

    fn hash_part(
        &self, printing: &mut FingerprintHasher, part: &FingerprintPart, body: impl Fn(&mut FingerprintHasher),
    ) {
        let headers = self.headers;
        match part {
            FingerprintPart::Method => {
                printing.framed(b'm', self.method.as_str().as_bytes());
                METHOD_OVERRIDE_HEADERS.iter().for_each(|name| printing.header(headers, name));
            }
            FingerprintPart::Path => {
                let path = self.uri.path();
                printing.framed(b'p', path.strip_suffix('/').unwrap_or(path).as_bytes());
            }
            FingerprintPart::Query => printing.framed(b'q', self.uri.query().unwrap_or_default().as_bytes()),
            FingerprintPart::Type => self.hash_type(printing),
            FingerprintPart::Body => {
                body(printing);
                self.hash_trailers(printing);
            }
            FingerprintPart::Raw => {
                printing.framed(b'R', self.body);
                self.hash_trailers(printing);
            }
            FingerprintPart::Header(name) => printing.header(headers, name),
            FingerprintPart::Preconditions => {
                PRECONDITION_HEADERS.iter().for_each(|name| printing.header(headers, name))
            }
        }
    }

    fn hash_type(&self, printing: &mut FingerprintHasher) {
        for value in self.headers.get_all(header::CONTENT_TYPE) {
            printing.framed(b't', &MediaType::read(value.as_bytes()).canonical());
        }
        self.content_codings().for_each(|coding| printing.framed(b'c', coding));
    }

    /// The format is part of the hash: a form never equals JSON with the same bytes.
    fn hash_body(&self, printing: &mut FingerprintHasher, policy: &Policy) {
        let mut types = self.headers.get_all(header::CONTENT_TYPE).iter();
        let content_type = types.next().map(|value| value.as_bytes()).unwrap_or_default();
        let media = MediaType::read(content_type);
        let kind = content_type_format(content_type);
        let is_encoded = self.content_codings().next().is_some();
        // The meaning of the bytes depends on these headers, so the raw bytes are hashed together with them.
        if is_encoded || types.next().is_some() || media.has_other_charset() {
            self.content_codings().for_each(|coding| printing.framed(b'e', coding));
            let types = self.headers.get_all(header::CONTENT_TYPE).iter();
            types.filter(|_| !is_encoded).for_each(|value| printing.framed(b's', value.as_bytes()));
            return printing.framed(b'r', self.body);
        }
        match kind {
            BodyFormat::Json => {
                if let Some(canonical) = json::canonical(self.body, &policy.json_ignore, json::NameEquality::IgnoreCase)
                {
                    return printing.framed(b'j', &canonical);
                }
            }
            BodyFormat::Form => {
                let mut canonical = Vec::with_capacity(self.body.len() + 64);
                match form::canonical(self.body, &mut canonical) {
                    Some(form::PairOrder::Sorted) => return printing.framed(b'f', &canonical),
                    Some(form::PairOrder::PartlySorted) => return printing.framed(b'F', &canonical),
                    None => {}
                }
            }
            BodyFormat::Multipart => {
                let text = std::str::from_utf8(content_type).unwrap_or_default();
                let mut canonical = Vec::with_capacity(self.body.len());
                if let Some(strict) = multipart::parse_strict(text, self.body)
                    && multipart::canonical(text, self.body, &mut canonical)
                {
                    printing.framed(b'u', &canonical);
                    strict.escaped.iter().for_each(|headers| printing.framed(b'h', headers));
                    if !strict.ends_with_line {
                        printing.framed(b'z', b"");
                    }
                    return;
                }
            }
            BodyFormat::Other => {}
        }
        if media.is_multipart() {
            // The same bytes have other parts under another boundary.
            printing.framed(b'b', content_type);
        }
        printing.framed(b'r', self.body);
    }

    fn hash_trailers(&self, printing: &mut FingerprintHasher) {
        let Some(trailers) = self.trailers.filter(|trailers| !trailers.is_empty()) else { return };
        let mut names: Vec<_> = trailers.keys().collect();
        names.sort_unstable_by_key(|name| name.as_str());
        printing.framed(b'T', b"");
        names.into_iter().for_each(|name| printing.header(trailers, name));
    }

    /// The content codings, except `identity`, which changes nothing.
    fn content_codings(&self) -> impl Iterator<Item = &[u8]> {
        let all = self.headers.get_all(header::CONTENT_ENCODING).iter().map(|coding| coding.as_bytes());
        all.filter(|coding| !coding.eq_ignore_ascii_case(b"identity"))
    }
}

fn content_type_format(content_type: &[u8]) -> BodyFormat {
    std::str::from_utf8(content_type).map_or(BodyFormat::Other, BodyFormat::of)
}

pub(crate) fn framed(hash: &mut Sha256, tag: u8, bytes: &[u8]) {
    let mut head = [tag; 9];
    head[1..].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
    hash.update(head);
    hash.update(bytes);
}

/// Appends the length of a piece of a canonical form, and the piece.
fn frame(bytes: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    out.extend_from_slice(bytes);
}

/// The format of a body, by its Content-Type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BodyFormat {
    Json,
    Form,
    Multipart,
    Other,
}

impl BodyFormat {
    pub(crate) fn of(content_type: &str) -> Self {
        let essence = content_type.split(';').next().unwrap_or_default().trim();
        let is = |name: &str| essence.eq_ignore_ascii_case(name);
        if essence.get(..17).is_some_and(|start| start.eq_ignore_ascii_case("application/grpc+")) {
            // The content of a gRPC body is framed, whatever its format.
            return Self::Other;
        }
        let suffix = essence.len().checked_sub(5).and_then(|at| essence.get(at..));
        if is("application/json") || suffix.is_some_and(|suffix| suffix.eq_ignore_ascii_case("+json")) {
            Self::Json
        } else if is("application/x-www-form-urlencoded") {
            Self::Form
        } else if is("multipart/form-data") {
            Self::Multipart
        } else {
            Self::Other
        }
    }
}

#[cfg(test)]
mod tests;
