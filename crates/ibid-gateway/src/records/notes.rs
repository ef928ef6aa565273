//! Notes: small JSON documents that the store keeps beside the records, so that every gateway and `ibid keys` see them.
//! They hold the audit trail (`admin.audit = "store"`), and what is known about an unknown outcome.
//!
//! A note is a completed entry with an address of its own kind ([`Address::is_note`]). Lists of records leave notes out. A note is written by settling a claim that was never made: the store restores it. That is
//! one call, and a full store accepts it.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use ibid::{
    record::{Record, RecordBody},
    store::{
        Address, ClaimOutcome, ClaimRequest, ClaimToken, ErrorKind, Fence, Fingerprint, Lease, RecordSummary,
        SettleOutcome, Settlement, Store, StoreError, Tags,
    },
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use sha2::{Digest as _, Sha256};

use crate::format::{format_date, now_ms};

/// The endpoint tag of notes, for people who read the database.
const ENDPOINT: &str = "ibid note";
/// How long the note of a record is kept.
const RECORD_NOTE_TTL: Duration = Duration::from_secs(30 * 86_400);
/// Changes that the note of a record names.
const MAX_CHANGES: usize = 20;

/// The address of the note with this kind and name.
pub(crate) fn address(kind: &str, name: &[u8]) -> Address {
    let digest = Sha256::new().chain_update("ibid note ").chain_update(kind).chain_update(" ").chain_update(name);
    Address(digest.finalize().into()).into_note()
}

/// Whether there is a note, readable or not.
pub(crate) async fn exists(store: &dyn Store, at: &Address) -> Result<bool, StoreError> {
    match store.get(at).await {
        Err(error) if error.kind == ErrorKind::Corrupt => Ok(true),
        found => Ok(found?.is_some()),
    }
}

/// Reads a note; `None` if it is absent, or cannot be read.
pub(crate) async fn read<T: DeserializeOwned>(store: &dyn Store, at: &Address) -> Result<Option<T>, StoreError> {
    Ok(read_with_fence(store, at).await?.map(|(content, _)| content))
}

async fn read_with_fence<T: DeserializeOwned>(
    store: &dyn Store, at: &Address,
) -> Result<Option<(T, Fence)>, StoreError> {
    let found = match store.get(at).await {
        Err(error) if error.kind == ErrorKind::Corrupt => return Ok(None),
        found => found?,
    };
    let Some(ClaimOutcome::Completed(done)) = found else { return Ok(None) };
    let Ok(Record { body: RecordBody::Whole(json), .. }) = Record::decode(done.record) else { return Ok(None) };
    Ok(serde_json::from_slice(&json).ok().map(|content| (content, done.fence)))
}

/// Writes a note unless there is one. Returns whether it was written.
pub(crate) async fn create(
    store: &dyn Store, at: Address, ttl: Duration, content: &impl Serialize,
) -> Result<bool, StoreError> {
    let now = now_ms();
    let request = ClaimRequest {
        address: at,
        token: ClaimToken::mint(),
        fingerprint: Fingerprint::NONE,
        tags: Tags::new("", "", ENDPOINT, ""),
        label: Bytes::new(),
        lease: Duration::from_secs(1),
        ttl,
        take_over: None,
    };
    let lease = Lease { request: Arc::new(request), fence: Fence(1), attempt: 1, front_only: false };
    let took = Duration::from_micros(1);
    let summary = RecordSummary { status: 200, requested_at_ms: now, completed_at_ms: now, took };
    let end = Settlement::Complete { failed: false, record: encode(content, now), summary, ttl };
    Ok(!matches!(store.settle(&lease, &end).await?, SettleOutcome::ClaimLost(_)))
}

/// Replaces the content of a note. It keeps its expiry. Returns `false` if there is none that can be read.
pub(crate) async fn replace(store: &dyn Store, at: &Address, content: &impl Serialize) -> Result<bool, StoreError> {
    let Some((_, fence)) = read_with_fence::<serde::de::IgnoredAny>(store, at).await? else { return Ok(false) };
    let replaced = store.admin().replace_record(at, fence, encode(content, now_ms())).await?;
    Ok(!matches!(replaced, SettleOutcome::ClaimLost(_)))
}

fn encode(content: &impl Serialize, now: u64) -> Bytes {
    let json = serde_json::to_vec(content).expect("notes have a JSON form");
    let record = Record {
        status: StatusCode::OK,
        requested_at_ms: now,
        completed_at_ms: now,
        headers: HeaderMap::new(),
        body: RecordBody::Whole(json.into()),
        trailers: HeaderMap::new(),
        cookies: Vec::new(),
    };
    record.encode()
}

/// What gateways know about one record besides the store's entry.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct RecordNote {
    /// Why the outcome became unknown.
    pub(crate) cause: Option<TimedText>,
    /// What the app last said when it was asked about the unknown outcome.
    pub(crate) probe: Option<TimedText>,
    /// Ids of audit entries in the store, newest last.
    pub(crate) changes: Vec<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TimedText {
    /// Milliseconds since the Unix epoch, by the clock of the gateway that saw it.
    pub(crate) at_ms: u64,
    pub(crate) text: String,
}

impl RecordNote {
    pub(crate) async fn read(store: &dyn Store, record: &Address) -> Result<Self, StoreError> {
        Ok(read(store, &address("record", &record.0)).await?.unwrap_or_default())
    }

    /// Reads, changes and writes the note. Of two gateways that do so at the same time, one may win.
    pub(crate) async fn update(
        store: &dyn Store, record: &Address, change: impl FnOnce(&mut Self),
    ) -> Result<(), StoreError> {
        let mut note = Self::read(store, record).await?;
        change(&mut note);
        let surplus = note.changes.len().saturating_sub(MAX_CHANGES);
        note.changes.drain(..surplus);
        let at = address("record", &record.0);
        if !replace(store, &at, &note).await? {
            create(store, at, RECORD_NOTE_TTL, &note).await?;
        }
        Ok(())
    }

    /// Drops what is about an earlier run with the same key: the record was forgotten or released in between.
    /// `requested_at` is RFC 3339.
    pub(crate) fn since(mut self, requested_at: &str) -> Self {
        let is_earlier = |told: &mut TimedText| *format_date(told.at_ms) < *requested_at;
        self.cause.take_if(is_earlier);
        self.probe.take_if(is_earlier);
        self
    }
}

#[cfg(test)]
mod tests {
    use ibid::store::Memory;

    use super::*;

    #[tokio::test]
    async fn a_note_is_written_once_and_replaced_later() {
        let store = Memory::default();
        let at = address("test", b"one");
        assert!(at.is_note() && !Address([0xa5; 32]).is_note());
        assert_eq!(read::<u64>(&store, &at).await.unwrap(), None);
        assert!(!replace(&store, &at, &7).await.unwrap(), "there is none");
        assert!(create(&store, at, RECORD_NOTE_TTL, &7).await.unwrap());
        assert!(!create(&store, at, RECORD_NOTE_TTL, &8).await.unwrap(), "there is one");
        assert_eq!(read::<u64>(&store, &at).await.unwrap(), Some(7));
        assert!(replace(&store, &at, &9).await.unwrap() && exists(&store, &at).await.unwrap());
        assert_eq!(read::<u64>(&store, &at).await.unwrap(), Some(9));
        assert_eq!(read::<String>(&store, &at).await.unwrap(), None, "of another form");
    }

    #[tokio::test]
    async fn the_note_of_a_record_is_about_its_latest_run_and_bounded() {
        let (store, record) = (Memory::default(), Address([7; 32]));
        for id in 0..2 * MAX_CHANGES as u64 {
            RecordNote::update(&store, &record, |note| note.changes.push(id)).await.unwrap();
        }
        let cause = TimedText { at_ms: 1000, text: "upstream timed out".into() };
        RecordNote::update(&store, &record, |note| note.cause = Some(cause.clone())).await.unwrap();
        let note = RecordNote::read(&store, &record).await.unwrap();
        assert_eq!((note.changes.len(), note.changes.last()), (MAX_CHANGES, Some(&(2 * MAX_CHANGES as u64 - 1))));
        assert_eq!(note.clone().since(&format_date(1000)).cause, Some(cause));
        assert_eq!(note.since(&format_date(1001)).cause, None);
    }
}
