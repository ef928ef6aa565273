//! The JSON form of an entry. `docs/operating.md` lists its members.

use bytes::Bytes;
use data_encoding::HEXLOWER;
use ibid::{
    intent::HeldKey,
    label::LabelText,
    mask,
    record::{Record, RecordBody},
    store::{Address, ClaimOutcome, EntryFilter, EntryInfo, EntryState, Fingerprint, ListCursor, RecordSummary, Store},
};
use ibid_stores::seal::sealing_key_id;
use serde::{Deserialize, Serialize};

use super::{RecordEntry, notes::RecordNote, state_name};
use crate::format::{as_millis, format_date, now_ms};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecordList {
    /// In address order.
    pub records: Vec<RecordView>,
    /// Cursor of the next page; `None` on the last.
    pub next: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecordView {
    /// 64 hex digits.
    pub address: String,
    /// `processing`, `done`, `failed` or `unknown`.
    pub state: String,
    /// As stored: in clear or masked.
    pub key: String,
    pub tenant: String,
    pub user: String,
    /// Method and route.
    pub endpoint: String,
    pub method: String,
    /// Without the query.
    pub path: String,
    pub client: String,
    pub user_agent: String,
    pub status: Option<u16>,
    /// RFC 3339.
    pub requested_at: String,
    /// RFC 3339.
    pub completed_at: Option<String>,
    pub duration_ms: Option<f64>,
    pub success: Option<bool>,
    /// Time since the claim.
    pub age_ms: u64,
    /// RFC 3339, computed with this machine's clock.
    pub expires_at: String,
    pub expires_in_ms: u64,
    /// Counts the runs at this address, from 1.
    pub attempt: u32,
    /// Identifies the holder.
    pub fence: u64,
    /// Masked.
    pub fingerprint: String,
    /// The key that seals the record, if it is shown sealed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sealed_with: Option<String>,
    /// Whether an operator gave the answer.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub resolved: bool,
    /// Whether the whole key is sealed with the entry, so that an admin can reveal it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub revealable: bool,
    /// While the outcome is unknown: what is known about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unknown: Option<UnknownView>,
    /// While an intent guard holds the key: the first key with the same intent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held: Option<HeldView>,
    /// While in progress or unknown: when another run may be granted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub takeover_in_ms: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub response: Option<AnswerView>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnknownView {
    /// Why the outcome is unknown.
    pub cause: String,
    /// Since when, RFC 3339; `None` if no gateway saw it.
    pub since: Option<String>,
    /// What the app last said when it was asked by `resolve`.
    pub probe: Option<String>,
    /// RFC 3339.
    pub probed_at: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HeldView {
    /// The record of the first key; `None` if it is gone.
    pub first: Option<Box<RecordView>>,
    /// The parts of the two requests that differ; empty if that is not known.
    pub differs: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum AnswerView {
    Whole {
        /// In the order of sending; a name can occur twice.
        headers: Vec<(String, String)>,
        /// `None` if the policy does not store bodies.
        body: Option<BodyView>,
        trailers: Vec<(String, String)>,
    },
    /// The record is corrupt, or cannot be unsealed.
    Unreadable {
        unreadable: String,
        /// The key that seals it, if it is sealed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        sealed_with: Option<String>,
    },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum BodyView {
    /// Printable UTF-8.
    Text {
        /// In bytes.
        length: u64,
        text: String,
    },
    /// Anything else.
    Hex {
        /// In bytes.
        length: u64,
        hex: String,
    },
    /// The body was too large to store.
    Digest {
        /// In bytes.
        length: u64,
        sha256: String,
    },
}

/// The fields that lists show.
impl From<&EntryInfo> for RecordView {
    fn from(listed: &EntryInfo) -> Self {
        let label = LabelText::decode(&listed.label).unwrap_or_default();
        let (tags, outline) = (&listed.tags, listed.summary);
        let revealable = is_masked(tags.key()) && !label.key.is_empty();
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
            requested_at: format_date(requested_at_ms(listed)),
            completed_at: outline.map(|outline| format_date(outline.completed_at_ms)),
            duration_ms: outline
                .filter(|outline| !is_resolved(outline))
                .map(|outline| outline.took.as_secs_f64() * 1000.0),
            resolved: outline.as_ref().is_some_and(is_resolved),
            success: match listed.state {
                EntryState::Done => Some(true),
                EntryState::Failed => Some(false),
                EntryState::Processing | EntryState::Unknown => None,
            },
            age_ms: as_millis(listed.age),
            expires_at: format_date(now_ms().saturating_add(as_millis(listed.expires_in))),
            expires_in_ms: as_millis(listed.expires_in),
            attempt: listed.attempt,
            fence: listed.fence.0,
            fingerprint: masked_fingerprint(&listed.fingerprint),
            sealed_with: sealing_key_id(&listed.label),
            revealable,
            unknown: None,
            held: None,
            takeover_in_ms: None,
            response: None,
        }
    }
}

/// The fields that lists show, the answer, and the time of a possible takeover.
impl From<&RecordEntry> for RecordView {
    fn from(entry: &RecordEntry) -> Self {
        let mut view = Self::from(&entry.info);
        match &entry.claim {
            ClaimOutcome::InProgress(holder) | ClaimOutcome::OutcomeUnknown(holder) => {
                view.takeover_in_ms = Some(as_millis(holder.takeover_in))
            }
            ClaimOutcome::Completed(done) => view.response = Some(AnswerView::from_record(&done.record)),
            ClaimOutcome::Granted(_) | ClaimOutcome::TokenSpent => {}
        }
        view
    }
}

impl RecordView {
    /// Why the outcome is unknown if no gateway saw it become so. This process has had the store open since `opened_ms`.
    fn unseen_cause(&self, store: &dyn Store, opened_ms: u64) -> &'static str {
        // A store that is not shared has one process at a time.
        match store.guarantees().shared {
            true => "lease expired: its gateway crashed, or has not reached the store since",
            false if now_ms().saturating_sub(self.age_ms) < opened_ms => "gateway crashed, or was killed",
            false => "lease expired: the gateway was paused, or could not write to its store",
        }
    }

    /// Adds what the store's note says about an unknown outcome. A note that cannot be read is left out. This process has
    /// had the store open since `opened_ms`.
    pub(crate) async fn with_note(mut self, store: &dyn Store, opened_ms: u64) -> Self {
        let address = Address::from_hex(&self.address).filter(|_| self.state == state_name(EntryState::Unknown));
        let Some(address) = address else { return self };
        let note = RecordNote::read(store, &address).await.unwrap_or_default().since(&self.requested_at);
        let (cause, probe) = (note.cause, note.probe);
        self.unknown = Some(UnknownView {
            since: cause.as_ref().map(|cause| format_date(cause.at_ms)),
            cause: cause.map_or_else(|| self.unseen_cause(store, opened_ms).to_owned(), |cause| cause.text),
            probed_at: probe.as_ref().map(|probe| format_date(probe.at_ms)),
            probe: probe.map(|probe| probe.text),
        });
        self.held = HeldView::find(store, &address).await;
        if let (Some(held), Some(unknown)) = (&self.held, &mut self.unknown) {
            let first = held.first.as_ref().map_or("another one", |first| &first.key);
            unknown.cause = format!("held by the intent guard: the key {first} began the same operation");
        } else if let (true, Some(unknown)) = (self.key.ends_with(" (intent)"), &mut self.unknown) {
            unknown.cause = "the intent of this key; resolving or releasing the key frees it".into();
        }
        self
    }
}

impl HeldView {
    async fn find(store: &dyn Store, address: &Address) -> Option<Self> {
        let held = HeldKey::find(store, address).await.ok().flatten().filter(|held| !held.is_permitted)?;
        let (own, first) = (listed_at(store, address).await, listed_at(store, &held.first).await);
        let parts = |entry: &Option<EntryInfo>| LabelText::decode(&entry.as_ref()?.label)?.parts;
        let differs = parts(&own).zip(parts(&first)).map(|(own, first)| first.differing(&own)).unwrap_or_default();
        Some(Self {
            first: first.map(|first| Box::new(RecordView::from(&first))),
            differs: differs.into_iter().map(str::to_owned).collect(),
        })
    }
}

async fn listed_at(store: &dyn Store, address: &Address) -> Option<EntryInfo> {
    let filter = EntryFilter { address: Some(*address), ..EntryFilter::default() };
    store.admin().list(&filter, ListCursor::default(), 1).await.ok()?.entries.into_iter().next()
}

pub(crate) fn is_masked(key: &str) -> bool {
    key.contains("****")
}

/// The whole key of an entry: as stored, or from its label. The error says why it is not there.
pub(crate) fn whole_key(listed: &EntryInfo) -> Result<String, &'static str> {
    let stored = listed.tags.key();
    if sealing_key_id(&listed.label).is_some() {
        return Err(
            "it is sealed, and does not open with the keys at hand; name the gateway's --config, with its [seal]",
        );
    }
    if !stored.is_empty() && !is_masked(stored) {
        return Ok(stored.to_owned());
    }
    let label = LabelText::decode(&listed.label).unwrap_or_default();
    let what = "the store has only a masked key; with [seal], or label.key = \"clear\", it keeps the whole key of new requests";
    if label.key.is_empty() { Err(what) } else { Ok(label.key) }
}

/// A key that was revealed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RevealedKey {
    /// 64 hex digits.
    pub address: String,
    pub key: String,
}

/// Operators do not know how long the operation ran; no other answer takes no time.
fn is_resolved(summary: &RecordSummary) -> bool {
    summary.took.is_zero()
}

impl AnswerView {
    fn from_record(record: &Bytes) -> Self {
        let record = match Record::decode(record.clone()) {
            Ok(record) => record,
            Err(why) => {
                let sealed_with = sealing_key_id(record);
                let unreadable = match &sealed_with {
                    Some(key) => format!("it is sealed with the key {key:?}, and does not open with what is at hand"),
                    None if record.is_empty() => "it does not open with the keys at hand, or was altered".into(),
                    None => why.to_string(),
                };
                return Self::Unreadable { unreadable, sealed_with };
            }
        };
        let pairs = |headers: &http::HeaderMap| {
            let pair = |(name, value): (&http::HeaderName, &http::HeaderValue)| {
                (name.as_str().to_owned(), String::from_utf8_lossy(value.as_bytes()).into_owned())
            };
            headers.iter().map(pair).collect()
        };
        Self::Whole {
            headers: pairs(&record.headers),
            body: body_view(&record.body),
            trailers: pairs(&record.trailers),
        }
    }
}

fn body_view(body: &RecordBody) -> Option<BodyView> {
    match body {
        RecordBody::None => None,
        RecordBody::Digest { length, sha256 } => {
            Some(BodyView::Digest { length: *length, sha256: HEXLOWER.encode(sha256) })
        }
        RecordBody::Whole(body) => {
            let length = body.len() as u64;
            Some(match displayable_text(body) {
                Some(text) => BodyView::Text { length, text: text.into() },
                None => BodyView::Hex { length, hex: HEXLOWER.encode(body) },
            })
        }
    }
}

/// Time of the request by the clock of the gateway that received it, or else computed from the entry's age.
pub(crate) fn requested_at_ms(listed: &EntryInfo) -> u64 {
    match (&listed.summary, LabelText::decode(&listed.label)) {
        (Some(outline), _) if outline.requested_at_ms > 0 => outline.requested_at_ms,
        (_, Some(label)) if label.requested_at_ms > 0 => label.requested_at_ms,
        _ => now_ms().saturating_sub(as_millis(listed.age)),
    }
}

/// The bytes as text, if they are printable UTF-8.
fn displayable_text(bytes: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(bytes).ok()?;
    text.chars().all(|character| matches!(character, '\n' | '\r' | '\t') || !character.is_control()).then_some(text)
}

/// Shows the version and the ends of the digest only, because the digest is derived from the client's request.
fn masked_fingerprint(fingerprint: &Fingerprint) -> String {
    if *fingerprint == Fingerprint::NONE {
        return "none".into();
    }
    format!("v{} {}", fingerprint.version, mask(&HEXLOWER.encode(&fingerprint.digest)))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use data_encoding::HEXLOWER_PERMISSIVE;

    use super::*;

    #[test]
    fn only_what_can_be_shown_is_text() {
        assert_eq!(displayable_text(b"a\x1b[2J"), None);
        assert_eq!(displayable_text(b"\xff"), None);
        assert_eq!(displayable_text("é\r\n\t".as_bytes()), Some("é\r\n\t"));
    }

    #[test]
    fn dates_have_an_end() {
        assert_eq!(format_date(u64::MAX), "9999-12-31T23:59:59.999Z");
        assert_eq!(as_millis(Duration::MAX), u64::MAX);
    }

    #[test]
    fn hex_comes_back() {
        let all: Vec<u8> = (0..=255).collect();
        let from_hex = |text: &str| HEXLOWER_PERMISSIVE.decode(text.as_bytes()).ok();
        assert_eq!(from_hex(&HEXLOWER.encode(&all)), Some(all));
        assert_eq!((from_hex("0"), from_hex("0g"), from_hex("é0")), (None, None, None));
    }

    #[test]
    fn a_view_reads_what_it_wrote() {
        for body in [
            None,
            Some(BodyView::Text { length: 1, text: "a".into() }),
            Some(BodyView::Hex { length: 1, hex: "ff".into() }),
            Some(BodyView::Digest { length: 1, sha256: "00".into() }),
        ] {
            let response = AnswerView::Whole { headers: vec![("a".into(), "b".into())], body, trailers: Vec::new() };
            let written = serde_json::to_string(&response).unwrap();
            assert_eq!(serde_json::from_str::<AnswerView>(&written).unwrap(), response, "{written}");
        }
        let unreadable = AnswerView::Unreadable { unreadable: "why".into(), sealed_with: None };
        let written = serde_json::to_string(&unreadable).unwrap();
        assert_eq!(serde_json::from_str::<AnswerView>(&written).unwrap(), unreadable);
    }
}
