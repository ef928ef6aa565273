//! The claim under which a handler runs, for handlers that record their answer in a transaction of their own.
//!
//! Invariant: once an answer was [entrusted](Claimed::entrust) to a transaction, only that transaction can make an answer
//! remembered. The layer asks the store afterwards whether it did, and never writes one itself.

use std::{fmt, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Response, StatusCode};
use parking_lot::Mutex;
use tokio::time::Instant;

use super::{
    Route,
    inner_response::{self, ResponseMeaning},
};
use crate::{engine::CompletedAnswer, record::Record, store::Lease};

/// The claim under which a handler runs, in the extensions of its request. Not of gRPC calls, whose answers are frames
/// that their handlers do not see.
///
/// `ibid_postgres_tx::complete_in` uses it to record the answer in the handler's own transaction.
#[derive(Clone)]
pub struct HandlerClaim(Arc<HandlerClaimState>);

struct HandlerClaimState {
    lease: Lease,
    route: Arc<Route>,
    requested_at_ms: u64,
    started: Instant,
    /// What a transaction was to record, last.
    delegated_record: Mutex<Option<Bytes>>,
}

/// The policy does not remember such an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the policy remembers no answer with status {0}; roll back, and answer with it")]
pub struct NotRememberedError(pub StatusCode);

impl HandlerClaim {
    pub(super) fn new(lease: &Lease, route: &Arc<Route>, requested_at_ms: u64) -> Self {
        Self(Arc::new(HandlerClaimState {
            lease: lease.clone(),
            route: route.clone(),
            requested_at_ms,
            started: Instant::now(),
            delegated_record: Mutex::new(None),
        }))
    }

    /// The claim.
    pub fn lease(&self) -> &Lease {
        &self.0.lease
    }

    /// How long its answer is to be remembered.
    pub fn ttl(&self) -> Duration {
        self.0.route.policy.ttl
    }

    /// What a transaction is to record of an answer, as the layer would. From now on only that transaction can make an
    /// answer remembered: call it right before the write.
    ///
    /// # Errors
    /// If the policy does not remember such an answer; then nothing has changed.
    pub fn delegate(&self, response: &Response<Bytes>) -> Result<CompletedAnswer, NotRememberedError> {
        let policy = &self.0.route.policy;
        if inner_response::classify_status(policy, response.status()) != ResponseMeaning::Remember {
            return Err(NotRememberedError(response.status()));
        }
        let complete = inner_response::completed_answer_of(policy, response, self.0.requested_at_ms, self.0.started);
        *self.0.delegated_record.lock() = Some(complete.record.clone());
        Ok(complete)
    }

    /// Whether an answer was entrusted to a transaction; and if so, whether it is this one, whenever it was given.
    pub(super) fn is_delegated(&self, with: Option<&Bytes>) -> Option<bool> {
        let entrusted = self.0.delegated_record.lock().clone()?;
        let timeless = |record: &Bytes| {
            let record = Record::decode(record.clone()).ok()?;
            Some(Record { requested_at_ms: 0, completed_at_ms: 0, cookies: Vec::new(), ..record })
        };
        Some(with.is_some_and(|with| timeless(with).is_some_and(|with| Some(with) == timeless(&entrusted))))
    }
}

impl fmt::Debug for HandlerClaim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HandlerClaim").field("lease", &self.0.lease).finish_non_exhaustive()
    }
}
