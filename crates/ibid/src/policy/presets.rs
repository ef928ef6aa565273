//! The presets. Each overrides the defaults of [`Policy::ietf`].

use std::{str::FromStr, time::Duration};

use http::{HeaderName, Method, StatusCode, header};

use super::{
    InvalidSetting, KeyPolicy, LabelKeyDisplay, LabelPolicy, OnConcurrent, OnMismatch, OnStoreDown, OnUnknown, Policy,
    PolicyMode, RefusalFormat, Remember, ResponseEnvelope, StatusRange,
};
use crate::{
    fingerprint::JsonNumbers,
    json_rpc::ToolSelection,
    key::{KeyFormat, KeySource},
    refusal::RefusalReason,
    webhook::{DEFAULT_TOLERANCE, WebhookScheme, WebhookVerifier},
};

/// The names of the presets, in the order of the guide's table.
pub const PRESET_NAMES: [&str; 10] =
    ["leads", "appsportal", "bookings", "platform", "membership", "ietf", "stripe", "acp", "ucp", "iceberg"];

/// The names of the presets for agents, whose requests are JSON-RPC.
pub const AGENT_PRESET_NAMES: [&str; 1] = ["mcp"];

/// The names of the webhook presets. All but the last define key and signature of a sender; the last needs both.
pub const WEBHOOK_PRESET_NAMES: [&str; 6] =
    ["webhook:standard", "webhook:svix", "webhook:github", "webhook:stripe", "webhook:shopify", "webhook:custom"];

const SECONDS_PER_MINUTE: u64 = 60;
const SECONDS_PER_HOUR: u64 = 60 * SECONDS_PER_MINUTE;

impl Policy {
    /// Returns the preset with this name, or `None`. [`PRESET_NAMES`], [`AGENT_PRESET_NAMES`] and
    /// [`WEBHOOK_PRESET_NAMES`] list the names.
    /// Webhook presets are incomplete without secrets.
    pub fn preset(name: &str) -> Option<Self> {
        Some(match name {
            "leads" => Self::leads(),
            "appsportal" => Self::appsportal(),
            "bookings" => Self::bookings(),
            "platform" => Self::platform(),
            "membership" => Self::membership(),
            "ietf" => Self::ietf(),
            "stripe" => Self::stripe(),
            "acp" => Self::acp(),
            "ucp" => Self::ucp(),
            "iceberg" => Self::iceberg(),
            "mcp" => Self::mcp(),
            "webhook:custom" => Self::webhook_base(None),
            _ => Self::webhook_base(Some(WebhookScheme::from_name(name.strip_prefix("webhook:")?)?)),
        })
    }

    /// The IETF draft, strictly applied: the default of `ibid`.
    pub fn ietf() -> Self {
        Self {
            methods: vec![Method::POST, Method::PUT, Method::PATCH, Method::DELETE],
            key: header_key("idempotency-key", false, KeyFormat::Any, 255),
            scope: list("host credential"),
            signature: None,
            label: LabelPolicy { tenant: None, user: None, key: LabelKeyDisplay::Masked },
            fingerprint: list("method path query type body preconditions"),
            json_ignore: Vec::new(),
            json_numbers: JsonNumbers::AsWritten,
            on_mismatch: OnMismatch::Reject,
            on_concurrent: OnConcurrent::Reject,
            on_unknown: OnUnknown::Hold,
            resolve: None,
            on_store_down: OnStoreDown::Closed,
            remember: Remember::Final,
            refusals: RefusalFormat::Problem,
            unknown_status: vec![StatusCode::BAD_GATEWAY, StatusCode::GATEWAY_TIMEOUT],
            remember_body: true,
            max_request: 1 << 20,
            max_response: 1 << 20,
            digest_status: None,
            ttl: Duration::from_secs(24 * SECONDS_PER_HOUR),
            lease: Duration::from_secs(30),
            timeout: Duration::from_secs(60),
            wait_timeout: Duration::from_secs(10),
            late_answer: None,
            first_headers: Vec::new(),
            replay_headers: headers(&[("idempotent-replayed", "true")]),
            drop_headers: vec![HeaderName::from_static("server-timing"), header::ALT_SVC, header::AGE],
            status: Vec::new(),
            grpc_status: Vec::new(),
            envelope: ResponseEnvelope::None,
            guard: None,
            tools: None,
            remember_tool_errors: true,
            mode: PolicyMode::Enforce,
        }
    }

    /// What the presets of existing services share: an unknown outcome runs again, an operation may take five minutes,
    /// and replays have no marker.
    fn lenient() -> Self {
        let five_minutes = Duration::from_secs(5 * SECONDS_PER_MINUTE);
        Self {
            on_unknown: OnUnknown::Retry,
            unknown_status: Vec::new(),
            lease: five_minutes,
            timeout: five_minutes,
            replay_headers: Vec::new(),
            ..Self::ietf()
        }
    }

    /// Lead forms: a UUID v4 and the body together identify a submission for five minutes.
    pub fn leads() -> Self {
        Self {
            methods: vec![Method::POST],
            key: header_key("x-idempotency-key", true, KeyFormat::Uuid4, 255),
            scope: list("global"),
            fingerprint: list("body"),
            on_mismatch: OnMismatch::New,
            on_concurrent: OnConcurrent::Wait,
            on_store_down: OnStoreDown::Open,
            remember: Remember::All,
            ttl: Duration::from_secs(5 * SECONDS_PER_MINUTE),
            ..Self::lenient()
        }
    }

    /// A multi-tenant API: keys are optional, and all responses are remembered, including errors.
    pub fn appsportal() -> Self {
        Self {
            methods: vec![Method::POST, Method::PUT, Method::PATCH],
            key: header_key("x-idempotency-key", false, KeyFormat::Any, 128),
            scope: list("header:x-tenant-id"),
            fingerprint: Vec::new(),
            on_mismatch: OnMismatch::Ignore,
            on_store_down: OnStoreDown::Open,
            remember: Remember::All,
            max_request: 10 << 20,
            max_response: 10 << 20,
            replay_headers: headers(&[("x-idempotency-replay", "true")]),
            ..Self::lenient()
        }
    }

    /// Bookings and payments: the key contains user, operation, resource and time; failures run again.
    pub fn bookings() -> Self {
        Self {
            methods: vec![Method::POST, Method::DELETE],
            key: header_key("idempotency-key", true, KeyFormat::Operation, 255),
            scope: list("global"),
            fingerprint: Vec::new(),
            on_mismatch: OnMismatch::Ignore,
            on_store_down: OnStoreDown::Open,
            remember: Remember::Success,
            digest_status: Some(StatusCode::OK),
            ..Self::lenient()
        }
    }

    /// A platform of services: every mutation needs a key; failures are remembered.
    pub fn platform() -> Self {
        Self {
            key: header_key("idempotency-key", true, KeyFormat::Any, 255),
            scope: list("global"),
            fingerprint: list("method path body"),
            remember: Remember::All,
            ..Self::lenient()
        }
    }

    /// A membership app: keys per user and endpoint, duplicates wait, responses contain `metadata`.
    pub fn membership() -> Self {
        Self {
            methods: vec![Method::POST, Method::PUT, Method::DELETE],
            key: header_key("idempotency-key", false, KeyFormat::Token, 255),
            scope: list("header:x-user-id method path"),
            fingerprint: Vec::new(),
            on_mismatch: OnMismatch::Ignore,
            on_concurrent: OnConcurrent::Wait,
            remember: Remember::Success,
            first_headers: headers(&[("x-idempotency-cached", "false"), ("x-request-id", "{request_id}")]),
            replay_headers: headers(&[
                ("x-idempotency-cached", "true"),
                ("x-original-timestamp", "{original_time}"),
                ("x-request-id", "{request_id}"),
            ]),
            envelope: ResponseEnvelope::Metadata,
            ..Self::lenient()
        }
    }

    /// Stripe's published behaviour: nearly all responses are remembered, a reused key gets a 400, and its SDKs can
    /// parse refusals.
    pub fn stripe() -> Self {
        Self {
            methods: vec![Method::POST],
            key: header_key("idempotency-key", false, KeyFormat::Raw, 255),
            // A platform key acts for its connected accounts; these headers select the account.
            scope: list("host credential header:stripe-account? header:stripe-context?"),
            fingerprint: list("method path query type body"),
            // Conflicts and rate limits are not final: the same request may succeed later.
            remember: Remember::all_except([StatusCode::CONFLICT, StatusCode::TOO_MANY_REQUESTS]),
            refusals: RefusalFormat::Stripe,
            unknown_status: Vec::new(),
            status: vec![(RefusalReason::KeyReused, StatusCode::BAD_REQUEST)],
            ..Self::ietf()
        }
    }

    /// The Agentic Commerce Protocol: every POST needs a key, equal JSON is the same request, and server errors run
    /// again.
    pub fn acp() -> Self {
        let ietf = Self::ietf();
        let drop_headers = [HeaderName::from_static("request-id")].into_iter().chain(ietf.drop_headers);
        Self {
            methods: vec![Method::POST],
            key: header_key("idempotency-key", true, KeyFormat::Raw, 255),
            scope: list("credential path"),
            fingerprint: list("body"),
            json_numbers: JsonNumbers::Decimal,
            remember: classes(&[2, 3, 4], &[]),
            refusals: RefusalFormat::Acp,
            // A retry after a server error is a new request.
            unknown_status: Vec::new(),
            // It names one request, not the operation.
            drop_headers: drop_headers.collect(),
            ..Self::ietf()
        }
    }

    /// The Universal Commerce Protocol: keys are UUIDs per client and operation, and requests are compared by their raw
    /// bytes.
    pub fn ucp() -> Self {
        Self {
            methods: vec![Method::POST, Method::PUT],
            key: header_key("idempotency-key", true, KeyFormat::Uuid, 36),
            scope: list("credential method path"),
            fingerprint: list("raw"),
            refusals: RefusalFormat::Ucp,
            ttl: Duration::from_secs(48 * SECONDS_PER_HOUR),
            status: vec![(RefusalReason::KeyReused, StatusCode::CONFLICT)],
            ..Self::ietf()
        }
    }

    /// An Iceberg REST catalog. Its clients take a 409 for a failed commit, so a duplicate waits, and is never refused
    /// with a 409.
    pub fn iceberg() -> Self {
        Self {
            methods: vec![Method::POST, Method::DELETE],
            key: header_key("idempotency-key", false, KeyFormat::Uuid7, 36),
            scope: list("credential"),
            fingerprint: list("method path body"),
            on_concurrent: OnConcurrent::Wait,
            // All 4xx but those that say nothing about the operation.
            remember: classes(&[2, 4], &[401, 403, 408, 419, 425, 429]),
            refusals: RefusalFormat::Iceberg,
            // The metadata of a table grows with its snapshots.
            max_request: 16 << 20,
            max_response: 16 << 20,
            status: vec![
                (RefusalReason::InProgress, StatusCode::SERVICE_UNAVAILABLE),
                (RefusalReason::OutcomeUnknown, StatusCode::SERVICE_UNAVAILABLE),
            ],
            ..Self::ietf()
        }
    }

    /// An MCP server: a `tools/call` with a key runs once, and all other messages pass through. See
    /// [`json_rpc`](crate::json_rpc).
    pub fn mcp() -> Self {
        let ietf = Self::ietf();
        let drop_headers = [HeaderName::from_static("mcp-session-id")].into_iter().chain(ietf.drop_headers);
        Self {
            methods: vec![Method::POST],
            key: KeyPolicy {
                // No carrier is standard; these are in use, in this order of precedence.
                from: list(
                    "json:/params/idempotencyKey json:/params/_meta/io.modelcontextprotocol~1idempotencyKey \
                     json:/params/_meta/idempotency-key header:idempotency-key",
                ),
                ..ietf.key
            },
            // Another path is another server.
            fingerprint: list("path body"),
            remember: classes(&[2], &[]),
            refusals: RefusalFormat::JsonRpc,
            // As the SDKs accept.
            max_request: 4 << 20,
            // A retry may come in another session, which its client would leave for the one in the replay.
            drop_headers: drop_headers.collect(),
            tools: Some(ToolSelection::Named(list("*"))),
            ..Self::ietf()
        }
    }

    /// Webhook deliveries: the sender's id is the key, and its signature is verified. After a 2xx, further attempts of
    /// a delivery get the same response.
    ///
    /// ```
    /// use ibid::{Policy, webhook::WebhookScheme};
    ///
    /// let policy = Policy::webhook(WebhookScheme::Stripe, ["whsec_from_the_dashboard"]).unwrap();
    /// assert!(policy.check().is_ok());
    /// ```
    ///
    /// # Errors
    /// One sentence about an invalid secret, without the secret itself.
    pub fn webhook<'a>(
        scheme: WebhookScheme, secrets: impl IntoIterator<Item = &'a str>,
    ) -> Result<Self, InvalidSetting> {
        let verifier = WebhookVerifier::new(scheme, secrets)?;
        Ok(Self { signature: Some(verifier.clone()), ..Self::webhook_base(Some(verifier.scheme)) })
    }

    /// The common settings of all webhook presets, and those specific to the sender.
    fn webhook_base(scheme: Option<WebhookScheme>) -> Self {
        Self {
            methods: vec![Method::POST],
            key: KeyPolicy {
                from: scheme.as_ref().map(WebhookScheme::key_sources).unwrap_or_default(),
                required: true,
                format: KeyFormat::Any,
                max_length: 255,
            },
            // Senders deliver one event to several endpoints under the same id.
            scope: list("path"),
            // Bodies may differ between attempts. A sender that gets a 422 retries for days and then disables the
            // endpoint.
            fingerprint: Vec::new(),
            on_mismatch: OnMismatch::Ignore,
            on_concurrent: OnConcurrent::Wait,
            // Senders deliver at least once, so receivers must handle a second run after an unknown outcome.
            on_unknown: OnUnknown::Retry,
            // Senders treat a 3xx as a failure and deliver again.
            remember: classes(&[2], &[]),
            unknown_status: Vec::new(),
            // GitHub sends up to 25 MB.
            max_request: if scheme == Some(WebhookScheme::GitHub) { 25 << 20 } else { 1 << 20 },
            // Longer than the last retry of any sender.
            ttl: Duration::from_secs(7 * 24 * SECONDS_PER_HOUR),
            // Some senders disconnect after five seconds.
            wait_timeout: Duration::from_secs(4),
            // Some senders treat a 409 as final; all of them retry a 503.
            status: vec![(RefusalReason::InProgress, StatusCode::SERVICE_UNAVAILABLE)],
            signature: scheme.map(|scheme| WebhookVerifier {
                scheme,
                secrets: Vec::new(),
                tolerance: DEFAULT_TOLERANCE,
            }),
            ..Self::ietf()
        }
    }
}

/// Parses settings as in a configuration file.
fn list<T: FromStr<Err = InvalidSetting>>(words: &str) -> Vec<T> {
    words.split(' ').map(|word| word.parse().expect("written above")).collect()
}

fn header_key(header: &'static str, required: bool, format: KeyFormat, max_length: usize) -> KeyPolicy {
    KeyPolicy { from: vec![KeySource::Header(HeaderName::from_static(header))], required, format, max_length }
}

/// Remembers responses with these first digits, except those with these statuses.
fn classes(include: &[u8], exclude: &[u16]) -> Remember {
    let code = |code: &u16| StatusRange::Code(StatusCode::from_u16(*code).expect("written above"));
    Remember::List {
        include: include.iter().copied().map(StatusRange::Class).collect(),
        exclude: exclude.iter().map(code).collect(),
    }
}

fn headers(all: &[(&'static str, &str)]) -> Vec<(HeaderName, super::HeaderTemplate)> {
    let template = |text: &str| text.parse().expect("written above");
    all.iter().map(|(name, value)| (HeaderName::from_static(name), template(value))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_is_consistent_and_found_by_its_name() {
        for name in PRESET_NAMES.into_iter().chain(AGENT_PRESET_NAMES) {
            let policy = Policy::preset(name).expect(name);
            assert_eq!(policy.check(), Ok(()), "{name}");
        }
        for name in ["nope", "webhook:nope", "webhook:", "webhook"] {
            assert_eq!(Policy::preset(name), None, "{name}");
        }
    }

    #[test]
    fn a_preset_for_webhooks_lacks_nothing_but_its_secrets() {
        for name in WEBHOOK_PRESET_NAMES {
            let mut policy = Policy::preset(name).expect(name);
            match &mut policy.signature {
                None => assert_eq!(name, "webhook:custom"),
                Some(signature) => {
                    assert_eq!(name, format!("webhook:{}", signature.scheme));
                    let secret = signature.scheme.parse_secret("whsec_c2VjcmV0").unwrap();
                    assert!(policy.check().unwrap_err().to_string().starts_with("secrets is missing"), "{name}");
                    policy.signature.as_mut().unwrap().secrets.push(secret);
                }
            }
            if name == "webhook:custom" {
                assert!(policy.check().unwrap_err().to_string().starts_with("key.from is empty"));
                continue;
            }
            assert_eq!(policy.check(), Ok(()), "{name}");
            policy.key.required = false;
            assert!(policy.check().unwrap_err().to_string().starts_with("key.required is false"), "{name}");
        }
    }
}
