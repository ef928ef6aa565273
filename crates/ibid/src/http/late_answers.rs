//! Limits how many operations are awaited beyond their `timeout`.
//!
//! Such an operation still occupies a connection to the app. A newer one replaces the oldest.

use std::{collections::VecDeque, future::Future, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{sync::Notify, time::timeout};

use crate::engine::UnknownCause;

/// The operations awaited beyond their `timeout`, oldest first.
#[derive(Debug)]
pub(super) struct LateAnswerLimiter {
    max: usize,
    waiting: Mutex<VecDeque<Arc<Notify>>>,
}

/// One awaited operation, until it is dropped.
struct LateAnswerSlot<'a> {
    owner: &'a LateAnswerLimiter,
    evicted: Arc<Notify>,
}

impl LateAnswerLimiter {
    pub(super) fn new(max: usize) -> Self {
        Self { max, waiting: Mutex::default() }
    }

    /// Waits for an answer for at most `limit`, or until `max` newer ones are awaited. `Err` contains why the outcome
    /// is unknown.
    pub(super) async fn wait<F: Future>(&self, limit: Duration, answer: F) -> Result<F::Output, UnknownCause> {
        let late = self.enter();
        tokio::select! {
            biased;
            answered = timeout(limit, answer) => answered.map_err(|_| UnknownCause::NoLateAnswer),
            () = late.evicted.notified() => Err(UnknownCause::TimedOut),
        }
    }

    fn enter(&self) -> LateAnswerSlot<'_> {
        let evicted = Arc::new(Notify::new());
        let mut waiting = self.waiting.lock();
        waiting.push_back(evicted.clone());
        if waiting.len() > self.max
            && let Some(oldest) = waiting.pop_front()
        {
            oldest.notify_one();
        }
        LateAnswerSlot { owner: self, evicted }
    }
}

impl Drop for LateAnswerSlot<'_> {
    fn drop(&mut self) {
        self.owner.waiting.lock().retain(|other| !Arc::ptr_eq(other, &self.evicted));
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_oldest_gives_way_to_a_newer_one() {
        let all = Arc::new(LateAnswerLimiter::new(2));
        let wait = |all: &Arc<LateAnswerLimiter>| {
            let all = all.clone();
            tokio::spawn(async move { all.wait(Duration::from_secs(60), pending::<()>()).await })
        };
        let oldest = wait(&all);
        tokio::task::yield_now().await;
        let others = [wait(&all), wait(&all)];
        assert_eq!(oldest.await.unwrap(), Err(UnknownCause::TimedOut), "it may still be running");
        for other in others {
            assert_eq!(other.await.unwrap(), Err(UnknownCause::NoLateAnswer));
        }
        assert!(all.waiting.lock().is_empty());
    }

    #[tokio::test]
    async fn an_answer_that_is_there_counts_even_if_none_may_be_waited_for() {
        let none = LateAnswerLimiter::new(0);
        assert_eq!(none.wait(Duration::ZERO, ready(7)).await, Ok(7));
        assert_eq!(none.wait(Duration::from_secs(60), pending::<()>()).await, Err(UnknownCause::TimedOut));
    }
}
