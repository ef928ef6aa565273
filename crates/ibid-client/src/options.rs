//! The options of a call, and the waits between its attempts.
//!
//! Jitter adds up to a quarter to a wait and never shortens it: enough to keep many clients from retrying in step.

use std::{fmt, path::PathBuf, sync::Arc, time::Duration};

use http::HeaderName;

use crate::{FileJournal, JournalError, KeyGenerator, KeyJournal, MemoryJournal};

/// How requests are sent and retried, and when to give up. Cheap to clone.
///
/// ```
/// use ibid_client::{KeyGenerator, Schedule, SendOptions};
///
/// let options = SendOptions::in_folder("/var/lib/shop/keys")
///     .schedule(Schedule::linear())
///     .operation("order-17")
///     .key_generator(KeyGenerator::UuidV7);
/// ```
#[derive(Debug, Clone)]
pub struct SendOptions {
    pub(crate) journal: Arc<dyn KeyJournal>,
    pub(crate) header: HeaderName,
    pub(crate) schedule: Schedule,
    pub(crate) retry_5xx: bool,
    pub(crate) attempt_timeout: Duration,
    pub(crate) deadline: Option<Duration>,
    pub(crate) max_retry_after: Duration,
    pub(crate) server_ttl: Duration,
    pub(crate) max_response: usize,
    pub(crate) operation: OperationSpec,
}

/// The operation that a request belongs to.
///
/// The journal stores the key of a *named* operation, after a success for as long as the server remembers it. The same
/// name means the same operation, also after a restart, and running it again returns the same response. A final 4xx or
/// [`SendOptions::forget`] frees the name. Without a name, the key lives as long as the call.
#[derive(Debug, Clone, Default)]
pub struct OperationSpec {
    pub(crate) name: Option<String>,
    pub(crate) key_generator: Option<KeyGenerator>,
}

impl OperationSpec {
    /// An operation with this name, such as `order-17`.
    pub fn named(name: impl Into<String>) -> OperationSpec {
        OperationSpec { name: Some(name.into()), key_generator: None }
    }

    /// An unnamed operation whose key this generator makes.
    pub fn with_key_generator(mint: KeyGenerator) -> OperationSpec {
        OperationSpec { name: None, key_generator: Some(mint) }
    }

    /// Sets the generator for the key, used if the journal holds none.
    pub fn key_generator(self, mint: KeyGenerator) -> OperationSpec {
        OperationSpec { key_generator: Some(mint), ..self }
    }
}

/// Methods that set the field of the same name.
macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident: $type:ty;)*) => { $(
        $(#[$doc])*
        pub fn $name(self, $name: $type) -> SendOptions {
            SendOptions { $name, ..self }
        }
    )* };
}

impl SendOptions {
    /// Stores the keys of named operations in files of this folder: they survive restarts and power failures.
    pub fn in_folder(folder: impl Into<PathBuf>) -> SendOptions {
        SendOptions::with_journal(Arc::new(FileJournal::at(folder)))
    }

    /// Stores the keys of named operations in memory. A restart forgets them, so an operation started before it may run
    /// twice.
    pub fn in_memory() -> SendOptions {
        SendOptions::with_journal(Arc::new(MemoryJournal::default()))
    }

    /// Stores the keys of named operations in the caller's own journal.
    pub fn with_journal(journal: Arc<dyn KeyJournal>) -> SendOptions {
        SendOptions {
            journal,
            header: HeaderName::from_static("idempotency-key"),
            schedule: Schedule::default(),
            retry_5xx: false,
            attempt_timeout: Duration::from_secs(90),
            deadline: None,
            max_retry_after: Duration::from_secs(60),
            server_ttl: Duration::from_secs(24 * 60 * 60),
            max_response: 1 << 20,
            operation: OperationSpec::default(),
        }
    }

    /// The journal in use, for example to list [`pending`](KeyJournal::pending) operations after a restart.
    pub fn journal(&self) -> &Arc<dyn KeyJournal> {
        &self.journal
    }

    /// Frees the name of an operation: the next call with it is a new operation with a new key.
    ///
    /// # Errors
    /// [`JournalError`] if the journal cannot be changed.
    pub async fn forget(&self, operation: &str) -> Result<(), JournalError> {
        self.journal.forget(operation, None).await
    }

    /// Names the operation. See [`OperationSpec`].
    pub fn operation(mut self, name: impl Into<String>) -> SendOptions {
        self.operation.name = Some(name.into());
        self
    }

    /// Sets the generator for new keys; a random UUID by default.
    pub fn key_generator(mut self, mint: KeyGenerator) -> SendOptions {
        self.operation.key_generator = Some(mint);
        self
    }

    /// Limits the time of the whole call. Without a deadline, only the schedule and the attempt timeout limit it.
    pub fn deadline(self, deadline: Duration) -> SendOptions {
        SendOptions { deadline: Some(deadline), ..self }
    }

    setters! {
        /// Sets the header that carries the key; `Idempotency-Key` by default. Some servers expect `X-Idempotency-Key`.
        header: HeaderName;
        /// Sets the number of attempts and the waits between them.
        schedule: Schedule;
        /// Whether to retry other 5xx responses, such as 500; off by default. A server that does not remember them runs
        /// the operation again.
        retry_5xx: bool;
        /// Limits the time of one attempt, including its whole response; 90 s by default. Choose more than the server's
        /// own timeout, or only the next attempt sees the response.
        attempt_timeout: Duration;
        /// Limits the `Retry-After` that the client waits for; 60 s by default. A longer one ends the call.
        max_retry_after: Duration;
        /// Tells how long the server remembers a key (its `ttl`); 24 h by default. The journal keeps the key of a
        /// finished operation that long. An unfinished operation with an older key is not sent again, because the
        /// server may treat it as a new one.
        server_ttl: Duration;
        /// Limits the response size that is buffered, in bytes; 1 MiB by default. A buffered response that breaks off is
        /// retried. Larger ones and event streams are streamed to the caller.
        max_response: usize;
    }
}

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
