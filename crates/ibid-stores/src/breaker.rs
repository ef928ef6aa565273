//! One deadline and one circuit breaker around every call to a server.
//!
//! A server that has failed several times in a row is left alone for a while: calls fail at once, saying that nothing
//! was sent. Then one call at a time tries it again. The pauses double, and are jittered so that many processes do not
//! come back at the same moment.

use std::time::Duration;

use ibid::store::ClaimToken;
use parking_lot::Mutex;
use tokio::time::Instant;

/// So many failures in a row open it.
const FAILURE_THRESHOLD: u32 = 5;
const INITIAL_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(2);

/// Whether a server may be called.
#[derive(Debug, Default)]
pub(crate) struct CircuitBreaker(Mutex<BreakerState>);

#[derive(Debug, Default)]
struct BreakerState {
    failures: u32,
    /// While open: when the next call may try.
    retry_at: Option<Instant>,
    backoff: Duration,
}

/// Leave to make one call. Say how it went; dropped without a word, it says nothing.
#[derive(Debug)]
#[must_use]
pub(crate) struct BreakerPermit<'a>(&'a CircuitBreaker);

impl CircuitBreaker {
    /// Leave to call, or how long not to.
    pub(crate) fn pass(&self) -> Result<BreakerPermit<'_>, Duration> {
        let mut state = self.0.lock();
        if let Some(next_try) = state.retry_at {
            let now = Instant::now();
            if now < next_try {
                return Err(next_try - now);
            }
            // This one tries; the others wait for what it finds, at most until the next pause is over.
            state.retry_at = Some(now + state.backoff);
        }
        Ok(BreakerPermit(self))
    }

    /// Whether calls fail at once.
    #[cfg_attr(not(test), allow(dead_code, reason = "not every store asks"))]
    pub(crate) fn is_open(&self) -> bool {
        self.0.lock().retry_at.is_some_and(|next_try| Instant::now() < next_try)
    }

    /// Something besides a call has shown that the server is there again.
    pub(crate) fn close(&self) {
        *self.0.lock() = BreakerState::default();
    }
}

impl BreakerPermit<'_> {
    /// The server answered: anything, even a refusal.
    pub(crate) fn answered(self) {
        self.0.close();
    }

    /// No answer in time, or no connection.
    pub(crate) fn failed(self) {
        let mut state = self.0.0.lock();
        state.failures = state.failures.saturating_add(1);
        if state.failures >= FAILURE_THRESHOLD {
            state.backoff = (state.backoff * 2).clamp(INITIAL_BACKOFF, MAX_BACKOFF);
            state.retry_at = Some(Instant::now() + with_jitter(state.backoff));
        }
    }
}

/// Between half of it and all of it.
pub(crate) fn with_jitter(pause: Duration) -> Duration {
    let [random, ..] = ClaimToken::mint().0;
    pause / 2 + pause / 2 * u32::from(random) / 255
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
