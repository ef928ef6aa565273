//! How pages show records and audit entries.

use std::time::Duration;

use crate::{
    admin::audit::{AuditEntry, AuditOutcome, AuditedState},
    format::{escape_invisible, format_count, format_rough_ms},
    records::RecordView,
};

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

impl RecordView {
    /// The state as a CSS class. Only known states go into the markup.
    pub(super) fn state_class(&self) -> &'static str {
        ["processing", "done", "failed"].into_iter().find(|known| *known == self.state).unwrap_or("unknown")
    }

    pub(super) fn name(&self) -> String {
        record_name(&self.key, &self.address)
    }

    pub(super) fn status_text(&self) -> String {
        self.status.map(format_status).unwrap_or_default()
    }

    pub(super) fn age(&self) -> String {
        format_rough_ms(self.age_ms)
    }

    pub(super) fn expires_in(&self) -> String {
        format_rough_ms(self.expires_in_ms)
    }

    /// How long the operation ran.
    pub(super) fn took(&self) -> Option<Duration> {
        self.duration_ms.map(|ms| Duration::from_secs_f64(ms.clamp(0.0, 1e12) / 1e3))
    }
}

impl AuditEntry {
    /// Empty if the change was made.
    pub(super) fn outcome_note(&self) -> String {
        let why = |unless: &'static str| escape_invisible(self.why.as_deref().unwrap_or(unless));
        match self.outcome {
            AuditOutcome::Changed => why("").into_owned(),
            AuditOutcome::Refused => format!("refused: {}", why("it had changed")),
            AuditOutcome::Failed => format!("failed: {}", why("the store failed")),
            AuditOutcome::Unknown if self.resealed.is_some() => "not at its end".into(),
            AuditOutcome::Unknown => "nobody knows whether it was made".into(),
        }
    }

    pub(super) fn record_name(&self) -> String {
        self.address.as_ref().map_or("all records".into(), |address| record_name(&self.key, address))
    }

    pub(super) fn state_before(&self) -> String {
        self.before.as_ref().map(AuditedState::text).unwrap_or_default()
    }

    pub(super) fn state_after(&self) -> String {
        match (&self.after, &self.before, &self.resealed) {
            (Some(after), ..) => after.text(),
            (None, Some(_), _) => "nothing".into(),
            (None, None, Some(done)) => {
                let [resealed, looked] = [done.resealed, done.looked].map(format_count);
                let sealed = format!("{resealed} of {looked} under {}", done.key);
                match done.unopened {
                    0 => sealed,
                    unopened => format!("{sealed}, {} did not open", format_count(unopened)),
                }
            }
            (None, None, None) => String::new(),
        }
    }
}

impl AuditedState {
    fn text(&self) -> String {
        match self.status {
            Some(code) => format!("{} {}", self.state, format_status(code)),
            None => self.state.clone(),
        }
    }
}

/// The display name of a record: its key, or its masked address if the key is not stored.
fn record_name(key: &str, address: &str) -> String {
    if key.is_empty() { ibid::mask(address) } else { escape_invisible(key).into_owned() }
}

/// Such as `201`, or the name of a gRPC status.
fn format_status(status: u16) -> String {
    ibid::grpc::GrpcStatusCode::from_summary_status(status)
        .map_or_else(|| status.to_string(), |code| code.name().into())
}
