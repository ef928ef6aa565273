//! Counts running operations, so that a shutdown can wait for them.

use std::{
    future::Future,
    mem,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
};

use parking_lot::Mutex;
use tokio::{runtime::Handle, sync::Notify, task::JoinSet};

/// Counts running operations. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct RunningOperations(Arc<RunningState>);

#[derive(Debug, Default)]
struct RunningState {
    count: AtomicUsize,
    closed: AtomicBool,
    idle: Notify,
    /// Work that continues after its caller has left.
    detached: Mutex<JoinSet<()>>,
}

/// One running operation. Dropping the slot ends it.
#[derive(Debug)]
pub struct RunSlot(Arc<RunningState>);

impl RunningOperations {
    /// Takes a slot, unless `at_most` slots are taken.
    pub fn try_enter(&self, at_most: usize) -> Option<RunSlot> {
        if self.0.count.fetch_add(1, SeqCst) < at_most {
            return Some(RunSlot(self.0.clone()));
        }
        drop(RunSlot(self.0.clone()));
        None
    }

    /// The number of running operations.
    pub fn count(&self) -> usize {
        self.0.count.load(SeqCst)
    }

    /// Returns once no operation is running.
    pub async fn wait_idle(&self) {
        loop {
            let idle = self.0.idle.notified();
            tokio::pin!(idle);
            // Registers before checking the count, so that the last exit in between is not missed.
            idle.as_mut().enable();
            if self.count() == 0 {
                return;
            }
            idle.await;
        }
    }

    /// Continues work whose caller has left. Without a runtime, or after [`close`](Self::close), the work is dropped.
    pub(crate) fn detach(&self, work: impl Future<Output = ()> + Send + 'static) {
        let Ok(runtime) = Handle::try_current() else { return };
        let mut detached = self.0.detached.lock();
        while detached.try_join_next().is_some() {}
        if !self.0.closed.load(SeqCst) {
            detached.spawn_on(work, &runtime);
        }
    }

    /// Drops all detached work, now and in the future. The dropped claims are parked: once this returns, their parking is
    /// in the settle queue.
    pub async fn close(&self) {
        self.0.closed.store(true, SeqCst);
        let mut detached = mem::take(&mut *self.0.detached.lock());
        detached.shutdown().await;
    }
}

impl Drop for RunSlot {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, SeqCst) == 1 {
            self.0.idle.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Aborting a task only marks it; its runtime drops it later.
    #[tokio::test]
    async fn a_close_ends_when_all_detached_work_is_dropped() {
        let running = RunningOperations::default();
        for _ in 0..10 {
            let slot = running.try_enter(10).unwrap();
            running.detach(async move {
                std::future::pending::<()>().await;
                drop(slot);
            });
        }
        running.close().await;
        assert_eq!(running.count(), 0);
        running.detach(async { unreachable!("it is closed") });
    }

    #[tokio::test]
    async fn drained_waits_for_the_last_slot() {
        let running = RunningOperations::default();
        running.wait_idle().await;
        let one = running.try_enter(2).unwrap();
        let two = running.try_enter(2).unwrap();
        assert!(running.try_enter(2).is_none());
        let drained = tokio::spawn({
            let running = running.clone();
            async move { running.wait_idle().await }
        });
        drop(one);
        tokio::task::yield_now().await;
        assert!(!drained.is_finished());
        drop(two);
        drained.await.unwrap();
    }
}
