//! The dials. A [`Policy`] is all of them; a [preset](presets) sets them all; a route overrides any.
//!
//! ```
//! use std::time::Duration;
//! use ibid::{OnConcurrent, Policy};
//!
//! let mut policy = Policy::ietf();
//! policy.ttl = Duration::from_secs(72 * 3600);
//! policy.on_concurrent = OnConcurrent::Wait;
//! assert!(policy.check().is_ok());
//! ```

use std::{fmt, str::FromStr, sync::Arc, time::Duration};

use http::{HeaderName, HeaderValue, Method, StatusCode};

use crate::{
    fingerprint::JsonPointer,
    key::{KeyFormat, KeySource},
    refusal::RefusalReason,
    scope::ScopePart,
    webhook::WebhookVerifier,
};

pub use self::checked::{CheckedPolicy, InvalidPolicy};

mod checked;
mod parse;
pub mod presets;
#[cfg(test)]
mod tests;

/// The longest duration of a dial, a hundred years: stores compute with them in microseconds.
pub(crate) const MAX_DURATION: Duration = Duration::from_secs(100 * 366 * 24 * 3600);

/// Everything that can be set about one route. Dials mean what the guide's table says; [`Policy::ietf`] has the
/// defaults.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Policy {
    /// Other methods pass through.
    pub methods: Vec<Method>,
    /// Where a key comes from and what a valid one is.
    pub key: KeyPolicy,
    /// Who and where a key is valid.
    pub scope: Vec<ScopePart>,
    /// Who must have signed a request. `None`: nobody.
    pub signature: Option<WebhookVerifier>,
    /// What operators see.
    pub label: LabelPolicy,
    /// What makes two requests the same.
    pub fingerprint: Vec<FingerprintPart>,
    /// Left out of the fingerprint of JSON bodies.
    pub json_ignore: Vec<JsonPointer>,
    /// The key was used with another fingerprint.
    pub on_mismatch: OnMismatch,
    /// The key is running.
    pub on_concurrent: OnConcurrent,
    /// It started, and nobody knows how it ended.
    pub on_unknown: OnUnknown,
    /// How to ask the app about an unknown outcome.
    pub resolve: Option<ResolveProbe>,
    /// The store cannot decide.
    pub on_store_down: OnStoreDown,
    /// Which answers are remembered.
    pub remember: Remember,
    /// How refusals are written.
    pub refusals: RefusalFormat,
    /// Answers that leave the outcome open. Wins over `remember`.
    pub unknown_status: Vec<StatusCode>,
    /// Whether the body is remembered, or the status only.
    pub remember_body: bool,
    /// A larger request is refused.
    pub max_request: u64,
    /// A larger answer is remembered as a digest.
    pub max_response: u64,
    /// The status of a replay whose body was too large to keep; the original one if `None`.
    pub digest_status: Option<StatusCode>,
    /// How long a finished record answers.
    pub ttl: Duration,
    /// How long a claim may stay silent.
    pub lease: Duration,
    /// How long the operation may take.
    pub timeout: Duration,
    /// How long a duplicate waits.
    pub wait_timeout: Duration,
    /// How long an answer still counts after `timeout`, when the client has been refused already; one lease if `None`.
    pub late_answer: Option<Duration>,
    /// Set on first answers.
    pub first_headers: Vec<(HeaderName, HeaderTemplate)>,
    /// Set on replays.
    pub replay_headers: Vec<(HeaderName, HeaderTemplate)>,
    /// Never stored, besides Set-Cookie and hop-by-hop headers.
    pub drop_headers: Vec<HeaderName>,
    /// Codes of refusals, where they differ from the table.
    pub status: Vec<(RefusalReason, StatusCode)>,
    /// gRPC codes of refusals, where they differ from the table.
    pub grpc_status: Vec<(RefusalReason, u8)>,
    /// What is spliced into answers.
    pub envelope: ResponseEnvelope,
    /// Whether the policy is enforced.
    pub mode: PolicyMode,
}

/// Where a key comes from and what a valid one is.
#[derive(Debug, Clone, PartialEq)]
pub struct KeyPolicy {
    /// The first source present wins.
    pub from: Vec<KeySource>,
    /// Without a key: refused, or passed through.
    pub required: bool,
    /// What a valid key is.
    pub format: KeyFormat,
    /// After unquoting (of a raw key: as it is), 1 to 255.
    pub max_length: usize,
}

/// What operators see of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LabelPolicy {
    /// From the scope's first part if `None`.
    pub tenant: Option<ScopePart>,
    /// From the scope's second part if `None`.
    pub user: Option<ScopePart>,
    /// Whether the key is kept readable.
    pub key: LabelKeyDisplay,
}

/// How a key is kept for operators.
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
    /// The method, and the headers by which some frameworks replace it.
    Method,
    /// The path, as sent but for one trailing slash.
    Path,
    /// The query, as sent.
    Query,
    /// The media type, without boundary and without `charset=utf-8`, and Content-Encoding.
    Type,
    /// The canonical body.
    Body,
    /// The body as sent, instead of the canonical one.
    Raw,
    /// A header.
    Header(HeaderName),
    /// If-Match, If-None-Match, If-Unmodified-Since, Content-Range.
    Preconditions,
}

/// What a reuse with another fingerprint gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnMismatch {
    /// Refused.
    Reject,
    /// Its own entry: the fingerprint is part of the address.
    New,
    /// The first answer.
    Ignore,
}

/// What a duplicate of a running request gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnConcurrent {
    /// Refused.
    Reject,
    /// The answer, once it is there.
    Wait,
}

/// What a retry of an unknown outcome gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnUnknown {
    /// Refused, until somebody resolves it.
    Hold,
    /// Another run.
    Retry,
}

/// What a request gets that the store cannot decide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnStoreDown {
    /// Refused.
    Closed,
    /// Run unprotected, and told so.
    Open,
}

/// Which answers are remembered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Remember {
    /// Every one.
    All,
    /// 2xx, 3xx, and 4xx except 401, 403, 408, 409, 425, 429.
    Final,
    /// 2xx and 3xx.
    Success,
    /// These, without those that are excluded. If only exclusions are listed, all but those.
    List {
        /// What is remembered.
        include: Vec<StatusRange>,
        /// What is not, whatever `include` says.
        exclude: Vec<StatusRange>,
    },
}

/// `2xx` or `404`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatusRange {
    /// By the first digit.
    Class(u8),
    /// One.
    Code(StatusCode),
}

/// How refusals are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RefusalFormat {
    /// RFC 9457: `application/problem+json`.
    #[default]
    Problem,
    /// As Stripe's SDKs parse errors: `{"error":{…}}`, and `Stripe-Should-Retry`.
    Stripe,
}

/// What is spliced into JSON answers.
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
    /// It is.
    Enforce,
    /// It claims and records, but never refuses, waits, replays or fails.
    Shadow,
    /// It passes everything through.
    Off,
}

/// How to ask the app about an unknown outcome: `GET /payments?key={key}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolveProbe {
    method: Method,
    target: Arc<str>,
}

/// A header's value with `{request_id}` and `{original_time}` in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeaderTemplate(Arc<str>);

impl Policy {
    /// Which dials contradict each other. `Ok` if none.
    ///
    /// # Errors
    /// One sentence that names the dial, what was found and what is allowed.
    pub fn check(&self) -> Result<(), String> {
        let positive = [("ttl", self.ttl), ("lease", self.lease), ("timeout", self.timeout)];
        for (dial, duration) in positive {
            if duration.is_zero() {
                return Err(format!("{dial} is zero; it must be longer, such as \"30s\""));
            }
        }
        let longest = [("ttl", self.ttl), ("lease", self.lease), ("timeout", self.timeout)];
        let may_be_zero = [("wait_timeout", self.wait_timeout), ("late_answer", self.late_answer_or_lease())];
        for (dial, duration) in longest.into_iter().chain(may_be_zero) {
            if duration > MAX_DURATION {
                return Err(format!("{dial} is {duration:?}; it must be at most a hundred years, \"36600d\""));
            }
        }
        if self.lease < Duration::from_millis(100) {
            return Err(format!(
                "lease is {:?}; it must be at least \"100ms\", or the heartbeat cannot keep up",
                self.lease
            ));
        }
        if self.methods.is_empty() {
            return Err("methods is empty; name at least one, or use mode = \"off\"".into());
        }
        if self.key.from.is_empty() {
            return Err("key.from is empty; name at least one source, such as \"header:Idempotency-Key\"".into());
        }
        if !(1..=255).contains(&self.key.max_length) {
            return Err(format!("key.max_length is {}; allowed is 1 to 255", self.key.max_length));
        }
        if self.scope.is_empty() {
            return Err("scope is empty; say [\"global\"] if keys are shared by all callers".into());
        }
        if self.scope.contains(&ScopePart::Global) && self.scope.len() > 1 {
            return Err("scope has \"global\" beside other parts; use it alone".into());
        }
        let body_is_key = self.key.from.contains(&KeySource::Body);
        if self.fingerprint.is_empty() && self.on_mismatch != OnMismatch::Ignore {
            return Err(
                "fingerprint is empty, so nothing can mismatch; set on_mismatch = \"ignore\" or add parts".into()
            );
        }
        let [has_body, has_raw] =
            [FingerprintPart::Body, FingerprintPart::Raw].map(|part| self.fingerprint.contains(&part));
        if body_is_key && !has_body && !has_raw {
            return Err("key.from has \"body\", which takes the fingerprint as key; add \"body\" to fingerprint".into());
        }
        if has_body && has_raw {
            return Err("fingerprint has \"body\" and \"raw\"; name the one or the other".into());
        }
        self.signature.as_ref().map_or(Ok(()), |signature| self.check_signature(signature))
    }

    fn check_signature(&self, signature: &WebhookVerifier) -> Result<(), String> {
        if !self.key.required {
            let what = "key.required is false; where deliveries are signed it must be true, because what has no key passes \
                        unchecked";
            return Err(what.into());
        }
        signature.check()
    }

    /// How long an answer still counts after `timeout`.
    pub fn late_answer_or_lease(&self) -> Duration {
        self.late_answer.unwrap_or(self.lease)
    }

    /// Whether this method is covered at all.
    pub fn covers(&self, method: &Method) -> bool {
        self.mode != PolicyMode::Off && self.lists_method(method)
    }

    /// Whether a method is one of the policy's. Compared without regard to case: some apps run `post` as `POST`.
    pub fn lists_method(&self, method: &Method) -> bool {
        self.methods.iter().any(|named| named.as_str().eq_ignore_ascii_case(method.as_str()))
    }

    /// The claims of the caller's token that are asked for, in the scope or for operators. Where there are any, a token
    /// is needed.
    pub fn claims(&self) -> impl Iterator<Item = &str> {
        let label = [&self.label.tenant, &self.label.user].into_iter().flatten();
        self.scope.iter().chain(label).filter_map(|part| match part.part() {
            ScopePart::Jwt(claim) => Some(claim.as_str()),
            _ => None,
        })
    }

    /// What says who the user is, where that is said plainly: what is set for operators, else `jwt:sub` or a header such as
    /// X-User-Id in the scope.
    pub(crate) fn user_part(&self) -> Option<&ScopePart> {
        match &self.label.user {
            Some(part) if matches!(part.part(), ScopePart::Jwt(_) | ScopePart::Header(_)) => Some(part),
            _ => self.scope.iter().find(|part| part.names_user()),
        }
    }

    /// Whether a key that names its user is good for that user only.
    pub fn checks_key_owner(&self) -> bool {
        self.key.format == KeyFormat::Operation && self.user_part().is_some()
    }

    /// Headers that say "this is a replay": nobody else may say it, neither a client nor the app.
    pub(crate) fn replay_only_headers(&self) -> impl Iterator<Item = &HeaderName> {
        let also_first = |name: &HeaderName| self.first_headers.iter().any(|(first, _)| first == name);
        self.replay_headers.iter().map(|(name, _)| name).filter(move |name| !also_first(name))
    }

    /// Headers of answers by which a replay is told from a first answer: in requests they are lies. What holds an id is
    /// none of them; clients send such for their own sake.
    pub(crate) fn replay_marker_headers(&self) -> impl Iterator<Item = &HeaderName> {
        let fixed = self.replay_headers.iter().filter(|(_, value)| value.is_fixed()).map(|(name, _)| name);
        fixed.chain(self.replay_only_headers())
    }

    /// The code of a refusal.
    pub fn status_of(&self, reason: RefusalReason) -> StatusCode {
        let set = self.status.iter().find(|(which, _)| *which == reason);
        set.map_or_else(|| reason.status(), |(_, status)| *status)
    }

    /// The gRPC code of a refusal.
    pub fn grpc_status_of(&self, reason: RefusalReason) -> u8 {
        let set = self.grpc_status.iter().find(|(which, _)| *which == reason);
        set.map_or_else(|| reason.grpc_status(), |(_, code)| *code)
    }

    /// Whether two policies give the same request the same address and fingerprint. If not, going from one to the
    /// other forgets everything.
    pub fn has_same_records_as(&self, other: &Self) -> bool {
        self.key.from == other.key.from
            && self.key.format.folds_case() == other.key.format.folds_case()
            && (self.key.format == KeyFormat::Raw) == (other.key.format == KeyFormat::Raw)
            && self.scope == other.scope
            && self.fingerprint == other.fingerprint
            && self.json_ignore == other.json_ignore
            && (self.on_mismatch == OnMismatch::New) == (other.on_mismatch == OnMismatch::New)
    }
}

impl Remember {
    /// Every answer but those with these statuses.
    pub fn all_except(statuses: impl IntoIterator<Item = StatusCode>) -> Self {
        Self::List { include: Vec::new(), exclude: statuses.into_iter().map(StatusRange::Code).collect() }
    }

    /// Whether an answer with this status is remembered.
    ///
    /// A 307 or 308 never is: it asks the client to send the same request, with the same key, to another address.
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
    /// What to send.
    pub fn method(&self) -> &Method {
        &self.method
    }

    /// Where to, with the key in its place, percent-encoded.
    pub fn target(&self, key: &str) -> String {
        let mut encoded = String::with_capacity(key.len());
        for byte in key.bytes() {
            match byte {
                b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => encoded.push(byte.into()),
                _ => encoded.push_str(&format!("%{byte:02X}")),
            }
        }
        self.target.replace("{key}", &encoded)
    }
}

impl HeaderTemplate {
    /// Whether it is the same for every answer.
    pub(crate) fn is_fixed(&self) -> bool {
        !self.0.contains('{')
    }

    /// The value for one answer.
    pub fn fill(&self, request_id: &str, original_time: &str) -> HeaderValue {
        if self.is_fixed() {
            return HeaderValue::from_str(&self.0).expect("checked when it was read");
        }
        let value = self.0.replace("{request_id}", request_id).replace("{original_time}", original_time);
        HeaderValue::from_str(&value).expect("both are visible ASCII")
    }
}

impl FromStr for HeaderTemplate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let plain = text.replace("{request_id}", "").replace("{original_time}", "");
        if HeaderValue::from_str(&plain).is_err() || plain.contains(['{', '}']) {
            return Err(format!("{text:?} is no header value; {{request_id}} and {{original_time}} are filled in"));
        }
        Ok(Self(text.into()))
    }
}

impl fmt::Display for HeaderTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
