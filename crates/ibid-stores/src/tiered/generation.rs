//! Decides whether completed answers in the front can be trusted.
//!
//! A forget that cannot reach the front would leave its answer there. Instead it raises a number in the authority, the
//! generation, which is part of every key name in the front: all earlier entries become invisible. Every process reads
//! the generation at start and every few seconds ([`refresh_periodically`]), even if idle: a process without the
//! generation could not find front-only claims once the authority is unreachable. It is also read before the front is
//! trusted again after an error.

use std::sync::{
    Weak,
    atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
};

use futures_util::future::BoxFuture;
use tokio::sync::{Mutex, MutexGuard};

use super::*;

/// How long a generation is trusted before it is read again.
const GENERATION_TRUST: Duration = Duration::from_secs(5);
/// How often it is read. More often than it must be: replays then never wait for it.
const GENERATION_REFRESH_INTERVAL: Duration = Duration::from_secs(2);

/// Persists the generation: the number under which the front stores all entries.
pub trait GenerationCounter: Send + Sync + 'static {
    /// Reads the generation from the authority.
    fn read(&self) -> BoxFuture<'_, Result<u64, StoreError>>;

    /// Raises the generation in the authority, and returns the new one.
    fn raise(&self) -> BoxFuture<'_, Result<u64, StoreError>>;

    /// Switches the front to this generation. A lower one than before is ignored.
    fn apply(&self, generation: u64);
}

pub(super) struct GenerationTracker {
    counter: Option<Arc<dyn GenerationCounter>>,
    /// The front failed since the generation was last read, or it was never read.
    is_front_unconfirmed: AtomicBool,
    /// Time and value of the last read. Locked during a read, so that only one runs at a time.
    last_read: Mutex<Option<(Instant, u64)>>,
    /// When that read began, in milliseconds since `opened_at`; 0 before the first. Replays look here, without a lock.
    last_read_ms: AtomicU64,
    opened_at: Instant,
    /// Number of generation changes applied.
    epoch: AtomicU64,
}

impl GenerationTracker {
    pub(super) fn new(counter: Option<Arc<dyn GenerationCounter>>) -> Self {
        Self {
            counter,
            is_front_unconfirmed: AtomicBool::new(true),
            last_read: Mutex::const_new(None),
            last_read_ms: AtomicU64::new(0),
            opened_at: Instant::now(),
            epoch: AtomicU64::new(0),
        }
    }

    pub(super) fn mark_front_unconfirmed(&self) {
        self.is_front_unconfirmed.store(true, SeqCst);
    }

    /// Whether an answer that the front gave before this call can be trusted. If not, the front can be asked again: it
    /// uses the current generation by then, unless that could not be read.
    pub(super) async fn is_front_current(&self, parts: &TieredInner) -> bool {
        let Some(generations) = &self.counter else { return true };
        if self.is_confirmed() {
            return true;
        }
        let mut read = self.last_read.lock().await;
        // Another call may have read it meanwhile.
        self.is_confirmed() || self.reload(parts, &**generations, &mut read).await
    }

    fn is_confirmed(&self) -> bool {
        let last_read = Duration::from_millis(self.last_read_ms.load(SeqCst));
        let is_fresh = !last_read.is_zero() && self.opened_at.elapsed() < last_read + GENERATION_TRUST;
        is_fresh && !self.is_front_unconfirmed.load(SeqCst)
    }

    fn set_last_read(&self, read: &mut Option<(Instant, u64)>, began: Instant, generation: u64) {
        *read = Some((began, generation));
        let since_opened = began.saturating_duration_since(self.opened_at).as_millis() as u64;
        self.last_read_ms.store(since_opened.max(1), SeqCst);
    }

    /// Reads the generation, even if no call needs it now.
    pub(super) async fn refresh(&self, parts: &TieredInner) {
        let Some(generations) = &self.counter else { return };
        // A generation read while the front is unreachable does not make the front trustworthy afterwards.
        let is_out_of_sight =
            self.is_front_unconfirmed.load(SeqCst) && parts.front.get(&Address([0; 32])).await.is_err();
        let mut read = self.last_read.lock().await;
        self.reload(parts, &**generations, &mut read).await;
        if is_out_of_sight {
            self.mark_front_unconfirmed();
        }
    }

    /// Reads the generation. Returns whether it is unchanged, or can be assumed to be.
    async fn reload(
        &self, parts: &TieredInner, generations: &dyn GenerationCounter,
        read: &mut MutexGuard<'_, Option<(Instant, u64)>>,
    ) -> bool {
        // An error during the read sets the flag again. Until the read has ended, other calls wait for it.
        let was_blind = self.is_front_unconfirmed.load(SeqCst);
        if was_blind {
            self.last_read_ms.store(0, SeqCst);
            self.is_front_unconfirmed.store(false, SeqCst);
        }
        let before = Instant::now();
        match generations.read().await {
            Ok(generation) => {
                let is_same = read.is_some_and(|(_, known)| known == generation);
                if !is_same {
                    self.apply(generations, generation);
                }
                self.set_last_read(read, before, generation);
                is_same
            }
            Err(error) => {
                // Before the first read, other calls report that the authority is unreachable.
                if read.is_some() {
                    parts.observer.on_event(&ibid::observe::EngineEvent::StoreFailed("generation", &error));
                }
                if was_blind {
                    self.is_front_unconfirmed.store(true, SeqCst);
                    return false;
                }
                // No forget succeeds while the authority is unreachable.
                true
            }
        }
    }

    /// Makes all entries in the front invisible.
    pub(super) async fn raise(&self, why: StoreError) -> Result<(), StoreError> {
        let Some(generations) = &self.counter else { return Err(why) };
        let mut read = self.last_read.lock().await;
        let before = Instant::now();
        let generation = generations.raise().await?;
        self.apply(&**generations, generation);
        self.set_last_read(&mut read, before, generation);
        Ok(())
    }

    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(SeqCst)
    }

    fn apply(&self, generations: &dyn GenerationCounter, generation: u64) {
        // Increment first: running tasks see the change, or write under a generation that is no longer read.
        self.epoch.fetch_add(1, SeqCst);
        generations.apply(generation);
    }
}

/// Refreshes the generation for as long as the store lives.
pub(super) async fn refresh_periodically(parts: Weak<TieredInner>) {
    loop {
        sleep(GENERATION_REFRESH_INTERVAL).await;
        let Some(parts) = parts.upgrade() else { return };
        parts.generation.refresh(&parts).await;
    }
}
