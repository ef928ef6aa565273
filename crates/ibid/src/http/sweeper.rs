//! Removes expired entries from the store in the background.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::{runtime::Handle, sync::watch, time::sleep};

use crate::{engine::Engine, store::Store};

/// The maximum number of entries removed per store call.
const SWEEP_BATCH_SIZE: u32 = 1000;
/// The maximum number of store calls per round.
const MAX_BATCHES_PER_ROUND: u32 = 100;

/// Runs the sweeping task until it is dropped.
pub(super) struct Sweeper {
    interval: Option<Duration>,
    started: AtomicBool,
    stop_on_drop: watch::Sender<()>,
}

impl Sweeper {
    pub(super) fn new(every: Option<Duration>) -> Self {
        let interval = every.filter(|every| !every.is_zero());
        Self { interval, started: AtomicBool::new(interval.is_none()), stop_on_drop: watch::Sender::new(()) }
    }

    /// Starts the task, unless it is already running or there is no runtime yet.
    pub(super) fn start(&self, engine: &Engine) {
        if self.started.load(Relaxed) {
            return;
        }
        let (Some(every), Ok(runtime)) = (self.interval, Handle::try_current()) else { return };
        if !self.started.swap(true, Relaxed) {
            runtime.spawn(run_sweeper(engine.store().clone(), every, self.stop_on_drop.subscribe()));
        }
    }
}

async fn run_sweeper(store: Arc<dyn Store>, every: Duration, mut alive: watch::Receiver<()>) {
    loop {
        tokio::select! {
            _ = alive.changed() => return,
            () = sleep(every) => {}
        }
        for _ in 0..MAX_BATCHES_PER_ROUND {
            // If the store call fails, the next round tries again.
            let Ok(swept) = store.sweep(SWEEP_BATCH_SIZE).await else { break };
            if !swept.more || alive.has_changed().is_err() {
                break;
            }
            tokio::task::yield_now().await;
        }
    }
}
