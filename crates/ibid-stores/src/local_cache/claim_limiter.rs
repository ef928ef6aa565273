//! Limits concurrent store claims per key.
//!
//! Without it, ten thousand simultaneous requests with one key would be ten thousand calls in flight, and the holder's
//! heartbeat would queue behind them. Further claims of the key wait for a permit, and may find the answer cached by
//! then. Heartbeats and settlements need no permit.
//!
//! Invariant: a key has a limiter exactly while it has users.

use ibid::store::{Address, SharedMap, SharedValue};
use tokio::sync::{Semaphore, SemaphorePermit};

/// Maximum number of concurrent store claims of one key.
const MAX_CONCURRENT_CLAIMS_PER_KEY: usize = 32;

#[derive(Debug, Default)]
pub(super) struct ClaimLimiter(SharedMap<Address, Semaphore>);

impl ClaimLimiter {
    pub(super) fn visit(&self, at: &Address) -> SharedValue<'_, Address, Semaphore> {
        self.0.join(*at, || Semaphore::new(MAX_CONCURRENT_CLAIMS_PER_KEY))
    }
}

/// Waits for a permit. Returns `true` if it was not available at once.
pub(super) async fn pass(permits: &Semaphore) -> (SemaphorePermit<'_>, bool) {
    match permits.try_acquire() {
        Ok(permit) => (permit, false),
        Err(_) => (permits.acquire().await.expect("it is never closed"), true),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use super::*;

    #[tokio::test]
    async fn few_pass_at_a_time_and_nothing_is_left() {
        let gates = ClaimLimiter::default();
        let (inside, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let one = async |nth: u8| {
            let visit = gates.visit(&Address([nth % 2; 32]));
            let _pass = pass(&visit).await;
            most.fetch_max(inside.fetch_add(1, SeqCst) + 1, SeqCst);
            tokio::task::yield_now().await;
            inside.fetch_sub(1, SeqCst);
        };
        futures_util::future::join_all((0..200).map(one)).await;
        assert_eq!(most.into_inner(), 2 * MAX_CONCURRENT_CLAIMS_PER_KEY);
        assert!(gates.0.is_empty());
        let given_up = gates.visit(&Address([0; 32]));
        drop(given_up);
        assert!(gates.0.is_empty());
    }
}
