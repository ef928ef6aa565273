//! Values that exist for as long as somebody uses them, and the waiters of holders as such values.

use std::{
    collections::HashMap,
    fmt,
    hash::{BuildHasher, Hash},
    ops::Deref,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    sync::Notify,
    time::{Instant, timeout_at},
};

use super::{Address, Fence, StoreError, address_hasher::AddressHashBuilder};

const SHARD_COUNT: usize = 16;
/// Upper limit of a wait, so that adding it does not overflow the clock.
const MAX_WAIT: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// Shares one value per key among its users. The last user removes it.
pub struct SharedMap<K, V> {
    shards: [Mutex<HashMap<K, SharedSlot<V>, AddressHashBuilder>>; SHARD_COUNT],
    hasher: AddressHashBuilder,
    len: AtomicUsize,
}

struct SharedSlot<V> {
    value: Arc<V>,
    users: u32,
}

/// A user of a value in a [`SharedMap`].
pub struct SharedValue<'a, K: Copy + Eq + Hash, V> {
    map: &'a SharedMap<K, V>,
    key: K,
    value: Arc<V>,
}

impl<K: Copy + Eq + Hash, V> SharedMap<K, V> {
    fn shard(&self, key: &K) -> &Mutex<HashMap<K, SharedSlot<V>, AddressHashBuilder>> {
        &self.shards[self.hasher.hash_one(key) as usize % SHARD_COUNT]
    }

    /// Returns the number of values.
    pub fn len(&self) -> usize {
        self.len.load(SeqCst)
    }

    /// Returns `true` if there are no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the value of a key, which `create` creates if there is none.
    pub fn join(&self, key: K, create: impl FnOnce() -> V) -> SharedValue<'_, K, V> {
        let mut shard = self.shard(&key).lock();
        let slot = shard.entry(key).or_insert_with(|| {
            self.len.fetch_add(1, SeqCst);
            SharedSlot { value: Arc::new(create()), users: 0 }
        });
        slot.users += 1;
        SharedValue { map: self, key, value: slot.value.clone() }
    }

    /// Removes the value of a key. Its users keep it; the next user gets a new one.
    pub fn remove(&self, key: &K) -> Option<Arc<V>> {
        if self.is_empty() {
            return None;
        }
        let slot = self.shard(key).lock().remove(key)?;
        self.len.fetch_sub(1, SeqCst);
        Some(slot.value)
    }

    /// Returns `true` if there is a value of this key.
    pub fn contains(&self, key: &K) -> bool {
        !self.is_empty() && self.shard(key).lock().contains_key(key)
    }

    /// Calls `visit` with each value.
    pub fn for_each(&self, visit: impl Fn(&V)) {
        self.shards.iter().for_each(|shard| shard.lock().values().for_each(|slot| visit(&slot.value)));
    }
}

impl<K: Copy + Eq + Hash, V> SharedValue<'_, K, V> {
    /// Returns `true` until the value is removed from the map.
    pub fn is_listed(&self) -> bool {
        self.map.shard(&self.key).lock().get(&self.key).is_some_and(|slot| Arc::ptr_eq(&slot.value, &self.value))
    }

    /// Removes the value from the map, unless it is removed already.
    pub fn unlist(&self) {
        self.leave(u32::MAX);
    }

    fn leave(&self, users: u32) {
        let mut shard = self.map.shard(&self.key).lock();
        if let Some(slot) = shard.get_mut(&self.key).filter(|slot| Arc::ptr_eq(&slot.value, &self.value)) {
            slot.users = slot.users.saturating_sub(users);
            if slot.users == 0 {
                shard.remove(&self.key);
                self.map.len.fetch_sub(1, SeqCst);
            }
        }
    }
}

impl<K: Copy + Eq + Hash, V> Drop for SharedValue<'_, K, V> {
    fn drop(&mut self) {
        self.leave(1);
    }
}

impl<K: Copy + Eq + Hash, V> Deref for SharedValue<'_, K, V> {
    type Target = V;

    fn deref(&self) -> &V {
        &self.value
    }
}

impl<K, V> Default for SharedMap<K, V> {
    fn default() -> Self {
        Self { shards: Default::default(), hasher: AddressHashBuilder::default(), len: AtomicUsize::new(0) }
    }
}

impl<K, V> fmt::Debug for SharedMap<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedMap({})", self.len.load(SeqCst))
    }
}

/// Waiters in this process, by the holder that they wait for.
#[derive(Debug, Default)]
pub struct HolderWaits(SharedMap<(Address, Fence), Notify>);

impl HolderWaits {
    /// Wakes the waiters of a holder that no longer runs. Call it after the change is visible to their checks.
    pub fn wake(&self, at: &Address, ended: Fence) {
        if let Some(waiters) = self.0.remove(&(*at, ended)) {
            waiters.notify_waiters();
        }
    }

    /// Makes all waiters check again, because changes may have been missed.
    pub fn check_again(&self) {
        self.0.for_each(Notify::notify_waiters);
    }

    /// Returns `true` if somebody waits for this holder.
    pub fn is_awaited(&self, at: &Address, seen: Fence) -> bool {
        self.0.contains(&(*at, seen))
    }

    /// Waits until `seen` is woken, or for `limit`.
    ///
    /// `check` returns how long the holder surely runs, or `None` if it does not run. It is called after the waiter is
    /// registered, so no change in between is missed, and again when the returned time is over.
    ///
    /// # Errors
    /// Returns the error of `check`.
    pub async fn wait<F: Future<Output = Result<Option<Duration>, StoreError>>>(
        &self, at: &Address, seen: Fence, limit: Duration, check: impl Fn() -> F,
    ) -> Result<(), StoreError> {
        let deadline = Instant::now() + limit.min(MAX_WAIT);
        let waiters = self.0.join((*at, seen), Notify::new);
        loop {
            let woken = waiters.notified();
            tokio::pin!(woken);
            woken.as_mut().enable();
            if !waiters.is_listed() {
                return Ok(());
            }
            let Ok(checked) = timeout_at(deadline, check()).await else { return Ok(()) };
            let Some(runs_for) = checked? else { return Ok(()) };
            let _ = timeout_at((Instant::now() + runs_for.min(MAX_WAIT)).min(deadline), woken).await;
            if Instant::now() >= deadline {
                return Ok(());
            }
        }
    }
}
