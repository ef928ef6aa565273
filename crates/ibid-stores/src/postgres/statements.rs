//! The frequent statements: prepared once per connection, or sent with their parameter types each time.

use std::sync::LazyLock;

use tokio_postgres::types::Type;

use super::rows::{LEASE_TYPES, SETTLEMENT_TYPES};

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

/// Text and parameter types, in the order of [`ALL_STATEMENTS`].
static STATEMENTS: LazyLock<[(String, Vec<Type>); 6]> = LazyLock::new(|| {
    ALL_STATEMENTS.map(|statement| {
        let types = match statement {
            // A claim has no fence and no attempt yet.
            Statement::Claim => LEASE_TYPES[..14].iter().map(array_of).collect(),
            Statement::Settle => LEASE_TYPES.iter().chain(SETTLEMENT_TYPES).map(array_of).collect(),
            Statement::Get => vec![Type::BYTEA],
            Statement::Change => [&[Type::BYTEA, Type::INT8], SETTLEMENT_TYPES].concat(),
            Statement::Watch => vec![Type::BYTEA_ARRAY, Type::INT8_ARRAY, Type::BOOL],
            Statement::Sweep => vec![Type::INT4],
        };
        let params: Vec<String> = (1..=types.len()).map(|nth| format!("${nth}")).collect();
        let (params, one, many) = (params.join(", "), answer_columns("a"), answer_columns("a.answer"));
        let sql = match statement {
            Statement::Claim => format!("SELECT a.nth, {many} FROM ibid._claim_many({params}) a"),
            Statement::Settle => format!("SELECT a.nth, {many} FROM ibid._settle_many({params}) a"),
            Statement::Get => format!("SELECT 1, {one} FROM ibid._get({params}) a"),
            Statement::Change => format!("SELECT 1, {one} FROM ibid._change({params}) a"),
            Statement::Watch => format!("SELECT w.nth, w.runs_us FROM ibid._watch_many({params}) w"),
            Statement::Sweep => format!("SELECT s.removed, s.lapsed, s.more FROM ibid._sweep_all({params}) s"),
        };
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
        matches!(self, Self::Get | Self::Watch)
    }
}
