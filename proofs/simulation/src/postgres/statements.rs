//! What the client's statements do, on the contract's reference store.
//!
//! The schema's functions are tested on real servers; here they are what the contract says. Parameters and columns are those
//! of the client (`crates/ibid-stores/src/postgres/`).

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use ibid::store::{
    Address, ClaimOutcome, ClaimRequest, ClaimToken, Fence, Fingerprint, Holder, Lease, RecordSummary, SettleOutcome,
    Settlement, Tags,
};
use ibid_testkit::model::ReferenceStore;

use super::wire::{
    SqlType::{self, Bool, Bytea, Int2, Int4, Int8, Text, TextArray},
    SqlValue, array_elements, bool, int2, int4, int8, number,
};

/// Parameters of a set-based claim, of a completion, and of a lease.
const CLAIM_PARAMS: usize = 13;
const COMPLETE_PARAMS: usize = 10;
const LEASE_PARAMS: usize = 16;

/// What a statement works on.
pub(super) struct StatementContext<'a> {
    pub(super) contents: &'a mut ReferenceStore,
    pub(super) next_fence: &'a mut u64,
    /// New rows are refused.
    pub(super) is_full: bool,
}

/// An SQLSTATE: the statement is rolled back.
pub(super) type SqlState = &'static str;
pub(super) const DISK_FULL: SqlState = "53100";

/// Which statement a text is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KnownStatement {
    Check,
    Versions,
    Claim,
    Complete,
    /// Both in one.
    ClaimAndComplete,
    ClaimOneByOne,
    SettleOneByOne,
    Get,
    Sweep,
}

impl KnownStatement {
    /// # Panics
    /// If the simulation does not know the statement.
    pub(super) fn of(sql: &str) -> Self {
        let (inserts, updates) =
            (sql.contains("INSERT INTO ibid.idempotency_keys"), sql.contains("UPDATE ibid.idempotency_keys"));
        match () {
            () if sql.contains("server_version_num") => Self::Check,
            () if sql.contains("ibid.migrations") => Self::Versions,
            () if inserts && updates => Self::ClaimAndComplete,
            () if inserts => Self::Claim,
            () if updates => Self::Complete,
            () if sql.contains("ibid._claim_many(") => Self::ClaimOneByOne,
            () if sql.contains("ibid._settle_many(") => Self::SettleOneByOne,
            () if sql.contains("ibid._get(") => Self::Get,
            () if sql.contains("ibid._sweep_all(") => Self::Sweep,
            () => panic!("{sql} is not simulated"),
        }
    }

    pub(super) fn columns(self) -> &'static [SqlType] {
        match self {
            Self::Check => &[Int4, Text, Text, Text, Bool, Text, Text, Bool, Bool, Text, Bool, Int8],
            Self::Versions => &[Int4, Int4],
            Self::Claim | Self::ClaimAndComplete => &[Int4, Bytea, Int8, Int4, Int2, Bytea, Int8, Bool, Bytea],
            Self::Complete => &[Int4],
            Self::ClaimOneByOne | Self::SettleOneByOne | Self::Get => &[
                Int4, Int2, Int2, Int8, Int4, Int2, Bytea, Int8, Int8, Int8, Bool, Bytea, Int4, TextArray, TextArray,
                Bytea, Int8, Int8,
            ],
            Self::Sweep => &[Int4, Int4, Bool],
        }
    }

    /// Whether it changes something.
    pub(super) fn writes(self) -> bool {
        !matches!(self, Self::Check | Self::Versions | Self::Get)
    }

    pub(super) fn run(
        self, context: &mut StatementContext<'_>, params: &[SqlValue],
    ) -> Result<Vec<Vec<SqlValue>>, SqlState> {
        match self {
            Self::Check => Ok(vec![healthy_settings()]),
            // Later than every client, which it lets in.
            Self::Versions => Ok(vec![vec![int4(1_000), int4(0)]]),
            Self::Claim => context.claim(params),
            Self::Complete => Ok(context.complete(params).map(|nth| vec![int4(nth)]).collect()),
            Self::ClaimAndComplete => {
                let mut rows = context.claim(&params[..CLAIM_PARAMS])?;
                let completed = context.complete(&params[CLAIM_PARAMS..]);
                rows.extend(completed.map(|nth| [vec![int4(-nth)], vec![None; 8]].concat()));
                Ok(rows)
            }
            Self::ClaimOneByOne => context.claim_one_by_one(params),
            Self::SettleOneByOne => Ok(context.settle_one_by_one(params)),
            Self::Get => {
                let found = context.contents.get(&address(&params[0]));
                Ok(vec![outcome_row(1, None, found.as_ref())])
            }
            Self::Sweep => Ok(vec![vec![int4(0), int4(0), bool(false)]]),
        }
    }
}

impl StatementContext<'_> {
    /// Makes new rows and finds completed ones. Everything else is left.
    fn claim(&mut self, params: &[SqlValue]) -> Result<Vec<Vec<SqlValue>>, SqlState> {
        let mut rows = Vec::new();
        for (nth, lease) in (1..).zip(leases(params)) {
            let (request, fence) = (lease.request, Fence(*self.next_fence));
            let before = self.contents.clone();
            match self.contents.claim(&request, fence) {
                ClaimOutcome::Granted(lease) if lease.fence == fence && lease.attempt == 1 => {
                    if self.is_full {
                        return Err(DISK_FULL);
                    }
                    *self.next_fence += 1;
                    let token = Some(Bytes::copy_from_slice(&request.token.0));
                    rows.push([vec![None, token, int8(fence.0 as i64)], vec![None; 6]].concat());
                }
                found @ ClaimOutcome::Completed(_) => {
                    let all = outcome_row(nth, None, Some(&found));
                    let [fence, attempt, version, digest] = [3, 4, 5, 6].map(|at: usize| all[at].clone());
                    let [expires_in, failed, record] = [9, 10, 11].map(|at: usize| all[at].clone());
                    rows.push(vec![int4(nth), None, fence, attempt, version, digest, expires_in, failed, record]);
                }
                _ => *self.contents = before,
            }
        }
        Ok(rows)
    }

    /// Completes claims that run. Returns their numbers.
    fn complete(&mut self, params: &[SqlValue]) -> impl Iterator<Item = i32> {
        let columns: Vec<Vec<SqlValue>> = params[..COMPLETE_PARAMS].iter().map(array_elements).collect();
        let mut completed = Vec::new();
        for (at, held_address) in columns[0].iter().enumerate() {
            let of = |column: usize| &columns[column][at];
            let lease = held_lease(address(held_address), of(1), Fence(number(of(2)) as u64));
            let is_running = matches!(self.contents.get(&lease.request.address),
                Some(ClaimOutcome::InProgress(holder)) if holder.fence == lease.fence);
            let end = completion(number(of(3)) != 0, of(4), number(of(9)));
            if is_running && self.contents.settle(&lease, &end) == SettleOutcome::Applied {
                completed.push(at as i32 + 1);
            }
        }
        completed.into_iter()
    }

    fn claim_one_by_one(&mut self, params: &[SqlValue]) -> Result<Vec<Vec<SqlValue>>, SqlState> {
        let mut rows = Vec::new();
        for (nth, lease) in (1..).zip(leases(params)) {
            let fence = Fence(*self.next_fence);
            let outcome = self.contents.claim(&lease.request, fence);
            if matches!(&outcome, ClaimOutcome::Granted(lease) if lease.fence == fence) {
                if self.is_full {
                    return Err(DISK_FULL);
                }
                *self.next_fence += 1;
            }
            rows.push(outcome_row(nth, None, Some(&outcome)));
        }
        Ok(rows)
    }

    fn settle_one_by_one(&mut self, params: &[SqlValue]) -> Vec<Vec<SqlValue>> {
        let ends: Vec<Vec<SqlValue>> = params[LEASE_PARAMS..].iter().map(array_elements).collect();
        let mut rows = Vec::new();
        for (at, lease) in leases(params).into_iter().enumerate() {
            let of = |column: usize| &ends[column][at];
            let (ttl, retry_in) = (micros(of(7)), micros(of(8)));
            let outcome = match number(of(0)) {
                0 => self.contents.settle(&lease, &completion(number(of(1)) != 0, of(2), number(of(7)))),
                1 => self.contents.settle(&lease, &Settlement::Release),
                2 => self.contents.settle(&lease, &Settlement::Park { ttl, retry_in }),
                _ => self.contents.extend(&lease, ttl),
            };
            let nth = at as i32 + 1;
            rows.push(match &outcome {
                SettleOutcome::Applied => outcome_row(nth, Some(0), None),
                SettleOutcome::Restored => outcome_row(nth, Some(1), None),
                SettleOutcome::ClaimLost(found) => outcome_row(nth, Some(2), Some(found)),
            });
        }
        rows
    }
}

/// Reads leases from parameters: all, or those of a claim.
fn leases(params: &[SqlValue]) -> Vec<Lease> {
    let columns: Vec<Vec<SqlValue>> = params.iter().take(LEASE_PARAMS).map(array_elements).collect();
    let lease = |at: usize| {
        let of = |column: usize| columns.get(column).and_then(|column| column[at].clone());
        let fixed = |column: usize| of(column).expect("a value");
        let request = ClaimRequest {
            address: address(&of(0)),
            token: ClaimToken(fixed(1)[..].try_into().expect("16 bytes")),
            fingerprint: Fingerprint {
                version: number(&of(2)) as u8,
                digest: fixed(3)[..].try_into().expect("32 bytes"),
            },
            tags: Tags::default(),
            label: fixed(10),
            lease: micros(&of(11)),
            ttl: micros(&of(12)),
            take_over: of(13).map(|fence| Fence(number(&Some(fence)) as u64)),
        };
        let numbered = |column: usize| of(column).map_or(0, |value| number(&Some(value)) as u64);
        Lease {
            request: Arc::new(request),
            fence: Fence(numbered(14)),
            attempt: numbered(15) as u32,
            front_only: false,
        }
    };
    (0..columns[0].len()).map(lease).collect()
}

/// The lease of a holder that is known to be there: only who it is matters.
fn held_lease(address: Address, token: &SqlValue, fence: Fence) -> Lease {
    let request = ClaimRequest {
        address,
        token: ClaimToken(token.as_deref().expect("a token").try_into().expect("16 bytes")),
        fingerprint: Fingerprint::NONE,
        tags: Tags::default(),
        label: Bytes::new(),
        lease: Duration::ZERO,
        ttl: Duration::ZERO,
        take_over: None,
    };
    Lease { request: Arc::new(request), fence, attempt: 1, front_only: false }
}

fn address(value: &SqlValue) -> Address {
    Address(value.as_deref().expect("an address").try_into().expect("32 bytes"))
}

fn micros(value: &SqlValue) -> Duration {
    Duration::from_micros(number(value) as u64)
}

fn completion(failed: bool, record: &SqlValue, ttl: i64) -> Settlement {
    Settlement::Complete {
        failed,
        record: record.clone().expect("a record"),
        summary: RecordSummary::default(),
        ttl: Duration::from_micros(ttl as u64),
    }
}

/// A row of the functions: number, settle code, and what was found.
fn outcome_row(nth: i32, settle_code: Option<i16>, found: Option<&ClaimOutcome>) -> Vec<SqlValue> {
    let mut row = vec![None; KnownStatement::Get.columns().len()];
    row[0] = int4(nth);
    row[1] = settle_code.and_then(int2);
    let micros = |duration: Duration| int8(duration.as_micros() as i64);
    let identity = |row: &mut [SqlValue], fence: Fence, attempt: u32, fingerprint: Option<&Fingerprint>| {
        row[3] = int8(fence.0 as i64);
        row[4] = int4(attempt as i32);
        row[5] = fingerprint.and_then(|fingerprint| int2(fingerprint.version.into()));
        row[6] = fingerprint.map(|fingerprint| Bytes::copy_from_slice(&fingerprint.digest));
    };
    let holder = |row: &mut [SqlValue], holder: &Holder| {
        identity(row, holder.fence, holder.attempt, Some(&holder.fingerprint));
        (row[7], row[8]) = (micros(holder.age), micros(holder.takeover_in));
    };
    row[2] = int2(match found {
        None => 0,
        Some(ClaimOutcome::Granted(lease)) => {
            identity(&mut row, lease.fence, lease.attempt, None);
            1
        }
        Some(ClaimOutcome::InProgress(one)) => {
            holder(&mut row, one);
            2
        }
        Some(ClaimOutcome::OutcomeUnknown(one)) => {
            holder(&mut row, one);
            3
        }
        Some(ClaimOutcome::Completed(entry)) => {
            identity(&mut row, entry.fence, entry.attempt, Some(&entry.fingerprint));
            (row[9], row[10], row[11]) = (micros(entry.expires_in), bool(entry.failed), Some(entry.record.clone()));
            4
        }
        Some(ClaimOutcome::TokenSpent) => 5,
    });
    row
}

/// What a server without any weakness answers to the client's checks.
fn healthy_settings() -> Vec<SqlValue> {
    let text = |text: &'static str| Some(Bytes::from_static(text.as_bytes()));
    vec![
        int4(170_000),
        text("on"),
        text("on"),
        text("on"),
        bool(false),
        text("off"),
        text("read committed"),
        bool(false),
        bool(false),
        text("ibid"),
        bool(true),
        int8(1),
    ]
}
