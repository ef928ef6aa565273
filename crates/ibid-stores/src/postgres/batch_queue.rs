//! Calls that wait for their batch, and when they are worth one.

use std::collections::VecDeque;

use super::{replies::JobReply, *};

/// Maximum number of jobs in one statement.
const MAX_BATCH_ROWS: usize = 64;
/// Maximum bytes of records in one statement, unless a single record is larger.
const MAX_BATCH_BYTES: usize = 1 << 20;
/// A batch is sent beside others only if it has more jobs than this for each of them.
const MIN_PARALLEL_ROWS: usize = 32;
/// The same while batches only read: then a further statement costs less.
const MIN_PARALLEL_READS: usize = 16;
/// Number of claims from which a batch tells whether the next one reads first.
const MIN_PREDICTING_CLAIMS: usize = 4;

#[derive(Debug, Default)]
pub(super) struct BatchQueue {
    pub(super) jobs: VecDeque<BatchJob>,
    pub(super) worker_count: usize,
    /// Workers whose batch is not under way for longer than `batcher::MAX_GATHER_TIME`.
    pub(super) prompt_count: usize,
    /// Whether the last batch was mostly replays: then the next one reads before it claims.
    expects_replays: bool,
}

#[derive(Debug)]
pub(super) struct BatchJob {
    pub(super) lease: Lease,
    pub(super) operation: RowOperation,
    pub(super) deadline: Instant,
    pub(super) reply: JobReply,
}

impl BatchJob {
    pub(super) fn is_claim(&self) -> bool {
        matches!(self.operation, RowOperation::Claim)
    }

    /// Whether almost every such job needs no more than the set-based statement.
    pub(super) fn is_set_based(&self) -> bool {
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
    pub(super) fn is_worth_a_batch(&self, others: usize) -> bool {
        let min_rows = if self.expects_replays { MIN_PARALLEL_READS } else { MIN_PARALLEL_ROWS };
        self.jobs.len() > others * min_rows
    }

    /// Whether a batch of so many claims reads first.
    pub(super) fn reads_first(&self, claims: usize) -> bool {
        self.expects_replays && claims >= MIN_PREDICTING_CLAIMS
    }

    /// Notes how many of a batch's claims found an answer. A few say nothing about the next ones.
    pub(super) fn note_replays(&mut self, replays: usize, claims: usize) {
        if claims >= MIN_PREDICTING_CLAIMS {
            self.expects_replays = replays * 4 >= claims * 3;
        }
    }

    /// Takes the next batch from the queue. Fails jobs whose deadline is near, and drops jobs whose caller is gone.
    pub(super) fn next_batch(&mut self, at_least: Duration) -> Vec<BatchJob> {
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
                job.reply.send(Err(store_error(ErrorKind::NotApplied, why)));
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
        BatchJob { lease: Lease::unseen(&request), operation: RowOperation::Claim, deadline, reply: JobReply::new().0 }
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

    #[tokio::test]
    async fn a_batch_reads_first_after_one_of_mostly_replays() {
        let mut queue = BatchQueue::default();
        assert!(!queue.reads_first(64), "nothing is known yet");
        queue.note_replays(24, 32);
        assert!(queue.reads_first(4) && !queue.reads_first(3));
        queue.jobs.extend((0..=MIN_PARALLEL_READS).map(|_| job()));
        assert!(queue.is_worth_a_batch(1));
        queue.note_replays(0, 3);
        assert!(queue.reads_first(4), "three claims say nothing");
        queue.note_replays(23, 32);
        assert!(!queue.reads_first(64) && !queue.is_worth_a_batch(1));
    }
}
