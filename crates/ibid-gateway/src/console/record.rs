//! One record in full: its fields, its answer, its life, and what people did to it.

use std::time::Duration;

use askama::Template;
use ibid::{LabelText, PartDigests, Reason, store::Address};
use tokio::time::timeout;

use super::{
    page::Shell,
    row::{Deed, Field, known_state, name, status},
    words::{count, plain, plain_lines, size, took, when},
};
use crate::{
    admin::Desk,
    metrics,
    records::{self, BodyView, Response, View, change::rough, view},
};

/// Characters of a body that are shown.
const SHOWN: usize = 64 << 10;
/// How long the store may take to say what the first request was.
const PATIENCE: Duration = Duration::from_secs(1);

#[derive(Template)]
#[template(path = "console/record.html")]
pub(super) struct Record {
    shell: Shell,
    name: String,
    state: &'static str,
    endpoint: String,
    address: String,
    fields: Vec<Field>,
    answer: Answer,
    actions: Option<Actions>,
    life: Vec<Event>,
    refusals: Vec<Refused>,
    /// `None` for those who may not see it.
    audit: Option<Vec<Deed>>,
}

struct Answer {
    summary: String,
    none: Option<&'static str>,
    headers: Vec<(String, String)>,
    body: Option<String>,
    trailers: Vec<(String, String)>,
}

struct Actions {
    advice: &'static str,
    links: Vec<Action>,
}

struct Action {
    path: &'static str,
    name: &'static str,
    main: bool,
}

/// Something in the life of a record.
struct Event {
    kind: &'static str,
    what: &'static str,
    when: String,
    under: String,
}

/// A request with the same key that was another request.
pub(super) struct Refused {
    pub(super) when: String,
    /// What differed.
    pub(super) what: String,
    /// Who sent it.
    pub(super) who: String,
}

impl Refused {
    /// Those that met this record, latest first, and what was different from the first request.
    pub(super) async fn at(desk: &Desk, address: Address, at_most: usize) -> Vec<Self> {
        let mut met = desk.refusals.latest(None, usize::MAX);
        met.retain(|refused| refused.address == Some(address));
        met.truncate(at_most);
        if met.is_empty() {
            return Vec::new();
        }
        let entry = timeout(PATIENCE, records::at(&**desk.ibid.engine().store(), &address)).await;
        let entry = entry.ok().and_then(Result::ok).flatten();
        let first = entry.and_then(|entry| LabelText::decode(&entry.listed.label)).and_then(|label| label.parts);
        met.iter().map(|refused| Self::of(refused, first)).collect()
    }

    fn of(refused: &metrics::Refused, first: Option<PartDigests>) -> Self {
        let what = match (refused.reason, refused.parts, first) {
            (Reason::KeyReused, Some(own), Some(first)) => {
                let parts = first.differing(&own);
                format!("{}: another {}", refused.reason.name(), parts.join(", another "))
            }
            (reason, ..) => reason.name().to_owned(),
        };
        let who = [
            format!("{} {}", refused.method, plain(&refused.path)),
            refused.peer.map_or(String::new(), |peer| format!("from {peer}")),
            plain(&refused.user_agent).into_owned(),
            if refused.shadow { "passed all the same: shadow mode".into() } else { String::new() },
        ];
        let who: Vec<String> = who.into_iter().filter(|part| !part.is_empty()).collect();
        Self { when: when(&view::date(refused.at_ms)), what, who: who.join(", ") }
    }
}

impl Record {
    pub(super) fn new(
        shell: Shell, view: &View, audit: Option<Vec<Deed>>, refusals: Vec<Refused>, may_change: bool,
    ) -> Self {
        let state = known_state(&view.state);
        Self {
            shell,
            name: name(&view.key, &view.address),
            state,
            endpoint: plain(&view.endpoint).into_owned(),
            address: view.address.clone(),
            fields: fields(view),
            answer: Answer::of(view),
            actions: may_change.then(|| Actions::for_state(state)),
            life: life(view, state),
            refusals,
            audit,
        }
    }
}

/// Everything that is known besides the answer.
pub(super) fn fields(view: &View) -> Vec<Field> {
    let or_dash = |text: &str| if text.is_empty() { "–".into() } else { plain(text).into_owned() };
    let age = rough(Duration::from_millis(view.age_ms));
    let request = format!("{} {}", view.method, view.path);
    let duration = view.duration_ms.map(|ms| Duration::from_secs_f64(ms.clamp(0.0, 1e12) / 1e3));
    let mut fields = vec![
        Field::code("Key", or_dash(&view.key)).under(if view.key.contains("****") { "masked" } else { "" }),
        Field::code("Address", &view.address),
        Field::code("Request", or_dash(request.trim())),
        Field::new("Tenant", or_dash(&view.tenant)),
        Field::new("User", or_dash(&view.user)),
        Field::new("Requested", utc(&view.requested_at)).under(format!("claimed {age} ago")),
        Field::new("Completed", view.completed_at.as_deref().map_or("–".into(), utc)),
        Field::new("Duration", took(duration)),
        Field::new("Expires", utc(&view.expires_at))
            .under(format!("in {}", rough(Duration::from_millis(view.expires_in_ms)))),
        Field::new("Attempt", view.attempt.to_string()),
        Field::code("Fence", view.fence.to_string()),
        Field::code("Fingerprint", &view.fingerprint),
    ];
    if let Some(left) = view.takeover_in_ms {
        let (value, under) = match (view.state.as_str(), left) {
            ("processing", 0) => ("ends now".into(), ""),
            ("processing", left) => {
                (format!("ends in {}", rough(Duration::from_millis(left))), "unless its gateway extends it")
            }
            (_, 0) => ("over".into(), "another run may be granted, where the route says retry"),
            (_, left) => (format!("until in {}", rough(Duration::from_millis(left))), "no other run before that"),
        };
        fields.push(Field::new("Lease", value).under(under));
    }
    fields.push(Field::code("Client", or_dash(&view.client)));
    fields.push(Field::new("User agent", or_dash(&view.user_agent)));
    fields
}

impl Answer {
    fn of(view: &View) -> Self {
        let code = view.status.map(status);
        let mut answer = Self {
            summary: code.unwrap_or_default(),
            none: None,
            headers: Vec::new(),
            body: None,
            trailers: Vec::new(),
        };
        match &view.response {
            Some(Response::Whole { headers, body, trailers }) => {
                let shown = |pairs: &[(String, String)]| {
                    pairs.iter().map(|(name, value)| (name.clone(), plain(value).into_owned())).collect()
                };
                (answer.headers, answer.trailers) = (shown(headers), shown(trailers));
                answer.body(body.as_ref());
            }
            Some(Response::Unreadable { unreadable, .. }) => {
                answer.summary = unreadable.clone();
                answer.none =
                    Some("It is damaged and is never answered from. Forget it if the operation may run again.");
            }
            None if view.state == "processing" => answer.none = Some("There is none yet: it is running."),
            None => answer.none = Some("There is none: nobody has seen how it ended."),
        }
        answer
    }

    fn body(&mut self, body: Option<&BodyView>) {
        let (said, shown) = match body {
            None => ("body not kept: remember_body is off".into(), None),
            Some(BodyView::Text { length: 0, .. }) => ("empty body".into(), None),
            Some(BodyView::Text { length, text }) => (size(*length), Some(plain_lines(&cut(text)))),
            Some(BodyView::Hex { length, hex }) => (format!("{}, no text: in hex", size(*length)), Some(cut(hex))),
            Some(BodyView::Digest { length, sha256 }) => {
                (format!("{}, too large to keep: its SHA-256", size(*length)), Some(sha256.clone()))
            }
        };
        self.summary = format!("{} · {said}", self.summary);
        self.body = shown;
    }
}

/// As much as a page should hold.
fn cut(text: &str) -> String {
    if text.len() <= SHOWN {
        return text.to_owned();
    }
    let end = text.floor_char_boundary(SHOWN);
    format!("{}\n… {} more bytes; ibid keys show --body has all of it", &text[..end], count((text.len() - end) as u64))
}

impl Actions {
    fn for_state(state: &str) -> Self {
        let action = |path, name, main| Action { path, name, main };
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

fn life(view: &View, state: &str) -> Vec<Event> {
    let event = |kind, what, when: String, under: String| Event { kind, what, when, under };
    let by = if view.client.is_empty() { String::new() } else { format!("from {}", plain(&view.client)) };
    let mut life = vec![event("past", "Requested", utc(&view.requested_at), by)];
    let age = Duration::from_millis(view.age_ms);
    if view.attempt > 1 {
        let under = format!("attempt {}, after an end that nobody knew; claimed {} ago", view.attempt, rough(age));
        life.push(event("warn", "Taken over and run again", String::new(), under));
    } else {
        life.push(event("past", "Claimed", String::new(), format!("{} ago, fence {}", rough(age), view.fence)));
    }
    match state {
        "processing" => {
            let left = Duration::from_millis(view.takeover_in_ms.unwrap_or(0));
            life.push(event("busy", "Running", "now".into(), format!("lease ends in {} unless extended", rough(left))));
        }
        "unknown" => {
            life.push(event("bad", "End unknown", "now".into(), "parked, or silent for longer than its lease".into()));
        }
        _ => {
            let (kind, what) = if state == "done" { ("good", "Answered") } else { ("warn", "Answered with a failure") };
            let took = view.duration_ms.map(|ms| Duration::from_secs_f64(ms.clamp(0.0, 1e12) / 1e3));
            let under = [view.status.map(status), took.map(|took| format!("after {}", super::words::took(Some(took))))];
            let under: Vec<String> = under.into_iter().flatten().collect();
            life.push(event(kind, what, view.completed_at.as_deref().map_or(String::new(), utc), under.join(", ")));
        }
    }
    let left = rough(Duration::from_millis(view.expires_in_ms));
    life.push(event("", "Expires", utc(&view.expires_at), format!("in {left}")));
    life
}

/// To the millisecond.
fn utc(date: &str) -> String {
    match date.get(19..23) {
        Some(millis) => format!("{}{millis}", when(date)),
        None => when(date),
    }
}
