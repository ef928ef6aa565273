//! The state of one run: its plan, what it has learned about the operation, and its findings.
//!
//! Invariant: a check passes only on evidence. Evidence that an operation ran once is a counter, responses that differ
//! from run to run, or a replay marker that the server is known to set. Without any of them the check is *not
//! performed*, and its report says what it needs.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Uri, header};
use ibid::{FingerprintPart, KeyFormat, Policy, RefusalReason, ResponseEnvelope, store::Fingerprint};
use serde_json::Value;

use super::{
    connection::{RawResponse, TestedServer},
    profile::{CheckLevel, CheckRule, ConformProfile},
    request::{RawExchange, RawRequest},
};

/// Pause before a request that the server told to retry later is sent again.
const RETRY_PAUSE: Duration = Duration::from_millis(200);

pub(super) struct ConformPlan {
    pub(super) profile: ConformProfile,
    pub(super) server: TestedServer,
    pub(super) method: String,
    /// Path and query.
    pub(super) target: String,
    pub(super) other_target: Option<String>,
    pub(super) other_method: Option<String>,
    pub(super) headers: Vec<(String, String)>,
    pub(super) other_headers: Vec<(String, String)>,
    pub(super) body: String,
    pub(super) other_body: Option<String>,
    pub(super) slow: Option<RequestVariant>,
    pub(super) error: Option<RequestVariant>,
    pub(super) key_required: Option<bool>,
    pub(super) parallel: usize,
    pub(super) rounds: usize,
    pub(super) patience: Duration,
    pub(super) grace: Duration,
    pub(super) until: Instant,
    pub(super) counter: Option<ExecutionCounter>,
}

/// Changes that make the operation slow or make it fail.
pub(super) struct RequestVariant {
    pub(super) body: Option<String>,
    pub(super) headers: Vec<(String, String)>,
}

/// Where to read the number of executions.
pub(super) struct ExecutionCounter {
    pub(super) server: TestedServer,
    pub(super) target: String,
    pub(super) pointer: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CheckVerdict {
    Passed,
    Failed,
    /// Failed, but the check is only advice.
    Advice,
    NotPerformed,
}

/// The result of a check. If it was not performed, `expected` contains the reason.
#[derive(Debug, Clone)]
pub(super) struct CheckFinding {
    pub(super) rule: CheckRule,
    pub(super) verdict: CheckVerdict,
    pub(super) sent: String,
    pub(super) received: String,
    pub(super) expected: String,
}

/// Whether two responses come from the same run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RunComparison {
    SameRun,
    AnotherRun,
    Undetermined,
}

pub(super) struct ConformSession {
    pub(super) plan: ConformPlan,
    rules: Vec<CheckRule>,
    findings: BTreeMap<&'static str, CheckFinding>,
    /// Whether different runs have different bodies.
    pub(super) has_varying_bodies: bool,
    /// Whether the server has marked a replay as the profile requires.
    pub(super) has_marked_replay: bool,
    /// Whether the server also marks first responses.
    pub(super) marks_first_answers: bool,
    /// Refusals to check: the check that received each, and whether a key was refused.
    pub(super) refusals: Vec<(&'static str, bool, RawExchange)>,
    pub(super) requests: usize,
    nonce: u64,
}

impl ConformSession {
    pub(super) fn new(plan: ConformPlan) -> Self {
        let rules = plan.profile.rules();
        Self {
            plan,
            rules,
            findings: BTreeMap::new(),
            has_varying_bodies: false,
            has_marked_replay: false,
            marks_first_answers: false,
            refusals: Vec::new(),
            requests: 0,
            nonce: 0,
        }
    }

    /// Returns the findings of all checks, in order. Checks without a report were not performed.
    pub(super) fn into_findings(mut self) -> Vec<CheckFinding> {
        let missing = |rule: CheckRule| CheckFinding {
            rule,
            verdict: CheckVerdict::NotPerformed,
            sent: String::new(),
            received: String::new(),
            expected: "the time for the whole run was over; see --limit".into(),
        };
        self.rules.into_iter().map(|rule| self.findings.remove(rule.id).unwrap_or_else(|| missing(rule))).collect()
    }

    /// Whether a check has not been made yet.
    pub(super) fn is_pending(&self, id: &str) -> bool {
        self.rules.iter().any(|rule| rule.id == id) && !self.findings.contains_key(id) && !self.is_past_deadline()
    }

    pub(super) fn is_past_deadline(&self) -> bool {
        Instant::now() >= self.plan.until
    }

    /// Reports the result of a check.
    pub(super) fn report_exchange(&mut self, id: &str, fine: bool, expected: impl Into<String>, seen: &RawExchange) {
        self.report(id, fine, expected, seen.request.clone(), seen.describe_response());
    }

    pub(super) fn report(&mut self, id: &str, fine: bool, expected: impl Into<String>, sent: String, came: String) {
        let Some(rule) = self.rules.iter().find(|rule| rule.id == id) else { return };
        let verdict = match (fine, rule.level) {
            (true, _) => CheckVerdict::Passed,
            (false, CheckLevel::Required) => CheckVerdict::Failed,
            (false, CheckLevel::Advised) => CheckVerdict::Advice,
        };
        let finding = CheckFinding { rule: rule.clone(), verdict, sent, received: came, expected: expected.into() };
        self.findings.insert(rule.id, finding);
    }

    /// Like [`report_exchange`](Self::report_exchange), unless the check is already reported.
    pub(super) fn report_unless_reported(
        &mut self, id: &str, fine: bool, expected: impl Into<String>, seen: &RawExchange,
    ) {
        if self.is_pending(id) {
            self.report_exchange(id, fine, expected, seen);
        }
    }

    /// Reports that a check could not be made.
    pub(super) fn report_not_performed(&mut self, id: &str, why: impl Into<String>) {
        if !self.is_pending(id) {
            return;
        }
        self.report(id, true, why, String::new(), String::new());
        if let Some(finding) = self.findings.get_mut(id) {
            finding.verdict = CheckVerdict::NotPerformed;
        }
    }

    /// Reports that all remaining checks could not be made.
    pub(super) fn report_rest_not_performed(&mut self, why: &str) {
        let rest: Vec<_> = self.rules.iter().map(|rule| rule.id).collect();
        rest.into_iter().for_each(|id| self.report_not_performed(id, why));
    }

    /// Returns an unused key.
    pub(super) fn new_key(&self) -> String {
        let key = ibid::generate_key();
        match self.plan.profile.policy.key.format {
            KeyFormat::Operation => format!("conform:check.run:{key}:1"),
            _ => key,
        }
    }

    /// Creates a new operation under a new key.
    pub(super) fn new_operation(&mut self) -> RawRequest {
        let key = self.new_key();
        self.operation_with_key(key.as_bytes())
    }

    /// Creates a new operation under this key.
    pub(super) fn operation_with_key(&mut self, key: &[u8]) -> RawRequest {
        let name = self.plan.profile.key_header();
        RawRequest { keys: vec![(name, key.to_vec())], ..self.operation_without_key() }
    }

    /// Creates a new operation without a key.
    pub(super) fn operation_without_key(&mut self) -> RawRequest {
        self.nonce += 1;
        let body = self.fill_nonce(&self.plan.body);
        let mut headers = self.plan.headers.clone();
        if let Some(name) = self.plan.profile.scope_header()
            && !headers.iter().any(|(found, _)| found.eq_ignore_ascii_case(name))
        {
            headers.push((name.to_owned(), "conform-a".into()));
        }
        RawRequest {
            method: self.plan.method.clone(),
            target: self.plan.target.clone(),
            keys: Vec::new(),
            headers,
            connection: "close".into(),
            body,
        }
    }

    /// Makes an operation slow or makes it fail.
    pub(super) fn apply_variant(&self, request: RawRequest, variant: &RequestVariant) -> RawRequest {
        let body = variant.body.as_ref().map_or_else(|| request.body.clone(), |body| self.fill_nonce(body));
        RawRequest { body, ..request }.with_headers(&variant.headers)
    }

    /// The body of the current operation. `{nonce}` is unique to the operation and stays the same in retries.
    pub(super) fn fill_nonce(&self, body: &str) -> Option<Bytes> {
        (!body.is_empty()).then(|| body.replace("{nonce}", &self.nonce.to_string()).into())
    }

    pub(super) async fn send(&mut self, request: &RawRequest) -> RawExchange {
        self.requests += 1;
        let bytes = request.to_bytes(&self.plan.server.authority);
        RawExchange { request: request.redacted(), response: self.plan.server.exchange(&bytes).await }
    }

    /// Repeats a request until the server no longer tells it to retry later, or until the timeout.
    pub(super) async fn send_until_settled(&mut self, request: &RawRequest) -> RawExchange {
        let since = Instant::now();
        loop {
            let seen = self.send(request).await;
            let busy = seen.status() == Some(self.in_progress_status());
            if !busy || since.elapsed() > self.plan.patience || self.is_past_deadline() {
                return seen;
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }

    /// Returns the number of executions, if there is a counter.
    pub(super) async fn execution_count(&mut self) -> Result<Option<u64>, String> {
        let Some(counter) = &self.plan.counter else { return Ok(None) };
        self.requests += 1;
        let (target, host) = (&counter.target, &counter.server.authority);
        let request =
            format!("GET {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\naccept: application/json\r\n\r\n");
        let cannot = |why: &str| format!("--count-url, {host}{target}: {why}");
        let answer = counter.server.exchange(request.as_bytes()).await.map_err(|why| cannot(&why.to_string()))?;
        if !answer.is_success() {
            return Err(cannot(&format!("it answers {}", answer.status)));
        }
        let json: Value = serde_json::from_slice(&answer.body).map_err(|why| cannot(&format!("no JSON: {why}")))?;
        let value = json.pointer(&counter.pointer);
        let count = value.and_then(|value| value.as_u64().or_else(|| value.as_array().map(|list| list.len() as u64)));
        count
            .map(Some)
            .ok_or_else(|| cannot(&format!("there is no number at {:?} (see --count-pointer)", counter.pointer)))
    }

    /// Whether `second` comes from the same run as `first`. `ran` is the number of runs in between.
    pub(super) fn compare_runs(&self, first: &RawResponse, second: &RawResponse, ran: Option<u64>) -> RunComparison {
        match ran {
            Some(0) => return RunComparison::SameRun,
            Some(_) => return RunComparison::AnotherRun,
            None => {}
        }
        if self.has_varying_bodies {
            let same = self.comparable_body(first) == self.comparable_body(second);
            return if same { RunComparison::SameRun } else { RunComparison::AnotherRun };
        }
        if self.has_marked_replay {
            return if self.is_marked_as_replay(second) { RunComparison::SameRun } else { RunComparison::AnotherRun };
        }
        RunComparison::Undetermined
    }

    /// Whether there is evidence to distinguish runs.
    pub(super) fn has_evidence(&self) -> bool {
        self.plan.counter.is_some() || self.has_varying_bodies || self.has_marked_replay
    }

    /// The part of a body that is equal in all responses of one run. The draft and Stripe require the same result,
    /// which includes JSON in another layout. ibid's own presets promise the same bytes.
    pub(super) fn comparable_body(&self, answer: &RawResponse) -> Vec<u8> {
        if self.plan.profile.policy.envelope == ResponseEnvelope::Metadata
            && let Ok(Value::Object(mut object)) = serde_json::from_slice(&answer.body)
        {
            object.remove("metadata");
            return Value::Object(object).to_string().into_bytes();
        }
        if self.plan.profile.is_third_party() {
            let mut policy = Policy::ietf();
            policy.fingerprint = vec![FingerprintPart::Body];
            // Bodies that are not JSON are compared as bytes. The media type has its own check.
            let json = HeaderValue::from_static("application/json");
            let headers = HeaderMap::from_iter([(header::CONTENT_TYPE, json)]);
            let value = Fingerprint::of(&policy, &Method::POST, &Uri::from_static("/"), &headers, &answer.body);
            return value.digest.to_vec();
        }
        answer.body.to_vec()
    }

    /// Whether a response is marked as a replay, as the profile requires.
    pub(super) fn is_marked_as_replay(&self, answer: &RawResponse) -> bool {
        let headers = &self.plan.profile.policy.replay_headers;
        let says = |(name, value): &(http::HeaderName, ibid::HeaderTemplate)| match value.to_string() {
            filled if filled.contains('{') => answer.header(name.as_str()).is_some(),
            fixed => answer.header(name.as_str()) == Some(&fixed),
        };
        !headers.is_empty() && headers.iter().all(says)
    }

    pub(super) fn status_of(&self, reason: RefusalReason) -> u16 {
        self.plan.profile.policy.status_of(reason).as_u16()
    }

    pub(super) fn in_progress_status(&self) -> u16 {
        self.status_of(RefusalReason::InProgress)
    }

    /// Describes the profile's markers.
    pub(super) fn markers(&self) -> String {
        let headers = &self.plan.profile.policy.replay_headers;
        let shown: Vec<_> = headers.iter().map(|(name, value)| format!("{name}: {value}")).collect();
        shown.join(", ")
    }
}
