//! The state of one run: its arguments, what it has learned about the operation, and its findings.
//!
//! Invariant: a check passes only on evidence. Evidence that an operation ran once is a counter, responses that differ
//! from run to run, or a replay marker that the server is known to set. Without any of them the check is *not
//! performed*, and its report says what it needs.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, Uri, header};
use ibid::{
    Policy, RefusalReason,
    key::KeyFormat,
    policy::{FingerprintPart, HeaderTemplate, ResponseEnvelope},
    store::Fingerprint,
};
use rustls::ClientConfig;
use serde_json::Value;

use super::{
    ConformArgs, DEFAULT_BODY,
    connection::TestedServer,
    connection::{RawExchange, RawRequest, header_of},
    one_more, parse_url,
    profile::{CheckLevel, CheckRule},
    text_of,
};
use crate::CommandError;

/// Pause before a request that the server told to retry later is sent again.
pub(super) const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// An exchange, and how often the operation ran meanwhile, if there is a counter.
type CountedExchange = Result<(RawExchange, Option<u64>), CommandError>;

/// Changes that make the operation slow or make it fail.
#[derive(Clone)]
pub(super) struct RequestVariant<'a> {
    body: Option<String>,
    headers: &'a [(String, String)],
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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RunComparison {
    SameRun,
    AnotherRun,
    Undetermined,
}

pub(super) struct ConformSession<'a> {
    pub(super) args: &'a ConformArgs,
    pub(super) policy: &'a Policy,
    pub(super) server: TestedServer,
    /// Path and query.
    pub(super) target: String,
    pub(super) other_target: Option<String>,
    body: String,
    pub(super) other_body: Option<String>,
    pub(super) slow: Option<RequestVariant<'a>>,
    pub(super) error: Option<RequestVariant<'a>>,
    /// The server and the path that return the number of executions.
    pub(super) counter: Option<(TestedServer, String)>,
    deadline: Instant,
    rules: Vec<CheckRule>,
    findings: BTreeMap<&'static str, CheckFinding>,
    pub(super) has_varying_bodies: bool,
    /// Whether the server has marked a replay as the profile requires.
    pub(super) has_marked_replay: bool,
    pub(super) marks_first_answers: bool,
    /// Refusals to check: the check that received each, and whether a key was refused.
    pub(super) refusals: Vec<(&'static str, bool, RawExchange)>,
    pub(super) requests: usize,
    nonce: u64,
}

impl ConformArgs {
    pub(super) fn fails_run(&self, verdict: CheckVerdict) -> bool {
        match verdict {
            CheckVerdict::Passed => false,
            CheckVerdict::Failed => true,
            CheckVerdict::Advice => self.strict,
            CheckVerdict::NotPerformed => self.complete,
        }
    }
}

impl<'a> ConformSession<'a> {
    /// Reads the arguments, and connects to the server: a wrong URL is the usual mistake.
    pub(super) async fn start(args: &'a ConformArgs, tls: &Arc<ClientConfig>) -> Result<Self, CommandError> {
        let usage = CommandError::Usage;
        let find = async |uri: &Uri| TestedServer::find(uri, tls, args.timeout).await;
        let target = |uri: &Uri| uri.path_and_query().map_or("/", |found| found.as_str()).to_owned();
        let url = args.url.as_deref().expect("clap asks for it");
        let uri = parse_url(url).map_err(usage)?;
        let server = find(&uri).await?;
        server.connect().await?;
        let other = args.other_url.as_deref().map(parse_url).transpose().map_err(usage)?;
        if other.as_ref().is_some_and(|other| other.authority() != uri.authority() || other.scheme() != uri.scheme()) {
            return Err(usage(format!("--other-url must be on the same server as {url}")));
        }
        let counter = match args.count_url.as_deref().map(parse_url).transpose().map_err(usage)? {
            None => None,
            Some(uri) => Some((find(&uri).await?, target(&uri))),
        };
        let body = args.body.as_deref().map_or(Ok(DEFAULT_BODY.to_owned()), text_of)?;
        let other_body = args.other_body.as_deref().map(text_of).transpose()?.or_else(|| one_more(&body));
        Ok(Self {
            args,
            policy: &args.profile.policy,
            server,
            target: target(&uri),
            other_target: other.as_ref().map(target),
            body,
            other_body,
            slow: RequestVariant::new(args.slow_body.as_deref(), &args.slow_header)?,
            error: RequestVariant::new(args.error_body.as_deref(), &args.error_header)?,
            counter,
            deadline: Instant::now() + args.limit,
            rules: args.profile.rules(),
            findings: BTreeMap::new(),
            has_varying_bodies: false,
            has_marked_replay: false,
            marks_first_answers: false,
            refusals: Vec::new(),
            requests: 0,
            nonce: 0,
        })
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

    pub(super) fn is_pending(&self, id: &str) -> bool {
        self.rules.iter().any(|rule| rule.id == id) && !self.findings.contains_key(id) && !self.is_past_deadline()
    }

    pub(super) fn is_past_deadline(&self) -> bool {
        Instant::now() >= self.deadline
    }

    pub(super) fn report(&mut self, id: &str, fine: bool, expected: impl Into<String>, seen: &RawExchange) {
        self.report_text(id, fine, expected, seen.request.clone(), seen.describe_response());
    }

    pub(super) fn report_text(
        &mut self, id: &str, fine: bool, expected: impl Into<String>, sent: String, came: String,
    ) {
        let Some(rule) = self.rules.iter().find(|rule| rule.id == id) else { return };
        let verdict = match (fine, rule.level) {
            (true, _) => CheckVerdict::Passed,
            (false, CheckLevel::Required) => CheckVerdict::Failed,
            (false, CheckLevel::Advised) => CheckVerdict::Advice,
        };
        let finding = CheckFinding { rule: rule.clone(), verdict, sent, received: came, expected: expected.into() };
        self.findings.insert(rule.id, finding);
    }

    /// Like [`report`](Self::report), unless the check is already reported.
    pub(super) fn report_once(&mut self, id: &str, fine: bool, expected: impl Into<String>, seen: &RawExchange) {
        if self.is_pending(id) {
            self.report(id, fine, expected, seen);
        }
    }

    /// Reports that a check could not be made, unless it is already reported.
    pub(super) fn skip(&mut self, id: &str, why: impl Into<String>) {
        if !self.is_pending(id) {
            return;
        }
        self.report_text(id, true, why, String::new(), String::new());
        if let Some(finding) = self.findings.get_mut(id) {
            finding.verdict = CheckVerdict::NotPerformed;
        }
    }

    pub(super) fn skip_rest(&mut self, why: &str) {
        let rest: Vec<_> = self.rules.iter().map(|rule| rule.id).collect();
        rest.into_iter().for_each(|id| self.skip(id, why));
    }

    pub(super) fn new_key(&self) -> String {
        let key = ibid::generate_key();
        match self.policy.key.format {
            KeyFormat::Operation => format!("conform:check.run:{key}:1"),
            KeyFormat::Uuid7 => {
                let since = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
                let time = format!("{:012x}", since.as_millis());
                format!("{}-{}-7{}", &time[..8], &time[8..12], &key[15..])
            }
            _ => key,
        }
    }

    pub(super) fn new_operation(&mut self) -> RawRequest {
        let key = self.new_key();
        self.operation_with_key(key.as_bytes())
    }

    pub(super) fn operation_with_key(&mut self, key: &[u8]) -> RawRequest {
        let name = self.args.profile.key_header();
        RawRequest { keys: vec![(name, key.to_vec())], ..self.operation_without_key() }
    }

    pub(super) fn operation_without_key(&mut self) -> RawRequest {
        self.nonce += 1;
        let request = RawRequest {
            method: self.args.method.clone(),
            target: self.target.clone(),
            keys: Vec::new(),
            headers: self.args.header.clone(),
            connection: "close".into(),
            body: self.fill_nonce(&self.body),
        };
        match self.args.profile.scope_header() {
            Some(name) if !request.has_header(name) => request.with_headers(&[(name.to_owned(), "conform-a".into())]),
            _ => request,
        }
    }

    pub(super) fn new_variant(&mut self, variant: Option<RequestVariant<'_>>) -> RawRequest {
        let request = self.new_operation();
        let Some(RequestVariant { body, headers }) = variant else { return request };
        let body = body.map_or_else(|| request.body.clone(), |body| self.fill_nonce(&body));
        RawRequest { body, ..request }.with_headers(headers)
    }

    /// The body of operations, changed as JSON. `None` if it is no JSON, or would not stay the same value.
    pub(super) fn change_body(&self, change: impl FnOnce(Value) -> Option<String>) -> Option<String> {
        // A number, so that it may stand inside and outside of strings.
        const STAND_IN: &str = "987654321987";
        let body = serde_json::from_str(&self.body.replace("{nonce}", STAND_IN)).ok()?;
        if has_fraction(&body) {
            return None;
        }
        Some(change(body)?.replace(STAND_IN, "{nonce}"))
    }

    /// The body of the current operation. `{nonce}` is unique to the operation and stays the same in retries.
    pub(super) fn fill_nonce(&self, body: &str) -> Option<Bytes> {
        (!body.is_empty()).then(|| body.replace("{nonce}", &self.nonce.to_string()).into())
    }

    pub(super) async fn send(&mut self, request: &RawRequest) -> RawExchange {
        self.requests += 1;
        let bytes = request.to_bytes(&self.server.authority);
        RawExchange { request: request.redacted(), response: self.server.exchange(&bytes).await }
    }

    pub(super) async fn send_and_count(&mut self, request: &RawRequest) -> CountedExchange {
        let before = self.execution_count().await?;
        let seen = self.send(request).await;
        Ok((seen, self.ran_since(before).await?))
    }

    /// Like [`send_and_count`](Self::send_and_count), with [`retry`](Self::retry).
    pub(super) async fn retry_and_count(&mut self, request: &RawRequest) -> CountedExchange {
        let before = self.execution_count().await?;
        let seen = self.retry(request).await;
        Ok((seen, self.ran_since(before).await?))
    }

    /// Repeats a request until the server no longer tells it to retry later, or until the timeout.
    pub(super) async fn retry(&mut self, request: &RawRequest) -> RawExchange {
        let since = Instant::now();
        loop {
            let seen = self.send(request).await;
            if !self.is_busy(&seen) || since.elapsed() > self.args.timeout || self.is_past_deadline() {
                return seen;
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }

    /// Whether the server tells to retry later. Where a reused key has the same status, that is what `Retry-After` says.
    fn is_busy(&self, seen: &RawExchange) -> bool {
        let status = self.status_of(RefusalReason::InProgress);
        let after = seen.response.as_ref().ok().and_then(|answer| header_of(answer, "retry-after"));
        seen.status() == Some(status) && (status != self.status_of(RefusalReason::KeyReused) || after.is_some())
    }

    /// Returns how often the operation ran since `before`, if there is a counter.
    pub(super) async fn ran_since(&mut self, before: Option<u64>) -> Result<Option<u64>, CommandError> {
        let after = self.execution_count().await?;
        Ok(before.zip(after).map(|(before, after)| after.saturating_sub(before)))
    }

    pub(super) async fn execution_count(&mut self) -> Result<Option<u64>, CommandError> {
        let Some((server, target)) = &self.counter else { return Ok(None) };
        self.requests += 1;
        let (host, pointer) = (&server.authority, &self.args.count_pointer);
        let request =
            format!("GET {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\naccept: application/json\r\n\r\n");
        let cannot = |why: &str| CommandError::Usage(format!("--count-url, {host}{target}: {why}"));
        let answer = server.exchange(request.as_bytes()).await.map_err(|why| cannot(&why.to_string()))?;
        if !answer.status().is_success() {
            return Err(cannot(&format!("it answers {}", answer.status().as_u16())));
        }
        let json: Value = serde_json::from_slice(answer.body()).map_err(|why| cannot(&format!("no JSON: {why}")))?;
        let count = match json.pointer(pointer) {
            Some(Value::Array(list)) => Some(list.len() as u64),
            value => value.and_then(Value::as_u64),
        };
        count.map(Some).ok_or_else(|| cannot(&format!("there is no number at {pointer:?} (see --count-pointer)")))
    }

    /// Whether `second` comes from the same run as `first`. `ran` is the number of runs in between.
    pub(super) fn compare_runs(
        &self, first: &Response<Bytes>, second: &Response<Bytes>, ran: Option<u64>,
    ) -> RunComparison {
        let same = match ran {
            Some(ran) => ran == 0,
            None if self.has_varying_bodies => self.comparable_body(first) == self.comparable_body(second),
            None if self.has_marked_replay => self.is_marked_as_replay(second),
            None => return RunComparison::Undetermined,
        };
        if same { RunComparison::SameRun } else { RunComparison::AnotherRun }
    }

    pub(super) fn has_evidence(&self) -> bool {
        self.counter.is_some() || self.has_varying_bodies || self.has_marked_replay
    }

    /// The part of a body that is equal in all responses of one run. The draft and Stripe require the same result,
    /// which includes JSON in another layout. ibid's own presets promise the same bytes.
    pub(super) fn comparable_body(&self, answer: &Response<Bytes>) -> Vec<u8> {
        if self.policy.envelope == ResponseEnvelope::Metadata
            && let Ok(Value::Object(mut object)) = serde_json::from_slice(answer.body())
        {
            object.remove("metadata");
            return Value::Object(object).to_string().into_bytes();
        }
        if self.args.profile.is_third_party() {
            let mut policy = Policy::ietf();
            policy.fingerprint = vec![FingerprintPart::Body];
            // Bodies that are not JSON are compared as bytes. The media type has its own check.
            let json = HeaderValue::from_static("application/json");
            let headers = HeaderMap::from_iter([(header::CONTENT_TYPE, json)]);
            let value = Fingerprint::of(&policy, &Method::POST, &Uri::from_static("/"), &headers, answer.body());
            return value.digest.to_vec();
        }
        answer.body().to_vec()
    }

    pub(super) fn is_marked_as_replay(&self, answer: &Response<Bytes>) -> bool {
        let headers = &self.policy.replay_headers;
        let says = |(name, value): &(HeaderName, HeaderTemplate)| match value.to_string() {
            filled if filled.contains('{') => answer.headers().contains_key(name),
            fixed => header_of(answer, name.as_str()) == Some(&fixed),
        };
        !headers.is_empty() && headers.iter().all(says)
    }

    pub(super) fn status_of(&self, reason: RefusalReason) -> u16 {
        self.policy.status_of(reason).as_u16()
    }

    pub(super) fn markers(&self) -> String {
        let shown = self.policy.replay_headers.iter().map(|(name, value)| format!("{name}: {value}"));
        shown.collect::<Vec<_>>().join(", ")
    }
}

/// Whether a value has a number that may be rounded.
fn has_fraction(value: &Value) -> bool {
    match value {
        Value::Number(number) => number.is_f64(),
        Value::Array(items) => items.iter().any(has_fraction),
        Value::Object(members) => members.values().any(has_fraction),
        _ => false,
    }
}

impl<'a> RequestVariant<'a> {
    fn new(body: Option<&str>, headers: &'a [(String, String)]) -> Result<Option<Self>, CommandError> {
        if body.is_none() && headers.is_empty() {
            return Ok(None);
        }
        Ok(Some(Self { body: body.map(text_of).transpose()?, headers }))
    }
}
