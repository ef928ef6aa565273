//! Fingerprints decide whether two requests are the same.
//!
//! A fingerprint is one SHA-256 over the parts that the policy names. Each part is a frame: a tag, the length and the
//! bytes, so that no part can imitate another. The body comes first, in canonical form: a retry may contain the same
//! JSON in another order, or the same form with another multipart boundary. Path and query are hashed as sent, the path
//! without one trailing slash, because frameworks redirect between the two forms.
//!
//! The rule for everything else: if an app could read two requests differently, their fingerprints differ.
//!
//! Three things have no frame, so that a small request takes few blocks of the hash. Canonical JSON starts with a byte that
//! is no tag, and no tag continues a JSON value; its blocks are then those of the hash, and a body that is already canonical
//! is hashed as it is. The method POST and the type `application/json` have a tag each, and nothing else.
//!
//! The rules have a version, which is stored with each fingerprint. A stored fingerprint of another version is compared
//! by computing the request's fingerprint under that version, if it is known: see [`Fingerprint::compare`].

use http::{HeaderMap, HeaderName, Method, Uri, header};

pub use self::json::{JsonNumbers, JsonPointer, JsonPointerError};
use self::{media::MediaType, stream::checksum};
pub(crate) use self::{memo::FingerprintMemo, stream::HashStream};
use crate::{
    policy::{FingerprintPart, Policy},
    sent_names::{SentHeaders, SentNames},
    store::Fingerprint,
};

pub(crate) mod form;
mod intent;
pub(crate) mod json;
mod media;
mod memo;
mod multipart;
mod stream;

static PRECONDITION_HEADERS: [HeaderName; 4] =
    [header::IF_MATCH, header::IF_NONE_MATCH, header::IF_UNMODIFIED_SINCE, header::CONTENT_RANGE];

/// Headers that override the method in some frameworks.
pub(crate) static METHOD_OVERRIDE_HEADERS: [HeaderName; 3] = [
    HeaderName::from_static("x-http-method-override"),
    HeaderName::from_static("x-http-method"),
    HeaderName::from_static("x-method-override"),
];

/// The version of fingerprints of plain bytes, which the SQL functions compute too. The current rules give a body that is
/// compared byte by byte the same digest, if nothing else is compared.
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
pub(crate) struct FingerprintHasher {
    stream: HashStream,
    parts: PartDigests,
    /// The index of the current part.
    current_part: usize,
}

/// The index of the body in [`PartDigests`]. Its digest is the state of the hash, which has nothing else yet.
const BODY_PART: usize = 3;
const HEADERS_PART: usize = 4;

impl FingerprintHasher {
    fn new() -> Self {
        Self { stream: HashStream::new(), parts: PartDigests::default(), current_part: BODY_PART }
    }

    /// Adds a tag without a length. It has the rules of [`framed`](Self::framed), and is no tag of a frame.
    #[inline]
    fn tag(&mut self, tag: u8) {
        self.stream.byte(tag);
        self.parts.0[self.current_part] ^= u32::from(tag);
    }

    /// Adds a frame. No tag is a byte that a JSON value starts with or that continues a number.
    #[inline(never)]
    pub(crate) fn framed(&mut self, tag: u8, bytes: &[u8]) {
        self.stream.framed(tag, bytes);
        if self.current_part != BODY_PART {
            let sum = &mut self.parts.0[self.current_part];
            *sum = checksum(*sum ^ u32::from(tag), bytes);
        }
    }

    /// Adds the raw body. Its frame is that of [`Fingerprint::of_bytes`].
    fn raw_body(&mut self, body: &[u8]) {
        self.stream.byte(b'r');
        self.stream.bytes(&(body.len() as u64).to_le_bytes());
        self.stream.bytes(body);
    }

    #[inline(never)]
    fn header(&mut self, headers: &HeaderMap, name: &HeaderName) {
        if headers.contains_key(name) {
            self.framed(b'N', name.as_str().as_bytes());
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
    pub const VERSION: u8 = 3;

    /// Computes the fingerprint of a request without trailers.
    pub fn of(policy: &Policy, method: &Method, uri: &Uri, headers: &HeaderMap, body: &[u8]) -> Self {
        Self::of_version(Self::VERSION, policy, method, uri, headers, body).expect("the current version is known")
    }

    /// Computes the fingerprint by the rules of another version. Returns `None` if the version is unknown.
    pub fn of_version(
        version: u8, policy: &Policy, method: &Method, uri: &Uri, headers: &HeaderMap, body: &[u8],
    ) -> Option<Self> {
        let found = FoundHeaders::of(&SentHeaders::of(headers));
        let input = FingerprintInput { method, uri, headers, found, body, trailers: None };
        input.fingerprint(version, policy).map(|(fingerprint, _)| fingerprint)
    }

    /// Computes the fingerprint of plain bytes, for handlers without a layer. It is the same in every version.
    pub fn of_bytes(bytes: &[u8]) -> Self {
        let mut hasher = FingerprintHasher::new();
        hasher.raw_body(bytes);
        Self { version: BYTES_VERSION, digest: hasher.stream.finish() }
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
    /// What `headers` say about the body's type, and which headers count.
    pub(crate) found: FoundHeaders,
    pub(crate) body: &'a [u8],
    pub(crate) trailers: Option<&'a HeaderMap>,
}

impl FingerprintInput<'_> {
    /// Computes the fingerprint by the rules of a version, and the digests of its parts. Returns `None` if the version
    /// is unknown.
    pub(crate) fn fingerprint(&self, version: u8, policy: &Policy) -> Option<(Fingerprint, PartDigests)> {
        self.with_body(version, policy, |printing| self.hash_body(printing, policy))
    }

    /// Computes the fingerprint with a protocol-specific way to hash the body.
    pub(crate) fn with_body(
        &self, version: u8, policy: &Policy, body: impl Fn(&mut FingerprintHasher),
    ) -> Option<(Fingerprint, PartDigests)> {
        if policy.fingerprint.is_empty() {
            return Some((Fingerprint::NONE, PartDigests::default()));
        }
        if ![Fingerprint::VERSION, BYTES_VERSION].contains(&version) {
            return None;
        }
        let mut printing = FingerprintHasher::new();
        for part in &policy.fingerprint {
            match part {
                FingerprintPart::Body => body(&mut printing),
                FingerprintPart::Raw => printing.framed(b'R', self.body),
                _ => continue,
            }
            self.hash_trailers(&mut printing);
            printing.parts.0[BODY_PART] = printing.stream.checksum();
            break;
        }
        for part in &policy.fingerprint {
            self.hash_part(&mut printing, part);
        }
        Some((Fingerprint { version, digest: printing.stream.finish() }, printing.parts))
    }

    #[inline(always)]
    fn hash_part(&self, printing: &mut FingerprintHasher, part: &FingerprintPart) {
        let (headers, found) = (self.headers, &self.found);
        match part {
            FingerprintPart::Method => {
                printing.current_part = 0;
                match *self.method {
                    Method::POST => printing.tag(b'M'),
                    _ => printing.framed(b'm', self.method.as_str().as_bytes()),
                }
                if found.method_override {
                    METHOD_OVERRIDE_HEADERS.iter().for_each(|name| printing.header(headers, name));
                }
            }
            FingerprintPart::Path => {
                printing.current_part = 1;
                let path = self.uri.path();
                printing.framed(b'p', path.strip_suffix('/').unwrap_or(path).as_bytes());
            }
            FingerprintPart::Query => {
                printing.current_part = 2;
                if let Some(query) = self.uri.query().filter(|query| !query.is_empty()) {
                    printing.framed(b'q', query.as_bytes());
                }
            }
            FingerprintPart::Type => {
                printing.current_part = HEADERS_PART;
                self.hash_type(printing);
            }
            FingerprintPart::Header(name) => {
                printing.current_part = HEADERS_PART;
                printing.header(headers, name);
            }
            FingerprintPart::Preconditions => {
                printing.current_part = HEADERS_PART;
                if found.precondition {
                    PRECONDITION_HEADERS.iter().for_each(|name| printing.header(headers, name));
                }
            }
            // They are hashed first.
            FingerprintPart::Body | FingerprintPart::Raw => {}
        }
    }

    fn hash_type(&self, printing: &mut FingerprintHasher) {
        match self.found {
            FoundHeaders { is_plain_json: true, .. } => printing.tag(b'Y'),
            FoundHeaders { content_type: true, .. } => self.hash_other_types(printing),
            FoundHeaders { content_type: false, .. } => {}
        }
        if self.found.content_coding {
            self.content_codings().for_each(|coding| printing.framed(b'c', coding));
        }
    }

    #[inline(never)]
    fn hash_other_types(&self, printing: &mut FingerprintHasher) {
        let types = self.headers.get_all(header::CONTENT_TYPE).iter();
        for media in types.map(|value| MediaType::read(value.as_bytes()).canonical()) {
            match &*media {
                PLAIN_JSON => printing.tag(b'Y'),
                media => printing.framed(b'y', media),
            }
        }
    }

    fn hash_body(&self, printing: &mut FingerprintHasher, policy: &Policy) {
        let found = &self.found;
        if found.is_plain_json && !found.content_coding {
            if !self.hash_json(printing, policy) {
                printing.raw_body(self.body);
            }
            return;
        }
        self.hash_other_body(printing, policy, self.content_type(), found.several_types);
    }

    /// Returns `false` if the raw bytes must be compared.
    fn hash_json(&self, printing: &mut FingerprintHasher, policy: &Policy) -> bool {
        let names = json::NameEquality::IgnoreCase;
        let Policy { json_ignore, json_numbers, .. } = policy;
        json::hash_canonical(self.body, json_ignore, names, *json_numbers, &mut printing.stream)
    }

    /// Hashes the values at these pointers instead of the whole body.
    pub(crate) fn hash_json_values(&self, printing: &mut FingerprintHasher, policy: &Policy, at: &[JsonPointer]) {
        let names = json::NameEquality::IgnoreCase;
        printing.stream.byte(b'J');
        let Policy { json_ignore, json_numbers, .. } = policy;
        if !json::hash_values(self.body, json_ignore, at, names, *json_numbers, &mut printing.stream) {
            printing.raw_body(self.body);
        }
    }

    /// The format is part of the hash: a form never equals JSON with the same bytes.
    fn hash_other_body(
        &self, printing: &mut FingerprintHasher, policy: &Policy, content_type: &[u8], several_types: bool,
    ) {
        let media = MediaType::read(content_type);
        let kind = content_type_format(content_type);
        let is_encoded = self.content_codings().next().is_some();
        // The meaning of the bytes depends on these headers, so the raw bytes are hashed together with them.
        if is_encoded || several_types || media.has_other_charset() {
            self.content_codings().for_each(|coding| printing.framed(b'e', coding));
            let types = self.headers.get_all(header::CONTENT_TYPE).iter();
            types.filter(|_| !is_encoded).for_each(|value| printing.framed(b's', value.as_bytes()));
            return printing.raw_body(self.body);
        }
        match kind {
            BodyFormat::Json => {
                if self.hash_json(printing, policy) {
                    return;
                }
            }
            BodyFormat::Form => {
                let mut canonical = Vec::with_capacity(self.body.len() + 64);
                match form::canonical(self.body, &mut canonical) {
                    Some(form::PairOrder::Sorted) => return printing.framed(b'o', &canonical),
                    Some(form::PairOrder::PartlySorted) => return printing.framed(b'O', &canonical),
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
        printing.raw_body(self.body);
    }

    fn hash_trailers(&self, printing: &mut FingerprintHasher) {
        let Some(trailers) = self.trailers.filter(|trailers| !trailers.is_empty()) else { return };
        let mut names: Vec<_> = trailers.keys().collect();
        names.sort_unstable_by_key(|name| name.as_str());
        printing.framed(b'T', b"");
        names.into_iter().for_each(|name| printing.header(trailers, name));
    }

    /// The content type, or nothing.
    fn content_type(&self) -> &[u8] {
        self.headers.get(header::CONTENT_TYPE).map(|media| media.as_bytes()).unwrap_or_default()
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

/// What the headers say.
#[derive(Clone, Copy, Default)]
pub(crate) struct FoundHeaders {
    content_type: bool,
    several_types: bool,
    /// Whether the only content type is [`PLAIN_JSON`].
    is_plain_json: bool,
    content_coding: bool,
    method_override: bool,
    precondition: bool,
}

impl FoundHeaders {
    pub(crate) fn of(sent: &SentHeaders<'_>) -> Self {
        const METHOD_OVERRIDES: SentNames =
            SentNames::listed(&["x-http-method-override", "x-http-method", "x-method-override"]);
        const PRECONDITIONS: SentNames =
            SentNames::listed(&["if-match", "if-none-match", "if-unmodified-since", "content-range"]);
        let has = |name: &HeaderName| sent.get(name).is_some();
        let content_type = sent.get(&header::CONTENT_TYPE);
        let several_types = sent.is_repeated(&header::CONTENT_TYPE);
        Self {
            content_type: content_type.is_some(),
            several_types,
            is_plain_json: content_type.is_some_and(|media| media == PLAIN_JSON) && !several_types,
            content_coding: has(&header::CONTENT_ENCODING),
            method_override: sent.names.may_share(&METHOD_OVERRIDES) && METHOD_OVERRIDE_HEADERS.iter().any(has),
            precondition: sent.names.may_share(&PRECONDITIONS) && PRECONDITION_HEADERS.iter().any(has),
        }
    }
}

/// The most frequent content type, for which nothing needs to be parsed.
const PLAIN_JSON: &[u8] = b"application/json";

/// Appends the length of a piece of a canonical form, and the piece.
fn frame(bytes: &[u8], out: &mut Vec<u8>) {
    put_length(bytes.len(), |byte| out.push(byte));
    out.extend_from_slice(bytes);
}

/// Writes a length: seven bits in each byte, the low ones first, and the high bit in all bytes but the last.
fn put_length(mut length: usize, mut put: impl FnMut(u8)) {
    while length >= 0x80 {
        put(length as u8 | 0x80);
        length >>= 7;
    }
    put(length as u8);
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
