//! The outcome of a claim in a transaction.

use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use ibid::{
    record::{Record, RecordBody, RecordError},
    store::{Fence, Fingerprint},
};

use crate::driver::{DriverError, SqlRow};

macro_rules! outcome_sql {
    ($function:literal) => {
        concat!(
            "SELECT c.locked, c.is_ours, (c.answer).found, (c.answer).fence, (c.answer).fingerprint_version, ",
            "(c.answer).fingerprint, (c.answer).takeover_in_us, (c.answer).record, (c.answer).status, ",
            "(c.answer).header_names, (c.answer).header_values, (c.answer).body, (c.answer).requested_ms, ",
            "(c.answer).completed_ms FROM ibid.",
            $function,
            " c"
        )
    };
}

/// The columns are in the order in which [`TxClaimOutcome::read`] reads them.
pub(crate) const CLAIM_SQL: &str = outcome_sql!("_run_claim($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)");
pub(crate) const LOOK_SQL: &str = outcome_sql!("_run_look($1, $2, $3)");

#[derive(Debug)]
pub(crate) enum TxClaimOutcome {
    /// This transaction runs the operation.
    Granted(Fence),
    /// Nobody is there: a claim would be granted.
    Vacant,
    /// An unfinished transaction holds the address's lock.
    Locked,
    /// A gateway or layer holds the claim.
    Busy(Fingerprint),
    /// A holder started, and its outcome is unknown.
    OutcomeUnknown { fence: Fence, fingerprint: Fingerprint, takeover_in: Duration },
    /// Completed, with this answer, unless it cannot be decoded.
    /// `is_ours`: by this call's token.
    Done { is_ours: bool, fingerprint: Fingerprint, answer: Result<Box<Record>, RecordError> },
    /// The token was released or forgotten.
    TokenSpent,
}

impl TxClaimOutcome {
    pub(crate) fn read(row: &SqlRow) -> Result<Self, DriverError> {
        if row.boolean(0)?.unwrap_or(false) {
            return Ok(Self::Locked);
        }
        let Some(found) = row.smallint(2)? else { return Ok(Self::Vacant) };
        if found == 5 {
            return Ok(Self::TokenSpent);
        }
        let fence = SqlRow::require(row.bigint(3)?, "the fence")?;
        let fence = Fence(u64::try_from(fence).map_err(|_| DriverError::unreadable(format!("the fence is {fence}")))?);
        Ok(match found {
            1 => Self::Granted(fence),
            2 => Self::Busy(read_fingerprint(row)?),
            3 => {
                let us = row.bigint(6)?.unwrap_or(0).max(0) as u64;
                Self::OutcomeUnknown {
                    fence,
                    fingerprint: read_fingerprint(row)?,
                    takeover_in: Duration::from_micros(us),
                }
            }
            4 => Self::Done {
                is_ours: row.boolean(1)?.unwrap_or(false),
                fingerprint: read_fingerprint(row)?,
                answer: read_stored_answer(row)?,
            },
            other => {
                return Err(DriverError::unreadable(format!("a claim was answered with {other}, which means nothing")));
            }
        })
    }
}

fn read_fingerprint(row: &SqlRow) -> Result<Fingerprint, DriverError> {
    let version = SqlRow::require(row.smallint(4)?, "the fingerprint's version")?;
    let version = u8::try_from(version).map_err(|_| DriverError::unreadable("the fingerprint's version is none"))?;
    let digest = SqlRow::require(row.bytea(5)?, "the fingerprint")?;
    let digest = digest[..].try_into().map_err(|_| DriverError::unreadable("the fingerprint is not 32 bytes long"))?;
    Ok(Fingerprint { version, digest })
}

/// Reads an answer that a gateway encoded, or that the SQL functions wrote as columns.
fn read_stored_answer(row: &SqlRow) -> Result<Result<Box<Record>, RecordError>, DriverError> {
    if let Some(record) = row.bytea(7)? {
        return Ok(Record::decode(record).map(Box::new));
    }
    let status = row.integer(8)?.and_then(|status| StatusCode::from_u16(u16::try_from(status).ok()?).ok());
    let status = SqlRow::require(status, "the status of an answer without a record")?;
    let mut headers = HeaderMap::new();
    for (name, value) in row.texts(9)?.unwrap_or_default().iter().zip(row.texts(10)?.unwrap_or_default()) {
        let pair = HeaderName::from_bytes(name.as_bytes()).ok().zip(HeaderValue::from_str(&value).ok());
        let (name, value) = pair.ok_or_else(|| DriverError::unreadable(format!("its header {name:?} is none")))?;
        headers.append(name, value);
    }
    let ms = |at| row.bigint(at).map(|ms| ms.unwrap_or(0).max(0) as u64);
    Ok(Ok(Box::new(Record {
        status,
        requested_at_ms: ms(12)?,
        completed_at_ms: ms(13)?,
        headers,
        body: row.bytea(11)?.map_or(RecordBody::None, RecordBody::Whole),
        trailers: HeaderMap::new(),
        cookies: Vec::new(),
    })))
}
