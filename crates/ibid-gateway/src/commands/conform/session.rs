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
use ibid::{Envelope, KeyFormat, Reason};
use serde_json::Value;

use super::{
    profile::{Level, Profile, Rule},
    wire::{Answer, Broken, Server},
};

/// Between two tries of a request that is told to come back.
const PAUSE: Duration = Duration::from_millis(200);
/// How much of a body is shown.
const SHOWN: usize = 300;

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

/// One request, as it is written.
#[derive(Debug, Clone)]
pub(super) struct Request {
    pub(super) method: String,
    pub(super) target: String,
    /// Key headers, in any number and with any bytes.
    pub(super) keys: Vec<(String, Vec<u8>)>,
    pub(super) headers: Vec<(String, String)>,
    pub(super) connection: String,
    pub(super) body: Option<Bytes>,
}

/// What was sent and what came.
#[derive(Debug, Clone)]
pub(super) struct Seen {
    pub(super) sent: String,
    pub(super) answer: Result<Answer, Broken>,
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
        let cannot = |why: &str| format!("--count-url http://{host}{target}: {why}");
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

    /// What of a body is the same in every answer of one run.
    pub(super) fn essence(&self, answer: &Answer) -> Vec<u8> {
        if self.plan.profile.policy.envelope == Envelope::Metadata
            && let Ok(Value::Object(mut object)) = serde_json::from_slice(&answer.body)
        {
            object.remove("metadata");
            return Value::Object(object).to_string().into_bytes();
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

impl Request {
    pub(super) fn with_headers(mut self, headers: &[(String, String)]) -> Self {
        self.headers.retain(|(name, _)| !headers.iter().any(|(other, _)| other.eq_ignore_ascii_case(name)));
        self.headers.extend_from_slice(headers);
        self
    }

    pub(super) fn bytes(&self, host: &str) -> Vec<u8> {
        let mut bytes = format!(
            "{} {} HTTP/1.1\r\nhost: {host}\r\nuser-agent: ibid-conform/{}\r\nconnection: {}\r\n",
            self.method,
            self.target,
            env!("CARGO_PKG_VERSION"),
            self.connection
        )
        .into_bytes();
        let has = |name: &str| self.headers.iter().any(|(found, _)| found.eq_ignore_ascii_case(name));
        if !has("accept") {
            bytes.extend(b"accept: */*\r\n");
        }
        for (name, value) in &self.headers {
            bytes.extend(format!("{name}: {value}\r\n").into_bytes());
        }
        for (name, value) in &self.keys {
            bytes.extend([name.as_bytes(), b": ", value, b"\r\n"].concat());
        }
        if let Some(body) = &self.body {
            if !has("content-type") {
                bytes.extend(b"content-type: application/json\r\n");
            }
            bytes.extend(format!("content-length: {}\r\n\r\n", body.len()).into_bytes());
            bytes.extend(body);
        } else {
            let length = if self.method == "GET" { "" } else { "content-length: 0\r\n" };
            bytes.extend(format!("{length}\r\n").into_bytes());
        }
        bytes
    }

    /// For people: without the values of headers that may be secret.
    pub(super) fn shown(&self) -> String {
        let mut shown = format!("{} {}", self.method, self.target);
        for (name, _) in self.headers.iter().filter(|(name, _)| !name.eq_ignore_ascii_case("content-type")) {
            shown.push_str(&format!(", {name}: ****"));
        }
        for (name, value) in &self.keys {
            shown.push_str(&format!(", {name}: {}", visible(value)));
        }
        if self.connection != "close" {
            shown.push_str(&format!(", connection: {}", self.connection));
        }
        if let Some(body) = &self.body {
            shown.push_str(&format!(", body {}", visible(body)));
        }
        shown
    }
}

impl Seen {
    pub(super) fn status(&self) -> Option<u16> {
        self.answer.as_ref().ok().map(|answer| answer.status)
    }

    pub(super) fn is_success(&self) -> bool {
        self.answer.as_ref().is_ok_and(Answer::is_success)
    }

    /// What came, in a line.
    pub(super) fn came(&self) -> String {
        let answer = match &self.answer {
            Ok(answer) => answer,
            Err(broken) => return broken.to_string(),
        };
        let told = |name: &str| {
            ["content-type", "location", "etag", "retry-after", "link", "set-cookie"].contains(&name)
                || name.contains("idempoten")
        };
        let mut came = answer.status.to_string();
        for (name, value) in answer.headers.iter().filter(|(name, _)| told(&name.to_lowercase())) {
            came.push_str(&format!(", {}: {}", name.to_lowercase(), visible(value.as_bytes())));
        }
        if !answer.body.is_empty() {
            came.push_str(&format!(", body {}", visible(&answer.body)));
        }
        came
    }
}

/// Bytes of others, for a terminal: no control characters, not too many.
fn visible(bytes: &[u8]) -> String {
    let cut = &bytes[..bytes.len().min(SHOWN)];
    let text: String = cut
        .utf8_chunks()
        .flat_map(|chunk| {
            let invalid = chunk.invalid().iter().map(|byte| format!("\\x{byte:02x}"));
            let valid = chunk.valid().chars().map(|character| match character {
                control if control.is_control() => control.escape_default().to_string(),
                other => other.to_string(),
            });
            valid.chain(invalid).collect::<Vec<_>>()
        })
        .collect();
    match bytes.len() - cut.len() {
        0 => text,
        more => format!("{text}… and {more} bytes more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_send_cannot_move_a_terminals_cursor() {
        assert_eq!(visible(b"a\x1b[2J\xff\n\xc3\xa9"), "a\\u{1b}[2J\\xff\\n\u{e9}");
        assert!(visible(&[b'x'; 1000]).ends_with("… and 700 bytes more"));
    }

    #[test]
    fn secrets_are_not_shown_and_keys_are_sent_as_they_are() {
        let request = Request {
            method: "POST".into(),
            target: "/pay".into(),
            keys: vec![("Idempotency-Key".into(), b"a\x01".to_vec())],
            headers: vec![("Authorization".into(), "Bearer s3cret".into())],
            connection: "close".into(),
            body: Some("{}".into()),
        };
        assert_eq!(request.shown(), "POST /pay, Authorization: ****, Idempotency-Key: a\\u{1}, body {}");
        let bytes = request.bytes("h");
        let text = String::from_utf8_lossy(&bytes);
        assert!(text.contains("Authorization: Bearer s3cret\r\nIdempotency-Key: a\u{1}\r\n"), "{text}");
        assert!(text.ends_with("content-type: application/json\r\ncontent-length: 2\r\n\r\n{}"), "{text}");
    }
}
