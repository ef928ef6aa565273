//! The refusals of the engine.

use std::time::Duration;

use super::RETRY_SOON;
use crate::refusal::{Refusal, RefusalReason};

pub(super) fn key_reused() -> Refusal {
    Refusal::new(
        RefusalReason::KeyReused,
        "this key was first used for a different request; a new operation needs a fresh key",
    )
}

pub(super) fn not_comparable() -> Refusal {
    Refusal::new(
        RefusalReason::StoreUnavailable,
        "nothing was executed, because this key was recorded by a version that this one cannot compare with; \
         try again with the same key",
    )
    .retry_after(RETRY_SOON)
}

pub(super) fn in_progress(after: Duration) -> Refusal {
    Refusal::new(
        RefusalReason::InProgress,
        "the first request with this key has not ended yet; try again with the same key",
    )
    .retry_after(after)
}

pub(super) fn outcome_unknown() -> Refusal {
    Refusal::new(
        RefusalReason::OutcomeUnknown,
        "an earlier request with this key was started and its end was never seen; \
         it is not run again until somebody has looked what became of it",
    )
}

pub(super) fn rolled_back() -> Refusal {
    Refusal::new(
        RefusalReason::StoreUnavailable,
        "the operation was rolled back together with the record of its answer, so nothing was executed; \
         try again with the same key",
    )
    .retry_after(RETRY_SOON)
}

pub(super) fn commit_unknown() -> Refusal {
    Refusal::new(
        RefusalReason::StoreUnavailable,
        "whether the operation was committed could not be asked; a retry with the same key gets its answer, \
         or runs it if it was not",
    )
    .retry_after(RETRY_SOON)
}

pub(super) fn not_recorded() -> Refusal {
    Refusal::new(
        RefusalReason::StoreUnavailable,
        "the operation ran, but its answer could not be recorded yet; \
         a retry with the same key gets it once it is, and does not run it again",
    )
    .retry_after(RETRY_SOON)
}

pub(super) fn quota_exceeded(after: Duration) -> Refusal {
    let detail = "nothing was executed, because this caller has begun or stored as much as they may for now; \
                  retries of earlier ones are still answered";
    Refusal::new(RefusalReason::QuotaExceeded, detail).retry_after(after)
}

pub(crate) fn store_unavailable() -> Refusal {
    Refusal::new(
        RefusalReason::StoreUnavailable,
        "nothing was executed, because the request could not be remembered; try again with the same key",
    )
    .retry_after(RETRY_SOON)
}
