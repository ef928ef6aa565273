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
const BATCH: u32 = 1000;
/// Calls in one round: what is left waits for the next.
const MAX_BATCHES: u32 = 100;

/// A task that sweeps, for as long as this is not dropped.
pub(super) struct Sweeping {
    every: Option<Duration>,
    started: AtomicBool,
    /// Ends the task when it is dropped.
    alive: watch::Sender<()>,
}

impl Sweeping {
    pub(super) fn new(every: Option<Duration>) -> Self {
        let every = every.filter(|every| !every.is_zero());
        Self { every, started: AtomicBool::new(every.is_none()), alive: watch::Sender::new(()) }
    }

    /// Starts the task, unless it was started already or there is no runtime yet.
    pub(super) fn start(&self, engine: &Engine) {
        if self.started.load(Relaxed) {
            return;
        }
        let (Some(every), Ok(runtime)) = (self.every, Handle::try_current()) else { return };
        if !self.started.swap(true, Relaxed) {
            runtime.spawn(sweep(engine.store().clone(), every, self.alive.subscribe()));
        }
    }
}

async fn sweep(store: Arc<dyn Store>, every: Duration, mut alive: watch::Receiver<()>) {
    loop {
        tokio::select! {
            _ = alive.changed() => return,
            () = sleep(every) => {}
        }
        for _ in 0..MAX_BATCHES {
            // A store that cannot sweep now is asked again in the next round.
            let Ok(swept) = store.sweep(BATCH).await else { break };
            if !swept.more || alive.has_changed().is_err() {
                break;
            }
            tokio::task::yield_now().await;
        }
    }
}
