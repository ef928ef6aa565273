use std::time::Duration;

use crate::store::with_jitter;

/// The final reply to the broker about a delivery. Send it only after the outcome is recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "a delivery that is not answered comes again"]
pub enum BrokerReply {
    /// The event is handled. The broker must not deliver it again.
    Acknowledge,
    /// The event is not handled. The broker must deliver it again after this delay.
    Redeliver {
        /// The delay from now.
        after: Duration,
    },
    /// The event is not handled, and another delivery would not help: an operator must inspect it.
    DeadLetter {
        /// The reason, for the operator.
        why: String,
    },
}

impl BrokerReply {
    /// The reply for an event so old that it may have been handled and forgotten.
    pub fn too_old() -> Self {
        let why = "it is older than handled events are remembered: it may have been handled already";
        Self::DeadLetter { why: why.into() }
    }
}

/// The maximum delay of a redelivery. No broker keeps a longer one.
const MAX_REDELIVERY_DELAY: Duration = Duration::from_secs(365 * 24 * 3600);

/// The delay before a failed event is delivered again. It doubles up to a maximum, with jitter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RedeliveryBackoff {
    /// The maximum delay after the first failure.
    pub first: Duration,
    /// The maximum delay after any failure.
    pub most: Duration,
}

impl Default for RedeliveryBackoff {
    fn default() -> Self {
        Self { first: Duration::from_secs(1), most: Duration::from_secs(5 * 60) }
    }
}

impl RedeliveryBackoff {
    /// The delay after the `attempt`th failure: random between half and all of it, so that events that failed together
    /// are not delivered together.
    pub fn after(&self, attempt: u32) -> Duration {
        let doubled = self.first.saturating_mul(1_u32.checked_shl(attempt.saturating_sub(1)).unwrap_or(u32::MAX));
        with_jitter(doubled.min(self.most).min(MAX_REDELIVERY_DELAY))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_doubles_up_to_the_limit_and_is_never_more() {
        let backoff = RedeliveryBackoff { first: Duration::from_secs(1), most: Duration::from_secs(60) };
        for (attempt, most) in [(0, 1), (1, 1), (2, 2), (3, 4), (7, 60), (40, 60), (u32::MAX, 60)] {
            for _ in 0..50 {
                let after = backoff.after(attempt);
                let most = Duration::from_secs(most);
                assert!(after >= most / 2 && after <= most, "{attempt}: {after:?}");
            }
        }
        let endless = RedeliveryBackoff { first: Duration::MAX, most: Duration::MAX };
        assert!(endless.after(5) <= MAX_REDELIVERY_DELAY);
    }
}
