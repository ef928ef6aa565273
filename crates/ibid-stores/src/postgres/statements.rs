//! The frequent statements: prepared once per connection, or sent with their parameter types each time.

use tokio_postgres::types::Type;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Statement {
    Claim,
    Settle,
    Get,
    Change,
    Watch,
    Sweep,
}

pub(super) const ALL_STATEMENTS: [Statement; 6] =
    [Statement::Claim, Statement::Settle, Statement::Get, Statement::Change, Statement::Watch, Statement::Sweep];

/// The columns of a result, after `nth`.
macro_rules! answer {
    ($of:literal) => {
        concat!(
            "(",
            $of,
            ").held, (",
            $of,
            ").found, (",
            $of,
            ").fence, (",
            $of,
            ").attempt, (",
            $of,
            ").fingerprint_version, (",
            $of,
            ").fingerprint, (",
            $of,
            ").age_us, (",
            $of,
            ").takeover_in_us, (",
            $of,
            ").expires_in_us, (",
            $of,
            ").failed, (",
            $of,
            ").record, (",
            $of,
            ").status, (",
            $of,
            ").header_names, (",
            $of,
            ").header_values, (",
            $of,
            ").body, (",
            $of,
            ").requested_ms, (",
            $of,
            ").completed_ms"
        )
    };
}

impl Statement {
    pub(super) fn sql(self) -> &'static str {
        match self {
            Self::Claim => concat!(
                "SELECT a.nth, ",
                answer!("a.answer"),
                " FROM ibid._claim_many($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14) a"
            ),
            Self::Settle => concat!(
                "SELECT a.nth, ",
                answer!("a.answer"),
                " FROM ibid._settle_many($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, ",
                "$18, $19, $20, $21, $22, $23, $24, $25) a"
            ),
            Self::Get => concat!("SELECT 1, ", answer!("a"), " FROM ibid._get($1) a"),
            Self::Change => {
                concat!(
                    "SELECT 1, ",
                    answer!("a"),
                    " FROM ibid._change($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11) a"
                )
            }
            Self::Watch => "SELECT w.nth, w.runs_us FROM ibid._watch_many($1, $2, $3) w",
            Self::Sweep => "SELECT s.removed, s.lapsed, s.more FROM ibid._sweep_all($1) s",
        }
    }

    pub(super) fn param_types(self) -> &'static [Type] {
        match self {
            Self::Claim => &SETTLE_TYPES[..14],
            Self::Settle => &SETTLE_TYPES,
            Self::Get => &CHANGE_TYPES[..1],
            Self::Change => &CHANGE_TYPES,
            Self::Watch => &WATCH_TYPES,
            Self::Sweep => &CHANGE_TYPES[5..6],
        }
    }

    /// Whether the statement changes nothing that callers can see.
    pub(super) fn is_read_only(self) -> bool {
        matches!(self, Self::Get | Self::Watch)
    }
}

static SETTLE_TYPES: [Type; 25] = [
    Type::BYTEA_ARRAY,
    Type::BYTEA_ARRAY,
    Type::INT2_ARRAY,
    Type::BYTEA_ARRAY,
    Type::TEXT_ARRAY,
    Type::TEXT_ARRAY,
    Type::TEXT_ARRAY,
    Type::TEXT_ARRAY,
    Type::TEXT_ARRAY,
    Type::BYTEA_ARRAY,
    Type::BYTEA_ARRAY,
    Type::INT8_ARRAY,
    Type::INT8_ARRAY,
    Type::INT8_ARRAY,
    Type::INT8_ARRAY,
    Type::INT4_ARRAY,
    Type::INT2_ARRAY,
    Type::BOOL_ARRAY,
    Type::BYTEA_ARRAY,
    Type::INT4_ARRAY,
    Type::INT8_ARRAY,
    Type::INT8_ARRAY,
    Type::INT8_ARRAY,
    Type::INT8_ARRAY,
    Type::INT8_ARRAY,
];

static CHANGE_TYPES: [Type; 11] = [
    Type::BYTEA,
    Type::INT8,
    Type::INT2,
    Type::BOOL,
    Type::BYTEA,
    Type::INT4,
    Type::INT8,
    Type::INT8,
    Type::INT8,
    Type::INT8,
    Type::INT8,
];

static WATCH_TYPES: [Type; 3] = [Type::BYTEA_ARRAY, Type::INT8_ARRAY, Type::BOOL];
