//! Version 1 of the rules, kept so that what was recorded by them can still be compared. It must never change.
//!
//! It knew no media types, trailers and method overrides, took the path with its trailing slash, and read forms and
//! multipart bodies less strictly.

use http::{HeaderMap, header};

use super::{FingerprintInput, Kind, PRECONDITIONS, Printing, json, multipart};
use crate::policy::{Part, Policy};

pub(super) mod form;

pub(super) fn hash_part(
    printing: &mut Printing, part: &Part, input: &FingerprintInput<'_>, body: impl Fn(&mut Printing),
) {
    match part {
        Part::Method => printing.framed(b'm', input.method.as_str().as_bytes()),
        Part::Path => printing.framed(b'p', input.uri.path().as_bytes()),
        Part::Query => printing.framed(b'q', input.uri.query().unwrap_or_default().as_bytes()),
        Part::Body => body(printing),
        Part::Header(name) => printing.header(input.headers, name),
        Part::Preconditions => PRECONDITIONS.iter().for_each(|name| printing.header(input.headers, name)),
        // Policies of that time did not have them.
        Part::Type | Part::Raw => {}
    }
}

pub(super) fn hash_body(printing: &mut Printing, policy: &Policy, headers: &HeaderMap, body: &[u8]) {
    let encoded = headers.get(header::CONTENT_ENCODING).is_some_and(|coding| coding != "identity");
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    match Kind::of(content_type) {
        _ if encoded => {}
        Kind::Json => {
            if let Some(canonical) = json::canonical(body, &policy.json_ignore, json::Names::AsWritten) {
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
