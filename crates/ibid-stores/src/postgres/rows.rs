//! Between the contract's words and the table's columns.

use std::{borrow::Cow, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use ibid::{
    Record, RecordBody,
    store::{
        Ask, Claim, End, ErrorKind, Fence, Fingerprint, Finished, Held, Holder, Lease, Listed, Outline, State,
        StoreError, Tags,
    },
};
use tokio_postgres::{
    Row,
    types::{FromSql, ToSql},
};

use super::faults::failed;

/// Ten thousand years, in microseconds: longer than any life, and two of them still fit a timestamp.
const ENDLESS: u64 = 315_576_000_000_000_000;

/// What is asked of the row of a lease.
#[derive(Debug, Clone)]
pub(super) enum What {
    Claim,
    Extend(Duration),
    End(End),
}

/// What a call found: whether a holder held, and what is there.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) held: i16,
    pub(super) found: Option<Claim>,
}

impl Answer {
    pub(super) fn into_claim(self) -> Result<Claim, StoreError> {
        self.found.ok_or_else(|| unreadable("a claim was answered with nothing"))
    }

    pub(super) fn into_held(self) -> Result<Held, StoreError> {
        match (self.held, self.found) {
            (0, _) => Ok(Held::Held),
            (1, _) => Ok(Held::Restored),
            (2, Some(found)) => Ok(Held::Lost(Box::new(found))),
            (held, found) => Err(unreadable(format!("a holder was answered with {held} and {found:?}"))),
        }
    }
}

/// The parameters of one call for many leases, column by column.
#[derive(Default)]
pub(super) struct Columns<'a> {
    addresses: Vec<&'a [u8]>,
    tokens: Vec<&'a [u8]>,
    versions: Vec<i16>,
    fingerprints: Vec<&'a [u8]>,
    tenants: Vec<Cow<'a, str>>,
    users: Vec<Cow<'a, str>>,
    endpoints: Vec<Cow<'a, str>>,
    keys: Vec<Cow<'a, str>>,
    key_hashes: Vec<Cow<'a, str>>,
    tags: Vec<Option<&'a [u8]>>,
    labels: Vec<&'a [u8]>,
    holds: Vec<i64>,
    keeps: Vec<i64>,
    overs: Vec<Option<i64>>,
    fences: Vec<i64>,
    attempts: Vec<i32>,
    hows: Vec<i16>,
    faileds: Vec<bool>,
    records: Vec<Option<&'a [u8]>>,
    statuses: Vec<i32>,
    requested: Vec<i64>,
    completed: Vec<i64>,
    tooks: Vec<i64>,
    end_keeps: Vec<i64>,
    retries: Vec<i64>,
}

/// An end, as columns.
#[derive(Default)]
pub(super) struct EndColumns<'a> {
    pub(super) how: i16,
    pub(super) failed: bool,
    pub(super) record: Option<&'a [u8]>,
    pub(super) status: i32,
    pub(super) requested_ms: i64,
    pub(super) completed_ms: i64,
    pub(super) took: i64,
    pub(super) keep: i64,
    pub(super) retry: i64,
}

impl<'a> EndColumns<'a> {
    pub(super) fn new(end: &'a End) -> Self {
        let ms = |ms: u64| ms.min(ENDLESS / 1000) as i64;
        match end {
            End::Complete { failed, record, outline, keep } => Self {
                how: 0,
                failed: *failed,
                record: Some(record),
                status: outline.status.into(),
                requested_ms: ms(outline.requested_at_ms),
                completed_ms: ms(outline.completed_at_ms),
                took: micros(outline.took),
                keep: micros(*keep),
                retry: 0,
            },
            End::Release => Self { how: 1, ..Self::default() },
            End::Park { keep, retry_in } => {
                Self { how: 2, keep: micros(*keep), retry: micros(*retry_in), ..Self::default() }
            }
        }
    }
}

impl<'a> Columns<'a> {
    pub(super) fn push(&mut self, lease: &'a Lease, what: &'a What) {
        let ask = &*lease.ask;
        self.addresses.push(&ask.address.0);
        self.tokens.push(&ask.token.0);
        self.versions.push(ask.fingerprint.version.into());
        self.fingerprints.push(&ask.fingerprint.digest);
        self.tenants.push(as_text(ask.tags.tenant()));
        self.users.push(as_text(ask.tags.user()));
        self.endpoints.push(as_text(ask.tags.endpoint()));
        self.keys.push(as_text(ask.tags.key()));
        self.key_hashes.push(as_text(ask.tags.key_hash()));
        self.tags.push(beyond_text(&ask.tags));
        self.labels.push(&ask.label);
        self.holds.push(micros(ask.hold));
        self.keeps.push(micros(ask.keep));
        self.overs.push(ask.over.map(fence));
        self.fences.push(fence(lease.fence));
        self.attempts.push(i32::try_from(lease.attempt).unwrap_or(i32::MAX));
        let end = match what {
            What::Claim => return,
            What::Extend(hold) => EndColumns { how: 3, keep: micros(*hold), ..EndColumns::default() },
            What::End(end) => EndColumns::new(end),
        };
        self.hows.push(end.how);
        self.faileds.push(end.failed);
        self.records.push(end.record);
        self.statuses.push(end.status);
        self.requested.push(end.requested_ms);
        self.completed.push(end.completed_ms);
        self.tooks.push(end.took);
        self.end_keeps.push(end.keep);
        self.retries.push(end.retry);
    }

    /// In the order of the functions' parameters; a claim has the first 14 only.
    pub(super) fn params(&self) -> [&(dyn ToSql + Sync); 25] {
        [
            &self.addresses,
            &self.tokens,
            &self.versions,
            &self.fingerprints,
            &self.tenants,
            &self.users,
            &self.endpoints,
            &self.keys,
            &self.key_hashes,
            &self.tags,
            &self.labels,
            &self.holds,
            &self.keeps,
            &self.overs,
            &self.fences,
            &self.attempts,
            &self.hows,
            &self.faileds,
            &self.records,
            &self.statuses,
            &self.requested,
            &self.completed,
            &self.tooks,
            &self.end_keeps,
            &self.retries,
        ]
    }
}

/// Bytes of a row, without a copy more than needed.
struct Blob(Bytes);

impl<'a> FromSql<'a> for Blob {
    fn from_sql(
        _: &tokio_postgres::types::Type, raw: &'a [u8],
    ) -> Result<Self, Box<dyn std::error::Error + Sync + Send>> {
        Ok(Self(Bytes::copy_from_slice(raw)))
    }
    fn accepts(ty: &tokio_postgres::types::Type) -> bool {
        *ty == tokio_postgres::types::Type::BYTEA
    }
}

/// Reads an answer; its columns are those of `statements::answer!`. `ask` is what a granted lease carries.
pub(super) fn answer(row: &Row, ask: Option<&Arc<Ask>>) -> Result<Answer, StoreError> {
    let held: Option<i16> = column(row, 1)?;
    let found: Option<i16> = column(row, 2)?;
    let found = match found {
        None | Some(0) => None,
        Some(1) => {
            let ask = ask.ok_or_else(|| unreadable("something that claims nothing was granted a claim"))?;
            let (fence, attempt) = (fence_at(row, 3)?, attempt_at(row, 4)?);
            Some(Claim::Granted(Lease { ask: ask.clone(), fence, attempt, solo: false }))
        }
        Some(2) => Some(Claim::Busy(holder(row)?)),
        Some(3) => Some(Claim::Unknown(holder(row)?)),
        Some(4) => Some(Claim::Done(finished(row)?)),
        Some(5) => Some(Claim::Spent),
        Some(other) => return Err(unreadable(format!("a call was answered with {other}, which means nothing"))),
    };
    Ok(Answer { held: held.unwrap_or(-1), found })
}

fn holder(row: &Row) -> Result<Holder, StoreError> {
    Ok(Holder {
        fence: fence_at(row, 3)?,
        attempt: attempt_at(row, 4)?,
        fingerprint: fingerprint_at(row, 5)?,
        age: span_at(row, 7)?,
        takeover_in: span_at(row, 8)?,
    })
}

fn finished(row: &Row) -> Result<Finished, StoreError> {
    let record: Option<Blob> = column(row, 11)?;
    let record = match record {
        Some(record) => record.0,
        None => assembled(row)?,
    };
    Ok(Finished {
        fence: fence_at(row, 3)?,
        attempt: attempt_at(row, 4)?,
        fingerprint: fingerprint_at(row, 5)?,
        failed: column(row, 10)?,
        record,
        expires_in: span_at(row, 9)?,
    })
}

/// An answer that was written by SQL, as status, headers and body.
fn assembled(row: &Row) -> Result<Bytes, StoreError> {
    let status: Option<i32> = column(row, 12)?;
    let status =
        status.and_then(|status| u16::try_from(status).ok()).and_then(|status| StatusCode::from_u16(status).ok());
    let status = status.ok_or_else(|| unreadable("a finished row has neither a record nor a status"))?;
    let names: Option<Vec<String>> = column(row, 13)?;
    let values: Option<Vec<Option<String>>> = column(row, 14)?;
    let mut headers = HeaderMap::new();
    for (name, value) in names.unwrap_or_default().iter().zip(values.unwrap_or_default()) {
        let pair = HeaderName::from_bytes(name.as_bytes()).ok();
        let pair = pair.zip(value.and_then(|value| HeaderValue::from_str(&value).ok()));
        let (name, value) = pair.ok_or_else(|| unreadable(format!("its header {name:?} is none")))?;
        headers.append(name, value);
    }
    let body: Option<Blob> = column(row, 15)?;
    let ms = |at| column::<Option<i64>>(row, at).map(|ms| ms.unwrap_or(0).max(0) as u64);
    let record = Record {
        status,
        requested_at_ms: ms(16)?,
        completed_at_ms: ms(17)?,
        headers,
        body: body.map_or(RecordBody::None, |body| RecordBody::Whole(body.0)),
        trailers: HeaderMap::new(),
        cookies: Vec::new(),
    };
    Ok(record.encode())
}

/// What a listing selects, in the order in which [`listed`] reads it.
pub(super) const LISTED: &str = "k.address, k.state, k.fence, k.attempt, k.fingerprint_version, k.fingerprint, \
    k.tenant, k.user_id, k.endpoint, k.key, k.tags, k.label, \
    ibid._us(statement_timestamp() - k.claimed_at), ibid._us(k.expires_at - statement_timestamp()), \
    k.lease_until > statement_timestamp(), k.status, ibid._clock_us(k.requested_at) / 1000, \
    ibid._clock_us(k.completed_at) / 1000, ibid._us(k.took), k.key_hash";

pub(super) fn listed(row: &Row) -> Result<Listed, StoreError> {
    let address: &[u8] = column(row, 0)?;
    let address = address.try_into().map_err(|_| unreadable("an address is not 32 bytes long"))?;
    let (state, is_live): (&str, bool) = (column(row, 1)?, column(row, 14)?);
    let state = match state {
        "processing" if is_live => State::Processing,
        "processing" | "unknown" => State::Unknown,
        "done" => State::Done,
        "failed" => State::Failed,
        other => return Err(unreadable(format!("its state is {other:?}"))),
    };
    let exact: Option<Blob> = column(row, 10)?;
    let parts: [&str; 5] = [column(row, 6)?, column(row, 7)?, column(row, 8)?, column(row, 9)?, column(row, 19)?];
    let tags = match exact {
        Some(exact) => Tags::from_bytes(exact.0).ok_or_else(|| unreadable("its tags are malformed"))?,
        None if parts == [""; 5] => Tags::default(),
        None => Tags::from_parts(parts),
    };
    let label: Blob = column(row, 11)?;
    let outline = match state {
        State::Done | State::Failed => Some(outline(row)?),
        State::Processing | State::Unknown => None,
    };
    Ok(Listed {
        address: ibid::store::Address(address),
        state,
        fence: fence_at(row, 2)?,
        attempt: attempt_at(row, 3)?,
        fingerprint: fingerprint_at(row, 4)?,
        tags,
        label: label.0,
        age: span_at(row, 12)?,
        expires_in: span_at(row, 13)?,
        outline,
    })
}

fn outline(row: &Row) -> Result<Outline, StoreError> {
    let status: Option<i32> = column(row, 15)?;
    let ms = |at| column::<Option<i64>>(row, at).map(|ms| ms.unwrap_or(0).max(0) as u64);
    Ok(Outline {
        status: status.and_then(|status| u16::try_from(status).ok()).unwrap_or(0),
        requested_at_ms: ms(16)?,
        completed_at_ms: ms(17)?,
        took: Duration::from_micros(ms(18)?),
    })
}

pub(super) fn column<'a, T: FromSql<'a>>(row: &'a Row, at: usize) -> Result<T, StoreError> {
    row.try_get(at).map_err(|error| unreadable(error.to_string()))
}

fn unreadable(why: impl Into<String>) -> StoreError {
    failed(ErrorKind::Corrupt, why)
}

fn fence_at(row: &Row, at: usize) -> Result<Fence, StoreError> {
    let fence: i64 = column(row, at)?;
    u64::try_from(fence).map(Fence).map_err(|_| unreadable(format!("its fence is {fence}")))
}

fn attempt_at(row: &Row, at: usize) -> Result<u32, StoreError> {
    let attempt: i32 = column(row, at)?;
    u32::try_from(attempt).map_err(|_| unreadable(format!("its attempt is {attempt}")))
}

fn fingerprint_at(row: &Row, at: usize) -> Result<Fingerprint, StoreError> {
    let (version, digest): (i16, &[u8]) = (column(row, at)?, column(row, at + 1)?);
    let version = u8::try_from(version).map_err(|_| unreadable(format!("its fingerprint is of version {version}")))?;
    let digest = digest.try_into().map_err(|_| unreadable("its fingerprint is not 32 bytes long"))?;
    Ok(Fingerprint { version, digest })
}

fn span_at(row: &Row, at: usize) -> Result<Duration, StoreError> {
    let us: i64 = column(row, at)?;
    Ok(Duration::from_micros(us.max(0) as u64))
}

/// Clamped, so that no sum of a few overflows a timestamp.
pub(super) fn micros(span: Duration) -> i64 {
    span.as_micros().min(u128::from(ENDLESS)) as i64
}

/// A fence that no row can have is given as the highest.
pub(super) fn fence(fence: Fence) -> i64 {
    i64::try_from(fence.0).unwrap_or(i64::MAX)
}

/// Text cannot hold a zero byte: people see its symbol instead.
pub(super) fn as_text(tag: &str) -> Cow<'_, str> {
    if tag.contains('\0') { Cow::Owned(tag.replace('\0', "\u{2400}")) } else { Cow::Borrowed(tag) }
}

/// The exact form of tags that would not come back the same from their columns.
fn beyond_text(tags: &Tags) -> Option<&[u8]> {
    let parts = [tags.tenant(), tags.user(), tags.endpoint(), tags.key(), tags.key_hash()];
    let is_lost = parts.iter().any(|part| part.contains('\0')) || (parts == [""; 5] && !tags.as_bytes().is_empty());
    is_lost.then(|| &tags.as_bytes()[..])
}
