//! Whether what `first` remembers as finished may be believed.
//!
//! A forget that could not reach `first` would leave an answer there that nobody is to get any more. So it raises a
//! number in `last`, the generation, which is part of every key in `first`: all that was there is out of sight.
//! Everybody reads the number at the start and every few seconds ([`follow`]), whether or not anything is looked up: who
//! does not know it when `last` goes away could not tell what runs on `first` alone. And it is read before `first` is
//! believed again after it could not be reached.

use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};

use futures_util::future::BoxFuture;
use ibid::store::{Address, StoreError};
use tokio::{
    sync::{Mutex, MutexGuard},
    time::{Instant, sleep},
};

use super::TieredInner;

/// How long the generation is believed without reading it again.
const GENERATION_REFRESH_INTERVAL: Duration = Duration::from_secs(5);

/// The number under which `first` keeps everything.
pub trait GenerationCounter: Send + Sync + 'static {
    /// Reads it from `last`.
    fn read(&self) -> BoxFuture<'_, Result<u64, StoreError>>;

    /// Raises it in `last`. Returns what it is now.
    fn raise(&self) -> BoxFuture<'_, Result<u64, StoreError>>;

    /// From now on `first` is used under this number. It only goes up: a lower one is ignored.
    fn apply(&self, generation: u64);
}

pub(super) struct GenerationTracker {
    counter: Option<Arc<dyn GenerationCounter>>,
    /// `first` could not be reached since the number was last read, or it never was.
    is_front_unconfirmed: AtomicBool,
    /// When it was last read and what it was. Locked while somebody reads it, so that one does.
    last_read: Mutex<Option<(Instant, u64)>>,
    /// How often another was applied.
    epoch: AtomicU64,
}

impl GenerationTracker {
    pub(super) fn new(counter: Option<Arc<dyn GenerationCounter>>) -> Self {
        Self {
            counter,
            is_front_unconfirmed: AtomicBool::new(true),
            last_read: Mutex::const_new(None),
            epoch: AtomicU64::new(0),
        }
    }

    pub(super) fn mark_front_unconfirmed(&self) {
        self.is_front_unconfirmed.store(true, SeqCst);
    }

    /// Whether an answer that `first` gave before this call may be believed. If not, `first` may be asked again: it is
    /// under the right number by then, unless that could not be read.
    pub(super) async fn is_front_current(&self, parts: &TieredInner) -> bool {
        let Some(generations) = &self.counter else { return true };
        let mut read = self.last_read.lock().await;
        let is_fresh = read.is_some_and(|(at, _)| at.elapsed() < GENERATION_REFRESH_INTERVAL);
        if is_fresh && !self.is_front_unconfirmed.load(SeqCst) {
            return true;
        }
        self.reload(parts, &**generations, &mut read).await
    }

    /// Reads the number, whether or not somebody needs it now.
    pub(super) async fn refresh(&self, parts: &TieredInner) {
        let Some(generations) = &self.counter else { return };
        // A number that is read while `first` cannot be reached does not make it credible afterwards.
        let is_out_of_sight =
            self.is_front_unconfirmed.load(SeqCst) && parts.front.get(&Address([0; 32])).await.is_err();
        let mut read = self.last_read.lock().await;
        self.reload(parts, &**generations, &mut read).await;
        if is_out_of_sight {
            self.mark_front_unconfirmed();
        }
    }

    /// Whether the number is what it was, or may be taken to be.
    async fn reload(
        &self, parts: &TieredInner, generations: &dyn GenerationCounter,
        read: &mut MutexGuard<'_, Option<(Instant, u64)>>,
    ) -> bool {
        let was_blind = self.is_front_unconfirmed.swap(false, SeqCst);
        let before = Instant::now();
        match generations.read().await {
            Ok(generation) => {
                let is_same = read.is_some_and(|(_, known)| known == generation);
                if !is_same {
                    self.apply(generations, generation);
                }
                **read = Some((before, generation));
                is_same
            }
            Err(error) => {
                // At the start others say that it cannot be reached.
                if read.is_some() {
                    parts.observer.on_event(&ibid::EngineEvent::StoreFailed { call: "generation", error: &error });
                }
                if was_blind {
                    self.is_front_unconfirmed.store(true, SeqCst);
                    return false;
                }
                // Nobody forgets anything while `last` is away.
                true
            }
        }
    }

    /// Puts all that is in `first` out of sight.
    pub(super) async fn raise(&self, why: StoreError) -> Result<(), StoreError> {
        let Some(generations) = &self.counter else { return Err(why) };
        let mut read = self.last_read.lock().await;
        let before = Instant::now();
        let generation = generations.raise().await?;
        self.apply(&**generations, generation);
        *read = Some((before, generation));
        Ok(())
    }

    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(SeqCst)
    }

    fn apply(&self, generations: &dyn GenerationCounter, generation: u64) {
        // Before: what is under way finds it changed, or goes where nobody looks any more.
        self.epoch.fetch_add(1, SeqCst);
        generations.apply(generation);
    }
}

/// Keeps the number known for as long as the store lives.
pub(super) async fn refresh_periodically(parts: Weak<TieredInner>) {
    loop {
        sleep(GENERATION_REFRESH_INTERVAL).await;
        let Some(parts) = parts.upgrade() else { return };
        parts.generation.refresh(&parts).await;
    }
}
