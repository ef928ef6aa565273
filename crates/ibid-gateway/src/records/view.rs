//! An entry in a form that programs read: the members that `docs/operating.md` lists, no more.

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use ibid::{
    LabelText, Record, RecordBody, mask, rfc3339,
    store::{Claim, Fingerprint, Listed, State},
};
use serde::{Deserialize, Serialize};

use super::{Entry, Found, state_name};

/// The last millisecond that has a date with four digits of year.
const LAST_DATE: u64 = 253_402_300_799_999;

/// A part of a list.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Page {
    /// In the order of their addresses.
    pub records: Vec<View>,
    /// Where to go on.
    pub next: Option<String>,
}

/// One entry.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct View {
    /// 64 hex digits.
    pub address: String,
    /// Its name: `processing`, `done`, `failed`, `unknown`.
    pub state: String,
    /// As stored: clear or masked.
    pub key: String,
    /// Whose data it is.
    pub tenant: String,
    /// Who asked.
    pub user: String,
    /// Method and route.
    pub endpoint: String,
    /// Of the request.
    pub method: String,
    /// Of the request, without its query.
    pub path: String,
    /// The sender's address.
    pub client: String,
    /// As sent.
    pub user_agent: String,
    /// Of the answer.
    pub status: Option<u16>,
    /// When the request came.
    pub requested_at: String,
    /// When its answer was there.
    pub completed_at: Option<String>,
    /// How long the operation took.
    pub duration_ms: Option<f64>,
    /// Whether the remembered answer is a success.
    pub success: Option<bool>,
    /// Since the claim.
    pub age_ms: u64,
    /// By this machine's clock.
    pub expires_at: String,
    /// Until it is forgotten.
    pub expires_in_ms: u64,
    /// Which run at this address.
    pub attempt: u32,
    /// Names the holder.
    pub fence: u64,
    /// Of the request, masked.
    pub fingerprint: String,
    /// Of a running or unknown one: when another run may be granted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub takeover_in_ms: Option<u64>,
    /// Of a finished one, in full.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub response: Option<Response>,
}

/// A remembered answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Response {
    /// As it is stored.
    Whole {
        /// In the order in which they are sent; a name may be there twice.
        headers: Vec<(String, String)>,
        /// `None` if it was not kept.
        body: Option<BodyView>,
        /// As headers.
        trailers: Vec<(String, String)>,
    },
    /// It is damaged.
    Unreadable {
        /// Why.
        unreadable: String,
    },
}

/// The body of an answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum BodyView {
    /// It can be shown as it is.
    Text {
        /// In bytes.
        length: u64,
        /// All of it.
        text: String,
    },
    /// It is no text.
    Hex {
        /// In bytes.
        length: u64,
        /// All of it.
        hex: String,
    },
    /// It was too large to keep.
    Digest {
        /// In bytes.
        length: u64,
        /// Of the bytes.
        sha256: String,
    },
}

impl From<Found> for Page {
    fn from(found: Found) -> Self {
        Self { records: found.entries.iter().map(View::from).collect(), next: found.next.map(|next| next.to_string()) }
    }
}

/// What lists show.
impl From<&Listed> for View {
    fn from(listed: &Listed) -> Self {
        let label = LabelText::decode(&listed.label).unwrap_or_default();
        let (tags, outline) = (&listed.tags, listed.outline);
        Self {
            address: listed.address.to_string(),
            state: state_name(listed.state).into(),
            key: tags.key().into(),
            tenant: tags.tenant().into(),
            user: tags.user().into(),
            endpoint: tags.endpoint().into(),
            method: label.method,
            path: label.path,
            client: label.peer,
            user_agent: label.user_agent,
            status: outline.map(|outline| outline.status),
            requested_at: date(requested_at(listed)),
            completed_at: outline.map(|outline| date(outline.completed_at_ms)),
            duration_ms: outline.map(|outline| outline.took.as_secs_f64() * 1000.0),
            success: match listed.state {
                State::Done => Some(true),
                State::Failed => Some(false),
                State::Processing | State::Unknown => None,
            },
            age_ms: millis(listed.age),
            expires_at: date(now_ms().saturating_add(millis(listed.expires_in))),
            expires_in_ms: millis(listed.expires_in),
            attempt: listed.attempt,
            fence: listed.fence.0,
            fingerprint: fingerprint(&listed.fingerprint),
            takeover_in_ms: None,
            response: None,
        }
    }
}

/// The same, with the answer, and with when another may take it over.
impl From<&Entry> for View {
    fn from(entry: &Entry) -> Self {
        let mut view = Self::from(&entry.listed);
        match &entry.claim {
            Claim::Busy(holder) | Claim::Unknown(holder) => view.takeover_in_ms = Some(millis(holder.takeover_in)),
            Claim::Done(done) => view.response = Some(Response::of(&done.record)),
            Claim::Granted(_) | Claim::Spent => {}
        }
        view
    }
}

impl Response {
    fn of(record: &Bytes) -> Self {
        let record = match Record::decode(record.clone()) {
            Ok(record) => record,
            Err(why) => return Self::Unreadable { unreadable: why.to_string() },
        };
        let pairs = |headers: &http::HeaderMap| {
            let pair = |(name, value): (&http::HeaderName, &http::HeaderValue)| {
                (name.as_str().to_owned(), String::from_utf8_lossy(value.as_bytes()).into_owned())
            };
            headers.iter().map(pair).collect()
        };
        Self::Whole { headers: pairs(&record.headers), body: body(&record.body), trailers: pairs(&record.trailers) }
    }
}

fn body(body: &RecordBody) -> Option<BodyView> {
    match body {
        RecordBody::None => None,
        RecordBody::Digest { length, sha256 } => Some(BodyView::Digest { length: *length, sha256: hex(sha256) }),
        RecordBody::Whole(body) => {
            let length = body.len() as u64;
            Some(match text(body) {
                Some(text) => BodyView::Text { length, text: text.into() },
                None => BodyView::Hex { length, hex: hex(body) },
            })
        }
    }
}

/// When it was asked for, by the clock of the gateway that was asked; else from its age.
pub(crate) fn requested_at(listed: &Listed) -> u64 {
    match (&listed.outline, LabelText::decode(&listed.label)) {
        (Some(outline), _) if outline.requested_at_ms > 0 => outline.requested_at_ms,
        (_, Some(label)) if label.requested_at_ms > 0 => label.requested_at_ms,
        _ => now_ms().saturating_sub(millis(listed.age)),
    }
}

/// Milliseconds since the Unix epoch.
pub(crate) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    millis(since)
}

/// RFC 3339, with an end.
pub(crate) fn date(ms: u64) -> String {
    rfc3339(ms.min(LAST_DATE))
}

pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digit = |nibble: u8| char::from(DIGITS[usize::from(nibble & 15)]);
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(*byte)]).collect()
}

/// What [`hex`] wrote. `None` if it is nothing of the kind.
pub(crate) fn unhex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let pair = |pair: &[u8]| Some(digit(pair[0])? << 4 | digit(pair[1])?);
    text.len().is_multiple_of(2).then(|| text.as_bytes().chunks_exact(2).map(pair).collect()).flatten()
}

/// The bytes as text, if they can be shown as they are.
fn text(bytes: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(bytes).ok()?;
    text.chars().all(|character| matches!(character, '\n' | '\r' | '\t') || !character.is_control()).then_some(text)
}

/// Version and ends only: it is a digest of what the client sent.
fn fingerprint(fingerprint: &Fingerprint) -> String {
    if *fingerprint == Fingerprint::NONE {
        return "none".into();
    }
    format!("v{} {}", fingerprint.version, mask(&hex(&fingerprint.digest)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_can_be_shown_is_text() {
        assert_eq!(text(b"a\x1b[2J"), None);
        assert_eq!(text(b"\xff"), None);
        assert_eq!(text("é\r\n\t".as_bytes()), Some("é\r\n\t"));
    }

    #[test]
    fn dates_have_an_end() {
        assert_eq!(date(u64::MAX), "9999-12-31T23:59:59.999Z");
        assert_eq!(millis(Duration::MAX), u64::MAX);
    }

    #[test]
    fn hex_comes_back() {
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(unhex(&hex(&all)), Some(all));
        assert_eq!((unhex("0"), unhex("0g"), unhex("é0")), (None, None, None));
    }

    #[test]
    fn a_view_reads_what_it_wrote() {
        for body in [
            None,
            Some(BodyView::Text { length: 1, text: "a".into() }),
            Some(BodyView::Hex { length: 1, hex: "ff".into() }),
            Some(BodyView::Digest { length: 1, sha256: "00".into() }),
        ] {
            let response = Response::Whole { headers: vec![("a".into(), "b".into())], body, trailers: Vec::new() };
            let written = serde_json::to_string(&response).unwrap();
            assert_eq!(serde_json::from_str::<Response>(&written).unwrap(), response, "{written}");
        }
        let unreadable = Response::Unreadable { unreadable: "why".into() };
        let written = serde_json::to_string(&unreadable).unwrap();
        assert_eq!(serde_json::from_str::<Response>(&written).unwrap(), unreadable);
    }
}
