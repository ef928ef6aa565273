//! The claim under which a handler runs, for handlers that record their answer in their own transaction.
//!
//! Invariant: once an answer was [delegated](HandlerClaim::delegate) to a transaction, only that transaction can record
//! it. The layer asks the store afterwards whether it did, and never records an answer itself.

use std::{fmt, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Response, StatusCode};
use parking_lot::Mutex;
use tokio::time::Instant;

use super::{Route, rules};
use crate::{engine::CompletedAnswer, record::Record, store::Lease};

/// The claim under which a handler runs, in its request's extensions. gRPC calls have none, because their responses are
/// frames that their handlers do not see.
///
/// `ibid_postgres_tx::complete_in` uses it to record the answer in the handler's own transaction.
#[derive(Clone)]
pub struct HandlerClaim(Arc<HandlerClaimState>);

struct HandlerClaimState {
    lease: Lease,
    route: Arc<Route>,
    requested_at_ms: u64,
    started: Instant,
    /// The last record that was delegated to a transaction.
    delegated_record: Mutex<Option<Bytes>>,
}

/// The policy does not remember responses with this status.
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

    /// The lease of the claim.
    pub fn lease(&self) -> &Lease {
        &self.0.lease
    }

    /// How long to remember the answer.
    pub fn ttl(&self) -> Duration {
        self.0.route.policy.ttl
    }

    /// Encodes the answer for a transaction, as the layer would. From now on only that transaction can record an
    /// answer: call it immediately before the write.
    ///
    /// # Errors
    /// If the policy does not remember such an answer. Nothing has changed then.
    pub fn delegate(&self, response: &Response<Bytes>) -> Result<CompletedAnswer, NotRememberedError> {
        let policy = &self.0.route.policy;
        if !rules::is_remembered(policy, response.status()) {
            return Err(NotRememberedError(response.status()));
        }
        let complete = rules::completed_answer_of(policy, response, self.0.requested_at_ms, self.0.started);
        *self.0.delegated_record.lock() = Some(complete.record.clone());
        Ok(complete)
    }

    /// Returns `None` if no answer was delegated, otherwise whether `with` is that answer, ignoring times.
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
