//! What every store is opened with that is reached over a network.

use std::time::Duration;

use crate::local_cache::AnswerCache;

/// How a remote store is used, besides its URL.
#[derive(Debug, Clone)]
pub struct RemoteOptions {
    /// What the names of its keys start with, where names are shared with others (Redis).
    pub prefix: String,
    /// The deadline of one call.
    pub timeout: Duration,
    /// How many replicas must have a claim before it is answered (Redis).
    pub wait_replicas: u32,
    /// Copies of its answers in this process: told what was forgotten, flushed when that may have been missed.
    pub answer_cache: Option<AnswerCache>,
}

impl Default for RemoteOptions {
    fn default() -> Self {
        Self { prefix: "idempotency".into(), timeout: Duration::from_millis(500), wait_replicas: 0, answer_cache: None }
    }
}
