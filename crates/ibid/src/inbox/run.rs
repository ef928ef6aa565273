//! One run of a handler as an engine operation, and the record of a failed run.

use std::{fmt, future::Future, sync::Arc, time::Duration};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::time::{Instant, timeout};

use crate::{
    engine::{Claimant, CompletedAnswer, Operation, RunOutcome, UnknownCause},
    store::{CompletedEntry, Lease},
    time::now_ms,
};

/// The maximum length of a stored error text, in bytes.
const MAX_ERROR_BYTES: usize = 1024;

pub(super) const CRASHED_ERROR: &str = "its handler was never heard of again";

/// The result of the operation. The error itself is in its [`FailureSlot`], which survives a lost claim.
#[derive(Debug)]
pub(super) enum HandlerOutcome {
    Handled,
    Failed,
    TimedOut,
    /// The event had this many runs before.
    Poisoned(u32),
}

/// The handler's error and the number of its run.
pub(super) type FailureSlot<E> = Arc<Mutex<Option<(E, u32)>>>;

pub(super) struct HandlerRun<F, E> {
    pub(super) handler: Option<F>,
    pub(super) timeout: Duration,
    pub(super) poison_after: u32,
    /// The number of earlier runs that do not count.
    pub(super) uncounted_attempts: u32,
    pub(super) failure: FailureSlot<E>,
}

impl<F: Send, E: Send> Claimant for HandlerRun<F, E> {}

impl<F, R, E> Operation for HandlerRun<F, E>
where
    F: FnOnce(u32) -> R + Send,
    R: Future<Output = Result<(), E>> + Send,
    E: fmt::Display + Send,
{
    type Answer = HandlerOutcome;

    async fn run(&mut self, lease: Option<&Lease>) -> RunOutcome<HandlerOutcome> {
        let (started, requested_at_ms) = (Instant::now(), now_ms());
        let forgiven = self.uncounted_attempts;
        let attempt = lease.map_or(1, |lease| lease.attempt.saturating_sub(forgiven));
        let complete = |error: Option<&str>| {
            let record = error.map(|text| FailureRecord::encode(forgiven, text)).unwrap_or_default();
            CompletedAnswer::of_bytes(&record, error.is_some(), requested_at_ms, started)
        };
        if attempt > self.poison_after {
            // All earlier runs ended without a result. A handler that crashes its process must not do so forever.
            return RunOutcome::Complete(HandlerOutcome::Poisoned(attempt - 1), complete(Some(CRASHED_ERROR)));
        }
        let handler = self.handler.take().expect("an event is handled once per delivery");
        match timeout(self.timeout, handler(attempt)).await {
            Err(_) => RunOutcome::Park(HandlerOutcome::TimedOut, UnknownCause::TimedOut),
            Ok(Ok(())) => RunOutcome::Complete(HandlerOutcome::Handled, complete(None)),
            Ok(Err(error)) => {
                let text = error.to_string();
                *self.failure.lock() = Some((error, attempt));
                RunOutcome::Complete(HandlerOutcome::Failed, complete(Some(&text)))
            }
        }
    }
}

impl<O: Operation> Claimant for &mut Option<O> {}

/// Lends an operation to the engine, which takes it when the run starts.
impl<O: Operation> Operation for &mut Option<O> {
    type Answer = O::Answer;

    async fn run(&mut self, lease: Option<&Lease>) -> RunOutcome<O::Answer> {
        self.take().expect("an event is handled once per delivery").run(lease).await
    }
}

/// The record of a failure: the number of runs that do not count (four bytes, big-endian), then the error text.
pub(super) struct FailureRecord {
    pub(super) uncounted_attempts: u32,
    pub(super) attempts: u32,
    pub(super) error: String,
}

impl FailureRecord {
    pub(super) fn encode(forgiven: u32, error: &str) -> Bytes {
        let mut record = forgiven.to_be_bytes().to_vec();
        record.extend_from_slice(&error.as_bytes()[..error.floor_char_boundary(MAX_ERROR_BYTES)]);
        record.into()
    }

    pub(super) fn decode(finished: &CompletedEntry) -> Self {
        // An operator who resolves an entry as failed may write arbitrary bytes.
        let (forgiven, text) = finished.record.split_first_chunk().unwrap_or((&[0; 4], &[]));
        let uncounted_attempts = u32::from_be_bytes(*forgiven).min(finished.attempt);
        let error = String::from_utf8_lossy(text).into_owned();
        Self { uncounted_attempts, attempts: finished.attempt - uncounted_attempts, error }
    }
}
