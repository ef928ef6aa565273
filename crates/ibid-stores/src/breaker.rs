//! Circuit breaker around every call to a server.
//!
//! After several failures in a row, calls fail at once and report that nothing was sent. After a pause, one call at a
//! time tries the server again. The pauses double, and are jittered so that many processes do not retry at the same
//! moment.

use std::{
    sync::atomic::{
        AtomicBool,
        Ordering::{Acquire, Release},
    },
    time::Duration,
};

use ibid::store::with_jitter;
use parking_lot::Mutex;
use tokio::time::Instant;

/// Consecutive failures that open the breaker.
const FAILURE_THRESHOLD: u32 = 5;
const INITIAL_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(2);

#[derive(Debug, Default)]
pub(crate) struct CircuitBreaker {
    state: Mutex<BreakerState>,
    /// Whether `state` has failures. Without any, calls take no lock.
    has_failures: AtomicBool,
}

#[derive(Debug, Default)]
struct BreakerState {
    failures: u32,
    /// While open: the earliest time of the next call.
    retry_at: Option<Instant>,
    backoff: Duration,
}

/// Permission for one call. Report the result with [`Self::answered`] or [`Self::failed`]; dropping it records nothing.
#[derive(Debug)]
#[must_use]
pub(crate) struct BreakerPermit<'a>(&'a CircuitBreaker);

impl CircuitBreaker {
    /// Returns a permit, or the remaining pause if the breaker is open.
    pub(crate) fn pass(&self) -> Result<BreakerPermit<'_>, Duration> {
        if !self.has_failures.load(Acquire) {
            return Ok(BreakerPermit(self));
        }
        let mut state = self.state.lock();
        if let Some(next_try) = state.retry_at {
            let now = Instant::now();
            if now < next_try {
                return Err(next_try - now);
            }
            // This call probes the server; others fail until it reports, or until the next pause ends.
            state.retry_at = Some(now + state.backoff);
        }
        Ok(BreakerPermit(self))
    }

    #[cfg(test)]
    fn is_open(&self) -> bool {
        self.state.lock().retry_at.is_some_and(|next_try| Instant::now() < next_try)
    }

    /// Closes the breaker after other evidence that the server is reachable.
    pub(crate) fn close(&self) {
        if self.has_failures.load(Acquire) {
            let mut state = self.state.lock();
            *state = BreakerState::default();
            self.has_failures.store(false, Release);
        }
    }
}

impl BreakerPermit<'_> {
    /// Records that the server responded, even with an error.
    pub(crate) fn answered(self) {
        self.0.close();
    }

    /// Records that no response came in time, or that no connection was possible.
    pub(crate) fn failed(self) {
        let mut state = self.0.state.lock();
        self.0.has_failures.store(true, Release);
        state.failures = state.failures.saturating_add(1);
        if state.failures >= FAILURE_THRESHOLD {
            state.backoff = (state.backoff * 2).clamp(INITIAL_BACKOFF, MAX_BACKOFF);
            state.retry_at = Some(Instant::now() + with_jitter(state.backoff));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fail(breaker: &CircuitBreaker) {
        breaker.pass().expect("it is closed").failed();
    }

    #[tokio::test(start_paused = true)]
    async fn it_opens_after_failures_in_a_row_and_one_call_at_a_time_tries_again() {
        let breaker = CircuitBreaker::default();
        (1..FAILURE_THRESHOLD).for_each(|_| fail(&breaker));
        breaker.pass().unwrap().answered();
        (0..FAILURE_THRESHOLD).for_each(|_| fail(&breaker));
        assert!(breaker.is_open());
        let wait = breaker.pass().unwrap_err();
        assert!(wait <= INITIAL_BACKOFF && wait >= INITIAL_BACKOFF / 2, "{wait:?}");
        tokio::time::sleep(INITIAL_BACKOFF).await;
        let trying = breaker.pass().unwrap();
        assert!(breaker.pass().is_err(), "only one tries");
        trying.failed();
        let wait = breaker.pass().unwrap_err();
        assert!(wait > INITIAL_BACKOFF / 2 && wait <= INITIAL_BACKOFF * 2, "{wait:?}");
        tokio::time::sleep(INITIAL_BACKOFF * 2).await;
        breaker.pass().unwrap().answered();
        breaker.pass().unwrap().answered();
        assert!(!breaker.is_open());
    }

    #[tokio::test(start_paused = true)]
    async fn a_try_that_is_dropped_does_not_keep_it_open_for_ever() {
        let breaker = CircuitBreaker::default();
        (0..FAILURE_THRESHOLD).for_each(|_| fail(&breaker));
        tokio::time::sleep(INITIAL_BACKOFF).await;
        drop(breaker.pass().unwrap());
        tokio::time::sleep(INITIAL_BACKOFF).await;
        breaker.pass().unwrap().answered();
        assert!(breaker.pass().is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn pauses_end_at_the_longest() {
        let breaker = CircuitBreaker::default();
        (0..FAILURE_THRESHOLD).for_each(|_| fail(&breaker));
        for _ in 0..20 {
            tokio::time::sleep(MAX_BACKOFF).await;
            fail(&breaker);
        }
        assert!(breaker.pass().unwrap_err() <= MAX_BACKOFF);
    }
}
