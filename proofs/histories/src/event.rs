//! The lines of a history.

use std::io::{self, BufRead, Write};

use serde::{Deserialize, Serialize};

/// One line. Times are microseconds since the start of the run, on one clock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum HistoryEvent {
    /// A client sent a request.
    Invoke {
        /// In microseconds.
        at: u64,
        /// Unique in the history.
        request: u64,
        /// Who sent it. Requests of different callers are independent, also with the same key.
        caller: String,
        /// Its idempotency key.
        key: String,
        /// Whether it was sent after all faults were healed and everything had come to rest.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        at_rest: bool,
    },
    /// A request ended. A request without this line had no end that the client saw.
    Return {
        /// In microseconds.
        at: u64,
        /// As in its `invoke`.
        request: u64,
        /// How it ended.
        #[serde(flatten)]
        result: RequestResult,
    },
    /// The app began to run an operation.
    Execute {
        /// In microseconds.
        at: u64,
        /// As in `invoke`.
        caller: String,
        /// As in `invoke`.
        key: String,
        /// What the run answers; different for every run.
        answer: String,
    },
}

impl HistoryEvent {
    /// When it happened.
    pub fn at(&self) -> u64 {
        match self {
            Self::Invoke { at, .. } | Self::Return { at, .. } | Self::Execute { at, .. } => *at,
        }
    }
}

/// How a request ended, as far as the client can tell.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "result", rename_all = "kebab-case")]
pub enum RequestResult {
    /// An answer of the app, first or replayed.
    Answer {
        /// Which.
        answer: String,
        /// Whether the gateway said that the answer waits to be stored.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        pending: bool,
    },
    /// Refused, because a run is in progress.
    InProgress,
    /// Refused, because the outcome of a run is unknown.
    OutcomeUnknown,
    /// No answer that says anything about the operation: the connection broke, or the gateway could not do its work. What
    /// it began may still have an effect.
    Lost,
}

/// Writes a history, one line per event.
pub fn write_history(events: &[HistoryEvent], mut to: impl Write) -> io::Result<()> {
    for event in events {
        serde_json::to_writer(&mut to, event)?;
        to.write_all(b"\n")?;
    }
    to.flush()
}

/// Reads a history. The error names the line.
pub fn read_history(from: impl BufRead) -> Result<Vec<HistoryEvent>, String> {
    let mut events = Vec::new();
    for (nth, line) in from.lines().enumerate() {
        let line = line.map_err(|why| format!("line {}: {why}", nth + 1))?;
        if !line.trim().is_empty() {
            events.push(serde_json::from_str(&line).map_err(|why| format!("line {}: {why}", nth + 1))?);
        }
    }
    Ok(events)
}
