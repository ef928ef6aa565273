//! The options of a call.

use std::{path::PathBuf, sync::Arc, time::Duration};

use http::HeaderName;

use crate::{FileJournal, JournalError, KeyGenerator, KeyJournal, MemoryJournal, Schedule};

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

    /// Sets the header that carries the key; `Idempotency-Key` by default. Some servers expect `X-Idempotency-Key`.
    pub fn header(self, header: HeaderName) -> SendOptions {
        SendOptions { header, ..self }
    }

    /// Sets the number of attempts and the waits between them.
    pub fn schedule(self, schedule: Schedule) -> SendOptions {
        SendOptions { schedule, ..self }
    }

    /// Whether to retry other 5xx responses, such as 500; off by default. A server that does not remember them runs the
    /// operation again.
    pub fn retry_5xx(self, retry_5xx: bool) -> SendOptions {
        SendOptions { retry_5xx, ..self }
    }

    /// Limits the time of one attempt, including its whole response; 90 s by default. Choose more than the server's own
    /// timeout, or only the next attempt sees the response.
    pub fn attempt_timeout(self, attempt_timeout: Duration) -> SendOptions {
        SendOptions { attempt_timeout, ..self }
    }

    /// Limits the time of the whole call. Without a deadline, only the schedule and the attempt timeout limit it.
    pub fn deadline(self, deadline: Duration) -> SendOptions {
        SendOptions { deadline: Some(deadline), ..self }
    }

    /// Limits the `Retry-After` that the client waits for; 60 s by default. A longer one ends the call.
    pub fn max_retry_after(self, max_retry_after: Duration) -> SendOptions {
        SendOptions { max_retry_after, ..self }
    }

    /// Tells how long the server remembers a key (its `ttl`); 24 h by default. The journal keeps the key of a finished
    /// operation that long. An unfinished operation with an older key is not sent again, because the server may treat
    /// it as a new one.
    pub fn server_ttl(self, lifetime: Duration) -> SendOptions {
        SendOptions { server_ttl: lifetime, ..self }
    }

    /// Limits the response size that is buffered, in bytes; 1 MiB by default. A buffered response that breaks off is
    /// retried. Larger ones and event streams are streamed to the caller.
    pub fn max_response(self, max_answer: usize) -> SendOptions {
        SendOptions { max_response: max_answer, ..self }
    }
}
