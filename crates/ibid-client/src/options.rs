//! What a caller may choose.

use std::{path::PathBuf, sync::Arc, time::Duration};

use http::HeaderName;

use crate::{FileJournal, JournalError, KeyGenerator, KeyJournal, MemoryJournal, Schedule};

/// How requests are sent, retried and given up. Cheap to clone.
///
/// ```
/// use ibid_client::{Mint, Options, Schedule};
///
/// let options = Options::in_folder("/var/lib/shop/keys")
///     .schedule(Schedule::linear())
///     .operation("order-17")
///     .mint(Mint::V7);
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

/// Which operation a request belongs to.
///
/// A *named* one keeps its key in the journal, after a success for as long as the server remembers it: the same name means the
/// same operation, also after a restart, and running it again gets the same answer. A final 4xx frees the name, and so
/// does [`SendOptions::forget`]. Without a name the key lives as long as the call.
#[derive(Debug, Clone, Default)]
pub struct OperationSpec {
    pub(crate) name: Option<String>,
    pub(crate) key_generator: Option<KeyGenerator>,
}

impl OperationSpec {
    /// The operation of this name, such as `order-17`.
    pub fn named(name: impl Into<String>) -> OperationSpec {
        OperationSpec { name: Some(name.into()), key_generator: None }
    }

    /// An operation whose key is made like this.
    pub fn with_key_generator(mint: KeyGenerator) -> OperationSpec {
        OperationSpec { name: None, key_generator: Some(mint) }
    }

    /// Makes its key like this, if it has none yet.
    pub fn key_generator(self, mint: KeyGenerator) -> OperationSpec {
        OperationSpec { key_generator: Some(mint), ..self }
    }
}

impl SendOptions {
    /// Keeps the keys of named operations in files of this folder: they survive a restart, and a loss of power.
    pub fn in_folder(folder: impl Into<PathBuf>) -> SendOptions {
        SendOptions::with_journal(Arc::new(FileJournal::at(folder)))
    }

    /// Keeps the keys of named operations in memory: a restart forgets them, and what was begun before it may happen twice.
    pub fn in_memory() -> SendOptions {
        SendOptions::with_journal(Arc::new(MemoryJournal::default()))
    }

    /// Keeps the keys of named operations in a journal of the caller's own.
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

    /// The journal in use, to see what is pending after a restart.
    pub fn journal(&self) -> &Arc<dyn KeyJournal> {
        &self.journal
    }

    /// Frees the name of an operation: the next call with it is a new operation, with a new key.
    ///
    /// # Errors
    /// If the journal cannot be changed.
    pub async fn forget(&self, operation: &str) -> Result<(), JournalError> {
        self.journal.forget(operation, None).await
    }

    /// The name of the operation. See [`OperationSpec`].
    pub fn operation(mut self, name: impl Into<String>) -> SendOptions {
        self.operation.name = Some(name.into());
        self
    }

    /// How the key of a new operation is made; a random UUID by default.
    pub fn key_generator(mut self, mint: KeyGenerator) -> SendOptions {
        self.operation.key_generator = Some(mint);
        self
    }

    /// The header that carries the key; `Idempotency-Key` by default, `X-Idempotency-Key` at some servers.
    pub fn header(self, header: HeaderName) -> SendOptions {
        SendOptions { header, ..self }
    }

    /// When to try again, and how often.
    pub fn schedule(self, schedule: Schedule) -> SendOptions {
        SendOptions { schedule, ..self }
    }

    /// Whether to retry answers such as 500 too. A server that does not remember them runs the operation again; off by default.
    pub fn retry_5xx(self, retry_5xx: bool) -> SendOptions {
        SendOptions { retry_5xx, ..self }
    }

    /// How long one attempt may take, its whole answer included; 90 s by default. Longer than the server's own time-out, or
    /// its answer is only seen by the next attempt.
    pub fn attempt_timeout(self, attempt_timeout: Duration) -> SendOptions {
        SendOptions { attempt_timeout, ..self }
    }

    /// How long everything may take together. Without one, the schedule and the time of an attempt are the bounds.
    pub fn deadline(self, deadline: Duration) -> SendOptions {
        SendOptions { deadline: Some(deadline), ..self }
    }

    /// The longest `Retry-After` that is waited for; 60 s by default. A server that asks for more ends the call instead.
    pub fn max_retry_after(self, max_retry_after: Duration) -> SendOptions {
        SendOptions { max_retry_after, ..self }
    }

    /// How long the server remembers a key (its `ttl`); 24 h by default. For that long the key of an operation that has
    /// succeeded is kept. One that was begun longer ago and has not ended is not sent again: the server may take it for a
    /// new one.
    pub fn server_ttl(self, lifetime: Duration) -> SendOptions {
        SendOptions { server_ttl: lifetime, ..self }
    }

    /// Answers up to this size are read to their end before the operation counts as ended, so that one that breaks off is asked
    /// for again; 1 MiB by default. Larger ones, and event streams, are handed on as they come.
    pub fn max_response(self, max_answer: usize) -> SendOptions {
        SendOptions { max_response: max_answer, ..self }
    }
}
