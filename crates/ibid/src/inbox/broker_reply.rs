use std::time::Duration;

use crate::store::ClaimToken;

/// What a broker is told about a delivery, once and last: never before its effect is recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "a delivery that is not answered comes again"]
pub enum BrokerReply {
    /// Handled, now or earlier. It must not come again.
    Acknowledge,
    /// Not handled: it must come again, not before this long.
    Redeliver {
        /// From now on.
        after: Duration,
    },
    /// Not handled, and coming again would not help: somebody must look at it.
    DeadLetter {
        /// For whoever looks.
        why: String,
    },
}

/// No broker keeps a longer delay.
const MAX_REDELIVERY_DELAY: Duration = Duration::from_secs(365 * 24 * 3600);

/// How long to wait before a failed event comes again: doubling, up to a limit, never all at the same moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RedeliveryBackoff {
    /// After the first failure, at most.
    pub first: Duration,
    /// After any failure, at most.
    pub most: Duration,
}

impl Default for RedeliveryBackoff {
    fn default() -> Self {
        Self { first: Duration::from_secs(1), most: Duration::from_secs(5 * 60) }
    }
}

impl RedeliveryBackoff {
    /// After the `attempt`th failure: between half of it and all of it, by chance, so that what failed together does
    /// not come again together.
    pub fn after(&self, attempt: u32) -> Duration {
        let doubled = self.first.saturating_mul(1_u32.checked_shl(attempt.saturating_sub(1)).unwrap_or(u32::MAX));
        let span = doubled.min(self.most).min(MAX_REDELIVERY_DELAY);
        let [byte, ..] = ClaimToken::mint().0;
        span / 2 + span.mul_f64(f64::from(byte) / 512.0)
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
