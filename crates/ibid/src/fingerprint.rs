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

impl Fingerprint {
    /// Of a request, by the policy's parts.
    pub fn of(policy: &Policy, method: &Method, uri: &Uri, headers: &HeaderMap, body: &[u8]) -> Self {
        Self::of_parts(policy, method, uri, headers, |hash| hash_body(hash, policy, headers, body))
    }

    /// The same, where the protocol has its own way of comparing bodies.
    pub(crate) fn of_parts(
        policy: &Policy, method: &Method, uri: &Uri, headers: &HeaderMap, body: impl Fn(&mut Sha256),
    ) -> Self {
        if policy.fingerprint.is_empty() {
            return Self::NONE;
        }
        let mut hash = Sha256::new();
        for part in &policy.fingerprint {
            match part {
                Part::Method => framed(&mut hash, b'm', method.as_str().as_bytes()),
                Part::Path => framed(&mut hash, b'p', uri.path().as_bytes()),
                Part::Query => framed(&mut hash, b'q', uri.query().unwrap_or_default().as_bytes()),
                Part::Body => body(&mut hash),
                Part::Header(name) => hash_header(&mut hash, headers, name),
                Part::Preconditions => PRECONDITIONS.iter().for_each(|name| hash_header(&mut hash, headers, name)),
            }
        }
        Self { version: VERSION, digest: hash.finalize().into() }
    }

    /// Of plain bytes, for handlers without a layer.
    pub fn of_bytes(bytes: &[u8]) -> Self {
        let mut hash = Sha256::new();
        framed(&mut hash, b'r', bytes);
        Self { version: VERSION, digest: hash.finalize().into() }
    }
}

fn hash_header(hash: &mut Sha256, headers: &HeaderMap, name: &HeaderName) {
    if headers.contains_key(name) {
        framed(hash, b'n', name.as_str().as_bytes());
        for value in headers.get_all(name) {
            framed(hash, b'v', value.as_bytes());
        }
    }
}

/// The kind is part of the hash: a form never equals the JSON that its bytes might also be.
fn hash_body(hash: &mut Sha256, policy: &Policy, headers: &HeaderMap, body: &[u8]) {
    let encoded = headers.get(header::CONTENT_ENCODING).is_some_and(|coding| coding != "identity");
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    match Kind::of(content_type) {
        _ if encoded => {}
        Kind::Json => {
            if let Some(canonical) = json::canonical(body, &policy.json_ignore) {
                return framed(hash, b'j', &canonical);
            }
        }
        Kind::Form => {
            let mut canonical = Vec::with_capacity(body.len() + 64);
            form::canonical(body, &mut canonical);
            return framed(hash, b'f', &canonical);
        }
        Kind::Multipart => {
            let mut canonical = Vec::with_capacity(body.len());
            if multipart::canonical(content_type, body, &mut canonical) {
                return framed(hash, b'u', &canonical);
            }
        }
        Kind::Other => {}
    }
    framed(hash, b'r', body);
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
