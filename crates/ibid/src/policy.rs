//! The settings of a route. A [`Policy`] contains all of them; a [preset](presets) provides a full set; a route
//! overrides any of them.
//!
//! ```
//! use std::time::Duration;
//! use ibid::{Policy, policy::OnConcurrent};
//!
//! let mut policy = Policy::ietf();
//! policy.ttl = Duration::from_secs(72 * 3600);
//! policy.on_concurrent = OnConcurrent::Wait;
//! assert!(policy.check().is_ok());
//! ```

use std::{fmt, str::FromStr, sync::Arc, time::Duration};

use http::{HeaderName, HeaderValue, Method, StatusCode};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use crate::{
    fingerprint::{JsonNumbers, JsonPointer},
    json_rpc::ToolSelection,
    key::{KeyFormat, KeySource},
    refusal::RefusalReason,
    scope::ScopePart,
    webhook::WebhookVerifier,
};

pub(crate) use self::checked::require;
pub use self::{
    checked::{CheckedPolicy, InvalidPolicy, InvalidSetting, Terms},
    guard::{IntentGuard, OnMatch},
};

mod checked;
mod guard;
pub(crate) mod parse;
pub mod presets;
#[cfg(test)]
mod tests;

/// The maximum of any duration setting, a hundred years: stores calculate in microseconds.
pub(crate) const MAX_DURATION: Duration = Duration::from_secs(100 * 366 * 24 * 3600);

/// All settings of one route. The guide describes each setting; [`Policy::ietf`] has the defaults.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Policy {
    /// Requests with other methods pass through.
    pub methods: Vec<Method>,
    /// Where the key comes from, and which keys are valid.
    pub key: KeyPolicy,
    /// The parts that identify the caller. A key is valid within one scope only.
    pub scope: Vec<ScopePart>,
    /// Verifies the signature of webhook deliveries. `None`: no signature is required.
    pub signature: Option<WebhookVerifier>,
    /// What operators see of a request.
    pub label: LabelPolicy,
    /// The parts of a request that are compared.
    pub fingerprint: Vec<FingerprintPart>,
    /// Members of JSON bodies that are not compared.
    pub json_ignore: Vec<JsonPointer>,
    /// Which numbers in JSON bodies are equal.
    pub json_numbers: JsonNumbers,
    /// What a key gets that was used with another fingerprint.
    pub on_mismatch: OnMismatch,
    /// What a key gets whose operation is in progress.
    pub on_concurrent: OnConcurrent,
    /// What a key gets whose outcome is unknown.
    pub on_unknown: OnUnknown,
    /// The request that asks the app about an unknown outcome.
    pub resolve: Option<ResolveProbe>,
    /// What a request gets while the store is down.
    pub on_store_down: OnStoreDown,
    /// Which responses are remembered.
    pub remember: Remember,
    /// The format of refusals.
    pub refusals: RefusalFormat,
    /// Statuses that leave the outcome unknown. They take precedence over `remember`.
    pub unknown_status: Vec<StatusCode>,
    /// Whether the body is remembered, or only the status.
    pub remember_body: bool,
    /// The maximum request body in bytes; larger requests are refused.
    pub max_request: u64,
    /// The maximum response body in bytes to remember; of larger bodies only the digest is stored.
    pub max_response: u64,
    /// The status of a replay whose body was too large to store; the original status if `None`.
    pub digest_status: Option<StatusCode>,
    /// How long a completed record is remembered.
    pub ttl: Duration,
    /// How long a claim stays valid without being extended.
    pub lease: Duration,
    /// How long the operation may take.
    pub timeout: Duration,
    /// How long a duplicate waits for the first request.
    pub wait_timeout: Duration,
    /// How long after `timeout` an answer is still accepted, although the client was refused; one lease if `None`.
    pub late_answer: Option<Duration>,
    /// Headers to set on first responses.
    pub first_headers: Vec<(HeaderName, HeaderTemplate)>,
    /// Headers to set on replays.
    pub replay_headers: Vec<(HeaderName, HeaderTemplate)>,
    /// Headers that are never stored, besides Set-Cookie and hop-by-hop headers.
    pub drop_headers: Vec<HeaderName>,
    /// HTTP statuses of refusals that differ from the table.
    pub status: Vec<(RefusalReason, StatusCode)>,
    /// gRPC codes of refusals that differ from the table.
    pub grpc_status: Vec<(RefusalReason, u8)>,
    /// What is added to JSON responses.
    pub envelope: ResponseEnvelope,
    /// Recognizes an operation that is sent again under another key. `None`: keys alone decide.
    pub guard: Option<IntentGuard>,
    /// For an MCP server: the tools whose calls are covered. Its requests are JSON-RPC, see
    /// [`json_rpc`](crate::json_rpc). `None`: requests are plain HTTP.
    pub tools: Option<ToolSelection>,
    /// For an MCP server: whether results with `isError`, and JSON-RPC errors of a tool, are remembered.
    pub remember_tool_errors: bool,
    /// Whether the policy is enforced.
    pub mode: PolicyMode,
}

/// Where the key comes from, and which keys are valid.
#[derive(Debug, Clone, PartialEq)]
pub struct KeyPolicy {
    /// The sources, in order. The first one present wins.
    pub from: Vec<KeySource>,
    /// Whether requests without a key are refused; otherwise they pass through.
    pub required: bool,
    /// The format of valid keys.
    pub format: KeyFormat,
    /// The maximum length in bytes, 1 to 255, after unquoting (a raw key is not unquoted).
    pub max_length: usize,
}

/// What operators see of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LabelPolicy {
    /// The tenant tag; the scope's first part if `None`.
    pub tenant: Option<ScopePart>,
    /// The user tag; the scope's second part if `None`.
    pub user: Option<ScopePart>,
    /// Whether the key is stored in clear text.
    pub key: LabelKeyDisplay,
}

/// How the key is displayed to operators.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LabelKeyDisplay {
    /// As it was sent.
    Clear,
    /// `550e****0000`.
    Masked,
}

/// A part of the fingerprint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FingerprintPart {
    /// The method, and the headers that override it in some frameworks.
    Method,
    /// The path as sent, without one trailing slash.
    Path,
    /// The query, as sent.
    Query,
    /// The media type, without boundary and `charset=utf-8`, and Content-Encoding.
    Type,
    /// The body in canonical form.
    Body,
    /// The body as sent, instead of the canonical form.
    Raw,
    /// One header.
    Header(HeaderName),
    /// If-Match, If-None-Match, If-Unmodified-Since, Content-Range.
    Preconditions,
}

/// What a key gets that was used with another fingerprint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnMismatch {
    /// The refusal `key-reused`.
    Reject,
    /// An entry of its own: the fingerprint becomes part of the address.
    New,
    /// The first response.
    Ignore,
}

/// What a duplicate of a running request gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnConcurrent {
    /// The refusal `in-progress`.
    Reject,
    /// The response, after waiting for it.
    Wait,
}

/// What a retry gets if the outcome is unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnUnknown {
    /// A refusal, until an operator resolves the key.
    Hold,
    /// Another run.
    Retry,
}

/// What a request gets while the store is down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnStoreDown {
    /// The refusal `store-unavailable`.
    Closed,
    /// An unprotected run; the response says so.
    Open,
}

/// Which responses are remembered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Remember {
    /// All responses.
    All,
    /// 2xx, 3xx, and 4xx except 401, 403, 408, 409, 425, 429.
    Final,
    /// 2xx and 3xx.
    Success,
    /// Statuses in `include` but not in `exclude`. With exclusions only, all other statuses.
    List {
        /// Statuses to remember.
        include: Vec<StatusRange>,
        /// Statuses not to remember. They take precedence over `include`.
        exclude: Vec<StatusRange>,
    },
}

/// One status or a class: `404` or `2xx`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatusRange {
    /// All statuses with this first digit.
    Class(u8),
    /// A single status.
    Code(StatusCode),
}

/// The format of refusals.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RefusalFormat {
    /// RFC 9457: `application/problem+json`.
    #[default]
    Problem,
    /// The format that Stripe's SDKs parse: `{"error":{…}}`, and `Stripe-Should-Retry`.
    Stripe,
    /// The error object of the Agentic Commerce Protocol: `{"type","code","message"}`. Answers echo the key and
    /// `Request-Id`.
    Acp,
    /// The error object of the Universal Commerce Protocol: `{"code","content"}`.
    Ucp,
    /// The error object of Iceberg REST catalogs: `{"error":{"message","type","code"}}`.
    Iceberg,
    /// An error of JSON-RPC. If it has the id of a request, its HTTP status is 200: clients read no other errors.
    JsonRpc,
}

/// What is added to JSON responses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResponseEnvelope {
    /// Nothing.
    None,
    /// The member `metadata`.
    Metadata,
}

/// Whether a policy is enforced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PolicyMode {
    /// The policy is enforced.
    Enforce,
    /// The policy claims and records, but never refuses, waits, replays or fails.
    Shadow,
    /// All requests pass through.
    Off,
}

/// The request that asks the app about an unknown outcome: `GET /payments?key={key}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolveProbe {
    method: Method,
    target: Arc<str>,
}

/// A header value with the placeholders `{request_id}` and `{original_time}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeaderTemplate {
    text: Arc<str>,
    /// The value, if it has no placeholders.
    fixed: Option<HeaderValue>,
}

impl Policy {
    /// Checks that no settings are out of range or contradict each other.
    ///
    /// # Errors
    /// Names the first invalid setting, the expected range and the actual value.
    pub fn check(&self) -> Result<(), InvalidSetting> {
        let positive = [("ttl", self.ttl), ("lease", self.lease), ("timeout", self.timeout)];
        for (setting, duration) in positive {
            require(!duration.is_zero(), setting, "is zero; it must be longer, such as \"30s\"")?;
        }
        let may_be_zero = [("wait_timeout", self.wait_timeout), ("late_answer", self.late_answer_or_lease())];
        for (setting, duration) in positive.into_iter().chain(may_be_zero) {
            let message = format!("is {duration:?}; it must be at most a hundred years, \"36600d\"");
            require(duration <= MAX_DURATION, setting, message)?;
        }
        let message = format!("is {:?}; it must be at least \"100ms\", or the heartbeat cannot keep up", self.lease);
        require(self.lease >= Duration::from_millis(100), "lease", message)?;
        let message = "is empty; name at least one, or use mode = \"off\"";
        require(!self.methods.is_empty(), "methods", message)?;
        let message = "is empty; name at least one source, such as \"header:Idempotency-Key\"";
        require(!self.key.from.is_empty(), "key.from", message)?;
        let message = format!("is {}; allowed is 1 to 255", self.key.max_length);
        require((1..=255).contains(&self.key.max_length), "key.max_length", message)?;
        let message = "is empty; say [\"global\"] if keys are shared by all callers";
        require(!self.scope.is_empty(), "scope", message)?;
        let is_mixed = self.scope.contains(&ScopePart::Global) && self.scope.len() > 1;
        require(!is_mixed, "scope", "has \"global\" beside other parts; use it alone")?;
        let message = "is empty, so nothing can mismatch; set on_mismatch = \"ignore\" or add parts";
        require(!self.fingerprint.is_empty() || self.on_mismatch == OnMismatch::Ignore, "fingerprint", message)?;
        let [has_body, has_raw] =
            [FingerprintPart::Body, FingerprintPart::Raw].map(|part| self.fingerprint.contains(&part));
        let message = "has \"body\", which takes the fingerprint as key; add \"body\" to fingerprint";
        require(!self.key.from.contains(&KeySource::Body) || has_body || has_raw, "key.from", message)?;
        require(!(has_body && has_raw), "fingerprint", "has \"body\" and \"raw\"; name the one or the other")?;
        self.check_tools()?;
        self.check_guard()?;
        let Some(signature) = &self.signature else { return Ok(()) };
        let message = "is false; where deliveries are signed it must be true, because what has no key passes unchecked";
        require(self.key.required, "key.required", message)?;
        signature.check()
    }

    /// How long after `timeout` an answer is still accepted.
    pub fn late_answer_or_lease(&self) -> Duration {
        self.late_answer.unwrap_or(self.lease)
    }

    /// Whether the policy covers this method.
    pub fn covers(&self, method: &Method) -> bool {
        self.mode != PolicyMode::Off && self.lists_method(method)
    }

    /// Whether `methods` contains this method, ignoring case: some apps treat `post` as `POST`.
    pub fn lists_method(&self, method: &Method) -> bool {
        let is_same = |named: &Method| named.as_str().eq_ignore_ascii_case(method.as_str());
        self.methods.contains(method) || self.methods.iter().any(is_same)
    }

    /// The token claims that the scope and the labels read. If there are any, requests need a token.
    pub fn claims(&self) -> impl Iterator<Item = &str> {
        let label = [&self.label.tenant, &self.label.user].into_iter().flatten();
        self.scope.iter().chain(label).filter_map(|part| match part.part() {
            ScopePart::Jwt(claim) => Some(claim.as_str()),
            _ => None,
        })
    }

    /// The part that identifies the user: the user label, else `jwt:sub` or a header such as X-User-Id in the scope.
    pub(crate) fn user_part(&self) -> Option<&ScopePart> {
        match &self.label.user {
            Some(part) if matches!(part.part(), ScopePart::Jwt(_) | ScopePart::Header(_)) => Some(part),
            _ => self.scope.iter().find(|part| part.names_user()),
        }
    }

    /// Whether a key that names a user is valid for that user only.
    pub fn checks_key_owner(&self) -> bool {
        self.key.format == KeyFormat::Operation && self.user_part().is_some()
    }

    /// Headers that mark a replay. Neither clients nor the app may set them.
    pub(crate) fn replay_only_headers(&self) -> impl Iterator<Item = &HeaderName> {
        let also_first = |name: &HeaderName| self.first_headers.iter().any(|(first, _)| first == name);
        self.replay_headers.iter().map(|(name, _)| name).filter(move |name| !also_first(name))
    }

    /// Response headers that tell a replay from a first response. They are removed from requests. Headers with an id do
    /// not count, because clients send those for their own purposes.
    pub(crate) fn replay_marker_headers(&self) -> impl Iterator<Item = &HeaderName> {
        let fixed = self.replay_headers.iter().filter(|(_, value)| value.fixed().is_some()).map(|(name, _)| name);
        fixed.chain(self.replay_only_headers())
    }

    /// The HTTP status of a refusal.
    pub fn status_of(&self, reason: RefusalReason) -> StatusCode {
        let set = self.status.iter().find(|(which, _)| *which == reason);
        set.map_or_else(|| reason.status(), |(_, status)| *status)
    }

    /// The gRPC code of a refusal.
    pub fn grpc_status_of(&self, reason: RefusalReason) -> u8 {
        let set = self.grpc_status.iter().find(|(which, _)| *which == reason);
        set.map_or_else(|| reason.grpc_status(), |(_, code)| *code)
    }

    /// Whether two policies compute the same address and fingerprint for the same request. Switching between policies
    /// that do not makes all records unreachable.
    pub fn has_same_records_as(&self, other: &Self) -> bool {
        self.key.from == other.key.from
            && self.key.format.folds_case() == other.key.format.folds_case()
            && (self.key.format == KeyFormat::Raw) == (other.key.format == KeyFormat::Raw)
            && self.scope == other.scope
            && self.fingerprint == other.fingerprint
            && self.json_ignore == other.json_ignore
            && self.json_numbers == other.json_numbers
            && self.tools.is_some() == other.tools.is_some()
            && (self.on_mismatch == OnMismatch::New) == (other.on_mismatch == OnMismatch::New)
    }
}

impl Remember {
    /// Remembers all responses except those with these statuses.
    pub fn all_except(statuses: impl IntoIterator<Item = StatusCode>) -> Self {
        Self::List { include: Vec::new(), exclude: statuses.into_iter().map(StatusRange::Code).collect() }
    }

    /// Returns whether a response with this status is remembered.
    ///
    /// 307 and 308 never are: they ask the client to send the same request, with the same key, elsewhere.
    pub fn matches(&self, status: StatusCode) -> bool {
        if matches!(status, StatusCode::TEMPORARY_REDIRECT | StatusCode::PERMANENT_REDIRECT) {
            return false;
        }
        match self {
            Self::All => true,
            Self::Final => {
                matches!(status.as_u16(), 200..=499) && !matches!(status.as_u16(), 401 | 403 | 408 | 409 | 425 | 429)
            }
            Self::Success => matches!(status.as_u16(), 200..=399),
            Self::List { include, exclude } => {
                let within = |ranges: &[StatusRange]| ranges.iter().any(|range| range.contains(status));
                let all_but = include.is_empty() && !exclude.is_empty();
                (all_but || within(include)) && !within(exclude)
            }
        }
    }
}

impl StatusRange {
    fn contains(self, status: StatusCode) -> bool {
        match self {
            Self::Class(class) => status.as_u16() / 100 == u16::from(class),
            Self::Code(code) => code == status,
        }
    }
}

impl ResolveProbe {
    /// The method of the probe.
    pub fn method(&self) -> &Method {
        &self.method
    }

    /// The target of the probe, with the percent-encoded key filled in.
    pub fn target(&self, key: &str) -> String {
        const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
        self.target.replace("{key}", &utf8_percent_encode(key, ESCAPED).to_string())
    }
}

impl HeaderTemplate {
    /// The value, if it has no placeholders.
    pub(crate) fn fixed(&self) -> Option<&HeaderValue> {
        self.fixed.as_ref()
    }

    /// Fills in the placeholders for one response.
    pub fn fill(&self, request_id: &str, original_time: &str) -> HeaderValue {
        if let Some(fixed) = &self.fixed {
            return fixed.clone();
        }
        let value = self.text.replace("{request_id}", request_id).replace("{original_time}", original_time);
        HeaderValue::from_str(&value).expect("both are visible ASCII")
    }
}

impl FromStr for HeaderTemplate {
    type Err = InvalidSetting;

    fn from_str(text: &str) -> Result<Self, InvalidSetting> {
        let plain = text.replace("{request_id}", "").replace("{original_time}", "");
        let fits = HeaderValue::from_str(&plain).is_ok() && !plain.contains(['{', '}']);
        let wrong = || format!("{text:?} is no header value; {{request_id}} and {{original_time}} are filled in");
        if !fits {
            return Err(wrong().into());
        }
        Ok(Self { text: text.into(), fixed: HeaderValue::from_str(text).ok().filter(|_| plain == text) })
    }
}

impl fmt::Display for HeaderTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
