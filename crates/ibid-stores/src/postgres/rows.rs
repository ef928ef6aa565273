//! Maps between the contract's types and the table's columns.

use std::borrow::Cow;

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use ibid::{
    record::{Record, RecordBody},
    store::{CompletedEntry, EntryInfo, Fingerprint, Holder, RecordSummary, Tags},
};
use tokio_postgres::types::FromSql;

use super::*;

/// Maximum duration: ten thousand years, in microseconds. The sum of two still fits a timestamp.
const MAX_DURATION_US: u64 = 315_576_000_000_000_000;

#[derive(Debug, Clone)]
pub(super) enum RowOperation {
    Claim,
    Extend(Duration),
    Settle(Settlement),
}

/// The result of a call: the settle code, and the entry found.
#[derive(Debug)]
pub(super) struct RowOutcome {
    pub(super) settle_code: i16,
    pub(super) outcome: Option<ClaimOutcome>,
}

impl RowOutcome {
    pub(super) fn into_claim_outcome(self) -> Result<ClaimOutcome, StoreError> {
        self.outcome.ok_or_else(|| corrupt_row("a claim was answered with nothing"))
    }

    pub(super) fn into_settle_outcome(self) -> Result<SettleOutcome, StoreError> {
        match (self.settle_code, self.outcome) {
            (0, _) => Ok(SettleOutcome::Applied),
            (1, _) => Ok(SettleOutcome::Restored),
            (2, Some(found)) => Ok(SettleOutcome::ClaimLost(Box::new(found))),
            (held, found) => Err(corrupt_row(format!("a holder was answered with {held} and {found:?}"))),
        }
    }
}

/// Defines parameters of the SQL functions, in their order: for each its name, Rust type, SQL type and value. A call for
/// many leases has an array of each.
macro_rules! parameters {
    ($types:ident, $arrays:ident($from:ident: $source:ty) {
        $($name:ident: $type:ty, $sql:ident = $value:expr;)*
    }) => {
        pub(super) static $types: &[Type] = &[$(Type::$sql),*];

        /// Parameters of one call for many leases.
        #[derive(Default)]
        pub(super) struct $arrays<'a> {
            $($name: Vec<$type>,)*
        }

        impl<'a> $arrays<'a> {
            pub(super) fn push(&mut self, $from: $source) {
                $(self.$name.push($value);)*
            }

            pub(super) fn params(&self) -> Vec<&(dyn ToSql + Sync)> {
                vec![$(&self.$name),*]
            }
        }
    };
}

parameters!(LEASE_TYPES, LeaseColumns(lease: &'a Lease) {
    addresses: &'a [u8], BYTEA = &lease.request.address.0;
    tokens: &'a [u8], BYTEA = &lease.request.token.0;
    versions: i16, INT2 = lease.request.fingerprint.version.into();
    fingerprints: &'a [u8], BYTEA = &lease.request.fingerprint.digest;
    tenants: Cow<'a, str>, TEXT = postgres_text(lease.request.tags.tenant());
    users: Cow<'a, str>, TEXT = postgres_text(lease.request.tags.user());
    endpoints: Cow<'a, str>, TEXT = postgres_text(lease.request.tags.endpoint());
    keys: Cow<'a, str>, TEXT = postgres_text(lease.request.tags.key());
    key_hashes: Cow<'a, str>, TEXT = postgres_text(lease.request.tags.key_hash());
    tags: Option<&'a [u8]>, BYTEA = exact_tags(&lease.request.tags);
    labels: &'a [u8], BYTEA = &lease.request.label;
    leases: i64, INT8 = micros_param(lease.request.lease);
    ttls: i64, INT8 = micros_param(lease.request.ttl);
    take_overs: Option<i64>, INT8 = lease.request.take_over.map(fence_param);
    fences: i64, INT8 = fence_param(lease.fence);
    attempts: i32, INT4 = i32::try_from(lease.attempt).unwrap_or(i32::MAX);
});

parameters!(COMPLETE_TYPES, CompleteColumns(completed: (&'a Lease, SettlementParams<'a>)) {
    addresses: &'a [u8], BYTEA = &completed.0.request.address.0;
    tokens: &'a [u8], BYTEA = &completed.0.request.token.0;
    fences: i64, INT8 = fence_param(completed.0.fence);
    failed: bool, BOOL = completed.1.failed;
    records: Option<&'a [u8]>, BYTEA = completed.1.record;
    statuses: i32, INT4 = completed.1.status;
    requested_ms: i64, INT8 = completed.1.requested_ms;
    completed_ms: i64, INT8 = completed.1.completed_ms;
    durations: i64, INT8 = completed.1.duration;
    ttls: i64, INT8 = completed.1.ttl;
});

/// Defines the parameters of a settlement likewise. They are also those of a call for one entry.
macro_rules! settlement_parameters {
    ($($name:ident: $type:ty, $sql:ident;)*) => {
        #[derive(Default)]
        pub(super) struct SettlementParams<'a> {
            $(pub(super) $name: $type,)*
        }

        impl SettlementParams<'_> {
            pub(super) fn params(&self) -> Vec<&(dyn ToSql + Sync)> {
                vec![$(&self.$name),*]
            }
        }

        parameters!(SETTLEMENT_TYPES, SettlementColumns(end: SettlementParams<'a>) {
            $($name: $type, $sql = end.$name;)*
        });
    };
}

settlement_parameters! {
    kind: i16, INT2;
    failed: bool, BOOL;
    record: Option<&'a [u8]>, BYTEA;
    status: i32, INT4;
    requested_ms: i64, INT8;
    completed_ms: i64, INT8;
    duration: i64, INT8;
    ttl: i64, INT8;
    retry_in: i64, INT8;
}

impl<'a> SettlementParams<'a> {
    pub(super) fn new(end: &'a Settlement) -> Self {
        let ms = |ms: u64| ms.min(MAX_DURATION_US / 1000) as i64;
        match end {
            Settlement::Complete { failed, record, summary, ttl } => Self {
                kind: 0,
                failed: *failed,
                record: Some(record),
                status: summary.status.into(),
                requested_ms: ms(summary.requested_at_ms),
                completed_ms: ms(summary.completed_at_ms),
                duration: micros_param(summary.took),
                ttl: micros_param(*ttl),
                retry_in: 0,
            },
            Settlement::Release => Self { kind: 1, ..Self::default() },
            Settlement::Park { ttl, retry_in } => {
                Self { kind: 2, ttl: micros_param(*ttl), retry_in: micros_param(*retry_in), ..Self::default() }
            }
        }
    }

    pub(super) fn extend(hold: Duration) -> Self {
        Self { kind: 3, ttl: micros_param(hold), ..Self::default() }
    }
}

/// A row of `Statement::Claim` or `ClaimAndComplete`: the token of a new row with its fence, the number of a claim that finds
/// an answer, or the number of a completion that was applied.
pub(super) enum ClaimedRow<'a> {
    New(&'a [u8], Fence),
    Completed(usize, CompletedEntry),
    Settled(usize),
}

pub(super) fn read_claimed(row: &Row) -> Result<ClaimedRow<'_>, StoreError> {
    let nth = match column::<Option<i32>>(row, 0)? {
        None => return Ok(ClaimedRow::New(column(row, 1)?, fence_at(row, 2)?)),
        Some(nth) if nth < 0 => return Ok(ClaimedRow::Settled(index_of(nth.saturating_neg())?)),
        Some(nth) => index_of(nth)?,
    };
    let completed = CompletedEntry {
        fence: fence_at(row, 2)?,
        attempt: attempt_at(row, 3)?,
        fingerprint: fingerprint_at(row, 4)?,
        failed: column(row, 7)?,
        record: column::<Blob>(row, 8)?.0,
        expires_in: duration_at(row, 6)?,
        front_only: false,
    };
    Ok(ClaimedRow::Completed(nth, completed))
}

/// The number of a row of a batch, which counts from 1 in the first column.
pub(super) fn nth_at(row: &Row) -> Result<usize, StoreError> {
    index_of(column(row, 0)?)
}

fn index_of(nth: i32) -> Result<usize, StoreError> {
    usize::try_from(nth - 1).map_err(|_| corrupt_row(format!("a row of a batch has the number {nth}")))
}

/// Reads a `bytea` column with a single copy.
struct Blob(Bytes);

impl<'a> FromSql<'a> for Blob {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn std::error::Error + Sync + Send>> {
        Ok(Self(Bytes::copy_from_slice(raw)))
    }
    fn accepts(ty: &Type) -> bool {
        *ty == Type::BYTEA
    }
}

/// Reads a result row with the columns of `statements::answer_columns`. `ask` becomes the request of a granted lease.
pub(super) fn read_outcome(row: &Row, ask: Option<&Arc<ClaimRequest>>) -> Result<RowOutcome, StoreError> {
    let held: Option<i16> = column(row, 1)?;
    let found: Option<i16> = column(row, 2)?;
    let found = match found {
        None | Some(0) => None,
        Some(1) => {
            let ask = ask.ok_or_else(|| corrupt_row("something that claims nothing was granted a claim"))?;
            let (fence, attempt) = (fence_at(row, 3)?, attempt_at(row, 4)?);
            Some(ClaimOutcome::Granted(Lease { request: ask.clone(), fence, attempt, front_only: false }))
        }
        Some(2) => Some(ClaimOutcome::InProgress(read_holder(row)?)),
        Some(3) => Some(ClaimOutcome::OutcomeUnknown(read_holder(row)?)),
        Some(4) => Some(ClaimOutcome::Completed(read_completed(row)?)),
        Some(5) => Some(ClaimOutcome::TokenSpent),
        Some(other) => return Err(corrupt_row(format!("a call was answered with {other}, which means nothing"))),
    };
    Ok(RowOutcome { settle_code: held.unwrap_or(-1), outcome: found })
}

fn read_holder(row: &Row) -> Result<Holder, StoreError> {
    Ok(Holder {
        fence: fence_at(row, 3)?,
        attempt: attempt_at(row, 4)?,
        fingerprint: fingerprint_at(row, 5)?,
        age: duration_at(row, 7)?,
        takeover_in: duration_at(row, 8)?,
    })
}

fn read_completed(row: &Row) -> Result<CompletedEntry, StoreError> {
    let record: Option<Blob> = column(row, 11)?;
    let record = match record {
        Some(record) => record.0,
        None => assemble_record(row)?,
    };
    Ok(CompletedEntry {
        fence: fence_at(row, 3)?,
        attempt: attempt_at(row, 4)?,
        fingerprint: fingerprint_at(row, 5)?,
        failed: column(row, 10)?,
        record,
        expires_in: duration_at(row, 9)?,
        front_only: false,
    })
}

/// Builds a record from an answer that SQL functions wrote as status, headers and body.
fn assemble_record(row: &Row) -> Result<Bytes, StoreError> {
    let status: Option<i32> = column(row, 12)?;
    let status =
        status.and_then(|status| u16::try_from(status).ok()).and_then(|status| StatusCode::from_u16(status).ok());
    let status = status.ok_or_else(|| corrupt_row("a finished row has neither a record nor a status"))?;
    let names: Option<Vec<String>> = column(row, 13)?;
    let values: Option<Vec<Option<String>>> = column(row, 14)?;
    let mut headers = HeaderMap::new();
    for (name, value) in names.unwrap_or_default().iter().zip(values.unwrap_or_default()) {
        let pair = HeaderName::from_bytes(name.as_bytes()).ok();
        let pair = pair.zip(value.and_then(|value| HeaderValue::from_str(&value).ok()));
        let (name, value) = pair.ok_or_else(|| corrupt_row(format!("its header {name:?} is none")))?;
        headers.append(name, value);
    }
    let body: Option<Blob> = column(row, 15)?;
    let record = Record {
        status,
        requested_at_ms: count_or_zero_at(row, 16)?,
        completed_at_ms: count_or_zero_at(row, 17)?,
        headers,
        body: body.map_or(RecordBody::None, |body| RecordBody::Whole(body.0)),
        trailers: HeaderMap::new(),
        cookies: Vec::new(),
    };
    Ok(record.encode())
}

/// The columns of a listing, in the order in which [`read_entry_info`] reads them.
pub(super) const ENTRY_INFO_COLUMNS: &str = "k.address, k.state, k.fence, k.attempt, k.fingerprint_version, k.fingerprint, \
    k.tenant, k.user_id, k.endpoint, k.key, k.tags, k.label, \
    ibid._us(statement_timestamp() - k.claimed_at), ibid._us(k.expires_at - statement_timestamp()), \
    k.lease_until > statement_timestamp(), k.status, ibid._clock_us(k.requested_at) / 1000, \
    ibid._clock_us(k.completed_at) / 1000, ibid._us(k.took), k.key_hash";

pub(super) fn read_entry_info(row: &Row) -> Result<EntryInfo, StoreError> {
    let address: &[u8] = column(row, 0)?;
    let address = address.try_into().map_err(|_| corrupt_row("an address is not 32 bytes long"))?;
    let (state, is_live): (&str, bool) = (column(row, 1)?, column(row, 14)?);
    let state = match state {
        "processing" if is_live => EntryState::Processing,
        "processing" | "unknown" => EntryState::Unknown,
        "done" => EntryState::Done,
        "failed" => EntryState::Failed,
        other => return Err(corrupt_row(format!("its state is {other:?}"))),
    };
    let exact: Option<Blob> = column(row, 10)?;
    let parts: [&str; 5] = [column(row, 6)?, column(row, 7)?, column(row, 8)?, column(row, 9)?, column(row, 19)?];
    let tags = match exact {
        Some(exact) => Tags::from_bytes(exact.0).ok_or_else(|| corrupt_row("its tags are malformed"))?,
        None if parts == [""; 5] => Tags::default(),
        None => Tags::from_parts(parts),
    };
    let label: Blob = column(row, 11)?;
    let outline = match state {
        EntryState::Done | EntryState::Failed => Some(read_summary(row)?),
        EntryState::Processing | EntryState::Unknown => None,
    };
    Ok(EntryInfo {
        address: ibid::store::Address(address),
        state,
        fence: fence_at(row, 2)?,
        attempt: attempt_at(row, 3)?,
        fingerprint: fingerprint_at(row, 4)?,
        tags,
        label: label.0,
        age: duration_at(row, 12)?,
        expires_in: duration_at(row, 13)?,
        summary: outline,
    })
}

fn read_summary(row: &Row) -> Result<RecordSummary, StoreError> {
    let status: Option<i32> = column(row, 15)?;
    Ok(RecordSummary {
        status: status.and_then(|status| u16::try_from(status).ok()).unwrap_or(0),
        requested_at_ms: count_or_zero_at(row, 16)?,
        completed_at_ms: count_or_zero_at(row, 17)?,
        took: Duration::from_micros(count_or_zero_at(row, 18)?),
    })
}

pub(super) fn column<'a, T: FromSql<'a>>(row: &'a Row, at: usize) -> Result<T, StoreError> {
    row.try_get(at).map_err(|error| corrupt_row(error.to_string()))
}

fn corrupt_row(why: impl Into<String>) -> StoreError {
    store_error(ErrorKind::Corrupt, why)
}

fn fence_at(row: &Row, at: usize) -> Result<Fence, StoreError> {
    let fence: i64 = column(row, at)?;
    u64::try_from(fence).map(Fence).map_err(|_| corrupt_row(format!("its fence is {fence}")))
}

fn attempt_at(row: &Row, at: usize) -> Result<u32, StoreError> {
    let attempt: i32 = column(row, at)?;
    u32::try_from(attempt).map_err(|_| corrupt_row(format!("its attempt is {attempt}")))
}

fn fingerprint_at(row: &Row, at: usize) -> Result<Fingerprint, StoreError> {
    let (version, digest): (i16, &[u8]) = (column(row, at)?, column(row, at + 1)?);
    let version = u8::try_from(version).map_err(|_| corrupt_row(format!("its fingerprint is of version {version}")))?;
    let digest = digest.try_into().map_err(|_| corrupt_row("its fingerprint is not 32 bytes long"))?;
    Ok(Fingerprint { version, digest })
}

pub(super) fn count_at(row: &Row, at: usize) -> Result<u64, StoreError> {
    column::<i64>(row, at).map(|number| number.max(0) as u64)
}

fn count_or_zero_at(row: &Row, at: usize) -> Result<u64, StoreError> {
    column::<Option<i64>>(row, at).map(|number| number.unwrap_or(0).max(0) as u64)
}

fn duration_at(row: &Row, at: usize) -> Result<Duration, StoreError> {
    count_at(row, at).map(Duration::from_micros)
}

/// Clamps the duration, so that sums do not overflow a timestamp.
pub(super) fn micros_param(span: Duration) -> i64 {
    span.as_micros().min(u128::from(MAX_DURATION_US)) as i64
}

/// Maps a fence that no row can have to the highest value.
pub(super) fn fence_param(fence: Fence) -> i64 {
    i64::try_from(fence.0).unwrap_or(i64::MAX)
}

/// Replaces zero bytes, which PostgreSQL text cannot contain, with a visible symbol.
pub(super) fn postgres_text(tag: &str) -> Cow<'_, str> {
    if tag.contains('\0') { Cow::Owned(tag.replace('\0', "\u{2400}")) } else { Cow::Borrowed(tag) }
}

/// Returns the exact form of tags that their text columns cannot represent.
fn exact_tags(tags: &Tags) -> Option<&[u8]> {
    let parts = [tags.tenant(), tags.user(), tags.endpoint(), tags.key(), tags.key_hash()];
    let is_lost = parts.iter().any(|part| part.contains('\0')) || (parts == [""; 5] && !tags.as_bytes().is_empty());
    is_lost.then(|| &tags.as_bytes()[..])
}
