//! How refusals are written: one [`Shape`] per value of the dial `refusals`.
//!
//! A shape is a media type, the members of a JSON object, and headers. To add one: a variant of [`Refusals`], its word in
//! `policy/parse.rs`, and its entry here.

use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};

use super::answer::string;
use crate::{
    policy::Refusals,
    refusal::{Reason, Refusal},
};

const SHOULD_RETRY: &str = "stripe-should-retry";
/// SDKs wait for a `Retry-After` of up to this.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// What a refusal says, whatever its shape.
pub(super) struct Told<'a> {
    /// None for what is no refusal of the table.
    reason: Option<Reason>,
    status: StatusCode,
    detail: &'a str,
    /// The key, masked; empty if there is none.
    masked: &'a str,
    retry_after: Option<Duration>,
}

pub(super) struct Shape {
    pub(super) content_type: &'static str,
    /// The body, without its closing brace.
    pub(super) members: fn(&Told<'_>) -> String,
    /// Whether these have an `error` of their own, so that the envelope adds none.
    pub(super) has_error: bool,
    /// Whether all answers repeat the header that carries the key.
    pub(super) echoes_key: bool,
    /// Besides the headers that all refusals have.
    pub(super) head: fn(&Told<'_>, &mut HeaderMap),
    /// Of replays.
    pub(super) replay_head: fn(StatusCode, &mut HeaderMap),
    /// Those that a script may want to read.
    pub(super) exposed: &'static [&'static str],
}

static PROBLEM: Shape = Shape {
    content_type: "application/problem+json",
    members: problem,
    has_error: false,
    echoes_key: false,
    head: |_, _| {},
    replay_head: |_, _| {},
    exposed: &[],
};

static STRIPE: Shape = Shape {
    content_type: "application/json",
    members: stripe,
    has_error: true,
    echoes_key: true,
    head: |told, headers| should_retry(headers, stripe_retries(told)),
    // It will not change, however often it is asked for.
    replay_head: |status, headers| {
        if status.is_client_error() || status.is_server_error() {
            should_retry(headers, false);
        }
    },
    exposed: &[SHOULD_RETRY],
};

impl Refusals {
    pub(super) fn shape(self) -> &'static Shape {
        match self {
            Self::Problem => &PROBLEM,
            Self::Stripe => &STRIPE,
        }
    }

    /// The media type of refusals.
    pub fn media_type(self) -> &'static str {
        self.shape().content_type
    }
}

impl<'a> Told<'a> {
    pub(super) fn refusal(refusal: &'a Refusal, status: StatusCode, masked: &'a str) -> Self {
        let Refusal { reason, detail, retry_after } = refusal;
        Self { reason: Some(*reason), status, detail, masked, retry_after: *retry_after }
    }

    pub(super) fn plain(status: StatusCode, detail: &'a str) -> Self {
        Self { reason: None, status, detail, masked: "", retry_after: None }
    }
}

/// RFC 9457.
fn problem(told: &Told<'_>) -> String {
    let (kind, title) = match told.reason {
        Some(reason) => (format!("/.well-known/idempotency#{}", reason.name()), reason.title()),
        None => ("about:blank".into(), told.status.canonical_reason().unwrap_or("Error")),
    };
    let (title, status, detail) = (string(title), told.status.as_u16(), string(told.detail));
    let mut body = format!("{{\"type\":\"{kind}\",\"title\":{title},\"status\":{status},\"detail\":{detail}");
    if !told.masked.is_empty() {
        body.push_str(&format!(",\"key\":{}", string(told.masked)));
    }
    body
}

/// As Stripe's SDKs parse it. They choose the exception by status and type, and read `code` for programs.
fn stripe(told: &Told<'_>) -> String {
    let kind = match (told.reason, told.status.as_u16()) {
        (Some(Reason::KeyReused), _) => "idempotency_error",
        (Some(Reason::OutcomeUnknown), _) | (_, 500..) => "api_error",
        (_, 401) => "authentication_error",
        (_, 429) => "rate_limit_error",
        _ => "invalid_request_error",
    };
    let code = match told.reason {
        None | Some(Reason::KeyReused) => None,
        Some(Reason::InProgress) => Some("idempotency_key_in_use".to_owned()),
        Some(Reason::QuotaExceeded) => Some("rate_limit".to_owned()),
        Some(reason) => Some(reason.name().replace('-', "_")),
    };
    let code = code.map(|code| format!(",\"code\":\"{code}\"")).unwrap_or_default();
    let doc_url = match told.reason {
        Some(Reason::InProgress) => ",\"doc_url\":\"https://stripe.com/docs/error-codes/idempotency-key-in-use\"",
        _ => "",
    };
    format!("{{\"error\":{{\"type\":\"{kind}\"{code},\"message\":{}{doc_url}}}", string(told.detail))
}

/// Whether an SDK should send the request again by itself.
fn stripe_retries(told: &Told<'_>) -> bool {
    let helps = match told.reason {
        Some(
            Reason::InProgress
            | Reason::StoreUnavailable
            | Reason::Overloaded
            | Reason::QuotaExceeded
            | Reason::UpstreamUnreachable,
        ) => true,
        // Only a key keeps it from running twice.
        Some(Reason::UpstreamLost | Reason::UpstreamTimeout) => !told.masked.is_empty(),
        Some(_) => false,
        None => told.status == StatusCode::REQUEST_TIMEOUT,
    };
    helps && told.retry_after.is_none_or(|after| after <= LONGEST_WAIT)
}

fn should_retry(headers: &mut HeaderMap, retry: bool) {
    headers.insert(SHOULD_RETRY, HeaderValue::from_static(if retry { "true" } else { "false" }));
}

/// The header that carried the key, to be repeated in the answer. None if it is not sent exactly once.
pub(super) fn sent_key(headers: &HeaderMap, names: &[HeaderName]) -> Option<(HeaderName, HeaderValue)> {
    let name = names.iter().find(|name| headers.contains_key(*name))?;
    let mut values = headers.get_all(name).iter();
    let value = values.next().filter(|_| values.next().is_none())?;
    Some((name.clone(), value.clone()))
}

/// What every refusal is, besides its shape.
pub(super) fn common_head(shape: &Shape, told: &Told<'_>, headers: &mut HeaderMap) {
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(shape.content_type));
    (shape.head)(told, headers);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(reason: Reason, status: u16, masked: &str, after: Option<u64>) -> (serde_json::Value, String) {
        let mut refusal = Refusal::new(reason, "say \"it\"");
        refusal.retry_after = after.map(Duration::from_secs);
        let told = Told::refusal(&refusal, StatusCode::from_u16(status).unwrap(), masked);
        let mut headers = HeaderMap::new();
        common_head(Refusals::Stripe.shape(), &told, &mut headers);
        assert_eq!(headers[header::CONTENT_TYPE], "application/json");
        let body = serde_json::from_str(&(stripe(&told) + "}")).unwrap();
        (body, headers[SHOULD_RETRY].to_str().unwrap().to_owned())
    }

    #[test]
    fn every_refusal_has_a_type_that_the_sdks_of_stripe_know() {
        let known =
            ["api_error", "authentication_error", "idempotency_error", "invalid_request_error", "rate_limit_error"];
        for reason in Reason::all() {
            let (body, _) = written(reason, reason.status().as_u16(), "k", None);
            let error = &body["error"];
            assert!(known.contains(&error["type"].as_str().unwrap()), "{reason}: {body}");
            assert_eq!(error["message"], "say \"it\"", "{reason}");
            assert_eq!(error["code"].is_null(), reason == Reason::KeyReused, "{reason}: {body}");
            assert_eq!(error["doc_url"].is_string(), reason == Reason::InProgress, "{reason}: {body}");
        }
        let of = |reason, status| written(reason, status, "k", None).0["error"]["type"].as_str().unwrap().to_owned();
        assert_eq!(of(Reason::KeyReused, 400), "idempotency_error");
        assert_eq!(of(Reason::InProgress, 409), "invalid_request_error");
        assert_eq!(of(Reason::IdentityInvalid, 401), "authentication_error");
        assert_eq!(of(Reason::QuotaExceeded, 429), "rate_limit_error");
        assert_eq!(of(Reason::Overloaded, 503), "api_error");
    }

    #[test]
    fn sdks_of_stripe_are_told_to_retry_where_that_helps() {
        for reason in Reason::all() {
            let (_, retry) = written(reason, reason.status().as_u16(), "k", Some(1));
            let helps = matches!(
                reason.name(),
                "in-progress"
                    | "store-unavailable"
                    | "overloaded"
                    | "quota-exceeded"
                    | "upstream-unreachable"
                    | "upstream-lost"
                    | "upstream-timeout"
            );
            assert_eq!(retry, helps.to_string(), "{reason}");
        }
        assert_eq!(written(Reason::QuotaExceeded, 429, "k", Some(3600)).1, "false", "longer than anybody waits");
        for reason in [Reason::UpstreamLost, Reason::UpstreamTimeout] {
            assert_eq!(written(reason, 502, "", None).1, "false", "without a key it would run twice");
        }
    }
}
