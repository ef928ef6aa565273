//! The frequent statements: prepared once per connection, or sent with their parameter types each time.
//!
//! Almost every call is one of a batch in [`Statement::Claim`], [`Statement::Complete`], or both at once: plain SQL over
//! arrays, always by the primary key, in the order of the addresses. Those leave what is special to the functions of the
//! schema.

use std::sync::LazyLock;

use tokio_postgres::types::Type;

use super::rows::{COMPLETE_TYPES, LEASE_TYPES, SETTLEMENT_TYPES};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Statement {
    Replay,
    Claim,
    Complete,
    ClaimAndComplete,
    ClaimOneByOne,
    SettleOneByOne,
    Get,
    Change,
    Watch,
    Sweep,
}

pub(super) const ALL_STATEMENTS: [Statement; 10] = [
    Statement::Replay,
    Statement::Claim,
    Statement::Complete,
    Statement::ClaimAndComplete,
    Statement::ClaimOneByOne,
    Statement::SettleOneByOne,
    Statement::Get,
    Statement::Change,
    Statement::Watch,
    Statement::Sweep,
];

/// The number and the answer of the addresses that are completed, as [`CLAIM_SQL`] returns them.
const REPLAY_SQL: &str = "SELECT u.nth::integer, NULL::bytea, k.fence, k.attempt, k.fingerprint_version, k.fingerprint,
    (date_part('epoch', k.expires_at - statement_timestamp()) * 1000000)::bigint, k.state = 'failed', k.record
FROM unnest($1) WITH ORDINALITY AS u(address, nth) JOIN ibid.idempotency_keys k ON k.address = u.address
WHERE k.state IN ('done', 'failed') AND k.expires_at > statement_timestamp() AND k.record IS NOT NULL AND k.spent IS NULL";

/// Makes the rows of new addresses, and returns their tokens and fences; returns the number and the answer of those that
/// are completed. A row that another transaction is about to make is waited for, not for long. All fences are the same:
/// they must be unique per address only. `meta` is read once, at the snapshot in which the addresses were looked up.
const CLAIM_SQL: &str = "WITH asked AS MATERIALIZED (
    SELECT u.*, k.fence AS found, k.attempt AS found_attempt, k.fingerprint_version AS found_version,
        k.fingerprint AS found_fingerprint, k.expires_at, k.state = 'failed' AS failed, k.record,
        k.state IN ('done', 'failed') AND k.expires_at > statement_timestamp() AND k.record IS NOT NULL
            AND k.spent IS NULL AS is_completed
    FROM unnest($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13) WITH ORDINALITY AS u(address, token, version,
        fingerprint, tenant, user_id, endpoint, key, key_hash, tags, label, hold, keep, nth)
    LEFT JOIN ibid.idempotency_keys k ON k.address = u.address
), new AS (
    INSERT INTO ibid.idempotency_keys (address, state, tenant, user_id, endpoint, key, key_hash, tags, label, attempt,
        fence, token, fingerprint_version, fingerprint, claimed_at, lease_until, expires_at, sweep_at, hold_us, keep_us)
    SELECT a.address, 'processing', a.tenant, a.user_id, a.endpoint, a.key, a.key_hash, a.tags, a.label, 1, m.fence,
        a.token, a.version, a.fingerprint, m.at, m.at + a.hold * interval '1 microsecond',
        m.at + (a.hold + a.keep) * interval '1 microsecond', m.at + (a.hold + a.keep) * interval '1 microsecond', a.hold,
        a.keep
    FROM (SELECT statement_timestamp() AS at, set_config('lock_timeout', '50ms', true),
              greatest((extract(epoch FROM statement_timestamp()) * 1000000)::bigint, m.fence_high + 1) AS fence
          FROM ibid.meta m OFFSET 0) m, asked a
    WHERE a.found IS NULL
    ON CONFLICT DO NOTHING
    RETURNING token, fence
)
SELECT NULL::integer, n.token, n.fence, NULL::integer, NULL::smallint, NULL::bytea, NULL::bigint, NULL::boolean, NULL::bytea
FROM new n
UNION ALL
SELECT a.nth::integer, NULL, a.found, a.found_attempt, a.found_version, a.found_fingerprint,
    (extract(epoch FROM a.expires_at - statement_timestamp()) * 1000000)::bigint, a.failed, a.record
FROM asked a WHERE a.is_completed";

/// Number of parameters of [`CLAIM_SQL`]. A claim has no fence and no attempt yet, and one that takes over finds a row.
pub(super) const CLAIM_PARAMS: usize = 13;

/// Completes claims that run, and that nobody waits for. Returns their numbers. `before`: the number of parameters before its
/// own.
fn complete_sql(before: usize) -> String {
    let params: Vec<String> = (1..=COMPLETE_TYPES.len()).map(|nth| format!("${}", before + nth)).collect();
    format!(
        "UPDATE ibid.idempotency_keys k SET
    state = CASE WHEN u.failed THEN 'failed' ELSE 'done' END, record = u.record, status = u.status,
    requested_at = timestamptz 'epoch' + u.requested_ms * interval '1 millisecond',
    completed_at = timestamptz 'epoch' + u.completed_ms * interval '1 millisecond',
    took = u.took * interval '1 microsecond',
    expires_at = statement_timestamp() + u.keep * interval '1 microsecond',
    sweep_at = CASE WHEN statement_timestamp() + (u.keep + u.keep / 8) * interval '1 microsecond' < k.sweep_at
        THEN statement_timestamp() + u.keep * interval '1 microsecond' ELSE k.sweep_at END
FROM set_config('lock_timeout', '50ms', true),
    unnest({}) WITH ORDINALITY
        AS u(address, token, fence, failed, record, status, requested_ms, completed_ms, took, keep, nth)
WHERE k.address = u.address AND k.token = u.token AND k.fence = u.fence AND k.state = 'processing'
    AND k.expires_at > statement_timestamp() AND k.spent IS NULL AND NOT k.waited
RETURNING u.nth::integer",
        params.join(", ")
    )
}

/// Both at once, in one transaction and so with one flush. A completed claim is a row with its number negated. Neither sees
/// what the other does: a claim of an address that is completed here is left.
fn claim_and_complete_sql() -> String {
    let claim = CLAIM_SQL.replacen("WITH", &format!("WITH ended AS ({}),", complete_sql(CLAIM_PARAMS)), 1);
    format!("{claim}\nUNION ALL\nSELECT -e.nth, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL FROM ended e")
}

/// Text and parameter types, in the order of [`ALL_STATEMENTS`].
static STATEMENTS: LazyLock<[(String, Vec<Type>); 10]> = LazyLock::new(|| {
    ALL_STATEMENTS.map(|statement| {
        let one = format!("1, {}", answer_columns("a"));
        let many = format!("a.nth, {}", answer_columns("a.answer"));
        let arrays = |types: &[Type]| types.iter().map(array_of).collect();
        let (types, columns, function): (Vec<Type>, _, _) = match statement {
            Statement::Replay => return (REPLAY_SQL.into(), vec![Type::BYTEA_ARRAY]),
            Statement::Claim => return (CLAIM_SQL.into(), arrays(&LEASE_TYPES[..CLAIM_PARAMS])),
            Statement::Complete => return (complete_sql(0), arrays(COMPLETE_TYPES)),
            Statement::ClaimAndComplete => {
                let types = [&LEASE_TYPES[..CLAIM_PARAMS], COMPLETE_TYPES].concat();
                return (claim_and_complete_sql(), arrays(&types));
            }
            Statement::ClaimOneByOne => (arrays(&LEASE_TYPES[..14]), many, "_claim_many"),
            Statement::SettleOneByOne => (arrays(&[LEASE_TYPES, SETTLEMENT_TYPES].concat()), many, "_settle_many"),
            Statement::Get => (vec![Type::BYTEA], one, "_get"),
            Statement::Change => ([&[Type::BYTEA, Type::INT8], SETTLEMENT_TYPES].concat(), one, "_change"),
            Statement::Watch => {
                (vec![Type::BYTEA_ARRAY, Type::INT8_ARRAY, Type::BOOL], "a.nth, a.runs_us".into(), "_watch_many")
            }
            Statement::Sweep => (vec![Type::INT4], "a.removed, a.lapsed, a.more".into(), "_sweep_all"),
        };
        let params: Vec<String> = (1..=types.len()).map(|nth| format!("${nth}")).collect();
        let sql = format!("SELECT {columns} FROM ibid.{function}({}) a", params.join(", "));
        (sql, types)
    })
});

fn array_of(element: &Type) -> Type {
    match *element {
        Type::BYTEA => Type::BYTEA_ARRAY,
        Type::TEXT => Type::TEXT_ARRAY,
        Type::BOOL => Type::BOOL_ARRAY,
        Type::INT2 => Type::INT2_ARRAY,
        Type::INT4 => Type::INT4_ARRAY,
        _ => Type::INT8_ARRAY,
    }
}

/// The columns of a result, after `nth`.
fn answer_columns(of: &str) -> String {
    let names = "held found fence attempt fingerprint_version fingerprint age_us takeover_in_us expires_in_us failed \
                 record status header_names header_values body requested_ms completed_ms";
    let columns: Vec<String> = names.split(' ').map(|name| format!("({of}).{name}")).collect();
    columns.join(", ")
}

impl Statement {
    pub(super) fn sql(self) -> &'static str {
        &STATEMENTS[self as usize].0
    }

    pub(super) fn param_types(self) -> &'static [Type] {
        &STATEMENTS[self as usize].1
    }

    /// Whether the statement changes nothing that callers can see.
    pub(super) fn is_read_only(self) -> bool {
        matches!(self, Self::Replay | Self::Get | Self::Watch)
    }
}
