//! What operators change, and what became of it.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use ibid::{
    Record, RecordBody,
    store::{ClaimOutcome, ErrorKind, Fence, RecordSummary, SettleOutcome, Settlement, Store, StoreError},
};
use ibid_stores::seal::is_sealed;
use serde::{Deserialize, Serialize};

use super::{RecordEntry, RecordView, find, state_name, view};
use crate::config::raw::UNSETTABLE_HEADERS;

/// A body beyond this is no answer of an app.
pub const MAX_ANSWER_BODY_BYTES: u64 = 64 << 20;
/// The shortest that a resolved answer is kept, whatever is left of the entry.
const MIN_RESOLVED_TTL: Duration = Duration::from_secs(60);

/// What is to become of an entry.
#[derive(Debug, Clone)]
pub enum ChangeAction {
    /// It never happened.
    Release,
    /// Nothing is to be known of it.
    Forget,
    /// It ended like this.
    Resolve(ResolvedAnswer),
}

/// How an operation ended, as somebody who knows says.
#[derive(Debug, Clone)]
pub struct ResolvedAnswer {
    /// From 200 on.
    pub status: StatusCode,
    /// None that frames a message; see [`ResolvedAnswer::parse_header`].
    pub headers: HeaderMap,
    /// All of it.
    pub body: Bytes,
    /// How long it is remembered from now on; `None`: as long as the entry would have lived in all.
    pub keep: Option<Duration>,
}

/// A change that somebody wants.
#[derive(Debug, Clone)]
pub struct ChangeRequest {
    /// What to do.
    pub action: ChangeAction,
    /// Why.
    pub reason: String,
    /// Of the entry that they saw; none: of whatever is there.
    pub fence: Option<Fence>,
}

/// What became of it.
#[derive(Debug)]
pub struct ChangeResult {
    /// What was there.
    pub before: RecordEntry,
    /// `None` if nothing is there now, or that is not known.
    pub after: Option<RecordEntry>,
    /// Whether it was made.
    pub outcome: ChangeOutcome,
}

/// Whether a change was made.
#[derive(Debug)]
pub enum ChangeOutcome {
    /// It was.
    Changed,
    /// Why nothing was.
    Refused(String),
    /// The store failed. Unless it says that it did not, it may have applied the change.
    Failed(StoreError),
}

/// The same for programs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChangeReport {
    /// `release`, `forget` or `resolve`.
    pub action: String,
    /// `None` if nobody knows.
    pub changed: Option<bool>,
    /// As given.
    pub reason: String,
    /// Why nothing was changed.
    pub refused: Option<String>,
    /// What was there.
    pub before: RecordView,
    /// What is there now.
    pub after: Option<RecordView>,
}

impl ChangeAction {
    /// Its name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Release => "release",
            Self::Forget => "forget",
            Self::Resolve(_) => "resolve",
        }
    }
}

impl ResolvedAnswer {
    /// Reads one header of an answer.
    ///
    /// # Errors
    /// What is wrong with it, for whoever wrote it.
    pub fn parse_header(name: &str, value: &str) -> Result<(HeaderName, HeaderValue), String> {
        let wrong =
            || format!("{:?} is no header; write one such as 'Location: /payments/7'", format!("{name}: {value}"));
        let parsed: HeaderName = name.trim().parse().map_err(|_| wrong())?;
        if UNSETTABLE_HEADERS.contains(&parsed) {
            return Err(format!("{:?} frames a message, or is never replayed; leave it out", parsed.as_str()));
        }
        Ok((parsed, value.trim().parse().map_err(|_| wrong())?))
    }

    fn to_settlement(&self, before: &RecordEntry) -> Settlement {
        let (requested_at_ms, completed_at_ms) = (view::requested_at_ms(&before.info), view::now_ms());
        let record = Record {
            status: self.status,
            requested_at_ms,
            completed_at_ms,
            headers: self.headers.clone(),
            body: RecordBody::Whole(self.body.clone()),
            trailers: HeaderMap::new(),
            cookies: Vec::new(),
        };
        let life = before.info.age.saturating_add(before.info.expires_in);
        // How long it ran is what nobody knows.
        let outline =
            RecordSummary { status: self.status.as_u16(), requested_at_ms, completed_at_ms, took: Duration::ZERO };
        Settlement::Complete {
            failed: self.status.is_client_error() || self.status.is_server_error(),
            record: record.encode(),
            summary: outline,
            ttl: self.keep.unwrap_or(life.max(MIN_RESOLVED_TTL)),
        }
    }
}

impl ChangeRequest {
    /// Makes it, if the entry still is what it was taken for.
    pub async fn execute(&self, store: &dyn Store, before: RecordEntry) -> ChangeResult {
        let (address, seen) = (before.info.address, self.fence.unwrap_or(before.info.fence));
        let outcome = match self.refusal_reason(&before, seen) {
            Some(why) => ChangeOutcome::Refused(why),
            None => self.apply_to_store(store, &before, seen).await,
        };
        // That it was changed must be said, whether or not it can be read again.
        let after = find::at(store, &address).await.ok().flatten();
        ChangeResult { before, after, outcome }
    }

    async fn apply_to_store(&self, store: &dyn Store, before: &RecordEntry, seen: Fence) -> ChangeOutcome {
        let (operators, address) = (store.admin(), &before.info.address);
        let held = match &self.action {
            ChangeAction::Forget => operators.forget(address, seen).await,
            ChangeAction::Release => operators.resolve(address, seen, &Settlement::Release).await,
            ChangeAction::Resolve(answer) => operators.resolve(address, seen, &answer.to_settlement(before)).await,
        };
        match held {
            Ok(SettleOutcome::Applied | SettleOutcome::Restored) => ChangeOutcome::Changed,
            Ok(SettleOutcome::ClaimLost(_)) => ChangeOutcome::Refused("it has changed meanwhile".into()),
            Err(error) => ChangeOutcome::Failed(error),
        }
    }

    /// Why the store would not do it, in more words than it has.
    fn refusal_reason(&self, before: &RecordEntry, seen: Fence) -> Option<String> {
        let listed = &before.info;
        if listed.fence != seen {
            return Some(format!("it has changed meanwhile: its fence is {}, not {seen}", listed.fence));
        }
        // An answer in clear would be in the store, and never be given.
        if matches!(self.action, ChangeAction::Resolve(_)) && is_sealed(&listed.fingerprint) {
            let what = "it is sealed, and its gateway does not give an answer that is not; name the gateway's --config, \
                        with its [seal]";
            return Some(what.into());
        }
        match (&self.action, &before.claim) {
            (ChangeAction::Forget, _) | (_, ClaimOutcome::OutcomeUnknown(_)) => None,
            (_, ClaimOutcome::InProgress(holder)) => Some(format!(
                "it is running: its gateway was heard of, and its lease ends in {} unless it is extended; wait until \
                 then, or forget it",
                format_rough(holder.takeover_in)
            )),
            _ => Some(format!(
                "it is {}, so there is nothing left to resolve; forget it if it is to run again",
                state_name(listed.state)
            )),
        }
    }

    /// What became of it, for programs.
    pub fn told(&self, made: &ChangeResult) -> ChangeReport {
        let (changed, refused) = match &made.outcome {
            ChangeOutcome::Changed => (Some(true), None),
            ChangeOutcome::Refused(why) => (Some(false), Some(why.clone())),
            ChangeOutcome::Failed(error) => ((error.kind != ErrorKind::Ambiguous).then_some(false), None),
        };
        ChangeReport {
            action: self.action.name().into(),
            changed,
            reason: self.reason.clone(),
            refused,
            before: RecordView::from(&made.before.info),
            after: made.after.as_ref().map(|after| RecordView::from(&after.info)),
        }
    }
}

/// The largest unit that says enough: `45s`, `12m`, `3h`, `5d`.
pub(crate) fn format_rough(duration: Duration) -> String {
    match (duration.as_secs(), duration.subsec_millis()) {
        (0, millis) => format!("{millis}ms"),
        (seconds @ ..120, _) => format!("{seconds}s"),
        (seconds @ ..7_200, _) => format!("{}m", seconds / 60),
        (seconds @ ..172_800, _) => format!("{}h", seconds / 3_600),
        (seconds, _) => format!("{}d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_rough() {
        for (seconds, shown) in [(0, "0ms"), (119, "119s"), (120, "2m"), (7_200, "2h"), (172_800, "2d")] {
            assert_eq!(format_rough(Duration::from_secs(seconds)), shown);
        }
        assert_eq!(format_rough(Duration::MAX), format!("{}d", u64::MAX / 86_400));
    }
}
