//! Limits concurrent store claims per key.
//!
//! Without it, ten thousand simultaneous requests with one key would be ten thousand calls in flight, and the holder's
//! heartbeat would queue behind them. Further claims of the key wait for a permit, and may find the answer cached by
//! then. Heartbeats and settlements need no permit.
//!
//! Invariant: a key has a limiter exactly while it has users.

use std::{collections::HashMap, sync::Arc};

use ibid::store::Address;
use parking_lot::Mutex;
use tokio::sync::{Semaphore, SemaphorePermit};

const SHARD_COUNT: usize = 16;
/// Maximum number of concurrent store claims of one key.
const MAX_CONCURRENT_CLAIMS_PER_KEY: usize = 32;

#[derive(Debug)]
pub(super) struct ClaimLimiter(Box<[Mutex<KeyLimiters>]>);

type KeyLimiters = HashMap<Address, Arc<KeyLimiter>>;

#[derive(Debug)]
struct KeyLimiter {
    permits: Semaphore,
    /// Claims that hold or await a permit. Changed under the lock of the map.
    user_count: Mutex<u32>,
}

/// A user of a key's limiter. The last one removes the limiter.
#[derive(Debug)]
pub(super) struct KeyLimiterGuard<'a> {
    gates: &'a ClaimLimiter,
    address: Address,
    key_limiter: Arc<KeyLimiter>,
}

impl Default for ClaimLimiter {
    fn default() -> Self {
        Self((0..SHARD_COUNT).map(|_| Mutex::default()).collect())
    }
}

impl ClaimLimiter {
    fn shard(&self, at: &Address) -> &Mutex<KeyLimiters> {
        &self.0[usize::from(at.0[29]) % SHARD_COUNT]
    }

    pub(super) fn visit(&self, at: &Address) -> KeyLimiterGuard<'_> {
        let mut listed = self.shard(at).lock();
        let gate = listed
            .entry(*at)
            .or_insert_with(|| {
                Arc::new(KeyLimiter {
                    permits: Semaphore::new(MAX_CONCURRENT_CLAIMS_PER_KEY),
                    user_count: Mutex::default(),
                })
            })
            .clone();
        *gate.user_count.lock() += 1;
        KeyLimiterGuard { gates: self, address: *at, key_limiter: gate }
    }
}

impl KeyLimiterGuard<'_> {
    /// Waits for a permit. Returns `true` if it was not available at once.
    pub(super) async fn pass(&self) -> (SemaphorePermit<'_>, bool) {
        match self.key_limiter.permits.try_acquire() {
            Ok(permit) => (permit, false),
            Err(_) => (self.key_limiter.permits.acquire().await.expect("it is never closed"), true),
        }
    }
}

impl Drop for KeyLimiterGuard<'_> {
    fn drop(&mut self) {
        let mut listed = self.gates.shard(&self.address).lock();
        let mut here = self.key_limiter.user_count.lock();
        *here -= 1;
        if *here == 0 {
            listed.remove(&self.address);
        }
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
            let _pass = visit.pass().await;
            most.fetch_max(inside.fetch_add(1, SeqCst) + 1, SeqCst);
            tokio::task::yield_now().await;
            inside.fetch_sub(1, SeqCst);
        };
        futures_util::future::join_all((0..200).map(one)).await;
        assert_eq!(most.into_inner(), 2 * MAX_CONCURRENT_CLAIMS_PER_KEY);
        assert!(gates.0.iter().all(|listed| listed.lock().is_empty()));
        let given_up = gates.visit(&Address([0; 32]));
        drop(given_up);
        assert!(gates.0.iter().all(|listed| listed.lock().is_empty()));
    }
}
