//! The refusals of the engine.

use std::time::Duration;

use super::RETRY_SOON;
use crate::refusal::{Refusal, RefusalReason};

pub(super) fn key_reused() -> Refusal {
    let detail = "this key was first used for a different request; a new operation needs a fresh key";
    Refusal::new(RefusalReason::KeyReused, detail)
}

/// `first_key` is masked.
pub(super) fn duplicate_intent(first_key: &str, is_held: bool) -> Refusal {
    let further = match is_held {
        true => "it is held until an operator releases it",
        false => "send the first key to get its answer, or wait if this is a new operation",
    };
    let detail = format!("nothing was executed, because the key {first_key} began the same operation; {further}");
    Refusal::new(RefusalReason::DuplicateIntent, detail)
}

pub(super) fn in_progress(after: Duration) -> Refusal {
    let detail = "the first request with this key has not ended yet; try again with the same key";
    Refusal::new(RefusalReason::InProgress, detail).retry_after(after)
}

pub(super) fn outcome_unknown() -> Refusal {
    let detail = "an earlier request with this key was started and its end was never seen; \
                  it is not run again until somebody has looked what became of it";
    Refusal::new(RefusalReason::OutcomeUnknown, detail)
}

pub(super) fn quota_exceeded(after: Duration) -> Refusal {
    let detail = "nothing was executed, because this caller has begun or stored as much as they may for now; \
                  retries of earlier ones are still answered";
    Refusal::new(RefusalReason::QuotaExceeded, detail).retry_after(after)
}

/// The store cannot help now: a retry may.
pub(super) fn retry_at_store(detail: &str) -> Refusal {
    Refusal::new(RefusalReason::StoreUnavailable, detail).retry_after(RETRY_SOON)
}

pub(crate) fn store_unavailable() -> Refusal {
    retry_at_store("nothing was executed, because the request could not be remembered; try again with the same key")
}

pub(super) const NOT_COMPARABLE: &str = "nothing was executed, because this key was recorded by a version that this one cannot compare with; \
     try again with the same key";
pub(super) const ROLLED_BACK: &str = "the operation was rolled back together with the record of its answer, so nothing was executed; \
     try again with the same key";
pub(super) const COMMIT_UNKNOWN: &str = "whether the operation was committed could not be asked; a retry with the same key gets its answer, \
     or runs it if it was not";
pub(super) const NOT_RECORDED: &str = "the operation ran, but its answer could not be recorded yet; \
     a retry with the same key gets it once it is, and does not run it again";
