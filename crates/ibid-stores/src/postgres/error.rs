//! Classifies failed calls. Safety depends on it: `NotApplied` is used only if the call certainly had no effect.
//!
//! Every call is one statement, and so one transaction. An ERROR reply means that it was rolled back. After a FATAL
//! reply, or none, it may have been committed.

use std::error::Error as _;

use tokio_postgres::error::{DbError, Severity, SqlState};

use super::*;

pub(super) const STORE_NAME: &str = "postgres";

pub(super) fn store_error(kind: ErrorKind, why: impl Into<String>) -> StoreError {
    StoreError::new(kind, STORE_NAME, why.into())
}

/// Error of a statement that was sent. `reads`: the statement cannot have changed anything.
pub(super) fn statement_error(error: &Error, reads: bool) -> StoreError {
    let kind = match error.code() {
        Some(code) if was_rolled_back(error) => kind_for_code(code),
        _ if reads => ErrorKind::NotApplied,
        _ => ErrorKind::Ambiguous,
    };
    store_error(kind, error_text(error))
}

/// Error of opening a connection: nothing was sent. The server rejects us or is unreachable.
pub(super) fn connect_error(error: &Error) -> (ErrorKind, String) {
    // Authentication, missing database, missing privilege, and failures of our own set-up.
    let is_refusal = |code: &SqlState| ["28", "3D", "42"].iter().any(|class| code.code().starts_with(class));
    let kind = if error.code().is_some_and(is_refusal) { ErrorKind::Rejected } else { ErrorKind::NotApplied };
    (kind, error_text(error))
}

/// Whether the server replied that the statement was rolled back.
pub(super) fn was_rolled_back(error: &Error) -> bool {
    // An unparsed severity is a localized one: trust only the parsed one.
    error.as_db_error().and_then(DbError::parsed_severity) == Some(Severity::Error)
}

/// Whether the statement was rolled back only because of a concurrent change of the same row.
pub(super) fn was_row_conflict(error: &Error) -> bool {
    was_rolled_back(error) && matches!(error.code().map(SqlState::code), Some("55P03" | "40P01" | "40001"))
}

/// Whether the statement must be prepared again: the server dropped it, or the schema changed.
pub(super) fn needs_reprepare(error: &Error) -> bool {
    [SqlState::INVALID_SQL_STATEMENT_NAME, SqlState::FEATURE_NOT_SUPPORTED]
        .iter()
        .any(|code| error.code() == Some(code))
}

/// Whether the server became read-only; another connection may reach another server.
pub(super) fn is_read_only(error: &Error) -> bool {
    error.code() == Some(&SqlState::READ_ONLY_SQL_TRANSACTION)
}

fn kind_for_code(code: &SqlState) -> ErrorKind {
    match code.code() {
        "XX001" | "XX002" => ErrorKind::Corrupt,
        // Rolled back for temporary reasons.
        "40001" | "40P01" | "55P03" | "57014" | "53000" | "53200" | "53300" | "57P03" | "26000" | "0A000" => {
            ErrorKind::NotApplied
        }
        other if other.starts_with("58") || other.starts_with("08") => ErrorKind::NotApplied,
        _ => ErrorKind::Rejected,
    }
}

/// Describes the error for people. Uses the server's message if there is one.
pub(super) fn error_text(error: &Error) -> String {
    if let Some(answer) = error.as_db_error() {
        let mut said = format!("{} (SQLSTATE {})", answer.message(), answer.code().code());
        if *answer.code() == SqlState::DUPLICATE_PSTATEMENT || *answer.code() == SqlState::INVALID_SQL_STATEMENT_NAME {
            said += "; behind pgbouncer in transaction mode add ?statements=unnamed to the URL";
        }
        return said;
    }
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    causes.fold(error.to_string(), |said, cause| format!("{said}: {cause}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_passes_is_not_applied_and_what_stays_is_rejected() {
        for (code, kind) in [
            ("40001", ErrorKind::NotApplied),
            ("40P01", ErrorKind::NotApplied),
            ("55P03", ErrorKind::NotApplied),
            ("57014", ErrorKind::NotApplied),
            ("53300", ErrorKind::NotApplied),
            ("58030", ErrorKind::NotApplied),
            ("53100", ErrorKind::Rejected),
            ("25006", ErrorKind::Rejected),
            ("42501", ErrorKind::Rejected),
            ("42883", ErrorKind::Rejected),
            ("22003", ErrorKind::Rejected),
            ("XX001", ErrorKind::Corrupt),
        ] {
            assert_eq!(kind_for_code(&SqlState::from_code(code)), kind, "{code}");
        }
    }
}
