//! Version 1 of the rules, for comparison with old records. It must never change.
//!
//! It ignores media types, trailers and method overrides, uses the path with its trailing slash, and parses forms and
//! multipart bodies less strictly.

use http::{HeaderMap, header};

use super::{BodyFormat, FingerprintHasher, FingerprintInput, PRECONDITION_HEADERS, json, multipart};
use crate::policy::{FingerprintPart, Policy};

pub(super) mod form;

pub(super) fn hash_part(
    printing: &mut FingerprintHasher, part: &FingerprintPart, input: &FingerprintInput<'_>,
    body: impl Fn(&mut FingerprintHasher),
) {
    match part {
        FingerprintPart::Method => printing.framed(b'm', input.method.as_str().as_bytes()),
        FingerprintPart::Path => printing.framed(b'p', input.uri.path().as_bytes()),
        FingerprintPart::Query => printing.framed(b'q', input.uri.query().unwrap_or_default().as_bytes()),
        FingerprintPart::Body => body(printing),
        FingerprintPart::Header(name) => printing.header(input.headers, name),
        FingerprintPart::Preconditions => {
            PRECONDITION_HEADERS.iter().for_each(|name| printing.header(input.headers, name))
        }
        // Policies of that time did not have them.
        FingerprintPart::Type | FingerprintPart::Raw => {}
    }
}

pub(super) fn hash_body(printing: &mut FingerprintHasher, policy: &Policy, headers: &HeaderMap, body: &[u8]) {
    let encoded = headers.get(header::CONTENT_ENCODING).is_some_and(|coding| coding != "identity");
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    match BodyFormat::of(content_type) {
        _ if encoded => {}
        BodyFormat::Json => {
            if let Some(canonical) = json::canonical(body, &policy.json_ignore, json::NameEquality::Exact) {
                return printing.framed(b'j', &canonical);
            }
        }
        BodyFormat::Form => {
            let mut canonical = Vec::with_capacity(body.len() + 64);
            form::canonical(body, &mut canonical);
            return printing.framed(b'f', &canonical);
        }
        BodyFormat::Multipart => {
            let mut canonical = Vec::with_capacity(body.len());
            if multipart::canonical(content_type, body, &mut canonical) {
                return printing.framed(b'u', &canonical);
            }
        }
        BodyFormat::Other => {}
    }
    printing.framed(b'r', body);
}
