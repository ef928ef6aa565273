//! One run of a handler, as the engine sees it, and what is remembered of one that failed.

use std::{fmt, future::Future, sync::Arc, time::Duration};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::time::{Instant, timeout};

use crate::{
    engine::{CompletedAnswer, Operation, RunOutcome, UnknownCause},
    store::{CompletedEntry, Lease, RecordSummary},
    time::now_ms,
};

/// What is kept of an error's text.
const MAX_ERROR_BYTES: usize = 1024;

pub(super) const CRASHED_ERROR: &str = "its handler was never heard of again";

/// What the operation did. How it failed is in its slot, which no lost claim takes away.
#[derive(Debug)]
pub(super) enum HandlerOutcome {
    Handled,
    Failed,
    TimedOut,
    /// It was run so often before.
    Poisoned(u32),
}

/// What a handler failed of, and which run it was.
pub(super) type FailureSlot<E> = Arc<Mutex<Option<(E, u32)>>>;

pub(super) struct HandlerRun<F, E> {
    pub(super) handler: Option<F>,
    pub(super) timeout: Duration,
    pub(super) poison_after: u32,
    /// So many runs do not count.
    pub(super) uncounted_attempts: u32,
    pub(super) failure: FailureSlot<E>,
}

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
            let outline =
                RecordSummary { status: 0, requested_at_ms, completed_at_ms: now_ms(), took: started.elapsed() };
            let record = error.map(|text| FailureRecord::encode(forgiven, text)).unwrap_or_default();
            CompletedAnswer { failed: error.is_some(), record, summary: outline }
        };
        if attempt > self.poison_after {
            // All runs before this one ended without a word: a handler that takes its process down must not do so for ever.
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

/// Lends a run to the engine, which takes it when it begins.
pub(super) struct BorrowedOperation<'a, O>(pub(super) &'a mut Option<O>);

impl<O: Operation> Operation for BorrowedOperation<'_, O> {
    type Answer = O::Answer;

    async fn run(&mut self, lease: Option<&Lease>) -> RunOutcome<O::Answer> {
        let mut run = self.0.take().expect("an event is handled once per delivery");
        run.run(lease).await
    }
}

/// What is remembered of a failure: how many runs do not count (four bytes, big-endian), and the error's text.
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
        // Somebody who resolves an entry as failed writes what he likes.
        let (forgiven, text) = finished.record.split_first_chunk().unwrap_or((&[0; 4], &[]));
        let uncounted_attempts = u32::from_be_bytes(*forgiven).min(finished.attempt);
        let error = String::from_utf8_lossy(text).into_owned();
        Self { uncounted_attempts, attempts: finished.attempt - uncounted_attempts, error }
    }
}
