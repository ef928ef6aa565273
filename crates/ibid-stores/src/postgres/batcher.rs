//! Batches the calls of many callers into one statement.
//!
//! While a batch is in flight on every connection, further calls queue up and are sent together. A single call is sent
//! at once. Invariants: every job is answered exactly once; a job that queued until its deadline is near is not sent; a
//! batch that the server rolled back is sent again one job at a time, so no job fails because of another; a job whose
//! row is locked by another transaction is retried until its deadline, without delaying others.

use std::collections::VecDeque;

use tokio::sync::oneshot;

use super::{
    rows::{LeaseColumns, SettlementColumns},
    *,
};

/// Maximum number of jobs in one statement.
const MAX_BATCH_ROWS: usize = 64;
/// Maximum bytes of records in one statement, unless a single record is larger.
const MAX_BATCH_BYTES: usize = 1 << 20;
/// Backoff between attempts at a row that another transaction has locked.
const INITIAL_BACKOFF: Duration = Duration::from_millis(4);
const MAX_BACKOFF: Duration = Duration::from_millis(100);

pub(super) struct Batcher {
    pool: Arc<PostgresPool>,
    statement: Statement,
    queue: Mutex<BatchQueue>,
}

#[derive(Debug, Default)]
struct BatchQueue {
    jobs: VecDeque<BatchJob>,
    worker_count: usize,
}

#[derive(Debug)]
struct BatchJob {
    lease: Lease,
    operation: RowOperation,
    deadline: Instant,
    reply: oneshot::Sender<Result<RowOutcome, StoreError>>,
}

impl Batcher {
    pub(super) fn new(pool: Arc<PostgresPool>, what: Statement) -> Arc<Self> {
        Arc::new(Self { pool, statement: what, queue: Mutex::default() })
    }

    /// Queues a call, and waits for its result.
    pub(super) async fn call(self: &Arc<Self>, lease: Lease, what: RowOperation) -> Result<RowOutcome, StoreError> {
        let (reply, answered) = oneshot::channel();
        let job = BatchJob { lease, operation: what, deadline: self.pool.deadline(), reply };
        let starts = {
            let mut queue = self.queue.lock();
            queue.jobs.push_back(job);
            let starts = queue.worker_count < self.pool.url.pool_size;
            queue.worker_count += usize::from(starts);
            starts
        };
        if starts {
            tokio::spawn(self.clone().run_worker());
        }
        // The worker answers every job, unless the runtime shuts down; the outcome is then unknown.
        let lost = || Err(store_error(ErrorKind::Ambiguous, "the store was closed while the call was under way"));
        answered.await.unwrap_or_else(|_| lost())
    }

    async fn run_worker(self: Arc<Self>) {
        loop {
            let batch = {
                let mut queue = self.queue.lock();
                let batch = queue.next_batch(self.pool.timeout / 4);
                if batch.is_empty() {
                    queue.worker_count -= 1;
                    return;
                }
                batch
            };
            self.send_batch(batch).await;
        }
    }

    async fn send_batch(self: &Arc<Self>, batch: Vec<BatchJob>) {
        match self.try_send_batch(&batch).await {
            Ok(answers) => {
                for (job, answer) in batch.into_iter().zip(answers) {
                    drop(job.reply.send(answer));
                }
            }
            Err(failed) if failed.was_rolled_back && batch.len() > 1 => {
                for job in batch {
                    Box::pin(self.send_batch(vec![job])).await;
                }
            }
            Err(failed) if failed.is_row_conflict => {
                for job in batch {
                    tokio::spawn(self.clone().retry_until_deadline(job));
                }
            }
            Err(CallFailure { error, .. }) => {
                for job in batch {
                    drop(job.reply.send(Err(store_error(error.kind, error.source.to_string()))));
                }
            }
        }
    }

    /// Retries a job until its deadline. That is safe, because a rolled back job was not applied.
    async fn retry_until_deadline(self: Arc<Self>, job: BatchJob) {
        let mut pause = INITIAL_BACKOFF;
        loop {
            sleep(with_jitter(pause)).await;
            pause = (pause * 2).min(MAX_BACKOFF);
            let answered = self.try_send_batch(std::slice::from_ref(&job)).await;
            let has_time = job.deadline > Instant::now() + self.pool.timeout / 4;
            let answer = match answered {
                Err(failed) if failed.is_row_conflict && has_time && !job.reply.is_closed() => continue,
                Err(failed) => Err(failed.error),
                Ok(mut answers) => answers.pop().expect("one job has one answer"),
            };
            return drop(job.reply.send(answer));
        }
    }

    /// Returns the results in the order of the jobs.
    async fn try_send_batch(&self, batch: &[BatchJob]) -> Result<Vec<Result<RowOutcome, StoreError>>, CallFailure> {
        let (mut leases, mut settlements) = (LeaseColumns::default(), SettlementColumns::default());
        for job in batch {
            leases.push(&job.lease);
            match &job.operation {
                RowOperation::Claim => {}
                RowOperation::Extend(hold) => settlements.push(SettlementParams::extend(*hold)),
                RowOperation::Settle(end) => settlements.push(SettlementParams::new(end)),
            }
        }
        let deadline = batch.iter().map(|job| job.deadline).min().expect("no batch is empty");
        let mut params = leases.params();
        params.extend(settlements.params());
        params.truncate(self.statement.param_types().len());
        let sent = self.pool.call(self.statement, &params, deadline).await?;
        let missing = || Err(store_error(ErrorKind::Corrupt, "a row of a batch was not answered"));
        let mut answers: Vec<_> = batch.iter().map(|_| missing()).collect();
        for row in &sent {
            let nth: Result<i32, _> = rows::column(row, 0);
            let nth = nth.ok().and_then(|nth| usize::try_from(nth - 1).ok());
            if let Some((job, answer)) = nth.and_then(|nth| Some((batch.get(nth)?, answers.get_mut(nth)?))) {
                *answer = rows::read_outcome(row, Some(&job.lease.request));
            }
        }
        Ok(answers)
    }
}

impl BatchQueue {
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
        batch
    }
}
