//! The seven presets, one table. Everything that a row leaves out is as [`Policy::ietf`] has it.

use std::time::Duration;

use http::{HeaderName, Method, StatusCode, header};

use super::{
    Envelope, KeyPolicy, Label, LabelKey, Mode, OnConcurrent, OnMismatch, OnStoreDown, OnUnknown, Part, Policy,
    Remember,
};
use crate::{
    key::{KeyFormat, KeySource},
    refusal::Reason,
    scope::ScopePart,
};

/// The presets by name, in the order of the table in the guide.
pub const NAMES: [&str; 7] = ["leads", "appsportal", "bookings", "platform", "membership", "ietf", "stripe"];

const MINUTES: u64 = 60;
const HOURS: u64 = 60 * MINUTES;

impl Policy {
    /// A preset by its name. `None` if there is none of that name; [`NAMES`] lists them.
    pub fn preset(name: &str) -> Option<Self> {
        Some(match name {
            "leads" => Self::leads(),
            "appsportal" => Self::appsportal(),
            "bookings" => Self::bookings(),
            "platform" => Self::platform(),
            "membership" => Self::membership(),
            "ietf" => Self::ietf(),
            "stripe" => Self::stripe(),
            _ => return None,
        })
    }

    /// The IETF draft, strict: what `ibid` does unless told otherwise.
    pub fn ietf() -> Self {
        Self {
            methods: vec![Method::POST, Method::PUT, Method::PATCH, Method::DELETE],
            key: KeyPolicy {
                from: vec![KeySource::Header(HeaderName::from_static("idempotency-key"))],
                required: false,
                format: KeyFormat::Any,
                max_length: 255,
            },
            scope: vec![ScopePart::Host, ScopePart::Credential],
            label: Label { tenant: None, user: None, key: LabelKey::Masked },
            fingerprint: vec![Part::Method, Part::Path, Part::Query, Part::Body, Part::Preconditions],
            json_ignore: Vec::new(),
            on_mismatch: OnMismatch::Reject,
            on_concurrent: OnConcurrent::Reject,
            on_unknown: OnUnknown::Hold,
            resolve: None,
            on_store_down: OnStoreDown::Closed,
            remember: Remember::Final,
            unknown_status: vec![StatusCode::BAD_GATEWAY, StatusCode::GATEWAY_TIMEOUT],
            remember_body: true,
            max_request: 1 << 20,
            max_response: 1 << 20,
            digest_status: None,
            ttl: Duration::from_secs(24 * HOURS),
            lease: Duration::from_secs(30),
            timeout: Duration::from_secs(60),
            wait_timeout: Duration::from_secs(10),
            first_headers: Vec::new(),
            replay_headers: headers(&[("idempotent-replayed", "true")]),
            drop_headers: vec![HeaderName::from_static("server-timing"), header::ALT_SVC, header::AGE],
            status: Vec::new(),
            grpc_status: Vec::new(),
            envelope: Envelope::None,
            mode: Mode::Enforce,
        }
    }

    /// Lead forms: a UUID v4 and the body together name a submission for five minutes.
    pub fn leads() -> Self {
        Self {
            methods: vec![Method::POST],
            key: key("x-idempotency-key", true, KeyFormat::Uuid4, 255),
            scope: vec![ScopePart::Global],
            fingerprint: vec![Part::Body],
            on_mismatch: OnMismatch::New,
            on_concurrent: OnConcurrent::Wait,
            on_unknown: OnUnknown::Retry,
            on_store_down: OnStoreDown::Open,
            remember: Remember::All,
            unknown_status: Vec::new(),
            ttl: Duration::from_secs(5 * MINUTES),
            lease: Duration::from_secs(5 * MINUTES),
            replay_headers: Vec::new(),
            ..Self::ietf()
        }
    }

    /// A multi-tenant API: optional keys, every answer remembered, errors too.
    pub fn appsportal() -> Self {
        Self {
            methods: vec![Method::POST, Method::PUT, Method::PATCH],
            key: key("x-idempotency-key", false, KeyFormat::Any, 128),
            scope: vec![ScopePart::Header(HeaderName::from_static("x-tenant-id"))],
            fingerprint: Vec::new(),
            on_mismatch: OnMismatch::Ignore,
            on_unknown: OnUnknown::Retry,
            on_store_down: OnStoreDown::Open,
            remember: Remember::All,
            unknown_status: Vec::new(),
            lease: Duration::from_secs(5 * MINUTES),
            replay_headers: headers(&[("x-idempotency-replay", "true")]),
            ..Self::ietf()
        }
    }

    /// Bookings and payments: the key itself names user, operation, resource and time; failures run again.
    pub fn bookings() -> Self {
        Self {
            methods: vec![Method::POST, Method::DELETE],
            key: key("idempotency-key", true, KeyFormat::Operation, 255),
            scope: vec![ScopePart::Global],
            fingerprint: Vec::new(),
            on_mismatch: OnMismatch::Ignore,
            on_unknown: OnUnknown::Retry,
            on_store_down: OnStoreDown::Open,
            remember: Remember::Success,
            unknown_status: Vec::new(),
            lease: Duration::from_secs(5 * MINUTES),
            digest_status: Some(StatusCode::OK),
            replay_headers: Vec::new(),
            ..Self::ietf()
        }
    }

    /// A platform of services: every mutation needs a key; a failure is remembered as one.
    pub fn platform() -> Self {
        Self {
            key: key("idempotency-key", true, KeyFormat::Any, 255),
            scope: vec![ScopePart::Global],
            fingerprint: vec![Part::Method, Part::Path, Part::Body],
            on_unknown: OnUnknown::Retry,
            remember: Remember::All,
            unknown_status: Vec::new(),
            lease: Duration::from_secs(5 * MINUTES),
            replay_headers: Vec::new(),
            ..Self::ietf()
        }
    }

    /// A membership app: per user and endpoint, duplicates wait, answers carry `metadata`.
    pub fn membership() -> Self {
        Self {
            methods: vec![Method::POST, Method::PUT, Method::DELETE],
            key: key("idempotency-key", false, KeyFormat::Token, 255),
            scope: vec![ScopePart::Header(HeaderName::from_static("x-user-id")), ScopePart::Method, ScopePart::Path],
            fingerprint: Vec::new(),
            on_mismatch: OnMismatch::Ignore,
            on_concurrent: OnConcurrent::Wait,
            on_unknown: OnUnknown::Retry,
            remember: Remember::Success,
            unknown_status: Vec::new(),
            lease: Duration::from_secs(5 * MINUTES),
            first_headers: headers(&[("x-idempotency-cached", "false"), ("x-request-id", "{request_id}")]),
            replay_headers: headers(&[
                ("x-idempotency-cached", "true"),
                ("x-original-timestamp", "{original_time}"),
                ("x-request-id", "{request_id}"),
            ]),
            envelope: Envelope::Metadata,
            ..Self::ietf()
        }
    }

    /// Stripe's published behaviour: every answer remembered, a reuse is a 400.
    pub fn stripe() -> Self {
        Self {
            methods: vec![Method::POST],
            fingerprint: vec![Part::Method, Part::Path, Part::Query, Part::Body],
            remember: Remember::All,
            unknown_status: Vec::new(),
            status: vec![(Reason::KeyReused, StatusCode::BAD_REQUEST)],
            ..Self::ietf()
        }
    }
}

fn key(header: &'static str, required: bool, format: KeyFormat, max_length: usize) -> KeyPolicy {
    KeyPolicy { from: vec![KeySource::Header(HeaderName::from_static(header))], required, format, max_length }
}

fn headers(all: &[(&'static str, &str)]) -> Vec<(HeaderName, super::Template)> {
    let template = |text: &str| text.parse().expect("written above");
    all.iter().map(|(name, value)| (HeaderName::from_static(name), template(value))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_is_consistent_and_found_by_its_name() {
        for name in NAMES {
            let policy = Policy::preset(name).expect(name);
            assert_eq!(policy.check(), Ok(()), "{name}");
        }
        assert_eq!(Policy::preset("nope"), None);
    }
}
