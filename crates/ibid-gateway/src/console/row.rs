//! Table rows: records, fields and audit entries.

use std::time::Duration;

use super::format::{display_date, escape_invisible, format_count, format_rough};
use crate::{admin::audit, records::RecordView};

#[derive(Debug, Clone)]
pub(super) struct RecordRow {
    pub(super) address: String,
    pub(super) state: &'static str,
    pub(super) name: String,
    pub(super) endpoint: String,
    pub(super) tenant: String,
    pub(super) user: String,
    pub(super) status: String,
    pub(super) attempt: u32,
    pub(super) requested_at: String,
    pub(super) age: String,
    pub(super) expires_in: String,
}

/// A name and its value.
#[derive(Debug, Clone, Default)]
pub(super) struct PageField {
    pub(super) name: &'static str,
    pub(super) value: String,
    /// A note in small print behind the value.
    pub(super) under: String,
    /// Whether to use a monospaced font.
    pub(super) code: bool,
}

#[derive(Debug, Clone)]
pub(super) struct AuditEntryRow {
    pub(super) at: String,
    pub(super) when: String,
    pub(super) who: String,
    pub(super) action: String,
    /// Empty if the change was made.
    pub(super) outcome: String,
    /// Empty for a reseal, which covers all records.
    pub(super) address: String,
    pub(super) name: String,
    pub(super) before: String,
    pub(super) after: String,
    pub(super) reason: String,
}

impl RecordRow {
    pub(super) fn from_view(view: &RecordView) -> Self {
        Self {
            address: view.address.clone(),
            state: state_class(&view.state),
            name: record_name(&view.key, &view.address),
            endpoint: escape_invisible(&view.endpoint).into_owned(),
            tenant: escape_invisible(&view.tenant).into_owned(),
            user: escape_invisible(&view.user).into_owned(),
            status: view.status.map(format_status).unwrap_or_default(),
            attempt: view.attempt,
            requested_at: view.requested_at.clone(),
            age: format_rough(Duration::from_millis(view.age_ms)),
            expires_in: format_rough(Duration::from_millis(view.expires_in_ms)),
        }
    }
}

impl PageField {
    pub(super) fn new(name: &'static str, value: impl Into<String>) -> Self {
        Self { name, value: value.into(), ..Self::default() }
    }

    pub(super) fn code(name: &'static str, value: impl Into<String>) -> Self {
        Self { code: true, ..Self::new(name, value) }
    }

    pub(super) fn with_note(self, under: impl Into<String>) -> Self {
        Self { under: under.into(), ..self }
    }
}

impl AuditEntryRow {
    pub(super) fn from_entry(entry: &audit::AuditEntry) -> Self {
        let state = |state: &audit::AuditedState| match state.status {
            Some(code) => format!("{} {}", state.state, format_status(code)),
            None => state.state.clone(),
        };
        let outcome = match entry.outcome {
            audit::AuditOutcome::Changed => {
                entry.why.as_deref().map(|why| escape_invisible(why).into_owned()).unwrap_or_default()
            }
            audit::AuditOutcome::Refused => {
                format!("refused: {}", escape_invisible(entry.why.as_deref().unwrap_or("it had changed")))
            }
            audit::AuditOutcome::Failed => {
                format!("failed: {}", escape_invisible(entry.why.as_deref().unwrap_or("the store failed")))
            }
            audit::AuditOutcome::Unknown if entry.resealed.is_some() => "not at its end".into(),
            audit::AuditOutcome::Unknown => "nobody knows whether it was made".into(),
        };
        Self {
            at: entry.at.clone(),
            when: display_date(&entry.at),
            who: escape_invisible(&entry.by).into_owned(),
            action: entry.action.clone(),
            outcome,
            address: entry.address.clone().unwrap_or_default(),
            name: entry.address.as_ref().map_or("all records".into(), |address| record_name(&entry.key, address)),
            before: entry.before.as_ref().map(state).unwrap_or_default(),
            after: match (&entry.after, &entry.before, &entry.resealed) {
                (Some(after), ..) => state(after),
                (None, Some(_), _) => "nothing".into(),
                (None, None, Some(done)) => format_reseal(done),
                (None, None, None) => String::new(),
            },
            reason: escape_invisible(&entry.reason).into_owned(),
        }
    }
}

/// Such as `12 of 40 under 2026-11, 1 did not open`.
fn format_reseal(done: &audit::ResealSummary) -> String {
    let sealed = format!("{} of {} under {}", format_count(done.resealed), format_count(done.looked), done.key);
    match done.unopened {
        0 => sealed,
        unopened => format!("{sealed}, {} did not open", format_count(unopened)),
    }
}

/// The display name of a record: its key, or its masked address if the key is not stored.
pub(super) fn record_name(key: &str, address: &str) -> String {
    if key.is_empty() { ibid::mask(address) } else { escape_invisible(key).into_owned() }
}

/// Such as `201`, or the name of a gRPC status.
pub(super) fn format_status(outline: u16) -> String {
    ibid::grpc::GrpcStatusCode::from_summary_status(outline)
        .map_or_else(|| outline.to_string(), |code| code.name().into())
}

/// The state as a CSS class. Only known states go into the markup.
pub(super) fn state_class(name: &str) -> &'static str {
    ["processing", "done", "failed"].into_iter().find(|known| *known == name).unwrap_or("unknown")
}
