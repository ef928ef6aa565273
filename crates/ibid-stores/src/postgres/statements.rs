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
        let one = format!("1, {}", answer_columns("a"));
        let many = format!("a.nth, {}", answer_columns("a.answer"));
        let (types, columns, function): (Vec<Type>, _, _) = match statement {
            // A claim has no fence and no attempt yet.
            Statement::Claim => (LEASE_TYPES[..14].iter().map(array_of).collect(), many, "_claim_many"),
            Statement::Settle => {
                (LEASE_TYPES.iter().chain(SETTLEMENT_TYPES).map(array_of).collect(), many, "_settle_many")
            }
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
        matches!(self, Self::Get | Self::Watch)
    }
}
