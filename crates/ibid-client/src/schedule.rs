//! The waits between attempts.
//!
//! Jitter adds up to a quarter to a wait and never shortens it: enough to keep many clients from retrying in step.

use std::{fmt, time::Duration};

/// Longest wait of any schedule.
const MAX_WAIT: Duration = Duration::from_secs(60);

/// How the waits between attempts grow, and the number of attempts.
///
/// | name | waits | attempts |
/// |---|---|---|
/// | [`exponential`](Schedule::exponential), the default | 100, 200, 400, 800 ms | 5 |
/// | [`linear`](Schedule::linear) | 1, 2 s (then 3, 4 …, if there are more attempts) | 3 |
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Schedule {
    growth: WaitGrowth,
    initial_wait: Duration,
    attempts: u32,
    jitter: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WaitGrowth {
    Exponential,
    Linear,
}

impl Schedule {
    /// Waits 100 ms, then twice as long each time; 5 attempts.
    pub const fn exponential() -> Schedule {
        Schedule {
            growth: WaitGrowth::Exponential,
            initial_wait: Duration::from_millis(100),
            attempts: 5,
            jitter: true,
        }
    }

    /// Waits 1 s, then one second longer each time; 3 attempts.
    pub const fn linear() -> Schedule {
        Schedule { growth: WaitGrowth::Linear, initial_wait: Duration::from_secs(1), attempts: 3, jitter: true }
    }

    /// Makes one attempt and never retries.
    pub const fn once() -> Schedule {
        Schedule { attempts: 1, ..Schedule::exponential() }
    }

    /// Looks up a schedule by name: `exponential`, `linear` or `once`.
    pub fn from_name(name: &str) -> Option<Schedule> {
        match name {
            "exponential" => Some(Schedule::exponential()),
            "linear" => Some(Schedule::linear()),
            "once" => Some(Schedule::once()),
            _ => None,
        }
    }

    /// Sets the number of attempts, including the first; at least 1.
    pub const fn attempts(self, attempts: u32) -> Schedule {
        Schedule { attempts: if attempts == 0 { 1 } else { attempts }, ..self }
    }

    /// Sets the first wait, from which the others grow.
    pub const fn first(self, first: Duration) -> Schedule {
        Schedule { initial_wait: first, ..self }
    }

    /// Turns jitter off. For tests, and for a client that is the only one.
    pub const fn without_jitter(self) -> Schedule {
        Schedule { jitter: false, ..self }
    }

    /// The maximum number of attempts, including the first.
    pub const fn max_attempts(&self) -> u32 {
        self.attempts
    }

    /// The wait after this many attempts, without jitter; `None` if no attempt is left.
    pub fn wait(&self, attempts_made: u32) -> Option<Duration> {
        if attempts_made == 0 || attempts_made >= self.attempts {
            return None;
        }
        let factor = match self.growth {
            WaitGrowth::Exponential => 1u32.checked_shl(attempts_made - 1).unwrap_or(u32::MAX),
            WaitGrowth::Linear => attempts_made,
        };
        Some(self.initial_wait.saturating_mul(factor).min(MAX_WAIT))
    }

    /// Adds jitter: up to a quarter of the wait.
    pub(crate) fn with_jitter(&self, wait: Duration) -> Duration {
        if !self.jitter {
            return wait;
        }
        // If the system has no randomness, there is no jitter.
        let dice = getrandom::u32().unwrap_or(0);
        let share = wait.as_nanos() / 4 * u128::from(dice) / u128::from(u32::MAX);
        wait.saturating_add(Duration::from_nanos(u64::try_from(share).unwrap_or(u64::MAX)))
    }
}

impl Default for Schedule {
    fn default() -> Self {
        Schedule::exponential()
    }
}

impl fmt::Debug for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (first, attempts) = (self.initial_wait, self.attempts);
        write!(f, "Schedule({:?} from {first:?}, {attempts} attempts)", self.growth)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits(schedule: Schedule) -> Vec<u128> {
        (1..).map_while(|made| schedule.wait(made)).map(|wait| wait.as_millis()).collect()
    }

    #[test]
    fn the_named_schedules_are_as_documented() {
        assert_eq!(waits(Schedule::default()), [100, 200, 400, 800]);
        assert_eq!(waits(Schedule::linear()), [1000, 2000]);
        assert_eq!(waits(Schedule::linear().attempts(5)), [1000, 2000, 3000, 4000]);
        assert_eq!(waits(Schedule::once()), [0; 0]);
        assert_eq!(waits(Schedule::linear().attempts(0)), [0; 0]);
        assert_eq!(Schedule::from_name("linear"), Some(Schedule::linear()));
        assert_eq!(Schedule::from_name("never"), None);
    }

    #[test]
    fn waits_are_bounded_however_many_there_are() {
        let long = Schedule::exponential().attempts(u32::MAX);
        for made in [11, 33, 1000, u32::MAX - 1] {
            assert_eq!(long.wait(made), Some(MAX_WAIT), "{made}");
        }
    }

    #[test]
    fn jitter_only_adds_and_at_most_a_quarter() {
        let schedule = Schedule::exponential();
        let wait = Duration::from_millis(100);
        let seen: Vec<_> = (0..500).map(|_| schedule.with_jitter(wait)).collect();
        assert!(seen.iter().all(|got| (wait..=wait * 5 / 4).contains(got)), "{seen:?}");
        assert!(seen.iter().any(|got| *got != seen[0]), "it is no jitter if it never differs");
        assert_eq!(schedule.without_jitter().with_jitter(wait), wait);
    }
}
