//! Options shared by all stores that are reached over a network.

use std::time::Duration;

use crate::local_cache::AnswerCache;

/// Options of a remote store that are not part of its URL.
#[derive(Debug, Clone)]
pub struct RemoteOptions {
    /// Prefix of every key name. Redis only.
    pub prefix: String,
    /// Deadline of one call.
    pub timeout: Duration,
    /// Number of replicas that must acknowledge a write before a claim is answered. Redis only.
    pub wait_replicas: u32,
    /// Local cache to keep coherent: the store removes forgotten entries from it, and flushes it after a gap in the
    /// notifications.
    pub answer_cache: Option<AnswerCache>,
}

impl Default for RemoteOptions {
    fn default() -> Self {
        Self { prefix: "idempotency".into(), timeout: Duration::from_millis(500), wait_replicas: 0, answer_cache: None }
    }
}
