//! One record in full: its fields, answer, timeline, refusals and audit entries.

use std::time::Duration;

use askama::Template;
use ibid::{LabelText, PartDigests, RefusalReason, store::Address};
use tokio::time::timeout;

use super::{
    format::{
        self, display_date, display_date_with_millis, escape_invisible, escape_invisible_lines, format_count,
        format_duration, format_rough, format_size,
    },
    page::PageShell,
    row::{AuditEntryRow, PageField, format_status, record_name, state_class},
};
use crate::{
    admin::AdminState,
    metrics,
    records::{self, AnswerView, BodyView, RecordView},
};

/// Maximum number of body bytes shown.
const MAX_BODY_BYTES_SHOWN: usize = 64 << 10;
/// Time limit to look up the first request.
const FIRST_REQUEST_LOOKUP_TIMEOUT: Duration = Duration::from_secs(1);

#[derive(Template)]
#[template(path = "console/record.html")]
pub(super) struct RecordPage {
    shell: PageShell,
    name: String,
    state: &'static str,
    endpoint: String,
    address: String,
    fields: Vec<PageField>,
    answer: AnswerPanel,
    actions: Option<ActionPanel>,
    timeline: Vec<TimelineEvent>,
    refusals: Vec<RefusalRow>,
    /// `None` for callers who may not see it.
    audit: Option<Vec<AuditEntryRow>>,
}

struct AnswerPanel {
    summary: String,
    missing_note: Option<&'static str>,
    headers: Vec<(String, String)>,
    body: Option<String>,
    trailers: Vec<(String, String)>,
}

struct ActionPanel {
    advice: &'static str,
    links: Vec<ActionLink>,
}

struct ActionLink {
    path: &'static str,
    name: &'static str,
    main: bool,
}

struct TimelineEvent {
    kind: &'static str,
    what: &'static str,
    when: String,
    under: String,
}

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
    pub(super) async fn for_record(desk: &AdminState, address: Address, at_most: usize) -> Vec<Self> {
        let mut met = desk.refusals.latest(None, usize::MAX);
        met.retain(|refused| refused.address == Some(address));
        met.truncate(at_most);
        if met.is_empty() {
            return Vec::new();
        }
        let entry = timeout(FIRST_REQUEST_LOOKUP_TIMEOUT, records::at(&**desk.ibid.engine().store(), &address)).await;
        let entry = entry.ok().and_then(Result::ok).flatten();
        let first = entry.and_then(|entry| LabelText::decode(&entry.info.label)).and_then(|label| label.parts);
        met.iter().map(|refused| Self::from_refusal(refused, first)).collect()
    }

    fn from_refusal(refused: &metrics::RefusedRequest, first: Option<PartDigests>) -> Self {
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
        Self { when: display_date(&format::format_date(refused.at_ms)), what, who: who.join(", ") }
    }
}

impl RecordPage {
    pub(super) fn new(
        shell: PageShell, view: &RecordView, audit: Option<Vec<AuditEntryRow>>, refusals: Vec<RefusalRow>,
        may_change: bool,
    ) -> Self {
        let state = state_class(&view.state);
        Self {
            shell,
            name: record_name(&view.key, &view.address),
            state,
            endpoint: escape_invisible(&view.endpoint).into_owned(),
            address: view.address.clone(),
            fields: record_fields(view),
            answer: AnswerPanel::from_view(view),
            actions: may_change.then(|| ActionPanel::for_state(state)),
            timeline: build_timeline(view, state),
            refusals,
            audit,
        }
    }
}

/// All fields except the answer.
pub(super) fn record_fields(view: &RecordView) -> Vec<PageField> {
    let or_dash = |text: &str| if text.is_empty() { "–".into() } else { escape_invisible(text).into_owned() };
    let age = format_rough(Duration::from_millis(view.age_ms));
    let request = format!("{} {}", view.method, view.path);
    let duration = view.duration_ms.map(|ms| Duration::from_secs_f64(ms.clamp(0.0, 1e12) / 1e3));
    let mut fields = vec![
        PageField::code("Key", or_dash(&view.key)).with_note(if view.key.contains("****") { "masked" } else { "" }),
        PageField::code("Address", &view.address),
        PageField::code("Request", or_dash(request.trim())),
        PageField::new("Tenant", or_dash(&view.tenant)),
        PageField::new("User", or_dash(&view.user)),
        PageField::new("Requested", display_date_with_millis(&view.requested_at))
            .with_note(format!("claimed {age} ago")),
        PageField::new("Completed", view.completed_at.as_deref().map_or("–".into(), display_date_with_millis)),
        PageField::new("Duration", format_duration(duration)),
        PageField::new("Expires", display_date_with_millis(&view.expires_at))
            .with_note(format!("in {}", format_rough(Duration::from_millis(view.expires_in_ms)))),
        PageField::new("Attempt", view.attempt.to_string()),
        PageField::code("Fence", view.fence.to_string()),
        PageField::code("Fingerprint", &view.fingerprint),
    ];
    if let Some(left) = view.takeover_in_ms {
        let (value, under) = match (view.state.as_str(), left) {
            ("processing", 0) => ("ends now".into(), ""),
            ("processing", left) => {
                (format!("ends in {}", format_rough(Duration::from_millis(left))), "unless its gateway extends it")
            }
            (_, 0) => ("over".into(), "another run may be granted, where the route says retry"),
            (_, left) => {
                (format!("until in {}", format_rough(Duration::from_millis(left))), "no other run before that")
            }
        };
        fields.push(PageField::new("Lease", value).with_note(under));
    }
    fields.push(PageField::code("Client", or_dash(&view.client)));
    fields.push(PageField::new("User agent", or_dash(&view.user_agent)));
    fields
}

impl AnswerPanel {
    fn from_view(view: &RecordView) -> Self {
        let code = view.status.map(format_status);
        let mut answer = Self {
            summary: code.unwrap_or_default(),
            missing_note: None,
            headers: Vec::new(),
            body: None,
            trailers: Vec::new(),
        };
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
            None => answer.missing_note = Some("There is none: nobody has seen how it ended."),
        }
        answer
    }

    fn set_body(&mut self, body: Option<&BodyView>) {
        let (said, shown) = match body {
            None => ("body not kept: remember_body is off".into(), None),
            Some(BodyView::Text { length: 0, .. }) => ("empty body".into(), None),
            Some(BodyView::Text { length, text }) => {
                (format_size(*length), Some(escape_invisible_lines(&truncate_body(text))))
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

/// Cuts a text at [`MAX_BODY_BYTES_SHOWN`].
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

impl ActionPanel {
    fn for_state(state: &str) -> Self {
        let action = |path, name, main| ActionLink { path, name, main };
        let forget = action("forget", "Forget it…", false);
        match state {
            "unknown" => Self {
                advice: "Ask the app first what became of it.",
                links: vec![
                    action("resolve", "Say how it ended…", true),
                    action("release", "It never happened…", false),
                    forget,
                ],
            },
            "processing" => Self {
                advice: "It is running: its gateway was heard of within its lease. Forgetting it lets a retry run beside it.",
                links: vec![forget],
            },
            _ => Self {
                advice: "It is finished. Forgotten, its request runs again when it is retried.",
                links: vec![forget],
            },
        }
    }
}

fn build_timeline(view: &RecordView, state: &str) -> Vec<TimelineEvent> {
    let event = |kind, what, when: String, under: String| TimelineEvent { kind, what, when, under };
    let by = if view.client.is_empty() { String::new() } else { format!("from {}", escape_invisible(&view.client)) };
    let mut life = vec![event("past", "Requested", display_date_with_millis(&view.requested_at), by)];
    let age = Duration::from_millis(view.age_ms);
    if view.attempt > 1 {
        let under =
            format!("attempt {}, after an end that nobody knew; claimed {} ago", view.attempt, format_rough(age));
        life.push(event("warn", "Taken over and run again", String::new(), under));
    } else {
        life.push(event("past", "Claimed", String::new(), format!("{} ago, fence {}", format_rough(age), view.fence)));
    }
    match state {
        "processing" => {
            let left = Duration::from_millis(view.takeover_in_ms.unwrap_or(0));
            life.push(event(
                "busy",
                "Running",
                "now".into(),
                format!("lease ends in {} unless extended", format_rough(left)),
            ));
        }
        "unknown" => {
            life.push(event(
                "bad",
                "Outcome unknown",
                "now".into(),
                "parked, or silent for longer than its lease".into(),
            ));
        }
        _ => {
            let (kind, what) = if state == "done" { ("good", "Answered") } else { ("warn", "Answered with a failure") };
            let took = view.duration_ms.map(|ms| Duration::from_secs_f64(ms.clamp(0.0, 1e12) / 1e3));
            let under = [
                view.status.map(format_status),
                took.map(|took| format!("after {}", super::format::format_duration(Some(took)))),
            ];
            let under: Vec<String> = under.into_iter().flatten().collect();
            life.push(event(
                kind,
                what,
                view.completed_at.as_deref().map_or(String::new(), display_date_with_millis),
                under.join(", "),
            ));
        }
    }
    let left = format_rough(Duration::from_millis(view.expires_in_ms));
    life.push(event("", "Expires", display_date_with_millis(&view.expires_at), format!("in {left}")));
    life
}
