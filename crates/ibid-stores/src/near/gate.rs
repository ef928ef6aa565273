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

const SHARDS: usize = 16;
/// So many claims of one key are at the store at the same time.
const AT_ONCE: usize = 32;

#[derive(Debug)]
pub(super) struct Gates(Box<[Mutex<Listed>]>);

type Listed = HashMap<Address, Arc<Gate>>;

#[derive(Debug)]
struct Gate {
    room: Semaphore,
    /// How many are inside or in line. Written under the lock of the list.
    here: Mutex<u32>,
}

/// One who is at a gate. The last to leave takes it off the list.
#[derive(Debug)]
pub(super) struct Visit<'a> {
    gates: &'a Gates,
    at: Address,
    gate: Arc<Gate>,
}

impl Default for Gates {
    fn default() -> Self {
        Self((0..SHARDS).map(|_| Mutex::default()).collect())
    }
}

impl Gates {
    fn shard(&self, at: &Address) -> &Mutex<Listed> {
        &self.0[usize::from(at.0[29]) % SHARDS]
    }

    pub(super) fn visit(&self, at: &Address) -> Visit<'_> {
        let mut listed = self.shard(at).lock();
        let gate = listed
            .entry(*at)
            .or_insert_with(|| Arc::new(Gate { room: Semaphore::new(AT_ONCE), here: Mutex::default() }))
            .clone();
        *gate.here.lock() += 1;
        Visit { gates: self, at: *at, gate }
    }
}

impl Visit<'_> {
    /// Leave to ask, and whether it had to be waited for.
    pub(super) async fn pass(&self) -> (SemaphorePermit<'_>, bool) {
        match self.gate.room.try_acquire() {
            Ok(permit) => (permit, false),
            Err(_) => (self.gate.room.acquire().await.expect("it is never closed"), true),
        }
    }
}

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        let mut listed = self.gates.shard(&self.at).lock();
        let mut here = self.gate.here.lock();
        *here -= 1;
        if *here == 0 {
            listed.remove(&self.at);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use super::*;

    #[tokio::test]
    async fn few_pass_at_a_time_and_nothing_is_left() {
        let gates = Gates::default();
        let (inside, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let one = async |nth: u8| {
            let visit = gates.visit(&Address([nth % 2; 32]));
            let _pass = visit.pass().await;
            most.fetch_max(inside.fetch_add(1, SeqCst) + 1, SeqCst);
            tokio::task::yield_now().await;
            inside.fetch_sub(1, SeqCst);
        };
        futures_util::future::join_all((0..200).map(one)).await;
        assert_eq!(most.into_inner(), 2 * AT_ONCE);
        assert!(gates.0.iter().all(|listed| listed.lock().is_empty()));
        let given_up = gates.visit(&Address([0; 32]));
        drop(given_up);
        assert!(gates.0.iter().all(|listed| listed.lock().is_empty()));
    }
}
