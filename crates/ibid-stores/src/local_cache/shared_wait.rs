//! Shares one store-side wait among all local waiters of the same holder.
//!
//! The first waiter becomes the leader and waits at the store, up to its own limit. If it leaves or is dropped, the
//! next one takes over. When the holder is gone, the leader reads the outcome once. A completed answer is cached and
//! all waiters proceed; otherwise they proceed in groups, because each will claim again.
//!
//! Invariants: a wait belongs to one address and one fence, so waiters of different holders are independent; a released
//! wait stays released and is no longer in the map; a wait without waiters is not in the map.

use std::time::Duration;

use ibid::store::{Address, ClaimOutcome, Fence, SharedMap, StoreError};
use parking_lot::Mutex;
use tokio::{
    sync::Notify,
    time::{Instant, sleep, sleep_until},
};

use super::LocalCache;

/// Number of waiters released at once if each of them will call the store.
const RELEASE_GROUP_SIZE: u32 = 64;
const RELEASE_GROUP_DELAY: Duration = Duration::from_millis(5);
/// Maximum delay of a released waiter.
const MAX_RELEASE_DELAY: Duration = Duration::from_secs(1);
/// Upper limit of a wait, so that adding it does not overflow the clock.
const NO_LIMIT: Duration = Duration::from_secs(365 * 24 * 60 * 60);

pub(super) type SharedWaits = SharedMap<(Address, Fence), SharedWait>;

#[derive(Debug, Default)]
pub(super) struct SharedWait {
    /// Notifies all waiters of the release, and one waiter when the leader's place is free.
    changed: Notify,
    state: Mutex<SharedWaitState>,
}

#[derive(Debug, Default)]
struct SharedWaitState {
    has_leader: bool,
    release: Option<ReleaseMode>,
    /// Number of waiters that have proceeded since the release.
    released: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReleaseMode {
    AllAtOnce,
    InGroups,
}

/// Frees the leader's place when dropped.
struct LeaderGuard<'a>(&'a SharedWait);

impl Drop for LeaderGuard<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.has_leader = false;
        if state.release.is_none() {
            drop(state);
            // `notify_one` wakes one waiter or is stored for the next one. A waiter dropped after being notified
            // forwards the notification.
            self.0.changed.notify_one();
        }
    }
}

enum WaiterTurn {
    Proceed(Duration),
    Lead,
    Wait,
}

impl SharedWait {
    fn release(&self, how: ReleaseMode) {
        self.state.lock().release = Some(how);
        self.changed.notify_waiters();
    }

    fn next_turn(&self) -> WaiterTurn {
        let mut state = self.state.lock();
        match state.release {
            Some(ReleaseMode::AllAtOnce) => WaiterTurn::Proceed(Duration::ZERO),
            Some(ReleaseMode::InGroups) => {
                state.released += 1;
                WaiterTurn::Proceed(
                    (RELEASE_GROUP_DELAY * ((state.released - 1) / RELEASE_GROUP_SIZE)).min(MAX_RELEASE_DELAY),
                )
            }
            None if state.has_leader => WaiterTurn::Wait,
            None => {
                state.has_leader = true;
                WaiterTurn::Lead
            }
        }
    }
}

pub(super) async fn wait(cache: &LocalCache, at: &Address, seen: Fence, limit: Duration) -> Result<(), StoreError> {
    if limit.is_zero() || cache.answers.contains(at) {
        return Ok(());
    }
    let deadline = Instant::now() + limit.min(NO_LIMIT);
    let waiter = cache.shared_waits.join((*at, seen), SharedWait::default);
    loop {
        let changed = waiter.changed.notified();
        tokio::pin!(changed);
        // Register before reading the state, so that no later notification is missed.
        changed.as_mut().enable();
        match waiter.next_turn() {
            WaiterTurn::Proceed(held_back) => {
                let left = deadline.saturating_duration_since(Instant::now());
                if !held_back.is_zero() {
                    sleep(held_back.min(left)).await;
                }
                return Ok(());
            }
            WaiterTurn::Lead => {
                let leads = LeaderGuard(&waiter);
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Ok(());
                }
                let waited = cache.store.wait(at, seen, left).await;
                if waited.is_ok() && Instant::now() >= deadline {
                    return Ok(());
                }
                // If this future is dropped from here on, the next leader's wait returns at once.
                let found = if waited.is_ok() { cache.fetch(at).await } else { Ok(None) };
                let is_here = matches!(found, Ok(Some(ClaimOutcome::Completed(_)))) && cache.answers.contains(at);
                // New waiters start another wait.
                waiter.unlist();
                waiter.release(if is_here { ReleaseMode::AllAtOnce } else { ReleaseMode::InGroups });
                drop(leads);
                return waited;
            }
            WaiterTurn::Wait => {
                tokio::select! {
                    () = &mut changed => {}
                    () = sleep_until(deadline) => return Ok(()),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ibid::store::Memory;

    use super::{super::AnswerCache, *};

    #[tokio::test(start_paused = true)]
    async fn rooms_leave_no_trace() {
        let cache = LocalCache::new(Arc::new(Memory::default()), AnswerCache::default());
        for _ in 0..3 {
            wait(&cache, &Address([7; 32]), Fence(1), Duration::from_secs(1)).await.unwrap();
            assert_eq!(cache.shared_waits.len(), 0);
        }
        let waiter = cache.shared_waits.join((Address([7; 32]), Fence(1)), SharedWait::default);
        assert_eq!(cache.shared_waits.len(), 1);
        drop(waiter);
        assert_eq!(cache.shared_waits.len(), 0);
    }
}
