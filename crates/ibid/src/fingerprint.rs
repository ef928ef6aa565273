//! What makes two requests the same.
//!
//! A fingerprint is a hash of the parts that the policy names, each with a tag and its length, so that no part can
//! pass for another. Bodies are hashed in canonical form: a client that retries may write the same JSON in another
//! order, or the same form under another multipart boundary. Path and query are hashed as sent.

use http::{HeaderMap, HeaderName, Method, Uri, header};
use sha2::{Digest, Sha256};

pub use self::json::{Pointer, PointerError};
use crate::{
    policy::{Part, Policy},
    store::Fingerprint,
};

mod form;
pub(crate) mod json;
mod multipart;

/// Of the way in which fingerprints are computed. Another version matches nothing that was stored before.
const VERSION: u8 = 1;

const PRECONDITIONS: [HeaderName; 4] =
    [header::IF_MATCH, header::IF_NONE_MATCH, header::IF_UNMODIFIED_SINCE, header::CONTENT_RANGE];

/// Checksums of the parts of a request that its fingerprint was made of: they tell operators which part of a second
/// request differed. Nothing is decided by them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PartDigests(pub(crate) [u32; 5]);

impl PartDigests {
    /// The parts, in their order.
    pub const NAMES: [&str; 5] = ["method", "path", "query", "body", "headers"];

    /// The names of the parts that are not the same.
    pub fn differing(&self, other: &Self) -> Vec<&'static str> {
        let pairs = self.0.iter().zip(&other.0).zip(Self::NAMES);
        pairs.filter(|((own, others), _)| own != others).map(|(_, name)| name).collect()
    }
}

/// A fingerprint that is being taken, part by part.
#[derive(Default)]
pub(crate) struct Printing {
    hash: Sha256,
    parts: PartDigests,
    /// The part that is being added.
    at: usize,
}

impl Printing {
    pub(crate) fn framed(&mut self, tag: u8, bytes: &[u8]) {
        framed(&mut self.hash, tag, bytes);
        let sum = &mut self.parts.0[self.at];
        *sum = crc32c::crc32c_append(*sum ^ u32::from(tag), bytes);
    }
}

impl Fingerprint {
    /// Of a request, by the policy's parts.
    pub fn of(policy: &Policy, method: &Method, uri: &Uri, headers: &HeaderMap, body: &[u8]) -> Self {
        Self::with_parts(policy, method, uri, headers, body).0
    }

    /// The same, and what tells its parts apart.
    pub(crate) fn with_parts(
        policy: &Policy, method: &Method, uri: &Uri, headers: &HeaderMap, body: &[u8],
    ) -> (Self, PartDigests) {
        Self::of_parts(policy, method, uri, headers, |printing| hash_body(printing, policy, headers, body))
    }

    /// The same, where the protocol has its own way of comparing bodies.
    pub(crate) fn of_parts(
        policy: &Policy, method: &Method, uri: &Uri, headers: &HeaderMap, body: impl Fn(&mut Printing),
    ) -> (Self, PartDigests) {
        if policy.fingerprint.is_empty() {
            return (Self::NONE, PartDigests::default());
        }
        let mut printing = Printing::default();
        for part in &policy.fingerprint {
            printing.at = match part {
                Part::Method => 0,
                Part::Path => 1,
                Part::Query => 2,
                Part::Body => 3,
                Part::Header(_) | Part::Preconditions => 4,
            };
            match part {
                Part::Method => printing.framed(b'm', method.as_str().as_bytes()),
                Part::Path => printing.framed(b'p', uri.path().as_bytes()),
                Part::Query => printing.framed(b'q', uri.query().unwrap_or_default().as_bytes()),
                Part::Body => body(&mut printing),
                Part::Header(name) => hash_header(&mut printing, headers, name),
                Part::Preconditions => PRECONDITIONS.iter().for_each(|name| hash_header(&mut printing, headers, name)),
            }
        }
        (Self { version: VERSION, digest: printing.hash.finalize().into() }, printing.parts)
    }

    /// Of plain bytes, for handlers without a layer.
    pub fn of_bytes(bytes: &[u8]) -> Self {
        let mut hash = Sha256::new();
        framed(&mut hash, b'r', bytes);
        Self { version: VERSION, digest: hash.finalize().into() }
    }
}

fn hash_header(printing: &mut Printing, headers: &HeaderMap, name: &HeaderName) {
    if headers.contains_key(name) {
        printing.framed(b'n', name.as_str().as_bytes());
        for value in headers.get_all(name) {
            printing.framed(b'v', value.as_bytes());
        }
    }
}

/// The kind is part of the hash: a form never equals the JSON that its bytes might also be.
fn hash_body(printing: &mut Printing, policy: &Policy, headers: &HeaderMap, body: &[u8]) {
    let encoded = headers.get(header::CONTENT_ENCODING).is_some_and(|coding| coding != "identity");
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    match Kind::of(content_type) {
        _ if encoded => {}
        Kind::Json => {
            if let Some(canonical) = json::canonical(body, &policy.json_ignore) {
                return printing.framed(b'j', &canonical);
            }
        }
        Kind::Form => {
            let mut canonical = Vec::with_capacity(body.len() + 64);
            form::canonical(body, &mut canonical);
            return printing.framed(b'f', &canonical);
        }
        Kind::Multipart => {
            let mut canonical = Vec::with_capacity(body.len());
            if multipart::canonical(content_type, body, &mut canonical) {
                return printing.framed(b'u', &canonical);
            }
        }
        Kind::Other => {}
    }
    printing.framed(b'r', body);
}

pub(crate) fn framed(hash: &mut Sha256, tag: u8, bytes: &[u8]) {
    let mut head = [tag; 9];
    head[1..].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
    hash.update(head);
    hash.update(bytes);
}

/// What a body is, by its Content-Type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Json,
    Form,
    Multipart,
    Other,
}

impl Kind {
    pub(crate) fn of(content_type: &str) -> Self {
        let essence = content_type.split(';').next().unwrap_or_default().trim();
        let is = |name: &str| essence.eq_ignore_ascii_case(name);
        if essence.get(..17).is_some_and(|start| start.eq_ignore_ascii_case("application/grpc+")) {
            // Whatever it is, it stands in frames.
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
mod tests {
    use super::*;

    fn of(policy: &Policy, target: &'static str, content_type: &'static str, body: &str) -> Fingerprint {
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, content_type.parse().unwrap());
        Fingerprint::of(policy, &Method::POST, &Uri::from_static(target), &headers, body.as_bytes())
    }

    #[test]
    fn json_is_compared_by_content_and_numbers_as_written() {
        let policy = Policy::ietf();
        let json = |body| of(&policy, "/p", "application/json; charset=utf-8", body);
        assert_eq!(json(r#"{"a":1,"b":2}"#), json(r#" { "b" : 2, "a" : 1 } "#));
        assert_ne!(json(r#"{"a":9007199254740992}"#), json(r#"{"a":9007199254740993}"#));
        assert_ne!(json(r#"{"a":1}"#), json(r#"{"a":1.0}"#));
        assert_ne!(json(r#"{"a":1,"a":2}"#), json(r#"{"a":2,"a":1}"#));
        assert_eq!(of(&policy, "/p", "application/vnd.api+json", "{ }"), json("{}"));
    }

    #[test]
    fn kinds_paths_and_queries_are_told_apart() {
        let policy = Policy::ietf();
        let base = of(&policy, "/p?x=1", "application/json", "{}");
        assert_ne!(base, of(&policy, "/p?x=2", "application/json", "{}"));
        assert_ne!(base, of(&policy, "/q?x=1", "application/json", "{}"));
        assert_ne!(base, of(&policy, "/p?x=1", "text/plain", "{}"));
        assert_eq!(of(&Policy::appsportal(), "/p", "text/plain", "a"), Fingerprint::NONE);
    }

    #[test]
    fn the_parts_that_differ_are_named() {
        let policy = Policy::ietf();
        let of = |method: Method, target: &'static str, condition: &'static str, body: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_TYPE, "application/json".parse().unwrap());
            headers.insert(header::IF_MATCH, condition.parse().unwrap());
            Fingerprint::with_parts(&policy, &method, &Uri::from_static(target), &headers, body.as_bytes())
        };
        let (print, first) = of(Method::POST, "/p?x=1", "a", r#"{"a":1,"b":2}"#);
        let again = of(Method::POST, "/p?x=1", "a", r#"{"b":2, "a":1}"#);
        assert_eq!((print, first), again, "the same request in another order");
        for (second, differing) in [
            (of(Method::PUT, "/p?x=1", "a", r#"{"a":1,"b":2}"#), &["method"][..]),
            (of(Method::POST, "/q?x=1", "a", r#"{"a":1,"b":2}"#), &["path"]),
            (of(Method::POST, "/p?x=2", "a", r#"{"a":1,"b":2}"#), &["query"]),
            (of(Method::POST, "/p?x=1", "a", r#"{"a":1,"b":3}"#), &["body"]),
            (of(Method::POST, "/p?x=1", "b", r#"{"a":1,"b":2}"#), &["headers"]),
            (of(Method::PUT, "/q?x=2", "b", "{}"), &PartDigests::NAMES),
        ] {
            assert_ne!(print, second.0);
            assert_eq!(first.differing(&second.1), differing);
        }
    }

    #[test]
    fn ignored_members_do_not_count() {
        let mut policy = Policy::ietf();
        policy.json_ignore = vec![Pointer::parse("/ts").unwrap()];
        assert_eq!(
            of(&policy, "/", "application/json", r#"{"a":1,"ts":1}"#),
            of(&policy, "/", "application/json", r#"{"a":1,"ts":2}"#)
        );
    }

    #[test]
    fn forms_and_multipart_are_compared_by_content() {
        let policy = Policy::ietf();
        let form = |body| of(&policy, "/", "application/x-www-form-urlencoded", body);
        assert_eq!(form("a=1&b=x%20y"), form("b=x+y&a=1"));
        assert_ne!(form("a=1&a=2"), form("a=2&a=1"));
        let part = "Content-Disposition: form-data; name=\"a\"\r\n\r\n1\r\n";
        let one = of(&policy, "/", "multipart/form-data; boundary=AAA", &format!("--AAA\r\n{part}--AAA--\r\n"));
        let two = of(&policy, "/", "multipart/form-data; boundary=BBB", &format!("--BBB\r\n{part}--BBB--\r\n"));
        assert_eq!(one, two);
    }

    #[test]
    fn encoded_bodies_are_compared_as_sent() {
        let policy = Policy::ietf();
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, "application/json".parse().unwrap());
        headers.insert(header::CONTENT_ENCODING, "gzip".parse().unwrap());
        let of = |body: &[u8]| Fingerprint::of(&policy, &Method::POST, &Uri::from_static("/"), &headers, body);
        assert_ne!(of(b"{}"), of(b"{ }"));
    }
}
