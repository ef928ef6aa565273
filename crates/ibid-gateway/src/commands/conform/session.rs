//! What one run knows: whom it asks, what it has learned about the operation, and what it has found.
//!
//! Invariant: a check passes only on evidence. That an operation ran once is shown by a counter, by answers that differ
//! from run to run, or by a marker that the server has been seen to set; where there is none of them, the check is *not
//! performed*, and says what it would take.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Uri, header};
use ibid::{Envelope, KeyFormat, Part, Policy, Reason, store::Fingerprint};
use serde_json::Value;

use super::{
    profile::{Level, Profile, Rule},
    request::{Request, Seen},
    wire::{Answer, Server},
};

/// Between two tries of a request that is told to come back.
const PAUSE: Duration = Duration::from_millis(200);

/// What is asked, and of whom.
pub(super) struct Plan {
    pub(super) profile: Profile,
    pub(super) server: Server,
    pub(super) method: String,
    /// Path and query.
    pub(super) target: String,
    pub(super) other_target: Option<String>,
    pub(super) other_method: Option<String>,
    pub(super) headers: Vec<(String, String)>,
    pub(super) other_headers: Vec<(String, String)>,
    pub(super) body: String,
    pub(super) other_body: Option<String>,
    pub(super) slow: Option<Variant>,
    pub(super) error: Option<Variant>,
    pub(super) key_required: Option<bool>,
    pub(super) parallel: usize,
    pub(super) rounds: usize,
    pub(super) patience: Duration,
    pub(super) grace: Duration,
    pub(super) until: Instant,
    pub(super) counter: Option<Counter>,
}

/// What makes the operation slow, or fail.
pub(super) struct Variant {
    pub(super) body: Option<String>,
    pub(super) headers: Vec<(String, String)>,
}

/// Where the number of executions is to be read.
pub(super) struct Counter {
    pub(super) server: Server,
    pub(super) target: String,
    pub(super) pointer: String,
}

/// How a check ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Passed,
    Failed,
    /// Failed, and only advice.
    Advice,
    NotPerformed,
}

/// A check and its end. What was not performed says why in `expected`.
#[derive(Debug, Clone)]
pub(super) struct Finding {
    pub(super) rule: Rule,
    pub(super) verdict: Verdict,
    pub(super) sent: String,
    pub(super) came: String,
    pub(super) expected: String,
}

/// Whether two answers come from one run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Runs {
    Same,
    Another,
    /// Nothing tells.
    Untold,
}

pub(super) struct Session {
    pub(super) plan: Plan,
    rules: Vec<Rule>,
    findings: BTreeMap<&'static str, Finding>,
    /// Whether two runs have different bodies.
    pub(super) varies: bool,
    /// Whether the server has marked a replay as the profile says.
    pub(super) marks: bool,
    /// Whether it marks first answers, too.
    pub(super) marks_all: bool,
    /// Refusals to look at: which check saw them, and whether a key was refused.
    pub(super) refusals: Vec<(&'static str, bool, Seen)>,
    pub(super) requests: usize,
    nonce: u64,
}

impl Session {
    pub(super) fn new(plan: Plan) -> Self {
        let rules = plan.profile.rules();
        Self {
            plan,
            rules,
            findings: BTreeMap::new(),
            varies: false,
            marks: false,
            marks_all: false,
            refusals: Vec::new(),
            requests: 0,
            nonce: 0,
        }
    }

    /// Every check of the profile, in order. What nobody reported was not performed.
    pub(super) fn into_findings(mut self) -> Vec<Finding> {
        let missing = |rule: Rule| Finding {
            rule,
            verdict: Verdict::NotPerformed,
            sent: String::new(),
            came: String::new(),
            expected: "the time for the whole run was over; see --limit".into(),
        };
        self.rules.into_iter().map(|rule| self.findings.remove(rule.id).unwrap_or_else(|| missing(rule))).collect()
    }

    /// Whether a check is still to be made.
    pub(super) fn wants(&self, id: &str) -> bool {
        self.rules.iter().any(|rule| rule.id == id) && !self.findings.contains_key(id) && !self.is_over()
    }

    pub(super) fn is_over(&self) -> bool {
        Instant::now() >= self.plan.until
    }

    /// Reports how a check ended.
    pub(super) fn found(&mut self, id: &str, fine: bool, expected: impl Into<String>, seen: &Seen) {
        self.found_in(id, fine, expected, seen.sent.clone(), seen.came());
    }

    pub(super) fn found_in(&mut self, id: &str, fine: bool, expected: impl Into<String>, sent: String, came: String) {
        let Some(rule) = self.rules.iter().find(|rule| rule.id == id) else { return };
        let verdict = match (fine, rule.level) {
            (true, _) => Verdict::Passed,
            (false, Level::Required) => Verdict::Failed,
            (false, Level::Advised) => Verdict::Advice,
        };
        let finding = Finding { rule: rule.clone(), verdict, sent, came, expected: expected.into() };
        self.findings.insert(rule.id, finding);
    }

    /// The same, unless it was said already that the check could not be made.
    pub(super) fn found_unless_reported(&mut self, id: &str, fine: bool, expected: impl Into<String>, seen: &Seen) {
        if self.wants(id) {
            self.found(id, fine, expected, seen);
        }
    }

    /// Reports that a check could not be made.
    pub(super) fn not_performed(&mut self, id: &str, why: impl Into<String>) {
        if !self.wants(id) {
            return;
        }
        self.found_in(id, true, why, String::new(), String::new());
        if let Some(finding) = self.findings.get_mut(id) {
            finding.verdict = Verdict::NotPerformed;
        }
    }

    /// Reports that nothing else could be checked.
    pub(super) fn nothing_else(&mut self, why: &str) {
        let rest: Vec<_> = self.rules.iter().map(|rule| rule.id).collect();
        rest.into_iter().for_each(|id| self.not_performed(id, why));
    }

    /// A key that nobody has used.
    pub(super) fn fresh_key(&self) -> String {
        let key = ibid::generate_key();
        match self.plan.profile.policy.key.format {
            KeyFormat::Operation => format!("conform:check.run:{key}:1"),
            _ => key,
        }
    }

    /// A new operation under a new key.
    pub(super) fn fresh(&mut self) -> Request {
        let key = self.fresh_key();
        self.with_key(key.as_bytes())
    }

    /// A new operation under this key.
    pub(super) fn with_key(&mut self, key: &[u8]) -> Request {
        let name = self.plan.profile.key_header();
        Request { keys: vec![(name, key.to_vec())], ..self.keyless() }
    }

    /// A new operation without a key.
    pub(super) fn keyless(&mut self) -> Request {
        self.nonce += 1;
        let body = self.filled(&self.plan.body);
        let mut headers = self.plan.headers.clone();
        if let Some(name) = self.plan.profile.scope_header()
            && !headers.iter().any(|(found, _)| found.eq_ignore_ascii_case(name))
        {
            headers.push((name.to_owned(), "conform-a".into()));
        }
        Request {
            method: self.plan.method.clone(),
            target: self.plan.target.clone(),
            keys: Vec::new(),
            headers,
            connection: "close".into(),
            body,
        }
    }

    /// The same operation, slow or failing.
    pub(super) fn varied(&self, request: Request, variant: &Variant) -> Request {
        let body = variant.body.as_ref().map_or_else(|| request.body.clone(), |body| self.filled(body));
        Request { body, ..request }.with_headers(&variant.headers)
    }

    /// The body of the present operation: `{nonce}` is a number of its own, and stays on retries.
    pub(super) fn filled(&self, body: &str) -> Option<Bytes> {
        (!body.is_empty()).then(|| body.replace("{nonce}", &self.nonce.to_string()).into())
    }

    pub(super) async fn send(&mut self, request: &Request) -> Seen {
        self.requests += 1;
        let bytes = request.bytes(&self.plan.server.authority);
        Seen { sent: request.shown(), answer: self.plan.server.exchange(&bytes).await }
    }

    /// Sends it until it is no longer told to come back, or patience ends.
    pub(super) async fn settle(&mut self, request: &Request) -> Seen {
        let since = Instant::now();
        loop {
            let seen = self.send(request).await;
            let busy = seen.status() == Some(self.in_progress());
            if !busy || since.elapsed() > self.plan.patience || self.is_over() {
                return seen;
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// How often the operation ran, if that can be asked.
    pub(super) async fn count(&mut self) -> Result<Option<u64>, String> {
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

    /// Whether `second` comes from the run that `first` came from. `ran` is how often the operation ran in between.
    pub(super) fn same_run(&self, first: &Answer, second: &Answer, ran: Option<u64>) -> Runs {
        match ran {
            Some(0) => return Runs::Same,
            Some(_) => return Runs::Another,
            None => {}
        }
        if self.varies {
            let same = self.essence(first) == self.essence(second);
            return if same { Runs::Same } else { Runs::Another };
        }
        if self.marks {
            return if self.is_marked(second) { Runs::Same } else { Runs::Another };
        }
        Runs::Untold
    }

    /// Whether anything tells one run from another.
    pub(super) fn has_evidence(&self) -> bool {
        self.plan.counter.is_some() || self.varies || self.marks
    }

    /// What of a body is the same in every answer of one run. The draft and Stripe speak of the same result: JSON that a server
    /// wrote anew, in another layout, is that. ibid's own presets promise the same bytes.
    pub(super) fn essence(&self, answer: &Answer) -> Vec<u8> {
        if self.plan.profile.policy.envelope == Envelope::Metadata
            && let Ok(Value::Object(mut object)) = serde_json::from_slice(&answer.body)
        {
            object.remove("metadata");
            return Value::Object(object).to_string().into_bytes();
        }
        if self.plan.profile.is_foreign() {
            let mut policy = Policy::ietf();
            policy.fingerprint = vec![Part::Body];
            // Of what is no JSON the bytes count. Whether the type is the same is a check of its own.
            let json = HeaderValue::from_static("application/json");
            let headers = HeaderMap::from_iter([(header::CONTENT_TYPE, json)]);
            let value = Fingerprint::of(&policy, &Method::POST, &Uri::from_static("/"), &headers, &answer.body);
            return value.digest.to_vec();
        }
        answer.body.to_vec()
    }

    /// Whether an answer says that it is a replay, as the profile has it.
    pub(super) fn is_marked(&self, answer: &Answer) -> bool {
        let headers = &self.plan.profile.policy.replay_headers;
        let says = |(name, value): &(http::HeaderName, ibid::Template)| match value.to_string() {
            filled if filled.contains('{') => answer.header(name.as_str()).is_some(),
            fixed => answer.header(name.as_str()) == Some(&fixed),
        };
        !headers.is_empty() && headers.iter().all(says)
    }

    pub(super) fn status_of(&self, reason: Reason) -> u16 {
        self.plan.profile.policy.status_of(reason).as_u16()
    }

    pub(super) fn in_progress(&self) -> u16 {
        self.status_of(Reason::InProgress)
    }

    /// What the profile's markers are, for people.
    pub(super) fn markers(&self) -> String {
        let headers = &self.plan.profile.policy.replay_headers;
        let shown: Vec<_> = headers.iter().map(|(name, value)| format!("{name}: {value}")).collect();
        shown.join(", ")
    }
}
