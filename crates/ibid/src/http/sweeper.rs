//! Removes what has expired from the store, in the background.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::{runtime::Handle, sync::watch, time::sleep};

use crate::{engine::Engine, store::Store};

/// Entries that are removed in one call of the store.
const SWEEP_BATCH_SIZE: u32 = 1000;
/// Calls in one round: what is left waits for the next.
const MAX_BATCHES_PER_ROUND: u32 = 100;

/// A task that sweeps, for as long as this is not dropped.
pub(super) struct Sweeper {
    interval: Option<Duration>,
    started: AtomicBool,
    /// Ends the task when it is dropped.
    stop_on_drop: watch::Sender<()>,
}

impl Sweeper {
    pub(super) fn new(every: Option<Duration>) -> Self {
        let interval = every.filter(|every| !every.is_zero());
        Self { interval, started: AtomicBool::new(interval.is_none()), stop_on_drop: watch::Sender::new(()) }
    }

    /// Starts the task, unless it was started already or there is no runtime yet.
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
            // A store that cannot sweep now is asked again in the next round.
            let Ok(swept) = store.sweep(SWEEP_BATCH_SIZE).await else { break };
            if !swept.more || alive.has_changed().is_err() {
                break;
            }
            tokio::task::yield_now().await;
        }
    }
}
