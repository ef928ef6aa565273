//! One record in full: its fields, answer, timeline, refusals and audit entries; how all pages show records.

use std::time::Duration;

use askama::Template;
use ibid::{RefusalReason, fingerprint::PartDigests, store::Address};

use super::page::{PageShell, filters};
use crate::{
    admin::{
        AdminState,
        audit::{AuditEntry, AuditOutcome, AuditedState},
        stats,
    },
    format::{
        display_date, display_date_with_millis, escape_invisible, escape_invisible_lines, format_count, format_date,
        format_duration, format_rough_ms, format_size,
    },
    metrics::RefusedRequest,
    records::{AnswerView, BodyView, RecordView},
};

const MAX_BODY_BYTES_SHOWN: usize = 64 << 10;

#[derive(Template)]
#[template(path = "console/record.html")]
pub(super) struct RecordPage {
    shell: PageShell,
    answer: AnswerPanel,
    timeline: Vec<TimelineEvent>,
    view: RecordView,
    refusals: Vec<RefusalRow>,
    /// `None` for callers who may not see it.
    audit: Option<Vec<AuditEntry>>,
    /// The whole key, if it was asked for.
    revealed: Option<String>,
    may_change: bool,
}

#[derive(Default)]
struct AnswerPanel {
    summary: String,
    missing_note: Option<&'static str>,
    headers: Vec<(String, String)>,
    body: Option<String>,
    trailers: Vec<(String, String)>,
}

/// CSS class, title, time and details.
type TimelineEvent = (&'static str, &'static str, String, String);

/// A refused request with the record's key.
pub(super) struct RefusalRow {
    pub(super) when: String,
    /// The reason, and the parts that differ from the first request.
    pub(super) what: String,
    /// Method, path, client address and user agent.
    pub(super) who: String,
}

impl RefusalRow {
    /// The latest refusals at this record's address, newest first.
    pub(super) async fn for_record(state: &AdminState, address: Address, at_most: usize) -> Vec<Self> {
        let mut met = state.refusals.latest(None, usize::MAX);
        met.retain(|refused| refused.address == Some(address));
        met.truncate(at_most);
        if met.is_empty() {
            return Vec::new();
        }
        let until = tokio::time::Instant::now() + stats::FIRST_REQUEST_LOOKUP_TIMEOUT;
        let first = stats::find_first_request(state, &address, until).await;
        let first = first.and_then(|label| label.parts);
        met.iter().map(|refused| Self::from_refusal(refused, first)).collect()
    }

    fn from_refusal(refused: &RefusedRequest, first: Option<PartDigests>) -> Self {
        let what = match (refused.reason, refused.parts, first) {
            (RefusalReason::KeyReused, Some(own), Some(first)) => {
                let parts = first.differing(&own);
                format!("{}: another {}", refused.reason.name(), parts.join(", another "))
            }
            (reason, ..) => reason.name().to_owned(),
        };
        let who = [
            format!("{} {}", refused.method, escape_invisible(&refused.path)),
            refused.peer.map_or(String::new(), |peer| format!("from {peer}")),
            escape_invisible(&refused.user_agent).into_owned(),
            if refused.shadow { "passed all the same: shadow mode".into() } else { String::new() },
        ];
        let who: Vec<String> = who.into_iter().filter(|part| !part.is_empty()).collect();
        Self { when: display_date(&format_date(refused.at_ms)), what, who: who.join(", ") }
    }
}

impl RecordPage {
    pub(super) fn new(
        shell: PageShell, view: RecordView, audit: Option<Vec<AuditEntry>>, refusals: Vec<RefusalRow>,
        revealed: Option<String>, may_change: bool,
    ) -> Self {
        let (answer, timeline) = (AnswerPanel::from_view(&view), build_timeline(&view));
        let revealed = revealed.map(|key| escape_invisible(&key).into_owned());
        Self { shell, answer, timeline, view, refusals, audit, revealed, may_change }
    }
}

impl RecordView {
    /// All fields except the answer.
    pub(super) fn fields(&self) -> Vec<PageField> {
        let or_dash = |text: &str| if text.is_empty() { "–".into() } else { escape_invisible(text).into_owned() };
        let (key, request) = (PageField::code("Key", or_dash(&self.key)), format!("{} {}", self.method, self.path));
        let mut fields = vec![
            if self.key.contains("****") { key.with_note("masked") } else { key },
            PageField::code("Address", &self.address),
            PageField::code("Request", or_dash(request.trim())),
            PageField::new("Tenant", or_dash(&self.tenant)),
            PageField::new("User", or_dash(&self.user)),
            PageField::new("Requested", display_date_with_millis(&self.requested_at))
                .with_note(format!("claimed {} ago", format_rough_ms(self.age_ms))),
            PageField::new("Completed", self.completed_at.as_deref().map_or("–".into(), display_date_with_millis)),
            match self.resolved {
                true => PageField::new("Duration", "–").with_note("resolved by an operator"),
                false => PageField::new("Duration", format_duration(self.took())),
            },
            PageField::new("Expires", display_date_with_millis(&self.expires_at))
                .with_note(format!("in {}", format_rough_ms(self.expires_in_ms))),
            PageField::new("Attempt", self.attempt.to_string()),
            PageField::code("Fence", self.fence.to_string()),
            PageField::code("Fingerprint", &self.fingerprint),
        ];
        if let Some(left) = self.takeover_in_ms {
            let rough = format_rough_ms(left);
            let (value, under) = match (self.state.as_str(), left) {
                ("processing", 0) => ("ends now".into(), ""),
                ("processing", _) => (format!("ends in {rough}"), "unless its gateway extends it"),
                (_, 0) => ("over".into(), "another run may be granted, where the route says retry"),
                (_, _) => (format!("until in {rough}"), "no other run before that"),
            };
            fields.push(PageField::new("Lease", value).with_note(under));
        }
        fields.push(PageField::code("Client", or_dash(&self.client)));
        fields.push(PageField::new("User agent", or_dash(&self.user_agent)));
        // A record without them has no tenant or user at all.
        fields.retain(|field| !matches!(field.name, "Tenant" | "User") || field.value != "–");
        fields
    }
}

impl RecordView {
    /// The fields of a held request and of the first one, side by side.
    fn beside(&self, first: &Self) -> Vec<(&'static str, String, String)> {
        let shown = |text: &str| escape_invisible(text).into_owned();
        let values = |view: &Self| {
            [
                view.name(),
                format!("{} {}", view.method, view.path),
                display_date_with_millis(&view.requested_at),
                view.client.clone(),
                view.user_agent.clone(),
                format!("{} {}", view.state_text(), view.status_text()),
            ]
        };
        let names = ["Key", "Request", "Requested", "Client", "User agent", "State"];
        let rows = names.into_iter().zip(values(self).into_iter().zip(values(first)));
        rows.map(|(name, (own, first))| (name, shown(&own), shown(&first))).collect()
    }
}

impl AnswerPanel {
    fn from_view(view: &RecordView) -> Self {
        let mut answer = Self { summary: view.status_text(), ..Self::default() };
        match &view.response {
            Some(AnswerView::Whole { headers, body, trailers }) => {
                let shown = |pairs: &[(String, String)]| {
                    pairs.iter().map(|(name, value)| (name.clone(), escape_invisible(value).into_owned())).collect()
                };
                (answer.headers, answer.trailers) = (shown(headers), shown(trailers));
                answer.set_body(body.as_ref());
            }
            Some(AnswerView::Unreadable { unreadable, .. }) => {
                answer.summary = unreadable.clone();
                answer.missing_note =
                    Some("It is damaged and is never answered from. Forget it if the operation may run again.");
            }
            None if view.state == "processing" => answer.missing_note = Some("There is none yet: it is running."),
            None => answer.missing_note = Some("There is none: the outcome is unknown."),
        }
        answer
    }

    fn set_body(&mut self, body: Option<&BodyView>) {
        let (said, shown) = match body {
            None => ("body not kept: remember_body is off".into(), None),
            Some(BodyView::Text { length: 0, .. }) => ("empty body".into(), None),
            Some(BodyView::Text { length, text }) => {
                (format_size(*length), Some(escape_invisible_lines(&truncate_body(&indent_json(text)))))
            }
            Some(BodyView::Hex { length, hex }) => {
                (format!("{}, no text: in hex", format_size(*length)), Some(truncate_body(hex)))
            }
            Some(BodyView::Digest { length, sha256 }) => {
                (format!("{}, too large to keep: its SHA-256", format_size(*length)), Some(sha256.clone()))
            }
        };
        self.summary = format!("{} · {said}", self.summary);
        self.body = shown;
    }
}

/// Indents JSON, leaving every token as it is. Other text is returned unchanged.
fn indent_json(text: &str) -> String {
    if !text.trim_start().starts_with(['{', '[']) || serde_json::from_str::<serde::de::IgnoredAny>(text).is_err() {
        return text.to_owned();
    }
    let (mut shown, mut depth, mut in_string, mut escaped) =
        (String::with_capacity(text.len() * 2), 0_usize, false, false);
    let line = |shown: &mut String, depth: usize| shown.push_str(&format!("\n{}", "  ".repeat(depth)));
    let mut characters = text.trim().chars().peekable();
    while let Some(character) = characters.next() {
        if in_string {
            shown.push(character);
            in_string = escaped || character != '"';
            escaped = character == '\\' && !escaped;
            continue;
        }
        match character {
            ' ' | '\n' | '\r' | '\t' => {}
            '{' | '[' => {
                shown.push(character);
                while characters.next_if(|next| next.is_ascii_whitespace()).is_some() {}
                if let Some(close) = characters.next_if(|next| matches!(next, '}' | ']')) {
                    shown.push(close);
                } else {
                    depth += 1;
                    line(&mut shown, depth);
                }
            }
            '}' | ']' => {
                depth = depth.saturating_sub(1);
                line(&mut shown, depth);
                shown.push(character);
            }
            ',' => {
                shown.push(',');
                line(&mut shown, depth);
            }
            ':' => shown.push_str(": "),
            _ => {
                in_string = character == '"';
                shown.push(character);
            }
        }
    }
    shown
}

fn truncate_body(text: &str) -> String {
    if text.len() <= MAX_BODY_BYTES_SHOWN {
        return text.to_owned();
    }
    let end = text.floor_char_boundary(MAX_BODY_BYTES_SHOWN);
    format!(
        "{}\n… {} more bytes; ibid keys show --body has all of it",
        &text[..end],
        format_count((text.len() - end) as u64)
    )
}

fn build_timeline(view: &RecordView) -> Vec<TimelineEvent> {
    let by = if view.client.is_empty() { String::new() } else { format!("from {}", escape_invisible(&view.client)) };
    let claimed = match view.attempt {
        ..=1 => {
            ("past", "Claimed", String::new(), format!("{} ago, fence {}", format_rough_ms(view.age_ms), view.fence))
        }
        attempt => {
            let under =
                format!("attempt {attempt}, after an unknown outcome; claimed {} ago", format_rough_ms(view.age_ms));
            ("warn", "Taken over and run again", String::new(), under)
        }
    };
    let now = match view.state_class() {
        "processing" => {
            let left = format_rough_ms(view.takeover_in_ms.unwrap_or(0));
            ("busy", "Running", "now".into(), format!("lease ends in {left} unless extended"))
        }
        "unknown" => {
            let (when, why) = view.unknown.as_ref().map_or((None, ""), |known| (known.since.as_deref(), &known.cause));
            ("bad", "Outcome unknown", when.map(display_date_with_millis).unwrap_or_default(), why.to_owned())
        }
        _ if view.resolved => {
            let when = view.completed_at.as_deref().map(display_date_with_millis).unwrap_or_default();
            ("good", "Resolved by an operator", when, view.status_text())
        }
        state => {
            let (kind, what) = if state == "done" { ("good", "Answered") } else { ("warn", "Answered with a failure") };
            let when = view.completed_at.as_deref().map(display_date_with_millis).unwrap_or_default();
            let took = view.took().map(|took| format!("after {}", format_duration(Some(took))));
            let under: Vec<String> = view.status.map(|_| view.status_text()).into_iter().chain(took).collect();
            (kind, what, when, under.join(", "))
        }
    };
    let mut events = vec![("past", "Requested", display_date_with_millis(&view.requested_at), by), claimed, now];
    if let Some((told, at)) = view.unknown.as_ref().and_then(|known| known.probe.as_ref().zip(known.probed_at.as_ref()))
    {
        events.push(("warn", "App asked", display_date_with_millis(at), told.clone()));
    }
    let left = format!("in {}", format_rough_ms(view.expires_in_ms));
    events.push(("", "Expires", display_date_with_millis(&view.expires_at), left));
    events
}

#[derive(Debug, Clone, Default)]
pub(super) struct PageField {
    pub(super) name: &'static str,
    pub(super) value: String,
    /// A note in small print behind the value.
    pub(super) under: String,
    /// Whether to use a monospaced font.
    pub(super) code: bool,
}

impl PageField {
    pub(super) fn new(name: &'static str, value: impl Into<String>) -> Self {
        Self { name, value: value.into(), ..Self::default() }
    }

    pub(super) fn code(name: &'static str, value: impl Into<String>) -> Self {
        Self { code: true, ..Self::new(name, value) }
    }

    pub(super) fn with_note(self, under: impl Into<String>) -> Self {
        Self { under: under.into(), ..self }
    }
}

impl RecordView {
    /// The state as a CSS class. Only known states go into the markup.
    pub(super) fn state_class(&self) -> &'static str {
        ["processing", "done", "failed"].into_iter().find(|known| *known == self.state).unwrap_or("unknown")
    }

    pub(super) fn name(&self) -> String {
        record_name(&self.key, &self.address)
    }

    /// The word for people.
    pub(super) fn state_text(&self) -> &'static str {
        state_text(self.state_class())
    }

    pub(super) fn status_text(&self) -> String {
        self.status.map(format_status).unwrap_or_default()
    }

    pub(super) fn took(&self) -> Option<Duration> {
        self.duration_ms.map(|ms| Duration::from_secs_f64(ms.clamp(0.0, 1e12) / 1e3))
    }
}

impl AuditEntry {
    /// Empty if the change was made.
    pub(super) fn outcome_note(&self) -> String {
        let why = |unless: &'static str| escape_invisible(self.why.as_deref().unwrap_or(unless));
        match self.outcome {
            AuditOutcome::Changed => why("").into_owned(),
            AuditOutcome::Refused => format!("refused: {}", why("it had changed")),
            AuditOutcome::Failed => format!("failed: {}", why("the store failed")),
            AuditOutcome::Unknown if self.resealed.is_some() => "not finished".into(),
            AuditOutcome::Unknown => "it is unknown whether it was made".into(),
        }
    }

    pub(super) fn record_name(&self) -> String {
        self.address.as_ref().map_or("all records".into(), |address| record_name(&self.key, address))
    }

    pub(super) fn state_before(&self) -> String {
        self.before.as_ref().map(AuditedState::text).unwrap_or_default()
    }

    pub(super) fn state_after(&self) -> String {
        match (&self.after, &self.before, &self.resealed) {
            (Some(after), ..) => after.text(),
            (None, Some(_), _) if self.outcome == AuditOutcome::Changed => "removed".into(),
            (None, Some(_), _) => "absent".into(),
            (None, None, Some(done)) => {
                let [resealed, looked] = [done.resealed, done.looked].map(format_count);
                let sealed = format!("{resealed} of {looked} under {}", done.key);
                match done.unopened {
                    0 => sealed,
                    unopened => format!("{sealed}, {} did not open", format_count(unopened)),
                }
            }
            (None, None, None) => String::new(),
        }
    }
}

impl AuditedState {
    fn text(&self) -> String {
        match self.status {
            Some(code) => format!("{} {}", state_text(&self.state), format_status(code)),
            None => state_text(&self.state).to_owned(),
        }
    }
}

/// The word of a state for people.
pub(super) fn state_text(state: &str) -> &'static str {
    match state {
        "processing" => "in progress",
        "done" => "completed",
        "failed" => "failed",
        _ => "outcome unknown",
    }
}

/// The display name of a record: its key, or its masked address if the key is not stored.
fn record_name(key: &str, address: &str) -> String {
    if key.is_empty() { ibid::mask(address) } else { escape_invisible(key).into_owned() }
}

/// Such as `201`, or the name of a gRPC status.
fn format_status(status: u16) -> String {
    ibid::grpc::GrpcStatusCode::from_summary_status(status)
        .map_or_else(|| status.to_string(), |code| code.name().into())
}

/// Whether any row has a value there. Tables leave out columns that are empty.
pub(super) fn has_values<T: std::borrow::Borrow<RecordView>>(rows: &[T], of: fn(&RecordView) -> &str) -> bool {
    rows.iter().any(|row| !of(row.borrow()).is_empty())
}

pub(super) fn tenant(view: &RecordView) -> &str {
    &view.tenant
}

pub(super) fn user(view: &RecordView) -> &str {
    &view.user
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_is_indented_and_its_tokens_are_left_alone() {
        let text = r#"{"a":1.50, "b":[1,2],"c":{},"d":"x, {\"y\"}","e":[]}"#;
        let shown = "{\n  \"a\": 1.50,\n  \"b\": [\n    1,\n    2\n  ],\n  \"c\": {},\n  \"d\": \"x, {\\\"y\\\"}\",\n  \"e\": []\n}";
        assert_eq!(indent_json(text), shown);
        for other in ["hello, {world}", "{no json", "\"text\""] {
            assert_eq!(indent_json(other), other);
        }
    }
}
