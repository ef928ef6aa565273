//! The formats of refusals, by the setting `refusals`: a media type, the members of a JSON object, and headers.

use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};

use super::rules::json_string;
use crate::{
    policy::RefusalFormat,
    refusal::{Refusal, RefusalReason},
};

/// The correlation id of the Agentic Commerce Protocol.
const REQUEST_ID_HEADER: HeaderName = HeaderName::from_static("request-id");
const SHOULD_RETRY_HEADER: HeaderName = HeaderName::from_static("stripe-should-retry");
/// The JSON-RPC code of errors outside of the refusal table.
const PLAIN_ERROR_CODE: i32 = -31000;
/// The maximum `Retry-After` that SDKs obey.
const MAX_SDK_RETRY_AFTER: Duration = Duration::from_secs(60);

/// The content of a refusal, independent of its style.
pub(super) struct RefusalInfo<'a> {
    /// `None` for errors outside of the refusal table.
    reason: Option<RefusalReason>,
    pub(super) status: StatusCode,
    detail: &'a str,
    masked_key: &'a str,
    retry_after: Option<Duration>,
    /// The id of a JSON-RPC request, as JSON.
    message_id: Option<&'a str>,
}

impl RefusalFormat {
    /// The media type of refusals.
    pub fn media_type(self) -> &'static str {
        match self {
            Self::Problem => "application/problem+json",
            _ => "application/json",
        }
    }

    /// Writes the body, without its closing brace.
    pub(super) fn write_members(self, info: &RefusalInfo<'_>) -> String {
        match self {
            Self::Problem => problem_members(info),
            Self::Stripe => stripe_members(info),
            Self::Acp => acp_members(info),
            Self::Ucp => ucp_members(info),
            Self::Iceberg => iceberg_members(info),
            Self::JsonRpc => json_rpc_members(info),
        }
    }

    /// Whether the members include `error`, so that the envelope adds none.
    pub(super) fn has_error(self) -> bool {
        matches!(self, Self::Stripe | Self::Iceberg | Self::JsonRpc)
    }

    /// The request headers that all responses echo, if `key_names` are those that carry the key.
    pub(super) fn echoed_names(self, mut key_names: Vec<HeaderName>) -> Vec<HeaderName> {
        match self {
            Self::Stripe => {}
            Self::Acp => key_names.push(REQUEST_ID_HEADER),
            _ => key_names.clear(),
        }
        key_names
    }

    pub(super) fn write_headers(self, info: &RefusalInfo<'_>, headers: &mut HeaderMap) {
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(self.media_type()));
        if self == Self::Stripe {
            set_should_retry(headers, stripe_should_retry(info));
        }
    }

    /// Sets further headers of a replay.
    pub(super) fn write_replay_headers(self, status: StatusCode, headers: &mut HeaderMap) {
        if self == Self::Stripe && (status.is_client_error() || status.is_server_error()) {
            // A retry would get the same response.
            set_should_retry(headers, false);
        }
    }

    /// A further header that scripts may read.
    pub(super) fn exposed_header(self) -> Option<HeaderName> {
        (self == Self::Stripe).then_some(SHOULD_RETRY_HEADER)
    }
}

impl<'a> RefusalInfo<'a> {
    pub(super) fn refusal(
        refusal: &'a Refusal, status: StatusCode, masked_key: &'a str, message_id: Option<&'a str>,
    ) -> Self {
        let Refusal { reason, detail, retry_after } = refusal;
        Self { reason: Some(*reason), status, detail, masked_key, retry_after: *retry_after, message_id }
    }

    pub(super) fn plain(status: StatusCode, detail: &'a str) -> Self {
        Self { reason: None, status, detail, masked_key: "", retry_after: None, message_id: None }
    }
}

fn problem_members(told: &RefusalInfo<'_>) -> String {
    let (kind, title) = match told.reason {
        Some(reason) => (format!("/.well-known/idempotency#{}", reason.name()), reason.title()),
        None => ("about:blank".into(), told.status.canonical_reason().unwrap_or("Error")),
    };
    let (title, status, detail) = (json_string(title), told.status.as_u16(), json_string(told.detail));
    let mut body = format!("{{\"type\":\"{kind}\",\"title\":{title},\"status\":{status},\"detail\":{detail}");
    if !told.masked_key.is_empty() {
        body.push_str(&format!(",\"key\":{}", json_string(told.masked_key)));
    }
    body
}

/// An error of JSON-RPC. Its code is outside of the range that JSON-RPC and MCP reserve, and its `data` is for programs.
fn json_rpc_members(told: &RefusalInfo<'_>) -> String {
    let id = told.message_id.unwrap_or("null");
    let (code, kind) = match told.reason {
        Some(reason) => (reason.json_rpc_code(), reason.name()),
        None => (PLAIN_ERROR_CODE, "error"),
    };
    let mut data = format!("\"type\":\"{kind}\"");
    if !told.masked_key.is_empty() {
        data.push_str(&format!(",\"key\":{}", json_string(told.masked_key)));
    }
    if let Some(after) = told.retry_after {
        data.push_str(&format!(",\"retryAfterMs\":{}", after.as_millis()));
    }
    let message = json_string(told.detail);
    format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"error\":{{\"code\":{code},\"message\":{message},\"data\":{{{data}}}}}")
}

/// The format that Stripe's SDKs parse. They choose the exception by status and type, and pass `code` to programs.
fn stripe_members(told: &RefusalInfo<'_>) -> String {
    let kind = match (told.reason, told.status.as_u16()) {
        (Some(RefusalReason::KeyReused), _) => "idempotency_error",
        (Some(RefusalReason::OutcomeUnknown), _) | (_, 500..) => "api_error",
        (_, 401) => "authentication_error",
        (_, 429) => "rate_limit_error",
        _ => "invalid_request_error",
    };
    let code = match told.reason {
        None | Some(RefusalReason::KeyReused) => None,
        Some(RefusalReason::InProgress) => Some("idempotency_key_in_use".to_owned()),
        Some(RefusalReason::QuotaExceeded) => Some("rate_limit".to_owned()),
        Some(reason) => Some(reason.name().replace('-', "_")),
    };
    let code = code.map(|code| format!(",\"code\":\"{code}\"")).unwrap_or_default();
    let doc_url = match told.reason {
        Some(RefusalReason::InProgress) => {
            ",\"doc_url\":\"https://stripe.com/docs/error-codes/idempotency-key-in-use\""
        }
        _ => "",
    };
    format!("{{\"error\":{{\"type\":\"{kind}\"{code},\"message\":{}{doc_url}}}", json_string(told.detail))
}

/// The name of the refusal or, for errors outside of the table, of the status, with `_` between words.
fn error_name(told: &RefusalInfo<'_>) -> String {
    let name = told.reason.map(RefusalReason::name).or(told.status.canonical_reason()).unwrap_or("error");
    name.to_lowercase().replace(['-', ' '], "_")
}

/// The error of the Agentic Commerce Protocol, whose schema allows no further members.
fn acp_members(told: &RefusalInfo<'_>) -> String {
    let kind = match (told.reason, told.status.as_u16()) {
        (_, 503) => "service_unavailable",
        (Some(RefusalReason::OutcomeUnknown), _) | (_, 500..) => "processing_error",
        _ => "invalid_request",
    };
    let code = match told.reason {
        Some(RefusalReason::KeyMissing) => "idempotency_key_required".to_owned(),
        Some(RefusalReason::KeyReused) => "idempotency_conflict".to_owned(),
        Some(RefusalReason::InProgress) => "idempotency_in_flight".to_owned(),
        _ => error_name(told),
    };
    format!("{{\"type\":\"{kind}\",\"code\":\"{code}\",\"message\":{}", json_string(told.detail))
}

/// The error of the Universal Commerce Protocol. It registers no codes for keys; these are spelled like the codes of its
/// sample server.
fn ucp_members(told: &RefusalInfo<'_>) -> String {
    let code = match told.reason {
        Some(RefusalReason::KeyReused) => "IDEMPOTENCY_CONFLICT".to_owned(),
        _ => error_name(told).to_uppercase(),
    };
    format!("{{\"code\":\"{code}\",\"content\":{}", json_string(told.detail))
}

/// The error of Iceberg REST catalogs. Clients choose the exception by `code`, which is the status.
fn iceberg_members(told: &RefusalInfo<'_>) -> String {
    use RefusalReason::{OutcomeUnknown, UpstreamLost, UpstreamTimeout};
    let kind = match (told.reason, told.status.as_u16()) {
        (Some(OutcomeUnknown | UpstreamLost | UpstreamTimeout), _) => "CommitStateUnknownException",
        (_, 401 | 403) => "NotAuthorizedException",
        (_, 422) => "UnprocessableEntityException",
        (_, 429 | 503) => "SlowDownException",
        (_, 500..) => "InternalServerError",
        _ => "BadRequestException",
    };
    let (message, code) = (json_string(told.detail), told.status.as_u16());
    format!("{{\"error\":{{\"message\":{message},\"type\":\"{kind}\",\"code\":{code}}}")
}

/// Whether an SDK should retry automatically.
fn stripe_should_retry(told: &RefusalInfo<'_>) -> bool {
    let helps = match told.reason {
        Some(
            RefusalReason::InProgress
            | RefusalReason::StoreUnavailable
            | RefusalReason::Overloaded
            | RefusalReason::QuotaExceeded
            | RefusalReason::UpstreamUnreachable,
        ) => true,
        // Without a key, a retry could run the operation twice.
        Some(RefusalReason::UpstreamLost | RefusalReason::UpstreamTimeout) => !told.masked_key.is_empty(),
        Some(_) => false,
        None => told.status == StatusCode::REQUEST_TIMEOUT,
    };
    helps && told.retry_after.is_none_or(|after| after <= MAX_SDK_RETRY_AFTER)
}

fn set_should_retry(headers: &mut HeaderMap, retry: bool) {
    headers.insert(SHOULD_RETRY_HEADER, HeaderValue::from_static(if retry { "true" } else { "false" }));
}

/// The headers with these names that were sent exactly once.
pub(super) fn sent_once(headers: &HeaderMap, names: Vec<HeaderName>) -> Box<[(HeaderName, HeaderValue)]> {
    let only = |name: HeaderName| {
        let mut values = headers.get_all(&name).iter();
        let value = values.next().filter(|_| values.next().is_none())?.clone();
        Some((name, value))
    };
    names.into_iter().filter_map(only).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(reason: RefusalReason, status: u16, masked: &str, after: Option<u64>) -> (serde_json::Value, String) {
        let mut refusal = Refusal::new(reason, "say \"it\"");
        refusal.retry_after = after.map(Duration::from_secs);
        let told = RefusalInfo::refusal(&refusal, StatusCode::from_u16(status).unwrap(), masked, None);
        let mut headers = HeaderMap::new();
        RefusalFormat::Stripe.write_headers(&told, &mut headers);
        assert_eq!(headers[header::CONTENT_TYPE], "application/json");
        let body = serde_json::from_str(&(stripe_members(&told) + "}")).unwrap();
        (body, headers[SHOULD_RETRY_HEADER].to_str().unwrap().to_owned())
    }

    #[test]
    fn every_refusal_has_a_type_that_the_sdks_of_stripe_know() {
        let known =
            ["api_error", "authentication_error", "idempotency_error", "invalid_request_error", "rate_limit_error"];
        for reason in RefusalReason::all() {
            let (body, _) = written(reason, reason.status().as_u16(), "k", None);
            let error = &body["error"];
            assert!(known.contains(&error["type"].as_str().unwrap()), "{reason}: {body}");
            assert_eq!(error["message"], "say \"it\"", "{reason}");
            assert_eq!(error["code"].is_null(), reason == RefusalReason::KeyReused, "{reason}: {body}");
            assert_eq!(error["doc_url"].is_string(), reason == RefusalReason::InProgress, "{reason}: {body}");
        }
        let of = |reason, status| written(reason, status, "k", None).0["error"]["type"].as_str().unwrap().to_owned();
        assert_eq!(of(RefusalReason::KeyReused, 400), "idempotency_error");
        assert_eq!(of(RefusalReason::InProgress, 409), "invalid_request_error");
        assert_eq!(of(RefusalReason::IdentityInvalid, 401), "authentication_error");
        assert_eq!(of(RefusalReason::QuotaExceeded, 429), "rate_limit_error");
        assert_eq!(of(RefusalReason::Overloaded, 503), "api_error");
    }

    /// The body of a refusal in each of the other formats.
    #[test]
    fn every_refusal_has_the_members_that_its_protocol_defines() {
        let body = |format: RefusalFormat, reason: RefusalReason, status: StatusCode| {
            let refusal = Refusal::new(reason, "say \"it\"");
            let told = RefusalInfo::refusal(&refusal, status, "k", None);
            serde_json::from_str::<serde_json::Value>(&(format.write_members(&told) + "}")).unwrap()
        };
        let members = |value: &serde_json::Value| {
            value.as_object().unwrap().keys().cloned().collect::<std::collections::BTreeSet<_>>()
        };
        let named = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        for reason in RefusalReason::all() {
            let acp = body(RefusalFormat::Acp, reason, reason.status());
            assert_eq!(members(&acp), named(&["code", "message", "type"]), "{acp}");
            let kinds = ["invalid_request", "processing_error", "service_unavailable"];
            assert!(kinds.contains(&acp["type"].as_str().unwrap()), "{acp}");
            let ucp = body(RefusalFormat::Ucp, reason, reason.status());
            assert_eq!(members(&ucp), named(&["code", "content"]), "{ucp}");
            let iceberg = body(RefusalFormat::Iceberg, reason, reason.status());
            assert_eq!(members(&iceberg["error"]), named(&["code", "message", "type"]), "{iceberg}");
            assert_eq!(iceberg["error"]["code"], reason.status().as_u16());
            for said in [&acp["message"], &ucp["content"], &iceberg["error"]["message"]] {
                assert_eq!(said, "say \"it\"", "{reason}");
            }
        }
        let unknown = body(RefusalFormat::Iceberg, RefusalReason::OutcomeUnknown, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(unknown["error"]["type"], "CommitStateUnknownException");
        let plain = RefusalInfo::plain(StatusCode::REQUEST_TIMEOUT, "late");
        assert_eq!(acp_members(&plain), r#"{"type":"invalid_request","code":"request_timeout","message":"late""#);
    }

    #[test]
    fn sdks_of_stripe_are_told_to_retry_where_that_helps() {
        for reason in RefusalReason::all() {
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
        assert_eq!(written(RefusalReason::QuotaExceeded, 429, "k", Some(3600)).1, "false", "longer than anybody waits");
        for reason in [RefusalReason::UpstreamLost, RefusalReason::UpstreamTimeout] {
            assert_eq!(written(reason, 502, "", None).1, "false", "without a key it would run twice");
        }
    }
}
