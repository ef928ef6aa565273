//! Batches the calls of many callers into one statement.
//!
//! A call is sent at once if no batch is under way. Otherwise calls gather until a batch returns, and another batch is sent
//! beside it only for many of them or if it takes long: each statement costs the server as much as ten rows. The claims and
//! completions of a batch are one set-based statement, and so one transaction and one flush; what it leaves goes on to the
//! functions that decide row by row, and so do releases, parks and extensions. After a batch of mostly replays the next one
//! reads what is completed before it claims the rest: a read costs the server half as much.
//!
//! Invariants: every job is answered exactly once; a job that queued until its deadline is near is not sent; a batch is
//! sorted by address, so that batches do not deadlock; a batch that the server rolled back is sent again one job at a time,
//! so no job fails because of another; a job whose row is locked by another transaction is retried until its deadline,
//! without delaying others.

use std::collections::VecDeque;

use super::{
    batch_queue::{BatchJob, BatchQueue},
    replies::{BatchReplies, JobReply},
    rows::{ClaimedRow, CompleteColumns, LeaseColumns, SettlementColumns},
    statements::CLAIM_PARAMS,
    *,
};

/// How long a batch makes further jobs gather.
const MAX_GATHER_TIME: Duration = Duration::from_millis(5);
/// Backoff between attempts at a row that another transaction has locked.
const INITIAL_BACKOFF: Duration = Duration::from_millis(4);
const MAX_BACKOFF: Duration = Duration::from_millis(100);

pub(super) struct Batcher {
    pool: Arc<PostgresPool>,
    queue: Mutex<BatchQueue>,
}

pub(super) type JobOutcome = Result<RowOutcome, StoreError>;
/// `None` for a job that a statement left.
type JobOutcomes = Vec<Option<JobOutcome>>;

const APPLIED: JobOutcome = Ok(RowOutcome { settle_code: 0, outcome: None });

impl Batcher {
    pub(super) fn new(pool: Arc<PostgresPool>) -> Arc<Self> {
        Arc::new(Self { pool, queue: Mutex::default() })
    }

    /// Queues a call, and waits for its result.
    pub(super) async fn call(self: &Arc<Self>, lease: Lease, what: RowOperation) -> Result<RowOutcome, StoreError> {
        let (reply, answered) = JobReply::new();
        let job = BatchJob { lease, operation: what, deadline: self.pool.deadline(), reply };
        self.change_queue(|queue| queue.jobs.push_back(job));
        // The worker answers every job, unless the store's runtime shuts down; the outcome is then unknown.
        let lost = || Err(store_error(ErrorKind::Ambiguous, "the store was closed while the call was under way"));
        answered.await.unwrap_or_else(|_| lost())
    }

    /// Changes the queue, and starts a worker if it is worth a batch beside those under way.
    fn change_queue(self: &Arc<Self>, change: impl FnOnce(&mut BatchQueue)) {
        let mut queue = self.queue.lock();
        change(&mut queue);
        if queue.worker_count < self.pool.url.pool_size && queue.is_worth_a_batch(queue.prompt_count) {
            queue.worker_count += 1;
            queue.prompt_count += 1;
            drop(queue);
            self.pool.spawn(BatchWorker { batcher: self.clone(), state: WorkerState::Prompt }.run());
        }
    }

    /// Sends claims and completions as one statement, and what it leaves row by row.
    async fn send_together(self: &Arc<Self>, batch: Vec<BatchJob>) {
        let (claims, completions): (Vec<_>, Vec<_>) = batch.into_iter().partition(BatchJob::is_claim);
        let claim_count = claims.len();
        let reads_first = self.queue.lock().reads_first(claim_count);
        let claims = if reads_first { self.replay_completed(claims).await } else { claims };
        let sent = match (claims.is_empty(), completions.is_empty()) {
            (true, true) => return,
            (true, false) => self.complete_together(&completions).await.map(|outcomes| (Vec::new(), outcomes)),
            _ => self.claim_together(&claims, &completions).await,
        };
        match sent {
            Ok((claimed, completed)) => {
                let not_replayed = claimed.iter().filter(|outcome| !is_replay(outcome)).count();
                self.queue.lock().note_replays(claim_count - not_replayed, claim_count);
                let claims = self.send_one_by_one(reply_and_keep_left(claims, claimed));
                let completions = self.send_one_by_one(reply_and_keep_left(completions, completed));
                tokio::join!(claims, completions);
            }
            // A server that accepts no writes can still replay.
            Err(failed) if failed.was_rolled_back || failed.error.kind == ErrorKind::Rejected => {
                if failed.error.kind == ErrorKind::Rejected {
                    self.queue.lock().note_replays(claim_count, claim_count);
                }
                for job in claims.into_iter().chain(completions) {
                    self.send_one_by_one(vec![job]).await;
                }
            }
            Err(failed) => {
                fail_all(claims, &failed.error);
                fail_all(completions, &failed.error);
            }
        }
    }

    /// Replies to the claims that find an answer, by a statement that only reads, and returns the others.
    async fn replay_completed(&self, claims: Vec<BatchJob>) -> Vec<BatchJob> {
        let mut outcomes = no_outcomes(&claims);
        let addresses: Vec<&[u8]> = claims.iter().map(|job| &job.lease.request.address.0[..]).collect();
        match self.pool.call(Statement::Replay, &[&addresses], deadline_of(claims.iter())).await {
            Ok(found) => {
                for row in &found {
                    if let Ok(ClaimedRow::Completed(nth, found)) = rows::read_claimed(row)
                        && let Some(outcome) = outcomes.get_mut(nth)
                    {
                        *outcome = Some(claimed_as(ClaimOutcome::Completed(found)));
                    }
                }
                reply_and_keep_left(claims, outcomes)
            }
            Err(failed) if failed.was_rolled_back => claims,
            Err(failed) => {
                fail_all(claims, &failed.error);
                Vec::new()
            }
        }
    }

    /// Sends claims, or settlements.
    async fn send_one_by_one(self: &Arc<Self>, batch: Vec<BatchJob>) {
        if batch.is_empty() {
            return;
        }
        match self.try_one_by_one(&batch).await {
            Ok(answers) => {
                let mut replies = BatchReplies::default();
                for (job, answer) in batch.into_iter().zip(answers) {
                    replies.add(job.reply, answer);
                }
                replies.send();
            }
            Err(failed) if failed.was_rolled_back && batch.len() > 1 => {
                for job in batch {
                    Box::pin(self.send_one_by_one(vec![job])).await;
                }
            }
            Err(failed) if failed.is_row_conflict => {
                for job in batch {
                    tokio::spawn(self.clone().retry_until_deadline(job));
                }
            }
            Err(failed) => fail_all(batch, &failed.error),
        }
    }

    /// Retries a job until its deadline. That is safe, because a rolled back job was not applied.
    async fn retry_until_deadline(self: Arc<Self>, job: BatchJob) {
        let mut pause = INITIAL_BACKOFF;
        loop {
            sleep(with_jitter(pause)).await;
            pause = (pause * 2).min(MAX_BACKOFF);
            let answered = self.try_one_by_one(std::slice::from_ref(&job)).await;
            let has_time = job.deadline > Instant::now() + self.pool.timeout / 4;
            let answer = match answered {
                Err(failed) if failed.is_row_conflict && has_time && !job.reply.is_closed() => continue,
                Err(failed) => Err(failed.error),
                Ok(mut answers) => answers.pop().expect("one job has one answer"),
            };
            return job.reply.send(answer);
        }
    }

    /// Returns the outcomes in the order of the jobs; `None` for those that the statement left, or that cannot be read.
    async fn complete_together(&self, batch: &[BatchJob]) -> Result<JobOutcomes, CallFailure> {
        let mut outcomes = no_outcomes(batch);
        let columns = complete_columns(batch);
        for row in self.pool.call(Statement::Complete, &columns.params(), deadline_of(batch.iter())).await? {
            if let Some(outcome) = rows::nth_at(&row).ok().and_then(|nth| outcomes.get_mut(nth)) {
                *outcome = Some(APPLIED);
            }
        }
        Ok(outcomes)
    }

    /// As [`complete_together`](Self::complete_together), for claims, and for the completions that go with them.
    async fn claim_together(
        &self, claims: &[BatchJob], completions: &[BatchJob],
    ) -> Result<(JobOutcomes, JobOutcomes), CallFailure> {
        let (mut claimed, mut completed) = (no_outcomes(claims), no_outcomes(completions));
        let mut leases = LeaseColumns::default();
        claims.iter().for_each(|job| leases.push(&job.lease));
        let (mut params, columns) = (leases.params(), complete_columns(completions));
        params.truncate(CLAIM_PARAMS);
        let mut statement = Statement::Claim;
        if !completions.is_empty() {
            params.extend(columns.params());
            statement = Statement::ClaimAndComplete;
        }
        let deadline = deadline_of(claims.iter().chain(completions));
        for row in &self.pool.call(statement, &params, deadline).await? {
            let mut answer = |nth: usize, found| {
                if let Some(outcome) = claimed.get_mut(nth) {
                    *outcome = Some(claimed_as(found));
                }
            };
            match rows::read_claimed(row) {
                Ok(ClaimedRow::Completed(nth, found)) => answer(nth, ClaimOutcome::Completed(found)),
                Ok(ClaimedRow::New(token, fence)) => {
                    // The same call may be there twice.
                    for (nth, job) in claims.iter().enumerate().filter(|(_, job)| job.lease.request.token.0 == *token) {
                        answer(nth, ClaimOutcome::Granted(Lease { fence, attempt: 1, ..job.lease.clone() }));
                    }
                }
                Ok(ClaimedRow::Settled(nth)) => {
                    if let Some(outcome) = completed.get_mut(nth) {
                        *outcome = Some(APPLIED);
                    }
                }
                Err(_) => {}
            }
        }
        Ok((claimed, completed))
    }

    /// Returns the outcomes in the order of the jobs.
    async fn try_one_by_one(&self, batch: &[BatchJob]) -> Result<Vec<JobOutcome>, CallFailure> {
        let (mut leases, mut settlements) = (LeaseColumns::default(), SettlementColumns::default());
        let mut statement = Statement::ClaimOneByOne;
        for job in batch {
            leases.push(&job.lease);
            match &job.operation {
                RowOperation::Claim => continue,
                RowOperation::Extend(hold) => settlements.push(SettlementParams::extend(*hold)),
                RowOperation::Settle(end) => settlements.push(SettlementParams::new(end)),
            }
            statement = Statement::SettleOneByOne;
        }
        let mut params = leases.params();
        params.extend(settlements.params());
        params.truncate(statement.param_types().len());
        let sent = self.pool.call(statement, &params, deadline_of(batch.iter())).await?;
        let missing = || Err(store_error(ErrorKind::Corrupt, "a row of a batch was not answered"));
        let mut answers: Vec<_> = batch.iter().map(|_| missing()).collect();
        for row in &sent {
            let nth = rows::nth_at(row).ok();
            if let Some((job, answer)) = nth.and_then(|nth| Some((batch.get(nth)?, answers.get_mut(nth)?))) {
                *answer = rows::read_outcome(row, Some(&job.lease.request));
            }
        }
        Ok(answers)
    }
}

/// Sends batches until the queue is not worth another one.
struct BatchWorker {
    batcher: Arc<Batcher>,
    state: WorkerState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WorkerState {
    /// Counted in `BatchQueue::prompt_count`.
    Prompt,
    /// Its batch is under way for longer than [`MAX_GATHER_TIME`].
    Late,
    /// No longer counted.
    Ended,
}

impl BatchWorker {
    async fn run(mut self) {
        let batcher = self.batcher.clone();
        while let Some(batch) = self.next_batch() {
            let (together, special): (Vec<_>, Vec<_>) = batch.into_iter().partition(BatchJob::is_set_based);
            let (claims, settlements) = special.into_iter().partition(BatchJob::is_claim);
            let sent = async {
                let special =
                    async { tokio::join!(batcher.send_one_by_one(claims), batcher.send_one_by_one(settlements)) };
                tokio::join!(batcher.send_together(together), special)
            };
            tokio::pin!(sent);
            if timeout(MAX_GATHER_TIME, sent.as_mut()).await.is_err() {
                self.state = WorkerState::Late;
                batcher.change_queue(|queue| queue.prompt_count -= 1);
                sent.await;
                batcher.queue.lock().prompt_count += 1;
                self.state = WorkerState::Prompt;
            }
        }
    }

    /// Takes the next batch, or ends the worker.
    fn next_batch(&mut self) -> Option<Vec<BatchJob>> {
        let mut queue = self.batcher.queue.lock();
        let is_due = queue.is_worth_a_batch(queue.prompt_count - 1);
        let batch = if is_due { queue.next_batch(self.batcher.pool.timeout / 4) } else { Vec::new() };
        if batch.is_empty() {
            queue.worker_count -= 1;
            queue.prompt_count -= 1;
            self.state = WorkerState::Ended;
            return None;
        }
        Some(batch)
    }
}

impl Drop for BatchWorker {
    /// A worker that did not end by itself was dropped by its runtime. If it was the last, nobody would answer the jobs.
    fn drop(&mut self) {
        if self.state == WorkerState::Ended {
            return;
        }
        let mut queue = self.batcher.queue.lock();
        queue.worker_count -= 1;
        queue.prompt_count -= usize::from(self.state == WorkerState::Prompt);
        let unanswered = if queue.worker_count == 0 { mem::take(&mut queue.jobs) } else { VecDeque::new() };
        drop(queue);
        drop(unanswered);
    }
}

fn claimed_as(found: ClaimOutcome) -> JobOutcome {
    Ok(RowOutcome { settle_code: -1, outcome: Some(found) })
}

fn is_replay(outcome: &Option<JobOutcome>) -> bool {
    matches!(outcome, Some(Ok(RowOutcome { outcome: Some(ClaimOutcome::Completed(_)), .. })))
}

fn no_outcomes(batch: &[BatchJob]) -> JobOutcomes {
    batch.iter().map(|_| None).collect()
}

fn complete_columns(batch: &[BatchJob]) -> CompleteColumns<'_> {
    let mut columns = CompleteColumns::default();
    for job in batch {
        if let RowOperation::Settle(end) = &job.operation {
            columns.push((&job.lease, SettlementParams::new(end)));
        }
    }
    columns
}

/// Replies to the jobs that have an outcome, and returns the others.
fn reply_and_keep_left(batch: Vec<BatchJob>, outcomes: JobOutcomes) -> Vec<BatchJob> {
    let (mut replies, mut left) = (BatchReplies::default(), Vec::new());
    for (job, outcome) in batch.into_iter().zip(outcomes) {
        match outcome {
            Some(outcome) => replies.add(job.reply, outcome),
            None => left.push(job),
        }
    }
    replies.send();
    left
}

fn deadline_of<'a>(batch: impl Iterator<Item = &'a BatchJob>) -> Instant {
    batch.map(|job| job.deadline).min().expect("no batch is empty")
}

fn fail_all(batch: Vec<BatchJob>, error: &StoreError) {
    for job in batch {
        job.reply.send(Err(store_error(error.kind, error.source.to_string())));
    }
}
