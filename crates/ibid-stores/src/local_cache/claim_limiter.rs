//! The gate in front of the store: of all who claim one key here at the same time, few ask at once.
//!
//! Ten thousand requests with one key that arrive together would otherwise be ten thousand calls in flight, and whoever
//! runs could not get its heartbeat through between them. The others stand in line; when their turn comes, the answer
//! may be here already. Only claims stand in line: heartbeats and ends never do.
//!
//! Invariant: a gate is listed exactly while somebody is at it.

use std::{collections::HashMap, sync::Arc};

use ibid::store::Address;
use parking_lot::Mutex;
use tokio::sync::{Semaphore, SemaphorePermit};

const SHARD_COUNT: usize = 16;
/// So many claims of one key are at the store at the same time.
const MAX_CONCURRENT_CLAIMS_PER_KEY: usize = 32;

#[derive(Debug)]
pub(super) struct ClaimLimiter(Box<[Mutex<KeyLimiters>]>);

type KeyLimiters = HashMap<Address, Arc<KeyLimiter>>;

#[derive(Debug)]
struct KeyLimiter {
    permits: Semaphore,
    /// How many are inside or in line. Written under the lock of the list.
    user_count: Mutex<u32>,
}

/// One who is at a gate. The last to leave takes it off the list.
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
    /// Leave to ask, and whether it had to be waited for.
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
