//! Batches the calls of many callers into one statement.
//!
//! A call is sent at once if no batch is under way. Otherwise calls gather until a batch returns, and another batch is sent
//! beside it only for many of them or if it takes long: each statement costs the server as much as ten rows. The claims and
//! completions of a batch are one set-based statement, and so one transaction and one flush; what it leaves goes on to the
//! functions that decide row by row, and so do releases, parks and extensions.
//!
//! Invariants: every job is answered exactly once; a job that queued until its deadline is near is not sent; a batch is
//! sorted by address, so that batches do not deadlock; a batch that the server rolled back is sent again one job at a time,
//! so no job fails because of another; a job whose row is locked by another transaction is retried until its deadline,
//! without delaying others.

use std::collections::VecDeque;

use tokio::sync::oneshot;

use super::{
    rows::{ClaimedRow, CompleteColumns, LeaseColumns, SettlementColumns},
    statements::CLAIM_PARAMS,
    *,
};

/// Maximum number of jobs in one statement.
const MAX_BATCH_ROWS: usize = 64;
/// Maximum bytes of records in one statement, unless a single record is larger.
const MAX_BATCH_BYTES: usize = 1 << 20;
/// A batch is sent beside others only if it has more jobs than this for each of them.
const MIN_PARALLEL_ROWS: usize = 32;
/// How long a batch makes further jobs gather.
const MAX_GATHER_TIME: Duration = Duration::from_millis(5);
/// Backoff between attempts at a row that another transaction has locked.
const INITIAL_BACKOFF: Duration = Duration::from_millis(4);
const MAX_BACKOFF: Duration = Duration::from_millis(100);

pub(super) struct Batcher {
    pool: Arc<PostgresPool>,
    queue: Mutex<BatchQueue>,
}

#[derive(Debug, Default)]
struct BatchQueue {
    jobs: VecDeque<BatchJob>,
    worker_count: usize,
    /// Workers whose batch is not under way for longer than [`MAX_GATHER_TIME`].
    prompt_count: usize,
}

type JobOutcome = Result<RowOutcome, StoreError>;
/// `None` for a job that a statement left.
type JobOutcomes = Vec<Option<JobOutcome>>;

const APPLIED: JobOutcome = Ok(RowOutcome { settle_code: 0, outcome: None });

#[derive(Debug)]
struct BatchJob {
    lease: Lease,
    operation: RowOperation,
    deadline: Instant,
    reply: oneshot::Sender<JobOutcome>,
}

impl Batcher {
    pub(super) fn new(pool: Arc<PostgresPool>) -> Arc<Self> {
        Arc::new(Self { pool, queue: Mutex::default() })
    }

    /// Queues a call, and waits for its result.
    pub(super) async fn call(self: &Arc<Self>, lease: Lease, what: RowOperation) -> Result<RowOutcome, StoreError> {
        let (reply, answered) = oneshot::channel();
        let job = BatchJob { lease, operation: what, deadline: self.pool.deadline(), reply };
        self.change_queue(|queue| queue.jobs.push_back(job));
        // The worker answers every job, unless the runtime shuts down; the outcome is then unknown.
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
            tokio::spawn(self.clone().run_worker());
        }
    }

    async fn run_worker(self: Arc<Self>) {
        loop {
            let batch = {
                let mut queue = self.queue.lock();
                let is_due = queue.is_worth_a_batch(queue.prompt_count - 1);
                let batch = if is_due { queue.next_batch(self.pool.timeout / 4) } else { Vec::new() };
                if batch.is_empty() {
                    queue.worker_count -= 1;
                    queue.prompt_count -= 1;
                    return;
                }
                batch
            };
            let (together, special): (Vec<_>, Vec<_>) = batch.into_iter().partition(BatchJob::is_set_based);
            let (claims, settlements) = special.into_iter().partition(BatchJob::is_claim);
            let sent = async {
                let special = async { tokio::join!(self.send_one_by_one(claims), self.send_one_by_one(settlements)) };
                tokio::join!(self.send_together(together), special)
            };
            tokio::pin!(sent);
            if timeout(MAX_GATHER_TIME, sent.as_mut()).await.is_err() {
                self.change_queue(|queue| queue.prompt_count -= 1);
                sent.await;
                self.queue.lock().prompt_count += 1;
            }
        }
    }

    /// Sends claims and completions as one statement, and what it leaves row by row.
    async fn send_together(self: &Arc<Self>, batch: Vec<BatchJob>) {
        let (claims, completions): (Vec<_>, Vec<_>) = batch.into_iter().partition(BatchJob::is_claim);
        let sent = match (claims.is_empty(), completions.is_empty()) {
            (true, true) => return,
            (true, false) => self.complete_together(&completions).await.map(|outcomes| (Vec::new(), outcomes)),
            _ => self.claim_together(&claims, &completions).await,
        };
        match sent {
            Ok((claimed, completed)) => {
                let claims = self.send_one_by_one(reply_and_keep_left(claims, claimed));
                let completions = self.send_one_by_one(reply_and_keep_left(completions, completed));
                tokio::join!(claims, completions);
            }
            // A server that accepts no writes can still replay.
            Err(failed) if failed.was_rolled_back || failed.error.kind == ErrorKind::Rejected => {
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

    /// Sends claims, or settlements.
    async fn send_one_by_one(self: &Arc<Self>, batch: Vec<BatchJob>) {
        if batch.is_empty() {
            return;
        }
        match self.try_one_by_one(&batch).await {
            Ok(answers) => {
                for (job, answer) in batch.into_iter().zip(answers) {
                    drop(job.reply.send(answer));
                }
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
            return drop(job.reply.send(answer));
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
                    *outcome = Some(Ok(RowOutcome { settle_code: -1, outcome: Some(found) }));
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
    let mut left = Vec::new();
    for (job, outcome) in batch.into_iter().zip(outcomes) {
        match outcome {
            Some(outcome) => drop(job.reply.send(outcome)),
            None => left.push(job),
        }
    }
    left
}

fn deadline_of<'a>(batch: impl Iterator<Item = &'a BatchJob>) -> Instant {
    batch.map(|job| job.deadline).min().expect("no batch is empty")
}

fn fail_all(batch: Vec<BatchJob>, error: &StoreError) {
    for job in batch {
        drop(job.reply.send(Err(store_error(error.kind, error.source.to_string()))));
    }
}

impl BatchJob {
    fn is_claim(&self) -> bool {
        matches!(self.operation, RowOperation::Claim)
    }

    /// Whether almost every such job needs no more than the set-based statement.
    fn is_set_based(&self) -> bool {
        match &self.operation {
            RowOperation::Claim => self.lease.request.take_over.is_none(),
            RowOperation::Settle(end) => {
                matches!(end, Settlement::Complete { .. }) && self.lease.fence != Fence::UNSEEN
            }
            RowOperation::Extend(_) => false,
        }
    }
}

impl BatchQueue {
    /// Whether the jobs are enough for a batch beside so many others.
    fn is_worth_a_batch(&self, others: usize) -> bool {
        self.jobs.len() > others * MIN_PARALLEL_ROWS
    }

    /// Takes the next batch from the queue. Fails jobs whose deadline is near, and drops jobs whose caller is gone.
    fn next_batch(&mut self, at_least: Duration) -> Vec<BatchJob> {
        let latest = Instant::now() + at_least;
        let (mut batch, mut bytes) = (Vec::new(), 0);
        while batch.len() < MAX_BATCH_ROWS {
            let Some(job) = self.jobs.front() else { break };
            let size = match &job.operation {
                RowOperation::Settle(Settlement::Complete { record, .. }) => record.len(),
                _ => 0,
            };
            let is_due = job.deadline <= latest;
            if !is_due && !batch.is_empty() && bytes + size > MAX_BATCH_BYTES {
                break;
            }
            let Some(job) = self.jobs.pop_front() else { break };
            if is_due {
                let why = "it waited for its turn for too long, behind others";
                drop(job.reply.send(Err(store_error(ErrorKind::NotApplied, why))));
            } else if !job.reply.is_closed() {
                bytes += size;
                batch.push(job);
            }
        }
        if self.jobs.is_empty() && self.jobs.capacity() > 4 * MAX_BATCH_ROWS {
            drop(mem::take(&mut self.jobs));
        }
        batch.sort_by_key(|job: &BatchJob| job.lease.request.address);
        batch
    }
}

#[cfg(test)]
mod tests {
    use ibid::store::{ClaimToken, Fingerprint, Tags};

    use super::*;

    fn job() -> BatchJob {
        let request = Arc::new(ClaimRequest {
            address: Address([1; 32]),
            token: ClaimToken::mint(),
            fingerprint: Fingerprint::NONE,
            tags: Tags::default(),
            label: Bytes::new(),
            lease: Duration::from_secs(1),
            ttl: Duration::from_secs(1),
            take_over: None,
        });
        let deadline = Instant::now() + Duration::from_secs(60);
        BatchJob {
            lease: Lease::unseen(&request),
            operation: RowOperation::Claim,
            deadline,
            reply: oneshot::channel().0,
        }
    }

    #[tokio::test]
    async fn a_single_job_is_sent_at_once_and_further_jobs_gather_while_a_batch_is_under_way() {
        let mut queue = BatchQueue::default();
        assert!(!queue.is_worth_a_batch(0), "there is no job");
        queue.jobs.push_back(job());
        assert!(queue.is_worth_a_batch(0) && !queue.is_worth_a_batch(1));
        queue.jobs.extend((1..MIN_PARALLEL_ROWS).map(|_| job()));
        assert!(!queue.is_worth_a_batch(1));
        queue.jobs.push_back(job());
        assert!(queue.is_worth_a_batch(1) && !queue.is_worth_a_batch(2));
    }
}
