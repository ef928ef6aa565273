//! The changes that operators make, and their results.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use ibid::{
    intent::{HeldKey, forget_hold, free_intent},
    record::{Record, RecordBody},
    store::{ClaimOutcome, ErrorKind, Fence, RecordSummary, SettleOutcome, Settlement, Store, StoreError},
};
use ibid_stores::seal::is_sealed;
use serde::{Deserialize, Serialize};

use super::{RecordEntry, RecordView, state_name, view};
use crate::{
    config::raw::UNSETTABLE_HEADERS,
    format::{format_rough, now_ms},
};

pub const MAX_ANSWER_BODY_BYTES: u64 = 64 << 20;
/// Minimum ttl of a resolved answer, even if the entry has less time left.
const MIN_RESOLVED_TTL: Duration = Duration::from_secs(60);

#[derive(Debug, Clone)]
pub enum ChangeAction {
    /// The operation never ran: the next request with the key runs.
    Release,
    /// Removes the entry, whatever its state.
    Forget,
    /// The operation ran and had this answer.
    Resolve(ResolvedAnswer),
}

/// What an operator can do to an entry, as paths name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChangeVerb {
    Release,
    Forget,
    Resolve,
}

#[derive(Debug, Clone)]
pub struct ResolvedAnswer {
    /// 200 or above.
    pub status: StatusCode,
    /// Without headers that frame a message; see [`ResolvedAnswer::parse_header`].
    pub headers: HeaderMap,
    pub body: Bytes,
    /// Ttl from now on; `None`: the entry's total lifetime, its age included.
    pub keep: Option<Duration>,
}

#[derive(Debug, Clone)]
pub struct ChangeRequest {
    pub action: ChangeAction,
    pub reason: String,
    /// The fence of the entry that the operator saw; `None` accepts any.
    pub fence: Option<Fence>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChangeReport {
    /// `release`, `forget` or `resolve`.
    pub action: String,
    /// `None` if unknown.
    pub changed: Option<bool>,
    pub reason: String,
    pub refused: Option<String>,
    pub before: RecordView,
    /// `None` if the entry is absent, or could not be read.
    pub after: Option<RecordView>,
}

impl ChangeVerb {
    pub(crate) const ALL: [Self; 3] = [Self::Release, Self::Forget, Self::Resolve];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Release => "release",
            Self::Forget => "forget",
            Self::Resolve => "resolve",
        }
    }

    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|verb| verb.name() == name)
    }
}

impl ChangeAction {
    pub fn name(&self) -> &'static str {
        match self {
            Self::Release => "release",
            Self::Forget => "forget",
            Self::Resolve(_) => "resolve",
        }
    }
}

impl ResolvedAnswer {
    pub fn parse_header(name: &str, value: &str) -> Result<(HeaderName, HeaderValue), String> {
        let wrong =
            || format!("{:?} is no header; write one such as 'Location: /payments/7'", format!("{name}: {value}"));
        let parsed: HeaderName = name.trim().parse().map_err(|_| wrong())?;
        if UNSETTABLE_HEADERS.contains(&parsed) {
            return Err(format!("{:?} frames a message, or is never replayed; leave it out", parsed.as_str()));
        }
        Ok((parsed, value.trim().parse().map_err(|_| wrong())?))
    }

    pub(crate) fn parse_headers<'a>(pairs: impl Iterator<Item = (&'a str, &'a str)>) -> Result<HeaderMap, String> {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            let (name, value) = Self::parse_header(name, value)?;
            headers.try_append(name, value).map_err(|_| "there are too many")?;
        }
        Ok(headers)
    }

    /// Only final statuses can be answers.
    pub(crate) fn parse_status(code: u64) -> Option<StatusCode> {
        let code = u16::try_from(code).ok().filter(|code| (200..=599).contains(code))?;
        StatusCode::from_u16(code).ok()
    }

    fn to_settlement(&self, before: &RecordEntry) -> Settlement {
        let (requested_at_ms, completed_at_ms) = (view::requested_at_ms(&before.info), now_ms());
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
        // Nobody knows how long the operation ran.
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
    /// Makes the change if the entry's fence still matches. The error is the store's: unless it says otherwise, the
    /// store may have applied the change.
    pub async fn execute(&self, store: &dyn Store, before: RecordEntry) -> (ChangeReport, Option<StoreError>) {
        let (address, seen) = (before.info.address, self.fence.unwrap_or(before.info.fence));
        let outcome = match self.refusal_reason(&before, seen) {
            Some(why) => Ok(Some(why)),
            None => self.apply_to_store(store, &before, seen).await,
        };
        // A failed read must not hide that the change was made.
        let after = super::read_at(store, &address).await.ok().flatten();
        let (changed, refused, error) = match outcome {
            Ok(refused) => (Some(refused.is_none()), refused, None),
            Err(error) => ((error.kind != ErrorKind::Ambiguous).then_some(false), None, Some(error)),
        };
        let report = ChangeReport {
            action: self.action.name().into(),
            changed,
            reason: self.reason.clone(),
            refused,
            before: RecordView::from(&before.info),
            after: after.map(|after| RecordView::from(&after.info)),
        };
        (report, error)
    }

    /// Returns why nothing was changed, or `None` if it was.
    async fn apply_to_store(
        &self, store: &dyn Store, before: &RecordEntry, seen: Fence,
    ) -> Result<Option<String>, StoreError> {
        let (operators, address) = (store.admin(), &before.info.address);
        // First, so that a failure in between leaves no intent whose key is free.
        match &self.action {
            ChangeAction::Release => {
                free_intent(store, &before.info).await?;
                if let Some(held) = HeldKey::find(store, address).await?
                    && !held.permit(store, address).await?
                {
                    return Ok(Some("it has changed meanwhile".into()));
                }
            }
            ChangeAction::Forget => {
                free_intent(store, &before.info).await?;
                forget_hold(store, address).await?;
            }
            ChangeAction::Resolve(_) => {}
        }
        let held = match &self.action {
            ChangeAction::Forget => operators.forget(address, seen).await?,
            ChangeAction::Release => operators.resolve(address, seen, &Settlement::Release).await?,
            ChangeAction::Resolve(answer) => operators.resolve(address, seen, &answer.to_settlement(before)).await?,
        };
        Ok(matches!(held, SettleOutcome::ClaimLost(_)).then(|| "it has changed meanwhile".into()))
    }

    /// Predicts the store's refusal, with a better explanation than the store can give.
    fn refusal_reason(&self, before: &RecordEntry, seen: Fence) -> Option<String> {
        let listed = &before.info;
        if listed.fence != seen {
            return Some(format!("it has changed meanwhile: its fence is {}, not {seen}", listed.fence));
        }
        // The gateway would never replay an unsealed answer on a sealed route.
        if matches!(self.action, ChangeAction::Resolve(_)) && is_sealed(&listed.fingerprint) {
            let what = "it is sealed, and its gateway does not give an answer that is not; name the gateway's --config, \
                        with its [seal]";
            return Some(what.into());
        }
        match (&self.action, &before.claim) {
            (ChangeAction::Forget, _) | (_, ClaimOutcome::OutcomeUnknown(_)) => None,
            (_, ClaimOutcome::InProgress(holder)) => Some(format!(
                "it is running: its lease ends in {} unless it is extended; wait until \
                 then, or forget it",
                format_rough(holder.takeover_in)
            )),
            _ => Some(format!(
                "it is {}, so there is nothing left to resolve; forget it if it is to run again",
                state_name(listed.state)
            )),
        }
    }
}
